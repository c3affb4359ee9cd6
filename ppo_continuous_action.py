# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock==4.2.12", "gymnasium[mujoco]==1.4.0", "moviepy==2.2.1", "mujoco==4.0.0",
#   "numpy==2.4.6", "pydantic==2.14.4", "tensorboard==2.21.0", "threadpoolctl==3.8.0",
#   "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for continuous actions, in one file.

    python ppo_continuous_action.py --env-id HalfCheetah-v4

`uv run` installs what it needs; without uv, `pip install` the packages named above.

The algorithm of Schulman et al. 2017 (arXiv 1707.06347) as OpenAI implemented it in ppo2 =
openai/baselines@ea25b9e8. It repeats three steps. Act with the policy for some time (rollout).
Compute the advantage of each action: how much more discounted reward followed than the value
function expected. Then make actions of positive advantage likelier, in several passes over these
samples; nothing is gained by changing a probability beyond a small factor (clipping).
`ppo_minimal.py` is the same algorithm in about 200 lines.

"The 37 Implementation Details of PPO" (Huang et al. 2022) numbers what it takes to reproduce ppo2.
Each detail is a comment above its statement: the settings concerned in parentheses, the place below
baselines/ in brackets, the reason in the next line; `--details` lists them. Here are 1-13 (core)
and 23-31 (continuous actions); 14-22 are in ppo_atari.py, 32-36 in ppo_atari_lstm.py, 37 in
ppo_multidiscrete.py.

Deviations from ppo2: after a time limit, the value of the final observation stands for the rewards
that were cut off (`--truncation-is-terminal` restores ppo2); rewards are scaled with the discount
`--gamma`, there always with 0.99; the logged KL is k3, not k2; orthogonal matrices come from a QR
decomposition, not an SVD (equal in distribution up to signs); each episode has a seed of its own;
NaN actions are not replaced by 0.
"""

import argparse
import dataclasses
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import filelock
import gymnasium as gym
import numpy as np
import pydantic
import threadpoolctl
import torch
import tyro
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Settings ===

Tensors = dict[str, Tensor]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
Steps = Annotated[float, pydantic.Field(ge=1, le=1e15), pydantic.AfterValidator(int)]  # also 1e6
StepSize = Annotated[NonNegativeFloat, tyro.conf.arg(aliases=["--lr"])]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Name = Annotated[str, pydantic.Field(pattern=r"^\w[\w.=+-]*$")]  # of a folder in runs/
Folder = Annotated[str, pydantic.Field(min_length=1)]


class UsageError(ValueError):
    """Something that the user can mend; `main` prints it as one sentence."""


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args:
    # --- Environment ---
    env_id: str = "HalfCheetah-v4"  # Gymnasium environment; actions best within about [-1, 1]
    num_envs: PositiveInt = 1  # environments N, stepped in turn [ppo2, MuJoCo: 1; paper, Atari: 8]
    truncation_is_terminal: bool = False  # treat time limits as failures, as ppo2 does
    norm_obs: bool = True  # normalize observations by their running mean and standard deviation
    clip_obs: PositiveFloat = 10.0  # clip normalized observations to +-this [ppo2: 10; inf: off]
    scale_rewards: bool = True  # divide rewards by the running std of their discounted sum
    clip_reward: PositiveFloat = 10.0  # clip scaled rewards to +-this [ppo2: 10; inf: off]

    # --- Experiment ---
    seed: Seed = 1  # random seed of the whole run
    total_timesteps: Steps = 1_000_000  # steps of all environments together; annealing ends there
    run_name: Name | None = None  # folder below runs/; by default environment, script, seed, time
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    compile: bool = True  # compile the update if there is a C++ compiler
    track: bool = False  # send the logs to Weights & Biases too (WANDB_MODE=offline: to disk)
    checkpoint_interval: PositiveInt = 25  # iterations between two checkpoints
    resume: Folder | None = None  # continue the run in this folder, with its settings
    evaluate: Folder | None = None  # play episodes with the policy in this folder; no training
    eval_episodes: PositiveInt = 10  # number of episodes, with --evaluate
    capture_video: bool = False  # film the first episode, with --evaluate
    details: bool = False  # print the implementation details with their values, and exit

    # --- PPO ---
    num_steps: PositiveInt = 2048  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: PositiveInt = 32  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: PositiveInt = 10  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: StepSize = 3e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    anneal_lr: bool = True  # lower the step size linearly towards 0 [ppo2; paper: Atari only]
    adapt_lr_kl: PositiveFloat = math.inf  # target KL that adapts the step size [inf: off]
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon [ppo2: 1e-5]
    gamma: Fraction = 0.99  # discount factor [paper: 0.99]
    gae_lambda: Fraction = 0.95  # 0: one-step advantages; 1: full returns [paper: 0.95]
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: PositiveFloat = 0.2  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    anneal_clip: bool = False  # lower clip_coef linearly towards 0 [paper: Atari only; ppo2: off]
    clip_vloss: bool = True  # limit the change of values to clip_coef [ppo2; not in the paper]
    ent_coef: NonNegativeFloat = 0.0  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: NonNegativeFloat = 0.5  # weight of the value loss, half a square, c1 [ppo2: 0.5]
    max_grad_norm: PositiveFloat = 0.5  # largest norm of the whole gradient [ppo2: 0.5; inf: off]
    early_stop_kl: PositiveFloat = math.inf  # stop an update after an epoch of larger KL [inf: off]
    orthogonal_init: bool = True  # orthogonal, with small gains of the heads; off: PyTorch's own
    shared_network: bool = False  # policy and value function share a trunk [ppo2: not for MuJoCo]
    anneal_log_std: tuple[float, float] | None = None  # from, to; None: learned [paper: -0.7 -1.6]

    def __post_init__(self) -> None:
        batch = self.num_steps * self.num_envs
        if batch % self.num_minibatches or batch > self.total_timesteps:
            rule = "a multiple of num_minibatches, and not more than total_timesteps"
            raise ValueError(f"num_steps * num_envs, here {batch}, must be {rule}.")
        if self.adapt_lr_kl < math.inf and self.anneal_lr:
            raise ValueError("--adapt-lr-kl sets the step size too: add --no-anneal-lr.")
        if self.capture_video and not self.evaluate:
            raise ValueError("--capture-video films an evaluation: add --evaluate FOLDER.")


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
        return dist.log_prob(actions).sum(-1), dist.entropy().sum(-1), self.get_value(obs)


def actor(agent: Agent) -> tuple[Callable, Callable]:
    """Build the fast acting function, for training and deployment: the policy in NumPy.

    So the policy stands twice, here to act and in `Agent.evaluate_actions` to learn, because NumPy
    is five times as fast for a few rows. Another distribution must be written in both; the metric
    check/acting shows whether they agree.

    Returns `act(obs, noise)`, actions (N, A) of normalized obs (N, D) and standard normal noise
    (N, A), 0 for the most likely ones; and `log_prob(obs, noise)`, the log-probabilities of the
    same actions, for arrays of any number of leading dimensions.
    """
    mean, std = in_numpy(agent.policy), agent.log_std.exp().numpy(force=True)

    def act(obs: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
        # Detail 23/37: normal distribution [common/distributions.py L96-106]
        # Actions are drawn around the network's output: trying others finds better ones.
        return mean(obs) + std * noise

    def log_prob(obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        return -(0.5 * (noise**2 + math.log(2 * math.pi)) + np.log(std)).sum(-1)

    return act, log_prob


# === The math ===


def normalize_obs(obs: np.ndarray, stats: "RunningMeanStd", args: Args) -> np.ndarray:
    """Observations (N, D) in standard deviations from their running mean; updates nothing."""
    if not args.norm_obs:
        return obs
    # Detail 28/37: observation normalization (norm_obs) [common/vec_env/vec_normalize.py L36-42]
    # Angles, speeds and forces come in unlike units; networks learn best at mean 0 and std 1.
    obs = (obs - stats.mean) / np.sqrt(stats.var + 1e-8)
    # Detail 29/37: observation clipping (norm_obs, clip_obs) [common/vec_env/vec_normalize.py L39]
    # A rare outlier, or a number that hardly ever changed before, must not swamp all others.
    return np.minimum(np.maximum(obs, -args.clip_obs), args.clip_obs)


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, equations 11-16).

    Tensors are (T, N), time first: r_t, V(s_t), what the rest of the episode is worth after step t,
    and 1 where the episode ended with that step, for whatever reason.

    Returns advantages A_t and value targets A_t + V(s_t) (the lambda-return), both (T, N).
    """
    # Surprises: what a step brought beyond what was expected. A loop is fastest in NumPy.
    advantages = (rewards + gamma * next_values - values).cpu()
    sums, decays = advantages.numpy(), (gamma * gae_lambda * (1 - done)).numpy(force=True)
    for t in reversed(range(len(sums) - 1)):
        # Detail 5/37: generalized advantage estimation (gamma, gae_lambda) [ppo2/runner.py L50-65]
        # A surprise (delta) counts less the later it comes; higher lambda: less bias, more noise.
        sums[t] += decays[t] * sums[t + 1]
    advantages = advantages.to(values.device)
    return advantages, advantages + values


def normalize(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and std 1; population std (divisor n) as in ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


def approx_kl(logratio: Tensor) -> Tensor:
    """KL(old || new) from actions of the old policy, by k3 = mean(r - 1 - log r), r = new/old.

    Unbiased, and less noisy than k1 = mean(-log r) (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar.

    `logratio` is log pi_new(a|s) - log pi_old(a|s), of the shape of `advantages`.
    """
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples tell about policies near the old one only: what moves farther gains nothing.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


def value_loss(
    new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | Tensor
) -> Tensor:
    """Half the mean squared error of the values, a scalar (Stable-Baselines3 has no half)."""
    # Detail 9/37: value function loss clipping (clip_vloss, clip_coef) [ppo2/model.py L68-75]
    # One batch should not move values far. The range is absolute: it supposes scaled rewards.
    clipped_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    errors = torch.max((new_values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


def ppo_loss(
    agent: Agent, minibatch: list[Tensor], schedule: Tensors, args: Args
) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated for descent), and debug variables.

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
        "losses/approx_kl": approx_kl(logratio),
        "losses/clipfrac": ((logratio.exp() - 1).abs() > clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def ppo_update(
    agent: Agent,
    adam: Tensors,
    batch: list[Tensor],
    minibatches: list[Tensor],
    schedule: Tensors,
    args: Args,
) -> Tensors:
    """One step of Adam, in place, for each of the minibatches, rows (B,) of the batch (T*N, ...).

    Written out, in place of loss.backward() and optimizer.step(), so that several steps compile
    into one graph. `adam` has the vector of all weights, whose views are the agent's parameters,
    the averages of its gradient and of the square of that, and the number of steps. Returns the
    metrics, one number per minibatch.
    """
    rows = []
    for mb in minibatches:
        loss, metrics = ppo_loss(agent, [x[mb] for x in batch], schedule, args)
        gradients = torch.autograd.grad(loss, list(agent.parameters()))
        gradient = torch.cat([x.flatten() for x in gradients])
        metrics["losses/grad_norm"] = gradient.norm()
        # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
        # One odd minibatch must not throw the policy far; scaled as a whole, the direction is kept.
        gradient = gradient * (args.max_grad_norm / metrics["losses/grad_norm"]).clamp(max=1.0)
        step = adam["step"].add_(1)
        mean = adam["mean"].lerp_(gradient, 1 - 0.9)
        square = adam["square"].lerp_(gradient**2, 1 - 0.999)
        bias_correction = ((1 - 0.999**step).sqrt() / (1 - 0.9**step)).float()  # they begin at 0
        # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
        # Added to the root before the bias correction (PyTorch: after): early steps are smaller.
        direction = mean / (square.sqrt() + args.adam_eps)
        # Change it in place: a new tensor would not be the agent's weights.
        adam["weights"].sub_(schedule["learning_rate"] * bias_correction * direction)
        rows.append(metrics)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# === Training: collect, advantages, update, log ===


def train(
    args: Args, env_factory: Callable[[], gym.Env] | None = None, update: Callable = ppo_update
) -> dict[str, Any]:
    """Run PPO, in environments of `env_factory` if given; logs and checkpoints go below runs/.

    Returns `agent`; `episodes`, each {"global_step", "return", "length"}; `updates`, one dictionary
    of metrics per iteration; `args`; `run_dir`. Raises UsageError where something does not fit.
    """
    STOP.clear()  # of an earlier run in this process
    args, device = settings_of_run(args), choose_device(args)
    torch.manual_seed(args.seed)
    threadpoolctl.threadpool_limits(1)  # enough for networks of this size; large ones want more
    batch_size = args.num_steps * args.num_envs
    num_iterations = args.total_timesteps // batch_size

    # Environments, and the rollout (T, N, ...), whose last observation begins the next rollout.
    envs = [Replayable(make_env(args, env_factory)) for _ in range(args.num_envs)]
    low, high = envs[0].action_space.low[None], envs[0].action_space.high[None]
    announce_spaces(envs[0].env)
    raw_obs = np.zeros((args.num_envs, *envs[0].observation_space.shape))  # (N, D)
    raw_final_obs = raw_obs.copy()  # where an episode has just ended
    obs = np.zeros((args.num_steps + 1, *raw_obs.shape), dtype=np.float32)
    final_obs = np.zeros_like(obs[1:])  # where a time limit ended an episode
    actions = np.zeros((args.num_steps, args.num_envs, low.size), dtype=np.float32)
    rewards = np.zeros((args.num_steps, args.num_envs))
    terminated, truncated = np.zeros((2, *rewards.shape), dtype=bool)

    # What learns.
    sizes = (raw_obs.shape[1], low.size)
    agent = Agent(*sizes, args).to(device)
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    adam["step"] = torch.zeros((), dtype=torch.float64, device=device)
    update = compiled(update, device) if args.compile else update
    obs_stats = RunningMeanStd(np.zeros((1, sizes[0])), np.ones((1, sizes[0])))
    return_stats, discounted_returns = RunningMeanStd([0.0], [1.0]), np.zeros(args.num_envs)
    episodes: list[dict[str, float]] = []  # the finished ones
    history: list[dict[str, float]] = []  # metrics of each iteration
    warned: set[str] = set()  # those that the user has been told of

    # A new run begins an episode in each environment; a resumed one goes on where it was.
    run_dir, writer, saved = open_run(args, name_of(envs[0]))
    if saved:
        if saved["sizes"] != sizes:
            raise UsageError(f"{run_dir} was made in an environment with other spaces.")
        agent.load_state_dict(saved["agent"])
        adam = {name: x.to(device) for name, x in saved["adam"].items()}
        obs_stats = RunningMeanStd(**saved["obs_stats"])
        return_stats = RunningMeanStd(**saved["return_stats"])
        discounted_returns = saved["discounted_returns"].numpy()
        episodes, history = saved["episodes"], saved["updates"]
    rng = np.random.default_rng([args.seed, len(history)])
    if not (saved and replay(envs, saved, raw_obs)):
        for i, env in enumerate(envs):
            raw_obs[i] = env.begin(rng.integers(2**31).item())
        obs_stats.update(raw_obs)
        discounted_returns[:] = 0.0
    obs[-1] = normalize_obs(raw_obs, obs_stats, args)
    # From now on the parameters are views of this vector, which is changed in place only.
    nn.utils.vector_to_parameters(adam["weights"], agent.parameters())

    for iteration in (progress := tqdm(range(len(history) + 1, num_iterations + 1), mininterval=1)):
        # --- Collect: T steps in each of the N environments, with the weights held fixed ---
        start_time, global_step = time.perf_counter(), (iteration - 1) * batch_size
        rng = np.random.default_rng([args.seed, iteration])
        frac = 1 - (iteration - 1) / num_iterations  # 1 in the first iteration, 1/U in the last
        if args.anneal_log_std:
            first, last = args.anneal_log_std
            # Extra: log std annealed instead of learned (anneal_log_std) [paper, Table 4]
            # How far to explore follows a plan; gradients may narrow it too early, or never.
            agent.log_std.fill_(last + (first - last) * frac)
        act, acting_log_prob = actor(agent)
        noise = rng.standard_normal(actions.shape, dtype=np.float32)
        obs[0] = obs[-1]  # where the last rollout ended
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # More environments vary a batch; rollouts go on where the last ended, in mid-episode too.
        for t in range(args.num_steps):
            global_step += args.num_envs
            actions[t] = act(obs[t], noise[t])
            # Detail 27/37: action clipping and storage [common/wrappers.py L21-26]
            # The environment gets the clipped action, the batch the drawn one, which has a density.
            clipped_actions = np.minimum(np.maximum(actions[t], low), high)  # np.clip is slower
            for i, (env, action) in enumerate(zip(envs, clipped_actions)):
                raw_obs[i], rewards[t, i], failed, cut_off, _ = env.step(action)
                terminated[t, i], truncated[t, i] = failed, cut_off
                if failed or cut_off:
                    ended = {"return": env.total, "length": len(env.actions)}
                    episodes.append({"global_step": global_step, **ended})
                    raw_final_obs[i] = raw_obs[i]
                    raw_obs[i] = env.begin(rng.integers(2**31).item())
            obs_stats.update(raw_obs)
            # Where an episode has ended, this is the first observation of the next one.
            obs[t + 1] = normalize_obs(raw_obs, obs_stats, args)
            if truncated[t].any():
                final_obs[t] = normalize_obs(raw_final_obs, obs_stats, args)

        # --- Advantages: the rollout as tensors (T, N, ...), values of it, then GAE ---
        # Deviation: time limits are not failures (not truncation_is_terminal)
        # What a limit cuts off had a future, worth the value of its last observation; ppo2 says 0.
        if args.truncation_is_terminal:
            terminated |= truncated
        done = terminated | truncated
        if args.scale_rewards:
            for t in range(args.num_steps):
                discounted_returns = args.gamma * discounted_returns + rewards[t]
                return_stats.update(discounted_returns)
                # Detail 30/37: reward scaling (scale_rewards) [vec_env/vec_normalize.py L26-33]
                # One learning rate then suits all tasks; less a mean, length would pay, or cost.
                rewards[t] /= np.sqrt(return_stats.var + 1e-8)
                discounted_returns[done[t]] = 0.0
            # Detail 31/37: reward clipping (scale_rewards, clip_reward) [vec_normalize.py L32]
            # One huge reward, early when the std is still small, must not ruin the values.
            np.clip(rewards, -args.clip_reward, args.clip_reward, out=rewards)
        with torch.no_grad():
            b_obs, b_final_obs, b_actions, b_rewards, b_done = (
                torch.tensor(x, dtype=torch.float32, device=device)
                for x in (obs, final_obs[truncated], actions, rewards, done)
            )
            logprobs, _, values = agent.evaluate_actions(b_obs[:-1], b_actions)  # (T, N)
            acting = torch.tensor(acting_log_prob(obs[:-1], noise), device=device)  # old weights
            # What follows a step is worth the value of the next observation. Where the episode
            # ended, that one belongs to another episode: after a time limit the value of the final
            # observation replaces it, and after a failure nothing follows.
            next_values = torch.cat([values[1:], agent.get_value(b_obs[-1:])])
            next_values[truncated] = agent.get_value(b_final_obs)
            next_values[terminated] = 0.0
            advantages, returns = gae(
                b_rewards, values, next_values, b_done, args.gamma, args.gae_lambda
            )

        # --- Update: K epochs of minibatches ---
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps find the way; small ones at the end settle what noise would undo.
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        if args.adapt_lr_kl < math.inf and history:
            rate, kl = history[-1]["charts/learning_rate"], history[-1]["check/kl_after"]
            # Extra: learning rate adapted to the KL (adapt_lr_kl) [paper, Table 4; rule of ACKTR]
            # A step size is right if it moves the policy as far as desired, whatever the task.
            factor = (kl < args.adapt_lr_kl / 2) - (kl > 2 * args.adapt_lr_kl)
            learning_rate = min(max(rate * 1.5**factor, 1e-5), 1e-2)
        # Extra: clip range annealing (clip_coef, anneal_clip) [ppo2/ppo2.py L137]
        # The policy may move less and less, as the annealed step size lets it.
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1.0)
        # What changes during a run: the numbers in `args` are constants of the compiled update.
        scheduled = {"learning_rate": learning_rate, "clip_coef": clip_coef}
        schedule = {name: torch.tensor(x, device=device) for name, x in scheduled.items()}
        batch = (b_obs[:-1], b_actions, logprobs, values, advantages, returns)
        batch = [x.flatten(0, 1) for x in batch]  # (T*N, ...)
        mb_metrics: list[Tensors] = []
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(batch_size), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more from a batch than one; shuffling makes each a fair sample.
            minibatches = order.split(batch_size // args.num_minibatches)  # four in a call: faster
            groups = [minibatches[i : i + 4] for i in range(0, args.num_minibatches, 4)]
            epoch = [update(agent, adam, batch, group, schedule, args) for group in groups]
            mb_metrics += epoch
            # Extra: early stopping (early_stop_kl) [Spinning Up: each step, at 1.5 times a target]
            # Clipping does not hold a policy that has left already: stopping does.
            if means(epoch)["losses/approx_kl"] > args.early_stop_kl:
                break

        # --- Log and save ---
        following = next_values.masked_fill(torch.tensor(terminated, device=device), 0.0)
        observed = observed_returns(b_rewards, following, b_done, args.gamma)
        with torch.no_grad():
            logratio = agent.evaluate_actions(b_obs[:-1], b_actions)[0] - logprobs
        metrics = means(mb_metrics) | means([diagnose(logratio, advantages, values, observed)])
        metrics |= {
            "losses/explained_variance": 1 - (advantages.var() / (returns.var() + 1e-8)).item(),
            "check/kl_after": approx_kl(logratio).item(),
            "check/acting": approx_kl(acting - logprobs).item(),
            "check/first_kl": mb_metrics[0]["losses/approx_kl"][0].item(),  # ratios are 1 there
            "charts/learning_rate": learning_rate,
            "charts/SPS": batch_size / (time.perf_counter() - start_time),
        }
        history.append({"global_step": global_step, **metrics})
        log(writer, history, episodes, progress, warned)
        stopping = STOP.is_set() or iteration == num_iterations
        if stopping or iteration % args.checkpoint_interval == 0:
            state = {"agent": agent.state_dict(), "sizes": sizes, "adam": adam}
            state |= {"obs_stats": obs_stats.state(), "return_stats": return_stats.state()}
            running = [(env.seed, torch.tensor(np.array(env.actions))) for env in envs]
            state |= {"running": running, "raw_obs": torch.tensor(raw_obs)}
            state |= {"discounted_returns": torch.tensor(discounted_returns)}
            state |= {"bounds": torch.tensor(np.concatenate([low, high]))}
            save_checkpoint(run_dir, args, state | {"episodes": episodes, "updates": history})
        if stopping:
            break
    writer.close()
    results = {"agent": agent, "episodes": episodes, "updates": history}
    return {**results, "args": args, "run_dir": run_dir}


# === The algorithm ends here ===
# Below: environments and how they are played again, what makes it fast (the policy in NumPy, the
# compiled update), metrics and warnings, logs and checkpoints, the use of a policy, `main`.

SCRIPT = Path(__file__).stem
STOP = threading.Event()  # set by Ctrl-C: finish the iteration, save, and end

# Metric, its lowest and highest healthy value, for how many iterations it must have been outside
# (0: one; shorter ones than 2,000 steps count less), whether only while return is lost, what to do.
HEALTH = [
    ("losses/approx_kl", 1e-12, 0.05, 10, True, "Updates are too large, or none: check --lr."),
    ("check/acting", -1, 1e-5, 0, False, "`actor` and `evaluate_actions` disagree: make them one."),
    ("check/value_bias", -math.inf, 0.6, 20, False, "Values exceed returns: check episode ends."),
    ("check/update", 0.02, 1, 10, True, "Good actions got no likelier: check signs and reshapes."),
]


def make_env(args: Args, env_factory: Callable[[], gym.Env] | None = None) -> gym.Env:
    """Make one environment, whose observations and actions are vectors of floats."""
    warnings.filterwarnings("ignore", message=".*is out of date")  # papers have -v4, not -v5
    film = {"render_mode": "rgb_array"} if args.capture_video else {}
    make = env_factory or (lambda: gym.make(args.env_id, disable_env_checker=True, **film))
    try:
        env = make()
    except TypeError as error:
        if "argument 'render_mode'" not in str(error):
            raise
        raise UsageError(f"{args.env_id} cannot be filmed: it takes no render_mode.") from error
    except gym.error.Error as error:
        raise UsageError(f"{error} (Atari games are played by ppo_atari.py.)") from error
    actions, obs = env.action_space, env.observation_space
    is_box = isinstance(actions, gym.spaces.Box) and actions.dtype.kind == "f"
    if not is_box or len(actions.shape) != 1 or not actions.shape[0]:
        raise UsageError(f"Actions are {actions}, not vectors of floats: try ppo_multidiscrete.py.")
    if not obs.is_np_flattenable:
        raise UsageError(f"Observations are {obs}, which cannot be made a vector of floats.")
    is_flat = isinstance(obs, gym.spaces.Box) and len(obs.shape) == 1
    return env if is_flat else gym.wrappers.FlattenObservation(env)


def announce_spaces(env: gym.Env) -> None:
    """Print what a user may not expect of actions and observations."""
    low, high = env.action_space.low, env.action_space.high
    if np.abs([low, high]).max() > 10:
        print(f"Actions reach from {low} to {high}, but the first ones are drawn with a std of 1.")
    given = env.env if isinstance(env, gym.wrappers.FlattenObservation) else env
    if len(shape := given.observation_space.shape or ()) > 1:
        print(f"Observations {shape} are flattened: the agent gets vectors.")


def name_of(env: gym.Env) -> str:
    """What a run in this environment is called."""
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    return re.sub(r"[^\w.=+-]", "-", name)


class Replayable(gym.Wrapper):
    """An environment that knows its running episode, which is a seed and actions.

    A resumed run plays these again and is where it was, whatever the simulator.
    """

    def begin(self, seed: int, actions: Iterable[np.ndarray] = ()) -> np.ndarray:
        """Begin an episode and take these actions; return the observation after them."""
        self.seed, self.actions, self.total = seed, [], 0.0
        obs, _ = self.env.reset(seed=seed)
        for action in actions:
            obs, *_ = self.step(action)
        return obs

    def step(self, action: np.ndarray) -> tuple:
        """Take one step, and remember its action."""
        self.actions.append(action.copy())  # some environments change it
        obs, reward, *rest = self.env.step(action)
        reward = reward.item() if isinstance(reward, np.ndarray) else float(reward)
        self.total += reward
        return obs, reward, *rest


def replay(envs: list[Replayable], saved: dict[str, Any], raw_obs: np.ndarray) -> bool:
    """Play the saved episodes again, up to `raw_obs` (N, D); return whether they are the same."""
    for i, (seed, actions) in enumerate(saved["running"]):
        raw_obs[i] = envs[i].begin(seed, actions.numpy())
    same = np.array_equal(raw_obs, saved["raw_obs"].numpy())
    if not same:
        print("The environments do not repeat themselves, so new episodes begin.")
    return same


class RunningMeanStd:
    """Mean and population variance of all rows so far [common/running_mean_std.py L5-33]."""

    def __init__(self, mean: Any, var: Any, count: float = 1e-4) -> None:
        self.mean, self.var, self.count = np.array(mean), np.array(var), count  # count: rows so far

    def update(self, x: np.ndarray) -> None:
        """Merge the rows of `x`, (rows, ...), with the formula of Chan et al. 1979."""
        # A reduction of one row would cost more than the rest of this function.
        one, along = len(x) == 1, {"axis": 0, "keepdims": True}
        x_mean, x_var = (x, 0.0) if one else (x.mean(**along), x.var(**along))
        self.count += len(x)
        delta, share = x_mean - self.mean, len(x) / self.count
        self.mean = self.mean + delta * share
        self.var = self.var + (x_var - self.var) * share + delta * delta * (share * (1 - share))

    def state(self) -> dict[str, Any]:
        """Plain numbers, from which the same statistics can be made again."""
        return {"mean": self.mean.tolist(), "var": self.var.tolist(), "count": self.count}


def in_numpy(network: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The network for a few rows (N, in): tanh layers in NumPy, fast; other layers as they are."""
    kinds = {type(x) for x in network} if isinstance(network, nn.Sequential) else set()
    if kinds != {nn.Linear, nn.Tanh} or any(len([*x.parameters()]) == 1 for x in network):
        device = next(network.parameters()).device
        return torch.no_grad()(lambda x: network(torch.tensor(x, device=device)).numpy(force=True))
    layers = [[w.numpy(force=True).T for w in x.parameters()] for x in network]  # [] of a tanh

    def forward(x: np.ndarray) -> np.ndarray:
        for layer in layers:
            x = x.dot(layer[0]) + layer[1] if layer else np.tanh(x)
        return x

    return forward


def compiled(function: Callable, device: torch.device) -> Callable:
    """Compile `function` when it is first called; fall back to eager if that fails."""
    torch.compiler.reset()  # an earlier run in this process may have had other settings
    torch._dynamo.config.trace_autograd_ops = True  # keeps torch.autograd.grad in the graph
    torch._inductor.config.cpp.vec_isa_ok = True  # believe the processor; trying it takes 10 s
    warnings.filterwarnings("ignore", module=r"torch\._inductor")  # its advice on GPUs
    options = {"cpp_wrapper": device.type == "cpu", "size_asserts": False}
    fast = torch.compile(function, options=options)

    def first_call(*args: Any) -> Any:
        nonlocal chosen
        tqdm.write("Compiling the update, which takes half a minute the first time.")
        chosen = fast
        try:
            return fast(*args)
        except Exception as error:  # whatever a compiler can raise, before anything has changed
            reason = " ".join(str(error).split())[:300]
            tqdm.write(f"Warning: the update is not compiled, and slower: {reason}")
            chosen = function
            return function(*args)

    chosen = first_call
    return lambda *args: chosen(*args)


# === Metrics, logs, checkpoints, flags: the same in all scripts for environments ===


def choose_device(args: Any) -> torch.device:
    """Where networks learn: the GPU if there is one and nothing else was asked for."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    return torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")


def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


def observed_returns(rewards: Tensor, next_values: Tensor, done: Tensor, gamma: float) -> Tensor:
    """The discounted rewards that followed each step until its episode ended, (T, N) like all.

    V stands for what a time limit or the end of the rollout cuts off. Shares no line with `gae`.
    """
    columns = []
    for steps in torch.stack([rewards, next_values, done], dim=-1).unbind(1):
        found: list[float] = []  # plain numbers, of which a loop is much faster
        for reward, rest, ended in reversed(steps.tolist()):
            found.append(reward + gamma * (rest if ended or not found else found[-1]))
        columns.append(found[::-1])
    return torch.tensor(columns).T.to(rewards)


def diagnose(logratio: Tensor, advantages: Tensor, values: Tensor, observed: Tensor) -> Tensors:
    """Metrics of the values beside the observed returns, and of the policy's update, all (T, N).

    `logratio` is that of the whole update; it may be of the first environments only.
    """
    targets, rewarded = values + advantages, advantages[:, : logratio.shape[1]]
    # Explained variance; what varies by less than a tenth of its size need not be explained.
    variance = targets.var() + 0.01 * targets.square().mean() + 1e-8
    return {
        "check/values": 1 - advantages.var() / variance,
        "check/value_bias": (values - observed).mean() / (observed.square().mean().sqrt() + 1e-8),
        "check/update": (normalize(logratio) * normalize(rewarded)).mean(),
    }


def return_lost(episodes: list[dict]) -> bool:
    """Whether the last twentieth of the episodes, 20 at least, lost a fifth of what was gained.

    The gain is from the first so many episodes to the best so many in a row.
    """
    count = max(20, len(episodes) // 20)
    sums = np.cumsum([0.0, *(x["return"] for x in episodes)])
    means = (sums[count:] - sums[:-count]) / count
    return len(means) > 0 and means[-1] < means[0] + 0.8 * (means.max() - means[0])


def unhealthy(history: list[dict], episodes: list[dict]) -> dict[str, str]:
    """What to do about each metric that has been unhealthy for as long as `HEALTH` says."""
    found, part = {}, min(history[0]["global_step"] / 2000, 1)  # what an iteration counts
    for name, low, high, patience, if_lost, advice in HEALTH:
        rows = history[-(count := max(math.ceil(patience / part), 1)) :]
        is_long = len(rows) == count and not any(low <= x[name] <= high for x in rows)
        if is_long and not (if_lost and not return_lost(episodes)):
            found[name] = advice
    return found


def log(writer: SummaryWriter, history: list, episodes: list, progress: tqdm, warned: set) -> None:
    """Write the newest metrics; warn of those that are unhealthy and not yet in `warned`."""
    metrics = dict(history[-1])
    now = metrics.pop("global_step")
    if bad := ", ".join(name for name, x in metrics.items() if not math.isfinite(x)):
        raise UsageError(f"Not finite at step {now}: {bad}. Check observations and rewards.")
    if recent := episodes[-100:]:
        for name in ("return", "length"):
            metrics[f"charts/episodic_{name}"] = np.mean([x[name] for x in recent]).item()
        progress.set_postfix_str(f"return {metrics['charts/episodic_return']:.1f}", refresh=False)
    for name, value in metrics.items():
        writer.add_scalar(name, value, now)
    for name, advice in unhealthy(history, episodes).items():
        if name not in warned:  # say it once
            warned.add(name)
            tqdm.write(f"Warning: {name} is {metrics[name]:.3g}. {advice}")


def details(args: Any) -> str:
    """The implementation details with their lines and the values of their settings."""
    tag = re.compile(r" *# (?:Detail )?(\d+/37|[A-Z]\d+|Extra|Deviation): ([^([]+)(?:\((.*?)\))?")
    rows = []
    for line, text in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1):
        if match := tag.match(text):
            names = re.findall(r"\w+", (match[3] or "").replace("not ", ""))
            settings = [f"{x}={getattr(args, x, 'no setting')}" for x in names]
            rows.append(f"{match[1]:9} line {line}: {match[2].strip()} {', '.join(settings)}")
    return "\n".join(rows)


def open_run(args: Args, env_name: str) -> tuple[Path, SummaryWriter, dict[str, Any] | None]:
    """The folder of a run, its log, and the checkpoint if it is resumed."""
    began = f"{env_name}__{SCRIPT}__{args.seed}__{time.time_ns()}"
    run_dir = Path(args.resume or f"runs/{args.run_name or began}")
    try:
        lock = filelock.FileLock(run_dir / "lock", is_singleton=True).acquire(blocking=False)
    except filelock.Timeout as error:
        raise UsageError(f"Another process is training in {run_dir}.") from error
    saved = load_checkpoint(run_dir)[2] if args.resume else None
    if not saved and (run_dir / "checkpoint.pt").exists():
        raise UsageError(f"{run_dir} holds a run: add --resume {run_dir}, or another --run-name.")
    if args.track:
        import wandb

        about = {"id": run_dir.name, "name": run_dir.name, "config": dataclasses.asdict(args)}
        try:
            wandb.init(**about, resume="allow", sync_tensorboard=True)
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error
    # What a killed run has logged after its last checkpoint is hidden.
    first_step = saved["updates"][-1]["global_step"] + 1 if saved else 0
    writer = SummaryWriter(str(run_dir), purge_step=first_step)
    writer.lock = lock  # released with it, or with the process
    writer.add_text("details", f"{args}\n\n{details(args)}".replace("\n", "  \n"))
    print(f"Logs and checkpoints: {run_dir}")
    return run_dir, writer, saved


def save_checkpoint(run_dir: Path, args: Any, state: dict[str, Any]) -> None:
    """Write tensors and plain values into a file that is the old or the new one, never half."""
    settings = {**dataclasses.asdict(args), "resume": None}
    try:
        torch.save({"args": settings, **state}, run_dir / "checkpoint.tmp")
        os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")
    except (OSError, RuntimeError) as error:  # torch has its own for a full disk
        raise UsageError(f"The checkpoint in {run_dir} stays the last one: {error}") from error


def load_checkpoint(run_dir: str | Path) -> tuple[Args, Agent, dict[str, Any]]:
    """The settings, the agent and all else that a run has saved; reading it runs no code."""
    path = Path(run_dir) / "checkpoint.pt"
    try:
        with zipfile.ZipFile(path) as file:
            if broken := file.testzip():  # torch.load does not look at the checksums
                raise ValueError(f"the checksum of {broken} is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        args = Args(**saved["args"])
        agent = Agent(*saved["sizes"], args)
        agent.load_state_dict(saved["agent"])
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UsageError(f"{path} is missing, damaged or of another script: {reason}") from error
    return args, agent, saved


def read_settings() -> Args:
    """The command line; with --resume and --evaluate, its defaults are the settings of the run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="folder")
    folder = parser.parse_known_args()[0].folder
    args = tyro.cli(Args, default=load_checkpoint(folder)[0] if folder else Args())
    kept = vars(settings_of_run(args))
    if other := [name for name, value in vars(args).items() if kept[name] != value]:
        raise UsageError(f"{folder} has its own {other[0]}: leave that flag out.")
    return args


def interrupt(*_: Any) -> None:
    """Answer Ctrl-C: finish and save this iteration; the next Ctrl-C stops at once."""
    STOP.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tqdm.write("Finishing this iteration and saving it; Ctrl-C again stops at once.")


# === The use of a policy, and `main` ===


def load_policy(
    run_dir: str | Path, env_factory: Callable[[], gym.Env] | None = None
) -> Callable[..., np.ndarray]:
    """A trained policy: `policy(obs)` is the most likely action (A,), within the bounds.

    `obs` is as the environment gives it. It is normalized by the statistics of the end of training.
    `policy(obs, rng)` draws the action with the generator. The environment is made once, to know
    its spaces: an `env_id` of the form module:Name imports that module.
    """
    args, agent, saved = load_checkpoint(run_dir)
    act, _ = actor(agent)
    stats, env = RunningMeanStd(**saved["obs_stats"]), make_env(args, env_factory)
    low, high = saved["bounds"].numpy()
    if (env.observation_space.shape[0], low.size) != saved["sizes"]:
        raise UsageError(f"{run_dir} was made in another environment: give its env_factory.")

    def policy(obs: Any, rng: np.random.Generator | None = None) -> np.ndarray:
        if getattr(obs, "shape", None) != env.observation_space.shape:  # it is not flat yet
            obs = env.observation(obs)
        obs = normalize_obs(np.reshape(obs, (1, -1)), stats, args).astype(np.float32)
        noise = rng.standard_normal(low.size, dtype=np.float32) if rng else 0.0
        return np.clip(act(obs, noise)[0], low, high)

    return policy


def evaluate(args: Args, env_factory: Callable[[], gym.Env] | None = None) -> list[float]:
    """Play episodes with the most likely actions of a trained policy; return their returns."""
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    args = settings_of_run(args)
    policy, env = load_policy(args.evaluate, env_factory), make_env(args, env_factory)
    if args.capture_video:
        print("Filming the first episode, which may take minutes.")
        warnings.filterwarnings("ignore", message=".*Overwriting existing videos")
        if hasattr(env.unwrapped, "mujoco_renderer") and env.unwrapped.model.ncam:
            env.unwrapped.mujoco_renderer.camera_id = 0  # follows the body
        env = gym.wrappers.RecordVideo(env, f"{args.evaluate}/videos", lambda k: k == 0)
    env, returns = Replayable(gym.wrappers.TimeLimit(env, 10_000)), []  # some never end
    for seed in range(args.eval_episodes):
        obs, terminated, truncated = env.begin(seed), False, False
        while not (terminated or truncated):
            obs, _, terminated, truncated, _ = env.step(policy(obs))
        returns.append(env.total)
    env.close()
    print(f"Return {np.mean(returns):.1f} ± {np.std(returns):.1f} in {len(returns)} episodes")
    return returns


def settings_of_run(args: Args) -> Args:
    """With --resume and --evaluate, the settings of that run but for a few; else those given."""
    if not (folder := args.resume or args.evaluate):
        return args
    free = ["device", "compile", "details"]
    free += ["resume", "total_timesteps", "checkpoint_interval", "track"] if args.resume else []
    free += ["evaluate", "eval_episodes", "capture_video"] if args.evaluate else []
    return dataclasses.replace(load_checkpoint(folder)[0], **{x: getattr(args, x) for x in free})


def main() -> None:
    """Read the command line and run; what a user can mend is one sentence and exit code 2."""
    os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")
    try:
        args = read_settings()
        if args.details:
            print(details(args))
        elif args.evaluate:
            evaluate(args)
        else:
            signal.signal(signal.SIGINT, interrupt)
            run_dir = train(args)["run_dir"]
            todo = f"{'--resume' if STOP.is_set() else '--evaluate'} {run_dir}"
            print(f"Now: python {SCRIPT}.py {todo}; or tensorboard --logdir {run_dir}")
    except KeyboardInterrupt:
        sys.exit(130)
    except (UsageError, OSError, ImportError, MemoryError, gym.error.Error) as error:
        hint = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"Error: {' '.join(str(error).split())}{hint}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
