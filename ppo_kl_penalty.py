# /// script
# requires-python = ">=3.11"
# dependencies = ["gymnasium[mujoco]==1.4.0", "moviepy==2.2.1", "mujoco==4.0.0", "numpy==2.4.6",
#   "tensorboard==2.21.0", "threadpoolctl==3.8.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17",
#   "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) with a KL penalty instead of clipping, in one file.

    python ppo_kl_penalty.py --env-id HalfCheetah-v4  # uv run installs what it needs

This is the other objective of Schulman et al. 2017 (arXiv 1707.06347, section 4). It does not clip
the ratio of new to old probabilities. Instead, the policy pays a price for moving away from the one
that collected the data: beta * KL(old || new). After each update, beta is adapted for the next one.
The tags K1-K3 mark what is new. All else is ppo_continuous_action.py, which explains PPO.

In the paper's Table 1, clipping has a normalized score of 0.82. An adaptive beta with targets of
0.003, 0.01, 0.03 has 0.68, 0.74, 0.71. A fixed beta (`--kl-mode fixed`) has 0.62 to 0.72, and
neither clipping nor a penalty (`--kl-mode none`) has -0.39. Two things are not from the paper: beta
has limits (`KL_COEF_MIN`, `KL_COEF_MAX`), and values keep their own clipping (detail 9).

The code follows OpenAI's ppo2 (openai/baselines@ea25b9e8) down to "The 37 Implementation Details of
PPO" (Huang et al. 2022). Each detail is a comment above its line, with its settings in parentheses,
its place in baselines/ in brackets, and its reason below. `--details` lists them. Detail 8 is in
ppo_continuous_action.py, 14-22 in ppo_atari.py, 32-36 in ppo_atari_lstm.py, and 37 in
ppo_multidiscrete.py.

Differences from ppo2: time limits are not failures (unless `--truncation-is-terminal`); rewards are
scaled with `--gamma`, not always 0.99; the KL is logged exactly and as k3, not as k2; orthogonal
matrices come from a QR decomposition, not an SVD; each episode has its own seed.
"""

import argparse
import dataclasses
import functools
import io
import math
import os
import re
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import threadpoolctl
import torch
import tyro
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Settings ===

HIDDEN = 64  # units in each hidden layer
KL_COEF_MIN, KL_COEF_MAX = 2.0**-20, 2.0**20  # below, beta has no effect; above, nothing else has
STEPS_PER_CALL = 1  # as in the runs of our tables; 4 is faster, but rounds differently
SCRIPT = Path(globals().get("__file__", "notebook"))  # pasted into a notebook, it has no file
Tensors = dict[str, Tensor]
StepSize = Annotated[float, tyro.conf.arg(aliases=["--lr"])]


# Copied from ppo_continuous_action.py
class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


@dataclasses.dataclass(frozen=True)
class Args:
    # --- Environment ---
    env_id: str = "HalfCheetah-v4"  # Gymnasium environment; actions should span about [-1, 1]
    num_envs: int = 1  # environments N, stepped one after another [ppo2: 1; paper, Atari: 8]
    truncation_is_terminal: bool = False  # treat time limits as failures, as ppo2 does
    norm_obs: bool = True  # normalize observations by their running mean and standard deviation
    clip_obs: float = 10.0  # clip normalized observations to +-this [ppo2: 10; inf: off]
    scale_rewards: bool = True  # divide rewards by the running std of their discounted sum
    clip_reward: float = 10.0  # clip scaled rewards to +-this [ppo2: 10; inf: off]

    # --- Experiment ---
    seed: int = 1  # random seed of the whole run
    total_timesteps: float = 1e6  # total steps of all environments; annealing ends there
    run_name: str | None = None  # name of its folder in runs/; by default made of the settings
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    compile: bool = True  # compile the update if there is a C++ compiler
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline: to disk)
    checkpoint_interval: int = 25  # iterations between checkpoints; the first is saved too

    # --- PPO ---
    num_steps: int = 2048  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: int = 32  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: int = 10  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: StepSize = 3e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    anneal_lr: bool = True  # lower the step size linearly towards 0 [ppo2; paper: Atari only]
    adam_eps: float = 1e-5  # Adam's epsilon [ppo2: 1e-5]
    gamma: float = 0.99  # discount factor [paper: 0.99]
    gae_lambda: float = 0.95  # advantages look one step ahead at 0, to the end at 1 [paper: 0.95]
    norm_adv: bool = True  # normalize the advantages of each minibatch
    kl_mode: Literal["adaptive", "fixed", "none"] = "adaptive"  # beta adapts, stays, or is 0
    kl_coef: float = 1.0  # weight of the penalty, beta (at first, if adaptive) [paper: 0.3-10]
    penalty_kl: float = 0.01  # KL that an adaptive beta aims at, d_targ [paper: 0.003-0.03]
    value_clip_coef: float = 0.2  # limit of a value's change [ppo2: 0.2; inf: off]
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: float = 0.5  # weight of the value loss (half a squared error), c1 [ppo2: 0.5]
    max_grad_norm: float = 0.5  # maximum norm of the whole gradient [ppo2: 0.5; inf: off]

    def __post_init__(self) -> None:
        vars(self).update(plain(vars(self)))  # refuses what a checkpoint cannot hold
        counts = "num_envs num_steps num_minibatches update_epochs checkpoint_interval"
        sizes = "learning_rate adam_eps clip_obs clip_reward value_clip_coef vf_coef max_grad_norm"
        limits = dict.fromkeys(counts.split(), (1, math.inf))
        limits |= dict.fromkeys(sizes.split(), (0, math.inf))
        limits |= {"gamma": (0, 1), "gae_lambda": (0, 1), "seed": (0, 2**63 - 1)}
        limits |= {"kl_coef": (0, math.inf), "penalty_kl": (0, math.inf)}
        for name, (low, high) in limits.items():
            if not low <= (value := getattr(self, name)) <= high:
                flag = f"--{name.replace('_', '-')} ({value})"
                raise UsageError(f"{flag} must be from {low} to {high}.")
        batch, flag = self.num_steps * self.num_envs, "--num-steps * --num-envs"
        if batch % self.num_minibatches or batch == self.num_minibatches:
            raise UsageError(f"{flag} ({batch}) must be 2, 3, 4... times --num-minibatches.")
        if not batch <= self.total_timesteps < math.inf:
            raise UsageError(f"--total-timesteps must be finite, and at least {flag} ({batch}).")
        if self.run_name and (self.run_name == ".." or Path(self.run_name).name != self.run_name):
            raise UsageError(f"--run-name ({self.run_name}) must be a name, not a path.")


# === Agent ===


# Copied from ppo_continuous_action.py
def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with zero bias and an orthogonal weight matrix, scaled by `gain`."""
    layer = nn.Linear(inputs, outputs)
    # Detail 2/37: orthogonal and constant initialization [a2c/utils.py L20]
    # Activations keep their scale. A small last gain makes a new policy almost ignore its input.
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A Gaussian policy and a value function, each with two hidden layers of tanh units."""

    def __init__(self, obs_size: int, action_size: int) -> None:
        super().__init__()

        def hidden() -> list[nn.Module]:
            first, second = (linear(x, HIDDEN, gain=2**0.5) for x in (obs_size, HIDDEN))
            return [first, nn.Tanh(), second, nn.Tanh()]

        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        # If layers are shared, both losses train them and compete. vf_coef then sets the balance.
        # Detail 26/37: separate networks [ppo2/defaults.py L12]
        # Sharing helps with images, whose features are costly to learn, but little with vectors.
        value, policy = hidden(), hidden()
        self.value = nn.Sequential(*value, linear(HIDDEN, 1, gain=1.0), nn.Flatten(-2))  # (...)
        self.policy = nn.Sequential(*policy, linear(HIDDEN, action_size, gain=0.01))  # (..., A)
        # Detail 24/37: state-independent log std [distributions.py L104-105]
        # Each action component has one log std, the same in all states. It starts at 0.
        self.log_std = nn.Parameter(torch.zeros(1, action_size))

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, ...]:
        """Values of obs (..., D), log-probabilities of actions (..., A), entropies, each (...).

        The policy's means (..., A) come last; the exact KL needs them.
        """
        mean = self.policy(obs)
        dist = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
        # Detail 25/37: independent action components [common/distributions.py L238-246]
        # The probability of an action is the product over its components, so the logs add up.
        logprobs, entropies = dist.log_prob(actions).sum(-1), dist.entropy().sum(-1)
        return self.value(obs), logprobs, entropies, mean


# Copied from ppo_continuous_action.py
def actor(agent: Agent) -> Callable[..., np.ndarray]:
    """The policy in NumPy, which is five times as fast as PyTorch for a few rows.

    Returns `act(obs, noise)`: actions (N, A) from normalized obs (N, D) and standard normal noise
    (N, A); noise 0 gives the most likely ones. If you change the distribution, change it here, in
    `Agent.evaluate_actions` and at `actor_logprobs`: "check/acting" shows whether they agree.
    """
    layers, std = [in_numpy(x) for x in agent.policy], agent.log_std.exp().numpy(force=True)

    def act(obs: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
        mean = obs
        for layer in layers:
            mean = layer(mean)
        # Detail 23/37: normal distribution [common/distributions.py L96-106]
        # Actions are sampled around the network's output. That is how better ones are found.
        return mean + std * noise

    return act


# === The math ===


# Copied from ppo_continuous_action.py
def normalize_obs(obs: np.ndarray, stats: "RunningMeanStd", args: Args) -> np.ndarray:
    """Standardize observations (N, D) with the running statistics, without updating them."""
    if not args.norm_obs:
        return obs
    # Detail 28/37: observation normalization (norm_obs) [common/vec_env/vec_normalize.py L36-42]
    # Speeds and forces have different units. Networks learn best from inputs with mean 0 and std 1.
    obs = (obs - stats.mean) / np.sqrt(stats.var + 1e-8)
    # Detail 29/37: observation clipping (norm_obs, clip_obs) [common/vec_env/vec_normalize.py L39]
    # An outlier, or an input that has hardly varied so far, would otherwise drown out the rest.
    return np.minimum(np.maximum(obs, -args.clip_obs), args.clip_obs)  # faster than np.clip


# Copied from ppo_continuous_action.py
def gae(rewards: Tensor, values: Tensor, next_values: Tensor, done: Tensor, args: Args) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2016, equations 11-16), all (T, N).

    `next_values` is what the rest of the episode is worth after each step. `done` is 1 where the
    episode ended with that step, for any reason.
    """
    # At first, temporal-difference (TD) errors: how much better each step went than predicted.
    advantages = (rewards + args.gamma * next_values - values).numpy(force=True)
    decay = (args.gamma * args.gae_lambda * (1 - done)).numpy(force=True)  # NumPy loops faster
    for t in reversed(range(len(advantages) - 1)):
        # Detail 5/37: generalized advantage estimation (gamma, gae_lambda) [ppo2/runner.py L50-65]
        # Later TD errors count less. A higher lambda means less bias and more variance.
        advantages[t] += decay[t] * advantages[t + 1]
    return torch.tensor(advantages, device=values.device)


# Copied from ppo_continuous_action.py
def normalize(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and std 1, with the population std (divisor n) as in ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """Unbiased estimate k3 of KL(old || new): mean(r - 1 - log r), r = new/old (Schulman 2020)."""
    return (logratio.exp() - 1 - logratio).mean()


def penalized_policy_loss(logratio: Tensor, advantages: Tensor, kl: Tensor, beta: Tensor) -> Tensor:
    """Surrogate objective with KL penalty (paper, equation 8), negated for descent; a scalar.

    `kl` is KL(old || new) in the state of each sample. Without the penalty, this is equation 6.
    """
    ratio = logratio.exp()  # how much more likely the actions are than under the old policy
    # Detail K1: KL-penalized objective (kl_mode, kl_coef) [paper, equation 8]
    # The samples only tell us about policies close to the old one, so moving away has a price.
    return (beta * kl - ratio * advantages).mean()


def gaussian_kl(mean: Tensor, log_std: Tensor, new_mean: Tensor, new_log_std: Tensor) -> Tensor:
    """KL(old || new) (...) of Gaussians (..., A) with independent components, in nats.

    The sum over components of log(s_new / s_old) + (s_old^2 + (m_old - m_new)^2) / (2 s_new^2) -
    1/2, with means m and standard deviations s.
    """
    log_growth = new_log_std - log_std
    distance = (mean - new_mean) * (-new_log_std).exp()
    # Detail K2: exact KL divergence [paper, section 4]
    # Gaussians have a formula. An estimate from one action per state would add noise.
    return (log_growth + 0.5 * ((-2 * log_growth).exp() + distance**2 - 1)).sum(-1)


def paper_kl_coef(kl_coef: float, kl: float, penalty_kl: float) -> float:
    """The next beta: half if the KL is below 2/3 of its target, double if it is above 3/2 of it.

    The paper (section 4) sets no limits, but beta could not come back from 0 or infinity.
    """
    if kl < penalty_kl / 1.5:
        kl_coef /= 2
    elif kl > penalty_kl * 1.5:
        kl_coef *= 2
    return min(max(kl_coef, KL_COEF_MIN), KL_COEF_MAX)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: Tensor) -> Tensor:
    """Half the mean squared error of the values, a scalar (Stable-Baselines3 has no half)."""
    # Detail 9/37: value function loss clipping (value_clip_coef) [ppo2/model.py L68-75]
    # One batch should not move values far. The range is absolute, so it assumes scaled rewards.
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    errors = torch.max((values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


def ppo_loss(agent: Agent, minibatch: list[Tensor], args: Args) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9 with 8, negated for descent), and debug variables."""
    obs, actions, old_logprobs, old_values, advantages, returns, *old = minibatch  # (B, ...)
    values, logprobs, entropies, mean = agent.evaluate_actions(obs, actions)
    logratio = logprobs - old_logprobs
    kl = gaussian_kl(*old, mean, agent.log_std)
    # Detail 7/37: advantage normalization (norm_adv) [ppo2/model.py L136-139]
    # The step then depends on which actions were better, not on the scale of rewards.
    advantages = normalize(advantages) if args.norm_adv else advantages
    pg_loss = penalized_policy_loss(logratio, advantages, kl, args.kl_coef)
    v_loss = clipped_value_loss(values, old_values, returns, args.value_clip_coef)
    # Detail 10/37: overall loss and entropy bonus (ent_coef, vf_coef) [ppo2/model.py L91]
    # The entropy bonus rewards randomness, so that the policy does not narrow too early.
    loss = pg_loss - args.ent_coef * entropies.mean() + args.vf_coef * v_loss
    # Detail 12/37: debug variables [ppo2/model.py L87-88, L115-116]
    # These reveal problems long before the return does.
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropies.mean(),
        "losses/approx_kl": approx_kl(logratio),
        "losses/kl": kl.mean(),
        # Nothing is clipped. 0.2 is the clip range of ppo_continuous_action.py, for comparison.
        "losses/clipfrac": ((logratio.exp() - 1).abs() > 0.2).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


# Copied from ppo_continuous_action.py
def ppo_update(agent: Agent, adam: Tensors, batch: list, indices: Tensor, args: Args) -> Tensors:
    """Take an Adam step, in place, for each row of `indices` (M, B), which picks a minibatch.

    Adam is written out so that several steps compile into one graph, which makes updates six times
    as fast. `adam` holds all weights as one vector (the agent's parameters are views of it), the
    running means of the gradient and its square, and the step count. The floats of `args` are
    tensors here. Returns the metrics, with one number per minibatch.
    """
    rows = []
    for mb in indices:
        loss, metrics = ppo_loss(agent, [x[mb] for x in batch], args)
        gradients = torch.autograd.grad(loss, list(agent.parameters()))
        gradient = torch.cat([x.flatten() for x in gradients])
        metrics["losses/grad_norm"] = norm = gradient.norm()
        # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
        # One odd minibatch cannot throw the policy off, and the gradient keeps its direction.
        gradient = gradient * (args.max_grad_norm * (1 / norm)).clamp(max=1.0)
        step = adam["step"].add_(1)
        mean = adam["mean"].lerp_(gradient, 1 - 0.9)
        square = adam["square"].lerp_(gradient**2, 1 - 0.999)
        bias_correction = ((1 - 0.999**step).sqrt() / (1 - 0.9**step)).float()  # means start at 0
        # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
        # In ppo2, epsilon comes before the bias correction (PyTorch: after), so early steps shrink.
        direction = mean / (square.sqrt() + args.adam_eps)
        # Change the weights in place: a new tensor would not be the agent's.
        adam["weights"].sub_(args.learning_rate * bias_correction * direction)
        rows.append(metrics)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# === Training: collect, advantages, update, log ===


# Copied from ppo_continuous_action.py
def train(
    args: Args | None = None,
    env_factory: Callable[[], gym.Env] | None = None,
    update: Callable = ppo_update,
    resume: str | Path | None = None,
) -> dict[str, Any]:
    """Train an agent: `train(args)`, or `train(args, make)` if `make()` returns your environment.

    `resume` is the folder of a run to continue; its settings are the default of `args`. Returns
    `agent`; `episodes`, each {"global_step", "return", "length"}; `updates`, the metrics of each
    iteration; `args`; `run_dir`, the folder of logs and checkpoints.
    """
    args = settings_for(resume, args, env_factory) if resume else args or Args()
    # One thread of NumPy and of PyTorch is enough for networks of this size. Large ones need more.
    with ExitStack() as resources, threadpoolctl.threadpool_limits(1, user_api="blas"):
        resources.callback(torch.set_num_threads, torch.get_num_threads())  # as before, at the end
        torch.set_num_threads(1)
        return learn(args, env_factory, update, resume, resources)


def learn(args: Args, env_factory: Any, update: Any, resume: Any, resources: ExitStack) -> dict:
    """Do what `train` says. It closes what is put on `resources`, even after an error."""
    # --- Device and sizes ---
    # Copied from ppo_continuous_action.py
    # With recorded kernels an H200 is faster than its processor in HalfCheetah (9,481 and 8,280
    # steps/s), not in CartPole (10,105 and 10,852). Without recordings, HalfCheetah runs at 5,316.
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and device.type == "cpu":
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    torch.manual_seed(args.seed)
    batch_size = args.num_steps * args.num_envs
    num_iterations = int(args.total_timesteps // batch_size)

    # --- Environments, and arrays for a rollout (T, N, ...) ---
    # Copied from ppo_continuous_action.py
    envs = make_envs(resources, args, args.num_envs, env_factory)
    if env_factory:
        args = dataclasses.replace(args, env_id=type(envs[0].unwrapped).__name__)
    low, high = envs[0].action_space.low[None], envs[0].action_space.high[None]
    sizes = (*envs[0].observation_space.shape, low.size)  # D and A
    raw_obs, raw_final_obs = np.zeros((2, args.num_envs, sizes[0]))  # now and before a reset
    # The last observation of a rollout is the first of the next one.
    obs = np.zeros((args.num_steps + 1, *raw_obs.shape), dtype=np.float32)
    final_obs = np.zeros_like(obs[1:])  # where a time limit ended an episode
    actions = np.zeros((args.num_steps, args.num_envs, low.size), dtype=np.float32)
    rewards = np.zeros((args.num_steps, args.num_envs))
    terminated, truncated = np.zeros((2, *rewards.shape), dtype=bool)

    # --- Agent, optimizer, statistics, episodes, metrics: new, or from the checkpoint ---
    # Copied from ppo_continuous_action.py
    saved = load_checkpoint(resume, sizes) if resume else {}
    agent = saved.get("agent", Agent(*sizes)).to(device)
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    adam["step"] = torch.zeros((), dtype=torch.float64)
    adam = {name: x.to(device) for name, x in saved.get("adam", adam).items()}
    obs_stats = saved.get("obs_stats", RunningMeanStd(np.zeros(sizes[0]), np.ones(sizes[0])))
    return_stats = saved.get("return_stats", RunningMeanStd(0.0, 1.0))
    discounted_returns = np.zeros(args.num_envs)
    episodes, updates = saved.get("episodes", []), saved.get("updates", [])
    global_step = updates[-1]["global_step"] if updates else 0
    # From here on, the parameters are views of this vector, which must only be changed in place.
    nn.utils.vector_to_parameters(adam["weights"], agent.parameters())
    update = compiled(update, device) if args.compile else update
    # Floats in `args` become tensors, which can change without compiling or recording again.
    floats = [x.name for x in dataclasses.fields(args) if type(x.default) is float]
    tensors = {x: torch.tensor(float(getattr(args, x)), device=device) for x in floats}
    annealed = dataclasses.replace(args, **tensors)

    def update_epoch(minibatches: Tensor, *batch: Tensor) -> Tensors:
        steps = minibatches.split(STEPS_PER_CALL)
        rows = [update(agent, adam, [*batch], x, annealed) for x in steps]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    update_epoch = recorded(update_epoch) if device.type == "cuda" else update_epoch

    # --- Beta of the next update ---
    kl_coef = args.kl_coef
    if saved and args.kl_coef == saved["args"].kl_coef:  # otherwise a flag sets a new beta
        kl_coef = saved["kl_coef"]

    # --- Start: a resumed run continues its episodes, a new run begins new ones ---
    # Copied from ppo_continuous_action.py
    run_dir, run_id, writer = open_run(resources, args, resume, saved, global_step)
    finished = global_step // batch_size  # iterations
    if saved and replay(envs, saved, raw_obs):
        discounted_returns = saved["discounted_returns"].numpy()
    else:
        rng = np.random.default_rng([args.seed, finished])
        for i, env in enumerate(envs):
            raw_obs[i] = env.begin(rng.integers(2**31).item())
        obs_stats.update(raw_obs)
    obs[-1] = normalize_obs(raw_obs, obs_stats, args)

    iterations = range(finished + 1, num_iterations + 1)
    progress = tqdm(iterations, initial=finished, total=num_iterations, mininterval=1)
    for iteration in resources.enter_context(progress):
        # --- Collect: T steps in each of the N environments, with fixed weights ---
        # Copied from ppo_continuous_action.py
        start_time, rng = time.perf_counter(), np.random.default_rng([args.seed, iteration])
        num_before = len(episodes)
        remaining = 1 - (iteration - 1) / num_iterations  # falls from 1 to 1 / num_iterations
        act = actor(agent)
        noise = rng.standard_normal(actions.shape, dtype=np.float32)
        obs[0] = obs[-1]  # where the last rollout ended
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # Several environments make a batch more diverse. Each rollout continues the one before.
        for t in range(args.num_steps):
            global_step += args.num_envs
            actions[t] = act(obs[t], noise[t])
            # Detail 27/37: action clipping and storage [common/wrappers.py L21-26]
            # The environment gets the clipped action. The loss uses the density of the sampled one.
            clipped_actions = actions[t].clip(low, high)
            for i, (env, step) in enumerate(zip(envs, step_all(envs, clipped_actions))):
                raw_obs[i], rewards[t, i], terminated[t, i], truncated[t, i], _ = step
                if env.ended:
                    ended = {"return": env.total, "length": len(env.actions)}
                    episodes.append({"global_step": global_step, **ended})
                    raw_final_obs[i] = raw_obs[i]
                    raw_obs[i] = env.begin(rng.integers(2**31).item())
            obs_stats.update(raw_obs)
            # Where an episode has ended, this is the first observation of the next one.
            obs[t + 1] = normalize_obs(raw_obs, obs_stats, args)
            if truncated[t].any():
                final_obs[t] = normalize_obs(raw_final_obs, obs_stats, args)

        # --- Rewards: the ends of episodes, a bonus, scaling ---
        # Copied from ppo_continuous_action.py
        # Deviation: time limits are not failures (not truncation_is_terminal)
        # The episode would have gone on, so bootstrap from its last observation (ppo2 uses 0).
        terminated |= truncated & args.truncation_is_terminal
        done = terminated | truncated
        # Add a bonus of your own to `rewards` here. A wrapper would also change the logged return.
        if args.scale_rewards:
            for t in range(args.num_steps):
                discounted_returns = args.gamma * discounted_returns + rewards[t]
                return_stats.update(discounted_returns)
                # Detail 30/37: reward scaling (scale_rewards) [vec_env/vec_normalize.py L26-33]
                # One learning rate then suits all tasks. Subtracting a mean could punish survival.
                rewards[t] /= np.sqrt(return_stats.var + 1e-8)
                discounted_returns[done[t]] = 0.0
            # Detail 31/37: reward clipping (scale_rewards, clip_reward) [vec_normalize.py L32]
            # Early on, while the std is still small, one huge reward could ruin the values.
            np.clip(rewards, -args.clip_reward, args.clip_reward, out=rewards)

        # --- Advantages: the rollout as tensors (T, N, ...), its values, then GAE ---
        with torch.no_grad():
            t_obs, t_final_obs, t_actions, t_rewards, t_done, t_noise = (
                torch.tensor(x, dtype=torch.float32, device=device)
                for x in (obs, final_obs[truncated], actions, rewards, done, noise)
            )
            taken = (t_obs[:-1], t_actions)
            values, logprobs, _, mean = agent.evaluate_actions(*taken)
            log_std = agent.log_std.expand_as(mean).clone()  # a copy, because the agent's changes
            actor_logprobs = (Normal(0, 1).log_prob(t_noise) - agent.log_std).sum(-1)  # (T, N)
            # The value of the next observation predicts what follows a step. If the episode ended,
            # that observation belongs to the next episode. After a time limit, the value of the
            # final observation replaces it. After a failure, nothing follows.
            next_values = torch.cat([values[1:], agent.value(t_obs[-1:])])
            next_values[truncated] = agent.value(t_final_obs)
            next_values[terminated] = 0.0
            advantages = gae(t_rewards, values, next_values, t_done, args)
            returns = advantages + values  # targets for the values
        batch = (t_obs[:-1], t_actions, logprobs, values, advantages, returns, mean, log_std)

        # --- Update: K epochs of minibatches ---
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps make progress; small ones at the end average out noise.
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1.0)
        tensors["learning_rate"].fill_(learning_rate)  # other floats can be annealed like this
        beta = 0.0 if args.kl_mode == "none" else kl_coef
        tensors["kl_coef"].fill_(beta)
        batch = [x.flatten(0, 1) for x in batch]  # (T*N, ...)
        mb_metrics: list[Tensors] = []
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(batch_size), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more than a large one. Shuffled minibatches are fair samples.
            mb_metrics.append(update_epoch(order.view(args.num_minibatches, -1), *batch))
        with torch.no_grad():
            _, new_logprobs, _, new_mean = agent.evaluate_actions(*taken)
            kl = gaussian_kl(mean, log_std, new_mean, agent.log_std).mean().item()
        if args.kl_mode == "adaptive":
            # Detail K3: adaptive penalty coefficient (kl_mode, penalty_kl) [paper, section 4]
            # No beta suits all tasks and times. If the policy moved too far, the price doubles.
            kl_coef = paper_kl_coef(kl_coef, kl, args.penalty_kl)

        # --- Log and save ---
        logratio = new_logprobs - logprobs
        observed = observed_returns([t_rewards, next_values, terminated, done], args.gamma)
        bias = (values - observed).mean() / (observed.square().mean().sqrt() + 1e-8)
        metrics = means(mb_metrics) | {
            "losses/explained_variance": 1 - (returns - values).var() / (returns.var() + 1e-8),
            "check/value_bias": bias,  # large if the ends of episodes are handled wrongly
            "check/update": (normalize(logratio) * normalize(advantages)).mean(),  # positive
            "check/acting": approx_kl(actor_logprobs - logprobs),  # 0 if both policies agree
            "check/first_kl": mb_metrics[0]["losses/approx_kl"][0],  # 0 before the first step
            "check/kl_after": kl,  # of the whole update, exact
            "charts/learning_rate": learning_rate,
            "charts/kl_coef": beta,
            "charts/SPS": batch_size / (time.perf_counter() - start_time),
        }
        metrics = {name: float(x) for name, x in metrics.items()}
        updates.append({"global_step": global_step, **metrics})
        log(writer, global_step, metrics, episodes[num_before:], episodes[-100:], progress)
        if iteration in (1, num_iterations) or iteration % args.checkpoint_interval == 0:
            running = [(env.seed, np.array(env.actions)) for env in envs]
            state = {"agent": agent.state_dict(), "adam": adam, "sizes": sizes, "running": running}
            state |= {"obs_stats": vars(obs_stats), "return_stats": vars(return_stats)}
            state |= {"discounted_returns": discounted_returns, "raw_obs": raw_obs}
            state |= {"episodes": episodes, "updates": updates, "run_id": run_id}
            state |= {"kl_coef": kl_coef}
            save_checkpoint(run_dir, args, state | {"own_env": env_factory is not None})
    return dict(agent=agent, episodes=episodes, updates=updates, args=args, run_dir=run_dir)


# === The algorithm ends here ===
# Below: environments, running statistics, speed, logs, checkpoints, the use of a policy, `main`.


# Copied from ppo_continuous_action.py
def make_envs(resources: ExitStack, args: Args, count: int, env_factory=None, **options) -> list:
    """Make environments whose observations and actions are vectors of floats."""
    warnings.filterwarnings("ignore", message=".*is out of date|TensorFloat32")  # papers use -v4
    if args.env_id.startswith("HalfCheetah"):  # MuJoCo warns of an old word in Gymnasium's model
        import mujoco

        show = functools.partial(print, "MuJoCo:", file=sys.stderr)
        mujoco.set_mju_user_warning(lambda text: "settotalmass" in text or show(text))
    make, envs = env_factory or functools.partial(gym.make, args.env_id, **options), []
    for _ in range(count):
        if not (callable(make) and isinstance(env := make(), gym.Env)):
            raise UsageError("env_factory must be a function that returns a gymnasium.Env.")
        resources.callback(env.close)
        # Gymnasium warns if the first observations, reward... are not what they should be.
        envs.append(env if "PassiveEnvChecker" in str(env) else gym.wrappers.PassiveEnvChecker(env))
    if len({id(env.unwrapped) for env in envs}) < count:
        raise UsageError("env_factory must return a new environment each time.")
    actions, obs = envs[0].action_space, envs[0].observation_space
    if not str(actions.dtype).startswith("float") or len(actions.shape) != 1:
        hint = "try ppo_multidiscrete.py, or wrap the environment"
        raise UsageError(f"Actions are {actions}, not vectors of floats: {hint}.")
    try:
        flat = gym.spaces.Box(-np.inf, np.inf, (gym.spaces.flatdim(obs),))
    except (NotImplementedError, ValueError) as error:
        raise UsageError(f"Observations are {obs}, which cannot be flattened.") from error
    low, high = actions.low, actions.high
    if low.max() > -0.1 or high.min() < 0.1 or 10 < high.max() < np.inf:
        print(f"A new policy has mean 0 and std 1. For {actions} use gym.wrappers.RescaleAction.")
    flatten = functools.partial(vector, obs)
    return [Recorder(gym.wrappers.TransformObservation(env, flatten, flat)) for env in envs]


# Copied from ppo_continuous_action.py
def vector(space: gym.Space, obs: Any) -> np.ndarray:
    """The observation as a vector, both to train and to act."""
    if isinstance(space, gym.spaces.Box):  # `flatten` would round floats in a space of integers
        return np.asarray(obs).reshape(math.prod(space.shape))
    if isinstance(space, gym.spaces.Dict):
        return np.concatenate([vector(part, obs[name]) for name, part in space.items()])
    return gym.spaces.flatten(space, obs)


# Copied from ppo_continuous_action.py
class Recorder(gym.Wrapper):
    """Records the running episode: seed and actions (for `replay`), return, latest obs and info."""

    def begin(self, seed: int) -> np.ndarray:
        self.seed, self.actions, self.total, self.ended = seed, [], 0.0, False
        self.obs, self.info = self.env.reset(seed=seed)
        return self.obs

    def step(self, action: np.ndarray) -> tuple:
        if action[0] != action[0]:  # NaN; it spreads from any input or weight to all actions
            cause = f"the observation {self.obs} is the cause, or training has diverged"
            raise UsageError(f"Action {len(self.actions)} of an episode is NaN: {cause}.")
        self.actions.append(action.copy())  # some environments change it
        self.obs, reward, *ends, self.info = self.env.step(action)
        reward = np.asarray(reward).item()  # a float, even from an array
        self.total, self.ended = self.total + reward, any(ends)
        return self.obs, reward, *ends, self.info


# Copied from ppo_continuous_action.py
def step_all(envs: list[Recorder], actions: np.ndarray) -> list[tuple]:
    """Step the environments one after another (recipes/parallel_simulators.py: all at once)."""
    return [env.step(action) for env, action in zip(envs, actions)]


# Copied from ppo_continuous_action.py
def replay(envs: list[Recorder], saved: dict[str, Any], raw_obs: np.ndarray) -> bool:
    """Replay the running episodes of a checkpoint into `raw_obs`. Return whether that worked."""
    try:
        if len(saved["running"]) != len(envs):
            raise ValueError("--num-envs has changed")
        for i, (seed, actions) in enumerate(saved["running"]):
            raw_obs[i] = envs[i].begin(seed)
            for action in actions.numpy():
                raw_obs[i], *_ = envs[i].step(action)
        if any(env.ended for env in envs) or not np.array_equal(raw_obs, saved["raw_obs"]):
            raise ValueError("the result differs")
    except Exception as error:  # whatever a simulator can raise
        print(f"New episodes begin, since the running ones could not be replayed: {error}.")
        return False
    return True


# Copied from ppo_continuous_action.py
class RunningMeanStd:
    """Mean and population variance of all rows so far [common/running_mean_std.py L5-33]."""

    def __init__(self, mean: Any, var: Any, count: float = 1e-4) -> None:
        self.mean, self.var, self.count = np.asarray(mean), np.asarray(var), count

    def update(self, x: np.ndarray) -> None:
        """Merge the rows of `x`, (rows, ...), with the formula of Chan et al. 1979."""
        x_mean, x_var = (x[0], 0.0) if len(x) == 1 else (x.mean(0), x.var(0))  # one row: faster
        self.count += len(x)
        delta, share = x_mean - self.mean, len(x) / self.count
        self.mean = self.mean + delta * share
        self.var = self.var + (x_var - self.var) * share + delta * delta * (share * (1 - share))


# Copied from ppo_continuous_action.py
def in_numpy(layer: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The layer as a NumPy function. Other kinds run in PyTorch, which is slower."""
    if type(layer) is nn.Linear and layer.bias is not None:
        weight, bias = layer.weight.numpy(force=True).T, layer.bias.numpy(force=True)
        return lambda x: x.dot(weight) + bias
    if type(layer) in (nn.Tanh, nn.ReLU):
        return np.tanh if type(layer) is nn.Tanh else lambda x: np.maximum(x, 0.0)
    device = next((x.device for x in layer.parameters()), "cpu")
    return torch.no_grad()(lambda x: layer(torch.tensor(x, device=device)).numpy(force=True))


# Copied from ppo_continuous_action.py
def compiled(function: Callable, device: torch.device) -> Callable:
    """Compile `function` when it is first called. If that fails, say why and do without."""
    current: Callable | None = None

    def call(*inputs: Any) -> Any:
        nonlocal current
        if current:
            return current(*inputs)
        tqdm.write("The first iteration compiles the update, which may take a minute.")
        try:
            torch.compiler.reset()  # an earlier run in this process may have had other settings
            torch._dynamo.config.trace_autograd_ops = True  # keeps torch.autograd.grad in the graph
            torch._inductor.config.cpp.vec_isa_ok = True  # trust the CPU's flags: saves 10 s
            options = {"cpp_wrapper": device.type == "cpu", "size_asserts": False}
            current = torch.compile(function, options=options)
            return current(*inputs)
        except Exception as error:  # whatever a compiler can raise
            reason = str(error).partition("\n")[0]
            tqdm.write(f"The update could not be compiled, so it takes longer: {reason}")
            current = function
            return function(*inputs)

    return call


# Copied from ppo_continuous_action.py
def recorded(function: Callable) -> Callable:
    """Record the kernels that `function` launches on a GPU, then replay them all at once.

    Launching kernels one by one takes longer than small networks take to compute. Inputs are copied
    to where the recording reads them, outputs from where it writes them.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    calls, static, outputs = 0, [], {}

    def call(*inputs: Tensor) -> Tensors:
        nonlocal calls
        calls += 1
        if calls == 4:  # what is compiled or allocated in the first calls cannot be recorded
            static.extend(x.clone() for x in inputs)
            try:
                with torch.cuda.graph(graph, stream=stream):
                    outputs.update(function(*static))
            except RuntimeError as error:  # something in it waits for the GPU, as .item() does
                reason = str(error).partition("\n")[0]
                tqdm.write(f"{function.__name__} cannot be recorded, so it takes longer: {reason}")
        if not outputs:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        for old, new in zip(static, inputs):
            old.copy_(new)
        graph.replay()
        return {name: x.clone() for name, x in outputs.items()}

    return call


# === Metrics, logs, checkpoints: the same in all scripts for environments ===
# Copied from ppo_continuous_action.py


def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


def observed_returns(rollout: list, gamma: float) -> Tensor:
    """Returns (T, N) from rewards, next values, terminated and done, computed without `gae`."""
    columns = []  # in Python's numbers, which are 20 times as fast as arrays here
    for column in zip(*(x.T.tolist() for x in rollout)):
        returns = []  # from the last step to the first
        for reward, value, failed, ended in zip(*map(reversed, column)):
            rest = value if ended or not returns else returns[-1]
            returns.append(reward + gamma * (0.0 if failed else rest))
        columns.append(returns[::-1])
    return torch.tensor(columns, device=rollout[0].device).T


def log(writer: Any, step: int, metrics: dict, new: list, recent: list, progress: tqdm) -> None:
    """Log metrics of `step` and means over `new` episodes; show the mean return of `recent`."""
    if bad := ", ".join(name for name, x in metrics.items() if not math.isfinite(x)):
        raise UsageError(f"Not finite at step {step}: {bad}. Check observations and rewards.")
    if new:
        for name in ("return", "length"):
            metrics[f"charts/episodic_{name}"] = np.mean([x[name] for x in new]).item()
        mean = np.mean([x["return"] for x in recent])
        progress.set_postfix_str(f"return {mean:.1f}", refresh=False)
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def details(args: Any) -> str:
    """The implementation details with their lines and the values of their settings."""
    tag = re.compile(r" *# (?:Detail )?(\d+/37|[A-Z]\d+|Extra|Deviation): ([^([]+)(?:\((.*?)\))?")
    source, rows = SCRIPT.read_text(encoding="utf-8") if SCRIPT.is_file() else "", []
    for line, text in enumerate(source.splitlines(), 1):
        if match := tag.match(text):
            names = re.findall(r"\w+", (match[3] or "").replace("not ", ""))
            settings = [f"{x}={getattr(args, x, 'no setting')}" for x in names]
            rows.append(f"{match[1]:9} line {line}: {match[2].strip()} {', '.join(settings)}")
    return "\n".join(rows)


def open_run(resources: ExitStack, args: Any, resume: Any, saved: dict, step: int) -> tuple:
    """Open the log of a run. Return its folder, its id at Weights & Biases, and the log."""
    name = f"{args.env_id}__{SCRIPT.stem}__{args.seed}__{time.time_ns()}"
    run_id = saved.get("run_id", re.sub(r"[^\w.=+-]", "-", name))
    run_dir = Path(resume or f"runs/{args.run_name or run_id}")
    if args.track:
        import wandb

        about = {"id": run_id, "name": run_dir.name, "config": vars(args), "resume": "allow"}
        try:
            resources.enter_context(wandb.init(**about, sync_tensorboard=True))
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error
    try:
        if not resume:
            run_dir.mkdir(parents=True)  # of two runs with one name, only one succeeds
        writer = SummaryWriter(run_dir, purge_step=step + 1)  # hide lost steps
    except OSError as error:
        raise UsageError(f"{run_dir}: {error.strerror}: change --run-name, or --resume.") from error
    resources.enter_context(writer)
    rows = [f"| {setting} | {value} |" for setting, value in vars(args).items()]
    writer.add_text("hyperparameters", "\n".join(["| setting | value |", "|-|-|", *rows]))
    writer.add_text("details", details(args).replace("\n", "  \n"))
    print(f"Logs and checkpoints: {run_dir}")
    if step + args.num_steps * args.num_envs > args.total_timesteps:
        print(f"Step {step} was the last one: raise --total-timesteps to train on.")
    return run_dir, run_id, writer


def plain(x: Any, name: str = "") -> Any:
    """Turn NumPy arrays and numbers in `x` into tensors and Python numbers, which load safely."""
    if isinstance(x, dict):
        return {key: plain(value, key) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(plain(value, name) for value in x)
    if isinstance(x, np.ndarray | np.generic):
        return torch.tensor(x) if isinstance(x, np.ndarray) else x.item()
    if not isinstance(x, int | float | str | bytes | Tensor | None):
        raise UsageError(f"{name} ({x!r}) cannot be saved: use a number or a string.")
    return x


def save_checkpoint(run_dir: Path, args: Any, state: dict[str, Any]) -> None:
    """Save `state`. The file is always the old or the new one, never half of one."""
    temporary = run_dir / f"checkpoint.{os.getpid()}.tmp"
    # Episodes in columns, because a million dictionaries would take long to load.
    names = state["episodes"][0] if state["episodes"] else ("global_step", "return", "length")
    columns = {name: np.array([x[name] for x in state["episodes"]]) for name in names}
    try:
        torch.save(plain({"args": vars(args), **state, "episodes": columns}), file := io.BytesIO())
        temporary.write_bytes(file.getbuffer())
        os.replace(temporary, run_dir / "checkpoint.pt")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"Could not save; {run_dir} keeps its last checkpoint: {error}") from error


def load_checkpoint(run_dir: Any, sizes: tuple[int, int] | None = None) -> dict[str, Any]:
    """Everything a run has saved, with its `args` and `agent`. Loading it runs no code."""
    path = Path(run_dir) / "checkpoint.pt"
    try:
        if broken := zipfile.ZipFile(path).testzip():  # torch.load ignores the checksums
            raise ValueError(f"the checksum of {broken} is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        agent = Agent(*saved["sizes"])
        agent.load_state_dict(saved["agent"])
        saved |= {"args": Args(**saved["args"]), "agent": agent}
        saved |= {name: RunningMeanStd(**saved[name]) for name in ("obs_stats", "return_stats")}
        names, columns = saved["episodes"], saved["episodes"].values()
        saved["episodes"] = [dict(zip(names, x)) for x in zip(*(x.tolist() for x in columns))]
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UsageError(f"{path} is missing, damaged or from another script: {reason}") from error
    if sizes and sizes != saved["sizes"]:
        raise UsageError(f"{run_dir} was trained in an environment with other spaces.")
    return saved


def settings_for(run_dir: Any, args: Args | None, env_factory: Any) -> Args:
    """`args`, or a run's own. They must not name an environment that an `env_factory` made."""
    saved = load_checkpoint(run_dir)
    args = args or saved["args"]
    if saved["own_env"] and not env_factory and args.env_id == saved["args"].env_id:
        hint = "give it to train or evaluate in Python, or add --env-id MODULE:NAME"
        raise UsageError(f"{run_dir} needs its env_factory: {hint}.")
    return args


# === The use of a policy, and `main` ===


# Copied from ppo_continuous_action.py
def load_policy(run_dir: Any, env: gym.Env) -> Callable[..., np.ndarray]:
    """The trained policy: `policy(obs)` is the most likely action for an observation of `env`."""
    sizes = (gym.spaces.flatdim(env.observation_space), *env.action_space.shape)
    saved = load_checkpoint(run_dir, sizes)
    act, stats, args = actor(saved["agent"]), saved["obs_stats"], saved["args"]

    def policy(obs: Any, noise: Any = 0.0) -> np.ndarray:  # noise (A,) ~ N(0, 1) to sample
        obs = normalize_obs(vector(env.observation_space, obs)[None], stats, args)
        action = act(obs.astype(np.float32), noise)[0]
        return action.clip(env.action_space.low, env.action_space.high)

    return policy


# Copied from ppo_continuous_action.py
@dataclasses.dataclass(frozen=True)
class Command:
    args: tyro.conf.OmitArgPrefixes[Args]
    resume: str | None = None  # continue the run in this folder; other flags change its settings
    evaluate: str | None = None  # play episodes with the policy in this folder; no training
    eval_episodes: int = 10  # number of episodes, with --evaluate
    capture_video: bool = False  # film the first episode, with --evaluate
    details: bool = False  # print the implementation details with their values, and exit


# Copied from ppo_continuous_action.py
def evaluate(
    run_dir: Any,
    env_factory: Callable[[], gym.Env] | None = None,
    episodes: int = 10,
    video: bool = False,
    args: Args | None = None,
) -> list[float]:
    """Play episodes with the most likely actions of a trained policy; return their returns.

    `video` films the first one: what `env_factory()` returns then needs render_mode="rgb_array".
    """
    if episodes < 1:
        raise UsageError("--eval-episodes must be at least 1.")
    if video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    options = {"render_mode": "rgb_array"} if video else {}
    args = settings_for(run_dir, args, env_factory)
    with ExitStack() as resources:
        (env,) = make_envs(resources, args, 1, env_factory, **options)
        policy, returns = load_policy(run_dir, env), []
        if video:
            if hasattr(env.unwrapped, "mujoco_renderer") and env.unwrapped.model.ncam:
                env.unwrapped.mujoco_renderer.camera_id = 0  # follows the body
            env = gym.wrappers.RecordVideo(env.env, f"{run_dir}/videos", lambda k: k == 0)
            env = Recorder(resources.enter_context(env))
        progress = resources.enter_context(tqdm(unit=" steps", disable=not video))
        limit = math.inf if env.spec and env.spec.max_episode_steps else 10_000
        for seed in range(episodes):
            obs = env.begin(seed)
            while not env.ended and len(env.actions) < limit:
                obs, *_ = env.step(policy(obs))
                progress.update()
            if not env.ended:
                print(f"An episode was cut after {limit} steps: the environment has no time limit.")
            returns.append(env.total)
    if video:
        print(f"Video: {run_dir}/videos/rl-video-episode-0.mp4")
    print(f"Return {np.mean(returns):.1f} ± {np.std(returns):.1f} in {len(returns)} episodes")
    return returns


# Copied from ppo_continuous_action.py
def main() -> None:
    """Read the command line and run. The user's mistakes end in one sentence, exit code 2."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="folder")
    try:
        folder = parser.parse_known_args()[0].folder
        args = load_checkpoint(folder)["args"] if folder else Args()
        command = tyro.cli(Command, default=Command(args))
        if command.resume and command.evaluate:
            raise UsageError("--resume trains, and --evaluate does not: choose one of them.")
        if command.details:
            print(details(command.args))
        elif command.evaluate:
            count, video = command.eval_episodes, command.capture_video
            evaluate(command.evaluate, None, count, video, command.args)
        elif command.capture_video:
            raise UsageError("--capture-video films an evaluation: add --evaluate FOLDER.")
        else:
            run_dir = train(command.args, resume=command.resume)["run_dir"]
            print(f"Next: --evaluate {run_dir}, or tensorboard --logdir {run_dir}")
            if SCRIPT.with_name("benchmark").is_dir():
                print(f"Is it healthy? python -m benchmark check {run_dir}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. Use --resume with the run's folder to continue from its checkpoint.")
    except (UsageError, gym.error.Error) as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
