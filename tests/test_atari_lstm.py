"""ppo_atari_lstm.py: details 32-36, the loop around the state, and a task that needs memory."""

import inspect
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

import ppo_atari
import ppo_atari_lstm
from ppo_atari_lstm import Agent, Args, FrameStack, RunError, act_in_sequence, evaluate, train

TINY = {
    "env_id": "Pong",
    "num_envs": 4,
    "num_steps": 6,
    "num_minibatches": 2,
    "update_epochs": 2,
    "total_timesteps": 48,
    "async_envs": False,
    "torch_threads": 1,
    "device": "cpu",
}


def tiny(tmp_path, **changes):
    return Args(**{**TINY, "output_dir": str(tmp_path), "run_name": "run", **changes})


@pytest.fixture
def agent():
    torch.manual_seed(0)
    agent = Agent(6, Args())
    # Larger heads than at the start, so that differences between states are seen in the outputs.
    nn.init.orthogonal_(agent.action_head.weight, 1.0)
    return agent


def frames(steps, envs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, envs, 1, 84, 84)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_state(envs):
    return torch.randn(2, envs, 128, generator=torch.Generator().manual_seed(1))


# --- Details 32 and 33 -----------------------------------------------------------------------


def test_lstm_matrices_are_orthogonal_with_gain_1_and_the_bias_is_0(agent):
    assert agent.lstm_input.weight.shape == (512, 512)
    assert agent.lstm_recurrent.weight.shape == (512, 128)
    for layer in (agent.lstm_input, agent.lstm_recurrent):
        weight = layer.weight.detach()
        assert torch.allclose(weight.T @ weight, torch.eye(weight.shape[1]), atol=1e-4)
    assert not agent.lstm_input.bias.any()  # the forget gate's quarter included
    assert agent.lstm_recurrent.bias is None


def test_gains_of_the_other_layers():
    agent = Agent(6, Args())
    gains = {"cnn": math.sqrt(2), "action_head": 0.01, "value_head": 1.0}
    for name, weight in agent.named_parameters():
        part = name.split(".")[0]
        if part in gains and name.endswith("weight"):
            matrix = weight.flatten(1)
            matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            assert torch.allclose(
                matrix @ matrix.T, gains[part] ** 2 * torch.eye(len(matrix)), atol=1e-4
            )
        elif name.endswith("bias"):
            assert not weight.any()


def test_parameter_count(agent):
    cnn = 1_684_128 - 3 * 32 * 8 * 8  # one frame instead of four
    lstm = 512 * 512 + 512 + 128 * 512
    assert sum(x.numel() for x in agent.parameters()) == cnn + lstm + 6 * 129 + 129


def test_first_state_is_zero(agent):
    state = agent.initial_state(3)
    assert state.shape == (2, 3, 128) and not state.any()


@pytest.mark.parametrize("method", ["get_value", "get_action_and_value"])
def test_first_convolution_sees_1_for_pixel_255(agent, method):
    seen = []
    agent.cnn[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    obs = torch.tensor([0, 51, 255], dtype=torch.uint8).repeat(84 * 28).view(1, 1, 1, 84, 84)
    getattr(agent, method)(obs, torch.zeros(1, 1), agent.initial_state(1))
    assert len(seen) == 1 and torch.equal(seen[0].unique(), torch.tensor([0.0, 0.2, 1.0]))


def test_convolutions_compute_in_channels_last_order(agent):
    """The order that they are fastest in; with one channel it has to be asked for by strides."""
    outputs = []
    agent.cnn[0].register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    agent.get_value(frames(2, 3), torch.zeros(2, 3), random_state(3))
    assert outputs[0].is_contiguous(memory_format=torch.channels_last)


def test_policy_and_value_share_cnn_and_lstm(agent):
    obs, starts, state = frames(2, 3), torch.zeros(2, 3), random_state(3)
    action = torch.zeros(2, 3, dtype=torch.int64)
    _, logprob, _, value, _ = agent.get_action_and_value(obs, starts, state, action)
    shared = [agent.cnn[0].weight, agent.lstm_input.weight, agent.lstm_recurrent.weight]
    for loss in (logprob.sum(), value.sum()):
        assert all(x.any() for x in torch.autograd.grad(loss, shared, retain_graph=True))


# --- The cell, detail 34 -----------------------------------------------------------------------


def test_cell_equals_torch_lstm(agent):
    """PyTorch's own LSTM with the same weights, its gates in the order i, f, g, o."""
    lstm = nn.LSTM(512, 128)
    lstm.weight_ih_l0.data = agent.lstm_input.weight.data
    lstm.weight_hh_l0.data = agent.lstm_recurrent.weight.data
    lstm.bias_ih_l0.data = torch.randn(512, generator=torch.Generator().manual_seed(2))
    agent.lstm_input.bias.data = lstm.bias_ih_l0.data
    lstm.bias_hh_l0.data.zero_()
    obs, state = frames(5, 3), random_state(3)
    outputs, last = agent.remember(obs, torch.zeros(5, 3), state)
    features = agent.features(obs.flatten(0, 1)).view(5, 3, 512)
    expected, (h, c) = lstm(features, (state[:1].contiguous(), state[1:].contiguous()))
    assert torch.allclose(outputs, expected, atol=1e-5)
    assert torch.allclose(last, torch.cat([h, c]), atol=1e-5)


STARTS = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 0]]).float()


def test_whole_sequence_equals_step_by_step(agent):
    obs, state = frames(5, 3), random_state(3)
    whole = agent.get_action_and_value(obs, STARTS, state, noise=0.0)
    stepwise, values = state, agent.get_value(obs, STARTS, state)
    for t in range(5):
        one = agent.get_action_and_value(obs[t : t + 1], STARTS[t : t + 1], stepwise)
        stepwise = one[-1]
        for a, b in zip(whole[:4], one[:4]):
            assert torch.allclose(a[t].float(), b[0].float(), atol=1e-5)
        assert torch.allclose(values[t], one[3][0], atol=1e-5)
    assert torch.allclose(whole[-1], stepwise, atol=1e-5)


def test_a_start_forgets_everything_before_it(agent):
    obs = frames(5, 3).float().requires_grad_()
    state = random_state(3).requires_grad_()
    outputs, _ = agent.remember(obs, STARTS, state)
    fresh, _ = agent.remember(obs[2:3], STARTS[2:3], agent.initial_state(3))
    assert torch.allclose(outputs[2, 1], fresh[0, 1], atol=1e-6)  # equals a zero state's
    obs_gradient, state_gradient = torch.autograd.grad(outputs[3, 1].sum(), (obs, state))
    assert not obs_gradient[:2].any() and not state_gradient.any()  # both parts of the state
    assert obs_gradient[2:4, 1].any() and not obs_gradient[:, [0, 2]].any()


def test_without_a_start_the_state_goes_on(agent):
    obs, state = frames(5, 3).float().requires_grad_(), random_state(3).requires_grad_()
    outputs, _ = agent.remember(obs, STARTS, state)
    obs_gradient, state_gradient = torch.autograd.grad(outputs[4, 2].sum(), (obs, state))
    assert all(obs_gradient[t, 2].any() for t in range(5))
    assert state_gradient[0, 2].any() and state_gradient[1, 2].any()


def test_acting_is_one_step_of_the_sequence(agent):
    obs, state = frames(1, 3), random_state(3)
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=(3, 6))).float()
    action, logprob, value, last = act_in_sequence(agent, (obs[0], STARTS[0], state, noise))
    expected = agent.get_action_and_value(obs, STARTS[:1], state, noise=noise[None])
    for a, b in zip((action, logprob, value), (expected[0], expected[1], expected[3])):
        assert torch.equal(a, b[0])
    assert torch.equal(last, expected[-1])
    given = agent.get_action_and_value(obs, STARTS[:1], state, action[None])
    assert torch.equal(given[1][0], logprob)


def test_policy_is_the_categorical_of_the_logits(agent):
    obs, starts, state = frames(2, 3), torch.zeros(2, 3), random_state(3)
    logits = agent.action_head(agent.remember(obs, starts, state)[0])
    noise = 9 * torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(4))
    action, logprob, entropy, *_ = agent.get_action_and_value(obs, starts, state, noise=noise)
    policy = torch.distributions.Categorical(logits=logits)
    assert torch.equal(action, (logits + noise).argmax(-1))
    assert torch.allclose(logprob, policy.log_prob(action), atol=1e-6)
    assert torch.allclose(entropy, policy.entropy(), atol=1e-6)


@pytest.mark.parametrize(("clip_vloss", "norm_adv"), [(True, True), (False, False)])
def test_loss_of_sequences_is_that_of_their_samples(clip_vloss, norm_adv):
    """Given the agent's outputs, against ppo_atari.py's loss of the same samples in one row."""
    torch.manual_seed(0)
    outputs, stored = torch.randn(4, 6, 3), torch.randn(5, 6, 3)
    settings = (0.1, clip_vloss, norm_adv, 0.01, 0.5)
    recurrent = SimpleNamespace(get_action_and_value=lambda *x: (*outputs, None))
    plain = SimpleNamespace(get_action_and_value=lambda *x: outputs.flatten(1))
    loss = ppo_atari_lstm.sequence_loss(recurrent, (None, None, None, *stored), *settings)
    expected = ppo_atari.ppo_loss(plain, (None, *stored.flatten(1)), *settings)
    torch.testing.assert_close(loss, expected)


# --- The loop ----------------------------------------------------------------------------------


class CountingGame(gym.Env):
    """Frames of brightness 10 g + t for game g of this environment; 4 steps, then cut off."""

    def __init__(self, index, truncate):
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = gym.spaces.Discrete(6)
        self.index, self.truncate, self.game = index, truncate, -1

    def frame(self):
        return np.full((84, 84), 60 * self.index + 10 * self.game + self.t, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game, self.t = self.game + 1, 0
        return self.frame(), {}

    def step(self, action):
        self.t += 1
        over = self.t == 4
        return self.frame(), 1.0, over and not self.truncate, over and self.truncate, {}


def use_counting_games(monkeypatch, truncate=True):
    def make_envs(args):
        thunks = [lambda i=i: CountingGame(i, truncate) for i in range(args.num_envs)]
        envs = FrameStack(SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP), 1)
        envs.call = lambda name, *rest: [None] * args.num_envs
        return envs

    monkeypatch.setattr(ppo_atari_lstm, "make_envs", make_envs)


def record(monkeypatch, name):
    """Arguments (tensors copied) and result of every call of a function of the script."""
    calls, function = [], getattr(ppo_atari_lstm, name)

    def copied(x):
        if isinstance(x, tuple):
            return tuple(copied(y) for y in x)
        return x.clone() if isinstance(x, torch.Tensor) else x

    def recording(*args):
        kept = copied(args)
        result = function(*args)
        calls.append((kept, copied(result)))
        return result

    monkeypatch.setattr(ppo_atari_lstm, name, recording)
    return calls


def test_state_is_reset_by_the_done_flag_before_the_step(tmp_path, monkeypatch):
    """starts[t] is 1 where the frame seen at t is the first of its game, across rollouts too."""
    use_counting_games(monkeypatch)
    calls = record(monkeypatch, "act_in_sequence")
    train(tiny(tmp_path))
    for step, ((_, (obs, starts, state, _)), _) in enumerate(calls):
        t = step % 4  # of the game; rollouts are 6 steps long
        assert (obs[:, 0, 0, 0] % 10).tolist() == [t] * 4
        assert starts.tolist() == [float(t == 0)] * 4
        if step > 0:
            assert torch.equal(state, calls[step - 1][1][3])  # carried on, not refreshed


def test_minibatches_are_whole_sequences_of_some_environments(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    calls = record(monkeypatch, "sequence_gradient")
    train(tiny(tmp_path, update_epochs=3, num_envs=4, total_timesteps=24))
    assert len(calls) == 6  # 3 epochs of 2 minibatches
    orders = []
    for (_, minibatch, *_), _ in calls:
        obs, starts, state, *rest = minibatch
        pixels = obs[:, :, 0, 0, 0].int()
        assert obs.shape == (6, 2, 1, 84, 84) and state.shape == (2, 2, 128)
        assert all(x.shape == (6, 2) for x in (starts, *rest))
        envs = (pixels[0] // 60).tolist()
        orders.append(envs)
        for column, env in enumerate(envs):
            expected = [60 * env + 10 * (t // 4) + t % 4 for t in range(6)]
            assert pixels[:, column].tolist() == expected  # in the order of time
    for first, second in zip(orders[::2], orders[1::2]):
        assert sorted(first + second) == [0, 1, 2, 3]
    assert len({tuple(x) for x in orders}) > 2  # shuffled anew in each epoch


def test_each_sequence_begins_with_the_state_from_before_its_rollout(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    acting, training = (
        record(monkeypatch, "act_in_sequence"),
        record(monkeypatch, "sequence_gradient"),
    )
    train(tiny(tmp_path))
    per_rollout = 4  # 2 epochs of 2 minibatches
    for rollout in range(2):
        before = acting[6 * rollout][0][1][2]
        assert before.any() == (rollout > 0)  # zeros only at the very start
        for (_, minibatch, *_), _ in training[per_rollout * rollout : per_rollout * (rollout + 1)]:
            envs = (minibatch[0][0, :, 0, 0, 0].int() // 60).tolist()
            assert torch.equal(minibatch[2], before[:, envs])


def test_recomputed_probabilities_equal_the_stored_ones(tmp_path, monkeypatch):
    """Ratio 1 in the first minibatch of each rollout, and in all while the weights stand still."""
    use_counting_games(monkeypatch)
    updates = train(tiny(tmp_path, learning_rate=0.0))["updates"]
    for update in updates:
        assert abs(update["losses/old_approx_kl"]) < 1e-6
        assert abs(update["losses/approx_kl"]) < 1e-6 and update["losses/clipfrac"] == 0


@pytest.mark.parametrize(("truncate", "setting"), [(True, True), (False, False)])
def test_failures_are_not_bootstrapped(tmp_path, monkeypatch, truncate, setting):
    """Games that were lost, and games cut off with --truncation-is-terminal."""
    use_counting_games(monkeypatch, truncate)
    advantages = record(monkeypatch, "gae")
    train(tiny(tmp_path, truncation_is_terminal=setting))
    (_, values, next_values, terminated, done, *_), _ = advantages[0]
    assert terminated[:, 0].nonzero().flatten().tolist() == [3]
    assert torch.equal(terminated, done)
    assert torch.equal(next_values[3], values[4])  # of no consequence, and of no other game


def test_bootstrap_values_use_the_state_at_that_point(tmp_path, monkeypatch):
    """After the rollout: the carried state. Where a game is cut off: the state that led there."""
    use_counting_games(monkeypatch)
    advantages, acting = record(monkeypatch, "gae"), record(monkeypatch, "act_in_sequence")
    result = train(tiny(tmp_path, learning_rate=0.0))
    (_, values, next_values, terminated, done, *_), _ = advantages[0]
    assert not terminated.any() and done[:, 0].nonzero().flatten().tolist() == [3]
    first_of_next = advantages[1][0][1][0]
    assert torch.allclose(next_values[5], first_of_next, atol=1e-6)
    last = torch.stack([torch.full((1, 84, 84), 60 * i + 4, dtype=torch.uint8) for i in range(4)])
    state = acting[3][1][3]
    with torch.no_grad():
        expected = result["agent"].get_value(last[None], torch.zeros(1, 4), state)[0]
    assert torch.allclose(next_values[3], expected, atol=1e-6)
    assert not torch.allclose(next_values[3], values[4], atol=1e-4)


def test_schedules_epsilon_and_clipping_reach_adam(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    calls, seen = record(monkeypatch, "sequence_gradient"), []

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            (group,) = self.param_groups
            seen.append((group["lr"], group["eps"], group["params"][0].grad.norm().item()))
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    settings = {"learning_rate": 0.002, "adam_eps": 1e-4, "max_grad_norm": 0.01}
    train(tiny(tmp_path, clip_coef=0.2, anneal_clip=True, **settings))
    assert [rate for rate, _, _ in seen] == pytest.approx([0.002] * 4 + [0.001] * 4)
    assert {eps for _, eps, _ in seen} == {1e-4}
    assert max(norm for _, _, norm in seen) <= 0.01 * 1.001
    clips = [clip_coef.item() for (_, _, clip_coef, *_), _ in calls]
    assert clips == pytest.approx([0.2] * 4 + [0.1] * 4)


def test_gradients_of_all_processes_are_averaged_before_the_step(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    start = train(tiny(tmp_path, run_name="start", learning_rate=0.0))
    monkeypatch.setattr(ppo_atari_lstm, "average_over_processes", lambda x: x.zero_())
    assert same_weights(train(tiny(tmp_path)), start)


def test_metrics_are_means_over_all_minibatches_and_settings_reach_the_loss(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    calls = record(monkeypatch, "sequence_gradient")
    settings = {"clip_vloss": False, "norm_adv": False, "ent_coef": 0.02, "vf_coef": 0.7}
    updates = train(tiny(tmp_path, **settings))["updates"]
    assert {tuple(arguments[3:]) for arguments, _ in calls} == {(False, False, 0.02, 0.7)}
    for update, own in zip(updates, (calls[:4], calls[4:]), strict=True):  # 2 epochs of 2
        expected = torch.stack([metrics for _, (_, metrics) in own]).mean(0)
        logged = [update[name] for name in ppo_atari_lstm.LOSS_METRICS]
        assert logged == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-7)


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    use_counting_games(monkeypatch)
    updates = train(tiny(tmp_path, target_kl=0.0, learning_rate=0.01))["updates"]
    assert [x["charts/epochs"] for x in updates] == [1, 1]


def test_rollout_stores_one_frame_of_one_byte_per_pixel(tmp_path, monkeypatch):
    stored = []
    monkeypatch.setattr(
        ppo_atari_lstm,
        "act_in_sequence",
        lambda agent, inputs: stored.append(inputs[0]) or act_in_sequence(agent, inputs),
    )
    train(tiny(tmp_path))
    assert stored[0].dtype == torch.uint8 and stored[0].shape == (4, 1, 84, 84)
    assert stored[0].untyped_storage().nbytes() == (6 + 1) * 4 * 84 * 84


def test_games_and_defaults_are_those_of_the_other_atari_script():
    """`make_env` has another text in the other scripts, so that no test of copies looks at it."""
    first, second = (inspect.getsource(x.make_env) for x in (ppo_atari, ppo_atari_lstm))
    assert first == second
    for name in ("FRAME_SKIP", "NOOP_MAX", "MAX_GAME_STEPS", "WITHOUT_NOOP", "PAPER"):
        assert getattr(ppo_atari, name) == getattr(ppo_atari_lstm, name)
    defaults = [
        {field.name: field.default for field in fields(x.Args)} for x in (ppo_atari, ppo_atari_lstm)
    ]
    assert defaults[0] == defaults[1]
    assert vars(ppo_atari.Args(paper=True)) == vars(Args(paper=True))


def test_environments_must_divide_into_minibatches():
    with pytest.raises(RunError, match="must divide the 6 environments"):
        Args(num_envs=6, num_minibatches=4)


def same_weights(first, second):
    pairs = zip(first["agent"].parameters(), second["agent"].parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_resumed_run_equals_the_uninterrupted_one_bitwise(tmp_path, monkeypatch):
    settings = {"total_timesteps": 96, "checkpoint_interval": 2}
    whole = train(tiny(tmp_path, run_name="whole", **settings))
    first = tiny(tmp_path, run_name="halves", **settings)
    asked = iter([None, ppo_atari_lstm.signal.SIGTERM])
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(ppo_atari_lstm.StopRequest, "in_any_process", lambda self: next(asked))
        train(first)
    resumed = train(replace(first, resume=str(tmp_path / "halves")))
    assert len(resumed["updates"]) == 4 and same_weights(whole, resumed)


def test_evaluation_carries_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_atari_lstm, "MAX_GAME_STEPS", 40)
    args = tiny(tmp_path)
    train(args)
    calls = record(monkeypatch, "act_in_sequence")
    results = evaluate(replace(args, evaluate=str(tmp_path / "run"), eval_episodes=2))
    assert {name: len(x) for name, x in results.items()} == {"greedy": 2, "sampled": 2}
    starts = [inputs[1].item() for (_, inputs), _ in calls]
    assert sum(starts) == 4 and starts[0] == 1.0  # one per game
    for ((_, inputs), _), (_, before) in zip(calls[1:30], calls[:29]):
        assert torch.equal(inputs[2], before[3])


def test_fast_path_trains(tmp_path):
    assert len(train(tiny(tmp_path, env_backend="ale"))["updates"]) == 2


def test_table_shows_what_runs_here():
    source = Path(ppo_atari_lstm.__file__).read_text()
    values = {x: v for x, _, v, _ in ppo_atari_lstm.detail_table(Args(), source)}
    used = [n for n in range(1, 38) if not values[f"{n}/37"].startswith("not here")]
    assert used == [*range(1, 23), *range(32, 37)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--env-id Pnog", "did you mean Pong?"),
        ("--env-id Pendulum-v1", "ppo_continuous_action.py"),
        ("--num-minibatches 3", "must divide the 8 environments"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo_atari_lstm.py", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        ppo_atari_lstm.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert words in error and error.count("\n") == 1 and error.startswith("Error: ")


def test_command_line_runs_pong_end_to_end(tmp_path, monkeypatch, capsys):
    arguments = "--env-id ALE/Pong-v5 --num-envs 2 --num-steps 8 --num-minibatches 2"
    arguments += " --total-timesteps 32 --torch-threads 1 --device cpu --async-envs True"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppo_atari_lstm.py", *arguments.split()])
    ppo_atari_lstm.main()
    assert "Done. Model: runs/Pong__ppo_atari_lstm__1__" in capsys.readouterr().out


# --- A task that needs memory --------------------------------------------------------------------


class Recall(gym.Env):
    """The first frame shows a cue, bright or dark; two frames later its name earns 1, else -1."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(2))
        return np.full((84, 84), (50, 250)[self.cue], np.uint8), {}

    def step(self, action):
        self.t += 1
        over = self.t == 3
        reward = (1.0 if action == self.cue else -1.0) * over
        info = {"episode": {"r": reward, "l": 3}} if over else {}
        return np.full((84, 84), 150, np.uint8), reward, over, False, info


class SmallAgent(Agent):
    """The recurrent agent with eyes for brightness only, so that the task takes seconds."""

    def __init__(self, num_actions, args):
        super().__init__(num_actions, args)
        layer = nn.Linear(1, 512)
        self.cnn = nn.Sequential(nn.AvgPool2d(84), nn.Flatten(), layer, nn.Tanh())


class ForgetfulAgent(SmallAgent):
    """The same agent, its state cleared at every step."""

    def remember(self, obs, starts, state):
        return super().remember(obs, torch.ones_like(starts), state)


def recalled(tmp_path, monkeypatch, agent_class):
    """Mean reward of the last 100 episodes after a short training."""

    def make_envs(args):
        thunks = [Recall] * args.num_envs
        envs = FrameStack(SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP), 1)
        envs.call = lambda name, *rest: [None] * args.num_envs
        return envs

    monkeypatch.setattr(ppo_atari_lstm, "make_envs", make_envs)
    monkeypatch.setattr(ppo_atari_lstm, "Agent", agent_class)
    args = tiny(
        tmp_path,
        num_envs=16,
        num_steps=20,
        num_minibatches=4,
        update_epochs=4,
        total_timesteps=8_000,
        learning_rate=2e-3,
        compile=False,
        run_name=agent_class.__name__,
    )
    return np.mean([x["return"] for x in train(args)["episodes"][-100:]])


def test_memory_solves_what_the_same_agent_without_memory_cannot(tmp_path, monkeypatch):
    assert recalled(tmp_path, monkeypatch, SmallAgent) > 0.7
    assert abs(recalled(tmp_path, monkeypatch, ForgetfulAgent)) < 0.4
