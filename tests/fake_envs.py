"""Environments whose every number a test can predict; importing this module registers them."""

from typing import ClassVar

import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    """Observation (episode, step), reward 1, episodes of `length` steps that end as `end` says."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(-0.1, 0.1, (2,), np.float32)
    made: ClassVar[list["Counter"]] = []  # every instance since the last `clear`

    def __init__(self, length=5, end="truncated", reward=1.0, bad_step=None, bad="nan"):
        self.length, self.end, self.reward = length, end, reward
        self.bad_step, self.bad = bad_step, float(bad)
        self.episode, self.t, self.steps, self.resets = -1, 0, 0, 0
        self.seeds, self.actions = [], []
        Counter.made.append(self)

    def _obs(self):
        return np.array([self.episode, self.t], np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.t, self.resets = self.episode + 1, 0, self.resets + 1
        return self._obs(), {}

    def step(self, action):
        self.actions.append(np.array(action))
        self.t, self.steps = self.t + 1, self.steps + 1
        last = self.t == self.length
        terminated = last and self.end in ("terminated", "both")
        truncated = last and self.end in ("truncated", "both")
        obs, reward = self._obs(), self.reward
        if self.steps == self.bad_step:
            obs = obs + self.bad
        return obs, reward, terminated, truncated, {}


class BadReward(Counter):
    """Rewards turn infinite at one step."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, np.inf if self.steps == 7 else reward, terminated, truncated, info


class Shapes(gym.Env):
    """Dictionary observations of mixed types and a matrix of actions with uneven bounds."""

    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (2, 3), np.uint8),
            "kind": gym.spaces.Discrete(3),
            "count": gym.spaces.Box(-5, 5, (1,), np.int64),
        }
    )
    action_space = gym.spaces.Box(
        np.array([[-1.0, -2.0], [-3.0, 0.0]]), np.array([[1.0, 0.5], [3.0, 4.0]]), dtype=np.float64
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert action.shape == (2, 2)
        assert (action >= self.action_space.low).all() and (action <= self.action_space.high).all()
        return self.observation_space.sample(), 0.5, bool(self.np_random.random() < 0.1), False, {}


class Target(gym.Env):
    """One-step episodes; reward falls with the distance of the action from the observation."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.state, {}

    def step(self, action):
        return self.state, -float(abs(action[0] - self.state[0])), True, False, {}


class Raises(gym.Env):
    """Cannot be made."""

    def __init__(self):
        raise OSError("no licence")


class Sequence(Target):
    """Its observations have no fixed length."""

    observation_space = gym.spaces.Sequence(gym.spaces.Box(-1, 1, (1,)))


class Integers(Target):
    """Its actions are whole numbers."""

    action_space = gym.spaces.Box(0, 5, (2,), np.int64)


for name, cls in {
    "FakeRaises-v0": Raises,
    "FakeSequence-v0": Sequence,
    "FakeIntegers-v0": Integers,
    "FakeCounter-v0": Counter,
    "FakeBadReward-v0": BadReward,
    "FakeShapes-v0": Shapes,
    "FakeTarget-v0": Target,
}.items():
    if name not in gym.registry:
        gym.register(name, cls)
