"""`check`: what is said of a run, and the functions that others paste to log as much."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from foreign_logs import PENDULUM, write_cleanrl
from torch.utils.tensorboard import SummaryWriter

import ppo_continuous_action as ppo
from benchmark.lab import check, diagnose, logs, record
from benchmark.lab.provenance import ROOT

ITERATIONS = 2048 * np.arange(1, 41)  # the steps at which they end
LOST = np.r_[np.arange(500), np.zeros(300)]  # returns
SOON = np.r_[np.arange(200), np.zeros(600)]
LOW, HIGH = (f"healthy, but {x} than usual" for x in ("lower", "higher"))
RULES = {
    "ppo_rlhf_toy.py": check.RLHF,
    "recipes/grpo_on_reviews.py": check.GRPO,
    "recipes/dpo_on_reviews.py": check.DPO,
    "ppo_llm.py": check.CONVERSATIONS,
}
SCRIPTS = sorted({x.name for x in ROOT.glob("*.py") if "minimal" not in x.name} | RULES.keys())


def test_a_log_of_cleanrl_is_checked_with_what_was_pasted(tmp_path, command):
    write_cleanrl(tmp_path, metrics={"check/value_bias": 0.9, "check/update": 0.3, "clipfrac": 0.6})
    code, text = command("check", tmp_path)
    assert code == 0 and f"{PENDULUM}, 81,920 steps" in text
    score = np.mean([i + k for i in range(37, 41) for k in range(5)])
    last = next(x for x in text.splitlines() if x.startswith("return "))
    assert f" {score:.1f}  " in last and "mean of the" not in last and "last tenth" in last
    rows = {x.split()[0]: x for x in text.splitlines() if "/" in x.partition(" ")[0]}
    assert rows["check/value_bias"].endswith("-0.5 to 0.5      unhealthy since 40,960")
    assert rows["losses/clipfrac"].endswith("healthy, but higher than usual")
    assert all(rows[f"{x}"].endswith(" healthy") for x in ("losses/approx_kl", "check/update"))
    assert "    DEBUGGING.md: `check/value_bias` far above 0" in text
    assert "checked: check/first_kl, check/acting." in text and "paste" not in text
    assert text.splitlines()[-1] == "Look up the symptom in DEBUGGING.md."


def test_what_is_pasted_computes_what_the_script_logs():
    rng = np.random.default_rng(0)
    arrays = torch.tensor(rng.normal(size=(5, 30, 4)), dtype=torch.float32)
    rewards, values, advantages, old, new = arrays
    done, last = torch.tensor(rng.random((30, 4)) < 0.1), torch.ones(4)
    next_values = torch.cat([values[1:], last[None]])
    observed = ppo.observed_returns(rewards, next_values, done, done, 0.9)
    ours = diagnose.observed_returns(rewards, done.float(), last, 0.9)
    assert torch.allclose(ours, observed)
    found = diagnose.diagnose(rewards, done.float(), last, 0.9, values, advantages, old, new)
    bias = (values - observed).mean() / observed.square().mean().sqrt()
    assert found["check/value_bias"] == pytest.approx(bias.item(), rel=1e-4)
    update = (ppo.normalize(new - old) * ppo.normalize(advantages)).mean()
    assert found["check/update"] == pytest.approx(update.item(), abs=1e-5)
    assert found["check/target_std"] == pytest.approx((advantages + values).std().item())


def test_a_run_is_judged_while_it_trains_and_after(command):
    """Before its first checkpoint, the log is all that there is."""
    size = {"total_timesteps": 1024, "num_steps": 64, "num_minibatches": 2, "update_epochs": 2}
    args = ppo.Args(env_id=PENDULUM, **size)
    run = ppo.train(args)["run_dir"]
    saved = logs.find(str(run))[0]
    (run / "checkpoint.pt").rename("checkpoint.pt")
    running = logs.find(str(run))[0]
    assert saved.environment == running.environment == PENDULUM
    assert len(saved.updates) == len(running.updates) == 16
    for metric in check.metrics_of(check.ENVIRONMENTS):
        values = [x.updates[metric].to_numpy() for x in (saved, running)]
        assert np.allclose(*values, rtol=1e-5, atol=1e-7)
    code, text = command("check", run)
    assert code == 0 and "check/acting" in text


def values(first, last):
    return np.r_[np.full(30, first), np.full(10, last)]


def run_of(metrics, returns=(), gaussian=True, settings=(), steps=ITERATIONS):
    """A run of so many iterations, or of as many as there are values; episodes have 100 steps."""
    count = min([len(x) for x in metrics.values() if np.ndim(x)], default=len(steps))
    updates = pd.DataFrame({"global_step": steps[:count]} | metrics)
    episodes = pd.DataFrame({"global_step": 100 * np.arange(len(returns)), "return": returns})
    about = Path("x"), "A-v1", updates, episodes
    return logs.Log(*about, settings=dict(settings), gaussian=gaussian)


@pytest.mark.parametrize(
    ("metric", "values", "returns", "verdict", "text"),
    [
        ("check/value_bias", values(0.9, 0.1), [], "unhealthy at 40,960", "far above 0"),
        ("check/value_bias", values(-0.7, -0.7), [], "unhealthy since 40,960", "far below 0"),
        (
            "losses/explained_variance",
            values(0.03, -0.05),
            [],
            "unhealthy since ",
            "explain nothing",
        ),
        ("check/first_kl", values(0.02, 0.01), [], "unhealthy since 2,048", "and dropout"),
        ("check/first_kl", values(5e-5, 5e-5), [], HIGH, ""),
        ("check/acting", values(1e-4, 1e-4), [], "unhealthy since 2,048", "the one that learns"),
        ("losses/approx_kl", values(0.06, 0.06), [], HIGH, ""),
        ("losses/approx_kl", values(0.06, 0.06), LOST, "unhealthy since ", "has lost a fifth of"),
        # The symptom is that of what was wrong, not of what is now.
        ("check/update", values(-0.1, 0), SOON, "unhealthy since ", "below that of random actions"),
        ("losses/approx_kl", values(0.06, 0.06)[:5], [], "", "too early to tell"),
        ("check/update", values(0, 0), np.arange(50), LOW, "has kept its gain"),
        ("losses/approx_kl", values(1e-3, 2e-3), np.arange(50), LOW, "has kept its gain"),
        # In a third of the committed healthy runs elsewhere, it is below 0.5.
        ("losses/explained_variance", values(0.3, 0.3), [], LOW, ""),
        # Equal returns do not tell whether value targets vary.
        (
            "losses/explained_variance",
            values(0.03, 0.03),
            [9, 9.1] * 15,
            "unhealthy since ",
            "target_std is not log",
        ),
        # A bad beginning or a quiet end alone is not unusual.
        ("losses/explained_variance", values(0.1, 0.8), [], "healthy", ""),
        ("losses/clipfrac", values(0.2, 0.01), [], "healthy", ""),
    ],
)
def test_what_is_wrong_now_was_wrong_or_is_only_unusual(metric, values, returns, verdict, text):
    said = check.report([run_of({metric: values}, returns)])
    (row,) = check.judge(run_of({metric: values}, returns))
    assert row["verdict"].startswith(verdict) and bool(row["verdict"]) == bool(verdict)
    assert bool(row["advice"]) == verdict.startswith("unhealthy") or not verdict
    assert text in said and ("kept" in said) == ("kept" in text)


@pytest.mark.parametrize(
    ("explained", "spread", "verdict"),
    [
        (np.r_[0.9, np.full(39, -3)], values(1.0, 0.02), "says nothing: value targets hardly vary"),
        (values(0.0, 0.01), values(1.0, 0.02), "unhealthy at 40,960"),  # while they varied
        (np.r_[1.0, np.full(39, 0.01)], np.r_[1.0, np.full(39, 0.02)], "says nothing: value tar"),
        (values(0.3, 0.2), values(1.0, 1.0), LOW),
        (np.full(40, -0.02), np.full(40, 1.0), "unhealthy since 40,960"),  # normalized advantages
    ],
)
def test_explained_variance_is_judged_by_the_spread_of_the_value_targets(
    explained, spread, verdict
):
    metrics = {"losses/explained_variance": explained, "check/target_std": spread}
    run = run_of(metrics, [9, 9.1] * 30)
    (row,) = check.judge(run)
    assert row["verdict"].startswith(verdict) and "not logged" not in "".join(row["advice"])
    assert bool(row["advice"]) == verdict.startswith("unhealthy")


@pytest.mark.parametrize(
    ("kl", "entropy", "returns", "verdict", "text"),
    [
        (3e-6, np.full(40, 4.25), np.zeros(50), "unhealthy since 20,480", "steps are lost between"),
        (0.0, np.full(40, 4.25), np.zeros(50), "unhealthy since 20,480", "steps are lost between"),
        (3e-6, np.linspace(4.3, 4.24, 40), np.arange(50), "unhealthy at 20,480", "steps are lost"),
        (3e-6, np.linspace(4.3, 1.3, 40), np.arange(50), LOW, ""),
        (0.0, np.linspace(4.3, 1.3, 40), LOST, "unhealthy since ", "is the ratio always 1?"),
    ],
)
def test_a_policy_that_stays_the_same_is_unhealthy(kl, entropy, returns, verdict, text):
    run = run_of({"losses/approx_kl": values(kl, kl), "losses/entropy": entropy}, returns)
    (row,) = check.judge(run)
    assert row["verdict"].startswith(verdict) and text in "".join(row["advice"])
    assert bool(row["advice"]) == bool(text)


def test_a_learning_rate_that_falls_to_0_does_not_make_a_run_unhealthy():
    kl, entropy = 0.01 * np.linspace(1, 0, 40) ** 4, np.linspace(4.3, 3.9, 40)
    (row,) = check.judge(run_of({"losses/approx_kl": kl, "losses/entropy": entropy}))
    assert kl[-10:].max() < 1e-4 and row["verdict"] == LOW


def test_the_gain_is_from_the_first_episodes_to_the_best_twentieth_in_a_row():
    for last, lost in ((17, True), (19, False)):
        assert check.return_lost(np.repeat([10, 0, 20, last], 20)) == lost
    assert check.return_lost(np.repeat([0, 10, 7], [400, 360, 40]))


@pytest.mark.parametrize(
    ("kl", "clipped", "gaussian", "verdicts"),
    [
        (0.003, 0.03, True, [LOW, LOW]),
        (0.003, 0.03, False, ["healthy", "healthy"]),  # as in CartPole
        (1e-4, 0.001, False, [LOW, LOW]),
        (0.01, 0.15, True, ["healthy", "healthy"]),
    ],
)
def test_small_updates_are_small_and_no_symptom(kl, clipped, gaussian, verdicts):
    metrics = {"losses/approx_kl": values(kl, kl), "losses/clipfrac": values(clipped, clipped)}
    run = run_of(metrics, np.arange(50), gaussian=gaussian)
    assert [x["verdict"] for x in check.judge(run)] == verdicts
    text = check.report([run])
    assert "ratio" not in text and "learning-rate" not in text
    assert "DEBUGGING.md: " not in text
    assert "No metric is unhealthy. That rules out little: many bugs leave " in text
    assert text.endswith("`python -m benchmark diff YOUR_COPY.py`.")
    assert "unhealthy" not in text.partition("Ranges are")[0]


def test_several_seeds_are_columns_of_one_table():
    runs = [
        run_of({"losses/approx_kl": values(x, x)}, np.arange(50), settings={"seed": str(seed)})
        for seed, x in ((1, 0.01), (3, 0.06), (2, 0.02))
    ]
    text = check.report(runs)
    row = next(x for x in text.splitlines() if x.startswith("losses/approx_kl"))
    assert row.split()[1:4] == ["0.01", "0.06", "0.02"]
    assert (
        row.endswith(f"healthy (seed 1, seed 2); {HIGH} (seed 3)") and text.count("\nmetric ") == 1
    )
    twice = check.report([runs[0], runs[0]])
    assert "run 1: x" in twice and "     run 1     run 2  usually" in twice


def test_short_iterations_are_judged_later():
    log = run_of({"check/update": np.zeros(20)}, np.r_[:100, [0] * 100], steps=ITERATIONS // 2)
    early = dataclasses.replace(log, updates=log.updates[:-1])
    verdicts = [check.judge(x)[0]["verdict"] for x in (early, log)]
    assert verdicts == ["", "unhealthy since 20,480"]


@pytest.mark.parametrize("changed", [True, False])
def test_the_last_line_names_the_changed_script_that_is_at_hand(changed):
    text = (ROOT / "ppo_minimal.py").read_text()
    Path("ppo_minimal.py").write_text(text.replace("0.99", "0.9") if changed else text)
    run = run_of({"losses/approx_kl": values(0.01, 0.01)}, np.arange(50))
    run = dataclasses.replace(run, path=Path("runs/A-v1__ppo_minimal__1__1790"))
    last = check.report([run]).splitlines()[-1]
    name = "ppo_minimal.py" if changed else "YOUR_COPY.py"
    assert last.endswith(f"Compare with the original: `python -m benchmark diff {name}`.")


@pytest.mark.parametrize(
    ("steps", "unit"),
    [([2048, 4096], "steps"), ([1, 2, 3], "updates"), ([0, 1, 2], "updates"), ([2048], "steps")],
)
def test_steps_are_called_updates_only_if_they_count_them(steps, unit):
    run = run_of({"losses/approx_kl": 0.01}, steps=steps)
    assert check.report([run]).splitlines()[0] == f"x: A-v1, {steps[-1]:,} {unit}"


@pytest.mark.parametrize("coefficient", [0.5, 0.0])
def test_without_a_penalty_a_large_kl_is_to_be_expected(coefficient):
    metrics = {"objective/kl_exact": 40.0, "objective/kl_coef": coefficient, "check/update": 0.2}
    text = check.report([run_of(metrics, steps=np.arange(1, 21))])
    assert ("unhealthy since 1" in text) == (coefficient > 0) and "20 updates" in text


@pytest.mark.parametrize(
    ("metric", "values", "verdict"),
    [
        ("kl", np.linspace(0, 2, 40), "healthy"),
        ("kl", np.zeros(40), "unhealthy since 9"),  # the reference is trained, too
        ("reward", np.zeros(40), "unhealthy since 9"),
    ],
)
def test_a_run_of_grpo_minimal_is_judged(tmp_path, command, metric, values, verdict):
    with SummaryWriter(str(tmp_path)) as writer:
        for update in range(40):
            for name, x in ({"reward": 0.5, "kl": 0.5} | {metric: values[update]}).items():
                writer.add_scalar(f"grpo/{name}", x, update)
    code, text = command("check", tmp_path)
    (row,) = (x for x in text.splitlines() if x.startswith(f"grpo/{metric} "))
    assert code == 0 and row.endswith(verdict) and "39 updates" in text


def test_a_run_of_dpo_that_prefers_the_rejected_answers_is_unhealthy():
    metrics = {"rewards/accuracy": values(0.4, 0.4), "rewards/margin": values(0.1, 0.1)}
    text = check.report([run_of(metrics, steps=np.arange(1, 41))])
    rows = {x.split()[0]: x for x in text.splitlines() if x.startswith("rewards/")}
    assert "unhealthy since 20" in rows["rewards/accuracy"] and "two log-probabilities" in text
    assert rows["rewards/margin"].endswith(" healthy")


def test_a_sampler_that_counts_padding_is_named():
    metrics = {"check/sampling": values(0.14, 0.01), "losses/approx_kl": values(0.01, 0.01)}
    text = check.report([run_of(metrics, steps=64 * np.arange(1, 41))])
    assert "unhealthy at 64" in text and "try --sampling-batch 1" in text
    assert "check/value_bias" not in text and "DEBUGGING.md: `check/sampling` above 0.1" in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_logs_what_its_rules_are_for(name):
    rules = RULES.get(name, check.ENVIRONMENTS)
    metrics = {x for x in (ROOT / name).read_text().split('"') if "/" in x and " " not in x}
    assert check.rules_of(pd.Index(metrics)) is rules
    also = {"check/value_bias"} if name == "ppo_vector_env.py" else set()
    assert {*check.metrics_of(rules)} - metrics <= {"check/acting", *also}
    assert (check.TARGETS in metrics) == (rules in (check.ENVIRONMENTS, check.CONVERSATIONS))


def test_stages_of_rlhf_are_found_and_others_are_not(tmp_path):
    metrics = {"objective/kl_exact": 5.0, "losses/k3": 0.1, "check/update": 0.2}
    for name, saved in (("sft", {"model": {}}), ("grpo", {"updates": [metrics]})):
        (tmp_path / name).mkdir()
        torch.save(saved, tmp_path / name / "checkpoint.pt")
    (log,) = logs.find(str(tmp_path))
    assert log.path.name == "grpo" and check.rules_of(log.updates.columns) is check.GRPO


def test_episodes_are_read_in_both_forms():
    rows = [{"global_step": 5, "return": 1.5, "length": 5}]
    columns = {x: torch.tensor([y]) for x, y in rows[0].items()}
    for found in (rows, columns):
        assert record.episodes_of({"episodes": found}).to_dict("records") == rows
    assert record.episodes_of({"episodes": []}).empty and record.episodes_of({}).empty


def test_an_episode_that_ends_with_the_last_step_of_an_update_counts_in_it():
    returns = np.repeat([0, 10, 0], [100, 296, 404])  # that of step 40,000 makes the gain lost
    steps = 2000 * np.arange(1, 41)
    (row,) = check.judge(run_of({"losses/approx_kl": values(0.06, 0.06)}, returns, steps=steps))
    assert row["verdict"] == "unhealthy since 40,000"
