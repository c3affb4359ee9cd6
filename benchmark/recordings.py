"""What the site shows of real runs: three updates of PPO, and reviews by eight policies.

    python -m benchmark.recordings update reviews    # ten minutes each on a busy core

Both are default runs with seed 1 that are watched, not changed.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import torch

import ppo_continuous_action as ppo
import ppo_rlhf_toy as rlhf
from benchmark.definitions import Folders
from benchmark.run import write_text

ENVIRONMENT = "Hopper-v4"
MOMENTS = (0.02, 0.5, 0.95)  # shares of the run after which an update is recorded
FRAMES_PER_EPOCH = 8
EDGES = np.linspace(0.4, 1.6, 49)  # of the histogram of ratios, whose ends take in what lies beyond
BETAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
REVIEWS = 8  # of each policy


def frame(agent: ppo.Agent, batch: list[torch.Tensor], clip_coef: float) -> dict[str, Any]:
    """Where the policy is, seen from the one that collected the batch.

    `raised` and `lowered` are histograms of the ratios of samples with positive and with negative
    advantages; `idle` is the share of samples whose gradient clipping has made zero.
    """
    obs, actions, old_logprobs, _, advantages, _ = batch
    with torch.no_grad():
        logratio = agent.evaluate_actions(obs, actions)[0] - old_logprobs
    ratio, better = logratio.exp().numpy(), ppo.normalize(advantages).numpy() > 0
    low, high = ratio < 1 - clip_coef, ratio > 1 + clip_coef
    within = ratio.clip(EDGES[0], EDGES[-1])
    return {
        "raised": np.histogram(within[better], EDGES)[0].tolist(),
        "lowered": np.histogram(within[~better], EDGES)[0].tolist(),
        "kl": round(ppo.approx_kl(logratio).item(), 6),
        "clipfrac": round(float((low | high).mean()), 4),
        "idle": round(float((high & better | low & ~better).mean()), 4),
    }


def update() -> dict[str, Any]:
    """Frames of three updates of a run: before the first minibatch, then eight per epoch."""
    # The update is compiled here: outside of it a recorder may look.
    args = ppo.Args(env_id=ENVIRONMENT, compile=False)
    fast, calls, found = ppo.compiled(ppo.ppo_update, ppo.step_taken), 0, {}
    each = args.update_epochs * args.num_minibatches
    every = args.num_minibatches // FRAMES_PER_EPOCH
    chosen = {round(x * args.num_iterations) for x in MOMENTS}

    def watched(agent, adam, batch, mb, schedule, args):
        nonlocal calls
        iteration, minibatch = calls // each + 1, calls % each
        calls += 1
        if iteration in chosen and minibatch == 0:
            found[iteration] = [frame(agent, batch, args.clip_coef)]
        metrics = fast(agent, adam, batch, mb, schedule, args)
        if iteration in chosen and (minibatch + 1) % every == 0:
            found[iteration].append(frame(agent, batch, args.clip_coef))
        return metrics

    result = ppo.train(args, update=watched)
    rows = []
    for iteration, frames in found.items():
        known = result["updates"][iteration - 1]
        ended = [x for x in result["episodes"] if x["global_step"] <= known["global_step"]]
        row = {"iteration": iteration, "step": known["global_step"]}
        row["return"] = round(float(np.mean([x["return"] for x in ended[-100:]])), 1)
        row["learning_rate"] = float(f"{known['charts/learning_rate']:.4g}")
        rows.append({**row, "frames": frames})
    settings = {name: getattr(args, name) for name in ("env_id", "seed", "clip_coef")}
    settings |= {"iterations": args.num_iterations, "epochs": args.update_epochs}
    settings |= {"samples": args.batch_size, "edges": [EDGES[0], EDGES[-1]]}
    return {**settings, "updates": rows}


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


def main(names: list[str]) -> None:
    """Record what is named into the results."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            content = {"update": update, "reviews": reviews}[name]()
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
        write_text(Folders().results / f"{name}.json", text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
