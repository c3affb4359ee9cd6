"""The paper's 3D humanoid: section 6.3 and Table 4."""

from benchmark.evidence.suites.common import CONTINUOUS, SET_RATE
from benchmark.lab.definitions import Suite, Variant

# The paper's Table 4 for its 3D humanoids, with 32 actors, as it has for walking; 128 are for the
# harder tasks.
FLAGS = "--num-envs 32 --num-steps 512 --num-minibatches 4 --update-epochs 15 --no-anneal-lr"
# The step size adapts to the KL of the last update by the rule of ACKTR: where that is more than
# twice the desired one, the step size is divided by 1.5; where it is less than half, multiplied.
ADAPT_RATE = """        if updates:
            rate, kl = updates[-1]["charts/learning_rate"], updates[-1]["check/kl_after"]
            factor = (kl < 0.01 / 2) - (kl > 2 * 0.01)
            learning_rate = min(max(rate * 1.5**factor, 1e-5), 1e-2)
"""
LOG_KL = '            "check/kl_after": approx_kl(logratio),\n'
ACTING = '            "check/acting": '
# The log standard deviation is not learned: it falls linearly.
LOG_STD = "self.log_std = nn.Parameter(torch.zeros(1, action_size))"
SET_LOG_STD = "        agent.log_std.fill_(-1.6 + (-0.7 - -1.6) * remaining)\n"
ACT = "        act = actor(agent)\n"
TEXTS = (
    (SET_RATE, ADAPT_RATE + SET_RATE),
    (ACTING, LOG_KL + ACTING),
    (LOG_STD, LOG_STD.replace("Parameter", "Buffer")),
    (ACT, SET_LOG_STD + ACT),
)

SUITES = (
    Suite(
        name="humanoid",
        reproduces="Schulman et al. 2017, section 6.3 and Table 4, in Gymnasium's Humanoid-v4",
        environments={"Humanoid-v4": (1, 2, 3)},
        variants={"": Variant(CONTINUOUS, FLAGS, "settings of Table 4", replaced=TEXTS)},
        total_timesteps=4_096_000,
        table="each_run",
        figures=("curves",),
        evaluated=True,
    ),
)
