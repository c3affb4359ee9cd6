"""Where a changed copy of a script first computes something different.

Both train for two short iterations with the same seed, and for one more from their checkpoints.
After each statement, the variables that it may have changed are recorded (trace.py). The statements
of the two files are paired, and the first pair in time whose variables differ shows where to look:
everything before it is equal.
"""

import builtins
import collections
import contextlib
import dataclasses
import difflib
import functools
import itertools
import keyword
import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmark.lab import tiny_model, trace
from benchmark.lab.provenance import ROOT, BenchmarkError, git, source_at
from benchmark.lab.trace import RESUMED, Event, Parameters, Run, Script, Statement

# Smaller differences are rounding: relative to a number, to the largest of its array, and absolute:
# a mean of float32 whose terms nearly cancel, such as the policy loss, is not exact to 1e-7.
RELATIVE, OF_SCALE, ABSOLUTE = 1e-4, 1e-5, 1e-6
ITERATIONS = 2  # before the run goes on from its checkpoint
SIMILAR = 0.3  # the least share of lines that a copy and its original have in common
ROUNDS = 8  # differences that are told
SHOWN, LINES = 3, 16  # places in the source that are shown for each, and lines of each

# --- Which statements of two files are the same ---

# By the index of the original's statement: the copy's, and its names of the original's names.
Partners = dict[int, tuple[Statement, dict[str, str]]]


@dataclasses.dataclass(frozen=True)
class Change:
    """Neighboring statements that differ."""

    block: str  # the function or class that the first of them is in
    mine: list[Statement]
    theirs: list[Statement]
    line: int = 0  # of the copy, where the original's lines belong; 0: only it has the function
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # the copy's of the original's


def similarity(mine: list[str], theirs: list[str]) -> float:
    """Share of the lines of two files that they have in common, wherever these stand."""
    a, b = (collections.Counter(filter(None, map(str.strip, x))) for x in (mine, theirs))
    return 2 * (a & b).total() / (a.total() + b.total())


def pair(mine: Script, theirs: Script) -> tuple[Partners, list[Change]]:
    """Pair the statements of functions and classes, whatever their place, name or variables."""
    own, others = by_block(mine), by_block(theirs)
    new = {x: own[x] for x in own if x not in others}
    partners: Partners = {}
    changes: list[Change] = []
    for block, statements in others.items():
        likeness = {x: matcher(new[x], statements).ratio() for x in new if block not in own}
        best = max(likeness, key=likeness.__getitem__, default="")
        if best and likeness[best] > 0.5:  # it has another name
            own[block] = new.pop(best)
        if block in own:
            pair_statements(own[block], statements, partners, changes)
        else:
            changes.append(Change(block, [], statements, len(mine.lines) + 1))
    return partners, changes + [Change(x, new[x], []) for x in new]


def by_block(script: Script) -> dict[str, list[Statement]]:
    """The statements of each function and class, with all that is nested in it.

    So they stand together, and what only one file has nested there belongs to a place among them.
    """
    blocks: dict[str, list[Statement]] = {}
    for statement in script.statements:
        blocks.setdefault(statement.block.partition(".")[0], []).append(statement)
    return blocks


FIXED = {*keyword.kwlist, *dir(builtins)}  # words that are no names of variables


WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")


def vocabulary(statements: list[Statement]) -> set[str]:
    return FIXED.union(*(WORD.findall(x.text) for x in statements))


def matcher(mine: list[Statement], theirs: list[Statement]) -> difflib.SequenceMatcher:
    """Compares statements. A variable that only one side has may stand for any other."""
    both = vocabulary(mine) & vocabulary(theirs)
    texts = [
        [WORD.sub(lambda x: x[0] if x[0] in both else "_", y.text) for y in side]
        for side in (mine, theirs)
    ]
    return difflib.SequenceMatcher(None, *texts, autojunk=False)


def pair_statements(
    mine: list[Statement], theirs: list[Statement], partners: Partners, changes: list[Change]
) -> None:
    """Pair those of a block. Changed ones are a pair if they are alone or set the same.

    But not if only one of them is in a loop, since they are then executed at different times.
    """
    renamed: dict[str, str] = {}
    for kind, a, b, c, d in matcher(mine, theirs).get_opcodes():
        own, others = mine[a:b], theirs[c:d]
        surely = kind == "equal" or len(own) == len(others) == 1
        if kind != "equal":
            line = own[0].lines[0] if own else mine[a - 1].lines[1] + 1
            changes.append(Change((others or own)[0].block, own, others, line, renamed))
        for y in others:
            for k, x in enumerate(own):
                same = x.indent == y.indent and {*x.names} & {*y.names} - {"t"}
                if x.kind == y.kind and (surely or same):
                    in_place = zip(y.names, x.names) if len(y.names) == len(x.names) else ()
                    partners[y.index] = x, dict(in_place) | {n: n for n in y.names if n in x.names}
                    own = own[k + 1 :]
                    break
    known = vocabulary(mine)
    pairs = [x for y in theirs if y.index in partners for x in partners[y.index][1].items()]
    renamed.update((name, own) for name, own in pairs if name not in known)


# --- The first difference ---


def leaves(mine: Any, theirs: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The parts of two values that differ, by name."""
    if mine is theirs or mine is None or theirs is None:
        return
    if isinstance(mine, float) and isinstance(theirs, float) and mine == theirs:
        return  # at once, since there are many
    if isinstance(theirs, Parameters) != isinstance(mine, Parameters):  # one has no model at hand
        mine, theirs = (
            tuple(x.values()) if isinstance(x, Parameters) else x for x in (mine, theirs)
        )
    if isinstance(theirs, dict) and isinstance(mine, dict):
        link = " of " if isinstance(theirs, Parameters) else "."
        for key in theirs:
            if key in mine:
                yield from leaves(mine[key], theirs[key], f"{name}{link}{key}")
    elif isinstance(theirs, tuple) and isinstance(mine, tuple) and len(mine) == len(theirs):
        for k, (x, y) in enumerate(zip(mine, theirs)):
            yield from leaves(x, y, f"{name}[{k}]")
    elif any(isinstance(x, dict | tuple) for x in (mine, theirs)) or (
        np.shape(mine) != np.shape(theirs) or differing(mine, theirs).any()
    ):
        yield name, mine, theirs


def dimensions(x: Any) -> int:
    return getattr(x, "ndim", 0)


def differing(mine: Any, theirs: Any) -> np.ndarray:
    """Which entries of two arrays of a shape differ by more than rounding does."""
    a, b = np.asarray(mine, dtype=float), np.asarray(theirs, dtype=float)
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return ~np.isclose(a, b, RELATIVE, OF_SCALE * scale + ABSOLUTE, equal_nan=True)


def first_difference(mine: Run, theirs: Run) -> "Finding | None":
    """Walk through the original's events until one differs from that of the copy."""
    partners, changes = pair(mine.script, theirs.script)
    known = {x.index for x, _ in partners.values()}
    # Events of the copy, by statement and by the one that calls its function.
    waiting: dict[tuple[int, int | None], collections.deque[int]] = {}
    for k, event in enumerate(mine.events):
        caller = next((x.index for x in event.callers[:1] if x.index in known), None)
        waiting.setdefault((event.statement.index, caller), collections.deque()).append(k)
    at, equal = (0, 0), {}  # when any variable, and when each, was equal last
    for k, event in enumerate(theirs.events):
        partner, names = partners.get(event.statement.index, (None, {}))
        callers = (partners.get(x.index, (None,))[0] for x in event.callers[:1])
        key = partner and (partner.index, next((x.index for x in callers if x), None))
        if not waiting.get(key):
            continue
        at = waiting[key].popleft(), k
        values = mine.events[at[0]].values
        for name, value in event.values.items():
            own = values.get(names.get(name))
            if names.get(name) != name and dimensions(own) != dimensions(value):
                continue  # `reward` of a step is not `rewards` of all
            for part in leaves(own, value, name):
                return Finding(mine, theirs, changes, at, equal.get(name, (0, 0)), *part)
            equal[name] = at
    last = len(mine.events) - 1, at[1]
    if mine.error:
        return Finding(mine, theirs, changes, last, at)
    for name, *_ in leaves(mine.result, theirs.result, "result"):
        return Finding(mine, theirs, changes, last, at, name)
    return None


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first difference of two runs."""

    mine: Run
    theirs: Run
    all_changes: list[Change]  # of the source
    at: tuple[int, int]  # the positions of the two events that differ
    since: tuple[int, int]  # and of the last two at which it was equal
    name: str = ""  # the variable with its field or key, as in `adam.weights`
    own: Any = None  # its value in the copy
    original: Any = None  # None: all events are equal, but the run stops or ends differently

    @property
    def event(self) -> Event:
        return self.theirs.events[self.at[1]]

    @property
    def harmless(self) -> bool:
        """Whether the run is the same in the end, and what it logs and saves."""
        if self.mine.error or ", log and save" in self.event.phase:
            return False
        return not [*leaves(self.mine.result, self.theirs.result, "")]

    @property
    def constructor(self) -> str:
        """The `__init__` that is running, if there is one."""
        blocks = [x.block for x in (self.event.statement, *self.event.callers)]
        return next((x for x in reversed(blocks) if x.endswith("__init__")), "")

    @functools.cached_property
    def changes(self) -> list[Change]:
        """Those that can have caused the difference, the likeliest first."""
        ages: dict[Statement, float] = {}  # 0: executed now, 1: when both were equal
        for run, now, since in zip((self.mine, self.theirs), self.at, self.since):
            span = max(now - since, 1)
            ages |= {x.statement: (now - k) / span for k, x in enumerate(run.events[: now + 1])}
            if self.event.statement.kind == "FunctionDef":  # the caller computes the arguments
                ages |= dict.fromkeys(run.events[now].callers[:1], 0)
            if self.original is None:
                ages[run.script.at.get(run.line)] = 0

        def age(change: Change) -> float:
            return min(ages.get(x, math.inf) for x in change.mine + change.theirs)

        ordered = sorted(self.all_changes, key=age)
        constants = [x for x in ordered if x.block == ""]
        # This statement; all since both were equal; what is executed before everything.
        tiers = [x for x in ordered if age(x) == 0], [x for x in ordered if age(x) <= 1], constants
        chosen = next(filter(None, tiers), ordered)[:SHOWN]
        if self.constructor:  # half a network would not fit
            parts = [x for x in ordered if x.block.startswith(self.constructor)] + constants
            chosen += [x for x in parts if x not in chosen]
        return chosen

    @property
    def function(self) -> str:
        block = self.event.statement.block
        return block if block.endswith("__init__") else block.rpartition(".")[2]

    @property
    def brief(self) -> str:
        """What differs, in a few words."""
        if not self.name:
            line = self.mine.line and self.mine.script.numbers[self.mine.line - 1]
            return f"the copy stops in line {line} with {self.mine.error}"
        if self.original is None:
            return f"`{self.name}` at the end"
        link = "of" if self.event.statement.kind in ("FunctionDef", "Return") else "in"
        names = {"result": "the result", "condition": "a condition"}
        return f"{names.get(self.name, f'`{self.name}`')} {link} `{self.function}`"

    @property
    def what(self) -> str:
        """What differs, and by how much, in a sentence without a full stop."""
        text, kind, callers = self.brief, self.event.statement.kind, self.event.callers
        if not self.name:
            return text[0].upper() + text[1:]
        if self.original is None:
            return f"{text} differs, although all statements that both execute are equal"
        if kind == "Return":
            text = f"`{self.function}` gets the same arguments, but its {self.name}"
        if kind == "FunctionDef" and callers:
            caller = self.mine.events[self.at[0]].callers[0]
            text += f", called in line {self.mine.script.numbers[caller.lines[0] - 1]},"
        if self.constructor:
            text = f"`{self.constructor.removesuffix('.__init__')}` is built differently: {text}"
        text += f" {size(self.own, self.original)}"
        return text[0].upper() + text[1:]

    @property
    def common(self) -> str:
        """What the steps that differ have in common; may be empty."""
        iteration = re.match(r".*iteration \d+,", self.event.phase)
        known = ends(self.theirs, iteration[0]) if iteration else []
        arrays = isinstance(self.own, np.ndarray) and isinstance(self.original, np.ndarray)
        if not known or not arrays or self.own.shape != self.original.shape:
            return ""
        return common_steps(differing(self.own, self.original), self.event.values.get("t"), known)


def size(mine: Any, theirs: Any) -> str:
    """By how much it differs."""
    if isinstance(mine, dict | tuple) or isinstance(theirs, dict | tuple):
        return "has another length or form"
    if np.shape(mine) != np.shape(theirs):
        return f"has shape {np.shape(mine)}, in the original {np.shape(theirs)}"
    if not np.ndim(theirs):
        return f"is {number(mine)}, in the original {number(theirs)}"
    mask = differing(mine, theirs)
    at = tuple(np.argwhere(mask)[0].tolist())
    largest = np.abs(np.asarray(mine, float) - np.asarray(theirs, float))[mask].max()
    share = "all" if mask.all() else f"{mask.sum()} of {mask.size}"
    example = f"{[*at]} is {number(mine[at])}, in the original {number(theirs[at])}"
    return f"differs in {share} entries, by up to {largest:.2g}; the first, {example}"


def number(x: Any) -> str:
    return str(x) if isinstance(x, bool | np.bool_ | int | np.integer) else f"{x:.4g}"


# --- What the steps that differ have in common ---


def ends(theirs: Run, start: str) -> list[np.ndarray]:
    """Where episodes failed and were cut off, (T, N) each, in the phases that start so."""
    known: dict[str, np.ndarray] = {}
    for event in theirs.events:
        if event.phase.startswith(start):
            known |= {x: y for x, y in event.values.items() if x in ("terminated", "done")}
    if len(known) < 2 or np.ndim(known["terminated"]) != 2:
        return []
    failed, ended = known["terminated"] > 0, known["done"] > 0
    return [failed, ended & ~failed]


def kinds_of_steps(failed: np.ndarray, cut: np.ndarray) -> dict[str, np.ndarray]:
    """Sets of steps (T, N) by what they have in common."""
    step, env = np.indices(failed.shape)
    kinds = {"the first steps": step == 0, "all steps but the first": step > 0}
    kinds |= {f"the steps of environment {k}": env == k for k in range(failed.shape[1])}
    ways = {"fails": failed, "is cut off by the time limit": cut, "ends": failed | cut}
    for way, steps in ways.items():
        after = np.concatenate([np.zeros_like(steps[:1]), steps[:-1]])
        kinds[f"the steps with which an episode {way}"] = steps
        kinds[f"the first steps after an episode {way}"] = after
        kinds[f"the steps with which an episode {way}, and those after"] = steps ^ after
    return kinds | {"all steps that do not end an episode": ~(failed | cut)}


def common_steps(mask: np.ndarray, step: int | None, known: list[np.ndarray]) -> str:
    """What marked entries of an array have in common, if it is one of steps (T, N, ...)."""
    shape = known[0].shape
    if mask.shape[:1] == shape[1:] and step is not None:  # of all environments at this step
        mask = np.stack([mask if t == step else 0 * mask for t in range(shape[0])])
    if mask.shape[:1] == (math.prod(shape),):
        mask = mask.reshape(*shape, -1)
    if mask.shape[:2] != shape:
        return ""
    computed = slice(None if step is None else step + 1)
    mask = mask.reshape(*shape, -1).any(-1)[computed]
    kinds = kinds_of_steps(*known).items()
    return next((name for name, x in kinds if np.array_equal(x[computed], mask)), "")


# --- The command ---


def put_back(copy: Script, original: Script, changes: list[Change]) -> Script:
    """The copy with the original's lines in place of these changes."""
    lines, numbers = list(copy.lines), list(copy.numbers)
    for k, spaces in moves(copy, original, changes).items():
        lines[k] = " " * spaces + lines[k] if spaces > 0 else lines[k][-spaces:]
    # From the end on, so that lines before keep their place, and texts for one place their order.
    for x in reversed(sorted(changes, key=lambda x: x.line)):
        if x.line:
            here = span(x.mine) if x.mine else slice(x.line - 1, x.line - 1)
            new = original.lines[span(x.theirs)]
            new = [WORD.sub(lambda y, x=x: x.names.get(y[0], y[0]), line) for line in new]
            lines[here] = new
            numbers[here] = [numbers[min(here.start, len(numbers) - 1)]] * len(new)
    return Script(copy.path, "\n".join(lines) + "\n", numbers)


def moves(copy: Script, original: Script, changes: list[Change]) -> dict[int, int]:
    """By how many spaces lines of the copy move, where a loop or condition around them changes."""
    heads = [(copy, x) for change in changes for x in change.mine]
    heads += [(original, x) for change in changes for x in change.theirs]
    inside = {x for script, head in heads for x in body(script, head)}
    found = {}
    for index, (own, _) in pair(copy, original)[0].items():
        theirs = original.statements[index]
        if own in inside or theirs in inside:
            lines = range(own.lines[0] - 1, own.lines[1])
            found |= dict.fromkeys(lines, theirs.indent - own.indent)
    return found


def body(script: Script, head: Statement) -> list[Statement]:
    """What is inside of a loop or a condition, or of any other statement that has a body."""
    later = script.statements[head.index + 1 :]
    return [*itertools.takewhile(lambda x: x.indent > head.indent, later)]


def span(statements: list[Statement]) -> slice:
    return slice(statements[0].lines[0] - 1, statements[-1].lines[1]) if statements else slice(0)


def defaults_of(settings: type) -> dict[str, Any]:
    return {x.name: x.default for x in dataclasses.fields(settings)}


class Comparison:
    """A copy and its original, with the same settings, for so many iterations."""

    def __init__(
        self, original: Script, flags: list[str], copy: Script, iterations: int = ITERATIONS
    ) -> None:
        self.original, self.arrays = original, {}
        self.last: Script | None = None  # the copy as it is when nothing more is found
        self.why = ""  # the search has ended before
        own, self.defaults = trace.load(copy).Args, defaults_of(trace.load(original).Args)
        usual = self.defaults | {x: y for x, y in trace.SETTINGS.items() if x in self.defaults}
        if usual.get("env_id") == "HalfCheetah-v4":  # which never falls
            usual["env_id"] = "Hopper-v4"
        if usual.get("model") == "smollm2":  # which would take minutes
            usual["model"] = tiny_model.folder().name
        try:
            default = own(**{x: usual[x] for x in usual.keys() & defaults_of(own).keys()})
            given = tyro.cli(own, args=flags, default=default)
            steps = getattr(given, "num_steps", 0) * getattr(given, "num_envs", 0)
            length = {"total_timesteps": iterations * steps, "num_updates": iterations}
            length |= {"num_iterations": iterations}
            length = {x: y for x, y in length.items() if getattr(given, x, 0) == usual.get(x)}
            self.settings = usual | vars(dataclasses.replace(given, **length))
        except Exception as error:  # whatever it demands of its settings
            text = f"{copy.path.name} refuses the settings of a short run: {trace.told(error)}."
            raise BenchmarkError(text) from error
        with trace.finding_neighbors(copy):  # such as the environment that --env-id names
            self.theirs = trace.execute(original, self.settings, self.arrays)
        if self.theirs.error:
            raise BenchmarkError(f"{original.path.name}: {self.theirs.error}.")

    def repeated(self) -> Finding | None:
        """The first difference between two runs of the original, which there should not be."""
        again = trace.execute(self.original, self.settings, self.arrays)
        return first_difference(again, self.theirs)

    def findings(self, copy: Script) -> Iterator[Finding]:
        """One difference after the other, each with the original's lines in place of the others."""
        mine = trace.execute(copy, self.settings, self.arrays)
        self.why = "no further lines could be put back"
        for _ in range(ROUNDS):
            finding = first_difference(mine, self.theirs)
            if finding is None:
                self.last = mine.script
                return
            yield finding
            end = len(mine.script.lines)  # after it: what the copy lacks, which others may call
            chosen = [x for x in finding.all_changes if x in finding.changes or x.line > end]
            try:
                copy = put_back(mine.script, self.original, chosen)
                mine = trace.execute(copy, self.settings, self.arrays)
            except BenchmarkError:
                return
            fits = not mine.error or finding.mine.error
            if not fits or copy.lines == finding.mine.script.lines:
                return
        self.why = f"these are the first {ROUNDS}"

    def settings_of(self, copy: Script) -> list[str]:
        """Defaults of the copy that are not those of the original."""
        own = defaults_of(trace.load(copy).Args)
        names = [x for x in self.defaults if x in own and own[x] != self.defaults[x]]
        names = [x for x in names if own[x] is not dataclasses.MISSING]
        return [f"{x} is {own[x]}, in the original {self.defaults[x]}" for x in names]


def read(path: Path) -> Script:
    return Script(path.resolve(), text_of(path))


def originals(copy: Path) -> dict[Path, str]:
    """The scripts of the last commit, so that one of them may itself have been changed; where none
    is committed, all files next to them but the copy.
    """
    with contextlib.suppress(BenchmarkError, OSError):  # not in a repository; no git
        names = git("ls-tree", "--name-only", "HEAD", "./", "recipes/").splitlines()
        names = [x for x in names if re.fullmatch(r"(recipes/\w+_on_reviews|\w+)\.py", x)]
        if found := {ROOT / x: source_at("HEAD", x) for x in names}:
            return found
    files = sorted([*ROOT.glob("*.py"), *ROOT.glob("recipes/*_on_reviews.py")])
    files = [x for x in files if x.resolve() != copy.resolve()]
    return {x: text_of(x) for x in files}


def text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BenchmarkError(f"{path} is not a text file.") from error


def circumstances(settings: dict[str, Any], theirs: Run) -> str:
    """How both were trained."""
    if "env_id" not in settings:
        return "Both trained for a moment, with few samples and small batches."
    steps, envs, parts = settings["num_steps"], settings["num_envs"], iterations_of(theirs)
    more = sum(x.startswith(RESUMED) for x in parts)
    known = [x for part in parts if (x := ends(theirs, part))]
    failed, cut = (int(sum(x[k].sum() for x in known)) for k in (0, 1))
    text = (
        f"Both trained for {len(parts) - more} iterations of {steps} steps in {envs} environments "
        f"of {settings['env_id']}{', and for one more after --resume' * bool(more)}; "
        f"{failed} episodes failed and {cut} were cut off."
    )
    for number, what in ((failed, "fail"), (cut, "are cut off")):
        if not number:
            text += f"\nMistakes where episodes {what} cannot show: try another --env-id."
    return text


def iterations_of(run: Run) -> list[str]:
    """How the names of phases begin, for each iteration, as in "iteration 1,"."""
    found = (re.match(r".*iteration \d+,", x.phase) for x in run.events)
    return [*dict.fromkeys(x[0] for x in found if x)]


def equal_parts(phases: list[str]) -> Iterator[str]:
    """Parts of training that are equal, a line for those of an iteration."""
    parts = [re.fullmatch(rf"((?:{RESUMED})?(?:iteration \d+, )?)(.*)", x) for x in phases]
    for start, own in itertools.groupby(parts, lambda x: x[1]):
        text = start[:-2] + ": " * bool(start) + "; ".join(x[2] for x in own)
        yield textwrap.fill(f"  equal      {text}", 100, subsequent_indent=13 * " ")


def shown(change: Change, mine: Script, theirs: Script) -> list[str]:
    """The lines of a change that differ, with the numbers that they have in the files."""
    sides = ("-", change.theirs, theirs), ("+", change.mine, mine)
    places = [[k for x in y for k in range(x.lines[0] - 1, x.lines[1])] for _, y, _ in sides]
    texts = [[z.lines[k].strip() for k in x] for x, (_, _, z) in zip(places, sides)]
    codes = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    lines = []
    for (sign, _, script), place, start in zip(sides, places, (1, 3)):
        for code in (x for x in codes if x[0] != "equal"):
            for k in place[code[start] : code[start + 1]]:
                lines.append(f"{sign} {script.numbers[k]:>4} {script.lines[k]}")
    lines = [x for x in lines if not re.match(r". +\d+ *(#|$)", x)]
    return [*lines[:LINES], "       ..."] if len(lines) > LINES else lines


def told(finding: Finding) -> str:
    """A difference as text, with the lines of both files."""
    mine, theirs = finding.mine.script, finding.theirs.script
    end = " (the same in the end)" if finding.harmless else ""
    parts = [f"  DIFFERENT  {finding.event.phase}{end}\n\n{finding.what}."]
    if finding.common and not end:  # or it would explain what needs no explanation
        parts.append(f"These are {finding.common}.")
    if finding.changes:
        parts.append(f"\nCompare (- {theirs.path.name}, + {mine.path.name}):")
    for change in finding.changes[:SHOWN]:
        parts += [*shown(change, mine, theirs), ""]
    return "\n".join(parts).rstrip()


WITHOUT_EFFECT = """
These changes did nothing in {}: a bug in them would not show.
Either they mean the same, or so short a run does not reach them: try {}flags of the
script, or its tests."""


def without_effect(copy: Script, last: Script, original: Script, iterations: int) -> str:
    """The changes that are still in the copy when nothing more is found, as text."""
    left = {words(x) for x in pair(last, original)[1]}
    parts = [
        "\n".join(["", *shown(x, copy, original)])
        for x in pair(copy, original)[1]
        if words(x) in left
    ]
    if not parts:
        return ""
    length = f"{iterations} iterations" if iterations else "this short run"
    head = WITHOUT_EFFECT.format(length, f"--iterations {5 * iterations}, " * bool(iterations))
    more = [f"\n... and {len(parts) - ROUNDS} more places"] * (len(parts) > ROUNDS)
    return "\n".join([head, *parts[:ROUNDS], *more, ""])


def words(change: Change) -> tuple[str, ...]:
    return tuple(x.text for x in change.mine + change.theirs)


def run(path: Path, original_path: Path | None, iterations: int, flags: list[str]) -> int:
    """Compare, and print; 0: equal, 1: different."""
    copy = read(path)
    texts = {original_path: text_of(original_path)} if original_path else originals(path)
    likeness = {x: similarity(copy.lines, text.splitlines()) for x, text in texts.items()}
    closest = max(likeness, key=likeness.__getitem__)
    share = f"{likeness[closest]:.1%} of their lines agree"
    if likeness[closest] < SIMILAR:
        raise BenchmarkError(f"{path} is too unlike {closest.name}: only {share}.")
    original, version = Script(closest.resolve(), texts[closest]), ""
    if original.path == copy.path:
        version = " of the last commit"
        if original.lines == copy.lines:
            raise BenchmarkError(f"{path} is as in the last commit: add its original after it.")
    comparison = Comparison(original, flags, copy, iterations)
    theirs, settings = comparison.theirs, comparison.settings_of(copy)
    findings = comparison.findings(copy)
    finding = next(findings, None)
    chance = comparison.repeated() if finding else None
    repeats = chance.at[1] if chance else math.inf  # the events that a second run has, too
    if finding and finding.at[1] >= repeats:
        raise BenchmarkError(not_repeated(original, chance))
    print(f"{path} is compared with {original.path.name}{version}: {share}.")
    print(circumstances(comparison.settings, theirs))
    phases, count = [*dict.fromkeys(x.phase for x in theirs.events)], len(iterations_of(theirs))
    unseen = "" if finding else without_effect(copy, copy, original, count)
    print(unseen)
    for text in settings:
        print(f"  DIFFERENT  setting: {text} (with which both trained)")
    for line in equal_parts(phases[: phases.index(finding.event.phase)] if finding else phases):
        print(line)
    if finding is None:
        equal = "Everything else is equal." if unseen else "No difference."
        print(f"\n{'Only settings differ.' if settings else equal}")
        return 1 if settings else 0
    print(told(finding))
    print("\nWhat differs later may follow from this, or be a difference of its own.")
    harmless = finding.harmless
    if harmless:
        print("In the end, both have the same weights, metrics and episodes.")
    for finding in findings:
        if finding.at[1] >= repeats:
            print(f"\nThere may be other differences. {not_repeated(original, chance)}")
            return 1
        print(f"\nWith the original's lines there, the next difference is:\n\n{told(finding)}")
    if comparison.last:
        print("\nWith the original's lines there, both are equal.")
        print(without_effect(copy, comparison.last, original, count), end="")
    else:
        print(f"\nThere may be other differences: {comparison.why}.")
    return 0 if harmless and not settings else 1


def not_repeated(original: Script, chance: Finding) -> str:
    return (
        f"Two runs of {original.path.name} with the same seed differ, first in {chance.brief}: "
        "the environment does not repeat itself. Let the seed that it gets decide what is random, "
        "and keep nothing from one episode, or from one environment, to the next."
    )
