"""What the explorer of runs on the site shows: curves of all seeds, in a small form."""

from typing import Any

import numpy as np

from benchmark.evidence import rlhf, tables
from benchmark.evidence.definitions import Suite
from benchmark.lab.definitions import Folders
from benchmark.lab.results import KEY, Result, by_environment

POINTS = 12  # of a curve
STAGED = "; the curves are over the updates of training"
# Columns of curves that are not shown, and neither are those with a slash: metrics that the
# scripts no longer log.
NOT_SHOWN = {"step", "episodes", "stage", "seconds", "tokens", "tokens_per_second", *KEY}
NOT_SHOWN |= {"check_values", "kl_after"}
CHECKS = ("check", "entropy", "grad_norm")  # begin names that are shown of the closed bugs only
DIGITS = [chr(x) for x in range(35, 127) if chr(x) != "\\"]  # of numbers in data


def curve(results: list[Result], stage: str | None) -> dict[str, Any]:
    """The metrics of each seed on a grid from the first update to `total`.

    A value is two `DIGITS`, its place between the lowest and the highest value of the metric.
    """
    total = stage is None and results[0].record["settings"].get("total_timesteps")
    total, metrics = total or int(max(x.column("step", stage)[0].max() for x in results)), {}
    names = {x: 0 for own in results for x in own.curve if not ({x} & NOT_SHOWN or "/" in x)}
    for name in (x for x in names if not x.startswith(CHECKS)):
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
    found = rlhf.models(results).query("model == @stage")
    metrics = {x: tables.plus_minus(found.get(x, ()), 2) for x in ("gold", "proxy", "KL")}
    return {"seeds": len(found)} | metrics


def label_of(record: dict[str, Any], stage: str) -> str:
    """The name of a model that a run without variants has made."""
    model = record["models"][stage]
    return f"{rlhf.method(model)}, {rlhf.penalty(model)}"


def suite_data(suite: Suite, folders: Folders) -> dict[str, Any]:
    """All that the explorer shows of a suite and its baseline: a line per variant or model."""
    lines, about = [], suite.reproduces
    for (name, variant), label in suite.labels.items():
        found = by_environment(name, variant, folders)
        found = {x: own for x, own in found.items() if x in suite.environments}
        first = next(iter(found.values()), [None])[0]
        staged = first is not None and "stage" in first.curve
        if staged:
            about = suite.reproduces + STAGED
        stages = {first.record["scored_model"] if staged else None: label}  # names by model
        if staged and not suite.variants[variant].label:  # all models, not only the main one
            stages = {x: label_of(first.record, x) for x in first.curve["stage"].unique()}
        for stage, shown in stages.items():
            line = {"label": shown}
            line["cells"] = {x: cells(own, stage) for x, own in found.items()}
            line["curves"] = {x: curve(own, stage) for x, own in found.items()}
            lines.append(line)
    environments = [x for x in suite.environments if any(x in line["curves"] for line in lines)]
    return {"about": about, "environments": environments, "lines": lines}
