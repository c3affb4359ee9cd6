"""Bring up to date everything that is made from something else: `python tools/sync.py`.

First the copies in the scripts, rewritten from their home, the script that has the original. Then
tables, figures and pages, which take a minute: `python tools/sync.py copies` leaves them out. CI
runs this, then `git diff --exit-code`: what is committed must be what it makes.

A function or class is a copy if `# Copied from` stands above it. A section, from one banner to the
next, is one if it stands below its banner, and so is a stage of a function (`# --- Collect ---`).
Each copy that is overwritten is named. A copy that was edited since the last commit, while its
original was not, is an error: `--force` overwrites it all the same.
tests/repository/test_copies.py checks that all copies agree.
"""

import argparse
import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# These scripts state in their own words what the others share.
SHORT = ("ppo_minimal", "grpo_minimal", "ppo_vector_env", "ppo_llm")
SCRIPTS = [x for x in sorted(ROOT.glob("*.py")) if x.stem not in SHORT]
# These have the same role but not the same text in each script; a marked copy is one even so.
MAY_DIFFER = {"Args", "Agent", "make_envs", "ppo_loss", "train", "learn", "evaluate", "main"}
MAY_DIFFER |= {"actor", "load_policy", "ppo_update", "load_checkpoint", "Command", "choose_device"}
MAY_DIFFER |= {"Batch", "Parts", "sample", "settings_for"}  # of the scripts for environments
MAY_DIFFER |= {"check_settings", "command_line"}  # of ppo_rlhf_toy.py
MARKER = re.compile(r"# Copied from (\w+\.py)\n\Z")
SECTION = re.compile(r"(?m)^()# (===.+===)\n(?:# Copied from (\w+\.py)\n)?")
STAGE = re.compile(r"(?m)^( +)# (---.+---)\n(?:\1# Copied from (\w+\.py)\n)?")
Block = tuple[str, str | None, int]  # text, decorators included; home, if it is a copy; start


def parts(kind: re.Pattern, text: str, start: int = 0) -> dict[str, Block]:
    """What stands between banners in a text, by the banner before it."""
    banners, found = list(kind.finditer(text)), {}
    ends = [*(x.start() for x in banners[1:]), len(text)]
    for banner, end in zip(banners, ends, strict=False):
        found[banner[2]] = text[banner.end() : end], banner[3], start + banner.end()
    return found


@functools.cache
def blocks(source: str) -> dict[str, Block]:
    """Sections, and the functions, classes and stages that are in no copied one, in their order."""
    lines, found = source.splitlines(keepends=True), parts(SECTION, source)
    copied = [(start, start + len(text)) for text, home, start in found.values() if home]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1
            before, text = "".join(lines[:first]), "".join(lines[first : node.end_lineno])
            home = MARKER.search(before)
            if not any(start <= len(before) < end for start, end in copied):
                found[node.name] = text, home and home[1], len(before)
                stages = isinstance(node, ast.FunctionDef) and not home
                for banner, stage in parts(STAGE, text, len(before)).items() if stages else ():
                    found[f"{node.name} {banner}"] = stage
    return dict(sorted(found.items(), key=lambda x: x[1][2]))


def original(sources: dict[str, str], home: str, block: str) -> str | None:
    """The text of a block in its home; None if there is none, or only a copy."""
    text, copied_from, _ = blocks(sources.get(home, "")).get(block, (None, None, 0))
    return None if copied_from else text


def problems(sources: dict[str, str]) -> list[str]:
    """What is wrong with the copies in `sources`, script name -> text."""
    found, homes = [], {}
    for name, source in sources.items():
        for block, (text, home, _) in blocks(source).items():
            if home and original(sources, home, block) is None:
                found.append(f"{name}: {home} is not the home of {block}")
            elif home and original(sources, home, block) != text:
                found.append(f"{name}: {block} differs from the one in {home}")
            elif not (home or block in MAY_DIFFER or block.endswith(("===", "---"))):
                homes.setdefault(block, []).append(name)
    several = {block: names for block, names in homes.items() if len(names) > 1}
    return found + [f"{x} has several homes: {', '.join(y)}" for x, y in several.items()]


def outdated(sources: dict[str, str]) -> list[tuple[str, str, str]]:
    """Script, name and home of each copy whose text is not that of its home."""
    return [
        (name, block, home)
        for name, source in sources.items()
        for block, (text, home, _) in blocks(source).items()
        if home and original(sources, home, block) not in (None, text)
    ]


def fix(sources: dict[str, str]) -> dict[str, str]:
    """Rewrite every copy from its home."""
    fixed = dict(sources)
    for name, block, home in reversed(outdated(sources)):  # so that starts stay valid
        text, _, start = blocks(sources[name])[block]
        before, after = fixed[name][:start], fixed[name][start + len(text) :]
        fixed[name] = before + original(sources, home, block) + after
    return fixed


def edited(name: str, block: str, source: str) -> bool:
    """Whether a block of a script is not as in the last commit; without one, all are edited."""
    command = ["git", "show", f"HEAD:./{name}"]
    then = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return blocks(then).get(block, ("",))[0] != blocks(source)[block][0]


def sync_copies(force: bool) -> None:
    """Rewrite the copies and name them; stops before an edit would be lost, and at an error."""
    sources = {path.name: path.read_text() for path in SCRIPTS}
    lost = [
        f"{name}: {block} was edited here, but the original is in {home}. Edit it there; "
        "--force overwrites the copy."
        for name, block, home in outdated(sources)
        if edited(name, block, sources[name]) and not edited(home, block, sources[home])
    ]
    if lost and not force:
        sys.exit("\n".join(lost))
    for name, block, home in outdated(sources):
        print(f"{name}: {block} overwritten by the one in {home}")
    fixed = fix(sources)
    for name in (x for x in fixed if fixed[x] != sources[x]):
        (ROOT / name).write_text(fixed[name])
    if wrong := problems(fixed):  # only an author can fix these: an original that is gone, or two
        sys.exit("\n".join(wrong))


def main() -> None:
    """Bring everything up to date, or only the copies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["copies"], help="leave out all but the copies")
    parser.add_argument("--force", action="store_true", help="overwrite edited copies too")
    args = parser.parse_args()
    sync_copies(args.force)
    for command in ("vectors", "report", "plot", "site") if args.what is None else ():
        subprocess.run([sys.executable, "-m", "benchmark", command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
