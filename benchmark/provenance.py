"""What a number must carry to be repeated: commit, versions, processor."""

import contextlib
import functools
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Packages whose version can change a result.
PACKAGES = ("ale-py", "gymnasium", "mujoco", "numpy", "sb3-contrib", "stable-baselines3", "torch")

# One thread per process: a second one gains nothing on networks of this size and, being shared
# between runs, would make their times depend on each other.
THREADS = {
    f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")
}


class BenchmarkError(Exception):
    """What was asked for cannot be done; the message is one sentence for the person who asked."""


def git(*arguments: str) -> str:
    """Output of a git command in this repository, or a BenchmarkError if it fails."""
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            start_new_session=True,  # Ctrl-C is not for git
        ).stdout
    except FileNotFoundError as error:
        raise BenchmarkError("git is needed, to name the commit of each result.") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[0] if error.stderr.strip() else "failed"
        raise BenchmarkError(f"git {' '.join(arguments)}: {reason}.") from error


def commit_named(name: str) -> str:
    """The full name of a commit."""
    return git("rev-parse", "--verify", f"{name}^{{commit}}").strip()


def source_at(commit: str, script: str) -> str:
    """Text of a script as it is in a commit."""
    return git("show", f"{commit}:{script}")


@functools.cache
def sources_at(commit: str, script: str) -> dict[str, str]:
    """Texts, by file name, of a script and of those beside it or at the top that it imports."""
    places = git("ls-tree", "--name-only", commit, "./", f"{Path(script).parent}/").split()
    known, text = {Path(x).stem: x for x in places if x.endswith(".py")}, source_at(commit, script)
    found = {Path(script).name: text}
    for name in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE):
        found |= sources_at(commit, known[name]) if name in known else {}
    return found


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
