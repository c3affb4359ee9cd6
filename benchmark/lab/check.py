"""Where metrics are in healthy runs, and the rule by which a run is judged.

Nothing else has these numbers: `python -m benchmark check`, the tables of bugs, the figure of a
healthy run and the table of ranges in DEBUGGING.md all read them here.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmark.lab import logs
from benchmark.lab.logs import UNKNOWN, Log
from benchmark.lab.provenance import ROOT
from benchmark.lab.record import LAST_EPISODES
from benchmark.lab.tables import markdown, number

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
    """A metric is low or high outside of `usual`, where healthy runs of a Gaussian policy are.

    It is unhealthy once it has been outside of `low` to `high` for `patience` iterations (0: one),
    and if `only` names a condition, only then. Neither is judged before.
    """

    metric: str
    usual: tuple[float, float]
    low: float
    high: float
    patience: int
    only: str
    advice: tuple[Advice, ...]


SMALL = "Updates are small. If learning is slow, too, try a larger --learning-rate."
LARGE = "Updates are large. If the return falls, lower --learning-rate or set --early-stop-kl."
VALUES = (
    "Normal early in training, or if returns hardly vary. If it stays low, check the value loss."
)
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
        Advice(0.1, SMALL, ""), Advice(INF, LARGE, ""))),
    Limit("losses/explained_variance", (0.5, 1), *ANY, 10, "", (Advice(INF, VALUES, ""),)),
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
# Where healthy runs of other policies are, as in CartPole and Atari games. These ranges contain the
# ones above, so they are also for logs that do not say what the policy is.
OTHERS = {"losses/approx_kl": (0.0005, 0.025), "losses/clipfrac": (0.005, 0.3)}
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


def count_updates(steps: np.ndarray) -> bool:
    """Whether the steps of a log are numbers of updates, as in RLHF."""
    return len(steps) > 0 and steps[0] in (0, 1) and bool((np.diff(steps) == 1).all())


def patience(limit: Limit, steps: np.ndarray) -> int:
    """Iterations that a limit waits for in a log with these steps: more if they are short."""
    sizes = np.diff(steps, prepend=0)[steps > 0]
    part = 1 if count_updates(steps) else min([1, *sizes / STEPS])
    return max(math.ceil(limit.patience / part), 1)


def unhealthy(updates: pd.DataFrame, episodes: pd.DataFrame) -> list[tuple[Limit, np.ndarray]]:
    """The limits for a run, each with the updates after which its metric is unhealthy, (U,).

    Args:
        updates: a row per iteration, with "global_step" and metrics; missing values are healthy.
        episodes: "global_step" and "return" of each; empty in RLHF.
    """
    found, steps = [], updates["global_step"].to_numpy()
    for limit in limits_of(updates.columns):
        values = updates.get(limit.metric, pd.Series(np.nan, updates.index)).to_numpy(float)
        bad = (values < limit.low) | (values > limit.high)
        count = patience(limit, steps)
        long = pd.Series(bad, dtype=float).rolling(count).sum().to_numpy() == count
        if limit.only == LOST:
            before = np.searchsorted(episodes["global_step"], steps, side="right")
            returns = episodes["return"].to_numpy()
            long[long] = [return_lost(returns[:x]) for x in before[long]]
        if limit.only == PENALIZED and not updates.get("objective/kl_coef", np.ones(1)).any():
            long[:] = False  # without a penalty, a large KL is to be expected
        found.append((limit, long))
    return found


# --- The verdicts ---

CONSTANT = "says nothing: returns hardly vary"
FINE = ("", "healthy", CONSTANT)  # no advice is needed


def judge(log: Log) -> list[dict[str, Any]]:
    """A row for each metric of a run that has a range: values, range, verdict, and what to do.

    "value" is what the verdict is about, "bad" has the steps after which it is unhealthy. Without a
    verdict, it is too early for one. A value that is only low or high has no symptom yet.
    """
    rows = []
    for limit, bad in unhealthy(log.updates, log.episodes):
        values = log.updates.get(limit.metric, pd.Series(dtype=float))
        if values.count() == 0:
            continue
        low, high = limit.usual if log.gaussian else OTHERS.get(limit.metric, limit.usual)
        row = {"limit": limit, "metric": limit.metric, "median": values.median()}
        row |= {"now": values.dropna()[-RECENT:].median(), "bad": log.updates["global_step"][bad]}
        row["band"] = (limit.low, limit.high) if limit.usual == ANY else (low, high)
        # Values begin badly everywhere, and a learning rate that falls to 0 ends all updates.
        usual = [x for x in (row["median"], row["now"]) if low <= x <= high]
        value = usual[0] if usual else row["median"]
        if limit.only != PENALIZED and not limit.low <= row["now"] <= limit.high:
            low, high, value = limit.low, limit.high, row["now"]
        verdict = "low" if value < low else "high" if value > high else "healthy"
        if (limit.metric, verdict) == ("losses/explained_variance", "low") and hardly_vary(log):
            verdict = CONSTANT
        if values.count() < patience(limit, log.updates["global_step"].to_numpy()):
            verdict = ""
        if bad.any():
            first, value = row["bad"].iloc[0], values[bad].median()
            verdict = f"unhealthy {'since' if bad[-1] else 'at'} {first:,.0f}"
        cause = next(x for x in limit.advice if value <= x.up_to)
        advice = [f"    {cause.text}"]
        if cause.symptom and (bad.any() or (limit.low, limit.high) == ANY):
            advice.append(f"    DEBUGGING.md: {cause.symptom}")
        row |= {"value": value, "verdict": verdict, "advice": [] if verdict in FINE else advice}
        rows.append(row)
    return rows


def hardly_vary(log: Log) -> bool:
    """Whether the latest returns are almost the same, so that there is nothing to explain."""
    last = log.returns[-LAST_EPISODES:]
    return not log.averaged and len(last) >= EARLY and last.std() <= 0.1 * abs(last.mean())


# --- The report ---

THEIRS = """CleanRL logs the KL of an update's last minibatch, Stable-Baselines3 that of its last
epoch. Both are larger than the mean over the update, to which the ranges apply."""
WHERE = """Ranges are those of healthy runs with the default settings.
DEBUGGING.md lists the symptoms, and what looks bad but is harmless."""


def between(low: float, high: float) -> str:
    """A range in words."""
    if not math.isfinite(low):
        return f"at most {high:g}" if math.isfinite(high) else ""
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"


def alike(runs: list[Log]) -> list[list[Log]]:
    """Runs that one table can show: in the same environment, with the same kind of metrics."""
    found: dict[Any, list[Log]] = {}
    for log in runs:
        found.setdefault((log.environment, limits_of(log.updates.columns)), []).append(log)
    return [*found.values()]


def report(runs: list[Log], picture: str = "") -> str:
    """The verdicts on runs that are alike as text, what their logs lack, and what to do next.

    Each run has a column; a single one has two, its median and that of its latest values.

    Args:
        picture: where the curves are.
    """
    judged, several = [judge(x) for x in runs], len(runs) > 1
    names, limits = names_of(runs), limits_of(runs[0].updates.columns)
    lines = [f"{f'{name}: ' * several}{described(x)}" for name, x in zip(names, runs)]
    lines += ["", line("metric", names if several else ["median", "now"], "healthy", "verdict")]
    lacking = sorted({x.metric for x in limits} - {x["metric"] for own in judged for x in own})
    for limit in (x for x in limits if x.metric not in lacking):
        rows = [next((x for x in own if x["limit"] is limit), {}) for own in judged]
        known = [x for x in rows if x]
        cells = [x.get("value") for x in rows] if several else [known[0]["median"], known[0]["now"]]
        verdicts = [x.get("verdict", "not logged") or "too early to tell" for x in rows]
        text = together(names, verdicts)
        lines.append(line(limit.metric, cells, between(*known[0]["band"]), text))
        lines += dict.fromkeys(text for x in known for text in x["advice"])
    lines += [*last_lines(runs, names), ""]
    if lacking:
        lines += [f"Not logged, so not checked: {', '.join(lacking)}.", ""]
    lines.append(WHERE)
    if limits is ENVIRONMENTS and not any(x.startswith("check/") for x in runs[0].updates):
        lines += [THEIRS, f"To log the other checks, paste the functions in {DIAGNOSE}."]
    lines += [f"Curves: {picture}"] * bool(picture)
    return "\n".join([*lines, "", what_next(runs[0], judged)])


def names_of(runs: list[Log]) -> list[str]:
    """Names of columns: the seeds, if all are known and no two are the same."""
    seeds = [x.seed for x in runs]
    known = all(seeds) and len({*seeds}) == len(seeds)
    return [f"seed {x}" if known else f"run {i}" for i, x in enumerate(seeds, start=1)]


def described(log: Log) -> str:
    """Which run this is, and how long."""
    place = f"{log.environment}, " * (log.environment != UNKNOWN)
    unit = "updates" if count_updates(log.updates["global_step"].to_numpy()) else "steps"
    return f"{log.path}: {place}{log.steps:,} {unit}{'; ' * bool(log.note)}{log.note}"


def line(name: str, cells: Iterable[str | float | None], band: str, verdict: str) -> str:
    """A line of the table."""
    texts = (x if isinstance(x, str) else "–" if x is None else f"{x:.3g}" for x in cells)
    return f"{name:<27}{''.join(f'{x:>10}' for x in texts)}  {band:<17}{verdict}".rstrip()


def together(names: list[str], verdicts: list[str]) -> str:
    """The verdict on all runs, or each one with the runs that it is on."""
    if len({*verdicts}) == 1:
        return verdicts[0]
    own = {x: [name for name, y in zip(names, verdicts) if y == x] for x in verdicts}
    return "; ".join(f"{x} ({', '.join(y)})" for x, y in own.items())


def last_lines(runs: list[Log], names: list[str]) -> list[str]:
    """The entropy, and the return: its latest value is the score that `compare` shows, too."""
    lines, several = [], len(runs) > 1
    entropies = [x.updates.get("losses/entropy", pd.Series(dtype=float)).dropna() for x in runs]
    if all(map(len, entropies)):
        now = [x[-RECENT:].median() for x in entropies]
        lines.append(line("entropy", now if several else [entropies[0].median(), *now], "", ""))
    if all(len(x.episodes) for x in runs):
        scores, texts = [number(x.score) for x in runs], []
        for log in runs:
            gain = "lost a fifth of" if return_lost(log.returns) else "kept"
            texts.append(log.scored[1] + f"; has {gain} its gain" * (len(log.returns) > 2 * EARLY))
        cells = scores if several else [number(runs[0].returns.median()), *scores]
        lines.append(line("return", cells, "", together(names, texts)))
    return lines


def what_next(log: Log, judged: list[list[dict[str, Any]]]) -> str:
    """The last line: what to do after reading a report."""
    verdicts = {x["verdict"] for rows in judged for x in rows}
    if verdicts == {""}:
        return "It is too early to tell. Run the same command again later."
    script = script_of(log)
    compare = f"run `python -m benchmark diff {script}`" if script else ""
    if any("DEBUGGING" in text for rows in judged for x in rows for text in x["advice"]):
        return f"Look up the symptom in DEBUGGING.md{', or ' * bool(script)}{compare}."
    found = "Nothing found" if verdicts <= {*FINE} else "Nothing is unhealthy"
    found = found if verdicts else "No metric could be checked"
    otherwise = "DEBUGGING.md lists bugs that no metric shows"
    return f"{found}. That proves little: {compare or otherwise}."


def script_of(log: Log) -> Path | None:
    """A changed script that made a run, if it is at hand: as `seeds` noted it, or as the run's
    folder is named after it, next to runs/ or in the current folder."""
    noted = logs.note_on(log.path).get("script")
    folders = Path(), log.path.absolute().parent.parent
    named = [x / f"{part}.py" for x in folders for part in log.path.name.split("__") if part]
    found = next((x for x in [*([Path(noted)] if noted else []), *named] if x.is_file()), None)
    original = found and ROOT / found.name
    same = original and original.is_file() and original.read_text() == found.read_text()
    return None if same else found


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
