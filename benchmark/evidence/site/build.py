"""The site in docs/: annotated scripts, recipes, pages of text, pictures to play with, and runs.

`python -m benchmark site` makes it from the scripts, the Markdown, the results and `templates/`. It
opens from disk: data are scripts that call `data(name, content)`, since pages on disk may fetch
nothing.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jinja2
import markdown

from benchmark.evidence import tables
from benchmark.evidence.explorer import POINTS, suite_data
from benchmark.evidence.pages import PAGES
from benchmark.evidence.site import annotate
from benchmark.evidence.site.annotate import HOME, SHORT, TEMPLATES, Source
from benchmark.evidence.suites import SUITES
from benchmark.evidence.suites.scripts import SCRIPTS
from benchmark.lab.definitions import CLOSED, Folders
from benchmark.lab.provenance import ROOT
from benchmark.lab.results import done, lines_of
from benchmark.lab.tables import CHANGE, with_interval

DOCS = ROOT / "docs"
ASSETS = ("style.css", "chart.js", "play.js", "runs.js")
FIGURES = ROOT / "benchmark" / "figures"
PICTURE = FIGURES / "site.png"  # for sharing, and in README
RECIPES = [  # that have no page of their own
    x for x in sorted((ROOT / "recipes").glob("*.py")) if f"recipes/{x.name}" not in SCRIPTS
]
TEXTS = [x for x in PAGES if x != ROOT / "README.md"] + sorted(CLOSED.glob("*/page.md"))
CHANGED = re.compile(r'^(<pre><code class="language-diff">)?([-+]) (.*)\n', re.MULTILINE)
CHANGES = {"-": "del", "+": "ins"}  # lines of a diff
BUGS = CLOSED / "bugs" / "notes.json"  # what stands next to the lines of scripts
# The ablation switches details of PPO off; what it says is not about language models.
MEASURED = [x for x in SCRIPTS if x.startswith("ppo_") and "rlhf" not in x]
FILMS = {  # by script: one of FIGURES, and what it shows
    SHORT: ("humanoid_runs.gif", "Humanoid-v4 after training with this algorithm."),
    HOME: (
        "half_cheetah_gaits.webp",
        "HalfCheetah-v4 after a million steps, with the mean action. Seed 1 (left) runs on its "
        "feet and earns 4360. Seed 2 (right) slides on its back and earns 1700, as most seeds do.",
    ),
    "ppo_kl_penalty.py": ("hopper_kl_penalty.webp", "Hopper-v4 after a million steps."),
}


def page_of(script: str) -> str:
    """File of a script's page."""
    return "index.html" if script == SHORT else f"{Path(script).stem}.html"


# --- Next to the code ---


def effects_of_details() -> dict[str, list[dict[str, Any]]]:
    """What the ablation says of a detail, by its number or title: a text, and places on an axis.

    A switch of several details stands at the first.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for switch in (x for x in tables.switches() if x.experiment == "ablation"):
        value, (low, high) = switch.effect
        row = {
            "label": switch.label.removeprefix("extra: "),
            "text": with_interval(switch.effect, CHANGE).replace("-", "−"),
            "places": (value, low, high),
            "sure": not low <= 0 <= high,
            "link": f"runs.html#suite=ablation&lines=0,{switch.line}",
        }
        found.setdefault(switch.details[0], []).append(row)
    return found


def placed(script: str, bugs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The planted bugs of a script, by the title of the note that they stand at."""
    found: dict[str, list[dict[str, Any]]] = {}
    for bug in (x for x in bugs if x["script"] == script):
        found.setdefault(bug["at"], []).append(bug)
    return found


# --- Pages of text ---


def page_of_text(path: Path) -> str:
    """File of the page made from Markdown: benchmark.html from benchmark/README.md."""
    if path.name == "page.md":  # of a closed experiment
        return f"closed_{path.parent.name}.html"
    name = path.parent.name if path.name == "README.md" else path.stem.lower()
    return f"{'benchmark_' * (path.parent.name == 'pages')}{name}.html"


def text_page(path: Path, sources: dict[str, Source]) -> dict[str, str]:
    """Markdown as HTML with the links of the site; its title, first paragraph and contents."""

    def link(match: re.Match) -> str:
        attribute, place, anchor = match[1], match[2], match[3] or ""
        if not place or re.match("https?:", place):
            return match[0]
        target = Path(os.path.normpath(path.parent / place))
        name = target.relative_to(ROOT).as_posix()
        if target in TEXTS:
            name = page_of_text(target)
        elif name in sources:
            known = {f"#{x.anchor}" for x in sources[name].tags.values()}
            name, anchor = page_of(name), anchor if anchor in known else ""
        else:
            name = name.removeprefix("docs/") if name.startswith("docs/") else f"../{name}"
        return f'{attribute}="{name}{anchor}"'

    reader = markdown.Markdown(extensions=["fenced_code", "md_in_html", "tables", "toc"])
    text = reader.convert(path.read_text())
    about = re.sub("<.*?>", "", " ".join(re.search("<p>(.*?)</p>", text, re.DOTALL)[1].split()))
    text = re.sub(r'(href|src)="([^"#]*)(#[^"]*)?"', link, text)
    text = CHANGED.sub(lambda x: f"{x[1] or ''}<{(t := CHANGES[x[2]])}>{x[3]}</{t}>", text)
    text = re.sub("<table>.*?</table>", r'<div class="scroll">\g<0></div>', text, flags=re.DOTALL)
    drawn = re.compile(r"<pre>(?=<code>[^<]*\+--)")  # lines of a drawing cannot wrap
    text = drawn.sub('<pre class="drawing">', text)
    blank = re.compile("<pre.*?</pre>", re.DOTALL)  # `page` drops blank lines
    text = blank.sub(lambda x: x[0].replace("\n\n", "\n<br>"), text)
    title = reader.toc_tokens[0]["name"]
    return {"text": text, "title": title, "about": about[:240], "contents": reader.toc}


# --- Pages ---


def build(folders: Folders) -> dict[str, bytes]:
    """All files of the site by their paths."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    reviews = json.loads((folders.results / "reviews.json").read_text())
    found, bugs = effects_of_details(), json.loads(BUGS.read_text())
    sources = {x: Source(x) for x in SCRIPTS}
    runs = {x: n for x in SUITES if x != "smoke" and (n := len(done(x, folders)))}
    shown = {x: suite_data(SUITES[x], folders) for x in runs}
    for path in sorted(CLOSED.glob("*/explorer.json")):
        shown[path.parent.name] = json.loads(path.read_text())
        runs[path.parent.name] = len(lines_of(path.with_name("runs.jsonl")))
    sizes = {x: round((FIGURES / file).stat().st_size / 1e6, 1) for x, (file, _) in FILMS.items()}
    environment.globals |= {
        **{"sources": sources, "short": SHORT, "full": HOME, "page_of": page_of},
        **{"shows": {name: x.shows for name, x in SCRIPTS.items()}, "suites": runs},
        **{"slug": annotate.slug, "formula": annotate.formula, "prose": annotate.prose},
        "usual": sources[HOME].defaults,
        "films": {
            x: {"file": file, "text": text, "size": sizes[x]} for x, (file, text) in FILMS.items()
        },
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
        beside = placed(HOME if name == SHORT else name, bugs)
        own = found if name in MEASURED else {}
        page(page_of(name), template, script=script, bugs=beside, effects=own)
    for path in TEXTS:
        source = path.relative_to(ROOT).as_posix()
        page(page_of_text(path), "page.html", source=source, **text_page(path, sources))
    page("recipes.html", "recipes.html", recipes=[*map(annotate.recipe, RECIPES)])
    page("play.html", "play.html")
    page("runs.html", "runs.html", points=POINTS, shown={x: runs[x] for x in shown})
    data("play", reviews)
    for name, content in shown.items():
        data(name, content)
    return files


def write(folders: Folders, docs: Path = DOCS) -> int:
    """Make the site; returns the number of its files."""
    files = build(folders)
    shutil.rmtree(docs, ignore_errors=True)
    for path, content in files.items():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        (docs / path).write_bytes(content)
    return len(files)
