"""Which runs are unhealthy by the rule of `check.py`, broken or not, and what a bug changes.

The rule is applied to curves that have a point for each iteration, so it can be changed without
making any run again.
"""

import math
import textwrap

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from benchmark import check
from benchmark.definitions import Folders, Suite
from benchmark.record import STAGE_METRICS, STEP_METRICS
from benchmark.report import statistics
from benchmark.report.statistics import Estimate, estimate, matrix
from benchmark.report.tables import CHANGE, facts, markdown, missing, number, with_interval
from benchmark.results import Result, by_environment

EARLY = 100_000  # steps within which a bug is to be warned about
SEEN_BY = 2  # seeds that must be warned
DIFFERENT = 0.05  # relative change of a metric, on each seed, that is told
HELD_OUT = "test-"  # begins the names of healthy variants on which no limit was chosen
# Columns of curves in the order in which an iteration makes them: the first part in which the
# first iteration differs from that of a healthy run of the same seed tells what is wrong. Those
# with a slash are of committed curves only: the scripts no longer log them.
PARTS = {
    "acting": ("episodes", "return"),
    "outcomes": ("check_value_bias",),
    "advantages": ("advantages/std", "explained_variance", "check/advantages"),
    "ratio": ("check_first_kl",),
    "update": (
        "grad_norm",
        "clipfrac",
        "approx_kl",
        "losses/value_clipfrac",
        "policy/log_std",
        "check_update",
    ),
}
NAMES = {y: x for x, y in (STEP_METRICS | STAGE_METRICS).items()}  # of columns
SAID = f"warned about by {EARLY // 1000}k steps"  # column of tables


# --- Warnings ---


def points(result: Result) -> pd.DataFrame:
    """The curve of a run; of RLHF that of its PPO run."""
    curve = result.curve
    if "stage" in curve:
        return curve[curve["stage"] == result.record["scored_model"]]
    return curve


def iterations(result: Result) -> pd.DataFrame:
    """The points of a curve at which an update ended."""
    return points(result).dropna(subset=["approx_kl"])


def warnings(result: Result, steps: float = math.inf) -> dict[str, int]:
    """The step, or update, after which each metric is unhealthy for the first time."""
    curve, updates = points(result), iterations(result).rename(columns=NAMES)
    episodes = curve.reindex(columns=["step", "episodes", "return"]).fillna({"episodes": 0})
    episodes = episodes.loc[episodes.index.repeat(episodes["episodes"].astype(int))]
    if "objective/kl_exact" in updates:
        updates["objective/kl_coef"] = float(result.record["settings"]["kl_mode"] != "none")
    found: dict[str, int] = {}
    tables = (x.rename(columns={"step": "global_step"}) for x in (updates, episodes))
    for limit, bad in check.unhealthy(*tables):
        for step in updates["step"][bad & (updates["step"] <= steps)][:1]:
            found[limit.metric] = min(step, found.get(limit.metric, step))
    return found


def warned_seeds(results: list[Result], steps: float = EARLY) -> tuple[int, str]:
    """On how many seeds there is a warning by then, and what of, most seeds and earliest first."""
    found = [warnings(x, steps) for x in results]
    first = {x: [y[x] for y in found if x in y] for own in found for x in own}
    ranked = sorted(first.items(), key=lambda x: (-len(x[1]), np.median(x[1])))
    text = ", ".join(f"`{x}` ({when(np.median(y))})" for x, y in ranked[:3])
    return sum(map(bool, found)), text


def when(step: float) -> str:
    """Thousands of environment steps, or a number of updates."""
    return f"{step / 1000:.0f}k" if step >= 1000 else f"update {step:.0f}"


# --- Healthy runs ---


def is_healthy(suite: Suite, variant: str) -> bool:
    """Whether nothing is broken on purpose."""
    return suite.table == "healthy" or variant.startswith("healthy")


def control(suite: Suite, variant: str) -> str:
    """The healthy variant that has most of the variant's flags, and no other."""
    flags = {x: y.flags for x, y in suite.variants.items() if is_healthy(suite, x)}
    within = [x for x in flags if flags[x] in suite.variants[variant].flags]
    return max(within, key=lambda x: len(flags[x]))


def pair(suite: Suite, variant: str, environment: str, folders: Folders) -> list[list[Result]]:
    """The runs of a variant in an environment, and those of its healthy control."""
    names = variant, control(suite, variant)
    return [by_environment(suite.name, x, folders).get(environment, []) for x in names]


def change(broken: list[Result], healthy: list[Result]) -> Estimate:
    """What a bug changes of the mean score, relative to that of healthy runs."""
    scores = matrix(*(facts(x, "score") for x in (broken, healthy)))
    return estimate(scores[:, None], statistics.relative_effect)


def first_difference(broken: list[Result], healthy: list[Result]) -> str:
    """The first part of the first iteration that differs in any digit, on each seed, and by what.

    A healthy run with the same seed and flags has the same samples in it. Told are the two metrics
    of each part that change most, if by more than `DIFFERENT` and the same way on all seeds.
    """
    columns, begins, texts = [x for names in PARTS.values() for x in names], "nothing", []
    ours, theirs = (
        pd.DataFrame(
            {x.record["seed"]: iterations(x).reindex(columns=columns).iloc[0] for x in results}
        )
        for results in (broken, healthy)
    )
    changes = (ours - theirs).astype(float) / (theirs.astype(float).abs() + 0.05)
    changes = changes.dropna(axis=1, how="all").dropna()  # seeds and metrics of both
    for part, names in PARTS.items():
        own = changes.loc[changes.index.isin(names)]
        begins = part if begins == "nothing" and (own != 0).any().all() else begins
        own = own[(own > DIFFERENT).all(axis=1) | (own < -DIFFERENT).all(axis=1)].mean(axis=1)
        largest = own.sort_values(key=lambda x: -abs(x), kind="stable")[:2]
        texts += [f"`{NAMES.get(x, x)}` {y:+.0%}" for x, y in largest.items()]
    return begins + ": " * bool(texts) + ", ".join(texts)


# --- Tables ---


def cells(suite: Suite, variant: str, environment: str, folders: Folders) -> dict[str, str]:
    """What a bug costs in an environment, and what is said of it in the first 100k steps."""
    broken, healthy = pair(suite, variant, environment, folders)
    if not broken or not healthy:
        return {}
    count, text = warned_seeds(broken)
    row = {f"{environment}: return": number(np.mean(facts(broken, "score"))), "change": ""}
    row[SAID] = f"{count} of {len(broken)}{': ' * bool(text)}{text}"
    row["differs in the first iteration"] = ""
    if variant != (base := control(suite, variant)):
        beside = suite.variants[base].label.removeprefix("healthy").removeprefix(", ")
        row["change"] = with_interval(change(broken, healthy), CHANGE)
        row["change"] += f" beside {beside}" * bool(beside)
        row["differs in the first iteration"] = first_difference(broken, healthy)
    return row


def bugs_table(suite: Suite, folders: Folders) -> str:
    """One table per environment, a row per variant."""
    texts = []
    for environment in suite.environments:
        found = {x: cells(suite, x, environment, folders) for x in suite.variants}
        rows = [{"": suite.variants[x].label or x} | y for x, y in found.items() if y]
        texts += [markdown(rows)] if rows else []
    return "\n".join(texts) + missing(suite, folders)


def counts(suites: list[Suite], folders: Folders) -> str:
    """How many bugs are noticed on two seeds in some environment, and which healthy runs warn."""
    rows = []
    for suite, name in ((x, name) for x in suites for name in x.variants):
        about = {"label": suite.variants[name].label or name, "kept": name.startswith(HELD_OUT)}
        about["healthy"] = is_healthy(suite, name)
        for place, results in by_environment(suite.name, name, folders).items():
            for x in results:
                text = warned_seeds([x], math.inf if about["healthy"] else EARLY)[1]
                run = f"{place}, {about['label']}, seed {x.record['seed']}: {text}"
                rows.append(about | {"place": place, "warned": text != "", "run": run})
    if not rows:
        return ""
    table = pd.DataFrame(rows)
    bugs = table[~table["healthy"]].groupby(["label", "place"], sort=False)["warned"].sum()
    noticed = (bugs >= SEEN_BY).groupby("label", sort=False).any()
    lines = [
        f"**{noticed.sum()} of {len(noticed)} bugs are noticed**: warned about within "
        f"{EARLY // 1000}k steps (RLHF: ever), on {SEEN_BY} seeds or more in some environment. Not "
        f"noticed: {'; '.join(noticed.index[~noticed]) or 'none'}."
    ]
    for kept, own in table[table["healthy"]].groupby("kept"):
        alarms, part = own[own["warned"]], "had no" if kept else "had a"
        ends = binomtest(len(alarms), len(own)).proportion_ci(method="exact")
        lines.append(
            f"**{len(alarms)} of {len(own)} healthy runs** that {part} part in the choice of the "
            f"limits have a warning at any time (95 % interval {ends.low:.0%} to {ends.high:.0%})"
            f"{': ' * bool(len(alarms))}{'; '.join(alarms['run'])}."
        )
    return "\n\n".join(textwrap.fill(x, 118) for x in lines) + "\n"
