"""A real language model of 135M weights: PPO with a value function, and GRPO."""

from benchmark.evidence.definitions import Suite, Variant

LLM = "ppo_llm.py"
GROUP = "--advantages group"
GAME = "--env recipes.llm_game:RunningTotal --max-turns 3 --max-tokens 9"

SUITES = (
    Suite(
        name="llm_sums",
        reproduces="SmolLM2-135M learns to add: PPO with a value function, and GRPO",
        environments={"sums": (1, 2, 3, 4, 5)},
        variants={"": Variant(LLM, "", "PPO"), "group": Variant(LLM, GROUP, "GRPO")},
        figures=("curves", "minutes"),
        total_timesteps=None,  # it counts iterations
    ),
    Suite(
        name="llm_values",
        reproduces="values that do not change the trunk, and a larger step size",
        environments={"sums": (1, 2)},
        variants={
            "detached": Variant(LLM, "--value-model detached", "values read only"),
            "double": Variant(LLM, "--learning-rate 4e-5", "step size 4e-5", {"sums": (1,)}),
        },
        baseline=("llm_sums", ""),
        baseline_label="PPO",
        total_timesteps=None,
    ),
    Suite(
        name="llm_trl",
        reproduces="TRL's GRPOTrainer with the same model, prompts and settings as our GRPO",
        environments={"sums": (1, 2)},
        variants={"trl": Variant("benchmark/evidence/baselines/trl_grpo.py", label="TRL's GRPO")},
        baseline=("llm_sums", "group"),
        baseline_label="GRPO",
        figures=("curves",),
        total_timesteps=None,
    ),
    Suite(
        name="llm_game",
        reproduces="the same model keeps a running total for three turns, paid at the end",
        environments={"running total": (1, 2, 3)},
        variants={"": Variant(LLM, GAME, "PPO"), "group": Variant(LLM, f"{GAME} {GROUP}", "GRPO")},
        figures=("curves", "minutes"),
        total_timesteps=None,
    ),
)
