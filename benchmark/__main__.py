"""Runs suites of the scripts, and turns their results into tables and figures."""

import os
import shlex
import signal
import sys
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from benchmark import results, throughput
from benchmark.definitions import Folders, select
from benchmark.provenance import BenchmarkError, commit_named
from benchmark.report import pages
from benchmark.run import run_suite
from benchmark.suites import CONTESTS, SUITES

app = tyro.extras.SubcommandApp()
Name = Literal[tuple(SUITES)]
Contest = Literal[tuple(CONTESTS)]
Place = Annotated[Folders, tyro.conf.arg(name="")]  # --results and --runs
HERE = Folders()


@app.command
def run(
    suite: Positional[Name],
    seeds: tuple[int, ...] = (),
    only: str = "*",
    workers: int = 2,
    cluster: Literal["local", "ray"] = "local",
    commit: str = "HEAD",
    folders: Place = HERE,
) -> None:
    """Make the missing runs of a suite.

    Args:
        suite: see `list`
        seeds: instead of the suite's own
        only: pattern of names, e.g. Hopper-v4 or '*/seed[12]'
        workers: runs at a time, if on this machine
        cluster: this machine, or a Ray cluster, with a run at a time per processor core
        commit: version of the scripts to run
    """
    if workers < 1:
        raise BenchmarkError("--workers must be positive.")
    runs = select(SUITES[suite], folders, seeds, only)
    at_a_time = workers if cluster == "local" else None
    failed = run_suite(SUITES[suite], runs, folders, commit_named(commit), at_a_time)
    if failed:
        raise BenchmarkError(f"{failed} of {len(runs)} runs failed; their output.txt says why.")


@app.command(name="list")
def list_runs(
    suite: Positional[Name | None] = None, only: str = "*", folders: Place = HERE
) -> None:
    """Show the suites and how complete they are, or how far each run of one is."""
    if suite is None:
        for entry in SUITES.values():
            made, total = results.how_complete(entry, folders)
            print(f"{entry.name:<26}{made:>4} of {total:>3} runs done; {entry.reproduces}")
        return
    done = results.done(suite, folders)
    for run in select(SUITES[suite], folders, only=only):
        state = "done" if run.key in done else "begun" if run.begun else "waiting"
        print(f"{run.name:<44} {state:<8} {shlex.join(['python', run.script, *run.flags])}")


@app.command
def report(folders: Place = HERE) -> None:
    """Rewrite the generated blocks of README, DETAILS, DEBUGGING and benchmark/README."""
    for page in pages.write(folders):
        print(f"{page} rewritten")


@app.command
def plot(suite: Positional[Name | None] = None, folders: Place = HERE) -> None:
    """Draw the figures of a suite, or those of all suites that have results."""
    from benchmark import plots  # matplotlib takes a quarter of a second to load

    for entry in [SUITES[suite]] if suite else SUITES.values():
        if suite or results.done(entry.name, folders):
            for name in entry.figures:
                print(plots.draw(entry, name, folders))


@app.command
def site(folders: Place = HERE) -> None:
    """Make the site in docs/ anew; it opens from disk."""
    from benchmark.site.build import DOCS, write  # what draws its pages takes a second to load

    print(f"{write(folders)} files made; open {DOCS / 'index.html'}")


@app.command(name="throughput")
def measure(
    contests: Positional[tuple[Contest, ...]] = (), repetitions: int = 3, folders: Place = HERE
) -> None:
    """Measure steps per second of our scripts beside their peers, in some contests or in all.

    Without names, those of the processor, or of the GPU where there is one.
    """
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
