"""What a policy does in a game until it finds its first reward: ours, and Stable-Baselines3's.

    python -m benchmark.evidence.first_reward sb3 1 runs/sb3-1.jsonl

Settings are those of ppo2, whose learning rate falls over 10M steps. A line of JSON per iteration;
the run ends after the iteration that has a reward.
"""

import json
import sys
import types
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from benchmark.evidence.baselines import stable_baselines3_ppo as sb3
from benchmark.lab.provenance import ROOT

ANNEALED_OVER = 10_000_000  # steps
RATE = '            "charts/learning_rate": learning_rate,\n'
SEEN = "            **seen(rewards, actions, advantages, values, agent.policy.out_features),\n"


def seen(
    rewards: np.ndarray, actions: object, advantages: object, values: object, num_actions: int
) -> dict:
    """What a rollout had, (T, N): rewards, how often each action, advantages, and values."""
    actions, advantages, values = map(np.asarray, (actions, advantages, values))
    counts = np.bincount(actions.ravel().astype(int), minlength=num_actions)
    return {
        "rewards": int((rewards > 0).sum()),
        "losses": int((rewards < 0).sum()),
        "actions": counts.tolist(),
        "advantage_std": float(advantages.std()),
        "advantage_max": float(abs(advantages).max()),
        "value_mean": float(values.mean()),
        "value_std": float(values.std()),
    }


class Found(Exception):
    """The first reward, or the last step."""


def write(out: TextIO, row: dict, steps: int) -> None:
    out.write(json.dumps(row) + "\n")
    out.flush()
    if row["rewards"] or row["global_step"] >= steps:
        raise Found


def train_ours(game: str, seed: int, steps: int, bfloat16: bool, out: TextIO) -> None:
    """Run ppo_atari.py with one line more, which notes what its rollouts have."""
    text = (ROOT / "ppo_atari.py").read_text()
    assert text.count(RATE) == 1
    module = types.ModuleType("with_notes")
    sys.modules[module.__name__] = module  # where dataclasses look for it
    latest = {}
    module.seen = lambda *rollout: latest.update(seen(*rollout)) or {}
    exec(compile(text.replace(RATE, RATE + SEEN), "with_notes.py", "exec"), module.__dict__)
    args = module.Args(
        env_id=game,
        seed=seed,
        total_timesteps=ANNEALED_OVER,
        torch_threads=1,
        bfloat16=bfloat16,
        run_name=f"first-reward-{Path(out.name).stem}",
    )

    def note(result: dict) -> None:
        update = result["updates"][-1]
        losses = ("entropy", "approx_kl", "clipfrac", "value_loss")
        row = {"global_step": update["global_step"]} | latest
        write(out, row | {x: update[f"losses/{x}"] for x in losses}, steps)

    module.train(args, on_iteration=note)


class Notes(BaseCallback):
    """The same of SB3."""

    def __init__(self, out: TextIO, steps: int) -> None:
        super().__init__()
        self.out, self.steps, self.row = out, steps, {}

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        r = self.model.rollout_buffer
        rollout = seen(r.rewards, r.actions, r.advantages, r.values, self.model.action_space.n)
        self.row = {"global_step": self.num_timesteps} | rollout

    def _on_rollout_start(self) -> None:
        if not self.row:
            return
        logged = {x: float(y) for x, y in self.logger.name_to_value.items()}
        update = {
            "entropy": -logged["train/entropy_loss"],
            "approx_kl": logged["train/approx_kl"],
            "clipfrac": logged["train/clip_fraction"],
            "value_loss": logged["train/value_loss"] / 2,  # as ours
        }
        write(self.out, self.row | update, self.steps)


def train_sb3(game: str, seed: int, steps: int, out: TextIO) -> None:
    """Run Stable-Baselines3 as in the benchmark."""
    torch.set_num_threads(1)
    envs = sb3.make_envs(sb3.Args(env_id=game, kind="atari", num_envs=8, seed=seed))
    model = PPO(
        "CnnPolicy",
        env=envs,
        learning_rate=lambda remaining: remaining * 2.5e-4,
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        clip_range=0.1,
        clip_range_vf=0.1,
        ent_coef=0.01,
        vf_coef=0.25,  # its value loss lacks the factor 1/2
        seed=seed,
        device="cpu",
    )
    model.learn(ANNEALED_OVER, callback=Notes(out, steps))


def main(
    kind: Literal["float32", "bfloat16", "sb3"],
    seed: int,
    path: Path,
    /,
    game: str = "Enduro",
    steps: int = 100_352,
) -> None:
    """Train until the first reward, or for so many steps."""
    with path.open("w") as out:
        try:
            if kind == "sb3":
                train_sb3(game, seed, steps, out)
            else:
                train_ours(game, seed, steps, kind == "bfloat16", out)
        except Found:
            pass


if __name__ == "__main__":
    tyro.cli(main)
