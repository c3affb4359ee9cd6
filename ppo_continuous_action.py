# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "moviepy==2.2.1",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "threadpoolctl==3.8.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.16",
#     "wandb==0.31.0",
# ]
# ///
"""Proximal policy optimization (PPO) for continuous actions, in one file.

    python ppo_continuous_action.py --env-id HalfCheetah-v4

The algorithm is that of Schulman et al. 2017 (arXiv 1707.06347) as OpenAI implemented it in
ppo2 = openai/baselines@ea25b9e8. "The 37 Implementation Details of PPO" (Huang et al. 2022)
numbers what that code does beyond the paper; here each detail stands as a comment on the line
above the statement that does it: 1-13 (core), 23-31 (continuous actions), and two of the four
auxiliary ones. Names in brackets are files of ppo2. `--print-details` lists all 37.

Any environment with a Box action space fits; observations are flattened into a vector.

Shapes: T = num_steps, N = num_envs, D = observation size, A = action size. A prefix `b_` marks a
whole batch with its first two axes joined (T*N, ...), `mb_` a minibatch of it.

Deviations from ppo2, each correct where the original is not or harmless where it differs:
- A time limit is not a failure: where an episode is cut off (truncated), the value of the final
  observation is bootstrapped. `--truncation-is-terminal` gives the original's behavior.
- Adam is PyTorch's, which adds epsilon after the bias correction; ppo2's TensorFlow adds it before.
- The logged approximate KL is k3, not ppo2's k2; gradient clipping adds 1e-6 to the norm.
- Orthogonal matrices come from a QR decomposition, not an SVD: equal in distribution.

Return on HalfCheetah-v4 after 1M steps, mean of the last 100 episodes: 1650 to 1832 for eight of
the seeds 1-10, 3609 and 4369 for two, each in about 4 minutes on one core; see benchmark/README.md.
"""

import ast
import atexit
import contextlib
import copy
import csv
import dataclasses
import difflib
import functools
import glob
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import re
import secrets
import shutil
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
# Set by torchrun; a run started without it is a group of one.
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class RunError(Exception):
    """A run that cannot start or go on; the message is one sentence for the person who ran it."""


# === Settings ===


@dataclasses.dataclass
class Args:
    # --- Experiment ---
    seed: int = 1
    """Seed of everything that is random in the run."""
    total_timesteps: int = 1_000_000
    """Agent steps of the whole run, all environments and processes together [paper: MuJoCo 1M]."""
    run_name: str | None = None
    """Name of the run's folder; by default environment, script, seed and time."""
    output_dir: str = "runs"
    """Folder that holds one folder per run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where that is faster."""
    torch_threads: int = 1
    """CPU threads per process; results repeat bit for bit only with the same number."""
    compile: bool = True
    """Compile the update where the run is long enough to win back the compile time."""
    track: bool = False
    """Mirror the logs to Weights & Biases (WANDB_MODE=offline keeps them on disk)."""
    wandb_project: str = "ppo"
    """Weights & Biases project, with --track."""
    wandb_entity: str | None = None
    """Weights & Biases team, with --track."""
    capture_video: bool = False
    """Record videos of the first environment (while training: of episodes 0, 1, 8, 27, 64, ...)."""
    print_details: bool = False
    """Before training, print the implementation details with their values in this run."""
    checkpoint_interval: int = 25
    """Iterations between two checkpoints; a killed run loses at most that many."""
    resume: str | None = None
    """Run folder or checkpoint to continue; `auto` continues the newest run of the same name."""
    evaluate: str | None = None
    """Instead of training, evaluate this model (a run folder, model.pt or checkpoint.pt)."""
    eval_episodes: int = 10
    """Episodes per evaluated policy, with --evaluate."""
    deterministic: bool = False
    """Evaluate only the most probable action instead of both it and sampled actions."""

    # --- Environment ---
    env_id: str = "HalfCheetah-v4"
    """Gymnasium environment; the top of the file says which kinds fit."""
    num_envs: int = 1
    """Parallel environments N, per process [ppo2: 1 for MuJoCo; paper: 8 for Atari]."""
    async_envs: bool = False
    """Step each environment in a process of its own; pays for slow environments only."""
    truncation_is_terminal: bool = False
    """Treat time limits as failures, without bootstrapping, as ppo2 does."""
    norm_obs: bool = True
    """Normalize observations by their running mean and standard deviation."""
    clip_obs: float | None = 10.0
    """Clip normalized observations to this many standard deviations [ppo2: 10; None: off]."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_reward: float | None = 10.0
    """Clip scaled rewards to this magnitude [ppo2: 10; None: off]."""

    # --- PPO ---
    num_steps: int = 2048
    """Steps per environment and iteration (paper: T) [paper: 2048 for MuJoCo, 128 for Atari]."""
    num_minibatches: int = 32
    """Minibatches per epoch [ppo2/defaults.py: 32 for MuJoCo, 4 for Atari]."""
    update_epochs: int = 10
    """Passes over each batch (paper: K) [paper: 10 for MuJoCo, 3 for Atari, where ppo2 has 4]."""
    learning_rate: float = 3e-4
    """Adam's step size [paper: 3e-4 for MuJoCo, 2.5e-4 for Atari]."""
    anneal_lr: bool = True
    """Lower the learning rate linearly towards 0 [ppo2/defaults.py; the paper: Atari only]."""
    adam_eps: float = 1e-5
    """Adam's epsilon [ppo2/model.py: 1e-5; PyTorch's default: 1e-8]."""
    gamma: float = 0.99
    """Discount factor [paper, Tables 3 and 5]."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation; 1 sums all rewards [paper, Tables 3 and 5]."""
    norm_adv: bool = True
    """Normalize the advantages of each minibatch."""
    clip_coef: float = 0.2
    """Clip range of the policy ratio (paper: epsilon) [paper: 0.2 for MuJoCo, 0.1 for Atari]."""
    anneal_clip: bool = False
    """Lower the clip range linearly towards 0 [paper: Atari only; ppo2: off]."""
    clip_vloss: bool = True
    """Clip the change of the value function by clip_coef too [ppo2; not in the paper]."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus (paper: c2) [ppo2: 0 for MuJoCo, 0.01 for Atari]."""
    vf_coef: float = 0.5
    """Weight of the value loss, half the squared error (paper: c1) [ppo2: 0.5; paper: 1, Atari]."""
    max_grad_norm: float | None = 0.5
    """Largest norm of the whole gradient [ppo2/ppo2.py: 0.5; None: off]."""
    target_kl: float | None = None
    """Stop an iteration's epochs once the mean approximate KL of one exceeds this."""
    orthogonal_init: bool = True
    """Initialize orthogonally, heads with small gains, instead of PyTorch's default."""
    shared_network: bool = False
    """Let policy and value function share their hidden layers [ppo2: separate for MuJoCo]."""

    @property
    def batch_size(self) -> int:
        """Samples per iteration and process, T*N."""
        return self.num_steps * self.num_envs

    @property
    def minibatch_size(self) -> int:
        """Samples per gradient step and process."""
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        """Rollouts, each followed by an update (ppo2: U)."""
        return self.total_timesteps // (self.batch_size * WORLD_SIZE)

    @property
    def run_dir(self) -> Path:
        """Folder of this run's logs, videos, checkpoints and model."""
        return Path(self.output_dir) / str(self.run_name)

    def __post_init__(self) -> None:
        """Check now, unless the settings are still to be completed from a checkpoint."""
        if self.resume is None:
            self.check()

    def check(self) -> None:
        """Refuse settings that cannot work together, each with one sentence."""
        positive = "num_envs num_steps num_minibatches update_epochs total_timesteps adam_eps"
        positive += " torch_threads checkpoint_interval eval_episodes clip_coef clip_obs"
        positive += " clip_reward max_grad_norm"
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RunError(f"--{name.replace('_', '-')} must be positive, not {value}.")
        for name in ("learning_rate", "ent_coef", "vf_coef", "target_kl", "seed"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise RunError(f"--{name.replace('_', '-')} must not be negative: {value}.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise RunError(f"--{name.replace('_', '-')} must lie between 0 and 1.")
        if self.seed >= 2**63:
            raise RunError(f"--seed must be less than 2**63, not {self.seed}.")
        if self.batch_size % self.num_minibatches != 0:
            raise RunError(
                f"--num-minibatches {self.num_minibatches} must divide the batch of "
                f"{self.batch_size} samples (num_steps * num_envs)."
            )
        if self.minibatch_size < 2 and self.norm_adv:
            raise RunError("Minibatches of one sample have no spread: lower --num-minibatches.")
        if self.num_iterations < 1:
            raise RunError(
                f"--total-timesteps {self.total_timesteps} is less than one batch of "
                f"{self.batch_size * WORLD_SIZE} steps."
            )


# === Environments ===


def make_env(args: Args, index: int) -> Callable[[], gym.Env]:
    """Return a function that makes sub-environment `index`, with a flat observation vector."""
    trainer = os.getpid()

    def thunk() -> gym.Env:
        if os.getpid() != trainer:
            for number in (signal.SIGINT, signal.SIGTERM):  # these are the main process's to answer
                signal.signal(number, signal.SIG_IGN)
        video = args.capture_video and index == 0 and RANK == 0
        options = {"render_mode": "rgb_array"} if video else {}
        with warnings.catch_warnings():
            # The published results are for -v4 environments, which newer ones do not reproduce.
            warnings.filterwarnings("ignore", message=".*is out of date")
            env = gym.make(args.env_id, disable_env_checker=True, **options)
        space = env.action_space
        if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f":
            raise RunError(
                f"{args.env_id} has the action space {space}; this script needs a Box of floats. "
                "Use ppo_multidiscrete.py for Discrete and MultiDiscrete actions."
            )
        if video:
            if not args.async_envs or os.getpid() != trainer:  # a renderer does not survive a fork
                env.reset()
                env.render()  # a missing renderer is to stop the run here, with a sentence
            # After the episodes that an evaluation plays per policy, another one begins.
            period, every = args.eval_episodes + 1, {}
            if args.evaluate:
                every = {"episode_trigger": lambda episode: episode % period < period - 1}
            env = gym.wrappers.RecordVideo(env, str(args.run_dir / "videos"), **every)
        if (
            not isinstance(env.observation_space, gym.spaces.Box)
            or len(env.observation_space.shape) != 1
        ):
            env = gym.wrappers.FlattenObservation(env)
        if not isinstance(env.observation_space, gym.spaces.Box):
            raise RunError(f"The observations of {args.env_id} cannot be flattened into a vector.")
        return Resumable(env, index)

    return thunk


def make_envs(args: Args) -> VectorEnv:
    """Make the N sub-environments of this process.

    An environment whose episode ends is reset within the same step, so that the batch holds no
    reset steps; the last observation of the episode is then in `infos["final_obs"]`.

    Raises:
        RunError: the environment is unknown, cannot be made, or its spaces do not fit.
    """
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    vector_env = AsyncVectorEnv if args.async_envs else SyncVectorEnv
    thunks = [make_env(args, index) for index in range(args.num_envs)]
    try:
        return vector_env(thunks, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    except RunError:
        raise
    except Exception as error:  # environments are other people's code
        hint = f"{type(error).__name__}: {' '.join(str(error).split())}"
        nearest = difflib.get_close_matches(args.env_id, gym.registry, n=1, cutoff=0.4)
        if args.env_id not in gym.registry and ":" not in args.env_id and nearest:
            hint = f"did you mean {nearest[0]}?"
        raise RunError(f"Cannot make the environment {args.env_id}: {hint}") from error


@contextlib.contextmanager
def closing_envs(envs: VectorEnv) -> Iterator[VectorEnv]:
    """Close the environments at the end; after an error, kill their processes.

    If one of these has died, closing would wait for its answer for ever.
    """
    workers: list = []
    try:
        yield envs
    except Exception:
        workers = getattr(envs.unwrapped, "processes", [])
        raise
    finally:
        for worker in workers:
            worker.kill()
        if not workers:
            envs.close()


class RunningMeanStd:
    """Mean and population variance of all rows seen, merged batch by batch in float64.

    The statistics are shared by all environments [ppo2: common/running_mean_std.py].
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 1e-4

    def state(self) -> dict[str, Any]:
        """The statistics as tensors and plain values."""
        return {"mean": torch.tensor(self.mean), "var": torch.tensor(self.var), "count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        # The index () turns an array without dimensions into the scalar it was.
        self.mean, self.var = state["mean"].numpy().copy()[()], state["var"].numpy().copy()[()]
        self.count = state["count"]

    def update(self, x: np.ndarray) -> None:
        """Merge the rows of `x`, (rows, *shape), with the formula of Chan et al. 1979."""
        rows = len(x)
        if rows == 1:  # needs no reduction, which would cost more than all the rest
            x_mean, x_var = x[0], 0.0
        else:
            x_mean, x_var = x.mean(axis=0, dtype=np.float64), x.var(axis=0, dtype=np.float64)
        total = self.count + rows
        delta = x_mean - self.mean
        between = delta * delta * (self.count * rows / total)
        self.mean = self.mean + delta * (rows / total)
        self.var = (self.var * self.count + x_var * rows + between) / total
        self.count = total


def clip(x: np.ndarray, low: np.ndarray | float, high: np.ndarray | float) -> np.ndarray:
    """`np.clip` without its overhead, which on one row is several times the work."""
    return np.minimum(np.maximum(x, low), high)


def normalize_obs(
    obs: np.ndarray, stats: RunningMeanStd, norm_obs: bool, clip_obs: float | None
) -> np.ndarray:
    """Observations (N, D) in standard deviations from their running mean; updates nothing."""
    # Detail 28/37: observation normalization [ppo2: common/vec_env/vec_normalize.py L36-42]
    obs = (obs - stats.mean) / np.sqrt(stats.var + 1e-8) if norm_obs else obs
    # Detail 29/37: observation clipping [ppo2: common/vec_env/vec_normalize.py L39]
    return clip(obs, -clip_obs, clip_obs) if norm_obs and clip_obs is not None else obs


def scale_reward(
    reward: np.ndarray, stats: RunningMeanStd, scale_rewards: bool, clip_reward: float | None
) -> np.ndarray:
    """Rewards (N,) divided by the running std of the discounted return, without centering."""
    # Detail 30/37: reward scaling [ppo2: common/vec_env/vec_normalize.py L26-33]
    reward = reward / math.sqrt(stats.var + 1e-8) if scale_rewards else reward
    # Detail 31/37: reward clipping [ppo2: common/vec_env/vec_normalize.py L32]
    return (
        clip(reward, -clip_reward, clip_reward)
        if scale_rewards and clip_reward is not None
        else reward
    )


# === Agent ===


def layer_init(layer: nn.Module, gain: float, bias: float = 0.0) -> nn.Module:
    """Fill the weight with an orthogonal matrix times `gain` and the bias with a constant.

    [ppo2: a2c/utils.py L20-63]
    """
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    """Gaussian policy and value function, each with two hidden layers of 64 tanh units."""

    def __init__(self, obs_size: int, action_size: int, args: Args) -> None:
        super().__init__()
        # Detail 2/37: orthogonal and constant initialization [ppo2: common/policies.py L49-63]
        init = layer_init if args.orthogonal_init else lambda layer, gain: layer
        hidden_gain = math.sqrt(2)

        def trunk() -> nn.Sequential:
            return nn.Sequential(
                init(nn.Linear(obs_size, 64), hidden_gain),
                nn.Tanh(),
                init(nn.Linear(64, 64), hidden_gain),
                nn.Tanh(),
            )

        self.value_trunk = trunk()
        # Detail 13/37: shared or separate networks [ppo2: common/policies.py L156-166]
        # Detail 26/37: separate networks [ppo2: ppo2/defaults.py L12]
        self.policy_trunk = self.value_trunk if args.shared_network else trunk()
        self.value_head = init(nn.Linear(64, 1), 1.0)
        self.action_mean = init(nn.Linear(64, action_size), 0.01)
        # Detail 24/37: state-independent log std [ppo2: common/distributions.py L104-105]
        self.log_std = nn.Parameter(torch.zeros(1, action_size))

    def get_value(self, obs: Tensor) -> Tensor:
        """Values (...) of observations (..., D)."""
        return self.value_head(self.value_trunk(obs)).squeeze(-1)

    def get_action_and_value(
        self, obs: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Actions (..., A), sampled unless given, and their log-probability, entropy, value."""
        mean = self.action_mean(self.policy_trunk(obs))
        # Detail 23/37: normal distribution [ppo2: common/distributions.py L96-106]
        policy = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
        if action is None:
            action = policy.sample()
        # Detail 25/37: independent action components [ppo2: common/distributions.py L238-246]
        logprob, entropy = policy.log_prob(action).sum(-1), policy.entropy().sum(-1)
        return action, logprob, entropy, self.get_value(obs)


def numpy_layers(*networks: nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    """The linear layers of tanh networks as pairs of weight (in, out) and bias (out,)."""
    modules = (module for network in networks for module in network.modules())
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    return [(layer.weight.numpy(force=True).T, layer.bias.numpy(force=True)) for layer in layers]


def numpy_mlp(layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> np.ndarray:
    """Output (N, out) of a tanh network for a few rows (N, in).

    In numpy, because for so little arithmetic a call of PyTorch takes four times as long.
    """
    for weight, bias in layers[:-1]:
        x = np.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


# === The math: pure functions, the same text in every script ===


def linear_decay(start: float, iteration: int, num_iterations: int) -> float:
    """Value at iteration u = 1..U of a line from `start` at u = 1 to `start` / U at u = U."""
    return start * (1 - (iteration - 1) / num_iterations)


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, equations 11-16).

    Args:
        rewards: r_t, (T, ...), time first.
        values: V(s_t), same shape.
        next_values: V(s_{t+1}), of the final observation where an episode was truncated.
        terminated: 1 where the step ended its episode for good: the future is worth 0.
        done: 1 where the step ended its episode for any reason: the sum stops there.
        gamma: discount factor.
        gae_lambda: 0 gives one-step advantages, 1 the discounted sum of all rewards.

    Returns:
        Advantages A_t and value targets A_t + V(s_t) (the lambda-return), both (T, ...).
    """
    deltas = rewards + gamma * next_values * (1 - terminated) - values
    # Detail 5/37: generalized advantage estimation [ppo2/runner.py L50-65]
    decays = gamma * gae_lambda * (1 - done)
    advantage, advantages = torch.zeros_like(deltas[0]), []
    for delta, decay in zip(deltas.flip(0).unbind(), decays.flip(0).unbind(), strict=True):
        advantage = delta + decay * advantage
        advantages.append(advantage)
    advantages = torch.stack(advantages).flip(0)
    return advantages, advantages + values


def normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and std 1; population std (divisor n), as numpy and so ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + eps)


def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective, negated for descent (paper, equation 7).

    Args:
        logratio: log pi_new(a|s) - log pi_old(a|s), any shape.
        advantages: same shape.
        clip_coef: epsilon; the ratio gains nothing outside [1 - epsilon, 1 + epsilon].

    Returns:
        Scalar: mean over all entries of the larger (pessimistic) loss.
    """
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective [ppo2/model.py L78-86]
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, clip_coef: float | Tensor | None
) -> Tensor:
    """Half the mean squared error of the values, with the change of each value clipped.

    Args:
        new_values: V under the current weights, any shape.
        values: V at collection time, same shape.
        returns: targets, same shape.
        clip_coef: largest useful change of a value; None switches the clipping off.

    Returns:
        Scalar, including the factor 1/2 (Stable-Baselines3 leaves it out).
    """
    errors = (new_values - returns) ** 2
    if clip_coef is not None:
        clipped_values = values + (new_values - values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


def clip_by_norm(gradient: Tensor, max_norm: float | None) -> Tensor:
    """Scale `gradient` in place to a norm of at most `max_norm`; return the norm before.

    The same as torch's clip_grad_norm_, with a third of its overhead on a single vector.
    """
    norm = gradient.norm()
    if max_norm is not None:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


def approx_kl(logratio: Tensor) -> Tensor:
    """Estimate KL(old || new) from actions of the old policy by k3 = mean(r - 1 - log r).

    k3 is unbiased like k1 = mean(-log r), never negative and less noisy; ppo2 logs the biased
    k2 = mean((log r)^2) / 2 (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


def clip_fraction(logratio: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Share of samples whose ratio lies outside the clip range [ppo2/model.py L88]."""
    return ((logratio.exp() - 1).abs() > clip_coef).float().mean()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant.

    NaN where the returns do not vary [ppo2: common/math_util.py L25-38].
    """
    variance = returns.var(correction=0)
    return (
        float("nan")
        if variance == 0
        else (1 - (returns - values).var(correction=0) / variance).item()
    )


def ppo_loss(
    agent: Agent,
    minibatch: tuple[Tensor, ...],
    clip_coef: float | Tensor,
    clip_vloss: bool,
    norm_adv: bool,
    ent_coef: float,
    vf_coef: float,
) -> tuple[Tensor, Tensor]:
    """Overall loss (paper, equation 9) of a minibatch, and the debug variables.

    Args:
        agent: policy and value function under the current weights.
        minibatch: obs and actions (B, ...), logprobs, values, advantages, returns (B,).

    Returns:
        Scalar loss, and the metrics named in `LOSS_METRICS` as one vector.
    """
    obs, actions, logprobs, values, advantages, returns = minibatch
    _, new_logprobs, entropy, new_values = agent.get_action_and_value(obs, actions)
    logratio = new_logprobs - logprobs
    # Detail 7/37: advantage normalization [ppo2/model.py L136-139]
    advantages = normalize(advantages) if norm_adv else advantages
    pg_loss = policy_loss(logratio, advantages, clip_coef)
    # Detail 9/37: value function loss clipping [ppo2/model.py L68-75]
    v_loss = value_loss(new_values, values, returns, clip_coef if clip_vloss else None)
    # Detail 10/37: overall loss and entropy bonus [ppo2/model.py L91]
    loss = pg_loss - ent_coef * entropy.mean() + vf_coef * v_loss
    old_kl, kl, clipped = -logratio.mean(), approx_kl(logratio), clip_fraction(logratio, clip_coef)
    metrics = torch.stack([pg_loss, v_loss, entropy.mean(), old_kl, kl, clipped])
    return loss, metrics.detach()


# What `ppo_loss` reports, by CleanRL's names; old_approx_kl is the estimate k1.
LOSS_METRICS = (
    "losses/policy_loss",
    "losses/value_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
)
KL = LOSS_METRICS.index("losses/approx_kl")


def loss_gradient(agent: Agent, minibatch: tuple[Tensor, ...], *settings) -> tuple[Tensor, Tensor]:
    """Gradient of `ppo_loss` as one vector in the order of `agent.parameters()`, and the metrics.

    Compiled as a whole: forward and backward pass become one graph with little overhead.
    """
    loss, metrics = ppo_loss(agent, minibatch, *settings)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), metrics


# === Training: collect, advantages, update, log ===


def train(args: Args) -> dict[str, Any]:
    """Run PPO; logs, checkpoints and the model go into `args.run_dir`.

    Returns:
        agent: the trained `Agent`;
        episodes: one {"global_step", "return", "length"} per finished episode;
        updates: one dictionary of metrics per iteration;
        args: the settings in force, with the name of the run.

    Raises:
        RunError: the run cannot start or go on.
    """
    args, checkpoint = open_run(args)
    device = choose_device(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng([args.seed, RANK])
    num_steps, num_envs = args.num_steps, args.num_envs

    with (
        np.errstate(all="ignore"),  # bad numbers get a sentence of their own
        threadpool_limits(args.torch_threads),
        StopRequest() as stop,
        closing_envs(make_envs(args)) as envs,
        contextlib.closing(RunLog(args, checkpoint)) as log,
    ):
        action_space = envs.single_action_space
        low, high = action_space.low.reshape(-1), action_space.high.reshape(-1)
        obs_size, action_size = envs.single_observation_space.shape[0], len(low)

        agent = Agent(obs_size, action_size, args).to(device)
        # One vector holds all weights: one Adam kernel, one norm, one message between processes.
        weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
        nn.utils.vector_to_parameters(weights, agent.parameters())
        # Detail 3/37: Adam epsilon [ppo2/model.py L98-100]
        optimizer = torch.optim.Adam([weights], args.learning_rate, eps=args.adam_eps, fused=True)

        # The rollout, time first; the last row of obs is the first one of the next rollout.
        obs = np.zeros((num_steps + 1, num_envs, obs_size), dtype=np.float32)
        actions = np.zeros((num_steps, num_envs, action_size), dtype=np.float32)
        rewards = np.zeros((num_steps, num_envs), dtype=np.float32)
        terminated = np.zeros((num_steps, num_envs), dtype=bool)
        done = np.zeros((num_steps, num_envs), dtype=bool)

        # What lives on from one rollout to the next, besides the environments.
        obs_stats, return_stats = RunningMeanStd((obs_size,)), RunningMeanStd(())
        discounted_return, episode_return = np.zeros(num_envs), np.zeros(num_envs)
        episode_length = np.zeros(num_envs, dtype=np.int64)
        statistics = {"obs": obs_stats, "return": return_stats}
        arrays = {
            "next_obs": obs[-1],
            "discounted_return": discounted_return,
            "episode_return": episode_return,
            "episode_length": episode_length,
        }
        process = ProcessState(envs, rng, statistics, arrays)
        normalized = functools.partial(
            normalize_obs, stats=obs_stats, norm_obs=args.norm_obs, clip_obs=args.clip_obs
        )
        scaled = functools.partial(
            scale_reward,
            stats=return_stats,
            scale_rewards=args.scale_rewards,
            clip_reward=args.clip_reward,
        )

        first_iteration, global_step, resumed_exactly = 1, 0, False
        if checkpoint is not None:
            first_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        raw_obs, _ = envs.reset(seed=environment_seeds(args.seed, num_envs, global_step))
        if checkpoint is not None:
            resumed_exactly = process.restore(checkpoint["processes"])
        if not resumed_exactly:
            start_statistics = copy.deepcopy(statistics)
            obs_stats.update(raw_obs)
            merge_over_processes(statistics, start_statistics)
            obs[-1] = normalized(raw_obs)
        if WORLD_SIZE > 1:
            dist.broadcast(weights, src=0)

        clip_coef = torch.tensor(args.clip_coef, device=device)
        settings = (args.clip_vloss, args.norm_adv, args.ent_coef, args.vf_coef)
        b_shapes = ((obs_size,), (action_size,), (), (), (), ())
        example = tuple(torch.zeros(args.minibatch_size, *x, device=device) for x in b_shapes)
        gradient = compiled(loss_gradient, args, (agent, example, clip_coef, *settings))
        log.start(device, global_step)

        for iteration in range(first_iteration, args.num_iterations + 1):
            # --- Collect: T steps in each of the N environments, under frozen weights ---
            start_time = time.perf_counter()
            last_good = model_state(args, agent, statistics)
            start_statistics = copy.deepcopy(statistics)
            policy = numpy_layers(agent.policy_trunk, agent.action_mean)
            std = agent.log_std.exp().numpy(force=True)
            noise = rng.standard_normal(actions.shape, dtype=np.float32)
            final_obs: dict[tuple[int, int], np.ndarray] = {}
            obs[0] = obs[-1]
            # Detail 1/37: vectorized architecture [ppo2/runner.py L26-42]
            for step in range(num_steps):
                global_step += num_envs * WORLD_SIZE
                actions[step] = numpy_mlp(policy, obs[step]) + std * noise[step]
                # Detail 27/37: action clipping and storage [ppo2: common/wrappers.py L21-26]
                env_actions = clip(actions[step], low, high).reshape(-1, *action_space.shape)
                raw_obs, reward, terminated[step], truncated, infos = envs.step(env_actions)
                done[step] = terminated[step] | truncated
                obs_stats.update(raw_obs)
                obs[step + 1] = normalized(raw_obs)
                discounted_return *= args.gamma
                discounted_return += reward
                return_stats.update(discounted_return)
                discounted_return[done[step]] = 0.0
                rewards[step] = scaled(reward)
                episode_return += reward
                episode_length += 1
                for i in done[step].nonzero()[0]:
                    log.episode(global_step, episode_return[i].item(), episode_length[i].item())
                    episode_return[i], episode_length[i] = 0.0, 0
                    if not terminated[step, i]:
                        final_obs[step, i] = normalized(infos["final_obs"][i])
                        if not np.isfinite(final_obs[step, i]).all():
                            obs[step + 1, i] = final_obs[step, i]  # for check_finite to find
            merge_over_processes(statistics, start_statistics)
            rollout_seconds = time.perf_counter() - start_time
            check_finite(args, last_good, global_step, observation=obs[1:], reward=rewards)

            # --- Advantages: values and log-probabilities in one pass, then GAE ---
            start_time = time.perf_counter()
            as_tensor = functools.partial(torch.as_tensor, device=device)
            with torch.no_grad():
                t_obs, t_actions = as_tensor(obs), as_tensor(actions)
                _, logprobs, _, values = agent.get_action_and_value(t_obs[:-1], t_actions)
                next_values = torch.cat([values[1:], agent.get_value(t_obs[-1:])])
                # Deviation: time limits are no failures; --truncation-is-terminal restores ppo2
                if final_obs and not args.truncation_is_terminal:
                    steps, indices = zip(*final_obs, strict=True)
                    last_obs = np.stack(list(final_obs.values())).astype(np.float32)
                    next_values[steps, indices] = agent.get_value(as_tensor(last_obs))
            failed = done if args.truncation_is_terminal else terminated
            failed, t_done = as_tensor(failed).float(), as_tensor(done).float()
            advantages, returns = gae(
                as_tensor(rewards), values, next_values, failed, t_done, args.gamma, args.gae_lambda
            )

            # --- Update: K epochs of minibatches ---
            # Detail 4/37: learning rate annealing [ppo2/ppo2.py L133-135]
            decay = linear_decay(1.0, iteration, args.num_iterations) if args.anneal_lr else 1.0
            optimizer.param_groups[0]["lr"] = decay * args.learning_rate
            # Extra: clip range annealing [ppo2/ppo2.py L137]
            decay = linear_decay(1.0, iteration, args.num_iterations) if args.anneal_clip else 1.0
            clip_coef.fill_(decay * args.clip_coef)
            batch = (t_obs[:-1], t_actions, logprobs, values, advantages, returns)
            batch = [x.flatten(0, 1) for x in batch]  # (T*N, ...)
            epoch_metrics = []
            for _ in range(args.update_epochs):
                order = as_tensor(rng.permutation(args.batch_size))
                metrics_sum = torch.zeros(len(LOSS_METRICS) + 1, device=device)
                # Detail 6/37: minibatch updates [ppo2/ppo2.py L157-166]
                for minibatch in zip(*(x[order].split(args.minibatch_size) for x in batch)):
                    weights.grad, metrics = gradient(agent, minibatch, clip_coef, *settings)
                    # Extra: parallelized gradient update [ppo2/model.py L97-98]
                    average_over_processes(weights.grad)
                    # Detail 11/37: global gradient clipping [ppo2/model.py L102-108]
                    grad_norm = clip_by_norm(weights.grad, args.max_grad_norm)
                    optimizer.step()
                    metrics_sum += torch.cat([metrics, grad_norm[None]])
                epoch_metrics.append(average_over_processes(metrics_sum / args.num_minibatches))
                # Extra: early stopping on target_kl [Spinning Up, ppo.py L265-274]
                if args.target_kl is not None and epoch_metrics[-1][KL] > args.target_kl:
                    break
            update_seconds = time.perf_counter() - start_time

            # --- Log: means over all minibatches of the iteration ---
            # Detail 12/37: debug variables [ppo2/model.py L115-116; ppo2/ppo2.py L183-195]
            names = (*LOSS_METRICS, "losses/grad_norm")
            metrics = dict(zip(names, torch.stack(epoch_metrics).mean(0).tolist()))
            check_finite(args, last_good, global_step, **metrics)
            metrics |= {
                "losses/explained_variance": explained_variance(values, returns),
                "policy/log_std": agent.log_std.mean().item(),
                "values/mean": values.mean().item(),
                "values/std": values.std(correction=0).item(),
                "advantages/mean": advantages.mean().item(),
                "advantages/std": advantages.std(correction=0).item(),
                "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "charts/clip_coef": clip_coef.item(),
                "charts/epochs": len(epoch_metrics),
                "charts/SPS_rollout": args.batch_size * WORLD_SIZE / rollout_seconds,
                "charts/SPS_update": args.batch_size * WORLD_SIZE / update_seconds,
            }
            log.iteration(global_step, metrics)

            # --- Save ---
            stop_signal = stop.in_any_process()
            finished = iteration == args.num_iterations
            if finished or stop_signal or iteration % args.checkpoint_interval == 0:
                log.flush()
                state = model_state(args, agent, statistics)
                state |= {"iteration": iteration, "global_step": global_step}
                state |= {"optimizer": optimizer.state_dict(), "wandb_id": log.wandb_id}
                saved = save_checkpoint(args, state, process)
            if stop_signal:
                lost = "" if saved else " (the last iterations are lost: they could not be saved)"
                say(f"Stopped by {stop_signal.name}; continue with --resume {args.run_dir}{lost}")
                raise SystemExit(128 + stop_signal)

        log.finish(model_state(args, agent, statistics))
    return {"agent": agent, "episodes": log.episodes, "updates": log.updates, "args": args}


# === Operations: start, processes, health, details, logs, checkpoints, evaluation ===


def open_run(args: Args) -> tuple[Args, dict[str, Any] | None]:
    """Join the other processes; name the run, or load the checkpoint that it continues from."""
    if WORLD_SIZE > 1 and not dist.is_initialized():
        # torchrun keeps its store over a restart; the prefix hides the dead processes' addresses.
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        atexit.register(dist.destroy_process_group)
    path = find_checkpoint(args)
    if path is not None:
        checkpoint = load_file(path, "processes")
        folder = {"output_dir": str(path.parent.parent), "run_name": path.parent.name}
        saved = dataclasses.replace(saved_args(checkpoint, path), **folder)
        args = dataclasses.replace(args, **folder)
        for field in dataclasses.fields(Args):
            value, old = getattr(args, field.name), getattr(saved, field.name)
            if value != old and field.name not in CHANGEABLE:
                flag = "--" + field.name.replace("_", "-")
                raise RunError(
                    f"{path} was made with {flag} {old}; a resumed run cannot change it."
                )
        args.check()
        if args.num_iterations < checkpoint["iteration"]:
            raise RunError(
                f"{path} is at step {checkpoint['global_step']} already: --total-timesteps "
                "can only extend the run."
            )
        if len(checkpoint["processes"]) != WORLD_SIZE:
            raise RunError(
                f"{path} needs {len(checkpoint['processes'])} processes, not {WORLD_SIZE}."
            )
        return args, checkpoint
    name = [args.run_name or f"{run_prefix(args)}{time.strftime('%Y%m%d-%H%M%S')}"]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(name)
    args.check()
    return dataclasses.replace(args, run_name=name[0]), None


def run_prefix(args: Args) -> str:
    """What the names of all runs of this environment, script and seed begin with."""
    return f"{args.env_id.replace('/', '-')}__{SCRIPT}__{args.seed}__"


# Below these sizes the GPU or the compiler costs more time than it saves.
GPU_MINIBATCH = 4096  # samples per minibatch; a network of this size leaves a GPU idle with fewer
COMPILE_MINIBATCHES = 15_000  # gradient steps in the run; each saves 0.7 ms, compiling costs 10 s


def choose_device(args: Args) -> torch.device:
    """The device of the update; acting stays on the CPU, where one small network is faster."""
    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        raise RunError("--device cuda needs an NVIDIA GPU and a CUDA build of PyTorch; use cpu.")
    use_gpu = args.device == "cuda"
    if args.device == "auto":
        use_gpu = available and args.minibatch_size >= GPU_MINIBATCH
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if use_gpu
        else torch.device("cpu")
    )


def environment_seeds(seed: int, num_envs: int, global_step: int) -> list[int]:
    """A seed for each environment of this process, unrelated to those of other seeds and ranks.

    They also differ by the step, for episodes that have to start anew when a run is resumed.
    """
    return np.random.SeedSequence([seed, RANK, global_step]).generate_state(num_envs).tolist()


def compiled(function: Callable, args: Args, example: tuple) -> Callable:
    """Compile `function` where that pays; if that fails, warn and return it as it is."""
    minibatches = args.num_iterations * args.update_epochs * args.num_minibatches
    if not args.compile:
        return function
    if minibatches < COMPILE_MINIBATCHES:
        say("Not compiling the update: so short a run would not win back the time.")
        return function
    start_time = time.perf_counter()
    try:
        torch._dynamo.config.trace_autograd_ops = True  # keeps torch.autograd.grad in the graph
        cuda = example[1][0].is_cuda
        fast = torch.compile(function, mode="reduce-overhead" if cuda else None)
        fast(*example)
    except Exception as error:  # every compiler fails in its own way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        say(f"Warning: the update runs uncompiled and so slower: {reason}")
        return function
    say(f"Compiled the update in {time.perf_counter() - start_time:.1f} s.")
    return fast


def average_over_processes(x: Tensor) -> Tensor:
    """Replace `x` in place by its mean over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
        x /= WORLD_SIZE
    return x


def merge_over_processes(
    statistics: dict[str, RunningMeanStd], start: dict[str, RunningMeanStd]
) -> None:
    """Give all processes the same statistics: the shared `start` plus the rows each one added."""
    if WORLD_SIZE == 1:
        return
    for name, stats in statistics.items():
        shift = start[name].mean

        def sums(x: RunningMeanStd, shift: np.ndarray = shift) -> np.ndarray:
            delta = x.mean - shift
            return np.stack([x.count + 0 * delta, x.count * delta, x.count * (x.var + delta**2)])

        added = torch.from_numpy(sums(stats) - sums(start[name]))
        dist.all_reduce(added)
        count, first, second = added.numpy() + sums(start[name])
        stats.count = count.flat[0].item()
        stats.mean, stats.var = shift + first / count, second / count - (first / count) ** 2


class StopRequest:
    """Turns the first SIGTERM or Ctrl-C into a request to stop; a second one ends at once."""

    def __init__(self) -> None:
        self.signum = 0

    def _request(self, signum: int, frame: Any) -> None:
        self.signum = signum
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        say(f"{signal.Signals(signum).name}: stopping after this iteration; again to stop at once.")

    def __enter__(self) -> "StopRequest":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():  # Python allows it only there
            for number in (signal.SIGTERM, signal.SIGINT):
                self.previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def in_any_process(self) -> signal.Signals | None:
        """The signal that some process received, so that all of them stop together."""
        signum = torch.tensor(self.signum)
        if WORLD_SIZE > 1:
            dist.all_reduce(signum, dist.ReduceOp.MAX)
        return signal.Signals(signum.item()) if signum else None


def check_finite(
    args: Args, last_good: dict[str, Any], global_step: int, **quantities: Any
) -> None:
    """Stop the run at the first NaN or infinity, after saving the model from before it.

    An array (T, N, ...) belongs to the T steps up to `global_step`.
    """
    for name, value in quantities.items():
        finite = np.isfinite(value)
        if finite.all():
            continue
        if finite.ndim > 0:
            first = np.argwhere(~finite)[0][0]
            global_step -= (len(value) - 1 - int(first)) * args.num_envs * WORLD_SIZE
        saved = save_file(args.run_dir / "model.pt", last_good)
        raise RunError(
            f"The {name} is NaN or infinite at step {global_step}. "
            + (f"The model from before it is in {args.run_dir / 'model.pt'}." if saved else "")
        )


# Thresholds of `health_warnings`; our own choices where no source is named.
CLIPFRAC_HIGH = 0.5  # half of all samples have left the range in which the objective is trusted
APPROX_KL_HIGH = 0.05  # Huang et al. 2022: normally below 0.02
APPROX_KL_LOW = 0.0005  # a fortieth of that: the policy stands still
LOG_STD_LOW = -4.0  # sigma 0.02, against 1 at the start
ENTROPY_SHARE_LOW = 0.01  # of the entropy of a uniform policy; only where actions are discrete
GRAD_NORM_HIGH = 100.0  # 200 times the norm that ppo2 clips to
ADVANTAGE_STD_LOW = 1e-6  # below it, normalized advantages are rounding noise
PATIENCE = 20  # iterations that "always" and "for long" mean


def health_warnings(updates: list[dict[str, float]]) -> dict[str, str]:
    """Look at the metrics of all iterations so far; return a sentence with a remedy per cause."""
    latest, recent = updates[-1], updates[-PATIENCE:]
    long = len(recent) == PATIENCE
    learning = latest["charts/learning_rate"] > updates[0]["charts/learning_rate"] / 4
    found = {}
    if latest["losses/clipfrac"] > CLIPFRAC_HIGH:
        found["clipfrac"] = (
            f"{latest['losses/clipfrac']:.0%} of the policy ratios are far from 1: "
            "lower --learning-rate or --update-epochs."
        )
    if latest["losses/approx_kl"] > APPROX_KL_HIGH:
        found["approx_kl high"] = (
            f"the policy moves far in one update (approx. KL {latest['losses/approx_kl']:.3f}): "
            "lower --learning-rate or --update-epochs."
        )
    if long and learning and all(x["losses/approx_kl"] < APPROX_KL_LOW for x in recent):
        found["approx_kl low"] = (
            f"the policy has hardly moved for {PATIENCE} updates: raise --learning-rate, and check "
            "that the rewards vary."
        )
    if latest.get("policy/log_std", 0.0) < LOG_STD_LOW:
        found["log_std"] = (
            f"the policy has stopped exploring (log std {latest['policy/log_std']:.1f}): "
            "raise --ent-coef."
        )
    if latest.get("policy/entropy_share", 1.0) < ENTROPY_SHARE_LOW:
        found["entropy"] = "the policy has stopped exploring (no entropy left): raise --ent-coef."
    if long and all(x["losses/explained_variance"] < 0 for x in recent):
        found["explained_variance"] = (
            f"the value function has been worse than a constant for {PATIENCE} updates: check the "
            "scale of the rewards, raise --vf-coef or --num-steps."
        )
    if latest["losses/grad_norm"] > GRAD_NORM_HIGH:
        found["grad_norm"] = (
            f"gradients explode (norm {latest['losses/grad_norm']:.0f}): lower --learning-rate, "
            "scale rewards and observations."
        )
    if latest["advantages/std"] < ADVANTAGE_STD_LOW:
        found["advantages"] = "all advantages are equal, nothing can be learned: check the rewards."
    return found


DETAIL_TAG = re.compile(
    r"# (?:Detail (\w+/\d+)|(Extra|Deviation))( omitted)?: ([^\[;]+?)(?: \[.*\]|; (.*))?"
)


def detail_table(args: Args, source: str) -> list[tuple[str, str, str, int]]:
    """The implementation details of `source`: number, name, value in this run, line.

    The value lists the settings that the statement below the tag names, or, for a detail that this
    script does not have, the reason.
    """
    statements = {x.lineno: x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.stmt)}
    lines = source.splitlines()
    rows = []
    for line, text in enumerate(lines, start=1):
        match = DETAIL_TAG.fullmatch(text.strip())
        if match is None:
            continue
        number, extra, omitted, title, reason = match.groups()
        value = f"not here: {reason}"
        if not omitted:
            first = next(x for x in range(line + 1, len(lines) + 1) if x in statements)
            body = getattr(statements[first], "body", None)
            last = body[0].lineno - 1 if body else statements[first].end_lineno
            words = re.findall(r"\w+", "\n".join(lines[first - 1 : last]))
            names = [name for name in dict.fromkeys(words) if hasattr(args, name)]
            value = ", ".join(f"{name}={getattr(args, name)}" for name in names) or "on"
        rows.append((number or extra, title, value, line))

    # The 37 first, then a series with a letter, then what has no number.
    def place(row: tuple) -> tuple[str, int]:
        letter, digits = re.fullmatch(r"([A-Z]?)(\d*).*", row[0]).groups()
        return (letter if digits else "~"), int(digits or 0)

    return sorted(rows, key=place)


def say(text: str) -> None:
    """Print a line above the progress bar, once for all processes."""
    if RANK == 0:
        tqdm.write(text)
        sys.stdout.flush()


class RunLog:
    """Episodes and metrics of a run: in memory, as CSV, in TensorBoard and in Weights & Biases."""

    def __init__(self, args: Args, checkpoint: dict[str, Any] | None) -> None:
        self.args = args
        self.episodes: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.warned: set[str] = set()
        self.wandb_id = checkpoint["wandb_id"] if checkpoint else secrets.token_hex(4)
        self.wandb = None
        if RANK > 0:
            return
        if args.track:
            try:
                import wandb
            except ImportError as error:
                raise RunError("--track needs Weights & Biases: pip install wandb.") from error
            self.wandb = wandb
        resume_step = checkpoint["global_step"] if checkpoint else 0
        with self._writing():
            if checkpoint:
                self.episodes = self._rewind("episodes.csv", resume_step)
                self.updates = self._rewind("updates.csv", resume_step)
            else:
                self._make_folder()
        self.logged_episodes = len(self.episodes)
        if args.track:
            self._start_wandb()
        with self._writing():
            self._write_settings()
            # purge_step hides what was logged after the checkpoint and before the run was killed.
            self.writer = SummaryWriter(str(args.run_dir), purge_step=resume_step + 1)
        self.progress = tqdm(
            total=args.num_iterations * args.batch_size * WORLD_SIZE,
            initial=resume_step,
            unit="step",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )

    def _make_folder(self) -> None:
        folder = self.args.run_dir
        logs = [folder / "episodes.csv", folder / "updates.csv"]
        logs += folder.glob("events.out.tfevents.*")
        # With --resume auto, these are of a run that was killed before its first checkpoint.
        start_over = self.args.resume == "auto" and (folder / "args.json").exists()
        if not start_over and any(x.exists() for x in [folder / "args.json", *logs]):
            resume = (folder / "checkpoint.pt").exists()
            remedy = f"add --resume {folder} or another" if resume else "use another"
            raise RunError(f"{folder} holds a run: {remedy} --run-name.")
        folder.mkdir(parents=True, exist_ok=True)
        for log in logs:
            log.unlink(missing_ok=True)

    def _write_settings(self) -> None:
        """At each start, since a run that goes on may have become longer."""
        path = self.args.run_dir / "args.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self.args), indent=2) + "\n")
        os.replace(temporary, path)

    def _start_wandb(self) -> None:
        args = self.args
        try:
            self.wandb.init(
                project=args.wandb_project,
                entity=args.wandb_entity,
                name=args.run_name,
                id=self.wandb_id,
                resume="allow",
                config=dataclasses.asdict(args),
                dir=args.run_dir,
            )
        except self.wandb.Error as error:
            reason = " ".join(str(error).split())
            raise RunError(f"Weights & Biases: {reason} (WANDB_MODE=offline works too).") from error

    def _rewind(self, name: str, global_step: int) -> list[dict[str, Any]]:
        """Read a CSV back and drop the rows after `global_step`, which will be made again."""
        path = self.args.run_dir / name
        rows = []
        with contextlib.suppress(FileNotFoundError), path.open(newline="") as file:
            for row in csv.DictReader(file):
                try:
                    row = {key: json.loads(value) for key, value in row.items()}
                except (TypeError, ValueError):  # torn when the run was killed or the disk full
                    continue
                if row["global_step"] <= global_step:
                    rows.append(row)
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        self._append(temporary.name, rows)
        if rows:
            os.replace(temporary, path)
        else:
            path.unlink(missing_ok=True)
        return rows

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        path = self.args.run_dir / name
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows({k: json.dumps(v) for k, v in row.items()} for row in rows)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A folder that cannot be written to is to stop the run before it has begun."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"Cannot write to {self.args.run_dir}: {reason}.") from error

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """A full disk or a removed folder must not end the training."""
        try:
            yield
        except OSError as error:
            self.warn("logs", f"the logs cannot be written ({error.strerror or error}).")

    def start(self, device: torch.device, global_step: int) -> None:
        """Say what is about to run; log the settings and the table of details."""
        self.start_time, self.start_step = time.perf_counter(), global_step
        if RANK > 0:
            return
        args = self.args
        say(
            f"{args.env_id}, seed {args.seed}: {args.num_iterations} iterations of "
            f"{args.batch_size} steps in {WORLD_SIZE} process(es) with {args.torch_threads} "
            f"thread(s), update on {device}" + (f", from step {global_step}" if global_step else "")
        )
        table = [("Detail", "Name", "In this run", "Line")]
        table += detail_table(args, Path(__file__).read_text(encoding="utf-8"))
        if args.print_details:
            say("\n".join(f"{a:>7}  {b:<44} {d:>4}  {c}" for a, b, c, d in table))
        settings = [("Setting", "Value"), *dataclasses.asdict(args).items()]
        with self._surviving():
            self.writer.add_text("details", markdown_table(table))
            self.writer.add_text("settings", markdown_table(settings))
        if self.wandb:
            rows = [[str(cell) for cell in row] for row in table]
            self.wandb.log({"details": self.wandb.Table(rows[0], rows[1:])}, step=global_step)

    def episode(self, global_step: int, episode_return: float, length: int) -> None:
        """Note a finished episode; it is written with the iteration."""
        self.episodes.append(
            {"global_step": global_step, "return": episode_return, "length": length}
        )

    def iteration(self, global_step: int, metrics: dict[str, float]) -> None:
        """Write the metrics and the episodes of one iteration everywhere; warn if they look bad."""
        seconds = time.perf_counter() - self.start_time
        metrics = {**metrics, "charts/SPS": (global_step - self.start_step) / seconds}
        self.updates.append({"global_step": global_step, **metrics})
        if RANK > 0:
            return
        episodes = self.episodes[self.logged_episodes :]
        self.logged_episodes = len(self.episodes)
        scalars = [
            (
                x["global_step"],
                {"charts/episodic_return": x["return"], "charts/episodic_length": x["length"]},
            )
            for x in episodes
        ]
        for step, values in [*scalars, (global_step, metrics)]:
            with self._surviving():
                for name, value in values.items():
                    self.writer.add_scalar(name, value, step)
        if self.wandb:
            # It keeps one value per step: the mean of the episodes that end together.
            for step, group in itertools.groupby(scalars, key=lambda x: x[0]):
                rows = [values for _, values in group]
                means = {name: np.mean([row[name] for row in rows]).item() for name in rows[0]}
                self.wandb.log(means, step=step)
            self.wandb.log(metrics, step=global_step)
        with self._surviving():
            self._append("episodes.csv", episodes)
            self._append("updates.csv", self.updates[-1:])
        for cause, sentence in health_warnings(self.updates).items():
            self.warn(cause, sentence)

        recent = [x["return"] for x in self.episodes[-100:]]
        status = f"return {np.mean(recent):.1f}" if recent else "no episode yet"
        self.progress.set_postfix_str(status, refresh=False)
        self.progress.update(global_step - self.progress.n)
        twentieth = max(1, self.args.num_iterations // 20)
        if self.progress.disable and len(self.updates) % twentieth == 0:
            say(f"step {global_step:>9}  {status}  {metrics['charts/SPS']:.0f} steps/s")

    def warn(self, cause: str, sentence: str) -> None:
        """Print a warning once per cause."""
        if cause not in self.warned:
            self.warned.add(cause)
            say(f"Warning: {sentence}")

    def flush(self) -> None:
        """Put everything on disk that a checkpoint made now would not log again."""
        if RANK == 0:
            with self._surviving():
                self.writer.flush()

    def finish(self, model: dict[str, Any]) -> None:
        """Save the model and say where everything is."""
        if RANK == 0:
            self.progress.close()
            if not save_file(self.args.run_dir / "model.pt", model):
                raise RunError(f"The training is done, but {self.args.run_dir} takes no model.")
            say(
                f"Done. Model: {self.args.run_dir / 'model.pt'}; "
                f"logs: tensorboard --logdir {self.args.run_dir}"
            )

    def close(self) -> None:
        """Close the writers, also after an error."""
        if RANK == 0:
            self.progress.close()
            with self._surviving():
                self.writer.close()
            if self.wandb:
                self.wandb.finish()


def markdown_table(rows: list[tuple]) -> str:
    """Rows, the first of them the header, as Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


# --- Checkpoints ---

FORMAT = 1  # raised when older scripts could no longer read the files


def model_state(args: Args, agent: nn.Module, statistics: dict[str, Any]) -> dict[str, Any]:
    """All that evaluation needs, detached from the running training: tensors and plain values."""
    return {
        "format": FORMAT,
        "script": SCRIPT,
        "args": dataclasses.asdict(args),
        "agent": {name: x.detach().cpu().clone() for name, x in agent.state_dict().items()},
        "statistics": {name: stats.state() for name, stats in statistics.items()},
    }


def save_file(path: Path, content: dict[str, Any]) -> bool:
    """Write a file that is complete or absent, whatever happens; the one before is kept beside it.

    Loadable with `torch.load(path, weights_only=True)`. The comment of the zip archive is the
    SHA-256 digest of all before it. Returns False, after a warning, if the disk refuses.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()[:-2] + struct.pack("<H", 64)  # the length of the comment, was 0
    digest = hashlib.sha256(data).hexdigest().encode()
    temporary, previous = path.with_suffix(".tmp"), path.with_suffix(".previous.pt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data + digest)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            previous.unlink(missing_ok=True)
            try:
                os.link(path, previous)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, previous)
        os.replace(temporary, path)
    except OSError as error:
        say(f"Warning: cannot save {path} ({error.strerror}).")
        return False
    return True


def load_file(path: Path, needed: str) -> dict[str, Any]:
    """Read what `save_file` wrote, running no code from it.

    Raises:
        RunError: the file is damaged, foreign, newer than this script or lacks the key `needed`.
    """
    content: Any = None
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[:-64]).hexdigest().encode() == data[-64:]:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        problem = "is damaged or not a file of this script"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except Exception:  # whatever a foreign archive can raise
        problem = "is not a file of this script"
    if isinstance(content, dict) and "format" in content:
        problem = None
        if content["format"] > FORMAT:
            problem = "was written by a newer version of this script"
        elif content["script"] != SCRIPT:
            problem = f"was written by {content['script']}.py"
        elif needed not in content:
            problem = "holds a model but not the state of a run; it can only be evaluated"
    if problem is None:
        return content
    previous = path.with_suffix(".previous.pt")
    older = ""
    if previous.exists():
        with contextlib.suppress(RunError):
            load_file(previous, needed)
            older = f" An older good one is {previous}."
    raise RunError(f"{path} {problem}.{older}")


def saved_args(content: dict[str, Any], path: Path) -> Args:
    """The settings in a loaded file."""
    try:
        return Args(**content["args"])
    except TypeError as error:
        raise RunError(f"{path} has settings that this version does not know.") from error


def find_checkpoint(args: Args) -> Path | None:
    """The checkpoint that --resume names; None starts a new run."""
    if args.resume is None:
        return None
    if args.resume == "auto":
        folders = [args.run_dir]
        if args.run_name is None:
            folders = Path(args.output_dir).glob(glob.escape(run_prefix(args)) + "*")
        found = [x / "checkpoint.pt" for x in folders if (x / "checkpoint.pt").exists()]
        if not found:
            return None
        path = max(found, key=os.path.getmtime)
        previous = path.with_suffix(".previous.pt")
        with contextlib.suppress(RunError):
            load_file(path, "processes")
            return path
        return previous if previous.exists() else path
    path = Path(args.resume)
    path = path / "checkpoint.pt" if path.is_dir() else path
    if not path.exists():
        raise RunError(f"There is no checkpoint at {path}.")
    return path


# Settings that --resume may change: they extend the run or do not alter its course.
CHANGEABLE = {"total_timesteps", "checkpoint_interval", "print_details", "resume"}
CHANGEABLE |= {"track", "wandb_project", "wandb_entity"}


def save_checkpoint(args: Args, state: dict[str, Any], process: "ProcessState") -> bool:
    """Write `state` and the state of every process to `checkpoint.pt`; False if that failed."""
    processes = [process.capture()]
    if WORLD_SIZE > 1:
        gathered = [b""] * WORLD_SIZE
        dist.all_gather_object(gathered, to_bytes(processes[0]))
        processes = [from_bytes(x) for x in gathered]
    state |= {"processes": processes}
    return RANK > 0 or save_file(args.run_dir / "checkpoint.pt", state)


def to_bytes(state: Any) -> bytes:
    """Tensors and plain values as bytes, which is how they travel from process to process.

    Pickled, each tensor would take an open file, and some types could not be sent at all.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Undo `to_bytes`, running no code."""
    return torch.load(io.BytesIO(data), weights_only=True)


class ProcessState:
    """What one process carries from iteration to iteration, apart from weights and Adam."""

    def __init__(
        self,
        envs: VectorEnv,
        rng: np.random.Generator,
        statistics: dict[str, Any],
        arrays: dict[str, np.ndarray],
    ) -> None:
        self.envs, self.rng, self.statistics, self.arrays = envs, rng, statistics, arrays

    def capture(self) -> dict[str, Any]:
        """A copy of everything, as tensors and plain values."""
        return {
            "rng": json.dumps(self.rng.bit_generator.state),
            "torch_rng": torch.get_rng_state(),
            "statistics": {name: stats.state() for name, stats in self.statistics.items()},
            "arrays": {name: torch.from_numpy(x.copy()) for name, x in self.arrays.items()},
            "envs": [x and from_bytes(x) for x in self.envs.call("get_state")],
        }

    def restore(self, processes: list[dict[str, Any]]) -> bool:
        """Go back to what every process captured; False if the episodes had to start anew."""
        saved = processes[RANK]
        self.rng.bit_generator.state = json.loads(saved["rng"])
        torch.set_rng_state(saved["torch_rng"])
        for name, stats in self.statistics.items():
            stats.load_state(saved["statistics"][name])
        if any(None in x["envs"] for x in processes):  # the same answer in every process
            say("The state of this environment cannot be saved: the episodes start anew.")
            return False
        self.envs.call("set_state", [to_bytes(x) for x in saved["envs"]])
        for name, array in self.arrays.items():
            array[...] = saved["arrays"][name].numpy()
        return True


class Resumable(gym.Wrapper):
    """Saves and restores the complete state of an environment, bit for bit.

    Covers MuJoCo and environments whose state is made of numbers, arrays and random generators.
    Also drops the information of resets and steps, which nobody reads and a vector environment
    merges slowly.
    """

    def __init__(self, env: gym.Env, index: int) -> None:
        super().__init__(env)
        self.index = index

    def reset(self, **settings: Any) -> tuple:
        obs, _ = self.env.reset(**settings)
        return obs, {}

    def step(self, action: np.ndarray) -> tuple:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        if terminated or truncated:
            obs = obs.copy()  # the reset that follows may write into the same array
        return obs, reward, terminated, truncated, {}

    def _layers(self) -> Iterator[gym.Env]:
        layer = self.env
        while layer is not layer.unwrapped:
            yield layer
            layer = layer.env
        yield layer

    def get_state(self) -> bytes | None:
        """Attributes of each wrapper and of the environment; None if some cannot be saved."""
        states, saved = [], []
        for layer in self._layers():
            if isinstance(layer, gym.wrappers.RecordVideo):
                # The video of the current episode is lost; the next ones keep their numbers.
                counters = {"episode_id": layer.episode_id, "step_id": layer.step_id}
                states.append({**counters, "recording": False, "recorded_frames": []})
                continue
            state = {}
            for name, value in vars(layer).items():
                if value is vars(layer).get("env") or inspect.isroutine(value):
                    continue
                if name in ("_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"):
                    continue  # what it was made with
                try:
                    if type(value).__name__ == "MjData":
                        state[name] = save_mujoco(layer.model, value)
                    elif isinstance(value, np.random.Generator):
                        state[name] = json.dumps(value.bit_generator.state)
                    else:
                        state[name] = to_plain(value)
                        saved.append(value)
                except TypeError:
                    # Spaces, models, renderers and types: a new environment has the same ones.
                    # Texts are maps and pictures.
                    package = type(value).__module__.partition(".")[0]
                    same = package in ("gymnasium", "mujoco", "pygame")
                    same |= isinstance(value, type | np.dtype)
                    same |= isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "SU"
                    if not same or isinstance(value, gym.Env):
                        return None
            states.append(state)
        return None if overlap(saved) else to_bytes(states)

    def set_state(self, states: list[bytes]) -> None:
        """Restore what `get_state` of the environment with this index returned."""
        for layer, state in zip(self._layers(), from_bytes(states[self.index])):
            for name, value in state.items():
                current = getattr(layer, name, None)
                if type(current).__name__ == "MjData":
                    restore_mujoco(layer.model, current, value)
                elif isinstance(current, np.random.Generator):
                    current.bit_generator.state = json.loads(value)
                else:
                    setattr(layer, name, from_plain(value))


def to_plain(value: Any) -> Any:
    """`value` made of tensors and plain Python values, which load without running code.

    Raises:
        TypeError: it holds something else.
    """
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) in (list, tuple):
        return type(value)(to_plain(x) for x in value)
    if type(value) is dict:
        return {to_plain(key): to_plain(x) for key, x in value.items()}
    raise TypeError(type(value).__name__)


def overlap(values: list[Any]) -> bool:
    """Whether some array or collection is reached by two ways, which `to_plain` takes apart."""
    arrays, collections, left = [], set(), list(values)
    while left:
        value = left.pop()
        if isinstance(value, np.ndarray) and value.size:
            arrays.append(np.lib.array_utils.byte_bounds(value))
        elif type(value) in (list, tuple, dict):
            if id(value) in collections:
                return True
            if type(value) is not tuple:
                collections.add(id(value))
            left += value.values() if type(value) is dict else value
    arrays.sort()
    return any(first[1] > second[0] for first, second in itertools.pairwise(arrays))


def from_plain(value: Any) -> Any:
    """Undo `to_plain`."""
    if isinstance(value, Tensor):
        return value.numpy().copy()[()]  # the index () gives back scalars
    if type(value) in (list, tuple):
        return type(value)(from_plain(x) for x in value)
    if type(value) is dict:
        return {key: from_plain(x) for key, x in value.items()}
    return value


def save_mujoco(model: Any, data: Any) -> dict[str, Tensor]:
    """The integration state and every derived array, since some rewards read the derived ones."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    return {"integration": torch.from_numpy(state)} | {
        name: torch.from_numpy(array.copy()) for name, array in mujoco_arrays(data)
    }


def restore_mujoco(model: Any, data: Any, saved: dict[str, Tensor]) -> None:
    """Undo `save_mujoco`; arrays whose size follows the contacts are remade by the next step."""
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(model, data, saved["integration"].numpy(), kind)
    for name, array in mujoco_arrays(data):
        if saved[name].shape == array.shape:
            array[...] = saved[name].numpy()


def mujoco_arrays(data: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Name and memory of every array in MuJoCo's data."""
    for name in dir(data):
        if not name.startswith("_") and isinstance(value := getattr(data, name), np.ndarray):
            yield name, value


# --- Evaluation ---


def evaluate(args: Args) -> dict[str, list[float]]:
    """Play whole episodes with a saved model and frozen statistics; print and return the returns.

    Raises:
        RunError: the file is no model of this script and environment.
    """
    path = Path(args.evaluate)
    if path.is_dir():
        files = [path / x for x in ("model.pt", "checkpoint.pt") if (path / x).exists()]
        path = max(files, key=os.path.getmtime, default=path)  # a run made longer has an old model
    content = load_file(path, "agent")
    trained = saved_args(content, path)
    if trained.env_id != args.env_id:
        raise RunError(f"{path} was trained on {trained.env_id}: add --env-id {trained.env_id}.")
    args = dataclasses.replace(
        trained,
        evaluate=str(path),
        resume=None,
        seed=args.seed,
        output_dir=str(path.parent),
        run_name="evaluation",
        num_envs=1,
        num_minibatches=1,
        norm_adv=False,  # which a batch of one step could not have
        async_envs=False,
        capture_video=args.capture_video,
        eval_episodes=args.eval_episodes,
        deterministic=args.deterministic,
    )
    torch.set_num_threads(args.torch_threads)
    results = {}
    with closing_envs(make_envs(args)) as envs:
        obs_stats = RunningMeanStd(envs.single_observation_space.shape)
        action_shape = envs.single_action_space.shape
        agent = Agent(obs_stats.mean.size, math.prod(action_shape), args)
        try:
            obs_stats.load_state(content["statistics"]["obs"])
            agent.load_state_dict(content["agent"])
        except (KeyError, RuntimeError) as error:
            raise RunError(f"{path} does not fit {args.env_id} as installed here.") from error
        for policy in ("mean",) if args.deterministic else ("mean", "sampled"):
            results[policy] = play(args, envs, agent, obs_stats, policy)
            mean, std = np.mean(results[policy]), np.std(results[policy])
            say(f"{policy:>7} action: {mean:.1f} ± {std:.1f} over {args.eval_episodes} episodes")
    if args.capture_video:
        say(f"Videos: {args.run_dir / 'videos'}")
    return results


def play(
    args: Args, envs: VectorEnv, agent: Agent, obs_stats: RunningMeanStd, policy: str
) -> list[float]:
    """Returns of whole episodes in one environment; changes no statistics."""
    low, high = envs.single_action_space.low, envs.single_action_space.high
    torch.manual_seed(args.seed)
    raw_obs, _ = envs.reset(seed=environment_seeds(args.seed, 1, 0))
    returns, episode_return = [], 0.0
    while len(returns) < args.eval_episodes:
        obs = normalize_obs(raw_obs, obs_stats, args.norm_obs, args.clip_obs)
        obs = torch.as_tensor(obs, dtype=torch.float32)
        with torch.no_grad():
            mean = agent.action_mean(agent.policy_trunk(obs))
            action = mean if policy == "mean" else agent.get_action_and_value(obs)[0]
        action = clip(action.numpy().reshape(1, *low.shape), low, high)
        raw_obs, reward, terminated, truncated, _ = envs.step(action)
        episode_return += reward.item()
        if terminated[0] or truncated[0]:
            returns.append(episode_return)
            episode_return = 0.0
    return returns


# Details of other scripts, so that the table shows all 37.
# Detail 14/37 omitted: no-op reset; Atari only, see ppo_atari.py
# Detail 15/37 omitted: max and skip; Atari only, see ppo_atari.py
# Detail 16/37 omitted: episodic life; Atari only, see ppo_atari.py
# Detail 17/37 omitted: fire reset; Atari only, see ppo_atari.py
# Detail 18/37 omitted: warp frame; Atari only, see ppo_atari.py
# Detail 19/37 omitted: reward clipping to sign; Atari only, rewards are scaled here (30)
# Detail 20/37 omitted: frame stack; Atari only, see ppo_atari.py
# Detail 21/37 omitted: shared Nature CNN; observations are vectors, not images
# Detail 22/37 omitted: image scaling; observations are vectors, not images
# Detail 32/37 omitted: layer initialization; no LSTM, see ppo_atari_lstm.py
# Detail 33/37 omitted: zero initial states; no LSTM, see ppo_atari_lstm.py
# Detail 34/37 omitted: reset at episode end; no LSTM, see ppo_atari_lstm.py
# Detail 35/37 omitted: sequential minibatches; no LSTM, see ppo_atari_lstm.py
# Detail 36/37 omitted: rebuild states in training; no LSTM, see ppo_atari_lstm.py
# Detail 37/37 omitted: independent action components; actions are continuous, see 25


def main() -> None:
    """Read the command line and run; what is wrong with it ends as one sentence and code 2."""
    try:
        args = tyro.cli(Args)
        path = find_checkpoint(args)
        if path is not None:
            # A resumed run has its own settings; only flags that are given change them.
            saved = saved_args(load_file(path, "processes"), path)
            args = tyro.cli(Args, default=dataclasses.replace(saved, resume=str(path)))
            args = dataclasses.replace(args, resume=str(path))
        evaluate(args) if args.evaluate else train(args)
    except RunError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
