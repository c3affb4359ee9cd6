"""Several processes under torchrun, on this machine: ppo_atari.py."""

import os
import subprocess
import sys

import pytest
import torch
from adapters import ROOT

# Train with the given flags, on the CPU and with a small network; save what each process has seen.
PROBE = """
import pathlib, sys, torch, adapters, ppo_atari as ppo

seen = {"seeds": []}
real_average, real_call = ppo.average, ppo.Games.call

def average(tensors):
    tensors = list(tensors)
    seen["own"] = torch.cat([x.flatten() for x in tensors])
    real_average(tensors)
    seen["average"] = torch.cat([x.flatten() for x in tensors])

def call(self, method, arguments):
    seen["processes"] = 1 + len(self.pipes)
    if method in ("load", "begin_next"):
        seen["seeds"] += [x for x in arguments.values() if x is not None]
    return real_call(self, method, arguments)

ppo.average, ppo.Games.call = average, call
ppo.Agent = adapters.SCRIPTS["atari"].small_agent()
train, results = ppo.train, []
ppo.train = lambda *inputs, **more: results.append(train(*inputs, **more)) or results[0]
ppo.main()
result = results[0]
seen["weights"] = torch.nn.utils.parameters_to_vector(result["agent"].parameters()).detach()
seen["kl"] = [x["losses/approx_kl"] for x in result["updates"]]
seen["step"] = result["updates"][-1]["global_step"]
seen["threads"] = [x.read_text() for x in pathlib.Path("/proc/self/task").glob("*/comm")]
torch.save(seen, f"rank{ppo.RANK}.pt")
"""
FLAGS = """--env-id Pong --num-steps 8 --num-envs 2 --num-minibatches 2 --update-epochs 2
--device cpu --torch-threads 1 --no-compile --max-grad-norm inf --learning-rate 0.01
--checkpoint-interval 1 --total-timesteps 64 --run-name two"""


@pytest.fixture
def probe(tmp_path):
    """Train in two processes; return what each of them saw."""
    (tmp_path / "probe.py").write_text(PROBE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    pipes = {"capture_output": True, "text": True, "timeout": 300}

    def run(flags):
        command = [*torchrun, "probe.py", *flags.split()]
        result = subprocess.run(command, cwd=tmp_path, env=env, **pipes)
        assert result.returncode == 0, result.stdout + result.stderr
        return [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]

    return run


def test_processes_share_gradients_and_weights_but_not_games(probe, tmp_path):
    one, two = probe(FLAGS)
    assert torch.equal(one["weights"], two["weights"])
    assert one["kl"] == two["kl"]  # so both stop at the same epoch
    assert not torch.equal(one["own"], two["own"])
    torch.testing.assert_close(one["average"], (one["own"] + two["own"]) / 2)
    assert len({*one["seeds"], *two["seeds"]}) == 4
    assert one["step"] == two["step"] == 64  # of both processes together
    assert "gloo" not in f"{one['threads'] + two['threads']}"  # they may abort a process at its end
    assert [x.name for x in (tmp_path / "runs").iterdir()] == ["two"]
    assert len(list((tmp_path / "runs/two").glob("events*"))) == 1  # of the first process only


@pytest.mark.slow
def test_processes_resume_with_new_games(probe):
    before, _ = probe(FLAGS)
    one, two = probe("--resume runs/two --total-timesteps 96")
    assert one["step"] == two["step"] == 96
    assert torch.equal(one["weights"], two["weights"])
    assert len({*before["seeds"], *one["seeds"], *two["seeds"]}) == 6
    assert one["kl"][:2] == before["kl"]
