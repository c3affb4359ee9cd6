"""PPO and its rivals side by side: what is kept of their runs, their tables and their figure."""

import dataclasses
import json

import pytest
import torch

from benchmark import pages, record, results, rlhf
from benchmark.definitions import Folders, Run
from benchmark.suites import SUITES


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path / "results", tmp_path / "runs")


def add(folders, suite, variant, seed, models, updates):
    """A finished run as the script leaves it, with invented numbers."""
    made = Run(SUITES[suite], "reviews", variant, seed, folders)
    for name in models:
        (made.log / name).mkdir(parents=True)
        torch.save({"updates": updates}, made.log / name / "checkpoint.pt")
    texts = dict.fromkeys(rlhf.COLUMNS.values(), 0.5)
    models = {name: texts | x for name, x in ({"sft": {"method": "SFT"}} | models).items()}
    args = {"seed": seed, "run_name": "run", "target_kl": 6.0}
    quality = {"accuracy": 0.8, "correlation": 0.7}
    content = {"args": args, "quality": quality, "results": models}
    (made.log / "results.json").write_text(json.dumps(content))
    facts, curve = record.summarize_stages(made.log, 90.0, made.suite.points)
    about = {"environment": "reviews", "variant": variant, "seed": seed, "peak_mib": 512}
    kept = {"record": about | {"script": made.script} | facts, "curve": curve.to_dict("list")}
    (made.folder / "result.json").write_text(json.dumps(kept))
    results.collect(SUITES[suite], folders)
    return results.done(suite, folders)[made.key]


def judged(method, gold, kl, **more):
    return {"method": method, "objective/gold": gold, "objective/kl": kl} | more


PPO = {"kl_mode": "adaptive", "kl_coef": 0.5, "target_kl": 6.0, "reward": "model"}
GRPO = PPO | {"kl_in_loss": False, "std": False, "length_divisor": "longest"}
PAPER = GRPO | {"kl_in_loss": True, "std": True, "length_divisor": "own"}


def test_models_are_kept_with_thinned_curves_and_compared(folders):
    update = dict.fromkeys(record.STAGE_METRICS, 0.25) | {"objective/kl": 5.0, "losses/k3": 0.1}
    kinds = {"ppo-adaptive-6": judged("PPO", 1.25, 6.0, **PPO)}
    kinds["best-of-16"] = judged("best of n", 1.3, 1.8, n=16)
    add(folders, "rlhf", "", 2, kinds, [update] * 80)
    for seed in (1, 2):
        kinds = {
            "grpo": judged("GRPO", 1.0 + 0.5 * seed, 5.0 + seed, **GRPO),
            "grpo-paper": judged("GRPO", 1.3, 7.0, **PAPER),
        }
        found = add(folders, "rlhf_rivals", "grpo", seed, kinds, [update] * 80)
    assert (found["judged"], found["score"]) == ("grpo", 2.0)
    assert found["settings"] == {"seed": 2, "target_kl": 6.0} and found["hours"] == 0.025
    dpo = {"dpo": judged("DPO", 1.2, 3.0, beta=0.2, nll_coef=0.05)}
    add(folders, "rlhf_rivals", "dpo", 1, dpo, [{"logprobs/chosen": -18.0}] * 376)

    found = (results.by_environment("rlhf_rivals", x, folders)["reviews"] for x in ("grpo", "dpo"))
    curves = {own[-1].record["variant"]: own[-1].curve for own in found}
    assert len(curves["grpo"]) == 2 * 80 and curves["grpo"]["kl"].mean() == 5.0
    assert list(curves["dpo"]["step"][:3]) == [1, 5, 9] and len(curves["dpo"]) == 94

    text = pages.block("rlhf_rivals", folders)
    assert "| GRPO | target 6 | 2 | 1.75 ± 0.25 | 0.50 ± 0.00 | 6.50 ± 0.50 |" in text
    assert "| DPO + NLL | β = 0.2 | 1 | 1.20 |" in text
    text = pages.block("rlhf", folders)
    assert "| best of n | n = 16 | 1 | 1.30 |" in text
    assert "| 2 | 0.800 | 0.700 | 1.25 | 5.00 (6) | 1.5 | 0 | 512 |\n" in text


@pytest.mark.parametrize(
    ("model", "method", "penalty"),
    [
        ({"method": "PPO"} | PPO | {"kl_mode": "none"}, "PPO", "none"),
        ({"method": "GRPO"} | PAPER, "GRPO, KL in the loss", "target 6"),
        ({"method": "GRPO"} | GRPO | {"kl_mode": "fixed", "std": True}, "GRPO, std", "β = 0.5"),
        ({"method": "GRPO"} | GRPO | {"reward": "gold"}, "GRPO, gold as reward", "target 6"),
    ],
)
def test_method_and_penalty_of_a_model(model, method, penalty):
    assert (rlhf.method(model), rlhf.penalty(model)) == (method, penalty)


def test_every_run_of_the_frontier_differs():
    flags = [dataclasses.astuple(x)[:2] for x in SUITES["rlhf_frontier"].variants.values()]
    assert len(set(flags)) == len(flags)
