"""What the site shows of real runs: reviews by eight policies.

    python -m benchmark.reviews    # ten minutes on a busy core

They are default runs with seed 1.
"""

import contextlib
import copy
import dataclasses
import json
import tempfile
from typing import Any

import torch

import ppo_rlhf_toy as rlhf
from benchmark.definitions import Folders
from benchmark.results import write_text

BETAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REVIEWS = 8  # of each policy


def reviews() -> dict[str, Any]:
    """Evaluation and some reviews of the SFT model and of PPO with each weight of the penalty.

    All share the SFT model and the reward model, and respond to the same prompts.
    """
    judges, _ = rlhf.prepare(args := rlhf.Args(run_name="reviews"))

    @torch.no_grad()
    def described(agent: rlhf.Agent) -> dict[str, Any]:
        metrics, _ = rlhf.evaluate(args, agent, judges)
        generator = rlhf.stage_generator(args, "evaluate")
        rollout, _ = rlhf.collect(args, agent, judges, rlhf.NUM_EVALUATED, 0.0, generator)
        given = [x[:REVIEWS] for x in (rollout.prompts, rollout.responses)]
        words = [[judges.task.decode(x) for x in own] for own in given]
        judged = judges.task.gold(*given), judges.reward_model.score(*given)
        gold, proxy = ([round(y, 2) for y in x.tolist()] for x in judged)
        keys = ("prompt", "text", "gold", "proxy")
        texts_of = [[" ".join(x).removeprefix("<bos> ") for x in own] for own in words]
        known = {x: round(metrics[f"objective/{x}"], 3) for x in ("gold", "proxy", "kl")}
        known["unique"] = round(metrics["text/unique"], 3)
        return {**known, "reviews": [dict(zip(keys, x)) for x in zip(*texts_of, gold, proxy)]}

    torch.set_num_threads(1)
    rows = [{"beta": None, **described(judges.reference)}]
    for beta in BETAS:
        run = dataclasses.replace(args, kl_mode="fixed" if beta else "none", kl_coef=beta)
        rlhf.train_ppo(run, agent := copy.deepcopy(judges.reference), judges)
        rows.append({"beta": beta, **described(agent)})
    return {"seed": args.seed, "evaluated": rlhf.NUM_EVALUATED, "models": rows}


def main() -> None:
    """Record into the results."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        content = reviews()
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    write_text(Folders().results / "reviews.json", text + "\n")


if __name__ == "__main__":
    main()
