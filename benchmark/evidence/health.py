"""Which runs are unhealthy by the rule of `check.py`, broken or not, and what a bug changes.

The rule is applied to curves that have a point for each iteration, so it can be changed without
making any run again.
"""

import dataclasses
import functools

import pandas as pd

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites import BY_TABLE
from benchmark.evidence.tables import facts
from benchmark.lab import check, statistics
from benchmark.lab.definitions import Folders
from benchmark.lab.record import STAGE_METRICS, STEP_METRICS
from benchmark.lab.results import Result, by_environment
from benchmark.lab.statistics import Estimate, estimate

EARLY = 100_000  # steps within which a bug is to be warned about
SEEN_BY = 2  # seeds that must be warned
NAMES = {y: x for x, y in (STEP_METRICS | STAGE_METRICS).items()}  # of columns


# --- Warnings ---


def points(result: Result) -> pd.DataFrame:
    """The curve of a run; of RLHF that of its PPO run."""
    curve = result.curve
    return curve[curve["stage"] == result.record["scored_model"]] if "stage" in curve else curve


def warnings(result: Result, steps: float) -> dict[str, int]:
    """The step, or update, at which each metric is first unhealthy, if that is by `steps`."""
    curve = points(result).rename(columns=NAMES | {"step": "global_step"})
    updates = curve.dropna(subset="losses/approx_kl")
    if "objective/kl_exact" in updates:
        updates["objective/kl_coef"] = float(result.record["settings"]["kl_mode"] != "none")
    episodes = curve.loc[curve.index.repeat(curve.get("episodes", 0))]
    found: dict[str, int] = {}
    for rule, bad in check.unhealthy(updates, episodes):
        for step in updates["global_step"][bad & (updates["global_step"] <= steps)][:1]:
            found[rule.metric] = min(step, found.get(rule.metric, step))
    return found


def warned_seeds(results: list[Result]) -> tuple[int, str]:
    """On how many seeds there is an early warning, and what of, most seeds and earliest first."""
    first = pd.DataFrame([warnings(x, EARLY) for x in results])  # a column per metric
    ranked = sorted(first, key=lambda x: (-first[x].count(), first[x].median()))
    text = ", ".join(f"`{x}` ({when(first[x].median())})" for x in ranked[:3])
    return int(first.notna().any(axis=1).sum()), text


def when(step: float) -> str:
    """Thousands of environment steps, or a number of updates."""
    return f"{step / 1000:.0f}k" if step >= 1000 else f"update {step:.0f}"


# --- Bugs ---


def is_healthy(variant: str) -> bool:
    """Whether nothing is broken on purpose."""
    return variant.startswith("healthy")


def bugs_of(suite: Suite) -> dict[str, Variant]:
    """The variants in which something is broken on purpose."""
    return {x: y for x, y in suite.variants.items() if not is_healthy(x)}


def healthy_runs(folders: Folders) -> list[Result]:
    """The healthy runs next to the bugs."""
    suites = [(x, y) for x in BY_TABLE["bugs"] for y in x.variants if is_healthy(y)]
    found = (by_environment(suite.name, name, folders) for suite, name in suites)
    return [run for places in found for own in places.values() for run in own]


def control(suite: Suite, variant: str) -> str:
    """The healthy variant that has most of the variant's flags and changes, and no other."""
    bug, changes = suite.variants[variant], {}
    for name, healthy in suite.variants.items():
        own = {*healthy.replaced}
        if is_healthy(name) and healthy.flags in bug.flags and own <= {*bug.replaced}:
            changes[name] = len(own), len(healthy.flags)
    return max(changes, key=changes.__getitem__)


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
