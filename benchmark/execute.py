"""Makes the missing runs of a suite, here or on a Ray cluster, and keeps their results.

Several benchmarks may work on a suite: a run that somebody else holds is left to them.
"""

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable

from benchmark import results
from benchmark.definitions import Folders, Suite
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.run import Run, is_locked, run_one, say

LOST_NODES = 5  # that one run survives on Ray; each costs it what follows its last checkpoint


def state(run: Run) -> str:
    """One of done, running, interrupted, waiting."""
    if run.result.exists() or run.key in results.done(run.suite.name, run.folders):
        return "done"
    if is_locked(run):
        return "running"
    return "interrupted" if run.checkpoint.exists() else "waiting"


def run_all(
    suite: Suite,
    runs: list[Run],
    folders: Folders,
    submit: Callable[[Run], concurrent.futures.Future],
) -> int:
    """Hand all missing runs to `submit`, keep their results; returns how many failed."""
    results.collect(suite, folders)  # those of runs whose benchmark was killed meanwhile
    records, failed = results.done(suite.name, folders), 0
    pending = {submit(run): run for run in runs if run.key not in records}
    say(f"{len(runs)} runs, {len(runs) - len(pending)} of them done before.")
    for future in concurrent.futures.as_completed(pending):
        error = future.exception()  # Ray's has many lines
        ended = (str(error).splitlines() or [repr(error)])[-1] if error else future.result()
        failed += error is not None
        results.collect(suite, folders)
        say(f"{pending[future].name} {ended}")
    made = sum(run.key in results.done(suite.name, folders) for run in runs)
    say(f"{made} of {len(runs)} runs done.")
    return failed


def run_local(suite: Suite, runs: list[Run], folders: Folders, commit: str, workers: int) -> int:
    """Make so many runs at a time; a KeyboardInterrupt ends when all have been stopped."""
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            submit = functools.partial(pool.submit, run_one, commit=commit, stop=stop)
            return run_all(suite, runs, folders, submit)
        except BaseException:
            stop.set()  # else the pool would wait for the ends of all runs
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_ray(suite: Suite, runs: list[Run], folders: Folders, commit: str) -> int:
    """Make runs on the Ray cluster of RAY_ADDRESS or of this machine, one per processor core.

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
        raise BenchmarkError(
            f"There is no Ray cluster at {address}: start one with ray start --head."
        ) from error
    options = {"num_cpus": 1, "max_retries": LOST_NODES, "scheduling_strategy": "SPREAD"}
    task, references = ray.remote(**options)(run_one), []

    def submit(run: Run) -> concurrent.futures.Future:
        references.append(task.remote(run, commit))
        return references[-1].future()

    try:
        return run_all(suite, runs, folders, submit)
    except KeyboardInterrupt:
        for reference in references:
            ray.cancel(reference)  # a KeyboardInterrupt in `run_one`
        ray.wait(references, num_returns=len(references))
        raise
    finally:
        ray.shutdown()
