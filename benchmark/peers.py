"""Stable-Baselines3's PPOs with the settings of our scripts, for `benchmark.throughput`.

Writes a line with the step per iteration to --progress. Its threads are those of the environment
variable OMP_NUM_THREADS, which `benchmark.throughput` sets.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import ale_py  # noqa: F401  registers the Atari games
import gymnasium as gym
import torch
import tyro
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize


@dataclasses.dataclass
class Args:
    progress: Path  # file to write
    env_id: str  # Gymnasium environment
    total_timesteps: int  # environment steps over all environments
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


def make_envs(args: Args) -> VecEnv:
    """The same environments as in our script, without gymnasium's checker, as there."""
    if args.kind.startswith("atari"):
        envs = make_atari_env(args.env_id, args.num_envs, seed=args.seed)
        return VecFrameStack(envs, 4) if args.kind == "atari" else envs

    def make() -> gym.Env:
        return Monitor(gym.make(args.env_id, disable_env_checker=True))

    envs = DummyVecEnv([make] * args.num_envs)
    return VecNormalize(envs, gamma=0.99) if args.kind == "mujoco" else envs


def policy_settings(kind: str) -> dict[str, Any]:
    """The networks of our scripts, as Stable-Baselines3 names them."""
    if kind == "atari":
        return {"policy": "CnnPolicy"}
    if kind == "atari-lstm":
        # One LSTM of 128 units, which policy and value function share.
        lstm = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
        return {"policy": "CnnLstmPolicy", "policy_kwargs": lstm}
    # Two hidden layers of 64 tanh units, apart for policy and value function.
    layers = {"pi": [64, 64], "vf": [64, 64]}
    return {
        "policy": "MlpPolicy",
        "policy_kwargs": {"net_arch": layers, "activation_fn": torch.nn.Tanh},
    }


class Progress(BaseCallback):
    """Appends the step after each update; the first call comes before the first rollout."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def _on_rollout_start(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{self.num_timesteps}\n")

    _on_training_end = _on_rollout_start

    def _on_step(self) -> bool:
        return True


def main() -> None:
    """Train, and write how far it is."""
    args = tyro.cli(Args)
    algorithm = RecurrentPPO if args.kind == "atari-lstm" else PPO
    model = algorithm(
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
        **policy_settings(args.kind),
    )
    model.learn(args.total_timesteps, callback=Progress(args.progress))


if __name__ == "__main__":
    main()
