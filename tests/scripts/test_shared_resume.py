"""Checkpoints of every script: a killed run goes on bit for bit, damaged files are refused."""

import contextlib
import dataclasses
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from io import BytesIO
from pathlib import Path

import fake_envs
import filelock
import numpy as np
import pytest
import torch
from adapters import flags, on
from conftest import curves, same_weights
from fake_envs import Fake, Killed


@pytest.fixture
def in_two_parts(script, tiny, monkeypatch):
    """Train whole, as run0, and killed in the rollout that comes to a step and resumed, as run1."""

    def train(kill_step, **settings):
        settings |= {"total_timesteps": 192, "checkpoint_interval": 2}
        whole = script.module.train(tiny("Walk", **settings))
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Fake, "kill_at", sum(env.steps for env in Fake.made) + kill_step)
            script.module.train(tiny("Walk", **settings))
        for log in Path("runs/run1").glob("events*"):  # their names end in seconds: this is older
            log.rename("runs/run1/events.out.tfevents.0")
        Fake.made.clear()
        return whole, resume(script, "runs/run1")

    return train


def resume(script, run_dir, **changes):
    """Continue as `--resume` does, with the settings of the checkpoint."""
    args, *_ = script.module.load_checkpoint(run_dir)
    return script.module.train(dataclasses.replace(args, resume=str(run_dir), **changes))


def test_train_takes_the_settings_of_the_run_too(script, tiny):
    script.module.train(tiny("Walk", gamma=0.9, anneal_lr=False, total_timesteps=64))
    whole = script.module.train(tiny("Walk", gamma=0.9, anneal_lr=False))
    result = script.module.train(tiny(gamma=0.5, resume="runs/run0", total_timesteps=96))
    assert result["args"].gamma == 0.9 and same_weights(result["agent"], whole["agent"])


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
    """All that a run has left, without its name."""
    saved = torch.load(Path(run_dir) / "checkpoint.pt")
    return {**saved, "args": {**saved["args"], "run_name": None}}


def assert_same_result(a, b):
    """Two results of `train`, apart from settings."""
    assert same_weights(a["agent"], b["agent"]) and len(a["episodes"]) > 5
    assert same([a["episodes"], a["updates"]], [b["episodes"], b["updates"]])


# --- Resuming ---


@pytest.mark.parametrize("kill_step", [110, 140])  # one iteration is logged, but not saved; none
def test_a_killed_run_goes_on_bit_for_bit_and_its_curves_have_each_step_once(
    script, in_two_parts, kill_step
):
    assert_same_result(*in_two_parts(kill_step, learning_rate=0.003))
    # Of what was before the checkpoint, only the running episodes are played again.
    replayed = sum(env.steps for env in Fake.made) - (192 - kill_step // 64 * 64)
    assert 0 < replayed < 12 * len(Fake.made)
    assert not list(Path("runs/run1").glob("*.tmp"))
    assert same(content("runs/run0"), content("runs/run1"))
    a, b = curves("runs/run0"), curves("runs/run1")
    assert a.keys() == b.keys()
    for tag in a.keys() - {"charts/SPS"}:
        np.testing.assert_equal(a[tag], b[tag])


@on("continuous")
def test_annealed_log_std_and_adapted_learning_rate_go_on_too(script, in_two_parts):
    settings = {"anneal_lr": False, "learning_rate": 0.001, "adapt_lr_kl": 1e-3}
    result, resumed = in_two_parts(90, anneal_log_std=(-0.5, -1.5), **settings)
    assert len({x["charts/learning_rate"] for x in result["updates"]}) > 2
    assert_same_result(result, resumed)
    assert_same_result(result, resume(script, "runs/run1"))  # which has nothing left to do


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
    *_, old = script.module.load_checkpoint("runs/run0")
    result = resume(script, "runs/run0", total_timesteps=160)
    assert "do not repeat themselves" in capsys.readouterr().out
    assert [x["global_step"] for x in result["updates"]] == [32, 64, 96, 128, 160]
    assert result["episodes"][: len(old["episodes"])] == old["episodes"]
    later = [x for x in result["episodes"] if x["global_step"] > 96]
    assert all(x["length"] <= 12 and x["global_step"] > 96 + x["length"] - 1 for x in later)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(2))
def test_a_file_alone_killed_at_five_random_moments_ends_as_if_it_had_not_been(script, run):
    if run >= len(script.real):
        pytest.skip("one real run is all that this script has")
    env_id = f"--env-id {script.real[run]}"
    shutil.copy(script.path, ".")  # into an empty folder

    def start(flags):
        eager = "--no-compile " if hasattr(script.args(), "compile") else ""
        line = f"{sys.executable} {script.path.name} --device cpu {eager}{flags}"
        return subprocess.Popen(line.split(), stdout=subprocess.PIPE, text=True)

    def steps():
        path = Path("runs/cut/checkpoint.pt")
        return torch.load(path)["updates"][-1]["global_step"] if path.exists() else 0

    assert start(f"{env_id} --checkpoint-interval 2 --run-name whole").wait() == 0
    flags, rng = f"{env_id} --checkpoint-interval 2 --run-name cut", random.Random(0)
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


# --- The command line ---


def test_resume_takes_the_settings_of_the_run_and_more_steps(script, tiny, cli):
    settings = {"learning_rate": 0.004, "anneal_lr": False, "seed": 5}
    script.module.train(tiny("Walk", **settings, total_timesteps=64))
    code, out, err = cli("--resume runs/run0 --total-timesteps 128 --checkpoint-interval 1")
    assert code == 0, err
    todo = f"python {script.path.name} --evaluate runs/run0; or tensorboard --logdir runs/run0"
    assert todo in out.splitlines()[-1]
    args, _, saved = script.module.load_checkpoint("runs/run0")
    assert (args.total_timesteps, args.checkpoint_interval, args.seed) == (128, 1, 5)
    assert [x["charts/learning_rate"] for x in saved["updates"]] == pytest.approx([0.004] * 4)


def test_a_run_is_not_overwritten_and_has_its_own_settings(script, tiny, cli):
    script.module.train(tiny("Walk", gamma=0.9))
    before = Path("runs/run0/checkpoint.pt").read_bytes()
    with pytest.raises(script.module.UsageError, match=r"--resume runs/run0.*--run-name"):
        script.module.train(tiny("Walk", run_name="run0"))
    others = [f"env-id {script.env_id('Truncated')}", "gamma 0.99", "learning-rate 0.1"]
    others += ["run-name other", "seed 7", "num-steps 4"]
    for folder, other in ((x, y) for x in ("--resume", "--evaluate") for y in others):
        code, _, err = cli(f"{folder} runs/run0 --{other}")
        name = other.split()[0].replace("-", "_")
        assert code == 2 and err == f"Error: runs/run0 has its own {name}: leave that flag out.\n"
    code, _, err = cli("--resume runs/run0 --gamma 0.9")  # which it has
    assert code == 0, err
    assert same(torch.load("runs/run0/checkpoint.pt"), torch.load(BytesIO(before)))


def test_ctrl_c_finishes_the_iteration_and_saves_and_the_run_goes_on(script, tiny, cli):
    settings = {"total_timesteps": 256}
    whole = script.module.train(tiny("Walk", **settings))
    code, out, err = cli(flags(tiny("Interrupted", **settings)))
    assert code == 0 and "Finishing this iteration" in out + err
    assert f"python {script.path.name} --resume runs/run1" in out.splitlines()[-1]
    *_, saved = script.module.load_checkpoint("runs/run1")
    steps = 40 * script.args().num_envs
    assert len(saved["updates"]) == -(-steps // 32) < 8
    code, _, err = cli("--resume runs/run1")
    assert code == 0, err
    *_, saved = script.module.load_checkpoint("runs/run1")
    assert same(dict(saved["agent"]), dict(whole["agent"].state_dict()))


@on("environments", "language")
def test_a_folder_in_which_another_process_trains_is_refused(cli):
    with filelock.FileLock("runs/run/lock"):
        code, _, err = cli("--run-name run --device cpu")
    assert (code, err.splitlines()[-1]) == (2, "Error: Another process is training in runs/run.")


def test_a_run_holds_its_folder_until_it_ends(script, tiny):
    lock, real, taken = (
        filelock.FileLock("runs/run0/lock"),
        getattr(script.module, script.update),
        [],
    )

    def update(*args):
        with contextlib.suppress(filelock.Timeout):
            taken.append(lock.acquire(blocking=False))
        return real(*args)

    script.module.train(tiny("Walk"), update=update)
    assert not taken
    lock.acquire(blocking=False)
    lock.release()


def test_ctrl_c_in_an_earlier_run_does_not_end_the_next_one(script, tiny, monkeypatch):
    monkeypatch.setattr(script.module, "STOP", threading.Event())
    script.module.STOP.set()
    assert len(script.module.train(tiny())["updates"]) == 3


# --- Files ---


@on("continuous")
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_never_taken_for_another(script, tiny, count):
    script.module.train(tiny("Walk"))
    path = Path("runs/run0/checkpoint.pt")
    good, intact, refused = path.read_bytes(), script.module.load_checkpoint("runs/run0")[2], 0
    rng = random.Random(0)
    for k in range(count):  # one wrong bit, or cut short
        position, data = rng.randrange(len(good)), bytearray(good)
        data[position] ^= 1 << rng.randrange(8)
        path.write_bytes(data if k % 10 else good[:position])
        try:
            *_, loaded = script.module.load_checkpoint("runs/run0")
        except script.module.UsageError as error:
            refused += 1
            sentence = r"runs/run0/checkpoint.pt is missing, damaged or of another script: .+"
            assert re.fullmatch(sentence, str(error))
        else:  # the bit is in a place that says nothing, such as the date of a file
            assert same(loaded, intact)
    assert refused > 0.9 * count


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
    foreign = {  # what the sentence has of them
        "damaged": Bomb(),
        "temperature": {**good, "args": {**good["args"], "temperature": 1.0}},
        "gamma": {**good, "args": {**good["args"], "gamma": 1.5}},
        "size mismatch": {**good, "agent": other_network},
    }
    for word, content in foreign.items():
        torch.save(content, path)
        code, _, err = cli("--resume runs/run0")
        assert code == 2 and err.startswith("Error: ") and err.count("\n") == 1, content
        assert word in err, err
    assert not Path("executed").exists()
    torch.save(Bomb(), path)
    torch.load(path, weights_only=False).close()  # the bomb is live
    assert Path("executed").exists()


@on("continuous")
def test_a_full_disk_is_a_sentence_and_leaves_the_last_checkpoint(script, tiny, cli, monkeypatch):
    real = torch.save

    def save(content, path):
        if Path("runs/run0/checkpoint.pt").exists():
            Path(path).write_bytes(b"half of it")
            raise RuntimeError("unexpected pos 64 vs 0")  # as PyTorch says it
        real(content, path)

    monkeypatch.setattr(torch, "save", save)
    code, _, err = cli(flags(tiny("Walk", checkpoint_interval=1)))
    error = err.splitlines()[-1]
    assert code == 2 and error.startswith("Error: The checkpoint in runs/run0 stays the last one: ")
    assert len(script.module.load_checkpoint("runs/run0")[2]["updates"]) == 1
