"""Where runs and their results are, and what several modules share."""

import dataclasses
import re
from pathlib import Path

from benchmark.lab.provenance import ROOT, BenchmarkError

POINTS = 100  # of a stored curve, as many as baselines' published ones have
CLOSED = ROOT / "benchmark" / "closed"  # a folder for each experiment that has ended


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where results are kept and where runs live until they are finished."""

    results: Path = ROOT / "benchmark" / "results"
    runs: Path = ROOT / "runs" / "benchmark"


def require_open(name: str) -> None:
    """A BenchmarkError if an experiment is closed, which says where its results and code are."""
    if (page := CLOSED / name / "page.md").exists():
        raise BenchmarkError(f"{name} is closed; {page} says how to run it again.")


def file_name(text: str) -> str:
    """A text as the name of a file or folder."""
    return re.sub(r"[^\w.=+-]|^\.+$", "-", text)
