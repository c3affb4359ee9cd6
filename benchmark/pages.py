"""Generated pages: blocks of README, DEBUGGING and benchmark/README, and the table of DETAILS.

A block begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; everything between is
rewritten from committed results and the scripts' tags, everything else is left alone.
"""

import functools
import re
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import health
from benchmark.definitions import Folders
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import by_environment, done, how_complete, lines_of
from benchmark.suites import SCRIPTS, SUITES
from benchmark.tables import effects, facts, markdown, plus_minus, with_interval

PAGES = [ROOT / x for x in ("README.md", "benchmark/README.md", "DETAILS.md", "DEBUGGING.md")]
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# A tag, its title, and the sentence below it, where there is one.
TAG = re.compile(
    r"^ *# (?:Detail (\w+(?:/\d+)?)|(Extra|Deviation)): ([^\[(;\n]+?)(?: [\[(].*)?"
    r"(?:\n *# (?!Detail |Extra:|Deviation:)(.+))?$",
    re.MULTILINE,
)


# --- Scripts and suites ---


def scripts_table(folders: Folders) -> str:
    """Every script with what it shows, its size, and the return and time of its runs."""
    rows = []
    for name, script in SCRIPTS.items():
        suite = SUITES[script.suite]
        found = by_environment(suite.name, script.variant, folders)
        results = found.get(script.environment, [])
        scores, hours = facts(results, "score"), facts(results, "hours")
        steps = f", {suite.total_timesteps / 1e6:.2g}M steps" if suite.total_timesteps else ""
        rows.append(
            {
                "script": f"[{name}]({name})",
                "shows": script.shows,
                "lines": len((ROOT / name).read_text().splitlines()),
                "environment": f"{script.environment}{steps}",
                "return (seeds)": f"{plus_minus(scores)} ({len(scores)})",
                "minutes": f"{60 * np.median(hours):.0f}" if len(hours) else "–",
            }
        )
    return markdown(rows)


def suites_table(folders: Folders) -> str:
    """All suites, how complete they are, and what the runs that are done took together."""
    rows = []
    for suite in (x for x in SUITES.values() if x.name != "smoke"):
        made, total = how_complete(suite, folders)
        hours = [x["hours"] for x in done(suite.name, folders).values() if x["hours"] is not None]
        rows.append(
            {
                "suite": f"`{suite.name}`",
                "runs done": f"{made} of {total}",
                "hours": f"{sum(hours):.1f}",
                "what it reproduces": suite.reproduces,
            }
        )
    return markdown(rows)


# --- Throughput ---

RATES = {
    "steps_per_second": ("steps/s", "× {}"),
    "steps_per_cpu_second": ("steps/s of processor time", "× by processor time"),
}


def measured(folders: Folders) -> dict[str, pd.DataFrame]:
    """By contest, as first measured: the latest commit of those with most complete repetitions.

    A row per repetition and contender.
    """
    lines = [x for x in lines_of(folders.results / "throughput.jsonl") if "contender" in x]
    shown: dict[str, pd.DataFrame] = {}
    for contest, own in pd.DataFrame(lines).groupby("contest", sort=False) if lines else ():
        turns = own.groupby(["commit", "repetition"])["contender"].transform("count")
        whole = own[turns == own["contenders"].str.len()]
        counts = whole.groupby("commit", sort=False)["repetition"].nunique()
        if len(counts):
            most = counts[counts == counts.max()].index[-1]
            shown[contest] = whole[whole["commit"] == most]
    return shown


def spread(values: pd.Series, digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = (f"{x:.{digits}f}" for x in values.quantile([0, 0.5, 1]))
    return f"{middle} ({low} to {high})"


def contest_table(rows: pd.DataFrame) -> str:
    """The contenders of a contest beside the last one."""
    about, cells = rows.iloc[0], []
    *_, peer = about["contenders"]
    rates = {x: rows.pivot(index="repetition", columns="contender", values=x) for x in RATES}
    for name in about["contenders"]:
        own = rows[rows["contender"] == name]
        ratios = {x: table[name] / table[peer] for x, table in rates.items()}
        cells.append({"median (range)": name})
        cells[-1] |= {x: spread(own[key]) for key, (x, _) in RATES.items()}
        cells[-1] |= {x.format(peer): spread(ratios[key], 2) for key, (_, x) in RATES.items()}
        cells[-1] |= {
            "target": "–" if own["target"].isna().any() else f"{own['target'].iloc[0]:g}",
            "start-up, s": spread(own["start_seconds"], 1),
            "memory, MiB": f"{own['peak_mib'].max():.0f}",
        }
    turns, commit = rows["repetition"].nunique(), about["commit"][:7]
    text = f"{turns} repetitions in turns, {about['processor']}, commit {commit}."
    return f"**{about['title']}**,\n{text}\n\n{markdown(cells)}"


def throughput_tables(folders: Folders) -> str:
    """All measured contests."""
    return "\n".join(map(contest_table, measured(folders).values()))


# --- Details ---


def details_table(folders: Folders) -> str:
    """Every tag of the scripts, its sentence, and what an experiment says that it is worth."""
    tags = pd.DataFrame(
        [
            (number or kind.lower(), title, sentence, script)
            for script in SCRIPTS
            for number, kind, title, sentence in TAG.findall((ROOT / script).read_text())
        ],
        columns=["detail", "name", "why", "script"],
    )
    studies = [SUITES[name] for name in ("ablation", "multidiscrete", "memory")]
    found = [
        (suite.variants[name], effect)
        for suite in studies
        for (_, name), effect in effects(suite, folders).items()
    ]
    rows = []
    for (number, title), own in tags.groupby(["detail", "name"], sort=False):
        links = (f"[{x.removeprefix('ppo_').removesuffix('.py')}]({x})" for x in own["script"])
        worth = [
            f"{variant.label.removeprefix('extra: ')}: " + with_interval(effect, "{:+z.0%}".format)
            for variant, effect in found
            if {number.removesuffix("/37"), title} & {*variant.details}
        ]
        rows.append(
            {
                **{"detail": number, "name": title},
                "why": next(filter(None, own["why"]), ""),
                **{"without it": "<br>".join(worth), "scripts": ", ".join(links)},
            }
        )
    return markdown(sorted(rows, key=lambda x: place(x["detail"])))


def place(number: str) -> tuple[int, int]:
    """Where a detail stands: the 37, then K, R, G and D, then what has no number."""
    series, digits, _ = re.fullmatch(r"([a-zA-Z]*)(\d*)(/\d+)?", number).groups()
    return ["", "K", "R", "G", "D", "extra", "deviation"].index(series), int(digits or 0)


# --- Writing ---


def block(name: str, folders: Folders) -> str:
    """Text of a generated block, or a BenchmarkError if there is none of this name."""
    # Not those that are evaluated: their bugs come after training.
    bugs = [x for name, x in SUITES.items() if name.startswith("bugs") and not x.evaluated]
    tables = {
        "suites": suites_table,
        "throughput": throughput_tables,
        "scripts": scripts_table,
        "details": details_table,
        "goal": functools.partial(health.counts, bugs),
        "bands": functools.partial(health.bands_table, [SUITES["bugs"], SUITES["bugs_cartpole"]]),
    }
    if name in tables:
        return tables[name](folders)
    if name in SUITES:
        return SUITES[name].table(SUITES[name], folders) if done(name, folders) else ""
    known = ", ".join((*tables, *SUITES))
    raise BenchmarkError(f"There is no block {name}; there are {known}.")


def filled(page: Path, folders: Folders) -> str:
    """A page with all its blocks rewritten."""
    return BLOCK.sub(lambda x: f"{x[1]}\n{block(x[2], folders)}\n{x[3]}", page.read_text())


def write(folders: Folders) -> list[Path]:
    """Rewrite the pages; return those that changed."""
    if not folders.results.is_dir():  # all tables would be lost
        raise BenchmarkError(f"There is no folder {folders.results}.")
    texts = {page: filled(page, folders) for page in PAGES}
    changed = [page for page, text in texts.items() if page.read_text() != text]
    for page in changed:
        page.write_text(texts[page])
    return changed
