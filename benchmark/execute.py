"""Makes the missing runs of a suite, here or on a Ray cluster, and keeps their results."""

import contextlib
import os
from collections.abc import Iterator

from benchmark import results
from benchmark.definitions import Folders, Suite
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.run import Run, lock, make, say, source

LOST_NODES = 5  # that one run survives on Ray; each costs it what follows its last checkpoint


def run_suite(
    suite: Suite, runs: list[Run], folders: Folders, commit: str, workers: int | None
) -> int:
    """Make those of some runs of a suite that are missing; returns how many failed.

    Args:
        workers: runs at a time on this machine; None for a Ray cluster.

    Raises:
        BenchmarkError: the commit lacks a script, or somebody else runs the suite.
    """
    for run in runs:  # what the commit lacks is to be said before anything is begun
        source(suite.variants[run.variant], commit)
    with lock(folders.runs / suite.name / "lock") as ours:
        if not ours:
            raise BenchmarkError(f"{suite.name} is being run, or its scripts outlive a killed run.")
        results.collect(suite, folders)  # what a killed benchmark has left
        done, failed = results.done(suite.name, folders), 0
        missing = [run for run in runs if run.key not in done]
        say(f"{len(runs)} runs, {len(runs) - len(missing)} of them done before.")
        made = make(missing, commit, workers) if workers else make_on_ray(missing, commit)
        with contextlib.closing(made):  # stops the scripts if this is stopped
            for run, error in made:
                results.collect(suite, folders)
                failed += bool(error)
                say(f"{run.name} {error or 'done'}")
        say(f"{len(runs) - failed} of {len(runs)} runs done.")
    return failed


def make_on_ray(runs: list[Run], commit: str) -> Iterator[tuple[Run, str]]:
    """`make` on the Ray cluster of RAY_ADDRESS or of this machine, one run per processor core.

    If a node is lost, Ray starts its runs again on another, where they continue.

    Raises:
        BenchmarkError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise BenchmarkError("--cluster ray needs Ray: pip install ray.") from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    package = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # the nodes share this folder
    try:
        ray.init(address=address, runtime_env=package, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:  # none, not reached, no address
        raise BenchmarkError(f"There is no Ray cluster at {address}: see ray start.") from error
    task = ray.remote(num_cpus=1, max_retries=LOST_NODES, scheduling_strategy="SPREAD")(
        lambda run: next(make([run], commit, workers=1))[1]
    )
    waiting = {task.remote(run): run for run in runs}
    try:
        while waiting:
            (ended, *_), _ = ray.wait([*waiting])
            try:
                error = ray.get(ended)
            except ray.exceptions.RayError as reason:  # it has many lines
                error = str(reason).splitlines()[-1]
            yield waiting.pop(ended), error
    finally:
        ray.shutdown()  # ends the scripts too
