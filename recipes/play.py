"""Plays a trained policy of ppo_vector_env.py: on the screen, or as a film where there is none.

    python -m recipes.play runs/NAME

A window is for Gymnasium's simulators, and for one of your own whose `make` takes
`render_mode="human"` and gives it to what it returns. Others, as EnvPool's, are filmed: their
`render` returns pictures, of each environment or of all at once. Without a GPU, MuJoCo draws a few
frames per second: `--steps 200` is a short film.
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


def play(
    run_dir: str | Path,
    steps: int = 1000,
    screen: bool = False,
    make: Any = None,
    agent_class: type[ppo.Agent] = ppo.Agent,
) -> None:
    """Play so many steps in a single environment, in a window or into runs/NAME/videos."""
    if not screen or not in_window(run_dir, steps, make, agent_class):
        film = {"video": True, "video_length": steps}
        ppo.evaluate(run_dir, 1, make=make, agent_class=agent_class, **film)


def in_window(run_dir: str | Path, steps: int, make: Any, agent_class: type[ppo.Agent]) -> bool:
    """Play in a window; returns False if the simulator has none."""
    saved = ppo.load_checkpoint(run_dir, agent_class)
    args = saved["args"]
    if args.backend == "envpool" and not (make or args.make):
        return False
    with ExitStack() as resources, torch.no_grad():
        sim = ppo.make_simulator(resources, args, 1, 0, make, render_mode="human")
        if getattr(sim.envs, "render_mode", None) != "human":
            return False
        ppo.check_saved(sim, args, saved)
        agent = saved["agent"].to(sim.device)
        for _ in range(steps):
            sim.envs.render()
            sim.step(agent(sim.obs))
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m recipes.play")
    parser.add_argument("run_dir", type=Path, help="the folder of a run")
    parser.add_argument("--steps", type=int, default=1000, help="how many at most")
    options = parser.parse_args()
    try:
        play(options.run_dir, options.steps, has_screen())
    except ppo.UsageError as error:
        parser.error(str(error))
