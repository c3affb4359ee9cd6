# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock==4.2.12", "pydantic==2.14.4", "tensorboard==2.21.0", "torch==2.13.0",
#   "tqdm==4.70.1", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Reinforcement learning from human feedback (RLHF) with PPO: the whole pipeline in one file.

    python ppo_rlhf_toy.py

`uv run` installs what it needs; without uv, `pip install` the packages named above.

Two minutes on one CPU core, nothing to download. There are four stages. A tiny GPT learns to write
reviews (supervised fine-tuning, SFT). A simulated labeller compares pairs of them by the gold
reward, a formula. A reward model, the proxy, learns from the comparisons. PPO optimizes the proxy,
twice: kept near the SFT model by a KL penalty whose weight beta adapts, and with beta = 0. So
over-optimization is measured: without the penalty the proxy rises while gold collapses (the reward
is hacked), with it both rise. With `--reward gold` the formula itself judges finished texts, and
nothing is hacked. `--compare` adds a fixed beta and best-of-n sampling; `--preferences` takes your
texts.

The algorithm is that of Ziegler et al. 2019 (arXiv 1909.08593) as released in
LHP = openai/lm-human-preferences@cbfd210b. "The N Implementation Details of RLHF with PPO" (Huang
et al. 2023) numbers its details R1-R21. Each is a comment above its statement, like those of the 37
details of PPO (ppo2 = openai/baselines@ea25b9e8) that apply: the settings concerned in parentheses,
the place in brackets, the reason in the next line; `--details` lists them. Where the article and
LHP disagree (R17, R20), this file follows LHP. Not here: R6 (processes, see ppo_atari.py), R12
(queries are not cut out of running text), 2 and 7 (R8, R11 and R18 instead), 14-22 (ppo_atari.py),
23-31 (ppo_continuous_action.py), 32-36 (ppo_atari_lstm.py), 37 (ppo_multidiscrete.py).

A response is an episode, each of its words an action, and what was written before it the state.
Shapes: B = responses in a batch, Q = tokens of a query, R = tokens of a response, L = tokens of
both, V = words in the vocabulary, D = width of the network; `mb` is a minibatch.

Deviations without a tag: several epochs for the reward model, AdamW at its defaults, normalization
on truncated samples; for PPO gradient clipping and a KL horizon for a run 100 times shorter.

Means over seeds 1 to 5 (benchmark/README.md), gold and proxy in standard deviations of the SFT
model's reviews, of which the best that there is has gold 2.5; KL in nats per response:

                     gold   proxy   KL
    beta adaptive     1.6     2.4    6
    beta = 0         -5.3     3.6  145
    beta = 0.05       1.5     2.6    9
    best of 64        1.5     2.0    3    as good at half of the KL, for 64 times the sampling
"""

import copy
import dataclasses
import itertools
import json
import math
import os
import random
import re
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import filelock
import pydantic
import torch
import torch.nn.functional as F
import tyro
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Generator, Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

# === Settings ===

Tensors = dict[str, Tensor]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
StepSize = Annotated[NonNegativeFloat, tyro.conf.arg(aliases=["--lr"])]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Name = Annotated[str, pydantic.Field(pattern=r"^\w[\w.=+-]*$")]  # of a folder in runs/
Folder = Annotated[str, pydantic.Field(min_length=1)]


# Copied from ppo_continuous_action.py
class UsageError(ValueError):
    """Something that the user can mend; `main` prints it as one sentence."""


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args:
    # --- Experiment ---
    seed: Seed = 1  # random seed of the whole run
    run_name: Name | None = None  # folder below runs/; by default script, seed, time
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    track: bool = False  # send the logs to Weights & Biases too (WANDB_MODE=offline: to disk)
    resume: Folder | None = None  # continue the run in this folder, with its settings
    details: bool = False  # print the implementation details with their values, and exit
    compare: bool = False  # also make runs with an adaptive and a fixed beta, and best-of-n
    preferences: str | None = None  # your own labels: JSON lines with prompt, chosen, rejected

    # --- Supervised fine-tuning ---
    sft_documents: PositiveInt = 20_000  # reviews that the grammar writes
    sft_steps: PositiveInt = 700  # gradient steps
    sft_batch_size: PositiveInt = 64  # documents per gradient step
    sft_learning_rate: PositiveFloat = 3e-3  # AdamW's step size, after a warm-up; falls to 0

    # --- Preferences and reward model ---
    num_pairs: Annotated[int, pydantic.Field(ge=14)] = 7000  # labelled pairs [LHP: 4992]
    temperature: PositiveFloat = 1.0  # sampling temperature T [LHP: 0.7; 0.5 for CNN/DM]
    reward_epochs: PositiveInt = 2  # passes over the labelled pairs [LHP: 1]
    reward_batch_size: PositiveInt = 32  # pairs per gradient step [LHP: 32]
    reward_learning_rate: PositiveFloat = 2e-3  # AdamW's step size; falls to 0 [LHP: 5e-5]

    # --- PPO ---
    reward: Literal["model", "gold"] = "model"  # gold: no proxy, the formula itself is the reward
    kl_mode: Literal["adaptive", "fixed", "none"] = "adaptive"  # beta: steered, constant, or 0
    kl_coef: NonNegativeFloat = 0.5  # weight of the KL penalty, beta, at the start [LHP: 0.15]
    target_kl: PositiveFloat = 6.0  # KL to the SFT model with an adaptive beta, in nats [LHP: 6]
    kl_horizon: PositiveInt = 500  # episodes over which beta adapts [LHP: 10000 of 1,000,000]
    num_updates: PositiveInt = 80  # batches of responses, each followed by an update
    batch_size: PositiveInt = 128  # responses per update, B [LHP: 512]
    num_minibatches: PositiveInt = 4  # minibatches per epoch, of whole responses [LHP: 1]
    update_epochs: PositiveInt = 4  # passes over a batch, K [LHP: 4]
    learning_rate: StepSize = 5e-4  # Adam's step size [LHP: 1e-5, for GPT-2]
    anneal_lr: bool = True  # lower it linearly towards 0, as LHP does
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon [LHP: 1e-5]
    gamma: Fraction = 1.0  # discount factor [LHP: 1]
    gae_lambda: Fraction = 0.95  # 0: one-step advantages, 1: sums of all rewards [LHP: 0.95]
    clip_coef: PositiveFloat = 0.2  # clip range of the policy ratio, epsilon [LHP: 0.2]
    value_clip_coef: PositiveFloat = 0.2  # clip range of the values [LHP: 0.2; inf: off]
    vf_coef: NonNegativeFloat = 0.1  # weight of the value loss, half a squared error [LHP: 0.1]
    max_grad_norm: PositiveFloat = 1.0  # largest norm of the whole gradient [LHP: inf, off]
    reward_whitening: Literal["scale", "restore"] = "scale"  # over std; restore: same mean, LHP
    mask_after_stop: bool = True  # end episodes at the stop word; no: train on all tokens, as LHP
    missing_stop_score: float = -1.0  # score without a stop word, below usual scores [LHP: -1]

    def __post_init__(self) -> None:
        adaptive = self.kl_mode == "adaptive" or self.compare
        if self.batch_size % self.num_minibatches:
            raise ValueError("--num-minibatches must divide --batch-size.")
        if adaptive and self.kl_coef == 0:
            raise ValueError("An adaptive --kl-coef of 0 stays 0; --kl-mode none does that.")
        if adaptive and self.kl_horizon <= 0.2 * self.batch_size:
            raise ValueError("--kl-horizon must exceed --batch-size / 5, or beta turns negative.")
        if self.reward == "gold" and self.preferences:
            raise ValueError("--reward gold is that of the toy reviews; --preferences has none.")

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.resume or f"runs/{self.run_name}")

    @property
    def ppo_run(self) -> str:
        """Name of the PPO run with these settings, such as ppo-adaptive-6 or ppo-gold-none."""
        strength = {"adaptive": f"-{self.target_kl:g}", "fixed": f"-{self.kl_coef:g}", "none": ""}
        reward = {"model": "ppo", "gold": "ppo-gold"}[self.reward]
        return f"{reward}-{self.kl_mode}{strength[self.kl_mode]}"


# === The task, as the pipeline sees it ===

PAD, BOS = 0, 1  # the first two words of every vocabulary; neither is ever sampled


class Task(NamedTuple):
    """A language to write in: the toy reviews, or your own texts."""

    words: list[str]  # the vocabulary, V words; a token is an index into it
    documents: Tensor  # (documents, L) tokens for the SFT
    queries: Tensor  # (queries, Q) tokens, all different
    response_length: int  # R
    stop: int  # token that ends a response
    earliest_stop: int  # index in a response; stop words before it count as any others
    labels: tuple[Tensor, ...] | None = None  # your own: queries, chosen, rejected; without gold
    sample_gold: Tensor | None = None  # raw gold of SFT samples; once set, gold is scaled by it

    def sample_queries(self, count: int, generator: Generator) -> Tensor:
        """Draw queries (count, Q) with replacement."""
        return self.queries[torch.randint(len(self.queries), (count,), generator=generator)]

    def split_words(self, tokens: Tensor) -> list[str]:
        """The words of tokens (length,), without padding."""
        return [self.words[token] for token in tokens.tolist() if token != PAD]

    def gold(self, queries: Tensor, responses: Tensor) -> Tensor:
        """Gold rewards (B,) of truncated responses (B, R); the topic is the query's fifth word."""
        pairs = zip(queries, responses, strict=True)
        gold = [gold_reward(self.words[q[4]], self.split_words(r)) for q, r in pairs]
        gold, scale = torch.tensor(gold), self.sample_gold
        return gold if scale is None else (gold - scale.mean()) / scale.std(correction=0)


def pad_rows(rows: list[list[int]], length: int) -> Tensor:
    """Tokens (rows, length): each row cut to `length` and filled up with padding."""
    # Detail R2: special padding token, truncated inputs [LHP: language/datasets.py L57-67]
    # Padding is a word of its own that no text contains; longer rows are cut to the same length.
    return torch.tensor([row[:length] + [PAD] * (length - len(row)) for row in rows])


# === Models ===


class Block(nn.Module):
    """A transformer block: causal self-attention, then a two-layer network, each normed before."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_hidden = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, visible: Tensor, past: list[Tensor]) -> tuple[Tensor, list]:
        """Process new positions x (B, new, D), which may look where `visible` (B, 1, new, L).

        `past` holds keys and values of the positions before, (B, heads, L - new, D / heads) each,
        or nothing. Returns (B, new, D), and keys and values of all positions.
        """
        batch, new, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, new, 3, self.num_heads, -1)
        query, *key_value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, new, D / heads) each
        if past:
            key_value = [torch.cat(pair, dim=2) for pair in zip(past, key_value, strict=True)]
        # Detail R13: disable dropout [LHP: policy.py L48; rewards.py L43]
        # Without dropout the ratio of an unchanged policy is exactly 1, as PPO assumes.
        mixed = F.scaled_dot_product_attention(query, *key_value, visible, dropout_p=0.0)
        x = x + self.attention_output(mixed.transpose(1, 2).reshape(batch, new, width))
        return x + self.mlp_output(F.gelu(self.mlp_hidden(self.mlp_norm(x)))), key_value


class TinyGPT(nn.Module):
    """A causal transformer with tied word embeddings and learned positions, about 0.1 M weights."""

    def __init__(self, num_words: int, context_length: int, width: int = 64) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(num_words, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=4) for _ in range(2))
        self.final_norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():  # as GPT-2's
            if weight.dim() == 2:
                into_residual = math.sqrt(2 * len(self.blocks)) if "_output" in name else 1.0
                nn.init.normal_(weight, std=0.02 / into_residual)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        never = torch.zeros(num_words)
        never[[PAD, BOS]] = -1e9  # finite, so that probability 0 times its logarithm is 0, not NaN
        self.register_buffer("never_written", never, persistent=False)

    def forward(self, tokens: Tensor, cache: list | None = None) -> tuple[Tensor, list]:
        """Read tokens (B, L), of which the first ones may already be in the cache.

        Returns hidden states (B, new, D) of the others, where there is padding that of the last
        real word before it (at least BOS; so what follows a cache must not begin with padding);
        and the cache of all: keys and values of each block.
        """
        real = tokens != PAD
        seen, length = cache[0][0].shape[2] if cache else 0, tokens.shape[1]
        # Detail R3: positions skip padding tokens [LHP: language/model.py L265-269]
        # They count real words only, so that padding does not shift a text.
        positions = real.cumsum(dim=1) - real.long()
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        visible = (causal & real[:, None])[:, None, seen:]  # (B, 1, new, L)
        x = self.word_embedding(tokens[:, seen:]) + self.position_embedding(positions[:, seen:])
        new_cache = []
        for block, past in zip(self.blocks, cache or [[], []], strict=True):
            x, key_value = block(x, visible, past)
            new_cache.append(key_value)
        index = torch.arange(length - seen, device=tokens.device)
        last_real = index.where(real[:, seen:], 0).cummax(dim=1).values  # (B, new)
        return self.final_norm(x.gather(1, last_real[..., None].expand_as(x))), new_cache

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of the next word from hidden states (..., D)."""
        return F.linear(hidden, self.word_embedding.weight, self.never_written)


class RewardModel(nn.Module):
    """A language model with a scalar head in place of the word logits."""

    def __init__(self, language_model: TinyGPT) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(language_model)
        width = self.trunk.word_embedding.embedding_dim
        self.head = nn.Linear(width, 1)
        # Detail R8: reward head initialization [LHP: language/model.py L251-254]
        # Features are normed: weights of this size make scores of the order of 1.
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(width + 1))
        nn.init.zeros_(self.head.bias)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def score(self, queries: Tensor, responses: Tensor) -> Tensor:
        """Scores (B,) of truncated responses (B, R) to queries (B, Q)."""
        hidden, _ = self.trunk(torch.cat([queries, responses], dim=1))
        rewards = self.gain * self.head(hidden).squeeze(-1) + self.bias  # (B, L)
        # Detail R7: reward only at the last token [LHP: rewards.py L47, L132]
        # A text is judged when it is complete; at padding `forward` repeats its last word's state.
        return rewards[:, -1]


class Agent(nn.Module):
    """A policy, which is a language model at a sampling temperature, and a value function."""

    def __init__(self, language_model: TinyGPT, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.policy = language_model
        self.value_head = nn.Linear(self.policy.word_embedding.embedding_dim, 1)
        # Detail R11: value head initialization [LHP: language/model.py L368]
        # Values start at 0: the first advantages are made of rewards, not of random guesses.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @torch.no_grad()
    def sample_responses(self, queries: Tensor, length: int, generator: Generator) -> Tensor:
        """Continue queries (B, Q) by `length` words each, drawn from the policy: (B, length)."""
        tokens, cache = queries, None
        # Detail R4: fixed-length responses without padding [LHP: language/sample.py L43-79]
        # The stop word does not end the sampling; `truncate_responses` cuts the responses later.
        for _ in range(length):
            hidden, cache = self.policy(tokens, cache)
            logits = self.policy.logits(hidden[:, -1]) / self.temperature  # as Detail R10
            # The largest of logits plus Gumbel noise is a draw from their softmax. With noise from
            # the CPU the same generator gives the same text on every device, but for rounding.
            gumbel = -torch.empty(logits.shape).exponential_(generator=generator).log()
            word = (logits + gumbel.to(logits.device)).argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, word], dim=1)
        return tokens[:, -length:]

    def get_logprobs_and_values(self, queries: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
        """Judge each word of responses (B, R) to queries (B, Q).

        Returns log-probabilities of all words in its place (B, R, V), and values before it (B, R).
        """
        # Detail R1: query and response concatenated [LHP: policy.py L114-126; rewards.py L105]
        # What a word is worth depends on the query and the words before it, so both are read.
        hidden, _ = self.policy(torch.cat([queries, responses], dim=1))
        before = slice(queries.shape[1] - 1, -1)  # a word is predicted one position earlier
        # Detail R10: logits scaled by the temperature (temperature) [LHP: policy.py L121]
        # The probabilities must be those that the words were sampled with.
        logits = self.policy.logits(hidden[:, before]) / self.temperature
        # Detail 13/37: shared or separate networks [ppo2: common/policies.py L156-166]
        # Policy and value share all layers but the last: both must understand what was written.
        return logits.log_softmax(dim=-1), self.value_head(hidden).squeeze(-1)[:, before]


# === The math: pure functions ===


# Copied from ppo_continuous_action.py
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, equations 11-16).

    Tensors are (T, N), time first: r_t, V(s_t), what the rest of the episode is worth after step t,
    and 1 where the episode ended with that step, for whatever reason.

    Returns advantages A_t and value targets A_t + V(s_t) (the lambda-return), both (T, N).
    """
    # Surprises: what a step brought beyond what was expected. A loop is fastest in NumPy.
    advantages = (rewards + gamma * next_values - values).cpu()
    sums, decays = advantages.numpy(), (gamma * gae_lambda * (1 - done)).numpy(force=True)
    for t in reversed(range(len(sums) - 1)):
        # Detail 5/37: generalized advantage estimation (gamma, gae_lambda) [ppo2/runner.py L50-65]
        # A surprise (delta) counts less the later it comes; higher lambda: less bias, more noise.
        sums[t] += decays[t] * sums[t + 1]
    advantages = advantages.to(values.device)
    return advantages, advantages + values


# Copied from ppo_continuous_action.py
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar.

    `logratio` is log pi_new(a|s) - log pi_old(a|s), of the shape of `advantages`.
    """
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples tell about policies near the old one only: what moves farther gains nothing.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


# Copied from ppo_kl_penalty.py
def clipped_value_loss(
    new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | Tensor
) -> Tensor:
    """Half the mean squared error of the values, a scalar (Stable-Baselines3 has no half)."""
    # Detail 9/37: value function loss clipping (value_clip_coef) [ppo2/model.py L68-75]
    # One batch should not move values far. The range is absolute: it supposes scaled rewards.
    clipped_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    errors = torch.max((new_values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """KL(old || new) from actions of the old policy, by k3 = mean(r - 1 - log r), r = new/old.

    Unbiased, and less noisy than k1 = mean(-log r) (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


def truncate_responses(responses: Tensor, stop: int, earliest_stop: int) -> tuple[Tensor, Tensor]:
    """Cut responses (B, R) after their first stop word at index `earliest_stop` or later.

    Returns them with padding after that stop word, and whether there was one (B,).
    """
    stops = responses == stop
    stops[:, :earliest_stop] = False
    stops_before = stops.cumsum(dim=1) - stops.long()
    return responses.where(stops_before == 0, PAD), stops.any(dim=1)


def log_probability(all_logprobs: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities (B, R) of the words that were written, out of those of all (B, R, V)."""
    return all_logprobs.gather(-1, responses[..., None]).squeeze(-1)


def whiten(x: Tensor, mean: Literal["zero", "restore", "scale"]) -> Tensor:
    """Scale to standard deviation 1, population form [LHP: utils/core.py L336-341].

    The mean becomes 0 ("zero"), stays ("restore"; a reward of 0 is then no longer 0), or is scaled
    too ("scale"). The epsilon stands inside the root, unlike in detail 7 of the 37.
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


def language_model_loss(model: TinyGPT, documents: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per word, of predicting documents (B, L) word by word."""
    hidden, _ = model(documents[:, :-1])
    real = documents[:, 1:] != PAD
    return F.cross_entropy(model.logits(hidden[real]), documents[:, 1:][real])


# === Stage 1: supervised fine-tuning ===


def train_sft(args: Args, model: TinyGPT, task: Task) -> None:
    """Teach a language model the task's documents."""
    device = device_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = stage_generator(args, "sft")
    writer = SummaryWriter(str(args.run_dir / "sft"), purge_step=1)
    for step in trange(1, args.sft_steps + 1, desc="sft", disable=None):
        decay = (1 - (step - 1) / args.sft_steps) * min(1.0, step / 50)  # the latter a warm-up
        optimizer.param_groups[0]["lr"] = decay * args.sft_learning_rate
        chosen = torch.randint(len(task.documents), (args.sft_batch_size,), generator=generator)
        loss = language_model_loss(model, task.documents[chosen].to(device))
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        write(writer, step, means([{"losses/loss": loss.detach(), "losses/grad_norm": grad_norm}]))
    writer.close()


# === Stage 2: preferences ===

LABEL_NOISE = 0.4  # gold difference at which the labeller is right with the odds e : 1
NUM_SAMPLES = 2000  # SFT samples that fix the scales of gold and proxy
HELD_OUT = 7  # one comparison in so many is kept back, to measure the reward model by


class Preferences(NamedTuple):
    """Comparisons, the last seventh held out, and what the SFT model writes by itself."""

    queries: Tensor  # (pairs, Q)
    chosen: Tensor  # (pairs, R), truncated
    rejected: Tensor  # (pairs, R), truncated
    sample_queries: Tensor  # (NUM_SAMPLES, Q)
    samples: Tensor  # (NUM_SAMPLES, R), truncated
    sample_gold: Tensor | None  # (NUM_SAMPLES,), where gold is known


def make_preferences(args: Args, reference: Agent, task: Task) -> dict[str, Tensor | None]:
    """Labels for pairs of texts, your own or simulated ones; returns the fields of Preferences."""
    generator = stage_generator(args, "preferences")
    if not (comparisons := task.labels):
        queries = task.sample_queries(args.num_pairs, generator)
        first = write_answers(reference, task, queries, generator)
        second = write_answers(reference, task, queries, generator)
        # The simulated labeller (Bradley-Terry): right more often the more two texts differ.
        difference = task.gold(queries, first) - task.gold(queries, second)
        odds = torch.sigmoid(difference / LABEL_NOISE)
        prefers = (torch.rand(odds.shape, generator=generator) < odds)[:, None]
        chosen, rejected = torch.where(prefers, first, second), torch.where(prefers, second, first)
        comparisons = queries, chosen, rejected
    queries = task.sample_queries(NUM_SAMPLES, generator)
    samples = write_answers(reference, task, queries, generator)
    gold = None if task.labels else task.gold(queries, samples)
    return Preferences(*comparisons, queries, samples, gold)._asdict()


# === Stage 3: reward model ===


def normalize_reward_model(model: RewardModel, queries: Tensor, samples: Tensor) -> None:
    """Set gain and bias so that scores of the SFT samples have mean 0 and standard deviation 1."""
    # Training changed gain and bias; without them the scores of the head alone are measured.
    nn.init.ones_(model.gain)
    nn.init.zeros_(model.bias)
    scores = score_texts(model, queries, samples)
    mean, std = scores.mean().item(), scores.std(correction=0).item()
    if std == 0:
        raise UsageError("All samples of the SFT model score the same: raise --temperature.")
    # Detail R9: normalization before and after training [LHP: train_reward.py L232-254]
    # What the SFT model writes scores 0 on average, deviation 1: beta means the same for any model.
    nn.init.constant_(model.gain, 1 / std)
    nn.init.constant_(model.bias, -mean / std)


def train_reward_model(
    args: Args, model: RewardModel, preferences: Preferences
) -> dict[str, float]:
    """Teach a model to score texts as the labels compare them; returns its quality."""
    *comparisons, sample_queries, samples, sample_gold = preferences
    normalize_reward_model(model, sample_queries, samples)
    num_learned = len(preferences.queries) - len(preferences.queries) // HELD_OUT
    minibatches = []
    for epoch in range(args.reward_epochs):
        generator = stage_generator(args, f"reward-model epoch {epoch}")
        order = torch.randperm(num_learned, generator=generator)
        minibatches += order.split(args.reward_batch_size)
    device = device_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    writer = SummaryWriter(str(args.run_dir / "reward_model"), purge_step=1)
    for step, mb in enumerate(tqdm(minibatches, "reward model", disable=None), start=1):
        decay = 1 - (step - 1) / len(minibatches)  # as Detail R5
        optimizer.param_groups[0]["lr"] = args.reward_learning_rate * decay
        queries, chosen, rejected = (x[mb].to(device) for x in comparisons)
        scores = model.score(torch.cat([queries, queries]), torch.cat([chosen, rejected]))
        good, bad = scores.chunk(2)
        loss = -F.logsigmoid(good - bad).mean()  # Bradley-Terry: LHP's softmax over four, for two
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        write(writer, step, means([{"losses/loss": loss.detach()}]))
    writer.close()
    normalize_reward_model(model, sample_queries, samples)

    queries, chosen, rejected = (x[num_learned:] for x in comparisons)
    right = score_texts(model, queries, chosen) > score_texts(model, queries, rejected)
    quality = {"accuracy": right.float().mean().item()}
    if sample_gold is not None:
        both = torch.stack([score_texts(model, sample_queries, samples), sample_gold])
        quality["correlation"] = torch.corrcoef(both)[0, 1].item()
    return quality


# === Stage 4: PPO ===


class Rollout(NamedTuple):
    """A batch of responses and what the update needs; entries outside `mask` are ignored."""

    queries: Tensor  # (B, Q)
    responses: Tensor  # (B, R)
    logprobs: Tensor  # (B, R), under the policy that wrote them
    values: Tensor  # (B, R)
    rewards: Tensor  # (B, R)
    mask: Tensor  # (B, R), True at the words of the episode
    last: Tensor  # (B, R), True at its last word


class Judges(NamedTuple):
    """What responses are measured by."""

    task: Task  # knows the gold reward
    reward_model: RewardModel  # the proxy
    reference: Agent  # the SFT model


@torch.no_grad()
def collect(
    args: Args, agent: Agent, judges: Judges, count: int, kl_coef: float, generator: Generator
) -> tuple[Rollout, dict[str, float]]:
    """Sample `count` responses; their rewards, with a KL penalty of weight `kl_coef`; metrics."""
    task = judges.task
    queries = task.sample_queries(count, generator).to(device_of(agent))
    # Detail 1/37: vectorized architecture (batch_size) [ppo2/runner.py L26-42]
    # All queries of the batch are answered side by side, in one pass of the network per word.
    sampled = agent.sample_responses(queries, task.response_length, generator)
    kept, stopped = truncate_responses(sampled, task.stop, task.earliest_stop)
    proxy = judges.reward_model.score(queries, kept)
    earned = task.gold(queries, kept).to(proxy) if args.reward == "gold" else proxy
    # Detail R14: rejection sampling (missing_stop_score) [LHP: lm_tasks.py L39-65]
    # Judged is the text up to its stop word; without one, a fixed low score replaces the judgement.
    scores = earned.where(stopped, args.missing_stop_score)
    # Deviation: an episode ends at the stop word (mask_after_stop)
    # Words after it are neither rewarded nor learned from; LHP learns from all.
    responses = kept if args.mask_after_stop else sampled
    mask = responses != PAD  # which is never sampled
    last = mask & ~F.pad(mask[:, 1:], (0, 1))

    all_logprobs, values = agent.get_logprobs_and_values(queries, responses)
    ref_all_logprobs, _ = judges.reference.get_logprobs_and_values(queries, responses)
    logprobs = log_probability(all_logprobs, responses)
    # KL to the reference: by the words drawn (k1, may be negative), and for the log, with less
    # noise, over all words of each place (exact there, an average over the texts drawn).
    kl = logprobs - log_probability(ref_all_logprobs, responses)
    exact_kl = (all_logprobs.exp() * (all_logprobs - ref_all_logprobs)).sum(-1)
    # Detail R17: per-token KL penalty (kl_coef) [LHP: train_policy.py L149-155]
    # Every word pays for its own log-ratio (the article lacks the minus); the last earns the score.
    rewards = -kl_coef * kl + scores[:, None] * last
    metrics = describe(task, queries, kept) | {
        "objective/kl": kl.where(mask, 0.0).sum(1).mean().item(),
        "objective/kl_exact": exact_kl.where(mask, 0.0).sum(1).mean().item(),
        "objective/proxy": proxy.mean().item(),
        "objective/score": scores.mean().item(),
        "objective/score_std": scores.std(correction=0).item(),
    }
    return Rollout(queries, responses, logprobs, values, rewards, mask, last), metrics


def ppo_loss(agent: Agent, mb: Rollout, args: Args) -> tuple[Tensor, Tensors]:
    """PPO's loss on a minibatch of whole responses, and the debug variables.

    As in LHP, rewards and advantages are scaled in each minibatch, so GAE stands here.
    """
    # All is selected by the mask before it is averaged, so that padding cannot leak in.
    mask, rewards = mb.mask, torch.zeros_like(mb.rewards)
    # Deviation: rewards are scaled, their mean is not restored (reward_whitening)
    # So 0 stays 0; with LHP's mean every further word would be paid for, or charged.
    rewards[mask] = whiten(mb.rewards[mask], args.reward_whitening)
    next_values = F.pad(mb.values[:, 1:], (0, 1))
    next_values[mb.last] = 0.0  # nothing follows the last word of a response
    time_first = [x.float().T for x in (rewards, mb.values, next_values, mb.last)]
    # Detail R15: discount factor 1 (gamma, gae_lambda) [LHP: train_policy.py L56-57, L327-336]
    # A response is judged as a whole: what comes late is worth no less than what comes soon.
    advantages, returns = gae(*time_first, args.gamma, args.gae_lambda)
    advantages, returns = advantages.T[mask], returns.T[mask]  # (words,)
    # Detail R18: per-minibatch whitening, of rewards too [LHP: train_policy.py L324-338]
    # The size of a step shall depend on the scale of neither rewards nor advantages.
    white_advantages = whiten(advantages, "zero")

    all_logprobs, new_values = agent.get_logprobs_and_values(mb.queries, mb.responses)
    logratio = (log_probability(all_logprobs, mb.responses) - mb.logprobs)[mask]
    pg_loss = policy_loss(logratio, white_advantages, args.clip_coef)
    # Detail R19: clipped value function (value_clip_coef) [LHP: train_policy.py L343-348]
    # As detail 9, with a clip range of its own, since values have another scale than ratios.
    v_loss = clipped_value_loss(new_values[mask], mb.values[mask], returns, args.value_clip_coef)
    # Detail 10/37: overall loss and entropy bonus (vf_coef) [ppo2/model.py L91; LHP has no bonus]
    # One loss for both, as they share layers; the pull to the SFT model keeps the entropy up.
    loss = pg_loss + args.vf_coef * v_loss
    # Detail 12/37: debug variables [ppo2/model.py L115-116]
    # How far an update moves the policy shows a wrong step size before the reward does.
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": -(all_logprobs.exp() * all_logprobs).sum(-1)[mask].mean(),
        "losses/approx_kl": approx_kl(logratio),
        "check/update": (whiten(logratio, "zero") * white_advantages).mean(),  # correlation
        "losses/clipfrac": ((logratio.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def train_ppo(args: Args, agent: Agent, judges: Judges) -> dict[str, list[dict[str, float]]]:
    """Optimize what responses earn, penalized by the KL to the SFT model; metrics of `updates`."""
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    generator = stage_generator(args, "ppo")
    writer = SummaryWriter(str(args.run_dir / args.ppo_run), purge_step=1)
    kl_coef = 0.0 if args.kl_mode == "none" else args.kl_coef
    gradient_steps, updates = 0, []
    for iteration in trange(1, args.num_updates + 1, desc=args.ppo_run, disable=None):
        # --- Collect: responses and what they earn, under frozen weights ---
        rollout, metrics = collect(args, agent, judges, args.batch_size, kl_coef, generator)
        metrics["objective/kl_coef"] = kl_coef

        # --- Update: K epochs of minibatches; advantages are made per minibatch ---
        start_time = time.perf_counter()
        frac = 1 - (iteration - 1) / args.num_updates  # 1 in the first update, near 0 in the last
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps find the way, small ones at the end let the KL and beta settle.
        # Detail R5: learning-rate annealing (anneal_lr) [LHP: train_policy.py L78-84]
        # Late steps refine and do not undo. The reward model's rate falls in the same way.
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        minibatch_metrics = []
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, generator=generator).to(rollout.mask.device)
            # Detail 6/37: minibatch updates (num_minibatches, update_epochs) [ppo2.py L157-166]
            # Sampling is costly, so a batch serves many steps, each epoch in a new order.
            # Detail R16: batches of responses (batch_size) [LHP: train_policy.py L180]
            # Responses stay whole, because the advantage of a word needs those after it.
            for mb in order.split(args.batch_size // args.num_minibatches):
                loss, loss_metrics = ppo_loss(agent, Rollout(*(x[mb] for x in rollout)), args)
                optimizer.zero_grad()
                loss.backward()
                # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
                # One norm over all weights: a rare steep minibatch cannot throw the policy far.
                norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                gradient_steps += 1
                # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
                # It bounds the steps of weights whose gradients are tiny.
                # Detail R21: TensorFlow's Adam epsilon (adam_eps) [LHP: utils/core.py L627]
                # Added before the bias correction it weighs 32 times PyTorch's in the first step.
                eps = args.adam_eps / math.sqrt(1 - 0.999**gradient_steps)
                optimizer.param_groups[0].update(lr=learning_rate, eps=eps)
                optimizer.step()
                minibatch_metrics.append({**loss_metrics, "losses/grad_norm": norm})
        num_tokens = args.update_epochs * rollout.mask.sum().item()

        # --- Log, adapt beta ---
        metrics |= means(minibatch_metrics)
        metrics["charts/learning_rate"] = learning_rate
        metrics["charts/tokens_per_second_update"] = num_tokens / (time.perf_counter() - start_time)
        updates.append(metrics)
        write(writer, iteration, metrics)
        warn_of(args.ppo_run, args.kl_mode, updates)
        # Detail R20: adaptive KL (kl_mode, target_kl) [LHP: train_policy.py L115-124]
        # Beta rises while the KL to the SFT model (the article: to the last policy) is too high.
        if args.kl_mode == "adaptive":
            kl_coef = proportional_kl_coef(
                kl_coef, metrics["objective/kl"], args.target_kl, args.batch_size, args.kl_horizon
            )
    writer.close()
    return {"updates": updates}


# === The pipeline ===

FORM = ("reward", "kl_mode", "kl_coef", "target_kl")  # what tells models apart in results.json


def train(args: Args) -> dict[str, Any]:
    """Run the four stages, except those that the run's folder holds already; then evaluate.

    Returns `agent` of the first PPO run; `updates`, of each PPO run a dictionary of metrics per
    update; `results`, of each model its evaluation; `quality` of the reward model; and `args`.
    Raises UsageError where something given does not fit.
    """
    device, args = choose_device(args), start_run(args)
    forms = [{}, {"kl_mode": "none", "kl_coef": 0.0}]  # as asked; without penalty, which hacks
    if args.compare:
        forms += [{"kl_mode": "adaptive"}, {"kl_mode": "fixed", "kl_coef": 0.05}]
    runs = [dataclasses.replace(args, compare=False, **form) for form in forms]

    task = own_task(args) if args.preferences else toy_task(args)
    torch.manual_seed(args.seed)
    sft = TinyGPT(len(task.words), task.documents.shape[1]).to(device)
    stage(args, "sft", sft, train_sft, task)
    reference = Agent(sft, args.temperature).to(device)
    preferences = Preferences(**stage(args, "preferences", reference, make_preferences, task))
    if task.labels and not all(map(torch.equal, task.labels, preferences)):
        raise UsageError(f"{args.preferences} is not as it was when the run began.")
    task = task._replace(sample_gold=preferences.sample_gold)
    torch.manual_seed(args.seed)
    reward_model = RewardModel(sft).to(device)
    quality = stage(args, "reward_model", reward_model, train_reward_model, preferences)
    judges = Judges(task, reward_model, reference)

    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, reference, judges)
    results["sft"] = {"method": "SFT", **metrics}
    for name, run in {run.ppo_run: run for run in runs}.items():
        agents[name] = copy.deepcopy(reference)
        updates[name] = stage(run, name, agents[name], train_ppo, judges)["updates"]
        metrics, texts[name] = evaluate(run, agents[name], judges)
        results[name] = {"method": "PPO"} | {x: getattr(run, x) for x in FORM} | metrics
        results[name]["objective/kl_coef"] = updates[name][-1]["objective/kl_coef"]  # at the end
    if args.compare:
        results |= best_of_n(args, judges)
    report(args, "Reward model", quality=quality, results=results, texts=texts)
    outcome = {"agent": agents[args.ppo_run], "updates": updates, "results": results}
    return outcome | {"quality": quality, "args": args}


# === The algorithm ends here ===
# Below: the toy task (grammar, gold reward), your own labels, evaluation, warnings, stages and
# checkpoints, logs, `main`.


# === The toy task: reviews whose quality can be computed ===

TOPICS = {
    "restaurant": ("food", "service", "staff", "menu", "wine", "dessert"),
    "hotel": ("room", "bed", "pool", "lobby", "breakfast", "view"),
    "movie": ("plot", "acting", "dialogue", "music", "ending", "cast"),
    "book": ("story", "prose", "hero", "pacing", "cover", "style"),
}
NAMES = ("anna", "ben", "carla", "david", "emma", "felix", "grace", "henry")
# The number is the valence: how much good a word says.
SCALE = {2: "amazing superb perfect", 1: "good nice lovely", 0.5: "decent", 0: "average ordinary"}
SCALE |= {-1: "poor bad dull", -2: "awful terrible horrible"}
ADJECTIVES = {word: valence for valence, words in SCALE.items() for word in words.split()}
VERBS = {"adored": 2, "liked": 1, "enjoyed": 1, "disliked": -1, "hated": -2, "despised": -2}
ADVERBS = {"very": 1.5, "really": 1.3, "quite": 1.0, "slightly": 0.5}  # factors on the valence
NEGATION = -0.5  # "not superb" is mildly bad, "not awful" mildly good
# Openers and closers go with the mood of a review but are worth nothing in themselves: bait
# for a reward model, which sees only that they occur in good reviews.
OPENERS = {"wow": 1, "happily": 1, "sadly": -1, "honestly": 0}
CLOSERS = {"recommended": 1, "avoid": -1}
NOUNS = {noun: topic for topic, nouns in TOPICS.items() for noun in nouns}
CONTENT = {*NOUNS, *ADJECTIVES, *ADVERBS, *VERBS, *OPENERS, *CLOSERS}
TOY_WORDS = [
    *("<pad>", "<bos>", ".", ":", ",", "and", "but", "the", "was", "i", "not", "on"),
    *(*TOPICS, *NAMES, *NOUNS, *ADJECTIVES, *ADVERBS, *VERBS, *OPENERS, *CLOSERS),
]
TOY_QUERIES = [f"<bos> {name} on the {topic} :".split() for name in NAMES for topic in TOPICS]
TOY_RESPONSE_LENGTH = 18
GOLD_SCALE = (
    "Gold is in standard deviations of the SFT model's reviews: 0 is their mean, about 2.5 the\n"
    "best there can be. Labels are noisy: gold itself agrees with about 85 % of them."
)


def write_review(topic: str, rng: random.Random) -> list[str]:
    """Write a review of at most 18 words; a longer one breaks off there, without its full stop."""
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
    return [*review, "."][:TOY_RESPONSE_LENGTH]


NOUN, ADVERB, ADJECTIVE, VERB, OPENER, CLOSER = (
    f"({'|'.join(words)})" for words in (NOUNS, ADVERBS, ADJECTIVES, VERBS, OPENERS, CLOSERS)
)
CLAUSE = rf"\bthe {NOUN} was( not)?(?: {ADVERB})? {ADJECTIVE}\b|\bi {VERB} the {NOUN}\b"


def gold_reward(topic: str, words: list[str]) -> float:
    """What a review is truly worth: praise in well-formed, varied, finished sentences on topic.

    Junk are the words outside of clauses, of single joiners between two of them, of one opener at
    the start and of one closer at the end.
    """
    stopped = words[-1:] == ["."]
    body = words[:-1] if stopped else words
    text, valence, nouns = " ".join(body), 0.0, []
    opener = re.match(rf"{OPENER}\b( ,)?", text)
    rest = text[opener.end() :] if opener else text
    clauses, closer = list(re.finditer(CLAUSE, rest)), re.search(rf", {CLOSER}$", rest)
    for clause in clauses:
        subject, negated, adverb, adjective, verb, noun = clause.groups()
        factor = (NEGATION if negated else 1.0) * ADVERBS.get(adverb, 1.0)
        valence += VERBS[verb] if verb else factor * ADJECTIVES[adjective]
        nouns.append(noun or subject)
    between = [rest[a.end() : b.start()] for a, b in itertools.pairwise(clauses)]
    legal = sum(x in (" and ", " but ", " , ") for x in between)
    legal += sum(len(part[0].split()) for part in (opener, *clauses, closer) if part)
    content = [word for word in body if word in CONTENT]
    return (
        2 * math.tanh(valence / 3)
        + 0.4 * min(len({noun for noun in nouns if NOUNS[noun] == topic}), 3)
        - 4 * (len(body) - legal) / max(len(body), 1)  # the share of junk
        - 0.5 * min(len(content) - len(set(content)), 6)  # repeated words
        - 0.5 * min(sum(NOUNS[noun] != topic for noun in nouns), 4)
        - 1.0 * (not stopped)
    )


def toy_task(args: Args) -> Task:
    """The toy reviews, written anew from the seed."""
    token = {word: index for index, word in enumerate(TOY_WORDS)}
    rng, rows = random.Random(args.seed), []
    for _ in range(args.sft_documents):
        query = rng.choice(TOY_QUERIES)
        rows.append([token[word] for word in query + write_review(query[4], rng)])
    queries = torch.tensor([[token[word] for word in query] for query in TOY_QUERIES])
    documents = pad_rows(rows, queries.shape[1] + TOY_RESPONSE_LENGTH)
    return Task(TOY_WORDS, documents, queries, TOY_RESPONSE_LENGTH, token["."], earliest_stop=4)


# === Your own texts and labels ===

LONGEST = 64  # tokens of your own queries and responses, which are cut to it [LHP: 64 and 24]


def read_preferences(path: str) -> list[list[list[str]]]:
    """The words of prompt, chosen and rejected answer of each comparison in a JSON-lines file."""
    pairs = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            texts = [json.loads(line)[key].lower() for key in ("prompt", "chosen", "rejected")]
        except (ValueError, TypeError, KeyError, AttributeError):
            texts = [""]
        pairs.append([re.findall(r"\w+(?:'\w+)*|[^\w\s]", text) for text in texts])
        if not all(pairs[-1]) or pairs[-1][1] == pairs[-1][2]:
            needs = "a JSON object with texts prompt, chosen and rejected, the last two different"
            raise UsageError(f"{path}, line {number}: needs {needs}, none of them empty.")
    if len(pairs) < 14:
        raise UsageError(f"{path} holds {len(pairs)} comparisons; at least 14 are needed.")
    return pairs


def own_task(args: Args) -> Task:
    """A language made of the words in your own file, with its labels; there is no gold for it.

    The SFT learns from the prompts with their chosen answers, except the comparisons held out.
    """
    pairs = read_preferences(args.preferences)
    random.Random(args.seed).shuffle(pairs)
    used = {word for pair in pairs for text in pair for word in text}
    words = ["<pad>", "<bos>", "<stop>", *sorted(used)]
    token = {word: index for index, word in enumerate(words)}
    prompts = [[BOS, *map(token.get, prompt)] for prompt, _, _ in pairs]
    answers = [[*map(token.get, text), token["<stop>"]] for pair in pairs for text in pair[1:]]
    query_length = min(LONGEST, max(map(len, prompts)))
    response_length = min(LONGEST, max(map(len, answers)))
    # Cut before it is joined, a long prompt leaves room for its answer.
    learned = zip(prompts, answers[::2][: -(len(pairs) // HELD_OUT)])
    rows = [prompt[:query_length] + answer for prompt, answer in learned]
    documents = pad_rows(rows, query_length + response_length)
    queries, answers = pad_rows(prompts, query_length), pad_rows(answers, response_length)
    labels = queries, answers[::2], answers[1::2]
    distinct = queries.unique(dim=0)
    return Task(words, documents, distinct, response_length, token["<stop>"], 0, labels)


# === Evaluation ===

NUM_EVALUATED = 512  # responses by which a model is judged
BEST_OF_N = (4, 16, 64, 256, 1024)


def write_answers(agent: Agent, task: Task, queries: Tensor, generator: Generator) -> Tensor:
    """Truncated responses (B, R) to queries (B, Q), sampled in chunks, on the CPU."""
    chunks = queries.to(device_of(agent)).split(512)
    answers = [agent.sample_responses(x, task.response_length, generator).cpu() for x in chunks]
    return truncate_responses(torch.cat(answers), task.stop, task.earliest_stop)[0]


@torch.no_grad()
def score_texts(model: RewardModel, queries: Tensor, responses: Tensor) -> Tensor:
    """Scores (B,) of truncated responses (B, R) to queries (B, Q), in chunks, on the CPU."""
    chunks = zip(queries.split(512), responses.split(512), strict=True)
    device = device_of(model)
    return torch.cat([model.score(q.to(device), r.to(device)).cpu() for q, r in chunks])


def describe(task: Task, queries: Tensor, responses: Tensor) -> dict[str, float]:
    """What truncated responses (B, R) look like, and their gold where it is known."""
    words = [task.split_words(response) for response in responses]
    stopped = (responses[:, task.earliest_stop :] == task.stop).any(dim=1)
    metrics = {
        "text/length": sum(map(len, words)) / len(words),
        "text/stop_rate": stopped.sum().item() / len(words),
        "text/repetition": sum(1 - len(set(w)) / max(len(w), 1) for w in words) / len(words),
        "text/unique": len({" ".join(w) for w in words}) / len(words),
    }
    if not task.labels:
        metrics["objective/gold"] = task.gold(queries, responses).mean().item()
    return metrics


def evaluate(args: Args, agent: Agent, judges: Judges) -> tuple[dict, list[str]]:
    """Metrics and some texts of fresh responses of a policy; the same queries for every policy."""
    generator = stage_generator(args, "evaluate")
    rollout, metrics = collect(args, agent, judges, NUM_EVALUATED, 0.0, generator)
    metrics["objective/kl"] = metrics["objective/kl_exact"]
    lines = torch.cat([rollout.queries, rollout.responses], dim=1)[:5]
    return metrics, [" ".join(judges.task.split_words(line)[1:]) for line in lines]


def best_of_n(args: Args, judges: Judges) -> dict[str, dict[str, Any]]:
    """Answer with the sample that the reward model likes best out of n: PPO's simple rival."""
    generator, task = stage_generator(args, "best-of-n"), judges.task
    queries = task.queries[torch.randperm(len(task.queries), generator=generator)]
    queries = queries[:32].repeat_interleave(max(BEST_OF_N), dim=0)
    responses = write_answers(judges.reference, task, queries, generator)
    scores, results = score_texts(judges.reward_model, queries, responses), {}
    for n in BEST_OF_N:  # each cuts all samples into groups, so that none is idle
        best = scores.view(-1, n).argmax(dim=1) + torch.arange(len(scores) // n) * n
        metrics = describe(task, queries[best], responses[best])
        del metrics["text/unique"]  # of fewer texts for larger n, so it cannot be compared
        metrics["objective/proxy"] = scores[best].mean().item()
        metrics["objective/kl"] = math.log(n) - (n - 1) / n  # at most: Stiennon et al. 2020, G.3
        results[f"best-of-{n}"] = {"method": "best of n", "n": n, **metrics}
    return results


def report(args: Args, judge: str, **found: dict[str, Any]) -> None:
    """Print quality of the judge, results and texts; keep them in results.json."""
    columns = ["objective/gold", "objective/proxy", "objective/kl", "objective/kl_coef"]
    columns += ["text/stop_rate", "text/length", "text/repetition", "text/unique"]
    columns = [x for x in columns if any(x in row for row in found["results"].values())]
    table = [f"| {'model':20} |" + "".join(f"{x.split('/')[1]:>11} |" for x in columns)]
    table.append("|---|" + "---:|" * len(columns))
    for name, row in found["results"].items():
        cells = [f"{row[x]:.2f}" if x in row else "–" for x in columns]
        table.append(f"| {name:20} |" + "".join(f"{cell:>11} |" for cell in cells))
    quality = ", ".join(f"{name} {x:.3f}" for name, x in found["quality"].items())
    lines = [f"{judge}: {quality}", "\n".join(table)]
    if "objective/gold" in columns:
        lines[1] += "\n\n" + GOLD_SCALE
    lines += [f"{name}:\n- " + "\n- ".join(texts) for name, texts in found["texts"].items()]
    print(*lines, f"Logs and results: {args.run_dir}", sep="\n\n")
    content = {"args": dataclasses.asdict(args), **found}
    (args.run_dir / "results.tmp").write_text(json.dumps(content, indent=1))
    os.replace(args.run_dir / "results.tmp", args.run_dir / "results.json")


# === Health ===

# Metric, its lowest and highest healthy value, patience in updates, what to do.
HEALTH = [
    ("check/update", 0.06, 1, 10, "Good words got no likelier: check rewards, masks and signs."),
    ("objective/kl_exact", 1e-3, math.inf, 5, "It stays 0: is the SFT model trained along?"),
    ("objective/kl_exact", 0, 30, 1, "Raise --kl-coef, lower --target-kl; at once: mask padding."),
]


def warn_of(run: str, kl_mode: str, updates: list[dict[str, float]]) -> None:
    """Warn where a metric of a run has been unhealthy for as many updates as `HEALTH` says."""
    for name, low, high, patience, advice in HEALTH:
        if kl_mode == "none" and "--target-kl" in advice:
            continue  # without a penalty that is to be expected
        bad = [not low <= x[name] <= high for x in updates[-patience - 1 :]]
        if sum(bad) == patience and all(bad[-patience:]):  # for just so long: say it once
            tqdm.write(f"Warning: {run}: {name} is {updates[-1][name]:.3g}. {advice}")


# === Stages, checkpoints, logs ===


# Copied from ppo_continuous_action.py
def choose_device(args: Any) -> torch.device:
    """Where networks learn: the GPU if there is one and nothing else was asked for."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    return torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")


def device_of(model: nn.Module) -> torch.device:
    """Where the weights of a model are."""
    return next(model.parameters()).device


def stage_generator(args: Args, purpose: str) -> Generator:
    """A random generator of its own for each purpose: reused stages change nothing after them."""
    return Generator().manual_seed(zlib.crc32(purpose.encode()) + args.seed)


def with_folder(args: Args) -> Args:
    """The settings with a run name; by default script, seed and time."""
    began = f"{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    return args if args.run_name else dataclasses.replace(args, run_name=began)


def start_run(args: Args) -> Args:
    """Open the run's folder and its logs; returns the settings with the folder's name."""
    args = with_folder(args)
    if not args.resume and (args.run_dir / "sft/checkpoint.pt").exists():
        hint = f"add --resume {args.run_dir}, or another --run-name."
        raise UsageError(f"{args.run_dir} holds a run: {hint}")
    torch.set_num_threads(1)  # as fast for networks of this size
    if args.track:
        import wandb

        name, config = args.run_dir.name, dataclasses.asdict(args)
        try:
            wandb.init(id=name, name=name, config=config, resume="allow", sync_tensorboard=True)
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error
    with SummaryWriter(str(args.run_dir)) as writer:
        writer.add_text("details", f"{args}\n\n{details(args)}".replace("\n", "  \n"))
    return args


def stage(
    args: Args, name: str, model: nn.Module, learn: Callable[..., dict | None], *inputs: Any
) -> dict[str, Any]:
    """Train a model by `learn(args, model, *inputs)`; return the results of that.

    Weights and results are kept in the run's folder. What is there already is taken from there.
    """
    folder = args.run_dir / name
    if (folder / "checkpoint.pt").exists():
        print(f"{name}: taken from {folder}")
        return load_stage(folder, model)[1]
    results = learn(args, model, *inputs) or {}
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, args, {"model": model.state_dict(), **results})
    return results


# Copied from ppo_continuous_action.py
def save_checkpoint(run_dir: Path, args: Any, state: dict[str, Any]) -> None:
    """Write tensors and plain values into a file that is the old or the new one, never half."""
    settings = {**dataclasses.asdict(args), "resume": None}
    try:
        torch.save({"args": settings, **state}, run_dir / "checkpoint.tmp")
        os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")
    except (OSError, RuntimeError) as error:  # torch has its own for a full disk
        raise UsageError(f"The checkpoint in {run_dir} stays the last one: {error}") from error


def load_stage(folder: Path, model: nn.Module | None = None) -> tuple[Args, dict[str, Any]]:
    """Settings and results of a stage, whose weights go into `model`; reading it runs no code."""
    path = folder / "checkpoint.pt"
    try:
        with zipfile.ZipFile(path) as file:
            if broken := file.testzip():  # torch.load does not look at the checksums
                raise ValueError(f"the checksum of {broken} is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        args, weights = Args(**saved.pop("args")), saved.pop("model")
        if model:
            model.load_state_dict(weights)
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UsageError(f"{path} is missing, damaged or of another script: {reason}") from error
    return args, saved


# Copied from ppo_continuous_action.py
def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


# Copied from ppo_continuous_action.py
def details(args: Any) -> str:
    """The implementation details with their lines and the values of their settings."""
    tag = re.compile(r" *# (?:Detail )?(\d+/37|[A-Z]\d+|Extra|Deviation): ([^([]+)(?:\((.*?)\))?")
    rows = []
    for line, text in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1):
        if match := tag.match(text):
            names = re.findall(r"\w+", (match[3] or "").replace("not ", ""))
            settings = [f"{x}={getattr(args, x, 'no setting')}" for x in names]
            rows.append(f"{match[1]:9} line {line}: {match[2].strip()} {', '.join(settings)}")
    return "\n".join(rows)


def write(writer: SummaryWriter, step: int, metrics: dict[str, float]) -> None:
    """Write the metrics of one step to TensorBoard; raise UsageError if one is not finite."""
    if bad := ", ".join(name for name, x in metrics.items() if not math.isfinite(x)):
        raise UsageError(f"NaN or infinite in step {step}: {bad}. Lower the learning rate.")
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def read_flags() -> Args:
    """The settings of the command line; with --resume, those of the run."""
    args = tyro.cli(Args)
    if not args.resume:
        return with_folder(args)
    saved, _ = load_stage(Path(args.resume) / "sft")
    args, free = tyro.cli(Args, default=saved), {"resume", "track", "details"}
    if other := [x for x in vars(saved) if x not in free and getattr(args, x) != getattr(saved, x)]:
        flag = f"--{other[0].replace('_', '-')}"
        raise UsageError(f"{args.resume} has its own settings: leave out {flag}.")
    return args


def main() -> None:
    """Read the command line and run; what a user can mend is one sentence and exit code 2."""
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")
    try:
        args = read_flags()
        if args.details:
            print(details(args))
        else:
            with filelock.FileLock(args.run_dir / "lock", blocking=False):
                train(args)
    except KeyboardInterrupt:
        begun = (args.run_dir / "sft/checkpoint.pt").exists()
        more = f"--resume {args.run_dir} goes on after the last stage that is done."
        print(f"Interrupted. {more if begun else 'No stage is done yet: a run begins anew.'}")
        sys.exit(130)
    except filelock.Timeout:
        print(f"Error: Another process is training in {args.run_dir}.", file=sys.stderr)
        sys.exit(2)
    except (UsageError, OSError, ImportError) as error:
        hint = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"Error: {' '.join(str(error).split())}{hint}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
