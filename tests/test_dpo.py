# ruff: noqa: E501 - a table of code at the end
"""dpo_rlhf_toy.py: SFT model and pairs are PPO's, its loss the paper's; details D1-D8."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_grpo import SMALL, check_runs, empty_folder, make_stages, seeded  # noqa: F401

import dpo_rlhf_toy as dpo
import ppo_rlhf_toy as rlhf
from dpo_rlhf_toy import PAD, Args

dpo.NUM_SAMPLES, dpo.NUM_EVALUATED = 64, 32


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The reference, comparisons and judges of a small run, not to be changed."""
    with pytest.MonkeyPatch.context() as context:
        context.chdir(tmp_path_factory.mktemp("stages"))
        args = Args(**SMALL, run_name="run")
        task = dpo.toy_task(args)
        reference = dpo.Agent(dpo.train_sft(args, task), 1.0)
        preferences = dpo.make_preferences(args, task, reference)
        return preferences, dpo.Judges(task, reference, preferences.sample_gold)


def test_sft_model_pairs_and_evaluation_are_those_of_ppo_to_the_bit(stages):
    preferences, judges = stages
    ppo_judges, ppo_preferences, _, ppo_metrics, ppo_texts = make_stages(rlhf)
    pair = (x.reference.policy.parameters() for x in (judges, ppo_judges))
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(preferences, ppo_preferences, strict=True))
    pairs = preferences[:3]
    metrics, texts = dpo.evaluate(Args(**SMALL), judges.reference, judges, pairs)
    common = metrics.keys() & ppo_metrics.keys()
    assert len(common) == 6 and all(metrics[name] == ppo_metrics[name] for name in common)
    chosen, rejected = dpo.pair_logprobs(judges.reference, *pairs).chunk(2)
    means = [metrics[f"logprobs/{name}"] for name in ("chosen", "rejected")]
    assert texts == ppo_texts and means == [chosen.mean().item(), rejected.mean().item()]


def test_d4_d5_loss_equals_an_independent_statement():
    new, ref = 3 * torch.randn(2, 6, generator=seeded(0)).double()
    loss, metrics = dpo.dpo_loss(new, ref, 0.2)
    expected = 0.2 * (new - ref).numpy()
    margins = expected[:3] - expected[3:]
    assert loss.item() == pytest.approx(np.mean(np.log(1 + np.exp(-margins))))
    assert metrics["rewards/margin"].item() == pytest.approx(margins.mean())
    assert metrics["rewards/accuracy"].item() == pytest.approx((margins > 0).mean())


def test_d2_d3_log_probability_of_a_response_is_the_sum_over_its_words_in_one_pass(stages):
    preferences, (_, reference, _) = stages
    queries, chosen, rejected = (x[:4] for x in preferences[:3])
    spy = patch.object(dpo.Agent, "get_logprobs", autospec=True, side_effect=dpo.Agent.get_logprobs)
    with spy as passes:
        found = dpo.pair_logprobs(reference, queries, chosen, rejected)
    assert passes.call_count == 1 and found.shape == (8,) and (chosen == PAD).any()
    for i, response in enumerate([*chosen, *rejected]):
        words = reference.get_logprobs(queries[i % 4][None], response[None])[0]
        real = [words[t, word].item() for t, word in enumerate(response.tolist()) if word != PAD]
        assert found[i].item() == pytest.approx(sum(real), rel=1e-5)


def test_d1_d6_d7_d8_training_starts_at_the_reference_and_logs_both_log_probabilities(stages):
    preferences, judges = stages
    pairs, args = preferences[:3], Args(**SMALL, warmup_steps=4, learning_rate=0.01)
    before = {name: x.clone() for name, x in judges.reference.policy.state_dict().items()}
    with patch.object(dpo, "pair_logprobs", wraps=dpo.pair_logprobs) as calls:
        agent, updates = dpo.train_dpo(args, judges, pairs)
    expected = [0.01 * (1 - t / 10) * min(1, (t + 1) / 4) for t in range(10)]
    assert [row["charts/learning_rate"] for row in updates] == pytest.approx(expected)
    _, idle = dpo.train_dpo(Args(**SMALL, learning_rate=0.0), judges, pairs)
    assert {row["rewards/margin"] for row in idle} == {0.0}
    after = agent.policy.state_dict()
    for name, x in judges.reference.policy.state_dict().items():
        assert torch.equal(x, before[name]) and not torch.equal(x, after[name])
    batches = [call.args[1:] for call in calls.call_args_list[::2]]
    seen = torch.cat([torch.cat(batch, dim=1) for batch in batches]).tolist()
    texts = torch.cat(pairs, dim=1).tolist()
    assert sorted(seen[:70]) == sorted(seen[70:]) == sorted(texts)  # two passes over 70 pairs
    assert seen[:70] not in (seen[70:], texts)
    chosen, rejected = dpo.pair_logprobs(judges.reference, *batches[0]).chunk(2)
    nll = -(chosen / (batches[0][1] != PAD).sum(1)).mean().item()
    expected = {
        "losses/preference_loss": np.log(2),  # policy and reference are still the same
        "losses/nll": nll,
        "losses/loss": np.log(2) + 0.05 * nll,
        "logprobs/chosen": chosen.mean().item(),
        "logprobs/rejected": rejected.mean().item(),
    }
    assert {name: updates[0][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert updates[-1]["rewards/margin"] > 0.1 and updates[-1]["rewards/accuracy"] > 0.7


def test_whole_runs_of_each_form_can_be_killed_and_resumed():
    models = ["dpo-0.2-nll-0.05", "dpo-0.2", "dpo-0.03"]
    args = Args(**SMALL, run_name="run", compare=True)
    run = check_runs(dpo, args, ["sft", "preferences"], models, max_grad_norm=0.1)
    assert {len(updates) for updates in run["updates"].values()} == {2 * 4}  # 10 pairs are held out
    assert run["updates"]["dpo-0.2"][0]["losses/loss"] == pytest.approx(np.log(2))
    assert run["results"]["sft"]["objective/kl"] == 0 < run["results"]["dpo-0.2"]["objective/kl"]


# What is broken, by what, and the tests that must notice. Copied functions are broken at home.
# fmt: off
MUTATIONS = [
    ("agent = copy.deepcopy(judges.reference)", "agent = judges.reference", "d1_"),
    ("responses = torch.cat([chosen, rejected])", "responses = torch.cat([rejected, chosen])", "d2_"),
    ("logprobs.where(responses != PAD, 0.0).sum(dim=1)", "logprobs.sum(dim=1)", "d3_log"),
    ("logprobs.where(responses != PAD, 0.0).sum(dim=1)", "logprobs.where(responses != PAD, 0.0).mean(dim=1)", "d3_log"),
    ("(beta * (logprobs - ref_logprobs))", "(logprobs - ref_logprobs)", "d4_"),
    ("(beta * (logprobs - ref_logprobs))", "(beta * logprobs)", "d4_"),
    ("F.logsigmoid(good - bad)", "F.logsigmoid(bad - good)", "d5_"),
    ("(logprobs.chunk(2)[0] / lengths)", "logprobs.chunk(2)[0]", "d6_"),
    ("loss + args.nll_coef * nll", "loss + nll", "d6_"),
    (" * min(1.0, step / args.warmup_steps)", "", "d7_"),
    ("decay = 1 - (step - 1) / len(minibatches)", "decay = 1.0", "d7_"),
    ('"logprobs/rejected": rejected.mean(),', '"logprobs/rejected": chosen.mean(),', "d8_"),
    ("order = torch.randperm(len(comparisons[0]), generator=generator)", "order = torch.arange(len(comparisons[0]))", "d7_"),
    ("len(preferences.queries) // HELD_OUT", "0", "whole_runs"),
    ('METHOD, FIRST_SETTING = "dpo"', 'METHOD, FIRST_SETTING = "ppo"', "whole_runs"),
]
# fmt: on
