"""Each recipe does what its first sentence says. The slow tests train until it shows."""

import dataclasses
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import SCRIPTS
from helpers import assert_same_runs, same_weights

import ppo_continuous_action as ppo
import ppo_vector_env
from benchmark.lab import logs
from recipes import (
    best_checkpoint,
    bigger_network,
    curiosity,
    discrete_actions,
    export_policy,
    export_robot_policy,
    hybrid_actions,
    images,
    lstm,
    many_agents,
    own_environment,
    parallel_simulators,
    play,
    rsl_rl_simulator,
    search_with_pruning,
    symmetry,
    tanh_actions,
    torch_simulator,
)

FOLDER = Path(tanh_actions.__file__).parent
TINY = ppo.Args(
    env_id="Pendulum-v1",
    num_envs=2,
    num_steps=32,
    num_minibatches=4,
    update_epochs=2,
    total_timesteps=256,
    checkpoint_interval=1,
    compile="no",
)


def acts_as_it_learns(result: dict) -> bool:
    return all(abs(x["check/acting"]) < 1e-6 for x in result["updates"])


# Those of language models have tests of their own, in tests/scripts/test_llm_recipes.py.
RECIPES = {
    x.stem: x.read_text() for x in sorted(FOLDER.glob("*.py")) if not x.stem.startswith("llm_")
}


# --- Imported and pasted ---


def paste(name: str, keep_main: bool = False) -> str:
    """The source of a copy into which a recipe is pasted, as the page says."""
    text = RECIPES[name]
    (script,) = re.findall(r"(?m)^import (ppo_\w+) as ppo\n", text)
    recipe = text[text.index('"""') :].replace(f"import {script} as ppo\n", "").replace("ppo.", "")
    main = 'if __name__ == "__main__":\n    main()\n'
    copy = (FOLDER.parent / f"{script}.py").read_text()
    assert copy.endswith(main)
    if keep_main:
        recipe = recipe[: recipe.index("if __name__")] + main
    return copy.removesuffix(main) + recipe


@pytest.fixture
def pasted(tmp_path, monkeypatch):
    """Import a copy into which a recipe is pasted."""

    def load(name):
        path = tmp_path / f"with_{name}.py"
        path.write_text(paste(name))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(path.stem)

    return load


def settings_of(module, **changes):
    """Those of TINY, of the module's own class."""
    return module.Args(**{**vars(TINY), **changes})


class DuelWorld:
    """A world as those of PettingZoo, with two agents, the second of which ends after two steps."""

    possible_agents = ("a", "b")

    def observation_space(self, name):
        return gym.spaces.Box(-10, 10, (1,), np.float32)

    def action_space(self, name):
        return gym.spaces.Box(0, 1, (1,), np.float32)

    def reset(self, seed=None):
        self.agents, self.steps = ["a", "b"], 0
        return {name: np.ones(1, np.float32) for name in self.agents}, {}

    def step(self, actions):
        assert [*actions] == self.agents  # others must not act
        self.steps += 1
        obs = {name: np.full(1, self.steps, np.float32) for name in self.agents}
        rewards = {name: float(1 + actions[name].item() / 10) for name in self.agents}
        ended = {"a": False, "b": self.steps == 2}
        cut = {"a": self.steps == 5, "b": False}
        acted = self.agents
        self.agents = [x for x in acted if not (ended[x] or cut[x])]
        flags = ({x: flag[x] for x in acted} for flag in (ended, cut))
        return obs, rewards, *flags, {}


@pytest.fixture
def duel(monkeypatch):
    """Instead of the package mpe2, a world of which one agent ends early."""
    world = types.SimpleNamespace(parallel_env=lambda **_: DuelWorld())
    monkeypatch.setitem(sys.modules, "mpe2", types.SimpleNamespace(simple_spread_v3=world))


@pytest.mark.parametrize(
    "name", [pytest.param("best_checkpoint", marks=pytest.mark.slow), "many_agents"]
)
def test_a_pasted_recipe_does_what_the_imported_one_does(name, pasted, duel):
    """The slow test below pastes all of them."""
    recipe, mine, results = importlib.import_module(f"recipes.{name}"), pasted(name), []
    for module, home in ((recipe, recipe.ppo), (mine, mine)):
        args = settings_of(home, run_name=home.__name__, checkpoint_interval=4)
        results.append(module.train(args, getattr(module, "members", lambda: None)()))
    assert_same_runs(*results)
    if name == "best_checkpoint":  # training stays the same; here is what it adds
        assert all((x["run_dir"] / "best/checkpoint.pt").exists() for x in results)
        tables = [(x["run_dir"] / "evaluations.csv").read_text() for x in results]
        assert tables[0] == tables[1] and tables[0].count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_pasted_recipe_for_language_models_does_what_the_imported_one_does(name, pasted):
    script, mine = SCRIPTS[name], pasted(f"{name}_on_reviews")
    vars(mine).update(NUM_SAMPLES=script.home.NUM_SAMPLES, NUM_EVALUATED=script.home.NUM_EVALUATED)
    imported = script.module.train(script.args())
    found = mine.train(mine.Args(**{**vars(script.args()), "run_name": "pasted"}))
    assert same_weights(imported["agent"], found["agent"])
    assert imported["updates"] == found["updates"] and imported["results"] == found["results"]


@pytest.mark.slow
def test_a_pasted_recipe_with_the_scripts_last_lines_runs_from_the_command_line(run_file, tmp_path):
    path = tmp_path / "curious.py"
    path.write_text(paste("curiosity", keep_main=True))
    line = "--env-id Maze-v0 --num-steps 32 --num-envs 2 --num-minibatches 4 --compile no "
    line += "--total-timesteps 256 --update-epochs 2 --run-name "
    code, _, error = run_file(path, line + "pasted")
    assert code == 0, error
    args = dataclasses.replace(TINY, env_id="Maze-v0", checkpoint_interval=25)
    plain, curious = ppo.train(args), curiosity.train(dataclasses.replace(args, run_name="mine"))
    agent = ppo.load_checkpoint("runs/pasted")["agent"]
    assert same_weights(agent, curious["agent"]) and not same_weights(agent, plain["agent"])


NEED_A_RUN = {"export_policy", "export_robot_policy", "play"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES.keys() - NEED_A_RUN))
def test_each_recipe_runs_with_its_defaults_and_pasted_it_says_the_same(name, tmp_path):
    packages = {"grid_world": "minigrid", "many_agents": "mpe2"}
    if name in packages:
        pytest.importorskip(packages[name])
    (tmp_path / "copy_of_script.py").write_text(paste(name))
    environ = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "CUDA_VISIBLE_DEVICES": ""}
    outputs = []
    for command in (["-m", f"recipes.{name}"], ["copy_of_script.py"]):
        done = subprocess.run(
            [sys.executable, *command], env=environ, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        words = re.sub(r"in \d+ s\b|Logs and (checkpoints|results): .*", "", done.stdout)
        outputs.append(words.splitlines())
    if name == "parallel_simulators":  # each says how fast it is, one after another and together
        for alone, together in ([float(x.split()[0]) for x in y if x] for y in outputs):
            assert together > alone
    elif name.endswith("_on_reviews"):
        assert outputs[0] == outputs[1] and "Reward model: " in outputs[0][0]
    else:
        assert outputs[0] == outputs[1] and "eturn" in outputs[0][-1]


@pytest.mark.parametrize(
    "name, package, line",
    [
        ("export_policy", "onnx", "runs/mine"),
        ("export_robot_policy", "onnx", "runs/mine"),
        ("grid_world", "minigrid", ""),
        ("many_agents", "mpe2", ""),
        ("search_with_pruning", "optuna", ""),
    ],
)
def test_a_missing_package_is_one_sentence(name, package, line, run_file, monkeypatch):
    ppo.train(dataclasses.replace(TINY, run_name="mine"))
    for module in [x for x in sys.modules if x.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, error = run_file(FOLDER / f"{name}.py", line)
    assert code == 2 and "Traceback" not in error
    assert re.search(rf"\b{package}\b.*: pip install {package}==\d", error)


@pytest.mark.parametrize("name", ["best_checkpoint", "bigger_network"])
def test_a_bad_flag_of_a_recipe_is_one_sentence(name, run_file):
    code, _, error = run_file(FOLDER / f"{name}.py", "--gamma 2")
    assert (code, error) == (2, "Error: --gamma (2.0) must be from 0 to 1.\n")


# --- Each recipe ---


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


def test_actions_without_bounds_cannot_be_squashed():
    env = gym.make("Pendulum-v1")
    for high in (np.inf, [np.inf, 1.0]):
        high = np.broadcast_to(np.float32(high), (2,))
        env.action_space = gym.spaces.Box(-high, high)
        with pytest.raises(ppo.UsageError, match=r"Actions are Box.* tanh needs finite bounds"):
            tanh_actions.Squash(env)


def test_evaluation_does_not_change_training_and_a_resumed_run_keeps_the_best(monkeypatch):
    plain = ppo.train(dataclasses.replace(TINY, run_name="plain"))["agent"]
    scores = iter([-5.0, -3.0, -4.0, -3.5])
    real = ppo.evaluate

    def evaluate(saved, env_factory):
        real(saved, env_factory, episodes=1)
        return [next(scores)]

    monkeypatch.setattr(ppo, "evaluate", evaluate)
    half = dataclasses.replace(TINY, run_name="best", total_timesteps=128, anneal_lr=False)
    best_checkpoint.train(half)
    best = Path("runs/best/best/checkpoint.pt").read_bytes()
    best_checkpoint.train(dataclasses.replace(half, total_timesteps=256), resume="runs/best")
    assert Path("runs/best/best/checkpoint.pt").read_bytes() == best
    assert ppo.load_checkpoint("runs/best/best")["updates"][-1]["global_step"] == 128
    assert Path("runs/best/evaluations.csv").read_text().splitlines() == [
        "64,-5.0", "128,-3.0", "192,-4.0", "256,-3.5"
    ]  # fmt: skip
    assert [x.path for x in logs.find("runs/best")] == [Path("runs/best")]  # one run, not two
    scores = iter([-3.0, -4.0])  # of the second iteration and of the last one
    seldom = dataclasses.replace(TINY, run_name="whole", checkpoint_interval=2)
    whole = best_checkpoint.train(seldom)["agent"]
    assert same_weights(whole, plain)
    assert Path("runs/whole/evaluations.csv").read_text() == "128,-3.0\n256,-4.0\n"


@pytest.mark.slow
def test_simulators_in_other_processes_train_the_same_policy_to_the_bit(pasted):
    make = functools.partial(gym.make, "Pendulum-v1")  # needs no PyTorch in the other processes
    alone = ppo.train(TINY, make)
    together = parallel_simulators.train(dataclasses.replace(TINY, run_name="together"), make)
    assert_same_runs(alone, together)
    env = parallel_simulators.Remote(make)
    assert env.process.processes[0].__class__.__name__ == "SpawnProcess"  # a fork can hang
    assert len(ppo.evaluate("runs/together", lambda: env, episodes=1)) == 1
    mine = pasted("parallel_simulators")
    sent = []
    send = mine.Remote.send
    mine.Remote.send = lambda self, action: (sent.append(self), send(self, action))
    assert_same_runs(alone, mine.train(settings_of(mine, run_name="pasted")))
    assert [sent.count(x) for x in {*sent}] == [TINY.total_timesteps / 2] * 2


def test_observations_of_other_processes_may_be_nested():
    class Nested(gym.Env):  # in a function, so that other processes need not import the tests
        image = gym.spaces.Box(0, 255, (2, 3), np.uint8)
        pair = gym.spaces.Tuple((gym.spaces.Discrete(5), gym.spaces.Box(-1, 1, (1,))))
        observation_space = gym.spaces.Dict({"image": image, "pair": pair})
        action_space = gym.spaces.Box(-1, 1, (1,))

        def observe(self):
            pixels = self.np_random.integers(256, size=(2, 3), dtype=np.uint8)
            number = self.np_random.uniform(-1, 1, 1).astype(np.float32)
            return {"image": pixels, "pair": (self.np_random.integers(5), number)}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observe(), {}

        def step(self, action):
            return self.observe(), 0.0, False, False, {}

    remote, local = parallel_simulators.Remote(Nested), Nested()
    space, action = local.observation_space, np.zeros(1, np.float32)
    pairs = [(remote.reset(seed=3), local.reset(seed=3)), (remote.step(action), local.step(action))]
    remote.close()
    for (there, *_), (here, *_) in pairs:
        assert np.array_equal(ppo.vector(space, there), ppo.vector(space, here))


@pytest.mark.slow
def test_two_simulators_of_5_ms_are_faster_in_processes():
    """The fastest of 300 steps, which other processes on the machine delay least."""
    recipe, fastest = parallel_simulators, []
    for step_all, make in (
        (ppo.step_all, recipe.slow_pendulum),
        (recipe.step_together, lambda: recipe.Remote(recipe.slow_pendulum)),
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
    scores = np.array([0.1, -3.0, 7.0, 2.0, 0.25])
    choice, numbers = env.action(scores)
    assert choice == 2 and numbers == [0.25]
    darts = hybrid_actions.Darts()
    darts.action_space = gym.spaces.Tuple([gym.spaces.Discrete(4, start=1), darts.action_space[1]])
    assert hybrid_actions.Scores(darts).action(scores)[0] == 3  # of 1, 2, 3 and 4


def test_an_encoder_sees_the_image_and_keeps_the_other_numbers():
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
    assert acts_as_it_learns(images.train(TINY, images.Touch))


def test_another_network_trains_acts_and_is_loaded():
    result = bigger_network.train(dataclasses.replace(TINY, run_name="bigger"))
    assert acts_as_it_learns(result)
    assert sum(isinstance(x, torch.nn.LayerNorm) for x in result["agent"].policy) == 3
    assert len(ppo.evaluate(bigger_network.load_checkpoint("runs/bigger"), episodes=1)) == 1


@pytest.mark.slow
def test_the_bonus_falls_where_much_has_been_seen_and_is_not_in_the_return():
    novelty, rng = curiosity.Novelty(2, seed=0), np.random.default_rng(0)
    for _ in range(1000):
        novelty(rng.normal([0, 0], 0.1))
    assert novelty(np.array([0.4, 0.4])) > 5 * novelty(np.zeros(2))
    args = dataclasses.replace(TINY, env_id="Maze-v0")
    before, curious, again, after = (
        train(dataclasses.replace(args, run_name=f"run{k}"))
        for k, train in enumerate((ppo.train, curiosity.train, curiosity.train, ppo.train))
    )
    assert curious["episodes"] and {x["return"] for x in curious["episodes"]} <= {0.0, 1.0}
    assert_same_runs(curious, again)  # each run has its own networks
    assert_same_runs(before, after)  # the script stays as it is
    with ExitStack() as resources:
        envs, step = ppo.make_envs(resources, args, 2, None), curiosity.CuriousSteps()
        for env in envs:
            env.begin(0)
        rewards = [x[1] for _ in range(3) for x in step(envs, np.ones((2, 2)))]
        assert min(rewards) > 0 and [env.total for env in envs] == [0, 0]


def test_an_agent_that_ends_early_waits_for_the_others(duel):
    args = dataclasses.replace(TINY, run_name="duel")
    result = many_agents.train(args, many_agents.members())
    assert {x["length"] for x in result["episodes"]} == {5}
    first, second = result["episodes"][::2], result["episodes"][1::2]
    assert all(5 <= x["return"] <= 5.5 for x in first)
    assert all(2 <= x["return"] <= 2.2 for x in second)
    make = many_agents.members()
    envs = [ppo.Recorder(make()), ppo.Recorder(make())]
    for env in envs:
        env.begin(0)
    steps = [many_agents.step_world(envs, np.zeros((2, 1))) for _ in range(5)]
    assert [x[0].item() for _, x in steps] == [1, 2, 0, 0, 0]
    assert [x[2:4] for _, x in steps] == [(False, False)] * 4 + [(True, False)]
    assert [x[2:4] for x, _ in steps] == [(False, False)] * 4 + [(False, True)]


@pytest.mark.slow
def test_bad_runs_of_a_search_are_stopped_and_the_others_stay_the_same(monkeypatch):
    optuna = search_with_pruning.optuna
    settings = dataclasses.replace(
        search_with_pruning.SETTINGS, num_steps=32, total_timesteps=768, num_minibatches=2
    )
    monkeypatch.setattr(search_with_pruning, "SETTINGS", settings)
    whole, pruned = (
        search_with_pruning.search(pruner, trials=4, seed=3)
        for pruner in (optuna.pruners.NopPruner(), optuna.pruners.MedianPruner(n_startup_trials=2))
    )
    assert search_with_pruning.steps_of(whole) == 4 * 768
    assert search_with_pruning.steps_of(pruned) < 4 * 768
    states = [x.state.name for x in pruned.trials]
    assert {*states} == {"COMPLETE", "PRUNED"}
    for x, y in zip(whole.trials, pruned.trials):
        assert x.params == y.params
        assert y.intermediate_values.items() <= x.intermediate_values.items()
        assert (len(y.intermediate_values) < 6) <= (y.state.name == "PRUNED")


def test_the_training_loop_with_memory_closes_its_environments():
    closed = []

    class Noted(lstm.Recall):
        def step(self, action):
            if self.left == 1 and failing:
                raise RuntimeError("broken")
            return super().step(action)

        def close(self):
            closed.append(self)

    args = dataclasses.replace(lstm.SETTINGS, num_envs=4, num_steps=32, total_timesteps=128)
    failing = False
    lstm.train(args, Noted)
    assert len(closed) == 4
    failing = True
    with pytest.raises(RuntimeError, match="broken"):
        lstm.train(args, Noted)
    assert len(closed) == 8


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
    episodes = ppo.train(lstm.SETTINGS, lstm.Recall)["episodes"]
    assert abs(np.mean([x["return"] for x in episodes[-300:]])) < 0.25


@pytest.mark.slow
def test_curiosity_finds_the_corner_that_the_script_does_not_find():
    curious = curiosity.train(curiosity.SETTINGS)["episodes"]
    plain = ppo.train(curiosity.SETTINGS)["episodes"]
    assert np.mean([x["return"] for x in plain[-100:]]) < 0.1
    assert np.mean([x["return"] for x in curious[-100:]]) > 0.8


@pytest.mark.slow
def test_the_point_of_the_own_environment_learns_to_stay_at_0():
    fast = {"compile": "no", "num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-3}
    settings = dataclasses.replace(own_environment.SETTINGS, **fast)
    returns = [x["return"] for x in ppo.train(settings, own_environment.make)["episodes"]]
    assert np.mean(returns[:50]) < -9 < -4 < np.mean(returns[-50:])


@pytest.mark.slow
def test_choices_and_numbers_are_learned_together():
    episodes = ppo.train(hybrid_actions.SETTINGS, hybrid_actions.make)["episodes"]
    first, last = (np.mean([x["return"] for x in e]) for e in (episodes[:100], episodes[-100:]))
    assert first < 2 and last > 5


@pytest.mark.slow
def test_a_cnn_learns_from_images():
    episodes = images.train(images.SETTINGS, images.Touch)["episodes"]
    assert np.mean([x["return"] for x in episodes[-100:]]) > -3.5


def test_the_simulator_in_pytorch_is_gymnasiums_pendulum():
    """Many pendulums with random actions, each beside Gymnasium's in the same state."""
    mine = torch_simulator.Pendulums(3, 1, torch.device("cpu"))
    obs, _ = mine.reset()
    envs = [gym.make("Pendulum-v1").unwrapped for _ in range(3)]
    for i, env in enumerate(envs):
        env.reset(seed=0)
        env.state = np.array([mine.angle[i].item(), mine.speed[i].item()])
    rng = np.random.default_rng(0)
    for step in range(torch_simulator.LIMIT):
        actions = rng.uniform(-1, 1, (3, 1)).astype(np.float32)
        obs, rewards, terminated, truncated, infos = mine.step(torch.tensor(actions))
        theirs = [env.step(2 * action) for env, action in zip(envs, actions)]
        np.testing.assert_allclose(infos["final_obs"], [x[0] for x in theirs], atol=2e-3)
        np.testing.assert_allclose(rewards, [x[1] for x in theirs], atol=2e-2)
        for i, env in enumerate(envs):  # so that rounding does not add up
            env.state = np.array([mine.angle[i].item(), mine.speed[i].item()])
        last = step == torch_simulator.LIMIT - 1
        assert truncated.tolist() == [last] * 3 and not terminated.any()
    assert (mine.age == 0).all() and not np.allclose(obs, infos["final_obs"])
    assert (mine.angle.abs() <= np.pi).all() and (mine.speed.abs() <= 1).all()


def test_the_simulator_in_pytorch_trains_and_its_time_limit_is_no_failure():
    settings = dataclasses.replace(
        torch_simulator.SETTINGS, num_envs=4, num_steps=110, num_minibatches=4, total_timesteps=880
    )
    result = torch_simulator.ppo.train(settings, torch_simulator.Pendulums)
    assert [x["length"] for x in result["episodes"]] == [torch_simulator.LIMIT] * 4
    assert result["args"].make == "recipes.torch_simulator:Pendulums"


# --- Robots ---

ROBOTS = ppo_vector_env.Args(
    num_envs=4, num_steps=16, num_minibatches=4, update_epochs=2, hidden=(8,), total_timesteps=192
)


def robots(make, run_name="robots", **options):
    args = dataclasses.replace(ROBOTS, run_name=run_name, checkpoint_interval=1)
    return ppo_vector_env.train(args, make, **options)


def test_choices_are_drawn_with_their_probabilities_and_the_likeliest_is_deployed():
    layout = {"parts": {"obs": 2}, "low": [0.0], "high": [2.0]}
    agent = discrete_actions.Chooser(layout, ppo_vector_env.Args())
    agent.get_mean = lambda obs: torch.tensor([0.2, 0.7, 0.1]).log().expand(len(obs), 3)
    obs = torch.zeros(20_000, 2)
    noise = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(1))
    choices = agent.act(obs, noise)
    shares = choices.flatten().long().bincount() / len(choices)
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.7, 0.1]), rtol=0, atol=0.02)
    assert agent.act(obs[:1], torch.full((1, 1), 9.0)).item() == 2  # the sum may round to below 1
    logprobs, entropies = agent.evaluate_actions(obs, choices)
    assert logprobs[choices[:, 0] == 1].exp().mean() == pytest.approx(0.7)
    assert entropies[0].item() == pytest.approx(0.8018, abs=1e-4)
    assert agent(obs[:2]).tolist() == [[1], [1]]


@pytest.mark.parametrize("name", ["make_cart_pole", "make_grid_world"])
def test_discrete_actions_train_resume_and_are_evaluated(name):
    make = getattr(discrete_actions, name)
    with ExitStack() as resources:
        sim = ppo_vector_env.make_simulator(resources, ROBOTS, 4, 1, make)
    assert sim.begins_all == (name == "make_cart_pole")  # as of all simulators of EnvPool
    found = robots(make, agent_class=discrete_actions.Chooser)
    assert found["updates"][0]["losses/clipfrac"] >= 0 and found["updates"][0]["check/kl"] > 0
    assert found["updates"][0]["check/first_kl"] == pytest.approx(0, abs=1e-6)
    more = dataclasses.replace(ROBOTS, total_timesteps=256)
    chooser = {"agent_class": discrete_actions.Chooser}
    again = ppo_vector_env.train(more, make, found["run_dir"], **chooser)
    assert len(again["updates"]) == 4
    scores = ppo_vector_env.evaluate(found["run_dir"], 3, make=make, **chooser)
    assert len(scores) == 3
    policy = ppo_vector_env.load_policy(found["run_dir"], **chooser)
    assert set(policy(torch.randn(9, 4)).flatten().tolist()) <= {0, 1, 2, 3}


def test_the_grid_world_has_its_rules():
    grid = discrete_actions.GridWorld(3, 1, torch.device("cpu"))
    grid.reset()
    grid.place = torch.tensor([[0, 0], [4, 4], [2, 2]])
    grid.goal = torch.tensor([[1, 0], [0, 0], [0, 4]])
    obs, rewards, found, cut, infos = grid.step(torch.tensor([1, 0, 2]))
    assert found.tolist() == [True, False, False] and not cut.any()
    assert rewards.tolist() == pytest.approx([0.9, -0.1, -0.1])
    assert infos["final_obs"].tolist() == [[1, 0, 1, 0], [4, 4, 0, 0], [2, 1, 0, 4]]
    assert obs[1:].tolist() == infos["final_obs"][1:].tolist() and grid.age.tolist() == [0, 1, 1]
    grid.age[:] = 49
    grid.place, grid.goal = torch.zeros(3, 2).long(), torch.full((3, 2), 4)  # nobody arrives
    assert grid.step(torch.tensor([0, 0, 0]))[3].all()


def test_a_simulator_for_rsl_rl_trains_and_its_time_outs_are_no_failures():
    envs = rsl_rl_simulator.make(4, 1, torch.device("cpu"))
    envs.reset()
    envs.episode_length_buf[:] = torch.tensor([49, 3, 3, 3])
    envs.envs.place[:] = torch.tensor([0.0, 1.99, 0.0, 0.0])
    _, rewards, terminated, truncated, _ = envs.step(torch.ones(4, 1))
    assert terminated.tolist() == [False, True, False, False]
    assert truncated.tolist() == [True, False, False, False] and len(rewards) == 4
    with ExitStack() as resources:
        sim = ppo_vector_env.make_simulator(resources, ROBOTS, 8, 1, rsl_rl_simulator.make)
        sim.stagger()
        assert len({*sim.envs.episode_length_buf.tolist()}) > 4
    found = robots(rsl_rl_simulator.make)
    assert found["updates"][-1]["distance"] > 0  # a term of its log
    assert len(ppo_vector_env.evaluate(found["run_dir"], 2, make=rsl_rl_simulator.make)) == 2


def test_each_sample_is_learned_from_with_its_mirror_image():
    found = robots(torch_simulator.Pendulums, update=symmetry.update)
    agent = found["agent"]
    raw_obs, actions = torch.randn(6, 3), torch.randn(6, 1)
    rest = torch.randn(4, 6)
    batch = ppo_vector_env.Batch(agent.normalize_obs(raw_obs), actions, *rest)
    both = symmetry.mirrored(agent, batch)
    image = raw_obs * torch.tensor([1, -1, -1])
    torch.testing.assert_close(both.obs[6:], agent.normalize_obs(image), rtol=1e-3, atol=1e-4)
    assert torch.equal(both.obs[:6], batch.obs) and torch.equal(both.actions[6:], -actions)
    for x, y in zip(both[2:], batch[2:]):
        assert torch.equal(x, torch.cat([y, y]))
    seen = []
    replacement = lambda *inputs: seen.append(inputs) or []  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_vector_env, "ppo_update", replacement)
        symmetry.update(agent, {}, batch, torch.tensor([[0, 5], [2, 3]]), 0.1, found["args"])
    assert seen[0][3].tolist() == [[0, 5, 6, 11], [2, 3, 8, 9]]


class Screen(torch_simulator.Pendulums):
    made: ClassVar[list] = []

    def __init__(self, num_envs, seed, device, render_mode=None):
        super().__init__(num_envs, seed, device)
        self.render_mode, self.drawn = render_mode, 0
        Screen.made.append(self)

    def render(self):  # one picture of all
        self.drawn += 1
        return np.zeros((16, 16, 3), np.uint8) if self.render_mode == "rgb_array" else None


def test_a_policy_is_played_in_a_window_or_as_a_film(monkeypatch):
    monkeypatch.setattr(ppo_vector_env, "let_draw", lambda: None)
    run_dir = robots(Screen)["run_dir"]
    play.play(run_dir, 7, screen=True, make=Screen)
    assert (Screen.made[-1].render_mode, Screen.made[-1].drawn) == ("human", 7)
    play.play(run_dir, 7, screen=False, make=Screen)
    assert (Screen.made[-1].render_mode, Screen.made[-1].drawn) == ("rgb_array", 7)
    (film,) = run_dir.glob("videos/*.mp4")
    film.unlink()
    without_mode = lambda num_envs, seed, device: Screen(num_envs, seed, device, "rgb_array")  # noqa: E731
    play.play(run_dir, 7, screen=True, make=without_mode)  # which has no window
    assert film.exists()
    for variable, expected in (("DISPLAY", True), ("NOTHING", False)):
        monkeypatch.setattr(os, "environ", {variable: ":0"})
        monkeypatch.setattr(sys, "platform", "linux")
        assert play.has_screen() == expected


def test_the_best_checkpoint_of_robots_is_kept(monkeypatch):
    """And evaluations in between change nothing, also where an agent of one's own learns."""
    make, evaluate = discrete_actions.make_grid_world, ppo_vector_env.evaluate
    chooser = {"agent_class": discrete_actions.Chooser}
    plain = robots(make, "plain", **chooser)
    scores = iter([[1.0], [3.0], [2.0]])
    score = lambda *x, **y: evaluate(*x, **y) and next(scores)  # noqa: E731
    monkeypatch.setattr(ppo_vector_env, "evaluate", score)
    keep = functools.partial(best_checkpoint.keep_best, env_factory=make, robots=ppo_vector_env)
    found = robots(make, on_iteration=keep, **chooser)
    run_dir = found["run_dir"]
    assert (run_dir / "evaluations.csv").read_text() == "64,1.0\n128,3.0\n192,2.0\n"
    best = ppo_vector_env.load_checkpoint(run_dir / "best", discrete_actions.Chooser)
    assert len(best["updates"]) == 2
    for x, y in zip(found["agent"].parameters(), plain["agent"].parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
def test_exported_policies_of_robots_act_as_the_saved_one_and_need_only_its_columns():
    class Privileged(torch_simulator.Pendulums):
        """The value function alone sees the pendulum's speed."""

        def reset(self, **options):
            obs, infos = super().reset(**options)
            return {"speed": obs[:, 2:], "policy": obs[:, :2]}, infos

        def step(self, actions):
            obs, *rest, infos = super().step(actions)
            last = infos["final_obs"]
            infos = infos | {"final_obs": {"speed": last[:, 2:], "policy": last[:, :2]}}
            return {"speed": obs[:, 2:], "policy": obs[:, :2]}, *rest, infos

    args = dataclasses.replace(ROBOTS, policy_obs=("policy",))
    found = ppo_vector_env.train(args, Privileged)
    assert export_robot_policy.export(found["run_dir"]) < 1e-5
    about = json.loads((found["run_dir"] / "policy.json").read_text())
    assert about == {"parts": {"policy": 2}, "actions": 1}
    scripted = torch.jit.load(found["run_dir"] / "policy.pt")
    obs = torch.randn(3, 2)
    torch.testing.assert_close(scripted(obs), ppo_vector_env.load_policy(found["run_dir"])(obs))
    policy = ppo_vector_env.load_policy(found["run_dir"])
    policy.agent.low = policy.agent.low + 1e9  # other actions than those of the files
    policy.agent.high = policy.agent.low
    with pytest.raises(ppo_vector_env.UsageError, match="acts differently, by up to"):
        export_robot_policy.check(found["run_dir"], policy, obs)


def test_noise_of_the_loop_with_memory_is_its_own_though_an_environment_seeds_pytorch():
    actions = []

    class Seeding(lstm.Recall):
        def reset(self, **options):
            torch.manual_seed(0)
            return super().reset(**options)

        def step(self, action):
            actions.append(action.item())
            return super().step(action)

    args = dataclasses.replace(lstm.SETTINGS, num_envs=4, num_steps=32, total_timesteps=128)
    lstm.train(args, Seeding)
    inside = [x for x in actions if abs(x) < 1]  # others are clipped
    assert len({*inside}) == len(inside) > 64
