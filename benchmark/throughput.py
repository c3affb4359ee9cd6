"""Steps per second of our scripts against their peers, measured side by side.

The contenders of a contest run one after the other, in turns (A B A B ...), each time as a new
process with an empty compiler cache, on the same environment with the same settings and threads.
Each is the beginning of a run of a million steps, killed when it has shown its rate, which is that
between its first checkpoint and its last; start-up (imports, environment, compiling) stands beside
it. On a machine that does other work too, only the ratios mean something; the one of processor time
is disturbed least. Our scripts are those of the last commit. Every measurement is kept at once, as
a line of results/throughput.jsonl.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmark.provenance import ROOT, THREADS, BenchmarkError, commit_named, machine, source_at
from benchmark.results import append, lines_of
from benchmark.runs import Folders, steps_saved

WHOLE_RUN = 1_000_000  # steps; never reached, but annealing is that of such a run
POLL_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Contender:
    """A script of this repository with flags, which shows its steps (see `last_step`)."""

    name: str
    steps: int  # after which it is killed: enough for ten iterations or more after the start
    flags: str = ""
    script: str = ""  # if it is not its own name
    target: float | None = None  # ratio to the rate of the last contender that is to be reached

    @property
    def file(self) -> Path:
        return Path(self.script or self.name)

    @property
    def arguments(self) -> list[str]:
        return ["--total-timesteps", str(WHOLE_RUN), *self.flags.split()]


@dataclasses.dataclass(frozen=True)
class Contest:
    """Contenders with equal work; the last one is the peer of those that have a target."""

    title: str
    contenders: tuple[Contender, ...]
    threads: int = 1  # of every contender
    physics: str = ""  # `module:Class.method` that advances the simulation, for the first's profile


CONTESTS = {
    name: Contest(**{**x, "contenders": tuple(Contender(**y) for y in x["contenders"])})
    for name, x in tomllib.loads((ROOT / "benchmark/contests.toml").read_text()).items()
}


# --- Measuring ---


def last_step(folder: Path) -> int:
    """Steps so far by a checkpoint, or by the last whole line of a file that may be growing."""
    for checkpoint in folder.glob("runs/*/checkpoint.pt"):
        return steps_saved(checkpoint)
    lines = (folder / "progress.json").read_text() if (folder / "progress.json").exists() else ""
    *lines, _ = lines.split("\n")
    return json.loads(lines[-1])["time/total_timesteps"] if lines else 0


def rates(points: list[tuple[int, float, float]]) -> dict[str, float]:
    """Steady rates from (step, seconds, processor seconds) whenever a contender showed its steps.

    What comes before the first warms up; start-up is what it took beyond its share of the rate.
    """
    steps, seconds, cpu_seconds = np.array(points, dtype=float).T
    rate = (steps[-1] - steps[0]) / (seconds[-1] - seconds[0])
    return {
        "steps_per_second": rate,
        "steps_per_cpu_second": (steps[-1] - steps[0]) / (cpu_seconds[-1] - cpu_seconds[0]),
        "start_seconds": max(0.0, seconds[0] - steps[0] / rate),
    }


@contextlib.contextmanager
def place(contender: Contender, commit: str, threads: int) -> Iterator[dict[str, Any]]:
    """Where and how a process of a contender is to be started.

    In a folder with the script of a commit, with so many threads, an empty compiler cache, no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / contender.file.name).write_text(source_at(commit, str(contender.file)))
        only = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", "CUDA_VISIBLE_DEVICES": ""}
        only |= dict.fromkeys(THREADS, str(threads))
        yield {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT), **only}}


def measure(contender: Contender, commit: str, threads: int) -> dict[str, float]:
    """Rates and memory of a contender until it has made its steps; a BenchmarkError if it fails."""
    points = [(0, 0.0, 0.0)]  # start, and whenever it has shown its steps
    with place(contender, commit, threads) as options:
        folder = Path(options["cwd"])
        start = time.perf_counter()
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, contender.file.name, *contender.arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )
        watched = psutil.Process(process.pid)
        try:
            while points[-1][0] < contender.steps and watched.status() != psutil.STATUS_ZOMBIE:
                time.sleep(POLL_SECONDS)
                step, now = last_step(folder), time.perf_counter() - start
                if step > points[-1][0]:  # user, system, and those of children that have ended
                    points.append((step, now, sum(watched.cpu_times()[:4])))
        finally:
            # The compiler's workers have sessions of their own.
            for one in (watched, *watched.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        said = re.findall(r"^.*[a-z].*$", (folder / "output.txt").read_text(), re.MULTILINE)
    if points[-1][0] < contender.steps:
        reason = said[-1].strip("│ ") if said else f"exit code {process.returncode}"
        raise BenchmarkError(f"{contender.name} failed: {reason}")
    if len(points) < 4:
        raise BenchmarkError(f"{contender.name} made too few steps to be measured.")
    return {**rates(points[1:]), "peak_mib": usage.ru_maxrss / 1024}  # Linux counts KiB


def measure_all(names: list[str], repetitions: int, folders: Folders) -> None:
    """Make the measurements of contests that are missing at this commit, and keep each.

    Raises:
        BenchmarkError: there is no such contest, or a contender or its profile failed.
    """
    import torch  # noqa: F401  reads checkpoints; not to be waited for while a contender runs

    if unknown := [name for name in names if name not in CONTESTS]:
        raise BenchmarkError(f"There is no contest {unknown[0]}; there are: {', '.join(CONTESTS)}.")
    if repetitions < 1:
        raise BenchmarkError("--repetitions must be positive.")
    path, commit = folders.results / "throughput.jsonl", commit_named("HEAD")
    for name in names or CONTESTS:
        contest = CONTESTS[name]
        about = {"contest": name, "title": contest.title, "commit": commit}
        about["contenders"] = [x.name for x in contest.contenders]
        before = [x for x in lines_of(path) if x.items() >= about.items()]
        done = {(x.get("repetition"), x.get("contender")) for x in before}
        for turn, contender in itertools.product(range(repetitions), contest.contenders):
            if (turn, contender.name) in done:
                continue
            found = measure(contender, commit, contest.threads)
            which = {"repetition": turn, "contender": contender.name, "target": contender.target}
            which["command"] = " ".join(["python", str(contender.file), *contender.arguments])
            append(path, {**about, **which, **machine(), **found})
            rate = f"{found['steps_per_second']:.0f} steps/s"
            print(f"{name} {turn + 1}/{repetitions} {contender.name}: {rate}", flush=True)
        print(f"{name}: all {repetitions} repetitions are there.", flush=True)
        if contest.physics and not any("profile" in x for x in before):
            append(path, {**about, "profile": profile(contest, commit), **machine()})


# --- Where the time goes ---


def profile(contest: Contest, commit: str) -> dict[str, float]:
    """Microseconds per step by activity, of a contest's first script in a process of its own."""
    first = contest.contenders[0]
    steps = ["--total-timesteps", str(first.steps), *first.flags.split()]
    program = [sys.executable, "-m", "benchmark.throughput", first.file.stem, contest.physics]
    with place(first, commit, contest.threads) as options:
        result = subprocess.run([*program, *steps], capture_output=True, text=True, **options)
    if result.returncode != 0:
        said = result.stderr.splitlines() or [f"exit code {result.returncode}"]
        raise BenchmarkError(f"The profile of {first.name} failed: {said[-1]}")
    return json.loads(result.stdout.splitlines()[-1])


def breakdown(script: str, physics: str, arguments: list[str]) -> dict[str, float]:
    """Train and return microseconds per environment step by activity, without the first iteration.

    The script has `Args`, `Environments`, `in_numpy`, and `train`, which calls `warn` once per
    iteration; physics is the `module:Class.method` that advances the simulation.
    """
    import tyro

    module = importlib.import_module(script)
    spent = {"physics": 0.0, "step": 0.0, "act": 0.0}  # seconds so far
    readings = []  # clock and `spent` after the update of each iteration
    warn, in_numpy = module.warn, module.in_numpy

    def read(updates: list[dict[str, float]]) -> None:
        readings.append((time.perf_counter(), *spent.values()))
        warn(updates)

    def timed(name: str, function: Callable) -> Callable:
        """The function with a timer around it, which costs 0.3 microseconds per call."""

        def timing(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spent[name] += time.perf_counter() - start
            return result

        return timing

    module.warn = read
    module.in_numpy = lambda network: timed("act", in_numpy(network))
    module.Environments.step = timed("step", module.Environments.step)
    owner, _, method = physics.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    setattr(owner, method, timed("physics", getattr(owner, method)))
    updates = module.train(tyro.cli(module.Args, args=arguments))["updates"]

    whole, simulation, step, act = np.subtract(readings[-1], readings[0])
    steps = updates[-1]["global_step"] - updates[0]["global_step"]
    batch = steps / len(updates[1:])
    rollout, update = (
        sum(batch / x[f"charts/SPS_{part}"] for x in updates[1:]) for part in ("rollout", "update")
    )
    seconds = {
        "physics": simulation,
        "rest of the environments": step - simulation,
        "acting": act,
        "storing and normalizing": rollout - step - act,
        "advantages and update": update,
        "logging and saving": whole - rollout - update,
    }
    return {name: value / steps * 1e6 for name, value in seconds.items()}


if __name__ == "__main__":  # in a process of its own, for `profile`
    with contextlib.redirect_stdout(sys.stderr):
        found = breakdown(*sys.argv[1:3], sys.argv[3:])
    print(json.dumps(found))
