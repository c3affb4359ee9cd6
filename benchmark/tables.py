"""Tables of suites, in Markdown, from committed results and published numbers."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import statistics
from benchmark.provenance import BenchmarkError
from benchmark.results import (
    Result,
    by_environment,
    done,
    how_complete,
    random_returns,
    reference,
    variant_named,
)
from benchmark.rivals import over_seeds
from benchmark.runs import LAST_EPISODES, Folders, read_checkpoint
from benchmark.suites import SUITES

NUMERIC = re.compile(r"(?:[-+≈ ]*\d.*|\[[-+]?\d[^]]*\]|–)?")
Interval = tuple[float, float] | None
Estimate = tuple[float, Interval]
Name = tuple[str, str]  # suite and variant

# Changes of one detail that others have measured: file, columns of score and choice, two choices.
PUBLISHED_EFFECTS = {
    "raw-advantages": ("andrychowicz2021", "p95_score", "setting", "off", "on", "C67"),
    "shared-network": ("andrychowicz2021", "p95_score", "setting", "shared", "separate", "C47"),
    "no-clip": ("engstrom2020", "mean", "algorithm", "PPO-NoClip", "PPO", None),
}


# --- Cells ---


def markdown(header: Sequence[str], rows: Iterable[Sequence]) -> str:
    """A table; columns whose cells all begin with a number (or are empty) are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = zip(*cells, strict=True) if cells else [[""]] * len(header)
    rules = ["--:" if all(map(NUMERIC.fullmatch, column)) else "---" for column in columns]
    lines = [f"| {' | '.join(row)} |" for row in (header, *cells)]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:], ""])


def number(value: float, spread: float | None = None) -> str:
    """A number, and its spread if known; with a decimal unless that would be a fourth digit."""
    form = f".{int(abs(round(float(value), 1)) < 100)}f"
    return format(value, form) + (f" ± {spread:{form}}" if spread is not None else "")


def plus_minus(scores: np.ndarray) -> str:
    """Mean ± population standard deviation over seeds (as CleanRL's tables), or a dash."""
    spread = np.std(scores) if len(scores) > 1 else None
    return number(np.mean(scores), spread) if len(scores) else "–"


def with_interval(value: float, ends: Interval, form: Callable[[float], str]) -> str:
    """A value, and its interval if there is one."""
    return form(value) + (f" {brackets(ends, form)}" if ends else "")


def brackets(ends: Interval, form: Callable[[float], str] = number) -> str:
    """An interval, or a dash where there is none."""
    return f"[{form(ends[0])}, {form(ends[1])}]" if ends else "–"


def facts(results: list[Result], name: str) -> np.ndarray:
    """A fact of each result that has it; a run in which no episode ended has no score."""
    return np.array([x.record[name] for x in results if x.record.get(name) is not None])


def count(results: list[Result]) -> str:
    """How many results there are, and how many of them have a score."""
    scored = len(facts(results, "score"))
    return str(scored) if scored == len(results) else f"{scored} of {len(results)}"


def scores_cell(results: list[Result]) -> str:
    """Mean ± spread of the scores and their number, or a dash where there are no results."""
    return f"{plus_minus(facts(results, 'score'))} ({count(results)})" if results else "–"


def scores_row(name: Name, environments: Iterable[str], folders: Folders) -> list[str]:
    """The cells of a variant in these environments."""
    found = by_environment(*name, folders)
    return [scores_cell(found.get(env, [])) for env in environments]


def published(environment: str, source: str) -> str:
    """Mean ± spread of a published result, the range of several readings of it, or a dash."""
    name = environment.partition("-")[0]
    rows = [
        row
        for row in reference("scores")
        if row["source"].partition(", read by")[0] == source and row["environment"] == name
    ]
    if not rows:
        return "–"
    about = "≈ " if rows[0]["how_seen"] == "read off the plot" else ""
    means = sorted(float(row["mean"]) for row in rows)
    if len(means) > 1:
        return f"{about}{number(means[0])} to {number(means[-1])}"
    return about + number(means[0], float(rows[0]["spread"]) if rows[0]["spread"] else None)


# --- Scores by environment ---


def labels(suite: str) -> dict[Name, str]:
    """Names in tables and figures by suite and variant, first that of a baseline elsewhere."""
    baseline = SUITES[suite].baseline
    names = {(suite, name): variant.label for name, variant in SUITES[suite].variants.items()}
    return names if baseline is None else {baseline: SUITES[suite].baseline_label} | names


def scores_by_environment(name: Name, folders: Folders) -> dict[str, np.ndarray]:
    """Scores of a variant, in environments in which it has any."""
    found = by_environment(*name, folders)
    scores = {env: facts(results, "score") for env, results in found.items()}
    return {env: x for env, x in scores.items() if len(x)}


def pairs(a: Name, b: Name, environments: Iterable[str], folders: Folders) -> list[np.ndarray]:
    """Scores of A and B in turns, of each environment that both have."""
    ours, theirs = scores_by_environment(a, folders), scores_by_environment(b, folders)
    return [x[env] for env in environments if env in ours and env in theirs for x in (ours, theirs)]


def improvement(a: Name, b: Name, environments: Iterable[str], folders: Folders) -> str:
    """Probability of improvement of A over B with its interval; a dash for B or few seeds."""
    strata = pairs(a, b, environments, folders)
    ends = statistics.interval(strata, statistics.improvement) if strata else None
    if a == b or ends is None:  # of runs that are compared one by one it would be 0 or 1
        return "–"
    return with_interval(statistics.improvement(*strata), ends, "{:.2f}".format)


def estimates(strata: dict[str, list[np.ndarray]], statistic: Callable) -> dict[str, Estimate]:
    """A statistic of the strata of each variant that has any, and its interval."""
    return {
        name: (float(statistic(*x)), statistics.interval(x, statistic))
        for name, x in strata.items()
        if x
    }


SCORE_CELLS = ("seeds", "last 100 episodes", "IQM", "95 % interval", "whole run", "hours per run")


def score_cells(results: list[Result]) -> tuple[str, ...]:
    """The cells of SCORE_CELLS for the runs of one environment."""
    scores, hours = facts(results, "score"), facts(results, "hours")
    return (
        count(results),
        *centers(scores),
        plus_minus(facts(results, "mean_return")),
        f"{np.median(hours):.2f}" if len(hours) else "–",
    )


def centers(scores: np.ndarray) -> tuple[str, str, str]:
    """Mean ± spread, interquartile mean and its interval."""
    ends = statistics.interval([scores], statistics.interquartile_mean)
    middle = number(statistics.interquartile_mean(scores)) if len(scores) else "–"
    return plus_minus(scores), middle, brackets(ends)


def scores_table(suite: str, folders: Folders) -> str:
    """Our scores beside the published ones; of several variants, beside the baseline's."""
    if list(SUITES[suite].variants) != [""]:
        return variants_table(suite, folders)
    found = by_environment(suite, "", folders)
    columns = {row["column"]: row["source"] for row in reference("columns")}
    known = {x: y for x, y in columns.items() if any(published(env, y) != "–" for env in found)}
    rows = []
    for environment, results in found.items():
        *scores, hours = score_cells(results)
        others = (published(environment, source) for source in known.values())
        rows.append((environment, *scores, *others, hours))
    return markdown(("environment", *SCORE_CELLS[:-1], *known, SCORE_CELLS[-1]), rows)


def variants_table(suite: str, folders: Folders) -> str:
    """Scores of each variant (rows) in each environment (columns), and against the baseline."""
    names, baseline = labels(suite), SUITES[suite].baseline
    environments = list(SUITES[suite].environments)
    rows = []
    for name, label in names.items():
        rows.append([label or "ours", *scores_row(name, environments, folders)])
        if baseline:
            rows[-1].append(improvement(name, baseline, environments, folders))
    against = [f"P(better than {names[baseline]})"] if baseline else []
    return markdown(("mean ± std (seeds)", *environments, *against), rows)


def editions_table(suite: str, folders: Folders) -> str:
    """The same runs made by both editions of a script, environment by environment."""
    rows = []
    for environment in SUITES[suite].environments:
        for name, label in labels(suite).items():
            if results := by_environment(*name, folders).get(environment):
                better = improvement(name, SUITES[suite].baseline, [environment], folders)
                rows.append((environment, label, *score_cells(results), better))
    return markdown(("environment", "scripts", *SCORE_CELLS, "P(better than first)"), rows)


def compare(a: str, b: str, folders: Folders) -> str:
    """Two variants, each `suite` or `suite/variant`, environment by environment and over all."""
    names = variant_named(a), variant_named(b)
    ours, theirs = (by_environment(*name, folders) for name in names)
    shared = [env for env in ours if env in theirs]
    if not shared:
        raise BenchmarkError(f"{a} and {b} have no results in a common environment.")
    rows = [
        (env, *(scores_cell(x[env]) for x in (ours, theirs)), improvement(*names, [env], folders))
        for env in shared
    ]
    rows.append(("all", "", "", improvement(*names, shared, folders)))
    return markdown(("mean ± std (seeds)", a, b, f"P({a} better)"), rows)


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
    rows = [(*key, len(own), *centers(np.array(own))) for key, own in scores.items()]
    return markdown(("script", "environment", *SCORE_CELLS[:4]), rows)


# --- Normalized scores: the paper's Table 1 ---


def normalized_scores(suite: str, folders: Folders) -> dict[str, list[np.ndarray]]:
    """Normalized scores of each setting's runs, by environment (paper, section 6.1).

    Per environment the random policy gives 0 and the best run of all settings 1. Only environments
    that every setting has, since the best run is not known before.
    """
    names = SUITES[suite].variants
    found = {name: scores_by_environment((suite, name), folders) for name in names}
    shared = [env for env in SUITES[suite].environments if all(env in x for x in found.values())]
    low = {env: random_returns(env) for env in shared}
    high = {env: max(max(x[env]) for x in found.values()) for env in shared}
    return {
        name: [(x[env] - low[env]) / (high[env] - low[env]) for env in shared]
        for name, x in found.items()
    }


def normalized_table(suite: str, folders: Folders) -> str:
    """Average normalized score of each setting beside that of the paper, and its raw returns."""
    strata = normalized_scores(suite, folders)
    average = estimates(strata, statistics.mean_of_strata)
    begun = {env for env, *_ in done(suite, folders)}
    environments = [env for env in SUITES[suite].environments if env in begun]
    rows = []
    for name, paper in zip(strata, reference("table1"), strict=True):
        score = with_interval(*average[name], "{:.2f}".format) if name in average else "–"
        runs = f"{sum(map(len, strata[name]))} in {len(strata[name])}"
        returns = scores_row((suite, name), environments, folders)
        rows.append((SUITES[suite].variants[name].label, paper["score"], score, runs, *returns))
    header = ("average normalized score", "paper, 21 in 7", "ours", "runs in environments")
    return markdown((*header, *environments), rows)


# --- Effects of details ---


def shared_environments(suite: str, folders: Folders) -> list[str]:
    """Environments that the baseline and every variant with any result have."""
    found = [scores_by_environment((suite, name), folders) for name in SUITES[suite].variants]
    found = [*filter(None, found), scores_by_environment(SUITES[suite].baseline, folders)]
    return [env for env in SUITES[suite].environments if all(env in x for x in found)]


def effect_strata(suite: str, folders: Folders) -> dict[str, list[np.ndarray]]:
    """Scores of each variant and of the baseline in turns, of the shared environments."""
    shared, baseline = shared_environments(suite, folders), SUITES[suite].baseline
    found = {x: pairs((suite, x), baseline, shared, folders) for x in SUITES[suite].variants}
    return {name: strata for name, strata in found.items() if strata}


def effects(suite: str, folders: Folders) -> dict[str, Estimate]:
    """Effect of each variant on the mean score relative to the baseline's, and its interval."""
    return estimates(effect_strata(suite, folders), statistics.relative_effect)


def chance(suite: str, folders: Folders) -> str:
    """What effects of single runs are to be held against; empty where there is no such effect."""
    strata = effect_strata(suite, folders)
    if not strata or all(len(x) > 1 for rows in strata.values() for x in rows[::2]):
        return ""
    usual = next(iter(strata.values()))[1::2]
    if any(len(x) < 2 for x in usual):
        return "\nThe effect of a single run against a single run says nothing.\n"
    # Of one run against the mean of n others, in units of that mean; an effect averages over
    # environments, whose runs are independent.
    spreads = [np.std(x, ddof=1) / abs(np.mean(x)) * np.sqrt(1 + 1 / len(x)) for x in usual]
    return (
        "\nThe effect of a single run says little: by chance alone, one more run of the default "
        f"would show one of about ± {np.linalg.norm(spreads) / len(spreads):.0%} "
        "(one standard deviation).\n"
    )


def published_effects(environments: list[str]) -> dict[str, dict[str, float]]:
    """By source and variant: the relative change that others found in these environments."""
    names = [env.partition("-")[0] for env in environments]
    found: dict[str, dict[str, float]] = {}
    for variant, (source, score, column, changed, usual, choice) in PUBLISHED_EFFECTS.items():
        rows = [x for x in reference(source) if choice in (None, x.get("choice"))]
        rows = [x | {"environment": x["environment"].partition("-")[0]} for x in rows]
        table = pd.DataFrame(rows).pivot(index="environment", columns=column, values=score)
        table = table.astype(float).reindex(names).dropna(subset=[changed])
        if len(table):
            mean = float((table[changed] / table[usual] - 1).mean())
            found.setdefault(source, {})[variant] = mean
    return found


def effects_table(suite: str, folders: Folders) -> str:
    """Scores and effect of switching off one detail at a time, beside what others found."""
    environments = list(SUITES[suite].environments)
    others = {row["variant"]: row["finding"] for row in reference("findings")}
    effect = effects(suite, folders)
    rows = []
    for key, label in labels(suite).items():
        cells, name = scores_row(key, environments, folders), key[1]
        change = with_interval(*effect[name], "{:+.0%}".format) if name in effect else "–"
        rows.append((label, *cells, change, others.get(name, "")))
    header = ("detail and change", *environments, "effect", "elsewhere")
    return markdown(header, rows) + chance(suite, folders)


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
    """Every model of the RLHF runs over seeds, and per seed what the runs are judged by."""
    (variant,) = SUITES[suite].variants
    results = [x for found in by_environment(suite, variant, folders).values() for x in found]
    tables = [pd.DataFrame(x.record["models"]).T[[*MODEL_COLUMNS.values()]] for x in results]
    over_seeds = []
    for model, own in pd.concat(tables).groupby(level=0, sort=False):
        spreads = [f" ± {x:.2f}" if len(own) > 1 else "" for x in own.std(ddof=0)]
        over_seeds.append((model, *(f"{x:.2f}{y}" for x, y in zip(own.mean(), spreads))))
    per_seed = []
    for result in results:
        record = result.record
        quality, models = record["reward_model"], record["models"]
        judged, free = models[record["judged"]], models["ppo-none"]
        updates = result.curve[result.curve["stage"] == record["judged"]]
        cells = (
            *(f"{quality[x]:.3f}" for x in ("accuracy", "correlation")),
            *(f"{judged[f'objective/{x}']:.2f}" for x in ("gold", "proxy")),
            *(f"{judged[f'text/{x}']:.3f}" for x in ("stop_rate", "unique")),
            f"{updates['kl'].tail(20).mean():.2f} ({record['settings']['target_kl']:g})",
            f"{updates['kl'].iloc[0]:.0e}",
            *(f"{free[f'objective/{x}']:.2f}" for x in ("gold", "proxy", "kl")),
            f"{models['best-of-16']['objective/gold']:.2f}",
            f"{record['seconds'] / 60:.1f}" if record["seconds"] else "–",
            f"{updates['tokens_per_second'].median():.0f}",
            record["peak_mib"] or "–",
        )
        per_seed.append((record["seed"], *cells))
    header = (
        *("seed", "RM accuracy", "RM correlation", "adaptive: gold", "proxy", "stop rate"),
        *("unique", "KL of the last 20 updates (target)", "KL at update 1", "β = 0: gold"),
        *("proxy", "KL", "best of 16: gold", "minutes", "tokens/s in updates", "memory, MiB"),
    )
    first = markdown(("mean ± std over seeds", *MODEL_COLUMNS), over_seeds)
    return f"{first}\n{markdown(header, per_seed)}"


# --- Whole suites ---


def what_is_missing(suite: str, folders: Folders) -> str:
    """How far an incomplete suite is, and the command that continues it; empty if complete."""
    made, total = how_complete(suite, folders)
    records, missing = done(suite, folders), total - made
    if not missing:
        return ""
    begun = {(env, seed) for env, _, seed in records}
    names = [env for env in SUITES[suite].environments if any(env in x for x in begun)]
    single = names and len(begun) == len(names)
    pilot = f"This is a pilot of one seed in {' and '.join(names)}. " if single else ""
    hours = [x["hours"] for x in records.values() if x["hours"]]
    cost = f", about {np.median(hours) * missing:.0f} h of one core" if hours else ""
    return (
        f"\n{pilot}Missing: {missing} of {total} runs{cost}. To continue: "
        f"`python -m benchmark run {suite}`.\n"
    )


TABLES: dict[str, Callable[[str, Folders], str]] = {
    "scores": scores_table,
    "normalized": normalized_table,
    "effects": effects_table,
    "editions": editions_table,
    "models": models_table,
    "rivals": lambda suite, folders: markdown(*over_seeds(suite, folders)),
}


def suite_table(suite: str, folders: Folders) -> str:
    """Everything about a suite: scores, comparisons with its baseline, what is missing."""
    table = TABLES[SUITES[suite].table](suite, folders) if done(suite, folders) else ""
    return table + what_is_missing(suite, folders)


def suites_table(folders: Folders) -> str:
    """All suites and how complete they are."""
    rows = [
        (f"`{name}`", "{} of {}".format(*how_complete(name, folders)), suite.reproduces)
        for name, suite in SUITES.items()
        if name != "smoke"
    ]
    return markdown(("suite", "runs done", "what it reproduces"), rows)
