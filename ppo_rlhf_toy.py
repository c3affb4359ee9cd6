# /// script
# requires-python = ">=3.11"
# dependencies = ["tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17",
#   "wandb==0.31.0"]
# ///
"""Reinforcement learning from human feedback (RLHF) with PPO: the whole pipeline in one file.

    python ppo_rlhf_toy.py  # uv run installs what it needs

It takes two minutes on one CPU core and downloads nothing. There are four stages. A tiny GPT learns
to write reviews (supervised fine-tuning, SFT). A simulated labeler compares pairs of its reviews by
the gold reward, which is a formula. A reward model, the proxy, learns from the comparisons. Then
PPO optimizes the proxy, twice: with a KL penalty that keeps the policy near the SFT model and whose
weight beta adapts, and with beta = 0.

So you can measure over-optimization. Means over five seeds, in standard deviations of the SFT
model's reviews: with the penalty gold ends at 1.6 and the proxy at 2.4, with a KL of 6 nats per
response to the SFT model. Without it the proxy rises to 3.6 and the KL to 145, while gold collapses
to -5.3: the reward is hacked. The best possible review has gold 2.5. With `--reward gold` the
formula itself is the reward, and there is nothing to hack. `--compare` adds a fixed beta and
best-of-n sampling. All results are in benchmark/pages/rlhf.md.

A response is an episode, each of its tokens is an action, and all text before it is the state. The
algorithm is that of Ziegler et al. 2019 (arXiv 1909.08593) as released in LHP =
openai/lm-human-preferences@cbfd210b. R1 to R21 are the details of "The N Implementation Details of
RLHF with PPO" (Huang et al. 2023), n/37 those of PPO (ppo2 = openai/baselines@ea25b9e8). Each is a
comment above its line. What is "Copied from" another script is the same there, to the byte: change
it there. Where the article and LHP disagree (R17, R20), this file follows LHP. It
lacks R6 (several processes) and R12 (prompts cut out of running text). Other differences from LHP:
AdamW and several epochs for the reward model, which is normalized on truncated samples; gradient
clipping; a shorter KL horizon. In TRL and OpenRLHF the critic is a network of its own; here, as in
LHP, it shares all layers but the last. Reasoning papers use `--gae-lambda 1 --kl-mode none`.

Shapes: B = responses in a batch, P = tokens of a prompt, R = tokens of a response, L = P + R,
V = size of the vocabulary, D = width of the network; `mb` is a minibatch.
"""

import copy
import dataclasses
import itertools
import json
import math
import random
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import torch
import torch.nn.functional as F
import tyro
from torch import Generator, Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

# === Settings ===

Tensors = dict[str, Tensor]
Metrics = dict[str, float]
Results = dict[str, dict[str, Any]]  # of each model: how it was made, and metrics
Cache = list[list[Tensor]]  # keys and values of each block
StepSize = Annotated[float, tyro.conf.arg(aliases=["--lr"])]
Limits = dict[str, tuple[float, float]]  # the least and the largest value of settings
LIMITS: Limits = {  # others: from 1 to inf if they are counts, else from 0 to 1e9
    "seed": (0, 2**63 - 1),
    "num_pairs": (14, math.inf),  # one in seven is held out
    "temperature": (1e-9, 1e6),  # higher, PAD and BOS would be sampled
    "target_kl": (1e-9, 1e9),
    "gamma": (0, 1),
    "gae_lambda": (0, 1),
    "clip_coef": (0, math.inf),
    "value_clip_coef": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "missing_eos_score": (-1e9, 1e9),
}


# Copied from ppo_continuous_action.py
class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


def check_settings(args: Any, limits: Limits) -> None:
    """Refuse numbers out of their range, unknown choices, and a name that is a path."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        flag = f"--{field.name.replace('_', '-')} ({value})"
        kind = type(field.default)
        low, high = limits.get(field.name, (1, math.inf) if kind is int else (0, 1e9))
        changed = value != field.default  # who edits Args may choose a default that is outside
        if kind in (int, float) and changed and not low <= value <= high:  # or NaN
            raise UsageError(f"{flag} must be from {low} to {high}.")
        choices = Literal[True, False] if kind is bool else field.type
        if get_origin(choices) is Literal and value not in get_args(choices):  # "False" is true
            raise UsageError(f"{flag} must be one of {', '.join(map(str, get_args(choices)))}.")
    name = args.run_name or ""
    if name == ".." or Path(name).name != name:
        raise UsageError(f"--run-name ({name}) must be a name, not a path.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")


@dataclasses.dataclass(frozen=True)
class Args:
    # --- Experiment ---
    seed: int = 1  # random seed of the whole run
    run_name: str | None = None  # folder below runs/; by default script, seed, time
    device: Literal["cpu", "cuda"] = "cpu"  # where to compute; in our tables: cpu
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline: to disk)
    compare: bool = False  # also train with an adaptive and with a fixed beta, and best-of-n

    # --- Supervised fine-tuning ---
    sft_documents: int = 20_000  # reviews that the grammar writes
    sft_steps: int = 700  # gradient steps
    sft_batch_size: int = 64  # documents per gradient step
    sft_learning_rate: float = 3e-3  # AdamW's step size, after a warm-up; falls to 0

    # --- Preferences and reward model ---
    num_pairs: int = 7000  # labeled pairs of responses [LHP: 4992]
    temperature: float = 1.0  # sampling temperature T [LHP: 0.7; 0.5 for CNN/DM]
    reward_epochs: int = 2  # passes over the labeled pairs [LHP: 1]
    reward_batch_size: int = 32  # pairs per gradient step [LHP: 32]
    reward_learning_rate: float = 2e-3  # AdamW's step size; falls to 0 [LHP: 5e-5]

    # --- PPO ---
    reward: Literal["model", "gold"] = "model"  # what is optimized: the reward model or the formula
    kl_mode: Literal["adaptive", "fixed", "none"] = "adaptive"  # how beta is set; none: it is 0
    kl_coef: float = 0.5  # weight of the KL penalty, beta, at the start [LHP: 0.15]
    target_kl: float = 6.0  # KL to the SFT model that an adaptive beta aims at, in nats [LHP: 6]
    kl_horizon: int = 500  # episodes over which beta adapts [LHP: 10000 of 1,000,000]
    num_updates: int = 80  # batches of responses, each followed by an update
    batch_size: int = 128  # responses per update, B [LHP: 512]
    num_minibatches: int = 4  # minibatches per epoch, of whole responses [LHP: 1]
    update_epochs: int = 4  # passes over a batch, K [LHP: 4]
    learning_rate: StepSize = 5e-4  # Adam's step size [LHP: 1e-5, for GPT-2]
    anneal_lr: bool = True  # lower it linearly towards 0, as LHP does
    adam_eps: float = 1e-5  # Adam's epsilon [LHP: 1e-5]
    gamma: float = 1.0  # discount factor [LHP: 1]
    gae_lambda: float = 0.95  # 0: one-step advantages, 1: sums of all rewards [LHP: 0.95]
    clip_coef: float = 0.2  # clip range of the policy ratio, epsilon [LHP: 0.2]
    value_clip_coef: float = 0.2  # clip range of the values [LHP: 0.2; inf: off]
    vf_coef: float = 0.1  # weight of the value loss, half a squared error [LHP: 0.1]
    max_grad_norm: float = 1.0  # maximum norm of the whole gradient [LHP: inf, off]
    reward_whitening: Literal["scale", "restore"] = "scale"  # divide by std; restore mean, as LHP
    mask_after_eos: bool = True  # end episodes at EOS; no: train on all tokens, as LHP does
    missing_eos_score: float = -1.0  # score without EOS, lower than usual scores [LHP: -1]

    def __post_init__(self) -> None:
        check_settings(self, LIMITS)
        if self.batch_size % self.num_minibatches:
            raise UsageError("--num-minibatches must divide --batch-size.")
        adapts = self.kl_mode == "adaptive" or self.compare
        # With a shorter horizon, one adaptation could take beta to 0: it errs by 20 % at most.
        if adapts and (self.kl_coef == 0 or self.kl_horizon <= self.batch_size / 5):
            raise UsageError("To adapt, beta needs --kl-coef > 0, --kl-horizon > --batch-size / 5.")

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(f"runs/{self.run_name}")

    @property
    def ppo_run(self) -> str:
        """Name of the PPO run with these settings, such as ppo-adaptive-6 or ppo-gold-none."""
        name = "ppo-gold" if self.reward == "gold" else "ppo"
        if self.kl_mode == "adaptive":
            return f"{name}-adaptive-{self.target_kl:g}"
        if self.kl_mode == "fixed":
            return f"{name}-fixed-{self.kl_coef:g}"
        return f"{name}-none"


# === The task, as the pipeline sees it ===

PAD, BOS = 0, 1  # padding and beginning of sequence, the first two tokens; neither is ever sampled


class Task(NamedTuple):
    """A language to write in. Here it is the toy reviews, in which each word is a token."""

    vocabulary: list[str]  # the V tokens as text; in tensors a token is an index into it
    documents: Tensor  # (documents, L) tokens for the SFT
    prompts: Tensor  # (prompts, P) tokens, all different
    response_length: int  # R
    eos: int  # the token that ends a response
    earliest_eos: int  # index in a response; before it, EOS is a token like any other
    sample_gold: Tensor | None = None  # raw gold of SFT samples; once set, gold is scaled by it

    def sample_prompts(self, count: int, generator: Generator) -> Tensor:
        """Draw prompts (count, P) with replacement."""
        return self.prompts[torch.randint(len(self.prompts), (count,), generator=generator)]

    def decode(self, tokens: Tensor) -> list[str]:
        """Tokens (length,) as text, without padding."""
        return [self.vocabulary[token] for token in tokens.tolist() if token != PAD]

    def gold(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Gold rewards (B,) of truncated responses (B, R); a prompt's fifth token is the topic."""
        topics = [self.vocabulary[prompt[4]] for prompt in prompts]
        texts = [self.decode(response) for response in responses]
        rewards = [gold_reward(topic, text) for topic, text in zip(topics, texts, strict=True)]
        gold = torch.tensor(rewards, device=prompts.device)
        if self.sample_gold is None:
            return gold
        return (gold - self.sample_gold.mean()) / self.sample_gold.std(correction=0)


def pad_rows(rows: list[list[int]], length: int) -> Tensor:
    """Tokens (rows, length): each row is cut to `length` or filled up with padding."""
    # Detail R2: special padding token, truncated inputs [LHP: language/datasets.py L57-67]
    # Padding is a token that no text contains, and longer rows are cut to the common length.
    return torch.tensor([row[:length] + [PAD] * (length - len(row)) for row in rows])


# === Models ===


class Block(nn.Module):
    """A transformer block: causal self-attention and a two-layer network, each after a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_hidden = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)

    def forward(
        self, x: Tensor, visible: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Process new positions x (B, new, D), which attend where `visible` (B, 1, new, L) is True.

        `past` holds keys and values of the positions before, (B, heads, L - new, D / heads) each,
        or nothing. Returns (B, new, D), and keys and values of all positions.
        """
        batch, new, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, new, 3, self.num_heads, -1)
        query, *key_value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, new, D / heads) each
        if past:
            key_value = [torch.cat(pair, dim=2) for pair in zip(past, key_value, strict=True)]
        # Detail R13: disable dropout [LHP: policy.py L48; rewards.py L43]
        # Without dropout an unchanged policy has the same probabilities again: ratios are 1.
        mixed = F.scaled_dot_product_attention(query, *key_value, visible, dropout_p=0.0)
        x = x + self.attention_output(mixed.transpose(1, 2).reshape(batch, new, width))
        return x + self.mlp_output(F.gelu(self.mlp_hidden(self.mlp_norm(x)))), key_value


class TinyGPT(nn.Module):
    """A causal transformer with tied embeddings and learned positions, about 0.1 M weights."""

    def __init__(self, vocab_size: int, context_length: int, width: int = 64) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=4) for _ in range(2))
        self.final_norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():  # initialized as in GPT-2
            if weight.dim() == 2:
                into_residual = math.sqrt(2 * len(self.blocks)) if "_output" in name else 1.0
                nn.init.normal_(weight, std=0.02 / into_residual)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        never = torch.zeros(vocab_size)
        never[[PAD, BOS]] = -1e9  # finite, so that probability 0 times its logarithm is 0, not NaN
        self.register_buffer("never_sampled", never, persistent=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Read tokens (B, L), of which the first ones may already be in the cache.

        Returns hidden states (B, new, D) of the others, and the cache of all: keys and values of
        each block. The state at padding is that of the last real token before it, so tokens that
        follow a cache must not begin with padding.
        """
        real = tokens != PAD
        length = tokens.shape[1]
        seen = cache[0][0].shape[2] if cache else 0  # tokens in the cache
        # Detail R3: positions skip padding tokens [LHP: language/model.py L265-269]
        # Only real tokens are counted, so padding does not shift the positions of a text.
        positions = real.cumsum(dim=1) - real.long()
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        visible = (causal & real[:, None])[:, None, seen:]  # (B, 1, new, L)
        x = self.token_embedding(tokens[:, seen:]) + self.position_embedding(positions[:, seen:])
        new_cache = []
        for block, past in zip(self.blocks, cache or [[] for _ in self.blocks], strict=True):
            x, key_value = block(x, visible, past)
            new_cache.append(key_value)
        indices = torch.arange(length - seen, device=tokens.device)
        last_real = indices.where(real[:, seen:], 0).cummax(dim=1).values
        return self.final_norm(x.gather(1, last_real[..., None].expand_as(x))), new_cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of the next token from hidden states (..., D)."""
        return F.linear(hidden, self.token_embedding.weight, self.never_sampled)


class RewardModel(nn.Module):
    """A language model with a scalar head in place of the logits."""

    def __init__(self, language_model: TinyGPT) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(language_model)
        width = self.trunk.token_embedding.embedding_dim
        self.head = nn.Linear(width, 1)
        # Detail R8: reward head initialization [LHP: language/model.py L251-254]
        # Features are normalized, so weights of this size give scores of order 1.
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(width + 1))
        nn.init.zeros_(self.head.bias)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def score(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Scores (B,) of truncated responses (B, R) to prompts (B, P)."""
        hidden, _ = self.trunk(torch.cat([prompts, responses], dim=1))
        rewards = self.gain * self.head(hidden).squeeze(-1) + self.bias  # (B, L)
        # Detail R7: reward only at the last token [LHP: rewards.py L47, L132]
        # A text is scored when it is complete; `forward` repeats its last state at padding.
        return rewards[:, -1]


class Agent(nn.Module):
    """A policy, which is a language model at a sampling temperature, and a value function."""

    def __init__(self, language_model: TinyGPT, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.policy = language_model
        self.value_head = nn.Linear(self.policy.token_embedding.embedding_dim, 1)
        # Detail R11: value head initialization [LHP: language/model.py L368]
        # Values start at 0, so the first advantages come from rewards and not from random guesses.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @torch.no_grad()
    def sample_responses(self, prompts: Tensor, length: int, generator: Generator) -> Tensor:
        """Continue prompts (B, P) by `length` tokens sampled from the policy: (B, length)."""
        tokens, cache = prompts, None
        # Detail R4: fixed-length responses without padding [LHP: language/sample.py L43-79]
        # Sampling does not stop at EOS; `truncate_responses` cuts the responses afterwards.
        for _ in range(length):
            hidden, cache = self.policy(tokens, cache)
            logits = self.policy.logits(hidden[:, -1]) / self.temperature  # as Detail R10
            # The token with the largest sum of logit and Gumbel noise is a sample of the softmax.
            gumbel = -torch.empty(logits.shape).exponential_(generator=generator).log()
            sampled = (logits + gumbel.to(logits.device)).argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, sampled], dim=1)
        return tokens[:, -length:]

    def get_logprobs_and_values(self, prompts: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate responses (B, R) to prompts (B, P), position by position.

        Returns log-probabilities (B, R, V) of all tokens, and values (B, R) before each token.
        """
        # Detail R1: prompt and response concatenated [LHP: policy.py L114-126; rewards.py L105]
        # What a token is worth depends on the prompt and on the tokens before it.
        hidden, _ = self.policy(torch.cat([prompts, responses], dim=1))
        before = slice(prompts.shape[1] - 1, -1)  # a token is predicted one position earlier
        # Detail R10: logits scaled by the temperature (temperature) [LHP: policy.py L121]
        # The probabilities must be those that the tokens were sampled with.
        logits = self.policy.logits(hidden[:, before]) / self.temperature
        # Detail 13/37: shared or separate networks [ppo2: common/policies.py L156-166]
        # Policy and value share all layers but the last, because both must understand the text.
        return logits.log_softmax(dim=-1), self.value_head(hidden).squeeze(-1)[:, before]


# === The math: pure functions ===


def masked_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets (B, R) of responses (Schulman et al. 2016).

    Outside of `mask` advantages are 0, and targets mean nothing.
    Nothing follows the last token of a response: it has neither a next value nor a next advantage.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = 0.0
    # Detail 5/37, R15: GAE with discount factor 1 (gamma) [LHP: train_policy.py L327-336]
    # A response is judged as a whole, so late rewards count as much as early ones.
    for t in reversed(range(rewards.shape[1])):
        td_error = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (td_error + gamma * gae_lambda * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


# Copied from ppo_continuous_action.py
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar."""
    ratio = logratio.exp()  # how much more likely the actions are than under the old policy
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples only tell us about policies close to the old one, so moving further earns nothing.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


def token_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the mean squared error of the values, a scalar; all arguments are (tokens,)."""
    # Detail 9/37, R19: clipped value loss (value_clip_coef) [LHP: train_policy.py L343-348]
    # One batch should not move values far. Values need a different range than ratios.
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    errors = torch.max((values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """Unbiased estimate k3 of KL(old || new): mean(r - 1 - log r), r = new/old (Schulman 2020)."""
    return (logratio.exp() - 1 - logratio).mean()


def truncate_responses(responses: Tensor, eos: int, earliest_eos: int) -> tuple[Tensor, Tensor]:
    """Cut responses (B, R) after their first EOS at index `earliest_eos` or later.

    Returns them with padding after that EOS, and whether there was one (B,).
    """
    ends = responses == eos
    ends[:, :earliest_eos] = False
    ends_before = ends.cumsum(dim=1) - ends.long()
    return responses.where(ends_before == 0, PAD), ends.any(dim=1)


def log_probability(all_logprobs: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities (B, R) of the tokens of responses, given those of all tokens (B, R, V)."""
    return all_logprobs.gather(-1, responses[..., None]).squeeze(-1)


def whiten(x: Tensor, mean: Literal["zero", "restore", "scale"]) -> Tensor:
    """Scale to standard deviation 1, population form [LHP: utils/core.py L336-341].

    The mean becomes 0 ("zero"), stays ("restore": a reward of 0 is then no longer 0) or is scaled
    too ("scale"). The epsilon is inside the root, unlike in detail 7 of the 37.
    """
    center = 0.0 if mean == "scale" else x.mean()
    white = (x - center) * torch.rsqrt(x.var(correction=0) + 1e-8)
    return white + center if mean == "restore" else white


def proportional_kl_coef(
    kl_coef: float, kl: float, target_kl: float, num_episodes: int, horizon: int
) -> float:
    """Move beta in proportion to the relative error of the KL, clipped to 20 % (Ziegler et al.).

    `kl` is KL(policy || reference) in nats per response, the mean over `num_episodes` responses.
    """
    error = min(max(kl / target_kl - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_episodes / horizon)


# === Stage 1: supervised fine-tuning ===


def train_sft(args: Args, model: TinyGPT, task: Task) -> None:
    """Train a language model on the task's documents."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = stage_generator(args, "sft")
    writer = SummaryWriter(str(args.run_dir / "sft"), purge_step=1)
    for step in trange(1, args.sft_steps + 1, desc="sft", disable=None):
        decay = (1 - (step - 1) / args.sft_steps) * min(1.0, step / 50)  # warm-up of 50 steps
        optimizer.param_groups[0]["lr"] = decay * args.sft_learning_rate
        chosen = torch.randint(len(task.documents), (args.sft_batch_size,), generator=generator)
        documents = task.documents[chosen]  # (sft_batch_size, L)
        hidden, _ = model(documents[:, :-1])
        real = documents[:, 1:] != PAD
        loss = F.cross_entropy(model.logits(hidden[real]), documents[:, 1:][real])
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics = {"losses/loss": loss.item(), "losses/grad_norm": grad_norm.item()}
        check_metrics(metrics, step)
        log(writer, step, metrics)
    writer.close()
    model.eval()  # from here on without dropout, if you add it: see Detail R13


# === Stage 2: preferences ===

LABEL_NOISE = 0.4  # difference in unscaled gold at which the better text wins with odds e : 1
NUM_SAMPLES = 2000  # SFT samples that set the scale of gold, and of a reward model
HELD_OUT = 7  # one pair in seven is held out


class Pairs(NamedTuple):
    """Truncated responses, of which a labeler prefers one to the other."""

    prompts: Tensor  # (pairs, P)
    chosen: Tensor  # (pairs, R)
    rejected: Tensor  # (pairs, R)


class Preferences(NamedTuple):
    """Labeled pairs, and samples of the SFT model."""

    learned: Pairs
    held_out: Pairs  # for the evaluation: nothing learns from them
    sample_prompts: Tensor  # (NUM_SAMPLES, P)
    samples: Tensor  # (NUM_SAMPLES, R), truncated
    sample_gold: Tensor  # (NUM_SAMPLES,)


def make_preferences(args: Args, reference: Agent, task: Task) -> Preferences:
    """Sample pairs of responses from the SFT model, and label them."""
    generator = stage_generator(args, "preferences")
    prompts = task.sample_prompts(args.num_pairs, generator)
    first = sample_truncated(reference, task, prompts, generator)
    second = sample_truncated(reference, task, prompts, generator)
    # The simulated labeler (Bradley-Terry) errs less often the more two texts differ in gold.
    difference = task.gold(prompts, first) - task.gold(prompts, second)
    probability = torch.sigmoid(difference / LABEL_NOISE)
    drawn = torch.rand(len(prompts), generator=generator).to(prompts.device)
    prefers_first = (drawn < probability)[:, None]
    chosen = torch.where(prefers_first, first, second)
    rejected = torch.where(prefers_first, second, first)
    pairs = Pairs(prompts, chosen, rejected)
    num_learned = args.num_pairs - args.num_pairs // HELD_OUT
    learned = Pairs(*(x[:num_learned] for x in pairs))
    held_out = Pairs(*(x[num_learned:] for x in pairs))
    sample_prompts = task.sample_prompts(NUM_SAMPLES, generator)
    samples = sample_truncated(reference, task, sample_prompts, generator)
    sample_gold = task.gold(sample_prompts, samples)
    return Preferences(learned, held_out, sample_prompts, samples, sample_gold)


def of_different_texts(pairs: Pairs) -> Pairs:
    """The pairs of two different texts. About the others, nobody can be right."""
    differs = (pairs.chosen != pairs.rejected).any(dim=1)
    if not differs.any():
        hint = "raise --temperature or --num-pairs"
        raise UsageError(f"In each pair that is held out, both texts are the same: {hint}.")
    return Pairs(*(x[differs] for x in pairs))


# === Stage 3: reward model ===


def normalize_reward_model(model: RewardModel, prompts: Tensor, samples: Tensor) -> None:
    """Set gain and bias so that scores of the SFT samples have mean 0 and standard deviation 1."""
    # Training has changed gain and bias. Without them the scores are those of the head alone.
    nn.init.ones_(model.gain)
    nn.init.zeros_(model.bias)
    scores = score_texts(model, prompts, samples)
    mean, std = scores.mean().item(), scores.std(correction=0).item()
    if std == 0:
        raise UsageError("All samples of the SFT model have the same score: raise --temperature.")
    # Detail R9: normalization before and after training [LHP: train_reward.py L232-254]
    # SFT samples then score 0 on average, with std 1, so beta means the same for any reward model.
    nn.init.constant_(model.gain, 1 / std)
    nn.init.constant_(model.bias, -mean / std)


def train_reward_model(args: Args, model: RewardModel, preferences: Preferences) -> Metrics:
    """Train a model to score the chosen texts above the rejected ones; return its quality."""
    pairs = preferences.learned
    prompts, samples = preferences.sample_prompts, preferences.samples
    normalize_reward_model(model, prompts, samples)
    minibatches: list[Tensor] = []
    for epoch in range(args.reward_epochs):
        # With more epochs, the first ones stay the same.
        generator = stage_generator(args, f"reward-model epoch {epoch}")
        order = torch.randperm(len(pairs.prompts), generator=generator)
        minibatches += order.split(args.reward_batch_size)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    writer = SummaryWriter(str(args.run_dir / "reward_model"), purge_step=1)
    for step, indices in enumerate(tqdm(minibatches, "reward model", disable=None), start=1):
        decay = 1 - (step - 1) / len(minibatches)  # as Detail R5
        optimizer.param_groups[0]["lr"] = args.reward_learning_rate * decay
        mb = Pairs(*(x[indices] for x in pairs))
        scores = model.score(
            torch.cat([mb.prompts, mb.prompts]), torch.cat([mb.chosen, mb.rejected])
        )
        good, bad = scores.chunk(2)
        loss = -F.logsigmoid(good - bad).mean()  # Bradley-Terry [LHP: softmax over four]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"losses/loss": loss.item()}
        check_metrics(metrics, step)
        log(writer, step, metrics)
    writer.close()
    model.eval()
    normalize_reward_model(model, prompts, samples)

    judged = of_different_texts(preferences.held_out)
    good = score_texts(model, judged.prompts, judged.chosen)
    bad = score_texts(model, judged.prompts, judged.rejected)
    scores_and_gold = torch.stack([score_texts(model, prompts, samples), preferences.sample_gold])
    return {
        "accuracy": (good > bad).float().mean().item(),
        "correlation": torch.corrcoef(scores_and_gold)[0, 1].item(),
        "same_text_left_out": len(preferences.held_out.prompts) - len(judged.prompts),
    }


# === Stage 4: PPO ===


class Rollout(NamedTuple):
    """A batch of responses and what the update needs; entries outside `mask` are ignored."""

    prompts: Tensor  # (B, P)
    responses: Tensor  # (B, R)
    logprobs: Tensor  # (B, R), under the policy that sampled them
    values: Tensor  # (B, R)
    rewards: Tensor  # (B, R)
    mask: Tensor  # (B, R), True at the tokens of the episode


class Judges(NamedTuple):
    """What the responses are judged by."""

    task: Task  # knows the gold reward
    reward_model: RewardModel  # the proxy
    reference: Agent  # the SFT model


def score_responses(
    args: Args, judges: Judges, prompts: Tensor, kept: Tensor, ended: Tensor
) -> tuple[Tensor, Metrics]:
    """Scores (B,) of truncated responses (B, R), which the update maximizes, and metrics."""
    proxy = judges.reward_model.score(prompts, kept)
    earned = judges.task.gold(prompts, kept) if args.reward == "gold" else proxy
    # Detail R14: a penalty for a missing EOS (missing_eos_score) [LHP: lm_tasks.py L39-65]
    # A text without an end gets a fixed low score. LHP calls this rejection sampling.
    scores = earned.where(ended, args.missing_eos_score)
    metrics = {
        **describe(judges.task, prompts, kept),
        "objective/proxy": proxy.mean().item(),
        "objective/score": scores.mean().item(),
        "objective/score_std": scores.std(correction=0).item(),
    }
    return scores, metrics


@torch.no_grad()
def collect(
    args: Args, agent: Agent, judges: Judges, count: int, kl_coef: float, generator: Generator
) -> tuple[Rollout, Metrics]:
    """Sample `count` responses. Return them, their rewards with the KL penalty, and metrics."""
    task = judges.task
    prompts = task.sample_prompts(count, generator)
    # Detail 1/37: vectorized architecture (batch_size) [ppo2/runner.py L26-42]
    # All responses of a batch grow together, by one forward pass per token.
    sampled = agent.sample_responses(prompts, task.response_length, generator)
    kept, ended = truncate_responses(sampled, task.eos, task.earliest_eos)
    scores, metrics = score_responses(args, judges, prompts, kept, ended)
    # Deviation: an episode ends at EOS (mask_after_eos)
    # Tokens after it are neither rewarded nor learned from; LHP learns from all of them.
    responses = kept if args.mask_after_eos else sampled
    mask = responses != PAD  # which is never sampled
    last = mask & ~F.pad(mask[:, 1:], (0, 1))  # the last token of each response

    all_logprobs, values = agent.get_logprobs_and_values(prompts, responses)
    ref_all_logprobs, _ = judges.reference.get_logprobs_and_values(prompts, responses)
    logprobs = log_probability(all_logprobs, responses)
    # Two estimates of the KL to the reference: k1 uses the sampled tokens only and may be negative;
    # the other (Rao-Blackwell) is exact at each position and averages over the sampled texts only.
    kl = logprobs - log_probability(ref_all_logprobs, responses)
    exact_kl = (all_logprobs.exp() * (all_logprobs - ref_all_logprobs)).sum(-1)
    # Detail R17: per-token KL penalty (kl_coef) [LHP: train_policy.py L149-155]
    # Each token pays for its own log-ratio (the article omits the minus); the last gets the score.
    rewards = -kl_coef * kl + scores[:, None] * last
    metrics["objective/kl"] = kl.where(mask, 0.0).sum(1).mean().item()
    metrics["objective/kl_exact"] = exact_kl.where(mask, 0.0).sum(1).mean().item()
    return Rollout(prompts, responses, logprobs, values, rewards, mask), metrics


def ppo_loss(agent: Agent, mb: Rollout, args: Args) -> tuple[Tensor, Tensors]:
    """PPO's loss on a minibatch of whole responses, and the debug variables.

    As in LHP, rewards and advantages are scaled in each minibatch, so advantages are computed here.
    """
    # The mask selects before anything is averaged, so padding cannot leak in.
    mask = mb.mask
    rewards = torch.zeros_like(mb.rewards)
    # Deviation: rewards are scaled, their mean is not restored (reward_whitening)
    # This keeps 0 at 0. Restoring the mean, as LHP does, would reward or charge every extra token.
    rewards[mask] = whiten(mb.rewards[mask], args.reward_whitening)
    advantages, returns = masked_gae(rewards, mb.values, mask, args.gamma, args.gae_lambda)
    advantages, returns = advantages[mask], returns[mask]  # (tokens,)
    # Detail R18: per-minibatch whitening, of rewards too [LHP: train_policy.py L324-338]
    # The size of a step should not depend on the scale of rewards or advantages.
    white_advantages = whiten(advantages, "zero")

    all_logprobs, new_values = agent.get_logprobs_and_values(mb.prompts, mb.responses)
    logratio = (log_probability(all_logprobs, mb.responses) - mb.logprobs)[mask]
    pg_loss = policy_loss(logratio, white_advantages, args.clip_coef)
    v_loss = token_value_loss(new_values[mask], mb.values[mask], returns, args.value_clip_coef)
    # Detail 10/37: overall loss and entropy bonus (vf_coef) [ppo2/model.py L91; LHP has no bonus]
    # One loss trains both, because they share layers. The KL penalty keeps the entropy up.
    loss = pg_loss + args.vf_coef * v_loss
    # Detail 12/37: debug variables [ppo2/model.py L115-116]
    # How far an update moves the policy shows a wrong step size before the reward does.
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": -(all_logprobs.exp() * all_logprobs).sum(-1)[mask].mean(),
        "losses/approx_kl": approx_kl(logratio),
        "check/update": (whiten(logratio, "zero") * white_advantages).mean(),  # correlation, > 0
        "losses/clipfrac": ((logratio.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


# Copied from ppo_continuous_action.py
def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows, one or several of them in each."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


def train_ppo(args: Args, agent: Agent, judges: Judges) -> list[Metrics]:
    """Maximize the scores, with a penalty on the KL to the SFT model; return metrics per update."""
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    generator = stage_generator(args, "ppo")
    writer = SummaryWriter(str(args.run_dir / args.ppo_run), purge_step=1)
    kl_coef = 0.0 if args.kl_mode == "none" else args.kl_coef
    gradient_steps = 0
    updates = []
    for iteration in trange(1, args.num_updates + 1, desc=args.ppo_run, disable=None):
        # --- Collect: responses and their rewards, with fixed weights ---
        rollout, metrics = collect(args, agent, judges, args.batch_size, kl_coef, generator)

        # --- Update: K epochs of minibatches, each with its own advantages ---
        start_time = time.perf_counter()
        remaining = 1 - (iteration - 1) / args.num_updates  # falls from 1 to 1 / num_updates
        # Detail 4/37, R5: learning rate annealing (anneal_lr) [LHP: train_policy.py L172-173]
        # Small steps at the end average out the noise. The reward model's rate falls, too.
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1.0)
        minibatch_metrics = []
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, generator=generator)
            # Detail 6/37, R16: minibatches of whole responses [LHP: train_policy.py L180]
            # The advantage of a token needs those after it, so a response is never split.
            for indices in order.split(args.batch_size // args.num_minibatches):
                mb = Rollout(*(x[indices] for x in rollout))
                loss, loss_metrics = ppo_loss(agent, mb, args)
                optimizer.zero_grad()
                loss.backward()
                # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
                # Keeps one odd minibatch from moving the policy far; the direction stays.
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                gradient_steps += 1
                # Detail 3/37, R21: TensorFlow's Adam epsilon (adam_eps) [LHP: utils/core.py L627]
                # TensorFlow adds it before the bias correction: 32 times as much in the first step.
                eps = args.adam_eps / math.sqrt(1 - 0.999**gradient_steps)
                optimizer.param_groups[0].update(lr=learning_rate, eps=eps)
                optimizer.step()
                minibatch_metrics.append({**loss_metrics, "losses/grad_norm": grad_norm})
        num_tokens = args.update_epochs * rollout.mask.sum().item()

        # --- Log, adapt beta ---
        metrics = {
            **metrics,
            "objective/kl_coef": kl_coef,
            **means(minibatch_metrics),
            "charts/learning_rate": learning_rate,
            "charts/tokens_per_second_update": num_tokens / (time.perf_counter() - start_time),
        }
        check_metrics(metrics, iteration)
        log(writer, iteration, metrics)
        updates.append(metrics)
        # Detail R20: adaptive KL (kl_mode, target_kl) [LHP: train_policy.py L115-124]
        # Beta grows while the KL to the SFT model (the article: to the last policy) is too large.
        if args.kl_mode == "adaptive":
            kl_coef = proportional_kl_coef(
                kl_coef, metrics["objective/kl"], args.target_kl, args.batch_size, args.kl_horizon
            )
    writer.close()
    return updates


# === The pipeline ===


@contextmanager
def own_process() -> Iterator[None]:
    """One thread, 32-bit floats and gradients, whatever the caller has; afterwards as before."""
    # inference_mode(False) switches gradients on, even in `no_grad` of the caller.
    with torch.inference_mode(False), ExitStack() as resources:
        take_process(resources)
        torch.set_num_threads(1)  # more do not help networks of this size
        yield


def start_run(args: Any) -> Any:
    """The settings with a name for the run, by default of their own script; makes its folder."""
    # Recipes have settings of their own, and call this.
    script = Path(getattr(sys.modules[type(args).__module__], "__file__", "notebook")).stem
    run_name = args.run_name or f"{script}__{args.seed}__{time.time_ns()}"
    args = dataclasses.replace(args, run_name=run_name)
    try:
        args.run_dir.mkdir(parents=True)  # of two runs with one name, only one succeeds
    except OSError as error:
        raise UsageError(f"{args.run_dir}: {error.strerror}: change --run-name.") from error
    return args


def make_preferences_of_sft(args: Args) -> tuple[Task, Agent, Preferences]:
    """Stages 1 and 2: the task, the SFT model, and labeled pairs of its responses."""
    task = toy_task(args)
    documents, prompts = task.documents.to(args.device), task.prompts.to(args.device)
    task = task._replace(documents=documents, prompts=prompts)
    torch.manual_seed(args.seed)
    sft = TinyGPT(len(task.vocabulary), task.documents.shape[1]).to(args.device)
    train_sft(args, sft, task)
    reference = Agent(sft, args.temperature).to(args.device)
    preferences = make_preferences(args, reference, task)
    return task._replace(sample_gold=preferences.sample_gold), reference, preferences


def make_judges(args: Args) -> tuple[Judges, Metrics]:
    """Stages 1 to 3, and the quality of the reward model."""
    task, reference, preferences = make_preferences_of_sft(args)
    torch.manual_seed(args.seed)
    reward_model = RewardModel(reference.policy).to(args.device)
    quality = train_reward_model(args, reward_model, preferences)
    return Judges(task, reward_model, reference), quality


@own_process()
def train(args: Args) -> dict[str, Any]:
    """Run the four stages, then evaluate; results and weights are saved in the run's folder.

    Returns `agent` of the first PPO run; `updates`, of each PPO run a dictionary of metrics per
    update; `results`, of each model its evaluation; `quality` of the reward model; and `args`.
    """
    args = start_run(args)
    if args.track:
        import wandb

        try:
            wandb.init(
                name=args.run_name,
                config=vars(args),
                reinit="finish_previous",
                sync_tensorboard=True,
            )
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error

    judges, quality = make_judges(args)
    settings = dataclasses.replace(args, compare=False)  # each run has one beta, which may be 0
    runs = {settings.ppo_run: settings}
    coefs = {"none": 0.0}  # hacks the reward
    if args.compare:
        coefs |= {"adaptive": args.kl_coef, "fixed": 0.05}
    for kl_mode, kl_coef in coefs.items():
        if kl_mode != args.kl_mode:
            run = dataclasses.replace(settings, kl_mode=kl_mode, kl_coef=kl_coef)
            runs[run.ppo_run] = run

    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, judges.reference, judges)
    results["sft"] = {"method": "SFT", **metrics}
    for name, run in runs.items():
        agent = copy.deepcopy(judges.reference)
        updates[name] = train_ppo(run, agent, judges)
        save_policy(args.run_dir / name / "checkpoint.pt", agent, updates[name])
        metrics, texts[name] = evaluate(run, agent, judges)
        results[name] = {
            "method": "PPO",
            "reward": run.reward,
            "kl_mode": run.kl_mode,
            "kl_coef": 0.0 if run.kl_mode == "none" else run.kl_coef,
            "target_kl": run.target_kl,
            **metrics,
            "objective/kl_coef": updates[name][-1]["objective/kl_coef"],  # at the end
        }
        agents[name] = agent
    if args.compare:
        results |= best_of_n(args, judges)
    report(args, quality, results, texts)
    if args.track:
        wandb.finish()
    return {
        "agent": agents[args.ppo_run],
        "updates": updates,
        "results": results,
        "quality": quality,
        "args": args,
    }


# === The algorithm ends here ===
# Below: the toy task (grammar, gold reward), evaluation, logs, `main`.


# === The toy task: reviews whose quality can be computed ===
# The same 32 prompts (8 names, 4 topics) serve all stages and the evaluation;
# only pairs are held out. PPO on three topics gave gold 1.48 at KL 7.7 on the fourth, against 1.56
# at KL 6.6 when it was trained on as well (one seed).

TOPICS = {
    "restaurant": ("food", "service", "staff", "menu", "wine", "dessert"),
    "hotel": ("room", "bed", "pool", "lobby", "breakfast", "view"),
    "movie": ("plot", "acting", "dialogue", "music", "ending", "cast"),
    "book": ("story", "prose", "hero", "pacing", "cover", "style"),
}
NAMES = ("anna", "ben", "carla", "david", "emma", "felix", "grace", "henry")
# The number is the valence: how positive a word is.
SCALE = {
    2: "amazing superb perfect",
    1: "good nice lovely",
    0.5: "decent",
    0: "average ordinary",
    -1: "poor bad dull",
    -2: "awful terrible horrible",
}
ADJECTIVES = {word: valence for valence, words in SCALE.items() for word in words.split()}
VERBS = {"adored": 2, "liked": 1, "enjoyed": 1, "disliked": -1, "hated": -2, "despised": -2}
ADVERBS = {"very": 1.5, "really": 1.3, "quite": 1.0, "slightly": 0.5}  # factors on the valence
NEGATION = -0.5  # "not superb" is mildly bad, "not awful" mildly good
# Openers and closers match the mood of a review but earn nothing by themselves. They are bait for
# the reward model, which only sees that they occur in good reviews.
OPENERS = {"wow": 1, "happily": 1, "sadly": -1, "honestly": 0}
CLOSERS = {"recommended": 1, "avoid": -1}
NOUNS = {noun: topic for topic, nouns in TOPICS.items() for noun in nouns}
CONTENT = {*NOUNS, *ADJECTIVES, *ADVERBS, *VERBS, *OPENERS, *CLOSERS}
VOCABULARY = [
    *("<pad>", "<bos>", ".", ":", ",", "and", "but", "the", "was", "i", "not", "on"),
    *(*TOPICS, *NAMES, *NOUNS, *ADJECTIVES, *ADVERBS, *VERBS, *OPENERS, *CLOSERS),
]
PROMPTS = [f"<bos> {name} on the {topic} :".split() for name in NAMES for topic in TOPICS]
RESPONSE_LENGTH = 18


def write_review(topic: str, rng: random.Random) -> list[str]:
    """Write a review of at most 18 words; a longer one is cut off there, without its full stop."""
    used: set[str] = set()

    def unused(valences: dict[str, float], sign: int) -> list[str]:
        return [w for w, v in valences.items() if w not in used and v * sign >= 0]

    def pick(words: list[str], valences: dict[str, float]) -> str:
        # Strong words are rarer, so that the reward model's favorites are not the most common ones.
        (word,) = rng.choices(words, [1 / (0.7 + abs(valences[w])) for w in words])
        used.add(word)
        return word

    mood = rng.choice((-1, 1))
    (num_clauses,) = rng.choices((1, 2, 3, 4), (0.25, 0.4, 0.25, 0.1))
    review: list[str] = []
    if rng.random() < 0.35:
        tone = 0 if rng.random() < 0.3 else mood
        review += [rng.choice([w for w, t in OPENERS.items() if t == tone]), ","]
    previous = 0
    for noun in rng.sample(TOPICS[topic], num_clauses):
        sign = mood if rng.random() < 0.75 else -mood
        if previous:
            review.append("but" if sign != previous else rng.choice(("and", ",")))
        verbs = unused(VERBS, sign)
        if verbs and rng.random() < 0.3:
            review += ["i", pick(verbs, VERBS), "the", noun]
        else:
            negated = rng.random() < 0.15
            review += ["the", noun, "was", *(["not"] if negated else [])]
            if rng.random() < 0.35:
                review.append(pick(unused(ADVERBS, 1), ADVERBS))
            review.append(pick(unused(ADJECTIVES, -sign if negated else sign), ADJECTIVES))
        previous = sign
    if rng.random() < 0.2:
        review += [",", "recommended" if mood > 0 else "avoid"]
    return [*review, "."][:RESPONSE_LENGTH]


def one_of(words: Iterable[str]) -> str:
    """A regular expression for any of the words."""
    return f"({'|'.join(words)})"


# "the food was not very good" or "i liked the food"
DESCRIPTION = rf"the {one_of(NOUNS)} was( not)?(?: {one_of(ADVERBS)})? {one_of(ADJECTIVES)}"
CLAUSE = rf"\b{DESCRIPTION}\b|\bi {one_of(VERBS)} the {one_of(NOUNS)}\b"
OPENING = rf"{one_of(OPENERS)}\b( ,)?"
CLOSING = rf", {one_of(CLOSERS)}$"


def gold_reward(topic: str, words: list[str]) -> float:
    """The true quality of a review: praise in varied, complete sentences on its topic.

    Junk is every word outside clauses, single joiners between two clauses, one opener at the start
    and one closer at the end.
    """
    ended = words[-1:] == ["."]
    body = words[:-1] if ended else words
    text = " ".join(body)
    opener = re.match(OPENING, text)
    rest = text[opener.end() :] if opener else text
    closer = re.search(CLOSING, rest)
    clauses = list(re.finditer(CLAUSE, rest))
    valence = 0.0
    nouns = []
    for clause in clauses:
        subject, negated, adverb, adjective, verb, noun = clause.groups()
        factor = (NEGATION if negated else 1.0) * ADVERBS.get(adverb, 1.0)
        valence += VERBS[verb] if verb else factor * ADJECTIVES[adjective]
        nouns.append(noun or subject)
    between = [rest[a.end() : b.start()] for a, b in itertools.pairwise(clauses)]
    num_legal = sum(x in (" and ", " but ", " , ") for x in between)  # words that are not junk
    for match in (opener, *clauses, closer):
        num_legal += len(match.group().split()) if match else 0
    content = [word for word in body if word in CONTENT]
    return (
        2 * math.tanh(valence / 3)
        + 0.4 * min(len({noun for noun in nouns if NOUNS[noun] == topic}), 3)
        - 4 * (len(body) - num_legal) / max(len(body), 1)  # the share of junk
        - 0.5 * min(len(content) - len(set(content)), 6)  # repeated words
        - 0.5 * min(sum(NOUNS[noun] != topic for noun in nouns), 4)
        - 1.0 * (not ended)
    )


def toy_task(args: Args) -> Task:
    """The toy reviews, written from the seed."""
    token = {word: index for index, word in enumerate(VOCABULARY)}
    rng = random.Random(args.seed)
    rows = []
    for _ in range(args.sft_documents):
        prompt = rng.choice(PROMPTS)
        rows.append([token[word] for word in prompt + write_review(prompt[4], rng)])
    prompts = torch.tensor([[token[word] for word in prompt] for prompt in PROMPTS])
    documents = pad_rows(rows, prompts.shape[1] + RESPONSE_LENGTH)
    return Task(VOCABULARY, documents, prompts, RESPONSE_LENGTH, token["."], earliest_eos=4)


# === Evaluation ===

NUM_EVALUATED = 512  # responses that a model is evaluated on
BEST_OF_N = (4, 16, 64, 256, 1024)


def sample_truncated(agent: Agent, task: Task, prompts: Tensor, generator: Generator) -> Tensor:
    """Sample truncated responses (B, R) to prompts (B, P), in chunks."""
    chunks = prompts.split(512)
    sampled = [agent.sample_responses(x, task.response_length, generator) for x in chunks]
    return truncate_responses(torch.cat(sampled), task.eos, task.earliest_eos)[0]


@torch.no_grad()
def score_texts(model: RewardModel, prompts: Tensor, responses: Tensor) -> Tensor:
    """Scores (B,) of truncated responses (B, R) to prompts (B, P), in chunks."""
    chunks = zip(prompts.split(512), responses.split(512), strict=True)
    return torch.cat([model.score(p, r) for p, r in chunks])


def describe(task: Task, prompts: Tensor, responses: Tensor) -> Metrics:
    """Gold, length and variety of truncated responses (B, R)."""
    texts = [task.decode(response) for response in responses]
    ended = (responses[:, task.earliest_eos :] == task.eos).any(dim=1)
    return {
        "text/length": sum(map(len, texts)) / len(texts),
        "text/eos_rate": ended.sum().item() / len(texts),
        "text/repetition": sum(1 - len(set(x)) / max(len(x), 1) for x in texts) / len(texts),
        "text/unique": len({" ".join(x) for x in texts}) / len(texts),
        "objective/gold": task.gold(prompts, responses).mean().item(),
    }


def evaluate(args: Args, agent: Agent, judges: Judges) -> tuple[Metrics, list[str]]:
    """Metrics and some texts of new responses of a policy; all policies get the same prompts."""
    generator = stage_generator(args, "evaluate")
    rollout, metrics = collect(args, agent, judges, NUM_EVALUATED, 0.0, generator)
    metrics["objective/kl"] = metrics["objective/kl_exact"]  # which has less noise than k1
    lines = torch.cat([rollout.prompts, rollout.responses], dim=1)[:5]
    return metrics, [" ".join(judges.task.decode(line)[1:]) for line in lines]


def best_of_n(args: Args, judges: Judges) -> Results:
    """Of n samples of the SFT model, keep the one that the proxy scores best: PPO's rival."""
    task = judges.task
    generator = stage_generator(args, "best-of-n")
    prompts = task.prompts[torch.randperm(len(task.prompts), generator=generator)]
    prompts = prompts[:32].repeat_interleave(max(BEST_OF_N), dim=0)
    responses = sample_truncated(judges.reference, task, prompts, generator)
    scores = score_texts(judges.reward_model, prompts, responses)
    results = {}
    for n in BEST_OF_N:  # each n splits all samples into groups of n, so that all are used
        first = torch.arange(0, len(scores), n, device=scores.device)
        best = first + scores.view(-1, n).argmax(dim=1)
        metrics = describe(task, prompts[best], responses[best])
        del metrics["text/unique"]  # a larger n leaves fewer texts, so it cannot be compared
        results[f"best-of-{n}"] = {
            "method": "best of n",
            "n": n,
            **metrics,
            "objective/proxy": scores[best].mean().item(),
            "objective/kl": math.log(n) - (n - 1) / n,  # at most: Stiennon et al. 2020, G.3
        }
    return results


def report(args: Args, quality: Metrics, results: Results, texts: dict[str, list[str]]) -> None:
    """Save the reward model's quality, results and texts in results.json, then print them."""
    content = {"args": vars(args), "quality": quality, "results": results, "texts": texts}
    text = json.dumps(finite(content), indent=1, allow_nan=False, default=str)
    (args.run_dir / "results.json").write_text(text)
    columns = [
        *("objective/gold", "objective/proxy", "objective/kl", "objective/kl_coef"),
        *("text/eos_rate", "text/length", "text/repetition", "text/unique"),
    ]
    columns = [x for x in columns if any(x in row for row in results.values())]
    titles = [x.partition("/")[2] for x in columns]
    lines = ["Reward model: " + ", ".join(f"{name} {x:.3g}" for name, x in quality.items())]
    lines.append(f"\n{'model':20}" + "".join(f"{x:>11}" for x in titles))
    for name, row in results.items():
        cells = [f"{row[x]:.3g}" if x in row else "-" for x in columns]
        lines.append(f"{name:20}" + "".join(f"{x:>11}" for x in cells))
    lines.append("\nReviews of the SFT model have a mean gold of 0 and a std of 1.")
    for name, examples in texts.items():
        lines.append(f"\n{name}:\n- " + "\n- ".join(examples))
    lines.append(f"\nLogs and results: {args.run_dir}")
    print("\n".join(lines))


# === Runs, logs, `main` ===


def stage_generator(args: Args, purpose: str) -> Generator:
    """A random generator for one purpose, so that a change of one stage leaves others alone.

    It is one of the processor, on a GPU too, so that both draw the same.
    """
    return Generator().manual_seed(zlib.crc32(purpose.encode()) + args.seed)


def save_policy(path: Path, agent: Agent, updates: list[Metrics]) -> None:
    """Save weights, which load without a GPU too, and metrics."""
    weights = {name: x.cpu() for name, x in agent.state_dict().items()}
    try:
        torch.save({"agent": weights, "updates": updates}, path)
    except (OSError, RuntimeError) as error:  # PyTorch does not say why
        raise UsageError(f"Could not save {path}: is the disk full?") from error


def finite(x: Any) -> Any:
    """The same with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(x, dict):
        return {name: finite(value) for name, value in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x


def log(writer: SummaryWriter, step: int, metrics: dict[str, float]) -> None:
    """Write the metrics of an iteration, which ended at `step`, to TensorBoard."""
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


TRAINING = threading.Lock()  # taken by the run that trains in this process


# Copied from ppo_continuous_action.py
def take_process(resources: ExitStack) -> None:
    """Let only one run change the process: its threads and floats, which the run puts back."""
    if not TRAINING.acquire(blocking=False):
        hint = "use a process for each (Optuna's n_jobs are threads)"
        raise UsageError(f"Another run trains in this process: {hint}.")
    resources.callback(TRAINING.release)
    resources.callback(torch.set_num_threads, torch.get_num_threads())
    resources.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float32)


def check_metrics(metrics: Metrics, step: int) -> None:
    """End a run that has diverged."""
    bad = ", ".join(name for name, x in metrics.items() if not math.isfinite(x))
    if bad:
        raise UsageError(f"NaN or infinite in step {step}: {bad}. Lower the learning rate.")


@contextmanager
def command_line() -> Iterator[list[str]]:
    """The user's flags, for what runs as a program.

    The user's mistakes end in one sentence and exit code 2, signals in 128 plus their number.
    """

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    for name in ("SIGTERM", "SIGHUP"):  # a cluster, a closed terminal
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores it
            signal.signal(number, stop)
    try:
        # In a notebook, the flags are those of its kernel.
        yield [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:]
    except KeyboardInterrupt as error:
        text = "Interrupted. Nothing can be resumed, but a whole run takes only minutes."
        print(text, file=sys.stderr)
        (number,) = error.args or (signal.SIGINT,)
        sys.exit(128 + number)
    except UsageError as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Run what the command line says."""
    with command_line() as flags:
        train(tyro.cli(Args, args=flags))


if __name__ == "__main__":
    main()
