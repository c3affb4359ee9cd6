"""The same arrays through Stable-Baselines3: advantages, and one whole update."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import configure

from ppo_continuous_action import Agent, Args, gae, loss_gradient, normalize

STEPS, ENVS, OBS, ACTIONS = 32, 2, 5, 3


class Spaces(gym.Env):
    """Only the spaces that Stable-Baselines3 asks for."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}


def rollout(seed=0):
    rng = np.random.default_rng(seed)
    done = rng.random((STEPS, ENVS)) < 0.2
    return {
        "obs": rng.normal(size=(STEPS, ENVS, OBS)).astype(np.float32),
        "actions": rng.normal(size=(STEPS, ENVS, ACTIONS)).astype(np.float32),
        "rewards": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        "values": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        "done": done,
        "terminated": done & (rng.random((STEPS, ENVS)) < 0.5),
        "final_values": rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        "last_values": rng.normal(size=ENVS).astype(np.float32),
    }


def sb3_buffer(data, gamma, gae_lambda, logprobs=None):
    """Fill Stable-Baselines3's buffer as its collect_rollouts does, time limits included."""
    buffer = RolloutBuffer(
        STEPS, Spaces.observation_space, Spaces.action_space, "cpu", gae_lambda, gamma, ENVS
    )
    starts = np.ones(ENVS)
    for t in range(STEPS):
        truncated = data["done"][t] & ~data["terminated"][t]
        rewards = data["rewards"][t] + gamma * data["final_values"][t] * truncated
        logprob = torch.zeros(ENVS) if logprobs is None else logprobs[t]
        values = torch.from_numpy(data["values"][t])
        buffer.add(data["obs"][t], data["actions"][t], rewards, starts, values, logprob)
        starts = data["done"][t]
    buffer.compute_returns_and_advantage(torch.from_numpy(data["last_values"]), starts)
    return buffer


def our_gae(data, gamma, gae_lambda):
    next_values = np.concatenate([data["values"][1:], data["last_values"][None]])
    truncated = data["done"] & ~data["terminated"]
    next_values = np.where(truncated, data["final_values"], next_values)
    arrays = (data["rewards"], data["values"], next_values, data["terminated"], data["done"])
    return gae(*(torch.from_numpy(x.astype(np.float32)) for x in arrays), gamma, gae_lambda)


@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_buffer_of_stable_baselines3(seed):
    data = rollout(seed)
    buffer = sb3_buffer(data, 0.98, 0.9)
    advantages, returns = our_gae(data, 0.98, 0.9)
    np.testing.assert_allclose(advantages.numpy(), buffer.advantages, atol=1e-5)
    np.testing.assert_allclose(returns.numpy(), buffer.returns, atol=1e-5)


def sb3_model(agent, **settings):
    """A Stable-Baselines3 PPO with the network, the weights and the Adam of `agent`."""
    model = PPO(
        "MlpPolicy",
        Spaces(),
        learning_rate=3e-4,
        n_steps=STEPS,
        batch_size=16,
        max_grad_norm=0.5,
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
            "optimizer_kwargs": {"eps": 1e-5},
        },
        device="cpu",
        **settings,
    )
    policy = model.policy
    pairs = [
        (policy.mlp_extractor.policy_net, agent.policy_trunk),
        (policy.mlp_extractor.value_net, agent.value_trunk),
        (policy.action_net, agent.action_mean),
        (policy.value_net, agent.value_head),
    ]
    for theirs, ours in pairs:
        theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        policy.log_std.copy_(agent.log_std[0])
    model.set_logger(configure(None, []))
    return model, [*pairs, (policy, agent)]


@pytest.mark.parametrize("normalize_advantage", [False, True])
def test_one_whole_update_equals_stable_baselines3(normalize_advantage, monkeypatch):
    """Same batch, weights and minibatch order, two epochs: the same weights afterwards.

    Conventions set equal: SB3's value loss lacks the factor 1/2, so vf_coef is 0.5 there and 1
    here; its value clipping is another one and off; its advantages are divided by the sample std,
    so they are scaled here by sqrt((n - 1) / n) after the normalization.
    """
    torch.manual_seed(0)
    agent = Agent(OBS, ACTIONS, Args())
    with torch.no_grad():  # far from the start, so that ratios are clipped
        agent.action_mean.weight.mul_(100)
    data = rollout()
    obs, actions = torch.from_numpy(data["obs"]), torch.from_numpy(data["actions"])
    with torch.no_grad():
        _, logprobs, _, values = agent.get_action_and_value(obs, actions)
    logprobs = logprobs + 0.2 * torch.randn(STEPS, ENVS)
    data["values"] = values.numpy()

    model, pairs = sb3_model(
        agent, n_epochs=2, vf_coef=0.5, ent_coef=0.01, normalize_advantage=normalize_advantage
    )
    model.n_envs = ENVS
    model.rollout_buffer = sb3_buffer(data, 0.99, 0.95, logprobs)
    orders = [np.random.default_rng(i).permutation(STEPS * ENVS) for i in range(2)]
    queue = list(orders)
    monkeypatch.setattr(np.random, "permutation", lambda n: queue.pop(0))
    model._current_progress_remaining = 1.0
    model.train()
    assert not queue

    advantages, returns = our_gae(data, 0.99, 0.95)
    # Their buffer is flattened environment by environment, ours step by step.
    batch = [
        x.transpose(0, 1).flatten(0, 1)
        for x in (obs, actions, logprobs, values, advantages, returns)
    ]
    weights = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
    torch.nn.utils.vector_to_parameters(weights, agent.parameters())
    start = weights.clone()
    optimizer = torch.optim.Adam([weights], 3e-4, eps=1e-5)
    clipped = 0.0
    for order in orders:
        for indices in torch.from_numpy(order).split(16):
            minibatch = [x[indices] for x in batch]
            if normalize_advantage:
                minibatch[4] = normalize(minibatch[4]) * (15 / 16) ** 0.5
            weights.grad, metrics = loss_gradient(
                agent, tuple(minibatch), 0.2, False, False, 0.01, 1.0
            )
            torch.nn.utils.clip_grad_norm_(weights, 0.5)
            optimizer.step()
            clipped += metrics[-1].item()
    assert clipped > 0 and (weights - start).abs().max() > 1e-3
    for theirs, ours in pairs[:-1]:
        for x, y in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    torch.testing.assert_close(pairs[-1][0].log_std, agent.log_std[0], rtol=0, atol=1e-5)
