"""Where a changed copy of a script first computes something else than the original.

Both train for two short iterations with the same seed. After each statement, the variables that it
may have changed are recorded (trace.py). The statements of the two files are paired, and the first
pair in time whose variables differ shows where to look: all before is equal, and all that comes
later follows from it.
"""

import ast
import collections
import dataclasses
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmark.lab import trace
from benchmark.lab.provenance import ROOT, BenchmarkError
from benchmark.lab.trace import Run, Script, Statement

# Smaller differences are rounding: relative to a number, to the largest of its array, and absolute.
RELATIVE, OF_SCALE, ABSOLUTE = 1e-4, 1e-5, 1e-7
SIMILAR = 0.4  # share of statements that a copy has in common with its original, at least
ROUNDS = 8  # differences that are told
SHOWN, LINES = 3, 16  # places in the source that are shown for each, and lines of each
EARLIER = 0.9  # a copy with a smaller share may be one of an earlier version


# --- Which statements of two files are the same ---


@dataclasses.dataclass(frozen=True)
class Change:
    """Neighboring statements that differ."""

    block: str  # of the original
    mine: tuple[Statement, ...]
    theirs: tuple[Statement, ...]


@dataclasses.dataclass(frozen=True)
class Pairing:
    """Statements of the copy and of the original that do the same."""

    partner: dict[int, Statement]  # of the copy, by the index of the original's
    names: dict[int, dict[str, str]]  # the copy's names of the original's variables there
    changes: list[Change]


def similarity(mine: Script, theirs: Script) -> float:
    """Share of the statements of the two that they have in common."""
    a, b = (collections.Counter(x.text for x in y.statements) for y in (mine, theirs))
    return 2 * (a & b).total() / (a.total() + b.total())


def by_block(script: Script) -> dict[str, list[Statement]]:
    """The statements of each function; what is outside of functions comes by class."""
    blocks: dict[str, list[Statement]] = {}
    for statement in script.statements:
        blocks.setdefault(statement.block, []).append(statement)
    return blocks


def renamed(text: str, names: dict[str, str]) -> str:
    """The text with other names of variables."""
    if not names:
        return text
    pattern = r"(?<![.\w])(" + "|".join(map(re.escape, names)) + r")\b"
    return re.sub(pattern, lambda x: names[x[0]], text)


def ratio(mine: list[Statement], theirs: list[Statement]) -> float:
    texts = [[x.text for x in y] for y in (mine, theirs)]
    return difflib.SequenceMatcher(None, *texts, autojunk=False).ratio()


def pair(mine: Script, theirs: Script) -> Pairing:
    """Pair the statements of each function, whatever its place, variables or comments."""
    ours, others = by_block(mine), by_block(theirs)
    matches = {x: x for x in others if x in ours and ratio(ours[x], others[x]) > 0.3}
    left = [x for x in ours if x not in matches]
    for name in [x for x in others if x not in matches]:  # functions with another name
        best = max(left, key=lambda x: ratio(ours[x], others[name]), default=None)
        if best is not None and ratio(ours[best], others[name]) > 0.5:
            matches[name] = best
            left.remove(best)
    functions = {y: x for x, y in matches.items() if x != y and "." not in x + y}
    result = Pairing({}, {}, [])
    for name, own in matches.items():
        pair_blocks(name, ours[own], others[name], functions, mine, theirs, result)
    for name in [x for x in others if x not in matches]:
        result.changes.append(Change(name, (), tuple(others[name])))
    for name in left:
        result.changes.append(Change(name, tuple(ours[name]), ()))
    return result


def pair_blocks(
    block: str,
    mine: list[Statement],
    theirs: list[Statement],
    functions: dict[str, str],
    script: Script,
    original: Script,
    result: Pairing,
) -> None:
    """Pair the statements of a function with those of another."""
    own, known = script.variables.get(mine[0].block, set()), original.variables.get(block, set())
    names = functions | new_names(mine, theirs, own, known)
    texts = [renamed(x.text, names) for x in mine], [x.text for x in theirs]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    back = {y: x for x, y in names.items()}
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            pairs = zip(mine[a:b], theirs[c:d])
        else:
            result.changes.append(Change(block, tuple(mine[a:b]), tuple(theirs[c:d])))
            pairs = pair_changed(mine[a:b], theirs[c:d], names)
        for x, y in pairs:
            result.partner[y.index], result.names[y.index] = x, back


def new_names(
    mine: list[Statement], theirs: list[Statement], own: set[str], known: set[str]
) -> dict[str, str]:
    """The original's names of variables that have another one in the copy."""
    if not own - known:
        return {}

    def words(statements: list[Statement], variables: set[str]) -> list[list[str]]:
        pattern = re.compile(r"(?<![.\w])(" + "|".join(map(re.escape, sorted(variables))) + r")\b")
        found = [pattern.split(x.text) for x in statements]
        return [["".join(x[::2]), *x[1::2]] for x in found]  # what is left, then the variables

    a, b = words(mine, own or {"_"}), words(theirs, known or {"_"})
    votes: dict[str, collections.Counter] = {}
    matcher = difflib.SequenceMatcher(None, [x[0] for x in a], [x[0] for x in b], autojunk=False)
    for block in matcher.get_matching_blocks():
        for x, y in zip(a[block.a :][: block.size], b[block.b :][: block.size]):
            for before, after in zip(x[1:], y[1:]):
                if before not in known and after not in own:
                    votes.setdefault(before, collections.Counter())[after] += 1
    return {x: y.most_common(1)[0][0] for x, y in votes.items()}


def pair_changed(
    mine: list[Statement], theirs: list[Statement], names: dict[str, str]
) -> list[tuple[Statement, Statement]]:
    """Pair what has changed, if it is of the same kind and sets the same variables."""
    pairs, rest = [], list(mine)
    for other in theirs:
        for x in rest:
            set_here = {names.get(y, y) for y in x.names}
            alike = set_here & {*other.names} or len(mine) == len(theirs) == 1
            if x.kind == other.kind and alike:
                pairs.append((x, other))
                rest = rest[rest.index(x) + 1 :]
                break
    return pairs


# --- The first difference ---


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first pair of events that differ."""

    mine: int  # position in the events of the copy
    theirs: int
    names: tuple[str, ...]  # of variables that differ, as in the original
    first: str  # of these, with the field or key, as in `adam.weights`
    values: tuple[Any, Any]  # of that, of the copy and of the original
    problem: str = ""  # instead: what else differs
    equal_results: bool = False  # whether `train` returns the same


def leaves(mine: Any, theirs: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The parts of two values that differ, by name."""
    if mine is theirs or mine is None or theirs is None:
        return
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for key in theirs:
            if key in mine:
                yield from leaves(mine[key], theirs[key], f"{name}.{key}")
    elif isinstance(theirs, tuple) and isinstance(mine, tuple) and len(mine) == len(theirs):
        for k, (x, y) in enumerate(zip(mine, theirs)):
            yield from leaves(x, y, f"{name}[{k}]")
    elif any(isinstance(x, (dict, tuple)) for x in (mine, theirs)) or (
        np.shape(mine) != np.shape(theirs) or differing(mine, theirs).any()
    ):
        yield name, mine, theirs


def differing(mine: Any, theirs: Any) -> np.ndarray:
    """Which entries of two arrays of a shape differ by more than rounding does."""
    a, b = np.asarray(mine, dtype=float), np.asarray(theirs, dtype=float)
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):  # inf - inf
        close = np.abs(a - b) <= RELATIVE * np.abs(b) + OF_SCALE * scale + ABSOLUTE
    return ~(close | (a == b) | (np.isnan(a) & np.isnan(b)))


def first_difference(mine: Run, theirs: Run, pairing: Pairing) -> Difference | None:
    """Walk through the original's events until one differs from that of the copy."""
    where: dict[int, list[int]] = {}
    for k, event in enumerate(mine.events):
        where.setdefault(event.statement.index, []).append(k)
    times: collections.Counter = collections.Counter()
    latest, missing = 0, None
    for k, event in enumerate(theirs.events):
        index = event.statement.index
        if (partner := pairing.partner.get(index)) is None:
            continue
        occurrences = where.get(partner.index, [])
        if times[index] >= len(occurrences):
            missing = (latest, k) if missing is None else missing
            continue
        latest = occurrences[times[index]]
        times[index] += 1
        other, names = mine.events[latest].values, pairing.names[index]
        found = []
        for name, value in event.values.items():
            own = names.get(name, name)
            if own not in other and len(other) == len(event.values):  # by position
                own = [*other][[*event.values].index(name)]
            if own in other:
                found += [(name, *x) for x in leaves(other[own], value, name)]
        if found:
            every = tuple(dict.fromkeys(x[0] for x in found))
            return Difference(latest, k, every, found[0][1], found[0][2:])
    position = missing or (len(mine.events) - 1, len(theirs.events) - 1)
    if mine.error:
        what = f"The copy stops with {trace.told(mine.error)}"
        return Difference(*position, (), "", (None, None), what)
    if missing and [*leaves(mine.result, theirs.result, "")]:
        what = "The copy executes this less often"
        return Difference(*position, (), "", (None, None), what)
    return None


def places(found: Difference, mine: Run, theirs: Run, pairing: Pairing) -> list[Change]:
    """The changes of the source that can have caused the difference, the likeliest first."""
    event = theirs.events[found.theirs]
    direct = [x for x in pairing.changes if event.statement in x.theirs]
    if direct:
        return direct
    start = last_equal(found, theirs)
    begin = matching_start(start, mine, theirs, pairing, found)
    mine_last = last_times(mine, begin, found.mine)
    theirs_last = last_times(theirs, start, found.theirs)
    recent = []  # with how many events there were until the difference
    for change in pairing.changes:
        ages = [found.mine - mine_last[x.index] for x in change.mine if x.index in mine_last]
        ages += [
            found.theirs - theirs_last[x.index] for x in change.theirs if x.index in theirs_last
        ]
        if ages:
            recent.append((min(ages), change))
    chosen = [x for _, x in sorted(recent, key=lambda pair: pair[0])]
    named = [x for x in chosen if mentions(x, found.names)]
    return named or chosen or [x for x in pairing.changes if is_constant(x)] or pairing.changes


def last_times(run: Run, start: int, stop: int) -> dict[int, int]:
    """When each statement was executed last, between two events."""
    return {run.events[k].statement.index: k for k in range(start, stop + 1)}


def mentions(change: Change, names: tuple[str, ...]) -> bool:
    texts = " ".join(x.text for x in (*change.mine, *change.theirs))
    return any(re.search(rf"\b{re.escape(x)}\b", texts) for x in names)


def is_constant(change: Change) -> bool:
    return all(x.kind == "declare" and x.block == "" for x in (*change.mine, *change.theirs))


def last_equal(found: Difference, theirs: Run) -> int:
    """The latest event at which what differs was equal, or the start."""
    for k in range(found.theirs - 1, -1, -1):
        event = theirs.events[k]
        if any(x in event.values and event.values[x] is not None for x in found.names):
            return k
    return 0


def matching_start(start: int, mine: Run, theirs: Run, pairing: Pairing, found: Difference) -> int:
    """The event of the copy at the same time as one of the original's, or somewhat before it."""
    while start > 0:
        event = theirs.events[start]
        partner = pairing.partner.get(event.statement.index)
        if partner:
            number = sum(x.statement is event.statement for x in theirs.events[: start + 1])
            for k, x in enumerate(mine.events[: found.mine + 1]):
                number -= x.statement is partner
                if number == 0:
                    return k
        start -= 1
    return 0


# --- What the entries that differ have in common ---


def ends(theirs: Run, until: int) -> dict[str, np.ndarray]:
    """Where episodes failed or were cut off, as far as is known at an event: (T, N) each."""
    known: dict[str, np.ndarray] = {}
    for event in theirs.events[: until + 1]:
        for name in ("terminated", "truncated", "done"):
            value = event.values.get(name)
            if isinstance(value, np.ndarray) and value.ndim == 2:
                known[name] = value.astype(bool)
    if "done" in known:
        known.setdefault("truncated", known["done"] & ~known["terminated"])
    return known


def steps_so_far(theirs: Run, position: int, total: int) -> tuple[int, slice]:
    """The step at which the loop of an event is, and the steps that it has come to.

    -1 and all steps, if the event is not in a loop over steps.
    """
    event, script = theirs.events[position], theirs.script
    line, numbers = event.statement.lines[0], []
    for other in reversed(theirs.events[:position]):
        loop = other.statement
        if loop.index not in script.loops or loop.index in script.training_loops:
            continue
        if other.call is event.call and loop.lines[0] < line <= script.loops[loop.index]:
            number = next(iter(other.values.values()), None)
            if type(number) is int and number < total:
                numbers.append(number)
        if len(numbers) == 2:
            break
    if not numbers:
        return -1, slice(None)
    backwards = numbers[0] < numbers[1] if len(numbers) == 2 else numbers[0] > total // 2
    return numbers[0], slice(numbers[0], None) if backwards else slice(numbers[0] + 1)


def later(x: np.ndarray) -> np.ndarray:
    """The steps that follow those."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def kinds_of_steps(falls: np.ndarray, limits: np.ndarray) -> dict[str, np.ndarray]:
    """Sets of steps (T, N) by what they have in common."""
    either, none = falls | limits, np.zeros_like(falls)
    first, last = none.copy(), none.copy()
    first[:1], last[-1:] = True, True
    kinds = {"all steps": ~none, "all steps but the first": ~first, "all but the last": ~last}
    kinds |= {"the first step": first, "the last step": last}
    for k in range(falls.shape[1]):
        own = none.copy()
        own[:, k] = True
        kinds[f"all steps of environment {k}"] = own
    endings = {"fail": falls, "are cut off by the time limit": limits, "end": either}
    for name, x in endings.items():
        singular = {"fail": "fails", "end": "ends"}.get(name, "is cut off by the time limit")
        kinds[f"the steps with which an episode {singular}"] = x
        kinds[f"the first steps after an episode {name.replace('are', 'was')}"] = later(x)
        kinds[f"the steps with which an episode {singular}, and those after"] = x ^ later(x)
        kinds[f"the steps of episodes that {name}"] = before_ends(x, either)
    kinds["all steps that do not end an episode"] = ~either
    for name, x in list(kinds.items())[5 + falls.shape[1] :]:
        since = np.maximum.accumulate(x.any(1))[:, None] & ~none
        kinds[f"all steps since the first of {name}"] = since
    return kinds


def before_ends(chosen: np.ndarray, either: np.ndarray) -> np.ndarray:
    """The steps of episodes whose last one is chosen."""
    result = np.zeros_like(chosen)
    for t in reversed(range(len(chosen))):
        following = result[t + 1] if t + 1 < len(chosen) else False
        result[t] = np.where(either[t], chosen[t], following)
    return result


def in_common(mask: np.ndarray, kinds: dict[str, np.ndarray], seen: slice) -> str:
    """What marked steps (T, N) have in common, among those that have been computed."""
    mask = mask[seen]
    kinds = {name: x[seen] for name, x in kinds.items()}
    for name, x in kinds.items():
        if np.array_equal(mask, x):
            return name
    around = {k: x for k, x in kinds.items() if not (mask & ~x).any() and x.mean() < 0.7}
    if around:
        name = min(around, key=lambda x: around[x].sum())
        if mask.sum() > 1 and mask.sum() * 4 >= around[name].sum():
            return f"{mask.sum()} of {name}"
    return ""


def steps(found: Difference, theirs: Run) -> tuple[np.ndarray, slice] | None:
    """Which entries differ, by step and environment (T, N, ...), or (T + 1, N, ...)."""
    known = ends(theirs, found.theirs)
    mine, other = found.values
    if len(known) < 2 or not all(isinstance(x, np.ndarray) for x in found.values):
        return None
    if mine.shape != other.shape:
        return None
    shape = known["terminated"].shape
    mask = differing(mine, other)
    step, seen = steps_so_far(theirs, found.theirs, shape[0])
    if mask.shape[:2] in (shape, (shape[0] + 1, shape[1])):
        return mask, seen
    if mask.shape[:1] == (shape[0] * shape[1],):
        return mask.reshape(*shape, *mask.shape[1:]), seen
    if mask.shape[:1] == shape[1:] and step >= 0:  # what all environments have at this step
        grid = np.zeros((*shape, *mask.shape[1:]), bool)
        grid[step] = mask
        return grid, seen
    return None


def common_steps(found: Difference, theirs: Run) -> str:
    """What the steps that differ have in common, if the array is one of steps."""
    result = steps(found, theirs)
    if result is None:
        return ""
    known = ends(theirs, found.theirs)
    mask, seen = result
    mask = mask.reshape(*mask.shape[:2], -1).any(-1)
    kinds = kinds_of_steps(known["terminated"], known["truncated"])
    if len(mask) > len(known["terminated"]):  # the first row is from before the first step
        text = in_common(mask[1:], kinds, seen)
        return text and f"what follows {text}"
    return in_common(mask, kinds, seen)


# --- The report ---


def size(found: Difference) -> str:
    """By how much it differs."""
    mine, theirs = found.values
    if isinstance(mine, (dict, tuple)) or isinstance(theirs, (dict, tuple)):
        return "has another length or form"
    if np.shape(mine) != np.shape(theirs):
        return f"has shape {np.shape(mine)}, in the original {np.shape(theirs)}"
    if not np.ndim(theirs):
        return f"is {number(mine)}, in the original {number(theirs)}"
    mask = differing(mine, theirs)
    at = tuple(np.argwhere(mask)[0].tolist())
    largest = np.abs(np.asarray(mine, float) - np.asarray(theirs, float))[mask].max()
    share = "all" if mask.all() else f"{mask.sum()} of {mask.size}"
    index = ", ".join(map(str, at))
    example = f"[{index}] is {number(mine[at])}, in the original {number(theirs[at])}"
    return f"differs in {share} entries, by up to {largest:.2g}; the first, {example}"


def number(x: Any) -> str:
    return str(x) if isinstance(x, (bool, np.bool_, int, np.integer)) else f"{x:.4g}"


def function_of(block: str) -> str:
    return block.rpartition(".")[2] if "__init__" not in block else block


def headline(found: Difference, mine: Run, theirs: Run) -> str:
    """What differs first, in a sentence without a full stop."""
    event = theirs.events[found.theirs]
    kind, block = event.statement.kind, event.statement.block
    if found.problem:
        place = f"{theirs.script.path.name} line {event.statement.lines[0]}"
        return f"{found.problem} ({place})"
    amount = size(found)
    if kind == "enter":
        own = mine.events[found.mine].call
        call = f" in line {own.line}" if own.line else ""
        return f"`{function_of(block)}` is called{call} with another `{found.first}`: it {amount}"
    if kind == "return":
        name = f"Its {found.first}" if found.first != "result" else "It"
        what = "gets the same arguments and returns something else"
        return f"`{function_of(block)}` {what}. {name} {amount}"
    if kind == "if":
        return f"A condition in `{function_of(block)}` {amount}"
    return f"`{found.first}` in `{function_of(block)}` {amount}"


def brief(found: Difference, theirs: Run) -> str:
    """What differs first, in a few words."""
    statement = theirs.events[found.theirs].statement
    function = f"`{function_of(statement.block)}`"
    if found.problem:
        return found.problem
    forms = {"return": f"the result of {function}", "if": f"a condition in {function}"}
    default = f"`{found.first}` {'of' if statement.kind == 'enter' else 'in'} {function}"
    return forms.get(statement.kind, default)


def where(phase: tuple[int, str]) -> str:
    iteration, name = phase
    return f"iteration {iteration}, {name}" if iteration else name


def equal_phases(found: Difference | None, theirs: Run) -> dict[tuple[int, str], list[str]]:
    """The parts of training before the difference, and the arrays that are equal in them."""
    last = theirs.events[found.theirs].phase if found else None
    phases: dict[tuple[int, str], list[str]] = {}
    for event in theirs.events:
        if event.phase == last:
            break
        if "." in event.phase[1]:  # a decorator of `train`
            continue
        names = phases.setdefault(event.phase, [])
        block = event.statement.block
        if theirs.script.banner(block, event.statement.lines[0]) or block == event.phase[1]:
            for name, value in event.values.items():
                if isinstance(value, (np.ndarray, tuple, dict)) and value is not None:
                    names += [name] * (name not in names)
    return phases


def shown(change: Change, mine: Script, theirs: Script) -> list[str]:
    """The lines of a change, as a diff with line numbers."""
    lines = []
    for sign, statements, script in (("-", change.theirs, theirs), ("+", change.mine, mine)):
        for x in statements:
            for k in range(x.lines[0], x.lines[1] + 1):
                text = script.lines[k - 1]
                if text.strip() and not text.strip().startswith("#"):
                    lines.append(f"{sign} {k:>4} {text}")
    if len(lines) > LINES + 2:
        lines = [*lines[:LINES], f"       ... and {len(lines) - LINES} more lines"]
    return lines


# --- Going on after a difference ---


def reverted(mine: Script, theirs: Script, changes: list[Change], pairing: Pairing) -> Script:
    """The copy with the original's lines in place of these changes."""
    edits = []
    for change in changes:
        new = []
        if change.theirs:
            new = theirs.lines[change.theirs[0].lines[0] - 1 : change.theirs[-1].lines[1]]
        if change.mine:
            start, stop = change.mine[0].lines[0] - 1, change.mine[-1].lines[1]
        else:
            before = [k for k in range(change.theirs[0].index) if k in pairing.partner]
            start = stop = pairing.partner[before[-1]].lines[1]
        edits.append((start, stop, new))
    lines = list(mine.lines)
    for start, stop, new in sorted(edits, key=lambda x: x[0], reverse=True):
        lines[start:stop] = new
    return Script(mine.path, "\n".join(lines) + "\n")


def constructor(found: Difference, theirs: Run) -> str:
    """The class whose `__init__` is running at the difference, such as "Agent"."""
    inside = theirs.events[found.theirs].call.inside
    return next((x.removesuffix(".__init__") for x in inside if x.endswith(".__init__")), "")


def to_revert(
    found: Difference, mine: Run, theirs: Run, pairing: Pairing, chosen: list[Change]
) -> list[Change]:
    """What to put back to see the next difference. Of a network, all that builds it."""
    name = constructor(found, theirs)
    if not name:
        return chosen
    blocks = {
        x.statement.block
        for run in (mine, theirs)
        for x in run.events
        if f"{name}.__init__" in x.call.inside
    }
    building = [x for x in pairing.changes if x.block in blocks or is_constant(x)]
    return building or chosen


# --- The command ---


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference, and how to tell it."""

    difference: Difference | None  # None: only what `train` returns differs
    what: str  # a sentence without a full stop
    brief: str  # the same in a few words
    common: str  # of the steps that differ; may be empty
    phase: tuple[int, str]
    changes: list[Change]  # of the source, that can have caused it
    mine: Run
    following: Script | None  # the copy with the original's lines there

    @property
    def harmless(self) -> bool:
        """Whether the run is the same in the end."""
        return self.difference is not None and self.difference.equal_results


def examine(mine: Run, theirs: Run) -> Finding | None:
    """The first difference of two runs, or None."""
    pairing = pair(mine.script, theirs.script)
    found = first_difference(mine, theirs, pairing)
    if found is None:
        unequal = [*leaves(mine.result, theirs.result, "result")]
        if not unequal:
            return None
        other = unequal[0][0]
        what = f"All statements of both are equal, but `train` returns another {other}"
        changes = pairing.changes[:SHOWN]
        return Finding(None, what, other, "", (0, "train"), changes, mine, None)
    what, phase = headline(found, mine, theirs), theirs.events[found.theirs].phase
    equal = not mine.error and not [*leaves(mine.result, theirs.result, "")]
    if equal and phase[1] != "evaluation":
        found = dataclasses.replace(found, equal_results=True)
    if name := constructor(found, theirs):
        what = f"`{name}` is built differently. {what}"
    chosen = places(found, mine, theirs, pairing)[:SHOWN]
    try:
        changes = to_revert(found, mine, theirs, pairing, chosen)
        following = reverted(mine.script, theirs.script, changes, pairing)
    except (BenchmarkError, IndexError):  # these lines cannot be put back by themselves
        following = None
    words, common = brief(found, theirs), common_steps(found, theirs)
    return Finding(found, what, words, common, phase, chosen, mine, following)


class Comparison:
    """A copy and its original, with the same settings."""

    def __init__(self, original: Script, flags: list[str], copy: Script) -> None:
        self.original, self.arrays = original, {}
        self.explained = False  # whether the findings are all that there is
        module, recorder = trace.load(original, self.arrays)
        settings, self.module = trace.short(module), module
        copied, _ = trace.load(copy, self.arrays)
        fields = {x.name for x in dataclasses.fields(copied.Args)}
        usual = {x.name: getattr(module.Args, x.name) for x in dataclasses.fields(module.Args)}
        default = {x: y for x, y in (usual | settings).items() if x in fields}
        self.args = vars(tyro.cli(copied.Args, args=flags, default=copied.Args(**default)))
        self.theirs = self.run(module, recorder)
        if self.theirs.error:
            raise BenchmarkError(f"{original.path.name}: {trace.told(self.theirs.error)}.")

    def run(self, module: Any, recorder: trace.Recorder) -> Run:
        fields = {x.name for x in dataclasses.fields(module.Args)}
        args = module.Args(**{x: y for x, y in self.args.items() if x in fields})
        return trace.execute(module, recorder, args)

    def findings(self, copy: Script | None) -> Iterator[Finding]:
        """One difference after the other, each with the original's lines in place of the others."""
        texts, error = set(), False
        while copy and len(texts) < ROUNDS and copy.text not in texts:
            texts.add(copy.text)
            try:
                mine = self.run(*trace.load(copy, self.arrays))
            except BenchmarkError:
                if len(texts) == 1:
                    raise
                return  # the original's lines do not fit there
            if mine.error and not error and len(texts) > 1:
                return
            error = bool(mine.error)
            finding = examine(mine, self.theirs)
            self.explained = finding is None
            if finding is None:
                return
            yield finding
            copy = finding.following

    def settings_of(self, copy: Script) -> list[str]:
        """Defaults of the copy that are not those of the original."""
        modules = trace.load(copy, self.arrays)[0], self.module
        own, others = ({y.name: y.default for y in dataclasses.fields(x.Args)} for x in modules)
        names = [x for x in others if x in own and own[x] != others[x]]
        return [f"{x} is {own[x]}, in the original {others[x]}" for x in names]


def read(path: Path) -> Script:
    try:
        return Script(path.resolve(), path.read_text())
    except UnicodeDecodeError as error:
        raise BenchmarkError(f"{path} is not a text file.") from error


def original_of(copy: Script) -> tuple[Script, str]:
    """The script of this repository that the copy was made of, and how that is known."""
    scripts = [Script(x, x.read_text()) for x in sorted(ROOT.glob("*.py"))]
    shares = {x.path.name: similarity(copy, x) for x in scripts}
    example = re.search(r"\bpython (\w+\.py)", ast.get_docstring(ast.parse(copy.text)) or "")
    named = example[1] if example else ""
    best = named if shares.get(named, 0) > SIMILAR else max(shares, key=shares.__getitem__)
    if shares[best] < SIMILAR:
        hint = f"(of {best} it has {shares[best]:.0%}); name the original, too"
        raise BenchmarkError(f"{copy.path} is not similar to any of the scripts {hint}.")
    how = "which its first lines name" if best == named else "the most similar script"
    original = next(x for x in scripts if x.path.name == best)
    share = f"{how} (the two share {shares[best]:.0%} of their statements)"
    older = ". If yours is a copy of an earlier version, name that one as the original"
    return original, f", {share}" + older * (shares[best] < EARLIER)


def endings(theirs: Run) -> tuple[int, int]:
    """How many episodes failed, and how many were cut off."""
    last: dict[int, int] = {event.phase[0]: k for k, event in enumerate(theirs.events)}
    found = [ends(theirs, k) for iteration, k in last.items() if iteration]
    failed = sum(x["terminated"].sum() for x in found if "terminated" in x)
    return int(failed), int(sum(x["truncated"].sum() for x in found if "truncated" in x))


def circumstances(args: dict[str, Any], theirs: Run) -> str:
    """How both were trained."""
    if "env_id" not in args:
        return "Both trained for a moment, with few samples and small batches."
    steps, envs = args["num_steps"], args["num_envs"]
    count = int(args["total_timesteps"] // (steps * envs))
    failed, cut = endings(theirs)
    text = (
        f"Both trained for {count} iterations of {steps} steps in {envs} environments of "
        f"{args['env_id']}, in which {failed} episodes failed and {cut} were cut off."
    )
    for number, what in ((failed, "fail"), (cut, "are cut off")):
        if not number:
            text += f"\nMistakes where episodes {what} cannot show: try another --env-id."
    return text


def phases(found: Difference | None, theirs: Run) -> Iterator[str]:
    """The parts of training up to the difference, one a line."""
    for phase, names in equal_phases(found, theirs).items():
        if names:
            text = ", ".join(names)
            text = text if len(text) < 70 else text[:66].rpartition(",")[0] + ", ..."
            yield f"  equal      {where(phase)}: {text}"
    if found:
        yield f"  DIFFERENT  {where(theirs.events[found.theirs].phase)}"


def told(finding: Finding, copy: Path, original: Script) -> str:
    """A difference as text."""
    parts = [f"{finding.what}."]
    if finding.common:
        parts.append(f"These are {finding.common}.")
    if finding.changes:
        parts += ["", f"Compare (- {original.path.name}, + {copy.name}):"]
        for change in finding.changes:
            parts += [*shown(change, finding.mine.script, original), ""]
    return "\n".join(parts).rstrip()


def run(path: Path, original_path: Path | None, flags: list[str]) -> int:
    """Compare, and print; 0: equal, 1: different."""
    copy = read(path)
    if original_path:
        original, how = read(original_path), ""
    else:
        original, how = original_of(copy)
    comparison = Comparison(original, flags, copy)
    print(f"{path} is compared with {original.path.name}{how}.")
    print(circumstances(comparison.args, comparison.theirs) + "\n")
    settings = comparison.settings_of(copy)
    for text in settings:
        print(f"  DIFFERENT  setting: {text} (with which both trained)")
    findings = comparison.findings(copy)
    first = next(findings, None)
    print("\n".join(phases(first and first.difference, comparison.theirs)) + "\n")
    if first is None:
        print("Only settings differ." if settings else "No difference.")
        return 1 if settings else 0
    print(told(first, path, original) + "\n")
    print("All that differs later follows from this, or is a difference of its own.")
    if first.harmless:
        print("In the end, both have the same weights, metrics and episodes.")
    for finding in findings:
        print("\nWith the original's lines there, the next difference is:\n")
        print(f"  DIFFERENT  {where(finding.phase)}\n\n{told(finding, path, original)}")
        first = finding
    if comparison.explained:
        print("\nWith the original's lines there, both are equal.")
    else:
        print("\nThere may be other differences: one by one, lines cannot be put back any more.")
    return 0 if first.harmless and not settings else 1
