"""A simulator in PyTorch, on a GPU where there is one: thousands of pendulums in one tensor.

    python -m recipes.torch_simulator

The class below is all that `--make recipes.torch_simulator:Pendulums` of ppo_vector_env.py needs.
Nothing leaves the device. The task is Gymnasium's Pendulum-v1. Measured with the settings below,
seed 1: the return of 100 episodes rises from -1213 to -203.
"""

import time

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

import ppo_vector_env as ppo

SETTINGS = ppo.Args(
    num_envs=256,
    num_steps=32,
    num_minibatches=16,
    gamma=0.9,
    learning_rate=1e-3,
    init_std=1.0,
    total_timesteps=409_600,
)
LIMIT = 200  # steps of an episode


class Pendulums:
    """Swing up and balance `num_envs` pendulums; the action, within [-1, 1], is the torque."""

    single_action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, num_envs: int, seed: int, device: torch.device) -> None:
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.generator = torch.Generator(device).manual_seed(seed)
        self.angle, self.speed = torch.zeros(2, num_envs, device=device)  # angle 0: upright
        self.age = torch.zeros(num_envs, device=device)

    def observe(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed], dim=1)

    def begin(self, which: Tensor) -> None:
        """Begin new episodes where `which` (N,) is true."""
        drawn = torch.rand(2, len(which), generator=self.generator, device=which.device) * 2 - 1
        self.angle = torch.where(which, drawn[0] * torch.pi, self.angle)
        self.speed = torch.where(which, drawn[1], self.speed)
        self.age = self.age * ~which

    def reset(self, seed: int | None = None) -> tuple[Tensor, dict]:
        self.begin(torch.ones_like(self.age, dtype=torch.bool))
        return self.observe(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        torque = 2 * actions[:, 0]
        angle = (self.angle + torch.pi) % (2 * torch.pi) - torch.pi
        rewards = -(angle**2) - 0.1 * self.speed**2 - 0.001 * torque**2
        acceleration = 15 * self.angle.sin() + 3 * torque
        self.speed = (self.speed + 0.05 * acceleration).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.speed
        self.age = self.age + 1
        truncated = self.age >= LIMIT
        final_obs = self.observe()
        self.begin(truncated)
        never = torch.zeros_like(truncated)
        return self.observe(), rewards, never, truncated, {"final_obs": final_obs}

    def close(self) -> None:
        pass


def main() -> None:
    start_time = time.time()
    episodes = ppo.train(SETTINGS, Pendulums)["episodes"]
    first, last = (np.mean([x["return"] for x in y]) for y in (episodes[:100], episodes[-100:]))
    seconds = time.time() - start_time
    print(f"Return {first:.0f} at first, {last:.0f} in the end, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
