"""Steps per second of our scripts and of Stable-Baselines3, measured side by side.

The entries of a measurement run one after the other, in turns (A B A B ...), each time as a new
process with an empty compiler cache, on the same environment with the same settings and threads.
The rate is that of all iterations but the first, by the checkpoint that an entry leaves;
start-up (imports, environment, compiling) stands beside it. Only the ratios mean something on other
machines. Our scripts are those of the last commit. A line of results/throughput.jsonl is a run.
"""

import itertools
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT, BenchmarkError, commit_named, machine, source_at
from benchmark.lab.record import read_checkpoint
from benchmark.lab.results import lines_of, write_lines
from benchmark.lab.run import last_line, start
from benchmark.paper.definitions import Entry, Measurement
from benchmark.paper.suites.measurements import MEASUREMENTS


def rates(updates: list[dict[str, float]], seconds: float) -> dict[str, float]:
    """Rate of all iterations but the first; start-up is what an entry took beyond its steps."""
    steps = np.diff([0, *(x["global_step"] for x in updates)])
    spent = steps / [x["charts/SPS"] for x in updates]
    rate = steps[1:].sum() / spent[1:].sum()
    return {"steps_per_second": rate, "start_seconds": max(0.0, seconds - steps.sum() / rate)}


def measure(entry: Entry, commit: str, measurement: Measurement) -> dict[str, float]:
    """Rate, start-up and memory of an entry; a BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, file = Path(name), Path(entry.file).name
        (folder / file).write_text(source_at(commit, entry.file))
        words = [file, *entry.arguments, "--run-name", "run"]
        gpu, cache = "0" if measurement.gpu else "", f"{folder}/cache"
        variables = {"CUDA_VISIBLE_DEVICES": gpu, "TORCHINDUCTOR_CACHE_DIR": cache}
        begin = time.time()
        process = start(folder, words, ROOT, measurement.threads, **variables)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            process.kill()  # which has ended, unless this is interrupted
        seconds = time.time() - begin
        if status:
            raise BenchmarkError(f"{entry.name} failed: {last_line(folder)}")
        found = rates(read_checkpoint(folder / "runs/run/checkpoint.pt")["updates"], seconds)
    return {**found, "peak_mib": usage.ru_maxrss / 1024}  # Linux counts KiB


def measure_all(names: list[str], repetitions: int, folders: Folders) -> None:
    """Make measurements, each of which replaces its last results once it is complete.

    Raises:
        BenchmarkError: nothing is to be repeated, there is no GPU, or an entry failed.
    """
    if repetitions < 1:  # the last results would be replaced by none
        raise BenchmarkError("--repetitions must be positive.")
    gpu = torch.cuda.is_available()
    names = names or [x for x in MEASUREMENTS if MEASUREMENTS[x].gpu == gpu]
    if lacking := [x for x in names if MEASUREMENTS[x].gpu and not gpu]:
        raise BenchmarkError(f"{lacking[0]} needs a GPU and a build of PyTorch for it.")
    path, commit = folders.results / "throughput.jsonl", commit_named("HEAD")
    folders.results.mkdir(parents=True, exist_ok=True)
    for name in names:
        measurement, lines = MEASUREMENTS[name], []
        place = f" ({torch.cuda.get_device_name()})" if measurement.gpu else ""
        about = {"measurement": name, "title": measurement.title + place, "commit": commit}
        for turn, entry in itertools.product(range(repetitions), measurement.entries):
            found = measure(entry, commit, measurement)
            command = " ".join(["python", entry.file, *entry.arguments])
            which = {"repetition": turn, "entry": entry.name, "command": command}
            lines.append({**about, **which, **machine(), **found})
            rate = f"{found['steps_per_second']:.0f} steps/s"
            print(f"{name} {turn + 1}/{repetitions} {entry.name}: {rate}", flush=True)
        kept = itertools.groupby(lines_of(path), key=lambda x: x["measurement"])
        kept = {x: [*own] for x, own in kept} | {name: lines}  # in the place that it had
        write_lines(path, [*itertools.chain(*kept.values())])
