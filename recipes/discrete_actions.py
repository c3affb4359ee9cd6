"""Discrete actions in ppo_vector_env.py: a Categorical policy, for EnvPool and simulators on a GPU.

    python -m recipes.discrete_actions

A policy is a class, and an argument of `train`; a wrapper hands its choices to the simulator. One
normal number per action is enough noise: it is the quantile of the choice. Measured, seed 1, last
100 episodes: the return in CartPole-v1 is 500, in the grid world 0.66 (perfect play earns 0.67).
"""

import functools
from typing import Any

import envpool
import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

import ppo_vector_env as ppo


class Chooser(ppo.Agent):
    """Draws one of K choices, which is the only component of an action (N, 1)."""

    def __init__(self, layout: dict[str, Any], args: ppo.Args) -> None:
        super().__init__(layout, args)
        self.num_choices = int(layout["high"][0]) + 1
        self.policy = ppo.network(len(self.policy_obs), self.num_choices, 0.01, args)
        del self.log_std  # of a Gaussian

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Where the cumulated probabilities exceed a uniform number, (N, 1)."""
        cumulated = self.get_mean(obs).softmax(-1).cumsum(-1)
        uniform = torch.special.ndtr(noise)
        choices = (cumulated < uniform).sum(-1, keepdim=True)
        return choices.clamp(max=self.num_choices - 1).float()  # the last sum may round to below 1

    def evaluate_actions(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        policy = Categorical(logits=self.get_mean(obs), validate_args=False)
        return policy.log_prob(actions[..., 0].long()), policy.entropy()

    def forward(self, raw_obs: Tensor) -> Tensor:
        """The most likely choices (N, 1)."""
        logits = self.get_mean(self.normalize_obs(raw_obs))
        return logits.argmax(-1, keepdim=True).float()

    def get_metrics(self) -> ppo.Tensors:
        return {}


class Choices:
    """A simulator with discrete actions, which takes them as floats (N, 1)."""

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        space = envs.action_space  # EnvPool's is that of a single environment
        self.single_action_space = gym.spaces.Box(0, int(space.n) - 1, (1,))
        self.metadata = envs.metadata
        self.unwrapped = getattr(envs, "unwrapped", envs)

    def reset(self, seed: int | None = None) -> tuple:
        return self.envs.reset(seed=seed)

    def step(self, actions: Any) -> tuple:
        choices = actions[:, 0]
        is_tensor = isinstance(choices, Tensor)
        return self.envs.step(choices.long() if is_tensor else choices.astype(np.int32))

    def close(self) -> None:
        self.envs.close()


class GridWorld:
    """A grid world in PyTorch: `num_envs` grids of 5 x 5, and a goal at a random place in each.

    Up, right, down or left; -0.1 per step, 1 at the goal, and 50 steps at most.
    """

    action_space = gym.spaces.Discrete(4)
    metadata = {"autoreset_mode": "SAME_STEP"}  # noqa: RUF012

    def __init__(self, num_envs: int, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.moves = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]], device=device)
        self.place, self.goal = torch.zeros(2, num_envs, 2, dtype=torch.long, device=device)
        self.age = torch.zeros(num_envs, dtype=torch.long, device=device)

    def begin(self, which: Tensor) -> None:
        """Begin new episodes where `which` (N,) is true."""
        shape = (2, len(which), 2)
        drawn = torch.randint(5, shape, generator=self.generator, device=which.device)
        self.place = torch.where(which[:, None], drawn[0], self.place)
        self.goal = torch.where(which[:, None], drawn[1], self.goal)
        self.age = self.age * ~which

    def observe(self) -> Tensor:
        return torch.cat([self.place, self.goal], dim=1).float()

    def reset(self, seed: int | None = None) -> tuple[Tensor, dict]:
        self.begin(torch.ones_like(self.age, dtype=torch.bool))
        return self.observe(), {}

    def step(self, choices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        self.place = (self.place + self.moves[choices]).clamp(0, 4)
        self.age = self.age + 1
        found = (self.place == self.goal).all(1)
        truncated = (self.age >= 50) & ~found
        final_obs = self.observe()
        self.begin(found | truncated)
        return self.observe(), found.float() - 0.1, found, truncated, {"final_obs": final_obs}

    def close(self) -> None:
        pass


def make_cart_pole(num_envs: int, seed: int, device: torch.device) -> Choices:
    return Choices(envpool.make("CartPole-v1", "gymnasium", num_envs=num_envs, seed=seed))


def make_grid_world(num_envs: int, seed: int, device: torch.device) -> Choices:
    return Choices(GridWorld(num_envs, seed, device))


train = functools.partial(ppo.train, agent_class=Chooser)

CART_POLE = ppo.Args(
    num_envs=8, num_steps=128, num_minibatches=8, learning_rate=1e-3, total_timesteps=102_400
)
GRID_WORLD = ppo.Args(
    num_envs=1024, num_steps=16, num_minibatches=8, learning_rate=1e-3, total_timesteps=327_680
)

if __name__ == "__main__":
    for make, settings in ((make_cart_pole, CART_POLE), (make_grid_world, GRID_WORLD)):
        run = train(settings, make)
        score = np.mean([x["return"] for x in run["episodes"][-100:]])
        print(f"{make.__name__}: return {score:.2f} in the last 100 episodes")
        ppo.evaluate(run["run_dir"], make=make, agent_class=Chooser)
