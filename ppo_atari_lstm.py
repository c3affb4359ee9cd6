# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py==0.12.1", "gymnasium==1.4.0", "moviepy==2.2.1", "numpy==2.4.6",
#   "opencv-python-headless==5.0.0.93", "pydantic==2.14.3", "tensorboard==2.21.0",
#   "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.16", "wandb==0.31.0"]
# ///
"""PPO with an LSTM for Atari games, in one file: one frame and a memory instead of four frames.

    python ppo_atari_lstm.py --env-id Breakout

The algorithm of Schulman et al. 2017 (arXiv 1707.06347) as OpenAI implemented it in ppo2 =
openai/baselines@ea25b9e8. "The 37 Implementation Details of PPO" (Huang et al. 2022) numbers what
it takes to reproduce that code. Each detail is a comment above the statement that does it, with its
settings in parentheses and its place in ppo2 in brackets; `--details` lists them. Here are 1-13
(core), 14-22 (Atari), 32-36 (LSTM) and, as Extras, two of the four auxiliary ones; 23-31 are in
ppo_continuous_action.py, 37 in ppo_multidiscrete.py. What differs from ppo_atari.py: the agent, its
state in the collect section, and minibatches of whole environments.

Shapes: T = num_steps, N = num_envs, A = actions, B = environments in a minibatch, H = 128 units of
the LSTM. A state is one tensor (2, B, H), the LSTM's output and its cell. `starts` is 1 where a
frame is the first of a life or game. The games are those of ale-py; one step is four frames.

Deviations from ppo2: where a time limit cuts a game off, the value of its final observation, under
the state that led to it, is bootstrapped (`--truncation-is-terminal` restores ppo2), and the limit
is the usual 108,000 frames, not 400,000; where one of the presses that begin a life ends it, the
next life's observation is returned, not the old one; one frame is seen, as in the post, where ppo2
stacks four; Adam is PyTorch's, which adds epsilon to the root after its correction, not before;
gradients are scaled by max_grad_norm / (norm + 1e-6), there without 1e-6; the logged KL is k3, not
k2; orthogonal matrices come from a QR decomposition, not an SVD, which is equal in distribution.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
import time
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
NUM_FRAMES = 1  # frames in an observation; the LSTM remembers the others
HIDDEN_SIZE = 128  # units of the LSTM, H [common/models.py L187]

# What --paper changes: Table 5 of the paper, whose value loss is a whole square and c1 = 1.
PAPER = {"update_epochs": 3, "vf_coef": 2.0, "anneal_clip": True}

Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]


@pydantic.dataclasses.dataclass(config={"extra": "forbid"})
class Args:
    # --- Experiment ---
    seed: NonNegativeInt = 1  # seed of everything that is random in the run
    total_timesteps: PositiveInt = 10_000_000  # of all environments; annealing stretches over them
    paper: bool = False  # the paper's 3 epochs, vf_coef 2, annealed clip; flags beside it win
    run_name: str | None = None  # folder below runs/; by default environment, script, seed, time
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one, for the CNN
    torch_threads: PositiveInt = min(8, os.cpu_count() or 1)  # of the update
    bfloat16: bool = False  # compute the CNN in bfloat16; weights, heads, losses stay in float32
    compile: bool = True  # compile the update into one graph, where there is a C++ compiler
    track: bool = False  # send the logs to Weights & Biases too (WANDB_MODE=offline: to disk)
    checkpoint_interval: PositiveInt = 25  # iterations between two checkpoints
    resume: str | None = None  # continue the run in this folder; flags given beside it override
    evaluate: str | None = None  # play episodes with the model in this folder instead of training
    eval_episodes: PositiveInt = 10  # games of each policy, greedy and sampled, with --evaluate
    capture_video: bool = False  # film the episodes of --evaluate
    details: bool = False  # print the implementation details with their values here, and exit

    # --- Environment ---
    env_id: str = "Breakout"  # Atari game, also as BreakoutNoFrameskip-v4 or ALE/Breakout-v5
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
    clip_vloss: bool = True  # clip the change of values by clip_coef too [ppo2; not in the paper]
    ent_coef: NonNegativeFloat = 0.01  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: NonNegativeFloat = 0.5  # weight of the value loss, half a square, c1 [ppo2: 0.5]
    max_grad_norm: PositiveFloat = 0.5  # largest norm of the whole gradient [ppo2: 0.5; inf: off]
    target_kl: PositiveFloat = math.inf  # end an iteration's epochs when one's mean KL exceeds it

    def __post_init__(self) -> None:
        """Bring the names that a game has in different versions of Gym to the one of ale-py."""
        self.env_id = re.sub(r"^(?:ALE/)?(\w+?)(?:NoFrameskip-v4|-v5)?$", r"\1", self.env_id)

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


# === Environments ===
# The wrappers of ppo2, inside out in its order [common/atari_wrappers.py L266-289].


# Copied from ppo_atari.py
class NoopReset(gym.Wrapper):
    """Begin each game with 1 to 30 frames of doing nothing, so that games start differently."""

    def reset(self, **kwargs: Any) -> tuple:
        frame, info = self.env.reset(**kwargs)
        # Detail 14/37: no-op reset [common/atari_wrappers.py L12-39]
        noops = self.unwrapped.np_random.integers(1, NOOP_MAX + 1)
        for _ in range(noops):
            frame, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                frame, info = self.env.reset()
        return frame, info


# Copied from ppo_atari.py
class MaxAndSkip(gym.Wrapper):
    """Hold each action for 4 frames, sum their rewards, show the maximum of the last two.

    The console draws some objects in every second frame only; the maximum shows them all.
    """

    def step(self, action: int) -> tuple:
        frames, total_reward = [], 0.0
        for _ in range(FRAME_SKIP):
            frame, reward, terminated, truncated, info = self.env.step(action)
            frames.append(frame)
            total_reward += float(reward)
            if terminated or truncated:
                break
        # Detail 15/37: max and skip [common/atari_wrappers.py L97-123]
        frame = np.maximum(frames[-1], frames[-2:][0])  # the only one, if the game is over
        return frame, total_reward, terminated, truncated, info


# Copied from ppo_atari.py
class EpisodicLife(gym.Wrapper):
    """End the learner's episode with each life, but reset only a game that is over.

    The value function then sees what a life is worth, and the agent still gets to know the parts
    of the game that come after the first life. The score stays that of the game, in raw points and
    steps of the agent; it is the info of the step that ends the game, other infos are empty.
    """

    game_over = True

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
        frame, reward, terminated, truncated, _ = self.env.step(action)
        self.score["return"] += reward
        self.score["length"] += 1
        self.game_over = terminated or truncated
        lives = self.unwrapped.ale.lives()
        # Detail 16/37: episodic life [common/atari_wrappers.py L61-95]
        terminated = terminated or 0 < lives < self.lives
        self.lives = lives
        return frame, reward, terminated, truncated, self.score if self.game_over else {}


# Copied from ppo_atari.py
class FireReset(gym.Wrapper):
    """Press FIRE, then action 2, to begin each life: some games stand still until then."""

    def reset(self, **kwargs: Any) -> tuple:
        frame, info = self.env.reset(**kwargs)
        # Detail 17/37: fire reset [common/atari_wrappers.py L41-59]
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
        grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)


# Copied from ppo_atari.py
class ClipReward(gym.RewardWrapper):
    """Learn from the sign, -1, 0 or +1, of each reward: one set of settings then fits all games."""

    def reward(self, reward: float) -> float:
        # Detail 19/37: reward clipping to sign [common/atari_wrappers.py L125-131]
        return float(np.sign(reward))


# Copied from ppo_atari.py
def make_env(args: Args, video: str | None = None) -> gym.Env:
    """Make one game with frames (84, 84), filmed under the name `video`; raise if there is none."""
    import ale_py
    import cv2

    gym.register_envs(ale_py)
    cv2.setNumThreads(1)  # an image this small is resized faster than threads are woken
    games = [x[len("ALE/") : -len("-v5")] for x in gym.registry if x.startswith("ALE/")]
    if args.env_id not in games or args.env_id in ("Backgammon", "VideoCheckers"):
        near = difflib.get_close_matches(args.env_id, games, n=1, cutoff=0)[0]
        raise ValueError(f"No Atari game with a no-op is called {args.env_id}: try {near}.")
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
        film = {"episode_trigger": lambda k: k < args.eval_episodes, "fps": 60 // FRAME_SKIP}
        env = gym.wrappers.RecordVideo(env, f"{args.evaluate}/videos", name_prefix=video, **film)
    env = EpisodicLife(env)
    if env.unwrapped.get_action_meanings()[1] == "FIRE":
        env = FireReset(env)
    env = WarpFrame(env)
    return ClipReward(env)


class Environments:
    """N games stepped in turn; where a life or a game ends, the next begins in the same step.

    A game is its seed, the emulator's random numbers when it begins, and its actions. They are kept
    while it runs: a resumed run plays them again, through all its lives, and is where it was.
    """

    def __init__(self, envs: list[gym.Env]) -> None:
        self.envs = envs
        self.obs = np.zeros((len(envs), NUM_FRAMES, 84, 84), dtype=np.uint8)
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
        self.begin_life(i)

    def begin_life(self, i: int) -> None:
        """Reset environment i; the stack of frames before the first one is black."""
        self.obs[i] = 0
        self.obs[i, -1], _ = self.envs[i].reset()

    def advance(self, i: int, action: int) -> tuple[float, bool, bool, dict]:
        """Take one step in environment i, and begin the next life where one is left.

        Returns the sign of its reward, terminated, truncated, and the score of a game that is over.
        """
        frame, reward, terminated, truncated, score = self.envs[i].step(action)
        self.running[i]["actions"].append(action)
        # Detail 20/37: frame stack [common/vec_env/vec_frame_stack.py L6-30]
        self.obs[i] = np.concatenate([self.obs[i, 1:], frame[None]])
        if terminated or truncated:
            self.final_obs[i] = self.obs[i]
            if not score:
                self.begin_life(i)
        return reward, terminated, truncated, score

    def reset(self, rng: np.random.Generator) -> None:
        """Load the games and begin them."""
        for i, env in enumerate(self.envs):
            seed = rng.integers(2**31).item()
            env.unwrapped.reset(seed=seed)  # the emulator's random numbers go on from here
            env.set_wrapper_attr("game_over", True)  # a replay may have left it in a game
            self.begin(i, seed)

    def step(self, actions: list[int], rng: np.random.Generator) -> tuple[tuple, ...]:
        """Take one step, and begin new games where some are over.

        Returns rewards, terminated, truncated (N,). In `obs` is then the first stack of a new life
        or game where one has begun, and in `final_obs` the last one of the old.
        """
        self.global_step += len(self.envs)
        outcomes = map(self.advance, range(len(self.envs)), actions)
        rewards, terminated, truncated, scores = zip(*outcomes)
        for i, score in enumerate(scores):
            if score:
                self.episodes.append({"global_step": self.global_step, **score})
                self.begin(i, rng.integers(2**31).item())
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
        for i, running in enumerate(state["running"]):
            self.envs[i].unwrapped.ale.restoreState(ALEState(running["emulator"]))
            self.begin(i, running["seed"])
            for action in running["actions"].tolist():
                *_, score = self.advance(i, action)
                if score:
                    break
        same = np.array_equal(self.obs, state["obs"].numpy())
        if not same:
            print("The games do not repeat themselves: new ones begin.")
        return same


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
        # Detail 21/37: shared Nature CNN [common/models.py L15-26]
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
        self.lstm_input = layer_init(nn.Linear(512, 4 * HIDDEN_SIZE), 1.0)
        self.lstm_recurrent = nn.Linear(HIDDEN_SIZE, 4 * HIDDEN_SIZE, bias=False)
        nn.init.orthogonal_(self.lstm_recurrent.weight, 1.0)  # as Detail 32
        # Detail 13/37: shared or separate networks [common/policies.py L156-166]
        self.policy = layer_init(nn.Linear(HIDDEN_SIZE, num_actions), 0.01)
        self.value = layer_init(nn.Linear(HIDDEN_SIZE, 1), 1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """State (2, N, H) before the first step of the training."""
        # Detail 33/37: zero initial states [common/models.py L206]
        return torch.zeros((2, num_envs, HIDDEN_SIZE), device=self.value.weight.device)

    def features(self, obs: Tensor) -> Tensor:
        """Features (B, 512) of frames (B, 1, 84, 84), which arrive as stored, in uint8."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bfloat16):
            # Detail 22/37: image scaling [common/models.py L19]
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
            output, cell = output * (1 - start), cell * (1 - start)
            gates = step_inputs + self.lstm_recurrent(output)  # (B, 4H)
            write, keep, candidate, read = gates.chunk(4, dim=-1)
            cell = keep.sigmoid() * cell + write.sigmoid() * candidate.tanh()
            output = read.sigmoid() * cell.tanh()
            outputs.append(output)
        return torch.stack(outputs), torch.stack([output, cell])

    def get_value(self, obs: Tensor, starts: Tensor, state: Tensor) -> Tensor:
        """Values (T, B) of frames (T, B, 1, 84, 84)."""
        return self.value(self.remember(obs, starts, state)[0]).squeeze(-1)

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
        is a sample [common/distributions.py L199-201], with none the most probable action.
        """
        outputs, state = self.remember(obs, starts, state)
        logits = self.policy(outputs)
        action = (logits + noise).argmax(-1) if action is None else action
        logprobs = logits.log_softmax(-1)
        logprob = logprobs.gather(-1, action[..., None]).squeeze(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return action, logprob, entropy, self.value(outputs).squeeze(-1), state


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
    # Detail 5/37: generalized advantage estimation (gamma, gae_lambda) [ppo2/runner.py L50-65]
    deltas = rewards + gamma * next_values * (1 - terminated) - values
    decays = gamma * gae_lambda * (1 - done)
    advantage, advantages = torch.zeros_like(deltas[0]), []
    for delta, decay in zip(deltas.flip(0).unbind(), decays.flip(0).unbind(), strict=True):
        advantage = delta + decay * advantage
        advantages.append(advantage)
    advantages = torch.stack(advantages).flip(0)
    return advantages, advantages + values


# Copied from ppo_continuous_action.py
def normalize(x: Tensor) -> Tensor:
    """Shift and scale to mean 0 and std 1; population std (divisor n) as in ppo2."""
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


# Copied from ppo_continuous_action.py
def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """Clipped surrogate objective (paper, equation 7), negated for descent; a scalar.

    `logratio` is log pi_new(a|s) - log pi_old(a|s), of the shape of `advantages`. The gradient is
    zero where the ratio has already moved by more than `clip_coef` to the side that pays.
    """
    ratio = logratio.exp()
    # Detail 8/37: clipped surrogate objective (clip_coef) [ppo2/model.py L78-86]
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()


# Copied from ppo_continuous_action.py
def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, clip_coef: float | Tensor
) -> Tensor:
    """Half the mean squared error of the values, a scalar (Stable-Baselines3 has no half).

    The gradient is zero where a value has moved towards its target by more than `clip_coef` from
    `values`, those at collection time.
    """
    # Detail 9/37: value function loss clipping (clip_vloss, clip_coef) [ppo2/model.py L68-75]
    clipped_values = values + (new_values - values).clamp(-clip_coef, clip_coef)
    errors = torch.max((new_values - returns) ** 2, (clipped_values - returns) ** 2)
    return 0.5 * errors.mean()


# Copied from ppo_continuous_action.py
def approx_kl(logratio: Tensor) -> Tensor:
    """Estimate KL(old || new) from actions of the old policy by k3 = mean(r - 1 - log r).

    Unbiased as k1 = mean(-log r) but less noisy and never negative; k2 = mean((log r)^2) / 2, which
    ppo2 logs, is biased (Schulman 2020, "Approximating KL divergence").
    """
    return (logratio.exp() - 1 - logratio).mean()


def ppo_loss(
    agent: Agent, minibatch: list[Tensor], clip_coef: Tensor, args: Args
) -> tuple[Tensor, Tensors]:
    """Overall loss (paper, equation 9, negated), and debug variables by CleanRL's names.

    The minibatch is obs (T, B, 1, 84, 84), starts (T, B), the state (2, B, H) before the rollout,
    and actions, logprobs, values, advantages, returns (T, B).
    """
    obs, starts, state, actions, logprobs, values, advantages, returns = minibatch
    # Detail 36/37: rebuild states in training [ppo2/ppo2.py L179-180]
    outputs = agent.get_action_and_value(obs, starts, state, actions)
    _, new_logprobs, entropy, new_values, _ = outputs
    logratio = new_logprobs - logprobs
    # Detail 7/37: advantage normalization (norm_adv) [ppo2/model.py L136-139]
    advantages = normalize(advantages) if args.norm_adv else advantages
    pg_loss = policy_loss(logratio, advantages, clip_coef)
    v_loss = value_loss(new_values, values, returns, clip_coef if args.clip_vloss else math.inf)
    # Detail 10/37: overall loss and entropy bonus (ent_coef, vf_coef) [ppo2/model.py L91]
    loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
    # Detail 12/37: debug variables [ppo2/model.py L87-88, L115-116]
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropy.mean(),
        "losses/old_approx_kl": -logratio.mean(),  # k1
        "losses/approx_kl": approx_kl(logratio),
        "losses/clipfrac": ((logratio.exp() - 1).abs() > clip_coef).float().mean(),
        "losses/value_clipfrac": ((new_values - values).abs() > clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


# === Training: collect, advantages, update, log ===


def train(args: Args) -> dict[str, Any]:
    """Run PPO; logs and checkpoints go into the folder runs/RUN_NAME.

    Returns `agent`; `episodes`, each {"global_step", "return", "length"}; `updates`, one dictionary
    of metrics per iteration; `args`. Raises ValueError where something given does not fit.
    """
    args.check()
    use_gpu = args.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    torch.manual_seed(args.seed)

    envs = Environments([make_env(args) for _ in range(args.num_envs)])
    num_actions = envs.envs[0].action_space.n.item()
    agent = Agent(num_actions, args).to(device)
    # Detail 3/37: Adam epsilon (adam_eps) [ppo2/model.py L98-100]
    adam = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
    # On the CPU, the T unrolled steps take minutes to compile and run no faster.
    loss_function = compiled(ppo_loss) if args.compile and use_gpu else ppo_loss

    obs = torch.zeros((args.num_steps + 1, *envs.obs.shape), dtype=torch.uint8, device=device)
    starts = torch.ones((args.num_steps + 1, args.num_envs), device=device)
    state = agent.initial_state(args.num_envs)
    rewards = np.zeros((args.num_steps, args.num_envs))
    terminated, truncated = np.zeros_like(rewards, dtype=bool), np.zeros_like(rewards, dtype=bool)
    updates: list[dict[str, float]] = []

    run_dir, saved, writer = open_run(args, ["env_id", "num_envs", "num_steps"])
    if saved:
        agent.load_state_dict(saved["agent"])
        adam.load_state_dict(saved["adam"])
        updates = saved["updates"]
    if saved and envs.replay(saved):
        starts[-1], state = saved["starts"].to(device), saved["state"].to(device)
    else:
        envs.reset(np.random.default_rng([args.seed, len(updates)]))
    remaining = range(len(updates) + 1, args.num_iterations + 1)

    for iteration in (progress := tqdm(remaining, mininterval=1)):
        # --- Collect: T steps in each of the N environments, under frozen weights ---
        start_time = time.perf_counter()
        # Eight frames keep a thread busy; more would wait, spinning, and slow down the games.
        torch.set_num_threads(min(args.torch_threads, max(1, args.num_envs // 8)))
        rng = np.random.default_rng([args.seed, iteration])
        noise = rng.gumbel(size=(*rewards.shape, num_actions)).astype(np.float32)
        t_noise = torch.tensor(noise, device=device)
        first_episode, outputs = len(envs.episodes), []
        final_obs, final_states = [], []  # where a time limit ends a game
        obs[0], starts[0] = torch.from_numpy(envs.obs), starts[-1]
        rollout_state = state  # before the first step
        # Detail 1/37: vectorized architecture (num_envs, num_steps) [ppo2/runner.py L26-42]
        for t in range(args.num_steps):
            step = slice(t, t + 1)  # a sequence of one
            with torch.no_grad():
                *output, state = agent.get_action_and_value(
                    obs[step], starts[step], state, noise=t_noise[step]
                )
            outputs.append(output)
            actions = output[0][0].tolist()
            rewards[t], terminated[t], truncated[t] = envs.step(actions, rng)
            obs[t + 1] = torch.from_numpy(envs.obs)
            starts[t + 1] = torch.from_numpy(terminated[t] | truncated[t])
            if truncated[t].any():
                final_obs.append(envs.final_obs[truncated[t]])
                final_states.append(state[:, truncated[t]])
        rollout_time = time.perf_counter()

        # --- Advantages: the value of what comes next, then GAE ---
        torch.set_num_threads(args.torch_threads)
        done = terminated | truncated
        failed = done if args.truncation_is_terminal else terminated
        t_rewards, t_failed, t_done = (
            torch.tensor(x, dtype=torch.float32, device=device) for x in (rewards, failed, done)
        )
        actions, logprobs, _, values = map(torch.cat, zip(*outputs))  # (T, N)
        with torch.no_grad():
            # Under the state with which the next rollout begins.
            next_values = torch.cat([values[1:], agent.get_value(obs[-1:], starts[-1:], state)])
            # Deviation: time limits are not failures (truncation_is_terminal)
            if final_obs:
                t_final_obs = torch.tensor(np.concatenate(final_obs), device=device)[None]
                no_starts = torch.zeros(t_final_obs.shape[:2], device=device)
                final_state = torch.cat(final_states, dim=1)
                next_values[truncated] = agent.get_value(t_final_obs, no_starts, final_state)[0]
        advantages, returns = gae(
            t_rewards, values, next_values, t_failed, t_done, args.gamma, args.gae_lambda
        )

        # --- Update: K epochs of minibatches ---
        frac = 1 - (iteration - 1) / args.num_iterations  # 1 in the first one, 1/U in the last
        # Detail 4/37: learning rate annealing (learning_rate, anneal_lr) [ppo2/ppo2.py L133-135]
        learning_rate = args.learning_rate * (frac if args.anneal_lr else 1.0)
        # Extra: clip range annealing (clip_coef, anneal_clip) [ppo2/ppo2.py L137]
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1.0)
        # As a tensor: the loss is compiled for all values of it, but for one of each of args.
        t_clip_coef = torch.tensor(clip_coef, device=device)
        adam.param_groups[0]["lr"] = learning_rate
        batch = (obs[:-1], starts[:-1], rollout_state)  # environments on the second axis
        batch += (actions, logprobs, values, advantages, returns)
        mb_metrics = []
        for _ in range(args.update_epochs):
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            order = torch.tensor(rng.permutation(args.num_envs), device=device)
            for mb in order.chunk(args.num_minibatches):
                # Detail 35/37: sequential minibatches (num_minibatches) [ppo2/ppo2.py L167-180]
                minibatch = [x[:, mb] for x in batch]
                loss, metrics = loss_function(agent, minibatch, t_clip_coef, args)
                adam.zero_grad()
                loss.backward()
                # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                adam.step()
                mb_metrics.append({**metrics, "losses/grad_norm": grad_norm})
            # Extra: early stopping on target_kl (target_kl) [Spinning Up: 1.5 times it, each step]
            if means(mb_metrics[-args.num_minibatches :])["losses/approx_kl"] > args.target_kl:
                break
        metrics = means(mb_metrics)
        update_time = time.perf_counter()

        # --- Log and save ---
        metrics |= {
            "losses/explained_variance": (1 - (returns - values).var() / returns.var()).item(),
            "policy/entropy_share": metrics["losses/entropy"] / math.log(num_actions),
            "advantages/std": advantages.std(correction=0).item(),
            "charts/learning_rate": learning_rate,
            "charts/clip_coef": clip_coef,
            "charts/epochs": len(mb_metrics) // args.num_minibatches,
            "charts/SPS": args.batch_size / (update_time - start_time),
            "charts/SPS_rollout": args.batch_size / (rollout_time - start_time),
            "charts/SPS_update": args.batch_size / (update_time - rollout_time),
        }
        updates.append({"global_step": envs.global_step, **metrics})
        warn(updates)
        for name, value in updates[-1].items():
            writer.add_scalar(name, value, envs.global_step)
        ended = envs.episodes[first_episode:]
        for name in ("return", "length") if ended else ():
            mean = np.mean([episode[name] for episode in ended])
            writer.add_scalar(f"charts/episodic_{name}", mean, envs.global_step)
        recent = [episode["return"] for episode in envs.episodes[-100:]] or [math.nan]
        progress.set_postfix_str(f"return {np.mean(recent):.1f}", refresh=False)
        if iteration % args.checkpoint_interval == 0 or iteration == args.num_iterations:
            content = {"agent": agent.state_dict(), "adam": adam.state_dict(), "updates": updates}
            content |= {"starts": starts[-1], "state": state, **envs.state()}
            save_checkpoint(run_dir, args, content)
    writer.close()
    return {"agent": agent, "episodes": envs.episodes, "updates": updates, "args": args}


# === Operations: health, details, logs, checkpoints, evaluation ===

SCRIPT = Path(__file__).stem

# Metric, its lowest and highest healthy value, patience in iterations, what to do.
HEALTH = [
    ("losses/approx_kl", 0, 0.05, 1, "The policy moves too far: lower --learning-rate."),
    ("losses/clipfrac", 0, 0.5, 1, "Half of the ratios are clipped: lower --learning-rate."),
    ("losses/value_clipfrac", 0, 0.8, 20, "Values are held: scale rewards or --no-clip-vloss."),
    ("losses/explained_variance", 0, 1, 20, "Values are useless: check the scale of rewards."),
    ("losses/grad_norm", 0, 100, 1, "Gradients explode: lower --learning-rate."),
    ("advantages/std", 1e-6, math.inf, 1, "All advantages are equal: check the rewards."),
    ("policy/entropy_share", 0.01, math.inf, 1, "Exploration has ended: raise --ent-coef."),
]


# Copied from ppo_continuous_action.py
def warn(updates: list[dict[str, float]]) -> None:
    """Print what to do where a metric has just become unhealthy for `patience` iterations."""
    for name, low, high, patience, sentence in HEALTH:
        bad = [x[name] < low or x[name] > high for x in updates[-patience - 1 :]]
        if sum(bad) == patience and all(bad[-patience:]):  # for just so long: say it once
            tqdm.write(f"Warning: {name} is {updates[-1][name]:.3g}. {sentence}")


# Copied from ppo_continuous_action.py
def compiled(function: Callable) -> Callable:
    """Compile `function` into one graph when it is first called; if that fails, warn and go on."""
    torch.compiler.reset()  # an earlier run in this process may have had other settings
    torch._dynamo.config.trace_autograd_ops = True  # keeps torch.autograd.grad in the graph
    torch._inductor.config.cpp.vec_isa_ok = True  # believe the processor; trying it takes 10 s
    # Agent and settings stay the same in a run, so changes of them go unseen: to check them at each
    # call takes a fifth of an update.
    options = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe, "size_asserts": False}
    fastest = torch.compile(function, options=options)

    def call(*args: Any) -> Any:
        nonlocal fastest
        try:
            return fastest(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            tqdm.write(f"Warning: the update runs uncompiled, slower (is g++ there?): {reason}")
            fastest = function
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
            values = ", ".join(f"{x}={getattr(args, x)}" for x in (match[3] or "").split(", ") if x)
            table.append(f"| {match[1]} | {match[2].strip()} | {values or 'on'} | {line} |")
    return "\n".join(table)


# Copied from ppo_continuous_action.py
def open_run(args: Args, fixed: list[str]) -> tuple[Path, dict[str, Any], SummaryWriter]:
    """Folder, checkpoint ({} for a new run) and log; `fixed` are settings that must not change."""
    name = f"{args.env_id.replace('/', '-')}__{SCRIPT}__{args.seed}__{int(time.time())}"
    args.run_name = args.run_name or name
    run_dir = Path(args.resume or f"runs/{args.run_name}")
    saved = load_checkpoint(run_dir) if args.resume else {}
    if not saved and (run_dir / "checkpoint.pt").exists():
        raise ValueError(f"{run_dir} holds a run: add --resume {run_dir}, or another --run-name.")
    if saved and any(saved["args"].get(name) != getattr(args, name) for name in fixed):
        raise ValueError(f"A resumed run cannot change {', '.join(fixed)}.")
    config = dataclasses.asdict(args)
    if args.track:
        import wandb

        try:
            wandb.init(id=run_dir.name, resume="allow", config=config, sync_tensorboard=True)
        except wandb.Error as error:
            raise ValueError(
                f"Weights & Biases (WANDB_MODE=offline needs none): {error}"
            ) from error
    # What a killed run has logged after its last checkpoint is hidden.
    writer = SummaryWriter(str(run_dir), purge_step=saved.get("global_step", 0) + 1)
    writer.add_text("settings", "  \n".join(f"{name}: {config[name]}" for name in config))
    writer.add_text("details", details(args))
    return run_dir, saved, writer


# Copied from ppo_continuous_action.py
def save_checkpoint(run_dir: Path, args: Args, state: dict[str, Any]) -> None:
    """Write tensors and plain values into a file that is complete or absent, whatever happens."""
    path = run_dir / "checkpoint.pt"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save({"script": SCRIPT, "args": dataclasses.asdict(args), **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# Copied from ppo_continuous_action.py
def load_checkpoint(run_dir: str | Path) -> dict[str, Any]:
    """Read the checkpoint in a folder, running no code; raise ValueError if it is not sound."""
    path = Path(run_dir) / "checkpoint.pt"
    if not path.exists():
        raise ValueError(f"There is no {path}; --checkpoint-interval says how soon one is made.")
    try:
        with zipfile.ZipFile(path) as file:
            sound = file.testzip() is None  # torch.load does not look at the checksums
        content = torch.load(path, map_location="cpu", weights_only=True) if sound else {}
    except Exception:  # whatever a foreign or damaged file can raise
        content = {}
    if not isinstance(content, dict) or content.get("script") != SCRIPT:
        raise ValueError(f"{path} is damaged, or was not made by {SCRIPT}.py.")
    return content


def evaluate(args: Args) -> dict[str, list[float]]:
    """Play whole games with a trained model; print and return their scores."""
    saved = load_checkpoint(args.evaluate)
    names = ("evaluate", "eval_episodes", "capture_video", "seed")
    args = Args(**{**saved["args"], **{name: getattr(args, name) for name in names}})
    results = {}
    for kind in ("greedy", "sampled"):
        env = make_env(args, video=kind if args.capture_video else None)
        num_actions = env.action_space.n.item()
        envs, agent = Environments([env]), Agent(num_actions, args)
        agent.load_state_dict(saved["agent"])
        rng = np.random.default_rng([args.seed, 2**32])  # no iteration of training has this number
        envs.reset(rng)
        state, starts = agent.initial_state(1), torch.ones(1, 1)
        while len(envs.episodes) < args.eval_episodes:
            noise = torch.tensor(rng.gumbel(size=(1, 1, num_actions)) * (kind == "sampled"))
            with torch.no_grad():
                action, *_, state = agent.get_action_and_value(
                    torch.from_numpy(envs.obs)[None], starts, state, noise=noise
                )
            _, terminated, truncated = envs.step(action[0].tolist(), rng)
            starts[:] = float(terminated[0] or truncated[0])
        env.close()
        results[kind] = [episode["return"] for episode in envs.episodes]
        print(f"{kind} action: {np.mean(results[kind]):.1f} ± {np.std(results[kind]):.1f}")
    return results


# Copied from ppo_atari.py
def main() -> None:
    """Read the command line and run; what is wrong with it ends as one sentence and exit code 2."""
    try:
        args = tyro.cli(Args)
        if args.paper:  # its settings, except for flags that are given
            args = tyro.cli(Args, default=Args(**PAPER))
        if args.resume:  # the settings of the run, except for flags that are given
            args = tyro.cli(Args, default=Args(**load_checkpoint(args.resume)["args"]))
        if args.details:
            print(details(args))
        elif args.evaluate:
            evaluate(args)
        else:
            train(args)
    except (ValueError, OSError, ImportError, gym.error.Error) as error:
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        run_dir = Path(args.resume or f"runs/{args.run_name}")
        saved = (run_dir / "checkpoint.pt").exists()
        print(f"Continue with --resume {run_dir}" if saved else "Stopped; nothing is saved yet.")
        sys.exit(130)


if __name__ == "__main__":
    main()
