"""The imitation of a GPU refuses what a GPU does, and computes what the processor does."""

import copy

import numpy as np
import pytest
import torch
from torch import nn


def test_it_refuses_to_mix_devices_and_to_hand_numbers_to_numpy(gpu):
    def use():
        a, b = torch.ones(3, device="cuda"), torch.ones(3)
        mixed = (
            lambda: a + b,
            lambda: b[a.long()],
            lambda: nn.Linear(3, 3)(a),
            lambda: torch.stack([a, b]),
            lambda: torch.where(a > 0, a, b),
        )
        for wrong in mixed:
            with pytest.raises(RuntimeError, match="two devices"):
                wrong()
        for wrong in (a.numpy, lambda: np.asarray(a)):
            with pytest.raises(TypeError, match="NumPy"):
                wrong()

    gpu(use)


def test_it_allows_what_a_gpu_does_with_both_devices(gpu):
    def use():
        a, b = torch.arange(3.0, device="cuda"), torch.ones(3)
        assert a[torch.tensor([2, 0])].tolist() == [2, 0]  # an index may be on the processor
        assert (a + torch.tensor(1.0)).tolist() == [1, 2, 3]  # so may a number
        a.copy_(b)
        assert a.tolist() == [1, 1, 1] and a.numpy(force=True).sum() == 3

    gpu(use)


def test_it_says_where_tensors_are_and_moves_them(gpu):
    def use():
        a = torch.zeros(3, device="cuda")
        kept = (2 * a, a[1:], a.to("cuda:0"), a.double(), torch.zeros_like(a), a.clone())
        assert all(x.device.type == "cuda" for x in (a, *kept))
        gone = (a.cpu(), a.to("cpu"), a.to(torch.ones(3)), a.detach().cpu())
        assert all(x.device.type == "cpu" for x in gone)
        assert gone[0].data_ptr() != a.data_ptr()
        back = gone[0].to(a.device)
        back += 1
        assert back.device.type == "cuda" and gone[0].tolist() == a.tolist() == [0, 0, 0]

    gpu(use)


def test_networks_their_copies_and_their_gradients_lie_there(gpu):
    def use():
        torch.manual_seed(0)
        here = nn.Linear(3, 2)
        there = copy.deepcopy(here).to("cuda")
        other = copy.deepcopy(there)
        x = torch.ones(4, 3, device="cuda")
        (here(x.cpu()) ** 2).sum().backward()
        (other(x) ** 2).sum().backward()
        for p, q in zip(here.parameters(), other.parameters()):
            assert q.device.type == q.grad.device.type == "cuda" and p.device.type == "cpu"
            assert torch.equal(p.grad, q.grad.cpu())
        assert all(p.grad is None for p in there.parameters())
        first, _ = other.weight.unbind()  # the second has a gradient of 0
        (gradient,) = torch.autograd.grad(first.sum(), [other.weight])
        assert (gradient + other.weight).device.type == "cuda"

    gpu(use)


def test_a_run_that_uses_no_gpu_is_an_error(gpu):
    with pytest.raises(AssertionError, match="nothing was made on the device"):
        gpu(lambda: torch.ones(3) + 1)


def test_a_recording_computes_when_it_is_replayed(recordings):
    count = torch.zeros(())
    call = recordings.noting(lambda x: {"sum": x + count.add_(1)})
    x = torch.ones(())
    assert call(x)["sum"] == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        outputs = call(x)
    assert count == 1 and recordings.graphs == [graph]  # nothing was computed
    x.fill_(5)  # it reads its inputs where they are
    graph.replay()
    assert outputs["sum"] == 7 and graph.replays == 1
