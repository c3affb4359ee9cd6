"""Plays games with random actions through the environments of `ppo_atari.py`.

Writes one row (global_step) per rollout to --progress, for `benchmark.throughput`.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

import ppo_atari

NUM_STEPS = 128  # of a rollout


@dataclasses.dataclass
class Args:
    progress: Path
    """CSV file to write."""
    env_backend: Literal["gymnasium", "ale"] = "gymnasium"
    """As in the script."""
    async_envs: bool = False
    """As in the script."""
    env_id: str = "Pong"
    """Game."""
    num_envs: int = 8
    """Parallel games."""
    total_timesteps: int = 1_000_000
    """Steps over all games."""


def main() -> None:
    """Play, and write how far it is."""
    args = tyro.cli(Args)
    settings = {k: v for k, v in vars(args).items() if k != "progress"}
    rng = np.random.default_rng(0)
    with contextlib.closing(ppo_atari.make_envs(ppo_atari.Args(**settings))) as envs:
        envs.reset(seed=list(range(args.num_envs)))
        args.progress.write_text("global_step\n")
        for step in range(1, args.total_timesteps // args.num_envs + 1):
            envs.step(rng.integers(envs.single_action_space.n, size=args.num_envs))
            if step % NUM_STEPS == 0:
                with args.progress.open("a") as file:
                    file.write(f"{step * args.num_envs}\n")


if __name__ == "__main__":
    main()
