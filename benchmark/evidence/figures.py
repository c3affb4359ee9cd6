"""Figures of suites: learning curves with bands and a thin line per seed, rows with intervals."""

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.evidence import tables
from benchmark.evidence.definitions import Suite
from benchmark.evidence.suites.common import THREE
from benchmark.evidence.tables import REFERENCE, reference, runs_of
from benchmark.lab import check, plots, statistics
from benchmark.lab.definitions import Folders
from benchmark.lab.plots import draw_curves, one_panel_each, save
from benchmark.lab.provenance import ROOT, BenchmarkError
from benchmark.lab.results import by_environment, done, write_text

FOLDER = ROOT / "benchmark" / "figures"
CODE = [__file__, *(x.__file__ for x in (plots, statistics, tables))]
HEALTHY = {x: check.USUAL[x] for x in (check.KL, check.CLIPPED, check.EXPLAINED)}
PPO2 = "0.35"  # gray, so that color is ours
TICK = {"marker": "_", "markersize": 9, "linestyle": "none", "clip_on": False}


# --- Over environment steps ---


def draw_published(axes: Axes, environment: str) -> None:
    """The curve of baselines' benchmark page; final values read off the paper's Figure 3."""
    rows = reference("ppo2_curves")
    rows = rows[rows["environment"] == environment.partition("-")[0]]
    if len(rows):
        label = f"ppo2 2018 ({'v2' if '-' in environment else '10M steps'}, 6 seeds)"
        style = {"color": PPO2, "linewidth": 1.2, "linestyle": "--", "label": label}
        axes.plot(rows["global_step"], rows["return"], **style)
        band = rows["global_step"], rows["low"], rows["high"]
        axes.fill_between(*band, color=PPO2, alpha=0.12, linewidth=0)
    paper = tables.publications(environment, 1_000_000, f"{tables.FIGURE3}: PPO (clip)")
    for mean in paper["mean"]:
        axes.plot(1e6, mean, **TICK, color="k", label="paper 2017 (v1), read off")


def panels_of(runs: pd.DataFrame) -> tuple[Figure, Iterator[tuple[Axes, str, pd.DataFrame]]]:
    """A figure with a panel for each environment, and the runs that belong there."""
    groups, titles = dict(iter(runs.groupby("environment", sort=False))), []
    for name, own in groups.items():
        seeds = " + ".join(map(str, own.groupby("label", observed=True).size().unique()))
        titles.append(f"{name}\n{seeds} seed{'s' * (seeds != '1')}")
    figure, panels = one_panel_each(titles)
    figure.supylabel("episodic return in training")
    return figure, zip(panels, groups, groups.values())


def curves(suite: Suite, folders: Folders, environments: Sequence[str] = ()) -> Figure:
    """One panel per environment, or per one of those given, with the variants of a suite."""
    figure, panels = panels_of(runs_of(suite, folders, environments))
    for axes, environment, runs in panels:
        draw_published(axes, environment)
        for index, label in enumerate(suite.labels.values()):
            if len(own := runs["result"][runs["label"] == label]):
                draw_curves(axes, own, label, f"C{index}")
        if suite.total_timesteps is None:  # these are few
            axes.xaxis.set_major_formatter("{x:g}")
    figure.supxlabel(suite.step)
    return figure


def minutes(suite: Suite, folders: Folders) -> Figure:
    """The same over minutes, at the median rate of each run, the mean of a variant's seeds."""
    figure, panels = panels_of(runs_of(suite, folders))
    for axes, _, runs in panels:
        took = 60 * runs.groupby("label", observed=True)["hours"].mean()
        for index, label in enumerate(suite.labels.values()):
            if len(own := runs["result"][runs["label"] == label]):
                draw_curves(axes, own, label, f"C{index}", took[label] / own.iloc[0].steps)
        axes.set_xlim(0, took.max())
        axes.xaxis.set_major_formatter("{x:g}")
    figure.supxlabel("minutes")
    return figure


def healthy_run(suite: Suite, folders: Folders) -> Figure:
    """Of the run with the median score some metrics, and where they belong."""
    runs = by_environment(suite.name, "", folders)[next(iter(suite.environments))]
    result = sorted(runs, key=lambda x: x.record["score"])[len(runs) // 2]
    figure, panels = one_panel_each([*HEALTHY])
    for axes, (metric, band) in zip(panels, HEALTHY.items(), strict=True):
        axes.plot(*result.column(metric.partition("/")[2]), color="C0", linewidth=1)
        axes.axhspan(*band, color="C2", alpha=0.15, label="healthy")
    panels[2].set_ylim(-0.5, 1)  # it begins far below 0
    return figure


# --- Rows ---


def normalized(suite: Suite, folders: Folders) -> Figure:
    """Average normalized scores beside those of the paper, a row for each variant.

    Ours have their intervals; the marker is hollow where there is none.
    """
    scores = tables.normalized(suite, folders)
    values = tables.averages(scores)
    if not values:
        raise BenchmarkError(f"No run of {suite.name} can be compared yet.")
    axes = Figure(figsize=(9, 1.1 + 0.24 * len(values))).subplots()
    for row, (value, ends) in enumerate(values.values()):
        unclear = ends and ends[0] <= 0 <= ends[1]
        color, label = ("0.65", "ours, with 0 in the interval") if unclear else ("C0", "ours")
        fill = {"markerfacecolor": color if ends else "white", "markersize": 6.5}
        axes.plot(value, row, "o", color=color, label=label, **fill)
        if ends:
            axes.plot(ends, [row, row], color=color, linewidth=1.2, zorder=1)
    axes.axvline(0, color=PPO2, linewidth=0.8)
    axes.set_yticks(range(len(values)), values)
    axes.set_ylim(len(values) - 0.5, -0.5)
    paper, style = tables.paper_scores(suite), {"color": "black", "markersize": 5, "zorder": 4}
    theirs = [paper[x] for x in values]
    axes.plot(theirs, range(len(values)), "x", label="paper, 21 runs in 7 environments", **style)
    about = f"average score in {len(scores.columns)} environments"
    axes.set_xlabel(f"{about}, 0: random, 1: best run")
    return axes.figure


# --- Files ---

# By names in the entries of suites.
FIGURES = {
    "curves": curves,
    "minutes": minutes,
    "three": functools.partial(curves, environments=THREE),
    "health": healthy_run,
    "normalized": normalized,
}


def draw(suite: Suite, name: str, folders: Folders, place: Path = FOLDER) -> Path:
    """Draw a figure of a suite and return its path; the first one has the suite's name alone.

    `made_from.json` next to the figures has a hash for each, of its data and of the code that drew
    it. A figure whose hash is still the same is not drawn again.

    Raises:
        BenchmarkError: there is nothing to be drawn yet.
    """
    if not done(suite.name, folders):
        raise BenchmarkError(f"No run of {suite.name} is finished.")
    path = place / f"{suite.name}{f'_{name}' * (name != suite.figures[0])}.png"
    hashes, new = place / "made_from.json", made_from(suite, folders)
    known = json.loads(hashes.read_text()) if hashes.exists() else {}
    if not path.exists() or known.get(path.name) != new:
        save(lambda: FIGURES[name](suite, folders), path)
        known[path.name] = new
        write_text(hashes, json.dumps(known, indent=1, sort_keys=True) + "\n")
    return path


def made_from(suite: Suite, folders: Folders) -> str:
    """A hash of what a suite's figures show, of published numbers, and of the code that draws."""
    shown = {x for x, _ in suite.labels} | {suite.name}
    results = [folders.results / f"{x}.{kind}" for x in sorted(shown) for kind in ("jsonl", "csv")]
    found = hashlib.sha256(repr(suite).encode())
    for path in [*results, *sorted(REFERENCE.iterdir()), *map(Path, CODE)]:
        found.update(path.read_bytes() if path.exists() else b"")
    return found.hexdigest()
