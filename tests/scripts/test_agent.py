"""Networks and distribution of the scripts for vectors: initialization, shapes, gradients."""

import math

import numpy as np
import pytest
import torch
from adapters import scripts_with
from helpers import gain_of
from torch import nn

import ppo_continuous_action as ppo


def linear_layers(network):
    return [x for x in network.modules() if isinstance(x, torch.nn.Linear)]


@scripts_with("vector")
def test_networks_are_two_tanh_layers_of_64_and_a_head_with_the_gains_of_ppo2(script):
    agent, obs = script.agent(17, 6), torch.randn(7, 17)
    for network, gain in ((agent.policy, 0.01), (agent.value, 1.0)):
        first, second, head = layers = linear_layers(network)
        assert first.out_features == second.out_features == 64
        gains = [gain_of(layer) for layer in layers]
        assert gains == pytest.approx([math.sqrt(2), math.sqrt(2), gain], abs=1e-4)
        assert all((layer.bias == 0).all() for layer in layers)
        expected = head(torch.tanh(second(torch.tanh(first(obs)))))
        torch.testing.assert_close(network(obs).view(expected.shape), expected)


@scripts_with("gaussian")
def test_log_std_is_a_zero_parameter_and_the_same_in_every_state(script):
    agent = script.agent(17, 6)
    assert agent.log_std.shape == (1, 6) and (agent.log_std == 0).all()
    assert any(x is agent.log_std for x in agent.parameters())
    entropy = agent.evaluate_actions(torch.randn(9, 17), torch.randn(9, 6))[2]
    assert entropy.tolist() == pytest.approx([1.418939 * 6] * 9, rel=1e-5)


OFTEN = [nn.Linear(17, 17), nn.Tanh(), nn.ReLU()]
OTHERS = [nn.Linear(17, 17, bias=False), nn.ELU(), nn.LayerNorm(17)]
OTHERS += [nn.Sequential(nn.Linear(17, 17), nn.Tanh())]


@pytest.mark.parametrize("layer", OFTEN + OTHERS)
def test_what_acts_equals_the_layer_and_the_usual_ones_are_not_run_in_pytorch(layer, monkeypatch):
    obs = torch.randn(8, 17)
    expected, fast = layer(obs).detach().numpy(), ppo.in_numpy(layer)
    if layer in OFTEN:
        monkeypatch.setattr(nn.Module, "__call__", None)
    found = fast(obs.numpy())
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32 and found.shape == (8, 17)
