"""tools/mutate.py breaks what it says, and what may survive is known and little."""

import pytest
from adapters import ROOT

from tools.mutate import MAY_SURVIVE, NAMES, mutants, statements

SCRIPT = '''
"""A script."""
import math

LIMIT = 3


class Args:
    size: int = 1 - 2

    def __post_init__(self):
        """Checks."""
        if not self.size > -LIMIT:
            raise ValueError(f"{1 + 1}")


# Copied from home.py
def copied(x):
    return x + 1


def loss(x, y):
    for a in x:
        y = a - y
    return -y


# === The algorithm ends here ===


def main():
    print(1 + 1)
'''
EXPECTED = [
    "module: LIMIT = 3 -> pass",
    "Args.__post_init__: if not self.size > -LIMIT: -> pass",
    "Args.__post_init__: not self.size > -LIMIT -> (self.size > -LIMIT)",
    "Args.__post_init__: self.size > -LIMIT -> (not self.size > -LIMIT)",
    "Args.__post_init__: -LIMIT -> (LIMIT)",
    "Args.__post_init__: raise ValueError(f'{1 + 1}') -> pass",
    "loss: for a in x: -> pass",
    "loss: y = a - y -> pass",
    "loss: a - y -> (a + y)",
    "loss: return -y -> pass",
    "loss: -y -> (y)",
]


def test_each_statement_comparison_and_sign_of_the_algorithm_is_broken():
    found = mutants(SCRIPT)
    assert [x.name for x in found] == EXPECTED
    lines = SCRIPT.splitlines()
    changed = [
        [(a.strip(), b.strip()) for a, b in zip(lines, x.text.splitlines()) if a != b]
        for x in found
    ]
    assert changed[0] == [("LIMIT = 3", "pass")]
    assert changed[4] == [("if not self.size > -LIMIT:", "if not self.size > (LIMIT):")]
    assert changed[8] == [("y = a - y", "y = (a + y)")]
    assert "for" not in found[6].text and len([*statements(SCRIPT)]) == 6
    assert not found[0].lines and [*found[8].lines] == [24]
    for mutant in found:
        compile(mutant.text, "mutant", "exec")


@pytest.mark.parametrize("stem", NAMES)
def test_what_may_survive_is_a_change_of_one_statement_in_fifty_at_most(stem):
    text, reasons = (ROOT / f"{stem}.py").read_text(), MAY_SURVIVE.get(stem, {})
    assert reasons.keys() <= {x.name for x in mutants(text)} and all(reasons.values())
    assert len(reasons) <= len([*statements(text)]) / 50
