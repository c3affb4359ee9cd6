"""Checkpoints of every script: a killed run goes on bit for bit, damaged files are refused."""

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fake_envs
import numpy as np
import pytest
import torch
from adapters import on
from fake_envs import Fake, Killed
from helpers import curves, flags, same_weights


def test_a_flag_that_is_given_when_resuming_changes_the_setting(script, tiny, cli):
    script.module.train(tiny("Walk", gamma=0.9, total_timesteps=64))
    code, _, err = cli("--resume runs/run0 --total-timesteps 128 --lr 0.002")
    assert code == 0, err
    saved = script.module.load_checkpoint("runs/run0")
    args = saved["args"]
    assert (args.total_timesteps, args.learning_rate, args.gamma) == (128, 0.002, 0.9)
    assert args.env_id == script.env_id("Walk") and len(saved["updates"]) == 4


def same(a, b):
    """True if two contents of checkpoints agree bitwise, apart from times."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k != "charts/SPS")
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def content(run_dir):
    """All that a run has left, without its names."""
    saved = torch.load(Path(run_dir) / "checkpoint.pt")
    return {**saved, "args": {**saved["args"], "run_name": None}, "run_id": None}


@pytest.mark.parametrize("kill_step", [110, 140])  # one iteration is logged, but not saved; none
def test_a_killed_run_goes_on_bit_for_bit_and_its_curves_have_each_step_once(
    script, tiny, monkeypatch, kill_step
):
    settings = {"total_timesteps": 192, "checkpoint_interval": 2, "learning_rate": 0.003}
    whole = script.module.train(tiny("Walk", **settings))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Fake, "kill_at", sum(env.steps for env in Fake.made) + kill_step)
        script.module.train(tiny("Walk", **settings))
    for log in Path("runs/run1").glob("events*"):  # their names end in seconds: this is older
        log.rename("runs/run1/events.out.tfevents.0")
    Fake.made.clear()
    resumed = script.module.train(resume="runs/run1")
    assert same_weights(whole["agent"], resumed["agent"]) and len(whole["episodes"]) > 5
    assert whole["episodes"] == resumed["episodes"]
    # Of what was before the checkpoint, only the running episodes are played again.
    replayed = sum(env.steps for env in Fake.made) - (192 - kill_step // 64 * 64)
    assert 0 < replayed < 12 * len(Fake.made)
    assert not list(Path("runs/run1").glob("*.tmp"))
    assert same(content("runs/run0"), content("runs/run1"))
    a, b = curves("runs/run0"), curves("runs/run1")
    assert a.keys() == b.keys()
    for tag in a.keys() - {"charts/SPS"}:
        np.testing.assert_equal(a[tag], b[tag])


@pytest.mark.parametrize("change", ["observation", "length"])
def test_a_replay_that_comes_out_otherwise_begins_new_episodes(
    script, tiny, monkeypatch, capsys, change
):
    """With a sentence; weights, Adam and logs are continued nonetheless."""
    script.module.train(tiny("Walk"))
    observe = fake_envs.Walk.observe
    if change == "observation":
        monkeypatch.setattr(fake_envs.Walk, "observe", lambda self: observe(self) + 1)
    else:
        monkeypatch.setattr(fake_envs.Walk, "advance", fake_envs.Terminated.advance)
        monkeypatch.setattr(fake_envs.Walk, "end", "terminated", raising=False)
    old = script.module.load_checkpoint("runs/run0")["episodes"]
    result = script.module.train(tiny("Walk", total_timesteps=160), resume="runs/run0")
    assert "could not be replayed" in capsys.readouterr().out
    assert [x["global_step"] for x in result["updates"]] == [32, 64, 96, 128, 160]
    assert result["episodes"][: len(old)] == old
    later = [x for x in result["episodes"] if x["global_step"] > 96]
    assert all(x["length"] <= 12 and x["global_step"] > 96 + x["length"] - 1 for x in later)


@pytest.mark.slow
def test_a_file_alone_killed_at_five_random_moments_ends_as_if_it_had_not_been(script):
    shutil.copy(script.path, ".")  # into an empty folder

    def start(flags):
        eager = "--no-compile " if hasattr(script.args(), "compile") else ""
        line = f"{sys.executable} {script.path.name} --device cpu {eager}{flags}"
        return subprocess.Popen(line.split(), stdout=subprocess.PIPE, text=True)

    def steps():
        path = Path("runs/cut/checkpoint.pt")
        return torch.load(path)["updates"][-1]["global_step"] if path.exists() else 0

    begin = f"--env-id {script.real} --checkpoint-interval 2 --run-name"
    assert start(f"{begin} whole").wait() == 0
    flags, rng = f"{begin} cut", random.Random(0)
    for _ in range(5):
        process, before = start(flags), steps()
        while process.poll() is None and steps() == before:
            time.sleep(0.05)
        time.sleep(rng.random())
        assert process.poll() is None, "was not killed in time"
        process.kill()
        process.wait()
        flags = "--resume runs/cut"
    assert start(flags).wait() == 0
    assert same(content("runs/whole"), content("runs/cut"))
    assert "in 1 episodes" in start("--evaluate runs/cut --eval-episodes 1").communicate()[0]


def test_ctrl_c_is_a_sentence_and_the_run_can_be_resumed(script, tiny, cli):
    settings = {"total_timesteps": 256, "checkpoint_interval": 1}
    whole = script.module.train(tiny("Walk", **settings))
    code, _, _ = cli(flags(tiny("Interrupted", **settings)))
    assert "--resume" in str(code)
    assert len(script.module.load_checkpoint("runs/run1")["updates"]) < 8
    code, _, err = cli("--resume runs/run1")
    assert code == 0, err
    agent = script.module.load_checkpoint("runs/run1")["agent"]
    assert same_weights(agent, whole["agent"])


def test_a_run_is_resumed_only_on_request_with_its_settings_and_says_if_nothing_is_left(
    script, tiny, capsys
):
    script.module.train(tiny("Walk", gamma=0.9, total_timesteps=64))
    assert "was the last one" not in capsys.readouterr().out
    result = script.module.train(resume="runs/run0")
    assert result["args"].gamma == 0.9 and len(result["updates"]) == 2
    assert "Step 64 was the last one: raise --total-timesteps" in capsys.readouterr().out
    script.module.train(tiny("Walk"), resume="runs/run0")
    assert "was the last one" not in capsys.readouterr().out
    with pytest.raises(script.module.UsageError, match=r"--resume runs/run0.*--run-name"):
        script.module.train(tiny("Walk", run_name="run0"))


@on("vector")
def test_another_number_of_environments_is_named_when_resuming(script, tiny, capsys):
    script.module.train(tiny("Walk", total_timesteps=64))
    for count in (1, 4):
        other = tiny("Walk", num_envs=count, num_steps=32 // count, total_timesteps=96)
        assert script.module.train(other, resume="runs/run0")["updates"]
        assert "could not be replayed: --num-envs has changed." in capsys.readouterr().out


def test_numpy_numbers_and_arrays_are_saved_as_plain_values(script, tmp_path):
    state = {"a": np.float64(1.5), "b": [np.int64(2), (np.bool_(True), None)], "c": np.arange(3.0)}
    state["episodes"] = []
    script.module.save_checkpoint(tmp_path, script.args(), state)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["a"] == 1.5 and saved["b"] == [2, (True, None)]
    assert saved["c"].tolist() == [0, 1, 2] and saved["c"].dtype == torch.float64


def test_episodes_are_a_tensor_for_each_of_their_values(script, tiny):
    result = script.module.train(tiny("Walk"))
    columns = torch.load("runs/run0/checkpoint.pt", weights_only=True)["episodes"]
    types = {"global_step": torch.int64, "return": torch.float64, "length": torch.int64}
    assert {name: x.dtype for name, x in columns.items()} == types
    for name, x in columns.items():
        assert x.tolist() == [episode[name] for episode in result["episodes"]]


@on("continuous")
def test_a_damaged_checkpoint_is_never_taken_for_another(script, tiny):
    script.module.train(tiny("Walk"))
    path, rng, refused = Path("runs/run0/checkpoint.pt"), random.Random(0), 0
    good, intact = path.read_bytes(), torch.load(path)
    for k in range(60):  # one wrong bit, or cut short
        position, data = rng.randrange(len(good)), bytearray(good)
        data[position] ^= 1 << rng.randrange(8)
        path.write_bytes(data if k % 10 else good[:position])
        try:
            script.module.load_checkpoint("runs/run0")
        except script.module.UsageError as error:
            refused += 1
            sentence = r"runs/run0/checkpoint.pt is missing, damaged or from another script: .+"
            assert re.fullmatch(sentence, str(error))
        else:  # the bit is in a place that says nothing, such as the date of a file
            assert same(torch.load(path), intact)
    assert refused > 54


class Bomb:
    """A pickle that would create a file if it were ever loaded."""

    def __reduce__(self):
        return (open, ("executed", "w"))


@on("continuous")
def test_a_foreign_file_is_refused_and_not_executed(script, tiny, cli):
    script.module.train(tiny("Walk"))
    path = Path("runs/run0/checkpoint.pt")
    good = torch.load(path, weights_only=True)
    other_network = {x: y[..., :1] for x, y in good["agent"].items()}
    foreign = {"damaged": Bomb(), "size mismatch": {"agent": other_network}}
    foreign |= {x: {"args": {**good["args"], x: 1.5}} for x in ("temperature", "gamma")}
    for word, content in foreign.items():  # what the sentence has of them
        torch.save(content if word == "damaged" else {**good, **content}, path)
        code, _, err = cli("--resume runs/run0")
        assert code == 2 and err.startswith("Error: ") and err.count("\n") == 1, content
        assert word in err, err
    assert not Path("executed").exists()
    torch.save(Bomb(), path)
    torch.load(path, weights_only=False).close()  # the bomb is live
    assert Path("executed").exists()


@on("continuous")
def test_a_full_disk_is_a_sentence_and_leaves_the_last_checkpoint(script, tiny, cli, monkeypatch):
    real = Path.write_bytes

    def write(path, content):
        if Path("runs/run0/checkpoint.pt").exists():
            real(path, b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    code, _, err = cli(flags(tiny("Walk", checkpoint_interval=1)))
    error = err.splitlines()[-1]
    assert code == 2 and error.startswith("Error: Could not save; runs/run0 keeps its last check")
    assert error.endswith("No space left on device")
    assert len(script.module.load_checkpoint("runs/run0")["updates"]) == 1
    assert not list(Path("runs").rglob("*.tmp"))
