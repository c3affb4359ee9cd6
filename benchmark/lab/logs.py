"""Reads training runs: run folders of the scripts, rows of suites, and TensorBoard logs.

Logs of CleanRL and of Stable-Baselines3 are read too, for the metrics that they have.
"""

import dataclasses
import glob
import itertools
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import BenchmarkError
from benchmark.lab.record import LAST_EPISODES, episodes_of, read_checkpoint, thin
from benchmark.lab.results import by_environment

# Stable-Baselines3's names of our metrics, and their sign.
NAMES = {
    "train/approx_kl": ("losses/approx_kl", 1),
    "train/clip_fraction": ("losses/clipfrac", 1),
    "train/explained_variance": ("losses/explained_variance", 1),
    "train/entropy_loss": ("losses/entropy", -1),
}
RETURNS = ("charts/episodic_return", "rollout/ep_rew_mean")  # CleanRL's and ours; SB3's
UNKNOWN = ""  # the environment of a log that does not name it


@dataclasses.dataclass(frozen=True)
class Log:
    """What is known of a run, finished or not."""

    path: Path
    record: dict[str, Any]  # environment, settings; the score of a committed run
    updates: pd.DataFrame  # "global_step" and metrics, a row per iteration
    episodes: pd.DataFrame  # "global_step" and "return", a row per episode
    averaged: Literal["", "iteration", "window"] = ""  # "episodes" are means of those, or of 100

    @property
    def environment(self) -> str:
        return self.record["environment"]

    @property
    def steps(self) -> int:
        """The last step that is logged."""
        return int(max(x["global_step"].max() for x in (self.updates, self.episodes) if len(x)))

    @property
    def returns(self) -> pd.Series:
        return self.episodes["return"]

    @property
    def score(self) -> float:
        """Mean return of the last 100 episodes, or of about as many."""
        if self.record.get("score") is not None:
            return self.record["score"]
        part = max(1, len(self.returns) // 10)  # of the run, where nobody knows how many episodes
        last = {"": LAST_EPISODES, "iteration": part, "window": 1}[self.averaged]
        return self.returns[-last:].mean()

    def until(self, steps: int) -> "Log":
        """The beginning of the run; one in a hundred steps more or less does not matter."""
        updates, episodes = (
            x[x["global_step"] <= 1.01 * steps] for x in (self.updates, self.episodes)
        )
        record = self.record | {"settings": {"total_timesteps": steps}}
        if steps < 0.99 * self.steps:
            record["score"] = None
        return dataclasses.replace(self, record=record, updates=updates, episodes=episodes)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the curve of returns, as `results.Result` has it."""
        curve = thin(self.episodes, self.updates, self.record["settings"]["total_timesteps"])
        curve = curve.dropna(subset=name)
        return curve["step"].to_numpy(), curve[name].to_numpy()


def find(text: str) -> list[Log]:
    """All runs in a folder, or in those that a pattern fits."""
    folders = [Path(text)] if Path(text).exists() else sorted(map(Path, glob.glob(text)))
    if not folders:
        raise BenchmarkError(f"There is no folder {text}.")
    paths = {x.parent for y in folders for x in y.rglob("*") if is_log(x)}
    found = [x for x in map(read, sorted(paths)) if x]
    if not found:
        raise BenchmarkError(f"{text} has no checkpoint.pt and no TensorBoard log of PPO.")
    return found


def is_log(path: Path) -> bool:
    return path.name == "checkpoint.pt" or path.name.startswith("events.out.tfevents")


def read(folder: Path) -> Log | None:
    """The run in a folder: its checkpoint, or before there is one its TensorBoard log.

    None if it is neither of PPO nor of a stage of RLHF that has checks.
    """
    saved = (folder / "checkpoint.pt").exists()
    log = (from_checkpoint(folder) if saved else None) or from_events(folder)
    return log if log and (len(log.updates) or len(log.episodes)) else None


def from_checkpoint(folder: Path) -> Log | None:
    """A run by what its script has saved; None if that has no metrics."""
    try:
        saved = read_checkpoint(folder / "checkpoint.pt")
    except Exception as error:  # whatever a damaged file can raise
        raise BenchmarkError(f"{folder / 'checkpoint.pt'} cannot be read: {error}") from error
    updates = pd.DataFrame(saved.get("updates", []))
    if updates.empty:
        return None
    if "global_step" not in updates:  # RLHF counts updates
        updates.insert(0, "global_step", np.arange(1, len(updates) + 1))
    settings = dict(saved.get("args", {}))
    settings.setdefault("total_timesteps", len(updates))
    record = {"environment": settings.get("env_id", UNKNOWN), "settings": settings}
    return Log(folder, record, updates, episodes_of(saved))


def scalars(folder: Path) -> tuple[dict[str, pd.Series], str]:
    """The values of a TensorBoard log by tag and step, and all its texts in one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    tags, found = events.Reload().Tags(), {}
    for tag in tags["scalars"]:
        points = events.Scalars(tag)
        found[tag] = pd.Series([x.value for x in points], [x.step for x in points], dtype=float)
    texts = (events.Tensors(x)[0].tensor_proto.string_val[0] for x in tags["tensors"])
    return found, "".join(x.decode() for x in texts)


def from_events(folder: Path) -> Log | None:
    """A run by its TensorBoard log; None if that is of something else."""
    found, text = scalars(folder)
    columns, episodes = {}, pd.DataFrame(columns=["global_step", "return"], dtype=float)
    for tag, values in found.items():
        name, sign = NAMES.get(tag, (tag, 1))
        if tag in RETURNS:
            episodes = pd.DataFrame({"global_step": values.index, "return": values.to_numpy()})
        elif name.startswith(("losses/", "check/", "objective/", "rewards/")):
            columns[name] = (sign * values).groupby(level=0).last()
    if not ({"losses/approx_kl", "rewards/accuracy"} & columns.keys() or len(episodes)):
        return None
    updates = pd.DataFrame(columns).rename_axis("global_step").reset_index()

    # In CleanRL's table of hyperparameters, or the settings that ours write, or the path.
    named = re.search(r"\benv_id(?:\||=)'?([^|',)]+)", text)
    named = named or re.search(r"([A-Za-z]\w*-v\d+)", str(folder))
    last = int(max([*updates["global_step"], *episodes["global_step"]]))
    record = {"environment": named[1] if named else UNKNOWN, "settings": {"total_timesteps": last}}
    averaged = ""
    if RETURNS[1] in found:
        averaged = "window"
    elif len(updates) and episodes["global_step"].isin(updates["global_step"]).all():
        averaged = "iteration"  # single episodes end at steps of their own
    return Log(folder, record, updates, episodes, averaged)


def summarize(folder: Path, seconds: float | None) -> tuple[dict[str, Any], pd.DataFrame]:
    """Facts and curve of a run by its TensorBoard log.

    If it has no episodes, its "models" are one model, with the mean of each metric over the last
    tenth of its values.
    """
    if not any(map(is_log, folder.glob("*"))):
        raise BenchmarkError("left no checkpoint.pt, no results.json and no TensorBoard log")
    log = from_events(folder)
    facts = {"seconds": seconds, "hours": seconds and seconds / 3600, "score": None}
    if log and len(log.episodes):
        facts |= {"score": float(log.score), "mean_return": float(log.returns.mean())}
        facts |= {"averaged": bool(log.averaged), "settings": {"total_timesteps": log.steps}}
        return facts, thin(log.episodes, log.updates, log.steps)
    found, _ = scalars(folder)
    facts["models"] = {"": {x: float(y[-max(1, len(y) // 10) :].mean()) for x, y in found.items()}}
    return facts, pd.DataFrame({"step": []})


def of_suite(suite: str, variant: str, folders: Folders) -> list[Log]:
    """The finished runs of a row of a suite; episodes are spread evenly over points of curves."""
    logs = []
    for result in itertools.chain(*by_environment(suite, variant, folders).values()):
        points = result.curve.rename(columns={"step": "global_step"})
        ended = points.dropna(subset="return")
        episodes = ended.loc[ended.index.repeat(ended["episodes"]), ["global_step", "return"]]
        logs.append(Log(folders.results, result.record, points[["global_step"]], episodes))
    return logs
