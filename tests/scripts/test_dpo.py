"""recipes/dpo_on_reviews.py: its loss is the paper's; details D1-D8.

What it shares with the other scripts of its family is tested in test_shared_language.py.
"""

import numpy as np
import pytest
import torch
from adapters import SCRIPTS, scripts
from helpers import record, seeded

import ppo_rlhf_toy as ppo
from ppo_rlhf_toy import PAD

pytestmark = [scripts("dpo"), pytest.mark.usefixtures("script")]
SCRIPT = SCRIPTS["dpo"]
dpo = SCRIPT.module


def test_d4_d5_loss_equals_an_independent_statement():
    new, ref = 3 * torch.randn(2, 6, generator=seeded(0)).double()
    loss, metrics = dpo.dpo_loss(new, ref, 0.2)
    expected = 0.2 * (new - ref).numpy()
    margins = expected[:3] - expected[3:]
    assert loss.item() == pytest.approx(np.mean(np.log(1 + np.exp(-margins))))
    assert metrics["rewards/margin"].item() == pytest.approx(margins.mean())
    assert metrics["rewards/accuracy"].item() == pytest.approx((margins > 0).mean())


def test_d2_d3_log_probability_of_a_response_is_the_sum_over_its_tokens_in_one_pass(
    finished, monkeypatch
):
    reference = finished.reference
    pairs = ppo.Pairs(*(x[:4] for x in finished.preferences.learned))
    prompts, chosen, rejected = pairs
    with monkeypatch.context() as patch:
        passes = record(patch, ppo.Agent, "get_logprobs_and_values")
        found = dpo.pair_logprobs(reference, pairs)
    assert len(passes) == 1 and found.shape == (8,) and (chosen == PAD).any()
    for i, response in enumerate([*chosen, *rejected]):
        logprobs = SCRIPT.logprobs(reference, prompts[i % 4][None], response[None])[0]
        real = [logprobs[t, x].item() for t, x in enumerate(response.tolist()) if x != PAD]
        assert found[i].item() == pytest.approx(sum(real), rel=1e-5)


def test_d1_d6_d7_d8_training_starts_at_the_reference_and_logs_both_log_probabilities(
    finished, monkeypatch
):
    reference, pairs = finished.judges
    before = {name: x.clone() for name, x in reference.policy.state_dict().items()}
    _, updates = SCRIPT.learn(finished.judges, learning_rate=0.0, num_epochs=1)
    assert {row["rewards/margin"] for row in updates} == {0.0}
    with monkeypatch.context() as patch:
        calls = record(patch, dpo, "pair_logprobs")
        agent, updates = SCRIPT.learn(finished.judges, warmup_steps=4, learning_rate=0.01)
    expected = [0.01 * (1 - t / 10) * min(1, (t + 1) / 4) for t in range(10)]
    assert [row["charts/learning_rate"] for row in updates] == pytest.approx(expected)
    after = agent.policy.state_dict()
    for name, x in reference.policy.state_dict().items():
        assert torch.equal(x, before[name]) and not torch.equal(x, after[name])
    batches = [pairs for _, pairs, _ in calls[::2]]
    seen = torch.cat([torch.cat(batch, dim=1) for batch in batches]).tolist()
    texts = torch.cat(pairs, dim=1).tolist()
    assert sorted(seen[:70]) == sorted(seen[70:]) == sorted(texts)  # two passes over 70 pairs
    assert seen[:70] not in (seen[70:], texts)
    chosen, rejected = dpo.pair_logprobs(reference, batches[0]).chunk(2)
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


def test_pairs_that_are_held_out_are_evaluated_and_not_learned_from(finished):
    metrics, updates = finished.run["results"]["sft"], finished.run["updates"]["dpo"]
    assert len(updates) == 2 * 4  # 60 of 70 pairs
    assert updates[0]["losses/preference_loss"] == pytest.approx(np.log(2))  # the reference's
    held_out = finished.preferences.held_out
    chosen, rejected = dpo.pair_logprobs(finished.reference, held_out).chunk(2)
    means = [metrics[f"logprobs/{name}"] for name in ("chosen", "rejected")]
    assert means == pytest.approx([chosen.mean().item(), rejected.mean().item()])
    for name, row in [*finished.run["results"].items()][1:]:  # each by its own beta
        gains = [row[f"logprobs/{x}"] - metrics[f"logprobs/{x}"] for x in ("chosen", "rejected")]
        margin = row["beta"] * (gains[0] - gains[1])
        assert row["rewards/margin"] == pytest.approx(margin, abs=1e-4), name


def test_pairs_of_the_same_text_are_left_out_of_the_evaluation_and_counted(monkeypatch, capsys):
    real = ppo.make_preferences

    def make_preferences(*inputs):
        found = real(*inputs)
        found.held_out.chosen[:3] = found.held_out.rejected[:3]
        return found

    monkeypatch.setattr(ppo, "make_preferences", make_preferences)
    judged = record(monkeypatch, dpo, "evaluate")
    dpo.train(SCRIPT.args(num_epochs=1))
    for *_, pairs, _ in judged:
        assert len(pairs.prompts) == 7 and (pairs.chosen != pairs.rejected).any(dim=1).all()
    assert ", same_text_left_out 3\n" in capsys.readouterr().out


def test_the_kl_of_a_policy_is_that_of_its_texts_without_padding(finished, monkeypatch):
    args, agent = finished.run["args"], finished.run["agent"]
    calls = record(monkeypatch, ppo.Agent, "get_logprobs_and_values")
    judged_by = finished.reference, ppo.toy_task(args), finished.preferences.held_out
    metrics, _ = dpo.evaluate(args, agent, *judged_by)
    (_, _, responses, (policy, _)), (*_, (reference, _)) = calls[:2]
    real = responses != PAD
    both = (torch.distributions.Categorical(logits=x[real]) for x in (policy, reference))
    kl = torch.distributions.kl_divergence(*both).sum().item() / len(responses)
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-3) and not real.all()
