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

from benchmark.definitions import Folders, Name, Suite
from benchmark.provenance import ROOT
from benchmark.report import health, rlhf, tables
from benchmark.results import KEY, Result, by_environment, done
from benchmark.site import annotate
from benchmark.site.annotate import HOME, SHORT, TEMPLATES, Source
from benchmark.suites import KINDS, SCRIPTS, SUITES

DOCS = ROOT / "docs"
ASSETS = ("style.css", "chart.js", "play.js", "runs.js")
PICTURE = ROOT / "benchmark" / "figures" / "site.png"  # for sharing, and in README
RETURN_POINTS, OTHER_POINTS = 25, 5  # of a curve of returns, or of another metric
NOT_SHOWN = {"step", "episodes", "stage", "tokens_per_second", *KEY}  # columns of curves
WITHOUT = {"smoke", "mean_policies", "recipe_search"}  # short, or the curves of figure3
FLAG = re.compile(r"--(?:no-)?([\w-]+)")


def page_of(script: str) -> str:
    """File of a script's page."""
    return "index.html" if script == SHORT else script.replace(".py", ".html")


# --- Runs ---


def shown(suite: Suite, folders: Folders) -> dict[Name, dict[str, list[Result]]]:
    """Lines of the explorer: variants, and the results that they have in its environments."""
    found = {x: by_environment(*x, folders).items() for x in suite.labels}
    own = {x: {y: z for y, z in items if y in suite.environments} for x, items in found.items()}
    return {name: results for name, results in own.items() if results}


def curve(results: list[Result], stage: str | None, checks: bool) -> dict[str, Any]:
    """The metrics of each seed, its checks too or not, on a grid of steps, which ends at `total`.

    They are whole numbers of a unit, a power of ten: three digits in the median.
    """
    total = stage is None and results[0].record["settings"].get("total_timesteps")
    total, metrics = total or int(max(x.column("step", stage)[0].max() for x in results)), {}
    names = {x: 0 for own in results for x in own.curve if x not in NOT_SHOWN}
    for name in (x for x in names if checks or not x.startswith("check")):
        points = RETURN_POINTS if name == "return" else OTHER_POINTS
        grid = total * np.linspace(0, 1, points + 1)[1:]
        known = {x.record["seed"]: x.column(name, stage) for x in results}
        runs = {seed: np.interp(grid, *own) for seed, own in known.items() if len(own[0])}
        if runs:
            sizes = np.abs([*runs.values()])
            size = np.median(sizes[sizes > 0]) if sizes.any() else 100.0
            unit = 10.0 ** (np.floor(np.log10(size)) - 2)
            runs = {seed: [*map(round, (own / unit).tolist())] for seed, own in runs.items()}
            metrics[name] = {"unit": unit, "runs": runs}
    return {"total": total, "metrics": metrics}


def cells(results: list[Result], stage: str | None) -> dict[str, Any]:
    """What the explorer's table says of runs, or of a model that RLHF runs have made."""
    if stage is None:
        whole = tables.plus_minus(tables.facts(results, "mean_return"))
        return tables.score_cells(tables.facts(results, "score")) | {"whole run": whole}
    models, names = [x.record["models"][stage] for x in results], ("gold", "proxy", "KL")
    values = {x: [y.get(rlhf.COLUMNS[x]) for y in models] for x in names}
    return {"seeds": len(models)} | {x: tables.plus_minus(y, 2) for x, y in values.items()}


def suite_data(suite: Suite, folders: Folders) -> dict[str, Any]:
    """All that the explorer shows of a suite and its baseline: a line per variant or model."""
    lines, checks = [], suite.kind in ("bugs", "healthy")
    for name, found in shown(suite, folders).items():
        first, *_ = next(iter(found.values()))
        for stage in dict.fromkeys(first.curve.get("stage", [None])):
            label = suite.labels[name]
            if stage and not suite.variants[name[1]].label:
                model = first.record["models"][stage]
                label = f"{rlhf.method(model)}, {rlhf.penalty(model)}"
            texts = {place: cells(own, stage) for place, own in found.items()}
            curves = {place: curve(own, stage, checks) for place, own in found.items()}
            lines.append({"label": label, "cells": texts, "curves": curves})
    environments = [x for x in suite.environments if any(x in line["curves"] for line in lines)]
    return {"about": suite.reproduces, "environments": environments, "lines": lines}


# --- Beside the code ---


def worths(folders: Folders) -> dict[str, list[dict[str, Any]]]:
    """What the ablation says of a detail, by its number or title: a text, and places on an axis.

    A switch of several details stands at the first.
    """
    suite, found = SUITES["ablation"], {}
    effects = tables.effects(suite, folders)
    lines = [suite.labels[x] for x in shown(suite, folders)]
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
        found.setdefault(variant.details[0], []).append(row)
    return found


def bugs_of(folders: Folders) -> list[dict[str, Any]]:
    """The bugs of training: texts or settings, what they cost, a link to them over healthy runs."""
    found = []
    for suite in KINDS["bugs"]:
        names = [*shown(suite, folders)]
        for name in (x for x in suite.variants if not health.is_healthy(suite, x)):
            pairs = [health.pair(suite, name, x, folders) for x in suite.environments]
            changes = [tables.CHANGE(health.change(*x).value) for x in pairs if all(x)]
            if changes:
                bug, own = suite.variants[name], (health.control(suite, name), name)
                lines = ",".join(str(names.index((suite.name, x))) for x in own)
                found.append(
                    {
                        **{"script": bug.script, "label": bug.label},
                        "changes": ", ".join(changes).replace("-", "−"),
                        "text": bug.replaced[0][0] if bug.replaced else "\0",
                        "settings": [x.replace("-", "_") for x in FLAG.findall(bug.flags)],
                        "link": f"#suite={suite.name}&lines={lines}",
                    }
                )
    return found


def placed(script: Source, bugs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Bugs by the titles of what they change: a tag's statement or setting, or a function.

    A function with one tag stands for its statement.
    """
    at, tags, by_setting, found, outer = {}, {"": []}, {}, {}, ""
    for segment in script.segments:
        for note in segment.notes:
            outer = outer if note.label else note.title
            tags.setdefault(outer, []).extend([note.title] if note.label else [])
            by_setting = {x: note.title for x, _ in note.settings} | by_setting
        last = [outer, *tags[outer]][-1]
        at |= {line: outer if tag is None else last for line, _, tag in segment.lines}
    for bug in (x for x in bugs if x["script"] == script.name):
        before, exists, _ = script.text.partition(bug["text"])
        titles = [by_setting[x] for x in bug["settings"] if x in by_setting]
        title = at[before.count("\n") + 1] if exists else titles[0]
        own = tags.get(title, [])
        found.setdefault(own[0] if len(own) == 1 else title, []).append(bug)
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
    reviews = json.loads((folders.results / "reviews.json").read_text())
    found, bugs, sources = worths(folders), bugs_of(folders), {x: Source(x) for x in SCRIPTS}
    suites = {x: n for x in SUITES if x not in WITHOUT and (n := len(done(x, folders)))}
    environment.globals |= {
        **{"sources": sources, "short": SHORT, "full": HOME, "page_of": page_of},
        **{"shows": {name: x.shows for name, x in SCRIPTS.items()}, "suites": suites},
        **{"slug": annotate.slug, "formula": annotate.formula, "prose": annotate.prose},
        **{"worths": found, "tasks": SUITES["ablation"].environments},
        **{"reviews": reviews, "all_bugs": bugs},
    }
    files = {x.name: x.read_bytes() for x in (PICTURE, *(TEMPLATES / name for name in ASSETS))}

    def page(path: str, template: str, **content: Any) -> None:
        text = environment.get_template(template).render(path=path, **content)
        rows = (x.rstrip() for x in text.splitlines() if x.strip())
        files[path] = ("\n".join(rows) + "\n").encode()

    def data(name: str, content: Any) -> None:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        files[f"data/{name}.js"] = f"data({json.dumps(name)},{text})\n".encode()

    for name, script in sources.items():
        template = "index.html" if name == SHORT else "script.html"
        beside = placed(sources[HOME] if name == SHORT else script, bugs)
        page(page_of(name), template, script=script, bugs=beside)
    page("play.html", "play.html", usual=sources[HOME].defaults)
    page("runs.html", "runs.html")
    data("play", reviews)
    for name in suites:
        data(name, suite_data(SUITES[name], folders))
    return files


def write(folders: Folders, docs: Path = DOCS) -> int:
    """Make the site; returns the number of its files."""
    files = build(folders)
    shutil.rmtree(docs, ignore_errors=True)
    for path, content in files.items():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        (docs / path).write_bytes(content)
    return len(files)
