"""What stands in several scripts has one text in all of them; `tools/sync.py` mends copies."""

import pytest

from tools.sync import MAY_DIFFER, SCRIPTS, blocks, fix, problems


def test_copies_are_byte_identical_and_marked():
    assert problems({path.name: path.read_text() for path in SCRIPTS}) == []


def test_exceptions_are_needed():
    scripts = [blocks(path.read_text()) for path in SCRIPTS]
    texts = {name: {x[name][0] for x in scripts if name in x} for name in MAY_DIFFER}
    assert [name for name in MAY_DIFFER if len(texts[name]) < 2] == []


HOME = "# === A ===\n\n\ndef f(x):\n    return x\n\n\n@cache\ndef g():\n    pass\n"
MARK = "# Copied from ppo_a.py\n"


@pytest.mark.parametrize(
    ("copy", "problem"),
    [
        (MARK + "def f(x):\n    return x  # same\n", "differs"),
        ("x = 1\n\n\n" + MARK + "def g():\n    pass\n\n\ny = 2\n", "differs"),
        ("def f(x):\n    return x\n", "several homes"),
        (MARK + "def h(): 0\n", "not the home"),
        ("# === A ===\n" + MARK + HOME.partition("===\n")[2] + "\nX = 1\n", "differs"),
        ("# === B ===\n" + MARK + "X = 1\n", "not the home"),
    ],
)
def test_what_is_wrong_is_found_and_a_difference_mended(copy, problem):
    sources = {"ppo_a.py": HOME, "ppo_b.py": copy}
    assert problem in problems(sources)[0]
    mended = fix(sources)
    assert mended["ppo_a.py"] == HOME
    if problem == "differs":
        assert problems(mended) == [] and mended["ppo_b.py"].startswith(copy.split(MARK)[0])
        assert mended["ppo_b.py"].endswith("y = 2\n") == copy.endswith("y = 2\n")
