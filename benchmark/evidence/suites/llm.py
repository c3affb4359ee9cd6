"""A real language model of 135M weights: PPO with a value function, and GRPO."""

from benchmark.evidence.definitions import Suite, Variant

LLM = "ppo_llm.py"
GROUP = "--advantages group"
GAME = "--env recipes.llm_game:RunningTotal --max-turns 3 --max-tokens 9"
# The script counts iterations, not steps; checkpoint and model of a run are 2 GB.
COMMON = {"total_timesteps": None, "step": "episodes", "keeps_weights": False}


def step_sizes(task: str = "") -> dict[str, Variant]:
    """Half and twice the default, for PPO and for GRPO."""
    return {
        "half": Variant(LLM, f"{task}--learning-rate 1e-5", "PPO, step size 1e-5"),
        "double": Variant(LLM, f"{task}--learning-rate 4e-5", "PPO, step size 4e-5"),
        "group-half": Variant(LLM, f"{task}{GROUP} --learning-rate 1e-5", "GRPO, step size 1e-5"),
        "group-double": Variant(LLM, f"{task}{GROUP} --learning-rate 4e-5", "GRPO, step size 4e-5"),
    }


SUITES = (
    Suite(
        name="llm_sums",
        reproduces="SmolLM2-135M learns to add: PPO with a value function, and GRPO",
        environments={"sums": (1, 2, 3, 4, 5)},
        variants={"": Variant(LLM, "", "PPO"), "group": Variant(LLM, GROUP, "GRPO")},
        figures=("curves", "minutes"),
        **COMMON,
    ),
    Suite(
        name="llm_steps",
        reproduces="half and twice the step size, for PPO and for GRPO",
        environments={"sums": (1, 2, 3)},
        variants=step_sizes(),
        baseline=("llm_sums", ""),
        baseline_label="PPO, step size 2e-5",
        **COMMON,
    ),
    Suite(
        name="llm_values",
        reproduces="where PPO's values come from, and how they are learned",
        environments={"sums": (1, 2, 3)},
        variants={
            # The head begins at 0, and without a gradient it stays there.
            "novalues": Variant(LLM, "--vf-coef 0", "no values"),
            "detached": Variant(LLM, "--value-model detached", "values read only"),
            "separate": Variant(LLM, "--value-model separate", "values have a trunk of their own"),
            "warmup": Variant(LLM, "--value-warmup 2", "two iterations only train the values"),
            "lambda1": Variant(LLM, "--gae-lambda 1", "policy's lambda 1"),
            "lambda95": Variant(LLM, "--value-lambda 0.95", "values' lambda 0.95"),
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
        variants={"": Variant(LLM, GAME, "PPO"), "group": Variant(LLM, f"{GAME} {GROUP}", "GRPO")},
        figures=("curves", "minutes"),
        **COMMON,
    ),
    Suite(
        name="llm_game_steps",
        reproduces="the game with half and twice the step size, for PPO and for GRPO",
        environments={"running total": (1, 2, 3)},
        variants=step_sizes(f"{GAME} "),
        baseline=("llm_game", ""),
        baseline_label="PPO, step size 2e-5",
        **COMMON,
    ),
    Suite(
        name="llm_game_values",
        reproduces="the game with other values, and without",
        environments={"running total": (1, 2, 3)},
        variants={
            "novalues": Variant(LLM, f"{GAME} --vf-coef 0", "no values"),
            "detached": Variant(LLM, f"{GAME} --value-model detached", "values read only"),
            # An iteration takes twice as long, so that four take the same time.
            "separate": Variant(
                LLM,
                f"{GAME} --value-model separate --num-iterations 4",
                "values have a trunk of their own, four iterations",
            ),
        },
        baseline=("llm_game", ""),
        baseline_label="PPO",
        **COMMON,
    ),
)
