"""Games in several processes: the same results for any number of them, and no process left over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from adapters import ROOT, on
from conftest import same_weights

# Print the ids of the processes that play games, and train on, with a small network.
LEARNER = """
import multiprocessing, adapters, {script} as ppo

class Games(ppo.Games):
    def __init__(self, *inputs):
        super().__init__(*inputs)
        print(*[x.pid for x in multiprocessing.active_children()], flush=True)

script = adapters.SCRIPTS["{name}"]
ppo.GAME_PROCESSES, ppo.Agent, ppo.Games = 3, script.small_agent(), Games
settings = dict(env_id="Pong", num_envs=4, total_timesteps=1e9, checkpoint_interval=1)
args = script.args(run_name="run", **settings)
ppo.tyro.cli = lambda *_, **__: ppo.Command(args)
ppo.main()
"""


def children():
    """The processes that this one has started and not waited for."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def is_alive(pid):
    """False also for a process that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def real(script, monkeypatch, tmp_path):
    """Train on real games with a small network, in so many processes: real(3, seed=1)."""

    def train(processes, update=script.module.ppo_update, resume=None, **changes):
        monkeypatch.setattr(script.module, "GAME_PROCESSES", processes)
        settings = {"env_id": "Breakout", "sticky_actions": 0.25, "num_envs": 4, "num_steps": 8}
        settings |= {"total_timesteps": 96, "num_minibatches": 2, "checkpoint_interval": 1}
        args = script.args(**settings | changes)
        return script.module.train(args, update=update, resume=resume)

    monkeypatch.undo()  # the fake games
    monkeypatch.chdir(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script.module, "Agent", script.small_agent())
    return train


def assert_same(a, b):
    assert same_weights(a["agent"], b["agent"]) and a["episodes"] == b["episodes"]
    for x, y in zip(a["updates"], b["updates"], strict=True):
        assert {**x, "charts/SPS": 0} == {**y, "charts/SPS": 0}


@on("atari", "lstm")
def test_results_do_not_depend_on_the_number_of_processes(script, real, monkeypatch):
    """With sticky actions and a time limit that ends games in every rollout."""
    monkeypatch.setattr(script.module, "MAX_GAME_STEPS", 10)
    one, *others = (real(x) for x in (1, 2, 3, 8))
    assert len(one["episodes"]) > 4
    for other in others:
        assert_same(one, other)


@on("atari")
def test_a_killed_game_process_is_one_sentence_and_the_run_goes_on(script, real, capfd):
    """With another number of processes."""
    calls, before = [], children()

    def update(*inputs):
        calls.append(0)
        if len(calls) == 9:  # the first one of the third iteration, which is not saved then
            os.kill(int(max(children() - before, key=int)), signal.SIGKILL)
        return script.module.ppo_update(*inputs)

    whole = real(1)
    with pytest.raises(script.module.UsageError, match="was killed: use --resume to continue"):
        real(3, update, run_name="cut")
    assert children() == before and "Traceback" not in capfd.readouterr().err
    assert len(script.module.load_checkpoint("runs/cut")["updates"]) == 2
    assert_same(whole, real(2, resume="runs/cut"))


@on("atari")
def test_each_process_plays_its_share_and_none_is_left(script, real):
    counts, before = [], children()

    def update(*inputs):
        counts.append(len(children() - before))
        return script.module.ppo_update(*inputs)

    real(3, update)
    assert set(counts) == {2} and children() == before
    with pytest.raises(ZeroDivisionError):
        real(3, lambda *_: 1 / 0)
    assert children() == before


@on("atari")
def test_an_error_in_a_game_is_raised_in_the_learner_whoever_plays_it(script, real, monkeypatch):
    def reward(self, reward):
        if self.unwrapped.ale.getFrameNumber() > 150:
            raise FloatingPointError("the game is broken")
        return reward

    before = children()
    monkeypatch.setattr(script.module.ClipReward, "reward", reward)
    for processes in (1, 3):
        with pytest.raises(FloatingPointError, match="the game is broken"):
            real(processes, num_steps=48, total_timesteps=192)
    assert children() == before


@on("atari")
@pytest.mark.parametrize(
    "kind", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_when_the_learner_is_killed_its_processes_end(script, tmp_path, kind):
    """Within a second. After Ctrl-C there is one sentence."""
    program = LEARNER.format(script=script.path.stem, name=script.name)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    learner = subprocess.Popen([sys.executable, "-c", program], env=env, cwd=tmp_path, **pipes)
    pids = learner.stdout.readline().split()
    assert len(pids) == 2 and all(map(is_alive, pids))
    while not (tmp_path / "runs/run/checkpoint.pt").exists():
        assert learner.poll() is None
        time.sleep(0.02)
    learner.send_signal(kind)
    learner.wait()
    time.sleep(1)
    assert not any(map(is_alive, pids))
    error = learner.communicate()[1]
    assert "Traceback" not in error
    assert error.rstrip().endswith("from its checkpoint.") == (kind == signal.SIGINT)
