"""grpo_rlhf_toy.py: its loss is the paper's; details G1-G8.

What it shares with the other scripts of its family is tested in test_shared_language.py.
"""

import numpy as np
import pytest
import torch
from adapters import SCRIPTS, on
from helpers import louder, record, seeded

from grpo_rlhf_toy import PAD

pytestmark = [on("grpo"), pytest.mark.usefixtures("script")]
SCRIPT = SCRIPTS["grpo"]
grpo = SCRIPT.module


@pytest.mark.parametrize("kl_in_loss", ["no", "k2", "k3"])
@pytest.mark.parametrize("loss_norm", ["constant", "sequence", "token"])
@pytest.mark.parametrize("ratio_of", ["token", "sequence"])
def test_g4_g5_g7_loss_equals_an_independent_statement(judges, kl_in_loss, loss_norm, ratio_of):
    """The objective of DeepSeekMath, token by token; its gradient too."""
    agent, generator = judges.reference, seeded(0)
    prompts = judges.task.sample_prompts(8, generator)
    lengths = torch.randint(1, 11, (8,), generator=generator)
    advantages = torch.randn(8, generator=generator)
    mask = torch.arange(10) < lengths[:, None]
    responses = torch.randint(2, 79, (8, 10), generator=generator).where(mask, PAD)
    new = grpo.log_probability(agent.get_logprobs(prompts, responses), responses)
    old, ref = (new.detach() + x * torch.randn(8, 10, generator=generator) for x in (0.9, 0.5))
    expected = 0.0
    logratios, upper = torch.zeros(8, 10), torch.zeros(8, 10)
    for i, t in mask.nonzero().tolist():
        ratio, to_ref = ((x - y)[i, t].exp() for x, y in ((new, old), (ref, new)))
        if ratio_of == "sequence":
            ratio = (new - old)[i, : lengths[i]].mean().exp()
        logratios[i, t] = ratio.log().item()
        upper[i, t] = 0.4 if advantages[i] > 0 else 0.2
        gain = torch.min(ratio * advantages[i], ratio.clamp(0.8, 1.4) * advantages[i])
        estimates = {"no": 0.0, "k2": to_ref.log() ** 2 / 2, "k3": to_ref - to_ref.log() - 1}
        divisors = {"constant": 10, "sequence": lengths[i], "token": lengths.sum() / 8}
        expected -= (gain - 0.7 * estimates[kl_in_loss]) / divisors[loss_norm] / 8
    # What stands outside the mask must not matter.
    padded = responses.where(mask, 7), old.where(mask, 1e6), ref.where(mask, -1e6)
    mb = grpo.Rollout(prompts, *padded, torch.zeros(8), mask)
    args = grpo.Args(kl_in_loss=kl_in_loss, loss_norm=loss_norm, ratio=ratio_of, clip_high=0.4)
    loss, metrics = grpo.grpo_loss(agent, mb, advantages, 0.7, args)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    weights = list(agent.parameters())
    gradients = (torch.autograd.grad(x, weights, retain_graph=True) for x in (loss, expected))
    for found, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-5)
    logratio = logratios[mask]
    ratio = logratio.exp()
    k3 = (ratio - 1 - logratio).mean().item()
    assert metrics["losses/approx_kl"].item() == pytest.approx(k3, rel=1e-4)
    assert metrics["losses/clipfrac"] == ((ratio - 1).abs() > upper[mask]).float().mean() > 0
    given = advantages[:, None].expand_as(mask)[mask]
    correlation = np.corrcoef(logratio, given)[0, 1]
    assert metrics["check/update"].item() == pytest.approx(correlation, abs=1e-5)
    same = grpo.grpo_loss(agent, mb, torch.ones(8), 0.7, args)[1]["check/update"]
    assert same == 0  # not NaN


def test_g6_with_the_kl_in_the_loss_the_reward_is_the_score_alone(judges):
    agent, args = louder(judges.reference, 0.03), SCRIPT.args(kl_in_loss="k3")
    rollout, metrics = SCRIPT.collect(args, agent, judges, 3.0)
    assert rollout.rewards.mean().item() == pytest.approx(metrics["objective/score"], rel=1e-5)
    assert abs(metrics["objective/kl"]) > 0.01


def test_g1_g8_6_each_pass_is_a_permutation_of_whole_groups_with_their_advantages(
    judges, monkeypatch
):
    names = ("collect", "group_advantages", "grpo_loss")
    rollouts, given, losses = (record(monkeypatch, grpo, name) for name in names)
    SCRIPT.learn(judges, num_updates=1, group_size=4, num_minibatches=4, std="group")
    prompts, rewards = rollouts[0][3].view(4, 4, -1), given[0][0]
    assert (prompts == prompts[:, :1]).all() and len(prompts[:, 0].unique(dim=0)) > 1
    pairs = torch.cat([torch.stack([mb.rewards, x], dim=1) for _, mb, x, *_ in losses]).tolist()
    expected = torch.stack([rewards, grpo.group_advantages(rewards, 4, "group")], dim=1).tolist()
    assert len(losses) == 2 * 4 and pairs[:16] not in (pairs[16:], expected)
    assert sorted(pairs[:16]) == sorted(pairs[16:]) == sorted(expected)
    assert {call[3] for call in losses} == {0.5}  # beta


def test_groups_without_spread_are_counted(judges, monkeypatch):
    _, updates = SCRIPT.learn(judges, num_updates=1)
    assert updates[0]["groups/spread"] > 0.1 and updates[0]["groups/without_spread"] == 0
    monkeypatch.setattr(grpo.RewardModel, "score", lambda self, q, r: torch.ones(len(q)))
    settings = {"missing_eos_score": 1.0, "kl_mode": "none", "num_updates": 1}
    assert SCRIPT.learn(judges, **settings)[1][0]["groups/without_spread"] == 1
