"""Trust region policy optimization (TRPO); it imports ppo_continuous_action.py and on_ppo.py.

    PYTHONPATH=. python benchmark/evidence/baselines/trpo.py --env-id Hopper-v4

Schulman et al. 2015 (arXiv 1502.05477): the policy takes the step along its natural gradient that a
quadratic model of the KL allows, halved until the exact mean KL is at most delta and the surrogate
objective has grown. The value function is fitted apart.

Settings: delta 0.01; 10 steps of conjugate gradients, on the Fisher matrix of all samples (paper:
of a tenth); its damping 0.1, and values by 5 epochs of Adam, 1e-3, in minibatches of 64, as in
baselines/trpo_mpi; all else as in the PPO script. Not known: all of the PPO paper's, for Figure 3.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import on_ppo
import ppo_continuous_action as ppo
from on_ppo import flat_gradient
from ppo_continuous_action import Agent, Tensors


@dataclasses.dataclass(frozen=True)
class Args(on_ppo.ValueArgs):
    max_kl: float = 0.01  # largest mean KL of a step, delta [paper: 0.01]
    cg_steps: int = 10  # steps of conjugate gradients [paper: 10]
    damping: float = 0.1  # added to the diagonal of the Fisher matrix [trpo_mpi: 0.1]
    backtracks: int = 10  # lengths that are tried, each half of the last [trpo_mpi: 10]

    method = "TRPO"
    unused = f"{on_ppo.ValueArgs.unused} learning_rate ent_coef max_grad_norm"


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
    on_ppo.fit_values(agent, adam, batch, order, args)
    metrics |= {"losses/grad_norm": gradient.norm(), "trpo/step": share}
    return {name: x[None] for name, x in metrics.items()}


if __name__ == "__main__":
    on_ppo.run(__doc__, Args, trpo_update)
