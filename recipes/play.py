"""Plays a trained policy of ppo_vector_env.py: on the screen, or as a film where there is none.

    python -m recipes.play runs/NAME

What your `make` returns needs `render`: with `render_mode="human"`, which `make` may take as an
argument, it shows a window; other modes return pictures, of each environment or of all at once.
Without a GPU, MuJoCo draws a few frames per second: `--steps 200` is a short film.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import ppo_vector_env as ppo


def has_screen() -> bool:
    return sys.platform != "linux" or bool(os.getenv("DISPLAY") or os.getenv("WAYLAND_DISPLAY"))


def play(run_dir: str | Path, steps: int = 1000, screen: bool = False, make: Any = None) -> None:
    """Play so many steps in a single environment, in a window or into runs/NAME/videos."""
    if not screen:
        ppo.evaluate(run_dir, 1, video=True, make=make, video_length=steps)
        return
    saved = ppo.load_checkpoint(run_dir)
    with ExitStack() as resources, torch.no_grad():
        sim = ppo.make_simulator(resources, saved["args"], 1, 0, make, render_mode="human")
        ppo.check_saved(sim, saved["args"], saved)
        agent = saved["agent"].to(sim.device)
        for _ in range(steps):
            sim.envs.render()
            sim.step(agent(sim.obs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m recipes.play")
    parser.add_argument("run_dir", type=Path, help="the folder of a run")
    parser.add_argument("--steps", type=int, default=1000, help="how many at most")
    options = parser.parse_args()
    try:
        play(options.run_dir, options.steps, has_screen())
    except ppo.UsageError as error:
        parser.error(str(error))
