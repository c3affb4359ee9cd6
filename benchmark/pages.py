"""Generated pages: blocks of README.md and benchmark/README.md, and all of DETAILS.md.

A block begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; everything between is
rewritten from committed results, everything else is left alone.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import REFERENCE, by_environment, lines_of, reference
from benchmark.runs import Folders
from benchmark.suites import SUITES
from benchmark.tables import (
    compared,
    facts,
    markdown,
    published,
    score_cells,
    suite_table,
    suites_table,
    with_interval,
)

PAGES = (ROOT / "benchmark" / "README.md", ROOT / "README.md")
DETAILS = ROOT / "DETAILS.md"
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def scripts_table(folders: Folders) -> str:
    """Every script with its size, score beside a published one, time and speed."""
    rows, contests = [], measured(folders)
    for shown in reference("scripts"):
        script, environment = shown["script"], shown["environment"]
        results = by_environment(shown["suite"], shown["variant"], folders).get(environment, [])
        theirs = [published(environment, x) for x in shown["sources"].split("; ") if x]
        hours = facts(results, "hours")
        rows.append(
            {
                "script": f"[{script}]({script})",
                "shows": shown["shows"],
                "lines": len((ROOT / script).read_text().splitlines()),
                "environment": environment,
            }
            | score_cells(facts(results, "score"), len(results))
            | {
                "CleanRL's": "; ".join(theirs) or "–",
                "hours": f"{np.median(hours):.2f}" if len(hours) else "–",
                "speed against its peer": speed(contests.get(shown["contest"])),
            }
        )
    return markdown(rows)


# --- Throughput ---


def measured(folders: Folders) -> dict[str, pd.DataFrame]:
    """By contest, as first measured: the latest commit of those with most complete repetitions.

    A row per repetition and contender; one without them has the profile.
    """
    rows = pd.DataFrame(lines_of(folders.results / "throughput.jsonl"))
    if rows.empty:
        return {}
    shown: dict[str, pd.DataFrame] = {}
    most = dict.fromkeys(rows["contest"], 1)
    for (contest, _), group in rows.groupby(["contest", "commit"], sort=False):
        made = group.groupby("repetition")["contender"].transform("count")
        complete = made == len(group["contenders"].iloc[0])
        if complete.sum() >= most[contest]:
            shown[contest] = group[complete | group["repetition"].isna()]
            most[contest] = complete.sum()
    return shown


def ratios(rows: pd.DataFrame, name: str, rate: str) -> pd.Series:
    """Rate of a contender over that of its peer, the last one, per repetition."""
    rates = rows.pivot(index="contender", columns="repetition", values=rate)
    return (rates.loc[name] / rates.loc[rows["contenders"].iloc[0][-1]]).dropna()


def speed(rows: pd.DataFrame | None) -> str:
    """Ratio of the first contender's rate to that of its peer, or a dash."""
    if rows is None:
        return "–"
    first, *_, peer = rows["contenders"].iloc[0]
    return f"{ratios(rows, first, 'steps_per_second').median():.1f} × {peer.partition(',')[0]}"


def spread(values: pd.Series, digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = (f"{x:.{digits}f}" for x in values.quantile([0, 0.5, 1]))
    return f"{middle} ({low} to {high})"


def contest_tables(rows: pd.DataFrame) -> str:
    """The contenders of a contest beside the last one, and where the time of the first goes."""
    about = rows.iloc[0]
    *_, peer = about["contenders"]
    cells = []
    for name in about["contenders"]:
        own = rows[rows["contender"] == name]
        by_clock, by_processor = "steps_per_second", "steps_per_cpu_second"
        cells.append(
            {
                "median (range)": name,
                "steps/s": spread(own[by_clock]),
                "steps/s of processor time": spread(own[by_processor]),
                f"× {peer}": spread(ratios(rows, name, by_clock), 2),
                "× by processor time": spread(ratios(rows, name, by_processor), 2),
                "target": "–" if own["target"].isna().any() else f"{own['target'].iloc[0]:g}",
                "start-up, s": spread(own["start_seconds"], 1),
                "memory, MiB": f"{own['peak_mib'].max():.0f}",
            }
        )
    profiles = rows["profile"].dropna() if "profile" in rows else ()
    return (
        f"**{about['title']}**, {len(own)} repetitions in turns, {about['processor']}, commit "
        f"{about['commit'][:7]}.\n\n{markdown(cells)}"
        + "".join(profile_table(about["contenders"][0], parts) for parts in profiles)
    )


def profile_table(name: str, parts: dict[str, float]) -> str:
    """Where the time of a contender goes."""
    total = sum(parts.values())
    rows = [
        {"per environment step": part, "µs": f"{value:.1f}", "share": f"{value / total:.0%}"}
        for part, value in {**parts, "whole step": total}.items()
    ]
    return f"\nWhere the time of {name} goes (one run with timers):\n\n{markdown(rows)}"


def throughput_tables(folders: Folders) -> str:
    """All measured contests."""
    return "\n".join(map(contest_tables, measured(folders).values()))


# --- Details ---

TAG = re.compile(r"# (?:Detail (\w+/\d+)|(Extra|Deviation)): ([^\[(;]+?)(?: [\[(].*)?")


def details(folders: Folders) -> str:
    """DETAILS.md: every tag of the scripts, what it does, and what the ablation says it is worth.

    Raises:
        BenchmarkError: reference/details.csv has no sentence for a tag.
    """
    scripts: dict[tuple[str, str], list[str]] = {}
    for script in (row["script"] for row in reference("scripts")):
        for line in (ROOT / script).read_text().splitlines():
            if tag := TAG.fullmatch(line.strip()):
                scripts.setdefault((tag[1] or tag[2].lower(), tag[3]), []).append(script)
    sentences = {(row["detail"], row["name"]): row for row in reference("details")}
    if lacking := [x for x in scripts if x not in sentences]:
        raise BenchmarkError(f"reference/details.csv lacks a sentence for: {lacking[0]}.")
    effects, _ = compared("ablation", folders)
    rows = []
    for (number, name), row in sentences.items():
        worth = []
        for variant in row["variants"].split():
            if effect := effects.get(("ablation", variant)):
                label = SUITES["ablation"].variants[variant].label
                label = re.sub(r"^(\d[\d and]*|extra:) ", "", label)
                worth.append(f"{label}: {with_interval(effect, '{:+z.0%}'.format)}")
        links = (
            f"[{x.removeprefix('ppo_').removesuffix('.py')}]({x})" for x in scripts[number, name]
        )
        rows.append(
            {
                "detail": number,
                "name": name,
                "what it does": row["sentence"],
                "without it": "<br>".join(worth),
                "scripts": ", ".join(links),
            }
        )
    text = (REFERENCE / "details.md").read_text()
    return f"{text}\n{markdown(rows)}"


# --- Writing ---


def block(name: str, folders: Folders) -> str:
    """Text of a generated block, or a BenchmarkError if there is none of this name."""
    blocks = {"suites": suites_table, "throughput": throughput_tables, "scripts": scripts_table}
    if name in blocks:
        return blocks[name](folders)
    if name in SUITES:
        return suite_table(name, folders)
    raise BenchmarkError(f"There is no block {name}; there are {', '.join((*blocks, *SUITES))}.")


def filled(text: str, folders: Folders) -> str:
    """A page with all its blocks rewritten."""
    return BLOCK.sub(lambda x: f"{x[1]}\n{block(x[2], folders)}\n{x[3]}", text)


def write(folders: Folders) -> list[Path]:
    """Rewrite the pages; return those that changed."""
    if not folders.results.is_dir():  # all tables would be lost
        raise BenchmarkError(f"There is no folder {folders.results}.")
    texts = {page: filled(page.read_text(), folders) for page in PAGES} | {
        DETAILS: details(folders)
    }
    changed = [x for x, text in texts.items() if not x.exists() or x.read_text() != text]
    for page in changed:
        page.write_text(texts[page])
    return changed
