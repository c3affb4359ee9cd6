"""One run of ppo_rlhf_toy.py as a picture: gold and proxy reward over the distance from the SFT.

python -m benchmark.rlhf_frontier runs/NAME      # draws runs/NAME/frontier.png
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np


def read_run(folder: Path) -> dict[str, Any]:
    """What a finished run has left.

    Returns:
        args: its settings;
        quality: accuracy and correlation of its reward model;
        results: evaluation of each model, by its name;
        updates: of each PPO run one dictionary of metrics per update, by its name.

    Raises:
        ValueError: the run has not finished.
    """
    import torch  # takes two seconds

    path = folder / "results.json"
    if not path.exists():
        raise ValueError(f"{folder} holds no finished run of ppo_rlhf_toy.py: {path} is missing.")
    report = json.loads(path.read_text())
    updates = {}
    for name in report["results"]:
        checkpoint = folder / name / "checkpoint.pt"
        if name.startswith("ppo-") and checkpoint.exists():
            updates[name] = torch.load(checkpoint, weights_only=True)["updates"]
    return {name: report[name] for name in ("args", "quality", "results")} | {"updates": updates}


def gao_fit(
    kl: list[float], gold: list[float], method: Literal["rl", "bon"]
) -> tuple[float, float]:
    """Least-squares alpha and beta of the gold reward over d = sqrt(KL) (Gao et al. 2022).

    For PPO, gold = d * (alpha - beta * log d); for best-of-n, gold = d * (alpha - beta * d).
    """
    d = np.sqrt(np.maximum(kl, 1e-6))
    features = np.stack([d, -d * (np.log(d) if method == "rl" else d)], axis=1)
    alpha, beta = np.linalg.lstsq(features, np.array(gold))[0]
    return float(alpha), float(beta)


def draw_frontier(run: dict[str, Any], path: Path) -> Path:
    """Draw proxy and gold over sqrt(KL) of each PPO run and of best-of-n; save as PNG.

    Beside the gold curves of beta = 0 and best-of-n stand the forms that Gao et al. 2022 fitted.
    """
    from matplotlib.figure import Figure

    curves = dict(run["updates"])
    best = [row for name, row in run["results"].items() if name.startswith("best-of-")]
    if best:
        curves["best-of-n"] = best
    rewards = [x for x in ("proxy", "gold") if f"objective/{x}" in run["results"]["sft"]]
    figure = Figure(figsize=(5.5 * len(rewards), 4), layout="constrained")
    for axes, reward in zip(figure.subplots(1, len(rewards), squeeze=False)[0], rewards):
        for number, (name, rows) in enumerate(curves.items()):
            kl = [max(row["objective/kl"], 0.0) for row in rows]
            values = [row[f"objective/{reward}"] for row in rows]
            axes.plot(np.sqrt(kl), values, ".-", color=f"C{number}", label=name, linewidth=0.8)
            if reward == "gold" and name in ("ppo-none", "best-of-n"):
                method = "rl" if name == "ppo-none" else "bon"
                alpha, beta = gao_fit(kl, values, method)
                d = np.linspace(0.05, math.sqrt(max(kl)), 200)
                bend, form = (np.log(d), "log d") if method == "rl" else (d, "d")
                label = f"Gao et al.: d ({alpha:.2f} - {beta:.2f} {form})"
                axes.plot(d, d * (alpha - beta * bend), ":", color=f"C{number}", label=label)
        axes.set(xlabel="d = sqrt(KL to the SFT model)", ylabel=f"{reward} reward (SFT: 0 ± 1)")
        axes.axhline(0, color="gray", linewidth=0.5)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    try:
        print(draw_frontier(read_run(Path(sys.argv[1])), Path(sys.argv[1]) / "frontier.png"))
    except (IndexError, ValueError) as error:
        sys.exit(f"Error: {error}" if isinstance(error, ValueError) else __doc__)
