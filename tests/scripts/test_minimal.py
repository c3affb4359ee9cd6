"""ppo_minimal.py is the algorithm of ppo_continuous_action.py."""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import MagicMock

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import curves, gain_of, record, same_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import ppo_continuous_action as full
import ppo_minimal as minimal
from benchmark.evidence.tags import tags_of

# Large enough steps for ratios to be clipped.
SETTINGS = {"env_id": "Tape-v0", "num_envs": 2, "num_steps": 128, "total_timesteps": 512}
SETTINGS |= {"learning_rate": 3e-3, "ent_coef": 0.01, "max_grad_norm": 0.3, "device": "cpu"}
SETTINGS |= {"num_minibatches": 4, "update_epochs": 5}
NO_EPSILON = 1e-12  # PyTorch adds it after the bias correction, ppo2 before


class Tape(gym.Env):
    """Plays the same numbers, whatever is done: episodes that fall after 9 steps, or are cut off.

    The third of each three episodes is cut off by a time limit after 14 steps, and in the 15th
    one both happen at once. Rewards are tiny at first and then grow, so that their scale changes
    during a rollout; late in the first one, one of them is so large that it is clipped.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(-0.5, 0.5, (2,))
    made: ClassVar[list["Tape"]] = []

    def __init__(self):
        number = len(Tape.made) % 2  # of the full script, or of the short one
        self.rng, self.episode = np.random.default_rng(number), 0
        self.taken, self.seeds = [], []
        self.is_first = number == 0
        Tape.made.append(self)

    def reset(self, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        self.seeds.append(seed)
        return self.observe(), {}

    def observe(self):
        return (self.rng.normal(size=3) * [1, 10, 0.1] + [0, 5, self.t]).astype(np.float32)

    def step(self, action):
        self.t += 1
        self.taken.append(action.copy())
        limit = 14 if self.episode % 3 == 0 else 9
        size = self.episode if self.episode > 2 else 1e-4
        is_huge = self.is_first and (self.episode, self.t) == (11, 1)
        reward = float(self.rng.normal() * size + 1e4 * is_huge)
        ended, cut_off = self.t == limit, self.episode % 3 == 0
        failed = ended and (not cut_off or self.episode == 15)
        return self.observe(), reward, failed, ended and cut_off, {}


gym.register("Tape-v0", lambda: Tape())


def begun(kind):
    """Make agents of a kind that begin with the same weights."""

    def make(*sizes):
        agent, generator = kind(*sizes), torch.Generator().manual_seed(5)
        for _, x in sorted(agent.named_parameters()):
            nn.init.normal_(x, std=0.3, generator=generator)
        return agent

    return make


def test_it_computes_what_the_full_script_does(monkeypatch):
    """With the same numbers drawn: the same actions, episodes, metrics and weights."""
    noises, orders, real_actor = [], [], full.actor

    def actor(agent):
        act = real_actor(agent)
        return lambda obs, noise: noises.append(noise) or act(obs, noise)

    def update(agent, adam, batch, indices, args):
        orders.append(indices.flatten())  # of an epoch
        return full.ppo_update(agent, adam, batch, indices, args)

    class Adam(torch.optim.Adam):
        def __init__(self, parameters, eps):
            assert eps == 1e-5
            super().__init__(parameters, eps=NO_EPSILON)

    monkeypatch.setattr(full, "Agent", begun(full.Agent))
    monkeypatch.setattr(full, "actor", actor)
    monkeypatch.setattr(full, "open_run", lambda *_: (None, None, MagicMock()))
    monkeypatch.setattr(full, "save_checkpoint", lambda *_: None)
    args = full.Args(**SETTINGS, adam_eps=NO_EPSILON, compile="no")
    theirs = full.train(args, update=update)

    monkeypatch.setattr(minimal, "Agent", begun(minimal.Agent))
    monkeypatch.setattr(minimal, "SummaryWriter", MagicMock())
    monkeypatch.setattr(torch, "randn", lambda shape, generator: torch.tensor(noises.pop(0)))
    monkeypatch.setattr(torch, "randperm", lambda size, generator: orders.pop(0))
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    mine = minimal.train(minimal.Args(**SETTINGS))
    assert noises == orders == []

    other, taken = np.array([env.taken for env in Tape.made]).reshape(2, 2, 256, 2)
    np.testing.assert_allclose(taken, other, atol=1e-4)
    assert (np.abs(taken) == 0.5).any()  # they are clipped
    assert [{*x.seeds[1:]} for x in Tape.made[2:]] == [{None}] * 2
    for a, b in zip(mine["episodes"], theirs["episodes"], strict=True):
        assert a == pytest.approx({name: b[name] for name in a}, abs=1e-4)
    for a, b in zip(mine["updates"], theirs["updates"], strict=True):
        names = a.keys() - {"charts/SPS", "charts/episodic_return"}
        assert len(names) == 7
        for name in names:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-4), name
        assert 0.05 < a["losses/clipfrac"] < 0.9
        since = a["global_step"] - 256
        new = [x["return"] for x in mine["episodes"] if since < x["global_step"] <= since + 256]
        assert a["charts/episodic_return"] == pytest.approx(np.mean(new))
    for name, x in theirs["agent"].state_dict().items():
        found = mine["agent"].state_dict()[name].view(x.shape)
        torch.testing.assert_close(found, x, rtol=1e-3, atol=1e-4)


def test_its_layers_are_orthogonal_with_the_gains_of_the_full_script():
    torch.manual_seed(1)
    agent = minimal.Agent(3, 2)
    for network, gain in ((agent.policy, 0.01), (agent.value, 1.0)):
        gains = [gain_of(layer) for layer in network[::2]]
        assert gains == pytest.approx([2**0.5, 2**0.5, gain], abs=1e-4)
        assert all((layer.bias == 0).all() for layer in network[::2])
    names = {name for name, _ in agent.named_parameters()}
    assert len(names) == 13 and "log_std" in names and (agent.log_std == 0).all()


def test_it_has_each_detail_of_continuous_actions_once_by_the_known_title():
    texts = (Path(x.__file__).read_text() for x in (full, minimal))
    tags, found = ([(x.number or x.kind, x.title) for x in tags_of(y)] for y in texts)
    assert sorted(found) == sorted(x for x in tags if x[0] != "Extra") and len(found) == 23
    numbers = {int(x.split("/")[0]) for x, _ in found if "/" in x}
    assert numbers == {*range(1, 14), *range(23, 32)}


def test_observations_are_clipped_at_ten_standard_deviations():
    stats = minimal.RunningMeanStd(3)
    np.testing.assert_allclose(stats.normalize(np.array([-1e3, 9.9, 1e3])), [-10, 9.9, 10], 1e-6)
    stats.var[:] = 0.0  # of what has never changed
    np.testing.assert_allclose(stats.normalize(np.array([0.0, 1e-4, -2e-4])), [0, 1, -2], 1e-6)


def test_advantages_that_hardly_differ_are_not_blown_up():
    """Their spread is 1e-8, as much as is added to it."""
    agent, advantages = minimal.Agent(3, 2), torch.tensor([1e-8, -1e-8])
    agent.policy[-1].weight.data.zero_()  # so that both actions are equally likely
    obs, actions, zeros = torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2)
    logprobs = agent(obs)[0].log_prob(actions).detach() - torch.tensor([0.1, 0.0])
    batch = obs, actions, logprobs, zeros, advantages, zeros
    _, metrics = minimal.ppo_loss(agent, batch, minimal.Args())
    expected = -(np.exp(0.1) * 0.5 - 0.5) / 2
    assert metrics["losses/policy_loss"] == pytest.approx(expected, rel=1e-4)


class Odd(gym.Env):
    """What an environment may do otherwise than Gymnasium's own ones."""

    observation_space = gym.spaces.Dict(a=gym.spaces.Discrete(2), b=gym.spaces.Box(-1, 1, (2,)))
    action_space = gym.spaces.Box(-1, 1, (1,))
    open: ClassVar[list["Odd"]] = []

    def __init__(self, kind="fine"):
        self.kind = kind
        self.open.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return {"a": 1, "b": [0.0, 0.5]}, {"changing": np.zeros(self.np_random.integers(1, 5))}

    def step(self, action):
        assert np.isfinite(action).all()
        self.t += 1
        obs = {"a": 0, "b": [0.0, np.nan if self.kind == "obs" else 0.5]}
        info = {"episode": "x", "changing": np.zeros(self.t)}
        reward = np.array([np.inf if self.kind == "reward" else 0.5])
        return obs, reward, np.array([self.t == 4]), None, info

    def close(self):
        self.open.remove(self)


for kind in ("fine", "obs", "reward"):
    gym.register(f"Odd-{kind}-v0", functools.partial(Odd, kind))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(minimal, "SummaryWriter", MagicMock())
    settings = {"num_envs": 2, "num_steps": 8, "num_minibatches": 4, "total_timesteps": 32}
    settings["update_epochs"] = 2
    return lambda kind: minimal.Args(env_id=f"Odd-{kind}-v0", **settings)


@pytest.mark.parametrize("kind", ["obs", "reward"])
def test_what_an_environment_does_wrong_is_a_sentence(kind, small):
    with pytest.raises(AssertionError, match=r"^step 2 has a NaN or infinite observation"):
        minimal.train(small(kind))
    assert Odd.open == []


def test_observations_keep_their_numbers_and_have_the_size_of_the_space(small, monkeypatch):
    """They are not cast to the type of the space."""
    obs = np.array([[0.5, 1.5, 2.5]])
    monkeypatch.setattr(Odd, "observation_space", gym.spaces.Box(0, 9, (1, 3), np.uint8))
    monkeypatch.setattr(Odd, "reset", lambda self, **options: (obs, {}))
    monkeypatch.setattr(Odd, "step", lambda self, action: (obs, 0.5, False, False, {}))
    np.testing.assert_allclose(minimal.train(small("fine"))["obs_stats"].mean, obs[0], rtol=1e-3)
    monkeypatch.setattr(Odd, "observation_space", gym.spaces.Box(0, 9, (2,)))
    with pytest.raises(ValueError, match="cannot reshape array of size 3 into shape"):
        minimal.train(small("fine"))


def test_a_seed_gives_the_same_run_and_threads_are_as_before(small, monkeypatch):
    threads, real = [], minimal.learn
    monkeypatch.setattr(
        minimal, "learn", lambda *x: (real(*x), threads.append(torch.get_num_threads()))[0]
    )
    torch.set_num_threads(2)
    agents = [minimal.train(dataclasses.replace(small("fine"), seed=x))["agent"] for x in (0, 0, 1)]
    assert threads == [1, 1, 1] and torch.get_num_threads() == 2
    assert same_weights(*agents[:2]) and not same_weights(*agents[1:])


class Level(gym.Env):
    """Episodes of four steps, each at a place of its own, which its seed decides."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Box(-9, 9, (1,))
    starts: ClassVar[list[tuple[float, float]]] = []
    actions: ClassVar[list[float]] = []
    seeds_torch = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        if self.seeds_torch:
            torch.manual_seed(0)
        start = self.np_random.normal(size=2).astype(np.float32)
        self.starts.append(tuple(start))
        return start, {}

    def step(self, action):
        self.t += 1
        self.actions.append(action.item())
        return np.zeros(2, np.float32), 0.0, False, self.t == 4, {}


gym.register("Level-v0", lambda: Level())


def test_environments_of_seeds_beside_each_other_play_other_episodes(small):
    """One environment has the run's seed, so that its runs stay those of the tables."""
    starts = []
    for seed in (1, 2, 3):
        Level.starts.clear()
        args = dataclasses.replace(small("fine"), env_id="Level-v0", num_envs=4, seed=seed)
        minimal.train(args)
        assert Level.starts[0] == tuple(np.random.default_rng(seed).normal(size=2).astype("f4"))
        starts += Level.starts
    assert len({*starts}) == len(starts) == 3 * 4 * (1 + 2)


def test_an_environment_that_seeds_pytorch_does_not_repeat_the_noise_or_the_minibatches(
    small, monkeypatch
):
    orders = record(monkeypatch, torch, "randperm")
    args = dataclasses.replace(small("fine"), env_id="Level-v0", num_envs=1, total_timesteps=16)
    Level.actions.clear()
    plain = minimal.train(args)["agent"]
    monkeypatch.setattr(Level, "seeds_torch", True)
    agent = minimal.train(args)["agent"]
    assert Level.actions[:16] == Level.actions[16:] and same_weights(agent, plain)
    assert len({*Level.actions}) == 16
    drawn = [tuple(order.tolist()) for *_, order in orders[:4]]
    assert len({*drawn}) == 4


def test_odd_environments_are_trained_on_and_closed_and_the_logs_hold_all_that_happens(
    small, monkeypatch, capsys
):
    """The 16 steps of an iteration take four ticks of this clock."""
    monkeypatch.setattr(minimal, "SummaryWriter", SummaryWriter)
    clock = MagicMock(time_ns=lambda: 7, perf_counter=MagicMock(side_effect=itertools.count(9, 4)))
    monkeypatch.setattr(minimal, "time", clock)
    closed = record(monkeypatch, SummaryWriter, "close")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    args = dataclasses.replace(small("fine"), env_id=f"{__name__}:Odd-fine-v0", seed=5)
    found = minimal.train(args)
    updates = found["updates"]
    assert {x["return"] for x in found["episodes"]} == {2.0} and Odd.open == []
    assert len(closed) == 1 and [x["global_step"] for x in updates] == [16, 32]
    logs = f"runs/{__name__}-Odd-fine-v0__ppo_minimal__5__7"  # Windows allows no colon
    logged = curves(logs)
    assert len(logged) == 8
    for name, curve in logged.items():
        assert curve == [(x["global_step"], pytest.approx(x[name])) for x in updates], name
    assert logged["charts/SPS"] == [(16, 4.0), (32, 4.0)]
    assert logged["charts/episodic_return"] == [(16, 2.0), (32, 2.0)]
    assert "return 2]" in capsys.readouterr().err  # the progress bar

    (table,) = EventAccumulator(logs).Reload().Tensors("hyperparameters/text_summary")
    rows = table.tensor_proto.string_val[0].decode().splitlines()
    assert rows[:2] == ["| setting | value |", "|-|-|"]
    assert rows[2:] == [f"| {name} | {value} |" for name, value in vars(args).items()]


def test_returns_that_are_all_the_same_are_not_explained(small, monkeypatch):
    step = Odd.step
    monkeypatch.setattr(
        Odd, "step", lambda self, action: (step(self, action)[0], 0.0, False, False, {})
    )
    updates = minimal.train(dataclasses.replace(small("fine"), gamma=0.0))["updates"]
    assert all(x["losses/explained_variance"] < 0 for x in updates)


@pytest.mark.parametrize("bounds", [(4, 6), (-0.01, 0.01), (-100, 100)])
def test_bounds_that_a_new_policy_hardly_fits_are_named(bounds, small, monkeypatch, capsys):
    monkeypatch.setattr(minimal, "learn", lambda *_: None)
    minimal.train(small("fine"))
    monkeypatch.setattr(Odd, "action_space", gym.spaces.Box(*bounds, (1,)))
    minimal.train(small("fine"))
    assert capsys.readouterr().out.count("use gym.wrappers.RescaleAction.") == 1


def test_the_progress_bar_is_for_terminals_and_shows_small_returns(small, monkeypatch, capsys):
    """What reads the output of a run may end before it, as `head` does."""
    step = Odd.step
    monkeypatch.setattr(Odd, "step", lambda self, x: (step(self, x)[0], 0.001, *step(self, x)[2:]))
    minimal.train(small("fine"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    minimal.train(small("fine"))
    assert "return 0.002" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--env-id CartPole-v1", "actions are Discrete(2), .*: try ppo_multidiscrete.py"),
        ("--total-timesteps 9", "--total-timesteps must be at least 2048"),
        ("--num-minibatches 2048", "--num-minibatches must split 2048 steps into equal parts of 2"),
        ("--num-minibatches 33", "--num-minibatches must split 2048 steps"),
        ("--num-minibatches 0", "--num-minibatches must split 2048 steps"),
        ("--num-steps 0", "--num-minibatches must split 0 steps"),
        ("--update-epochs 0", "--update-epochs must be at least 1"),
        ("--clip-coef nan", "--clip-coef must be at least 0"),
        ("--gamma 2", "--gamma and --gae-lambda must be at most 1"),
        ("--gae-lambda -0.1", "--gae-lambda must be at least 0"),
        ("--env-id Nothing-v0", "Environment `Nothing` doesn't exist"),
        ("--seed -1", "--seed must be at least 0"),
    ],
)
def test_what_it_cannot_train_is_a_sentence(flags, sentence, run_file):
    with pytest.raises((AssertionError, gym.error.Error), match=sentence.replace("(2)", r"\(2\)")):
        run_file(minimal.__file__, flags)


def test_settings_are_those_of_the_full_script():
    mine, theirs = vars(minimal.Args()), vars(full.Args())
    assert mine == {name: theirs[name] for name in mine} and len(mine) == 15
