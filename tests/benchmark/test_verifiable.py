"""The suite grpo_minimal: what its runs leave, and pass@k. Its table is on a page."""

import functools
import itertools

import pytest
import torch
from helpers import record

import grpo_minimal
from benchmark.evidence.baselines import minimal_grpo
from benchmark.evidence.suites.grpo import VARIANTS
from benchmark.lab.record import summarize_stages


def test_pass_at_k_is_the_share_of_subsets_with_a_right_response():
    for right, k in itertools.product(range(6), (1, 2, 4)):
        tries = [1] * right + [0] * (5 - right)
        subsets = [*itertools.combinations(tries, k)]
        expected = sum(map(any, subsets)) / len(subsets)
        assert minimal_grpo.pass_at(k, right, 5) == pytest.approx(expected)


def test_a_model_is_judged_by_its_rewards_and_by_those_of_the_sft_model():
    before, after = torch.zeros(4, 16), torch.zeros(4, 16)
    before[0, :8] = before[1, 0] = 1.0
    after[0] = after[2, 5] = 1.0
    found = minimal_grpo.judged(after, before)
    assert found["pass@1"] == pytest.approx(17 / 64, abs=1e-6)
    assert (found["pass@16"], found["newly_solved"], found["no_longer_solved"]) == (0.5, 0.25, 0.25)


def test_a_run_trains_every_variant_from_the_same_sft_model(monkeypatch, tmp_path):
    respond = grpo_minimal.respond
    monkeypatch.setattr(
        grpo_minimal, "respond", lambda model, x, tries: respond(model, x[:9], tries)
    )
    trained = record(monkeypatch, grpo_minimal, "train")
    short = {"sft_steps": 3, "num_updates": 2, "num_prompts": 2, "group_size": 4}
    monkeypatch.setattr(grpo_minimal, "Args", functools.partial(grpo_minimal.Args, **short))
    monkeypatch.setattr("sys.argv", ["run", "--seed", "7"])
    minimal_grpo.main()

    assert [x.sft_steps for x, _ in trained] == [3] + [1] * (len(VARIANTS) - 1)
    for (args, result), (_, settings) in zip(trained, VARIANTS.values(), strict=True):
        assert args.seed == 7 and vars(args).items() >= settings.items()
        first = trained[0][1]["reference"].state_dict()
        for name, x in result["reference"].state_dict().items():
            assert torch.equal(x, first[name])
    facts, curve = summarize_stages(tmp_path / "runs/run", 3.0)
    assert [*facts["models"]] == ["sft", *VARIANTS] and facts["scored_model"] == "dr-grpo"
    assert facts["score"] == facts["models"]["dr-grpo"]["pass@1"]
    assert [*curve] == ["stage", "step", "reward", "kl", "without_spread"]
    assert len(curve) == 2 * len(VARIANTS)
