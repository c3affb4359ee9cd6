"""The generated blocks of DEBUGGING.md: what each bug costs, its lines, and the code to paste."""

import difflib
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmark.evidence import differences, health
from benchmark.evidence.definitions import Variant
from benchmark.evidence.health import trials
from benchmark.evidence.runs import changed
from benchmark.evidence.suites import BY_TABLE
from benchmark.evidence.suites.bugs import AFTER_TRAINING
from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT
from benchmark.lab.tables import CHANGE, markdown, with_interval

RLHF = "bugs_rlhf"


def planted(_: Folders) -> str:
    """How many bugs were made, and where."""
    scripts: dict[str, set[str]] = {}
    for bug in (x for suite in BY_TABLE["bugs"] for x in health.bugs_of(suite).values()):
        scripts.setdefault(bug.script, set()).add(bug.label)
    (main, own), (second, again), (third, rlhf) = scripts.items()
    training, after = len(own | again | rlhf), len(AFTER_TRAINING)
    return (
        f"We planted {training + after} bugs, one at a time: {training} in training and "
        f"{after} in the evaluation of a policy.\nOf those in training, {len(own)} are in "
        f"`{main}` ({len(own & again)} of them in\n`{second}` too), and {len(rlhf)} in `{third}`.\n"
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


def said(row: dict[str, Any]) -> str:
    """What `diff` says first about a bug, in a line."""
    return f"{row['where']}: {row['what']}" + f". These are {row['common']}" * bool(row["common"])


def found(folders: Folders) -> str:
    """What `diff` says of each bug, next to what `check` says and when."""
    said_of, of_training = differences.by_label(folders), trials(folders)
    rows = []
    for label, own in said_of.items():
        runs, first = of_training.get(label, []), own[0]
        noticed = [x for x in runs if x.noticed]
        warned = max((x.warned for x in noticed), default=(0, "–"), key=lambda x: x[0])
        words = f"{first['where']}: {first['brief']}"
        rows.append(
            {
                "bug": f"[{label}](#{anchor(label)})" if runs else label,
                "`diff` says first": words + f"; {first['common']}" * bool(first["common"]),
                "right": "yes" if first["right"] else "no",
                "`check` warns of": warned[1].split(", ")[0],
            }
        )
    firsts, again = [x[0] for x in said_of.values()], [y for x in said_of.values() for y in x[1:]]
    right, second = (sum(x["right"] for x in y) for y in (firsts, again))
    noticed = sum(any(y.noticed for y in x) for x in of_training.values())
    text = (
        f"**`diff` finds the cause of {right} of {len(firsts)} bugs**, and of {second} of "
        f"{len(again)} that were planted in a second script, too. **`check` notices "
        f"{noticed} of the {len(of_training)} bugs in training**: it warns within "
        f"{health.EARLY // 1000}k steps (RLHF: at any time), on {health.SEEN_BY} seeds or more in "
        "some environment."
    )
    return textwrap.fill(text, 118) + "\n\n" + markdown(pd.DataFrame(rows))


def errors(folders: Folders) -> str:
    """Which bugs `diff` and `check` miss, and how often healthy runs are called unhealthy."""
    said_of, of_training = differences.by_label(folders), trials(folders)
    wrong = [label for label, own in said_of.items() if not own[0]["right"]]
    missed = [label for label, own in of_training.items() if not any(x.noticed for x in own)]
    healthy = health.healthy_runs(folders)
    alarms = sum(bool(health.warnings(x, math.inf)) for x in healthy)
    texts = (
        f"**`diff` misses {len(wrong)} of the {len(said_of)} bugs that this page lists.**",
        f"**`check` misses {len(missed)} of the {len(of_training)} in training**: "
        f"{'; '.join(missed)}. **It calls {alarms} of {len(healthy)} healthy runs unhealthy.**",
    )
    return "\n".join(textwrap.fill(f"- {x}", 118, subsequent_indent="  ") for x in texts) + "\n"


def anchor(label: str) -> str:
    """Where the bug's lines are on the page."""
    return "bug-" + "".join(x if x.isalnum() else "-" for x in label.lower())


def changed_lines(bug: Variant) -> Iterator[str]:
    """The lines of a script that a bug changes, as a diff: right ones, then wrong ones."""
    right = (ROOT / bug.script).read_text()
    wrong = changed(right, bug.replaced)
    for line in difflib.unified_diff(right.splitlines(), wrong.splitlines(), n=0, lineterm=""):
        if line.startswith("@@"):
            yield ""
        elif not line.startswith(("---", "+++")):
            yield line[0] + " " + line[1:].strip()


def lines_of_bugs(folders: Folders) -> str:
    """Per bug, folded: the wrong line under the right one, how it shows, and its curves."""
    texts, found_first = [], differences.by_label(folders)
    for label, own in trials(folders).items():
        first, shown = own[0], []
        for x in own:
            count, warnings = x.warned
            seen = f"{count} of {len(x.broken)} runs are unhealthy" + f" ({warnings})" * bool(count)
            shown.append(f"- {x.environment}: {with_interval(x.change, CHANGE)}; {seen}")
        diff = "\n".join(changed_lines(first.bug)).strip()
        shown += [f"- `diff`: {said(row)}" for row in found_first.get(label, [])[:1]]
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
    "found": found,
    "errors": errors,
    "diagnose": code_to_paste,
}
