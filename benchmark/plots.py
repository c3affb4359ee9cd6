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
    axes.set_xlim(0, total)
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
    which = "10M steps" if name == "Pong" else "v2, 6 seeds"
    axes.plot(steps, mean, color=PPO2, linewidth=1.2, linestyle="--", label=f"ppo2 2018 ({which})")
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
    with plt.rc_context(STYLE):
        figure, panels = one_panel_each(environments)
        for environment, axes in panels.items():
            draw_ppo2(axes, environment)
            draw_readings(axes, environment)
            for index, (key, label) in enumerate(names.items()):
                if environment in found[key]:
                    draw_curves(axes, found[key][environment], label, f"C{index}")
            legend(axes)
        figure.supylabel("episodic return in training")
        return save(figure, figures / f"{suite}.png")


def one_panel_each(environments: list[str]) -> tuple[Figure, dict[str, Axes]]:
    """A figure with a panel over environment steps for each environment, three in a row."""
    columns = min(3, len(environments))
    rows = -(-len(environments) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.4 * rows), squeeze=False)
    for axes in grid.flat[len(environments) :]:
        axes.axis("off")
    panels = dict(zip(environments, grid.flat, strict=False))
    for environment, axes in panels.items():
        axes.set_title(environment)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x else "0")
        axes.margins(x=0)
    figure.supxlabel("environment steps")
    return figure, panels


def plot_kl(suite: str, folders: Folders, figures: Path = FIGURES) -> Path:
    """The KL after each update of the adaptive penalty, beside its target.

    Raises:
        BenchmarkError: no run of the suite is finished.
    """
    (variant,) = SUITES[suite].variants
    found = by_environment(suite, variant, folders)
    if not found:
        raise BenchmarkError(f"No run of {suite} is finished.")
    with plt.rc_context(STYLE):
        figure, panels = one_panel_each(list(found))
        for environment, axes in panels.items():
            for result in found[environment]:
                axes.plot(*result.column("kl/after"), color="C1", linewidth=0.7, label="each seed")
                target = result.record["settings"]["target_kl"]
            axes.axhline(target, color="black", linewidth=0.8, label="target")
            band = "within a factor 1.5: beta stays"
            axes.axhspan(target / 1.5, target * 1.5, color=PPO2, alpha=0.15, label=band)
            axes.set_yscale("log")
            legend(axes)
        figure.supylabel("KL(old || new) after the update")
        return save(figure, figures / f"{suite}_trace.png")


def plot_frontier(suite: str, folders: Folders, figures: Path = FIGURES) -> Path:
    """Proxy and gold reward over the distance from the SFT model, a line per seed and PPO run.

    Raises:
        BenchmarkError: no run of the suite is finished.
    """
    records = [x for results in by_environment(suite, "", folders).values() for x in results]
    if not records:
        raise BenchmarkError(f"No run of {suite} is finished.")
    runs = list(dict.fromkeys(row["run"] for row in records[0].curve))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(8, 3))
        for axes, reward in zip(panels, ("proxy", "gold"), strict=True):
            for result in records:
                for color, run in enumerate(runs):
                    rows = [row for row in result.curve if row["run"] == run]
                    distance = [max(float(x["objective/kl"]), 0) ** 0.5 for x in rows]
                    values = [float(x[f"objective/{reward}"]) for x in rows]
                    axes.plot(distance, values, f"C{color}.-", lw=0.5, ms=2, label=run)
                best = [x for name, x in result.record["models"].items() if "best" in name]
                distance = [x["objective/kl"] ** 0.5 for x in best]
                values = [x[f"objective/{reward}"] for x in best]
                axes.plot(distance, values, "k.-", lw=0.5, ms=3, label="best of n")
            axes.axhline(0, color=PPO2, linewidth=0.8)
            axes.set(title=f"{reward} reward", xlabel="square root of the KL to the SFT model")
            legend(axes)
        panels[0].set_ylabel("standard deviations of the SFT model")
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


# Suites whose figures are not, or not only, one of learning curves.
DRAW: dict[str, tuple[Callable[[str, Folders], Path], ...]] = {
    "kl_vs_clip": (plot_suite, plot_kl),
    "table1": (plot_normalized,),
    "table1_ppo2": (plot_normalized,),
    "ablation": (plot_effects,),
    "rlhf": (plot_frontier,),
}


def plot_all(suite: str, folders: Folders) -> list[Path]:
    """Draw every figure of a suite.

    Raises:
        BenchmarkError: its results are not enough for a figure.
    """
    return [draw(suite, folders) for draw in DRAW.get(suite, (plot_suite,))]
