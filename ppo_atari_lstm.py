# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py==0.12.1",
#     "gymnasium==1.4.0",
#     "moviepy==2.2.1",
#     "numpy==2.4.6",
#     "opencv-python-headless==5.0.0.93",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.16",
#     "wandb==0.31.0",
# ]
# ///
"""Proximal policy optimization (PPO) for Atari games with a recurrent policy, in one file.

    python ppo_atari_lstm.py --env-id BreakoutNoFrameskip-v4

The algorithm is that of Schulman et al. 2017 (arXiv 1707.06347) as OpenAI implemented it in
ppo2 = openai/baselines@ea25b9e8. "The 37 Implementation Details of PPO" (Huang et al. 2022)
numbers what that code does beyond the paper; here each detail stands as a comment on the line
above the statement that does it: 1-13 (core), 14-22 (Atari) and 32-36 (LSTM). Names in brackets
are files of ppo2. `--print-details` lists all 37. The games come with ale-py.

The agent sees one frame at a time and remembers the rest in an LSTM of 128 units. What that
changes, compared with ppo_atari.py: the agent, its state in the collect section, and minibatches
of whole sequences.

Shapes: T = num_steps, N = num_envs, B = environments in a minibatch, A = number of actions, H =
units of the LSTM. A state is one tensor (2, B, H): the LSTM's output and its cell. `starts` is 1
where an observation is the first of its episode. One step of the agent is four frames.

Deviations from ppo2, each correct where the original is not or harmless where it differs:
- A time limit is not a failure: where a game is cut off (truncated), the value of the final
  observation, under the state that led to it, is bootstrapped. `--truncation-is-terminal` gives
  the original's behavior. The limit is the usual 108,000 frames; the original had gym's 400,000.
- The agent sees one frame; ppo2's command line stacks four for its LSTM too.
- Where FIRE or the step after it ends an episode, the observation of the next one is returned,
  not the one from before (see FireReset); likewise where the no-op step of EpisodicLife ends the
  game.
- Adam is PyTorch's, which adds epsilon after the bias correction; ppo2's TensorFlow adds it before.
- Orthogonal matrices come from a QR decomposition, not an SVD: equal in distribution.

Returns beside the published ones: see benchmark/README.md.
"""

import ast
import atexit
import contextlib
import csv
import dataclasses
import difflib
import functools
import glob
import hashlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
# Set by torchrun; a run started without it is a group of one.
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


# Copied from ppo_continuous_action.py
class RunError(Exception):
    """A run that cannot start or go on; the message is one sentence for the person who ran it."""


# === Settings ===

FRAME_SKIP = 4  # frames that one step of the agent lasts [ppo2: common/atari_wrappers.py L270]
WITHOUT_NOOP = ("Backgammon", "VideoCheckers")  # the only games whose action 0 does something
NOOP_MAX = 30  # most no-op frames before a game [ppo2: common/atari_wrappers.py L269]
MAX_GAME_STEPS = 108_000 // FRAME_SKIP  # steps before a game is truncated: half an hour of play
NUM_FRAMES = 1  # the LSTM remembers what a stack would show

# What --paper changes: the settings of Schulman et al. 2017, Table 5, where ppo2 differs.
PAPER = {"update_epochs": 3, "vf_coef": 1.0, "anneal_clip": True}


# Copied from ppo_atari.py
def default_threads() -> int:
    """All cores, shared among the processes of a machine; a small minibatch feeds up to 8."""
    return max(1, min(8, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@dataclasses.dataclass
class Args:
    # --- Experiment ---
    seed: int = 1
    """Seed of everything that is random in the run."""
    total_timesteps: int = 10_000_000
    """Agent steps of the whole run, all environments and processes together [paper: MuJoCo 1M]."""
    paper: bool = False
    """Use the paper's 3 epochs, c1 = 1, annealed clip range in place of ppo2's 4, 0.5, constant."""
    run_name: str | None = None
    """Name of the run's folder; by default environment, script, seed and time."""
    output_dir: str = "runs"
    """Folder that holds one folder per run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU where that is faster."""
    torch_threads: int = dataclasses.field(default_factory=default_threads)
    """CPU threads per process; results repeat bit for bit only with the same number."""
    compile: bool = True
    """Compile the update where the run is long enough to win back the compile time."""
    bfloat16: bool = False
    """Run the network's layers in bfloat16; weights, heads, losses and Adam stay in float32."""
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
    env_id: str = "BreakoutNoFrameskip-v4"
    """Gymnasium environment; the top of the file says which kinds fit."""
    num_envs: int = 8
    """Parallel environments N, per process [ppo2: 1 for MuJoCo; paper: 8 for Atari]."""
    env_backend: Literal["gymnasium", "ale"] = "gymnasium"
    """gymnasium: the wrappers of this file; ale: the same rules on ale_py's C++ threads, faster."""
    async_envs: bool | None = None
    """Step each environment in a process of its own; pays for slow environments only."""
    sticky_actions: float = 0.0
    """Chance that a frame repeats the action before (Machado et al. 2018: 0.25) [ppo2: 0]."""
    truncation_is_terminal: bool = False
    """Treat time limits as failures, without bootstrapping, as ppo2 does."""

    # --- PPO ---
    num_steps: int = 128
    """Steps per environment and iteration (paper: T) [paper: 2048 for MuJoCo, 128 for Atari]."""
    num_minibatches: int = 4
    """Minibatches per epoch [ppo2/defaults.py: 32 for MuJoCo, 4 for Atari]."""
    update_epochs: int = 4
    """Passes over each batch (paper: K) [paper: 10 for MuJoCo, 3 for Atari, where ppo2 has 4]."""
    learning_rate: float = 2.5e-4
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
    clip_coef: float = 0.1
    """Clip range of the policy ratio (paper: epsilon) [paper: 0.2 for MuJoCo, 0.1 for Atari]."""
    anneal_clip: bool = False
    """Lower the clip range linearly towards 0 [paper: Atari only; ppo2: off]."""
    clip_vloss: bool = True
    """Clip the change of the value function by clip_coef too [ppo2; not in the paper]."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus (paper: c2) [ppo2: 0 for MuJoCo, 0.01 for Atari]."""
    vf_coef: float = 0.5
    """Weight of the value loss, half the squared error (paper: c1) [ppo2: 0.5; paper: 1, Atari]."""
    max_grad_norm: float | None = 0.5
    """Largest norm of the whole gradient [ppo2/ppo2.py: 0.5; None: off]."""
    target_kl: float | None = None
    """Stop an iteration's epochs once the mean approximate KL of one exceeds this."""

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
        """Complete the settings; check them, unless a checkpoint is still to complete them."""
        self.env_id = re.sub(r"^ALE/(\w+)-v5$|^(\w+)NoFrameskip-v4$", r"\1\2", self.env_id)
        if self.resume not in (None, "auto"):
            return
        for name, value in PAPER.items() if self.paper else ():
            if getattr(self, name) == getattr(Args, name):  # another value was asked for
                setattr(self, name, value)
        if self.resume is None:
            self.check()

    def check(self) -> None:
        """Refuse settings that cannot work together, each with one sentence."""
        positive = "num_envs num_steps num_minibatches update_epochs total_timesteps adam_eps"
        positive += " torch_threads checkpoint_interval eval_episodes clip_coef max_grad_norm"
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RunError(f"--{name.replace('_', '-')} must be positive, not {value}.")
        for name in ("learning_rate", "ent_coef", "vf_coef", "target_kl", "seed"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise RunError(f"--{name.replace('_', '-')} must not be negative: {value}.")
        if self.seed >= 2**63:
            raise RunError(f"--seed must be less than 2**63, not {self.seed}.")
        for name in ("gamma", "gae_lambda", "sticky_actions"):
            if not 0 <= getattr(self, name) <= 1:
                raise RunError(f"--{name.replace('_', '-')} must lie between 0 and 1.")
        if self.num_envs % self.num_minibatches != 0:
            raise RunError(
                f"--num-minibatches {self.num_minibatches} must divide the {self.num_envs} "
                "environments, whose sequences stay whole."
            )
        if self.minibatch_size < 2 and self.norm_adv:
            raise RunError("Minibatches of one sample have no spread: lower --num-minibatches.")
        if self.num_iterations < 1:
            raise RunError(
                f"--total-timesteps {self.total_timesteps} is less than one batch of "
                f"{self.batch_size * WORLD_SIZE} steps."
            )
        if self.capture_video and self.env_backend == "ale" and not self.evaluate:
            raise RunError("--capture-video needs --env-backend gymnasium: ale draws no screen.")


# === Environments ===
# The wrappers of ppo2, inside out in its order [ppo2: common/atari_wrappers.py L266-289,
# common/cmd_util.py L74-93, run.py L101-103]. EpisodeStatistics stands where the score is still
# that of the whole game, before lives and reward clipping cut it up.


# Copied from ppo_atari.py
class NoopReset(gym.Wrapper):
    """Begin each game with 1 to 30 no-op frames, so that no two games start alike."""

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        """Reset the game and press action 0, which does nothing except in `WITHOUT_NOOP`."""
        frame, info = self.env.reset(seed=seed, options=options)
        # Detail 14/37: no-op reset [ppo2: common/atari_wrappers.py L12-39]
        noops = self.unwrapped.np_random.integers(1, NOOP_MAX + 1)
        for _ in range(noops):
            frame, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                frame, info = self.env.reset(options=options)
        return frame, info


# Copied from ppo_atari.py
class MaxAndSkip(gym.Wrapper):
    """Hold each action for 4 frames and show the brighter of the last two, pixel by pixel.

    The console draws some objects in every second frame only; the maximum shows them all.
    """

    def step(self, action: int) -> tuple:
        """Return the maximum of the last two frames and the sum of the rewards."""
        frames, total_reward = [], 0.0
        for _ in range(FRAME_SKIP):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            total_reward += float(reward)
            if terminated or truncated:
                break
        # Detail 15/37: max and skip [ppo2: common/atari_wrappers.py L97-123]
        frame = np.maximum(frames[-1], frames[-2:][0])  # the only one, if the game is over
        return frame, total_reward, terminated, truncated, info


# Copied from ppo_atari.py
class EpisodeStatistics(gym.Wrapper):
    """Report return and length of each whole game, in raw points and agent steps.

    Its place is that of ppo2's Monitor: a lost life or a clipped reward is not seen here.
    """

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        """Start counting a new game."""
        self.episode_return, self.episode_length = 0.0, 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: int) -> tuple:
        """Return `{"episode": {"r": return, "l": length}}` as the info when the game is over.

        At other times it is empty: merging N dictionaries that nobody reads costs time.
        """
        frame, reward, terminated, truncated, _ = self.env.step(action)
        self.episode_return += reward
        self.episode_length += 1
        episode = {"r": self.episode_return, "l": self.episode_length}
        info = {"episode": episode} if terminated or truncated else {}
        return frame, reward, terminated, truncated, info


# Copied from ppo_atari.py
class EpisodicLife(gym.Wrapper):
    """End the learner's episode with each life, but reset only a game that is over.

    The value function then sees what a life is worth, and the agent still gets to know the
    parts of the game that come after the first life.
    """

    game_over = True

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        """Go on with the next life by one no-op step, or start a new game."""
        if not self.game_over and seed is None:
            frame, _, _, _, info = self.step(0)
        if self.game_over or seed is not None:
            frame, info = self.env.reset(seed=seed, options=options)
        self.game_over, self.lives = False, self.unwrapped.ale.lives()
        return frame, info

    def step(self, action: int) -> tuple:
        """Set `terminated` where a life was lost; a game may linger at 0 lives before its end."""
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        lives = self.unwrapped.ale.lives()
        # Detail 16/37: episodic life [ppo2: common/atari_wrappers.py L61-95]
        terminated = terminated or 0 < lives < self.lives
        self.lives = lives
        return frame, reward, terminated, truncated, info


# Copied from ppo_atari.py
class FireReset(gym.Wrapper):
    """Press FIRE, then action 2, after each reset: some games stand still until then.

    Outside EpisodicLife, therefore also after each lost life. Should a press end the episode, the
    observation of the reset that follows is returned (the original returns the one before it).
    """

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        """Reset, then make the two steps."""
        frame, info = self.env.reset(seed=seed, options=options)
        # Detail 17/37: fire reset [ppo2: common/atari_wrappers.py L41-59]
        for action in (1, 2):
            frame, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                frame, info = self.env.reset(options=options)
        return frame, info


# Copied from ppo_atari.py
class WarpFrame(gym.ObservationWrapper):
    """Turn the (210, 160, 3) screen into an (84, 84) grey image."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, frame: np.ndarray) -> np.ndarray:
        """Luma first, then resize; the other order differs by rounding."""
        import cv2

        # Detail 18/37: warp frame [ppo2: common/atari_wrappers.py L134-185]
        grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)


# Copied from ppo_atari.py
class ClipReward(gym.RewardWrapper):
    """Learn from the sign of the reward: one set of hyper-parameters then fits every game."""

    def reward(self, reward: float) -> float:
        """-1, 0 or +1; the sign of the sum over the skipped frames, not a limit of +-1."""
        # Detail 19/37: reward clipping to sign [ppo2: common/atari_wrappers.py L125-131]
        return float(np.sign(reward))


# Copied from ppo_atari.py
class ResumableGame(gym.Wrapper):
    """Saves and restores a game, bit for bit: emulator, generators and the wrappers' counters."""

    COUNTERS = ("game_over", "lives", "episode_return", "episode_length", "_elapsed_steps")

    def __init__(self, env: gym.Env, index: int) -> None:
        super().__init__(env)
        self.index = index

    def _counters(self) -> Iterator[tuple[gym.Env, str]]:
        layer = self.env
        while layer is not self.unwrapped:
            yield from ((layer, name) for name in self.COUNTERS if name in vars(layer))
            layer = layer.env

    def get_state(self) -> bytes | None:
        """Everything that the next step depends on.

        None with sticky actions: the emulator does not tell which action it is holding.
        """
        if self.unwrapped.ale.getFloat("repeat_action_probability") > 0:
            return None
        emulator = self.unwrapped.ale.cloneState(include_rng=True).__getstate__()
        state = {
            "emulator": torch.frombuffer(bytearray(emulator), dtype=torch.uint8),
            "rng": json.dumps(self.unwrapped.np_random.bit_generator.state),
            "counters": [getattr(layer, name) for layer, name in self._counters()],
        }
        return to_bytes(state)

    def set_state(self, states: list[bytes]) -> None:
        """Restore what `get_state` of the environment with this index returned."""
        from ale_py import ALEState

        state = from_bytes(states[self.index])
        self.unwrapped.ale.restoreState(ALEState(state["emulator"].numpy().tobytes()))
        self.unwrapped.np_random.bit_generator.state = json.loads(state["rng"])
        for (layer, name), value in zip(self._counters(), state["counters"]):
            setattr(layer, name, value)


# Copied from ppo_atari.py
class FrameStack(gym.vector.VectorWrapper):
    """Show the last k frames of each environment, oldest first, so that motion is visible.

    As ppo2's VecFrameStack it fills a new episode's stack with zeros (the per-environment wrapper
    of the same repository, which ppo2 does not use here, repeats the first frame instead).
    """

    def __init__(self, envs: VectorEnv, size: int) -> None:
        super().__init__(envs)
        shape = (size, *envs.single_observation_space.shape)
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, envs.num_envs
        )

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        """Start every environment with an empty stack."""
        frames, infos = self.env.reset(seed=seed, options=options)
        self.stack = np.zeros(self.observation_space.shape, np.uint8)  # (N, k, 84, 84)
        self.stack[:, -1] = frames
        return self.stack, infos

    def call(self, name: str, *args: Any) -> tuple:
        """Call a method of every sub-environment."""
        return self.env.call(name, *args)

    def step(self, actions: np.ndarray) -> tuple:
        """Push one frame; rows of `infos["final_obs"]` become stacks of the ended episode."""
        frames, rewards, terminated, truncated, infos = self.env.step(actions)
        # Detail 20/37: frame stack [ppo2: common/vec_env/vec_frame_stack.py L6-30]
        self.stack = np.roll(self.stack, -1, axis=1)  # a new array: earlier ones stay as they were
        for i in np.flatnonzero(terminated | truncated):
            final_stack = self.stack[i].copy()
            final_stack[-1] = infos["final_obs"][i]
            infos["final_obs"][i] = final_stack
            self.stack[i] = 0
        self.stack[:, -1] = frames
        return self.stack, rewards, terminated, truncated, infos


# Copied from ppo_atari.py
class AleGame:
    """One C++ emulator that plays by the rules of the wrappers above (the fast path).

    `ale_py.AtariVectorEnv` skips frames, takes the maximum, converts to grey and resizes in C++, in
    a thread of its own. Its life-loss options are not used: `episodic_life` resets the whole game
    with each life, `life_loss_info` presses no FIRE after one, and both end the raw score.
    """

    def __init__(self, rom: str, sticky_actions: float) -> None:
        from ale_py import Action
        from ale_py.vector_env import AtariVectorEnv

        self.emulator = AtariVectorEnv(
            rom,
            num_envs=1,
            stack_num=1,
            frameskip=FRAME_SKIP,
            noop_max=NOOP_MAX + 1,  # this limit is exclusive
            max_num_frames_per_episode=2**30,  # MAX_GAME_STEPS below counts as TimeLimit does
            use_fire_reset=False,
            reward_clipping=False,
            repeat_action_probability=sticky_actions,
        )
        buttons = self.emulator.ale.get_action_set()
        self.num_actions = len(buttons)
        self.fire = buttons[1] == Action.FIRE
        self.game_over = True

    def new_game(self, seed: int | None = None) -> np.ndarray:
        """Reset the game with 1 to 30 no-ops: the emulator draws 0 to 30, so 0 is drawn again."""
        info = {"episode_frame_number": [0]}
        while info["episode_frame_number"][0] == 0:
            # as Detail 14
            frame, info = self.emulator.reset(seed=None if seed is None else seed % 2**31)
            seed = None  # a generator that is seeded again would draw 0 again
        self.episode_return, self.episode_length = 0.0, 0
        self.lives = int(info["lives"][0])
        return frame[0, 0]

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Start the learner's next episode as FireReset over EpisodicLife does."""
        frame = self.next_life(seed)
        if self.fire:
            # as Detail 17
            for action in (1, 2):
                frame, _, terminated, truncated = self.press(action)
                if terminated or truncated:
                    frame = self.next_life()
        return frame

    def next_life(self, seed: int | None = None) -> np.ndarray:
        """Go on with the next life by one no-op step, or start a new game."""
        if not self.game_over and seed is None:
            frame = self.press(0)[0]
        if self.game_over or seed is not None:
            frame = self.new_game(seed)
        self.game_over = False
        return frame

    def press(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """Make one agent step and wait for it."""
        self.send(action)
        return self.receive()

    def send(self, action: int) -> None:
        """Start one agent step in the emulator's thread."""
        self.emulator.send(np.array([action]))

    def receive(self) -> tuple[np.ndarray, float, bool, bool]:
        """Wait for the step; return frame (84, 84), raw reward, terminated, truncated."""
        frame, reward, terminated, _, info = self.emulator.recv()
        self.episode_return += float(reward[0])
        self.episode_length += 1
        truncated = self.episode_length >= MAX_GAME_STEPS
        self.game_over = bool(terminated[0]) or truncated
        lives = int(info["lives"][0])
        # as Detail 16
        ended = bool(terminated[0]) or 0 < lives < self.lives
        self.lives = lives
        return frame[0, 0], float(reward[0]), ended, truncated


# Copied from ppo_atari.py
class AleVectorEnv(VectorEnv):
    """The fast path: one AleGame per sub-environment, stepped at the same time.

    Given the same number of no-ops and the same actions, rewards, lives, the ends of episodes and
    games, raw returns and the observations of truncated games are the reference path's. What
    remains different:
    - Grey levels: the emulator turns each frame to grey before it takes the maximum of two, ppo2
      after it; where sprites flicker, pixels differ by up to 29 of 255, 0.04 in the mean.
    - Random numbers: the no-ops come from the emulator's generator, so that one seed gives other
      games than on the reference path, of the same distribution.
    - The last frames of a game that is over are not drawn; nothing is learned from them.
    - The emulators' state cannot be saved: a resumed run begins new games.
    """

    def __init__(self, rom: str, num_envs: int, sticky_actions: float) -> None:
        self.games = [AleGame(rom, sticky_actions) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.games[0].num_actions)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple:
        """Start new games, one seed each."""
        seeds = [None] * self.num_envs if seed is None else seed
        return np.stack([game.reset(x) for game, x in zip(self.games, seeds)]), {}

    def call(self, name: str, *args: Any) -> tuple:
        """`get_state` of each game: None, since the emulators' state cannot be had from here."""
        return (None,) * self.num_envs

    def close(self, **kwargs: Any) -> None:
        """End the emulators' threads."""
        self.games.clear()

    def step(self, actions: np.ndarray) -> tuple:
        """Step all games at once; those that ended start again in the same step."""
        for game, action in zip(self.games, actions):
            game.send(int(action))
        frames, rewards, terminated, truncated, infos = [], [], [], [], {}
        for i, game in enumerate(self.games):
            frame, reward, ended, cut = game.receive()
            if ended or cut:
                episode = {"r": game.episode_return, "l": game.episode_length}
                final_info = {"episode": episode} if game.game_over else {}
                final = {"final_obs": frame, "final_info": final_info}
                infos = self._add_info(infos, final, i)
                frame = game.reset()
            frames.append(frame)
            rewards.append(reward)
            terminated.append(ended)
            truncated.append(cut)
        # as Detail 19
        signs = np.sign(rewards)
        return np.stack(frames), signs, np.array(terminated), np.array(truncated), infos


# Copied from ppo_atari.py
def find_game(env_id: str) -> str:
    """Check that `env_id`, such as Breakout, is a game of the Arcade Learning Environment.

    Raises:
        RunError: ale-py is missing, or the game is unknown, of another kind or without a no-op.
    """
    try:
        import ale_py
    except ImportError as error:
        raise RunError("The Atari games need ale-py: pip install ale-py.") from error
    gym.register_envs(ale_py)
    games = [x[len("ALE/") : -len("-v5")] for x in gym.registry if x.startswith("ALE/")]
    if env_id in games:
        if env_id in WITHOUT_NOOP:
            raise RunError(f"{env_id} has no action that does nothing; detail 14 needs one.")
        return env_id
    if env_id in gym.registry and "ale_py" not in str(gym.spec(env_id).entry_point):
        with contextlib.suppress(gym.error.Error, ImportError), gym.make(env_id) as env:
            box = isinstance(env.action_space, gym.spaces.Box)
            script = "ppo_continuous_action.py" if box else "ppo_multidiscrete.py"
            raise RunError(f"{env_id} is not an Atari game; use {script} for it.")
    by_lower_case = {game.lower(): game for game in games}
    name = re.sub(r"\W|_|v\d+$", "", env_id.removeprefix("ALE/")).lower()
    nearest = difflib.get_close_matches(name, by_lower_case, n=1, cutoff=0.4)
    hint = f"did you mean {by_lower_case[nearest[0]]}?" if nearest else f"known: {games[0]}, ..."
    raise RunError(f"There is no Atari game {env_id}: {hint}")


def make_env(args: Args, index: int) -> Callable[[], gym.Env]:
    """Return a function that makes sub-environment `index`, with (84, 84) frames."""
    trainer = os.getpid()

    def thunk() -> gym.Env:
        import ale_py
        import cv2

        gym.register_envs(ale_py)  # a worker process starts without the games
        cv2.setNumThreads(1)  # an image this small is resized faster than threads are woken
        if os.getpid() != trainer:
            for number in (signal.SIGINT, signal.SIGTERM):  # these are the main process's to answer
                signal.signal(number, signal.SIG_IGN)
        video = args.capture_video and index == 0 and RANK == 0
        env = gym.make(
            f"ALE/{args.env_id}-v5",
            frameskip=1,  # MaxAndSkip repeats the actions
            repeat_action_probability=args.sticky_actions,
            full_action_space=False,
            max_num_frames_per_episode=None,  # TimeLimit counts the agent's steps
            render_mode="rgb_array" if video else None,
            disable_env_checker=True,
        )
        env = NoopReset(env)
        env = MaxAndSkip(env)
        env = gym.wrappers.TimeLimit(env, MAX_GAME_STEPS)
        if video:
            fps = 60 // FRAME_SKIP  # the console draws 60 frames a second
            env = gym.wrappers.RecordVideo(env, str(args.run_dir / "videos"), fps=fps)
        env = EpisodeStatistics(env)
        env = EpisodicLife(env)
        if env.unwrapped.get_action_meanings()[1] == "FIRE":
            env = FireReset(env)
        env = WarpFrame(env)
        env = ClipReward(env)
        return ResumableGame(env, index)

    return thunk


def make_envs(args: Args) -> "FrameStack":
    """Make the N sub-environments of this process, with observations (N, 1, 84, 84).

    A sub-environment whose episode ends is reset within the same step, so that the batch holds no
    reset steps; the last observation of the episode is then in `infos["final_obs"]`, and the score
    of a game that is over in `infos["final_info"]["episode"]`.

    By default each game runs in a process of its own where there are more than two cores. With 8
    games on 2 cores one process for all is as fast when nothing else runs (3.4 against 3.5 ms a
    step), and 1.4 times as fast in training, where the network needs the cores too.

    Raises:
        RunError: `args.env_id` is not a game that can be played here.
    """
    game = find_game(args.env_id)
    if args.env_backend == "ale":
        rom = gym.spec(f"ALE/{game}-v5").kwargs["game"]
        return FrameStack(AleVectorEnv(rom, args.num_envs, args.sticky_actions), NUM_FRAMES)
    parallel = args.async_envs
    if parallel is None:
        parallel = args.num_envs > 1 and (os.cpu_count() or 1) > 2
    vector_env = AsyncVectorEnv if parallel else SyncVectorEnv
    thunks = [make_env(args, index) for index in range(args.num_envs)]
    return FrameStack(vector_env(thunks, autoreset_mode=AutoresetMode.SAME_STEP), NUM_FRAMES)


# Copied from ppo_continuous_action.py
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


# === Agent ===


# Copied from ppo_continuous_action.py
def layer_init(layer: nn.Module, gain: float, bias: float = 0.0) -> nn.Module:
    """Fill the weight with an orthogonal matrix times `gain` and the bias with a constant.

    [ppo2: a2c/utils.py L20-63]
    """
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on the CNN of Mnih et al. 2015 (Nature) and an LSTM of 128 units.

    ppo2's `cnn_lstm` [ppo2: common/models.py L132-187]: both heads stand on the LSTM's output.
    """

    HIDDEN_SIZE = 128

    def __init__(self, num_actions: int, args: Args) -> None:
        super().__init__()
        self.bfloat16 = args.bfloat16
        gain = math.sqrt(2)
        # Detail 2/37: orthogonal and constant initialization [ppo2: common/models.py L15-26]
        # Detail 21/37: shared Nature CNN [ppo2: common/models.py L15-26]
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
        # Detail 32/37: layer initialization [ppo2: a2c/utils.py L84-86]
        self.lstm_input = layer_init(nn.Linear(512, 4 * self.HIDDEN_SIZE), 1.0)
        self.lstm_recurrent = nn.Linear(self.HIDDEN_SIZE, 4 * self.HIDDEN_SIZE, bias=False)
        nn.init.orthogonal_(self.lstm_recurrent.weight, 1.0)  # as Detail 32
        # Detail 13/37: shared or separate networks [ppo2: common/policies.py L156-166]
        self.action_head = layer_init(nn.Linear(self.HIDDEN_SIZE, num_actions), 0.01)
        self.value_head = layer_init(nn.Linear(self.HIDDEN_SIZE, 1), 1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """State (2, N, H) before the first step of the training."""
        # Detail 33/37: zero initial states [ppo2: common/models.py L179]
        return torch.zeros((2, num_envs, self.HIDDEN_SIZE), device=self.value_head.weight.device)

    def features(self, obs: Tensor) -> Tensor:
        """Features (B, 512) of frames (B, 1, 84, 84), which arrive as stored, in uint8."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # Detail 22/37: image scaling [ppo2: common/models.py L19]
            scaled = obs / 255.0
            # The strides of channels_last, the order in memory that convolutions compute fastest
            # in; `contiguous` does not set them where there is one channel.
            scaled = scaled.contiguous().as_strided(scaled.shape, (84 * 84, 1, 84, 1))
            return self.cnn(scaled).float()

    def remember(self, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run the LSTM along T steps; acting is the case T = 1.

        Args:
            obs: frames (T, B, 1, 84, 84).
            starts: (T, B), 1 where the frame is the first of its episode.
            state: (2, B, H), from before the first step.

        Returns:
            Outputs (T, B, H) and the state (2, B, H) after the last step.
        """
        inputs = self.lstm_input(self.features(obs.flatten(0, 1)))  # for all steps at once
        output, cell = state
        outputs = []
        for step_inputs, start in zip(inputs.view(*starts.shape, -1), starts[..., None]):
            # Detail 34/37: reset at episode end [ppo2: a2c/utils.py L89-91]
            output, cell = output * (1 - start), cell * (1 - start)
            gates = step_inputs + self.lstm_recurrent(output)  # (B, 4H)
            write, keep, candidate, read = gates.chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + write.sigmoid() * candidate.tanh()
            output = read.sigmoid() * cell.tanh()
            outputs.append(output)
        return torch.stack(outputs), torch.stack([output, cell])

    def get_value(self, obs: Tensor, starts: Tensor, state: Tensor) -> Tensor:
        """Values (T, B) of frames (T, B, 1, 84, 84)."""
        return self.value_head(self.remember(obs, starts, state)[0]).squeeze(-1)

    def get_action_and_value(
        self,
        obs: Tensor,
        starts: Tensor,
        state: Tensor,
        action: Tensor | None = None,
        noise: Tensor | float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Actions, log-probabilities, entropies and values, each (T, B), and the state after them.

        Unless given, an action is the largest of logits + noise: with Gumbel noise (T, B, A) that
        is a sample [ppo2: common/distributions.py L199-201], with none the most probable action.
        """
        outputs, state = self.remember(obs, starts, state)
        logits = self.action_head(outputs)
        if action is None:
            action = (logits + noise).argmax(-1)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        logprob = logprobs.gather(-1, action[..., None]).squeeze(-1)
        return action, logprob, entropy, self.value_head(outputs).squeeze(-1), state


@torch.no_grad()
def act_in_sequence(agent: Agent, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Sample one action per environment.

    Args:
        agent: the recurrent agent.
        inputs: obs (N, 1, 84, 84), starts (N,), state (2, N, H), Gumbel noise (N, A).

    Returns:
        Actions, log-probabilities and values, each (N,), and the new state (2, N, H).
    """
    obs, starts, state, noise = inputs
    action, logprob, _, value, state = agent.get_action_and_value(
        obs[None], starts[None], state, noise=noise[None]
    )
    return action[0], logprob[0], value[0], state


# === The math: pure functions, the same text in every script ===


# Copied from ppo_continuous_action.py
def linear_decay(start: float, iteration: int, num_iterations: int) -> float:
    """Value at iteration u = 1..U of a line from `start` at u = 1 to `start` / U at u = U."""
    return start * (1 - (iteration - 1) / num_iterations)


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


# Copied from ppo_continuous_action.py
def normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and std 1; population std (divisor n), as numpy and so ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + eps)


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """Estimate KL(old || new) from actions of the old policy by k3 = mean(r - 1 - log r).

    k3 is unbiased like k1 = mean(-log r), never negative and less noisy; ppo2 logs the biased
    k2 = mean((log r)^2) / 2 (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


# Copied from ppo_continuous_action.py
def clip_fraction(logratio: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Share of samples whose ratio lies outside the clip range [ppo2/model.py L88]."""
    return ((logratio.exp() - 1).abs() > clip_coef).float().mean()


# Copied from ppo_continuous_action.py
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


def sequence_loss(
    agent: Agent,
    minibatch: tuple[Tensor, ...],
    clip_coef: float | Tensor,
    clip_vloss: bool,
    norm_adv: bool,
    ent_coef: float,
    vf_coef: float,
) -> tuple[Tensor, Tensor]:
    """Overall loss (paper, equation 9) of whole sequences, and the debug variables.

    Args:
        agent: policy and value function under the current weights.
        minibatch: obs (T, B, 1, 84, 84), starts (T, B), the state (2, B, H) before the rollout;
            actions, logprobs, values, advantages, returns, each (T, B).

    Returns:
        Scalar loss, and the metrics named in `LOSS_METRICS` as one vector.
    """
    obs, starts, state, actions, logprobs, values, advantages, returns = minibatch
    # Detail 36/37: rebuild states in training [ppo2/runner.py L23; ppo2/ppo2.py L179-180]
    outputs = agent.get_action_and_value(obs, starts, state, actions)
    _, new_logprobs, entropy, new_values, _ = outputs
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


# What `sequence_loss` reports, by CleanRL's names; old_approx_kl is the estimate k1.
LOSS_METRICS = (
    "losses/policy_loss",
    "losses/value_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
)
KL = LOSS_METRICS.index("losses/approx_kl")


def sequence_gradient(
    agent: Agent, minibatch: tuple[Tensor, ...], *settings
) -> tuple[Tensor, Tensor]:
    """Gradient of `sequence_loss` as one vector in the order of `agent.parameters()`, and metrics.

    Compiled on a GPU: forward and backward pass become one CUDA graph, the T steps unrolled.
    """
    loss, metrics = sequence_loss(agent, minibatch, *settings)
    gradients = torch.autograd.grad(loss, list(agent.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), metrics


# === Training: collect, advantages, update, log ===


def train(args: Args) -> dict[str, Any]:
    """Run PPO; logs, checkpoints and the model go into `args.run_dir`.

    Returns:
        agent: the trained `Agent`;
        episodes: one {"global_step", "return", "length"} per finished game;
        updates: one dictionary of metrics per iteration;
        args: the settings in force, with the name of the run.

    Raises:
        RunError: the run cannot start or go on.
    """
    args, checkpoint = open_run(args)
    device = network_device(args)
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng([args.seed, RANK])
    num_steps, num_envs = args.num_steps, args.num_envs

    with (
        StopRequest() as stop,
        closing_envs(make_envs(args)) as envs,
        contextlib.closing(RunLog(args, checkpoint)) as log,
    ):
        obs_shape, num_actions = envs.single_observation_space.shape, envs.single_action_space.n
        agent = Agent(num_actions, args).to(device)
        # One vector holds all weights: one Adam kernel, one norm, one message between processes.
        weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
        nn.utils.vector_to_parameters(weights, agent.parameters())
        # Detail 3/37: Adam epsilon [ppo2/model.py L98-100]
        optimizer = torch.optim.Adam([weights], args.learning_rate, eps=args.adam_eps, fused=True)

        # The rollout, time first; the last row of obs is the first one of the next rollout. On a
        # GPU, page-locked host_obs lets the frames travel while the CPU goes on; on the CPU both
        # are the same memory. So with the starts.
        cuda = device.type == "cuda"
        obs_size = (num_steps + 1, num_envs, *obs_shape)
        host_obs = torch.zeros(obs_size, dtype=torch.uint8, pin_memory=cuda)
        obs = host_obs.to(device)
        actions = torch.zeros((num_steps, num_envs), dtype=torch.int64, device=device)
        logprobs = torch.zeros((num_steps, num_envs), device=device)
        values = torch.zeros((num_steps, num_envs), device=device)
        rewards = np.zeros((num_steps, num_envs), dtype=np.float32)
        terminated = np.zeros((num_steps, num_envs), dtype=bool)
        done = np.zeros((num_steps, num_envs), dtype=bool)
        host_starts = torch.ones((num_steps + 1, num_envs), pin_memory=cuda)
        starts = host_starts.to(device)
        state = agent.initial_state(num_envs)

        # What lives on from one rollout to the next, besides the environments.
        next_obs, next_start = host_obs.numpy()[-1], host_starts.numpy()[-1]
        next_state = state.numpy(force=True).copy()
        arrays = {"next_obs": next_obs, "next_start": next_start, "next_state": next_state}
        process = ProcessState(envs, rng, {}, arrays)
        first_iteration, global_step = 1, 0
        if checkpoint is not None:
            first_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        next_obs[...], _ = envs.reset(seed=environment_seeds(args.seed, num_envs, global_step))
        if checkpoint is not None and process.restore(checkpoint["processes"]):
            envs.stack = next_obs.copy()
            state.copy_(torch.from_numpy(next_state))
        if WORLD_SIZE > 1:
            dist.broadcast(weights, src=0)

        clip_coef = torch.tensor(args.clip_coef, device=device)
        settings = (args.clip_vloss, args.norm_adv, args.ent_coef, args.vf_coef)
        mb_envs = num_envs // args.num_minibatches
        minibatch = [x[:num_steps, :mb_envs] for x in (obs, starts)] + [state[:, :mb_envs]]
        minibatch += [x[:, :mb_envs] for x in (actions, logprobs, values, logprobs, values)]
        minibatch = tuple(x.contiguous() for x in minibatch)
        example = (agent, minibatch, clip_coef, *settings)
        # On the CPU, compiling gains nothing here: T unrolled steps take minutes and run no faster.
        gradient = compiled(sequence_gradient, args, example) if cuda else sequence_gradient
        noise = torch.zeros((num_envs, num_actions), device=device)
        example = (agent, (obs[0], starts[0], state, noise))
        sample = compiled(act_in_sequence, args, example) if cuda else act_in_sequence
        log.start(device, global_step)

        for iteration in range(first_iteration, args.num_iterations + 1):
            # --- Collect: T steps in each of the N environments, under frozen weights ---
            start_time = time.perf_counter()
            # Eight frames keep a thread busy; more would wait, spinning, and slow down the games.
            torch.set_num_threads(min(args.torch_threads, max(1, num_envs // 8)))
            last_good = model_state(args, agent, {})
            noise = rng.gumbel(size=(num_steps, num_envs, num_actions)).astype(np.float32)
            noise = torch.as_tensor(noise, device=device)
            final_obs: dict[tuple[int, int], np.ndarray] = {}
            final_states: list[Tensor] = []
            host_obs[0], host_starts[0] = host_obs[-1], host_starts[-1]
            obs[0].copy_(host_obs[0])
            starts[0].copy_(host_starts[0])
            rollout_state = state.clone()
            # Detail 1/37: vectorized architecture [ppo2/runner.py L26-42]
            for step in range(num_steps):
                global_step += num_envs * WORLD_SIZE
                outputs = sample(agent, (obs[step], starts[step], state, noise[step]))
                actions[step], logprobs[step], values[step], new_state = outputs
                state.copy_(new_state)
                frames, rewards[step], terminated[step], truncated, infos = envs.step(
                    actions[step].numpy(force=True)
                )
                done[step] = terminated[step] | truncated
                host_obs[step + 1] = torch.from_numpy(frames)
                host_starts[step + 1] = torch.from_numpy(done[step])
                obs[step + 1].copy_(host_obs[step + 1], non_blocking=True)
                starts[step + 1].copy_(host_starts[step + 1], non_blocking=True)
                for i in (truncated & ~terminated[step]).nonzero()[0]:
                    final_obs[step, i] = infos["final_obs"][i]
                    final_states.append(state[:, i].clone())
                games = infos.get("final_info", {})
                for i in games.get("_episode", np.zeros(0)).nonzero()[0]:
                    score, length = games["episode"]["r"][i], games["episode"]["l"][i]
                    log.episode(global_step, score.item(), length.item())
            next_state[...] = state.numpy(force=True)
            rollout_seconds = time.perf_counter() - start_time
            check_finite(args, last_good, global_step, reward=rewards)

            # --- Advantages: the value of what comes next, then GAE ---
            start_time = time.perf_counter()
            torch.set_num_threads(args.torch_threads)
            as_tensor = functools.partial(torch.as_tensor, device=device)
            with torch.no_grad():
                # The same masked state as the next rollout's first step uses.
                next_values = torch.cat([values[1:], agent.get_value(obs[-1:], starts[-1:], state)])
                if final_obs and not args.truncation_is_terminal:
                    steps, indices = zip(*final_obs, strict=True)
                    last_obs = as_tensor(np.stack(list(final_obs.values())))
                    go_on = torch.zeros(1, len(last_obs), device=device)
                    last_state = torch.stack(final_states, dim=1)
                    last_values = agent.get_value(last_obs[None], go_on, last_state)
                    next_values[steps, indices] = last_values[0]
            # Deviation: time limits are no failures; --truncation-is-terminal restores ppo2
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
            batch = (obs[:-1], starts[:-1], rollout_state)
            batch += (actions, logprobs, values, advantages, returns)  # environments on axis 1
            epoch_metrics = []
            for _ in range(args.update_epochs):
                # Detail 6/37: minibatch updates [ppo2/ppo2.py L157-166]
                order = as_tensor(rng.permutation(num_envs))
                metrics_sum = torch.zeros(len(LOSS_METRICS) + 1, device=device)
                for mb_order in order.split(mb_envs):
                    # Detail 35/37: sequential minibatches [ppo2/ppo2.py L167-180]
                    minibatch = tuple(x[:, mb_order] for x in batch)
                    weights.grad, metrics = gradient(agent, minibatch, clip_coef, *settings)
                    # Extra: parallelized gradient update [ppo2/model.py L97-98]
                    average_over_processes(weights.grad)
                    # Detail 11/37: global gradient clipping [ppo2/model.py L102-108]
                    grad_norm = nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
                    optimizer.step()
                    metrics_sum += torch.cat([metrics, grad_norm[None]])
                epoch_metrics.append(average_over_processes(metrics_sum / args.num_minibatches))
                # Extra: early stopping on target_kl [Spinning Up, ppo.py L265-274]
                if args.target_kl is not None and epoch_metrics[-1][KL] > args.target_kl:
                    break

            # --- Log: means over all minibatches of the iteration ---
            # Detail 12/37: debug variables [ppo2/model.py L115-116; ppo2/ppo2.py L183-195]
            names = (*LOSS_METRICS, "losses/grad_norm")
            metrics = dict(zip(names, torch.stack(epoch_metrics).mean(0).tolist()))
            update_seconds = time.perf_counter() - start_time  # the line above waits for the GPU
            check_finite(args, last_good, global_step, **metrics)
            metrics |= {
                "losses/explained_variance": explained_variance(values, returns),
                "policy/entropy_share": metrics["losses/entropy"] / math.log(num_actions),
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
                contents = model_state(args, agent, {})
                contents |= {"iteration": iteration, "global_step": global_step}
                contents |= {"optimizer": optimizer.state_dict(), "wandb_id": log.wandb_id}
                saved = save_checkpoint(args, contents, process)
            if stop_signal:
                lost = "" if saved else " (the last iterations are lost: they could not be saved)"
                say(f"Stopped by {stop_signal.name}; continue with --resume {args.run_dir}{lost}")
                raise SystemExit(128 + stop_signal)

        log.finish(model_state(args, agent, {}))
    return {"agent": agent, "episodes": log.episodes, "updates": log.updates, "args": args}


# === Operations: start, processes, health, details, logs, checkpoints, evaluation ===


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def run_prefix(args: Args) -> str:
    """What the names of all runs of this environment, script and seed begin with."""
    return f"{args.env_id.replace('/', '-')}__{SCRIPT}__{args.seed}__"


# Copied from ppo_atari.py
def network_device(args: Args) -> torch.device:
    """The device of the network, acting and update alike: a GPU pays from one image on."""
    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        raise RunError("--device cuda needs an NVIDIA GPU and a CUDA build of PyTorch; use cpu.")
    if args.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


# Copied from ppo_continuous_action.py
def environment_seeds(seed: int, num_envs: int, global_step: int) -> list[int]:
    """A seed for each environment of this process, unrelated to those of other seeds and ranks.

    They also differ by the step, for episodes that have to start anew when a run is resumed.
    """
    return np.random.SeedSequence([seed, RANK, global_step]).generate_state(num_envs).tolist()


COMPILE_MINIBATCHES = 20_000  # gradient steps in the run; compiling T unrolled steps takes minutes


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def average_over_processes(x: Tensor) -> Tensor:
    """Replace `x` in place by its mean over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
        x /= WORLD_SIZE
    return x


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def say(text: str) -> None:
    """Print a line above the progress bar, once for all processes."""
    if RANK == 0:
        tqdm.write(text)
        sys.stdout.flush()


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def markdown_table(rows: list[tuple]) -> str:
    """Rows, the first of them the header, as Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


# --- Checkpoints ---

FORMAT = 1  # raised when older scripts could no longer read the files


# Copied from ppo_continuous_action.py
def model_state(args: Args, agent: nn.Module, statistics: dict[str, Any]) -> dict[str, Any]:
    """All that evaluation needs, detached from the running training: tensors and plain values."""
    return {
        "format": FORMAT,
        "script": SCRIPT,
        "args": dataclasses.asdict(args),
        "agent": {name: x.detach().cpu().clone() for name, x in agent.state_dict().items()},
        "statistics": {name: stats.state() for name, stats in statistics.items()},
    }


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def saved_args(content: dict[str, Any], path: Path) -> Args:
    """The settings in a loaded file."""
    try:
        return Args(**content["args"])
    except TypeError as error:
        raise RunError(f"{path} has settings that this version does not know.") from error


# Copied from ppo_continuous_action.py
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


# Copied from ppo_continuous_action.py
def save_checkpoint(args: Args, state: dict[str, Any], process: "ProcessState") -> bool:
    """Write `state` and the state of every process to `checkpoint.pt`; False if that failed."""
    processes = [process.capture()]
    if WORLD_SIZE > 1:
        gathered = [b""] * WORLD_SIZE
        dist.all_gather_object(gathered, to_bytes(processes[0]))
        processes = [from_bytes(x) for x in gathered]
    state |= {"processes": processes}
    return RANK > 0 or save_file(args.run_dir / "checkpoint.pt", state)


# Copied from ppo_continuous_action.py
def to_bytes(state: Any) -> bytes:
    """Tensors and plain values as bytes, which is how they travel from process to process.

    Pickled, each tensor would take an open file, and some types could not be sent at all.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


# Copied from ppo_continuous_action.py
def from_bytes(data: bytes) -> Any:
    """Undo `to_bytes`, running no code."""
    return torch.load(io.BytesIO(data), weights_only=True)


# Copied from ppo_continuous_action.py
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


# --- Evaluation ---


def evaluate(args: Args) -> dict[str, list[float]]:
    """Play whole games with a saved model; print and return their scores.

    Raises:
        RunError: the file is no model of this script and game.
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
        resume=None,
        seed=args.seed,
        output_dir=str(path.parent),
        run_name="evaluation",
        num_envs=1,
        num_minibatches=1,
        norm_adv=False,  # which a batch of one step could not have
        env_backend="gymnasium",
        async_envs=False,
        evaluate=args.evaluate,
        capture_video=args.capture_video,
        eval_episodes=args.eval_episodes,
        deterministic=args.deterministic,
    )
    torch.set_num_threads(args.torch_threads)
    results = {}
    with closing_envs(make_envs(args)) as envs:
        agent = Agent(envs.single_action_space.n, args)
        try:
            agent.load_state_dict(content["agent"])
        except RuntimeError as error:
            raise RunError(f"{path} does not fit {args.env_id} as installed here.") from error
        for policy in ("greedy",) if args.deterministic else ("greedy", "sampled"):
            results[policy] = play(args, envs, agent, policy)
            mean, std = np.mean(results[policy]), np.std(results[policy])
            say(f"{policy:>7} action: {mean:.1f} ± {std:.1f} over {args.eval_episodes} games")
    if args.capture_video:
        say(f"Videos: {args.run_dir / 'videos'}")
    return results


def play(args: Args, envs: "FrameStack", agent: Agent, policy: str) -> list[float]:
    """Raw scores of whole games, all lives of them, in one environment."""
    rng = np.random.default_rng(args.seed)
    obs, _ = envs.reset(seed=environment_seeds(args.seed, 1, 0))
    start, state, scores = torch.ones(1), agent.initial_state(1), []
    while len(scores) < args.eval_episodes:
        noise = rng.gumbel(size=(1, envs.single_action_space.n)) * (policy == "sampled")
        inputs = torch.from_numpy(obs), start, state, torch.tensor(noise, dtype=torch.float32)
        action, _, _, state = act_in_sequence(agent, inputs)
        obs, _, terminated, truncated, infos = envs.step(action.numpy())
        start = torch.from_numpy(terminated | truncated).float()
        if "episode" in infos.get("final_info", {}):
            scores.append(infos["final_info"]["episode"]["r"].item())
    return scores


# Details of other scripts, so that the table shows all 37.
# Detail 23/37 omitted: normal distribution; the actions are discrete
# Detail 24/37 omitted: state-independent log std; the actions are discrete
# Detail 25/37 omitted: independent action components; an action is one button, see 37
# Detail 26/37 omitted: separate networks; the CNN is shared, see 21
# Detail 27/37 omitted: action clipping and storage; the actions are discrete
# Detail 28/37 omitted: observation normalization; pixels are divided by 255, see 22
# Detail 29/37 omitted: observation clipping; pixels are bounded
# Detail 30/37 omitted: reward scaling; rewards are signs, see 19
# Detail 31/37 omitted: reward clipping; rewards are signs, see 19
# Detail 37/37 omitted: independent action components; one component, see ppo_multidiscrete.py


# Copied from ppo_continuous_action.py
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
