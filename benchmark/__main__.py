"""Runs, compares and checks your own scripts, and repeats our experiments."""

# Commands import what they use when they are called: torch, scipy and matplotlib take seconds.

import argparse
import functools
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from benchmark.evidence.suites import SUITES
from benchmark.evidence.suites.measurements import MEASUREMENTS
from benchmark.lab import results
from benchmark.lab.definitions import Folders, require_open
from benchmark.lab.logs import UNKNOWN
from benchmark.lab.provenance import BenchmarkError, commit_named

app = tyro.extras.SubcommandApp()
Name = Literal[tuple(SUITES)]
Measurement = Literal[tuple(MEASUREMENTS)]
Place = Annotated[Folders, tyro.conf.arg(name="")]  # --results and --runs
HERE, PROGRAM = Folders(), "python -m benchmark"


# --- For your own scripts and runs ---


@app.command
def seeds(
    script: Positional[str],
    env_ids: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (5,),
    workers: int = 2,
    name: str = "",
    cluster: Literal["local", "ray"] = "local",
) -> Callable[[list[str]], None]:
    """Run a script over environments and seeds, and show the results. The same command resumes.

    Flags that are not of this command go to the script.

    Args:
        script: one of ours or a changed copy, anywhere
        env_ids: environments; without them, the script's default
        seeds: how many, or which if there are several numbers
        workers: runs at a time, if on this machine
        name: of the folder below runs/; by default that of the script
        cluster: this machine, or a Ray cluster that shares this folder
    """
    from benchmark.lab import seeds as command

    at_a_time = workers if cluster == "local" else None
    return functools.partial(command.run, Path(script), env_ids, seeds, at_a_time, name)


@app.command
def compare(
    runs: Positional[tuple[str, ...]],
    env_id: str = "",
    output: Path = Path("compare.png"),
    folders: Place = HERE,
) -> None:
    """Compare groups of runs: what each scores, and whether one can be said to be better.

    Args:
        runs: two groups or more, each a folder of runs, a pattern in quotes, or SUITE:VARIANT;
            the others are compared with the first one
        env_id: environment of those runs that do not name theirs
        output: where the curves are drawn
    """
    from benchmark.lab import compare as command
    from benchmark.lab import plots

    suites = {name: suite.variants for name, suite in SUITES.items()}
    found, notes = command.runs_of(runs, folders, suites, env_id or UNKNOWN)
    print("\n".join([*command.described(found), *notes]))
    assumed = command.require_seeds(found)
    found, notes = command.comparable(found)
    print("\n".join([*assumed, *command.contrasts(found), "", command.table(found)]))
    print(f"Curves: {plots.try_to_save(lambda: plots.overlay(found), output)}\n")
    print("\n".join([*notes, *command.verdict(found)]))


@app.command
def check(run: Positional[str], env_id: str = "") -> None:
    """Judge a run, or several seeds, even during training: which metrics are healthy, what to do.

    Args:
        run: folder of a run or of several, also of TensorBoard logs of CleanRL or Stable-Baselines3
        env_id: environment of those runs that do not name theirs
    """
    from benchmark.lab import check as command
    from benchmark.lab import logs, plots

    found, left_out = logs.search(run, env_id or UNKNOWN)
    for text in left_out:
        print(f"Left out: {text}.")
    groups = command.alike(found)
    for number, own in enumerate(groups, start=1):
        name = f"check{number}.png" if len(groups) > 1 else "check.png"
        path = Path(os.path.commonpath([x.path for x in own])) / name
        draw = functools.partial(plots.checks, own)
        picture = plots.try_to_save(draw, path) if any(map(command.judge, own)) else ""
        print(command.report(own, picture))


@app.command
def diff(
    copy: Positional[Path],
    original: Positional[Path | None] = None,
    iterations: int = 2,
) -> Callable[[list[str]], int]:
    """Find where a changed copy of a script first computes something different.

    Other flags after the files go to both scripts, for example --env-id and --seed. Exit code 0:
    equal, 1: different, 2: a mistake.

    Args:
        copy: your script
        original: with which it is compared; by default the most similar script of this repository
        iterations: of training, before one more from the checkpoint
    """
    from benchmark.lab import diff as command

    if iterations < 1:
        raise BenchmarkError("--iterations must be positive.")
    return functools.partial(command.run, copy, original, iterations)


# --- Our experiments ---


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
    from benchmark.evidence import runs

    at_a_time = workers if cluster == "local" else None
    keys = runs.select(SUITES[suite], seeds, only)
    runs.make(SUITES[suite], keys, folders, at_a_time, commit_named(commit))


@app.command(name="list")
def list_runs(
    suite: Positional[Name | None] = None, only: str = "*", folders: Place = HERE
) -> None:
    """Show the suites and how complete they are, or how far each run of one is."""
    from benchmark.evidence import runs
    from benchmark.lab.run import has_checkpoint

    if suite is None:
        for entry in SUITES.values():
            made, total = runs.how_complete(entry, folders)
            print(f"{entry.name:<26}{made:>4} of {total:>3} runs done; {entry.reproduces}")
        return
    entry, done = SUITES[suite], results.done(suite, folders)
    for key in runs.select(entry, only=only):
        begun = has_checkpoint(runs.folder_of(entry, key, folders))
        state = "done" if key in done else "begun" if begun else "waiting"
        words = ["python", entry.variants[key[1]].script, *runs.flags_of(entry, key)]
        print(f"{runs.name_of(key):<44} {state:<8} {shlex.join(words)}")


@app.command(name="table")
def print_table(suite: Positional[Name], folders: Place = HERE) -> None:
    """Print the table of a suite."""
    from benchmark.evidence import pages

    print(pages.block(suite, folders) or f"No run of {suite} is finished.")


@app.command
def report(folders: Place = HERE) -> None:
    """Rewrite the generated blocks of all pages."""
    from benchmark.evidence import pages

    for page in pages.write(folders):
        print(f"{page} rewritten")


@app.command
def plot(suite: Positional[Name | None] = None, folders: Place = HERE) -> None:
    """Draw the figures of a suite, or those of all suites that have results."""
    from benchmark.evidence import figures

    for entry in [SUITES[suite]] if suite else SUITES.values():
        if suite or results.done(entry.name, folders):
            for name in entry.figures:
                print(figures.draw(entry, name, folders))


@app.command(name="vectors")
def write_vectors() -> None:
    """Rewrite vectors.json, the test vectors for implementations in any language."""
    from benchmark.evidence import vectors

    vectors.write()


@app.command
def site(folders: Place = HERE) -> None:
    """Rebuild the site in docs/; it opens from disk."""
    from benchmark.evidence.site.build import DOCS, write

    print(f"{write(folders)} files made; open {DOCS / 'index.html'}")


@app.command(name="throughput")
def measure(
    measurements: Positional[tuple[Measurement, ...]] = (),
    repetitions: int = 3,
    cleanrl: Path | None = None,
    leanrl: Path | None = None,
    folders: Place = HERE,
) -> None:
    """Measure steps per second of our scripts, next to those of other projects.

    Args:
        measurements: by default those of the processor, or of the GPU if there is one; `llm` needs
            trl==1.16.0
        repetitions: of each measurement
        cleanrl: CleanRL's ppo_continuous_action.py, for `continuous`
        leanrl: LeanRL's ppo_atari_envpool_torchcompile.py, for `gpu_atari`
    """
    from benchmark.evidence import throughput

    given = {x: y for x, y in {"cleanrl": cleanrl, "leanrl": leanrl}.items() if y}
    throughput.measure_all(measurements, repetitions, given, folders)


def main(arguments: list[str] | None = None) -> None:
    """Run one command; what cannot be done ends as one sentence and exit code 2."""
    # SIGTERM and SIGHUP are answered as Ctrl-C is, so that no child is left behind. A shell that
    # starts this in the background has SIGINT ignored; under nohup, SIGHUP stays ignored.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and (name == "SIGINT" or signal.getsignal(number) != signal.SIG_IGN):
            signal.signal(number, signal.default_int_handler)
    # Figures go to files. A notebook's MPLBACKEND names one that only its kernel may have.
    os.environ["MPLBACKEND"] = "agg"
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["seeds"]:
            how = {"prog": f"{PROGRAM} seeds", "return_unknown_args": True}
            command, flags = tyro.cli(seeds, args=arguments[1:], **how)
            command(flags)
        elif arguments[:1] == ["diff"]:
            files = [*itertools.takewhile(lambda x: x == "--help" or x[:1] != "-", arguments[1:])]
            parser = argparse.ArgumentParser(f"{PROGRAM} diff", add_help=False, allow_abbrev=False)
            parser.add_argument("--iterations", default="2")
            own, flags = parser.parse_known_args(arguments[1 + len(files) :])
            command = tyro.cli(
                diff, args=[*files, "--iterations", own.iterations], prog=f"{PROGRAM} diff"
            )
            sys.exit(command(flags))
        else:
            if arguments[:1] in (["run"], ["list"], ["table"], ["plot"]) and len(arguments) > 1:
                require_open(arguments[1])
            app.cli(args=arguments, prog=PROGRAM, description=__doc__)
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
