"""ppo_atari.py: the network, what is special in its loop, and the command line."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ppo_atari as ppo
from ppo_atari import Agent, Args, train

TINY = {
    "env_id": "Pong",
    "num_envs": 2,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 2,
    "total_timesteps": 32,
    "torch_threads": 1,
    "device": "cpu",
    "compile": False,
    "run_name": "run",
}


@pytest.fixture
def agent():
    torch.manual_seed(0)
    return Agent(6, Args())


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def images(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8, generator=generator)


# --- The network: details 2, 13, 21, 22 ----------------------------------------------------


def test_parameter_counts_are_those_of_the_nature_network(agent):
    assert sum(x.numel() for x in agent.cnn.parameters()) == 1_684_128
    assert sum(x.numel() for x in agent.parameters()) == 1_687_719


def test_layers_are_84_20_9_7_without_padding(agent):
    shapes, x = [], torch.zeros(1, 4, 84, 84)
    for layer in agent.cnn:
        x = layer(x)
        shapes.append((type(layer).__name__, *x.shape[1:]))
    convolutions = [(32, 20, 20), (64, 9, 9), (64, 7, 7)]
    names = [("Conv2d", *x) for x in convolutions], [("ReLU", *x) for x in convolutions]
    assert shapes[:6] == [x for pair in zip(*names) for x in pair]
    assert shapes[6:] == [("Flatten", 3136), ("Linear", 512), ("ReLU", 512)]


def test_gains_are_sqrt_2_then_a_hundredth_for_the_policy_and_1_for_the_value(agent):
    gains = {"cnn": math.sqrt(2), "policy": 0.01, "value": 1.0}
    for name, weight in agent.named_parameters():
        if name.endswith("bias"):
            assert not weight.any()
            continue
        matrix = weight.flatten(1)
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        expected = gains[name.split(".")[0]] ** 2 * torch.eye(len(matrix))
        assert torch.allclose(matrix @ matrix.T, expected, atol=1e-4), name


@pytest.mark.parametrize("method", ["get_value", "get_action_and_value"])
def test_first_convolution_sees_1_for_pixel_255(agent, method):
    seen = []
    agent.cnn[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    obs = torch.tensor([0, 51, 255], dtype=torch.uint8).repeat(4 * 84 * 28).view(1, 4, 84, 84)
    getattr(agent, method)(obs)
    assert len(seen) == 1 and seen[0].dtype == torch.float32
    assert torch.equal(seen[0].unique(), torch.tensor([0.0, 0.2, 1.0]))


def test_convolutions_compute_in_channels_last_order(agent):
    """The order that they are fastest in; each layer keeps that of its input."""
    outputs = []
    agent.cnn[0].register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    agent.get_value(images(3))
    assert outputs[0].is_contiguous(memory_format=torch.channels_last)


def test_policy_and_value_share_the_network(agent):
    _, logprob, _, value = agent.get_action_and_value(images(4), torch.zeros(4, dtype=torch.int64))
    first = agent.cnn[0].weight
    for loss in (logprob.sum(), value.sum()):
        assert torch.autograd.grad(loss, first, retain_graph=True)[0].any()
    assert torch.equal(agent.get_value(images(4)), value)


def test_gumbel_noise_samples_from_the_softmax(agent):
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.0, -2.0])
    with torch.no_grad():
        agent.policy.weight.zero_()
        agent.policy.bias.copy_(logits)
    agent.features = lambda obs: torch.zeros(len(obs), 512)
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=(40_000, 6)))
    actions, logprobs, _, _ = agent.get_action_and_value(torch.zeros(40_000, 1), noise=noise)
    share = torch.bincount(actions, minlength=6) / 40_000
    assert torch.allclose(share, logits.softmax(0), atol=0.01)
    assert torch.allclose(logprobs, logits.log_softmax(0)[actions])
    greedy, _, entropy, _ = agent.get_action_and_value(torch.zeros(1, 1))
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert greedy.item() == 0 and torch.allclose(entropy, expected)


def test_bfloat16_changes_little_and_keeps_weights_in_float32(agent):
    half, obs = Agent(6, Args(bfloat16=True)), images(8)
    half.load_state_dict(agent.state_dict())
    assert {x.dtype for x in half.parameters()} == {torch.float32}
    a, b = agent.features(obs), half.features(obs)
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    assert (a - b).norm() / a.norm() < 0.02


# --- The loop, with real games --------------------------------------------------------------


def test_adam_has_the_epsilon_and_the_gradient_is_clipped_before_its_step(monkeypatch):
    made, norms = [], []

    class Adam(torch.optim.Adam):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

        def step(self, closure=None):
            gradient = [x.grad.flatten() for x in self.param_groups[0]["params"]]
            norms.append(torch.cat(gradient).norm().item())
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    result = train(Args(**TINY, max_grad_norm=0.01, adam_eps=1e-4))
    assert [x.param_groups[0]["eps"] for x in made] == [1e-4]
    assert len(made[0].param_groups[0]["params"]) == len(list(result["agent"].parameters()))
    assert len(norms) == 8 and all(x == pytest.approx(0.01, rel=1e-3) for x in norms)
    assert all(x["losses/grad_norm"] > 0.01 for x in result["updates"])


def test_rollout_stores_one_byte_per_pixel_and_the_policy_is_sampled(monkeypatch):
    seen, real = [], Agent.get_action_and_value

    def record(self, obs, action=None, noise=0.0):
        result = real(self, obs, action, noise)
        if action is None:
            seen.append((obs, noise, result[0]))
        return result

    monkeypatch.setattr(Agent, "get_action_and_value", record)
    train(Args(**TINY))
    obs, noise, _ = seen[0]
    assert obs.dtype == torch.uint8 and obs.shape == (2, 4, 84, 84)
    assert obs.untyped_storage().nbytes() == (8 + 1) * 2 * 4 * 84 * 84
    assert noise.shape == (2, 6)
    # The first policy is nearly uniform: actions are the largest noise, and differ.
    assert all(torch.equal(x[2], x[1].argmax(-1)) for x in seen[:8])
    assert len({x.item() for _, _, actions in seen for x in actions}) > 2


def test_killed_run_with_lives_goes_on_bit_for_bit(monkeypatch):
    settings = TINY | {"env_id": "Breakout", "num_steps": 40, "num_minibatches": 1}
    settings |= {"update_epochs": 1, "checkpoint_interval": 2, "total_timesteps": 480}
    whole = train(Args(**settings))
    half, real = Args(**settings | {"run_name": "half"}), ppo.save_checkpoint

    def killed(run_dir, args, state):
        real(run_dir, args, state)
        if state["global_step"] == 320:
            raise RuntimeError("killed")

    monkeypatch.setattr(ppo, "save_checkpoint", killed)
    with pytest.raises(RuntimeError):
        train(half)
    monkeypatch.setattr(ppo, "save_checkpoint", real)
    resumed = train(replace(half, resume="runs/half"))
    for name, weight in whole["agent"].state_dict().items():
        assert torch.equal(weight, resumed["agent"].state_dict()[name])
    assert whole["episodes"] == resumed["episodes"] != []


@pytest.mark.slow
def test_compiled_run_equals_the_eager_one():
    eager = train(Args(**TINY))
    compiled = train(Args(**TINY | {"compile": True, "run_name": "compiled"}))
    for a, b in zip(eager["updates"], compiled["updates"]):
        assert b["losses/entropy"] == pytest.approx(a["losses/entropy"], rel=1e-4)
        assert b["losses/value_loss"] == pytest.approx(a["losses/value_loss"], rel=1e-3)


def test_evaluation_films_whole_games(monkeypatch):
    monkeypatch.setattr(ppo, "MAX_GAME_STEPS", 12)
    train(Args(**TINY))
    results = ppo.evaluate(Args(evaluate="runs/run", eval_episodes=1, capture_video=True))
    assert {name: len(x) for name, x in results.items()} == {"greedy": 1, "sampled": 1}
    videos = sorted(x.name for x in Path("runs/run/videos").glob("*.mp4"))
    assert videos == ["greedy-episode-0.mp4", "sampled-episode-0.mp4"]


# --- The command line -------------------------------------------------------------------------


def settings_of(line, monkeypatch):
    given = []
    monkeypatch.setattr(ppo, "train", given.append)
    monkeypatch.setattr("sys.argv", ["ppo_atari.py", *line.split()])
    ppo.main()
    (args,) = given
    return args.update_epochs, args.vf_coef, args.anneal_clip


def test_paper_sets_the_papers_settings_and_flags_beside_it_win(monkeypatch):
    assert settings_of("", monkeypatch) == (4, 0.5, False)
    assert settings_of("--paper", monkeypatch) == (3, 2.0, True)  # half a square, c1 = 1
    assert settings_of("--paper --update-epochs 4", monkeypatch) == (4, 2.0, True)
    assert settings_of("--vf-coef 0.5 --paper --no-anneal-clip", monkeypatch) == (3, 0.5, False)


# Text that stands once in the script, what breaks it, the tests that must notice (pytest's -k).
MUTATIONS = [
    # 2, 13, 21, 22: the network
    ("layer_init(nn.Linear(64 * 7 * 7, 512), gain)", "nn.Linear(64 * 7 * 7, 512)", "gains_are"),
    ("math.sqrt(2)", "1.0", "gains_are"),
    ("kernel_size=4, stride=2", "kernel_size=4, stride=2, padding=1", "without_padding"),
    ("nn.Linear(512, num_actions), 0.01)", "nn.Linear(512, num_actions), 1.0)", "gains_are"),
    ("nn.Linear(512, 1), 1.0)", "nn.Linear(512, 1), 0.01)", "gains_are"),
    ("self.value(features).squeeze(-1)", "self.value(features.detach()).squeeze(-1)", "share_the"),
    ("scaled = obs / 255.0", "scaled = obs / 1.0", "pixel_255"),
    (".contiguous(memory_format=torch.channels_last)", "", "channels_last"),
    ("enabled=self.bfloat16", "enabled=False", "bfloat16"),
    ("-(logprobs.exp() * logprobs).sum(-1)", "-logprobs.sum(-1)", "gumbel"),
    # 1 and 3, 11: the loop
    ("noise=t_noise[t]", "noise=0.0", "is_sampled"),
    ("eps=args.adam_eps", "eps=1e-8", "adam_has"),
    ("nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)",
     "nn.utils.clip_grad_norm_(agent.parameters(), math.inf)", "adam_has"),
    ('adam.load_state_dict(saved["adam"])', "pass", "bit_for_bit"),
    ("tyro.cli(Args, default=Args(**PAPER))", "Args(**PAPER)", "paper"),
    ('"vf_coef": 2.0', '"vf_coef": 1.0', "paper"),
]  # fmt: skip
