"""Functions and classes that stand in several scripts have the same text in all of them.

Run `python tests/test_copies.py --fix [ppo_x.py ...]` to rewrite the copies from their home.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("ppo_*.py"))
# These have the same role but not the same text in each script.
MAY_DIFFER = {"Args", "Agent", "make_env", "make_envs", "train", "evaluate", "play"}
MARKER = re.compile(r"# Copied from (ppo_\w+\.py)\n\Z")


def blocks(source: str) -> dict[str, tuple[int, int]]:
    """Name of each top-level function and class -> its span in characters, decorators included."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spans = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno] + [x.lineno for x in node.decorator_list])
            spans[node.name] = (starts[first - 1], starts[node.end_lineno])
    return spans


def problems(sources: dict[str, str]) -> list[str]:
    """What is wrong with the copies in `sources`, script name -> text."""
    found = []
    spans = {name: blocks(source) for name, source in sources.items()}
    shared = {block for name in spans for block in spans[name]} - MAY_DIFFER
    for block in sorted(shared):
        holders = [name for name in sources if block in spans[name]]
        marked = {}
        for name in holders:
            match = MARKER.search(sources[name][: spans[name][block][0]])
            if match:
                marked[name] = match[1]
        for name, home in marked.items():
            if home not in holders or home in marked:
                found.append(f"{name}: {block} is marked as copied from {home}, not its home")
        if len(holders) < 2:
            continue
        unmarked = [name for name in holders if name not in marked]
        if len(unmarked) != 1:
            found.append(f"{block} needs exactly one home, without marker; has {unmarked}")
        texts = {sources[name][slice(*spans[name][block])] for name in holders}
        if len(texts) > 1:
            found.append(f"{block} differs between {', '.join(holders)}")
    return found


def fix(sources: dict[str, str]) -> dict[str, str]:
    """Rewrite every marked block from the script that its marker names."""
    spans = {name: blocks(source) for name, source in sources.items()}
    fixed = {}
    for name, source in sources.items():
        for block, (start, end) in reversed(spans[name].items()):  # from the end: spans stay valid
            match = MARKER.search(source[:start])
            if match and block in spans.get(match[1], {}):
                home = sources[match[1]][slice(*spans[match[1]][block])]
                source = source[:start] + home + source[end:]
        fixed[name] = source
    return fixed


def test_copies_are_byte_identical_and_marked():
    assert problems({path.name: path.read_text() for path in SCRIPTS}) == []


HOME = "def f(x):\n    return x\n\n\n@cache\ndef g():\n    pass\n"


def test_a_changed_comment_an_extra_line_or_a_decorator_is_found():
    marked = "# Copied from ppo_a.py\n"
    for copy in (
        marked + "def f(x):\n    return x  # same\n",
        marked + "def f(x):\n    return x\n    return y\n",
        marked + "def g():\n    pass\n",
    ):
        assert any("differs" in x for x in problems({"ppo_a.py": HOME, "ppo_b.py": copy}))


def test_an_unmarked_copy_or_a_wrong_home_is_found():
    assert problems({"ppo_a.py": HOME, "ppo_b.py": "def f(x):\n    return x\n"})
    assert problems({"ppo_a.py": HOME, "ppo_b.py": "# Copied from ppo_c.py\ndef h():\n    pass\n"})


def test_fix_restores_the_home_text():
    broken = "x = 1\n\n\n# Copied from ppo_a.py\ndef f(x):\n    return -x\n\n\ny = 2\n"
    sources = fix({"ppo_a.py": HOME, "ppo_b.py": broken})
    assert problems(sources) == []
    assert sources["ppo_b.py"].startswith("x = 1") and sources["ppo_b.py"].endswith("y = 2\n")


if __name__ == "__main__":
    texts = {path.name: path.read_text() for path in SCRIPTS}
    if "--fix" in sys.argv:
        names = sys.argv[sys.argv.index("--fix") + 1 :] or list(texts)
        for name, text in fix(texts).items():
            if name in names:
                (ROOT / name).write_text(text)
        texts = {path.name: path.read_text() for path in SCRIPTS}
    print("\n".join(problems(texts)) or "copies agree")
