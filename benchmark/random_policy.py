"""Returns of uniformly random actions, the zero of Table 1: `python -m benchmark.random_policy`."""

import json

import gymnasium as gym
import numpy as np

from benchmark.provenance import machine
from benchmark.results import REFERENCE
from benchmark.suites import MUJOCO7

EPISODES, SEED = 100, 1


def main() -> None:
    """Measure all environments of Table 1; actions are drawn uniformly from the action space."""
    found = {}
    for environment in MUJOCO7:
        env = gym.make(environment, disable_env_checker=True)
        env = gym.wrappers.RecordEpisodeStatistics(env, buffer_length=EPISODES)
        env.action_space.seed(SEED)
        env.reset(seed=SEED)
        while len(returns := env.return_queue) < EPISODES:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        mean, std = (round(float(x), 3) for x in (np.mean(returns), np.std(returns)))
        found[environment] = {"mean": mean, "std": std, "episodes": EPISODES, "seed": SEED}
    found["versions"] = machine()["versions"]
    (REFERENCE / "random_policy.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
