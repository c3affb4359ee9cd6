"""What users change in a copy of a script, or give it, works or is named: code, environments."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import types
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import threadpoolctl
import torch
from adapters import SCRIPTS, scripts, scripts_with, slow_on
from helpers import curves, flags, patched, same_weights

import ppo_continuous_action as ppo
from ppo_continuous_action import UsageError

HOME = SCRIPTS["continuous"]


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Import a copy of the continuous script with some texts replaced: changed({old: new})."""

    def load(changes):
        (path := tmp_path / "my_ppo.py").write_text(patched(HOME.path.read_text(), changes.items()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    return load


def small(module=ppo, **changes):
    return module.Args(**{**dataclasses.asdict(HOME.args(env_id="FakeWalk-Box-v0")), **changes})


@scripts_with("vector")
def test_what_acts_otherwise_than_the_agent_shows_at_once(script, tiny, monkeypatch):
    healthy = script.module.train(tiny("Walk", learning_rate=0.01))["updates"]
    assert all(abs(x["check/acting"]) < 1e-6 for x in healthy)
    real = script.module.in_numpy
    shift = np.arange(6, dtype=np.float32) if "masks" in script.features else 3  # not of all logits

    def shifted(layer):
        is_head = getattr(layer, "out_features", 64) != 64
        return (lambda x: real(layer)(x) + shift) if is_head else real(layer)

    monkeypatch.setattr(script.module, "in_numpy", shifted)
    (update, *_) = script.module.train(tiny("Walk"))["updates"]
    assert update["check/acting"] > 0.01


def test_another_distribution_in_the_functions_of_the_policy_trains_and_acts(changed):
    quantiles = "stats.laplace.ppf(stats.norm.cdf(noise))"
    mine = changed({
        "import tyro\n": "import tyro\nfrom scipy import stats\n",
        "import Normal\n": "import Laplace, Normal\n",
        "dist = Normal(": "dist = Laplace(",
        "+ std * noise": f"+ std * {quantiles}",
        "(Normal(0, 1).log_prob(noise) - log_std)": (
            f"(torch.tensor(stats.laplace.logpdf({quantiles})) - log_std)"
        ),
    })  # fmt: skip
    result = mine.train(small(mine, run_name="laplace"))
    assert all(abs(x["check/acting"]) < 1e-6 for x in result["updates"])
    policy = mine.load_policy("runs/laplace", gym.make("FakeWalk-Box-v0"))
    noises = np.random.default_rng(0).normal(scale=0.1, size=(50, 2))
    assert len({policy(np.zeros(3), noise)[0] for noise in noises}) > 5
    assert len(mine.evaluate("runs/laplace", episodes=2)) == 2


def test_settings_of_ones_own_need_nothing_else_if_a_checkpoint_can_hold_them(changed):
    values = [-0.5, 0, (1, 2), None, "a", True]
    lines = [
        f"    mine{i}: object = {x!r}  # a setting of one's own\n" for i, x in enumerate(values)
    ]
    lines += ["    many: list = dataclasses.field(default_factory=lambda: [1, 2])  # too\n"]
    mine = changed({"    # --- PPO ---\n": f"    # --- PPO ---\n{''.join(lines)}"})
    mine.train(small(mine, run_name="run"))
    args = vars(mine.load_checkpoint("runs/run")["args"])
    assert [args[f"mine{i}"] for i in range(len(values))] == values and args["many"] == [1, 2]
    for bad in (Path("robot.xml"), frozenset(), np.float64):
        with pytest.raises(mine.UsageError, match=r"mine3 \(.*\) cannot be saved: use a number"):
            mine.train(small(mine, mine3=bad))


def test_another_float_can_be_annealed_by_a_line_and_another_metric_is_averaged_and_logged(changed):
    rate = "update_args.learning_rate.fill_(learning_rate)"
    entropy = '"losses/entropy": entropies.mean(),'
    added = '"ent_coef": args.ent_coef + 0 * pg_loss, "mine": minibatch.obs[0, 0] + 3,'
    mine = changed({
        f"        {rate}": f"        update_args.ent_coef.fill_(remaining)\n        {rate}",
        entropy: f"{entropy} {added}",
    })  # fmt: skip
    updates = mine.train(small(mine, run_name="run"))["updates"]
    assert [x["ent_coef"] for x in updates] == pytest.approx([1, 2 / 3, 1 / 3])
    assert len({x["mine"] for x in updates}) == len(curves("runs/run")["mine"]) == 3


@scripts("continuous")
def test_training_uses_one_thread_and_leaves_the_process_what_it_had(script, tiny):
    """Once torch.set_num_threads has been called, MKL follows it alone, not threadpoolctl."""
    inside, real = [], script.module.ppo_update

    def threads():
        of_numpy = [x["num_threads"] for x in threadpoolctl.threadpool_info()]
        of_torch = re.findall(r"max_threads\(\) : (\d+)", torch.__config__.parallel_info())
        return {*of_numpy, *map(int, of_torch)}

    def update(*args):
        inside.append(threads())
        return real(*args)

    with threadpoolctl.threadpool_limits(2):
        torch.set_num_threads(2)
        before = threads()
        script.module.train(tiny("Walk"), update=update)
        assert threads() == before == {2} and inside and all(x == {1} for x in inside)
        with pytest.raises(ZeroDivisionError):
            script.module.train(tiny("Walk"), update=lambda *args: 1 / 0)
        assert threads() == before


@scripts("continuous", "atari", "rlhf")
def test_main_in_a_notebook_takes_the_default_settings(script, monkeypatch):
    """The command line there is that of the kernel."""
    given = []
    train = lambda args, **_: given.append(args) or {"run_dir": "here"}  # noqa: E731
    monkeypatch.setattr(script.module, "train", train)
    for line in ("python/ipykernel_launcher.py -f /tmp/kernel-1.json", "script.py --seed 3"):
        monkeypatch.setattr("sys.argv", line.split())
        script.module.main()
    assert given == [script.module.Args(), script.module.Args(seed=3)]


@scripts("continuous", "vector_env")
def test_a_module_in_the_current_folder_is_found(script, tiny, cli, monkeypatch):
    """The interpreter itself looks for it in the script's folder only."""
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x not in ("", os.getcwd())])
    fake = tiny("Walk").env_id
    Path("mine_here.py").write_text(f"""import gymnasium as gym
spec = gym.spec({fake!r})
gym.register("Mine-v0", entry_point=spec.entry_point, kwargs=spec.kwargs)
""")
    monkeypatch.delitem(sys.modules, "mine_here", raising=False)
    monkeypatch.delitem(gym.registry, "Mine-v0", raising=False)
    code, _, err = cli(flags(tiny(env_id="mine_here:Mine-v0", run_name="mine")))
    assert code == 0 and Path("runs/mine/checkpoint.pt").exists(), err
    del gym.registry["Mine-v0"]


@scripts_with("vector")
def test_the_text_of_a_script_works_where_it_has_no_file(script, monkeypatch):
    """As in a cell of a notebook."""
    module = types.ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", module)  # dataclasses look for it
    exec(script.path.read_text(), vars(module))
    args = module.Args(**vars(script.args(run_name=None, total_timesteps=32)))
    run_dir = module.train(args)["run_dir"]
    assert "__notebook__" in run_dir.name and (run_dir / "checkpoint.pt").exists()
    assert len(module.evaluate(run_dir, episodes=1)) == 1


@scripts_with("environments")
@slow_on("kl_penalty", "lstm")
def test_another_agent_and_another_way_to_step_are_arguments(script, tiny):
    module, counted = script.module, []

    class Own(module.Agent):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.more = torch.nn.Parameter(torch.zeros(1))
            self.value.register_forward_hook(lambda _, inputs, values: values + self.more)

    def step(envs, actions):
        counted.append(len(envs))
        return module.step_all(envs, actions)

    args, own = tiny("Walk"), {"agent_class": Own}
    own |= {"step_envs": step} if "vector" in script.features else {}  # games have processes
    module.train(args, **own)
    assert len(counted) == ("step_envs" in own) * args.total_timesteps / args.num_envs
    with pytest.raises(module.UsageError, match="from another script"):
        module.load_checkpoint("runs/run0")
    longer = tiny("Walk", total_timesteps=160, run_name="run0")
    agent = module.train(longer, resume="runs/run0", **own)["agent"]
    assert agent.more != 0 and type(agent) is Own
    saved = module.load_checkpoint("runs/run0", Own)
    assert same_weights(saved["agent"], agent) and len(module.evaluate(saved, episodes=1)) == 1


@scripts("continuous", "vector_env", "atari")
def test_the_same_settings_can_be_trained_twice(script, tiny):
    args = tiny("Walk", run_name=None)
    before = dataclasses.asdict(args)
    a, b = (script.module.train(args) for _ in range(2))
    assert a["run_dir"] != b["run_dir"] and dataclasses.asdict(args) == before
    name = rf"{args.env_id}__{script.path.stem}__1__\d+"
    assert re.fullmatch(name, a["run_dir"].name) and same_weights(a["agent"], b["agent"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.gamma = 0.5


class Rooms(gym.Env):
    """A Dict is observed, and rewards are arrays."""

    observation_space = gym.spaces.Dict({
        "place": gym.spaces.Box(-1, 1, (2,), np.float32),
        "open": gym.spaces.Discrete(3),
    })  # fmt: skip
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    reward, end = np.array([0.5]), 4  # an episode has four steps

    def observe(self):
        return {"place": np.full(2, self.t / 100, np.float32), "open": self.t % 3}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t = (self.t + 1) % 100
        return self.observe(), self.reward, False, self.t == self.end, {}


def rooms(obs=None, **others):
    """A class of Rooms with other attributes, or with another observation, always the same."""
    if obs is not None:
        others |= {"observe": lambda self: obs}
        others.setdefault("observation_space", gym.spaces.Box(-1, 1, (2,)))
    return type("Other", (Rooms,), others)


OUTSIDE = rooms(np.full(2, 3.0))  # of the space of observations
for name, make in (("House", Rooms), ("Outside", OUTSIDE), ("Endless", rooms(end=1000))):
    gym.register(f"{name}-v0", make)


@scripts("continuous", "multidiscrete")
def test_a_dict_environment_of_ones_own_trains_and_its_policy_acts(script, cli):
    result = script.module.train(script.args(run_name=None), Rooms)
    run_dir = result["run_dir"]
    assert run_dir.name.startswith("test_users_changes-Rooms__")
    assert {(x["return"], x["length"]) for x in result["episodes"]} == {(2.0, 4)}
    policy, (obs, _) = script.module.load_policy(run_dir, Rooms()), Rooms().reset()
    assert policy(obs).shape == (2,)
    assert result["args"].env_id == "test_users_changes:Rooms"
    assert script.module.load_checkpoint(run_dir)["args"].env_id == result["args"].env_id
    with pytest.raises(script.module.UsageError, match="other spaces"):
        script.module.load_policy(run_dir, rooms(np.zeros(3))())
    for flag in ("--evaluate", "--resume"):
        code, _, err = cli(f"{flag} {run_dir}")
        assert code == 2 and "needs its env_factory" in err
    for use in (script.module.evaluate, lambda x: script.module.train(resume=x)):
        with pytest.raises(script.module.UsageError, match="needs its env_factory"):
            use(run_dir)
    assert script.module.evaluate(run_dir, Rooms, episodes=2) == [2.0, 2.0]
    code, out, err = cli(f"--evaluate {run_dir} --env-id House-v0 --eval-episodes 2")
    assert code == 0 and "Return 2 ± 0 in 2 episodes" in out, err


ROOMS = Rooms()


def make_rooms():
    return Rooms()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Rooms, "Rooms"),
        (make_rooms, "make_rooms"),
        (lambda: Rooms(), "Rooms"),
        (iter(Rooms, 0).__next__, "Rooms"),
        (functools.partial(gym.wrappers.TimeLimit, ROOMS, 9), "Rooms(9)"),
        (
            functools.partial(gym.wrappers.TimeLimit, env=ROOMS, max_episode_steps=8),
            "Rooms(max_episode_steps=8)",
        ),
    ],
)
def test_a_run_has_the_name_of_what_made_its_environment_or_of_its_class(make, name):
    assert ppo.name_of(make, make()) == f"test_users_changes:{name}"


@scripts("continuous")
def test_only_the_module_that_the_flag_names_is_the_users_mistake(script, cli, monkeypatch):
    """What is missing in an environment's own code keeps its traceback, which names the file."""
    monkeypatch.syspath_prepend(".")
    Path("needs_more.py").write_text("import is_not_installed\n")
    monkeypatch.delitem(sys.modules, "needs_more", raising=False)
    with pytest.raises(ModuleNotFoundError, match="is_not_installed"):
        cli("--env-id needs_more:Mine-v0")
    for name in ("nowhere", "nowhere.at_all", "needs_more.at_all"):
        monkeypatch.delitem(sys.modules, "needs_more", raising=False)
        Path("needs_more.py").write_text("")
        code, _, err = cli(f"--env-id {name}:Mine-v0")
        assert code == 2 and err.startswith("Error: --env-id: No module named"), err


class Words(gym.Space):
    """As the missions of MiniGrid."""

    def __init__(self):
        super().__init__((), str)


@scripts("continuous", "multidiscrete")
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (rooms(reward=np.array([0.5, 0.5])), ValueError, "array of size 1 to a Python scalar"),
        (rooms(reward=np.inf), UsageError, "Check observations and rewards."),
        (rooms(np.full(2, np.nan)), UsageError, r"the observation \[nan nan|Check observations"),
        (rooms(observation_space=Words()), UsageError, "which cannot be flattened"),
        (lambda: None, UsageError, "must be a function that returns a gymnasium.Env"),
        (ROOMS, UsageError, "must be a function that returns a gymnasium.Env"),
        (lambda: gym.wrappers.TimeLimit(ROOMS, 9), UsageError, "a new environment each time"),
    ],
)
def test_what_an_environment_does_wrong_is_named(script, make, error, words):
    """By a sentence where training would go on, or nobody else would say it; and nothing trains."""
    error = script.module.UsageError if error is UsageError else error
    with pytest.raises(error, match=words):
        script.module.train(script.args(run_name="run"), make)


INTEGERS = gym.spaces.Box(0, 255, (2,), np.uint8)  # as one copies the space of images
DICT = gym.spaces.Dict(a=INTEGERS, b=gym.spaces.Discrete(2))


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: [x], lambda x: [[y] for y in x]])
def test_observations_may_be_lists_or_rows_and_keep_the_digits_of_floats(kind):
    obs = kind([0.25, 0.75])
    assert ppo.vector(INTEGERS, obs).tolist() == [0.25, 0.75]
    assert ppo.vector(DICT, {"a": obs, "b": 1}).tolist() == [0.25, 0.75, 0.0, 1.0]
    with pytest.raises(ValueError, match="cannot reshape"):
        ppo.vector(INTEGERS, kind([0.25, 0.5, 0.75]))


@scripts("continuous", "multidiscrete")
def test_gymnasium_warns_once_of_what_an_environment_does_wrong(script):
    """At the first reset and step, in environments that are given and in those that are named."""
    for env_id, factory in (("Outside-v0", None), ("", OUTSIDE)):
        with (
            contextlib.ExitStack() as resources,
            pytest.warns(UserWarning, match="not within the observation space") as warned,
        ):
            (env,) = script.module.make_envs(resources, script.args(env_id=env_id), 1, factory)
            for seed in range(2):
                env.begin(seed)
                env.step(env.action_space.sample())
        assert sum("step()` method is not within" in str(x.message) for x in warned) == 1


@scripts("continuous")
def test_wide_bounds_of_actions_are_named(script, capsys):
    with contextlib.ExitStack() as resources:
        wide = rooms(action_space=gym.spaces.Box(-30, 30, (1,)))
        script.module.make_envs(resources, script.args(), 1, wide)
    assert "use gym.wrappers.RescaleAction" in capsys.readouterr().out


@scripts("continuous")
def test_a_loaded_policy_acts_on_raw_observations_as_the_trained_one(script, tiny):
    agent = script.module.train(tiny("Walk", learning_rate=0.002))["agent"]
    stats = script.module.load_checkpoint("runs/run0")["obs_stats"]
    policy = script.module.load_policy("runs/run0", gym.make(script.env_id("Walk")))
    rng = np.random.default_rng(0)
    for raw in stats.mean + 10 * rng.normal(size=(20, 3)):
        obs = np.clip((raw - stats.mean) / np.sqrt(stats.var + 1e-8), -10, 10)
        best = agent.policy(torch.tensor(obs, dtype=torch.float32)).clamp(-0.1, 0.1)
        action, again = policy(raw), policy(raw)
        np.testing.assert_allclose(action, best.detach(), atol=1e-5)
        assert action.dtype == np.float32 and (again == action).all()
    drawn = np.array([policy(raw, noise) for noise in rng.normal(size=(200, 2))])
    assert (abs(drawn) <= np.float32(0.1)).all() and len(np.unique(drawn)) > 5


@scripts("continuous")
def test_evaluation_is_cut_where_the_environment_has_no_limit(script, capsys):
    script.module.train(script.args(env_id="Endless-v0", run_name="run", total_timesteps=32))
    assert script.module.evaluate("runs/run", episodes=1) == [5000]
    assert "An episode was cut after 10000 steps" in capsys.readouterr().out


def test_films_follow_the_body_and_are_as_long_as_the_flag_says(monkeypatch, capsys):
    filmed = []
    monkeypatch.setenv("MUJOCO_GL", "egl")

    def film(env, folder, trigger, video_length):
        filmed.extend([env, video_length, [trigger(k) for k in range(3)]])
        return env

    monkeypatch.setattr(gym.wrappers, "RecordVideo", film)
    ppo.train(small(env_id="Humanoid-v4", run_name="run", total_timesteps=32))
    line = "ppo --evaluate runs/run --eval-episodes 1 --capture-video --video-length 7"
    monkeypatch.setattr("sys.argv", line.split())
    ppo.main()
    assert filmed[1:] == [7, [True, False, False]]
    assert filmed[0].unwrapped.mujoco_renderer.camera_id == 0
    printed = capsys.readouterr()
    assert "Video: runs/run/videos/rl-video-episode-0.mp4" in printed.out
    assert " steps [" in printed.err  # a progress bar


@scripts("continuous")
def test_mujoco_does_not_warn_of_an_old_word_but_of_all_else(script, capfd):
    mujoco.set_mju_user_warning(None)  # as in a new process
    script.module.train(script.args(env_id="HalfCheetah-v4", run_name="run"))
    assert "settotalmass" not in capfd.readouterr().err and not Path("MUJOCO_LOG.TXT").exists()
    ball = "<worldbody><body><freejoint/><geom size='1'/></body></worldbody>"
    model = mujoco.MjModel.from_xml_string(f"<mujoco>{ball}</mujoco>")
    data = mujoco.MjData(model)
    data.qvel[0] = np.nan
    mujoco.mj_step(model, data)
    assert "MuJoCo: Nan, Inf or huge value in QVEL" in capfd.readouterr().err
