"""What a number must carry to be repeated: commit, versions, processor."""

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Where a script names modules: lines that import, and texts as in --make my_robots:make.
NAMING = re.compile(r"^ *(?:import|from) .*|[\w.]+:[A-Za-z_]", re.MULTILINE)
# Packages whose version can change a result.
PACKAGES = ("ale-py", "gymnasium", "mujoco", "numpy", "sb3-contrib", "stable-baselines3", "torch")


class BenchmarkError(Exception):
    """What was asked for cannot be done; the message is one sentence for the person who asked."""


def git(*arguments: str, place: Path | None = None) -> str:
    """Output of a git command in this repository or another, or a BenchmarkError if it fails."""
    found = subprocess.run(["git", *arguments], cwd=place or ROOT, capture_output=True, text=True)
    if found.returncode:
        reason, *_ = [*found.stderr.strip().splitlines(), "failed"]
        raise BenchmarkError(f"git {' '.join(arguments)}: {reason}.")
    return found.stdout


def commit_named(name: str) -> str:
    """The full name of a commit."""
    return git("rev-parse", "--verify", f"{name}^{{commit}}").strip()


@functools.cache
def source_at(commit: str, script: str) -> str:
    """Text of a script as it is in a commit."""
    return git("show", f"{commit}:{script}")


def version_on_disk(path: Path) -> dict[str, str | None]:
    """Hash of a file, and the last commit of its repository if the file is as it is there."""
    about = {"sha256": hash_of(path), "commit": None}
    with contextlib.suppress(BenchmarkError, OSError):  # not in a repository; no git
        if git("show", f"HEAD:./{path.name}", place=path.parent) == path.read_text():
            about["commit"] = git("rev-parse", "HEAD", place=path.parent).strip()
    return about


def hash_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_named(script: Path, words: str, folders: Iterable[str]) -> dict[Path, str]:
    """Hashes of the Python files in some folders that a script, these words, or such a file name.

    That is what the script may import, without installed packages; of a package it is all.
    """
    texts, seen = [script.read_text(errors="replace"), words], {script.stem}
    found: dict[Path, str] = {}
    while texts:
        places = " ".join(NAMING.findall(texts.pop()))
        for name in {*re.findall(r"\w+", places)} - seen:
            seen.add(name)
            for folder in map(Path, folders):
                for path in (folder / f"{name}.py", *(folder / name).rglob("*.py")):
                    if path.is_file():
                        found[path] = hash_of(path)
                        texts.append(path.read_text(errors="replace"))
    return dict(sorted(found.items()))


def edited(hashes: dict[Path, str]) -> str:
    """The name of the first of some files that is not as it was; empty if all are."""
    return next((x.name for x, y in hashes.items() if not x.exists() or hash_of(x) != y), "")


def processor() -> str:
    """Model name of the processor; trajectories depend on its vector instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    widest = next((x for x in ("avx512f", "avx2") if re.search(rf"\b{x}\b", text)), "no avx2")
    return f"{model[1] if model else platform.machine()} ({widest})"


def machine() -> dict[str, Any]:
    """Versions of Python and the installed ones of `PACKAGES`, and the processor."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"versions": versions, "processor": processor()}
