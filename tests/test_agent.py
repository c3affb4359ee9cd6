"""Networks and distribution of the scripts for vectors: initialization, shapes, gradients."""

import math

import numpy as np
import pytest
import torch
from adapters import VECTOR, on
from scipy.stats import multivariate_normal

from ppo_continuous_action import in_numpy, layer_init

GAUSSIAN = ["continuous", "kl_penalty"]


def gain_of(weight):
    """The common singular value of a scaled orthogonal matrix; NaN if there is none."""
    values = torch.linalg.svdvals(weight.flatten(1).double())
    return values[0].item() if torch.allclose(values, values[0], atol=1e-5) else float("nan")


def linear_layers(network):
    return [x for x in network.modules() if isinstance(x, torch.nn.Linear)]


def test_layer_init_is_orthogonal_with_gain_and_bias_0():
    layer = layer_init(torch.nn.Linear(30, 20), 1.7)
    assert gain_of(layer.weight) == pytest.approx(1.7)
    assert (layer.bias == 0).all()


@on(*VECTOR)
def test_gains_are_sqrt_2_then_a_hundredth_for_the_policy_and_1_for_the_value(script):
    agent = script.agent(17, 6)
    for network, head in ((agent.policy, 0.01), (agent.value, 1.0)):
        gains = [gain_of(layer.weight) for layer in linear_layers(network)]
        assert gains == pytest.approx([math.sqrt(2)] * 2 + [head], abs=1e-4)
    assert all((layer.bias == 0).all() for layer in linear_layers(agent))


@on(*VECTOR)
def test_without_orthogonal_init_layers_are_as_pytorch_makes_them(script):
    agent = script.agent(17, 6, orthogonal_init=False)
    assert all(math.isnan(gain_of(x.weight)) for x in linear_layers(agent) if len(x.weight) > 1)
    assert all((layer.bias != 0).any() for layer in linear_layers(agent))


@on(*VECTOR)
@pytest.mark.parametrize(("shared", "count"), [(True, 4675), (False, 9155)])
def test_parameter_counts_of_shared_and_separate_networks(script, shared, count):
    agent = script.agent(4, 2, shared_network=shared)
    log_stds = 2 * hasattr(agent, "log_std")
    assert sum(x.numel() for x in agent.parameters()) == count + log_stds


@on(*VECTOR)
@pytest.mark.parametrize("shared", [True, False])
def test_policy_reaches_the_value_trunk_only_if_it_is_shared(script, shared):
    agent = script.agent(17, 6, shared_network=shared)
    agent.policy(torch.randn(5, 17)).sum().backward()
    first, second, head = linear_layers(agent.value)
    for x in (first.weight, first.bias, second.weight, second.bias):
        assert (x.grad is not None and bool(x.grad.any())) is shared
    assert head.weight.grad is None


@on(*VECTOR)
def test_networks_are_two_tanh_layers_of_64_and_a_head(script):
    network, obs = script.agent(3, 2).policy, torch.randn(7, 3)
    first, second, head = linear_layers(network)
    assert first.out_features == second.out_features == 64
    expected = head(torch.tanh(second(torch.tanh(first(obs)))))
    torch.testing.assert_close(network(obs), expected)


@on(*GAUSSIAN)
def test_log_std_is_a_zero_parameter_and_the_same_in_every_state(script):
    agent = script.agent(17, 6)
    assert agent.log_std.shape == (1, 6) and (agent.log_std == 0).all()
    assert any(x is agent.log_std for x in agent.parameters())
    entropy = agent.get_action_and_value(torch.randn(9, 17))[2]
    assert entropy.tolist() == pytest.approx([1.418939 * 6] * 9, rel=1e-5)


@on(*GAUSSIAN)
def test_joint_log_prob_and_entropy_are_those_of_a_diagonal_gaussian(script):
    agent = script.agent(17, 6)
    with torch.no_grad():
        agent.log_std.copy_(torch.linspace(-1, 1, 6))
    obs, action = torch.randn(4, 17), torch.randn(4, 6) * 3
    with torch.no_grad():
        returned, logprob, entropy, value = agent.get_action_and_value(obs, action)[:4]
        mean = agent.policy(obs).numpy()
    assert returned is action and logprob.shape == entropy.shape == value.shape == (4,)
    torch.testing.assert_close(value, agent.get_value(obs))
    covariance = np.diag(np.exp(2 * np.linspace(-1, 1, 6)))
    for i in range(4):
        policy = multivariate_normal(mean[i], covariance)
        assert logprob[i].item() == pytest.approx(policy.logpdf(action[i].numpy()), rel=1e-5)
        assert entropy[i].item() == pytest.approx(policy.entropy(), rel=1e-5)


@on(*GAUSSIAN)
def test_sampled_actions_have_the_moments_of_the_policy(script):
    agent = script.agent(3, 2)
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([[-1.0, 0.5]]))
        actions = agent.get_action_and_value(torch.ones(100_000, 3))[0]
        mean = agent.policy(torch.ones(1, 3))
    torch.testing.assert_close(actions.mean(0), mean[0], atol=0.02, rtol=0)
    torch.testing.assert_close(actions.std(0), agent.log_std[0].detach().exp(), atol=0.02, rtol=0)


@on(*GAUSSIAN)
def test_leading_axes_are_kept(script):
    agent, obs = script.agent(3, 2), torch.randn(5, 4, 3)
    action, *others = agent.get_action_and_value(obs)[:4]
    assert action.shape == (5, 4, 2) and agent.get_value(obs).shape == (5, 4)
    assert all(x.shape == (5, 4) for x in others)


@on("continuous")
def test_numpy_actor_equals_the_network(script):
    agent, obs = script.agent(17, 6), torch.randn(8, 17)
    found = in_numpy(agent.policy)(obs.numpy())
    np.testing.assert_allclose(found, agent.policy(obs).detach().numpy(), atol=1e-6)
    agent.policy[1] = torch.nn.ReLU()
    with pytest.raises(ValueError, match="only tanh"):
        in_numpy(agent.policy)
