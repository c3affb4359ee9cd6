# /// script
# requires-python = ">=3.11"
# dependencies = ["gymnasium[mujoco]==1.4.0", "moviepy==2.2.1", "mujoco==4.0.0", "numpy==2.4.6",
#   "tensorboard==2.21.0", "threadpoolctl==3.8.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17",
#   "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for discrete actions, in one file.

    python ppo_multidiscrete.py --env-id CartPole-v1 --total-timesteps 5e5
    python ppo_multidiscrete.py --env-id HalfCheetah-v4 --bins 11
    python ppo_multidiscrete.py --env-id Taxi-v4 --mask-invalid-actions --total-timesteps 100_352 \\
        --num-envs 8 --num-steps 128 --num-minibatches 4 --learning-rate 3e-3 --ent-coef 0.01

The policy is a categorical distribution for each component of the action. MultiDiscrete and
MultiBinary spaces have several components, and a Discrete one has a single component. A Box is cut
into bins along each dimension; for MuJoCo's joints, such a policy rivals a Gaussian one (Tang &
Agrawal 2020, arXiv 1901.10500). With k components of at most n choices, the network has k * n
logits, and masks exclude the unused ones. The policy, the masks in `train`, `Choices` and
`valid_choices` are new here. All else is ppo_continuous_action.py, which explains PPO.

The code follows OpenAI's ppo2 (openai/baselines@ea25b9e8) down to "The 37 Implementation Details of
PPO" (Huang et al. 2022). Each detail is a comment above its line, with its settings in parentheses,
its place in baselines/ in brackets, and its reason below. `--details` lists them. Details 14-22 are
in ppo_atari.py, 23-25 and 27 in ppo_continuous_action.py, and 32-36 in ppo_atari_lstm.py.

Differences from ppo2: time limits are not failures (unless `--truncation-is-terminal`); rewards are
scaled with `--gamma`, not always 0.99; the KL is logged as k3 (`approx_kl`), not k2; orthogonal
matrices come from a QR decomposition, not an SVD; each episode has its own seed; the defaults are
those for MuJoCo, also in classic control.
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
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Settings ===

HIDDEN = 64  # units in each hidden layer
STEPS_PER_CALL = 4  # Adam steps that are compiled into one graph, which is faster
SCRIPT = Path(globals().get("__file__", "notebook"))  # pasted into a notebook, it has no file
Tensors = dict[str, Tensor]
StepSize = Annotated[float, tyro.conf.arg(aliases=["--lr"])]


# Copied from ppo_continuous_action.py
class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


@dataclasses.dataclass(frozen=True)
class Args:
    # --- Environment ---
    env_id: str = "CartPole-v1"  # Gymnasium environment; the top of this file says which ones fit
    num_envs: int = 1  # environments N, stepped one after another [ppo2: 1; paper, Atari: 8]
    bins: int = 11  # choices in each dimension of Box actions [Tang & Agrawal 2020: 7 to 15]
    mask_invalid_actions: bool = False  # obey info["action_mask"] or env.action_masks()
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
    clip_coef: float = 0.2  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    clip_vloss: bool = True  # limit the change of values to clip_coef [ppo2; not in the paper]
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: float = 0.5  # weight of the value loss (half a squared error), c1 [ppo2: 0.5]
    max_grad_norm: float = 0.5  # maximum norm of the whole gradient [ppo2: 0.5; inf: off]
    early_stop_kl: float = math.inf  # stop the epochs of an update once the KL is larger [inf: off]

    def __post_init__(self) -> None:
        vars(self).update(plain(vars(self)))  # refuses what a checkpoint cannot hold
        counts = "num_envs num_steps num_minibatches update_epochs checkpoint_interval"
        sizes = "learning_rate adam_eps clip_obs clip_reward clip_coef vf_coef max_grad_norm"
        limits = dict.fromkeys(counts.split(), (1, math.inf))
        limits |= dict.fromkeys(sizes.split(), (0, math.inf))
        limits |= {"gamma": (0, 1), "gae_lambda": (0, 1), "seed": (0, 2**63 - 1)}
        limits |= {"bins": (2, math.inf)}
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
    """A categorical policy and a value function, each with two hidden layers of tanh units."""

    def __init__(self, obs_size: int, mask_shape: tuple[int, int]) -> None:
        super().__init__()
        self.mask_shape = mask_shape  # (k, n)

        def hidden() -> list[nn.Module]:
            first, second = (linear(x, HIDDEN, gain=2**0.5) for x in (obs_size, HIDDEN))
            return [first, nn.Tanh(), second, nn.Tanh()]

        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        # If layers are shared, both losses train them and compete. vf_coef then sets the balance.
        # Detail 26/37: separate networks [ppo2/defaults.py L12]
        # Sharing helps with images, whose features are costly to learn, but little with vectors.
        value, policy = hidden(), hidden()
        self.value = nn.Sequential(*value, linear(HIDDEN, 1, gain=1.0), nn.Flatten(-2))  # (...)
        self.policy = nn.Sequential(*policy, linear(HIDDEN, math.prod(mask_shape), gain=0.01))

    def evaluate_actions(
        self, obs: Tensor, masks: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values of obs (..., D), log-probabilities of actions (..., k), entropies, each (...).

        Choices have probability 0 where `masks` (..., k, n) is false.
        """
        logits = self.policy(obs).unflatten(-1, self.mask_shape)
        # Extra: invalid action masking (mask_invalid_actions) [Huang & Ontanon 2020]
        # Invalid choices get no probability, so the agent need not learn to avoid them.
        logits = torch.where(masks, logits, -1e8)  # -inf would make an invalid choice's ratio NaN
        dist = Categorical(logits=logits, validate_args=False)
        # Detail 37/37: independent action components [common/distributions.py L206-222]
        # One output for each choice is enough, instead of one for each combination of choices.
        logprobs, entropies = dist.log_prob(actions).sum(-1), dist.entropy().sum(-1)
        return self.value(obs), logprobs, entropies


def actor(agent: Agent) -> Callable[..., np.ndarray]:
    """The policy in NumPy, which is five times as fast as PyTorch for a few rows.

    Returns `scores(obs, masks)`: the logits (N, k, n) for normalized obs (N, D), minus infinity
    where masks (N, k, n) are false. If you change the distribution, change it here, in
    `Agent.evaluate_actions` and at `actor_logprobs`: "check/acting" shows whether they agree.
    """
    layers = [in_numpy(x) for x in agent.policy]

    def scores(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
        logits = obs
        for layer in layers:
            logits = layer(logits)
        return np.where(masks, logits.reshape(masks.shape), -np.inf)

    return scores


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


# Copied from ppo_continuous_action.py
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar."""
    ratio = logratio.exp()  # how much more likely the actions are than under the old policy
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples only tell us about policies close to the old one, so moving further earns nothing.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


# Copied from ppo_continuous_action.py
def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: Tensor | float) -> Tensor:
    """Half the mean squared error of the values, a scalar (Stable-Baselines3 has no half)."""
    # Detail 9/37: value function loss clipping (clip_vloss, clip_coef) [ppo2/model.py L68-75]
    # One batch should not move values far. The range is absolute, so it assumes scaled rewards.
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    errors = torch.max((values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


def ppo_loss(agent: Agent, minibatch: list[Tensor], args: Args) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated for descent), and debug variables."""
    obs, actions, old_logprobs, old_values, advantages, returns, masks = minibatch  # (B, ...)
    values, logprobs, entropies = agent.evaluate_actions(obs, masks, actions)
    logratio = logprobs - old_logprobs
    # Detail 7/37: advantage normalization (norm_adv) [ppo2/model.py L136-139]
    # The step then depends on which actions were better, not on the scale of rewards.
    advantages = normalize(advantages) if args.norm_adv else advantages
    pg_loss = policy_loss(logratio, advantages, args.clip_coef)
    v_clip = args.clip_coef if args.clip_vloss else math.inf
    v_loss = value_loss(values, old_values, returns, v_clip)
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
        "losses/clipfrac": ((logratio.exp() - 1).abs() > args.clip_coef).float().mean(),
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
    envs = make_envs(resources, args, args.num_envs, env_factory)
    if env_factory:
        args = dataclasses.replace(args, env_id=type(envs[0].unwrapped).__name__)
    exists = envs[0].get_wrapper_attr("exists")  # (k, n)
    sizes = (*envs[0].observation_space.shape, exists.shape)  # D and (k, n)
    raw_obs, raw_final_obs = np.zeros((2, args.num_envs, sizes[0]))  # now and before a reset
    # The last observation of a rollout is the first of the next one.
    obs = np.zeros((args.num_steps + 1, *raw_obs.shape), dtype=np.float32)
    final_obs = np.zeros_like(obs[1:])  # where a time limit ended an episode
    masks = np.full((args.num_steps + 1, args.num_envs, *exists.shape), exists)
    actions = np.zeros(masks[1:].shape[:-1], dtype=np.int64)
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
        start_time, rng = time.perf_counter(), np.random.default_rng([args.seed, iteration])
        num_before = len(episodes)
        remaining = 1 - (iteration - 1) / num_iterations  # falls from 1 to 1 / num_iterations
        scores = actor(agent)
        noise = rng.gumbel(size=masks[1:].shape).astype(np.float32)
        obs[0] = obs[-1]  # where the last rollout ended
        if args.mask_invalid_actions:
            masks[0] = [valid_choices(env) for env in envs]
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # Several environments make a batch more diverse. Each rollout continues the one before.
        for t in range(args.num_steps):
            global_step += args.num_envs
            # With Gumbel noise, the largest score is a sample of the softmax, as in ppo2
            # [common/distributions.py L199-201]. Sampling is how better actions are found.
            actions[t] = (scores(obs[t], masks[t]) + noise[t]).argmax(-1)
            for i, (env, step) in enumerate(zip(envs, step_all(envs, actions[t]))):
                raw_obs[i], rewards[t, i], terminated[t, i], truncated[t, i], _ = step
                if env.ended:
                    ended = {"return": env.total, "length": len(env.actions)}
                    episodes.append({"global_step": global_step, **ended})
                    raw_final_obs[i] = raw_obs[i]
                    raw_obs[i] = env.begin(rng.integers(2**31).item())
            obs_stats.update(raw_obs)
            # Where an episode has ended, these are the first observation and mask of the next one.
            obs[t + 1] = normalize_obs(raw_obs, obs_stats, args)
            if args.mask_invalid_actions:
                masks[t + 1] = [valid_choices(env) for env in envs]
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
            t_obs, t_final_obs, t_rewards, t_done = (
                torch.tensor(x, dtype=torch.float32, device=device)
                for x in (obs, final_obs[truncated], rewards, done)
            )
            t_scores, t_masks, t_actions = (
                torch.tensor(x, device=device)
                for x in (scores(obs[:-1], masks[:-1]), masks[:-1], actions)
            )
            taken = (t_obs[:-1], t_masks, t_actions)
            values, logprobs, _ = agent.evaluate_actions(*taken)  # (T, N)
            acted = Categorical(logits=t_scores, validate_args=False)  # `log` reports NaN
            actor_logprobs = acted.log_prob(t_actions).sum(-1)  # (T, N)
            # The value of the next observation predicts what follows a step. If the episode ended,
            # that observation belongs to the next episode. After a time limit, the value of the
            # final observation replaces it. After a failure, nothing follows.
            next_values = torch.cat([values[1:], agent.value(t_obs[-1:])])
            next_values[truncated] = agent.value(t_final_obs)
            next_values[terminated] = 0.0
            advantages = gae(t_rewards, values, next_values, t_done, args)
            returns = advantages + values  # targets for the values
        batch = (t_obs[:-1], t_actions, logprobs, values, advantages, returns, t_masks)

        # --- Update: K epochs of minibatches ---
        # Copied from ppo_continuous_action.py
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps make progress; small ones at the end average out noise.
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1.0)
        tensors["learning_rate"].fill_(learning_rate)  # other floats can be annealed like this
        batch = [x.flatten(0, 1) for x in batch]  # (T*N, ...)
        mb_metrics: list[Tensors] = []
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(batch_size), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more than a large one. Shuffled minibatches are fair samples.
            mb_metrics.append(update_epoch(order.view(args.num_minibatches, -1), *batch))
            # Extra: early stopping (early_stop_kl) [Spinning Up: each step, at 1.5 times a target]
            # Clipping cannot hold back a policy that has already moved too far. Stopping can.
            if mb_metrics[-1]["losses/approx_kl"].mean() > args.early_stop_kl:
                break

        # --- Log and save ---
        # Copied from ppo_continuous_action.py
        logratio = agent.evaluate_actions(*taken)[1].detach() - logprobs
        observed = observed_returns([t_rewards, next_values, terminated, done], args.gamma)
        bias = (values - observed).mean() / (observed.square().mean().sqrt() + 1e-8)
        metrics = means(mb_metrics) | {
            "losses/explained_variance": 1 - (returns - values).var() / (returns.var() + 1e-8),
            "check/value_bias": bias,  # large if the ends of episodes are handled wrongly
            "check/update": (normalize(logratio) * normalize(advantages)).mean(),  # positive
            "check/acting": approx_kl(actor_logprobs - logprobs),  # 0 if both policies agree
            "check/first_kl": mb_metrics[0]["losses/approx_kl"][0],  # 0 before the first step
            "charts/learning_rate": learning_rate,
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
            save_checkpoint(run_dir, args, state | {"own_env": env_factory is not None})
    return dict(agent=agent, episodes=episodes, updates=updates, args=args, run_dir=run_dir)


# === The algorithm ends here ===
# Below: environments, running statistics, speed, logs, checkpoints, the use of a policy, `main`.


def make_envs(resources: ExitStack, args: Args, count: int, env_factory=None, **options) -> list:
    """Make environments whose observations are vectors and whose actions are `Choices`."""
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
    obs = envs[0].observation_space
    try:
        flat = gym.spaces.Box(-np.inf, np.inf, (gym.spaces.flatdim(obs),))
    except (NotImplementedError, ValueError) as error:
        raise UsageError(f"Observations are {obs}, which cannot be flattened.") from error
    flatten = functools.partial(vector, obs)
    envs = [gym.wrappers.TransformObservation(env, flatten, flat) for env in envs]
    return [Recorder(Choices(env, args.bins)) for env in envs]


class Choices(gym.ActionWrapper):
    """An environment whose actions are k choices, each a number from 0 to at most n - 1.

    `meanings` (k, n) are the numbers that choices stand for. In a Box, these are evenly spaced from
    one bound to the other. `exists` (k, n) is true where a component has that choice.
    """

    def __init__(self, env: gym.Env, bins: int) -> None:
        super().__init__(env)
        space = env.action_space
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            sizes = np.ravel(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)
            meanings = np.asarray(space.start)[..., None] + np.arange(sizes.max())
        elif isinstance(space, gym.spaces.MultiBinary):
            sizes = np.full(math.prod(space.shape), 2)
            meanings = np.tile([0, 1], (len(sizes), 1))
        elif str(space.dtype).startswith("float") and space.is_bounded():
            sizes = np.full(math.prod(space.shape), bins)
            meanings = np.linspace(space.low, space.high, bins, axis=-1)
        else:
            floats = str(space.dtype).startswith("float") and len(space.shape) == 1
            hint = "try ppo_continuous_action.py" if floats else "wrap the environment"
            raise UsageError(f"Actions are {space}, neither discrete nor bounded floats: {hint}.")
        self.meanings = meanings.astype(space.dtype).reshape(len(sizes), -1)
        self.exists = np.arange(sizes.max()) < sizes[:, None]
        self.components, self.shape = np.arange(len(sizes)), space.shape
        self.action_space = gym.spaces.MultiDiscrete(sizes)

    def action(self, choices: np.ndarray) -> np.ndarray:
        """The action that choices (k,) stand for, in the form of the environment's space."""
        return self.meanings[self.components, choices].reshape(self.shape)[()]


def valid_choices(env: "Recorder") -> np.ndarray:
    """The choices (k, n) that the environment allows now."""
    mask = (env.info or {}).get("action_mask")
    if mask is None and env.has_wrapper_attr("action_masks"):
        mask = env.get_wrapper_attr("action_masks")
        mask = mask() if callable(mask) else mask
    if mask is None:
        places = 'info["action_mask"] or action_masks()'
        raise UsageError(f"The environment has no {places}: leave out --mask-invalid-actions.")
    return allowed(mask, env.get_wrapper_attr("exists"))


def allowed(mask: Any, exists: np.ndarray) -> np.ndarray:
    """A mask as an array (k, n), from a vector or from one mask for each component."""
    parts = parts_of(mask)
    mask = np.concatenate([np.zeros(0), *parts])
    if mask.size == exists.size:  # (k, n) already
        mask = mask[exists.ravel()]
    if mask.size != exists.sum():
        raise UsageError(f"The action mask has {mask.size} entries, not {exists.sum()}.")
    found, sizes = [x.size for x in parts], exists.sum(axis=1).tolist()
    if len(found) == len(sizes) and found not in (sizes, [exists.shape[1]] * len(sizes)):
        raise UsageError(f"The parts of the action mask have {found} entries, not {sizes}.")
    valid = np.zeros_like(exists)
    valid[exists] = mask == 1
    if valid.sum() != np.count_nonzero(mask):
        raise UsageError("An action mask must be 1 for each valid choice and 0 for all others.")
    if not valid.any(axis=1).all():
        raise UsageError("The action mask allows no choice in a component of the action.")
    return valid


def parts_of(mask: Any) -> list[np.ndarray]:
    """The vectors in a mask, which can be nested, as Gymnasium's are."""
    has_parts = isinstance(mask, np.ndarray) and (mask.ndim > 1 or mask.dtype == "O")
    parts = mask if has_parts or isinstance(mask, tuple | list) else []
    if any(isinstance(x, tuple | list | np.ndarray | Tensor) for x in parts):
        return [part for x in parts for part in parts_of(x)]
    return [np.ravel(mask)]


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


def load_policy(run_dir: Any, env: gym.Env) -> Callable[..., np.ndarray]:
    """The trained policy: `policy(obs)` is the most likely action for an observation of `env`.

    `policy(obs, mask)` obeys a mask, which is required if the policy was trained with masks.
    """
    saved = load_checkpoint(run_dir)
    scores, stats, args = actor(saved["agent"]), saved["obs_stats"], saved["args"]
    choices = Choices(env, args.bins)
    if saved["sizes"] != (gym.spaces.flatdim(env.observation_space), choices.exists.shape):
        raise UsageError(f"{run_dir} was trained in an environment with other spaces.")

    def policy(obs: Any, mask: Any = None, noise: Any = 0.0) -> np.ndarray:  # Gumbel noise (k, n)
        if mask is None and args.mask_invalid_actions:
            raise UsageError("This policy was trained with masks: pass one with each observation.")
        masks = choices.exists if mask is None else allowed(mask, choices.exists)
        obs = normalize_obs(vector(env.observation_space, obs)[None], stats, args)
        logits = scores(obs.astype(np.float32), masks[None])[0]
        return choices.action((logits + noise).argmax(-1))

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
                mask = valid_choices(env) if args.mask_invalid_actions else None
                obs, *_ = env.step(policy(obs, mask))
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
