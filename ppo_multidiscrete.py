# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock==4.3.1", "gymnasium[mujoco]==1.4.0", "moviepy==2.2.1", "mujoco==4.0.0",
#   "numpy==2.4.6", "tensorboard==2.21.0", "threadpoolctl==3.8.0", "torch==2.13.0",
#   "tqdm==4.70.1", "tyro==1.0.17", "wandb==0.31.0"]
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
`valid_choices` are new here. All else is ppo_continuous_action.py, which explains PPO; what is
"Copied from" there is the same, to the byte: change it there.

The code follows OpenAI's ppo2 (openai/baselines@ea25b9e8) down to "The 37 Implementation Details of
PPO" (Huang et al. 2022). Each detail is a comment above its line, with its settings in parentheses,
its place in baselines/ (long paths: the end) in brackets, and its reason below. Details 14-22 are
in ppo_atari.py, 23-25 and 27 in ppo_continuous_action.py, and 32-36 in ppo_atari_lstm.py.

Differences from ppo2: time limits are not failures (unless `--truncation-is-terminal`); rewards are
scaled with `--gamma`, not always 0.99; the KL is logged as k3 (`approx_kl`), not k2; orthogonal
matrices come from a QR decomposition, not an SVD; each episode has its own seed; the defaults are
those for MuJoCo, also in classic control.
"""

import argparse
import dataclasses
import functools
import importlib
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import filelock
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
COMPILE_FROM = 15_000  # Adam steps of a run that repay the time it takes to compile them
EPISODES_KEPT = 100_000  # the last ones; the log has the means of all
Tensors = dict[str, Tensor]
UpdateArgs = SimpleNamespace  # settings whose floats are tensors, see `update_args`
Saved = dict[str, Any]  # a checkpoint that `load_checkpoint` has read
EnvFactory = Callable[[], gym.Env]
StepSize = Annotated[float, tyro.conf.arg(aliases=["--lr"])]  # --lr for --learning-rate
LEAST = {"seed": 0, "ent_coef": -math.inf, "bins": 2}  # of other integers 1, of other floats 0
MOST = {"gamma": 1, "gae_lambda": 1, "seed": 2**63 - 1}  # others: infinity
PLAYED = {"env_id", "bins"}  # settings that may change with --evaluate


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
    compile: Literal["auto", "yes", "no"] = "auto"  # the update; auto: in runs where it pays
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline: to disk)
    checkpoint_interval: int = 25  # iterations between checkpoints

    # --- PPO ---
    num_steps: int = 2048  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: int = 32  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: int = 10  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: StepSize = 3e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    anneal_lr: bool = True  # lower the step size linearly towards 0 [ppo2; paper: Atari only]
    adam_eps: float = 1e-5  # Adam's epsilon [ppo2: 1e-5]
    gamma: float = 0.99  # discount factor [paper: 0.99]
    gae_lambda: float = 0.95  # advantages look ahead one step at 0, all steps at 1 [paper: 0.95]
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    clip_vloss: bool = True  # limit the change of values to clip_coef [ppo2; not in the paper]
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: float = 0.5  # weight of the value loss (half a squared error), c1 [ppo2: 0.5]
    max_grad_norm: float = 0.5  # maximum norm of the whole gradient [ppo2: 0.5; inf: off]
    early_stop_kl: float = math.inf  # stop the epochs of an update once the KL is larger [inf: off]

    def __post_init__(self) -> None:
        check_settings(self)
        batch = self.num_steps * self.num_envs
        flag = "--num-steps * --num-envs"
        if batch % self.num_minibatches or batch == self.num_minibatches:  # one sample has std 0
            raise UsageError(f"{flag} ({batch}) must be 2, 3, 4... times --num-minibatches.")
        if not batch <= self.total_timesteps < math.inf:
            raise UsageError(f"--total-timesteps must be finite, and at least {flag} ({batch}).")


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
            first = linear(obs_size, HIDDEN, gain=2**0.5)
            second = linear(HIDDEN, HIDDEN, gain=2**0.5)
            return [first, nn.Tanh(), second, nn.Tanh()]

        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        # If layers are shared, both losses train them and compete. vf_coef then sets the balance.
        # Detail 26/37: separate networks [ppo2/defaults.py L12]
        # Sharing helps with images, whose features are costly to learn, but little with vectors.
        value, policy = hidden(), hidden()
        self.value = nn.Sequential(*value, linear(HIDDEN, 1, gain=1.0))  # (..., 1)
        self.policy = nn.Sequential(*policy, linear(HIDDEN, math.prod(mask_shape), gain=0.01))

    def get_value(self, obs: Tensor) -> Tensor:
        """Values (...) of observations (..., D)."""
        return self.value(obs).squeeze(-1)

    def evaluate_actions(
        self, obs: Tensor, masks: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values of obs (..., D), log-probabilities of actions (..., k), entropies, each (...).

        Choices have probability 0 where `masks` (..., k, n) is false.
        """
        logits = self.policy(obs).unflatten(-1, self.mask_shape)
        logprobs, entropies = masked_categorical(logits, masks, actions)
        return self.get_value(obs), logprobs, entropies


def masked_categorical(logits: Tensor, masks: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions (..., k), and entropies, each (...), for logits (..., k, n)."""
    # Extra: invalid action masking (mask_invalid_actions) [Huang & Ontanon 2020]
    # Invalid choices get no probability, so the agent need not learn to avoid them.
    logits = torch.where(masks, logits, -1e8)  # -inf would make an invalid choice's ratio NaN
    dist = Categorical(logits=logits, validate_args=False)  # `check_finite` reports NaN
    # Detail 37/37: independent action components [common/distributions.py L206-222]
    # One output for each choice is enough, instead of one for each combination of choices.
    return dist.log_prob(actions).sum(-1), dist.entropy().sum(-1)


def actor(agent: Agent) -> Callable[..., np.ndarray]:
    """The policy in NumPy, which is five times as fast as PyTorch for a few rows.

    Returns `scores(obs, masks)`: the logits (N, k, n) for normalized obs (N, D), minus infinity
    where masks (N, k, n) are false.
    """
    layers = [in_numpy(x) for x in agent.policy]

    def scores(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
        logits = obs
        for layer in layers:
            logits = layer(logits)
        return np.where(masks, logits.reshape(masks.shape), -np.inf)

    return scores


def sample(scores: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
    """Choices (..., k) by scores (..., k, n) and Gumbel noise; noise 0 gives the most likely ones.

    If you change this distribution, change `masked_categorical` too.
    """
    # With Gumbel noise, the largest score is a sample of the softmax, as in ppo2
    # [common/distributions.py L199-201]. Sampling is how better actions are found.
    return (scores + noise).argmax(-1)


# === The math ===


# Copied from ppo_continuous_action.py
def normalize_obs(obs: np.ndarray, stats: "RunningMeanStd", clip: float) -> np.ndarray:
    """Standardize observations (N, D) with the running statistics, without updating them."""
    # Detail 28/37: observation normalization (norm_obs) [common/vec_env/vec_normalize.py L36-42]
    # Speeds and forces have different units. Networks learn best from inputs with mean 0 and std 1.
    obs = (obs - stats.mean) / np.sqrt(stats.var + 1e-8)
    # Detail 29/37: observation clipping (norm_obs, clip_obs) [common/vec_env/vec_normalize.py L39]
    # An outlier, or an input that has hardly varied so far, would otherwise drown out the rest.
    return np.minimum(np.maximum(obs, -clip), clip)  # faster than np.clip


# Copied from ppo_continuous_action.py
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2016, equations 11-16), all (T, N).

    `next_values` is what the rest of the episode is worth after each step. `done` is 1 where the
    episode ended with that step, for any reason.
    """
    # At first, temporal-difference (TD) errors: how much better each step went than predicted.
    advantages = (rewards + gamma * next_values - values).numpy(force=True)
    decay = (gamma * gae_lambda * (1 - done)).numpy(force=True)  # NumPy loops faster
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
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
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


class Batch(NamedTuple):
    """What an update learns from: T * N steps of a rollout as rows, or B rows of a minibatch."""

    obs: Tensor  # (T*N, D), normalized
    actions: Tensor  # (T*N, k)
    logprobs: Tensor  # (T*N,); these and all below are of the weights that acted
    values: Tensor  # (T*N,)
    advantages: Tensor  # (T*N,)
    returns: Tensor  # (T*N,), targets for the values
    masks: Tensor  # (T*N, k, n), true for the choices that were allowed


def ppo_loss(agent: Agent, minibatch: Batch, args: UpdateArgs) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated for descent), and debug variables."""
    values, logprobs, entropies = agent.evaluate_actions(
        minibatch.obs, minibatch.masks, minibatch.actions
    )
    logratio = logprobs - minibatch.logprobs
    # Detail 7/37: advantage normalization (norm_adv) [ppo2/model.py L136-139]
    # The step then depends on which actions were better, not on the scale of rewards.
    advantages = minibatch.advantages
    advantages = normalize(advantages) if args.norm_adv else advantages
    pg_loss = policy_loss(logratio, advantages, args.clip_coef)
    v_clip = args.clip_coef if args.clip_vloss else math.inf  # inf: not clipped
    v_loss = value_loss(values, minibatch.values, minibatch.returns, v_clip)
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
def ppo_update(
    agent: Agent, adam: Tensors, batch: Batch, indices: Tensor, args: UpdateArgs
) -> Tensors:
    """Take an Adam step, in place, for each row of `indices` (M, B), which picks a minibatch.

    Adam is written out so that several steps compile into one graph, which makes updates six times
    as fast. `adam` holds all weights as one vector (the agent's parameters are views of it), the
    running means of the gradient and its square, and the step count. Returns the metrics, with one
    number per minibatch.
    """
    rows = []
    for chosen in indices:
        minibatch = Batch(*(x[chosen] for x in batch))
        loss, metrics = ppo_loss(agent, minibatch, args)
        gradients = torch.autograd.grad(loss, list(agent.parameters()))
        gradient = torch.cat([x.flatten() for x in gradients])
        norm = gradient.norm()
        metrics["losses/grad_norm"] = norm
        # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
        # One odd minibatch cannot throw the policy off, and the gradient keeps its direction.
        factor = args.max_grad_norm * (1 / norm)  # as in TensorFlow: max / norm rounds differently
        gradient = gradient * factor.clamp(max=1.0)
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
    env_factory: EnvFactory | None = None,
    update: Callable[..., Tensors] | None = None,
    resume: str | Path | Saved | None = None,
    on_iteration: Callable[[dict[str, Any]], object] | None = None,
    agent_class: type[Agent] | None = None,
    step_envs: Callable[..., list[tuple]] | None = None,
) -> dict[str, Any]:
    """Train an agent: `train(args)`, or `train(args, make)` if `make()` returns your environment.

    `resume` is the folder of a run to continue; its settings are the default of `args`. Returns
    `agent`; the last `episodes`, each {"global_step", "return", "length"}; `updates`, the metrics
    of each iteration; `args`; `run_dir`, the folder of logs and checkpoints. After each iteration,
    `on_iteration` gets the same; it may raise to end the run. `update` takes the place of
    `ppo_update`, `agent_class` that of `Agent`, and `step_envs` that of `step_all`.
    """
    # inference_mode(False) switches gradients on, even in `no_grad` of the caller.
    with torch.inference_mode(False), ExitStack() as resources:
        take_process(resources)  # at the end, it puts back threads and the default dtype
        torch.set_num_threads(1)  # more would not help networks of this size
        resources.enter_context(threadpoolctl.threadpool_limits(1, user_api="blas"))
        saved = load_checkpoint(resume, agent_class) if resume else {}
        args = settings_for(saved, args, env_factory)
        update = update or ppo_update
        agent_class = agent_class or Agent
        parts = Parts(env_factory, update, on_iteration, agent_class, step_envs or step_all)
        return learn(args, parts, saved, resources)


# Copied from ppo_continuous_action.py
class Parts(NamedTuple):
    """What the caller of `train` may replace."""

    env_factory: EnvFactory | None
    update: Callable[..., Tensors]
    on_iteration: Callable[[dict[str, Any]], object] | None
    agent_class: type[Agent]
    step_envs: Callable[..., list[tuple]]


def learn(args: Args, parts: Parts, saved: Saved, resources: ExitStack) -> dict[str, Any]:
    """Do what `train` says, which closes what is put on `resources`, even after an error."""
    # --- Device and sizes ---
    # Copied from ppo_continuous_action.py
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and device.type == "cpu":
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    to_tensor = functools.partial(torch.tensor, dtype=torch.float32, device=device)
    batch_size = args.num_steps * args.num_envs
    num_iterations = int(args.total_timesteps // batch_size)

    # --- Environments, and arrays for a rollout (T, N, ...) ---
    envs = make_envs(resources, args, args.num_envs, parts.env_factory)
    if parts.env_factory:  # logs and checkpoints have its name
        args = dataclasses.replace(args, env_id=name_of(parts.env_factory, envs[0]))
    exists = envs[0].get_wrapper_attr("exists")  # (k, n)
    obs_size = envs[0].observation_space.shape[0]  # D
    sizes = (obs_size, exists.shape)  # what an agent is made for
    # There are four kinds of observations. `raw_obs` are what the environments return now, and
    # `raw_final_obs` the last ones of episodes that have just ended. `obs` and `final_obs` are the
    # same of a whole rollout, normalized: what the networks see.
    raw_obs = np.zeros((args.num_envs, obs_size))
    raw_final_obs = np.zeros_like(raw_obs)
    # The last observation of a rollout is the first of the next one.
    obs = np.zeros((args.num_steps + 1, args.num_envs, obs_size), dtype=np.float32)
    final_obs = np.zeros_like(obs[1:])  # valid where a time limit ended an episode
    masks = np.full((args.num_steps + 1, args.num_envs, *exists.shape), exists)
    actions = np.zeros(masks[1:].shape[:-1], dtype=np.int64)
    rewards = np.zeros((args.num_steps, args.num_envs))
    terminated = np.zeros_like(rewards, dtype=bool)
    truncated = np.zeros_like(terminated)

    # --- The agent, optimizer, statistics, episodes, metrics: new, or from the checkpoint ---
    # Copied from ppo_continuous_action.py
    check_sizes(saved, sizes)
    torch.manual_seed(args.seed)
    agent = saved["agent"] if saved else parts.agent_class(*sizes)
    agent.to(device).eval()  # dropout and the like are only switched on for updates
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
    adam = {
        "weights": weights,
        "mean": torch.zeros_like(weights),
        "square": torch.zeros_like(weights),
        "step": torch.zeros((), dtype=torch.float64),  # float32 would round 1 - 0.999**step
    }
    adam = {name: x.to(device) for name, x in saved.get("adam", adam).items()}
    # This makes each parameter a view of the vector of weights, which only changes in place.
    nn.utils.vector_to_parameters(adam["weights"], agent.parameters())
    obs_stats = saved.get("obs_stats", RunningMeanStd(np.zeros(obs_size), np.ones(obs_size)))
    return_stats = saved.get("return_stats", RunningMeanStd(0.0, 1.0))
    discounted_returns = np.zeros(args.num_envs)  # sums of past rewards, as in ppo2
    episodes = saved.get("episodes", [])
    updates = saved.get("updates", [])
    global_step = updates[-1]["global_step"] if updates else 0
    finished = global_step // batch_size  # iterations

    def normalized(raw: np.ndarray) -> np.ndarray:
        return normalize_obs(raw, obs_stats, args.clip_obs) if args.norm_obs else raw

    # --- The update: compiled, and on a GPU recorded ---
    # Copied from ppo_continuous_action.py
    # Floats in `args` become tensors, which can change without compiling or recording again.
    update_args = SimpleNamespace(**vars(args))
    for field in dataclasses.fields(args):
        if type(field.default) is float:  # a user may have given an integer
            setattr(update_args, field.name, to_tensor(getattr(args, field.name)))
    compiles = pays_to_compile(args, num_iterations * args.update_epochs * args.num_minibatches)
    fast_update = compiled(parts.update, device) if compiles else parts.update

    def epoch(minibatches: Tensor, *batch: Tensor) -> Tensors:  # `recorded` takes tensors only
        chunks = minibatches.split(STEPS_PER_CALL)
        rows = [fast_update(agent, adam, Batch(*batch), x, update_args) for x in chunks]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    fast_epoch = recorded(epoch) if device.type == "cuda" else epoch

    # --- Start: a resumed run continues its episodes, a new run begins new ones ---
    # Copied from ppo_continuous_action.py
    run_dir, run_id, writer = open_run(resources, args, saved, global_step)
    result = dict(agent=agent, episodes=episodes, updates=updates, args=args, run_dir=run_dir)

    def say_where(kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            advice = f"To continue from the last checkpoint: --resume {run_dir}"
            print(f"Interrupted at step {global_step}. {advice}", file=sys.stderr)

    resources.push(say_where)  # called at the end, with the error if there is one
    replayed = bool(saved) and replay(envs, saved, raw_obs)  # which fills raw_obs
    if replayed:  # the saved statistics have seen these observations
        discounted_returns = saved["discounted_returns"].numpy()
    else:
        # A new run, or one that could not be replayed. Iteration `finished` drew its noise from
        # the same generator, which does no harm to seeds.
        rng = np.random.default_rng([args.seed, finished])
        for i, env in enumerate(envs):
            raw_obs[i] = env.begin(rng.integers(2**31).item())
        obs_stats.update(raw_obs)
    obs[-1] = normalized(raw_obs)  # as if a rollout had just ended

    # --- What is saved, so that a run can be resumed whenever it is stopped ---
    # Copied from ppo_continuous_action.py
    def save() -> None:
        state = {
            "args": vars(args),
            "own_env": parts.env_factory is not None,
            "sizes": sizes,
            "agent": agent.state_dict(),
            "adam": adam,
            "obs_stats": vars(obs_stats),
            "return_stats": vars(return_stats),
            "discounted_returns": discounted_returns,
            "raw_obs": raw_obs,
            "running": [(env.seed, np.array(env.actions)) for env in envs],
            "episodes": episodes,
            "updates": updates,
            "run_id": run_id,
        }
        save_checkpoint(run_dir, state)

    if not saved:
        save()  # so that a run can be resumed even before its first interval ends

    iterations = range(finished + 1, num_iterations + 1)
    if not iterations:
        print(f"Step {global_step} was the last one: raise --total-timesteps to train on.")
    progress = tqdm(iterations, initial=finished, total=num_iterations, mininterval=1)
    for iteration in resources.enter_context(progress):
        # --- Collect: T steps in each of the N environments, with fixed weights ---
        start_time = time.perf_counter()
        rng = np.random.default_rng([args.seed, iteration])  # a resumed run draws the same
        num_before = len(episodes)
        scores = actor(agent)
        noise = rng.gumbel(size=masks[1:].shape).astype(np.float32)
        obs[0] = obs[-1]  # where the last rollout ended
        if args.mask_invalid_actions:
            masks[0] = [valid_choices(env) for env in envs]
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # Several environments make a batch more diverse. Each rollout continues the one before.
        for t in range(args.num_steps):
            global_step += args.num_envs
            actions[t] = sample(scores(obs[t], masks[t]), noise[t])
            outcomes = parts.step_envs(envs, actions[t])
            for i, (env, outcome) in enumerate(zip(envs, outcomes)):
                raw_obs[i], rewards[t, i], terminated[t, i], truncated[t, i], _ = outcome
                if env.ended:
                    length = len(env.actions)
                    episode = {"global_step": global_step, "return": env.total, "length": length}
                    episodes.append(episode)
                    raw_final_obs[i] = raw_obs[i]
                    raw_obs[i] = env.begin(rng.integers(2**31).item())
            obs_stats.update(raw_obs)
            # Where an episode has ended, these are the first observation and mask of the next one.
            obs[t + 1] = normalized(raw_obs)
            if args.mask_invalid_actions:
                masks[t + 1] = [valid_choices(env) for env in envs]
            if truncated[t].any():
                final_obs[t] = normalized(raw_final_obs)

        # --- Rewards: the ends of episodes, a bonus, scaling ---
        # Copied from ppo_continuous_action.py
        if args.truncation_is_terminal:
            terminated |= truncated
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
            all_obs = to_tensor(obs)  # (T + 1, N, D)
            batch_obs = all_obs[:-1]
            batch_masks = torch.tensor(masks[:-1], device=device)
            batch_actions = torch.tensor(actions, device=device)
            values, logprobs, _ = agent.evaluate_actions(batch_obs, batch_masks, batch_actions)
            # What the NumPy policy computed for the same actions, for `check/acting`.
            all_scores = to_tensor(scores(obs[:-1], masks[:-1]))  # (T, N, k, n)
            acting_logprobs, _ = masked_categorical(all_scores, batch_masks, batch_actions)
            # The value of the next observation predicts what follows a step. Where the episode
            # ended, that observation belongs to the next episode, and the value is replaced.
            next_values = torch.cat([values[1:], agent.get_value(all_obs[-1:])])
            # Deviation: time limits are not failures (not truncation_is_terminal)
            # The episode would have gone on, so bootstrap from its last observation (ppo2 uses 0).
            next_values[truncated] = agent.get_value(to_tensor(final_obs[truncated]))
            next_values[terminated] = 0.0  # last: both may be true
            batch_rewards = to_tensor(rewards)
            advantages = gae(
                batch_rewards, values, next_values, to_tensor(done), args.gamma, args.gae_lambda
            )
            returns = advantages + values  # targets for the values
        samples = (batch_obs, batch_actions, logprobs, values, advantages, returns, batch_masks)
        batch = Batch(*(x.flatten(0, 1) for x in samples))

        # --- Update: K epochs of minibatches ---
        # Copied from ppo_continuous_action.py
        remaining = 1 - (iteration - 1) / num_iterations  # falls from 1 to 1 / num_iterations
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps make progress; small ones at the end average out noise.
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1.0)
        update_args.learning_rate.fill_(learning_rate)  # `update` would not see an assignment
        mb_metrics: list[Tensors] = []  # of each epoch, with one number per minibatch
        agent.train()
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(batch_size), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more than a large one. Shuffled minibatches are fair samples.
            mb_metrics.append(fast_epoch(order.view(args.num_minibatches, -1), *batch))
            # Extra: early stopping (early_stop_kl) [Spinning Up: each step, at 1.5 times a target]
            # Clipping cannot hold back a policy that has already moved too far. Stopping can.
            if mb_metrics[-1]["losses/approx_kl"].mean() > args.early_stop_kl:
                break
        agent.eval()

        # --- The actions of the rollout under the new weights ---
        with torch.no_grad():
            inputs = (batch.obs, batch.masks, batch.actions)
            _, new_logprobs, _ = agent.evaluate_actions(*inputs)

        # --- Log and save ---
        # Copied from ppo_continuous_action.py
        logratio = new_logprobs - batch.logprobs
        # What was paid in the end, to check `returns`, which `gae` has computed.
        observed = observed_returns(batch_rewards, next_values, terminated, done, args.gamma)
        bias = (values - observed).mean() / (observed.square().mean().sqrt() + 1e-8)
        metrics = means(mb_metrics) | {
            "losses/explained_variance": 1 - (returns - values).var() / (returns.var() + 1e-8),
            "check/target_std": returns.std(),  # what explained variance is relative to
            "check/value_bias": bias,  # nearly 0 once trained, if ends of episodes are right
            "check/update": (normalize(logratio) * normalize(batch.advantages)).mean(),  # positive
            "check/acting": approx_kl(acting_logprobs - logprobs),  # 0 if NumPy and PyTorch agree
            "check/first_kl": mb_metrics[0]["losses/approx_kl"][0],  # 0 before the first step
            "charts/learning_rate": learning_rate,
            "charts/SPS": batch_size / (time.perf_counter() - start_time),
        }
        metrics = {name: float(x) for name, x in metrics.items()}
        check_finite(metrics, global_step)  # before anything is saved
        updates.append({"global_step": global_step, **metrics})
        for name, x in (metrics | episode_means(episodes[num_before:])).items():
            writer.add_scalar(name, x, global_step)
        del episodes[:-EPISODES_KEPT]
        if episodes:
            mean_return = np.mean([x["return"] for x in episodes[-100:]])
            progress.set_postfix_str(f"return {mean_return:.5g}", refresh=False)
        if iteration == num_iterations or iteration % args.checkpoint_interval == 0:
            save()
        if parts.on_iteration:
            parts.on_iteration(result)
    return result


# === The algorithm ends here ===
# Below: environments, running statistics, speed, logs, checkpoints, the use of a policy, `main`.


def make_envs(
    resources: ExitStack, args: Args, count: int, env_factory: EnvFactory | None, **options: Any
) -> list["Recorder"]:
    """Make environments whose observations are vectors and whose actions are `Choices`."""
    # Ignore two warnings: papers use -v4, and TensorFloat32, which rounds more, is off on purpose.
    warnings.filterwarnings("ignore", message=".*is out of date|TensorFloat32")
    if ":" in args.env_id and not env_factory:
        import_named(args.env_id.partition(":")[0])
    if args.env_id.startswith("HalfCheetah") and not env_factory:
        with suppress(ImportError):  # Gymnasium says if it is missing
            import mujoco

            mujoco.set_mju_user_warning(show_mujoco_warning)
    make = env_factory or functools.partial(gym.make, args.env_id, **options)
    envs = []
    for _ in range(count):
        env = make() if callable(make) else None
        if not isinstance(env, gym.Env):
            raise UsageError("env_factory must be a function that returns a gymnasium.Env.")
        resources.callback(env.close)
        if env.unwrapped.spec is None:  # it is not from `gym.make`, which adds the checker
            # Gymnasium then warns if the first observations or rewards are not as they should be.
            env = gym.wrappers.PassiveEnvChecker(env)
        envs.append(env)
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
        has_floats = str(space.dtype).startswith("float")
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            sizes = np.ravel(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)
            meanings = np.asarray(space.start)[..., None] + np.arange(sizes.max())
        elif isinstance(space, gym.spaces.MultiBinary):
            sizes = np.full(math.prod(space.shape), 2)
            meanings = np.tile([0, 1], (len(sizes), 1))
        elif has_floats and space.is_bounded():
            sizes = np.full(math.prod(space.shape), bins)
            meanings = np.linspace(space.low, space.high, bins, axis=-1)
        else:
            fits = has_floats and len(space.shape) == 1
            hint = "try ppo_continuous_action.py" if fits else "wrap the environment"
            raise UsageError(f"Actions are {space}, neither discrete nor bounded floats: {hint}.")
        self.meanings = meanings.astype(space.dtype).reshape(len(sizes), -1)
        self.exists = np.arange(sizes.max()) < sizes[:, None]
        self.components = np.arange(len(sizes))
        self.shape = space.shape
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
    found = [x.size for x in parts]
    sizes = exists.sum(axis=1).tolist()
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
def import_named(module: str) -> None:
    """Import the module of --env-id MODULE:NAME. One that does not exist is the user's mistake."""
    if not module or module.startswith("."):
        raise UsageError(f"--env-id: there is no module {module!r}.")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module's own code needs another
            raise
        raise UsageError(f"--env-id: {error}.") from error


# Copied from ppo_continuous_action.py
def show_mujoco_warning(text: str) -> None:
    """Print a warning of MuJoCo, but not of an old word in Gymnasium's HalfCheetah."""
    if "settotalmass" not in text:
        print("MuJoCo:", text, file=sys.stderr)


# Copied from ppo_continuous_action.py
def name_of(env_factory: EnvFactory, env: gym.Env) -> str:
    """Module and name of what makes the environment, or of its class: runs are called that."""
    is_named = isinstance(env_factory, FunctionType) and "<" not in env_factory.__qualname__
    maker: Any = env_factory if is_named else type(env.unwrapped)  # not <lambda>, <locals>
    return f"{maker.__module__}:{maker.__qualname__}{given_to(env_factory)}"


# Copied from ppo_continuous_action.py
def given_to(maker: Any) -> str:
    """Numbers and words that a partial function passes on: they tell simulators apart."""
    if not isinstance(maker, functools.partial):
        return ""
    words = [f"{x}" for x in maker.args if isinstance(x, int | float | str)]
    named = maker.keywords.items()
    words += [f"{name}={x}" for name, x in named if isinstance(x, int | float | str)]
    return f"({', '.join(words)})" if words else ""


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
    """Records the episode: seed and actions, for `replay`; return; obs; info, for your own code."""

    def begin(self, seed: int) -> np.ndarray:
        self.seed = seed
        self.actions: list[np.ndarray] = []
        self.total = 0.0
        self.ended = False
        self.obs, self.info = self.env.reset(seed=seed)
        return self.obs

    def step(self, action: np.ndarray) -> tuple:
        if np.isnan(action[0]):  # a NaN in an input, or in most weights, is in all actions
            cause = f"the observation {self.obs} is the cause, or training has diverged"
            raise UsageError(f"Action {len(self.actions)} of an episode is NaN: {cause}.")
        self.actions.append(action.copy())  # some environments change it
        self.obs, reward, terminated, truncated, self.info = self.env.step(action)
        reward = np.asarray(reward).item()  # a float, even from an array
        self.total += reward
        self.ended = terminated or truncated
        return self.obs, reward, terminated, truncated, self.info


# Copied from ppo_continuous_action.py
def step_all(envs: list[Recorder], actions: np.ndarray) -> list[tuple]:
    """Step the environments one after another (recipes/parallel_simulators.py: all at once)."""
    return [env.step(action) for env, action in zip(envs, actions)]


# Copied from ppo_continuous_action.py
def replay(envs: list[Recorder], saved: Saved, raw_obs: np.ndarray) -> bool:
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
        self.mean = np.asarray(mean)
        self.var = np.asarray(var)
        self.count = count

    def update(self, x: np.ndarray) -> None:
        """Merge the rows of `x`, (rows, ...), with the formula of Chan et al. 1979."""
        if len(x) == 1:  # the same, but faster
            x_mean, x_var = x[0], 0.0
        else:
            x_mean, x_var = x.mean(0), x.var(0)
        self.count += len(x)
        share = len(x) / self.count
        delta = x_mean - self.mean
        self.mean = self.mean + delta * share
        self.var = self.var + (x_var - self.var) * share + delta * delta * (share * (1 - share))


# Copied from ppo_continuous_action.py
def in_numpy(layer: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The layer as a NumPy function. Other kinds run in PyTorch, which is slower."""
    if type(layer) is nn.Linear and layer.bias is not None:
        weight, bias = layer.weight.numpy(force=True).T, layer.bias.numpy(force=True)
        return lambda x: x.dot(weight) + bias
    if type(layer) is nn.Tanh:
        return np.tanh
    if type(layer) is nn.ReLU:
        return lambda x: np.maximum(x, 0.0)
    device = next((x.device for x in layer.parameters()), "cpu")

    def in_torch(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return layer(torch.tensor(x, device=device)).numpy(force=True)

    return in_torch


TRAINING = threading.Lock()  # taken by the run that trains in this process


# Copied from ppo_continuous_action.py
def take_process(resources: ExitStack) -> None:
    """Let only one run change the process: its threads and floats, which the run puts back."""
    if not TRAINING.acquire(blocking=False):
        hint = "use a process for each (Optuna's n_jobs are threads)"
        raise UsageError(f"Another run trains in this process: {hint}.")
    resources.callback(TRAINING.release)
    resources.callback(torch.set_num_threads, torch.get_num_threads())
    resources.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float32)


# Copied from ppo_continuous_action.py
def pays_to_compile(args: Args, adam_steps: int) -> bool:
    """Whether to compile. `adam_steps` counts the whole run, so that a resume decides the same."""
    if args.compile == "auto" and adam_steps < COMPILE_FROM:
        print("A run this short ends sooner without compiling its update (--compile yes compiles).")
        return False
    return args.compile != "no"


# Copied from ppo_continuous_action.py
def compiled(function: Callable, device: torch.device) -> Callable:
    """Compile `function` when it is first called. If this call fails, say why and do without."""
    current: Callable | None = None

    def call(*inputs: Any) -> Any:
        nonlocal current
        if current:
            return current(*inputs)
        tqdm.write("The first iteration compiles the update, which may take a minute.")
        try:
            torch.compiler.reset()  # an earlier run in this process may have had other settings
            torch._dynamo.config.trace_autograd_ops = True  # keeps autograd.grad in the graph
            torch._inductor.config.cpp.vec_isa_ok = True  # no trial compilations: saves 10 s
            options = {"cpp_wrapper": device.type == "cpu", "size_asserts": False}  # shorter calls
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

    Launching kernels one by one takes longer than small networks take to compute. In HalfCheetah,
    an H200 makes 9,481 steps/s with recordings, 5,316 without; the processor beside it, 8,280.
    Inputs are copied to where the recording reads them, outputs from where it writes them.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    calls = 0
    recorded_inputs: list[Tensor] = []
    recorded_outputs: Tensors = {}

    def call(*inputs: Tensor) -> Tensors:
        nonlocal calls
        calls += 1
        if calls == 4:  # what the first three compile or allocate cannot be recorded
            recorded_inputs.extend(x.clone() for x in inputs)
            try:
                with torch.cuda.graph(graph, stream=stream):
                    recorded_outputs.update(function(*recorded_inputs))
            except RuntimeError as error:  # something in it waits for the GPU, as .item() does
                reason = str(error).partition("\n")[0]
                tqdm.write(f"{function.__name__} cannot be recorded, so it takes longer: {reason}")
        if not recorded_outputs:
            # What is recorded must have run before on the same stream.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        for place, x in zip(recorded_inputs, inputs):
            place.copy_(x)
        graph.replay()
        return {name: x.clone() for name, x in recorded_outputs.items()}

    return call


# === Metrics, logs, checkpoints ===
# Copied from ppo_continuous_action.py

SCRIPT = Path(globals().get("__file__", "notebook"))  # pasted into a notebook, it has no file


def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows, one or several of them in each."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


def observed_returns(
    rewards: Tensor, next_values: Tensor, terminated: np.ndarray, done: np.ndarray, gamma: float
) -> Tensor:
    """Discounted sums (T, N) of the rewards that followed, computed without `gae`.

    A value stands for what is unknown: after the rollout, and after a time limit.
    """
    columns = []  # in Python's numbers, which are 20 times as fast as arrays here
    # `returns` are rewards at first; `values` are those of the next observations.
    arrays = (rewards, next_values, terminated, done)
    for returns, values, failed, ended in zip(*(x.T.tolist() for x in arrays)):
        rest = values[-1]
        for t in reversed(range(len(returns))):
            if ended[t]:
                rest = 0.0 if failed[t] else values[t]  # 0 even if `next_values` is wrong
            rest = returns[t] = returns[t] + gamma * rest
        columns.append(returns)
    return torch.tensor(columns, device=rewards.device).T


def episode_means(episodes: list[dict]) -> dict[str, float]:
    """Mean return and length of episodes, as metrics; none if there is no episode."""
    names = ("return", "length") if episodes else ()
    return {f"charts/episodic_{x}": np.mean([y[x] for y in episodes]).item() for x in names}


def check_finite(metrics: dict[str, float], step: int) -> None:
    """End a run whose numbers are no numbers any more."""
    bad = ", ".join(name for name, x in metrics.items() if not math.isfinite(x))
    if bad:
        raise UsageError(f"Not finite at step {step}: {bad}. Check observations and rewards.")


def open_run(
    resources: ExitStack, args: Args, saved: Saved, step: int
) -> tuple[Path, str, SummaryWriter]:
    """Open the folder of a run. Returns it, the run's id at Weights & Biases, and its log."""
    name = f"{args.env_id}__{SCRIPT.stem}__{args.seed}__{time.time_ns()}"
    run_id = saved.get("run_id", re.sub(r"[^\w.=+-]", "-", name))
    run_dir = saved.get("run_dir", Path("runs", args.run_name or run_id))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # The operating system frees this lock when the process ends, even if it is killed.
        resources.enter_context(filelock.FileLock(run_dir / "lock", timeout=0))
        if not saved and any(run_dir.rglob("checkpoint.pt")):  # deeper: best_checkpoint.py
            raise UsageError(f"{run_dir} has a run already: change --run-name, or --resume it.")
        if args.track:
            import wandb

            about = {"id": run_id, "name": run_dir.name, "config": vars(args), "resume": "allow"}
            try:
                resources.enter_context(wandb.init(**about, sync_tensorboard=True))
            except wandb.Error as error:
                raise UsageError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error
        writer = SummaryWriter(run_dir, purge_step=step + 1)  # hide lost steps
    except filelock.Timeout as error:
        raise UsageError(f"{run_dir} is in use: another process trains there.") from error
    except OSError as error:
        raise UsageError(f"{run_dir}: {error.strerror}: change --run-name, or --resume.") from error
    resources.enter_context(writer)
    rows = [f"| {setting} | {value} |" for setting, value in vars(args).items()]
    writer.add_text("hyperparameters", "\n".join(["| setting | value |", "|-|-|", *rows]))
    # Which details this file has, by their tags: a copy of it may have others.
    source = SCRIPT.read_text(encoding="utf-8") if SCRIPT.is_file() else ""
    writer.add_text("details", "  \n".join(re.findall(r"# ((?:Detail|Extra|Dev).*: .*)", source)))
    print(f"Logs and checkpoints: {run_dir}")
    return run_dir, run_id, writer


def check_settings(args: Args) -> None:
    """Refuse numbers out of their range, unknown choices, and a name that is a path."""
    if isinstance(getattr(args, "compile", None), bool):  # of version 6; the LSTM's has none
        object.__setattr__(args, "compile", "yes" if args.compile else "no")
    for field in dataclasses.fields(args):
        value, kind = getattr(args, field.name), type(field.default)
        flag = f"--{field.name.replace('_', '-')} ({value})"
        low, high = LEAST.get(field.name, int(kind is int)), MOST.get(field.name, math.inf)
        changed = value != field.default  # who edits Args may choose a default that is outside
        if kind in (int, float) and changed and not low <= value <= high:  # or NaN
            raise UsageError(f"{flag} must be from {low} to {high}.")
        choices = Literal[True, False] if kind is bool else field.type
        if get_origin(choices) is Literal and value not in get_args(choices):  # "False" is true
            raise UsageError(f"{flag} must be one of {', '.join(map(str, get_args(choices)))}.")
    name = args.run_name or ""
    if name == ".." or Path(name).name != name:
        raise UsageError(f"--run-name ({name}) must be a name, not a path.")


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


def save_checkpoint(run_dir: Path, state: dict[str, Any]) -> None:
    """Save `state`. The file is always the old or the new one, never half of one."""
    temporary = run_dir / "checkpoint.tmp"
    try:
        with temporary.open("wb") as file:  # with a path, PyTorch would not say that a disk is full
            torch.save(plain(state), file)
        os.replace(temporary, run_dir / "checkpoint.pt")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"Could not save; {run_dir} keeps its last checkpoint: {error}") from error


def load_checkpoint(run_dir: str | Path | Saved, agent_class: type[Agent] | None = None) -> Saved:
    """Everything a run has saved, with its `args` and `agent`. Loading it runs no code.

    Give it the `agent_class` that was trained. `evaluate` takes the result; `train` changes it.
    """
    if isinstance(run_dir, dict):  # it has been loaded
        return run_dir
    path = Path(run_dir) / "checkpoint.pt"
    try:
        if broken := zipfile.ZipFile(path).testzip():  # torch.load ignores the checksums
            raise ValueError(f"the checksum of {broken} is wrong")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(saved["episodes"], list):
            raise ValueError("its episodes are in columns, as in version 6")
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, then replaced
            agent = (agent_class or Agent)(*saved["sizes"])
        agent.load_state_dict(saved["agent"], assign=True)  # float32, whatever the caller's default
        saved["agent"] = agent.eval()
        saved["args"] = Args(**saved["args"])
        saved["obs_stats"] = RunningMeanStd(**saved["obs_stats"])
        saved["return_stats"] = RunningMeanStd(**saved["return_stats"])
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        problem = "missing, damaged, or from another script or version"
        raise UsageError(f"{path} is {problem}: {reason}") from error
    saved["run_dir"] = Path(run_dir)
    return saved


def settings_for(saved: Saved, args: Args | None, env_factory: EnvFactory | None) -> Args:
    """`args`, or by default those of a checkpoint, if there is one. Refuses what cannot work."""
    args = args or saved.get("args") or Args()
    if vars(args).keys() != vars(Args()).keys():  # a subclass: --resume would fail, too late
        raise UsageError("Only settings of Args itself can be loaded again: add yours to it.")
    if saved and args.run_name not in (None, saved["args"].run_name):
        raise UsageError(f"--run-name: a run stays in its folder, {saved['run_dir']}.")
    if saved and saved["own_env"] and not env_factory and args.env_id == saved["args"].env_id:
        hint = "give it to train or evaluate in Python, or add --env-id MODULE:NAME"
        raise UsageError(f"{saved['run_dir']} needs its env_factory: {hint}.")
    return args


def check_sizes(saved: Saved, sizes: tuple) -> None:
    """Refuse to go on, or to act, in an environment with other spaces."""
    if saved and saved["sizes"] != sizes:
        raise UsageError(f"{saved['run_dir']} was trained in an environment with other spaces.")


# === The use of a policy, and `main` ===


def load_policy(run_dir: str | Path | Saved, env: gym.Env) -> Callable[..., np.ndarray]:
    """The trained policy: `policy(obs)` is the most likely action for an observation of `env`.

    `policy(obs, mask)` obeys a mask, which is required if the policy was trained with masks. With
    standard Gumbel `noise` (k, n) it samples.
    """
    saved = load_checkpoint(run_dir)
    scores, stats, args = actor(saved["agent"]), saved["obs_stats"], saved["args"]
    choices = Choices(env, args.bins)
    check_sizes(saved, (gym.spaces.flatdim(env.observation_space), choices.exists.shape))

    def policy(obs: Any, mask: Any = None, noise: np.ndarray | float = 0.0) -> np.ndarray:
        if mask is None and args.mask_invalid_actions:
            raise UsageError("This policy was trained with masks: pass one with each observation.")
        masks = choices.exists if mask is None else allowed(mask, choices.exists)
        obs = vector(env.observation_space, obs)[None]
        if args.norm_obs:
            obs = normalize_obs(obs, stats, args.clip_obs)
        logits = scores(obs.astype(np.float32), masks[None])[0]
        return choices.action(sample(logits, noise))

    return policy


# Copied from ppo_continuous_action.py
@dataclasses.dataclass(frozen=True)
class Command:
    args: tyro.conf.OmitArgPrefixes[Args]
    resume: str | None = None  # continue the run in this folder; other flags change its settings
    evaluate: str | None = None  # play episodes with the policy in this folder; no training
    eval_episodes: int = 10  # number of episodes, with --evaluate
    capture_video: bool = False  # film the first episodes, with --evaluate
    video_length: int = 1000  # frames of the film, with --capture-video


def evaluate(
    run_dir: str | Path | Saved,
    env_factory: EnvFactory | None = None,
    episodes: int = 10,
    video: bool = False,
    args: Args | None = None,
    video_length: int = 1000,
) -> list[float]:
    """Play episodes with the most likely actions of a trained policy; return their returns.

    `video` films them, up to `video_length` frames: what `env_factory()` returns then needs
    render_mode="rgb_array".
    """
    for flag, count in (("--eval-episodes", episodes), ("--video-length", video_length)):
        if count < 1:
            raise UsageError(f"{flag} must be at least 1.")
    if video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    options = {"render_mode": "rgb_array"} if video else {}
    saved = load_checkpoint(run_dir)
    args = settings_for(saved, args, env_factory)
    folder = saved["run_dir"] / "videos"
    with ExitStack() as resources:
        (env,) = make_envs(resources, args, 1, env_factory, **options)
        policy = load_policy(saved, env)
        if video:
            if hasattr(env.unwrapped, "mujoco_renderer") and env.unwrapped.model.ncam:
                env.unwrapped.mujoco_renderer.camera_id = 0  # follows the body
            # Filming starts with the first episode, and goes on until the film is long enough.
            # RecordVideo has no `begin`: it goes between the environment and a new Recorder.
            env = gym.wrappers.RecordVideo(
                env.env, f"{folder}", lambda k: k == 0, video_length=video_length
            )
            env = Recorder(resources.enter_context(env))
        progress = resources.enter_context(tqdm(unit=" steps", disable=not video))  # it takes long
        limit = math.inf if env.spec and env.spec.max_episode_steps else 10_000
        returns = []
        for seed in range(episodes):
            obs = env.begin(seed)
            while not env.ended and len(env.actions) < limit:
                mask = valid_choices(env) if args.mask_invalid_actions else None
                obs, *_ = env.step(policy(obs, mask))
                progress.update()
            if not env.ended:
                print(f"An episode was cut after {limit} steps: no time limit is known.")
            returns.append(env.total)
    if video:
        print(f"Video: {folder}/rl-video-episode-0.mp4")
    print(f"Return {np.mean(returns):.5g} ± {np.std(returns):.3g} in {episodes} episodes")
    return returns


# Copied from ppo_continuous_action.py
@contextmanager
def command_line() -> Iterator[list[str]]:
    """The user's flags, for what runs as a program.

    The user's mistakes end in one sentence and exit code 2, signals in 128 plus their number.
    """
    for name in ("SIGTERM", "SIGHUP"):  # of a cluster, or of a terminal that is closed
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores it
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        # In a notebook, the flags are those of its kernel.
        words = [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:]
        yield ["--compile=no" if x == "--no-compile" else x for x in words]  # as in version 6
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UsageError, gym.error.Error) as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


# Copied from ppo_continuous_action.py
def main() -> None:
    """Train, resume or evaluate, as the command line says."""
    # The settings of a run are the defaults of the other flags, so its folder is read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="folder")
    with command_line() as flags:
        sys.path.append("")  # the current folder, for --env-id MODULE:NAME
        folder = parser.parse_known_args(flags)[0].folder
        saved = load_checkpoint(folder) if folder is not None else {}
        default = Command(saved.get("args") or Args())
        command = tyro.cli(Command, args=flags, default=default)
        args = command.args
        if command.resume and command.evaluate:
            raise UsageError("--resume trains, and --evaluate does not: choose one of them.")
        if command.evaluate is not None:
            for name, value in vars(args).items():
                if value != getattr(saved["args"], name) and name not in PLAYED:
                    flag = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{flag} is for training: --evaluate does not use it.")
            episodes, video = command.eval_episodes, command.capture_video
            evaluate(saved, None, episodes, video, args, command.video_length)
        elif command != Command(args, resume=command.resume):
            raise UsageError("--eval-episodes, --capture-video, --video-length need --evaluate.")
        else:
            run_dir = train(args, resume=saved)["run_dir"]
            print(f"Next: --evaluate {run_dir}, or tensorboard --logdir {run_dir}")


if __name__ == "__main__":
    main()
