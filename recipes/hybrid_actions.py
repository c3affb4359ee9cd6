"""Discrete and continuous actions together: the scores of choices become continuous actions.

    python -m recipes.hybrid_actions

It changes only the environment, and costs some noise. In 20,480 steps of the task below (seed 1),
the return rises from 1.0 in the first 100 episodes to 6.7 in the last 100. Without noise, it is 7.9
in 10 episodes. The maximum is 10.
"""

import gymnasium as gym
import numpy as np

import ppo_continuous_action as ppo


class Darts(gym.Env):
    """Throw a dart in one of four lanes, ten times. The target's lane and its place are shown.

    The reward is 1 minus the distance to the target, and 0 in a wrong lane.
    """

    observation_space = gym.spaces.Box(-1, 1, (5,), np.float32)
    action_space = gym.spaces.Tuple([
        gym.spaces.Discrete(4),
        gym.spaces.Box(-1, 1, (1,), np.float32),
    ])  # fmt: skip

    def observe(self) -> np.ndarray:
        self.lane, self.place = self.np_random.integers(4), self.np_random.uniform(-1, 1)
        return np.float32([*(np.arange(4) == self.lane), self.place])

    def reset(self, *, seed=None, options=None) -> tuple:
        super().reset(seed=seed)
        self.thrown = 0
        return self.observe(), {}

    def step(self, action: tuple) -> tuple:
        lane, place = action
        reward = (lane == self.lane) * max(0.0, 1 - abs(place.item() - self.place))
        self.thrown += 1
        return self.observe(), reward, False, self.thrown == 10, {}


class Scores(gym.ActionWrapper):
    """Turns (choice out of K, numbers) into one vector: K scores, then the numbers.

    The choice is that of the largest score. The Gaussian noise of the scores explores the choices;
    it becomes smaller as the policy becomes sure.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        choice, numbers = env.action_space
        self.count, self.first = choice.n, choice.start
        unbounded = np.full(choice.n, np.inf, np.float32)
        low, high = np.r_[-unbounded, numbers.low], np.r_[unbounded, numbers.high]
        self.action_space = gym.spaces.Box(low, high)

    def action(self, action: np.ndarray) -> tuple:
        return self.first + action[: self.count].argmax(), action[self.count :]


def make() -> gym.Env:
    return Scores(Darts())


SETTINGS = ppo.Args(
    total_timesteps=20_480,
    num_envs=4,
    num_steps=256,
    num_minibatches=8,
    learning_rate=1e-3,
    gamma=0.9,
)

if __name__ == "__main__":
    ppo.evaluate(ppo.train(SETTINGS, make)["run_dir"], make)
