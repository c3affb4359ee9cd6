"""An imitation of a GPU: a second device in the processor's memory.

Which tensors lie on it is noted. Operations refuse to mix them with others, as those of a GPU do,
and compute the same bits.
"""

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
COPIES = {"aten::copy_", "aten::_to_copy"}  # what may have arguments from two devices


def tensors(values):
    """Those among some values, and in lists and tuples of these."""
    flat = itertools.chain(*(x if isinstance(x, list | tuple) else (x,) for x in values))
    return [x for x in flat if isinstance(x, torch.Tensor)]


class Operations(TorchDispatchMode):
    """Below autograd: checks the arguments of each operation and notes where its results are."""

    def __init__(self):
        super().__init__()
        self.there = {}  # storages of the device, by address

    def has(self, x):
        return x.untyped_storage()._cdata in self.there

    def put(self, x):
        storage = x.untyped_storage()  # the weak reference keeps its address from being used again
        self.there[storage._cdata] = StorageWeakRef(storage)
        return x

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function._schema.name, kwargs or {}
        given = tensors([*args, *kwargs.values()])
        there = [x for x in given if self.has(x)]
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            given = [args[0], *args[2:3]]  # an index may be on the processor
        if there and name not in COPIES and any(x.dim() and not self.has(x) for x in given):
            raise RuntimeError(f"{name} of tensors on two devices: {[x.shape for x in given]}")
        results = function(*args, **kwargs)
        before = {x.untyped_storage()._cdata for x in given}
        in_backward = torch._C._current_graph_task_id() != -1  # which makes gradients of 0
        for x in tensors([results]) if there or (in_backward and not given) else ():
            if x.untyped_storage()._cdata not in before:
                self.put(x)
        return results


class Device(TorchFunctionMode):
    """Above autograd: what makes, moves or asks for the device of tensors."""

    def __init__(self, operations):
        super().__init__()
        self.operations, self.count = operations, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, here = kwargs or {}, self.operations
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        own, name = first is not None and here.has(first), getattr(function, "__name__", "")
        if function == torch.Tensor.device.__get__:
            return GPU if own else function(first)
        if name in ("numpy", "__array__") and own:
            if not kwargs.get("force"):
                raise TypeError("can't convert a tensor of the device to NumPy")
            return first.detach().cpu().numpy()
        if name == "__deepcopy__" and own:  # of the storage, not by an operation
            return here.put(function(*args, **kwargs))
        if name in ("to", "cpu", "cuda") and first is not None:
            wanted, dtype, *_ = torch._C._nn._parse_to(
                *(args[1:] if name == "to" else [name]), **kwargs
            )
            goes = own if wanted is None else wanted.type == "cuda"
            moved = first if dtype is None else function(first, dtype)
            if goes != own:
                moved = here.put(moved.clone())
                if own:
                    del here.there[moved.untyped_storage()._cdata]
            return moved
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            self.count += 1
            return here.put(function(*args, **kwargs | {"device": "cpu"}).clone())
        return function(*args, **kwargs)


def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Operations]]:
    """A function that calls another one where there is a GPU: its result, and what lies there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    state = torch.zeros(1, dtype=torch.uint8)  # of its random numbers
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda x, device: None)

    def run(function, *args):
        operations = Operations()
        with Device(operations) as device, operations:
            result = function(*args)
        assert device.count > 0, "nothing was made on the device"
        return result, operations

    return run


# --- Recordings ---


class Graph:
    """A stand-in for a recording of kernels: it calls again the function that it has recorded."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for name, x in self.function(*self.inputs).items():
            self.outputs[name].copy_(x)


def install_recordings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Recordings by such graphs: `noting(function)` makes a function that can be recorded."""
    running: list[Graph] = []
    graphs: list[Graph] = []

    @contextlib.contextmanager
    def graph(graph, stream):
        running.append(graph)
        try:
            yield
        finally:
            running.clear()

    def made():
        graphs.append(Graph())
        return graphs[-1]

    def noting(function):
        last = {}

        def call(*inputs):
            if not running:
                last.update(function(*inputs))
                return dict(last)
            graph = running[0]  # nothing is computed while it records
            graph.function, graph.inputs = function, inputs
            graph.outputs = {name: torch.zeros_like(x) for name, x in last.items()}
            return graph.outputs

        return call

    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    return SimpleNamespace(noting=noting, graphs=graphs, running=running)
