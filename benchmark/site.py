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

from benchmark import annotate, health, pages, rlhf, tables
from benchmark.annotate import HOME, SHORT, TEMPLATES, Source
from benchmark.definitions import Folders, Name, Suite
from benchmark.provenance import ROOT
from benchmark.results import KEY, Result, by_environment, done
from benchmark.suites import KINDS, SCRIPTS, SUITES

DOCS = ROOT / "docs"
ASSETS = ("style.css", "chart.js", "play.js", "runs.js")
PICTURE = ROOT / "benchmark" / "figures" / "site.png"  # for sharing, and in README
BEFORE_AFTER = ("healthy", "without-statistics")  # variants of the suite bugs_evaluation
POINTS = {"return": 25}  # of a curve
OTHERWISE = 10
NOT_SHOWN = {"step", "episodes", "stage", "tokens_per_second", *KEY}  # columns of curves
FLAG = re.compile(r"--(?:no-)?([\w-]+)")


def page_of(script: str) -> str:
    """File of a script's page."""
    return "index.html" if script == SHORT else script.replace(".py", ".html")


# --- Runs ---


def shown(suite: Suite, folders: Folders) -> dict[Name, str]:
    """Labels of the explorer's lines: variants that have results in the suite's environments."""
    return {
        x: y
        for x, y in suite.labels.items()
        if suite.environments.keys() & by_environment(*x, folders)
    }


def curve(results: list[Result], stage: str | None = None) -> dict[str, Any]:
    """The metrics of each seed on a grid of steps, which ends at `total`."""
    runs = {x.record["seed"]: x.curve for x in results}
    runs = {x: rows if stage is None else rows[rows["stage"] == stage] for x, rows in runs.items()}
    total = stage is None and results[0].record["settings"].get("total_timesteps")
    total, metrics = total or int(max(rows["step"].max() for rows in runs.values())), {}
    for name in {x: 0 for rows in runs.values() for x in rows if x not in NOT_SHOWN}:
        known = {x: rows[["step", name]].dropna() for x, rows in runs.items() if name in rows}
        grid = total * np.linspace(0, 1, POINTS.get(name, OTHERWISE) + 1)[1:]
        values = {x: np.interp(grid, *y.to_numpy().T) for x, y in known.items() if len(y)}
        metrics |= {name: packed(values)} if values else {}
    return {"total": total, "metrics": metrics}


def packed(runs: dict[int, np.ndarray]) -> dict[str, Any]:
    """Curves as whole numbers of a unit, a power of ten: three digits in the median."""
    sizes = np.abs([*runs.values()])
    unit = 10.0 ** (np.floor(np.log10(np.median(sizes[sizes > 0]))) - 2) if sizes.any() else 1.0
    return {"unit": unit, "runs": {x: [*map(round, (y / unit).tolist())] for x, y in runs.items()}}


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


# --- Beside the code ---


def worths(folders: Folders) -> dict[str, list[dict[str, Any]]]:
    """What the ablation says of a detail, by its number or title: a text, and places on an axis.

    A switch of several details stands at the first.
    """
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
        found.setdefault(variant.details[0], []).append(row)
    return found


def bugs_of(folders: Folders) -> list[dict[str, Any]]:
    """The bugs of training: texts or settings, what they cost, a link to them over healthy runs."""
    found = []
    for suite in KINDS["bugs"]:
        names = [*shown(suite, folders)]
        for name in (x for x in suite.variants if not health.is_healthy(suite, x)):
            cells = {x: health.cells(suite, name, x, folders) for x in suite.environments}
            cells = {x: y for x, y in cells.items() if y}
            if cells:
                bug, pair = suite.variants[name], (health.control(suite, name), name)
                changes = (x["change"].split()[0].replace("-", "−") for x in cells.values())
                lines = ",".join(str(names.index((suite.name, x))) for x in pair)
                row = {"script": bug.script, "label": bug.label, "changes": ", ".join(changes)}
                row |= {"text": bug.replaced[0][0] if bug.replaced else "\0"}
                row |= {"settings": [x.replace("-", "_") for x in FLAG.findall(bug.flags)]}
                found.append(row | {"link": f"#suite={suite.name}&lines={lines}"})
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
        at |= {x: (outer, tags[outer][-1:] * (y is not None)) for x, _, y in segment.lines}
    for bug in (x for x in bugs if x["script"] == script.name):
        before, exists, _ = script.text.partition(bug["text"])
        outer, own = at[before.count("\n") + 1] if exists else ("", [])
        set_by = [by_setting[x] for x in bug["settings"] if x in by_setting]
        own = own or tags[outer] or set_by[:1]
        found.setdefault(own[0] if len(own) == 1 else outer, []).append(bug)
    return found


def gains(folders: Folders) -> dict[str, Any]:
    """What the full script has beyond the short one, in numbers of the committed results."""
    task = SCRIPTS[HOME].environment
    runs = [by_environment(SCRIPTS[x].suite, "", folders) for x in (SHORT, HOME)]
    rates = pages.measured(folders)["continuous"].set_index(["contender", "repetition"])
    rates = rates["steps_per_second"].unstack(0)
    walks = [by_environment("bugs_evaluation", x, folders)["Hopper-v4"] for x in BEFORE_AFTER]
    return {
        "task": task,
        "minutes": [60 * np.median(tables.facts(x[task], "hours")) for x in runs],
        "speed": (rates[HOME] / rates.drop(columns=HOME).squeeze()).median(),
        "noticed": re.findall(r"\*\*(.+?)\*\*", pages.block("goal", folders)),
        "evaluated": [np.mean([x.record["walk"]["returns"] for x in own]) for own in walks],
    }


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
    every = [x for own in found.values() for x in own]
    suites = {x: done(x, folders) for x in SUITES if x != "smoke"}
    suites = {x: len(own) for x, own in suites.items() if own}
    environment.globals |= {
        **{"sources": sources, "short": SHORT, "full": HOME, "page_of": page_of},
        **{"shows": {name: x.shows for name, x in SCRIPTS.items()}, "suites": suites},
        **{"slug": annotate.slug, "formula": annotate.formula, "prose": annotate.prose},
        **{"worths": found, "tasks": SUITES["ablation"].environments},
        "example": max(every, key=lambda x: abs(x["places"][0]), default=None),
        **{"gains": gains(folders), "reviews": reviews, "all_bugs": bugs},
    }
    files = {name: (TEMPLATES / name).read_bytes() for name in ASSETS}
    files[PICTURE.name] = PICTURE.read_bytes()

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
