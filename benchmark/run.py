"""One run: a process of its own that makes or continues it, and keeps its result in its folder.

    python -m benchmark.run RUN COMMIT

That process (`execute.py` starts it) runs the script as it is in a commit, so that edits made
meanwhile change nothing. It holds the run's lock, which the script inherits: whoever is killed, a
run is never made twice at a time. It imports little before the script has ended, because no child
is said to have used less memory than its parent.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from benchmark.definitions import Folders, Suite
from benchmark.provenance import THREADS, BenchmarkError, machine, sources_at

POLL_SECONDS = 0.2
ELSEWHERE = 75  # exit code: another process is working on the run


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with one environment, variant and seed."""

    suite: str
    environment: str
    variant: str
    seed: int
    script: str
    flags: list[str]  # those that decide the result
    total_steps: int | None  # None: a run of stages, which ends with results.json
    points: int  # of its curve
    resumes_from: str
    evaluated: bool
    runs: str  # folder of all runs
    replaced: list[list[str]]  # texts of the script, and what takes their place

    @property
    def key(self) -> tuple[str, str, int]:  # among the runs of its suite
        return self.environment, self.variant, self.seed

    @property
    def name(self) -> str:
        parts = (self.environment.replace("/", "-"), self.variant, f"seed{self.seed}")
        return "/".join(part for part in parts if part)

    @property
    def folder(self) -> Path:  # where it works, not committed
        return Path(self.runs) / self.suite / self.name

    @property
    def log(self) -> Path:  # where the script puts its checkpoint and logs
        return self.folder / "runs" / "run"

    @property
    def checkpoint(self) -> Path:  # what the script can continue from
        return self.log / self.resumes_from

    @property
    def result(self) -> Path:  # record and curve, once it is finished
        return self.folder / "result.json"

    @property
    def file(self) -> str:  # the script in the folder
        return Path(self.script).name

    @property
    def command(self) -> list[str]:
        place = ["--resume", "runs/run"] if self.checkpoint.exists() else ["--run-name", "run"]
        return [sys.executable, self.file, *self.flags, *place]


def make_run(suite: Suite, environment: str, variant: str, seed: int, folders: Folders) -> Run:
    """A run of a suite."""
    flags = ["--seed", str(seed)]
    if suite.total_timesteps:
        flags = ["--env-id", environment, *flags, "--total-timesteps", str(suite.total_timesteps)]
    return Run(
        suite=suite.name,
        environment=environment,
        variant=variant,
        seed=seed,
        script=suite.variants[variant].script,
        flags=flags + suite.variants[variant].flags.split(),
        total_steps=suite.total_timesteps,
        points=suite.points,
        resumes_from=suite.checkpoint,
        evaluated=suite.evaluated,
        runs=str(folders.runs.absolute()),
        replaced=[list(x) for x in suite.variants[variant].replaced],
    )


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
    runs = [make_run(suite, *x, folders) for x in wanted]
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


# --- The process ---


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
        sources = sources_at(commit, run.script)
        sources |= {run.file: changed(sources[run.file], run.replaced)}
        for name, text in sources.items():
            write_text(run.folder / name, text)
        note = {"commit": commit, "machines": []}
    if machine() not in note["machines"]:
        note["machines"].append(machine())
    write_text(path, json.dumps(note))
    other = "" if note["commit"] == commit else f" (script of {note['commit'][:7]})"
    say(f"{run.name} {'continues' if run.checkpoint.exists() else 'starts'}{other}")
    return note


def call(run: Run, command: list[str], held: IO, asked: list[int]) -> int:
    """Exit code of a process of the script, which is told to end once this process was."""
    with (run.folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            command,
            cwd=run.folder,
            env={**os.environ, **THREADS, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[held.fileno()],
        )
    while process.poll() is None:
        if asked:
            process.terminate()
        time.sleep(POLL_SECONDS)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def work(run: Run, commit: str) -> int:
    """Make a run, or continue it where it was interrupted; returns the exit code of the script.

    Args:
        run: any; one that is finished, or that another process works on, is left alone.
        commit: version of the script for a new run; a begun one keeps its own.
    """
    asked: list[int] = []  # to end
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    with lock(run.folder / "lock") as held:
        if held is None:
            return ELSEWHERE
        if run.result.exists():
            return 0
        whole, start = not run.checkpoint.exists(), time.monotonic()
        note = prepare(run, commit)
        over = (run.log / "results.json").exists()  # a run of stages
        if not over and (code := call(run, run.command, held, asked)):
            return code
        seconds = time.monotonic() - start if whole else None
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # Linux counts KiB
        play = [sys.executable, run.file, "--evaluate", "runs/run"]
        if run.evaluated and (code := call(run, play, held, asked)):
            return code
        keep(run, note, seconds, round(peak))
    return 0


def keep(run: Run, note: dict[str, Any], seconds: float | None, peak_mib: int) -> None:
    """Write the result of a finished run into its folder."""
    from benchmark import record  # pandas and torch, of whose memory the script is to be free

    if run.total_steps:
        facts, curve = record.of_steps(run.log, run.total_steps, run.points)
    else:
        facts, curve = record.of_stages(run.log, seconds, run.points)
    if run.evaluated:
        facts["walk"] = record.of_walk(run.log)
    first, *others = note["machines"]
    if others:
        facts["continued_on"] = others
    about = {name: getattr(run, name) for name in ("environment", "variant", "seed", "script")}
    about |= {"flags": " ".join(run.flags), "commit": note["commit"], "peak_mib": peak_mib}
    content = {"record": about | first | facts, "curve": curve.to_dict("list")}
    write_text(run.result, json.dumps(content, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(work(Run(**json.loads(sys.argv[1])), sys.argv[2]))
