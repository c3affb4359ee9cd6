"""ppo_atari.py with other ways to step its games, to measure what each of them costs.

    python atari_stepping.py --stepping envpool --workers 2 --env-id Pong

EnvPool steps games in threads of C++, as in CleanRL's ppo_atari_envpool.py. It is not in
requirements.txt: `pip install envpool==1.2.5`. Its preprocessing is not that of ppo2, so scores
differ. With --no-learn the policy acts but is not updated, which leaves the time of the rollouts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import tyro

import ppo_atari


@dataclasses.dataclass(frozen=True)
class Args(ppo_atari.Args):
    stepping: Literal["games", "envpool"] = "games"  # games: as in ppo_atari.py
    workers: int = 1  # processes of ppo_atari.py that play, or threads of EnvPool
    learn: bool = True  # update the policy


class Pool:
    """EnvPool's games with the methods of `ppo_atari.Games`."""

    def __init__(self, _: Any, args: Args) -> None:
        import envpool

        life = {"episodic_life": True, "reward_clip": True, "use_fire_reset": True}
        size = {"num_envs": args.num_envs, "num_threads": args.workers, "seed": args.seed}
        self.envs = envpool.make(f"{args.env_id}-v5", env_type="gymnasium", **size, **life)
        self.num_actions = self.envs.action_space.n.item()
        self.obs = self.envs.reset()[0].copy()

    def call(self, method: str, arguments: dict[int, Any]) -> list:
        """Step all games. EnvPool begins lives and games by itself, in the step after their end."""
        if method != "step":
            return [[] for _ in arguments]
        obs, rewards, terminated, truncated, _ = self.envs.step(np.array([*arguments.values()]))
        self.obs[:] = obs
        return [*zip(rewards.tolist(), terminated, truncated, terminated | truncated)]


def no_update(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
    """What `ppo_atari.ppo_update` would return, but without any work."""
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm")
    return {f"losses/{name}": torch.zeros(()) for name in names}


if __name__ == "__main__":
    args = tyro.cli(Args)
    ppo_atari.GAME_PROCESSES = args.workers
    if args.stepping == "envpool":
        ppo_atari.Games = Pool
    update: Callable = ppo_atari.ppo_update if args.learn else no_update
    ppo_atari.train(args, update=update)
