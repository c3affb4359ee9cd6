"""Running suites: interruption of every kind neither repeats nor loses a run.

The tool runs unchanged in a small repository of its own. Its scripts are stand-ins (stand_ins/)
with the interface of ours, which the tests can interrupt at will; its module torch reads their
checkpoints, which are JSON.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark import execute, results, run, suites
from benchmark.definitions import Folders
from benchmark.provenance import ROOT

STAND_INS = Path(__file__).parent / "stand_ins"
WALK = """import json, pathlib
played = {"returns": [1.23456], "lengths": [100], "speeds": [0.123456]}
pathlib.Path("runs/run/walk.json").write_text(json.dumps(played))
"""
NAMES = ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1")

SUITES = """
TINY = {"A-v1": (1, 2), "B-v1": (1,)}, {"": Variant("stand_in.py")}, "scores"
SUITES["tiny"] = Suite("tiny", "nothing", *TINY, total_timesteps=2000)
RIVAL = {"A-v1": (1,)}, {"": Variant("benchmark/rivals/rival.py")}, "scores"
SUITES["rival"] = Suite("rival", "nothing", *RIVAL, total_timesteps=2000, evaluated=True)
BUG = Variant("stand_in.py", replaced=(("1.0 * iteration", "2.0 * iteration"),))
BROKEN = {"A-v1": (1,)}, {"": BUG}, "scores"
SUITES["broken"] = Suite("broken", "nothing", *BROKEN, total_timesteps=2000, points=20)
STAGES = {"reviews": (1,)}, {"": Variant(RLHF, "--compare")}, "models", (), None
SUITES["stages"] = Suite("stages", "nothing", *STAGES, "sft/checkpoint.pt")
SUITES["short"] = Suite("short", "nothing", *STAGES, "results.json")
"""
OWN = {**vars(suites), "SUITES": {}}
exec(SUITES, OWN)
IGNORED = ("results", "figures", "reference", "__pycache__")


class Bench:
    """A repository in which the benchmark is run."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        shutil.copytree(ROOT / "benchmark", folder / "benchmark", ignore=lambda *_: IGNORED)
        self.write("stand_in.py", (STAND_INS / "script.py").read_text())
        self.write("benchmark/rivals/rival.py", "import json\nfrom beside import x")
        self.write("benchmark/rivals/beside.py", "import stand_in\nx = 0")
        self.write("benchmark/walk.py", WALK)
        self.write("ppo_rlhf_toy.py", (STAND_INS / "stages.py").read_text())
        self.write(
            "torch.py", "import json\ndef load(path, **_): return json.loads(path.read_text())"
        )
        with (folder / "benchmark/suites.py").open("a") as file:
            file.write(SUITES)
        path = folder / "benchmark/run.py"
        path.write_text(path.read_text().replace("POLL_SECONDS = 0.2", "POLL_SECONDS = 0.02"))
        self.git("init", "-q")
        self.commit("Stand-ins")

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def git(self, *arguments):
        who = ("-c", "user.name=x", "-c", "user.email=x@x")
        done = subprocess.run(["git", *who, *arguments], cwd=self.folder, capture_output=True)
        return done.stdout.decode().strip()

    def commit(self, message):
        self.git("add", "-A")
        self.git("commit", "-qm", message)
        return self.git("rev-parse", "HEAD")

    def start(self, *arguments, pace=0.01, crash=None):
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmark", *arguments],
            cwd=self.folder,
            env={**os.environ, "PACE": str(pace), "CRASH": str(crash)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def end(self, process, code=0):
        output = process.communicate(timeout=120)[0]
        assert process.returncode == code, output
        return output

    def run(self, *arguments, code=0, **options):
        return self.end(self.start(*arguments, **options), code)

    def lines(self, name, file, suite="tiny"):
        path = self.folder / "runs" / "benchmark" / suite / name / file
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, name):
        """(process, first iteration) of each start of a run."""
        return [tuple(map(int, line.split())) for line in self.lines(name, "starts.txt")]

    def states(self, suite="tiny", only="*"):
        folders = Folders(self.folder / "benchmark/results", self.folder / "runs/benchmark")
        runs = run.select(OWN["SUITES"][suite], folders, only=only)
        return [execute.state(x) for x in runs]

    def wait_for_iteration(self, name, iteration, suite="tiny"):
        deadline = time.monotonic() + 60
        while len(self.lines(name, "iterations.txt", suite)) < iteration:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def start_until(self, name, iteration, *arguments, pace=0.05, suite="tiny"):
        """Start the benchmark and wait until a run is there; its process and the script's."""
        process = self.start("run", suite, *arguments, pace=pace)
        self.wait_for_iteration(name, iteration, suite)
        return process, int(self.lines(name, "starts.txt", suite)[0].split()[0])

    def records(self, suite="tiny"):
        path = self.folder / f"benchmark/results/{suite}.jsonl"
        return {f"{x['environment']}/seed{x['seed']}": x for x in results.lines_of(path)}

    def check_complete(self):
        """Every run has one result with every iteration exactly once."""
        assert tuple(self.records()) == NAMES
        for record in self.records().values():
            assert (record["steps"], record["episodes"], record["score"]) == (2000, 20, 10.5)
        rows = results.table_of(self.folder / "benchmark/results/tiny.csv")
        assert len(rows) == rows["episodes"].sum() == 3 * 20


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    for process in bench.processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_finished_suite_is_not_run_again(bench):
    output = bench.run("run", "tiny")
    bench.check_complete()
    assert "A-v1/seed2 done" in output
    assert "3 runs, 3 of them done before." in bench.run("run", "tiny", pace=0)
    assert all(len(bench.starts(name)) == 1 for name in NAMES)
    listed = bench.run("list", "tiny").splitlines()
    assert sorted(line.split()[:3] for line in listed) == [[x, "done", "python"] for x in NAMES]
    record = bench.records()["A-v1/seed1"]
    assert record["commit"] == bench.git("rev-parse", "HEAD")
    assert record["hours"] == pytest.approx(2000 * (1 / 200 + 1 / 200) / 3600, abs=1e-6)
    # The stand-in holds 80 MiB while it lasts, less than the benchmark with pandas, its parent.
    assert 80 < record["peak_mib"] < 110


def test_a_killed_script_is_continued_from_its_checkpoint(bench):
    process, script = bench.start_until(NAMES[0], 7, "--workers", "1")
    os.kill(script, signal.SIGKILL)
    assert "A-v1/seed1 ended with exit code -9" in bench.end(process, 2)
    assert bench.states() == ["interrupted", "done", "done"]
    assert "A-v1/seed1 continues" in bench.run("run", "tiny", pace=0)
    assert [first for _, first in bench.starts(NAMES[0])] == [1, 6]
    bench.check_complete()


@pytest.mark.parametrize(
    ("iteration", "state", "again"), [(2, "waiting", 1), (7, "interrupted", 6)]
)
def test_benchmark_and_script_killed(bench, iteration, state, again):
    process, script = bench.start_until(NAMES[0], iteration, "--workers", "1")
    for pid in (process.pid, script):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    while bench.states(only=NAMES[0]) == ["running"]:  # until both are gone
        time.sleep(0.01)
    assert bench.states(only=NAMES[0]) == [state]
    bench.run("run", "tiny", pace=0)
    assert [first for _, first in bench.starts(NAMES[0])] == [1, again]
    bench.check_complete()


def test_a_script_outlives_its_killed_benchmark_and_is_not_started_beside_itself(bench):
    process, script = bench.start_until(NAMES[0], 2, "--only", NAMES[0])
    process.kill()
    process.wait()
    os.kill(script, signal.SIGSTOP)  # until the other benchmark has seen it
    try:
        assert bench.states(only=NAMES[0]) == ["running"]
        assert "left to another process" in bench.run("run", "tiny", "--only", NAMES[0])
    finally:
        os.kill(script, signal.SIGCONT)
    bench.wait_for_iteration(NAMES[0], 20)
    while bench.states(only=NAMES[0]) == ["running"]:
        time.sleep(0.1)
    bench.run("run", "tiny", pace=0)  # it has left no result: it is asked once more
    assert [first for _, first in bench.starts(NAMES[0])] == [1, 21]
    bench.check_complete()


@pytest.mark.parametrize("cluster", [(), ("--cluster", "ray")], ids=["local", "ray"])
def test_a_stopped_benchmark_stops_its_scripts(bench, cluster):
    bench.write("ray.py", (STAND_INS / "ray.py").read_text())
    process, _ = bench.start_until(NAMES[0], 6, *cluster, pace=0.1)
    bench.wait_for_iteration(NAMES[2], 1)
    process.send_signal(signal.SIGTERM if cluster else signal.SIGINT)
    bench.end(process, 130)
    scripts = [bench.starts(name)[0][0] for name in (NAMES[0], NAMES[2])]
    assert not any(Path(f"/proc/{script}").exists() for script in scripts)
    assert len(bench.lines(NAMES[0], "iterations.txt")) < 20  # nor has anybody waited for its end
    bench.run("run", "tiny", pace=0)
    bench.check_complete()


def test_a_suite_goes_on_when_nobody_reads_its_lines_any_more(bench):
    process = bench.start("run", "tiny", "--workers", "1", pace=0)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    bench.check_complete()


def test_a_begun_run_keeps_its_script_and_names_every_machine(bench):
    process, _ = bench.start_until(NAMES[0], 7, "--only", NAMES[0])
    process.terminate()
    process.wait(60)
    old = bench.git("rev-parse", "HEAD")
    bench.write("stand_in.py", "raise SystemExit('Error: a newer script')")
    assert bench.commit("A newer script") != old
    path = bench.folder / "benchmark/provenance.py"  # as on another machine
    path.write_text(path.read_text() + "\ndef processor(): return 'another one'\n")
    output = bench.run("run", "tiny", "--only", NAMES[0], pace=0)
    assert f"seed1 continues (script of {old[:7]})" in output
    record = bench.records()[NAMES[0]]
    assert record["commit"] == old and record["processor"] != "another one"
    assert [x["processor"] for x in record["continued_on"]] == ["another one"]
    bench.run("run", "tiny", "--commit", old, pace=0)
    bench.check_complete()


def test_a_second_runner_joins(bench):
    first, _ = bench.start_until(NAMES[0], 1, "--workers", "1", pace=0.03)
    second = bench.start("run", "tiny", "--workers", "2", pace=0.03)
    assert first.wait(60) == second.wait(60) == 0
    assert all(len(bench.starts(name)) == 1 for name in NAMES)
    bench.check_complete()


@pytest.mark.parametrize("cluster", [(), ("--cluster", "ray")], ids=["local", "ray"])
def test_a_run_that_crashes_is_reported_and_the_others_go_on(bench, cluster):
    bench.write("ray.py", (STAND_INS / "ray.py").read_text())
    output = bench.run("run", "tiny", *cluster, pace=0, crash=2, code=2)
    assert "A-v1/seed2 ended with exit code 1: Error: out of luck" in output
    assert "2 of 3 runs done." in output
    bench.run("run", "tiny", pace=0)  # whatever it was is mended
    assert [first for _, first in bench.starts(NAMES[1])] == [1, 6]
    bench.check_complete()


def test_a_rival_is_run_with_what_it_imports_as_in_its_commit(bench):
    old = bench.git("rev-parse", "HEAD")
    bench.write("stand_in.py", "raise SystemExit('Error: a newer script')")
    bench.commit("A newer script")
    bench.run("run", "rival", "--commit", old, pace=0)
    record = bench.records("rival")["A-v1/seed1"]
    assert record["script"] == "benchmark/rivals/rival.py" and record["commit"] == old
    assert record["score"] == 10.5
    assert record["walk"] == {"returns": [1.235], "lengths": [100], "speeds": [0.1235]}
    files = (bench.folder / "runs/benchmark/rival/A-v1/seed1").glob("*.py")
    assert sorted(x.name for x in files) == ["beside.py", "rival.py", "stand_in.py"]


def test_a_bug_is_run_in_a_changed_copy_and_its_curve_has_all_points(bench):
    old = bench.git("rev-parse", "HEAD")
    bench.write("stand_in.py", "1.0 * iteration\n" * 2)
    bench.commit("A newer script")
    assert "has this text 2 times: 1.0 * iteration" in bench.run("run", "broken", code=2)
    assert not (bench.folder / "runs").exists()  # nothing has begun
    bench.run("run", "broken", "--commit", old, pace=0)
    assert bench.records("broken")["A-v1/seed1"]["score"] == 2 * 10.5
    rows = results.table_of(bench.folder / "benchmark/results/broken.csv")
    assert rows["step"].tolist() == [*range(100, 2001, 100)]


@pytest.mark.parametrize("suite", ["stages", "short"])
def test_an_interrupted_run_of_stages_makes_each_once_and_a_short_one_begins_anew(bench, suite):
    name, resumable = "reviews/seed1", suite == "stages"
    process, _ = bench.start_until(name, 3, pace=0.3, suite=suite)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert bench.states(suite) == ["interrupted" if resumable else "waiting"]
    bench.run("run", suite, pace=0)
    starts = [x.split()[1] for x in bench.lines(name, "starts.txt", suite)]
    assert starts == ["False", str(resumable)]
    stages = ["sft", "ppo-adaptive-6", "ppo-none"]
    again = stages[2:] if resumable else stages
    assert bench.lines(name, "iterations.txt", suite) == stages + again
    record = bench.records(suite)[name]
    assert record["score"] == 1.5 and (record["hours"] is None) == resumable
    rows = results.table_of(bench.folder / f"benchmark/results/{suite}.csv")
    assert list(rows["step"]) == [1, 2, 3] * 2


def test_a_writer_that_is_killed_loses_nothing(tmp_path, monkeypatch):
    """Between the curves and the records, or with results that only it has seen."""
    folders = Folders(tmp_path / "results", tmp_path / "runs")
    suite, write = suites.SUITES["smoke"], results.write_text

    def leave(seed):
        made = run.Run(suite, "InvertedPendulum-v4", "", seed, folders)
        key = {"environment": made.environment, "variant": "", "seed": seed}
        made.folder.mkdir(parents=True)
        content = {"record": key, "curve": {"step": [1, 2]}}
        (made.folder / "result.json").write_text(results.json.dumps(content))

    def killed(path, text):
        if path.suffix == ".jsonl":
            raise InterruptedError
        write(path, text)

    leave(1)
    results.collect(suite, folders)
    leave(2)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(results, "write_text", killed)
        results.collect(suite, folders)
    assert [key[2] for key in results.done("smoke", folders)] == [1]
    next(folders.runs.glob("**/seed1/result.json")).unlink()  # as in a fresh checkout
    results.collect(suite, folders)
    (found,) = results.by_environment("smoke", "", folders).values()
    assert [len(x.curve) for x in found] == [2, 2]


# --- A real Ray cluster ---


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ancestors(pid):
    """The process and all above it."""
    while pid > 1 and Path(f"/proc/{pid}").exists():
        yield pid
        pid = parent(pid)


@pytest.mark.slow
def test_a_node_of_a_ray_cluster_is_lost(bench, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("PACE", "0.2")  # the nodes' processes inherit it
    small = {"object_store_memory": 80_000_000}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        one, _, other = NAMES  # seed by seed, the last one comes second
        process, _ = bench.start_until(one, 7, "--cluster", "ray", pace=0.2)
        bench.wait_for_iteration(other, 1)
        first, second = (list(ancestors(bench.starts(name)[0][0])) for name in (one, other))
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        (lost,) = (index for index, raylet in enumerate(raylets) if raylet in first)
        assert raylets[lost] not in second  # both nodes are at work
        cluster.remove_node(nodes[lost], allow_graceful=False)
        for pid in first[: first.index(raylets[lost])]:  # a lost node takes all with it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        bench.end(process)
        assert [iteration for _, iteration in bench.starts(one)] in ([1, 6], [1, 11])
        assert len(bench.starts(other)) == 1
        bench.check_complete()
    finally:
        cluster.shutdown()
