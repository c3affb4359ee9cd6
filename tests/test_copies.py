"""Functions and classes that stand in several scripts have the same text in all of them.

Run `python tests/test_copies.py --fix [ppo_x.py ...]` to rewrite the copies from their home.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("*.py"))
# These have the same role but not the same text in each script; a marked copy is one even so.
MAY_DIFFER = {"Args", "Agent", "Environments", "make_env", "ppo_loss", "train", "evaluate", "main"}
MAY_DIFFER |= {"Judges", "Rollout", "collect", "start_run"}  # of the RLHF scripts
MARKER = re.compile(r"# Copied from (\w+\.py)\n\Z")


def blocks(source: str) -> dict[str, tuple[str, str | None, int]]:
    """Name of each top-level function and class -> its text, decorators included, home, start."""
    lines, found = source.splitlines(keepends=True), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1
            before, text = "".join(lines[:first]), "".join(lines[first : node.end_lineno])
            home = MARKER.search(before)
            found[node.name] = text, home and home[1], len(before)
    return found


def problems(sources: dict[str, str]) -> list[str]:
    """What is wrong with the copies in `sources`, script name -> text."""
    found, scripts = [], {name: blocks(source) for name, source in sources.items()}
    for name, script in scripts.items():
        for block, (text, home, _) in script.items():
            if home:
                original, copied_from, _ = scripts.get(home, {}).get(block, ("", None, 0))
                if not original or copied_from:
                    found.append(f"{name}: {home} is not the home of {block}")
                elif text != original:
                    found.append(f"{name}: {block} differs from the one in {home}")
            elif block not in MAY_DIFFER:
                others = [x for x in scripts if x > name and block in scripts[x]]
                unmarked = [x for x in others if not scripts[x][block][1]]
                if unmarked:
                    found.append(f"{block} has several homes: {', '.join([name, *unmarked])}")
    return found


def fix(sources: dict[str, str]) -> dict[str, str]:
    """Rewrite every marked block from the script that its marker names."""
    scripts, fixed = {name: blocks(source) for name, source in sources.items()}, {}
    for name, source in sources.items():
        for block, (text, home, start) in reversed(scripts[name].items()):  # starts stay valid
            original = scripts.get(home, {}).get(block, (text,))[0]
            source = source[:start] + original + source[start + len(text) :]
        fixed[name] = source
    return fixed


def test_copies_are_byte_identical_and_marked():
    assert problems({path.name: path.read_text() for path in SCRIPTS}) == []


def test_rlhf_scripts_have_the_same_constants_and_sample_alike():
    """Which stand outside of copied blocks: the task above all."""
    texts = {}
    for path in ROOT.glob("*_rlhf_toy.py"):
        tree = ast.parse(path.read_text())
        (agent,) = (x for x in tree.body if getattr(x, "name", "") == "Agent")
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AugAssign):
                texts.setdefault(ast.unparse(node).split("= ")[0], set()).add(ast.unparse(node))
        for node in agent.body:
            if isinstance(node, ast.FunctionDef) and node.name == "sample_responses":
                texts.setdefault(node.name, set()).add(ast.unparse(node))
    assert len(texts) > 20 and "sample_responses" in texts
    (different,) = (name for name, found in texts.items() if len(found) > 1)
    assert "METHOD" in different


def test_exceptions_are_needed():
    scripts = [blocks(path.read_text()) for path in SCRIPTS]
    texts = {name: {x[name][0] for x in scripts if name in x} for name in MAY_DIFFER}
    assert [name for name in MAY_DIFFER if len(texts[name]) < 2] == []


HOME = "def f(x):\n    return x\n\n\n@cache\ndef g():\n    pass\n"
MARK = "# Copied from ppo_a.py\n"


@pytest.mark.parametrize(
    ("copy", "problem"),
    [
        (MARK + "def f(x):\n    return x  # same\n", "differs"),
        ("x = 1\n\n\n" + MARK + "def g():\n    pass\n\n\ny = 2\n", "differs"),
        ("def f(x):\n    return x\n", "several homes"),
        (MARK + "def h(): 0\n", "not the home"),
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


if __name__ == "__main__":
    texts = {path.name: path.read_text() for path in SCRIPTS}
    if "--fix" in sys.argv:
        names = sys.argv[sys.argv.index("--fix") + 1 :] or list(texts)
        for name, text in fix(texts).items():
            if name in names:
                (ROOT / name).write_text(text)
        texts = {path.name: path.read_text() for path in SCRIPTS}
    print("\n".join(problems(texts)) or "copies agree")
