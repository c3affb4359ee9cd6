"""benchmark/baselines/atari_stepping.py: ppo_atari.py with games that EnvPool steps."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ppo_atari
from benchmark.baselines import atari_stepping


class Envs:
    """EnvPool's interface: all games take a step, and each begins again by itself."""

    action_space = SimpleNamespace(n=np.int64(6))

    def __init__(self, num_envs):
        self.num_envs, self.t = num_envs, 0

    def reset(self):
        return np.zeros((self.num_envs, 4, 84, 84), np.uint8), {}

    def step(self, actions):
        self.t += 1
        obs = np.full((self.num_envs, 4, 84, 84), self.t, np.uint8)
        lost = np.arange(self.num_envs) == self.t % self.num_envs
        return obs, actions.astype(np.float32), lost, np.zeros(self.num_envs, bool), {}


@pytest.fixture
def made(monkeypatch):
    made = []

    def make(name, **settings):
        made.append((name, settings))
        return Envs(settings["num_envs"])

    monkeypatch.setitem(sys.modules, "envpool", SimpleNamespace(make=make))
    return made


def test_envpools_games_have_the_methods_that_training_calls(made):
    args = atari_stepping.Args(env_id="Pong", num_envs=3, workers=2, total_timesteps=1000)
    pool = atari_stepping.Pool(None, args)
    ((name, settings),) = made
    assert name == "Pong-v5" and settings["num_threads"] == 2 and settings["episodic_life"]
    steps = pool.call("step", {0: 4, 1: 0, 2: 5})
    assert [(reward, bool(lost)) for reward, lost, *_ in steps] == [
        (4, False),
        (0, True),
        (5, False),
    ]
    assert pool.num_actions == 6 and (pool.obs == 1).all()
    assert pool.call("begin_next", {1: None}) == [[]]


@pytest.mark.parametrize("learn", [True, False])
def test_it_trains_or_only_acts(made, learn, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo_atari, "Games", atari_stepping.Pool)
    size = {"num_envs": 2, "num_steps": 4, "num_minibatches": 2, "total_timesteps": 16}
    args = atari_stepping.Args(env_id="Pong", compile=False, device="cpu", **size)
    torch.manual_seed(args.seed)
    new = ppo_atari.Agent(6)
    update = ppo_atari.ppo_update if learn else atari_stepping.no_update
    result = ppo_atari.train(args, update=update)
    same = torch.equal(result["agent"].policy.weight, new.policy.weight)
    assert len(result["updates"]) == 2 and same == (not learn)
