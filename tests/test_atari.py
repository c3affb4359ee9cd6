"""ppo_atari.py: the network, the loop around it and the command line."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import ppo_atari
from ppo_atari import Agent, Args, FrameStack, RunError, act, detail_table, evaluate, train

ROOT = Path(__file__).parent.parent
TINY = {
    "env_id": "Pong",
    "num_envs": 2,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 2,
    "total_timesteps": 32,
    "async_envs": False,
    "torch_threads": 1,
    "device": "cpu",
}


def tiny(tmp_path, **changes):
    return Args(**{**TINY, "output_dir": str(tmp_path), "run_name": "run", **changes})


def images(rows, frames=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, frames, 84, 84)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.fixture
def agent():
    torch.manual_seed(0)
    return Agent(4, 6, Args())


class CountingGame(gym.Env):
    """Frames of brightness t, reward 1, episodes of 5 steps that are truncated or terminated."""

    def __init__(self, truncate=True):
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = gym.spaces.Discrete(6)
        self.truncate, self.actions, self.resets = truncate, [], 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.resets = 0, self.resets + 1
        return np.full((84, 84), 100, np.uint8), {}

    def step(self, action):
        self.t += 1
        self.actions.append(int(action))
        over = self.t == 5
        info = {"episode": {"r": 5.0, "l": 5}} if over else {}
        frame = np.full((84, 84), 100 + self.t, np.uint8)
        return frame, 1.0, over and not self.truncate, over and self.truncate, info


def use_counting_games(monkeypatch, truncate=True):
    made = []

    def make_envs(args):
        thunks = [lambda: CountingGame(truncate)] * args.num_envs
        envs = FrameStack(SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP), 4)
        envs.call = lambda name, *rest: [None] * args.num_envs
        made.append(envs)
        return envs

    monkeypatch.setattr(ppo_atari, "make_envs", make_envs)
    return made


def record_calls(monkeypatch, name):
    """Arguments of every call of a function of the script, which still does its work."""
    calls, function = [], getattr(ppo_atari, name)

    def recording(*args):
        kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        result = function(*args)
        calls.append((kept, result))
        return result

    monkeypatch.setattr(ppo_atari, name, recording)
    return calls


# --- The network: details 2, 21, 22 ------------------------------------------------------


def parameters(module):
    return sum(x.numel() for x in module.parameters())


def test_parameter_counts_are_those_of_the_nature_network(agent):
    assert parameters(agent.cnn) == 1_684_128
    assert parameters(agent) == 1_687_719


def test_layers_are_84_20_9_7_without_padding(agent):
    shapes, x = [], torch.zeros(1, 4, 84, 84)
    for layer in agent.cnn:
        x = layer(x)
        shapes.append((type(layer).__name__, tuple(x.shape[1:])))
    assert shapes == [
        ("Conv2d", (32, 20, 20)),
        ("ReLU", (32, 20, 20)),
        ("Conv2d", (64, 9, 9)),
        ("ReLU", (64, 9, 9)),
        ("Conv2d", (64, 7, 7)),
        ("ReLU", (64, 7, 7)),
        ("Flatten", (3136,)),
        ("Linear", (512,)),
        ("ReLU", (512,)),
    ]


def test_orthogonal_weights_with_gains_and_zero_biases(agent):
    gains = {"cnn": math.sqrt(2), "action_head": 0.01, "value_head": 1.0}
    for name, weight in agent.named_parameters():
        if name.endswith("bias"):
            assert not weight.any()
            continue
        matrix = weight.flatten(1)
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        expected = gains[name.split(".")[0]] ** 2 * torch.eye(len(matrix))
        assert torch.allclose(matrix @ matrix.T, expected, atol=1e-4), name


def test_initial_policy_is_nearly_uniform(agent):
    entropy = agent.get_action_and_value(images(16))[2]
    assert torch.allclose(entropy, torch.full((16,), math.log(6)), atol=1e-3)


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
        assert torch.autograd.grad(loss, first, retain_graph=True)[0].abs().sum() > 0
    assert torch.equal(agent.get_value(images(4)), value)


def test_gumbel_noise_samples_from_the_softmax(agent):
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.0, -2.0])
    with torch.no_grad():
        agent.action_head.weight.zero_()
        agent.action_head.bias.copy_(logits)
    agent.features = lambda obs: torch.zeros(len(obs), 512)
    noise = np.random.default_rng(0).gumbel(size=(40_000, 6)).astype(np.float32)
    actions, logprobs, _ = act(agent, (torch.zeros(40_000, 1), torch.from_numpy(noise)))
    share = torch.bincount(actions, minlength=6) / 40_000
    assert torch.allclose(share, logits.softmax(0), atol=0.01)
    assert torch.allclose(logprobs, logits.log_softmax(0)[actions])
    greedy, _, entropy, _ = agent.get_action_and_value(torch.zeros(1, 1))
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert greedy.item() == 0 and torch.allclose(entropy, expected)


def test_bfloat16_changes_little_and_keeps_weights_in_float32():
    torch.manual_seed(0)
    full = Agent(4, 6, Args())
    half = Agent(4, 6, Args(bfloat16=True))
    half.load_state_dict(full.state_dict())
    obs = images(32)
    assert {x.dtype for x in half.parameters()} == {torch.float32}
    a, b = full.features(obs), half.features(obs)
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    assert (a - b).norm() / a.norm() < 0.02


# --- The loop ------------------------------------------------------------------------------


def test_rollout_stores_one_byte_per_pixel(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        ppo_atari, "act", lambda agent, inputs: calls.append(inputs[0]) or act(agent, inputs)
    )
    train(tiny(tmp_path))
    obs = calls[0]
    assert obs.dtype == torch.uint8 and obs.shape == (2, 4, 84, 84)
    assert obs.untyped_storage().nbytes() == (8 + 1) * 2 * 4 * 84 * 84


def test_ratio_is_1_while_the_weights_stand_still(tmp_path):
    result = train(tiny(tmp_path, learning_rate=0.0))
    for update in result["updates"]:
        assert abs(update["losses/approx_kl"]) < 1e-6
        assert abs(update["losses/old_approx_kl"]) < 1e-5
        assert update["losses/clipfrac"] == 0


def record_act(monkeypatch):
    """Observations and actions of every step of the rollouts."""
    steps = []

    def recording(agent, inputs):
        obs = inputs[0].clone()
        result = act(agent, inputs)
        steps.append((obs, result[0].clone()))
        return result

    monkeypatch.setattr(ppo_atari, "act", recording)
    return steps


def test_rollouts_continue_where_the_one_before_ended(tmp_path, monkeypatch):
    made, steps = use_counting_games(monkeypatch), record_act(monkeypatch)
    train(tiny(tmp_path, num_minibatches=1, update_epochs=1))
    newest = [obs[:, -1, 0, 0].tolist() for obs, _ in steps]
    assert newest == [[100 + t % 5] * 2 for t in range(16)]
    assert [game.resets for game in made[0].env.envs] == [1 + 16 // 5] * 2
    pressed = np.array([game.actions for game in made[0].env.envs]).T
    assert np.array_equal(pressed, torch.stack([action for _, action in steps]).numpy())


def test_stack_of_a_new_episode_holds_nothing_of_the_old_one(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    steps = record_act(monkeypatch)
    train(tiny(tmp_path))
    stacks = [obs[0, :, 0, 0].tolist() for obs, _ in steps]
    assert stacks[4:7] == [[101, 102, 103, 104], [0, 0, 0, 100], [0, 0, 100, 101]]


@pytest.mark.parametrize(
    ("truncate", "setting"), [(True, False), (True, True), (False, False)], ids=str
)
def test_only_truncated_games_are_bootstrapped_from_their_last_frames(
    tmp_path, monkeypatch, truncate, setting
):
    use_counting_games(monkeypatch, truncate)
    calls = record_calls(monkeypatch, "gae")
    args = tiny(tmp_path, truncation_is_terminal=setting, learning_rate=0.0)
    result = train(args)
    last = torch.tensor([102, 103, 104, 105], dtype=torch.uint8)[:, None, None].expand(4, 84, 84)
    with torch.no_grad():
        values = result["agent"].get_value(last[None])
    (rewards, stored, next_values, terminated, done, *_), _ = calls[0]
    ends = [4]  # within a rollout of 8 steps
    assert rewards.eq(1).all()
    assert done.sum(1).nonzero().flatten().tolist() == ends
    terminal = not truncate or setting
    assert terminated.sum(1).nonzero().flatten().tolist() == (ends if terminal else [])
    if not terminal:
        assert torch.allclose(next_values[4], values.expand(2), atol=1e-5)
        assert not torch.allclose(next_values[4], stored[5], atol=1e-3)
    kept = [t for t in range(7) if t not in ends]
    assert torch.equal(next_values[kept], stored[[t + 1 for t in kept]])
    next_first = calls[1][0][1][0]  # V of what the next rollout begins with
    assert torch.allclose(next_values[7], next_first, atol=1e-6)


def test_each_epoch_uses_each_sample_once_in_shuffled_minibatches(tmp_path, monkeypatch):
    calls = record_calls(monkeypatch, "loss_gradient")
    train(tiny(tmp_path, total_timesteps=16, num_steps=8, num_minibatches=4))
    advantages = [kept[1][4] for kept, _ in calls]
    assert [len(x) for x in advantages] == [4] * 8  # 2 epochs of 4 minibatches
    epochs = [torch.cat(advantages[:4]), torch.cat(advantages[4:])]
    assert torch.equal(epochs[0].sort()[0], epochs[1].sort()[0])
    assert not torch.equal(*epochs)


def test_minibatch_rows_belong_together(tmp_path, monkeypatch):
    """Each observation goes with its own action, log-probability and value."""
    calls = record_calls(monkeypatch, "loss_gradient")
    result = train(tiny(tmp_path, total_timesteps=16, learning_rate=0.0))
    for (_, (obs, actions, logprobs, values, _, _), *_), _ in calls:
        _, again, _, value = result["agent"].get_action_and_value(obs, actions)
        assert torch.allclose(again, logprobs, atol=1e-5)
        assert torch.allclose(value, values, atol=1e-5)


def test_schedules_and_adam(tmp_path, monkeypatch):
    made = []

    class Adam(torch.optim.Adam):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    updates = train(tiny(tmp_path, total_timesteps=64, anneal_clip=True))["updates"]
    rates = [x["charts/learning_rate"] for x in updates]
    assert rates == pytest.approx([2.5e-4, 1.875e-4, 1.25e-4, 0.625e-4])
    clips = [x["charts/clip_coef"] for x in updates]
    assert clips == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert made[0].param_groups[0]["eps"] == 1e-5
    assert sum(x.numel() for x in made[0].param_groups[0]["params"]) == 1_687_719


def test_gradient_is_clipped_as_one_vector(tmp_path, monkeypatch):
    norms = []

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            norms.append(self.param_groups[0]["params"][0].grad.norm().item())
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    updates = train(tiny(tmp_path, max_grad_norm=0.01))["updates"]
    assert max(x["losses/grad_norm"] for x in updates) > 0.01
    assert max(norms) <= 0.01 * 1.001


def test_gradients_of_all_processes_are_averaged_before_the_step(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    start = train(tiny(tmp_path, run_name="start", learning_rate=0.0))
    monkeypatch.setattr(ppo_atari, "average_over_processes", lambda x: x.zero_())
    assert same_weights(train(tiny(tmp_path)), start)


def test_metrics_are_means_over_all_minibatches_and_settings_reach_the_loss(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    calls = record_calls(monkeypatch, "loss_gradient")
    settings = {"clip_vloss": False, "norm_adv": False, "ent_coef": 0.02, "vf_coef": 0.7}
    updates = train(tiny(tmp_path, **settings))["updates"]
    assert {tuple(arguments[3:]) for arguments, _ in calls} == {(False, False, 0.02, 0.7)}
    for update, own in zip(updates, (calls[:4], calls[4:]), strict=True):  # 2 epochs of 2
        expected = torch.stack([metrics for _, (_, metrics) in own]).mean(0)
        logged = [update[name] for name in ppo_atari.LOSS_METRICS]
        assert logged == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-7)


def test_target_kl_stops_the_epochs(tmp_path):
    updates = train(tiny(tmp_path, target_kl=0.0, learning_rate=0.01, update_epochs=4))["updates"]
    assert [x["charts/epochs"] for x in updates] == [1, 1]


def test_paper_sets_the_papers_settings_and_keeps_what_was_asked_for():
    ours, paper = Args(), Args(paper=True)
    assert (ours.update_epochs, ours.vf_coef, ours.anneal_clip) == (4, 0.5, False)
    assert (paper.update_epochs, paper.vf_coef, paper.anneal_clip) == (3, 1.0, True)
    assert Args(paper=True, update_epochs=7).update_epochs == 7


def test_defaults_are_those_of_the_original():
    args = Args()
    assert (args.num_envs, args.num_steps, args.num_minibatches) == (8, 128, 4)
    assert (args.minibatch_size, args.total_timesteps) == (256, 10_000_000)
    assert (args.learning_rate, args.clip_coef, args.ent_coef) == (2.5e-4, 0.1, 0.01)


def same_weights(first, second):
    pairs = zip(first["agent"].parameters(), second["agent"].parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_same_seed_same_numbers_other_seed_others(tmp_path):
    runs = [train(tiny(tmp_path, run_name=str(i), seed=s)) for i, s in enumerate((1, 1, 2))]
    assert same_weights(runs[0], runs[1])
    assert not same_weights(runs[0], runs[2])


def without_speed(updates):
    return [{k: v for k, v in x.items() if "SPS" not in k} for x in updates]


def test_resumed_run_equals_the_uninterrupted_one_bitwise(tmp_path):
    settings = {"total_timesteps": 64, "checkpoint_interval": 2}
    whole = train(tiny(tmp_path, run_name="whole", **settings))
    first = tiny(tmp_path, run_name="halves", **settings)
    stop = ppo_atari.StopRequest.in_any_process
    try:
        asked = iter([None, ppo_atari.signal.SIGTERM])
        ppo_atari.StopRequest.in_any_process = lambda self: next(asked)
        with pytest.raises(SystemExit) as stopped:
            train(first)
    finally:
        ppo_atari.StopRequest.in_any_process = stop
    assert stopped.value.code == 128 + 15
    resumed = train(replace(first, resume=str(tmp_path / "halves")))
    assert len(resumed["updates"]) == 4
    assert same_weights(whole, resumed)
    assert without_speed(whole["updates"]) == without_speed(resumed["updates"])


def test_fast_path_trains_and_resumes_with_new_games(tmp_path, capsys):
    args = tiny(tmp_path, env_backend="ale")
    assert len(train(args)["updates"]) == 2
    resumed = train(replace(args, total_timesteps=48, resume=str(tmp_path / "run")))
    assert len(resumed["updates"]) == 3
    assert "the episodes start anew" in capsys.readouterr().out


def test_logged_return_is_that_of_the_raw_game(tmp_path, monkeypatch):
    """Pong to a point limit: the sum of raw rewards of one game, not of signs or lives."""
    monkeypatch.setattr(ppo_atari, "MAX_GAME_STEPS", 150)
    result = train(tiny(tmp_path, num_steps=80, total_timesteps=320))
    assert [x["length"] for x in result["episodes"]] == [150] * 2
    assert all(-5 <= x["return"] <= -1 for x in result["episodes"])


def test_bfloat16_run_learns_from_finite_numbers(tmp_path):
    updates = train(tiny(tmp_path, bfloat16=True))["updates"]
    assert all(math.isfinite(value) for x in updates for value in x.values() if value == value)


@pytest.mark.slow
def test_compiled_gradient_equals_the_eager_one(agent):
    args = Args(torch_threads=1)
    obs, actions = images(64), torch.randint(0, 6, (64,))
    minibatch = (obs, actions, *torch.randn(4, 64))
    settings = (torch.tensor(0.1), True, True, 0.01, 0.5)
    fast = ppo_atari.compiled(ppo_atari.loss_gradient, args, (agent, minibatch, *settings))
    assert fast is not ppo_atari.loss_gradient
    for a, b in zip(
        fast(agent, minibatch, *settings), ppo_atari.loss_gradient(agent, minibatch, *settings)
    ):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)


# --- Evaluation and the command line ---------------------------------------------------------


def test_evaluation_plays_whole_games_with_raw_scores(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ppo_atari, "MAX_GAME_STEPS", 120)
    args = tiny(tmp_path, env_id="Breakout")
    train(args)
    results = evaluate(replace(args, evaluate=str(tmp_path / "run"), eval_episodes=2))
    assert set(results) == {"greedy", "sampled"}
    assert all(len(scores) == 2 for scores in results.values())
    assert "over 2 games" in capsys.readouterr().out
    again = evaluate(
        replace(args, evaluate=str(tmp_path / "run"), eval_episodes=2, deterministic=True)
    )
    assert again == {"greedy": results["greedy"]}
    with pytest.raises(RunError, match="was trained on Breakout"):
        evaluate(replace(args, evaluate=str(tmp_path / "run"), env_id="Pong"))


def test_evaluation_of_rollouts_of_one_step(tmp_path, monkeypatch):
    train(tiny(tmp_path, num_envs=4, num_steps=1, total_timesteps=4))
    threads = []
    monkeypatch.setattr(ppo_atari.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(ppo_atari, "play", lambda *args: [1.0])
    args = tiny(tmp_path, evaluate=str(tmp_path / "run"))
    assert evaluate(args) == {"greedy": [1.0], "sampled": [1.0]}
    assert threads == [1]  # those of the training, on which repetition depends


def test_video_shows_the_whole_game(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_atari, "MAX_GAME_STEPS", 30)
    args = tiny(tmp_path, capture_video=True, num_steps=20, total_timesteps=80)
    train(args)
    assert list((tmp_path / "run" / "videos").glob("*.mp4"))
    with pytest.raises(RunError, match="--capture-video needs --env-backend gymnasium"):
        replace(args, env_backend="ale")


def test_table_shows_what_runs_here():
    rows = detail_table(Args(), Path(ppo_atari.__file__).read_text())
    values = {number: value for number, _, value, _ in rows}
    assert [f"{n}/37" for n in range(1, 38)] == [row[0] for row in rows[:37]]
    assert all(not values[f"{n}/37"].startswith("not here") for n in range(1, 23))
    assert all(values[f"{n}/37"].startswith("not here") for n in range(23, 38))


def test_frame_skip_and_limit_are_the_papers():
    assert (ppo_atari.FRAME_SKIP, ppo_atari.NOOP_MAX) == (4, 30)
    assert ppo_atari.MAX_GAME_STEPS * ppo_atari.FRAME_SKIP == 108_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--env-id Pnog", "did you mean Pong?"),
        ("--env-id Pendulum-v1", "ppo_continuous_action.py"),
        ("--num-minibatches 3", "--num-minibatches 3 must divide the batch"),
        ("--num-envs 0", "--num-envs must be positive"),
        ("--num-envs 2 --num-steps 2", "Minibatches of one sample have no spread"),
        ("--sticky-actions 2", "--sticky-actions must lie between 0 and 1"),
        ("--total-timesteps 1000", "less than one batch of 1024 steps"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo_atari.py", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        ppo_atari.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert words in error and error.count("\n") == 1 and error.startswith("Error: ")


def test_command_line_runs_pong_end_to_end(tmp_path):
    command = (
        "ppo_atari.py --env-id PongNoFrameskip-v4 --num-envs 2 --num-steps 8 --num-minibatches 2 "
        "--total-timesteps 32 --torch-threads 1 --device cpu"
    )
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(ROOT / command.split()[0]), *command.split()[1:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "Done. Model: runs/Pong__ppo_atari__1__" in result.stdout
    assert "Traceback" not in result.stderr


# --- Learning ----------------------------------------------------------------------------------


class Brightness(gym.Env):
    """Each frame is dark, grey or bright; naming it earns 1, anything else -1. 8 steps a game."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def frame(self):
        self.level = int(self.np_random.integers(3))
        return np.full((84, 84), 20 + 100 * self.level, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.score = 0, 0.0
        return self.frame(), {}

    def step(self, action):
        reward = 1.0 if action == self.level else -1.0
        self.t, self.score = self.t + 1, self.score + reward
        over = self.t == 8
        info = {"episode": {"r": self.score, "l": 8}} if over else {}
        return self.frame(), reward, over, False, info


class SmallAgent(Agent):
    """The agent with eyes for the frames' brightness only, so that learning takes seconds."""

    def __init__(self, num_frames, num_actions, args):
        super().__init__(num_frames, num_actions, args)
        self.cnn = torch.nn.Sequential(
            torch.nn.AvgPool2d(84),
            torch.nn.Flatten(),
            torch.nn.Linear(num_frames, 512),
            torch.nn.Tanh(),
        )


@pytest.mark.parametrize(
    ("agent_class", "steps", "rate"),
    [
        (SmallAgent, 8_192, 2e-3),
        pytest.param(Agent, 8_192, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_loop_learns_to_name_what_it_sees(tmp_path, monkeypatch, agent_class, steps, rate):
    def make_envs(args):
        thunks = [Brightness] * args.num_envs
        envs = FrameStack(SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP), 4)
        envs.call = lambda name, *rest: [None] * args.num_envs
        return envs

    monkeypatch.setattr(ppo_atari, "make_envs", make_envs)
    monkeypatch.setattr(ppo_atari, "Agent", agent_class)
    args = tiny(
        tmp_path,
        num_envs=8,
        num_steps=16,
        num_minibatches=4,
        update_epochs=4,
        total_timesteps=steps,
        learning_rate=rate,
        compile=False,
    )
    episodes = train(args)["episodes"]
    assert np.mean([x["return"] for x in episodes[:20]]) < 0
    assert np.mean([x["return"] for x in episodes[-40:]]) > 6
