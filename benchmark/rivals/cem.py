"""The cross-entropy method (CEM), beside ppo_continuous_action.py, which it imports.

    PYTHONPATH=. python benchmark/rivals/cem.py --env-id Hopper-v4

Szita & Lorincz 2006 ("Learning Tetris using the noisy cross-entropy method"): draw the weights of a
generation of policies from a normal distribution, play an episode with each, and fit the
distribution to the best. Noise that falls is added to its variance, lest it narrow too early.

Settings: population 100, elite 20 %; a linear policy that always takes its mean action; weights at
first from N(0, 1); added variance at first 0.25 squared, falling linearly to 0 in half of the run
(elite, deviation and fall as in modular_rl, Schulman's code of that time, whose policies had tanh
layers of 10 and 5). Observations are normalized by those of earlier generations. Every step counts;
the run ends where they are spent. Not known: all of the PPO paper's, its policy among them.
"""

import dataclasses
import time
from typing import Any

import numpy as np
import pydantic
import threadpoolctl
import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import nn

import ppo_continuous_action as ppo

USED = """seed total_timesteps run_name track resume evaluate eval_episodes capture_video details
env_id norm_obs clip_obs"""
UNUSED = {x.name for x in dataclasses.fields(ppo.Args)} - {*USED.split()}


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args(ppo.Args):
    population: PositiveInt = 100  # policies per generation [Szita & Lorincz: 100]
    elite: ppo.Fraction = 0.2  # share of the best, which are fitted [modular_rl: 0.2]
    initial_std: PositiveFloat = 1.0  # standard deviation of the first weights [modular_rl: 1]
    extra_std: NonNegativeFloat = 0.25  # its square is added to the variance, less and less

    def check(self) -> None:
        """Raise ValueError where settings mean nothing here."""
        if changed := [x for x in UNUSED if getattr(self, x) != getattr(Args, x)]:
            raise ValueError(f"CEM does not use {', '.join(changed)}.")


class Agent(nn.Module):
    """A linear policy without noise."""

    def __init__(self, obs_size: int, action_size: int, args: Args) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(obs_size, action_size))
        self.log_std = nn.Buffer(torch.full((1, action_size), -torch.inf))


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
    """Run CEM; takes, returns and saves what `train` of the PPO script does."""
    args.check()
    torch.manual_seed(args.seed)
    threadpoolctl.threadpool_limits(1)
    envs = ppo.Environments([ppo.make_env(args)])
    space, obs_size = envs.envs[0].action_space, envs.obs.shape[1]
    agent = Agent(obs_size, space.shape[0], args)
    obs_stats = ppo.RunningMeanStd(np.zeros(obs_size), np.ones(obs_size))
    mean = np.zeros(sum(x.numel() for x in agent.parameters()))
    std, history = np.full_like(mean, args.initial_std), []
    run_dir, saved, writer = ppo.open_run(args, envs.name, ["env_id"])
    if saved:
        mean, std, history = saved["mean"].numpy(), saved["std"].numpy(), saved["updates"]
        envs.episodes, envs.global_step = saved["episodes"], saved["global_step"]
        obs_stats = ppo.RunningMeanStd(**saved["obs_stats"])

    while (start := envs.global_step) < args.total_timesteps:
        # --- Play: an episode with each policy of a generation, or what the steps allow ---
        start_time, first, seen = time.perf_counter(), len(envs.episodes), []
        rng = np.random.default_rng([args.seed, len(history) + 1])
        population = draw(mean, std, start / args.total_timesteps, args, rng)
        envs.reset(rng)
        for i, weights in enumerate(torch.tensor(population).float()):
            nn.utils.vector_to_parameters(weights, agent.parameters())
            act = ppo.actor(agent, space.low, space.high)
            while len(envs.episodes) == first + i and envs.global_step < args.total_timesteps:
                seen.append(envs.obs[0].copy())
                obs = ppo.normalize_obs(envs.obs, obs_stats, args).astype(np.float32)
                envs.step(act(obs, 0.0)[1], rng)
        returns, play_time = [x["return"] for x in envs.episodes[first:]], time.perf_counter()
        if not (np.isfinite(seen).all() and np.isfinite(returns).all()):
            raise ValueError(f"An observation or reward is NaN or infinite after step {start}.")

        # --- Fit: the distribution to the best ---
        obs_stats.update(np.array(seen))
        if len(returns) == args.population:
            mean, std = fit(population, np.array(returns), args.elite)
        nn.utils.vector_to_parameters(torch.tensor(mean).float(), agent.parameters())

        # --- Log and save ---
        steps, seconds = envs.global_step - start, play_time - start_time
        rates = {"charts/SPS_rollout": steps / seconds}
        rates["charts/SPS_update"] = steps / (time.perf_counter() - play_time)
        history.append({"global_step": envs.global_step, "cem/std": std.mean().item(), **rates})
        ppo.log(writer, history[-1], envs.episodes[first:])
        state = {"agent": agent.state_dict(), "updates": history, "episodes": envs.episodes}
        arrays = {"low": space.low, "high": space.high, "mean": mean, "std": std}
        state |= {name: torch.tensor(x) for name, x in arrays.items()}
        state |= {"obs_stats": obs_stats.state(), "global_step": envs.global_step}
        ppo.save_checkpoint(run_dir, args, state)
    writer.close()
    results = {"agent": agent, "episodes": envs.episodes, "updates": history}
    return {**results, "args": args, "run_dir": run_dir}


if __name__ == "__main__":  # the command line of the PPO script, with what differs
    ppo.SCRIPT, ppo.Args, ppo.details = "cem", Args, lambda args: __doc__
    ppo.Agent, ppo.train = Agent, train
    ppo.main()
