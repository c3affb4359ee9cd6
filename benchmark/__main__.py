"""python -m benchmark run|list|status|report|plot|compare|throughput"""

import argparse
import shlex
import sys
from pathlib import Path

from benchmark import throughput
from benchmark.commands import guarded
from benchmark.provenance import BenchmarkError, git, source_at
from benchmark.ray_cluster import run_on_ray
from benchmark.runner import Runner
from benchmark.runs import Folders, read_note, select, single_command, state, suite_named
from benchmark.suites import SUITES


def run_command(args: argparse.Namespace) -> None:
    """Make the missing runs of a suite."""
    runs = select(args.suite, args.folders, args.seeds, args.only)
    if args.workers < 1:
        raise BenchmarkError("--workers must be positive.")
    commit = git("rev-parse", "--verify", f"{args.commit}^{{commit}}").strip()
    for script in {run.definition.script for run in runs}:
        source_at(commit, script)  # what the commit lacks is to be said before anything is begun
    if args.dry_run:
        for run in runs:
            if not run.result.exists():
                print(shlex.join(["python", "-m", "benchmark", *single_command(run, commit)]))
        return
    if args.cluster == "ray":
        failed = run_on_ray(runs, commit)
    else:
        runner = Runner(runs, commit, args.workers)
        runner.run()
        failed = runner.failed
        if runner.stopped:
            sys.exit(130)
    if failed:
        raise BenchmarkError(
            f"{len(failed)} of {len(runs)} runs failed; their output.txt says why."
        )


def list_command(args: argparse.Namespace) -> None:
    """Show the suites, or the runs and command lines of one."""
    if args.suite is None:
        for name, suite in SUITES.items():
            runs = select(name, args.folders)
            done = sum(run.result.exists() for run in runs)
            print(f"{name:<26}{done:>4} of {len(runs):>3} runs done; {suite.reproduces}")
        return
    for run in select(args.suite, args.folders, only=args.only):
        print(f"{run.name:<34} {shlex.join(['python', run.definition.script, *run.flags])}")


def status_command(args: argparse.Namespace) -> None:
    """Show how far the runs of a suite are."""
    for run in select(args.suite, args.folders, args.seeds, args.only):
        current = state(run)
        share = 1.0 if current == "done" else run.last_step() / run.total_timesteps
        error = f"  {read_note(run)['error']}" if current == "failed" else ""
        print(f"{run.name:<44}{current:<12}{share:>5.0%}{error}")


def report_command(args: argparse.Namespace) -> None:
    """Rewrite the generated tables of README.md and benchmark/README.md."""
    from benchmark import report  # scipy takes a second to import

    for page in report.write_pages(args.folders):
        print(f"{page} rewritten")


def plot_command(args: argparse.Namespace) -> None:
    """Draw the figures of a suite, or of all that have results."""
    from benchmark import plots  # matplotlib takes a second to import

    for suite in [args.suite] if args.suite else SUITES:
        suite_named(suite)
        try:
            print(*plots.plot_all(suite, args.folders), sep="\n")
        except BenchmarkError as error:
            if args.suite:
                raise
            print(error)


def compare_command(args: argparse.Namespace) -> None:
    """Compare two variants, each named SUITE or SUITE/VARIANT."""
    from benchmark import report

    print(report.compare(args.a, args.b, args.folders))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmark", description=__doc__)
    default = Folders()
    parser.add_argument("--results", type=Path, default=default.results, help="folder of results")
    parser.add_argument("--runs", type=Path, default=default.runs, help="folder of unfinished runs")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function, name: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        subparser.set_defaults(function=function)
        return subparser

    def selection(subparser: argparse.ArgumentParser) -> None:
        subparser.add_argument("suite", metavar="SUITE", help=", ".join(SUITES))
        subparser.add_argument("--seeds", type=int, nargs="+", help="instead of the suite's own")
        subparser.add_argument("--only", metavar="PATTERN", help="e.g. Hopper-v4 or '*/seed[12]'")

    run = command(run_command, "run")
    selection(run)
    run.add_argument("--workers", type=int, default=2, help="runs at a time (2)")
    run.add_argument("--cluster", choices=["ray"], help="use a Ray cluster, not local processes")
    run.add_argument("--commit", default="HEAD", help="version of the scripts to run (HEAD)")
    run.add_argument("--dry-run", action="store_true", help="print one command per missing run")
    listing = command(list_command, "list")
    listing.add_argument("suite", nargs="?", metavar="SUITE", help=", ".join(SUITES))
    listing.add_argument("--only", metavar="PATTERN", help="as for run")
    selection(command(status_command, "status"))
    command(report_command, "report")
    plot = command(plot_command, "plot")
    plot.add_argument("suite", nargs="?", metavar="SUITE", help=", ".join(SUITES))
    compare = command(compare_command, "compare")
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    throughput.add_arguments(command(throughput.main, "throughput"))
    args = parser.parse_args(arguments)
    args.folders = Folders(args.results.resolve(), args.runs.resolve())
    return args


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    args = parse(arguments)
    guarded(args.function, args)


if __name__ == "__main__":
    main()
