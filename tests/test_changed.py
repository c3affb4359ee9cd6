"""A script copied, changed and used as its users do: what they change works, or is named."""

import dataclasses
import importlib.util
import json
import math
import re
import time
from pathlib import Path

import fake_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import SCRIPTS, flags, on
from conftest import same_weights
from torch import nn

import ppo_continuous_action as ppo

HOME = SCRIPTS["continuous"]


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Import a copy of the continuous script with some texts replaced: changed({old: new})."""
    monkeypatch.chdir(tmp_path)

    def load(changes, name="my_ppo"):
        text = HOME.path.read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(importlib.sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def small(module=ppo, **changes):
    return module.Args(**{**dataclasses.asdict(HOME.args(env_id="FakeWalk-Box-v0")), **changes})


# --- Constants of the compiled update ---

BONUS = 1.0


def update_of_constants(agent, adam, batch, mb, schedule, args):
    """With a number from a setting, one from the agent and a global one."""
    factor = args.ent_coef + agent.bonus + BONUS
    adam["weights"] -= schedule["learning_rate"] * factor * batch[0][mb].mean()
    return {}


def given(**settings):
    """What an update is called with, always the same."""
    torch.manual_seed(0)
    agent, args = ppo.Agent(3, 2, ppo.Args(**settings)), ppo.Args(**settings)
    agent.bonus = 0.5
    weights = nn.utils.parameters_to_vector(ppo.learned(agent)).detach()
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    nn.utils.vector_to_parameters(weights, ppo.learned(agent))
    batch = [torch.randn(16, 3), torch.randn(16, 2), *torch.randn(4, 16)]
    numbers = {"learning_rate": 0.1, "clip_coef": 0.2, "bias_correction": 1.0}
    schedule = {name: torch.tensor(x) for name, x in numbers.items()}
    return agent, adam, batch, torch.arange(8), schedule, args


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request, monkeypatch):
    """Dynamo alone, which sees what changes; in the slow tests with the compiler behind it."""
    real = torch.compile

    def compile(function, fullgraph, options):
        options = {"guard_filter_fn": options["guard_filter_fn"]}
        return real(function, fullgraph=fullgraph, backend="eager", options=options)

    if request.param == "eager":
        monkeypatch.setattr(torch, "compile", compile)


def change_setting(agent, args, monkeypatch):
    return dataclasses.replace(args, ent_coef=0.7)


def change_attribute(agent, args, monkeypatch):
    agent.bonus = 0.7
    return args


def change_global(agent, args, monkeypatch):
    monkeypatch.setitem(globals(), "BONUS", 2.0)
    return args


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("change", "word"),
    [(change_setting, "ent_coef"), (change_attribute, "bonus"), (change_global, "BONUS")],
)
def test_a_constant_of_the_compiled_update_that_changes_is_named_and_counts(
    monkeypatch, capsys, change, word
):
    update = ppo.compiled(update_of_constants, ppo.step_taken)
    compiled, plain = given(ent_coef=0.1), given(ent_coef=0.1)
    for _ in range(2):
        update(*compiled)
        update_of_constants(*plain)
    assert "Warning" not in capsys.readouterr().out
    for agent, adam, *others, args in (compiled, plain):
        args = change(agent, args, monkeypatch)
        for _ in range(2):
            (update if adam is compiled[1] else update_of_constants)(agent, adam, *others, args)
    torch.testing.assert_close(compiled[1]["weights"], plain[1]["weights"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Warning") and word in line and "`schedule`" in line


@pytest.mark.usefixtures("backend")
def test_what_changes_through_the_schedule_stays_compiled(capsys):
    update = ppo.compiled(update_of_constants, ppo.step_taken)
    compiled, plain = given(ent_coef=0.1), given(ent_coef=0.1)
    for rate in (0.1, 0.2, 0.3):
        for arguments, function in ((compiled, update), (plain, update_of_constants)):
            arguments[4]["learning_rate"] = torch.tensor(rate)
            function(*arguments)
    torch.testing.assert_close(compiled[1]["weights"], plain[1]["weights"])
    assert "Warning" not in capsys.readouterr().out


def test_an_if_on_data_in_the_update_is_named_and_runs(capsys):
    def update_with_if(agent, adam, batch, *rest):
        if batch[0].sum() > 0:
            adam["weights"] += 1
        return {}

    compiled, plain = given(), given()
    ppo.compiled(update_with_if, ppo.step_taken)(*compiled)
    update_with_if(*plain)
    assert torch.equal(compiled[1]["weights"], plain[1]["weights"])
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("Warning"))
    assert "ata-dependent" in line


# --- The schedule ---


def test_a_new_number_in_the_schedule_reaches_the_loss_and_is_logged(changed):
    """An annealed entropy coefficient in two hunks."""
    mine = changed({
        '"clip_coef": clip_coef}\n': '"clip_coef": clip_coef, "ent_coef": 0.4 * frac}\n',
        "pg_loss - args.ent_coef *": 'pg_loss - schedule["ent_coef"] *',
    })  # fmt: skip
    result = mine.train(small(mine, learning_rate=0.01))
    found = [x["charts/ent_coef"] for x in result["updates"]]
    assert found == pytest.approx([0.4, 0.4 * 2 / 3, 0.4 / 3])
    plain, constant = (mine.ppo_loss, ppo.ppo_loss)
    agent, _, batch, mb, schedule, args = given(ent_coef=0.3)
    batch, schedule = [x[mb] for x in batch], {**schedule, "ent_coef": torch.tensor(0.3)}
    assert plain(agent, batch, schedule, args)[0] == constant(agent, batch, schedule, args)[0]


# --- What acts ---


@on("vector")
def test_what_acts_otherwise_than_the_agent_stops_the_run_with_a_sentence(
    script, tiny, monkeypatch
):
    real = script.module.in_numpy
    monkeypatch.setattr(script.module, "in_numpy", lambda network: lambda x: real(network)(x) + 3)
    if "masks" in script.features:  # a shift of all logits is none
        shift = np.arange(6, dtype=np.float32)
        monkeypatch.setattr(script.module, "in_numpy", lambda net: lambda x: real(net)(x) + shift)
    with pytest.raises(ValueError, match=r"Make `actor`.*agree"):
        script.module.train(tiny("Walk"))
    assert not Path("runs/run0/checkpoint.pt").exists()


@on("vector")
def test_other_layers_act_by_the_network_itself_and_learn(script, tiny, monkeypatch):
    class Other(script.module.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            size, head = self.policy[0].in_features, self.policy[-1]
            normed = nn.Linear(size, 64), nn.LayerNorm(64), nn.ReLU()
            self.policy = nn.Sequential(*normed, head)

    monkeypatch.setattr(script.module, "Agent", Other)
    torch.manual_seed(1)
    trained = script.module.train(tiny("Walk", total_timesteps=64))["agent"]
    assert isinstance(trained.policy[1], nn.LayerNorm) and trained.policy[1].bias.any()
    script.module.load_policy("runs/run0")(np.zeros(3))


# --- Parts of the agent that do not learn ---


@on("environments")
def test_a_frozen_part_stays_and_buffers_go_on_after_a_resume(script, tiny, monkeypatch):
    def part(agent):
        return agent.cnn if "atari" in script.features else agent.policy[0]

    class Other(script.module.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            part(self).requires_grad_(False)
            self.calls = nn.Buffer(torch.zeros(()))

        def get_value(self, *args):
            self.calls += 1  # as BatchNorm counts
            return super().get_value(*args)

    monkeypatch.setattr(script.module, "Agent", Other)
    whole = script.module.train(tiny("Walk", anneal_lr=False))["agent"]
    begun = script.module.train(tiny("Walk", anneal_lr=False, total_timesteps=64))["agent"]
    saved = script.module.load_checkpoint("runs/run1")["args"]
    again = script.module.Args(**{**saved, "total_timesteps": 96, "resume": "runs/run1"})
    resumed = script.module.train(again)["agent"]
    assert same_weights(part(whole), part(begun))
    assert not same_weights(whole.value, begun.value)
    assert same_weights(resumed, whole) and whole.calls > begun.calls > 0


def test_a_policy_without_log_std_trains_and_has_no_metric_of_it(changed):
    mine = changed({
        "dist = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)":
            "dist = Normal(mean, torch.ones_like(mean))",
        "mean, std = in_numpy(agent.policy), agent.log_std.exp().numpy(force=True)":
            "mean, std = in_numpy(agent.policy), 1.0",
        "self.log_std = nn.Buffer(zeros) if args.anneal_log_std else nn.Parameter(zeros)": "pass",
        "(torch.tensor(noise)) - agent.log_std.cpu()": "(torch.tensor(noise))",
    })  # fmt: skip
    result = mine.train(small(mine, run_name="beta"))
    assert len(result["updates"]) == 3 and "policy/log_std" not in result["updates"][0]
    assert mine.load_policy("runs/beta")(np.zeros(3)).shape == (2,)
    assert mine.evaluate(mine.Args(evaluate="runs/beta", eval_episodes=1))


# --- Runs and environments of one's own ---


@on("environments")
def test_the_same_settings_can_be_trained_twice_in_one_second(script, tiny, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    args = tiny("Walk", run_name=None)
    before = dataclasses.asdict(args)
    a, b = (script.module.train(args) for _ in range(2))
    assert a["run_dir"] != b["run_dir"] and dataclasses.asdict(args) == before
    name = rf"{args.env_id}__{script.path.stem}__1__\d+-\d+"
    assert re.fullmatch(name, a["run_dir"].name) and same_weights(a["agent"], b["agent"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.gamma = 0.5


class Rooms(gym.Env):
    """Nobody has registered it; a Dict is observed, and rewards are arrays."""

    observation_space = gym.spaces.Dict({
        "place": gym.spaces.Box(-1, 1, (2,), np.float32),
        "open": gym.spaces.Discrete(3),
    })  # fmt: skip
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    end = 4

    def observe(self):
        return {"place": np.full(2, self.t / 100, np.float32), "open": self.t % 3}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t = (self.t + 1) % 100
        return self.observe(), np.array([0.5]), False, self.t == self.end, {"x_velocity": 2.0}


@on("gaussian")
def test_a_dict_environment_of_ones_own_trains_and_its_evaluation_is_left_in_a_file(script, capsys):
    result = script.module.train(script.args(run_name=None), Rooms)
    run_dir = result["run_dir"]
    assert run_dir.name.startswith("Rooms__")
    assert {(x["return"], x["length"]) for x in result["episodes"]} == {(2.0, 4)}
    obs = gym.spaces.flatten(Rooms.observation_space, Rooms().reset()[0])
    assert script.module.load_policy(run_dir)(obs).shape == (2,)
    asked = script.module.Args(evaluate=str(run_dir), eval_episodes=3)
    results = script.module.evaluate(asked, Rooms)
    expected = {"returns": [2.0] * 3, "lengths": [4] * 3, "speeds": [2.0] * 3}
    assert list(results.values()) == [expected] * 2
    assert "speeds 2.00 ± 0.00" in capsys.readouterr().out
    assert json.loads((run_dir / "evaluation.json").read_text()) == results


@on("vector")
def test_gymnasiums_checks_run_for_an_environment_of_ones_own(script):
    class Wrong(Rooms):
        action_space = fake_envs.SPACES[script.space][1]

        def observe(self):
            return {"place": np.full(2, 7.0, np.float32), "open": 0}  # outside of its space

    with pytest.warns(UserWarning, match=r"obs.* is not within the observation space"):
        script.module.train(script.args(total_timesteps=32), Wrong)


def test_an_error_in_ones_own_code_is_named_with_its_place(changed, monkeypatch, capsys):
    mine = changed({"discounted[:] = args.gamma * discounted": "discounted[:] = np.ones(7)"})
    for more, end in (
        ("", r"broadcast.* \(.*my_ppo\.py, line \d+\)"),
        ("--num-steps 7", "of at least two."),
    ):
        monkeypatch.setattr("sys.argv", ["my_ppo.py", *flags(small(mine)).split(), *more.split()])
        with pytest.raises(SystemExit, match="2"):
            mine.main()
        assert re.fullmatch(f"Error: .*{end}", capsys.readouterr().err.splitlines()[-1])


def test_a_tag_may_name_what_is_no_setting(changed):
    mine = changed({"(gamma, gae_lambda) [": "(gamma, my_own) ["})
    assert "| gamma=0.99, my_own=no setting |" in mine.details(mine.Args())


# --- The use of a trained policy ---


@on("gaussian")
def test_a_loaded_policy_acts_on_raw_observations_as_the_trained_one(script, tiny):
    agent = script.module.train(tiny("Walk", learning_rate=0.02))["agent"]
    saved = script.module.load_checkpoint("runs/run0")
    policy = script.module.load_policy("runs/run0")
    stats = {name: np.array(x) for name, x in saved["obs_stats"].items()}
    rng = np.random.default_rng(0)
    for raw in stats["mean"] + 3 * rng.normal(size=(20, 3)):
        obs = np.clip((raw - stats["mean"]) / np.sqrt(stats["var"] + 1e-8), -10, 10)
        obs = torch.tensor(obs, dtype=torch.float32)
        np.testing.assert_allclose(policy(raw), script.best_action(agent, obs), atol=1e-5)
    drawn = np.array([policy(raw, rng) for _ in range(200)])
    assert (abs(drawn) <= np.float32(0.1)).all() and len(np.unique(drawn)) > 5


@on("continuous")
def test_evaluation_ends_where_the_environment_never_does(script):
    class Endless(Rooms):
        end = 1000

    script.module.train(script.args(run_name="endless"), Endless)
    asked = script.module.Args(evaluate="runs/endless", eval_episodes=1)
    assert script.module.evaluate(asked, Endless)["mean"]["lengths"] == [10_000]


def test_films_follow_the_body_where_there_is_a_camera_that_does():
    for env_id, camera in (("Humanoid-v4", 0), ("InvertedPendulum-v4", -1)):
        env = ppo.make_env(ppo.Args(env_id=env_id, evaluate="runs/run", capture_video=True))
        assert env.unwrapped.mujoco_renderer.camera_id == camera
    assert gym.make("Humanoid-v4").unwrapped.model.camera("track").id == 0


@on("environments")
def test_a_run_ends_with_its_result_and_the_commands_to_go_on_with(tiny, cli, script):
    code, out, err = cli(flags(tiny("Walk", run_name="mine")))
    assert code == 0, err
    result, commands = out.splitlines()[-2:]
    assert re.match(r"Return -?\d+\.\d", result) and math.isfinite(float(result.split()[1][:-1]))
    assert "--evaluate runs/mine" in commands and "tensorboard --logdir runs/mine" in commands
