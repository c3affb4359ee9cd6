"""Where metrics are in healthy runs, and the rules by which a run is judged.

Nothing else has these numbers: `python -m benchmark check`, the figure of a healthy run and the
table of ranges in DEBUGGING.md all read them here.
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
from benchmark.lab.tables import markdown, number

DIAGNOSE = Path(__file__).with_name("diagnose.py")
INF = math.inf
STEPS = 2000  # a patience counts iterations of this size; shorter ones count less
EARLY = 20  # episodes that say what a return is, at least
RECENT = 10  # updates whose median is shown as the value of now
MOVED = 0.02  # change of the entropy that shows that the policy has changed
VARIES = 0.1  # share of their largest spread so far that value targets still have


class Rule(NamedTuple):
    """A metric is unhealthy after `patience` iterations (0: at once) from `low` to `high`.

    If `only` names a condition (see `holds`), it is unhealthy only then.
    """

    metric: str
    low: float
    high: float
    patience: int
    only: str
    advice: str
    symptom: str  # to look up in DEBUGGING.md


KL, CLIPPED, EXPLAINED = "losses/approx_kl", "losses/clipfrac", "losses/explained_variance"
TARGETS, ENTROPY = "check/target_std", "losses/entropy"
LOST, STILL = "while return is lost", "while the entropy stays as it was at first"
VARYING, PENALIZED = "unless value targets hardly vary", "with a KL penalty"
SAME = "KL below 1e-4 and the entropy constant from the first update"
RATIO = "KL and clip fraction almost 0, yet the policy moves, gradient norm high"
WORSE = "return falls below that of random actions, `check/update` negative"
LARGE = "Updates are large. If the return falls, lower --learning-rate or set --early-stop-kl."
BATCH = "The batch is not what the policy saw: check observations, actions and dropout."
SIGNS = "Good actions did not become more likely: check signs and reshapes."
WORDS = "Good tokens did not become more likely: check rewards, masks and signs."
REFERENCE = "It stays 0: is the reference model being trained too?"
SWAPPED = "Chosen answers are not preferred: are the two log-probabilities swapped?"
PREFERRED = "RLHF: DPO prefers the rejected answers"
# fmt: off
# ruff: disable[E501]
KL_ZERO = Rule(KL, -INF, 1e-12, 10, LOST, "The KL is 0: is the ratio always 1? Does the optimizer have the policy's weights?", RATIO)
ENVIRONMENTS = (
    KL_ZERO,
    Rule(KL, -INF, 1e-4, 10, STILL, "Updates hardly change the policy: steps are lost between the loss and the weights.", SAME),
    Rule(KL, 0.05, INF, 10, LOST, LARGE, "KL and clip fraction jump from the first update"),
    Rule(EXPLAINED, -0.06, 0.06, 20, VARYING, "Values explain nothing of their targets: check the shapes in the value loss, and the targets.", "explained variance near 0, gradient norm low"),
    Rule("check/value_bias", -INF, -0.5, 20, "", "Values stay below the observed returns: check the value targets and what holds values back.", "`check/value_bias` far below 0"),
    Rule("check/value_bias", 0.5, INF, 20, "", "Values exceed the observed returns: check V at the ends of episodes, and the value targets.", "`check/value_bias` far above 0"),
    Rule("check/update", -INF, -0.02, 10, LOST, SIGNS, WORSE),
    Rule("check/update", -INF, 0.02, 10, LOST, SIGNS, "`check/update` near 0, KL normal"),
    Rule("check/first_kl", 1e-4, INF, 0, "", BATCH, "`check/first_kl` above 0"),
    Rule("check/acting", 1e-5, INF, 0, "", "The policy that acts is not the one that learns: both must compute the same.", "`check/acting` above 0"),
)
KL_EXACT = (
    Rule("objective/kl_exact", -INF, 1e-3, 5, "", REFERENCE, "RLHF: exact KL 0"),
    Rule("objective/kl_exact", 30, INF, 1, PENALIZED, "Raise --kl-coef or lower --target-kl. At the start: mask the padding.", "RLHF: KL grows without bound, texts repeat themselves"),
)
RLHF = (Rule("check/update", -INF, 0.06, 10, "", WORDS, "RLHF: proxy stays, `check/update` below 0.06, KL below its target"), *KL_EXACT)
GRPO = (Rule("check/update", -INF, -0.02, 10, "", WORDS, WORSE), *KL_EXACT)
DPO = (
    Rule("rewards/accuracy", -INF, 0.5, 20, "", SWAPPED, PREFERRED),
    Rule("rewards/margin", -INF, 0.0, 20, "", SWAPPED, PREFERRED),
)
SUMS = (  # of grpo_minimal.py
    Rule("grpo/reward", -INF, 0.0, 10, "", "No response is right: train SFT longer, or check the reward.", "RLHF: no response earns a reward"),
    Rule("grpo/kl", -INF, 1e-3, 10, "", REFERENCE, "RLHF: exact KL 0"),
)
CONVERSATIONS = (  # of ppo_llm.py
    KL_ZERO,
    Rule(KL, 0.05, INF, 10, LOST, "Updates are large. If the return falls, lower --learning-rate.", "KL and clip fraction jump from the first update"),
    Rule(EXPLAINED, -0.06, 0.06, 20, VARYING, "Values explain nothing of their targets: raise --value-lr or --vf-coef, or use --advantages group.", "explained variance near 0, gradient norm low"),
    Rule("check/first_kl", 1e-2, INF, 0, "", "The batch is not what the policy saw: check masks, temperature and dropout.", "`check/first_kl` above 0"),
    Rule("check/sampling", 0.1, INF, 0, "", "The sampler's probabilities are not those that are trained: try --sampling-batch 1, which needs no padding.", "`check/sampling` above 0.1"),
)
KINDS = {"rewards/accuracy": DPO, "losses/k3": GRPO, "objective/kl_exact": RLHF, "grpo/kl": SUMS}
KINDS |= {"check/sampling": CONVERSATIONS}
# ruff: enable[E501]
# fmt: on
# Where metrics are in most healthy runs; without a range, where no rule applies.
USUAL = {KL: (0.005, 0.025), CLIPPED: (0.07, 0.3), EXPLAINED: (0.5, 1.0)}
USUAL |= {"check/first_kl": (-INF, 1e-5), "rewards/accuracy": (0.5, 1)}
# Where those of other policies than a Gaussian are, as in CartPole and Atari games. These ranges
# contain the ones above, so they are also for logs that do not say what the policy is.
OTHERS = {KL: (0.0005, 0.025), CLIPPED: (0.005, 0.3)}


# --- The rules ---


def rules_of(metrics: pd.Index) -> tuple[Rule, ...]:
    """The rules for a run that logs these metrics."""
    return next((rules for name, rules in KINDS.items() if name in metrics), ENVIRONMENTS)


def metrics_of(rules: tuple[Rule, ...]) -> list[str]:
    """The metrics of a run that are judged, in the order in which they are shown."""
    names = [x.metric for x in rules]
    return [*dict.fromkeys([KL, CLIPPED, *names] if rules is ENVIRONMENTS else names)]


def return_lost(returns: np.ndarray) -> bool:
    """Whether the latest twentieth of the episodes, at least 20, gave back a fifth of the gain.

    The gain is from the first so many episodes to the best so many in a row.
    """
    count = max(EARLY, len(returns) // 20)
    sums = np.cumsum(np.concatenate([[0.0], returns]))
    means = (sums[count:] - sums[:-count]) / count
    return len(means) > 0 and means[-1] < means[0] + 0.8 * (means.max() - means[0])


def targets_vary(updates: pd.DataFrame) -> bool | None:
    """Whether the latest value targets vary, compared with earlier ones; None if not logged."""
    spread = updates.get(TARGETS, pd.Series(dtype=float)).dropna()
    return bool(spread[-RECENT:].median() > VARIES * spread.max()) if len(spread) else None


def holds(condition: str, updates: pd.DataFrame, episodes: pd.DataFrame) -> bool:
    """Whether a condition holds after the last of these updates."""
    if condition == LOST:
        ended = episodes["global_step"] <= updates["global_step"].iloc[-1]
        return return_lost(episodes["return"][ended].to_numpy())
    if condition == STILL:
        entropy = updates.get(ENTROPY, pd.Series(math.nan, updates.index))
        return bool((entropy - entropy.iloc[0]).abs().max() < MOVED)
    if condition == VARYING:
        return targets_vary(updates) is not False
    return condition != PENALIZED or updates.get("objective/kl_coef", pd.Series(1)).any()


def count_updates(steps: np.ndarray) -> bool:
    """Whether the steps of a log are numbers of updates, as in RLHF."""
    return len(steps) > 0 and steps[0] in (0, 1) and bool((np.diff(steps) == 1).all())


def patience(iterations: int, steps: np.ndarray) -> int:
    """So many iterations of STEPS steps as iterations of a log with these steps."""
    sizes = np.diff(steps, prepend=0)[steps > 0]
    part = 1 if count_updates(steps) else min([1, *sizes / STEPS])
    return max(math.ceil(iterations / part), 1)


def unhealthy(updates: pd.DataFrame, episodes: pd.DataFrame) -> list[tuple[Rule, np.ndarray]]:
    """The rules for a run, each with the updates after which its metric is unhealthy, (U,).

    Args:
        updates: a row per iteration, with "global_step" and metrics; missing values are healthy.
        episodes: "global_step" and "return" of each; empty in RLHF.
    """
    found, steps = [], updates["global_step"].to_numpy()
    for rule in rules_of(updates.columns):
        values = updates.get(rule.metric, pd.Series(math.nan, updates.index))
        count = patience(rule.patience, steps)
        bad = values.between(rule.low, rule.high).rolling(count).sum().to_numpy() == count
        bad[bad] = [holds(rule.only, updates[: k + 1], episodes) for k in np.flatnonzero(bad)]
        found.append((rule, bad))
    return found


# --- The verdicts ---

CONSTANT = "says nothing: value targets hardly vary"
UNKNOWN_SPREAD = f"It says nothing if value targets hardly vary; {TARGETS} is not logged."


def judge(log: Log) -> list[dict[str, Any]]:
    """A row for each metric of a run that is judged: its value, range, verdict, and what to do.

    "value" is what the verdict is about, "bad" has the steps after which it is unhealthy. Without a
    verdict, it is too early for one. There is something to do only where a metric is unhealthy.
    """
    rows, found = [], unhealthy(log.updates, log.episodes)
    steps, vary = log.updates["global_step"], targets_vary(log.updates)
    for metric in metrics_of(rules_of(log.updates.columns)):
        values = log.updates.get(metric, pd.Series(dtype=float)).dropna()
        if values.empty:
            continue
        own = {x: bad for x, bad in found if x.metric == metric}
        low, high = usual(metric, [*own], log.gaussian)
        now = values[-RECENT:].median()
        # Values begin badly everywhere, and a learning rate that falls to 0 ends all updates.
        known = (values.median(), now) if metric in USUAL else (now,)
        value = next((x for x in known if low <= x <= high), known[0])
        place = "lower" if value < low else "higher" if value > high else ""
        verdict, advice = f"healthy, but {place} than usual" if place else "healthy", []
        if len(values) < patience(min((x.patience for x in own), default=RECENT), steps):
            verdict = ""
        elif (metric, place, vary) == (EXPLAINED, "lower", False):
            verdict = CONSTANT
        bad = np.any([*own.values()], axis=0) if own else np.zeros(len(steps), bool)
        if rule := next((x for x in own if own[x].any()), None):
            value = log.updates[metric][own[rule]].median()
            verdict = f"unhealthy {'since' if bad[-1] else 'at'} {steps[bad].iloc[0]:,.0f}"
            advice = [rule.advice, f"DEBUGGING.md: {rule.symptom}"]
            advice += [UNKNOWN_SPREAD] * (metric == EXPLAINED and vary is None)
        row = {"metric": metric, "value": value, "band": (low, high), "verdict": verdict}
        rows.append(row | {"bad": steps[bad], "advice": [f"    {x}" for x in advice]})
    return rows


def usual(metric: str, rules: list[Rule], gaussian: bool) -> tuple[float, float]:
    """Where a metric usually is, or else where no rule applies."""
    if metric in USUAL:
        return USUAL[metric] if gaussian else OTHERS.get(metric, USUAL[metric])
    low = max((x.high for x in rules if x.low == -INF), default=-INF)
    return low, min((x.low for x in rules if x.high == INF), default=INF)


# --- The report ---

THEIRS = """CleanRL logs the KL of an update's last minibatch, Stable-Baselines3 that of its last
epoch. Both are larger than the mean over the update, to which the ranges apply."""
WHERE = """Ranges are those of healthy runs with the default settings.
DEBUGGING.md lists the symptoms, and what looks bad but is harmless."""
LITTLE = """That rules out little: many bugs leave each metric in its range, such as wrong rewards,
ends of episodes that are mixed up, minibatches that are not shuffled, or a --resume that forgets
something. """


def between(low: float, high: float) -> str:
    """A range in words."""
    if not math.isfinite(low):
        return f"at most {high:g}" if math.isfinite(high) else ""
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"


def alike(runs: list[Log]) -> list[list[Log]]:
    """Runs that one table can show: in the same environment, with the same kind of metrics."""
    found: dict[Any, list[Log]] = {}
    for log in runs:
        found.setdefault((log.environment, rules_of(log.updates.columns)), []).append(log)
    return [*found.values()]


def report(runs: list[Log], picture: str = "") -> str:
    """The verdicts on runs that are alike as text, what their logs lack, and what to do next.

    Args:
        picture: where the curves are.
    """
    judged = [{x["metric"]: x for x in judge(log)} for log in runs]
    names, rules = names_of(runs), rules_of(runs[0].updates.columns)
    lines = [f"{f'{name}: ' * (len(runs) > 1)}{described(x)}" for name, x in zip(names, runs)]
    lines += ["", line("metric", names if len(runs) > 1 else ["value"], "usually", "verdict")]
    lacking = []
    for metric in metrics_of(rules):
        rows = [x.get(metric, {}) for x in judged]
        if not (known := [x for x in rows if x]):
            lacking.append(metric)
            continue
        verdicts = [x.get("verdict", "not logged") or "too early to tell" for x in rows]
        cells, text = [x.get("value") for x in rows], together(names, verdicts)
        lines.append(line(metric, cells, between(*known[0]["band"]), text))
        lines += dict.fromkeys(text for x in known for text in x["advice"])
    lines += [*last_lines(runs, names), ""]
    if lacking:
        lines += [f"Not logged, so not checked: {', '.join(lacking)}.", ""]
    lines.append(WHERE)
    if rules is ENVIRONMENTS and not any(x.startswith("check/") for x in runs[0].updates):
        lines += [THEIRS, f"To log the other checks, paste the functions in {DIAGNOSE}."]
    lines += [f"Curves: {picture}"] * bool(picture)
    return "\n".join([*lines, "", what_next(runs[0], [y for x in judged for y in x.values()])])


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
    lines = []
    entropies = [x.updates.get(ENTROPY, pd.Series(dtype=float)).dropna() for x in runs]
    if all(map(len, entropies)):
        lines.append(line("entropy", [x[-RECENT:].median() for x in entropies], "", ""))
    if all(len(x.episodes) for x in runs):
        texts = []
        for log in runs:
            gain = "lost a fifth of" if return_lost(log.returns) else "kept"
            texts.append(log.scored[1] + f"; has {gain} its gain" * (len(log.returns) > 2 * EARLY))
        lines.append(line("return", [number(x.score) for x in runs], "", together(names, texts)))
    return lines


def what_next(log: Log, rows: list[dict[str, Any]]) -> str:
    """The end of a report: what to do after reading it."""
    if rows and all(x["verdict"] == "" for x in rows):
        return "It is too early to tell. Run the same command again later."
    script = script_of(log)
    if any("DEBUGGING" in text for x in rows for text in x["advice"]):
        compare = f", or run `python -m benchmark diff {script}`" if script else ""
        return f"Look up the symptom in DEBUGGING.md{compare}."
    found = "No metric is unhealthy." if rows else "No metric could be checked."
    hint = f"Compare with the original: `python -m benchmark diff {script or 'YOUR_COPY.py'}`."
    return f"{found} {LITTLE}{hint}"


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
    for metric in metrics_of(ENVIRONMENTS):
        own = [x for x in ENVIRONMENTS if x.metric == metric]
        texts = [f"{between(x.low, x.high)}{waits(x)} {x.only}".strip() for x in own]
        advice = dict.fromkeys(x.advice for x in own)
        row = {"metric": f"`{metric}`", "usually": between(*usual(metric, own, gaussian=True))}
        row |= {"unhealthy": "<br>".join(texts) or "–", "what to do": "<br>".join(advice) or "–"}
        rows.append(row)
    return markdown(rows)


def waits(rule: Rule) -> str:
    return f", for {rule.patience} iterations" * (rule.patience > 1)
