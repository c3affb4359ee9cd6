"""A run of ppo_minimal.py that leaves a checkpoint like those of the other scripts, at its end."""

import dataclasses
from pathlib import Path

import torch
import tyro

import ppo_minimal


@dataclasses.dataclass
class Args(ppo_minimal.Args):
    run_name: str = "run"  # logs and checkpoint are in runs/RUN_NAME
    resume: Path | None = None  # a run that has a checkpoint is over


def main() -> None:
    """Train and save what happened."""
    args = tyro.cli(Args)
    if args.resume:
        return
    results = ppo_minimal.train(args)
    folder = Path("runs", args.run_name)
    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: results[name] for name in ("episodes", "updates")}
    torch.save({"args": dataclasses.asdict(args), **saved}, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
