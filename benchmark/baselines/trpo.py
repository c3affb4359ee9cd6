"""Trust region policy optimization (TRPO), beside ppo_continuous_action.py, which it imports.

    PYTHONPATH=. python benchmark/baselines/trpo.py --env-id Hopper-v4

Schulman et al. 2015 (arXiv 1502.05477): the policy takes the step along its natural gradient that a
quadratic model of the KL allows, halved until the exact mean KL is at most delta and the surrogate
objective has grown. The value function is fitted apart.

Settings: delta 0.01; 10 steps of conjugate gradients, on the Fisher matrix of all samples (paper:
of a tenth); its damping 0.1, and values by 5 epochs of Adam, 1e-3, in minibatches of 64, as in
baselines/trpo_mpi; all else as in the PPO script. Not known: all of the PPO paper's, for Figure 3.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import ppo_continuous_action as ppo
from ppo_continuous_action import Agent, Tensors

UNUSED = """compile num_minibatches update_epochs learning_rate anneal_lr clip_vloss ent_coef
vf_coef max_grad_norm early_stop_kl"""


@dataclasses.dataclass(frozen=True)
class Args(ppo.Args):
    compile: bool = False  # not used
    num_minibatches: int = 1  # not used: a step is computed on all samples
    update_epochs: int = 1  # not used: one step of the policy per batch
    anneal_lr: bool = False  # not used
    max_kl: float = 0.01  # largest mean KL of a step, delta [paper: 0.01]
    cg_steps: int = 10  # steps of conjugate gradients [paper: 10]
    damping: float = 0.1  # added to the diagonal of the Fisher matrix [trpo_mpi: 0.1]
    backtracks: int = 10  # lengths that are tried, each half of the last [trpo_mpi: 10]
    value_epochs: int = 5  # passes over a batch to fit the values [trpo_mpi: 5]
    value_minibatch_size: int = 64  # samples per step of the values [trpo_mpi: 64]
    value_learning_rate: float = 1e-3  # Adam's step size for the values [trpo_mpi: 1e-3]

    def __post_init__(self) -> None:
        super().__post_init__()
        if changed := [x for x in UNUSED.split() if getattr(self, x) != getattr(Args, x)]:
            flags = ", ".join(f"--{x.replace('_', '-')}" for x in changed)
            raise ppo.UsageError(f"TRPO does not use {flags}.")


def flat_gradient(y: Tensor, agent: Agent, **options: bool) -> Tensor:
    """Gradient (P,) of the scalar `y` by all that the agent learns; 0 where it has no influence."""
    gradients = torch.autograd.grad(y, [*agent.parameters()], materialize_grads=True, **options)
    return torch.cat([x.flatten() for x in gradients])


def policy(agent: Agent, obs: Tensor) -> Normal:
    """The distributions (B, A) of actions in `obs` (B, D)."""
    return Normal(agent.policy(obs), agent.log_std.exp(), validate_args=False)


def mean_kl(old: Normal, new: Normal) -> Tensor:
    """Exact KL(old || new) of actions (B, A), mean over the samples; a scalar."""
    return kl_divergence(old, new).sum(-1).mean()


def fisher_product(agent: Agent, obs: Tensor, damping: float) -> Callable[[Tensor], Tensor]:
    """The function v -> (F + damping I) v, (P,); F is the Hessian of the KL from the policy now."""
    new = policy(agent, obs)
    old = Normal(new.mean.detach(), new.stddev.detach(), validate_args=False)
    slope = flat_gradient(mean_kl(old, new), agent, create_graph=True)
    return lambda v: flat_gradient(slope @ v, agent, retain_graph=True) + damping * v


def conjugate_gradients(product: Callable[[Tensor], Tensor], b: Tensor, steps: int) -> Tensor:
    """Solve product(x) = b, both (P,), for a positive definite matrix, as well as `steps` allow."""
    x, residual, direction = torch.zeros_like(b), b, b
    for _ in range(steps):
        square = residual @ residual
        if square < 1e-10:
            break
        image = product(direction)
        length = square / (direction @ image)
        x, residual = x + length * direction, residual - length * image
        direction = residual + (residual @ residual) / square * direction
    return x


def fit_values(
    agent: Agent, adam: Tensors, batch: list[Tensor], order: Tensor, args: ppo.Args
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


def trpo_update(
    agent: Agent, adam: Tensors, batch: list[Tensor], indices: Tensor, args: Args
) -> Tensors:
    """Move the policy within the trust region and fit the values, in place; return the metrics."""
    (order,), (obs, actions, old_logprobs, _, advantages, _) = indices, batch
    advantages = ppo.normalize(advantages) if args.norm_adv else advantages

    def surrogate(dist: Normal) -> Tensor:
        return ((dist.log_prob(actions).sum(-1) - old_logprobs).exp() * advantages).mean()

    old = policy(agent, obs)
    gain = surrogate(old)
    gradient = flat_gradient(gain, agent)
    product = fisher_product(agent, obs, args.damping)
    direction = conjugate_gradients(product, gradient, args.cg_steps)
    length = (2 * args.max_kl / (direction @ product(direction) + 1e-8)).sqrt()
    start = adam["weights"].clone()
    with torch.no_grad():
        for share in [*0.5 ** torch.arange(args.backtracks), torch.tensor(0.0)]:
            adam["weights"].copy_(start + share * length * direction)
            new = policy(agent, obs)
            if mean_kl(old, new) <= args.max_kl and surrogate(new) > gain:
                break
        _, metrics = ppo.ppo_loss(agent, batch, args)  # of the policy after its step
    fit_values(agent, adam, batch, order, args)
    metrics |= {"losses/grad_norm": gradient.norm(), "trpo/step": share}
    return {name: x[None] for name, x in metrics.items()}


def program() -> ModuleType:
    """The PPO script with what differs here, for the command line and to play a policy."""
    ppo.Args, ppo.details = Args, lambda args: __doc__
    ppo.train = functools.partial(ppo.train, update=trpo_update)
    return ppo


if __name__ == "__main__":
    program().main()
