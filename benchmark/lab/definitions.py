"""What a suite consists of; `evidence/suites/` has them."""

import dataclasses
import re
from pathlib import Path

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
    environments: dict[str, tuple[int, ...]] | None = None  # and their seeds, if not the suite's
    replaced: tuple[tuple[str, str], ...] = ()  # texts of the script, and what takes their place


@dataclasses.dataclass(frozen=True)
class Suite:
    """Every variant in every environment with every seed, unless a variant has its own."""

    name: str
    reproduces: str
    environments: dict[str, tuple[int, ...]]  # and their seeds; RLHF has the toy reviews there
    variants: dict[str, Variant]  # by name; a single one may have the empty name
    table: str = "variants"  # which one shows it, see pages.TABLES
    figures: tuple[str, ...] = ()  # see figures.FIGURES
    total_timesteps: int | None = 1_000_000  # None: the script is told neither these nor the task
    baseline: Name | None = None  # of another suite, with which the variants are compared
    baseline_label: str = ""  # in tables and figures
    points: int = POINTS  # of a stored curve

    def seeds(self, environment: str, variant: str) -> tuple[int, ...]:
        """Those that a variant is to have in an environment."""
        return (self.variants[variant].environments or self.environments).get(environment, ())

    @property
    def labels(self) -> dict[Name, str]:
        """Names in tables and figures, first that of a baseline elsewhere."""
        names = {(self.name, name): x.label or name or "ours" for name, x in self.variants.items()}
        return {self.baseline: self.baseline_label} | names if self.baseline else names


def require_open(name: str) -> None:
    """A BenchmarkError if an experiment is closed, which says where its results and code are."""
    if (page := CLOSED / name / "page.md").exists():
        raise BenchmarkError(f"{name} is closed; {page} says how to run it again.")


def file_name(text: str) -> str:
    """A text as the name of a file or folder."""
    return re.sub(r"[^\w.=+-]|^\.+$", "-", text)
