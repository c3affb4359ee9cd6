"""Keeps actions within their bounds by tanh, instead of clipping what leaves them.

    python -m recipes.tanh_actions

In Pendulum-v1, the last 50 of the 204 episodes return -283 on average over seeds 1 to 5, with a
standard deviation of 80 (of the seeds; divisor n - 1): -297, -245, -241, -417, -218. The command
prints the first of these. With clipping it is -354 with 95: -506, -263, -325, -296, -379. That is
no clear difference.

It helps if bounds are narrow, so that clipping would change most actions. In Reacher-v5, rescaled
to bounds of -0.4 and 0.4, the last 50 of the 816 episodes return -8.8 with a standard deviation of
0.5 over the same seeds, with clipping -23.8 with 2.0. `load_policy` needs the wrapped environment.
"""

import gymnasium as gym
import numpy as np

import ppo_continuous_action as ppo


class Squash(gym.ActionWrapper):
    """Takes numbers without bounds: an action is the middle of its bounds + half the width * tanh.

    The density of an action is the Gaussian's divided by the slope of tanh. The slope depends on
    the action alone, so it cancels in the ratio of two policies, and the loss stays as it is.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        low, high = env.action_space.low, env.action_space.high
        if not np.isfinite([low, high]).all():
            raise ppo.UsageError(f"Actions are {env.action_space}: tanh needs finite bounds.")
        self.middle, self.half_width = (high + low) / 2, (high - low) / 2
        self.action_space = gym.spaces.Box(-np.inf, np.inf, low.shape)

    def action(self, action: np.ndarray) -> np.ndarray:
        return self.middle + self.half_width * np.tanh(action)


def make() -> gym.Env:
    return Squash(gym.make("Pendulum-v1"))


SETTINGS = ppo.Args(
    total_timesteps=40_960,
    num_envs=4,
    num_steps=256,
    num_minibatches=16,
    learning_rate=1e-3,
    gamma=0.9,
)

if __name__ == "__main__":
    result = ppo.train(SETTINGS, make)
    ppo.evaluate(result["run_dir"], make)  # a policy needs the wrapper in evaluation, too
    returns = [x["return"] for x in result["episodes"]]
    print(f"Return {np.mean(returns[-50:]):.0f} in the last 50 episodes of training")
