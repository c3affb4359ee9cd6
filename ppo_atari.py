"""PPO for Atari games."""

# === Imports ===========================================================================
import difflib
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.vector import AutoresetMode
from torch import Tensor

# === Settings ==========================================================================


@dataclass
class Args:
    """Settings of one run."""

    env_id: str = "BreakoutNoFrameskip-v4"
    """the game: Breakout, BreakoutNoFrameskip-v4 and ALE/Breakout-v5 all name the same one"""
    seed: int = 1
    """seed of the weights, the action sampling and the environments"""
    total_timesteps: int = 10_000_000
    """agent steps of the whole run, over all environments (1 step = 4 frames)"""
    num_envs: int = 8
    """N, sub-environments stepped in lock-step [8 in the paper's Table 5]"""
    env_backend: Literal["gymnasium", "ale"] = "gymnasium"
    """gymnasium: the wrappers in this file, exact; ale: the same rules over ale_py's C++ threads"""
    vectorization: Literal["auto", "sync", "async"] = "auto"
    """run the gymnasium environments in this process (sync) or in one process each (async)"""
    sticky_actions: float = 0.0
    """probability that the emulator repeats the previous action in a frame [0 in NoFrameskip-v4]"""
    num_steps: int = 128
    """T, agent steps per environment and rollout [ppo2/defaults.py L16, paper Table 5]"""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start [ppo2/defaults.py L20]"""
    anneal_lr: bool = True
    """lower the learning rate linearly, to reach 0 after the last iteration"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch [ppo2/defaults.py L16]"""
    update_epochs: int = 4
    """K, epochs over each batch [4 in ppo2/defaults.py L18, 3 in the paper's Table 5]"""
    clip_coef: float = 0.1
    """epsilon of the clipped objective"""
    ent_coef: float = 0.01
    """c2, weight of the entropy bonus"""
    vf_coef: float = 0.5
    """c1, weight of the value loss [0.5 in ppo2, 1 in the paper]"""
    max_grad_norm: float = 0.5
    """largest global norm of the gradient"""
    bfloat16: bool = False
    """run the network in bfloat16 (autocast); weights, losses and Adam stay in float32"""
    torch_threads: int = 1
    """CPU threads of PyTorch"""
    compile: bool = True
    """compile the update"""
    out: str = ""
    """temporary: csv"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


NOOP_MAX = 30
"""Most no-op frames at the start of a game [common/atari_wrappers.py L266, L269]."""
FRAME_SKIP = 4
"""Frames that each agent step lasts [common/atari_wrappers.py L270]."""
MAX_GAME_STEPS = 108_000 // FRAME_SKIP
"""Agent steps after which a game is truncated: half an hour at 60 frames per second."""

# === Environments ======================================================================
# The wrappers of ppo2, inside out in its order (common/atari_wrappers.py L266-289,
# common/cmd_util.py L74-93): each changes one thing, and EpisodeStatistics sits where the
# return is still that of the raw, whole game.


class NoopReset(gym.Wrapper):
    """Begin each game with 1 to 30 no-op frames, so that no two games start alike."""

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Reset the game and press action 0, which is the no-op in every game."""
        frame, info = self.env.reset(seed=seed, options=options)
        # Detail 14/37: no-op reset [common/atari_wrappers.py L12-39]
        noops = self.unwrapped.np_random.integers(1, NOOP_MAX + 1)
        for _ in range(noops):
            frame, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                frame, info = self.env.reset(options=options)
        return frame, info


class MaxAndSkip(gym.Wrapper):
    """Hold each action for 4 frames and show the brighter of the last two, pixel by pixel.

    The console draws some objects in every second frame only; the maximum shows them all.
    """

    def step(self, action: int):
        """Return the maximum of the last two frames and the sum of the rewards."""
        frames, total_reward = [], 0.0
        for _ in range(FRAME_SKIP):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            total_reward += float(reward)
            if terminated or truncated:
                break
        # Detail 15/37: max and skip [common/atari_wrappers.py L97-123]
        frame = np.maximum(frames[-1], frames[-2:][0])
        return frame, total_reward, terminated, truncated, info


class EpisodeStatistics(gym.Wrapper):
    """Report return and length of each whole game, in raw points and agent steps.

    Its place is that of ppo2's Monitor: a lost life or a clipped reward is not seen here.
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start counting a new game."""
        self.episode_return, self.episode_length = 0.0, 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: int):
        """Put `{"r": return, "l": length}` into `info["episode"]` when the game is over."""
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.episode_return += reward
        self.episode_length += 1
        if terminated or truncated:
            info["episode"] = {"r": self.episode_return, "l": self.episode_length}
        return frame, reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """End the learner's episode with each life, but reset only a game that is over.

    The value function then sees what a life is worth, and the agent still gets to know the
    parts of the game that come after the first life.
    """

    game_over = True

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Go on with the next life by one no-op step, or start a new game."""
        if not self.game_over and seed is None:
            frame, _, _, _, info = self.step(0)
        if self.game_over or seed is not None:
            frame, info = self.env.reset(seed=seed, options=options)
        self.game_over, self.lives = False, self.unwrapped.ale.lives()
        return frame, info

    def step(self, action: int):
        """Set `terminated` where a life was lost; a game may linger at 0 lives before its end."""
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        lives = self.unwrapped.ale.lives()
        # Detail 16/37: episodic life [common/atari_wrappers.py L61-95]
        terminated = terminated or 0 < lives < self.lives
        self.lives = lives
        return frame, reward, terminated, truncated, info


class FireReset(gym.Wrapper):
    """Press FIRE, then action 2, after each reset: some games stand still until then.

    Outside EpisodicLife, therefore also after each lost life. Should a press end the episode, the
    observation of the reset that follows is returned (the original returns the one before it).
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Reset, then make the two steps."""
        frame, info = self.env.reset(seed=seed, options=options)
        # Detail 17/37: fire reset [common/atari_wrappers.py L41-59]
        for action in (1, 2):
            frame, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                frame, info = self.env.reset(options=options)
        return frame, info


class WarpFrame(gym.ObservationWrapper):
    """Turn the (210, 160, 3) screen into an (84, 84) grey image."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, frame: np.ndarray) -> np.ndarray:
        """Luma first, then resize; the other order differs by rounding."""
        import cv2

        # Detail 18/37: warp frame [common/atari_wrappers.py L134-185]
        grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)


class ClipReward(gym.RewardWrapper):
    """Learn from the sign of the reward: one set of hyper-parameters then fits every game."""

    def reward(self, reward: float) -> float:
        """-1, 0 or +1; the sign of the sum over the skipped frames, not a limit of +-1."""
        # Detail 19/37: reward clipping to sign [common/atari_wrappers.py L125-131]
        return float(np.sign(reward))


class FrameStack(gym.vector.VectorWrapper):
    """Show the last k frames of each environment, oldest first, so that motion is visible.

    As ppo2's VecFrameStack it fills a new episode's stack with zeros (the per-environment wrapper
    of the same repository, which ppo2 does not use here, repeats the first frame instead).
    """

    def __init__(self, envs: gym.vector.VectorEnv, size: int):
        super().__init__(envs)
        shape = (size, *envs.single_observation_space.shape)
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, envs.num_envs
        )

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start every environment with an empty stack."""
        frames, infos = self.env.reset(seed=seed, options=options)
        self.stack = np.zeros(self.observation_space.shape, np.uint8)  # (N, k, 84, 84)
        self.stack[:, -1] = frames
        return self.stack, infos

    def step(self, actions: np.ndarray):
        """Push one frame; rows of `infos["final_obs"]` become stacks of the ended episode."""
        frames, rewards, terminated, truncated, infos = self.env.step(actions)
        # Detail 20/37: frame stack [common/vec_env/vec_frame_stack.py L6-30]
        self.stack = np.roll(self.stack, -1, axis=1)  # a new array: earlier ones stay as they were
        for i in np.flatnonzero(terminated | truncated):
            final_stack = self.stack[i].copy()
            final_stack[-1] = infos["final_obs"][i]
            infos["final_obs"][i] = final_stack
            self.stack[i] = 0
        self.stack[:, -1] = frames
        return self.stack, rewards, terminated, truncated, infos


class AleGame:
    """One C++ emulator that plays by the rules of the wrappers above (the fast path).

    `ale_py.AtariVectorEnv` skips frames, takes the maximum, converts to grey and resizes in C++, in
    a thread of its own. Its life-loss options are not used: `episodic_life` resets the whole game
    with each life, `life_loss_info` presses no FIRE after one, and both end the raw score.
    """

    def __init__(self, rom: str, sticky_actions: float):
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
        self.fire = self.num_actions > 2 and buttons[1] == Action.FIRE
        self.game_over = True

    def new_game(self, seed: int | None = None) -> np.ndarray:
        """Reset the game with 1 to 30 no-ops: the emulator draws 0 to 30, so 0 is drawn again."""
        info = {"episode_frame_number": [0]}
        while info["episode_frame_number"][0] == 0:
            # as Detail 14
            frame, info = self.emulator.reset(seed=seed)
            seed = None
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


class AleVectorEnv(gym.vector.VectorEnv):
    """The fast path: one AleGame per sub-environment, stepped at the same time.

    Actions, rewards, episode ends, lives, raw returns and final observations equal the reference
    path's. What remains different:
    - Grey levels: the emulator converts to grey by its own palette before it takes the maximum of
      two frames, ppo2 after it; where sprites flicker, single pixels differ.
    - The number of no-ops comes from the emulator's generator, sticky actions too: one seed gives
      other games than on the reference path, from the same distribution.
    """

    def __init__(self, rom: str, num_envs: int, sticky_actions: float):
        self.games = [AleGame(rom, sticky_actions) for _ in range(num_envs)]
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.games[0].num_actions)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Start new games; sub-environment i gets seed + i, as in Gymnasium's vector classes."""
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        frames = [game.reset(seed) for game, seed in zip(self.games, seeds, strict=True)]
        return np.stack(frames), {}

    def step(self, actions: np.ndarray):
        """Step all games at once; those that ended start again in the same step."""
        for game, action in zip(self.games, actions, strict=True):
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


def atari_game(env_id: str) -> str:
    """Return the game's name in ALE: `Breakout`, `BreakoutNoFrameskip-v4` -> `Breakout`."""
    try:
        import ale_py
    except ImportError:
        raise ValueError("the Atari games need ale-py: pip install ale-py") from None

    gym.register_envs(ale_py)
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id.removeprefix("ALE/"))
    games = [key[4:-3] for key in gym.registry if key.startswith("ALE/") and key.endswith("-v5")]
    if name in games:
        return name
    raise ValueError(f"unknown game {env_id}")


def make_env(args, index: int) -> Callable[[], gym.Env]:
    """Return a function that builds sub-environment `index` with the reference wrappers."""
    game = atari_game(args.env_id)

    def thunk() -> gym.Env:
        import ale_py  # registers the games in the worker process of AsyncVectorEnv, too

        gym.register_envs(ale_py)
        env = gym.make(
            f"ALE/{game}-v5",
            frameskip=1,  # MaxAndSkip does it
            repeat_action_probability=args.sticky_actions,
            max_num_frames_per_episode=None,  # TimeLimit does it
            full_action_space=False,
            disable_env_checker=True,
        )
        env = NoopReset(env)
        env = MaxAndSkip(env)
        env = gym.wrappers.TimeLimit(env, MAX_GAME_STEPS)
        env = EpisodeStatistics(env)
        env = EpisodicLife(env)
        if "FIRE" in env.unwrapped.get_action_meanings()[1:2]:
            env = FireReset(env)
        env = WarpFrame(env)
        return ClipReward(env)

    return thunk


def make_envs(args) -> gym.vector.VectorEnv:
    if args.env_backend == "ale":
        gym.register_envs(__import__("ale_py"))
        rom = gym.spec(f"ALE/{atari_game(args.env_id)}-v5").kwargs["game"]
        envs = AleVectorEnv(rom, args.num_envs, args.sticky_actions)
    else:
        vector = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}[
            args.vectorization if args.vectorization != "auto" else "sync"
        ]
        envs = vector(
            [make_env(args, i) for i in range(args.num_envs)], autoreset_mode=AutoresetMode.SAME_STEP
        )
    return FrameStack(envs, 4)


# === Agent =============================================================================


def layer_init(layer: nn.Module, gain: float, bias: float = 0.0) -> nn.Module:
    # Detail 2/37: orthogonal and constant initialization [a2c/utils.py L20-35]
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.constant_(layer.bias, bias)
    return layer


class Agent(nn.Module):
    """The CNN of Mnih et al. (Nature 2015), shared by policy and value function.

    1,684,128 parameters up to the 512 features; 1,687,719 with 6 actions. Pixels arrive as stored, uint8.
    """

    def __init__(self, num_frames: int, num_actions: int, bfloat16: bool = False):
        super().__init__()
        self.bfloat16 = bfloat16
        # Detail 21/37: shared Nature CNN [common/models.py L15-26]
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(num_frames, 32, 8, stride=4), 2**0.5),  # (B, 32, 20, 20)
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2), 2**0.5),  # (B, 64, 9, 9)
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1), 2**0.5),  # (B, 64, 7, 7)
            nn.ReLU(),
            nn.Flatten(),  # (B, 3136)
            layer_init(nn.Linear(64 * 7 * 7, 512), 2**0.5),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), 0.01)
        self.critic = layer_init(nn.Linear(512, 1), 1.0)

    def get_logits_and_value(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return action logits (B, A) and values (B,) of uint8 stacks (B, k, 84, 84)."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # Detail 22/37: image scaling [common/models.py L19]
            features = self.network(obs / 255.0)  # (B, 512)
            logits, values = self.actor(features), self.critic(features).squeeze(-1)
        return logits.float(), values.float()

    def get_value(self, obs: Tensor) -> Tensor:
        """Return V(obs), shape (B,)."""
        return self.get_logits_and_value(obs)[1]

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None):
        """Return action, its log-probability, the entropy and V(obs), each (B,)."""
        logits, value = self.get_logits_and_value(obs)
        logprobs = logits.log_softmax(-1)  # (B, A)
        if action is None:
            # The Gumbel-max trick of common/distributions.py L199-201: no normalisation, no sync.
            action = (logits - (-torch.rand_like(logits).log()).log()).argmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return action, logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropy, value


# === The math ==========================================================================


def linear_decay(start: float, iteration: int, num_iterations: int) -> float:
    return start * (1.0 - (iteration - 1) / num_iterations)


def gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * (1 - terminated[t]) - values[t]
        last = delta + gamma * gae_lambda * (1 - done[t]) * last
        advantages[t] = last
    return advantages, advantages + values


def normalize(x: Tensor, eps: float = 1e-8) -> Tensor:
    return (x - x.mean()) / (x.std(correction=0) + eps)


def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    ratio = logratio.exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()


def value_loss(new_values, values, returns, clip_coef):
    clipped = values + (new_values - values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max((new_values - returns) ** 2, (clipped - returns) ** 2).mean()


def approx_kl(logratio: Tensor) -> Tensor:
    return (logratio.exp() - 1 - logratio).mean()


def clip_fraction(logratio: Tensor, clip_coef: float) -> Tensor:
    return ((logratio.exp() - 1).abs() > clip_coef).float().mean()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    return float(1 - (returns - values).var() / returns.var())


# === Training ==========================================================================


def train(args) -> dict:
    torch.set_num_threads(args.torch_threads)
    torch.manual_seed(args.seed)
    envs = make_envs(args)
    T, N = args.num_steps, args.num_envs
    agent = Agent(4, int(envs.single_action_space.n), args.bfloat16)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)

    def loss_fn(obs, actions, logprobs, advantages, returns, values):
        _, new_logprobs, entropy, new_values = agent.get_action_and_value(obs, actions)
        logratio = new_logprobs - logprobs
        pg_loss = policy_loss(logratio, normalize(advantages), args.clip_coef)
        v_loss = value_loss(new_values, values, returns, args.clip_coef)
        entropy = entropy.mean()
        loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
        with torch.no_grad():
            kl, clipfrac = approx_kl(logratio), clip_fraction(logratio, args.clip_coef)
        return loss, torch.stack([pg_loss, v_loss, entropy, kl, clipfrac]).detach()

    compiled = torch.compile(loss_fn) if args.compile else loss_fn
    obs = torch.zeros((T, N, *envs.single_observation_space.shape), dtype=torch.uint8)
    actions = torch.zeros((T, N), dtype=torch.long)
    logprobs, rewards, values, terminated, done = (torch.zeros((T, N)) for _ in range(5))
    episodes, updates = [], []
    next_obs = torch.from_numpy(envs.reset(seed=args.seed)[0])
    out = open(args.out, "a", buffering=1) if args.out else None
    start = time.time()
    global_step = 0
    for iteration in range(1, args.num_iterations + 1):
        optimizer.param_groups[0]["lr"] = linear_decay(args.learning_rate, iteration, args.num_iterations)
        truncated_obs = {}
        t0 = time.perf_counter()
        for t in range(T):
            obs[t] = next_obs
            with torch.no_grad():
                actions[t], logprobs[t], _, values[t] = agent.get_action_and_value(next_obs)
            stack, reward, ended, cut, infos = envs.step(actions[t].numpy())
            next_obs = torch.from_numpy(stack)
            rewards[t] = torch.from_numpy(reward)
            terminated[t] = torch.from_numpy(ended)
            done[t] = torch.from_numpy(ended | cut)
            global_step += N
            for i in np.flatnonzero(cut & ~ended):
                truncated_obs[t, i] = infos["final_obs"][i]
            if "final_info" in infos and "episode" in infos["final_info"]:
                ep = infos["final_info"]
                for i in np.flatnonzero(ep["_episode"]):
                    episodes.append((global_step, float(ep["episode"]["r"][i]), int(ep["episode"]["l"][i])))
                    if out:
                        print(*episodes[-1], f"{time.time() - start:.1f}", sep=",", file=out)
        t1 = time.perf_counter()
        with torch.no_grad():
            next_values = torch.cat([values[1:], agent.get_value(next_obs)[None]])
            for (t, i), final in truncated_obs.items():
                next_values[t, i] = agent.get_value(torch.from_numpy(final)[None])[0]
        advantages, returns = gae(
            rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda
        )
        batch = [x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, returns, values)]
        metrics = []
        for _ in range(args.update_epochs):
            for idx in torch.randperm(args.batch_size).split(args.minibatch_size):
                loss, m = compiled(*(x[idx] for x in batch))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                metrics.append(m)
        t2 = time.perf_counter()
        m = torch.stack(metrics).mean(0).tolist()
        updates.append(m)
        if iteration % 10 == 0:
            recent = [e[1] for e in episodes[-20:]]
            print(
                f"{global_step} ret {np.mean(recent) if recent else float('nan'):.2f} sps {global_step / (time.time() - start):.0f}"
                f" rollout {t1 - t0:.2f} update {t2 - t1:.2f} " + " ".join(f"{x:.4f}" for x in m),
                file=sys.stderr,
                flush=True,
            )
        if out and iteration % 200 == 0:
            torch.save({"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}, args.out + ".pt")
    envs.close()
    return {"agent": agent, "episodes": episodes, "updates": updates, "args": args}


if __name__ == "__main__":
    train(tyro.cli(Args))
