"""A reward of your own, and prompts in a JSONL file: the model learns to answer in one word.

    python -m recipes.llm_own_reward

Each line of the file has a prompt and whatever else the reward needs; the reward is a function of
the response and of these columns. The same from the command line, in any folder:

    python ppo_llm.py --prompts prompts.jsonl --reward recipes.llm_own_reward:reward
"""

import json
from pathlib import Path
from typing import Any

import ppo_llm as ppo

COLORS = {"grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red"}


def reward(response: str, answer: str) -> float:
    """1 for the answer alone, half for the answer in a sentence."""
    words = response.lower().strip(" .!\n").split()
    return 1.0 if words == [answer] else 0.5 * (answer in words)


def write_prompts(path: Path) -> None:
    rows = [{"prompt": f"What color is {x}?", "answer": y} for x, y in COLORS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def args(folder: Path, **changes: Any) -> ppo.Args:
    """Settings of a run on the prompts in this folder, which are written there."""
    write_prompts(folder / "prompts.jsonl")
    settings = {"prompts": f"{folder}/prompts.jsonl", "reward": "recipes.llm_own_reward:reward"}
    return ppo.Args(**{**settings, "num_iterations": 4, "num_episodes": 32, **changes})


if __name__ == "__main__":
    ppo.train(args(Path()))
