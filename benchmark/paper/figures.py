"""Figures of suites: learning curves with bands and a thin line per seed, rows with intervals."""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.lab import check, plots, statistics
from benchmark.lab.definitions import Folders, Suite
from benchmark.lab.plots import draw_curves, one_panel_each, save
from benchmark.lab.provenance import ROOT, BenchmarkError
from benchmark.lab.results import by_environment, done, runs_of, write_text
from benchmark.paper import health, rlhf, tables
from benchmark.paper.suites import BY_TABLE
from benchmark.paper.suites.common import THREE
from benchmark.paper.suites.grpo import TRIES
from benchmark.paper.tables import REFERENCE, reference

FOLDER = ROOT / "benchmark" / "figures"
CODE = [__file__, *(x.__file__ for x in (plots, statistics, tables, health, rlhf))]
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


def panels_of(
    runs: pd.DataFrame, width: int = 3, counted: bool = False
) -> tuple[Figure, Iterator[tuple[Axes, str, pd.DataFrame]]]:
    """A figure with a panel for each environment, and the runs that belong there."""
    groups, titles = dict(iter(runs.groupby("environment", sort=False))), []
    for name, own in groups.items():
        seeds = " + ".join(map(str, own.groupby("label", observed=True).size().unique()))
        titles.append(f"{name}\n{seeds} seed{'s' * (seeds != '1')}" if counted else name)
    figure, panels = one_panel_each(titles, width)
    figure.supylabel("episodic return in training")
    return figure, zip(panels, groups, groups.values())


def draw_variants(axes: Axes, suite: Suite, runs: pd.DataFrame, thin: bool = True) -> None:
    """The curves of those variants of a suite and its baseline that have runs."""
    for index, label in enumerate(suite.labels.values()):
        if len(own := runs["result"][runs["label"] == label]):
            draw_curves(axes, own, label, f"C{index}", thin)


def curves(
    suite: Suite,
    folders: Folders,
    shown: slice = slice(None),
    environments: Sequence[str] = (),
) -> Figure:
    """One panel per environment, or per one of those given, with variants of a suite."""
    runs, labels = runs_of(suite, folders, environments), [*suite.labels.values()][shown]
    figure, panels = panels_of(runs[runs["label"].isin(labels)], counted=True)
    for axes, environment, runs in panels:
        draw_published(axes, environment)
        draw_variants(axes, suite, runs)
    return figure


def baselines(suite: Suite, folders: Folders) -> Figure:
    """The paper's Figure 3: the means of all variants with their intervals, and its readings."""
    figure, panels = panels_of(runs_of(suite, folders, suite.shared), 4)
    for axes, environment, runs in panels:
        draw_variants(axes, suite, runs, thin=False)
        for label, mean in tables.readings(suite, environment).items():
            color = f"C{[*suite.labels.values()].index(label)}"
            axes.plot(suite.total_timesteps, mean, **TICK, color=color)
    return figure


def trace(suite: Suite, folders: Folders) -> Figure:
    """The KL after the updates of the adaptive penalty, beside its target."""
    runs = runs_of(suite, folders)
    figure, panels = panels_of(runs[runs["variant"].isin(suite.variants)])
    for axes, _, runs in panels:
        for result in runs["result"]:
            axes.plot(*result.column("kl_after"), color="C1", linewidth=0.7, label="each seed")
        settings = result.record["settings"]
        target = settings["penalty_kl"]
        axes.axhline(target, color="black", linewidth=0.8, label="target")
        band = {"color": PPO2, "alpha": 0.15, "label": "within a factor 1.5: beta stays"}
        axes.axhspan(target / 1.5, target * 1.5, **band)
        axes.set_yscale("log")
    figure.supylabel("KL(old || new), mean of five updates")
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


def rows_with_ours(suite: Suite, values: dict[str, statistics.Estimate]) -> Axes:
    """A row per label: our value and its interval; the marker is hollow where there is none."""
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
    return axes


def draw_others(
    axes: Axes, labels: Iterable[str], values: Mapping[str, float], source: str, mark: str
) -> None:
    """Somebody's numbers in the rows of ours."""
    known = [(values[x], row) for row, x in enumerate(labels) if x in values]
    style = {"color": "black", "markersize": 5, "zorder": 4, "label": source}
    if known:
        axes.plot(*zip(*known), mark, **style)


def normalized(suite: Suite, folders: Folders) -> Figure:
    """Average normalized scores beside those of the paper."""
    scores = tables.normalized(suite, folders)
    values = tables.averages(scores)
    axes = rows_with_ours(suite, values)
    paper = tables.paper_scores(suite)
    draw_others(axes, values, paper, "paper, 21 runs in 7 environments", "x")
    about = f"average score in {len(scores.columns)} environments"
    axes.set_xlabel(f"{about}, 0: random, 1: best run")
    return axes.figure


def effects(suite: Suite, folders: Folders) -> Figure:
    """What each detail is worth, with each environment and what others say of it."""
    scores, values = tables.comparable(suite, folders), tables.effects(suite, folders)
    if all(ends for _, ends in values.values()):  # else the order would be mostly chance
        values = dict(sorted(values.items(), key=lambda x: x[1].value))
    axes = rows_with_ours(suite, values)
    means = scores.groupby("label", observed=True).mean()
    base = means.loc[suite.labels[suite.baseline]]
    for environment, mark in zip(scores, "^sDvPX*"):
        # On top: the median of three is one of them.
        style = {"color": "C1", "markersize": 4, "zorder": 3, "label": environment}
        style |= {"markeredgecolor": "black", "markeredgewidth": 0.4}
        points = ((means - base) / base.abs()).loc[[*values], environment]
        axes.plot(points, range(len(values)), mark, **style)
    rows = reference("effects")
    rows = rows[rows["environment"].isin([x.partition("-")[0] for x in scores])]
    rows = rows.assign(change=rows["changed"] / rows["default"] - 1)
    for mark, (source, own) in zip("x+", rows.groupby("source", sort=False)):
        changes = own.groupby("variant")["change"].median()  # over those that they have
        others = {x: changes[name] for (_, name), x in suite.labels.items() if name in changes}
        draw_others(axes, values, others, source, mark)
    found = tables.others_say(suite, "literature", "found")
    for row, text in enumerate(map(found.get, values)):
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7}
        axes.text(1.02, row, text, **place)
    axes.xaxis.set_major_formatter("{x:+.0%}")
    axes.set_xlabel("change of the mean score: median over environments, 95 % interval")
    return axes.figure


# --- Bugs ---


def broken_curves(suite: Suite, folders: Folders) -> Figure:
    """A panel per bug in the suite's first environment, with the healthy runs behind it."""
    environment = next(iter(suite.environments))
    known = [x for own in health.trials(folders).values() for x in own if x.suite is suite]
    known = [x for x in known if x.environment == environment]
    figure, panels = one_panel_each([x.bug.label for x in known], 5)
    for axes, trial in zip(panels, known):
        axes.title.set_fontsize(6)
        draw_curves(axes, trial.healthy, "healthy", "0.5")
        draw_curves(axes, trial.broken, "with the bug", "C3")
    figure.supylabel(f"episodic return in training, {environment}")
    return figure


# --- RLHF ---


def frontier(_: Suite, folders: Folders) -> Figure:
    """Gold over the KL of all models: dots are seeds, lines join their means in order of the KL.

    Where a reward model is over-optimized, lines leave the picture below.
    """
    suites = BY_TABLE["rlhf"] + BY_TABLE["models"]
    rows = rlhf.models(pd.concat([runs_of(x, folders) for x in suites])["result"])
    rows = rows[rows["method"] != "SFT"]
    axes = Figure(figsize=(6.4, 3.6)).subplots()
    for index, (name, own) in enumerate(rows.groupby("method", sort=False)):
        color = "k" if name == "best of n" else f"C{index}"
        means = own.groupby("penalty")[["KL", "gold"]].mean().sort_values("KL")
        root = np.sqrt(own["KL"].clip(lower=0))
        axes.plot(root, own["gold"], ".", color=color, markersize=3, alpha=0.5)
        line = {"color": color, "marker": "os"[index // 10], "markersize": 4, "linewidth": 1.2}
        axes.plot(np.sqrt(means["KL"]), means["gold"], label=name, **line)
    axes.set(xlim=(0.5, 3.7), ylim=(0.5, 2.1), xlabel="square root of the KL to the SFT model")
    axes.set_ylabel("gold reward, standard deviations of the SFT model")
    return axes.figure


# --- GRPO with a verifiable reward ---


def sums(suite: Suite, folders: Folders) -> Figure:
    """Means over seeds, with intervals: rewards and groups in training, then pass@k held out."""
    runs = runs_of(suite, folders)["result"]
    known = rlhf.models(runs)
    rewards, groups, tries = Figure(figsize=(9.6, 3.2)).subplots(1, 3)
    titles = ("right in training", "groups without spread", "pass@k, held out")
    for axes, title in zip((rewards, groups, tries), titles):
        axes.set_title(title)
    for index, (name, label) in enumerate(rlhf.LABELS.items()):
        style = {"color": f"C{index - 1}" if index else "k", "label": label, "linewidth": 1.2}
        columns = ((rewards, "reward"), (groups, "without_spread")) if index else ()
        for axes, column in columns:
            found = [pd.Series(y, x) for x, y in (run.column(column, name) for run in runs)]
            smooth = pd.DataFrame(found).mean().rolling(5, min_periods=1).mean()  # every second one
            axes.plot(smooth, **style)
            axes.set_xlabel("updates, each the mean of ten")
        own = known[known["model"] == name][[f"pass@{k}" for k in TRIES]]
        tries.plot(TRIES, own.mean(), marker=".", **style)
    tries.set_xscale("log", base=2)
    tries.set_xticks(TRIES, TRIES)
    tries.set_xlabel("k responses, of which one must be right")
    return tries.figure


# --- Files ---

# By names in the entries of suites.
FIGURES = {
    "curves": curves,
    "first": functools.partial(curves, shown=slice(1)),
    "three": functools.partial(curves, shown=slice(1), environments=THREE),
    "baselines": baselines,
    "health": healthy_run,
    "trace": trace,
    "normalized": normalized,
    "effects": effects,
    "bugs": broken_curves,
    "frontier": frontier,
    "sums": sums,
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
    alike = BY_TABLE["rlhf"] + BY_TABLE["models"] if "frontier" in suite.figures else []
    shown = {x for x, _ in suite.labels} | {x.name for x in [suite, *alike]}
    results = [folders.results / f"{x}.{kind}" for x in sorted(shown) for kind in ("jsonl", "csv")]
    found = hashlib.sha256(repr(suite).encode())
    for path in [*results, *sorted(REFERENCE.iterdir()), *map(Path, CODE)]:
        found.update(path.read_bytes() if path.exists() else b"")
    return found.hexdigest()
