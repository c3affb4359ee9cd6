"""What the children of this process do and use (Linux)."""

import contextlib
import os
import resource
import subprocess
from pathlib import Path


def process_tree(root: int) -> dict[int, float]:
    """Processor seconds of a process and all its descendants, by process number (Linux).

    Each one's includes its children that have ended. The tree, not the session, because a child may
    begin a session of its own.
    """
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    tree = [root]
    for pid in tree:  # grows while it is read
        tree += [child for child, parent in parents.items() if parent == pid]
    return {pid: seconds[pid] for pid in tree if pid in seconds}


def has_ended(process: subprocess.Popen) -> tuple[bool, resource.struct_rusage]:
    """Whether a process has ended, and then what it used; sets its exit status."""
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if pid:
        process.returncode = os.waitstatus_to_exitcode(status)
    return bool(pid), usage


def send_signal(process: subprocess.Popen, number: int) -> None:
    """Like `Popen.send_signal`, but leave it to `has_ended` to find that the process has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def peak_mib(usage: resource.struct_rusage) -> float:
    """Memory of a process that has ended, or of its largest descendant if that had more."""
    return usage.ru_maxrss / 1024  # Linux counts KiB
