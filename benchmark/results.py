"""Results of finished runs, two files per suite, and published numbers.

`results/SUITE.jsonl` has a line per run, `results/SUITE.csv` the points of its curve. A run counts
as done once its line is there. Both are sorted, so that it does not matter who finished first.
"""

import contextlib
import csv
import dataclasses
import fcntl
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmark.provenance import BenchmarkError, machine
from benchmark.runs import (
    Folders,
    Run,
    once_per_version,
    read_note,
    select,
    suite_named,
    write_text,
)

REFERENCE = Path(__file__).resolve().parent / "reference"
KEY = ["environment", "variant", "seed"]
Key = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run."""

    record: dict[str, Any]  # settings, commit, versions, time, memory and score
    curve: pd.DataFrame  # a value is missing where a stretch of steps has no data

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a column of the curve, where it has any."""
        rows = self.curve.dropna(subset=[name])
        return rows["step"].to_numpy(), rows[name].to_numpy()


# --- Writing ---


@contextlib.contextmanager
def merging(results: Path) -> Iterator[None]:
    """Wait until nobody else writes results, and let nobody else until this is over."""
    results.mkdir(parents=True, exist_ok=True)
    with (results / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add(run: Run) -> dict[str, Any]:
    """Add a finished run to the results of its suite; returns its record."""
    facts, rows = run.result()
    note, identity = read_note(run), dict(zip(KEY, run.key))
    record = {
        **identity,
        **{"script": run.definition.script, "flags": " ".join(run.flags)},
        **{name: note.get(name) for name in ("commit", "starts", "crashes", "peak_mib")},
        **machine(),
        **facts,
    }
    merge(run.suite, [record], rows.assign(**identity), run.folders)
    return record


def merge(suite: str, records: list[dict], rows: pd.DataFrame, folders: Folders) -> None:
    """Put runs in the place of those with the same keys, or beside them.

    The curves come first: whoever is killed in between leaves a run that is not done.
    """
    records_path, rows_path = (folders.results / f"{suite}.{x}" for x in ("jsonl", "csv"))
    new = [key_of(record) for record in records]
    with merging(folders.results):
        records = [x for x in lines_of(records_path) if key_of(x) not in new] + records
        if rows_path.exists():
            old = table_of(rows_path)
            rows = pd.concat([old[~pd.MultiIndex.from_frame(old[KEY]).isin(new)], rows])
        rows = rows.set_index(KEY).sort_index(kind="stable")
        write_text(rows_path, rows.to_csv(float_format="%.6g"))
        write_lines(records_path, sorted(records, key=key_of))


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace a JSONL file."""
    write_text(path, "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a JSONL file, which is never half written."""
    with merging(path.parent):
        write_lines(path, [*lines_of(path), line])


# --- Reading ---


def key_of(row: dict[str, Any]) -> Key:
    """Environment, variant and seed."""
    return row["environment"], row["variant"], int(row["seed"])


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; none before it exists."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def table_of(path: Path) -> pd.DataFrame:
    """The curves of a suite as they are on disk."""
    return pd.read_csv(path, dtype={"variant": str}).fillna({"variant": ""})


@once_per_version
def records_in(path: Path) -> dict[Key, dict[str, Any]]:
    """The records of a suite."""
    return {key_of(record): record for record in lines_of(path)}


@once_per_version
def curves_in(path: Path) -> dict[Key, pd.DataFrame]:
    """The curves of a suite, of which one whose merge was killed has no record."""
    return dict(iter(table_of(path).groupby(KEY)))


def done(suite: str, folders: Folders) -> dict[Key, dict[str, Any]]:
    """The records of a suite, those of added seeds included."""
    return records_in(folders.results / f"{suite}.jsonl")


def how_complete(suite: str, folders: Folders) -> tuple[int, int]:
    """How many of a suite's own runs are done, and how many there are."""
    runs, records = select(suite, folders), done(suite, folders)
    return sum(run.key in records for run in runs), len(runs)


def by_environment(suite: str, variant: str, folders: Folders) -> dict[str, list[Result]]:
    """Results of a variant by environment, in the order of the suite, seeds in theirs."""
    found: dict[str, list[Result]] = {env: [] for env in suite_named(suite).environments}
    for key, record in done(suite, folders).items():
        if record["variant"] == variant:
            curve = curves_in(folders.results / f"{suite}.csv")[key]
            found[record["environment"]].append(Result(record, curve))
    return {env: results for env, results in found.items() if results}


def variant_named(name: str) -> tuple[str, str]:
    """Suite and variant of `suite` or `suite/variant`, or a BenchmarkError if there is none."""
    suite, _, variant = name.partition("/")
    variants = suite_named(suite).variants
    if variant not in variants:
        known = " or ".join(f"{suite}/{x}" if x else suite for x in variants)
        raise BenchmarkError(f"There is no {name}; there is {known}.")
    return suite, variant


def random_returns(environment: str) -> float:
    """Mean return of uniformly random actions, as measured by `benchmark.random_policy`."""
    return json.loads((REFERENCE / "random_policy.json").read_text())[environment]["mean"]


@functools.cache
def reference(name: str) -> list[dict[str, str]]:
    """Rows of a file of published numbers."""
    with (REFERENCE / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def by_variant(name: str, column: str) -> dict[str, str]:
    """A column of a file of published numbers by variant."""
    return {row["variant"]: row[column] for row in reference(name)}
