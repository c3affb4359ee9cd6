"""Running suites: interruption of every kind neither repeats nor loses a run.

The benchmark works in a repository of its own, whose script is `stand_in.py`. It is forked from the
tests, so that nothing has to be imported again.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark import provenance, record, results, run
from benchmark.__main__ import main
from benchmark.definitions import Folders, Variant
from benchmark.suites import SUITES

FILES = {
    "stand_in.py": (Path(__file__).with_name("stand_in.py")).read_text(),
    "benchmark/baselines/rival.py": "import json\nfrom beside import x",
    "benchmark/baselines/beside.py": "import stand_in\nx = 0",
}
EVALUATE = (
    'open("runs/run/evaluation.json", "w").write(\'{"returns": [1.23456], "speeds": [0.123456]}\')'
)
RAY = SimpleNamespace(
    exceptions=SimpleNamespace(RayError=RuntimeError),
    init=lambda *_, **__: None,
    remote=lambda **_: lambda call: SimpleNamespace(remote=lambda x: functools.partial(call, x)),
    wait=lambda references, timeout: (references[:1], references[1:]),
    get=lambda reference: reference(),
    shutdown=lambda: print("shut down"),
)
A1, A2, B1 = NAMES = ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1")  # made in the order A1, B1, A2


class Bench:
    """A repository in which the benchmark runs a suite that has taken the name of `smoke`."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        self.folders = Folders(folder / "results", folder / "runs")
        self.suite({"A-v1": (1, 2), "B-v1": (1,)})
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        self.old = self.commit(FILES)

    def suite(self, environments, script="stand_in.py", replaced=(), total_timesteps=2000, **more):
        more |= {"environments": environments, "total_timesteps": total_timesteps}
        variants = {"": Variant(script, replaced=replaced)}
        SUITES["smoke"] = dataclasses.replace(SUITES["smoke"], variants=variants, **more)

    def commit(self, files):
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        line = "git add *.py benchmark; git -c user.name=x -c user.email=x@x commit -qm x"
        subprocess.run(line, shell=True, cwd=self.folder, check=True)
        return provenance.commit_named("HEAD")

    def start(self, *words, command="run", pace="0", crash=""):
        def child():
            os.environ.update({"PACE": pace, "CRASH": crash})
            places = ["--results", str(self.folders.results), "--runs", str(self.folders.runs)]
            with (
                (self.folder / "said.txt").open("w") as file,
                contextlib.redirect_stdout(file),
                contextlib.redirect_stderr(file),
            ):
                main([command, "smoke", *words, *places])

        self.processes.append(multiprocessing.get_context("fork").Process(target=child))
        self.processes[-1].start()
        return self.processes[-1]

    def run(self, *words, code=0, process=None, **more):
        """What a benchmark says until it ends."""
        process = process or self.start(*words, **more)
        process.join(300)
        said = (self.folder / "said.txt").read_text()
        assert process.exitcode == code, said
        return said

    def lines(self, name, file):
        path = self.folders.runs / "smoke" / name / file
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, name):
        """First iteration and process of each start of a run."""
        return {int(x.split()[1]): int(x.split()[0]) for x in self.lines(name, "starts.txt")}

    def start_until(self, iteration, *words, name=A1, pace="0.03", **more):
        """Start the benchmark and wait until a run is there; both processes."""
        process = self.start(*words, pace=pace, **more)
        while len(self.lines(name, "iterations.txt")) < iteration:
            time.sleep(0.005)
        return process, self.starts(name)[1]

    def found(self):
        """Record and curve of each finished run."""
        records, path = results.done("smoke", self.folders), self.folders.results / "smoke.csv"
        return [(x, results.Result(x, path).curve) for x in records.values()]

    def check_complete(self):
        """Every run has one result with every iteration exactly once."""
        found = [(x["steps"], x["episodes"], x["score"], len(y)) for x, y in self.found()]
        assert found == [(2000, 20, 10.5, 20)] * 3


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setitem(SUITES, "smoke", SUITES["smoke"])
    monkeypatch.setitem(sys.modules, "ray", RAY)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(record, "read_checkpoint", lambda path: json.loads(path.read_text()))
    monkeypatch.setattr(run, "EVALUATE", tmp_path / "evaluate.txt")
    run.EVALUATE.write_text(EVALUATE)
    bench = Bench(tmp_path)
    yield bench
    for process in bench.processes:
        process.kill()
        process.join()


def test_a_finished_suite_is_not_run_again(bench):
    bench.run("--workers", "1")
    bench.check_complete()
    shutil.rmtree(bench.folders.results)  # as if it had been killed before it collects
    assert "3 runs, 3 of them done before." in bench.run()
    bench.check_complete()
    assert [[*bench.starts(x)] for x in NAMES] == [[1]] * 3
    made, _ = bench.found()[0]
    assert made["commit"] == bench.old and made["settings"] == {}
    assert made["hours"] == pytest.approx(2000 / 100 / 3600, abs=1e-6) and made["peak_mib"] > 5


@pytest.mark.parametrize("cluster", [("--workers", "1"), ("--cluster", "ray")])
def test_a_run_that_fails_is_reported_and_continued_from_its_checkpoint(bench, cluster):
    process, script = bench.start_until(7, *cluster, crash="2")
    os.kill(script, signal.SIGKILL)
    said = bench.run(process=process, code=2)
    assert "A-v1/seed1 ended with exit code -9" in said
    assert "A-v1/seed2 ended with exit code 1: Error: out of luck" in said
    assert "1 of 3 runs done." in said and ("shut down" in said) == ("ray" in cluster)
    listed = bench.run(command="list").splitlines()
    assert sorted(x.split()[:2] for x in listed) == [[A1, "begun"], [A2, "begun"], [B1, "done"]]
    assert f"A-v1/seed1 continues, commit {bench.old[:7]}" in bench.run()
    assert [[*bench.starts(x)] for x in NAMES] == [[1, 6], [1, 6], [1]]
    bench.check_complete()


@pytest.mark.parametrize(("iteration", "again"), [(2, [1]), (7, [6])])
def test_benchmark_and_script_are_killed(bench, iteration, again):
    process, script = bench.start_until(iteration, "--workers", "1")
    for pid in (process.pid, script):
        os.kill(pid, signal.SIGKILL)
    process.join()
    (bench.folders.runs / "smoke" / A1 / "starts.txt").unlink()
    bench.run()
    assert [*bench.starts(A1)] == again
    bench.check_complete()


def test_one_benchmark_runs_a_suite_and_a_script_that_outlives_it_is_not_disturbed(bench):
    process, script = bench.start_until(2, "--only", A1)
    os.kill(script, signal.SIGSTOP)
    for _ in range(2):
        assert "Error: smoke is being run" in bench.run(code=2)
        process.kill()
        process.join()
    os.kill(script, signal.SIGCONT)
    while Path(f"/proc/{script}").exists():
        time.sleep(0.01)
    bench.run()
    assert [*bench.starts(A1)] == [1, 21]  # it has left no result: it is asked once more
    bench.check_complete()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_benchmark_stops_its_scripts(bench, number):
    process, _ = bench.start_until(1, name=B1, pace="0.1")
    os.kill(process.pid, number)
    bench.run(process=process, code=130)
    assert not any(Path(f"/proc/{bench.starts(x)[1]}").exists() for x in (A1, B1))
    assert len(bench.lines(A1, "iterations.txt")) < 20  # nor has anybody waited for its end
    bench.run()
    bench.check_complete()


def test_a_begun_run_keeps_its_script_and_a_new_one_may_have_an_older(bench):
    bench.start_until(7, "--only", A1)[0].terminate()
    bench.run(process=bench.processes[-1], code=130)
    bench.commit({"stand_in.py": "raise SystemExit('Error: a newer script')"})
    assert bench.run(code=2).count("exit code 1: Error: a newer script") == 2
    assert bench.found()[0][0]["commit"] == bench.old
    bench.suite({"0-v1": (1,)}, "benchmark/baselines/rival.py", evaluated=True)
    bench.run("--commit", bench.old)  # with what it imports; then its policy is played
    made, _ = bench.found()[0]
    assert made["score"] == 10.5 and made["evaluation"] == {"returns": [1.235], "speeds": [0.1235]}


def test_a_bug_is_run_in_a_changed_copy_and_its_curve_has_all_points(bench):
    bench.suite({"A-v1": (1,)}, replaced=(("1.0 * iter", "2.0 * iter"),), points=20)
    bench.commit({"stand_in.py": "1.0 * iteration\n" * 2})
    assert "has this text 2 times: 1.0 * iter" in bench.run(code=2)
    assert not bench.folders.runs.exists()  # nothing has begun
    bench.run("--commit", bench.old)
    ((made, curve),) = bench.found()
    assert made["score"] == 2 * 10.5 and curve["step"].tolist() == [*range(100, 2001, 100)]


@pytest.mark.parametrize("checkpoint", ["ppo/checkpoint.pt", "results.json"])
def test_an_interrupted_run_of_rlhf_goes_on_and_a_short_one_begins_anew(bench, checkpoint):
    bench.suite({"A-v1": (1,)}, total_timesteps=None, checkpoint=checkpoint)
    bench.start_until(7)[0].terminate()
    bench.run(process=bench.processes[-1], code=130)
    bench.run()
    ((made, curve),), resumed = bench.found(), checkpoint != "results.json"
    assert [*bench.starts(A1)] == ([1, 6] if resumed else [1])
    assert made["score"] == 1.5 and (made["hours"] is None) == resumed
    assert curve[["step", "kl"]].values.tolist() == [[x, 2] for x in range(1, 21)]


def test_a_writer_that_is_killed_loses_nothing(bench, monkeypatch):
    """Between the curves and the records, and what only the committed files know."""
    bench.run("--only", A1)
    shutil.rmtree(bench.folders.runs)  # as in a fresh checkout
    write = results.write_text
    with monkeypatch.context() as patch:
        killed = lambda path, text: os._exit(9) if path.suffix == ".jsonl" else write(path, text)  # noqa: E731
        patch.setattr(results, "write_text", killed)
        bench.run("--workers", "1", code=9)
    assert len(bench.found()) == 1
    bench.run()
    bench.check_complete()
