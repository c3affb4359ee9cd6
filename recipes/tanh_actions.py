"""Keeps actions within their bounds by tanh, instead of clipping what leaves them.

    python -m recipes.tanh_actions

It helps if bounds are narrow, so that clipping would change most actions. In Reacher-v5 with bounds
of -0.4 and 0.4, the last 20 episodes of 40,960 steps return -9.2 (seeds 1 to 3: -8.5, -9.1, -9.9),
with clipping -24.1 (-21.2, -23.2, -28.0); without noise -6.3, with clipping -7.8. In Pendulum-v1
there is no clear difference: -287 with a std of 90 over seeds 1 to 5, and -333 with a std of 110.
`load_policy` needs the wrapped environment.
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
    compile=False,  # compiling takes longer than a run of this length
)

if __name__ == "__main__":
    run_dir = ppo.train(SETTINGS, make)["run_dir"]
    ppo.evaluate(run_dir, make)  # a policy needs the wrapper in evaluation, too
