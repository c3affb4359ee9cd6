"""Several processes under torchrun, on this machine."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ppo_continuous_action as ppo

TINY = "--num-steps 64 --num-minibatches 4 --update-epochs 2 --num-envs 2"


def torchrun(folder, *command, restarts=0, processes=2):
    """Start `command` (a script and its flags) in processes that form a group."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(ppo.__file__)}
    return subprocess.Popen(
        [*launcher, *map(str, command)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


def finish(process, code=0):
    out = process.communicate(timeout=300)[0]
    assert (process.returncode == 0) is (code == 0), out
    return out


PROBE = """
    import sys, torch, ppo_continuous_action as ppo
    folder, *flags = sys.argv[1:]
    real_gradient, real_log = ppo.loss_gradient, ppo.RunLog.iteration
    real_seeds = ppo.environment_seeds
    seen = {"weights": [], "observations": [], "seeds": [], "epochs": []}

    def gradient(agent, minibatch, *settings):
        seen["agent"] = agent
        seen["observations"].append(minibatch[0].clone())
        return real_gradient(agent, minibatch, *settings)

    def log(self, step, metrics):
        real_log(self, step, metrics)
        seen["weights"].append(torch.nn.utils.parameters_to_vector(seen["agent"].parameters()).detach())
        seen["epochs"].append(metrics["charts/epochs"])
        seen["step"] = step

    def seeds(*args):
        seen["seeds"] = real_seeds(*args)
        return seen["seeds"]

    ppo.loss_gradient, ppo.RunLog.iteration, ppo.environment_seeds = gradient, log, seeds
    sys.argv = ["ppo", *flags]
    result = ppo.train(ppo.tyro.cli(ppo.Args))
    seen.pop("agent")
    torch.save(seen, f"{folder}/rank{ppo.RANK}.pt")
"""


def probe(tmp_path, *flags):
    """Train in two processes; return what each of them saw."""
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROBE))
    out = finish(torchrun(tmp_path, "probe.py", tmp_path, *TINY.split(), *flags))
    return out, [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_ranks_share_weights_and_stops_but_not_data(tmp_path):
    flags = "--env-id Pendulum-v1 --total-timesteps 1024 --run-name both --target-kl 0.0005"
    flags += " --learning-rate 0.001 --update-epochs 6"
    out, (a, b) = probe(tmp_path, *flags.split())
    assert out.count("Done. Model") == 1  # rank 0 alone talks
    assert (
        a["step"] == b["step"] == 1024 and len(a["weights"]) == 4
    )  # 2 ranks, 2 environments, 64 steps
    for x, y in zip(a["weights"], b["weights"], strict=True):
        assert torch.equal(x, y)
    assert a["epochs"] == b["epochs"] and min(a["epochs"]) < 6  # target_kl stopped both together
    assert not set(a["seeds"]) & set(b["seeds"])
    assert not torch.equal(torch.cat(a["observations"]), torch.cat(b["observations"]))
    # The statistics cover both: 2 resets and 256 steps of 2 environments, per rank.
    content = ppo.load_file(tmp_path / "runs/both/checkpoint.pt", "processes")
    counts = [x["statistics"]["obs"]["count"] for x in content["processes"]]
    assert counts == pytest.approx([2 * (2 + 512)] * 2, abs=4)
    means = [x["statistics"]["obs"]["mean"] for x in content["processes"]]
    assert torch.equal(*means)


def test_merged_statistics_are_those_of_all_rows(monkeypatch):
    """Two ranks that add different rows to the same start."""
    rng = np.random.default_rng(0)
    start = ppo.RunningMeanStd((3,))
    common, *added = rng.normal(5, 2, (50, 3)), rng.normal(0, 1, (20, 3)), rng.normal(9, 3, (70, 3))
    start.update(common)
    ranks = []
    for rows in added:
        stats = ppo.RunningMeanStd((3,))
        stats.update(common)
        stats.update(rows)
        ranks.append(stats)
    sums = []

    def record(tensor):
        sums.append(tensor.clone())
        tensor.copy_(torch.stack(sums).sum(0))

    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(ppo.dist, "all_reduce", record)
    for stats in ranks:
        ppo.merge_over_processes({"obs": stats}, {"obs": start})
    everything = np.concatenate([common, *added])
    np.testing.assert_allclose(ranks[1].mean, everything.mean(0), rtol=1e-4)
    np.testing.assert_allclose(ranks[1].var, everything.var(0), rtol=1e-4)
    assert ranks[1].count == pytest.approx(140, abs=0.01)


def test_two_ranks_of_batch_b_have_the_gradient_of_one_rank_of_batch_2b():
    """Averaged gradients of two halves equal the gradient of the whole (without normalization)."""
    torch.manual_seed(0)
    agent = ppo.Agent(5, 2, ppo.Args())
    obs, actions = torch.randn(64, 5), torch.randn(64, 2)
    with torch.no_grad():
        _, logprobs, _, values = agent.get_action_and_value(obs, actions)
    batch = (
        obs,
        actions,
        logprobs + 0.1 * torch.randn(64),
        values,
        torch.randn(64),
        torch.randn(64),
    )
    settings = (0.2, True, False, 0.01, 0.5)
    whole, _ = ppo.loss_gradient(agent, batch, *settings)
    halves = [
        ppo.loss_gradient(agent, tuple(x[i] for x in batch), *settings)[0]
        for i in (slice(32), slice(32, 64))
    ]
    torch.testing.assert_close((halves[0] + halves[1]) / 2, whole, rtol=1e-4, atol=1e-7)


AVERAGE = """
    import torch, torch.distributed as dist, ppo_continuous_action as ppo
    dist.init_process_group("gloo")
    x = ppo.average_over_processes(torch.tensor([1.0, 4.0]) * (ppo.RANK + 1))
    assert x.tolist() == [1.5, 6.0], x
    stop = ppo.StopRequest()
    stop.signum = 15 * ppo.RANK  # only rank 1 got a signal
    assert stop.in_any_process() == 15
    dist.destroy_process_group()
    print("agreed")
"""


def test_gradients_are_averaged_and_stops_reach_every_rank(tmp_path):
    (tmp_path / "average.py").write_text(textwrap.dedent(AVERAGE))
    assert finish(torchrun(tmp_path, "average.py")).count("agreed") == 2


def test_a_killed_rank_restarts_the_group_which_resumes_and_finishes(tmp_path):
    flags = (
        f"{TINY} --env-id Pendulum-v1 --total-timesteps 7680 --checkpoint-interval 2 --run-name cut"
    )
    process = torchrun(tmp_path, ppo.__file__, *flags.split(), "--resume", "auto", restarts=1)
    folder = tmp_path / "runs/cut"
    while not (folder / "checkpoint.pt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    out = finish(process)
    assert "from step" in out and "Done. Model" in out
    rows = (folder / "updates.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(256, 7681, 256))

    flags = flags.replace("cut", "whole")
    finish(torchrun(tmp_path, ppo.__file__, *flags.split()))
    a, b = (
        torch.load(tmp_path / f"runs/{x}/model.pt", weights_only=True) for x in ("cut", "whole")
    )
    assert all(torch.equal(a["agent"][key], b["agent"][key]) for key in a["agent"])


def test_a_checkpoint_of_two_processes_is_refused_by_one(tmp_path):
    flags = f"{TINY} --env-id HalfCheetah-v4 --total-timesteps 512 --run-name both".split()
    finish(torchrun(tmp_path, ppo.__file__, *flags))
    with pytest.raises(ppo.RunError, match="needs 2 processes, not 1"):
        ppo.train(
            dataclasses.replace(
                ppo.saved_args(
                    ppo.load_file(tmp_path / "runs/both/checkpoint.pt", "processes"), tmp_path
                ),
                resume=str(tmp_path / "runs/both"),
            )
        )
