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


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_double_sum(seed, gae_lambda):
    rollout, before = random_rollout(seed=seed), random_rollout(seed=seed)
    advantages, returns = ppo.gae(*rollout, 0.97, gae_lambda)
    assert all(map(torch.equal, rollout, before))  # they stay as they are
    expected = double_sum(*rollout, 0.97, gae_lambda)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(returns, expected + rollout[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_observed_returns_are_the_discounted_rewards_until_the_end_of_the_episode(seed):
    rollout = random_rollout(seed=seed)
    expected = double_sum(*rollout, 0.97, 1.0) + rollout[1]
    observed = ppo.observed_returns(rollout[0], *rollout[2:], 0.97)
    torch.testing.assert_close(observed, expected, rtol=0, atol=1e-5)


def test_diagnosis_is_by_bias_explained_variance_and_correlation():
    logratio, advantages, values, observed = x = torch.randn(4, 50, 3) + torch.tensor(2.0)
    observed[:] -= values
    found = ppo.diagnose(*x)
    x = x.flatten(1).numpy()
    targets, size = x[1] + x[2], np.sqrt((x[3] ** 2).mean())
    variance = targets.var(ddof=1) + (0.1**2) * (targets**2).mean()
    assert found == {
        "check/values": pytest.approx(1 - x[1].var(ddof=1) / variance, abs=1e-5),
        "check/value_bias": pytest.approx((x[2] - x[3]).mean() / size, abs=1e-5),
        "check/update": pytest.approx(np.corrcoef(x[0], x[1])[0, 1], abs=1e-5),
    }
    first = ppo.diagnose(logratio[:, :1], advantages, values, observed)["check/update"]
    expected = np.corrcoef(logratio[:, 0], advantages[:, 0])[0, 1]
    assert first == pytest.approx(expected, abs=1e-5)


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
        again = ppo.RunningMeanStd(**stats.state())
        assert np.array_equal(again.mean, stats.mean) and again.count == pytest.approx(120.0001)


def test_the_epsilon_of_normalization_is_inside_the_root_and_both_ends_are_clipped():
    stats = ppo.RunningMeanStd(np.zeros((1, 3)), np.zeros((1, 3)))
    found = ppo.normalize_obs(np.array([[1e-4, 1, -1]]), stats, ppo.Args())
    np.testing.assert_allclose(found, [[1, 10, -10]])


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([], False),
        ([1.0] * 19 + [0.0], False),  # too few to compare
        ([5.0] * 100, False),  # nothing was gained that could be lost
        ([0.0] * 20 + [10.0] * 20 + [8.1] * 20, False),
        ([0.0] * 20 + [10.0] * 20 + [7.9] * 20, True),
        ([0.0] * 20 + [-1.0] * 20, True),
        ([0.0] * 200 + [10.0] * 700 + [0.0] * 25 + [10.0] * 75, False),
        ([0.0] * 200 + [10.0] * 750 + [7.9] * 50, True),  # the last twentieth
        ([0.0] * 200 + [10.0] * 775 + [7.9] * 25, False),
    ],
)
def test_a_return_is_lost_where_a_fifth_of_the_gain_is(returns, expected):
    assert ppo.return_lost([{"return": x} for x in returns]) == expected
