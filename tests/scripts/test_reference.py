"""A whole update against Stable-Baselines3."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

import ppo_continuous_action as ppo

STEPS, ENVS, OBS, ACTIONS = 32, 2, 3, 2  # the last two are those of FakeWalk-Box-v0


def sb3_model(agent):
    """A Stable-Baselines3 PPO with the network and the weights of `agent`, and pairs of them."""
    net_arch, optimizer = {"pi": [64, 64], "vf": [64, 64]}, {"eps": 1e-15}
    policy = {"net_arch": net_arch, "activation_fn": nn.Tanh, "optimizer_kwargs": optimizer}
    envs = DummyVecEnv([lambda: gym.make("FakeWalk-Box-v0", disable_env_checker=True)] * ENVS)
    sizes = {"n_steps": STEPS, "batch_size": 16, "n_epochs": 2, "ent_coef": 0.01}
    model = PPO("MlpPolicy", envs, 3e-4, **sizes, policy_kwargs=policy, device="cpu")
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


def test_one_whole_update_equals_stable_baselines3(monkeypatch):
    """Same batch, weights and minibatch order, two epochs: the same weights afterwards.

    Conventions set equal: SB3's value loss lacks the factor 1/2, so vf_coef is 0.5 there and 1
    here; its value clipping is another one and off; Adam's epsilon, which it adds in another place,
    is next to nothing; its advantages are divided by the sample std.
    """
    args = ppo.Args(clip_vloss=False, vf_coef=1.0, ent_coef=0.01, adam_eps=1e-15)
    floats = {name: torch.tensor(x) for name, x in vars(args).items() if type(x) is float}
    args = SimpleNamespace(**{**vars(args), **floats})
    torch.manual_seed(0)
    agent = ppo.Agent(OBS, ACTIONS)
    with torch.no_grad():  # far from the start, so that ratios are clipped
        agent.policy[-1].weight.mul_(100)
        agent.log_std.copy_(torch.linspace(-0.5, 0.5, ACTIONS))
    normalize = ppo.normalize
    monkeypatch.setattr(ppo, "normalize", lambda x: normalize(x) * ((len(x) - 1) / len(x)) ** 0.5)
    rng = np.random.default_rng(0)
    shapes = {"obs": (STEPS, ENVS, OBS), "actions": (STEPS, ENVS, ACTIONS), "last_values": ENVS}
    shapes |= {"rewards": (STEPS, ENVS), "final_values": (STEPS, ENVS)}
    data = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    data["done"], failed = rng.random((2, STEPS, ENVS)) < [[[0.2]], [[0.5]]]
    data["terminated"] = data["done"] & failed
    t = {name: torch.from_numpy(x) for name, x in data.items()}
    with torch.no_grad():
        values, logprobs, _ = agent.evaluate_actions(t["obs"], t["actions"])
    logprobs = logprobs + 0.2 * torch.randn(STEPS, ENVS)

    model, pairs = sb3_model(agent)
    cut_off, starts = data["done"] & ~data["terminated"], np.ones(ENVS)
    rewards = data["rewards"] + 0.99 * data["final_values"] * cut_off  # as in collect_rollouts
    for i in range(STEPS):
        rows = data["obs"][i], data["actions"][i], rewards[i], starts, values[i], logprobs[i]
        model.rollout_buffer.add(*rows)
        starts = data["done"][i]
    model.rollout_buffer.compute_returns_and_advantage(t["last_values"], starts)
    theirs = model.rollout_buffer.advantages.copy()
    orders = [rng.permutation(STEPS * ENVS) for _ in range(2)]
    queue = [*orders]
    monkeypatch.setattr(np.random, "permutation", lambda n: queue.pop(0))
    model.train()
    assert not queue

    next_values = torch.cat([values[1:], t["last_values"][None]])
    next_values = torch.where(t["done"] & ~t["terminated"], t["final_values"], next_values)
    next_values[t["terminated"]] = 0.0
    done = t["done"].float()
    advantages = ppo.gae(t["rewards"], values, next_values, done, 0.99, 0.95)
    returns = advantages + values
    np.testing.assert_allclose(advantages, theirs, atol=1e-5)
    batch = ppo.Batch(t["obs"], t["actions"], logprobs, values, advantages, returns)
    # Their buffer is flattened environment by environment, ours step by step.
    batch = ppo.Batch(*(x.transpose(0, 1).flatten(0, 1) for x in batch))
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(weights, agent.parameters())
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    adam["step"], start = torch.zeros((), dtype=torch.float64), agent.policy[0].weight.clone()
    indices = torch.from_numpy(np.concatenate(orders)).view(-1, 16)
    metrics = ppo.ppo_update(agent, adam, batch, indices, args)
    assert (metrics["losses/clipfrac"] > 0).all()
    assert (agent.policy[0].weight - start).abs().max() > 1e-3
    for theirs, ours in pairs:
        for x, y in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.policy.log_std, agent.log_std[0], rtol=0, atol=1e-5)
