"""recipes/grpo_on_reviews.py: what its loss logs; details G1 and G8.

Its formulas are in test_vectors.py, the gradient of the whole objective in test_enumeration.py.
What it shares with the other scripts of its family is tested in test_shared_language.py.
"""

import math

import pytest
import torch
from adapters import SCRIPTS, scripts
from helpers import record, seeded

import ppo_rlhf_toy as ppo
from ppo_rlhf_toy import PAD

pytestmark = [scripts("grpo"), pytest.mark.usefixtures("script")]
SCRIPT = SCRIPTS["grpo"]
grpo = SCRIPT.module


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_12_g7_k2_and_debug_variables_by_hand_whatever_stands_at_padding(judges, ratio):
    agent, generator = judges.reference, seeded(0)
    prompts = judges.task.sample_prompts(8, generator)
    lengths = torch.randint(1, 11, (8, 1), generator=generator)
    advantages = torch.randn(8, generator=generator)
    mask = torch.arange(10) < lengths
    responses = torch.randint(2, 79, (8, 10), generator=generator).where(mask, PAD)
    policy = SCRIPT.logprobs(agent, prompts, responses).detach()
    new = ppo.log_probability(policy, responses)
    old, ref = (new + x * torch.randn(8, 10, generator=generator) for x in (0.9, 0.5))
    padded = responses.where(mask, 7), old.where(mask, 1e6), ref.where(mask, -1e6)
    mb = grpo.Rollout(prompts, *padded, torch.zeros(8), mask)

    def loss(kl_in_loss, advantages=advantages):
        args = grpo.Args(kl_in_loss=kl_in_loss, ratio=ratio, clip_high=0.4)
        return grpo.grpo_loss(agent, mb, advantages, 0.7, args)

    (plain, metrics), (with_k2, _) = loss("no"), loss("k2")
    k2 = ((ref - new)[mask] ** 2).sum() / 2
    torch.testing.assert_close(with_k2 - plain, 0.7 * k2 / (8 * 10), rtol=1e-4, atol=1e-5)
    logratio, to_ref = new - old, (ref - new)[mask]
    if ratio == "sequence":
        logratio = ((logratio * mask).sum(1, keepdim=True) / lengths).expand_as(mask)
    logratio, advantages = logratio[mask], advantages[:, None].expand_as(mask)[mask]
    limit = torch.where(advantages > 0, 0.4, 0.2)
    expected = {
        "losses/policy_loss": plain,
        "losses/k3": (to_ref.exp() - 1 - to_ref).mean(),
        "losses/entropy": torch.distributions.Categorical(logits=policy).entropy()[mask].mean(),
        "losses/approx_kl": ppo.approx_kl(logratio),
        "losses/clipfrac": ((logratio.exp() - 1).abs() > limit).float().mean(),
        "check/update": torch.corrcoef(torch.stack([logratio, advantages]))[0, 1],
    }
    assert metrics.keys() == expected.keys() and 0 < metrics["losses/clipfrac"] < 1
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert loss("no", torch.ones(8))[1]["check/update"] == 0  # not NaN


def test_g1_g8_6_each_pass_is_a_permutation_of_whole_groups_with_their_advantages(
    judges, monkeypatch
):
    names = ("collect", "group_advantages", "grpo_loss")
    rollouts, given, losses = (record(monkeypatch, grpo, name) for name in names)
    settings = {"num_updates": 1, "group_size": 4, "num_minibatches": 4, "std": "group"}
    _, (update,) = SCRIPT.learn(judges, **settings)
    prompts, rewards = rollouts[0][3].view(4, 4, -1), given[0][0]
    assert update["groups/spread"] == pytest.approx(rewards.view(4, 4).std(1).mean().item())
    assert (prompts == prompts[:, :1]).all() and len(prompts[:, 0].unique(dim=0)) > 1
    pairs = torch.cat([torch.stack([mb.rewards, x], dim=1) for _, mb, x, *_ in losses]).tolist()
    expected = torch.stack([rewards, grpo.group_advantages(rewards, 4, "group")], dim=1).tolist()
    assert len(losses) == 2 * 4 and pairs[:16] not in (pairs[16:], expected)
    assert sorted(pairs[:16]) == sorted(pairs[16:]) == sorted(expected)
    assert {call[3] for call in losses} == {0.5}  # beta


@pytest.mark.parametrize("reward", [0.1, -0.3, 1 / 3, 1e3 / 7, 12345.678])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 10, 13])
def test_groups_of_equal_rewards_have_no_advantage_whatever_rounding_leaves(size, reward):
    rewards = torch.full((3, size), reward)
    rewards[1, 0] += 1
    for std in ("group", "batch", "none"):
        found = grpo.group_advantages(rewards.flatten(), size, std).view(3, size)
        assert (found[[0, 2]] == 0).all() and (found[1] != 0).all()
    assert not grpo.earn_the_same(torch.full((1, size), math.nan))  # a mistake must not be hidden


def test_groups_without_spread_are_counted(judges, monkeypatch):
    _, updates = SCRIPT.learn(judges, num_updates=1)
    assert updates[0]["groups/spread"] > 0.1 and updates[0]["groups/without_spread"] == 0
    monkeypatch.setattr(ppo.RewardModel, "score", lambda self, q, r: torch.full((len(q),), 1e3 / 7))
    settings = {"missing_eos_score": 1e3 / 7, "kl_mode": "none", "num_updates": 1}
    for size in (2, 3, 7):
        more = {"group_size": size, "batch_size": 2 * size}
        (update,) = SCRIPT.learn(judges, **settings, **more)[1]
        assert update["groups/without_spread"] == 1, size
