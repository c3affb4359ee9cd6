"""Vanilla policy gradient; it imports ppo_continuous_action.py and on_ppo.py.

    PYTHONPATH=. python benchmark/paper/baselines/vpg.py --env-id Hopper-v4

"Vanilla PG, Adaptive" of the PPO paper's Figure 3: after each rollout one step of Adam, divided by
1.5 where the last one came to more than twice the desired KL, and multiplied by it below half: so
homework 4 of the course in the paper's footnote 3. PPO with one epoch and one minibatch has the
gradient of log pi times the advantage; the value function is fitted apart, as in TRPO.

Settings: desired KL 0.01 (the pilot took 0.002); all else as in the PPO script. Not known: all of
the paper's.
"""

import dataclasses
from types import SimpleNamespace

import torch
from torch import Tensor

import on_ppo
import ppo_continuous_action as ppo
from ppo_continuous_action import Agent, Tensors


@dataclasses.dataclass(frozen=True)
class Args(on_ppo.ValueArgs):
    adapt_lr_kl: float = 0.01  # adapt the step size of the policy to this KL
    vf_coef: float = 0.0  # not used: the values are fitted apart
    max_grad_norm: float = torch.inf  # Adam's steps hardly depend on it

    method = "The policy gradient"


def vpg_update(
    agent: Agent, adam: Tensors, batch: list[Tensor], indices: Tensor, args: Args
) -> Tensors:
    """One step of the policy on all samples, then the values, in place; return the metrics."""
    rate = adam.setdefault("rate", args.learning_rate.double())  # of the policy
    now = SimpleNamespace(**{**vars(args), "learning_rate": rate.float()})
    metrics = ppo.ppo_update(agent, adam, batch, indices, now)
    metrics["vpg/learning_rate"] = rate[None].clone()
    obs, actions, logprobs, *_ = batch
    with torch.no_grad():
        kl = ppo.approx_kl(agent.evaluate_actions(obs, actions)[1] - logprobs)
    factor = (kl < args.adapt_lr_kl / 2).int() - (kl > 2 * args.adapt_lr_kl).int()
    rate.mul_(1.5**factor).clamp_(1e-5, 1e-2)
    on_ppo.fit_values(agent, adam, batch, indices[0], args)
    return metrics


if __name__ == "__main__":
    on_ppo.run(__doc__, Args, vpg_update)
