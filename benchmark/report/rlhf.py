"""RLHF: every model of the suites' runs, and their tables."""

from typing import Any

import pandas as pd

from benchmark.definitions import Folders, Suite
from benchmark.report.tables import markdown, plus_minus
from benchmark.results import runs_of

COLUMNS = {
    "gold": "objective/gold",
    "proxy": "objective/proxy",
    "KL": "objective/kl",
    "EOS rate": "text/eos_rate",
    "unique": "text/unique",
    "repetition": "text/repetition",
    "tokens": "text/length",
    "log p(chosen)": "logprobs/chosen",
    "log p(rejected)": "logprobs/rejected",
}


def models(suite: Suite, folders: Folders) -> pd.DataFrame:
    """A row per model and seed of a suite: method, strength of its penalty, and its evaluation."""
    runs = runs_of(suite, folders)
    rows = [
        {"method": method(model), "penalty": penalty(model)}
        | {name: model.get(metric) for name, metric in COLUMNS.items()}
        for run in runs["result"]
        for model in run.record["models"].values()
    ]
    return pd.DataFrame(rows, columns=["method", "penalty", *COLUMNS])


def method(model: dict[str, Any]) -> str:
    """What made a model, and how it differs from the default."""
    if model.get("nll_coef"):
        return f"{model['method']} + NLL"
    if model["method"] != "GRPO":
        return model["method"]
    changes = {  # by which DeepSeekMath's GRPO differs from Dr. GRPO with the KL in the reward
        "std": model["std"] == "group",
        "own length": model["loss_norm"] == "sequence",
        "k3": model["kl_in_loss"] == "k3",
    }
    parts = [name for name, changed in changes.items() if changed]
    if len(parts) == len(changes):
        return "GRPO, published form"
    if model["loss_norm"] == "token":
        parts.append("mean length")
    if model["reward"] == "gold":
        parts.append("gold as reward")
    return ", ".join(["Dr. GRPO", *parts])


def penalty(model: dict[str, Any]) -> str:
    """Strength of what keeps a model near the SFT model."""
    for name, sign in (("n", "n"), ("beta", "β")):
        if name in model:
            return f"{sign} = {model[name]:g}"
    texts = {"adaptive": "target {target_kl:g}", "fixed": "β = {kl_coef:g}", "none": "none"}
    return texts.get(model.get("kl_mode"), "–").format(**model)


def models_table(suite: Suite, folders: Folders) -> str:
    """Each model of a suite over its seeds, in the columns that some model has."""
    found = models(suite, folders).dropna(axis="columns", how="all")
    rows = [
        {"method": name, "penalty": strength, "seeds": len(own)}
        | {column: plus_minus(own[column], 2) for column in own.columns[2:]}
        for (name, strength), own in found.groupby(["method", "penalty"], sort=False)
    ]
    return markdown(rows)


def pipeline_table(suite: Suite, folders: Folders) -> str:
    """The models of the RLHF runs, and what else is known of each run."""
    rows = []
    for run in runs_of(suite, folders)["result"]:
        record, updates = run.record, run.curve
        updates = updates[updates["stage"] == record["scored_model"]]
        target, seconds = record["settings"]["target_kl"], record["seconds"]
        rows.append(
            {
                "seed": record["seed"],
                "RM accuracy": f"{record['reward_model']['accuracy']:.3f}",
                "RM correlation": f"{record['reward_model']['correlation']:.3f}",
                "gold with adaptive KL": f"{record['score']:.2f}",
                "KL of the last 20 updates": f"{updates['kl'].tail(20).mean():.2f} ({target:g})",
                "minutes": f"{seconds / 60:.1f}" if seconds else "–",
                "tokens/s in updates": f"{updates['tokens_per_second'].median():.0f}",
                "memory, MiB": record["peak_mib"],
            }
        )
    return f"{models_table(suite, folders)}\n{markdown(rows)}"
