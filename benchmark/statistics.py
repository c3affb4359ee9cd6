"""Statistics of scores over seeds: pure functions of arrays.

The interquartile mean, stratified bootstrap intervals and the probability of improvement follow
Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its modules when they are used: most commands never do

RESAMPLES = 2000
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A statistic of scores, and the ends of its interval if there are seeds enough for one."""

    value: float
    ends: tuple[float, float] | None


def estimate(strata: Sequence[np.ndarray], statistic: Callable[..., Any]) -> Estimate:
    """`statistic(*strata, axis)` with its stratified bootstrap interval, percentile method.

    Args:
        strata: scores (seeds,) of each environment; seeds are resampled within each.
        statistic: of all strata, vectorized over `axis`.

    Returns:
        No interval where a stratum has fewer than three scores, since the range of two holds the
        true mean only every other time.
    """
    value = float(statistic(*strata, axis=-1))
    if any(len(x) < 3 for x in strata):
        return Estimate(value, None)
    low, high = scipy.stats.bootstrap(
        strata,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),  # tables must be the same whenever they are made
    ).confidence_interval
    return Estimate(value, (float(low), float(high)))


def interquartile_mean(scores: np.ndarray, axis: int = -1) -> Any:
    """Mean without the lowest and the highest quarter, whose sizes are rounded down."""
    return scipy.stats.trim_mean(scores, 0.25, axis=axis)


def mean_of_strata(*strata: np.ndarray, axis: int = -1) -> Any:
    """Mean over strata of the mean of each."""
    return np.mean([np.mean(x, axis=axis) for x in strata], axis=0)


def improvement(*strata: np.ndarray, axis: int = -1) -> Any:
    """Probability that a run of A scores above a run of B, ties half, averaged over environments.

    Args:
        strata: scores of A in environment 1, of B in environment 1, of A in environment 2, ...
        axis: of the seeds.
    """
    shares = []
    for a, b in zip(strata[::2], strata[1::2], strict=True):
        a, b = np.moveaxis(a, axis, -1)[..., :, None], np.moveaxis(b, axis, -1)[..., None, :]
        shares.append(((a > b) + 0.5 * (a == b)).mean((-2, -1)))
    return np.mean(shares, axis=0)


def relative_effect(*strata: np.ndarray, axis: int = -1) -> Any:
    """Change of the mean from B to A in units of B's mean, its median over environments.

    A mean over environments would be that of the one with the most spread. Arguments as of
    `improvement`.
    """
    means = [np.mean(x, axis=axis) for x in strata]
    pairs = zip(means[::2], means[1::2], strict=True)
    return np.median([(a - b) / np.abs(b) for a, b in pairs], axis=0)


def rank_correlation(others: Sequence[float]) -> Callable[..., Any]:
    """Spearman's correlation of the means of variants with others' numbers for them.

    Returns:
        A statistic of strata: those of variant 1 in every environment, of variant 2, ...
    """

    def correlation(*strata: np.ndarray, axis: int = -1) -> Any:
        means = np.array([np.mean(x, axis=axis) for x in strata])
        means = means.reshape(len(others), -1, *means.shape[1:]).mean(1)
        ours, theirs = (
            scipy.stats.zscore(scipy.stats.rankdata(x, axis=0)) for x in (means, others)
        )
        return np.mean(ours.T * theirs, axis=-1)

    return correlation
