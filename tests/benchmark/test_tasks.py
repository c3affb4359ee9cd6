"""The tasks of the benchmark: their rules, their best returns, and the variants that play them."""

import dataclasses
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from gymnasium.utils.env_checker import check_env
from torch import nn

from benchmark.evidence.suites import SUITES, tasks
from benchmark.lab.definitions import Folders
from benchmark.lab.run import select

BEST_IN_POINTS = -149 / 21  # on average
BEST_WITHOUT_ENDS = 0.66  # in Recall


def play(env, seed, policy):
    """Observations and rewards of an episode."""
    (obs, _), over, seen, rewards = env.reset(seed=seed), False, [], []
    while not over:
        seen.append(obs)
        obs, reward, terminated, truncated, _ = env.step(policy(obs))
        rewards.append(reward)
        over = terminated or truncated
    return np.array(seen), np.array(rewards)


@pytest.mark.parametrize("env", [tasks.Points(), tasks.Joint(tasks.Points()), tasks.Recall()])
def test_tasks_are_environments_of_gymnasium(env):
    check_env(env, skip_render_check=True)


def test_best_in_points_is_what_the_shortest_ways_earn():
    reach = np.arange(1, 5)
    env = gym.make("Points-v0")
    home = lambda obs: (np.clip(-obs, -reach, reach) + reach).astype(int)  # noqa: E731
    rewards = [play(env, seed, home)[1] for seed in range(1000)]
    assert {len(x) for x in rewards} == {20}
    starts = np.abs(np.arange(-10, 11))[:, None, None]
    rests = np.maximum(starts - np.arange(1, 21)[:, None] * reach, 0)  # after each step
    assert -rests.sum(1).mean() == pytest.approx(BEST_IN_POINTS)
    assert np.sum(rewards, axis=1).mean() == pytest.approx(BEST_IN_POINTS, abs=0.2)


def test_a_joint_action_is_one_of_each_component():
    points, joint = tasks.Points(), tasks.Joint(tasks.Points())
    assert joint.action_space.n == 3 * 5 * 7 * 9 == 945
    for number, action in ((0, (0, 0, 0, 0)), (944, (2, 4, 6, 8)), (9, (0, 0, 1, 0))):
        (start, _), _ = joint.reset(seed=2), points.reset(seed=2)
        obs, reward, *_ = joint.step(number)
        assert (obs == start + action - [1, 2, 3, 4]).all()
        assert reward == points.step(np.array(action))[1] == -np.abs(obs).mean()


def test_recall_pays_who_remembers_the_first_frame_and_nobody_else():
    env, earned, white, lengths = tasks.Recall(), {0: [], 1: []}, [], []
    for seed in range(1000):
        for answer, found in earned.items():
            frames, rewards = play(env, seed, lambda _: answer)  # noqa: B023
            assert not frames[1:].any() and frames[0].min() == frames[0].max()
            assert not rewards[:-1].any()
            found.append(rewards[-1] * (1 if frames[0].any() == answer else -1))
        white.append(frames[0].any())
        lengths.append(len(frames))
    assert set(earned[0] + earned[1]) == {1}
    assert min(lengths) == 6 and np.mean(lengths) == pytest.approx(15, abs=1)
    assert np.mean(white) == pytest.approx(0.5, abs=0.05)


def test_recall_without_the_ends_of_episodes_cannot_be_solved():
    """Then all that frames tell is the time since the last white one."""
    lengths, followed = np.zeros(1000), np.zeros(1000)  # shares of white and of later episodes
    lengths[6:] = 0.1 * 0.9 ** np.arange(994)
    ends = lengths  # that of the n-th after a white one, if all of these are black
    for _ in range(40):
        ends = np.convolve(lengths, ends)[:1000] / 2
        followed += ends
    assert np.abs(lengths - followed).sum() / 2 == pytest.approx(BEST_WITHOUT_ENDS, abs=1e-3)

    env, since, earned = tasks.Recall(), 0, []
    for seed in range(2000):
        (frame, _), over = env.reset(seed=seed), False
        while not over:
            since = 1 if frame.any() else since + 1  # steps, this one included
            likely = lengths[min(since, 999)] > followed[min(since, 999)]
            frame, reward, over, *_ = env.step(int(likely))
        earned.append(reward)
    assert np.mean(earned) == pytest.approx(BEST_WITHOUT_ENDS, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["multidiscrete", "memory"])
def test_each_variant_plays_the_task_and_learns_otherwise(suite, monkeypatch, changed_copy):
    monkeypatch.setitem(gym.registry, "Points-v0", gym.registry["Points-v0"])  # is put back
    short = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
    short["total_timesteps"], weights = 128, {}
    for made in select(SUITES[suite], Folders(), seeds=(1,)):
        module = changed_copy(made.script, made.suite.variants[made.variant].replaced)
        args = tyro.cli(module.Args, args=[*made.flags, "--run-name", made.variant or "usual"])
        slow = dict.fromkeys({"bfloat16", "compile"} & {*vars(args)}, False)
        results = module.train(dataclasses.replace(args, **short, **slow))
        _, second = results["updates"]
        assert (second["check/first_kl"] < 1e-9) == (made.variant != "shuffled-steps")
        returns = {x["return"] for x in results["episodes"]}
        assert returns <= {-1.0, 1.0} if suite == "memory" else all(x < 0 for x in returns)
        weights[made.variant] = nn.utils.parameters_to_vector(results["agent"].parameters())
    for a, b in itertools.combinations(weights, 2):
        same = weights[a].shape == weights[b].shape and torch.equal(weights[a], weights[b])
        assert not same, (a, b)
