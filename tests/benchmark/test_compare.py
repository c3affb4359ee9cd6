"""`compare` and `table`: scores and chances of runs, of suites and of logs of others."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from foreign_logs import PENDULUM, write_cleanrl, write_plain, write_values
from scipy import stats
from stable_baselines3 import PPO

from benchmark.evidence import pages
from benchmark.lab import compare, logs, plots, statistics
from benchmark.lab.provenance import BenchmarkError


@pytest.mark.slow
def test_a_log_of_stable_baselines3_is_compared_and_checked(tmp_path, command, drawn):
    size = {"n_steps": 256, "batch_size": 256, "n_epochs": 1, "device": "cpu"}
    PPO("MlpPolicy", PENDULUM, seed=0, tensorboard_log="sb3", **size).learn(512)
    write_cleanrl(tmp_path / "cleanrl")
    code, text = command("compare", "cleanrl", "sb3")
    assert code == 2 and f"cleanrl has {PENDULUM}; sb3 has unknown. Where logs do not" in text
    code, text = command("compare", "cleanrl", "sb3", "--env-id", PENDULUM)
    assert code == 0 and f"cleanrl: {PENDULUM}, seed 1\nsb3: {PENDULUM}, 1 run\n" in text
    assert f"{PENDULUM}: compared at 512 of up to 81,920 steps, since sb3/PPO_1 ends" in text
    assert f"| {PENDULUM} | 1.0 (1) |" in text  # the only episode that had ended by then
    assert text.splitlines()[-1].startswith("No difference between sb3 and cleanrl can be shown")
    assert plots.Image.open("compare.png").width > 600
    (log,) = logs.find("sb3")
    assert log.averaged and log.steps == 512 and log.score == log.returns.iloc[-1] > 5
    assert {"losses/approx_kl", "losses/clipfrac", "losses/entropy"} < {*log.updates}
    assert (log.updates["losses/entropy"].dropna() > 0).all()  # SB3 logs its negative
    code, text = command("check", "sb3/PPO_1")
    assert code == 0 and "too early to tell" in text and "paste the functions in" in text
    lacks = "check/value_bias, check/update, check/first_kl, check/acting"
    assert f"Not logged, so not checked: {lacks}." in text
    assert Path("sb3/PPO_1/check.png").exists()


def test_scores_and_chances_are_those_of_the_end_of_the_runs(tmp_path, command):
    for seed, gain in enumerate((1.0, 2.0, 4.0), start=1):
        write_cleanrl(tmp_path / "a", seed, gain=gain)
        write_cleanrl(tmp_path / "b", seed, gain=gain + 1.5)
        write_cleanrl(tmp_path / "c", seed, gain=gain + 10)
    code, text = command("compare", "a", "b", "c")
    mean = np.mean([i + k for i in range(37, 41) for k in range(5)])  # of the last tenth, of gain 1
    a, b = mean * 7 / 3, mean * (7 / 3 + 1.5)
    assert code == 0 and f"| {PENDULUM} | {a:.1f} [" in text and f"| {b:.0f} [" in text
    assert f"a: {PENDULUM}, seeds 1, 2, 3\n" in text and "| last tenth of the steps |" in text
    assert "| 0.78 [" in text  # 7 of 9 pairs
    *_, of_b, of_c = text.splitlines()
    assert of_b.startswith("No difference between b and a can be shown: the interval of the ")
    assert re.search(r"contains 0\.5\. A t-test would miss a difference of \d+ in one of", of_b)
    # Of the 20 ways to deal out six scores, two separate them as much.
    certain = "c may be better: a run of it beats one of a with probability 1.00 [1.00, 1.00]. "
    certain += "All resamples agree, which few seeds often do: it may be closer to 0.5. "
    assert of_c.startswith(f"{certain}But 3 seeds are few: in ")
    assert 8 <= int(re.search(r"in (\d+)% of such comparisons", of_c)[1]) <= 12
    assert of_c.endswith("two equal settings differ this much, and this is one of 2.")


def test_with_many_seeds_the_better_group_is_named_first_or_last(tmp_path, command):
    for seed in range(1, 7):
        write_plain(tmp_path / "a" / f"{seed}", 100.0 + seed)
        write_plain(tmp_path / "b" / f"{seed}", 50.0 + seed)
    for words in (("a", "b"), ("b", "a")):
        code, text = command("compare", *words)
        assert code == 0
        beats = "a run of it beats one of b with probability 1.00 [1.00, 1.00]"
        assert text.splitlines()[-1].startswith(f"a is better: {beats}. All resamples agree")
        assert "are few" not in text


def test_each_environment_has_its_own_row_and_the_last_one_is_relative_to_best_and_worst():
    scores = {"A-v1": ((0, 2, 4), (10, 10, 10)), "B-v1": ((5, 5, 9), (1, 5, 5))}
    scores["C-v1"] = (3, 3, 3), (3, 3, 3)
    runs = [
        {"label": label, "environment": place, "score": x, "window": f"end of {place}"}
        for place, pair in scores.items()
        for label, values in zip("ab", pair)
        for x in values
    ]
    runs = pd.DataFrame(runs).astype({"label": "category"})
    rows = [x.split("|") for x in compare.table(runs).splitlines()[2:]]
    assert [x[-2].strip() for x in rows] == [*(f"end of {x}" for x in scores), ""]
    found = [[x.split()[0] for x in row[2:5]] for row in rows]
    assert found[:3] == [["2.0", "10.0", "1.00"], ["6.3", "3.7", "0.22"], ["3.0", "3.0", "0.50"]]
    assert found[3] == ["0.29", "0.44", "0.57"]  # means of 0.2, 2/3, 0 and of 1, 1/3, 0


def test_of_three_comparisons_each_must_be_a_third_as_likely_by_chance():
    """Of the 70 ways to deal out eight scores, two separate them as much: 3 %."""
    index = pd.MultiIndex.from_product([["a", "b"], range(4)], names=["label", "seed"])
    scores = pd.DataFrame({"A-v1": np.arange(8.0)}, index)
    assert compare.verdict_on(scores, "b", "a", 1).startswith("b is better")
    assert compare.verdict_on(scores, "b", "a", 3).startswith("b may be better")


def test_runs_of_one_seed_and_runs_that_end_in_nan_are_no_evidence(tmp_path, command):
    for seed in (1, 2, 3):
        write_cleanrl(tmp_path / "a", seed)
        write_cleanrl(tmp_path / "b", seed, gain=2.0)
    write_cleanrl(tmp_path / "b/again", 2, gain=2.1)
    code, text = command("compare", "a", "b")
    assert code == 2 and f"b: {PENDULUM} has seed 2 more than once." in text
    shutil.rmtree("b/again")
    write_cleanrl(tmp_path / "b", 4, gain=math.nan)
    code, text = command("compare", "a", "b")
    assert code == 2 and "its returns end in NaN. Without it, its group would look" in text


def test_a_run_that_ended_early_is_named_right_above_the_verdict(tmp_path, command):
    for name, last in (("a/1", 20_000), ("a/2", 20_000), ("b/1", 20_000), ("b/2", 9_000)):
        write_plain(tmp_path / name, last=last, env_id="Mine-v0", seed=name[-1])
    code, text = command("compare", "a", "b")
    note, said = text.splitlines()[-2:]
    assert code == 0 and said.startswith("No difference")
    assert note == "Mine-v0: compared at 9,000 of up to 20,000 steps, since b/2 ends there."


def test_the_smallest_visible_difference_is_noticed_in_four_of_five_experiments():
    rng = np.random.default_rng(0)
    a, b = rng.normal(10, 1, size=(1000, 8)), rng.normal(10, 1, size=(1000, 2))
    sizes = [statistics.smallest_visible(x, y) for x, y in zip(a, b)]
    shift = np.sqrt(np.mean(np.square(sizes)))
    noticed = stats.ttest_ind(a + shift, b, axis=1).pvalue < 0.05
    assert 0.74 < noticed.mean() < 0.86


@pytest.mark.slow
def test_rows_of_suites_are_compared_by_their_committed_scores(command, committed):
    place = ("--results", committed.results)
    code, text = command("compare", "figure3", "table1:clip-0.2", *place)
    own = [x["score"] for x in map(json.loads, (committed.results / "figure3.jsonl").open())
           if x["environment"] == "Hopper-v4" and x["variant"] == ""]  # fmt: skip
    assert code == 0
    assert f"| Hopper-v4 | {stats.trim_mean(own, 0.25):.0f} [" in text
    assert "| all (0: worst run, 1: best) |" in text and "Left out, since not all have it:" in text


def test_each_word_is_a_group_named_as_it_was_typed(tmp_path, command):
    for name, rate in (("default", 1), ("lr-0.0003", 2), ("lr-0.003", 3)):
        write_cleanrl(tmp_path / "runs" / name, gain=rate, learning_rate=rate)
    names = [f"runs/{x}" for x in ("default", "lr-0.0003", "lr-0.003")]
    code, text = command("compare", *names)
    assert code == 0 and f"| {' | '.join(names)} | P(" in text
    rates = [
        f"{x} differs from {names[0]} in learning_rate (1, {i})." for i, x in enumerate(names, 1)
    ]
    assert "\n".join(rates[1:]) in text
    code, text = command("compare", "runs/default/", "runs/lr*")
    assert code == 2 and "differ in learning_rate (2, 3). Give the runs of each" in text


@pytest.mark.parametrize(
    ("more", "differs"),
    [
        ({}, ""),
        ({"exp_name": "other", "track": True}, ""),
        ({"learning_rate": 0.1}, "learning_rate (none, 0.1)"),
        ({"environment": "Hopper-v4", "learning_rate": 0.1}, ""),
    ],
)
def test_only_runs_whose_settings_agree_in_all_but_seed_and_name_are_seeds(
    tmp_path, command, more, differs
):
    write_cleanrl(tmp_path / "a", 1)
    write_cleanrl(tmp_path / "a/other", 2, **more)
    write_cleanrl(tmp_path / "b", 1)
    code, text = command("compare", "a", "b")
    assert (code == 2) == bool(differs) and differs in text
    assert "are not seeds of one setting" in text or not differs


def test_logs_without_settings_are_seeds_only_in_one_folder_or_by_request(tmp_path, command):
    for task, level in (("MiniGrid-Empty-5x5-v0", 9.0), ("MiniGrid-DoorKey-5x5-v0", 1.0)):
        for seed in (1, 2):
            write_plain(tmp_path / "a" / task / f"PPO_{seed}", level)
            write_plain(tmp_path / "b" / task / f"PPO_{seed}", level + seed)
    code, text = command("compare", "a", "b")
    assert code == 2 and "a: environment unknown, 4 runs in a/MiniGrid-DoorKey-5x5-v0 (2)" in text
    assert "a has 4 runs in 2 folders, and their logs name neither environment nor setti" in text
    code, text = command("compare", "a", "b", "--env-id", "Mine-v0")
    assert code == 0 and "| Mine-v0 | 5.0 [" in text
    assert "a: not all logs name their settings, so these may differ." in text
    code, text = command("compare", "a/MiniGrid-Empty-5x5-v0", "b/MiniGrid-Empty-5x5-v0")
    assert code == 0 and "| unknown | 9.0 (2) | 10.5 (2) |" in text


def test_what_is_left_out_is_said(tmp_path, command):
    write_cleanrl(tmp_path / "a")
    write_cleanrl(tmp_path / "b")
    write_values(tmp_path / "b/other", "grpo/reward", [1.0])
    write_plain(tmp_path / "b/silent", returns=False)
    code, text = command("compare", "a", "b")
    assert code == 0 and "Left out: b/other: no metric of PPO." in text
    reason = "it logs no returns. Either no episode has ended in its 20,000 steps, or its environ"
    assert f"Left out: b/silent: {reason}" in text


@pytest.mark.parametrize(
    "words", [("a", "a/b"), ("a", "./a"), ("a/b", "link"), ("a", "copy"), ("figure3", "figure3:")]
)
def test_a_run_that_two_groups_have_is_refused(tmp_path, command, words, committed):
    for seed in (1, 2):
        write_plain(tmp_path / f"a/b/{seed}")
    (tmp_path / "link").symlink_to("a")
    shutil.copytree("a/b/1", "copy/1")
    code, text = command("compare", *words, "--results", committed.results)
    assert code == 2 and "would count on both sides: give folders or patterns" in text


def write_ours(
    folder, returns=(1.0,), script="ppo", note=None, imported="", length=1000, **settings
):
    """A checkpoint as our scripts save it, of episodes of one length, and a note of `seeds`."""
    folder.mkdir(parents=True)
    episodes = [{"global_step": length * i, "return": x} for i, x in enumerate(returns, start=1)]
    steps = length * max(1, len(episodes))
    run_id = f"A-v1__{script}__1__1700000000000000000"
    saved = {"args": {"env_id": "A-v1", **settings}, "updates": [{"global_step": steps}]}
    torch.save(saved | {"episodes": episodes, "run_id": run_id}, folder / "checkpoint.pt")
    if note:
        own = {"script": f"/home/me/{script}.py", "sha256": note * 64}
        own["imported"] = {"neighbor.py": imported}
        (folder / "note.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"note": "1"}, {"note": "1"}, "in no setting; the script is the same."),
        ({"note": "1"}, {"note": "1", "gamma": 0.9}, "in gamma (none, 0.9); the script is the"),
        ({"note": "1"}, {"note": "2"}, "in the script (ppo.py with hash "),
        ({"note": "1"}, {"note": "1", "imported": "3"}, "in the script (ppo.py with hash "),
        ({}, {"script": "mine"}, "in the script (ppo.py and mine.py)."),
        ({}, {"script": "mine", "gamma": 0.9}, "in gamma (none, 0.9) and the script (ppo.py and m"),
        ({}, {}, "in no setting.\nThe logs of a, b do not show whether their code is the same."),
    ],
)
def test_scripts_that_differ_are_named(tmp_path, command, a, b, said):
    write_ours(tmp_path / "a/1", **a)
    write_ours(tmp_path / "b/1", [2.0], **b)
    code, text = command("compare", "a", "b")
    assert code == 0 and f"b differs from a {said}" in text


@pytest.mark.parametrize("other", [{"script": "mine"}, {"note": "2"}])
def test_runs_of_two_scripts_are_not_seeds_of_one_setting(tmp_path, command, other):
    note = {"note": "1"} if "note" in other else {}
    write_ours(tmp_path / "a/1", seed=1, **note)
    write_ours(tmp_path / "a/2", seed=2, **other)
    write_ours(tmp_path / "b/1")
    code, text = command("compare", "a", "b")
    assert code == 2 and "a: its runs in one environment are of two scripts, ppo.py " in text


@pytest.mark.parametrize(
    ("length", "score", "window"),
    [(50, "1044", logs.TENTH), (500, "1044", logs.TENTH), (10_000, "1094", logs.LAST_10)],
)
def test_all_runs_in_an_environment_are_scored_over_one_window(
    tmp_path, command, length, score, window
):
    """Of 100,000 steps, in episodes of 50 and 500 steps (a), and of so many (b)."""
    write_ours(tmp_path / "a/1", range(2000), length=50, seed=1)
    write_ours(tmp_path / "a/2", range(200), length=500, seed=2)
    write_ours(tmp_path / "b/1", range(100_000 // length), length=length)
    assert {x.scored[1] for x in logs.find("a")} == {logs.LAST_100, logs.TENTH}
    code, text = command("compare", "a", "b")
    assert code == 0 and f"| {score} (2) |" in text and f"| {window} |\n" in text


def test_table_prints_that_of_a_suite(command, committed):
    code, text = command("table", "minimal", "--results", committed.results)
    assert code == 0 and any(text.strip() in page.read_text() for page in pages.PAGES)
    assert "No run of minimal is finished." in command("table", "minimal", "--results", "x")[1]


def test_runs_of_two_simulators_of_ones_own_are_no_pair_and_no_row(command):
    for name in ("walker", "arm"):
        for seed in (1, 2):
            settings = {"env_id": "HalfCheetah-v4", "make": f"robots:{name}", "seed": seed}
            write_plain(Path(name, str(seed)), **settings)
    code, text = command("compare", "walker", "arm")
    assert code == 2 and "walker has robots:walker; arm has robots:arm." in text
    code, text = command("check", ".")
    assert code == 0 and "HalfCheetah" not in text and text.count("\nmetric ") == 2


def test_code_that_logs_of_others_do_not_show_is_named(tmp_path, command):
    for name, own in (("a", "ppo"), ("b", "ppo_mine"), ("c", "ppo")):
        write_cleanrl(tmp_path / name, exp_name=own)
    code, text = command("compare", "a", "b", "c")
    assert code == 0 and "b differs from a in exp_name (ppo, ppo_mine).\n" in text
    assert "c differs from a in no setting.\nThe logs of a, b, c do not show whether th" in text


def test_the_settings_of_every_run_of_a_group_are_compared():
    settings = [{"seed": str(k), "gamma": "0.9"} for k in range(3)]
    runs = [logs.Log(Path(f"a/{x['seed']}"), "A-v1", None, None, settings=x) for x in settings]
    assert compare.require_seeds(logs.runs_table({"a": runs})) == []
    settings[2]["gamma"] = "0.8"
    with pytest.raises(BenchmarkError, match=r"differ in gamma \(0.9, 0.8\)"):
        compare.require_seeds(logs.runs_table({"a": runs}))


def test_runs_in_which_no_episode_ended_are_named_as_such(tmp_path, command):
    write_ours(tmp_path / "a/1")
    write_ours(tmp_path / "b/1", [])
    code, text = command("compare", "a", "b")
    assert code == 2 and text.endswith("b/1: no episode has ended in its 1,000 steps.\n")
