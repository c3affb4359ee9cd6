"""Figures: learning curves with a band and a thin line per seed, and the checks of a run."""

import collections
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image

from benchmark.lab import check, statistics
from benchmark.lab.definitions import POINTS
from benchmark.lab.logs import Log
from benchmark.lab.results import Result

LEGEND_INCHES = 1.9  # width of a legend's column
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.dpi": 130,
    "font.size": 8,
    "legend.frameon": False,
}


# --- Panels ---


def one_panel_each(titles: Sequence[str], width: int = 3) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a panel over environment steps for each title, so many in a row."""
    columns, count = min(width, len(titles)), len(titles)
    rows = -(-count // columns)
    wide, high = (3.2, 2.4) if width < 5 else (2.4, 1.8)  # inches of a panel
    figure = Figure(figsize=(wide * columns, high * rows) if count > 1 else (6.4, 3.2))
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[count:]:
        axes.axis("off")
    for title, axes in zip(titles, panels):
        axes.set_title(title)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x else "0")
        axes.margins(x=0)
    figure.supxlabel("environment steps")
    return figure, panels[:count]


def draw_curves(
    axes: Axes, results: Iterable[Result | Log], label: str, color: str, step: float = 1
) -> None:
    """Mean over seeds, its 95 % bootstrap interval from three on, and each seed as a thin line.

    Args:
        step: how long a step is on the axis.
    """
    total = max(x.steps for x in results)
    grid = np.linspace(0, total, POINTS + 1)[1:]
    curves = np.array([np.interp(grid, *x.column("return")) for x in results])
    grid *= step
    axes.set_xlim(0, grid[-1])
    axes.plot(grid, curves.T, color=color, linewidth=0.5, alpha=0.4)
    axes.plot(grid, curves.mean(0), color=color, linewidth=1.6, label=label)
    if len(curves) > 2:
        ends = statistics.interval([curves.T], statistics.mean)
        axes.fill_between(grid, *ends, color=color, alpha=0.2, linewidth=0)


# --- Runs of anybody ---


def checks(logs: list[Log]) -> Figure:
    """The metrics of runs over their healthy ranges; red where the rule says that they are not."""
    judged = [{x["metric"]: x for x in check.judge(log)} for log in logs]
    metrics = dict.fromkeys(x for rows in judged for x in rows)
    figure, panels = one_panel_each([*metrics])
    for axes, metric in zip(panels, metrics):
        verdicts, ends, color = collections.Counter(), [], "k"
        for index, (name, log, rows) in enumerate(zip(check.names_of(logs), logs, judged)):
            if not (row := rows.get(metric)):
                continue
            own = log.updates[["global_step", metric]].dropna()
            style = {"color": f"C{index}", "label": name if len(logs) > 1 else None}
            axes.plot(own["global_step"], own[metric], linewidth=1, **style)
            sick = own[own["global_step"].isin(row["bad"])]
            if len(sick):
                axes.plot(*sick.to_numpy().T, ".", color="C3", markersize=4, label="unhealthy")
                color = "C3"
            ends += [*own[metric].quantile([0.02, 0.98]), *filter(np.isfinite, row["band"])]
            word = row["verdict"].partition(" ")[0].strip(",")
            verdicts[row["verdict"] if len(logs) == 1 else word] += 1
            band = row["band"]
        room = 0.1 * (max(ends) - min(ends))
        axes.set_ylim(min(ends) - room, max(ends) + room)  # a few odd values leave the picture
        inside = np.clip(band, *axes.get_ylim())
        axes.axhspan(*inside, color="C2", alpha=0.15, label="usual", linewidth=0)
        parts = (x if y == len(logs) else f"{y} {x or 'early'}" for x, y in verdicts.items())
        axes.set_title(f"{metric}\n{', '.join(parts)}", color=color)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if check.count_updates(logs[0].updates["global_step"].to_numpy()):
        figure.supxlabel("updates")
    return figure


def overlay(runs: pd.DataFrame) -> Figure:
    """A panel per environment with the curves of each group: thin seeds, their mean, its band.

    Args:
        runs: "label", "environment" and "log" of each.
    """
    places, labels = runs["environment"].unique(), [*runs["label"].cat.categories]
    figure, panels = one_panel_each(places, 3 if len(places) < 9 else 4)
    for axes, place in zip(panels, places):
        own = runs[runs["environment"] == place]
        for label, logs in own.groupby("label", observed=True)["log"]:
            if logs := [x for x in logs if len(x.episodes)]:
                draw_curves(axes, logs, label, f"C{labels.index(label)}")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supylabel("episodic return in training")
    return figure


# --- Files ---


def save(make: Callable[[], Figure], path: Path) -> Path:
    """Draw a figure in our style, with one legend above all panels, and write it to a file."""
    with matplotlib.rc_context(STYLE):
        figure = make()
        handles = {}
        for axes in figure.axes:  # each name once
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        columns = min(max(1, int(figure.get_figwidth() / LEGEND_INCHES)), max(1, len(handles)))
        names, canvas = (handles.values(), handles.keys()), FigureCanvasAgg(figure)
        legend = figure.legend(*names, loc="outside upper center", ncols=columns)
        while columns > 1 and legend.get_window_extent().width > figure.bbox.width:
            legend.remove()
            columns -= 1
            legend = figure.legend(*names, loc="outside upper center", ncols=columns)
        canvas.draw()
    # A third of the size, and nobody sees the difference.
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def try_to_save(make: Callable[[], Figure], path: Path) -> str:
    """The path of a figure that is saved, or why it is not: the folder may be read-only."""
    try:
        return str(save(make, path))
    except OSError as error:
        return f"none, since {path} cannot be written: {error.strerror or error}"
