"""GRPO with a verifiable reward: every model of the runs of grpo_minimal.py, and their table."""

import pandas as pd

from benchmark.definitions import Folders, Suite
from benchmark.report import statistics
from benchmark.report.statistics import estimate, matrix
from benchmark.report.tables import markdown, missing, with_interval
from benchmark.results import runs_of
from benchmark.suites.grpo import VARIANTS

LABELS = {"sft": "SFT model"} | {name: label for name, (label, _) in VARIANTS.items()}


def models(suite: Suite, folders: Folders) -> pd.DataFrame:
    """A row per model and seed, with what is known of it."""
    rows = [
        {"seed": run.record["seed"], "model": name} | model
        for run in runs_of(suite, folders)["result"]
        for name, model in run.record["models"].items()
    ]
    return pd.DataFrame(rows)


def interval(values: pd.Series, form: str = ".3f") -> str:
    """The mean over seeds with its interval, or a dash."""
    known = values.dropna()
    if known.empty:
        return "–"
    return with_interval(estimate(matrix(known), statistics.mean), f"{{:{form}}}".format)


def sums_table(suite: Suite, folders: Folders) -> str:
    """Each variant over its seeds; differences are within a seed, which has one SFT model."""
    found, rows = models(suite, folders).set_index("seed"), []
    by_model = dict(iter(found.groupby("model")))
    sft, base = by_model["sft"], by_model["dr-grpo"]
    for name, label in LABELS.items():
        own, trained = by_model[name], name != "sft"
        others = interval(own["pass@1"] - base["pass@1"], "+.3f")
        rows.append(
            {
                "mean [95 %]": label,
                "seeds": len(own),
                "pass@1": interval(own["pass@1"]),
                "more than Dr. GRPO": others if name not in ("sft", "dr-grpo") else "–",
                "pass@16": interval(own["pass@16"]),
                "more than SFT": interval(own["pass@16"] - sft["pass@16"], "+.3f")
                if trained
                else "–",
                "KL": interval(own["kl"], ".2f"),
                "groups without spread, first": interval(own["groups_without_spread_first"], ".2f"),
                "last": interval(own["groups_without_spread"], ".2f"),
            }
        )
    return markdown(rows) + missing(suite, folders)
