"""Statistics on arrays that a person can check."""

import itertools
import tracemalloc

import numpy as np
import pytest

from benchmark.lab import statistics


# Scores of each column; for the last two statistics of A and B in turns.
@pytest.mark.parametrize(
    ("statistic", "value", "columns"),
    [
        ("interquartile_mean", 4.75, [(100, 0, 3, 2, 5, 4, 7, 8)]),  # without the outer quarters
        ("interquartile_mean", 3, [(1, 2, 6)]),
        ("interquartile_mean", 53, [(1, 2, 6), (103,)]),  # no task weighs more than another
        ("mean", 5, [(1, 2, 6), (7,)]),
        # Of the four pairs (1,2) (1,3) (3,2) (3,3) one is won and one is a tie.
        ("improvement", 0.375, [(1, 3), (2, 3)]),
        ("improvement", 0.5, [(5, 6), (1, 2), (1, 2), (5, 6)]),
        ("improvement", 2.5 / 3, [(5, 6), (1, 2), (5, 6), (1, 2), (3,), (1, 2, 4, 5)]),
    ],
)
def test_statistics_by_hand(statistic, value, columns):
    tasks = [np.array(x, float) for x in columns]
    assert getattr(statistics, statistic)(*tasks) == pytest.approx(value)
    repeated = [np.stack([x, x], axis=1) for x in tasks]  # as the bootstrap does
    assert getattr(statistics, statistic)(*repeated, axis=0) == pytest.approx([value, value])


def test_each_task_is_resampled_apart_and_two_runs_have_no_interval():
    # The first task can lie anywhere from 0 to 9, the second is always 100.
    tasks = [np.arange(10.0), np.array([100.0, 100.0, 100.0])]
    value, (low, high) = statistics.estimate(tasks, statistics.mean)
    spread = 1.96 * np.std(tasks[0]) / np.sqrt(10) / 2
    assert value == 52.25 and [low, high] == pytest.approx(
        [value - spread, value + spread], abs=0.1
    )
    assert statistics.estimate([*tasks, tasks[1][:2]], statistics.mean).ends is None
    # Tasks on different scales but without spread between runs: nothing is uncertain.
    assert statistics.estimate([np.ones(3), 9 * np.ones(3)], statistics.mean) == (5, (5, 5))


def test_chance_is_the_share_of_ways_to_deal_scores_out_that_differ_as_much():
    """Ties are half won; a task with more runs does not weigh more; both signs count."""
    pairs = [[np.array(x) for x in y] for y in (((5,), (1, 2)), ((3, 3, 7, 8), (1, 3, 4)))]

    def leads(a, b):  # as they are comes first
        scores = np.r_[a, b]
        for own in itertools.combinations(range(len(scores)), len(a)):
            yield np.sign(scores[[*own], None] - np.delete(scores, own)).mean()

    dealt = np.abs([np.mean(x) for x in itertools.product(*(leads(*x) for x in pairs))])
    share = (dealt >= dealt[0] - 1e-9).mean()
    assert statistics.by_chance(pairs) == pytest.approx(share, abs=0.03)


def test_three_hundred_runs_against_as_many_need_little_memory():
    scores = np.random.default_rng(0).normal(size=(2, 300))
    tracemalloc.start()
    assert statistics.by_chance([(scores[0], scores[1] + 1)]) < 0.01
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_rank_correlation_is_that_of_the_means_over_environments_and_seeds():
    order = statistics.rank_correlation([10, 30, 20])
    tasks = [np.array(x, float) for x in [(0, 2), (0,), (5, 7), (5,), (6, 6), (0, 0)]]
    assert order(*tasks) == pytest.approx(1)  # means of 0.5, 5.5 and 3
    tasks[0] += 100
    assert order(*tasks) == pytest.approx(-0.5)  # ranks 3, 2, 1 beside 1, 3, 2
