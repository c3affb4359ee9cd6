"""Fixtures of tests that start commands in processes of their own, or draw figures."""

import contextlib
import functools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import scipy.stats  # noqa: F401  # or each forked command would import it, in two seconds

from benchmark.__main__ import main
from benchmark.lab import logs, plots, record

RAY = SimpleNamespace(
    exceptions=SimpleNamespace(RayError=RuntimeError),
    init=lambda *_, **__: None,
    remote=lambda **_: lambda call: SimpleNamespace(remote=lambda x: functools.partial(call, x)),
    wait=lambda references: (references[:1], references[1:]),
    get=lambda reference: reference(),
    shutdown=lambda: print("shut down"),
)


class Forked:
    """Commands in a forked process, so that nothing has to be imported again."""

    def __init__(self):
        self.processes, self.runs = [], Path()

    def start(self, *words, hold="", crash=""):
        """Start a command; HOLD and CRASH are for `stand_in.py`."""

        def child():
            os.environ.update({"HOLD": hold, "CRASH": crash, "OMP_NUM_THREADS": "7"})
            with (
                open("said.txt", "w") as file,
                contextlib.redirect_stdout(file),
                contextlib.redirect_stderr(file),
            ):
                main([*map(str, words)])

        self.processes.append(multiprocessing.get_context("fork").Process(target=child))
        self.processes[-1].start()
        return self.processes[-1]

    def run(self, *words, code=0, process=None, **more):
        """What a command says until it ends."""
        process = process or self.start(*words, **more)
        process.join(300)
        said = Path("said.txt").read_text()
        assert process.exitcode == code, said
        return said

    def lines(self, name, file):
        """Those of a file of a run."""
        path = self.runs / name / file
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, name):
        """First iteration and process of each start of a run, with one thread."""
        rows = [x.split() for x in self.lines(name, "starts.txt")]
        assert all(threads == "1" for *_, threads in rows)
        return {int(first): int(process) for first, process, _ in rows}

    def start_until(self, iteration, *words, names, **more):
        """Start a command; when its runs of these names wait, return it and the first script."""
        process = self.start(*words, hold=f"{' '.join(names)} {iteration}", **more)
        while any(
            not self.starts(x) or len(self.lines(x, "iterations.txt")) < iteration for x in names
        ):
            assert process.is_alive(), self.run(process=process)
            time.sleep(0.005)
        return process, self.starts(names[0])[1]


@pytest.fixture
def forked(monkeypatch):
    """See above."""
    monkeypatch.setitem(sys.modules, "ray", RAY)
    for module in (record, logs):
        monkeypatch.setattr(module, "read_checkpoint", lambda path: json.loads(path.read_text()))
    forked = Forked()
    yield forked
    for process in forked.processes:
        process.kill()
        process.join()


@pytest.fixture
def drawn():
    """For tests of commands whose figures matter."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """In other tests commands draw nothing, because a figure takes half a second."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "try_to_save", lambda make, path: str(path))
