"""What several suites share: scripts, environments, flags and fields."""

import inspect
from typing import Any

from benchmark.paper.suites import tasks

CONTINUOUS = "ppo_continuous_action.py"
KL_PENALTY = "ppo_kl_penalty.py"
MULTIDISCRETE = "ppo_multidiscrete.py"
SB3 = "benchmark/paper/baselines/stable_baselines3_ppo.py"

# The seven environments of the paper's Figure 3 and Table 1, as version 4.
MUJOCO7 = (
    *("HalfCheetah-v4", "Hopper-v4", "InvertedDoublePendulum-v4", "InvertedPendulum-v4"),
    *("Reacher-v4", "Swimmer-v4", "Walker2d-v4"),
)
THREE = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")

FAST = "--torch-threads 1 --bfloat16"  # makes 2M steps of a game affordable on one core
GAMES = (  # settings of ppo_atari.py, for others
    "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01"
)
RAW = "--no-norm-obs --no-scale-rewards"  # ppo2 does both for MuJoCo only

# Texts of scripts, and what takes their place where a switch is no setting. Many runs were made
# while the scripts had flags for them, which `flags_at_commit` names. Such a run and one of the
# changed script have the same weights to the bit.
SHARED_NETWORK = (("value, policy = hidden(), hidden()", "value = policy = hidden()"),)
SET_RATE = "        update_args.learning_rate.fill_(learning_rate)"
# Tasks of our own, whose text is put into a copy of a script.
TASKS = ("# === Agent ===\n", f"{inspect.getsource(tasks)}\n\n# === Agent ===\n")


# Fields of suites.
def with_default(label: str) -> dict[str, Any]:
    """Those of one whose variants are compared with the runs of the default, under this label."""
    return {"baseline": ("figure3", ""), "baseline_label": label}


SHORT = {"total_timesteps": 299_008, "points": 146}  # their curves have a point for each iteration
