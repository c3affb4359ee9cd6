"""Runs of any script over environments and seeds, below `runs/NAME`, with a table and curves.

They are made as those of a suite are (`run.py`), but with the file as it is on disk.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import results
from benchmark.definitions import Folders, Run, Suite, Variant
from benchmark.logs import from_checkpoint
from benchmark.provenance import BenchmarkError, version_on_disk
from benchmark.report import plots
from benchmark.report.tables import markdown, number, score_cells
from benchmark.results import write_text
from benchmark.run import Watch, last_line, run_suite, say

OWN = {"--env-id", "--seed", "--run-name", "--resume"}  # flags that `seeds` itself gives
# A progress bar: share, iterations done and in all, time left, and what follows.
BAR = re.compile(r"(\d+)%\|.*?\| *(\d+)/(\d+) \[[\d:]+<([\d:?]+),? ?([^\]]*)")
FIRST = 120  # seconds after which the others start, even if the first run shows no progress
PACE = 60  # seconds between two looks where lines cannot be replaced


@dataclasses.dataclass(frozen=True)
class SeedRun(Run):
    """A run in runs/NAME/ENV/seedK, where the script makes its own folder runs/run."""

    @property
    def flags(self) -> list[str]:
        flags = ["--env-id", self.environment, "--seed", str(self.seed)]
        return flags + shlex.split(self.suite.variants[self.variant].flags)

    @property
    def variables(self) -> dict[str, str]:  # the script also finds what it finds without us
        known = [str(Path(self.script).parent), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, known))}

    def origin(self, commit: str | None) -> dict[str, Any]:
        return json.loads(about_path(self.folders, self.suite.name).read_text())


def about_path(folders: Folders, name: str) -> Path:
    return folders.runs / name / "about.json"


# --- While they run ---


def progress(run: Run) -> tuple[int, str]:
    """How many iterations a run has made, and a line about it, by the end of its output."""
    path = run.folder / "output.txt"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1000))
        text = file.read().decode(errors="replace")
    found = BAR.findall(text)
    if not found:
        return 0, f"{run.name}: {last_line(run.folder) if text.strip() else 'starting'}"
    share, made, total, left, more = found[-1]
    about = re.sub(r"^[\d.?]+\s*(it/s|s/it),? ?", "", more)
    parts = [f"{share} %", f"iteration {made} of {total}", about, f"{left} left"]
    return int(made), f"{run.name}: {', '.join(filter(None, parts))}"


class Live(Watch):
    """Prints a line for each run at work; holds the others back until the first has begun well."""

    def __init__(self, script: Path) -> None:
        self.script, self.ready, self.failed = script, False, []
        self.start = self.shown = time.monotonic()

    def look(self, working: list[Run]) -> bool:
        now, pace = time.monotonic(), 1 if sys.stdout.isatty() else PACE
        if now - self.shown > pace or not self.ready:
            begun = [progress(x) for x in working if (x.folder / "output.txt").exists()]
            # The first run compiles; the others take what it has compiled from the disk.
            self.ready |= any(made for made, _ in begun) or now - self.start > FIRST
            if now - self.shown > pace:
                self.shown = now
                print_lines([line for _, line in begun])
        return self.ready

    def ended(self, run: Run, error: str) -> None:
        if error.startswith("ended with exit code 2") and not self.ready:
            raise BenchmarkError(f"{self.script.name} does not start: {last_line(run.folder)}")
        self.ready = True
        self.failed += [f"{run.name} {error}"] * bool(error)
        super().ended(run, error)


def print_lines(lines: list[str]) -> None:
    """Print lines; in a terminal, the next text takes their place."""
    if not sys.stdout.isatty():
        for line in lines:
            say(line)
    elif lines:
        width = shutil.get_terminal_size().columns - 1
        text, up = "\n".join(x[:width] for x in lines), f"\x1b[{len(lines) - 1}A"
        print(f"\x1b[J{text}{up * (len(lines) > 1)}", end="\r", flush=True)


# --- The command ---


def run(
    script: Path,
    env_ids: tuple[str, ...],
    seeds: tuple[int, ...],
    workers: int | None,
    name: str,
    flags: list[str],
) -> None:
    """Make the runs that are missing, then print the table; a BenchmarkError names what failed."""
    if not script.is_file():
        raise BenchmarkError(f"There is no script {script}.")
    if workers is not None and workers < 1:
        raise BenchmarkError("--workers must be positive.")
    numbers = range(1, seeds[0] + 1) if len(seeds) == 1 else dict.fromkeys(seeds)
    if not numbers or min(numbers) < 0 or not env_ids:
        raise BenchmarkError("Give --env-ids, and --seeds that are not negative.")
    if given := OWN.intersection(x.partition("=")[0] for x in flags):
        raise BenchmarkError(f"`seeds` itself gives {min(given)} to the script: leave it out.")
    script, name = script.absolute(), name or script.stem
    if re.search(r"[^\w.=+-]", name):
        raise BenchmarkError(f"--name {name}: use letters, digits and _.=+- only.")
    folders = Folders(Path("runs") / name, Path("runs"))
    variant = Variant(str(script), shlex.join(flags))
    places = dict.fromkeys(env_ids, tuple(numbers))
    suite = Suite(name, "", places, {"": variant}, total_timesteps=None)
    about, path = {"file": str(script), "flags": variant.flags}, about_path(folders, name)
    about |= version_on_disk(script)
    old = json.loads(path.read_text()) if path.exists() else about
    if any(old[x] != about[x] for x in ("sha256", "flags")):
        raise BenchmarkError(
            f"{path.parent} has runs of another version of {script.name}, or with other flags: "
            "give another --name."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(about, indent=1))
    runs = [SeedRun(suite, x, "", y, folders) for y in numbers for x in suite.environments]
    watch = Live(script)
    try:
        run_suite(suite, runs, folders, None, workers, watch)
    except KeyboardInterrupt:
        print("\nInterrupted. The same command continues the runs where they stopped.")
        raise
    show(folders, name)
    if watch.failed:
        count = f"{len(watch.failed)} of {len(runs)} runs failed"
        raise BenchmarkError(f"{count}: {'; '.join(watch.failed)}")


def show(folders: Folders, name: str) -> None:
    """Print the table of all finished runs of a name; draw their curves; list their episodes."""
    found: dict[str, list[dict]] = {}
    for record in results.done(name, folders).values():
        found.setdefault(record["environment"], []).append(record)
    if not found:
        return
    rows, logs, tables = [], [], []
    for environment, records in found.items():
        cells = score_cells(x["score"] for x in records)
        minutes = pd.Series([x["seconds"] for x in records]).median() / 60
        rows.append({"environment": environment, **cells, "minutes per run": number(minutes)})
        for record in records:
            run = SeedRun(Suite(name, "", {}, {}), environment, "", record["seed"], folders)
            logs.append(from_checkpoint(run.log))
            about = {"environment": environment, "seed": record["seed"]}
            tables.append(logs[-1].episodes.assign(**about))
    episodes = pd.concat(tables).rename(columns={"global_step": "step"})
    columns = ["environment", "seed", "step", "return", "length"]
    episodes[columns].to_csv(folders.results / "episodes.csv", index=False)
    print(f"\n{markdown(rows)}")
    print(plots.save(lambda: plots.overlay({name: logs}), folders.results / "curves.png"))
    print(folders.results / "episodes.csv")
