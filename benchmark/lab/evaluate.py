"""Plays twenty episodes with the most likely actions of a trained policy, for `run.py`.

    cd FOLDER_OF_A_RUN; python -P PATH/TO/evaluate.py ppo_continuous_action.py

The policy is that of runs/run; the script is in the same folder.
Returns, lengths and, if the environment tells an x_velocity, mean speeds in m/s are written into
runs/run/evaluation.json.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

EPISODES = 20
FOLDER = Path("runs/run")


def play(policy: Callable[[np.ndarray], np.ndarray], env: gym.Env) -> dict[str, list[float]]:
    """What the episodes came to; their seeds are always the same."""
    episodes = []
    # No generator of training has a spawn key.
    rng = np.random.default_rng(np.random.SeedSequence(1, spawn_key=(1,)))
    for _ in range(EPISODES):
        obs, _ = env.reset(seed=rng.integers(2**31).item())
        rewards, speeds, ended = [], [], False
        while not ended:
            obs, reward, terminated, truncated, info = env.step(policy(obs))
            rewards.append(float(reward))
            speeds += [info["x_velocity"]] if "x_velocity" in info else []
            ended = terminated or truncated
        speed = {"speeds": round(float(np.mean(speeds)), 4)} if speeds else {}
        episodes.append({"returns": round(sum(rewards), 3), "lengths": len(rewards), **speed})
    return {name: [x[name] for x in episodes] for name in episodes[0]}


def main() -> None:
    """Play and write."""
    sys.path.insert(0, "")
    script = importlib.import_module(sys.argv[1].removesuffix(".py"))
    saved = torch.load(FOLDER / "checkpoint.pt", weights_only=True)
    with gym.make(saved["args"]["env_id"], disable_env_checker=True) as env:
        found = play(script.load_policy(FOLDER, env), env)
    (FOLDER / "evaluation.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
