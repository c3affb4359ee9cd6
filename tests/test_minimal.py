"""ppo_minimal.py is the algorithm of ppo_continuous_action.py."""

import functools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import record
from torch import nn

import ppo_continuous_action as full
import ppo_minimal as minimal
from benchmark.tags import tags_of

AGENT = full.Agent
# Two iterations of 10 epochs with 32 minibatches of 8; large enough steps for ratios to be clipped.
SETTINGS = {"env_id": "Tape-v0", "num_envs": 2, "num_steps": 128, "total_timesteps": 512}
SETTINGS |= {"learning_rate": 3e-3, "ent_coef": 0.01, "max_grad_norm": 0.3, "device": "cpu"}
NO_EPSILON = 1e-12  # PyTorch adds it after the bias correction, ppo2 before


class Tape(gym.Env):
    """Plays the same numbers, whatever is done: episodes that fall after 9 steps, or are cut off.

    The third of each three episodes is cut off by a time limit after 14 steps, and in the 15th
    one both happen at once. Rewards are tiny at first and then grow, so that their scale changes
    during a rollout; late in the first one, one of them is so large that it is clipped.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(-0.5, 0.5, (2,))
    made = 0

    def __init__(self):
        self.rng, self.episode, self.taken = np.random.default_rng(Tape.made), 0, []
        self.is_first = Tape.made == 0
        Tape.made += 1

    def reset(self, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
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


def initial_weights(log_std_shape):
    torch.manual_seed(5)
    weights = AGENT(3, 2, full.Args()).state_dict()
    weights["policy.4.weight"] *= 30  # so that actions leave the bounds
    return {**weights, "log_std": torch.full(log_std_shape, -0.3)}


QUIET = MagicMock()  # a log that nobody reads


def full_run(monkeypatch):
    """What the full script gives gae, what it learns from, and its results, on the tape."""
    batches, calls = [], record(monkeypatch, full, "gae")
    monkeypatch.setattr(full, "open_run", lambda *_: (None, QUIET, None))
    monkeypatch.setattr(full, "save_checkpoint", lambda *_: None)

    def agent(*sizes):
        made = AGENT(*sizes)
        made.load_state_dict(initial_weights((1, 2)))
        return made

    def update(agent, adam, batch, *rest):
        batches.append([x.clone() for x in batch])
        return full.ppo_update(agent, adam, batch, *rest)

    monkeypatch.setattr(full, "Agent", agent)
    Tape.made = 0
    results = full.train(full.Args(**SETTINGS, compile=False), update=update)
    return SimpleNamespace(gae=calls, batches=batches, results=results)


def test_it_computes_what_the_full_script_does(monkeypatch):
    with monkeypatch.context() as patch:
        expected = full_run(patch)
    steps = SimpleNamespace(eps=None, rates=[], weights=[])
    monkeypatch.setattr(minimal, "SummaryWriter", lambda *_: QUIET)
    calls, losses = (record(monkeypatch, minimal, name) for name in ("gae", "ppo_loss"))
    real_agent, real_adam, made = (
        minimal.Agent,
        torch.optim.Adam,
        record(monkeypatch, gym, "make_vec"),
    )
    check_agent(real_agent)

    def agent(*sizes):
        steps.agent = real_agent(*sizes)
        steps.agent.load_state_dict(initial_weights((2,)))
        return steps.agent

    class Adam(real_adam):
        def __init__(self, parameters, lr=1e-3, eps=None):
            steps.eps = eps
            super().__init__(parameters, lr=lr, eps=NO_EPSILON)

        def step(self):
            (group,) = self.param_groups
            steps.rates.append(group["lr"])
            super().step()
            weights = steps.agent.named_parameters()
            steps.weights.append({name: x.detach().clone() for name, x in weights})

    monkeypatch.setattr(minimal, "Agent", agent)
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    Tape.made = 0
    results = minimal.train(minimal.Args(**SETTINGS))
    check_rollout(calls, losses, made[0][-1], expected)
    check_update(losses, steps, results)
    mine = [(x["global_step"], round(x["return"], 3)) for x in results["episodes"]]
    theirs = expected.results["episodes"]
    assert mine == [(x["global_step"], round(x["return"], 3)) for x in theirs]
    assert [x["global_step"] for x in results["updates"]] == [256, 512]


def check_agent(kind):
    torch.manual_seed(1)
    agent = kind(3, 2)
    for network, gain in ((agent.policy, 0.01), (agent.value, 1.0)):
        for layer, size in zip(network[::2], (2**0.5, 2**0.5, gain)):
            singular = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular, torch.full_like(singular, size))
            assert (layer.bias == 0).all()
    names = {name for name, _ in agent.named_parameters()}
    assert len(names) == 13 and "log_std" in names and (agent.log_std == 0).all()
    assert sum(x.numel() for x in agent.parameters()) == 2 * (4 * 64 + 65 * 64) + 65 * 3 + 2


def check_rollout(calls, losses, envs, expected):
    """Rewards, ends, values, advantages and observations of the first iteration."""
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    *mine, _, (advantages, returns) = calls[0]  # their last arguments are settings
    *theirs, _, _, (their_advantages, their_returns) = expected.gae[0]
    for pair in zip([*mine, advantages, returns], [*theirs, their_advantages, their_returns]):
        close(*pair)
    first = [
        minibatch for _, minibatch, *_ in losses[:32]
    ]  # of the first epoch, whose samples are each used once
    order = torch.cat([x[5] for x in first]).argsort()
    obs, actions = (torch.cat([x[i] for x in first])[order] for i in (0, 1))
    batch = expected.batches[0]
    close(obs, batch[0][batch[5].argsort()])
    # The environment was given the clipped actions, the batch holds the drawn ones.
    taken = np.concatenate([env.unwrapped.taken for env in envs.unwrapped.envs])
    assert np.abs(taken).max() <= 0.5 < actions.abs().max()
    for epoch in range(1, 3):
        again = torch.cat([mb[5] for _, mb, *_ in losses[32 * epoch : 32 * (epoch + 1)]])
        assert torch.equal(again.sort().values, returns.flatten().sort().values)
        assert not torch.equal(again, torch.cat([x[5] for x in first]))


def check_update(losses, steps, results):
    """The same minibatches lead the full script's update to the same weights and metrics."""
    agent = AGENT(3, 2, full.Args())
    agent.load_state_dict(initial_weights((1, 2)))
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    adam["step"] = torch.zeros((), dtype=torch.float64)
    nn.utils.vector_to_parameters(adam["weights"], agent.parameters())
    args = full.Args(**SETTINGS, adam_eps=NO_EPSILON)
    assert steps.eps == 1e-5 and len(losses) == 2 * 320
    assert steps.rates == [3e-3] * 320 + [1.5e-3] * 320
    metrics = []
    for _, minibatch, _, (_, mine) in losses[:320]:
        rows = [torch.arange(len(minibatch[0]))]
        schedule = {"learning_rate": torch.tensor(3e-3), "clip_coef": torch.tensor(0.2)}
        metrics.append(full.ppo_update(agent, adam, minibatch, rows, schedule, args))
        for name, value in mine.items():
            assert value == pytest.approx(metrics[-1][name].item(), rel=1e-3, abs=1e-4), name
    assert 0.05 < np.mean([x["losses/clipfrac"].item() for x in metrics]) < 0.9
    for name, weight in agent.named_parameters():
        mine = steps.weights[319][name].view(weight.shape)
        torch.testing.assert_close(mine, weight.detach(), rtol=1e-4, atol=1e-5)
    last = results["updates"][0]
    mean = np.mean([x["losses/approx_kl"].item() for x in metrics])
    assert last["losses/approx_kl"] == pytest.approx(mean, rel=1e-3)


def test_it_has_each_detail_of_continuous_actions_once_by_the_known_title():
    texts = (Path(x.__file__).read_text() for x in (full, minimal))
    titles, found = ([(x.number or x.kind, x.title) for x in tags_of(y)] for y in texts)
    titles = {x: y for x, y in titles if x != "Extra"}
    assert len(found) == len(dict(found)) == 23 and dict(found) == titles
    numbers = {int(x.split("/")[0]) for x in dict(found) if "/" in x}
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


def test_settings_are_those_of_the_full_script():
    mine, theirs = vars(minimal.Args()), vars(full.Args())
    assert mine == {name: theirs[name] for name in mine} and len(mine) == 15
