"""rsl_rl's PPO on environments of EnvPool (pip install rsl-rl-lib==5.5.1), for runs and for speed.

By default with settings as rsl_rl's users choose them: the step size follows the KL, and rewards
are not scaled. `--schedule fixed` leaves it as it is, which takes less time. Such a run leaves a
checkpoint like those of our scripts, but only at its end: an interrupted run starts again.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any, Literal

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
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 5  # passes over each batch
    learning_rate: float = 1e-3  # step size, at first
    schedule: Literal["adaptive", "fixed"] = "adaptive"  # of the step size
    hidden: tuple[int, ...] = (256, 128)  # units in each hidden layer
    activation: Literal["elu", "tanh"] = "elu"  # of hidden layers
    init_std: float = 1.0  # standard deviation of actions at first
    max_grad_norm: float = 1.0  # maximum norm of each network's gradient
    vf_coef: float = 1.0  # weight of the value loss (a squared error)
    seed: int = 1  # random seed
    run_name: str = "run"  # the checkpoint is in runs/RUN_NAME
    resume: Path | None = None  # a run that has a checkpoint is over


class Environments:
    """EnvPool as rsl_rl's VecEnv: an environment that ends is reset in the same step."""

    def __init__(self, args: Args) -> None:
        # EnvPool seeds environment i with seed + i, which no other run may have.
        seed = args.seed * args.num_envs
        options = {"env_type": "gymnasium", "num_envs": args.num_envs, "seed": seed}
        # The cores that this process may use, as in our script.
        options["num_threads"] = min(args.num_envs, len(os.sched_getaffinity(0)))
        self.envs = envpool.make(args.env_id, **options)
        self.num_envs, self.num_actions = args.num_envs, self.envs.action_space.shape[0]
        self.device, self.cfg, self.max_episode_length = "cpu", {}, 1000
        self.episode_length_buf = torch.zeros(args.num_envs, dtype=torch.long)
        self.obs = self.envs.reset()[0]

    def get_observations(self) -> Any:
        from tensordict import TensorDict  # comes with rsl_rl

        obs = torch.as_tensor(self.obs, dtype=torch.float32)
        return TensorDict({"policy": obs}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, dict]:
        low, high = self.envs.action_space.low, self.envs.action_space.high
        clipped = actions.numpy().clip(low, high).astype(self.envs.action_space.dtype)
        self.obs, rewards, terminated, truncated, _ = self.envs.step(clipped)
        ended = np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(ended):
            self.obs[ended] = self.envs.reset(ended)[0]
        dones = torch.as_tensor(terminated | truncated).long()
        time_outs = torch.as_tensor(truncated & ~terminated)
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        return self.get_observations(), rewards, dones, {"time_outs": time_outs}


class Record:
    """Episodes and iterations as our scripts save them, in place of rsl_rl's log."""

    writer = None  # of files, which rsl_rl then leaves out

    def __init__(self, args: Args) -> None:
        self.args, self.step = args, 0
        self.episodes: list[dict[str, float]] = []
        self.updates: list[dict[str, float]] = []
        self.returns, self.lengths = torch.zeros(2, args.num_envs)

    def init_logging_writer(self) -> None:
        self.start_time = time.perf_counter()

    def process_env_step(self, rewards: torch.Tensor, dones: torch.Tensor, *_: Any) -> None:
        self.step += self.args.num_envs
        self.returns += rewards
        self.lengths += 1
        for total, length in torch.stack([self.returns, self.lengths], 1)[dones > 0].tolist():
            ended = {"return": total, "length": int(length)}
            self.episodes.append({"global_step": self.step, **ended})
        self.returns *= dones == 0
        self.lengths *= dones == 0

    def log(self, **about: Any) -> None:
        seconds = time.perf_counter() - self.start_time
        rate = self.args.num_envs * self.args.num_steps / seconds
        losses = {"losses/entropy": about["loss_dict"]["entropy"]}
        self.updates.append({"global_step": self.step, "charts/SPS": rate, **losses})
        self.start_time = time.perf_counter()


def settings(args: Args) -> dict[str, Any]:
    """What rsl_rl calls these settings."""
    network: dict[str, Any] = {"class_name": "MLPModel", "obs_normalization": True}
    network |= {"hidden_dims": [*args.hidden], "activation": args.activation}
    policy = {"class_name": "GaussianDistribution", "init_std": args.init_std}
    return {
        "num_steps_per_env": args.num_steps,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": network | {"distribution_cfg": policy},
        "critic": network,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": args.update_epochs,
            "num_mini_batches": args.num_minibatches,
            "entropy_coef": 0.0,
            "learning_rate": args.learning_rate,
            "schedule": args.schedule,
            "max_grad_norm": args.max_grad_norm,
            "value_loss_coef": args.vf_coef,
        },
    }


def main() -> None:
    """Train, and save what happened."""
    args = tyro.cli(Args)
    if args.resume:
        return
    from rsl_rl.runners import OnPolicyRunner  # which its settings can be read without

    torch.set_num_threads(1)  # more would fight with the simulator's threads
    torch.manual_seed(args.seed)
    runner = OnPolicyRunner(Environments(args), settings(args))
    runner.logger = record = Record(args)
    runner.learn(args.total_timesteps // (args.num_envs * args.num_steps))
    folder = Path("runs", args.run_name)
    folder.mkdir(parents=True)
    saved = {"episodes": record.episodes, "updates": record.updates}
    torch.save({"args": dataclasses.asdict(args), **saved}, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
