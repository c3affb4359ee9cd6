"""`seeds`: all runs of a script over environments and seeds, which may be interrupted."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from test_run import RAY

import ppo_continuous_action as ppo
from benchmark import record, seeds
from benchmark.__main__ import for_script, main
from benchmark.definitions import Folders
from benchmark.provenance import ROOT
from benchmark.report import plots

STAND_IN = Path(__file__).with_name("stand_in_seeds.py")
PENDULUM = "InvertedPendulum-v5"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start `seeds` on the stand-in in a process of its own; its output is in said.txt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", RAY)
    processes = []

    def begin(*words, pace=0.0, crash="", script=STAND_IN):
        def child():
            os.environ.update({"PACE": str(pace), "CRASH": crash})
            with (
                open("said.txt", "w") as file,
                contextlib.redirect_stdout(file),
                contextlib.redirect_stderr(file),
            ):
                main(["seeds", str(script), "--env-ids", "A-v1", *words, "--name", "mine"])

        processes.append(multiprocessing.get_context("fork").Process(target=child))
        processes[-1].start()
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.join()


def said(process, code=0):
    process.join(300)
    text = Path("said.txt").read_text()
    assert process.exitcode == code, text
    return text


def starts(seed, environment="A-v1"):
    """First iteration and process of each start of a run."""
    path = Path(f"runs/mine/{environment}/seed{seed}/runs/run/starts.txt")
    rows = [x.split() for x in path.read_text().splitlines()] if path.exists() else []
    assert all(threads == "1" for *_, threads in rows)
    return {int(first): int(process) for first, process, _ in rows}


def test_seeds_makes_all_runs_once_and_shows_them(start):
    text = said(start("B-v1", "--seeds", "3", "--gain=-1", "--workers", "3"))
    assert "| A-v1 | 3 | 21.0 ± 8.6 | 21.0 [10.5, 31.5] | 0.3 |" in text  # mean 10.5 per seed
    made = pd.read_csv("runs/mine/episodes.csv")
    assert list(made) == ["environment", "seed", "step", "return", "length"] and len(made) == 120
    assert (made["return"] == made["seed"] * made["step"] / 100).all()
    about = json.loads(Path("runs/mine/about.json").read_text())
    assert len(about["sha256"]) == 64 and about["flags"] == "--gain=-1"
    lines = [json.loads(x) for x in Path("runs/mine/mine.jsonl").read_text().splitlines()]
    assert [(x["environment"], x["seed"], x["sha256"] == about["sha256"]) for x in lines] == [
        (x, y, True) for x in ("A-v1", "B-v1") for y in (1, 2, 3)
    ]
    assert plots.Image.open("runs/mine/curves.png").width > 600
    assert "6 runs, 6 of them done before." in said(start("B-v1", "--seeds", "3", "--gain=-1"))
    assert all([*starts(x, y)] == [1] for x in (1, 2, 3) for y in ("A-v1", "B-v1"))
    text = said(start("--seeds", "4", "--gain", "2"), 2)
    assert "Error: runs/mine has runs of another version of stand_in_seeds.py, or with" in text


def test_interrupted_seeds_end_their_scripts_and_the_same_command_continues(start):
    words = ("--seeds", "7", "9", "--workers", "2")
    process = start(*words, pace=0.4)
    while made(9) < 1 or made(7) < 6:
        assert process.is_alive(), said(process)
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert "The same command continues the runs where they stopped." in said(process, 130)
    assert not any(Path(f"/proc/{starts(x)[1]}").exists() for x in (7, 9))
    text = said(start(*words))
    (one, other) = starts(7)
    assert "A-v1/seed7 continues" in text and one == 1 and other in (6, 11, 16)
    assert len(pd.read_csv("runs/mine/episodes.csv")) == 40


def made(seed):
    """How many iterations a run of the test has made."""
    suite = SimpleNamespace(name="mine", variants={})
    run = seeds.SeedRun(suite, "A-v1", "", seed, Folders(Path("runs/mine"), Path("runs")))
    return seeds.progress(run)[0] if (run.folder / "output.txt").exists() else 0


@pytest.mark.parametrize("cluster", [("--workers", "1"), ("--cluster", "ray")])
def test_a_seed_that_fails_does_not_stop_the_others_and_is_named_at_the_end(start, cluster):
    text = said(start("--seeds", "3", *cluster, crash="2"), 2)
    assert text.strip().endswith(
        "Error: 1 of 3 runs failed: A-v1/seed2 ended with exit code 1: Error: out of luck"
    )
    assert "| A-v1 | 2 | 21.0 ± 10.5 |" in text
    assert [*starts(3)] == [1]


def test_a_flag_that_the_script_refuses_is_said_before_other_runs_begin(start):
    text = said(start("--seeds", "3", "--workers", "3", "--no-such-flag", "1"), 2)
    assert "Error: stand_in_seeds.py does not start: " in text and "--no-such-flag" in text
    assert text.count("starts") == 1 and not Path("runs/mine/A-v1/seed2").exists()


def test_the_others_wait_until_the_first_has_made_an_iteration(start):
    said(start("--seeds", "2", "--workers", "2", pace=0.2))
    first, second = (Path(f"runs/mine/A-v1/seed{x}") for x in (1, 2))
    begun = (second / "note.json").stat().st_mtime
    assert (first / "runs/run/starts.txt").stat().st_mtime + 0.2 < begun
    assert begun < (first / "result.json").stat().st_mtime


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.py", "--env-ids", "A"), "There is no script nowhere.py."),
        ((STAND_IN, "--env-ids", "A", "--seed", "3"), "`seeds` itself gives --seed to the script"),
        ((STAND_IN, "--env-ids", "A", "--seeds", "-3", "1"), "--seeds that are not negative"),
        ((STAND_IN, "--env-ids", "A", "--workers", "0"), "--workers must be positive."),
        ((STAND_IN, "--env-ids", "A", "--name", "a/b"), "--name a/b: use letters"),
    ],
)
def test_mistakes_are_one_sentence(command, words, message):
    code, text = command("seeds", *words)
    assert code == 2 and message in text and text.count("\n") == 1


def test_flags_that_seeds_does_not_know_go_to_the_script():
    line = "seeds x.py --env-ids A B --lr -0.1 --seeds 3 --no-compile --workers=2 --flag=a"
    *ours, flags = for_script(line.split())
    assert ours == ["seeds", "x.py", "--env-ids", "A", "B", "--seeds", "3", "--workers=2"]
    assert flags == "--flags=--lr -0.1 --no-compile --flag=a"


def test_a_killed_run_of_a_real_script_continues_to_the_bit(tmp_path, monkeypatch):
    """A changed copy in another folder, which imports a module that lies next to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/neighbor.py").write_text("")
    text = (ROOT / "ppo_continuous_action.py").read_text()
    (tmp_path / "own/changed.py").write_text(
        text.replace("import math\n", "import math\nimport neighbor\n")
    )
    line = f"seeds own/changed.py --env-ids {PENDULUM} --seeds 1 --workers 1 --total-timesteps 4096"
    line += " --num-steps 64 --num-minibatches 4 --update-epochs 2 --no-compile"
    line = [*line.split(), "--checkpoint-interval", "1"]
    process = multiprocessing.get_context("fork").Process(target=main, args=(line,))
    process.start()
    path = tmp_path / f"runs/changed/{PENDULUM}/seed1/runs/run/checkpoint.pt"
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
