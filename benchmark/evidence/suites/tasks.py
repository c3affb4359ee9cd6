"""Two small tasks whose best returns are known: one for independent actions, one for memory.

    python ppo_multidiscrete.py --env-id benchmark.evidence.suites.tasks:Points-v0

A suite pastes this file into its copy of a script, where `Recall` takes the place of the games.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np


class Points(gym.Env):
    """Four points on a line; component i of the action moves the i-th by up to i places, i from 1.

    The reward is the mean distance from 0, negated, so that each should go there and stay.
    """

    action_space = gym.spaces.MultiDiscrete([3, 5, 7, 9])
    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.places = self.np_random.integers(-10, 11, size=4)
        return self.places.astype(np.float32), {}

    def step(self, action):
        self.places += action - self.action_space.nvec // 2
        return self.places.astype(np.float32), -np.abs(self.places).mean(), False, False, {}


class Joint(gym.ActionWrapper):
    """Every combination of the components is one choice among many."""

    def __init__(self, env):
        super().__init__(env)
        self.sizes = env.action_space.nvec
        self.action_space = gym.spaces.Discrete(self.sizes.prod())

    def action(self, action):
        return np.array(np.unravel_index(action, self.sizes))


gym.register("Points-v0", Points, max_episode_steps=20)


class Recall(gym.Env):
    """The first frame is white in half of the episodes, and all others are black.

    From the sixth step on each is the last with probability 0.1, and that action earns 1 if it
    tells which the first frame was, -1 if not. No frame shows where an episode begins or ends.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    # What a game script asks of its emulator: there are no lives, and nothing to restore.
    ale = SimpleNamespace(lives=lambda: 0, cloneState=lambda include_rng: None)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.white, self.left = self.np_random.integers(2), 5 + self.np_random.geometric(0.1)
        return np.full((84, 84), 255 * self.white, np.uint8), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        reward = float(over and (1 if action == self.white else -1))
        return np.zeros((84, 84), np.uint8), reward, over, False, {}
