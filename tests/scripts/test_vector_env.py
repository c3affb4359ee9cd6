"""ppo_vector_env.py, next to a loop over single environments that does the same actions."""

import copy
import functools
import inspect
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import filelock
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import curves, gain_of, record, same_weights
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import ppo_vector_env as ppo

# --- Simulators ---

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
        self.number, self.episode, self.taken, self.seeds = number, -1, [], []

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
        rewards = np.where(self.ended, 1e3, rewards)
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


def make_same(num_envs, seed, device):
    return simulator("same", num_envs)


def make_next(num_envs, seed, device):
    return simulator("next", num_envs)


# --- A run, and the same by hand ---

T, N = 24, 6
TINY = {"num_envs": N, "num_steps": T, "total_timesteps": 3 * T * N, "num_minibatches": 6}
TINY |= {"update_epochs": 2, "hidden": (8,), "learning_rate": 0.01, "max_grad_norm": 5.0}
TINY |= {"compile": "no", "device": "cpu", "gamma": 0.9}
FLAGS = f"--num-envs {N} --num-steps {T} --num-minibatches 6 --update-epochs 2 --hidden 8 "
FLAGS += "--compile no --device cpu --total-timesteps 432"


class Update(NamedTuple):
    """A call of `ppo_update`: its arguments, copied, and what it returned."""

    agent: ppo.Agent
    adam: dict
    batch: ppo.Batch
    minibatches: torch.Tensor
    step_size: float
    rows: list
    training: bool


@pytest.fixture
def run(monkeypatch):
    """Train, and note what advantages and updates are computed from."""

    def train(way="same", resume=None, kind=None, make=None, **settings):
        made, advantages, updates, options, training = [], [], [], [], []
        real_gae, real_update, real_normalize = ppo.gae, ppo.ppo_update, ppo.Agent.normalize_obs

        def gae(*inputs):
            advantages.append([*(x.clone() for x in inputs[:4]), real_gae(*inputs)])
            return advantages[-1][-1]

        def update(agent, adam, batch, minibatches, step_size, args):
            before = copy.deepcopy(agent), {x: y.clone() for x, y in adam.items()}
            batch = ppo.Batch(*(x.clone() for x in batch))
            rows = real_update(agent, adam, batch, minibatches, step_size, args)
            rest = minibatches.clone(), step_size.item(), rows, agent.training
            updates.append(Update(*before, batch, *rest))
            return rows

        def normalize_obs(agent, raw_obs):  # is not called by updates
            training.append(agent.training)
            return real_normalize(agent, raw_obs)

        def make_it(*given):
            options.append(given)
            made.append((make or simulator)(way, given[0], *([kind] if kind else [])))
            return made[-1]

        args = ppo.Args(**{**TINY, **settings}) if settings or not resume else None
        with monkeypatch.context() as patch:
            patch.setattr(ppo, "gae", gae)
            patch.setattr(ppo, "ppo_update", update)
            patch.setattr(ppo.Agent, "normalize_obs", normalize_obs)
            result = ppo.train(args, make_it, resume)
        seen = {
            "envs": made[0].envs,
            "options": options,
            "closed": made[0].closed,
            "training": training,
        }
        return SimpleNamespace(**result, **seen, advantages=advantages, calls=updates)

    return train


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


class Looked(NamedTuple):
    """What one iteration should have computed, by hand; NaN where a step is no experience."""

    steps: list[Step]
    obs: np.ndarray  # (T, N, D), normalized
    values: np.ndarray  # (T, N)
    advantages: np.ndarray
    logprobs: np.ndarray


def columns(args, role):
    chosen = getattr(args, role) or ("hidden", "state")
    return [i for name in chosen for i in COLUMNS[name]]


def by_hand(run, way):
    """The iterations of a run, as a loop over single environments computes them."""
    args, iterations = run.args, run.args.total_timesteps // (T * N)
    steps = experience(run.envs, way, args.gamma)
    seen, sums = np.empty((0, 4)), []
    for k in range(int(iterations)):
        first = run.calls[len(run.calls) // len(run.advantages) * k]
        agent = copy.deepcopy(first.agent).double()
        own = [x for x in steps if x.t // T == k]
        mean, var = (seen.mean(0), seen.var(0)) if len(seen) else (0.0, 1.0)
        sums += [x.discounted for x in own]
        scale = np.std(sums) if args.scale_rewards else 1.0
        limit = 10 if args.scale_rewards else math.inf

        def ask(network, numbers, role, mean=mean, var=var):
            x = np.clip((np.stack(numbers) - mean) / np.sqrt(var + 1e-8), -10, 10)
            picked = columns(args, role) if way == "dict" else slice(None)
            return x, network(torch.tensor(x)[:, picked]).detach().numpy()

        at = tuple(np.array([(x.t - k * T, x.i) for x in own]).T)
        actions = first.batch.actions.view(T, N, 2).double().numpy()
        obs = np.full((T, N, 4), math.nan)
        values, next_values, advantages, logprobs = np.full((4, T, N), math.nan)
        obs[at], value = ask(agent.value, [x.obs for x in own], "value_obs")
        values[at] = value[:, 0]
        next_values[at] = ask(agent.value, [x.last for x in own], "value_obs")[1][:, 0]
        means = ask(agent.policy, [x.obs for x in own], "policy_obs")[1]
        std = agent.log_std.exp().detach().numpy()
        z = (actions[at] - means) / std
        logprobs[at] = (-0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(1)
        for i in range(N):
            later = 0.0
            for x in reversed([x for x in own if x.i == i]):
                here, ended = (x.t - k * T, i), x.failed or x.cut
                future = 0.0 if x.failed else next_values[here]
                reward = np.clip(x.reward / scale, -limit, limit)
                delta = reward + args.gamma * future - values[here]
                later = delta + args.gamma * args.gae_lambda * (1 - ended) * later
                advantages[here] = later
        yield Looked(own, obs, values, advantages, logprobs)
        seen = np.concatenate([seen, [x.obs for x in own]])


def assert_close(found, expected, tolerance=1e-3):
    """Where there is an expectation."""
    found = np.asarray(found, dtype=np.float64).reshape(np.shape(expected))
    where = np.isfinite(expected)
    assert where.any()
    np.testing.assert_allclose(found[where], expected[where], rtol=tolerance, atol=tolerance)


SEES = {"policy_obs": ("state",), "value_obs": ("state", "hidden")}  # in another order
WAYS = [*((x, {}) for x in MODES), ("dict", SEES), ("same", {"scale_rewards": False})]


@pytest.mark.parametrize(("way", "settings"), WAYS)
def test_it_learns_what_a_loop_over_single_environments_would(run, way, settings):
    found = run(way, **settings)
    assert len(found.advantages) == 3 and found.closed
    calls = iter(found.calls)
    layout = [3, 0, 1, 2] if way == "dict" else [0, 1, 2, 3]
    for k, hand in enumerate(by_hand(found, way)):
        _, _, _, done, advantages = found.advantages[k]
        assert_close(advantages, hand.advantages)
        assert [(x.t - k * T, x.i) for x in hand.steps if x.failed or x.cut] == [
            *map(tuple, done.nonzero().tolist())
        ]
        own = [next(calls) for _ in range(4)]  # 2 epochs of 6 minibatches: 4 and 2
        batch = own[0].batch
        assert_close(batch.obs, hand.obs[..., layout])
        assert_close(batch.values, hand.values)
        assert_close(batch.advantages, hand.advantages)
        assert_close(batch.returns, hand.advantages + hand.values)
        assert_close(batch.logprobs, hand.logprobs)
        real = [(x.t - k * T) * N + x.i for x in hand.steps]
        taken = np.clip(batch.actions[real].numpy(), -0.5, 0.5)
        assert_close(taken, np.stack([x.action for x in hand.steps]), 1e-6)
        assert (np.abs(taken) == 0.5).any() and (batch.actions.abs() > 0.5).any()
        assert np.abs(hand.obs[np.isfinite(hand.obs)]).max() > (9.9 if k == 0 else 1)
        orders = []
        for x, y in zip(own[::2], own[1::2]):
            assert x.minibatches.shape == (4, T * N // 6) and y.minibatches.shape == (2, T * N // 6)
            orders.append(torch.cat([x.minibatches, y.minibatches]).flatten().tolist())
            times = np.bincount(orders[-1], minlength=T * N)
            # Each step that is experience, and some of them again in place of those that are none.
            assert set(np.flatnonzero(times)) == set(real) and np.ptp(times[real]) <= 1
            assert (way == "next") == (len(real) < T * N)
        assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
        assert all(x.training for x in own)  # dropout and the like
        assert [x.adam["step"].item() for x in own] == [12 * k + y for y in (0, 4, 6, 10)]
    assert next(calls, None) is None and {*found.training} == {False}


@pytest.mark.parametrize("way", ["next", "dense"])
def test_episodes_and_statistics_are_those_of_the_single_environments(run, way):
    found = run(way)
    steps = experience(found.envs, way, found.args.gamma)
    expected, running = [], dict.fromkeys(range(N), (0.0, 0))
    for x in steps:
        total, length = running[x.i]
        running[x.i] = total + x.reward, length + 1
        if x.failed or x.cut:
            expected.append((N * (x.t + 1), pytest.approx(running[x.i][0], rel=1e-4), length + 1))
            running[x.i] = 0.0, 0
    assert [(x["global_step"], x["return"], x["length"]) for x in found.episodes] == expected
    agent, obs, sums = found.agent, [x.obs for x in steps], [x.discounted for x in steps]
    np.testing.assert_allclose(agent.obs_stats.mean, np.mean(obs, 0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(agent.obs_stats.var, np.var(obs, 0), rtol=1e-3)
    np.testing.assert_allclose(agent.return_stats.var, np.var(sums), rtol=1e-3)
    assert agent.obs_stats.count == agent.return_stats.count
    assert agent.obs_stats.count.item() == pytest.approx(len(steps), abs=0.01)


def test_metrics_are_those_of_the_experience(run, monkeypatch):
    clock = iter(range(100))
    times = SimpleNamespace(perf_counter=lambda: next(clock) ** 2, time_ns=lambda: 5)
    monkeypatch.setattr(ppo, "time", times)
    found = run("next", total_timesteps=2 * T * N)
    for k, (metrics, hand) in enumerate(zip(found.updates, by_hand(found, "next"), strict=True)):
        own = found.calls[4 * k : 4 * k + 4]
        rows = [row for x in own for row in x.rows]
        assert len(rows) == 12 and metrics.keys() - rows[0].keys() == {
            *("global_step", "losses/explained_variance", "check/target_std", "check/update"),
            *("check/first_kl", "check/kl", "charts/SPS", "charts/learning_rate"),
            *("charts/episodic_return", "charts/episodic_length", "charts/episodes"),
            "charts/action_std",
        }
        for name in rows[0]:
            assert metrics[name] == pytest.approx(np.mean([x[name].item() for x in rows]), rel=1e-4)
        real = np.isfinite(hand.advantages)
        advantages, values = hand.advantages[real], hand.values[real]
        explained = 1 - advantages.var(ddof=1) / (advantages + values).var(ddof=1)
        assert metrics["losses/explained_variance"] == pytest.approx(explained, abs=1e-3)
        std = (advantages + values).std(ddof=1)
        assert metrics["check/target_std"] == pytest.approx(std, rel=1e-3)
        after = found.calls[4].agent if k == 0 else found.agent
        samples = ppo.Batch(*(x[torch.tensor(real.flatten())] for x in own[0].batch))
        with torch.no_grad():
            new, _ = after.evaluate_actions(samples.obs, samples.actions)
        change = (new - samples.logprobs).double().numpy()
        expected = np.corrcoef(change, advantages)[0, 1]
        assert metrics["check/update"] == pytest.approx(expected, abs=1e-3)
        kl = (np.exp(change) - 1 - change).mean()
        assert metrics["check/kl"] == pytest.approx(kl, rel=1e-2) and kl > 1e-5
        assert metrics["check/first_kl"] == pytest.approx(rows[0]["losses/approx_kl"].item())
        assert metrics["check/first_kl"] == pytest.approx(0, abs=1e-6)
        std = after.log_std.exp().mean().item()
        assert metrics["charts/action_std"] == pytest.approx(std) != ppo.Args().init_std
        first, last = k * T * N, (k + 1) * T * N
        ended = [x for x in found.episodes if first < x["global_step"] <= last]
        assert metrics["charts/episodes"] == len(ended) > 0
        for name in ("return", "length"):
            mean = np.mean([x[name] for x in ended])
            assert metrics[f"charts/episodic_{name}"] == pytest.approx(mean)
        assert metrics["global_step"] == (k + 1) * T * N
        assert metrics["charts/SPS"] == pytest.approx(T * N / (4 * k + 1))


def test_noise_is_drawn_for_each_action_and_repeats_with_the_seed(run):
    torch.manual_seed(5)
    two = {"total_timesteps": 2 * T * N}
    found, again, other = run(**two), run(**two), run(**two, seed=2)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(1), expected)  # a run leaves this stream as it was
    assert same_weights(found.agent, again.agent) and not same_weights(found.agent, other.agent)
    assert found.episodes == again.episodes != other.episodes
    assert found.updates[0]["losses/entropy"] == again.updates[0]["losses/entropy"]
    (options,), (different,) = found.options, other.options
    assert options[0] == N and options[2] == torch.device("cpu") and options[1] != different[1]
    assert [x.seeds[0] for x in found.envs] == [options[1] + i for i in range(N)]
    weights = [x.calls[0].agent.value[0].weight for x in (found, other)]
    assert not torch.equal(*weights)
    noises = []
    for x in found.calls[::4]:
        mean = x.agent.get_mean(x.batch.obs).detach()
        noises.append((x.batch.actions - mean) / x.agent.log_std.exp().detach())
    noise = torch.cat(noises)
    assert len(noise.unique()) == noise.numel()
    assert noise.mean().abs() < 0.15 and 0.9 < noise.std() < 1.1
    # The first are the next numbers of the stream that the seed gives.
    _, seed = np.random.default_rng([1, 0, 0]).integers(2**31, size=2).tolist()
    drawn = torch.randn(T, N, 2, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(noises[0], drawn.flatten(0, 1), rtol=0, atol=1e-5)


def test_the_step_size_is_annealed_or_follows_the_kl(run, monkeypatch):
    sizes = [x.step_size for x in run(total_timesteps=4 * T * N).calls]
    assert sizes == pytest.approx([0.01] * 4 + [0.0075] * 4 + [0.005] * 4 + [0.0025] * 4)
    asked = record(monkeypatch, ppo, "adapted")
    found = run(target_kl=0.02)
    assert asked == [
        (x["charts/learning_rate"], x["check/kl"], 0.02, y[-1])
        for x, y in zip(found.updates, asked, strict=True)
    ]
    expected = [0.01, asked[0][-1], asked[1][-1]]
    assert [x["charts/learning_rate"] for x in found.updates] == expected
    assert [x.step_size for x in found.calls[::4]] == pytest.approx(expected)
    assert asked[0][-1] != 0.01


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [
        *((1e-3, 0.021, 1e-3 / 1.5), (1e-3, 0.0199, 1e-3), (1e-3, 0.0051, 1e-3)),
        *((1e-3, 0.0049, 1.5e-3), (1.2e-5, 1.0, 1e-5), (9e-3, 0.0, 1e-2)),
        *((1e-6, 1.0, 1e-6), (0.05, 0.0, 0.05)),  # outside of the bounds
    ],
)
def test_a_large_kl_makes_steps_smaller_and_a_small_one_larger(rate, kl, expected):
    assert ppo.adapted(rate, kl, 0.01) == pytest.approx(expected)


# --- The formulas ---


def random_tensors(*shape, count=1):
    generator = torch.Generator().manual_seed(sum(shape))
    found = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return found if count > 1 else found[0]


def test_gae_is_the_sum_of_all_td_errors_until_the_end():
    rewards, values, next_values, chance = random_tensors(9, 4, count=4)
    done = chance > 0.7
    args = ppo.Args(gamma=0.9, gae_lambda=0.8)
    found = ppo.gae(rewards, values, next_values, done, args)
    delta = (rewards + 0.9 * next_values - values).numpy()
    for t, i in np.ndindex(9, 4):
        end = next((k for k in range(t, 9) if done[k, i]), 8)
        expected = sum((0.9 * 0.8) ** (k - t) * delta[k, i] for k in range(t, end + 1))
        assert found[t, i].item() == pytest.approx(expected)
    assert 3 < done.sum() < 20


LAYOUT = {"parts": {"obs": 3}, "low": [-1.0, -2.0], "high": [1.0, 2.0]}


@pytest.fixture
def agent():
    """A small one whose numbers are all different, in double precision."""
    torch.manual_seed(3)
    agent = ppo.Agent(LAYOUT, ppo.Args(hidden=(5,))).double()
    with torch.no_grad():
        for x in agent.parameters():
            x += 0.3 * torch.randn_like(x)
    return agent


@pytest.fixture
def samples(agent):
    """A minibatch of which some ratios and values are clipped."""
    obs, actions = random_tensors(40, 3), random_tensors(40, 2)
    noise, values, advantages = random_tensors(40, count=3)
    with torch.no_grad():
        logprobs = agent.evaluate_actions(obs, actions)[0] + 0.3 * noise
        values = agent.get_value(obs) + 0.3 * values
    returns = values + random_tensors(40, count=5)[4]
    return ppo.Batch(obs, actions, logprobs, values, 3 + 2 * advantages, returns)


@pytest.mark.parametrize(("clip_vloss", "scale"), [(True, 1), (False, 1), (True, 1e-8)])
def test_the_loss_is_that_of_the_paper(agent, samples, clip_vloss, scale):
    samples = samples._replace(advantages=scale * samples.advantages)
    args = ppo.Args(clip_vloss=clip_vloss, clip_coef=0.1, ent_coef=0.7, vf_coef=0.3)
    loss, metrics = ppo.ppo_loss(agent, samples, args)
    x = SimpleNamespace(**{name: y.numpy() for name, y in samples._asdict().items()})
    with torch.no_grad():
        mean, value = (y(samples.obs).numpy() for y in (agent.policy, agent.value))
    std = agent.log_std.detach().exp().numpy()
    z = (x.actions - mean) / std
    logprobs = (-0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(1)
    ratio = np.exp(logprobs - x.logprobs)
    advantages = (x.advantages - x.advantages.mean()) / (x.advantages.std() + 1e-8)
    objective = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    errors = (value[:, 0] - x.returns) ** 2
    clipped = x.values + np.clip(value[:, 0] - x.values, -0.1, 0.1)
    if clip_vloss:
        errors = np.maximum(errors, (clipped - x.returns) ** 2)
    entropy = (np.log(std) + 0.5 * np.log(2 * np.pi * np.e)).sum()
    expected = {
        "losses/policy_loss": -objective.mean(),
        "losses/value_loss": 0.5 * errors.mean(),
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "losses/clipfrac": (np.abs(ratio - 1) > 0.1).mean(),
    }
    assert {name: y.item() for name, y in metrics.items()} == pytest.approx(expected, rel=1e-5)
    assert (
        not any(y.requires_grad for y in metrics.values())
        and 0.2 < expected["losses/clipfrac"] < 0.9
    )
    parts = [expected[f"losses/{name}"] for name in ("policy_loss", "entropy", "value_loss")]
    assert loss.item() == pytest.approx(np.dot(parts, [1, -0.7, 0.3]), rel=1e-5)


def test_an_update_takes_the_steps_of_adam(agent, samples):
    """With ppo2's epsilon, which is added before the bias correction."""
    args = ppo.Args(max_grad_norm=1.0)
    other = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01, betas=(0.9, 0.999))
    minibatches = torch.arange(40).view(5, 8).repeat(2, 1)
    norms = []
    for step, chosen in enumerate(minibatches, start=1):
        loss, _ = ppo.ppo_loss(other, ppo.Batch(*(x[chosen] for x in samples)), args)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).item())
        optimizer.param_groups[0]["eps"] = 1e-5 / math.sqrt(1 - 0.999**step)
        optimizer.step()
    assert min(norms) < 1 < max(norms)
    weights = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
    adam = {"weights": weights, "mean": weights * 0, "square": weights * 0}
    adam["step"] = torch.zeros((), dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(weights, agent.parameters())
    size = torch.tensor(0.01, dtype=torch.float64)
    rows = ppo.ppo_update(agent, adam, samples, minibatches, size, args)
    for x, y in zip(agent.parameters(), other.parameters()):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert [x["losses/grad_norm"].item() for x in rows] == pytest.approx(norms, rel=1e-4)
    assert adam["step"] == 10 and rows[0].keys() == {
        *(f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "approx_kl")),
        *("losses/clipfrac", "losses/grad_norm"),
    }


def test_a_normalizer_has_the_mean_and_the_variance_of_all_rows():
    rows = random_tensors(60, 3) * torch.tensor([1.0, 1e-2, 30.0]) + torch.tensor([50.0, 0, -9])
    normalizer, single = ppo.Normalizer(3), ppo.Normalizer()
    for part in rows.float().split([1, 40, 19]):
        normalizer.update(part)
        single.update(part[:, 0])
    # And, as in ppo2, of a ten-thousandth of a row with mean 0 and variance 1.
    mean = rows.sum(0) / 60.0001
    np.testing.assert_allclose(normalizer.mean, mean, rtol=1e-4)
    var = (1e-4 + (rows**2).sum(0)) / 60.0001 - mean**2
    np.testing.assert_allclose(normalizer.var, var, rtol=1e-3)
    assert normalizer.count.item() == single.count.item() == pytest.approx(60, abs=0.01)
    assert single.var.item() == pytest.approx(normalizer.var[0].item())
    assert {*normalizer.state_dict()} == {"mean", "var", "count"}


def test_layers_are_orthogonal_and_a_new_policy_almost_ignores_what_it_sees():
    torch.manual_seed(1)
    agent = ppo.Agent(LAYOUT, ppo.Args(hidden=(8, 6), init_std=0.5))
    for network, size, gain in ((agent.policy, 2, 0.01), (agent.value, 1, 1.0)):
        kinds = [type(x) for x in network]
        assert kinds == [torch.nn.Linear, torch.nn.Tanh] * 2 + [torch.nn.Linear]
        assert [x.weight.shape for x in network[::2]] == [(8, 3), (6, 8), (size, 6)]
        gains = [gain_of(x) for x in network[::2]]
        assert gains == pytest.approx([2**0.5, 2**0.5, gain], abs=1e-4)
        assert all((x.bias == 0).all() for x in network[::2])
    assert agent.log_std.tolist() == pytest.approx([math.log(0.5)] * 2)
    assert agent.log_std.requires_grad and len([*agent.parameters()]) == 13
    elu = ppo.network(3, 2, 1.0, ppo.Args(activation="elu", hidden=(4,)))
    assert [type(x) for x in elu[1::2]] == [torch.nn.ELU]


def test_a_policy_takes_raw_observations_and_returns_its_means_within_bounds(agent):
    agent = agent.float()
    torch.nn.init.constant_(agent.policy[-1].bias, 0.9)
    agent.obs_stats.update(3 + 2 * torch.randn(50, 3))
    agent.obs_stats.var[0] = 0  # always the same number
    raw_obs = torch.randn(4, 3) * 40
    obs = (raw_obs - agent.obs_stats.mean) / (agent.obs_stats.var + 1e-8).sqrt()
    means = agent.policy(obs.clamp(-10, 10))
    expected = torch.max(torch.min(means, agent.high), agent.low)
    torch.testing.assert_close(agent(raw_obs), expected)
    assert (means != expected).any() and (obs.abs() > 10).any()
    assert agent.low.tolist() == [-1, -2] and agent.high.tolist() == [1, 2]


def test_parts_that_are_not_there_are_refused():
    layout = {**LAYOUT, "parts": {"state": 2, "hidden": 1}}
    for role in ("policy_obs", "value_obs"):
        args = ppo.Args(**{role: ("state", "stat")})
        with pytest.raises(ppo.UsageError, match=r"obs \(state stat\) must be among state, hidden"):
            ppo.Agent(layout, args)
    agent = ppo.Agent(layout, ppo.Args(policy_obs=("hidden",), value_obs=("hidden", "state")))
    assert agent.policy_obs.tolist() == [2] and agent.value_obs.tolist() == [2, 0, 1]


# --- The simulator ---


def test_gymnasium_makes_environments_whose_resets_are_marked(monkeypatch):
    """And EnvPool, in the same way."""
    for backend, env_id in (("gymnasium", "Pendulum-v1"), ("envpool", "Hopper-v4")):
        args = ppo.Args(backend=backend, env_id=env_id, num_envs=2)
        with ppo.ExitStack() as resources:
            sim = ppo.make_simulator(resources, args, 2, 5)
            ended, resets = torch.zeros(2).bool(), 0
            assert sim.obs.shape == (2, sum(sim.layout["parts"].values()))
            assert len(sim.layout["low"]) == len(sim.layout["high"]) == sim.space.shape[0]
            actions = torch.ones(2, *sim.space.shape)
            for _ in range(210):
                assert torch.equal(sim.acts, ~ended)
                last, rewards, failed, cut = sim.step(actions)
                assert torch.equal(sim.obs, last) and last.dtype == rewards.dtype == torch.float32
                assert (rewards[ended] == 0).all() and not (failed | cut)[ended].any()
                resets += int(ended.sum())
                ended = failed | cut
            assert resets > 1 and sim.next_step


def test_envpool_trains(monkeypatch):
    size = {"num_envs": 2, "num_steps": 60, "total_timesteps": 240, "env_id": "Hopper-v4"}
    args = ppo.Args(**TINY | size)
    advantages = record(monkeypatch, ppo, "gae")
    updates = record(monkeypatch, ppo, "ppo_update")
    found = ppo.train(args)
    for k, (scaled, _, _, done, _, _) in enumerate(advantages):
        after = done[:-1]  # those with which an episode ended: the next only begin one
        assert after.any() and (scaled[1:][after] == 0).all()
        used = torch.cat([x[3].flatten() for x in updates[4 * k : 4 * k + 4]])
        assert not after.flatten()[used[used >= 2] - 2].any()
    assert len(found["episodes"]) == sum(int(x[3].sum()) for x in advantages)
    assert Path(found["run_dir"]).name.startswith("Hopper-v4__ppo_vector_env__1__")


def make_none(num_envs, seed, device):
    return None


def make_one(num_envs, seed, device):
    return Single(0)


def make_few(num_envs, seed, device):
    return simulator("same", 4)


class Nested(Tensors):
    """As Isaac Lab without `concatenate_terms`."""

    def reset(self, seed=None):
        return {"policy": {"place": super().reset(seed)[0]}}, {}


class Four(Tensors):
    """As a wrapper for rsl_rl."""

    def step(self, actions):
        obs, rewards, failed, _, infos = super().step(actions)
        return obs, rewards, failed, infos


def make_nested(num_envs, seed, device):
    return Nested("none", num_envs)


def make_four(num_envs, seed, device):
    return Four("none", num_envs)


class Seedless(Tensors):
    """As rsl_rl's: it was made with the seed."""

    def reset(self):
        return super().reset()


def make_seedless(num_envs, seed, device):
    return Seedless("none", num_envs)


def make_off(num_envs, seed, device):
    return simulator("off", num_envs)


def make_parts(num_envs, seed, device):
    return simulator("dict", num_envs)


class Choices(Single):
    action_space = gym.spaces.Discrete(3)


def make_choices(num_envs, seed, device):
    return simulator("same", num_envs, Choices)


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


def make_broken(num_envs, seed, device):
    return simulator("same", num_envs, Broken)


def make_infinite(num_envs, seed, device):
    return simulator("same", num_envs, Infinite)


@pytest.fixture
def cli(outcome):
    """Run the script with a command line; returns exit code, stdout, stderr."""
    return lambda line: outcome(ppo.main, f"{FLAGS} {line}", "ppo_vector_env.py")


HERE = "--make test_vector_env:make_"
REFUSED = [
    ("--gamma 1.5", "--gamma (1.5) must be from 0 to 1."),
    ("--learning-rate nan", "--learning-rate (nan) must be from 0 to inf."),
    ("--num-epochs 5", "num-epochs"),
    ("--init-std 0", "--init-std (0.0) must be from 1e-06 to inf."),
    ("--seed -1", "--seed (-1) must be from 0 to"),
    (f"--seed {2**63}", f"--seed ({2**63}) must be from 0 to {2**63 - 1}."),
    ("--num-envs 0", "--num-envs (0) must be from 1 to inf."),
    ("--hidden 8 0", "--hidden (8, 0) must be positive."),
    ("--num-minibatches 7", "--num-steps * --num-envs (144) must be 2, 3, 4... times"),
    ("--num-minibatches 144", "--num-steps * --num-envs (144) must be 2, 3, 4... times"),
    ("--total-timesteps 143", "--total-timesteps must be finite, and at least 144,"),
    ("--total-timesteps inf", "--total-timesteps must be finite"),
    ("--device cuda", "--device cuda needs a GPU"),
    ("--make nowhere:make", "nowhere:make: No module named 'nowhere'"),
    (HERE + "nothing", "test_vector_env has no function make_nothing: is it MODULE:FUNCTION?"),
    (HERE + "none", "make_none): a NoneType lacks some of reset, step, close"),
    (HERE + "nested", "Observations policy have parts themselves: concatenate them."),
    (HERE + "four", "step must return obs, rewards, terminated, truncated and infos."),
    (HERE + "seedless", "make_seedless): reset(seed=...) has got an unexpected keyword argument"),
    (HERE + "one", "obs has shape (4,): it must have a row for each of 6."),
    (HERE + "few", "obs has shape (4, 4): it must have a row for each of 6."),
    ("--make json", "json is no function: is it MODULE:FUNCTION?"),
    (HERE + "off", "change autoreset_mode"),
    (HERE + "choices", "try recipes/discrete_actions.py, ppo_multidiscrete.py or ppo_atari.py"),
    (HERE + "broken", "Step 31 of environment 3: observation or reward is not finite."),
    (HERE + "infinite", "Step 31 of environment 3: observation or reward is not finite."),
    (HERE + "same --value-obs state", "--value-obs (state) must be among obs."),
    (HERE + "same --lr 1e30", "Not finite at step 144: losses/"),
    ("--backend gymnasium --env-id Nowhere-v0", "Nowhere"),
    ("--backend gymnasium --env-id CartPole-v1", "try recipes/discrete_actions.py"),
    ("--env-id Nowhere-v0", "--env-id"),
    ("--capture-video", "--capture-video films an evaluation: add --evaluate FOLDER."),
    ("--resume nowhere", "nowhere/checkpoint.pt is missing, damaged or from another script"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED)
def test_what_cannot_work_gets_a_sentence_and_exit_code_2(cli, line, sentence):
    code, _, error = cli(line)
    assert code == 2 and sentence in " ".join(error.split()), error


def simulator_of(envs, num_envs=2):
    return ppo.Simulator(envs, envs.action_space, num_envs, 1, torch.device("cpu"))


def test_time_outs_of_an_earlier_step_end_nothing():
    envs = Tensors("none", 2)
    sim = simulator_of(envs)
    last, ends = torch.zeros(2, 4), torch.tensor([True, False])
    said = last, torch.zeros(2), ends, torch.zeros(2).bool(), {"time_outs": torch.ones(2)}
    envs.step = lambda _: said
    *_, terminated, truncated = sim.step(torch.zeros(2, 2))
    assert truncated.tolist() == [True, False] and not terminated.any()


class Keyed:
    """Observations as a TensorDict: rows are what one iterates over."""

    def __init__(self, parts):
        self.parts = parts

    def keys(self):
        return self.parts.keys()

    def __iter__(self):
        raise AssertionError

    def __getitem__(self, name):
        return self.parts[name]


def test_parts_may_come_in_a_tensordict():
    envs = Tensors("none", 2)
    parts = {"b": torch.ones(2, 3), "a": torch.zeros(2, 1)}
    envs.reset = lambda seed: (Keyed(parts), {})
    sim = simulator_of(envs)
    assert sim.obs.tolist() == [[1, 1, 1, 0]] * 2
    assert sim.layout["parts"] == {"b": 3, "a": 1}
    reverse = Keyed(dict(reversed(parts.items())))  # in a run, the order stays
    assert sim.tensor(reverse, 2).tolist() == [[1, 1, 1, 0]] * 2


def test_a_wrapper_of_gymnasium_hides_no_space_of_actions():
    class Robots(gym.Env):  # as Isaac Lab's
        single_action_space = gym.spaces.Box(-1, 1, (2,))
        action_space = gym.spaces.Box(-1, 1, (64, 2))

        def reset(self, seed=None, options=None):
            return torch.zeros(64, 3), {}

    with ppo.ExitStack() as resources:
        make = lambda *_: gym.wrappers.TimeLimit(Robots(), 9)  # noqa: E731
        assert ppo.make_simulator(resources, ppo.Args(), 64, 1, make).space.shape == (2,)
        make = lambda *_: SyncVectorEnv([lambda: Single(0)] * 3)  # noqa: E731
        assert ppo.make_simulator(resources, ppo.Args(), 3, 1, make).space.shape == (2,)


# --- A run from the outside ---


def test_a_missing_envpool_is_named_with_what_installs_it(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    code, _, error = cli("")
    assert code == 2 and "(pip install envpool==1.2.5, or --backend gymnasium)" in error


@pytest.fixture
def trained(cli):
    """A finished run of three iterations, of which only the last is saved, and the beginning."""
    code, out, error = cli(f"{HERE}same --run-name done")
    assert code == 0 and "Next: --evaluate runs/done, or tensorboard" in out and "return" in error
    return Path("runs/done")


def test_what_is_logged_and_that_the_benchmark_reads_it(trained, cli, command, monkeypatch):
    from benchmark.lab import check, logs, plots

    saved = ppo.load_checkpoint(trained)
    shown = curves(trained)
    steps = [x["global_step"] for x in saved["updates"]]
    assert steps == [T * N, 2 * T * N, 3 * T * N]
    for name in saved["updates"][0].keys() - {"charts/SPS"}:
        expected = [(x["global_step"], pytest.approx(x[name])) for x in saved["updates"]]
        assert shown[name] == expected, name
    for k, (step, value) in enumerate(shown["charts/episodic_return"]):
        own = [x for x in saved["episodes"] if k * T * N < x["global_step"] <= (k + 1) * T * N]
        assert step == steps[k] and value == pytest.approx(np.mean([x["return"] for x in own]))
        length = shown["charts/episodic_length"][k]
        assert length == (step, pytest.approx(np.mean([x["length"] for x in own])))
    judged = {*check.metrics_of(check.ENVIRONMENTS)}
    assert judged - shown.keys() == {"check/value_bias", "check/acting"}
    (log,) = logs.find(trained)
    assert log.path == trained
    monkeypatch.setattr(plots, "try_to_save", lambda *_: "x.png")  # which takes seconds
    code, text = command("check", trained)
    assert code == 0 and "losses/approx_kl" in text and "not logged" in text.lower(), text
    assert cli(f"{HERE}same --run-name other --seed 2")[0] == 0
    code, text = command("compare", trained, "runs/other")
    assert code == 0 and "done" in text and "other" in text, text


def test_a_finished_run_is_not_overwritten_and_there_is_nothing_left_to_do(trained, cli):
    code, _, error = cli(f"{HERE}same --run-name done")
    assert code == 2 and "change --run-name, or --resume it." in error
    before = (trained / "checkpoint.pt").read_bytes()
    code, out, _ = cli(f"--resume {trained}")
    assert code == 0 and "new episodes begin" in out
    assert (trained / "checkpoint.pt").read_bytes() == before
    code, _, error = cli(f"--resume {trained} {HERE}parts")
    assert code == 2 and "runs/done was trained in a simulator with other spaces." in error
    code, _, error = cli(f"--evaluate {trained} {HERE}parts")
    assert code == 2 and "simulator with other spaces" in error
    assert "Step 432 was the last one: raise --total-timesteps to train on." in out


@pytest.mark.parametrize(
    "flag",
    ["--hidden 8 8", "--activation elu", "--init-std 1", "--policy-obs obs", "--value-obs obs"],
)
def test_a_run_that_is_continued_keeps_its_agent(trained, cli, flag):
    before = (trained / "checkpoint.pt").read_bytes()
    for use in ("--resume", "--evaluate"):
        code, _, error = cli(f"{use} {trained} --total-timesteps 864 {flag}")
        assert code == 2 and f"{flag.split()[0]} is that of runs/done" in error, error
    assert (trained / "checkpoint.pt").read_bytes() == before


def test_parts_in_another_order_are_other_spaces():
    args = ppo.Args()
    layouts = ({"parts": x, "low": [], "high": []} for x in ({"a": 1, "b": 1}, {"b": 1, "a": 1}))
    first, second = (SimpleNamespace(layout=x) for x in layouts)
    saved = {"layout": first.layout, "args": args, "run_dir": "runs/x"}
    ppo.check_saved(first, args, saved)
    with pytest.raises(ppo.UsageError, match="other spaces"):
        ppo.check_saved(second, args, saved)


def test_random_numbers_of_a_gpu_are_those_of_the_simulator(run, monkeypatch):
    """They are seeded before it is made, and an agent that is made later leaves them alone."""
    seeds = record(monkeypatch, torch.cuda, "manual_seed_all")
    before = []

    def make(way, num_envs):
        before.append(len(seeds))
        return simulator(way, num_envs)

    found = run(total_timesteps=T * N, make=make)
    assert before == [1] and seeds == [(found.options[0][1], None)]


def test_a_new_step_size_counts_for_a_run_whose_step_size_the_kl_has_changed(run):
    found = run(total_timesteps=T * N, target_kl=1e-4)
    assert found.updates[0]["charts/learning_rate"] == 0.01
    same = {"total_timesteps": 2 * T * N, "target_kl": 1e-4}
    changed = run(resume=found.run_dir, **same, learning_rate=0.02)
    assert changed.updates[1]["charts/learning_rate"] == 0.02


def test_a_step_size_that_has_been_annealed_is_not_where_the_kl_begins(run):
    found = run(total_timesteps=3 * T * N)
    assert found.updates[-1]["charts/learning_rate"] < 0.004
    changed = run(resume=found.run_dir, total_timesteps=4 * T * N, target_kl=1e-4)
    assert changed.updates[-1]["charts/learning_rate"] == 0.01


def test_a_run_that_is_continued_stays_in_its_folder(trained, cli):
    code, _, error = cli(f"--resume {trained} --total-timesteps 864 --run-name other")
    assert code == 2 and "--run-name: a run stays in its folder, runs/done." in error


def test_whether_a_step_was_the_last_one_depends_on_the_iterations_that_are_left(run, capsys):
    found = run(total_timesteps=T * N)
    for total, last in ((2 * T * N - 1, True), (2 * T * N, False)):
        capsys.readouterr()
        run(resume=found.run_dir, total_timesteps=total)
        assert ("was the last one" in capsys.readouterr().out) == last
    less = {"total_timesteps": 3 * T * N - 10, "num_envs": 4}  # an iteration is smaller now
    assert run(resume=found.run_dir, **less).updates[-1]["global_step"] > 2 * T * N
    assert "was the last one" not in capsys.readouterr().out


def test_what_makes_a_simulator_may_be_a_partial_function(tmp_path):
    args = ppo.Args(**TINY | {"total_timesteps": T * N})
    make = functools.partial(make_same, seed=3, device="cpu")
    found = ppo.train(args, lambda num_envs, *_: make(num_envs))
    assert "-lambda-__" in found["run_dir"].name
    found = ppo.train(args, functools.partial(lambda kind, *x: make(x[0]), 1))
    name = test_what_makes_a_simulator_may_be_a_partial_function.__name__
    assert found["args"].make == f"test_vector_env:{name}.<locals>.<lambda>"


def test_a_run_at_weights_and_biases_keeps_its_id(run, monkeypatch):
    inits = []
    init = lambda **about: inits.append(about) or ppo.ExitStack()  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=OSError))
    found = run(total_timesteps=T * N, track=True, run_name="named")
    run(resume=found.run_dir, total_timesteps=2 * T * N, track=True)
    first, second = inits
    assert first["id"] == second["id"] != first["name"] == second["name"] == "named"
    with pytest.raises(ppo.UsageError, match="has a run already"):
        run(track=True, run_name="named")
    with filelock.FileLock(found.run_dir / "lock"), pytest.raises(ppo.UsageError, match="in use"):
        run(resume=found.run_dir, track=True)
    assert len(inits) == 2  # what is refused tells Weights & Biases nothing


def test_one_process_at_a_time_trains_in_a_folder(trained, cli):
    with filelock.FileLock(trained / "lock"):
        code, _, error = cli(f"--resume {trained} --total-timesteps 864")
    assert code == 2 and "runs/done is in use: another process trains there." in error
    Path("file").touch()
    code, _, error = cli(f"{HERE}same --run-name {'x' * 300}")
    assert code == 2 and "File name too long: change --run-name" in error


def test_an_update_that_cannot_be_compiled_is_done_without(run, monkeypatch, capsys):
    def fail(function, options):
        raise RuntimeError("No compiler.\nAt all.")

    monkeypatch.setattr(torch, "compile", fail)
    resets = record(monkeypatch, torch.compiler, "reset")
    found = run(compile="yes", total_timesteps=T * N)
    assert len(resets) == 1  # of what an earlier run in the process has compiled
    assert "could not be compiled, so it takes longer: No compiler.\n" in capsys.readouterr().out
    assert len(found.calls) == 4 and not same_weights(found.agent, found.calls[0].agent)


def test_a_step_size_of_0_learns_nothing_and_says_so(run):
    found = run(total_timesteps=T * N, learning_rate=0.0)
    assert found.updates[0]["check/update"] == found.updates[0]["check/kl"] == 0


def test_an_agent_that_has_been_evaluated_can_still_learn(trained, monkeypatch):
    agents = record(monkeypatch, ppo, "load_checkpoint")
    ppo.evaluate(trained, 2, make=make_same)
    assert all(x.requires_grad for x in agents[0][-1]["agent"].parameters())
    with pytest.raises(ppo.UsageError, match=r"--eval-episodes \(0\) must be at least 1"):
        ppo.evaluate(trained, 0, make=make_same)


def test_evaluation_plays_the_most_likely_actions_and_changes_nothing(trained, monkeypatch, cli):
    before = (trained / "checkpoint.pt").read_bytes()
    made = []
    for way in MODES:
        made.append(simulator(way, 5))
        if way != "dict":
            found = ppo.evaluate(trained, 5, make=lambda *_: made[-1])
            agent = ppo.load_policy(trained)
            expected = []
            for i, env in enumerate(made[-1].envs):
                # Those of Gymnasium begin in `reset`; others may have begun before.
                own, taken, totals = Single(i), iter(env.taken), []
                for _ in range(1 if way in GYMNASIUM else 2):
                    total, ended = 0.0, False
                    obs = own.reset()[0]
                    while not ended:
                        action = agent(obs[None])[0]
                        np.testing.assert_allclose(next(taken), action, atol=1e-6)
                        obs, reward, failed, cut, _ = own.step(action)
                        total, ended = total + reward, failed or cut
                    totals.append(total)
                expected.append(totals[-1])
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-3)
            assert getattr(made[-1], "closed", True)
    code, out, _ = cli(f"--evaluate {trained} --eval-episodes 4")
    assert code == 0 and re.search(r"Return -?[\d.e+]+ ± [\d.e+]+ in 4 episodes\n", out)
    assert (trained / "checkpoint.pt").read_bytes() == before


class Endless(Tensors):
    """Its second environment never ends an episode."""

    def step(self, actions):
        obs, rewards, failed, cut, infos = super().step(actions)
        failed[1] = cut[1] = False
        return obs, rewards, failed, cut, infos


class Later(Single):
    """Its second episode has no numbers."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, math.nan if self.episode else reward, *rest


def test_what_comes_after_an_episode_does_not_count(trained):
    found, expected = (
        ppo.evaluate(trained, 5, make=lambda *_: simulator("same", 5, kind=kind))  # noqa: B023
        for kind in (Later, Single)
    )
    assert found == expected


def test_an_evaluation_without_end_is_given_up(trained, monkeypatch):
    monkeypatch.setattr(ppo, "EVALUATION_STEPS", 50)
    envs = Endless("dense", 3)
    with pytest.raises(ppo.UsageError, match="1 of 3 episodes have not ended in 50 steps"):
        ppo.evaluate(trained, 3, make=lambda *_: envs)
    assert envs.closed and not (trained / "videos").exists()


def test_only_the_last_episodes_are_kept(run, monkeypatch):
    whole = run().episodes
    monkeypatch.setattr(ppo, "EPISODES_KEPT", 5)
    found = run()
    assert found.episodes == whole[-5:] and len(whole) > 10
    assert ppo.load_checkpoint(found.run_dir)["episodes"] == whole[-5:]


def test_a_policy_that_is_loaded_has_no_gradients(trained):
    policy = ppo.load_policy(trained)
    saved = torch.load(trained / "checkpoint.pt", weights_only=True)
    obs = torch.tensor([[1.0, 2, 3, 4], [400, -1, 2, 0]])
    mean, var = (saved["agent"][f"obs_stats.{x}"] for x in ("mean", "var"))
    normalized = ((obs - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
    expected = policy.agent.policy(normalized).clamp(-0.5, 0.5)
    assert torch.equal(policy(obs), expected) and not policy(obs).requires_grad
    assert not policy.training


def test_only_the_first_process_says_what_is_next(cli, monkeypatch):
    monkeypatch.setattr(ppo, "RANK", 1)
    code, out, _ = cli(f"{HERE}same --run-name other")
    assert code == 0 and "Next" not in out and not Path("runs/other").exists()


class Interrupting(Single):
    """The first one is interrupted in its 60th step, in the third iteration."""

    signal = signal.SIGINT

    def step(self, action):
        if self.number == 0 and len(self.taken) == 59:
            os.kill(os.getpid(), self.signal)
        return super().step(action)


class Ending(Interrupting):
    signal = signal.SIGTERM


def make_interrupting(num_envs, seed, device):
    return simulator("same", num_envs, Interrupting)


def make_ending(num_envs, seed, device):
    return simulator("same", num_envs, Ending)


def test_a_run_that_is_stopped_in_its_first_iteration_can_be_resumed(cli, run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "check_numbers", lambda *_: signal.raise_signal(signal.SIGINT))
        assert cli(f"{HERE}same --run-name cut")[0] == 130
    saved = ppo.load_checkpoint("runs/cut")
    assert saved["updates"] == saved["episodes"] == []
    code, _, error = cli(f"{HERE}same --run-name cut")
    assert code == 2 and "--resume it" in error
    assert len(run(resume="runs/cut").updates) == 3
    code, _, error = cli("--resume runs/cut --evaluate runs/cut")
    assert code == 2 and "choose one of them" in error


@pytest.mark.parametrize("target_kl", [0.0, 1e-4])
def test_an_interrupted_run_continues_in_new_episodes(cli, run, target_kl):
    more = f"--run-name cut --total-timesteps {5 * T * N} --lr 0.01"
    code, _, error = cli(f"{HERE}interrupting {more} --target-kl {target_kl}")
    assert code == 130
    assert f"Interrupted at step {2 * T * N}. To continue: --resume runs/cut\n" in error
    saved = torch.load("runs/cut/checkpoint.pt", weights_only=True)
    assert [x["global_step"] for x in saved["updates"]] == [T * N, 2 * T * N]
    found = run(resume="runs/cut")
    first = found.calls[0]
    assert first.adam["step"] == saved["adam"]["step"] == 24
    for name in ("mean", "square", "weights"):
        assert torch.equal(first.adam[name], saved["adam"][name]) and first.adam[name].any()
    for name, x in first.agent.state_dict().items():
        assert torch.equal(x, saved["agent"][name]) or "return_stats" in name
    counts = [
        x["agent"][f"{y}.count"].item()
        for x in (saved, {"agent": found.agent.state_dict()})
        for y in ("obs_stats", "return_stats")
    ]
    assert counts == pytest.approx([288, 288, 720, 720], abs=0.01)
    assert [x["global_step"] for x in found.updates] == [k * T * N for k in range(1, 6)]
    assert found.updates[:2] == saved["updates"]
    assert found.episodes[: len(saved["episodes"])] == saved["episodes"]
    assert found.episodes[len(saved["episodes"])]["global_step"] > 2 * T * N
    sizes = [x.step_size for x in found.calls[::4]]
    rates = [x["charts/learning_rate"] for x in found.updates]
    assert sizes == pytest.approx(rates[2:])
    if target_kl:
        assert sizes[0] < 0.005
        last = saved["updates"][-1]
        assert sizes[0] == pytest.approx(
            ppo.adapted(last["charts/learning_rate"], last["check/kl"], 1e-4)
        )
    else:
        assert rates == pytest.approx([0.01, 0.008, 0.006, 0.004, 0.002])
    numbers = np.random.default_rng([1, 0, 2]).integers(2**31, size=2)  # others than at first
    assert found.options[0][1] == numbers[0] and len(found.episodes) > len(saved["episodes"])


@pytest.mark.parametrize(("name", "expected"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_a_run_with_its_exit_code(cli, monkeypatch, hangup, name, expected):
    monkeypatch.setattr(Ending, "signal", getattr(signal, name))
    code, _, error = cli(f"{HERE}ending --run-name ended")
    assert code == expected and len(ppo.load_checkpoint("runs/ended")["updates"]) == 2
    assert f"Interrupted at step {2 * T * N}. To continue: --resume runs/ended\n" in error


def test_a_signal_that_is_ignored_stays_so(cli, monkeypatch, hangup):
    monkeypatch.setattr(Ending, "signal", hangup)
    signal.signal(hangup, signal.SIG_IGN)  # as `nohup` does
    code, _, _ = cli(f"{HERE}ending --run-name ended")
    assert code == 0 and len(ppo.load_checkpoint("runs/ended")["updates"]) == 3


def test_copied_alone_into_an_empty_folder_it_runs(run_file, tmp_path):
    path = tmp_path / "my_copy.py"
    shutil.copy(ppo.__file__, path)
    line = f"--backend gymnasium --env-id Pendulum-v1 {FLAGS} --total-timesteps 288"
    code, out, _ = run_file(path, line)
    (folder,) = Path("runs").iterdir()
    assert code == 0 and folder.name.startswith("Pendulum-v1__my_copy__1__")
    assert f"Logs and checkpoints: {folder}\n" in out


def test_a_video_shows_the_first_episode(trained, monkeypatch):
    from gymnasium.utils import save_video

    saved = record(monkeypatch, save_video, "save_video")
    monkeypatch.setattr(ppo, "let_draw", lambda: None)

    def make(num_envs, *_):
        def single(i):
            env = Single(i)
            env.render_mode = "rgb_array"
            return env

        makes = [functools.partial(single, i) for i in range(num_envs)]
        return SyncVectorEnv(makes, autoreset_mode=AutoresetMode.SAME_STEP)

    ppo.evaluate(trained, 2, video=True, make=make)
    ((frames, folder, *_),) = saved
    assert [x[0, 0, 0] for x in frames] == [0, 1, 2] and folder == "runs/done/videos"
    assert (trained / "videos/rl-video-episode-0.mp4").exists()


def test_threads_are_as_before_and_a_run_learns_where_nothing_is_learned(run, monkeypatch):
    threads = []
    monkeypatch.setattr(ppo, "check_numbers", lambda *_: threads.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    with torch.inference_mode():
        found = run(total_timesteps=T * N)
    assert threads == [1] and torch.get_num_threads() == 2
    assert not same_weights(found.agent, found.calls[0].agent)
    with torch.no_grad():
        again = run(total_timesteps=T * N)
    assert same_weights(found.agent, again.agent)


def test_what_is_compiled_is_the_update_of_one_process(run, monkeypatch):
    compiled = []
    monkeypatch.setattr(ppo, "compiled", lambda *x: compiled.append(x) or x[0])
    run(compile="yes", total_timesteps=T * N)
    assert len(compiled) == 1 and compiled[0][1] == torch.device("cpu")
    run(total_timesteps=T * N)
    assert len(compiled) == 1


def test_a_run_on_a_gpu_is_that_of_the_processor(run, gpu, monkeypatch):
    class Generator(torch.Generator):  # in memory of the processor, too
        def __new__(cls, device=None):
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Generator)
    one, two = ({"total_timesteps": k * T * N} for k in (1, 2))
    expected = run("same", **one)
    result, device = gpu(lambda: run("same", device="auto", run_name="gpu", **one))
    assert all(device.has(x) for x in result.agent.state_dict().values())
    assert same_weights(result.agent, expected.agent)
    assert result.options[0][2] == torch.device("cuda", 0)
    again, device = gpu(lambda: run("dense", resume="runs/gpu", device="cuda", **two))
    assert len(again.updates) == 2
    assert all(device.has(x) for x in again.agent.state_dict().values())
    given, loaded = [], record(monkeypatch, ppo, "load_checkpoint")

    def make(num_envs, seed, device):
        given.append(device)
        return simulator("dense", num_envs)

    found, device = gpu(lambda: ppo.evaluate("runs/gpu", 2, make=make))
    assert given == [torch.device("cuda", 0)] and len(found) == 2
    agent = loaded[0][-1]["agent"]
    assert all(device.has(x) for x in agent.state_dict().values())


# --- Many processes ---


def learn_as_one(target_kl):
    """Train in one of the processes; return what it has seen."""
    exec(Path(ppo.__file__).read_text(), vars(ppo))  # once more: it reads what torchrun has set
    made, gradients, real = [], [], torch.autograd.grad

    def make(num_envs, seed, device):
        made.append((seed, simulator("next", num_envs)))
        return made[-1][1]

    def grad(*inputs):
        gradients.append(real(*inputs))
        return gradients[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        rows = record(patch, ppo, "ppo_update")
        settings = {"target_kl": target_kl, "run_name": "two", "total_timesteps": 6 * T * N}
        result = ppo.train(ppo.Args(**TINY | settings), make)
    steps = experience(made[0][1].envs, "next", 0.9)
    return {
        "rank": ppo.RANK,
        "seed": made[0][0],
        "state": {name: x.tolist() for name, x in result["agent"].state_dict().items()},
        "obs": [x.obs for x in steps],
        "sums": [x.discounted for x in steps],
        "gradient": torch.cat([x.flatten() for x in gradients[0]]).tolist(),
        "norm": rows[0][-1][0]["losses/grad_norm"].item(),
        "updates": result["updates"],
        "kl": [x["losses/approx_kl"].item() for y in rows for x in y[-1]],
        "episodes": len(result["episodes"]),
        "dir": str(result["run_dir"]),
        "connected": torch.distributed.is_initialized(),
        "threads": [x.read_text() for x in Path("/proc/self/task").glob("*/comm")],
    }


@pytest.fixture
def processes(monkeypatch):
    """Train in two processes, as torchrun does, but forks; return what each of them saw."""
    monkeypatch.setattr(inspect, "stack", functools.partial(inspect.stack, context=0))
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    return lambda *x: elastic_launch(LaunchConfig(1, 1, 2, **place), learn_as_one)(*x).values()


def test_two_processes_learn_as_one(processes):
    one, two = sorted(processes(0.02), key=lambda x: x["rank"])
    assert one["state"] == two["state"] and (one["rank"], two["rank"]) == (0, 1)
    assert one["seed"] != two["seed"] and one["kl"] != two["kl"]
    both = np.mean([one["gradient"], two["gradient"]], 0)
    assert one["norm"] == two["norm"] == pytest.approx(np.linalg.norm(both), rel=1e-4)
    assert one["gradient"] != two["gradient"] and not one["connected"]
    assert "gloo" not in f"{one['threads'] + two['threads']}"  # they may abort a process at its end
    obs, sums = one["obs"] + two["obs"], one["sums"] + two["sums"]
    state = one["state"]
    np.testing.assert_allclose(state["obs_stats.mean"], np.mean(obs, 0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state["obs_stats.var"], np.var(obs, 0), rtol=1e-3)
    np.testing.assert_allclose(state["return_stats.var"], np.var(sums), rtol=1e-3)
    assert state["obs_stats.count"] == pytest.approx(len(obs), abs=0.01)
    for x, y in zip(one["updates"], two["updates"], strict=True):
        assert {**x, "charts/SPS": 0} == {**y, "charts/SPS": 0}
    assert [x["global_step"] for x in one["updates"]] == [2 * T * N, 4 * T * N, 6 * T * N]
    mean = np.mean(one["kl"] + two["kl"])
    assert np.mean([x["losses/approx_kl"] for x in one["updates"]]) == pytest.approx(mean, rel=1e-4)
    (folder,) = Path("runs").iterdir()  # the first process alone writes
    assert str(folder) == one["dir"] == two["dir"] == "runs/two"
    assert len([*folder.glob("events*")]) == 1
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert len(saved["episodes"]) == one["episodes"] > 0


@pytest.mark.slow
def test_torchrun_ends_when_its_processes_have_learned():
    line = "--env-id HalfCheetah-v4 --num-envs 4 --num-steps 16 --num-minibatches 2 --device cpu "
    line += "--total-timesteps 512 --run-name two"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*launch, ppo.__file__, *line.split()], check=True, timeout=300)
    saved = torch.load("runs/two/checkpoint.pt", weights_only=True)
    assert [x["global_step"] for x in saved["updates"]] == [128, 256, 384, 512]


def test_a_sum_over_processes_changes_nothing_in_a_single_one(monkeypatch):
    monkeypatch.setattr(ppo.dist, "all_reduce", lambda x: x.mul_(2))  # two that have the same
    assert ppo.all_sum(torch.ones(3)).tolist() == [1, 1, 1]
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    assert ppo.all_sum(torch.ones(3)).tolist() == [2, 2, 2]


def test_all_processes_have_the_name_that_the_first_one_made(monkeypatch):
    monkeypatch.setattr(ppo.dist, "broadcast_object_list", lambda x: x.__setitem__(0, "first"))
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(ppo, "RANK", 1)
    with ppo.ExitStack() as resources:
        found = ppo.open_run(resources, ppo.Args(), {}, 0)
    assert found == (Path("runs/first"), "first", None) and not Path("runs").exists()


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ppo, "WORLD_SIZE", 3)
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", f"{rank}")
        assert ppo.choose_device(ppo.Args(device="cpu")) == torch.device("cpu")
        if rank < 2:
            assert ppo.choose_device(ppo.Args()) == torch.device("cuda", rank)
    with pytest.raises(ppo.UsageError, match="--nproc-per-node 2 at most"):
        ppo.choose_device(ppo.Args())


def test_a_rank_without_other_processes_is_one_process(monkeypatch):
    import runpy

    monkeypatch.setenv("RANK", "1")
    for size in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", size)
        found = runpy.run_path(ppo.__file__)
        assert found["RANK"] == 0 and found["WORLD_SIZE"] == 1
