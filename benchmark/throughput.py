"""Steps per second of our scripts against their peers, measured side by side.

    python -m benchmark.throughput [CONTEST ...] [--repetitions 3]

The contenders of a contest run one after the other, in turns (A B A B ...), each time as a new
process with an empty compiler cache, on the same environment with the same settings and threads.
Each is the beginning of a run of a million steps, killed when it has shown its rate, which is that
between its first checkpoint and its last; start-up (imports, environment, compiling) stands beside
it. On a machine that does other work too, only the ratios mean something; the one of processor time
is disturbed least.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.processes import has_ended, peak_mib, process_tree
from benchmark.provenance import ROOT, THREADS, BenchmarkError, changed_since, head, machine
from benchmark.runs import read_rows, saved_step, write_text
from benchmark.tables import markdown

WHOLE_RUN = 1_000_000  # steps for which the time of a whole run is projected
POLL_SECONDS = 0.01
MUJOCO_PHYSICS = "gymnasium.envs.mujoco.mujoco_env:MujocoEnv.do_simulation"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A command that shows its steps: our scripts by checkpoints, others by rows of a CSV file."""

    name: str
    steps: int
    """Steps after which it is killed: enough for ten iterations or more after the start."""
    script: str | None = None
    """One of our scripts; None: Stable-Baselines3."""
    flags: tuple[str, ...] = ()
    target: float | None = None
    """Ratio to the rate of the contest's last contender that is to be reached."""

    def command(self, folder: Path) -> tuple[list[str], Path]:
        """The command line and the file to watch; to be run in `folder`."""
        steps = ("--total-timesteps", str(WHOLE_RUN))
        if self.script is None:
            progress = folder / "progress.csv"
            program = ["-m", "benchmark.sb3_peer", "--progress", str(progress)]
        else:
            progress = folder / "runs" / "run" / "checkpoint.pt"
            program = [str(ROOT / self.script), "--run-name", "run"]
        return [sys.executable, *program, *steps, *self.flags], progress


@dataclasses.dataclass(frozen=True)
class Contest:
    """Contenders with equal work; the last one is the peer of those that have a target."""

    title: str
    contenders: tuple[Contender, ...]
    threads: int = 1
    """Of every contender."""
    physics: str | None = None
    """`module:Class.method` that advances the simulation: shows where the first one's time goes."""


CONTINUOUS = "ppo_continuous_action.py"
HALF_CHEETAH = "HalfCheetah-v4, 1 environment, 2048 steps, 32 minibatches of 64, 10 epochs"
VECTOR_STEPS = 204_800  # of our scripts: the fourth checkpoint
CLASSIC = ("--env-id", "CartPole-v1")
RAW = ("--no-norm-obs", "--no-scale-rewards")  # as Stable-Baselines3
CARTPOLE = (
    *("--env-id", "CartPole-v1", "--num-envs", "4", "--num-steps", "128"),
    *("--num-minibatches", "4", "--update-epochs", "4", "--learning-rate", "2.5e-4"),
    *("--ent-coef", "0.01"),
)
PONG = (
    *("--env-id", "PongNoFrameskip-v4", "--num-envs", "8", "--num-steps", "128"),
    *("--num-minibatches", "4", "--update-epochs", "4", "--learning-rate", "2.5e-4"),
    *("--clip-coef", "0.1", "--ent-coef", "0.01"),
)


def more_environments(num_envs: int) -> Contender:
    """The default batch of 2048 samples, from `num_envs` environments."""
    flags = ("--num-envs", str(num_envs), "--num-steps", str(2048 // num_envs))
    return Contender(f"{num_envs} environments", VECTOR_STEPS, CONTINUOUS, flags)


def pong(
    name: str, *flags: str, script: str = "ppo_atari.py", target: float | None = None
) -> Contender:
    """Our script on Pong with two threads and a checkpoint every fourth iteration."""
    flags = (*PONG, "--torch-threads", "2", "--checkpoint-interval", "4", *flags)
    return Contender(f"{script}, {name}", 16_384, script, flags, target)


CONTESTS = {
    "continuous": Contest(
        HALF_CHEETAH,
        (
            Contender(CONTINUOUS, VECTOR_STEPS, CONTINUOUS, target=5.3),
            Contender("Stable-Baselines3 PPO", 24_576, flags=("--env-id", "HalfCheetah-v4")),
        ),
        physics=MUJOCO_PHYSICS,
    ),
    "kl_penalty": Contest(
        HALF_CHEETAH,
        (
            Contender("ppo_kl_penalty.py", VECTOR_STEPS, "ppo_kl_penalty.py", target=0.9),
            Contender(CONTINUOUS, VECTOR_STEPS, CONTINUOUS),
        ),
        physics=MUJOCO_PHYSICS,
    ),
    "multidiscrete": Contest(
        "CartPole-v1, 1 environment, 2048 steps, 32 minibatches of 64, 10 epochs",
        (
            Contender(
                "ppo_multidiscrete.py",
                VECTOR_STEPS,
                "ppo_multidiscrete.py",
                (*CLASSIC, *RAW),
                target=3.5,
            ),
            Contender("Stable-Baselines3 PPO", 24_576, flags=(*CLASSIC, "--kind", "classic")),
        ),
        physics="gymnasium.envs.classic_control.cartpole:CartPoleEnv.step",
    ),
    "multidiscrete_small": Contest(
        "CartPole-v1, 4 environments, 128 steps, 4 minibatches of 128, 4 epochs",
        (
            Contender(
                "ppo_multidiscrete.py",
                500_224,
                "ppo_multidiscrete.py",
                (*CARTPOLE, *RAW),
                target=4.0,
            ),
            Contender("Stable-Baselines3 PPO", 40_960, flags=(*CARTPOLE, "--kind", "classic")),
        ),
        physics="gymnasium.envs.classic_control.cartpole:CartPoleEnv.step",
    ),
    "atari": Contest(
        "Pong, 8 environments, 128 steps, 4 minibatches of 256, 4 epochs, 2 threads",
        (
            pong("float32", target=1.5),
            pong("bfloat16", "--bfloat16", target=2.0),
            Contender("Stable-Baselines3 PPO, CnnPolicy", 10_240, flags=(*PONG, "--kind", "atari")),
        ),
        threads=2,
    ),
    "atari_lstm": Contest(
        "Pong, 8 environments, 128 steps, 4 minibatches of 256, 4 epochs, 2 threads, LSTM",
        (
            pong("float32", script="ppo_atari_lstm.py", target=1.5),
            pong("bfloat16", "--bfloat16", script="ppo_atari_lstm.py", target=2.0),
            Contender(
                "sb3-contrib RecurrentPPO, CnnLstmPolicy",
                10_240,
                flags=(*PONG, "--kind", "atari-lstm"),
            ),
        ),
        threads=2,
    ),
    "scaling": Contest(
        "ppo_continuous_action.py on HalfCheetah-v4 with more environments",
        tuple(map(more_environments, (1, 4, 16, 64))),
    ),
}


def last_step(progress: Path) -> int:
    """Steps so far by a checkpoint, or by the rows of a CSV file that may be growing."""
    if progress.suffix == ".pt":
        return saved_step(progress)
    rows = read_rows(progress)
    return int(rows[-1]["global_step"]) if rows else 0


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


def measure(contender: Contender, threads: int) -> dict[str, Any]:
    """Run a contender until it has made its steps, and watch it.

    Raises:
        BenchmarkError: it failed, or showed its steps less than three times.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command, progress = contender.command(folder)
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        threads_of_all = dict.fromkeys(THREADS, str(threads))
        points: list[tuple[int, float, float]] = []
        with (folder / "output").open("w+") as output:
            start = time.perf_counter()
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **threads_of_all, **cache, "CUDA_VISIBLE_DEVICES": ""},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended, usage = False, None
            try:
                while not ended and (not points or points[-1][0] < contender.steps):
                    time.sleep(POLL_SECONDS)
                    ended, usage = has_ended(process)
                    now = time.perf_counter() - start
                    step = last_step(progress)
                    if step > (points[-1][0] if points else 0):
                        cpu_seconds = sum(process_tree(process.pid).values())
                        points.append((step, now, cpu_seconds))
                failed = ended and process.returncode != 0
            finally:
                if process.returncode is None:
                    for pid in process_tree(process.pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    while not ended:
                        time.sleep(POLL_SECONDS)
                        ended, usage = has_ended(process)
            output.seek(0)
            lines = output.read().splitlines()
        if failed:
            said = [line for line in lines if re.search("[a-z]", line)]
            reason = said[-1].strip("│ ") if said else f"exit code {process.returncode}"
            raise BenchmarkError(f"{contender.name} failed: {reason}")
    if len(points) < 3:
        raise BenchmarkError(f"{contender.name} made too few steps to be measured.")
    return {
        "contender": contender.name,
        **rates(points),
        "peak_mib": peak_mib(usage),
    }


def profile(script: str, physics: str, flags: tuple[str, ...]) -> dict[str, float]:
    """Microseconds per step by activity, from one instrumented run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmark.profile_script", str(ROOT / script)]
        command += ["--physics", physics, *flags, "--run-name", "run"]
        result = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **THREADS, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
    if result.returncode != 0:
        said = result.stderr.splitlines() or [f"exit code {result.returncode}"]
        raise BenchmarkError(f"The profile of {script} failed: {said[-1]}")
    return json.loads(result.stdout)


def run_contest(name: str, repetitions: int, path: Path) -> dict[str, Any]:
    """Measure all contenders of a contest in turns, and profile the first one where asked to.

    The result is written to `path`, a JSON file, first without the profile, which may fail.
    """
    import torch  # noqa: F401  reads checkpoints; not to be waited for while a contender runs

    contest, commit = CONTESTS[name], head()
    modified = changed_since(commit)
    measurements = []
    for repetition in range(repetitions):
        for contender in contest.contenders:
            measurements.append({"repetition": repetition, **measure(contender, contest.threads)})
            rate = measurements[-1]["steps_per_second"]
            print(f"{name} {repetition + 1}/{repetitions} {contender.name}: {rate:.0f} steps/s")
    result = {
        "contest": name,
        "title": contest.title,
        "targets": {x.name: x.target for x in contest.contenders if x.target},
        "commands": {x.name: relative_command(x) for x in contest.contenders},
        "commit": commit,
        "modified": sorted({*modified, *changed_since(commit)}),
        **machine(),
        "measurements": measurements,
        "profile": {},
    }
    write_text(path, json.dumps(result, indent=1) + "\n")
    if contest.physics:
        first = contest.contenders[0]
        steps = ("--total-timesteps", str(first.steps))
        result["profile"] = profile(first.script, contest.physics, (*first.flags, *steps))
        write_text(path, json.dumps(result, indent=1) + "\n")
    return result


def relative_command(contender: Contender) -> str:
    """The command line without the paths of this machine."""
    command, _ = contender.command(Path("runs"))
    return " ".join(["python", *command[1:]]).replace(f"{ROOT}/", "")


def ratios(measurements: list[dict[str, Any]], name: str, key: str) -> np.ndarray:
    """Rate of a contender over that of the last one, per repetition."""

    def rate(contender: str) -> np.ndarray:
        return np.array([x[key] for x in measurements if x["contender"] == contender])

    return rate(name) / rate(measurements[-1]["contender"])


def spread(values: np.ndarray, digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = np.min(values), np.median(values), np.max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def profile_report(name: str, parts: dict[str, float]) -> str:
    """Where the time of a contender goes."""
    total = sum(parts.values())
    rows = [(part, f"{value:.1f}", f"{value / total:.0%}") for part, value in parts.items()]
    rows.append(("whole step", f"{total:.1f}", "100%"))
    return (
        f"\nWhere the time of {name} goes (one run with timers):\n\n"
        + markdown(("per environment step", "µs", "share"), rows)
        + f"\nThe physics alone would allow {1e6 / parts['physics']:.0f} steps/s; "
        f"the script reaches {parts['physics'] / total:.0%} of that limit.\n"
    )


def contest_report(result: dict[str, Any]) -> str:
    """Tables of a contest: the contenders, the ratios, and where the time goes."""
    measurements = result["measurements"]
    rows = []
    for name in dict.fromkeys(x["contender"] for x in measurements):
        own = [x for x in measurements if x["contender"] == name]
        column = {key: np.array([x[key] for x in own]) for key in own[0] if key != "contender"}
        projected = column["start_seconds"] + WHOLE_RUN / column["steps_per_second"]
        rows.append(
            (
                name,
                spread(column["steps_per_second"]),
                spread(column["steps_per_cpu_second"]),
                spread(column["start_seconds"], 1),
                spread(projected / 60, 1),
                f"{np.max(column['peak_mib']):.0f}",
            )
        )
    header = (
        "Median (range)",
        "steps/s",
        "steps/s of processor time",
        "start-up, s",
        "1M steps, projected, min",
        "memory of the largest process, MiB",
    )
    text = (
        f"**{result['title']}**, {len(own)} repetitions in turns, {result['processor']}, commit "
        f"{result['commit'][:7]}.\n\n"
    ) + markdown(header, rows)
    text += "\n" if result["targets"] else ""
    *others, peer = dict.fromkeys(x["contender"] for x in measurements)
    for name in others if result["targets"] else ():
        target = result["targets"].get(name)
        text += (
            f"- {name} / {peer}: "
            f"{spread(ratios(measurements, name, 'steps_per_second'), 2)} by the clock, "
            f"{spread(ratios(measurements, name, 'steps_per_cpu_second'), 2)} by processor time"
            f"{f'; target {target:g}' if target else ''}.\n"
        )
    if result["profile"]:
        text += profile_report(measurements[0]["contender"], result["profile"])
    if result["modified"]:
        text += f"\nMeasured with changes since that commit in {', '.join(result['modified'])}.\n"
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("contests", nargs="*", metavar="CONTEST", help=", ".join(CONTESTS))
    parser.add_argument("--repetitions", type=int, default=3, help="runs per contender (3)")


def main(args: argparse.Namespace) -> None:
    """Measure, save and print."""
    for name in args.contests:
        if name not in CONTESTS:
            raise BenchmarkError(f"There is no contest {name}; there are: {', '.join(CONTESTS)}.")
    if args.repetitions < 1:
        raise BenchmarkError("--repetitions must be positive.")
    for name in args.contests or CONTESTS:
        path = args.folders.results / "throughput" / f"{name}.json"
        print("\n" + contest_report(run_contest(name, args.repetitions, path)))


if __name__ == "__main__":
    from benchmark.__main__ import main as benchmark

    benchmark(["throughput", *sys.argv[1:]])
