"""Running suites: interruption of every kind neither repeats nor loses a run.

The tool runs unchanged in a repository of its own, whose script is `stand_in.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark import results, run, suites
from benchmark.definitions import Folders
from benchmark.provenance import ROOT

FILES = {
    "stand_in.py": (Path(__file__).parent / "stand_in.py").read_text(),
    "benchmark/rivals/rival.py": "import json\nfrom beside import x",
    "benchmark/rivals/beside.py": "import stand_in\nx = 0",
    "benchmark/walk.py": """import json, pathlib
played = {"returns": [1.23456], "lengths": [100], "speeds": [0.123456]}
pathlib.Path("runs/run/walk.json").write_text(json.dumps(played))""",
    "torch.py": "import json\ndef load(path, **_): return json.loads(path.read_text())",
    "ray.py": """import functools, types
exceptions = types.SimpleNamespace(RayError=RuntimeError)
def init(**options): print(options["address"])
def remote(**options):
    return lambda call: types.SimpleNamespace(remote=lambda *x: functools.partial(call, *x))
def wait(references): return references[:1], references[1:]
def get(reference): return reference()
def shutdown(): print("shut down")""",
}
SUITES = """
import dataclasses
def suite(name, variant, environments={"A-v1": (1,)}, **more):
    own = {"name": name, "variants": {"": variant}, "environments": environments}
    SUITES[name] = dataclasses.replace(SUITES["smoke"], **{**own, "total_timesteps": 2000, **more})
suite("tiny", Variant("stand_in.py"), {"A-v1": (1, 2), "B-v1": (1,)})
suite("rival", Variant("benchmark/rivals/rival.py"), evaluated=True)
suite("bug", Variant("stand_in.py", replaced=(("1.0 * iter", "2.0 * iter"),)), points=20)
for name, checkpoint in (("rlhf-long", "ppo/checkpoint.pt"), ("rlhf-short", "results.json")):
    suite(name, Variant("stand_in.py"), total_timesteps=None, checkpoint=checkpoint)
"""
A1, A2, B1 = NAMES = ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1")  # made in the order A1, B1, A2


class Bench:
    """A repository in which the benchmark is run."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        ignored = shutil.ignore_patterns("results", "figures", "reference", "__pycache__")
        shutil.copytree(ROOT / "benchmark", folder / "benchmark", ignore=ignored)
        with (folder / "benchmark/suites.py").open("a") as file:
            file.write(SUITES)
        self.git("init", "-q")
        self.old = self.commit(FILES)

    def git(self, *arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments]
        return subprocess.check_output(command, cwd=self.folder, text=True).strip()

    def commit(self, files):
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", "x")
        return self.git("rev-parse", "HEAD")

    def start(self, *arguments, pace=0, crash=""):
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmark", *arguments],
                cwd=self.folder,
                env={**os.environ, "PACE": str(pace), "CRASH": crash},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self.processes[-1]

    def run(self, *arguments, code=0, process=None):
        """What a benchmark says until it ends."""
        process = process or self.start("run", *arguments)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == code, output
        return output

    def lines(self, name, file, suite="tiny"):
        path = self.folder / "runs/benchmark" / suite / name / file
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, name, suite="tiny"):
        """First iteration and process of each start of a run."""
        return {int(x.split()[1]): int(x.split()[0]) for x in self.lines(name, "starts.txt", suite)}

    def start_until(self, iteration, *arguments, suite="tiny", **options):
        """Start the benchmark and wait until its first run is there; both processes."""
        process = self.start("run", suite, *arguments, **{"pace": 0.05, **options})
        self.wait_for(A1, iteration, suite)
        return process, self.starts(A1, suite)[1]

    def wait_for(self, name, iteration, suite="tiny"):
        while len(self.lines(name, "iterations.txt", suite)) < iteration:
            time.sleep(0.005)

    def records(self, suite="tiny"):
        lines = results.lines_of(self.folder / f"benchmark/results/{suite}.jsonl")
        return {f"{x['environment']}/seed{x['seed']}": x for x in lines}

    def curves(self, suite="tiny"):
        return results.table_of(self.folder / f"benchmark/results/{suite}.csv")

    def check_complete(self):
        """Every run has one result with every iteration exactly once."""
        found = [(x["steps"], x["episodes"], x["score"]) for x in self.records().values()]
        assert tuple(self.records()) == NAMES and found == 3 * [(2000, 20, 10.5)]
        assert len(self.curves()) == self.curves()["episodes"].sum() == 3 * 20


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    for process in bench.processes:
        process.kill()
        process.wait()


def test_a_finished_suite_is_not_run_again(bench):
    assert "A-v1/seed2 done" in bench.run("tiny")
    bench.check_complete()
    shutil.rmtree(bench.folder / "benchmark/results")  # as if it had been killed before it collects
    assert "3 runs, 3 of them done before." in bench.run("tiny")
    bench.check_complete()
    assert all(len(bench.lines(x, "starts.txt")) == 1 for x in NAMES)
    record = bench.records()[A1]
    assert record["commit"] == bench.old and record["settings"] == {"seed": "1"}
    assert record["hours"] == pytest.approx(2000 / 100 / 3600, abs=1e-6)
    assert 150 < record["peak_mib"] < 190


@pytest.mark.parametrize("cluster", [("--workers", "1"), ("--cluster", "ray")])
def test_a_run_that_fails_is_reported_and_continued_from_its_checkpoint(bench, cluster):
    process, script = bench.start_until(7, *cluster, crash="2")
    os.kill(script, signal.SIGKILL)
    output = bench.run(process=process, code=2)
    assert "A-v1/seed1 ended with exit code -9" in output
    assert "A-v1/seed2 ended with exit code 1: Error: out of luck" in output
    assert "1 of 3 runs done." in output and ("shut down" in output) == ("ray" in cluster)
    listed = bench.run(process=bench.start("list", "tiny")).splitlines()
    assert sorted(x.split()[:2] for x in listed) == [[A1, "begun"], [A2, "begun"], [B1, "done"]]
    assert f"A-v1/seed1 continues, commit {bench.old[:7]}" in bench.run("tiny")
    assert [[*bench.starts(x)] for x in NAMES] == [[1, 6], [1, 6], [1]]
    bench.check_complete()


@pytest.mark.parametrize(("iteration", "again"), [(2, [1]), (7, [6])])
def test_benchmark_and_script_are_killed(bench, iteration, again):
    process, script = bench.start_until(iteration, "--workers", "1")
    for pid in (process.pid, script):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    (bench.folder / "runs/benchmark/tiny" / A1 / "starts.txt").unlink()
    bench.run("tiny")
    assert [*bench.starts(A1)] == again
    bench.check_complete()


def test_one_benchmark_runs_a_suite_and_a_script_that_outlives_it_is_not_disturbed(bench):
    process, script = bench.start_until(2, "--only", A1)
    os.kill(script, signal.SIGSTOP)
    assert "Error: tiny is being run" in bench.run("tiny", code=2)
    process.kill()
    process.wait()
    assert "Error: tiny is being run" in bench.run("tiny", code=2)
    os.kill(script, signal.SIGCONT)
    while Path(f"/proc/{script}").exists():
        time.sleep(0.01)
    bench.run("tiny")
    assert [*bench.starts(A1)] == [1, 21]  # it has left no result: it is asked once more
    bench.check_complete()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_benchmark_stops_its_scripts(bench, number):
    process, script = bench.start_until(6, pace=0.1)
    bench.wait_for(B1, 1)
    process.send_signal(number)
    bench.run(process=process, code=130)
    assert not any(Path(f"/proc/{x}").exists() for x in (script, bench.starts(B1)[1]))
    assert len(bench.lines(A1, "iterations.txt")) < 20  # nor has anybody waited for its end
    bench.run("tiny")
    bench.check_complete()


def test_a_suite_goes_on_when_nobody_reads_its_lines_any_more(bench):
    process = bench.start("run", "tiny", "--workers", "1")
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 0
    bench.check_complete()


def test_a_begun_run_keeps_its_script_and_a_new_one_may_have_an_older(bench):
    bench.start_until(7, "--only", A1)[0].terminate()
    bench.run(process=bench.processes[-1], code=130)
    bench.commit({"stand_in.py": "raise SystemExit('Error: a newer script')"})
    assert bench.run("tiny", code=2).count("exit code 1: Error: a newer script") == 2
    assert bench.records()[A1]["commit"] == bench.old
    bench.run("rival", "--commit", bench.old)  # with what it imports; then its policy is played
    record = bench.records("rival")[A1]
    assert record["score"] == 10.5
    assert record["walk"] == {"returns": [1.235], "lengths": [100], "speeds": [0.1235]}


def test_a_bug_is_run_in_a_changed_copy_and_its_curve_has_all_points(bench):
    bench.commit({"stand_in.py": "1.0 * iteration\n" * 2})
    assert "has this text 2 times: 1.0 * iter" in bench.run("bug", code=2)
    assert not (bench.folder / "runs").exists()  # nothing has begun
    bench.run("bug", "--commit", bench.old)
    assert bench.records("bug")[A1]["score"] == 2 * 10.5
    assert bench.curves("bug")["step"].tolist() == [*range(100, 2001, 100)]


@pytest.mark.parametrize("suite", ["rlhf-long", "rlhf-short"])
def test_an_interrupted_run_of_rlhf_goes_on_and_a_short_one_begins_anew(bench, suite):
    process, _ = bench.start_until(7, suite=suite)
    process.send_signal(signal.SIGINT)
    bench.run(process=process, code=130)
    bench.run(suite)
    record, resumed = bench.records(suite)[A1], suite == "rlhf-long"
    assert [*bench.starts(A1, suite)] == ([1, 6] if resumed else [1])
    assert record["score"] == 1.5 and (record["hours"] is None) == resumed
    assert bench.curves(suite)[["step", "kl"]].values.tolist() == [[x, 2] for x in range(1, 21)]


def test_a_writer_that_is_killed_loses_nothing(tmp_path, monkeypatch):
    """Between the curves and the records, or with results that only it has seen."""
    folders = Folders(tmp_path / "results", tmp_path / "runs")
    suite, write = suites.SUITES["smoke"], results.write_text

    def killed(path, text):
        if path.suffix == ".jsonl":
            raise InterruptedError
        write(path, text)

    for seed in (1, 2):
        made = run.Run(suite, "InvertedPendulum-v4", "", seed, folders)
        record = {"environment": made.environment, "variant": "", "seed": seed}
        made.folder.mkdir(parents=True)
        content = results.json.dumps({"record": record, "curve": {"step": [1, 2]}})
        (made.folder / "result.json").write_text(content)
        with monkeypatch.context() as patch, pytest.raises(InterruptedError):
            patch.setattr(results, "write_text", killed)
            results.collect(suite, folders)
        assert len(results.done("smoke", folders)) == seed - 1
        results.collect(suite, folders)
        (made.folder / "result.json").unlink()  # as in a fresh checkout
    (found,) = results.by_environment("smoke", "", folders).values()
    assert [len(x.curve) for x in found] == [2, 2]
