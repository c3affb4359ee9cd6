"""ppo_vector_env.py as people with robots use it: own simulators, their words, the policy alone."""

import functools
import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import curves, same_weights

import ppo_vector_env as ppo

N = 4
SMALL = {"num_envs": N, "num_steps": 12, "num_minibatches": 4, "update_epochs": 1, "hidden": (8,)}
SMALL |= {"total_timesteps": 3 * 12 * N, "device": "cpu"}


class Robots:
    """Episodes of ten steps whose rewards are 1; `says` changes what a step returns."""

    single_action_space = gym.spaces.Box(-1, 1, (2,))
    max_episode_length = 10

    def __init__(self, num_envs=N, seed=0, device="cpu", says=None, staggered=False):
        self.num_envs, self.says, self.staggered = num_envs, says, staggered
        self.generator = torch.Generator().manual_seed(seed)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.count = 0

    def observe(self):
        age = self.episode_length_buf[:, None].float()
        self.noise = torch.rand(self.num_envs, 3)  # of PyTorch's global generator
        return {"critic": torch.cat([age, 0 * age], 1), "policy": self.noise}

    def reset(self, seed=None):
        if self.staggered:
            ages = torch.randint(10, (self.num_envs,), generator=self.generator)
            self.episode_length_buf[:] = ages
        return self.observe(), {}

    def step(self, actions):
        self.count += 1
        self.episode_length_buf += 1
        over = self.episode_length_buf >= 10
        self.episode_length_buf[over] = 0
        step = [self.observe(), torch.ones(self.num_envs), over & False, over, {}]
        return tuple(self.says(step, self.count) if self.says else step)

    def close(self):
        pass


def train(says=None, make=None, **settings):
    made = make or functools.partial(Robots, says=says)
    return ppo.train(ppo.Args(**SMALL | settings), made)


# --- Whole episodes ---


@pytest.fixture
def run():
    return train(run_name="run")


def test_an_evaluation_counts_whole_episodes_however_they_begin(run):
    for staggered in (True, False):
        make = functools.partial(Robots, staggered=staggered)
        assert ppo.evaluate(run["run_dir"], N, make=make) == [10.0] * N


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_step_that_only_begins_an_episode_is_no_part_of_one(run, mode):
    """And what `reset` begins counts in Gymnasium, so each environment plays one episode."""

    class One(gym.Env):
        action_space = Robots.single_action_space
        part = gym.spaces.Box(-1, 1, (2,))
        observation_space = gym.spaces.Dict({"critic": part, "policy": gym.spaces.Box(0, 1, (3,))})
        resets = 0

        def reset(self, seed=None, options=None):
            self.age, self.resets = 0, self.resets + 1
            return {"critic": np.zeros(2, "f"), "policy": np.zeros(3, "f")}, {}

        def step(self, action):
            self.age += 1
            obs = {"critic": np.zeros(2, "f"), "policy": np.zeros(3, "f")}
            return obs, 10.0**self.resets, self.age == 3, False, {}

    made = gym.vector.SyncVectorEnv([One] * 2, autoreset_mode=mode)
    assert ppo.evaluate(run["run_dir"], 2, make=lambda *_: made) == [30.0, 30.0]
    hidden = type("Own", (Own,), {"metadata": {"autoreset_mode": mode}})
    made = gym.vector.SyncVectorEnv([One] * 2, autoreset_mode=mode)
    assert ppo.evaluate(run["run_dir"], 2, make=lambda *_: hidden(made)) == [300.0, 300.0]


class Own:
    """Nobody knows that its `reset` begins all."""

    def __init__(self, envs):
        self.envs, self.single_action_space = envs, envs.single_action_space
        self.reset, self.step, self.close = envs.reset, envs.step, envs.close


def test_training_begins_at_random_ages_and_evaluation_does_not():
    ages = []

    class Noted(Robots):
        def step(self, actions):
            if self.count == 0:
                ages.append(self.episode_length_buf.tolist())
            return super().step(actions)

    results = [train(make=Noted, run_name=f"{x}", stagger=x) for x in (True, False)]
    ppo.evaluate(results[0]["run_dir"], N, make=Noted)
    assert len({*ages[0]}) > 1 and max(ages[0]) < 10 and ages[1:] == [[0] * N] * 2
    assert {x["length"] for x in results[1]["episodes"]} == {10}


# --- The policy alone ---


def test_a_policy_takes_its_own_columns_all_columns_and_parts():
    settings = {"policy_obs": ("policy",), "value_obs": ("critic",), "run_name": "run"}
    run_dir = train(**settings)["run_dir"]
    policy = ppo.load_policy(run_dir)
    assert policy.parts == {"policy": 3} and "{'policy': 3}" in repr(policy)
    own, other = torch.rand(5, 3), torch.rand(5, 2)
    actions = policy(own)
    agent = ppo.load_checkpoint(run_dir)["agent"]
    both = torch.cat([other, own], 1)
    assert torch.equal(actions, agent(both)) and len(actions.unique()) == 10
    assert torch.equal(policy(both), actions)
    assert torch.equal(policy({"nobody": None, "policy": own}), actions)
    assert torch.equal(policy({"policy": own[:, None], "critic": other}), actions)
    for obs in (own.numpy().astype(float), {"policy": own.numpy()}, both.numpy()):
        found = policy(obs)
        assert isinstance(found, np.ndarray) and np.array_equal(found, actions)
    torch.testing.assert_close(policy(own[0]), actions[0])  # of one robot
    with pytest.raises(ValueError, match=r"4 columns, and the policy sees \{'policy': 3\}"):
        policy(torch.zeros(5, 4))
    with pytest.raises(KeyError, match="policy"):
        policy({"critic": other})


def test_parts_stay_in_the_order_of_the_simulator():
    settings = {"policy_obs": ("policy", "critic"), "run_name": "run"}
    run_dir = train(**settings)["run_dir"]
    policy = ppo.load_policy(run_dir)
    assert [*policy.parts] == ["critic", "policy"]
    obs = torch.rand(5, 5)
    parts = {"policy": obs[:, 2:], "critic": obs[:, :2]}
    assert torch.equal(policy(parts), ppo.load_checkpoint(run_dir)["agent"](obs))


def test_a_policy_is_scripted_and_traced():
    policy = ppo.load_policy(train(policy_obs=("policy",), run_name="run")["run_dir"])
    own, both = torch.rand(5, 3), torch.rand(5, 5)
    scripted, traced = torch.jit.script(policy), torch.jit.trace(policy, torch.rand(2, 3))
    for obs in (own, both):
        assert torch.equal(scripted(obs), policy(obs))
    assert torch.equal(traced(own), policy(own))


# --- What a simulator says ---


def test_terms_of_rewards_are_logged_as_means_of_an_iteration():
    def says(step, count):
        log = {"Reward/track": torch.full((N,), count), "Reward/effort": float(count), "no": "text"}
        log |= {"empty": torch.zeros(0), "objects": np.array([None]), "nothing": None}
        log |= {"texts": np.array(["a"]), "parts": {"x": 1}}
        step[-1] = {"log": log, "episode": {"r": np.arange(N), "_x": np.ones(N)}}
        step[-1] |= {"_episode": np.arange(N) > 1, "episodes": {"late": 7}} if count > 12 else {}
        return step

    found = train(says, run_name="run")
    shown = curves(found["run_dir"])
    for k, row in enumerate(found["updates"]):
        mean = 12 * k + 6.5
        assert row["Reward/track"] == row["Reward/effort"] == mean
        assert shown["Reward/track"][k] == (row["global_step"], mean)
        assert row["r"] == (1.5 if k == 0 else 2.5)
        assert row.get("late") == (None if k == 0 else 7)
    others = {"no", "empty", "objects", "nothing", "texts", "parts", "_x"}
    assert not others & row.keys()


def test_a_term_that_is_not_finite_is_named_once_and_ends_nothing(capsys):
    def says(step, count):
        step[-1] = {"log": {"good": 1.0, "bad": math.nan}}
        return step

    found = train(says, run_name="run")
    assert len(found["updates"]) == 3 and "bad" not in found["updates"][-1]
    assert found["updates"][-1]["good"] == 1
    assert capsys.readouterr().out.count("The simulator says bad, which is not finite") == 1


def test_no_term_takes_the_name_of_a_metric_and_names_may_be_numbers():
    log = {"global_step": 7.0, "losses/value_loss": -1.0, "charts/SPS": -1.0, 3: 2.0}

    def says(step, count):
        step[-1] = {"log": log, "terminal": {"ended": True}}
        return step

    rows, plain = (train(x, run_name=f"{bool(x)}")["updates"] for x in (says, None))
    for row, other in zip(rows, plain, strict=True):
        assert row.keys() == {*other, "3"} and row["3"] == 2 and row["charts/SPS"] > 0
        same = ("global_step", "losses/value_loss")
        assert [row[x] for x in same] == [other[x] for x in same]


# --- The form of a step ---


def replaced(place, change):
    def says(step, count):
        if count > 5:  # not only the first step counts
            step[place] = change(step[place])
        return step

    return says


REFUSED = [
    (1, lambda x: x.mean(), r"rewards have shape \(\): it must be \(4,\)"),
    (1, lambda x: x[:1], r"rewards have shape \(1,\): it must be \(4,\)"),
    (1, lambda x: x[:, None] + x, r"rewards have shape \(4, 4\)"),
    (1, lambda x: None, "rewards are a NoneType"),
    (2, lambda x: x[:1], r"terminated have shape \(1,\)"),
    (3, lambda x: x[:3], r"truncated have shape \(3,\)"),
    (4, lambda x: {"time_outs": torch.zeros(1)}, r"time_outs have shape \(1,\)"),
    (4, lambda x: [{}] * N, "infos of step must be a dict, and are a list"),
    (0, lambda x: x["policy"], r"Observations have sizes \{'obs': 3\}, and those of reset"),
    (0, lambda x: {**x, "policy": x["policy"][:, :1]}, r"sizes \{'critic': 2, 'policy': 1\}"),
    (0, lambda x: {"policy": x["policy"]}, r"sizes \{'policy': 3\}, and those of reset \{'critic"),
    (4, lambda x: {"final_obs": {"policy": torch.zeros(N, 3)}}, r"sizes \{'policy': 3\}"),
]


@pytest.mark.parametrize(("place", "change", "sentence"), REFUSED)
def test_what_has_another_form_is_named(place, change, sentence):
    with pytest.raises(ppo.UsageError, match=sentence):
        train(replaced(place, change))


def test_columns_are_taken_and_mean_the_same():
    def says(step, count):
        step[1:4] = [x[:, None] for x in step[1:4]]
        step[4] = {"time_outs": step[3]}
        return step

    plain, columns = train(run_name="plain"), train(says, run_name="columns")
    assert same_weights(plain["agent"], columns["agent"])
    assert plain["episodes"] == columns["episodes"]


def test_a_single_environment_may_say_single_numbers():
    def says(step, count):
        step[1:4] = [x[0] for x in step[1:4]]
        return step

    found = train(says, num_envs=1, num_steps=48, num_minibatches=4)
    assert found["episodes"][-1]["return"] == 10


@pytest.mark.parametrize("returned", [torch.zeros(N, 3), (torch.zeros(N, 3),)])
def test_reset_returns_two_things(returned):
    class Other(Robots):
        def reset(self, seed=None):
            return returned

    came = "Tensor" if isinstance(returned, torch.Tensor) else "1"
    with pytest.raises(ppo.UsageError, match=f"reset must return obs and infos. .* {came}"):
        train(make=Other)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("NEXT_STEP", AutoresetMode.NEXT_STEP),
        ("same_step", AutoresetMode.SAME_STEP),
        ("NextStep", AutoresetMode.NEXT_STEP),
        (AutoresetMode.DISABLED, AutoresetMode.DISABLED),
        (None, AutoresetMode.SAME_STEP),
    ],
)
def test_the_mode_of_resets_may_be_a_name(given, mode):
    envs = Robots()
    envs.metadata = {"autoreset_mode": given} if given else {}
    assert ppo.autoreset_mode(envs) == mode


def test_an_unknown_mode_is_named_and_a_vector_env_without_one_is_gymnasiums(capsys):
    envs = Robots()
    envs.metadata = {"autoreset_mode": "soon"}
    with pytest.raises(ppo.UsageError, match="is soon, not one of NEXT_STEP, SAME_STEP, DISABLED"):
        ppo.autoreset_mode(envs)
    assert ppo.autoreset_mode(gym.vector.VectorEnv()) == AutoresetMode.NEXT_STEP
    assert capsys.readouterr().out.startswith("Episodes begin in the next step")


@pytest.mark.parametrize("word", ["final_obs", "final_observation"])
def test_a_last_observation_that_is_not_finite_is_named_before_it_is_used(word):
    def says(step, count):
        last = {name: x.clone() for name, x in step[0].items()}
        last["critic"][2, 0] = math.nan  # is used in the tenth step only
        step[-1] = {word: last}
        return step

    with pytest.raises(ppo.UsageError, match="Step 10 of environment 2: the last observation is"):
        train(says, stagger=False)


def test_last_observations_may_come_of_ended_episodes_only():
    """As mjlab gives them."""
    given = []

    def says(step, count):
        over = step[3].nonzero().flatten()
        if len(over):
            last = {name: x[over] + 1 for name, x in step[0].items()}
            step[-1] = {"terminal": {"env_ids": over, "observations": last}}
            given.append((over, torch.cat([*last.values()], 1)))
        return step

    with ppo.ExitStack() as resources:
        make = functools.partial(Robots, says=says, staggered=True)
        sim = ppo.make_simulator(resources, ppo.Args(), N, 1, make)
        for _ in range(15):
            final_obs, _, _, truncated = sim.step(torch.zeros(N, 2))
            if truncated.any():
                over, last = given[-1]
                assert torch.equal(final_obs[over], last)
                rest = ~truncated
                assert torch.equal(final_obs[rest], sim.obs[rest])
    assert len(given) > 2


# --- Seeds, names, ends of runs ---


def test_a_seed_governs_what_a_simulator_draws_from_global_generators():
    class Drawing(Robots):
        def observe(self):
            return {"obs": torch.rand(self.num_envs, 3) + np.random.rand()}

    torch.manual_seed(5)
    np.random.seed(5)
    torch.rand(1), np.random.rand()
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    torch.rand(1), np.random.rand()
    first = train(make=Drawing, run_name="first")
    assert (torch.rand(1), np.random.rand()) == expected  # those of the caller go on
    again, other = (train(make=Drawing, run_name=f"{x}", seed=x) for x in (1, 2))
    mean = "agent", "obs_stats", "mean"
    a, b, c = (functools.reduce(getattr, mean[1:], x["agent"]) for x in (first, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_run_is_called_by_its_simulator():
    found = train(run_name="run")
    name = "test_vector_env_robots:Robots"
    assert found["args"].env_id == found["args"].make == name
    saved = torch.load("runs/run/checkpoint.pt", weights_only=True)
    assert saved["args"]["env_id"] == saved["args"]["make"] == name


def test_however_a_run_ends_its_last_whole_iteration_is_saved_with_consistent_weights():
    """An error in the middle of an update, which has changed weights by then."""
    calls, seen = [], []

    def update(agent, *rest):
        calls.append(1)
        rows = ppo.ppo_update(agent, *rest)
        if len(calls) == 3:
            raise RuntimeError
        return rows

    def note(result):
        weights = result["agent"].state_dict()
        seen.append({name: x.clone() for name, x in weights.items()})

    args = ppo.Args(**SMALL | {"run_name": "run"})
    with pytest.raises(RuntimeError):
        ppo.train(args, Robots, update=update, on_iteration=note)
    saved = ppo.load_checkpoint("runs/run")
    assert len(saved["updates"]) == len(seen) == 2
    for name, x in saved["agent"].state_dict().items():
        assert torch.equal(x, seen[-1][name]), name
    assert saved["adam"]["step"] == 8
    assert len(ppo.train(make=Robots, resume="runs/run")["updates"]) == 3


def test_checkpoints_may_be_kept_with_their_numbers_and_used():
    found = train(run_name="run", keep_checkpoints=True, checkpoint_interval=1)
    names = {x.name for x in found["run_dir"].glob("checkpoint-*.pt")}
    assert names == {f"checkpoint-{k * 12 * N}.pt" for k in range(4)}
    first = found["run_dir"] / f"checkpoint-{12 * N}.pt"
    assert len(ppo.load_checkpoint(first)["updates"]) == 1
    assert ppo.load_checkpoint(first)["run_dir"] == Path("runs/run")
    assert ppo.evaluate(first, 2, make=Robots) == [10, 10]
    again = ppo.train(make=Robots, resume=first)
    assert len(again["updates"]) == 3 and again["run_dir"] == found["run_dir"]


def test_a_floor_keeps_a_column_that_hardly_varied_from_exploding():
    agents = [
        ppo.Agent({"parts": {"obs": 2}, "low": [-1.0], "high": [1.0]}, ppo.Args(**x))
        for x in ({}, {"obs_std_floor": 0.01})
    ]
    for agent, expected in zip(agents, (10, 0.1)):
        agent.obs_stats.update(torch.ones(10_000, 2) * torch.tensor([1.0, 0.0]))
        agent.obs_stats.var.zero_()
        obs = agent.obs_stats.mean + torch.tensor([0.001, 0.0])
        assert agent.normalize_obs(obs)[0].item() == pytest.approx(expected, rel=0.02)


def test_what_is_seldom_meant_is_said(capsys):
    def said(low=-1.0, high=1.0, **settings):
        layout = {"parts": {"obs": 2}, "low": [low], "high": [high]}
        args = ppo.Args(**settings)
        ppo.warn_of_settings(args, ppo.Agent(layout, args))
        return capsys.readouterr().out

    assert said() == said(-math.inf, math.inf) == said(scale_rewards=False, clip_vloss=False) == ""
    assert "--no-clip-vloss" in said(scale_rewards=False)
    assert said(-math.inf, 1.0) == said(-1.0, math.inf) == said(-10.0, 10.0) == ""
    for bounds in ((0.0, 1.0), (-1.0, 0.0), (-100.0, 100.0), (-100.0, 1.0), (-math.inf, 100.0)):
        assert f"between [{bounds[0]}] and [{bounds[1]}]: let the simulator scale" in said(*bounds)


def test_settings_are_looked_at_when_a_run_begins(capsys):
    train(run_name="run", scale_rewards=False)
    assert "--no-clip-vloss" in capsys.readouterr().out


def test_short_runs_are_not_compiled_unless_it_is_asked_for(capsys, monkeypatch):
    steps = {"num_minibatches": 32, "update_epochs": 10}
    few, many = ppo.COMPILE_FROM // 320, ppo.COMPILE_FROM // 320 + 1
    pays = lambda how, count: ppo.pays_to_compile(ppo.Args(compile=how, **steps), count)  # noqa: E731
    assert not pays("auto", few) and "--compile yes" in capsys.readouterr().out
    assert pays("auto", many) and pays("yes", 1) and not pays("no", many)
    assert [ppo.Args(compile=x).compile for x in (True, False)] == ["yes", "no"]  # as in version 6
    with pytest.raises(ppo.UsageError, match=r"--compile \(False\) must be one of auto, yes, no"):
        ppo.Args(compile="False")
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    assert not pays("auto", many) and not pays("no", many)
    with pytest.raises(ppo.UsageError, match="--compile yes is for one process"):
        pays("yes", many)


# --- Modules and pictures ---


@pytest.mark.parametrize("line", ["--make", "--backend gymnasium --env-id"])
def test_what_a_simulators_own_code_misses_keeps_its_traceback(outcome, line, monkeypatch):
    Path("sims").mkdir()
    Path("sims/mine.py").write_text("import numpyy_missing\n")
    monkeypatch.syspath_prepend(".")
    name = "make" if line == "--make" else "Mine-v0"
    with pytest.raises(ModuleNotFoundError, match="numpyy_missing"):
        outcome(ppo.main, f"{line} sims.mine:{name}", "ppo_vector_env.py")
    for missing in ("sims.other", "nowhere", "nowhere.at.all"):
        code, _, error = outcome(ppo.main, f"{line} {missing}:{name}", "ppo_vector_env.py")
        assert code == 2 and f"{missing}:{name}: No module named" in error


class Drawn(Robots):
    def __init__(self, *place, render_mode=None, drawn=None):
        super().__init__(*place)
        assert render_mode == "rgb_array"
        self.render = lambda: drawn(np.full((16, 16, 3), self.count, np.uint8))


@pytest.mark.parametrize(
    "drawn",
    [
        lambda x: x,
        lambda x: (x, 0 * x),
        lambda x: np.stack([x, 0 * x]),
        lambda x: torch.tensor(x),
    ],
)
def test_a_film_shows_the_first_environment_or_one_picture_of_all(run, drawn, monkeypatch):
    from gymnasium.utils import save_video
    from helpers import record

    monkeypatch.setattr(ppo, "let_draw", lambda: None)
    saved = record(monkeypatch, save_video, "save_video")
    make = functools.partial(Drawn, drawn=drawn)
    ppo.evaluate(run["run_dir"], 2, video=True, make=make, video_length=5)
    ((frames, *_),) = saved
    # Of the second episode, the first whole one; five pictures at most.
    assert [x.shape for x in frames] == [(16, 16, 3)] * 5
    assert [x[0, 0, 0] for x in frames] == [10, 11, 12, 13, 14]


def test_a_film_without_pictures_or_frames_is_a_sentence(run, monkeypatch):
    monkeypatch.setattr(ppo, "let_draw", lambda: None)
    made = functools.partial(Drawn, drawn=lambda _: None)
    for make in (Robots, made):
        with pytest.raises(ppo.UsageError, match=r"cannot film a .*: its render"):
            ppo.evaluate(run["run_dir"], 2, video=True, make=make)
    with pytest.raises(ppo.UsageError, match=r"--video-length \(0\) must be at least 1"):
        ppo.evaluate(run["run_dir"], 2, video=True, make=Robots, video_length=0)
