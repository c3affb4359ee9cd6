"""Checks to paste into a PPO of your own; `python -m benchmark check` reads what they return.

Log them after each update, for example with `writer.add_scalar(name, value, global_step)`.
All tensors are (T, N): T steps of N environments. In CleanRL's scripts, for instance, `last_value`
is `next_value`, `done` is `torch.cat([dones[1:], next_done[None].float()])`, and `new_logprobs` is
`agent.get_action_and_value(b_obs, b_actions)[1].view_as(logprobs)`, under `torch.no_grad()`.
"""

import torch


def observed_returns(rewards, done, last_value, gamma):
    """Rewards that really followed until the episode ended; after the rollout, V (N,) stands in.

    `done` is 1 where the episode ended with that step. After a time limit, first add
    gamma * V(final observation) to the reward, if your advantages do so too.
    """
    returns, rest = torch.zeros_like(rewards), last_value
    for t in reversed(range(len(rewards))):
        rest = returns[t] = rewards[t] + gamma * (1 - done[t]) * rest
    return returns


def diagnose(rewards, done, last_value, gamma, values, advantages, logprobs, new_logprobs):
    """`advantages`, `values` and `logprobs` are those of the rollout, none of them normalized.

    `new_logprobs` are those after the update.
    """
    observed = observed_returns(rewards, done, last_value.reshape(-1), gamma)
    pairs = torch.stack([(new_logprobs - logprobs).flatten(), advantages.flatten()])
    return {
        "check/value_bias": ((values - observed).mean() / observed.square().mean().sqrt()).item(),
        "check/target_std": (advantages + values).std().item(),
        "check/update": torch.corrcoef(pairs)[0, 1].nan_to_num().item(),
    }
