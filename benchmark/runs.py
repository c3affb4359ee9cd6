"""One run: its place on disk, its command line, its state, and what is kept of it.

While it lasts, a run has a folder of its own under `runs/benchmark/`, with a copy of the script as
it is in one commit; edits made meanwhile therefore change nothing. Its checkpoint is all that is
read of it: once finished, its episodes and metrics are averaged over `BINS` equal stretches of
steps and written to `benchmark/results/`.

Two processes never work on the same run: whoever does holds a lock, which a worker inherits and so
keeps even if the benchmark that started it is killed.
"""

import contextlib
import csv
import dataclasses
import fcntl
import fnmatch
import functools
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmark.provenance import ROOT, THREADS, BenchmarkError, machine, source_at
from benchmark.suites import RLHF, SUITES, Suite, Variant

BINS = 100  # points of a stored curve, as many as baselines' published ones have
LAST_EPISODES = 100  # the paper's Table 1 scores a run by the mean of its last 100 episodes
STOPPED = {128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}
# Metrics of RLHF's updates that are kept.
RLHF_METRICS = (
    *("objective/gold", "objective/proxy", "objective/kl", "objective/kl_exact"),
    *("objective/kl_coef", "text/stop_rate", "text/unique", "charts/tokens_per_second_update"),
)
NOT_SETTINGS = {"run_name", "output_dir", "resume"}  # of the place, not of the algorithm


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where results are kept and where runs live until they are finished."""

    results: Path = ROOT / "benchmark" / "results"
    runs: Path = ROOT / "runs" / "benchmark"


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with one environment, variant and seed."""

    suite: str
    environment: str
    variant: str
    seed: int
    folders: Folders

    @property
    def definition(self) -> Variant:
        """Script and flags."""
        return SUITES[self.suite].variants[self.variant]

    @property
    def total_timesteps(self) -> int:
        """Steps asked for; the script makes as many whole iterations as fit."""
        return SUITES[self.suite].total_timesteps

    @property
    def name(self) -> str:
        """Environment, variant (if named) and seed, joined by slashes."""
        parts = (self.environment.replace("/", "-"), self.variant, f"seed{self.seed}")
        return "/".join(part for part in parts if part)

    @property
    def folder(self) -> Path:
        """Working folder, not committed."""
        return self.folders.runs / self.suite / self.name

    @property
    def log(self) -> Path:
        """Where the script, started in the working folder, puts its checkpoint and logs."""
        return self.folder / "runs" / "run"

    @property
    def checkpoint(self) -> Path:
        """What the script can continue from."""
        return self.log / "checkpoint.pt"

    @property
    def result(self) -> Path:
        """The JSON file of the result; the CSV file stands beside it."""
        return self.folders.results / self.suite / f"{self.name}.json"

    @property
    def flags(self) -> list[str]:
        """Flags of the script that decide the result."""
        return [
            *("--env-id", self.environment, "--seed", str(self.seed)),
            *("--total-timesteps", str(self.total_timesteps), *self.definition.flags),
        ]

    @property
    def command(self) -> list[str]:
        """Command line, to be run in the working folder; continues what has a checkpoint."""
        place = ["--resume", "runs/run"] if self.checkpoint.exists() else ["--run-name", "run"]
        return [sys.executable, self.definition.script, *self.flags, *place]

    def last_step(self) -> int:
        """Steps made up to the last checkpoint; 0 before the first."""
        return saved_step(self.checkpoint)

    def is_finished(self) -> bool:
        """Whether the script has made as many whole iterations as fit."""
        if not self.last_step():
            return False
        settings = read_checkpoint(self.checkpoint)["args"]
        batch = settings["num_steps"] * settings["num_envs"]
        return self.total_timesteps - self.last_step() < batch

    def collect(self) -> None:
        """Write the result of a finished run; the JSON file comes last and makes it count."""
        saved = read_checkpoint(self.checkpoint)
        episodes, updates = saved["episodes"], saved["updates"]
        write_csv(self.result.with_suffix(".csv"), thin(episodes, updates, self.total_timesteps))
        seconds, steps = training_seconds(updates), int(updates[-1]["global_step"])
        result = {
            **identity(self),
            "steps": steps,
            "seconds": round(seconds, 1),
            "steps_per_second": round(steps / seconds, 1),
            "episodes": len(episodes),
            "last_returns": None,
            "settings": plain(saved["args"]),
        }
        last_returns = json.dumps([round(x["return"], 4) for x in episodes[-LAST_EPISODES:]])
        text = json.dumps(result, indent=1)  # with the one long list on one line
        text = text.replace('"last_returns": null', f'"last_returns": {last_returns}')
        write_text(self.result, text + "\n")

    def summary(self) -> str:
        """A finished run in a few words."""
        result = read_result(self)
        returns, rate = result["last_returns"], result["steps_per_second"]
        return (
            f"return {np.mean(returns):.1f} over the last {len(returns)} episodes, "
            f"{rate:.0f} steps/s"
        )


@dataclasses.dataclass(frozen=True)
class RLHFRun(Run):
    """A run of `ppo_rlhf_toy.py`: several PPO runs, without environment steps and episodes.

    Each of its stages leaves a folder with a checkpoint, and the evaluation of all models, which
    comes last, results.json.
    """

    @property
    def checkpoint(self) -> Path:
        """What the script can continue from: its first stage."""
        return self.log / "sft" / "checkpoint.pt"

    @property
    def flags(self) -> list[str]:
        """Flags of the script that decide the result."""
        return ["--seed", str(self.seed), *self.definition.flags]

    def last_step(self) -> int:
        """Updates of the PPO runs that are finished."""
        return sum(map(len, self.updates().values()))

    def updates(self) -> dict[str, list[dict[str, float]]]:
        """Metrics of each update of each PPO run that is finished."""
        paths = sorted(self.log.glob("ppo-*/checkpoint.pt"))
        return {path.parent.name: read_checkpoint(path)["updates"] for path in paths}

    def is_finished(self) -> bool:
        """Whether the script has done all its work."""
        return (self.log / "results.json").exists()

    def collect(self) -> None:
        """Keep the evaluation of every model, and some metrics of each PPO run's updates."""
        report = json.loads((self.log / "results.json").read_text())
        rows = [
            {"run": name, "update": number} | {key: f"{row[key]:.5g}" for key in RLHF_METRICS}
            for name, updates in self.updates().items()
            for number, row in enumerate(updates, start=1)
        ]
        write_csv(self.result.with_suffix(".csv"), rows)
        begin, end = self.folder / self.definition.script, self.log / "results.json"
        seconds = end.stat().st_mtime - begin.stat().st_mtime
        result = {
            **identity(self),
            "seconds": round(seconds, 1) if read_note(self)["attempts"] == 1 else None,
            "reward_model": report["quality"],
            "models": report["results"],
            "settings": plain(report["args"]),
        }
        write_text(self.result, json.dumps(result, indent=1) + "\n")

    def summary(self) -> str:
        """A finished run in a few words."""
        models = read_result(self)["models"]
        golds = {k: x["objective/gold"] for k, x in models.items() if "best" not in k}
        return "gold " + ", ".join(f"{x:+.2f} {name}" for name, x in golds.items())


def make_run(suite: str, environment: str, variant: str, seed: int, folders: Folders) -> Run:
    """The run of a suite, of the kind that its script asks for."""
    kind = RLHFRun if SUITES[suite].variants[variant].script == RLHF else Run
    return kind(suite, environment, variant, seed, folders)


def suite_named(name: str) -> Suite:
    """The suite of this name.

    Raises:
        BenchmarkError: there is none.
    """
    if name not in SUITES:
        raise BenchmarkError(f"There is no suite {name}; there are: {', '.join(SUITES)}.")
    return SUITES[name]


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern fits the whole name of a run or one of its parts."""
    return any(fnmatch.fnmatchcase(x, pattern) for x in (name, *name.split("/")))


def select(
    suite_name: str, folders: Folders, seeds: Iterable[int] | None = None, only: str | None = None
) -> list[Run]:
    """The runs of a suite in the order in which they are to be made.

    Args:
        suite_name: key of `SUITES`.
        folders: where they live.
        seeds: instead of the suite's own.
        only: pattern for `matches`.

    Raises:
        BenchmarkError: nothing is selected, or a seed is negative.
    """
    suite = suite_named(suite_name)
    if negative := [seed for seed in seeds or () if seed < 0]:
        raise BenchmarkError(f"A seed must not be negative: {negative[0]}.")
    wanted = {env: list(seeds or own) for env, own in suite.environments.items()}
    pairs = [(env, seed) for env, seed in suite.first if seed in wanted[env]]
    every = sorted(set().union(*wanted.values()))
    by_seed = [(e, s) for s in every for e in wanted if s in wanted[e]]
    pairs = list(dict.fromkeys([*pairs, *by_seed]))
    runs = [make_run(suite_name, e, v, s, folders) for e, s in pairs for v in suite.variants]
    runs = [run for run in runs if only is None or matches(run.name, only)]
    if not runs:
        raise BenchmarkError(
            f"No run of {suite_name} fits {only}; names look like "
            f"{next(iter(suite.environments))}/seed1 (see: list {suite_name})."
        )
    return runs


def single_command(run: Run, commit: str) -> list[str]:
    """Arguments of the benchmark that make exactly this run, whatever its seed."""
    own = Folders()
    place = ["--results", str(run.folders.results)] if run.folders.results != own.results else []
    place += ["--runs", str(run.folders.runs)] if run.folders.runs != own.runs else []
    which = [run.suite, "--seeds", str(run.seed), "--only", run.name]
    return [*place, "run", *which, "--workers", "1", "--commit", commit]


# --- State ---


def read_rows(path: Path) -> list[dict[str, float]]:
    """The complete rows of a CSV file of numbers that may be growing; [] if there is none."""
    if not path.exists():
        return []
    complete = path.read_text().rpartition("\n")[0]
    return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(complete.splitlines())]


@contextlib.contextmanager
def lock(run: Run) -> Iterator[IO | None]:
    """Hold the run's lock; None if another process holds it.

    Leaving the context closes our copy; a worker that has inherited it keeps the lock.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield file


def state(run: Run) -> str:
    """One of done, running, failed, interrupted, waiting."""
    if run.result.exists():
        return "done"
    if not run.folder.exists():
        return "waiting"
    with lock(run) as held:
        if held is None:
            return "running"
    if "error" in read_note(run):
        return "failed"
    return "interrupted" if run.last_step() else "waiting"


def read_note(run: Run) -> dict[str, Any]:
    """What was noted about an unfinished run: commit, attempts and, if it failed, the error."""
    path = run.folder / "note.json"
    return json.loads(path.read_text()) if path.exists() else {"attempts": 0}


def write_note(run: Run, note: dict[str, Any]) -> None:
    """Replace the note as a whole, so that it is never half written."""
    write_text(run.folder / "note.json", json.dumps(note, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this process alone: two benchmarks may find a run finished at the same moment.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


# --- Start and finish ---


def start(run: Run, commit: str, held: IO) -> subprocess.Popen:
    """Start or continue a run in a process of its own, which inherits the lock `held`.

    Args:
        run: not running, not done.
        commit: version of the script for a new run; a begun one keeps its own.
        held: from `lock`.
    """
    script = run.folder / run.definition.script
    note = read_note(run)
    if not run.checkpoint.exists():
        shutil.rmtree(run.log, ignore_errors=True)  # nothing to continue from
        note = {"attempts": 0, "commit": commit}
        write_text(script, source_at(commit, run.definition.script))
    note["attempts"] += 1
    note.pop("error", None)
    write_note(run, note)
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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a script has saved; a checkpoint is replaced as a whole, never half written."""
    import torch  # takes two seconds, and most commands never need it

    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def saved_step(path: Path) -> int:
    """Steps made up to a checkpoint; 0 if there is none."""
    return step_of_version(path, path.stat().st_mtime_ns) if path.exists() else 0


@functools.cache
def step_of_version(path: Path, mtime_ns: int) -> int:
    """Steps made up to the version of a checkpoint that was written at a time."""
    return read_checkpoint(path)["global_step"]


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide the result; null is off, since JSON has no infinity."""
    return {k: None if v == math.inf else v for k, v in settings.items() if k not in NOT_SETTINGS}


def reason(run: Run, returncode: int) -> str:
    """Why a worker failed: the last line it printed, or how it ended."""
    lines = (run.folder / "output.txt").read_text().strip().splitlines()
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return lines[-1] if lines else f"exit code {returncode}"


def thin(episodes: list[dict], updates: list[dict], total_timesteps: int) -> list[dict[str, Any]]:
    """Average both logs over `BINS` equal stretches of steps.

    Args:
        episodes: rows with global_step, return, length.
        updates: rows with global_step and metrics, one per iteration.
        total_timesteps: the end of the last stretch.

    Returns:
        A row per stretch that has any data: its end as global_step, the number of episodes that
        ended in it, their mean return and length, and the mean of each metric, to five digits.
    """
    rows = []
    width = total_timesteps / BINS

    def by_bin(log: list[dict]) -> dict[int, list[dict]]:
        groups: dict[int, list[dict]] = {}
        for row in log:
            index = min(BINS, max(1, int(np.ceil(row["global_step"] / width))))
            groups.setdefault(index, []).append(row)
        return groups

    episode_bins, update_bins = by_bin(episodes), by_bin(updates)
    metrics = [name for name in (updates[0] if updates else {}) if name != "global_step"]
    for index in sorted({*episode_bins, *update_bins}):
        own, steps = episode_bins.get(index, []), update_bins.get(index, [])
        row = {"global_step": round(index * width), "episodes": len(own)}
        for name in ("return", "length"):
            row[name] = f"{np.mean([x[name] for x in own]):.6g}" if own else ""
        for name in metrics:
            row[name] = f"{np.mean([x[name] for x in steps]):.5g}" if steps else ""
        rows.append(row)
    return rows


def training_seconds(updates: list[dict[str, float]]) -> float:
    """Time of all rollouts and updates; right for interrupted runs too, whose log has no gaps."""
    steps = np.diff([0, *(row["global_step"] for row in updates)])
    rollout = np.array([row["charts/SPS_rollout"] for row in updates])
    update = np.array([row["charts/SPS_update"] for row in updates])
    return float((steps / rollout + steps / update).sum())


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows of equal keys to a file that is complete or absent."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def identity(run: Run) -> dict[str, Any]:
    """What a result begins with: which run it is, of what, made by what."""
    note = read_note(run)
    return {
        "suite": run.suite,
        "environment": run.environment,
        "variant": run.variant,
        "seed": run.seed,
        "script": run.definition.script,
        "flags": " ".join(run.flags),
        "commit": note["commit"],
        "attempts": note["attempts"],
        "peak_mib": round(note["peak_mib"]) if "peak_mib" in note else None,
        **machine(),
    }


def read_result(run: Run) -> dict[str, Any]:
    """What `collect` wrote."""
    return json.loads(run.result.read_text())
