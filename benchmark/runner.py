"""Runs a suite in local processes: skips, continues, retries once, and stops when asked to."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from types import FrameType

from tqdm import tqdm

from benchmark.processes import has_ended, peak_mib, send_signal
from benchmark.runs import (
    STOPPED,
    Run,
    lock,
    read_note,
    reason,
    start,
    write_note,
)

POLL_SECONDS = 0.5
LINE_SECONDS = 60  # between lines of progress where output is not a terminal
ATTEMPTS = 2  # one crash may be the machine's fault


def progress_bar(description: str, total: int, initial: int, position: int) -> tqdm:
    """A line of the live table; silent where stderr is not a terminal."""
    return tqdm(
        desc=description,
        total=total,
        initial=initial,
        position=position,
        unit="step",
        unit_scale=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    )


@dataclasses.dataclass
class Worker:
    """A run in progress and its line of the table."""

    run: Run
    process: subprocess.Popen
    bar: tqdm


class Runner:
    """One `run` command: a queue of runs and as many workers at a time as were asked for."""

    def __init__(self, runs: list[Run], commit: str, workers: int) -> None:
        self.commit = commit
        self.queue = [run for run in runs if not run.result.exists()]
        self.slots: list[Worker | None] = [None] * workers
        self.awaited: set[str] = set()
        self.crashes: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.stopped = False
        self.total_runs, self.done_runs = len(runs), len(runs) - len(self.queue)
        self.runs = list(self.queue)
        self.first_steps = self.steps_made()
        self.start_time = self.line_time = time.monotonic()
        total = sum(run.total_timesteps for run in self.runs)
        self.bar = progress_bar(f"all {self.total_runs}", total, self.first_steps, 0)

    def steps_made(self) -> int:
        """Steps of all runs that this command is to make."""
        return sum(
            run.total_timesteps if run.result.exists() else run.last_step() for run in self.runs
        )

    def say(self, text: str) -> None:
        """Print a line above the table."""
        with contextlib.suppress(BrokenPipeError):  # whoever read this has gone; the runs go on
            tqdm.write(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stdout)
            sys.stdout.flush()

    def run(self) -> None:
        """Work until everything is done, failed or stopped."""
        before = {
            number: signal.signal(number, self.request_stop)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self.say(f"{self.total_runs} runs, {self.done_runs} of them done before.")
        try:
            while self.queue or any(self.slots):
                for index, worker in enumerate(self.slots):
                    if worker is None and self.queue:
                        self.slots[index] = self.start_next(index)
                    elif worker is not None and self.has_ended(worker):
                        worker.bar.close()
                        self.slots[index] = None
                if self.stopped:
                    self.queue.clear()
                    for worker in filter(None, self.slots):
                        send_signal(worker.process, signal.SIGTERM)
                self.show()
                time.sleep(POLL_SECONDS)
        finally:
            self.bar.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        for name, error in self.failed.items():
            self.say(f"Failed: {name}: {error}")
        self.say(f"{self.done_runs} of {self.total_runs} runs done.")

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Only take note: what the signal interrupts may be the start of a worker."""
        self.stopped = True

    def start_next(self, index: int) -> Worker | None:
        """Start the first run of the queue that nobody else is running; None if there is none."""
        for run in list(self.queue):
            with lock(run) as held:
                if held is None:
                    if run.name not in self.awaited:
                        self.awaited.add(run.name)
                        self.say(f"{run.name} is being run by another process: left for later")
                    continue
                self.queue.remove(run)
                if run.result.exists():  # another benchmark has made it
                    self.done_runs += 1
                elif run.is_finished():  # by a worker that outlived its benchmark
                    self.keep(run)
                else:
                    process = start(run, self.commit, held)
                    step = run.last_step()
                    how = f"continues from step {step}" if step else "starts"
                    self.say(f"{run.name} {how}{self.other_commit(run)}")
                    bar = progress_bar(run.name, run.total_timesteps, step, index + 1)
                    return Worker(run, process, bar)
        return None

    def has_ended(self, worker: Worker) -> bool:
        """Look after a worker; whatever follows from its end is done."""
        run, (ended, usage) = worker.run, has_ended(worker.process)
        if not ended:
            return False
        code, note = worker.process.returncode, read_note(run)
        write_note(run, note | {"peak_mib": max(peak_mib(usage), note.get("peak_mib", 0.0))})
        if code == 0 and run.is_finished():
            self.keep(run)
        elif self.stopped or code in STOPPED:
            stopped = f"stopped at step {run.last_step()}; `run` again continues it"
            self.say(f"{run.name} {stopped}")
            if not self.stopped:  # by somebody else
                self.failed[run.name] = stopped
        else:
            self.crashed(run, reason(run, code))
        return True

    def keep(self, run: Run) -> None:
        """Write the result of a finished run."""
        run.collect()
        self.done_runs += 1
        self.say(f"{run.name} done{self.other_commit(run)}: {run.summary()}")

    def other_commit(self, run: Run) -> str:
        """Says so where a run was begun with another version of the scripts than is asked for."""
        commit = read_note(run)["commit"]
        return "" if commit == self.commit else f" (script of {commit[:7]})"

    def crashed(self, run: Run, error: str) -> None:
        """Report a crash; retry once."""
        self.crashes[run.name] = self.crashes.get(run.name, 0) + 1
        again = self.crashes[run.name] < ATTEMPTS
        self.say(f"{run.name} crashed ({error})" + ("; once more" if again else ""))
        if again:
            self.queue.insert(0, run)
        else:
            self.failed[run.name] = error
            write_note(run, read_note(run) | {"error": error})

    def show(self) -> None:
        """Refresh the table; where output is not a terminal, print a line now and then."""
        now = time.monotonic()
        if self.bar.disable and now - self.line_time < LINE_SECONDS:
            return
        made, workers = self.steps_made(), list(filter(None, self.slots))
        for worker in workers:
            worker.bar.n = worker.run.last_step()
            worker.bar.refresh()
        self.bar.n = made
        self.bar.refresh()
        if self.bar.disable:
            self.line_time = now
            rate = (made - self.first_steps) / (now - self.start_time)
            left = sum(run.total_timesteps for run in self.runs) - made
            hours = f"{left / rate / 3600:.1f} hours left" if rate else "no step made yet"
            shares = (
                f"{x.run.name} {x.run.last_step() / x.run.total_timesteps:.0%}" for x in workers
            )
            done = f"{self.done_runs} of {self.total_runs} done"
            self.say(f"{', '.join(shares)}; {done}; {rate:.0f} steps/s; {hours}")
