"""GRPO with a verifiable reward: every model of the runs of grpo_minimal.py, and their table."""

import pandas as pd

from benchmark.definitions import Folders, Suite
from benchmark.report.tables import RATIO, markdown, mean_with_interval, missing
from benchmark.results import runs_of
from benchmark.suites.grpo import VARIANTS

SHARE, MORE = "{:.3f}".format, "{:+.3f}".format
LABELS = {"sft": "SFT model"} | {name: label for name, (label, _) in VARIANTS.items()}


def models(suite: Suite, folders: Folders) -> pd.DataFrame:
    """A row per model and seed, with what is known of it."""
    rows = [
        {"seed": run.record["seed"], "model": name} | model
        for run in runs_of(suite, folders)["result"]
        for name, model in run.record["models"].items()
    ]
    return pd.DataFrame(rows)


def sums_table(suite: Suite, folders: Folders) -> str:
    """Each variant over its seeds; differences are within a seed, which has one SFT model."""
    found, rows = models(suite, folders).set_index("seed"), []
    by_model = dict(iter(found.groupby("model")))
    sft, base = by_model["sft"], by_model["dr-grpo"]
    for name, label in LABELS.items():
        own = by_model[name]
        more = mean_with_interval(own["pass@1"] - base["pass@1"], MORE)
        more_of_16 = mean_with_interval(own["pass@16"] - sft["pass@16"], MORE)
        groups = (f"groups_without_spread{x}" for x in ("_first", ""))
        first, last = (mean_with_interval(own[x], RATIO) for x in groups)
        rows.append(
            {
                "mean [95 %]": label,
                "seeds": len(own),
                "pass@1": mean_with_interval(own["pass@1"], SHARE),
                "more than Dr. GRPO": more if name not in ("sft", "dr-grpo") else "–",
                "pass@16": mean_with_interval(own["pass@16"], SHARE),
                "more than SFT": more_of_16 if name != "sft" else "–",
                "KL": mean_with_interval(own["kl"], RATIO),
                **{"groups without spread, first": first, "last": last},
            }
        )
    return markdown(rows) + missing(suite, folders)
