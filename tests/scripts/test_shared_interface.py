"""What every script shows and refuses: command line, logs, evaluation."""

import contextlib
import dataclasses
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import fake_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
import wandb
from adapters import scripts, scripts_with, slow_on
from helpers import curves, flags
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark.evidence.tags import tags_of

# --- Bad input ---

LINES = {  # what is refused -> a word of the sentence
    "--env-id Nothing-like-this": "Nothing-like-this",
    "--env-id no_such_module:Arm-v0": "no_such_module",
    "--env-id .arm:Arm-v0": ".arm",
    "--env-id :Arm-v0": "--env-id",
    "--num-steps many": "num-steps",
    "--gamma 1.5": "--gamma (1.5) must be from 0 to 1",
    "--no-such-flag 1": "no-such-flag",
    "--evaluate nowhere": "nowhere",
    "--resume nowhere": "nowhere",
    "--capture-video": "capture-video",
    "--eval-episodes 3": "--eval-episodes, --capture-video, --video-length need --evaluate.",
    "--device tpu": "device",
    "--clip-coef=-1": "--clip-coef (-1",
}
if not torch.cuda.is_available():
    LINES["--device cuda"] = "--device cuda needs a GPU"


def assert_refused(result, word):
    """Exit code 2 and one sentence, or the parser's box, that has the word."""
    code, _, err = result
    words = " ".join(re.sub("[│╭╮╰╯─]", "", err).split())
    assert code == 2 and "Traceback" not in err and word in words, err
    assert "For full helptext" in err or (err.startswith("Error: ") and err.count("\n") == 1), err
    assert "https:" not in err
    assert not Path("runs").exists() or not list(Path("runs").rglob("checkpoint.pt"))


@scripts("continuous", "kl_penalty", "multidiscrete", "vector_env", "atari", "lstm")
def test_impossible_settings_are_refused_by_their_flags(script):
    assert script.module.Args(gamma=1, num_envs=np.int64(16)).num_envs == 16
    own = {x.name for x in dataclasses.fields(script.module.Args) if x.type is float}
    numbers = own - {"ent_coef", "total_timesteps", "early_stop_kl"}
    for name, values in [*script.refused.items(), *((x, [-0.1, math.nan]) for x in numbers)]:
        for value in values:
            with pytest.raises(script.module.UsageError, match=name.replace("_", "-")):
                script.module.Args(**{name: value})


@scripts("continuous", "vector_env", "atari")
@slow_on("atari")
def test_bad_input_is_one_sentence_and_exit_code_2(script, tiny, cli, monkeypatch):
    for line, word in LINES.items():
        assert_refused(cli(line), word)
    for env_id in [x for x in gym.registry if "ALE/" in x]:  # as without that import
        monkeypatch.delitem(gym.registry, env_id)
    for env_id, word in script.unsuitable.items():
        assert_refused(cli(flags(tiny(env_id=env_id))), word)
    Path("runs").touch()
    assert_refused(cli(flags(tiny())), "Not a directory: change --run-name")


@scripts("continuous", "vector_env")
def test_a_run_is_tracked_under_its_name_and_a_resumed_one_is_the_same(
    script, tiny, cli, monkeypatch
):
    """If tracking cannot start, the log does not start either, whose curves it copies."""
    given = []

    def init(**about):
        given.append(about)
        if len(given) == 1:
            raise wandb.Error("No API key configured.")
        return contextlib.nullcontext()

    monkeypatch.setattr(wandb, "init", init)
    args = tiny(track=True, gamma=0.875, run_name="mine")
    assert_refused(cli(flags(args)), "No API key")
    assert not list(Path("runs").rglob("events*"))
    script.module.train(args)
    script.module.train(resume="runs/mine")
    with pytest.raises(script.module.UsageError, match="has a run already"):
        script.module.train(args)
    refused, first, again = given  # and nothing of what was refused before
    assert first == again and refused["id"] != first["id"] and first["resume"] == "allow"
    assert first["sync_tensorboard"] and first["name"] == "mine" and first["config"] == vars(args)


# --- Logs ---

PROMISED = {f"charts/{x}" for x in ("episodic_return", "episodic_length", "learning_rate", "SPS")}
PROMISED |= {f"losses/{x}" for x in ("policy_loss", "value_loss", "entropy", "approx_kl")}
PROMISED |= {f"losses/{x}" for x in ("explained_variance", "grad_norm")}
PROMISED |= {f"check/{x}" for x in ("value_bias", "update", "first_kl")}


@scripts_with("environments")
def test_tensorboard_has_the_promised_curves_and_the_details(script, tiny, capsys):
    args, begin = tiny("Walk", gamma=0.875), time.perf_counter()
    result = script.module.train(args)
    assert sum(32 / x["charts/SPS"] for x in result["updates"]) < time.perf_counter() - begin
    assert {type(x) for update in result["updates"] for x in update.values()} == {int, float}
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
    assert f"return {np.mean([x['return'] for x in episodes]):.5g}" in capsys.readouterr().err
    events = EventAccumulator("runs/run0").Reload()
    texts = {x.split("/")[0]: events.Tensors(x)[0].tensor_proto for x in events.Tags()["tensors"]}
    texts = {name: x.string_val[0].decode() for name, x in texts.items()}
    found = [(x.number, x.title) for x in tags_of(script.path.read_text())]
    written = [re.match(r"(?:Detail )?(.*?): ([^([]*)", x) for x in texts["details"].splitlines()]
    assert len(found) > 10 and [x[2].strip() for x in written] == [title for _, title in found]
    assert [x[1] for x in written if x[1][0].isdigit()] == [n for n, _ in found if n[:1].isdigit()]
    head, line, *rows = texts["hyperparameters"].splitlines()  # a table in Markdown
    assert head.count("|") == line.count("|") == 3
    assert rows == [f"| {name} | {value} |" for name, value in vars(args).items()]


@pytest.mark.slow
@scripts("continuous")
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


@scripts("continuous", "vector_env", "atari")
def test_short_forms_of_settings_are_understood(script, cli, monkeypatch):
    given = []

    def train(args, resume):
        given.append(args)
        return {"run_dir": "here"}

    monkeypatch.setattr(script.module, "train", train)
    assert cli("--lr 0.125 --total-timesteps 2e6")[0] == 0
    assert given == [script.module.Args(learning_rate=0.125, total_timesteps=2e6)]


# --- Evaluation ---


@scripts("continuous", "multidiscrete", "atari", "lstm")
@slow_on("multidiscrete")
def test_evaluation_plays_whole_episodes_and_repeats_itself_under_seeds_of_its_own(
    script, tiny, cli
):
    script.module.train(tiny("Walk"))
    trained = {x for env in fake_envs.Fake.made for x in env.draws}
    before = Path("runs/run0/checkpoint.pt").read_bytes()
    fake_envs.Fake.made.clear()
    returns = script.module.evaluate("runs/run0", episodes=6)
    assert len(returns) == len(set(returns)) == 6
    assert not trained & {x for env in fake_envs.Fake.made for x in env.draws}
    code, out, err = cli("--evaluate runs/run0 --eval-episodes 6")  # needs no --env-id
    shown = f"Return {np.mean(returns):.5g} ± {np.std(returns):.3g} in 6 episodes"
    assert code == 0 and shown in out, err
    assert Path("runs/run0/checkpoint.pt").read_bytes() == before
    assert [x.name for x in Path("runs").iterdir()] == ["run0"]
    for wrong in ({"episodes": 0}, {"video_length": 0}):
        (name,) = wrong
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(script.module.UsageError, match=f"{flag[-6:]} must be at least 1"):
            script.module.evaluate("runs/run0", **wrong)


@pytest.mark.slow
@scripts_with("vector")
def test_evaluation_films_mujoco_without_a_screen(script):
    env = {name: x for name, x in os.environ.items() if name not in ("DISPLAY", "MUJOCO_GL")}
    batch = "--num-steps 64 --num-minibatches 2 --total-timesteps 64 --compile no"
    for line in (
        f"--env-id Hopper-v4 --run-name run {batch}",
        "--evaluate runs/run --eval-episodes 1 --capture-video --video-length 5",
    ):
        command = [sys.executable, str(script.path), *line.split()]
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "Warn" not in result.stderr, result.stderr
    (film,) = Path("runs/run/videos").glob("*.mp4")
    assert f"Video: {film}\n" in result.stdout


@scripts("continuous", "kl_penalty", "atari", "lstm")
def test_a_choice_that_there_is_not_is_refused_by_its_name(script):
    """Any text is true, and would switch a setting on."""
    for name, value in {"norm_adv": "False", "anneal_lr": None, "device": "tpu"}.items():
        with pytest.raises(script.module.UsageError, match=f"--{name.replace('_', '-')} "):
            script.module.Args(**{name: value})
    assert not script.module.Args(norm_adv=np.bool_(False)).norm_adv
    if hasattr(script.args(), "compile"):
        with pytest.raises(script.module.UsageError, match="must be one of auto, yes, no"):
            script.module.Args(compile="True")
        # As programs for version 6 say it.
        assert [script.module.Args(compile=x).compile for x in (True, False)] == ["yes", "no"]


@scripts("continuous", "atari")
def test_settings_that_could_not_be_loaded_again_are_refused_before_training(script, tiny):
    @dataclasses.dataclass(frozen=True)
    class Mine(script.module.Args):
        my_own: float = 0.5

    with pytest.raises(script.module.UsageError, match="add yours to it"):
        script.module.train(Mine(**vars(tiny("Walk"))))
    assert not Path("runs").exists()

    @dataclasses.dataclass(frozen=True)
    class Others(script.module.Args):  # other defaults only
        gamma: float = 0.5

    script.module.train(Others(**{**vars(tiny("Walk", run_name="others")), "gamma": 0.5}))
    assert script.module.load_checkpoint("runs/others")["args"].gamma == 0.5
