"""Changes of PPO that some suites need and that are no settings of the scripts, as replaced texts.

Many of their runs were made while the scripts had flags for them, which `flags_at_commit` names.
Such a run and one of the changed script have the same weights to the bit.
"""

Text = tuple[str, str]  # of a script, and what takes its place

TRUNKS = "        value, policy = hidden(), hidden()\n"
SHARED_TRUNK = "        value = policy = hidden()\n"
SHARED_NETWORK: tuple[Text, ...] = ((TRUNKS, SHARED_TRUNK),)

ORTHOGONAL = "    nn.init.orthogonal_(layer.weight, gain)\n    nn.init.zeros_(layer.bias)\n"
DEFAULT_INIT: tuple[Text, ...] = ((ORTHOGONAL, ""),)

TENSORS = "        tensors = {name: torch.tensor("  # here, `floats` may still be changed
ANNEAL_CLIP: tuple[Text, ...] = (
    (TENSORS, f'        floats["clip_coef"] = args.clip_coef * frac\n{TENSORS}'),
)

LOG_STD = "self.log_std = nn.Parameter(torch.zeros(1, action_size))"
ACT = "        act = actor(agent)\n"
ACTING = '            "check/acting": '


def anneal_log_std(first: float, last: float) -> tuple[Text, ...]:
    """A log standard deviation that is not learned: it falls linearly (PPO paper, Table 4)."""
    value = f"{last} + ({first} - {last}) * frac"
    return (
        (LOG_STD, "self.log_std = nn.Buffer(torch.zeros(1, action_size))"),
        (ACT, f"        agent.log_std.fill_({value})\n{ACT}"),
    )


def adapt_lr_kl(desired: float) -> tuple[Text, ...]:
    """A step size that adapts to the KL of the last update (PPO paper, Table 4; rule of ACKTR).

    Where the KL is more than twice the desired one, the step size is divided by 1.5; where it is
    less than half, multiplied. It needs `--no-anneal-lr`.
    """
    rule = f"""        if history:
            rate, kl = history[-1]["charts/learning_rate"], history[-1]["check/kl_after"]
            factor = (kl < {desired} / 2) - (kl > 2 * {desired})
            floats["learning_rate"] = min(max(rate * 1.5**factor, 1e-5), 1e-2)
"""
    kl = '            "check/kl_after": approx_kl(logratio),\n'
    return (TENSORS, rule + TENSORS), (ACTING, kl + ACTING)
