"""README fits on a page, and its commands do not scroll. Its numbers are in test_numbers.py."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "README.md").read_text()


def test_it_is_short_and_its_commands_do_not_scroll():
    text = re.sub(r"(?s)```python.*?```", "", TEXT)
    commands = [x for x in text.splitlines() if x.startswith("    ")]
    assert len(TEXT.splitlines()) <= 150
    assert commands and max(map(len, commands)) <= 4 + 90


def test_the_two_commands_that_set_up_can_be_pasted():
    found = re.findall(r"(?m)^    (python3 -m venv(?:.*\\\n)+.*)", TEXT)
    train, test = [re.sub(r"\s*\\\n\s*", " ", x) for x in found]
    assert train.endswith(" ppo_continuous_action.py --env-id HalfCheetah-v4")
    assert test.endswith(" -m pytest")
