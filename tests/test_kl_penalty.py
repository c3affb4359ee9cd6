"""The KL penalty: closed forms, the paper's rule for beta, and what else differs from clipping."""

import ast
import copy
import csv
import dataclasses
import difflib
import functools
import json
import math
import shutil
import statistics
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import same_weights
from fake_envs import Counter
from torch.distributions import Categorical, Independent, Normal, kl_divergence

import ppo_continuous_action as template
import ppo_kl_penalty as ppo

BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(4)


class Match(gym.Env):
    """One-step episodes; reward 1 for the action that the observation, -1 or 1, asks for."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = int(self.np_random.integers(2))
        return np.array([2 * self.wanted - 1], np.float32), {}

    def step(self, action):
        assert isinstance(action, np.int64) and self.action_space.contains(action)
        return np.zeros(1, np.float32), float(action == self.wanted), True, False, {}


class Choice(Counter):
    """The counter environment with an action space of the caller's choice."""

    def __init__(self, action_space):
        super().__init__()
        self.action_space = action_space


for name, entry in {
    "FakeMatch-v0": Match,
    "FakeMultiDiscrete-v0": functools.partial(Choice, gym.spaces.MultiDiscrete([2, 3])),
    "FakeShifted-v0": functools.partial(Choice, gym.spaces.Discrete(2, start=1)),
    "FakeOneAction-v0": functools.partial(Choice, gym.spaces.Discrete(1)),
}.items():
    if name not in gym.registry:
        gym.register(name, entry)


@pytest.fixture
def tiny(tmp_path):
    """Make Args for a run of a second that writes below tmp_path."""
    count = iter(range(1000))

    def make(script=ppo, **settings):
        defaults = {
            "env_id": "FakeTarget-v0",
            "total_timesteps": 6 * 32,
            "num_steps": 16,
            "num_envs": 2,
            "num_minibatches": 4,
            "update_epochs": 3,
            "learning_rate": 0.003,
            "output_dir": str(tmp_path),
            "run_name": f"run{next(count)}",
        }
        return script.Args(**{**defaults, **settings})

    return make


@pytest.fixture
def minibatches(monkeypatch):
    """Everything that `train` hands to the gradient, in the order of the calls."""
    seen, real = [], ppo.kl_penalty_gradient

    def kl_penalty_gradient(agent, minibatch, kl_coef, *settings):
        data = [x.clone() for x in minibatch]
        weights = copy.deepcopy(agent.state_dict())
        seen.append({"data": data, "kl_coef": kl_coef.item(), "weights": weights})
        return real(agent, minibatch, kl_coef, *settings)

    monkeypatch.setattr(ppo, "kl_penalty_gradient", kl_penalty_gradient)
    return seen


def make_agent(space, seed=0, obs_size=5, dtype=torch.float64):
    """An agent with weights large enough for a policy that differs between states."""
    torch.manual_seed(seed)
    agent = ppo.Agent(obs_size, space, ppo.Args()).to(dtype)
    for parameter in agent.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return agent


def distribution(space, parameters):
    """The policy with these parameters, by an independent statement."""
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(logits=parameters)
    size = parameters.shape[-1] // 2
    return Independent(Normal(parameters[..., :size], parameters[..., size:].exp()), 1)


def random_policies(space, rows=7):
    """Parameters (rows, P) of an old and of a new policy that differ clearly."""
    generator = torch.Generator().manual_seed(3)
    size = 4 if isinstance(space, gym.spaces.Discrete) else 6
    return torch.randn(2, rows, size, dtype=torch.float64, generator=generator).mul(0.7).unbind()


both_spaces = pytest.mark.parametrize("space", [BOX, DISCRETE], ids=["box", "discrete"])

# --- K2: the exact KL ---


@both_spaces
def test_kl_equals_torch_distributions_old_to_new(space):
    old, new = random_policies(space)
    kl = make_agent(space).kl(old, new)
    expected = kl_divergence(distribution(space, old), distribution(space, new))
    assert kl.shape == (7,)
    torch.testing.assert_close(kl, expected, rtol=1e-10, atol=1e-12)
    reverse = kl_divergence(distribution(space, new), distribution(space, old))
    assert (kl - reverse).abs().max() > 0.05  # the two directions can be told apart here


@both_spaces
def test_kl_equals_a_monte_carlo_estimate_under_the_old_policy(space):
    old, new = random_policies(space, rows=3)
    torch.manual_seed(0)
    samples = distribution(space, old).sample((200_000,))
    k1 = distribution(space, old).log_prob(samples) - distribution(space, new).log_prob(samples)
    standard_error = k1.std(0) / math.sqrt(len(k1))
    agent = make_agent(space)
    assert ((k1.mean(0) - agent.kl(old, new)).abs() < 4 * standard_error).all()
    assert ((k1.mean(0) - agent.kl(new, old)).abs() > 10 * standard_error).any()


def test_gaussian_kl_by_hand_sums_over_components():
    zero, two = torch.zeros(1), torch.full((1,), math.log(2.0))
    assert ppo.gaussian_kl(zero, zero, zero + 1, zero).item() == pytest.approx(0.5)
    wider = ppo.gaussian_kl(zero, zero, zero, two).item()
    assert wider == pytest.approx(math.log(2) + 1 / 8 - 1 / 2)
    narrower = ppo.gaussian_kl(zero, two, zero, zero).item()
    assert narrower == pytest.approx(-math.log(2) + 4 / 2 - 1 / 2)
    both = ppo.gaussian_kl(*(torch.cat(x) for x in [(zero, zero)] * 2 + [(zero + 1, zero)] * 1),
                           torch.cat([zero, two]))  # fmt: skip
    assert both.item() == pytest.approx(0.5 + wider)


def test_categorical_kl_by_hand_and_for_impossible_actions_of_the_old_policy():
    old, new = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    kl = ppo.categorical_kl(old, new).item()
    assert kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    # Logits are defined up to a constant.
    torch.testing.assert_close(ppo.categorical_kl(old + 7, new - 2).item(), kl)
    certain = torch.tensor([0.0, -200.0])
    assert ppo.categorical_kl(certain, new).item() == pytest.approx(math.log(4))


@both_spaces
def test_gradient_of_the_penalty_vanishes_at_the_old_policy_and_nowhere_else(space):
    agent = make_agent(space)
    obs = torch.randn(64, 5, dtype=torch.float64)
    old = agent.get_action_and_value(obs)[4].detach()

    def largest_gradient():
        kl = agent.kl(old, agent.get_action_and_value(obs)[4]).mean()
        gradients = torch.autograd.grad(kl, list(agent.parameters()), allow_unused=True)
        return kl.item(), max(x.abs().max().item() for x in gradients if x is not None)

    kl, gradient = largest_gradient()
    assert abs(kl) < 1e-12 and gradient < 1e-12
    with torch.no_grad():
        agent.policy_head.bias[0] += 0.1
    kl, gradient = largest_gradient()
    assert kl > 1e-4 and gradient > 1e-3


# --- K1: the objective ---


def test_penalized_policy_loss_by_hand():
    logratio = torch.tensor([math.log(2.0), math.log(0.5)])
    advantages, kl = torch.tensor([1.0, -3.0]), torch.tensor([0.1, 0.3])
    # E[r A] = (2 - 1.5) / 2 = 0.25 and E[KL] = 0.2.
    assert ppo.penalized_policy_loss(logratio, advantages, kl, 0.0).item() == pytest.approx(-0.25)
    assert ppo.penalized_policy_loss(logratio, advantages, kl, 3.0).item() == pytest.approx(0.35)


def minibatch_of(agent, space, rows=32, stray=0.5):
    """A minibatch whose old policy differs from the agent's."""
    obs = torch.randn(rows, 5, dtype=torch.float64)
    with torch.no_grad():
        new = agent.get_action_and_value(obs)[4]
        old = new + stray * torch.randn_like(new)
        actions = distribution(space, old).sample()
        logprobs = distribution(space, old).log_prob(actions)
        values, advantages, returns = torch.randn(3, rows, dtype=torch.float64)
    return obs, actions, logprobs, values, advantages, returns, old


@both_spaces
@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_loss_is_surrogate_minus_penalty_minus_entropy_plus_value_error(space, kl_coef):
    agent = make_agent(space)
    minibatch = minibatch_of(agent, space)
    obs, actions, logprobs, _, advantages, returns, old = minibatch
    loss, metrics = ppo.kl_penalty_loss(agent, minibatch, kl_coef, None, False, 0.01, 0.5)
    new = agent.get_action_and_value(obs)[4]
    policy = distribution(space, new)
    ratio = (policy.log_prob(actions) - logprobs).exp()
    assert ratio.min() < 0.8 and ratio.max() > 1.25  # where clipping would have shown
    kl = kl_divergence(distribution(space, old), policy).mean()
    objective = (ratio * advantages).mean() - kl_coef * kl + 0.01 * policy.entropy().mean()
    expected = -objective + 0.5 * ((agent.get_value(obs) - returns) ** 2).mean() / 2
    torch.testing.assert_close(loss, expected)
    named = dict(zip(ppo.LOSS_METRICS, metrics.tolist(), strict=True))
    assert named["losses/kl"] == pytest.approx(kl.item())
    assert named["losses/old_approx_kl"] == pytest.approx(-ratio.log().mean().item())
    assert named["losses/approx_kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    outside = ((ratio - 1).abs() > 0.2).double().mean().item()
    assert named["losses/clipfrac"] == pytest.approx(outside) and outside > 0.1


def test_loss_normalizes_advantages_and_clips_values():
    agent = make_agent(BOX)
    minibatch = minibatch_of(agent, BOX)
    obs, _, _, values, advantages, returns, _ = minibatch
    spread = (advantages - advantages.mean()) / advantages.std(correction=0)
    ready = (*minibatch[:4], spread, *minibatch[5:])
    normalized = ppo.kl_penalty_loss(agent, minibatch, 1.0, None, True, 0.0, 0.0)[0]
    torch.testing.assert_close(
        normalized, ppo.kl_penalty_loss(agent, ready, 1.0, None, False, 0.0, 0.0)[0]
    )
    clipped = ppo.kl_penalty_loss(agent, minibatch, 1.0, 0.1, True, 0.0, 1.0)[0] - normalized
    expected = ppo.value_loss(agent.get_value(obs), values, returns, 0.1)
    assert expected > ppo.value_loss(agent.get_value(obs), values, returns, None)
    torch.testing.assert_close(clipped, expected)


def test_mode_none_trains_like_the_template_with_a_clip_range_that_never_binds(tiny):
    none = ppo.train(tiny(kl_mode="none", value_clip_coef=None))
    clip = template.train(tiny(template, clip_coef=1e9, clip_vloss=False))
    for ours, theirs in zip(none["episodes"], clip["episodes"], strict=True):
        assert ours["return"] == pytest.approx(theirs["return"], abs=1e-4)
    theirs = [x for _, x in sorted(clip["agent"].state_dict().items())]
    ours = none["agent"].state_dict()
    ours = {name.replace("policy_head", "action_mean"): x for name, x in ours.items()}
    for x, y in zip([x for _, x in sorted(ours.items())], theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert {x["charts/kl_coef"] for x in none["updates"]} == {0.0}
    assert none["updates"][-1]["kl/after"] > 1e-4  # what is not penalized is still measured
    penalized = ppo.train(tiny(kl_mode="fixed", kl_coef=10.0, value_clip_coef=None))
    assert not same_weights(none["agent"], penalized["agent"])


@both_spaces
def test_a_fixed_penalty_keeps_the_policy_nearer(tiny, space):
    env_id = "FakeMatch-v0" if space is DISCRETE else "FakeTarget-v0"
    kls = []
    for settings in ({"kl_mode": "none"}, {"kl_mode": "fixed", "kl_coef": 30.0}):
        updates = ppo.train(tiny(env_id=env_id, **settings))["updates"]
        kls.append(statistics.mean(x["kl/after"] for x in updates))
    assert kls[1] < kls[0] / 3


# --- K3: the coefficient ---


@pytest.mark.parametrize(
    "kl, expected",
    [
        (0.0, 2.0),
        (math.nextafter(0.5, 0), 2.0),
        (0.5, 4.0),  # exactly d_targ / 1.5
        (0.75, 4.0),
        (1.125, 4.0),  # exactly 1.5 d_targ
        (math.nextafter(1.125, 2), 8.0),
        (1e6, 8.0),
    ],
)
def test_paper_kl_coef_halves_below_and_doubles_above_the_band(kl, expected):
    assert ppo.paper_kl_coef(4.0, kl, target_kl=0.75) == expected


def test_paper_kl_coef_stays_finite_and_comes_back():
    high = low = 1.0
    for _ in range(2000):
        high, low = ppo.paper_kl_coef(high, 1.0, 0.01), ppo.paper_kl_coef(low, 0.0, 0.01)
    assert (low, high) == (2.0**-20, 2.0**20) == (ppo.KL_COEF_MIN, ppo.KL_COEF_MAX)
    assert ppo.paper_kl_coef(high, 0.0, 0.01) == high / 2
    assert ppo.paper_kl_coef(low, 1.0, 0.01) == low * 2
    assert torch.tensor(low).item() == low and torch.tensor(high).item() == high  # in float32 too


def test_beta_changes_once_per_iteration_by_the_kl_of_the_whole_iteration(tiny, minibatches):
    args = tiny(target_kl=0.02, kl_coef=0.5)
    updates = ppo.train(args)["updates"]
    per_iteration = args.update_epochs * args.num_minibatches
    used = np.array([x["kl_coef"] for x in minibatches]).reshape(-1, per_iteration)
    assert (used == used[:, :1]).all()
    expected = [0.5]
    for update in updates[:-1]:
        expected.append(ppo.paper_kl_coef(expected[-1], update["kl/after"], 0.02))
    assert used[:, 0].tolist() == expected == [x["charts/kl_coef"] for x in updates]
    assert len(set(expected)) > 1


def test_fixed_beta_stays(tiny, minibatches):
    ppo.train(tiny(kl_mode="fixed", kl_coef=3.0, target_kl=1e-6))
    assert {x["kl_coef"] for x in minibatches} == {3.0}


@both_spaces
def test_kl_is_measured_after_the_last_epoch_over_the_whole_batch(tiny, minibatches, space):
    env_id = "FakeMatch-v0" if space is DISCRETE else "FakeTarget-v0"
    result = ppo.train(tiny(env_id=env_id, total_timesteps=32))
    epoch = minibatches[-4:]
    obs, actions, logprobs, _, _, _, old = (
        torch.cat(x) for x in zip(*(minibatch["data"] for minibatch in epoch))
    )
    with torch.no_grad():
        _, new_logprobs, _, _, new = result["agent"].get_action_and_value(obs, actions)
    (update,) = result["updates"]
    exact = kl_divergence(distribution(space, old), distribution(space, new)).mean().item()
    logratio = new_logprobs - logprobs
    assert len(obs) == 32 and exact > 1e-4
    assert update["kl/after"] == pytest.approx(exact, rel=1e-3)
    assert update["kl/after_k1"] == pytest.approx(-logratio.mean().item(), rel=1e-3, abs=1e-6)
    k3 = (logratio.exp() - 1 - logratio).mean().item()
    assert update["kl/after_k3"] == pytest.approx(k3, rel=1e-3)
    assert update["kl/ratio_min"] == pytest.approx(logratio.min().exp().item(), rel=1e-4)
    assert update["kl/ratio_max"] == pytest.approx(logratio.max().exp().item(), rel=1e-4)
    assert update["kl/ratio_min"] < 1 < update["kl/ratio_max"]


# --- The old policy ---


@both_spaces
def test_the_old_policy_is_the_one_that_acted_in_every_epoch(tiny, minibatches, space):
    env_id = "FakeMatch-v0" if space is DISCRETE else "FakeTarget-v0"
    args = tiny(env_id=env_id, total_timesteps=64)
    result = ppo.train(args)
    agent, per_iteration = copy.deepcopy(result["agent"]), 12
    for start in (0, per_iteration):
        agent.load_state_dict(minibatches[start]["weights"])
        for minibatch in minibatches[start : start + per_iteration]:
            obs, actions, logprobs, *_, old = minibatch["data"]
            with torch.no_grad():
                acted = agent.get_action_and_value(obs)[4]
            torch.testing.assert_close(old, acted, rtol=0, atol=1e-5)
            log_prob = distribution(space, old).log_prob(actions)
            torch.testing.assert_close(logprobs, log_prob, rtol=0, atol=1e-4)
    agent.load_state_dict(minibatches[-1]["weights"])
    with torch.no_grad():
        assert not torch.allclose(agent.get_action_and_value(obs)[4], old, rtol=0, atol=1e-4)
    assert all(abs(x["kl/before"]) < 1e-6 for x in result["updates"])


@both_spaces
def test_without_learning_ratio_is_1_and_kl_0(tiny, space):
    env_id = "FakeMatch-v0" if space is DISCRETE else "FakeTarget-v0"
    for update in ppo.train(tiny(env_id=env_id, learning_rate=0.0))["updates"]:
        assert update["kl/ratio_min"] > 1 - 1e-5 and update["kl/ratio_max"] < 1 + 1e-5
        assert abs(update["kl/after"]) < 1e-6 and abs(update["losses/kl"]) < 1e-6
        assert update["losses/clipfrac"] == 0


# --- Acting ---


def test_gumbel_noise_samples_the_categorical_policy():
    agent = make_agent(DISCRETE)
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)) + 5
    noise = agent.draw_noise(np.random.default_rng(0), (20_000, 2))
    assert noise.shape == (20_000, 2, 4) and noise.dtype == np.float32
    actions = np.stack([agent.choose_action(logits + x) for x in noise])
    assert actions.shape == (20_000, 2) and actions.dtype == np.int64
    for column in actions.T:
        shares = np.bincount(column, minlength=4) / len(column)
        np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=0.015)
    together = np.mean((actions[:, 0] == 3) & (actions[:, 1] == 3))
    assert together == pytest.approx(0.16, abs=0.015)  # each environment draws for itself
    assert agent.choose_action(logits).tolist() == [3]


def test_gaussian_noise_has_the_policys_std():
    agent = make_agent(BOX)
    with torch.no_grad():
        agent.log_std[:] = torch.tensor([0.0, 1.0, -2.0])
    noise = agent.draw_noise(np.random.default_rng(0), (10_000, 2))
    np.testing.assert_allclose(noise.std(axis=(0, 1)), np.exp([0.0, 1.0, -2.0]), rtol=0.03)
    np.testing.assert_allclose(noise.mean(axis=(0, 1)), 0, atol=0.06)
    assert np.array_equal(agent.choose_action(noise[0]), noise[0])


@both_spaces
def test_agent_shapes_and_log_probabilities(space):
    agent = make_agent(space, dtype=torch.float32)
    obs = torch.randn(6, 2, 5)
    action, logprob, entropy, value, parameters = agent.get_action_and_value(obs)
    assert action.shape == (6, 2, *agent.action_shape) and action.dtype == agent.action_dtype
    assert logprob.shape == entropy.shape == value.shape == (6, 2)
    assert parameters.shape == (6, 2, agent.policy_size)
    policy = distribution(space, parameters)
    torch.testing.assert_close(logprob, policy.log_prob(action))
    torch.testing.assert_close(entropy, policy.entropy())
    torch.testing.assert_close(value, agent.get_value(obs))


def test_spread_is_the_share_of_the_largest_entropy_or_the_mean_log_std():
    assert make_agent(DISCRETE).spread(math.log(4) / 2) == {"policy/entropy_share": 0.5}
    agent = make_agent(BOX)
    expected = agent.log_std.mean().item()
    assert agent.spread(9.0) == {"policy/log_std": expected} and expected != 0


def test_learns_a_discrete_task_and_says_how_much_entropy_is_left(tiny):
    settings = {"num_steps": 64, "total_timesteps": 64 * 2 * 12, "anneal_lr": False}
    result = ppo.train(tiny(env_id="FakeMatch-v0", target_kl=0.05, **settings))
    returns = [x["return"] for x in result["episodes"]]
    assert 0.3 < np.mean(returns[:64]) < 0.7 and np.mean(returns[-64:]) > 0.85
    shares = [x["policy/entropy_share"] for x in result["updates"]]
    assert 1 > shares[0] > 0.8 > shares[-1] > 0


@pytest.mark.parametrize("env_id", ["FakeMatch-v0", "FakeTarget-v0"])
def test_a_saved_model_is_evaluated_with_best_and_sampled_actions(tiny, env_id):
    settings = {"num_steps": 64, "total_timesteps": 64 * 2 * 3, "anneal_lr": False}
    args = tiny(env_id=env_id, target_kl=0.05, **settings)
    ppo.train(args)
    results = ppo.evaluate(
        dataclasses.replace(args, evaluate=str(args.run_dir), eval_episodes=60, run_name=None)
    )
    assert {name: len(x) for name, x in results.items()} == {"mean": 60, "sampled": 60}
    assert np.mean(results["mean"]) > np.mean(results["sampled"])


# --- Checkpoints ---


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_beta_and_old_policies_survive_a_resume_bitwise(tiny, minibatches, tmp_path, env_id):
    args = tiny(env_id=env_id, checkpoint_interval=3, kl_coef=0.3, target_kl=0.001)
    whole = ppo.train(args)
    first_run = list(minibatches)
    minibatches.clear()
    # The checkpoint of iteration 3 lies beside that of iteration 6.
    folder = tmp_path / "resumed"
    shutil.copytree(args.run_dir, folder)
    path = folder / "checkpoint.previous.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["iteration"] == 3
    assert saved["kl_coef"] == whole["updates"][3]["charts/kl_coef"] != 0.3
    resumed = ppo.train(dataclasses.replace(args, resume=str(path)))
    assert same_weights(whole["agent"], resumed["agent"])
    assert len(minibatches) == len(first_run) / 2
    for x, y in zip(first_run[len(minibatches) :], minibatches, strict=True):
        assert x["kl_coef"] == y["kl_coef"]
        assert all(torch.equal(a, b) for a, b in zip(x["data"], y["data"], strict=True))
    for x, y in zip(whole["updates"], resumed["updates"], strict=True):
        assert {k: v for k, v in x.items() if "SPS" not in k} == {
            k: v for k, v in y.items() if "SPS" not in k
        }


# --- Settings, table of details, warnings ---


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_coef": 0.0},
        {"kl_coef": -1.0},
        {"kl_coef": math.inf},
        {"kl_coef": math.nan},
        {"target_kl": 0.0},
        {"value_clip_coef": -0.1},
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(tiny, settings):
    (name,) = settings
    with pytest.raises(ppo.RunError, match=rf"^--{name.replace('_', '-')} must .*\.$"):
        tiny(**settings)


@pytest.mark.parametrize("name", ["MultiDiscrete", "Shifted", "OneAction"])
def test_other_action_spaces_are_refused_with_a_sentence(tiny, name):
    with pytest.raises(ppo.RunError, match="this script needs a Box of floats or a Discrete"):
        ppo.make_envs(tiny(env_id=f"Fake{name}-v0"))


def test_the_command_line_answers_in_one_sentence_with_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo_kl_penalty.py", "--kl-coef", "0"])
    with pytest.raises(SystemExit) as stop:
        ppo.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: --kl-coef must lie between") and error.count("\n") == 1


def test_each_detail_stands_once_and_the_penalty_has_its_own():
    rows = ppo.detail_table(ppo.Args(kl_coef=0.5, target_kl=0.02), Path(ppo.__file__).read_text())
    details = {number: (title, value) for number, title, value, _ in rows}
    numbers = [row[0] for row in rows if row[0] not in ("Extra", "Deviation")]
    expected = [f"{i}/37" for i in range(1, 38)] + [f"K{i}/3" for i in range(1, 4)]
    assert sorted(numbers) == sorted(expected)
    assert details["8/37"] == (
        "clipped surrogate objective",
        "not here: the KL penalty takes its place, see K1",
    )
    assert details["K1/3"] == ("KL-penalized objective", "kl_coef=0.5")
    assert details["K2/3"] == ("exact KL divergence", "on")
    assert details["K3/3"] == ("adaptive penalty coefficient", "kl_mode=adaptive")
    source = Path(template.__file__).read_text()
    titles = {row[0]: row[1] for row in template.detail_table(template.Args(), source)}
    assert all(details[f"{i}/37"][0] == titles[f"{i}/37"] for i in range(1, 38))


def test_warnings_at_the_bounds_of_beta():
    def causes(kl_coef, rate=1.0):
        updates = [
            {"charts/learning_rate": x, "charts/kl_coef": y, "kl/after": 0.02}
            for x, y in ((1.0, 1.0), (rate, kl_coef))
        ]
        return ppo.kl_coef_warnings(updates)

    assert "lower --learning-rate" in causes(2.0**20)["kl_coef high"]
    assert "raise --learning-rate" in causes(2.0**-20)["kl_coef low"]
    assert causes(2.0**-20, rate=0.1) == {}  # small steps are meant then
    assert causes(2.0**20, rate=0.1).keys() == {"kl_coef high"}
    for harmless in (0.0, 2.0**-19, 1.0, 2.0**19):
        assert causes(harmless) == {}


def test_a_run_with_a_runaway_beta_warns_once(tiny, capsys):
    ppo.train(tiny(kl_coef=2.0**19, target_kl=1e-9))
    assert capsys.readouterr().out.count("no penalty keeps the policy near") == 1


def test_an_infinite_kl_ends_the_run_with_a_sentence(tiny, monkeypatch):
    def kl(self, old, new, real=ppo.Agent.kl):
        # Finite in the losses, infinite when measured after the update.
        return real(self, old, new) + (0.0 if torch.is_grad_enabled() else math.inf)

    monkeypatch.setattr(ppo.Agent, "kl", kl)
    with pytest.raises(ppo.RunError, match="The KL is NaN or infinite at step 32"):
        ppo.train(tiny())


def test_the_log_holds_the_penalty_and_all_of_the_templates_metrics(tiny):
    args = tiny(total_timesteps=32)
    (update,) = ppo.train(args)["updates"]
    (theirs,) = template.train(tiny(template, total_timesteps=32))["updates"]
    added = "charts/kl_coef losses/kl kl/before kl/after kl/after_k1 kl/after_k3 kl/ratio_min"
    assert update.keys() - theirs.keys() == {*added.split(), "kl/ratio_max"}
    assert theirs.keys() - update.keys() == {"charts/clip_coef"}
    with (args.run_dir / "updates.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert {name: json.loads(x) for name, x in row.items()} == update


# --- The difference to the template ---

REPLACED = {"policy_loss", "ppo_loss", "loss_gradient"}
ADDED = {
    "penalized_policy_loss", "gaussian_kl", "categorical_kl", "paper_kl_coef", "kl_penalty_loss",
    "kl_penalty_gradient", "kl_coef_warnings",
}  # fmt: skip
CHANGED = {"Args", "Agent", "make_env", "train", "evaluate", "play"}
CONSTANTS = {"LOSS_METRICS", "KL", "KL_COEF_MIN, KL_COEF_MAX", "RATIO_RANGE"}


def statements(module):
    """Name or text of each top-level statement -> its source, in order."""
    source = Path(module.__file__).read_text()
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        first = min([node.lineno] + [x.lineno for x in getattr(node, "decorator_list", [])])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        name = getattr(node, "name", None) or text.split(" = ")[0]
        found[name] = found.get(name, "") + text
    return found


def test_the_difference_to_the_template_is_confined():
    theirs, ours = statements(template), statements(ppo)
    docstring = {x for x in {*theirs, *ours} if x.startswith('"""')}
    imports = {x for x in {*theirs, *ours} if x.startswith("from torch.distributions import")}
    ignored = docstring | imports
    assert theirs.keys() - ours.keys() - ignored == REPLACED | {"KL"}
    assert ours.keys() - theirs.keys() - ignored == ADDED | (CONSTANTS - {"LOSS_METRICS", "KL"})
    both = [name for name in ours if name in theirs and name not in ignored]
    assert {name for name in both if ours[name] != theirs[name]} == CHANGED | {"LOSS_METRICS"}
    assert both == [name for name in theirs if name in ours and name not in ignored]


def test_the_same_setting_has_the_same_default_and_text():
    def fields(module):
        (node,) = [
            x
            for x in ast.parse(Path(module.__file__).read_text()).body
            if isinstance(x, ast.ClassDef) and x.name == "Args"
        ]
        pairs = zip(node.body, node.body[1:])
        return {x.target.id: (ast.unparse(x), y.value.value) for x, y in pairs
                if isinstance(x, ast.AnnAssign)}  # fmt: skip

    theirs, ours = fields(template), fields(ppo)
    assert theirs.keys() - ours.keys() == {"clip_coef", "anneal_clip", "clip_vloss"}
    assert ours.keys() - theirs.keys() == {"kl_mode", "kl_coef", "value_clip_coef"}
    # target_kl stops epochs there and steers beta here.
    differing = {name for name in ours if name in theirs and ours[name] != theirs[name]}
    assert differing == {"target_kl"}


def test_the_training_loop_changes_only_lines_about_the_policy_and_its_objective():
    about = "clip_coef anneal_clip clip_vloss target_kl break loss_gradient check_finite logprobs "
    about += "action_size action_mean log_std noise low, example"
    theirs, ours = (
        [x.strip() for x in statements(module)["train"].splitlines() if x.strip()]
        for module in (template, ppo)
    )
    changes = difflib.unified_diff(theirs, ours, n=0, lineterm="")
    gone = [x[1:] for x in changes if x.startswith("-") and not x.startswith(("---", "-#"))]
    assert [x for x in gone if not any(word in x for word in about.split(" "))] == []


# --- Slow: the compiler, CartPole, and the target of the adaptive penalty ---


@pytest.mark.slow
@both_spaces
def test_the_compiled_gradient_equals_the_eager_one(space):
    agent = make_agent(space, dtype=torch.float32)
    minibatch = tuple(
        x.float() if x.is_floating_point() else x
        for x in minibatch_of(make_agent(space), space, rows=64)
    )
    arguments = (agent, minibatch, torch.tensor(0.7), 0.2, True, 0.01, 0.5)
    args = ppo.Args(total_timesteps=2048 * 100)
    fast = ppo.compiled(ppo.kl_penalty_gradient, args, arguments)
    assert fast is not ppo.kl_penalty_gradient
    for x, y in zip(fast(*arguments), ppo.kl_penalty_gradient(*arguments), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_cartpole_is_learned(tmp_path):
    args = ppo.Args(env_id="CartPole-v1", total_timesteps=50_000, output_dir=str(tmp_path))
    result = ppo.train(args)
    assert np.mean([x["return"] for x in result["episodes"][-20:]]) > 200


@pytest.mark.slow
@pytest.mark.parametrize("target_kl", [0.003, 0.01, 0.03])
def test_adaptive_penalty_holds_the_kl_near_its_target(tmp_path, target_kl):
    # With annealing, steps too small to reach the target fill much of so short a run's second half.
    settings = {"env_id": "Hopper-v4", "total_timesteps": 50 * 2048, "anneal_lr": False}
    args = ppo.Args(**settings, target_kl=target_kl, output_dir=str(tmp_path))
    updates = ppo.train(args)["updates"]
    median = statistics.median(x["kl/after"] for x in updates[len(updates) // 2 :])
    assert target_kl / 1.5 <= median <= target_kl * 1.5
