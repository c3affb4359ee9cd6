"""Results of finished runs, two files for those of a name: that of a suite, or one of `seeds`.

`NAME.jsonl` has a line per run, `NAME.csv` the points of its curve. A run counts as done once its
line is there. Both are sorted, so that it does not matter who finished first.
"""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock

from benchmark.lab.definitions import Folders

FILE = "results.json"  # in the folder of a run, until it is collected
KEY = ["environment", "variant", "seed"]
Key = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run."""

    record: dict[str, Any]  # settings, commit, versions, time, memory and score
    curves: Path  # of all runs of its name

    @property
    def steps(self) -> int:
        return self.record["settings"].get("total_timesteps") or self.record["steps"]

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


def to_json(content: Any) -> str:
    """JSON in a line; NaN and infinities, for which it has no word, are null."""
    known = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(known, ensure_ascii=False)


def write_text(path: Path, text: str) -> None:
    """Write a file that is as it was or as it should be, whenever this process is killed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of this process alone
    temporary.write_text(text)
    os.replace(temporary, path)


def collect(name: str, folders: Folders) -> None:
    """Add the results of finished runs that their processes left in their folders.

    The curves come first: whoever is killed in between leaves runs that are not done.
    """
    folders.results.mkdir(parents=True, exist_ok=True)
    records_path, curves_path = (folders.results / f"{name}.{x}" for x in ("jsonl", "csv"))
    with FileLock(folders.results / ".lock"):  # one writer at a time
        records = done(name, folders)
        notes = sorted((folders.runs / name).glob("**/note.json"))  # scripts may have such a file
        paths = [x.with_name(FILE) for x in notes]
        found = [json.loads(x.read_text()) for x in paths if x.exists()]
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
    write_text(path, "".join(f"{to_json(x)}\n" for x in lines))


# --- Reading ---


def key_of(row: dict[str, Any]) -> Key:
    """Environment, variant and seed."""
    return row["environment"], row["variant"], int(row["seed"])


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; none before it exists."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def table_of(path: Path) -> pd.DataFrame:
    """The curves of all runs of a name as they are on disk."""
    texts = KEY[:2]  # either may be empty
    return pd.read_csv(path, dtype=dict.fromkeys(texts, str)).fillna(dict.fromkeys(texts, ""))


@functools.lru_cache(maxsize=4)
def curves_in(path: Path, version: int) -> dict[Key, pd.DataFrame]:
    """The curves as of some time, of which a run that is not done may have one."""
    return dict(iter(table_of(path).groupby(KEY)))


def done(name: str, folders: Folders) -> dict[Key, dict[str, Any]]:
    """The records of all runs of a name, those of added seeds included."""
    return {key_of(record): record for record in lines_of(folders.results / f"{name}.jsonl")}


def by_environment(name: str, variant: str, folders: Folders) -> dict[str, list[Result]]:
    """Results of a variant by environment, seeds in their order."""
    found: dict[str, list[Result]] = {}
    for record in done(name, folders).values():
        if record["variant"] == variant:
            result = Result(record, folders.results / f"{name}.csv")
            found.setdefault(record["environment"], []).append(result)
    return found
