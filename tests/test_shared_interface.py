"""What every script shows and refuses: command line, logs, warnings, evaluation."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import fake_envs
import numpy as np
import pytest
import torch
import wandb
from adapters import flags, on
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# --- Bad input ---

WRONG = [
    *("env-id Nothing-like-this", "env-id nosuchmodule:Foo-v0", "num-envs 0", "num-steps -5"),
    *("num-steps many", "total-timesteps 1e6", "gamma 1.5", "gae-lambda -0.1", "seed -1"),
    *("learning-rate -1", "learning-rate nan", "num-minibatches 7", "total-timesteps 3"),
    *("no-such-flag 1", "evaluate nowhere", "resume nowhere"),
]
if not torch.cuda.is_available():
    WRONG.append("device cuda")


def assert_refused(result, word):
    """Exit code 2 and one sentence, or the parser's box, that has the word."""
    code, _, err = result
    assert code == 2 and "Traceback" not in err and word in err.replace("_", "-"), err
    assert "For full helptext" in err or (err.startswith("Error: ") and err.count("\n") == 1), err
    assert not Path("runs").exists() or not list(Path("runs").rglob("checkpoint.pt"))


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_is_one_sentence_and_exit_code_2(cli, line):
    flag, value = line.split()
    named = flag in ("env-id", "evaluate", "resume")
    assert_refused(cli(f"--{line}"), value.split(":")[0] if named else flag)


def test_spaces_that_do_not_fit_are_refused(script, tiny, cli):
    for env_id, word in script.unsuitable.items():
        assert_refused(cli(flags(tiny(env_id=env_id))), word)


def test_tracking_that_cannot_start_is_refused(tiny, cli, monkeypatch):
    def init(**settings):
        raise wandb.Error("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    assert_refused(cli(flags(tiny(track=True))), "No API key")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert_refused(cli(flags(tiny(track=True))), "wandb")
    assert not Path("runs").exists()


# --- Logs ---

PROMISED = {f"charts/{x}" for x in ("episodic_return", "episodic_length", "learning_rate", "SPS")}
PROMISED |= {f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "approx_kl")}
PROMISED |= {f"losses/{x}" for x in ("old_approx_kl", "explained_variance", "grad_norm")}


def test_tensorboard_has_the_promised_curves_and_the_details(script, tiny):
    args = tiny("Walk", gamma=0.875)
    result = script.module.train(args)
    events = EventAccumulator("runs/run0", size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) >= PROMISED
    for name in result["updates"][0].keys() - {"global_step"}:
        curve = [(x.step, x.value) for x in events.Scalars(name)]
        logged = [(x["global_step"], np.float32(x[name])) for x in result["updates"]]
        np.testing.assert_equal(curve, logged)
    batch, ended = args.batch_size, {}
    for episode in result["episodes"]:
        ended.setdefault(-(-episode["global_step"] // batch) * batch, []).append(episode)
    for name in ("return", "length"):
        curve = [(x.step, x.value) for x in events.Scalars(f"charts/episodic_{name}")]
        means = [(step, np.mean([x[name] for x in own])) for step, own in ended.items()]
        np.testing.assert_allclose(curve, means, rtol=1e-6)
    (text,) = (events.Tensors(x)[0] for x in events.Tags()["tensors"] if "details" in x)
    assert text.tensor_proto.string_val[0].decode() == script.module.details(args)
    assert "gamma=0.875" in script.module.details(args)


@on("continuous")
def test_weights_and_biases_gets_the_curves_and_the_settings(script, tiny):
    line = flags(tiny("Walk", track=True, run_name="tracked"))
    code = f"import sys, fake_envs, runpy; sys.argv = ['x', *{line.split()}]\n"
    code += f"runpy.run_path({str(script.path)!r}, run_name='__main__')"
    env = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = Path("wandb").glob("offline-run-*/*.wandb")
    written, updates = path.read_bytes(), script.module.load_checkpoint("runs/tracked")["updates"]
    assert written.count(b"losses/value_loss") >= len(updates) == 3
    for word in ("tracked", "num_steps", "16", "env_id", script.env_id("Walk"), *PROMISED):
        assert word.encode() in written, word


# --- Health ---


def test_each_row_of_health_fires_once_in_time_and_is_silent_otherwise(script, capsys):
    table = script.module.HEALTH
    assert len(table) >= 5
    fine = {name: max(low, min(high, 0.02)) for name, low, high, *_ in table}

    def warnings_of(history):
        script.module.warn(history)
        return capsys.readouterr().out

    assert not any(warnings_of([fine] * n) for n in range(1, 50))
    assert not any(warnings_of([{"losses/of another agent": 1.0}] * n) for n in range(1, 50))
    for name, low, high, patience, _ in table:
        for level in [low - 0.1] + [1.1 * high] * (high < math.inf):
            bad = {**fine, name: level}
            for before in ([], [fine] * 30, [bad] * 40 + [fine]):
                fired = [warnings_of(before + [bad] * n) for n in range(1, patience + 5)]
                assert [bool(x) for x in fired] == [n == patience for n in range(1, patience + 5)]
                line = fired[patience - 1]
                assert line.startswith(f"Warning: {name} is ") and line.count("\n") == 1
                assert re.search(r": (lower|raise|scale|check|try)|--", line)  # says what to do


@on("vector")
def test_values_that_clipping_holds_are_counted_and_warned_about(script, tiny, recorded, capsys):
    """Raw rewards in the hundreds: values cannot get there in steps of clip_coef."""
    settings = {"total_timesteps": 32 * 22, "learning_rate": 0.02}
    settings |= {script.value_clip: 0.001, **script.raw}
    updates = script.module.train(tiny(**settings))["updates"]
    assert all(x["losses/value_clipfrac"] > 0.8 for x in updates[-20:])
    assert "Warning: losses/value_clipfrac" in capsys.readouterr().out


def test_details_prints_the_table_and_exits(script, tiny, cli):
    args = tiny(gamma=0.875, details=True)
    code, out, _ = cli(flags(args))
    assert code == 0 and out.strip() == script.module.details(args) and "gamma=0.875" in out
    assert not Path("runs").exists()


# --- Evaluation ---


def test_evaluation_plays_whole_episodes_of_the_saved_model(script, tiny, cli, capsys):
    script.module.train(tiny("Truncated"))
    before = Path("runs/run0/checkpoint.pt").read_bytes()
    fake_envs.Fake.made.clear()
    line = "--evaluate runs/run0 --eval-episodes 3"  # needs no --env-id
    code, out, err = cli(f"{line} --gamma 0.5 --seed 3")
    assert code == 0, err
    (ignored,) = (x for x in out.splitlines() if "not from here" in x)
    assert ignored.endswith(": gamma")
    assert [env.steps for env in fake_envs.Fake.made] == [15, 15]
    assert re.findall(r"(\w+) 5\.00? ± 0\.00?", out) == ["returns", "lengths"] * 2
    assert Path("runs/run0/checkpoint.pt").read_bytes() == before
    assert [x.name for x in Path("runs").iterdir()] == ["run0"]


def test_evaluation_repeats_itself_under_other_seeds_than_the_training(script, tiny):
    script.module.train(tiny("Walk"))
    trained = {x for env in fake_envs.Fake.made for x in env.draws}
    fake_envs.Fake.made.clear()
    args = tiny(evaluate="runs/run0", eval_episodes=6)
    first, second = script.module.evaluate(args), script.module.evaluate(args)
    assert first == second
    best, sampled = (x["returns"] for x in first.values())
    assert len(best) == len(sampled) == 6 and best != sampled
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
    assert len(list(Path("runs/run/videos").glob("*.mp4"))) == 2
