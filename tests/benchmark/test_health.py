"""Warnings that are found in curves come when the script would print them.

The tables that are made of them are in DEBUGGING.md: test_benchmark.py compares every number there.
"""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import ppo_continuous_action as ppo
from benchmark.provenance import ROOT
from benchmark.record import STEP_METRICS
from benchmark.report import health, plots


@pytest.mark.parametrize("seed", range(5))
def test_warnings_come_when_the_script_would_print_them(seed, capsys):
    rng = np.random.default_rng(seed)
    sick = {x: rng.random(60) < rng.choice([0.0, 0.5, 0.97]) for x, *_ in ppo.HEALTH}
    metrics = {x: np.where(sick[x], high + 0.1, high) for x, _, high, *_ in ppo.HEALTH}
    steps = 2048 * np.arange(1, 61)  # an episode in each iteration; whatever was gained is lost
    curve = {"approx_kl": 0.01, "step": steps, "episodes": 1, "return": -steps.astype(float)}
    curve = pd.DataFrame(curve | {STEP_METRICS[x]: y for x, y in metrics.items()})
    record = {"script": "ppo_continuous_action.py", "variant": ""}
    run = SimpleNamespace(record=record, curve=curve)
    expected, history, episodes = {}, [], []
    for i in range(60):
        history.append({"global_step": 2048 * (i + 1), **{x: y[i] for x, y in metrics.items()}})
        episodes.append({"return": -2048.0 * (i + 1), "length": 1})
        nobody = SimpleNamespace(add_scalar=lambda *_: None, set_postfix_str=lambda *_, **__: None)
        ppo.log(nobody, history, episodes, nobody, warned := set(expected))
        expected |= {x: 2048 * (i + 1) for x in warned - set(expected)}
        assert all(f"Warning: {x} is " in capsys.readouterr().out for x in warned - {*expected})
    assert health.warnings(run) == expected
    early = {x: y for x, y in expected.items() if y <= 50_000}
    assert health.warnings(run, 50_000) == early


@pytest.mark.parametrize(("low", "high", "found"), [(2, 8, 7), (12, 4, 5)])
def test_the_first_of_two_limits_of_a_metric_of_rlhf_counts(low, high, found):
    """The KL stays 0 for five updates; has run away."""
    curve = pd.DataFrame({"step": range(1, 21), "approx_kl": 0.01, "stage": "ppo", "kl_exact": 5.0})
    curve.loc[low : low + 4, "kl_exact"], curve.loc[high, "kl_exact"] = 0.0, 40.0
    record = {"script": "ppo_rlhf_toy.py", "seed": 1, "judged": "ppo"}
    run = SimpleNamespace(record=record | {"settings": {"kl_mode": "adaptive"}}, curve=curve)
    assert health.warnings(run) == {"objective/kl_exact": found}
    assert health.warned_seeds([run], math.inf) == (1, f"`objective/kl_exact` (update {found})")


def test_the_ranges_in_debugging_are_those_of_its_figure():
    text = (ROOT / "DEBUGGING.md").read_text()
    for metric in ("losses/approx_kl", "losses/clipfrac"):
        low, high = plots.HEALTHY[metric]
        assert f"| `{metric}` | {low} to {high}, " in text
