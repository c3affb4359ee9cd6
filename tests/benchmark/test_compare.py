"""`compare` and `table`: scores and chances of runs, of suites and of logs of others."""

import json
import shutil
from pathlib import Path

import numpy as np
from foreign_logs import PENDULUM, write_cleanrl, write_values
from scipy import stats
from stable_baselines3 import PPO

from benchmark.lab import compare, logs, plots, statistics
from benchmark.lab.definitions import Folders
from benchmark.paper import pages


def test_a_log_of_stable_baselines3_is_compared_and_checked(tmp_path, command):
    size = {"n_steps": 256, "batch_size": 256, "n_epochs": 1, "device": "cpu"}
    PPO("MlpPolicy", PENDULUM, seed=0, tensorboard_log="sb3", **size).learn(512)
    write_cleanrl(tmp_path / "cleanrl")
    code, text = command("compare", "cleanrl", "sb3")
    assert code == 0 and f"that does not name its environment is taken for {PENDULUM}." in text
    assert f"{PENDULUM}: compared at 512 steps, which all have reached." in text
    assert f"| {PENDULUM} | 5.0 (1) |" in text  # the only episode that had ended by then
    assert "sb3 and cleanrl: with 1 seed each, nothing can be said about a difference" in text
    assert plots.Image.open("compare.png").width > 600
    (log,) = logs.find("sb3")
    assert log.averaged and log.steps == 512 and log.score == log.returns.iloc[-1] > 5
    assert {"losses/approx_kl", "losses/clipfrac", "losses/entropy"} < {*log.updates}
    assert (log.updates["losses/entropy"].dropna() > 0).all()  # SB3 logs its negative
    code, text = command("check", "sb3/PPO_1")
    assert code == 0 and "too early to tell" in text and "def observed_returns" in text
    lacks = "check/acting, check/first_kl, check/update, check/value_bias"
    assert f"Not in this log, so not checked: {lacks}." in text
    assert Path("sb3/PPO_1/check.png").exists()


def test_scores_and_chances_are_those_of_the_last_hundred_episodes(tmp_path, command):
    for seed, gain in enumerate((1.0, 2.0, 4.0), start=1):
        write_cleanrl(tmp_path / "a", seed, gain=gain)
        write_cleanrl(tmp_path / "b", seed, gain=gain + 1.5)
    code, text = command("compare", "a", "b")
    mean = np.mean([i + k for i in range(21, 41) for k in range(5)])  # of the last 100, of gain 1
    a, b = mean * 7 / 3, mean * (7 / 3 + 1.5)
    assert code == 0 and f"| {PENDULUM} | {a:.1f} [" in text and f"| {b:.0f} [" in text
    assert "| 0.78 [" in text  # 7 of 9 pairs
    assert "b and a, 3 seeds each: in one environment, a difference of less than about" in text


def test_the_smallest_visible_difference_is_noticed_in_four_of_five_experiments():
    rng = np.random.default_rng(0)
    a, b = rng.normal(10, 1, size=(2, 4000, 5))
    sizes = [statistics.smallest_visible(x, y) for x, y in zip(a, b)]
    shift = 10 * np.sqrt(np.mean(np.square(sizes)))
    noticed = stats.ttest_ind(a + shift, b, axis=1).pvalue < 0.05
    assert 0.74 < noticed.mean() < 0.86


def test_rows_of_suites_are_compared_by_their_committed_scores(command, committed):
    place = ("--results", committed.results)
    code, text = command("compare", "figure3", "ablation:raw-rewards", *place)
    own = [x["score"] for x in map(json.loads, (committed.results / "figure3.jsonl").open())
           if x["environment"] == "Hopper-v4" and x["variant"] == ""]  # fmt: skip
    assert code == 0
    assert f"| Hopper-v4 | {stats.trim_mean(own, 0.25):.0f} [" in text
    assert "| all (0: worst run, 1: best) |" in text and "Left out, since not all have it:" in text
    code, text = command("compare", "figure3", "ablation:nothing", *place)
    assert code == 2 and "ablation:nothing is no row of a suite; there are ablation:" in text


def test_run_folders_that_differ_only_in_the_seed_are_one_group(tmp_path):
    for name in ("old-1", "old-2", "new-1", "new-2"):
        write_cleanrl(tmp_path / name)
    names = tuple(str(x) for x in sorted(tmp_path.iterdir()))
    groups = compare.groups_of(names, Folders(), {})
    assert {x: len(y) for x, y in groups.items()} == {"new": 2, "old": 2}
    assert len(compare.groups_of(names[:2], Folders(), {})) == 2  # else nothing would be compared
    both = (str(tmp_path / "old-*"), names[0])
    assert [len(x) for x in compare.groups_of(both, Folders(), {}).values()] == [2, 1]
    label = compare.label_of("runs/Hopper-v4__ppo_continuous_action__1__1790000000")
    assert label == "ppo_continuous_action"


def test_what_cannot_be_compared_is_one_sentence(tmp_path, command):
    write_cleanrl(tmp_path / "a")
    write_values(tmp_path / "short" / PENDULUM, "charts/episodic_return", [1.0, 2.0])
    write_cleanrl(tmp_path / "b", environment="Hopper-v5")
    write_values(tmp_path / "silent", "losses/approx_kl", [0.01])
    (tmp_path / "empty").mkdir()
    for words, message in (
        (("a", "nowhere"), "There is no folder nowhere."),
        (("a", "silent"), "silent logs no returns: wrap the environment in Record"),
        (("a", "b"), f"no environment that all have: a has {PENDULUM}; b has Hopper-v5."),
        (("a", "empty"), "empty has no checkpoint.pt and no TensorBoard log of PPO."),
        (("a", "short"), "no episode has ended by 1 steps."),
        (("a",), "To compare, give at least two"),
    ):
        code, text = command("compare", *words)
        assert code == 2 and message in text and text.count("\n") == 1, text
    (tmp_path / "file").touch()
    code, text = command("run", "smoke", "--runs", "file")
    assert code == 2 and text.startswith("Error: ") and "file/smoke: Not a directory.\n" in text


def test_table_prints_that_of_a_suite_and_report_works_with_one_suite(command, committed, tmp_path):
    place = ("--results", committed.results)
    code, text = command("table", "cartpole", *place)
    assert code == 0 and "CartPole-v1" in text and text.startswith("| ")
    assert any(text.strip() in page.read_text() for page in pages.PAGES)
    assert command("table", "bugs_healthy", *place)[0] == 2
    assert "No run of cartpole is finished." in command("table", "cartpole", "--results", "x")[1]
    for kind in ("jsonl", "csv"):
        shutil.copy(committed.results / f"cartpole.{kind}", tmp_path)
    blocks = {name: pages.block(name, Folders(tmp_path)) for name in pages.BLOCKS}
    assert blocks["noticed"] == "" and "CartPole-v1" in blocks["scripts"]
