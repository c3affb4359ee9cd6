"""ppo_atari.py, ppo_atari_lstm.py: the networks, what is special in the loops, the command line.

What it shares with the other scripts is tested in test_shared_*.py.
"""

import os
from pathlib import Path
from unittest.mock import MagicMock

import gymnasium as gym
import moviepy
import numpy as np
import pytest
import torch
from adapters import SCRIPTS, scripts, scripts_with, slow_on
from helpers import assert_same_runs, gain_of, record
from torch import nn

import ppo_atari as ppo

args = SCRIPTS["atari"].args


@pytest.fixture(scope="module", params=["atari", "lstm"])
def network(request):
    """An agent as it is, frames, and what the LSTM takes besides them; nobody changes it."""
    module, generator = SCRIPTS[request.param].module, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    shape = (2, 3, 1, 84, 84) if request.param == "lstm" else (6, 4, 84, 84)
    obs = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    others = (torch.zeros(2, 3), torch.randn(2, 3, 128)) if request.param == "lstm" else ()
    return module.Agent(6), obs, others


# --- The networks: details 2, 13, 21, 22, 32 ---


def assert_layer(layer, shape, gain):
    assert layer.weight.shape == shape and (layer.bias is None or (layer.bias == 0).all())
    assert gain_of(layer) == pytest.approx(gain, abs=1e-4)


def test_shapes_and_gains_are_those_of_the_nature_network_and_the_lstm_has_one_bias(network):
    agent, obs, others = network
    kinds = [type(layer).__name__ for layer in agent.cnn]
    assert kinds == ["Conv2d", "ReLU"] * 3 + ["Flatten", "Linear", "ReLU"]
    shapes = [(32, obs.shape[-3], 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 64 * 7 * 7)]
    for i, shape in zip((0, 2, 4, 7), shapes, strict=True):
        assert_layer(agent.cnn[i], shape, 2**0.5)
    assert [agent.cnn[i].stride for i in (0, 2, 4)] == [(4, 4), (2, 2), (1, 1)]
    assert {agent.cnn[i].padding for i in (0, 2, 4)} == {(0, 0)}
    features = 128 if others else 512
    assert_layer(agent.policy, (6, features), 0.01)
    assert_layer(agent.value, (1, features), 1.0)
    if others:
        assert_layer(agent.lstm_input, (4 * 128, 512), 1.0)
        assert_layer(agent.lstm_recurrent, (4 * 128, 128), 1.0)
        assert agent.lstm_input.bias is not None and agent.lstm_recurrent.bias is None


def test_first_convolution_sees_1_for_pixel_255_in_channels_last_order(network, monkeypatch):
    agent, obs, others = network
    seen = record(monkeypatch, agent.cnn[0], "forward")
    agent(obs, *others)
    ((pixels, output),) = seen
    assert torch.equal(pixels, obs.flatten(0, -4) / 255)
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_policy_and_value_share_the_network(network):
    agent, obs, others = network
    actions = torch.zeros(obs.shape[:-3], dtype=torch.int64)
    values, logprobs, _ = agent.evaluate_actions(obs, *others, actions)
    shared = [x for name, x in agent.named_parameters() if name.startswith(("cnn", "lstm"))]
    for x in (logprobs, values):
        assert all(g.any() for g in torch.autograd.grad(x.sum(), shared, retain_graph=True))
    assert torch.equal(agent(obs, *others)[1], values)


def test_actions_are_samples_of_the_softmax_or_the_most_likely():
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.0, -2.0]).expand(40_000, 6)
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=logits.shape))
    actions = ppo.draw(logits, noise)
    share = torch.bincount(actions, minlength=6) / 40_000
    assert torch.allclose(share, logits[0].softmax(-1), atol=0.01)
    assert not ppo.draw(logits, 0 * noise).any()


def test_bfloat16_changes_little_and_keeps_weights_in_float32(network, monkeypatch):
    agent, obs, others = network
    full = agent(obs, *others)[0]
    monkeypatch.setattr(agent, "bfloat16", True)
    half, values = agent(obs, *others)[:2]
    assert {x.dtype for x in agent.parameters()} == {half.dtype, values.dtype} == {torch.float32}
    assert 0 < (half - full).norm() / full.norm() < 0.02


@scripts_with("games")
def test_bfloat16_is_refused_on_processors_that_only_emulate_it(script, tiny, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert script.module.train(tiny(bfloat16=True, total_timesteps=32))["agent"].bfloat16
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(script.module.UsageError, match="--no-bfloat16"):
        script.module.train(tiny(bfloat16=True))


# --- The loop ---


@scripts_with("games")
def test_rollout_stores_one_byte_per_pixel_and_the_policy_is_sampled(script, tiny, monkeypatch):
    args = tiny("Walk")
    forwards = record(monkeypatch, script.module.Agent, "forward")
    draws = record(monkeypatch, script.module, "draw")
    script.module.train(args)
    obs = forwards[0][1]
    assert obs.dtype == torch.uint8 and obs.numel() == args.num_envs * script.frames * 84 * 84
    assert obs.untyped_storage().nbytes() == (args.num_steps + 1) * obs.numel()
    # The first policy is nearly uniform: actions are the largest noise, and differ.
    draws = draws[: args.num_steps]
    assert all(torch.equal(actions, noise.argmax(-1)) for _, noise, actions in draws)
    assert len(torch.cat([actions for *_, actions in draws]).unique()) > 2


@scripts_with("games")
@slow_on("lstm")
def test_threads_are_few_while_games_are_played_and_as_before_after_train(
    script, tiny, monkeypatch
):
    """Even after an error."""
    seen, draw, ppo_update = [], script.module.draw, script.module.ppo_update

    def noting(name, function):
        return lambda *inputs: seen.append((name, torch.get_num_threads())) or function(*inputs)

    monkeypatch.setattr(script.module, "draw", noting("play", draw))
    torch.set_num_threads(3)
    args = tiny("Walk", total_timesteps=32, torch_threads=2, update_epochs=1)
    script.module.train(args, noting("learn", ppo_update))
    assert set(seen) == {("play", 1), ("learn", 2)} and torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError):
        script.module.train(tiny("Walk"), lambda *_: 1 / 0)
    assert torch.get_num_threads() == 3


@scripts("atari")
def test_the_loss_is_compiled_unless_told_otherwise(script, tiny, monkeypatch):
    calls, loss = [], script.module.ppo_loss

    def compiled(function, device):
        assert function is loss and device.type == "cpu"
        return lambda *inputs: calls.append(inputs) or function(*inputs)

    monkeypatch.setattr(script.module, "compiled", compiled)
    for compile in ("yes", "no"):
        script.module.train(tiny(compile=compile, total_timesteps=32))
        assert len(calls) == 4


@scripts_with("games")
def test_processes_and_threads_are_not_more_than_the_cores_that_may_be_used(script, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6})
    names = {"__name__": "copy"}
    exec(Path(script.module.__file__).read_text(), names)
    settings = {**vars(script.module.Args()), "torch_threads": 3}
    assert names["GAME_PROCESSES"] == 3 and vars(names["Args"]()) == settings


@pytest.mark.slow
@scripts_with("games")
def test_flags_change_the_game_that_is_evaluated_and_filmed(script, tiny, cli, monkeypatch):
    script.module.train(tiny("Walk", total_timesteps=32))
    monkeypatch.setattr(script.module, "MAX_GAME_STEPS", 4)
    steps = record(monkeypatch, script.module.EpisodicLife, "step")
    line = "--evaluate runs/run0 --env-id Pong --eval-episodes 2 --capture-video --video-length 9"
    code, out, err = cli(line)
    assert code == 0, err
    film = Path("runs/run0/videos/rl-video-episode-0.mp4")
    assert "in 2 episodes" in out and f"Video: {film}\n" in out
    assert [*film.parent.glob("*.mp4")] == [film]
    assert moviepy.VideoFileClip(str(film)).n_frames == 10  # and the first one, says Gymnasium
    assert len(steps) == 2 * (4 + 2)  # the next game's presses included


@scripts("atari")
def test_a_loaded_policy_acts_on_frames_by_what_is_likely_and_by_noise(script, tiny):
    agent, env = script.module.train(tiny())["agent"], script.module.make_env(tiny())
    policy, obs = script.module.load_policy("runs/run0", env), env.reset(seed=0)[0]
    best = agent(torch.tensor(obs)[None])[0].argmax().item()
    assert [policy(x) for x in (obs, obs, obs.tolist())] == [best] * 3
    noise = np.random.default_rng(0).gumbel(size=(50, 6))
    assert len({policy(obs, x) for x in noise}) == 6
    with pytest.raises(ValueError, match="cannot reshape"):
        policy(obs[0])
    with pytest.raises(script.module.UsageError, match="other spaces"):
        script.module.load_policy("runs/run0", MagicMock(action_space=gym.spaces.Discrete(4)))


@pytest.mark.slow
def test_compiled_run_equals_the_eager_one():
    eager, compiled = (
        ppo.train(args(env_id="Pong", compile=x, run_name=f"run{x}")) for x in ("no", "yes")
    )
    for a, b in zip(eager["updates"], compiled["updates"]):
        assert b["losses/entropy"] == pytest.approx(a["losses/entropy"], rel=1e-4)
        assert b["losses/value_loss"] == pytest.approx(a["losses/value_loss"], rel=1e-3)


# --- The command line ---


@scripts_with("games")
@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("", (4, 0.5, False)),
        ("--paper", (3, 2.0, True)),  # half a square, c1 = 1
        ("--paper --update-epochs 4", (4, 2.0, True)),
        ("--vf-coef 0.5 --paper --no-anneal-clip", (3, 0.5, False)),
    ],
)
def test_paper_sets_the_papers_settings_and_flags_beside_it_win(
    script, cli, monkeypatch, line, settings
):
    given = []
    train = lambda x, resume: given.append(x) or {"run_dir": None}  # noqa: E731
    monkeypatch.setattr(script.module, "train", train)
    assert cli(line)[0] == 0
    assert [(x.update_epochs, x.vf_coef, x.anneal_clip) for x in given] == [settings]


@scripts_with("games")
def test_a_resumed_run_keeps_its_settings_and_paper_changes_them(script, tiny, cli):
    script.module.train(tiny("Walk", total_timesteps=32, gamma=0.9, vf_coef=0.7))
    code, _, err = cli("--resume runs/run0 --total-timesteps 64 --paper")
    assert code == 0 and "1/2" in err and "2/2" in err, err  # the progress
    args = script.module.load_checkpoint("runs/run0")["args"]
    assert (args.gamma, args.vf_coef) == (0.9, 2.0)


def test_each_process_needs_a_gpu_and_steps_of_its_own(monkeypatch):
    assert ppo.choose_device(args(device="cpu")) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ppo, "LOCAL_RANK", 1)
    assert ppo.choose_device(args(device="auto")) == torch.device("cuda:1")
    monkeypatch.setattr(ppo, "LOCAL_RANK", 2)
    with pytest.raises(ppo.UsageError, match="--nproc-per-node 2"):
        ppo.train(args(device="cuda"))
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    with pytest.raises(ppo.UsageError, match=r"at least 2 \* --num-steps \* --num-envs \(2048\)"):
        ppo.Args(total_timesteps=2047)


def test_gradients_and_metrics_are_means_over_the_processes(monkeypatch):
    """Those of the other process are twice as large here."""

    def loss(agent, *_):
        return 2 * agent.weight.sum(), {"metric": torch.tensor(4.0)}

    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(3))
    agent = nn.Linear(1, 1)
    agent.bias.requires_grad_(False)
    adam = torch.optim.Adam(agent.parameters())
    batch, chosen = ppo.Batch(*torch.zeros(6, 1)), torch.tensor([0])
    metrics = ppo.ppo_update(agent, adam, batch, chosen, args(), loss)
    assert metrics == {"metric": 6.0, "losses/grad_norm": 3.0}


@scripts_with("games")
@slow_on("lstm")
def test_whole_numbers_are_good_for_settings_that_are_floats(script, tiny):
    whole = {"learning_rate": 0, "clip_coef": 1, "max_grad_norm": 1, "gamma": 1}
    a, b = (
        script.module.train(tiny("Walk", **{name: kind(x) for name, x in whole.items()}))
        for kind in (int, float)
    )
    assert_same_runs(a, b)
