"""ppo_kl_penalty.py: the exact KL, the penalized objective, the paper's rule for beta.

What it shares with the other scripts is tested in test_shared_*.py.
"""

import dataclasses
import shutil

import pytest
import torch
from adapters import scripts
from torch.distributions import Independent, Normal, kl_divergence

import ppo_kl_penalty as ppo

pytestmark = [scripts("kl_penalty"), pytest.mark.usefixtures("script")]


@pytest.fixture
def longer(tiny):
    """Make Args for a run of 6 iterations of 32 steps, 12 minibatches of 8 in each."""
    size = {"num_envs": 4, "num_steps": 8, "total_timesteps": 6 * 32, "update_epochs": 3}
    size["learning_rate"] = 0.003
    return lambda **settings: tiny("Walk", **{**size, **settings})


def gaussian(mean, log_std):
    """The policy by an independent statement."""
    return Independent(Normal(mean, log_std.exp()), 1)


def test_the_penalty_in_the_loss_is_beta_times_the_kl_from_the_old_policy():
    """Its gradient too; without clipping of the ratio, which is far from 1 here."""
    torch.manual_seed(0)
    agent, obs = ppo.Agent(5, 3).double(), torch.randn(32, 5, dtype=torch.float64)
    old_mean = agent.policy(obs).detach() + 0.5 * torch.randn(32, 3)
    old_log_std = agent.log_std.detach().expand_as(old_mean) + 0.2
    old = gaussian(old_mean, old_log_std)
    actions, (values, advantages, returns) = old.sample(), torch.randn(3, 32, dtype=torch.float64)
    minibatch = [obs, actions, old.log_prob(actions), values, advantages, returns]
    minibatch = ppo.Batch(*minibatch, old_mean, old_log_std)
    args = ppo.Args(norm_adv=False, vf_coef=0.0, kl_coef=0.7)
    loss, metrics = ppo.ppo_loss(agent, minibatch, args)

    policy = gaussian(agent.policy(obs), agent.log_std)
    ratio, kl = (policy.log_prob(actions) - minibatch[2]).exp(), kl_divergence(old, policy).mean()
    assert ratio.min() < 0.8 and ratio.max() > 1.25
    expected = 0.7 * kl - (ratio * advantages).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["losses/kl"], kl.detach())
    learned = [*agent.policy.parameters(), agent.log_std]
    gradients = (torch.autograd.grad(x, learned) for x in (loss, expected))
    for found, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(found, gradient)


def test_beta_stays_finite_and_can_come_back():
    low = high = 1.0
    for _ in range(2000):
        low, high = ppo.paper_kl_coef(low, 0.0, 0.01), ppo.paper_kl_coef(high, 1.0, 0.01)
    assert (low, high) == (2.0**-20, 2.0**20)
    assert ppo.paper_kl_coef(low, 1.0, 0.01) == 2 * low
    assert ppo.paper_kl_coef(high, 0.0, 0.01) == high / 2


@pytest.mark.parametrize("penalty_kl", [1e-6, 0.002, pytest.param(10.0, marks=pytest.mark.slow)])
@torch.no_grad()
def test_beta_follows_the_kl_from_the_policy_that_acted_to_that_of_the_last_epoch(
    longer, recorded, penalty_kl
):
    """Weights after an iteration are those before the first step of the next one."""
    with torch.enable_grad():
        result = ppo.train(longer(kl_coef=2.0, penalty_kl=penalty_kl, learning_rate=0.01))
    updates, agent, expected = result["updates"], result["agent"], 2.0
    weights = [x.weights for x in recorded.steps[::12]]
    weights.append(torch.nn.utils.parameters_to_vector(agent.parameters()).clone())

    def policy(i, obs):
        torch.nn.utils.vector_to_parameters(weights[i], agent.parameters())
        return agent.policy(obs), agent.log_std.expand(len(obs), -1).clone()

    for i, update in enumerate(updates):
        steps, kl = recorded.steps[12 * i : 12 * i + 12], []
        assert {x.schedule["kl_coef"] for x in steps} == {expected} == {update["charts/kl_coef"]}
        for step in steps:
            for found, stored in zip(policy(i, step.obs), step.others, strict=True):
                torch.testing.assert_close(stored, found, rtol=0, atol=1e-6)
            old, new = gaussian(*step.others), gaussian(*policy(i + 1, step.obs))
            logprobs = old.log_prob(step.actions)
            torch.testing.assert_close(step.logprobs, logprobs, rtol=0, atol=1e-4)
            kl.append(kl_divergence(old, new))
        kl = torch.cat(kl).mean().item()
        assert update["check/kl_after"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        expected *= 0.5 if kl < penalty_kl / 1.5 else 2.0 if kl > 1.5 * penalty_kl else 1.0
    assert len({x["charts/kl_coef"] for x in updates}) > 2


def test_a_fixed_beta_stays_and_holds_the_policy_back(longer, recorded):
    free = ppo.train(longer(kl_mode="none"))["updates"]
    recorded.steps.clear()
    held = ppo.train(longer(kl_mode="fixed", kl_coef=10.0, penalty_kl=1e-6))["updates"]
    assert {x.schedule["kl_coef"] for x in recorded.steps} == {10.0}
    assert free[0]["charts/kl_coef"] == 0 and held[0]["charts/kl_coef"] == 10
    assert 1e-4 < held[0]["check/kl_after"] / 0.9 < free[0]["check/kl_after"]


def test_a_resumed_run_keeps_its_beta_unless_a_flag_gives_another_one(longer, recorded):
    settings = {"update_epochs": 1, "penalty_kl": 10.0, "anneal_lr": False}
    adapted = longer(total_timesteps=3 * 32, **settings, run_name="run")
    whole = ppo.train(dataclasses.replace(adapted, total_timesteps=6 * 32, run_name="whole"))
    ppo.train(adapted)
    recorded.steps.clear()
    for changes, first in (({}, 0.125), ({"kl_coef": 4.0}, 4.0), ({"kl_mode": "none"}, 0.0)):
        shutil.copytree("runs/run", "runs/copy")
        args = dataclasses.replace(adapted, total_timesteps=6 * 32, run_name=None, **changes)
        updates = ppo.train(args, resume="runs/copy")["updates"]
        assert [x["charts/kl_coef"] for x in updates[:4]] == [1.0, 0.5, 0.25, first]
        assert recorded.steps[0].schedule["kl_coef"] == first
        same = [x["losses/kl"] for x in updates] == [x["losses/kl"] for x in whole["updates"]]
        assert same == (not changes)
        shutil.rmtree("runs/copy")
        recorded.steps.clear()
