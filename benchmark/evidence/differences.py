"""What `diff` says of each bug that was planted on purpose, and whether it is the right line."""

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any

import tqdm

from benchmark.evidence import health
from benchmark.evidence.definitions import Variant
from benchmark.evidence.runs import changed
from benchmark.evidence.suites import BY_TABLE
from benchmark.evidence.suites.bugs import AFTER_TRAINING
from benchmark.lab import diff
from benchmark.lab.definitions import Folders
from benchmark.lab.diff import Comparison, Finding
from benchmark.lab.provenance import ROOT

NAME = "differences.json"  # in the folder of results


def with_defaults(text: str, flags: str) -> tuple[str, list[str]]:
    """A script with flags as its defaults, and the names of these settings."""
    names = []
    for words in re.findall(r"--\S+(?: [^-\s]\S*)?", flags):
        flag, _, value = words.removeprefix("--").partition(" ")
        name = flag.removeprefix("no-").replace("-", "_")
        value = value or str(not flag.startswith("no-"))
        text, count = re.subn(rf"(?m)^(    {name}: [^=]+= )\S+", rf"\g<1>{value}", text)
        assert count == 1, flag
        names.append(name)
    return text, names


def copy_with(bug: Variant, flags: str) -> tuple[diff.Script, list[str]]:
    """The script with a bug, whose own flags are its defaults."""
    text, names = with_defaults(changed((ROOT / bug.script).read_text(), bug.replaced), flags)
    return diff.Script(ROOT / bug.script, text), names


def is_right(finding: Finding, original: diff.Script) -> bool:
    """Whether a line that it names is one of those that were changed."""
    mine, theirs = finding.mine.script.lines, original.lines
    matcher = difflib.SequenceMatcher(None, theirs, mine, autojunk=False)
    places = [x[1:] for x in matcher.get_opcodes() if x[0] != "equal"]
    wrong = {k for _, _, c, d in places for k in range(c + 1, d + 1)}
    right = {k for a, b, _, _ in places for k in range(a + 1, b + 1)}
    sides = [y for x in finding.changes for y in ((wrong, x.mine), (right, x.theirs))]
    return any(
        lines.intersection(range(x.lines[0], x.lines[1] + 1)) for lines, side in sides for x in side
    )


def of_bug(comparison: Comparison, bug: Variant, flags: str) -> dict[str, Any]:
    """What is said first about a bug."""
    copy, names = copy_with(bug, flags)
    settings = comparison.settings_of(copy)
    finding = None if settings else next(comparison.findings(copy), None)
    row: dict[str, Any] = {"script": bug.script, "label": bug.label}
    if settings:
        row |= {"where": "settings", "what": "; ".join(settings), "brief": ", ".join(names)}
        row["common"] = ""
        row["right"] = all(any(x.startswith(f"{y} ") for x in settings) for y in names)
    elif finding:
        what = re.sub(r", called in line \d+,", "", finding.what)  # which soon is another line
        row |= {"where": finding.event.phase, "what": what, "brief": finding.brief}
        row["common"] = finding.common
        row["right"] = is_right(finding, comparison.original)
    else:
        row |= {"where": "", "what": "no difference", "brief": "–", "common": "", "right": False}
    return row


def planted() -> Iterator[tuple[str, str, Variant, str]]:
    """Each bug: where it belongs, its name, and the flags that healthy runs do not have."""
    for suite in BY_TABLE["bugs"]:
        for name, bug in health.bugs_of(suite).items():
            usual = suite.variants[health.control(suite, name)].flags.split()
            yield suite.name, name, bug, " ".join(x for x in bug.flags.split() if x not in usual)
    for name, bug in AFTER_TRAINING.items():
        yield "after training", name, bug, bug.flags


def measure(folders: Folders) -> None:
    """Run `diff` on every bug, and write what it says."""
    rows = []
    comparisons: dict[str, Comparison] = {}
    for suite, name, bug, flags in tqdm.tqdm([*planted()]):
        if bug.script not in comparisons:
            original = diff.read(ROOT / bug.script)
            comparisons[bug.script] = Comparison(original, [], original)
        row = of_bug(comparisons[bug.script], bug, flags)
        rows.append({"suite": suite, "bug": name} | row)
    lines = ",\n".join(json.dumps(x, ensure_ascii=False) for x in rows)
    (folders.results / NAME).write_text(f"[\n{lines}\n]\n")


def by_label(folders: Folders) -> dict[str, list[dict[str, Any]]]:
    """What has been noted, by bug: in one script or two."""
    path = folders.results / NAME
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text()) if path.exists() else []:
        found.setdefault(row["label"], []).append(row)
    return found
