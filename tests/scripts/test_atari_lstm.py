"""ppo_atari_lstm.py: the LSTM, and its state on the way through rollouts, updates and resumes.

What it shares with the other scripts is tested in test_shared_*.py.
"""

import copy
import functools

import fake_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import scripts
from helpers import record
from torch import nn

import ppo_atari_lstm as ppo

STARTS = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 0]]).float()


@pytest.fixture(scope="module")
def agent():
    """The agent as it is, with the whole CNN and 128 units; nobody changes it."""
    torch.manual_seed(0)
    return ppo.Agent(6)


def inputs():
    """Frames (5, 3, 1, 84, 84) and a state (2, 3, 128)."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randint(0, 256, (5, 3, 1, 84, 84), dtype=torch.uint8, generator=generator)
    return obs, torch.randn(2, 3, 128, generator=generator)


def remember(agent, *inputs):
    """Outputs (T, B, H) of the LSTM, which both heads get, and the state after the last step."""
    outputs = []
    hook = agent.policy.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    *_, state = agent(*inputs)
    hook.remove()
    return outputs[0], state


def assert_close(a, b, atol=1e-5):
    assert a.shape == b.shape
    np.testing.assert_allclose(a.detach(), b.detach(), rtol=0, atol=atol)


# --- Details 2, 13, 21, 22, 32-34: the network ---


def test_cell_is_that_of_torch_with_the_gates_in_the_order_input_forget_candidate_output(agent):
    agent, lstm = copy.deepcopy(agent), nn.LSTM(512, 128)
    nn.init.normal_(agent.lstm_input.bias)
    lstm.weight_ih_l0.data, lstm.bias_ih_l0.data = agent.lstm_input.weight, agent.lstm_input.bias
    lstm.weight_hh_l0.data, lstm.bias_hh_l0.data = agent.lstm_recurrent.weight, torch.zeros(512)
    obs, state = inputs()
    outputs, last = remember(agent, obs, torch.zeros(5, 3), state)
    features = agent.features(obs.flatten(0, 1)).view(5, 3, 512)
    expected, (output, cell) = lstm(features, (state[:1].contiguous(), state[1:].contiguous()))
    assert_close(outputs, expected)
    assert_close(last, torch.cat([output, cell]))
    weights = (outputs, agent.lstm_recurrent.weight), (expected, lstm.weight_hh_l0)
    assert_close(*(torch.autograd.grad(x[-1].sum(), weight)[0] for x, weight in weights))


def test_a_start_is_a_fresh_zero_state_and_lets_no_gradient_through(agent):
    obs, state = (x.float().requires_grad_() for x in inputs())
    outputs, _ = remember(agent, obs, STARTS, state)
    zero = agent.initial_state(3)
    assert zero.shape == (2, 3, 128) and not zero.any()
    fresh, _ = remember(agent, obs[2:4], torch.zeros(2, 3), zero)
    assert_close(outputs[2:4, 1], fresh[:, 1], atol=1e-6)
    to_obs, to_state = torch.autograd.grad(outputs[3, 1].sum(), (obs, state), retain_graph=True)
    assert not to_obs[:2].any() and not to_state.any()  # nothing from before the start
    assert all(to_obs[t, 1].any() for t in (2, 3)) and not to_obs[:, [0, 2]].any()
    to_obs, to_state = torch.autograd.grad(outputs[4, 2].sum(), (obs, state))
    assert all(to_obs[t, 2].any() for t in range(5))  # without a start all of it counts
    assert to_state[:, 2].any(dim=1).all() and not to_state[:, :2].any()


# --- Details 1, 20, 35, 36: the state in training, resumed runs and evaluation ---


class Uneven(fake_envs.Counter):
    """Episodes of environment n take 3 + n steps; number 1 then fails, the others are cut off."""

    def advance(self, action):
        last, failed = self.t == 3 + self.index, self.index == 1
        return self.observe(), 1.0, last and failed, last and not failed, {}


gym.register("FakeUneven-Frames-v0", functools.partial(Uneven, "Frames"))


def place(n, step):
    """Environment, episode and step in it, at a step of the training."""
    return n, step // (3 + n), step % (3 + n)


def history(places):
    """Frames (S, 1, 1, 84, 84) and starts (S, 1) of a sequence of places."""
    frames = np.stack([fake_envs.frame(8 * np.array(x)) for x in places])
    starts = torch.tensor([[float(t == 0)] for *_, t in places])
    return torch.from_numpy(frames)[:, None, None], starts


@scripts("lstm")
def test_minibatches_are_whole_environments_in_the_order_of_time(script, tiny, recorded):
    """Also of starts and actions."""
    ppo.train(tiny("Uneven", num_envs=6, total_timesteps=3 * 6 * 8))
    for k, step in enumerate(recorded.steps):
        rollout = range(k // 4 * 8, k // 4 * 8 + 8)
        obs, actions, *_, starts, _ = step.data
        assert [x.shape[:2] for x in step.data] == [(8, 3)] * 7 + [(2, 3)]
        for column, (n, _, _) in enumerate(script.identity(obs[0])):
            places = [place(n, s) for s in rollout]
            assert script.identity(obs[:, column]) == places
            assert starts[:, column].tolist() == [t == 0 for *_, t in places]
            received = [fake_envs.Fake.made[n].actions[s].item() for s in rollout]
            assert actions[:, column].tolist() == received


@scripts("lstm")
@torch.no_grad()
def test_training_begins_with_the_state_that_the_whole_past_has_left(script, tiny, recorded):
    """From the first frame of the run, through rollouts that end inside of games and with them."""
    with torch.enable_grad():
        result = ppo.train(tiny("Uneven", total_timesteps=3 * 4 * 8, learning_rate=0.0))
    agent, none = result["agent"], result["agent"].initial_state(1)
    for k, step in enumerate(recorded.steps):
        obs, actions, logprobs, values, _, returns, _, state = step.data
        assert abs(step.metrics["losses/policy_loss"]) < 1e-6  # the ratio is 1
        assert step.metrics["losses/value_loss"] == pytest.approx(
            0.5 * (values - returns).square().mean().item(), rel=1e-4
        )
        first = k // 4 * 8
        for column, (n, _, _) in enumerate(script.identity(obs[0])):
            frames, starts = history([place(n, s) for s in range(first + 8)])
            past = remember(agent, frames[:first], starts[:first], none)[1] if k >= 4 else none
            assert_close(state[:, column], past[:, 0])
            given = torch.cat([torch.zeros(first), actions[:, column]]).long()[:, None]
            whole_values, expected, _ = agent.evaluate_actions(frames, starts, none, given)
            assert_close(logprobs[:, column], expected[first:, 0], atol=1e-6)
            assert_close(values[:, column], whole_values[first:, 0])


@scripts("lstm")
@torch.no_grad()
def test_a_truncated_game_is_bootstrapped_under_its_own_last_state(script, tiny, recorded):
    """Two games may end in a step and many in a rollout: each has its own state."""
    with torch.enable_grad():
        agent = ppo.train(tiny("Uneven", learning_rate=0.0))["agent"]
    for k, batch in enumerate(recorded.gae):
        for t, n in np.ndindex(8, 4):
            _, episode, now = place(n, 8 * k + t)
            last = now == 2 + n
            assert batch["done"][t, n] == last
            if last and n == 1:
                assert batch["next_values"][t, n] == 0
            else:  # up to the final frame, not the first of a new game
                frames, starts = history([(n, episode, s) for s in range(now + 2)])
                value = agent(frames, starts, agent.initial_state(1))[1][-1].item()
                assert batch["next_values"][t, n].item() == pytest.approx(value, abs=1e-5)


def test_minibatches_that_split_an_environment_are_refused():
    ppo.Args(num_envs=8, num_minibatches=8)
    with pytest.raises(ppo.UsageError, match=r"--num-envs \(6\) must be a multiple of --num-min"):
        ppo.Args(num_envs=6, num_minibatches=4)  # though it divides the 6 * 128 samples
    with pytest.raises(ppo.UsageError, match="must be 2, 3, 4"):
        ppo.Args(num_envs=8, num_steps=1, num_minibatches=8)  # a single sample each


@scripts("lstm")
def test_where_games_do_not_repeat_themselves_new_ones_begin(script, tiny, recorded, capsys):
    """With zero states."""
    ppo.train(tiny("Uneven"))
    recorded.steps.clear()  # environments made now have other numbers
    ppo.train(tiny("Uneven", total_timesteps=128, run_name="run0"), resume="runs/run0")
    assert "could not be replayed" in capsys.readouterr().out
    *_, starts, state = recorded.steps[0].data
    assert (starts[0] == 1).all() and (state == 0).all()


@scripts("lstm")
def test_a_loaded_policy_carries_its_state_and_evaluation_resets_it_at_each_life(
    script, tiny, monkeypatch
):
    """Environment number 0 is cut off, number 1 fails."""
    agent = ppo.train(tiny("Uneven"))["agent"]
    policy = ppo.load_policy("runs/run0", ppo.make_env(tiny("Uneven")))
    frames, starts = history([place(0, s) for s in range(12)])
    logits, *_ = agent(frames, starts, agent.initial_state(1))
    actions = [policy(x.numpy()[0], bool(start)) for x, start in zip(frames, starts)]
    assert actions == logits[:, 0].argmax(-1).tolist()
    fake_envs.Fake.made.clear()
    calls = record(monkeypatch, ppo.Agent, "forward")
    for n in (0, 1):
        assert ppo.evaluate("runs/run0", episodes=3) == [3.0 + n] * 3
    for n, some in ((0, calls[:9]), (1, calls[9:])):
        _, obs, starts, before, results = zip(*some)
        places = [script.identity(x[0])[0] for x in obs]
        assert places == [place(n, s) for s in range(3 * (3 + n))]
        assert [x.item() for x in starts] == [t == 0 for *_, t in places]
        assert all(torch.equal(x, after) for x, (*_, after) in zip(before[1:], results))
    calls.clear()
    lives = functools.partial(fake_envs.emulator, lambda: 2 - (fake_envs.Fake.made[-1].t > 1))
    monkeypatch.setattr(fake_envs, "emulator", lives)
    assert ppo.evaluate("runs/run0", episodes=2) == [5.0] * 2
    found = [(script.identity(obs[0])[0][2], starts.item()) for _, obs, starts, *_ in calls]
    assert found == [(0, 1), (1, 0), (3, 1), (4, 0)] * 2  # a life is lost, a no-op begins the next
