"""A real language model of 135M weights: PPO with a value function, and GRPO."""

from benchmark.evidence.definitions import Suite, Variant

LLM = "ppo_llm.py"
GROUP = "--advantages group"
THREE, ONE = {"sums": (1, 2, 3)}, {"sums": (1,)}
GAME = "--env recipes.llm_game:RunningTotal --max-turns 3"

SUITES = (
    Suite(
        name="llm_sums",
        reproduces="SmolLM2-135M learns to add: PPO with a value function, and GRPO",
        environments={"sums": (1, 2, 3, 4, 5)},
        variants={
            "": Variant(LLM, "", "PPO"),
            "group": Variant(LLM, GROUP, "GRPO"),
            "detached": Variant(LLM, "--value-model detached", "PPO, values read only", THREE),
            "separate": Variant(LLM, "--value-model separate", "PPO, values of their own", THREE),
            "warmup": Variant(LLM, "--value-warmup 2", "PPO, values first", THREE),
            "lambda": Variant(LLM, "--gae-lambda 1", "PPO, lambda 1", THREE),
            "slow": Variant(LLM, "--learning-rate 1e-5", "PPO, half the step size", ONE),
            "fast": Variant(LLM, "--learning-rate 4e-5", "PPO, twice the step size", ONE),
            "group_slow": Variant(LLM, f"{GROUP} --learning-rate 1e-5", "GRPO, half", ONE),
            "group_fast": Variant(LLM, f"{GROUP} --learning-rate 4e-5", "GRPO, twice", ONE),
        },
        figures=("curves", "minutes"),
        total_timesteps=None,  # it counts iterations
    ),
    Suite(
        name="llm_trl",
        reproduces="TRL's GRPOTrainer with the same model, prompts and settings as our GRPO",
        environments={"sums": (1, 2, 3)},
        variants={"trl": Variant("benchmark/evidence/baselines/trl_grpo.py", label="TRL's GRPO")},
        baseline=("llm_sums", "group"),
        baseline_label="GRPO",
        figures=("curves", "minutes"),
        total_timesteps=None,
    ),
    Suite(
        name="llm_game",
        reproduces="the same model keeps a running total for three turns, paid at the end",
        environments={"running total": (1, 2, 3)},
        variants={
            "": Variant(LLM, GAME, "PPO"),
            "group": Variant(LLM, f"{GAME} {GROUP}", "GRPO"),
        },
        total_timesteps=None,
    ),
)
