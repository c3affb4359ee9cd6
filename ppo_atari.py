# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py==0.12.1", "filelock==4.2.12", "gymnasium==1.4.0", "moviepy==2.2.1",
#   "numpy==2.4.6", "opencv-python-headless==5.0.0.93", "pydantic==2.14.4", "tensorboard==2.21.0",
#   "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for Atari games, in one file.

    python ppo_atari.py --env-id Breakout

`uv run` installs what it needs; without uv, `pip install` the packages named above.

The algorithm of Schulman et al. 2017 (arXiv 1707.06347) as OpenAI implemented it in ppo2 =
openai/baselines@ea25b9e8. It repeats three steps. Act with the policy for some time (rollout).
Compute the advantage of each action: how much more discounted reward followed than the value
function expected. Then make actions of positive advantage likelier, in several passes over these
samples; nothing is gained by changing a probability beyond a small factor (clipping).

"The 37 Implementation Details of PPO" (Huang et al. 2022) numbers what it takes to reproduce ppo2.
Each detail is a comment above its statement: the settings concerned in parentheses, the place below
baselines/ in brackets, the reason in the next line; `--details` lists them. Here are 1-13 (core)
and 14-22 (Atari); 23-31 are in ppo_continuous_action.py, 32-36 in ppo_atari_lstm.py, 37 in
ppo_multidiscrete.py.

The games are those of ale-py. An observation is a stack of four frames, and an action lasts four
frames. `torchrun --nproc-per-node 4 ppo_atari.py` plays num_envs games in each of four processes,
and averages their gradients.

Deviations from ppo2: after a time limit, the value of the final observation stands for the rewards
that were cut off (`--truncation-is-terminal` restores ppo2); the limit is the usual 108,000 frames,
not 400,000; where a press that begins a life ends it, the next life's observation is returned, not
the old one; the no-ops of each game have a seed of their own; Adam is PyTorch's, which adds epsilon
to the root after its correction, not before; gradients are scaled by max_grad_norm / (norm + 1e-6),
there without 1e-6; the logged KL is k3, not k2; orthogonal matrices come from a QR decomposition,
not an SVD (equal in distribution up to signs).

`--paper` takes the numbers of the paper's Table 5. Two things stay: values are clipped, of which
the paper says nothing (`--no-clip-vloss`), and the network is that of Mnih et al. 2015, where the
paper names the smaller one of A3C (Mnih et al. 2016).
"""

import argparse
import dataclasses
import difflib
import functools
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
import torch
import torch.distributed as dist
import tyro
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Settings ===

FRAME_SKIP = 4  # frames that one step of the agent lasts [common/atari_wrappers.py L270]
NOOP_MAX = 30  # most no-op frames before a game [common/atari_wrappers.py L269]
MAX_GAME_STEPS = 108_000 // FRAME_SKIP  # steps before a game is truncated: half an hour of play
NUM_FRAMES = 4  # frames in an observation, k [run.py L101-103]

# What --paper changes: Table 5 of the paper, whose value loss is a whole square and c1 = 1.
PAPER = {"update_epochs": 3, "vf_coef": 2.0, "anneal_clip": True}

# Set by torchrun; without it, a run is a group of one process.
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # among the processes of this machine


def game_name(env_id: str) -> str:
    """The name in ale-py of a game that is BreakoutNoFrameskip-v4 or ALE/Breakout-v5 elsewhere."""
    return re.sub(r"^(?:ALE/)?(\w+?)(?:NoFrameskip-v4|-v5)?$", r"\1", env_id)


Tensors = dict[str, Tensor]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
Steps = Annotated[float, pydantic.Field(ge=1, le=1e15), pydantic.AfterValidator(int)]  # also 1e6
StepSize = Annotated[NonNegativeFloat, tyro.conf.arg(aliases=["--lr"])]
Seed = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Threads = Annotated[int, pydantic.Field(ge=1, le=1024)]
Name = Annotated[str, pydantic.Field(pattern=r"^\w[\w.=+-]*$")]  # of a folder in runs/
Folder = Annotated[str, pydantic.Field(min_length=1)]
Game = Annotated[str, pydantic.AfterValidator(game_name)]


# Copied from ppo_continuous_action.py
class UsageError(ValueError):
    """Something that the user can mend; `main` prints it as one sentence."""


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args:
    # --- Environment ---
    env_id: Game = "Breakout"  # Atari game; from ALE/Breakout-v5 the name is taken, no stickiness
    num_envs: PositiveInt = 8  # environments N, stepped in turn [ppo2, MuJoCo: 1; paper, Atari: 8]
    sticky_actions: Fraction = 0.0  # chance that a frame repeats the last action [Machado: 0.25]
    truncation_is_terminal: bool = False  # treat time limits as failures, as ppo2 does

    # --- Experiment ---
    seed: Seed = 1  # random seed of the whole run
    total_timesteps: Steps = 10_000_000  # steps of all environments together; annealing ends there
    paper: bool = False  # the paper's 3 epochs, vf_coef 2, annealed clip; flags beside it win
    run_name: Name | None = None  # folder below runs/; by default environment, script, seed, time
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    torch_threads: Threads = min(8, os.cpu_count() or 1)  # of the update
    bfloat16: bool = False  # compute the CNN in bfloat16; weights, heads and losses are float32
    compile: bool = True  # compile the loss and its gradient, where there is a C++ compiler
    track: bool = False  # send the logs to Weights & Biases too (WANDB_MODE=offline: to disk)
    checkpoint_interval: PositiveInt = 25  # iterations between two checkpoints
    resume: Folder | None = None  # continue the run in this folder, with its settings
    evaluate: Folder | None = None  # play episodes with the policy in this folder; no training
    eval_episodes: PositiveInt = 10  # number of episodes, with --evaluate
    capture_video: bool = False  # film the first episode, with --evaluate
    details: bool = False  # print the implementation details with their values, and exit

    # --- PPO ---
    num_steps: PositiveInt = 128  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: PositiveInt = 4  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: PositiveInt = 4  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: StepSize = 2.5e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    anneal_lr: bool = True  # lower the step size linearly towards 0 [ppo2; paper: Atari only]
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon [ppo2: 1e-5]
    gamma: Fraction = 0.99  # discount factor [paper: 0.99]
    gae_lambda: Fraction = 0.95  # 0: one-step advantages; 1: full returns [paper: 0.95]
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: PositiveFloat = 0.1  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    anneal_clip: bool = False  # lower clip_coef linearly towards 0 [paper: Atari only; ppo2: off]
    clip_vloss: bool = True  # limit the change of values to clip_coef [ppo2; not in the paper]
    ent_coef: NonNegativeFloat = 0.01  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: NonNegativeFloat = 0.5  # weight of the value loss, half a square, c1 [ppo2: 0.5]
    max_grad_norm: PositiveFloat = 0.5  # largest norm of the whole gradient [ppo2: 0.5; inf: off]
    early_stop_kl: PositiveFloat = math.inf  # stop an update after an epoch of larger KL [inf: off]

    def __post_init__(self) -> None:
        batch = self.num_steps * self.num_envs
        if batch % self.num_minibatches or batch * WORLD_SIZE > self.total_timesteps:
            rule = "a multiple of num_minibatches, and with all processes at most total_timesteps"
            raise ValueError(f"num_steps * num_envs, here {batch}, must be {rule}.")
        if self.capture_video and not self.evaluate:
            raise ValueError("--capture-video films an evaluation: add --evaluate FOLDER.")


# === Preprocessing: the wrappers of ppo2, inside out [common/atari_wrappers.py L266-289] ===


class NoopReset(gym.Wrapper):
    """Begin each game with 1 to 30 frames of doing nothing."""

    def reset(self, **kwargs: Any) -> tuple:
        frame, info = self.env.reset(**kwargs)
        # Detail 14/37: no-op reset [common/atari_wrappers.py L12-39]
        # Otherwise all games begin alike, and presses learned by heart would do.
        noops = self.unwrapped.np_random.integers(1, NOOP_MAX + 1)
        for _ in range(noops):
            frame, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                frame, info = self.env.reset()
        return frame, info


class MaxAndSkip(gym.Wrapper):
    """Hold each action for 4 frames, sum their rewards, show the maximum of the last two."""

    def step(self, action: int) -> tuple:
        frames, total_reward = [], 0.0
        for _ in range(FRAME_SKIP):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            total_reward += float(reward)
            if terminated or truncated:
                break
        # Detail 15/37: max and skip [common/atari_wrappers.py L97-123]
        # The console draws some objects in every second frame only; the maximum shows them all.
        frame = np.maximum(frames[-1], frames[-2:][0])  # the same if there is only one
        return frame, total_reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """End the learner's episode with each life, but reset only a game that is over.

    The score stays that of the game, in raw points and steps of the agent. It is appended to
    `scores` when the game is over, be it under one of the presses that begin a life.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.game_over, self.scores = True, []

    def reset(self, **kwargs: Any) -> tuple:
        """Go on with the next life by one no-op step, or start a new game."""
        if not self.game_over:
            frame, _, _, _, info = self.step(0)
        if self.game_over:
            frame, info = self.env.reset(**kwargs)
            self.score = {"return": 0.0, "length": 0}
        self.game_over, self.lives = False, self.unwrapped.ale.lives()
        return frame, info

    def step(self, action: int) -> tuple:
        """Set `terminated` where a life was lost; a game may linger at 0 lives before its end."""
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.score["return"] += reward
        self.score["length"] += 1
        self.game_over = terminated or truncated
        if self.game_over:
            self.scores.append(self.score)
        lives = self.unwrapped.ale.lives()
        # Detail 16/37: episodic life [common/atari_wrappers.py L61-95]
        # Values then show what a life is worth; as the game goes on, its later parts are seen too.
        terminated = terminated or 0 < lives < self.lives
        self.lives = lives
        return frame, reward, terminated, truncated, info


class FireReset(gym.Wrapper):
    """Press FIRE, then action 2, to begin each life."""

    def reset(self, **kwargs: Any) -> tuple:
        frame, info = self.env.reset(**kwargs)
        # Detail 17/37: fire reset [common/atari_wrappers.py L41-59]
        # Some games stand still until then, and an agent may never find out.
        for action in (1, 2):
            frame, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                frame, info = self.env.reset()
        return frame, info


class WarpFrame(gym.ObservationWrapper):
    """Turn the (210, 160, 3) screen grey, then into (84, 84); the other order rounds otherwise."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, frame: np.ndarray) -> np.ndarray:
        import cv2

        # Detail 18/37: warp frame [common/atari_wrappers.py L134-185]
        # What matters stays visible in a fourteenth of the numbers.
        grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)


class ClipReward(gym.RewardWrapper):
    """Learn from the sign, -1, 0 or +1, of each reward."""

    def reward(self, reward: float) -> float:
        # Detail 19/37: reward clipping to sign [common/atari_wrappers.py L125-131]
        # Points are ones in one game and thousands in another; signs suit the same settings.
        return float(np.sign(reward))


def make_env(args: Args) -> gym.Env:
    """Make one game with observations (k, 84, 84); --capture-video films the first play."""
    env = NoopReset(make_game(args))
    env = MaxAndSkip(env)
    env = gym.wrappers.TimeLimit(env, MAX_GAME_STEPS)
    if args.capture_video:
        film = {"episode_trigger": lambda k: k == 0, "fps": 60 // FRAME_SKIP}
        env = gym.wrappers.RecordVideo(env, f"{args.evaluate}/videos", **film)
    env = EpisodicLife(env)
    if env.unwrapped.get_action_meanings()[1] == "FIRE":
        env = FireReset(env)
    env = ClipReward(WarpFrame(env))
    # Detail 20/37: frame stack [common/vec_env/vec_frame_stack.py L6-30]
    # One frame does not show where things move; those before the first one of a life are black.
    return gym.wrappers.FrameStackObservation(env, NUM_FRAMES, padding_type="zero")


# === Agent ===


# Copied from ppo_continuous_action.py
def layer_init(layer: nn.Module, gain: float) -> nn.Module:
    """Make the weight orthogonal, times `gain`, and the bias 0 [a2c/utils.py L20-63]."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on the convolutional network of Mnih et al. 2015 (Nature).

    1,684,128 parameters up to the 512 features, 1,687,719 in all with 6 actions.
    """

    def __init__(self, num_actions: int, args: Args) -> None:
        super().__init__()
        self.bfloat16, gain = args.bfloat16, math.sqrt(2)
        # Detail 2/37: orthogonal and constant initialization [common/models.py L21-26]
        # Layers keep the size of signals; the small last gain treats all states alike at first.
        # Detail 21/37: shared Nature CNN [common/models.py L15-26]
        # Objects look the same all over the screen; with this network DQN has learned the games.
        self.cnn = nn.Sequential(
            layer_init(nn.Conv2d(NUM_FRAMES, 32, kernel_size=8, stride=4), gain),
            nn.ReLU(),  # (B, 32, 20, 20)
            layer_init(nn.Conv2d(32, 64, kernel_size=4, stride=2), gain),
            nn.ReLU(),  # (B, 64, 9, 9)
            layer_init(nn.Conv2d(64, 64, kernel_size=3, stride=1), gain),
            nn.ReLU(),  # (B, 64, 7, 7)
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512), gain),
            nn.ReLU(),
        )
        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        # Both heads need the same features, and the CNN that finds them costs nearly everything.
        self.policy = layer_init(nn.Linear(512, num_actions), 0.01)
        self.value = layer_init(nn.Linear(512, 1), 1.0)

    def features(self, obs: Tensor) -> Tensor:
        """Features (B, 512) of stacked frames (B, k, 84, 84), which arrive as stored, in uint8."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # Detail 22/37: image scaling [common/models.py L19]
            # Layers are initialized for inputs near 1; until here one byte per pixel is stored.
            scaled = obs / 255.0
            # The order in memory that convolutions compute fastest in; the values are the same.
            return self.cnn(scaled.contiguous(memory_format=torch.channels_last)).float()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, A) of the actions, and values (B,), of observations (B, k, 84, 84)."""
        features = self.features(obs)
        return self.policy(features), self.value(features).squeeze(-1)

    def get_value(self, obs: Tensor) -> Tensor:
        """Values (B,) of observations (B, k, 84, 84)."""
        return self.value(self.features(obs)).squeeze(-1)

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of actions (B,) in obs (B, k, 84, 84), entropies, values, all (B,)."""
        logits, values = self(obs)
        return *categorical(logits, actions), values


def categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions (...) under the softmax of logits (..., A), and entropies."""
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(-1, actions[..., None]).squeeze(-1)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Choose actions (...) by logits (..., A), in training and in evaluation.

    With standard Gumbel noise (..., A) the largest sum is a sample of the softmax, with 0 the most
    likely action [common/distributions.py L199-201].
    """
    return (logits + noise).argmax(-1)


# === The math ===


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def normalize(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and std 1; population std (divisor n) as in ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """KL(old || new) from actions of the old policy, by k3 = mean(r - 1 - log r), r = new/old.

    Unbiased, and less noisy than k1 = mean(-log r) (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


# Copied from ppo_continuous_action.py
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar.

    `logratio` is log pi_new(a|s) - log pi_old(a|s), of the shape of `advantages`.
    """
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    # The samples tell about policies near the old one only: what moves farther gains nothing.
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


# Copied from ppo_continuous_action.py
def value_loss(
    new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | Tensor
) -> Tensor:
    """Half the mean squared error of the values, a scalar (Stable-Baselines3 has no half)."""
    # Detail 9/37: value function loss clipping (clip_vloss, clip_coef) [ppo2/model.py L68-75]
    # One batch should not move values far. The range is absolute: it supposes scaled rewards.
    clipped_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    errors = torch.max((new_values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


# Copied from ppo_continuous_action.py
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


def average(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its mean over the processes that torchrun has started."""
    for x in tensors if WORLD_SIZE > 1 else ():
        dist.all_reduce(x)
        x /= WORLD_SIZE


def ppo_update(
    agent: Agent,
    adam: torch.optim.Adam,
    batch: list[Tensor],
    mb: Tensor,
    schedule: Tensors,
    args: Args,
    loss_function: Callable = ppo_loss,
) -> Tensors:
    """One step of Adam on the rows `mb` (B,) of the batch (T*N, ...); returns the metrics."""
    minibatch = [x[mb] for x in batch]
    loss, metrics = loss_function(agent, minibatch, schedule, args)
    adam.zero_grad()
    loss.backward()
    # Extra: parallelized gradient update [ppo2/model.py L97-98]
    # Equal weights, averaged gradients: as one process, but each normalizes its own advantages.
    average([*(x.grad for x in agent.parameters() if x.requires_grad), *metrics.values()])
    # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
    # One odd minibatch must not throw the policy far; scaled as a whole, the direction is kept.
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    adam.step()
    return {**metrics, "losses/grad_norm": grad_norm}


# === Training: collect, advantages, update, log ===


def train(args: Args, update: Callable = ppo_update) -> dict[str, Any]:
    """Run PPO; logs and checkpoints go below runs/.

    Returns `agent`; `episodes`, each {"global_step", "return", "length"}; `updates`, one dictionary
    of metrics per iteration; `args`; `run_dir`. Raises UsageError where something does not fit.
    An `update` of your own takes what `ppo_update` takes, with --compile a compiled loss function.
    """
    STOP.clear()  # of an earlier run in this process
    args, device = settings_of_run(args), own_device(args)
    check_bfloat16(args, device)
    torch.manual_seed(args.seed)  # the same in all processes, which begin with equal weights
    batch_size = args.num_steps * args.num_envs  # of this process
    iteration_steps = batch_size * WORLD_SIZE  # of all processes
    num_iterations = args.total_timesteps // iteration_steps

    # Games, and the rollout (T, N, ...), whose last observation begins the next rollout.
    envs = [ReplayableGame(make_env(args)) for _ in range(args.num_envs)]
    num_actions = envs[0].action_space.n.item()
    raw_obs = np.zeros((args.num_envs, *envs[0].observation_space.shape), dtype=np.uint8)
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((args.num_steps + 1, *raw_obs.shape), dtype=torch.uint8, device=device)
    logits = torch.zeros((*shape, num_actions), device=device)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    values = torch.zeros(shape, device=device)
    rewards = np.zeros(shape)
    terminated, truncated = np.zeros((2, *shape), dtype=bool)

    # What learns.
    agent = Agent(num_actions, args).to(device)
    # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
    # With PyTorch's own, 1e-8, weights whose gradients are tiny would take steps as large as any.
    adam = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
    if args.compile:
        update = functools.partial(update, loss_function=compiled(ppo_loss, device))
    episodes: list[dict[str, float]] = []  # the finished games
    history: list[dict[str, float]] = []  # metrics of each iteration
    warned: set[str] = set()  # those that the user has been told of

    # A new run begins a game in each environment; a resumed one goes on where it was.
    if RANK == 0:  # the process that logs and saves
        run_dir, writer, saved = open_run(args, args.env_id)
    else:
        run_dir, saved = None, load_checkpoint(args.resume)[2] if args.resume else None
    if WORLD_SIZE > 1:
        # Not before Adam is made: what it imports would hold the group, whose threads, if they
        # outlive `train`, may abort a process that is done (pytorch #190489).
        dist.init_process_group()
    if saved:
        agent.load_state_dict(saved["agent"])
        adam.load_state_dict(saved["adam"])
        episodes, history = saved["episodes"], saved["updates"]
    finished = history[-1]["global_step"] // iteration_steps if history else 0  # iterations
    # Only the games of the first process are saved.
    if WORLD_SIZE > 1 or not (saved and replay_games(envs, saved, raw_obs)):
        rng = np.random.default_rng([args.seed, finished, RANK])
        for i, env in enumerate(envs):
            raw_obs[i] = env.load(rng.integers(2**31).item())
    obs[-1] = torch.from_numpy(raw_obs)

    remaining = range(finished + 1, num_iterations + 1)
    for iteration in (progress := tqdm(remaining, mininterval=1, disable=RANK > 0)):
        # --- Collect: T steps in each of the N environments, with the weights held fixed ---
        start_time, global_step = time.perf_counter(), (iteration - 1) * iteration_steps
        # Eight frames keep a thread busy; more would wait, spinning, and slow down the games.
        torch.set_num_threads(min(args.torch_threads, max(1, args.num_envs // 8)))
        rng = np.random.default_rng([args.seed, iteration, RANK])
        noise = torch.tensor(rng.gumbel(size=logits.shape).astype(np.float32), device=device)
        final_obs = []  # where a time limit ended a game
        obs[0] = obs[-1]  # where the last rollout ended
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # More environments vary a batch; rollouts go on where the last ended, in mid-episode too.
        for t in range(args.num_steps):
            global_step += args.num_envs * WORLD_SIZE
            with torch.no_grad():
                logits[t], values[t] = agent(obs[t])
            actions[t] = draw(logits[t], noise[t])
            for i, (env, action) in enumerate(zip(envs, actions[t].tolist())):
                raw_obs[i], rewards[t, i], failed, cut_off, _ = env.step(action)
                terminated[t, i], truncated[t, i] = failed, cut_off
                if cut_off:
                    final_obs.append(raw_obs[i].copy())
                if failed or cut_off:
                    if env.is_over():
                        raw_obs[i] = env.begin(rng.integers(2**31).item())
                    else:
                        raw_obs[i], _ = env.reset()  # the next life
                    episodes += [{"global_step": global_step, **x} for x in env.new_scores()]
            # Where a life or game has ended, this is the first observation of the next one.
            obs[t + 1] = torch.from_numpy(raw_obs)

        # --- Advantages: log-probabilities and what comes next, then GAE ---
        torch.set_num_threads(args.torch_threads)
        # Deviation: time limits are not failures (not truncation_is_terminal)
        # What a limit cuts off had a future, worth the value of its last observation; ppo2 says 0.
        if args.truncation_is_terminal:
            terminated |= truncated
        b_rewards, b_done = (
            torch.tensor(x, dtype=torch.float32, device=device)
            for x in (rewards, terminated | truncated)
        )
        with torch.no_grad():
            logprobs, _ = categorical(logits, actions)  # (T, N)
            # What follows a step is worth the value of the next observation. Where the episode
            # ended, that one belongs to another episode: after a time limit the value of the final
            # observation replaces it, and after a failure nothing follows.
            next_values = torch.cat([values[1:], agent.get_value(obs[-1])[None]])
            if final_obs:
                b_final_obs = torch.tensor(np.stack(final_obs), device=device)
                next_values[truncated] = agent.get_value(b_final_obs)
            next_values[terminated] = 0.0
            advantages, returns = gae(
                b_rewards, values, next_values, b_done, args.gamma, args.gae_lambda
            )

        # --- Update: K epochs of minibatches ---
        frac = 1 - (iteration - 1) / num_iterations  # 1 in the first iteration, 1/U in the last
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps find the way; small ones at the end settle what noise would undo.
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        adam.param_groups[0]["lr"] = learning_rate
        # Extra: clip range annealing (clip_coef, anneal_clip) [ppo2/ppo2.py L137]
        # The policy may move less and less, as the annealed step size lets it.
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1.0)
        # What changes during a run: the numbers in `args` are constants of the compiled loss.
        schedule = {"clip_coef": torch.tensor(clip_coef, device=device)}
        batch = (obs[:-1], actions, logprobs, values, advantages, returns)
        batch = [x.flatten(0, 1) for x in batch]  # (T*N, ...)
        mb_metrics: list[Tensors] = []
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(batch_size), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more from a batch than one; shuffling makes each a fair sample.
            minibatches = order.split(batch_size // args.num_minibatches)
            epoch = [update(agent, adam, batch, mb, schedule, args) for mb in minibatches]
            mb_metrics += epoch
            # Extra: early stopping (early_stop_kl) [Spinning Up: each step, at 1.5 times a target]
            # Clipping does not hold a policy that has left already: stopping does.
            if means(epoch)["losses/approx_kl"] > args.early_stop_kl:
                break

        # --- Log and save, in the first process ---
        following = next_values.masked_fill(torch.tensor(terminated, device=device), 0.0)
        observed = observed_returns(b_rewards, following, b_done, args.gamma)
        with torch.no_grad():  # of one environment, since all would take a tenth of the update
            new_logprobs, *_ = agent.evaluate_actions(obs[:-1, 0], actions[:, 0])
            logratio = new_logprobs[:, None] - logprobs[:, :1]
        metrics = means(mb_metrics) | means([diagnose(logratio, advantages, values, observed)])
        metrics |= {
            "losses/explained_variance": 1 - (advantages.var() / (returns.var() + 1e-8)).item(),
            "check/entropy_share": metrics["losses/entropy"] / math.log(num_actions),
            "check/first_kl": mb_metrics[0]["losses/approx_kl"].item(),  # ratios are 1 there
            "charts/learning_rate": learning_rate,
            "charts/SPS": iteration_steps / (time.perf_counter() - start_time),
        }
        history.append({"global_step": global_step, **metrics})
        if RANK > 0:
            continue
        log(writer, history, episodes, progress, warned)
        stopping = STOP.is_set() or iteration == num_iterations
        if stopping or iteration % args.checkpoint_interval == 0:
            state = {"agent": agent.state_dict(), "sizes": [num_actions]}
            state |= {"adam": adam.state_dict(), "raw_obs": torch.tensor(raw_obs)}
            state |= {"running": [(*env.start, env.actions) for env in envs]}
            save_checkpoint(run_dir, args, state | {"episodes": episodes, "updates": history})
        if stopping:
            break
    if RANK == 0:
        writer.close()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    results = {"agent": agent, "episodes": episodes, "updates": history}
    return {**results, "args": args, "run_dir": run_dir}


# === The algorithm ends here ===
# Below: games and how they are played again, the compiled loss, metrics and warnings, logs and
# checkpoints, the use of a policy, `main`.

SCRIPT = Path(__file__).stem
STOP = threading.Event()  # set by Ctrl-C: finish the iteration, save, and end

# Metric, its lowest and highest healthy value, for how many iterations it must have been outside
# (0: one; shorter ones than 2,000 steps count less), whether only while return is lost, what to do.
HEALTH = [
    ("losses/approx_kl", 1e-12, 0.05, 10, True, "Updates are too large, or none: check --lr."),
    ("check/value_bias", -math.inf, 0.6, 20, False, "Values exceed returns: check episode ends."),
    ("check/update", 0.02, 1, 10, True, "Good actions got no likelier: check signs and reshapes."),
]


def own_device(args: Args) -> torch.device:
    """Where this process learns: on a GPU of its own, if on a GPU."""
    device, gpus = choose_device(args), torch.cuda.device_count()
    if device.type == "cpu":
        return device
    if gpus <= LOCAL_RANK:
        raise UsageError(f"Each process needs its own GPU: --nproc-per-node {gpus} at most.")
    return torch.device("cuda", LOCAL_RANK)


def check_bfloat16(args: Args, device: torch.device) -> None:
    """Refuse bfloat16 on processors that only emulate it."""
    emulated = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if args.bfloat16 and emulated:
        raise UsageError("Without AVX-512, bfloat16 is ten times slower: take --no-bfloat16.")


def make_game(args: Args) -> gym.Env:
    """Make one game as the console shows it, frame by frame."""
    import ale_py
    import cv2

    gym.register_envs(ale_py)
    cv2.setNumThreads(1)  # an image this small is resized faster than threads are woken
    if args.env_id in ("Backgammon", "VideoCheckers"):
        raise UsageError(f"{args.env_id} has no no-op, with which games begin here.")
    games = [x[len("ALE/") : -len("-v5")] for x in gym.registry if x.startswith("ALE/")]
    if args.env_id not in games:
        near = difflib.get_close_matches(args.env_id, games, n=1, cutoff=0.7)
        others = "for vectors of numbers see ppo_multidiscrete.py or ppo_continuous_action.py"
        hint = f"did you mean {near[0]}?" if near else f"{others}."
        raise UsageError(f"{args.env_id} is no Atari game: {hint}")
    return gym.make(
        f"ALE/{args.env_id}-v5",
        frameskip=1,  # MaxAndSkip repeats the actions
        repeat_action_probability=args.sticky_actions,
        full_action_space=False,
        max_num_frames_per_episode=None,  # TimeLimit counts the agent's steps
        render_mode="rgb_array" if args.capture_video else None,
        disable_env_checker=True,
    )


class ReplayableGame(gym.Wrapper):
    """A game that knows how it began, and its actions since then, through all its lives.

    A resumed run plays these again and is where it was.
    """

    def load(self, seed: int) -> np.ndarray:
        """Load the game, which seeds the emulator's random numbers, and begin it."""
        self.unwrapped.reset(seed=seed)
        return self.begin(seed)

    def begin(self, seed: int, emulator: bytes = b"", actions: Iterable[int] = ()) -> np.ndarray:
        """Begin a game and take these actions; return the observation after them.

        The seed is that of the no-ops. The emulator's random numbers go on from the last game, or
        from the given state of it.
        """
        from ale_py import ALEState

        ale = self.unwrapped.ale
        if emulator:
            ale.restoreState(ALEState(emulator))
        emulator = ale.cloneState(include_rng=True).__getstate__()
        self.start, self.actions = (seed, emulator), []
        # `reset(seed=seed)` would also load the game again, which takes 18 times as long.
        self.unwrapped.np_random = np.random.default_rng(seed)
        self.set_wrapper_attr("game_over", True)  # also where another game is running
        obs, _ = self.reset()
        for action in actions:
            obs, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                obs, _ = self.reset()  # the next life
        return obs

    def step(self, action: int) -> tuple:
        """Take one step, and remember its action."""
        self.actions.append(action)
        return self.env.step(action)

    def is_over(self) -> bool:
        """Whether the whole game has ended, and not only a life."""
        return self.get_wrapper_attr("game_over")

    def new_scores(self) -> list[dict[str, float]]:
        """The scores of games that have ended since the last call."""
        scores = self.get_wrapper_attr("scores")
        return [scores.pop(0) for _ in range(len(scores))]


def replay_games(envs: list[ReplayableGame], saved: dict[str, Any], raw_obs: np.ndarray) -> bool:
    """Play the saved games again, up to `raw_obs` (N, k, 84, 84); return if they are the same."""
    for i, game in enumerate(saved["running"]):
        raw_obs[i] = envs[i].begin(*game)
        envs[i].new_scores()  # are noted already
    same = np.array_equal(raw_obs, saved["raw_obs"].numpy())
    if not same:
        print("The games do not repeat themselves, so new ones begin.")
    return same


# Copied from ppo_continuous_action.py
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
# Copied from ppo_continuous_action.py


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


def load_policy(run_dir: str | Path) -> Callable[..., int]:
    """A trained policy: `policy(obs)` is the most likely action, `policy(obs, rng)` a drawn one.

    `obs` (k, 84, 84) is as an environment of `make_env` gives it, `rng` a generator.
    """
    _, agent, _ = load_checkpoint(run_dir)

    @torch.no_grad()
    def policy(obs: np.ndarray, rng: np.random.Generator | None = None) -> int:
        logits, _ = agent(torch.tensor(obs)[None])
        noise = rng.gumbel(size=logits.shape) if rng else np.zeros(logits.shape)
        return draw(logits, torch.from_numpy(noise)).item()

    return policy


def evaluate(args: Args) -> list[float]:
    """Play whole games with the most likely actions of a trained policy; return their returns."""
    args = settings_of_run(args)
    if args.capture_video:
        print("Filming the first game, which may take minutes.")
        warnings.filterwarnings("ignore", message=".*Overwriting existing videos")
    policy, env, returns = load_policy(args.evaluate), ReplayableGame(make_env(args)), []
    for seed in range(args.eval_episodes):
        obs = env.load(seed)
        while not (scores := env.new_scores()):  # a game ends, by its time limit at the latest
            obs, _, terminated, truncated, _ = env.step(policy(obs))
            if (terminated or truncated) and not env.is_over():
                obs, _ = env.reset()  # the next life
        returns.append(scores[0]["return"])
    env.close()
    print(f"Return {np.mean(returns):.1f} ± {np.std(returns):.1f} in {len(returns)} episodes")
    return returns


# Copied from ppo_continuous_action.py
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
        if args.paper and not (args.resume or args.evaluate):
            args = tyro.cli(Args, default=Args(**PAPER))  # flags beside --paper win
        if args.details:
            print(details(args))
        elif args.evaluate:
            evaluate(args)
        else:
            if WORLD_SIZE == 1:  # torchrun itself ends its processes after Ctrl-C
                signal.signal(signal.SIGINT, interrupt)
            run_dir = train(args)["run_dir"]
            if RANK == 0:
                todo = f"{'--resume' if STOP.is_set() else '--evaluate'} {run_dir}"
                print(f"Now: python {SCRIPT}.py {todo}; or tensorboard --logdir {run_dir}")
    except KeyboardInterrupt:
        sys.exit(130)
    except (UsageError, OSError, ImportError, MemoryError, RuntimeError, gym.error.Error) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        hint = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"Error: {' '.join(str(error).split())}{hint}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
