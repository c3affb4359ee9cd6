"""EnvPool alone: random actions and no learning, the most that any script can reach there."""

import dataclasses
import time
from pathlib import Path

import envpool
import numpy as np
import torch
import tyro


@dataclasses.dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # environment of EnvPool
    total_timesteps: int = 1_000_000  # steps of all environments
    num_envs: int = 64  # stepped together
    num_steps: int = 64  # steps per environment and iteration
    seed: int = 1  # random seed
    run_name: str = "run"  # the checkpoint is in runs/RUN_NAME


def main() -> None:
    args = tyro.cli(Args)
    options = {"num_envs": args.num_envs, "seed": args.seed}
    envs = envpool.make(args.env_id, env_type="gymnasium", **options)
    envs.reset()
    rng = np.random.default_rng(args.seed)
    iteration_steps, updates = args.num_envs * args.num_steps, []
    for iteration in range(1, args.total_timesteps // iteration_steps + 1):
        shape = (args.num_steps, args.num_envs, *envs.action_space.shape)
        actions = rng.uniform(-1, 1, shape)
        start_time = time.perf_counter()
        for step in range(args.num_steps):
            envs.step(actions[step])
        rate = iteration_steps / (time.perf_counter() - start_time)
        updates.append({"global_step": iteration * iteration_steps, "charts/SPS": rate})
    folder = Path("runs", args.run_name)
    folder.mkdir(parents=True)
    torch.save({"updates": updates}, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
