"""What enters the batch of every script: details 1, 5, 27-30; bootstrap, seeds, bad numbers."""

import functools
import math

import fake_envs
import numpy as np
import pytest
import torch
from adapters import counter_episode, scripts, scripts_with, slow_on
from helpers import same_weights

from benchmark.evidence.vectors import scale_rewards


@scripts("continuous", "multidiscrete", "atari", "lstm")
def test_rollouts_continue_where_the_last_one_ended(script, tiny, recorded):
    args = tiny(update_epochs=1, **script.raw)
    result = script.module.train(args)
    rows = [row for step in recorded.steps for row in script.identity(step.obs)]
    steps = args.total_timesteps // args.num_envs
    assert sorted(rows) == [(n, t // 5, t % 5) for n in range(args.num_envs) for t in range(steps)]
    assert [env.steps for env in fake_envs.Fake.made] == [steps] * args.num_envs
    ends = [x["global_step"] for x in result["episodes"]]
    every_fifth = range(5 * args.num_envs, args.total_timesteps + 1, 5 * args.num_envs)
    assert ends == np.repeat(every_fifth, args.num_envs).tolist()
    assert all(x["length"] == 5 and x["return"] == 5.0 for x in result["episodes"])


@scripts_with("environments")
@pytest.mark.parametrize(
    ("end", "as_ppo2"),
    [("Truncated", False), ("Truncated", True), ("Terminated", False), ("Both", False)],
)
@slow_on("kl_penalty", "multidiscrete")
def test_bootstrap_is_the_value_of_the_own_successor(script, tiny, recorded, end, as_ppo2):
    """A time limit leaves the value of the final observation; a failure, or both, nothing."""
    settings = {"truncation_is_terminal": as_ppo2, "learning_rate": 0.0, "gamma": 0.9}
    args = tiny(end, **settings, total_timesteps=64, update_epochs=1, **script.raw)
    agent = script.module.train(args)["agent"]

    @functools.cache
    def value(n, episode, t):
        return script.value(agent, counter_episode(script, n, episode, t))

    for k, batch in enumerate(recorded.gae):
        targets = batch["rewards"] + 0.9 * batch["next_values"]
        for t, n in np.ndindex(*targets.shape):
            episode, place = divmod(k * len(targets) + t, 5)
            future = value(n, episode, place + 1)
            if place == 4 and (end != "Truncated" or as_ppo2):
                future = 0.0
            assert batch["done"][t, n] == (place == 4)
            expected = value(n, episode, place)
            assert batch["values"][t, n].item() == pytest.approx(expected, abs=1e-5)
            assert targets[t, n].item() == pytest.approx(1 + 0.9 * future, abs=1e-5)


@scripts("continuous")
def test_actions_are_new_samples_of_the_policy_and_environments_get_them_clipped(
    script, tiny, recorded, monkeypatch
):
    class Narrow(script.module.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            torch.nn.init.constant_(self.log_std, -2.0)

    monkeypatch.setattr(script.module, "Agent", Narrow)
    settings = {"num_steps": 256, "total_timesteps": 1024, "learning_rate": 0.0, "norm_obs": False}
    agent = script.module.train(tiny(**settings, update_epochs=1))["agent"]
    obs, actions = (torch.cat([x.data[i] for x in recorded.steps]) for i in (0, 1))
    noise = (actions - agent.policy(obs).detach()) * math.exp(2)
    assert abs(noise.mean()) < 0.1 and noise.std().item() == pytest.approx(1, abs=0.1)
    assert len({round(x, 4) for x in noise.flatten().tolist()}) > 0.95 * noise.numel()
    received = np.concatenate([env.actions for env in fake_envs.Fake.made])
    assert np.abs(received).max() == np.float32(0.1) and actions.abs().max() > 0.3
    assert sorted(map(tuple, received)) == sorted(map(tuple, actions.clamp(-0.1, 0.1).tolist()))


@scripts("continuous", "multidiscrete")
def test_observations_are_normalized_by_all_environments_up_to_now(script, tiny, recorded):
    """Final observations too, without being counted."""
    args = tiny(norm_obs=True, clip_obs=2.0, num_envs=3, total_timesteps=48, learning_rate=0.0)
    agent = script.module.train(args)["agent"]
    time = range(args.num_steps + 1)
    raw = np.array([[(n, t // 5, t % 5) for n in range(3)] for t in time], np.float64)
    total = 1e-4 + 3 * (1 + np.arange(17))[:, None]  # the prior counts as a ten thousandth
    mean = raw.sum(1).cumsum(0) / total
    var = (1e-4 + (raw**2).sum(1).cumsum(0)) / total - mean**2

    def normalized(obs, t):
        return np.clip((obs - mean[t]) / np.sqrt(var[t] + 1e-8), -2, 2)

    expected = np.concatenate([normalized(raw[t], t) for t in time[:-1]])
    found = torch.cat([step.obs for step in recorded.steps[:4]]).numpy()
    distance = np.abs(found[:, None] - expected).max(-1)
    assert distance.min(0).max() < 1e-3 and distance.min(1).max() < 1e-3
    count = script.module.load_checkpoint("runs/run0")["obs_stats"].count
    assert float(count) == pytest.approx(1e-4 + 3 * 17, rel=1e-9)

    (batch,) = recorded.gae
    for t in (4, 9, 14):
        final = normalized(np.array([(n, t // 5, 5) for n in range(3)]), t + 1)
        values = agent.get_value(torch.tensor(final, dtype=torch.float32)).detach()
        torch.testing.assert_close(batch["next_values"][t], values, rtol=0, atol=1e-3)


@scripts("continuous")
def test_rewards_are_scaled_as_in_baselines_over_all_rollouts(script, tiny, recorded):
    settings = {"num_envs": 3, "total_timesteps": 96, "learning_rate": 0.0, "gamma": 0.9}
    found = []
    for scaled in (False, True):
        recorded.gae.clear()
        script.module.train(tiny("Walk", **settings, scale_rewards=scaled, clip_reward=0.5))
        names = ("rewards", "done")
        found += [torch.cat([x[name] for x in recorded.gae]).numpy() for name in names]
    raw, done, rewards, _ = found
    expected = scale_rewards(raw, done == 1, done == 1, gamma=0.9, clip_reward=0.5)["scaled"]
    np.testing.assert_allclose(rewards, expected, rtol=1e-4)
    assert 0.1 < (np.abs(rewards) == 0.5).mean() < 0.9
    assert done.sum() > 5 and len(recorded.gae) == 2


@scripts("continuous", "multidiscrete", "atari", "lstm")
def test_every_episode_has_its_own_seed_and_every_environment_its_own_actions(script, tiny):
    """And every run its own weights to begin with; that a seed repeats itself shows in resuming."""
    settings = {"num_steps": 24, "total_timesteps": 96, "learning_rate": 0.0}
    a, b = (script.module.train(tiny(seed=seed, **settings))["agent"] for seed in (1, 2))
    draws = [x for env in fake_envs.Fake.made for x in env.draws]
    assert len(draws) == len(set(draws)) >= 16 and not same_weights(a, b)
    actions = [str([x.tolist() for x in env.actions]) for env in fake_envs.Fake.made]
    assert len(actions) == len(set(actions)) >= 4


@scripts("continuous", "atari", "lstm")
def test_a_bad_loss_stops_the_run_before_it_is_saved(script, tiny):
    args, calls = tiny(checkpoint_interval=1), []

    def poisoned(*arguments):
        metrics = script.module.ppo_update(*arguments)
        calls.append(metrics["losses/value_loss"].numel())
        if sum(calls) > args.update_epochs * args.num_minibatches:  # the second iteration
            metrics["losses/value_loss"] = metrics["losses/value_loss"] * np.nan
        return metrics

    sentence = "Not finite at step 64: losses/value_loss. "
    with pytest.raises(script.module.UsageError, match=sentence):
        script.module.train(args, update=poisoned)
    saved = script.module.load_checkpoint(f"runs/{args.run_name}")
    assert len(saved["updates"]) == 1


OTHERS = {"clip_reward": 0.1, "adam_eps": 0.1, "gae_lambda": 0.5, "gamma": 0.5, "clip_coef": 0.01}


@scripts("continuous", "atari", "lstm")
@slow_on("atari", "lstm")
def test_settings_reach_the_update(script, tiny):
    """Those that no other test of the loop varies."""
    settings = {"learning_rate": 0.02, "total_timesteps": 32}
    plain = script.module.train(tiny("Walk", **settings))["agent"]
    for name in OTHERS.keys() & vars(tiny()).keys():
        other = script.module.train(tiny("Walk", **settings, **{name: OTHERS[name]}))["agent"]
        assert not same_weights(plain, other), name
