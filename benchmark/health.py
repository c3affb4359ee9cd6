"""What the scripts' health tables say of the runs of bugs, and how far these are from healthy ones.

A health table is applied to curves that have a point for each iteration, by the rule of the
scripts' `warn`: it can be changed, and no run has to be made again.
"""

import ast
import functools
import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from benchmark import statistics
from benchmark.bugs import CONTROLS
from benchmark.definitions import Folders, Suite
from benchmark.provenance import ROOT
from benchmark.record import STAGE_METRICS, STEP_METRICS
from benchmark.results import Result, by_environment
from benchmark.tables import estimate, facts, markdown, number, with_interval

EARLY = 100_000  # steps within which a bug is to be warned about
BEGIN = 20_000  # steps after which metrics are compared: the first updates are unlike all others
SEEN_BY = 2  # seeds that must be warned


class Row(NamedTuple):
    """A line of a health table."""

    metric: str
    low: float
    high: float
    patience: int
    sentence: str


@functools.cache
def health_table(script: str) -> list[Row]:
    """HEALTH of a script, which is not imported for it."""
    for node in ast.parse((ROOT / script).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HEALTH":
            rows = eval(compile(ast.Expression(node.value), script, "eval"), {"math": math})
            return [Row(*row) for row in rows]
    return []


def iterations(result: Result) -> pd.DataFrame:
    """The points of a curve at which an update ended, and a step; of RLHF those of its PPO run."""
    curve = result.curve
    if "stage" in curve:
        curve = curve[curve["stage"] == result.record["judged"]]
    return curve.dropna(subset=["approx_kl"])


def warnings(result: Result) -> dict[str, int]:
    """When each metric was first warned about: the step at which its line's patience ended."""
    columns, found = {**STEP_METRICS, **STAGE_METRICS}, {}
    curve = iterations(result)
    for metric, low, high, patience, _ in health_table(result.record["script"]):
        if columns.get(metric) in curve:
            values = curve[columns[metric]]
            bad = (values < low) | (values > high)  # not where it is missing
            late = bad.rolling(patience).sum().eq(patience)
            if late.any():
                step = int(curve["step"][late].iloc[0])
                found[metric] = min(step, found.get(metric, step))
    return dict(sorted(found.items(), key=lambda x: x[1]))


def control(suite: Suite, variant: str) -> str:
    """The healthy variant with the same flags, or the one without any."""
    flags = suite.variants[variant].flags
    same = [x for x in suite.variants if x in CONTROLS and suite.variants[x].flags == flags]
    return (same or ["healthy"])[0]


def seen(results: list[Result], steps: float = EARLY) -> tuple[int, str]:
    """On how many seeds there is a warning by then, and what of in how many, earliest first."""
    early = [{x: y for x, y in warnings(z).items() if y <= steps} for z in results]
    first: dict[str, list[int]] = {}
    for own in early:
        for metric, step in own.items():
            first.setdefault(metric.rpartition("/")[2], []).append(step)
    ranked = sorted(first.items(), key=lambda x: (-len(x[1]), np.median(x[1])))
    said = ", ".join(f"{x} ({np.median(y) / 1000:.0f}k)" for x, y in ranked[:3])
    return sum(map(bool, early)), said


# --- Tables ---


def cells(suite: Suite, variant: str, environment: str, folders: Folders) -> dict[str, str]:
    """What a bug costs in an environment, and what is said of it in the first 100k steps."""
    ours = by_environment(suite.name, variant, folders).get(environment, [])
    usual = control(suite, variant)
    theirs = by_environment(suite.name, usual, folders).get(environment, [])
    scores = [facts(x, "score") for x in (ours, theirs)]
    if not all(map(len, scores)):
        return {}
    change = estimate(scores, statistics.relative_effect)
    count, said = seen(ours)
    return {
        f"{environment}: return": number(np.mean(scores[0])),
        "change": "" if variant == usual else with_interval(change, "{:+z.0%}".format),
        "warned by 100k steps": f"{count} of {len(ours)}: {said}" if count else f"0 of {len(ours)}",
    }


def bugs_table(suite: Suite, folders: Folders) -> str:
    """One table per environment, a row per variant."""
    texts = []
    for environment in suite.environments:
        rows = []
        for name, variant in suite.variants.items():
            if found := cells(suite, name, environment, folders):
                rows.append({"": variant.label or name} | found)
        texts += [markdown(rows)] if rows else []
    return "\n".join(texts)


def goal(suites: list[Suite], folders: Folders) -> str:
    """How many bugs are warned about on two seeds in some environment, and which healthy runs."""
    noticed: dict[str, bool] = {}
    healthy: list[str] = []
    for suite, name in ((x, name) for x in suites for name in x.variants):
        label = suite.variants[name].label or name
        for environment, results in by_environment(suite.name, name, folders).items():
            if is_healthy(suite, name):
                said = [(x.record["seed"], seen([x], math.inf)[1]) for x in results]
                healthy += [x and f"{environment}, {label}, seed {seed}: {x}" for seed, x in said]
            else:
                noticed[label] = noticed.get(label, False) or seen(results)[0] >= SEEN_BY
    alarms = [x for x in healthy if x]
    return (
        f"{sum(noticed.values())} of {len(noticed)} bugs are warned about within {EARLY // 1000}k "
        f"steps (RLHF: ever) on {SEEN_BY} seeds or more in some environment. Not warned about: "
        f"{'; '.join(x for x, y in noticed.items() if not y) or 'none'}.\n\n"
        f"{len(alarms)} of {len(healthy)} healthy runs have a warning at any time"
        f"{': ' * bool(alarms)}{'; '.join(alarms)}.\n"
    )


def is_healthy(suite: Suite, variant: str) -> bool:
    """Whether nothing is broken on purpose."""
    return suite.name == "bugs_healthy" or variant in CONTROLS or variant.startswith("healthy")


# --- Fingerprints ---

# Columns of curves, and whether they are compared by their logarithms.
FINGERPRINT = {
    "approx_kl": True,
    "clipfrac": False,
    "grad_norm": True,
    "value_clipfrac": False,
    "explained_variance": False,
    "log_std": False,
    "check_first_kl": False,
    "check_values": False,
    "check_value_bias": False,
    "check_advantages": False,
    "check_update": False,
}


def typical(result: Result) -> pd.Series:
    """Of each metric the median from 20k to 100k steps."""
    curve = iterations(result)
    curve = curve[curve["step"].between(BEGIN, EARLY)].reindex(columns=list(FINGERPRINT))
    middle = curve.median()
    for name in (x for x, logarithmic in FINGERPRINT.items() if logarithmic):
        middle[name] = np.log10(max(middle[name], 1e-6))
    return middle


def distances(suite: Suite, environment: str, folders: Folders) -> pd.DataFrame:
    """How far the metrics of each bug are outside of the band of healthy runs, in its widths.

    A row per variant and a column per metric; 0 within the band, which is that from the lowest to
    the highest of all seeds of all healthy variants.
    """
    found = {
        name: pd.DataFrame([typical(x) for x in results])
        for name in suite.variants
        if (results := by_environment(suite.name, name, folders).get(environment))
    }
    if not any(is_healthy(suite, name) for name in found):
        return pd.DataFrame()
    healthy = pd.concat([x for name, x in found.items() if is_healthy(suite, name)])
    low, high = healthy.min(), healthy.max()
    width = (high - low).clip(lower=0.02)
    broken = [name for name in found if not is_healthy(suite, name)]
    means = pd.DataFrame([found[name].mean() for name in broken], broken, list(FINGERPRINT))
    return ((means - high).clip(lower=0) - (low - means).clip(lower=0)) / width
