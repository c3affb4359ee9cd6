"""How runs are read: which folders are runs, and what is known of them."""

import os

import numpy as np
import pandas as pd
import pytest
import torch
from foreign_logs import PENDULUM, write_cleanrl, write_plain
from tensorboard.summary.writer.event_file_writer import AtomicCounter
from torch.utils.tensorboard import SummaryWriter

from benchmark import logs
from benchmark.lab import record
from benchmark.lab.provenance import BenchmarkError


def scores(found):
    return sorted(x.score for x in found)


# --- Which folders are runs ---


def test_links_of_weights_and_biases_are_not_counted(tmp_path):
    write_plain(tmp_path / "run")
    inside = tmp_path / "run/wandb/offline-run-1/files"
    inside.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (tmp_path / "run").glob("events*"):
        (inside / path.name).symlink_to(path)
        (elsewhere / path.name).symlink_to(path)
    found, (copy,) = logs.search(str(tmp_path))
    assert len(found) == 1 and copy.endswith(f"run: a copy of {elsewhere}")


def test_linked_run_folders_are_followed_once(tmp_path):
    for name in "abc":
        write_plain(tmp_path / "disk" / name)
    (tmp_path / "runs").mkdir()
    for name in "ab":
        (tmp_path / "runs" / name).symlink_to(tmp_path / "disk" / name)
    (tmp_path / "runs/again").symlink_to(tmp_path / "disk/a")
    (tmp_path / "runs/round").symlink_to(tmp_path / "runs")
    assert len(logs.find(str(tmp_path / "runs"))) == 2
    assert len(logs.find(str(tmp_path))) == 3


@pytest.mark.parametrize("both", [True, False])
def test_returns_of_a_second_writer_count_only_if_the_first_has_none(tmp_path, both):
    write_plain(tmp_path / "eval", level=900.0, metrics=False)
    write_plain(tmp_path / "train", returns=both)
    found, left_out = logs.search(str(tmp_path))
    assert [x.path.name for x in found] == ["eval", "train"][both:] and len(left_out) == both
    assert not both or "eval: returns alone, next to the training metrics in train" in left_out[0]


def test_what_add_hparams_writes_is_no_run(tmp_path):
    write_plain(tmp_path / "run")
    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_hparams({"lr": 0.5, "env_id": "A-v1"}, {"charts/episodic_return": 3.0})
    found, left_out = logs.search(str(tmp_path))
    assert len(found) == len(left_out) == 1 and left_out[0].endswith("written by add_hparams")


# --- What is known of a run ---


@pytest.mark.parametrize(
    "saved",
    [
        torch.nn.Linear(2, 2),
        torch.nn.Linear(2, 2).state_dict(),
        [torch.zeros(2)],
        {"model": torch.zeros(2), "args": {"lr": 1.0}},
        {"updates": 7},
        {"updates": [{"global_step": 1}], "args": 7},
        b"damaged",
    ],
)
def test_the_log_next_to_a_checkpoint_of_somebody_else_is_read(tmp_path, saved):
    write_plain(tmp_path)
    if isinstance(saved, bytes):
        (tmp_path / "checkpoint.pt").write_bytes(saved)
    else:
        torch.save(saved, tmp_path / "checkpoint.pt")
    assert scores(logs.find(str(tmp_path))) == [100]
    next(tmp_path.glob("events*")).unlink()
    with pytest.raises(BenchmarkError, match=r": checkpoint\.pt (cannot|has no)") as said:
        logs.find(str(tmp_path))
    assert "\n" not in str(said.value)


def test_of_two_runs_in_one_folder_the_last_counts(tmp_path, monkeypatch):
    writer = "tensorboard.summary.writer.event_file_writer"
    monkeypatch.setattr(f"{writer}._global_uid", AtomicCounter(9))  # in the names of files: 9, 10
    write_plain(tmp_path, 1000.0, last=200_000)
    write_plain(tmp_path, 10.0, last=50_000)
    (log,) = logs.find(str(tmp_path))
    assert log.episodes["global_step"].is_monotonic_increasing and log.score == 10
    assert (len(log.episodes), len(log.updates), log.steps) == (50, 50, 50_000)
    assert "only the last counts" in log.note


def test_a_run_that_was_continued_keeps_its_beginning(tmp_path):
    write_plain(tmp_path, 1000.0, last=100_000)
    with SummaryWriter(str(tmp_path)) as writer:  # from the checkpoint at 80,000
        for step in range(81_000, 150_001, 1000):
            writer.add_scalar("charts/episodic_return", 10.0, step - 7)
            writer.add_scalar("losses/approx_kl", 0.01, step)
    (log,) = logs.find(str(tmp_path))
    steps = log.episodes["global_step"]
    assert steps.is_monotonic_increasing and steps.is_unique and len(steps) == 150
    assert (log.returns == 1000).sum() == 80 and log.note


def test_files_of_a_run_are_read_in_the_order_of_their_names(tmp_path, monkeypatch):
    """As TensorBoard does; in a folder, a file may be listed before the one that it continues."""
    for index, clock in enumerate((1, 2, 3)):
        monkeypatch.setattr("time.time", lambda now=clock: 1.7e9 + now)
        with SummaryWriter(str(tmp_path)) as writer:
            for step in range(50 * index, 50 * index + 60):
                writer.add_scalar("charts/episodic_return", index, 1000 * step)
                writer.add_scalar("losses/approx_kl", 0.01, 1000 * step)
    (log,) = logs.find(str(tmp_path))
    assert log.returns.value_counts().to_dict() == {0: 50, 1: 50, 2: 60} and log.note


def test_environments_that_run_side_by_side_may_log_steps_out_of_order(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in np.arange(100, 19_900, 100).reshape(-1, 2)[:, ::-1].flatten():
            writer.add_scalar("charts/episodic_return", 1.0, step)
    (log,) = logs.find(str(tmp_path))
    assert len(log.episodes) == 198 and log.episodes["global_step"].is_monotonic_increasing
    assert not log.note


def test_scalars_in_the_newer_form_and_other_tensors_are_read_or_skipped(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1000, 20_001, 1000):
            writer.add_scalar("charts/episodic_return", 100.0, step, new_style=True)
            writer.add_scalar("losses/approx_kl", 0.01, step, new_style=True)
        writer.add_pr_curve("pr", np.array([0, 1]), np.array([0.1, 0.9]), 1)
        writer.add_text("notes", "| a | b |", 1)
    (log,) = logs.find(str(tmp_path))
    assert (log.score, len(log.updates), log.settings) == (100, 20, {})


def test_the_environment_is_what_the_run_says_whatever_the_folders_are_called(tmp_path):
    place = tmp_path / "study-v2/MiniGrid-Empty-5x5-v0"
    write_plain(place / "PPO_1")
    write_cleanrl(place)
    found = [x.environment for x in logs.find(str(tmp_path))]
    assert sorted(found) == [PENDULUM, "unknown"]
    named = {x.environment for x in logs.search(str(tmp_path), "Mine-v0")[0]}
    assert named == {"Mine-v0", PENDULUM}


def test_a_run_is_called_by_the_simulator_that_it_ran(tmp_path):
    """In checkpoints and in logs, also where the settings keep the default environment."""
    settings = {"env_id": "HalfCheetah-v4", "make": "robots:arm"}
    for name, own in (("arm", settings), ("cheetah", settings | {"make": None})):
        (tmp_path / name).mkdir()
        updates = [{"global_step": 10, "losses/approx_kl": 0.1}]
        torch.save({"updates": updates, "args": own}, tmp_path / name / "checkpoint.pt")
        write_plain(tmp_path / f"log-{name}", **own)
    found = {x.path.name: x.environment for x in logs.find(str(tmp_path))}
    assert found == {
        **{"arm": "robots:arm", "log-arm": "robots:arm"},
        **{"cheetah": "HalfCheetah-v4", "log-cheetah": "HalfCheetah-v4"},
    }


def test_language_models_are_trained_on_prompts_with_a_reward_or_in_an_environment():
    mine = {"env": "sums", "prompts": "a/my.jsonl", "reward": "task:exact"}
    assert logs.environment_of(mine) == "a/my.jsonl task:exact"
    assert logs.environment_of(mine | {"prompts": "None", "reward": "None"}) == "sums"
    assert logs.environment_of(mine | {"env": "game:make"}) == "game:make"  # given in Python


@pytest.mark.parametrize("in_log", [False, True])
def test_a_run_that_keeps_only_its_last_episodes_has_a_whole_curve(tmp_path, in_log, monkeypatch):
    """Iterations of 10 steps, in each of which an episode ends; the last 20 of 100 are kept."""
    monkeypatch.setattr(logs, "KEPT", 20)
    steps = range(10, 1001, 10)
    updates = [{"global_step": x, "losses/approx_kl": 0.1, "charts/SPS": 1.0} for x in steps]
    with SummaryWriter(str(tmp_path)) as writer:  # some scripts have returns only there
        for x, update in zip(steps, updates):
            place = {} if in_log else update
            place["charts/episodic_return"] = float(x)
            writer.add_scalar("charts/episodic_return", float(x), x)
    kept = [{"global_step": x - 3, "return": float(x), "length": 10} for x in steps][-20:]
    saved = {"updates": updates, "episodes": kept, "args": {"total_timesteps": 1000}}
    torch.save(saved, tmp_path / "checkpoint.pt")
    (log,) = logs.find(str(tmp_path))
    assert log.column("return")[1].tolist() == [*steps] and log.until(200).score == 195
    assert log.scored == (955, "last tenth of the steps") and "means of iterations" in log.note
    facts, curve = record.summarize_steps(tmp_path, log.episodes)
    assert curve["return"].tolist() == [*steps] and facts["mean_return"] == 505
    saved["episodes"] = [{"global_step": x, "return": 1.0, "length": 10} for x in steps]
    torch.save(saved, tmp_path / "checkpoint.pt")  # which has them all
    (log,) = logs.find(str(tmp_path))
    assert not log.averaged and not log.note and len(log.episodes) == 100


# --- Scores ---


@pytest.mark.parametrize(
    ("lengths", "over", "returns"),
    [
        ([1000] * 1000, "last 100 episodes", range(900, 1000)),
        # They cover a fifth of the run, or more.
        ([100] * 500, "last 100 episodes", range(400, 500)),
        ([100] * 499, "last tenth of the steps", range(449, 499)),
        # Episodes have become long: fewer than ten end in the last tenth.
        ([20] * 600 + [1000] * 18, "last 10 episodes, or all", range(608, 618)),
        ([1000] * 7, "last 10 episodes, or all", range(7)),
    ],
)
def test_the_score_is_of_the_end_of_the_run(lengths, over, returns):
    ends = np.cumsum(lengths)
    episodes = pd.DataFrame({"global_step": ends, "return": np.arange(len(ends), dtype=float)})
    updates = pd.DataFrame({"global_step": [ends[-1]]})
    log = logs.Log(None, "A-v1", updates, episodes)
    assert log.scored == (np.mean(returns), over)


def test_the_beginning_of_a_run_is_scored_by_what_it_has():
    table = pd.DataFrame({"global_step": 1000 * np.arange(1, 21), "return": np.arange(20.0)})
    log = logs.Log(None, "A-v1", table, table, averaged="iteration", recorded=99.0)
    cut = log.until(9_950)
    assert (cut.steps, cut.score, log.until(9_500).steps) == (10_000, 9, 9_000)
    assert log.until(19_900).score == 99


def test_a_picture_that_cannot_be_written_does_not_stop_a_check(tmp_path, command, drawn):
    write_cleanrl(tmp_path / "a")
    write_cleanrl(tmp_path / "b")
    (run,) = (tmp_path / "a").iterdir()
    for place in (run / "check.png", tmp_path / "compare.png"):
        os.mkdir(place)  # the tests may be root, who can write everywhere
    code, text = command("check", "a")
    assert code == 0 and "check.png cannot be written: Is a directory" in text
    assert "No metric is unhealthy. That rules out little" in text.split("\n\n")[-1]
    code, text = command("compare", "a", "b")
    assert code == 0 and "compare.png cannot be written" in text


def test_a_log_of_returns_alone_has_nothing_to_check(tmp_path, command):
    write_plain(tmp_path, metrics=False)
    code, text = command("check", tmp_path)
    assert code == 0 and "No metric could be checked. That rules out" in text.split("\n\n")[-1]
    assert "return " in text and not (tmp_path / "check.png").exists()
