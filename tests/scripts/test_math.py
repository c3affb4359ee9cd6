"""Running statistics, and normalization by them, at their edges."""

import numpy as np
import pytest

import ppo_continuous_action as ppo


def test_running_statistics_do_not_depend_on_the_batching():
    data = np.random.default_rng(0).normal(3, 5, (120, 4))
    for rows in (1, 7, 120):
        stats = ppo.RunningMeanStd(np.zeros((1, 4)), np.ones((1, 4)))
        for start in range(0, 120, rows):
            stats.update(data[start : start + rows])
        np.testing.assert_allclose(stats.mean[0], data.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats.var[0], data.var(0), rtol=1e-4)  # the prior: 1e-4 rows
        assert stats.mean.dtype == stats.var.dtype == np.float64
        again = ppo.RunningMeanStd(**ppo.plain(vars(stats)))
        assert np.array_equal(again.mean, stats.mean) and again.count == pytest.approx(120.0001)


def test_the_epsilon_of_normalization_is_inside_the_root_and_both_ends_are_clipped():
    stats = ppo.RunningMeanStd(np.zeros((1, 3)), np.zeros((1, 3)))
    found = ppo.normalize_obs(np.array([[1e-4, 1, -1]]), stats, clip=10.0)
    np.testing.assert_allclose(found, [[1, 10, -10]])
