"""ppo_vector_env.py, next to a loop over single environments that does the same actions."""

import copy
import functools
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from helpers import curves, gain_of, record, same_weights
from vector_simulators import (
    COLUMNS,
    FLAGS,
    GYMNASIUM,
    MODES,
    TINY,
    N,
    Single,
    Step,
    T,
    Tensors,
    experience,
    simulator,
)

import ppo_vector_env as ppo

HERE = "--make vector_simulators:make_"
TINY_ARGS = ppo.Args(**TINY | {"total_timesteps": T * N})

# --- A run, and the same by hand ---


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


@pytest.mark.parametrize("scale", [1, 1e-8])
def test_values_are_not_clipped_if_that_is_asked_for_and_metrics_have_no_gradients(
    agent, samples, scale
):
    """And advantages that hardly differ stay small; the rest is in test_vectors."""
    samples = samples._replace(advantages=scale * samples.advantages)
    args = ppo.Args(clip_vloss=False, clip_coef=0.1, ent_coef=0.7, vf_coef=0.3)
    loss, metrics = ppo.ppo_loss(agent, samples, args)
    errors = (agent.get_value(samples.obs) - samples.returns) ** 2
    assert metrics["losses/value_loss"].item() == pytest.approx(0.5 * errors.mean().item())
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    assert metrics.keys() == {f"losses/{name}" for name in names}
    assert not any(x.requires_grad for x in metrics.values())
    parts = [metrics[f"losses/{name}"].item() for name in ("policy_loss", "entropy", "value_loss")]
    assert loss.item() == pytest.approx(np.dot(parts, [1, -0.7, 0.3]), rel=1e-5)
    logprobs = agent.evaluate_actions(samples.obs, samples.actions)[0]
    ratio = (logprobs - samples.logprobs).exp().detach().numpy()
    advantages = samples.advantages.numpy()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    gains = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    assert parts[0] == pytest.approx(-gains.mean(), rel=1e-5)
    assert metrics["losses/clipfrac"].item() == pytest.approx((abs(ratio - 1) > 0.1).mean())


def test_an_update_takes_many_steps_of_adam(agent, samples):
    """Gradients of some are clipped and of others not; a single step is in test_vectors."""
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
    adam = {
        "weights": weights,
        "mean": weights * 0,
        "square": weights * 0,
        "step": torch.zeros((), dtype=torch.float64),
    }
    torch.nn.utils.vector_to_parameters(weights, agent.parameters())
    size = torch.tensor(0.01, dtype=torch.float64)
    rows = ppo.ppo_update(agent, adam, samples, minibatches, size, args)
    for x, y in zip(agent.parameters(), other.parameters()):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert [x["losses/grad_norm"].item() for x in rows] == pytest.approx(norms, rel=1e-4)
    assert adam["step"] == 10 and rows[0].keys() - {"losses/grad_norm"} == {
        f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    }


def test_a_normalizer_merges_any_number_of_rows_and_shapes():
    """Also in pieces, of which the memory is limited; its formula is in test_vectors."""
    rows = 50 + random_tensors(40_000, 2).float()
    whole, pieces, single = ppo.Normalizer(2), ppo.Normalizer(2), ppo.Normalizer()
    whole.update(rows)  # more than a piece
    single.update(rows[:, 0])
    for part in rows.split([1, 30_000, 9_999]):
        pieces.update(part)
    for name in ("mean", "var"):
        expected = torch.mean(rows, 0) if name == "mean" else rows.var(0, correction=0)
        found = (getattr(x, name) for x in (whole, pieces))
        for x in found:
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(getattr(single, name), expected[0], rtol=1e-4, atol=1e-4)
    assert whole.count.item() == single.count.item() == pytest.approx(40_000, abs=0.01)
    assert {*whole.state_dict()} == {"mean", "var", "count"}


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
    with pytest.raises(ppo.UsageError, match=r"\(state state\) .*, each once"):
        ppo.Agent(layout, ppo.Args(policy_obs=("state", "state")))
    agent = ppo.Agent(layout, ppo.Args(policy_obs=("hidden",), value_obs=("hidden", "state")))
    assert agent.policy_obs.tolist() == [2] and agent.value_obs.tolist() == [2, 0, 1]


# --- A run from the outside ---


@pytest.fixture
def cli(outcome):
    """Run the script with a command line; returns exit code, stdout, stderr."""
    return lambda line: outcome(ppo.main, f"{FLAGS} {line}", "ppo_vector_env.py")


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


def test_a_finished_run_stays_as_it_is_and_needs_its_spaces(trained, cli):
    before = (trained / "checkpoint.pt").read_bytes()
    code, out, _ = cli(f"--resume {trained}")
    assert code == 0 and "new episodes begin" in out
    assert (trained / "checkpoint.pt").read_bytes() == before
    code, _, error = cli(f"--resume {trained} {HERE}parts")
    assert code == 2 and "runs/done was trained in a simulator with other spaces." in error
    code, _, error = cli(f"--evaluate {trained} {HERE}parts")
    assert code == 2 and "simulator with other spaces" in error


LATE = ("--activation elu", "--init-std 1", "--value-obs obs")


@pytest.mark.parametrize(
    "flag",
    [
        *("--hidden 8 8", "--obs-std-floor 0.01", "--policy-obs obs"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in LATE),
    ],
)
def test_a_run_that_is_continued_keeps_its_agent(trained, cli, flag):
    before = (trained / "checkpoint.pt").read_bytes()
    code, _, error = cli(f"--resume {trained} --total-timesteps 864 {flag}")
    assert code == 2 and f"{flag.split()[0]} is that of runs/done" in error, error
    code, _, error = cli(f"--evaluate {trained} {flag}")
    assert code == 2 and f"{flag.split()[0]} is for training: --evaluate" in error, error
    args = tyro.cli(ppo.Args, args=flag.split(), default=ppo.load_checkpoint(trained)["args"])
    with pytest.raises(ppo.UsageError, match=f"{flag.split()[0]} is that of runs/done"):
        ppo.evaluate(trained, args=args)
    assert (trained / "checkpoint.pt").read_bytes() == before


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


@pytest.mark.parametrize("name", ["activation", "backend", "vectorization_mode", "device"])
def test_choices_are_checked_in_python_too(name):
    with pytest.raises(ppo.UsageError, match=rf"--{name.replace('_', '-')} \(x\) must be one of"):
        ppo.Args(**{name: "x"})


def test_where_an_interrupted_run_goes_on_is_where_its_step_is(run, capsys):
    """A checkpoint that was named, if it has not learned since."""
    run(total_timesteps=2 * T * N, keep_checkpoints=True, checkpoint_interval=1, run_name="old")

    def stop(*_):
        raise KeyboardInterrupt

    named = f"runs/old/checkpoint-{T * N}.pt"
    with pytest.raises(KeyboardInterrupt):
        ppo.train(make=lambda *_: simulator("same", N), resume=named, update=stop)
    assert (
        f"Interrupted at step {T * N}. To continue: --resume {named}\n" in capsys.readouterr().err
    )
    assert len(ppo.load_checkpoint("runs/old")["updates"]) == 2


def test_a_whole_number_may_stand_for_a_fraction():
    assert ppo.Args(ent_coef=0, vf_coef=0, max_grad_norm=2).vf_coef == 0


def make_plain(num_envs, seed, device):
    return simulator("same", num_envs)


def of_kind(kind, num_envs, seed, device, terrain=None):
    return simulator(kind, num_envs)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_plain, "test_vector_env:make_plain"),
        (functools.partial(of_kind, "same"), "test_vector_env:of_kind(same)"),
        (
            functools.partial(of_kind, "dense", terrain=2),
            "test_vector_env:of_kind(dense, terrain=2)",
        ),
        (functools.partial(of_kind, "none", terrain=[]), "test_vector_env:of_kind(none)"),
        (lambda n, *_: simulator("same", n), "test_vector_env:<lambda> of SyncVectorEnv"),
        (lambda n, *_: simulator("none", n), "test_vector_env:<lambda> of Tensors"),
        (lambda n, *_: gym.make_vec("Pendulum-v1", n), "test_vector_env:<lambda> of Pendulum-v1"),
    ],
)
def test_a_run_has_the_name_of_what_made_its_simulator(make, name):
    saved = ppo.load_checkpoint(ppo.train(TINY_ARGS, make)["run_dir"])
    assert saved["args"].make == saved["args"].env_id == name
    assert saved["run_id"].startswith(f"{re.sub('[^-.a-zA-Z0-9_]', '-', name)}__")
    if "(" in name or "<" in name:  # a command would make another one
        with pytest.raises(ppo.UsageError, match="has no function"):
            ppo.evaluate(saved["run_dir"])


def test_a_step_size_of_0_learns_nothing_and_says_so(run):
    found = run(total_timesteps=T * N, learning_rate=0.0)
    assert found.updates[0]["check/update"] == found.updates[0]["check/kl"] == 0


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


def test_a_policy_that_is_loaded_has_no_gradients(trained):
    policy = ppo.load_policy(trained)
    saved = torch.load(trained / "checkpoint.pt", weights_only=True)
    obs = torch.tensor([[1.0, 2, 3, 4], [400, -1, 2, 0]])
    mean, var = (saved["agent"][f"obs_stats.{x}"] for x in ("mean", "var"))
    normalized = ((obs - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
    expected = policy.agent.policy(normalized).clamp(-0.5, 0.5)
    assert torch.equal(policy(obs), expected) and not policy(obs).requires_grad
    assert not policy.training


@pytest.mark.parametrize("target_kl", [0.0, pytest.param(1e-4, marks=pytest.mark.slow)])
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


def test_copied_alone_into_an_empty_folder_it_runs(run_file, tmp_path):
    path = tmp_path / "my_copy.py"
    shutil.copy(ppo.__file__, path)
    line = f"--backend gymnasium --env-id Pendulum-v1 {FLAGS} --total-timesteps 288"
    code, out, _ = run_file(path, line)
    (folder,) = Path("runs").iterdir()
    assert code == 0 and folder.name.startswith("Pendulum-v1__my_copy__1__")
    assert f"Logs and checkpoints: {folder}\n" in out


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
    begun = run(total_timesteps=T * N).run_dir
    assert len(compiled) == 1
    monkeypatch.setattr(ppo, "COMPILE_FROM", 24)  # Adam steps of two iterations
    run(compile="auto", total_timesteps=2 * T * N, resume=begun)  # as the whole run would be
    assert len(compiled) == 2


@pytest.mark.slow
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


def test_random_numbers_of_a_gpu_are_those_of_the_simulator(run, monkeypatch):
    """They are seeded before it is made, and an agent that is made later leaves them alone."""
    seeds = record(monkeypatch, torch.cuda, "manual_seed_all")
    before = []

    def make(way, num_envs):
        before.append(len(seeds))
        return simulator(way, num_envs)

    found = run(total_timesteps=T * N, make=make)
    assert before == [1] and seeds == [(found.options[0][1], None)]


def test_random_numbers_of_a_gpu_go_on_after_an_evaluation(gpu, monkeypatch):
    """As if there had been none: a run that is evaluated in between stays the same."""
    state = {"gpu": torch.tensor([7])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state["gpu"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda x, device: state.update(gpu=x))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: state.update(gpu=torch.tensor([seed])))

    def make():
        with ppo.ExitStack() as resources:
            ppo.make_simulator(resources, ppo.Args(), N, 3, lambda *_: simulator("same", N))
            return state["gpu"].clone(), torch.zeros(1, device="cuda")

    assert gpu(make)[0][0] == 3 and state["gpu"] == 7


def test_statistics_of_many_rows_are_computed_in_pieces(monkeypatch):
    stacks, x = record(monkeypatch, torch, "stack"), torch.randn(40_000, 2)
    stats = ppo.Normalizer(2)
    stats.update(x)
    assert [len(parts[0]) for parts, *_ in stacks] == [16_384, 16_384, 7_232]
    torch.testing.assert_close(stats.var, x.var(0, correction=0), rtol=1e-3, atol=0)


def test_an_agent_that_has_been_evaluated_can_still_learn(trained, monkeypatch):
    agents = record(monkeypatch, ppo, "load_checkpoint")
    ppo.evaluate(trained, 2, make=make_plain)
    assert all(x.requires_grad for x in agents[0][-1]["agent"].parameters())
    with pytest.raises(ppo.UsageError, match=r"--eval-episodes \(0\) must be at least 1"):
        ppo.evaluate(trained, 0, make=make_plain)


def test_parts_in_another_order_are_other_spaces():
    args = ppo.Args()
    layouts = ({"parts": x, "low": [], "high": []} for x in ({"a": 1, "b": 1}, {"b": 1, "a": 1}))
    first, second = (SimpleNamespace(layout=x) for x in layouts)
    saved = {"layout": first.layout, "args": args, "run_dir": "runs/x"}
    ppo.check_saved(first, args, saved)
    with pytest.raises(ppo.UsageError, match="other spaces"):
        ppo.check_saved(second, args, saved)
