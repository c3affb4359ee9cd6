"""Returns of uniformly random actions, the zero of Table 1: `python -m benchmark.random_policy`."""

import json

import gymnasium as gym
import numpy as np

from benchmark.provenance import versions
from benchmark.results import REFERENCE
from benchmark.suites import MUJOCO7

EPISODES = 100


def random_returns(environment: str, episodes: int, seed: int) -> np.ndarray:
    """Returns (episodes,) of actions drawn uniformly from the action space."""
    env = gym.make(environment, disable_env_checker=True)
    env.action_space.seed(seed)
    returns = np.zeros(episodes)
    for episode in range(episodes):
        env.reset(seed=seed if episode == 0 else None)
        over = False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            returns[episode] += reward
            over = terminated or truncated
    env.close()
    return returns


def main() -> None:
    """Measure all environments of Table 1."""
    found = {}
    for environment in MUJOCO7:
        returns = random_returns(environment, EPISODES, seed=1)
        mean, std = (round(float(x), 3) for x in (returns.mean(), returns.std()))
        found[environment] = {"mean": mean, "std": std, "episodes": EPISODES, "seed": 1}
    found["versions"] = versions()
    (REFERENCE / "random_policy.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
