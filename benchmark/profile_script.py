"""Where the time of a script goes: `python -m benchmark.profile_script SCRIPT --physics NAME ...`

Further arguments are the script's own. Prints one JSON object: microseconds per environment step.
A timer costs 0.3 microseconds per call and is called three times per step.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import tyro


class Stopwatch:
    """Total seconds spent in wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        """Replace the attribute `name` of a module or class by itself with a timer around it."""
        function: Callable = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        setattr(owner, name, timed)


def load(path: Path) -> ModuleType:
    """Import a script by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def breakdown(script: Path, physics: str, arguments: list[str]) -> dict[str, float]:
    """Train and return microseconds per environment step by activity.

    Args:
        script: file with `Args`, `train` and, where it acts in numpy, `numpy_mlp`.
        physics: `module:Class.method` that advances the simulation.
        arguments: command line of the script.
    """
    module = load(script)
    simulating, stepping, acting = Stopwatch(), Stopwatch(), Stopwatch()
    module_name, names = physics.split(":")
    class_name, method = names.split(".")
    simulating.wrap(getattr(importlib.import_module(module_name), class_name), method)
    stepping.wrap(gym.vector.SyncVectorEnv, "step")
    if hasattr(module, "numpy_mlp"):
        acting.wrap(module, "numpy_mlp")
    updates = module.train(tyro.cli(module.Args, args=arguments))["updates"]

    steps = updates[-1]["global_step"]
    batch = steps / len(updates)
    rollout = sum(batch / x["charts/SPS_rollout"] for x in updates)
    update = sum(batch / x["charts/SPS_update"] for x in updates)
    seconds = {
        "physics": simulating.seconds,
        "wrappers and vector environment": stepping.seconds - simulating.seconds,
        "acting": acting.seconds,
        "storing and normalizing": rollout - stepping.seconds - acting.seconds,
        "update": update,
        "logging and saving": steps / updates[-1]["charts/SPS"] - rollout - update,
    }
    return {name: value / steps * 1e6 for name, value in seconds.items()}


def main() -> None:
    """Profile, with the script's own output on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--physics", required=True)
    args, rest = parser.parse_known_args()
    stdout, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(breakdown(args.script, args.physics, rest)), file=stdout)


if __name__ == "__main__":
    main()
