# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock==4.2.12", "pydantic==2.14.4", "tensorboard==2.21.0", "torch==2.13.0",
#   "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Direct preference optimization (DPO) on the task of ppo_rlhf_toy.py: RLHF without a reward model.

    python dpo_rlhf_toy.py

`uv run` installs what it needs; without uv, `pip install` the packages named above.

A minute on one CPU core. The SFT model and the labelled pairs are those of ppo_rlhf_toy.py, to the
bit: a tiny GPT learns to write reviews (supervised fine-tuning, SFT), a simulated labeller compares
pairs of them by the gold reward, a formula. Then the policy itself is fitted to the labels, as if
beta * log(policy / SFT model) of a response were its reward (Rafailov et al. 2023, arXiv
2305.18290): no reward model, no sampling, Adam on a classifier's loss (the original: RMSprop).

New here: `dpo_loss`, `pair_logprobs`, `train_dpo`.

`--nll-coef` adds the negative log-likelihood of the chosen response per word (Pang et al. 2024,
arXiv 2404.19733; Llama 3). Plain DPO (`--nll-coef 0`) looks only at the difference of two
log-probabilities and lets both fall (Pal et al. 2024, arXiv 2402.13228). With the default that of
the chosen falls too, but by less: on pairs held out from -15.8 to -18.7 instead of -21.3.
`--compare` adds plain DPO, also with a beta of 0.03, which over-optimizes.

D1-D8 are comments above the statements that do what they say (DPO = eric-mitchell/
direct-preference-optimization@5815fab2), beside the details of RLHF that apply (R; LHP =
openai/lm-human-preferences@cbfd210b). B = responses in a batch, Q = tokens of a query, R = of a
response, L = Q + R, V = words in the vocabulary, D = width of the network; `mb` is a minibatch.
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
    compare: bool = False  # also make runs without NLL, one of them with a beta of 0.03

    # --- Supervised fine-tuning ---
    sft_documents: PositiveInt = 20_000  # reviews that the grammar writes
    sft_steps: PositiveInt = 700  # gradient steps
    sft_batch_size: PositiveInt = 64  # documents per gradient step
    sft_learning_rate: PositiveFloat = 3e-3  # AdamW's step size, after a warm-up; falls to 0

    # --- Preferences ---
    num_pairs: Annotated[int, pydantic.Field(ge=14)] = 7000  # labelled pairs [LHP: 4992]
    temperature: PositiveFloat = 1.0  # sampling temperature T [LHP: 0.7; 0.5 for CNN/DM]

    # --- DPO ---
    beta: PositiveFloat = 0.2  # strength of the pull to the SFT model [paper: 0.1]
    nll_coef: NonNegativeFloat = 0.05  # weight of the chosen's NLL per word [Llama 3: 0.2]
    num_epochs: PositiveInt = 2  # passes over the labelled pairs [paper: 1]
    batch_size: PositiveInt = 32  # pairs per gradient step [paper: 64]
    learning_rate: StepSize = 5e-4  # Adam's largest step size [paper: RMSprop, 1e-6]
    warmup_steps: PositiveInt = 20  # steps up to it; then it falls to 0 [paper: 150, then constant]

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


# Copied from grpo_rlhf_toy.py
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
def language_model_loss(model: TinyGPT, documents: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per word, of predicting documents (B, L) word by word."""
    hidden, _ = model(documents[:, :-1])
    real = documents[:, 1:] != PAD
    return F.cross_entropy(model.logits(hidden[real]), documents[:, 1:][real])


def dpo_loss(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> tuple[Tensor, Tensors]:
    """DPO's loss, a scalar (Rafailov et al. 2023), and the debug variables.

    Log-probabilities (2 B,), under the policy and under the reference, are those of the chosen
    responses, then those of the rejected ones to the same queries.
    """
    # Detail D4: implicit reward (beta) [DPO: trainers.py L74-75]
    # Of an optimal policy this is the reward it is optimal for, up to a constant per query.
    good, bad = (beta * (logprobs - ref_logprobs)).chunk(2)
    # Detail D5: logistic loss of the difference [DPO: trainers.py L73]
    # As a reward model is fitted: the chosen response shall earn more than the rejected one.
    loss = -F.logsigmoid(good - bad).mean()
    chosen, rejected = logprobs.chunk(2)
    # Detail D8: both log-probabilities logged [DPO: trainers.py L232, L241]
    # In plain DPO both fall, which the difference does not show.
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


# === Stage 3: DPO ===


def pair_logprobs(agent: Agent, queries: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Log-probabilities of chosen (B, R), then of rejected responses to queries (B, Q): (2 B,)."""
    # Detail D2: chosen and rejected in one pass [DPO: trainers.py L194-204]
    # One batch of both makes one pass of the network instead of two.
    responses = torch.cat([chosen, rejected])
    all_logprobs = agent.get_logprobs(torch.cat([queries, queries]), responses)
    logprobs = log_probability(all_logprobs, responses)
    # Detail D3: sum over the words of a response [DPO: trainers.py L105]
    # A sum, not a mean: a response is as likely as all of its words together.
    return logprobs.where(responses != PAD, 0.0).sum(dim=1)


def train_dpo(
    args: Args, folder: Path, agent: Agent, reference: Agent, pairs: list[Tensor]
) -> list[dict[str, float]]:
    """Fit a policy to comparisons: queries (pairs, Q), chosen and rejected responses (pairs, R).

    Returns one dictionary of metrics per gradient step.
    """
    minibatches, updates = [], []
    for epoch in range(args.num_epochs):
        generator = stage_generator(args, f"dpo epoch {epoch}")
        order = torch.randperm(len(pairs[0]), generator=generator)
        minibatches += order.split(args.batch_size)
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    writer, device = SummaryWriter(str(folder)), device_of(agent)
    for step, mb in enumerate(tqdm(minibatches, folder.name, disable=None), start=1):
        decay = 1 - (step - 1) / len(minibatches)
        # Detail D7: learning-rate warm-up (learning_rate, warmup_steps) [DPO: trainers.py L253]
        # Adam's first steps are as large as later ones, but hardly know the gradients' size.
        learning_rate = args.learning_rate * decay * min(1.0, step / args.warmup_steps)
        optimizer.param_groups[0]["lr"] = learning_rate
        queries, chosen, rejected = (x[mb].to(device) for x in pairs)
        logprobs = pair_logprobs(agent, queries, chosen, rejected)
        with torch.no_grad():
            ref_logprobs = pair_logprobs(reference, queries, chosen, rejected)
        loss, metrics = dpo_loss(logprobs, ref_logprobs, args.beta)
        # Detail D6: likelihood of the chosen response (nll_coef) [Pang et al. 2024]
        # The loss above looks at a difference only; this holds up the probability of the chosen.
        nll = -(logprobs.chunk(2)[0] / (chosen != PAD).sum(dim=1)).mean()
        loss = loss + args.nll_coef * nll
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        metrics |= {"losses/loss": loss, "losses/nll": nll, "losses/grad_norm": norm}
        updates.append(means([{name: x.detach() for name, x in metrics.items()}]))
        updates[-1]["charts/learning_rate"] = learning_rate
        write(writer, step, updates[-1])
    writer.close()
    return updates


# === The pipeline ===


def train(args: Args) -> dict[str, Any]:
    """Run the three stages and evaluate; results and weights are kept in the run's folder.

    Returns `agent` of the first DPO run; `updates`, of each DPO run the metrics of each step;
    `results`, of each model its evaluation; and `args`. Raises UsageError if the folder is taken.
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

    forms = {"dpo": {}}
    if args.compare:
        forms |= {"dpo-plain": {"nll_coef": 0.0}, "dpo-beta-0.03": {"nll_coef": 0.0, "beta": 0.03}}
    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, reference, reference, task, preferences)
    results["sft"] = {"method": "SFT", **metrics}
    learned = [x[: -(len(x) // HELD_OUT)] for x in preferences[:3]]
    for name, form in forms.items():
        run, folder = dataclasses.replace(args, **form), args.run_dir / name
        # Detail D1: policy starts as the reference [Rafailov et al. 2023]
        # The SFT model is where the policy starts and, unchanged, what it is held to.
        agents[name] = agent = copy.deepcopy(reference)
        updates[name] = train_dpo(run, folder, agent, reference, learned)
        saved = {"agent": agent.state_dict(), "updates": updates[name]}
        torch.save(saved, folder / "checkpoint.pt")
        metrics, texts[name] = evaluate(run, agent, reference, task, preferences)
        results[name] = {"method": "DPO", "beta": run.beta, "nll_coef": run.nll_coef, **metrics}
    quality = {"accuracy": results["dpo"]["rewards/accuracy"]}
    report(args, "Policy as a judge of texts", quality=quality, results=results, texts=texts)
    return {"agent": agents["dpo"], "updates": updates, "results": results, "args": args}


# === The algorithm ends here ===
# Below, nearly all as in ppo_rlhf_toy.py: the toy task (grammar, gold reward), evaluation, logs,
# `main`.


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


@torch.no_grad()
def evaluate(
    args: Args, agent: Agent, reference: Agent, task: Task, preferences: Preferences
) -> tuple[dict, list[str]]:
    """Metrics of fresh responses to the same queries and of pairs held out; some of the texts."""
    generator = stage_generator(args, "evaluate")
    queries = task.sample_queries(NUM_EVALUATED, generator)
    responses = write_answers(agent, task, queries, generator)
    inputs = [x.to(device_of(agent)) for x in (queries, responses)]
    policy, ref = (x.get_logprobs(*inputs) for x in (agent, reference))
    kl = (policy.exp() * (policy - ref)).sum(dim=-1).where(inputs[1] != PAD, 0.0).sum(dim=1)  # (B,)
    pairs = [x[-(len(x) // HELD_OUT) :].to(device_of(agent)) for x in preferences[:3]]
    logprobs, ref_logprobs = (pair_logprobs(x, *pairs) for x in (agent, reference))
    metrics = {"objective/kl": kl.mean()} | dpo_loss(logprobs, ref_logprobs, args.beta)[1]
    metrics = means([metrics]) | describe(task, queries, responses)
    lines = torch.cat([queries, responses], dim=1)[:5]
    return metrics, [" ".join(task.split_words(line)[1:]) for line in lines]


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
