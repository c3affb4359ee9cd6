"""What a suite, its runs, a measurement and a script's row consist of; `suites/` has them."""

import dataclasses
import fnmatch
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.lab.provenance import ROOT, BenchmarkError

POINTS = 100  # of a stored curve, as many as baselines' published ones have
Name = tuple[str, str]  # suite and variant
CLOSED = ROOT / "benchmark" / "closed"  # a folder for each experiment that has ended


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where results are kept and where runs live until they are finished."""

    results: Path = ROOT / "benchmark" / "results"
    runs: Path = ROOT / "runs" / "benchmark"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A script with the flags that make this variant."""

    script: str
    flags: str = ""
    label: str = ""  # in tables and figures; empty where a suite has only one variant
    details: tuple[str, ...] = ()  # numbers of those that it changes, or another tag's title
    environments: dict[str, tuple[int, ...]] | None = None  # and their seeds, if not the suite's
    replaced: tuple[tuple[str, str], ...] = ()  # texts of the script, and what takes their place

    @property
    def title(self) -> str:
        """The label, after the numbers of details."""
        return " ".join([" and ".join(x for x in self.details if x.isdigit()), self.label]).strip()


@dataclasses.dataclass(frozen=True)
class Suite:
    """Every variant in every environment with every seed, unless a variant has its own."""

    name: str
    reproduces: str
    environments: dict[str, tuple[int, ...]]  # and their seeds; RLHF has the toy reviews there
    variants: dict[str, Variant]  # by name; a single one may have the empty name
    table: str = "variants"  # which one shows it, see pages.TABLES
    figures: tuple[str, ...] = ()  # see plots.FIGURES
    total_timesteps: int | None = 1_000_000  # None: the script is told neither these nor the task
    checkpoint: str = "checkpoint.pt"  # in the script's run folder: what it can continue from
    evaluated: bool = False  # a finished run is played by `evaluate.py`
    baseline: Name | None = None  # what the variants are compared with
    baseline_label: str = ""  # in tables and figures; empty where it is a variant of this suite
    points: int = POINTS  # of a stored curve

    def seeds(self, environment: str, variant: str) -> tuple[int, ...]:
        """Those that a variant is to have in an environment."""
        return (self.variants[variant].environments or self.environments).get(environment, ())

    @property
    def labels(self) -> dict[Name, str]:
        """Names in tables and figures, first that of a baseline elsewhere."""
        names = {(self.name, name): x.title or name or "ours" for name, x in self.variants.items()}
        known = self.baseline in (None, *names)
        return names if known else {self.baseline: self.baseline_label} | names

    @property
    def shared(self) -> list[str]:
        """Environments of all variants."""
        return [x for x in self.environments if all(self.seeds(x, y) for y in self.variants)]


def file_name(text: str) -> str:
    """A text as the name of a file or folder."""
    return re.sub(r"[^\w.=+-]", "-", text)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a suite, finished or not."""

    suite: Suite
    environment: str
    variant: str
    seed: int
    folders: Folders

    @property
    def key(self) -> tuple[str, str, int]:  # among the runs of its suite
        return self.environment, self.variant, self.seed

    @property
    def name(self) -> str:
        parts = (file_name(self.environment), self.variant, f"seed{self.seed}")
        return "/".join(part for part in parts if part)

    @property
    def folder(self) -> Path:  # where the script works, not committed
        return self.folders.runs.absolute() / self.suite.name / self.name

    @property
    def log(self) -> Path:  # where the script puts its checkpoint
        return self.folder / "runs" / "run"

    @property
    def logs(self) -> list[Path]:  # folders that it has made so far
        return [self.log]

    @property
    def variables(self) -> dict[str, str]:  # for the script: no GPU in sight
        return {"CUDA_VISIBLE_DEVICES": ""}

    def version(self, commit: str | None) -> dict[str, Any]:
        """What a result says of the script's version."""
        return {"commit": commit}

    @property
    def begun(self) -> bool:  # so far that it can be continued
        return (self.log / self.suite.checkpoint).exists()

    @property
    def naming(self) -> list[str]:  # flags that put its files into `log`
        return ["--run-name", self.log.name]

    @property
    def script(self) -> str:
        return self.suite.variants[self.variant].script

    @property
    def flags(self) -> list[str]:  # those that decide the result
        flags, steps = ["--seed", str(self.seed)], self.suite.total_timesteps
        if steps:
            flags = ["--env-id", self.environment, *flags, "--total-timesteps", str(steps)]
        return flags + shlex.split(self.suite.variants[self.variant].flags)


def select(
    suite: Suite,
    folders: Folders,
    seeds: tuple[int, ...] = (),
    only: str = "*",
    kind: Callable[..., Run] = Run,
) -> list[Run]:
    """Runs of a suite, seed by seed: with other seeds; those whose name or a part of it fits."""
    runs = [
        kind(suite, environment, variant, seed, folders)
        for environment in suite.environments
        for variant in suite.variants
        for own in [suite.seeds(environment, variant)]
        for seed in dict.fromkeys(own and (seeds or own))
    ]
    runs = [x for x in runs if fnmatch.filter([x.name, *x.name.split("/")], only)]
    if not runs:
        raise BenchmarkError(f"No run of {suite.name} fits {only}; see: list {suite.name}.")
    runs.sort(key=lambda x: x.seed)
    if runs[0].seed < 0:
        raise BenchmarkError(f"A seed must not be negative: {runs[0].seed}.")
    return runs
