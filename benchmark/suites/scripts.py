"""Rows of the table of scripts: what a script shows, and the runs that stand for it."""

from benchmark.definitions import Script
from benchmark.suites.common import (
    ATARI,
    CONTINUOUS,
    DPO,
    GRPO,
    KL_PENALTY,
    LSTM,
    MINIMAL,
    MINIMAL_GRPO,
    MULTIDISCRETE,
    RLHF,
)

SCRIPTS = {
    MINIMAL: Script("all of PPO in about 250 lines", "minimal", "HalfCheetah-v4"),
    CONTINUOUS: Script("details 1–13 and 23–31", "figure3", "HalfCheetah-v4"),
    KL_PENALTY: Script("the paper's other objective", "kl_vs_clip", "Hopper-v4", "adaptive-0.01"),
    ATARI: Script("details 1–22", "games", "Pong"),
    LSTM: Script("details 1–22 and 32–36", "games", "Pong", "lstm"),
    MULTIDISCRETE: Script("detail 37, action masks", "cartpole", "CartPole-v1"),
    MINIMAL_GRPO: Script("all of GRPO in 200 lines", "grpo_minimal", "sums"),
    RLHF: Script("RLHF with PPO", "rlhf", "reviews"),
    GRPO: Script("GRPO on the same task", "rlhf_grpo_dpo", "reviews", "grpo"),
    DPO: Script("DPO on the same task", "rlhf_grpo_dpo", "reviews", "dpo"),
}
