"""When a run of Enduro finds its first reward, by the number of environments.

    python -m benchmark.evidence.first_reward 32 1 runs/32-1.jsonl  # environments, seed, file

Settings are those of ppo2, whose learning rate falls over 10M steps. A line of JSON per iteration;
the run ends after the iteration that has a reward.
"""

import contextlib
import json
import sys
import types
from pathlib import Path

import torch
import tyro

from benchmark.lab.provenance import ROOT

ANNEALED_OVER = 10_000_000  # steps
RATE = '            "charts/learning_rate": learning_rate,\n'
SEEN = "            **seen(batch_rewards, actions, advantages),\n"


class Found(Exception):
    """The first reward, or the last step."""


def seen(rewards: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor) -> dict:
    """What a rollout had, (T, N). The accelerator is held in FIRE, RIGHTFIRE and LEFTFIRE."""
    held = torch.isin(actions, torch.tensor([1, 7, 8])).float()
    return {
        "rewards": (rewards > 0).sum(),
        "losses": (rewards < 0).sum(),
        "with_fire": held.mean(),
        "advantage_std": advantages.std(),
    }


def main(
    num_envs: int, seed: int, path: Path, /, steps: int = 200_704, anneal_clip: bool = False
) -> None:
    """Train until the first reward, or for so many steps."""
    text = (ROOT / "ppo_atari.py").read_text()
    assert text.count(RATE) == 1
    module = types.ModuleType("with_notes")
    sys.modules[module.__name__] = module  # where dataclasses look for it
    module.seen = seen
    exec(compile(text.replace(RATE, RATE + SEEN), "with_notes.py", "exec"), module.__dict__)
    args = module.Args(
        env_id="Enduro",
        num_envs=num_envs,
        seed=seed,
        anneal_clip=anneal_clip,
        total_timesteps=ANNEALED_OVER,
        torch_threads=1,
        run_name=f"first-reward-{path.stem}",
    )
    kept = ["rewards", "losses", "with_fire", "advantage_std"]
    kept += ["losses/entropy", "losses/approx_kl", "losses/clipfrac"]

    with path.open("w") as out:

        def note(result: dict) -> None:
            update = result["updates"][-1]
            row = {x: float(f"{update[x]:.4g}") for x in kept}
            out.write(json.dumps({"global_step": update["global_step"]} | row) + "\n")
            out.flush()
            if row["rewards"] or update["global_step"] >= steps:
                raise Found

        with contextlib.suppress(Found):
            module.train(args, on_iteration=note)


if __name__ == "__main__":
    tyro.cli(main)
