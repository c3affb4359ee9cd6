"""Generated pages: blocks of README.md and benchmark/README.md, and all of DETAILS.md.

A block begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; everything between is
rewritten from committed results, everything else is left alone.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import by_environment, lines_of, reference
from benchmark.runs import Folders
from benchmark.suites import SUITES
from benchmark.tables import (
    SCORE_CELLS,
    effects,
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
WHOLE_RUN = 1_000_000  # steps for which the time of a whole run is projected


def scripts_table(folders: Folders) -> str:
    """Every script with its size, score beside a published one, time and speed."""
    rows, contests = [], measured(folders)
    for row in reference("scripts"):
        script, environment = row["script"], row["environment"]
        results = by_environment(row["suite"], row["variant"], folders).get(environment, [])
        seeds, scores, middle, ends, _, hours = score_cells(results)
        theirs = [published(environment, x) for x in row["sources"].split("; ") if x]
        rows.append(
            (
                f"[{script}]({script})",
                row["shows"],
                len((ROOT / script).read_text().splitlines()),
                environment,
                seeds,
                scores,
                middle if ends == "–" else f"{middle} {ends}",
                "; ".join(theirs) or "–",
                hours,
                speed(contests.get(row["contest"])),
            )
        )
    header = ("script", "shows", "lines", "environment", *SCORE_CELLS[:2], "IQM [95 %]")
    return markdown((*header, "CleanRL's", "hours", "speed against its peer"), rows)


# --- Throughput ---


def measured(folders: Folders) -> dict[str, pd.DataFrame]:
    """By contest, as first measured: the latest measurement with most complete repetitions.

    A row per repetition and contender; one without them has the profile.
    """
    rows = pd.DataFrame(lines_of(folders.results / "throughput.jsonl"))
    if rows.empty:
        return {}
    place = ["contest", "commit", rows["modified"].str.join(" ")]
    shown, most = {}, {}
    for (contest, *_), group in rows.groupby(place, sort=False):
        group = group.drop_duplicates(["repetition", "contender"], keep="last")
        found = group.groupby("repetition")["contender"].transform("count")
        complete = found == len(group["contenders"].iloc[0])
        if complete.sum() >= max(1, most.get(contest, 0)):
            shown[contest] = group[complete | group["repetition"].isna()]
            most[contest] = complete.sum()
    return shown


def ratios(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    """Rate of each contender over that of the last one, per repetition."""
    rates = rows.dropna(subset=["repetition"]).pivot(
        index="repetition", columns="contender", values=key
    )
    return rates.div(rates[rows["contenders"].iloc[0][-1]], axis=0)


def speed(rows: pd.DataFrame | None) -> str:
    """Ratio to the rate of the peer of a contest, or a dash."""
    if rows is None:
        return "–"
    first, *_, peer = rows["contenders"].iloc[0]
    return f"{ratios(rows, 'steps_per_second')[first].median():.1f} × {peer.partition(',')[0]}"


def spread(values: pd.Series, digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = np.min(values), np.median(values), np.max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def contest_tables(rows: pd.DataFrame) -> str:
    """The contenders of a contest, their ratios to the last one, and where the time goes."""
    runs, profiles = rows.dropna(subset=["repetition"]), rows[rows["repetition"].isna()]
    first, by_contender = runs.iloc[0], runs.groupby("contender")
    cells = []
    for name in first["contenders"]:
        own = by_contender.get_group(name)
        minutes = (own["start_seconds"] + WHOLE_RUN / own["steps_per_second"]) / 60
        rates = spread(own["steps_per_second"]), spread(own["steps_per_cpu_second"])
        seconds = spread(own["start_seconds"], 1), spread(minutes, 1)
        cells.append((name, *rates, *seconds, f"{own['peak_mib'].max():.0f}"))
    header = ("Median (range)", "steps/s", "steps/s of processor time", "start-up, s")
    header += ("1M steps, projected, min", "memory of the largest process, MiB")
    text = (
        f"**{first['title']}**, {len(own)} repetitions in turns, {first['processor']}, commit "
        f"{first['commit'][:7]}.\n\n{markdown(header, cells)}"
    )
    targets = by_contender["target"].first().dropna()
    clock, cpu = (ratios(rows, f"steps_per_{x}second") for x in ("", "cpu_"))
    *names, peer = first["contenders"]
    text += "\n" if len(targets) else ""
    for name in names if len(targets) else ():
        target = f"; target {targets[name]:g}" if name in targets else ""
        text += (
            f"- {name} / {peer}: {spread(clock[name], 2)} by the clock, {spread(cpu[name], 2)} by "
            f"processor time{target}.\n"
        )
    text += "".join(profile_table(names[0], parts) for parts in profiles.get("profile", ()))
    if first["modified"]:
        text += f"\nMeasured with changes since that commit in {', '.join(first['modified'])}.\n"
    return text


def profile_table(name: str, parts: dict[str, float]) -> str:
    """Where the time of a contender goes."""
    total = sum(parts.values())
    rows = [(part, f"{value:.1f}", f"{value / total:.0%}") for part, value in parts.items()]
    rows.append(("whole step", f"{total:.1f}", "100%"))
    return (
        f"\nWhere the time of {name} goes (one run with timers):\n\n"
        + markdown(("per environment step", "µs", "share"), rows)
        + f"\nThe physics alone would allow {1e6 / parts['physics']:.0f} steps/s; "
        f"the script reaches {parts['physics'] / total:.0%} of that limit.\n"
    )


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
    effect = effects("ablation", folders)
    rows = []
    for key, row in sentences.items():
        links = (f"[{x.removeprefix('ppo_').removesuffix('.py')}]({x})" for x in scripts[key])
        worth = []
        for variant in row["variants"].split():
            if variant in effect:
                label = SUITES["ablation"].variants[variant].label
                label = re.sub(r"^(\d[\d and]*|extra:) ", "", label)
                runs = "" if effect[variant][1] else " (one run)"
                worth.append(f"{label}: {with_interval(*effect[variant], '{:+.0%}'.format)}{runs}")
        rows.append((*key, row["sentence"], "<br>".join(worth), ", ".join(links)))
    header = ("detail", "name", "what it does", "without it", "scripts")
    text = (ROOT / "benchmark" / "reference" / "details.md").read_text()
    return text + "\n" + markdown(header, rows)


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
