"""Makes runs, in local processes or on a Ray cluster: skips, continues, retries, stops when asked.

Both ways call `run_one`, which returns once a run is over. Every run is a process of its own, and
whoever works on one holds its lock, which that process inherits: so several benchmarks may work on
a suite, and a process that outlives its benchmark is not started twice.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, Literal

from benchmark import results
from benchmark.provenance import ROOT, THREADS, BenchmarkError, source_at
from benchmark.runs import Run, is_locked, lock, read_note, write_note, write_text

POLL_SECONDS = 0.2
LINE_SECONDS = 60  # between lines of progress
ATTEMPTS = 2  # one crash may be the machine's fault
LOST_NODES = 5  # that one run survives on Ray; each costs it what follows its last checkpoint
STOPPED = {128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}  # exit codes, by a person


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended; "elsewhere" if another process is working on it."""

    kind: Literal["done", "elsewhere", "stopped", "failed"]
    text: str = ""


def say(text: str) -> None:
    """Print a line with the time; whoever read this may have gone, the runs go on."""
    with contextlib.suppress(BrokenPipeError):
        print(time.strftime("%H:%M:%S"), text, flush=True)


# --- One run ---


def run_one(run: Run, commit: str, stop: threading.Event | None = None) -> Outcome:
    """Make a run, or continue it where it was interrupted, and keep its result.

    Args:
        run: any; one that is done, or that another process works on, is left alone.
        commit: version of the script for a new run; a begun one keeps its own.
        stop: when set, the script is asked to end and the run is left for later.
    """
    stop = stop or threading.Event()
    if stop.is_set():
        return Outcome("stopped", "not begun")
    with lock(run) as held:
        if held is None:
            time.sleep(POLL_SECONDS)  # whoever asks again, is not to ask too often
            return Outcome("elsewhere")
        if run.key in results.done(run.suite, run.folders):
            return Outcome("done", "made by another process")
        crashes = 0
        while not run.is_finished():  # it may be: by a process that outlived its benchmark
            code = work(run, commit, held, stop)
            if run.is_finished():
                break
            if stop.is_set() or code in STOPPED:
                say(f"{run.name} stopped at step {run.progress()}; `run` again continues it")
                return Outcome("stopped", "by a person")
            crashes, error = crashes + 1, reason(run, code)
            note = read_note(run)
            write_note(run, note | {"crashes": note.get("crashes", 0) + 1, "error": error})
            if crashes == ATTEMPTS:
                return Outcome("failed", error)
            say(f"{run.name} crashed ({error}); once more")
        record = results.add(run)
    score = "no episode ended" if record["score"] is None else f"score {record['score']:.2f}"
    return Outcome("done", score + (f", {record['hours']:.2f} h" if record["hours"] else ""))


def work(run: Run, commit: str, held: IO, stop: threading.Event) -> int:
    """Start or continue the script, wait for its end, note its memory; returns its exit code."""
    process, pid = start(run, commit, held), 0
    while not pid:
        try:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if stop.is_set() and not pid:
                os.kill(process.pid, signal.SIGTERM)
            time.sleep(0 if pid else POLL_SECONDS)
        except KeyboardInterrupt:  # so Ray cancels; locally, `stop` is all that comes here
            stop.set()
    process.returncode = os.waitstatus_to_exitcode(status)
    note, mebibytes = read_note(run), round(usage.ru_maxrss / 1024)  # Linux counts KiB
    write_note(run, note | {"peak_mib": max(mebibytes, note.get("peak_mib", 0))})
    return process.returncode


def start(run: Run, commit: str, held: IO) -> subprocess.Popen:
    """Start or continue the script in a process that inherits the lock `held`."""
    note = read_note(run)
    if not run.checkpoint.exists():
        shutil.rmtree(run.log, ignore_errors=True)  # nothing to continue from
        note = {"commit": commit, "starts": 0, "crashes": note.get("crashes", 0)}
        write_text(run.folder / run.definition.script, source_at(commit, run.definition.script))
    note["starts"] = note.get("starts", 0) + 1
    note.pop("error", None)
    write_note(run, note)
    step = run.progress()
    other = "" if note["commit"] == commit else f" (script of {note['commit'][:7]})"
    say(f"{run.name} {f'continues from step {step}' if step else 'starts'}{other}")
    with (run.folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            run.command,
            cwd=run.folder,
            env={**os.environ, **THREADS, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to answer
            pass_fds=[held.fileno()],
        )


def reason(run: Run, code: int) -> str:
    """Why a script failed: the last line it printed, or how it ended."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = (run.folder / "output.txt").read_text().strip().splitlines()
    return lines[-1] if code and lines else f"exit code {code}"


def state(run: Run) -> str:
    """One of done, running, failed, interrupted, waiting."""
    if run.key in results.done(run.suite, run.folders):
        return "done"
    if is_locked(run):
        return "running"
    if "error" in read_note(run):
        return "failed"
    return "interrupted" if run.progress() else "waiting"


# --- Many runs ---


def run_all(
    runs: list[Run], missing: list[Run], submit: Callable[[Run], concurrent.futures.Future]
) -> int:
    """Hand all missing runs to `submit` and say how far they are; returns how many failed."""
    outcomes: dict[Run, Outcome] = {}

    def steps() -> int:
        return sum(run.total_steps if run in outcomes else run.progress() for run in missing)

    say(f"{len(runs)} runs, {len(runs) - len(missing)} of them done before.")
    first, start_time = steps(), time.monotonic()
    line_time, awaited = start_time, set()
    pending = {submit(run): run for run in missing}
    while pending:
        ended, _ = concurrent.futures.wait(pending, POLL_SECONDS, return_when="FIRST_COMPLETED")
        for future in ended:
            run, error = pending.pop(future), future.exception()
            lines = str(error).strip().splitlines() or [repr(error)]
            outcome = Outcome("failed", lines[-1]) if error else future.result()
            if outcome.kind == "elsewhere":
                pending[submit(run)] = run
                if run not in awaited:
                    say(f"{run.name} is being run by another process: left for later")
                awaited.add(run)
            else:
                outcomes[run] = outcome
                say(f"{run.name} {outcome.kind}: {outcome.text}")
        if (now := time.monotonic()) - line_time >= LINE_SECONDS:
            line_time, made = now, steps()
            rate = (made - first) / (now - start_time)
            total = sum(run.total_steps for run in missing)
            hours = f"{(total - made) / rate / 3600:.1f} hours left" if rate else "no step made yet"
            say(f"{made / total:.0%}, {rate:.0f} steps/s, {hours}")
    failed = sum(outcome.kind != "done" for outcome in outcomes.values())
    say(f"{len(runs) - failed} of {len(runs)} runs done.")
    return failed


def run_local(runs: list[Run], missing: list[Run], commit: str, workers: int) -> int:
    """Make so many runs at a time; a KeyboardInterrupt ends when all have been stopped."""
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            submit = functools.partial(pool.submit, run_one, commit=commit, stop=stop)
            return run_all(runs, missing, submit)
        except BaseException:
            stop.set()  # else the pool would wait for the ends of all runs
            raise


def run_ray(runs: list[Run], missing: list[Run], commit: str) -> int:
    """Make runs on the Ray cluster of RAY_ADDRESS or of this machine, one per processor core.

    If a node is lost, Ray starts its runs again on another, where they continue.

    Raises:
        BenchmarkError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise BenchmarkError("--cluster ray needs Ray: pip install ray.") from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    package = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # the nodes share this folder
    try:
        ray.init(address=address, runtime_env=package, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:  # none, not reached, no address
        raise BenchmarkError(
            f"There is no Ray cluster at {address}: start one with ray start --head."
        ) from error
    options = {"num_cpus": 1, "max_retries": LOST_NODES, "scheduling_strategy": "SPREAD"}
    task, references = ray.remote(**options)(run_one), []

    def submit(run: Run) -> concurrent.futures.Future:
        references.append(task.remote(run, commit))
        return references[-1].future()

    try:
        return run_all(runs, missing, submit)
    except KeyboardInterrupt:
        for reference in references:
            ray.cancel(reference)  # a KeyboardInterrupt in `work`
        ray.wait(references, num_returns=len(references))
        raise
    finally:
        ray.shutdown()
