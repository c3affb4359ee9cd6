"""Steps per second of our scripts against their peers, measured side by side.

The contenders of a contest run one after the other, in turns (A B A B ...), each time as a new
process with an empty compiler cache, on the same environment with the same settings and threads.
Each is the beginning of a run of a million steps, killed when it has shown its rate, which is that
between its first checkpoint and its last; start-up (imports, environment, compiling) stands beside
it. On a machine that does other work too, only the ratios mean something; the one of processor time
is disturbed least. Every measurement is kept at once, as a line of results/throughput.jsonl.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmark.provenance import ROOT, THREADS, BenchmarkError, changed_since, commit_named, machine
from benchmark.results import append, lines_of
from benchmark.runs import Folders, steps_saved

WHOLE_RUN = 1_000_000  # steps; never reached, but annealing is that of such a run
POLL_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Contender:
    """A command that shows its steps: our scripts by checkpoints, others by lines of a file."""

    name: str
    steps: int  # after which it is killed: enough for ten iterations or more after the start
    flags: str = ""
    script: str = ""  # one of ours, if it is not its own name; "peers": Stable-Baselines3
    target: float | None = None  # ratio to the rate of the last contender that is to be reached

    def command(self, folder: Path) -> tuple[list[str], Path]:
        """The command line and the file to watch; to be run in `folder`."""
        progress = folder / "runs" / "run" / "checkpoint.pt"
        program = [str(ROOT / (self.script or self.name)), "--run-name", "run"]
        if self.script == "peers":
            progress = folder / "progress.txt"
            program = ["-m", "benchmark.peers", "--progress", str(progress)]
        steps = ["--total-timesteps", str(WHOLE_RUN)]
        return [sys.executable, *program, *steps, *self.flags.split()], progress


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


def last_step(progress: Path) -> int:
    """Steps so far by a checkpoint, or by the last whole line of a file that may be growing."""
    if not progress.exists():
        return 0
    if progress.suffix == ".pt":
        return steps_saved(progress)
    return int("0" + progress.read_text().rpartition("\n")[0].rpartition("\n")[2])


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


def process_tree(root: int) -> list[psutil.Process]:
    """A process and all its descendants, even those that began a session of their own."""
    return [psutil.Process(root), *psutil.Process(root).children(recursive=True)]


def processor_seconds(root: int) -> float:
    """What a process and all its descendants have used, those that have ended included."""
    total = 0.0
    for process in process_tree(root):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            total += sum(process.cpu_times()[:4])  # user, system, and those of ended children
    return total


def environment_of(folder: Path, threads: int) -> dict[str, str]:
    """Of a measured process: its threads, an empty compiler cache, and no GPU."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    threads_of_all = dict.fromkeys(THREADS, str(threads))
    return {**os.environ, **threads_of_all, **cache, "CUDA_VISIBLE_DEVICES": ""}


def measure(contender: Contender, threads: int) -> dict[str, float]:
    """Rates and memory of a contender until it has made its steps; a BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command, progress = contender.command(folder)
        points = [(0, 0.0, 0.0)]  # start, and whenever it has shown its steps
        with (folder / "output").open("w+") as output:
            start = time.perf_counter()
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment_of(folder, threads),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            pid = 0
            try:
                while not pid and points[-1][0] < contender.steps:
                    time.sleep(POLL_SECONDS)
                    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                    step, now = last_step(progress), time.perf_counter() - start
                    if step > points[-1][0]:
                        points.append((step, now, processor_seconds(process.pid)))
            finally:
                if not pid:
                    for descendant in process_tree(process.pid):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            descendant.kill()
                    _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            lines = output.read().splitlines()
    if pid and status:
        said = [line.strip("│ ") for line in lines if re.search("[a-z]", line)]
        reason = said[-1] if said else f"exit code {process.returncode}"
        raise BenchmarkError(f"{contender.name} failed: {reason}")
    if len(points) < 4:
        raise BenchmarkError(f"{contender.name} made too few steps to be measured.")
    return {**rates(points[1:]), "peak_mib": usage.ru_maxrss / 1024}  # Linux counts KiB


def measure_all(names: list[str], repetitions: int, folders: Folders) -> None:
    """Make the measurements of contests that are missing at this commit, and keep each.

    With changes since that commit all are made anew.

    Raises:
        BenchmarkError: there is no such contest, or a contender or its profile failed.
    """
    import torch  # noqa: F401  reads checkpoints; not to be waited for while a contender runs

    for name in names:
        if name not in CONTESTS:
            raise BenchmarkError(f"There is no contest {name}; there are: {', '.join(CONTESTS)}.")
    if repetitions < 1:
        raise BenchmarkError("--repetitions must be positive.")
    path, commit = folders.results / "throughput.jsonl", commit_named("HEAD")
    where = {"commit": commit, "modified": changed_since(commit)}
    for name in names or CONTESTS:
        contest = CONTESTS[name]
        about = {"contest": name, "title": contest.title, **where}
        about["contenders"] = [x.name for x in contest.contenders]
        lines = [] if where["modified"] else lines_of(path)
        before = [x for x in lines if x.items() >= about.items()]
        done = {(x["repetition"], x["contender"]) for x in before if "repetition" in x}
        for turn, contender in ((k, x) for k in range(repetitions) for x in contest.contenders):
            if (turn, contender.name) in done:
                continue
            found = measure(contender, contest.threads)
            which = {"repetition": turn, "contender": contender.name, "target": contender.target}
            command = " ".join(["python", *contender.command(Path("runs"))[0][1:]])
            which["command"] = command.replace(f"{ROOT}/", "")  # without paths of this machine
            append(path, {**about, **which, **machine(), **found})
            rate = f"{found['steps_per_second']:.0f} steps/s"
            print(f"{name} {turn + 1}/{repetitions} {contender.name}: {rate}", flush=True)
        print(f"{name}: all {repetitions} repetitions are there.", flush=True)
        if contest.physics and not any("profile" in x for x in before):
            append(path, {**about, "profile": profile(contest), **machine()})


# --- Where the time goes ---


def profile(contest: Contest) -> dict[str, float]:
    """Microseconds per step by activity, of a contest's first script in a process of its own."""
    first = contest.contenders[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmark.throughput", first.name, contest.physics]
        command += ["--run-name", "run", "--total-timesteps", str(first.steps)]
        result = subprocess.run(
            [*command, *first.flags.split()],
            cwd=folder,
            env=environment_of(Path(folder), contest.threads),
            capture_output=True,
            text=True,
        )
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

    module = importlib.import_module(script.removesuffix(".py"))
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
    place, _, method = physics.rpartition(".")
    owner = pkgutil.resolve_name(place)
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
