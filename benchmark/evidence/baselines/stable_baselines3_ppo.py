"""Stable-Baselines3's PPOs with the settings of our scripts, for runs and for throughput.

Such a run leaves a checkpoint like those of our scripts, but only at its end: SB3 cannot continue
exactly, so an interrupted run starts again. Threads are those of the variable OMP_NUM_THREADS.
"""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import ale_py  # noqa: F401  registers the Atari games
import torch
import tyro
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize


@dataclasses.dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # Gymnasium environment, or a game's name
    total_timesteps: int = 1_000_000  # environment steps over all environments
    # Preprocessing and network: normalized or plain vectors, stacked frames, frames and LSTM.
    kind: Literal["mujoco", "classic", "atari", "atari-lstm"] = "mujoco"
    num_envs: int = 1  # parallel environments
    num_steps: int = 2048  # steps per environment and iteration
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over each batch
    learning_rate: float = 3e-4  # step size, annealed linearly to 0
    clip_coef: float = 0.2  # clip range of ratio and value
    ent_coef: float = 0.0  # weight of the entropy bonus
    seed: int = 1  # random seed
    run_name: str = "run"  # logs and checkpoint are in runs/RUN_NAME
    resume: Path | None = None  # a run that has a checkpoint is over


def make_envs(args: Args) -> VecEnv:
    """The same environments as in our script, without gymnasium's checker, as there."""
    if args.kind.startswith("atari"):
        game = args.env_id.removesuffix("NoFrameskip-v4")
        envs = make_atari_env(f"{game}NoFrameskip-v4", args.num_envs, seed=args.seed)
        return VecFrameStack(envs, 4) if args.kind == "atari" else envs
    envs = make_vec_env(args.env_id, args.num_envs, env_kwargs={"disable_env_checker": True})
    return VecNormalize(envs, gamma=0.99) if args.kind == "mujoco" else envs


METRICS = {x: x for x in ("approx_kl", "explained_variance")} | {"clip_fraction": "clipfrac"}


class Record(BaseCallback):
    """Episodes and iterations as our scripts save them."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: list[dict[str, float]] = []
        self.updates: list[dict[str, float]] = []

    def _on_step(self) -> bool:
        ended = (x["episode"] for x in self.locals["infos"] if "episode" in x)
        at = {"global_step": self.num_timesteps}
        self.episodes += [{**at, "return": x["r"], "length": x["l"]} for x in ended]
        return True

    def _on_rollout_start(self) -> None:
        self._on_training_end()  # of the last iteration
        self.start = time.perf_counter()

    def _on_training_end(self) -> None:
        if not self.num_timesteps:
            return
        steps, seconds = self.model.n_steps * self.model.n_envs, time.perf_counter() - self.start
        made = {"global_step": self.num_timesteps, "charts/SPS": steps / seconds}
        for theirs, ours in METRICS.items():
            made[f"losses/{ours}"] = float(self.logger.name_to_value[f"train/{theirs}"])
        self.updates.append(made)


# The networks of our scripts: two hidden layers of 64 tanh units, apart for policy and value
# function; the shared Nature CNN; the same with an LSTM of 128 units, which both share.
LAYERS = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
LSTM = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
POLICIES = dict.fromkeys(("mujoco", "classic"), ("MlpPolicy", LAYERS))
POLICIES |= {"atari": ("CnnPolicy", {}), "atari-lstm": ("CnnLstmPolicy", LSTM)}


def main() -> None:
    """Train, log how far it is, and save what happened."""
    args, record = tyro.cli(Args), Record()
    if args.resume:
        return
    policy, policy_settings = POLICIES[args.kind]
    algorithm = RecurrentPPO if args.kind == "atari-lstm" else PPO
    model = algorithm(
        policy,
        env=make_envs(args),
        learning_rate=lambda remaining: remaining * args.learning_rate,
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=0.25,  # SB3's value loss lacks the factor 1/2
        max_grad_norm=0.5,
        seed=args.seed,
        device="cpu",
        policy_kwargs=policy_settings,
    )
    # SB3 seeds environment i with seed + i, which the next run's environment i - 1 would have, too.
    model.env.seed(args.seed * args.num_envs)
    folder = Path("runs", args.run_name)
    model.set_logger(configure(str(folder), ["tensorboard"]))
    model.learn(args.total_timesteps, callback=record)
    saved = {"episodes": record.episodes, "updates": record.updates}
    torch.save({"args": dataclasses.asdict(args), **saved}, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
