"""Evaluates the policy at each checkpoint, and keeps the one with the best mean return.

    python -m recipes.best_checkpoint --env-id Hopper-v4   # then --evaluate runs/NAME/best

It helps if the policy gets worse again later. It costs 10 episodes at each checkpoint (every 25
iterations by default). Training stays the same to the bit. The best of many evaluations is
partly luck, so evaluate that policy once more before you report its return. If `train` gets an
`env_factory`, give it to `ppo.evaluate` below, too.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

import ppo_continuous_action as ppo

save_checkpoint = ppo.save_checkpoint


def save_and_evaluate(run_dir: Path, state: dict[str, Any]) -> None:
    """Save the run, play 10 episodes, and keep the policy in the folder `best` if it is the best.

    `evaluations.csv` has a row for each evaluation: the step, and the mean return.
    """
    save_checkpoint(run_dir, state)
    if not state["updates"]:  # before the first iteration
        return
    score, table = np.mean(ppo.evaluate(run_dir)), run_dir / "evaluations.csv"
    rows = table.read_text().splitlines() if table.exists() else []  # a resumed run has some
    if all(score > float(row.split(",")[1]) for row in rows):
        (run_dir / "best").mkdir(exist_ok=True)
        shutil.copy(run_dir / "checkpoint.pt", run_dir / "best")
    with table.open("a") as file:
        file.write(f"{state['updates'][-1]['global_step']},{score}\n")


if __name__ == "__main__":
    ppo.save_checkpoint = save_and_evaluate
    ppo.main()
