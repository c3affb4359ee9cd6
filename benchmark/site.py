"""The site in docs/: scripts annotated with bugs beside their lines, pictures to play with, runs.

`python -m benchmark site` makes it from the scripts, the results and `templates/`. It opens from
disk: data are scripts that call `data(name, content)`, since pages on disk may fetch nothing.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from benchmark import annotate, health, rlhf, tables
from benchmark.annotate import TEMPLATES, Source, slug
from benchmark.definitions import Folders, Name, Suite
from benchmark.provenance import ROOT
from benchmark.results import KEY, Result, by_environment, done
from benchmark.suites import CONTINUOUS, KINDS, SCRIPTS, SUITES

DOCS = ROOT / "docs"
FIRST = next(iter(SCRIPTS))  # is index.html
ASSETS = ("style.css", "chart.js", "play.js", "runs.js")
RESOLUTION = {"return": (50, 4)}  # points of a curve, and their digits
OTHERWISE = (12, 3)
NOT_SHOWN = {"step", "episodes", "stage", "tokens_per_second", *KEY}  # columns of curves
FLAG = re.compile(r"--(?:no-)?([\w-]+)")


def page_of(script: str) -> str:
    """File of a script's page."""
    return "index.html" if script == FIRST else script.replace(".py", ".html")


def shown(suite: Suite, folders: Folders) -> dict[Name, str]:
    """Labels of the explorer's lines: variants that have results in the suite's environments."""
    return {
        x: y
        for x, y in suite.labels.items()
        if suite.environments.keys() & by_environment(*x, folders)
    }


def worths(folders: Folders) -> dict[str, list[dict[str, Any]]]:
    """What the ablation says of a detail, by its number or title: a text, and places on an axis."""
    suite, found = SUITES["ablation"], {}
    effects, lines = tables.effects(suite, folders), [*shown(suite, folders).values()]
    for variant in (x for x in suite.variants.values() if x.title in effects):
        effect = effects[variant.title]
        low, high = effect.ends or (effect.value,) * 2
        row = {
            "label": variant.label.removeprefix("extra: "),
            "text": tables.with_interval(effect, tables.CHANGE).replace("-", "−"),
            "places": (effect.value, low, high),
            "sure": not low <= 0 <= high,
            "link": f"runs.html#suite=ablation&lines=0,{lines.index(variant.title)}",
        }
        for key in variant.details:
            found.setdefault(key, []).append(row)
    return found


# --- Runs ---


def curve(results: list[Result], stage: str | None = None) -> dict[str, Any]:
    """The metrics of each seed on a grid of steps, which ends at `total`."""
    runs = {x.record["seed"]: x.curve for x in results}
    runs = {x: rows if stage is None else rows[rows["stage"] == stage] for x, rows in runs.items()}
    total = stage is None and results[0].record["settings"].get("total_timesteps")
    total = total or int(max(rows["step"].max() for rows in runs.values()))
    found: dict[str, dict[int, list[float]]] = {}
    for seed, rows in runs.items():
        for metric in (x for x in rows if x not in NOT_SHOWN and rows[x].notna().any()):
            known = rows[["step", metric]].dropna()
            points, digits = RESOLUTION.get(metric, OTHERWISE)
            values = np.interp(total / points * np.arange(1, points + 1), *known.to_numpy().T)
            found.setdefault(metric, {})[seed] = [float(f"{x:.{digits}g}") for x in values]
    return {"total": total, "metrics": found}


def stages(environment: str, label: str, results: list[Result]) -> list[dict[str, Any]]:
    """The models of RLHF runs, each as a line of the explorer; by their settings if not `label`."""
    lines = []
    for stage in dict.fromkeys(results[0].curve["stage"]):
        models = [x.record["models"][stage] for x in results]
        cells = {"seeds": len(models)}
        for name in ("gold", "proxy", "KL"):
            values = [x[rlhf.COLUMNS[name]] for x in models if rlhf.COLUMNS[name] in x]
            cells[name] = tables.plus_minus(np.array(values), 2)
        name = label or f"{rlhf.method(models[0])}, {rlhf.penalty(models[0])}"
        curves = {environment: curve(results, stage)}
        lines.append({"label": name, "cells": {environment: cells}, "curves": curves})
    return lines


def suite_data(suite: Suite, folders: Folders) -> dict[str, Any]:
    """All that the explorer shows of a suite and its baseline."""
    lines: list[dict[str, Any]] = []
    for (owner, variant), label in shown(suite, folders).items():
        line: dict[str, Any] = {"label": label, "cells": {}, "curves": {}}
        for environment, results in by_environment(owner, variant, folders).items():
            if "models" in results[0].record:
                lines += stages(environment, suite.variants[variant].label, results)
            elif environment in suite.environments:
                scores = tables.facts(results, "score")
                whole = tables.plus_minus(tables.facts(results, "mean_return"))
                cells = tables.score_cells(scores) | {"whole run": whole}
                line["cells"][environment], line["curves"][environment] = cells, curve(results)
        lines += [line] if line["curves"] else []
    environments = [x for x in suite.environments if any(x in line["curves"] for line in lines)]
    return {"about": suite.reproduces, "environments": environments, "lines": lines}


# --- To play with ---


def frontier(folders: Folders) -> list[dict[str, Any]]:
    """The models of the RLHF suites: means over seeds by method and strength of the penalty."""
    rows = []
    for suite in KINDS["rlhf"] + KINDS["models"]:
        found = rlhf.models(suite, folders).astype({"KL": float, "gold": float})
        means = found.groupby(["method", "penalty"], sort=False)[["KL", "gold"]].mean().round(3)
        rows += means.reset_index().to_dict("records")
    return rows


# --- Bugs ---


def bugs_of(folders: Folders) -> list[dict[str, Any]]:
    """The bugs of the suites that have them: texts or settings, a link to their runs, symptoms."""
    found = []
    for suite in SUITES.values():
        names = [*shown(suite, folders)]
        broken = [x for x in suite.variants if not health.is_healthy(suite, x)]
        for name in broken if any(x.replaced for x in suite.variants.values()) else ():
            bug = suite.variants[name]
            cells = {x: health.cells(suite, name, x, folders) for x in suite.environments}
            said = [
                f"{x}: return {y['change']}, warned in {y[health.SAID].replace('`', '')}"
                for x, y in cells.items()
                if y
            ]
            if said:
                flags = [] if bug.replaced else FLAG.findall(bug.flags)
                row = {"suite": suite.name, "script": bug.script, "label": bug.label}
                row |= {"texts": bug.replaced, "settings": {x.replace("-", "_") for x in flags}}
                pair = (health.control(suite, name), name)
                lines = ",".join(str(names.index((suite.name, x))) for x in pair)
                row |= {"link": f"#suite={suite.name}&lines={lines}"}
                found.append(row | {"symptom": "; ".join(said)})
    return found


def inside(segment: annotate.Segment, script: Source, bugs: list[dict]) -> list[dict[str, Any]]:
    """The bugs whose text begins in a segment or, where they are only flags, whose setting does."""
    lines, found = {number for number, *_ in segment.lines}, []
    settings = {x for note in segment.notes for x, _ in note.settings}
    for bug in (x for x in bugs if x["script"] == script.name):
        start = script.text.find(bug["texts"][0][0]) if bug["texts"] else -1
        here = start >= 0 and script.text.count("\n", 0, start) + 1 in lines
        found += [bug] if here or bug["settings"] & settings else []
    return found


# --- Pages ---


def build(folders: Folders) -> dict[str, bytes]:
    """All files of the site by their paths."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    bugs = bugs_of(folders)
    found, scripts = worths(folders), {name: Source(name) for name in SCRIPTS}
    suites = [x for x in SUITES.values() if x.name != "smoke" and done(x.name, folders)]
    environment.globals |= {
        "scripts": {name: (page_of(name), x.shows) for name, x in SCRIPTS.items()},
        "page_of": page_of,
        "worth_of": lambda note: found.get(note.key.removesuffix("/37")) or found.get(note.title),
        "slug": slug,
        "formula": annotate.formula,
        "prose": annotate.prose,
        "first": FIRST,
        "full": CONTINUOUS,
        "bugs_in": lambda segment, script: inside(segment, script, bugs),
    }
    files = {name: (TEMPLATES / name).read_bytes() for name in ASSETS}

    def page(path: str, template: str, **content: Any) -> None:
        text = environment.get_template(template).render(path=path, **content)
        rows = (x.rstrip() for x in text.splitlines() if x.strip())
        files[path] = ("\n".join(rows) + "\n").encode()

    def data(name: str, content: Any) -> None:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        files[f"data/{name}.js"] = f"data({json.dumps(name)},{text})\n".encode()

    every = [x for own in found.values() for x in own]
    example = max(every, key=lambda x: abs(x["places"][0]), default=None)
    tasks = SUITES["ablation"].environments
    for name, script in scripts.items():
        page(page_of(name), "script.html", script=script, example=example, tasks=tasks)
    reviews = json.loads((folders.results / "reviews.json").read_text())
    usual = scripts[CONTINUOUS].defaults
    sliders = {"epsilon": "clip_coef", "gamma": "gamma", "lambda": "gae_lambda"}
    sliders = {x: usual[y] for x, y in sliders.items()}
    page("play.html", "play.html", reviews=reviews, **sliders)
    data("play", {"reviews": reviews, "frontier": frontier(folders)})
    page("runs.html", "runs.html", suites={x.name: len(done(x.name, folders)) for x in suites})
    for suite in suites:
        data(suite.name, suite_data(suite, folders))
    return files


def write(folders: Folders, docs: Path = DOCS) -> int:
    """Make the site; returns the number of its files."""
    files = build(folders)
    shutil.rmtree(docs, ignore_errors=True)
    for path, content in files.items():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        (docs / path).write_bytes(content)
    return len(files)
