# /// script
# requires-python = ">=3.11"
# dependencies = ["tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Direct preference optimization (DPO) on the task of ppo_rlhf_toy.py: RLHF without a reward model.

    python dpo_rlhf_toy.py  # uv run installs what it needs

It takes a minute on one CPU core. The SFT model and the labeled pairs equal those of
ppo_rlhf_toy.py to the bit: a tiny GPT learns to write reviews (supervised fine-tuning, SFT), and a
simulated labeler compares pairs of them by the gold reward, which is a formula. Then the policy
itself is fitted to the labels, as if beta * log(policy / SFT model) of a response were its reward
(Rafailov et al. 2023, arXiv 2305.18290). There is no reward model and no sampling, only Adam on a
classifier's loss (the original uses RMSprop, clips the gradients' norm at 10, and its learning rate
does not fall). New here: `dpo_loss`, `pair_logprobs`, `train_dpo`.

`--nll-coef` adds the negative log-likelihood (NLL) of the chosen response per token (Pang et al.
2024, arXiv 2404.19733; Llama 3). Plain DPO, `--nll-coef 0`, depends only on the difference of two
log-probabilities and lets both fall (Pal et al. 2024, arXiv 2402.13228). `--compare` adds plain
DPO, once more with a beta of 0.03, which over-optimizes. All results are in
benchmark/pages/rlhf.md.

D1-D8 are comments above the lines that implement them (DPO = eric-mitchell/
direct-preference-optimization@5815fab2), as are the details of RLHF that apply (R; LHP =
openai/lm-human-preferences@cbfd210b). B = responses in a batch, P = tokens of a prompt, R = tokens
of a response, L = P + R, V = size of the vocabulary, D = width of the network; `mb` is a minibatch.
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
LIMITS = {  # the least and the largest value of settings
    "sft_documents sft_steps sft_batch_size num_epochs batch_size warmup_steps": (1, math.inf),
    "num_pairs": (14, math.inf),  # one in seven is held out
    "learning_rate sft_learning_rate nll_coef": (0, 1e9),
    "temperature beta": (1e-9, 1e9),
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
    compare: bool = False  # also train without NLL, once more with a beta of 0.03

    # --- Supervised fine-tuning ---
    sft_documents: int = 20_000  # reviews that the grammar writes
    sft_steps: int = 700  # gradient steps
    sft_batch_size: int = 64  # documents per gradient step
    sft_learning_rate: float = 3e-3  # AdamW's step size, after a warm-up; falls to 0

    # --- Preferences ---
    num_pairs: int = 7000  # labeled pairs of responses [LHP: 4992]
    temperature: float = 1.0  # sampling temperature T [LHP: 0.7; 0.5 for CNN/DM]

    # --- DPO ---
    beta: float = 0.2  # strength of the pull to the SFT model [paper: 0.1]
    nll_coef: float = 0.05  # weight of the chosen response's NLL per token [Llama 3: 0.2]
    num_epochs: int = 2  # passes over the labeled pairs [paper: 1]
    batch_size: int = 32  # pairs per gradient step [paper: 64]
    learning_rate: StepSize = 5e-4  # Adam's largest step size [paper: RMSprop, 1e-6]
    warmup_steps: int = 20  # steps up to it; then it falls to 0 [paper: 150, then constant]

    def __post_init__(self) -> None:
        check_settings(self)

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


# Copied from grpo_rlhf_toy.py
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


def dpo_loss(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> tuple[Tensor, Tensors]:
    """DPO's loss, a scalar (Rafailov et al. 2023), and the debug variables.

    Log-probabilities (2 B,), under the policy and under the reference, are those of the chosen
    responses, then those of the rejected ones to the same prompts.
    """
    # Detail D4: implicit reward (beta) [DPO: trainers.py L74-75]
    # The policy is optimal for exactly this reward, up to a constant per prompt.
    good, bad = (beta * (logprobs - ref_logprobs)).chunk(2)
    # Detail D5: logistic loss of the difference [DPO: trainers.py L73]
    # It is the loss of a reward model: the chosen response should earn more than the rejected one.
    loss = -F.logsigmoid(good - bad).mean()
    chosen, rejected = logprobs.chunk(2)
    # Detail D8: both log-probabilities logged [DPO: trainers.py L232, L241]
    # Both fall, most in plain DPO, which their difference does not show.
    metrics = {
        "losses/preference_loss": loss,
        "rewards/accuracy": (good > bad).float().mean(),
        "rewards/margin": (good - bad).mean(),
        "logprobs/chosen": chosen.mean(),
        "logprobs/rejected": rejected.mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


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


# === Stage 3: DPO ===


def pair_logprobs(agent: Agent, pairs: Pairs) -> Tensor:
    """Log-probabilities (2 B,) of the chosen responses of B pairs, then of the rejected ones."""
    # Detail D2: chosen and rejected in one pass [DPO: trainers.py L194-204]
    # One batch of both needs one forward pass instead of two.
    responses = torch.cat([pairs.chosen, pairs.rejected])
    all_logprobs = agent.get_logprobs(torch.cat([pairs.prompts, pairs.prompts]), responses)
    logprobs = log_probability(all_logprobs, responses)
    # Detail D3: sum over the tokens of a response [DPO: trainers.py L105]
    # The log-probability of a response is the sum over its tokens, not their mean.
    return logprobs.where(responses != PAD, 0.0).sum(dim=1)


def train_dpo(
    args: Args, folder: Path, agent: Agent, reference: Agent, pairs: Pairs
) -> list[Metrics]:
    """Fit a policy to pairs. Returns the metrics of each gradient step."""
    minibatches: list[Tensor] = []
    for epoch in range(args.num_epochs):
        generator = stage_generator(args, f"dpo epoch {epoch}")
        order = torch.randperm(len(pairs.prompts), generator=generator)
        minibatches += order.split(args.batch_size)
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    writer = SummaryWriter(str(folder), purge_step=1)
    updates = []
    for step, indices in enumerate(tqdm(minibatches, folder.name, disable=None), start=1):
        decay = 1 - (step - 1) / len(minibatches)
        # Detail D7: learning rate warm-up (learning_rate, warmup_steps) [DPO: trainers.py L253]
        # Adam's first steps are as large as later ones, but its averages come from few gradients.
        learning_rate = args.learning_rate * decay * min(1.0, step / args.warmup_steps)
        optimizer.param_groups[0]["lr"] = learning_rate
        mb = Pairs(*(x[indices] for x in pairs))
        logprobs = pair_logprobs(agent, mb)
        with torch.no_grad():
            ref_logprobs = pair_logprobs(reference, mb)
        loss, metrics = dpo_loss(logprobs, ref_logprobs, args.beta)
        # Detail D6: likelihood of the chosen response (nll_coef) [Pang et al. 2024]
        # DPO's loss only sees a difference. With this, the chosen response loses less probability.
        chosen_logprobs, _ = logprobs.chunk(2)
        nll = -(chosen_logprobs / (mb.chosen != PAD).sum(dim=1)).mean()
        loss = loss + args.nll_coef * nll
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        metrics = {
            **{name: x.item() for name, x in metrics.items()},
            "losses/loss": loss.item(),
            "losses/nll": nll.item(),
            "losses/grad_norm": grad_norm.item(),
            "charts/learning_rate": learning_rate,
        }
        check_metrics(metrics, step)
        log(writer, step, metrics)
        updates.append(metrics)
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
    """Run the three stages and evaluate; results and weights are saved in the run's folder.

    Returns `agent` of the first DPO run; `updates`, of each DPO run the metrics of each step;
    `results`, of each model its evaluation; and `args`.
    """
    script = Path(globals().get("__file__", "notebook")).stem
    run_name = args.run_name or f"{script}__{args.seed}__{time.time_ns()}"
    args = dataclasses.replace(args, run_name=run_name)
    runs = {"dpo": args}
    if args.compare:
        runs["dpo-plain"] = dataclasses.replace(args, nll_coef=0.0)
        runs["dpo-beta-0.03"] = dataclasses.replace(args, nll_coef=0.0, beta=0.03)
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
    task = task._replace(sample_gold=preferences.sample_gold)

    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, reference, reference, task, preferences)
    results["sft"] = {"method": "SFT", **metrics}
    for name, run in runs.items():
        # Detail D1: policy starts as the reference [Rafailov et al. 2023]
        # The policy starts as the SFT model, and an unchanged copy of it remains the reference.
        agent = copy.deepcopy(reference)
        updates[name] = train_dpo(run, args.run_dir / name, agent, reference, preferences.learned)
        save_policy(args.run_dir / name / "checkpoint.pt", agent, updates[name])
        metrics, texts[name] = evaluate(run, agent, reference, task, preferences)
        results[name] = {"method": "DPO", "beta": run.beta, "nll_coef": run.nll_coef, **metrics}
        agents[name] = agent
    report(args, {"accuracy": results["dpo"]["rewards/accuracy"]}, results, texts)
    return {"agent": agents["dpo"], "updates": updates, "results": results, "args": args}


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


@torch.no_grad()
def evaluate(
    args: Args, agent: Agent, reference: Agent, task: Task, preferences: Preferences
) -> tuple[Metrics, list[str]]:
    """Metrics of new responses to the same prompts and of held-out pairs; some of the texts."""
    generator = stage_generator(args, "evaluate")
    prompts = task.sample_prompts(NUM_EVALUATED, generator)
    responses = sample_truncated(agent, task, prompts, generator)
    logprobs = agent.get_logprobs(prompts, responses)  # (B, R, V)
    ref_logprobs = reference.get_logprobs(prompts, responses)
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(dim=-1)  # (B, R)
    of_pairs = pair_logprobs(agent, preferences.held_out)
    ref_of_pairs = pair_logprobs(reference, preferences.held_out)
    _, metrics = dpo_loss(of_pairs, ref_of_pairs, args.beta)
    metrics = {
        "objective/kl": kl.where(responses != PAD, 0.0).sum(dim=1).mean().item(),
        **{name: x.item() for name, x in metrics.items()},
        **describe(task, prompts, responses),
    }
    lines = torch.cat([prompts, responses], dim=1)[:5]
    return metrics, [" ".join(task.decode(line)[1:]) for line in lines]


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
