"""Steps per second of our scripts against their peers, measured side by side.

The contenders of a contest run one after the other, in turns (A B A B ...), each time as a new
process with an empty compiler cache, on the same environment with the same settings and threads.
The rate is that between the first and the last iteration that a contender logs for TensorBoard;
start-up (imports, environment, compiling) stands beside it. On a machine that does other work too,
only the ratios mean something; that of processor time is disturbed least, for which the process is
taken to be as busy all the time as it was on average. Our scripts are those of the last commit.
Every measurement is kept at once, as a line of results/throughput.jsonl.
"""

import itertools
import os
import tempfile
import time
from pathlib import Path

from benchmark.definitions import Contender, Folders
from benchmark.provenance import ROOT, BenchmarkError, commit_named, machine, source_at
from benchmark.results import lines_of, write_lines
from benchmark.run import last_line, start
from benchmark.suites import CONTESTS


def logged(folder: Path) -> list[tuple[int, float]]:
    """Steps and time of each iteration that a contender has logged."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = (x for path in folder.glob("**/events.*") for x in EventFileLoader(str(path)).Load())
    # An event that is no summary marks the start of a log: compiling comes after it.
    made = {x.step: x.wall_time for x in events if x.step and x.HasField("summary")}
    return sorted(made.items())


def rates(points: list[tuple[int, float]], start: float) -> dict[str, float]:
    """Steady rate of a contender that was started then; start-up is what it took beyond that."""
    (first, begin), *_, (last, end) = points
    rate = (last - first) / (end - begin)
    return {"steps_per_second": rate, "start_seconds": max(0.0, begin - start - first / rate)}


def measure(contender: Contender, commit: str, threads: int) -> dict[str, float]:
    """Rate, processor time and memory of a contender; a BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, file = Path(name), Path(contender.file).name
        (folder / file).write_text(source_at(commit, contender.file))
        words, cache = [file, *contender.arguments], f"{folder}/cache"
        begin = time.time()
        process = start(folder, words, ROOT, threads, TORCHINDUCTOR_CACHE_DIR=cache)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds, points = time.time() - begin, logged(folder)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or len(points) < 3:
            raise BenchmarkError(f"{contender.name} failed: {last_line(folder)}")
    found = rates(points, begin)
    share = (usage.ru_utime + usage.ru_stime) / seconds  # of a core, all in all
    found["steps_per_cpu_second"] = found["steps_per_second"] / share
    return {**found, "peak_mib": usage.ru_maxrss / 1024}  # Linux counts KiB


def measure_all(names: list[str], repetitions: int, folders: Folders) -> None:
    """Make the measurements of contests that are missing at this commit, and keep each.

    Raises:
        BenchmarkError: nothing is to be repeated, or a contender failed.
    """
    if repetitions < 1:
        raise BenchmarkError("--repetitions must be positive.")
    path, commit = folders.results / "throughput.jsonl", commit_named("HEAD")
    folders.results.mkdir(parents=True, exist_ok=True)
    for name, contest in ((x, CONTESTS[x]) for x in names or CONTESTS):
        about = {"contest": name, "title": contest.title, "commit": commit}
        about["contenders"] = [x.name for x in contest.contenders]
        before = [x for x in lines_of(path) if x.items() >= about.items()]
        done = {(x.get("repetition"), x.get("contender")) for x in before}
        for turn, contender in itertools.product(range(repetitions), contest.contenders):
            if (turn, contender.name) in done:
                continue
            found = measure(contender, commit, contest.threads)
            which = {"repetition": turn, "contender": contender.name, "target": contender.target}
            which["command"] = " ".join(["python", contender.file, *contender.arguments])
            write_lines(path, [*lines_of(path), {**about, **which, **machine(), **found}])
            rate = f"{found['steps_per_second']:.0f} steps/s"
            print(f"{name} {turn + 1}/{repetitions} {contender.name}: {rate}", flush=True)
