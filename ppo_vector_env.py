# /// script
# requires-python = ">=3.11"
# dependencies = ["envpool==1.2.5", "filelock==4.3.1", "gymnasium[mujoco]==1.4.0",
#   "moviepy==2.2.1", "mujoco==4.0.0", "numpy==2.4.6", "tensorboard==2.21.0", "torch==2.13.0",
#   "tqdm==4.70.1", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for simulators that step many environments at once.

    python ppo_vector_env.py --env-id HalfCheetah-v4  # EnvPool: one simulator, many threads
    python ppo_vector_env.py --make my_robots:make --num-envs 4096 --num-steps 24 \\
        --num-minibatches 4 --update-epochs 5 --lr 1e-3 --target-kl 0.01 --ent-coef 0.01 \\
        --vf-coef 2 --max-grad-norm 1 --init-std 1 --hidden 512 256 128 --activation elu \\
        --no-scale-rewards --total-timesteps 1e8  # on a GPU, with rsl_rl's settings
    torchrun --nproc-per-node 2 ppo_vector_env.py     # two processes learn as one

ppo_continuous_action.py explains the algorithm and its details. Here one call steps N environments,
and all arrays are tensors on one device. `make(num_envs, seed, device)` returns a simulator with
the interface of Gymnasium's vector environments, and with NumPy arrays or tensors. If all episodes
are equally long, they should not end at the same time: where a simulator has `episode_length_buf`,
as in Isaac Lab and mjlab, training begins the first ones at random ages.

Differences from ppo2: time limits are not failures; the statistics that normalize observations and
rewards change once per iteration, and are those of all processes.
"""

import argparse
import ctypes
import dataclasses
import functools
import importlib
import inspect
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import filelock
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

STEPS_PER_CALL = 4  # Adam steps that are compiled into one graph, which is faster
EPISODES_KEPT = 100_000  # the last ones: simulators on a GPU end millions
EVALUATION_STEPS = 100_000  # longest episode when a policy is evaluated
PLAYED = {"env_id", "backend", "vectorization_mode", "make", "device"}  # that --evaluate uses
WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)  # processes that torchrun has started
RANK = int(os.environ["RANK"]) if WORLD_SIZE > 1 else 0
# Cores that this process may use: in a container, these can be fewer than the machine has.
NUM_CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
SCRIPT = Path(globals().get("__file__", "notebook"))  # pasted into a notebook, it has no file
Tensors = dict[str, Tensor]
Saved = dict[str, Any]  # a checkpoint that `load_checkpoint` has read
StepSize = Annotated[float, tyro.conf.arg(aliases=["--lr"])]


class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "HalfCheetah-v4"  # an environment of EnvPool or Gymnasium
    backend: Literal["envpool", "gymnasium"] = "envpool"  # which of them makes it
    vectorization_mode: Literal["sync", "async"] = "sync"  # Gymnasium's: one process, or many
    make: str | None = None  # MODULE:FUNCTION, which makes any other simulator
    num_envs: int = 16  # environments N that each process steps at once [rsl_rl: 4096]
    policy_obs: tuple[str, ...] = ()  # parts of Dict observations that the policy sees [all]
    value_obs: tuple[str, ...] = ()  # parts that the value function sees [all]
    scale_rewards: bool = True  # divide rewards by the running std of their discounted sum
    obs_std_floor: float = 1e-4  # least std of an observation [ppo2: 1e-4; rsl_rl: 0.01]
    stagger: bool = True  # begin at random ages in simulators that have episode_length_buf

    seed: int = 1  # random seed of the whole run
    total_timesteps: float = 1e6  # total steps of all environments; annealing ends there
    run_name: str | None = None  # name of its folder in runs/; by default made of the settings
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    compile: Literal["auto", "yes", "no"] = "auto"  # the update; auto: in runs where it pays
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline: to disk)
    checkpoint_interval: int = 25  # iterations between checkpoints; the last is saved too
    keep_checkpoints: bool = False  # keep each of them, too, as checkpoint-STEP.pt

    hidden: tuple[int, ...] = (64, 64)  # units in each hidden layer [rsl_rl: 512 256 128]
    activation: Literal["tanh", "elu"] = "tanh"  # of hidden layers [ppo2: tanh; rsl_rl: elu]
    init_std: float = 0.6  # standard deviation of actions at first [ppo2: 1]
    num_steps: int = 128  # steps per environment and iteration, T [rsl_rl: 24]
    num_minibatches: int = 32  # minibatches per epoch [ppo2: 32; rsl_rl: 4]
    update_epochs: int = 10  # passes over a batch, K [ppo2: 10; rsl_rl: 5]
    learning_rate: StepSize = 3e-4  # Adam's step size, at first [paper: 3e-4; rsl_rl: 1e-3]
    target_kl: float = 0.0  # adapt the step size to this KL [rsl_rl: 0.01; 0: anneal it instead]
    gamma: float = 0.99  # discount factor [paper: 0.99]
    gae_lambda: float = 0.95  # advantages look ahead one step at 0, all steps at 1 [paper: 0.95]
    clip_coef: float = 0.2  # clip range of the ratio, epsilon [paper: 0.2]
    clip_vloss: bool = True  # limit the change of values to clip_coef [ppo2; not in the paper]
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 [ppo2: 0; rsl_rl: 0.01]
    vf_coef: float = 0.5  # weight of the value loss (half a squared error), c1 [ppo2: 0.5]
    max_grad_norm: float = 0.5  # maximum norm of the whole gradient [ppo2: 0.5; rsl_rl: 1]

    def __post_init__(self) -> None:
        check_settings(self)


def network(inputs: int, outputs: int, gain: float, args: Args) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (*args.hidden, outputs):
        layer = nn.Linear(inputs, size)
        # Detail 2/37: orthogonal and constant initialization [a2c/utils.py L20]
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh() if args.activation == "tanh" else nn.ELU()]
        inputs = size
    layer.weight.data *= gain / 2**0.5  # the last one. 0.01: a new policy almost ignores its input
    return nn.Sequential(*layers[:-1])  # whose output has no activation


class Normalizer(nn.Module):
    """Mean and population variance of all rows so far, saved with the weights."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.tensor(1e-4))

    def update(self, x: Tensor) -> None:
        """Merge the rows of `x`, (rows, ...), of all processes (Chan et al. 1979)."""
        # The number of rows, the sum of their deviations and that of the squares: what is shared.
        moments = torch.zeros(3, *self.mean.shape, dtype=torch.float64, device=x.device)
        for rows in x.split(2**14):  # all at once would take twelve times the memory of `x`
            deviations = (rows - self.mean).double()
            powers = [torch.ones_like(deviations), deviations, deviations**2]
            moments += torch.stack(powers).sum(1)
        count, delta, square = all_sum(moments)
        delta, square = delta / count, square / count  # means over the rows
        share = count / (self.count + count)
        change = (square - delta**2 - self.var) * share + delta**2 * share * (1 - share)
        self.count += count.flatten()[0]
        self.mean += delta * share
        self.var += change


class Agent(nn.Module):
    """A Gaussian policy, a value function, and the statistics of what they see.

    A subclass may have another policy: `act` draws actions, `evaluate_actions` has their
    probabilities, and `forward` is what is deployed. `layout` describes the simulator: the sizes
    of the parts of its observations, in the order of their columns, and the bounds of its actions.
    """

    def __init__(self, layout: dict[str, Any], args: Args) -> None:
        super().__init__()
        sizes = [*layout["parts"].values()]
        columns = dict(zip(layout["parts"], torch.arange(sum(sizes)).split(sizes)))  # of each part
        for role in ("policy_obs", "value_obs"):
            chosen = getattr(args, role) or tuple(columns)
            if not set(chosen) <= columns.keys() or len(set(chosen)) < len(chosen):
                flag = f"--{role.replace('_', '-')} ({' '.join(chosen)})"
                raise UsageError(f"{flag} must be among {', '.join(columns)}, each once.")
            self.register_buffer(role, torch.cat([columns[name] for name in chosen]))
        self.register_buffer("low", torch.tensor(layout["low"]))
        self.register_buffer("high", torch.tensor(layout["high"]))
        self.obs_stats, self.return_stats = Normalizer(sum(sizes)), Normalizer()
        self.obs_std_floor = args.obs_std_floor
        # Detail 26/37: separate networks [ppo2/defaults.py L12]
        self.policy = network(len(self.policy_obs), len(self.low), 0.01, args)
        self.value = network(len(self.value_obs), 1, 1.0, args)
        # Detail 24/37: state-independent log std (init_std) [distributions.py L104-105]
        self.log_std = nn.Parameter(torch.full(self.low.shape, math.log(args.init_std)))

    def normalize_obs(self, raw_obs: Tensor) -> Tensor:
        # Detail 28/37: observation normalization (obs_std_floor) [vec_env/vec_normalize.py L36-42]
        obs = (raw_obs - self.obs_stats.mean) / (self.obs_stats.var + self.obs_std_floor**2).sqrt()
        # Detail 29/37: observation clipping [common/vec_env/vec_normalize.py L39]
        return obs.clamp(-10, 10)

    def get_mean(self, obs: Tensor) -> Tensor:
        return self.policy(obs.index_select(-1, self.policy_obs))

    def get_value(self, obs: Tensor) -> Tensor:
        return self.value(obs.index_select(-1, self.value_obs)).squeeze(-1)

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions (N, A) for normalized obs (N, D), made of standard normal noise (N, A)."""
        return self.get_mean(obs) + self.log_std.exp() * noise

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of actions (..., A) for obs (..., D), and entropies, each (...)."""
        # Detail 23/37: normal distribution [common/distributions.py L96-106]
        policy = Normal(self.get_mean(obs), self.log_std.exp(), validate_args=False)
        # Detail 25/37: independent action components [common/distributions.py L238-246]
        return policy.log_prob(actions).sum(-1), policy.entropy().sum(-1)

    def forward(self, raw_obs: Tensor) -> Tensor:
        """The most likely actions (N, A) for raw observations (N, D): what is deployed."""
        return self.get_mean(self.normalize_obs(raw_obs)).clamp(self.low, self.high)

    def get_metrics(self) -> Tensors:
        """What is logged of the policy itself."""
        return {"charts/action_std": self.log_std.exp().mean()}


def gae(rewards: Tensor, values: Tensor, next_values: Tensor, done: Tensor, args: Args) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2016, equations 11-16), all (T, N)."""
    advantages = rewards + args.gamma * next_values - values  # at first, the TD errors
    decay = args.gamma * args.gae_lambda * ~done
    for t in reversed(range(len(rewards) - 1)):
        # Detail 5/37: generalized advantage estimation (gamma, gae_lambda) [ppo2/runner.py L50-65]
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages


def normalize(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and std 1, with the population std (divisor n) as in ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


class Batch(NamedTuple):
    """What an update learns from: T * N steps of a rollout as rows, or B rows of a minibatch."""

    obs: Tensor  # (T*N, D), normalized
    actions: Tensor  # (T*N, A), not clipped
    logprobs: Tensor  # (T*N,); these and all below are of the weights that acted
    values: Tensor  # (T*N,)
    advantages: Tensor  # (T*N,)
    returns: Tensor  # (T*N,), targets for the values


def ppo_loss(agent: Agent, mb: Batch, args: Args) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated for descent), and debug variables."""
    logprobs, entropies = agent.evaluate_actions(mb.obs, mb.actions)
    logratio = logprobs - mb.logprobs
    ratio = logratio.exp()
    # Detail 7/37: advantage normalization [ppo2/model.py L136-139]
    advantages = normalize(mb.advantages)
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()
    # Detail 9/37: value function loss clipping (clip_vloss, clip_coef) [ppo2/model.py L68-75]
    values = agent.get_value(mb.obs)
    limit = args.clip_coef if args.clip_vloss else math.inf
    clipped_values = mb.values + (values - mb.values).clamp(-limit, limit)
    v_loss = 0.5 * torch.max((values - mb.returns) ** 2, (clipped_values - mb.returns) ** 2).mean()
    entropy = entropies.mean()
    # Detail 10/37: overall loss and entropy bonus (ent_coef, vf_coef) [ppo2/model.py L91]
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    # Detail 12/37: debug variables [ppo2/model.py L87-88, L115-116]
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - logratio).mean(),  # k3 of Schulman 2020
        "losses/clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def ppo_update(
    agent: Agent, adam: Tensors, batch: Batch, minibatches: Tensor, step_size: Tensor, args: Args
) -> list[Tensors]:
    """Take an Adam step, in place, for each row of `minibatches` (M, B); return their metrics.

    `adam` holds all weights as one vector, of which the agent's parameters are views.
    """
    rows = []
    for chosen in minibatches:
        loss, metrics = ppo_loss(agent, Batch(*(x[chosen] for x in batch)), args)
        gradients = torch.autograd.grad(loss, list(agent.parameters()))
        # Extra: parallelized gradient update [ppo2/model.py L97-98]
        gradient = all_sum(torch.cat([x.flatten() for x in gradients])) / WORLD_SIZE
        metrics["losses/grad_norm"] = gradient.norm()
        # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
        gradient = gradient * (args.max_grad_norm / gradient.norm()).clamp(max=1.0)
        step = adam["step"].add_(1)
        mean = adam["mean"].lerp_(gradient, 1 - 0.9)
        square = adam["square"].lerp_(gradient**2, 1 - 0.999)
        bias_correction = ((1 - 0.999**step).sqrt() / (1 - 0.9**step)).float()
        # Detail 3/37: Adam epsilon [ppo2/model.py L98-100]
        direction = mean / (square.sqrt() + 1e-5)  # added before the bias correction, as in ppo2
        adam["weights"].sub_(step_size * bias_correction * direction)
        rows.append(metrics)
    return rows


def all_sum(x: Tensor) -> Tensor:
    """The sum of `x`, in place, over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def adapted(learning_rate: float, kl: float, target: float) -> float:
    """A smaller step size after too large a change of the policy, a larger one after too small."""
    if kl > 2 * target:
        return min(learning_rate, max(learning_rate / 1.5, 1e-5))
    if kl < target / 2:
        return max(learning_rate, min(learning_rate * 1.5, 1e-2))
    return learning_rate


def train(
    args: Args | None = None,
    make: Any = None,
    resume: str | Path | None = None,
    agent_class: type[Agent] = Agent,
    update: Callable[..., list[Tensors]] | None = None,
    on_iteration: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Train an agent in the simulator of the settings, or in what `make` returns.

    `resume` is the folder of a run to continue, in new episodes. Returns `agent`; the last
    `episodes` of this process, each {"global_step", "return", "length"}; `updates`, the metrics of
    iterations; `args`; `run_dir`. After each iteration, `on_iteration` gets the same. `agent_class`
    takes the place of `Agent`, and `update` that of `ppo_update`.
    """
    saved = load_checkpoint(resume, agent_class) if resume is not None else {}
    args = args or saved.get("args") or Args()
    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as resources:
        parts = Parts(make, agent_class, update or ppo_update, on_iteration)
        return learn(args, parts, saved, resources)


class Parts(NamedTuple):
    """What may be another one in a run of yours; see `train`."""

    make: Any
    agent_class: type[Agent]
    update: Callable[..., list[Tensors]]
    on_iteration: Callable[[dict[str, Any]], object] | None


def learn(args: Args, parts: Parts, saved: Saved, resources: ExitStack) -> dict[str, Any]:
    """Do what `train` says, which closes what is put on `resources`, even after an error."""
    # --- Device, simulator, and what has been done ---
    resources.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)  # more would fight with the simulator's threads
    if WORLD_SIZE > 1:
        dist.init_process_group()
        resources.callback(dist.destroy_process_group)
    episodes, updates = saved.get("episodes", []), saved.get("updates", [])
    global_step = updates[-1]["global_step"] if updates else 0
    batch_size = args.num_steps * args.num_envs
    finished = global_step // (batch_size * WORLD_SIZE)  # iterations
    num_iterations = int(args.total_timesteps // (batch_size * WORLD_SIZE))
    rng = np.random.default_rng([args.seed, RANK, finished])
    sim_seed, noise_seed = rng.integers(2**31, size=2).tolist()
    sim = make_simulator(resources, args, args.num_envs, sim_seed, parts.make)
    args = called(args, parts.make, sim.envs)  # how folder, log and checkpoint name the simulator
    if args.stagger:
        sim.stagger()
    device = sim.device

    # --- Agent and optimizer: new, or from the checkpoint; the same in all processes ---
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(args.seed)  # not of a GPU: simulators draw there
        agent = saved["agent"] if saved else parts.agent_class(sim.layout, args)
    if saved:
        check_saved(sim, args, saved)
    warn_of_settings(args, agent)
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
    learning_rate = args.learning_rate
    if saved and saved["args"].target_kl and learning_rate == saved["args"].learning_rate:
        learning_rate = saved["learning_rate"]  # which the KL has changed
    generator = torch.Generator(device).manual_seed(noise_seed)
    compiles = pays_to_compile(args, num_iterations)
    update = compiled(parts.update, device) if compiles else parts.update

    # --- Tensors for a rollout (T, N, ...) ---
    T, N = args.num_steps, args.num_envs
    raw_obs = torch.zeros(T + 1, *sim.obs.shape, device=device)
    raw_final_obs = torch.zeros(T, *sim.obs.shape, device=device)  # before a reset
    actions = torch.zeros(T, N, len(agent.low), device=device)
    rewards, sums = torch.zeros(2, T, N, device=device)
    # `acts` is False where a step ignores the action and only begins an episode, see Simulator.
    acts, terminated, truncated = torch.zeros(3, T, N, dtype=torch.bool, device=device)
    returns, lengths, discounted = torch.zeros(3, N, device=device)  # of the running episodes

    run_dir, run_id, writer = open_run(resources, args, saved, global_step)
    result = dict(agent=agent, episodes=episodes, updates=updates, args=args, run_dir=run_dir)
    checkpoint = resources.enter_context(Checkpoint(run_dir, args.keep_checkpoints, saved))

    def keep(to_disk: bool) -> None:
        state = {
            "args": vars(args),
            "layout": sim.layout,
            "agent": agent.state_dict(),
            "adam": adam,
            "learning_rate": learning_rate,
            "episodes": episodes,
            "updates": updates,
            "run_id": run_id,
        }
        checkpoint.keep(state, to_disk)

    keep(to_disk=not saved)  # so that a run can be resumed whenever it is stopped
    iterations = range(finished + 1, num_iterations + 1)
    progress = tqdm(iterations, initial=finished, total=num_iterations, disable=RANK > 0)
    for iteration in resources.enter_context(progress):
        # --- Collect: T steps in all environments, with fixed weights ---
        start_time = time.perf_counter()
        num_before = len(episodes)
        with torch.no_grad():
            noise = torch.randn(actions.shape, generator=generator, device=device)
            # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
            for t in range(T):
                acts[t] = sim.acts
                raw_obs[t] = sim.obs
                actions[t] = agent.act(agent.normalize_obs(raw_obs[t]), noise[t])
                # Detail 27/37: action clipping and storage [common/wrappers.py L21-26]
                step = sim.step(actions[t].clamp(agent.low, agent.high))
                raw_final_obs[t], rewards[t], terminated[t], truncated[t] = step
        raw_obs[T] = sim.obs
        done = terminated | truncated
        # A step that only begins an episode is no experience, and nothing below may use it.
        rewards.masked_fill_(~acts, 0.0)
        acted = acts.flatten().nonzero().flatten()  # the samples that are experience
        check_numbers(raw_obs, raw_final_obs, truncated & ~terminated, rewards, iteration)

        # --- Episodes, and rewards: scaling ---
        for t in range(T):
            global_step += N * WORLD_SIZE
            returns += rewards[t]
            lengths += acts[t]
            discounted = args.gamma * discounted + rewards[t]
            sums[t] = discounted
            for total, length in torch.stack([returns, lengths], 1)[done[t]].tolist():
                ended = {"global_step": global_step, "return": total, "length": int(length)}
                episodes.append(ended)
            returns, lengths, discounted = (x * ~done[t] for x in (returns, lengths, discounted))
        scaled = rewards
        if args.scale_rewards:
            agent.return_stats.update(sums.flatten()[acted])
            # Detail 30/37: reward scaling (scale_rewards) [vec_env/vec_normalize.py L26-33]
            scaled = rewards / (agent.return_stats.var + 1e-8).sqrt()
            # Detail 31/37: reward clipping (scale_rewards) [vec_normalize.py L32]
            scaled = scaled.clamp(-10, 10)

        # --- Advantages: values of the rollout, then GAE ---
        with torch.no_grad():
            obs = agent.normalize_obs(raw_obs)
            values = agent.get_value(obs)  # (T + 1, N)
            logprobs, _ = agent.evaluate_actions(obs[:-1], actions)
            next_values = values[1:].clone()
            # Deviation: time limits are not failures
            next_values[truncated] = agent.get_value(agent.normalize_obs(raw_final_obs[truncated]))
            next_values[terminated] = 0.0
            advantages = gae(scaled, values[:-1], next_values, done, args)
        targets = advantages + values[:-1]
        samples = obs[:-1], actions, logprobs, values[:-1], advantages, targets
        batch = Batch(*(x.flatten(0, 1) for x in samples))

        # --- Update: K epochs of minibatches ---
        # Detail 4/37: learning rate annealing (learning_rate, target_kl) [ppo2/ppo2.py L133-135]
        if not args.target_kl:
            learning_rate = args.learning_rate * (1 - (iteration - 1) / num_iterations)
        step_size = torch.tensor(learning_rate, device=device)
        rows: list[Tensors] = []
        agent.train()
        for _ in range(args.update_epochs):
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            order = acted[torch.randperm(len(acted), generator=generator, device=device)]
            # Some again, in place of what is no experience: at most two of three steps (the
            # beginning of an episode, one action, the beginning of the next), or one of two.
            order = order.repeat(3)[:batch_size]
            for minibatches in order.view(args.num_minibatches, -1).split(STEPS_PER_CALL):
                rows += update(agent, adam, batch, minibatches, step_size, args)
        agent.eval()
        agent.obs_stats.update(raw_obs[:-1].flatten(0, 1)[acted])

        # --- Log and save: means over all processes ---
        batch = Batch(*(x[acted] for x in batch))
        with torch.no_grad():
            logratio = agent.evaluate_actions(batch.obs, batch.actions)[0] - batch.logprobs
        metrics = {name: torch.stack([row[name] for row in rows]).mean() for name in rows[0]} | {
            "losses/explained_variance": 1 - batch.advantages.var() / (batch.returns.var() + 1e-8),
            "check/target_std": batch.returns.std(),  # what explained variance is relative to
            "check/update": (normalize(logratio) * normalize(batch.advantages)).mean(),  # positive
            "check/first_kl": rows[0]["losses/approx_kl"],  # 0 before the first step
            "check/kl": (logratio.exp() - 1 - logratio).mean(),  # of the whole iteration
            **{name: x.detach() for name, x in agent.get_metrics().items()},
        }
        means = all_sum(torch.stack([*metrics.values()])) / WORLD_SIZE
        metrics = dict(zip(metrics, means.tolist()))
        metrics["charts/learning_rate"] = learning_rate
        # Read here, where a GPU has done what it was told.
        metrics["charts/SPS"] = WORLD_SIZE * batch_size / (time.perf_counter() - start_time)
        if bad := [name for name, x in metrics.items() if not math.isfinite(x)]:
            raise UsageError(f"Not finite at step {global_step}: {', '.join(bad)}.")
        # Extra: adaptive step size (target_kl) [rsl_rl, there after each minibatch]
        if args.target_kl:
            learning_rate = adapted(learning_rate, metrics["check/kl"], args.target_kl)
        metrics |= means_of(episodes[num_before:])
        # A simulator's terms come first, so that none of them can take the name of ours.
        updates.append({**sim.take_terms(), "global_step": global_step, **metrics})
        log(writer, progress, updates[-1], episodes)
        del episodes[:-EPISODES_KEPT]
        keep(iteration == num_iterations or iteration % args.checkpoint_interval == 0)
        if parts.on_iteration:
            parts.on_iteration(result)
    return result


# === The algorithm ends here ===
# Below: simulators, speed, logs, checkpoints, the use of a policy, `main`.


class Simulator:
    """Any simulator as tensors on a device, whichever way it begins the next episode.

    NEXT_STEP (EnvPool): the step after an end ignores its action and only begins an episode. `acts`
    says which environments will act. SAME_STEP: a step returns the first observation of the next
    episode; the last one is in `infos`, or nowhere (Isaac Lab, mjlab by default). Then the
    observation before the step stands in for it, as in rsl_rl and skrl.
    """

    def __init__(
        self, envs: Any, space: Any, num_envs: int, seed: int | None, device: torch.device
    ) -> None:
        self.envs, self.space, self.num_envs, self.device = envs, space, num_envs, device
        mode = autoreset_mode(envs)
        if mode == AutoresetMode.DISABLED:
            raise UsageError("The simulator must begin episodes itself: change autoreset_mode.")
        self.next_step = mode == AutoresetMode.NEXT_STEP
        if not str(space.dtype).startswith("float") or len(space.shape) != 1:
            hint = "try recipes/discrete_actions.py, ppo_multidiscrete.py or ppo_atari.py"
            raise UsageError(f"Actions are {space}, not vectors of floats: {hint}.")
        low = np.full(space.shape, space.low).tolist()
        high = np.full(space.shape, space.high).tolist()
        returned = envs.reset(seed=seed)
        if not isinstance(returned, tuple) or len(returned) != 2:
            came = len(returned) if isinstance(returned, tuple) else type(returned).__name__
            raise UsageError(f"reset must return obs and infos. It returned {came}.")
        parts = self.parts(returned[0], num_envs)
        sizes = {name: x.shape[1] for name, x in parts.items()}
        if not sum(sizes.values()):
            raise UsageError("reset returned observations without a number.")
        self.layout: dict[str, Any] = {"parts": sizes, "low": low, "high": high}
        self.in_numpy = not any(isinstance(x, Tensor) for x in parts_of(returned[0]).values())
        self.acts = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.obs = torch.cat([*parts.values()], dim=1)
        self.begins_all = False  # whether `reset` begins all episodes, and none in its middle
        self.terms: dict[str, list[Tensor]] = {}  # what it has said since `take_terms`
        self.named: set[str] = set()  # terms of which a NaN has been reported

    def array(self, name: str, x: Any) -> Tensor:
        try:
            return torch.as_tensor(x, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{name} are a {type(x).__name__}: {error}.") from error

    def column(self, name: str, x: Any) -> Tensor:
        """A number for each environment, (N,); a column (N, 1) is taken as well."""
        x, rows = self.array(name, x), self.num_envs
        if x.shape not in ((rows,), (rows, 1)) and not x.numel() == rows == 1:
            raise UsageError(f"{name} have shape {tuple(x.shape)}: it must be ({rows},).")
        return x.reshape(rows)

    def parts(self, obs: Any, rows: int) -> Tensors:
        """The parts of observations, which are one or a Dict, each flattened to (N, ...)."""
        parts: Tensors = {}
        for name, x in parts_of(obs).items():
            if hasattr(x, "keys"):
                raise UsageError(f"Observations {name} have parts themselves: concatenate them.")
            part = self.array(name, x).float()
            if part.shape[:1] != (rows,):
                problem = f"{name} has shape {tuple(part.shape)}"
                raise UsageError(f"{problem}: it must have a row for each of {rows}.")
            parts[name] = part.flatten(1) if part.dim() > 1 else part[:, None]
        return parts

    def tensor(self, obs: Any, rows: int) -> Tensor:
        """Observations (N, ...), or the parts of Dict ones, flattened side by side: (N, D)."""
        parts, expected = self.parts(obs, rows), self.layout["parts"]
        sizes = {name: x.shape[1] for name, x in parts.items()}
        if sizes != expected:
            raise UsageError(f"Observations have sizes {sizes}, and those of reset {expected}.")
        return torch.cat([parts[name] for name in expected], dim=1)

    def step(self, actions: Tensor) -> tuple[Tensor, ...]:
        """Obs before a reset (N, D), rewards (N,), and whether terminated, truncated."""
        given = actions.numpy(force=True).astype(self.space.dtype) if self.in_numpy else actions
        returned = self.envs.step(given)
        if not isinstance(returned, tuple) or len(returned) != 5:
            came = len(returned) if isinstance(returned, tuple) else type(returned).__name__
            hint = f"It returned {came}; for rsl_rl's four values see recipes/rsl_rl_simulator.py."
            needs = "step must return obs, rewards, terminated, truncated and infos."
            raise UsageError(f"{needs} {hint}")
        next_obs, rewards, terminated, truncated, infos = returned
        if not isinstance(infos, dict):
            raise UsageError(f"infos of step must be a dict, and are a {type(infos).__name__}.")
        rewards = self.column("rewards", rewards).float()
        terminated = self.column("terminated", terminated).bool()
        truncated = self.column("truncated", truncated).bool()
        done = terminated | truncated
        if (time_outs := infos.get("time_outs")) is not None:
            # Some simulators renew them only in steps in which an episode ends.
            time_outs = self.column("time_outs", time_outs).bool()
            truncated = done & (truncated | time_outs)
            terminated = terminated & ~time_outs
        self.note_terms(infos)
        before = self.obs
        self.obs = self.tensor(next_obs, self.num_envs)
        last = infos.get("final_obs", infos.get("final_observation"))
        if self.next_step:
            self.acts = ~done
            final_obs = self.obs
        elif isinstance(terminal := infos.get("terminal"), dict) and "observations" in terminal:
            # mjlab's are only of ended episodes.
            final_obs, ended = self.obs.clone(), terminal["env_ids"]
            final_obs[ended] = self.tensor(terminal["observations"], len(ended))
        elif last is None:
            final_obs = before
        elif getattr(last, "dtype", None) == np.dtype(object):  # Gymnasium: only of ended episodes
            final_obs = self.obs.clone()
            for i in done.nonzero().flatten().tolist():
                parts = {name: np.asarray(x)[None] for name, x in parts_of(last[i]).items()}
                final_obs[i] = self.tensor(parts, 1)[0]
        else:
            final_obs = self.tensor(last, self.num_envs)
        return final_obs, rewards, terminated, truncated

    def stagger(self) -> None:
        """Let the running episodes have random ages, as rsl_rl does, or all would end at once."""
        own = getattr(self.envs, "unwrapped", self.envs)
        if hasattr(own, "episode_length_buf") and hasattr(own, "max_episode_length"):
            limit = int(own.max_episode_length)
            own.episode_length_buf[:] = torch.randint(limit, (self.num_envs,), device=self.device)

    def note_terms(self, infos: dict[str, Any]) -> None:
        """Note the terms of rewards, and whatever else a simulator says of a step in numbers."""
        for kind in ("log", "episode", "episodes"):
            terms = infos.get(kind)
            for key, x in terms.items() if isinstance(terms, dict) else ():
                name = str(key)
                if name.startswith("_"):
                    continue
                try:
                    x = torch.as_tensor(x, device=self.device).float()
                except (TypeError, ValueError, RuntimeError):
                    continue  # it is no number
                # Gymnasium: which environments have said it.
                said = terms.get(f"_{name}", infos.get(f"_{kind}"))
                if said is not None and x.shape[:1] == (self.num_envs,):
                    x = x[torch.as_tensor(said, device=self.device).bool()]
                if x.numel():
                    self.terms.setdefault(name, []).append(x.mean())

    def take_terms(self) -> dict[str, float]:
        """The means of what the simulator has said since the last call."""
        means = {name: torch.stack(x).mean().item() for name, x in self.terms.items()}
        self.terms = {}
        for name in [name for name, x in means.items() if not math.isfinite(x)]:
            del means[name]
            if name not in self.named:
                tqdm.write(f"The simulator says {name}, which is not finite: it is not logged.")
                self.named.add(name)
        return means


def parts_of(obs: Any) -> Any:
    """The parts of observations by their names: of a Dict, or of a TensorDict."""
    return {x: obs[x] for x in obs.keys()} if hasattr(obs, "keys") else {"obs": obs}  # noqa: SIM118


def autoreset_mode(envs: Any) -> AutoresetMode:
    """How a simulator begins the next episode. It says so in its metadata, by a name as well."""
    given = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if given is None and isinstance(envs, gym.vector.VectorEnv):
        mode = "the simulator does not name its autoreset_mode"
        print(f"Episodes begin in the next step, as in Gymnasium, because {mode}.")
        return AutoresetMode.NEXT_STEP
    if given is None:
        return AutoresetMode.SAME_STEP
    name = str(getattr(given, "value", given)).replace("_", "").lower()
    modes = {x.value.lower(): x for x in AutoresetMode}
    if name not in modes:
        known = ", ".join(x.name for x in AutoresetMode)
        raise UsageError(f"The simulator's autoreset_mode is {given}, not one of {known}.")
    return modes[name]


def called(args: Args, make: Any, envs: Any) -> Args:
    """The settings of a run. Where you make its simulator, `make` and `env_id` are its name."""
    if make:
        function = getattr(make, "func", make)  # of a partial function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if "<" in name:  # a lambda, or a function in a function, may make any simulator
            own = getattr(envs, "unwrapped", envs)
            registered = getattr(getattr(own, "spec", None), "id", None)  # by Gymnasium
            name += f" of {registered or type(own).__qualname__}"
        args = dataclasses.replace(args, make=f"{function.__module__}:{name}{given_to(make)}")
    return dataclasses.replace(args, env_id=args.make) if args.make else args


# Copied from ppo_continuous_action.py
def given_to(maker: Any) -> str:
    """Numbers and words that a partial function passes on: they tell simulators apart."""
    if not isinstance(maker, functools.partial):
        return ""
    words = [f"{x}" for x in maker.args if isinstance(x, int | float | str)]
    named = maker.keywords.items()
    words += [f"{name}={x}" for name, x in named if isinstance(x, int | float | str)]
    return f"({', '.join(words)})" if words else ""


def import_named(module: str, flag: str) -> Any:
    """Import a module that a flag names. What is missing inside of it keeps its traceback."""
    if not module or module.startswith("."):
        raise UsageError(f"{flag}: there is no module {module!r}: is it MODULE:FUNCTION?")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"{flag}: {error}: is it MODULE:FUNCTION?") from error


def make_simulator(
    resources: ExitStack, args: Args, num_envs: int, seed: int, make: Any = None, **options: Any
) -> Simulator:
    """The simulator that the settings name, or that `make` returns."""
    device = choose_device(args)
    # Simulators may draw from the global generators, which go on afterwards as they are here.
    gpus = [device] if device.type == "cuda" else []
    resources.enter_context(torch.random.fork_rng(gpus))
    resources.callback(np.random.set_state, np.random.get_state())
    torch.manual_seed(seed)
    np.random.seed(seed)
    if args.make and not make:
        module, _, name = args.make.partition(":")
        if not module or not name:
            raise UsageError(f"{args.make} is no function: is it MODULE:FUNCTION?")
        make = import_named(module, f"--make {args.make}")
        for part in name.split("."):
            make = getattr(make, part, None)
        if not callable(make):
            raise UsageError(f"--make: {module} has no function {name}: is it MODULE:FUNCTION?")
    is_own = bool(make)
    if is_own:
        takes = inspect.signature(make).parameters
        wanted = {name: x for name, x in options.items() if name in takes}
        envs = make(num_envs, seed, device, **wanted)
    elif args.backend == "envpool":
        cores = NUM_CORES // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        options |= {"num_envs": num_envs, "num_threads": max(1, min(num_envs, cores))}
        try:
            import envpool

            envs = envpool.make(args.env_id, "gymnasium", seed=seed, **options)
        except ImportError as error:
            hint = "(pip install envpool==1.2.5, or --backend gymnasium)"
            raise UsageError(f"{error} {hint}") from error
        except AssertionError as error:  # it does not know the environment
            raise UsageError(f"--env-id: {error}") from error
    else:
        if ":" in args.env_id:
            import_named(args.env_id.partition(":")[0], f"--env-id {args.env_id}")
        envs = gym.make_vec(args.env_id, num_envs, args.vectorization_mode, **options)
    own = getattr(envs, "unwrapped", envs)  # gym.make wraps a simulator as if it were one robot
    # The space of one robot's actions. Simulators without Gymnasium's name for it have another.
    space = getattr(envs, "single_action_space", getattr(own, "single_action_space", None))
    space = space or getattr(envs, "action_space", None)
    if not all(hasattr(envs, x) for x in ("reset", "step", "close")) or not space:
        needs = "reset, step, close and single_action_space"
        came = f"{args.make or 'make'} returned a {type(envs).__name__}"
        raise UsageError(f"{came}, which lacks some of {needs}.")
    resources.callback(envs.close)
    of_envpool = any(x.__module__.startswith("envpool.") for x in type(own).__mro__)
    of_gymnasium = isinstance(own, gym.vector.SyncVectorEnv | gym.vector.AsyncVectorEnv)
    seed = None if of_envpool else seed  # which EnvPool takes only when it is made
    try:
        inspect.signature(envs.reset).bind(seed=seed)
    except ValueError:
        pass  # written in C, it has no signature
    except TypeError as error:
        raise UsageError(f"{args.make or 'make'}: reset(seed=...) has {error}.") from error
    sim = Simulator(envs, space, num_envs, seed, device)
    sim.begins_all = not is_own or of_envpool or of_gymnasium
    return sim


def choose_device(args: Args) -> torch.device:
    """The device on which this process learns. On a machine with GPUs, each process has its own."""
    gpus = torch.cuda.device_count() if args.device != "cpu" and torch.cuda.is_available() else 0
    local_rank = int(os.environ["LOCAL_RANK"]) if WORLD_SIZE > 1 else 0
    if args.device == "cuda" and not gpus:
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    if 0 < gpus <= local_rank:
        raise UsageError(f"Each process needs its own GPU: --nproc-per-node {gpus} at most.")
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


def check_settings(args: Args) -> None:
    """Refuse numbers out of their range, and sizes that do not fit together."""
    if isinstance(args.compile, bool):  # as programs for version 6 say it
        object.__setattr__(args, "compile", "yes" if args.compile else "no")
    highest = {"gamma": 1, "gae_lambda": 1, "seed": 2**63 - 1}
    lowest = {"seed": 0, "num_steps": 2, "init_std": 1e-6}  # one step may be no experience
    for field in dataclasses.fields(args):
        value, kind = getattr(args, field.name), type(field.default)
        flag = f"--{field.name.replace('_', '-')} ({value})"
        low = lowest.get(field.name, 1 if kind is int else 0)
        high = highest.get(field.name, math.inf)
        if type(value) in (int, float) and not low <= value <= high:  # or if it is NaN
            raise UsageError(f"{flag} must be from {low} to {high}.")
        choices = get_args(field.type) if get_origin(field.type) is Literal else (value,)
        if value not in choices:
            raise UsageError(f"{flag} must be one of {', '.join(choices)}.")
    if min(args.hidden, default=1) < 1:
        raise UsageError(f"--hidden {args.hidden} must be positive.")
    batch = args.num_steps * args.num_envs
    if batch % args.num_minibatches or batch == args.num_minibatches:  # one sample has std 0
        flag = f"--num-steps * --num-envs ({batch})"
        raise UsageError(f"{flag} must be 2, 3, 4... times --num-minibatches.")
    if not batch * WORLD_SIZE <= args.total_timesteps < math.inf:
        least = f"at least {batch * WORLD_SIZE}, the steps of one iteration"
        raise UsageError(f"--total-timesteps must be finite, and {least}.")


def check_saved(sim: Simulator, args: Args, saved: Saved) -> None:
    """Refuse to go on in a simulator with other spaces, or with settings of another agent."""
    if repr(saved["layout"]) != repr(sim.layout):  # the order of parts counts, too
        raise UsageError(f"{saved['run_dir']} was trained in a simulator with other spaces.")
    if args.run_name not in (None, saved["args"].run_name):
        raise UsageError(f"--run-name: a run stays in its folder, {saved['run_dir']}.")
    for name in ("hidden", "activation", "init_std", "obs_std_floor", "policy_obs", "value_obs"):
        if getattr(args, name) != getattr(saved["args"], name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is that of {saved['run_dir']}, whose agent has been made.")


def check_numbers(
    raw_obs: Tensor, last_obs: Tensor, is_last: Tensor, rewards: Tensor, iteration: int
) -> None:
    """Refuse numbers that are NaN or infinite.

    Observations are (T + 1, N, D), and rewards (T, N). Of those before a reset, `last_obs`
    (T, N, D), only some are used: where `is_last` (T, N) is true.
    """
    bad = ~raw_obs.isfinite().all(-1)
    bad[1:] |= ~rewards.isfinite()
    for t, i in bad.nonzero()[:1].tolist():
        step = (iteration - 1) * len(rewards) + t
        raise UsageError(f"Step {step} of environment {i}: observation or reward is not finite.")
    for t, i in (is_last & ~last_obs.isfinite().all(-1)).nonzero()[:1].tolist():
        step = (iteration - 1) * len(rewards) + t + 1
        raise UsageError(f"Step {step} of environment {i}: the last observation is not finite.")


def warn_of_settings(args: Args, agent: Agent) -> None:
    """Say what is allowed, and seldom meant."""
    if RANK > 0:
        return
    if args.clip_vloss and not args.scale_rewards:
        hint = "--no-clip-vloss if returns are much larger than that"
        print(f"Values change by {args.clip_coef} at most, and rewards are not scaled: {hint}.")
    low, high = agent.low, agent.high
    sizes = torch.cat([-low, high])  # how far actions may go, in each direction
    if type(agent) is Agent and (sizes.min() < 0.1 or (sizes[sizes.isfinite()] > 10).any()):
        bounds = f"{low.tolist()} and {high.tolist()}"
        about = f"mean 0 and std {args.init_std}, and actions lie between {bounds}"
        print(f"A new policy has {about}: let the simulator scale them.")


COMPILE_FROM = 20_000  # Adam steps of a run that repay the time it takes to compile them


def pays_to_compile(args: Args, num_iterations: int) -> bool:
    """Whether to compile the update of a run with so many iterations, resumed ones included."""
    if WORLD_SIZE > 1:  # they wait for each other in each update, which is not compiled
        if args.compile == "yes":
            raise UsageError("--compile yes is for one process, without torchrun.")
        return False
    adam_steps = num_iterations * args.update_epochs * args.num_minibatches
    if args.compile == "auto" and adam_steps < COMPILE_FROM:
        print("A run this short ends sooner without compiling its update (--compile yes compiles).")
        return False
    return args.compile != "no"


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
            options = {"cpp_wrapper": device.type == "cpu", "size_asserts": False}
            current = torch.compile(function, options=options)
            return current(*inputs)
        except Exception as error:  # whatever a compiler can raise
            reason = str(error).partition("\n")[0]
            tqdm.write(f"The update could not be compiled, so it takes longer: {reason}")
            current = function
            return function(*inputs)

    return call


def open_run(
    resources: ExitStack, args: Args, saved: Saved, step: int
) -> tuple[Path, str, SummaryWriter | None]:
    """The folder of a run, its id at Weights & Biases, and its log, of the first process."""
    env = re.sub(r"[^\w.-]", "-", args.make or args.env_id)
    names = [saved.get("run_id", f"{env}__{SCRIPT.stem}__{args.seed}__{time.time_ns()}")]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(names)  # clocks differ: all have that of the first process
    run_id = names[0]
    run_dir = saved.get("run_dir", Path("runs", args.run_name or run_id))
    if RANK > 0:
        return run_dir, run_id, None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # The operating system frees this lock when the process ends, even if it is killed.
        resources.enter_context(filelock.FileLock(run_dir / "lock", timeout=0))
    except filelock.Timeout as error:
        raise UsageError(f"{run_dir} is in use: another process trains there.") from error
    except OSError as error:
        raise UsageError(f"{run_dir}: {error.strerror}: change --run-name, or --resume.") from error
    if not saved and (run_dir / "checkpoint.pt").exists():
        raise UsageError(f"{run_dir} has a run already: change --run-name, or --resume it.")
    if args.track:
        import wandb

        about = {"id": run_id, "name": run_dir.name, "config": vars(args), "resume": "allow"}
        try:
            resources.enter_context(wandb.init(**about, sync_tensorboard=True))
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases: {error} (or WANDB_MODE=offline)") from error
    writer = resources.enter_context(SummaryWriter(run_dir, purge_step=step + 1))  # hide lost steps
    rows = [f"| {setting} | {value} |" for setting, value in vars(args).items()]
    writer.add_text("hyperparameters", "\n".join(["| setting | value |", "|-|-|", *rows]))
    # Which details this file has, by their tags: a copy of it may have others.
    source = SCRIPT.read_text(encoding="utf-8") if SCRIPT.is_file() else ""
    writer.add_text("details", "  \n".join(re.findall(r"# ((?:Detail|Extra|Dev).*: .*)", source)))
    print(f"Logs and checkpoints: {run_dir}{' (new episodes begin)' if saved else ''}")
    size = args.num_steps * args.num_envs * WORLD_SIZE  # of an iteration
    if step // size >= args.total_timesteps // size:
        print(f"Step {step} was the last one: raise --total-timesteps to train on.")
    return run_dir, run_id, writer


class Checkpoint:
    """The state after the last whole iteration. It is on disk when a run ends, in whichever way.

    An error, or Ctrl-C, may come in the middle of an iteration, which has changed weights by then.
    """

    def __init__(self, run_dir: Path, keep_all: bool, saved: Saved) -> None:
        self.run_dir, self.keep_all = run_dir, keep_all
        self.state: Saved = {}
        self.on_disk = self.step_of(saved) if saved else None  # the step of what `place` has
        self.place = saved.get("path", run_dir)

    def __enter__(self) -> "Checkpoint":
        return self

    def keep(self, state: Saved, to_disk: bool) -> None:
        if RANK > 0:
            return
        self.state = copied(state)
        if to_disk:
            self.save()

    def step_of(self, state: Saved) -> int:
        return state["updates"][-1]["global_step"] if state["updates"] else 0

    def save(self) -> None:
        torch.save(self.state, self.run_dir / "checkpoint.tmp")
        path = self.run_dir / "checkpoint.pt"
        os.replace(self.run_dir / "checkpoint.tmp", path)  # always a whole one
        self.on_disk, self.place = self.step_of(self.state), self.run_dir
        if self.keep_all:
            shutil.copy(path, self.run_dir / f"checkpoint-{self.on_disk}.pt")

    def __exit__(self, kind: Any, *_: Any) -> None:
        if not self.state:
            return
        if self.step_of(self.state) != self.on_disk:
            self.save()
        if kind in (KeyboardInterrupt, SystemExit):
            where = f"Interrupted at step {self.on_disk}. To continue: --resume {self.place}"
            print(where, file=sys.stderr)


def copied(x: Any) -> Any:
    """The state of a run at this moment: the next update changes its tensors in place."""
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, dict):
        return {name: copied(y) for name, y in x.items()}
    return list(x) if isinstance(x, list) else x


def means_of(ended: list[dict]) -> dict[str, float]:
    """Means of episodes of this process, and their number, if there are any."""
    if not ended:
        return {}
    return {
        "charts/episodic_return": float(np.mean([x["return"] for x in ended])),
        "charts/episodic_length": float(np.mean([x["length"] for x in ended])),
        "charts/episodes": len(ended),
    }


def log(writer: SummaryWriter | None, progress: tqdm, metrics: dict, episodes: list[dict]) -> None:
    """Write the metrics of an iteration, and show the return of the last episodes."""
    for name, value in metrics.items() if writer else ():
        writer.add_scalar(name, value, metrics["global_step"])
    if episodes:
        mean = np.mean([x["return"] for x in episodes[-100:]])
        progress.set_postfix_str(f"return {mean:.5g}", refresh=False)


def load_checkpoint(run_dir: str | Path, agent_class: type[Agent] = Agent) -> Saved:
    """All that a run has saved, with its `args` and `agent`. Loading it runs no code.

    `run_dir` is its folder, or one of several checkpoints there.
    """
    path = Path(run_dir)
    path = path if path.suffix == ".pt" else path / "checkpoint.pt"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        args = Args(**saved["args"])
        agent = agent_class(saved["layout"], args)
        agent.load_state_dict(saved["agent"])
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = f"{type(error).__name__} {error}"[:300]
        problem = "missing, damaged, or from another script or version"
        raise UsageError(f"{path} is {problem}: {reason}") from error
    about = {"run_dir": path.parent, "path": Path(run_dir)}
    return saved | {"args": args, "agent": agent.eval()} | about


class Policy(nn.Module):
    """A trained policy: the most likely actions (N, A) for raw observations (N, ...).

    `parts` are the names and sizes of what it sees. It takes them side by side, in this order, or
    all columns of the simulator, as tensors or as NumPy arrays; or a Dict that has these parts,
    with a row for each robot. It can be traced and scripted.
    """

    def __init__(self, agent: Agent, layout: dict[str, Any], args: Args) -> None:
        super().__init__()
        self.agent = agent
        seen = args.policy_obs or tuple(layout["parts"])
        self.parts = {name: size for name, size in layout["parts"].items() if name in seen}
        self.register_buffer("columns", agent.policy_obs.sort().values)
        # For each column of the simulator, its place among these. What the policy does not see is
        # the column of zeros that `forward` adds at the end.
        places = torch.full_like(agent.obs_stats.mean, len(self.columns), dtype=torch.long)
        places[self.columns] = torch.arange(len(self.columns))
        self.register_buffer("places", places)
        self.num_columns, self.sees = sum(layout["parts"].values()), f"{self.parts}"

    def forward(self, obs: Tensor) -> Tensor:
        if obs.shape[-1] == self.num_columns:
            return self.agent(obs)
        if obs.shape[-1] != len(self.columns):
            raise ValueError(f"{obs.shape[-1]} columns, and the policy sees {self.sees}.")
        return self.agent(nn.functional.pad(obs, (0, 1)).index_select(-1, self.places))

    def __call__(self, obs: Any) -> Any:
        if hasattr(obs, "keys"):
            parts = [obs[name].reshape(len(obs[name]), -1) for name in self.parts]
            in_numpy = isinstance(parts[0], np.ndarray)
            return self(np.concatenate(parts, 1) if in_numpy else torch.cat(parts, 1))
        if isinstance(obs, Tensor):
            return super().__call__(obs.float())
        return super().__call__(torch.as_tensor(obs, dtype=torch.float32)).numpy()

    def extra_repr(self) -> str:
        return f"parts={self.sees}"


def load_policy(run_dir: str | Path, agent_class: type[Agent] = Agent) -> Policy:
    """The trained policy of a run, on the CPU: `load_policy(run_dir)(obs)`, see Policy."""
    saved = load_checkpoint(run_dir, agent_class)
    return Policy(saved["agent"], saved["layout"], saved["args"]).eval().requires_grad_(False)


def evaluate(
    run_dir: str | Path,
    episodes: int = 10,
    video: bool = False,
    make: Any = None,
    args: Args | None = None,
    agent_class: type[Agent] = Agent,
    video_length: int = 1000,
) -> list[float]:
    """Play one episode in each of so many environments, with the most likely actions.

    Returns their returns. Only Gymnasium and EnvPool are known to begin all episodes in `reset`:
    elsewhere, the first one of each environment may have begun before, and does not count. `video`
    films one, up to `video_length` frames: what `make` returns then needs `render()`.
    """
    for flag, count in (("--eval-episodes", episodes), ("--video-length", video_length)):
        if count < 1:
            raise UsageError(f"{flag} ({count}) must be at least 1.")
    saved = load_checkpoint(run_dir, agent_class)
    args = args or saved["args"]
    frames = []
    with ExitStack() as resources, torch.no_grad():
        options = {"render_mode": "rgb_array"} if video else {}
        if video:
            let_draw()
        sim = make_simulator(resources, args, episodes, 0, make, **options)
        check_saved(sim, args, saved)
        agent = saved["agent"].to(sim.device)
        returns = torch.zeros(episodes, device=sim.device)
        begun = torch.full((episodes,), sim.begins_all, device=sim.device)
        over = torch.zeros_like(begun)
        steps = 0
        while not over.all():
            if steps == EVALUATION_STEPS:
                rest = f"{int((~over).sum())} of {episodes} episodes"
                raise UsageError(f"{rest} have not ended in {EVALUATION_STEPS} steps.")
            playing = begun & ~over & sim.acts
            if video and playing[0] and len(frames) < video_length:
                frames.append(picture(sim.envs))
            _, rewards, terminated, truncated = sim.step(agent(sim.obs))
            sim.terms.clear()  # nobody logs them
            returns += rewards.where(playing, 0)  # what comes before or after may say NaN
            done = terminated | truncated
            over |= playing & done
            begun |= done
            steps += 1
    if video:
        from gymnasium.utils.save_video import save_video

        folder = f"{saved['run_dir']}/videos"
        save_video(frames, folder, lambda _: True, fps=30)
        print(f"Video: {folder}/rl-video-episode-0.mp4")
    print(f"Return {returns.mean():.5g} ± {returns.std(correction=0):.3g} in {episodes} episodes")
    return returns.tolist()


def picture(envs: Any) -> np.ndarray:
    """A picture of the first environment, or the one that shows all."""
    try:
        drawn = envs.render()
    except (AttributeError, NotImplementedError):
        drawn = None
    if drawn is None:
        hint = "its render() must return pictures (`make` may take render_mode)"
        raise UsageError(f"--capture-video cannot film a {type(envs).__name__}: {hint}.")
    first = drawn[0] if isinstance(drawn, list | tuple) else drawn
    first = np.asarray(first.cpu() if isinstance(first, Tensor) else first)
    return first[0] if first.ndim == 4 else first


def let_draw() -> None:
    """Let MuJoCo and EnvPool draw without a screen."""
    if sys.platform == "linux" and os.environ.setdefault("MUJOCO_GL", "egl") == "egl":
        for library in ("libEGL.so.1", "libGL.so.1"):
            with suppress(OSError):  # MuJoCo says if it misses them
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # where EnvPool looks for them


@dataclasses.dataclass(frozen=True)
class Command:
    args: tyro.conf.OmitArgPrefixes[Args]
    resume: str | None = None  # continue the run in this folder; other flags change its settings
    evaluate: str | None = None  # play episodes with the policy in this folder; no training
    eval_episodes: int = 10  # number of episodes, with --evaluate
    capture_video: bool = False  # film the first episode, with --evaluate
    video_length: int = 1000  # frames of the film, with --capture-video


def main() -> None:
    """Read the command line and run. The user's mistakes end in one sentence, exit code 2."""
    for name in ("SIGTERM", "SIGHUP"):  # a cluster, a closed terminal: close the simulator
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores it
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    sys.path.append("")  # the current folder, for --make
    # The settings of a run that is continued are the defaults of the flags, so it is read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="folder")
    try:
        folder = parser.parse_known_args()[0].folder
        args = load_checkpoint(folder)["args"] if folder is not None else Args()
        flags = ["--compile=no" if x == "--no-compile" else x for x in sys.argv[1:]]  # version 6
        command = tyro.cli(Command, args=flags, default=Command(args))
        if command.resume and command.evaluate:
            raise UsageError("--resume trains, and --evaluate does not: choose one of them.")
        if command.evaluate is not None:
            for name, value in vars(command.args).items():
                if value != getattr(args, name) and name not in PLAYED:
                    flag = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{flag} is for training: --evaluate does not use it.")
            film = {"video": command.capture_video, "video_length": command.video_length}
            evaluate(folder, command.eval_episodes, args=command.args, **film)
        elif command != Command(command.args, resume=command.resume):
            raise UsageError("--eval-episodes, --capture-video, --video-length need --evaluate.")
        else:
            run_dir = train(command.args, resume=folder)["run_dir"]
            if RANK == 0:
                print(f"Next: --evaluate {run_dir}, or tensorboard --logdir {run_dir}")
    except KeyboardInterrupt:
        sys.exit(130)
    except (UsageError, gym.error.Error) as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
