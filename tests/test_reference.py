"""One whole update against Stable-Baselines3 and against a second statement of ppo2, in numpy."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger

import ppo_continuous_action as ppo

STEPS, ENVS, OBS, ACTIONS = 32, 2, 5, 3


def make_agent(**settings):
    """Agent, its settings and its weights as one vector; far from the start: ratios are clipped."""
    torch.manual_seed(0)
    args = ppo.Args(**settings)
    agent = ppo.Agent(OBS, ACTIONS, args)
    with torch.no_grad():
        agent.policy[-1].weight.mul_(100)
        agent.log_std.copy_(torch.linspace(-0.5, 0.5, ACTIONS))
    return agent, args


def update(agent, args, batch, orders, learning_rate=3e-4, clip_coef=0.2):
    """The script's gradient steps over minibatches of 16 in the given orders; their metrics."""
    weights = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
    torch.nn.utils.vector_to_parameters(weights, agent.parameters())
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    adam["step"] = torch.zeros((), dtype=torch.float64)
    schedule = torch.tensor([learning_rate, clip_coef], dtype=torch.float64)
    return [
        ppo.ppo_update(agent, adam, batch, mb, schedule, args)
        for order in orders
        for mb in torch.from_numpy(order).split(16)
    ]


ORDERS = [np.random.default_rng(i).permutation(STEPS * ENVS) for i in range(2)]

# --- ppo2 in numpy: losses, gradients and Adam by hand, from baselines' model.py ---


def network(p, name, x):
    """Output of a tanh network and its layers' inputs."""
    inputs = [x]
    for i in (0, 2):
        inputs.append(np.tanh(inputs[-1] @ p[f"{name}.{i}.weight"].T + p[f"{name}.{i}.bias"]))
    return inputs[-1] @ p[f"{name}.4.weight"].T + p[f"{name}.4.bias"], inputs


def backward(p, name, inputs, d_output):
    """Gradients of a network's parameters, from that of its output."""
    gradients = {}
    for i, x in zip((4, 2, 0), reversed(inputs)):
        gradients[f"{name}.{i}.weight"], gradients[f"{name}.{i}.bias"] = (
            d_output.T @ x,
            d_output.sum(0),
        )
        d_output = d_output @ p[f"{name}.{i}.weight"] * (1 - x**2)
    return gradients


def ppo2_gradients(p, minibatch, clip, clip_vloss, ent_coef, vf_coef):
    obs, actions, logprobs, old_values, advantages, returns = minibatch
    size, log_std = len(obs), p["log_std"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    mean, policy_inputs = network(p, "policy", obs)
    values, value_inputs = network(p, "value", obs)
    z = (actions - mean) / np.exp(log_std)
    neglogp = 0.5 * (z**2).sum(1) + 0.5 * np.log(2 * np.pi) * ACTIONS + log_std.sum()
    ratio = np.exp(-neglogp - logprobs)
    losses, clipped = -advantages * ratio, -advantages * np.clip(ratio, 1 - clip, 1 + clip)
    d_logp = np.where(losses >= clipped, losses, 0.0) / size

    errors, change = values[:, 0] - returns, values[:, 0] - old_values
    clipped_errors = old_values + np.clip(change, -clip, clip) - returns
    # Where nothing is clipped, the two are equal, but for rounding.
    moves = (errors**2 >= clipped_errors**2) | (np.abs(change) <= clip) | (not clip_vloss)
    d_values = vf_coef * np.where(moves, errors, 0.0)[:, None] / size

    gradients = backward(p, "value", value_inputs, d_values)
    gradients |= backward(p, "policy", policy_inputs, d_logp[:, None] * z / np.exp(log_std))
    gradients["log_std"] = (d_logp[:, None] * (z**2 - 1)).sum(0, keepdims=True) - ent_coef
    counts = (losses < clipped).mean(), (~moves).mean()
    return gradients, np.maximum(losses, clipped).mean(), counts


@pytest.mark.parametrize("clip_vloss", [True, False])
def test_one_whole_update_equals_ppo2_in_numpy(clip_vloss):
    settings = {"clip_vloss": clip_vloss, "ent_coef": 0.01, "max_grad_norm": 0.5}
    agent, args = make_agent(**settings)
    agent = agent.double()
    rng = np.random.default_rng(0)
    n = STEPS * ENVS
    obs, actions = (
        torch.tensor(rng.normal(size=(n, OBS))),
        torch.tensor(rng.normal(size=(n, ACTIONS))),
    )
    with torch.no_grad():
        _, logprobs, _, values = agent.get_action_and_value(obs, actions)
    noise = torch.tensor(rng.normal(size=(4, n)))
    batch = [obs, actions, logprobs + 0.3 * noise[0], values + 0.3 * noise[1], *noise[2:]]
    p = {name: x.detach().numpy().copy() for name, x in agent.named_parameters()}
    metrics = update(agent, args, batch, ORDERS)

    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    held = []
    for t in range(1, 9):
        mb = np.concatenate(ORDERS).reshape(8, 16)[t - 1]
        minibatch = [x.numpy()[mb] for x in batch]
        gradients, pg_loss, counts = ppo2_gradients(p, minibatch, 0.2, clip_vloss, 0.01, 0.5)
        assert metrics[t - 1]["losses/policy_loss"].item() == pytest.approx(pg_loss, rel=1e-6)
        norm = np.sqrt(sum((x**2).sum() for x in gradients.values()))
        rate = 3e-4 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        for name, gradient in gradients.items():
            gradient = gradient * 0.5 / max(norm, 0.5)
            m[name] = 0.9 * m[name] + 0.1 * gradient
            v[name] = 0.999 * v[name] + 0.001 * gradient**2
            p[name] = p[name] - rate * m[name] / (np.sqrt(v[name]) + 1e-5)
        held.append([norm > 0.5, *counts])
    assert (np.mean(held, axis=0) > [0, 0.1, 0.1 if clip_vloss else -1]).all()  # everything clips
    for name, x in agent.named_parameters():
        np.testing.assert_allclose(x.detach().numpy(), p[name], rtol=0, atol=1e-8)


# --- Stable-Baselines3 ---


class Spaces(gym.Env):
    """Only the spaces that Stable-Baselines3 asks for."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}


def sb3_buffer(data, logprobs, values):
    """Fill Stable-Baselines3's buffer as its collect_rollouts does, time limits included."""
    spaces = Spaces.observation_space, Spaces.action_space
    buffer = RolloutBuffer(STEPS, *spaces, "cpu", 0.95, 0.99, ENVS)
    starts = np.ones(ENVS)
    for t in range(STEPS):
        truncated = data["done"][t] & ~data["terminated"][t]
        rewards = data["rewards"][t] + 0.99 * data["final_values"][t] * truncated
        buffer.add(data["obs"][t], data["actions"][t], rewards, starts, values[t], logprobs[t])
        starts = data["done"][t]
    buffer.compute_returns_and_advantage(torch.from_numpy(data["last_values"]), starts)
    return buffer


def sb3_model(agent, **settings):
    """A Stable-Baselines3 PPO with the network and the weights of `agent`, and pairs of them."""
    net_arch, optimizer = {"pi": [64, 64], "vf": [64, 64]}, {"eps": 1e-15}
    policy = {"net_arch": net_arch, "activation_fn": torch.nn.Tanh, "optimizer_kwargs": optimizer}
    settings |= {"learning_rate": 3e-4, "n_steps": STEPS, "batch_size": 16, "max_grad_norm": 0.5}
    model = PPO("MlpPolicy", Spaces(), policy_kwargs=policy, device="cpu", **settings)
    policy = model.policy
    pairs = [
        (policy.mlp_extractor.policy_net, agent.policy[:4]),
        (policy.mlp_extractor.value_net, agent.value[:4]),
        (policy.action_net, agent.policy[4]),
        (policy.value_net, agent.value[4]),
    ]
    for theirs, ours in pairs:
        theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        policy.log_std.copy_(agent.log_std[0])
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model, pairs


@pytest.mark.parametrize("norm_adv", [False, True])
def test_one_whole_update_equals_stable_baselines3(norm_adv, monkeypatch):
    """Same batch, weights and minibatch order, two epochs: the same weights afterwards.

    Conventions set equal: SB3's value loss lacks the factor 1/2, so vf_coef is 0.5 there and 1
    here; its value clipping is another one and off; Adam's epsilon, which it adds in another place,
    is next to nothing; its advantages are divided by the sample std.
    """
    settings = {"clip_vloss": False, "vf_coef": 1.0, "ent_coef": 0.01, "adam_eps": 1e-15}
    agent, args = make_agent(norm_adv=norm_adv, **settings)
    real = ppo.normalize
    monkeypatch.setattr(ppo, "normalize", lambda x: real(x) * ((len(x) - 1) / len(x)) ** 0.5)
    rng = np.random.default_rng(0)
    shapes = {"obs": (STEPS, ENVS, OBS), "actions": (STEPS, ENVS, ACTIONS), "last_values": ENVS}
    shapes |= {"rewards": (STEPS, ENVS), "final_values": (STEPS, ENVS)}
    data = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    data["done"], failed = rng.random((2, STEPS, ENVS)) < [[[0.2]], [[0.5]]]
    data["terminated"] = data["done"] & failed
    t = {name: torch.from_numpy(x) for name, x in data.items()}
    with torch.no_grad():
        _, logprobs, _, values = agent.get_action_and_value(t["obs"], t["actions"])
    logprobs = logprobs + 0.2 * torch.randn(STEPS, ENVS)

    model, pairs = sb3_model(
        agent, n_epochs=2, vf_coef=0.5, ent_coef=0.01, normalize_advantage=norm_adv
    )
    model.n_envs, model._current_progress_remaining = ENVS, 1.0
    model.rollout_buffer = sb3_buffer(data, logprobs, values)
    theirs = model.rollout_buffer.advantages.copy()
    queue = list(ORDERS)
    monkeypatch.setattr(np.random, "permutation", lambda n: queue.pop(0))
    model.train()
    assert not queue

    next_values = torch.cat([values[1:], t["last_values"][None]])
    next_values = torch.where(t["done"] & ~t["terminated"], t["final_values"], next_values)
    ends = t["terminated"].float(), t["done"].float()
    advantages, returns = ppo.gae(t["rewards"], values, next_values, *ends, 0.99, 0.95)
    np.testing.assert_allclose(advantages, theirs, atol=1e-5)
    batch = (t["obs"], t["actions"], logprobs, values, advantages, returns)
    # Their buffer is flattened environment by environment, ours step by step.
    batch = [x.transpose(0, 1).flatten(0, 1) for x in batch]
    start = agent.policy[0].weight.clone()
    metrics = update(agent, args, batch, ORDERS)
    assert all(x["losses/clipfrac"] > 0 for x in metrics)
    assert (agent.policy[0].weight - start).abs().max() > 1e-3
    for theirs, ours in pairs:
        for x, y in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.policy.log_std, agent.log_std[0], rtol=0, atol=1e-5)
