"""Tables of suites, in Markdown, from committed results and published numbers."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import statistics
from benchmark.definitions import Folders, Suite
from benchmark.provenance import BenchmarkError
from benchmark.record import LAST_EPISODES, read_checkpoint
from benchmark.results import by_environment, how_complete, random_returns, reference
from benchmark.statistics import Estimate, estimate

NUMERIC = re.compile(r"(?:[-+≈ ]*\d.*|–)?")
Name = tuple[str, str]  # suite and variant
Scores = dict[str, np.ndarray]  # by environment
RETURNS_REACHED = (1000, 2000, 4000)
FIGURE3 = "paper, Figure 3"
# Columns of published numbers, by their sources in `reference/scores.csv`.
SOURCES = {
    f"{FIGURE3}: PPO (clip)": "paper, Fig. 3 (v1, read off)",
    "baselines ppo2, benchmark page": "ppo2 (v2, 6 seeds)",
    "baselines ppo2, runs of openrlbenchmark": "ppo2 (v2, 3 seeds)",
    "baselines ppo2, runs of Huang et al.": "ppo2 (Huang et al., 3 seeds)",
    "CleanRL pr-424": "CleanRL (3 seeds)",
    "CleanRL v1.0.0-12": "CleanRL, earlier (3 seeds)",
    "Spinning Up, PyTorch": "Spinning Up (v3, 10 seeds)",
}


# --- Cells ---


def markdown(rows: Sequence[dict[str, object]]) -> str:
    """A table of rows, which are cells by column; a dash where a row lacks one.

    Columns whose cells all begin with a number (or are empty) are right-aligned.
    """
    table = (
        pd.DataFrame(rows, dtype=object).fillna("–").astype(str).replace(r"\|", r"\|", regex=True)
    )
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


def facts(results: Iterable, name: str) -> np.ndarray:
    """A fact of each result that has it."""
    return np.array([x.record[name] for x in results if x.record.get(name) is not None])


def score_cells(scores: np.ndarray) -> dict[str, str]:
    """Cells about the scores of runs."""
    middle = estimate([scores], statistics.interquartile_mean) if len(scores) else None
    return {
        "seeds": str(len(scores)),
        "last 100 episodes": plus_minus(scores),
        "IQM [95 %]": with_interval(middle),
    }


def publications(environment: str, steps: int, source: str) -> pd.DataFrame:
    """A published result after as many steps, or several people's readings of it."""
    rows, name = reference("scores"), environment.partition("-")[0]
    rows = rows[(rows["environment"] == name) & (rows["steps"] == steps)]
    return rows[rows["source"].str.split(", read by").str[0] == source]


def missing(suite: Suite, folders: Folders) -> str:
    """A line on how many runs are done, unless all are."""
    made, total = how_complete(suite, folders)
    return f"\n{made} of {total} runs are done.\n" if made < total else ""


def published(environment: str, steps: int, source: str) -> str | None:
    """Mean ± spread of a published result after as many steps, or the range of its readings."""
    rows = publications(environment, steps, source)
    if rows.empty:
        return None
    about = "≈ " if rows["how_seen"].iloc[0] == "read off the plot" else ""
    if len(rows) > 1:
        return f"{about}{number(rows['mean'].min())} to {number(rows['mean'].max())}"
    return about + number(rows["mean"].item(), *rows["spread"].dropna().astype(float))


# --- Scores by environment ---


def scores_of(name: Name, folders: Folders) -> Scores:
    """Scores of a variant, in environments in which it has any."""
    found = {env: facts(x, "score") for env, x in by_environment(*name, folders).items()}
    return {env: scores for env, scores in found.items() if len(scores)}


def scores_table(suite: Suite, folders: Folders) -> str:
    """Scores of a suite's only variant beside the published ones."""
    rows, found = [], by_environment(suite.name, "", folders)
    for environment in filter(found.get, suite.environments):
        results, steps = found[environment], suite.total_timesteps
        others = {y: published(environment, steps, x) for x, y in SOURCES.items()}
        rows.append(
            {"environment": environment}
            | score_cells(facts(results, "score"))
            | {"whole run": plus_minus(facts(results, "mean_return"))}
            | {"hours per run": f"{np.median(facts(results, 'hours')):.2f}"}
            | {column: cell for column, cell in others.items() if cell}
        )
    return markdown(rows)


def summary(paths: Iterable[Path]) -> str:
    """Scores of anybody's runs, given by their folders, by environment."""
    runs = []
    for path in paths:
        saved = read_checkpoint(path / "checkpoint.pt")
        returns = [x["return"] for x in saved.get("episodes", [])[-LAST_EPISODES:]]
        if not returns:
            raise BenchmarkError(f"No episode has ended in {path}.")
        runs.append((saved["args"]["env_id"], np.mean(returns)))
    table = pd.DataFrame(runs, columns=["environment", "score"])
    return markdown(
        [
            {"environment": env} | score_cells(own.to_numpy())
            for env, own in table.groupby("environment")["score"]
        ]
    )


# --- Variants side by side ---


def labels(suite: Suite) -> dict[Name, str]:
    """Names in tables and figures by suite and variant, first that of a baseline elsewhere."""
    names = {(suite.name, name): x.title or "ours" for name, x in suite.variants.items()}
    known = suite.baseline in (None, *names)
    return names if known else {suite.baseline: suite.baseline_label} | names


def in_turns(ours: Scores, theirs: Scores, environments: Iterable[str]) -> list[np.ndarray]:
    """Scores of A and B in turns, for each of the environments that both have."""
    shared = [env for env in environments if env in ours and env in theirs]
    return [scores[env] for env in shared for scores in (ours, theirs)]


def comparable(suite: Suite, folders: Folders) -> tuple[dict[Name, Scores], list[str]]:
    """Scores of a suite's variants that have any, and the environments that all of these have.

    Both are empty while a baseline has no score in an environment of all.
    """
    scores = {name: scores_of(name, folders) for name in labels(suite)}
    scores = {name: x for name, x in scores.items() if x}
    shared = [env for env in suite.environments if all(env in x for x in scores.values())]
    return (scores, shared) if suite.baseline in (None, *scores) and shared else ({}, [])


def against_baseline(suite: Suite, folders: Folders) -> tuple[dict[Name, list], list[str]]:
    """Scores of each variant in turns with those of the baseline, and their environments."""
    scores, shared = comparable(suite, folders)
    usual = scores.pop(suite.baseline, {})
    return {name: in_turns(x, usual, shared) for name, x in scores.items()}, shared


def normalized(suite: Suite, folders: Folders) -> tuple[dict[Name, list], list[str]]:
    """Scores of each variant on a scale from random actions to the best run (paper, 6.1)."""
    scores, shared = comparable(suite, folders)
    found: dict[Name, list] = {name: [] for name in scores}
    for environment in shared:
        low = random_returns(environment)
        high = max(max(x[environment]) for x in scores.values())
        for name, x in scores.items():
            found[name].append((x[environment] - low) / (high - low))
    return found, shared


def estimates(strata: dict[Name, list], statistic: Callable) -> dict[Name, Estimate]:
    """A statistic of each variant."""
    return {name: estimate(x, statistic) for name, x in strata.items()}


def side_by_side(
    names: dict[Name, str],
    environments: Iterable[str],
    folders: Folders,
    columns: dict[str, Callable[[Name], str]],
) -> str:
    """A row of scores in each environment for each variant with its label, then more columns."""
    rows = []
    for name, label in names.items():
        found = scores_of(name, folders)
        scores = {env: f"{plus_minus(found[env])} ({len(found[env])})" for env in found}
        row = {env: scores.get(env, "–") for env in environments}
        more = {column: cell(name) for column, cell in columns.items()}
        rows.append({"mean ± std (seeds)": label} | row | more)
    return markdown(rows)


def beside(
    names: dict[Name, str], baseline: Name, environments: Iterable[str], folders: Folders
) -> str:
    """Scores of variants, and how probably each is better than the baseline."""
    usual = scores_of(baseline, folders)

    def better(name: Name) -> str:
        return "–" if name == baseline else chance(scores_of(name, folders), usual, environments)

    column = f"P(better than {names[baseline]})"
    return side_by_side(names, environments, folders, {column: better})


def variants_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, and how probably it is better than the baseline."""
    return beside(labels(suite), suite.baseline, suite.environments, folders)


def compare(a: Name, b: Name, environments: Iterable[str], folders: Folders) -> str:
    """Two variants in those of the environments that both have."""
    found = [scores_of(name, folders) for name in (a, b)]
    shared = [env for env in environments if all(env in x for x in found)]
    texts = {name: "/".join(filter(None, name)) for name in (a, b)}
    if not shared:
        raise BenchmarkError(f"{texts[a]} and {texts[b]} have no results in a common environment.")
    return beside(texts, b, shared, folders)


def effects(suite: Suite, folders: Folders) -> dict[Name, Estimate]:
    """What each variant changes against the baseline, the median over environments."""
    return estimates(against_baseline(suite, folders)[0], statistics.relative_effect)


def effects_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, what they amount to beside the baseline, and what others found."""
    found, others = effects(suite, folders), reference("elsewhere").set_index("variant")["found"]
    columns = {
        "effect": lambda name: with_interval(found.get(name), "{:+z.0%}".format),
        "elsewhere": lambda name: others.get(name[1], ""),
    }
    return side_by_side(labels(suite), suite.environments, folders, columns)


def paper_scores() -> dict[str, float]:
    """Average normalized score of each variant in the paper's Table 1."""
    return reference("table1").set_index("variant")["score"].to_dict()


def normalized_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, their average on the paper's scale, and the paper's if it has one."""
    (strata, _), paper = normalized(suite, folders), paper_scores()
    found, form = estimates(strata, statistics.mean_of_strata), "{:.2f}".format
    columns = {"average normalized score": lambda name: with_interval(found.get(name), form)}
    if [*suite.variants] == [*paper]:
        columns["paper, 21 runs in 7"] = lambda name: form(paper[name[1]])
    text = side_by_side(labels(suite), suite.environments, folders, columns)
    return text + (agreement(strata) if [x for _, x in found] == [*paper] else "")


def agreement(strata: dict[Name, list]) -> str:
    """How the order of normalized scores agrees with that of the paper's Table 1.

    Once also without the first row, neither clipping nor penalty: anybody's would come last.
    """
    paper, texts = paper_scores(), []
    for names in (list(strata), list(strata)[1:]):
        order = statistics.rank_correlation([paper[variant] for _, variant in names])
        found = estimate([x for name in names for x in strata[name]], order)
        texts.append(with_interval(found, "{:.2f}".format))
    whole, rest = texts
    return f"\nRank correlation of the two columns: {whole}; without the first row: {rest}.\n"


def chance(ours: Scores, theirs: Scores, environments: Iterable[str]) -> str:
    """Probability that A is better than B, over those of the environments that both have.

    A dash for few runs, of which it would often be 0 or 1.
    """
    strata = in_turns(ours, theirs, environments)
    found = estimate(strata, statistics.improvement) if strata else None
    return with_interval(found if found and found.ends else None, "{:.2f}".format)


# --- Rivals ---


def readings(suite: Suite, environment: str) -> dict[str, float]:
    """What others read off the paper's Figure 3, by label of the variants that they read."""
    found = {}
    for variant in suite.variants.values():
        rows = publications(environment, suite.total_timesteps, f"{FIGURE3}: {variant.label}")
        found[variant.label] = float(number(rows["mean"].mean()))
    return {label: mean for label, mean in found.items() if not np.isnan(mean)}


def order(scores: dict[str, float]) -> str:
    """Names by their scores, best first."""
    names = sorted(scores, key=scores.get, reverse=True)
    signs = [" = " if scores[a] == scores[b] else " > " for a, b in pairwise(names)]
    return "".join(f"{name}{sign}" for name, sign in zip(names, [*signs, ""]))


def rivals_table(suite: Suite, folders: Folders) -> str:
    """Variants beside the paper's, how probably the first is better than others, and the orders."""
    scores = {label: scores_of(name, folders) for name, label in labels(suite).items()}
    shared, means, rows = suite.shared, {}, []
    paper = {environment: readings(suite, environment) for environment in shared}
    for environment in shared:
        own = {label: x[environment] for label, x in scores.items() if environment in x}
        # As shown: what looks equal shares a place and a rank.
        means[environment] = {label: float(number(np.mean(x))) for label, x in own.items()}
        cells = {x: f"{with_interval(estimate([y], np.mean))} ({len(y)})" for x, y in own.items()}
        rows.append({"mean [95 %] (seeds)": environment} | dict.fromkeys(scores, "–") | cells)
        rows.append({"mean [95 %] (seeds)": "paper, read off"})
        rows[-1] |= {label: f"≈ {number(x)}" for label, x in paper[environment].items()}
    orders = [{"best first": x, "ours": order(means[x]), "paper": order(paper[x])} for x in shared]
    ranks = (pd.DataFrame(x.values()).dropna().rank(axis=1).mean() for x in (means, paper))
    orders.append(dict(zip(orders[0], ["by mean rank", *(order(dict(x)) for x in ranks)])))
    return "\n".join(map(markdown, (rows, wins(scores, shared), orders))) + missing(suite, folders)


def wins(scores: dict[str, Scores], environments: Sequence[str]) -> list[dict[str, str]]:
    """Rows: how probably the first of these is better than each other one."""
    (first, ours), *others = scores.items()
    return [
        {f"P({first} is better than)": name} | {x: chance(ours, y, own) for x, y in others}
        for name, own in [*((x, [x]) for x in environments), ("all", environments)]
    ]


def mean_policies_table(suite: Suite, folders: Folders) -> str:
    """Scores in training, returns of the mean actions afterwards, and by these who is better."""
    trained = {label: scores_of(name, folders) for name, label in labels(suite).items()}
    played = {
        label: {
            environment: np.array([np.mean(x.record["walk"]["returns"]) for x in results])
            for environment, results in by_environment(*name, folders).items()
        }
        for name, label in labels(suite).items()
    }
    rows = []
    for environment in suite.environments:
        for title, scores in ((f"{environment}, in training", trained), ("mean policy", played)):
            own = {label: x[environment] for label, x in scores.items() if environment in x}
            row = {x: f"{with_interval(estimate([y], np.mean))} ({len(y)})" for x, y in own.items()}
            rows.append({"mean [95 %] (seeds)": title} | dict.fromkeys(scores, "–") | row)
    chances = wins(played, [*suite.environments])
    return f"{markdown(rows)}\n{markdown(chances)}{missing(suite, folders)}"


# --- Games ---


def ppo2_return(environment: str, step: int) -> float:
    """What the curve of baselines' benchmark page shows at a step."""
    rows = reference("ppo2_curves").query("environment == @environment")
    return float(np.interp(step, rows["global_step"], rows["return"]))


def games_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant in each game, also as shares of the way from random to human play."""
    rows, variants = [], {y: by_environment(*x, folders) for x, y in labels(suite).items()}
    play = reference("atari").set_index("game")
    for game, (random, human) in play.loc[[*suite.environments]].iterrows():
        for label, results in ((x, y[game]) for x, y in variants.items() if game in y):
            scores = facts(results, "score")
            rows.append(
                {
                    **{"game": game, "agent": label, "seeds": len(scores)},
                    "last 100 episodes": plus_minus(scores),
                    "human": f"{(np.mean(scores) - random) / (human - random):.0%}",
                    "whole run": plus_minus(facts(results, "mean_return")),
                    "hours per run": f"{np.median(facts(results, 'hours')):.2f}",
                    "ppo2 by then": number(ppo2_return(game, suite.total_timesteps)),
                    **{"random play": number(random), "human play": number(human)},
                }
            )
    return markdown(rows) + missing(suite, folders)


# --- Walking ---


def walking_table(suite: Suite, folders: Folders) -> str:
    """A row per run: when it reached returns, how it ended, and how its mean action walks."""
    rows = []
    found = {label: by_environment(*name, folders) for name, label in labels(suite).items()}
    runs = (
        (environment, label, result)
        for environment in suite.environments
        for label, results in found.items()
        for result in results.get(environment, [])
    )
    for environment, label, result in runs:
        steps, returns = result.column("return")
        walk = {key: np.array(x) for key, x in result.record["walk"].items()}
        speed = estimate([walk["speeds"]], statistics.mean_of_strata)
        first = {x: steps[returns >= x][:1] / 1e6 for x in RETURNS_REACHED}
        rows.append(
            {
                **{"environment": environment, "settings": label, "seed": result.record["seed"]},
                **{f"M steps to {x}": f"{y[0]:.2f}" if len(y) else "–" for x, y in first.items()},
                "last 100 episodes": number(result.record["score"]),
                "mean action": plus_minus(walk["returns"]),
                "its length": number(np.mean(walk["lengths"])),
                "its speed, m/s": with_interval(speed, "{:.2f}".format),
            }
        )
    return markdown(rows)
