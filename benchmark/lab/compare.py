"""Compares runs: scores, the probability that one is better, and what so many seeds can show."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark.lab import statistics
from benchmark.lab.definitions import Folders, Suite
from benchmark.lab.logs import UNKNOWN, Log, find, of_suite
from benchmark.lab.provenance import BenchmarkError
from benchmark.lab.statistics import estimate
from benchmark.lab.tables import RATIO, chance, markdown, number, with_interval

Groups = dict[str, list[Log]]  # the runs that are compared, by label


# --- What is compared ---


def groups_of(names: tuple[str, ...], folders: Folders, suites: Mapping[str, Suite]) -> Groups:
    """The runs of each name; run folders that differ only in a number at the end are one group."""
    found = {x.rstrip("/"): runs_of(x, folders, suites) for x in names}
    groups: Groups = {}
    for name, logs in found.items():
        groups.setdefault(label_of(name) if len(logs) == 1 else name, []).extend(logs)
    groups = groups if len(groups) > 1 else found
    if len(groups) < 2:
        raise BenchmarkError("To compare, give at least two folders, patterns or rows of suites.")
    return groups


def label_of(folder: str) -> str:
    """A run folder's name without its environment, seed and time."""
    name = re.sub(r"^[^/]*-v\d+__", "", Path(folder).name)
    short = re.sub(r"(__\d+__\d+|[-_.](seed)?\d+|seed\d+)$", "", name)
    return short or str(Path(folder).parent)


def runs_of(name: str, folders: Folders, suites: Mapping[str, Suite]) -> list[Log]:
    """The runs that a word of the command line means."""
    suite, _, variant = name.partition(":")
    if Path(name).exists() or suite not in suites:
        logs = find(name)
    elif variant not in (known := suites[suite].variants):
        rows = ", ".join(f"{suite}:{x}" for x in known if x)
        raise BenchmarkError(f"{name} is no row of a suite; there are {rows}.")
    else:
        logs = of_suite(suite, variant, folders)
    if not logs:
        raise BenchmarkError(f"No run of {name} is finished.")
    if silent := [x.path for x in logs if x.episodes.empty]:
        raise BenchmarkError(
            f"{silent[0]} logs no returns: wrap the environment in RecordEpisodeStatistics, or in "
            "Monitor for Stable-Baselines3. Of RLHF, `seeds` prints a table."
        )
    return logs


def comparable(groups: Groups) -> tuple[Groups, list[str]]:
    """Runs in the environments that all groups have, up to the step that all have reached.

    Returns:
        The runs and, for the reader, sentences on what was left out or assumed.
    """
    runs = [(label, log) for label, logs in groups.items() for log in logs]
    notes, known = [], {x.environment for _, x in runs}
    if UNKNOWN in known:
        if len(known := known - {UNKNOWN}) != 1:
            raise BenchmarkError(
                "A log does not name its environment: put it into its path, as in logs/Hopper-v4."
            )
        notes.append(f"A log that does not name its environment is taken for {min(known)}.")
        place = {"environment": min(known)}
        runs = [(y, dataclasses.replace(x, record=x.record | place)) for y, x in runs]
    places = {label: {x.environment for y, x in runs if y == label} for label in groups}
    shared = set.intersection(*places.values())
    if not shared:
        has = "; ".join(f"{x} has {', '.join(sorted(y))}" for x, y in places.items())
        raise BenchmarkError(f"There is no environment that all have: {has}.")
    if shared < known:
        notes.append(f"Left out, since not all have it: {', '.join(sorted(known - shared))}.")
    cut: Groups = {label: [] for label in groups}
    for place in sorted(shared):
        own = [(y, x) for y, x in runs if x.environment == place]
        steps = [x.steps for _, x in own]
        if min(steps) < 0.99 * max(steps):
            notes.append(f"{place}: compared at {min(steps):,} steps, which all have reached.")
        for label, log in own:
            cut[label].append(log.until(min(steps)))
            if cut[label][-1].episodes.empty:
                raise BenchmarkError(f"{log.path}: no episode has ended by {min(steps):,} steps.")
    return cut, notes


# --- What comes out ---


def scores_of(groups: Groups) -> pd.DataFrame:
    """Scores by label and run (rows) and environment (columns)."""
    rows = [
        {"label": label, "environment": x.environment, "score": x.score}
        for label, logs in groups.items()
        for x in logs
    ]
    table = pd.DataFrame(rows)
    table["label"] = pd.Categorical(table["label"], groups)
    table["seed"] = table.groupby(["label", "environment"], observed=True).cumcount()
    return table.pivot(index=["label", "seed"], columns="environment", values="score")


def table(groups: Groups) -> str:
    """A row per environment, and one over all: there 0 is the worst run and 1 the best."""
    scores, (base, *others) = scores_of(groups), groups
    shown = {x: (scores[[x]], number) for x in scores}
    if len(shown) > 1:
        span = (scores.max() - scores.min()).replace(0, 1)
        shown["all (0: worst run, 1: best)"] = (scores - scores.min()) / span, RATIO
    rows = []
    for name, (own, form) in shown.items():
        row = {"IQM [95 %] (seeds)": name}
        for label in groups:
            runs = own.loc[label].to_numpy()
            seeds = "–".join(map(str, sorted({*np.isfinite(runs).sum(0)})))
            middle = with_interval(estimate(runs, statistics.interquartile_mean), form)
            row[label] = f"{middle} ({seeds})"
        rows.append(row | {f"P({x} is better)": chance(own, x, base) for x in others})
    return markdown(rows)


def verdict(groups: Groups) -> str:
    """What so many seeds can show, in a sentence for each comparison."""
    scores, (base, *others) = scores_of(groups), groups
    lines = []
    for label in others:
        pairs = [(scores.loc[label, x].dropna(), scores.loc[base, x].dropna()) for x in scores]
        counts = [len(y) for x in pairs for y in x]
        seeds = f"{min(counts)} seed{'s' * (min(counts) > 1)} each"
        if min(counts) < 2:
            lines.append(
                f"{label} and {base}: with {seeds}, nothing can be said about a difference, since "
                "two runs of the same code can differ as much."
            )
            continue
        seen = np.median([statistics.smallest_visible(*x) for x in pairs])
        text = f"{label} and {base}, {seeds}: in one environment, a difference of less than about "
        lines.append(f"{text}{seen:.0%} of the mean would probably not be seen.")
    return "\n".join(lines)
