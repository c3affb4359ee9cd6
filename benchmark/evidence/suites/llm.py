"""A real language model of 135M weights: PPO with a value function, and GRPO."""

from benchmark.evidence.definitions import Suite, Variant

LLM = "ppo_llm.py"
GROUP = "--advantages group"
# The default was `shared` until the suites of values were run; records of before name it, too.
PPO, SHARED = "--value-model detached", "--value-model shared"
GAME = "--env recipes.llm_game:RunningTotal --max-turns 3 --max-tokens 9"
# The script counts iterations, not steps; checkpoint and model of a run are 2 GB.
COMMON = {"total_timesteps": None, "step": "episodes", "keeps_weights": False}


def step_sizes(task: str = "") -> dict[str, Variant]:
    """Half and twice the default, for PPO and for GRPO."""
    ppo, group = f"{task}{SHARED} --learning-rate", f"{task}{GROUP} --learning-rate"
    return {
        "half": Variant(LLM, f"{ppo} 1e-5", "PPO, shared, step size 1e-5"),
        "double": Variant(LLM, f"{ppo} 4e-5", "PPO, shared, step size 4e-5"),
        "group-half": Variant(LLM, f"{group} 1e-5", "GRPO, step size 1e-5"),
        "group-double": Variant(LLM, f"{group} 4e-5", "GRPO, step size 4e-5"),
    }


SUITES = (
    Suite(
        name="llm_sums",
        reproduces="SmolLM2-135M learns to add: PPO with a value function, and GRPO",
        environments={"sums": (1, 2, 3, 4, 5)},
        variants={"": Variant(LLM, PPO, "PPO"), "group": Variant(LLM, GROUP, "GRPO")},
        figures=("curves", "minutes"),
        **COMMON,
    ),
    Suite(
        name="llm_steps",
        reproduces="half and twice the step size, for PPO and for GRPO",
        environments={"sums": (1, 2, 3)},
        variants=step_sizes(),
        baseline=("llm_values", "shared"),
        baseline_label="PPO, shared, step size 2e-5",
        **COMMON,
    ),
    Suite(
        name="llm_values",
        reproduces="where PPO's values come from, and how they are learned",
        environments={"sums": (1, 2, 3)},
        variants={
            # The head begins at 0, and without a gradient it stays there.
            "novalues": Variant(LLM, "--vf-coef 0", "no values"),
            "shared": Variant(LLM, SHARED, "shared", {"sums": (1, 2, 3, 4, 5)}),
            "separate": Variant(LLM, "--value-model separate", "separate"),
            "warmup": Variant(LLM, f"{SHARED} --value-warmup 2", "shared, warm-up"),
            "lambda1": Variant(LLM, f"{SHARED} --gae-lambda 1", "shared, policy's lambda 1"),
            "lambda95": Variant(
                LLM, f"{SHARED} --value-lambda 0.95", "shared, values' lambda 0.95"
            ),
        },
        baseline=("llm_sums", ""),
        baseline_label="PPO",
        **COMMON,
    ),
    Suite(
        name="llm_trl",
        reproduces="TRL's GRPOTrainer with the same model, prompts and settings as our GRPO",
        environments={"sums": (1, 2, 3)},
        variants={"trl": Variant("benchmark/evidence/baselines/trl_grpo.py", label="TRL's GRPO")},
        baseline=("llm_sums", "group"),
        baseline_label="GRPO",
        figures=("curves",),
        **COMMON,
    ),
    Suite(
        name="llm_game",
        reproduces="the same model keeps a running total for three turns, paid at the end",
        environments={"running total": (1, 2, 3)},
        variants={
            "": Variant(LLM, f"{GAME} {PPO}", "PPO"),
            "group": Variant(LLM, f"{GAME} {GROUP}", "GRPO"),
        },
        figures=("curves", "minutes"),
        **COMMON,
    ),
    Suite(
        name="llm_game_steps",
        reproduces="the game with half and twice the step size, for PPO and for GRPO",
        environments={"running total": (1, 2, 3)},
        variants=step_sizes(f"{GAME} "),
        baseline=("llm_game_values", "shared"),
        baseline_label="PPO, shared, step size 2e-5",
        **COMMON,
    ),
    Suite(
        name="llm_game_values",
        reproduces="the game with other values, and without",
        environments={"running total": (1, 2, 3)},
        variants={
            "novalues": Variant(LLM, f"{GAME} --vf-coef 0", "no values"),
            "shared": Variant(LLM, f"{GAME} {SHARED}", "shared"),
            # An iteration takes 1.4 times as long.
            "separate": Variant(
                LLM,
                f"{GAME} --value-model separate --num-iterations 4",
                "separate, four iterations",
            ),
        },
        baseline=("llm_game", ""),
        baseline_label="PPO",
        **COMMON,
    ),
)
