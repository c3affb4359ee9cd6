"""Games in several processes: the same results for any number of them, and no process left over."""

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import fake_envs
import numpy as np
import pytest
import torch
from adapters import scripts, scripts_with, slow_on
from helpers import assert_same_runs, flags


def children(pid=None):
    """The processes that this one, or another, has started and not waited for."""
    pid = pid or os.getpid()
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def is_alive(pid):
    """False also for a process that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def settings(script, tiny, monkeypatch):
    """Make Args for a short run of four games in so many processes."""

    def make(processes, **changes):
        monkeypatch.setattr(script.module, "GAME_PROCESSES", processes)
        return tiny("Walk", **{"num_envs": 4, "num_steps": 8, "checkpoint_interval": 1, **changes})

    return make


@scripts_with("games")
@slow_on("lstm")
def test_results_do_not_depend_on_the_number_of_processes_and_threads(script, settings):
    one, other = (script.module.train(settings(x)) for x in (1, 3))
    torch.set_num_threads(2)  # before the run
    many = script.module.train(settings(8))
    assert len(one["episodes"]) > 4
    assert_same_runs(one, other)
    assert_same_runs(one, many)


@pytest.mark.slow
@scripts("atari")
def test_a_process_plays_a_real_game_as_the_first_one_does(script, settings, monkeypatch):
    """A time limit ends games in every rollout."""
    monkeypatch.setattr(script.module, "MAX_GAME_STEPS", 10)
    game = {"env_id": "Breakout", "sticky_actions": 0.25, "num_envs": 2}
    one, other = (script.module.train(settings(x, **game)) for x in (1, 2))
    assert len(one["episodes"]) > 4
    assert_same_runs(one, other)


@scripts("atari")
def test_a_killed_game_process_is_one_sentence_and_the_run_goes_on(script, settings, capfd):
    """With another number of processes."""
    calls, before, module = [], children(), script.module

    def update(*inputs):
        players = children() - before
        assert len(players) == 2
        calls.append(0)
        if len(calls) == 9:  # the first one of the third iteration, which is not saved then
            os.kill(int(max(players, key=int)), signal.SIGKILL)
        return module.ppo_update(*inputs)

    whole = module.train(settings(1))
    with pytest.raises(module.UsageError, match="was killed: use --resume to continue"):
        module.train(settings(3, run_name="cut"), update)
    assert children() == before and "Traceback" not in capfd.readouterr().err
    assert len(module.load_checkpoint("runs/cut")["updates"]) == 2
    resumed = module.train(settings(2, run_name="cut"), resume="runs/cut")
    assert_same_runs(whole, resumed)
    assert "could not be replayed" not in capfd.readouterr().out


@scripts("atari")
@pytest.mark.parametrize("processes", [1, 3])
def test_an_error_in_an_update_or_a_game_is_raised_whoever_plays_it(
    script, settings, monkeypatch, processes
):
    """No process is left."""
    before, learner = children(), os.getpid()

    def observe(self):
        assert (os.getpid() == learner) == (processes > 1), "the game is broken"
        return fake_envs.frame(np.zeros(3))

    with pytest.raises(ZeroDivisionError):
        script.module.train(settings(processes), lambda *_: 1 / 0)
    monkeypatch.setattr(fake_envs.Walk, "observe", observe)
    with pytest.raises(AssertionError, match="the game is broken"):
        script.module.train(settings(processes))
    assert children() == before


OTHERS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@scripts("atari")
@pytest.mark.parametrize(
    "kind", [signal.SIGKILL, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
)
def test_when_the_learner_is_killed_its_processes_end(
    script, settings, monkeypatch, capfd, request, hangup, kind
):
    """Within a second. Unless it is killed at once, there is one sentence."""
    line = flags(settings(3, total_timesteps=1e9, run_name="run"))
    monkeypatch.setattr("sys.argv", [script.path.name, *line.split()])
    learner = multiprocessing.get_context("fork").Process(target=script.module.main)
    learner.start()
    request.addfinalizer(learner.kill)
    while not Path("runs/run/checkpoint.pt").exists():
        assert learner.is_alive()
        time.sleep(0.02)
    time.sleep(0.2)  # the bar is drawn and will be closed, so that the sentence has its own line
    pids = children(learner.pid)
    assert len(pids) == 2 and all(map(is_alive, pids))
    if kind in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all
        for pid in pids:
            os.kill(int(pid), kind)
    os.kill(learner.pid, kind)
    learner.join()
    deadline = time.monotonic() + 1
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    error = capfd.readouterr().err
    assert "Traceback" not in error
    if kind == signal.SIGKILL:
        assert learner.exitcode == -kind
    else:
        assert learner.exitcode == 128 + kind
        last = error.rstrip().splitlines()[-1]
        advice = "To continue from the last checkpoint: --resume runs/run"
        assert re.fullmatch(rf"Interrupted at step \d+\. {advice}", last)
