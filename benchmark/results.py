"""Reads committed results and published numbers."""

import csv
import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.provenance import BenchmarkError
from benchmark.runs import Folders, select, suite_named

REFERENCE = Path(__file__).resolve().parent / "reference"


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run."""

    path: Path

    @cached_property
    def record(self) -> dict[str, Any]:
        """Settings, commit, versions, speed and the last returns."""
        return json.loads(self.path.read_text())

    @cached_property
    def curve(self) -> list[dict[str, str]]:
        """Rows of the CSV file; a cell is empty where a stretch of steps has no data."""
        with self.path.with_suffix(".csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a column, without its empty cells."""
        rows = [row for row in self.curve if row.get(name)]
        steps = np.array([float(row["global_step"]) for row in rows])
        return steps, np.array([float(row[name]) for row in rows])

    @property
    def hours(self) -> float | None:
        """Hours of training on a machine that does nothing else; None where that is unknown.

        As if every stretch of steps had gone at the median rate, so that pauses, and other work on
        the machine for less than half of the run, do not count.
        """
        if "steps" not in self.record:  # RLHF
            return self.record["seconds"] and self.record["seconds"] / 3600
        rollout, update = (self.column(f"charts/SPS_{part}")[1] for part in ("rollout", "update"))
        return float(np.median(1 / rollout + 1 / update)) * self.record["steps"] / 3600

    @property
    def final(self) -> float:
        """Mean return of the last 100 episodes; of RLHF the gold reward with the adaptive KL."""
        if "models" in self.record:
            return self.record["models"][self.adaptive]["objective/gold"]
        return float(np.mean(self.record["last_returns"]))

    @property
    def adaptive(self) -> str:
        """Of RLHF: the name of the PPO run with the adaptive KL."""
        return next(name for name in self.record["models"] if name.startswith("ppo-adaptive"))

    @property
    def whole(self) -> float:
        """Mean return of all episodes of the run."""
        rows = [row for row in self.curve if row["return"]]
        returns = [float(row["return"]) for row in rows]
        return float(np.average(returns, weights=[int(row["episodes"]) for row in rows]))


def load(suite: str, folders: Folders) -> list[Result]:
    """All results of a suite, those of added seeds included."""
    suite_named(suite)
    return [Result(path) for path in sorted((folders.results / suite).glob("**/seed*.json"))]


def by_environment(suite: str, variant: str, folders: Folders) -> dict[str, list[Result]]:
    """Results of a variant by environment, in the order of the suite, seeds in theirs."""
    found: dict[str, list[Result]] = {env: [] for env in suite_named(suite).environments}
    for result in load(suite, folders):
        if result.record["variant"] == variant:
            found[result.record["environment"]].append(result)
    ordered = {env: sorted(x, key=lambda r: r.record["seed"]) for env, x in found.items()}
    return {env: results for env, results in ordered.items() if results}


def variant_named(name: str) -> tuple[str, str]:
    """Suite and variant of `suite` or `suite/variant`.

    Raises:
        BenchmarkError: there is no such variant.
    """
    suite, _, variant = name.partition("/")
    variants = suite_named(suite).variants
    if variant not in variants:
        known = " or ".join(f"{suite}/{x}" if x else suite for x in variants)
        raise BenchmarkError(f"There is no {name}; there is {known}.")
    return suite, variant


def missing(suite: str, folders: Folders) -> int:
    """Runs of a suite that have no result."""
    return sum(not run.result.exists() for run in select(suite, folders))


def random_returns(environment: str) -> float:
    """Mean return of uniformly random actions, as measured by `benchmark.random_policy`."""
    return json.loads((REFERENCE / "random_policy.json").read_text())[environment]["mean"]


def reference(name: str) -> list[dict[str, str]]:
    """Rows of a file of published numbers."""
    with (REFERENCE / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))
