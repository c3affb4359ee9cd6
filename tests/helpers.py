"""What several tests use: recorded calls and optimizer steps, changed texts, random numbers."""

import copy
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def record(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple]:
    """Arguments and result of all calls of a function from now on."""
    calls, original = [], getattr(owner, name)

    def recording(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append((*args, result))
        return result

    monkeypatch.setattr(owner, name, recording)
    return calls


def record_steps(monkeypatch: pytest.MonkeyPatch, kind: type) -> list[SimpleNamespace]:
    """Learning rate, gradient and change of all weights in all steps of an optimizer to come."""
    steps, original, flat = [], kind.step, nn.utils.parameters_to_vector

    def step(self):
        (group,) = self.param_groups
        before, gradient = flat(group["params"]), flat([p.grad for p in group["params"]])
        original(self)
        change = (flat(group["params"]) - before).detach()
        steps.append(SimpleNamespace(lr=group["lr"], gradient=gradient, change=change))

    step.hooked = True  # otherwise PyTorch wraps it, and a subclass would keep that
    monkeypatch.setattr(kind, "step", step)
    return steps


def patched(text: str, changes: Iterable[tuple[str, str]]) -> str:
    """A text with parts of it replaced, each of which must be in it once."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def louder(model: nn.Module, by: float) -> nn.Module:
    """A copy with random numbers added to all weights, so that it tells its inputs apart."""
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight += by * torch.randn_like(weight)
    return model


def gain_of(layer: nn.Module) -> float:
    """The factor of a scaled orthogonal weight; NaN if it is not one."""
    weight = layer.weight.flatten(1).double()
    weight = weight.T if len(weight) > weight.shape[1] else weight
    products = weight @ weight.T  # of rows: much faster than singular values
    square = products[0, 0]
    is_orthogonal = torch.allclose(products / square, torch.eye(len(products)).double(), atol=1e-4)
    return square.sqrt().item() if is_orthogonal else math.nan


def flags(args: Any) -> str:
    """The command line that gives these settings."""
    words = []
    for name, value in vars(args).items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value not in (None, ()):
            values = value if isinstance(value, tuple) else (value,)
            words.append(" ".join([f"--{name}", *map(str, values)]))
    return " ".join(words)


def same_weights(a, b):
    """True if two agents have bitwise the same weights."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


TIMES = {"charts/SPS": 0, "charts/seconds": 0, "charts/seconds_sampling": 0}


def assert_same_runs(a, b):
    """Weights, episodes and metrics are bitwise the same, apart from times."""
    assert same_weights(a["agent"], b["agent"]) and a["episodes"] == b["episodes"]
    for x, y in zip(a["updates"], b["updates"], strict=True):
        assert x | TIMES == y | TIMES


def curves(run_dir):
    """Steps and values of each curve of a run."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}
