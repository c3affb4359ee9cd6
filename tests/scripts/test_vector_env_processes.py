"""ppo_vector_env.py in several processes, which learn as one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import record
from vector_simulators import TINY, N, T, experience, simulator

import ppo_vector_env as ppo


def learn_as_one(target_kl):
    """Train in one of the processes; return what it has seen."""
    exec(Path(ppo.__file__).read_text(), vars(ppo))  # once more: it reads what torchrun has set
    made, gradients, real = [], [], torch.autograd.grad

    def make(num_envs, seed, device):
        made.append((seed, simulator("next", num_envs)))
        return made[-1][1]

    def grad(*inputs):
        gradients.append(real(*inputs))
        return gradients[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        rows = record(patch, ppo, "ppo_update")
        settings = {"target_kl": target_kl, "run_name": "two", "total_timesteps": 6 * T * N}
        result = ppo.train(ppo.Args(**TINY | settings), make)
    steps = experience(made[0][1].envs, "next", 0.9)
    return {
        "rank": ppo.RANK,
        "seed": made[0][0],
        "state": {name: x.tolist() for name, x in result["agent"].state_dict().items()},
        "obs": [x.obs for x in steps],
        "sums": [x.discounted for x in steps],
        "gradient": torch.cat([x.flatten() for x in gradients[0]]).tolist(),
        "norm": rows[0][-1][0]["losses/grad_norm"].item(),
        "updates": result["updates"],
        "kl": [x["losses/approx_kl"].item() for y in rows for x in y[-1]],
        "episodes": len(result["episodes"]),
        "dir": str(result["run_dir"]),
        "connected": torch.distributed.is_initialized(),
        "threads": [x.read_text() for x in Path("/proc/self/task").glob("*/comm")],
    }


def test_two_processes_learn_as_one(two_processes):
    one, two = sorted(two_processes(learn_as_one, 0.02), key=lambda x: x["rank"])
    assert one["state"] == two["state"] and (one["rank"], two["rank"]) == (0, 1)
    assert one["seed"] != two["seed"] and one["kl"] != two["kl"]
    both = np.mean([one["gradient"], two["gradient"]], 0)
    assert one["norm"] == two["norm"] == pytest.approx(np.linalg.norm(both), rel=1e-4)
    assert one["gradient"] != two["gradient"] and not one["connected"]
    assert "gloo" not in f"{one['threads'] + two['threads']}"  # they may abort a process at its end
    obs, sums = one["obs"] + two["obs"], one["sums"] + two["sums"]
    state = one["state"]
    np.testing.assert_allclose(state["obs_stats.mean"], np.mean(obs, 0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state["obs_stats.var"], np.var(obs, 0), rtol=1e-3)
    np.testing.assert_allclose(state["return_stats.var"], np.var(sums), rtol=1e-3)
    assert state["obs_stats.count"] == pytest.approx(len(obs), abs=0.01)
    for x, y in zip(one["updates"], two["updates"], strict=True):
        assert x["charts/episodic_return"] != y["charts/episodic_return"]  # of their own episodes
        own = {"charts/SPS", "charts/episodic_return", "charts/episodic_length", "charts/episodes"}
        shared = x.keys() - own
        assert {name: x[name] for name in shared} == {name: y[name] for name in shared}
    assert [x["global_step"] for x in one["updates"]] == [2 * T * N, 4 * T * N, 6 * T * N]
    mean = np.mean(one["kl"] + two["kl"])
    assert np.mean([x["losses/approx_kl"] for x in one["updates"]]) == pytest.approx(mean, rel=1e-4)
    (folder,) = Path("runs").iterdir()  # the first process alone writes
    assert str(folder) == one["dir"] == two["dir"] == "runs/two"
    assert len([*folder.glob("events*")]) == 1
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert len(saved["episodes"]) == one["episodes"] > 0


@pytest.mark.slow
def test_torchrun_ends_when_its_processes_have_learned():
    line = "--env-id HalfCheetah-v4 --num-envs 4 --num-steps 16 --num-minibatches 2 --device cpu "
    line += "--total-timesteps 512 --run-name two"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*launch, ppo.__file__, *line.split()], check=True, timeout=300)
    saved = torch.load("runs/two/checkpoint.pt", weights_only=True)
    assert [x["global_step"] for x in saved["updates"]] == [128, 256, 384, 512]


def test_a_sum_over_processes_changes_nothing_in_a_single_one(monkeypatch):
    monkeypatch.setattr(ppo.dist, "all_reduce", lambda x: x.mul_(2))  # two that have the same
    assert ppo.all_sum(torch.ones(3)).tolist() == [1, 1, 1]
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    assert ppo.all_sum(torch.ones(3)).tolist() == [2, 2, 2]


def test_all_processes_have_the_name_that_the_first_one_made(monkeypatch):
    monkeypatch.setattr(ppo.dist, "broadcast_object_list", lambda x: x.__setitem__(0, "first"))
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(ppo, "RANK", 1)
    with ppo.ExitStack() as resources:
        found = ppo.open_run(resources, ppo.Args(), {}, 0)
    assert found == (Path("runs/first"), "first", None) and not Path("runs").exists()


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ppo, "WORLD_SIZE", 3)
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", f"{rank}")
        assert ppo.choose_device(ppo.Args(device="cpu")) == torch.device("cpu")
        if rank < 2:
            assert ppo.choose_device(ppo.Args()) == torch.device("cuda", rank)
    with pytest.raises(ppo.UsageError, match="--nproc-per-node 2 at most"):
        ppo.choose_device(ppo.Args())
