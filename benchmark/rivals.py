"""PPO and its rivals: every model of several suites of RLHF runs, and their figure."""

from typing import Any

import numpy as np
import pandas as pd

from benchmark.results import by_environment
from benchmark.runs import Folders
from benchmark.suites import SUITES

COLUMNS = {
    "gold": "objective/gold",
    "proxy": "objective/proxy",
    "KL": "objective/kl",
    "stop rate": "text/stop_rate",
    "unique": "text/unique",
    "words": "text/length",
    "log p(chosen)": "logprobs/chosen",
    "log p(rejected)": "logprobs/rejected",
}
SHOWN = ("rlhf", "rlhf_rivals", "rlhf_frontier")  # suites in the figure


def models(suite: str, folders: Folders) -> pd.DataFrame:
    """A row per model and seed of a suite: method, strength of its penalty, and its evaluation."""
    rows: list[dict[str, Any]] = []
    for variant in SUITES[suite].variants:
        for results in by_environment(suite, variant, folders).values():
            for record in (x.record for x in results):
                for name, metrics in record["models"].items():
                    method, strength = describe(name, record["settings"])
                    key = {"method": method, "penalty": strength, "seed": record["seed"]}
                    rows.append(key | {x: metrics.get(y) for x, y in COLUMNS.items()})
    return pd.DataFrame(rows, columns=["method", "penalty", "seed", *COLUMNS])


def describe(model: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Method and strength of the penalty of a model of a run with these settings."""
    kind, _, rest = model.partition("-")
    if model == "sft":
        return "SFT", "–"
    if kind == "best":
        return "best of n", f"n = {rest.removeprefix('of-')}"
    if kind == "dpo":
        beta = 0.03 if rest.startswith("beta") else settings["beta"]
        nll = settings["nll_coef"] and not rest
        return "DPO + NLL" if nll else "DPO", f"β = {beta:g}"
    paper = rest == "paper" or settings.get("kl_in_loss", False)
    method = {"ppo": "PPO", "grpo": "GRPO, KL in the loss" if paper else "GRPO"}[kind]
    if rest in ("none", "no-kl"):
        return method, "none"
    if rest.startswith("fixed") or settings["kl_mode"] == "fixed":
        return method, f"β = {rest.removeprefix('fixed-') or settings['kl_coef']}"
    return method, f"target {settings['target_kl']:g}"


def plot_rivals(suite: str, found: dict, folders: Folders):
    """Gold over the KL, all models: dots are seeds, the line joins their means in order of the KL.

    On the left everything, on the right the part that matters.
    """
    import matplotlib.pyplot as plt

    rows = pd.concat([models(x, folders) for x in SHOWN], ignore_index=True)
    rows = rows[rows["method"] != "SFT"].astype({"KL": float, "gold": float})
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2))
    for axes in panels:
        for index, (method, own) in enumerate(rows.groupby("method", sort=False)):
            color = "k" if method == "best of n" else f"C{index}"
            means = own.groupby("penalty")[["KL", "gold"]].mean().sort_values("KL")
            root = np.sqrt(own["KL"].clip(lower=0))
            axes.plot(root, own["gold"], ".", color=color, markersize=3, alpha=0.5)
            line = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.2}
            axes.plot(np.sqrt(means["KL"]), means["gold"], label=method, **line)
        axes.axhline(0, color="0.35", linewidth=0.8)
        axes.set_xlabel("square root of the KL to the SFT model")
    panels[0].set_ylabel("gold reward, standard deviations of the SFT model")
    panels[1].set(xlim=(0.5, 3.5), ylim=(0.5, 1.9))
    return figure
