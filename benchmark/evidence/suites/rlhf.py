"""RLHF on toy reviews with PPO, GRPO and DPO."""

from benchmark.lab.definitions import Suite, Variant

RLHF, GRPO, DPO = "ppo_rlhf_toy.py", "grpo_rlhf_toy.py", "dpo_rlhf_toy.py"
# The three changes by which DeepSeekMath's form differs from the default, and all their subsets:
# none is grpo-0.05 and all are paper-0.05. One more is the third normalization.
STD, OWN, K3 = "--std group", "--loss-norm sequence", "--kl-in-loss k3"
PAPER = f"{STD} {OWN} {K3}"
GRPO_CHANGES = {
    **{"std": STD, "own": OWN, "k3": K3, "mean": "--loss-norm token"},
    **{"std-own": f"{STD} {OWN}", "std-k3": f"{STD} {K3}", "own-k3": f"{OWN} {K3}"},
}
# The weight of the KL penalty, or DPO's beta, in steps; then the changes, and the true reward.
BETA = "--kl-mode fixed --kl-coef"
FRONTIER = {
    **{f"grpo-{x}": Variant(GRPO, f"{BETA} {x}") for x in (0.05, 0.1, 0.2, 0.5)},
    **{f"paper-{x}": Variant(GRPO, f"{PAPER} {BETA} {x}") for x in (0.05, 0.2, 0.5)},
    **{f"dpo-{x}": Variant(DPO, f"--nll-coef 0 --beta {x}") for x in (0.03, 0.1, 0.5, 1.0)},
    **{f"grpo-{x}-0.05": Variant(GRPO, f"{y} {BETA} 0.05") for x, y in GRPO_CHANGES.items()},
    "gold-6": Variant(GRPO, "--reward gold"),
    "gold-none": Variant(GRPO, "--reward gold --kl-mode none"),
}

SUITES = (
    # Three PPO runs on one reward model: adaptive KL, beta = 0 and a fixed beta.
    Suite(
        name="rlhf",
        reproduces="Gao et al. 2022 on a toy task: an over-optimized reward model, and its cure",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"": Variant(RLHF, "--compare")},
        table="rlhf",
        total_timesteps=None,
    ),
    Suite(
        name="rlhf_grpo_dpo",
        reproduces="GRPO (Shao et al. 2024) and DPO (Rafailov et al. 2023) on the task of `rlhf`",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"grpo": Variant(GRPO, "--compare"), "dpo": Variant(DPO, "--compare")},
        table="models",
        total_timesteps=None,
    ),
    Suite(
        name="rlhf_frontier",
        reproduces="Rafailov et al. 2023, Figure 2, on a toy task: quality over KL, per method",
        environments={"reviews": (1, 2, 3)},
        variants=FRONTIER,
        figures=("frontier",),
        table="models",
        total_timesteps=None,
    ),
)
