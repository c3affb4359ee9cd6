"""Where metrics are in healthy runs, and the rule by which a run is judged.

Nothing else has these numbers: `python -m benchmark check`, the tables of bugs, the figure of a
healthy run and the table of ranges in DEBUGGING.md all read them here.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmark.lab.logs import UNKNOWN, Log
from benchmark.lab.record import LAST_EPISODES
from benchmark.lab.tables import markdown

DIAGNOSE = Path(__file__).with_name("diagnose.py")
INF, ANY = math.inf, (-math.inf, math.inf)
STEPS = 2000  # a patience counts iterations of this size; shorter ones count less
LOST, PENALIZED = "while return is lost", "with a KL penalty"
EARLY = 20  # episodes that say what a return is, at least
RECENT = 10  # updates whose median is shown as the value of now


class Advice(NamedTuple):
    """What to do about values up to `up_to`, and the symptom in DEBUGGING.md to look up."""

    up_to: float
    text: str
    symptom: str


class Limit(NamedTuple):
    """A metric is unusual outside of `usual`, where healthy MuJoCo runs are.

    It is unhealthy once it has been outside of `low` to `high` for `patience` iterations (0: one),
    and if `only` names a condition, only then. `usual` is not judged before that either.
    """

    metric: str
    usual: tuple[float, float]
    low: float
    high: float
    patience: int
    only: str
    advice: tuple[Advice, ...]


SMALL = "Updates are small. If learning is slow, try a larger --learning-rate."
LARGE = "Updates are large. Lower --learning-rate, or try --early-stop-kl 0.02."
NONE = "The policy stays the same: is the ratio always 1? Does the optimizer have its weights?"
SIGNS = "Good actions did not become more likely: check signs and reshapes."
WORDS = "Good tokens did not become more likely: check rewards, masks and signs."
SWAPPED = "Chosen answers are not preferred: are the two log-probabilities swapped?"
RATIO = "KL and clip fraction almost 0, yet the policy moves, gradient norm high"
JUMP = "KL and clip fraction jump from the first update"
WORSE = "return falls below that of random actions, `check/update` negative"
# fmt: off
ENVIRONMENTS = (
    Limit("losses/approx_kl", (0.005, 0.025), 1e-12, 0.05, 10, LOST, (
        Advice(1e-12, NONE, RATIO), Advice(0.01, SMALL, ""), Advice(INF, LARGE, JUMP))),
    Limit("losses/clipfrac", (0.07, 0.3), *ANY, 10, "", (
        Advice(0.1, SMALL, RATIO), Advice(INF, LARGE, JUMP))),
    Limit("losses/explained_variance", (0.5, 1), *ANY, 10, "", (
        Advice(0.1, "Values do not learn: check shapes, and scale the rewards.",
               "explained variance near 0, gradient norm low"),
        Advice(INF, "Usual early in training. If it stays so, scale the rewards.", ""))),
    Limit("check/value_bias", ANY, -INF, 0.6, 20, "", (
        Advice(INF, "Values exceed returns: check V at the ends of episodes.",
               "`check/value_bias` far above 0, explained variance near 1, return stays low"),)),
    Limit("check/update", ANY, 0.02, INF, 10, LOST, (
        Advice(-0.02, SIGNS, WORSE), Advice(INF, SIGNS, "`check/update` near 0, KL normal"))),
    Limit("check/first_kl", (-INF, 1e-5), *ANY, 0, "", (
        Advice(INF, "The batch is not what the policy saw: check observations and actions.",
               "`check/first_kl` above 0"),)),
    Limit("check/acting", ANY, -INF, 1e-5, 0, "", (
        Advice(INF, "The policy that acts is not the one that learns: both must compute the same.",
               "`check/acting` above 0"),)),
)
KL_EXACT = (
    Limit("objective/kl_exact", ANY, 1e-3, INF, 5, "", (
        Advice(INF, "It stays 0: is the reference model being trained too?",
               "RLHF: exact KL 0"),)),
    Limit("objective/kl_exact", ANY, 0, 30, 1, PENALIZED, (
        Advice(INF, "Raise --kl-coef or lower --target-kl. At the start: mask the padding.",
               "RLHF: KL grows without bound, texts repeat themselves"),)),
)
RLHF = (Limit("check/update", ANY, 0.06, INF, 10, "", (
    Advice(INF, WORDS, "RLHF: proxy stays, `check/update` below 0.06, KL below its target"),)),
    *KL_EXACT)
GRPO = (Limit("check/update", ANY, -0.02, INF, 10, "", (Advice(INF, WORDS, WORSE),)), *KL_EXACT)
PAIRS = (Advice(INF, SWAPPED, ""),)
DPO = (Limit("rewards/accuracy", (0.5, 1), *ANY, 0, "", PAIRS),
       Limit("rewards/margin", (0, INF), *ANY, 0, "", PAIRS))
# fmt: on


# --- The rule ---


def return_lost(returns: np.ndarray) -> bool:
    """Whether the latest twentieth of the episodes, at least 20, gave back a fifth of the gain.

    The gain is from the first so many episodes to the best so many in a row.
    """
    count = max(EARLY, len(returns) // 20)
    sums = np.cumsum(np.concatenate([[0.0], returns]))
    means = (sums[count:] - sums[:-count]) / count
    return len(means) > 0 and means[-1] < means[0] + 0.8 * (means.max() - means[0])


def limits_of(metrics: pd.Index) -> tuple[Limit, ...]:
    """The limits for a run that logs these metrics."""
    if "rewards/accuracy" in metrics:
        return DPO
    if "objective/kl_exact" in metrics:
        return GRPO if "losses/k3" in metrics else RLHF
    return ENVIRONMENTS


def unhealthy(updates: pd.DataFrame, episodes: pd.DataFrame) -> list[tuple[Limit, np.ndarray]]:
    """The limits for a run, each with the updates after which its metric is unhealthy, (U,).

    Args:
        updates: a row per iteration, with "global_step" and metrics; missing values are healthy.
        episodes: "global_step" and "return" of each; empty in RLHF, where patience counts updates.
    """
    found, steps = [], updates["global_step"].to_numpy()
    limits = limits_of(updates.columns)
    part = min(np.diff(steps, prepend=0).min() / STEPS, 1) if limits is ENVIRONMENTS else 1
    for limit in limits:
        values = updates.get(limit.metric, pd.Series(np.nan, updates.index)).to_numpy(float)
        bad = (values < limit.low) | (values > limit.high)
        count = max(math.ceil(limit.patience / part), 1)
        long = pd.Series(bad, dtype=float).rolling(count).sum().to_numpy() == count
        if limit.only == LOST:
            before = np.searchsorted(episodes["global_step"], steps, side="right")
            returns = episodes["return"].to_numpy()
            long[long] = [return_lost(returns[:x]) for x in before[long]]
        if limit.only == PENALIZED and not updates.get("objective/kl_coef", np.ones(1)).any():
            long[:] = False  # without a penalty, a large KL is to be expected
        found.append((limit, long))
    return found


# --- The report ---

THEIRS = """CleanRL logs the KL of an update's last minibatch, Stable-Baselines3 that of its last
epoch. Both are larger than the mean over the update, for which the ranges are."""
WHERE = """Ranges are those of healthy runs with the default settings, in MuJoCo or RLHF.
DEBUGGING.md lists the symptoms, and what looks bad but is harmless."""


def between(low: float, high: float) -> str:
    """A range in words."""
    if not math.isfinite(low):
        return f"at most {high:g}" if math.isfinite(high) else ""
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"


def judge(log: Log) -> list[dict[str, Any]]:
    """A row for each metric of a run that has a range: values, range, verdict, and what to do.

    "bad" has the steps after which it is unhealthy. Without a verdict, it is too early for one.
    """
    rows = []
    for limit, bad in unhealthy(log.updates, log.episodes):
        values = log.updates.get(limit.metric, pd.Series(dtype=float))
        if values.count() == 0:
            continue
        low, high = limit.usual
        row = {"metric": limit.metric, "median": values.median(), "band": limit.usual}
        row |= {"now": values.dropna()[-RECENT:].median(), "bad": log.updates["global_step"][bad]}
        if limit.usual == ANY:
            row["band"] = limit.low, limit.high
        row["verdict"], value = "", row["median"]
        if values.count() >= limit.patience:
            # Values begin badly everywhere, and a learning rate that falls to 0 ends all updates.
            usual = any(low <= row[x] <= high for x in ("median", "now"))
            row["verdict"] = "healthy" if usual else "unusual"
        if not limit.only and row["verdict"] and not limit.low <= row["now"] <= limit.high:
            row["verdict"], value = "unusual", row["now"]
        if bad.any():
            first, value = row["bad"].iloc[0], values[bad].median()
            row["verdict"] = f"unhealthy {'since' if bad[-1] else 'at'} {first:,.0f}"
        cause = next(x for x in limit.advice if value <= x.up_to)
        rows.append(row | {"advice": cause if row["verdict"] not in ("", "healthy") else None})
    return rows


def report(log: Log) -> str:
    """All of `judge` as text, and which checks the log does not allow."""
    unit = "updates" if log.episodes.empty else "steps"
    place = f"{log.environment}, " * (log.environment != UNKNOWN)
    lines = [f"{log.path}: {place}{log.steps:,} {unit}", ""]
    lines.append(f"{'metric':<27}{'median':>10}{'now':>10}  {'healthy':<17}verdict")
    for row in (rows := judge(log)):
        numbers = f"{row['metric']:<27}{row['median']:>10.3g}{row['now']:>10.3g}"
        verdict = row["verdict"] or "too early to tell"
        lines.append(f"{numbers}  {between(*row['band']):<17}{verdict}")
        if row["advice"]:
            symptom = row["advice"].symptom
            lines.append(f"    {row['advice'].text}")
            lines += [f"    DEBUGGING.md: {symptom}"] if symptom else []
    for name, values in (("entropy", log.updates.get("losses/entropy")), ("return", log.returns)):
        if values is not None and len(values):
            now = values[-LAST_EPISODES if name == "return" else -RECENT :].median()
            verdict = ""
            if name == "return" and len(values) > 2 * EARLY:
                verdict = "lost: a fifth of the gain is gone" if return_lost(values) else "kept"
            lines.append(f"{name:<27}{values.median():>10.3g}{now:>10.3g}  {'':<17}{verdict}")
    limits = limits_of(log.updates.columns)
    if missing := sorted({x.metric for x in limits} - {row["metric"] for row in rows}):
        lines += ["", f"Not in this log, so not checked: {', '.join(missing)}."]
    lines += ["", WHERE]
    if limits is ENVIRONMENTS and not any(x.startswith("check/") for x in log.updates):
        lines += [THEIRS, "", "To log the other checks, paste this into your script:", ""]
        lines.append(DIAGNOSE.read_text())
    return "\n".join(lines)


def ranges_table() -> str:
    """The ranges in DEBUGGING.md."""
    rows = []
    for limit in ENVIRONMENTS:
        allowed = between(limit.low, limit.high)
        patience = f", for {limit.patience} iterations" * bool(limit.patience)
        rule = f"{allowed}{patience} {limit.only}".strip() if allowed else "–"
        advice = dict.fromkeys(x.text for x in limit.advice)
        row = {"metric": f"`{limit.metric}`", "usually": between(*limit.usual) or "–"}
        rows.append(row | {"unhealthy outside of": rule, "what to do": "<br>".join(advice)})
    return markdown(rows)
