"""Cells and tables in Markdown, and how two sets of runs compare."""

import math
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from benchmark.lab import statistics
from benchmark.lab.record import LAST_100
from benchmark.lab.statistics import Estimate, Statistic, estimate

NUMERIC = re.compile(r"(?:[-+≈ ]*\d.*|–)?")
RATIO, CHANGE = "{:.2f}".format, "{:+z.0%}".format
# Columns of tables of RLHF's models, and their metrics.
MODEL_METRICS = {
    "gold": "objective/gold",
    "proxy": "objective/proxy",
    "KL": "objective/kl",
    "EOS rate": "text/eos_rate",
    "unique": "text/unique",
    "repetition": "text/repetition",
    "tokens": "text/length",
    "log p(chosen)": "logprobs/chosen",
    "log p(rejected)": "logprobs/rejected",
}


def markdown(rows: pd.DataFrame | Sequence[dict[str, object]]) -> str:
    """A table of rows, which are cells by column; a dash where a row lacks one.

    Columns whose cells all begin with a number (or are empty) are right-aligned.
    """
    table = pd.DataFrame(rows, dtype=object).fillna("–").astype(str)
    table = table.replace(r"\|", r"\|", regex=True)
    rules = ["--:" if all(map(NUMERIC.fullmatch, table[x])) else "---" for x in table]
    lines = [f"| {' | '.join(row)} |" for row in (table.columns, *table.to_numpy())]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:], ""])


def number(value: float, spread: float | None = None, digits: int | None = None) -> str:
    """A number, and its spread if known, with as many decimals as the larger of the two needs.

    Below 1 it has three significant digits. From 1 on it has one decimal, from 100 on none.
    """
    size = max(abs(float(value)), abs(spread or 0.0))
    if digits is None and 0 < size < 1:
        digits = 2 - math.floor(math.log10(size))
    elif digits is None:
        digits = int(abs(round(float(value), 1)) < 100)
    return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def plus_minus(scores: Iterable[float], digits: int | None = None, ddof: int = 0) -> str:
    """Mean ± standard deviation over seeds, or a dash.

    Args:
        ddof: what is subtracted from the number of seeds n in the divisor of the variance. Our
            published tables divide by n, as CleanRL's do. With few seeds, only n - 1 gives the
            right variance on average.
    """
    known = pd.Series(scores, dtype=float).dropna().to_numpy()
    spread = np.std(known, ddof=ddof) if len(known) > 1 else None
    return number(np.mean(known), spread, digits) if len(known) else "–"


def with_interval(found: Estimate, form: Callable[[float], str] = number) -> str:
    """A value, and its interval if it has one."""
    ends = f" [{form(found.ends[0])}, {form(found.ends[1])}]" if found.ends else ""
    return form(found.value) + ends


def score_cells(scores: Iterable[float], title: str = LAST_100, ddof: int = 0) -> dict[str, str]:
    """Cells about the scores of runs in one environment; `ddof` as in `plus_minus`."""
    scores = pd.Series(scores, dtype=float)
    known = scores.dropna()
    seeds = f"{len(known)}" + f" of {len(scores)}" * (len(known) < len(scores))
    middle = "–"
    if len(known):
        middle = with_interval(estimate([known.to_numpy()], statistics.interquartile_mean))
    return {"seeds": seeds, title: plus_minus(known, ddof=ddof), "IQM [95 %]": middle}


# --- Scores by label and seed (rows) and environment (columns) ---


def tasks_of(scores: pd.DataFrame, label: str) -> list[np.ndarray]:
    """Scores of a label in each environment, of which one may have fewer seeds than another."""
    return [x.dropna().to_numpy() for _, x in scores.loc[label].items()]


def of_pairs(scores: pd.DataFrame, ours: str, theirs: str, statistic: Statistic) -> Estimate:
    """A statistic of the scores of two labels."""
    pairs = zip(tasks_of(scores, ours), tasks_of(scores, theirs))
    return estimate([x for pair in pairs for x in pair], statistic)


def chance(scores: pd.DataFrame, ours: str, theirs: str) -> str:
    """Probability that A is better than B, over those environments that both have.

    A dash for few runs, of which it would often be 0 or 1.
    """
    pair = scores[scores.index.isin([ours, theirs], level="label")]
    counts = pair.groupby("label", observed=True).count()
    shared = counts.columns[(counts > 0).sum() == 2]
    if ours == theirs or shared.empty:
        return "–"
    found = of_pairs(pair[shared], ours, theirs, statistics.improvement)
    return with_interval(found, RATIO) if found.ends else "–"
