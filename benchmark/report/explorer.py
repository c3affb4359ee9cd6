"""What the explorer of runs on the site shows: curves of all seeds, in a small form."""

from typing import Any

import numpy as np

from benchmark.definitions import Folders, Name, Suite
from benchmark.report import health, rlhf, tables, verifiable
from benchmark.results import KEY, Result, by_environment

POINTS = 20  # of a curve
# Columns of curves that are not shown, and neither are those with a slash: metrics that the
# scripts no longer log.
NOT_SHOWN = {"step", "episodes", "stage", "tokens_per_second", "check_values", "kl_after", *KEY}
CHECKS = ("check", "entropy", "grad_norm")  # begin the names of metrics of bugs and healthy runs
DIGITS = [chr(x) for x in range(35, 127) if chr(x) != "\\"]  # of numbers in data


def shown(suite: Suite, folders: Folders) -> dict[Name, dict[str, list[Result]]]:
    """Lines of the explorer: variants, and the results that they have in its environments."""
    found = {x: by_environment(*x, folders).items() for x in suite.labels}
    own = {x: {y: z for y, z in items if y in suite.environments} for x, items in found.items()}
    return {name: results for name, results in own.items() if results}


def curve(results: list[Result], stage: str | None, checks: bool) -> dict[str, Any]:
    """The metrics of each seed, its checks too or not, on a grid from the first update to `total`.

    A value is two `DIGITS`, its place between the lowest and the highest value of the metric.
    """
    total = stage is None and results[0].record["settings"].get("total_timesteps")
    total, metrics = total or int(max(x.column("step", stage)[0].max() for x in results)), {}
    names = {x: 0 for own in results for x in own.curve if not ({x} & NOT_SHOWN or "/" in x)}
    for name in (x for x in names if checks or not x.startswith(CHECKS)):
        known = {x.record["seed"]: x.column(name, stage) for x in results}
        known = {seed: own for seed, own in known.items() if len(own[0])}
        if known:
            begin = int(min(x[0] for x, _ in known.values()))
            first = total / POINTS if name == "return" else begin
            grid = np.linspace(first, total, POINTS)
            runs = {seed: np.interp(grid, *own) for seed, own in known.items()}
            low, high = np.min([*runs.values()]), np.max([*runs.values()])
            unit = float(high - low) / (len(DIGITS) ** 2 - 1) or 1.0
            scale = {"low": float(f"{low:.5g}"), "unit": float(f"{unit:.5g}")}
            texts = {x: written((y - low) / unit) for x, y in runs.items()}
            metrics[name] = {"first": first, **scale, "runs": texts}
    return {"total": total, "metrics": metrics}


def written(values: np.ndarray) -> str:
    """Numbers from 0 to 91² - 1 as text."""
    pairs = (divmod(x, len(DIGITS)) for x in np.rint(values).astype(int).tolist())
    return "".join(DIGITS[a] + DIGITS[b] for a, b in pairs)


def cells(results: list[Result], stage: str | None) -> dict[str, Any]:
    """What the explorer's table says of runs, or of a model that RLHF runs have made."""
    if stage is None:
        whole = tables.plus_minus(tables.facts(results, "mean_return"))
        return tables.score_cells(tables.facts(results, "score")) | {"whole run": whole}
    models, names = [x.record["models"][stage] for x in results], ("gold", "proxy", "KL")
    columns = {x: rlhf.COLUMNS[x] for x in names}
    if "pass@1" in models[0]:
        columns = {"pass@1": "pass@1", "pass@16": "pass@16", "KL": "kl"}
    values = {x: [y.get(column) for y in models] for x, column in columns.items()}
    return {"seeds": len(models)} | {x: tables.plus_minus(y, 2) for x, y in values.items()}


def suite_data(suite: Suite, folders: Folders) -> dict[str, Any]:
    """All that the explorer shows of a suite and its baseline: a line per variant or model."""
    lines, checks, about = [], suite.table in ("bugs", "healthy"), suite.reproduces
    names = [*shown(suite, folders)]
    for name, found in shown(suite, folders).items():
        first, *_ = next(iter(found.values()))
        for stage in dict.fromkeys(first.curve.get("stage", [None])):
            label = suite.labels[name]
            if stage and not suite.variants[name[1]].label:
                model = first.record["models"][stage]
                label = verifiable.LABELS.get(stage)
                label = label or f"{rlhf.method(model)}, {rlhf.penalty(model)}"
            texts = {place: cells(own, stage) for place, own in found.items()}
            curves = {place: curve(own, stage, checks) for place, own in found.items()}
            lines.append({"label": label, "cells": texts, "curves": curves})
            if suite.table == "bugs" and not health.is_healthy(suite, name[1]):
                lines[-1]["control"] = names.index((suite.name, health.control(suite, name[1])))
    if any("stage" in x.curve for own in found.values() for x in own):
        about += "; the curves are over the updates of training"
    environments = [x for x in suite.environments if any(x in line["curves"] for line in lines)]
    return {"about": about, "environments": environments, "lines": lines}
