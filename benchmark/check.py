"""Where metrics are in healthy runs, and the rule by which a run is judged.

Nothing else has these numbers: `python -m benchmark check`, the tables of bugs, the figure of a
healthy run and the table of ranges in DEBUGGING.md all read them here.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

INF, ANY = math.inf, (-math.inf, math.inf)
STEPS = 2000  # a patience counts iterations of this size; shorter ones count less
LOST, PENALIZED = "while return is lost", "with a KL penalty"
RECENT = 10  # updates whose median is shown as the value of now


class Advice(NamedTuple):
    """What to do about values up to `up_to`, and the symptom in DEBUGGING.md to look up."""

    up_to: float
    text: str
    symptom: str


class Limit(NamedTuple):
    """A metric is unusual outside of `usual`, where healthy MuJoCo runs are.

    It is unhealthy once it has been outside of `low` to `high` for `patience` iterations (0: one),
    and if `only` names a condition, only then.
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
WORDS = "Good words did not become more likely: check rewards, masks and signs."
RATIO = "KL and clip fraction almost 0, yet the policy moves, gradient norm high"
JUMP = "KL and clip fraction jump from the first update"
WORSE = "return falls below that of random actions, `check/update` negative"
# fmt: off
ENVIRONMENTS = (
    Limit("losses/approx_kl", (0.005, 0.025), 1e-12, 0.05, 10, LOST, (
        Advice(1e-12, NONE, RATIO), Advice(0.01, SMALL, ""), Advice(INF, LARGE, JUMP))),
    Limit("losses/clipfrac", (0.07, 0.3), *ANY, 0, "", (
        Advice(0.1, SMALL, RATIO), Advice(INF, LARGE, JUMP))),
    Limit("losses/explained_variance", (0.5, 1), *ANY, 0, "", (
        Advice(INF, "Values do not learn: check shapes, and scale the rewards.",
               "explained variance near 0, gradient norm low"),)),
    Limit("check/value_bias", ANY, -INF, 0.6, 20, "", (
        Advice(INF, "Values exceed returns: check V at the ends of episodes.",
               "`check/value_bias` far above 0, explained variance near 1, return stays low"),)),
    Limit("check/update", ANY, 0.02, 1, 10, LOST, (
        Advice(-0.02, SIGNS, WORSE), Advice(INF, SIGNS, "`check/update` near 0, KL normal"))),
    Limit("check/first_kl", (-1e-5, 1e-5), *ANY, 0, "", (
        Advice(INF, "The batch is not what the policy saw: check observations and actions.",
               "`check/first_kl` above 0"),)),
    Limit("check/acting", ANY, -1, 1e-5, 0, "", (
        Advice(INF, "What acts is not what learns: make the two policies one.",
               "the entropy shrinks twice as fast"),)),
)
KL_EXACT = (
    Limit("objective/kl_exact", ANY, 1e-3, INF, 5, "", (
        Advice(INF, "It stays 0: is the reference model being trained too?",
               "RLHF: exact KL 0"),)),
    Limit("objective/kl_exact", ANY, 0, 30, 1, PENALIZED, (
        Advice(INF, "Raise --kl-coef or lower --target-kl; from the start: mask the padding.",
               "RLHF: KL grows without bound, texts repeat themselves"),)),
)
RLHF = (Limit("check/update", ANY, 0.06, 1, 10, "", (
    Advice(INF, WORDS, "RLHF: proxy stays, `check/update` below 0.06, KL below its target"),)),
    *KL_EXACT)
GRPO = (Limit("check/update", ANY, -0.02, 1, 10, "", (Advice(INF, WORDS, WORSE),)), *KL_EXACT)
PAIRS = (Advice(INF, "Chosen answers are not preferred: check which log-probability is which.", ""),)
DPO = (Limit("rewards/accuracy", (0.5, 1), *ANY, 0, "", PAIRS),
       Limit("rewards/margin", (0, INF), *ANY, 0, "", PAIRS))
# fmt: on


# --- The rule ---


def return_lost(returns: np.ndarray) -> bool:
    """Whether the latest twentieth of the episodes, at least 20, gave back a fifth of the gain.

    The gain is from the first so many episodes to the best so many in a row.
    """
    count = max(20, len(returns) // 20)
    sums = np.cumsum([0.0, *returns])
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


def between(low: float, high: float) -> str:
    """A range in words."""
    if not math.isfinite(low):
        return f"at most {high:g}" if math.isfinite(high) else "any"
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
