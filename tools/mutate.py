"""Break each statement of the algorithm, one at a time: a fast test must fail each time.

    python tools/mutate.py                                    # all scripts: hours
    python tools/mutate.py ppo_minimal grpo_minimal.py:train  # scripts, or functions of them
    python tools/mutate.py --sample 10 --seed 20240131        # ten changes of each, by the date

A statement above the banner of a script (in a short one: anywhere) is deleted, a comparison
negated, a sign flipped. Marked copies are left out: they are broken at home. Each test of a script
first runs unbroken, which shows the lines that it needs. Each change is then tried on the tests
that need its lines, the quick ones first, in a fork of this process; at last on those that run
the script in other processes, if at all. What is noticed is kept in a temporary file while the
script and the test stay the same, so an interrupted run continues.

A change that nothing could notice is in `MAY_SURVIVE`, with the reason. Exit code 1 if others
survive, or if a test fails unbroken.
"""

import argparse
import ast
import collections
import hashlib
import importlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

if __name__ == "__main__":  # pytest does this by itself
    sys.path[:0] = [str(Path(__file__).parents[1] / x) for x in ("tests", ".")]

from adapters import ROOT, SCRIPTS

from tools.sync import blocks

BANNER = "# === The algorithm ends here ==="
NAMES = {x.stem: x.stem for x in sorted(ROOT.glob("*.py"))}  # of a script in the tests, by its file
NAMES |= {x.path.relative_to(ROOT).with_suffix("").as_posix(): x.name for x in SCRIPTS.values()}
# What a script imports late and takes seconds: once, before the forks.
LATE = {
    "ppo_llm": (
        "peft",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
    ),
}
# Changes that nothing could notice, and why. At most one statement in fifty of a script.
MAY_SURVIVE: dict[str, dict[str, str]] = {
    "grpo_minimal": {
        "solve: place + 3 -> (place - 3)": "the same column of six, counted from the end",
    },
    "ppo_continuous_action": {
        "learn: args.gamma * discounted_returns + rewards[t] ->"
        " (args.gamma * discounted_returns - rewards[t])": "all sums have the opposite sign, so"
        " their variance is the same",
    },
    "ppo_minimal": {
        "learn: args.gamma * discounted + reward -> (args.gamma * discounted - reward)": "all sums"
        " have the opposite sign, so their variance is the same",
    },
    "ppo_rlhf_toy": {
        "module: NUM_SAMPLES = 2000 -> pass": "tests set a number of their own: fewer are faster",
    },
    "ppo_vector_env": {
        "module: sys.platform == 'linux' -> (not sys.platform == 'linux')": "the same number of"
        " cores, unless a container has fewer",
        "learn: args.gamma * discounted + rewards[t] -> (args.gamma * discounted -"
        " rewards[t])": "all sums have the opposite sign, so their variance is the same",
        "learn: agent.return_stats.var + 1e-08 -> (agent.return_stats.var - 1e-08)": "what the"
        " variance begins with is larger for the first ten thousand steps",
        "learn: batch.returns.var() + 1e-08 -> (batch.returns.var() - 1e-08)": "a metric, if all"
        " returns are the same",
    },
}


class Mutant(NamedTuple):
    name: str  # function, and what takes the place of what
    lines: range  # those that run if the change matters; none of a module, which any test needs
    text: str  # of the whole script


SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add}


def flipped(node: ast.AST) -> ast.AST | None:
    """A comparison negated, a sign or a `not` left out, plus in place of minus; else nothing."""
    match node:
        case ast.Compare():
            return ast.UnaryOp(ast.Not(), node)
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
            return node.operand
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return ast.BinOp(left, SWAPPED[type(op)](), right)
    return None


def statements(text: str) -> Iterator[tuple[str, ast.stmt]]:
    """The statements of the algorithm and the function that each is in; no copies, no definitions.

    Definitions are those of functions and classes, of settings and other fields, and imports.
    """
    banner = text.find(BANNER)
    copies = [range(start, start + len(x)) for x, home, start in blocks(text).values() if home]
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    defining = ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom

    def within(body: list[ast.AST], scope: list[str], is_class: bool) -> Iterator:
        for node in body:
            place = starts[node.lineno - 1] if hasattr(node, "lineno") else -1
            if isinstance(node, ast.stmt) and not isinstance(node, defining):
                docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                field = is_class and isinstance(node, ast.AnnAssign)
                copied = any(place in x for x in copies)
                if not (docstring or field or copied or 0 <= banner < place):
                    yield ".".join(scope), node
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from within(node.body, [*scope, node.name], isinstance(node, ast.ClassDef))
            elif not isinstance(node, ast.expr):
                yield from within([*ast.iter_child_nodes(node)], scope, False)

    yield from within(ast.parse(text).body, [], False)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement, but not those of the statements in it, nor in texts."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.JoinedStr):
            yield child
            yield from expressions(child)


def mutants(text: str) -> list[Mutant]:
    """All changes of a script."""
    raw, found, names = text.encode(), [], collections.Counter()
    starts = [0, *itertools.accumulate(map(len, raw.splitlines(keepends=True)))]
    for scope, statement in statements(text):
        body = getattr(statement, "body", None)
        end = body[0].lineno if body else statement.end_lineno + 1
        lines = range(statement.lineno, end if scope else 0)
        changes = [(statement, "pass")]
        for node in expressions(statement):
            if new := flipped(node):
                changes.append((node, f"({ast.unparse(new)})"))
        for node, new in changes:
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            old = ast.unparse(node).partition("\n")[0]
            name = f"{scope or 'module'}: {old} -> {new}"
            names[name] += 1
            again = f" ({names[name]})" if names[name] > 1 else ""
            mutated = (raw[:first] + new.encode() + raw[last:]).decode()
            found.append(Mutant(name + again, lines, mutated))
    return found


def digest(*paths: Path) -> str:
    """Of what is in files."""
    return hashlib.sha256(b"".join(x.read_bytes() for x in paths)).hexdigest()[:16]


class Breaker:
    """Pytest runs its tests on one mutant after the other, each in a forked process."""

    def __init__(self, script: str, chosen: list[Mutant], folder: str) -> None:
        self.script, self.chosen, self.path = script, chosen, ROOT / f"{script}.py"
        self.file = Path(folder, self.path.name)  # holds a mutant, for tests that run the file
        self.survivors: list[str] = []
        self.failing: list[str] = []  # tests that fail unbroken
        same = digest(self.path, *sorted((ROOT / "tests").glob("*.py")))
        self.memory = Path(tempfile.gettempdir(), f"mutate-{self.path.stem}-{same}.json")
        self.known = {"tests": {}, "noticed": {}}
        if self.memory.exists():
            self.known = json.loads(self.memory.read_text())

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only the tests of the script: shared ones by its adapter, and those that name it."""

        def concerns(item: pytest.Item) -> bool:
            parameters = getattr(item, "callspec", SimpleNamespace(params={})).params
            if "script" in parameters:
                return parameters["script"] == NAMES[self.script]
            return self.script in item.path.read_text()

        items[:] = filter(concerns, items)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each test unbroken, then try the changes."""
        whole = Mutant("", range(0), self.path.read_text())
        versions = {x: f"{x.nodeid} {digest(x.path)}" for x in session.items}
        for i, (item, version) in enumerate(versions.items(), 1):
            if version not in self.known["tests"]:
                begin = os.times().children_user
                failed, lines = self.outcome({item: 100.0}, whole, trace=True)
                if failed:
                    print(f"{item.nodeid} fails unbroken and is left out", flush=True)
                    self.failing.append(item.nodeid)
                    continue
                self.remember("tests", version, [os.times().children_user - begin, lines])
                print(f"{self.script}: {i} of {len(versions)} tests have run unbroken", flush=True)
        known = self.known["tests"]
        tests = [(x, *known[version]) for x, version in versions.items() if version in known]
        # Some run no line of the script, at least not in this process: they are tried last.
        elsewhere = [x for x in tests if not x[2]]
        tests = [x for x in tests if x[2]]
        last = ""
        for i, mutant in enumerate(self.chosen, 1):
            failed, version = self.known["noticed"].get(mutant.name, ("", ""))
            if version not in versions.values():
                needed = [x for x in tests if not {*mutant.lines}.isdisjoint(x[2])] or tests
                needed.sort(key=lambda x: (x[0].nodeid != last, x[1]))
                candidates = {x: seconds for x, seconds, _ in [*needed, *elsewhere]}
                failed, _ = self.outcome(candidates, mutant)
                first = versions[needed[0][0]]
                by = next((y for x, y in versions.items() if x.nodeid == failed), first)
                self.remember("noticed", mutant.name, [failed, by if failed else ""])
            if failed:
                last = failed
            else:
                self.survivors.append(mutant.name)
            print(f"{i}/{len(self.chosen)} {mutant.name}: {failed or 'SURVIVES'}", flush=True)
        return True

    def remember(self, kind: str, name: str, value: list) -> None:
        """Keep what has been found out."""
        self.known[kind][name] = value
        self.memory.write_text(json.dumps(self.known))

    def outcome(
        self, items: dict[pytest.Item, float], mutant: Mutant, trace: bool = False
    ) -> tuple[str, list[int]]:
        """The first test that fails, or how else the process has ended; lines of the script run.

        A test that takes much longer than its seconds would never end.
        """
        sys.stdout.flush()
        read, self.pipe = os.pipe()
        child = os.fork()
        if child == 0:
            self.become(items, mutant, trace)
        os.close(self.pipe)
        with open(read) as pipe:
            told = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return (f"ended by {code}", []) if code else json.loads(told)

    def become(self, items: dict[pytest.Item, float], mutant: Mutant, trace: bool) -> None:
        """Run tests on a mutant in this process, and end it."""
        self.lines: set[int] = set()
        with open(os.devnull, "w") as nowhere:
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
        try:
            module = importlib.import_module(self.script.replace("/", "."))
            kept = {name: x for name, x in vars(module).items() if name.startswith("__")}
            self.file.write_text(mutant.text)
            vars(module).clear()
            vars(module).update(kept, __file__=str(self.file))
            if trace:
                sys.settrace(self.trace)
            signal.alarm(60)  # or an import that trains would never end
            exec(compile(mutant.text, self.file, "exec"), vars(module))
            self.lines.clear()  # what an import runs
            for item, following in itertools.pairwise([*items, None]):
                signal.setitimer(signal.ITIMER_PROF, 5 + 4 * items[item])
                signal.alarm(60 + int(20 * items[item]))  # or it waits for what never comes
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except BaseException as error:
            self.end(type(error).__name__)
        self.end("")

    def trace(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        """Note the lines of the script that run."""
        if frame.f_code.co_filename != str(self.file):
            return None
        self.lines.add(frame.f_lineno)
        return self.trace

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Stop at the first failure."""
        if report.failed:
            self.end(report.nodeid)

    def end(self, failed: str) -> None:
        """Tell the parent, and stop at once."""
        sys.settrace(None)
        told = json.dumps([failed, sorted(self.lines)]).encode()
        while told:
            told = told[os.write(self.pipe, told) :]
        os._exit(0)


def survivors(script: str, chosen: list[Mutant]) -> tuple[list[str], list[str]]:
    """Names of the changes that no test notices, and of the tests that fail unbroken."""
    options = ["-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=-q"]
    options += ["-m", "not slow", "--script", NAMES[script], str(ROOT / "tests/scripts")]
    for name in LATE.get(script, ()):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        breaker = Breaker(script, chosen, folder)
        assert pytest.main(options, plugins=[breaker]) == 0
    return breaker.survivors, breaker.failing


def main() -> int:
    """Read the command line, try the changes, print what survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", metavar="SCRIPT[:FUNCTION]", default=[*NAMES])
    parser.add_argument("--sample", type=int, help="try only so many changes of each script")
    parser.add_argument("--seed", default="", help="what draws the sample, such as the date")
    args, bad = parser.parse_args(), 0
    for what in args.what:
        file, _, function = what.partition(":")
        script = file.removesuffix(".py")
        if script not in NAMES:
            parser.error(f"{file} is not one of {', '.join(NAMES)}")
        text, reasons = (ROOT / f"{script}.py").read_text(), MAY_SURVIVE.get(script, {})
        places = (f"{function}:", f"{function}.") if function else ""
        chosen = [x for x in mutants(text) if x.name.startswith(places)]
        if args.sample is not None and args.sample < len(chosen):
            chosen = random.Random(args.seed).sample(chosen, args.sample)
        count = len([*statements(text)])
        found, failing = survivors(script, chosen)
        wrong = [x for x in found if x not in reasons]
        wrong += sorted(reasons.keys() - {x.name for x in mutants(text)})  # which are no changes
        if 50 * len(reasons) > count:
            wrong.append(f"{len(reasons)} reasons: one statement in fifty may have one")
        print(f"{script}: {count} statements, {len(chosen)} changes tried, {len(found)} survive,")
        print(f"{len(wrong)} of them without a reason", *wrong, sep="\n- ", flush=True)
        if failing:
            print("Left out, as they fail unbroken:", *failing, sep="\n- ", flush=True)
        bad += len(wrong) + len(failing)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
