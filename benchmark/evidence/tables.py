"""Tables of suites, in Markdown, from committed results and published numbers."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from benchmark.evidence.definitions import Suite
from benchmark.lab import statistics
from benchmark.lab.definitions import CLOSED, Folders
from benchmark.lab.provenance import ROOT
from benchmark.lab.results import KEY, by_environment
from benchmark.lab.statistics import Estimate, estimate
from benchmark.lab.tables import (
    RATIO,
    chance,
    markdown,
    number,
    plus_minus,
    score_cells,
    tasks_of,
    with_interval,
)

REFERENCE = ROOT / "benchmark" / "reference"  # its README.md says where the numbers are from
FIGURE3 = "paper, Figure 3"
OCTOBER = "ppo2_games_october"  # the file of ppo2's second version of its curves
PPO2_SEEDS = 6
SCORES = ["score", "mean_return", "hours"]
# Columns of published numbers, by their sources in `reference/scores.csv`.
SOURCES = {
    f"{FIGURE3}: PPO (clip)": "paper, Fig. 3 (v1, read off)",
    "baselines ppo2, benchmark page": "ppo2 (v2, 6 seeds)",
    "baselines ppo2, runs of openrlbenchmark": "ppo2 (v2, 3 seeds)",
    "baselines ppo2, runs of Huang et al.": "ppo2 (Huang et al., 3 seeds)",
    "CleanRL pr-424": "CleanRL (3 seeds)",
    "CleanRL v1.0.0-12": "CleanRL, earlier (3 seeds)",
    "Spinning Up, PyTorch": "Spinning Up (v3, 10 seeds)",
    "Tianshou PPO": "Tianshou (v3, best evaluation, 10 seeds)",
}


# --- Closed experiments ---


class Switch(NamedTuple):
    """What one or several details were found to be worth."""

    experiment: str
    line: int  # of the explorer's lines of the experiment
    details: list[str]  # numbers, or titles of other tags
    label: str
    effect: Estimate


def switches() -> list[Switch]:
    """What has been switched off or on, one switch or two at a time."""
    rows = pd.read_csv(CLOSED / "effects.csv", dtype={"details": str}).itertuples(index=False)
    return [
        Switch(experiment, line, details.split(" and "), label, Estimate(effect, (low, high)))
        for experiment, line, details, label, effect, low, high in rows
    ]


# --- Cells ---


def facts(results: Iterable, name: str) -> np.ndarray:
    """A fact of each result that has it."""
    return np.array([x.record[name] for x in results if x.record.get(name) is not None])


# --- Scores by environment ---


def runs_of(
    suite: Suite, folders: Folders, environments: Iterable[str] | None = None
) -> pd.DataFrame:
    """A row per finished run of a suite and its baseline, by environment and in their order."""
    found = {label: by_environment(*name, folders) for name, label in suite.labels.items()}
    rows = [
        {"label": label, "result": result} | result.record
        for environment in environments or suite.environments
        for label, own in found.items()
        for result in own.get(environment, [])
    ]
    table = pd.DataFrame(rows, columns=["label", *KEY, *SCORES, "result"])
    table["label"] = pd.Categorical(table["label"], found)
    return table.astype(dict.fromkeys(SCORES, float))


@functools.cache
def reference(name: str) -> pd.DataFrame:
    """A file of published numbers."""
    return pd.read_csv(REFERENCE / f"{name}.csv")


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
    rows, steps, runs = [], suite.total_timesteps, runs_of(suite, folders)
    for environment, own in runs[runs["variant"] == ""].groupby("environment", sort=False):
        others = {y: published(environment, steps, x) for x, y in SOURCES.items()}
        rows.append(
            {"environment": environment}
            | score_cells(own["score"])
            | {"whole run": plus_minus(own["mean_return"])}
            | {"hours per run": RATIO(own["hours"].median())}
            | {column: cell for column, cell in others.items() if cell}
        )
    return markdown(rows)


# --- Variants side by side ---


def scores_of(suite: Suite, folders: Folders) -> pd.DataFrame:
    """Scores by label and seed (rows) and environment (columns)."""
    runs = runs_of(suite, folders).dropna(subset="score")
    scores = runs.pivot(index=["label", "seed"], columns="environment", values="score")
    return scores.reindex(columns=[*suite.environments])


def by_label(scores: pd.DataFrame, cell: Callable[[pd.Series], str]) -> pd.DataFrame:
    """A cell for the runs of each label in each environment, if there are any."""
    groups = scores.groupby("label", observed=False)
    return groups.agg(lambda x: cell(x.dropna()) if x.count() else None)


def side_by_side(scores: pd.DataFrame, columns: Mapping[str, Mapping[str, str]]) -> str:
    """Scores of each label in each environment, then more columns by label."""
    table = by_label(scores, lambda x: f"{plus_minus(x)} ({len(x)})")
    for column, texts in columns.items():
        table[column] = table.index.map(texts.get)
    return markdown(table.rename_axis("mean ± std (seeds)").reset_index())


def variants_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, and how probably it is better than the baseline, or the first one."""
    scores, (base, *others) = scores_of(suite, folders), suite.labels.values()
    better = {base: "–"} | {x: chance(scores, x, base) for x in others}
    return side_by_side(scores, {f"P(better than {base})": better})


# --- Table 1 of the paper ---


def paper_scores(suite: Suite) -> dict[str, float]:
    """Average normalized score of each variant in the paper's Table 1, by label."""
    known = reference("table1").set_index("variant")["score"]
    return {label: known[variant] for (_, variant), label in suite.labels.items()}


def normalized(suite: Suite, folders: Folders) -> pd.DataFrame:
    """Scores on a scale from random actions to the best run (paper, 6.1).

    They are of the environments that all variants have.
    """
    scores = scores_of(suite, folders)
    scores = scores.loc[:, scores.groupby("label", observed=True).count().all()]
    played = json.loads((REFERENCE / "random_policy.json").read_text())
    random = scores.columns.map(lambda environment: played[environment]["mean"])
    return (scores - random) / (scores.max() - random)


def averages(scores: pd.DataFrame) -> dict[str, Estimate]:
    """Mean over environments of the mean of each, by label."""
    labels = scores.index.unique("label")
    return {x: estimate(tasks_of(scores, x), statistics.mean) for x in labels}


def rank_correlation(suite: Suite, scores: pd.DataFrame, first: int = 0) -> str:
    """How the order of the objectives, from some row on, agrees with the paper's Table 1."""
    paper = paper_scores(suite)
    labels = [*paper][first:]
    order = statistics.rank_correlation([paper[x] for x in labels])
    tasks = [y for x in labels for y in tasks_of(scores, x)]
    return with_interval(estimate(tasks, order), RATIO)


def normalized_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant, their average on the paper's scale, and the paper's.

    Then how the order of the two agrees; once also without the first row, neither clipping nor
    penalty: anybody's would come last.
    """
    paper, shown = paper_scores(suite), normalized(suite, folders)
    found = averages(shown)
    columns = {
        "average normalized score": {x: with_interval(y, RATIO) for x, y in found.items()},
        "paper, 21 runs in 7": {x: RATIO(y) for x, y in paper.items()},
    }
    text = side_by_side(scores_of(suite, folders), columns)
    if len(found) < len(paper):
        return text
    whole, rest = (rank_correlation(suite, shown, x) for x in (0, 1))
    return f"{text}\nRank correlation of the two columns: {whole}; without the first row: {rest}.\n"


# --- Games ---


def with_range(scores: pd.Series) -> str:
    """Mean, and the lowest and the highest of several seeds."""
    ends = f" ({number(scores.min())} to {number(scores.max())})" if len(scores) > 1 else ""
    return number(scores.mean()) + ends


def ppo2_by_then(environment: str, steps: float, name: str = "ppo2_curves") -> str:
    """ppo2's mean return after as many steps ± standard deviation, from a file of its curves.

    It is – if there is no such curve. The band around a curve is taken for the standard error of
    six seeds (benchmark/closed/enduro/page.md says why).
    """
    curves = reference(name)
    curve = curves[curves["environment"] == environment.partition("-")[0]]
    if curve.empty or not steps:
        return "–"
    mean, low, high = (
        np.interp(steps, curve["global_step"], curve[x]) for x in ("return", "low", "high")
    )
    return number(mean, (high - low) / 2 * np.sqrt(PPO2_SEEDS))


def games_table(suite: Suite, folders: Folders) -> str:
    """Scores of each variant in each game, also as shares of the way from random to human play."""
    rows, play = [], reference("atari").set_index("game")
    runs = runs_of(suite, folders)
    for (game, label), own in runs.groupby(["environment", "label"], sort=False, observed=True):
        random, human = play.loc[game]
        steps = suite.total_timesteps
        rows.append(
            {
                **{"game": game, "agent": label, "seeds": own["score"].count()},
                "last 100 episodes (range)": with_range(own["score"]),
                "human": f"{(own['score'].mean() - random) / (human - random):.0%}",
                "whole run": plus_minus(own["mean_return"]),
                "hours per run": RATIO(own["hours"].median()),
                "ppo2 by then, August 2018": ppo2_by_then(game, steps),
                "October 2018": ppo2_by_then(game, steps, OCTOBER),
                **{"random play": number(random), "human play": number(human)},
            }
        )
    return markdown(rows)
