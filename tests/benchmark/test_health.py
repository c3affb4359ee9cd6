"""The rule of `check.py` is the one that the scripts had, and the curves of bugs are judged by it.

The tables that are made of them are in DEBUGGING.md: test_tables.py compares every number there.
"""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmark import check
from benchmark.provenance import ROOT
from benchmark.report import health


def judged_one_by_one(history, episodes):
    """The rule as the scripts had it up to version 4.0: after each iteration, over all before."""
    count = max(20, len(episodes) // 20)
    means = [np.mean(episodes[i : i + count]) for i in range(len(episodes) - count + 1)]
    lost = len(means) > 0 and means[-1] < means[0] + 0.8 * (max(means) - means[0])
    part, found = min(history[0]["global_step"] / 2000, 1), set()
    for limit in check.ENVIRONMENTS:
        rows = history[-(count := max(math.ceil(limit.patience / part), 1)) :]
        is_long = len(rows) == count and not any(
            limit.low <= x[limit.metric] <= limit.high for x in rows
        )
        if is_long and (lost or limit.only != check.LOST):
            found.add(limit.metric)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2048, 500])
def test_the_rule_is_that_of_the_scripts_up_to_version_4(seed, size):
    rng = np.random.default_rng(seed)
    metrics = {}
    for x in check.ENVIRONMENTS:
        sick = rng.random(60) < rng.choice([0.0, 0.5, 0.97])
        high = min(x.high, 1.0)
        metrics[x.metric] = np.where(sick, high + 0.1 if x.high < 1 else x.low - 0.1, high)
    steps = size * np.arange(1, 61)
    returns = np.repeat(np.where(np.arange(60) < 30, np.arange(60), 20 * rng.random(60)), 2)
    updates = pd.DataFrame({"global_step": steps} | metrics)
    episodes = pd.DataFrame({"global_step": np.repeat(steps, 2), "return": returns})
    found = {limit.metric: bad for limit, bad in check.unhealthy(updates, episodes)}
    for i in range(60):
        expected = judged_one_by_one(updates[: i + 1].to_dict("records"), returns[: 2 * i + 2])
        assert {x for x, bad in found.items() if bad[i]} == expected


def test_the_first_warning_of_a_curve_is_that_of_the_rule():
    """A value that is missing is healthy, and what happens after some step does not count."""
    steps = 2048 * np.arange(1, 41)
    curve = pd.DataFrame({"step": steps, "approx_kl": 0.01, "episodes": 0, "return": math.nan})
    curve["check_value_bias"] = np.where(np.arange(40) < 10, math.nan, 0.7)
    record = {"script": "ppo_continuous_action.py", "variant": ""}
    run = SimpleNamespace(record=record, curve=curve)
    assert health.warnings(run) == {"check/value_bias": 2048 * 30}
    assert health.warnings(run, 2048 * 29) == {}


@pytest.mark.parametrize(("low", "high", "found"), [(2, 8, 7), (12, 4, 5)])
def test_the_first_of_two_limits_of_a_metric_of_rlhf_counts(low, high, found):
    """The KL stays 0 for five updates; has run away."""
    curve = pd.DataFrame({"step": range(1, 21), "approx_kl": 0.01, "stage": "ppo", "kl_exact": 5.0})
    curve.loc[low : low + 4, "kl_exact"], curve.loc[high, "kl_exact"] = 0.0, 40.0
    record = {"script": "ppo_rlhf_toy.py", "seed": 1, "scored_model": "ppo"}
    run = SimpleNamespace(record=record | {"settings": {"kl_mode": "adaptive"}}, curve=curve)
    assert health.warnings(run) == {"objective/kl_exact": found}
    assert health.warned_seeds([run], math.inf) == (1, f"`objective/kl_exact` (update {found})")


def test_every_symptom_that_is_named_is_in_debugging():
    page = (ROOT / "DEBUGGING.md").read_text()
    limits = {*check.ENVIRONMENTS, *check.RLHF, *check.GRPO, *check.DPO}
    symptoms = {x.symptom for limit in limits for x in limit.advice} - {""}
    assert len(symptoms) > 10 and all(f"| {x}" in page for x in symptoms)
    assert all(limit.advice[-1].up_to == math.inf for limit in limits)
