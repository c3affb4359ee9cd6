"""Makes the missing runs of a suite, here or on a Ray cluster, and keeps their results.

A run is a script as it is in a commit, with one environment, variant and seed. Whatever is killed
at whatever moment, the next call goes on from what is on disk.
"""

import contextlib
import difflib
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from resource import struct_rusage

from benchmark import logs, record, results
from benchmark.definitions import Folders, Run, Suite, Variant
from benchmark.provenance import ROOT, BenchmarkError, git, machine, source_at, text_on_disk
from benchmark.results import lock, write_text

EVALUATE = Path(__file__).resolve().parent / "evaluate.py"
# One thread per process: a second one gains nothing on networks of this size and, being shared
# between runs, would make their times depend on each other.
THREADS = [f"{x}_NUM_THREADS" for x in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")]
LOST_NODES = 5  # that one run survives on Ray; each costs it what follows its last checkpoint


class Watch:
    """Follows the runs of a suite."""

    def look(self, working: list[Run]) -> bool:
        """Called again and again with the runs at work; returns whether more may start."""
        return True

    def ended(self, run: Run, error: str) -> None:
        """Called when a run has ended, with what went wrong, if anything."""
        say(f"{run.name} {error or 'done'}")


def run_suite(
    suite: Suite,
    runs: list[Run],
    folders: Folders,
    commit: str | None,
    workers: int | None,
    watch: Watch | None = None,
) -> int:
    """Make those of some runs of a suite that are missing; returns how many failed.

    Args:
        commit: version of the scripts; None for the files as they are on disk.
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
        watch, how = watch or Watch(), (missing, commit)
        made = make(*how, workers, watch) if workers else make_on_ray(*how, watch)
        with contextlib.closing(made):  # stops the scripts if this is stopped
            for run, error in made:
                results.collect(suite, folders)
                failed += bool(error)
                watch.ended(run, error)
        say(f"{len(runs) - failed} of {len(runs)} runs done.")
    return failed


def say(text: str) -> None:
    """Print a line with the time; whoever read this may have gone, the runs go on."""
    clear = "\x1b[J" * sys.stdout.isatty()  # the lines of runs at work, see `seeds.py`
    with contextlib.suppress(BrokenPipeError):
        print(f"{clear}{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- Scripts ---


def changed(text: str, replaced: Iterable[Iterable[str]]) -> str:
    """A script with texts replaced, each of which must be in it once; or a BenchmarkError.

    Between the lines of such a text the script may have comments.
    """
    for old, new in replaced:
        lines = map(re.escape, old.split("\n"))
        found = [*re.finditer(r"\n(?: *#.*\n)*?".join(lines), text)]
        if len(found) != 1:
            raise BenchmarkError(
                f"The script has this text {len(found)} times: {old}\n{nearest(text, old)}"
                "Correct the text in benchmark/suites/, or change this line of the script back."
            )
        text = text[: found[0].start()] + new + text[found[0].end() :]
    return text


def nearest(text: str, old: str) -> str:
    """The line of a script that has most of a text that it lacks, for a message."""
    first = max(old.splitlines(), key=len).strip()

    def shared(line: str) -> int:
        blocks = difflib.SequenceMatcher(None, first, line, autojunk=False).get_matching_blocks()
        return sum(x.size for x in blocks if x.size > 3)

    number, line = max(enumerate(text.splitlines(), 1), key=lambda x: shared(x[1]))
    return f"The closest line is {number}: {line.strip()}\n" if shared(line) else ""


def source(variant: Variant, commit: str | None) -> str:
    """Text of a variant's script in a commit, or on disk, or a BenchmarkError."""
    text = source_at(commit, variant.script) if commit else text_on_disk(variant.script)
    return changed(text, variant.replaced)


def tree(commit: str, folder: Path) -> Path:
    """The folder, in another one, with the Python files of a commit, taken from git once."""
    files = folder / commit
    with lock(folder / "lock", fcntl.LOCK_EX), tempfile.TemporaryDirectory(dir=folder) as new:
        if not files.exists():
            git("archive", "--output", f"{new}/files.tar", commit, "*.py")
            shutil.unpack_archive(f"{new}/files.tar", f"{new}/files")
            os.replace(f"{new}/files", files)
    return files


def start(
    folder: Path, words: list[str], imports: Path, threads: int = 1, **variables: str
) -> subprocess.Popen:
    """Start Python in a folder; our modules are those below `imports`."""
    known = dict.fromkeys(THREADS, str(threads))
    known["PYTHONPATH"] = f"{imports}{os.pathsep}{imports / 'benchmark/baselines'}"
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, **known, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            close_fds=False,  # it inherits a lock
            start_new_session=True,  # Ctrl-C is ours to answer
        )


def last_line(folder: Path) -> str:
    """The last line that a process in this folder printed, without its progress bar.

    A mistake on the command line is shown in a box. Of a box, this is the text above its rule.
    """
    text = (folder / "output.txt").read_text().strip()
    if text.endswith("╯"):
        lines = [x.strip("│ ") for x in text[text.rindex("╭") :].splitlines()[1:-1]]
        return " ".join(itertools.takewhile(lambda x: not x.startswith("──"), lines))
    *_, last = ["no word", *text.splitlines()]
    return re.sub(r".*\d+/\d+ \[.*?\]", "", last).strip() or last


# --- Making runs ---


def make(
    runs: list[Run], commit: str | None, workers: int, watch: Watch
) -> Iterator[tuple[Run, str]]:
    """Make runs, so many at a time; yields each that has ended and what went wrong, if anything."""
    waiting, working = runs[::-1], {}
    try:
        while waiting or working:
            more = watch.look([x for x, *_ in working.values()])
            if waiting and len(working) < workers and (more or not working):
                run, usage = waiting.pop(), None
                steps = make_one(run, commit)
            else:
                pid, status, usage = os.wait4(-1, os.WNOHANG)  # whichever ends first
                if not pid:
                    time.sleep(0.05)
                    continue
                run, steps, process = working.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                if process.returncode:
                    yield run, f"ended with exit code {process.returncode}: {last_line(run.folder)}"
                    continue
            try:
                process = steps.send(usage)
                working[process.pid] = run, steps, process
            except StopIteration:
                yield run, ""
            except Exception as error:  # the other runs go on
                yield run, str(error) or repr(error)
    finally:  # some still work if this is to stop
        for *_, process in working.values():
            process.terminate()
            process.wait()


def make_one(run: Run, commit: str | None) -> Generator[subprocess.Popen, struct_rusage, None]:
    """Make a run, or continue it with the script that began it, and write its result.

    Yields each process that it starts, and is sent what that has used if it ends well.
    """
    begun, suite, file = run.begun, run.suite, Path(run.script).name
    # Whoever killed us did not kill the script, so it has ended, and needs no resuming.
    ended, note = (run.log / "results.json").exists(), run.folder / "note.json"
    if begun or ended:
        commit = json.loads(note.read_text())["commit"]
        flags = ["--resume", "runs/run"]
    else:
        flags = [*run.flags, *run.naming]
        shutil.rmtree(run.log, ignore_errors=True)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / file, source(suite.variants[run.variant], commit))
        write_text(note, json.dumps({"commit": commit}))
    version = f", commit {commit[:7]}" if commit else ""
    say(f"{run.name} {'has ended' if ended else 'continues' if begun else 'starts'}{version}")
    trees = run.folders.runs.absolute() / "trees"
    imports = tree(commit, trees) if commit else Path(run.script).parent
    usage = seconds = None
    if not ended:
        usage = yield start(run.folder, [file, *flags], imports, **run.variables)
        seconds = None if begun else usage.ru_utime + usage.ru_stime
    if suite.evaluated:  # -P: not beside our `statistics`
        yield start(run.folder, ["-P", str(EVALUATE), file], imports, **run.variables)

    if (run.log / "checkpoint.pt").exists():
        facts, curve = record.summarize_steps(run.log, suite.total_timesteps, suite.points)
    elif (run.log / "results.json").exists():
        facts, curve = record.summarize_stages(run.log, seconds, suite.points)
    else:
        facts, curve = logs.summarize(run.log, seconds)
    if suite.evaluated:
        facts["evaluation"] = record.summarize_evaluation(run.log)
    about = {name: getattr(run, name) for name in ("environment", "variant", "seed", "script")}
    about |= {"flags": " ".join(run.flags)} | run.origin(commit)
    about["peak_mib"] = usage and usage.ru_maxrss // 1024  # Linux counts KiB
    content = {"record": about | machine() | facts, "curve": curve.to_dict("list")}
    write_text(run.folder / "result.json", json.dumps(content, ensure_ascii=False))


def make_on_ray(runs: list[Run], commit: str | None, watch: Watch) -> Iterator[tuple[Run, str]]:
    """`make` on the Ray cluster of RAY_ADDRESS or of this machine, one run per processor core.

    If a node is lost, Ray starts its runs again on another, where they continue.
    """
    package = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # the nodes share this folder
    try:
        import ray

        ray.init(os.environ.get("RAY_ADDRESS", "auto"), runtime_env=package, logging_level="error")
    except (ImportError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]  # not installed, no cluster, not reached, no address
        raise BenchmarkError(f"No Ray cluster (pip install ray; ray start): {reason}") from error
    task = ray.remote(num_cpus=1, max_retries=LOST_NODES, scheduling_strategy="SPREAD")(
        lambda run: next(make([run], commit, 1, Watch()))[1]
    )
    waiting = {task.remote(run): run for run in runs}
    try:
        while waiting:
            watch.look([*waiting.values()])
            ends, _ = ray.wait([*waiting], timeout=1)
            if not ends:
                continue
            (ended,) = ends
            try:
                error = ray.get(ended)
            except ray.exceptions.RayError as reason:  # it has many lines
                error = str(reason).splitlines()[-1]
            yield waiting.pop(ended), error
    finally:
        ray.shutdown()  # ends the scripts too
