"""Changes of PPO that some suites need and that are no settings of the scripts, as replaced texts.

Many of their runs were made while the scripts had flags for them, which `flags_at_commit` names.
Such a run and one of the changed script have the same weights to the bit.
"""

Text = tuple[str, str]  # of a script, and what takes its place

TRUNKS = "value, policy = hidden(), hidden()"
SHARED_NETWORK: tuple[Text, ...] = ((TRUNKS, "value = policy = hidden()"),)

ORTHOGONAL = "    nn.init.orthogonal_(layer.weight, gain)\n    nn.init.zeros_(layer.bias)\n"
DEFAULT_INIT: tuple[Text, ...] = ((ORTHOGONAL, ""),)

SET_RATE = '        tensors["learning_rate"].fill_(learning_rate)'
ANNEAL_CLIP: tuple[Text, ...] = (
    (SET_RATE, f'        tensors["clip_coef"].fill_(args.clip_coef * remaining)\n{SET_RATE}'),
)

LOG_STD = "self.log_std = nn.Parameter(torch.zeros(1, action_size))"
ACT = "        act = actor(agent)\n"
ACTING = '            "check/acting": '


def anneal_log_std(first: float, last: float) -> tuple[Text, ...]:
    """A log standard deviation that is not learned: it falls linearly (PPO paper, Table 4)."""
    value = f"{last} + ({first} - {last}) * remaining"
    return (
        (LOG_STD, "self.log_std = nn.Buffer(torch.zeros(1, action_size))"),
        (ACT, f"        agent.log_std.fill_({value})\n{ACT}"),
    )


def adapt_lr_kl(desired: float) -> tuple[Text, ...]:
    """A step size that adapts to the KL of the last update (PPO paper, Table 4; rule of ACKTR).

    Where the KL is more than twice the desired one, the step size is divided by 1.5; where it is
    less than half, multiplied. It needs `--no-anneal-lr`.
    """
    rule = f"""        if updates:
            rate, kl = updates[-1]["charts/learning_rate"], updates[-1]["check/kl_after"]
            factor = (kl < {desired} / 2) - (kl > 2 * {desired})
            learning_rate = min(max(rate * 1.5**factor, 1e-5), 1e-2)
"""
    kl = '            "check/kl_after": approx_kl(logratio),\n'
    return (SET_RATE, rule + SET_RATE), (ACTING, kl + ACTING)
