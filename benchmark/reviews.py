"""What the site shows of real runs: reviews by eight policies.

    python -m benchmark.reviews    # ten minutes on a busy core

They are default runs with seed 1 that are watched, not changed.
"""

import contextlib
import dataclasses
import json
import tempfile
from typing import Any
from unittest import mock

import torch

import ppo_rlhf_toy as rlhf
from benchmark.definitions import Folders
from benchmark.results import write_text

BETAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REVIEWS = 8  # of each policy


def reviews() -> dict[str, Any]:
    """Evaluation and some reviews of the SFT model and of PPO with each weight of the penalty.

    All share the SFT model and the reward model, and answer the same queries.
    """
    models: dict[str, dict[str, Any]] = {}
    evaluate = rlhf.evaluate

    @torch.no_grad()
    def watched(args, agent, judges):
        metrics, texts = evaluate(args, agent, judges)
        generator = rlhf.stage_generator(args, "evaluate")
        rollout, _ = rlhf.collect(args, agent, judges, rlhf.NUM_EVALUATED, 0.0, generator)
        queries, answers = (x[:REVIEWS] for x in (rollout.queries, rollout.responses))
        words = [[judges.task.split_words(x) for x in own] for own in (queries, answers)]
        judged = judges.task.gold(queries, answers), judges.reward_model.score(queries, answers)
        gold, proxy = ([round(y, 2) for y in x.tolist()] for x in judged)
        keys = ("query", "text", "gold", "proxy")
        texts_of = [[" ".join(x).removeprefix("<bos> ") for x in own] for own in words]
        known = {x: round(metrics[f"objective/{x}"], 3) for x in ("gold", "proxy", "kl")}
        known["unique"] = round(metrics["text/unique"], 3)
        name = "sft" if agent is judges.reference else args.ppo_run
        rows = [dict(zip(keys, x)) for x in zip(*texts_of, gold, proxy)]
        models[name] = {**known, "reviews": rows}
        return metrics, texts

    args, found = rlhf.Args(resume="reviews"), {}  # one folder, so that earlier stages are shared
    with mock.patch.object(rlhf, "evaluate", watched):
        for beta in BETAS:
            mode = "fixed" if beta else "none"
            run = dataclasses.replace(args, kl_mode=mode, kl_coef=beta)
            rlhf.train(run)
            found[beta] = models[run.ppo_run]
    rows = [{"beta": None, **models["sft"]}, *({"beta": x, **y} for x, y in found.items())]
    return {"seed": args.seed, "evaluated": rlhf.NUM_EVALUATED, "models": rows}


def main() -> None:
    """Record into the results."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        content = reviews()
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    write_text(Folders().results / "reviews.json", text + "\n")


if __name__ == "__main__":
    main()
