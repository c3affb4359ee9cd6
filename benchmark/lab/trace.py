"""Runs a script and records what each of its statements computes."""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

from benchmark.lab.provenance import BenchmarkError

# What prints, logs and saves computes nothing, and settings are compared by themselves.
APART = {"Args", "log", "write", "details", "open_run", "save_checkpoint", "as_columns", "plain"}
MANY = 50  # entries of a list beyond the last so many are not compared


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement, or the first line of a loop, a condition or a function."""

    index: int
    kind: str  # enter, return, if, for, do; declare: outside of functions
    block: str  # its function, as in "actor.act" or "Agent.__init__"
    text: str  # without comments, on one line
    lines: tuple[int, int]  # first and last
    names: tuple[str, ...]  # what is recorded: the variables that it may have changed


@dataclasses.dataclass
class Call:
    """A call of a function of the script."""

    frame: types.FrameType | None
    block: str
    line: int  # of the call, in the calling function; 0: nobody recorded has called it
    inside: tuple[str, ...]  # the functions that have called each other up to here
    phase: tuple[int, str]
    iteration: int = 0  # of the training loop, if this is the function that has it


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A statement has been executed."""

    statement: Statement
    call: Call
    phase: tuple[int, str]  # iteration, and the comment `# --- THIS ---` above it
    values: dict[str, Any]  # by name; None: cannot be compared


class Script:
    """The source of a script, its statements, and how it looks with recording."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.lines = path, text, text.splitlines()
        for before, after in TEXTS.items():
            text = text.replace(before, after)
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise BenchmarkError(f"{path}, line {error.lineno}: {error.msg}.") from error
        self.statements: list[Statement] = []
        self.variables: dict[str, set[str]] = {"": set()}  # of each function, and those around it
        self.banners = {
            k: banner[1].split(":")[0].strip().lower()
            for k, line in enumerate(self.lines, start=1)
            if (banner := re.match(r"\s+# --- (.+?)(?: ---)?$", line))
        }
        self.own_banners: dict[str, list[int]] = {}  # their lines, by function
        self.training_loops: set[int] = set()  # statements
        self.loops: dict[int, int] = {}  # the last line of each `for`
        self.spans: dict[str, tuple[int, int]] = {}  # lines of each function
        self.tree.body = [*self.instrumented(self.tree.body, "")]
        ast.fix_missing_locations(self.tree)
        if "train" not in self.spans:
            raise BenchmarkError(f"{path} has no function `train`.")

    def instrumented(self, body: list[ast.stmt], block: str) -> Iterator[ast.stmt]:
        """The statements, each followed by a call that records it."""
        for node in body:
            if getattr(node, "name", "") in APART:
                yield node
            elif isinstance(node, ast.FunctionDef):
                yield from self.function(node, block)
            elif isinstance(node, ast.ClassDef):
                node.body = [*self.instrumented(node.body, f"{block}{node.name}.")]
                yield node
            elif not block or block.endswith("."):  # outside of functions
                if not isinstance(node, (ast.Import, ast.ImportFrom)) and not is_text(node):
                    self.add("declare", block, ast.unparse(node), node, node.end_lineno, ())
                yield node
            else:
                yield from self.statement(node, block)

    def function(self, node: ast.FunctionDef, around: str) -> Iterator[ast.stmt]:
        block = (
            around + node.name if not around or around.endswith(".") else f"{around}.{node.name}"
        )
        start = min([node.lineno, *(x.lineno for x in node.decorator_list)])
        self.spans[block] = start, node.end_lineno
        arguments = [x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)]
        stored = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and is_stored(x)}
        self.variables[block] = stored | {*arguments} | self.variables.get(around, set())
        body = node.body[1:] if is_text(node.body[0]) else node.body
        last = max(node.lineno, node.body[0].lineno - 1)
        text = f"def {node.name.rpartition('.')[2]}({ast.unparse(node.args)}):"
        entered = self.add("enter", block, text, node, last, tuple(arguments))
        node.body = [*self.recorded(entered, node), *self.instrumented(body, block)]
        yield node

    def statement(self, node: ast.stmt, block: str) -> Iterator[ast.stmt]:
        """One within a function."""
        inner = [getattr(node, x, None) for x in ("body", "orelse", "finalbody")]
        last = node.end_lineno if not inner[0] else max(node.lineno, inner[0][0].lineno - 1)
        text = ast.unparse(node) if not inner[0] else ast.unparse(node).split("\n")[0]
        local = self.variables[block]
        if isinstance(node, ast.Return):
            index = self.add("return", block, text, node, last, ("result",))
            node.value = self.call(index, [node.value or ast.Constant(None)], node)
            yield node
        elif isinstance(node, (ast.If, ast.While)):
            index = self.add("if", block, text, node, last, ("condition",))
            node.test = self.call(index, [node.test], node)
            self.nested(node, block, [])
            yield node
        elif isinstance(node, ast.For):
            index = self.add("for", block, text, node, last, targets(node.target, local))
            self.loops[index] = node.end_lineno
            if any(node.lineno < x <= node.end_lineno for x in self.banners):
                self.training_loops.add(index)
            self.nested(node, block, self.recorded(index, node))
            yield node
        elif isinstance(node, (ast.With, ast.Try)):
            items = getattr(node, "items", [])
            names = [targets(x.optional_vars, local) for x in items if x.optional_vars]
            index = self.add("do", block, text, node, last, tuple(itertools.chain(*names)))
            self.nested(node, block, self.recorded(index, node))
            for handler in getattr(node, "handlers", []):
                handler.body = [*self.instrumented(handler.body, block)]
            yield node
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            yield node
        else:
            index = self.add("do", block, text, node, last, changed_names(node, local))
            changes = isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr))
            record = self.recorded(index, node)
            yield from [node, *record] if changes else [*record, node]

    def nested(self, node: ast.stmt, block: str, first: list[ast.stmt]) -> None:
        """Record inside of a loop, condition, or the like; `first` comes before all else."""
        node.body = [*first, *self.instrumented(node.body, block)]
        for field in ("orelse", "finalbody"):
            if getattr(node, field, None):
                setattr(node, field, [*self.instrumented(getattr(node, field), block)])

    def add(self, kind: str, block: str, text: str, node: ast.AST, last: int, names: tuple) -> int:
        index, lines = len(self.statements), (node.lineno, last)
        names = tuple(dict.fromkeys(names))
        self.statements.append(Statement(index, kind, block, text, lines, names))
        return index

    def call(self, index: int, values: list[ast.expr], node: ast.AST) -> ast.Call:
        name = ast.Name("_record_", ast.Load())
        call = ast.Call(name, [ast.Constant(index), *values], [])
        for x in ast.walk(call):
            if "lineno" in x._attributes and not hasattr(x, "lineno"):
                ast.copy_location(x, node)
        return call

    def recorded(self, index: int, node: ast.AST) -> list[ast.stmt]:
        names = [ast.Name(x, ast.Load()) for x in self.statements[index].names]
        return [ast.copy_location(ast.Expr(self.call(index, names, node)), node)]

    def banner(self, block: str, line: int) -> str:
        """The comment `# --- THIS ---` above a line of a function; nothing if it has none."""
        if block not in self.own_banners:
            first, last = self.spans[block]
            self.own_banners[block] = [x for x in self.banners if first <= x <= last]
        own = self.own_banners[block]
        return next((self.banners[x] for x in reversed(own) if x <= line), "setup" if own else "")


def is_text(node: ast.stmt) -> bool:
    """Whether it is a docstring, or `...`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def root(node: ast.AST) -> str | None:
    """The variable in `variable.field[index].method`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def targets(node: ast.AST, local: set[str]) -> tuple[str, ...]:
    """The variables that an assignment to this changes."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List)) else None
    if parts is not None:
        return tuple(itertools.chain(*(targets(x, local) for x in parts)))
    return tuple(x for x in [root(node)] if x in local)


def changed_names(node: ast.stmt, local: set[str]) -> tuple[str, ...]:
    """The variables that a statement may change: those assigned to, or given to a call."""
    if isinstance(node, ast.Assign):
        names = [x for target in node.targets for x in targets(target, local)]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        names = [*targets(node.target, local)]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        parts = [call.func, *call.args, *(x.value for x in call.keywords)]
        names = [x for x in map(root, parts) if x in local]
    else:
        names = []
    return tuple(names)


# --- Recording ---


@dataclasses.dataclass(frozen=True)
class Run:
    """What a script has computed."""

    script: Script
    events: list[Event]
    result: Any  # of `train`
    error: BaseException | None  # what has ended it


class Recorder:
    """Called after each statement of a script."""

    def __init__(self, script: Script, arrays: dict) -> None:
        self.script, self.arrays, self.events = script, arrays, []
        self.calls: list[Call] = []
        self.settings: dict[int, tuple[Any, Any]] = {}
        self.phase = ""  # of what `train` does not call
        self.module = ""

    def __call__(self, index: int, *values: Any) -> Any:
        statement = self.script.statements[index]
        call = self.call_of(sys._getframe(1), statement.block)
        call.iteration += index in self.script.training_loops
        banner = self.script.banner(statement.block, statement.lines[0])
        phase = (call.iteration, banner) if banner else call.phase
        kept = {name: self.frozen(x) for name, x in zip(statement.names, values)}
        self.events.append(Event(statement, call, phase, kept))
        return values[0] if values else None

    def call_of(self, frame: types.FrameType, block: str) -> Call:
        """The running call of a function, which may have just begun."""
        for depth in range(len(self.calls), 0, -1):
            if self.calls[depth - 1].frame is frame:
                del self.calls[depth:]
                return self.calls[-1]
        caller, frames = frame.f_back, {id(x.frame): k for k, x in enumerate(self.calls)}
        while caller and id(caller) not in frames:
            caller = caller.f_back
        parent = (
            self.calls[frames[id(caller)]] if caller else Call(None, "", 0, (), (0, self.phase))
        )
        del self.calls[frames[id(caller)] + 1 if caller else 0 :]
        line = caller.f_lineno if caller else 0
        banner = self.script.banner(parent.block, line) if parent.block else ""
        phase = (parent.iteration, banner) if banner else parent.phase
        if not banner and len(parent.inside) <= 1 and not self.phase:
            phase = (0, block)  # what `train` calls is a phase by itself
        self.calls.append(Call(frame, block, line, (*parent.inside, block), phase))
        return self.calls[-1]

    def frozen(self, x: Any, depth: int = 3) -> Any:
        """A copy that later changes do not reach; None if it cannot be compared."""
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu()
            x = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
        if isinstance(x, np.ndarray):
            if x.dtype.kind not in "biuf":
                return None
            key = x.shape, x.dtype, hash(x.tobytes())  # equal arrays are one
            if key not in self.arrays:
                self.arrays[key] = x.copy()
            return self.arrays[key]
        if isinstance(x, (bool, int, float, np.generic)):
            return x
        if depth == 0 or isinstance(x, gym.Env):
            return None
        if isinstance(x, torch.nn.Module):
            x = weights(x)
        elif isinstance(x, tuple) and hasattr(x, "_asdict"):
            x = x._asdict()
        elif type(x).__module__ == self.module and hasattr(x, "__dict__"):
            if not dataclasses.is_dataclass(x):
                return self.frozen(vars(x), depth)
            if id(x) not in self.settings:  # frozen, and kept so that the id stays its own
                self.settings[id(x)] = x, self.frozen(vars(x), depth)
            return self.settings[id(x)][1]
        if isinstance(x, dict):
            return {str(k): self.frozen(y, depth - 1) for k, y in x.items()}
        if isinstance(x, (list, tuple)):
            if x and all(type(y) in (int, float) for y in x):
                return self.frozen(np.array(x))
            if x and all(isinstance(y, str) for y in x):  # names, such as those of settings
                return None
            return tuple(self.frozen(y, depth - 1) for y in x[-MANY:])
        return None


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, even of a module that is being made."""
    own = {x: vars(module).get(x, {}) for x in ("_parameters", "_buffers", "_modules")}
    found = {name: x for name, x in (own["_parameters"] | own["_buffers"]).items() if x is not None}
    for name, inner in own["_modules"].items():
        found |= {f"{name}.{x}": y for x, y in weights(inner).items()} if inner else {}
    return found


def load(script: Script, arrays: dict) -> tuple[types.ModuleType, Recorder]:
    """Import a script so that it is recorded."""
    recorder = Recorder(script, arrays)
    recorder.module = f"traced_{abs(hash(script.path))}_{len(sys.modules)}"
    module = types.ModuleType(recorder.module)
    module.__file__, module._record_ = str(script.path), recorder
    sys.modules[module.__name__] = module
    sys.path.append(str(script.path.parent))
    try:
        exec(compile(script.tree, str(script.path), "exec"), module.__dict__)
    except Exception as error:
        raise BenchmarkError(f"{script.path} cannot be imported: {told(error)}.") from error
    finally:
        sys.path.remove(str(script.path.parent))
    if not hasattr(module, "Args"):
        raise BenchmarkError(f"{script.path} has no class `Args`.")
    return module, recorder


def told(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")


# --- Running ---

LIMIT = 15  # steps after which an episode is cut off
# Settings of short runs in which every line matters: rewards, values and ratios reach their clip
# ranges, episodes fail and are cut off, and there is an entropy bonus.
SETTINGS = {
    "num_envs": 2,
    "num_steps": 128,
    "num_minibatches": 4,
    "update_epochs": 2,
    "total_timesteps": 512,
    "learning_rate": 1e-3,
    "clip_coef": 0.02,
    "clip_obs": 2.0,
    "clip_reward": 1.0,
    "ent_coef": 0.01,
    "device": "cpu",
    "compile": False,
    "track": False,
}
GAMES = {
    **SETTINGS,
    "num_steps": 64,
    "num_minibatches": 2,
    "total_timesteps": 256,
    "torch_threads": 1,
    "bfloat16": False,
}
LANGUAGE = {
    "sft_documents": 200,
    "sft_steps": 3,
    "sft_batch_size": 16,
    "num_pairs": 28,
    "temperature": 0.7,
    "reward_epochs": 1,
    "reward_batch_size": 12,
    "num_updates": 2,
    "batch_size": 16,
    "num_minibatches": 2,
    "update_epochs": 2,
    "num_epochs": 2,
    "warmup_steps": 2,
    "group_size": 4,
    "num_prompts": 8,
    "learning_rate": 3e-3,
    "clip_coef": 0.02,
    "clip_high": 0.03,
    "value_clip_coef": 0.02,
}
# The same for constants of a script.
CONSTANTS = {"GAME_PROCESSES": 1, "MAX_GAME_STEPS": 40, "NUM_SAMPLES": 64, "NUM_EVALUATED": 16}
# And for what is neither: fewer prompts are held out, and one right digit earns a reward, because
# an untrained model never has a whole sum right.
TEXTS = {
    "split([1000, 9000])": "split([20, 9980])",
    "(responses == solve(prompts)).all(dim=1)": "(responses == solve(prompts)).any(dim=1)",
}


def short(module: types.ModuleType) -> dict[str, Any]:
    """Settings that this script has and that make it train for a second."""
    fields = {x.name for x in dataclasses.fields(module.Args)}
    kinds = {"sticky_actions": GAMES, "sft_steps": LANGUAGE}
    chosen = next((kinds[x] for x in kinds if x in fields), SETTINGS)
    # HalfCheetah never falls.
    own = {"env_id": "Hopper-v4"} if getattr(module.Args, "env_id", "") == "HalfCheetah-v4" else {}
    return {name: x for name, x in (chosen | own).items() if name in fields}


class Moment(float):
    """A time of which every other is one second away, so that two runs are equally fast."""

    def __sub__(self, _: float) -> float:
        return 1.0


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Run in an empty folder, say nothing, and end episodes early."""
    make, here, threads = gym.make, os.getcwd(), torch.get_num_threads()

    def make_short(env_id: Any, **options: Any) -> gym.Env:
        limit = {} if str(env_id).startswith("ALE/") else {"max_episode_steps": LIMIT}
        return make(env_id, **limit | options)

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch("gymnasium.make", make_short),
        mock.patch("time.perf_counter", lambda: Moment(0.0)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            torch.set_num_threads(threads)


def execute(module: types.ModuleType, recorder: Recorder, args: Any) -> Run:
    """Train, and act with the trained policy."""
    for name, value in CONSTANTS.items():
        if hasattr(module, name):
            setattr(module, name, value)
    torch.set_num_threads(1)
    result = error = None
    recorder.events.clear()
    recorder.calls.clear()
    with aside():
        try:
            result = module.train(args)
            if hasattr(module, "load_policy"):
                recorder.phase = "evaluation"
                try_policy(module, result)
        except (Exception, SystemExit) as caught:
            error = caught
    recorder.calls.clear()
    return Run(recorder.script, recorder.events, recorder.frozen(result), error)


def try_policy(module: types.ModuleType, result: dict[str, Any]) -> None:
    """Take a few steps with the policy that was saved."""
    args = result["args"]
    make: Callable = getattr(module, "make_env", lambda args: gym.make(args.env_id))
    with contextlib.closing(make(args)) as env:
        policy = module.load_policy(result["run_dir"], env)
        starts = {"start": True} if "start" in inspect.signature(policy).parameters else {}
        obs, _ = env.reset(seed=args.seed)
        for _ in range(3):
            obs, *_ = env.step(policy(obs, **starts))
