"""Learning curves with bands and one thin line per seed, beside published ones."""

import hashlib
from collections.abc import Callable, Iterable, Sized
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmark import report, statistics
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import Result, by_environment, reference
from benchmark.runs import BINS, Folders
from benchmark.suites import SUITES

FIGURES = ROOT / "benchmark" / "figures"
PPO2 = "0.35"  # gray, so that color is ours
LEGEND_INCHES = 1.9  # width of a legend's column
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw_curves(axes: Axes, results: list[Result], label: str, color: str) -> None:
    """Mean over seeds, its 95 % bootstrap interval where there are three or more, and each seed."""
    total = max(x.record["settings"]["total_timesteps"] for x in results)
    grid = np.linspace(0, total, BINS + 1)[1:]
    curves = statistics.on_grid([x.column("return") for x in results], grid)
    for curve in curves:
        axes.plot(grid, curve, color=color, linewidth=0.5, alpha=0.4)
    axes.plot(grid, curves.mean(0), color=color, linewidth=1.6, label=label)
    axes.set_xlim(0, total)
    ends = [statistics.interval([x], np.mean) for x in curves.T]
    if all(ends):
        ends = np.array(ends)
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
    names = {key: label or "ours" for key, label in report.labels(suite).items()}
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
            counts = {len(found[key].get(environment, ())): None for key in names}
            seeds = " + ".join(str(x) for x in counts if x)
            axes.set_title(f"{environment}\n{seeds} seed{'s' * (seeds != '1')}")
        figure.supylabel("episodic return in training")
        legend(figure)
        return save(figure, figures / f"{suite}.png", suite, folders)


def one_panel_each(environments: list[str]) -> tuple[Figure, dict[str, Axes]]:
    """A figure with a panel over environment steps for each environment, three in a row."""
    columns = min(3, len(environments))
    rows = -(-len(environments) // columns)
    size = (3.2 * columns, 2.4 * rows) if len(environments) > 1 else (6.4, 3.2)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
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
    """The KL after the updates of the adaptive penalty, beside its target.

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
        figure.supylabel("KL(old || new), mean of five updates")
        legend(figure)
        return save(figure, figures / f"{suite}_trace.png", suite, folders)


def plot_frontier(suite: str, folders: Folders, figures: Path = FIGURES) -> Path:
    """Proxy and gold reward over the distance from the SFT model: each seed thin, the mean thick.

    Raises:
        BenchmarkError: no run of the suite is finished.
    """
    (variant,) = SUITES[suite].variants
    records = [x for results in by_environment(suite, variant, folders).values() for x in results]
    if not records:
        raise BenchmarkError(f"No run of {suite} is finished.")
    runs = list(dict.fromkeys(row["run"] for row in records[0].curve))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(8, 3))
        for axes, reward in zip(panels, ("proxy", "gold"), strict=True):

            def draw(paths: list[list[dict]], color: str, label: str, axes=axes, reward=reward):
                """Paths of rows with KL and reward, one per seed, of equal length; a dot ends them.

                Returns the mean path.
                """
                keys = ("objective/kl", f"objective/{reward}")
                kl, values = np.array(
                    [[[float(row[key]) for row in path] for path in paths] for key in keys]
                )
                distance = np.sqrt(np.maximum(kl, 0))
                axes.plot(distance.T, values.T, color, linewidth=0.4, alpha=0.5)
                x, y = distance.mean(0), values.mean(0)
                axes.plot(x, y, color, linewidth=1.6, label=label)
                axes.plot(x[-1], y[-1], "o", color=color, markersize=5)
                return x, y

            for color, run in enumerate(runs):
                paths = [[row for row in x.curve if row["run"] == run] for x in records]
                draw(paths, f"C{color}", run)
            models = [x.record["models"] for x in records]
            best = [name for name in models[0] if name.startswith("best-of-")]
            paths = [[x[name] for name in best] for x in models]
            distances, rewards = draw(paths, "k", "best-of-n")
            for index in (0, -1):
                place = {"xytext": (-3, 4), "textcoords": "offset points", "ha": "right"}
                n = best[index].removeprefix("best-of-")
                axes.annotate(n, (distances[index], rewards[index]), **place)
            axes.axhline(0, color=PPO2, linewidth=0.8)
            axes.set(title=f"{reward} reward", xlabel="square root of the KL to the SFT model")
        panels[0].set_ylabel("standard deviations of the SFT model")
        legend(figure)
        return save(figure, figures / f"{suite}.png", suite, folders)


def plot_rows(
    rows: dict[str, tuple[float, tuple[float, float] | None]],
    label: str,
    others: dict[str, dict[str, float]],
) -> Axes:
    """A value with its interval per row, hollow where there is none, beside others' by source."""
    figure, axes = plt.subplots(figsize=(6, 1.1 + 0.22 * len(rows)))
    for row, (name, (value, ends)) in enumerate(rows.items()):
        fill = "C0" if ends else "white"
        axes.plot(value, row, "o", color="C0", markerfacecolor=fill, markersize=4, label="ours")
        if ends:
            axes.plot(ends, [row, row], color="C0", linewidth=1.2, zorder=1)
        for marker, (source, values) in zip("x+", others.items()):
            if name in values:
                axes.plot(values[name], row, marker, color="black", markersize=5, label=source)
    axes.axvline(0, color=PPO2, linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    legend(figure)
    return axes


def legend(figure: Figure) -> None:
    """One legend above all panels, with each name once."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = max(1, int(figure.get_figwidth() / LEGEND_INCHES))
    place = {"loc": "outside upper center", "ncols": min(columns, len(handles))}
    figure.legend(handles.values(), handles.keys(), **place)


def runs_behind(rows: Iterable[list[Sized]]) -> str:
    """How many runs, by environment, stand behind each row of a figure."""
    rows = list(rows)
    counts = sorted({sum(map(len, strata)) for strata in rows})
    runs = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    plurals = ["s" * (x != 1) for x in (counts[-1], len(rows[0]))]
    return f"{runs} run{plurals[0]} in {len(rows[0])} environment{plurals[1]} per row"


def plot_effects(suite: str, folders: Folders, figures: Path = FIGURES) -> Path:
    """Forest plot: the effect of each variant, worst first if all have intervals, default at zero.

    Raises:
        BenchmarkError: no variant can be compared with the default yet.
    """
    effects = report.effects(suite, folders)
    if not effects:
        raise BenchmarkError(f"No run of {suite} can be compared with the default yet.")
    labels = {name: SUITES[suite].variants[name].label for name in effects}
    order = list(effects)
    if all(ends for _, ends in effects.values()):  # else the order would be mostly chance
        order.sort(key=lambda x: effects[x][0])
    rows = {labels[name]: effects[name] for name in order}
    sources = {
        "engstrom2020": "Engstrom et al. (tuned apart)",
        "andrychowicz2021": "Andrychowicz et al. (95th percentile of a sweep)",
    }
    environments = report.shared_environments(suite, folders)
    published = report.published_effects(suite, environments)
    others = {
        label: {labels[name]: x for name, x in published[source].items() if name in labels}
        for source, label in sources.items()
        if source in published
    }
    strata = report.effect_strata(suite, folders)
    label = f"change of the final return; {runs_behind(x[::2] for x in strata.values())}"
    with plt.rc_context(STYLE):
        axes = plot_rows(rows, label, others)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        return save(axes.figure, figures / f"{suite}.png", suite, folders)


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
    label = f"average normalized score; {runs_behind(filter(None, scores.values()))}"
    label += "\n0: random actions, 1: best run of ours, of the paper's"
    with plt.rc_context(STYLE):
        axes = plot_rows(rows, label, {"paper, 21 runs in 7 environments": paper})
        return save(axes.figure, figures / f"{suite}.png", suite, folders)


def digest(suite: str, folders: Folders) -> str:
    """SHA-256 of the results that the figures of a suite show."""
    suites = {suite, (SUITES[suite].baseline or (suite,))[0]}
    found = (path for name in suites for path in (folders.results / name).glob("**/seed*"))
    paths = [path for path in found if path.suffix in (".json", ".csv")]
    content = b"".join(path.read_bytes() for path in sorted(paths))
    return hashlib.sha256(content).hexdigest()


def save(figure: Figure, path: Path, suite: str, folders: Folders) -> Path:
    """Write a figure that knows its results, but not its program: equal figures, equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Software": None, "Source": f"results {digest(suite, folders)}"}
    figure.savefig(path, dpi=130, metadata=metadata)
    plt.close(figure)
    return path


# Suites whose figures are not, or not only, one of learning curves.
DRAW: dict[str, tuple[Callable[[str, Folders], Path], ...]] = {
    "kl_vs_clip": (plot_suite, plot_kl),
    "table1": (plot_normalized,),
    "table1_ppo2": (plot_normalized,),
    "ablation": (plot_effects,),
    "rlhf": (plot_frontier,),
    "second_edition_rlhf": (plot_frontier,),
}


def plot_all(suite: str, folders: Folders) -> list[Path]:
    """Draw every figure of a suite.

    Raises:
        BenchmarkError: its results are not enough for a figure.
    """
    return [draw(suite, folders) for draw in DRAW.get(suite, (plot_suite,))]
