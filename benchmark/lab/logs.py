"""Reads training runs: run folders of the scripts, rows of suites, and TensorBoard logs.

Logs of CleanRL and of Stable-Baselines3 are read too, for the metrics that they have. Nothing is
guessed from the names of folders: either a run itself says what its environment and settings are,
or they are unknown.
"""

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import BenchmarkError
from benchmark.lab.record import (
    LAST_100,
    episodes_of,
    is_ours,
    last_returns,
    read_checkpoint,
    thin,
)
from benchmark.lab.results import by_environment

# Stable-Baselines3's names of our metrics, and their sign.
NAMES = {
    "train/approx_kl": ("losses/approx_kl", 1),
    "train/clip_fraction": ("losses/clipfrac", 1),
    "train/explained_variance": ("losses/explained_variance", 1),
    "train/entropy_loss": ("losses/entropy", -1),
}
RETURNS = ("charts/episodic_return", "rollout/ep_rew_mean")  # CleanRL's and ours; SB3's
METRICS = ("losses/", "check/", "objective/", "rewards/")
EVENTS = "events.out.tfevents"
NEAR = 5  # folders from that of a run up to the one that `seeds` has made for it
AGAIN = 0.1  # of the steps so far: a run that goes back further was begun again
UNKNOWN = "unknown"  # the environment of a run that does not name it
ROW = re.compile(r"^ *\|([^|\n]+)\|([^|\n]*)\| *$", re.MULTILINE)  # of a table of hyperparameters


@dataclasses.dataclass(frozen=True)
class Log:
    """What is known of a run, finished or not."""

    path: Path
    record: dict[str, Any]  # environment, settings that curves need; the score of a committed run
    updates: pd.DataFrame  # "global_step" and metrics, a row per iteration
    episodes: pd.DataFrame  # "global_step" and "return", a row per episode
    averaged: Literal["", "iteration", "window"] = ""  # "episodes" are means of those, or of 100
    settings: dict[str, str] = dataclasses.field(default_factory=dict)  # empty if unknown
    gaussian: bool = False  # the policy is known to be a Gaussian
    note: str = ""  # what of the log was left out

    @property
    def environment(self) -> str:
        return self.record["environment"]

    @property
    def seed(self) -> str:
        """Empty if unknown."""
        return self.settings.get("seed", "")

    @property
    def steps(self) -> int:
        """The last step that is logged."""
        return int(max(x["global_step"].max() for x in (self.updates, self.episodes) if len(x)))

    @property
    def returns(self) -> pd.Series:
        return self.episodes["return"]

    @property
    def scored(self) -> tuple[float, str]:
        """Mean return at the end of the run, and which part of the run that is."""
        if self.record.get("score") is not None:
            return self.record["score"], self.record.get("scored_over", LAST_100)
        if self.averaged == "window":  # already the mean of 100 episodes
            return self.returns.iloc[-1], LAST_100
        last, over = last_returns(self.episodes, self.steps, single=not self.averaged)
        return last.mean(), over

    @property
    def score(self) -> float:
        return self.scored[0]

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


class NoRun(BenchmarkError):
    """A folder with a log or a checkpoint that is no run; the message says why.

    `settings` are those that `add_hparams` has written there.
    """

    def __init__(self, reason: str, settings: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.settings = settings or {}


class Found(NamedTuple):
    """Runs, and the folders that were left out, each with the reason."""

    logs: list[Log]
    left_out: list[str]


# --- Which folders are runs ---


def find(text: str) -> list[Log]:
    """All runs in a folder, or in those that a pattern fits."""
    return search(text).logs


def search(text: str, environment: str = UNKNOWN) -> Found:
    """All runs in a folder, or in those that a pattern fits, and what is left out.

    Args:
        environment: of the runs that do not name theirs.
    """
    tops = [Path(text)] if Path(text).exists() else sorted(map(Path, glob.glob(text)))
    tops = [x.parent if is_log(x) else x for x in tops]
    if not tops:
        raise BenchmarkError(f"There is no folder {text}.")
    logs, left_out, hparams = [], [], {}
    for folder in run_folders(tops):
        try:
            logs.append(read(folder))
        except NoRun as error:
            left_out.append(f"{folder}: {error}")
            hparams |= {folder.parent: error.settings} if error.settings else {}
    logs = [with_settings(x, hparams.get(x.path, {}), environment) for x in logs]
    logs, doubles = without_doubles(logs)
    if not logs:
        text = f"{text} has no checkpoint.pt of our scripts and no TensorBoard log of PPO."
        raise BenchmarkError(" ".join([text, *(f"Left out: {x}." for x in left_out)]))
    return Found(logs, left_out + doubles)


def run_folders(tops: Iterable[Path]) -> list[Path]:
    """Folders that have a log or a checkpoint, each once, whatever links lead there.

    Weights & Biases links to the logs of a run in its folder wandb/, which does not count.
    """
    seen, found = set(), {}
    for top in tops:
        for place, names, files in os.walk(top, followlinks=True):
            if (real := os.path.realpath(place)) in seen:
                names.clear()
                continue
            seen.add(real)
            names[:] = [x for x in names if x != "wandb"]
            if own := {os.path.realpath(Path(place) / x) for x in files if is_log(Path(x))}:
                found[Path(place)] = own
    inside = {x: {y for y in own if Path(y).parent == x.resolve()} for x, own in found.items()}
    known = set().union(*inside.values())  # the others are links
    return sorted(x for x, own in found.items() if inside[x] or own - known)


def is_log(path: Path) -> bool:
    return path.name == "checkpoint.pt" or path.name.startswith(EVENTS)


def without_doubles(logs: list[Log]) -> Found:
    """Runs without copies, and without the logs of a second writer that has only returns."""
    kept, left_out = [], []
    whole = [x.path for x in logs if len(x.updates) and len(x.episodes)]
    trained = {x.parent: x.name for x in whole}
    for log in logs:
        twins = [x.path for x in kept if log.seed and is_copy(x, log)]
        if twins:
            left_out.append(f"{log.path}: a copy of {twins[0]}")
        elif log.updates.empty and log.path.parent in trained:
            other = trained[log.path.parent]
            left_out.append(f"{log.path}: returns alone, next to the training metrics in {other}")
        else:
            kept.append(log)
    return Found(kept, left_out)


def is_copy(a: Log, b: Log) -> bool:
    """Whether two logs are of the same run."""
    same = a.settings == b.settings and a.updates.equals(b.updates)
    return same and a.episodes.equals(b.episodes)


def with_settings(log: Log, hparams: dict[str, str], environment: str) -> Log:
    """A run with what is known about it elsewhere, where it does not say it itself."""
    note = note_on(log.path)
    noted = {x: str(note[x]) for x in ("seed", "flags", "sha256") if note.get(x)}
    settings = log.settings or hparams or noted
    named = settings.get("env_id") or note.get("environment") or environment
    record = log.record | ({"environment": named} if log.environment == UNKNOWN else {})
    return dataclasses.replace(log, record=record, settings=settings)


def note_on(folder: Path) -> dict[str, Any]:
    """What `seeds` has noted on a run that it made, in a folder above."""
    for path in (x / "note.json" for x in [folder, *folder.absolute().parents][:NEAR]):
        with contextlib.suppress(OSError, ValueError):  # none, or of somebody else
            note = json.loads(path.read_text())
            if isinstance(note, dict) and "sha256" in note:
                return note
    return {}


# --- One run ---


def read(folder: Path) -> Log:
    """The run in a folder, by its checkpoint or else its TensorBoard log; or a NoRun."""
    if (folder / "checkpoint.pt").exists():
        try:
            return from_checkpoint(folder)
        except NoRun:
            if not any(folder.glob(f"{EVENTS}*")):
                raise
    return from_events(folder)


def main_folder(folder: Path) -> Path | None:
    """Where the log of a single run is: of several writers, it is that of training returns."""
    found = run_folders([folder])
    if len(found) < 2:
        return found[0] if found else None
    logs = search(str(folder)).logs
    logs.sort(key=lambda x: (len(x.updates) > 0 and len(x.episodes) > 0, len(x.episodes)))
    return logs[-1].path


def has_our_checkpoint(folder: Path) -> bool:
    """Whether one of our scripts has saved its metrics there."""
    with contextlib.suppress(NoRun):
        return (folder / "checkpoint.pt").exists() and bool(from_checkpoint(folder))
    return False


def from_checkpoint(folder: Path) -> Log:
    """A run by what its script has saved, or a NoRun."""
    try:
        saved = read_checkpoint(folder / "checkpoint.pt")
    except Exception as error:  # whatever a file that is damaged, or of somebody else, can raise
        reason = str(error).strip().partition("\n")[0][:200]
        raise NoRun(f"checkpoint.pt cannot be read: {reason}") from error
    if not is_ours(saved):
        raise NoRun("checkpoint.pt has no metrics of updates")
    updates = pd.DataFrame(saved["updates"]).select_dtypes("number")
    if "global_step" not in updates:  # RLHF counts updates
        updates.insert(0, "global_step", np.arange(1, len(updates) + 1))
    settings = saved.get("args", {})
    about = {"total_timesteps": settings.get("total_timesteps", len(updates))}
    record = {"environment": settings.get("env_id", UNKNOWN), "settings": about}
    texts = {x: str(y) for x, y in settings.items()}
    gaussian = any("log_std" in x for x in saved.get("agent", {}))
    return Log(folder, record, updates, episodes_of(saved), settings=texts, gaussian=gaussian)


def from_events(folder: Path) -> Log:
    """A run by its TensorBoard log."""
    events = read_log(folder)
    if events.hparams and all(len(x) < 2 for x in events.values.values()):
        raise NoRun("written by add_hparams", events.hparams)
    columns, episodes = {}, pd.DataFrame(columns=["global_step", "return"], dtype=float)
    for tag, values in events.values.items():
        name, sign = NAMES.get(tag, (tag, 1))
        if tag in RETURNS:
            episodes = pd.DataFrame({"global_step": values.index, "return": values.to_numpy()})
        elif name.startswith(METRICS):
            columns[name] = (sign * values).groupby(level=0).last()
    if not ({"losses/approx_kl", "rewards/accuracy"} & columns.keys() or len(episodes)):
        raise NoRun("no metric of PPO")
    updates = pd.DataFrame(columns).rename_axis("global_step").reset_index()
    last = int(max([*updates["global_step"], *episodes["global_step"]]))
    settings = events.hparams | events.settings
    about = {"environment": settings.get("env_id", UNKNOWN)}
    about["settings"] = {"total_timesteps": max(last, 1)}
    averaged = ""
    if RETURNS[1] in events.values:
        averaged = "window"
    elif len(updates) and episodes["global_step"].isin(updates["global_step"]).all():
        averaged = "iteration"  # single episodes end at steps of their own
    return Log(folder, about, updates, episodes, averaged, settings, note=events.note)


# --- TensorBoard ---

Values = dict[str, pd.Series]  # by tag; the index is the step


class Events(NamedTuple):
    """What an event file has, or all those of a folder."""

    begun: float  # when
    values: Values
    settings: dict[str, str]  # from the text "hyperparameters"
    hparams: dict[str, str]  # from `add_hparams`
    note: str = ""  # what was left out


def read_log(folder: Path) -> Events:
    """The TensorBoard log of a folder."""
    files = sorted(map(read_file, folder.glob(f"{EVENTS}*")), key=lambda x: x.begun)
    found = Events(0.0, {}, {}, {})
    for file in files:
        values = continued(found.values, file.values)
        more = found.settings | file.settings, found.hparams | file.hparams
        found = Events(file.begun, values, *more)
    read = sum(len(x) for file in files for x in file.values.values())
    if read == sum(map(len, found.values.values())):
        return found
    text = "its steps go back; where runs in one folder overlap, only the last counts"
    return found._replace(note=text)


def read_file(path: Path) -> Events:
    """An event file, as far as it is whole."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags, settings, hparams = events.Tags(), {}, {}
    points = {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:  # also pictures and curves
        kind = events.SummaryMetadata(tag).plugin_data.plugin_name
        if kind == "scalars":  # in TensorBoard's newer form
            found = [(x.step, make_ndarray(x.tensor_proto).item()) for x in events.Tensors(tag)]
            points[tag] = found
        elif kind == "text" and tag.startswith("hyperparameters"):
            text = make_ndarray(events.Tensors(tag)[-1].tensor_proto).item().decode()
            _, _, *rows = [(x.strip(), y.strip()) for x, y in ROW.findall(text)] or [(), ()]
            settings |= dict(rows)  # without the heading and the line below it
    with contextlib.suppress(KeyError):  # `add_hparams` was not used
        hparams = hparams_of(events.PluginTagToContent("hparams"))
    values = {tag: series(x) for tag, x in points.items()}
    begun = events.FirstEventTimestamp() if values or settings or hparams else 0.0
    return Events(begun, values, settings, hparams)


def series(points: list[tuple[int, float]]) -> pd.Series:
    """Values by step."""
    return pd.Series([x for _, x in points], [x for x, _ in points], dtype=float)


def hparams_of(content: dict[str, bytes]) -> dict[str, str]:
    """The settings that `add_hparams` has written."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData.FromString(content["_hparams_/session_start_info"])
    values = data.session_start_info.hparams.items()
    return {name: str(getattr(x, x.WhichOneof("kind"))) for name, x in values}


def continued(old: Values, new: Values) -> Values:
    """Values of one run after those of another writer in the same folder.

    Where both have the same tags, the new run replaces the old one from its first step on; if that
    is near the beginning, a run was begun again, and nothing of the old one counts.
    """
    new = {tag: last_run(x) for tag, x in new.items()}
    if shared := [x.index[0] for tag, x in new.items() if tag in old]:
        start, end = min(shared), max(x.index[-1] for x in old.values())
        start = start if start > AGAIN * end else -1
        old = {tag: x[x.index < start] for tag, x in old.items()}
    return {tag: pd.concat([x[tag] for x in (old, new) if tag in x]) for tag in old | new}


def last_run(values: pd.Series) -> pd.Series:
    """Values from the last time that their steps went back to near the beginning.

    Steps that go back a little are those of environments that run side by side.
    """
    steps = values.index.to_numpy()
    lost = np.maximum.accumulate(steps) - steps
    far = (lost > AGAIN * steps.max()) & (lost >= steps) & (np.diff(steps, prepend=steps[0]) < 0)
    begin = np.flatnonzero(far)[-1] if far.any() else 0
    return values.iloc[begin:].sort_index(kind="stable")


# --- Sums ---


def summarize(folder: Path, seconds: float | None) -> tuple[dict[str, Any], pd.DataFrame]:
    """Facts and curve of a run by its TensorBoard log.

    If it has no episodes, its "models" are one model, with the mean of each metric over the last
    tenth of its values.
    """
    values = read_log(folder).values
    if not values:
        raise BenchmarkError(
            "left no TensorBoard log, no results.json and no checkpoint.pt of ours"
        )
    facts = {"seconds": seconds, "hours": seconds and seconds / 3600, "score": None}
    if any(x in values for x in RETURNS):
        log = from_events(folder)
        facts |= {"score": float(log.score), "scored_over": log.scored[1]}
        facts |= {"mean_return": float(log.returns.mean()), "averaged": bool(log.averaged)}
        facts["settings"] = {"total_timesteps": log.steps}
        return facts, thin(log.episodes, log.updates, log.steps)
    ends = {x: float(y.iloc[-max(1, len(y) // 10) :].mean()) for x, y in values.items()}
    return facts | {"models": {"": ends}}, pd.DataFrame({"step": []})


def of_suite(suite: str, variant: str, folders: Folders) -> list[Log]:
    """The finished runs of a row of a suite; episodes are spread evenly over points of curves."""
    logs = []
    for result in itertools.chain(*by_environment(suite, variant, folders).values()):
        points = result.curve.rename(columns={"step": "global_step"})
        ended = points.dropna(subset="return")
        episodes = ended.loc[ended.index.repeat(ended["episodes"]), ["global_step", "return"]]
        seed = {"seed": str(result.record["seed"]), "suite": suite, "variant": variant or "-"}
        about = folders.results, result.record, points[["global_step"]], episodes
        logs.append(Log(*about, settings=seed))
    return logs
