"""Learning curves with bands and one thin line per seed, beside published ones."""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report, statistics
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import Result, by_environment, reference
from benchmark.runs import BINS, Folders
from benchmark.suites import SUITES

FIGURES = ROOT / "benchmark" / "figures"
PPO2 = "0.35"  # gray, so that color is ours
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw_curves(axes: Axes, results: list[Result], label: str, color: str) -> None:
    """Mean over seeds, its 95 % bootstrap interval where there are two or more, and each seed."""
    total = max(x.record["settings"]["total_timesteps"] for x in results)
    grid = np.linspace(0, total, BINS + 1)[1:]
    curves = statistics.on_grid([x.column("return") for x in results], grid)
    for curve in curves:
        axes.plot(grid, curve, color=color, linewidth=0.5, alpha=0.4)
    count = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
    axes.plot(grid, curves.mean(0), color=color, linewidth=1.6, label=f"{label}, {count}")
    if len(curves) > 1:
        ends = np.array([statistics.interval([x], np.mean) for x in curves.T])
        axes.fill_between(grid, ends[:, 0], ends[:, 1], color=color, alpha=0.2, linewidth=0)


def draw_ppo2(axes: Axes, environment: str) -> None:
    """The curve of baselines' benchmark page, on version 2 of the environment."""
    name = environment.partition("-")[0]
    rows = [row for row in reference("ppo2_curves") if row["environment"] == name]
    if not rows:
        return
    steps, mean, low, high = (
        np.array([float(row[key]) for row in rows])
        for key in ("global_step", "return", "low", "high")
    )
    axes.plot(
        steps, mean, color=PPO2, linewidth=1.2, linestyle="--", label="ppo2 2018 (v2), 6 seeds"
    )
    axes.fill_between(steps, low, high, color=PPO2, alpha=0.12, linewidth=0)


def draw_readings(axes: Axes, environment: str) -> None:
    """Final values that others read off the paper's Figure 3."""
    name = environment.partition("-")[0]
    for row in reference("scores"):
        if row["source"].startswith("paper, Figure 3") and row["environment"] == name:
            axes.plot(
                int(row["steps"]),
                float(row["mean"]),
                color="black",
                marker="_",
                markersize=9,
                linestyle="none",
                clip_on=False,
                label="paper 2017 (v1), read off",
            )


def plot_suite(suite: str, folders: Folders, figures: Path = FIGURES) -> Path:
    """Draw one panel per environment with all variants of a suite and its baseline.

    Raises:
        BenchmarkError: no run of the suite is finished.
    """
    names = {(suite, x): y.label or "ours" for x, y in SUITES[suite].variants.items()}
    baseline = SUITES[suite].baseline
    if baseline and baseline not in names:
        names = {baseline: SUITES[baseline[0]].variants[baseline[1]].label or "ours", **names}
    found = {key: by_environment(*key, folders) for key in names}
    environments = [
        env
        for env in SUITES[suite].environments
        if any(env in found[x] for x in found if x[0] == suite)
    ]
    if not environments:
        raise BenchmarkError(f"No run of {suite} is finished.")
    columns = min(3, len(environments))
    rows = -(-len(environments) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows, columns, figsize=(3.2 * columns, 2.4 * rows), squeeze=False
        )
        for axes, environment in zip(grid.flat, environments, strict=False):
            draw_ppo2(axes, environment)
            draw_readings(axes, environment)
            for index, (key, label) in enumerate(names.items()):
                if environment in found[key]:
                    draw_curves(axes, found[key][environment], label, f"C{index}")
            axes.set_title(environment)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x else "0")
            axes.margins(x=0)
            legend(axes)
        for axes in grid.flat[len(environments) :]:
            axes.axis("off")
        figure.supxlabel("environment steps")
        figure.supylabel("episodic return in training")
        return save(figure, figures / f"{suite}.png")


def plot_rows(
    path: Path,
    rows: dict[str, tuple[float, tuple[float, float] | None]],
    label: str,
    zero: str,
    paper: dict[str, float],
) -> Path:
    """A value with its interval per row, beside the paper's; `zero` says what 0 means."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 0.9 + 0.25 * len(rows)))
        for row, (name, (value, ends)) in enumerate(rows.items()):
            axes.plot(value, row, "o", color="C0", markersize=4, label="ours")
            if ends:
                axes.plot(ends, [row, row], color="C0", linewidth=1.2)
            if name in paper:
                axes.plot(paper[name], row, "x", color="black", markersize=4, label="paper")
        axes.axvline(0, color=PPO2, linewidth=0.8)
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel(f"{label}; 0: {zero}")
        if paper:
            legend(axes)
        return save(figure, path)


def legend(axes: Axes) -> None:
    """A legend with each name once."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=6)


def plot_effects(suite: str, folders: Folders, figures: Path = FIGURES) -> Path:
    """Forest plot: the effect of each variant with its interval, the default at zero.

    Raises:
        BenchmarkError: no variant can be compared with the default yet.
    """
    effects = report.effects(suite, folders)
    if not effects:
        raise BenchmarkError(f"No run of {suite} can be compared with the default yet.")
    rows = {SUITES[suite].variants[name].label: effect for name, effect in effects.items()}
    label = "relative change of the final return"
    return plot_rows(figures / f"{suite}.png", rows, label, "the default", paper={})


def plot_normalized(suite: str, folders: Folders, figures: Path = FIGURES) -> Path:
    """The average normalized score of each setting beside that of the paper's Table 1.

    Raises:
        BenchmarkError: no run of the suite is finished.
    """
    scores, rows, paper = report.normalized_scores(suite, folders), {}, {}
    for (name, strata), printed in zip(scores.items(), reference("table1"), strict=True):
        label = SUITES[suite].variants[name].label
        if strata:
            ends = statistics.interval(strata, statistics.mean_of_strata)
            rows[label] = (float(statistics.mean_of_strata(*strata)), ends)
            paper[label] = float(printed["score"])
    if not rows:
        raise BenchmarkError(f"No run of {suite} is finished.")
    path = figures / f"{suite}.png"
    return plot_rows(path, rows, "average normalized score", "random actions", paper)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure without the name of the program, so that equal figures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


# Suites whose figure is not one of learning curves.
DRAW: dict[str, Callable[[str, Folders], Path]] = {
    "table1": plot_normalized,
    "table1_ppo2": plot_normalized,
    "ablation": plot_effects,
}
