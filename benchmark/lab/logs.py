"""Reads training runs: run folders of the scripts, rows of suites, and TensorBoard logs.

Logs of CleanRL and of Stable-Baselines3 are read too, for the metrics that they have. Nothing is
guessed from the names of folders: either a run itself says what its environment and settings are,
or they are unknown.
"""

import contextlib
import dataclasses
import glob
import hashlib
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
    LAST_EPISODES,
    episodes_of,
    is_ours,
    read_checkpoint,
    thin,
)
from benchmark.lab.results import by_environment

RETURN, MEANS = "charts/episodic_return", "rollout/ep_rew_mean"  # CleanRL's and ours; SB3's
# Stable-Baselines3's names of our metrics, and their sign.
NAMES = {
    MEANS: (RETURN, 1),
    "train/approx_kl": ("losses/approx_kl", 1),
    "train/clip_fraction": ("losses/clipfrac", 1),
    "train/explained_variance": ("losses/explained_variance", 1),
    "train/entropy_loss": ("losses/entropy", -1),
}
METRICS = ("losses/", "check/", "objective/", "rewards/", "grpo/")
# Parts of a run whose mean return can be its score, the best first.
FEWEST = 10  # episodes that score a run
KEPT = 100_000  # episodes, the last ones, that a checkpoint of our scripts has at most
LAST_10 = f"last {FEWEST} episodes, or all"
TENTH = "last tenth of the steps"
WINDOWS = (LAST_100, TENTH, LAST_10)
EVENTS = "events.out.tfevents"
NEAR = 5  # folders from that of a run up to the one that `seeds` has made for it
UNKNOWN = "unknown"  # the environment of a run that does not name it
RUN_ID = re.compile(r".*__(.+)__\d+__\d+")  # of our scripts: environment, script, seed, time
ROW = re.compile(r"^ *\| *([^|\n]+?) *\| *([^|\n]*?) *\| *$", re.MULTILINE)  # of hyperparameters


@dataclasses.dataclass(frozen=True)
class Log:
    """What is known of a run, finished or not."""

    path: Path
    environment: str
    updates: pd.DataFrame  # "global_step" and metrics, a row per iteration
    episodes: pd.DataFrame  # "global_step" and "return", a row per episode
    averaged: Literal["", "iteration", "window"] = ""  # "episodes" are means of those, or of 100
    settings: dict[str, str] = dataclasses.field(default_factory=dict)  # empty if unknown
    gaussian: bool = False  # the policy is known to be a Gaussian
    recorded: float | None = None  # the score of a committed run
    script: str = ""  # name of its file; empty if unknown
    code: str = ""  # hash of the script's text and of what it imports; empty if unknown
    complete: bool = False  # "episodes" has every episode that ended, so none means that none has
    note: str = ""  # what of the log was left out

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
    def windows(self) -> list[str]:
        """The parts of the run whose mean return can be its score, the best first.

        The paper scores a run by its last 100 episodes. In a short run these may begin before it
        has learned much: if they cover more than a fifth of it, the last tenth of the steps counts,
        or ten episodes if fewer end in it.
        """
        if self.averaged:
            has_100 = self.averaged == "window" or self.recorded is not None
            return [LAST_100, TENTH] if has_100 else [TENTH]
        ends, steps = self.episodes["global_step"], self.steps
        begin = ends.iloc[-LAST_EPISODES - 1] if len(ends) > LAST_EPISODES else 0
        suits = {
            LAST_100: steps - begin <= steps / 5,
            TENTH: (ends > 0.9 * steps).sum() >= FEWEST,
            LAST_10: True,
        }
        return [x for x in WINDOWS if suits[x]]

    def score_over(self, window: str) -> float:
        """Mean return over a part of the run; over what there is, if that is less."""
        if window == TENTH:
            part = self.returns[self.episodes["global_step"] > 0.9 * self.steps]
            part = part if len(part) else self.returns[-1:]
        elif self.recorded is not None:
            return self.recorded
        elif self.averaged == "window":  # already the mean of 100 episodes
            part = self.returns[-1:]
        else:
            part = self.returns[-LAST_EPISODES if window == LAST_100 else -FEWEST :]
        return float(part.mean(skipna=False))

    @property
    def scored(self) -> tuple[float, str]:
        """Mean return at the end of the run, and which part of the run that is."""
        window = self.windows[0]
        return self.score_over(window), window

    @property
    def score(self) -> float:
        return self.scored[0]

    @property
    def scores(self) -> dict[str, float]:
        """Mean return over each part of the run that can be its score."""
        return {x: self.score_over(x) for x in self.windows}

    def until(self, steps: int) -> "Log":
        """The beginning of the run; one in a hundred steps more or less does not matter."""
        if steps >= 0.99 * self.steps:
            return self
        parts = {x: getattr(self, x) for x in ("updates", "episodes")}
        parts = {x: y[y["global_step"] <= 1.01 * steps] for x, y in parts.items()}
        return dataclasses.replace(self, recorded=None, **parts)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the curve of returns, as `results.Result` has it."""
        curve = thin(self.episodes, self.updates, self.steps).dropna(subset=name)
        return curve["step"].to_numpy(), curve[name].to_numpy()


def runs_table(groups: dict[str, list[Log]]) -> pd.DataFrame:
    """A row per run: the "label" of its group, its "environment" and its "log"."""
    rows = [(label, x.environment, x) for label, logs in groups.items() for x in logs]
    table = pd.DataFrame(rows, columns=["label", "environment", "log"])
    return table.assign(label=pd.Categorical(table["label"], groups))


def window_of_all(runs: Iterable[Iterable[str]]) -> str:
    """The best part of a run that can score all of some runs.

    Args:
        runs: the parts that can score each of them.
    """
    known = [{*x} for x in runs]
    return next((x for x in WINDOWS if all(x in own for own in known)), TENTH)


class NoRun(BenchmarkError):
    """A folder with a log or a checkpoint that is no run; the message says why."""


# --- Which folders are runs ---


def find(text: str) -> list[Log]:
    """All runs in a folder, or in those that a pattern fits."""
    return search(text)[0]


def search(text: str, environment: str = UNKNOWN) -> tuple[list[Log], list[str]]:
    """All runs in a folder, or in those that a pattern fits; what is left out, and why.

    Args:
        environment: of the runs that do not name theirs.
    """
    tops = [Path(text)] if Path(text).exists() else sorted(map(Path, glob.glob(text)))
    if not tops:
        raise BenchmarkError(f"There is no folder {text}.")
    folders, left_out = run_folders(x.parent if is_log(x) else x for x in tops)
    found, logs = [], []
    for folder in folders:
        try:
            found.append(with_note(read(folder), environment))
        except NoRun as error:
            left_out.append(f"{folder}: {error}")
    whole = {x.path.parent: x.path.name for x in found if len(x.updates) and len(x.episodes)}
    for log in found:  # a second writer may have only returns
        if log.updates.empty and (other := whole.get(log.path.parent)):
            left_out.append(f"{log.path}: returns alone, next to the training metrics in {other}")
        else:
            logs.append(log)
    if not logs:
        text = f"{text} has no checkpoint.pt of our scripts and no TensorBoard log of PPO."
        raise BenchmarkError(" ".join([text, *(f"Left out: {x}." for x in left_out)]))
    return logs, left_out


def run_folders(tops: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Folders that have a log or a checkpoint, whatever links lead there; which are copies.

    Weights & Biases links to the logs of a run in its folder wandb/, which does not count.
    """
    seen, found, copies = set(), {}, []
    for place, names, files in itertools.chain(*(os.walk(x, followlinks=True) for x in tops)):
        names[:] = sorted(x for x in names if x != "wandb")
        if (real := os.path.realpath(place)) in seen:
            names.clear()
            continue
        seen.add(real)
        content = content_of(Path(place))
        if content and found.setdefault(content, Path(place)) != Path(place):
            copies.append(f"{place}: a copy of {found[content]}")
        if "checkpoint.pt" in files:
            names.clear()  # below are parts of this run, such as its best policy
    return sorted(found.values()), copies


def content_of(folder: Path) -> frozenset[bytes]:
    """Hashes of the logs in a folder: those of a run and of its copy are the same."""
    logs = [x for x in folder.glob("*") if is_log(x) and x.is_file()]
    return frozenset(hashlib.sha256(x.read_bytes()).digest() for x in logs)


def is_log(path: Path) -> bool:
    return path.name == "checkpoint.pt" or path.name.startswith(EVENTS)


def main_folder(folder: Path) -> Path | None:
    """Where the log of a single run is: of several writers, it is that of training returns."""
    found, _ = run_folders([folder])
    if len(found) < 2:
        return found[0] if found else None
    return max(find(str(folder)), key=lambda x: len(x.episodes)).path


def with_note(log: Log, environment: str) -> Log:
    """A run with what is known about it elsewhere, if it does not say it itself."""
    note = note_on(log.path)
    if log.environment == UNKNOWN:
        log = dataclasses.replace(log, environment=note.get("environment") or environment)
    if not log.settings:
        noted = {x: str(note[x]) for x in ("seed", "flags") if note.get(x)}
        log = dataclasses.replace(log, settings=noted)
    if note:
        texts = json.dumps([note["sha256"], note.get("imported")], sort_keys=True)
        code = hashlib.sha256(texts.encode()).hexdigest()
        script = Path(note.get("script", log.script)).name
        log = dataclasses.replace(log, script=script, code=code)
    return log


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
    settings = {x: str(y) for x, y in saved.get("args", {}).items()}
    gaussian = any("log_std" in x for x in saved.get("agent", {}))
    script = RUN_ID.fullmatch(str(saved.get("run_id", "")))
    about = {
        "settings": settings,
        "gaussian": gaussian,
        "script": f"{script[1]}.py" if script else "",
        "complete": "episodes" in saved,
    }
    episodes = episodes_of(saved)
    means = means_of_iterations(folder, updates, len(episodes))
    if len(means) and means["global_step"].iloc[0] < min(episodes["global_step"], default=0):
        note = "it keeps only its last episodes, so returns are means of iterations"
        about |= {"averaged": "iteration", "note": note}
        episodes = means
    return Log(folder, environment_of(settings), updates, episodes, **about)


def means_of_iterations(folder: Path, updates: pd.DataFrame, kept: int) -> pd.DataFrame:
    """Mean returns of a run's iterations, by its updates or, if episodes lack, by its log."""
    if RETURN in updates:
        means = updates[["global_step", RETURN]]
    elif kept >= KEPT and any(folder.glob(f"{EVENTS}*")):
        values = read_log(folder).values.get(RETURN, pd.Series(dtype=float))
        means = values.rename_axis("global_step").reset_index(name=RETURN)
    else:
        means = pd.DataFrame(columns=["global_step", RETURN])
    return means.rename(columns={RETURN: "return"}).dropna()


def environment_of(settings: dict[str, str]) -> str:
    """What a run was trained in: a simulator of one's own, or prompts with their reward."""
    own = settings.get("make", "")
    if ":" in own:
        return own
    env = settings.get("env_id", settings.get("env", UNKNOWN))
    prompts = settings.get("prompts", "None")
    return env if ":" in env or prompts == "None" else f"{prompts} {settings.get('reward')}"


def from_events(folder: Path) -> Log:
    """A run by its TensorBoard log, or a NoRun."""
    events = read_log(folder)
    if events.hparams and all(len(x) < 2 for x in events.values.values()):
        raise NoRun("written by add_hparams")
    named = {tag: NAMES.get(tag, (tag, 1)) for tag in events.values}
    values = {name: sign * events.values[tag] for tag, (name, sign) in named.items()}
    if not {RETURN, "losses/approx_kl", "rewards/accuracy", "grpo/kl"} & values.keys():
        raise NoRun("no metric of PPO")
    returns = values.get(RETURN, pd.Series(dtype=float))
    episodes = returns.rename_axis("global_step").reset_index(name="return")
    columns = {x: y.groupby(level=0).last() for x, y in values.items() if x.startswith(METRICS)}
    updates = pd.DataFrame(columns).rename_axis("global_step").reset_index()
    averaged = ""
    if MEANS in events.values:
        averaged = "window"
    elif len(updates) and episodes["global_step"].isin(updates["global_step"]).all():
        averaged = "iteration"  # single episodes end at steps of their own
    about = {"averaged": averaged, "settings": events.settings, "note": events.note}
    return Log(folder, environment_of(events.settings), updates, episodes, **about)


# --- TensorBoard ---


class Events(NamedTuple):
    """What the event files of a folder have."""

    values: dict[str, pd.Series]  # by tag; the index is the step
    settings: dict[str, str]  # from the text "hyperparameters"
    hparams: bool  # whether `add_hparams` has written something
    note: str  # what was left out


def read_log(folder: Path) -> Events:
    """The TensorBoard log of a folder, whose files are of one run that was continued or restarted.

    They have the order of the numbers in their names: time, process, count. From its first step on,
    a file replaces those before that have the same tags.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "tensors": 0}
    paths = sorted(folder.glob(f"{EVENTS}*"), key=lambda x: [*map(int, re.findall(r"\d+", x.name))])
    found = [EventAccumulator(str(x), everything).Reload() for x in paths]
    files = [contents(x) for x in found if any(x.Tags().values())]
    kept, settings, count = pd.DataFrame(columns=["tag", "step", "value"]), {}, 0
    for file in files:
        points = file.points
        again = points["step"][points["tag"].isin(kept["tag"])].min()  # nan if no tag is known
        kept = pd.concat([kept[~(kept["step"] >= again)], points])
        settings, count = settings | file.settings, count + len(points)
    kept = kept.astype({"step": int, "value": float}).sort_values("step", kind="stable")
    by_tag = kept.set_index("step")["value"].groupby(kept["tag"].to_numpy(), sort=False)
    note = "its steps go back; where runs in one folder overlap, only the last counts"
    hparams = any(x.hparams for x in files)
    return Events(dict(iter(by_tag)), settings, hparams, note * (len(kept) < count))


class EventFile(NamedTuple):
    """What an event file has, as far as it is whole."""

    points: pd.DataFrame  # "tag", "step" and "value" of each scalar
    settings: dict[str, str]
    hparams: bool


def contents(file: Any) -> EventFile:
    """What TensorBoard's reader has found in a file."""
    from tensorboard.util.tensor_util import make_ndarray

    tags, settings = file.Tags(), {}
    rows = [(tag, x.step, x.value) for tag in tags["scalars"] for x in file.Scalars(tag)]
    for tag in tags["tensors"]:  # also pictures and curves
        kind = file.SummaryMetadata(tag).plugin_data.plugin_name
        if kind == "scalars":  # in TensorBoard's newer form
            found = [(x.step, make_ndarray(x.tensor_proto)) for x in file.Tensors(tag)]
            rows += [(tag, step, x.item()) for step, x in found]
        elif kind == "text" and tag.startswith("hyperparameters"):
            text = make_ndarray(file.Tensors(tag)[-1].tensor_proto).item().decode()
            settings |= dict(ROW.findall(text)[2:])  # without the heading and the line below it
    points = pd.DataFrame(rows, columns=["tag", "step", "value"])
    hparams = "_hparams_/session_start_info" in file.summary_metadata
    return EventFile(points, settings, hparams)


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
    if {RETURN, MEANS} & values.keys():
        log = from_events(folder)
        facts |= {"score": log.score, "scores": log.scores}
        return facts, thin(log.episodes, log.updates, log.steps)
    ends = {x: float(y.iloc[-max(1, len(y) // 10) :].mean()) for x, y in values.items()}
    return facts | {"models": {"": ends}}, pd.DataFrame({"step": []})


def of_suite(suite: str, variant: str, folders: Folders) -> list[Log]:
    """The finished runs of a row of a suite; the points of their curves are means of episodes."""
    logs = []
    for result in itertools.chain(*by_environment(suite, variant, folders).values()):
        points = result.curve.rename(columns={"step": "global_step"})
        updates, episodes = points[["global_step"]], points[["global_step", "return"]].dropna()
        record = result.record
        seed, environment = str(record["seed"]), record["environment"]
        settings = {"seed": seed, "suite": suite, "variant": variant or "-"}
        path = Path(f"{suite}:{variant}".strip(":"), environment, f"seed{seed}")  # only its name
        about = {"averaged": "iteration", "settings": settings, "recorded": record["score"]}
        log = Log(path, environment, updates, episodes, script=record["script"], **about)
        logs.append(log)
    return logs
