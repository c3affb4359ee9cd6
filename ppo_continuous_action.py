# /// script
# requires-python = ">=3.11"
# dependencies = ["gymnasium[mujoco]==1.4.0", "moviepy==2.2.1", "mujoco==4.0.0", "numpy==2.4.6",
#   "pydantic==2.14.3", "tensorboard==2.21.0", "threadpoolctl==3.8.0", "torch==2.13.0",
#   "tqdm==4.70.1", "tyro==1.0.16", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for continuous actions, in one file.

    python ppo_continuous_action.py --env-id HalfCheetah-v4

The algorithm of Schulman et al. 2017 (arXiv 1707.06347) as OpenAI implemented it in ppo2 =
openai/baselines@ea25b9e8. It repeats: act with the policy (rollout); judge each action by how much
more discounted reward it brought than the value function expected (advantage); make better ones
likelier in several passes over these samples, with no gain beyond a small factor (clipping).

"The 37 Implementation Details of PPO" (Huang et al. 2022) numbers what it takes to reproduce ppo2.
Each is a comment above the statement that does it, with its settings in parentheses, its place
below baselines/ in brackets, and in the next line its reason; `--details` lists them. Here are
1-13 (core), 23-31 (continuous actions) and two of the four auxiliary ones; 14-22 are in
ppo_atari.py, 32-36 in ppo_atari_lstm.py, 37 in ppo_multidiscrete.py.

Training is U iterations. Each has a rollout, T = num_steps steps in each of N = num_envs
environments, and an update, K = update_epochs epochs over its T*N samples in minibatches of B, one
call of `ppo_update` each. Actions are vectors of A floats, observations are flattened to D.

Deviations from ppo2: where a time limit cuts an episode off, the value of its final observation
stands for the rest (`--truncation-is-terminal` restores ppo2); rewards are scaled with the discount
`--gamma`, there always with 0.99; the logged KL is k3 (see `approx_kl`), not k2; orthogonal
matrices come from a QR decomposition, not an SVD (up to signs equal in distribution); each episode
has a seed of its own; NaN actions are not replaced by 0.
"""

import contextlib
import copy
import dataclasses
import json
import math
import os
import re
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import pydantic
import threadpoolctl
import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Settings ===

Tensors = dict[str, Tensor]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args:
    # --- Experiment ---
    seed: NonNegativeInt = 1  # seed of everything that is random in the run
    total_timesteps: PositiveInt = 1_000_000  # of all environments; annealing stretches over them
    run_name: str | None = None  # folder below runs/; by default environment, script, seed, time
    device: Literal["cpu", "cuda"] = "cpu"  # networks this small do not need a GPU
    compile: bool = True  # compile the update into one graph, where there is a C++ compiler
    track: bool = False  # send the logs to Weights & Biases too (WANDB_MODE=offline: to disk)
    checkpoint_interval: PositiveInt = 25  # iterations between two checkpoints
    resume: str | None = None  # continue the run in this folder; flags given beside it override
    evaluate: str | None = None  # play episodes with the model in this folder instead of training
    eval_episodes: PositiveInt = 10  # episodes of each policy, mean and sampled, with --evaluate
    capture_video: bool = False  # film the first episode of each policy, with --evaluate
    details: bool = False  # print the implementation details with their values here, and exit

    # --- Environment ---
    env_id: str = "HalfCheetah-v4"  # Gymnasium environment; actions best within about [-1, 1]
    num_envs: PositiveInt = 1  # environments N, stepped in turn [ppo2, MuJoCo: 1; paper, Atari: 8]
    truncation_is_terminal: bool = False  # treat time limits as failures, as ppo2 does
    norm_obs: bool = True  # normalize observations by their running mean and standard deviation
    clip_obs: PositiveFloat = 10.0  # largest normalized observation [ppo2: 10; inf: off]
    scale_rewards: bool = True  # divide rewards by the running std of their discounted sum
    clip_reward: PositiveFloat = 10.0  # largest scaled reward [ppo2: 10; inf: off]

    # --- PPO ---
    num_steps: PositiveInt = 2048  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: PositiveInt = 32  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: PositiveInt = 10  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: NonNegativeFloat = 3e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    anneal_lr: bool = True  # lower the step size linearly towards 0 [ppo2; paper: Atari only]
    adapt_lr_kl: PositiveFloat = math.inf  # adapt the step size to this KL of updates [inf: off]
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon [ppo2: 1e-5]
    gamma: Fraction = 0.99  # discount factor [paper: 0.99]
    gae_lambda: Fraction = 0.95  # 0: one-step advantages; 1: sums of all rewards [paper: 0.95]
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: PositiveFloat = 0.2  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    anneal_clip: bool = False  # lower that linearly towards 0 [paper: Atari only; ppo2: off]
    clip_vloss: bool = True  # clip the change of values to clip_coef too [ppo2; not in the paper]
    ent_coef: NonNegativeFloat = 0.0  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: NonNegativeFloat = 0.5  # weight of the value loss, half a square, c1 [ppo2: 0.5]
    max_grad_norm: PositiveFloat = 0.5  # largest norm of the whole gradient [ppo2: 0.5; inf: off]
    early_stop_kl: PositiveFloat = math.inf  # end an update after an epoch of larger KL [inf: off]
    orthogonal_init: bool = True  # initialize orthogonally, heads with small gains; else PyTorch's
    shared_network: bool = False  # policy and value function share a trunk [ppo2: not for MuJoCo]
    anneal_log_std: tuple[float, float] | None = None  # from, to; None: learn it [paper: -0.7 -1.6]

    @property
    def batch_size(self) -> int:
        """Samples per iteration, T*N."""
        return self.num_steps * self.num_envs

    @property
    def minibatch_size(self) -> int:
        """Samples per gradient step, B."""
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        """Rollouts, each followed by an update (U)."""
        return self.total_timesteps // self.batch_size

    def check(self) -> None:
        """Raise ValueError where settings do not fit together; their types limit single ones."""
        batch = f"the batch of num_steps * num_envs = {self.batch_size} steps"
        if self.batch_size % self.num_minibatches or self.minibatch_size < 2:
            raise ValueError(f"--num-minibatches must divide {batch} into parts of at least two.")
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must not be less than {batch}.")
        if self.adapt_lr_kl < math.inf and self.anneal_lr:
            raise ValueError("--adapt-lr-kl sets the step size too: it needs --no-anneal-lr.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU and a build of PyTorch for it.")


# === Agent ===


def layer_init(layer: nn.Module, gain: float) -> nn.Module:
    """Make the weight orthogonal, times `gain`, and the bias 0 [a2c/utils.py L20-63]."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Gaussian policy and value function, each with two hidden layers of 64 tanh units."""

    def __init__(self, obs_size: int, action_size: int, args: Args) -> None:
        super().__init__()
        # Detail 2/37: orthogonal and constant initialization (orthogonal_init) [a2c/utils.py L20]
        # Layers keep the size of signals; the small last gain treats all states alike at first.
        init = layer_init if args.orthogonal_init else lambda layer, gain: layer

        def trunk() -> list[nn.Module]:
            layers = [init(nn.Linear(size, 64), math.sqrt(2)) for size in (obs_size, 64)]
            return [layers[0], nn.Tanh(), layers[1], nn.Tanh()]

        value_trunk = trunk()
        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        # Shared layers are learned by both losses, which then compete; vf_coef weighs them.
        # Detail 26/37: separate networks (not shared_network) [ppo2/defaults.py L12]
        # On vectors sharing gains little: their features are cheap, unlike those of images.
        policy_trunk = value_trunk if args.shared_network else trunk()
        self.value = nn.Sequential(*value_trunk, init(nn.Linear(64, 1), 1.0))
        self.policy = nn.Sequential(*policy_trunk, init(nn.Linear(64, action_size), 0.01))
        zeros = torch.zeros(1, action_size)
        # Detail 24/37: state-independent log std (not anneal_log_std) [distributions.py L104-105]
        # How far to explore is learned once for all states: one number per component, at first 0.
        self.log_std = nn.Buffer(zeros) if args.anneal_log_std else nn.Parameter(zeros)

    def get_value(self, obs: Tensor) -> Tensor:
        """Values (...) of observations (..., D): the discounted rewards expected from there on."""
        return self.value(obs).squeeze(-1)

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of actions (..., A) in obs (..., D), entropies, values, all (...)."""
        mean = self.policy(obs)
        dist = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
        # Detail 25/37: independent action components [common/distributions.py L238-246]
        # The probability of a whole action is the product of its components', so logs are summed.
        logprobs, entropies = dist.log_prob(actions).sum(-1), dist.entropy().sum(-1)
        return logprobs, entropies, self.get_value(obs)


def actor(agent: Agent, low: np.ndarray, high: np.ndarray) -> Callable[..., tuple]:
    """Make what acts, in training and after: the policy, fast. Make it anew after every update.

    Returns `act(obs, noise)` of normalized obs (N, D) and standard normal noise (N, A), 0 for the
    most likely actions; it returns actions (N, A), as drawn and as the environment gets them.
    """
    mean, std = in_numpy(agent.policy), agent.log_std.exp().numpy(force=True)

    def act(obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Detail 23/37: normal distribution [common/distributions.py L96-106]
        # Actions are drawn around the network's output: trying others is how better ones are found.
        drawn = mean(obs) + std * noise
        # Detail 27/37: action clipping and storage [common/wrappers.py L21-26]
        # The environment gets the clipped action, the batch the drawn one: only that has a density.
        return drawn, np.minimum(np.maximum(drawn, low), high)  # np.clip is slower

    return act


# === The math ===


class RunningMeanStd:
    """Mean and population variance of all rows so far [common/running_mean_std.py L5-33]."""

    def __init__(self, mean: Any, var: Any, count: float = 1e-4) -> None:
        self.mean, self.var, self.count = np.array(mean), np.array(var), count  # count: rows so far

    def update(self, x: np.ndarray) -> None:
        """Merge the rows of `x`, (rows, ...), with the formula of Chan et al. 1979."""
        # A reduction of one row would cost more than the rest of this function.
        x_mean, x_var = (x[0], 0.0) if len(x) == 1 else (x.mean(axis=0), x.var(axis=0))
        self.count += len(x)
        delta, share = x_mean - self.mean, len(x) / self.count
        self.mean = self.mean + delta * share
        self.var = self.var + (x_var - self.var) * share + delta * delta * (share * (1 - share))

    def state(self) -> dict[str, Any]:
        """Plain numbers, from which the same statistics can be made again."""
        return {"mean": self.mean.tolist(), "var": self.var.tolist(), "count": self.count}


def normalize_obs(obs: np.ndarray, stats: RunningMeanStd, args: Args) -> np.ndarray:
    """Observations (N, D) in standard deviations from their running mean; updates nothing."""
    if not args.norm_obs:
        return obs
    # Detail 28/37: observation normalization (norm_obs) [common/vec_env/vec_normalize.py L36-42]
    # Angles, speeds and forces come in unlike units; networks learn best at mean 0 and std 1.
    obs = (obs - stats.mean) / np.sqrt(stats.var + 1e-8)
    # Detail 29/37: observation clipping (norm_obs, clip_obs) [common/vec_env/vec_normalize.py L39]
    # A rare outlier, or a number that hardly ever changed before, must not swamp all others.
    return np.minimum(np.maximum(obs, -args.clip_obs), args.clip_obs)


def scale_rewards(
    rewards: np.ndarray, done: np.ndarray, discounted: np.ndarray, stats: RunningMeanStd, args: Args
) -> np.ndarray:
    """Divide rewards (T, N) by the std of the sum of past rewards, discounted by their age.

    This can wait for the end of the rollout, because the policy never sees rewards. `done` (T, N)
    marks the last steps of episodes. The `discounted` sums R = gamma R + r of the running ones
    (N,), changed in place, and their statistics are carried on to the next rollout.
    """
    if not args.scale_rewards:
        return rewards
    scaled = np.empty_like(rewards)
    for t, reward in enumerate(rewards):
        discounted[:] = args.gamma * discounted + reward
        stats.update(discounted)
        # Detail 30/37: reward scaling (scale_rewards) [common/vec_env/vec_normalize.py L26-33]
        # One learning rate then suits all tasks; subtracting a mean would make length pay, or cost.
        scaled[t] = reward / math.sqrt(stats.var + 1e-8)
        discounted[done[t]] = 0.0
    # Detail 31/37: reward clipping (scale_rewards, clip_reward) [vec_normalize.py L32]
    # One huge reward, early when the standard deviation is still small, must not ruin the values.
    return np.clip(scaled, -args.clip_reward, args.clip_reward)


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

    Tensors are (T, ...), time first: r_t, V(s_t), and V(s_{t+1}), which is that of the final
    observation where an episode was truncated. Where `terminated` is 1 the future is worth 0;
    where `done` is 1, for either reason, the sum stops.

    Returns advantages A_t and value targets A_t + V(s_t) (the lambda-return), both (T, ...).
    """
    # Surprises: what a step brought beyond what was expected. A loop reads lists faster.
    deltas = (rewards + gamma * next_values * (1 - terminated) - values).unbind()
    decays = (gamma * gae_lambda * (1 - done)).unbind()
    advantages = [torch.zeros_like(values[0])] * (len(deltas) + 1)
    for t in reversed(range(len(deltas))):
        # Detail 5/37: generalized advantage estimation (gamma, gae_lambda) [ppo2/runner.py L50-65]
        # A surprise (delta) counts less the later it comes; higher lambda: less bias, more noise.
        advantages[t] = deltas[t] + decays[t] * advantages[t + 1]
    advantages = torch.stack(advantages[:-1])
    return advantages, advantages + values


def normalize(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and std 1; population std (divisor n) as in ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar.

    `logratio` is log pi_new(a|s) - log pi_old(a|s), of the shape of `advantages`. The gradient is
    zero where the ratio has moved by more than `clip_coef` in the direction that is rewarded.
    """
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples tell about policies near the old one only: what moves farther gains nothing.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


def value_loss(
    new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | Tensor
) -> Tensor:
    """Half the mean squared error of the values, a scalar (Stable-Baselines3 has no half).

    The gradient is zero where a value has moved by more than `clip_coef` since the rollout and is
    nearer to its target than it would be at that distance.
    """
    # Detail 9/37: value function loss clipping (clip_vloss, clip_coef) [ppo2/model.py L68-75]
    # One batch should not move values far. The range is absolute: it supposes scaled rewards.
    clipped_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    errors = torch.max((new_values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


def approx_kl(logratio: Tensor) -> Tensor:
    """Estimate KL(old || new) from the old policy's actions by k3 = mean(r - 1 - log r), r new/old.

    Unbiased as k1 = mean(-log r) but less noisy and never negative; k2 = mean((log r)^2) / 2, which
    ppo2 logs, is biased (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


def adapt_learning_rate(learning_rate: float, kl: float, desired_kl: float) -> float:
    """The next step size of Adam, after an update that has moved the policy by `kl`.

    The paper (Table 4) adjusts it by a rule that it does not print; its footnote 3 points to a
    homework that has this one, which is also that of baselines' ACKTR (2017). The limits are those
    of rsl_rl, which applies the rule before every gradient step.
    """
    factor = 1 / 1.5 if kl > 2 * desired_kl else 1.5 if kl < desired_kl / 2 else 1.0
    return min(max(factor * learning_rate, 1e-5), 1e-2)


def ppo_loss(
    agent: Agent, minibatch: list[Tensor], schedule: Tensors, args: Args
) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated), and debug variables, most by CleanRL's names.

    The minibatch holds obs and actions (B, ...) and, computed by the agent that collected them,
    logprobs, values, advantages and returns (B,); `schedule` the numbers that change during a run.
    """
    obs, actions, old_logprobs, old_values, advantages, returns = minibatch
    logprobs, entropies, values = agent.evaluate_actions(obs, actions)
    logratio, clip_coef = logprobs - old_logprobs, schedule["clip_coef"]
    # Detail 7/37: advantage normalization (norm_adv) [ppo2/model.py L136-139]
    # The step then depends on which actions were better, not on the scale of rewards.
    advantages = normalize(advantages) if args.norm_adv else advantages
    pg_loss = policy_loss(logratio, advantages, clip_coef)
    value_clip = clip_coef if args.clip_vloss else math.inf  # inf: nothing is clipped
    v_loss = value_loss(values, old_values, returns, value_clip)
    # Detail 10/37: overall loss and entropy bonus (ent_coef, vf_coef) [ppo2/model.py L91]
    # Subtracting the entropy pays for staying random, where the policy would narrow too early.
    loss = pg_loss - args.ent_coef * entropies.mean() + args.vf_coef * v_loss
    # Detail 12/37: debug variables [ppo2/model.py L87-88, L115-116]
    # The return says late that something is wrong, these say it early (`HEALTH`).
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropies.mean(),
        "losses/old_approx_kl": -logratio.mean(),  # k1
        "losses/approx_kl": approx_kl(logratio),
        "losses/clipfrac": ((logratio.exp() - 1).abs() > clip_coef).float().mean(),
    }
    if args.clip_vloss:
        value_clipped = (values - old_values).abs() > clip_coef
        metrics["losses/value_clipfrac"] = value_clipped.float().mean()
    return loss, {name: x.detach() for name, x in metrics.items()}


def bias_correction(step: int) -> float:
    """What Adam's step is multiplied by, as its averages begin at 0; betas as in the update."""
    return math.sqrt(1 - 0.999**step) / (1 - 0.9**step)


def ppo_update(
    agent: Agent, adam: Tensors, batch: list[Tensor], mb: Tensor, schedule: Tensors, args: Args
) -> Tensors:
    """One step of Adam, in place, on the rows `mb` (B,) of the batch (T*N, ...).

    Written out so that loss, gradient and step compile into one graph. `adam` has the averages of
    the gradient and of its square, and the vector of all weights. The agent's parameters are views
    of this vector: they change with it, and clipping and Adam are a few operations on vectors
    instead of a dozen for every layer. Returns the metrics.
    """
    loss, metrics = ppo_loss(agent, [x[mb] for x in batch], schedule, args)
    # Without materializing, a part of the agent that the loss does not use would be an error.
    gradients = torch.autograd.grad(loss, learned(agent), materialize_grads=True)
    gradient = torch.cat([x.flatten() for x in gradients])
    metrics["losses/grad_norm"] = gradient.norm()
    # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
    # One odd minibatch must not throw the policy far; scaled as a whole, the direction is kept.
    gradient = gradient * (args.max_grad_norm / metrics["losses/grad_norm"]).clamp(max=1.0)
    adam["mean"].lerp_(gradient, 1 - 0.9)
    adam["square"].lerp_(gradient**2, 1 - 0.999)
    # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
    # Added to the root before the bias correction (PyTorch: after): early steps are smaller.
    direction = adam["mean"] / (adam["square"].sqrt() + args.adam_eps)
    adam["weights"] -= schedule["learning_rate"] * schedule["bias_correction"] * direction
    return metrics


# === Training: collect, advantages, update, log ===


def train(
    args: Args, env_factory: Callable[[], gym.Env] | None = None, update: Callable = ppo_update
) -> dict[str, Any]:
    """Run PPO, in environments of `env_factory` if given; logs and checkpoints go below runs/.

    Returns `agent`; `episodes`, each {"global_step", "return", "length"}; `updates`, one dictionary
    of metrics per iteration; `args`; `run_dir`. Raises ValueError where something does not fit.
    """
    args.check()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    threadpoolctl.threadpool_limits(1)  # enough for networks of this size; large ones want more

    envs = Environments([make_env(args, env_factory) for _ in range(args.num_envs)])
    low, high = envs.envs[0].action_space.low, envs.envs[0].action_space.high
    agent = Agent(envs.obs.shape[1], low.size, args).to(device)
    # All that learns, in one vector; further down the parameters are made views of it.
    weights = nn.utils.parameters_to_vector(learned(agent)).detach()
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    adam_steps = 0
    update = compiled(update, step_taken) if args.compile else update

    # The rollout, (T, N, ...); its last observation becomes the first one of the next rollout.
    obs = np.zeros((args.num_steps + 1, *envs.obs.shape), dtype=np.float32)
    final_obs = np.zeros_like(obs[1:])  # where a time limit ended an episode
    actions = np.zeros((args.num_steps, args.num_envs, low.size), dtype=np.float32)
    rewards = np.zeros((args.num_steps, args.num_envs))
    terminated, truncated = np.zeros_like(rewards, dtype=bool), np.zeros_like(rewards, dtype=bool)
    obs_stats = RunningMeanStd(np.zeros(obs.shape[2]), np.ones(obs.shape[2]))
    return_stats = RunningMeanStd(0.0, 1.0)
    discounted_returns = np.zeros(args.num_envs)
    history: list[dict[str, float]] = []  # metrics of each iteration

    fixed = ["num_envs", "num_steps", "shared_network", "anneal_log_std"]  # stay on resuming
    fixed += ["learning_rate"] if args.adapt_lr_kl < math.inf else []  # goes on as it was adapted
    run_dir, saved, writer = open_run(args, envs.name, fixed)
    if saved:
        load_weights(agent, saved)
        adam = {name: x.to(device) for name, x in saved["adam"].items()}
        adam_steps, history = saved["adam_steps"], saved["updates"]
        obs_stats = RunningMeanStd(**saved["obs_stats"])
        return_stats = RunningMeanStd(**saved["return_stats"])
    # Views from now on: change this vector in place, never `adam["weights"] = ...`.
    nn.utils.vector_to_parameters(adam["weights"], learned(agent))
    if saved and envs.replay(saved):  # the episodes that were running
        discounted_returns = saved["discounted_returns"].numpy()
    else:
        envs.reset(np.random.default_rng([args.seed, len(history)]))
        obs_stats.update(envs.obs)
    obs[-1] = normalize_obs(envs.obs, obs_stats, args)
    remaining = range(envs.global_step // args.batch_size + 1, args.num_iterations + 1)

    for iteration in (progress := tqdm(remaining, mininterval=1)):
        # --- Collect: T steps in each of the N environments, with the weights held fixed ---
        start_time = time.perf_counter()
        rng = np.random.default_rng([args.seed, iteration])
        frac = 1 - (iteration - 1) / args.num_iterations  # 1 in the first one, 1/U in the last
        if args.anneal_log_std:
            first, last = args.anneal_log_std
            # Extra: log std annealed instead of learned (anneal_log_std) [paper, Table 4]
            # How far to explore follows a plan; gradients may narrow it too early, or never.
            agent.log_std.fill_(last + (first - last) * frac)
        act = actor(agent, low, high)
        noise = rng.standard_normal(actions.shape, dtype=np.float32)
        first_episode = len(envs.episodes)
        obs[0] = obs[-1]  # where the last rollout ended
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # More environments vary a batch; rollouts go on where the last ended, in mid-episode too.
        for t in range(args.num_steps):
            actions[t], env_actions = act(obs[t], noise[t])  # a sample: mean + std * noise
            rewards[t], terminated[t], truncated[t] = envs.step(env_actions, rng)
            obs_stats.update(envs.obs)
            # Where an episode has ended, this is the first observation of the next one.
            obs[t + 1] = normalize_obs(envs.obs, obs_stats, args)
            if truncated[t].any():
                final_obs[t] = normalize_obs(envs.final_obs, obs_stats, args)
            if not math.isfinite(envs.obs.sum() + envs.final_obs.sum()):
                raise ValueError(f"An observation is NaN or infinite at step {envs.global_step}.")
        rollout_time = time.perf_counter()

        # --- Advantages: the rollout as tensors (T, N, ...), values of it, then GAE ---
        # Deviation: time limits are not failures (not truncation_is_terminal)
        # What a limit cuts off had a future, worth the value of its last observation; ppo2 says 0.
        if args.truncation_is_terminal:
            terminated |= truncated
        done = terminated | truncated
        scaled_rewards = scale_rewards(rewards, done, discounted_returns, return_stats, args)
        with torch.no_grad():
            b_obs, b_final_obs, b_actions, b_rewards, b_terminated, b_done = (
                torch.tensor(x, dtype=torch.float32, device=device)
                for x in (obs, final_obs[truncated], actions, scaled_rewards, terminated, done)
            )
            logprobs, _, values = agent.evaluate_actions(b_obs[:-1], b_actions)  # (T, N)
            # Where an episode ended, values[t + 1] belongs to the next one: `gae` masks it by
            # `terminated`, and after a time limit the value of the final observation replaces it.
            next_values = torch.cat([values[1:], agent.get_value(b_obs[-1:])])
            next_values[truncated] = agent.get_value(b_final_obs)
            advantages, returns = gae(
                b_rewards, values, next_values, b_terminated, b_done, args.gamma, args.gae_lambda
            )
        check_actor(logprobs, noise, agent)

        # --- Update: K epochs of minibatches ---
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps find the way; small ones at the end settle what noise would undo.
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        if args.adapt_lr_kl < math.inf and history:
            rate, kl = history[-1]["charts/learning_rate"], history[-1]["kl/after"]
            # Extra: learning rate adapted to the KL (adapt_lr_kl) [paper, Table 4]
            # A step size is right if it moves the policy as far as desired, whatever the task.
            learning_rate = adapt_learning_rate(rate, kl, args.adapt_lr_kl)
        # Extra: clip range annealing (clip_coef, anneal_clip) [ppo2/ppo2.py L137]
        # The policy may move less and less, as the annealed step size lets it.
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1.0)
        # What changes during a run: the numbers in `args` are constants of the compiled update.
        scheduled = {"learning_rate": learning_rate, "clip_coef": clip_coef}
        schedule = {name: torch.tensor(x, device=device) for name, x in scheduled.items()}
        batch = (b_obs[:-1], b_actions, logprobs, values, advantages, returns)
        batch = [x.flatten(0, 1) for x in batch]  # (T*N, ...)
        mb_metrics = []
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(args.batch_size), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more from a batch than one; shuffling makes each a fair sample.
            for mb in order.split(args.minibatch_size):
                adam_steps += 1
                correction = torch.tensor(bias_correction(adam_steps), device=device)
                schedule["bias_correction"] = correction
                mb_metrics.append(update(agent, adam, batch, mb, schedule, args))
            epoch_kl = means(mb_metrics[-args.num_minibatches :])["losses/approx_kl"]
            # Extra: early stopping (early_stop_kl) [Spinning Up: each step, at 1.5 times a target]
            # Clipping does not hold a policy that has left already: stopping does.
            if epoch_kl > args.early_stop_kl:
                break
        with torch.no_grad():
            new_logprobs, *_ = agent.evaluate_actions(b_obs[:-1], b_actions)
        metrics = means(mb_metrics) | {f"charts/{name}": x for name, x in scheduled.items()}
        update_time = time.perf_counter()

        # --- Log and save ---
        came = outcomes(b_rewards, next_values, b_terminated, b_done, args.gamma)
        metrics |= means([compare(new_logprobs - logprobs, advantages, values, came)])
        metrics |= {
            "kl/after": approx_kl(new_logprobs - logprobs).item(),
            "losses/explained_variance": (1 - (returns - values).var() / returns.var()).item(),
            "check/first_kl": mb_metrics[0]["losses/approx_kl"].item(),  # ratios are 1 there
            "advantages/std": advantages.std(correction=0).item(),
            "charts/epochs": len(mb_metrics) // args.num_minibatches,
            "charts/SPS": args.batch_size / (update_time - start_time),
            "charts/SPS_rollout": args.batch_size / (rollout_time - start_time),
            "charts/SPS_update": args.batch_size / (update_time - rollout_time),
        }
        if hasattr(agent, "log_std"):  # another distribution may have none
            metrics["policy/log_std"] = agent.log_std.mean().item()
        history.append({"global_step": envs.global_step, **metrics})
        warn(history)
        log(writer, history[-1], envs.episodes[first_episode:])
        recent = [episode["return"] for episode in envs.episodes[-100:]] or [math.nan]
        progress.set_postfix_str(f"return {np.mean(recent):.1f}", refresh=False)
        if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
            state = {"agent": agent.state_dict(), "adam": adam, "adam_steps": adam_steps}
            state |= {"env_name": envs.name, "updates": history, **envs.state()}
            arrays = {"low": low, "high": high, "discounted_returns": discounted_returns}
            state |= {name: torch.tensor(x) for name, x in arrays.items()}
            state |= {"obs_stats": obs_stats.state(), "return_stats": return_stats.state()}
            save_checkpoint(run_dir, args, state)
    writer.close()
    results = {"agent": agent, "episodes": envs.episodes, "updates": history}
    return {**results, "args": args, "run_dir": run_dir}


# === The algorithm ends here ===
# Below: environments whose running episodes can be played again, the folder of a run and its
# checkpoints, the compiled update, warnings, the use of a trained policy, the command line.

SCRIPT = Path(__file__).stem

# Metric, its lowest and highest healthy value, patience in iterations, what to do.
HEALTH = [
    ("losses/approx_kl", 0, 0.05, 1, "Too far: lower --learning-rate; check ratio and clipping."),
    ("losses/clipfrac", 0, 0.5, 1, "Half of the ratios are clipped: lower --learning-rate."),
    ("losses/value_clipfrac", 0, 0.8, 20, "Values are held: scale rewards or --no-clip-vloss."),
    ("check/first_kl", -1, 1e-3, 1, "Ratios differ from 1 before any step: check the batch."),
    ("check/values", 0.25, 1, 20, "Values explain little: check shapes, scale rewards."),
    ("check/value_bias", -1, 0.6, 10, "Values are far off what came: check V at episode ends."),
    ("check/advantages", 0.25, 1, 10, "Advantages do not fit later rewards: check GAE, V(s')."),
    ("check/update", 0.02, 1, 8, "Good actions got no likelier: check signs, reshapes."),
    ("losses/grad_norm", 0, 100, 1, "Exploding: lower --learning-rate; is the ratio always 1?"),
    ("advantages/std", 1e-6, math.inf, 1, "All advantages are equal: check the rewards."),
    ("policy/log_std", -4, math.inf, 1, "Exploration has ended: raise --ent-coef."),
]


def make_env(args: Args, env_factory: Callable[[], gym.Env] | None = None) -> gym.Env:
    """Make one environment; raise ValueError if its spaces are not as the top of the file says."""
    warnings.filterwarnings("ignore", message=".*is out of date")  # papers have -v4, not -v5
    if env_factory:
        env = gym.wrappers.PassiveEnvChecker(env_factory())  # says what a first episode does wrong
    else:
        with contextlib.suppress(ImportError):  # its remark on the model files is not for us
            import mujoco

            mujoco.set_mju_user_warning(lambda text: "settotalmass" in text or print(text))
        if args.capture_video and sys.platform == "linux":
            os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
        options = {"render_mode": "rgb_array"} if args.evaluate and args.capture_video else {}
        env = gym.make(args.env_id, **options)
        if options and hasattr(env.unwrapped, "mujoco_renderer") and env.unwrapped.model.ncam:
            env.unwrapped.mujoco_renderer.camera_id = 0  # follows the body; Gymnasium's stays
    actions, observations = env.action_space, env.observation_space
    is_vector = actions.dtype in (np.float32, np.float64) and len(actions.shape) == 1
    if not is_vector or not observations.is_np_flattenable:
        raise ValueError(f"{env.unwrapped} has {actions} and {observations}: no vectors of floats.")
    if isinstance(observations, gym.spaces.Box) and len(observations.shape) == 1:
        return env
    return gym.wrappers.FlattenObservation(env)


class Environments:
    """N environments stepped in turn; where an episode ends, the next begins in the same step.

    An episode is its seed and its actions. Both are kept while it runs: a resumed run plays them
    again and is where it was, whatever the simulator.
    """

    def __init__(self, envs: list[gym.Env]) -> None:
        self.envs = envs
        self.name = envs[0].spec.id if envs[0].spec else type(envs[0].unwrapped).__name__
        self.obs = np.zeros((len(envs), *envs[0].observation_space.shape))  # (N, D)
        self.final_obs = self.obs.copy()  # where an episode has just ended
        self.running: list[dict[str, Any]] = [{} for _ in envs]
        self.episodes: list[dict[str, Any]] = []  # the finished ones
        self.global_step = 0

    def begin(self, i: int, seed: int) -> None:
        """Begin an episode in environment i."""
        self.running[i] = {"seed": seed, "actions": [], "return": 0.0}
        self.obs[i], _ = self.envs[i].reset(seed=seed)

    def advance(self, i: int, action: np.ndarray) -> tuple[float, bool, bool]:
        """Take one step in environment i; return its reward, terminated, truncated."""
        self.obs[i], reward, terminated, truncated, _ = self.envs[i].step(action)
        reward = reward.item() if isinstance(reward, np.ndarray) else float(reward)
        self.running[i]["actions"].append(action)
        self.running[i]["return"] += reward
        return reward, terminated, truncated

    def reset(self, rng: np.random.Generator) -> None:
        """Begin an episode in each environment."""
        for i in range(len(self.envs)):
            self.begin(i, rng.integers(2**31).item())

    def step(self, actions: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Take one step; begin new episodes where some end. `actions` (N, A) must not change later.

        Returns rewards, terminated, truncated (N,). In `obs` is then the first observation of a new
        episode where one has begun, and in `final_obs` the last one of the old.
        """
        self.global_step += len(self.envs)
        rewards, (terminated, truncated) = np.zeros(len(actions)), np.zeros((2, len(actions)), bool)
        for i, action in enumerate(actions):
            rewards[i], terminated[i], truncated[i] = self.advance(i, action)
            if terminated[i] or truncated[i]:
                running = self.running[i]
                episode = {"return": running["return"], "length": len(running["actions"])}
                self.episodes.append({"global_step": self.global_step, **episode})
                self.final_obs[i] = self.obs[i]
                self.begin(i, rng.integers(2**31).item())
        return rewards, terminated, truncated

    def state(self) -> dict[str, Any]:
        """The running episodes, for `replay`, and the finished ones."""
        running = [{**x, "actions": torch.tensor(np.array(x["actions"]))} for x in self.running]
        state = {"running": running, "obs": torch.tensor(self.obs)}
        return {**state, "episodes": self.episodes, "global_step": self.global_step}

    def replay(self, state: dict[str, Any]) -> bool:
        """Play the running episodes of `state` again; return whether they came out the same."""
        self.episodes, self.global_step = state["episodes"], state["global_step"]
        for i, running in enumerate(state["running"]):
            self.begin(i, running["seed"])
            for action in running["actions"].numpy():
                self.advance(i, action)
        same = np.array_equal(self.obs, state["obs"].numpy())
        if not same:
            print("The environments do not repeat themselves: new episodes begin.")
        return same


def in_numpy(network: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The network for a few rows (N, in): tanh layers in NumPy, fast; other layers as they are."""
    kinds = [type(layer) for layer in network] if type(network) is nn.Sequential else []
    plain = kinds == [nn.Linear, *[nn.Tanh, nn.Linear] * (len(kinds) // 2)]
    if not plain or any(layer.bias is None for layer in network[::2]):
        device = next(network.parameters()).device
        return torch.no_grad()(lambda x: network(torch.tensor(x, device=device)).numpy(force=True))
    layers = [(x.weight.numpy(force=True).T, x.bias.numpy(force=True)) for x in network[::2]]

    def forward(x: np.ndarray) -> np.ndarray:
        for weight, bias in layers[:-1]:
            x = np.tanh(x @ weight + bias)
        weight, bias = layers[-1]
        return x @ weight + bias

    return forward


def check_actor(logprobs: Tensor, noise: np.ndarray, agent: Agent) -> None:
    """Raise ValueError where what acted is not the policy that learns: ratios would not show it.

    It drew mean + std * noise, so the agent's `logprobs` (T, N) must be those of the noise.
    """
    drawn = Normal(0.0, 1.0).log_prob(torch.tensor(noise)) - agent.log_std.cpu()
    if (logprobs.cpu() - drawn.sum(-1)).abs().max() > 0.05:
        raise ValueError("Make `actor`, `evaluate_actions`, `check_actor` agree (or it diverged).")


def outcomes(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float
) -> Tensor:
    """What came of each step: the discounted rewards until its episode ended, (T, N) like all.

    V stands for what a time limit or the end of the rollout cuts off. Shares no line with `gae`.
    """
    columns = []
    for steps in torch.stack([rewards, next_values * (1 - terminated), done], dim=-1).unbind(1):
        came: list[float] = []  # plain numbers, of which a loop is much faster
        for reward, rest, ended in reversed(steps.tolist()):
            came.append(reward + gamma * (rest if ended or not came else came[-1]))
        columns.append(came[::-1])
    return torch.tensor(columns).T.to(rewards)


def compare(logratio: Tensor, advantages: Tensor, values: Tensor, came: Tensor) -> Tensors:
    """Metrics of values, advantages and the policy's update beside what `came`, all (T, N).

    `logratio` is that of the whole update; it may be of the first environments only.
    """
    errors, targets = values - came, values + advantages
    rewarded = advantages[:, : logratio.shape[1]]
    # Explained variance; what varies by less than a tenth of its size need not be explained.
    variance = targets.var() + 0.01 * targets.square().mean() + 1e-8
    return {
        "check/values": 1 - advantages.var() / variance,
        "check/value_bias": errors.mean() / (came.square().mean().sqrt() + 1e-8),
        "check/advantages": (normalize(advantages) * normalize(-errors)).mean(),
        "check/update": (normalize(logratio) * normalize(rewarded)).mean(),
    }


def warn(history: list[dict[str, float]]) -> None:
    """Print what to do where a metric has just become unhealthy for `patience` iterations."""
    for name, low, high, patience, sentence in HEALTH:
        values = [x.get(name, math.nan) for x in history[-patience - 1 :]]
        bad = [value < low or value > high for value in values]  # not where it is NaN
        if sum(bad) == patience and all(bad[-patience:]):  # for just so long: say it once
            tqdm.write(f"Warning: {name} is {history[-1][name]:.3g}. {sentence}")


def log(writer: SummaryWriter, metrics: dict[str, float], ended: list[dict[str, Any]]) -> None:
    """Write the metrics of an iteration, and the means of the episodes that ended in it."""
    if ended:
        means = {x: np.mean([episode[x] for episode in ended]) for x in ("return", "length")}
        metrics = metrics | {f"charts/episodic_{name}": x for name, x in means.items()}
    for name, value in metrics.items():
        writer.add_scalar(name, value, metrics["global_step"])


def learned(agent: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn; a frozen part of the agent has requires_grad = False."""
    return [x for x in agent.parameters() if x.requires_grad]


def step_taken(update: Callable, agent: nn.Module, adam: Tensors, *rest: Any) -> Tensor:
    """The change of the weights, one vector, by an update of copies."""
    agent, adam = copy.deepcopy(agent), {name: x.clone() for name, x in adam.items()}
    before = adam["weights"].clone()
    nn.utils.vector_to_parameters(adam["weights"], learned(agent))
    update(agent, adam, *rest)
    return adam["weights"] - before


def compiled(function: Callable, effect: Callable) -> Callable:
    """Compile `function` into one graph when it is first called; where that fails, go on without.

    The first call is checked: `effect(function, *args)`, a tensor, is to be the same of both. What
    the graph took for a constant, as the numbers in `args`, and finds changed later is named.
    """
    torch.compiler.reset()  # an earlier run in this process may have had other settings
    torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.trace_autograd_ops = True  # keeps torch.autograd.grad in the graph
    torch._inductor.config.cpp.vec_isa_ok = True  # believe the processor; trying it takes 10 s
    # Those that tell what changed; all 280 would take a fifth of an update.
    guards = {"TENSOR_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "SEQUENCE_LENGTH", "DICT_LENGTH"}
    options = {"guard_filter_fn": lambda found: [x.guard_type in guards for x in found]}
    options |= {"size_asserts": False, "cpp_wrapper": not torch.cuda.is_available()}
    fastest, checked = torch.compile(function, fullgraph=True, options=options), False

    def call(*args: Any) -> Any:
        nonlocal fastest, checked
        try:
            if not checked:
                tqdm.write("Compiling the update, which takes some 20 seconds the first time.")
                expected, found = effect(function, *args), effect(fastest, *args)
                if not (found - expected).norm() <= 0.01 * expected.norm():  # NaN is no match
                    raise ValueError("compiled it computes something else")
                checked = True
            return fastest(*args)
        except Exception as error:  # whatever a compiler can raise; the agent is as it was
            if fastest is function:
                raise
            constant = re.search(r"- \d+/\d+: (.+?) +#", str(error))
            if constant:
                reason = f"it was compiled for {constant[1]}; what changes goes into `schedule`"
            else:
                reason = " ".join(str(error).split())[:300]
            tqdm.write(f"Warning: from now on the update is not compiled, slower: {reason}")
            fastest, checked = function, True
            return function(*args)

    return call


def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over minibatches; raise ValueError if one is not finite."""
    metrics = {name: torch.stack([row[name] for row in rows]).mean().item() for name in rows[0]}
    if not all(map(math.isfinite, metrics.values())):
        raise ValueError(f"Rewards or losses are NaN or infinite: {metrics}")
    return metrics


def details(args: Args) -> str:
    """The implementation details with the settings in force here and their lines, as Markdown."""
    tag = re.compile(r" *# (?:Detail )?(\w+/\d+|Extra|Deviation): ([^([]+)(?:\((.*?)\))?")
    table = ["| detail | name | in force | line |", "|---|---|---|--:|"]
    for line, text in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1):
        if match := tag.match(text):
            settings, off = [], False
            for sign, name in re.findall(r"(not )?(\w+)", match[3] or ""):
                value = getattr(args, name, "no setting")  # as in a copy that has dropped it
                off |= (value is False or value in (None, math.inf, "none")) != bool(sign)
                settings.append(f"{name}={value}")
            in_force = ("off: " if off else "") + ", ".join(settings) or "on"
            table.append(f"| {match[1]} | {match[2].strip()} | {in_force} | {line} |")
    return "\n".join(table)


def open_run(
    args: Args, env_name: str, fixed: list[str]
) -> tuple[Path, dict[str, Any], SummaryWriter]:
    """Folder, checkpoint ({} for a new run) and log; `fixed` are settings that must not change."""
    began = f"{time.time_ns() // 10**6}-{os.getpid()}"
    name = f"{env_name.replace('/', '-')}__{SCRIPT}__{args.seed}__{began}"
    run_dir = Path(args.resume or f"runs/{args.run_name or name}")
    saved = load_checkpoint(run_dir) if args.resume else {}
    if not saved and (run_dir / "checkpoint.pt").exists():
        raise ValueError(f"{run_dir} holds a run: add --resume {run_dir}, or another --run-name.")
    changed = [name for name in fixed if saved and saved["args"].get(name) != getattr(args, name)]
    if changed or saved.get("env_name", env_name) != env_name:
        raise ValueError(f"A resumed run cannot change {', '.join(changed) or 'its environment'}.")
    print(f"Logs and checkpoints: {run_dir}")
    config = dataclasses.asdict(args)
    if args.track:
        import wandb

        try:
            wandb.init(id=run_dir.name, resume="allow", config=config, sync_tensorboard=True)
        except wandb.Error as error:
            raise ValueError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error
    # What a killed run has logged after its last checkpoint is hidden.
    writer = SummaryWriter(str(run_dir), purge_step=saved.get("global_step", 0) + 1)
    writer.add_text("settings", "  \n".join(f"{name}: {config[name]}" for name in config))
    writer.add_text("details", details(args))
    return run_dir, saved, writer


def save_checkpoint(run_dir: Path, args: Args, state: dict[str, Any]) -> None:
    """Write tensors and plain values into a file that is the old or the new one, never half."""
    temporary = run_dir / "checkpoint.tmp"
    torch.save({"script": SCRIPT, "args": dataclasses.asdict(args), **state}, temporary)
    os.replace(temporary, run_dir / "checkpoint.pt")


def load_checkpoint(run_dir: str | Path) -> dict[str, Any]:
    """Read the checkpoint in a folder, running no code; raise ValueError if it is not sound."""
    path = Path(run_dir) / "checkpoint.pt"
    if not path.exists():
        raise ValueError(f"There is no {path}: the folder is another, or its run ended too early.")
    try:
        with zipfile.ZipFile(path) as file:
            sound = file.testzip() is None  # torch.load does not look at the checksums
        content = torch.load(path, map_location="cpu", weights_only=True) if sound else {}
    except Exception:  # whatever a foreign or damaged file can raise
        content = {}
    if not isinstance(content, dict) or "script" not in content:
        raise ValueError(f"{path} is damaged, or no checkpoint of a script like this one.")
    # A renamed copy of the script is welcome; another algorithm has other settings.
    if unknown := content["args"].keys() - {x.name for x in dataclasses.fields(Args)}:
        made = f"{path} was made by {content['script']}.py"
        raise ValueError(f"{made}, whose setting {min(unknown)} {SCRIPT}.py does not have.")
    return content


def load_weights(agent: nn.Module, saved: dict[str, Any]) -> None:
    """Load parameters and buffers; raise ValueError if they are those of another network."""
    try:
        agent.load_state_dict(saved["agent"])
    except RuntimeError as error:
        raise ValueError(f"{saved['script']}.py has saved another network: {error}") from error


def load_policy(run_dir: str | Path) -> Callable[..., np.ndarray]:
    """A trained policy: `policy(obs)` is the most likely action (A,), within the bounds.

    `obs` (D,) is as the environment gives it, flattened; it is normalized by the statistics of the
    end of training. `policy(obs, rng)` draws the action with the generator.
    """
    saved = load_checkpoint(run_dir)
    args, low, high = Args(**saved["args"]), saved["low"].numpy(), saved["high"].numpy()
    stats = RunningMeanStd(**saved["obs_stats"])
    agent = Agent(stats.mean.size, low.size, args)
    load_weights(agent, saved)
    act = actor(agent, low, high)

    def policy(obs: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
        noise = rng.standard_normal(low.size, dtype=np.float32) if rng else 0.0
        obs = normalize_obs(np.reshape(obs, (1, stats.mean.size)), stats, args)
        return act(obs.astype(np.float32), noise)[1][0]

    return policy


def evaluate(
    args: Args, env_factory: Callable[[], gym.Env] | None = None
) -> dict[str, dict[str, list]]:
    """Play episodes with a trained policy; print, save and return what they came to.

    Returns for each kind of action, "mean" and "sampled", the `returns`, `lengths` and, where the
    environment has an x_velocity, mean `speeds` of the episodes, and writes them into
    evaluation.json. An episode is cut off after 10,000 steps.
    """
    saved, policy, results = load_checkpoint(args.evaluate), load_policy(args.evaluate), {}
    names = {"evaluate", "eval_episodes", "capture_video", "seed"}
    given = {x.name for x in dataclasses.fields(Args) if getattr(args, x.name) != x.default}
    if ignored := given - names:
        print(f"Taken from the run, not from here: {', '.join(sorted(ignored))}")
    args = Args(**{**saved["args"], **{name: getattr(args, name) for name in names}})
    for kind in ("mean", "sampled"):
        env = gym.wrappers.TimeLimit(make_env(args, env_factory), 10_000)  # some never end
        if args.capture_video:
            films = {"episode_trigger": lambda k: k == 0, "name_prefix": kind}
            env = gym.wrappers.RecordVideo(env, f"{args.evaluate}/videos", **films)
        # No generator of training has a spawn key: [seed, 2**32] would be that of [seed, 0, 1].
        rng = np.random.default_rng(np.random.SeedSequence(args.seed, spawn_key=(1,)))
        episodes = []
        for _ in range(args.eval_episodes):
            obs, _ = env.reset(seed=rng.integers(2**31).item())
            rewards, speeds, ended = [], [], False
            while not ended:
                action = policy(obs, rng if kind == "sampled" else None)
                obs, reward, terminated, truncated, info = env.step(action)
                rewards.append(float(np.sum(reward)))  # of an array too
                speeds += [info["x_velocity"]] if "x_velocity" in info else []
                ended = terminated or truncated
            speed = {"speeds": float(np.mean(speeds))} if speeds else {}
            episodes.append({"returns": sum(rewards), "lengths": len(rewards), **speed})
        env.close()
        results[kind] = {name: [x[name] for x in episodes] for name in episodes[0]}
        said = [f"{name} {np.mean(x):.2f} ± {np.std(x):.2f}" for name, x in results[kind].items()]
        print(f"{kind} action: {', '.join(said)}")
    Path(args.evaluate, "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    """Read the command line and run; what is wrong with it ends as one sentence and exit code 2."""
    try:
        args = tyro.cli(Args)
        if args.resume and args.run_name:
            raise ValueError("--resume goes on in the folder of the run: leave out --run-name.")
        if args.resume:  # takes the settings of the run, except for flags that are given
            args = tyro.cli(Args, default=Args(**load_checkpoint(args.resume)["args"]))
        if args.details:
            print(details(args))
        elif args.evaluate:
            evaluate(args)
        else:
            results = train(args)
            recent = [episode["return"] for episode in results["episodes"][-100:]]
            mean = f"{np.mean(recent):.1f}" if recent else "unknown"
            print(f"Return {mean}, the mean of the last {len(recent)} episodes. Now:")
            run_dir = results["run_dir"]
            print(f"python {SCRIPT}.py --evaluate {run_dir}; tensorboard --logdir {run_dir}")
    except (ValueError, OSError, ImportError, gym.error.Error) as error:
        hint = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        place = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, ValueError) and not place.line.startswith("raise"):  # in changed code
            hint += f" ({place.filename}, line {place.lineno})"
        print(f"Error: {' '.join(str(error).split())}{hint}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("Stopped: --resume with the folder above goes on, if it has a checkpoint already.")
        sys.exit(130)


if __name__ == "__main__":
    main()
