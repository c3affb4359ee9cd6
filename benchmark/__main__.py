"""python -m benchmark run|list|status|report|plot|compare|summary|throughput"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmark import execute, results
from benchmark.provenance import BenchmarkError, commit_named, source_at
from benchmark.runs import Folders, read_note, select, suite_named
from benchmark.suites import SUITES


def run_command(args: argparse.Namespace) -> None:
    """Make the missing runs of a suite."""
    runs = select(args.suite, args.folders, args.seeds, args.only)
    if args.workers is not None and args.workers < 1:
        raise BenchmarkError("--workers must be positive.")
    if args.workers and args.cluster:
        raise BenchmarkError("--workers is for local runs; a cluster makes one per processor core.")
    commit = commit_named(args.commit)
    for script in {run.definition.script for run in runs}:
        source_at(commit, script)  # what the commit lacks is to be said before anything is begun
    done = results.done(args.suite, args.folders)
    missing = [run for run in runs if run.key not in done]
    if args.cluster == "ray":
        outcomes = execute.run_ray(runs, missing, commit)
    else:
        outcomes = execute.run_local(runs, missing, commit, args.workers or 2)
    if failed := [x for x in outcomes.values() if x.kind != "done"]:
        raise BenchmarkError(
            f"{len(failed)} of {len(runs)} runs failed; their output.txt says why."
        )


def list_command(args: argparse.Namespace) -> None:
    """Show the suites, or the runs and command lines of one."""
    if args.suite is None:
        for name, suite in SUITES.items():
            made, total = results.how_complete(name, args.folders)
            print(f"{name:<26}{made:>4} of {total:>3} runs done; {suite.reproduces}")
        return
    for run in select(args.suite, args.folders, only=args.only):
        print(f"{run.name:<34} {shlex.join(['python', run.definition.script, *run.flags])}")


def status_command(args: argparse.Namespace) -> None:
    """Show how far the runs of a suite are."""
    for run in select(args.suite, args.folders, args.seeds, args.only):
        state = execute.state(run)
        share = 1.0 if state == "done" else run.progress() / run.total_steps
        error = f"  {read_note(run)['error']}" if state == "failed" else ""
        print(f"{run.name:<44}{state:<12}{share:>5.0%}{error}")


def report_command(args: argparse.Namespace) -> None:
    """Rewrite the generated tables of README.md and benchmark/README.md, and DETAILS.md."""
    from benchmark import pages  # scipy takes a second to import

    for page in pages.write(args.folders):
        print(f"{page} rewritten")


def plot_command(args: argparse.Namespace) -> None:
    """Draw the figures of a suite, or those of all suites that are out of date."""
    from benchmark import plots  # matplotlib takes a second to import

    for suite in [args.suite] if args.suite else SUITES:
        for kind in suite_named(suite).figures:
            try:
                for path in plots.update(suite, kind, args.folders, always=bool(args.suite)):
                    print(path)
            except BenchmarkError as error:
                if args.suite:
                    raise
                print(error)


def compare_command(args: argparse.Namespace) -> None:
    """Compare two variants, each named SUITE or SUITE/VARIANT."""
    from benchmark import tables

    print(tables.compare(args.a, args.b, args.folders))


def summary_command(args: argparse.Namespace) -> None:
    """Show the scores of your own runs, with an interval."""
    from benchmark import tables

    print(tables.summary(args.folders_of_runs))


def throughput_command(args: argparse.Namespace) -> None:
    """Measure steps per second of our scripts beside their peers."""
    from benchmark import throughput

    throughput.measure_all(args.contests, args.repetitions, args.folders)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmark", description=__doc__)
    default, names = Folders(), ", ".join(SUITES)
    parser.add_argument("--results", type=Path, default=default.results, help="folder of results")
    parser.add_argument("--runs", type=Path, default=default.runs, help="folder of unfinished runs")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable, suite: dict | None = None) -> Callable:
        added = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        added.set_defaults(function=function)
        if suite is not None:
            added.add_argument("suite", metavar="SUITE", help=names, **suite)
        return added.add_argument

    for name, function in (("run", run_command), ("status", status_command)):
        add = command(name, function, suite={})
        add("--seeds", type=int, nargs="+", help="instead of the suite's own")
        add("--only", metavar="PATTERN", help="e.g. Hopper-v4 or '*/seed[12]'")
        if name == "run":
            add("--workers", type=int, help="runs at a time on this machine (2)")
            add("--cluster", choices=["ray"], help="use a Ray cluster, not local processes")
            add("--commit", default="HEAD", help="version of the scripts to run (HEAD)")
    optional = {"nargs": "?"}
    command("list", list_command, optional)("--only", metavar="PATTERN", help="as for run")
    command("report", report_command)
    command("plot", plot_command, optional)
    add = command("compare", compare_command)
    add("a", metavar="A")
    add("b", metavar="B")
    add = command("summary", summary_command)
    add("folders_of_runs", metavar="RUN", nargs="+", type=Path, help="e.g. runs/hopper-1")
    add = command("throughput", throughput_command)
    add("contests", nargs="*", metavar="CONTEST", help="e.g. continuous; all if none is named")
    add("--repetitions", type=int, default=3, help="of each contender at this commit (3)")
    args = parser.parse_args(arguments)
    args.folders = Folders(args.results.resolve(), args.runs.resolve())
    return args


def main(arguments: list[str] | None = None) -> None:
    """Run one command; what cannot be done ends as one sentence and exit code 2."""
    args = parse(arguments)
    # SIGTERM is answered as Ctrl-C is, so that no child is left behind. A shell that starts this in
    # the background has SIGINT ignored.
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        args.function(args)
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
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
