# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py==0.12.1", "filelock==4.3.1", "gymnasium==1.4.0", "moviepy==2.2.1",
#   "numpy==2.4.6", "opencv-python-headless==5.0.0.93", "tensorboard==2.21.0", "torch==2.13.0",
#   "tqdm==4.70.1", "tyro==1.0.17", "wandb==0.31.0"]
# ///
"""PPO with an LSTM for Atari games, in one file: one frame and a memory instead of four frames.

    python ppo_atari_lstm.py --env-id Breakout  # uv run installs what it needs

PPO (Schulman et al. 2017, arXiv 1707.06347) repeats three steps. It runs the policy for a while (a
rollout). It estimates the advantage of each action: how much more discounted reward followed than
the value function predicted. Then it makes actions with positive advantages more likely, in several
passes over the rollout. Clipping removes the incentive to change a probability by more than a small
factor.

The code follows OpenAI's ppo2 (openai/baselines@ea25b9e8) down to "The 37 Implementation Details of
PPO" (Huang et al. 2022). Each detail is a comment above its line, with its settings in parentheses,
its place in baselines/ (long paths: the end) in brackets, and its reason below. Details 23-31 are
in ppo_continuous_action.py and 37 in ppo_multidiscrete.py. Compared with ppo_atari.py, this script
has an LSTM in the agent, its state in `train`, and minibatches of whole games. What is "Copied
from" another script is the same there, to the byte: change it there.

An observation is one frame, and an action lasts four. On Linux, each core plays a share of the
games. The LSTM has H = 128 units. Its state is one tensor (2, B, H): the outputs and the cells.
`starts` is 1 for the first frame of a life or game. Nothing is compiled, because a compiler would
unroll the T steps of the LSTM, which takes minutes.

Differences from ppo2: time limits are not failures (unless `--truncation-is-terminal`); games stop
after the usual 108,000 frames, not 400,000; if a button press that starts a life also ends it, the
agent sees the next life, not the lost one; the agent sees one frame, as in Huang et al., where ppo2
stacks four; the no-ops of each game have their own seed; Adam is PyTorch's, which adds epsilon
after the bias correction; gradients are scaled by max_grad_norm / (norm + 1e-6), in ppo2 without
1e-6; the logged KL is k3, not k2; orthogonal matrices come from a QR decomposition, not an SVD.

`--paper` uses the numbers in the paper's Table 5. Two differences remain: values are clipped, which
the paper does not mention (`--no-clip-vloss`), and the network is the CNN of Mnih et al. 2015 with
an LSTM, while the paper names that of A3C (Mnih et al. 2016) and used no LSTM.
"""

import argparse
import ctypes
import dataclasses
import functools
import math
import mmap
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import filelock
import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Settings ===

FRAME_SKIP = 4  # frames that one step of the agent lasts [common/atari_wrappers.py L270]
NOOP_MAX = 30  # maximum number of no-op frames before a game [common/atari_wrappers.py L269]
MAX_GAME_STEPS = 108_000 // FRAME_SKIP  # steps before a game is truncated: half an hour of play
NUM_FRAMES = 1  # frames in an observation, k; the LSTM remembers the others
HIDDEN_SIZE = 128  # units of the LSTM, H [common/models.py L187]
EPISODES_KEPT = 100_000  # the last ones; the log has the means of all

# What --paper changes: Table 5 of the paper, whose value loss is a full square with c1 = 1.
PAPER = {"update_epochs": 3, "vf_coef": 2.0, "anneal_clip": True}

# Cores that this process may use: in a container, these can be fewer than the machine has.
NUM_CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
# How many processes play the games. Results do not depend on it.
GAME_PROCESSES = NUM_CORES

Tensors = dict[str, Tensor]
UpdateArgs = SimpleNamespace  # settings whose floats are tensors, see `update_args`
Saved = dict[str, Any]  # a checkpoint that `load_checkpoint` has read
StepSize = Annotated[float, tyro.conf.arg(aliases=["--lr"])]  # --lr for --learning-rate
# Limits of settings. Others: integers from 1, floats from 0, to infinity.
LEAST = {"seed": 0, "ent_coef": -math.inf}
MOST = {"gamma": 1, "gae_lambda": 1, "seed": 2**63 - 1, "sticky_actions": 1, "torch_threads": 1024}
PLAYED = {"env_id", "sticky_actions"}  # settings that may change with --evaluate


# Copied from ppo_continuous_action.py
class UsageError(Exception):
    """A mistake that the user can fix. `main` prints it as one sentence."""


@dataclasses.dataclass(frozen=True)
class Args:
    # --- Environment ---
    env_id: str = "Breakout"  # Atari game; ALE/Breakout-v5 is the same, and not sticky either
    num_envs: int = 8  # games N, played at the same time [ppo2, MuJoCo: 1; paper, Atari: 8]
    sticky_actions: float = 0.0  # chance that a frame repeats the last action [Machado: 0.25]
    truncation_is_terminal: bool = False  # treat time limits as failures, as ppo2 does

    # --- Experiment ---
    seed: int = 1  # random seed of the whole run
    total_timesteps: float = 1e7  # total steps of all environments; annealing ends there
    run_name: str | None = None  # name of its folder in runs/; by default made of the settings
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    torch_threads: int = min(8, NUM_CORES)  # threads of the update
    bfloat16: bool = False  # compute the CNN in bfloat16; weights, heads and losses are float32
    track: bool = False  # log to Weights & Biases as well (WANDB_MODE=offline: to disk)
    checkpoint_interval: int = 25  # iterations between checkpoints

    # --- PPO ---
    num_steps: int = 128  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: int = 4  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: int = 4  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: StepSize = 2.5e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    anneal_lr: bool = True  # lower the step size linearly towards 0 [ppo2; paper: Atari only]
    adam_eps: float = 1e-5  # Adam's epsilon [ppo2: 1e-5]
    gamma: float = 0.99  # discount factor [paper: 0.99]
    gae_lambda: float = 0.95  # advantages look ahead one step at 0, all steps at 1 [paper: 0.95]
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    anneal_clip: bool = False  # lower clip_coef linearly towards 0 [paper: Atari only; ppo2: off]
    clip_vloss: bool = True  # limit the change of values to clip_coef [ppo2; not in the paper]
    ent_coef: float = 0.01  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: float = 0.5  # weight of the value loss (half a squared error), c1 [ppo2: 0.5]
    max_grad_norm: float = 0.5  # maximum norm of the whole gradient [ppo2: 0.5; inf: off]
    early_stop_kl: float = math.inf  # stop the epochs of an update once the KL is larger [inf: off]

    def __post_init__(self) -> None:
        check_settings(self)
        name = re.sub("^ALE/|NoFrameskip-v4$|-v5$", "", self.env_id)
        object.__setattr__(self, "env_id", name)  # the class is frozen
        if self.num_envs % self.num_minibatches:
            parts = f"--num-minibatches ({self.num_minibatches})"
            raise UsageError(f"--num-envs ({self.num_envs}) must be a multiple of {parts}.")
        batch = self.num_steps * self.num_envs
        flag = "--num-steps * --num-envs"
        if batch == self.num_minibatches:  # one sample has std 0
            raise UsageError(f"{flag} ({batch}) must be 2, 3, 4... times --num-minibatches.")
        if not batch <= self.total_timesteps < math.inf:
            raise UsageError(f"--total-timesteps must be finite, and at least {flag} ({batch}).")


# === Preprocessing: the wrappers of ppo2, inside out [common/atari_wrappers.py L266-289] ===
# Copied from ppo_atari.py


class NoopReset(gym.Wrapper):
    """Begin each game with 1 to 30 frames of doing nothing."""

    def reset(self, **kwargs: Any) -> tuple:
        _, info = self.env.reset(**kwargs)
        # Detail 14/37: no-op reset [common/atari_wrappers.py L12-39]
        # Otherwise every game starts in the same state, and a memorized sequence would suffice.
        noops = self.unwrapped.np_random.integers(1, NOOP_MAX + 1)
        for _ in range(noops):
            _, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                _, info = self.env.reset()
        return self.env.render(), info  # observations are the RAM, see `make_game`


class MaxAndSkip(gym.Wrapper):
    """Hold each action for 4 frames, sum their rewards, show the maximum of the last two."""

    def step(self, action: int) -> tuple:
        frames = []
        total_reward = 0.0
        for k in range(FRAME_SKIP):
            _, reward, terminated, truncated, info = self.env.step(action)
            total_reward += float(reward)
            if k >= FRAME_SKIP - 2 or terminated or truncated:
                frames.append(self.env.render())  # rendering all four would take longer
            if terminated or truncated:
                break
        # Detail 15/37: max and skip [common/atari_wrappers.py L97-123]
        # The console draws some objects only in every second frame. The maximum shows them all.
        frame = np.maximum(frames[0], frames[-1])  # the same if there is only one
        return frame, total_reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """End the learner's episode with each life, but reset the game only when it is over.

    The score counts raw points and agent steps of the whole game. It is appended to `scores` when
    the game ends, even during a reset.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.game_over = True
        self.scores: list[dict] = []

    def reset(self, **kwargs: Any) -> tuple:
        """Take a no-op step into the next life, or start a new game if this one is over."""
        if not self.game_over:
            frame, _, _, _, info = self.step(0)
        if self.game_over:
            frame, info = self.env.reset(**kwargs)
            self.score = {"return": 0.0, "length": 0}
        self.game_over = False
        self.lives = self.unwrapped.ale.lives()
        return frame, info

    def step(self, action: int) -> tuple:
        """Set `terminated` if a life was lost. A game may linger at 0 lives before it ends."""
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.score["return"] += reward
        self.score["length"] += 1
        self.game_over = terminated or truncated
        if self.game_over:
            self.scores.append(self.score)
        lives = self.unwrapped.ale.lives()
        # Detail 16/37: episodic life [common/atari_wrappers.py L61-95]
        # Values learn what a life is worth, and the agent still sees later parts of the game.
        terminated = terminated or 0 < lives < self.lives
        self.lives = lives
        return frame, reward, terminated, truncated, info


class FireReset(gym.Wrapper):
    """Press FIRE, then action 2, to begin each life."""

    def reset(self, **kwargs: Any) -> tuple:
        frame, info = self.env.reset(**kwargs)
        # Detail 17/37: fire reset [common/atari_wrappers.py L41-59]
        # Some games wait for FIRE, and an agent might never discover that.
        for action in (1, 2):
            frame, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                frame, info = self.env.reset()
        return frame, info


class WarpFrame(gym.ObservationWrapper):
    """Make the (210, 160, 3) screen gray, then (84, 84). The reverse order rounds differently."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, frame: np.ndarray) -> np.ndarray:
        import cv2  # not above: --help needs none of it

        # Detail 18/37: warp frame [common/atari_wrappers.py L134-185]
        # What matters stays visible in one fourteenth of the numbers.
        gray = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)


class ClipReward(gym.RewardWrapper):
    """Learn from the sign, -1, 0 or +1, of each reward."""

    def reward(self, reward: float) -> float:
        # Detail 19/37: reward clipping to sign [common/atari_wrappers.py L125-131]
        # A point can be 1 in one game and 1000 in another. With signs, the same settings fit all.
        return float(np.sign(reward))


def make_env(args: Args, videos: str | None = None, video_length: int = 0) -> gym.Env:
    """Make one game with observations (k, 84, 84). Films `video_length` frames into `videos`."""
    env = NoopReset(make_game(args))
    env = MaxAndSkip(env)
    env = gym.wrappers.TimeLimit(env, MAX_GAME_STEPS)
    if videos:
        form = {"fps": 60 // FRAME_SKIP, "video_length": video_length}
        env = gym.wrappers.RecordVideo(env, videos, lambda k: k == 0, **form)
    env = EpisodicLife(env)
    if env.unwrapped.get_action_meanings()[1] == "FIRE":
        env = FireReset(env)
    env = ClipReward(WarpFrame(env))
    # Detail 20/37: frame stack [common/vec_env/vec_frame_stack.py L6-30]
    # One frame does not show where things move. Frames from before the start of a life are black.
    return gym.wrappers.FrameStackObservation(env, NUM_FRAMES, padding_type="zero")


# === Agent ===


# Copied from ppo_atari.py
def layer_init(layer: nn.Module, gain: float) -> nn.Module:
    """Give the layer zero bias and an orthogonal weight matrix, scaled by `gain`."""
    # Detail 2/37: orthogonal and constant initialization [a2c/utils.py L20]
    # Activations keep their scale. A small last gain makes a new policy almost ignore its input.
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A policy and a value function on the CNN of Mnih et al. 2015 (Nature) and an LSTM.

    Both heads use the LSTM's output, as in ppo2's `cnn_lstm` [common/models.py L187-210].
    """

    bfloat16 = False  # `learn` sets it

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        gain = math.sqrt(2)
        # Detail 21/37: shared Nature CNN [common/models.py L15-26]
        # Convolutions find objects anywhere on the screen. DQN used this network, too.
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
        # One matrix for the input and one for the last output, each with all four gates. As in
        # ppo2, there is one bias, and the forget gate's does not start at 1.
        # Detail 32/37: layer initialization [a2c/utils.py L84-86]
        # Orthogonal matrices with gain 1 keep the size of a signal that passes them at each step.
        self.lstm_input = layer_init(nn.Linear(512, 4 * HIDDEN_SIZE), 1.0)
        self.lstm_recurrent = nn.Linear(HIDDEN_SIZE, 4 * HIDDEN_SIZE, bias=False)
        nn.init.orthogonal_(self.lstm_recurrent.weight, 1.0)  # as Detail 32
        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        # Both heads need the same features, and computing them is nearly all of the cost.
        self.policy = layer_init(nn.Linear(HIDDEN_SIZE, num_actions), 0.01)
        self.value = layer_init(nn.Linear(HIDDEN_SIZE, 1), 1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """State (2, N, H) before the first step of the training."""
        # Detail 33/37: zero initial states [common/models.py L206]
        # There is no past yet. Each later rollout starts with the last state of the one before.
        return self.value.weight.new_zeros((2, num_envs, HIDDEN_SIZE))

    def features(self, obs: Tensor) -> Tensor:
        """Features (B, 512) of uint8 frames (B, 1, 84, 84)."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # Detail 22/37: image scaling [common/models.py L19]
            # Layers are initialized for inputs near 1. Storing bytes takes a quarter of the memory.
            scaled = obs.float() / 255.0
            # The strides of channels_last, with which convolutions are fastest. `contiguous` does
            # not set them if there is only one channel.
            scaled = scaled.contiguous().as_strided(scaled.shape, (84 * 84, 1, 84, 1))
            return self.cnn(scaled).float()

    def forward(self, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Process a sequence of T steps (T = 1 to act).

        Takes frames (T, B, 1, 84, 84), starts (T, B) and the state (2, B, H) before the first step.
        Returns logits (T, B, A), values (T, B) and the state after the last step.
        """
        inputs = self.lstm_input(self.features(obs.flatten(0, 1)))  # for all steps at once
        output, cell = state
        outputs = []
        for step_inputs, start in zip(inputs.view(*starts.shape, -1), starts[..., None]):
            # Detail 34/37: reset at episode end [a2c/utils.py L89-91]
            # The past says nothing about a new life. Gradients stop at its start, too.
            output, cell = output * (1 - start), cell * (1 - start)
            gates = step_inputs + self.lstm_recurrent(output)  # (B, 4H)
            write, keep, candidate, read = gates.chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + write.sigmoid() * candidate.tanh()
            output = read.sigmoid() * cell.tanh()
            outputs.append(output)
        hidden = torch.stack(outputs)  # (T, B, H)
        state = torch.stack([output, cell])
        return self.policy(hidden), self.value(hidden).squeeze(-1), state

    def evaluate_actions(
        self, obs: Tensor, starts: Tensor, state: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values, log-probabilities of actions (T, B) and entropies, all (T, B)."""
        logits, values, _ = self(obs, starts, state)
        return values, *categorical(logits, actions)


# Copied from ppo_atari.py
def categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions (...) under the softmax of logits (..., A), and entropies."""
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(-1, actions[..., None]).squeeze(-1)
    entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return logprobs, entropies


# Copied from ppo_atari.py
def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Choose actions (...) by logits (..., A), in training and in evaluation.

    With standard Gumbel noise (..., A), the largest sum is a sample of the softmax. With noise 0 it
    is the most likely action [common/distributions.py L199-201].
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
    """What an update learns from: T steps of N games, then B of the games."""

    obs: Tensor  # (T, N, 1, 84, 84), bytes
    actions: Tensor  # (T, N)
    logprobs: Tensor  # (T, N); these and all below are of the weights that acted
    values: Tensor  # (T, N)
    advantages: Tensor  # (T, N)
    returns: Tensor  # (T, N), targets for the values
    starts: Tensor  # (T, N), 1 for the first step of a life or game
    state: Tensor  # (2, N, H), of the LSTM before the first step


def ppo_loss(agent: Agent, minibatch: Batch, args: UpdateArgs) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated for descent), and debug variables."""
    # Detail 36/37: rebuild states in training [ppo2/ppo2.py L179-180]
    # Stored states come from old weights and have no gradient. So only the first one is stored.
    values, logprobs, entropies = agent.evaluate_actions(
        minibatch.obs, minibatch.starts, minibatch.state, minibatch.actions
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


def ppo_update(
    agent: Agent, adam: torch.optim.Adam, batch: Batch, chosen: Tensor, args: UpdateArgs
) -> Tensors:
    """Take an Adam step on the games `chosen` (B,) of the batch (T, N, ...); return the metrics.

    The floats of `args` but max_grad_norm are tensors here.
    """
    # Detail 35/37: sequential minibatches (num_minibatches) [ppo2/ppo2.py L167-180]
    # The LSTM learns along time, so a minibatch has all steps of some games, in their order.
    minibatch = Batch(*(x[:, chosen] for x in batch))
    loss, metrics = ppo_loss(agent, minibatch, args)
    adam.zero_grad()
    loss.backward()
    # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
    # One odd minibatch cannot throw the policy off, and the gradient keeps its direction.
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    adam.step()
    return {**metrics, "losses/grad_norm": grad_norm}


# === Training: collect, advantages, update, log ===


# Copied from ppo_atari.py
def train(
    args: Args | None = None,
    update: Callable[..., Tensors] | None = None,
    resume: str | Path | Saved | None = None,
    on_iteration: Callable[[dict[str, Any]], object] | None = None,
    agent_class: type[Agent] | None = None,
) -> dict[str, Any]:
    """Train an agent.

    `resume` is the folder of a run to continue; its settings are the default of `args`. Returns
    `agent`; the last `episodes`, each {"global_step", "return", "length"}; `updates`, the metrics
    of each iteration; `args`; `run_dir`, the folder of logs and checkpoints. After each iteration,
    `on_iteration` gets the same; it may raise to end the run. `update` takes the place of
    `ppo_update`, with the same arguments, and `agent_class` that of `Agent`.
    """
    # inference_mode(False) switches gradients on, even in `no_grad` of the caller.
    with torch.inference_mode(False), ExitStack() as resources:
        take_process(resources)
        saved = load_checkpoint(resume, agent_class) if resume else {}
        parts = Parts(update or ppo_update, on_iteration, agent_class or Agent)
        return learn(settings_for(saved, args), parts, saved, resources)


# Copied from ppo_atari.py
class Parts(NamedTuple):
    """What the caller of `train` may replace."""

    update: Callable[..., Tensors]
    on_iteration: Callable[[dict[str, Any]], object] | None
    agent_class: type[Agent]


def learn(args: Args, parts: Parts, saved: Saved, resources: ExitStack) -> dict[str, Any]:
    """Do what `train` says, which closes what is put on `resources`, even after an error."""
    # --- Device and sizes ---
    device = choose_device(args)
    to_tensor = functools.partial(torch.tensor, dtype=torch.float32, device=device)
    batch_size = args.num_steps * args.num_envs
    num_iterations = int(args.total_timesteps // batch_size)

    # --- Games, and arrays for a rollout (T, N, ...) ---
    games = Games(resources, args)  # before tensors and threads: forks copy what there is
    raw_obs = games.obs  # what the games show now, (N, 1, 84, 84)
    sizes = (games.num_actions,)  # what an agent is made for
    shape = (args.num_steps, args.num_envs)
    rewards = np.zeros(shape)
    # The last observation of a rollout is the first of the next one.
    obs = torch.zeros((args.num_steps + 1, *raw_obs.shape), dtype=torch.uint8, device=device)
    logits = torch.zeros((*shape, games.num_actions), device=device)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    values = torch.zeros(shape, device=device)
    starts = torch.ones((args.num_steps + 1, args.num_envs), device=device)
    terminated, truncated = np.zeros((2, *shape), dtype=bool)

    # --- Agent, optimizer, episodes, metrics: new, or from the checkpoint ---
    check_sizes(saved, sizes)
    torch.set_num_threads(args.torch_threads)  # the last bits of new weights depend on it
    torch.manual_seed(args.seed)
    agent = saved["agent"] if saved else parts.agent_class(*sizes)
    agent.to(device).eval()  # dropout and the like are only switched on for updates
    agent.bfloat16 = args.bfloat16
    adam = torch.optim.Adam(agent.parameters(), fused=True)  # its step size: before each update
    if saved:
        adam.load_state_dict(saved["adam"])
    episodes = saved.get("episodes", [])
    updates = saved.get("updates", [])
    global_step = updates[-1]["global_step"] if updates else 0
    finished = global_step // batch_size  # iterations
    state = agent.initial_state(args.num_envs)

    # --- The functions of a step and of an update, recorded on a GPU ---
    # Floats in `args` become tensors, which can change without compiling or recording again.
    # PyTorch's gradient clipping needs a number: reading it from a GPU would wait for the GPU.
    update_args = SimpleNamespace(**vars(args))
    for field in dataclasses.fields(args):
        if type(field.default) is float and field.name != "max_grad_norm":
            setattr(update_args, field.name, to_tensor(getattr(args, field.name)))

    @torch.no_grad()
    def choose(obs: Tensor, starts: Tensor, state: Tensor, noise: Tensor) -> Tensors:
        logits, values, state = agent(obs, starts, state)
        actions = draw(logits, noise)
        return {"logits": logits, "values": values, "actions": actions, "state": state}

    def learn_from(chosen: Tensor, *batch: Tensor) -> Tensors:
        return parts.update(agent, adam, Batch(*batch), chosen, update_args)

    is_recorded = device.type == "cuda"
    fast_choose = recorded(choose) if is_recorded else choose
    fast_learn_from = recorded(learn_from) if is_recorded else learn_from
    # PyTorch warns in the first calls, which are not recorded.
    warnings.filterwarnings("ignore", message=".*capturable=True")

    # --- Start: a resumed run continues its games, a new run begins new ones ---
    run_dir, run_id, writer = open_run(resources, args, saved, global_step)
    result = dict(agent=agent, episodes=episodes, updates=updates, args=args, run_dir=run_dir)

    def say_where(kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            advice = f"To continue from the last checkpoint: --resume {run_dir}"
            print(f"Interrupted at step {global_step}. {advice}", file=sys.stderr)

    resources.push(say_where)  # called at the end, with the error if there is one
    replayed = bool(saved) and replay_games(games, saved)
    if replayed:
        starts[-1] = saved["starts"].to(device)
        state = saved["state"].to(device)
    else:
        # A new run, or one that could not be replayed. Iteration `finished` drew its noise from
        # the same generator, which does no harm to seeds.
        rng = np.random.default_rng([args.seed, finished])
        games.call("load", {i: rng.integers(2**31).item() for i in range(args.num_envs)})
    obs[-1] = torch.from_numpy(raw_obs)

    # --- What is saved, so that a run can be resumed whenever it is stopped ---
    def save() -> None:
        state_of_run = {
            "args": vars(args),
            "sizes": sizes,
            "agent": agent.state_dict(),
            "adam": adam.state_dict(),
            "raw_obs": raw_obs,
            "running": games.call("record", dict.fromkeys(range(args.num_envs))),
            "starts": starts[-1].clone(),
            "state": state,
            "episodes": episodes,
            "updates": updates,
            "run_id": run_id,
        }
        save_checkpoint(run_dir, state_of_run)

    if not saved:
        save()  # so that a run can be resumed even before its first interval ends

    iterations = range(finished + 1, num_iterations + 1)
    if not iterations:
        print(f"Step {global_step} was the last one: raise --total-timesteps to train on.")
    progress = tqdm(iterations, initial=finished, total=num_iterations)
    for iteration in resources.enter_context(progress):
        # --- Collect: T steps in each of the N games, with fixed weights ---
        start_time = time.perf_counter()
        num_before = len(episodes)
        # Eight frames per thread are enough. More threads would spin idly and slow the games down.
        torch.set_num_threads(min(args.torch_threads, max(1, args.num_envs // 8)))
        rng = np.random.default_rng([args.seed, iteration])
        noise = to_tensor(rng.gumbel(size=logits.shape))
        final_obs = []  # where a time limit ended a game
        final_states = []
        obs[0] = obs[-1]  # where the last rollout ended
        starts[0] = starts[-1]
        rollout_state = state
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # Several environments make a batch more diverse. Each rollout continues the one before.
        for t in range(args.num_steps):
            global_step += args.num_envs
            now = slice(t, t + 1)  # a sequence of one step
            choice = fast_choose(obs[now], starts[now], state, noise[now])
            logits[now] = choice["logits"]
            values[now] = choice["values"]
            actions[now] = choice["actions"]
            state = choice["state"]
            ended = {}
            steps = games.call("step", dict(enumerate(actions[t].tolist())))
            for i, (reward, failed, cut_off, is_over) in enumerate(steps):
                rewards[t, i], terminated[t, i], truncated[t, i] = reward, failed, cut_off
                if cut_off:
                    final_obs.append(raw_obs[i].copy())
                    final_states.append(state[:, i])
                if failed or cut_off:  # a new game needs a seed, the next life does not
                    ended[i] = rng.integers(2**31).item() if is_over else None
            for scores in games.call("begin_next", ended):
                episodes += [{"global_step": global_step, **x} for x in scores]
            # Where a life or game has ended, this is the first observation of the next one.
            obs[t + 1] = torch.from_numpy(raw_obs)
            starts[t + 1] = torch.from_numpy(terminated[t] | truncated[t])

        # --- Advantages: log-probabilities and what comes next, then GAE ---
        torch.set_num_threads(args.torch_threads)
        if args.truncation_is_terminal:
            terminated |= truncated
        done = terminated | truncated
        batch_rewards = to_tensor(rewards)
        with torch.no_grad():
            logprobs, _ = categorical(logits, actions)  # (T, N)
            # The value of the next observation predicts what follows a step. Where the episode
            # ended, that observation belongs to the next episode, and the value is replaced.
            next_values = torch.cat([values[1:], agent(obs[-1:], starts[-1:], state)[1]])
            # Deviation: time limits are not failures (not truncation_is_terminal)
            # The game would have gone on, so bootstrap from its last observation (ppo2 uses 0).
            if final_obs:  # each with the state that led to it
                b_final_obs = torch.tensor(np.array(final_obs), device=device)[None]
                no_starts = torch.zeros(b_final_obs.shape[:2], device=device)
                _, final_values, _ = agent(b_final_obs, no_starts, torch.stack(final_states, 1))
                next_values[truncated] = final_values[0]
            next_values[terminated] = 0.0
            advantages = gae(
                batch_rewards, values, next_values, to_tensor(done), args.gamma, args.gae_lambda
            )
            returns = advantages + values  # targets for the values

        # --- Update: K epochs of minibatches ---
        remaining = 1 - (iteration - 1) / num_iterations  # falls from 1 to 1 / num_iterations
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps make progress; small ones at the end average out noise.
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1.0)
        # Extra: clip range annealing (clip_coef, anneal_clip) [ppo2/ppo2.py L137]
        # As the steps get smaller, the policy needs less room to move.
        clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1.0)
        update_args.clip_coef.fill_(clip_coef)  # `update` would not see an assignment
        update_args.learning_rate.fill_(learning_rate)
        # A recording reads the step size from the GPU.
        step_size = update_args.learning_rate if is_recorded else learning_rate
        # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
        # With PyTorch's 1e-8, weights with tiny gradients would take steps as large as any others.
        adam.param_groups[0].update(lr=step_size, eps=args.adam_eps, capturable=is_recorded)
        batch = Batch(
            obs[:-1], actions, logprobs, values, advantages, returns, starts[:-1], rollout_state
        )
        mb_metrics: list[Tensors] = []
        agent.train()
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(args.num_envs), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more than a large one. Here they use whole games.
            minibatches = order.view(args.num_minibatches, -1)
            epoch = [fast_learn_from(chosen, *batch) for chosen in minibatches]
            mb_metrics += epoch
            # Extra: early stopping (early_stop_kl) [Spinning Up: each step, at 1.5 times a target]
            # Clipping cannot hold back a policy that has already moved too far. Stopping can.
            if means(epoch)["losses/approx_kl"] > args.early_stop_kl:
                break
        agent.eval()

        # --- Log and save ---
        with torch.no_grad():  # one game, since all would take a tenth of the update's time
            one = (x[:, :1] for x in (obs[:-1], starts[:-1], rollout_state, actions))
            logratio = agent.evaluate_actions(*one)[1] - logprobs[:, :1]
        # What was paid in the end, to check `returns`, which `gae` has computed.
        observed = observed_returns(batch_rewards, next_values, terminated, done, args.gamma)
        bias = (values - observed).mean() / (observed.square().mean().sqrt() + 1e-8)
        metrics = means(mb_metrics)
        metrics |= {
            "losses/explained_variance": 1 - (returns - values).var() / (returns.var() + 1e-8),
            "check/target_std": returns.std(),  # what explained variance is relative to
            "check/value_bias": bias,  # nearly 0 once trained, if ends of episodes are right
            "check/update": (normalize(logratio) * normalize(advantages[:, :1])).mean(),  # positive
            "check/first_kl": mb_metrics[0]["losses/approx_kl"],  # 0 before the first step
            "check/entropy_share": metrics["losses/entropy"] / math.log(games.num_actions),
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
# Below: device, recorded functions, games, logs, checkpoints, `load_policy`, `main`.


def choose_device(args: Args) -> torch.device:
    """The device for learning: the GPU if there is one, unless --device says otherwise."""
    # A GPU is the faster choice: Pong runs at 2,932 steps/s on an H200. Before kernels were
    # recorded it ran at 655 on an H100.
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        raise UsageError("--device cuda needs a GPU and a build of PyTorch for it.")
    if args.bfloat16 and not gpu and torch.backends.cpu.get_cpu_capability() == "AVX2":
        raise UsageError("Without AVX-512, bfloat16 is ten times slower: use --no-bfloat16.")
    return torch.device("cuda" if gpu else "cpu")


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


# === Games, and the processes that play them ===
# Copied from ppo_atari.py


def make_game(args: Args) -> gym.Env:
    """Make one game, without the wrappers. A step is a frame, which `render` shows."""
    import ale_py
    import cv2

    gym.register_envs(ale_py)
    cv2.setNumThreads(1)  # waking other threads takes longer than resizing an image this small
    if ":" in args.env_id:
        raise UsageError(f"--env-id ({args.env_id}) must name a game of ALE, without a module.")
    if args.env_id in ("Backgammon", "VideoCheckers"):
        raise UsageError(f"{args.env_id} has no no-op action, which this script needs to start.")
    return gym.make(
        f"ALE/{args.env_id}-v5",
        obs_type="ram",  # unused, because NoopReset and MaxAndSkip render the screen
        render_mode="rgb_array",
        frameskip=1,  # MaxAndSkip repeats the actions
        repeat_action_probability=args.sticky_actions,
        full_action_space=False,
        max_num_frames_per_episode=None,  # TimeLimit counts the agent's steps
    )


class Game:
    """One game. It records how it began and its actions since then, so that it can be replayed.

    What the agent sees, (k, 84, 84), is written into `obs`.
    """

    def __init__(self, env: gym.Env, obs: np.ndarray) -> None:
        self.env = env
        self.obs = obs
        self.ale = env.unwrapped.ale

    def load(self, seed: int) -> None:
        """Load the game, which seeds the emulator's random numbers, and begin it."""
        self.env.unwrapped.reset(seed=seed)
        self.begin_next(seed)

    def begin_next(self, seed: int | None) -> list[dict]:
        """Begin the next life or, with a seed for its no-ops, the next game; return new scores."""
        if seed is not None:
            self.seed = seed
            self.emulator = self.ale.cloneState(include_rng=True).__getstate__()  # its random state
            self.actions: list[int] = []
            # `reset(seed=seed)` would also load the game again, which takes 18 times as long.
            self.env.unwrapped.np_random = np.random.default_rng(seed)
            self.env.set_wrapper_attr("game_over", True)  # even if another game is running
        self.obs[:], _ = self.env.reset()
        scores = self.env.get_wrapper_attr("scores")  # of games that have ended since the last call
        return [scores.pop(0) for _ in range(len(scores))]

    def step(self, action: int) -> tuple[float, bool, bool, bool]:
        """Take one step; return reward, terminated, truncated, and if the whole game is over."""
        self.actions.append(action)
        self.obs[:], reward, terminated, truncated, _ = self.env.step(action)
        return reward, terminated, truncated, self.env.get_wrapper_attr("game_over")

    def record(self, _: None) -> tuple[int, bytes, np.ndarray]:
        """What `replay` needs to restore this moment."""
        return self.seed, self.emulator, np.array(self.actions, dtype=np.int64)

    def replay(self, recorded: tuple[int, bytes, Tensor]) -> None:
        """Begin a game as recorded, and take its actions."""
        from ale_py import ALEState

        seed, emulator, actions = recorded
        self.ale.restoreState(ALEState(emulator))
        self.begin_next(seed)
        for action in actions.tolist():
            _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                self.begin_next(None)  # the scores were noted the first time


class Games:
    """N games, each played by one of several processes: this one or a fork of it.

    It makes no difference which process plays a game, so results do not depend on their number.
    """

    def __init__(self, resources: ExitStack, args: Args) -> None:
        count = min(GAME_PROCESSES, args.num_envs) if sys.platform == "linux" else 1
        self.shares = [range(k, args.num_envs, count) for k in range(count)]
        shape = (args.num_envs, NUM_FRAMES, 84, 84)
        self.obs = np.frombuffer(mmap.mmap(-1, math.prod(shape)), np.uint8).reshape(shape)  # shared
        self.games = {i: Game(make_env(args), self.obs[i]) for i in self.shares[0]}
        for game in self.games.values():
            resources.callback(game.env.close)
        self.num_actions = self.games[0].env.action_space.n.item()
        self.pipes: list[Connection] = []
        for share in self.shares[1:]:
            pipe, other_end = multiprocessing.Pipe()
            fork = multiprocessing.get_context("fork").Process
            process = fork(target=self.serve, args=(args, share, other_end), daemon=True)
            process.start()
            resources.callback(process.join)
            resources.callback(process.kill)
            other_end.close()  # otherwise the end of that process would go unnoticed
            self.pipes.append(pipe)

    def serve(self, args: Args, share: range, pipe: Connection) -> None:
        """Play a share of the games in a process of its own, until the first process ends."""
        for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C is for the first process
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with it
        self.games = {i: Game(make_env(args), self.obs[i]) for i in share}
        while os.getppid() == multiprocessing.parent_process().pid:  # else it died before
            pipe.send(self.play(*pipe.recv()))

    def play(self, method: str, arguments: dict[int, Any]) -> dict[int, Any] | Exception:
        """Call a method of games that this process plays."""
        try:
            return {i: getattr(self.games[i], method)(x) for i, x in arguments.items()}
        except Exception as error:  # raised in the first process
            return error

    def call(self, method: str, arguments: dict[int, Any]) -> list:
        """Call a method of each of these games, {game: argument}, all at the same time."""
        mine, *others = ({i: arguments[i] for i in x if i in arguments} for x in self.shares)
        asked = [(pipe, theirs) for pipe, theirs in zip(self.pipes, others) if theirs]
        try:
            for pipe, theirs in asked:
                pipe.send((method, theirs))
            answers = [self.play(method, mine), *(pipe.recv() for pipe, _ in asked)]
        except (EOFError, ConnectionError) as error:
            reason = "A process that plays games was killed"
            raise UsageError(f"{reason}: use --resume to continue from the checkpoint.") from error
        results: dict[int, Any] = {}
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            results |= answer
        return [results[i] for i in arguments]


def replay_games(games: Games, saved: Saved) -> bool:
    """Replay the running games of a checkpoint. Return whether that worked."""
    try:
        games.call("replay", dict(zip(range(len(games.obs)), saved["running"])))
        if not np.array_equal(games.obs, saved["raw_obs"]):
            raise ValueError("the observations differ, or --num-envs does")
    except Exception as error:  # whatever another version of the emulator can raise
        print(f"New games begin, since the running ones could not be replayed: {error}.")
        return False
    return True


# === Metrics, logs, checkpoints ===

SCRIPT = Path(globals().get("__file__", "notebook"))  # pasted into a notebook, it has no file


# Copied from ppo_continuous_action.py
def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over the minibatches of all rows, one or several of them in each."""
    return {x: torch.cat([row[x].flatten() for row in rows]).mean().item() for x in rows[0]}


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def episode_means(episodes: list[dict]) -> dict[str, float]:
    """Mean return and length of episodes, as metrics; none if there is no episode."""
    names = ("return", "length") if episodes else ()
    return {f"charts/episodic_{x}": np.mean([y[x] for y in episodes]).item() for x in names}


# Copied from ppo_continuous_action.py
def check_finite(metrics: dict[str, float], step: int) -> None:
    """End a run whose numbers are no numbers any more."""
    bad = ", ".join(name for name, x in metrics.items() if not math.isfinite(x))
    if bad:
        raise UsageError(f"Not finite at step {step}: {bad}. Check observations and rewards.")


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_atari.py
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
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, then replaced
            agent = (agent_class or Agent)(*saved["sizes"])
        agent.load_state_dict(saved["agent"], assign=True)  # float32, whatever the caller's default
        saved["agent"] = agent.eval()
        saved["args"] = Args(**saved["args"])
        if not isinstance(saved["episodes"], list):
            raise ValueError("its episodes are in columns, as in version 6")
    except Exception as error:  # whatever a missing, damaged or foreign file can raise
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        problem = "missing, damaged, or from another script or version"
        raise UsageError(f"{path} is {problem}: {reason}") from error
    saved["run_dir"] = Path(run_dir)
    return saved


# Copied from ppo_atari.py
def settings_for(saved: Saved, args: Args | None) -> Args:
    """`args`, or by default those of a checkpoint, if there is one. Refuses what cannot work."""
    args = args or saved.get("args") or Args()
    if vars(args).keys() != vars(Args()).keys():  # a subclass: --resume would fail, too late
        raise UsageError("Only settings of Args itself can be loaded again: add yours to it.")
    if saved and args.run_name not in (None, saved["args"].run_name):
        raise UsageError(f"--run-name: a run stays in its folder, {saved['run_dir']}.")
    return args


# Copied from ppo_continuous_action.py
def check_sizes(saved: Saved, sizes: tuple) -> None:
    """Refuse to go on, or to act, in an environment with other spaces."""
    if saved and saved["sizes"] != sizes:
        raise UsageError(f"{saved['run_dir']} was trained in an environment with other spaces.")


# === The use of a policy, and `main` ===


def load_policy(run_dir: str | Path | Saved, env: gym.Env) -> Callable[..., int]:
    """The trained policy: `policy(obs, start)` is the most likely action; `env` is from `make_env`.

    The policy remembers what it has seen until `start` is true, as it must be for the first
    observation of each life or game. With standard Gumbel `noise` (A,) it samples.
    """
    saved = load_checkpoint(run_dir)
    check_sizes(saved, (env.action_space.n.item(),))
    agent = saved["agent"]
    agent.bfloat16 = saved["args"].bfloat16
    state = agent.initial_state(1)

    @torch.no_grad()
    def policy(obs: np.ndarray, start: bool, noise: np.ndarray | float = 0.0) -> int:
        nonlocal state
        frames = torch.tensor(np.asarray(obs, dtype=np.uint8).reshape(1, 1, NUM_FRAMES, 84, 84))
        starts = torch.tensor([[start]], dtype=torch.float32)
        logits, _, state = agent(frames, starts, state)
        return draw(logits[0, 0], torch.as_tensor(noise)).item()

    return policy


# Copied from ppo_atari.py
@dataclasses.dataclass(frozen=True)
class Command:
    args: tyro.conf.OmitArgPrefixes[Args]
    paper: bool = False  # use the paper's 3 epochs, vf_coef 2, annealed clip; other flags win
    resume: str | None = None  # continue the run in this folder; other flags change its settings
    evaluate: str | None = None  # play games with the policy in this folder; no training
    eval_episodes: int = 10  # number of games, with --evaluate
    capture_video: bool = False  # film the first games, with --evaluate
    video_length: int = 1000  # frames of the film, with --capture-video


def evaluate(
    run_dir: str | Path | Saved,
    episodes: int = 10,
    video: bool = False,
    args: Args | None = None,
    video_length: int = 1000,
) -> list[float]:
    """Play whole games with the most likely actions of a trained policy; return their returns.

    `video` films them, up to `video_length` frames. `args`, if given, has other settings of the
    game.
    """
    for flag, count in (("--eval-episodes", episodes), ("--video-length", video_length)):
        if count < 1:
            raise UsageError(f"{flag} must be at least 1.")
    saved = load_checkpoint(run_dir)
    args = settings_for(saved, args)
    folder = saved["run_dir"] / "videos"
    with ExitStack() as resources:
        env = make_env(args, f"{folder}" if video else None, video_length)
        resources.callback(env.close)
        obs = np.zeros((NUM_FRAMES, 84, 84), dtype=np.uint8)
        game = Game(env, obs)
        policy = load_policy(saved, env)
        progress = resources.enter_context(tqdm(unit=" steps", disable=not video))  # it takes long
        returns = []
        for seed in range(episodes):
            game.load(seed)
            start = True
            scores = []
            while not scores:  # every game ends, at its time limit at the latest
                _, terminated, truncated, _ = game.step(policy(obs, start))
                progress.update()
                start = terminated or truncated
                if start:
                    scores = game.begin_next(None)
            returns.append(scores[0]["return"])
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


def main() -> None:
    """Train, resume or evaluate, as the command line says."""
    # The settings of a run are the defaults of the other flags, so its folder is read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="folder")
    parser.add_argument("--paper", action="store_true")
    with command_line() as flags:
        given = parser.parse_known_args(flags)[0]
        saved = load_checkpoint(given.folder) if given.folder is not None else {}
        args = saved.get("args") or Args()
        if given.paper:
            args = dataclasses.replace(args, **PAPER)
        command = tyro.cli(Command, args=flags, default=Command(args))
        args = command.args
        if command.resume and command.evaluate:
            raise UsageError("--resume trains, and --evaluate does not: choose one of them.")
        if command.evaluate is not None:
            for name, value in vars(args).items():
                if value != getattr(saved["args"], name) and name not in PLAYED:
                    flag = f"--{name.replace('_', '-')}"
                    raise UsageError(f"{flag} is for training: --evaluate does not use it.")
            episodes, video = command.eval_episodes, command.capture_video
            evaluate(saved, episodes, video, args, command.video_length)
        elif command != Command(args, command.paper, command.resume):
            raise UsageError("--eval-episodes, --capture-video, --video-length need --evaluate.")
        else:
            run_dir = train(args, resume=saved)["run_dir"]
            print(f"Next: --evaluate {run_dir}, or tensorboard --logdir {run_dir}")


if __name__ == "__main__":
    main()
