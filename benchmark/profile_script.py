"""Where the time of a script goes: `python -m benchmark.profile_script SCRIPT --physics NAME ...`

Further arguments are the script's own. Prints one JSON object: microseconds per environment step.
A timer costs 0.3 microseconds per call and is called three times per step. The first iteration,
which compiles, is left out.
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

import numpy as np
import tyro


class Stopwatch:
    """Total seconds spent in wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable) -> Callable:
        """The function with a timer around it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed

    def wrap(self, owner: Any, name: str) -> None:
        """Replace the attribute `name` of a module or class by itself with a timer around it."""
        setattr(owner, name, self.timed(getattr(owner, name)))


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
        script: file with `Args`, `Environments`, `in_numpy`, `train`, and `warn`, which it calls
            once per iteration.
        physics: `module:Class.method` that advances the simulation.
        arguments: command line of the script.
    """
    module = load(script)
    simulating, stepping, acting = Stopwatch(), Stopwatch(), Stopwatch()
    readings = []  # clock and stopwatches after the update of each iteration
    warn = module.warn

    def read(updates: list[dict[str, float]]) -> None:
        seconds = (x.seconds for x in (simulating, stepping, acting))
        readings.append((time.perf_counter(), *seconds))
        warn(updates)

    module.warn = read
    module_name, names = physics.split(":")
    class_name, method = names.split(".")
    simulating.wrap(getattr(importlib.import_module(module_name), class_name), method)
    stepping.wrap(module.Environments, "step")
    in_numpy = module.in_numpy
    module.in_numpy = lambda network: acting.timed(in_numpy(network))
    updates = module.train(tyro.cli(module.Args, args=arguments))["updates"]

    whole, physics_alone, step, act = np.subtract(readings[-1], readings[0])
    steps = updates[-1]["global_step"] - updates[0]["global_step"]
    batch = steps / len(updates[1:])
    rollout = sum(batch / x["charts/SPS_rollout"] for x in updates[1:])
    update = sum(batch / x["charts/SPS_update"] for x in updates[1:])
    seconds = {
        "physics": physics_alone,
        "rest of the environments": step - physics_alone,
        "acting": act,
        "storing and normalizing": rollout - step - act,
        "advantages and update": update,
        "logging and saving": whole - rollout - update,
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
