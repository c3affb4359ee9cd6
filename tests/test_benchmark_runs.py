"""Running suites: interruption of every kind neither repeats nor loses a run.

The tool runs unchanged in a small repository of its own. Its scripts are stand-ins (stand_ins/)
with the interface of ours, which the tests can interrupt at will; its module torch reads their
checkpoints, which are JSON.
"""

import contextlib
import fcntl
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from benchmark import execute, results, runs
from benchmark.provenance import ROOT

STAND_INS = Path(__file__).parent / "stand_ins"
PENDULUM = "InvertedPendulum-v4"
NAMES = ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1")

SUITES = """
ENVIRONMENTS = {"A-v1": (1, 2), "B-v1": (1,)}
SUITES["tiny"] = Suite("nothing", ENVIRONMENTS, {"": Variant("stand_in.py")}, 2000)
SUITES["stages"] = Suite("nothing", {"reviews": (1,)}, {"": Variant(RLHF, "--compare")}, 6)
"""


class Bench:
    """A repository in which the benchmark is run."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        shutil.copytree(ROOT / "benchmark", folder / "benchmark", ignore=lambda *_: IGNORED)
        self.write("stand_in.py", (STAND_INS / "script.py").read_text())
        self.write("ppo_rlhf_toy.py", (STAND_INS / "stages.py").read_text())
        self.write(
            "torch.py", "import json\ndef load(path, **_): return json.loads(path.read_text())"
        )
        with (folder / "benchmark/suites.py").open("a") as file:
            file.write(SUITES)
        with (folder / "benchmark/execute.py").open("a") as file:
            file.write("\nPOLL_SECONDS, LINE_SECONDS = 0.02, 0.5\n")
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

    def wait_for_iteration(self, name, iteration, suite="tiny"):
        deadline = time.monotonic() + 60
        while len(self.lines(name, "iterations.txt", suite)) < iteration:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def start_until(self, name, iteration, *arguments, pace=0.05, suite="tiny"):
        """Start the benchmark and wait until a run is there; its process and the worker's."""
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


IGNORED = ("results", "figures", "reference", "__pycache__")


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    for process in bench.processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_finished_suite_is_not_run_again(bench):
    output = bench.run("run", "tiny", pace=0)
    bench.check_complete()
    assert "A-v1/seed2 done: score 10.50" in output
    assert "3 runs, 3 of them done before." in bench.run("run", "tiny", pace=0)
    assert all(len(bench.starts(name)) == 1 for name in NAMES)
    assert bench.run("status", "tiny").split()[1::3] == ["done"] * 3
    record = bench.records()["A-v1/seed1"]
    assert 80 < record["peak_mib"] < 200
    assert (record["starts"], record["crashes"]) == (1, 0)
    assert record["commit"] == bench.git("rev-parse", "HEAD")
    assert record["hours"] == pytest.approx(2000 * (1 / 200 + 1 / 200) / 3600, abs=1e-6)


@pytest.mark.parametrize(("iteration", "again"), [(2, 1), (7, 6)])
def test_a_killed_worker_is_continued_once_from_its_checkpoint_if_any(bench, iteration, again):
    process, worker = bench.start_until(NAMES[0], iteration, "--workers", "1")
    os.kill(worker, signal.SIGKILL)
    output = bench.end(process)
    assert "A-v1/seed1 crashed (killed by SIGKILL); once more" in output
    assert ("A-v1/seed1 continues from step 500" in output) == (again == 6)
    assert [first for _, first in bench.starts(NAMES[0])] == [1, again]
    assert len(bench.starts(NAMES[1])) == len(bench.starts(NAMES[2])) == 1
    bench.check_complete()
    record = bench.records()[NAMES[0]]
    assert record["crashes"] == 1 and record["starts"] == (2 if again == 6 else 1)
    assert re.search(r"\d+%, \d+ steps/s, 0.0 hours left", output)


def test_a_worker_outlives_its_killed_benchmark_and_is_not_started_twice(bench):
    process, worker = bench.start_until(NAMES[0], 2, "--workers", "1", pace=0.1)
    os.kill(worker, signal.SIGSTOP)  # until the other benchmark has seen it
    try:
        process.kill()
        process.wait()
        assert bench.run("status", "tiny", "--only", NAMES[0]).split()[1] == "running"
        process = bench.start("run", "tiny", "--workers", "1", pace=0)
        assert any("A-v1/seed1 is being run by another" in line for line in process.stdout)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert process.wait(60) == 0
    assert len(bench.starts(NAMES[0])) == 1
    assert bench.records()[NAMES[0]]["peak_mib"] is None  # nobody saw it end
    bench.check_complete()


def test_benchmark_and_worker_killed(bench):
    process, worker = bench.start_until(NAMES[0], 7, "--workers", "1")
    process.kill()
    process.wait()
    os.kill(worker, signal.SIGKILL)
    assert bench.run("status", "tiny", "--only", NAMES[0]).split()[1] == "interrupted"
    bench.run("run", "tiny", pace=0)
    assert [first for _, first in bench.starts(NAMES[0])] == [1, 6]
    bench.check_complete()


@pytest.mark.parametrize("cluster", [(), ("--cluster", "ray")], ids=["local", "ray"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_benchmark_stops_its_workers(bench, number, cluster):
    bench.write("ray.py", (STAND_INS / "ray.py").read_text())
    process, _ = bench.start_until(NAMES[0], 6, *cluster, pace=0.1)
    bench.wait_for_iteration(NAMES[2], 1)
    process.send_signal(number)
    output = bench.end(process, 130)
    workers = [bench.starts(name)[0][0] for name in (NAMES[0], NAMES[2])]
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    if not cluster:
        assert re.search(r"A-v1/seed1 stopped at step \d+", output)
        assert not bench.starts(NAMES[1])
    bench.run("run", "tiny", pace=0)
    bench.check_complete()
    record = bench.records()[NAMES[0]]
    assert (record["starts"], record["crashes"]) == (2, 0)  # a person stopped it: no crash


def test_a_run_stopped_by_somebody_else_is_no_success(bench):
    process, worker = bench.start_until(NAMES[0], 7, "--only", NAMES[0])
    os.kill(worker, signal.SIGTERM)
    assert "A-v1/seed1 stopped at step 500" in bench.end(process, 2)
    bench.run("run", "tiny", pace=0)
    bench.check_complete()


def test_a_suite_goes_on_when_nobody_reads_its_lines_any_more(bench):
    process = bench.start("run", "tiny", "--workers", "1", pace=0)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    bench.check_complete()


def test_a_begun_run_keeps_its_script_and_names_it(bench):
    process, _ = bench.start_until(NAMES[0], 7, "--only", NAMES[0])
    process.terminate()
    process.wait(60)
    old = bench.git("rev-parse", "HEAD")
    bench.write("stand_in.py", "raise SystemExit('Error: a newer script')")
    assert bench.commit("A newer script") != old
    output = bench.run("run", "tiny", "--only", NAMES[0], pace=0)
    assert re.search(rf"seed1 continues from step \d+ \(script of {old[:7]}\)", output)
    assert bench.records()[NAMES[0]]["commit"] == old
    output = bench.run("run", "tiny", "--commit", old, pace=0)
    assert "script of" not in output
    bench.check_complete()


def test_two_benchmarks_share_a_suite(bench):
    first, _ = bench.start_until(NAMES[0], 1, "--workers", "1", pace=0.03)
    second = bench.start("run", "tiny", "--workers", "2", pace=0.03)
    assert first.wait(60) == second.wait(60) == 0
    assert all(len(bench.starts(name)) == 1 for name in NAMES)
    bench.check_complete()


@pytest.mark.parametrize("cluster", [(), ("--cluster", "ray")], ids=["local", "ray"])
def test_a_run_that_crashes_twice_is_reported_and_the_others_go_on(bench, cluster):
    bench.write("ray.py", (STAND_INS / "ray.py").read_text())
    output = bench.run("run", "tiny", *cluster, pace=0, crash=2, code=2)
    assert [first for _, first in bench.starts(NAMES[1])] == [1, 6]
    assert "A-v1/seed2 crashed (Error: out of luck); once more" in output
    assert "A-v1/seed2 failed: Error: out of luck" in output
    assert "2 of 3 runs done." in output
    status = bench.run("status", "tiny", "--only", NAMES[1])
    assert "failed" in status and "out of luck" in status
    bench.run("run", "tiny", pace=0)  # whatever it was is mended
    assert [first for _, first in bench.starts(NAMES[1])] == [1, 6, 6]
    bench.check_complete()
    assert bench.records()[NAMES[1]]["crashes"] == 2


def test_an_interrupted_run_of_stages_makes_each_once(bench):
    process, _ = bench.start_until("reviews/seed1", 3, pace=0.3, suite="stages")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    state = bench.run("status", "stages").split()
    assert state[1:] == ["interrupted", "50%"]  # the second PPO run had begun
    bench.run("run", "stages", pace=0)
    assert [x.split()[1] for x in bench.lines("reviews/seed1", "starts.txt", "stages")] == [
        *("False", "True")
    ]
    stages = bench.lines("reviews/seed1", "iterations.txt", "stages")
    assert stages == ["sft", "ppo-adaptive-6", "ppo-none", "ppo-none"]
    record = bench.records("stages")["reviews/seed1"]
    assert (record["score"], record["hours"], record["starts"]) == (1.5, None, 2)
    rows = results.table_of(bench.folder / "benchmark/results/stages.csv")
    assert list(rows["step"]) == [1, 2, 3] * 2


# --- Locks and merging ---


@pytest.fixture
def folders(tmp_path):
    return runs.Folders(tmp_path / "results", tmp_path / "runs")


def test_two_who_ask_at_the_same_time_do_not_see_each_other(folders):
    run = runs.make_run("smoke", PENDULUM, "", 1, folders)
    assert execute.state(run) == "waiting"
    with runs.lock(run) as held:
        assert held and execute.state(run) == "running"
        with runs.lock(run) as again:
            assert again is None
    with (run.folder / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert execute.state(run) == "waiting"


def test_a_checkpoint_is_read_once_however_often_its_step_is_asked_for(folders, monkeypatch):
    run = runs.make_run("smoke", PENDULUM, "", 1, folders)
    run.checkpoint.parent.mkdir(parents=True)
    reads = []
    monkeypatch.setattr(
        runs, "read_checkpoint", lambda x: reads.append(x) or {"global_step": int(x.read_text())}
    )
    for step in (10, 20):
        run.checkpoint.with_suffix(".tmp").write_text(str(step))
        os.replace(run.checkpoint.with_suffix(".tmp"), run.checkpoint)
        assert [run.progress() for _ in range(5)] == [step] * 5
    assert len(reads) == 2


def merge_one(folders, seed, score=1.0):
    key = {"environment": PENDULUM, "variant": "", "seed": seed}
    rows = pd.DataFrame({**key, "step": [1, 2], "return": score})
    results.merge("smoke", [{**key, "score": score}], rows, folders)


def test_many_may_merge_at_once(folders):
    context = multiprocessing.get_context("fork")
    seeds = range(12)
    processes = [context.Process(target=merge_one, args=(folders, seed)) for seed in seeds]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [key[2] for key in results.done("smoke", folders)] == list(seeds)
    found = results.by_environment("smoke", "", folders)[PENDULUM]
    assert [len(result.curve) for result in found] == [2] * 12


def test_a_killed_merge_loses_nothing(folders, monkeypatch):
    merge_one(folders, 1)
    write = results.write_text

    def killed(path, text):
        if path.suffix == ".jsonl":
            raise InterruptedError
        write(path, text)

    monkeypatch.setattr(results, "write_text", killed)
    with pytest.raises(InterruptedError):
        merge_one(folders, 2, score=3.0)
    (only,) = results.by_environment("smoke", "", folders)[PENDULUM]
    assert only.record["seed"] == 1 and len(only.curve) == 2
    monkeypatch.undo()
    merge_one(folders, 2, score=4.0)
    _, second = results.by_environment("smoke", "", folders)[PENDULUM]
    assert second.column("return")[1].tolist() == [4.0, 4.0]


# --- A real Ray cluster ---


def ancestors(pid):
    """The process and all above it."""
    while pid > 1:
        yield pid
        stat = Path(f"/proc/{pid}/stat")
        pid = int(stat.read_text().rpartition(")")[2].split()[1]) if stat.exists() else 0


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
