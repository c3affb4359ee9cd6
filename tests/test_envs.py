"""What enters the batch: environments, normalization, truncation, actions."""

import math

import fake_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy.stats import norm

import ppo_continuous_action as ppo
from ppo_continuous_action import RunningMeanStd, normalize_obs, scale_reward, train

RAW = {"norm_obs": False, "scale_rewards": False}


def rollout_obs(recorded, iteration, args):
    """Observations (T, N, D) of an iteration, put back in order from its minibatches."""
    minibatches = recorded.minibatches[iteration * args.num_minibatches * args.update_epochs :]
    rows = torch.cat([x["data"][0] for x in minibatches[: args.num_minibatches]])
    return rows


# --- Detail 1: vectorized architecture, and no ghost transitions ---


def test_rollouts_continue_where_the_last_one_ended(tiny, recorded, counters):
    args = tiny(
        **RAW, num_envs=1, num_steps=7, num_minibatches=1, update_epochs=1, total_timesteps=21
    )
    train(args)
    (env,) = counters
    assert env.steps == 21  # every stored row is one environment step, none is a reset
    order = [x["data"][0] for x in recorded.minibatches]
    rows = sorted(torch.cat(order).tolist())
    # (episode, step) before each action: 5 per episode, in sequence over the rollout boundaries.
    assert rows == [[i // 5, i % 5] for i in range(21)]


def test_no_transition_crosses_an_episode(tiny, recorded):
    """With values that are the observation itself, each stored successor can be read off."""
    args = tiny(**RAW, num_envs=3, num_minibatches=1)
    seen = []

    class Reader(ppo.Agent):
        def get_value(self, obs):
            seen.append(obs)
            return super().get_value(obs) * 0 + 1000 * obs[..., 0] + obs[..., 1]

    ppo_agent, ppo.Agent = ppo.Agent, Reader
    try:
        train(args)
    finally:
        ppo.Agent = ppo_agent
    for batch in recorded.gae:
        steps = batch["next_values"] - batch["values"]
        assert (steps == 1).all()  # also at a truncation: its successor is the final observation
        ends = batch["values"] % 1000 == 4
        assert torch.equal(batch["done"].bool(), ends)


def test_environments_have_distinct_seeds_that_do_not_recur_under_other_seeds(tiny, counters):
    for seed in (1, 2):
        train(tiny(num_envs=4, num_steps=16, total_timesteps=64, seed=seed))
    first_resets = [env.seeds[0] for env in counters]
    assert len(first_resets) == 8 and len(set(first_resets)) == 8
    assert all(set(env.seeds[1:]) <= {None} for env in counters)


# --- Truncation is not termination ---


@pytest.mark.parametrize("end", ["truncated", "terminated", "both"])
@pytest.mark.parametrize("as_ppo2", [False, True])
def test_target_of_an_ending_step(tiny, recorded, counter_env, end, as_ppo2):
    counter_env(end=end)
    result = train(
        tiny(**RAW, num_envs=1, gamma=0.9, truncation_is_terminal=as_ppo2, learning_rate=0.0)
    )
    batch = recorded.gae[1]
    ends = batch["done"][:, 0].bool()
    assert 2 <= ends.sum() < len(ends)
    targets = (batch["rewards"] + 0.9 * batch["next_values"] * (1 - batch["terminated"]))[ends, 0]
    if end == "truncated" and not as_ppo2:
        episodes = [
            x["global_step"] // 5 - 1 for x in result["episodes"] if 16 < x["global_step"] <= 32
        ]
        final_obs = torch.tensor([[float(episode), 5.0] for episode in episodes])
        expected = 1 + 0.9 * result["agent"].get_value(final_obs).detach()
        torch.testing.assert_close(targets, expected)
    else:
        assert (targets == 1).all()
    torch.testing.assert_close(batch["returns"][ends, 0], targets)


def test_value_of_the_observation_after_the_rollout_is_bootstrapped(tiny, recorded):
    train(tiny(**RAW, learning_rate=0.0, num_steps=16, total_timesteps=64))
    first, second = recorded.gae
    torch.testing.assert_close(first["next_values"][-1], second["values"][0])
    torch.testing.assert_close(first["next_values"][:4], first["values"][1:5])


def test_final_observations_are_normalized_like_all_others(tiny, recorded, monkeypatch):
    calls = []
    real = ppo.normalize_obs

    def spy(obs, **settings):
        result = real(obs, **settings)
        calls.append((np.shape(obs), np.max(result)))
        return result

    monkeypatch.setattr(ppo, "normalize_obs", spy)
    result = train(tiny(num_envs=2, total_timesteps=32))
    finals = [x for x in calls if x[0] == (2,)]
    assert len(finals) == len(result["episodes"]) == 6
    assert all(value < 10 for _, value in finals)


# --- Details 28-29: observations ---


def test_running_statistics_do_not_depend_on_the_batching():
    data = np.random.default_rng(0).normal(3, 5, (120, 4))
    for size in (1, 7, 120):
        stats = RunningMeanStd((4,))
        for start in range(0, 120, size):
            stats.update(data[start : start + size])
        np.testing.assert_allclose(stats.mean, data.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats.var, data.var(0), rtol=1e-4)  # the prior weighs 1e-4 rows
        assert stats.count == pytest.approx(120.0001) and stats.mean.dtype == np.float64


def test_first_observation_of_one_environment_is_nearly_zero():
    stats = RunningMeanStd((2,))
    obs = np.array([[50.0, -3.0]])
    stats.update(obs)
    assert np.abs(normalize_obs(obs, stats, True, None)).max() < 0.01


def test_statistics_are_as_exact_with_half_precision():
    stats, rows = RunningMeanStd((1,)), np.array([[0.0], [1000.0]], np.float16)
    stats.count = 0.0
    stats.update(rows)
    assert (stats.mean[0], stats.var[0]) == (500.0, 250_000.0)


def test_normalize_obs_divides_by_the_std_then_clips():
    stats = RunningMeanStd((2,))
    stats.mean, stats.var = np.array([1.0, 1.0]), np.array([4.0, 0.25])
    obs = np.array([[3.0, 3.0], [1e6, -1e6]])
    assert normalize_obs(obs, stats, True, 10.0).tolist() == pytest.approx(
        np.array([[1, 4], [10, -10]])
    )
    assert normalize_obs(obs, stats, True, 2.0)[0].tolist() == pytest.approx([1, 2])
    assert normalize_obs(obs, stats, True, None)[1, 0] > 1e5
    assert normalize_obs(obs, stats, False, 10.0) is obs


def test_statistics_are_shared_by_all_environments_and_updated_before_use(
    tiny, recorded, monkeypatch
):
    raw = []
    real = RunningMeanStd.update
    monkeypatch.setattr(
        RunningMeanStd, "update", lambda self, x: (raw.append(np.array(x)), real(self, x))
    )
    train(tiny(num_envs=3, num_minibatches=1, update_epochs=1, total_timesteps=48))
    raw = [x for x in raw if x.ndim == 2]
    assert len(raw) == 17 and raw[0].shape == (3, 2)  # the reset and every step, all environments
    expected = []
    for t in range(16):
        seen = np.concatenate(raw[: t + 1])
        seen = np.concatenate([seen])
        expected.append((raw[t] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8))
    stored = recorded.minibatches[0]["data"][0].numpy()
    expected = np.clip(np.concatenate(expected[4:]), -10, 10)  # later ones forget the prior
    for row in expected:
        assert np.abs(stored - row).max(1).min() < 0.02


# --- Details 30-31: rewards ---


def baselines_rewards(rewards, done, gamma, limit):
    """VecNormalize.step_wait of ppo2, restated for arrays (T, N)."""
    returns, seen, scaled = np.zeros(rewards.shape[1]), [], []
    mean, var, count = 0.0, 1.0, 1e-4
    for reward, end in zip(rewards, done):
        returns = returns * gamma + reward
        seen.append(returns.copy())
        delta, total = returns.mean() - mean, count + len(returns)
        m2 = var * count + returns.var() * len(returns)
        m2 += delta**2 * count * len(returns) / total
        mean, var, count = mean + delta * len(returns) / total, m2 / total, total
        scaled.append(np.clip(reward / np.sqrt(var + 1e-8), -limit, limit))
        returns[end] = 0
    return np.array(scaled), np.array(seen)


@pytest.mark.parametrize("end", ["truncated", "terminated"])
def test_rewards_are_scaled_as_in_baselines(tiny, recorded, counter_env, monkeypatch, end):
    counter_env(end=end, length=2)
    accumulated = []
    real = RunningMeanStd.update
    monkeypatch.setattr(
        RunningMeanStd, "update", lambda self, x: (accumulated.append(np.array(x)), real(self, x))
    )
    train(tiny(num_envs=1, num_minibatches=2, total_timesteps=32, num_steps=16))
    seen = np.array([x for x in accumulated if x.ndim == 1])
    assert seen[:4, 0].tolist() == pytest.approx([1, 1.99, 1, 1.99])  # restarts at every end
    done = np.arange(32)[:, None] % 2 == 1
    expected, expected_seen = baselines_rewards(np.ones((32, 1)), done, 0.99, 10.0)
    np.testing.assert_allclose(seen, expected_seen)
    rewards = torch.cat([x["rewards"] for x in recorded.gae])
    np.testing.assert_allclose(rewards.numpy(), expected, rtol=1e-5)
    assert rewards[0].item() == 10  # 70.7 before the clipping


def test_scale_reward_keeps_the_sign_and_does_not_center():
    stats = RunningMeanStd(())
    stats.mean, stats.var = 100.0, 4.0
    rewards = np.array([-6.0, 0.0, 50.0])
    assert scale_reward(rewards, stats, True, 10.0).tolist() == pytest.approx([-3, 0, 10])
    assert scale_reward(rewards, stats, True, None).tolist() == pytest.approx([-3, 0, 25])
    assert scale_reward(rewards, stats, False, 10.0) is rewards


def test_logged_returns_are_raw_and_whole(tiny):
    result = train(tiny(num_envs=2))
    assert [x["return"] for x in result["episodes"]] == [5.0] * 18
    assert [x["length"] for x in result["episodes"]] == [5] * 18
    assert [x["global_step"] for x in result["episodes"]][:4] == [10, 10, 20, 20]


# --- Detail 27: actions ---


def test_environment_gets_clipped_actions_and_the_buffer_unclipped_ones(tiny, recorded, counters):
    train(tiny(**RAW, num_envs=1, num_minibatches=1, update_epochs=1, total_timesteps=16))
    received = np.array(counters[0].actions)
    _, actions, logprobs = recorded.minibatches[0]["data"][:3]
    assert np.abs(received).max() == np.float32(0.1)
    assert actions.abs().max() > 1  # sigma is 1
    unordered = {tuple(x) for x in np.clip(actions.numpy(), -np.float32(0.1), np.float32(0.1))}
    assert {tuple(x) for x in received} == unordered
    # The stored log-probability is that of the unclipped sample: the policy's mean is about 0.
    mean = np.zeros((16, 2))
    expected = norm.logpdf(actions.numpy(), mean, 1).sum(1)
    np.testing.assert_allclose(logprobs.numpy(), expected, atol=0.2)


def test_any_box_shape_and_dictionary_observations(tiny, recorded):
    result = train(tiny(env_id="FakeShapes-v0", async_envs=False))
    assert recorded.minibatches[0]["data"][0].shape == (8, 6 + 3 + 1)
    assert recorded.minibatches[0]["data"][1].shape == (8, 4)
    assert len(result["updates"]) == 3


def test_processes_give_the_same_run_as_one_process(tiny):
    settings = {"env_id": "Pendulum-v1", "num_envs": 2}
    a, b = train(tiny(**settings)), train(tiny(**settings, async_envs=True))
    assert all(map(torch.equal, a["agent"].parameters(), b["agent"].parameters()))


def test_half_cheetah_runs_with_its_real_spaces(tiny):
    result = train(tiny(env_id="HalfCheetah-v4", num_envs=1, total_timesteps=32))
    assert result["agent"].log_std.shape == (1, 6) and math.isfinite(
        result["updates"][-1]["losses/grad_norm"]
    )
    assert gym.spec("HalfCheetah-v4").max_episode_steps == 1000
    assert fake_envs.Counter.action_space.shape == (2,)
