"""What A2C, TRPO and the vanilla policy gradient share, which run PPO's train with own updates."""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

import ppo_continuous_action as ppo
from ppo_continuous_action import Agent, Tensors


@dataclasses.dataclass(frozen=True)
class Args(ppo.Args):
    compile: bool = False  # not used
    num_minibatches: int = 1  # not used: a step is computed on all samples
    update_epochs: int = 1  # not used: one step of the policy per batch

    method = "This method"
    unused = "compile num_minibatches update_epochs early_stop_kl"

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [x for x in self.unused.split() if getattr(self, x) != getattr(type(self), x)]
        if changed:
            flags = ", ".join(f"--{x.replace('_', '-')}" for x in changed)
            raise ppo.UsageError(f"{self.method} does not use {flags}.")


@dataclasses.dataclass(frozen=True)
class ValueArgs(Args):
    anneal_lr: bool = False  # not used
    value_epochs: int = 5  # passes over a batch to fit the values [trpo_mpi: 5]
    value_minibatch_size: int = 64  # samples per step of the values [trpo_mpi: 64]
    value_learning_rate: float = 1e-3  # Adam's step size for the values [trpo_mpi: 1e-3]

    unused = f"{Args.unused} anneal_lr clip_vloss vf_coef"


def flat_gradient(y: Tensor, agent: Agent, **options: bool) -> Tensor:
    """Gradient (P,) of the scalar `y` by all that the agent learns; 0 where it has no influence."""
    gradients = torch.autograd.grad(y, [*agent.parameters()], materialize_grads=True, **options)
    return torch.cat([x.flatten() for x in gradients])


def fit_values(
    agent: Agent, adam: Tensors, batch: list[Tensor], order: Tensor, args: ValueArgs
) -> None:
    """Fit the values in place, in minibatches, by an Adam of their own; its state is in `adam`."""
    names = ("mean", "square", "step")
    mean, square, step = (adam.setdefault(f"value_{x}", 0 * adam[x]) for x in names)
    for _ in range(args.value_epochs):
        for mb in order.split(args.value_minibatch_size):
            obs, _, _, old_values, _, returns = (x[mb] for x in batch)
            loss = ppo.value_loss(agent.value(obs), old_values, returns, torch.inf)
            gradient = flat_gradient(loss, agent)
            mean.lerp_(gradient, 1 - 0.9)
            square.lerp_(gradient**2, 1 - 0.999)
            count = step.add_(1).item()
            bias_correction = math.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            direction = mean / (square.sqrt() + args.adam_eps)
            adam["weights"].sub_(args.value_learning_rate * bias_correction * direction)
        order = order[order]  # a power of a random order is another one, the same in a resumed run


def run(about: str, settings: type[Args], update: Callable) -> None:
    """Run the PPO script with what differs in a method, by the command line."""
    ppo.Args, ppo.details = settings, lambda args: about
    ppo.train = functools.partial(ppo.train, update=update)
    ppo.main()
