"""Trains in an environment of your own: copy this file, and replace the class.

    python -m recipes.own_environment

In the 10,240 steps below (seed 1), the return rises from -13 in the first 50 episodes to -2 in the
last 50.

Scale actions to about [-1, 1], because the first policy explores with a standard deviation of 1. If
all that is random in an episode comes from the seed that `reset` gets, here by `self.np_random`, a
resumed run continues to the bit. Leave a time limit to `TimeLimit`, or return it as `truncated`: it
is no failure. For flags and for `seeds`, register the class with Gymnasium in a file next to the
script: `--env-id my_file:My-v0`.
"""

import gymnasium as gym
import numpy as np

import ppo_continuous_action as ppo


class Target(gym.Env):
    """Move a point to 0 and keep it there."""

    observation_space = gym.spaces.Box(-2, 2, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None) -> tuple:
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, size=1).astype(np.float32)
        return self.x, {}

    def step(self, action: np.ndarray) -> tuple:
        self.x = (self.x + 0.2 * action).clip(-2, 2)
        return self.x, -abs(self.x.item()), False, False, {}


def make() -> gym.Env:
    return gym.wrappers.TimeLimit(Target(), max_episode_steps=20)


SETTINGS = ppo.Args(num_steps=512, total_timesteps=10_240)

if __name__ == "__main__":
    returns = [x["return"] for x in ppo.train(SETTINGS, make)["episodes"]]
    first, last = np.mean(returns[:50]), np.mean(returns[-50:])
    print(f"Return from {first:.1f} in the first 50 episodes to {last:.1f} in the last 50")
