"""What every script shows and refuses: command line, logs, evaluation."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import fake_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
import wandb
from adapters import on
from helpers import curves, flags
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# --- Bad input ---

SETTINGS = {"num_envs": [0], "num_steps": [-5], "total_timesteps": [0.5, 3], "gamma": [1.5]}
SETTINGS |= {"gae_lambda": [-0.1], "seed": [-1, 2**64], "learning_rate": [-1, math.nan]}
SETTINGS |= {"num_minibatches": [7], "run_name": ["a/b", ".."]}
LINES = [
    *("env-id Nothing-like-this", "num-steps many", "gamma 1.5"),
    *("no-such-flag 1", "evaluate nowhere", "resume nowhere", "capture-video", "device tpu"),
    *["device cuda"] * (not torch.cuda.is_available()),
]


def assert_refused(result, word):
    """Exit code 2 and one sentence, or the parser's box, that has the word."""
    code, _, err = result
    words = " ".join(re.sub("[│╭╮╰╯─]", "", err).split())
    assert code == 2 and "Traceback" not in err and word in words.replace("_", "-"), err
    assert "For full helptext" in err or (err.startswith("Error: ") and err.count("\n") == 1), err
    assert "https:" not in err
    assert not Path("runs").exists() or not list(Path("runs").rglob("checkpoint.pt"))


def test_bad_input_is_one_sentence_and_exit_code_2(script, tiny, cli):
    more = {"torch_threads": [100_000]} if "games" in script.features else {}
    for name, values in {**SETTINGS, **more}.items():
        for value in values:
            with pytest.raises(script.module.UsageError, match=name.replace("_", "-")):
                script.module.Args(**{name: value})
    for line in LINES:
        flag, *value = line.split()
        named = flag in ("env-id", "evaluate", "resume")
        assert_refused(cli(f"--{line}"), value[0].split(":")[0] if named else flag)


def test_what_others_say_well_keeps_its_traceback(script, tiny, cli):
    with pytest.raises(ImportError, match="nosuchmodule"):
        cli("--env-id nosuchmodule:Foo-v0")
    with pytest.raises(MemoryError, match="allocate"):
        cli(flags(tiny(num_steps=10**12, total_timesteps=1e15)))


def test_a_task_of_another_script_is_refused_with_the_name_of_that(script, tiny, cli, monkeypatch):
    for env_id in [x for x in gym.registry if "ALE/" in x]:  # as without that import
        monkeypatch.delitem(gym.registry, env_id)
    for env_id, word in script.unsuitable.items():
        assert_refused(cli(flags(tiny(env_id=env_id))), word.replace("_", "-"))


@on("vector")
def test_what_takes_no_render_mode_cannot_be_filmed(script, tiny, cli):
    script.module.train(tiny("Target"))
    with pytest.raises(TypeError, match="render_mode"):
        cli("--evaluate runs/run0 --capture-video")


def test_tracking_gives_name_settings_and_curves_and_is_refused_if_it_cannot_start(
    tiny, cli, monkeypatch
):
    """It starts before the log does, whose curves it copies."""

    def init(*, name, config, sync_tensorboard, **others):
        assert sync_tensorboard and config["gamma"] == 0.875 and name == "mine"
        ids.append(others["id"])
        raise wandb.Error("No API key configured.")

    ids, line = [], flags(tiny(track=True, gamma=0.875, run_name="mine"))
    monkeypatch.setattr(wandb, "init", init)
    assert_refused(cli(line), "No API key")
    assert_refused(cli(line), "No API key")
    assert len(set(ids)) == 2  # a run of its own each time, though both have one name
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb"):
        cli(line)
    assert not list(Path("runs").rglob("events*"))


class Tracked:
    """Stands for a run of Weights & Biases."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_a_resumed_run_is_the_same_at_weights_and_biases(script, tiny, monkeypatch):
    given = []
    monkeypatch.setattr(wandb, "init", lambda **about: given.append(about) or Tracked())
    script.module.train(tiny(track=True))
    script.module.train(tiny(track=True, total_timesteps=128), resume="runs/run0")
    script.module.train(tiny(track=True))
    first, again, other = (x["id"] for x in given)
    assert first == again != other and [x["resume"] for x in given] == ["allow"] * 3


# --- Logs ---

PROMISED = {f"charts/{x}" for x in ("episodic_return", "episodic_length", "learning_rate", "SPS")}
PROMISED |= {f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "approx_kl")}
PROMISED |= {f"losses/{x}" for x in ("explained_variance", "grad_norm")}
PROMISED |= {f"check/{x}" for x in ("value_bias", "update", "first_kl")}


def test_tensorboard_has_the_promised_curves_and_the_details(script, tiny):
    args = tiny("Walk", gamma=0.875)
    result = script.module.train(args)
    found = curves("runs/run0")
    assert found.keys() >= PROMISED
    assert {x.split("/")[0] for x in found} == {"charts", "losses", "check"}
    for name in result["updates"][0].keys() - {"global_step"}:
        logged = [(x["global_step"], np.float32(x[name])) for x in result["updates"]]
        np.testing.assert_equal(found[name], logged)
    steps, episodes = [x["global_step"] for x in result["updates"]], result["episodes"]
    for name in ("return", "length"):
        parts = dict(zip(steps, [0, *steps[:-1]]))  # the end of each iteration, and its beginning
        ended = {
            end: [x[name] for x in episodes if begin < x["global_step"] <= end]
            for end, begin in parts.items()
        }
        means = [(step, np.mean(x)) for step, x in ended.items() if x]
        np.testing.assert_allclose(found[f"charts/episodic_{name}"], means, rtol=1e-6)
    events = EventAccumulator("runs/run0").Reload()
    texts = {x.split("/")[0]: events.Tensors(x)[0].tensor_proto for x in events.Tags()["tensors"]}
    texts = {name: x.string_val[0].decode() for name, x in texts.items()}
    written = texts["details"].replace("  \n", "\n")
    assert written == script.module.details(args) and "gamma=0.875" in written
    head, line, *rows = texts["hyperparameters"].splitlines()  # a table in Markdown
    assert head.count("|") == line.count("|") == 3
    assert rows == [f"| {name} | {value} |" for name, value in vars(args).items()]


@pytest.mark.slow
@on("continuous")
def test_weights_and_biases_gets_the_curves_and_the_settings(script, tiny):
    line = flags(tiny("Walk", track=True, run_name="tracked"))
    code = f"import sys, fake_envs, runpy; sys.argv = ['x', *{line.split()}]\n"
    code += f"runpy.run_path({str(script.path)!r}, run_name='__main__')"
    env = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = Path("wandb").glob("offline-run-*/*.wandb")
    written = path.read_bytes()
    saved = script.module.load_checkpoint("runs/tracked")
    assert written.count(b"losses/value_loss") >= len(saved["updates"]) == 3
    for word in ("tracked", "num_steps", "16", "env_id", script.env_id("Walk"), *PROMISED):
        assert word.encode() in written, word


@on("continuous")
def test_logged_is_the_return_of_the_new_episodes_and_shown_that_of_the_last_hundred(script):
    writer, progress = MagicMock(), MagicMock()
    episodes = [{"return": float(i), "length": 2 * i} for i in range(150)]
    script.module.log(writer, 1, {"a": 0.5}, episodes[148:], episodes[-100:], progress)
    written = {name: value for (name, value, _), _ in writer.add_scalar.call_args_list}
    assert written == {"a": 0.5, "charts/episodic_return": 148.5, "charts/episodic_length": 297.0}
    assert progress.set_postfix_str.call_args.args == ("return 99.5",)


def test_details_prints_the_table_and_exits_and_short_forms_of_settings_are_understood(script, cli):
    code, out, _ = cli("--lr 0.125 --total-timesteps 2e6 --details")
    args = script.module.Args(learning_rate=np.float64(0.125), total_timesteps=2e6)
    assert code == 0 and out.strip() == script.module.details(args) and "rate=0.125" in out
    assert type(args.learning_rate) is float and not Path("runs").exists()


# --- Evaluation ---


def test_evaluation_plays_whole_episodes_of_the_saved_model(script, tiny, cli, capsys):
    script.module.train(tiny("Truncated"))
    before = Path("runs/run0/checkpoint.pt").read_bytes()
    fake_envs.Fake.made.clear()
    line = "--evaluate runs/run0 --eval-episodes 3"  # needs no --env-id
    code, out, err = cli(line)
    assert code == 0, err
    assert sum(env.steps for env in fake_envs.Fake.made) == 15
    assert "Return 5.0 ± 0.0 in 3 episodes" in out
    assert Path("runs/run0/checkpoint.pt").read_bytes() == before
    assert [x.name for x in Path("runs").iterdir()] == ["run0"]
    code, _, err = cli("--evaluate runs/run0 --eval-episodes 0")
    assert code == 2 and err == "Error: --eval-episodes must be at least 1.\n"


def test_evaluation_repeats_itself_under_other_seeds_than_the_training(script, tiny):
    script.module.train(tiny("Walk"))
    trained = {x for env in fake_envs.Fake.made for x in env.draws}
    fake_envs.Fake.made.clear()
    first, second = (script.module.evaluate("runs/run0", episodes=6) for _ in range(2))
    assert first == second
    assert len(first) == len(set(first)) == 6
    assert not trained & {x for env in fake_envs.Fake.made for x in env.draws}


@pytest.mark.slow
@on("vector")
def test_evaluation_films_mujoco_without_a_screen(script):
    env = {name: x for name, x in os.environ.items() if name not in ("DISPLAY", "MUJOCO_GL")}
    batch = "--num-steps 64 --num-minibatches 2 --total-timesteps 64 --no-compile"
    for line in (
        f"--env-id Hopper-v4 --run-name run {batch}",
        "--evaluate runs/run --eval-episodes 1 --capture-video",
    ):
        command = [sys.executable, str(script.path), *line.split()]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "Warn" not in result.stderr, result.stderr
    (film,) = Path("runs/run/videos").glob("*.mp4")
    assert f"Video: {film}\n" in result.stdout
