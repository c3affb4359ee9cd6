"""RLHF: every model of the suites' runs, their tables, and the figure that compares methods."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmark.definitions import Folders, Suite
from benchmark.plots import new_figure
from benchmark.results import Result, by_environment
from benchmark.tables import markdown, plus_minus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {
    "gold": "objective/gold",
    "proxy": "objective/proxy",
    "KL": "objective/kl",
    "stop rate": "text/stop_rate",
    "unique": "text/unique",
    "repetition": "text/repetition",
    "words": "text/length",
    "log p(chosen)": "logprobs/chosen",
    "log p(rejected)": "logprobs/rejected",
}


def results_of(suite: Suite, folders: Folders) -> list[Result]:
    """Results of a suite, variant by variant."""
    found = [by_environment(suite.name, variant, folders) for variant in suite.variants]
    return [result for own in found for results in own.values() for result in results]


def models(suite: Suite, folders: Folders) -> pd.DataFrame:
    """A row per model and seed of a suite: method, strength of its penalty, and its evaluation."""
    rows: list[dict[str, Any]] = []
    for record in (x.record for x in results_of(suite, folders)):
        for model in record["models"].values():
            key = {"method": method(model), "penalty": penalty(model), "seed": record["seed"]}
            rows.append(key | {x: model.get(y) for x, y in COLUMNS.items()})
    return pd.DataFrame(rows, columns=["method", "penalty", "seed", *COLUMNS])


def method(model: dict[str, Any]) -> str:
    """What made a model, and how it differs from the default."""
    if model.get("nll_coef"):
        return f"{model['method']} + NLL"
    changes = {  # by which DeepSeekMath's GRPO differs
        "std": model.get("std"),
        "own length": model.get("length_divisor") == "own",
        "k3": model.get("kl_in_loss"),
    }
    parts = [name for name, changed in changes.items() if changed]
    if len(parts) == len(changes):
        parts = ["KL in the loss"]
    if model.get("length_divisor") == "mean":
        parts.append("mean length")
    if model.get("reward") == "gold":
        parts.append("gold as reward")
    return ", ".join([model["method"], *parts])


def penalty(model: dict[str, Any]) -> str:
    """Strength of what keeps a model near the SFT model."""
    for name, sign in (("n", "n"), ("beta", "β")):
        if name in model:
            return f"{sign} = {model[name]:g}"
    texts = {"adaptive": "target {target_kl:g}", "fixed": "β = {kl_coef:g}", "none": "none"}
    return texts.get(model.get("kl_mode"), "–").format(**model)


def models_table(suite: Suite, folders: Folders) -> str:
    """Each model of a suite over its seeds, in the columns that some model has."""
    rows, found = [], models(suite, folders)
    columns = [name for name in COLUMNS if found[name].notna().any()]
    for (name, strength), own in found.groupby(["method", "penalty"], sort=False):
        row = {"method": name, "penalty": strength, "seeds": len(own)}
        values = {x: own[x].dropna().to_numpy(float) for x in columns}
        rows.append(row | {x: plus_minus(y, 2) for x, y in values.items()})
    return markdown(rows)


def pipeline_table(suite: Suite, folders: Folders) -> str:
    """The models of the RLHF runs, and what else is known of each run."""
    rows = []
    for record, updates in ((x.record, x.curve) for x in results_of(suite, folders)):
        updates = updates[updates["stage"] == record["judged"]]
        target = record["settings"]["target_kl"]
        rows.append(
            {
                "seed": record["seed"],
                "RM accuracy": f"{record['reward_model']['accuracy']:.3f}",
                "RM correlation": f"{record['reward_model']['correlation']:.3f}",
                "gold with adaptive KL": f"{record['score']:.2f}",
                "KL of the last 20 updates": f"{updates['kl'].tail(20).mean():.2f} ({target:g})",
                "minutes": f"{record['seconds'] / 60:.1f}" if record["seconds"] else "–",
                "tokens/s in updates": f"{updates['tokens_per_second'].median():.0f}",
                "memory, MiB": record["peak_mib"],
            }
        )
    return f"{models_table(suite, folders)}\n{markdown(rows)}"


def frontier(suites: tuple[Suite, ...], folders: Folders) -> "Figure":
    """Gold over the KL of all models: dots are seeds, lines join their means in order of the KL.

    Where a reward model is over-optimized, lines leave the picture below.
    """
    rows = pd.concat([models(x, folders) for x in suites], ignore_index=True)
    rows = rows[rows["method"] != "SFT"].astype({"KL": float, "gold": float})
    figure, ((axes,),) = new_figure(1, 1, (6.4, 3.6))
    for index, (name, own) in enumerate(rows.groupby("method", sort=False)):
        color = "k" if name == "best of n" else f"C{index}"
        means = own.groupby("penalty")[["KL", "gold"]].mean().sort_values("KL")
        root = np.sqrt(own["KL"].clip(lower=0))
        axes.plot(root, own["gold"], ".", color=color, markersize=3, alpha=0.5)
        line = {"color": color, "marker": "os"[index // 10], "markersize": 4, "linewidth": 1.2}
        axes.plot(np.sqrt(means["KL"]), means["gold"], label=name, **line)
    axes.set(xlim=(0.5, 3.7), ylim=(0.5, 2.1), xlabel="square root of the KL to the SFT model")
    axes.set_ylabel("gold reward, standard deviations of the SFT model")
    return figure
