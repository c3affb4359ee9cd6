"""The pure functions against closed forms, tables and sums that a person can check."""

import math

import numpy as np
import pytest
import torch

from ppo_continuous_action import (
    approx_kl,
    clip_fraction,
    explained_variance,
    gae,
    health_warnings,
    linear_decay,
    normalize,
    policy_loss,
    value_loss,
)

# --- Generalized advantage estimation ---


def random_rollout(steps=40, envs=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(
        3, steps, envs, dtype=torch.float64, generator=generator
    )
    done = (torch.rand(steps, envs, generator=generator) < 0.2).double()
    terminated = done * (torch.rand(steps, envs, generator=generator) < 0.5)
    # Within an episode the next value is the value of the next step.
    inside = (1 - done[:-1]).bool()
    next_values[:-1][inside] = values[1:][inside]
    return rewards, values, next_values, terminated, done


def double_sum(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """A_t = sum_k (gamma lambda)^k delta_{t+k} up to the end of the episode, term by term."""
    advantages = torch.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                future = 0.0 if terminated[k, n] else gamma * next_values[k, n]
                delta = rewards[k, n] + future - values[k, n]
                advantages[t, n] += (gamma * gae_lambda) ** (k - t) * delta
                if done[k, n]:
                    break
    return advantages


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_double_sum(seed, gae_lambda):
    rollout = random_rollout(seed=seed)
    advantages, returns = gae(*rollout, 0.97, gae_lambda)
    expected = double_sum(*rollout, 0.97, gae_lambda)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(returns, expected + rollout[1], rtol=0, atol=1e-10)


def column(*x):
    return torch.tensor(x, dtype=torch.float64)[:, None]


def test_gae_three_steps_by_hand():
    advantages, returns = gae(
        column(1, 2, 3),
        column(0.5, 0.4, 0.3),
        column(0.4, 0.3, 0.2),
        column(0, 1, 0),
        column(0, 1, 0),
        0.99,
        0.95,
    )
    torch.testing.assert_close(advantages, column(2.4008, 1.6, 2.898))
    torch.testing.assert_close(returns, column(2.9008, 2.0, 3.198))


def test_gae_terminated_step_has_no_bootstrap_and_truncated_step_has():
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    rollout = (one, 0.25 * one, 4 * one)
    assert gae(*rollout, zero, one, 0.5, 0.9)[1].item() == 1 + 0.5 * 4
    assert gae(*rollout, one, one, 0.5, 0.9)[1].item() == 1


def test_gae_lambda_one_gives_the_discounted_sum_of_rewards():
    rewards, values = column(1, 1, 1, 1), column(3, -2, 5, 7)
    next_values = torch.cat([values[1:], column(10)])
    none = torch.zeros_like(rewards)
    returns = gae(rewards, values, next_values, none, none, 0.5, 1.0)[1]
    assert returns[0].item() == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 10 / 16)


def test_gae_stops_at_the_end_of_an_episode():
    rewards = column(0, 0, 100)
    zeros = torch.zeros_like(rewards)
    advantages, _ = gae(rewards, zeros, zeros, zeros, column(0, 1, 0), 0.9, 0.9)
    assert advantages.flatten().tolist() == [0, 0, 100]


# --- Losses ---


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.0, 1.0, -1.0, True),
        (1.5, 1.0, -1.2, False),  # good action, already likelier: nothing more to gain
        (0.5, 1.0, -0.5, True),
        (1.5, -1.0, 1.5, True),  # bad action grown likelier: full correction
        (0.5, -1.0, 0.8, False),
    ],
)
def test_policy_loss_table(ratio, advantage, loss, moves):
    logratio = torch.tensor([math.log(ratio)], requires_grad=True)
    result = policy_loss(logratio, torch.tensor([advantage]), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert (logratio.grad.item() != 0) is moves


def test_policy_loss_is_a_mean():
    assert policy_loss(torch.zeros(4), torch.tensor([1.0, 2, 3, 6]), 0.2).item() == -3


@pytest.mark.parametrize(
    ("new", "old", "target", "loss", "moves"),
    [
        (1.0, 0.0, 1.0, 0.5 * 0.64, False),
        (-1.0, 0.0, 1.0, 0.5 * 4, True),
        (0.1, 0.0, 1.0, 0.5 * 0.81, True),
    ],
)
def test_value_loss_table(new, old, target, loss, moves):
    values = torch.tensor([new], requires_grad=True)
    result = value_loss(values, torch.tensor([old]), torch.tensor([target]), 0.2)
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert (values.grad.item() != 0) is moves


def test_value_loss_without_clipping_is_half_the_squared_error():
    new, old, returns = torch.randn(3, 50)
    assert value_loss(new, old, returns, None).item() == pytest.approx(
        0.5 * torch.nn.functional.mse_loss(new, returns).item()
    )


def test_normalize_uses_the_population_std():
    x = torch.tensor([1.0, 2, 3, 6])
    assert normalize(x).tolist() == pytest.approx(((x.numpy() - 3) / np.std(x.numpy())).tolist())
    assert normalize(torch.full((4,), 5.0)).tolist() == [0, 0, 0, 0]


# --- Debug variables ---


def test_approx_kl_is_the_k3_estimate_of_the_exact_kl():
    old = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    new = torch.distributions.Normal(torch.tensor(0.3), torch.tensor(1.2))
    torch.manual_seed(0)
    actions = old.sample((400_000,))
    logratio = new.log_prob(actions) - old.log_prob(actions)
    exact = torch.distributions.kl_divergence(old, new).item()
    assert approx_kl(logratio).item() == pytest.approx(exact, rel=0.02)
    assert approx_kl(-logratio).item() != pytest.approx(exact, rel=0.02)
    x = logratio[:7]
    assert approx_kl(x).item() == pytest.approx((x.exp() - 1 - x).mean().item())


def test_clip_fraction_counts_ratios_outside_the_range():
    logratio = torch.log(torch.tensor([0.7, 0.81, 1.0, 1.19, 1.3]))
    assert clip_fraction(logratio, 0.2).item() == pytest.approx(0.4)


def test_explained_variance():
    returns = torch.tensor([1.0, 2, 3, 4])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 9.0), returns) == 0
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, torch.ones(4)))


def test_linear_decay_end_points():
    decay = [linear_decay(3.0, u, 4) for u in (1, 2, 3, 4)]
    assert decay == pytest.approx([3.0, 2.25, 1.5, 0.75])


# --- Health ---

HEALTHY = {
    "losses/clipfrac": 0.1,
    "losses/approx_kl": 0.01,
    "losses/explained_variance": 0.5,
    "losses/grad_norm": 1.0,
    "policy/log_std": -0.5,
    "advantages/std": 1.0,
    "charts/learning_rate": 3e-4,
}


def test_a_healthy_run_gets_no_warning():
    assert health_warnings([HEALTHY] * 100) == {}


@pytest.mark.parametrize(
    ("change", "cause", "remedy"),
    [
        ({"losses/clipfrac": 0.6}, "clipfrac", "--learning-rate"),
        ({"losses/approx_kl": 0.06}, "approx_kl high", "--update-epochs"),
        ({"losses/approx_kl": 0.0001}, "approx_kl low", "--learning-rate"),
        ({"policy/log_std": -5.0}, "log_std", "--ent-coef"),
        ({"policy/entropy_share": 0.001}, "entropy", "--ent-coef"),
        ({"losses/explained_variance": -0.1}, "explained_variance", "--vf-coef"),
        ({"losses/grad_norm": 500.0}, "grad_norm", "--learning-rate"),
        ({"advantages/std": 0.0}, "advantages", "rewards"),
    ],
)
def test_each_illness_gets_its_warning_with_a_remedy(change, cause, remedy):
    found = health_warnings([{**HEALTHY, **change}] * 20)
    assert list(found) == [cause] and remedy in found[cause]


def test_low_kl_and_low_explained_variance_need_patience():
    ill = {**HEALTHY, "losses/approx_kl": 0.0001, "losses/explained_variance": -1.0}
    assert health_warnings([ill] * 19) == {}
    assert health_warnings([HEALTHY] + [ill] * 19) == {}


def test_low_kl_is_no_illness_once_the_learning_rate_has_decayed():
    late = {**HEALTHY, "losses/approx_kl": 0.0001, "charts/learning_rate": 1e-5}
    assert health_warnings([HEALTHY] + [late] * 30) == {}
