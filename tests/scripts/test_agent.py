"""Networks and distribution of the scripts for vectors: initialization, shapes, gradients."""

import math

import numpy as np
import pytest
import torch
from adapters import gain_of, on
from torch import nn

import ppo_continuous_action as ppo


def linear_layers(network):
    return [x for x in network.modules() if isinstance(x, torch.nn.Linear)]


@on("vector")
def test_gains_are_sqrt_2_then_a_hundredth_for_the_policy_and_1_for_the_value(script):
    agent = script.agent(17, 6)
    for network, head in ((agent.policy, 0.01), (agent.value, 1.0)):
        gains = [gain_of(layer) for layer in linear_layers(network)]
        assert gains == pytest.approx([math.sqrt(2)] * 2 + [head], abs=1e-4)
    assert all((layer.bias == 0).all() for layer in linear_layers(agent))


@on("vector")
def test_without_orthogonal_init_layers_are_as_pytorch_makes_them(script):
    agent = script.agent(17, 6, orthogonal_init=False)
    assert all(math.isnan(gain_of(x)) for x in linear_layers(agent) if len(x.weight) > 1)
    assert all((layer.bias != 0).any() for layer in linear_layers(agent))


@on("vector")
@pytest.mark.parametrize("shared", [True, False])
def test_policy_reaches_the_value_trunk_only_if_it_is_shared(script, shared):
    agent = script.agent(17, 6, shared_network=shared)
    agent.policy(torch.randn(5, 17)).sum().backward()
    first, second, head = linear_layers(agent.value)
    for x in (first.weight, first.bias, second.weight, second.bias):
        assert (x.grad is not None and bool(x.grad.any())) is shared
    assert head.weight.grad is None


@on("vector")
def test_networks_are_two_tanh_layers_of_64_and_a_head(script):
    network, obs = script.agent(3, 2).policy, torch.randn(7, 3)
    first, second, head = linear_layers(network)
    assert first.out_features == second.out_features == 64
    expected = head(torch.tanh(second(torch.tanh(first(obs)))))
    torch.testing.assert_close(network(obs), expected)


@on("gaussian")
def test_log_std_is_a_zero_parameter_and_the_same_in_every_state(script):
    agent = script.agent(17, 6)
    assert agent.log_std.shape == (1, 6) and (agent.log_std == 0).all()
    assert any(x is agent.log_std for x in agent.parameters())
    _, entropy, _ = agent.evaluate_actions(torch.randn(9, 17), torch.randn(9, 6))[:3]
    assert entropy.tolist() == pytest.approx([1.418939 * 6] * 9, rel=1e-5)


TANH = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
OTHERS = [
    nn.Sequential(nn.Linear(17, 64), nn.ReLU(), nn.Linear(64, 6)),
    nn.Sequential(nn.Linear(17, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 6)),
    nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 6), nn.Tanh()),
    nn.Sequential(nn.Linear(17, 64, bias=False), nn.Tanh(), nn.Linear(64, 6)),
    nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 6)),
    nn.Sequential(nn.Sequential(nn.Linear(17, 64), nn.Tanh()), nn.Linear(64, 6)),
    nn.Linear(17, 6),
]


@pytest.mark.parametrize("network", [TANH, *OTHERS])
def test_what_acts_equals_the_network_whatever_its_layers(network):
    obs = torch.randn(8, 17)
    found = ppo.in_numpy(network)(obs.numpy())
    np.testing.assert_allclose(found, network(obs).detach().numpy(), atol=1e-6)
    assert found.dtype == np.float32 and found.shape == (8, 6)


@on("gaussian")
def test_the_actor_adds_noise_in_standard_deviations_and_knows_its_probability(script):
    agent = script.agent(3, 2)
    nn.init.normal_(agent.policy[-1].weight)
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([[-1.0, 0.5]]))
    obs, noise = np.random.default_rng(0).normal(size=(2, 5, 10, 3)).astype(np.float32)
    act, log_prob = script.module.actor(agent)
    drawn = np.array([act(*rows) for rows in zip(obs, noise[..., :2])])
    t_obs, t_drawn = torch.tensor(obs), torch.tensor(drawn)
    expected = agent.policy(t_obs).detach().numpy() + np.exp([-1, 0.5]) * noise[..., :2]
    np.testing.assert_allclose(drawn, expected, rtol=0, atol=1e-5)
    logprobs = agent.evaluate_actions(t_obs, t_drawn)[0].detach().numpy()
    np.testing.assert_allclose(log_prob(obs, noise[..., :2]), logprobs, rtol=0, atol=1e-5)
    assert drawn.dtype == np.float32
