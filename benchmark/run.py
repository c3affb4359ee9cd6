"""One run: its script as it is in a commit, begun or continued, and its result in its folder.

The script inherits the lock of its run: whoever is killed, a run is never made twice at a time. A
script that outlives its benchmark is asked once more by the next one, and is over at once.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from benchmark import record
from benchmark.definitions import Folders, Suite
from benchmark.provenance import THREADS, BenchmarkError, machine, sources_at

POLL_SECONDS = 0.2
WALK = Path(__file__).resolve().parent / "walk.py"


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with one environment, variant and seed."""

    suite: Suite
    environment: str
    variant: str
    seed: int
    folders: Folders

    @property
    def key(self) -> tuple[str, str, int]:  # among the runs of its suite
        return self.environment, self.variant, self.seed

    @property
    def name(self) -> str:
        parts = (self.environment.replace("/", "-"), self.variant, f"seed{self.seed}")
        return "/".join(part for part in parts if part)

    @property
    def folder(self) -> Path:  # where it works, not committed
        return self.folders.runs / self.suite.name / self.name

    @property
    def log(self) -> Path:  # where the script puts its checkpoint and logs
        return self.folder / "runs" / "run"

    @property
    def checkpoint(self) -> Path:  # what the script can continue from
        return self.log / self.suite.checkpoint

    @property
    def result(self) -> Path:  # record and curve, once it is finished
        return self.folder / "result.json"

    @property
    def script(self) -> str:
        return self.suite.variants[self.variant].script

    @property
    def file(self) -> str:  # the script in the folder
        return Path(self.script).name

    @property
    def flags(self) -> list[str]:  # those that decide the result
        flags, steps = ["--seed", str(self.seed)], self.suite.total_timesteps
        if steps:
            flags = ["--env-id", self.environment, *flags, "--total-timesteps", str(steps)]
        return flags + self.suite.variants[self.variant].flags.split()

    def sources(self, commit: str) -> dict[str, str]:
        """Texts of the script and of what it imports, by file name, with the variant's changes."""
        texts = sources_at(commit, self.script)
        own = changed(texts[self.file], self.suite.variants[self.variant].replaced)
        return texts | {self.file: own}


def select(
    suite: Suite, folders: Folders, seeds: tuple[int, ...] = (), only: str = "*"
) -> list[Run]:
    """Runs of a suite, seed by seed, in the order in which they are to be made.

    Args:
        seeds: instead of the suite's own.
        only: shell pattern for the whole name of a run or one of its parts.

    Raises:
        BenchmarkError: nothing is selected, or a seed is negative.
    """
    if seeds and min(seeds) < 0:
        raise BenchmarkError(f"A seed must not be negative: {min(seeds)}.")
    wanted = [
        (environment, variant, seed)
        for environment in suite.environments
        for variant in suite.variants
        for own in [suite.seeds(environment, variant)]
        for seed in own and (seeds or own)
    ]
    wanted = sorted(dict.fromkeys(wanted), key=lambda x: x[2])  # each once, seed by seed
    folders = dataclasses.replace(folders, runs=folders.runs.absolute())  # Ray starts elsewhere
    runs = [Run(suite, *x, folders) for x in wanted]
    runs = [x for x in runs if fnmatch.filter([x.name, *x.name.split("/")], only)]
    if not runs:
        raise BenchmarkError(
            f"No run of {suite.name} fits {only}; names look like "
            f"{next(iter(suite.environments))}/seed1 (see: list {suite.name})."
        )
    return runs


# --- Files ---


@contextlib.contextmanager
def lock(path: Path, kind: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[IO | None]:
    """Hold a lock, which children may inherit; None if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:  # NFS wants writing for one kind of lock, reading for the other
        try:
            fcntl.flock(file, kind)
        except BlockingIOError:
            file = None
        yield file


def is_locked(run: Run) -> bool:
    """Whether somebody is working on the run; several may ask at the same time."""
    if not run.folder.exists():
        return False
    with lock(run.folder / "lock", fcntl.LOCK_SH | fcntl.LOCK_NB) as held:
        return held is None


def write_text(path: Path, text: str) -> None:
    """Write a file that is as it was or as it should be, whatever happens meanwhile."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of this process alone
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def say(text: str) -> None:
    """Print a line with the time; whoever read this may have gone, the runs go on."""
    with contextlib.suppress(BrokenPipeError):
        print(time.strftime("%H:%M:%S"), text, flush=True)


# --- The run ---


def changed(text: str, replaced: Iterable[Iterable[str]]) -> str:
    """A script with texts replaced, each of which must be in it once; or a BenchmarkError."""
    for old, new in replaced:
        if text.count(old) != 1:
            raise BenchmarkError(f"The script has this text {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return text


def prepare(run: Run, commit: str) -> dict[str, Any]:
    """Begin the run, unless it can be continued; note commit and machines; return the note."""
    path = run.folder / "note.json"
    if run.checkpoint.exists() and path.exists():
        note = json.loads(path.read_text())
    else:
        shutil.rmtree(run.log, ignore_errors=True)  # nothing to continue from
        for name, text in run.sources(commit).items():
            write_text(run.folder / name, text)
        note = {"commit": commit, "machines": []}
    if machine() not in note["machines"]:
        note["machines"].append(machine())
    write_text(path, json.dumps(note))
    other = "" if note["commit"] == commit else f" (script of {note['commit'][:7]})"
    say(f"{run.name} {'continues' if run.checkpoint.exists() else 'starts'}{other}")
    return note


def peak_mib(pid: int) -> int:
    """Most memory that a running process has had; 0 where /proc does not say it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            return int(found[1]) // 1024
    return 0


def call(run: Run, words: list[str], held: IO, stop: threading.Event) -> int:
    """Peak memory in MiB of a Python process, which is told to end once `stop` is set.

    Raises:
        BenchmarkError: it failed, or was told to end; with the last line that it has said.
    """
    path, peak = run.folder / "output.txt", 0
    with path.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=run.folder,
            env={**os.environ, **THREADS, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[held.fileno()],
            start_new_session=True,  # Ctrl-C is ours to answer
        )
    while process.poll() is None:
        try:
            if stop.is_set():
                process.terminate()
            peak = max(peak, peak_mib(process.pid))
            time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:  # so Ray cancels; locally, `stop` is all that comes here
            stop.set()
    if process.returncode:
        *_, last = ["", *path.read_text().strip().splitlines()]
        raise BenchmarkError(f"ended with exit code {process.returncode}: {last}")
    return peak


def run_one(run: Run, commit: str, stop: threading.Event | None = None) -> str:
    """Make a run, or continue it where it was interrupted.

    Args:
        run: any; one that is finished, or that another process works on, is left alone.
        commit: version of the script for a new run; a begun one keeps its own.
        stop: when set, the script is asked to end and the run is left for later.
    """
    stop = stop or threading.Event()
    with lock(run.folder / "lock") as held:
        if held is None:
            return "left to another process"
        if not run.result.exists():
            whole, start = not run.checkpoint.exists(), time.monotonic()
            note, peak = prepare(run, commit), 0
            if not (run.log / "results.json").exists():  # a run of stages that is over
                flags = [*run.flags, "--run-name", "run"] if whole else ["--resume", "runs/run"]
                peak = call(run, [run.file, *flags], held, stop)
            seconds = time.monotonic() - start if whole else None
            if run.suite.evaluated:
                call(run, ["-P", str(WALK), run.file], held, stop)  # -P: not beside `statistics`
            keep(run, note, seconds, peak)
    return "done"


def keep(run: Run, note: dict[str, Any], seconds: float | None, peak: int) -> None:
    """Write the result of a finished run into its folder."""
    suite = run.suite
    if suite.total_timesteps:
        facts, curve = record.of_steps(run.log, suite.total_timesteps, suite.points)
    else:
        facts, curve = record.of_stages(run.log, seconds, suite.points)
    if suite.evaluated:
        facts["walk"] = record.of_walk(run.log)
    first, *others = note["machines"]
    if others:
        facts["continued_on"] = others
    about = {name: getattr(run, name) for name in ("environment", "variant", "seed", "script")}
    about |= {"flags": " ".join(run.flags), "commit": note["commit"], "peak_mib": peak}
    content = {"record": about | first | facts, "curve": curve.to_dict("list")}
    write_text(run.result, json.dumps(content, ensure_ascii=False))
