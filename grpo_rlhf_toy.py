# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock==4.2.12", "pydantic==2.14.4", "tensorboard==2.21.0", "torch==2.13.0",
#   "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Group relative policy optimization (GRPO) on the task of ppo_rlhf_toy.py: RLHF without values.

    python grpo_rlhf_toy.py

`uv run` installs what it needs; without uv, `pip install` the packages named above.

A minute on one CPU core. Up to the reward model all is ppo_rlhf_toy.py, to the bit: a tiny GPT
learns to write reviews (supervised fine-tuning, SFT), a simulated labeller compares pairs of them
by the gold reward, a formula, and a reward model, the proxy, learns from the labels. Then each
query gets G responses, and the advantage of all words of a response is what it earned minus the
mean of its group: no value function, no GAE, and one pass over a batch suffices.

New here: `group_advantages`, `word_weights`, `collect`, `grpo_loss`, `train_grpo`.

Published forms are settings of it:
- the default: Dr. GRPO's advantages with RLOO's KL penalty, its weight beta steered as in PPO;
- GRPO (DeepSeekMath, Shao et al. 2024, arXiv 2402.03300): --std --length-divisor own --kl-in-loss
  --kl-mode fixed;
- Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): --kl-mode none;
- DAPO's token-level loss (Yu et al. 2025, arXiv 2503.14476): --length-divisor mean;
- RLOO (Ahmadian et al. 2024, arXiv 2402.14740): --kl-mode fixed --num-minibatches 1 --clip-coef
  inf; its advantages are G / (G - 1) times as large, which Adam makes up for.
`--compare` adds the second with an adaptive beta, and the third. `--reward gold` is the setting of
verifiable rewards: finished texts earn the formula itself, and there is no proxy to be hacked.
Beta belongs to a scale: DeepSeekMath's own (--kl-mode fixed --kl-coef 0.04 --group-size 64) is far
too weak here and the reward is hacked; RLOO with the 0.5 that an adaptive beta starts at is held
too tight, 0.1 suits it. The gradient of k3 = r - 1 - log r with r = SFT model / policy is, word
by word, that of KL(SFT model || policy): it pulls an overused word back by at most 1, where the KL
penalty wants log(policy / SFT model), and does not see where a word leads (arXiv 2510.01555; exact
gradients in tests/scripts/test_grpo.py).

G1-G8 are comments above the statements that do what they say, beside the details of PPO (ppo2 =
openai/baselines@ea25b9e8) and RLHF (R; LHP = openai/lm-human-preferences@cbfd210b) that apply.
B = responses in a batch, Q = tokens of a query, R = of a response, L = Q + R, V = words in the
vocabulary, D = width of the network; `mb` is a minibatch.
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
import zlib
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
StepSize = Annotated[NonNegativeFloat, tyro.conf.arg(aliases=["--lr"])]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Name = Annotated[str, pydantic.Field(pattern=r"^\w[\w.=+-]*$")]  # of a folder in runs/


# Copied from ppo_continuous_action.py
class UsageError(ValueError):
    """Something that the user can mend; `main` prints it as one sentence."""


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args:
    # --- Experiment ---
    seed: Seed = 1  # random seed of the whole run
    run_name: Name | None = None  # folder below runs/; by default script, seed, time
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    compare: bool = False  # also make runs in DeepSeekMath's form and without a KL penalty

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

    # --- GRPO ---
    reward: Literal["model", "gold"] = "model"  # gold: no proxy, the formula itself is the reward
    kl_mode: Literal["adaptive", "fixed", "none"] = "adaptive"  # beta: steered, constant, or 0
    kl_coef: NonNegativeFloat = 0.5  # weight of the KL penalty, beta, at the start [paper: 0.04]
    target_kl: PositiveFloat = 6.0  # KL to the SFT model with an adaptive beta, in nats [LHP: 6]
    kl_horizon: PositiveInt = 500  # episodes over which beta adapts [LHP: 10000 of 1,000,000]
    kl_in_loss: bool = False  # the penalty is k3 in the loss, not k1 in the reward [paper: yes]
    group_size: Annotated[int, pydantic.Field(ge=2)] = 8  # responses to a query, G [paper: 64]
    std: bool = False  # divide advantages by the group's standard deviation [paper: yes]
    length_divisor: Literal["longest", "own", "mean"] = "longest"  # of sums over words [paper: own]
    num_updates: PositiveInt = 80  # batches of responses, each followed by an update
    batch_size: PositiveInt = 128  # responses per update, B, of whole groups [paper: 1024]
    num_minibatches: PositiveInt = 4  # minibatches per pass, of whole responses [paper: 1]
    update_epochs: PositiveInt = 1  # passes over a batch [paper: 1]
    learning_rate: StepSize = 7e-4  # Adam's step size [paper: 1e-6, for 7 billion weights]
    anneal_lr: bool = True  # lower it linearly towards 0, as LHP does
    clip_coef: PositiveFloat = 0.2  # clip range of the policy ratio, epsilon [inf: off]
    max_grad_norm: PositiveFloat = 1.0  # largest norm of the whole gradient [inf: off]
    missing_stop_score: float = -1.0  # score without a stop word, below usual scores [LHP: -1]

    def __post_init__(self) -> None:
        if self.batch_size % self.num_minibatches or self.batch_size % self.group_size:
            raise ValueError("--num-minibatches and --group-size must both divide --batch-size.")
        least = min(self.kl_coef, self.kl_horizon - self.batch_size / 5)
        if self.kl_mode == "adaptive" and least <= 0:
            raise ValueError("To adapt beta takes --kl-coef > 0, --kl-horizon > --batch-size / 5.")

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(f"runs/{self.run_name}")


# === The task, as the pipeline sees it ===
# Copied from ppo_rlhf_toy.py

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


# Copied from ppo_rlhf_toy.py
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


# Copied from ppo_rlhf_toy.py
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


# Copied from ppo_rlhf_toy.py
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
    """A policy: a language model at a sampling temperature. There is no value function."""

    def __init__(self, language_model: TinyGPT, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.policy = language_model

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

    def get_logprobs(self, queries: Tensor, responses: Tensor) -> Tensor:
        """Log-probabilities (B, R, V) of all words in place of those of responses (B, R)."""
        # Detail R1: query and response concatenated [LHP: policy.py L114-126; rewards.py L105]
        # A word is judged by the query and the words before it, by the reward model too.
        hidden, _ = self.policy(torch.cat([queries, responses], dim=1))
        before = slice(queries.shape[1] - 1, -1)  # a word is predicted one position earlier
        # Detail R10: logits scaled by the temperature (temperature) [LHP: policy.py L121]
        # The probabilities must be those that the words were sampled with.
        logits = self.policy.logits(hidden[:, before]) / self.temperature
        return logits.log_softmax(dim=-1)


# === The math: pure functions ===


def group_advantages(rewards: Tensor, group_size: int, std: bool) -> Tensor:
    """Advantages (B,) of responses that earned `rewards` (B,), those of a group side by side.

    RLOO compares with the mean of the others in the group, which is G / (G - 1) times as much. The
    standard deviation is the sample's, plus 1e-4, so that a group all alike gets 0, not 0/0.
    """
    groups = rewards.view(-1, group_size)
    # Detail G2: advantage relative to the group's mean [Shao et al. 2024]
    # The group's mean takes the place of a value function: what counts is to beat the siblings.
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if std:
        # Detail G3: division by the group's spread (std) [Shao et al. 2024]
        # Queries whose answers differ little then weigh as much as others.
        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-4)
    return advantages.flatten()


def word_weights(mask: Tensor, length_divisor: Literal["longest", "own", "mean"]) -> Tensor:
    """Weights (words,) of the words in `mask` (B, R), to be averaged over after weighting.

    The mean is then that over responses of the sum over their words divided by R (Dr. GRPO), by
    their own length (the paper), or by the mean length, so that all words weigh the same (DAPO).
    """
    lengths = mask.sum(dim=1, keepdim=True)
    # The longest possible, not the longest here: so the weight of a word does not hang on others.
    longest, mean = torch.full_like(lengths, mask.shape[1]), lengths.float().mean()
    # Detail G5: length divisor (length_divisor) [Liu et al. 2025]
    # Divided by its own length, each word of a short response weighs more than of a long one.
    divisors = {"longest": longest, "own": lengths, "mean": mean}[length_divisor]
    return (mask.sum() / (len(mask) * divisors)).expand_as(mask)[mask]


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


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """KL(old || new) from actions of the old policy, by k3 = mean(r - 1 - log r), r = new/old.

    Unbiased, and less noisy than k1 = mean(-log r) (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


# Copied from ppo_rlhf_toy.py
def truncate_responses(responses: Tensor, stop: int, earliest_stop: int) -> tuple[Tensor, Tensor]:
    """Cut responses (B, R) after their first stop word at index `earliest_stop` or later.

    Returns them with padding after that stop word, and whether there was one (B,).
    """
    stops = responses == stop
    stops[:, :earliest_stop] = False
    stops_before = stops.cumsum(dim=1) - stops.long()
    return responses.where(stops_before == 0, PAD), stops.any(dim=1)


# Copied from ppo_rlhf_toy.py
def log_probability(all_logprobs: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities (B, R) of the words that were written, out of those of all (B, R, V)."""
    return all_logprobs.gather(-1, responses[..., None]).squeeze(-1)


# Copied from ppo_rlhf_toy.py
def proportional_kl_coef(
    kl_coef: float, kl: float, target_kl: float, num_episodes: int, horizon: int
) -> float:
    """Move beta in proportion to the relative error of the KL, clipped to 20 % (Ziegler et al.).

    `kl` is KL(policy || reference) in nats per response, the mean over `num_episodes` responses.
    """
    error = min(max(kl / target_kl - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_episodes / horizon)


# Copied from ppo_rlhf_toy.py
def language_model_loss(model: TinyGPT, documents: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per word, of predicting documents (B, L) word by word."""
    hidden, _ = model(documents[:, :-1])
    real = documents[:, 1:] != PAD
    return F.cross_entropy(model.logits(hidden[real]), documents[:, 1:][real])


# === Stage 1: supervised fine-tuning ===
# Copied from ppo_rlhf_toy.py


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
# Copied from ppo_rlhf_toy.py

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
# Copied from ppo_rlhf_toy.py


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


# === Stage 4: GRPO ===


class Rollout(NamedTuple):
    """A batch of responses and what the update needs; entries outside `mask` are ignored."""

    queries: Tensor  # (B, Q)
    responses: Tensor  # (B, R), truncated
    logprobs: Tensor  # (B, R), under the policy that wrote them
    ref_logprobs: Tensor  # (B, R), under the SFT model
    rewards: Tensor  # (B,)
    mask: Tensor  # (B, R), True at the words


# Copied from ppo_rlhf_toy.py
class Judges(NamedTuple):
    """What responses are measured by."""

    task: Task  # knows the gold reward
    reward_model: RewardModel  # the proxy
    reference: Agent  # the SFT model


@torch.no_grad()
def collect(
    args: Args, agent: Agent, judges: Judges, queries: Tensor, kl_coef: float, generator: Generator
) -> tuple[Rollout, dict[str, float]]:
    """Responses to queries (B, Q), with the rewards for a weight `kl_coef` of the KL; metrics."""
    task, queries = judges.task, queries.to(device_of(agent))
    sampled = agent.sample_responses(queries, task.response_length, generator)
    responses, stopped = truncate_responses(sampled, task.stop, task.earliest_stop)
    proxy = judges.reward_model.score(queries, responses)
    earned = task.gold(queries, responses).to(proxy) if args.reward == "gold" else proxy
    # Detail R14: rejection sampling (missing_stop_score) [LHP: lm_tasks.py L39-65]
    # What breaks off gets a fixed low score, whatever the reward model makes of it.
    scores = earned.where(stopped, args.missing_stop_score)
    mask = responses != PAD  # which is never sampled

    all_logprobs = agent.get_logprobs(queries, responses)
    ref_all_logprobs = judges.reference.get_logprobs(queries, responses)
    logprobs = log_probability(all_logprobs, responses)
    ref_logprobs = log_probability(ref_all_logprobs, responses)
    # The estimate k1 of the KL to the reference, which may be negative, and with less noise that
    # over all words of each place (exact there, an average over the texts drawn).
    kl = (logprobs - ref_logprobs).where(mask, 0.0).sum(dim=1)  # (B,)
    exact_kl = (all_logprobs.exp() * (all_logprobs - ref_all_logprobs)).sum(-1)
    # Detail G6: KL penalty in the reward (kl_in_loss) [Ahmadian et al. 2024]
    # As a part of what is earned it sees where a word leads; its gradient is that of the KL.
    rewards = scores if args.kl_in_loss else scores - kl_coef * kl
    metrics = describe(task, queries, responses) | {
        "objective/kl": kl.mean().item(),
        "objective/kl_exact": exact_kl.where(mask, 0.0).sum(1).mean().item(),
        "objective/proxy": proxy.mean().item(),
        "objective/score": scores.mean().item(),
        "objective/score_std": scores.std(correction=0).item(),
    }
    return Rollout(queries, responses, logprobs, ref_logprobs, rewards, mask), metrics


def grpo_loss(
    agent: Agent, mb: Rollout, advantages: Tensor, kl_coef: float, args: Args
) -> tuple[Tensor, Tensors]:
    """GRPO's loss on a minibatch of responses with advantages (B,), and the debug variables."""
    mask, weights = mb.mask, word_weights(mb.mask, args.length_divisor)
    all_logprobs = agent.get_logprobs(mb.queries, mb.responses)
    logprobs = log_probability(all_logprobs, mb.responses)
    logratio = (logprobs - mb.logprobs)[mask]  # (words,)
    # Detail G4: one advantage for all words of a response [Shao et al. 2024]
    # Which of the words earned it is not asked, so that no values are needed.
    word_advantages = advantages[:, None].expand_as(mask)[mask]
    loss = pg_loss = policy_loss(logratio, weights * word_advantages, args.clip_coef)
    # The mean of k3 is unbiased for KL(policy || reference) while the samples are those of this
    # policy; its gradient is not, see the file's docstring.
    ref_logratio = (mb.ref_logprobs - logprobs)[mask]
    k3 = ref_logratio.exp() - 1 - ref_logratio
    if args.kl_in_loss:
        # Detail G7: KL penalty in the loss, by k3 (kl_in_loss) [Shao et al. 2024]
        # Word by word its gradient is KL(SFT model || policy)'s: at most 1 for overused words.
        loss = pg_loss + kl_coef * (weights * k3).mean()
    # Detail 12/37: debug variables [ppo2/model.py L115-116]
    # How far an update moves the policy shows a wrong step size before the reward does.
    pairs = torch.stack([logratio, word_advantages])
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/k3": k3.mean(),
        "losses/entropy": -(all_logprobs.exp() * all_logprobs).sum(-1)[mask].mean(),
        "losses/approx_kl": approx_kl(logratio),
        "check/update": torch.corrcoef(pairs)[0, 1].nan_to_num(),  # constant: 0
        "losses/clipfrac": ((logratio.exp() - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def train_grpo(args: Args, folder: Path, agent: Agent, judges: Judges) -> list[dict[str, float]]:
    """Optimize what responses earn, penalized by the KL to the SFT model; metrics per update."""
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    generator = stage_generator(args, "grpo")
    writer = SummaryWriter(str(folder))
    kl_coef = 0.0 if args.kl_mode == "none" else args.kl_coef
    updates = []
    for iteration in trange(1, args.num_updates + 1, desc=folder.name, disable=None):
        # --- Collect: groups of responses and what they earn, under frozen weights ---
        queries = judges.task.sample_queries(args.batch_size // args.group_size, generator)
        # Detail G1: groups of responses (group_size) [Shao et al. 2024]
        # Answers of the same policy to the same query can be compared with each other.
        queries = queries.repeat_interleave(args.group_size, dim=0)
        rollout, metrics = collect(args, agent, judges, queries, kl_coef, generator)

        # --- Advantages: within groups, which the minibatches tear apart ---
        advantages = group_advantages(rollout.rewards, args.group_size, args.std)
        spreads = rollout.rewards.view(-1, args.group_size).std(dim=1)
        metrics |= {
            "objective/kl_coef": kl_coef,
            "groups/spread": spreads.mean().item(),
            "groups/without_spread": (spreads == 0).float().mean().item(),  # they teach nothing
        }

        # --- Update ---
        frac = 1 - (iteration - 1) / args.num_updates  # 1 in the first update, near 0 in the last
        # Detail R5: learning-rate annealing (anneal_lr) [LHP: train_policy.py L78-84]
        # Late steps refine and do not undo. The reward model's rate falls in the same way.
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate
        minibatch_metrics = []
        # Detail G8: few passes over a batch (update_epochs) [Shao et al. 2024]
        # With no value function to fit, more passes help little here; the paper makes one, too.
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, generator=generator).to(rollout.mask.device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Sampling is costly, so a batch serves several steps.
            for mb in order.split(args.batch_size // args.num_minibatches):
                minibatch = Rollout(*(x[mb] for x in rollout))
                loss, loss_metrics = grpo_loss(agent, minibatch, advantages[mb], kl_coef, args)
                optimizer.zero_grad()
                loss.backward()
                # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
                # One norm over all weights: a rare steep minibatch cannot throw the policy far.
                norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                minibatch_metrics.append({**loss_metrics, "losses/grad_norm": norm})

        # --- Log, adapt beta ---
        metrics |= means(minibatch_metrics) | {"charts/learning_rate": learning_rate}
        updates.append(metrics)
        write(writer, iteration, metrics)
        warn_of(folder.name, args.kl_mode, updates)
        # Detail R20: adaptive KL (kl_mode, target_kl) [LHP: train_policy.py L115-124]
        # Beta rises while the KL to the SFT model (the article: to the last policy) is too high.
        if args.kl_mode == "adaptive":
            kl_coef = proportional_kl_coef(
                kl_coef, metrics["objective/kl"], args.target_kl, args.batch_size, args.kl_horizon
            )
    writer.close()
    return updates


# === The pipeline ===

# What tells models apart in results.json.
FORM = ("reward", "kl_mode", "kl_coef", "target_kl", "kl_in_loss", "std", "length_divisor")


def train(args: Args) -> dict[str, Any]:
    """Run the four stages, then evaluate; results and weights are kept in the run's folder.

    Returns `agent` of the first GRPO run; `updates`, of each GRPO run a dictionary of metrics per
    update; `results`, of each model its evaluation; `quality` of the reward model; and `args`.
    Raises UsageError where something given does not fit.
    """
    device, args = choose_device(args), with_folder(args)
    if (args.run_dir / "results.json").exists():
        raise UsageError(f"{args.run_dir} holds a run: take another --run-name.")
    torch.set_num_threads(1)  # as fast for networks of this size
    task = toy_task(args)
    torch.manual_seed(args.seed)
    sft = TinyGPT(len(task.words), task.documents.shape[1]).to(device)
    train_sft(args, sft, task)
    reference = Agent(sft, args.temperature)
    preferences = Preferences(**make_preferences(args, reference, task))
    task = task._replace(sample_gold=preferences.sample_gold)
    torch.manual_seed(args.seed)
    reward_model = RewardModel(sft).to(device)
    quality = train_reward_model(args, reward_model, preferences)
    judges = Judges(task, reward_model, reference)

    forms = {"grpo": {}}
    if args.compare:
        forms["grpo-paper"] = {"std": True, "length_divisor": "own", "kl_in_loss": True}
        forms["grpo-no-kl"] = {"kl_mode": "none", "kl_coef": 0.0}
    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, reference, judges)
    results["sft"] = {"method": "SFT", **metrics}
    for name, form in forms.items():
        run, folder = dataclasses.replace(args, **form), args.run_dir / name
        agents[name] = agent = copy.deepcopy(reference)
        updates[name] = train_grpo(run, folder, agent, judges)
        saved = {"agent": agent.state_dict(), "updates": updates[name]}
        torch.save(saved, folder / "checkpoint.pt")
        metrics, texts[name] = evaluate(run, agent, judges)
        results[name] = {"method": "GRPO"} | {x: getattr(run, x) for x in FORM} | metrics
        results[name]["objective/kl_coef"] = updates[name][-1]["objective/kl_coef"]  # at the end
    report(args, "Reward model", quality=quality, results=results, texts=texts)
    outcome = {"agent": agents["grpo"], "updates": updates, "results": results}
    return outcome | {"quality": quality, "args": args}


# === The algorithm ends here ===
# Below, nearly all as in ppo_rlhf_toy.py: the toy task (grammar, gold reward), evaluation,
# warnings, logs, `main`.


# === The toy task: reviews whose quality can be computed ===
# Copied from ppo_rlhf_toy.py

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


# === Evaluation ===

NUM_EVALUATED = 512  # responses by which a model is judged


# Copied from ppo_rlhf_toy.py
def write_answers(agent: Agent, task: Task, queries: Tensor, generator: Generator) -> Tensor:
    """Truncated responses (B, R) to queries (B, Q), sampled in chunks, on the CPU."""
    chunks = queries.to(device_of(agent)).split(512)
    answers = [agent.sample_responses(x, task.response_length, generator).cpu() for x in chunks]
    return truncate_responses(torch.cat(answers), task.stop, task.earliest_stop)[0]


# Copied from ppo_rlhf_toy.py
@torch.no_grad()
def score_texts(model: RewardModel, queries: Tensor, responses: Tensor) -> Tensor:
    """Scores (B,) of truncated responses (B, R) to queries (B, Q), in chunks, on the CPU."""
    chunks = zip(queries.split(512), responses.split(512), strict=True)
    device = device_of(model)
    return torch.cat([model.score(q.to(device), r.to(device)).cpu() for q, r in chunks])


# Copied from ppo_rlhf_toy.py
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
    queries = judges.task.sample_queries(NUM_EVALUATED, generator)
    rollout, metrics = collect(args, agent, judges, queries, 0.0, generator)
    metrics["objective/kl"] = metrics["objective/kl_exact"]
    lines = torch.cat([rollout.queries, rollout.responses], dim=1)[:5]
    return metrics, [" ".join(judges.task.split_words(line)[1:]) for line in lines]


# Copied from ppo_rlhf_toy.py
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
# (Advantages are noise once the answers of each group score alike: an update may miss them.)
HEALTH = [
    ("check/update", -0.02, 1, 10, "Good answers got no likelier: check signs and masks."),
    ("objective/kl_exact", 1e-3, math.inf, 5, "It stays 0: is the SFT model trained along?"),
    ("objective/kl_exact", 0, 30, 1, "Raise --kl-coef, lower --target-kl; at once: mask padding."),
]


# Copied from ppo_rlhf_toy.py
def warn_of(run: str, kl_mode: str, updates: list[dict[str, float]]) -> None:
    """Warn where a metric of a run has been unhealthy for as many updates as `HEALTH` says."""
    for name, low, high, patience, advice in HEALTH:
        if kl_mode == "none" and "--target-kl" in advice:
            continue  # without a penalty that is to be expected
        bad = [not low <= x[name] <= high for x in updates[-patience - 1 :]]
        if sum(bad) == patience and all(bad[-patience:]):  # for just so long: say it once
            tqdm.write(f"Warning: {run}: {name} is {updates[-1][name]:.3g}. {advice}")


# === Operations ===


# Copied from ppo_continuous_action.py
def choose_device(args: Any) -> torch.device:
    """Where networks learn: the GPU if there is one and nothing else was asked for."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    return torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")


# Copied from ppo_rlhf_toy.py
def device_of(model: nn.Module) -> torch.device:
    """Where the weights of a model are."""
    return next(model.parameters()).device


# Copied from ppo_rlhf_toy.py
def stage_generator(args: Args, purpose: str) -> Generator:
    """A random generator of its own for each purpose: reused stages change nothing after them."""
    return Generator().manual_seed(zlib.crc32(purpose.encode()) + args.seed)


# Copied from ppo_rlhf_toy.py
def with_folder(args: Args) -> Args:
    """The settings with a run name; by default script, seed and time."""
    began = f"{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    return args if args.run_name else dataclasses.replace(args, run_name=began)


# Copied from ppo_continuous_action.py
def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


# Copied from ppo_rlhf_toy.py
def write(writer: SummaryWriter, step: int, metrics: dict[str, float]) -> None:
    """Write the metrics of one step to TensorBoard; raise UsageError if one is not finite."""
    if bad := ", ".join(name for name, x in metrics.items() if not math.isfinite(x)):
        raise UsageError(f"NaN or infinite in step {step}: {bad}. Lower the learning rate.")
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def main() -> None:
    """Read the command line and run; what a user can mend is one sentence and exit code 2."""
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")
    again = "A run takes a minute or two. An interrupted one begins anew: there is no --resume."
    try:
        args = with_folder(tyro.cli(Args, description=again))
        with filelock.FileLock(args.run_dir / "lock", blocking=False):
            train(args)
    except KeyboardInterrupt:
        print(f"Interrupted. {again}")
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
