# /// script
# dependencies = ["pettingzoo==1.27.0", "mpe2==1.1.1"]  # and those of the script
# ///
"""Several agents in one world of PettingZoo, all with the same policy (shared parameters).

    python -m recipes.many_agents

The script sees each agent as an environment of its own. In 40,960 steps of the task below (half a
minute on a CPU core, seed 1) the return of an agent rises from -21 to -14. An agent that ends early
waits until all have ended: it sees zeros, gets no rewards, and these steps are learned from, too.
`evaluate` plays one environment, but a member cannot play alone: to see the agents act, call
`load_policy` for each.
"""

import functools

import gymnasium as gym
import numpy as np

import ppo_continuous_action as ppo


class Member(gym.Env):
    """What one agent sees and does. The members of a world step together, and begin together."""

    def __init__(self, world, name: str) -> None:
        self.world, self.name = world, name
        self.observation_space = world.observation_space(name)
        self.action_space = gym.spaces.Box(-1, 1, world.action_space(name).shape)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if self.name == self.world.possible_agents[0]:  # the others join its new episode
            self.world.first_obs, _ = self.world.reset(seed=seed)
        return self.world.first_obs[self.name], {}

    def step(self, action: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, _ = self.world.results
        if self.name in obs:
            self.ends = terminated[self.name], truncated[self.name]
            last_obs, reward = obs[self.name], rewards[self.name]
        else:  # it has ended earlier
            last_obs, reward = np.zeros_like(self.world.first_obs[self.name]), 0.0
        all_ended = not self.world.agents
        return last_obs, reward, self.ends[0] and all_ended, self.ends[1] and all_ended, {}


def step_world(envs: list[ppo.Recorder], actions: np.ndarray) -> list[tuple]:
    """Step the world with the actions of all its members, then let each read its results."""
    world = envs[0].unwrapped.world
    from_0_to_1 = dict(zip(world.possible_agents, (actions + 1) / 2))
    world.results = world.step({name: from_0_to_1[name] for name in world.agents})
    return [env.step(action) for env, action in zip(envs, actions)]


train = functools.partial(ppo.train, step_envs=step_world)


def members() -> ppo.EnvFactory:
    """An `env_factory` that returns the members of one world, one after another."""
    try:
        from mpe2 import simple_spread_v3
    except ImportError as error:
        raise ppo.UsageError(f"{error}: pip install mpe2==1.1.1 pettingzoo==1.27.0") from error
    world = simple_spread_v3.parallel_env(N=2, max_cycles=25, continuous_actions=True)
    return map(Member, [world] * 2, world.possible_agents).__next__


SETTINGS = ppo.Args(
    total_timesteps=40_960,
    num_envs=2,
    num_steps=512,
    num_minibatches=8,
    learning_rate=1e-3,
    gamma=0.9,
)

if __name__ == "__main__":
    with ppo.command_line():
        episodes = train(SETTINGS, members())["episodes"]
    print(f"Return {np.mean([x['return'] for x in episodes[-100:]]):.2f} in the last 100 episodes")
