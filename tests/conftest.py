"""Fixtures of the tests that all scripts share.

What takes seconds is imported where it is used: the process that hands out the tests has no need.
"""

import functools
import gc
import inspect
import os
import runpy
import shutil
import signal
import threading

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of other processes
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is not on disk is not looked for, for a minute

# Commands read their settings' comments each time: 3 of 20 seconds in tests of command lines.
inspect.getsource = functools.cache(inspect.getsource)


def pytest_addoption(parser):
    parser.addoption("--script", help="the only script that is tested, where several would be")


def pytest_configure(config):
    config.addinivalue_line("markers", "scripts(*names): those that the test runs on")
    config.addinivalue_line("markers", "scripts_with(*features): those that have all of them")
    config.addinivalue_line("markers", "slow_on(*names): scripts for which the test is slow")


def pytest_collection_finish(session):
    """What has been imported stays: to look for garbage among it took an eighth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item):
    """Each test begins with what a new process has, whatever earlier ones have left.

    The number of threads changes the bits of initial weights, and Atari runs leave theirs. Commands
    and scripts answer signals. What a shell starts in the background ignores Ctrl-C. The lock of
    progress bars is one that forks don't share: a killed one might hold it forever.
    """
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pytest_generate_tests(metafunc):
    """Tests with a `script` run on those that a mark names, by their names or their features."""
    if "script" in metafunc.fixturenames:
        import adapters

        mark, only = metafunc.definition.get_closest_marker, metafunc.config.option.script
        named, featured, late = mark("scripts"), mark("scripts_with"), mark("slow_on")
        chosen = [
            name
            for name, x in adapters.SCRIPTS.items()
            if (name in named.args if named else {*featured.args} <= x.features)
        ]
        chosen = [x for x in chosen if only in (None, x)]
        slow = {*late.args} if late and only is None else ()
        params = [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in chosen]
        metafunc.parametrize("script", params, indirect=True)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hangup():
    """SIGHUP does what it does by default, even if the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def script(request, monkeypatch):
    """Each script in turn, with the fake environments."""
    import adapters
    import fake_envs

    script = adapters.SCRIPTS[request.param]
    fake_envs.Fake.made.clear()
    fake_envs.Interrupted.pressed.clear()
    script.patch(monkeypatch)
    return script


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory):
    """A finished run of an RLHF script, by its name; nobody changes it."""
    import adapters

    make = tmp_path_factory.mktemp
    return functools.cache(lambda name: adapters.SCRIPTS[name].finish(make(name)))


@pytest.fixture
def finished(script, finished_runs):
    """That of the script."""
    return finished_runs(script.name)


@pytest.fixture
def judges(finished):
    """What its responses were measured by."""
    return finished.judges


@pytest.fixture
def tiny(script):
    """Make Args for a run of a fraction of a second: tiny(env="Walk", seed=3)."""
    count = iter(range(1000))

    def make(env="Truncated", **changes):
        settings = {"env_id": script.env_id(env), "run_name": f"run{next(count)}", **changes}
        return script.args(**settings)

    return make


@pytest.fixture
def recorded(script, monkeypatch):
    """What passes through the script's gae and its gradient steps."""
    return script.record(monkeypatch)


@pytest.fixture
def gpu(monkeypatch):
    """Run a function where there is a GPU, as PyTorch says; see fake_gpu.py."""
    import fake_gpu

    return fake_gpu.install(monkeypatch)


@pytest.fixture
def recordings(monkeypatch):
    """A stand-in for recordings of a GPU's kernels."""
    import fake_gpu

    return fake_gpu.install_recordings(monkeypatch)


@pytest.fixture
def two_processes(monkeypatch):
    """Call a function in two processes, as torchrun does, but forks; return both results."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    stack = functools.partial(inspect.stack, context=0)  # each call would read sources for 0.2 s
    monkeypatch.setattr(inspect, "stack", stack)
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    launch = functools.partial(elastic_launch, LaunchConfig(1, 1, 2, **place))
    return lambda function, *inputs: launch(function)(*inputs).values()


@pytest.fixture
def outcome(monkeypatch, capsys):
    """Exit code, stdout and stderr of a function that is called with a command line."""

    def call(function, line="", name="script.py"):
        monkeypatch.setattr("sys.argv", [name, *line.split()])
        capsys.readouterr()
        code = 0
        try:
            function()
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def cli(script, outcome):
    """Run the script's main with a command line; returns exit code, stdout, stderr."""
    return lambda line: outcome(script.module.main, line, script.path.name)


@pytest.fixture
def run_file(outcome):
    """The same of a file, as it is run from a shell."""
    as_main = functools.partial(runpy.run_path, run_name="__main__")
    return lambda path, line: outcome(lambda: as_main(str(path)), line)


@pytest.fixture
def command(outcome):
    """Run a command of the benchmark; returns its exit code and its output."""
    from benchmark.__main__ import main

    def call(*words):
        code, *shown = outcome(lambda: main([*map(str, words)]))
        return code, "".join(shown)

    return call


@pytest.fixture
def folders(tmp_path):
    """Empty ones for results and runs."""
    from benchmark.lab.definitions import Folders

    return Folders(tmp_path / "results", tmp_path / "runs")


@pytest.fixture
def bench(folders):
    """Run a command of the benchmark with these folders."""
    from benchmark.__main__ import main

    words = ["--results", str(folders.results), "--runs", str(folders.runs)]
    return lambda *command: main([*command, *words])


@pytest.fixture(scope="session")
def committed(tmp_path_factory):
    """Only the results that git knows, so that a suite may run while the tests do."""
    from benchmark.lab.definitions import Folders  # not where a broken copy of a script is tested
    from benchmark.lab.provenance import ROOT, git

    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return Folders()
    folder = tmp_path_factory.mktemp("committed")
    git("archive", "--output", str(folder / "all.zip"), "HEAD", "benchmark/results")
    shutil.unpack_archive(folder / "all.zip", folder)
    return Folders(folder / "benchmark/results")
