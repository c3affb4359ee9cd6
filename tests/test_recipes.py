"""Each recipe does what its first sentence says. The slow tests train until it shows."""

import ast
import dataclasses
import functools
import importlib
import re
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import assert_same_runs, same_weights

import ppo_continuous_action as ppo
from benchmark.lab import logs
from recipes import (
    best_checkpoint,
    bigger_network,
    curiosity,
    export_policy,
    hybrid_actions,
    images,
    lstm,
    parallel_simulators,
    tanh_actions,
)

FOLDER = Path(tanh_actions.__file__).parent
TABLE = (FOLDER / "README.md").read_text()
TINY = ppo.Args(
    env_id="Pendulum-v1",
    num_envs=2,
    num_steps=32,
    num_minibatches=4,
    update_epochs=2,
    total_timesteps=256,
    checkpoint_interval=1,
    compile=False,
)


def acts_as_it_learns(result: dict) -> bool:
    return all(abs(x["check/acting"]) < 1e-6 for x in result["updates"])


def test_the_table_has_every_recipe_its_first_sentence_its_length_and_its_numbers():
    rows = re.findall(r"(?m)^\| \[(\w+)\]\(\1\.py\) \| (.+) \| (.+) \| (\d+) \|$", TABLE)
    texts = {x.stem: x.read_text() for x in sorted(FOLDER.glob("*.py"))}
    assert [name for name, *_ in rows] == [*texts]
    for name, sentence, measured, lines in rows:
        doc = ast.get_docstring(ast.parse(texts[name]))
        assert sentence == doc.partition("\n")[0] and int(lines) == texts[name].count("\n")
        numbers = r"-?\d+(?:\.\d+)?(?:e-\d+)?"
        assert {*re.findall(numbers, measured)} <= {*re.findall(numbers, doc)}, name


def test_squashed_actions_stay_within_bounds_and_their_probabilities_integrate_to_1():
    env = tanh_actions.Squash(
        gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), np.float32(-0.4), np.float32(0.4))
    )
    numbers = np.random.default_rng(0).normal(0, 100, (100, 1))
    assert all(env.env.action_space.contains(np.float32(env.action(x))) for x in numbers)
    agent, obs = ppo.Agent(3, 1), torch.randn(3)
    edges = torch.linspace(-0.4, 0.4, 100_001, dtype=torch.float64)
    actions = (edges[1:] + edges[:-1]) / 2
    numbers = torch.atanh(actions / 0.4)
    slopes = 0.4 * (1 - torch.tanh(numbers) ** 2)
    assert np.allclose(env.action(numbers.numpy()), actions)
    logprobs = agent.evaluate_actions(obs.expand(len(numbers), 3), numbers.float()[:, None])[1]
    density = logprobs.exp() / slopes
    assert abs((density * edges.diff()).sum().item() - 1) < 1e-3


def test_a_saved_policy_is_squashed_as_in_training():
    result = ppo.train(dataclasses.replace(TINY, run_name="squashed"), tanh_actions.make)
    assert acts_as_it_learns(result)
    env = tanh_actions.make()
    policy, obs = ppo.load_policy("runs/squashed", env), np.array([1.0, 0.0, 3.0])
    stats = ppo.load_checkpoint("runs/squashed")["obs_stats"]
    with torch.no_grad():
        mean = result["agent"].policy(
            torch.tensor(ppo.normalize_obs(obs, stats, TINY.clip_obs), dtype=torch.float32)
        )
    assert np.allclose(env.action(policy(obs)), 2 * np.tanh(mean.numpy()), atol=1e-6)


def test_evaluation_does_not_change_training_and_a_resumed_run_keeps_the_best(monkeypatch):
    plain = ppo.train(dataclasses.replace(TINY, run_name="plain"))["agent"]
    scores = iter([-5.0, -3.0, -4.0, -3.5])
    real = ppo.evaluate

    def evaluate(run_dir):
        real(run_dir, episodes=1)
        return [next(scores)]

    monkeypatch.setattr(ppo, "evaluate", evaluate)
    monkeypatch.setattr(ppo, "save_checkpoint", best_checkpoint.save_and_evaluate)
    half = dataclasses.replace(TINY, run_name="best", total_timesteps=128, anneal_lr=False)
    ppo.train(half)
    best = Path("runs/best/best/checkpoint.pt").read_bytes()
    ppo.train(dataclasses.replace(half, total_timesteps=256), resume="runs/best")
    assert Path("runs/best/best/checkpoint.pt").read_bytes() == best
    assert ppo.load_checkpoint("runs/best/best")["updates"][-1]["global_step"] == 128
    assert Path("runs/best/evaluations.csv").read_text().splitlines() == [
        "64,-5.0", "128,-3.0", "192,-4.0", "256,-3.5"
    ]  # fmt: skip
    assert [x.path for x in logs.find("runs/best")] == [Path("runs/best")]  # one run, not two
    scores = iter([-5.0, -3.0, -4.0, -3.5])
    whole = ppo.train(dataclasses.replace(TINY, run_name="whole"))["agent"]
    assert same_weights(whole, plain)


def test_simulators_in_other_processes_train_the_same_policy_to_the_bit(monkeypatch):
    make = functools.partial(gym.make, "Pendulum-v1")  # needs no PyTorch in the other processes
    alone = ppo.train(TINY, make)
    monkeypatch.setattr(ppo, "step_all", ppo.step_all)  # restored after the test
    together = parallel_simulators.train(dataclasses.replace(TINY, run_name="together"), make)
    assert_same_runs(alone, together)
    env = parallel_simulators.Remote(make)
    assert env.process.processes[0].__class__.__name__ == "SpawnProcess"  # a fork can hang
    assert len(ppo.evaluate("runs/together", lambda: env, episodes=1)) == 1


@pytest.mark.slow
def test_two_simulators_of_5_ms_are_faster_in_processes():
    """The fastest of 300 steps, which other processes on the machine delay least."""
    recipe, fastest = parallel_simulators, []
    for step_all, make in (
        (ppo.step_all, recipe.slow_pendulum),
        (recipe.step_all, lambda: recipe.Remote(recipe.slow_pendulum)),
    ):
        with ExitStack() as resources:
            envs = ppo.make_envs(resources, TINY, 2, make)
            times = []
            for env in envs:
                env.begin(0)
            for _ in range(300):
                start = time.perf_counter()
                step_all(envs, np.zeros((2, 1)))
                times.append(time.perf_counter() - start)
        fastest.append(min(times))
    assert fastest[0] > 1.5 * fastest[1]


@pytest.mark.slow
def test_exported_policies_act_as_the_saved_one():
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = ppo.train(TINY)
    env = gym.make("Pendulum-v1")
    export_policy.export(result["run_dir"], gym.spaces.Box(-2, 2, (1,), np.float64))
    policy = ppo.load_policy(result["run_dir"], env)
    obs = np.random.default_rng(0).normal(0, 3, (1000, 3))
    expected = np.array([policy(x) for x in obs])
    assert len(np.unique(expected)) > 500
    (moved,) = Path.cwd().glob("runs/*/policy.onnx")
    alone = shutil.copy(moved, "alone.onnx")  # one file is all that is needed
    (actions,) = runtime.InferenceSession(alone).run(None, {"obs": obs})
    assert np.abs(actions - expected).max() < 1e-6 and actions.dtype == np.float32
    scripted = torch.jit.load(result["run_dir"] / "policy.pt")
    assert np.abs(scripted(torch.tensor(obs)).numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("own", [True, False])
def test_what_cannot_be_exported_is_a_sentence(own, run_file):
    run_dir = ppo.train(TINY, tanh_actions.make)["run_dir"] if own else "nowhere"
    code, _, error = run_file(export_policy.__file__, f"{run_dir}")
    assert code == 2
    assert ("needs the bounds" if own else "nowhere/checkpoint.pt is missing") in error


def test_the_largest_score_is_the_choice():
    env = hybrid_actions.make()
    assert env.action_space.shape == (5,)
    choice, numbers = env.action(np.array([0.1, -3.0, 7.0, 2.0, 0.25]))
    assert choice == 2 and numbers == [0.25]


def test_an_encoder_sees_the_image_and_keeps_the_other_numbers(monkeypatch):
    agent = images.Agent(258, 2)
    obs = torch.randn(5, 3, 258)  # (T, N, D)
    values, logprobs, _ = agent.evaluate_actions(obs, torch.zeros(5, 3, 2))
    assert values.shape == logprobs.shape == (5, 3)
    encoder = agent.policy[0]
    assert encoder is agent.value[0]  # shared
    assert torch.equal(encoder(obs)[..., :2], obs[..., :2])
    changed = obs.clone()
    changed[..., 100] += 1
    assert not torch.equal(encoder(changed)[..., 2:], encoder(obs)[..., 2:])
    monkeypatch.setattr(ppo, "Agent", images.Agent)
    assert acts_as_it_learns(ppo.train(TINY, images.Touch))


def test_another_network_trains_acts_and_is_loaded(monkeypatch):
    monkeypatch.setattr(ppo, "Agent", bigger_network.Agent)
    result = ppo.train(dataclasses.replace(TINY, run_name="bigger"))
    assert acts_as_it_learns(result)
    assert sum(isinstance(x, torch.nn.LayerNorm) for x in result["agent"].policy) == 3
    assert len(ppo.evaluate("runs/bigger", episodes=1)) == 1


def test_the_bonus_falls_where_much_has_been_seen_and_is_not_in_the_return(monkeypatch):
    torch.manual_seed(0)
    novelty, rng = curiosity.Novelty(2), np.random.default_rng(0)
    for _ in range(1000):
        novelty(rng.normal([0, 0], 0.1))
    assert novelty(np.array([0.4, 0.4])) > 5 * novelty(np.zeros(2))
    monkeypatch.setattr(ppo, "Recorder", ppo.Recorder)
    result = curiosity.train(TINY)
    assert result["episodes"] and {x["return"] for x in result["episodes"]} <= {0.0, 1.0}
    env = curiosity.Curious(curiosity.Maze())
    env.begin(0)
    rewards = [env.step(np.ones(2))[1] for _ in range(3)]
    assert min(rewards) > 0 and env.total == 0


def test_the_memory_is_carried_from_step_to_step_and_cleared_where_an_episode_begins():
    torch.manual_seed(0)
    agent, obs, begins = lstm.Agent(2, 1), torch.randn(6, 3, 2), torch.zeros(6, 3)
    begins[0], begins[4, 1] = 1, 1
    values, _, _ = agent(obs, begins, torch.randn(3, 2, ppo.HIDDEN))
    state, steps = torch.zeros(3, 2, ppo.HIDDEN), []
    for x, begin in zip(obs, begins):
        value, _, state = agent(x[None], begin[None], state)
        steps.append(value)
    assert torch.allclose(torch.cat(steps), values, atol=1e-6)
    anew = agent(obs[4:], begins[4:], torch.randn(3, 2, ppo.HIDDEN))[0]
    assert torch.allclose(anew[:, 1], values[4:, 1], atol=1e-6)
    assert not torch.allclose(anew[:, 0], values[4:, 0], atol=1e-4)


@pytest.mark.slow
def test_an_lstm_remembers_the_cue_and_the_script_cannot():
    assert np.mean(lstm.train(lstm.SETTINGS, lstm.Recall)[1][-100:]) > 0.8
    settings = dataclasses.replace(lstm.SETTINGS, compile=False)
    episodes = ppo.train(settings, lstm.Recall)["episodes"]
    assert abs(np.mean([x["return"] for x in episodes[-300:]])) < 0.25


@pytest.mark.slow
def test_curiosity_finds_the_corner_that_the_script_does_not_find(monkeypatch):
    monkeypatch.setattr(ppo, "Recorder", ppo.Recorder)
    plain = ppo.train(curiosity.SETTINGS, curiosity.Maze)["episodes"]
    curious = curiosity.train(curiosity.SETTINGS)["episodes"]
    assert np.mean([x["return"] for x in plain[-100:]]) < 0.1
    assert np.mean([x["return"] for x in curious[-100:]]) > 0.8


@pytest.mark.slow
def test_choices_and_numbers_are_learned_together():
    episodes = ppo.train(hybrid_actions.SETTINGS, hybrid_actions.make)["episodes"]
    first, last = (np.mean([x["return"] for x in e]) for e in (episodes[:100], episodes[-100:]))
    assert first < 2 and last > 5


@pytest.mark.slow
def test_a_cnn_learns_from_images(monkeypatch):
    monkeypatch.setattr(ppo, "Agent", images.Agent)
    episodes = ppo.train(images.SETTINGS, images.Touch)["episodes"]
    assert np.mean([x["return"] for x in episodes[-100:]]) > -3.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid_world", "many_agents"])
def test_environments_from_elsewhere_train(monkeypatch, name):
    packages = {"grid_world": "minigrid", "many_agents": "mpe2"}
    pytest.importorskip(packages[name])
    recipe = importlib.import_module(f"recipes.{name}")
    if name == "many_agents":
        monkeypatch.setattr(ppo, "step_all", recipe.step_all)
    make = recipe.members() if name == "many_agents" else getattr(recipe, "make", None)
    steps = 2 * recipe.SETTINGS.num_envs * recipe.SETTINGS.num_steps
    result = recipe.ppo.train(dataclasses.replace(recipe.SETTINGS, total_timesteps=steps), make)
    assert acts_as_it_learns(result) and result["episodes"]
