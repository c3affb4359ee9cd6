"""Runs suites of the scripts, and turns their results into tables and figures."""

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from benchmark import execute, results
from benchmark.provenance import BenchmarkError, commit_named, source_at
from benchmark.runs import Folders, read_note, select, suite_named
from benchmark.suites import SUITES

# Tables, plots and throughput are imported where they are needed: scipy, matplotlib and psutil take
# a second each.
app = tyro.extras.SubcommandApp()
Place = Annotated[Folders, tyro.conf.arg(name="")]  # --results and --runs
HERE = Folders()


@app.command
def run(
    suite: Positional[str],
    seeds: tuple[int, ...] = (),
    only: str = "*",
    workers: int | None = None,
    cluster: Literal["local", "ray"] = "local",
    commit: str = "HEAD",
    folders: Place = HERE,
) -> None:
    """Make the missing runs of a suite.

    Args:
        suite: see `list`
        seeds: instead of the suite's own
        only: pattern of names, e.g. Hopper-v4 or '*/seed[12]'
        workers: runs at a time on this machine (2)
        cluster: this machine, or a Ray cluster
        commit: version of the scripts to run
    """
    runs = select(suite, folders, seeds, only)
    if workers is not None and workers < 1:
        raise BenchmarkError("--workers must be positive.")
    if workers and cluster == "ray":
        raise BenchmarkError("--workers is for local runs; a cluster makes one per processor core.")
    commit = commit_named(commit)
    for script in {run.definition.script for run in runs}:
        source_at(commit, script)  # what the commit lacks is to be said before anything is begun
    done = results.done(suite, folders)
    missing = [run for run in runs if run.key not in done]
    if cluster == "ray":
        failed = execute.run_ray(runs, missing, commit)
    else:
        failed = execute.run_local(runs, missing, commit, workers or 2)
    if failed:
        raise BenchmarkError(f"{failed} of {len(runs)} runs failed; their output.txt says why.")


@app.command(name="list")
def list_suites(
    suite: Positional[str | None] = None, only: str = "*", folders: Place = HERE
) -> None:
    """Show the suites, or the runs and command lines of one."""
    if suite is None:
        for name, entry in SUITES.items():
            made, total = results.how_complete(name, folders)
            print(f"{name:<26}{made:>4} of {total:>3} runs done; {entry.reproduces}")
        return
    for run in select(suite, folders, only=only):
        print(f"{run.name:<34} {shlex.join(['python', run.definition.script, *run.flags])}")


@app.command
def status(
    suite: Positional[str],
    seeds: tuple[int, ...] = (),
    only: str = "*",
    folders: Place = HERE,
) -> None:
    """Show how far the runs of a suite are."""
    for run in select(suite, folders, seeds, only):
        state = execute.state(run)
        share = 1.0 if state == "done" else run.progress() / run.total_steps
        error = f"  {read_note(run)['error']}" if state == "failed" else ""
        print(f"{run.name:<44} {state:<12}{share:>5.0%}{error}")


@app.command
def report(folders: Place = HERE) -> None:
    """Rewrite the generated tables of README.md and benchmark/README.md, and DETAILS.md."""
    from benchmark import pages

    for page in pages.write(folders):
        print(f"{page} rewritten")


@app.command
def plot(suite: Positional[str | None] = None, folders: Place = HERE) -> None:
    """Draw the figures of a suite, or those of all suites that are out of date."""
    from benchmark import plots

    for name in [suite] if suite else SUITES:
        for kind in suite_named(name).figures:
            try:
                if path := plots.update(name, kind, folders, always=bool(suite)):
                    print(path)
            except BenchmarkError as error:
                if suite:
                    raise
                print(error)


@app.command
def compare(a: Positional[str], b: Positional[str], folders: Place = HERE) -> None:
    """Compare two variants, each named SUITE or SUITE/VARIANT."""
    from benchmark import tables

    print(tables.compare(a, b, folders))


@app.command
def summary(runs: Positional[tuple[Path, ...]]) -> None:
    """Show the scores of your own runs, given by their folders, with an interval."""
    from benchmark import tables

    print(tables.summary(runs))


@app.command
def throughput(
    contests: Positional[tuple[str, ...]] = (), repetitions: int = 3, folders: Place = HERE
) -> None:
    """Measure steps per second of our scripts beside their peers, in some contests or in all."""
    from benchmark import throughput

    throughput.measure_all(contests, repetitions, folders)


def main(arguments: list[str] | None = None) -> None:
    """Run one command; what cannot be done ends as one sentence and exit code 2."""
    # SIGTERM is answered as Ctrl-C is, so that no child is left behind. A shell that starts this in
    # the background has SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        app.cli(args=arguments, prog="python -m benchmark", description=__doc__)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except (BenchmarkError, OSError) as error:  # OSError: a folder that is a file, a full disk
        name = getattr(error, "filename", None) or "The benchmark"
        text = f"{name}: {error.strerror}." if isinstance(error, OSError) else error
        print(f"Error: {text}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
