"""What is kept of a finished run: facts about it, and its curve, thinned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmark.lab.definitions import POINTS

LAST_EPISODES = 100  # the paper's Table 1 scores a run by the mean of its last 100 episodes
LAST_100 = f"last {LAST_EPISODES} episodes"
# Columns of the curves, by the scripts' names.
STEP_METRICS = {
    "losses/approx_kl": "approx_kl",
    "losses/clipfrac": "clipfrac",
    "losses/explained_variance": "explained_variance",
    "check/kl_after": "kl_after",
    "check/first_kl": "check_first_kl",
    "check/value_bias": "check_value_bias",
    "check/update": "check_update",
    "check/acting": "check_acting",
    "losses/grad_norm": "grad_norm",
    "losses/entropy": "entropy",
    "charts/episodic_length": "tokens",
    "charts/seconds": "seconds",
}
STAGE_METRICS = {
    "objective/gold": "gold",
    "objective/proxy": "proxy",
    "objective/kl": "kl",
    "charts/tokens_per_second_update": "tokens_per_second",
    "logprobs/chosen": "chosen",
    "logprobs/rejected": "rejected",
    "losses/approx_kl": "approx_kl",
    "losses/clipfrac": "clipfrac",
    "check/update": "check_update",
    "losses/entropy": "entropy",
    "objective/kl_exact": "kl_exact",
    "objective/score_std": "score_std",
    "text/repetition": "repetition",
}
# Settings that tables and figures show; all others follow from the commit and the flags.
SHOWN_SETTINGS = ("total_timesteps", "kl_mode", "target_kl")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a script has saved; a checkpoint is replaced as a whole, never half written."""
    import torch  # takes two seconds, and most commands never need it

    # Not mapped: on Windows, a script could not replace the file while somebody reads it.
    return torch.load(path, map_location="cpu", weights_only=True)


def is_ours(saved: Any) -> bool:
    """Whether a checkpoint has the metrics of updates as our scripts save them."""
    if not isinstance(saved, dict) or not isinstance(saved.get("updates"), list):
        return False
    rows = [*saved["updates"], saved.get("args", {}), saved.get("agent", {})]
    return len(rows) > 2 and all(isinstance(x, dict) for x in rows)


def episodes_of(saved: dict[str, Any]) -> pd.DataFrame:
    """The episodes of a checkpoint, "global_step", "return" and "length": rows, or tensors."""
    found = saved.get("episodes") or []
    if isinstance(found, dict):
        found = {name: np.asarray(x) for name, x in found.items()}
    table = pd.DataFrame(found, columns=["global_step", "return", "length"])
    return table.astype({"return": float})


def shown(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that are kept with a result."""
    return {x: y for x, y in settings.items() if x in SHOWN_SETTINGS}


def summarize_steps(
    log: Path, means: pd.DataFrame | None = None
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Facts and curve of a run in environment steps, by its checkpoint.

    Args:
        means: of the returns of each iteration, if the checkpoint has only the last episodes.
    """
    saved = read_checkpoint(log / "checkpoint.pt")
    episodes, updates = episodes_of(saved), saved["updates"]
    whole = episodes if means is None else means
    returns = episodes["return"].to_numpy()
    steps = np.diff([0, *(x["global_step"] for x in updates)])
    seconds_per_step = np.array([1 / x["charts/SPS"] for x in updates])
    facts = {
        "steps": int(steps.sum()),
        "episodes": len(episodes),
        "seconds": round(float(steps @ seconds_per_step), 1),
        # As if all had gone at the median rate: pauses, and other work on the machine for less
        # than half of the run, do not count.
        "hours": round(float(np.median(seconds_per_step) * steps.sum() / 3600), 6),
        "score": round(float(np.mean(returns[-LAST_EPISODES:])), 6) if len(returns) else None,
        "mean_return": round(float(whole["return"].mean()), 6) if len(whole) else None,
        "settings": shown(saved["args"]),
    }
    if saved.get("evaluations"):  # of held-out tasks, by language models
        facts["evaluation"] = round(float(saved["evaluations"][-1][1]), 6)
    # Language models count episodes, and what they end with follows from other settings.
    total_steps = int(saved["args"].get("total_timesteps", steps.sum()))
    return facts, thin(whole, pd.DataFrame(updates), total_steps)


def thin(
    episodes: pd.DataFrame, updates: pd.DataFrame, total_steps: int, points: int = POINTS
) -> pd.DataFrame:
    """Average episodes and updates, which have a global_step, over `points` equal stretches.

    The first update always ends a stretch of its own: some mistakes show in it.

    Returns:
        A row per stretch that has any data: its end as step, the number of episodes that ended in
        it, their mean return and the mean of each metric, which is missing where it has none.
    """
    ends = np.arange(1, points + 1) * total_steps / points
    ends = np.union1d(ends, pd.DataFrame(updates)["global_step"][:1])

    def by_stretch(log: pd.DataFrame, columns: dict[str, str]) -> Any:
        table = pd.DataFrame(log, columns=["global_step", *columns], dtype=float)
        stretch = np.searchsorted(ends, table.pop("global_step")).clip(max=len(ends) - 1)
        return table.rename(columns=columns).groupby(stretch)

    ended, made = by_stretch(episodes, {"return": "return"}), by_stretch(updates, STEP_METRICS)
    means = [x.mean().map(lambda y: float(f"{y:.4g}")) for x in (ended, made)]  # files are long
    parts = [ended.size().rename("episodes"), *means]
    table = pd.concat(parts, axis=1).sort_index().rename_axis("step").reset_index()
    table["step"] = ends[table["step"]].round()
    return table.fillna({"episodes": 0}).astype({"step": int, "episodes": int})


def summarize_stages(log: Path, seconds: float | None) -> tuple[dict[str, Any], pd.DataFrame]:
    """Facts and curve of an RLHF run, by the evaluation that ends it; a step is an update.

    Args:
        seconds: of a processor that the run took; None if nobody knows.
    """
    report, rows = json.loads((log / "results.json").read_text()), []
    trained = [x for x in report["results"] if x != "sft" and (log / x / "checkpoint.pt").exists()]
    for stage in trained:
        updates = read_checkpoint(log / stage / "checkpoint.pt")["updates"]
        every = -(-len(updates) // POINTS)
        for step, update in list(enumerate(updates, start=1))[::every]:
            known = {y: update[x] for x, y in STAGE_METRICS.items() if x in update}
            rows.append({"stage": stage, "step": step} | known)
    scored = report["results"][trained[0]]
    facts = {
        "seconds": seconds and round(seconds, 1),
        "hours": seconds and round(seconds / 3600, 6),
        "score": scored.get("objective/gold"),
        "scored_model": trained[0],
        "reward_model": report["quality"],
        "models": report["results"],
        "settings": shown(report["args"]),
    }
    return facts, pd.DataFrame(rows)
