"""RLHF: every model of the runs, and their tables."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from benchmark.evidence.definitions import Suite
from benchmark.evidence.tables import runs_of
from benchmark.lab.definitions import Folders
from benchmark.lab.results import Result
from benchmark.lab.tables import MODEL_METRICS, markdown, plus_minus


def models(results: Iterable[Result]) -> pd.DataFrame:
    """A row per model and seed: its name, what is known of it, method and strength of penalty."""
    rows = [
        {"seed": x.record["seed"], "model": name}
        | model
        | {"method": method(model), "penalty": penalty(model)}
        for x in results
        for name, model in x.record["models"].items()
    ]
    names = {metric: name for name, metric in MODEL_METRICS.items()}
    found = pd.DataFrame(rows).rename(columns=names)
    if "n" in found:  # best of n: of the same samples, a larger n leaves fewer texts
        found.loc[found["n"].notna(), "unique"] = np.nan
    return found


def method(model: dict[str, Any]) -> str:
    """What made a model; GRPO has a form of its own in DeepSeekMath, with k3 in the loss."""
    if model.get("nll_coef"):
        return f"{model['method']} + NLL"
    if model.get("method") != "GRPO":
        return model.get("method", "")
    return "GRPO, published form" if model["kl_in_loss"] == "k3" else "Dr. GRPO"


def penalty(model: dict[str, Any]) -> str:
    """Strength of what keeps a model near the SFT model."""
    for name, sign in (("n", "n"), ("beta", "β")):
        if name in model:
            return f"{sign} = {model[name]:g}"
    texts = {"adaptive": "target {target_kl:g}", "fixed": "β = {kl_coef:g}", "none": "none"}
    return texts.get(model.get("kl_mode"), "–").format(**model)


def models_table(suite: Suite, folders: Folders) -> str:
    """Each model of a suite over its seeds, in the columns that some model has."""
    found = models(runs_of(suite, folders)["result"])
    groups = found.groupby(["method", "penalty"], sort=False)
    table = groups[[x for x in MODEL_METRICS if x in found]].agg(plus_minus, digits=2)
    table.insert(0, "seeds", groups.size())
    return markdown(table.reset_index())


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
