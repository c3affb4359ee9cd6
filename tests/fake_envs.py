"""Environments whose every number a test can predict; importing this module registers them.

Their ids are a behavior and a space: "FakeTruncated-Box-v0", "FakeWalk-Frames-v0".
"""

import functools
import math
import os
import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

NUMBERS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
# What is observed, and what can be done.
SPACES = {
    "Box": (NUMBERS, gym.spaces.Box(-0.1, 0.1, (2,), np.float32)),
    "Discrete": (NUMBERS, gym.spaces.MultiDiscrete([3, 2])),
    "Frames": (gym.spaces.Box(0, 255, (84, 84), np.uint8), gym.spaces.Discrete(6)),
}


def frame(numbers: Sequence[float] | np.ndarray) -> np.ndarray:
    """An image of three stripes, as bright as the numbers say."""
    return np.repeat(np.asarray(numbers).astype(np.uint8), 28)[:, None].repeat(84, axis=1)


def emulator(lives: Callable[[], int] = lambda: 0) -> SimpleNamespace:
    """What the Atari scripts ask of one."""
    state = SimpleNamespace(__getstate__=lambda: b"random numbers")
    clone = {"cloneState": lambda include_rng: state, "restoreState": lambda _: None}
    return SimpleNamespace(**clone, lives=lives)


class Killed(Exception):
    """Stands for kill -9."""


class Fake(gym.Env):
    """Notes what is done to it; subclasses say what is observed and when an episode ends."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 30}
    made: ClassVar[list["Fake"]] = []  # every instance since the last `clear`
    kill_at: ClassVar[float] = math.inf  # the step of all instances together that is not taken

    def __init__(self, space: str, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = SPACES[space]
        self.space, self.render_mode, self.index = space, render_mode, len(Fake.made)
        self.steps, self.episode, self.t = 0, -1, 0
        self.closed = 0  # how often
        self.actions: list[np.ndarray] = []
        self.draws: list[float] = []  # the first random number of each episode: tells its seed
        Fake.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.t > 0 or self.episode < 0:  # an episode without a step does not count
            self.draws.append(0.0)
            self.episode, self.t = self.episode + 1, 0
        self.draws[-1] = self.np_random.random()
        self.begin()
        return self.observe(), {}

    def close(self):
        self.closed += 1

    def begin(self):
        pass

    def step(self, action):
        if sum(env.steps for env in Fake.made) >= Fake.kill_at:
            raise Killed
        self.actions.append(np.array(action))
        self.steps, self.t = self.steps + 1, self.t + 1
        return self.advance(action)

    def render(self):
        return np.full((32, 32, 3), 8 * self.t, np.uint8)


class Counter(Fake):
    """Reward 1, episodes of 5 steps; the observation says environment, episode and step."""

    end = "truncated"

    def observe(self):
        numbers = np.array([self.index, self.episode, self.t], np.float64)
        return frame(8 * numbers) if self.space == "Frames" else numbers

    def advance(self, action):
        last = self.t == 5
        terminated, truncated = last and self.end != "truncated", last and self.end != "terminated"
        return self.observe(), 1.0, terminated, truncated, {}


class Terminated(Counter):
    end = "terminated"


class Both(Counter):
    end = "both"


class Walk(Fake):
    """A random walk that actions push; all of an episode follows from its seed and its actions.

    Reward is the negative distance from the middle. An episode fails at random, or is cut off after
    12 steps.
    """

    def begin(self):
        self.x = self.np_random.normal(size=3)

    def observe(self):
        return frame(128 + 20 * np.clip(self.x, -6, 6)) if self.space == "Frames" else self.x.copy()

    def advance(self, action):
        self.x = 0.9 * self.x + 0.3 * self.np_random.normal(size=3) + 0.1 * np.sum(action)
        reward, failed = -float(np.abs(self.x).sum()), bool(self.np_random.random() < 0.1)
        return self.observe(), reward, failed, self.t == 12, {}


class Interrupted(Walk):
    """Somebody presses Ctrl-C after 40 steps, once, or sends another signal."""

    pressed: ClassVar[list[int]] = []
    kind = signal.SIGINT

    def advance(self, action):
        if self.steps == 40 and not self.pressed:
            self.pressed.append(self.steps)
            os.kill(os.getpid(), self.kind)
        return super().advance(action)


class Target(Fake):
    """One-step episodes; reward falls with the distance of the action from the observation.

    It cannot be rendered, and its constructor knows nothing of that.
    """

    def __init__(self, space: str) -> None:
        super().__init__(space)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def begin(self):
        self.x = self.np_random.uniform(-1, 1, 1).astype(np.float32)

    def observe(self):
        return self.x

    def advance(self, action):
        return self.x, -float(abs(action[0] - self.x[0])), True, False, {}


for cls in (Counter, Terminated, Both, Walk, Interrupted, Target):
    kind = "Truncated" if cls is Counter else cls.__name__
    for space in SPACES:
        gym.register(f"Fake{kind}-{space}-v0", functools.partial(cls, space))
