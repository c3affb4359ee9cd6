"""Results of finished runs, two files per suite, and published numbers.

`results/SUITE.jsonl` has a line per run, `results/SUITE.csv` the points of its curve. A run counts
as done once its line is there. Both are sorted, so that it does not matter who finished first.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmark.lab.definitions import Folders, Suite

KEY = ["environment", "variant", "seed"]
SCORES = ["score", "mean_return", "hours"]
Key = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run."""

    record: dict[str, Any]  # settings, commit, versions, time, memory and score
    curves: Path  # of its suite

    @property
    def steps(self) -> int:
        return self.record["settings"]["total_timesteps"]

    @property
    def curve(self) -> pd.DataFrame:
        """Its points; a value is missing where a stretch of steps has no data."""
        return curves_in(self.curves, self.curves.stat().st_mtime_ns)[key_of(self.record)]

    def column(self, name: str, stage: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a column of the curve (of a stage), where it has any."""
        rows = self.curve if stage is None else self.curve[self.curve["stage"] == stage]
        values = rows[name].to_numpy(float) if name in rows else np.full(len(rows), np.nan)
        known = ~np.isnan(values)
        return rows["step"].to_numpy()[known], values[known]


# --- Writing ---


@contextlib.contextmanager
def lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold a lock, as do scripts that are started meanwhile; False if another process holds it."""
    import fcntl  # not on Windows, where results can be read but no run is made

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file = None
        yield file is not None


def write_text(path: Path, text: str) -> None:
    """Write a file that is as it was or as it should be, whenever this process is killed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of this process alone
    temporary.write_text(text)
    os.replace(temporary, path)


def collect(suite: Suite, folders: Folders) -> None:
    """Add the results of finished runs that their processes left in their folders.

    The curves come first: whoever is killed in between leaves runs that are not done.
    """
    folders.results.mkdir(parents=True, exist_ok=True)
    records_path, curves_path = (folders.results / f"{suite.name}.{x}" for x in ("jsonl", "csv"))
    with lock(folders.results / ".lock", wait=True):  # one writer at a time
        records = done(suite.name, folders)
        paths = sorted((folders.runs / suite.name).glob("**/result.json"))
        found = [json.loads(x.read_text()) for x in paths]
        new = {key: x for x in found if (key := key_of(x["record"])) not in records}
        if not new:
            return
        tables = [pd.DataFrame(x["curve"]).assign(**dict(zip(KEY, key))) for key, x in new.items()]
        if curves_path.exists():
            old = table_of(curves_path)
            tables = [old[~pd.MultiIndex.from_frame(old[KEY]).isin(list(new))], *tables]
        rows = pd.concat(tables).set_index(KEY).sort_index(kind="stable")
        write_text(curves_path, rows.to_csv(float_format="%.6g"))
        records |= {key: x["record"] for key, x in new.items()}
        write_lines(records_path, [records[key] for key in sorted(records)])


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace a JSONL file."""
    write_text(path, "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))


# --- Reading ---


def key_of(row: dict[str, Any]) -> Key:
    """Environment, variant and seed."""
    return row["environment"], row["variant"], int(row["seed"])


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; none before it exists."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def table_of(path: Path) -> pd.DataFrame:
    """The curves of a suite as they are on disk."""
    texts = KEY[:2]  # either may be empty
    return pd.read_csv(path, dtype=dict.fromkeys(texts, str)).fillna(dict.fromkeys(texts, ""))


@functools.lru_cache(maxsize=4)
def curves_in(path: Path, version: int) -> dict[Key, pd.DataFrame]:
    """The curves of a suite as of some time, of which a run that is not done may have one."""
    return dict(iter(table_of(path).groupby(KEY)))


def done(suite: str, folders: Folders) -> dict[Key, dict[str, Any]]:
    """The records of a suite, those of added seeds included."""
    return {key_of(record): record for record in lines_of(folders.results / f"{suite}.jsonl")}


def by_environment(suite: str, variant: str, folders: Folders) -> dict[str, list[Result]]:
    """Results of a variant by environment, seeds in their order."""
    found: dict[str, list[Result]] = {}
    for record in done(suite, folders).values():
        if record["variant"] == variant:
            result = Result(record, folders.results / f"{suite}.csv")
            found.setdefault(record["environment"], []).append(result)
    return found


def runs_of(suite: Suite, folders: Folders, environments: Iterable[str] | None = None) -> Any:
    """A row per finished run of a suite and its baseline, by environment and in their order."""
    found = {label: by_environment(*name, folders) for name, label in suite.labels.items()}
    rows = [
        {"label": label, "result": result} | result.record
        for environment in environments or suite.environments
        for label, own in found.items()
        for result in own.get(environment, [])
    ]
    table = pd.DataFrame(rows, columns=["label", *KEY, *SCORES, "result"])
    table["label"] = pd.Categorical(table["label"], found)
    return table.astype(dict.fromkeys(SCORES, float))
