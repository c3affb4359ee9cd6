"""Replaces both networks: three layers of 128 with LayerNorm and ReLU, not two of 64 with tanh.

    python -m recipes.bigger_network --env-id Pendulum-v1

We claim no gain: it shows which lines to change for a network of your own. Layers that
`in_numpy` does not know, such as LayerNorm, run in PyTorch when the policy acts, which is slower.
All flags of the script can be set.
"""

import functools

import tyro
from torch import nn

import ppo_continuous_action as ppo


class Agent(ppo.Agent):
    def __init__(self, obs_size: int, action_size: int) -> None:
        super().__init__(obs_size, action_size)

        def network(outputs: int, gain: float) -> list[nn.Module]:
            layers = []
            for inputs in (obs_size, 128, 128):
                layers += [ppo.linear(inputs, 128, gain=2**0.5), nn.LayerNorm(128), nn.ReLU()]
            return [*layers, ppo.linear(128, outputs, gain)]

        self.value = nn.Sequential(*network(1, gain=1.0))
        self.policy = nn.Sequential(*network(action_size, gain=0.01))


train = functools.partial(ppo.train, agent_class=Agent)
load_checkpoint = functools.partial(ppo.load_checkpoint, agent_class=Agent)

SETTINGS = ppo.Args(
    env_id="Pendulum-v1",
    total_timesteps=20_480,
    num_envs=4,
    num_steps=256,
    num_minibatches=16,
    learning_rate=1e-3,
    gamma=0.9,
)

if __name__ == "__main__":
    with ppo.command_line() as flags:
        run_dir = train(tyro.cli(ppo.Args, args=flags, default=SETTINGS))["run_dir"]
        ppo.evaluate(load_checkpoint(run_dir))
