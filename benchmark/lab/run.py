"""Makes runs, here or on a Ray cluster, and keeps their results.

A `Run` says all that is to be known of one: `seeds` has a script on disk, a suite one of a commit.
Whatever is killed at whatever moment, the next call goes on from what is on disk.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from benchmark.lab import logs, record, results
from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT, BenchmarkError, edited, machine
from benchmark.lab.results import to_json, write_text

ENDED = "ended"  # file in the folder of a run whose script has ended with exit code 0
# One thread per process: a second one gains nothing on networks of this size and, being shared
# between runs, would make their times depend on each other.
THREADS = [f"{x}_NUM_THREADS" for x in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")]
# A progress bar: share, iterations done and in all, time left, and what follows the rate.
BAR = re.compile(r"(\d+)%\|.*?\| *(\d+)/(\d+) \[[\d:]+<([\d:?]+)(?:, *\S+/\w+)?,? ?([^\]]*)")
PACE = 30  # seconds between two lines about a run at work
GLANCE = 0.1  # seconds between two looks at the first run, for which the others wait
FIRST = 120  # seconds after which the others start, even if the first run shows no progress
COMPILES = re.compile(r".*\bcompile.*")  # what a script says of it, before its first iteration
LOST_NODES = 5  # that one run survives on Ray; each costs it what follows its last checkpoint


# --- Runs ---


@dataclasses.dataclass(frozen=True)
class Run:
    """A script, its command line, the folder where it works, and facts that its result gets."""

    name: str  # for people: the end of the folder's path
    folder: Path
    script: Path  # where its text is, or is to be
    text: str
    flags: list[str]  # with which it begins
    resume: list[str]  # with which it continues from its checkpoint; empty if it cannot
    variables: dict[str, str]  # of its environment
    facts: dict[str, Any]  # "environment", "variant" and "seed", and whatever else is known
    imported: dict[Path, str] = dataclasses.field(default_factory=dict)  # hashes of local modules
    keeps_weights: bool = True  # once its result is kept: those of language models fill disks

    @property
    def begun(self) -> bool:  # so far that it can be continued; stages of RLHF cannot
        return bool(self.resume) and has_checkpoint(self.folder)


def log_in(folder: Path) -> Path:
    """Where in its folder a script puts its checkpoint; it may choose the name."""
    named = folder / "runs" / "run"
    return named if named.exists() else logs.main_folder(folder) or named


def has_checkpoint(folder: Path) -> bool:
    """Whether the script of a run has saved where it was."""
    return (log_in(folder) / "checkpoint.pt").exists()


def has_ended(folder: Path) -> bool:
    """Whether the script of a run has ended well. Its log is never deleted."""
    return (folder / ENDED).exists() or (log_in(folder) / "results.json").exists()


def require_workers(workers: int | None) -> None:
    """A BenchmarkError if no run can be made here, or if none is to be made at a time."""
    if sys.platform == "win32":
        raise BenchmarkError("Runs are made on Linux and macOS only: on Windows, use WSL.")
    if workers is not None and workers < 1:
        raise BenchmarkError("--workers must be positive.")


def run_missing(name: str, runs: list[Run], folders: Folders, workers: int | None) -> None:
    """Make those of some runs that have no result yet.

    Args:
        name: of the files with their results, and of the folder that only one process may use.
        workers: runs at a time on this machine; None for a Ray cluster.

    Raises:
        BenchmarkError: somebody else uses this name, or runs failed.
    """
    place = folders.runs / name
    place.mkdir(parents=True, exist_ok=True)
    # The scripts inherit the lock, and hold it if this process is killed.
    lock = FileLock(place / "lock", on_acquired=lambda file: os.set_inheritable(file, True))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        text = f"{name} is being run, or its scripts outlive a killed run."
        raise BenchmarkError(text) from None
    with held:
        results.collect(name, folders)  # what a killed benchmark has left
        done = results.done(name, folders)
        missing = [run for run in runs if results.key_of(run.facts) not in done]
        say(f"{len(runs)} runs, {len(runs) - len(missing)} of them done before.")
        failed = []
        made = make(missing, workers) if workers else make_on_ray(missing)
        with contextlib.closing(made):  # stops the scripts if this is stopped
            for run, error in made:
                results.collect(name, folders)
                if not (error or run.keeps_weights):
                    drop_weights(run.folder)
                say(f"{run.name} {error or 'done'}")
                failed += [f"{run.name} {error}"] * bool(error)
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")


def drop_weights(folder: Path) -> None:
    """Delete checkpoints and models of a run, whose log stays."""
    for path in [*folder.rglob("checkpoint.pt"), *folder.rglob("*.safetensors")]:
        path.unlink()


def say(text: str) -> None:
    """Print a line with the time; whoever read this may have gone, the runs go on."""
    with contextlib.suppress(BrokenPipeError):
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- Processes ---


def start(folder: Path, words: list[str], threads: int = 1, **variables: str) -> subprocess.Popen:
    """Start Python in a folder."""
    known = dict.fromkeys(THREADS, str(threads))
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, **known, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            close_fds=False,  # it inherits a lock
            start_new_session=True,  # Ctrl-C is ours to answer
        )


def outcome(process: subprocess.Popen, seconds: float | None = None) -> int:
    """The exit code of a process, which ends if this is interrupted or takes longer."""
    try:
        return process.wait(seconds)
    finally:  # Ctrl-C does not reach it
        process.kill()
        process.wait()


def peak_mib(used: Any) -> float:
    """The memory of a process by its `resource.struct_rusage`: macOS counts bytes, Linux KiB."""
    return used.ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024)


def printed(folder: Path) -> str:
    """What processes in this folder have printed; each state of a progress bar is a line."""
    return (folder / "output.txt").read_text(errors="replace")


def last_line(folder: Path) -> str:
    """The last line that a process in this folder printed, without its progress bar.

    A mistake on the command line is shown in a box. Of a box, this is the text above its rule.
    """
    text = printed(folder).strip()
    if text.endswith("╯"):
        lines = [x.strip("│ ") for x in text[text.rindex("╭") :].splitlines()[1:-1]]
        return " ".join(itertools.takewhile(lambda x: not x.startswith("──"), lines))
    *_, last = ["no word", *text.splitlines()]
    return re.sub(r".*\d+/\d+ \[.*?\]", "", last).strip() or last


def progress(folder: Path) -> tuple[int, str]:
    """How many iterations the script in a folder has made; they, its return and the time left."""
    found = BAR.findall(printed(folder))
    if not found:
        return 0, "starting"
    share, made, total, left, about = found[-1]
    parts = [f"{share} %", f"iteration {made} of {total}", about, f"{left} left"]
    return int(made), ", ".join(filter(None, parts))


# --- Making runs ---


def make(runs: list[Run], workers: int) -> Iterator[tuple[Run, str]]:
    """Make runs, so many at a time; yields each that has ended and what went wrong, if anything.

    The first one compiles. The others wait until it has made an iteration (or for two minutes,
    since not every script shows that), and take what it has compiled from the disk.
    """
    ended = [x for x in runs if has_ended(x.folder)]  # without a result: not read, or not yet
    for run in ended:
        yield run, finish(run, None)
    waiting, working, ready = [x for x in runs if x not in ended], {}, False
    told = False  # what the first one says of compiling
    begun = shown = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        try:
            while waiting or working:
                while waiting and len(working) < (workers if ready else 1):
                    run = waiting.pop(0)
                    if changed := edited(run.imported):
                        yield run, f"did not start: {changed} has changed since then"
                        continue
                    process = begin(run)
                    working[pool.submit(os.wait4, process.pid, 0)] = run, process
                over, _ = wait(working, PACE if ready else GLANCE, FIRST_COMPLETED)
                now = time.monotonic()
                states = {x.name: progress(x.folder) for x, _ in working.values()}
                for run, _ in () if ready or told else working.values():
                    if line := COMPILES.search(printed(run.folder)):
                        told = True
                        say(f"{run.name}: {line[0]}{' The others wait.' * bool(waiting)}")
                if now - shown > PACE:
                    shown = now
                    for name, (_, state) in states.items():
                        say(f"{name}: {state}")
                for waited in over:
                    run, process = working.pop(waited)
                    _, status, used = waited.result()
                    process.returncode = code = os.waitstatus_to_exitcode(status)
                    if code == 2 and not ready and not run.begun:
                        reason = last_line(run.folder).removeprefix("Error: ")
                        raise BenchmarkError(f"{run.script.name} does not start: {reason}")
                    ready = True
                    if code:
                        yield run, f"ended with exit code {code}: {last_line(run.folder)}"
                    else:
                        yield run, finish(run, used)
                ready |= any(made for made, _ in states.values()) or now - begun > FIRST
        finally:  # some still work if this is to stop
            stop(working)


def stop(working: dict[Future, tuple[Run, subprocess.Popen]]) -> None:
    """End scripts, which threads wait for, and then what they have started."""
    pids = [process.pid for _, process in working.values()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    try:
        wait(working)
    finally:  # also if this is interrupted once more
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left
                os.killpg(pid, signal.SIGKILL)  # simulators that outlive their script


def begin(run: Run) -> subprocess.Popen:
    """Start a run, or continue it."""
    begun = run.begun
    if not begun:
        shutil.rmtree(run.folder, ignore_errors=True)  # of a run that has not ended
        run.folder.mkdir(parents=True)
        write_text(run.folder / "note.json", to_json(run.facts))
    script = written(run)
    say(f"{run.name} {'continues' if begun else 'starts'}")
    words = [str(script), *(run.resume if begun else run.flags)]
    return start(run.folder, words, **run.variables)


def written(run: Run) -> Path:
    """The file of a run's script: if somebody has edited it since, a new one next to it, since it
    may read files there."""
    path = run.script
    if path.exists() and path.read_text() != run.text:
        digest = hashlib.sha256(run.text.encode()).hexdigest()
        path = path.with_name(f".{path.stem}-{digest[:8]}.py")
        about = f"{run.name} runs {path.name}, its earlier version"
        say(f"{run.script.name} has changed since then: {about}")
    if not path.exists():
        write_text(path, run.text)
    return path


def finish(run: Run, used: Any) -> str:
    """Write the result of a run whose script has ended; returns what went wrong, if anything.

    Args:
        used: by the script, a `resource.struct_rusage`; None if nobody knows.
    """
    (run.folder / ENDED).touch()
    try:
        facts, curve = summarized(run, used and used.ru_utime + used.ru_stime)
    except Exception as error:  # whatever a script can leave; the other runs go on
        return f"{str(error) or repr(error)}; delete {run.folder} to run it again"
    about = {**run.facts, "peak_mib": used and int(peak_mib(used)), **machine(), **facts}
    content = {"record": about, "curve": curve.to_dict("list")}
    write_text(run.folder / results.FILE, to_json(content))
    return ""


def summarized(run: Run, seconds: float | None) -> tuple[dict[str, Any], pd.DataFrame]:
    """Facts about a run and its curve, by what its script has left.

    Args:
        seconds: of a processor that the run took; None if nobody knows.
    """
    log = log_in(run.folder)
    if (log / "results.json").exists():
        return record.summarize_stages(log, seconds)
    if not logs.has_our_checkpoint(log):
        return logs.summarize(log, seconds)
    read = logs.read(log)
    facts, curve = record.summarize_steps(log, read.episodes if read.averaged else None)
    if len(read.episodes):
        facts["scores"] = read.scores
    return facts, curve


def make_on_ray(runs: list[Run]) -> Iterator[tuple[Run, str]]:
    """`make` on the Ray cluster of RAY_ADDRESS or of this machine, one run per processor core.

    If a node is lost, Ray starts its runs again on another, where they continue.
    """
    package = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # the nodes share this folder
    try:
        import ray

        ray.init(os.environ.get("RAY_ADDRESS", "auto"), runtime_env=package, logging_level="error")
    except (ImportError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]  # not installed, no cluster, not reached, no address
        raise BenchmarkError(f"No Ray cluster (pip install ray; ray start): {reason}") from error
    task = ray.remote(num_cpus=1, max_retries=LOST_NODES, scheduling_strategy="SPREAD")(
        lambda run: next(make([run], 1))[1]
    )
    waiting = {task.remote(run): run for run in runs}
    try:
        while waiting:
            (ended,), _ = ray.wait([*waiting])
            try:
                error = ray.get(ended)
            except ray.exceptions.RayError as reason:  # it has many lines
                error = str(reason).splitlines()[-1]
            yield waiting.pop(ended), error
    finally:
        ray.shutdown()  # ends the scripts too
