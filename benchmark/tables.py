"""Tables of suites, in Markdown, from committed results and published numbers."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import statistics
from benchmark.definitions import Folders, Name, Suite
from benchmark.provenance import BenchmarkError
from benchmark.record import LAST_EPISODES, read_checkpoint
from benchmark.results import how_complete, random_returns, reference, runs_of
from benchmark.statistics import Estimate, estimate, matrix

NUMERIC = re.compile(r"(?:[-+≈ ]*\d.*|–)?")
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


def ratio(value: float) -> str:
    """A number near 1."""
    return f"{value:.2f}"


def change(value: float) -> str:
    """A relative change in percent."""
    return f"{value:+z.0%}"


def plus_minus(scores: Iterable[float], digits: int | None = None) -> str:
    """Mean ± population standard deviation over seeds (as CleanRL's tables), or a dash."""
    known = pd.Series(scores, dtype=float).dropna().to_numpy()
    spread = np.std(known) if len(known) > 1 else None
    return number(np.mean(known), spread, digits) if len(known) else "–"


def with_interval(found: Estimate | None, form: Callable[[float], str] = number) -> str:
    """A value and its interval if it has one, or a dash."""
    if found is None:
        return "–"
    ends = f" [{form(found.ends[0])}, {form(found.ends[1])}]" if found.ends else ""
    return form(found.value) + ends


def facts(results: Iterable, name: str) -> np.ndarray:
    """A fact of each result that has it."""
    return np.array([x.record[name] for x in results if x.record.get(name) is not None])


def score_cells(scores: Iterable[float]) -> dict[str, str]:
    """Cells about the scores of runs in one environment."""
    known = pd.Series(scores, dtype=float).dropna()
    middle = estimate(matrix(known), statistics.interquartile_mean) if len(known) else None
    return {
        "seeds": str(len(known)),
        "last 100 episodes": plus_minus(known),
        "IQM [95 %]": with_interval(middle),
    }


def missing(suite: Suite, folders: Folders) -> str:
    """A line on how many runs are done, unless all are."""
    made, total = how_complete(suite, folders)
    return f"\n{made} of {total} runs are done.\n" if made < total else ""


# --- Scores by environment ---


def publications(environment: str, steps: int, source: str) -> pd.DataFrame:
    """A published result after as many steps, or several people's readings of it."""
    rows, name = reference("scores"), environment.partition("-")[0]
    rows = rows[(rows["environment"] == name) & (rows["steps"] == steps)]
    return rows[rows["source"].str.split(", read by").str[0] == source]


def published(environment: str, steps: int, source: str) -> str | None:
    """Mean ± spread of a published result after as many steps, or the range of its readings."""
    rows = publications(environment, steps, source)
    if rows.empty:
        return None
    about = "≈ " if rows["how_seen"].iloc[0] == "read off the plot" else ""
    if len(rows) > 1:
        return f"{about}{number(rows['mean'].min())} to {number(rows['mean'].max())}"
    return about + number(rows["mean"].item(), *rows["spread"].dropna().astype(float))


def scores_table(suite: Suite, folders: Folders) -> str:
    """Scores of a suite's unnamed variant beside the published ones."""
    rows, steps = [], suite.total_timesteps
    runs = runs_of({(suite.name, ""): ""}, suite.environments, folders)
    for environment, own in runs.groupby("environment", sort=False):
        others = {y: published(environment, steps, x) for x, y in SOURCES.items()}
        rows.append(
            {"environment": environment}
            | score_cells(own["score"])
            | {"whole run": plus_minus(own["mean_return"])}
            | {"hours per run": ratio(own["hours"].median())}
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
    scores = pd.DataFrame(runs, columns=["environment", "score"]).groupby("environment")["score"]
    return markdown([{"environment": name} | score_cells(own) for name, own in scores])


# --- Variants side by side ---


def scores_of(
    labels: Mapping[Name, str], environments: Iterable[str], folders: Folders
) -> dict[Name, pd.DataFrame]:
    """Scores (seeds, environments) of those variants that have any."""
    runs = runs_of(labels, environments, folders).dropna(subset="score")
    wide = runs.pivot(index=["suite", "variant", "seed"], columns="environment", values="score")
    wide = wide.reindex(columns=[*environments])
    return {name: wide.loc[name] for name in labels if name in wide.index}


def comparable(suite: Suite, folders: Folders) -> dict[Name, pd.DataFrame]:
    """Scores of a suite's variants in the environments that all of those with scores have.

    None while a baseline has no score in an environment of all.
    """
    scores = scores_of(suite.labels, suite.environments, folders)
    shared = [x for x in suite.environments if all(own[x].count() for own in scores.values())]
    known = suite.baseline in (None, *scores) and shared
    return {name: own[shared] for name, own in scores.items()} if known else {}


def stacked(variants: Iterable[pd.DataFrame]) -> np.ndarray:
    """Scores (seeds, variants, environments)."""
    frames = [*variants]
    wide = pd.concat(frames, axis=1, sort=True).to_numpy()
    return wide.reshape(len(wide), len(frames), -1)


def versus(ours: pd.DataFrame, theirs: pd.DataFrame) -> np.ndarray:
    """Scores (seeds, environments, 2) of two variants."""
    return stacked([ours, theirs]).swapaxes(1, 2)


def chance(ours: pd.DataFrame, theirs: pd.DataFrame) -> str:
    """Probability that A is better than B, over those of the environments that both have.

    A dash for few runs, of which it would often be 0 or 1.
    """
    shared = [x for x in ours if ours[x].count() and theirs[x].count()]
    if not shared:
        return "–"
    found = estimate(versus(ours[shared], theirs[shared]), statistics.improvement)
    return with_interval(found if found.ends else None, ratio)


def side_by_side(
    labels: Mapping[Name, str],
    scores: Mapping[Name, pd.DataFrame],
    environments: Iterable[str],
    columns: Mapping[str, Mapping[Name, str]],
) -> str:
    """A row of scores in each environment for each variant with its label, then more columns."""
    rows = []
    for name, label in labels.items():
        found = {x: own.dropna() for x, own in scores[name].items()} if name in scores else {}
        cells = {x: f"{plus_minus(own)} ({len(own)})" for x, own in found.items() if len(own)}
        more = {column: cells.get(name, "–") for column, cells in columns.items()}
        row = {"mean ± std (seeds)": label} | dict.fromkeys(environments, "–")
        rows.append(row | cells | more)
    return markdown(rows)


def beside(
    labels: Mapping[Name, str], baseline: Name, environments: Iterable[str], folders: Folders
) -> str:
    """Scores of variants, and how probably each is better than the baseline."""
    scores = scores_of(labels, environments, folders)
    others = {name: own for name, own in scores.items() if name != baseline}
    better = {x: chance(own, scores[baseline]) for x, own in others.items() if baseline in scores}
    column = f"P(better than {labels[baseline]})"
    return side_by_side(labels, scores, environments, {column: better})


def variants_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, and how probably it is better than the baseline."""
    return beside(suite.labels, suite.baseline, suite.environments, folders)


def compare(a: Name, b: Name, environments: Iterable[str], folders: Folders) -> str:
    """Two variants in those of the environments that both have."""
    texts = {name: "/".join(filter(None, name)) for name in (a, b)}
    scores = scores_of(texts, environments, folders)
    shared = [x for x in environments if all(x in y and y[x].count() for y in scores.values())]
    if len(scores) < len(texts) or not shared:
        raise BenchmarkError(f"{texts[a]} and {texts[b]} have no results in a common environment.")
    return beside(texts, b, shared, folders)


def effects(suite: Suite, folders: Folders) -> dict[Name, Estimate]:
    """What each variant changes against the baseline, the median over environments."""
    scores = comparable(suite, folders)
    base = scores.pop(suite.baseline, None)
    return {x: estimate(versus(y, base), statistics.relative_effect) for x, y in scores.items()}


def effects_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, what they amount to beside the baseline, and what others found."""
    elsewhere = reference("elsewhere").set_index("variant")["found"]
    columns = {
        "effect": {x: with_interval(y, change) for x, y in effects(suite, folders).items()},
        "elsewhere": {name: elsewhere.get(name[1], "") for name in suite.labels},
    }
    scores = scores_of(suite.labels, suite.environments, folders)
    return side_by_side(suite.labels, scores, suite.environments, columns)


# --- Table 1 of the paper ---


def paper_scores() -> dict[str, float]:
    """Average normalized score of each variant in the paper's Table 1."""
    return reference("table1").set_index("variant")["score"].to_dict()


def normalized(suite: Suite, folders: Folders) -> dict[Name, pd.DataFrame]:
    """Scores of each variant on a scale from random actions to the best run (paper, 6.1)."""
    if not (scores := comparable(suite, folders)):
        return {}
    best = pd.concat(scores.values()).max()
    random = best.index.map(random_returns).to_numpy()
    return {name: (own - random) / (best - random) for name, own in scores.items()}


def averages(scores: Mapping[Name, pd.DataFrame]) -> dict[Name, Estimate]:
    """Mean over environments of each variant's mean."""
    return {name: estimate(own.to_numpy(), statistics.mean) for name, own in scores.items()}


def normalized_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, their average on the paper's scale, and the paper's."""
    paper, shown = paper_scores(), normalized(suite, folders)
    columns = {
        "average normalized score": {
            name: with_interval(found, ratio) for name, found in averages(shown).items()
        },
        "paper, 21 runs in 7": {name: ratio(paper[name[1]]) for name in suite.labels},
    }
    scores = scores_of(suite.labels, suite.environments, folders)
    text = side_by_side(suite.labels, scores, suite.environments, columns)
    return text + (agreement(shown) if len(shown) == len(paper) else "")


def agreement(scores: Mapping[Name, pd.DataFrame]) -> str:
    """How the order of normalized scores agrees with that of the paper's Table 1.

    Once also without the first row, neither clipping nor penalty: anybody's would come last.
    """
    paper, texts = paper_scores(), []
    for names in (list(scores), list(scores)[1:]):
        order = statistics.rank_correlation([paper[variant] for _, variant in names])
        found = estimate(stacked(scores[name] for name in names), order)
        texts.append(with_interval(found, ratio))
    whole, rest = texts
    return f"\nRank correlation of the two columns: {whole}; without the first row: {rest}.\n"


# --- Figure 3 of the paper ---


def readings(suite: Suite, environment: str) -> dict[str, float]:
    """What others read off the paper's Figure 3, by label of the variants that they read."""
    found = {}
    for label in suite.labels.values():
        rows = publications(environment, suite.total_timesteps, f"{FIGURE3}: {label}")
        if len(rows):
            found[label] = rows["mean"].mean()
    return found


def figure3_table(suite: Suite, folders: Folders) -> str:
    """Scores of the first variant; all variants beside the paper's; whom the first one beats."""
    scores = scores_of(suite.labels, suite.environments, folders)
    means, wins, column = [], [], "mean [95 %] (seeds)"
    for environment in suite.shared:
        row, paper = {column: environment}, readings(suite, environment)
        for name, label in suite.labels.items():
            own = scores[name][environment].dropna() if name in scores else ()
            found = with_interval(estimate(matrix(own), statistics.mean)) if len(own) else ""
            row[label] = f"{found} ({len(own)})" if found else "–"
        means += [row, {column: "paper, read off"} | {x: f"≈ {number(paper[x])}" for x in paper}]
    (first, label), *others = suite.labels.items()
    for title, own in [*((x, [x]) for x in suite.shared), ("all", suite.shared)]:
        known = first in scores
        cells = {
            y: chance(scores[first][own], scores[x][own])
            for x, y in others
            if known and x in scores
        }
        row = {f"P({label} is better than)": title} | dict.fromkeys(dict(others).values(), "–")
        wins.append(row | cells)
    tables = scores_table(suite, folders), markdown(means), markdown(wins)
    return "\n".join(tables) + missing(suite, folders)


# --- Games ---


def ppo2_return(environment: str, step: int) -> float:
    """What the curve of baselines' benchmark page shows at a step."""
    rows = reference("ppo2_curves").query("environment == @environment")
    return float(np.interp(step, rows["global_step"], rows["return"]))


def games_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant in each game, also as shares of the way from random to human play."""
    rows, play = [], reference("atari").set_index("game")
    runs = runs_of(suite.labels, suite.environments, folders)
    for (game, label), own in runs.groupby(["environment", "label"], sort=False):
        random, human = play.loc[game]
        rows.append(
            {
                **{"game": game, "agent": label, "seeds": own["score"].count()},
                "last 100 episodes": plus_minus(own["score"]),
                "human": f"{(own['score'].mean() - random) / (human - random):.0%}",
                "whole run": plus_minus(own["mean_return"]),
                "hours per run": ratio(own["hours"].median()),
                "ppo2 by then": number(ppo2_return(game, suite.total_timesteps)),
                **{"random play": number(random), "human play": number(human)},
            }
        )
    return markdown(rows) + missing(suite, folders)


# --- Walking ---


def walking_table(suite: Suite, folders: Folders) -> str:
    """A row per run: when it reached returns, how it ended, and how its mean action walks."""
    rows = []
    for run in runs_of(suite.labels, suite.environments, folders).itertuples():
        steps, returns = run.result.column("return")
        walk = run.result.record["walk"]
        speed = estimate(matrix(walk["speeds"]), statistics.mean)
        first = {x: steps[returns >= x][:1] / 1e6 for x in RETURNS_REACHED}
        rows.append(
            {
                **{"environment": run.environment, "settings": run.label, "seed": run.seed},
                **{f"M steps to {x}": ratio(y[0]) if len(y) else "–" for x, y in first.items()},
                "last 100 episodes": number(run.score),
                "mean action": plus_minus(walk["returns"]),
                "its length": number(np.mean(walk["lengths"])),
                "its speed, m/s": with_interval(speed, ratio),
            }
        )
    return markdown(rows)
