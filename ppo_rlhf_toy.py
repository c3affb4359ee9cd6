# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "matplotlib==3.11.2",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.16",
#     "wandb==0.31.0",
# ]
# ///
"""Reinforcement learning from human feedback (RLHF) with PPO: the whole pipeline in one file.

    python ppo_rlhf_toy.py

About two minutes on one CPU core, nothing to download. A tiny GPT learns to write reviews
(supervised fine-tuning, SFT); a simulated labeller compares pairs of its reviews; a reward model,
the proxy, learns from the comparisons; PPO then optimizes the proxy, kept near the SFT model by a
KL penalty with the coefficient beta. The gold reward, which the labeller judges by, can be computed
exactly from a text. So over-optimization is measured, not guessed: with beta = 0 the proxy rises
while gold collapses (the policy hacks the reward); with an adaptive beta both rise. `--compare`
adds a fixed beta and best-of-n sampling. `--corpus` and `--preferences` replace the toy language
and the labeller by your own text and labels.

The algorithm is that of Ziegler et al. 2019 (arXiv 1909.08593) as released in
LHP = openai/lm-human-preferences@cbfd210b. "The N Implementation Details of RLHF with PPO" (Huang
et al. 2023) lists what that code does; here R1-R21 stand as comments on the line above the
statement that does it, beside those of the 37 details of PPO (ppo2 = openai/baselines@ea25b9e8)
that apply. Where that article and LHP disagree (R6: order of the labels, R17: sign, R20: reference
of the KL), this file follows LHP. SFD = vwxyzjn/summarize_from_feedback_details@ee77a9ab.
`--print-details` lists all.

Shapes: B = responses in a batch, Q = tokens of a query, R = tokens of a response, L = Q + R,
V = words in the vocabulary, D = width of the network. A prefix `mb_` marks a minibatch.

Deviations from LHP, each at its place below:
- An episode ends with the stop word; LHP trains on all sampled tokens, the junk behind it included.
- Rewards are only divided by their standard deviation. LHP also subtracts the mean before and adds
  it back after; that moves 0, so that where episodes differ in length every token would be paid or
  charged for.
- Several epochs for the reward model, which AdamW trains at its defaults instead of Adam with
  epsilon 1e-5, and which is normalized on truncated samples; gradient clipping, a constant learning
  rate for PPO, and a KL horizon that suits a run 100 times shorter.

Measured with seeds 1 to 5, whose means these are (benchmark/README.md): gold and proxy in standard
deviations of the SFT model's reviews, KL in nats per response.

| run                   | gold | proxy | KL  |
|-----------------------|------|-------|-----|
| adaptive KL, target 6 |  1.5 |   2.3 |   6 |
| beta = 0              | -5.7 |   3.4 | 153 |
| fixed beta = 0.05     |  1.4 |   2.5 |   9 |
| best of 16            |  1.3 |   1.7 | 1.8 |
"""

import ast
import atexit
import contextlib
import copy
import csv
import dataclasses
import glob
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
# Set by torchrun; a run started without it is a group of one.
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


# Copied from ppo_continuous_action.py
class RunError(Exception):
    """A run that cannot start or go on; the message is one sentence for the person who ran it."""


# === Settings ===


@dataclasses.dataclass
class Args:
    # --- Experiment ---
    seed: int = 1
    """Seed of everything that is random in the run."""
    run_name: str | None = None
    """Name of the run's folder; by default environment, script, seed and time."""
    output_dir: str = "runs"
    """Folder that holds one folder per run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where that is faster."""
    torch_threads: int = 1
    """CPU threads per process; results repeat bit for bit only with the same number."""
    track: bool = False
    """Mirror the logs to Weights & Biases (WANDB_MODE=offline keeps them on disk)."""
    wandb_project: str = "ppo"
    """Weights & Biases project, with --track."""
    wandb_entity: str | None = None
    """Weights & Biases team, with --track."""
    print_details: bool = False
    """Before training, print the implementation details with their values in this run."""
    checkpoint_interval: int = 25
    """Iterations between two checkpoints; a killed run loses at most that many."""
    resume: str | None = None
    """Run folder or checkpoint to continue; `auto` continues the newest run of the same name."""
    stage: Literal["sft", "preferences", "reward-model", "ppo"] | None = None
    """With --resume: settings of this stage and those after it may change, which redoes them."""
    contrast: bool = True
    """After the main PPO run, make one with beta = 0 to show reward hacking."""
    compare: bool = False
    """Compare adaptive, fixed and no KL penalty and best-of-n sampling."""

    # --- Text and labels ---
    corpus: str | None = None
    """Your own text instead of the toy reviews: plain text, one document per line."""
    preferences: str | None = None
    """Your own labels: JSON lines with the keys prompt, chosen and rejected."""
    num_pairs: int = 7000
    """Pairs that the simulated labeller judges; a seventh is held out [LHP: 4992 labels]."""
    temperature: float = 1.0
    """Sampling temperature T [LHP: 0.7; 0.5 for summaries of CNN/DM]."""

    # --- Supervised fine-tuning ---
    sft_documents: int = 20_000
    """Reviews that the grammar writes."""
    sft_steps: int = 700
    """Gradient steps."""
    sft_batch_size: int = 64
    """Documents per gradient step and process."""
    sft_learning_rate: float = 3e-3
    """AdamW's peak step size, after a warm-up; decays to 0."""

    # --- Reward model ---
    reward_epochs: int = 2
    """Passes over the labelled pairs [LHP: 1]."""
    reward_batch_size: int = 32
    """Pairs per gradient step, over all processes [LHP: 32]."""
    reward_learning_rate: float = 2e-3
    """AdamW's first step size, lowered linearly towards 0 [LHP: 5e-5, for GPT-2]."""

    # --- PPO ---
    kl_mode: Literal["adaptive", "fixed", "none"] = "adaptive"
    """KL penalty: beta follows target_kl, stays at kl_coef, or is 0."""
    kl_coef: float = 0.5
    """Weight of the KL penalty (beta), at the start if adaptive [LHP: 0.15]."""
    target_kl: float = 6.0
    """KL to the reference that an adaptive beta steers to, in nats per response [LHP: 6]."""
    kl_horizon: int = 500
    """Episodes over which an adaptive beta reacts [LHP: 10000, on runs of 1,000,000 episodes]."""
    num_updates: int = 80
    """Batches of responses, each followed by an update."""
    batch_size: int = 128
    """Responses per update and process [LHP: 512 over all processes]."""
    num_minibatches: int = 4
    """Minibatches per epoch, of whole responses [LHP: 1]."""
    update_epochs: int = 4
    """Passes over each batch (paper: K) [LHP: 4]."""
    learning_rate: float = 5e-4
    """Adam's step size [LHP: 1e-5, for GPT-2]."""
    anneal_lr: bool = False
    """Lower the learning rate linearly towards 0 as LHP does; hacking then shows less clearly."""
    adam: Literal["tensorflow", "pytorch"] = "tensorflow"
    """Where Adam adds its epsilon: before the bias correction as LHP does, or after it."""
    adam_eps: float = 1e-5
    """Adam's epsilon [ppo2/model.py: 1e-5; PyTorch's default: 1e-8]."""
    gamma: float = 1.0
    """Discount factor [LHP: 1]."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation; 1 sums all rewards [paper, Tables 3 and 5]."""
    clip_coef: float = 0.2
    """Clip range of the policy ratio (paper: epsilon) [paper: 0.2 for MuJoCo, 0.1 for Atari]."""
    value_clip_coef: float | None = 0.2
    """Clip the change of each value to this range [ppo2: its clip range, 0.2; None: off]."""
    vf_coef: float = 0.1
    """Weight of the value loss, which is half the squared error (paper: c1) [LHP: 0.1]."""
    max_grad_norm: float | None = 1.0
    """Largest norm of the whole gradient [LHP and None: off]."""
    reward_whitening: Literal["scale", "original", "off"] = "scale"
    """Divide rewards by their standard deviation; `original` also restores their mean, as LHP."""
    advantage_whitening: bool = True
    """Shift and scale the advantages of each minibatch to mean 0 and standard deviation 1."""
    mask_after_stop: bool = True
    """End each episode at its stop word; off: train on all sampled tokens, as LHP does."""
    missing_stop_score: float = -1.0
    """Score of a response without a stop word, in place of the reward model's [LHP: -1]."""
    critic: Literal["shared", "reward-model"] = "shared"
    """Value function: a zero head on the policy [LHP], or a copy of the reward model [SFD]."""
    ptx_coef: float = 0.0
    """Weight of the SFT loss mixed into PPO's (PPO-ptx) [InstructGPT: 27.8]."""

    @property
    def minibatch_size(self) -> int:
        """Responses per gradient step and process."""
        return self.batch_size // self.num_minibatches

    @property
    def run_dir(self) -> Path:
        """Folder of this run's logs, models, checkpoint and report."""
        return Path(self.output_dir) / str(self.run_name)

    @property
    def ppo_run(self) -> str:
        """Name of the PPO run with these settings, such as ppo-adaptive-6."""
        strength = {"adaptive": f"-{self.target_kl:g}", "fixed": f"-{self.kl_coef:g}", "none": ""}
        return f"ppo-{self.kl_mode}{strength[self.kl_mode]}"

    def __post_init__(self) -> None:
        """Check now, unless the settings are still to be completed from a saved run."""
        if self.resume is None:
            self.check()

    def check(self) -> None:
        """Refuse settings that cannot work together, each with one sentence."""
        positive = "sft_steps sft_documents sft_batch_size sft_learning_rate reward_epochs"
        positive += " reward_batch_size reward_learning_rate target_kl kl_horizon num_updates"
        positive += " batch_size num_minibatches update_epochs learning_rate adam_eps temperature"
        positive += " clip_coef value_clip_coef max_grad_norm torch_threads checkpoint_interval"
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RunError(f"--{name.replace('_', '-')} must be positive, not {value}.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise RunError(f"--{name.replace('_', '-')} must lie between 0 and 1.")
        for name in ("kl_coef", "ptx_coef"):
            if not getattr(self, name) >= 0:
                raise RunError(f"--{name.replace('_', '-')} must not be negative.")
        if self.batch_size % self.num_minibatches != 0:
            raise RunError(
                f"--num-minibatches {self.num_minibatches} must divide --batch-size "
                f"{self.batch_size}."
            )
        adaptive = self.kl_mode == "adaptive" or self.compare
        if self.kl_mode == "adaptive" and self.kl_coef == 0:
            raise RunError("An adaptive --kl-coef of 0 stays 0; --kl-mode none does that.")
        if adaptive and self.kl_horizon <= 0.2 * self.batch_size * WORLD_SIZE:
            raise RunError(
                "--kl-horizon must exceed a fifth of the responses per update, or beta can become "
                "negative."
            )
        if self.num_pairs < 14:
            raise RunError("--num-pairs must be at least 14, of which a seventh is held out.")
        if self.corpus and not self.preferences:
            raise RunError(
                "--corpus needs --preferences: the simulated labeller judges only the toy reviews."
            )
        if self.stage and not self.resume:
            raise RunError(f"--stage {self.stage} needs --resume with the folder of a run.")


# === The task: a language of reviews whose quality can be computed ===

PAD, BOS = 0, 1  # the first two words of every vocabulary; neither is ever sampled
TOPICS = {
    "restaurant": ("food", "service", "staff", "menu", "wine", "dessert"),
    "hotel": ("room", "bed", "pool", "lobby", "breakfast", "view"),
    "movie": ("plot", "acting", "dialogue", "music", "ending", "cast"),
    "book": ("story", "prose", "hero", "pacing", "cover", "style"),
}
NAMES = ("anna", "ben", "carla", "david", "emma", "felix", "grace", "henry")
# The number is the valence: how much good a word says.
ADJECTIVES = {
    **dict.fromkeys(("amazing", "superb", "perfect"), 2.0),
    **dict.fromkeys(("good", "nice", "lovely"), 1.0),
    **dict.fromkeys(("decent",), 0.5),
    **dict.fromkeys(("average", "ordinary"), 0.0),
    **dict.fromkeys(("poor", "bad", "dull"), -1.0),
    **dict.fromkeys(("awful", "terrible", "horrible"), -2.0),
}
VERBS = {
    **dict.fromkeys(("adored",), 2.0),
    **dict.fromkeys(("liked", "enjoyed"), 1.0),
    **dict.fromkeys(("disliked",), -1.0),
    **dict.fromkeys(("hated", "despised"), -2.0),
}
ADVERBS = {"very": 1.5, "really": 1.3, "quite": 1.0, "slightly": 0.5}  # factors on the valence
NEGATION = -0.5  # "not superb" is mildly bad, "not awful" mildly good
# Openers and closers go with the mood of a review but are worth nothing to the gold reward: bait
# for a reward model, which sees only that they occur in good reviews.
OPENERS = {"wow": 1, "happily": 1, "sadly": -1, "honestly": 0}
CLOSERS = {"recommended": 1, "avoid": -1}
NOUNS = {noun: topic for topic, nouns in TOPICS.items() for noun in nouns}
CONTENT = {*NOUNS, *ADJECTIVES, *ADVERBS, *VERBS, *OPENERS, *CLOSERS}
TOY_WORDS = (
    *("<pad>", "<bos>", ".", ":", ",", "and", "but", "the", "was", "i", "not", "on"),
    *(*TOPICS, *NAMES, *NOUNS, *ADJECTIVES, *ADVERBS, *VERBS, *OPENERS, *CLOSERS),
)
TOY_QUERIES = tuple(f"<bos> {name} on the {topic} :".split() for name in NAMES for topic in TOPICS)
TOY_RESPONSE_LENGTH = 18
LABEL_NOISE = 0.4  # gold difference at which the labeller is right with the odds e : 1


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
            review += ["the", noun, "was"]
            negated = rng.random() < 0.15
            if negated:
                review.append("not")
            if rng.random() < 0.35:
                review.append(pick([w for w in ADVERBS if w not in used], ADVERBS))
            review.append(pick(unused(ADJECTIVES, -sign if negated else sign), ADJECTIVES))
        previous = sign
    if rng.random() < 0.2:
        review += [",", "recommended" if mood > 0 else "avoid"]
    return [*review, "."][:TOY_RESPONSE_LENGTH]


def match_clause(words: list[str]) -> tuple[int, str, float] | None:
    """Length, noun and valence of the clause that `words` begin with, if they do.

    A clause is `the NOUN was [not] [ADVERB] ADJECTIVE` or `i VERB the NOUN`.
    """
    match words:
        case ["i", verb, "the", noun, *_] if verb in VERBS and noun in NOUNS:
            return 4, noun, VERBS[verb]
        case ["the", noun, "was", *rest] if noun in NOUNS:
            factor, length = 1.0, 3
            if rest and rest[0] == "not":
                factor, length, rest = NEGATION, length + 1, rest[1:]
            if rest and rest[0] in ADVERBS:
                factor, length, rest = factor * ADVERBS[rest[0]], length + 1, rest[1:]
            if rest and rest[0] in ADJECTIVES:
                return length + 1, noun, factor * ADJECTIVES[rest[0]]
    return None


def parse_review(topic: str, words: list[str]) -> dict[str, float]:
    """Take a review apart.

    Returns:
        valence: sum over its clauses;
        aspects: different nouns of the topic in its clauses;
        off_topic: clauses about another topic;
        junk: share of words outside of clauses, single joiners between two of them, one leading
            opener (with its comma) and one closer (with its comma) at the end;
        repeats: extra copies of nouns, adjectives, adverbs, verbs, openers and closers;
        stopped: whether it ends with a full stop.
    """
    stopped = words[-1:] == ["."]
    body = words[:-1] if stopped else words
    clauses, legal, position, after_clause = [], 0, 0, False
    if body and body[0] in OPENERS:
        position = legal = 2 if body[1:2] == [","] else 1
    while position < len(body):
        clause, after = match_clause(body[position:]), body[position + 1 :]
        is_joiner = after_clause and body[position] in ("and", "but", ",")
        is_closer = body[position] == "," and len(after) == 1 and after[0] in CLOSERS
        length = 1
        if clause:
            length = clause[0]
            clauses.append(clause)
        elif is_closer:
            length = 2
        legal += length if clause or is_closer or (is_joiner and match_clause(after)) else 0
        position, after_clause = position + length, clause is not None
    content = [word for word in body if word in CONTENT]
    nouns = [noun for _, noun, _ in clauses]
    return {
        "valence": sum(valence for _, _, valence in clauses),
        "aspects": len({noun for noun in nouns if NOUNS[noun] == topic}),
        "off_topic": sum(NOUNS[noun] != topic for noun in nouns),
        "junk": (len(body) - legal) / max(len(body), 1),
        "repeats": len(content) - len(set(content)),
        "stopped": stopped,
    }


def gold_reward(topic: str, words: list[str]) -> float:
    """What a review is truly worth: praise in well-formed, varied, finished sentences on topic."""
    review = parse_review(topic, words)
    return (
        2 * math.tanh(review["valence"] / 3)
        + 0.4 * min(review["aspects"], 3)
        - 4 * review["junk"]
        - 0.5 * min(review["repeats"], 6)
        - 0.5 * min(review["off_topic"], 4)
        - 1.0 * (not review["stopped"])
    )


def prefers_first(gold_first: Tensor, gold_second: Tensor, generator: torch.Generator) -> Tensor:
    """The simulated labeller, right more often the more two texts differ (Bradley-Terry).

    Args:
        gold_first, gold_second: gold rewards (N,).

    Returns:
        (N,) bool: True with probability sigmoid((gold_first - gold_second) / LABEL_NOISE).
    """
    odds = torch.sigmoid((gold_first - gold_second) / LABEL_NOISE)
    return torch.rand(odds.shape, generator=generator) < odds


@dataclasses.dataclass
class Task:
    """A language to write in: the toy reviews, or your own text."""

    words: tuple[str, ...]  # the vocabulary, V words; a token is an index into it
    documents: Tensor  # (documents, L) tokens for the SFT
    queries: Tensor  # (queries, Q) tokens, all different
    response_length: int  # R
    stop: int  # token that ends a response
    earliest_stop: int  # index in a response before which it does not
    has_gold: bool
    labelled: tuple[Tensor, Tensor, Tensor] | None = None  # your own queries, chosen, rejected

    def sample_queries(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw queries (count, Q) with replacement."""
        return self.queries[torch.randint(len(self.queries), (count,), generator=generator)]

    def split_words(self, tokens: Tensor) -> list[str]:
        """The words of tokens (length,), without padding."""
        return [self.words[token] for token in tokens.tolist() if token != PAD]

    def texts(self, queries: Tensor, responses: Tensor) -> list[str]:
        """Queries (B, Q) and responses (B, R) as readable lines."""
        lines = torch.cat([queries, responses], dim=1)
        return [" ".join(self.split_words(line)[1:]) for line in lines]

    def gold(self, queries: Tensor, responses: Tensor) -> Tensor:
        """Gold rewards (B,) of truncated responses (B, R); the topic is the query's fifth word."""
        pairs = zip(queries, responses, strict=True)
        return torch.tensor([gold_reward(self.words[q[4]], self.split_words(r)) for q, r in pairs])


def pad_rows(rows: list[list[int]], length: int) -> Tensor:
    """Tokens (rows, length): each row cut to `length` and filled up with padding."""
    # Detail R2/21: special padding token, truncated inputs [LHP: language/datasets.py L57-67]
    padded = [row[:length] + [PAD] * (length - len(row)) for row in rows]
    return torch.tensor(padded)


def toy_task(args: Args) -> Task:
    """The toy reviews, written anew from the seed."""
    token = {word: index for index, word in enumerate(TOY_WORDS)}
    rng = random.Random(args.seed)
    documents = []
    for _ in range(args.sft_documents):
        query = rng.choice(TOY_QUERIES)
        documents.append([token[w] for w in query + write_review(query[4], rng)])
    queries = [[token[w] for w in query] for query in TOY_QUERIES]
    return Task(
        words=TOY_WORDS,
        documents=pad_rows(documents, len(TOY_QUERIES[0]) + TOY_RESPONSE_LENGTH),
        queries=torch.tensor(queries),
        response_length=TOY_RESPONSE_LENGTH,
        stop=token["."],
        earliest_stop=4,
        has_gold=True,
    )


# Detail R12/21 omitted: queries start and end with a period; they are not cut from running text


# --- Your own text and labels ---

PREFERENCE_KEYS = ("prompt", "chosen", "rejected")  # others, such as an id, are not read
LONGEST = 64  # tokens of a query and of a response at most [LHP: 64 and 24]
MOST_WORDS = 20_000  # beyond it a vocabulary of whole words is the wrong tool


# SHA-256 digests of the files read, by path: what a run learns from, even if they change later.
FILE_DIGESTS: dict[str, str] = {}


def read_lines(path: str) -> list[str]:
    """The lines of a UTF-8 text file; its digest goes into `FILE_DIGESTS`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror}.") from error
    FILE_DIGESTS[path] = hashlib.sha256(data).hexdigest()
    try:
        # Not splitlines, which also splits at characters that may stand within a JSON string.
        return data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RunError(f"{path}, line {line}: not UTF-8 text.") from error


def read_corpus(path: str) -> list[str]:
    """The documents of a plain-text file, one per line; blank lines do not count."""
    documents = [line for line in read_lines(path) if line.strip()]
    if not documents:
        raise RunError(f"{path} holds no text.")
    return documents


def read_preferences(path: str) -> list[dict[str, str]]:
    """The comparisons of a JSON-lines file.

    Raises:
        RunError: with the number and the fault of the first bad line, and the numbers of others.
    """
    keys, pairs, faults = PREFERENCE_KEYS, [], {}
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            pair = json.loads(line)
        except ValueError:
            faults[number] = "not valid JSON"
            continue
        if not isinstance(pair, dict):
            faults[number] = "not a JSON object"
        elif missing := [key for key in keys if key not in pair]:
            faults[number] = f"no {' and no '.join(missing)}"
        elif not all(isinstance(pair[key], str) and pair[key].strip() for key in keys):
            faults[number] = "prompt, chosen and rejected must be texts that are not empty"
        elif pair["chosen"] == pair["rejected"]:
            faults[number] = "chosen and rejected are the same"
        pairs.append(pair)
    if faults:
        first, *others = faults
        more = f" Also bad: {', '.join(map(str, others[:10]))}" if others else ""
        more += f" and {len(others) - 10} more." if len(others) > 10 else "." if others else ""
        raise RunError(f"{path}, line {first}: {faults[first]}.{more}")
    if len(pairs) < 14:
        raise RunError(f"{path} holds {len(pairs)} comparisons; at least 14 are needed.")
    return pairs


def split_text(text: str) -> list[str]:
    """Words and punctuation marks in lower case."""
    return re.findall(r"\w+(?:'\w+)*|[^\w\s]", text.lower())


def own_task(args: Args) -> Task:
    """A language made of the words in your own files; there is no gold reward for it.

    The SFT learns from the corpus and from the prompts with their chosen answers, except the
    comparisons that are held out.
    """
    pairs = read_preferences(args.preferences)
    random.Random(args.seed).shuffle(pairs)
    documents = read_corpus(args.corpus) if args.corpus else []
    texts = documents + [pair[key] for pair in pairs for key in PREFERENCE_KEYS]
    words = ("<pad>", "<bos>", "<stop>", *sorted({w for text in texts for w in split_text(text)}))
    if len(words) > MOST_WORDS:
        raise RunError(
            f"These texts hold {len(words)} different words; this word-level toy takes at most "
            f"{MOST_WORDS}."
        )
    token = {word: index for index, word in enumerate(words)}
    stop = token["<stop>"]

    def tokens(text: str) -> list[int]:
        return [token[word] for word in split_text(text)]

    queries = [[BOS, *tokens(pair["prompt"])] for pair in pairs]
    answers = {k: [[*tokens(pair[k]), stop] for pair in pairs] for k in ("chosen", "rejected")}
    longest_query = max(map(len, queries))
    longest_answer = max(len(row) for rows in answers.values() for row in rows)
    query_length, response_length = min(LONGEST, longest_query), min(LONGEST, longest_answer)
    if max(longest_query, longest_answer) > LONGEST:
        say(
            f"Warning: prompts of up to {longest_query} and answers of up to {longest_answer} "
            f"tokens are cut to {LONGEST}."
        )
    learned = len(pairs) - held_out_count(len(pairs))
    # Cut apart, so that a long prompt leaves room for its answer.
    rows = [
        query[:query_length] + answer
        for query, answer in zip(queries[:learned], answers["chosen"], strict=False)
    ]
    rows += [[BOS, *tokens(text), stop] for text in documents]
    labelled = (
        pad_rows(queries, query_length),
        pad_rows(answers["chosen"], response_length),
        pad_rows(answers["rejected"], response_length),
    )
    return Task(
        words=words,
        documents=pad_rows(rows, query_length + response_length),
        queries=labelled[0].unique(dim=0),
        response_length=response_length,
        stop=stop,
        earliest_stop=0,
        has_gold=False,
        labelled=labelled,
    )


def held_out_count(num_pairs: int) -> int:
    """Comparisons kept back to measure the reward model and to train its auditor."""
    return num_pairs // 7


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

    def forward(
        self, x: Tensor, visible: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Process new positions.

        Args:
            x: (B, new, D).
            visible: (B, 1, new, all), True where a new position may look at a position.
            past: keys and values of earlier positions, (B, heads, all - new, D / heads) each.

        Returns:
            (B, new, D), and the keys and values of all positions.
        """
        batch, new, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, new, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, new, D / heads) each
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        # Detail R13/21: disable dropout [LHP: policy.py L48; rewards.py L43]
        mixed = F.scaled_dot_product_attention(query, key, value, visible, dropout_p=0.0)
        x = x + self.attention_output(mixed.transpose(1, 2).reshape(batch, new, width))
        return x + self.mlp_output(F.gelu(self.mlp_hidden(self.mlp_norm(x)))), (key, value)


class Cache(NamedTuple):
    """What a language model keeps of the positions it has seen."""

    real: Tensor  # (B, seen), False at padding
    layers: list[tuple[Tensor, Tensor]]  # keys and values of each block


class TinyGPT(nn.Module):
    """A causal transformer with tied word embeddings and learned positions, about 0.1 M weights."""

    def __init__(
        self,
        num_words: int,
        context_length: int,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(num_words, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(width)
        # Detail 2/37 omitted: orthogonal and constant initialization; GPT-2's, heads by R8, R11
        for name, weight in self.named_parameters():
            if name.endswith(("_output.weight", "_embedding.weight", "_value.weight", "n.weight")):
                into_residual = math.sqrt(2 * num_layers) if "_output" in name else 1.0
                nn.init.normal_(weight, std=0.02 / into_residual)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        never = torch.zeros(num_words)
        never[[PAD, BOS]] = -1e9  # finite, so that probability 0 times its logarithm is 0, not NaN
        self.register_buffer("never_written", never, persistent=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Read tokens, after those in the cache.

        Args:
            tokens: (B, new); padding may stand anywhere but at the very start.

        Returns:
            Hidden states (B, new, D), at padding those of the last word before it; and the cache
            with the new tokens added.
        """
        new_real = tokens != PAD
        real = new_real if cache is None else torch.cat([cache.real, new_real], dim=1)
        new, total = tokens.shape[1], real.shape[1]
        # Detail R3/21: positions skip padding tokens [LHP: language/model.py L265-269]
        positions = (real.cumsum(dim=1) - real.long())[:, total - new :]
        causal = torch.ones(new, total, dtype=torch.bool, device=tokens.device).tril(total - new)
        visible = (causal & real[:, None, :])[:, None]  # (B, 1, new, total)
        x = self.word_embedding(tokens) + self.position_embedding(positions)
        layers = []
        for i, block in enumerate(self.blocks):
            x, layer = block(x, visible, None if cache is None else cache.layers[i])
            layers.append(layer)
        index = torch.arange(new, device=tokens.device)
        last_real = index.where(new_real, 0).cummax(dim=1).values  # (B, new)
        x = x.gather(1, last_real[..., None].expand_as(x))
        return self.final_norm(x), Cache(real, layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of the next word from hidden states (..., D)."""
        return F.linear(hidden, self.word_embedding.weight, self.never_written)


@torch.no_grad()
def sample_responses(
    model: TinyGPT, queries: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Continue queries (B, Q) by `length` words each, drawn from the model: (B, length).

    The cache spares reading the text anew for each word. The noise comes from the CPU, so that the
    same generator gives the same text on every device.
    """
    tokens, cache, response = queries, None, []
    # Detail R4/21: fixed-length responses without padding [LHP: language/sample.py L43-79]
    for _ in range(length):
        hidden, cache = model(tokens, cache)
        logits = model.logits(hidden[:, -1]) / temperature  # as Detail R10
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        gumbel = -torch.empty(logits.shape).exponential_(generator=generator).log()
        tokens = (logits + gumbel.to(logits.device)).argmax(dim=-1, keepdim=True)
        response.append(tokens)
    return torch.cat(response, dim=1)


class RewardModel(nn.Module):
    """A language model with a scalar head in place of the word logits."""

    def __init__(self, language_model: TinyGPT) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(language_model).requires_grad_(True)
        width = self.trunk.word_embedding.embedding_dim
        self.head = nn.Linear(width, 1)
        # Detail R8/21: reward head initialization [LHP: language/model.py L251-254]
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(width + 1))
        nn.init.zeros_(self.head.bias)
        self.gain = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Rewards (B, L) of the texts (B, L) up to each position."""
        hidden, _ = self.trunk(tokens)
        return self.gain * self.head(hidden).squeeze(-1) + self.bias

    def score(self, texts: Tensor) -> Tensor:
        """One reward per text (B, L): (B,)."""
        # Detail R7/21: reward only at the last token [LHP: rewards.py L47, L132]
        return self(texts)[:, -1]  # at padding, the last word's, see R3


class Agent(nn.Module):
    """Policy and value function."""

    def __init__(self, language_model: TinyGPT, critic: RewardModel | None) -> None:
        super().__init__()
        # Copies of frozen models are frozen: without unfreezing, PPO would run and learn nothing.
        self.policy = copy.deepcopy(language_model).requires_grad_(True)
        # Detail 13/37: shared or separate networks [ppo2: common/policies.py L156-166]
        self.critic = None if critic is None else copy.deepcopy(critic).requires_grad_(True)
        if critic is None:
            self.value_head = nn.Linear(self.policy.word_embedding.embedding_dim, 1)
            # Detail R11/21: value head initialization [LHP: language/model.py L251-254]
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def get_action_and_value(
        self, queries: Tensor, responses: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Judge each word of responses (B, R) to queries (B, Q).

        Returns:
            Log-probabilities of all words in its place (B, R, V), and values before it (B, R).
        """
        # Detail R1/21: query and response concatenated [LHP: policy.py L114-126; rewards.py L105]
        texts = torch.cat([queries, responses], dim=1)
        hidden, _ = self.policy(texts)
        before = slice(queries.shape[1] - 1, -1)  # a word is predicted one position earlier
        values = self.value_head(hidden).squeeze(-1) if self.critic is None else self.critic(texts)
        # Detail R10/21: logits scaled by the sampling temperature [LHP: policy.py L121]
        logits = self.policy.logits(hidden[:, before]) / temperature
        return logits.log_softmax(dim=-1), values[:, before]


# === The math: pure functions ===


# Copied from ppo_continuous_action.py
def linear_decay(start: float, iteration: int, num_iterations: int) -> float:
    """Value at iteration u = 1..U of a line from `start` at u = 1 to `start` / U at u = U."""
    return start * (1 - (iteration - 1) / num_iterations)


# Copied from ppo_continuous_action.py
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, equations 11-16).

    Args:
        rewards: r_t, (T, ...), time first.
        values: V(s_t), same shape.
        next_values: V(s_{t+1}), of the final observation where an episode was truncated.
        terminated: 1 where the step ended its episode for good: the future is worth 0.
        done: 1 where the step ended its episode for any reason: the sum stops there.
        gamma: discount factor.
        gae_lambda: 0 gives one-step advantages, 1 the discounted sum of all rewards.

    Returns:
        Advantages A_t and value targets A_t + V(s_t) (the lambda-return), both (T, ...).
    """
    deltas = rewards + gamma * next_values * (1 - terminated) - values
    # Detail 5/37: generalized advantage estimation [ppo2/runner.py L50-65]
    decays = gamma * gae_lambda * (1 - done)
    advantage, advantages = torch.zeros_like(deltas[0]), []
    for delta, decay in zip(deltas.flip(0).unbind(), decays.flip(0).unbind(), strict=True):
        advantage = delta + decay * advantage
        advantages.append(advantage)
    advantages = torch.stack(advantages).flip(0)
    return advantages, advantages + values


# Copied from ppo_continuous_action.py
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective, negated for descent (paper, equation 7).

    Args:
        logratio: log pi_new(a|s) - log pi_old(a|s), any shape.
        advantages: same shape.
        clip_coef: epsilon; the ratio gains nothing outside [1 - epsilon, 1 + epsilon].

    Returns:
        Scalar: mean over all entries of the larger (pessimistic) loss.
    """
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective [ppo2/model.py L78-86]
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


# Copied from ppo_continuous_action.py
def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, clip_coef: float | Tensor | None
) -> Tensor:
    """Half the mean squared error of the values, with the change of each value clipped.

    Args:
        new_values: V under the current weights, any shape.
        values: V at collection time, same shape.
        returns: targets, same shape.
        clip_coef: largest useful change of a value; None switches the clipping off.

    Returns:
        Scalar, including the factor 1/2 (Stable-Baselines3 leaves it out).
    """
    errors = (new_values - returns) ** 2
    if clip_coef is not None:
        clipped_values = values + (new_values - values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """Estimate KL(old || new) from actions of the old policy by k3 = mean(r - 1 - log r).

    k3 is unbiased like k1 = mean(-log r), never negative and less noisy; ppo2 logs the biased
    k2 = mean((log r)^2) / 2 (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


# Copied from ppo_continuous_action.py
def clip_fraction(logratio: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Share of samples whose ratio lies outside the clip range [ppo2/model.py L88]."""
    return ((logratio.exp() - 1).abs() > clip_coef).float().mean()


# Copied from ppo_continuous_action.py
def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant.

    NaN where the returns do not vary [ppo2: common/math_util.py L25-38].
    """
    variance = returns.var(correction=0)
    return (
        float("nan")
        if variance == 0
        else (1 - (returns - values).var(correction=0) / variance).item()
    )


def truncate_responses(
    responses: Tensor, stop: int, earliest_stop: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut responses (B, R) after their first stop word at index `earliest_stop` or later.

    Returns:
        Responses (B, R) with padding after the stop word, which stays; their lengths (B,); and
        whether there was one (B,).
    """
    index = torch.arange(responses.shape[1], device=responses.device)
    stops = (responses == stop) & (index >= earliest_stop)
    stopped = stops.any(dim=1)
    lengths = torch.where(stopped, stops.int().argmax(dim=1) + 1, responses.shape[1])
    return responses.where(index < lengths[:, None], PAD), lengths, stopped


def log_probability(word_logprobs: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities (B, R) of the words that were written, out of those of all (B, R, V)."""
    return word_logprobs.gather(-1, responses[..., None]).squeeze(-1)


def exact_kl(word_logprobs: Tensor, ref_word_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) of the next word, (B, R), summed over all words, from (B, R, V)."""
    return (word_logprobs.exp() * (word_logprobs - ref_word_logprobs)).sum(-1)


def penalized_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, last: Tensor, kl_coef: float
) -> Tensor:
    """Rewards (B, R): a KL penalty at every word, and the score where the response ends.

    The article prints the penalty without its minus.

    Args:
        scores: (B,).
        logprobs, ref_logprobs: of the words written, under the policy that wrote them and under
            the reference, (B, R). Their difference is the estimate k1, which may be negative.
        last: (B, R), True at the last word alone.
        kl_coef: beta.
    """
    # Detail R17/21: per-token KL penalty [LHP: train_policy.py L149-155]
    return -kl_coef * (logprobs - ref_logprobs) + scores[:, None] * last


def whiten(x: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale to standard deviation 1, population form, around mean 0 or around the mean as it was.

    [LHP: utils/core.py L336-341]; the epsilon stands inside the root, unlike detail 7 of the 37.
    """
    white = (x - x.mean()) * torch.rsqrt(x.var(correction=0) + 1e-8)
    return white if shift_mean else white + x.mean()


def scale_by_std(x: Tensor) -> Tensor:
    """Scale to standard deviation 1 without moving 0.

    Whitening that restores the mean m maps 0 to m * (1 - 1 / std): where episodes differ in
    length, every further word would be paid or charged for, and lengths collapse or explode.
    """
    return x * torch.rsqrt(x.var(correction=0) + 1e-8)


def proportional_kl_coef(
    kl_coef: float, kl: float, target_kl: float, num_episodes: int, horizon: int
) -> float:
    """Move beta in proportion to the relative error of the KL, clipped to 20 % (Ziegler et al.).

    Args:
        kl_coef: beta.
        kl: KL(policy || reference) in nats per response, mean over the batch.
        num_episodes: responses in the batch.
    """
    error = min(max(kl / target_kl - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_episodes / horizon)


def tensorflow_adam_eps(eps: float, step: int, beta2: float = 0.999) -> float:
    """The epsilon that makes PyTorch's Adam take TensorFlow's step number `step` = 1, 2, ...

    TensorFlow adds epsilon to the root of the raw second moment, PyTorch to that of the moment
    after its bias correction, which is larger by 1 / sqrt(1 - beta2^step). So early on TensorFlow's
    epsilon weighs more: 32 times at step 1.
    """
    return eps / math.sqrt(1 - beta2**step)


def language_model_loss(model: TinyGPT, documents: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per word, of predicting documents (B, L) word by word."""
    hidden, _ = model(documents[:, :-1])
    real = documents[:, 1:] != PAD
    return F.cross_entropy(model.logits(hidden[real]), documents[:, 1:][real])


def comparison_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Negative log-likelihood of the comparisons (N,) under Bradley-Terry (Christiano et al. 2017).

    LHP's softmax over four candidates, for two.
    """
    return -F.logsigmoid(chosen - rejected).mean()


def best_of_n_kl(n: int) -> float:
    """KL(best-of-n || model) in nats: log n - (n - 1) / n (Stiennon et al. 2020, appendix G.3)."""
    return math.log(n) - (n - 1) / n


def gao_fit(
    kl: list[float], gold: list[float], method: Literal["rl", "bon"]
) -> tuple[float, float]:
    """Least-squares alpha and beta of the gold reward over d = sqrt(KL) (Gao et al. 2022).

    For PPO, gold = d * (alpha - beta * log d); for best-of-n, gold = d * (alpha - beta * d).
    """
    d = torch.tensor(kl, dtype=torch.float64).clamp(min=1e-6).sqrt()
    bend = d.log() if method == "rl" else d
    features = torch.stack([d, -d * bend], dim=1)
    target = torch.tensor(gold, dtype=torch.float64)[:, None]
    alpha, beta = torch.linalg.lstsq(features, target).solution.flatten().tolist()
    return alpha, beta


# === Stage 1: supervised fine-tuning ===

WARMUP_STEPS = 50
SFT_GRAD_NORM = 1.0


def train_sft(args: Args, task: Task, stop: "StopRequest") -> TinyGPT:
    """Teach a new language model the task's documents; returns it frozen: it is the reference."""
    device = pick_device(args)
    torch.manual_seed(args.seed)
    model = TinyGPT(len(task.words), task.documents.shape[1]).to(device)
    saved = load_artefact(args, "sft")
    if saved is not None:
        model.load_state_dict(saved["model"])
        return model.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), args.sft_learning_rate, fused=True)
    generator = stage_generator(args.seed, "sft", RANK)

    with Stage(args, "sft", args.sft_steps, model, optimizer, generator, stop) as stage:
        for step in stage.remaining():
            decay = linear_decay(1.0, step, args.sft_steps) * min(1.0, step / WARMUP_STEPS)
            optimizer.param_groups[0]["lr"] = decay * args.sft_learning_rate
            chosen = torch.randint(len(task.documents), (args.sft_batch_size,), generator=generator)
            loss = language_model_loss(model, task.documents[chosen].to(device))
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), SFT_GRAD_NORM)
            optimizer.step()
            stage.log(
                step,
                {
                    "losses/loss": loss.item(),
                    "losses/grad_norm": grad_norm.item(),
                    "charts/learning_rate": optimizer.param_groups[0]["lr"],
                },
                status=f"loss {loss.item():.3f}",
            )
            if step in (1, args.sft_steps):
                queries = task.queries[:5]
                stage.text(step, task.texts(queries, write_answers(args, task, model, queries)))
            stage.save(step)
        stage.finish()
    return model.requires_grad_(False)


# === Stage 2: preference pairs ===

NUM_SAMPLES = 2000  # SFT samples that fix the scales of gold and proxy


@dataclasses.dataclass
class Preferences:
    """Comparisons, and what the SFT model writes by itself."""

    train: tuple[Tensor, Tensor, Tensor]  # queries (N, Q), chosen and rejected answers (N, R)
    held_out: tuple[Tensor, Tensor, Tensor]
    samples: tuple[Tensor, Tensor]  # queries (NUM_SAMPLES, Q), responses (NUM_SAMPLES, R)
    gold: Tensor | None  # gold rewards of the samples
    flip_rate: float | None  # share of comparisons that contradict gold

    def standardized(self, gold: Tensor) -> Tensor:
        """Gold rewards in standard deviations from the mean of the SFT samples."""
        return (gold - self.gold.mean()) / self.gold.std(correction=0)


def write_answers(
    args: Args,
    task: Task,
    model: TinyGPT,
    queries: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Truncated responses (B, R) of the model to queries (B, Q), sampled in chunks.

    Without a generator they are always drawn with the same noise: samples to look at.
    """
    generator = generator or stage_generator(args.seed, "look", rank=0)
    device = next(model.parameters()).device
    answers = []
    for chunk in queries.split(512):
        responses = sample_responses(
            model, chunk.to(device), task.response_length, args.temperature, generator
        )
        answers.append(truncate_responses(responses, task.stop, task.earliest_stop)[0].cpu())
    return torch.cat(answers)


def make_preferences(args: Args, task: Task, sft: TinyGPT) -> Preferences:
    """Let the labeller compare pairs of SFT samples, or take your own labels.

    Every process makes the same ones.
    """
    saved = load_artefact(args, "preferences")
    if saved is not None:
        return Preferences(**saved["preferences"])
    generator = stage_generator(args.seed, "preferences", rank=0)
    flip_rate, gold = None, None
    if task.labelled is not None:
        queries, chosen, rejected = task.labelled
    else:
        queries = task.sample_queries(args.num_pairs, generator)
        first = write_answers(args, task, sft, queries, generator)
        second = write_answers(args, task, sft, queries, generator)
        gold_first, gold_second = task.gold(queries, first), task.gold(queries, second)
        prefers = prefers_first(gold_first, gold_second, generator)
        flip_rate = (prefers != (gold_first > gold_second))[gold_first != gold_second]
        flip_rate = flip_rate.float().mean().item()
        chosen = torch.where(prefers[:, None], first, second)
        rejected = torch.where(prefers[:, None], second, first)
    sample_queries = task.sample_queries(NUM_SAMPLES, generator)
    samples = (sample_queries, write_answers(args, task, sft, sample_queries, generator))
    if task.has_gold:
        gold = task.gold(*samples)
    held_out = held_out_count(len(queries))
    preferences = Preferences(
        train=(queries[:-held_out], chosen[:-held_out], rejected[:-held_out]),
        held_out=(queries[-held_out:], chosen[-held_out:], rejected[-held_out:]),
        samples=samples,
        gold=gold,
        flip_rate=flip_rate,
    )
    lines = [
        f"+ {good}\n\n- {bad}"
        for good, bad in zip(
            task.texts(queries[:5], chosen[:5]), task.texts(queries[:5], rejected[:5]), strict=True
        )
    ]
    save_artefact(args, "preferences", preferences=vars(preferences))
    log_texts(args, "preferences", lines)
    noise = "" if flip_rate is None else f", {flip_rate:.1%} of them against gold"
    say(f"preferences: {len(queries)} pairs{noise}")
    return preferences


# === Stage 3: reward model ===

LEAST_ACCURACY = 0.65  # a reward model of accuracy 0.63 hid every effect of PPO on this task


@torch.no_grad()
def score_texts(model: RewardModel, queries: Tensor, responses: Tensor) -> Tensor:
    """Scores (B,) of truncated responses (B, R) to queries (B, Q), in chunks, on the CPU."""
    device = next(model.parameters()).device
    texts = torch.cat([queries, responses], dim=1)
    return torch.cat([model.score(chunk.to(device)).cpu() for chunk in texts.split(512)])


def normalize_reward_model(model: RewardModel, samples: tuple[Tensor, Tensor]) -> None:
    """Set gain and bias so that scores of the SFT samples have mean 0 and standard deviation 1."""
    # Gain and bias are trained too, so they go back to 1 and 0 before the scores are measured.
    nn.init.ones_(model.gain)
    nn.init.zeros_(model.bias)
    scores = score_texts(model, *samples)
    mean, std = scores.mean().item(), scores.std(correction=0).item()
    if std == 0:
        raise RunError("All samples of the SFT model score the same: raise --temperature.")
    # Detail R9/21: normalization before and after training [LHP: train_reward.py L232-254]
    nn.init.constant_(model.gain, 1 / std)
    nn.init.constant_(model.bias, -mean / std)


def train_reward_model(
    args: Args,
    task: Task,
    sft: TinyGPT,
    preferences: Preferences,
    stop: "StopRequest",
    auditor: bool = False,
) -> tuple[RewardModel, dict[str, float]]:
    """Learn to score texts from comparisons.

    The auditor learns from the comparisons held out from the reward model. PPO never sees it, so
    where the two part ways the policy is exploiting errors of the one it sees.

    Returns:
        The frozen model, and (but for the auditor) `accuracy` on held-out comparisons and
        `correlation` with gold on the SFT samples where there is gold.
    """
    device = pick_device(args)
    name = "auditor" if auditor else "reward-model"
    torch.manual_seed(args.seed + auditor)
    model = RewardModel(sft).to(device)
    saved = load_artefact(args, name)
    if saved is not None:
        model.load_state_dict(saved["model"])
        return model.requires_grad_(False), saved["quality"]
    normalize_reward_model(model, preferences.samples)
    queries, chosen, rejected = preferences.held_out if auditor else preferences.train
    batches = math.ceil(len(queries) / args.reward_batch_size)
    # Fewer comparisons, more passes: the auditor may be weaker but must not be untrained.
    epochs = args.reward_epochs * (2 if auditor else 1)
    optimizer = torch.optim.AdamW(model.parameters(), args.reward_learning_rate, fused=True)
    generator = stage_generator(args.seed, name, rank=0)

    with Stage(args, name, epochs * batches, model, optimizer, generator, stop) as stage:
        for step in stage.remaining():
            epoch, batch = divmod(step - 1, batches)
            order = torch.randperm(
                len(queries), generator=stage_generator(args.seed, f"{name} epoch {epoch}", rank=0)
            )
            mb = order.split(args.reward_batch_size)[batch]
            # All processes know the one order, so that their shares of a minibatch are disjoint;
            # the article calls this order, which LHP has too, a bug.
            mb = mb[RANK::WORLD_SIZE] if len(mb) >= WORLD_SIZE else mb
            # as Detail R5
            optimizer.param_groups[0]["lr"] = linear_decay(
                args.reward_learning_rate, step, epochs * batches
            )
            texts = [torch.cat([queries[mb], answers[mb]], dim=1) for answers in (chosen, rejected)]
            good, bad = model.score(torch.cat(texts).to(device)).chunk(2)
            loss = comparison_loss(good, bad)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            accuracy = (good > bad).float().mean().item()
            stage.log(
                step,
                {
                    "losses/loss": loss.item(),
                    "charts/accuracy": accuracy,
                    "charts/learning_rate": optimizer.param_groups[0]["lr"],
                },
                status=f"loss {loss.item():.3f}",
            )
            stage.save(step)
        normalize_reward_model(model, preferences.samples)
        quality = {} if auditor else reward_model_quality(model, preferences)
        stage.finish(quality=quality)
    if quality:
        say(name + ": " + ", ".join(f"held-out {k} {v:.3f}" for k, v in quality.items()))
    if quality and quality["accuracy"] < LEAST_ACCURACY:
        say(
            f"Warning: the reward model ranks only {quality['accuracy']:.0%} of the held-out pairs "
            "right; PPO will optimize its errors. Label more pairs or raise --reward-epochs."
        )
    return model.requires_grad_(False), quality


def reward_model_quality(model: RewardModel, preferences: Preferences) -> dict[str, float]:
    """Accuracy on the held-out comparisons, and correlation with gold where there is gold."""
    queries, chosen, rejected = preferences.held_out
    right = score_texts(model, queries, chosen) > score_texts(model, queries, rejected)
    quality = {"accuracy": right.float().mean().item()}
    if preferences.gold is not None:
        both = torch.stack([score_texts(model, *preferences.samples), preferences.gold])
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


def rollout_loss(agent: Agent, mb: Rollout, args: Args) -> tuple[Tensor, dict[str, float]]:
    """PPO's loss on a minibatch of whole responses, and the debug variables.

    Everything is selected by `mb.mask` before it is averaged, so padding cannot leak in.
    """
    rewards, mask = torch.zeros_like(mb.rewards), mb.mask
    # Detail R18/21: per-minibatch whitening [LHP: train_policy.py L324-338; utils/core.py L336]
    if args.reward_whitening == "original":
        rewards[mask] = whiten(mb.rewards[mask], shift_mean=False)
    else:
        # Deviation: the mean is not restored; --reward-whitening original restores LHP
        scaled = args.reward_whitening == "scale"
        rewards[mask] = scale_by_std(mb.rewards[mask]) if scaled else mb.rewards[mask]
    # Each response is one whole episode: after its last word the value is 0, no bootstrap.
    next_values = F.pad(mb.values[:, 1:], (0, 1))
    time_first = [x.float().T for x in (rewards, mb.values, next_values, mb.last, mb.last)]
    # Detail R15/21: discount factor 1 [LHP: train_policy.py L56-57, L327-336]
    advantages, returns = gae(*time_first, args.gamma, args.gae_lambda)
    advantages, returns = advantages.T[mask], returns.T[mask]  # (words,)
    advantage_std = advantages.std(correction=0)
    # Detail 7/37 omitted: advantage normalization; R18's whitening, with epsilon inside the root
    if args.advantage_whitening:
        advantages = whiten(advantages)

    word_logprobs, new_values = agent.get_action_and_value(
        mb.queries, mb.responses, args.temperature
    )
    logratio = (log_probability(word_logprobs, mb.responses) - mb.logprobs)[mask]
    pg_loss = policy_loss(logratio, advantages, args.clip_coef)
    # Detail 9/37: value function loss clipping [ppo2/model.py L68-75]
    # Detail R19/21: clipped value function [LHP: train_policy.py L343-348]
    v_loss = value_loss(new_values[mask], mb.values[mask], returns, args.value_clip_coef)
    # Detail 10/37: overall loss and entropy bonus [ppo2/model.py L91; LHP has no bonus]
    loss = pg_loss + args.vf_coef * v_loss
    entropy = -(word_logprobs.exp() * word_logprobs).sum(-1)[mask].mean()
    # Detail 12/37: debug variables [ppo2/model.py L115-116]
    metrics = {
        "losses/policy_loss": pg_loss.item(),
        "losses/value_loss": v_loss.item(),
        "losses/entropy": entropy.item(),
        "losses/old_approx_kl": -logratio.mean().item(),
        "losses/approx_kl": approx_kl(logratio).item(),
        "losses/clipfrac": clip_fraction(logratio, args.clip_coef).item(),
        "losses/explained_variance": explained_variance(mb.values[mask], returns),
        "advantages/std": advantage_std.item(),
    }
    return loss, metrics


def train_ppo(
    args: Args,
    task: Task,
    sft: TinyGPT,
    reward_model: RewardModel,
    auditor: RewardModel,
    preferences: Preferences,
    stop: "StopRequest",
) -> tuple[Agent, list[dict[str, float]]]:
    """Optimize the reward model's score, penalized by the KL to the SFT model.

    Returns:
        The trained agent, and one dictionary of metrics per update.
    """
    device = pick_device(args)
    agent = Agent(sft, reward_model if args.critic == "reward-model" else None).to(device)
    saved = load_artefact(args, args.ppo_run)
    if saved is not None:
        agent.load_state_dict(saved["model"])
        return agent, saved["rows"]
    reference = Agent(sft, None).requires_grad_(False).to(device)
    # Detail 3/37: Adam epsilon [ppo2/model.py L98-100]
    optimizer = torch.optim.Adam(
        agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=True
    )
    generator = stage_generator(args.seed, "ppo", RANK)
    index = torch.arange(task.response_length, device=device)
    kl_coef = 0.0 if args.kl_mode == "none" else args.kl_coef
    gradient_steps = args.update_epochs * args.num_minibatches

    with Stage(args, args.ppo_run, args.num_updates, agent, optimizer, generator, stop) as stage:
        kl_coef = stage.extra.get("kl_coef", kl_coef)
        for update in stage.remaining():
            # --- Collect: one response to each of B queries ---
            start_time = time.perf_counter()
            queries = task.sample_queries(args.batch_size, generator).to(device)
            # Detail 1/37: vectorized architecture [ppo2/runner.py L26-42]
            sampled = sample_responses(
                agent.policy, queries, task.response_length, args.temperature, generator
            )
            sampling_seconds = time.perf_counter() - start_time
            kept, lengths, stopped = truncate_responses(sampled, task.stop, task.earliest_stop)
            proxy = reward_model.score(torch.cat([queries, kept], dim=1))
            # Detail R14/21: rejection sampling [LHP: lm_tasks.py L39-65]
            scores = proxy.where(stopped, args.missing_stop_score)
            # Deviation: the episode ends at the stop word; --no-mask-after-stop restores LHP
            responses = kept if args.mask_after_stop else sampled
            ends = lengths if args.mask_after_stop else torch.full_like(lengths, len(index))
            mask, last = index < ends[:, None], index == ends[:, None] - 1
            with torch.no_grad():
                judged = (queries, responses, args.temperature)
                word_logprobs, values = agent.get_action_and_value(*judged)
                ref_word_logprobs, _ = reference.get_action_and_value(*judged)
            logprobs = log_probability(word_logprobs, responses)
            ref_logprobs = log_probability(ref_word_logprobs, responses)
            rewards = penalized_rewards(scores, logprobs, ref_logprobs, last, kl_coef)
            rollout = Rollout(queries, responses, logprobs, values, rewards, mask, last)

            # --- Update: K epochs of minibatches; advantages are made per minibatch ---
            update_start = time.perf_counter()
            # Detail 4/37: learning rate annealing [ppo2/ppo2.py L133-135]
            # Detail R5/21: learning-rate annealing of both trainings [LHP: train_policy.py L78-84]
            decay = linear_decay(1.0, update, args.num_updates) if args.anneal_lr else 1.0
            optimizer.param_groups[0]["lr"] = decay * args.learning_rate
            sums: dict[str, float] = {}
            for epoch in range(args.update_epochs):
                # Detail 6/37: minibatch updates [ppo2/ppo2.py L157-166]
                # Detail R16/21: batches and minibatches of responses [LHP: train_policy.py L180]
                order = torch.randperm(args.batch_size, generator=generator)
                for minibatch, rows in enumerate(order.split(args.minibatch_size)):
                    loss, metrics = rollout_loss(agent, Rollout(*(x[rows] for x in rollout)), args)
                    # Extra: pretraining gradients, PPO-ptx [Ouyang et al. 2022, eq. 2]
                    if args.ptx_coef > 0:
                        chosen = torch.randint(
                            len(task.documents), (len(rows),), generator=generator
                        )
                        documents = task.documents[chosen].to(device)
                        loss = loss + args.ptx_coef * language_model_loss(agent.policy, documents)
                    optimizer.zero_grad()
                    loss.backward()
                    # Extra: parallelized gradient update [ppo2/model.py L97-98]
                    average_gradients(agent)
                    # Detail 11/37: global gradient clipping [ppo2/model.py L102-108]
                    grad_norm = nn.utils.clip_grad_norm_(
                        agent.parameters(), args.max_grad_norm or math.inf
                    )
                    if args.adam == "tensorflow":
                        step = (
                            (update - 1) * gradient_steps + epoch * args.num_minibatches + minibatch
                        )
                        # Detail R21/21: TensorFlow's Adam epsilon [LHP: utils/core.py L627]
                        optimizer.param_groups[0]["eps"] = tensorflow_adam_eps(
                            args.adam_eps, step + 1
                        )
                    optimizer.step()
                    metrics["losses/grad_norm"] = grad_norm.item()
                    for name, value in metrics.items():
                        sums[name] = sums.get(name, 0.0) + value / gradient_steps
            update_seconds = time.perf_counter() - update_start

            # --- Adapt beta, log: the KL is that of the rollout, to the fixed reference ---
            difference = (logprobs - ref_logprobs).where(mask, 0.0)
            kl = average_over_processes(difference.sum(1).mean()).item()
            exact = exact_kl(word_logprobs, ref_word_logprobs)
            metrics = sums | {
                "objective/kl": kl,
                "objective/kl_k3": (difference.neg().exp() - 1 + difference).sum(1).mean().item(),
                "objective/kl_exact": exact.where(mask, 0.0).sum(1).mean().item(),
                "objective/kl_coef": kl_coef,
                "objective/proxy": proxy.mean().item(),
                "objective/score": scores.mean().item(),
                "objective/score_std": scores.std(correction=0).item(),
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/tokens_per_second_sampling": sampled.numel() / sampling_seconds,
                "charts/tokens_per_second_update": (
                    args.update_epochs * mask.sum().item() / update_seconds
                ),
            }
            audited = score_texts(auditor, queries, kept).to(device)
            metrics["objective/disagreement"] = (proxy - audited).abs().mean().item()
            metrics |= describe(task, queries.cpu(), kept.cpu(), preferences)
            stage.log(
                update, metrics, status=f"proxy {metrics['objective/proxy']:+.2f} KL {kl:.1f}"
            )
            if update in (1, args.num_updates):
                stage.text(update, task.texts(queries[:5], kept[:5]))
            for cause, sentence in rlhf_warnings(stage.rows).items():
                stage.warn(cause, sentence)
            if args.kl_mode == "adaptive":
                num_episodes = args.batch_size * WORLD_SIZE
                # The KL is that to the reference; the article says to the previous policy.
                # Detail R20/21: adaptive KL [LHP: train_policy.py L115-124, L220-227]
                kl_coef = proportional_kl_coef(
                    kl_coef, kl, args.target_kl, num_episodes, args.kl_horizon
                )
            stage.save(update, kl_coef=kl_coef)
        stage.finish()
    return agent, stage.rows


# === Evaluation ===

EVALUATION_SAMPLES = 512
BEST_OF_N = (4, 16, 64, 256, 1024)
BEST_OF_N_QUERIES = 32
FIXED_KL_COEF = 0.05  # of the fixed-beta run of --compare


def describe(
    task: Task, queries: Tensor, responses: Tensor, preferences: Preferences
) -> dict[str, float]:
    """What truncated responses (B, R) look like; with gold where there is gold, standardized."""
    words = [task.split_words(response) for response in responses]
    stopped = [w[-1:] == [task.words[task.stop]] and len(w) > task.earliest_stop for w in words]
    metrics = {
        "text/length": sum(map(len, words)) / len(words),
        "text/stop_rate": sum(stopped) / len(words),
        "text/repetition": sum(1 - len(set(w)) / len(w) for w in words) / len(words),
        "text/unique": len({" ".join(w) for w in words}) / len(words),
    }
    if task.has_gold:
        topics = [task.words[query[4]] for query in queries]
        junk = [parse_review(t, w)["junk"] for t, w in zip(topics, words, strict=True)]
        metrics["text/junk"] = sum(junk) / len(junk)
        gold = preferences.standardized(task.gold(queries, responses))
        metrics["objective/gold"] = gold.mean().item()
    return metrics


@torch.no_grad()
def evaluate(
    args: Args,
    task: Task,
    policy: TinyGPT,
    sft: TinyGPT,
    reward_model: RewardModel,
    preferences: Preferences,
) -> tuple[dict[str, float], list[str]]:
    """Metrics and some texts of fresh responses of a policy; the same queries for every policy."""
    device = next(policy.parameters()).device
    generator = stage_generator(args.seed, "evaluate", rank=0)
    queries = task.sample_queries(EVALUATION_SAMPLES, generator)
    responses = write_answers(args, task, policy, queries, generator)
    judged = (queries.to(device), responses.to(device), args.temperature)
    word_logprobs, _ = Agent(policy, None).to(device).get_action_and_value(*judged)
    ref_word_logprobs, _ = Agent(sft, None).to(device).get_action_and_value(*judged)
    kl = exact_kl(word_logprobs, ref_word_logprobs).cpu().where(responses != PAD, 0.0)
    metrics = {
        "objective/proxy": score_texts(reward_model, queries, responses).mean().item(),
        "objective/kl": kl.sum(1).mean().item(),
    } | describe(task, queries, responses, preferences)
    return metrics, task.texts(queries[:5], responses[:5])


def best_of_n(
    args: Args,
    task: Task,
    sft: TinyGPT,
    reward_model: RewardModel,
    preferences: Preferences,
) -> dict[int, dict[str, float]]:
    """Answer with the sample that the reward model likes best out of n: PPO's simple rival.

    Each group of the largest n samples is cut into smaller groups, so that no sample is idle.
    """
    generator = stage_generator(args.seed, "best-of-n", rank=0)
    most = max(BEST_OF_N)
    queries = task.queries[torch.randperm(len(task.queries), generator=generator)]
    queries = queries[:BEST_OF_N_QUERIES].repeat_interleave(most, dim=0)
    responses = write_answers(args, task, sft, queries, generator)
    scores = score_texts(reward_model, queries, responses)
    results = {}
    for n in BEST_OF_N:
        best = scores.view(-1, n).argmax(dim=1) + torch.arange(len(scores) // n) * n
        results[n] = {
            "objective/proxy": scores[best].mean().item(),
            "objective/kl": best_of_n_kl(n),
        } | describe(task, queries[best], responses[best], preferences)
    return results


COLUMNS = {
    "gold": "objective/gold",
    "proxy": "objective/proxy",
    "KL": "objective/kl",
    "stop rate": "text/stop_rate",
    "length": "text/length",
    "repetition": "text/repetition",
    "unique": "text/unique",
}


def draw_frontier(
    path: Path, runs: dict[str, list[dict[str, float]]], best: dict[int, dict[str, float]]
) -> Any:
    """Draw proxy and gold over sqrt(KL) for each PPO run and for best-of-n; save as PNG.

    Beside the gold curves stand the forms that Gao et al. 2022 fitted to theirs.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.figure import Figure

    has_gold = all("objective/gold" in rows[0] for rows in runs.values())
    names = ["proxy", "gold"] if has_gold else ["proxy"]
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        curves = {
            run: [(max(row["objective/kl"], 0.0), row[f"objective/{name}"]) for row in rows]
            for run, rows in runs.items()
        }
        if best:
            curves["best-of-n"] = [
                (row["objective/kl"], row[f"objective/{name}"]) for row in best.values()
            ]
        for number, (run, points) in enumerate(curves.items()):
            kl, reward = map(list, zip(*points, strict=True))
            color, style = f"C{number}", {"marker": ".", "linewidth": 0.8, "markersize": 4}
            axes.plot([math.sqrt(x) for x in kl], reward, color=color, label=run, **style)
            if name == "gold" and run in ("ppo-none", "best-of-n"):
                method = "bon" if run == "best-of-n" else "rl"
                alpha, beta = gao_fit(kl, reward, method)
                d = torch.linspace(0.05, math.sqrt(max(kl)), 200)
                bend = d if method == "bon" else d.log()
                form = "d" if method == "bon" else "log d"
                label = f"Gao et al.: d ({alpha:.2f} - {beta:.2f} {form})"
                axes.plot(d, d * (alpha - beta * bend), ":", color=color, label=label)
        axes.set(xlabel="d = sqrt(KL to the SFT model)", ylabel=f"{name} reward (SFT: 0 ± 1)")
        axes.axhline(0, color="gray", linewidth=0.5)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return figure


def write_report(
    args: Args,
    results: dict[str, dict[str, float]],
    texts: dict[str, list[str]],
    quality: dict[str, float],
    runs: dict[str, list[dict[str, float]]],
    best: dict[int, dict[str, float]],
) -> None:
    """Print the table; put table, texts and picture into the run's folder and TensorBoard."""
    columns = {k: v for k, v in COLUMNS.items() if all(v in row for row in results.values())}
    rows = [("", *columns)]
    rows += [(run, *(f"{x[v]:.2f}" for v in columns.values())) for run, x in results.items()]
    samples = "\n\n".join(f"{run}\n" + "\n".join(f"  {x}" for x in texts[run]) for run in texts)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    say(f"\n{samples}\n")
    content = {"args": dataclasses.asdict(args), "reward_model": quality, "results": results}
    picture = args.run_dir / "frontier.png"
    try:
        (args.run_dir / "report.md").write_text(f"{markdown_table(rows)}\n\n{samples}\n")
        (args.run_dir / "results.json").write_text(json.dumps(content, indent=2))
        figure = draw_frontier(picture, runs, best)
        with contextlib.closing(SummaryWriter(str(args.run_dir / "report"))) as writer:
            writer.add_figure("frontier", figure)
            writer.add_text("table", markdown_table(rows))
        for run, lines in texts.items():
            log_texts(args, run, lines)
    except OSError as error:
        say(f"Warning: the report cannot be written ({error.strerror or error}).")
        return
    if args.track:
        import wandb

        wandb.log({"frontier": wandb.Image(str(picture))})
        wandb.log({"table": wandb.Table(list(rows[0]), [list(row) for row in rows[1:]])})
    say(f"Done. Models, report.md and frontier.png: {args.run_dir}")
    say(f"Logs: tensorboard --logdir {args.run_dir}")


# === The pipeline ===


def train(args: Args) -> dict[str, Any]:
    """Run the stages that are not done yet; models, logs and the report go into `args.run_dir`.

    Returns:
        agent: the trained `Agent` of the main PPO run;
        updates: one dictionary of metrics per update of each PPO run, by its name;
        results: evaluation of each model, by its name;
        reward_model: its quality;
        args: the settings in force, with the name of the run.

    Raises:
        RunError: the run cannot start or go on.
    """
    args = prepare_run(args)
    torch.set_num_threads(args.torch_threads)
    task = own_task(args) if args.preferences else toy_task(args)
    start_logs(args)
    with StopRequest() as stop:
        sft = train_sft(args, task, stop)
        preferences = make_preferences(args, task, sft)
        reward_model, quality = train_reward_model(args, task, sft, preferences, stop)
        auditor, _ = train_reward_model(args, task, sft, preferences, stop, auditor=True)

        planned = {args.ppo_run: args}
        others = [{"kl_mode": "none"}] if args.contrast or args.compare else []
        if args.compare:
            others += [{"kl_mode": "adaptive"}, {"kl_mode": "fixed", "kl_coef": FIXED_KL_COEF}]
        for settings in others:
            other = dataclasses.replace(args, **settings)
            planned.setdefault(other.ppo_run, other)
        agents, updates = {}, {}
        for name, ppo_args in planned.items():
            agents[name], updates[name] = train_ppo(
                ppo_args, task, sft, reward_model, auditor, preferences, stop
            )

        leave_if(stop, args)
        results, texts, best = {}, {}, {}
        if RANK == 0:
            judged = (sft, reward_model, preferences)
            for name, policy in {"sft": sft, **{k: x.policy for k, x in agents.items()}}.items():
                results[name], texts[name] = evaluate(args, task, policy, *judged)
            if args.compare:
                best = best_of_n(args, task, *judged)
            results |= {f"best-of-{n}": x for n, x in best.items()}
            write_report(args, results, texts, quality, updates, best)
    if args.track and RANK == 0:
        import wandb

        wandb.finish()
    return {
        "agent": agents[args.ppo_run],
        "updates": updates,
        "results": results,
        "reward_model": quality,
        "args": args,
    }


# === Operations: start, processes, health, details, logs, artefacts, checkpoints ===

# Settings that do not alter the course of a run: a resumed one may change them.
CHANGEABLE = {"resume", "stage", "contrast", "compare", "print_details", "checkpoint_interval"}
CHANGEABLE |= {"track", "wandb_project", "wandb_entity", "run_name", "output_dir"}
# The first stage that each other setting influences; those not named here influence PPO.
FIRST_STAGE = {
    **dict.fromkeys(("seed", "device", "torch_threads", "corpus", "preferences"), "sft"),
    **dict.fromkeys(("sft_documents", "sft_steps", "sft_batch_size", "sft_learning_rate"), "sft"),
    **dict.fromkeys(("num_pairs", "temperature"), "preferences"),
    **dict.fromkeys(("reward_epochs", "reward_batch_size", "reward_learning_rate"), "reward-model"),
}
STAGES = ("sft", "preferences", "reward-model", "ppo")


def prepare_run(args: Args) -> Args:
    """Join the other processes; name the run, or check what it continues."""
    if WORLD_SIZE > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(dist.destroy_process_group)
    pick_device(args)
    checkpoint = find_run(args)
    if checkpoint is not None:
        folder = checkpoint.parent
        saved, processes = folder_settings(folder)
        args = dataclasses.replace(
            args, output_dir=str(folder.parent), run_name=folder.name, resume=str(checkpoint)
        )
        refuse_changes(args, saved)
        if processes != WORLD_SIZE:
            raise RunError(f"{folder} needs {processes} processes, not {WORLD_SIZE}.")
        args.check()
    else:
        name = [args.run_name or f"{run_name_prefix(args)}{time.strftime('%Y%m%d-%H%M%S')}"]
        if WORLD_SIZE > 1:
            dist.broadcast_object_list(name)
        args = dataclasses.replace(args, run_name=name[0], resume=None)
        if RANK == 0 and (args.run_dir / "args.json").exists():
            raise RunError(
                f"{args.run_dir} holds a run: add --resume {args.run_dir} or another --run-name."
            )
    return args


def run_name_prefix(args: Args) -> str:
    """What the names of all runs of this language, script and seed begin with."""
    return f"{'own-text' if args.preferences else 'reviews'}__{SCRIPT}__{args.seed}__"


def find_run(args: Args) -> Path | None:
    """Path of the checkpoint in the folder that --resume names, where it need not exist yet.

    None starts a new run.
    """
    if args.resume is None:
        return None
    if args.resume == "auto":
        pattern = glob.escape(args.run_name or run_name_prefix(args)) + "*" * (not args.run_name)
        found = sorted(Path(args.output_dir).glob(f"{pattern}/args.json"), key=os.path.getmtime)
        if not found:
            return None
        path = found[-1].with_name("checkpoint.pt")
        with contextlib.suppress(RunError):
            if path.exists():
                load_file(path, "stage")
            return path
        return path.with_suffix(".previous.pt")
    path = Path(args.resume)
    path = path / "checkpoint.pt" if path.is_dir() else path
    if not path.with_name("args.json").exists():
        raise RunError(f"There is no run at {args.resume}.")
    return path


def folder_settings(folder: Path) -> tuple[Args, int]:
    """The settings of the run in a folder, and the number of its processes."""
    path = folder / "args.json"
    try:
        settings = json.loads(path.read_text())
        processes = settings.pop("processes")
        return Args(**settings), processes
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path} does not hold the settings of a run of this script.") from error


def refuse_changes(args: Args, saved: Args) -> None:
    """Let a resumed run change only settings of the stages that it does anew."""
    for field in dataclasses.fields(Args):
        value, old = getattr(args, field.name), getattr(saved, field.name)
        stage = FIRST_STAGE.get(field.name, "ppo")
        anew = args.stage is not None and STAGES.index(args.stage) <= STAGES.index(stage)
        if value != old and field.name not in CHANGEABLE and not anew:
            flag = "--" + field.name.replace("_", "-")
            raise RunError(
                f"{args.run_dir} was made with {flag} {old}; to change it, add --stage {stage}, "
                "which does that stage and all after it anew."
            )


def pick_device(args: Args) -> torch.device:
    """The device of all networks; a GPU on request only, for it gains nothing at this size."""
    if args.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError("--device cuda needs an NVIDIA GPU and a CUDA build of PyTorch; use cpu.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def stage_generator(seed: int, purpose: str, rank: int) -> torch.Generator:
    """A random generator for one purpose in one process, on the CPU.

    Each stage has its own, so that a run that reuses earlier stages equals one that makes them.
    """
    # Detail R6/21: different seeds for different processes [LHP: utils/core.py L108-113]
    return torch.Generator().manual_seed(zlib.crc32(purpose.encode()) + seed + rank * 100_003)


# Copied from ppo_continuous_action.py
def average_over_processes(x: Tensor) -> Tensor:
    """Replace `x` in place by its mean over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
        x /= WORLD_SIZE
    return x


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients in place by their means over all processes."""
    if WORLD_SIZE > 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                average_over_processes(parameter.grad)


# Copied from ppo_continuous_action.py
class StopRequest:
    """Turns the first SIGTERM or Ctrl-C into a request to stop; a second one ends at once."""

    def __init__(self) -> None:
        self.signum = 0

    def _request(self, signum: int, frame: Any) -> None:
        self.signum = signum
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        say(f"{signal.Signals(signum).name}: stopping after this iteration; again to stop at once.")

    def __enter__(self) -> "StopRequest":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():  # Python allows it only there
            for number in (signal.SIGTERM, signal.SIGINT):
                self.previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def in_any_process(self) -> signal.Signals | None:
        """The signal that some process received, so that all of them stop together."""
        signum = torch.tensor(self.signum)
        if WORLD_SIZE > 1:
            dist.all_reduce(signum, dist.ReduceOp.MAX)
        return signal.Signals(signum.item()) if signum else None


def leave_if(stop: StopRequest, args: Args) -> None:
    """End the program if a signal asked for it."""
    if signum := stop.in_any_process():
        say(f"Stopped by {signum.name}; continue with --resume {args.run_dir}")
        raise SystemExit(128 + signum)


# Thresholds of `rlhf_warnings`.
CLIPFRAC_HIGH = 0.5  # half of all words have left the range in which the objective is trusted
APPROX_KL_HIGH = 0.5  # per word; the first update of a healthy run on this task shows up to 0.3
KL_RUNAWAY = 30.0  # nats per response; Gao et al. 2022 saw no gain in gold beyond it
SCORE_STD_LOW = 1e-6  # below it there is nothing to prefer
PROXY_RISE = 0.5  # standard deviations of the SFT samples
DISAGREEMENT_GROWTH = 2.2  # 1.8 at most in an adaptive run, 2.4 soon with beta = 0
REPETITION_GROWTH = 0.2  # share of words
PATIENCE = 5  # updates whose means are compared


def rlhf_warnings(updates: list[dict[str, float]]) -> dict[str, str]:
    """Look at the metrics of all updates so far; return a sentence with a remedy per cause."""
    latest, found = updates[-1], {}

    def change(name: str) -> tuple[float, float]:
        early, late = updates[:PATIENCE], updates[-PATIENCE:]
        return sum(x[name] for x in early) / len(early), sum(x[name] for x in late) / len(late)

    if latest["losses/clipfrac"] > CLIPFRAC_HIGH:
        found["clipfrac"] = (
            f"{latest['losses/clipfrac']:.0%} of the policy ratios are outside the clip range: "
            "lower --learning-rate or --update-epochs."
        )
    if latest["losses/approx_kl"] > APPROX_KL_HIGH:
        found["approx_kl"] = (
            f"the policy moves far in one update (approx. KL {latest['losses/approx_kl']:.2f} per "
            "word): lower --learning-rate or --update-epochs."
        )
    if latest["objective/kl"] > KL_RUNAWAY:
        found["kl"] = (
            f"the KL to the reference has run away ({latest['objective/kl']:.0f} nats per "
            "response): raise --kl-coef, or use --kl-mode adaptive with a low --target-kl."
        )
    if latest["objective/score_std"] < SCORE_STD_LOW:
        found["scores"] = (
            "all responses have the same score, so the reward gives no gradient: check the reward "
            "model and whether responses ever stop."
        )
    proxy_before, proxy = change("objective/proxy")
    doubt_before, doubt = change("objective/disagreement")
    repetition_before, repetition = change("text/repetition")
    doubtful = doubt > DISAGREEMENT_GROWTH * doubt_before
    repetitive = repetition > repetition_before + REPETITION_GROWTH
    if proxy > proxy_before + PROXY_RISE and (doubtful or repetitive):
        reason = (
            f"a second reward model disagrees more and more ({doubt_before:.2f} to {doubt:.2f})"
            if doubtful
            else f"texts repeat themselves ({repetition_before:.0%} to {repetition:.0%} of words)"
        )
        found["hacking"] = (
            f"reward hacking suspected, the proxy rises ({proxy_before:.1f} to {proxy:.1f}) while "
            f"{reason}: lower --target-kl or raise --kl-coef, and read the sample texts."
        )
    return found


DETAIL_TAG = re.compile(
    r"# (?:Detail (\w+/\d+)|(Extra|Deviation))( omitted)?: ([^\[;]+?)(?: \[.*\]|; (.*))?"
)


# Copied from ppo_continuous_action.py
def detail_table(args: Args, source: str) -> list[tuple[str, str, str, int]]:
    """The implementation details of `source`: number, name, value in this run, line.

    The value lists the settings that the statement below the tag names, or, for a detail that this
    script does not have, the reason.
    """
    statements = {x.lineno: x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.stmt)}
    lines = source.splitlines()
    rows = []
    for line, text in enumerate(lines, start=1):
        match = DETAIL_TAG.fullmatch(text.strip())
        if match is None:
            continue
        number, extra, omitted, title, reason = match.groups()
        value = f"not here: {reason}"
        if not omitted:
            first = next(x for x in range(line + 1, len(lines) + 1) if x in statements)
            body = getattr(statements[first], "body", None)
            last = body[0].lineno - 1 if body else statements[first].end_lineno
            words = re.findall(r"\w+", "\n".join(lines[first - 1 : last]))
            names = [name for name in dict.fromkeys(words) if hasattr(args, name)]
            value = ", ".join(f"{name}={getattr(args, name)}" for name in names) or "on"
        rows.append((number or extra, title, value, line))

    # The 37 first, then a series with a letter, then what has no number.
    def place(row: tuple) -> tuple[str, int]:
        letter, digits = re.fullmatch(r"([A-Z]?)(\d*).*", row[0]).groups()
        return (letter if digits else "~"), int(digits or 0)

    return sorted(rows, key=place)


# Copied from ppo_continuous_action.py
def say(text: str) -> None:
    """Print a line above the progress bar, once for all processes."""
    if RANK == 0:
        tqdm.write(text)
        sys.stdout.flush()


# Copied from ppo_continuous_action.py
def markdown_table(rows: list[tuple]) -> str:
    """Rows, the first of them the header, as Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def start_logs(args: Args) -> None:
    """Make the run's folder; say what is about to run; log the settings and the details' table."""
    if RANK > 0:
        return
    try:
        args.run_dir.mkdir(parents=True, exist_ok=True)
        if args.track:
            start_wandb(args)
        # Last, since it makes the folder that of a run.
        settings = dataclasses.asdict(dataclasses.replace(args, resume=None, stage=None))
        settings = json.dumps(settings | {"processes": WORLD_SIZE}, indent=2)
        (args.run_dir / "args.json").write_text(settings + "\n")
    except OSError as error:
        raise RunError(f"Cannot write to {args.run_dir}: {error.strerror}.") from error
    table = [("Detail", "Name", "In this run", "Line")]
    table += detail_table(args, Path(__file__).read_text())
    if args.print_details:
        say("\n".join(f"{a:>7}  {b:<44} {d:>4}  {c}" for a, b, c, d in table))
    settings = [("Setting", "Value"), *dataclasses.asdict(args).items()]
    with contextlib.closing(SummaryWriter(str(args.run_dir / "report"))) as writer:
        writer.add_text("details", markdown_table(table))
        writer.add_text("settings", markdown_table(settings))
    if args.track:
        import wandb

        rows = [[str(cell) for cell in row] for row in table]
        wandb.log({"details": wandb.Table(rows[0], rows[1:])})
    say(
        f"{'Your own text' if args.preferences else 'Toy reviews'}, seed {args.seed}, in "
        f"{WORLD_SIZE} process(es) with {args.torch_threads} thread(s) on {pick_device(args)}; "
        f"logs: {args.run_dir}"
    )


def start_wandb(args: Args) -> None:
    """Start a run at Weights & Biases, or continue the one of the same name."""
    try:
        import wandb
    except ImportError as error:
        raise RunError("--track needs Weights & Biases: pip install wandb.") from error
    try:
        wandb.init(
            project=args.wandb_project,
            entity=args.wandb_entity,
            name=args.run_name,
            id=hashlib.sha256(str(args.run_name).encode()).hexdigest()[:8],
            resume="allow",
            config=dataclasses.asdict(args),
            dir=args.run_dir,
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise RunError(f"Weights & Biases: {reason} (WANDB_MODE=offline works too).") from error


def log_texts(args: Args, name: str, lines: list[str]) -> None:
    """Show texts in TensorBoard that belong to no training step."""
    if RANK > 0:
        return
    try:
        with contextlib.closing(SummaryWriter(str(args.run_dir / "report"))) as writer:
            writer.add_text(f"samples/{name}", "\n\n".join(lines))
    except OSError as error:  # a full disk must not end the training
        say(f"The samples of {name} are not logged: {error.strerror}.")


MUST_BE_FINITE = {"losses/loss", "losses/policy_loss", "losses/value_loss", "losses/grad_norm"}


class Stage:
    """What surrounds the training loop of a stage: progress, logs, checkpoints, stop requests.

    The loop runs over `remaining()`, calls `log` and `save` at the end of each step and `finish`
    after the last one.
    """

    def __init__(
        self,
        args: Args,
        name: str,
        num_steps: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        stop: StopRequest,
    ) -> None:
        self.args, self.name, self.num_steps = args, name, num_steps
        self.model, self.optimizer, self.generator = model, optimizer, generator
        self.stop = stop
        self.rows: list[dict[str, float]] = []
        self.extra: dict[str, float] = {}  # what else the loop gave to `save`
        self.warned: set[str] = set()
        # An iteration is a PPO update, or the 8 gradient steps of another stage that take as long.
        self.interval = args.checkpoint_interval * (1 if name.startswith("ppo") else 8)

    def __enter__(self) -> "Stage":
        path = Path(self.args.resume or "")
        if self.args.resume and path.exists():
            saved = load_file(path, "stage")
            if saved["stage"] == self.name and saved["settings"] == settings_for(
                self.args, self.name
            ):
                self.model.load_state_dict(saved["model"])
                self.optimizer.load_state_dict(saved["optimizer"])
                self.generator.set_state(saved["generators"][RANK])
                self.rows, self.extra = saved["rows"], saved["extra"]
        done = len(self.rows)
        if RANK == 0:
            # purge_step hides what was logged after the checkpoint and before the run was killed.
            self.writer = SummaryWriter(str(self.args.run_dir / self.name), purge_step=done + 1)
            self._write_rows("w", self.rows)
            if self.args.track:
                import wandb

                # Every stage counts its own steps.
                wandb.define_metric(f"{self.name}/*", step_metric=f"{self.name}/step")
            self.progress = tqdm(
                desc=self.name,
                total=self.num_steps,
                initial=done,
                unit="step",
                disable=not sys.stderr.isatty(),
            )
        return self

    def __exit__(self, *exception: Any) -> None:
        if RANK == 0:
            self.progress.close()
            with self._surviving():
                self.writer.close()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """A full disk or a removed folder must not end the training."""
        try:
            yield
        except OSError as error:
            self.warn("logs", f"the logs cannot be written ({error.strerror or error}).")

    def _write_rows(self, mode: Literal["w", "a"], rows: list[dict[str, float]]) -> None:
        with (
            self._surviving(),
            (self.args.run_dir / f"{self.name}.csv").open(mode, newline="") as file,
        ):
            if rows:
                writer = csv.DictWriter(file, rows[0])
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerows(rows)

    def remaining(self) -> range:
        """The steps that are not done yet, counted from 1."""
        return range(len(self.rows) + 1, self.num_steps + 1)

    def log(self, step: int, metrics: dict[str, float], status: str) -> None:
        """Write the metrics of one step everywhere.

        Raises:
            RunError: a loss or gradient is NaN or infinite.
        """
        for name, value in metrics.items():
            if name in MUST_BE_FINITE and not math.isfinite(value):
                raise RunError(
                    f"{self.name}: {name} is NaN or infinite at step {step}; the last checkpoint "
                    f"is in {self.args.run_dir}."
                )
        self.rows.append({"step": step, **metrics})
        if RANK > 0:
            return
        with self._surviving():
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
        self._write_rows("a", self.rows[-1:])
        if self.args.track:
            import wandb

            wandb.log({f"{self.name}/{name}": x for name, x in self.rows[-1].items()})
        self.progress.set_postfix_str(status, refresh=False)
        self.progress.update()
        if self.progress.disable and step % max(1, self.num_steps // 4) == 0:
            say(f"{self.name}: step {step} of {self.num_steps}, {status}")

    def text(self, step: int, lines: list[str]) -> None:
        """Show sample texts in TensorBoard."""
        if RANK == 0:
            with self._surviving():
                self.writer.add_text("samples", "\n\n".join(lines), step)

    def warn(self, cause: str, sentence: str) -> None:
        """Print a warning once per cause."""
        if cause not in self.warned:
            self.warned.add(cause)
            say(f"Warning: {self.name}: {sentence}")

    def save(self, step: int, **extra: float) -> None:
        """Write a checkpoint where one is due; then leave if a signal asked for it."""
        asked = self.stop.in_any_process()
        if not asked and step % self.interval != 0:
            return
        generators = [self.generator.get_state()]
        if WORLD_SIZE > 1:
            gathered = [None] * WORLD_SIZE
            dist.all_gather_object(gathered, generators[0])
            generators = gathered
        if RANK == 0:
            with self._surviving():
                self.writer.flush()
            content = {
                "stage": self.name,
                "model": cpu_weights(self.model),
                "optimizer": self.optimizer.state_dict(),
                "generators": generators,
                "rows": self.rows,
                "extra": extra,
            }
            save_file(self.args.run_dir / "checkpoint.pt", described(self.args, self.name, content))
        leave_if(self.stop, self.args)

    def finish(self, **content: Any) -> None:
        """Save the model and what else the stage made."""
        content |= {"model": cpu_weights(self.model), "rows": self.rows}
        save_artefact(self.args, self.name, **content)


# --- Artefacts and checkpoints ---

FORMAT = 1  # raised when older scripts could no longer read the files


def cpu_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model, loadable on every machine."""
    return {name: x.detach().cpu() for name, x in model.state_dict().items()}


def settings_for(args: Args, name: str) -> dict[str, Any]:
    """All that the result of a stage depends on, up to and including its own settings."""
    name = "reward-model" if name == "auditor" else name
    stages = STAGES[: STAGES.index("ppo" if name.startswith("ppo") else name) + 1]
    settings: dict[str, Any] = {"processes": WORLD_SIZE}
    for field, value in dataclasses.asdict(args).items():
        if field not in CHANGEABLE and FIRST_STAGE.get(field, "ppo") in stages:
            settings[field] = value
    for file in ("corpus", "preferences"):
        if settings[file]:
            settings[file] = FILE_DIGESTS[settings[file]]
    # Settings without effect in a mode, so that changing them does not discard its run.
    unused = {
        "adaptive": [],
        "fixed": ["target_kl", "kl_horizon"],
        "none": ["kl_coef", "target_kl", "kl_horizon"],
    }
    for field in unused[args.kl_mode]:
        settings.pop(field, None)
    return settings


def described(args: Args, name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Content of a file, with what tells whose it is."""
    return {
        "format": FORMAT,
        "script": SCRIPT,
        "args": dataclasses.asdict(args),
        "settings": settings_for(args, name),
    } | content


def save_artefact(args: Args, name: str, **content: Any) -> None:
    """Keep what a stage made, as `name`.pt in the run's folder."""
    if RANK == 0:
        save_file(args.run_dir / f"{name}.pt", described(args, name, content))


def load_artefact(args: Args, name: str) -> dict[str, Any] | None:
    """What a stage made before in this folder under the same settings, if it did."""
    path = args.run_dir / f"{name}.pt"
    if not args.resume or not path.exists():
        return None
    content = load_file(path, "settings")
    if content["settings"] != settings_for(args, name):
        return None
    say(f"{name}: taken from {path}")
    return content


# Copied from ppo_continuous_action.py
def save_file(path: Path, content: dict[str, Any]) -> bool:
    """Write a file that is complete or absent, whatever happens; the one before is kept beside it.

    Loadable with `torch.load(path, weights_only=True)`. The comment of the zip archive is the
    SHA-256 digest of all before it. Returns False, after a warning, if the disk refuses.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()[:-2] + struct.pack("<H", 64)  # the length of the comment, was 0
    digest = hashlib.sha256(data).hexdigest().encode()
    temporary, previous = path.with_suffix(".tmp"), path.with_suffix(".previous.pt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data + digest)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            previous.unlink(missing_ok=True)
            try:
                os.link(path, previous)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, previous)
        os.replace(temporary, path)
    except OSError as error:
        say(f"Warning: cannot save {path} ({error.strerror}).")
        return False
    return True


# Copied from ppo_continuous_action.py
def load_file(path: Path, needed: str) -> dict[str, Any]:
    """Read what `save_file` wrote, running no code from it.

    Raises:
        RunError: the file is damaged, foreign, newer than this script or lacks the key `needed`.
    """
    content: Any = None
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[:-64]).hexdigest().encode() == data[-64:]:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        problem = "is damaged or not a file of this script"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except Exception:  # whatever a foreign archive can raise
        problem = "is not a file of this script"
    if isinstance(content, dict) and "format" in content:
        problem = None
        if content["format"] > FORMAT:
            problem = "was written by a newer version of this script"
        elif content["script"] != SCRIPT:
            problem = f"was written by {content['script']}.py"
        elif needed not in content:
            problem = "holds a model but not the state of a run; it can only be evaluated"
    if problem is None:
        return content
    previous = path.with_suffix(".previous.pt")
    older = ""
    if previous.exists():
        with contextlib.suppress(RunError):
            load_file(previous, needed)
            older = f" An older good one is {previous}."
    raise RunError(f"{path} {problem}.{older}")


# The other details of PPO, so that the table shows all 37.
# Detail 14/37 omitted: no-op reset; Atari only, see ppo_atari.py
# Detail 15/37 omitted: max and skip; Atari only, see ppo_atari.py
# Detail 16/37 omitted: episodic life; Atari only, see ppo_atari.py
# Detail 17/37 omitted: fire reset; Atari only, see ppo_atari.py
# Detail 18/37 omitted: warp frame; Atari only, see ppo_atari.py
# Detail 19/37 omitted: reward clipping to sign; Atari only, scores are normalized here (R9)
# Detail 20/37 omitted: frame stack; Atari only, see ppo_atari.py
# Detail 21/37 omitted: shared Nature CNN; observations are words, not images
# Detail 22/37 omitted: image scaling; observations are words, not images
# Detail 23/37 omitted: normal distribution; actions are words, drawn from a categorical one
# Detail 24/37 omitted: state-independent log std; actions are words, see ppo_continuous_action.py
# Detail 25/37 omitted: independent action components; an action is one word
# Detail 26/37 omitted: separate networks; see --critic at 13
# Detail 27/37 omitted: action clipping and storage; words have no range
# Detail 28/37 omitted: observation normalization; observations are words
# Detail 29/37 omitted: observation clipping; observations are words
# Detail 30/37 omitted: reward scaling; rewards are scaled per minibatch (R18)
# Detail 31/37 omitted: reward clipping; scores are normalized (R9)
# Detail 32/37 omitted: layer initialization; no LSTM, see ppo_atari_lstm.py
# Detail 33/37 omitted: zero initial states; no LSTM, see ppo_atari_lstm.py
# Detail 34/37 omitted: reset at episode end; no LSTM, see ppo_atari_lstm.py
# Detail 35/37 omitted: sequential minibatches; no LSTM, see ppo_atari_lstm.py
# Detail 36/37 omitted: rebuild states in training; no LSTM, see ppo_atari_lstm.py
# Detail 37/37 omitted: independent action components; one word at a time, see ppo_multidiscrete.py


def run_command_line() -> None:
    """Read the command line and run; what is wrong with it ends as one sentence and code 2."""
    try:
        args = tyro.cli(Args)
        checkpoint = find_run(args)
        if checkpoint is not None:
            # A resumed run has its own settings; only flags that are given change them.
            saved, _ = folder_settings(checkpoint.parent)
            args = tyro.cli(Args, default=dataclasses.replace(saved, resume=str(checkpoint)))
        train(args)
    except RunError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run_command_line()
