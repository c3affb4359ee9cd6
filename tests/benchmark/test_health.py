"""The curves of bugs are judged by the rule of `check.py`.

The tables that are made of them are in DEBUGGING.md: test_tables.py compares every number there.
"""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmark.evidence import debugging, differences, health
from benchmark.evidence.suites import SUITES
from benchmark.lab import check
from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT


def test_the_first_warning_of_a_curve_is_that_of_the_rule():
    """A value that is missing is healthy, and what happens after some step does not count."""
    steps = 2048 * np.arange(1, 41)
    curve = pd.DataFrame({"step": steps, "approx_kl": 0.01, "episodes": 0, "return": math.nan})
    curve["check_value_bias"] = np.where(np.arange(40) < 10, math.nan, 0.7)
    record = {"script": "ppo_continuous_action.py", "variant": ""}
    run = SimpleNamespace(record=record, curve=curve)
    assert health.warnings(run, math.inf) == {"check/value_bias": 2048 * 30}
    assert health.warnings(run, 2048 * 29) == {}


@pytest.mark.parametrize(("low", "high", "found"), [(2, 8, 7), (12, 4, 5)])
def test_the_first_of_two_limits_of_a_metric_of_rlhf_counts(low, high, found):
    """The KL stays 0 for five updates; has run away."""
    curve = pd.DataFrame({"step": range(1, 21), "approx_kl": 0.01, "stage": "ppo", "kl_exact": 5.0})
    curve.loc[low : low + 4, "kl_exact"], curve.loc[high, "kl_exact"] = 0.0, 40.0
    record = {"script": "ppo_rlhf_toy.py", "seed": 1, "scored_model": "ppo"}
    run = SimpleNamespace(record=record | {"settings": {"kl_mode": "adaptive"}}, curve=curve)
    assert health.warnings(run, math.inf) == {"objective/kl_exact": found}
    assert health.warned_seeds([run]) == (1, f"`objective/kl_exact` (update {found})")


def test_every_symptom_that_is_named_is_in_debugging():
    page = (ROOT / "DEBUGGING.md").read_text()
    symptoms = {x.symptom for x in (*check.ENVIRONMENTS, *check.RLHF, *check.GRPO)}
    assert len(symptoms) > 9 and [x for x in symptoms if f"\n| {x}" not in page] == []


def test_a_bug_is_judged_by_healthy_runs_with_the_same_flags_and_changes():
    controls = {x: health.control(SUITES["bugs"], x) for x in health.bugs_of(SUITES["bugs"])}
    assert {x: y for x, y in controls.items() if y != "healthy"} == {
        "entropy-sign": "healthy-entropy",
        "swamped": "healthy-shared",
        "transposed": "healthy-8",
        "equal-seeds": "healthy-8",
    }


def test_the_first_screen_of_debugging_has_both_errors_of_check(monkeypatch):
    """Bugs that it misses, and healthy runs that it calls unhealthy."""
    seen, unseen = SimpleNamespace(noticed=True), SimpleNamespace(noticed=False)
    trials = {"swapped": [unseen, seen], "forgotten": [unseen], "doubled": [unseen, unseen]}
    monkeypatch.setattr(debugging, "trials", lambda _: trials)
    monkeypatch.setattr(health, "healthy_runs", lambda _: ["fine", "odd", "fine"])
    monkeypatch.setattr(health, "warnings", lambda run, _: {"x": 1} if run == "odd" else {})
    noted = {"swapped": [{"right": True}], "forgotten": [{"right": False}]}
    monkeypatch.setattr(differences, "by_label", lambda _: noted)
    text = " ".join(debugging.errors(Folders()).split())
    assert "`diff` misses 1 of the 2 bugs" in text
    assert "misses 2 of the 3 in training**: forgotten; doubled. **It calls 1 of 3 healthy" in text
    page = (ROOT / "DEBUGGING.md").read_text()
    assert page.index("generated: errors") < page.index("\n## ")
