"""The pure functions against closed forms, tables and sums that a person can check."""

import numpy as np
import pytest
import torch

import ppo_continuous_action as ppo


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
    next_values[terminated.bool()] = 0.0
    return rewards, values, next_values, done


def double_sum(rewards, values, next_values, done, gamma, gae_lambda):
    """A_t = sum_k (gamma lambda)^k delta_{t+k} up to the end of the episode, term by term."""
    advantages = torch.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                delta = rewards[k, n] + gamma * next_values[k, n] - values[k, n]
                advantages[t, n] += (gamma * gae_lambda) ** (k - t) * delta
                if done[k, n]:
                    break
    return advantages


@pytest.mark.parametrize("seed", range(3))
def test_observed_returns_are_the_discounted_rewards_until_the_end_of_the_episode(seed):
    rewards, values, next_values, done = random_rollout(seed=seed)
    expected = double_sum(rewards, values, next_values, done, 0.97, 1.0) + values
    terminated = (next_values == 0) & (done == 1)
    observed = ppo.observed_returns([rewards, next_values, terminated, done], 0.97)
    torch.testing.assert_close(observed.double(), expected, rtol=0, atol=1e-5)


def test_means_are_over_all_minibatches_of_all_calls():
    rows = [{"a": torch.tensor(x), "b": torch.tensor(x) * 2} for x in ([1.0, 2.0, 3.0], [6.0])]
    assert ppo.means(rows) == {"a": 3.0, "b": 6.0}


def statistics(size):
    return ppo.RunningMeanStd(np.zeros((1, size)), np.ones((1, size)))


def test_running_statistics_do_not_depend_on_the_batching():
    data = np.random.default_rng(0).normal(3, 5, (120, 4))
    for rows in (1, 7, 120):
        stats = statistics(4)
        for start in range(0, 120, rows):
            stats.update(data[start : start + rows])
        np.testing.assert_allclose(stats.mean[0], data.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats.var[0], data.var(0), rtol=1e-4)  # the prior: 1e-4 rows
        assert stats.mean.dtype == stats.var.dtype == np.float64
        again = ppo.RunningMeanStd(**ppo.plain(vars(stats)))
        assert np.array_equal(again.mean, stats.mean) and again.count == pytest.approx(120.0001)


def test_the_epsilon_of_normalization_is_inside_the_root_and_both_ends_are_clipped():
    stats = ppo.RunningMeanStd(np.zeros((1, 3)), np.zeros((1, 3)))
    found = ppo.normalize_obs(np.array([[1e-4, 1, -1]]), stats, ppo.Args())
    np.testing.assert_allclose(found, [[1, 10, -10]])
