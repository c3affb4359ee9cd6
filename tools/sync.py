"""Bring up to date what is made of something else: `python tools/sync.py`.

First the copies in the scripts, rewritten from their home; then tables, figures and pages, which
take minutes: `python tools/sync.py copies` leaves them out. A function or class is a copy if
`# Copied from` stands above it; a section, from one banner to the next, if it stands below its
banner. tests/repository/test_copies.py checks that all copies agree.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The short script states in its own words what the full ones share.
SCRIPTS = [x for x in sorted(ROOT.glob("*.py")) if x.stem != "ppo_minimal"]
# These have the same role but not the same text in each script; a marked copy is one even so.
MAY_DIFFER = {"Args", "Agent", "make_env", "ppo_loss", "train", "evaluate", "main"}
MAY_DIFFER |= {"actor", "load_policy", "ppo_update"}
MAY_DIFFER |= {"settings_of_run"}  # nothing is compiled in ppo_atari_lstm.py
MAY_DIFFER |= {"Rollout", "collect"}  # of the RLHF scripts
MARKER = re.compile(r"# Copied from (\w+\.py)\n\Z")
SECTION = re.compile(r"(?m)^# (===.+===)\n(?:# Copied from (\w+\.py)\n)?")
Block = tuple[str, str | None, int]  # text, decorators included; home, if it is a copy; start


def sections(source: str) -> dict[str, Block]:
    """The sections by their banners, behind which they begin."""
    banners, found = list(SECTION.finditer(source)), {}
    ends = [*(x.start() for x in banners[1:]), len(source)]
    for banner, end in zip(banners, ends, strict=False):
        found[banner[1]] = source[banner.end() : end], banner[2], banner.end()
    return found


def blocks(source: str) -> dict[str, Block]:
    """Sections, and top-level functions and classes outside of copied ones, by their names."""
    lines, found = source.splitlines(keepends=True), sections(source)
    copied = [(start, start + len(text)) for text, home, start in found.values() if home]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1
            before, text = "".join(lines[:first]), "".join(lines[first : node.end_lineno])
            home = MARKER.search(before)
            if not any(start <= len(before) < end for start, end in copied):
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
            elif block not in MAY_DIFFER and not block.startswith("==="):
                others = [x for x in scripts if x > name and block in scripts[x]]
                unmarked = [x for x in others if not scripts[x][block][1]]
                if unmarked:
                    found.append(f"{block} has several homes: {', '.join([name, *unmarked])}")
    return found


def fix(sources: dict[str, str]) -> dict[str, str]:
    """Rewrite every marked block from the script that its marker names."""
    scripts, fixed = {name: blocks(source) for name, source in sources.items()}, {}
    for name, source in sources.items():
        copies = [(start, block) for block, (_, home, start) in scripts[name].items() if home]
        for start, block in sorted(copies, reverse=True):  # so that starts stay valid
            text, home, _ = scripts[name][block]
            original = scripts.get(home, {}).get(block, (text,))[0]
            source = source[:start] + original + source[start + len(text) :]
        fixed[name] = source
    return fixed


def main(words: list[str]) -> None:
    for name, text in fix({path.name: path.read_text() for path in SCRIPTS}).items():
        (ROOT / name).write_text(text)
    wrong = problems({path.name: path.read_text() for path in SCRIPTS})
    if wrong:  # what only an author can mend: a home that is gone, or two of them
        sys.exit("\n".join(wrong))
    for command in ("report", "plot", "site") if words != ["copies"] else ():
        subprocess.run([sys.executable, "-m", "benchmark", command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
