"""How fast trained agents walk: returns do not say it, since standing may earn as much.

    python -m benchmark.walking FILM.mp4 PICTURE.png START

puts frames of a film of `--evaluate RUN --capture-video` side by side, from START seconds on.
"""

import importlib.util
import sys
from pathlib import Path

import gymnasium as gym
import moviepy
import numpy as np
from PIL import Image

FRAMES, SECONDS_BETWEEN = 8, 0.1


class Speedometer(gym.Wrapper):
    """Notes the forward speed of each step, in m/s, in a list per episode."""

    def __init__(self, env: gym.Env, speeds: list[list[float]]) -> None:
        super().__init__(env)
        self.speeds = speeds

    def reset(self, **kwargs):
        self.speeds.append([])
        return self.env.reset(**kwargs)

    def step(self, action):
        step = self.env.step(action)
        self.speeds[-1].append(step[-1]["x_velocity"])
        return step


def walk(script: Path, run_dir: Path) -> dict[str, list[float]]:
    """Play the ten episodes of the script's `--evaluate` with the mean action.

    Returns:
        For each episode its return, its length in steps and its mean speed in m/s.
    """
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module, speeds = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(module)
    make_env = module.make_env
    module.make_env = lambda args: Speedometer(make_env(args), speeds)
    returns = module.evaluate(module.Args(evaluate=str(run_dir)))["mean"]
    episodes = [x for x in speeds if x][: len(returns)]  # those with sampled actions come second
    return {
        "returns": [round(x, 3) for x in returns],
        "lengths": [len(x) for x in episodes],
        "speeds": [round(float(np.mean(x)), 4) for x in episodes],
    }


def strip(film: Path, picture: Path, start: float) -> None:
    """Put the lower middles of the frames, where the camera holds the body, side by side."""
    with moviepy.VideoFileClip(str(film)) as clip:
        frames = [clip.get_frame(start + k * SECONDS_BETWEEN) for k in range(FRAMES)]
    height, width, _ = frames[0].shape
    parts = [x[height * 3 // 8 :, width // 4 : -width // 4] for x in frames]
    Image.fromarray(np.hstack(parts)).quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    strip(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
