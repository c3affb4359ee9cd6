"""`seeds`, `compare` and `check` on real scripts and on logs as others really write them."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmark import check, logs
from benchmark.provenance import ROOT

SEED_ONLY = "import argparse as a; p = a.ArgumentParser(); p.add_argument('--seed'); p.parse_args()"


@pytest.fixture
def command(command):
    """The same for a line of text, in which SCRIPT stands for a path."""
    return lambda line, script=None: command(
        *(script if x == "SCRIPT" else x for x in line.split())
    )


# --- seeds of scripts without environments, without --run-name, without --resume ---


@pytest.mark.slow
def test_models_of_rlhf_are_summed_up_over_seeds(command):
    line = "seeds SCRIPT --seeds 2 --workers 1 --sft-documents 300 --sft-steps 3 --num-pairs 80"
    line = f"{line} --reward-epochs 1 --num-updates 2 --batch-size 16", ROOT / "ppo_rlhf_toy.py"
    code, text = command(*line)
    head = "| model | seeds | gold | proxy | KL | EOS rate | unique | repetition | tokens | minutes"
    assert code == 0 and head in text and re.search(r"\| sft \| 2 \| -?\d\.\d\d ± ", text), text
    assert re.search(r"\| ppo-none \| 2 \|", text)
    # A script that has ended although its benchmark was killed is neither resumed nor repeated.
    folder = Path("runs/ppo_rlhf_toy")
    assert not (folder / "episodes.csv").exists()
    (folder / "seed2/result.json").unlink()
    first, _ = (folder / "ppo_rlhf_toy.jsonl").read_text().splitlines()
    (folder / "ppo_rlhf_toy.jsonl").write_text(f"{first}\n")
    ended = (folder / "seed2/output.txt").stat().st_mtime
    code, text = command(*line)
    assert code == 0 and "seed2 has ended" in text and "| sft | 2 |" in text
    assert (folder / "seed2/output.txt").stat().st_mtime == ended
    code, text = command("compare runs/ppo_rlhf_toy/seed1 runs/ppo_rlhf_toy/seed2")
    assert code == 2 and "has no episodes, so there is nothing to compare" in text


def test_a_script_that_only_logs_is_summed_up_by_its_last_tenth(command):
    line = "seeds SCRIPT --seeds 2 --sft-steps 2 --num-updates 10 --num-prompts 2"
    code, text = command(line, ROOT / "grpo_minimal.py")
    columns = "grpo/reward | grpo/kl | grpo/groups_without_spread"
    assert code == 0 and f"| seeds | {columns} | minutes per run |" in text, text
    assert "\n| 2 | 0.00 ± 0.00 |" in text
    code, text = command("seeds SCRIPT --env-ids A-v1", ROOT / "grpo_minimal.py")
    assert code == 2 and text == "Error: grpo_minimal.py has no --env-id: leave --env-ids out.\n"


def test_a_script_that_names_its_own_folder_runs_in_its_default_environment(command):
    line = "seeds SCRIPT --seeds 2 --total-timesteps 2048 --num-steps 1024 --num-minibatches 4"
    code, text = command(line, ROOT / "ppo_minimal.py")
    assert code == 0 and re.search(r"\| HalfCheetah-v4 \| 2 \| -\d+ ± \d+", text), text
    assert "means over the last tenth" in text
    folder = Path("runs/ppo_minimal")
    assert (folder / "curves.png").exists() and not (folder / "episodes.csv").exists()
    run, _ = logs.find("runs/ppo_minimal")
    assert run.averaged == "iteration" and run.score == run.returns.iloc[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", "does not start: ModuleNotFoundError: No module named"),
        ("", "x.py has no --seed."),
        ("import time; time.sleep(9)", "x.py --help did not end within 1 seconds."),
    ],
)
def test_what_is_no_script_is_one_sentence(command, monkeypatch, text, message):
    monkeypatch.setattr("benchmark.seeds.HELP", 1)
    Path("x.py").write_text(text)
    code, said = command("seeds x.py --env-ids A-v1")
    assert code == 2 and message in said and said.count("\n") == 1


def test_a_script_that_leaves_nothing_is_named_with_what_it_lacks(command):
    Path("x.py").write_text(SEED_ONLY)
    code, text = command("seeds x.py --seeds 1")
    assert code == 2 and "seed1 left no checkpoint.pt, no results.json and no TensorBoard" in text


def test_a_mistake_in_a_flag_of_a_real_script_is_told_and_its_correction_needs_no_new_name(command):
    line, script = "seeds SCRIPT --env-ids InvertedPendulum-v5", ROOT / "ppo_continuous_action.py"
    code, text = command(f"{line} --nonsense 3", script)
    assert code == 2 and "not start: Unrecognized options: --nonsense, 3\n" in text
    code, text = command(f"{line} --gamma 7", script)
    assert code == 2 and "does not start: --gamma (7.0) must be at most 1." in text, text


def test_a_folder_of_something_else_is_left_alone(command):
    Path("runs/x").mkdir(parents=True)
    Path("x.py").write_text(SEED_ONLY)
    code, text = command("seeds x.py --seeds 1")
    assert code == 2 and "runs/x is there, but not of `seeds`: give another --name." in text


# --- check ---


@pytest.mark.parametrize(("value", "advice"), [(0.02, "Values do not learn"), (0.3, "Usual early")])
def test_explained_variance_is_called_broken_only_near_zero(value, advice):
    """In a third of the committed healthy runs elsewhere, it is below 0.5."""
    updates = pd.DataFrame({"global_step": 2048 * np.arange(1, 26)})
    updates["losses/explained_variance"] = value
    episodes = pd.DataFrame({"global_step": [1], "return": [1.0]})
    (row,) = check.judge(logs.Log(Path("x"), {"environment": "A-v1"}, updates, episodes))
    assert row["verdict"] == "unusual" and row["advice"].text.startswith(advice)


def test_a_bad_beginning_or_a_quiet_end_alone_is_not_unusual():
    updates = pd.DataFrame({"global_step": 2048 * np.arange(1, 41)})
    updates["losses/explained_variance"] = np.r_[np.full(30, 0.1), np.full(10, 0.8)]
    updates["losses/clipfrac"] = np.r_[np.full(30, 0.2), np.full(10, 0.01)]
    updates["losses/approx_kl"] = np.r_[np.full(30, 1e-4), np.full(10, 1e-3)]
    episodes = pd.DataFrame({"global_step": np.arange(30), "return": 1.0})
    log = logs.Log(Path("x"), {"environment": "A-v1"}, updates, episodes)
    verdicts = {x["metric"]: x["verdict"] for x in check.judge(log)}
    assert [*verdicts.values()] == ["unusual", "healthy", "healthy"]
    assert "kept" not in check.report(log)  # too few episodes for that
