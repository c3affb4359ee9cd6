"""One run: its place on disk, its command line, how far it is, and what is kept of it.

While it lasts, a run has a folder of its own under `runs/benchmark/`, with a copy of the script as
it is in one commit; edits made meanwhile therefore change nothing. Its checkpoint is all that is
read of it.
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from benchmark.provenance import ROOT, BenchmarkError
from benchmark.suites import DPO, GRPO, RLHF, SUITES, Suite, Variant

BINS = 100  # points of a stored curve, as many as baselines' published ones have
LAST_EPISODES = 100  # the paper's Table 1 scores a run by the mean of its last 100 episodes
# Columns of the curves, by the scripts' names.
STEP_METRICS = {
    "losses/approx_kl": "approx_kl",
    "losses/clipfrac": "clipfrac",
    "losses/explained_variance": "explained_variance",
    "kl/after": "kl_after",
}
STAGE_METRICS = {
    "objective/gold": "gold",
    "objective/proxy": "proxy",
    "objective/kl": "kl",
    "charts/tokens_per_second_update": "tokens_per_second",
    "logprobs/chosen": "chosen",
    "logprobs/rejected": "rejected",
}
NOT_SETTINGS = {"run_name", "output_dir", "resume"}  # of the place, not of the algorithm


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where results are kept and where runs live until they are finished."""

    results: Path = ROOT / "benchmark" / "results"
    runs: Path = ROOT / "runs" / "benchmark"

    def absolute(self) -> "Folders":
        """The same for processes that work in another folder."""
        return Folders(self.results.absolute(), self.runs.absolute())


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with one environment, variant and seed.

    Its subclasses are the kinds of scripts. They know:
        checkpoint: the file that the script can continue from;
        flags: those of the script that decide the result;
        progress(): steps made up to the last checkpoint, 0 before the first;
        is_finished(): whether the script has done all its work;
        result(): facts, of which `score` and `hours` (None: unknown), and a curve over `step`.
    """

    suite: str
    environment: str
    variant: str
    seed: int
    definition: Variant
    total_steps: int
    folders: Folders

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the other runs of its suite."""
        return self.environment, self.variant, self.seed

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
    def command(self) -> list[str]:
        """Command line, to be run in the working folder; continues what has a checkpoint."""
        place = ["--resume", "runs/run"] if self.checkpoint.exists() else ["--run-name", "run"]
        return [sys.executable, self.definition.script, *self.flags, *place]


class Steps(Run):
    """A run in environment steps, those of all its environments together."""

    @property
    def checkpoint(self) -> Path:
        return self.log / "checkpoint.pt"

    @property
    def flags(self) -> list[str]:
        return [
            *("--env-id", self.environment, "--seed", str(self.seed)),
            *("--total-timesteps", str(self.total_steps), *self.definition.flags.split()),
        ]

    def progress(self) -> int:
        return steps_saved(self.checkpoint)

    def is_finished(self) -> bool:
        if not self.progress():
            return False
        args = read_checkpoint(self.checkpoint)["args"]
        left = self.total_steps - self.progress()
        return left < args["num_steps"] * args["num_envs"]  # no whole iteration fits any more

    def result(self) -> tuple[dict[str, Any], pd.DataFrame]:
        saved = read_checkpoint(self.checkpoint)
        episodes, updates = saved["episodes"], saved["updates"]
        returns = [x["return"] for x in episodes]
        steps = np.diff([0, *(x["global_step"] for x in updates)])
        rates = np.array([[x[f"charts/SPS_{y}"] for y in ("rollout", "update")] for x in updates])
        seconds_per_step = (1 / rates).sum(1)
        facts = {
            "steps": int(steps.sum()),
            "episodes": len(episodes),
            "seconds": round(float(steps @ seconds_per_step), 1),
            # As if all had gone at the median rate: pauses, and other work on the machine for less
            # than half of the run, do not count.
            "hours": round(float(np.median(seconds_per_step) * steps.sum() / 3600), 6),
            "score": round(float(np.mean(returns[-LAST_EPISODES:])), 6) if returns else None,
            "mean_return": round(float(np.mean(returns)), 6) if returns else None,
            "settings": plain(saved["args"]),
        }
        if SUITES[self.suite].table == "walking":
            from benchmark.walking import walk  # moviepy takes a second to import

            facts["walk"] = walk(self.folder / self.definition.script, self.log)
        return facts, thin(episodes, updates, self.total_steps)


class Stages(Run):
    """A run of stages, each with a checkpoint; a step is an update of one of its PPO runs.

    The evaluation of all models comes last and leaves results.json.
    """

    @property
    def checkpoint(self) -> Path:
        return self.log / "sft" / "checkpoint.pt"

    @property
    def flags(self) -> list[str]:
        return ["--seed", str(self.seed), *self.definition.flags.split()]

    def stages(self) -> dict[str, Path]:
        """Checkpoints of the PPO runs that are finished."""
        return {path.parent.name: path for path in sorted(self.log.glob("ppo-*/checkpoint.pt"))}

    def progress(self) -> int:
        return sum(map(steps_saved, self.stages().values()))

    def is_finished(self) -> bool:
        return (self.log / "results.json").exists()

    def result(self) -> tuple[dict[str, Any], pd.DataFrame]:
        report = json.loads((self.log / "results.json").read_text())
        rows = []
        for stage, path in self.stages().items():
            updates = read_checkpoint(path)["updates"]
            every = -(-len(updates) // BINS)
            for step, update in list(enumerate(updates, start=1))[::every]:
                known = {y: update[x] for x, y in STAGE_METRICS.items() if x in update}
                rows.append({"stage": stage, "step": step} | known)
        begin, end = self.folder / self.definition.script, self.log / "results.json"
        seconds = end.stat().st_mtime - begin.stat().st_mtime
        whole = read_note(self).get("starts") == 1  # else it includes the time between two starts
        judged = next(name for name in report["results"] if name != "sft")  # the first trained
        facts = {
            "seconds": round(seconds, 1) if whole else None,
            "hours": round(seconds / 3600, 6) if whole else None,
            "score": report["results"][judged]["objective/gold"],
            "judged": judged,
            "reward_model": report["quality"],
            "models": report["results"],
            "settings": plain(report["args"]),
        }
        return facts, pd.DataFrame(rows)


class Short(Stages):
    """A run of a minute, which begins anew if it was interrupted."""

    @property
    def checkpoint(self) -> Path:
        return self.log / "results.json"

    def stages(self) -> dict[str, Path]:
        return {path.parent.name: path for path in sorted(self.log.glob("*/checkpoint.pt"))}

    def progress(self) -> int:
        return int(self.is_finished())


KINDS = {RLHF: Stages, GRPO: Short, DPO: Short}  # of all other scripts: Steps


# --- Selection ---


def suite_named(name: str) -> Suite:
    """The suite of this name, or a BenchmarkError that names those that there are."""
    if name not in SUITES:
        raise BenchmarkError(f"There is no suite {name}; there are: {', '.join(SUITES)}.")
    return SUITES[name]


def make_run(name: str, environment: str, variant: str, seed: int, folders: Folders) -> Run:
    """A run of a suite, of the kind that its script asks for."""
    definition, steps = SUITES[name].variants[variant], SUITES[name].total_timesteps
    kind = KINDS.get(definition.script, Steps)
    return kind(name, environment, variant, seed, definition, steps, folders)


def select(
    suite_name: str, folders: Folders, seeds: Sequence[int] = (), only: str = "*"
) -> list[Run]:
    """The runs of a suite in the order in which they are to be made.

    Args:
        seeds: instead of the suite's own.
        only: shell pattern for the whole name of a run or one of its parts.

    Raises:
        BenchmarkError: nothing is selected, or a seed is negative.
    """
    suite, folders = suite_named(suite_name), folders.absolute()
    if seeds and min(seeds) < 0:
        raise BenchmarkError(f"A seed must not be negative: {min(seeds)}.")
    wanted = [(env, seed) for env, own in suite.environments.items() for seed in seeds or own]
    wanted = sorted(dict.fromkeys(wanted), key=lambda x: x[1])  # each once, seed by seed
    runs = [make_run(suite_name, e, v, s, folders) for e, s in wanted for v in suite.variants]
    runs = [x for x in runs if fnmatch.filter([x.name, *x.name.split("/")], only)]
    if not runs:
        raise BenchmarkError(
            f"No run of {suite_name} fits {only}; names look like "
            f"{next(iter(suite.environments))}/seed1 (see: list {suite_name})."
        )
    return runs


# --- Files ---


@contextlib.contextmanager
def lock(run: Run, kind: int = fcntl.LOCK_EX) -> Iterator[IO | None]:
    """Hold the run's lock; None if another process holds it, as a worker does that inherits it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            file = None
        yield file


def is_locked(run: Run) -> bool:
    """Whether somebody is working on the run; several may ask at the same time."""
    if not run.folder.exists():
        return False
    with lock(run, fcntl.LOCK_SH) as held:
        return held is None


def read_note(run: Run) -> dict[str, Any]:
    """Of an unfinished run: commit, starts, crashes, peak_mib and, if it failed, the error."""
    path = run.folder / "note.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_note(run: Run, note: dict[str, Any]) -> None:
    """Replace the note."""
    write_text(run.folder / "note.json", json.dumps(note, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that is as it was or as it should be, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of this process alone
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a script has saved; a checkpoint is replaced as a whole, never half written."""
    import torch  # takes two seconds, and most commands never need it

    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def once_per_version(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The function, called again only after the file was replaced; what it returns is shared."""
    cached = functools.cache(lambda path, *version: read(path))

    def reading(path: Path) -> Any:
        found = path.stat() if path.exists() else None
        return cached(path, *((found.st_mtime_ns, found.st_ino, found.st_size) if found else ()))

    return reading


@once_per_version
def steps_saved(path: Path) -> int:
    """Environment steps, or else updates, up to a checkpoint; none before there is one."""
    if not path.exists():
        return 0
    saved = read_checkpoint(path)
    return saved["global_step"] if "global_step" in saved else len(saved["updates"])


# --- What is kept ---


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that decide the result; null is off, since JSON has no infinity."""
    return {k: None if v == math.inf else v for k, v in settings.items() if k not in NOT_SETTINGS}


def thin(episodes: list[dict], updates: list[dict], total_steps: int) -> pd.DataFrame:
    """Average episodes and updates, which have a global_step, over `BINS` equal stretches of steps.

    Returns:
        A row per stretch that has any data: its end as step, the number of episodes that ended in
        it, their mean return and the mean of each metric, which is missing where it has none.
    """

    def by_stretch(log: list[dict], columns: dict[str, str]) -> Any:
        table = pd.DataFrame(log, columns=["global_step", *columns], dtype=float)
        stretch = np.ceil(table.pop("global_step") * BINS / total_steps).clip(1, BINS)
        return table.rename(columns=columns).groupby(stretch)

    ended, made = by_stretch(episodes, {"return": "return"}), by_stretch(updates, STEP_METRICS)
    parts = [ended.size().rename("episodes"), ended.mean(), made.mean()]
    table = pd.concat(parts, axis=1).sort_index().rename_axis("step").reset_index()
    table["step"] = (table["step"] * total_steps / BINS).round()
    return table.fillna({"episodes": 0}).astype({"step": int, "episodes": int})
