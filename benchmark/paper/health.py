"""Which runs are unhealthy by the rule of `check.py`, broken or not, and what a bug changes.

The rule is applied to curves that have a point for each iteration, so it can be changed without
making any run again.
"""

import dataclasses
import functools
import math
import textwrap

import numpy as np
import pandas as pd
import scipy  # loads its modules when they are used

from benchmark.lab import check, statistics
from benchmark.lab.definitions import Folders, Suite, Variant
from benchmark.lab.record import STAGE_METRICS, STEP_METRICS
from benchmark.lab.results import Result, by_environment
from benchmark.lab.statistics import Estimate, estimate
from benchmark.paper.suites import BY_TABLE
from benchmark.paper.tables import facts

EARLY = 100_000  # steps within which a bug is to be warned about
SEEN_BY = 2  # seeds that must be warned
HELD_OUT = "test-"  # begins the names of healthy variants on which no limit was chosen
NAMES = {y: x for x, y in (STEP_METRICS | STAGE_METRICS).items()}  # of columns


# --- Warnings ---


def points(result: Result) -> pd.DataFrame:
    """The curve of a run; of RLHF that of its PPO run."""
    curve = result.curve
    return curve[curve["stage"] == result.record["scored_model"]] if "stage" in curve else curve


def warnings(result: Result, steps: float = math.inf) -> dict[str, int]:
    """The step, or update, after which each metric is unhealthy for the first time."""
    curve = points(result).rename(columns=NAMES | {"step": "global_step"})
    updates = curve.dropna(subset="losses/approx_kl")
    if "objective/kl_exact" in updates:
        updates["objective/kl_coef"] = float(result.record["settings"]["kl_mode"] != "none")
    episodes = curve.loc[curve.index.repeat(curve.get("episodes", 0))]
    found: dict[str, int] = {}
    for limit, bad in check.unhealthy(updates, episodes):
        for step in updates["global_step"][bad & (updates["global_step"] <= steps)][:1]:
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


# --- Bugs ---


def is_healthy(suite: Suite, variant: str) -> bool:
    """Whether nothing is broken on purpose."""
    return suite.table == "healthy" or variant.startswith("healthy")


def bugs_of(suite: Suite) -> dict[str, Variant]:
    """The variants in which something is broken on purpose."""
    return {x: y for x, y in suite.variants.items() if not is_healthy(suite, x)}


def control(suite: Suite, variant: str) -> str:
    """The healthy variant that has most of the variant's flags, and no other."""
    flags = {x: y.flags for x, y in suite.variants.items() if is_healthy(suite, x)}
    within = [x for x in flags if flags[x] in suite.variants[variant].flags]
    return max(within, key=lambda x: len(flags[x]))


@dataclasses.dataclass(frozen=True)
class Trial:
    """A bug in an environment: its runs, and those of its healthy control."""

    suite: Suite
    variant: str
    control: str  # the healthy variant
    environment: str
    broken: list[Result]
    healthy: list[Result]

    @property
    def bug(self) -> Variant:
        return self.suite.variants[self.variant]

    @property
    def flags(self) -> str:
        """Those that healthy runs do not have."""
        usual = self.suite.variants[self.control].flags.split()
        return " ".join(x for x in self.bug.flags.split() if x not in usual)

    @property
    def link(self) -> str:
        """What the explorer of runs shows by it: healthy curves and broken ones."""
        healthy, broken = map([*self.suite.variants].index, (self.control, self.variant))
        return f"#suite={self.suite.name}&lines={healthy},{broken}"

    @functools.cached_property
    def change(self) -> Estimate:
        """What the bug changes of the mean score, relative to that of healthy runs."""
        scores = [facts(x, "score") for x in (self.broken, self.healthy)]
        return estimate(scores, statistics.relative_effect)

    @functools.cached_property
    def warned(self) -> tuple[int, str]:
        """On how many seeds there is an early warning, and what of."""
        return warned_seeds(self.broken)

    @property
    def noticed(self) -> bool:
        return self.warned[0] >= SEEN_BY


@functools.cache
def trials(folders: Folders) -> dict[str, list[Trial]]:
    """The bugs of training by name, in every suite and environment in which they were run."""
    found: dict[str, list[Trial]] = {}
    for suite, variant in ((x, y) for x in BY_TABLE["bugs"] for y in bugs_of(x)):
        names = variant, control(suite, variant)
        broken, healthy = (by_environment(suite.name, x, folders) for x in names)
        for place in (x for x in suite.environments if x in broken and x in healthy):
            trial = Trial(suite, *names, place, broken[place], healthy[place])
            found.setdefault(trial.bug.label, []).append(trial)
    return found


def false_alarms(folders: Folders) -> str:
    """How many healthy runs are warned about.

    Nothing until there are healthy runs of both kinds.
    """
    lines = []
    suites = BY_TABLE["bugs"] + BY_TABLE["healthy"]
    names = [(x, y) for x in suites for y in x.variants if is_healthy(x, y)]
    for kept in (False, True):
        runs = [
            (f"{place}, {suite.variants[name].label or name}, seed {x.record['seed']}", x)
            for suite, name in names
            if name.startswith(HELD_OUT) == kept
            for place, results in by_environment(suite.name, name, folders).items()
            for x in results
        ]
        if not runs:
            return ""
        alarms = [f"{x}: {text}" for x, y in runs if (text := warned_seeds([y], math.inf)[1])]
        ends = scipy.stats.binomtest(len(alarms), len(runs)).proportion_ci(method="exact")
        lines.append(
            f"**{len(alarms)} of {len(runs)} healthy runs** that had {'no' if kept else 'a'} part "
            f"in the choice of the limits have a warning at any time (95 % interval {ends.low:.0%} "
            f"to {ends.high:.0%}){': ' * bool(alarms)}{'; '.join(alarms)}."
        )
    return "\n\n".join(textwrap.fill(x, 118) for x in lines) + "\n"
