"""benchmark/paper/baselines/atari_stepping.py: ppo_atari.py with games that EnvPool steps."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppo_atari
from benchmark.paper.baselines import atari_stepping


class Envs:
    """EnvPool's interface: all games take a step, and each begins again by itself."""

    action_space = SimpleNamespace(n=np.int64(6))

    def __init__(self, name, num_envs, **settings):
        assert name == "Pong-v5" and settings["num_threads"] == 2 and settings["episodic_life"]
        self.num_envs, self.t = num_envs, 0

    def reset(self):
        return np.zeros((self.num_envs, 4, 84, 84), np.uint8), {}

    def step(self, actions):
        self.t += 1
        obs = np.full((self.num_envs, 4, 84, 84), self.t, np.uint8)
        lost = np.arange(self.num_envs) == self.t % self.num_envs
        return obs, actions.astype(np.float32), lost, np.zeros(self.num_envs, bool), {}


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", SimpleNamespace(make=Envs))
    size = {"num_envs": 3, "num_steps": 4, "num_minibatches": 2, "total_timesteps": 24}
    return atari_stepping.Args(env_id="Pong", workers=2, compile=False, device="cpu", **size)


def test_envpools_games_have_the_methods_that_training_calls(args):
    pool = atari_stepping.Pool(None, args)
    rewards, lost, *_ = zip(*pool.call("step", {0: 4, 1: 0, 2: 5}))
    assert rewards == (4, 0, 5) and [*map(bool, lost)] == [False, True, False]
    assert pool.num_actions == 6 and (pool.obs == 1).all()
    assert pool.call("begin_next", {1: None}) == [[]]


def test_without_learning_it_only_acts(args, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo_atari, "Games", atari_stepping.Pool)
    torch.manual_seed(args.seed)
    new = ppo_atari.Agent(6)
    result = ppo_atari.train(args, update=atari_stepping.no_update)
    assert torch.equal(result["agent"].policy.weight, new.policy.weight)
    assert len(result["updates"]) == 2
