"""Table 1 of the paper: clipping, and penalties of the KL."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import CONTINUOUS, MUJOCO7

KL_PENALTY = "ppo_kl_penalty.py"
# The eleven surrogate objectives of the paper's Table 1: a script, its flags and a label.
ADAPTIVE = "adaptive KL, d_targ"
OBJECTIVES = {
    "none": (KL_PENALTY, "--kl-mode none", "no clipping or penalty"),
    "clip-0.1": (CONTINUOUS, "--clip-coef 0.1", "clipping, ε = 0.1"),
    "clip-0.2": (CONTINUOUS, "--clip-coef 0.2", "clipping, ε = 0.2"),
    "clip-0.3": (CONTINUOUS, "--clip-coef 0.3", "clipping, ε = 0.3"),
    "adaptive-0.003": (KL_PENALTY, "--kl-mode adaptive --penalty-kl 0.003", f"{ADAPTIVE} = 0.003"),
    "adaptive-0.01": (KL_PENALTY, "--kl-mode adaptive --penalty-kl 0.01", f"{ADAPTIVE} = 0.01"),
    "adaptive-0.03": (KL_PENALTY, "--kl-mode adaptive --penalty-kl 0.03", f"{ADAPTIVE} = 0.03"),
    "fixed-0.3": (KL_PENALTY, "--kl-mode fixed --kl-coef 0.3", "fixed KL, β = 0.3"),
    "fixed-1": (KL_PENALTY, "--kl-mode fixed --kl-coef 1", "fixed KL, β = 1"),
    "fixed-3": (KL_PENALTY, "--kl-mode fixed --kl-coef 3", "fixed KL, β = 3"),
    "fixed-10": (KL_PENALTY, "--kl-mode fixed --kl-coef 10", "fixed KL, β = 10"),
}

# The settings of the code that OpenAI published in the month of the paper, as far as flags can
# express them (see benchmark/pages/objectives.md), and without its clipping of values at ε.
RELEASE_2017 = (
    "--no-anneal-lr --adam-eps 1e-8 --max-grad-norm inf --vf-coef 1.0 --no-scale-rewards "
    "--clip-obs 5.0 --truncation-is-terminal"
)
PROTOCOL_2017 = {
    CONTINUOUS: f"{RELEASE_2017} --no-clip-vloss",
    KL_PENALTY: f"{RELEASE_2017} --value-clip-coef inf",
}

SUITES = (
    Suite(
        name="table1",
        reproduces="Schulman et al. 2017, Table 1, with the settings of the code of 2017",
        environments=dict.fromkeys(MUJOCO7, (1, 2, 3)),
        variants={
            name: Variant(script, f"{flags} {PROTOCOL_2017[script]}", label)
            for name, (script, flags, label) in OBJECTIVES.items()
        },
        table="normalized",
        figures=("normalized",),
    ),
)
