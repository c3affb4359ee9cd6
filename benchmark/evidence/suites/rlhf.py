"""RLHF on toy reviews with PPO, GRPO and DPO."""

from benchmark.evidence.definitions import Suite, Variant

SUITES = (
    # Three PPO runs on one reward model: adaptive KL, beta = 0 and a fixed beta.
    Suite(
        name="rlhf",
        reproduces="Gao et al. 2022 on a toy task: an over-optimized reward model, and its cure",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"": Variant("ppo_rlhf_toy.py", "--compare")},
        table="rlhf",
        total_timesteps=None,
    ),
    Suite(
        name="rlhf_grpo_dpo",
        reproduces="GRPO (Shao et al. 2024) and DPO (Rafailov et al. 2023) on the task of `rlhf`",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={
            "grpo": Variant("recipes/grpo_on_reviews.py", "--compare"),
            "dpo": Variant("recipes/dpo_on_reviews.py", "--compare"),
        },
        table="models",
        total_timesteps=None,
    ),
)
