"""The scripts learn. Thresholds are beyond what the worst of five seeds reaches, with a margin."""

import numpy as np
import pytest
from adapters import on


def last_returns(result, count=100):
    return np.mean([x["return"] for x in result["episodes"][-count:]])


@on("continuous")
def test_one_step_target_is_learned_in_seconds(script):
    """Random actions cost about 0.95 per episode; seeds 1-5 end between 0.28 and 0.31."""
    args = script.args(
        env_id="FakeTarget-Box-v0", num_envs=8, num_steps=64, total_timesteps=10_240,
        learning_rate=3e-3, update_epochs=8, num_minibatches=4, gamma=0.0,
    )  # fmt: skip
    assert last_returns(script.module.train(args), 1000) > -0.4


@pytest.mark.slow
@on("gaussian")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_is_swung_up(script, seed):
    args = script.args(
        env_id="Pendulum-v1", seed=seed, num_envs=4, num_steps=512, total_timesteps=204_800,
        learning_rate=1e-3, gamma=0.9, update_epochs=10, num_minibatches=32, compile=True,
    )  # fmt: skip
    assert last_returns(script.module.train(args)) > -300
