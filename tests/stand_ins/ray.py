"""What of Ray the benchmark uses: each task is a process, and cancelling interrupts it."""

import concurrent.futures
import multiprocessing
import os
import signal
import types

exceptions = types.SimpleNamespace(RayError=RuntimeError)


def init(**options):
    print("ray", options)


def shutdown():
    pass


class Reference:
    def __init__(self, function, arguments):
        self.pipe, there = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=self.work, args=(there, function, arguments))
        self.process.start()
        self.result = concurrent.futures.ThreadPoolExecutor().submit(self.outcome)

    def work(self, pipe, function, arguments):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            pipe.send(error)

    def outcome(self):
        found = self.pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def future(self):
        return self.result


def remote(**options):
    assert options["num_cpus"] == 1
    return lambda function: types.SimpleNamespace(remote=lambda *x: Reference(function, x))


def cancel(reference):
    if reference.process.is_alive():
        os.kill(reference.process.pid, signal.SIGINT)


def wait(references, num_returns):
    assert num_returns == len(references)
    concurrent.futures.wait([x.result for x in references])
