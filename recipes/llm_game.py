"""A language model in a game of several turns: it keeps a running total.

    python -m recipes.llm_game

With any settings: `python ppo_llm.py --env recipes.llm_game:RunningTotal --max-turns 3
--max-tokens 9`, as many tokens as "13 + 5 = 18" has.
Each message names one more number to add, and nobody repeats the total: the model has to read it in
its own last answer. The whole reward comes at the end, the share of totals that were right. So an
early mistake costs later turns, too, and only a value function that has seen the mistake expects
less from then on.

A conversation begins with an example game. Without it, a small model earns next to nothing after
the first turn, and learns nothing there. With it, untrained, 52, 6 and 3 % of the totals of
SmolLM2-135M are right in the three turns.
"""

import re
from typing import Any

import gymnasium as gym

BEGINNING = [
    {"role": "system", "content": "Keep a running total."},
    {"role": "user", "content": "2 + 1 = ?"},
    {"role": "assistant", "content": "2 + 1 = 3"},
    {"role": "user", "content": "+ 4 = ?"},
    {"role": "assistant", "content": "3 + 4 = 7"},
    {"role": "user", "content": "+ 5 = ?"},
    {"role": "assistant", "content": "7 + 5 = 12"},
]


class RunningTotal(gym.Env):
    """Add numbers from 1 to 5, one more in each of three turns."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[dict], dict]:
        super().reset(seed=seed)
        first, *self.numbers = self.np_random.integers(1, 6, size=4).tolist()
        self.total, self.right = first, 0
        return [*BEGINNING, {"role": "user", "content": f"{first} + {self.numbers[0]} = ?"}], {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        self.total += self.numbers.pop(0)
        self.right += re.findall(r"\d+", text)[-1:] == [str(self.total)]
        if not self.numbers:
            return "", self.right / 3, True, False, {}
        return f"+ {self.numbers[0]} = ?", 0.0, False, False, {}


if __name__ == "__main__":
    import ppo_llm as ppo

    ppo.train(ppo.Args(env="recipes.llm_game:RunningTotal", max_turns=3, max_tokens=9))
