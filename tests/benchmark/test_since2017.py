"""Changes of PPO that were proposed since 2017: each trains, and its mathematics is right."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
import tyro
from torch.distributions import Beta, Normal

import ppo_continuous_action
from benchmark.paper.suites.since2017 import CHANGES, VARIANTS

LINES = 15
SHORT = "--env-id Hopper-v4 --num-steps 64 --num-minibatches 4 --update-epochs 2 --no-compile"


@pytest.fixture
def load(changed_copy):
    """The changed script as a module; runs go to a temporary folder."""
    return lambda name: changed_copy(VARIANTS[name].script, VARIANTS[name].replaced, name)


def run(module, flags="", iterations=2, name="run", **more):
    words = f"{SHORT} {flags} --total-timesteps {64 * iterations} --run-name {name}"
    return module.train(tyro.cli(module.Args, args=words.split()), **more)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_short_and_trains(name, load):
    # Lines that differ, counting what takes the place of others.
    assert sum(len(new.strip("\n").splitlines()) for _, new in VARIANTS[name].replaced) <= LINES
    flags = VARIANTS[name].flags
    for size in ("--num-envs 8 --num-steps 256", "--num-envs 16 --num-steps 512"):
        flags = flags.replace(size, "--num-envs 2 --num-steps 32")
    updates = run(load(name), flags.replace("minibatches 16", "minibatches 4"))["updates"]
    assert len(updates) == 2
    for metrics in updates:
        assert abs(metrics["check/acting"]) < 1e-5  # what acts is what learns
        assert abs(metrics["check/first_kl"]) < 1e-5
        assert metrics["losses/approx_kl"] > 1e-6  # the policy has moved


def agent_of(module, obs_size=4, action_size=3):
    torch.manual_seed(1)
    agent = module.Agent(obs_size, action_size)
    for weights in agent.policy.parameters():  # so that the policy depends on the state
        weights.data += 0.3 * torch.randn_like(weights)
    return agent


def test_other_distributions_are_torchs(load):
    rng = np.random.default_rng(1)
    obs, noise = (rng.standard_normal((5000, size), dtype=np.float32) for size in (4, 3))
    for name in ("beta", "state-std"):
        module = load(name)
        agent = agent_of(module)
        act = module.actor(agent)
        actions = torch.tensor(act(obs, noise), dtype=torch.float32)
        with torch.no_grad():
            first, second = agent.policy(torch.tensor(obs)).chunk(2, -1)
            logprobs, entropies, _ = agent.evaluate_actions(torch.tensor(obs), actions)
        if name == "beta":
            dist = Beta(1 + F.softplus(first), 1 + F.softplus(second))
            quantiles = scipy.stats.beta.cdf(actions, dist.concentration1, dist.concentration0)
        else:
            dist = Normal(first, second.exp())
            quantiles = dist.cdf(actions)
        torch.testing.assert_close(logprobs, dist.log_prob(actions).sum(-1))
        torch.testing.assert_close(entropies, dist.entropy().sum(-1))
        assert scipy.stats.kstest(np.ravel(quantiles), "uniform").pvalue > 0.01


def losses_and_slopes(module, ratios, advantages):
    """The loss of each sample, and its slope over the ratio."""
    ratios = torch.tensor(ratios, requires_grad=True)
    samples = zip(ratios.log(), torch.tensor(advantages))
    losses = torch.stack([module.policy_loss(*x, 0.2) for x in samples])
    (slopes,) = torch.autograd.grad(losses.sum(), ratios)
    return losses.detach(), slopes


def test_spo_has_its_gradient(load):
    ratio, advantage = np.array([*itertools.product([0.5, 0.9, 1.0, 1.2, 1.5], [-2.0, 1.0])]).T
    losses, slopes = losses_and_slopes(load("spo"), ratio, advantage)
    expected = abs(advantage) / 0.4 * (ratio - 1) ** 2 - ratio * advantage
    np.testing.assert_allclose(losses, expected, atol=1e-12)
    np.testing.assert_allclose(slopes, abs(advantage) / 0.2 * (ratio - 1) - advantage, atol=1e-12)


def test_rollback_pushes_back_beyond_the_range(load):
    ratios, advantages = [1.0, 1.5, 0.5, 1.0, 0.5, 1.5], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    _, slopes = losses_and_slopes(load("rollback"), ratios, advantages)
    # Back where it went too far up, and where it went too far down.
    assert slopes.tolist() == pytest.approx([-1.0, 0.3, -1.0, 1.0, -0.3, 1.0], abs=1e-5)


@pytest.mark.parametrize(("name", "exponent"), [("noise-0.5", 0.5), ("noise-1", 1.0)])
def test_noise_has_its_color_and_variance_1(name, exponent):
    ((_, code),) = VARIANTS[name].replaced
    known = {"np": np, "rng": np.random.default_rng(1), "actions": np.zeros((2048, 1, 300))}
    known["args"] = type("Args", (), {"num_steps": 2048})
    exec("\n".join(line.strip() for line in code.splitlines()), known)
    noise = known["noise"]
    assert noise.dtype == np.float32 and noise.shape == (2048, 1, 300)
    assert noise.std() == pytest.approx(1, abs=0.05)
    power = (np.abs(np.fft.rfft(noise[:, 0], axis=0)) ** 2).mean(1)[1:]
    slope = np.polyfit(np.log(np.arange(1, len(power) + 1)), np.log(power), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.05)


def test_separate_epochs_move_one_network_each(load):
    module, moved = load("separate"), []

    def update(agent, adam, batch, indices, args):
        before = {name: x.clone() for name, x in agent.named_parameters()}
        metrics = module.ppo_update(agent, adam, batch, indices, args)
        changes = {x for x, y in agent.named_parameters() if not torch.equal(y, before[x])}
        moved.append((args.value_epochs.item(), changes))
        return metrics

    names = dict(run(module, iterations=1, update=update)["agent"].named_parameters())
    of_values = {name for name in names if name.startswith("value")}
    assert moved[: len(moved) // 2] == [(False, set(names) - of_values)] * 2
    assert moved[len(moved) // 2 :] == [(True, of_values)] * 2


def test_advantages_anew_are_the_same_in_the_first_epoch_only(load):
    anew = load("anew")
    for epochs in (1, 2):
        flags, found = f"--update-epochs {epochs}", []
        for module in (ppo_continuous_action, anew):
            agent = run(module, flags, 1, name=f"{module.__name__}{epochs}")["agent"]
            found.append(torch.nn.utils.parameters_to_vector(agent.parameters()).detach())
        assert torch.allclose(*found, atol=1e-6) == (epochs == 1)
