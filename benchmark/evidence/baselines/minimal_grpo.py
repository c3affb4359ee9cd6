"""A run of grpo_minimal.py with each of its variants, all trained from one SFT model.

It leaves what the RLHF scripts leave: results.json, and a checkpoint of each variant's updates.
"""

import dataclasses
import json
from math import comb
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import tyro

import grpo_minimal
from benchmark.evidence.suites.grpo import TRIES, VARIANTS

LAST = 10  # updates whose mean stands for the end of training


@dataclasses.dataclass
class Args:
    seed: int = 1
    run_name: str = "run"  # results are in runs/RUN_NAME
    resume: Path | None = None  # a run that has results is over


def pass_at(k: int, right: int, tries: int) -> float:
    """Chance that one of k responses is right, of a prompt with so many right ones among `tries`.

    Without bias: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1 - comb(tries - right, k) / comb(tries, k)


def judged(rewards: torch.Tensor, before: torch.Tensor) -> dict[str, float]:
    """What is known of a model that earned rewards (prompts, 16) where the SFT model had others."""
    counts, tries = rewards.sum(dim=1).int().tolist(), rewards.shape[1]
    found = {f"pass@{k}": np.mean([pass_at(k, x, tries) for x in counts]) for k in TRIES}
    solved, solved_before = rewards.any(dim=1), before.any(dim=1)
    found["newly_solved"] = (solved & ~solved_before).float().mean()
    found["no_longer_solved"] = (~solved & solved_before).float().mean()
    return {name: round(float(x), 6) for name, x in found.items()}


def train(args: grpo_minimal.Args, reference: grpo_minimal.GPT | None) -> dict[str, Any]:
    """Train, from a reference if there is one: its SFT step is then one with step size 0."""
    if reference is None:
        return grpo_minimal.train(args)

    class Tuned(grpo_minimal.GPT):
        def __init__(self) -> None:
            super().__init__()
            self.load_state_dict(reference.state_dict())

    with mock.patch.object(grpo_minimal, "GPT", Tuned):
        return grpo_minimal.train(dataclasses.replace(args, sft_steps=1))


def main() -> None:
    """Train all variants and save what happened."""
    command = tyro.cli(Args)
    if command.resume:
        return
    folder, reference, models = Path("runs", command.run_name), None, {}
    for name, (_, settings) in VARIANTS.items():
        found = train(grpo_minimal.Args(seed=command.seed, **settings), reference)
        reference, updates = found["reference"], found["updates"]
        before, after = found["results"]["sft"], found["results"]["grpo"]
        if not models:
            models["sft"] = judged(before, before)
        first, last = updates[:LAST], updates[-LAST:]
        models[name] = judged(after, before) | settings
        models[name] |= {x: np.mean([y[x] for y in last]).item() for x in updates[0]}
        alike = [x["groups_without_spread"] for x in first]
        models[name]["groups_without_spread_first"] = np.mean(alike).item()
        (folder / name).mkdir(parents=True, exist_ok=True)
        torch.save({"updates": updates}, folder / name / "checkpoint.pt")
    args = dataclasses.asdict(grpo_minimal.Args(seed=command.seed))
    report = {"args": args, "quality": None, "results": models}
    (folder / "results.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
