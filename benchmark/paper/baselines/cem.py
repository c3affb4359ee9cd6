"""The cross-entropy method (CEM); it imports ppo_continuous_action.py.

    PYTHONPATH=. python benchmark/paper/baselines/cem.py --env-id Hopper-v4

Szita & Lorincz 2006 ("Learning Tetris using the noisy cross-entropy method"): draw the weights of a
generation of policies from a normal distribution, play an episode with each, and fit the
distribution to the best. Noise that falls is added to its variance, lest it narrow too early.

Settings: population 100, elite 20 %; a linear policy that always takes its mean action; weights at
first from N(0, 1); added variance at first 0.25 squared, falling linearly to 0 in half of the run
(elite, deviation and fall as in modular_rl, Schulman's code of that time, whose policies had tanh
layers of 10 and 5). Observations are normalized by those of earlier generations. Every step counts;
the run ends where they are spent. Not known: all of the PPO paper's, its policy among them. A run
takes two minutes and is saved at its end only.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tyro

import ppo_continuous_action as ppo
from ppo_continuous_action import RunningMeanStd

CLIP_OBS = ppo.Args.clip_obs  # observations are normalized in the same way


@dataclasses.dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # Gymnasium environment
    total_timesteps: int = 1_000_000  # environment steps
    seed: int = 1  # random seed
    run_name: str = "run"  # the checkpoint is in runs/RUN_NAME
    resume: Path | None = None  # a run that has a checkpoint is over
    population: int = 100  # policies per generation [Szita & Lorincz: 100]
    elite: float = 0.2  # share of the best, which are fitted [modular_rl: 0.2]
    initial_std: float = 1.0  # standard deviation of the first weights [modular_rl: 1]
    extra_std: float = 0.25  # its square is added to the variance, less and less


def actor(weights: np.ndarray, stats: RunningMeanStd, env: gym.Env) -> Callable[..., np.ndarray]:
    """A linear policy without noise: `act(obs)`; weights (P,) of each action, then all biases."""
    low, high = env.action_space.low, env.action_space.high
    matrix, bias = np.split(weights.astype(np.float32), [-low.size])
    matrix = matrix.reshape(low.size, -1).T

    def act(obs: np.ndarray) -> np.ndarray:
        obs = ppo.normalize_obs(obs[None], stats, CLIP_OBS).astype(np.float32)
        return np.clip((obs @ matrix + bias)[0], low, high)

    return act


def draw(
    mean: np.ndarray, std: np.ndarray, progress: float, args: Args, rng: np.random.Generator
) -> np.ndarray:
    """A population (n, P) around `mean` (P,), when a share `progress` of the run is over."""
    variance = std**2 + args.extra_std**2 * max(1 - 2 * progress, 0)
    return mean + np.sqrt(variance) * rng.standard_normal((args.population, mean.size))


def fit(population: np.ndarray, returns: np.ndarray, elite: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and std (P,) of the share `elite` of a population (n, P) with the best returns (n,)."""
    best = population[np.argsort(-returns)[: max(1, round(elite * len(returns)))]]
    return best.mean(0), best.std(0)


def train(args: Args) -> dict[str, Any]:
    """Run CEM; returns `episodes` and `updates` as the PPO script does, `mean` and `obs_stats`."""
    env = gym.make(args.env_id, disable_env_checker=True)
    obs_size, action_size = env.observation_space.shape[0], env.action_space.shape[0]
    obs_stats = RunningMeanStd(np.zeros(obs_size), np.ones(obs_size))
    mean = np.zeros((obs_size + 1) * action_size)
    std, step, episodes, updates = np.full_like(mean, args.initial_std), 0, [], []

    while step < args.total_timesteps:
        # --- Play: an episode with each policy of a generation, or what the steps allow ---
        start, start_time, seen, returns = step, time.perf_counter(), [], []
        rng = np.random.default_rng([args.seed, len(updates) + 1])
        population = draw(mean, std, start / args.total_timesteps, args, rng)
        for weights in population:
            act, rewards, ended = actor(weights, obs_stats, env), [], False
            obs, _ = env.reset(seed=rng.integers(2**31).item())
            while not ended and step < args.total_timesteps:
                step += 1
                seen.append(np.array(obs, dtype=float))
                obs, reward, terminated, truncated, _ = env.step(act(seen[-1]))
                rewards.append(float(reward))
                ended = terminated or truncated
            if ended:
                returns.append(sum(rewards))
                ended = {"return": returns[-1], "length": len(rewards)}
                episodes.append({"global_step": step, **ended})

        # --- Fit: the distribution to the best ---
        obs_stats.update(np.array(seen))
        if len(returns) == args.population:
            mean, std = fit(population, np.array(returns), args.elite)
        rate = (step - start) / (time.perf_counter() - start_time)
        updates.append({"global_step": step, "charts/SPS": rate, "cem/std": std.mean()})
    env.close()
    return dict(episodes=episodes, updates=updates, mean=mean, obs_stats=obs_stats)


def main() -> None:
    """Train and save what happened."""
    args = tyro.cli(Args)
    if args.resume:
        return
    folder, found = Path("runs", args.run_name), train(args)
    folder.mkdir(parents=True, exist_ok=True)
    found["obs_stats"] = vars(found["obs_stats"])
    ppo.save_checkpoint(folder, {"args": vars(args), **found})


if __name__ == "__main__":
    main()
