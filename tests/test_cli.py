"""The command line: bad input, evaluation, logs read back."""

import csv
import json
import os
import re
import subprocess
import sys
from ctypes.util import find_library
from typing import ClassVar

import fake_envs
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb_log import wandb_records

import ppo_continuous_action as ppo
from ppo_continuous_action import train

TINY = "--total-timesteps 64 --num-steps 32 --num-minibatches 4 --update-epochs 2"


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the script's main with a command line; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(line):
        monkeypatch.setattr(sys, "argv", ["ppo_continuous_action.py", *line.split()])
        code = 0
        try:
            ppo.main()
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def assert_refused(result, *words):
    """Exit code 2 and one sentence that contains the words."""
    code, _, err = result
    assert code == 2 and "Traceback" not in err
    sentences = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert len(sentences) == 1 and all(word in sentences[0] for word in words), err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--env-id HalfCheeta-v4", ["HalfCheetah-v4"]),
        ("--env-id Nothing-like-this", ["Nothing-like-this"]),
        ("--env-id HalfCheetah-v99", ["v99"]),
        ("--env-id CartPole-v1", ["Discrete", "ppo_multidiscrete.py"]),
        ("--env-id Hopper-v3", ["Hopper-v3"]),
        ("--num-minibatches 31", ["--num-minibatches 31", "2048"]),
        ("--num-minibatches 2048", ["one sample"]),
        ("--num-envs 0", ["--num-envs", "positive"]),
        ("--num-steps -5", ["--num-steps", "positive"]),
        ("--clip-coef 0", ["--clip-coef", "positive"]),
        ("--learning-rate -1", ["--learning-rate", "negative"]),
        ("--learning-rate nan", ["--learning-rate"]),
        ("--gamma 1.5", ["--gamma"]),
        ("--total-timesteps 2047", ["2047", "2048"]),
        ("--seed -1", ["--seed"]),
        ("--seed 99999999999999999999", ["--seed"]),
        ("--env-id nomodule:Foo-v0", ["nomodule"]),
        ("--env-id FakeRaises-v0", ["FakeRaises-v0", "OSError", "no licence"]),
        ("--env-id FakeSequence-v0", ["FakeSequence-v0", "flattened"]),
        ("--env-id FakeIntegers-v0", ["FakeIntegers-v0", "floats"]),
        ("--env-id CartPole-v1 --capture-video", ["Discrete"]),
        ("--evaluate nowhere", ["nowhere"]),
        ("--resume nowhere", ["nowhere"]),
        ("--output-dir /proc/nowhere --env-id Pendulum-v1", ["/proc/nowhere"]),
    ],
)
def test_bad_input_gets_one_sentence_and_leaves_nothing_behind(cli, tmp_path, line, words):
    assert_refused(cli(line), *words)
    assert [x.name for x in tmp_path.iterdir() if x.name != "MUJOCO_LOG.TXT"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_cuda_without_a_gpu_is_refused(cli):
    assert_refused(cli("--device cuda"), "--device cuda", "use cpu")


@pytest.mark.parametrize("line", ["--learning-rte 1", "--num-steps many", "--total-timesteps 1e6"])
def test_wrong_flags_and_values_are_named(cli, line):
    code, _, err = cli(line)
    assert code == 2 and line.split()[0] in err + "--total-timesteps" and "Traceback" not in err


def test_track_without_wandb_is_refused(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert_refused(cli(f"--env-id Pendulum-v1 {TINY} --track"), "pip install wandb")


def test_tracking_that_cannot_start_leaves_no_run(cli, monkeypatch, tmp_path):
    import wandb

    def refuse(**settings):
        raise wandb.Error("no network")

    line = f"--env-id Pendulum-v1 {TINY} --run-name mine"
    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", refuse)
        assert_refused(cli(f"{line} --track"), "no network", "WANDB_MODE=offline")
    assert not list(tmp_path.rglob("args.json"))
    assert cli(line)[0] == 0  # its name is free


def test_videos_without_the_package_that_draws_are_refused(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert_refused(cli(f"--env-id Pendulum-v1 {TINY} --capture-video"), "classic")


def test_flags_with_resume_auto_are_checked_with_the_settings_of_the_run(cli, tmp_path):
    size = "--env-id FakeCounter-v0 --run-name mine --num-steps 48 --num-minibatches 3"
    assert cli(f"{size} --total-timesteps 96")[0] == 0
    line = "--env-id FakeCounter-v0 --run-name mine --resume auto --num-steps 48"
    code, _, err = cli(f"{line} --total-timesteps 144")  # 48 is no multiple of the default, 32
    assert code == 0, err
    wrong = "--run-name other --resume auto --num-minibatches 31"
    assert_refused(cli(wrong), "--num-minibatches 31", "2048")
    assert not (tmp_path / "runs/other").exists()


def test_an_existing_run_is_not_overwritten(cli, tmp_path):
    line = f"--env-id FakeCounter-v0 {TINY} --run-name mine"
    assert cli(line)[0] == 0
    before = {x.name: x.read_bytes() for x in (tmp_path / "runs/mine").iterdir()}
    assert_refused(cli(line), "--resume runs/mine")
    assert before == {x.name: x.read_bytes() for x in (tmp_path / "runs/mine").iterdir()}


def test_bad_models_are_refused_by_evaluate(cli, tmp_path):
    assert cli(f"--env-id FakeCounter-v0 {TINY} --run-name mine")[0] == 0
    model = tmp_path / "runs/mine/model.pt"
    good = model.read_bytes()
    assert_refused(cli(f"--evaluate {model}"), "FakeCounter-v0")  # trained elsewhere
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.pt").write_bytes(good[: len(good) // 2])
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
    for name in ("text.pt", "cut.pt", "foreign.pt"):
        assert_refused(cli(f"--env-id FakeCounter-v0 --evaluate {tmp_path / name}"), name)
    content = ppo.load_file(model, "agent")
    content["agent"]["value_head.bias"] = torch.zeros(7)
    ppo.save_file(tmp_path / "misfit.pt", content)
    assert_refused(
        cli(f"--env-id FakeCounter-v0 --evaluate {tmp_path / 'misfit.pt'}"), "does not fit"
    )


def test_the_newest_file_of_a_run_is_evaluated(cli, tmp_path):
    """A finished run that was made longer and killed has an old model and a newer checkpoint."""
    assert cli(f"--env-id FakeCounter-v0 {TINY} --run-name mine")[0] == 0
    model, checkpoint = (tmp_path / "runs/mine" / x for x in ("model.pt", "checkpoint.pt"))
    checkpoint.write_text("newer")
    os.utime(model, (1, 1))
    assert_refused(cli(f"--env-id FakeCounter-v0 --evaluate {model.parent}"), "checkpoint.pt")
    os.utime(checkpoint, (0, 0))
    assert cli(f"--env-id FakeCounter-v0 --evaluate {model.parent} --eval-episodes 1")[0] == 0


def test_end_to_end_run_logs_everything_to_tensorboard_and_csv(cli, tmp_path):
    code, out, _ = cli(
        f"--env-id Pendulum-v1 {TINY} --run-name mine --total-timesteps 640 --print-details"
    )
    assert code == 0 and "37/37" in out and "orthogonal_init=True" in out
    lines = out.splitlines()
    assert lines[-1] == "Done. Model: runs/mine/model.pt; logs: tensorboard --logdir runs/mine"
    assert re.search(r"step +\d+ +return -\d+", out)
    events = EventAccumulator(str(tmp_path / "runs/mine"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= {
        *ppo.LOSS_METRICS,
        "losses/grad_norm", "losses/explained_variance", "policy/log_std", "values/mean",
        "advantages/std", "charts/learning_rate", "charts/episodic_return",
        "charts/episodic_length", "charts/SPS", "charts/SPS_rollout", "charts/SPS_update",
    }  # fmt: skip
    assert [x.step for x in events.Scalars("losses/policy_loss")] == list(range(32, 641, 32))
    returns = [(x.step, x.value) for x in events.Scalars("charts/episodic_return")]
    rows = (tmp_path / "runs/mine/episodes.csv").read_text().splitlines()
    assert rows[0] == "global_step,return,length" and len(rows) == 4
    for (step, value), row in zip(returns, rows[1:]):
        assert (step, pytest.approx(value)) == (int(row.split(",")[0]), float(row.split(",")[1]))
    text = events.Tensors("details/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.count("/37 |") == 37 and "observation normalization" in text
    assert json.loads((tmp_path / "runs/mine/args.json").read_text())["num_steps"] == 32


def test_weights_and_biases_offline_run_can_be_read_back(tmp_path):
    """In a process of its own, since wandb keeps state."""
    size = "--num-envs 2 --total-timesteps 512"  # both episodes end at step 400
    command = f"--env-id Pendulum-v1 {TINY} {size} --track --run-name mine"
    result = subprocess.run(
        [sys.executable, ppo.__file__, *command.split()],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (log,) = tmp_path.glob("runs/mine/wandb/offline-run-*/run-*.wandb")
    steps, keys, returns = [], set(), {}
    for record in wandb_records(log):
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                keys.add(name)
                if name == "charts/episodic_return":
                    returns[steps[-1]] = json.loads(item.value_json)
    assert keys >= {"losses/policy_loss", "charts/episodic_return", "charts/SPS"}
    assert any(key.startswith("details") for key in keys)
    assert steps == sorted(steps) and steps[-1] == 512
    with (tmp_path / "runs/mine/episodes.csv").open() as file:
        both = [float(row["return"]) for row in csv.DictReader(file)]
    assert len(both) == 2 and returns == {400: pytest.approx(np.mean(both))}


# --- Evaluation ---


def test_evaluation_reports_mean_and_sampled_actions(cli, tmp_path):
    assert cli(f"--env-id Pendulum-v1 {TINY} --run-name mine")[0] == 0
    before = (tmp_path / "runs/mine/model.pt").read_bytes()
    code, out, _ = cli("--env-id Pendulum-v1 --evaluate runs/mine --eval-episodes 3")
    assert code == 0
    assert re.findall(r"(\w+) action: -\d+\.\d ± \d+\.\d over 3 episodes", out) == [
        "mean",
        "sampled",
    ]
    code, out, _ = cli("--env-id Pendulum-v1 --evaluate runs/mine/checkpoint.pt --deterministic")
    assert code == 0 and "sampled" not in out and "over 10 episodes" in out
    assert (tmp_path / "runs/mine/model.pt").read_bytes() == before


def test_rollouts_of_one_step_can_be_evaluated(cli):
    size = "--num-envs 8 --num-steps 1 --num-minibatches 2 --total-timesteps 16"
    assert cli(f"--env-id FakeCounter-v0 {size} --run-name mine")[0] == 0
    code, out, err = cli("--env-id FakeCounter-v0 --evaluate runs/mine --eval-episodes 1")
    assert code == 0 and "over 1 episodes" in out, err


def test_saved_model_acts_like_the_trained_one_with_frozen_statistics(tiny, monkeypatch):
    result = train(tiny(env_id="Pendulum-v1", num_steps=64, total_timesteps=256))
    args, agent = result["args"], result["agent"]
    content = ppo.load_file(args.run_dir / "model.pt", "agent")
    statistics = content["statistics"]["obs"]
    assert statistics["count"] == pytest.approx(258, abs=1)
    monkeypatch.setattr(ppo.RunningMeanStd, "update", lambda *x: pytest.fail("statistics moved"))
    played = []
    real = ppo.play

    def spy(args, envs, loaded, obs_stats, policy):
        obs = np.array([[0.3, -0.8, 2.0]])
        with torch.no_grad():
            for network in (loaded, agent):
                z = torch.as_tensor(ppo.normalize_obs(obs, obs_stats, True, 10.0)).float()
                played.append(network.action_mean(network.policy_trunk(z)))
        np.testing.assert_array_equal(obs_stats.mean, statistics["mean"].numpy())
        return real(args, envs, loaded, obs_stats, policy)

    monkeypatch.setattr(ppo, "play", spy)
    returns = ppo.evaluate(
        ppo.Args(
            env_id="Pendulum-v1", evaluate=str(args.run_dir), eval_episodes=2, deterministic=True
        )
    )
    torch.testing.assert_close(*played)  # the last bit may depend on where the weights lie
    assert len(returns["mean"]) == 2
    again = ppo.evaluate(
        ppo.Args(
            env_id="Pendulum-v1", evaluate=str(args.run_dir), eval_episodes=2, deterministic=True
        )
    )
    assert returns == again


def test_trained_policy_evaluates_far_better_than_an_untrained_one(tiny):
    settings = dict(env_id="FakeTarget-v0", num_envs=8, num_steps=64, gamma=0.0, norm_obs=True)
    trained = train(
        tiny(
            **settings,
            total_timesteps=8192,
            learning_rate=3e-3,
            update_epochs=10,
            num_minibatches=8,
        )
    )
    untrained = train(tiny(**settings, total_timesteps=512, learning_rate=0.0))
    means = []
    for result in (trained, untrained):
        args = ppo.Args(
            env_id="FakeTarget-v0", evaluate=str(result["args"].run_dir), eval_episodes=50
        )
        means.append(np.mean(ppo.evaluate(args)["mean"]))
    assert means[0] > -0.15 and means[1] < -0.35


def test_an_evaluation_records_each_episode_that_it_plays(cli, tmp_path, monkeypatch):
    class Drawn(fake_envs.Counter):
        metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}

        def __init__(self, render_mode=None):
            super().__init__()
            self.render_mode = render_mode

        def render(self):
            return np.zeros((16, 16, 3), np.uint8)

    spec = ppo.gym.envs.registration.EnvSpec("Drawn-v0", Drawn)
    monkeypatch.setitem(ppo.gym.registry, "Drawn-v0", spec)
    assert cli(f"--env-id Drawn-v0 {TINY} --run-name mine")[0] == 0
    code, _, err = cli("--env-id Drawn-v0 --evaluate runs/mine --eval-episodes 2 --capture-video")
    assert code == 0, err
    videos = (tmp_path / "runs/mine/evaluation/videos").glob("*.mp4")
    assert sorted(int(x.stem.split("-")[-1]) for x in videos) == [0, 1, 3, 4]


@pytest.mark.slow
@pytest.mark.skipif(find_library("EGL") is None, reason="rendering without a screen needs EGL")
def test_videos_are_recorded_without_a_screen(tmp_path):
    command = [sys.executable, ppo.__file__, "--env-id", "Hopper-v4", "--capture-video"]
    for flags in (
        f"{TINY} --run-name mine",
        "--evaluate runs/mine --eval-episodes 1 --deterministic",
    ):
        result = subprocess.run(
            [*command, *flags.split()], cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
    for folder in ("runs/mine/videos", "runs/mine/evaluation/videos"):
        videos = list((tmp_path / folder).glob("*.mp4"))
        assert videos and all(x.stat().st_size > 1000 for x in videos), folder
