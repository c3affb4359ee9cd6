"""Tables of suites, in Markdown, from committed results and published numbers."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import rivals, statistics
from benchmark.provenance import BenchmarkError
from benchmark.results import (
    Result,
    by_environment,
    by_variant,
    done,
    how_complete,
    random_returns,
    reference,
    variant_named,
)
from benchmark.runs import LAST_EPISODES, Folders, read_checkpoint
from benchmark.statistics import Estimate, estimate
from benchmark.suites import SUITES

NUMERIC = re.compile(r"(?:[-+≈ ]*\d.*|–)?")
Name = tuple[str, str]  # suite and variant
Scores = dict[str, np.ndarray]  # by environment
RETURNS_REACHED = (1000, 2000, 4000)


# --- Cells ---


def markdown(rows: Sequence[dict[str, object]]) -> str:
    """A table of rows, which are cells by column; a dash where a row lacks one.

    Columns whose cells all begin with a number (or are empty) are right-aligned.
    """
    table = pd.DataFrame(rows, dtype=object).fillna("–").astype(str)
    rules = ["--:" if all(map(NUMERIC.fullmatch, table[x])) else "---" for x in table]
    lines = [f"| {' | '.join(row)} |" for row in (table.columns, *table.to_numpy())]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:], ""])


def number(value: float, spread: float | None = None, digits: int | None = None) -> str:
    """A number, and its spread if known; with a decimal unless that would be a fourth digit."""
    if digits is None:
        digits = int(abs(round(float(value), 1)) < 100)
    return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def plus_minus(scores: np.ndarray, digits: int | None = None) -> str:
    """Mean ± population standard deviation over seeds (as CleanRL's tables), or a dash."""
    spread = np.std(scores) if len(scores) > 1 else None
    return number(np.mean(scores), spread, digits) if len(scores) else "–"


def with_interval(found: Estimate | None, form: Callable[[float], str] = number) -> str:
    """A value and its interval if it has one, or a dash."""
    if found is None:
        return "–"
    ends = f" [{form(found.ends[0])}, {form(found.ends[1])}]" if found.ends else ""
    return form(found.value) + ends


def probability(found: Estimate | None) -> str:
    """A probability with its interval; a dash for few runs, of which it would often be 0 or 1."""
    return with_interval(found if found and found.ends else None, "{:.2f}".format)


def facts(results: list[Result], name: str) -> np.ndarray:
    """A fact of each result that has it; a run in which no episode ended has no score."""
    return np.array([x.record[name] for x in results if x.record.get(name) is not None])


def score_cells(scores: np.ndarray, runs: int) -> dict[str, str]:
    """Cells about runs, of which all that ended an episode have a score."""
    middle = estimate([scores], statistics.interquartile_mean) if len(scores) else None
    return {
        "seeds": str(runs) if len(scores) == runs else f"{len(scores)} of {runs}",
        "last 100 episodes": plus_minus(scores),
        "IQM [95 %]": with_interval(middle),
    }


def published(environment: str, source: str) -> str | None:
    """Mean ± spread of a published result, or the range of several readings of it, if any."""
    rows = [
        row
        for row in reference("scores")
        if row["source"].partition(", read by")[0] == source
        and row["environment"] == environment.partition("-")[0]
    ]
    if not rows:
        return None
    about = "≈ " if rows[0]["how_seen"] == "read off the plot" else ""
    means = sorted(float(row["mean"]) for row in rows)
    if len(means) > 1:
        return f"{about}{number(means[0])} to {number(means[-1])}"
    return about + number(means[0], float(rows[0]["spread"]) if rows[0]["spread"] else None)


# --- Scores by environment ---


def scores_of(name: Name, folders: Folders) -> Scores:
    """Scores of a variant, in environments in which it has any."""
    scores = {env: facts(x, "score") for env, x in by_environment(*name, folders).items()}
    return {env: x for env, x in scores.items() if len(x)}


def scores_table(suite: str, folders: Folders) -> str:
    """Scores of a suite's only variant beside the published ones."""
    rows = []
    for environment, results in by_environment(suite, "", folders).items():
        others = {x["column"]: published(environment, x["source"]) for x in reference("columns")}
        rows.append(
            {"environment": environment}
            | score_cells(facts(results, "score"), len(results))
            | {"whole run": plus_minus(facts(results, "mean_return"))}
            | {"hours per run": f"{np.median(facts(results, 'hours')):.2f}"}
            | {column: cell for column, cell in others.items() if cell}
        )
    return markdown(rows)


def summary(paths: Iterable[Path]) -> str:
    """Scores of anybody's runs, given by their folders, by script and environment."""
    scores: dict[tuple[str, str], list[float]] = {}
    for path in paths:
        if not (path / "checkpoint.pt").exists():
            raise BenchmarkError(f"There is no {path / 'checkpoint.pt'}.")
        saved = read_checkpoint(path / "checkpoint.pt")
        returns = [x["return"] for x in saved.get("episodes", [])[-LAST_EPISODES:]]
        if not returns:
            raise BenchmarkError(f"No episode has ended in {path}.")
        key = saved["script"], saved["args"]["env_id"]
        scores.setdefault(key, []).append(float(np.mean(returns)))
    return markdown(
        [
            {"script": script, "environment": env} | score_cells(np.array(own), len(own))
            for (script, env), own in scores.items()
        ]
    )


# --- Variants side by side ---

STATISTICS = {
    "scores": statistics.improvement,
    "effects": statistics.relative_effect,
    "normalized": statistics.mean_of_strata,
}


def labels(suite: str) -> dict[Name, str]:
    """Names in tables and figures by suite and variant, first that of a baseline elsewhere."""
    baseline = SUITES[suite].baseline
    names = {(suite, name): x.label or "ours" for name, x in SUITES[suite].variants.items()}
    return names if baseline in (None, *names) else {baseline: SUITES[suite].baseline_label} | names


def in_turns(ours: Scores, theirs: Scores, environments: Iterable[str]) -> list[np.ndarray]:
    """Scores of A and B in turns, environment by environment."""
    return [scores[env] for env in environments for scores in (ours, theirs)]


def normalized(scores: dict[Name, Scores], environments: Iterable[str]) -> dict[Name, list]:
    """Scores per environment on a scale from random actions to the best run (paper, 6.1)."""
    found: dict[Name, list] = {name: [] for name in scores}
    for environment in environments:
        low = random_returns(environment)
        high = max(max(x[environment]) for x in scores.values())
        for name, x in scores.items():
            found[name].append((x[environment] - low) / (high - low))
    return found


def comparable(suite: str, folders: Folders) -> tuple[dict[Name, Scores], list[str]]:
    """Scores of a suite's variants that have any, and the environments that all of these have.

    Both are empty while the baseline has no score in an environment of all.
    """
    scores = {name: scores_of(name, folders) for name in labels(suite)}
    scores = {name: x for name, x in scores.items() if x}
    shared = [env for env in SUITES[suite].environments if all(env in x for x in scores.values())]
    return (scores, shared) if SUITES[suite].baseline in scores and shared else ({}, [])


def strata_of(suite: str, folders: Folders) -> tuple[dict[Name, list], list[str]]:
    """What a suite's table makes an estimate of for each variant, and in which environments."""
    scores, shared = comparable(suite, folders)
    if SUITES[suite].table == "normalized":
        return normalized(scores, shared), shared
    usual = scores.pop(SUITES[suite].baseline, {})
    return {name: in_turns(x, usual, shared) for name, x in scores.items()}, shared


def compared(suite: str, folders: Folders) -> tuple[dict[Name, Estimate], list[str]]:
    """What a suite's table says of each variant with scores, and of which environments."""
    strata, shared = strata_of(suite, folders)
    statistic = STATISTICS[SUITES[suite].table]
    return {name: estimate(x, statistic) for name, x in strata.items()}, shared


def variants_table(suite: str, folders: Folders) -> str:
    """Scores of each variant, what they amount to beside the baseline, and what others found."""
    kind, names, (found, _) = SUITES[suite].table, labels(suite), compared(suite, folders)
    rows = side_by_side(names, SUITES[suite].environments, folders)
    for name, row in zip(names, rows):
        own = found.get(name)
        if kind == "effects":
            row["effect"] = with_interval(own, "{:+z.0%}".format)
            row["elsewhere"] = by_variant("findings", "finding").get(name[1], "")
        elif kind == "normalized":
            row["average normalized score"] = with_interval(own, "{:.2f}".format)
            row["paper, 21 runs in 7"] = by_variant("table1", "score")[name[1]]
        elif baseline := SUITES[suite].baseline:
            row[f"P(better than {names[baseline]})"] = probability(own)
    complete = kind == "normalized" and len(found) == len(names)
    return markdown(rows) + (agreement(suite, folders) if complete else "")


def agreement(suite: str, folders: Folders) -> str:
    """How the order of normalized scores agrees with that of the paper's Table 1.

    Once also without the first row, neither clipping nor penalty: anybody's would come last.
    """
    strata, _ = strata_of(suite, folders)
    paper, texts = by_variant("table1", "score"), []
    for names in (list(strata), list(strata)[1:]):
        order = statistics.rank_correlation([float(paper[variant]) for _, variant in names])
        found = estimate([x for name in names for x in strata[name]], order)
        texts.append(with_interval(found, "{:.2f}".format))
    whole, rest = texts
    return f"\nRank correlation of the two columns: {whole}; without the first row: {rest}.\n"


def side_by_side(
    names: dict[Name, str], environments: Iterable[str], folders: Folders
) -> list[dict[str, str]]:
    """A row of scores in each environment for each variant with its label."""
    rows = []
    for name, label in names.items():
        row = {"mean ± std (seeds)": label}
        for environment in environments:
            results = by_environment(*name, folders).get(environment, [])
            cells = score_cells(facts(results, "score"), len(results))
            row[environment] = "{last 100 episodes} ({seeds})".format(**cells) if results else "–"
        rows.append(row)
    return rows


def compare(a: str, b: str, folders: Folders) -> str:
    """Two variants, each `suite` or `suite/variant`, in the environments that both have."""
    names = {variant_named(a): a, variant_named(b): b}
    ours, theirs = (scores_of(variant_named(x), folders) for x in (a, b))
    shared = [env for env in ours if env in theirs]
    if not shared:
        raise BenchmarkError(f"{a} and {b} have no results in a common environment.")
    rows = side_by_side(names, shared, folders)
    better = estimate(in_turns(ours, theirs, shared), statistics.improvement)
    rows[0][f"P(better than {b})"] = probability(better)
    return markdown(rows)


def effects_in_each(suite: str, folders: Folders) -> dict[Name, list[float]]:
    """The effect of each variant in each environment that all have."""
    strata, _ = strata_of(suite, folders)
    return {
        name: [float(statistics.relative_effect(*x)) for x in zip(own[::2], own[1::2], strict=True)]
        for name, own in strata.items()
    }


def published_effects(environments: list[str]) -> dict[tuple[str, str], float]:
    """By source and variant: the median change that others found over these environments."""
    rows = pd.DataFrame(reference("effects"))
    rows = rows[rows["environment"].isin([env.partition("-")[0] for env in environments])]
    change = rows["changed"].astype(float) / rows["default"].astype(float) - 1
    return change.groupby([rows["source"], rows["variant"]]).median().to_dict()


# --- Walking ---


def walking_table(suite: str, folders: Folders) -> str:
    """A row per run: when it reached returns, how it ended, and how its mean action walks."""
    rows = []
    for environment in SUITES[suite].environments:
        for name, label in labels(suite).items():
            for result in by_environment(*name, folders).get(environment, []):
                steps, returns = result.column("return")
                walk = {key: np.array(x) for key, x in result.record["walk"].items()}
                speed = estimate([walk["speeds"]], statistics.mean_of_strata)
                first = {x: steps[returns >= x][:1] / 1e6 for x in RETURNS_REACHED}
                rows.append(
                    {"environment": environment, "settings": label, "seed": result.record["seed"]}
                    | {
                        f"M steps to {x}": f"{y[0]:.2f}" if len(y) else "–"
                        for x, y in first.items()
                    }
                    | {"last 100 episodes": number(result.record["score"])}
                    | {"mean action": plus_minus(walk["returns"])}
                    | {"its length": number(np.mean(walk["lengths"]))}
                    | {"its speed, m/s": with_interval(speed, "{:.2f}".format)}
                )
    return markdown(rows)


# --- Models of RLHF ---

MODEL_COLUMNS = {
    "gold": "objective/gold",
    "proxy": "objective/proxy",
    "KL": "objective/kl",
    "stop rate": "text/stop_rate",
    "unique": "text/unique",
    "repetition": "text/repetition",
    "words": "text/length",
}


def models_table(suite: str, folders: Folders) -> str:
    """Every model of the RLHF runs over seeds, and what else is known of each run."""
    (variant,) = SUITES[suite].variants
    results = [x for found in by_environment(suite, variant, folders).values() for x in found]
    models = pd.concat([pd.DataFrame(x.record["models"]).T for x in results])
    over_seeds = [
        {"mean ± std over seeds": model}
        | {name: plus_minus(own[column].to_numpy(), 2) for name, column in MODEL_COLUMNS.items()}
        for model, own in models.groupby(level=0, sort=False)
    ]
    per_seed = []
    for record, updates in ((x.record, x.curve) for x in results):
        updates = updates[updates["stage"] == record["judged"]]
        target = record["settings"]["target_kl"]
        per_seed.append(
            {
                "seed": record["seed"],
                "RM accuracy": f"{record['reward_model']['accuracy']:.3f}",
                "RM correlation": f"{record['reward_model']['correlation']:.3f}",
                "gold with adaptive KL": f"{record['score']:.2f}",
                "KL of the last 20 updates": f"{updates['kl'].tail(20).mean():.2f} ({target:g})",
                "minutes": f"{record['seconds'] / 60:.1f}" if record["seconds"] else "–",
                "tokens/s in updates": f"{updates['tokens_per_second'].median():.0f}",
                "memory, MiB": record["peak_mib"],
            }
        )
    return f"{markdown(over_seeds)}\n{markdown(per_seed)}"


def rivals_table(suite: str, folders: Folders) -> str:
    """Each model of a suite of RLHF runs over its seeds."""
    rows = []
    for (method, penalty), own in rivals.models(suite, folders).groupby(
        ["method", "penalty"], sort=False
    ):
        row = {"method": method, "penalty": penalty, "seeds": len(own)}
        values = {x: own[x].dropna().to_numpy(float) for x in rivals.COLUMNS}
        rows.append(row | {x: plus_minus(y, 2) for x, y in values.items()})
    return markdown(rows)


# --- Whole suites ---

TABLES = {
    "walking": walking_table,
    "models": models_table,
    "rivals": rivals_table,
}


def suite_table(suite: str, folders: Folders) -> str:
    """Scores of a suite and what they are compared with; empty before its first result."""
    if not done(suite, folders):
        return ""
    usual = scores_table if list(SUITES[suite].variants) == [""] else variants_table
    return TABLES.get(SUITES[suite].table, usual)(suite, folders)


def suites_table(folders: Folders) -> str:
    """All suites, how complete they are, and what all their runs together take."""
    rows = []
    for name, suite in SUITES.items():
        if name == "smoke":
            continue
        made, total = how_complete(name, folders)
        hours = [x["hours"] for x in done(name, folders).values() if x["hours"] is not None]
        rows.append(
            {
                "suite": f"`{name}`",
                "runs done": f"{made} of {total}",
                "hours of all": f"{np.median(hours) * total:.1f}" if hours else "–",
                "what it reproduces": suite.reproduces,
            }
        )
    return markdown(rows)
