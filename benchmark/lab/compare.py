"""Compares runs: scores, how often one beats another, and what so many seeds can show."""

import collections
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark.lab import statistics
from benchmark.lab.definitions import Folders, require_open
from benchmark.lab.logs import (
    UNKNOWN,
    Log,
    content_of,
    of_suite,
    runs_table,
    search,
    window_of_all,
)
from benchmark.lab.provenance import BenchmarkError
from benchmark.lab.statistics import estimate
from benchmark.lab.tables import RATIO, chance, markdown, number, of_pairs, tasks_of, with_interval

MANY = 5  # of these are listed
# Settings that change nothing of what is learned from one seed; CleanRL's exp_name is the script's
# name, unless somebody has chosen another one.
NO_MATTER = ("seed", "run_name", "track", "wandb_project_name", "capture_video")


# --- What is compared: a table with a row per run, which has its "label", "environment", "log" ---


def runs_of(
    names: tuple[str, ...],
    folders: Folders,
    suites: Mapping[str, Iterable[str]],
    environment: str,
) -> tuple[pd.DataFrame, list[str]]:
    """The runs of each name, and sentences on what was left out."""
    groups, notes = {}, []
    for name in dict.fromkeys(x.rstrip("/") or x for x in names):
        groups[name], left_out = logs_of(name, folders, suites, environment)
        notes += [f"Left out: {x}." for x in left_out]
        notes += [f"{x.path}: {x.note}." for x in groups[name] if x.note]
    if len(groups) < 2:
        raise BenchmarkError("To compare, give at least two folders, patterns or rows of suites.")
    require_apart(groups)
    return runs_table(groups), notes


def require_apart(groups: dict[str, list[Log]]) -> None:
    """A BenchmarkError if two groups have the same run, which would hide how they differ."""
    seen: dict[str | frozenset[bytes], str] = {}  # groups by the real path or content of a run
    for name, own in groups.items():
        for log in own:
            for key in (os.path.realpath(log.path), content_of(log.path)):
                if key and seen.setdefault(key, name) != name:
                    raise BenchmarkError(
                        f"{log.path} is a run of both {seen[key]} and {name}, and would count on "
                        "both sides: give folders or patterns that have no run in common."
                    )


def logs_of(
    name: str, folders: Folders, suites: Mapping[str, Iterable[str]], environment: str
) -> tuple[list[Log], list[str]]:
    """The runs with returns that a word of the command line means, and what was left out."""
    suite, _, variant = name.partition(":")
    if not Path(name).exists():
        require_open(suite)
    if Path(name).exists() or suite not in suites:
        logs, left_out = search(name, environment)
    elif variant not in (known := suites[suite]):
        rows = ", ".join(f"{suite}:{x}" if x else suite for x in known)
        raise BenchmarkError(f"{name} is not a row of a suite; there are {rows}.")
    else:
        logs, left_out = of_suite(suite, variant, folders), []
        if not logs:
            raise BenchmarkError(f"No run of {name} is finished.")
    silent = [x for x in logs if x.episodes.empty]
    if len(silent) == len(logs):
        raise BenchmarkError(f"{silent[0].path}: {without_returns(silent[0])}.")
    left_out += [f"{x.path}: {without_returns(x)}" for x in silent]
    return [x for x in logs if len(x.episodes)], left_out


def without_returns(log: Log) -> str:
    """Why a run has no returns."""
    none = f"no episode has ended in its {log.steps:,} steps"
    if log.complete:
        return none
    return (
        f"it logs no returns. Either {none}, or its environment is not wrapped in "
        "RecordEpisodeStatistics (Stable-Baselines3: Monitor). Of RLHF, `seeds` prints a table"
    )


def in_each_place(runs: pd.DataFrame) -> Iterable[tuple[tuple[str, str], list[Log]]]:
    """The runs of each label in each environment."""
    groups = runs.groupby(["label", "environment"], observed=True)["log"]
    return ((key, [*own]) for key, own in groups)


def described(runs: pd.DataFrame) -> list[str]:
    """What was read: a line for each group and environment, with its seeds, or else its folders."""
    lines = []
    for (label, place), own in in_each_place(runs):
        where = "environment unknown" if place == UNKNOWN else place
        if all(x.seed for x in own):
            seeds = sorted((x.seed for x in own), key=lambda x: (len(x), x))
            about = f"seed{'s' * (len(own) > 1)} {', '.join(seeds)}"
        else:
            counts = collections.Counter(str(x.path.parent) for x in own)
            about = f"{len(own)} run{'s' * (len(own) > 1)}"
            if len(counts) > 1:
                about += f" in {', '.join(f'{x} ({y})' for x, y in counts.items())}"
        lines.append(f"{label}: {where}, {about}")
    return lines


def require_seeds(runs: pd.DataFrame) -> list[str]:
    """A BenchmarkError if runs of a group in one environment are not seeds of one setting.

    Returns:
        Sentences on groups of which nobody can know it.
    """
    notes = []
    for (label, place), own in in_each_place(runs):
        known = [x for x in own if settings_of(x)]
        if any(settings_of(x) != settings_of(known[0]) for x in known):
            raise BenchmarkError(f"{label}: {apart(known)}")
        for pair in itertools.combinations(own, 2):
            if same_script(*pair) is False:
                raise BenchmarkError(
                    f"{label}: its runs in one environment are of two scripts, {scripts(*pair)}. "
                    "Give the runs of each as a separate argument."
                )
        seeds = collections.Counter(x.seed for x in own if x.seed)
        if twice := [x for x in seeds if seeds[x] > 1]:
            raise BenchmarkError(
                f"{label}: {place} has seed {twice[0]} more than once. Runs of one seed tell no "
                "more than one of them: give one run of each."
            )
        if len(known) == len(own) or len(own) == 1:
            continue
        folders = {x.path.parent for x in own}
        if place == UNKNOWN and len(folders) > 1:
            raise BenchmarkError(
                f"{label} has {len(own)} runs in {len(folders)} folders, and their logs name "
                "neither environment nor settings, so they may not be seeds of one setting. "
                f"Give folders with runs of one kind, such as {min(folders)}. If all are of "
                "one kind, name their environment with --env-id."
            )
        notes.append(f"{label}: not all logs name their settings, so these may differ.")
    return notes


def settings_of(log: Log) -> dict[str, str]:
    """The settings in which seeds must agree."""
    return {x: y for x, y in log.settings.items() if x not in (*NO_MATTER, "exp_name")}


def differing(settings: pd.DataFrame) -> str:
    """The columns that are not the same in all rows, with their values."""
    differ = [f"{x} ({', '.join(y.unique())})" for x, y in settings.items() if y.nunique() > 1]
    if len(differ) > MANY:
        differ[MANY:] = [f"and {len(differ) - MANY} more"]
    return ", ".join(differ)


def same_script(a: Log, b: Log) -> bool | None:
    """Whether two runs are of one script, imports included; None if nobody can know it."""
    if a.code and b.code:
        return a.code == b.code
    return False if a.script and b.script and a.script != b.script else None


def scripts(a: Log, b: Log) -> str:
    """The names of two scripts, with the hashes of their code if the names are the same."""
    if a.script != b.script:
        return f"{a.script} and {b.script}"
    return " and ".join(f"{x.script} with hash {x.code[:8]}" for x in (a, b))


def contrast(a: Log, b: Log) -> str:
    """In what two runs differ, as far as their logs say; empty if they do not say anything."""
    known, same = bool(settings_of(a) and settings_of(b)), same_script(a, b)
    differ = []
    if known:
        settings = [x.settings | dict.fromkeys(NO_MATTER, "") for x in (a, b)]
        differ.append(differing(pd.DataFrame(settings).fillna("none")))
    if same is False:
        differ.append(f"the script ({scripts(a, b)})")
    text = " and ".join(filter(None, differ))
    if known and not text:
        text = "no setting"
    return f"{text}; the script is the same" if text and same else text


def contrasts(runs: pd.DataFrame) -> list[str]:
    """In what each group differs from the first one, and of which groups the code is unknown."""
    firsts = {key: own[0] for key, own in in_each_place(runs)}
    base, *others = runs["label"].cat.categories
    found, unknown = [], []
    for label, place in (x for x in firsts if x[0] in others):
        a, b = firsts[base, place], firsts[label, place]
        if text := contrast(a, b):
            found.append(f"{label} differs from {base} in {text}.")
        of_suites = a.recorded is not None and b.recorded is not None  # their commits are known
        if same_script(a, b) is None and not of_suites:
            unknown += [base, label]
    if unknown:
        names = ", ".join(dict.fromkeys(unknown))
        found.append(f"The logs of {names} do not show whether their code is the same.")
    return [*dict.fromkeys(found)]  # it is the same in all environments, as a rule


def apart(logs: list[Log]) -> str:
    """In which settings runs differ, and how to separate them."""
    settings = pd.DataFrame(map(settings_of, logs)).fillna("none")
    paths = pd.Series([str(x.path) for x in logs])
    parts = paths.groupby([y for _, y in settings.items()], sort=False)
    folders = [os.path.commonpath([*x]) for _, x in parts]
    how = "for example by a pattern in quotes"
    if len({*folders}) == len(parts):
        how = f"such as {' '.join(folders[:MANY])}"
    return (
        "its runs in one environment are not seeds of one setting, since they differ in "
        f"{differing(settings)}. Give the runs of each setting as a separate argument, {how}."
    )


def comparable(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Runs in the environments that all groups have, up to the step that all have reached.

    Returns:
        The runs, their "score" and the "window" over which all in an environment are scored; for
        the reader, sentences on what was left out or assumed.
    """
    places = runs.groupby("label", observed=True)["environment"].agg(set)
    shared, notes, parts = set.intersection(*places), [], []
    if not shared:
        has = "; ".join(f"{x} has {', '.join(sorted(y))}" for x, y in places.items())
        text = f"There is no environment that all have: {has}."
        if UNKNOWN in set.union(*places):
            text += " Where logs do not name theirs, give it with --env-id."
        raise BenchmarkError(text)
    if left := set.union(*places) - shared:
        notes.append(f"Left out, since not all have it: {', '.join(sorted(left))}.")
    for place, own in runs[runs["environment"].isin(shared)].groupby("environment"):
        shortest = min(own["log"], key=lambda x: x.steps)
        longest = max(own["log"], key=lambda x: x.steps)
        if shortest.steps < 0.99 * longest.steps:
            notes.append(
                f"{place}: compared at {shortest.steps:,} of up to {longest.steps:,} steps, since "
                f"{shortest.path} ends there."
            )
        parts.append(scored(own, shortest.steps))
    return pd.concat(parts), notes


def scored(runs: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Runs in one environment up to a step, their "score", and the "window" that all are scored by.

    A BenchmarkError if a run has no score, since its group would look better without it.
    """
    cut = [x.until(steps) for x in runs["log"]]
    if silent := [x.path for x in cut if x.episodes.empty]:
        raise BenchmarkError(f"{silent[0]}: no episode has ended by {steps:,} steps.")
    window = window_of_all(x.windows for x in cut)
    scores = [x.score_over(window) for x in cut]
    if failed := [x.path for x, score in zip(cut, scores) if not np.isfinite(score)]:
        raise BenchmarkError(
            f"{failed[0]}: its returns end in NaN. Without it, its group would look better "
            "than it is: find out why, and run all seeds again."
        )
    return runs.assign(log=cut, score=scores, window=window)


# --- What comes out ---


def scores_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Scores by label and run (rows) and environment (columns)."""
    seed = runs.groupby(["label", "environment"], observed=True).cumcount()
    rows = runs.assign(seed=seed)
    return rows.pivot(index=["label", "seed"], columns="environment", values="score")


def table(runs: pd.DataFrame) -> str:
    """A row per environment, and one over all: there 0 is the worst run and 1 the best."""
    scores, (base, *others) = scores_of(runs), runs["label"].cat.categories
    shown = {x: (scores[[x]], number) for x in scores}
    if len(shown) > 1:
        span = (scores.max() - scores.min()).replace(0, 1)
        shown["all (0: worst run, 1: best)"] = (scores - scores.min()) / span, RATIO
    rows = []
    for name, (own, form) in shown.items():
        row = {"IQM [95 %] (seeds)": name}
        for label in (base, *others):
            tasks = tasks_of(own, label)
            seeds = "–".join(map(str, sorted({*map(len, tasks)})))
            middle = with_interval(estimate(tasks, statistics.interquartile_mean), form)
            row[label] = f"{middle} ({seeds})"
        row |= {f"P({x} is better)": chance(own, x, base) for x in others}
        window = runs["window"][runs["environment"] == name].unique()  # none for the last row
        rows.append(row | {"score: mean of the": "".join(window)})
    return markdown(rows)


def verdict(runs: pd.DataFrame) -> list[str]:
    """What so many seeds can show, in a sentence for each comparison."""
    scores, (base, *others) = scores_of(runs), runs["label"].cat.categories
    return [verdict_on(scores, label, base, len(others)) for label in others]


def verdict_on(scores: pd.DataFrame, ours: str, theirs: str, comparisons: int) -> str:
    """Which of two groups is better, or that no difference can be shown."""
    found = of_pairs(scores, ours, theirs, statistics.improvement)
    none = f"No difference between {ours} and {theirs} can be shown:"
    if not found.ends:
        return (
            f"{none} that takes at least 3 seeds of each, since two runs of the same code can "
            "differ a lot."
        )
    low, high = found.ends
    if low > 0.5:
        return better_by(scores, ours, theirs, comparisons)
    if high < 0.5:
        return better_by(scores, theirs, ours, comparisons)
    text = f"{none} the interval of the probability, [{low:.2f}, {high:.2f}], contains 0.5."
    if len(scores.columns) == 1:
        missed = statistics.smallest_visible(*tasks_of(scores, ours), *tasks_of(scores, theirs))
        if missed:
            text += f" A t-test would miss a difference of {number(missed)} in one of five such "
            text += "experiments."
    return text


def better_by(scores: pd.DataFrame, better: str, worse: str, comparisons: int) -> str:
    """How sure it is that one group is better than another, of so many comparisons."""
    pairs = [*zip(tasks_of(scores, better), tasks_of(scores, worse))]
    found = of_pairs(scores, better, worse, statistics.improvement)
    luck = statistics.by_chance(pairs)
    few = luck > 0.05 / comparisons
    text = (
        f"{better} {'may be' if few else 'is'} better: a run of it beats one of {worse} with "
        f"probability {with_interval(found, RATIO)}."
    )
    low, high = found.ends
    if low == high:
        text += " All resamples agree, which few seeds often do: it may be closer to 0.5."
    if few:
        seeds = min(len(own) for pair in pairs for own in pair)
        text += f" But {seeds} seeds are few: in {luck:.0%} of such comparisons, two equal "
        text += "settings differ this much"
        text += f", and this is one of {comparisons}." if comparisons > 1 else "."
    return text
