"""Variants of grpo_minimal.py: their labels, and the settings that make them."""

from benchmark.lab.definitions import Suite, Variant

GRPO = {"scale_rewards": True, "loss_norm": "sequence"}
DAPO = {"scale_rewards": True, "loss_norm": "token", "clip_high": 0.28, "dynamic_sampling": True}
VARIANTS = {
    "dr-grpo": ("Dr. GRPO", {}),
    "std": ("Dr. GRPO, divided by the std", {"scale_rewards": True}),
    "kl": ("Dr. GRPO, KL penalty β = 0.2", {"kl_coef": 0.2}),
    "rloo": ("Dr. GRPO, RLOO's baseline", {"baseline": "others"}),
    "grpo": ("GRPO, β = 0.04", {**GRPO, "kl_coef": 0.04}),
    "dapo": ("DAPO", DAPO),
    "gspo": ("GSPO", {**GRPO, "ratio": "sequence"}),
}
TRIES = (1, 2, 4, 8, 16)  # k of pass@k

SUITES = (
    Suite(
        name="grpo_minimal",
        reproduces="what GRPO's variants do with a verifiable reward: pass@1, pass@16 and KL",
        environments={"sums": (1, 2, 3, 4, 5)},
        variants={"": Variant("benchmark/evidence/baselines/minimal_grpo.py")},
        figures=("sums",),
        table="sums",
        total_timesteps=None,
    ),
)
