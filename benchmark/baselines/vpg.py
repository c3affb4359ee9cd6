"""Vanilla policy gradient, beside ppo_continuous_action.py and trpo.py, which it imports.

    PYTHONPATH=. python benchmark/baselines/vpg.py --env-id Hopper-v4

"Vanilla PG, Adaptive" of the PPO paper's Figure 3: after each rollout one step of Adam, divided by
1.5 where the last one came to more than twice the desired KL, and multiplied by it below half: so
homework 4 of the course in the paper's footnote 3. PPO with one epoch and one minibatch has the
gradient of log pi times the advantage; the value function is fitted apart, as in TRPO.

Settings: desired KL 0.01 (the pilot took 0.002); all else as in the PPO script. Not known: all of
the paper's.
"""

import dataclasses
import functools
from types import ModuleType

import torch
from torch import Tensor

import ppo_continuous_action as ppo
from ppo_continuous_action import Agent, Tensors
from trpo import fit_values

UNUSED = "compile num_minibatches update_epochs anneal_lr clip_vloss vf_coef early_stop_kl"


@dataclasses.dataclass(frozen=True)
class Args(ppo.Args):
    compile: bool = False  # not used
    num_minibatches: int = 1  # not used: a step is computed on all samples
    update_epochs: int = 1  # not used: one step of the policy per batch
    anneal_lr: bool = False  # not used: the KL decides
    adapt_lr_kl: float = 0.01  # adapt the step size of the policy to this KL
    vf_coef: float = 0.0  # not used: the values are fitted apart
    max_grad_norm: float = torch.inf  # Adam's steps hardly depend on it
    value_epochs: int = 5  # passes over a batch to fit the values [trpo_mpi: 5]
    value_minibatch_size: int = 64  # samples per step of the values [trpo_mpi: 64]
    value_learning_rate: float = 1e-3  # Adam's step size for the values [trpo_mpi: 1e-3]

    def __post_init__(self) -> None:
        super().__post_init__()
        if changed := [x for x in UNUSED.split() if getattr(self, x) != getattr(Args, x)]:
            flags = ", ".join(f"--{x.replace('_', '-')}" for x in changed)
            raise ppo.UsageError(f"The policy gradient does not use {flags}.")


def vpg_update(
    agent: Agent, adam: Tensors, batch: list[Tensor], indices: Tensor, args: Args
) -> Tensors:
    """One step of the policy on all samples, then the values, in place; return the metrics."""
    rate = adam.setdefault("rate", args.learning_rate.double())  # of the policy
    now = dataclasses.replace(args, learning_rate=rate.float())
    metrics = ppo.ppo_update(agent, adam, batch, indices, now)
    metrics["vpg/learning_rate"] = rate[None].clone()
    obs, actions, logprobs, *_ = batch
    with torch.no_grad():
        kl = ppo.approx_kl(agent.evaluate_actions(obs, actions)[0] - logprobs)
    factor = (kl < args.adapt_lr_kl / 2).int() - (kl > 2 * args.adapt_lr_kl).int()
    rate.mul_(1.5**factor).clamp_(1e-5, 1e-2)
    fit_values(agent, adam, batch, indices[0], args)
    return metrics


def program() -> ModuleType:
    """The PPO script with what differs here, for the command line and to play a policy."""
    ppo.Args, ppo.details = Args, lambda args: __doc__
    ppo.train = functools.partial(ppo.train, update=vpg_update)
    return ppo


if __name__ == "__main__":
    program().main()
