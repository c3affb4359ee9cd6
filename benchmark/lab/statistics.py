"""Statistics of matrices of scores, as in rliable: rows are runs, columns are tasks.

A task with fewer runs than another has NaN in the rows that it lacks. The interquartile mean,
stratified bootstrap intervals and the probability of improvement follow Agarwal et al. 2021, "Deep
Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its modules when they are used: most commands never do

RESAMPLES = 2000
INTERVAL = [0.025, 0.975]  # its ends, at 95 % confidence


class Estimate(NamedTuple):
    """A statistic of scores, and the ends of its interval if there are runs enough for one."""

    value: float
    ends: tuple[float, float] | None


def matrix(*tasks: Sequence[float]) -> np.ndarray:
    """Scores of each task as a column, (runs, tasks)."""
    found = np.full((max(map(len, tasks)), len(tasks)), np.nan)
    for column, scores in zip(found.T, tasks):
        column[: len(scores)] = scores
    return found


def estimate(scores: np.ndarray, statistic: Callable[[np.ndarray], Any]) -> Estimate:
    """A statistic with its stratified bootstrap interval, percentile method.

    Args:
        scores: (runs, ...); runs are resampled in each of the columns apart.
        statistic: of an array (..., runs, ...) with any number of resamples in front.

    Returns:
        No interval where a column has fewer than three scores, since the range of two holds the
        true mean only every other time.
    """
    columns = scores.reshape(len(scores), -1).T.astype(float)
    strata = [column[~np.isnan(column)] for column in columns]
    value = float(statistic(scores))
    if min(map(len, strata)) < 3:
        return Estimate(value, None)
    rng = np.random.default_rng(0)  # tables must be the same whenever they are made
    drawn = np.full((RESAMPLES, len(scores), len(strata)), np.nan)
    for index, own in enumerate(strata):
        drawn[:, : len(own), index] = own[rng.integers(len(own), size=(RESAMPLES, len(own)))]
    found = statistic(drawn.reshape(RESAMPLES, *scores.shape))
    low, high = np.quantile(found, INTERVAL)
    return Estimate(value, (float(low), float(high)))


def band(curves: np.ndarray) -> np.ndarray:
    """The ends of the bootstrap interval of the mean of curves (runs, points), at each point."""
    drawn = np.random.default_rng(0).integers(len(curves), size=(RESAMPLES, len(curves)))
    return np.quantile(curves[drawn].mean(1), INTERVAL, axis=0)


def interquartile_mean(scores: np.ndarray) -> Any:
    """Mean over runs and tasks, (..., runs, tasks), without the outer quarters (rounded down)."""
    ranked = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)  # what is missing comes last
    count = np.isfinite(scores).sum((-2, -1)).min()
    return ranked[..., count // 4 : count - count // 4].mean(-1)


def smallest_visible(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The difference of two means, relative to the second, that a t-test would probably notice.

    Probably: at the 5 % level, in 80 % of such experiments. Two runs of one of them are needed.
    """
    counts = np.array([len(ours), len(theirs)])
    free = counts.sum() - 2
    variance = (np.var(ours) * counts[0] + np.var(theirs) * counts[1]) / free
    reach = scipy.stats.t.ppf(0.975, free) + scipy.stats.t.ppf(0.8, free)
    return float(reach * np.sqrt(variance * (1 / counts).sum()) / abs(np.mean(theirs)))


def mean(scores: np.ndarray) -> Any:
    """Mean over tasks of the mean of each, (..., runs, tasks)."""
    return np.nanmean(scores, axis=-2).mean(-1)


def improvement(scores: np.ndarray) -> Any:
    """Probability that a run of A scores above a run of B, ties half, averaged over tasks.

    Args:
        scores: (..., runs, tasks, 2) of A and B.
    """
    a, b = np.moveaxis(scores, -1, 0)
    wins = (np.sign(a[..., :, None, :] - b[..., None, :, :]) + 1) / 2
    return np.nanmean(wins, axis=(-3, -2)).mean(-1)


def by_chance(tasks: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """How often equal settings differ as much: the p-value of a permutation test, two-sided.

    Args:
        tasks: scores of A and of B in each task. What is compared is the probability that a run of
            A is better, averaged over tasks, under `RESAMPLES` ways to deal scores out to A and B.
    """
    rng, found = np.random.default_rng(0), []
    for a, b in tasks:
        dealt = rng.permuted(np.tile(np.concatenate([a, b]), (RESAMPLES, 1)), axis=1)
        dealt[0] = np.concatenate([a, b])  # as they are
        lead = np.sign(dealt[:, : len(a), None] - dealt[:, None, len(a) :])
        found.append(lead.mean((1, 2)))
    lead = np.abs(np.mean(found, axis=0))
    return float((lead >= lead[0] - 1e-9).mean())


def relative_effect(scores: np.ndarray) -> Any:
    """Change of the mean from B to A in units of B's mean, its median over tasks.

    A mean over tasks would be that of the one with the most spread. Argument as of `improvement`.
    """
    a, b = np.moveaxis(np.nanmean(scores, axis=-3), -1, 0)
    return np.median((a - b) / np.abs(b), axis=-1)


def rank_correlation(others: Sequence[float]) -> Callable[[np.ndarray], Any]:
    """Spearman's correlation of the means of variants with others' numbers for them.

    Returns:
        A statistic of scores (..., runs, variants, tasks).
    """

    def correlation(scores: np.ndarray) -> Any:
        means = np.nanmean(scores, axis=-3).mean(-1)
        ours, theirs = (
            scipy.stats.zscore(scipy.stats.rankdata(x, axis=-1), axis=-1) for x in (means, others)
        )
        return np.mean(ours * theirs, axis=-1)

    return correlation
