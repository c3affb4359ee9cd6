"""Vanilla policy gradient, beside ppo_continuous_action.py and trpo.py, which it imports.

    PYTHONPATH=. python benchmark/baselines/vpg.py --env-id Hopper-v4

"Vanilla PG, Adaptive" of the PPO paper's Figure 3: after each rollout one step of Adam, divided by
1.5 where the last one came to more than twice the desired KL, and multiplied by it below half: so
homework 4 of the course in the paper's footnote 3. PPO with one epoch and one minibatch has the
gradient of log pi times the advantage; the value function is fitted apart, as in TRPO.

Settings: desired KL 0.01 (the pilot took 0.002); all else as in the PPO script. Not known: all of
the paper's.
"""

import functools
from types import ModuleType

import pydantic
import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

import ppo_continuous_action as ppo
from ppo_continuous_action import Agent, Tensors
from trpo import fit_values

UNUSED = """compile num_minibatches update_epochs anneal_lr anneal_clip clip_vloss vf_coef
early_stop_kl shared_network"""


@pydantic.dataclasses.dataclass(frozen=True, config={"extra": "forbid"})
class Args(ppo.Args):
    compile: bool = False  # not used
    num_minibatches: PositiveInt = 1  # not used: a step is computed on all samples
    update_epochs: PositiveInt = 1  # not used: one step of the policy per batch
    anneal_lr: bool = False  # not used: the KL decides
    adapt_lr_kl: PositiveFloat = 0.01  # adapt the step size of the policy to this KL
    vf_coef: NonNegativeFloat = 0.0  # not used: the values are fitted apart
    max_grad_norm: PositiveFloat = torch.inf  # Adam's steps hardly depend on it
    value_epochs: PositiveInt = 5  # passes over a batch to fit the values [trpo_mpi: 5]
    value_minibatch_size: PositiveInt = 64  # samples per step of the values [trpo_mpi: 64]
    value_learning_rate: PositiveFloat = 1e-3  # Adam's step size for the values [trpo_mpi: 1e-3]

    def __post_init__(self) -> None:
        super().__post_init__()
        if changed := [x for x in UNUSED.split() if getattr(self, x) != getattr(Args, x)]:
            raise ValueError(f"The policy gradient does not use {', '.join(changed)}.")


def vpg_update(
    agent: Agent,
    adam: Tensors,
    batch: list[Tensor],
    minibatches: list[Tensor],
    schedule: Tensors,
    args: Args,
) -> Tensors:
    """One step of the policy on all samples, then the values, in place; return the metrics."""
    metrics = ppo.ppo_update(agent, adam, batch, minibatches, schedule, args)
    fit_values(agent, adam, batch, minibatches[0], args)
    return metrics


def program() -> ModuleType:
    """The PPO script with what differs here, for the command line and to play a policy."""
    ppo.SCRIPT, ppo.Args, ppo.details = "vpg", Args, lambda args: __doc__
    ppo.train = functools.partial(ppo.train, update=vpg_update)
    return ppo


if __name__ == "__main__":
    program().main()
