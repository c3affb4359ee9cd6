"""Running suites: interruption of every kind neither repeats nor loses a run.

A stand-in with the interface of our scripts (flags, checkpoint) replaces them here, so that the
tests can interrupt it at will; the last test runs the real one.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark import runner, runs
from benchmark.__main__ import main
from benchmark.provenance import ROOT
from benchmark.results import load

ITERATIONS = 20

# Saves after every fifth iteration; leaves lines in starts.txt and iterations.txt.
STAND_IN = """
import json, os, pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seed = int(flags["--seed"])
run = pathlib.Path(flags["--resume"] if "--resume" in flags else "runs/" + flags["--run-name"])
run.mkdir(parents=True, exist_ok=True)
checkpoint = run / "checkpoint.pt"
if checkpoint.exists() != ("--resume" in flags):
    sys.exit("Error: no folder for this run")
args = {"seed": seed, "total_timesteps": 2000, "num_steps": 100, "num_envs": 1, "run_name": "run"}
saved = {"args": args, "episodes": [], "updates": [], "global_step": 0}
saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else saved
first = saved["global_step"] // 100 + 1
with open("starts.txt", "a") as file:
    print(os.getpid(), first, file=file)
held = b"x" * (150 << 20)  # so that its memory is not that of its parent
for iteration in range(first, 21):
    time.sleep(float(os.environ["PACE"]))
    if os.environ.get("CRASH") == str(seed) and iteration == 8:
        sys.exit("Error: out of luck")
    step = saved["global_step"] = 100 * iteration
    saved["episodes"].append({"global_step": step, "return": 1.0 * iteration, "length": 100})
    saved["updates"].append(
        {"global_step": step, "charts/SPS_rollout": 200, "charts/SPS_update": 200})
    if iteration % 5 == 0:
        (run / "checkpoint.tmp").write_text(json.dumps(saved))
        os.replace(run / "checkpoint.tmp", checkpoint)
    with open("iterations.txt", "a") as file:
        print(iteration, file=file)
"""

# The command line of the benchmark with a suite of the stand-in.
DRIVER = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from benchmark import ray_cluster, runner, runs, suites
import benchmark.__main__ as command_line
suites.SUITES["tiny"] = suites.Suite(
    "nothing", {{"A-v1": (1, 2), "B-v1": (1,)}}, {{"": suites.Variant("stand_in.py")}}, 2000
)
runs.source_at = command_line.source_at = lambda commit, script: open("stand_in.txt").read()
runs.read_checkpoint = lambda path: json.loads(path.read_text())
runner.POLL_SECONDS = 0.02
ray_cluster.ENTRY = [sys.executable, "driver.py"]
command_line.main(["--results", "results", "--runs", "runs", *sys.argv[1:]])
"""


class Bench:
    """A folder in which the benchmark is run."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "stand_in.txt").write_text(STAND_IN)
        (folder / "driver.py").write_text(DRIVER)
        self.processes = []

    def start(self, *arguments, pace=0.01, crash=None):
        environment = {**os.environ, "PACE": str(pace)}
        environment |= {"CRASH": str(crash)} if crash else {}
        process = subprocess.Popen(
            [sys.executable, "driver.py", *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments, code=0, **options):
        process = self.start(*arguments, **options)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == code, output
        return output

    def starts(self, name):
        """(process, first iteration) of each start of a run."""
        path = self.folder / "runs" / "tiny" / name / "starts.txt"
        if not path.exists():
            return []
        return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]

    def wait_for_iteration(self, name, iteration):
        path = self.folder / "runs" / "tiny" / name / "iterations.txt"
        deadline = time.monotonic() + 60
        while not path.exists() or len(path.read_text().splitlines()) < iteration:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def memory(self, name):
        """What the result of a run says of it, in MiB."""
        return json.loads((self.folder / f"results/tiny/{name}.json").read_text())["peak_mib"]

    def check_complete(self):
        """Every run has one result with every iteration exactly once."""
        found = sorted(x.relative_to(self.folder) for x in self.folder.glob("results/**/*.json"))
        assert [str(x) for x in found] == [
            f"results/tiny/{name}.json" for name in ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1")
        ]
        for path in found:
            record = json.loads((self.folder / path).read_text())
            assert record["steps"] == 100 * ITERATIONS
            assert record["last_returns"] == [1.0 * i for i in range(1, ITERATIONS + 1)]


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
    assert "A-v1/seed2 done: return 10.5 over the last 20 episodes, 100 steps/s" in output
    assert "3 runs, 3 of them done before." in bench.run("run", "tiny", pace=0)
    assert all(len(bench.starts(x)) == 1 for x in ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1"))
    assert bench.run("status", "tiny").split()[1::3] == ["done"] * 3
    assert all(150 < bench.memory(x) < 300 for x in ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1"))


def test_a_killed_worker_is_continued_once_from_its_checkpoint(bench):
    process = bench.start("run", "tiny", "--workers", "1", pace=0.05)
    bench.wait_for_iteration("A-v1/seed1", 7)
    os.kill(bench.starts("A-v1/seed1")[0][0], signal.SIGKILL)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert "A-v1/seed1 crashed (killed by SIGKILL); once more" in output
    assert [first for _, first in bench.starts("A-v1/seed1")] == [1, 6]
    assert len(bench.starts("A-v1/seed2")) == len(bench.starts("B-v1/seed1")) == 1
    bench.check_complete()


def test_a_worker_outlives_its_killed_benchmark_and_is_not_started_twice(bench):
    process = bench.start("run", "tiny", "--workers", "1", pace=0.1)
    bench.wait_for_iteration("A-v1/seed1", 2)
    worker = bench.starts("A-v1/seed1")[0][0]
    os.kill(worker, signal.SIGSTOP)  # until the other benchmark has seen it
    try:
        process.kill()
        process.wait()
        assert bench.run("status", "tiny", "--only", "A-v1/seed1").split()[1] == "running"
        process = bench.start("run", "tiny", "--workers", "1", pace=0)
        assert any("A-v1/seed1 is being run by another" in line for line in process.stdout)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert process.wait(60) == 0
    assert len(bench.starts("A-v1/seed1")) == 1
    assert bench.memory("A-v1/seed1") is None  # nobody saw it end
    bench.check_complete()


def test_benchmark_and_worker_killed(bench):
    process = bench.start("run", "tiny", "--workers", "1", pace=0.05)
    bench.wait_for_iteration("A-v1/seed1", 7)
    process.kill()
    process.wait()
    os.kill(bench.starts("A-v1/seed1")[0][0], signal.SIGKILL)
    state = bench.run("status", "tiny", "--only", "A-v1/seed1").split()[1]
    assert state == "interrupted"
    bench.run("run", "tiny", pace=0)
    assert [first for _, first in bench.starts("A-v1/seed1")] == [1, 6]
    bench.check_complete()


def test_a_worker_that_is_killed_before_its_first_checkpoint_starts_anew(bench):
    process = bench.start("run", "tiny", "--workers", "1", pace=0.05)
    bench.wait_for_iteration("A-v1/seed1", 2)
    os.kill(bench.starts("A-v1/seed1")[0][0], signal.SIGKILL)
    process.communicate(timeout=60)
    assert [first for _, first in bench.starts("A-v1/seed1")] == [1, 1]
    bench.check_complete()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_benchmark_stops_its_workers(bench, number):
    process = bench.start("run", "tiny", "--workers", "2", pace=0.1)
    bench.wait_for_iteration("A-v1/seed1", 6)
    bench.wait_for_iteration("B-v1/seed1", 1)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    step = int(re.search(r"A-v1/seed1 stopped at step (\d+)", output)[1])
    assert "B-v1/seed1 stopped at step" in output
    assert "A-v1/seed2" not in output
    assert not any(
        Path(f"/proc/{bench.starts(x)[0][0]}").exists() for x in ("A-v1/seed1", "B-v1/seed1")
    )
    bench.run("run", "tiny", pace=0)
    assert [first for _, first in bench.starts("A-v1/seed1")] == [1, step // 100 + 1]
    bench.check_complete()


@pytest.mark.parametrize("interrupted", ["lock", "start"])
def test_a_stop_request_is_heard_while_a_worker_is_started(tmp_path, monkeypatch, interrupted):
    def sleeper(run, commit, held):
        runs.write_note(run, {"attempts": 1, "commit": commit})
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(runner, "start", sleeper)
    real = getattr(runner, interrupted)

    def interrupting(*arguments):
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(runner, interrupted, interrupting)
    folders = runs.Folders(tmp_path / "results", tmp_path / "runs")
    command = runner.Runner(runs.select("smoke", folders), "abc", workers=1)
    start_time = time.monotonic()
    command.run()
    assert time.monotonic() - start_time < 30
    assert command.stopped and command.done_runs == 0 and not command.failed


def test_a_run_stopped_by_somebody_else_is_no_success(bench):
    process = bench.start("run", "tiny", "--only", "A-v1/seed1", pace=0.05)
    bench.wait_for_iteration("A-v1/seed1", 7)
    os.kill(bench.starts("A-v1/seed1")[0][0], signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2
    assert "Failed: A-v1/seed1: stopped at step" in output
    bench.run("run", "tiny", pace=0)
    bench.check_complete()


def test_a_suite_goes_on_when_nobody_reads_its_lines_any_more(bench):
    process = bench.start("run", "tiny", "--workers", "1", pace=0)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    bench.check_complete()


def test_another_version_than_asked_for_is_named(bench):
    process = bench.start("run", "tiny", "--only", "A-v1/seed1", pace=0.05)
    bench.wait_for_iteration("A-v1/seed1", 7)
    process.terminate()
    process.wait(60)
    note = json.loads((bench.folder / "runs/tiny/A-v1/seed1/note.json").read_text())
    note["commit"] = "0123456789abcdef"
    (bench.folder / "runs/tiny/A-v1/seed1/note.json").write_text(json.dumps(note))
    output = bench.run("run", "tiny", "--only", "A-v1/seed1", pace=0)
    assert re.search(r"seed1 continues from step \d+ \(script of 0123456\)", output)
    assert "A-v1/seed1 done (script of 0123456): return" in output


def test_two_benchmarks_share_a_suite(bench):
    first = bench.start("run", "tiny", "--workers", "1", pace=0.03)
    bench.wait_for_iteration("A-v1/seed1", 1)
    second = bench.start("run", "tiny", "--workers", "2", pace=0.03)
    assert first.wait(60) == second.wait(60) == 0
    assert all(len(bench.starts(x)) == 1 for x in ("A-v1/seed1", "A-v1/seed2", "B-v1/seed1"))
    bench.check_complete()


def test_a_run_that_crashes_twice_is_reported_and_the_others_go_on(bench):
    output = bench.run("run", "tiny", pace=0, crash=2, code=2)
    assert [first for _, first in bench.starts("A-v1/seed2")] == [1, 6]
    assert "A-v1/seed2 crashed (Error: out of luck); once more" in output
    assert "Failed: A-v1/seed2: Error: out of luck" in output
    assert "2 of 3 runs done." in output
    status = bench.run("status", "tiny", "--only", "A-v1/seed2")
    assert "failed" in status and "out of luck" in status
    bench.run("run", "tiny", pace=0)  # whatever it was is mended
    assert [first for _, first in bench.starts("A-v1/seed2")] == [1, 6, 6]
    bench.check_complete()


def parent(pid):
    """The parent's process id; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def ancestors(pid):
    """The process and all above it."""
    while pid > 1:
        yield pid
        pid = parent(pid)


def test_without_ray_cluster_there_is_a_sentence(bench, monkeypatch):
    pytest.importorskip("ray")
    for address in ("", "nonsense"):
        if address:
            monkeypatch.setenv("RAY_ADDRESS", address)
        output = bench.run("run", "tiny", "--cluster", "ray", code=2)
        assert output.splitlines()[-1].startswith("Error: There is no Ray cluster at ")


@pytest.mark.slow
def test_a_node_of_a_ray_cluster_is_lost(bench, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PACE", "0.2")  # the nodes' processes inherit it
    small = {"object_store_memory": 80_000_000}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        process = bench.start("run", "tiny", "--cluster", "ray")
        first, second = "A-v1/seed1", "B-v1/seed1"
        bench.wait_for_iteration(first, 7)
        bench.wait_for_iteration(second, 1)
        workers = {name: bench.starts(name)[0][0] for name in (first, second)}
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        owners = {x: [r for r in raylets if r in ancestors(pid)] for x, pid in workers.items()}
        assert owners[first] != owners[second]  # both nodes are at work
        lost = raylets.index(owners[first][0])
        doomed = list(ancestors(workers[first]))
        cluster.remove_node(nodes[lost], allow_graceful=False)
        for pid in doomed[: doomed.index(raylets[lost])]:  # a lost node takes all with it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
        assert [iteration for _, iteration in bench.starts(first)] in ([1, 6], [1, 11])
        assert len(bench.starts(second)) == 1
        bench.check_complete()
    finally:
        cluster.shutdown()


def test_stopped_throughput_leaves_no_process_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmark.throughput", "continuous"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 120
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        while not list(tmp_path.glob("*/runs")):  # the script has made its folder
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        assert (pids := children.read_text().split())
    finally:
        process.terminate()
    assert process.wait(60) == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not list(tmp_path.iterdir())


def test_a_script_that_the_commit_does_not_have_gets_a_sentence(tmp_path, capsys):
    folders = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    first_commit = subprocess.run(
        ["git", "rev-list", "--max-parents=0", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()[-1]
    with pytest.raises(SystemExit) as end:
        main([*folders, "run", "multidiscrete_vs_gaussian", "--commit", first_commit])
    assert end.value.code == 2
    assert "ppo_multidiscrete.py" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_two_runs_of_the_real_script_end_to_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling would take most of the time
    folders = runs.Folders(tmp_path / "results", tmp_path / "runs")
    place = ["--results", str(folders.results), "--runs", str(folders.runs)]
    main([*place, "run", "smoke", "--workers", "2"])
    output = capfd.readouterr().out
    assert "2 of 2 runs done." in output
    first, second = load("smoke", folders)
    for result in (first, second):
        assert result.record["steps"] == 4096
        assert result.record["settings"]["env_id"] == "InvertedPendulum-v4"
        assert 0 < result.final < 1000
        assert sum(int(row["episodes"]) for row in result.curve) == result.record["episodes"]
        assert len(result.column("losses/approx_kl")[0]) == 2  # one per iteration
    assert first.record["last_returns"] != second.record["last_returns"]
    assert len(first.record["commit"]) == 40
    main([*place, "compare", "smoke", "smoke"])
    assert "| InvertedPendulum-v4 |" in capfd.readouterr().out
