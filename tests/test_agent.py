"""Networks and distribution of the continuous script: initialization, shapes, gradients."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from ppo_continuous_action import Agent, Args, layer_init, numpy_layers, numpy_mlp, ppo_loss


def make_agent(obs_size=17, action_size=6, **settings):
    torch.manual_seed(0)
    return Agent(obs_size, action_size, Args(**settings))


def gain_of(weight):
    """The common singular value of a scaled orthogonal matrix; NaN if there is none."""
    values = torch.linalg.svdvals(weight.flatten(1).double())
    return values[0].item() if torch.allclose(values, values[0], atol=1e-5) else float("nan")


def linear_layers(network):
    return [x for x in network.modules() if isinstance(x, torch.nn.Linear)]


def test_layer_init_is_orthogonal_with_gain_and_constant_bias():
    layer = layer_init(torch.nn.Linear(30, 20), 1.7, bias=0.3)
    assert gain_of(layer.weight) == pytest.approx(1.7)
    assert (layer.bias == 0.3).all()


def test_gains_are_sqrt_2_then_a_hundredth_for_the_policy_and_1_for_the_value():
    agent = make_agent()
    for trunk in (agent.policy_trunk, agent.value_trunk):
        gains = [gain_of(layer.weight) for layer in linear_layers(trunk)]
        assert gains == pytest.approx([math.sqrt(2)] * 2, abs=1e-4)
    assert gain_of(agent.action_mean.weight) == pytest.approx(0.01, abs=1e-5)
    assert gain_of(agent.value_head.weight) == pytest.approx(1.0, abs=1e-4)
    assert all((layer.bias == 0).all() for layer in linear_layers(agent))


def test_without_orthogonal_init_layers_are_as_pytorch_makes_them():
    agent = make_agent(orthogonal_init=False)
    assert all(math.isnan(gain_of(x.weight)) for x in linear_layers(agent) if len(x.weight) > 1)
    assert all((layer.bias != 0).any() for layer in linear_layers(agent))


@pytest.mark.parametrize(("shared", "count"), [(True, 4675), (False, 9155)])
def test_parameter_counts_of_shared_and_separate_networks(shared, count):
    agent = make_agent(4, 2, shared_network=shared)
    assert sum(x.numel() for x in agent.parameters()) == count + 2  # and the two log stds


@pytest.mark.parametrize("shared", [True, False])
def test_policy_loss_reaches_the_value_trunk_only_if_it_is_shared(shared):
    agent = make_agent(shared_network=shared)
    agent.get_action_and_value(torch.randn(5, 17), torch.randn(5, 6))[1].sum().backward()
    reached = [
        x.grad is not None and x.grad.abs().sum() > 0 for x in agent.value_trunk.parameters()
    ]
    assert all(reached) if shared else not any(reached)
    assert agent.value_head.weight.grad is None


def test_trunks_are_two_tanh_layers_of_64():
    trunk = make_agent(3, 2).policy_trunk
    obs = torch.randn(7, 3)
    first, second = linear_layers(trunk)
    expected = torch.tanh(second(torch.tanh(first(obs))))
    assert expected.shape == (7, 64)
    torch.testing.assert_close(trunk(obs), expected)


def test_log_std_is_a_zero_parameter_and_the_same_in_every_state():
    agent = make_agent()
    assert agent.log_std.shape == (1, 6) and (agent.log_std == 0).all()
    assert any(x is agent.log_std for x in agent.parameters())
    entropy = agent.get_action_and_value(torch.randn(9, 17))[2]
    assert entropy.tolist() == pytest.approx([1.418939 * 6] * 9, rel=1e-5)


def test_joint_log_prob_and_entropy_are_those_of_a_diagonal_gaussian():
    agent = make_agent()
    with torch.no_grad():
        agent.log_std.copy_(torch.linspace(-1, 1, 6))
    obs, action = torch.randn(4, 17), torch.randn(4, 6) * 3
    with torch.no_grad():
        returned, logprob, entropy, value = agent.get_action_and_value(obs, action)
        mean = agent.action_mean(agent.policy_trunk(obs)).numpy()
    assert returned is action and logprob.shape == entropy.shape == value.shape == (4,)
    covariance = np.diag(np.exp(2 * np.linspace(-1, 1, 6)))
    for i in range(4):
        policy = multivariate_normal(mean[i], covariance)
        assert logprob[i].item() == pytest.approx(policy.logpdf(action[i].numpy()), rel=1e-5)
        assert entropy[i].item() == pytest.approx(policy.entropy(), rel=1e-5)


def test_sampled_actions_have_the_moments_of_the_policy():
    agent = make_agent(3, 2)
    with torch.no_grad():
        agent.log_std.copy_(torch.tensor([[-1.0, 0.5]]))
        obs = torch.ones(100_000, 3)
        actions = agent.get_action_and_value(obs)[0]
        mean = agent.action_mean(agent.policy_trunk(obs[:1]))
    torch.testing.assert_close(actions.mean(0), mean[0], atol=0.02, rtol=0)
    torch.testing.assert_close(actions.std(0), agent.log_std[0].detach().exp(), atol=0.02, rtol=0)


def test_leading_axes_are_kept():
    agent = make_agent(3, 2)
    obs = torch.randn(5, 4, 3)
    assert agent.get_value(obs).shape == (5, 4)
    action, logprob, _, _ = agent.get_action_and_value(obs)
    assert action.shape == (5, 4, 2) and logprob.shape == (5, 4)


def test_numpy_actor_equals_the_network():
    agent = make_agent()
    obs = torch.randn(8, 17)
    layers = numpy_layers(agent.policy_trunk, agent.action_mean)
    with torch.no_grad():
        expected = agent.action_mean(agent.policy_trunk(obs)).numpy()
    np.testing.assert_allclose(numpy_mlp(layers, obs.numpy()), expected, atol=1e-6)


def numpy_ppo2_loss(parameters, minibatch, clip_coef, clip_vloss, norm_adv, ent_coef, vf_coef):
    """A second statement of ppo2's loss, from baselines' model.py, in numpy and float64."""
    obs, actions, logprobs, old_values, advantages, returns = (x.numpy() for x in minibatch)
    p = {name: x.detach().double().numpy() for name, x in parameters.items()}

    def network(trunk, head):
        h = np.tanh(obs @ p[f"{trunk}.0.weight"].T + p[f"{trunk}.0.bias"])
        h = np.tanh(h @ p[f"{trunk}.2.weight"].T + p[f"{trunk}.2.bias"])
        return h @ p[f"{head}.weight"].T + p[f"{head}.bias"]

    mean, vpred = network("policy_trunk", "action_mean"), network("value_trunk", "value_head")[:, 0]
    logstd = p["log_std"]
    neglogpac = 0.5 * np.sum(((actions - mean) / np.exp(logstd)) ** 2, axis=-1)
    neglogpac += 0.5 * np.log(2 * np.pi) * actions.shape[-1] + np.sum(logstd)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = np.exp(-neglogpac - logprobs)
    losses = -advantages * ratio
    losses2 = -advantages * np.clip(ratio, 1 - clip_coef, 1 + clip_coef)
    pg_loss = np.mean(np.maximum(losses, losses2))
    vf_losses = np.square(vpred - returns)
    if clip_vloss:
        clipped = old_values + np.clip(vpred - old_values, -clip_coef, clip_coef)
        vf_losses = np.maximum(vf_losses, np.square(clipped - returns))
    vf_loss = 0.5 * np.mean(vf_losses)
    entropy = np.sum(logstd + 0.5 * np.log(2 * np.pi * np.e))
    metrics = [
        pg_loss,
        vf_loss,
        entropy,
        np.mean(-np.log(ratio)),
        np.mean(ratio - 1 - np.log(ratio)),
        np.mean(np.abs(ratio - 1) > clip_coef),
    ]
    return pg_loss - entropy * ent_coef + vf_loss * vf_coef, metrics


def random_minibatch(agent, size=64):
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    obs, actions = noise(size, 17), noise(size, 6)
    with torch.no_grad():
        _, logprobs, _, values = agent.get_action_and_value(obs, actions)
    logprobs, values = logprobs + 0.3 * noise(size), values + 0.3 * noise(size)
    return obs, actions, logprobs, values, 2 + 3 * noise(size), noise(size)


@pytest.mark.parametrize("clip_vloss", [True, False])
@pytest.mark.parametrize("norm_adv", [True, False])
def test_loss_and_its_gradient_equal_a_numpy_statement_of_ppo2(clip_vloss, norm_adv):
    agent = make_agent().double()
    with torch.no_grad():
        agent.log_std.copy_(torch.linspace(-0.5, 0.5, 6))
    minibatch = random_minibatch(agent)
    settings = (0.2, clip_vloss, norm_adv, 0.01, 0.5)
    loss, metrics = ppo_loss(agent, minibatch, *settings)
    parameters = dict(agent.named_parameters())
    expected, expected_metrics = numpy_ppo2_loss(parameters, minibatch, *settings)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics.tolist() == pytest.approx(expected_metrics, rel=1e-8)

    loss.backward()
    torch.manual_seed(1)
    for name, parameter in parameters.items():
        direction = torch.randn_like(parameter)
        step = 1e-6
        up = numpy_ppo2_loss(
            {**parameters, name: parameter + step * direction}, minibatch, *settings
        )
        down = numpy_ppo2_loss(
            {**parameters, name: parameter - step * direction}, minibatch, *settings
        )
        slope = (up[0] - down[0]) / (2 * step)
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_entropy_bonus_lowers_the_loss_by_its_weight_times_the_entropy():
    agent = make_agent().double()
    minibatch = random_minibatch(agent)
    plain = ppo_loss(agent, minibatch, 0.2, True, True, 0.0, 0.5)[0]
    bonus = ppo_loss(agent, minibatch, 0.2, True, True, 0.1, 0.5)[0]
    assert (plain - bonus).item() == pytest.approx(0.1 * 6 * 1.4189385, rel=1e-6)
