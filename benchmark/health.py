"""What the scripts' health tables say of the runs of bugs, and how far these are from healthy ones.

The scripts' own rule is applied to curves that have a point for each iteration: it can be changed,
and no run has to be made again.
"""

import contextlib
import importlib
import io
import math
import re
import textwrap
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd

from benchmark import statistics
from benchmark.bugs import ACTING
from benchmark.definitions import Folders, Suite
from benchmark.record import STAGE_METRICS, STEP_METRICS
from benchmark.results import Result, by_environment
from benchmark.statistics import estimate, matrix
from benchmark.tables import facts, markdown, missing, number, plus_minus, with_interval

EARLY = 100_000  # steps within which a bug is to be warned about
BEGIN = 20_000  # steps after which metrics are compared: the first updates are unlike all others
SEEN_BY = 2  # seeds that must be warned
DIFFERENT = 0.05  # relative change of a metric, on each seed, that is told
# Columns of curves in the order in which an iteration makes them: the first stage in which the
# first iteration differs from that of a healthy run of the same seed tells which part is wrong.
STAGES = {
    "acting": ("episodes", "return"),
    "outcomes": ("check_value_bias",),
    "advantages": ("advantages_std", "explained_variance", "check_advantages"),
    "ratio": ("check_first_kl",),
    "update": ("grad_norm", "clipfrac", "approx_kl", "value_clipfrac", "log_std", "check_update"),
}
COLUMNS = STEP_METRICS | STAGE_METRICS
# What the committed runs of bugs have too: the third edition of the scripts logged it.
OLDER = {
    "policy/log_std": "log_std",
    "check/advantages": "check_advantages",
    "losses/value_clipfrac": "value_clipfrac",
    "advantages/std": "advantages_std",
}
NAMES = {column: metric for metric, column in (COLUMNS | OLDER).items()}
SAID = f"warned about by {EARLY // 1000}k steps"  # column of tables


def module_of(script: str) -> ModuleType:
    """A script, imported only where its rule is needed: torch takes two seconds."""
    return importlib.import_module(script.removesuffix(".py"))


def iterations(result: Result) -> pd.DataFrame:
    """The points of a curve at which an update ended, and a step; of RLHF those of its PPO run."""
    curve = result.curve
    if "stage" in curve:
        curve = curve[curve["stage"] == result.record["judged"]]
    return curve.dropna(subset=["approx_kl"])


def warnings(result: Result, steps: float = math.inf) -> dict[str, int]:
    """When each metric was first warned about, in so many steps: when the script says it.

    The script is given the metrics of `HEALTH` iteration by iteration, as in training. Those that
    the curve lacks are healthy.
    """
    script, curve, lows = module_of(result.record["script"]), iterations(result), {}
    curve = curve[curve["step"] <= steps]
    for metric, low, *_ in script.HEALTH:
        lows[metric] = max(low, lows.get(metric, low))  # a metric may have two rows
    known = {x: COLUMNS[x] for x in lows if COLUMNS.get(x) in curve}
    rows = curve[["step", *known.values()]].set_axis(["global_step", *known], axis=1).fillna(lows)
    writer, history, found = SimpleNamespace(add_scalar=lambda *_: None), [], {}
    for row in rows.to_dict("records"):
        history.append(lows | row)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if hasattr(script, "warn_of"):  # RLHF, by updates
                script.warn_of("run", result.record["settings"]["kl_mode"], history)
            else:
                script.log(writer, history, [], None)
        for metric in re.findall(r"(\S+) is ", said.getvalue()):
            if metric in lows:
                found.setdefault(metric, int(row["global_step"]))
    return found


def control(suite: Suite, variant: str) -> str:
    """The healthy variant that has most of the variant's flags, and no other."""
    flags = {x: y.flags for x, y in suite.variants.items() if is_healthy(suite, x)}
    within = [x for x in flags if flags[x] in suite.variants[variant].flags]
    return max(within, key=lambda x: len(flags[x]))


def when(step: float) -> str:
    """Thousands of environment steps, or a number of updates."""
    return f"{step / 1000:.0f}k" if step >= 1000 else f"update {step:.0f}"


def seen(results: list[Result], steps: float = EARLY) -> tuple[int, str]:
    """On how many seeds there is a warning by then, and what of in how many, earliest first."""
    early = [warnings(x, steps) for x in results]
    first: dict[str, list[int]] = {}
    for own in early:
        for metric, step in own.items():
            first.setdefault(metric, []).append(step)
    ranked = sorted(first.items(), key=lambda x: (-len(x[1]), np.median(x[1])))
    said = ", ".join(f"`{x}` ({when(np.median(y))})" for x, y in ranked[:3])
    return sum(map(bool, early)), said


def at_first(ours: list[Result], theirs: list[Result]) -> str:
    """The first stage of the first iteration that differs in any digit, on each seed, and by what.

    A healthy run with the same seed and flags has the same samples in it. Told are the two metrics
    of each stage that change most, if by more than `DIFFERENT` and the same way on all seeds.
    """
    first = [{x.record["seed"]: iterations(x).iloc[0] for x in own} for own in (ours, theirs)]
    pairs = [(x, first[1][seed]) for seed, x in first[0].items() if seed in first[1]]
    begins, texts = "nothing", []
    for stage, names in STAGES.items():
        known = [x for x in names if all(x in y and pd.notna(y[x]) for pair in pairs for y in pair)]
        if begins == "nothing" and all(any(x[y] != z[y] for y in known) for x, z in pairs):
            begins = stage
        changes = {}
        for name in known:
            own = np.array([(x[name] - y[name]) / (abs(y[name]) + 0.05) for x, y in pairs])
            if (own > DIFFERENT).all() or (own < -DIFFERENT).all():
                changes[name] = own.mean()
        largest = sorted(changes, key=lambda x: -abs(changes[x]))[:2]
        texts += [f"`{NAMES.get(x, x)}` {changes[x]:+.0%}" for x in largest]
    return begins + ": " * bool(texts) + ", ".join(texts)


# --- Tables ---


def cells(suite: Suite, variant: str, environment: str, folders: Folders) -> dict[str, str]:
    """What a bug costs in an environment, and what is said of it in the first 100k steps."""
    ours = by_environment(suite.name, variant, folders).get(environment, [])
    usual = control(suite, variant)
    theirs = by_environment(suite.name, usual, folders).get(environment, [])
    scores = [facts(x, "score") for x in (ours, theirs)]
    if not all(map(len, scores)):
        return {}
    count, said = seen(ours)
    now = ", today by `check/acting`" * acts_otherwise(suite, variant)
    change = with_interval(
        estimate(matrix(*scores)[:, None], statistics.relative_effect), "{:+z.0%}".format
    )
    if beside := suite.variants[usual].label.removeprefix("healthy").removeprefix(", "):
        change += f" beside {beside}"
    return {
        f"{environment}: return": number(np.mean(scores[0])),
        "change": "" if variant == usual else change,
        SAID: f"{count} of {len(ours)}{': ' * bool(said)}{said}{now}",
        "differs in the first iteration": "" if variant == usual else at_first(ours, theirs),
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
    return "\n".join(texts) + missing(suite, folders)


def healthy_table(suite: Suite, folders: Folders) -> str:
    """A row per environment and script: how many runs, how many of them with a warning."""
    rows = []
    for name, variant in suite.variants.items():
        for environment, results in by_environment(suite.name, name, folders).items():
            count, said = seen(results, math.inf)
            rows.append(
                {
                    "environment": environment,
                    "script": variant.script,
                    "runs": len(results),
                    "return": plus_minus(facts(results, "score")),
                    "warned about at any time": f"{count}: {said}" if count else "0",
                }
            )
    return markdown(rows) + missing(suite, folders)


def evaluation_table(suite: Suite, folders: Folders) -> str:
    """Returns of the last training episodes, and of the policies' mean actions afterwards."""
    rows = []
    for environment in suite.environments:
        for name, variant in suite.variants.items():
            results = by_environment(suite.name, name, folders).get(environment, [])
            played = np.array([np.mean(x.record["walk"]["returns"]) for x in results])
            if results:
                rows.append(
                    {
                        "environment": environment,
                        "": variant.label,
                        "in training": plus_minus(facts(results, "score")),
                        "evaluated [95 %]": with_interval(
                            estimate(matrix(played), statistics.mean)
                        ),
                    }
                )
    return markdown(rows) + missing(suite, folders)


def goal(suites: list[Suite], folders: Folders) -> str:
    """How many bugs are noticed on two seeds in some environment, and which healthy runs warn."""
    warned: dict[str, bool] = {}
    healthy: list[str] = []
    newer: set[str] = set()
    for suite, name in ((x, name) for x in suites for name in x.variants):
        label = suite.variants[name].label or name
        for environment, results in by_environment(suite.name, name, folders).items():
            if is_healthy(suite, name):
                said = [(x.record["seed"], seen([x], math.inf)[1]) for x in results]
                healthy += [x and f"{environment}, {label}, seed {seed}: {x}" for seed, x in said]
            elif len(results) >= SEEN_BY:
                warned[label] = warned.get(label, False) or seen(results)[0] >= SEEN_BY
                newer |= {label} if acts_otherwise(suite, name) else set()
    alarms = [x for x in healthy if x]
    told = {x for x, y in warned.items() if y}
    unseen = [x for x in warned if x not in told | newer]
    more = f", and {len(newer - told)} more by `check/acting`, which these runs did not log"
    more *= bool(newer - told)
    lines = [
        f"**{len(told | newer)} of {len(warned)} bugs are noticed**: {len(told)} are warned "
        f"about within {EARLY // 1000}k steps (RLHF: ever), on {SEEN_BY} seeds or more in some "
        f"environment{more}. Not noticed: {'; '.join(unseen) or 'none'}.",
        f"**{len(alarms)} of {len(healthy)} healthy runs** have a warning at any time"
        f"{': ' * bool(alarms)}{'; '.join(alarms)}.",
    ]
    return "\n\n".join(textwrap.fill(x, 118) for x in lines) + "\n"


def acts_otherwise(suite: Suite, variant: str) -> bool:
    """Whether `check/acting`, which the committed runs did not log, warns about a bug."""
    limits = {x: high for x, _, high, *_ in module_of(suite.variants[variant].script).HEALTH}
    return ACTING.get(variant, 0.0) > limits.get("check/acting", math.inf)


def is_healthy(suite: Suite, variant: str) -> bool:
    """Whether nothing is broken on purpose."""
    return suite.kind == "healthy" or variant.startswith("healthy")


# --- Fingerprints ---

# Columns of curves, and whether they are compared by their logarithms.
FINGERPRINT = {
    "approx_kl": True,
    "clipfrac": False,
    "grad_norm": True,
    "value_clipfrac": False,
    "explained_variance": False,
    "log_std": False,
    "check_first_kl": True,
    "check_values": False,
    "check_value_bias": False,
    "check_advantages": False,
    "check_update": False,
    "advantages_std": True,
}


def typical(result: Result) -> pd.Series:
    """Of each metric the median from 20k to 100k steps."""
    curve = iterations(result)
    curve = curve[curve["step"].between(BEGIN, EARLY)].reindex(columns=list(FINGERPRINT))
    middle = curve.median()
    for name in (x for x, logarithmic in FINGERPRINT.items() if logarithmic):
        middle[name] = np.log10(max(middle[name], 1e-6))
    return middle


def typicals(suite: Suite, environment: str, folders: Folders) -> dict[str, pd.DataFrame]:
    """Of each variant that has results there a row per seed."""
    found = {x: by_environment(suite.name, x, folders).get(environment) for x in suite.variants}
    return {x: pd.DataFrame([typical(y) for y in own]) for x, own in found.items() if own}


def band(suite: Suite, found: dict[str, pd.DataFrame]) -> tuple[pd.Series, pd.Series]:
    """Lowest and highest of all seeds of all healthy variants."""
    healthy = [own for name, own in found.items() if is_healthy(suite, name)]
    rows = pd.concat(healthy) if healthy else pd.DataFrame(columns=list(FINGERPRINT))
    return rows.min(), rows.max()


def bands_table(suites: list[Suite], folders: Folders) -> str:
    """Of each metric the bands of healthy runs, and beyond what the scripts warn."""
    rows = {name: {"metric": f"`{x}`"} for x, name in STEP_METRICS.items() if name in FINGERPRINT}
    for suite, environment in ((x, y) for x in suites for y in x.environments):
        low, high = band(suite, typicals(suite, environment, folders))
        for name, logarithmic in ((x, FINGERPRINT[x]) for x in rows):
            ends = [10**x if logarithmic else x for x in (low[name], high[name])]
            known = not np.isnan(ends).any()
            rows[name][environment] = " to ".join(f"{x:.2g}" for x in ends) if known else "–"
    for metric, low, high, patience, _ in module_of(suites[0].variants["healthy"].script).HEALTH:
        if (name := STEP_METRICS.get(metric)) in rows:
            long = f" for {when(patience)} steps" if patience else ""
            rows[name]["a warning outside of"] = f"{low:g} to {high:g}{long}"
    return markdown(list(rows.values()))


def distances(suite: Suite, environment: str, folders: Folders) -> pd.DataFrame:
    """How far the metrics of each bug are outside of the band of healthy runs, in its widths.

    A row per variant and a column per metric; 0 within the band, which is that from the lowest to
    the highest of all seeds of all healthy variants.
    """
    found = typicals(suite, environment, folders)
    low, high = band(suite, found)
    if low.isna().all():
        return pd.DataFrame()
    width = (high - low).clip(lower=0.02)
    broken = [name for name in found if not is_healthy(suite, name)]
    means = pd.DataFrame([found[name].mean() for name in broken], broken, list(FINGERPRINT))
    return ((means - high).clip(lower=0) - (low - means).clip(lower=0)) / width
