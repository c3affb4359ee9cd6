"""The runs of suites: a script as it is in a commit, with an environment, a variant and a seed."""

import fnmatch
import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from benchmark.evidence.definitions import Suite
from benchmark.lab import results
from benchmark.lab.definitions import Folders, file_name
from benchmark.lab.provenance import BenchmarkError, git, source_at
from benchmark.lab.results import Key
from benchmark.lab.run import Run, has_checkpoint, has_ended, require_workers, run_missing

# --- Which runs a suite has ---


def select(suite: Suite, seeds: tuple[int, ...] = (), only: str = "*") -> list[Key]:
    """Runs of a suite, seed by seed: with other seeds; those whose name or a part of it fits."""
    keys = [
        (environment, variant, seed)
        for environment in suite.environments
        for variant in suite.variants
        for own in [suite.seeds(environment, variant)]
        for seed in dict.fromkeys(own and (seeds or own))
    ]
    keys = [x for x in keys if fnmatch.filter([name_of(x), *name_of(x).split("/")], only)]
    if not keys:
        raise BenchmarkError(f"No run of {suite.name} matches {only}; see: list {suite.name}.")
    return sorted(keys, key=lambda x: x[2])


def name_of(key: Key) -> str:
    """How a run is called, and the end of its folder's path."""
    environment, variant, seed = key
    return "/".join(filter(None, (file_name(environment), variant, f"seed{seed}")))


def folder_of(suite: Suite, key: Key, folders: Folders) -> Path:
    """Where a run works."""
    return (folders.runs / suite.name / name_of(key)).absolute()


def flags_of(suite: Suite, key: Key) -> list[str]:
    """Those that decide the result of a run."""
    environment, variant, seed = key
    flags = ["--seed", str(seed)]
    if suite.total_timesteps:
        steps = str(suite.total_timesteps)
        flags = ["--env-id", environment, *flags, "--total-timesteps", steps]
    return flags + shlex.split(suite.variants[variant].flags)


def how_complete(suite: Suite, folders: Folders) -> tuple[int, int]:
    """How many of a suite's own runs are done, and how many there are."""
    keys, records = select(suite), results.done(suite.name, folders)
    return sum(key in records for key in keys), len(keys)


# --- Making them ---


def make(suite: Suite, keys: list[Key], folders: Folders, workers: int | None, commit: str) -> None:
    """Make those of some runs of a suite that are missing, as of a commit.

    Args:
        workers: runs at a time on this machine; None for a Ray cluster.

    Raises:
        BenchmarkError: the commit lacks a script, somebody else runs the suite, or runs failed.
    """
    require_workers(workers)
    runs = [run_of(suite, key, folders, commit) for key in keys]
    for known in {run.facts["commit"] for run in runs}:
        make_tree(known, folders)
    run_missing(suite.name, runs, folders, workers)


def run_of(suite: Suite, key: Key, folders: Folders, commit: str) -> Run:
    """A run as of a commit; one that has begun keeps its commit and its script."""
    (environment, variant, seed), made = key, suite.variants[key[1]]
    folder = folder_of(suite, key, folders)
    script = folder / Path(made.script).name
    if has_checkpoint(folder) or has_ended(folder):
        commit = json.loads((folder / "note.json").read_text())["commit"]
        text = script.read_text()
    else:
        text = source_at(commit, made.script)
    flags = flags_of(suite, key)
    about = {"environment": environment, "variant": variant, "seed": seed}
    about |= {"script": made.script, "flags": " ".join(flags), "commit": commit}
    return Run(
        name=name_of(key),
        folder=folder,
        script=script,
        text=text,
        flags=[*flags, "--run-name", "run"],
        resume=["--resume", "runs/run"],
        variables={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tree_of(commit, folders))},
        facts=about,
        keeps_weights=suite.keeps_weights,
    )


def tree_of(commit: str, folders: Folders) -> Path:
    """Where the Python files of a commit are, which its scripts may import."""
    return folders.runs.absolute() / "trees" / commit


def make_tree(commit: str, folders: Folders) -> None:
    """Unpack them, unless that is done."""
    tree = tree_of(commit, folders)
    tree.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(tree.with_name("lock")), tempfile.TemporaryDirectory(dir=tree.parent) as new:
        if not tree.exists():
            git("archive", "--output", f"{new}/files.tar", commit, "*.py")
            shutil.unpack_archive(f"{new}/files.tar", f"{new}/files")
            os.replace(f"{new}/files", tree)
