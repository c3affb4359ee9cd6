"""Simulators with which ppo_vector_env.py is tested, and what they should have computed."""

import functools
import math
import signal
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

# Lengths of episodes and how they end.
ENDS = [(3, "fails"), (2, "is cut off"), (5, "both"), (4, "is cut off"), (1, "fails")]
NUMBERS = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
PARTS = {  # of Dict observations; gym.spaces.Dict sorts them
    "state": gym.spaces.Box(-np.inf, np.inf, (1, 3), np.float64),
    "hidden": gym.spaces.Box(-np.inf, np.inf, (1,), np.float64),
}
COLUMNS = {"state": [0, 1, 2], "hidden": [3]}


class Single(gym.Env):
    """One environment: says which one it is, the episode, the step, and where actions led it."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = gym.spaces.Box(-0.5, 0.5, (2,), np.float32)
    observation_space = NUMBERS

    def __init__(self, number):
        self.number, self.episode = number, -1
        self.taken, self.seeds = [], []

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.episode, self.t, self.place = self.episode + 1, 0, 0.0
        return self.observe(), {}

    def observe(self):
        return np.array([4.0 * self.number, self.episode, self.t, self.place])

    def step(self, action):
        self.taken.append(action.copy())
        self.t += 1
        self.place += float(action[0] - 2 * action[1])
        length, way = ENDS[(self.number + self.episode) % len(ENDS)]
        reward = self.episode + 0.5 * self.t - self.place
        # Two that are so large that they are clipped, in the first iteration and in the second.
        reward += {(0, 3, 1): 1e4, (1, 14, 1): -3e4}.get((self.number, self.episode, self.t), 0)
        failed, cut = (self.t == length and way != x for x in ("is cut off", "fails"))
        return self.observe(), reward, failed, cut, {}

    def render(self):
        return np.full((16, 16, 3), self.t, np.uint8)


class Parts(Single):
    """The same as a dictionary."""

    observation_space = gym.spaces.Dict(PARTS)

    def observe(self):
        x = super().observe()
        return {name: x[COLUMNS[name]].reshape(PARTS[name].shape) for name in PARTS}


class Resetting(SyncVectorEnv):
    """What it says of steps that only begin an episode means nothing."""

    ended = False

    def step(self, actions):
        obs, rewards, failed, cut, infos = super().step(actions)
        rewards = np.where(self.ended, np.nan, rewards)
        self.ended = failed | cut
        return obs, rewards, failed, cut, infos


class Tensors:
    """Simulators on a GPU: tensors, episodes begin in the same step, and no spaces of Gymnasium.

    `way` says how they tell the end of an episode: "dense" gives last observations of all
    environments, "none" does not, as Isaac Lab, and "time_outs" calls all ends failures, and tells
    apart those that are none.
    """

    def __init__(self, way, num_envs):
        self.way, self.envs, self.closed = way, [Single(i) for i in range(num_envs)], False
        bounds = {"low": np.full(2, -0.5), "high": np.full(2, 0.5)}
        self.action_space = SimpleNamespace(dtype="float32", shape=(2,), **bounds)

    def reset(self, seed=None):
        return torch.tensor(np.stack([x.reset(seed=seed)[0] for x in self.envs])), {}

    def step(self, actions):
        assert isinstance(actions, torch.Tensor)
        steps = [env.step(x) for env, x in zip(self.envs, actions.numpy(force=True))]
        last, rewards, failed, cut, _ = (np.array(x) for x in zip(*steps))
        ended = failed | cut
        new = [env.reset()[0] if x else y for env, x, y in zip(self.envs, ended, last)]
        infos = {"final_obs": torch.tensor(last)} if self.way == "dense" else {}
        if self.way == "time_outs":
            infos = {"time_outs": torch.tensor(cut & ~failed)}
            failed, cut = ended.astype(np.int64), np.zeros(len(cut), np.int64)
        return *map(torch.tensor, (np.array(new), rewards, failed, cut)), infos

    def close(self):
        self.closed = True


MODES = ("next", "same", "dict", "dense", "none", "time_outs")
GYMNASIUM = {"next": Single, "same": Single, "dict": Parts, "single": Single, "off": Single}
MODE = {"next": AutoresetMode.NEXT_STEP, "off": AutoresetMode.DISABLED}


def simulator(way, num_envs, kind=None):
    """A simulator that begins episodes in this way."""
    if way not in GYMNASIUM:
        return Tensors(way, num_envs)
    makes = [functools.partial(kind or GYMNASIUM[way], i) for i in range(num_envs)]
    batched = Resetting if way == "next" else SyncVectorEnv
    return batched(makes, autoreset_mode=MODE.get(way, AutoresetMode.SAME_STEP))


# --- Simulators that something is wrong with ---


class Nested(Tensors):
    """As Isaac Lab without `concatenate_terms`."""

    def reset(self, seed=None):
        return {"policy": {"place": super().reset(seed)[0]}}, {}


class Blind(Tensors):
    """It has no sensors."""

    def reset(self, seed=None):
        return super().reset(seed)[0][:, :0], {}


class Four(Tensors):
    """As a wrapper for rsl_rl."""

    def step(self, actions):
        obs, rewards, failed, _, infos = super().step(actions)
        return obs, rewards, failed, infos


class Seedless(Tensors):
    """As rsl_rl's: it was made with the seed."""

    def reset(self):
        return super().reset()


class Choices(Single):
    action_space = gym.spaces.Discrete(3)


class Broken(Single):
    """The fourth one says NaN after 31 steps."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.number == 3 and len(self.taken) == 31:
            reward = obs[1] = math.nan
        return obs, reward, *rest


class Infinite(Broken):
    def step(self, action):
        obs, reward, *rest = Single.step(self, action)
        return obs, reward + (math.inf if len(self.taken) == 31 and self.number == 3 else 0), *rest


class Interrupting(Single):
    """The first one is interrupted in its 60th step, in the third iteration."""

    def step(self, action):
        if self.number == 0 and len(self.taken) == 59:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


# --- What makes them: --make vector_simulators:make_same ---


def maker(make):
    """A function of what the script gives, by one of the number of environments."""
    return lambda num_envs, seed, device: make(num_envs)


make_same = maker(lambda count: simulator("same", count))
make_parts = maker(lambda count: simulator("dict", count))
make_interrupting = maker(lambda count: simulator("same", count, Interrupting))
# And of those that something is wrong with.
make_none = maker(lambda count: None)
make_one = maker(lambda count: Single(0))
make_few = maker(lambda count: simulator("same", 4))
make_off = maker(lambda count: simulator("off", count))
make_choices = maker(lambda count: simulator("same", count, Choices))
make_broken = maker(lambda count: simulator("same", count, Broken))
make_infinite = maker(lambda count: simulator("same", count, Infinite))
make_blind = maker(lambda count: Blind("same", count))
make_nested = maker(lambda count: Nested("none", count))
make_four = maker(lambda count: Four("none", count))
make_seedless = maker(lambda count: Seedless("none", count))


# --- The settings of a run, and the steps of its single environments ---

T, N = 24, 6
TINY = {
    "num_envs": N,
    "num_steps": T,
    "total_timesteps": 3 * T * N,
    "num_minibatches": 6,
    "update_epochs": 2,
    "hidden": (8,),
    "learning_rate": 0.01,
    "max_grad_norm": 5.0,
    "compile": "no",
    "device": "cpu",
    "gamma": 0.9,
}
FLAGS = f"--num-envs {N} --num-steps {T} --num-minibatches 6 --update-epochs 2 --hidden 8 "
FLAGS += "--compile no --device cpu --total-timesteps 432"


class Step(NamedTuple):
    """A step of a single environment."""

    t: int
    i: int
    obs: np.ndarray
    reward: float
    failed: bool
    cut: bool
    last: np.ndarray  # the observation after it, or what stands in for it
    action: np.ndarray
    discounted: float  # sum of the rewards of its episode so far


def numbers(obs, way):
    return np.concatenate([obs["state"][0], obs["hidden"]]) if way == "dict" else obs


def experience(envs, way, gamma):
    """The steps of single environments, each played alone with the actions that it has got."""
    found = []
    for i, env in enumerate(envs):
        own, t, discounted = type(env)(env.number), 0, 0.0
        obs = own.reset()[0]
        for action in env.taken:
            after, reward, failed, cut, _ = own.step(action)
            discounted = gamma * discounted + reward
            unknown = way in ("none", "time_outs") and (cut and not failed)
            last = numbers(obs if unknown else after, way)
            found.append(
                Step(t, i, numbers(obs, way), reward, failed, cut, last, action, discounted)
            )
            t, obs = t + 1, after
            if failed or cut:
                obs, discounted = own.reset()[0], 0.0
                t += way == "next"  # that step only begins the next episode
    return sorted(found, key=lambda x: (x.t, x.i))
