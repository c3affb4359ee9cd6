"""The scripts learn. Thresholds are beyond what the worst of five seeds reaches, with a margin."""

import numpy as np
import pytest
from adapters import scripts_with


@pytest.mark.slow
@scripts_with("gaussian")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_is_swung_up(script, seed):
    args = script.args(
        env_id="Pendulum-v1", seed=seed, num_envs=4, num_steps=512, total_timesteps=204_800,
        learning_rate=1e-3, gamma=0.9, update_epochs=10, num_minibatches=32, compile="yes",
    )  # fmt: skip
    episodes = script.module.train(args)["episodes"]
    assert np.mean([x["return"] for x in episodes[-100:]]) > -300
