# ruff: noqa: E501 - a table of code at the end
"""dpo_rlhf_toy.py: SFT model and pairs are PPO's, its loss the paper's; details D1-D8."""

import copy
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_grpo import SMALL, check_run, empty_folder, run_script, seeded  # noqa: F401

import dpo_rlhf_toy as dpo
import ppo_rlhf_toy as rlhf
from dpo_rlhf_toy import PAD, Args

dpo.NUM_SAMPLES, dpo.NUM_EVALUATED = 64, 32


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run, not to be changed."""
    with pytest.MonkeyPatch.context() as context:
        context.chdir(tmp_path_factory.mktemp("finished"))
        return run_script(dpo)


def test_sft_model_pairs_and_evaluation_are_those_of_ppo_to_the_bit(finished):
    ppo = run_script(rlhf, num_updates=1)
    pair = (x.reference.policy.parameters() for x in (finished, ppo))
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    pairs = zip(finished.preferences, ppo.preferences, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    metrics, expected = (x.run["results"]["sft"] for x in (finished, ppo))
    common = metrics.keys() & expected.keys()
    assert len(common) == 7 and all(metrics[name] == expected[name] for name in common)
    held_out = [x[60:] for x in finished.preferences[:3]]
    chosen, rejected = dpo.pair_logprobs(finished.reference, *held_out).chunk(2)
    means = [metrics[f"logprobs/{name}"] for name in ("chosen", "rejected")]
    assert means == pytest.approx([chosen.mean().item(), rejected.mean().item()])


def test_d4_d5_loss_equals_an_independent_statement():
    new, ref = 3 * torch.randn(2, 6, generator=seeded(0)).double()
    loss, metrics = dpo.dpo_loss(new, ref, 0.2)
    expected = 0.2 * (new - ref).numpy()
    margins = expected[:3] - expected[3:]
    assert loss.item() == pytest.approx(np.mean(np.log(1 + np.exp(-margins))))
    assert metrics["rewards/margin"].item() == pytest.approx(margins.mean())
    assert metrics["rewards/accuracy"].item() == pytest.approx((margins > 0).mean())


def test_d2_d3_log_probability_of_a_response_is_the_sum_over_its_words_in_one_pass(finished):
    reference = finished.reference
    queries, chosen, rejected = (x[:4] for x in finished.preferences[:3])
    spy = patch.object(dpo.Agent, "get_logprobs", autospec=True, side_effect=dpo.Agent.get_logprobs)
    with spy as passes:
        found = dpo.pair_logprobs(reference, queries, chosen, rejected)
    assert passes.call_count == 1 and found.shape == (8,) and (chosen == PAD).any()
    for i, response in enumerate([*chosen, *rejected]):
        words = reference.get_logprobs(queries[i % 4][None], response[None])[0]
        real = [words[t, word].item() for t, word in enumerate(response.tolist()) if word != PAD]
        assert found[i].item() == pytest.approx(sum(real), rel=1e-5)


def test_d1_d6_d7_d8_training_starts_at_the_reference_and_logs_both_log_probabilities(finished):
    pairs, reference, agent = finished.preferences[:3], finished.reference, None
    before = {name: x.clone() for name, x in reference.policy.state_dict().items()}

    def train(**settings):
        nonlocal agent
        agent = copy.deepcopy(reference)
        return dpo.train_dpo(Args(**SMALL, run_name="x", **settings), agent, reference, pairs)

    assert {row["rewards/margin"] for row in train(learning_rate=0.0)} == {0.0}
    with patch.object(dpo, "pair_logprobs", wraps=dpo.pair_logprobs) as calls:
        updates = train(warmup_steps=4, learning_rate=0.01)
    expected = [0.01 * (1 - t / 10) * min(1, (t + 1) / 4) for t in range(10)]
    assert [row["charts/learning_rate"] for row in updates] == pytest.approx(expected)
    after = agent.policy.state_dict()
    for name, x in reference.policy.state_dict().items():
        assert torch.equal(x, before[name]) and not torch.equal(x, after[name])
    batches = [call.args[1:] for call in calls.call_args_list[::2]]
    seen = torch.cat([torch.cat(batch, dim=1) for batch in batches]).tolist()
    texts = torch.cat(pairs, dim=1).tolist()
    assert sorted(seen[:70]) == sorted(seen[70:]) == sorted(texts)  # two passes over 70 pairs
    assert seen[:70] not in (seen[70:], texts)
    chosen, rejected = dpo.pair_logprobs(reference, *batches[0]).chunk(2)
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


def test_whole_run_with_each_form_learns_from_pairs_that_are_not_held_out(capsys):
    models, args = (
        ["dpo", "dpo-plain", "dpo-beta-0.03"],
        Args(**SMALL, run_name="run", compare=True),
    )
    with patch.object(dpo, "train_dpo", wraps=dpo.train_dpo) as train:
        run = check_run(dpo, args, models)
    forms = [(x.args[0].beta, x.args[0].nll_coef) for x in train.call_args_list[:3]]
    assert forms == [(0.2, 0.05), (0.2, 0.0), (0.03, 0.0)]
    assert {len(updates) for updates in run["updates"].values()} == {2 * 4}  # 10 pairs are held out
    # Each begins at the reference.
    first = [run["updates"][name][0]["losses/preference_loss"] for name in models]
    assert first == pytest.approx([np.log(2)] * 3)
    assert run["results"]["sft"]["objective/kl"] == 0 < run["results"]["dpo"]["objective/kl"]
    rows = [run["results"][name] for name in models]
    assert [(x["method"], x["beta"], x["nll_coef"]) for x in rows] == [("DPO", *x) for x in forms]
    assert rows[0]["logprobs/chosen"] != rows[1]["logprobs/chosen"]
    printed = capsys.readouterr().out
    assert "Policy as a judge of texts: accuracy 0." in printed and "Reward model" not in printed


# What is broken, by what, and the tests that must notice. Copied functions are broken at home.
# fmt: off
MUTATIONS = [
    ("agents[name] = agent = copy.deepcopy(reference)", "agents[name] = agent = reference", "whole_run"),
    ("responses = torch.cat([chosen, rejected])", "responses = torch.cat([rejected, chosen])", "d2_"),
    ("logprobs.where(responses != PAD, 0.0).sum(dim=1)", "logprobs.sum(dim=1)", "d3_log"),
    ("logprobs.where(responses != PAD, 0.0).sum(dim=1)", "logprobs.where(responses != PAD, 0.0).mean(dim=1)", "d3_log"),
    ("(beta * (logprobs - ref_logprobs))", "(logprobs - ref_logprobs)", "d4_"),
    ("(beta * (logprobs - ref_logprobs))", "(beta * logprobs)", "d4_"),
    ("F.logsigmoid(good - bad)", "F.logsigmoid(bad - good)", "d5_"),
    ("(logprobs.chunk(2)[0] / (chosen != PAD).sum(dim=1))", "logprobs.chunk(2)[0]", "d6_"),
    ("loss + args.nll_coef * nll", "loss + nll", "d6_"),
    (" * min(1.0, step / args.warmup_steps)", "", "d7_"),
    ('"logprobs/rejected": rejected.mean(),', '"logprobs/rejected": chosen.mean(),', "d8_"),
    ("order = torch.randperm(len(pairs[0]), generator=generator)", "order = torch.arange(len(pairs[0]))", "d7_"),
    ("x[: -(len(x) // HELD_OUT)]", "x", "whole_run"),
]
# fmt: on
