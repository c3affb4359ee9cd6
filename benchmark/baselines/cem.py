"""The cross-entropy method (CEM), beside ppo_continuous_action.py, which it imports.

    PYTHONPATH=. python benchmark/baselines/cem.py --env-id Hopper-v4

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
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import numpy as np
import threadpoolctl
import torch
from torch import nn

import ppo_continuous_action as ppo

USED = "seed total_timesteps run_name track env_id norm_obs clip_obs"
UNUSED = {x.name for x in dataclasses.fields(ppo.Args)} - {*USED.split()}


@dataclasses.dataclass(frozen=True)
class Args(ppo.Args):
    population: int = 100  # policies per generation [Szita & Lorincz: 100]
    elite: float = 0.2  # share of the best, which are fitted [modular_rl: 0.2]
    initial_std: float = 1.0  # standard deviation of the first weights [modular_rl: 1]
    extra_std: float = 0.25  # its square is added to the variance, less and less

    def __post_init__(self) -> None:
        if changed := [x for x in UNUSED if getattr(self, x) != getattr(Args, x)]:
            flags = ", ".join(f"--{x.replace('_', '-')}" for x in changed)
            raise ppo.UsageError(f"CEM does not use {flags}.")


class Agent(nn.Module):
    """A linear policy without noise."""

    def __init__(self, obs_size: int, action_size: int) -> None:
        super().__init__()
        self.policy = nn.Linear(obs_size, action_size)


def actor(agent: Agent) -> Callable[..., np.ndarray]:
    """What acts: `act(obs, noise)`, with obs (N, D) and noise that is not used."""
    weight, bias = (x.numpy(force=True).T for x in agent.policy.parameters())
    return lambda obs, noise: obs @ weight + bias


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


@ppo.with_resources
def train(resources: ExitStack, args: Args, resume: str | None = None) -> dict[str, Any]:
    """Run CEM; takes, returns and saves what `train` of the PPO script does."""
    torch.manual_seed(args.seed)
    threadpoolctl.threadpool_limits(1)
    (env,) = ppo.make_envs(resources, args.env_id, 1)
    low, high = env.action_space.low, env.action_space.high
    sizes = (*env.observation_space.shape, low.size)
    agent = Agent(*sizes)
    obs_stats = ppo.RunningMeanStd(np.zeros(sizes[0]), np.ones(sizes[0]))
    mean = np.zeros(sum(x.numel() for x in agent.parameters()))
    std, episodes, history = np.full_like(mean, args.initial_std), [], []
    if resume:
        saved = ppo.load_checkpoint(resume, sizes)
        mean, std = saved["mean"].numpy(), saved["std"].numpy()
        columns, history = saved["episodes"], saved["updates"]
        episodes = [dict(zip(columns, x)) for x in zip(*(x.tolist() for x in columns.values()))]
        obs_stats = saved["obs_stats"]
    step = history[-1]["global_step"] if history else 0
    run_dir, writer = ppo.open_run(resources, args, resume, step)

    while step < args.total_timesteps:
        # --- Play: an episode with each policy of a generation, or what the steps allow ---
        start, start_time, seen, returns = step, time.perf_counter(), [], []
        rng = np.random.default_rng([args.seed, len(history) + 1])
        population = draw(mean, std, start / args.total_timesteps, args, rng)
        for weights in torch.tensor(population).float():
            nn.utils.vector_to_parameters(weights, agent.parameters())
            act = actor(agent)
            obs, ended = env.begin(rng.integers(2**31).item()), False
            while not ended and step < args.total_timesteps:
                step += 1
                seen.append(np.array(obs, dtype=float))
                obs = ppo.normalize_obs(seen[-1][None], obs_stats, args).astype(np.float32)
                action = np.minimum(np.maximum(act(obs, 0.0)[0], low), high)
                obs, *_ = env.step(action)
                ended = env.ended
            if ended:
                returns.append(env.total)
                length = len(env.actions)
                episodes.append({"global_step": step, "return": env.total, "length": length})
        if not (np.isfinite(seen).all() and np.isfinite(returns).all()):
            raise ppo.UsageError(f"An observation or reward is NaN or infinite after step {start}.")

        # --- Fit: the distribution to the best ---
        obs_stats.update(np.array(seen))
        if len(returns) == args.population:
            mean, std = fit(population, np.array(returns), args.elite)
        nn.utils.vector_to_parameters(torch.tensor(mean).float(), agent.parameters())

        # --- Log and save ---
        metrics = {"cem/std": std.mean().item()}
        metrics["charts/SPS"] = (step - start) / (time.perf_counter() - start_time)
        history.append({"global_step": step, **metrics})
        if returns:
            metrics["charts/episodic_return"] = np.mean(returns)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        state = {"agent": agent.state_dict(), "sizes": sizes, "obs_stats": vars(obs_stats)}
        state |= {"mean": mean, "std": std, "return_stats": {"mean": 0.0, "var": 1.0}}
        state |= {"episodes": ppo.as_columns(episodes), "updates": history, "own_env": False}
        ppo.save_checkpoint(run_dir, args, state)
    results = {"agent": agent, "episodes": episodes, "updates": history}
    return {**results, "args": args, "run_dir": run_dir}


def program() -> ModuleType:
    """The PPO script with what differs here, for the command line and to play a policy."""
    ppo.Args, ppo.details = Args, lambda args: __doc__
    ppo.Agent, ppo.actor, ppo.train = Agent, actor, train
    return ppo


if __name__ == "__main__":
    program().main()
