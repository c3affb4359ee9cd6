"""Steps per second of our scripts, Stable-Baselines3, CleanRL and LeanRL, measured side by side.

The entries of a measurement run one after the other, in turns (A B A B ...), each time as a new
process with an empty compiler cache, on the same environment with the same settings and threads.
The rate leaves out the first iteration; start-up (imports, environment, compiling) is measured
separately. Only the ratios mean something on other machines. Our scripts are those of the last
commit, CleanRL's and LeanRL's are files that the user gives. A line of results/throughput.jsonl is
a run.
"""

import itertools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmark.evidence.definitions import Entry, Measurement
from benchmark.evidence.suites.measurements import MEASUREMENTS
from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT, BenchmarkError, commit_named, machine, source_at
from benchmark.lab.record import read_checkpoint
from benchmark.lab.results import lines_of, write_lines
from benchmark.lab.run import last_line, peak_mib, printed, start

# --- What a run says about its speed: steps per second after the first iteration ---


def rate_saved(folder: Path) -> float:
    """By the checkpoint of a script of ours, or of Stable-Baselines3's."""
    updates = read_checkpoint(folder / "runs/run/checkpoint.pt")["updates"]
    steps = np.diff([x["global_step"] for x in updates])
    return steps.sum() / (steps / [x["charts/SPS"] for x in updates[1:]]).sum()


def rate_logged(folder: Path) -> float:
    """By the times of CleanRL's TensorBoard log; its own rate includes the first iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = (folder / "runs").iterdir()
    first, *_, last = EventAccumulator(str(run)).Reload().Scalars("charts/SPS")
    return (last.step - first.step) / (last.wall_time - first.wall_time)


def rate_printed(folder: Path) -> float:
    """By LeanRL's progress bar, which repeats the rate of ten iterations until it has the next.

    Its first rate, of iterations 3 to 10, is left out: the GPU's kernels are still being recorded.
    """
    found = re.findall(r"speed: *([\d.]+) sps", printed(folder))
    return statistics.harmonic_mean([float(x) for x, _ in itertools.groupby(found)][1:])


RATES: dict[str, Callable[[Path], float]] = {
    "": rate_saved,
    "cleanrl": rate_logged,
    "leanrl": rate_printed,
}


# --- Measuring ---


def measure(entry: Entry, text: str, measurement: Measurement) -> dict[str, float]:
    """Rate, start-up and memory of an entry with this source; a BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, file = Path(name), Path(entry.file).name
        (folder / file).write_text(text)
        words = [file, *entry.arguments, *([] if entry.given else ["--run-name", "run"])]
        gpu, cache = "0" if measurement.gpu else "", f"{folder}/cache"
        variables = {"CUDA_VISIBLE_DEVICES": gpu, "TORCHINDUCTOR_CACHE_DIR": cache}
        variables["PYTHONPATH"] = str(ROOT)
        begin = time.time()
        process = start(folder, words, measurement.threads, **variables)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            process.kill()  # which has ended, unless this is interrupted
        seconds = time.time() - begin
        if status:
            raise BenchmarkError(f"{entry.name} failed: {last_line(folder)}")
        rate = RATES[entry.given](folder)
    beyond = max(0.0, seconds - entry.steps / rate)  # what it took in addition to its steps
    memory = {"peak_mib": peak_mib(usage)}
    return {"steps_per_second": rate, "start_seconds": beyond, **memory}


def measure_all(
    names: list[str], repetitions: int, given: dict[str, Path], folders: Folders
) -> None:
    """Make measurements, each of which replaces its last results once it is complete.

    Args:
        given: scripts of other projects; without one, the entries with it are left out.

    Raises:
        BenchmarkError: nothing is to be repeated, no measurement has a given script, there is no
            GPU, or an entry failed.
    """
    if repetitions < 1:  # the last results would be replaced by none
        raise BenchmarkError("--repetitions must be positive.")
    gpu = torch.cuda.is_available()
    names = names or [x for x in MEASUREMENTS if MEASUREMENTS[x].gpu == gpu]
    if lacking := [x for x in names if MEASUREMENTS[x].gpu and not gpu]:
        raise BenchmarkError(f"{lacking[0]} needs a GPU and a build of PyTorch for it.")
    for project in given:
        users = [x for x, y in MEASUREMENTS.items() if project in {z.given for z in y.entries}]
        if not {*users} & {*names}:
            raise BenchmarkError(f"--{project} is for the measurement {' or '.join(users)}.")
    texts = {project: path.read_text() for project, path in given.items()}
    path, commit = folders.results / "throughput.jsonl", commit_named("HEAD")
    folders.results.mkdir(parents=True, exist_ok=True)
    for name in names:
        measurement, lines = MEASUREMENTS[name], []
        entries = [x for x in measurement.entries if x.given in {"", *given}]
        place = f" ({torch.cuda.get_device_name()})" if measurement.gpu else ""
        about = {"measurement": name, "title": measurement.title + place, "commit": commit}
        for turn, entry in itertools.product(range(repetitions), entries):
            text = texts[entry.given] if entry.given else source_at(commit, entry.file)
            found = measure(entry, text, measurement)
            command = " ".join(["python", entry.file, *entry.arguments])
            which = {"repetition": turn, "entry": entry.name, "command": command}
            lines.append({**about, **which, **machine(), **found})
            rate = f"{found['steps_per_second']:.4g} steps/s"
            print(f"{name} {turn + 1}/{repetitions} {entry.name}: {rate}", flush=True)
        kept = itertools.groupby(lines_of(path), key=lambda x: x["measurement"])
        kept = {x: [*own] for x, own in kept} | {name: lines}  # in the place that it had
        write_lines(path, [*itertools.chain(*kept.values())])
