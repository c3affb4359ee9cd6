"""Runs any script over environments and seeds, below `runs/NAME`, and shows a table and curves.

The file is run as it is on disk. The script must have --seed. With --resume it continues where it
stopped, without --run-name its files are searched for.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmark.lab import plots, results
from benchmark.lab.definitions import Folders, file_name
from benchmark.lab.logs import UNKNOWN, read, runs_table, window_of_all
from benchmark.lab.provenance import BenchmarkError, files_named, version_on_disk
from benchmark.lab.results import by_environment, done
from benchmark.lab.run import (
    ENDED,
    Run,
    last_line,
    log_in,
    outcome,
    printed,
    require_workers,
    run_missing,
    start,
)
from benchmark.lab.tables import MODEL_METRICS, markdown, number, plus_minus, score_cells

GIVEN = frozenset({"--env-id", "--seed", "--run-name", "--resume"})  # flags that we give ourselves
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


def python_path(script: Path) -> list[str]:
    """Where a script finds modules as if it ran here: its folder, PYTHONPATH, the current one."""
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [*dict.fromkeys(str(Path(x).absolute()) for x in (script.parent, *others, "."))]


def flags_of(script: Path) -> frozenset[str]:
    """Those flags of `GIVEN` that a script has, by its --help."""
    if not script.is_file():
        raise BenchmarkError(f"There is no script {script}.")
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), os.pathsep.join(python_path(script))
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
    require_workers(workers)
    if given := GIVEN.intersection(x.partition("=")[0] for x in flags):
        instead = {"--env-id": "use --env-ids", "--seed": "use --seeds"}
        text = f"`seeds` itself gives {min(given)} to the script: "
        raise BenchmarkError(f"{text}{instead.get(min(given), 'leave it out')}.")
    script, name = script.absolute(), file_name(name or script.stem)
    takes, folders = flags_of(script), Folders(Path("runs") / name, Path("runs"))
    if "--seed" not in takes:
        raise BenchmarkError(f"{script.name} has no --seed.")
    if env_ids and "--env-id" not in takes:
        raise BenchmarkError(f"{script.name} has no --env-id: leave --env-ids out.")
    numbers = tuple(range(1, seeds[0] + 1)) if len(seeds) == 1 else seeds
    if not numbers:
        raise BenchmarkError("--seeds must be at least 1.")
    about = {"script": str(script), "flags": shlex.join(flags), **version_on_disk(script)}
    places, old = env_ids or ("",), made_before(name, folders)
    known = {*places, *(x["environment"] for x in old)}
    modules = {x: modules_of(script, x, flags) for x in known}
    for x in old:
        require_same(x, about, modules[x["environment"]], folders)
    text, words = script.read_text(), with_absolute_paths(flags)
    words += ["--run-name", "run"] if "--run-name" in takes else []
    runs = []
    for seed, place in itertools.product(dict.fromkeys(numbers), dict.fromkeys(places)):
        folder = folder_of(name, place, seed)
        if folder.exists() and not (folder / "note.json").exists() and any(folder.iterdir()):
            raise BenchmarkError(f"{folder} was not made by `seeds`: give another --name.")
        imported = {named(x, script): y for x, y in modules[place].items()}
        own = {"environment": place, "variant": "", "seed": seed, "imported": imported}
        run = Run(
            name=folder.relative_to(folders.results.absolute()).as_posix(),
            folder=folder,
            script=script,
            text=text,
            flags=[*(["--env-id", place] if place else []), "--seed", str(seed), *words],
            resume=["--resume", "runs/run"] if "--resume" in takes else [],
            variables={"PYTHONPATH": os.pathsep.join(python_path(script))},
            facts=own | about,
            imported=modules[place],
        )
        runs.append(run)
    try:
        run_missing(name, runs, folders, workers)
    except KeyboardInterrupt:
        print("\nInterrupted. The same command continues the runs where they stopped.")
        raise
    finally:
        show(name, folders)


def folder_of(name: str, environment: str, seed: int) -> Path:
    """Where a run works; the environment is empty for the script's default."""
    parts = filter(None, (name, file_name(environment), f"seed{seed}"))
    return Path("runs", *parts).absolute()


def made_before(name: str, folders: Folders) -> list[dict[str, Any]]:
    """What is noted of runs of a name that have a result or have begun."""
    notes = [*done(name, folders).values()]
    for path in folders.results.rglob("note.json"):
        if {results.FILE, "checkpoint.pt", ENDED} & {x.name for x in path.parent.rglob("*")}:
            notes.append(json.loads(path.read_text()))
    return notes


def modules_of(script: Path, environment: str, flags: list[str]) -> dict[Path, str]:
    """Hashes of the local modules of a run, that of its environment or another flag included."""
    return files_named(script, " ".join([environment, *flags]), python_path(script))


def named(module: Path, script: Path) -> str:
    """How a module is noted: the folder with the script may be moved."""
    return os.path.relpath(module, script.parent)


def require_same(
    old: dict[str, Any], about: dict[str, Any], modules: dict[Path, str], folders: Folders
) -> None:
    """A BenchmarkError if a run was made by another version of a script, or with other flags."""
    script = Path(about["script"])
    before = {script.name: old["sha256"], **old.get("imported", {})}
    now = {script.name: about["sha256"], **{named(x, script): y for x, y in modules.items()}}
    changed = sorted(file for file, _ in before.items() ^ now.items())
    if changed or old["flags"] != about["flags"]:
        what = f"of another version of {Path(changed[0]).name}" if changed else "with other flags"
        raise BenchmarkError(f"{folders.results} has runs {what}: give another --name.")


def show(name: str, folders: Folders) -> None:
    """Print the table of all finished runs of a name; draw their curves; list their episodes."""
    rows, drawn, episodes, notes = [], [], {}, set()
    for place, own in by_environment(name, "", folders).items():
        records = [x.record for x in own]
        if "models" in records[0]:
            title, cells = place, models_rows([x["models"] for x in records])
        else:
            found = {x["seed"]: log_in(folder_of(name, place, x["seed"])) for x in records}
            logs = {x: read(y) for x, y in found.items() if y.exists()}  # not those deleted since
            known = (x.environment for x in logs.values() if x.environment != UNKNOWN)
            # A simulator of one's own has another name than `place`.
            title = next(known, place or UNKNOWN * bool(logs))
            drawn += logs.values()
            notes |= {x.note for x in logs.values() if x.averaged and x.note}
            episodes |= {(title, x): y.episodes for x, y in logs.items() if not y.averaged}
            scores = [x.get("scores", {}) for x in records]  # none if no episode has ended
            window = window_of_all(filter(None, scores))
            scores = score_cells([x.get(window, np.nan) for x in scores], "score", ddof=1)
            cells = [scores | {"score: mean of the": window}]
        about = {"environment": title} if title else {}
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
    for note in sorted(notes):
        print(f"Of such a run: {note}.")
    if drawn:
        curves, runs = folders.results / "curves.png", runs_table({name: drawn})
        print(f"Curves: {plots.try_to_save(lambda: plots.overlay(runs), curves)}")
    if episodes:
        table = pd.concat(episodes, names=["environment", "seed"]).droplevel(2)
        path = folders.results / "episodes.csv"
        table.rename(columns={"global_step": "step"}).to_csv(path)
        print(f"Episodes: {path}")


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
