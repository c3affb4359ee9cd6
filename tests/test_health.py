"""What is said of the runs of bugs: warnings, costs, and the distance from healthy runs."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import ppo_continuous_action as ppo
from benchmark import health, results
from benchmark.definitions import Folders
from benchmark.record import STEP_METRICS
from benchmark.suites import SUITES

SCRIPT = "ppo_continuous_action.py"
BUGS = SUITES["bugs"]


def made(metrics, script=SCRIPT):
    """A finished run with one value of each metric per iteration."""
    columns = {(STEP_METRICS | health.OLDER)[x]: y for x, y in metrics.items()}
    rows = pd.DataFrame({"approx_kl": 0.01, **columns})
    rows.insert(0, "step", 2048 * np.arange(1, len(rows) + 1))
    return SimpleNamespace(record={"script": script, "seed": 1}, curve=rows)


@pytest.mark.parametrize("seed", range(5))
def test_warnings_come_when_the_script_would_print_them(seed, capsys):
    rng = np.random.default_rng(seed)
    rows = [x for x in ppo.HEALTH if x[0] in STEP_METRICS]
    assert len(rows) == len(ppo.HEALTH)
    sick = {x: rng.random(60) < rng.choice([0.0, 0.5, 0.97]) for x, *_ in rows}
    metrics = {
        x: np.where(sick[x], high + 0.1 if x != "check/values" else low - 0.1, high)
        for x, low, high, *_ in rows
    }
    expected = {}
    for name, _, _, patience, _ in rows:
        long = -2048
        for i in range(60):
            long = long + 2048 if sick[name][i] else -2048
            if long >= patience:
                expected.setdefault(name, 2048 * (i + 1))
    run = made(metrics)
    assert health.warnings(run) == expected
    early = {x: y for x, y in expected.items() if y <= 50_000}
    assert health.warnings(run, 50_000) == early and capsys.readouterr().out == ""


def test_a_stretch_without_an_update_and_a_missing_metric_are_no_sign_of_anything():
    run = made({"check/values": [math.nan] * 40})
    run.curve.loc[::2, "approx_kl"] = math.nan
    assert health.warnings(run) == {} and len(health.iterations(run)) == 20


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        *(("sign", "healthy"), ("transposed", "healthy-8"), ("entropy-sign", "healthy-entropy")),
        *(("swamped", "healthy-shared"), ("healthy-8", "healthy-8")),
    ],
)
def test_a_bug_is_compared_with_the_healthy_variant_that_has_its_flags(variant, expected):
    assert health.control(BUGS, variant) == expected
    assert health.control(SUITES["bugs_rlhf"], "temperature") == "healthy-warm"


@pytest.fixture
def folders(tmp_path):
    """Results of a bug that is warned about on two seeds, of a harmless one, and a healthy one."""
    folders = Folders(tmp_path, tmp_path)
    records, curves = [], []
    for variant, seed, update, score in [
        *(("sign", x, 0.2 if x == 3 else -0.2, x) for x in (1, 2, 3)),
        *(("not-reset", x, 0.2, 90 + x) for x in (1, 2, 3)),
        *(("healthy", x, 0.19 + 0.01 * x, 98 + x) for x in (1, 2, 3)),
    ]:
        key = {"environment": "Hopper-v4", "variant": variant, "seed": seed}
        records.append({**key, "script": SCRIPT, "score": score})
        curves.append(made({"check/update": [update] * 60}).curve.assign(**key))
    results.write_lines(tmp_path / "bugs.jsonl", records)
    pd.concat(curves).to_csv(tmp_path / "bugs.csv", index=False)
    return folders


def test_the_table_has_what_a_bug_costs_and_where_it_is_warned_about(folders):
    rows = health.bugs_table(BUGS, folders).splitlines()
    sign = next(x for x in rows if "wrong sign |" in x and "policy" in x)
    (patience,) = (x[3] for x in ppo.HEALTH if x[0] == "check/update")
    assert (
        f"2 of 3: `check/update` ({(2048 + patience) / 1000:.0f}k)" in sign and "| -98% [" in sign
    )
    assert any("not reset" in x and "| -8% [" in x and "0 of 3" in x for x in rows)
    healthy = next(x for x in rows if x.startswith("| healthy |"))
    assert "%" not in healthy and "0 of 3" in healthy


def test_the_goal_counts_bugs_seen_on_two_seeds_and_healthy_runs(folders):
    text = health.goal([BUGS], folders)
    assert text.startswith("**1 of 2 bugs are noticed**: 1 are warned about")
    assert "Not noticed: reward scaling not reset" in text.replace("\n", " ")
    assert "**0 of 3 healthy runs** have a warning" in text
    table = (folders.results / "bugs.csv").read_text().replace("sign,1", "healthy,4")
    (folders.results / "bugs.csv").write_text(table)
    lines = (folders.results / "bugs.jsonl").read_text()
    moved = '"variant": "sign", "seed": 1', '"variant": "healthy", "seed": 4'
    (folders.results / "bugs.jsonl").write_text(lines.replace(*moved))
    text = health.goal([BUGS], folders)
    assert text.startswith("**0 of 2") and "**1 of 4 healthy runs**" in text
    assert "Hopper-v4, healthy, seed 4: `check/update`" in text.replace("\n", " ")


def test_distances_are_in_widths_of_the_band_of_healthy_runs(folders):
    found = health.distances(BUGS, "Hopper-v4", folders)
    assert list(found.index) == ["sign", "not-reset"]
    mean = (-0.2 - 0.2 + 0.2) / 3
    assert found.loc["sign", "check_update"] == pytest.approx((mean - 0.2) / 0.02)
    assert found.loc["not-reset", "check_update"] == 0
    assert len(health.distances(BUGS, "HalfCheetah-v4", folders)) == 0


def test_the_first_iteration_tells_what_differs_alike_on_all_seeds():
    def runs(*firsts):
        runs = [made({x: [y, 9.0] for x, y in first.items()}) for first in firsts]
        for seed, run in enumerate(runs, 1):
            run.record["seed"] = seed
        return runs

    usual = {"check/value_bias": 0.1, "advantages/std": 0.95, "check/first_kl": 0.0}
    usual |= {"losses/grad_norm": 1.95, "losses/clipfrac": 0.15, "check/update": 0.2}
    first, second = ({**usual, "losses/grad_norm": x, "advantages/std": 0.45} for x in (3.95, 2.95))
    ours = runs({**first, "check/update": 0.4}, {**second, "check/update": 0.1})
    theirs = runs(usual, usual, usual)
    said = "advantages: `advantages/std` -50%, `losses/grad_norm` +75%"
    assert health.at_first(ours, theirs) == said
    assert health.at_first(theirs, theirs) == "nothing"
    hardly = {**usual, "losses/clipfrac": 0.1501}
    for name, stage in (("check/value_bias", "outcomes"), ("check/first_kl", "ratio")):
        own = runs(*[{**hardly, name: 0.101}] * 2)
        assert health.at_first(own, theirs).startswith(stage)
    assert health.at_first(runs(hardly, hardly), theirs) == "update"  # by a digit is enough
    assert health.at_first(runs(hardly, usual), theirs) == "nothing"  # the second seed does not


def test_bands_are_those_of_the_healthy_runs_and_of_the_scripts_warnings(folders):
    row = next(x for x in health.bands_table([BUGS], folders).splitlines() if "check/update" in x)
    ((_, low, _, patience, _),) = (x for x in ppo.HEALTH if x[0] == "check/update")
    outside = f"{low:g} to 1 for {patience / 1000:.0f}k steps"
    assert row == f"| `check/update` | 0.2 to 0.22 | – | {outside} |"


def test_healthy_runs_and_evaluations_have_a_row_each(tmp_path):
    folders = Folders(tmp_path, tmp_path)
    keys = [{"environment": "Ant-v4", "variant": "default", "seed": x} for x in (1, 2)]
    lines = [{**key, "script": SCRIPT, "score": 10 * key["seed"]} for key in keys]
    results.write_lines(tmp_path / "bugs_healthy.jsonl", lines)
    runs = [made({"check/update": [x] * 60}).curve for x in (0.2, -0.2)]
    rows = pd.concat([x.assign(**key) for x, key in zip(runs, keys)])
    rows.to_csv(tmp_path / "bugs_healthy.csv", index=False)
    (row,) = health.healthy_table(SUITES["bugs_healthy"], folders).splitlines()[2:3]
    assert row.startswith(f"| Ant-v4 | {SCRIPT} | 2 | 15.0 ± 5.0 | 1: `check/update` (16k)")
    played = [{"score": 500.0, "walk": {"returns": [x, 3 * x]}} for x in (10, 20, 30)]
    key = {"environment": "Hopper-v4", "variant": "without-statistics", "script": SCRIPT}
    lines = [{**key, "seed": i, **x} for i, x in enumerate(played)]
    results.write_lines(tmp_path / "bugs_evaluation.jsonl", lines)
    row = health.evaluation_table(SUITES["bugs_evaluation"], folders).splitlines()[2]
    assert "| 500 ± 0 | 40.0 [20.0, 60.0] |" in row


def test_late_warnings_count_for_healthy_runs_only_and_the_first_of_two_lines_counts():
    run = made({"check/update": [0.2] * 50 + [-0.2] * 10})
    assert health.seen([run])[0] == 0
    assert health.seen([run], math.inf) == (1, "`check/update` (119k)")
    curve = pd.DataFrame({"step": range(1, 21), "approx_kl": 0.01, "stage": "ppo"})
    record = {"script": "ppo_rlhf_toy.py", "seed": 1, "judged": "ppo"}
    record["settings"] = {"kl_mode": "adaptive"}
    assert health.warnings(SimpleNamespace(record=record, curve=curve)) == {}
    curve["kl_exact"] = 5.0
    for low, high, found in ((2, 8, 7), (12, 4, 5)):  # it stays 0 for five updates; has run away
        changed = curve.copy()
        changed.loc[low : low + 4, "kl_exact"], changed.loc[high, "kl_exact"] = 0.0, 40.0
        run = SimpleNamespace(record=record, curve=changed)
        assert health.warnings(run) == {"objective/kl_exact": found}
    assert health.seen([run]) == (1, "`objective/kl_exact` (update 5)")


def test_what_is_healthy_by_its_name():
    rlhf = SUITES["bugs_rlhf"]
    healthy = [x for x in rlhf.variants if health.is_healthy(rlhf, x)]
    assert healthy == ["healthy", "healthy-warm"]
    assert health.is_healthy(SUITES["bugs_healthy"], "atari") and not health.is_healthy(
        BUGS, "sign"
    )
