"""Makes the missing runs of a suite, here or on a Ray cluster, and keeps their results.

A run is a script as it is in a commit, with one environment, variant and seed. Whatever is killed
at whatever moment, the next call goes on from what is on disk.
"""

import contextlib
import dataclasses
import difflib
import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark.lab import logs, record, results
from benchmark.lab.definitions import Folders, Suite, file_name
from benchmark.lab.provenance import ROOT, BenchmarkError, git, machine, source_at, text_on_disk
from benchmark.lab.results import lock, write_text

ENDED = "ended"  # file in the folder of a run whose script has ended with exit code 0
EVALUATE = Path(__file__).resolve().parent / "evaluate.py"
# One thread per process: a second one gains nothing on networks of this size and, being shared
# between runs, would make their times depend on each other.
THREADS = [f"{x}_NUM_THREADS" for x in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")]
# A progress bar: share, iterations done and in all, time left, and what follows the rate.
BAR = re.compile(r"(\d+)%\|.*?\| *(\d+)/(\d+) \[[\d:]+<([\d:?]+)(?:, *\S+/\w+)?,? ?([^\]]*)")
PACE = 30  # seconds between two lines about a run at work
FIRST = 120  # seconds after which the others start, even if the first run shows no progress
GIVEN = frozenset({"--env-id", "--seed", "--run-name", "--resume"})  # flags that we give ourselves
LOST_NODES = 5  # that one run survives on Ray; each costs it what follows its last checkpoint


# --- Runs ---


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, finished or not: of a suite's script in a commit, or by `seeds` of one on disk."""

    suite: Suite  # by `seeds`: made up for the script
    environment: str  # by `seeds`: empty for the script's default
    variant: str
    seed: int
    folders: Folders
    takes: frozenset[str] = GIVEN  # those that the script has
    # The script's commit; by `seeds` also the hash of its text, and the flags given.
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:  # among the runs of its suite
        return self.environment, self.variant, self.seed

    @property
    def name(self) -> str:
        parts = (file_name(self.environment), self.variant, f"seed{self.seed}")
        return "/".join(part for part in parts if part)

    @property
    def folder(self) -> Path:  # where the script works, not committed
        return self.folders.runs.absolute() / self.suite.name / self.name

    @property
    def log(self) -> Path:  # where the script puts its checkpoint; it may choose the name
        named = self.folder / "runs" / "run"
        return named if named.exists() else logs.main_folder(self.folder) or named

    @property
    def begun(self) -> bool:  # so far that it can be continued; stages of RLHF cannot
        return "--resume" in self.takes and (self.log / "checkpoint.pt").exists()

    @property
    def on_disk(self) -> bool:  # by `seeds`: the script is run where it is
        return "sha256" in self.about

    @property
    def script(self) -> str:
        return self.suite.variants[self.variant].script

    @property
    def flags(self) -> list[str]:  # those that decide the result
        flags, steps = ["--seed", str(self.seed)], self.suite.total_timesteps
        if self.environment and (steps or self.on_disk):
            flags = ["--env-id", self.environment, *flags]
        if steps:
            flags += ["--total-timesteps", str(steps)]
        return flags + shlex.split(self.suite.variants[self.variant].flags)


def python_path(first: Path) -> str:
    """A folder and those of PYTHONPATH, which may be relative to the current folder."""
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(str(Path(x).absolute()) for x in [first, *others])


def select(
    suite: Suite,
    folders: Folders,
    seeds: tuple[int, ...] = (),
    only: str = "*",
    commit: str | None = None,
) -> list[Run]:
    """Runs of a suite, seed by seed: with other seeds; those whose name or a part of it fits."""
    runs = [
        Run(suite, environment, variant, seed, folders, about={"commit": commit})
        for environment in suite.environments
        for variant in suite.variants
        for own in [suite.seeds(environment, variant)]
        for seed in dict.fromkeys(own and (seeds or own))
    ]
    runs = [x for x in runs if fnmatch.filter([x.name, *x.name.split("/")], only)]
    if not runs:
        raise BenchmarkError(f"No run of {suite.name} matches {only}; see: list {suite.name}.")
    return sorted(runs, key=lambda x: x.seed)


def how_complete(suite: Suite, folders: Folders) -> tuple[int, int]:
    """How many of a suite's own runs are done, and how many there are."""
    runs, records = select(suite, folders), results.done(suite.name, folders)
    return sum(run.key in records for run in runs), len(runs)


def run_suite(suite: Suite, runs: list[Run], folders: Folders, workers: int | None) -> None:
    """Make those of some runs of a suite that are missing.

    Args:
        workers: runs at a time on this machine; None for a Ray cluster.

    Raises:
        BenchmarkError: the commit lacks a script, somebody else runs the suite, or runs failed.
    """
    if sys.platform == "win32":
        raise BenchmarkError("Runs are made on Linux and macOS only: on Windows, use WSL.")
    if workers is not None and workers < 1:
        raise BenchmarkError("--workers must be positive.")
    for run in runs:  # what the commit lacks is to be said before anything is begun
        source(run)
    with lock(folders.runs / suite.name / "lock") as ours:
        if not ours:
            raise BenchmarkError(f"{suite.name} is being run, or its scripts outlive a killed run.")
        results.collect(suite, folders)  # what a killed benchmark has left
        done = results.done(suite.name, folders)
        missing = [run for run in runs if run.key not in done]
        say(f"{len(runs)} runs, {len(runs) - len(missing)} of them done before.")
        failed = []
        made = make(missing, workers) if workers else make_on_ray(missing)
        with contextlib.closing(made):  # stops the scripts if this is stopped
            for run, error in made:
                results.collect(suite, folders)
                say(f"{run.name} {error or 'done'}")
                failed += [f"{run.name} {error}"] * bool(error)
    if failed:
        raise BenchmarkError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")


def say(text: str) -> None:
    """Print a line with the time; whoever read this may have gone, the runs go on."""
    with contextlib.suppress(BrokenPipeError):
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


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
                "Correct the text in the suite, or change this line of the script back."
            )
        text = text[: found[0].start()] + new + text[found[0].end() :]
    return text


def nearest(text: str, old: str) -> str:
    """The line of a script that is most like the longest of a text that it lacks, for a message."""
    lines, longest = [x.strip() for x in text.splitlines()], max(old.splitlines(), key=len)
    found = difflib.get_close_matches(longest.strip(), lines, n=1, cutoff=0.4)
    return "".join(f"The closest line is {lines.index(x) + 1}: {x}\n" for x in found)


def source(run: Run) -> str:
    """Text of a run's script in its commit, or on disk, or a BenchmarkError."""
    name = run.script
    text = text_on_disk(name) if run.on_disk else source_at(run.about["commit"], name)
    return changed(text, run.suite.variants[run.variant].replaced)


def variables(run: Run) -> dict[str, str]:
    """For a script: where it finds modules, those next to it or the Python files of its commit."""
    if run.on_disk:
        return {"PYTHONPATH": python_path(Path(run.script).parent)}
    commit, trees = note(run)["commit"], run.folders.runs.absolute() / "trees"
    with lock(trees / "lock", wait=True), tempfile.TemporaryDirectory(dir=trees) as new:
        if not (trees / commit).exists():
            git("archive", "--output", f"{new}/files.tar", commit, "*.py")
            shutil.unpack_archive(f"{new}/files.tar", f"{new}/files")
            os.replace(f"{new}/files", trees / commit)
    return {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": our_path(trees / commit)}


def our_path(folder: Path) -> str:
    """Where our scripts find each other, below a folder."""
    return f"{folder}{os.pathsep}{folder / 'benchmark/paper/baselines'}"


def start(folder: Path, words: list[str], threads: int = 1, **variables: str) -> subprocess.Popen:
    """Start Python in a folder."""
    known = dict.fromkeys(THREADS, str(threads))
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


def outcome(process: subprocess.Popen, seconds: float | None = None) -> int:
    """The exit code of a process, which ends if this is interrupted or takes longer."""
    try:
        return process.wait(seconds)
    finally:  # Ctrl-C does not reach it
        process.kill()
        process.wait()


def printed(folder: Path) -> str:
    """What processes in this folder have printed; each state of a progress bar is a line."""
    return (folder / "output.txt").read_text(errors="replace")


def last_line(folder: Path) -> str:
    """The last line that a process in this folder printed, without its progress bar.

    A mistake on the command line is shown in a box. Of a box, this is the text above its rule.
    """
    text = printed(folder).strip()
    if text.endswith("╯"):
        lines = [x.strip("│ ") for x in text[text.rindex("╭") :].splitlines()[1:-1]]
        return " ".join(itertools.takewhile(lambda x: not x.startswith("──"), lines))
    *_, last = ["no word", *text.splitlines()]
    return re.sub(r".*\d+/\d+ \[.*?\]", "", last).strip() or last


def progress(folder: Path) -> tuple[int, str]:
    """How many iterations the script in a folder has made; they, its return and the time left."""
    found = BAR.findall(printed(folder))
    if not found:
        return 0, "starting"
    share, made, total, left, about = found[-1]
    parts = [f"{share} %", f"iteration {made} of {total}", about, f"{left} left"]
    return int(made), ", ".join(filter(None, parts))


# --- Making runs ---


def make(runs: list[Run], workers: int) -> Iterator[tuple[Run, str]]:
    """Make runs, so many at a time; yields each that has ended and what went wrong, if anything.

    The first one compiles. The others wait until it has made an iteration (or for two minutes,
    since not every script shows that), and take what it has compiled from the disk.
    """
    ended = [x for x in runs if has_ended(x)]  # without a result: it could not be read, or not yet
    for run in ended:
        yield run, finish(run, None)
    waiting, working, ready = [x for x in runs if x not in ended], {}, False
    begun = shown = time.monotonic()
    try:
        while waiting or working:
            if waiting and len(working) < (workers if ready else 1):
                run = waiting.pop(0)
                process = begin(run)
                working[process.pid] = run, process
                continue
            pid, status, used = os.wait4(-1, os.WNOHANG)  # whichever ends first
            if not pid:
                time.sleep(0.05)
                now = time.monotonic()
                if not ready or now - shown > PACE:
                    states = {x.name: progress(x.folder) for x, _ in working.values()}
                    ready |= any(made for made, _ in states.values()) or now - begun > FIRST
                if now - shown > PACE:
                    shown = now
                    for name, (_, state) in states.items():
                        say(f"{name}: {state}")
                continue
            run, process = working.pop(pid)
            process.returncode = code = os.waitstatus_to_exitcode(status)
            if code == 2 and not ready and not run.begun:
                reason = last_line(run.folder).removeprefix("Error: ")
                raise BenchmarkError(f"{Path(run.script).name} does not start: {reason}")
            ready = True
            if code:
                yield run, f"ended with exit code {code}: {last_line(run.folder)}"
            else:
                (run.folder / ENDED).touch()
                yield run, finish(run, used)
    finally:  # some still work if this is to stop
        for _, process in working.values():
            process.terminate()
            process.wait()


def has_ended(run: Run) -> bool:
    """Whether the script of a run has ended well. What it has left is never deleted."""
    return (run.folder / ENDED).exists() or (run.log / "results.json").exists()


def begin(run: Run) -> subprocess.Popen:
    """Start a run, or continue it with the script that began it."""
    begun = run.begun
    script = as_it_was(run) if run.on_disk else Path(Path(run.script).name)
    named = ["--run-name", "run"] if "--run-name" in run.takes else []
    flags = ["--resume", "runs/run"] if begun else [*run.flags, *named]
    if not begun:
        shutil.rmtree(run.folder, ignore_errors=True)  # of a run that has not ended
        run.folder.mkdir(parents=True)
        own = {"environment": run.environment, "seed": run.seed, "script": run.script}
        write_text(run.folder / "note.json", json.dumps(run.about | own))
        if not run.on_disk:
            write_text(run.folder / script, source(run))
    say(f"{run.name} {'continues' if begun else 'starts'}")
    return start(run.folder, [str(script), *flags], **variables(run))


def as_it_was(run: Run) -> Path:
    """The script of `seeds` itself, since it may read files next to it; if it was edited meanwhile,
    a new file next to it with the text of before."""
    path, text = Path(run.script), text_on_disk(run.script)  # read before the first run
    if path.read_text() == text:
        return path
    before = path.with_name(f".{path.stem}-{run.about['sha256'][:8]}.py")
    write_text(before, text)
    say(f"{path.name} has changed since then: {run.name} runs {before.name}, its earlier version")
    return before


def note(run: Run) -> dict[str, Any]:
    """What a run was begun with: the version of its script, and more by `seeds`."""
    return json.loads((run.folder / "note.json").read_text())


def finish(run: Run, used: Any) -> str:
    """Write the result of a run whose script has ended; returns what went wrong, if anything.

    Args:
        used: by the script, a `resource.struct_rusage`; None if nobody knows.
    """
    suite, seconds = run.suite, used and used.ru_utime + used.ru_stime
    try:
        if (run.log / "results.json").exists():
            facts, curve = record.summarize_stages(run.log, seconds, suite.points)
        elif logs.has_our_checkpoint(run.log):
            facts, curve = record.summarize_steps(run.log, suite.total_timesteps, suite.points)
            if suite.total_timesteps is None and facts["episodes"]:  # of `seeds`: it may be short
                facts["scores"] = logs.read(run.log).scores
        else:
            facts, curve = logs.summarize(run.log, seconds)
        if suite.evaluated:
            words = ["-P", str(EVALUATE), Path(run.script).name]  # -P: not our `statistics`
            if outcome(start(run.folder, words, **variables(run))):
                return f"could not be evaluated: {last_line(run.folder)}"
            facts["evaluation"] = json.loads((run.log / "evaluation.json").read_text())
    except Exception as error:  # whatever a script can leave; the other runs go on
        return f"{str(error) or repr(error)}; delete {run.folder} to run it again"
    about = {name: getattr(run, name) for name in ("environment", "variant", "seed", "script")}
    about |= {"flags": " ".join(run.flags)} | note(run)
    about["peak_mib"] = used and used.ru_maxrss // 1024  # Linux counts KiB
    content = {"record": about | machine() | facts, "curve": curve.to_dict("list")}
    write_text(run.folder / "result.json", json.dumps(content, ensure_ascii=False))
    return ""


def make_on_ray(runs: list[Run]) -> Iterator[tuple[Run, str]]:
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
        lambda run: next(make([run], 1))[1]
    )
    waiting = {task.remote(run): run for run in runs}
    try:
        while waiting:
            (ended,), _ = ray.wait([*waiting])
            try:
                error = ray.get(ended)
            except ray.exceptions.RayError as reason:  # it has many lines
                error = str(reason).splitlines()[-1]
            yield waiting.pop(ended), error
    finally:
        ray.shutdown()  # ends the scripts too
