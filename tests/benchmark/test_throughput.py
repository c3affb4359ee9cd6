"""Measurements of speed."""

import json

import pytest
import torch
import tyro
from test_suites import settings_class

from benchmark import results, throughput
from benchmark.definitions import Entry, Measurement
from benchmark.report import pages
from benchmark.suites.measurements import MEASUREMENTS


def test_rates_leave_out_start_and_first_iteration():
    updates = [{"global_step": 100 * i, "charts/SPS": x} for i, x in ((1, 20), (2, 50), (3, 50))]
    # 200 steps in 4 seconds; so all 300 take 6 of the 15.
    assert throughput.rates(updates, 15.0) == {"steps_per_second": 50, "start_seconds": 9.0}


@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_every_entry_has_a_valid_command_line_and_equal_work(measurement):
    settings = set()
    for entry in MEASUREMENTS[measurement].entries:
        args = tyro.cli(settings_class(entry.file), args=entry.arguments)
        batch = args.num_envs * args.num_steps
        assert 10 * batch <= entry.steps == args.total_timesteps
        settings.add((batch, args.num_minibatches, args.update_epochs, args.learning_rate))
    assert len(settings) == 1


ENTRY = """
import json, os, sys
os.makedirs("runs/run")
updates = [{"global_step": 10 * i, "charts/SPS": float(sys.argv[4])} for i in range(1, 6)]
with open("runs/run/checkpoint.pt", "w") as file:
    json.dump({"updates": updates}, file)
sys.exit("Error: blown" if updates[0]["charts/SPS"] < 0 else 0)
"""


def test_a_measurement_that_failed_leaves_the_last_measurement(folders, bench, monkeypatch, capsys):
    def measurement(rate):
        pair = [Entry(x, 50, f"--rate {y}", "x.py") for x, y in (("a", 10), ("b", rate))]
        monkeypatch.setattr(
            throughput, "MEASUREMENTS", {"continuous": Measurement("Two", tuple(pair))}
        )

    monkeypatch.setattr(throughput, "source_at", lambda commit, file: ENTRY)
    monkeypatch.setattr(throughput, "read_checkpoint", lambda path: json.loads(path.read_text()))
    measurement(30)
    bench("throughput", "--repetitions", "1")
    lines = results.lines_of(path := folders.results / "throughput.jsonl")
    assert [(x["repetition"], x["entry"]) for x in lines] == [(0, "a"), (0, "b")]
    assert [x["steps_per_second"] for x in lines] == pytest.approx([10, 30])
    table = pages.throughput_tables(folders)
    assert "**Two**,\nOne repetition," in table and "| a | 10 | 0.33" in table
    measurement(-1)
    with pytest.raises(SystemExit):
        bench("throughput", "--repetitions", "1")
    assert "Error: b failed: Error: blown" in capsys.readouterr().err
    assert results.lines_of(path) == lines
    measurement(20)
    bench("throughput", "--repetitions", "2")
    assert [x["steps_per_second"] for x in results.lines_of(path)] == pytest.approx([10, 20] * 2)
    assert "2 repetitions in turns" in pages.throughput_tables(folders)


@pytest.mark.parametrize("gpu", [False, True])
def test_entries_see_a_gpu_where_the_measurement_is_on_one(monkeypatch, gpu):
    rate, seen = "float(sys.argv[4])", 'len(os.environ["CUDA_VISIBLE_DEVICES"])'
    source = ENTRY.replace(rate, f"10.0 + {seen}")
    monkeypatch.setattr(throughput, "source_at", lambda commit, file: source)
    monkeypatch.setattr(throughput, "read_checkpoint", lambda path: json.loads(path.read_text()))
    found = throughput.measure(Entry("x.py", 50), "", Measurement("One", (), gpu=gpu))
    assert found["steps_per_second"] == pytest.approx(10 + gpu)


def test_a_measurement_on_a_gpu_needs_one(folders, bench, monkeypatch, capsys):
    asked = []

    def measure(entry, commit, measurement):
        asked.append(measurement.gpu)
        return {"steps_per_second": 1.0, "start_seconds": 0.0, "peak_mib": 1.0}

    monkeypatch.setattr(throughput, "measure", measure)
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "The GPU")
        bench("throughput", "--repetitions", "1")
        assert set(asked) == {there}
        asked.clear()
    lines = results.lines_of(folders.results / "throughput.jsonl")
    assert all(("(The GPU)" in x["title"]) == x["measurement"].startswith("gpu") for x in lines)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench("throughput", "atari", "gpu_atari")
    assert "gpu_atari needs a GPU" in capsys.readouterr().err
    assert not asked  # refused before the first is measured
