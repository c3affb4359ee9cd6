"""Statistics on arrays that a person can check."""

import numpy as np
import pytest
from scipy import stats

from benchmark.lab import statistics


# Scores of each column; for the last two statistics of A and B in turns.
@pytest.mark.parametrize(
    ("statistic", "value", "columns"),
    [
        ("interquartile_mean", 4.5, [(100, 1, 3, 2, 5, 4, 6, 7)]),  # without the outer quarters
        ("interquartile_mean", 3, [(1, 2, 6)]),
        ("mean", 5, [(1, 2, 6), (7,)]),
        # Of the four pairs (1,2) (1,3) (3,2) (3,3) one is won and one is a tie.
        ("improvement", 0.375, [(1, 3), (2, 3)]),
        ("improvement", 0.5, [(5, 6), (1, 2), (1, 2), (5, 6)]),
        ("improvement", 2.5 / 3, [(5, 6), (1, 2), (5, 6), (1, 2), (3,), (1, 2, 4, 5)]),
        # -50 % in the first environment, +10 % in the second, where returns are negative.
        ("relative_effect", -0.2, [(1, 1), (2, 2), (-9,), (-10,)]),
        # The median of +800 %, -50 % and +10 %.
        ("relative_effect", 0.1, [(9,), (1,), (1, 1), (2, 2), (-9,), (-10,)]),
    ],
)
def test_statistics_by_hand(statistic, value, columns):
    scores = statistics.matrix(*columns)
    if statistic in ("improvement", "relative_effect"):
        scores = scores.reshape(len(scores), -1, 2)
    assert getattr(statistics, statistic)(scores) == pytest.approx(value)


def test_interval_is_that_of_scipys_stratified_bootstrap():
    strata = [np.arange(10.0), np.array([3.0, 5.0, 1.0])]
    value, ends = statistics.estimate(statistics.matrix(*strata), statistics.mean)
    theirs = stats.bootstrap(
        strata,
        lambda a, b, axis: (a.mean(axis) + b.mean(axis)) / 2,
        n_resamples=statistics.RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    assert value == pytest.approx(3.75) and ends == pytest.approx(theirs.confidence_interval)
    curves = np.random.default_rng(1).normal(size=(5, 2))
    each = [statistics.estimate(x[:, None], statistics.mean).ends for x in curves.T]
    assert pytest.approx(np.array(each)) == statistics.band(curves).T
    few = statistics.matrix([1.0, 2.0, 3.0], [3.0, 4.0])
    assert statistics.estimate(few, statistics.mean) == (2.75, None)
    # Tasks on different scales but without spread between runs: nothing is uncertain.
    sure = np.array([[1.0, 9.0]] * 3)
    assert statistics.estimate(sure, statistics.mean) == (5.0, (5.0, 5.0))


def test_rank_correlation_is_spearmans_of_the_means_over_environments_and_seeds():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(3, 11, 7)), rng.normal(size=11)
    theirs[3] = theirs[4]  # a tie
    value, ends = statistics.estimate(ours, statistics.rank_correlation(theirs))
    assert value == pytest.approx(stats.spearmanr(ours.mean((0, 2)), theirs).statistic)
    assert ends[0] < value < ends[1]
