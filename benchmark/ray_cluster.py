"""Runs a suite on a Ray cluster whose nodes share this folder (optional: `pip install ray`).

Each run is a Ray task that calls the benchmark's own command line for that one run. If a node is
lost, Ray starts the task again on another one, where the run continues from its last checkpoint.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.provenance import BenchmarkError
from benchmark.runs import Run, read_note, single_command

ENTRY = [sys.executable, "-m", "benchmark"]
LOST_NODES = 5  # that one run survives; each costs it what follows its last checkpoint


def make(arguments: list[str], folder: Path) -> int:
    """Run a command on a node and return its exit code; cancelled, let it save and end."""
    process = subprocess.Popen(
        arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        return process.wait()


def connect() -> Any:
    """The module ray, connected to the cluster of RAY_ADDRESS or of this machine.

    Raises:
        BenchmarkError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise BenchmarkError("--cluster ray needs Ray: pip install ray.") from error
    try:
        address = os.environ.get("RAY_ADDRESS", "auto")
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:  # none, not reached, no address
        raise BenchmarkError(
            f"There is no Ray cluster at {address}: start one with ray start --head."
        ) from error
    # Workers receive `make` itself, as this package need not be on their path.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray


def run_on_ray(runs: list[Run], commit: str) -> dict[str, str]:
    """Make the missing runs on a cluster; return the error of each that failed, by name."""
    ray = connect()
    missing = [run for run in runs if not run.result.exists()]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} of them done before.", flush=True)
    remote = ray.remote(num_cpus=1, max_retries=LOST_NODES, scheduling_strategy="SPREAD")(make)
    pending = {
        remote.remote([*ENTRY, *single_command(run, commit)], Path.cwd()): run for run in missing
    }
    bar = tqdm(
        total=sum(run.total_timesteps for run in missing),
        unit="step",
        unit_scale=True,
        disable=None,
    )
    failed = {}
    try:
        while pending:
            ended, _ = ray.wait(list(pending), timeout=1)
            for reference in ended:
                run = pending.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    failed[run.name] = str(error).strip().splitlines()[-1]
                if not run.result.exists():
                    failed.setdefault(run.name, read_note(run).get("error", "stopped"))
                outcome = failed.get(run.name, "done")
                tqdm.write(f"{run.name}: {outcome}", file=sys.stdout)
                sys.stdout.flush()
            done = sum(run.total_timesteps for run in missing if run.result.exists())
            bar.n = done + sum(run.last_step() for run in pending.values())
            bar.refresh()
    except KeyboardInterrupt:
        for reference in pending:
            ray.cancel(reference)
        ray.wait(list(pending), num_returns=len(pending))
        raise
    finally:
        bar.close()
        ray.shutdown()
    return failed
