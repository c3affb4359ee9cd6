"""Break the statement below each detail tag in several ways: some fast test must fail each time.

A statement in a marked copy is broken in its home only. The bugs of DEBUGGING.md are tried as well.
`pytest -m slow tests/repository/test_mutations.py` runs all of them;
`python tests/repository/test_mutations.py kl_penalty 23` those of some scripts, or whose names have
some of the other words.
"""

import ast
import collections
import functools
import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

if __name__ == "__main__":  # pytest does this by itself: see pythonpath in pyproject.toml
    sys.path[:0] = [str(Path(__file__).parents[x]) for x in (1, 2)]

from adapters import ROOT, SCRIPTS

from benchmark.run import changed
from benchmark.suites.bugs import BUGS, EVALUATION, IN_CARTPOLE, RLHF_BUGS
from benchmark.tags import tags_of
from tools.sync import blocks

GALLERY = {
    "continuous": {**BUGS, **EVALUATION},
    "multidiscrete": {name: BUGS[name] for name in IN_CARTPOLE if name in BUGS},
    "rlhf": RLHF_BUGS,
}
OWN = {"continuous": ["math", "reference"], "atari": ["atari", "atari_envs", "distributed"]}
OWN |= {"lstm": ["atari_lstm", "atari"]}
SHARED = ["agent", "shared_update", "shared_rollout", "users_changes", "shared_resume"]
FILES = {  # the test files of a script
    name: OWN.get(name, [name])
    + (SHARED if "environments" in x.features else ["shared_language"])
    + ["vectors"]
    for name, x in SCRIPTS.items()
} | {"minimal": ["minimal", "vectors"], "grpo_minimal": ["grpo_minimal", "vectors"]}
PATHS = {name: x.path for name, x in SCRIPTS.items()}
PATHS |= {"minimal": ROOT / "ppo_minimal.py", "grpo_minimal": ROOT / "grpo_minimal.py"}
# What changes nothing that could be noticed, and why.
MINIBATCH = "entropies are needed of minibatches only, which have two dimensions"
CHECKS = "checks of arguments that are right cost time only"
DEFAULT = "so it is by default"
EQUIVALENT = {
    "6: 4 -> (5)": "how many minibatches a call has changes its speed only",
    "6: order.view(args.num_minibatches, 1, -1) -> (order.view(1, args.num_minibatches, -1))": (
        "one call for all minibatches does the same"
    ),
    "12: logratio.exp() - 1 -> (1 - logratio.exp())": "the absolute value is the same",
    "21: nn.Conv2d(64, 64, kernel_size=3, stride=1) -> (nn.Conv2d(64, 64, kernel_size=3))": DEFAULT,
    "23: False -> (True)": CHECKS,
    "23: Normal(self.policy(obs), self.log_std.exp(), validate_args=False) -> "
    "(Normal(self.policy(obs), self.log_std.exp()))": CHECKS,
    "25: False -> (True)": CHECKS,
    "25: Independent(policy, 1, validate_args=False) -> (Independent(policy, 1))": CHECKS,
    "25: -1 -> (1) (2)": MINIBATCH,
    "31: np.clip(rewards, -args.clip_reward, args.clip_reward, out=rewards) -> "
    "(np.clip(-args.clip_reward, rewards, args.clip_reward, out=rewards))": (
        "it is the middle of the three numbers in any order"
    ),
    "32: nn.Linear(512, 4 * HIDDEN_SIZE) -> (nn.Linear(4 * HIDDEN_SIZE, 512))": "both are 512",
    "33: torch.zeros((2, num_envs, HIDDEN_SIZE), device=self.value.weight.device) -> "
    "(torch.zeros((2, num_envs, HIDDEN_SIZE)))": "see test_device.py",
    "37: -1 -> (1) (2)": MINIBATCH,
    "R13: F.scaled_dot_product_attention(query, *key_value, visible, dropout_p=0.0) -> "
    "(F.scaled_dot_product_attention(query, *key_value, visible))": DEFAULT,
    "one ratio per sequence: (logratio.sum(dim=1, keepdim=True) / lengths).expand_as(new) -> "
    "(logratio.sum(dim=1, keepdim=True) / lengths)": "it would be broadcast",
    "parallelized gradient update: average([*(x.grad for x in agent.parameters() if "
    "x.requires_grad), *metrics.values()]) -> pass": "see test_distributed.py",
    "time limits are not failures: truncated & args.truncation_is_terminal -> "
    "(args.truncation_is_terminal & truncated)": "the order does not matter",
}


class Mutant(NamedTuple):
    name: str  # the tag, and what takes the place of what
    text: str  # of the whole script


OTHER = {ast.Add: ast.Sub, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd}
OTHER |= {ast.And: ast.Or, ast.Or: ast.And}


def wrong(node: ast.AST) -> Iterator[ast.AST]:
    """What somebody might have written in place of an expression: sign, order, constant, part."""
    match node:
        case ast.Constant(value=bool(x)):
            yield ast.Constant(not x)
        case ast.Constant(value=int(x) | float(x)):
            yield ast.Constant(x + 1)
        case ast.UnaryOp(operand=x):
            yield x
        case ast.IfExp(body=x, orelse=y):
            yield from (x, y)
        case ast.Compare():
            yield ast.UnaryOp(ast.Not(), node)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(OTHER[type(op)](), values)
        case ast.BinOp(left=x, op=ast.Mult() | ast.Pow()):
            yield x
        case ast.BinOp(left=x, op=op, right=y):
            yield ast.BinOp(x, OTHER[type(op)](), y) if type(op) in OTHER else ast.BinOp(y, op, x)
        case ast.Call(func=function, args=[*args], keywords=keywords):
            commutes = re.search(r"\b(max|min)(imum)?$", ast.unparse(function))
            if not commutes and len({*map(ast.unparse, args[:2])}) == 2:
                yield ast.Call(function, [args[1], args[0], *args[2:]], keywords)
            for keyword in keywords:
                yield ast.Call(function, args, [x for x in keywords if x is not keyword])
            match function, args:
                case ast.Attribute(value=ast.Name(id="np" | "torch")), [ast.expr(), *_]:
                    yield args[0]
                case ast.Attribute(value=x), _ if not isinstance(x, ast.Name):
                    yield x


def inner(node: ast.AST, short: bool) -> Iterator[ast.AST]:
    """A statement and its expressions; those of the statements in it too if it is short."""
    yield node
    for child in ast.iter_child_nodes(node):
        number = isinstance(node, ast.UnaryOp) and isinstance(child, ast.Constant)
        if not number and not isinstance(child, ast.JoinedStr if short else ast.stmt):
            yield from inner(child, short)


def broken(text: str, statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """What has changed in a script in which a statement is wrong or missing, and its text."""
    raw = text.encode()
    starts = [0, *itertools.accumulate(map(len, raw.splitlines(keepends=True)))]
    changes = [(statement, "pass")]
    for node in inner(statement, statement.end_lineno - statement.lineno < 5):
        if isinstance(node, ast.If):
            changes.append((node.test, f"(not {ast.unparse(node.test)})"))
        if isinstance(node, ast.AugAssign):
            changes.append((node, f"{ast.unparse(node.target)} = {ast.unparse(node.value)}"))
        changes += [(node, f"({ast.unparse(x)})") for x in wrong(node)]
    for node, new in changes:
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        mutated = (raw[:first] + new.encode() + raw[last:]).decode()
        yield f"{' '.join(ast.unparse(node).split())} -> {new}", mutated


def tagged(text: str) -> dict[ast.stmt, str]:
    """The statements below tags, outside of marked copies, with the names of these."""
    copies = [(start, start + len(x)) for x, home, start in blocks(text).values() if home]
    statements = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.stmt)]
    names: dict[ast.stmt, str] = {}
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    for tag in tags_of(text):
        if not any(first <= starts[tag.line - 1] < last for first, last in copies):
            below = min((x for x in statements if x.lineno > tag.line), key=lambda x: x.lineno)
            name = tag.number.replace("/37", "") or tag.title
            names[below] = ", ".join(filter(None, [names.get(below), name]))
    return names


@functools.cache
def mutants(script: str) -> list[Mutant]:
    text, found = PATHS[script].read_text(), {}
    names = collections.Counter()
    for statement, tag in tagged(text).items():
        for change, mutated in broken(text, statement):
            name = f"{tag}: {change}"
            names[name] += mutated not in found
            again = f" ({names[name]})" if names[name] > 1 else ""
            found.setdefault(mutated, Mutant(name + again, mutated))
    for name, (_, _, *replaced) in GALLERY.get(script, {}).items():
        if replaced:
            text_with_bug = changed(text, replaced)
            found[text_with_bug] = Mutant(f"bug {name}", text_with_bug)
    return [*found.values()]


def test_every_tagged_statement_is_broken_and_every_exception_is_needed():
    known = {name: "\n".join(x.name for x in mutants(name)) for name in FILES}
    for name, path in PATHS.items():
        tags = tagged(path.read_text()).values()
        assert tags and all(f"{tag}: " in known[name] for tag in tags)
    assert EQUIVALENT.keys() <= {*"\n".join(known.values()).splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_broken_statement_is_noticed(name):
    command = [sys.executable, __file__, name]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


class Breaker:
    """Pytest runs its tests on one mutant after the other, each in a forked process."""

    def __init__(self, script: str, chosen: list[Mutant]) -> None:
        self.script, self.chosen, self.unnoticed = script, chosen, 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        whole = Mutant("", PATHS[self.script].read_text())
        assert not (failed := self.first_failure(session.items, whole)), f"unbroken: {failed}"
        for i, mutant in enumerate(self.chosen, 1):
            failed = self.first_failure(session.items, mutant)
            self.unnoticed += not failed
            print(f"{i}/{len(self.chosen)} {self.script} {mutant.name}: {failed or 'NOT NOTICED'}")
            # What has noticed one mutant may well notice the next.
            session.items.sort(key=lambda item: item.nodeid != failed)
        return True

    def first_failure(self, items: list[pytest.Item], mutant: Mutant) -> str:
        """The test that fails, or what else has ended the process; empty if nothing has."""
        sys.stdout.flush()
        read, self.pipe = os.pipe()
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_PROF, 300)  # a loop without end
            with open(os.devnull, "w") as nowhere:
                for stream in (1, 2):
                    os.dup2(nowhere.fileno(), stream)
            try:
                module = importlib.import_module(PATHS[self.script].stem)
                exec(compile(mutant.text, module.__file__, "exec"), vars(module))
                for item, following in zip(items, [*items[1:], None]):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except BaseException as error:
                self.end(type(error).__name__)
            self.end("")
        os.close(self.pipe)
        with open(read) as pipe:
            failed = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return failed if code == 0 else f"ended by {code}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.end(report.nodeid)

    def end(self, failed: str) -> None:
        os.write(self.pipe, failed.encode())
        os._exit(0)


def main(words: list[str]) -> int:
    unnoticed = 0
    for script in [x for x in words if x in FILES] or FILES:
        others = [x for x in words if x not in FILES]
        chosen = [x for x in mutants(script) if x.name not in EQUIVALENT]
        chosen = [x for x in chosen if any(word in x.name for word in others or [""])]
        breaker = Breaker(script, chosen)
        files = [str(ROOT / f"tests/scripts/test_{x}.py") for x in FILES[script]]
        options = ["-s", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=-q"]
        options += ["-m", "not slow", "--script", script]
        assert pytest.main([*options, *files], plugins=[breaker]) == 0
        print(f"{script}: {breaker.unnoticed} of {len(chosen)} not noticed", flush=True)
        unnoticed += breaker.unnoticed
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
