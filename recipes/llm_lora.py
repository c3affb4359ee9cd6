"""LoRA: train adapters of rank 16 instead of all weights, and stay close to the first model.

    python -m recipes.llm_lora

Adam then has only a few percent of the weights to keep. The reference of the KL is the model with
its adapters switched off, which takes no memory. Adapters need a larger step size, and the saved
model has them merged into its weights: it loads like any other. The folder `adapter` beside it has
them alone, and unrounded.
"""

from typing import Any

import ppo_llm as ppo


def args(**changes: Any) -> ppo.Args:
    """Settings of a run with adapters."""
    return ppo.Args(**{"lora_rank": 16, "learning_rate": 2e-4, "kl_coef": 0.01, **changes})


if __name__ == "__main__":
    ppo.train(args())
