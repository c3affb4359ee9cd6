"""A script as segments of code with notes next to them, for `build.py`.

Everything is read from the script: tags, docstrings, banners, and which function calls which.
Formulas come from `templates/formulas.toml`.
"""

import ast
import dataclasses
import functools
import html
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import latex2mathml.converter
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from benchmark.evidence.tables import reference
from benchmark.evidence.tags import slug, tags_of
from benchmark.lab.provenance import ROOT

TEMPLATES = Path(__file__).resolve().parent / "templates"
END = "# === The algorithm ends here ==="
BANNER = re.compile(r"# === (.+?)(?:: .+)? ===$")
STAGE = re.compile(r" +# --- ([^:,]+)(?:[:,] (.+?))? ---$")
# What the brackets of tags name. A prefix holds for all files of its bracket.
PLACE = re.compile(r"(LHP: |DPO: |ppo2: |\[)?([\w/]+\.py) L(\d+)(?:-(\d+))?")
ORIGINALS = {
    "[": ("openai/baselines", "baselines/"),
    "LHP: ": ("openai/lm-human-preferences", "lm_human_preferences/"),
    "DPO: ": ("eric-mitchell/direct-preference-optimization", ""),
}
GROUP = 24  # lines of code that stay in view together on a laptop
# The reasons of these scripts' tags stand in another one.
HOME, SHORT = "ppo_continuous_action.py", "ppo_minimal.py"
HOMES = {
    SHORT: HOME,
    "ppo_vector_env.py": HOME,
    "grpo_minimal.py": "recipes/grpo_on_reviews.py",
    "recipes/grpo_on_reviews.py": "ppo_rlhf_toy.py",
}
FORMULAS = tomllib.loads((TEMPLATES / "formulas.toml").read_text())
SIGNS = {"Extra": "+", "Deviation": "≠"}


@dataclasses.dataclass
class Note:
    """The text next to code: a function's docstring, a tag's sentence, a stage of the loop."""

    anchor: str
    title: str
    label: str = ""  # of a tag: Detail 8 of 37, Extra, Deviation
    short: str = ""  # of a tag: the number of a detail, or a sign
    sentence: str = ""
    text: str = ""  # HTML
    formula: str = ""  # MathML
    settings: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    source: str = ""  # HTML


@dataclasses.dataclass
class Segment:
    """Lines of code below their notes; or a title, above the imports or a section."""

    section: str = ""
    notes: list[Note] = dataclasses.field(default_factory=list)
    # Number, HTML, and the notes of the tags whose statements it belongs to.
    lines: list[tuple[int, str, "Marks"]] = dataclasses.field(default_factory=list)


class Marks(NamedTuple):
    """The notes that a line of code belongs to."""

    begins: list[Note]
    goes_on: list[Note]


@functools.cache
def formula(script: str, name: str) -> str:
    """MathML of a function, tag or stage of a script, a line for each of its formulas."""
    found = FORMULAS.get(f"{script}: {name}") or FORMULAS.get(name) or ()
    lines = (found,) if isinstance(found, str) else found
    text = "\n".join(latex2mathml.converter.convert(x, display="block") for x in lines)
    text = re.sub(r"&#x(\w+);", lambda x: html.escape(chr(int(x[1], 16))), text)
    words = re.compile(r'(?:<mi mathvariant="normal">\w</mi>){2,}')
    text = words.sub(lambda x: f"<mi>{re.sub('<.*?>', '', x[0])}</mi>", text)
    text = re.sub(r"(<mi>(?:log|argmax|exp)</mi>)(?!<mo)", r'\1<mspace width="0.17em"/>', text)
    return text.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "")


def colored(code: str, linked: Iterable[str] = ()) -> list[str]:
    """Lines of Python as HTML, with names as links; Pygments' frequent classes are short tags."""
    text = highlight(code, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    names = re.compile(rf'(?<!\.</span>)<span class="n">({"|".join(linked) or "(?!)"})</span>')
    text = names.sub(lambda x: f'<a href="#{slug(x[1])}">{x[1]}</a>', text)
    text = re.sub(r'<span class="(?:n|p|o|w|nb|bp)">(.*?)</span>', r"\1", text)
    for classes, tag in (("k|kn|kc|ow", "b"), ("mi|mf", "i"), ("c1", "em")):
        text = re.sub(rf'<span class="(?:{classes})">(.*?)</span>', rf"<{tag}>\1</{tag}>", text)
    return text.split("\n")


@functools.cache
def address(series: str, path: str, first: str, last: str | None) -> str:
    """Lines of the original code on GitHub; a ValueError if that commit has no such lines."""
    repository, root = ORIGINALS[series]
    files = reference("original_files")
    files = files[files["repository"] == repository].set_index("path")
    names = [x for x in files.index if x == root + path]
    names = names or [x for x in files.index if x.endswith("/" + path)]
    if len(names) != 1 or int(last or first) > files["lines"][names[0]]:
        raise ValueError(f"{repository} has no {path} with a line {last or first}.")
    commit, lines = files["commit"][names[0]], f"L{first}-L{last}" if last else f"L{first}"
    return f"https://github.com/{repository}/blob/{commit}/{names[0]}#{lines}"


def original(text: str) -> str:
    """Text as HTML, in which lines of the original code are links."""
    series = "["

    def link(match: re.Match) -> str:
        nonlocal series
        prefix, *place = match.groups()
        series = prefix if prefix in ORIGINALS else "[" if prefix else series
        shown = match[0].removeprefix("[")
        return "[" * (prefix == "[") + f'<a href="{address(series, *place)}">{shown}</a>'

    return PLACE.sub(link, html.escape(text, quote=False))


def prose(text: str) -> str:
    """A docstring as HTML: paragraphs, lists, code in backticks or indented, papers as links."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", original(text))
    text = re.sub(r"arXiv\s+([\d.]+\d)", r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', text)
    found = []
    for part in (x.strip("\n") for x in re.split(r"\n\s*\n", text) if x.strip()):
        before, *items = re.split(r"^- ", part, flags=re.MULTILINE)
        if part.startswith("    "):
            found.append(f"<pre>{textwrap.dedent(part)}</pre>")
        elif items:
            rows = "".join(f"<li>{x.strip()}</li>" for x in items)
            found.append(f"<p>{before.strip()}</p><ul>{rows}</ul>")
        else:
            found.append(f"<p>{part.strip()}</p>")
    return "\n".join(found)


class Recipe(NamedTuple):
    """A file of `recipes/`: its docstring, and the other lines as code without notes."""

    name: str
    about: str  # the docstring's first sentence
    doc: str
    lines: list[tuple[int, str, Marks]]


def recipe(path: Path) -> Recipe:
    text = path.read_text()
    tree = ast.parse(text)
    doc, string = ast.get_docstring(tree), tree.body[0]
    first = string.end_lineno + 2  # below an empty line
    kept = [*range(1, string.lineno), *range(first, text.count("\n") + 1)]
    colors = colored(text)
    lines = [(x, colors[x - 1], Marks([], [])) for x in kept]
    return Recipe(path.stem, doc.partition("\n")[0], doc, lines)


class Source:
    """A script, and its segments up to the line where its algorithm ends."""

    def __init__(self, name: str) -> None:
        self.name, whole = name, (ROOT / name).read_text()
        self.text = whole.partition(END)[0]
        self.rows, self.below = self.text.splitlines(), whole.count("\n") - self.text.count("\n")
        self.tree, home = ast.parse(whole), Source(HOMES[name]) if name in HOMES else None
        self.doc = ast.get_docstring(self.tree)
        named = {x.name: x for x in self.tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef)}
        self.tops = {x: y for x, y in named.items() if y.lineno <= len(self.rows)}
        self.docs = {x: ast.get_docstring(y) or "" for x, y in named.items() if x != "Args"}
        for title in self.tops.keys() & home.docs.keys() - {"train"} if home else ():
            self.docs[title] = self.docs[title] or home.docs[title].partition("\n\n")[0]
        self.places = {x: f"L{y.lineno}-L{y.end_lineno}" for x, y in named.items()}
        fields = [x for x in self.tops["Args"].body if isinstance(x, ast.AnnAssign)]
        self.defaults = {x.target.id: ast.unparse(x.value) for x in fields if x.value}
        self.tags, self.stages = dict(self.find_tags(home)), dict(self.find_stages())
        # Twice indented: in the loop, not before it.
        self.loop = [y for x, y in self.stages.items() if self.rows[x - 1].startswith(" " * 8)]
        self.segments = self.split()

    def find_tags(self, home: "Source | None") -> Iterator[tuple[int, Note]]:
        """Notes of tags by their lines; sentences and sources may stand in another script."""
        self.known = dict(home.known) if home else {}
        for x in home.tags.values() if home else ():
            self.known |= {y: x for y in (x.title, x.label.partition(" of ")[0])}
        for tag in tags_of(self.text):
            own, _, total = tag.number.partition("/")
            label = f"Detail {own}" + f" of {total}" * bool(total) if own else tag.kind
            same = self.known.get(tag.title) or self.known.get(f"Detail {own}") or Note("", "")
            sentence, sign = tag.sentence or same.sentence, own or SIGNS[tag.kind]
            note = Note(tag.anchor, tag.title, label, sign, sentence)
            note.source = original(tag.source) or same.source
            note.formula = formula(self.name, tag.title)
            names = [x.removeprefix("not ") for x in tag.settings]
            note.settings = [(x, self.defaults[x]) for x in names if x in self.defaults]
            yield tag.line, note

    def find_stages(self) -> Iterator[tuple[int, Note]]:
        """Notes of the parts of the training loop, which banners divide, by their lines."""
        for line, match in enumerate(map(STAGE.match, self.rows), 1):
            if match and line > self.tops["Args"].end_lineno:
                title, sentence = match.groups("")
                yield line, Note(slug(f"stage {title}"), title, sentence=sentence)

    def split(self) -> list[Segment]:
        """All segments in the order of the lines."""
        docs = [x.body[0] for x in self.tops.values() if x.name != "Args" and ast.get_docstring(x)]
        hidden = {x for y in docs for x in range(y.lineno, y.end_lineno + 1)}
        hidden |= {*range(1, self.tree.body[0].end_lineno + 1), *self.stages, *self.tags}
        hidden |= {x.line + 1 for x in tags_of(self.text) if x.sentence}
        imports = [x for x in self.tree.body if isinstance(x, ast.Import | ast.ImportFrom)]
        cuts: list[tuple[int, Segment | Note]] = [(imports[0].lineno, Segment("Imports"))]
        cuts.append((imports[-1].end_lineno + 1, Segment()))
        for name, node in self.tops.items():
            note = Note(slug(name), name, formula=formula(self.name, name))
            note.text = prose(self.docs.get(name, ""))
            first = min(x.lineno for x in [node, *node.decorator_list])
            while re.match(r"# (?!===)", self.rows[first - 2]):  # comments above belong to it
                first -= 1
            cuts += [(first, note), (node.end_lineno + 1, Segment())]
        for line, match in enumerate(map(BANNER.match, self.rows), 1):
            if match:
                hidden.add(line)
                cuts += [(line, Segment(match[1])), (line + 1, Segment())]
        cuts = sorted([*cuts, *self.stages.items(), *self.tags.items()], key=lambda x: x[0])
        marked, colors = self.marked(hidden), colored(self.text, self.tops.keys() - {"Args"})
        segments: list[Segment] = []
        for (line, begun), end in zip(cuts, [*(x for x, _ in cuts[1:]), len(self.rows) + 1]):
            if isinstance(begun, Segment) or segments[-1].lines:
                segments.append(begun if isinstance(begun, Segment) else Segment())
            if isinstance(begun, Note):
                segments[-1].notes.append(begun)
            for x in range(line, end):
                if x not in hidden and (self.rows[x - 1].strip() or segments[-1].lines):
                    marks = marked.get(x, Marks([], []))
                    segments[-1].lines.append((x, colors[x - 1], marks))
            while segments[-1].lines and not segments[-1].lines[-1][1].strip():
                segments[-1].lines.pop()
        return [x for x in segments if x.lines or x.notes or x.section]

    def marked(self, hidden: set[int]) -> dict[int, Marks]:
        """Lines of the statements below tags, of a block its head."""
        found: dict[int, Marks] = {}
        statements = [x for x in ast.walk(self.tree) if isinstance(x, ast.stmt)]
        for line, note in self.tags.items():
            node = min((x for x in statements if x.lineno > line), key=lambda x: x.lineno)
            end = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            for x in {*range(node.lineno, end + 1)} - hidden:
                marks = found.setdefault(x, Marks([], []))
                (marks.begins if x == node.lineno else marks.goes_on).append(note)
        return found

    def groups(self) -> Iterator[list[Segment]]:
        """Segments whose code stays in view together while their notes scroll past it."""
        group: list[Segment] = []
        for segment in self.segments:
            begins = not segment.notes or not segment.notes[0].label
            long = sum(len(x.lines) for x in [*group, segment]) > GROUP
            if group and (begins or long or segment.section or group[-1].section):
                yield group
                group = []
            group.append(segment)
        yield group
