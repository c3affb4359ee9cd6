# /// script
# requires-python = ">=3.11"
# dependencies = ["tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Group relative policy optimization (GRPO) on the task of ppo_rlhf_toy.py: RLHF without values.

    python grpo_rlhf_toy.py  # uv run installs what it needs

It takes a minute on one CPU core. Up to the reward model everything equals ppo_rlhf_toy.py to the
bit: a tiny GPT learns to write reviews (supervised fine-tuning, SFT), a simulated labeler compares
pairs of them by the gold reward, which is a formula, and a reward model, the proxy, learns from the
comparisons. Then the policy writes G responses to each prompt. The advantage of all tokens of a
response is its reward minus the mean of its group: there is no value function and no GAE, and one
pass over a batch is enough. New here: `group_advantages`, `token_weights`, `collect`, `grpo_loss`,
`train_grpo`.

The default is Dr. GRPO with the KL penalty in the reward, as in RLOO. Its weight beta adapts as in
PPO. The published forms are settings:
- GRPO (DeepSeekMath, Shao et al. 2024, arXiv 2402.03300): --std group --loss-norm sequence
  --kl-in-loss k3 --kl-mode fixed --num-minibatches 1 (paper: --kl-coef 0.04);
- Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): --kl-mode none;
- DAPO's token-level loss and clip-higher (Yu et al. 2025, arXiv 2503.14476): --std group
  --loss-norm token --clip-high 0.28 --kl-mode none --num-minibatches 16;
- GSPO (Zheng et al. 2025, arXiv 2507.18071): --std group --loss-norm sequence --ratio sequence
  --clip-coef 0.03 --clip-high 0.03 (paper: 3e-4, 4e-4) --kl-mode none;
- REINFORCE++ with a group baseline (Hu 2025, arXiv 2501.03262): --std batch --loss-norm token
  --kl-in-loss k2 --kl-mode fixed (its code: a --kl-coef of 1e-5);
- RLOO (Ahmadian et al. 2024, arXiv 2402.14740): --kl-mode fixed --kl-coef 0.1 --num-minibatches 1
  --clip-coef inf --clip-high inf; its advantages are G / (G - 1) times as large, for which Adam
  makes up;
- TRL's defaults of 2026: --std group --loss-norm token --kl-mode none --num-minibatches 1.

    here                       TRL                            verl
    --std                      scale_rewards                  norm_adv_by_std_in_grpo
    --loss-norm constant       loss_type dr_grpo              seq-mean-token-sum-norm
      sequence, token            grpo, bnpo                     seq-mean-token-mean, token-mean
    --kl-in-loss k3            beta (always in the loss)      use_kl_loss (no: use_kl_in_reward)
    --group-size, --clip-high  num_generations, epsilon_high  rollout.n, clip_ratio_high
    groups/without_spread      frac_reward_zero_std           -

`--loss-norm token` divides by the tokens of the minibatch, like verl and, if gradients are not
accumulated, TRL's bnpo. TRL's default, dapo, divides by the tokens of the whole batch.

`--compare` adds the published form of GRPO, but with an adaptive beta, and the default without any
penalty. DeepSeekMath's own beta, 0.04, is far too small here: the reward is hacked. With advantages
divided by the group's std, a penalty in the loss weighs less and less (benchmark/pages/rlhf.md).
With `--reward gold` the formula itself is the reward, and there is nothing to hack. It takes many
values; the reward in grpo_minimal.py is only right or wrong.

G1-G8 are comments above the lines that implement them, as are the details of PPO (ppo2 =
openai/baselines@ea25b9e8) and RLHF (R; LHP = openai/lm-human-preferences@cbfd210b) that apply.
B = responses in a batch, P = tokens of a prompt, R = tokens of a response, L = P + R, V = size of
the vocabulary, D = width of the network; `mb` is a minibatch.
"""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
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
LossNorm = Literal["constant", "sequence", "token"]
Spread = Literal["group", "batch", "none"]
LIMITS = {  # the least and the largest value of settings
    "sft_documents sft_steps sft_batch_size reward_epochs reward_batch_size": (1, math.inf),
    "kl_horizon num_updates batch_size num_minibatches update_epochs": (1, math.inf),
    "num_pairs": (14, math.inf),  # one in seven is held out
    "group_size": (2, math.inf),
    "learning_rate sft_learning_rate reward_learning_rate kl_coef": (0, 1e9),
    "temperature target_kl": (1e-9, 1e9),
    "missing_eos_score": (-1e9, 1e9),
    "clip_coef clip_high max_grad_norm": (0, math.inf),
    "seed": (0, 2**63 - 1),
}


# Copied from ppo_continuous_action.py
class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


# Copied from ppo_rlhf_toy.py
def check_settings(args: "Args") -> None:
    """Raise a UsageError that names a setting of a wrong type or out of its range."""
    for field in dataclasses.fields(args):
        check_type(field, getattr(args, field.name))
    for names, (low, high) in LIMITS.items():
        for name in names.split():
            value = getattr(args, name)
            if not low <= value <= high:  # or if it is NaN
                flag = f"--{name.replace('_', '-')} ({value})"
                raise UsageError(f"{flag} must be from {low} to {high}.")
    name = args.run_name
    if name is not None and (name == ".." or Path(f"{name}").name != name):
        raise UsageError(f"--run-name ({name}) must be a name, not a path.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")


@dataclasses.dataclass(frozen=True)
class Args:
    # --- Experiment ---
    seed: int = 1  # random seed of the whole run
    run_name: str | None = None  # folder below runs/; by default script, seed, time
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cpu, as in our tables
    compare: bool = False  # also train in DeepSeekMath's form and without a KL penalty

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

    # --- GRPO ---
    reward: Literal["model", "gold"] = "model"  # what is optimized: the reward model or the formula
    kl_mode: Literal["adaptive", "fixed", "none"] = "adaptive"  # how beta is set; none: it is 0
    kl_coef: float = 0.5  # weight of the KL penalty, beta, at the start [paper: 0.04]
    target_kl: float = 6.0  # KL to the SFT model that an adaptive beta aims at, in nats [LHP: 6]
    kl_horizon: int = 500  # episodes over which beta adapts [LHP: 10000 of 1,000,000]
    kl_in_loss: Literal["no", "k2", "k3"] = "no"  # estimator; no: k1 in the reward [paper: k3]
    group_size: int = 8  # responses to a prompt, G [paper: 64]
    std: Spread = "none"  # what advantages are divided by [paper: group]
    loss_norm: LossNorm = "constant"  # divide by R, own or mean length [paper: sequence]
    num_updates: int = 80  # batches of responses, each followed by an update
    batch_size: int = 128  # responses per update, B, of whole groups [paper: 1024]
    num_minibatches: int = 4  # minibatches per pass, of whole responses [paper: 1]
    update_epochs: int = 1  # passes over a batch [paper: 1]
    learning_rate: StepSize = 7e-4  # Adam's step size [paper: 1e-6, for 7 billion weights]
    anneal_lr: bool = True  # lower it linearly towards 0, as LHP does
    ratio: Literal["token", "sequence"] = "token"  # of each token, or their geometric mean [GSPO]
    clip_coef: float = 0.2  # lower clip range of the policy ratio, epsilon [inf: off]
    clip_high: float = 0.2  # upper clip range of the policy ratio [DAPO: 0.28; inf: off]
    max_grad_norm: float = 1.0  # maximum norm of the whole gradient [inf: off]
    missing_eos_score: float = -1.0  # score without EOS, lower than usual scores [LHP: -1]

    def __post_init__(self) -> None:
        check_settings(self)
        if self.batch_size % self.num_minibatches or self.batch_size % self.group_size:
            raise UsageError("--num-minibatches and --group-size must both divide --batch-size.")
        adapts = self.kl_mode == "adaptive"
        if adapts and (self.kl_coef == 0 or self.kl_horizon <= self.batch_size / 5):
            raise UsageError("To adapt, beta needs --kl-coef > 0, --kl-horizon > --batch-size / 5.")

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(f"runs/{self.run_name}")


# === The task, as the pipeline sees it ===
# Copied from ppo_rlhf_toy.py

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


# Copied from ppo_rlhf_toy.py
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


# Copied from ppo_rlhf_toy.py
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


# Copied from ppo_rlhf_toy.py
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
    """A policy: a language model at a sampling temperature. There is no value function."""

    def __init__(self, language_model: TinyGPT, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.policy = language_model

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

    def get_logprobs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Log-probabilities (B, R, V) of all tokens at each position of responses (B, R)."""
        # Detail R1: prompt and response concatenated [LHP: policy.py L114-126; rewards.py L105]
        # What a token is worth depends on the prompt and on the tokens before it.
        hidden, _ = self.policy(torch.cat([prompts, responses], dim=1))
        before = slice(prompts.shape[1] - 1, -1)  # a token is predicted one position earlier
        # Detail R10: logits scaled by the temperature (temperature) [LHP: policy.py L121]
        # The probabilities must be those that the tokens were sampled with.
        logits = self.policy.logits(hidden[:, before]) / self.temperature
        return logits.log_softmax(dim=-1)


# === The math: pure functions ===


def group_advantages(rewards: Tensor, group_size: int, std: Spread) -> Tensor:
    """Advantages (B,) of responses with `rewards` (B,), in which groups follow one another.

    RLOO subtracts the mean of the others in the group, which gives G / (G - 1) times as much. The
    standard deviation is the sample's, plus 1e-4, so that a group of equal rewards gets 0, not 0/0.
    """
    groups = rewards.view(-1, group_size)
    # Detail G2: advantage relative to the group's mean [Shao et al. 2024]
    # The mean of the group replaces the value function: a response must beat its siblings.
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if std != "none":
        # Detail G3: division by the spread (std) [Shao et al. 2024; batch: Hu 2025]
        # Prompts whose rewards differ little then count as much as others (with batch they do not).
        spread = groups.std(dim=1, keepdim=True) if std == "group" else advantages.std()
        advantages = advantages / (spread + 1e-4)
    return advantages.flatten()


def token_weights(mask: Tensor, loss_norm: LossNorm) -> Tensor:
    """Weights (tokens,) of the tokens in `mask` (B, R); the loss is the mean of weighted terms.

    That mean is then the mean over responses of the sum over their tokens, divided by R (constant),
    by their own length (sequence), or by the mean length, so that all tokens count equally (token).
    """
    lengths = mask.sum(dim=1, keepdim=True)
    divisors = {
        "constant": torch.full_like(lengths, mask.shape[1]),  # R, whatever others have written
        "sequence": lengths,
        "token": lengths.float().mean(),
    }
    # Detail G5: length normalization (loss_norm) [Liu et al. 2025]
    # With its own length as divisor, a short response gives its tokens more weight than a long one.
    weights = mask.sum() / (len(mask) * divisors[loss_norm])
    return weights.expand_as(mask)[mask]


# Copied from ppo_continuous_action.py
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar."""
    ratio = logratio.exp()  # how much more likely the actions are than under the old policy
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples only tell us about policies close to the old one, so moving further earns nothing.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """Unbiased estimate k3 of KL(old || new): mean(r - 1 - log r), r = new/old (Schulman 2020)."""
    return (logratio.exp() - 1 - logratio).mean()


# Copied from ppo_rlhf_toy.py
def truncate_responses(responses: Tensor, eos: int, earliest_eos: int) -> tuple[Tensor, Tensor]:
    """Cut responses (B, R) after their first EOS at index `earliest_eos` or later.

    Returns them with padding after that EOS, and whether there was one (B,).
    """
    ends = responses == eos
    ends[:, :earliest_eos] = False
    ends_before = ends.cumsum(dim=1) - ends.long()
    return responses.where(ends_before == 0, PAD), ends.any(dim=1)


# Copied from ppo_rlhf_toy.py
def log_probability(all_logprobs: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities (B, R) of the tokens of responses, given those of all tokens (B, R, V)."""
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


# === Stage 1: supervised fine-tuning ===
# Copied from ppo_rlhf_toy.py


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
# Copied from ppo_rlhf_toy.py

LABEL_NOISE = 0.4  # difference in gold at which the better text is preferred with odds e : 1
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


# === Stage 3: reward model ===
# Copied from ppo_rlhf_toy.py


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

    held_out = preferences.held_out
    good = score_texts(model, held_out.prompts, held_out.chosen)
    bad = score_texts(model, held_out.prompts, held_out.rejected)
    scores_and_gold = torch.stack([score_texts(model, prompts, samples), preferences.sample_gold])
    return {
        "accuracy": (good > bad).float().mean().item(),
        "correlation": torch.corrcoef(scores_and_gold)[0, 1].item(),
    }


# === Stage 4: GRPO ===


class Rollout(NamedTuple):
    """A batch of responses and what the update needs; entries outside `mask` are ignored."""

    prompts: Tensor  # (B, P)
    responses: Tensor  # (B, R), truncated
    logprobs: Tensor  # (B, R), under the policy that sampled them
    ref_logprobs: Tensor  # (B, R), under the SFT model
    rewards: Tensor  # (B,)
    mask: Tensor  # (B, R), True at the tokens of a response


# Copied from ppo_rlhf_toy.py
class Judges(NamedTuple):
    """What the responses are judged by."""

    task: Task  # knows the gold reward
    reward_model: RewardModel  # the proxy
    reference: Agent  # the SFT model


@torch.no_grad()
def collect(
    args: Args, agent: Agent, judges: Judges, prompts: Tensor, kl_coef: float, generator: Generator
) -> tuple[Rollout, Metrics]:
    """Respond to prompts (B, P). Return responses, rewards with the KL penalty, and metrics."""
    task = judges.task
    sampled = agent.sample_responses(prompts, task.response_length, generator)
    responses, ended = truncate_responses(sampled, task.eos, task.earliest_eos)
    proxy = judges.reward_model.score(prompts, responses)
    earned = task.gold(prompts, responses) if args.reward == "gold" else proxy
    # Detail R14: a penalty for a missing EOS (missing_eos_score) [LHP: lm_tasks.py L39-65]
    # A text without an end gets a fixed low score. LHP calls this rejection sampling.
    scores = earned.where(ended, args.missing_eos_score)
    mask = responses != PAD  # which is never sampled

    all_logprobs = agent.get_logprobs(prompts, responses)
    ref_all_logprobs = judges.reference.get_logprobs(prompts, responses)
    logprobs = log_probability(all_logprobs, responses)
    ref_logprobs = log_probability(ref_all_logprobs, responses)
    # Two estimates of the KL to the reference: k1 uses the sampled tokens only and may be negative;
    # the other (Rao-Blackwell) is exact at each position and averages over the sampled texts only.
    kl = (logprobs - ref_logprobs).where(mask, 0.0).sum(dim=1)  # (B,)
    exact_kl = (all_logprobs.exp() * (all_logprobs - ref_all_logprobs)).sum(-1)
    # Detail G6: KL penalty in the reward (kl_in_loss) [Ahmadian et al. 2024]
    # A penalty in the reward also counts a token's effect on later ones, as the KL's gradient does.
    rewards = scores - kl_coef * kl if args.kl_in_loss == "no" else scores
    metrics = {
        **describe(task, prompts, responses),
        "objective/kl": kl.mean().item(),
        "objective/kl_exact": exact_kl.where(mask, 0.0).sum(1).mean().item(),
        "objective/proxy": proxy.mean().item(),
        "objective/score": scores.mean().item(),
        "objective/score_std": scores.std(correction=0).item(),
    }
    return Rollout(prompts, responses, logprobs, ref_logprobs, rewards, mask), metrics


def grpo_loss(
    agent: Agent, mb: Rollout, advantages: Tensor, kl_coef: float, args: Args
) -> tuple[Tensor, Tensors]:
    """GRPO's loss on a minibatch of responses with advantages (B,), and the debug variables."""
    mask = mb.mask
    weights = token_weights(mask, args.loss_norm)
    all_logprobs = agent.get_logprobs(mb.prompts, mb.responses)
    logprobs = log_probability(all_logprobs, mb.responses)
    logratio = logprobs - mb.logprobs
    if args.ratio == "sequence":
        total = logratio.where(mask, 0.0).sum(dim=1, keepdim=True)
        logratio = (total / mask.sum(dim=1, keepdim=True)).expand_as(mask)
    logratio = logratio[mask]  # (tokens,)
    # Detail G4: one advantage for all tokens of a response [Shao et al. 2024]
    # No credit is assigned to single tokens, so no values are needed.
    token_advantages = advantages[:, None].expand_as(mask)[mask]
    # The upper end of the range only matters for positive advantages, the lower for negative ones.
    clip = torch.where(token_advantages > 0, args.clip_high, args.clip_coef)
    pg_loss = policy_loss(logratio, weights * token_advantages, clip)
    # Means of k2 and k3 estimate KL(policy || reference) at the sampled positions, k3 without bias.
    ref_logratio = (mb.ref_logprobs - logprobs)[mask]
    k3 = ref_logratio.exp() - 1 - ref_logratio
    loss = pg_loss
    if args.kl_in_loss != "no":
        # Detail G7: KL penalty in the loss (kl_in_loss) [Shao et al. 2024]
        # Its gradient ignores later tokens: k3's is that of KL(SFT || policy), k2's of the reverse.
        estimate = k3 if args.kl_in_loss == "k3" else ref_logratio**2 / 2
        loss = pg_loss + kl_coef * (weights * estimate).mean()
    # Detail 12/37: debug variables [ppo2/model.py L115-116]
    # How far an update moves the policy shows a wrong step size before the reward does.
    both = torch.stack([logratio, token_advantages])
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/k3": k3.mean(),
        "losses/entropy": -(all_logprobs.exp() * all_logprobs).sum(-1)[mask].mean(),
        "losses/approx_kl": approx_kl(logratio),
        "check/update": torch.corrcoef(both)[0, 1].nan_to_num(),  # constant: 0
        "losses/clipfrac": ((logratio.exp() - 1).abs() > clip).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


# Copied from ppo_continuous_action.py
def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


def train_grpo(args: Args, folder: Path, agent: Agent, judges: Judges) -> list[Metrics]:
    """Maximize the scores, with a penalty on the KL to the SFT model; return metrics per update."""
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    generator = stage_generator(args, "grpo")
    writer = SummaryWriter(str(folder), purge_step=1)
    kl_coef = 0.0 if args.kl_mode == "none" else args.kl_coef
    updates = []
    for iteration in trange(1, args.num_updates + 1, desc=folder.name, disable=None):
        # --- Collect: groups of responses and their rewards, with fixed weights ---
        prompts = judges.task.sample_prompts(args.batch_size // args.group_size, generator)
        # Detail G1: groups of responses (group_size) [Shao et al. 2024]
        # Responses of one policy to one prompt can be compared with each other.
        prompts = prompts.repeat_interleave(args.group_size, dim=0)
        rollout, metrics = collect(args, agent, judges, prompts, kl_coef, generator)

        # --- Advantages: within groups, which minibatches later split ---
        advantages = group_advantages(rollout.rewards, args.group_size, args.std)
        spreads = rollout.rewards.view(-1, args.group_size).std(dim=1)

        # --- Update ---
        remaining = 1 - (iteration - 1) / args.num_updates  # falls from 1 to 1 / num_updates
        # Detail R5: learning rate annealing (anneal_lr) [LHP: train_policy.py L172-173]
        # Small steps at the end average out the noise. The reward model's rate falls, too.
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate
        minibatch_metrics = []
        # Detail G8: few passes over a batch (update_epochs) [Shao et al. 2024]
        # Without values to fit, there is less to gain from more passes. The paper makes one, too.
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, generator=generator)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Sampling is expensive, so a batch serves several steps.
            for indices in order.split(args.batch_size // args.num_minibatches):
                mb = Rollout(*(x[indices] for x in rollout))
                loss, loss_metrics = grpo_loss(agent, mb, advantages[indices], kl_coef, args)
                optimizer.zero_grad()
                loss.backward()
                # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
                # Keeps one odd minibatch from moving the policy far; the direction stays.
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                minibatch_metrics.append({**loss_metrics, "losses/grad_norm": grad_norm})

        # --- Log, adapt beta ---
        metrics = {
            **metrics,
            "objective/kl_coef": kl_coef,
            "groups/spread": spreads.mean().item(),
            "groups/without_spread": (spreads == 0).float().mean().item(),  # they teach nothing
            **means(minibatch_metrics),
            "charts/learning_rate": learning_rate,
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


# Copied from ppo_rlhf_toy.py
@contextlib.contextmanager
def own_torch_settings() -> Iterator[None]:
    """One thread, 32-bit floats and gradients, whatever the caller has; afterwards as before."""
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    torch.set_num_threads(1)  # more do not help networks of this size
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False):  # which switches gradients on
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


@own_torch_settings()
def train(args: Args) -> dict[str, Any]:
    """Run the four stages, then evaluate; results and weights are saved in the run's folder.

    Returns `agent` of the first GRPO run; `updates`, of each GRPO run a dictionary of metrics per
    update; `results`, of each model its evaluation; `quality` of the reward model; and `args`.
    """
    script = Path(globals().get("__file__", "notebook")).stem
    run_name = args.run_name or f"{script}__{args.seed}__{time.time_ns()}"
    args = dataclasses.replace(args, run_name=run_name)
    runs = {"grpo": args}
    if args.compare:
        runs["grpo-paper"] = dataclasses.replace(
            args, std="group", loss_norm="sequence", kl_in_loss="k3"
        )
        runs["grpo-no-kl"] = dataclasses.replace(args, kl_mode="none", kl_coef=0.0)
    try:
        args.run_dir.mkdir(parents=True)  # of two runs with one name, only one succeeds
    except OSError as error:
        raise UsageError(f"{args.run_dir}: {error.strerror}: change --run-name.") from error

    device = "cuda" if args.device == "cuda" else "cpu"  # random numbers: always the processor
    task = toy_task(args)
    task = task._replace(documents=task.documents.to(device), prompts=task.prompts.to(device))
    torch.manual_seed(args.seed)
    sft = TinyGPT(len(task.vocabulary), task.documents.shape[1]).to(device)
    train_sft(args, sft, task)
    reference = Agent(sft, args.temperature)
    preferences = make_preferences(args, reference, task)
    torch.manual_seed(args.seed)
    reward_model = RewardModel(sft).to(device)
    quality = train_reward_model(args, reward_model, preferences)
    judges = Judges(task._replace(sample_gold=preferences.sample_gold), reward_model, reference)

    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, reference, judges)
    results["sft"] = {"method": "SFT", **metrics}
    for name, run in runs.items():
        agent = copy.deepcopy(reference)
        updates[name] = train_grpo(run, args.run_dir / name, agent, judges)
        save_policy(args.run_dir / name / "checkpoint.pt", agent, updates[name])
        metrics, texts[name] = evaluate(run, agent, judges)
        results[name] = {
            "method": "GRPO",
            "reward": run.reward,
            "kl_mode": run.kl_mode,
            "kl_coef": run.kl_coef,
            "target_kl": run.target_kl,
            "kl_in_loss": run.kl_in_loss,
            "std": run.std,
            "loss_norm": run.loss_norm,
            **metrics,
            "objective/kl_coef": updates[name][-1]["objective/kl_coef"],  # at the end
        }
        agents[name] = agent
    report(args, quality, results, texts)
    return {
        "agent": agents["grpo"],
        "updates": updates,
        "results": results,
        "quality": quality,
        "args": args,
    }


# === The algorithm ends here ===
# Below, nearly all as in ppo_rlhf_toy.py: the toy task (grammar, gold reward), evaluation, logs,
# `main`.


# === The toy task: reviews whose quality can be computed ===
# Copied from ppo_rlhf_toy.py
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


# Copied from ppo_rlhf_toy.py
def sample_truncated(agent: Agent, task: Task, prompts: Tensor, generator: Generator) -> Tensor:
    """Sample truncated responses (B, R) to prompts (B, P), in chunks."""
    chunks = prompts.split(512)
    sampled = [agent.sample_responses(x, task.response_length, generator) for x in chunks]
    return truncate_responses(torch.cat(sampled), task.eos, task.earliest_eos)[0]


# Copied from ppo_rlhf_toy.py
@torch.no_grad()
def score_texts(model: RewardModel, prompts: Tensor, responses: Tensor) -> Tensor:
    """Scores (B,) of truncated responses (B, R) to prompts (B, P), in chunks."""
    chunks = zip(prompts.split(512), responses.split(512), strict=True)
    return torch.cat([model.score(p, r) for p, r in chunks])


# Copied from ppo_rlhf_toy.py
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
    prompts = judges.task.sample_prompts(NUM_EVALUATED, generator)
    rollout, metrics = collect(args, agent, judges, prompts, 0.0, generator)
    metrics["objective/kl"] = metrics["objective/kl_exact"]  # which has less noise than k1
    lines = torch.cat([rollout.prompts, rollout.responses], dim=1)[:5]
    return metrics, [" ".join(judges.task.decode(line)[1:]) for line in lines]


# Copied from ppo_rlhf_toy.py
def report(args: Args, quality: Metrics, results: Results, texts: dict[str, list[str]]) -> None:
    """Save quality on held-out pairs, results and texts in results.json, then print them."""
    content = {"args": vars(args), "quality": quality, "results": results, "texts": texts}
    text = json.dumps(finite(content), indent=1, allow_nan=False, default=str)
    (args.run_dir / "results.json").write_text(text)
    columns = [
        *("objective/gold", "objective/proxy", "objective/kl", "objective/kl_coef"),
        *("text/eos_rate", "text/length", "text/repetition", "text/unique"),
    ]
    columns = [x for x in columns if any(x in row for row in results.values())]
    titles = [x.partition("/")[2] for x in columns]
    lines = ["Pairs held out: " + ", ".join(f"{name} {x:.3g}" for name, x in quality.items())]
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
# Copied from ppo_rlhf_toy.py


def stage_generator(args: Args, purpose: str) -> Generator:
    """A random generator for one purpose, so that a change of one stage leaves others alone."""
    return Generator().manual_seed(zlib.crc32(purpose.encode()) + args.seed)


def save_policy(path: Path, agent: Agent, updates: list[Metrics]) -> None:
    """Save weights, which load without a GPU too, and metrics."""
    weights = {name: x.cpu() for name, x in agent.state_dict().items()}
    buffer = io.BytesIO()
    torch.save({"agent": weights, "updates": updates}, buffer)
    path.write_bytes(buffer.getbuffer())  # says that a disk is full, unlike torch.save


def finite(x: Any) -> Any:
    """The same with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(x, dict):
        return {name: finite(value) for name, value in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x


# Copied from ppo_continuous_action.py
def log(writer: SummaryWriter, step: int, metrics: dict[str, float]) -> None:
    """Write the metrics of an iteration, which ended at `step`, to TensorBoard."""
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


# Copied from ppo_continuous_action.py
def check_type(field: dataclasses.Field, value: Any) -> None:
    """Refuse a setting that is not of its default's type; an integer will do for a float."""
    flag = f"--{field.name.replace('_', '-')} ({value!r})"
    if get_origin(field.type) is Literal and value not in get_args(field.type):
        raise UsageError(f"{flag} must be one of {', '.join(get_args(field.type))}.")
    kind = type(field.default)
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits and field.default not in (None, dataclasses.MISSING):
        raise UsageError(f"{flag} must be of type {kind.__name__}.")


def check_metrics(metrics: Metrics, step: int) -> None:
    """End a run that has diverged."""
    bad = ", ".join(name for name, x in metrics.items() if not math.isfinite(x))
    if bad:
        raise UsageError(f"NaN or infinite in step {step}: {bad}. Lower the learning rate.")


# Copied from ppo_continuous_action.py
class Output:
    """Standard output or error. The run goes on if whatever reads it ends, as `| head` does."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:  # what is still in the buffer goes nowhere, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)


# Copied from ppo_continuous_action.py
def stop_on_signals() -> None:
    """Let SIGTERM (a cluster, `docker stop`) and SIGHUP (a closed terminal) act like Ctrl-C."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    if threading.current_thread() is threading.main_thread():  # no other one may
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores it
                signal.signal(number, stop)


@contextlib.contextmanager
def command_line() -> Iterator[list[str]]:
    """The user's flags, for what runs as a program.

    The user's mistakes end in one sentence and exit code 2, signals in 128 plus their number.
    """
    stop_on_signals()
    sys.stdout, sys.stderr = Output(sys.stdout), Output(sys.stderr)
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
