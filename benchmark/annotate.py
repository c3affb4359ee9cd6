"""A script as segments of code with notes beside them, and the picture of its loop: for `site.py`.

All is read from the script: tags, docstrings, banners, and which function calls which. Formulas
come from `templates/formulas.toml`.
"""

import ast
import dataclasses
import functools
import html
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from benchmark.provenance import ROOT

TEMPLATES = Path(__file__).resolve().parent / "templates"
END = "# === The algorithm ends here ==="
BANNER = re.compile(r"# === (.+?)(?:: .+)? ===$")
STAGE = re.compile(r" +# --- ([^:,]+)(?:[:,] (.+?))? ---$")
TAG = re.compile(
    r" *# (?:Detail (\w+(?:/\d+)?)|(Extra|Deviation)): ([^\[(]+?)(?: \((.+?)\)(?:, [^\[]+)?)?"
    r"(?: \[(.+)\])?$"
)
SENTENCE = re.compile(r" *# (?!Detail |Extra:|Deviation:)(.+)$")
# What the brackets of tags name: the repositories, and folders where these are left out.
PLACE = re.compile(r"(LHP: |DPO: |ppo2: |)([\w/]+\.py) L(\d+)(?:-(\d+))?")
BASELINES = "https://github.com/openai/baselines/blob/ea25b9e8/baselines/"
ORIGINALS = {
    "": BASELINES,
    "ppo2: ": BASELINES,
    "LHP: ": "https://github.com/openai/lm-human-preferences/blob/cbfd210b/lm_human_preferences/",
    "DPO: ": "https://github.com/eric-mitchell/direct-preference-optimization/blob/5815fab2/",
}
HOME, SHORT = "ppo_continuous_action.py", "ppo_minimal.py"  # whose tags have no reasons
FOLDERS = {"ppo2.py": "ppo2/", "distributions.py": "common/", "vec_normalize.py": "common/vec_env/"}


@dataclasses.dataclass
class Note:
    """What stands beside code: a function's docstring, a tag's sentence, a stage of the loop."""

    anchor: str
    title: str
    label: str = ""  # "Detail 8 of 37"; empty for a function
    key: str = ""  # number of a detail, 8/37
    sentence: str = ""
    text: str = ""  # HTML
    formula: str = ""  # MathML
    settings: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    source: str = ""  # HTML

    @property
    def short(self) -> str:
        """The number of a detail, or a sign."""
        return {"Extra": "+", "Deviation": "≠"}.get(self.label) or self.key.partition("/")[0]


@dataclasses.dataclass
class Segment:
    """Lines of code with their notes; or only the title of a section."""

    section: str = ""
    notes: list[Note] = dataclasses.field(default_factory=list)
    # Number, HTML, and None or the tag of the statement, which its first line shows.
    lines: list[tuple[int, str, str | None]] = dataclasses.field(default_factory=list)


def slug(text: str) -> str:
    """A title as an anchor."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")


FORMULAS = tomllib.loads((TEMPLATES / "formulas.toml").read_text())


@functools.cache
def formula(script: str, name: str) -> str:
    """MathML of a function, tag or stage of a script, where there is one."""
    latex = FORMULAS.get(f"{script}: {name}") or FORMULAS.get(name)
    return latex2mathml.converter.convert(latex, display="block") if latex else ""


def colored(code: str, linked: Iterable[str] = ()) -> list[str]:
    """Lines of Python as HTML, with names as links to where they are defined.

    Classes are those of Pygments, without the most frequent ones.
    """
    text = highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    names = re.compile(rf'(?<!\.</span>)<span class="n">({"|".join(linked) or "(?!)"})</span>')
    text = names.sub(lambda x: f'<a href="#{slug(x[1])}">{x[1]}</a>', text)
    return re.sub(r'<span class="(?:n|p|o|w|nb|bp)">(.*?)</span>', r"\1", text).split("\n")


def prose(text: str) -> str:
    """A docstring as HTML: paragraphs, code in backticks or indented, papers as links."""
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text, quote=False))
    text = re.sub(r"arXiv ([\d.]+\d)", r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', text)
    parts = [(x, "pre" if x.startswith("    ") else "p") for x in re.split(r"\n\s*\n", text)]
    return "\n".join(f"<{tag}>{x.strip()}</{tag}>" for x, tag in parts)


def original(text: str) -> str:
    """What stands in the brackets of a tag, with links to lines of the original code."""

    def link(match: re.Match) -> str:
        series, path, first, last = match.groups()
        lines = f"#L{first}" + (f"-L{last}" if last else "")
        return f'<a href="{ORIGINALS[series]}{FOLDERS.get(path, "")}{path}{lines}">{match[0]}</a>'

    return PLACE.sub(link, html.escape(text))


class Source:
    """A script up to the line where its algorithm ends."""

    def __init__(self, name: str) -> None:
        self.name, whole = name, (ROOT / name).read_text()
        self.text = whole.partition(END)[0]
        self.rows, self.below = self.text.splitlines(), whole.count("\n") - self.text.count("\n")
        self.tree = ast.parse(self.text)
        self.doc = ast.get_docstring(self.tree)
        kinds = (ast.FunctionDef, ast.ClassDef)
        self.tops = {x.name: x for x in self.tree.body if isinstance(x, kinds)}
        fields = [x for x in self.tops["Args"].body if isinstance(x, ast.AnnAssign)]
        self.defaults = {x.target.id: ast.unparse(x.value) for x in fields if x.value}
        tags = Source(HOME).tags.values() if name == SHORT else ()
        self.home = {x.title: x for x in tags}  # where reasons and sources stand
        self.tags, self.stages = dict(self.find_tags()), dict(self.find_stages())
        self.segments = self.split()

    def begin(self, node: Any) -> int:
        """The line where a function begins, with its decorators and the comments above."""
        line = min(x.lineno for x in [node, *node.decorator_list])
        while re.match(r"# (?!===)", self.rows[line - 2]):
            line -= 1
        return line

    def find_tags(self) -> Iterator[tuple[int, Note]]:
        """Notes of tags by their lines."""
        for line, match in enumerate(map(TAG.match, self.rows), 1):
            if match:
                number, kind, title, settings, source = match.groups()
                below, home = SENTENCE.match(self.rows[line]), self.home.get(title)
                own, _, total = (number or "").partition("/")
                anchor = f"detail-{own.lower()}" if number else slug(f"{kind} {title}")
                note = Note(anchor, title)
                note.label, note.key = (
                    kind or f"Detail {own} of {total}".removesuffix(" of "),
                    number or "",
                )
                note.sentence = below[1] if below else home.sentence if home else ""
                note.formula = formula(self.name, title)
                note.source = original(source or "") or (home.source if home else "")
                names = re.findall(r"(?:not )?(\w+)", settings or "")
                note.settings = [(x, self.defaults[x]) for x in names if x in self.defaults]
                yield line, note

    def find_stages(self) -> Iterator[tuple[int, Note]]:
        """Notes of the parts of the training loop, which banners divide, by their lines."""
        for name, node in self.tops.items():
            for line in range(node.lineno, node.end_lineno):
                if name != "Args" and (match := STAGE.match(self.rows[line - 1])):
                    note = Note(slug(f"stage {match[1]}"), match[1], f"In {name}")
                    note.sentence = match[2] or ""
                    yield line, note

    def split(self) -> list[Segment]:
        """All segments in the order of the lines."""
        hidden = set(range(1, self.tree.body[0].end_lineno + 1)) | set(self.stages)
        cuts: list[tuple[int, Segment | Note]] = [(1, Segment()), *self.stages.items()]
        for name, node in self.tops.items():
            note = Note(slug(name), name, formula=formula(self.name, name))
            if name != "Args" and ast.get_docstring(node):
                note.text = prose(ast.get_docstring(node))
                hidden |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            cuts += [(self.begin(node), note), (node.end_lineno + 1, Segment())]
        for line, note in self.tags.items():
            hidden |= {line, line + bool(SENTENCE.match(self.rows[line]))}
            cuts.append((line, note))
        for line, match in enumerate(map(BANNER.match, self.rows), 1):
            if match:
                hidden.add(line)
                cuts += [(line, Segment(match[1])), (line + 1, Segment())]
        marked, colors = self.marked(hidden), colored(self.text, self.tops.keys() - {"Args"})
        cuts.sort(key=lambda x: x[0])
        segments: list[Segment] = []
        for (line, begun), end in zip(cuts, [*(x for x, _ in cuts[1:]), len(self.rows) + 1]):
            if isinstance(begun, Segment):
                segments.append(begun)
            else:
                # Where little code has come since the last note, this one joins it.
                before = [x for x, *_ in segments[-1].lines]
                alone = before and not segments[-1].notes
                if alone or len(before) > 3 or segments[-1].section:
                    segments.append(Segment())
                segments[-1].notes.append(begun)
            for x in range(line, end):
                if x not in hidden and (self.rows[x - 1].strip() or segments[-1].lines):
                    segments[-1].lines.append((x, colors[x - 1], marked.get(x)))
            while segments[-1].lines and not segments[-1].lines[-1][1].strip():
                segments[-1].lines.pop()
        return [x for x in segments if x.lines or x.notes or x.section]

    def marked(self, hidden: set[int]) -> dict[int, str]:
        """Lines of the statements below tags, of a block its head, with the tag at the first."""
        ends = {}
        for node in (x for x in ast.walk(self.tree) if isinstance(x, ast.stmt)):
            first = min(x.lineno for x in [node, *getattr(node, "decorator_list", [])])
            ends[first] = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
        found: dict[int, str] = {}
        for line, note in self.tags.items():
            while line in hidden or not self.rows[line - 1].strip():
                line += 1
            found |= dict.fromkeys(set(range(line + 1, ends.get(line, line) + 1)) - hidden, "")
            found[line] = f"{found.get(line, '')} {note.short}".strip()
        return found

    def box(self, note: Note, node: Any, lines: range, drawn: set[str]) -> dict[str, Any]:
        """A part of the picture: tags in some lines, and boxes of the functions named there."""
        usual = zip(reversed(node.args.args), reversed(node.args.defaults))  # update = ppo_update
        alias = {x.arg: y.id for x, y in usual if isinstance(y, ast.Name)}
        names = [x for x in ast.walk(node) if isinstance(x, ast.Name) and x.lineno in lines]
        names.sort(key=lambda x: (x.lineno, x.col_offset))
        inside = []
        for name in (alias.get(x.id, x.id) for x in names):
            inner = self.tops.get(name)
            if isinstance(inner, ast.FunctionDef) and name not in drawn:
                drawn.add(name)
                own = range(inner.lineno, inner.end_lineno + 1)
                inside.append(self.box(Note(slug(name), name), inner, own, drawn))
        tags = [x for line, x in self.tags.items() if line in lines]
        return {"note": note, "tags": tags, "inside": inside}

    def loop(self) -> list[dict[str, Any]]:
        """The picture: the stages of the training loop and what is done in them."""
        boxes, drawn, ends = [], set(), [*self.stages, len(self.rows)]
        for (line, note), end in zip(self.stages.items(), ends[1:]):
            node = next(x for x in self.tops.values() if line in range(x.lineno, x.end_lineno))
            lines = range(line, min(end, node.end_lineno + 1))
            boxes.append(self.box(note, node, lines, drawn))
        return boxes
