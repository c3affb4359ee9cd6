"""Measurements of speed."""

import json

import pytest
import torch
import tyro
from test_suites import settings_class

from benchmark.evidence import pages, throughput
from benchmark.evidence.definitions import Entry, Measurement
from benchmark.evidence.suites.measurements import MEASUREMENTS
from benchmark.lab import results


def test_a_saved_rate_leaves_out_the_first_iteration(tmp_path):
    updates = [{"global_step": 100 * i, "charts/SPS": x} for i, x in ((1, 20), (2, 50), (3, 200))]
    (tmp_path / "runs/run").mkdir(parents=True)
    torch.save({"updates": updates}, tmp_path / "runs/run/checkpoint.pt")
    assert throughput.rate_saved(tmp_path) == pytest.approx(80)  # 200 steps in 2 + 0.5 seconds


def test_a_printed_rate_counts_each_ten_iterations_once_without_the_first(tmp_path):
    bar = "speed: {} sps, reward avg: 0.00, lr:  0.00:  50%|##    | 20/40 [00:03<00:03, 5.0it/s]"
    shown = [bar.format(x) for x in (" 100.0", " 100.0", " 6000.0", " 3000.0", " 3000.0")]
    (tmp_path / "output.txt").write_text("\r".join(["  0%|          | 0/40", *shown]))
    assert throughput.rate_printed(tmp_path) == pytest.approx(4000)


@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_every_entry_has_a_valid_command_line_and_equal_work(measurement):
    batches, updates = set(), set()
    for entry in (x for x in MEASUREMENTS[measurement].entries if not x.given):
        args = tyro.cli(settings_class(entry.file), args=entry.arguments)
        if entry.batch:  # half a minute each
            assert 3 * entry.batch <= entry.steps == args.num_iterations * entry.batch
            continue
        batch = args.num_envs * args.num_steps
        assert 10 * batch <= entry.steps == args.total_timesteps
        batches.add(batch)
        if hasattr(args, "update_epochs"):  # it learns
            updates.add((args.num_minibatches, args.update_epochs, args.learning_rate))
    if batches and "defaults" not in measurement and measurement != "vector_num_envs":
        assert len(batches) == len(updates) == 1


# A script whose rate is its flag's, and one more where it sees a GPU.
ENTRY = """
import json, os, sys
os.makedirs("runs/run")
rate = float(sys.argv[4]) + len(os.environ["CUDA_VISIBLE_DEVICES"])
updates = [{"global_step": 10 * i, "charts/SPS": rate} for i in range(1, 6)]
with open("runs/run/checkpoint.pt", "w") as file:
    json.dump({"updates": updates}, file)
sys.exit("Error: blown" if rate < 0 else 0)
"""


def measurement(*rates, **more):
    entries = [Entry(name, 50, f"--rate {x}", "x.py") for name, x in zip("ab", rates)]
    return Measurement("Two", tuple(entries), **more)


@pytest.fixture
def measure(folders, bench, monkeypatch):
    """Measure such scripts: measure({name: measurement}, ...) returns all lines and the table."""
    monkeypatch.setattr(throughput, "source_at", lambda commit, file: ENTRY)
    monkeypatch.setattr(throughput, "read_checkpoint", lambda path: json.loads(path.read_text()))

    def run(measurements, *words):
        monkeypatch.setattr(throughput, "MEASUREMENTS", measurements)
        bench("throughput", *words)
        lines = results.lines_of(folders.results / "throughput.jsonl")
        return lines, pages.throughput_tables(folders)

    return run


def test_a_measurement_that_failed_leaves_the_last_measurement(measure, folders, capsys):
    lines, table = measure({"continuous": measurement(10, 30)}, "--repetitions", "1")
    assert [(x["repetition"], x["entry"]) for x in lines] == [(0, "a"), (0, "b")]
    assert [x["steps_per_second"] for x in lines] == pytest.approx([10, 30])
    assert "**Two**,\nOne repetition," in table and "| a | 10 | 0.33" in table
    with pytest.raises(SystemExit):
        measure({"continuous": measurement(10, -1)}, "--repetitions", "1")
    assert "Error: b failed: Error: blown" in capsys.readouterr().err
    assert results.lines_of(folders.results / "throughput.jsonl") == lines
    lines, table = measure({"continuous": measurement(10, 20)}, "--repetitions", "2")
    assert [x["steps_per_second"] for x in lines] == pytest.approx([10, 20] * 2)
    assert "2 repetitions in turns" in table


# CleanRL's script as `throughput` sees it: it logs, saves nothing, has no --run-name. After a slow
# first iteration, one of 10 steps takes 2 seconds.
CLEANRL = """
import sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
assert sys.argv[1:] == ["--total-timesteps", "50", "--env-id", "X"]
log = EventFileWriter("runs/X__1__1700000000")
for i in range(1, 6):
    summary = Summary(value=[Summary.Value(tag="charts/SPS", simple_value=7)])
    log.add_event(Event(step=10 * i, wall_time=50 + 2 * i, summary=summary))
log.close()
"""


@pytest.mark.slow
def test_another_projects_script_is_measured_if_its_file_is_given(measure, tmp_path):
    theirs = Entry("CleanRL", 50, "--env-id X", "c/p.py", "cleanrl")
    both = {"continuous": Measurement("Two", (*measurement(30).entries, theirs))}
    lines, _ = measure(both, "continuous", "--repetitions", "1")
    assert [x["entry"] for x in lines] == ["a"]
    (tmp_path / "edited.py").write_text(CLEANRL)
    given = ("--cleanrl", str(tmp_path / "edited.py"), "--repetitions", "1")
    lines, _ = measure(both, "continuous", *given)
    assert [x["entry"] for x in lines] == ["a", "CleanRL"]
    assert [x["steps_per_second"] for x in lines] == pytest.approx([30, 5])
    assert lines[1]["command"] == "python c/p.py --total-timesteps 50 --env-id X"
