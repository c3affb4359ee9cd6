"""The commands in README that set up can be pasted."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_two_commands_that_set_up_can_be_pasted():
    found = re.findall(r"(?m)^    (python3 -m venv(?:.*\\\n)+.*)", TEXT)
    train, test = [re.sub(r"\s*\\\n\s*", " ", x) for x in found]
    assert train.endswith(" ppo_continuous_action.py --env-id HalfCheetah-v4")
    assert test.endswith(" -m pytest")
