"""Tables, written between markers into README.md and benchmark/README.md.

A block begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; everything between is
rewritten from committed results, everything else is left alone.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmark import statistics, throughput
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import Result, by_environment, missing, reference, variant_named
from benchmark.runs import Folders, select
from benchmark.suites import SUITES
from benchmark.tables import markdown

PAGES = (ROOT / "benchmark" / "README.md", ROOT / "README.md")
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Columns of published numbers, by the name of their source in reference/scores.csv.
PUBLISHED = {
    "paper, Fig. 3 (v1, read off)": "paper, Figure 3, read by Tianshou",
    "ppo2 (v2, 6 seeds)": "baselines ppo2, benchmark page",
    "ppo2 (v2, 3 seeds)": "baselines ppo2, runs of openrlbenchmark",
    "CleanRL (v4, 3 seeds)": "CleanRL pr-424",
    "CleanRL, earlier (v4, 3 seeds)": "CleanRL v1.0.0-12",
}


def number(value: float) -> str:
    """Three digits or more, without decimals that mean nothing."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def plus_minus(scores: np.ndarray) -> str:
    """Mean ± population standard deviation over seeds (as CleanRL's tables)."""
    spread = f" ± {number(np.std(scores))}" if len(scores) > 1 else ""
    return f"{number(np.mean(scores))}{spread}"


def brackets(ends: tuple[float, float] | None, form: Callable[[float], str] = number) -> str:
    """An interval, or a dash where there is none."""
    return f"[{form(ends[0])}, {form(ends[1])}]" if ends else "–"


def finals(results: list[Result]) -> np.ndarray:
    """Score of each seed: mean return of its last 100 episodes."""
    return np.array([x.final for x in results])


def published(environment: str, source: str) -> str:
    """Mean ± spread of a published result, or a dash."""
    name = environment.partition("-")[0]
    for row in reference("scores"):
        if row["source"] == source and row["environment"] == name:
            about = "≈ " if row["how_seen"] == "read off the plot" else ""
            spread = f" ± {number(float(row['spread']))}" if row["spread"] else ""
            return about + number(float(row["mean"])) + spread
    return "–"


def what_is_missing(suite: str, folders: Folders) -> str:
    """A sentence with the command that continues the suite; empty if it is complete."""
    count, total = missing(suite, folders), len(select(suite, folders))
    if not count:
        return ""
    return f"\nMissing: {count} of {total} runs. To continue: `python -m benchmark run {suite}`.\n"


def scores_table(suite: str, variant: str, folders: Folders) -> str:
    """Our scores of one variant beside the published ones."""
    rows = []
    for environment, results in by_environment(suite, variant, folders).items():
        scores = finals(results)
        hours = np.mean([x.record["seconds"] for x in results]) / 3600
        rows.append(
            (
                environment,
                len(results),
                plus_minus(scores),
                number(statistics.interquartile_mean(scores)),
                brackets(statistics.interval([scores], statistics.interquartile_mean)),
                plus_minus(np.array([x.whole for x in results])),
                *(published(environment, source) for source in PUBLISHED.values()),
                f"{hours:.2f}",
            )
        )
    header = ("environment", "seeds", "last 100 episodes", "IQM", "95 % interval", "whole run")
    return markdown((*header, *PUBLISHED, "hours per run"), rows)


def suite_block(suite: str, folders: Folders) -> str:
    """Everything about a suite: scores, comparisons with its baseline, what is missing."""
    variants = SUITES[suite].variants
    text = ""
    if list(variants) == [""]:
        text = scores_table(suite, "", folders)
    elif any(by_environment(suite, name, folders) for name in variants):
        text = variants_table(suite, folders)
    return text + what_is_missing(suite, folders)


def variants_table(suite: str, folders: Folders) -> str:
    """Scores of each variant (rows) in each environment (columns), beside the baseline's."""
    names = {(suite, x): SUITES[suite].variants[x].label for x in SUITES[suite].variants}
    baseline = SUITES[suite].baseline
    if baseline not in names:
        names = {baseline: SUITES[baseline[0]].variants[baseline[1]].label or baseline[0], **names}
    environments = list(SUITES[suite].environments)
    rows = []
    for (owner, variant), label in names.items():
        found = by_environment(owner, variant, folders)
        cells = [
            f"{plus_minus(finals(found[env]))} ({len(found[env])})" if env in found else "–"
            for env in environments
        ]
        compared = improvement_cell((owner, variant), baseline, environments, folders)
        rows.append((label, *cells, compared))
    against = names[baseline]
    return markdown(("mean ± std (seeds)", *environments, f"P(better than {against})"), rows)


def improvement_cell(
    a: tuple[str, str], b: tuple[str, str], environments: list[str], folders: Folders
) -> str:
    """Probability of improvement of A over B with its interval; a dash for B itself."""
    ours, theirs = by_environment(*a, folders), by_environment(*b, folders)
    shared = [env for env in environments if env in ours and env in theirs]
    if a == b or not shared:
        return "–"
    strata = [finals(x[env]) for env in shared for x in (ours, theirs)]
    ends = statistics.interval(strata, statistics.improvement)
    return f"{statistics.improvement(*strata):.2f} {brackets(ends, '{:.2f}'.format)}"


def compare(a: str, b: str, folders: Folders) -> str:
    """Two variants, environment by environment and over all.

    Raises:
        BenchmarkError: they have no environment in common.
    """
    first, second = variant_named(a), variant_named(b)
    ours, theirs = by_environment(*first, folders), by_environment(*second, folders)
    shared = [env for env in ours if env in theirs]
    if not shared:
        raise BenchmarkError(f"{a} and {b} have no results in a common environment.")
    rows = [
        (
            env,
            f"{plus_minus(finals(ours[env]))} ({len(ours[env])})",
            f"{plus_minus(finals(theirs[env]))} ({len(theirs[env])})",
            improvement_cell(first, second, [env], folders),
        )
        for env in shared
    ]
    rows.append(("all", "", "", improvement_cell(first, second, shared, folders)))
    return markdown(("mean ± std (seeds)", a, b, f"P({a} better)"), rows)


def suites_block(folders: Folders) -> str:
    """All suites and how complete they are."""
    rows = []
    for name, suite in SUITES.items():
        if name == "smoke":
            continue
        total = len(select(name, folders))
        rows.append((f"`{name}`", f"{total - missing(name, folders)} of {total}", suite.reproduces))
    return markdown(("suite", "runs done", "what it reproduces"), rows)


def throughput_block(folders: Folders) -> str:
    """All measured contests, in the order of their definition."""
    paths = [folders.results / "throughput" / f"{name}.json" for name in throughput.CONTESTS]
    texts = [throughput.contest_report(json.loads(x.read_text())) for x in paths if x.exists()]
    return "\n".join(texts)


def block(name: str, folders: Folders) -> str:
    """Text of a generated block.

    Raises:
        BenchmarkError: there is no block of this name.
    """
    blocks: dict[str, Callable[[Folders], str]] = {
        "suites": suites_block,
        "throughput": throughput_block,
    }
    if name in blocks:
        return blocks[name](folders)
    if name in SUITES:
        return suite_block(name, folders)
    raise BenchmarkError(f"There is no block {name}; there are {', '.join((*blocks, *SUITES))}.")


def filled(text: str, folders: Folders) -> str:
    """A page with all its blocks rewritten."""
    return BLOCK.sub(lambda x: f"{x[1]}\n{block(x[2], folders)}\n{x[3]}", text)


def write_pages(folders: Folders) -> list[Path]:
    """Rewrite the blocks of all pages that exist; return those that changed."""
    changed = []
    for page in PAGES:
        if not page.exists():
            continue
        old = page.read_text()
        new = filled(old, folders)
        if new != old:
            page.write_text(new)
            changed.append(page)
    return changed
