"""Statistics of scores: an array of runs for each task, as many as there are of it.

Each takes the axis of runs, since `scipy.stats.bootstrap` gives it all its resamples at once. The
interquartile mean, stratified bootstrap intervals and the probability of improvement follow Agarwal
et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its modules when they are used: most commands never do

RESAMPLES = 2000
Statistic = Callable[..., Any]  # of (..., runs) for each task, and the axis of runs


class Estimate(NamedTuple):
    """A statistic of scores, and the ends of its interval if there are runs enough for one."""

    value: float
    ends: tuple[float, float] | None


def estimate(tasks: Sequence[np.ndarray], statistic: Statistic) -> Estimate:
    """A statistic with its 95 % bootstrap interval; the runs of each task are resampled apart.

    No interval where a task has fewer than three runs, since the range of two holds the true mean
    only every other time.
    """
    value = float(statistic(*tasks, axis=-1))
    if min(map(len, tasks)) < 3:
        return Estimate(value, None)
    low, high = interval(tasks, statistic)
    return Estimate(value, (float(low), float(high)))


def interval(tasks: Sequence[np.ndarray], statistic: Statistic) -> Any:
    """The ends of the stratified bootstrap interval, percentile method."""
    rng = np.random.default_rng(0)  # tables must be the same whenever they are made
    options = {"n_resamples": RESAMPLES, "method": "percentile", "rng": rng, "axis": -1}
    return scipy.stats.bootstrap(tasks, statistic, **options).confidence_interval


def interquartile_mean(*tasks: np.ndarray, axis: int = -1) -> Any:
    """Mean over the runs of a task, without the outer quarters (rounded down); mean over tasks.

    The paper trims the runs of all tasks together. Then a task with more runs would weigh more.
    """
    return np.mean([scipy.stats.trim_mean(x, 0.25, axis) for x in tasks], axis=0)


def smallest_visible(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The difference of two means that a t-test would probably notice.

    Probably: at the 5 % level, in 80 % of such experiments. Two runs of one of them are needed.
    """
    counts = np.array([len(ours), len(theirs)])
    free = counts.sum() - 2
    variance = (np.var(ours) * counts[0] + np.var(theirs) * counts[1]) / free
    reach = scipy.stats.t.ppf(0.975, free) + scipy.stats.t.ppf(0.8, free)
    return float(reach * np.sqrt(variance * (1 / counts).sum()))


def mean(*tasks: np.ndarray, axis: int = -1) -> Any:
    """Mean over tasks of the mean of each."""
    return np.mean([x.mean(axis) for x in tasks], axis=0)


def improvement(*tasks: np.ndarray, axis: int = -1) -> Any:
    """Probability that a run of A scores above a run of B, ties half, averaged over tasks.

    Args:
        tasks: scores of A and of B in the first task, of A and of B in the second, and so on.
    """
    found = []
    for a, b in zip(tasks[::2], tasks[1::2]):
        wins = scipy.stats.mannwhitneyu(a, b, method="asymptotic", axis=axis).statistic
        found.append(wins / (a.shape[axis] * b.shape[axis]))
    return np.mean(found, axis=0)


def by_chance(tasks: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """How often equal settings differ as much: the p-value of a permutation test, two-sided.

    Args:
        tasks: scores of A and of B in each task. What is compared is the probability that a run of
            A is better, averaged over tasks, under `RESAMPLES` ways to deal scores out to A and B.
    """
    rng, found = np.random.default_rng(0), []
    for a, b in tasks:
        ranks = scipy.stats.rankdata(np.concatenate([a, b]))  # ties share the mean of theirs
        dealt = rng.permuted(np.tile(ranks, (RESAMPLES, 1)), axis=1)
        dealt[0] = ranks  # as they are
        # The mean sign of all pairs, by the sum of A's ranks (Mann and Whitney), without the pairs.
        wins = dealt[:, : len(a)].sum(axis=1) - len(a) * (len(a) + 1) / 2
        found.append(2 * wins / (len(a) * len(b)) - 1)
    lead = np.abs(np.mean(found, axis=0))
    return float((lead >= lead[0] - 1e-9).mean())


def rank_correlation(others: Sequence[float]) -> Statistic:
    """Spearman's correlation of the means of variants with others' numbers for them.

    Returns:
        A statistic of all tasks of the first variant, all of the second, and so on.
    """

    def correlation(*tasks: np.ndarray, axis: int = -1) -> Any:
        means = np.stack([x.mean(axis) for x in tasks], axis=-1)
        means = means.reshape(*means.shape[:-1], len(others), -1).mean(-1)  # (..., variants)
        return scipy.stats.spearmanrho(means, others, axis=-1).statistic

    return correlation
