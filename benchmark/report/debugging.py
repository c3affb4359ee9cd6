"""The generated blocks of DEBUGGING.md: what each bug costs, its lines, and the code to paste."""

import difflib
from collections.abc import Iterator

from benchmark.definitions import Folders, Suite
from benchmark.provenance import ROOT
from benchmark.report import health
from benchmark.report.statistics import Estimate
from benchmark.report.tables import CHANGE, markdown, with_interval
from benchmark.results import Result
from benchmark.suites import BY_TABLE, SUITES

RLHF = "bugs_rlhf"
Runs = tuple[Suite, str, str, list[Result], list[Result]]


def trials(suites: list[Suite], folders: Folders) -> dict[str, list[Runs]]:
    """Bugs of training by their names, with every suite, variant and environment they were run in.

    Each has the broken runs and their healthy control.
    """
    found: dict[str, list[Runs]] = {}
    for suite in suites:
        for variant in (x for x in suite.variants if not health.is_healthy(suite, x)):
            for place in suite.environments:
                broken, healthy = health.pair(suite, variant, place, folders)
                if broken and healthy:
                    runs = suite, variant, place, broken, healthy
                    found.setdefault(suite.variants[variant].label, []).append(runs)
    return found


def planted(folders: Folders) -> str:
    """How many bugs were made, and where."""
    scripts: dict[str, set[str]] = {}
    for suite in BY_TABLE["bugs"]:
        for name in (x for x in suite.variants if not health.is_healthy(suite, x)):
            bug = suite.variants[name]
            scripts.setdefault(bug.script, set()).add(bug.label)
    (main, own), (second, again), (third, rlhf) = scripts.items()
    after = [x for x in SUITES["bugs_evaluation"].variants if not x.startswith("healthy")]
    return (
        f"We planted {len(own | again | rlhf) + len(after)} bugs, one at a time: {len(own)} in "
        f"`{main}`\n({len(own & again)} of them in `{second}` too), {len(rlhf)} in `{third}`, and "
        f"{len(after)}\nin the evaluation of a policy.\n"
    )


def cost(runs: Runs) -> Estimate:
    """The change of the return by a bug."""
    return health.change(*runs[3:])


def cell(runs: Runs) -> str:
    """The change of the return with its interval, and a dot if most runs were warned about."""
    warned, _ = health.warned_seeds(runs[3])
    return with_interval(cost(runs), CHANGE) + " ●" * (warned >= health.SEEN_BY)


def costs_table(folders: Folders, rlhf: bool) -> str:
    """One row per bug, the most expensive first; a column per environment."""
    rows = []
    suites = [x for x in BY_TABLE["bugs"] if (x.name == RLHF) == rlhf]
    for label, runs in trials(suites, folders).items():
        row = {"bug": f"[{label}](#{anchor(label)})"} | {x[2]: cell(x) for x in runs}
        rows.append((min(cost(x).value for x in runs), row))
    rows = [x for _, x in sorted(rows, key=lambda x: x[0])]
    columns = dict.fromkeys(x for row in rows for x in row)
    return markdown([{x: row.get(x, "") for x in columns} for row in rows])


def anchor(label: str) -> str:
    """Where the bug's lines are on the page."""
    return "bug-" + "".join(x if x.isalnum() else "-" for x in label.lower())


def changed_lines(suite: Suite, name: str) -> Iterator[str]:
    """The lines of a script that a bug changes, as a diff: right ones, then wrong ones."""
    bug = suite.variants[name]
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
    for label, all_runs in trials(BY_TABLE["bugs"], folders).items():
        suite, name, *_ = all_runs[0]
        bug, names = suite.variants[name], [*suite.variants]
        control = health.control(suite, name)
        healthy = set(suite.variants[control].flags.split())
        flags = " ".join(x for x in bug.flags.split() if x not in healthy)
        diff = "\n".join(changed_lines(suite, name)).strip()
        body = [f"```diff\n{diff}\n```"] if diff else [f"    python {bug.script} {flags}"]
        for own in all_runs:
            count, warnings = health.warned_seeds(own[3])
            seen = f"{count} of {len(own[3])} runs are unhealthy" + f" ({warnings})" * bool(count)
            first = health.first_difference(*own[3:])
            change = with_interval(cost(own), CHANGE)
            body.append(f"- {own[2]}: {change}; {seen}; first iteration: {first}")
        link = f"docs/runs.html#suite={suite.name}&lines={names.index(control)},{names.index(name)}"
        body[1:] = [
            "\n".join(body[1:]),
            f"In `{bug.script}`. [Its curves, and healthy ones]({link})",
        ]
        summary = f'<details markdown="1" id="{anchor(label)}"><summary>{label}</summary>'
        texts.append("\n\n".join([summary, *body, "</details>"]))
    return "\n\n".join(texts) + "\n"


def code_to_paste(_: Folders) -> str:
    """The checks for a PPO of one's own."""
    code = (ROOT / "benchmark" / "diagnose.py").read_text()
    return f"```python\n{code}```\n"


BLOCKS = {
    "planted": planted,
    "costs": lambda folders: costs_table(folders, rlhf=False),
    "costs_rlhf": lambda folders: costs_table(folders, rlhf=True),
    "lines": lines_of_bugs,
    "diagnose": code_to_paste,
}
