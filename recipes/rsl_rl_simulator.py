"""Trains in a simulator that was wrapped for rsl_rl, whose `step` returns four values.

    python -m recipes.rsl_rl_simulator

Isaac Lab and mjlab need no adapter without rsl_rl's wrapper. This one is for simulators that have
only that interface (`rsl_rl.env.VecEnv`): actions have no bounds there, and `dones` are failures
unless `time_outs` says otherwise. Measured with the settings below, seed 1:
MEASURED
"""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

import ppo_vector_env as ppo


class FromRslRl:
    """A VecEnv of rsl_rl with the interface that ppo_vector_env.py needs."""

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.single_action_space = gym.spaces.Box(-np.inf, np.inf, (envs.num_actions,))
        self.metadata = {"autoreset_mode": "SAME_STEP"}
        self.max_episode_length = envs.max_episode_length

    @property
    def episode_length_buf(self) -> Tensor:  # so that training begins at random ages
        return self.envs.episode_length_buf

    def reset(self, seed: int | None = None) -> tuple[Any, dict]:
        if hasattr(self.envs, "reset"):  # rsl_rl itself never calls it
            self.envs.reset()
        obs = self.envs.get_observations()
        return (obs[0] if isinstance(obs, tuple) else obs), {}  # rsl_rl 2: with extras

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict]:
        obs, rewards, dones, extras = self.envs.step(actions)
        dones = dones.bool()
        time_outs = extras.get("time_outs", torch.zeros_like(dones)).bool() & dones
        return obs, rewards, dones & ~time_outs, time_outs, extras

    def close(self) -> None:
        getattr(self.envs, "close", lambda: None)()


class Points:
    """A VecEnv as a stand-in: points on a line go to 0, and fall off beyond 2."""

    num_actions, max_episode_length = 1, 50

    def __init__(self, num_envs: int, seed: int, device: torch.device) -> None:
        self.num_envs, self.device, self.cfg = num_envs, device, {}
        self.generator = torch.Generator(device).manual_seed(seed)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.place = torch.zeros(num_envs, device=device)
        self.begin(torch.ones(num_envs, dtype=torch.bool, device=device))

    def begin(self, which: Tensor) -> None:
        drawn = torch.rand(len(which), generator=self.generator, device=which.device)
        self.place = torch.where(which, 3 * drawn - 1.5, self.place)
        self.episode_length_buf[which] = 0

    def get_observations(self) -> dict[str, Tensor]:
        return {"policy": self.place[:, None]}

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict]:
        self.place = self.place + 0.1 * actions[:, 0].clamp(-1, 1)
        self.episode_length_buf += 1
        rewards = 1 - self.place.abs()
        time_outs = self.episode_length_buf >= self.max_episode_length
        dones = time_outs | (self.place.abs() > 2)
        self.begin(dones)
        extras = {"time_outs": time_outs, "log": {"distance": (1 - rewards).mean()}}
        return self.get_observations(), rewards, dones, extras


def make(num_envs: int, seed: int, device: torch.device) -> FromRslRl:
    return FromRslRl(Points(num_envs, seed, device))


SETTINGS = ppo.Args(
    num_envs=256,
    num_steps=24,
    num_minibatches=4,
    update_epochs=5,
    learning_rate=1e-3,
    init_std=1.0,
    total_timesteps=122_880,
)

if __name__ == "__main__":
    run = ppo.train(SETTINGS, make)
    first, last = (run["updates"][i]["charts/episodic_return"] for i in (0, -1))
    print(f"Return {first:.1f} at first, {last:.1f} in the end")
    ppo.evaluate(run["run_dir"], make=make)
