"""What is said of the runs of bugs: warnings, costs, and the ranges of healthy runs."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import ppo_continuous_action as ppo
from benchmark import health, results
from benchmark.bugs import ACTING
from benchmark.definitions import Folders
from benchmark.record import STEP_METRICS
from benchmark.suites import SUITES

SCRIPT = "ppo_continuous_action.py"
BUGS = SUITES["bugs"]


def made(metrics, script=SCRIPT, **record):
    """A finished run with one value of each metric per iteration, an episode in each."""
    columns = {(STEP_METRICS | health.OLDER)[x]: y for x, y in metrics.items()}
    rows = pd.DataFrame({"approx_kl": 0.01, "return": 1.0, **columns})
    rows.insert(0, "episodes", 1)
    rows.insert(0, "step", 2048 * np.arange(1, len(rows) + 1))
    about = {"script": script, "seed": 1, "environment": "Hopper-v4", "variant": "", **record}
    return SimpleNamespace(record=about, curve=rows)


@pytest.mark.parametrize("seed", range(5))
def test_warnings_come_when_the_script_would_print_them(seed, capsys):
    rng = np.random.default_rng(seed)
    sick = {x: rng.random(60) < rng.choice([0.0, 0.5, 0.97]) for x, *_ in ppo.HEALTH}
    metrics = {x: np.where(sick[x], high + 0.1, high) for x, _, high, *_ in ppo.HEALTH}
    run = made(metrics)
    run.curve["return"] = -run.curve["step"].astype(float)  # whatever was gained is lost
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


def test_a_stretch_without_an_update_and_a_missing_metric_are_no_sign_of_anything():
    run = made({"check/values": [math.nan] * 80})
    run.curve.loc[::2, "approx_kl"] = math.nan
    assert health.warnings(run) == {} and len(health.iterations(run)) == 40


def test_a_large_kl_is_a_warning_where_the_return_falls():
    rising, falling = (made({"losses/approx_kl": [0.06] * 60}) for _ in range(2))
    for run, sign in ((rising, 1), (falling, -1)):
        run.curve["return"] = sign * np.arange(60.0)
    assert health.warnings(rising) == {}
    assert list(health.warnings(falling)) == ["losses/approx_kl"]


def test_what_acts_otherwise_is_warned_about_at_the_latest_when_it_was_measured():
    bug, other = (made({"check/update": [0.2] * 60}, variant=x) for x in ("renormalized", "sign"))
    assert health.warnings(bug, health.EARLY) == {"check/acting": 98304}
    assert health.warnings(other) == {}


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
    assert health.is_healthy(BUGS, variant) == variant.startswith("healthy")
    assert health.is_healthy(SUITES["bugs_healthy"], "atari")


@pytest.fixture
def folders(tmp_path):
    """Results of a bug that is warned about on two seeds, of a harmless one, and a healthy one."""
    keep(
        tmp_path,
        "bugs",
        [
            *(("Hopper-v4", "sign", x, 0.9 if x < 3 else 0.2, 300 - x) for x in (1, 2, 3)),
            *(("Hopper-v4", "not-reset", x, 0.2, 390 + x) for x in (1, 2, 3)),
            *(("Hopper-v4", "healthy", x, 0.19 + 0.01 * x, 398 + x) for x in (1, 2, 3)),
        ],
    )
    return Folders(tmp_path, tmp_path)


def keep(path, suite, runs):
    """Write runs with environment, variant, seed, bias of values in all iterations and score."""
    records, curves = [], []
    for environment, variant, seed, bias, score in runs:
        key = {"environment": environment, "variant": variant, "seed": seed}
        records.append({**key, "script": SCRIPT, "score": score})
        curve = made({"check/value_bias": [bias] * 60}).curve
        curves.append(curve.assign(**key, **{"return": float(score)}))
    results.write_lines(path / f"{suite}.jsonl", records)
    pd.concat(curves).to_csv(path / f"{suite}.csv", index=False)


def test_the_table_has_what_a_bug_costs_and_where_it_is_warned_about(folders):
    rows = health.bugs_table(BUGS, folders).splitlines()
    sign = next(x for x in rows if "wrong sign |" in x and "policy" in x)
    (patience,) = (x[3] for x in ppo.HEALTH if x[0] == "check/value_bias")
    assert f"2 of 3: `check/value_bias` ({2.048 * patience:.0f}k)" in sign and "| -26% [" in sign
    assert any("not reset" in x and "| -2% [" in x and "0 of 3" in x for x in rows)
    healthy = next(x for x in rows if x.startswith("| healthy |"))
    assert "%" not in healthy and "0 of 3" in healthy


def test_bugs_seen_on_two_seeds_and_healthy_runs_are_counted(folders, tmp_path):
    text = health.counts([BUGS], folders).replace("\n", " ")
    assert text.startswith("**1 of 2 bugs are noticed**")
    assert "Not noticed: reward scaling not reset" in text
    assert "**0 of 3 healthy runs** that had a part" in text and "no part" not in text
    # One seed alone does not count; of healthy runs each does, if it has learned.
    runs = [("Hopper-v4", "sign", x, 0.9 if x < 2 else 0.2, 300) for x in (1, 2, 3)]
    keep(tmp_path, "bugs", [*runs, ("Hopper-v4", "healthy", 4, 0.9, 300)])
    kept = [("Hopper-v4", "test-zoo-hopper", x, 0.9 if x < 2 else 0.2, 300) for x in (1, 2)]
    keep(tmp_path, "bugs_healthy", [*kept, ("Hopper-v4", "gamma-0.999", 1, 0.9, 199)])
    text = health.counts([BUGS, SUITES["bugs_healthy"]], folders).replace("\n", " ")
    assert text.startswith("**0 of 1 bugs")
    assert "**1 of 1 healthy runs** that had a part in the choice" in text
    assert "95 % interval 3% to 100%): Hopper-v4, healthy, seed 4: `check/value_bias`" in text
    assert "**1 of 2 healthy runs** that had no part in the choice" in text
    assert "(95 % interval 1% to 99%): Hopper-v4, Stable-Baselines3 Zoo, seed 1" in text
    assert "Not counted, since they did not learn: Hopper-v4, γ = 0.999, seed 1." in text


def test_the_first_iteration_tells_what_differs_alike_on_all_seeds():
    healthy = {"check/value_bias": 0.1, "advantages/std": 0.95, "check/first_kl": 0.0}
    healthy |= {"losses/grad_norm": 1.95, "losses/clipfrac": 0.15, "check/update": 0.2}

    def difference(*changes):
        ours, theirs = (
            [
                made({x: [y, 9.0] for x, y in (healthy | z).items()}, seed=i)
                for i, z in enumerate(own)
            ]
            for own in (changes, [{}] * 3)
        )
        return health.first_difference(ours, theirs)

    first, second = ({"losses/grad_norm": x, "advantages/std": 0.45} for x in (3.95, 2.95))
    found = difference({**first, "check/update": 0.4}, {**second, "check/update": 0.1})
    assert found == "advantages: `advantages/std` -50%, `losses/grad_norm` +75%"
    assert difference({}, {}) == "nothing"
    hardly = {"losses/clipfrac": 0.1501}
    for name, stage in (("check/value_bias", "outcomes"), ("check/first_kl", "ratio")):
        assert difference(*[{**hardly, name: 0.101}] * 2).startswith(stage)
    assert difference(hardly, hardly) == "update"  # by a digit is enough
    assert difference(hardly, {}) == "nothing"  # the second seed does not


def test_bands_are_those_of_the_healthy_runs_and_of_the_scripts_warnings(folders):
    rows = health.bands_table([BUGS], folders).splitlines()
    ((_, low, high, patience, *_),) = (x for x in ppo.HEALTH if x[0] == "check/value_bias")
    outside = f"{low:g} to {high:g} for {patience} iterations"
    assert f"| `check/value_bias` | 0.2 to 0.22 | {outside} |" in rows
    assert any("while return is lost" in x for x in rows if "approx_kl" in x)


def test_healthy_runs_and_evaluations_have_a_row_each(tmp_path):
    folders = Folders(tmp_path, tmp_path)
    runs = [("Ant-v4", "default", x, 1 - 0.5 * x, 10 * x - 15) for x in (1, 2)]
    keep(tmp_path, "bugs_healthy", [("Reacher-v4", "test-penalty", 1, 0.7, -5), *runs])
    text = health.healthy_table(SUITES["bugs_healthy"], folders)
    assert f"| Ant-v4 | {SCRIPT} | default |  | 0.0 ± 5.0 | 1 of 2 | 0 |" in text
    row = next(x for x in text.splitlines() if x.startswith("| Reacher-v4"))
    assert "| KL penalty | yes | -5.0 | 1 of 1 | 1: `check/value_bias` (" in row
    played = [{"score": 500.0, "walk": {"returns": [x, 3 * x]}} for x in (10, 20, 30)]
    key = {"environment": "Hopper-v4", "variant": "without-statistics", "script": SCRIPT}
    lines = [{**key, "seed": i, **x} for i, x in enumerate(played)]
    results.write_lines(tmp_path / "bugs_evaluation.jsonl", lines)
    row = health.evaluation_table(SUITES["bugs_evaluation"], folders).splitlines()[2]
    assert "| 500 ± 0 | 40.0 [20.0, 60.0] |" in row


def test_late_warnings_count_for_healthy_runs_only_and_the_first_of_two_lines_counts():
    run = made({"check/value_bias": [0.2] * 50 + [0.9] * 40})
    assert health.warned_seeds([run])[0] == 0
    assert health.warned_seeds([run], math.inf) == (1, "`check/value_bias` (143k)")
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
    assert health.warned_seeds([run]) == (1, "`objective/kl_exact` (update 5)")


def test_an_older_run_has_its_measured_acting_beside_a_newer_one_that_logged_it(tmp_path):
    name, acting = next((x, y) for x, y in ACTING.items() if y)
    about = f"Hopper-v4,{name}"
    (tmp_path / "bugs.csv").write_text(
        "environment,variant,seed,step,check_acting\n"
        f"{about},1,{health.EARLY},\n{about},2,{health.EARLY},0.25\n"
    )
    record = {"environment": "Hopper-v4", "variant": name}
    older, newer = (results.Result(record | {"seed": x}, tmp_path / "bugs.csv") for x in (1, 2))
    assert [*health.points(older)["check_acting"]] == [acting]
    assert [*health.points(newer)["check_acting"]] == [0.25]
