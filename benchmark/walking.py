"""How fast trained agents walk: returns do not say it, since standing may earn as much."""

import importlib.util
from pathlib import Path

import gymnasium as gym
import numpy as np


class Speedometer(gym.Wrapper):
    """Notes the forward speed of each step, in m/s, in a list per episode."""

    def __init__(self, env: gym.Env, speeds: list[list[float]]) -> None:
        super().__init__(env)
        self.speeds = speeds

    def reset(self, **kwargs):
        self.speeds.append([])
        return self.env.reset(**kwargs)

    def step(self, action):
        step = self.env.step(action)
        self.speeds[-1].append(step[-1]["x_velocity"])
        return step


def walk(script: Path, run_dir: Path) -> dict[str, list[float]]:
    """Play the ten episodes of the script's `--evaluate` with the mean action.

    Returns:
        For each episode its return, its length in steps and its mean speed in m/s.
    """
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module, speeds = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(module)
    make_env = module.make_env
    module.make_env = lambda args: Speedometer(make_env(args), speeds)
    returns = module.evaluate(module.Args(evaluate=str(run_dir)))["mean"]
    episodes = [x for x in speeds if x][: len(returns)]  # those with sampled actions come second
    return {
        "returns": [round(x, 3) for x in returns],
        "lengths": [len(x) for x in episodes],
        "speeds": [round(float(np.mean(x)), 4) for x in episodes],
    }
