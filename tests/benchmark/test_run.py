"""Running suites: interruption of every kind neither repeats nor loses a run.

The benchmark works in a repository of its own, whose script is `stand_in.py`.
"""

import dataclasses
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmark.evidence.definitions import Variant
from benchmark.evidence.suites import SUITES
from benchmark.lab import provenance, results
from benchmark.lab.definitions import Folders

FILES = {
    "stand_in.py": Path(__file__).with_name("stand_in.py").read_text(),
    "benchmark/evidence/baselines/method.py": "import stand_in",
}
A1, A2, B1 = NAMES = ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1")  # made in the order A1, B1, A2


class Bench:
    """A repository in which the benchmark runs a suite that has taken the name of `smoke`."""

    def __init__(self, forked, folder):
        self.forked, self.starts, self.lines = forked, forked.starts, forked.lines
        self.folders = Folders(folder / "results", folder / "runs")
        forked.runs = self.folders.runs / "smoke"
        self.suite({"A-v1": (1, 2), "B-v1": (1,)})
        subprocess.run(["git", "init", "-q"], check=True)
        self.old = self.commit(FILES)

    def suite(self, environments, script="stand_in.py", total_timesteps=2000, **more):
        more |= {"environments": environments, "total_timesteps": total_timesteps}
        more["variants"] = {"": Variant(script)}
        SUITES["smoke"] = dataclasses.replace(SUITES["smoke"], **more)

    def commit(self, files):
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
        line = "git add *.py benchmark; git -c user.name=x -c user.email=x@x commit -qm x"
        subprocess.run(line, shell=True, check=True)
        return provenance.commit_named("HEAD")

    def words(self, *words, command="run"):
        places = ["--results", self.folders.results, "--runs", self.folders.runs]
        return [command, "smoke", *words, *places]

    def run(self, *words, command="run", **more):
        return self.forked.run(*self.words(*words, command=command), **more)

    def start_until(self, iteration, *words, names=(A1,), **more):
        return self.forked.start_until(iteration, *self.words(*words), names=names, **more)

    def found(self):
        """Record and curve of each finished run."""
        records, path = results.done("smoke", self.folders), self.folders.results / "smoke.csv"
        return [(x, results.Result(x, path).curve) for x in records.values()]

    def check_complete(self):
        """Every run has one result with every iteration exactly once."""
        found = [(x["steps"], x["episodes"], x["score"], len(y)) for x, y in self.found()]
        assert found == [(2000, 20, 10.5 * x["seed"], 20) for x, _ in self.found()]
        assert len(found) == 3


@pytest.fixture
def bench(forked, tmp_path, monkeypatch):
    monkeypatch.setitem(SUITES, "smoke", SUITES["smoke"])
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    return Bench(forked, tmp_path)


def test_a_finished_suite_is_not_run_again(bench):
    bench.run("--workers", "1")
    bench.check_complete()
    shutil.rmtree(bench.folders.results)  # as if it had been killed before it collects
    assert "3 runs, 3 of them done before." in bench.run()
    bench.check_complete()
    assert [[*bench.starts(x)] for x in NAMES] == [[1]] * 3
    made, _ = bench.found()[0]
    assert made["commit"] == bench.old and made["settings"] == {"total_timesteps": 2000}
    assert made["hours"] == pytest.approx(2000 / 100 / 3600, abs=1e-6) and made["peak_mib"] > 5


def test_benchmark_and_script_are_killed(bench):
    process, script = bench.start_until(7)
    for pid in (process.pid, script):
        os.kill(pid, signal.SIGKILL)
    process.join()
    while Path(f"/proc/{script}").exists():  # it holds the lock
        time.sleep(0.01)
    (bench.forked.runs / A1 / "starts.txt").unlink()
    bench.run()
    assert [*bench.starts(A1)] == [6]
    bench.check_complete()


@pytest.mark.slow
def test_one_benchmark_runs_a_suite_and_a_script_that_outlives_it_is_not_disturbed(bench):
    process, script = bench.start_until(2, "--only", A1)
    for _ in range(2):
        assert "Error: smoke is being run" in bench.run(code=2)
        process.kill()
        process.join()
    (bench.forked.runs / A1 / "release").touch()
    while Path(f"/proc/{script}").exists():
        time.sleep(0.01)
    bench.run()
    assert [*bench.starts(A1)] == [1, 21]  # it has left no result: it is asked once more
    bench.check_complete()


def test_a_begun_run_keeps_its_script_and_a_new_one_may_have_an_older(bench):
    process, _ = bench.start_until(7, "--only", A1)
    process.terminate()
    bench.run(process=process, code=130)
    bench.commit({"stand_in.py": "raise SystemExit('Error: a newer script')"})
    assert bench.run(code=2).count("exit code 1: Error: a newer script") == 4  # and at the end
    assert bench.found()[0][0]["commit"] == bench.old
    bench.suite({"0-v1": (1,)}, "benchmark/evidence/baselines/method.py")
    bench.run("--commit", bench.old)  # with what it imports
    assert bench.found()[0][0]["score"] == 10.5


def test_weights_of_language_models_go_once_results_are_kept(bench):
    bench.suite({"A-v1": (1, 2)}, keeps_weights=False)
    process, _ = bench.start_until(7, "--only", A1)
    process.terminate()
    bench.run(process=process, code=130)
    folder = bench.forked.runs / A1 / "runs" / "run"
    assert (folder / "checkpoint.pt").exists()
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").touch()
    bench.run()
    assert not {".pt", ".safetensors"} & {x.suffix for x in bench.forked.runs.rglob("*")}
    assert [x["score"] for x, _ in bench.found()] == [10.5, 21]
    assert "2 of them done before." in bench.run()


@pytest.mark.slow
def test_an_interrupted_run_of_rlhf_begins_anew_and_one_that_outlived_us_is_kept(bench):
    bench.suite({"A-v1": (1,)}, total_timesteps=None)
    process, _ = bench.start_until(7)
    process.terminate()
    bench.run(process=process, code=130)
    bench.run()
    ((made, curve),) = bench.found()
    assert [*bench.starts(A1)] == [1] and made["hours"] > 0
    shutil.rmtree(bench.folders.results)
    (bench.forked.runs / A1 / "results.json").unlink()
    bench.run()
    ((made, curve),) = bench.found()
    assert len(bench.lines(A1, "iterations.txt")) == 20
    assert made["score"] == 1.5 and made["hours"] is None
    assert curve[["step", "kl"]].values.tolist() == [[x, 2] for x in range(1, 21)]


@pytest.mark.slow
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
    shutil.rmtree(bench.folders.runs)
    bench.suite({"C-v1": (1,)})
    bench.run()
    assert [x["environment"] for x, _ in bench.found()] == ["A-v1", "A-v1", "B-v1", "C-v1"]
