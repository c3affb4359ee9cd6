"""The script learns. Slow ones state the worst of five seeds, with a margin."""

import numpy as np
import pytest

from ppo_continuous_action import train


def last_returns(result, count=100):
    return np.mean([x["return"] for x in result["episodes"][-count:]])


def test_one_step_target_is_learned_in_seconds(tiny):
    """Random actions cost about 0.95 per episode; seeds 1-5 end between 0.11 and 0.13."""
    args = tiny(
        env_id="FakeTarget-v0", num_envs=8, num_steps=64, total_timesteps=20_480,
        learning_rate=3e-3, update_epochs=10, num_minibatches=8, gamma=0.0,
    )  # fmt: skip
    assert last_returns(train(args), 1000) > -0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_is_swung_up(tiny, seed):
    args = tiny(
        env_id="Pendulum-v1", seed=seed, num_envs=4, num_steps=512, total_timesteps=204_800,
        learning_rate=1e-3, gamma=0.9, update_epochs=10, num_minibatches=32,
    )  # fmt: skip
    assert last_returns(train(args)) > -300


@pytest.mark.slow
def test_inverted_pendulum_is_balanced(tiny):
    args = tiny(
        env_id="InvertedPendulum-v4", num_envs=1, num_steps=2048, total_timesteps=204_800,
        update_epochs=10, num_minibatches=32,
    )  # fmt: skip
    assert last_returns(train(args), 20) > 700
