"""Checkpoints of every script: a killed run goes on bit for bit, damaged files are refused."""

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import fake_envs
import numpy as np
import pytest
import torch
from adapters import flags, on
from conftest import same_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TIMING = {"charts/SPS", "charts/SPS_rollout", "charts/SPS_update"}


class Killed(Exception):
    """Stands for kill -9."""


@pytest.fixture
def kill_at(script, monkeypatch):
    """End the run in the middle of the rollout that comes to this step."""
    real = script.module.Environments.step

    def arm(global_step):
        def dying(self, *args):
            if self.global_step >= global_step:
                raise Killed
            return real(self, *args)

        monkeypatch.setattr(script.module.Environments, "step", dying)

    return arm


def resume(script, run_dir, **changes):
    """Continue as `--resume` does, with the settings of the checkpoint."""
    saved = script.module.load_checkpoint(run_dir)["args"]
    return script.module.train(script.module.Args(**{**saved, "resume": str(run_dir), **changes}))


def same(a, b):
    """True if two contents of checkpoints agree bitwise, apart from times."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a if k not in TIMING)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def content(script, run_dir):
    """All that a run has left, without its name."""
    saved = script.module.load_checkpoint(run_dir)
    saved["args"] = {k: v for k, v in saved["args"].items() if k not in ("run_name", "resume")}
    return saved


def assert_same_result(a, b):
    """Two results of `train`, apart from settings."""
    assert same_weights(a["agent"], b["agent"]) and len(a["episodes"]) > 5
    assert same([a["episodes"], a["updates"]], [b["episodes"], b["updates"]])


# --- Resuming ---


@pytest.mark.parametrize("kill_step", [90, 140])
def test_a_killed_run_goes_on_bit_for_bit(script, tiny, kill_at, kill_step):
    settings = {"total_timesteps": 192, "checkpoint_interval": 2, "learning_rate": 0.003}
    result = script.module.train(tiny("Walk", **settings))
    kill_at(kill_step)
    with pytest.raises(Killed):
        script.module.train(tiny("Walk", **settings))
    kill_at(10**9)
    fake_envs.Fake.made.clear()
    resumed = resume(script, "runs/run1")
    # Of what was before the checkpoint, only the running episodes are played again.
    replayed = sum(env.steps for env in fake_envs.Fake.made) - (192 - kill_step // 64 * 64)
    assert 0 < replayed < 12 * len(fake_envs.Fake.made)
    assert_same_result(result, resumed)
    assert not list(Path("runs/run1").glob("*.tmp"))
    assert same(content(script, "runs/run0"), content(script, "runs/run1"))


@on("continuous")
def test_annealed_log_std_and_adapted_learning_rate_go_on_too(script, tiny, kill_at):
    settings = {"total_timesteps": 192, "checkpoint_interval": 2, "anneal_log_std": (-0.5, -1.5)}
    settings |= {"anneal_lr": False, "learning_rate": 0.001, "adapt_lr_kl": 1e-3}
    result = script.module.train(tiny("Walk", **settings))
    assert len({x["charts/learning_rate"] for x in result["updates"]}) > 2
    kill_at(90)
    with pytest.raises(Killed):
        script.module.train(tiny("Walk", **settings))
    kill_at(10**9)
    assert_same_result(result, resume(script, "runs/run1"))
    assert_same_result(result, resume(script, "runs/run1"))  # which has nothing left to do
    with pytest.raises(ValueError, match="cannot change learning_rate"):  # adapted, not given
        resume(script, "runs/run1", learning_rate=0.01)


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
    old = script.module.load_checkpoint("runs/run0")
    result = resume(script, "runs/run0", total_timesteps=160)
    assert "do not repeat themselves: new" in capsys.readouterr().out
    assert [x["global_step"] for x in result["updates"]] == [32, 64, 96, 128, 160]
    assert result["episodes"][: len(old["episodes"])] == old["episodes"]
    later = [x for x in result["episodes"] if x["global_step"] > 96]
    assert all(x["length"] <= 12 and x["global_step"] > 96 + x["length"] - 1 for x in later)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(2))
def test_a_process_killed_at_five_random_moments_ends_as_if_it_had_not_been(script, run):
    if run >= len(script.real):
        pytest.skip("one real run is all that this script has")
    run = script.real[run]
    command = f"{sys.executable} {script.path} --no-compile --device cpu --checkpoint-interval 2 "

    def start(flags):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen((command + flags).split(), **quiet)

    def steps():
        path = Path("runs/cut/checkpoint.pt")
        return script.module.load_checkpoint("runs/cut")["global_step"] if path.exists() else 0

    assert start(f"--env-id {run} --run-name whole").wait() == 0
    flags, rng = f"--env-id {run} --run-name cut", random.Random(0)
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
    assert same(content(script, "runs/whole"), content(script, "runs/cut"))


# --- The command line ---


def test_resume_takes_the_settings_of_the_run_and_flags_override_them(script, tiny, cli):
    script.module.train(tiny("Walk", learning_rate=0.004, anneal_lr=False, total_timesteps=64))
    code, _, err = cli("--resume runs/run0 --total-timesteps 128 --gamma 0.5")
    assert code == 0, err
    saved = script.module.load_checkpoint("runs/run0")
    assert saved["args"]["total_timesteps"] == 128 and saved["args"]["gamma"] == 0.5
    rates = [x["charts/learning_rate"] for x in saved["updates"]]
    assert rates == pytest.approx([0.004] * 4)
    cli("--resume runs/run0 --total-timesteps 192 --learning-rate 3e-4")  # the default, but given
    saved = script.module.load_checkpoint("runs/run0")
    assert saved["updates"][-1]["charts/learning_rate"] == pytest.approx(3e-4)


def test_a_run_is_not_overwritten_and_what_shapes_it_cannot_change(script, tiny, cli):
    script.module.train(tiny("Walk"))
    before = Path("runs/run0/checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=r"--resume runs/run0.*--run-name"):
        script.module.train(tiny("Walk", run_name="run0"))
    changes = {f"--env-id {script.env_id('Truncated')}": "its environment"}
    changes |= {"--num-envs 8": "num_envs", "--num-steps 4": "num_steps"}
    special = {"continuous": ("--anneal-log-std 0 -1", "anneal_log_std")}
    special["multidiscrete"] = "--bins 5", "bins"
    changes |= dict([special[script.name]]) if script.name in special else {}
    code, _, err = cli("--resume runs/run0 --run-name other --total-timesteps 960")
    assert code == 2 and re.fullmatch(r"Error: .*--resume.*--run-name.*\n", err)
    for change, named in changes.items():
        code, _, err = cli(f"--resume runs/run0 --total-timesteps 960 {change}")
        assert code == 2 and err == f"Error: A resumed run cannot change {named}.\n"
    assert Path("runs/run0/checkpoint.pt").read_bytes() == before


def test_ctrl_c_says_how_to_continue_and_that_works(script, tiny, cli):
    settings = {"total_timesteps": 256, "checkpoint_interval": 1}
    whole = script.module.train(tiny("Walk", **settings))
    code, out, _ = cli(flags(tiny("Interrupted", **settings)))
    assert code == 130
    assert "--resume with the folder above" in out and "checkpoints: runs/run1\n" in out
    code, _, err = cli("--resume runs/run1")
    assert code == 0, err
    saved = script.module.load_checkpoint("runs/run1")
    assert same(dict(saved["agent"]), dict(whole["agent"].state_dict()))


# --- TensorBoard ---


def test_resumed_curves_have_each_step_once(script, tiny, kill_at):
    settings = {"total_timesteps": 160, "checkpoint_interval": 2}
    script.module.train(tiny("Walk", **settings))
    kill_at(110)  # iteration 3 has been logged, but not saved
    with pytest.raises(Killed):
        script.module.train(tiny("Walk", **settings))
    kill_at(10**9)
    time.sleep(1.05 - time.time() % 1)  # files are read in the order of the seconds in their names
    resume(script, "runs/run1")
    a, b = (EventAccumulator(f"runs/run{i}", size_guidance={"scalars": 0}) for i in (0, 1))
    for events in (a, b):
        events.Reload()
    assert a.Tags()["scalars"] == b.Tags()["scalars"]
    for tag in set(a.Tags()["scalars"]) - TIMING:
        curves = [[(x.step, x.value) for x in events.Scalars(tag)] for events in (a, b)]
        np.testing.assert_equal(*curves)
    assert [x.step for x in b.Scalars("losses/policy_loss")] == [32, 64, 96, 128, 160]


# --- Files ---


def test_a_renamed_copy_is_welcome_and_another_algorithm_is_named(script, tiny, cli):
    script.module.train(tiny("Walk", anneal_lr=False))
    path = Path("runs/run0/checkpoint.pt")
    torch.save({**torch.load(path, weights_only=True), "script": "my_ppo"}, path)
    code, _, err = cli("--resume runs/run0 --total-timesteps 128")
    assert code == 0, err
    saved = torch.load(path, weights_only=True)
    assert len(saved["updates"]) == 4 and saved["script"] == script.path.stem
    torch.save({**saved, "script": "sac", "args": {**saved["args"], "temperature": 1.0}}, path)
    for flag in ("--resume", "--evaluate"):
        code, _, err = cli(f"{flag} runs/run0")
        assert code == 2 and re.search(r"^Error: .* made by sac\.py.* temperature", err), err


def damaged(good, count):
    """Files with one wrong bit, or cut short."""
    rng = random.Random(0)
    for k in range(count):
        position, data = rng.randrange(len(good)), bytearray(good)
        data[position] ^= 1 << rng.randrange(8)
        yield bytes(data) if k % 10 else good[:position]


@on("continuous")
@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_never_taken_for_another(script, tiny, count):
    script.module.train(tiny("Walk"))
    path = Path("runs/run0/checkpoint.pt")
    good, intact, refused = path.read_bytes(), script.module.load_checkpoint("runs/run0"), 0
    for data in damaged(good, count):
        path.write_bytes(data)
        try:
            loaded = script.module.load_checkpoint("runs/run0")
        except ValueError as error:
            refused += 1
            assert "checkpoint.pt is damaged" in str(error) and "\n" not in str(error)
        else:  # the bit is in a place that says nothing, such as the date of a file
            assert same(loaded, intact)
    assert refused > 0.9 * count


class Bomb:
    """A pickle that would create a file if it were ever loaded."""

    def __reduce__(self):
        return (open, ("executed", "w"))


@on("continuous")
def test_a_foreign_file_is_refused_and_not_executed(script, cli):
    path = Path("runs/odd/checkpoint.pt")
    path.parent.mkdir(parents=True)
    for odd in ([1, 2], {"agent": {}}, "text", {"script": script.name, "args": Bomb()}, Bomb()):
        torch.save(odd, path)
        code, _, err = cli("--resume runs/odd")
        assert code == 2 and err.startswith("Error: ") and err.count("\n") == 1, odd
    assert not Path("executed").exists()
    torch.load(path, weights_only=False).close()  # the bomb is live
    assert Path("executed").exists()


@on("continuous")
def test_a_save_that_fails_leaves_the_last_checkpoint(script, tiny, monkeypatch):
    real, calls = torch.save, []

    def torn(content, path):
        calls.append(content)
        if len(calls) == 2:
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        real(content, path)

    args = tiny("Walk", checkpoint_interval=1)
    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="No space"):
        script.module.train(args)
    assert len(script.module.load_checkpoint("runs/run0")["updates"]) == 1
