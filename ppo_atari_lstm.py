# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py==0.12.1", "gymnasium==1.4.0", "moviepy==2.2.1", "numpy==2.4.6",
#   "opencv-python-headless==5.0.0.93", "pydantic==2.14.3", "tensorboard==2.21.0",
#   "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.16", "wandb==0.31.0"]
# ///
"""PPO with an LSTM for Atari games, in one file: one frame and a memory instead of four frames.

    python ppo_atari_lstm.py --env-id Breakout

The algorithm of Schulman et al. 2017 (arXiv 1707.06347) as OpenAI implemented it in ppo2 =
openai/baselines@ea25b9e8. It repeats: act with the policy (rollout); judge each action by how much
more discounted reward it brought than the value function expected (advantage); make better ones
likelier in several passes over these samples, with no gain beyond a small factor (clipping).

"The 37 Implementation Details of PPO" (Huang et al. 2022) numbers what it takes to reproduce ppo2.
Each is a comment above the statement that does it, with its settings in parentheses, its place
below baselines/ in brackets, and in the next line its reason; `--details` lists them. Here are
1-13 (core), 14-22 (Atari), 32-36 (LSTM) and two of the four auxiliary ones; 23-31 are in
ppo_continuous_action.py, 37 in ppo_multidiscrete.py. New against ppo_atari.py: the agent's LSTM,
its state in `train`, and minibatches of whole environments.

Training is U iterations. Each has a rollout, T = num_steps steps in each of N = num_envs games, and
an update, K = update_epochs epochs over its T*N samples in minibatches of B games. An observation
is one frame, one of A actions lasts four. The LSTM has H = 128 units; a state is one tensor
(2, B, H), their output and their cells. `starts` is 1 where a frame is the first of a life or game.
The games are those of ale-py.

Deviations from ppo2: where a time limit cuts a game off, the value of its final observation, under
the state that led to it, is the rest's (`--truncation-is-terminal` restores ppo2), and the limit is
the usual 108,000 frames, not 400,000; where a press that begins a life ends it, the next life's
observation is returned, not the old one; one frame is seen, as by Huang et al., where ppo2 stacks
four; the no-ops of each game have a seed of their own; Adam is PyTorch's, which adds epsilon to the
root after its correction, not before; gradients are scaled by max_grad_norm / (norm + 1e-6), there
without 1e-6; the logged KL is k3 (see `approx_kl`), not k2; orthogonal matrices come from a QR
decomposition, not an SVD (up to signs equal in distribution).

`--paper` takes the numbers of the paper's Table 5, no more: values stay clipped, of which the paper
says nothing (`--no-clip-vloss`), and the network, where the paper names that of A3C (Mnih et al.
2016), keeps the CNN of Mnih et al. 2015 and the LSTM, which the paper did not use.
"""

import copy
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import pydantic
import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Settings ===

Tensors = dict[str, Tensor]
FRAME_SKIP = 4  # frames that one step of the agent lasts [common/atari_wrappers.py L270]
NOOP_MAX = 30  # most no-op frames before a game [common/atari_wrappers.py L269]
MAX_GAME_STEPS = 108_000 // FRAME_SKIP  # steps before a game is truncated: half an hour of play
NUM_FRAMES = 1  # frames in an observation, k; the LSTM remembers the others
HIDDEN_SIZE = 128  # units of the LSTM, H [common/models.py L187]

# What --paper changes: Table 5 of the paper, whose value loss is a whole square and c1 = 1.
PAPER = {"update_epochs": 3, "vf_coef": 2.0, "anneal_clip": True}


# Copied from ppo_atari.py
def game_name(env_id: str) -> str:
    """The name in ale-py of a game that is BreakoutNoFrameskip-v4 or ALE/Breakout-v5 elsewhere."""
    return re.sub(r"^(?:ALE/)?(\w+?)(?:NoFrameskip-v4|-v5)?$", r"\1", env_id)


Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
Game = Annotated[str, pydantic.AfterValidator(game_name)]


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args:
    # --- Experiment ---
    seed: NonNegativeInt = 1  # seed of everything that is random in the run
    total_timesteps: PositiveInt = 10_000_000  # of all environments; annealing stretches over them
    paper: bool = False  # the paper's 3 epochs, vf_coef 2, annealed clip; flags beside it win
    run_name: str | None = None  # folder below runs/; by default environment, script, seed, time
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one, for the CNN
    torch_threads: PositiveInt = min(8, os.cpu_count() or 1)  # of the update
    bfloat16: bool = False  # compute the CNN in bfloat16; weights, heads and losses are float32
    compile: bool = True  # compile the loss and its gradient, on a GPU; has no effect elsewhere
    track: bool = False  # send the logs to Weights & Biases too (WANDB_MODE=offline: to disk)
    checkpoint_interval: PositiveInt = 25  # iterations between two checkpoints
    resume: str | None = None  # continue the run in this folder; flags given beside it override
    evaluate: str | None = None  # play episodes with the model in this folder instead of training
    eval_episodes: PositiveInt = 10  # games of each policy, best and sampled, with --evaluate
    capture_video: bool = False  # film the first episode of each policy, with --evaluate
    details: bool = False  # print the implementation details with their values here, and exit

    # --- Environment ---
    env_id: Game = "Breakout"  # Atari game; from ALE/Breakout-v5 the name is taken, no stickiness
    num_envs: PositiveInt = 8  # environments N, stepped in turn [ppo2, MuJoCo: 1; paper, Atari: 8]
    sticky_actions: Fraction = 0.0  # chance that a frame repeats the last action [Machado: 0.25]
    truncation_is_terminal: bool = False  # treat time limits as failures, as ppo2 does

    # --- PPO ---
    num_steps: PositiveInt = 128  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: PositiveInt = 4  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: PositiveInt = 4  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: NonNegativeFloat = 2.5e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    anneal_lr: bool = True  # lower the step size linearly towards 0 [ppo2; paper: Atari only]
    adam_eps: PositiveFloat = 1e-5  # Adam's epsilon [ppo2: 1e-5]
    gamma: Fraction = 0.99  # discount factor [paper: 0.99]
    gae_lambda: Fraction = 0.95  # 0: one-step advantages; 1: sums of all rewards [paper: 0.95]
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: PositiveFloat = 0.1  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    anneal_clip: bool = False  # lower that linearly towards 0 [paper: Atari only; ppo2: off]
    clip_vloss: bool = True  # clip the change of values to clip_coef too [ppo2; not in the paper]
    ent_coef: NonNegativeFloat = 0.01  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: NonNegativeFloat = 0.5  # weight of the value loss, half a square, c1 [ppo2: 0.5]
    max_grad_norm: PositiveFloat = 0.5  # largest norm of the whole gradient [ppo2: 0.5; inf: off]
    early_stop_kl: PositiveFloat = math.inf  # end an update after an epoch of larger KL [inf: off]

    @property
    def batch_size(self) -> int:
        """Samples per iteration, T*N."""
        return self.num_steps * self.num_envs

    @property
    def num_iterations(self) -> int:
        """Rollouts, each followed by an update (U)."""
        return self.total_timesteps // self.batch_size

    def check(self) -> None:
        """Raise ValueError where settings do not fit together; their types limit single ones."""
        batch = f"the batch of num_steps * num_envs = {self.batch_size} steps"
        if self.num_envs % self.num_minibatches or self.batch_size < 2 * self.num_minibatches:
            hint = f"must divide num_envs, {self.num_envs}, into parts of two or more samples"
            raise ValueError(f"--num-minibatches {hint}.")
        if self.num_iterations < 1:
            raise ValueError(f"--total-timesteps must not be less than {batch}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU and a build of PyTorch for it.")
        on_cpu = self.device == "cpu" or not torch.cuda.is_available()
        if self.bfloat16 and on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2":
            raise ValueError("Without AVX-512, bfloat16 is ten times slower: take --no-bfloat16.")


# === Preprocessing: the wrappers of ppo2, inside out [common/atari_wrappers.py L266-289] ===


# Copied from ppo_atari.py
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


# Copied from ppo_atari.py
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


# Copied from ppo_atari.py
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


# Copied from ppo_atari.py
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


# Copied from ppo_atari.py
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


# Copied from ppo_atari.py
class ClipReward(gym.RewardWrapper):
    """Learn from the sign, -1, 0 or +1, of each reward."""

    def reward(self, reward: float) -> float:
        # Detail 19/37: reward clipping to sign [common/atari_wrappers.py L125-131]
        # Points are ones in one game and thousands in another; signs suit the same settings.
        return float(np.sign(reward))


# Copied from ppo_atari.py
def make_env(args: Args, video: str | None = None) -> gym.Env:
    """Make one game with observations (k, 84, 84); its first episode is filmed as `video`."""
    env = NoopReset(make_game(args, filmed=bool(video)))
    env = MaxAndSkip(env)
    env = gym.wrappers.TimeLimit(env, MAX_GAME_STEPS)
    if video:
        film = {"episode_trigger": lambda k: k == 0, "fps": 60 // FRAME_SKIP}
        env = gym.wrappers.RecordVideo(env, f"{args.evaluate}/videos", name_prefix=video, **film)
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
    """Policy and value function on the CNN of Mnih et al. 2015 (Nature) and an LSTM.

    Both heads stand on the LSTM's output: ppo2's `cnn_lstm` [common/models.py L187-210].
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
        # The four gates side by side, in one matrix for the input and one for the past output. As
        # in ppo2 there is one bias, and none of 1 for the forget gate.
        # Detail 32/37: layer initialization [a2c/utils.py L84-86]
        # Orthogonal matrices with gain 1 neither blow up nor wipe out what passes them each step.
        self.lstm_input = layer_init(nn.Linear(512, 4 * HIDDEN_SIZE), 1.0)
        self.lstm_recurrent = nn.Linear(HIDDEN_SIZE, 4 * HIDDEN_SIZE, bias=False)
        nn.init.orthogonal_(self.lstm_recurrent.weight, 1.0)  # as Detail 32
        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        # Both heads need the same features, and the CNN that finds them costs nearly everything.
        self.policy = layer_init(nn.Linear(HIDDEN_SIZE, num_actions), 0.01)
        self.value = layer_init(nn.Linear(HIDDEN_SIZE, 1), 1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """State (2, N, H) before the first step of the training."""
        # Detail 33/37: zero initial states [common/models.py L206]
        # There is no past yet; a later rollout begins with the state that the last one has left.
        return torch.zeros((2, num_envs, HIDDEN_SIZE), device=self.value.weight.device)

    def features(self, obs: Tensor) -> Tensor:
        """Features (B, 512) of frames (B, 1, 84, 84), which arrive as stored, in uint8."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # Detail 22/37: image scaling [common/models.py L19]
            # Layers are initialized for inputs near 1; until here one byte per pixel is stored.
            scaled = obs / 255.0
            # The strides of channels_last, which convolutions compute fastest in; `contiguous` does
            # not set them where there is one channel.
            scaled = scaled.contiguous().as_strided(scaled.shape, (84 * 84, 1, 84, 1))
            return self.cnn(scaled).float()

    def remember(self, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run the LSTM along T steps; acting is the case T = 1.

        Takes frames (T, B, 1, 84, 84), starts (T, B) and the state (2, B, H) before the first step;
        returns outputs (T, B, H) and the state after the last step.
        """
        inputs = self.lstm_input(self.features(obs.flatten(0, 1)))  # for all steps at once
        output, cell = state
        outputs = []
        for step_inputs, start in zip(inputs.view(*starts.shape, -1), starts[..., None]):
            # Detail 34/37: reset at episode end [a2c/utils.py L89-91]
            # What was before says nothing about the new life; no gradient passes its start either.
            output, cell = output * (1 - start), cell * (1 - start)
            gates = step_inputs + self.lstm_recurrent(output)  # (B, 4H)
            write, keep, candidate, read = gates.chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + write.sigmoid() * candidate.tanh()
            output = read.sigmoid() * cell.tanh()
            outputs.append(output)
        return torch.stack(outputs), torch.stack([output, cell])

    def forward(self, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (T, B, A) of the actions and values (T, B), and the state after the last step."""
        outputs, state = self.remember(obs, starts, state)
        return self.policy(outputs), self.value(outputs).squeeze(-1), state

    def get_value(self, obs: Tensor, starts: Tensor, state: Tensor) -> Tensor:
        """Values (T, B) of frames (T, B, 1, 84, 84)."""
        return self.value(self.remember(obs, starts, state)[0]).squeeze(-1)

    def evaluate_actions(
        self, obs: Tensor, starts: Tensor, state: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of actions (T, B), entropies and values, all (T, B)."""
        logits, values, _ = self(obs, starts, state)
        return *categorical(logits, actions), values


# Copied from ppo_atari.py
def categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions (...) under the softmax of logits (..., A), and entropies."""
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(-1, actions[..., None]).squeeze(-1)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1)


# Copied from ppo_atari.py
def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """What acts, in training and after: actions (...) of logits (..., A).

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


# Copied from ppo_continuous_action.py
def normalize(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and std 1; population std (divisor n) as in ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """Estimate KL(old || new) from the old policy's actions by k3 = mean(r - 1 - log r), r new/old.

    Unbiased as k1 = mean(-log r) but less noisy and never negative; k2 = mean((log r)^2) / 2, which
    ppo2 logs, is biased (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


def ppo_loss(
    agent: Agent, minibatch: list[Tensor], schedule: Tensors, args: Args
) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated), and debug variables, most by CleanRL's names.

    The minibatch holds obs (T, B, 1, 84, 84), starts (T, B), the state (2, B, H) before the
    rollout, actions and, computed by the agent that collected them, logprobs, values, advantages
    and returns (T, B); `schedule` the numbers that change during a run.
    """
    obs, starts, state, actions, old_logprobs, old_values, advantages, returns = minibatch
    # Detail 36/37: rebuild states in training [ppo2/ppo2.py L179-180]
    # Stored ones would be of old weights, and gradients would end there; only the first is stored.
    logprobs, entropies, values = agent.evaluate_actions(obs, starts, state, actions)
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


def ppo_update(
    agent: Agent,
    adam: torch.optim.Adam,
    batch: list[Tensor],
    mb: Tensor,
    schedule: Tensors,
    args: Args,
    loss_function: Callable = ppo_loss,
) -> Tensors:
    """One step of Adam on the games `mb` (B,) of the batch (T, N, ...); returns the metrics."""
    # Detail 35/37: sequential minibatches (num_minibatches) [ppo2/ppo2.py L167-180]
    # Memory is learned along time: a minibatch is all the steps, in their order, of some games.
    minibatch = [x[:, mb] for x in batch]
    loss, metrics = loss_function(agent, minibatch, schedule, args)
    adam.zero_grad()
    loss.backward()
    # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
    # One odd minibatch must not throw the policy far; scaled as a whole, the direction is kept.
    grad_norm = nn.utils.clip_grad_norm_(learned(agent), args.max_grad_norm)
    adam.step()
    return {**metrics, "losses/grad_norm": grad_norm}


# === Training: collect, advantages, update, log ===


def train(args: Args, update: Callable = ppo_update) -> dict[str, Any]:
    """Run PPO; logs and checkpoints go below runs/.

    Returns `agent`; `episodes`, each {"global_step", "return", "length"}; `updates`, one dictionary
    of metrics per iteration; `args`; `run_dir`. Raises ValueError where something does not fit.
    An `update` of your own takes what `ppo_update` takes; its loss function may be a compiled one.
    """
    args.check()
    use_gpu = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    torch.manual_seed(args.seed)

    envs = Environments([make_env(args) for _ in range(args.num_envs)])
    num_actions = envs.envs[0].action_space.n.item()
    agent = Agent(num_actions, args).to(device)
    # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
    # With PyTorch's own, 1e-8, weights whose gradients are tiny would take steps as large as any.
    adam = torch.optim.Adam(learned(agent), eps=args.adam_eps, fused=True)
    if args.compile and use_gpu:  # a CPU takes minutes for the T unrolled steps, and gains nothing
        loss_function = compiled(ppo_loss, loss_and_gradients)
        update = functools.partial(update, loss_function=loss_function)

    # The rollout, (T, N, ...); its last observation becomes the first one of the next rollout.
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((args.num_steps + 1, *envs.obs.shape), dtype=torch.uint8, device=device)
    starts = torch.ones((args.num_steps + 1, args.num_envs), device=device)
    state = agent.initial_state(args.num_envs)
    logits = torch.zeros((*shape, num_actions), device=device)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    values = torch.zeros(shape, device=device)
    rewards = np.zeros(shape)
    terminated, truncated = np.zeros_like(rewards, dtype=bool), np.zeros_like(rewards, dtype=bool)
    history: list[dict[str, float]] = []  # metrics of each iteration

    run_dir, saved, writer = open_run(args, args.env_id, ["num_envs", "num_steps"])
    if saved:
        load_weights(agent, saved)
        adam.load_state_dict(adam.state_dict() | {"state": saved["adam"]})  # settings are `args`'
        history = saved["updates"]
    if saved and envs.replay(saved):
        starts[-1], state = saved["starts"].to(device), saved["state"].to(device)
    else:
        envs.reset(np.random.default_rng([args.seed, len(history)]))
    obs[-1] = torch.from_numpy(envs.obs)
    remaining = range(envs.global_step // args.batch_size + 1, args.num_iterations + 1)

    for iteration in (progress := tqdm(remaining, mininterval=1)):
        # --- Collect: T steps in each of the N environments, with the weights held fixed ---
        start_time = time.perf_counter()
        # Eight frames keep a thread busy; more would wait, spinning, and slow down the games.
        torch.set_num_threads(min(args.torch_threads, max(1, args.num_envs // 8)))
        rng = np.random.default_rng([args.seed, iteration])
        noise = torch.tensor(rng.gumbel(size=logits.shape).astype(np.float32), device=device)
        first_episode = len(envs.episodes)
        final_obs, final_states = [], []  # where a time limit ended a game
        obs[0], starts[0], rollout_state = obs[-1], starts[-1], state
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        # More environments vary a batch; rollouts go on where the last ended, in mid-episode too.
        for t in range(args.num_steps):
            step = slice(t, t + 1)  # a sequence of one
            with torch.no_grad():
                logits[step], values[step], state = agent(obs[step], starts[step], state)
            actions[t] = draw(logits[t], noise[t])
            rewards[t], terminated[t], truncated[t] = envs.step(actions[t].tolist(), rng)
            # Where a life or game has ended, this is the first observation of the next one.
            obs[t + 1] = torch.from_numpy(envs.obs)
            starts[t + 1] = torch.from_numpy(terminated[t] | truncated[t])
            if truncated[t].any():
                final_obs.append(envs.final_obs[truncated[t]])
                final_states.append(state[:, truncated[t]])
        rollout_time = time.perf_counter()

        # --- Advantages: log-probabilities and what comes next, then GAE ---
        torch.set_num_threads(args.torch_threads)
        # Deviation: time limits are not failures (not truncation_is_terminal)
        # What a limit cuts off had a future, worth the value of its last observation; ppo2 says 0.
        if args.truncation_is_terminal:
            terminated |= truncated
        b_rewards, b_terminated, b_done = (
            torch.tensor(x, dtype=torch.float32, device=device)
            for x in (rewards, terminated, terminated | truncated)
        )
        with torch.no_grad():
            old_logprobs, _ = categorical(logits, actions)  # (T, N)
            # Where an episode ended, values[t + 1] belongs to the next one: `gae` masks it by
            # `terminated`, and after a time limit the value of the final observation replaces it.
            next_values = torch.cat([values[1:], agent.get_value(obs[-1:], starts[-1:], state)])
            if final_obs:
                b_final_obs = torch.tensor(np.concatenate(final_obs), device=device)[None]
                no_starts = torch.zeros(b_final_obs.shape[:2], device=device)
                final_state = torch.cat(final_states, dim=1)
                next_values[truncated] = agent.get_value(b_final_obs, no_starts, final_state)[0]
            advantages, returns = gae(
                b_rewards, values, next_values, b_terminated, b_done, args.gamma, args.gae_lambda
            )

        # --- Update: K epochs of minibatches ---
        frac = 1 - (iteration - 1) / args.num_iterations  # 1 in the first one, 1/U in the last
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        # Large steps find the way; small ones at the end settle what noise would undo.
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        adam.param_groups[0]["lr"] = learning_rate
        # Extra: clip range annealing (clip_coef, anneal_clip) [ppo2/ppo2.py L137]
        # The policy may move less and less, as the annealed step size lets it.
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1.0)
        # What changes during a run: the numbers in `args` are constants of the compiled loss.
        scheduled = {"learning_rate": learning_rate, "clip_coef": clip_coef}
        schedule = {name: torch.tensor(x, device=device) for name, x in scheduled.items()}
        batch = [obs[:-1], starts[:-1], rollout_state]  # games on the second axis
        batch += [actions, old_logprobs, values, advantages, returns]
        mb_metrics = []
        for _ in range(args.update_epochs):
            order = torch.tensor(rng.permutation(args.num_envs), device=device)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Many small steps learn more from a batch than one; here they are of whole games.
            for mb in order.chunk(args.num_minibatches):
                mb_metrics.append(update(agent, adam, batch, mb, schedule, args))
            epoch_kl = means(mb_metrics[-args.num_minibatches :])["losses/approx_kl"]
            # Extra: early stopping (early_stop_kl) [Spinning Up: each step, at 1.5 times a target]
            # Clipping does not hold a policy that has left already: stopping does.
            if epoch_kl > args.early_stop_kl:
                break
        with torch.no_grad():  # of one environment, since all would take a tenth of the update
            one = (x[:, :1] for x in batch[:4])
            logratio = agent.evaluate_actions(*one)[0] - old_logprobs[:, :1]
        metrics = means(mb_metrics) | {f"charts/{name}": x for name, x in scheduled.items()}
        update_time = time.perf_counter()

        # --- Log and save ---
        came = outcomes(b_rewards, next_values, b_terminated, b_done, args.gamma)
        metrics |= means([compare(logratio, advantages, values, came)])
        metrics |= {
            "losses/explained_variance": (1 - (returns - values).var() / returns.var()).item(),
            "policy/entropy_share": metrics["losses/entropy"] / math.log(num_actions),
            "check/first_kl": mb_metrics[0]["losses/approx_kl"].item(),  # ratios are 1 there
            "advantages/std": advantages.std(correction=0).item(),
            "charts/epochs": len(mb_metrics) // args.num_minibatches,
            "charts/SPS": args.batch_size / (update_time - start_time),
            "charts/SPS_rollout": args.batch_size / (rollout_time - start_time),
            "charts/SPS_update": args.batch_size / (update_time - rollout_time),
        }
        history.append({"global_step": envs.global_step, **metrics})
        warn(history)
        log(writer, history[-1], envs.episodes[first_episode:])
        recent = [episode["return"] for episode in envs.episodes[-100:]] or [math.nan]
        progress.set_postfix_str(f"return {np.mean(recent):.1f}", refresh=False)
        if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
            content = {"agent": agent.state_dict(), "adam": adam.state_dict()["state"]}
            content |= {"num_actions": num_actions, "env_name": args.env_id, "updates": history}
            content |= {"starts": starts[-1], "state": state, **envs.state()}
            save_checkpoint(run_dir, args, content)
    writer.close()
    results = {"agent": agent, "episodes": envs.episodes, "updates": history}
    return {**results, "args": args, "run_dir": run_dir}


# === The algorithm ends here ===
# Below: games whose running episodes can be played again, the folder of a run and its
# checkpoints, the compiled loss, warnings, the use of a trained policy, the command line.

SCRIPT = Path(__file__).stem

# Metric, its lowest and highest healthy value, patience in iterations, what to do.
HEALTH = [
    ("losses/approx_kl", 0, 0.05, 1, "Too far: lower --learning-rate; check ratio and clipping."),
    ("losses/clipfrac", 0, 0.5, 1, "Half of the ratios are clipped: lower --learning-rate."),
    ("losses/value_clipfrac", 0, 0.8, 20, "Clipping holds the values: try --no-clip-vloss."),
    ("check/first_kl", -1, 1e-3, 1, "Ratios differ from 1 before any step: check the batch."),
    ("check/values", 0.25, 1, 20, "Values explain little: check shapes, scale rewards."),
    ("check/value_bias", -1, 0.6, 10, "Values are far off what came: check V at episode ends."),
    ("check/advantages", 0.25, 1, 10, "Advantages do not fit later rewards: check GAE, V(s')."),
    ("check/update", 0.02, 1, 20, "Good actions got no likelier: check signs, reshapes."),
    ("losses/grad_norm", 0, 100, 1, "Exploding: lower --learning-rate; is the ratio always 1?"),
    ("advantages/std", 1e-6, math.inf, 1, "All advantages are equal: check the rewards."),
    ("policy/entropy_share", 0.01, math.inf, 1, "Exploration has ended: raise --ent-coef."),
]


# Copied from ppo_atari.py
def make_game(args: Args, filmed: bool) -> gym.Env:
    """Make one game as the console shows it, frame by frame; raise ValueError if there is none."""
    import ale_py
    import cv2

    gym.register_envs(ale_py)
    cv2.setNumThreads(1)  # an image this small is resized faster than threads are woken
    games = [x[len("ALE/") : -len("-v5")] for x in gym.registry if x.startswith("ALE/")]
    if args.env_id not in games or args.env_id in ("Backgammon", "VideoCheckers"):
        near = difflib.get_close_matches(args.env_id, games, n=1, cutoff=0)[0]
        raise ValueError(f"No Atari game with a no-op is called {args.env_id}: try {near}.")
    return gym.make(
        f"ALE/{args.env_id}-v5",
        frameskip=1,  # MaxAndSkip repeats the actions
        repeat_action_probability=args.sticky_actions,
        full_action_space=False,
        max_num_frames_per_episode=None,  # TimeLimit counts the agent's steps
        render_mode="rgb_array" if filmed else None,
        disable_env_checker=True,
    )


class Environments:
    """N games stepped in turn; where a life or a game ends, the next begins in the same step.

    A game is its seed, the emulator's random numbers when it begins, and its actions. They are kept
    while it runs: a resumed run plays them again, through all its lives, and is where it was.
    """

    def __init__(self, envs: list[gym.Env]) -> None:
        self.envs = envs
        self.obs = np.zeros((len(envs), *envs[0].observation_space.shape), dtype=np.uint8)
        self.final_obs = self.obs.copy()  # where a life or a game has just ended
        self.running: list[dict[str, Any]] = [{} for _ in envs]
        self.episodes: list[dict[str, Any]] = []  # the finished games
        self.global_step = 0

    def begin(self, i: int, seed: int) -> None:
        """Begin a game in environment i."""
        game = self.envs[i].unwrapped
        # `reset(seed=seed)` would also load the game again, which takes 18 times as long.
        game.np_random = np.random.default_rng(seed)
        emulator = game.ale.cloneState(include_rng=True).__getstate__()
        self.running[i] = {"seed": seed, "emulator": emulator, "actions": []}
        self.obs[i], _ = self.envs[i].reset()

    def advance(self, i: int, action: int) -> tuple[float, bool, bool]:
        """Take one step in environment i; return its clipped reward, terminated, truncated."""
        self.obs[i], reward, terminated, truncated, _ = self.envs[i].step(action)
        self.running[i]["actions"].append(action)
        if terminated or truncated:
            self.final_obs[i] = self.obs[i]
            if not self.envs[i].get_wrapper_attr("game_over"):
                self.obs[i], _ = self.envs[i].reset()  # the next life
        return reward, terminated, truncated

    def reset(self, rng: np.random.Generator) -> None:
        """Load the games and begin them."""
        for i, env in enumerate(self.envs):
            seed = rng.integers(2**31).item()
            env.unwrapped.reset(seed=seed)  # the emulator's random numbers go on from here
            env.set_wrapper_attr("game_over", True)  # a replay may have left it in a game
            self.begin(i, seed)

    def step(self, actions: list[int], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Take one step, and begin new games where some are over.

        Returns rewards, terminated, truncated (N,). In `obs` is then the first stack of a new life
        or game where one has begun, and in `final_obs` the last one of the old.
        """
        self.global_step += len(self.envs)
        rewards, (terminated, truncated) = np.zeros(len(actions)), np.zeros((2, len(actions)), bool)
        for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            rewards[i], terminated[i], truncated[i] = self.advance(i, action)
            if terminated[i] or truncated[i]:
                if env.get_wrapper_attr("game_over"):
                    self.begin(i, rng.integers(2**31).item())
                scores = env.get_wrapper_attr("scores")  # of none, one, or more in a short game
                self.episodes += [{"global_step": self.global_step, **x} for x in scores]
                scores.clear()
        return rewards, terminated, truncated

    def state(self) -> dict[str, Any]:
        """The running games, for `replay`, and the finished ones."""
        running = [{**x, "actions": torch.tensor(x["actions"])} for x in self.running]
        state = {"running": running, "obs": torch.tensor(self.obs)}
        return {**state, "episodes": self.episodes, "global_step": self.global_step}

    def replay(self, state: dict[str, Any]) -> bool:
        """Play the running games of `state` again; return whether they came out the same."""
        from ale_py import ALEState

        self.episodes, self.global_step = state["episodes"], state["global_step"]
        for i, (env, running) in enumerate(zip(self.envs, state["running"], strict=True)):
            env.unwrapped.ale.restoreState(ALEState(running["emulator"]))
            self.begin(i, running["seed"])
            for action in running["actions"].tolist():
                self.advance(i, action)
                if env.get_wrapper_attr("game_over"):
                    break
            env.get_wrapper_attr("scores").clear()  # noted already
        same = np.array_equal(self.obs, state["obs"].numpy())
        if not same:
            print("The games do not repeat themselves: new ones begin.")
        return same


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def warn(history: list[dict[str, float]]) -> None:
    """Print what to do where a metric has just become unhealthy for `patience` iterations."""
    for name, low, high, patience, sentence in HEALTH:
        values = [x.get(name, math.nan) for x in history[-patience - 1 :]]
        bad = [value < low or value > high for value in values]  # not where it is NaN
        if sum(bad) == patience and all(bad[-patience:]):  # for just so long: say it once
            tqdm.write(f"Warning: {name} is {history[-1][name]:.3g}. {sentence}")


# Copied from ppo_continuous_action.py
def log(writer: SummaryWriter, metrics: dict[str, float], ended: list[dict[str, Any]]) -> None:
    """Write the metrics of an iteration, and the means of the episodes that ended in it."""
    if ended:
        means = {x: np.mean([episode[x] for episode in ended]) for x in ("return", "length")}
        metrics = metrics | {f"charts/episodic_{name}": x for name, x in means.items()}
    for name, value in metrics.items():
        writer.add_scalar(name, value, metrics["global_step"])


# Copied from ppo_continuous_action.py
def learned(agent: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn; a frozen part of the agent has requires_grad = False."""
    return [x for x in agent.parameters() if x.requires_grad]


# Copied from ppo_atari.py
def loss_and_gradients(loss_function: Callable, agent: nn.Module, *rest: Any) -> Tensor:
    """The loss and its gradients, one vector, of a copy of the agent."""
    agent = copy.deepcopy(agent)
    loss, _ = loss_function(agent, *rest)
    gradients = torch.autograd.grad(loss, learned(agent), materialize_grads=True)
    return torch.cat([x.detach().flatten() for x in (loss, *gradients)])


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def means(rows: list[Tensors]) -> dict[str, float]:
    """Mean of each metric over minibatches; raise ValueError if one is not finite."""
    metrics = {name: torch.stack([row[name] for row in rows]).mean().item() for name in rows[0]}
    if not all(map(math.isfinite, metrics.values())):
        raise ValueError(f"Rewards or losses are NaN or infinite: {metrics}")
    return metrics


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def save_checkpoint(run_dir: Path, args: Args, state: dict[str, Any]) -> None:
    """Write tensors and plain values into a file that is the old or the new one, never half."""
    temporary = run_dir / "checkpoint.tmp"
    torch.save({"script": SCRIPT, "args": dataclasses.asdict(args), **state}, temporary)
    os.replace(temporary, run_dir / "checkpoint.pt")


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def load_weights(agent: nn.Module, saved: dict[str, Any]) -> None:
    """Load parameters and buffers; raise ValueError if they are those of another network."""
    try:
        agent.load_state_dict(saved["agent"])
    except RuntimeError as error:
        raise ValueError(f"{saved['script']}.py has saved another network: {error}") from error


def load_policy(run_dir: str | Path) -> Callable[..., int]:
    """A trained policy: `policy(obs, start)` is the most likely action.

    `obs` (1, 84, 84) is as an environment of `make_env` gives it. The policy remembers what it has
    seen until `start` is true, as it must be for the first observation of each life or game.
    `policy(obs, start, rng)` draws the action with the generator.
    """
    saved = load_checkpoint(run_dir)
    agent = Agent(saved["num_actions"], Args(**saved["args"]))
    load_weights(agent, saved)
    state = agent.initial_state(1)

    @torch.no_grad()
    def policy(obs: np.ndarray, start: bool, rng: np.random.Generator | None = None) -> int:
        nonlocal state
        starts = torch.full((1, 1), float(start))
        logits, _, state = agent(torch.tensor(obs)[None, None], starts, state)
        noise = rng.gumbel(size=logits.shape) if rng else np.zeros(logits.shape)
        return draw(logits, torch.from_numpy(noise)).item()

    return policy


def evaluate(args: Args) -> dict[str, dict[str, list]]:
    """Play whole games with a trained policy; print, save and return what they came to.

    Returns for each kind of action, "best" and "sampled", the `returns` and `lengths` of the games,
    and writes them into evaluation.json.
    """
    saved, policy, results = load_checkpoint(args.evaluate), load_policy(args.evaluate), {}
    names = {"evaluate", "eval_episodes", "capture_video", "seed"}
    given = {x.name for x in dataclasses.fields(Args) if getattr(args, x.name) != x.default}
    if ignored := given - names:
        print(f"Taken from the run, not from here: {', '.join(sorted(ignored))}")
    args = Args(**{**saved["args"], **{name: getattr(args, name) for name in names}})
    for kind in ("best", "sampled"):
        env = make_env(args, video=kind if args.capture_video else None)
        games = env.get_wrapper_attr("scores")  # of those that are over
        # No generator of training has a spawn key: [seed, 2**32] would be that of [seed, 0, 1].
        rng = np.random.default_rng(np.random.SeedSequence(args.seed, spawn_key=(1,)))
        (obs, _), start = env.reset(seed=rng.integers(2**31).item()), True
        while len(games) < args.eval_episodes:  # each ends, by its time limit
            action = policy(obs, start, rng if kind == "sampled" else None)
            obs, _, terminated, truncated, _ = env.step(action)
            start = terminated or truncated
            if start:
                obs, _ = env.reset()  # the next life or game
        env.close()
        played = {f"{name}s": [game[name] for game in games] for name in ("return", "length")}
        said = [f"{name} {np.mean(x):.2f} ± {np.std(x):.2f}" for name, x in played.items()]
        print(f"{kind} action: {', '.join(said)}")
        results[kind] = played
    Path(args.evaluate, "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    """Read the command line and run; what is wrong with it ends as one sentence and exit code 2."""
    try:
        args = tyro.cli(Args)
        if args.resume and args.run_name:
            raise ValueError("--resume goes on in the folder of the run: leave out --run-name.")
        # Defaults are the settings of the run, and those of the paper, except for flags given.
        defaults = load_checkpoint(args.resume)["args"] if args.resume else {}
        defaults |= PAPER if args.paper else {}
        args = tyro.cli(Args, default=Args(**defaults))
        if args.details:
            print(details(args))
        elif args.evaluate:
            evaluate(args)
        else:
            results = train(args)
            last = [game["return"] for game in results["episodes"][-100:]]
            mean = f"{np.mean(last):.1f}" if last else "unknown"
            print(f"Return {mean}, the mean of the last {len(last)} games. Now:")
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
