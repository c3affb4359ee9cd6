"""Runs: a script as it is in a commit, with one environment, variant and seed.

Whatever is killed at whatever moment, the next call goes on from what is on disk.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from resource import struct_rusage

from benchmark import record
from benchmark.definitions import Folders, Suite, Variant
from benchmark.provenance import BenchmarkError, git, machine, source_at

WALK = Path(__file__).resolve().parent / "walk.py"
# One thread per process: a second one gains nothing on networks of this size and, being shared
# between runs, would make their times depend on each other.
THREADS = [f"{x}_NUM_THREADS" for x in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a suite, finished or not."""

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
    def folder(self) -> Path:  # where the script works, not committed
        return self.folders.runs / self.suite.name / self.name

    @property
    def log(self) -> Path:  # where the script puts its checkpoint
        return self.folder / "runs" / "run"

    @property
    def begun(self) -> bool:  # so far that it can be continued
        return (self.log / self.suite.checkpoint).exists()

    @property
    def script(self) -> str:
        return self.suite.variants[self.variant].script

    @property
    def flags(self) -> list[str]:  # those that decide the result
        flags, steps = ["--seed", str(self.seed)], self.suite.total_timesteps
        if steps:
            flags = ["--env-id", self.environment, *flags, "--total-timesteps", str(steps)]
        return flags + self.suite.variants[self.variant].flags.split()


def select(
    suite: Suite, folders: Folders, seeds: tuple[int, ...] = (), only: str = "*"
) -> list[Run]:
    """Runs of a suite, seed by seed: with other seeds; those whose name or a part of it fits."""
    if seeds and min(seeds) < 0:
        raise BenchmarkError(f"A seed must not be negative: {min(seeds)}.")
    folders = dataclasses.replace(folders, runs=folders.runs.absolute())  # scripts work elsewhere
    runs = [
        Run(suite, environment, variant, seed, folders)
        for environment in suite.environments
        for variant in suite.variants
        for own in [suite.seeds(environment, variant)]
        for seed in dict.fromkeys(own and (seeds or own))
    ]
    runs = [x for x in runs if fnmatch.filter([x.name, *x.name.split("/")], only)]
    if not runs:
        example = f"{next(iter(suite.environments))}/seed1 (see: list {suite.name})"
        raise BenchmarkError(f"No run of {suite.name} fits {only}; names look like {example}.")
    return sorted(runs, key=lambda x: x.seed)


# --- Files ---


@contextlib.contextmanager
def lock(path: Path, kind: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[bool]:
    """Hold a lock, as do scripts that are started meanwhile; False if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, kind)
        except BlockingIOError:
            file = None
        yield file is not None


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


def changed(text: str, replaced: Iterable[Iterable[str]]) -> str:
    """A script with texts replaced, each of which must be in it once; or a BenchmarkError."""
    for old, new in replaced:
        if text.count(old) != 1:
            raise BenchmarkError(f"The script has this text {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return text


def source(variant: Variant, commit: str) -> str:
    """Text of a variant's script in a commit, or a BenchmarkError."""
    return changed(source_at(commit, variant.script), variant.replaced)


def tree(commit: str, folder: Path) -> Path:
    """The folder, in another one, with the Python files of a commit, taken from git once."""
    files = folder / commit
    with lock(folder / "lock", fcntl.LOCK_EX), tempfile.TemporaryDirectory(dir=folder) as new:
        if not files.exists():
            git("archive", "--output", f"{new}/files.tar", commit, "*.py")
            shutil.unpack_archive(f"{new}/files.tar", f"{new}/files")
            os.replace(f"{new}/files", files)
    return files


# --- Making runs ---


def make(runs: list[Run], commit: str, workers: int) -> Iterator[tuple[Run, str]]:
    """Make runs, so many at a time; yields each that has ended and what went wrong, if anything."""
    waiting, working = runs[::-1], {}
    try:
        while waiting or working:
            if waiting and len(working) < workers:
                run, usage = waiting.pop(), None
                steps = make_one(run, commit)
            else:
                pid, status, usage = os.wait4(-1, 0)  # whichever ends first
                run, steps, process = working.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                if process.returncode:
                    yield run, f"ended with exit code {process.returncode}: {last_line(run.folder)}"
                    continue
            try:
                process = steps.send(usage)
                working[process.pid] = run, steps, process
            except StopIteration:
                yield run, ""
            except Exception as error:  # the other runs go on
                yield run, str(error) or repr(error)
    finally:  # some still work if this is to stop
        for *_, process in working.values():
            process.terminate()
            process.wait()


def make_one(run: Run, commit: str) -> Generator[subprocess.Popen, struct_rusage, None]:
    """Make a run, or continue it with the script that began it, and write its result.

    Yields each process that it starts, and is sent what that has used if it ends well.
    """
    begun, suite, file = run.begun, run.suite, Path(run.script).name
    note = run.folder / "note.json"
    if begun:
        commit, flags = json.loads(note.read_text())["commit"], ["--resume", "runs/run"]
    else:
        flags = [*run.flags, "--run-name", "run"]
        shutil.rmtree(run.log, ignore_errors=True)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / file, source(suite.variants[run.variant], commit))
        write_text(note, json.dumps({"commit": commit}))
    say(f"{run.name} {'continues' if begun else 'starts'}, commit {commit[:7]}")
    imports = tree(commit, run.folders.runs / "trees")
    usage = yield start(run.folder, [file, *flags], imports)
    if suite.evaluated:  # -P: not beside our `statistics`
        yield start(run.folder, ["-P", str(WALK), file], imports)

    if suite.total_timesteps:
        facts, curve = record.summarize_steps(run.log, suite.total_timesteps, suite.points)
    else:
        seconds = None if begun else usage.ru_utime + usage.ru_stime
        facts, curve = record.summarize_stages(run.log, seconds, suite.points)
    if suite.evaluated:
        facts["walk"] = record.summarize_walk(run.log)
    about = {name: getattr(run, name) for name in ("environment", "variant", "seed", "script")}
    about |= {"flags": " ".join(run.flags), "commit": commit}
    about["peak_mib"] = usage.ru_maxrss // 1024  # Linux counts KiB
    content = {"record": about | machine() | facts, "curve": curve.to_dict("list")}
    write_text(run.folder / "result.json", json.dumps(content, ensure_ascii=False))


def start(
    folder: Path, words: list[str], imports: Path, threads: int = 1, **variables: str
) -> subprocess.Popen:
    """Start Python in a folder, on processors; our modules are those below `imports`."""
    variables |= dict.fromkeys(THREADS, str(threads)) | {"CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = f"{imports}{os.pathsep}{imports / 'benchmark/rivals'}"
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            close_fds=False,  # it inherits a lock
            start_new_session=True,  # Ctrl-C is ours to answer
        )


def last_line(folder: Path) -> str:
    """What a process that was started there has said last."""
    *_, last = ["no word", *(folder / "output.txt").read_text().strip().splitlines()]
    return last
