"""Several processes under torchrun, on this machine: ppo_atari.py."""

import os
import subprocess
import sys

import pytest
import torch

import ppo_atari as ppo

# Train with the given flags, on the CPU and with a small network; save what each process has seen.
PROBE = """
import sys, torch, ppo_atari as ppo
from torch import nn

class SmallAgent(ppo.Agent):
    def __init__(self, num_actions, args):
        nn.Module.__init__(self)
        self.bfloat16 = False
        self.cnn = nn.Sequential(nn.AvgPool2d(28), nn.Flatten(), nn.Linear(36, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, num_actions), nn.Linear(16, 1)

seen = {"obs": [], "weights": [], "own": [], "seeds": []}
real_loss, real_step, real_begin = ppo.ppo_loss, torch.optim.Adam.step, ppo.Environments.begin

def loss(agent, minibatch, clip_coef, args):
    loss, metrics = real_loss(agent, minibatch, clip_coef, args)
    own = torch.autograd.grad(loss, list(agent.parameters()), retain_graph=True)
    seen["own"].append(torch.cat([x.flatten() for x in own]))
    seen["obs"].append(minibatch[0].clone())
    return loss, metrics

def step(adam, closure=None):
    (group,) = adam.param_groups
    seen["average"] = torch.cat([x.grad.flatten() for x in group["params"]])
    result = real_step(adam, closure)
    seen["weights"].append(torch.cat([x.detach().flatten() for x in group["params"]]))
    return result

def begin(self, i, seed):
    seen["seeds"].append(seed)
    real_begin(self, i, seed)

ppo.Agent, ppo.ppo_loss, torch.optim.Adam.step = SmallAgent, loss, step
ppo.Environments.begin = begin
sys.argv = ["ppo_atari.py", *sys.argv[1:]]
args = ppo.tyro.cli(ppo.Args)
if args.resume:
    args = ppo.tyro.cli(ppo.Args, default=ppo.Args(**ppo.load_checkpoint(args.resume)["args"]))
result = ppo.train(args)
seen["kl"] = [x["losses/approx_kl"] for x in result["updates"]]
seen["step"] = result["updates"][-1]["global_step"]
torch.save(seen, f"rank{ppo.RANK}.pt")
"""
FLAGS = """--env-id Pong --num-steps 8 --num-envs 2 --num-minibatches 2 --update-epochs 2
--device cpu --torch-threads 1 --no-compile --max-grad-norm inf --learning-rate 0.01
--checkpoint-interval 1"""


@pytest.fixture
def probe(tmp_path):
    """Train in two processes; return what each of them saw."""
    (tmp_path / "probe.py").write_text(PROBE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(*flags):
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(ppo.__file__)}
        command = [*torchrun, "probe.py", *flags]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]

    return run


def test_processes_share_gradients_and_weights_but_not_games(probe, tmp_path):
    flags = [*FLAGS.split(), "--total-timesteps", "64", "--run-name", "two"]
    one, two = probe(*flags)
    assert all(torch.equal(a, b) for a, b in zip(one["weights"], two["weights"], strict=True))
    assert len(one["weights"]) == 8 and one["kl"] == two["kl"]  # so both stop at the same epoch
    assert not torch.equal(one["own"][-1], two["own"][-1])
    torch.testing.assert_close(one["average"], (one["own"][-1] + two["own"][-1]) / 2)
    assert not any(torch.equal(a, b) for a, b in zip(one["obs"], two["obs"]))
    assert len({*one["seeds"], *two["seeds"]}) == 4
    assert one["step"] == two["step"] == 64  # of both processes together

    assert [x.name for x in (tmp_path / "runs").iterdir()] == ["two"]
    assert len(list((tmp_path / "runs/two").glob("events*"))) == 1  # of the first process only


@pytest.mark.slow
def test_processes_resume_with_new_games(probe):
    flags = [*FLAGS.split(), "--total-timesteps", "64", "--run-name", "two"]
    one, _ = probe(*flags)
    resumed = probe("--resume", "runs/two", "--total-timesteps", "96")
    assert [x["step"] for x in resumed] == [96, 96]
    assert torch.equal(resumed[0]["weights"][-1], resumed[1]["weights"][-1])
    assert not torch.equal(resumed[0]["obs"][0], resumed[1]["obs"][0])
    assert resumed[0]["kl"][:2] == one["kl"]


def test_average_leaves_a_single_process_alone():
    ppo.average([x := torch.tensor([1.0, 4.0])])
    assert x.tolist() == [1.0, 4.0]


# Text that stands once in the script, what breaks it, the tests that must notice (pytest's -k).
MUTATIONS = [
    ("average([*(x.grad for x in agent.parameters()), *metrics.values()])",
     "average(metrics.values())", "share_gradients"),
    ("average([*(x.grad for x in agent.parameters()), *metrics.values()])",
     "average(x.grad for x in agent.parameters())", "share_gradients"),
    ("x /= WORLD_SIZE", "x /= 1", "share_gradients"),
    ("[args.seed, len(updates), RANK]", "[args.seed, len(updates)]", "share_gradients"),
    ("for _ in range(args.num_envs)], WORLD_SIZE)", "for _ in range(args.num_envs)])",
     "share_gradients"),
]  # fmt: skip
