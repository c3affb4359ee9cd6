"""Checkpoints of every script: a killed run goes on bit for bit, damaged files are refused."""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path
from unittest.mock import MagicMock

import fake_envs
import filelock
import numpy as np
import pytest
import torch
from adapters import scripts, scripts_with, slow_on
from fake_envs import Fake, Killed
from helpers import curves, flags, same_weights


@scripts("continuous", "vector_env", "atari")
@slow_on("atari")
def test_a_run_is_resumed_on_request_only_and_keeps_settings_that_no_flag_changes(
    script, tiny, cli
):
    script.module.train(tiny("Walk", gamma=0.9, total_timesteps=64))
    text = "^runs/run0 has a run already: change --run-name, or --resume it.$"
    with pytest.raises(script.module.UsageError, match=text):
        script.module.train(tiny("Walk", run_name="run0"))
    assert len(script.module.load_checkpoint("runs/run0")["updates"]) == 2
    code, out, err = cli("--resume runs/run0")
    assert code == 0 and "Step 64 was the last one: raise --total-timesteps" in out, err
    code, out, err = cli("--resume runs/run0 --total-timesteps 128 --lr 0.002")
    assert code == 0 and "was the last one" not in out, err
    assert " 50%|" in err and " 2/4 [" in err  # the progress bar goes on as well
    code, _, err = cli("--resume runs/run0 --evaluate runs/run0")
    assert code == 2 and "choose one of them" in err
    code, _, err = cli("--resume=")  # as of a variable of the shell that is not set
    assert code == 2 and "checkpoint.pt is missing" in err
    with chdir("runs/run0"):
        code, out, err = cli("--evaluate= --eval-episodes 1")
    assert code == 0 and "Return" in out and "Logs and checkpoints" not in out, err
    code, _, err = cli("--evaluate runs/run0 --gamma 0.5")
    assert code == 2 and "--gamma is for training: --evaluate does not use it." in err
    code, _, err = cli("--resume runs/run0 --run-name other")
    assert code == 2 and "--run-name: a run stays in its folder, runs/run0." in err
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


@scripts_with("environments")
@pytest.mark.parametrize("kill_step", [110, pytest.param(140, marks=pytest.mark.slow)])
@slow_on("kl_penalty", "multidiscrete", "lstm")
def test_a_killed_run_goes_on_bit_for_bit_and_its_curves_have_each_step_once(
    script, tiny, monkeypatch, kill_step
):
    """Killed when an iteration is logged, but not saved; or when none is."""
    settings = {"total_timesteps": 160, "checkpoint_interval": 2, "learning_rate": 0.003}
    whole = script.module.train(tiny("Walk", **settings))
    expected = curves("runs/run0")
    args = tiny("Walk", **settings)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Fake, "kill_at", sum(env.steps for env in Fake.made) + kill_step)
        script.module.train(args)
    run_dir = Path("runs", args.run_name)
    for log in run_dir.glob("events*"):  # their names end in seconds: this is older
        log.rename(run_dir / "events.out.tfevents.0")
    Fake.made.clear()
    run_id = torch.load(run_dir / "checkpoint.pt")["run_id"]
    resumed = script.module.train(resume=run_dir)
    assert same_weights(whole["agent"], resumed["agent"]) and len(whole["episodes"]) > 5
    assert whole["episodes"] == resumed["episodes"]
    # Of what was before the checkpoint, only the running episodes are played again.
    replayed = sum(env.steps for env in Fake.made) - (160 - kill_step // 64 * 64)
    assert 0 < replayed < 12 * len(Fake.made)
    assert not list(run_dir.glob("*.tmp"))
    assert same(content("runs/run0"), content(run_dir))
    assert torch.load(run_dir / "checkpoint.pt")["run_id"] == run_id
    found = curves(run_dir)
    assert found.keys() == expected.keys()
    for tag in found.keys() - {"charts/SPS"}:
        np.testing.assert_equal(found[tag], expected[tag])


@scripts("continuous", "kl_penalty", "multidiscrete", "vector_env", "atari", "lstm")
@slow_on("kl_penalty", "multidiscrete", "atari", "lstm")
def test_a_run_that_is_stopped_in_its_first_iteration_is_resumed(script, tiny, monkeypatch):
    whole = script.module.train(tiny("Walk"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Fake, "kill_at", sum(env.steps for env in Fake.made) + 10)
        script.module.train(tiny("Walk"))
    assert script.module.load_checkpoint("runs/run1")["updates"] == []
    assert same_weights(whole["agent"], script.module.train(resume="runs/run1")["agent"])
    assert same(content("runs/run0"), content("runs/run1"))
    Path("runs/begun").mkdir()  # by a run that was stopped before that
    assert script.module.train(tiny("Walk", run_name="begun"))["episodes"] == whole["episodes"]


@scripts("continuous", "vector_env")
def test_a_folder_in_which_a_run_trains_is_refused_until_it_ends(script, tiny):
    taken = []

    def take(result):
        with pytest.raises(filelock.Timeout), filelock.FileLock("runs/run0/lock", timeout=0):
            pass
        taken.append(len(result["updates"]))

    whole = script.module.train(tiny("Walk"), on_iteration=take)
    assert taken == [1, 2, 3]
    refused = pytest.raises(script.module.UsageError, match="runs/run0 is in use: another process")
    with filelock.FileLock("runs/run0/lock"), refused:
        script.module.train(resume="runs/run0")
    again = script.module.train(resume="runs/run0")
    assert same_weights(whole["agent"], again["agent"]) and len(again["updates"]) == 3


@scripts("continuous", "atari", "lstm")
@slow_on("lstm")
def test_episodes_that_cannot_be_replayed_begin_anew(script, tiny, monkeypatch, capsys):
    """With a sentence; weights, Adam and logs are continued nonetheless."""
    old = script.module.train(tiny("Walk"))["episodes"]
    observe = fake_envs.Walk.observe
    monkeypatch.setattr(fake_envs.Walk, "observe", lambda self: observe(self) + 1)
    longer = tiny("Walk", total_timesteps=160, run_name="run0")
    result = script.module.train(longer, resume="runs/run0")
    assert "could not be replayed" in capsys.readouterr().out
    assert [x["global_step"] for x in result["updates"]] == [32, 64, 96, 128, 160]
    assert result["episodes"][: len(old)] == old
    later = [x for x in result["episodes"] if x["global_step"] > 96]
    assert all(x["length"] <= 12 and x["global_step"] > 96 + x["length"] - 1 for x in later)
    if "vector" in script.features:
        sizes = {"num_envs": 1, "num_steps": 32, "total_timesteps": 192}
        other = tiny("Walk", **sizes, run_name="run0")
        assert len(script.module.train(other, resume="runs/run0")["updates"]) == 6
        assert "could not be replayed: --num-envs has changed." in capsys.readouterr().out


@scripts_with("environments")
@pytest.mark.slow
def test_a_file_alone_killed_at_five_random_moments_ends_as_if_it_had_not_been(script):
    shutil.copy(script.path, ".")  # into an empty folder

    def start(flags):
        eager = "--compile no " if hasattr(script.args(), "compile") else ""
        line = f"{sys.executable} {script.path.name} --device cpu {eager}{flags}"
        return subprocess.Popen(line.split(), stdout=subprocess.PIPE, text=True)

    def steps():
        path = Path("runs/cut/checkpoint.pt")
        if not path.exists():
            return -1
        updates = torch.load(path)["updates"]
        return updates[-1]["global_step"] if updates else 0

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


@scripts_with("environments")
@slow_on("kl_penalty", "multidiscrete", "lstm")
def test_ctrl_c_says_step_and_folder_and_leaves_the_last_checkpoint(script, tiny, cli):
    code, _, err = cli(flags(tiny("Interrupted", total_timesteps=256, checkpoint_interval=1)))
    said = r"Interrupted at step (\d+). To continue from the last checkpoint: --resume runs/run0\n"
    (step,) = re.findall(said, err)
    assert code == 130 and "Traceback" not in err
    updates = script.module.load_checkpoint("runs/run0")["updates"]
    assert 0 < len(updates) < 8 and updates[-1]["global_step"] < int(step) <= 32 * len(updates) + 32


@scripts("continuous", "vector_env")
@pytest.mark.parametrize(
    "kind", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_other_signals_end_a_run_like_ctrl_c_and_close_its_environments(
    script, tiny, cli, monkeypatch, hangup, kind
):
    """Those of a cluster and of a closed terminal. `train` alone leaves signals to its caller."""
    monkeypatch.setattr(fake_envs.Interrupted, "kind", kind)
    script.module.train(tiny("Walk"))
    assert signal.getsignal(kind) == signal.SIG_DFL
    Fake.made.clear()
    code, _, err = cli(flags(tiny("Interrupted", total_timesteps=256)))
    assert code == 128 + kind and "Traceback" not in err
    last = "" if script.path.stem == "ppo_vector_env" else " from the last checkpoint"  # is saved
    assert re.search(rf"(?m)^Interrupted at step \d+. To continue{last}: --resume runs/run1$", err)
    assert len(Fake.made) >= 2 and all(env.closed == 1 for env in Fake.made)


@scripts("continuous", "vector_env")
def test_a_signal_that_is_ignored_stays_so(script, cli, monkeypatch, hangup):
    """As SIGHUP is after `nohup`."""
    monkeypatch.setattr(script.module, "train", lambda *_, **__: {"run_dir": "here"})
    signal.signal(hangup, signal.SIG_IGN)
    assert cli("")[0] == 0
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(hangup) == signal.SIG_IGN


@scripts("continuous", "vector_env", "atari", "lstm")
@slow_on("atari", "lstm")
def test_the_last_episodes_are_kept_and_the_log_has_the_means_of_all(script, tiny, monkeypatch):
    whole = script.module.train(tiny("Walk", total_timesteps=160))
    monkeypatch.setattr(script.module, "EPISODES_KEPT", 3)
    result = script.module.train(tiny("Walk", total_timesteps=160, checkpoint_interval=1))
    assert len(whole["episodes"]) > 6 and result["episodes"] == whole["episodes"][-3:]
    assert script.module.load_checkpoint("runs/run1")["episodes"] == result["episodes"]
    for name in ("charts/episodic_return", "charts/episodic_length"):
        assert curves("runs/run0")[name] == curves("runs/run1")[name]


@scripts("continuous")
def test_what_is_saved_is_plain(script, tmp_path):
    episode = {"global_step": 7, "return": np.float64(0.5), "length": np.int64(3)}
    state = {"a": np.float64(1.5), "b": [np.int64(2), (np.bool_(True), None)], "c": np.arange(3.0)}
    script.module.save_checkpoint(tmp_path, {**state, "episodes": [episode] * 2})
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert repr([saved["a"], saved["b"]]) == "[1.5, [2, (True, None)]]"  # no tensors
    assert saved["c"].tolist() == [0, 1, 2] and saved["c"].dtype == torch.float64
    assert repr(saved["episodes"]) == repr([{"global_step": 7, "return": 0.5, "length": 3}] * 2)


@scripts("continuous", "atari")
def test_a_checkpoint_of_version_6_is_refused_by_a_sentence(script, tiny, cli):
    """Its episodes are in columns, and --compile was a switch."""
    script.module.train(tiny("Walk", total_timesteps=32))
    path = Path("runs/run0/checkpoint.pt")
    saved = torch.load(path)
    saved["episodes"] = {name: torch.zeros(0) for name in ("global_step", "return", "length")}
    if "compile" in saved["args"]:
        saved["args"]["compile"] = True
    torch.save(saved, path)
    code, _, err = cli("--resume runs/run0")
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(f"Error: {path} is missing, damaged, or from another script or version: ")


class Bomb:
    """A pickle that would create a file if it were ever loaded."""

    def __reduce__(self):
        return (open, ("executed", "w"))


@scripts("continuous")
def test_a_damaged_or_foreign_file_is_refused_and_not_executed(script, tiny):
    agent = script.module.train(tiny("Walk", total_timesteps=32))["agent"]
    path = Path("runs/run0/checkpoint.pt")
    good, saved = path.read_bytes(), torch.load(path)
    place = good.index(agent.value[0].weight.detach().numpy().tobytes())
    wrong_bit = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    other_network = {x: y[..., :1] for x, y in saved["agent"].items()}
    contents = {"checksum": wrong_bit, "not a zip": good[:-100], "Unpickling": Bomb()}
    contents["size mismatch"] = {**saved, "agent": other_network}
    contents |= {x: {**saved, "args": {**saved["args"], x: 1.5}} for x in ("temperature", "gamma")}
    for word, content in contents.items():  # what the sentence has of them
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        sentence = rf"{path} is missing, damaged, or from another script or version: .*{word}.*"
        with pytest.raises(script.module.UsageError, match=sentence):
            script.module.load_checkpoint("runs/run0")
    assert not Path("executed").exists()
    torch.save(Bomb(), path)
    torch.load(path, weights_only=False).close()  # the bomb is live
    assert Path("executed").exists()


@scripts("continuous")
@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
def test_a_full_disk_is_a_sentence_and_leaves_the_last_checkpoint(script, tiny, monkeypatch):
    def fill(result):  # after the first iteration was saved
        Path("runs/run0/checkpoint.tmp").symlink_to("/dev/full")

    sentence = "Could not save; runs/run0 keeps its last checkpoint: .* No space left on device"
    with pytest.raises(script.module.UsageError, match=sentence):
        script.module.train(tiny("Walk", checkpoint_interval=1), on_iteration=fill)
    assert len(script.module.load_checkpoint("runs/run0")["updates"]) == 1
    assert not list(Path("runs").rglob("*.tmp"))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # which TensorBoard raises
    monkeypatch.setattr(script.module, "SummaryWriter", MagicMock(side_effect=error))
    with pytest.raises(script.module.UsageError, match="runs/run1: No space left on device"):
        script.module.train(tiny("Walk"))
