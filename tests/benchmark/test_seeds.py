"""`seeds`: all runs of a script over environments and seeds, which may be interrupted."""

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from foreign_logs import write_values

import ppo_continuous_action as ppo
from benchmark import logs, record, seeds
from benchmark.__main__ import main
from benchmark.provenance import ROOT
from benchmark.report import plots

STAND_IN = Path(__file__).with_name("stand_in.py")
PENDULUM = "InvertedPendulum-v5"
MINE = ("seeds", "own/mine.py", "--env-ids", "A-v1")


@pytest.fixture
def forked(forked):
    """The stand-in as a changed copy in another folder, which imports a module next to it."""
    Path("own").mkdir()
    Path("own/neighbor.py").write_text("")
    Path("own/mine.py").write_text(f"import neighbor\n{STAND_IN.read_text()}")
    forked.runs = Path("runs/mine")
    return forked


def test_seeds_makes_all_runs_once_and_shows_them(forked):
    words = (*MINE, "B-v1", "--gain=-1", "--seeds", "3", "--workers", "3")
    text = forked.run(*words)
    # The mean of 1 to 20 is 10.5.
    assert "| A-v1 | 3 | -21.0 ± 8.6 | -21.0 [-31.5, -10.5] | -21.0 ± 8.6 | 0.01 |" in text
    lines = [json.loads(x) for x in Path("runs/mine/mine.jsonl").read_text().splitlines()]
    assert [(x["environment"], x["seed"], x["flags"], len(x["sha256"])) for x in lines] == [
        (x, y, "--gain=-1", 64) for x in ("A-v1", "B-v1") for y in (1, 2, 3)
    ]
    assert plots.Image.open("runs/mine/curves.png").width > 600
    assert "6 runs, 6 of them done before." in forked.run(*words)
    names = [f"{x}/seed{y}" for x in ("A-v1", "B-v1") for y in (1, 2, 3)]
    assert [[*forked.starts(x)] for x in names] == [[1]] * 6
    assert "| B-v1 | 3 |" in forked.run(*MINE, "--seeds", "4", "--gain=-1")
    text = forked.run(*MINE, "--seeds", "4", "--gain", "2", code=2)
    assert "Error: runs/mine has runs of another version of mine.py, or with other flags" in text


def test_interrupted_seeds_end_their_scripts_and_the_same_command_continues(forked):
    words, names = (*MINE, "--seeds", "7", "9"), ["A-v1/seed7", "A-v1/seed9"]
    process, _ = forked.start_until(7, *words, names=names)
    os.kill(process.pid, signal.SIGINT)
    forked.run(process=process, code=130)
    assert not any(Path(f"/proc/{forked.starts(x)[1]}").exists() for x in names)
    text = forked.run(*words)
    assert [[*forked.starts(x)] for x in names] == [[1, 6]] * 2
    assert "A-v1/seed7 continues" in text and "| A-v1 | 2 | 84.0 ± 10.5 |" in text


def test_the_others_wait_until_the_first_has_made_an_iteration(forked):
    process, _ = forked.start_until(0, *MINE, "--seeds", "2", names=["A-v1/seed1"])
    time.sleep(0.3)
    assert not Path("runs/mine/A-v1/seed2").exists()
    Path("runs/mine/A-v1/seed1/release").touch()
    forked.run(process=process)
    assert [*forked.starts("A-v1/seed2")] == [1]


def test_a_seed_that_fails_does_not_stop_the_others_and_is_named_at_the_end(forked):
    text = forked.run(*MINE, "--seeds", "3", "--workers", "1", code=2, crash="2")
    assert text.strip().endswith(
        "Error: 1 of 3 runs failed: A-v1/seed2 ended with exit code 1: Error: out of luck"
    )
    assert "| A-v1 | 2 | 21.0 ± 10.5 |" in text
    assert [*forked.starts("A-v1/seed3")] == [1]


def test_a_flag_that_the_script_refuses_is_said_before_other_runs_begin(forked):
    text = forked.run(*MINE, "--seeds", "3", "--no-such-flag", "1", code=2)
    assert "Error: mine.py does not start: " in text and "--no-such-flag" in text
    assert text.count("starts") == 1 and not Path("runs/mine/A-v1/seed2").exists()


def test_models_of_rlhf_are_summed_up_over_seeds(forked):
    text = forked.run(*MINE[:2], "--seeds", "2")
    assert "| model | seeds | gold |\n" in text and "| ppo | 2 | 1.50 ± 0.00 |" in text


def test_a_script_that_only_logs_is_summed_up_by_its_last_tenth(tmp_path):
    write_values(tmp_path, "grpo/reward", [0.1 * x for x in range(20)])
    facts, curve = logs.summarize(tmp_path, 3.0)
    assert facts["seconds"] == 3 and curve.empty
    (row,) = seeds.models_rows([facts["models"]] * 2)
    assert row == {"seeds": "2", "grpo/reward": "1.85 ± 0.00"}


def test_a_script_without_run_name_and_checkpoint_runs_in_its_default_environment(command):
    flags = "--seeds 1 --total-timesteps 1024 --num-steps 1024 --update-epochs 1"
    code, text = command("seeds", ROOT / "ppo_minimal.py", *flags.split())
    assert code == 0 and re.search(r"\|  \| 1 \| -\d+ \|", text), text
    assert "means over the last tenth" in text and Path("runs/ppo_minimal/curves.png").exists()
    (run,) = logs.find("runs/ppo_minimal")
    assert run.averaged == "iteration" and run.environment == "HalfCheetah-v4"
    assert seeds.flags_of(ROOT / "ppo_continuous_action.py") == seeds.OWN


TYRO = "import tyro\ndef main(seed: int = 1): pass\ntyro.cli(main)"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("import nothing_of_this_name", "", "does not start: ModuleNotFoundError: No module named"),
        ("", "", "x.py has no --seed."),
        (TYRO, "--env-ids A", "x.py does not start: Unrecognized options: --env-id, A"),
        (TYRO, "--nonsense 3", "not start: Unrecognized options: --nonsense, 3\n"),
        (TYRO, "", "seed1 left no checkpoint.pt, no results.json and no TensorBoard log\n"),
    ],
)
def test_what_a_script_lacks_is_said(command, text, words, message):
    Path("x.py").write_text(text)
    code, said = command("seeds", "x.py", "--seeds", "1", *words.split())
    assert code == 2 and message in said.splitlines(True)[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.py", "--env-ids", "A"), "nowhere.py does not start: "),
        ((STAND_IN, "--env-ids", "A", "--seed", "3"), "`seeds` itself gives --seed to the script"),
        ((STAND_IN, "--env-ids", "A", "--seeds", "-3", "1"), "A seed must not be negative: -3."),
        ((STAND_IN, "--env-ids", "A", "--workers", "0"), "--workers must be positive."),
    ],
)
def test_mistakes_are_one_sentence(command, words, message):
    code, text = command("seeds", *words)
    assert code == 2 and message in text and text.count("\n") == 1


@pytest.mark.slow  # the stand-in continues likewise, and the scripts' own tests resume to the bit
def test_a_killed_run_of_a_real_script_continues_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"seeds SCRIPT --env-ids {PENDULUM} --seeds 1 --total-timesteps 4096 --num-steps 64"
    line += " --num-minibatches 4 --update-epochs 2 --no-compile --checkpoint-interval 1"
    line = line.replace("SCRIPT", str(ROOT / "ppo_continuous_action.py")).split()
    process = multiprocessing.get_context("fork").Process(target=main, args=(line,))
    process.start()
    path = tmp_path / f"runs/ppo_continuous_action/{PENDULUM}/seed1/runs/run/checkpoint.pt"
    while not path.exists():
        assert process.is_alive()
        time.sleep(0.02)
    process.terminate()
    process.join()
    assert len(record.read_checkpoint(path)["updates"]) < 64
    main(line)
    saved = record.read_checkpoint(path)
    flags = {"total_timesteps": 4096, "num_steps": 64, "num_minibatches": 4, "update_epochs": 2}
    whole = ppo.train(ppo.Args(env_id=PENDULUM, run_name="whole", compile=False, **flags))
    weights = whole["agent"].state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in saved["agent"].items())
    assert record.episodes_of(saved).to_dict("records") == whole["episodes"]
