"""Figures of suites: learning curves with bands and a thin line per seed, rows with intervals."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from benchmark import statistics, tables
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import REFERENCE, Result, by_environment, by_variant, reference
from benchmark.rivals import plot_rivals
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
# Results that a figure shows: of the suite and of its baseline, by label and environment.
Found = dict[str, dict[str, list[Result]]]


# --- Over environment steps ---


def one_panel_each(titles: list[str], width: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure with a panel over environment steps for each title, so many in a row."""
    columns = min(width, len(titles))
    rows = -(-len(titles) // columns)
    size = (3.2 * columns, 2.4 * rows) if len(titles) > 1 else (6.4, 3.2)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axes in grid.flat[len(titles) :]:
        axes.axis("off")
    for title, axes in zip(titles, grid.flat, strict=False):
        axes.set_title(title)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x else "0")
        axes.margins(x=0)
    figure.supxlabel("environment steps")
    return figure, list(grid.flat[: len(titles)])


def draw_curves(axes: Axes, results: list[Result], label: str, color: str) -> None:
    """Mean over seeds, its 95 % bootstrap interval where there are three or more, and each seed."""
    total = max(x.record["settings"]["total_timesteps"] for x in results)
    grid = np.linspace(0, total, BINS + 1)[1:]
    known = [points for points in (x.column("return") for x in results) if len(points[0])]
    axes.set_xlim(0, total)
    if not known:  # no episode has ended
        return
    curves = np.array([np.interp(grid, steps, returns) for steps, returns in known])
    axes.plot(grid, curves.T, color=color, linewidth=0.5, alpha=0.4)
    axes.plot(grid, curves.mean(0), color=color, linewidth=1.6, label=label)
    ends = [statistics.estimate([x], np.mean).ends for x in curves.T]
    if all(ends):
        axes.fill_between(grid, *np.transpose(ends), color=color, alpha=0.2, linewidth=0)


def draw_published(axes: Axes, environment: str) -> None:
    """The curve of baselines' benchmark page; final values read off the paper's Figure 3."""
    name = environment.partition("-")[0]
    rows = [row for row in reference("ppo2_curves") if row["environment"] == name]
    if rows:
        keys = ("global_step", "return", "low", "high")
        steps, mean, low, high = ([float(row[key]) for row in rows] for key in keys)
        label = f"ppo2 2018 ({'10M steps' if name == 'Pong' else 'v2, 6 seeds'})"
        axes.plot(steps, mean, color=PPO2, linewidth=1.2, linestyle="--", label=label)
        axes.fill_between(steps, low, high, color=PPO2, alpha=0.12, linewidth=0)
    tick = {"color": "black", "marker": "_", "markersize": 9, "linestyle": "none"}
    for row in reference("scores"):
        if row["source"].startswith("paper, Figure 3") and row["environment"] == name:
            place = int(row["steps"]), float(row["mean"])
            axes.plot(*place, **tick, clip_on=False, label="paper 2017 (v1), read off")


def plot_curves(suite: str, found: Found, folders: Folders) -> Figure:
    """One panel per environment with all variants of a suite and its baseline."""
    titles = {}
    shown = (env for env in SUITES[suite].environments if any(env in x for x in found.values()))
    for environment in shown:
        counts = dict.fromkeys(len(x.get(environment, ())) for x in found.values())
        seeds = " + ".join(str(x) for x in counts if x)
        titles[environment] = f"{environment}\n{seeds} seed{'s' * (seeds != '1')}"
    figure, panels = one_panel_each(list(titles.values()))
    for environment, axes in zip(titles, panels):
        draw_published(axes, environment)
        for index, (label, results) in enumerate(found.items()):
            if environment in results:
                draw_curves(axes, results[environment], label, f"C{index}")
    figure.supylabel("episodic return in training")
    return figure


def plot_trace(suite: str, found: Found, folders: Folders) -> Figure:
    """The KL after the updates of the adaptive penalty, beside its target."""
    *_, ours = found.values()
    figure, panels = one_panel_each(list(ours))
    for axes, results in zip(panels, ours.values()):
        for result in results:
            axes.plot(*result.column("kl_after"), color="C1", linewidth=0.7, label="each seed")
        target = results[0].record["settings"]["target_kl"]
        axes.axhline(target, color="black", linewidth=0.8, label="target")
        band = {"color": PPO2, "alpha": 0.15, "label": "within a factor 1.5: beta stays"}
        axes.axhspan(target / 1.5, target * 1.5, **band)
        axes.set_yscale("log")
    figure.supylabel("KL(old || new), mean of five updates")
    return figure


def plot_health(suite: str, found: Found, folders: Folders) -> Figure:
    """The run with the median score, in TensorBoard's terms, and where its metrics belong."""
    (ours,) = found.values()
    results = sorted(next(iter(ours.values())), key=lambda x: x.record["score"] or 0.0)
    result = results[len(results) // 2]
    bands = {"approx_kl": (0.005, 0.025), "clipfrac": (0.1, 0.3), "explained_variance": (0.5, 1)}
    figure, panels = one_panel_each(["charts/episodic_return", *(f"losses/{x}" for x in bands)], 4)
    for axes, column in zip(panels, ("return", *bands), strict=True):
        axes.plot(*result.column(column), color="C0", linewidth=1)
        if column in bands:
            axes.axhspan(*bands[column], color="C2", alpha=0.15, label="healthy")
    axes.set_ylim(-0.5, 1)  # it begins far below 0
    return figure


# --- RLHF ---


def plot_frontier(suite: str, found: Found, folders: Folders) -> Figure:
    """Proxy and gold reward over the distance from the SFT model; the mean of seeds is thick."""
    *_, ours = found.values()
    results = [x for own in ours.values() for x in own]
    models = [x.record["models"] for x in results]
    best = [name for name in models[0] if name.startswith("best-of-")]
    figure, panels = plt.subplots(1, 2, figsize=(8, 3))
    for axes, reward in zip(panels, ("proxy", "gold"), strict=True):
        for color, stage in enumerate(results[0].curve["stage"].unique()):
            paths = [x.curve.loc[x.curve["stage"] == stage, ["kl", reward]] for x in results]
            draw_paths(axes, paths, f"C{color}", stage)
        keys = "objective/kl", f"objective/{reward}"
        points = [[[x[name][key] for key in keys] for name in best] for x in models]
        path = draw_paths(axes, points, "k", "best-of-n")
        for index in (0, -1):
            place = {"xytext": (-3, 4), "textcoords": "offset points", "ha": "right"}
            axes.annotate(best[index].removeprefix("best-of-"), path[index], **place)
        axes.axhline(0, color=PPO2, linewidth=0.8)
        axes.set(title=f"{reward} reward", xlabel="square root of the KL to the SFT model")
    panels[0].set_ylabel("standard deviations of the SFT model")
    return figure


def draw_paths(axes: Axes, points: list, color: str, label: str) -> np.ndarray:
    """Draw paths (seeds, points, 2) of KL and reward over the root of the KL; return their mean."""
    paths = np.array(points)
    paths[..., 0] = np.sqrt(np.maximum(paths[..., 0], 0))
    axes.plot(*paths.T, color, linewidth=0.4, alpha=0.5)
    mean = paths.mean(0)
    axes.plot(*mean.T, color, linewidth=1.6, label=label)
    axes.plot(*mean[-1], "o", color=color, markersize=5)
    return mean


# --- Rows ---


def rows_with_ours(
    suite: str, values: dict[tables.Name, statistics.Estimate]
) -> tuple[Figure, Axes]:
    """A row per variant: our value and its interval; the marker is hollow where there is none."""
    figure, axes = plt.subplots(figsize=(9, 1.1 + 0.24 * len(values)))
    for row, (value, ends) in enumerate(values.values()):
        unclear = ends and ends[0] <= 0 <= ends[1]
        color, label = ("0.65", "ours, with 0 in the interval") if unclear else ("C0", "ours")
        fill = {"markerfacecolor": color if ends else "white", "markersize": 6.5}
        axes.plot(value, row, "o", color=color, label=label, **fill)
        if ends:
            axes.plot(ends, [row, row], color=color, linewidth=1.2, zorder=1)
    axes.axvline(0, color=PPO2, linewidth=0.8)
    axes.set_yticks(range(len(values)), [tables.labels(suite)[name] for name in values])
    axes.set_ylim(len(values) - 0.5, -0.5)
    return figure, axes


def draw_others(
    axes: Axes, values: dict[tables.Name, statistics.Estimate], others: dict[tuple[str, str], float]
) -> None:
    """Others' numbers, by source and variant, in the rows of ours."""
    rows = {variant: row for row, (_, variant) in enumerate(values)}
    markers = dict(zip(dict.fromkeys(source for source, _ in others), "x+"))
    for (source, variant), value in others.items():
        if variant in rows:
            style = {"color": "black", "markersize": 5, "zorder": 4, "label": source}
            axes.plot(value, rows[variant], markers[source], **style)


def plot_normalized(suite: str, found: Found, folders: Folders) -> Figure:
    """Average normalized scores beside those of the paper."""
    values, environments = compared(suite, folders)
    source = "paper, 21 runs in 7 environments"
    paper = {(source, x): float(score) for x, score in by_variant("table1", "score").items()}
    figure, axes = rows_with_ours(suite, values)
    draw_others(axes, values, paper)
    axes.set_xlabel(f"average score in {len(environments)} environments, 0: random, 1: best run")
    return figure


def plot_effects(suite: str, found: Found, folders: Folders) -> Figure:
    """What each detail is worth, with each environment and what others say of it."""
    values, environments = compared(suite, folders)
    if all(ends for _, ends in values.values()):  # else the order would be mostly chance
        values = dict(sorted(values.items(), key=lambda x: x[1].value))
    figure, axes = rows_with_ours(suite, values)
    each = tables.effects_in_each(suite, folders)
    for index, (environment, mark) in enumerate(zip(environments, "^sDvPX*")):
        points = [each[name][index] for name in values]
        # On top: the median of three is one of them.
        style = {"color": "C1", "markersize": 4, "zorder": 3, "label": environment}
        style |= {"markeredgecolor": "black", "markeredgewidth": 0.4}
        axes.plot(points, range(len(values)), mark, **style)
    draw_others(axes, values, tables.published_effects(environments))
    claims = by_variant("findings", "finding")
    for row, (_, variant) in enumerate(values):
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7}
        axes.text(1.02, row, claims.get(variant, ""), **place)
    axes.xaxis.set_major_formatter("{x:+.0%}")
    axes.set_xlabel("change of the mean score: median over environments, 95 % interval")
    return figure


def compared(
    suite: str, folders: Folders
) -> tuple[dict[tables.Name, statistics.Estimate], list[str]]:
    """As `tables.compared`, or a BenchmarkError if there is nothing yet."""
    values, environments = tables.compared(suite, folders)
    if not values:
        raise BenchmarkError(f"No run of {suite} can be compared yet.")
    return values, environments


# --- Files ---

# What draws a kind of figure, the end of its name, and the published numbers that it shows.
KINDS: dict[str, tuple[Callable[[str, Found, Folders], Figure], str, tuple[str, ...]]] = {
    "curves": (plot_curves, "", ("ppo2_curves.csv", "scores.csv")),
    "trace": (plot_trace, "_trace", ()),
    "health": (plot_health, "_health", ()),
    "frontier": (plot_frontier, "", ()),
    "rivals": (plot_rivals, "", ()),
    "effects": (plot_effects, "", ("effects.csv", "findings.csv")),
    "normalized": (plot_normalized, "", ("table1.csv", "random_policy.json")),
}


def results_of(suite: str, folders: Folders) -> Found:
    """The results that figures of a suite show: its own, and its baseline's beside them."""
    names = tables.labels(suite)
    found = {name: by_environment(*name, folders) for name in names}
    own = {env for (owner, _), x in found.items() if owner == suite for env in x}
    if not own:
        raise BenchmarkError(f"No run of {suite} is finished.")
    shown = [env for env in SUITES[suite].environments if env in own]
    return {names[name]: {env: x[env] for env in shown if env in x} for name, x in found.items()}


def digest(found: Found, kind: str) -> str:
    """SHA-256 of what a figure shows: results and published numbers."""
    results = [x for own in found.values() for y in own.values() for x in y]
    curves = [(x.record, x.curve.to_csv(index=False, float_format="%.6g")) for x in results]
    files = [(REFERENCE / name).read_bytes() for name in KINDS[kind][2]]
    return hashlib.sha256(b"".join([json.dumps(curves).encode(), *files])).hexdigest()


def update(
    suite: str, kind: str, folders: Folders, figures: Path = FIGURES, always: bool = True
) -> Path | None:
    """Draw a figure of a suite, unless it already shows these results; its path if it was drawn.

    Raises:
        BenchmarkError: there is nothing to be drawn yet.
    """
    draw, ending, _ = KINDS[kind]
    path, found = figures / f"{suite}{ending}.png", results_of(suite, folders)
    source = f"results {digest(found, kind)}"
    if not always and path.exists() and Image.open(path).text.get("Source") == source:
        return None
    with plt.rc_context(STYLE):
        figure = draw(suite, found, folders)
        handles = {}
        for axes in figure.axes:  # one legend above all panels, with each name once
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        columns = min(max(1, int(figure.get_figwidth() / LEGEND_INCHES)), len(handles))
        place = {"loc": "outside upper center", "ncols": columns}
        figure.legend(handles.values(), handles.keys(), **place)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the name of the program: equal figures, equal files.
        figure.savefig(path, dpi=130, metadata={"Software": None, "Source": source})
        plt.close(figure)
    return path
