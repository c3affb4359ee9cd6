"""Runs any script over environments and seeds, below `runs/NAME`, and shows a table and curves.

A run is made as in a suite (`run.py`), but with the file as it is on disk. The script must have
--seed. With --resume it continues where it stopped, without --run-name its files are searched for.
"""

import dataclasses
import json
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmark.lab import plots
from benchmark.lab.definitions import Folders, Suite, Variant, file_name
from benchmark.lab.logs import read, runs_table, window_of_all
from benchmark.lab.provenance import BenchmarkError, version_on_disk
from benchmark.lab.record import LAST_100
from benchmark.lab.results import by_environment, done
from benchmark.lab.run import (
    ENDED,
    GIVEN,
    Run,
    last_line,
    outcome,
    printed,
    python_path,
    run_suite,
    select,
    start,
)
from benchmark.lab.tables import MODEL_METRICS, markdown, number, plus_minus, score_cells

HELP = 60  # seconds after which a script has not understood --help, and trains


def with_absolute_paths(flags: list[str]) -> list[str]:
    """Flags for a script that runs in another folder: names of files here become absolute paths.

    Words without a slash or a suffix are taken for names.
    """
    words = []
    for flag in flags:
        name, equals, value = flag.partition("=") if flag.startswith("-") else ("", "", flag)
        if re.search(r"[/.]", value) and Path(value).exists():
            value = str(Path(value).absolute())
        words.append(f"{name}{equals}{value}")
    return words


def flags_of(script: Path) -> frozenset[str]:
    """Those flags of `GIVEN` that a script has, by its --help."""
    if not script.is_file():
        raise BenchmarkError(f"There is no script {script}.")
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), python_path(script.parent)
        try:
            failed = outcome(start(folder, [str(script), "--help"], PYTHONPATH=path), HELP)
        except subprocess.TimeoutExpired:
            text = f"{script.name} --help did not end within {HELP} seconds."
            raise BenchmarkError(text) from None
        if failed:
            raise BenchmarkError(f"{script.name} does not start: {last_line(folder)}")
        return GIVEN.intersection(re.findall(r"--[\w-]+", printed(folder)))


def run(
    script: Path,
    env_ids: tuple[str, ...],
    seeds: tuple[int, ...],
    workers: int | None,
    name: str,
    flags: list[str],
) -> None:
    """Make the runs that are missing, then print the table; a BenchmarkError names what failed."""
    if given := GIVEN.intersection(x.partition("=")[0] for x in flags):
        instead = {"--env-id": "use --env-ids", "--seed": "use --seeds"}
        text = f"`seeds` itself gives {min(given)} to the script: "
        raise BenchmarkError(f"{text}{instead.get(min(given), 'leave it out')}.")
    script, name = script.absolute(), file_name(name or script.stem)
    takes, folders = flags_of(script), Folders(Path("runs") / name, Path("runs"))
    about = {"flags": shlex.join(flags)} | version_on_disk(script)
    if "--seed" not in takes:
        raise BenchmarkError(f"{script.name} has no --seed.")
    if env_ids and "--env-id" not in takes:
        raise BenchmarkError(f"{script.name} has no --env-id: leave --env-ids out.")
    numbers = tuple(range(1, seeds[0] + 1)) if len(seeds) == 1 else seeds
    if not numbers:
        raise BenchmarkError("--seeds must be at least 1.")
    variant = Variant(str(script), shlex.join(with_absolute_paths(flags)))
    places = dict.fromkeys(env_ids or [""], numbers)
    suite = Suite(name, "", places, {"": variant}, total_timesteps=None)
    old = [*done(name, folders).values()]
    for note in folders.results.rglob("note.json"):
        if {"result.json", "checkpoint.pt", ENDED} & {x.name for x in note.parent.rglob("*")}:
            old.append(json.loads(note.read_text()))
    if any(x.get(y) != about[y] for x in old for y in ("sha256", "flags")):
        text = f"{folders.results} has runs of another version of {script.name}, or with other"
        raise BenchmarkError(f"{text} flags: give another --name.")
    runs = [dataclasses.replace(x, takes=takes, about=about) for x in select(suite, folders)]
    for folder in (x.folder for x in runs if x.folder.exists()):
        if not (folder / "note.json").exists() and any(folder.iterdir()):
            raise BenchmarkError(f"{folder} was not made by `seeds`: give another --name.")
    try:
        run_suite(suite, runs, folders, workers)
    except KeyboardInterrupt:
        print("\nInterrupted. The same command continues the runs where they stopped.")
        raise
    finally:
        show(suite, folders)


def show(suite: Suite, folders: Folders) -> None:
    """Print the table of all finished runs of a name; draw their curves; list their episodes."""
    rows, drawn, episodes = [], [], {}
    for place, results in by_environment(suite.name, "", folders).items():
        records = [x.record for x in results]
        if "models" in records[0]:
            name, cells = place, models_rows([x["models"] for x in records])
        else:
            runs = [Run(suite, place, "", x["seed"], folders) for x in records]
            logs = {x.seed: read(x.log) for x in runs if x.log.exists()}  # not those deleted since
            name = place or next((x.environment for x in logs.values()), "")  # script's default
            drawn += logs.values()
            episodes |= {(name, x): y.episodes for x, y in logs.items() if not y.averaged}
            scores = [scores_of(x) for x in records]
            window = window_of_all(filter(None, scores))
            scores = score_cells([x.get(window, np.nan) for x in scores], "score", ddof=1)
            cells = [scores | {"score: mean of the": window}]
        about = {"environment": name} if name else {}
        minutes = np.median([x["seconds"] or np.nan for x in records]) / 60
        about["minutes per run"] = number(minutes, digits=1) if minutes > 0 else "–"
        rows += [about | x for x in cells]
    if rows:
        table = pd.DataFrame(rows, dtype=object)
        table["minutes per run"] = table.pop("minutes per run")  # comes last
        text = markdown(table)
        print(f"\n{text}")
        if "±" in text:
            print("± is the standard deviation over seeds, with the divisor n - 1.\n")
    if drawn:
        curves, runs = folders.results / "curves.png", runs_table({suite.name: drawn})
        print(f"Curves: {plots.try_to_save(lambda: plots.overlay(runs), curves)}")
    if episodes:
        table = pd.concat(episodes, names=["environment", "seed"]).droplevel(2)
        path = folders.results / "episodes.csv"
        table.rename(columns={"global_step": "step"}).to_csv(path)
        print(f"Episodes: {path}")


def scores_of(record: dict[str, Any]) -> dict[str, float]:
    """Mean returns of a run by the part of it; none if no episode has ended."""
    if record["score"] is None or "scores" in record:
        return record.get("scores", {})
    return {record.get("scored_over", LAST_100): record["score"]}  # of an older version of `seeds`


def models_rows(models: list[dict[str, dict[str, Any]]]) -> list[dict[str, str]]:
    """A row for each model that runs without episodes have trained: mean ± std over seeds."""
    rows = []
    for name in dict.fromkeys(y for x in models for y in x):
        own = pd.DataFrame([x[name] for x in models if name in x])
        metrics = {x: y for x, y in MODEL_METRICS.items() if y in own}  # others are settings
        metrics = metrics or {x: x for x in own if "/" in x}
        row = {"model": name} if name else {}
        row["seeds"] = str(len(own))
        rows.append(row | {x: plus_minus(own[y], 2, ddof=1) for x, y in metrics.items()})
    return rows
