"""A real language model of 135M weights: PPO with a value function, and GRPO."""

from benchmark.evidence.definitions import Suite, Variant

LLM = "ppo_llm.py"
GROUP = "--advantages group"
TWO = {"sums": (1, 2)}  # seeds
GAME = "--env recipes.llm_game:RunningTotal --max-turns 3"

SUITES = (
    Suite(
        name="llm_sums",
        reproduces="SmolLM2-135M learns to add: PPO with a value function, and GRPO",
        environments={"sums": (1, 2, 3)},
        variants={
            "": Variant(LLM, "", "PPO"),
            "group": Variant(LLM, GROUP, "GRPO"),
            "detached": Variant(LLM, "--value-model detached", "PPO, values read only", TWO),
        },
        figures=("curves", "minutes"),
        total_timesteps=None,  # it counts iterations
    ),
    Suite(
        name="llm_trl",
        reproduces="TRL's GRPOTrainer with the same model, prompts and settings as our GRPO",
        environments=TWO,
        variants={"trl": Variant("benchmark/evidence/baselines/trl_grpo.py", label="TRL's GRPO")},
        baseline=("llm_sums", "group"),
        baseline_label="GRPO",
        figures=("curves",),
        total_timesteps=None,
    ),
    Suite(
        name="llm_game",
        reproduces="the same model keeps a running total for three turns, paid at the end",
        environments={"running total": (1,)},
        variants={
            "": Variant(LLM, GAME, "PPO"),
            "group": Variant(LLM, f"{GAME} {GROUP}", "GRPO"),
        },
        total_timesteps=None,
    ),
)
