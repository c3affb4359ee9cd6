"""Mistakes: a command answers with one sentence and exit code 2, and changes no file."""

from pathlib import Path

import pytest
import torch
from foreign_logs import PENDULUM, write_plain, write_values

from benchmark.lab import seeds

FILES = {
    "imports.py": b"import nothing",
    "empty.py": b"",
    "sleeps.py": b"import time; time.sleep(60)",
    "seeded.py": b"import argparse; x = argparse.ArgumentParser(); x.add_argument('--seed'); "
    b"x.parse_args()",
    "broken.py": b"def train(:",
    "other.py": b"class Args: ...\ndef train(args): ...\n",
    "binary.py": b"\xff\xfe",
}
OUT = "--results out --runs out"
MISTAKES = [
    ("seeds nowhere.py", "There is no script "),
    ("seeds imports.py", "imports.py does not start: ModuleNotFoundError: No module named"),
    ("seeds empty.py", "empty.py has no --seed."),
    ("seeds sleeps.py", "sleeps.py --help did not end within 1 seconds."),
    ("seeds seeded.py --seed 3", "`seeds` itself gives --seed to the script: use --seeds."),
    ("seeds seeded.py --seeds 0", "--seeds must be at least 1."),
    ("seeds seeded.py --workers 0", "--workers must be positive."),
    ("seeds seeded.py --env-ids A", "seeded.py has no --env-id: leave --env-ids out."),
    ("check nowhere", "There is no folder nowhere."),
    ("check other", "other has no checkpoint.pt of our scripts and no TensorBoard log of PPO."),
    ("compare a", "To compare, give at least two"),
    ("compare a silent", "silent: it logs no returns. Either no episode has ended"),
    ("compare a b", f"no environment that all have: a has {PENDULUM}; b has Hopper-v5."),
    ("compare a short", "no episode has ended by 1 steps."),
    (f"compare a figure3:nothing {OUT}", "figure3:nothing is not a row of a suite; there are"),
    (f"compare a figure3 {OUT}", "No run of figure3 is finished."),
    ("compare a since2017:beta", "since2017 is closed; "),
    ("diff nowhere.py", "nowhere.py: No such file or directory"),
    ("diff broken.py", "line 1: invalid syntax"),
    ("diff empty.py", "has no `train`"),
    ("diff other.py", "other.py is too unlike "),
    ("diff binary.py", "is not a text file"),
    ("diff other.py --iterations 0", "--iterations must be positive."),
    (f"run a2c {OUT}", "a2c is closed; "),
    ("list swimmer", "benchmark/closed/swimmer/page.md says how to run it again."),
    ("table recipe", "recipe is closed; "),
    ("plot num_envs", "num_envs is closed; "),
    (f"run figure3 --only Hoper-v4 {OUT}", "No run of figure3 matches Hoper-v4"),
    ("run smoke --results out --runs empty.py", "empty.py/trees: Not a directory."),
    (f"plot games {OUT}", "No run of games is finished"),
    ("run ablation", "benchmark/closed/ablation/page.md says how to run it again."),
    (f"report {OUT}", "There is no folder"),
    (f"throughput --repetitions 0 {OUT}", "--repetitions must be positive."),
    (f"throughput continuous gpu_atari {OUT}", "gpu_atari needs a GPU"),
    (
        f"throughput atari --cleanrl other.py {OUT}",
        "--cleanrl is for the measurement continuous or vector.",
    ),
    (f"throughput continuous --cleanrl nowhere.py {OUT}", "nowhere.py: No such file or directory."),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of scripts and runs."""
    place = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (place / name).write_bytes(text)
    write_plain(place / "a", env_id=PENDULUM)
    write_plain(place / "b", env_id="Hopper-v5")
    write_plain(place / "short", env_id=PENDULUM, last=1, step=1)
    write_values(place / "silent", "losses/approx_kl", [0.01])
    write_values(place / "other", "grpo/reward", [0.01])
    return place


@pytest.mark.parametrize(("line", "said"), MISTAKES)
def test_a_mistake_is_one_sentence(line, said, place, command, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "sleeps" in line:
        monkeypatch.setattr(seeds, "HELP", 1)
    before = {x: x.stat().st_mtime_ns for x in Path().rglob("*")}
    code, text = command(*line.split())
    *_, last = text.splitlines()
    assert code == 2 and last.startswith("Error: ") and said in last
    assert before == {x: x.stat().st_mtime_ns for x in Path().rglob("*")}
