"""The generated blocks of DEBUGGING.md: what each bug costs, its lines, and the code to paste."""

import difflib
from collections.abc import Iterator

import pandas as pd

from benchmark.lab.definitions import Folders, Variant
from benchmark.lab.provenance import ROOT
from benchmark.lab.tables import CHANGE, markdown, with_interval
from benchmark.paper import health
from benchmark.paper.health import trials
from benchmark.paper.suites import BY_TABLE, SUITES

RLHF = "bugs_rlhf"


def planted(_: Folders) -> str:
    """How many bugs were made, and where."""
    scripts: dict[str, set[str]] = {}
    for bug in (x for suite in BY_TABLE["bugs"] for x in health.bugs_of(suite).values()):
        scripts.setdefault(bug.script, set()).add(bug.label)
    (main, own), (second, again), (third, rlhf) = scripts.items()
    after = health.bugs_of(SUITES["bugs_evaluation"])
    return (
        f"We planted {len(own | again | rlhf) + len(after)} bugs, one at a time: {len(own)} in "
        f"`{main}`\n({len(own & again)} of them in `{second}` too), {len(rlhf)} in `{third}`, and "
        f"{len(after)}\nin the evaluation of a policy.\n"
    )


def costs_table(folders: Folders, rlhf: bool) -> str:
    """What each bug changes of the return in each environment, the most expensive first.

    A dot tells that most runs were warned about.
    """
    found = {x: y for x, y in trials(folders).items() if (y[0].suite.name == RLHF) == rlhf}
    rows = [
        {"bug": f"[{label}](#{anchor(label)})"}
        | {x.environment: with_interval(x.change, CHANGE) + " ●" * x.noticed for x in own}
        for label, own in sorted(found.items(), key=lambda x: min(y.change.value for y in x[1]))
    ]
    return markdown(pd.DataFrame(rows).fillna(""))


def anchor(label: str) -> str:
    """Where the bug's lines are on the page."""
    return "bug-" + "".join(x if x.isalnum() else "-" for x in label.lower())


def changed_lines(bug: Variant) -> Iterator[str]:
    """The lines of a script that a bug changes, as a diff: right ones, then wrong ones."""
    right = wrong = (ROOT / bug.script).read_text()
    for before, after in bug.replaced:
        wrong = wrong.replace(before, after)
    for line in difflib.unified_diff(right.splitlines(), wrong.splitlines(), n=0, lineterm=""):
        if line.startswith("@@"):
            yield ""
        elif not line.startswith(("---", "+++")):
            yield line[0] + " " + line[1:].strip()


def lines_of_bugs(folders: Folders) -> str:
    """Per bug, folded: the wrong line under the right one, how it shows, and its curves."""
    texts = []
    for label, own in trials(folders).items():
        first, shown = own[0], []
        for x in own:
            count, warnings = x.warned
            seen = f"{count} of {len(x.broken)} runs are unhealthy" + f" ({warnings})" * bool(count)
            change, differs = with_interval(x.change, CHANGE), health.first_difference(x)
            shown.append(f"- {x.environment}: {change}; {seen}; first iteration: {differs}")
        diff = "\n".join(changed_lines(first.bug)).strip()
        parts = (
            f'<details markdown="1" id="{anchor(label)}"><summary>{label}</summary>',
            f"```diff\n{diff}\n```" if diff else f"    python {first.bug.script} {first.flags}",
            "\n".join(shown),
            f"In `{first.bug.script}`. [Its curves, and healthy ones](docs/runs.html{first.link})",
            "</details>",
        )
        texts.append("\n\n".join(parts))
    return "\n\n".join(texts) + "\n"


def code_to_paste(_: Folders) -> str:
    """The checks for a PPO of one's own."""
    code = (ROOT / "benchmark" / "lab" / "diagnose.py").read_text()
    return f"```python\n{code}```\n"


BLOCKS = {
    "planted": planted,
    "costs": lambda folders: costs_table(folders, rlhf=False),
    "costs_rlhf": lambda folders: costs_table(folders, rlhf=True),
    "lines": lines_of_bugs,
    "noticed": health.counts,
    "diagnose": code_to_paste,
}
