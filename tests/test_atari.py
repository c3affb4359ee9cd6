"""ppo_atari.py: the network, what is special in its loop, and the command line.

What it shares with the other scripts is tested in test_shared_*.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import SCRIPTS, assert_first_convolution_sees, assert_nature_network, on
from conftest import same_weights

import ppo_atari as ppo

args = SCRIPTS["atari"].args


@pytest.fixture
def agent():
    """The agent as it is, with the whole CNN."""
    torch.manual_seed(0)
    return ppo.Agent(6, ppo.Args())


def images(rows):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8, generator=generator)


# --- The network: details 2, 13, 21, 22 ---


def test_shapes_and_gains_are_those_of_the_nature_network(agent):
    assert_nature_network(agent, frames=4, features=512)
    assert sum(x.numel() for x in agent.cnn.parameters()) == 1_684_128
    assert sum(x.numel() for x in agent.parameters()) == 1_687_719


def test_first_convolution_sees_1_for_pixel_255_in_channels_last_order(agent):
    assert_first_convolution_sees(agent, images(3))


def test_policy_and_value_share_the_network(agent):
    _, logprob, _, value = agent.get_action_and_value(images(4), torch.zeros(4, dtype=torch.int64))
    first = agent.cnn[0].weight
    for loss in (logprob.sum(), value.sum()):
        assert torch.autograd.grad(loss, first, retain_graph=True)[0].any()
    assert torch.equal(agent.get_value(images(4)), value)


def test_gumbel_noise_samples_from_the_softmax(agent):
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.0, -2.0])
    policy = torch.distributions.Categorical(logits=logits)
    agent.features = lambda obs: torch.zeros(len(obs), 512)
    agent.policy.bias.data = logits
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=(40_000, 6)))
    actions, logprobs, _, _ = agent.get_action_and_value(torch.zeros(40_000, 1), noise=noise)
    share = torch.bincount(actions, minlength=6) / 40_000
    assert torch.allclose(share, policy.probs, atol=0.01)
    assert torch.allclose(logprobs, policy.log_prob(actions))
    greedy, _, entropy, _ = agent.get_action_and_value(torch.zeros(1, 1))
    assert greedy.item() == 0 and torch.allclose(entropy, policy.entropy())


def test_bfloat16_changes_little_and_keeps_weights_in_float32(agent):
    half, obs = ppo.Agent(6, ppo.Args(bfloat16=True)), images(8)
    half.load_state_dict(agent.state_dict())
    assert {x.dtype for x in half.parameters()} == {torch.float32}
    a, b = agent.features(obs), half.features(obs)
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    assert (a - b).norm() / a.norm() < 0.02


# --- The loop ---


@on("atari")
def test_epsilon_and_the_limit_of_the_gradient_reach_adam(tiny, recorded):
    agent = ppo.train(tiny("Walk", adam_eps=1e-4, max_grad_norm=0.01))["agent"]
    (group,) = ppo.load_checkpoint("runs/run0")["adam"]["param_groups"]
    assert group["eps"] == 1e-4 and len(group["params"]) == len(list(agent.parameters()))
    norms = [step.gradient.norm().item() for step in recorded.steps]
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)


@on("atari")
def test_rollout_stores_one_byte_per_pixel_and_the_policy_is_sampled(tiny, monkeypatch):
    seen, real = [], ppo.Agent.get_action_and_value

    def record(self, obs, action=None, noise=0.0):
        result = real(self, obs, action, noise)
        if action is None:
            seen.append((obs, noise, result[0]))
        return result

    monkeypatch.setattr(ppo.Agent, "get_action_and_value", record)
    ppo.train(tiny("Walk"))
    obs, noise, _ = seen[0]
    assert obs.dtype == torch.uint8 and obs.shape == (2, 4, 84, 84) and noise.shape == (2, 6)
    assert obs.untyped_storage().nbytes() == (16 + 1) * 2 * 4 * 84 * 84
    # The first policy is nearly uniform: actions are the largest noise, and differ.
    assert all(torch.equal(actions, noise.argmax(-1)) for _, noise, actions in seen[:16])
    assert len({x.item() for _, _, actions in seen for x in actions}) > 2


# --- With real games ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one."""
    monkeypatch.chdir(tmp_path)


def test_resumed_run_with_lives_goes_on_bit_for_bit(folder):
    settings = {"env_id": "Breakout", "num_steps": 40, "num_minibatches": 1, "update_epochs": 1}
    settings["anneal_lr"] = False
    whole = ppo.train(args(**settings, total_timesteps=480, run_name="whole"))
    ppo.train(args(**settings, total_timesteps=320, run_name="half"))
    resumed = ppo.train(args(**settings, total_timesteps=480, resume="runs/half"))
    assert same_weights(whole["agent"], resumed["agent"])
    assert whole["episodes"] == resumed["episodes"] != []


def test_evaluation_films_whole_games(folder, monkeypatch):
    monkeypatch.setattr(ppo, "MAX_GAME_STEPS", 12)
    ppo.train(args(env_id="Pong", total_timesteps=32, update_epochs=1, run_name="run"))
    results = ppo.evaluate(ppo.Args(evaluate="runs/run", eval_episodes=1, capture_video=True))
    assert {name: len(x) for name, x in results.items()} == {"greedy": 1, "sampled": 1}
    videos = sorted(x.name for x in Path("runs/run/videos").glob("*.mp4"))
    assert videos == ["greedy-episode-0.mp4", "sampled-episode-0.mp4"]


@pytest.mark.slow
def test_compiled_run_equals_the_eager_one(folder):
    eager, compiled = (
        ppo.train(args(env_id="Pong", compile=x, run_name=f"run{x}")) for x in (False, True)
    )
    for a, b in zip(eager["updates"], compiled["updates"]):
        assert b["losses/entropy"] == pytest.approx(a["losses/entropy"], rel=1e-4)
        assert b["losses/value_loss"] == pytest.approx(a["losses/value_loss"], rel=1e-3)


# --- The command line ---


@on("atari")
@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("", (4, 0.5, False)),
        ("--paper", (3, 2.0, True)),  # half a square, c1 = 1
        ("--paper --update-epochs 4", (4, 2.0, True)),
        ("--vf-coef 0.5 --paper --no-anneal-clip", (3, 0.5, False)),
    ],
)
def test_paper_sets_the_papers_settings_and_flags_beside_it_win(cli, monkeypatch, line, settings):
    given = []
    monkeypatch.setattr(ppo, "train", given.append)
    cli(line)
    assert [(x.update_epochs, x.vf_coef, x.anneal_clip) for x in given] == [settings]


# Text that stands once in the script, what breaks it, the tests that must notice (pytest's -k).
MUTATIONS = [
    # 2, 13, 21, 22: the network
    ("layer_init(nn.Linear(64 * 7 * 7, 512), gain)", "nn.Linear(64 * 7 * 7, 512)", "shapes_and"),
    ("math.sqrt(2)", "1.0", "shapes_and"),
    ("kernel_size=4, stride=2", "kernel_size=4, stride=2, padding=1", "shapes_and"),
    ("nn.Linear(512, num_actions), 0.01)", "nn.Linear(512, num_actions), 1.0)", "shapes_and"),
    ("nn.Linear(512, 1), 1.0)", "nn.Linear(512, 1), 0.01)", "shapes_and"),
    ("self.value(features).squeeze(-1)", "self.value(features.detach()).squeeze(-1)", "share_the"),
    ("scaled = obs / 255.0", "scaled = obs / 1.0", "pixel_255"),
    (".contiguous(memory_format=torch.channels_last)", "", "pixel_255"),
    ("enabled=self.bfloat16", "enabled=False", "bfloat16"),
    ("-(logprobs.exp() * logprobs).sum(-1)", "-logprobs.sum(-1)", "gumbel"),
    # 1 and 3, 11: the loop
    ("noise=t_noise[t]", "noise=0.0", "is_sampled"),
    ("eps=args.adam_eps", "eps=1e-8", "reach_adam"),
    ("(agent.parameters(), args.max_grad_norm)", "(agent.parameters(), math.inf)", "reach_adam"),
    ('adam.load_state_dict(saved["adam"])', "pass", "bit_for_bit"),
    ("tyro.cli(Args, default=Args(**PAPER))", "Args(**PAPER)", "paper"),
    ('"vf_coef": 2.0', '"vf_coef": 1.0', "paper"),
]  # fmt: skip
