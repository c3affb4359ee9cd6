"""Runs any script over environments and seeds, below `runs/NAME`, and shows a table and curves.

A run is made as in a suite (`run.py`), but with the file as it is on disk. The script must have
--seed. With --resume it continues where it stopped, without --run-name its files are searched for.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark import results
from benchmark.definitions import Folders, Run, Suite, Variant
from benchmark.logs import Log, is_log, read
from benchmark.provenance import BenchmarkError, version_on_disk
from benchmark.report import plots, rlhf
from benchmark.report.tables import markdown, number, plus_minus, score_cells
from benchmark.results import write_text
from benchmark.run import Watch, last_line, run_suite, say

OWN = {"--env-id", "--seed", "--run-name", "--resume"}  # flags that `seeds` itself gives
HELP = 60  # seconds after which a script has not understood --help, and trains
# A progress bar: share, iterations done and in all, time left, and what follows.
BAR = re.compile(r"(\d+)%\|.*?\| *(\d+)/(\d+) \[[\d:]+<([\d:?]+),? ?([^\]]*)")
FIRST = 120  # seconds after which the others start, even if the first run shows no progress
PACE = 60  # seconds between two looks where lines cannot be replaced


@dataclasses.dataclass(frozen=True)
class SeedRun(Run):
    """A run in runs/NAME/ENV/seedK, where the script makes its own folder runs/run.

    Without --env-ids the environment is empty, and the script takes its default.
    """

    takes: frozenset[str] = frozenset()  # those of `OWN` that the script has

    @property
    def flags(self) -> list[str]:
        flags = ["--env-id", self.environment] * bool(self.environment)
        flags += ["--seed", str(self.seed)]
        return flags + shlex.split(self.suite.variants[self.variant].flags)

    @property
    def naming(self) -> list[str]:
        return super().naming if "--run-name" in self.takes else []

    @property
    def log(self) -> Path:  # a script without --run-name chooses the name
        named = super().log
        made = sorted(x.parent for x in self.folder.rglob("*") if is_log(x))
        return made[0] if made and not named.exists() else named

    @property
    def begun(self) -> bool:
        return "--resume" in self.takes and super().begun

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
            reason = last_line(run.folder).removeprefix("Error: ")
            raise BenchmarkError(f"{self.script.name} does not start: {reason}")
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


def flags_of(script: Path) -> frozenset[str]:
    """Those flags of `OWN` that a script has, by its --help."""
    command, wide = [sys.executable, str(script), "--help"], {"COLUMNS": "200"}
    try:
        with tempfile.TemporaryDirectory() as empty:
            found = subprocess.run(
                command,
                cwd=empty,
                env=os.environ | wide,
                capture_output=True,
                text=True,
                timeout=HELP,
            )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{script.name} --help did not end within {HELP} seconds.") from None
    if found.returncode:
        *_, reason = ["no word", *found.stderr.strip().splitlines()]
        raise BenchmarkError(f"{script.name} does not start: {reason}")
    return frozenset(OWN.intersection(re.findall(r"--[\w-]+", found.stdout)))


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
    if not numbers or min(numbers) < 0:
        raise BenchmarkError("Give --seeds that are not negative, and at least one.")
    if given := OWN.intersection(x.partition("=")[0] for x in flags):
        instead = {"--env-id": "use --env-ids", "--seed": "use --seeds"}
        text = f"`seeds` itself gives {min(given)} to the script: "
        raise BenchmarkError(f"{text}{instead.get(min(given), 'leave it out')}.")
    script, name = script.absolute(), name or script.stem
    if re.search(r"[^\w.=+-]", name):
        raise BenchmarkError(f"--name {name}: use letters, digits and _.=+- only.")
    folders = Folders(Path("runs") / name, Path("runs"))
    variant = Variant(str(script), shlex.join(flags))
    takes = flags_of(script)
    if "--seed" not in takes:
        raise BenchmarkError(f"{script.name} has no --seed.")
    if env_ids and "--env-id" not in takes:
        raise BenchmarkError(f"{script.name} has no --env-id: leave --env-ids out.")
    places = dict.fromkeys(env_ids or [""], tuple(numbers))
    suite = Suite(name, "", places, {"": variant}, total_timesteps=None)
    about, path = {"file": str(script), "flags": variant.flags}, about_path(folders, name)
    about |= version_on_disk(script)
    if not path.exists() and path.parent.exists():
        raise BenchmarkError(f"{path.parent} is there, but not of `seeds`: give another --name.")
    old = json.loads(path.read_text()) if path.exists() else about
    kept = {"checkpoint.pt", "results.json", "result.json", f"{name}.jsonl"}
    differs = any(old[x] != about[x] for x in ("sha256", "flags"))
    if differs and any(x.name in kept for x in path.parent.rglob("*")):
        raise BenchmarkError(
            f"{path.parent} has runs of another version of {script.name}, or with other flags: "
            "give another --name."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(about, indent=1))
    runs = [SeedRun(suite, x, "", y, folders, takes) for y in numbers for x in places]
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
    found: dict[str, dict[int, tuple[dict, Log | None]]] = {}
    for record in results.done(name, folders).values():
        run = SeedRun(Suite(name, "", {}, {}), record["environment"], "", record["seed"], folders)
        log = read(run.log)
        place = run.environment or (log.environment if log else "")  # the script's own default
        found.setdefault(place, {})[run.seed] = record, log
    rows, shown, tables = [], [], []
    for place, own in found.items():
        records, logs = zip(*own.values())
        minutes = pd.Series([x["seconds"] for x in records], dtype=float).median() / 60
        about = {"environment": place} if place else {}
        about["minutes per run"] = number(minutes) if minutes == minutes else "–"
        if "models" in records[0]:
            rows += [about | x for x in models_rows(records)]
            continue
        rows.append(about | score_cells(x["score"] for x in records))
        shown += logs
        for seed, (_, log) in own.items():
            if not log.averaged:
                tables.append(log.episodes.assign(environment=place, seed=seed))
    if not rows:
        return
    table = pd.DataFrame(rows, dtype=object)
    table["minutes per run"] = table.pop("minutes per run")  # comes last
    print(f"\n{markdown(table)}")
    if len(tables) < len(shown):
        print("Returns are means over the last tenth of a log that has no single episodes.")
    if shown:
        print(plots.save(lambda: plots.overlay({name: shown}), folders.results / "curves.png"))
    if tables:
        episodes = pd.concat(tables).rename(columns={"global_step": "step"})
        columns = [x for x in ("environment", "seed", "step", "return", "length") if x in episodes]
        episodes[columns].to_csv(folders.results / "episodes.csv", index=False)
        print(folders.results / "episodes.csv")


def models_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each model that runs without episodes have trained: mean ± std over seeds."""
    rows = []
    models = [x["models"] for x in records]
    for name in dict.fromkeys(y for x in models for y in x):
        own = pd.DataFrame([x[name] for x in models if name in x])
        metrics = {x: y for x, y in rlhf.COLUMNS.items() if y in own}  # others are settings
        metrics = metrics or {x: x for x in own if "/" in x}
        row = {"model": name} if name else {}
        row["seeds"] = str(len(own))
        rows.append(row | {x: plus_minus(own[y], 2) for x, y in metrics.items()})
    return rows
