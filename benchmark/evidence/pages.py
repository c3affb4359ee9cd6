"""Generated blocks of README, DEBUGGING, DETAILS, benchmark/README and benchmark/pages.

A block begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; everything between is
rewritten from committed results and the scripts' tags, everything else is left alone.
"""

import re
from pathlib import Path

import pandas as pd

from benchmark.evidence import language, rlhf, tables
from benchmark.evidence.definitions import Script
from benchmark.evidence.runs import how_complete
from benchmark.evidence.suites import SUITES
from benchmark.evidence.suites.scripts import SCRIPTS
from benchmark.evidence.tags import tags_of
from benchmark.lab import check
from benchmark.lab.definitions import CLOSED, Folders
from benchmark.lab.provenance import ROOT, BenchmarkError
from benchmark.lab.results import Result, by_environment, done, lines_of
from benchmark.lab.statistics import interquartile_mean
from benchmark.lab.tables import CHANGE, markdown, number, plus_minus, with_interval

PAGES = [ROOT / x for x in ("README.md", "benchmark/README.md", "DETAILS.md", "DEBUGGING.md")]
PAGES += sorted((ROOT / "benchmark/pages").glob("*.md"))
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# By the name that a suite gives as `table`.
TABLES = {
    "scores": tables.scores_table,
    "variants": tables.variants_table,
    "normalized": tables.normalized_table,
    "games": tables.games_table,
    "rlhf": rlhf.pipeline_table,
    "models": rlhf.models_table,
}


# --- Scripts and suites ---


def runs_behind(script: Script, folders: Folders) -> list[Result]:
    """The runs that stand for a script. A closed experiment has its own in its folder."""
    name, place = script.suite, folders
    if script.suite not in SUITES:
        name, place = "runs", Folders(CLOSED / script.suite)
    return by_environment(name, script.variant, place).get(script.environment, [])


def scripts_table(folders: Folders) -> str:
    """Every script with what it shows, its size, and the return and time of its runs."""
    rows = []
    for name, script in SCRIPTS.items():
        runs = runs_behind(script, folders)
        scores, hours = tables.facts(runs, "score"), tables.facts(runs, "hours")
        minutes = spread(60 * pd.Series(hours)) if len(hours) else "–"
        steps = max((x.record["settings"].get("total_timesteps", 0) for x in runs), default=0)
        length = f", {steps / 1e6:.2g}M steps{script.share}" if steps else ""
        models = max((len(x.record.get("models", ())) for x in runs), default=0)
        several = f" for {models} models" if models else ""
        rows.append(
            {
                "script": f"[{name}]({name})",
                "shows": script.shows,
                "lines": len((ROOT / name).read_text().splitlines()),
                "environment": f"{script.environment}{length}",
                "score": script.score,
                "mean ± std (seeds)": f"{plus_minus(scores)} ({len(scores)})",
                "IQM": number(interquartile_mean(scores)) if len(scores) > 3 else "–",
                "ppo2 by then": tables.ppo2_by_then(script.environment, steps),
                "minutes": f"{minutes}{several}",
            }
        )
    return markdown(rows)


def suites_table(folders: Folders) -> str:
    """All suites, how complete they are, and what the runs that are done took together."""
    rows = []
    for suite in (x for x in SUITES.values() if x.name != "smoke"):
        made, total = how_complete(suite, folders)
        hours = sum(x["hours"] or 0 for x in done(suite.name, folders).values())
        row = {"suite": f"`{suite.name}`", "runs done": f"{made} of {total}"}
        rows.append(row | {"hours": f"{hours:.1f}", "what it reproduces": suite.reproduces})
    return markdown(rows)


# What README compares: a question, and the answer of each of COMPARED_WITH. Empty: not compared.
COMPARED_WITH = ("here", "CleanRL", "Stable-Baselines3", "rsl_rl (robots)", "TRL (language)")
COMPARED = """\
read all of PPO | one file, from [{lines} lines](ppo_minimal.py) | one file | a library | \
a library | no PPO
see why a detail is there | [{details} of 37](DETAILS.md), in the code | a blog post | – | – |
time limits are not failures (#198, #504) | yes | no | yes | yes |
save, load and evaluate, with the normalizer (#310, #400) | one call | weights only | \
two files | one file |
resume an interrupted run | to the bit | no | in new episodes | in new episodes |
today's Gymnasium, 1.4 | yes | 0.29; with 1.4 it logs no episodes | yes | |
steps per second, one core | [{ours}](benchmark/pages/implementations.md) | {cleanrl} | 1 × | |
simulators with thousands of environments | [EnvPool, mjlab, your own](ppo_vector_env.py) | \
Isaac Gym; EnvPool's Atari | through NumPy | Isaac Lab, mjlab, your own |
language models: PPO with a value function | [causal transformers](ppo_llm.py) | – | – | – | \
[removed in 1.13](https://github.com/huggingface/trl/pull/7020)
find a wrong line in your copy | [`diff`](DEBUGGING.md) names it, in seconds | – | – | – | –"""


def comparison_table(folders: Folders) -> str:
    """What README's first screen shows: our scripts next to those that readers know."""
    tags = [tag for name in SCRIPTS for tag in tags_of((ROOT / name).read_text())]
    text = COMPARED.format(
        lines=len((ROOT / "ppo_minimal.py").read_text().splitlines()),
        details=len({n for x in tags for n in re.findall(r"(\d+)/37", x.number)}),
        ours=speed(folders, "ppo_continuous_action.py"),
        cleanrl=speed(folders, "CleanRL PPO"),
    )
    text = re.sub(r"#(\d+)", r"[#\1](https://github.com/vwxyzjn/cleanrl/issues/\1)", text)
    names = ("what people ask for (issues: CleanRL's)", *COMPARED_WITH)
    rows = (map(str.strip, row.split("|")) for row in text.splitlines())
    return markdown([dict(zip(names, row, strict=True)) for row in rows])


def speed(folders: Folders, entry: str) -> str:
    """Steps per second of an entry over those of Stable-Baselines3 in HalfCheetah."""
    rows = pd.DataFrame(lines_of(folders.results / "throughput.jsonl"))
    rows = rows[rows["measurement"] == "continuous"] if len(rows) else rows
    if entry not in set(rows.get("entry", ())):
        return "–"
    rates = rows.pivot(index="repetition", columns="entry", values="steps_per_second")
    return f"{(rates[entry] / rates['Stable-Baselines3 PPO']).median():.1f} ×"


# --- Throughput ---


def spread(values: pd.Series, digits: int = 0) -> str:
    """Median and range, where there is one."""
    low, middle, high = (f"{x:.{digits}f}" for x in values.quantile([0, 0.5, 1]))
    return f"{middle} ({low} to {high})" if low != high else middle


def measurement_table(rows: pd.DataFrame) -> str:
    """The entries of a measurement beside the last one."""
    about, cells = rows.iloc[0], []
    *_, last = names = rows["entry"].unique()
    rates = rows.pivot(index="repetition", columns="entry", values="steps_per_second")
    for name in names:
        own = rows[rows["entry"] == name]
        cells.append(
            {
                "median (range)": name,
                "steps/s": spread(rates[name], 0 if rates[name].max() >= 10 else 2),
                f"× {last}": spread(rates[name] / rates[last], 2),
                "start-up, s": spread(own["start_seconds"], 1),
                "memory, MiB": f"{own['peak_mib'].max():.0f}",
            }
        )
    turns, commit = rows["repetition"].nunique(), about["commit"][:7]
    how = f"{turns} repetitions in turns" if turns > 1 else "One repetition"
    text = f"{how}, {about['processor']}, commit {commit}."
    return f"**{about['title']}**,\n{text}\n\n{markdown(cells)}"


def throughput_tables(folders: Folders) -> str:
    """All measured measurements."""
    lines = lines_of(folders.results / "throughput.jsonl")
    measurements = pd.DataFrame(lines).groupby("measurement", sort=False) if lines else ()
    return "\n".join(measurement_table(rows) for _, rows in measurements)


# --- Details ---


def details_table(_: Folders) -> str:
    """Every tag of the scripts, its sentence, and what an experiment says that it is worth."""
    worth: dict[str, list[str]] = {}  # by number or title
    for switch in tables.switches():
        text = f"{switch.label.removeprefix('extra: ')}: {with_interval(switch.effect, CHANGE)}"
        for detail in switch.details:
            worth.setdefault(detail, []).append(text)
    rows: dict[tuple[str, str], dict[str, str]] = {}
    found = ((x, tag) for x in SCRIPTS for tag in tags_of((ROOT / x).read_text()))
    for script, tag, digits in ((*x, y) for x in found for y in x[1].number.split(", ")):
        key = digits or tag.kind.lower(), "" if digits else tag.title  # the first script names it
        known = [*worth.get(key[0].removesuffix("/37"), ()), *worth.get(tag.title, ())]
        empty = {"detail": key[0], "name": tag.title, "why": "", "without it": "<br>".join(known)}
        row = rows.setdefault(key, empty | {"in": ""})
        row["why"] = row["why"] or tag.sentence
        name = Path(script).stem.removeprefix("ppo_")
        row["in"] += "<br>" * bool(row["in"])
        row["in"] += f"[{name}]({script}#{tag.anchor})"
    return markdown(sorted(rows.values(), key=lambda x: place(x["detail"])))


def place(number: str) -> tuple[int, str, int]:
    """Where a detail stands: the 37, then K, R, G, D, other letters, then what has no number."""
    series, digits, _ = re.fullmatch(r"([a-zA-Z]*)(\d*)(/\d+)?", number).groups()
    known = ["", "K", "R", "G", "D", None, "extra", "deviation"]  # None: other letters
    return known.index(series if series in known else None), series, int(digits or 0)


# --- The checks ---


def code_to_paste(_: Folders) -> str:
    """Those for a PPO of one's own."""
    code = (ROOT / "benchmark" / "lab" / "diagnose.py").read_text()
    return f"```python\n{code}```\n"


# --- Writing ---

BLOCKS = {
    "comparison": comparison_table,
    "suites": suites_table,
    "throughput": throughput_tables,
    "scripts": scripts_table,
    "details": details_table,
    "ranges": lambda _: check.ranges_table(),
    "diagnose": code_to_paste,
    "llm_course": language.course,
    "llm_costs": language.costs,
}


def block(name: str, folders: Folders) -> str:
    """Text of a generated block, or a BenchmarkError if there is none of this name."""
    if name in BLOCKS:
        return BLOCKS[name](folders)
    suite = SUITES.get(name)
    if not suite or suite.table not in TABLES:
        raise BenchmarkError(f"There is no block or table {name}.")
    made, total = how_complete(suite, folders)
    lacks = f"\n{made} of {total} runs are done.\n" if made < total else ""
    return TABLES[suite.table](suite, folders) + lacks if done(name, folders) else ""


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
