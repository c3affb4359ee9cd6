"""Several processes under torchrun, on this machine: ppo_atari.py."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import SCRIPTS
from helpers import record

import ppo_atari
import ppo_vector_env

FLAGS = """--env-id Pong --num-steps 8 --num-envs 2 --num-minibatches 2 --update-epochs 2
--device cpu --torch-threads 1 --compile no --max-grad-norm inf --learning-rate 0.01
--checkpoint-interval 1 --total-timesteps 64 --run-name two"""


def learn(flags):
    """Train with a small network, in one of the processes; return what it has seen."""
    ppo, seen = ppo_atari, {}
    exec(Path(ppo.__file__).read_text(), vars(ppo))  # once more: it reads what torchrun has set
    real_average = ppo.average

    def flat(tensors):
        return torch.cat([x.detach().flatten() for x in tensors]).tolist()

    def average(tensors):
        tensors = list(tensors)
        seen["own"] = flat(tensors)
        real_average(tensors)
        seen["average"] = flat(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "average", average)
        patch.setattr(ppo, "Agent", SCRIPTS["atari"].small_agent())
        patch.setattr("sys.argv", ["ppo_atari.py", *flags.split()])
        runs, calls = record(patch, ppo, "train"), record(patch, ppo.Games, "call")
        ppo.main()
    begun = [games for _, method, games, _ in calls if method in ("load", "begin_next")]
    updates = runs[0][-1]["updates"]
    return seen | {
        "weights": flat(runs[0][-1]["agent"].parameters()),
        "kl": [x["losses/approx_kl"] for x in updates],
        "step": updates[-1]["global_step"],
        "seeds": [x for games in begun for x in games.values() if x is not None],
        "threads": [x.read_text() for x in Path("/proc/self/task").glob("*/comm")],
    }


@pytest.mark.parametrize(
    ("module", "world_size", "rank"),
    [
        *((ppo_atari, x, y) for x, y in (("1", 0), ("2", 1), ("", 0))),
        *((ppo_vector_env, x, y) for x, y in (("1", 0), ("2", 1), ("", 0))),
    ],
)
def test_a_rank_counts_only_if_there_are_several_processes(monkeypatch, module, world_size, rank):
    """A cluster may set such variables for other purposes."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, world_size)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    found = runpy.run_path(module.__file__)
    assert {found["RANK"], found.get("LOCAL_RANK", rank)} == {rank}


def test_processes_share_gradients_and_weights_but_not_games(two_processes):
    one, two = two_processes(learn, FLAGS)
    assert one["weights"] == two["weights"]
    assert one["kl"] == two["kl"]  # so both stop at the same epoch
    assert one["own"] != two["own"]
    np.testing.assert_allclose(one["average"], np.mean([one["own"], two["own"]], 0), atol=1e-6)
    assert len({*one["seeds"], *two["seeds"]}) == 4
    assert one["step"] == two["step"] == 64  # of both processes together
    assert "gloo" not in f"{one['threads'] + two['threads']}"  # they may abort a process at its end
    assert [x.name for x in Path("runs").iterdir()] == ["two"]
    assert len(list(Path("runs/two").glob("events*"))) == 1  # of the first process only


@pytest.mark.slow
def test_processes_resume_with_new_games(two_processes):
    before, _ = two_processes(learn, FLAGS)
    one, two = two_processes(learn, "--resume runs/two --total-timesteps 96")
    assert one["step"] == two["step"] == 96
    assert one["weights"] == two["weights"]
    assert len({*before["seeds"], *one["seeds"], *two["seeds"]}) == 6
    assert one["kl"][:2] == before["kl"]
