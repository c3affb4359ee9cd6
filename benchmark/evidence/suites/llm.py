"""A real language model of 135M weights: PPO with a value function, and GRPO."""

from benchmark.evidence.definitions import Suite, Variant

LLM = "ppo_llm.py"
THREE_SEEDS = {"sums": (1, 2, 3)}

SUITES = (
    Suite(
        name="llm_sums",
        reproduces="SmolLM2-135M learns to add: PPO with a value function, and GRPO",
        environments={"sums": (1, 2, 3)},
        variants={
            "": Variant(LLM, "", "PPO, values on the policy's trunk"),
            "group": Variant(LLM, "--advantages group", "GRPO, groups of 8"),
            "detached": Variant(
                LLM, "--value-model detached", "PPO, values whose gradient stops at the trunk"
            ),
        },
        total_timesteps=None,
        points=8,
    ),
)
