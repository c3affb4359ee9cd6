"""Tables, written between markers into README.md and benchmark/README.md.

A block begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; everything between is
rewritten from committed results, everything else is left alone.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmark import statistics, throughput
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.results import (
    Result,
    by_environment,
    load,
    missing,
    random_returns,
    reference,
    variant_named,
)
from benchmark.runs import Folders, select
from benchmark.suites import SUITES
from benchmark.tables import markdown

PAGES = (ROOT / "benchmark" / "README.md", ROOT / "README.md")
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Columns of published numbers, by the name of their source in reference/scores.csv.
PUBLISHED = {
    "paper, Fig. 3 (v1, read off)": "paper, Figure 3",
    "ppo2 (v2, 6 seeds)": "baselines ppo2, benchmark page",
    "ppo2 (v2, 3 seeds)": "baselines ppo2, runs of openrlbenchmark",
    "ppo2 (Huang et al., 3 seeds)": "baselines ppo2, runs of Huang et al.",
    "paper, Table 6 (10M steps)": "paper, Table 6",
    "ppo2 (10M steps)": "baselines ppo2, Atari page",
    "CleanRL (3 seeds)": "CleanRL pr-424",
    "CleanRL, earlier (3 seeds)": "CleanRL v1.0.0-12",
    "Spinning Up (v3, 10 seeds)": "Spinning Up, PyTorch",
}
# Changes of one detail that others have measured: file, column of the choice, and its two values.
PUBLISHED_EFFECTS = {
    "raw-advantages": ("andrychowicz2021", "setting", "off", "on", "C67"),
    "shared-network": ("andrychowicz2021", "setting", "shared", "separate", "C47"),
    "no-clip": ("engstrom2020", "algorithm", "PPO-NoClip", "PPO", None),
}


def number(value: float, digits: int | None = None) -> str:
    """A number with one decimal, or with none where that would be a fourth digit."""
    return f"{value:.{digits if digits is not None else int(abs(value) < 100)}f}"


def with_spread(mean: float, spread: float | None) -> str:
    """Mean ± spread, to the same decimals."""
    digits = int(abs(mean) < 100)
    return number(mean) + (f" ± {number(spread, digits)}" if spread is not None else "")


def plus_minus(scores: np.ndarray) -> str:
    """Mean ± population standard deviation over seeds (as CleanRL's tables)."""
    return with_spread(np.mean(scores), np.std(scores) if len(scores) > 1 else None)


def brackets(ends: tuple[float, float] | None, form: Callable[[float], str] = number) -> str:
    """An interval, or a dash where there is none."""
    return f"[{form(ends[0])}, {form(ends[1])}]" if ends else "–"


def with_interval(
    value: float, ends: tuple[float, float] | None, form: Callable[[float], str]
) -> str:
    """A value, and its interval if there is one."""
    return form(value) + (f" {brackets(ends, form)}" if ends else "")


def finals(results: list[Result]) -> np.ndarray:
    """Score of each seed: mean return of its last 100 episodes."""
    return np.array([x.final for x in results])


def scores_cell(results: list[Result]) -> str:
    """Mean ± spread of the scores and the number of seeds, or a dash where there are none."""
    return f"{plus_minus(finals(results))} ({len(results)})" if results else "–"


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
    spread = float(rows[0]["spread"]) if rows[0]["spread"] else None
    return about + with_spread(means[0], spread)


def what_is_missing(suite: str, folders: Folders) -> str:
    """How far an incomplete suite is, and the command that continues it; empty if complete."""
    count, total = missing(suite, folders), len(select(suite, folders))
    if not count:
        return ""
    results = load(suite, folders)
    seeds = {env: set() for env in SUITES[suite].environments}
    for result in results:
        seeds[result.record["environment"]].add(result.record["seed"])
    begun = [env for env in seeds if seeds[env]]
    pilot = ""
    if begun and all(len(seeds[env]) == 1 for env in begun):
        pilot = f"This is a pilot of one seed in {' and '.join(begun)}. "
    hours = [x.hours for x in results if x.hours]
    cost = f", about {np.median(hours) * count:.0f} h of one core" if hours else ""
    return (
        f"\n{pilot}Missing: {count} of {total} runs{cost}. To continue: "
        f"`python -m benchmark run {suite}`.\n"
    )


def scores_table(suite: str, folders: Folders) -> str:
    """Our scores beside the published ones, of a suite with one variant."""
    found = by_environment(suite, "", folders)
    sources = {
        name: source
        for name, source in PUBLISHED.items()
        if any(published(environment, source) != "–" for environment in found)
    }
    rows = []
    for environment, results in found.items():
        *scores, hours = score_cells(results)
        others = (published(environment, source) for source in sources.values())
        rows.append((environment, *scores, *others, hours))
    *header, hours = SCORE_CELLS
    return markdown(("environment", *header, *sources, hours), rows)


SCORE_CELLS = ("seeds", "last 100 episodes", "IQM", "95 % interval", "whole run", "hours per run")


def score_cells(results: list[Result]) -> tuple[str, ...]:
    """The cells of SCORE_CELLS for the runs of one environment."""
    scores = finals(results)
    return (
        str(len(results)),
        plus_minus(scores),
        number(statistics.interquartile_mean(scores)),
        brackets(statistics.interval([scores], statistics.interquartile_mean)),
        plus_minus(np.array([x.whole for x in results])),
        f"{np.median([x.hours for x in results]):.2f}",
    )


def editions_table(suite: str, folders: Folders) -> str:
    """The same runs made by both editions of a script, environment by environment."""
    rows = []
    for environment in SUITES[suite].environments:
        for name, label in labels(suite).items():
            results = by_environment(*name, folders).get(environment, [])
            if results:
                better = improvement_cell(name, SUITES[suite].baseline, [environment], folders)
                rows.append((environment, label, *score_cells(results), better))
    return markdown(("environment", "scripts", *SCORE_CELLS, "P(better than first)"), rows)


def suite_block(suite: str, folders: Folders) -> str:
    """Everything about a suite: scores, comparisons with its baseline, what is missing."""
    variants = SUITES[suite].variants
    text = ""
    if any(by_environment(suite, name, folders) for name in variants):
        usual = scores_table if list(variants) == [""] else variants_table
        text = TABLES.get(suite, usual)(suite, folders)
    return text + what_is_missing(suite, folders)


def labels(suite: str) -> dict[tuple[str, str], str]:
    """Names in tables and figures by suite and variant, first that of a baseline elsewhere."""
    baseline = SUITES[suite].baseline
    names = {(suite, name): variant.label for name, variant in SUITES[suite].variants.items()}
    if baseline and baseline not in names:
        names = {baseline: SUITES[suite].baseline_label, **names}
    return names


def variants_table(suite: str, folders: Folders) -> str:
    """Scores of each variant (rows) in each environment (columns), beside the baseline's."""
    names, baseline = labels(suite), SUITES[suite].baseline
    environments = list(SUITES[suite].environments)
    rows = []
    for (owner, variant), label in names.items():
        found = by_environment(owner, variant, folders)
        cells = [scores_cell(found.get(env, [])) for env in environments]
        compared = improvement_cell((owner, variant), baseline, environments, folders)
        rows.append((label, *cells, compared))
    against = names[baseline]
    return markdown(("mean ± std (seeds)", *environments, f"P(better than {against})"), rows)


def improvement_cell(
    a: tuple[str, str], b: tuple[str, str], environments: list[str], folders: Folders
) -> str:
    """Probability of improvement of A over B with its interval; a dash for B or few seeds."""
    strata = paired(a, b, environments, folders)
    ends = statistics.interval(strata, statistics.improvement) if strata else None
    if a == b or ends is None:  # of runs that are compared one by one it would be 0 or 1
        return "–"
    return with_interval(statistics.improvement(*strata), ends, "{:.2f}".format)


def paired(
    a: tuple[str, str], b: tuple[str, str], environments: list[str], folders: Folders
) -> list[np.ndarray]:
    """Scores of A and B in turns, of each environment that both have."""
    ours, theirs = by_environment(*a, folders), by_environment(*b, folders)
    shared = [env for env in environments if env in ours and env in theirs]
    return [finals(x[env]) for env in shared for x in (ours, theirs)]


def normalized_scores(suite: str, folders: Folders) -> dict[str, list[np.ndarray]]:
    """Normalized scores of each setting's runs, by environment, as in the paper's Table 1.

    Per environment the random policy gives 0 and the best run of all settings 1. Only environments
    that every setting has, since the best run is not known before.
    """
    found = {name: by_environment(suite, name, folders) for name in SUITES[suite].variants}
    shared = [env for env in SUITES[suite].environments if all(env in x for x in found.values())]
    best = {env: max(max(finals(results[env])) for results in found.values()) for env in shared}
    return {
        name: [
            statistics.normalized(finals(results[env]), random_returns(env), best[env])
            for env in shared
        ]
        for name, results in found.items()
    }


def normalized_table(suite: str, folders: Folders) -> str:
    """Average normalized score of each setting beside that of the paper, and its raw returns."""
    rows = []
    scores = normalized_scores(suite, folders)
    found = {name: by_environment(suite, name, folders) for name in scores}
    environments = [
        env for env in SUITES[suite].environments if any(env in x for x in found.values())
    ]
    for (name, strata), paper in zip(scores.items(), reference("table1"), strict=True):
        score = "–"
        if strata:
            ends = statistics.interval(strata, statistics.mean_of_strata)
            score = with_interval(statistics.mean_of_strata(*strata), ends, "{:.2f}".format)
        count = f"{sum(map(len, strata))} in {len(strata)}"
        returns = [scores_cell(found[name].get(env, [])) for env in environments]
        label = SUITES[suite].variants[name].label
        rows.append((label, paper["score"], score, count, *returns))
    header = ("average normalized score", "paper, 21 in 7", "ours", "runs in environments")
    return markdown((*header, *environments), rows)


def shared_environments(suite: str, folders: Folders) -> list[str]:
    """Environments that the baseline and every variant with any result have."""
    found = [by_environment(suite, name, folders) for name in SUITES[suite].variants]
    found = [by_environment(*SUITES[suite].baseline, folders), *filter(None, found)]
    return [env for env in SUITES[suite].environments if all(env in x for x in found)]


def effect_strata(suite: str, folders: Folders) -> dict[str, list[np.ndarray]]:
    """Scores of each variant and of the baseline in turns, of the shared environments."""
    shared = shared_environments(suite, folders)
    strata = {
        name: paired((suite, name), SUITES[suite].baseline, shared, folders)
        for name in SUITES[suite].variants
    }
    return {name: x for name, x in strata.items() if x}


def effects(suite: str, folders: Folders) -> dict[str, tuple[float, tuple[float, float] | None]]:
    """Effect of each variant on the mean score relative to the baseline's, and its interval."""
    return {
        name: (
            float(statistics.relative_effect(*strata)),
            statistics.interval(strata, statistics.relative_effect),
        )
        for name, strata in effect_strata(suite, folders).items()
    }


def chance(suite: str, folders: Folders) -> str:
    """What effects of single runs are to be held against; empty where there is no such effect."""
    strata = effect_strata(suite, folders)
    if not strata or all(len(x) > 1 for rows in strata.values() for x in rows[::2]):
        return ""
    usual = next(iter(strata.values()))[1::2]
    # Of one run against the mean of n others, in units of that mean; an effect averages over
    # environments, whose runs are independent.
    spreads = [np.std(x, ddof=1) / abs(np.mean(x)) * np.sqrt(1 + 1 / len(x)) for x in usual]
    return (
        "\nThe effect of a single run says little: by chance alone, one more run of the default "
        f"would show one of about ± {np.linalg.norm(spreads) / len(spreads):.0%} "
        "(one standard deviation).\n"
    )


def published_effects(suite: str, environments: list[str]) -> dict[str, dict[str, float]]:
    """By source and variant: the relative change that others found in these environments."""
    environments = [env.partition("-")[0] for env in environments]
    found: dict[str, dict[str, float]] = {}
    for variant, (source, column, changed, usual, choice) in PUBLISHED_EFFECTS.items():
        scores = {
            (row["environment"].partition("-")[0], row[column]): float(
                row.get("mean") or row["p95_score"]
            )
            for row in reference(source)
            if choice in (None, row.get("choice"))
        }
        changes = [
            scores[env, changed] / scores[env, usual] - 1
            for env in environments
            if (env, changed) in scores
        ]
        if changes:
            found.setdefault(source, {})[variant] = float(np.mean(changes))
    return found


def effects_table(suite: str, folders: Folders) -> str:
    """Scores and effect of switching off one detail at a time, beside what others found."""
    environments = list(SUITES[suite].environments)
    others = {row["variant"]: row["finding"] for row in reference("details")}
    effect = effects(suite, folders)
    rows = []
    for (owner, name), label in labels(suite).items():
        found = by_environment(owner, name, folders)
        cells = [scores_cell(found.get(env, [])) for env in environments]
        change = with_interval(*effect[name], "{:+.0%}".format) if name in effect else "–"
        rows.append((label, *cells, change, others.get(name, "")))
    header = ("detail and change", *environments, "effect", "elsewhere")
    return markdown(header, rows) + chance(suite, folders)


MODEL_COLUMNS = {
    "gold": "objective/gold",
    "proxy": "objective/proxy",
    "KL": "objective/kl",
    "stop rate": "text/stop_rate",
    "unique": "text/unique",
    "repetition": "text/repetition",
    "words": "text/length",
}


def rlhf_table(suite: str, folders: Folders) -> str:
    """Every model of the RLHF runs over seeds, and per seed what the runs are judged by."""
    (variant,) = SUITES[suite].variants
    records = [x for results in by_environment(suite, variant, folders).values() for x in results]
    over_seeds = []
    for model in records[0].record["models"]:
        values = [x.record["models"][model] for x in records]
        cells = [two_digits([x[key] for x in values]) for key in MODEL_COLUMNS.values()]
        over_seeds.append((model, *cells))
    per_seed = []
    for result in records:
        record, models = result.record, result.record["models"]
        adaptive = result.adaptive
        own = [row for row in result.curve if row["run"] == adaptive]
        kl = [float(row["objective/kl"]) for row in own]
        rate = [float(row["charts/tokens_per_second_update"]) for row in own]
        per_seed.append(
            (
                record["seed"],
                f"{record['reward_model']['accuracy']:.3f}",
                f"{record['reward_model']['correlation']:.3f}",
                *(f"{models[adaptive][MODEL_COLUMNS[x]]:.2f}" for x in ("gold", "proxy")),
                *(f"{models[adaptive][MODEL_COLUMNS[x]]:.3f}" for x in ("stop rate", "unique")),
                f"{np.mean(kl[-20:]):.2f} ({record['settings']['target_kl']:g})",
                f"{kl[0]:.0e}",
                *(f"{models['ppo-none'][MODEL_COLUMNS[x]]:.2f}" for x in ("gold", "proxy", "KL")),
                f"{models['best-of-16']['objective/gold']:.2f}",
                f"{record['seconds'] / 60:.1f}" if record["seconds"] else "–",
                f"{np.median(rate):.0f}",
                record.get("peak_mib") or "–",
            )
        )
    header = (
        *("seed", "RM accuracy", "RM correlation", "adaptive: gold", "proxy", "stop rate"),
        *("unique", "KL of the last 20 updates (target)", "KL at update 1", "β = 0: gold"),
        *("proxy", "KL", "best of 16: gold", "minutes", "tokens/s in updates"),
        "memory, MiB",
    )
    return (
        markdown(("mean ± std over seeds", *MODEL_COLUMNS), over_seeds)
        + "\n"
        + markdown(header, per_seed)
    )


def two_digits(values: list[float]) -> str:
    """Mean ± population standard deviation with two decimals."""
    spread = f" ± {np.std(values):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


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
            scores_cell(ours[env]),
            scores_cell(theirs[env]),
            improvement_cell(first, second, [env], folders),
        )
        for env in shared
    ]
    rows.append(("all", "", "", improvement_cell(first, second, shared, folders)))
    return markdown(("mean ± std (seeds)", a, b, f"P({a} better)"), rows)


# Suites whose question is another than which variant scores higher.
TABLES: dict[str, Callable[[str, Folders], str]] = {
    "table1": normalized_table,
    "table1_ppo2": normalized_table,
    "ablation": effects_table,
    **dict.fromkeys((x for x in SUITES if x.startswith("second_edition")), editions_table),
    **dict.fromkeys(("rlhf", "second_edition_rlhf"), rlhf_table),
}


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
    names = [*throughput.CONTESTS]
    # Of the first edition, whose Atari games could run in three ways.
    names.insert(names.index("scaling"), "atari_envs")
    paths = [folders.results / "throughput" / f"{name}.json" for name in names]
    texts = [throughput.contest_report(json.loads(x.read_text())) for x in paths if x.exists()]
    return "\n".join(texts)


# --- The front page ---


@dataclasses.dataclass(frozen=True)
class Script:
    """A row of the table of scripts."""

    file: str
    shows: str
    suite: str = ""
    variant: str = ""
    environment: str = ""
    sources: tuple[str, ...] = ()
    """Published results in reference/scores.csv."""
    contest: str = ""


SCRIPTS = (
    Script(
        "ppo_continuous_action.py",
        "details 1–13 and 23–31",
        "figure3",
        "",
        "HalfCheetah-v4",
        ("CleanRL pr-424", "CleanRL v1.0.0-12"),
        "continuous",
    ),
    Script(
        "ppo_kl_penalty.py",
        "the paper's other objective",
        "kl_vs_clip",
        "adaptive-0.01",
        "Hopper-v4",
        contest="kl_penalty",
    ),
    Script(
        "ppo_atari.py",
        "details 1–22",
        "pong",
        "",
        "Pong",
        ("CleanRL pr-424",),
        "atari",
    ),
    Script(
        "ppo_atari_lstm.py",
        "details 1–22 and 32–36",
        "pong_lstm",
        "lstm",
        "Pong",
        ("CleanRL pr-424, LSTM",),
        "atari_lstm",
    ),
    Script(
        "ppo_multidiscrete.py",
        "detail 37, action masks",
        "cartpole",
        "",
        "CartPole-v1",
        ("CleanRL pr-424",),
        "multidiscrete",
    ),
    Script("ppo_rlhf_toy.py", "RLHF with PPO", "rlhf", "", "reviews"),
)


def scripts_block(folders: Folders) -> str:
    """Every script with its size, score beside a published one, time and speed."""
    rows = []
    for script in SCRIPTS:
        path = ROOT / script.file
        if not path.exists():
            continue
        lines = len(path.read_text().splitlines())
        results = []
        if script.suite:
            found = by_environment(script.suite, script.variant, folders)
            results = found.get(script.environment, [])
        ours, hours = "–", "–"
        if results:
            scores = finals(results)
            ends = statistics.interval([scores], np.mean)
            ours = f"{plus_minus(scores)} {brackets(ends) if ends else ''}".strip()
            known = [x.hours for x in results if x.hours]
            hours = f"{np.median(known):.2f}" if known else "–"
        rows.append(
            (
                f"[{script.file}]({script.file})",
                script.shows,
                lines,
                script.environment or "–",
                ours,
                len(results) or "–",
                "; ".join(published(script.environment, x) for x in script.sources) or "–",
                hours,
                speed_cell(script.contest, folders),
            )
        )
    header = ("script", "shows", "lines", "environment", "our return [95 %]", "seeds")
    return markdown((*header, "CleanRL's", "hours", "speed against its peer"), rows)


def speed_cell(contest: str, folders: Folders) -> str:
    """Ratio to the rate of the peer of a contest, or a dash."""
    path = folders.results / "throughput" / f"{contest}.json"
    if not path.exists():
        return "–"
    measurements = json.loads(path.read_text())["measurements"]
    first, peer = (measurements[i]["contender"] for i in (0, -1))
    ratio = np.median(throughput.ratios(measurements, first, "steps_per_second"))
    return f"{ratio:.1f} × {peer.partition(',')[0]}"


TAG = re.compile(r"# (?:Detail (?P<number>\w+/\d+)|Extra): (?P<name>[^\[(;]+?)(?: [\[(].*)?")


def details_block(folders: Folders) -> str:
    """Number, name and place of every detail, read from the tags in the scripts."""
    places: dict[tuple[str, str], list[str]] = {}
    for script in SCRIPTS:
        path = ROOT / script.file
        for line, text in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
            if tag := TAG.fullmatch(text.strip()):
                link = f"[{script.file}:{line}]({script.file}#L{line})"
                places.setdefault((tag["number"] or "extra", tag["name"]), []).append(link)
    rows = [(number, name, links[0]) for (number, name), links in places.items()]
    rows.sort(key=lambda row: order(row[0]))
    return markdown(("detail", "name", "first place"), rows)


def order(number: str) -> tuple[int, str, int]:
    """Sort key: 1/37 to 37/37, then the series with a letter, then extras without a number."""
    found = re.fullmatch(r"([A-Z]*)(\d+)/\d+", number)
    return (bool(found[1]), found[1], int(found[2])) if found else (2, "", 0)


def block(name: str, folders: Folders) -> str:
    """Text of a generated block.

    Raises:
        BenchmarkError: there is no block of this name.
    """
    blocks: dict[str, Callable[[Folders], str]] = {
        "suites": suites_block,
        "throughput": throughput_block,
        "scripts": scripts_block,
        "details": details_block,
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
    """Rewrite the blocks of all pages that exist; return those that changed.

    Raises:
        BenchmarkError: there is no folder of results, with which all tables would be lost.
    """
    if not folders.results.is_dir():
        raise BenchmarkError(f"There is no folder {folders.results}.")
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
