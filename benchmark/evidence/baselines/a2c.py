"""Advantage actor critic (A2C); it imports ppo_continuous_action.py and on_ppo.py.

    PYTHONPATH=. python benchmark/evidence/baselines/a2c.py --env-id Hopper-v4 [--trust-region 1]

Mnih et al. 2016 (arXiv 1602.01783), synchronous as in baselines: short rollouts, a step of RMSprop
after each. It is PPO with one epoch, one minibatch, lambda 1, this optimizer, and neither clipping
nor normalized advantages (Huang et al. 2022, arXiv 2205.09123). The trust region is that of ACER
(Wang et al. 2016, arXiv 1611.01224, equations 11-12), without its replay.

Settings: 16 environments of 5 steps; 7e-4 (the pilot took 2e-3), annealed to 0; RMSprop as in
TensorFlow, epsilon inside of the root and squares from 1: defaults of baselines/a2c, which has none
for MuJoCo. Two of its defaults are for games and are not taken, since the returns fall with them
(suite `a2c`): twice the weight of the value errors (--vf-coef 1) and a bonus for entropy
(--ent-coef 0.01). ACER's delta 1 and average 0.99; all else as in the PPO script. Not known: all of
the PPO paper's, for Figure 3.
"""

import copy
import dataclasses

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import on_ppo
import ppo_continuous_action as ppo
from ppo_continuous_action import Agent, Tensors


@dataclasses.dataclass(frozen=True)
class Args(on_ppo.Args):
    checkpoint_interval: int = 1000  # iterations between two checkpoints
    num_envs: int = 16  # environments N, stepped in turn [baselines: 16]
    num_steps: int = 5  # steps per environment and iteration, T [baselines: 5]
    learning_rate: float = 7e-4  # RMSprop's step size [baselines: 7e-4]
    gae_lambda: float = 1.0  # 1: sums of all rewards [baselines: 1]
    norm_adv: bool = False  # not used
    clip_vloss: bool = False  # not used
    rms_alpha: float = 0.99  # share of the old squares in RMSprop [baselines: 0.99]
    rms_eps: float = 1e-5  # RMSprop's epsilon [baselines: 1e-5]
    trust_region: float = 1e9  # the trust region's delta [ACER: 1; 1e9: none, as in A2C]
    average_alpha: float = 0.99  # share of the old weights in the average [ACER: 0.99]

    method = "A2C"
    unused = f"{on_ppo.Args.unused} adam_eps norm_adv clip_vloss"


def project(gradient: Tensor, slope: Tensor, delta: float) -> Tensor:
    """The z nearest to `gradient` with slope @ z <= delta, row by row (B, S); ACER, equation 12."""
    excess = ((slope * gradient).sum(-1, keepdim=True) - delta).clamp(min=0)
    return gradient - excess / slope.square().sum(-1, keepdim=True).clamp(min=1e-12) * slope


def a2c_loss(agent: Agent, average: Agent, batch: list[Tensor], args: Args) -> Tensor:
    """A scalar with the gradient of A2C: policy, entropy bonus and half the squared value errors.

    It passes through mean and log std of each sample, where the trust region limits how fast the KL
    of the policy from the `average` agent's grows.
    """
    obs, actions, _, _, advantages, returns = batch
    mean = agent.policy(obs)
    statistics = torch.cat([mean, agent.log_std.expand_as(mean)], -1)  # (B, 2A)
    new_mean, new_log_std = statistics.chunk(2, -1)
    new = Normal(new_mean, new_log_std.exp(), validate_args=False)
    old = Normal(average.policy(obs), average.log_std.exp(), validate_args=False)
    gain = advantages * new.log_prob(actions).sum(-1) + args.ent_coef * new.entropy().sum(-1)
    (gradient,) = torch.autograd.grad(gain.sum(), statistics, retain_graph=True)
    (slope,) = torch.autograd.grad(kl_divergence(old, new).sum(), statistics, retain_graph=True)
    policy_loss = -(project(gradient, slope, args.trust_region) * statistics).sum(-1).mean()
    return policy_loss + args.vf_coef * 0.5 * ((agent.value(obs) - returns) ** 2).mean()


def a2c_update(
    agent: Agent, adam: Tensors, batch: list[Tensor], indices: Tensor, args: Args
) -> Tensors:
    """One step of RMSprop on all samples, in place; return the metrics after it."""
    weights, square = adam["weights"], adam.setdefault("rms", torch.ones_like(adam["weights"]))
    average, average_weights = copy.deepcopy(agent), adam.setdefault("average", weights.clone())
    nn.utils.vector_to_parameters(average_weights, average.parameters())
    loss = a2c_loss(agent, average, batch, args)
    gradient = on_ppo.flat_gradient(loss, agent)
    norm = gradient.norm()
    gradient = gradient * (args.max_grad_norm / norm).clamp(max=1.0)
    square.lerp_(gradient**2, 1 - args.rms_alpha)
    weights -= args.learning_rate * gradient / (square + args.rms_eps).sqrt()
    average_weights.lerp_(weights, 1 - args.average_alpha)
    with torch.no_grad():
        _, metrics = ppo.ppo_loss(agent, batch, args)
    return {name: x[None] for name, x in (metrics | {"losses/grad_norm": norm}).items()}


if __name__ == "__main__":
    on_ppo.run(__doc__, Args, a2c_update)
