"""Published numbers, and what random actions earn; see reference/README.md."""

import functools
import json

import pandas as pd

from benchmark.lab.provenance import ROOT

REFERENCE = ROOT / "benchmark" / "reference"


def random_returns(environment: str) -> float:
    """Mean return of uniformly random actions, see reference/README.md."""
    return json.loads((REFERENCE / "random_policy.json").read_text())[environment]["mean"]


@functools.cache
def reference(name: str) -> pd.DataFrame:
    """A file of published numbers."""
    return pd.read_csv(REFERENCE / f"{name}.csv")
