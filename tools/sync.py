"""Bring up to date everything that is made from something else: `python tools/sync.py`.

First the copies in the scripts, rewritten from their home, the script that has the original. Then
tables, figures and pages, which take minutes: `python tools/sync.py copies` leaves them out.

A function or class is a copy if `# Copied from` stands above it; a section, from one banner to the
next, if it stands below its banner. Each copy that is overwritten is named. A copy that was edited
since the last commit, while its original was not, is an error: `--force` overwrites it all the
same. tests/repository/test_copies.py checks that all copies agree.
"""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The short scripts state in their own words what the full ones share.
SHORT = ("ppo_minimal", "grpo_minimal")
SCRIPTS = [x for x in sorted(ROOT.glob("*.py")) if x.stem not in SHORT]
# These have the same role but not the same text in each script; a marked copy is one even so.
MAY_DIFFER = {"Args", "Agent", "make_envs", "ppo_loss", "train", "evaluate", "main"}
MAY_DIFFER |= {"actor", "load_policy", "ppo_update", "load_checkpoint", "Command"}
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


def outdated(sources: dict[str, str]) -> list[tuple[str, str, str]]:
    """Script, name and home of each copy whose text is not that of its home."""
    scripts = {name: blocks(source) for name, source in sources.items()}
    return [
        (name, block, home)
        for name, script in scripts.items()
        for block, (text, home, _) in script.items()
        if home and scripts.get(home, {}).get(block, (text,))[0] != text
    ]


def edits_in_copies(sources: dict[str, str], committed: dict[str, str]) -> list[str]:
    """A sentence for each copy that was edited since the last commit while its original was not."""
    now, then = ({x: blocks(y) for x, y in z.items()} for z in (sources, committed))

    def edited(name: str, block: str) -> bool:
        return then.get(name, {}).get(block, ("",))[0] != now[name][block][0]

    return [
        f"{name}: {block} was edited here, but the original is in {home}. Edit it there; "
        "--force overwrites the copy."
        for name, block, home in outdated(sources)
        if edited(name, block) and not edited(home, block)
    ]


def committed_sources() -> dict[str, str]:
    """The scripts as they are in the last commit, script name -> text; none outside of git."""
    found = {}
    for path in SCRIPTS:
        command = ["git", "show", f"HEAD:./{path.name}"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if shown.returncode == 0:
            found[path.name] = shown.stdout
    return found


def sync_copies(force: bool) -> None:
    """Rewrite the copies and name them; stops before an edit would be lost, and at an error."""
    sources = {path.name: path.read_text() for path in SCRIPTS}
    committed = committed_sources()
    lost = edits_in_copies(sources, committed) if committed and not force else []
    if lost:
        sys.exit("\n".join(lost))
    for name, block, home in outdated(sources):
        print(f"{name}: {block} overwritten by the one in {home}")
    for name, text in fix(sources).items():
        if text != sources[name]:
            (ROOT / name).write_text(text)
    wrong = problems({path.name: path.read_text() for path in SCRIPTS})
    if wrong:  # only an author can fix these: an original that is gone, or two of them
        sys.exit("\n".join(wrong))


def misfits() -> list[str]:
    """A sentence for each text patch of a suite that no longer fits its script."""
    sys.path.insert(0, str(ROOT))
    from benchmark.provenance import BenchmarkError
    from benchmark.run import changed
    from benchmark.suites import ALL

    found = []
    for suite, name, variant in ((x, *y) for x in ALL for y in x.variants.items()):
        try:
            changed((ROOT / variant.script).read_text(), variant.replaced)
        except BenchmarkError as error:
            found.append(f"Variant {name} of the suite {suite.name}, {variant.script}: {error}")
    return found


def main() -> None:
    """Bring everything up to date, or only the copies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["copies"], help="leave out all but the copies")
    parser.add_argument("--force", action="store_true", help="overwrite edited copies too")
    args = parser.parse_args()
    sync_copies(args.force)
    if found := misfits():
        sys.exit("\n".join(found))
    for command in ("report", "plot", "site") if args.what is None else ():
        subprocess.run([sys.executable, "-m", "benchmark", command], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
