"""Tables of real language models: what changes during a run, and what a run costs."""

from collections.abc import Iterator

import numpy as np

from benchmark.evidence.suites import SUITES
from benchmark.evidence.tables import facts, plus_minus
from benchmark.lab.definitions import Folders
from benchmark.lab.results import Result, by_environment
from benchmark.lab.tables import markdown, number

ITERATIONS = 1, 3, 5, 8  # that are shown
SHOWN = {  # columns of curves, and decimals
    "entropy, nats per token": ("entropy", 2),
    "KL of an update": ("approx_kl", 4),
    "clip fraction": ("clipfrac", 3),
    "explained variance": ("explained_variance", 2),
    "tokens of an episode": ("tokens", 1),
}


def lines(folders: Folders, *names: str) -> Iterator[tuple[dict[str, str], list[Result]]]:
    """Task and method of suites, and their runs."""
    for name in names:
        for variant, about in SUITES[name].variants.items():
            for task, runs in by_environment(name, variant, folders).items():
                yield {"task": task, "method": about.label}, runs


def course(folders: Folders) -> str:
    """Medians over seeds of what a run logs, in some iterations."""
    rows = []
    for row, runs in lines(folders, "llm_sums", "llm_game"):
        for title, (column, digits) in SHOWN.items():
            curves = np.array([x.curve[column] for x in runs])
            if np.nan_to_num(curves).any():  # GRPO explains nothing
                found = np.median(curves, axis=0)[np.subtract(ITERATIONS, 1)]
                row[title] = ", ".join(f"{x:z.{digits}f}" for x in found)
        rows.append(row)
    return markdown(rows)


def costs(folders: Folders) -> str:
    """Seconds of an iteration of 64 episodes, and memory."""
    rows = []
    names = "llm_sums", "llm_values", "llm_trl", "llm_game", "llm_game_values"
    for row, runs in lines(folders, *names):
        seconds = 3600 * facts(runs, "hours") / (runs[0].record["steps"] / 64)
        memory = number(facts(runs, "peak_mib").max() / 1024)
        rows.append(row | {"seconds an iteration": plus_minus(seconds), "memory, GiB": memory})
    return markdown(rows)
