"""`seeds`: all runs of a script over environments and seeds, which may be interrupted."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from foreign_logs import write_plain, write_values

from benchmark.lab import logs, plots, provenance, results, run, seeds
from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT

STAND_IN = Path(__file__).with_name("stand_in.py")
MINE = ("seeds", "own/mine.py", "--env-ids", "A-v1")


@pytest.fixture
def forked(forked, monkeypatch):
    """The stand-in as a changed copy elsewhere, which imports its neighbor and a user's module."""
    monkeypatch.setenv("PYTHONPATH", str(Path("users").absolute()))
    for path in (Path("own/neighbor.py"), Path("users/module_of_user.py")):
        path.parent.mkdir()
        path.write_text("")
    Path("own/mine.py").write_text(f"import module_of_user, neighbor\n{STAND_IN.read_text()}")
    forked.runs = Path("runs/mine")
    return forked


def test_seeds_makes_all_runs_once_and_shows_them(forked, drawn):
    words = (*MINE, "B-v1", "--gain=-1", "--seeds", "3", "--workers", "3")
    text = forked.run(*words)
    # The mean of 11 to 20 is 15.5; the last column is minutes.
    assert (
        "| A-v1 | 3 | -31.0 ± 15.5 | -31.0 [-46.5, -15.5] | last 10 episodes, or all | 0.3 |"
        in text
    )
    assert "± is the standard deviation over seeds, with the divisor n - 1.\n" in text
    made = pd.read_csv("runs/mine/episodes.csv")
    assert list(made) == ["environment", "seed", "step", "return", "length"] and len(made) == 120
    assert (made["return"] == -made["seed"] * made["step"] / 100).all()
    lines = [json.loads(x) for x in Path("runs/mine/mine.jsonl").read_text().splitlines()]
    assert [(x["environment"], x["seed"], x["flags"], len(x["sha256"])) for x in lines] == [
        (x, y, "--gain=-1", 64) for x in ("A-v1", "B-v1") for y in (1, 2, 3)
    ]
    assert plots.Image.open("runs/mine/curves.png").width > 600
    assert "6 runs, 6 of them done before." in forked.run(*words)
    names = [f"{x}/seed{y}" for x in ("A-v1", "B-v1") for y in (1, 2, 3)]
    assert [[*forked.starts(x)] for x in names] == [[1]] * 6
    shutil.rmtree("runs/mine/A-v1")  # to save space
    assert "| B-v1 | 3 |" in forked.run(*MINE, "--seeds", "4", "--gain=-1")
    assert [*forked.starts("A-v1/seed4")] == [1] and not forked.starts("A-v1/seed1")
    shutil.rmtree("runs/mine/A-v1")
    text = forked.run(*MINE, "--seeds", "4", "--gain", "2", code=2)
    assert "Error: runs/mine has runs with other flags: give another --name." in text


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_interrupted_seeds_end_their_scripts_and_the_same_command_continues(hangup, forked, number):
    words, names = (*MINE, "--seeds", "7", "9"), ["A-v1/seed7", "A-v1/seed9"]
    process, _ = forked.start_until(7, *words, names=names)
    os.kill(process.pid, number)
    said = forked.run(process=process, code=130)
    assert "The same command continues the runs where they stopped." in said
    assert not any(Path(f"/proc/{forked.starts(x)[1]}").exists() for x in names)
    assert "with other flags: give" in forked.run(*words, "--gain=2", code=2)
    text = forked.run(*words)
    assert [[*forked.starts(x)] for x in names] == [[1, 6]] * 2
    assert "A-v1/seed7 continues" in text and "| A-v1 | 2 | 124 ± 22 |" in text


STARTS = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the other process inherits
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
open("other.txt", "w").write(str(other.pid))
"""


def test_what_a_script_has_started_ends_with_it(forked):
    """Simulators in processes of their own, for example, even if they ignore the signal."""
    script, begin = Path("own/mine.py"), "first, args = len("
    script.write_text(script.read_text().replace(begin, STARTS + begin))
    process, _ = forked.start_until(2, *MINE, "--seeds", "1", names=["A-v1/seed1"])
    (other,) = forked.lines("A-v1/seed1", "other.txt")
    process.terminate()
    forked.run(process=process, code=130)
    with contextlib.suppress(OSError):  # it may wait for somebody to ask how it has ended
        assert Path(f"/proc/{other}/stat").read_text().split()[2] == "Z"


@pytest.mark.slow
def test_runs_of_two_versions_of_a_module_are_no_group(forked):
    """Of one that the script imports, and of one that only its environment's name imports."""
    Path("users/arm.py").write_text("")
    words = ("seeds", "own/mine.py", "--env-ids", "arm:A-v1")
    forked.run(*words, "--seeds", "1")
    for path in ("own/neighbor.py", "users/arm.py"):
        Path(path).write_text("edited = 1")
        text = forked.run(*words, "--seeds", "2", code=2)
        assert f"another version of {Path(path).name}: give another --name." in text
        Path(path).write_text("")
    Path("users/leg.py").write_text("")  # of another environment
    text = forked.run(*words, "leg:B-v1", "--seeds", "2")
    assert "| arm:A-v1 | 2 |" in text and "| leg:B-v1 | 2 |" in text


def test_files_that_a_script_names_are_found_through_packages_texts_and_other_files():
    files = {
        "script.py": "import numpy, other\nfrom deep.inside import a\ndef f():\n    import late",
        **{"other.py": "def broken(:", "late.py": "import script", "deep/inside/a.py": ""},
        **{"deep/b.py": "spec = {'entry_point': 'registered.envs:Arm'}", "nothing.py": ""},
        **{"registered/envs.py": "", "users/arm.py": "from hand import *", "users/hand.py": ""},
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    words = "--make=arm:make --device cuda"
    found = provenance.files_named(Path("script.py"), words, [".", "users"])
    assert {*map(str, found)} == files.keys() - {"script.py", "nothing.py"}
    assert provenance.edited(found) == ""
    Path("users/hand.py").write_text("x = 1")
    assert provenance.edited(found) == "hand.py"
    Path("users/hand.py").unlink()
    assert provenance.edited(found) == "hand.py"


def test_the_others_wait_for_the_first_iteration_and_are_told_once_that_it_compiles(forked):
    script, begin = Path("own/mine.py"), "first, args = len("
    line = "print('The first iteration compiles the update.', flush=True)\n"
    script.write_text(script.read_text().replace(begin, line + begin))
    process, _ = forked.start_until(0, *MINE, "--seeds", "2", names=["A-v1/seed1"])
    while "compiles" not in Path("said.txt").read_text():
        assert process.is_alive()
        time.sleep(0.01)
    assert not Path("runs/mine/A-v1/seed2").exists()
    Path("runs/mine/A-v1/seed1/release").touch()
    text = forked.run(process=process)
    assert text.count("A-v1/seed1: The first iteration compiles the update. The others wait.") == 1
    assert text.count("compiles") == 1 and [*forked.starts("A-v1/seed2")] == [1]


def test_a_module_that_is_edited_meanwhile_is_in_no_run(forked):
    words = (*MINE, "--seeds", "2", "--workers", "1")
    process, _ = forked.start_until(2, *words, names=["A-v1/seed1"])
    Path("own/neighbor.py").write_text("edited = 1")
    Path("runs/mine/A-v1/seed1/release").touch()
    text = forked.run(process=process, code=2)
    assert "A-v1/seed2 did not start: neighbor.py has changed since then" in text
    assert "A-v1/seed1 done" in text and not Path("runs/mine/A-v1/seed2").exists()


def test_each_run_at_work_has_a_line_with_its_return_and_the_time_left(forked, monkeypatch):
    monkeypatch.setattr(run, "PACE", 0.1)
    process, _ = forked.start_until(7, *MINE, "--seeds", "1", names=["A-v1/seed1"])
    while "iteration 7" not in Path("said.txt").read_text():
        assert process.is_alive()
        time.sleep(0.01)
    Path("runs/mine/A-v1/seed1/release").touch()
    line = "A-v1/seed1: 35 %, iteration 7 of 20, return 1.0, 00:01 left\n"
    assert 1 <= forked.run(process=process).count(line) < 10


@pytest.mark.slow
def test_a_seed_that_fails_does_not_stop_the_others_and_is_named_at_the_end(forked):
    text = forked.run(*MINE, "--seeds", "3", "--cluster", "ray", code=2, crash="2")
    assert text.strip().endswith(
        "Error: 1 of 3 runs failed: A-v1/seed2 ended with exit code 1: Error: out of luck"
    )
    assert "shut down" in text
    assert "| A-v1 | 2 | 31.0 ± 21.9 |" in text
    assert [*forked.starts("A-v1/seed3")] == [1]


def test_all_seeds_are_scored_over_one_part_of_the_runs(tmp_path, capsys):
    """Also where the logs have been deleted."""
    first = {"last 100 episodes": 5.0, "last tenth of the steps": 1.0}
    scores = [{"scores": first}, {"scores": {"last tenth of the steps": 2.0}}, {"score": None}]
    records = [
        {"score": 9.0, "seconds": None, "environment": "A-v1", "variant": ""} | x for x in scores
    ]
    results.write_lines(tmp_path / "mine.jsonl", [{"seed": i} | x for i, x in enumerate(records)])
    seeds.show("mine", Folders(tmp_path, tmp_path))
    text = capsys.readouterr().out
    assert "| A-v1 | 2 of 3 | 1.5 ± 0.7 | 1.5 | last tenth of the steps |" in text


@pytest.mark.slow
def test_models_of_rlhf_are_summed_up_over_seeds(forked):
    text = forked.run(*MINE[:2], "--seeds", "2")
    assert (
        "| model | seeds | gold | minutes per run |\n" in text
        and "| ppo | 2 | 1.50 ± 0.00 |" in text
    )


def test_a_script_that_only_logs_is_summed_up_by_its_last_tenth(tmp_path):
    write_values(tmp_path, "grpo/reward", [0.1 * x for x in range(20)])
    facts, curve = logs.summarize(tmp_path, 3.0)
    assert facts["seconds"] == 3 and curve.empty
    (row,) = seeds.models_rows([facts["models"], {"": {"grpo/reward": 0.85}}])
    assert row == {"seeds": "2", "grpo/reward": "1.35 ± 0.71"}


@pytest.mark.slow
def test_a_script_without_run_name_and_checkpoint_runs_in_its_default_environment(command, drawn):
    flags = "--seeds 1 --total-timesteps 1024 --num-steps 1024 --update-epochs 1"
    code, text = command("seeds", ROOT / "ppo_minimal.py", *flags.split())
    assert code == 0 and re.search(r"\| HalfCheetah-v4 \| 1 \| -\d+ \|", text), text
    assert "| last tenth of the steps |" in text
    assert not Path("runs/ppo_minimal/episodes.csv").exists()
    assert Path("runs/ppo_minimal/curves.png").exists()
    (found,) = logs.find("runs/ppo_minimal")
    assert found.averaged == "iteration" and found.environment == "HalfCheetah-v4"
    assert seeds.flags_of(ROOT / "ppo_continuous_action.py") == seeds.GIVEN


# A script that copies a log in place of training.
COPIES = """
import argparse, shutil
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--seed")
parser.add_argument("--config", default=Path(__file__).with_name("robot.log"))
parser.add_argument("--opened", default=__file__)
given = parser.parse_args()
open(given.opened)
shutil.copytree(given.config, f"logs/mine__{given.seed}")
Path(f"logs/mine__{given.seed}/checkpoint.pt").write_text("of a script of one's own")
"""


@pytest.fixture
def own_script(tmp_path):
    """In a folder with a space; it reads what lies next to it."""
    folder = tmp_path / "mein Ordner ü"
    write_plain(folder / "robot.log", 3.0)
    (folder / "mine.py").write_text(COPIES)
    return folder / "mine.py"


@pytest.mark.parametrize(
    ("flags", "level"), [((), 3), (("--config", "here.log"), 5), (("--config=../up.log",), 7)]
)
def test_a_script_runs_where_it_is_with_its_files_and_relative_flags(
    own_script, command, tmp_path, monkeypatch, flags, level
):
    place = tmp_path / "place"
    write_plain(place / "here.log", 5.0)
    write_plain(tmp_path / "up.log", 7.0)
    monkeypatch.chdir(place)
    code, text = command("seeds", own_script, "--seeds", "1", *flags)
    assert (
        code == 0 and f"| unknown | 1 | {level}.0 | {level}.0 | last 10 episodes, or all |" in text
    )
    assert {x.name for x in own_script.parent.iterdir()} == {"mine.py", "robot.log"}
    note = json.loads(Path("runs/mine/seed1/note.json").read_text())
    assert note["script"] == str(own_script)  # which `check` names in its last line
    code, text = command("check", "runs/mine")
    assert code == 0 and f"`python -m benchmark diff {own_script}`" in text.splitlines()[-1]


@pytest.mark.slow
def test_what_a_run_that_ended_with_0_has_left_is_never_deleted(own_script, command, monkeypatch):
    words = ("seeds", own_script, "--seeds", "1")
    read_log = logs.read_log
    monkeypatch.setattr(logs, "read_log", lambda _: 1 / 0)  # whatever cannot be read today
    for count in (1, 0):
        code, text = command(*words)
        assert code == 2 and "division by zero; delete " in text and text.count("starts") == count
    assert Path("runs/mine/seed1/logs/mine__1/checkpoint.pt").exists()
    monkeypatch.setattr(logs, "read_log", read_log)
    code, text = command(*words)
    assert code == 0 and "starts" not in text and "| unknown | 1 | 3.0 |" in text
    own_script.write_text(f"{COPIES}print('edited')")
    code, text = command(*words)
    assert code == 2 and "runs/mine has runs of another version of mine.py" in text


@pytest.mark.slow
def test_what_somebody_else_has_put_there_is_never_deleted(own_script, command):
    other = Path("runs/mine/seed2/log.txt")
    other.parent.mkdir(parents=True)
    other.touch()
    code, text = command("seeds", own_script, "--seeds", "2")
    assert code == 2 and "seed2 was not made by `seeds`: give another --name." in text
    assert other.exists() and "starts" not in text
    code, _ = command("seeds", own_script, "--seeds", "2", "--name", "..")
    assert code == 0 and any(Path("runs/-").glob("*.jsonl"))


def test_a_script_that_is_edited_meanwhile_runs_as_it_was(own_script, command, monkeypatch):
    begin = run.begin

    def edit_before(second):
        if second.facts["seed"] == 2:
            own_script.write_text("raise SystemExit('edited')")
        return begin(second)

    monkeypatch.setattr(run, "begin", edit_before)
    code, text = command("seeds", own_script, "--seeds", "2", "--workers", "1")
    assert code == 0 and "| unknown | 2 | 3.0" in text
    assert "mine.py has changed since then: seed2 runs .mine-" in text
    code, text = command("seeds", own_script, "--seeds", "3")
    assert code == 2 and "mine.py does not start: edited" in text


TYRO = "import tyro\ndef main(seed: int = 1): pass\ntyro.cli(main)"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("2", "--nonsense", "3"), "x.py does not start: Unrecognized options: --nonsense, 3"),
        (("1",), "1 of 1 runs failed: seed1 left no TensorBoard log, no results.json and"),
    ],
)
def test_a_script_that_refuses_a_flag_or_leaves_nothing_is_begun_once(command, flags, said):
    Path("x.py").write_text(TYRO)
    code, text = command("seeds", "x.py", "--seeds", *flags)
    assert code == 2 and text.count("starts") == 1 and said in text.splitlines()[-1]


@pytest.mark.slow
def test_on_windows_results_are_read_and_runs_are_refused(tmp_path):
    text = "import sys; sys.modules['resource'] = None; "
    text += "from benchmark.lab import run; from benchmark.__main__ import main; main(['list']); "
    text += "sys.platform = 'win32'; main(['run', 'smoke', '--runs', 'x', '--results', 'x'])"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT)
    assert "figure3 " in found.stdout and found.returncode == 2
    assert found.stderr == "Error: Runs are made on Linux and macOS only: on Windows, use WSL.\n"


def test_modules_are_found_in_the_current_folder_as_if_the_script_ran_there(forked):
    script = Path("own/mine.py")
    script.write_text(f"import here\n{script.read_text()}")
    Path("here.py").write_text("")
    assert "| A-v1 | 1 |" in forked.run(*MINE, "--seeds", "1")
    Path("here.py").write_text("edited = 1")
    assert "another version of here.py" in forked.run(*MINE, "--seeds", "2", code=2)
