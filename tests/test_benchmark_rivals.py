"""Runs of GRPO and DPO in the benchmark: what is kept of them, their table and their figure."""

import json

import pytest
import torch

from benchmark import plots, results, rivals, runs, tables
from benchmark.suites import SUITES


@pytest.fixture
def folders(tmp_path):
    return runs.Folders(tmp_path / "results", tmp_path / "runs")


def add(folders, suite, variant, seed, models, settings, updates):
    """A finished run as the script leaves it, with invented numbers."""
    run = runs.make_run(suite, "reviews", variant, seed, folders)
    assert "--resume" not in run.command and run.progress() == 0
    for name in models:
        (run.log / name).mkdir(parents=True)
        torch.save({"updates": updates}, run.log / name / "checkpoint.pt")
    assert not run.is_finished() and "--resume" not in run.command  # it would begin anew
    runs.write_note(run, {"starts": 1, "crashes": 0, "commit": "abc", "peak_mib": 512})
    (run.folder / run.definition.script).touch()
    texts = {"text/stop_rate": 1.0, "text/unique": 0.9, "text/length": 12.0}
    models = {name: texts | metrics for name, metrics in ({"sft": {}} | models).items()}
    content = {"args": settings | {"seed": seed, "run_name": "run"}, "quality": {"accuracy": 0.8}}
    (run.log / "results.json").write_text(json.dumps(content | {"results": models}))
    assert run.is_finished() and run.progress() == run.total_steps
    return results.add(run)


def judged(gold, kl, **more):
    return {"objective/gold": gold, "objective/kl": kl} | more


GRPO = {"kl_mode": "adaptive", "kl_coef": 0.5, "target_kl": 6.0, "kl_in_loss": False}
DPO = {"beta": 0.2, "nll_coef": 0.05}


def test_models_of_rivals_are_kept_with_thinned_curves_and_compared(folders, tmp_path):
    update = {"objective/kl": 5.0, "objective/gold": 1.0, "objective/proxy": 2.0, "losses/k3": 0.1}
    update |= {"charts/tokens_per_second_update": 9.0}
    for seed in (1, 2):
        kl = {"grpo": 5.0 + seed, "grpo-paper": 7.0, "grpo-no-kl": 120.0}
        models = {name: judged(1.0 + 0.5 * seed, x) for name, x in kl.items()}
        record = add(folders, "rlhf_rivals", "grpo", seed, models, GRPO, [update] * 80)
    assert record["judged"] == "grpo" and record["score"] == 2.0
    fixed = GRPO | {"kl_mode": "fixed", "kl_coef": 0.05}
    models = {"grpo": judged(1.6, 7.0)}
    add(folders, "rlhf_frontier", "grpo-0.05", 1, models, fixed, [update] * 80)
    models = {"grpo": judged(-3.1, 92.0)}
    add(folders, "rlhf_frontier", "paper-0.05", 1, models, fixed | {"kl_in_loss": True}, [update])
    logged = {"logprobs/chosen": -18.0, "logprobs/rejected": -24.0}
    models = {"dpo": judged(1.2, 3.0, **logged), "dpo-plain": judged(1.1, 4.0, **logged)}
    models["dpo-beta-0.03"] = judged(-1.9, 33.0, **logged)
    add(folders, "rlhf_rivals", "dpo", 1, models, DPO, [logged | {"losses/nll": 1.0}] * 376)

    curves = {
        x.record["variant"]: x.curve
        for variant in ("grpo", "dpo")
        for x in results.by_environment("rlhf_rivals", variant, folders)["reviews"]
    }
    assert len(curves["grpo"]) == 3 * 80 and curves["grpo"]["kl"].mean() == 5.0
    assert list(curves["dpo"]["step"][:3]) == [1, 5, 9] and len(curves["dpo"]) == 3 * 94
    assert curves["dpo"]["chosen"].mean() == -18.0 and curves["dpo"]["kl"].isna().all()

    found = rivals.models("rlhf_rivals", folders).set_index(["method", "penalty"])
    assert found.loc[("GRPO", "target 6"), "gold"].tolist() == [1.5, 2.0]
    assert {*found.index} == {
        *(("SFT", "–"), ("GRPO", "target 6"), ("GRPO, KL in the loss", "target 6")),
        *(("GRPO", "none"), ("DPO + NLL", "β = 0.2"), ("DPO", "β = 0.2"), ("DPO", "β = 0.03")),
    }
    text = tables.suite_table("rlhf_rivals", folders)
    assert "| GRPO | target 6 | 2 | 1.75 ± 0.25 | – | 6.50 ± 0.50 | 1.00 ± 0.00 |" in text
    assert (
        "| DPO | β = 0.03 | 1 | -1.90 | – | 33.00 | 1.00 | 0.90 | 12.00 | -18.00 | -24.00 |" in text
    )
    assert "| GRPO, KL in the loss | β = 0.05 | 1 | -3.10 |" in tables.suite_table(
        "rlhf_frontier", folders
    )
    path = plots.update("rlhf_frontier", "rivals", folders, tmp_path)
    assert path.name == "rlhf_frontier.png" and path.stat().st_size > 10_000


def test_ppo_and_best_of_n_are_named_as_their_rivals_are():
    ppo = {"kl_mode": "adaptive", "kl_coef": 0.5, "target_kl": 6.0}
    names = ("ppo-adaptive-6", "ppo-fixed-0.05", "ppo-none", "best-of-16", "sft")
    assert [rivals.describe(name, ppo) for name in names] == [
        *(("PPO", "target 6"), ("PPO", "β = 0.05"), ("PPO", "none")),
        *(("best of n", "n = 16"), ("SFT", "–")),
    ]


def test_every_beta_of_the_frontier_differs():
    flags = [x.flags for x in SUITES["rlhf_frontier"].variants.values()]
    assert len(set(flags)) == len(flags) == 11
