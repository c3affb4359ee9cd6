"""The pure functions against closed forms, tables and sums that a person can check."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppo_continuous_action as ppo


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        *((3e-4, 0.0049, 4.5e-4), (3e-4, 0.0051, 3e-4), (3e-4, 0.0199, 3e-4)),
        *((3e-4, 0.0201, 2e-4), (9e-3, 0.001, 1e-2), (1.2e-5, 0.1, 1e-5)),
    ],
)
def test_learning_rate_changes_by_half_where_the_kl_is_twice_or_half_of_what_is_desired(
    rate, kl, expected
):
    assert ppo.adapt_learning_rate(rate, kl, 0.01) == pytest.approx(expected)


# --- Generalized advantage estimation ---


def random_rollout(steps=40, envs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(
        3, steps, envs, dtype=torch.float64, generator=generator
    )
    done = (torch.rand(steps, envs, generator=generator) < 0.2).double()
    terminated = done * (torch.rand(steps, envs, generator=generator) < 0.5)
    # Within an episode the next value is the value of the next step.
    inside = (1 - done[:-1]).bool()
    next_values[:-1][inside] = values[1:][inside]
    return rewards, values, next_values, terminated, done


def double_sum(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """A_t = sum_k (gamma lambda)^k delta_{t+k} up to the end of the episode, term by term."""
    advantages = torch.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                future = 0.0 if terminated[k, n] else gamma * next_values[k, n]
                delta = rewards[k, n] + future - values[k, n]
                advantages[t, n] += (gamma * gae_lambda) ** (k - t) * delta
                if done[k, n]:
                    break
    return advantages


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_double_sum(seed, gae_lambda):
    rollout = random_rollout(seed=seed)
    advantages, returns = ppo.gae(*rollout, 0.97, gae_lambda)
    expected = double_sum(*rollout, 0.97, gae_lambda)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(returns, expected + rollout[1], rtol=0, atol=1e-10)


# --- What came, beside what was believed ---


@pytest.mark.parametrize("seed", range(3))
def test_outcomes_are_the_discounted_rewards_until_the_end_of_the_episode(seed):
    rollout = random_rollout(seed=seed)
    expected = double_sum(*rollout, 0.97, 1.0) + rollout[1]
    came = ppo.outcomes(rollout[0], *rollout[2:], 0.97)
    torch.testing.assert_close(came, expected, rtol=0, atol=1e-5)


def test_comparison_is_by_bias_explained_variance_and_correlations():
    logratio, advantages, values, came = x = torch.randn(4, 50, 3) + torch.tensor(2.0)
    came[:] -= values
    found = ppo.compare(*x)
    x = x.flatten(1).numpy()
    targets, size = x[1] + x[2], np.sqrt((x[3] ** 2).mean())
    variance = targets.var(ddof=1) + (0.1**2) * (targets**2).mean()
    assert found == {
        "check/values": pytest.approx(1 - x[1].var(ddof=1) / variance, abs=1e-5),
        "check/value_bias": pytest.approx((x[2] - x[3]).mean() / size, abs=1e-5),
        "check/advantages": pytest.approx(np.corrcoef(x[1], x[3] - x[2])[0, 1], abs=1e-5),
        "check/update": pytest.approx(np.corrcoef(x[0], x[1])[0, 1], abs=1e-5),
    }
    first = ppo.compare(logratio[:, :1], advantages, values, came)["check/update"]
    expected = np.corrcoef(logratio[:, 0], advantages[:, 0])[0, 1]
    assert first == pytest.approx(expected, abs=1e-5)


# --- Debug variables ---


def test_means_refuse_what_is_not_finite():
    rows = [{"a": torch.tensor(x), "b": torch.tensor(2 * x)} for x in (1.0, 2.0, 6.0)]
    assert ppo.means(rows) == {"a": 3.0, "b": 6.0}
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="infinite"):
            ppo.means([*rows, {"a": torch.tensor(bad), "b": torch.tensor(0.0)}])


# --- Details 28 and 29: observations ---


def statistics(size=None):
    return ppo.RunningMeanStd(np.zeros(size or ()), np.ones(size or ()))


def test_running_statistics_do_not_depend_on_the_batching():
    data = np.random.default_rng(0).normal(3, 5, (120, 4))
    for rows in (1, 7, 120):
        stats = statistics(4)
        for start in range(0, 120, rows):
            stats.update(data[start : start + rows])
        np.testing.assert_allclose(stats.mean, data.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats.var, data.var(0), rtol=1e-4)  # the prior weighs 1e-4 rows
        assert stats.mean.dtype == stats.var.dtype == np.float64


def settings(**changes):
    defaults = {"norm_obs": True, "clip_obs": 10.0, "scale_rewards": True, "clip_reward": 10.0}
    return SimpleNamespace(**{**defaults, "gamma": 0.99, **changes})


def test_the_epsilon_of_normalization_is_inside_the_root():
    stats = statistics(1)
    stats.mean, stats.var = np.zeros(1), np.zeros(1)
    found = ppo.normalize_obs(np.array([[1e-4]]), stats, settings())
    assert found.item() == pytest.approx(1.0)


# --- Details 30 and 31: rewards ---


def baselines_rewards(rewards, done, gamma, limit):
    """VecNormalize.step_wait of ppo2, restated for arrays (T, N)."""
    returns, scaled = np.zeros(rewards.shape[1]), []
    mean, var, count = 0.0, 1.0, 1e-4
    for reward, end in zip(rewards, done):
        returns = returns * gamma + reward
        delta, total = returns.mean() - mean, count + len(returns)
        m2 = var * count + returns.var() * len(returns)
        m2 += delta**2 * count * len(returns) / total
        mean, var, count = mean + delta * len(returns) / total, m2 / total, total
        scaled.append(np.clip(reward / np.sqrt(var + 1e-8), -limit, limit))
        returns[end] = 0
    return np.array(scaled)


@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_rewards_are_scaled_as_in_baselines(limit):
    rng = np.random.default_rng(0)
    rewards, done = rng.normal(2, 3, (60, 3)), rng.random((60, 3)) < 0.2
    running, stats = np.zeros(3), statistics()
    parts = [  # of two rollouts
        ppo.scale_rewards(rewards[part], done[part], running, stats, settings(clip_reward=limit))
        for part in (slice(0, 25), slice(25, 60))
    ]
    expected = baselines_rewards(rewards, done, 0.99, limit)
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-9)
