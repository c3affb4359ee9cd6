"""Runs a script and records what each of its statements computes."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

from benchmark.lab.provenance import BenchmarkError

# --- The statements of a script ---

# What prints, logs and saves computes nothing, and settings are compared by themselves: their
# statements are known, but not recorded.
APART = {"Args", "log", "open_run", "save_checkpoint", "plain"}


@dataclasses.dataclass(frozen=True, eq=False)  # as a key, each is itself
class Statement:
    """A statement. Of a function, a loop or a condition, it is the first line.

    An `else:` or the like belongs to the first statement below it.
    """

    index: int
    kind: str  # Assign, If, FunctionDef, ...
    block: str  # functions and classes around it, as in "actor.act"; "" outside of all
    text: str  # without comments, on one line, after its decorators
    lines: tuple[int, int]  # first and last
    indent: int
    names: list[str]  # what is recorded: variables that it may change
    banner: str  # the comment `# --- THIS ---` that it belongs to, if there is one
    trains: bool  # whether it is a loop with such comments inside


class Script(ast.NodeTransformer):
    """The source of a script, its statements, and a syntax tree that records them."""

    def __init__(self, path: Path, text: str, numbers: list[int] | None = None) -> None:
        """Read it; `numbers` are those of the lines in the file, where some have been replaced."""
        self.path, self.lines = path, text.splitlines()
        self.numbers = numbers or [*range(1, len(self.lines) + 1)]
        self.banners = {}
        for k, line in enumerate(self.lines, start=1):
            if found := re.match(r" +# --- (.+?)(:| ---|$)", line):
                self.banners[k] = found[1].lower()
        self.statements: list[Statement] = []
        self.at: dict[int, Statement] = {}  # by line
        self.around: list[ast.stmt] = []  # functions and classes around what is visited
        try:
            self.tree = ast.fix_missing_locations(self.visit(ast.parse(text)))
        except SyntaxError as error:
            raise BenchmarkError(f"{path}, line {error.lineno}: {error.msg}.") from error
        for name in ("train", "Args"):
            if name not in (getattr(x, "name", "") for x in self.tree.body):
                raise BenchmarkError(f"{path} has no `{name}`.")

    def visit(self, node: ast.AST) -> Any:
        """Note a statement. If it is in a function, add a call that records it."""
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_setting = isinstance(node, ast.AnnAssign) and [x.name for x in self.around] == ["Args"]
        if isinstance(node, ast.expr) or is_text or is_setting:
            return node
        if not isinstance(node, ast.stmt):  # the whole script, or `except`
            return self.generic_visit(node)
        opens = isinstance(node, ast.FunctionDef | ast.ClassDef)
        self.around += [node] * opens
        self.statements.append(statement := self.statement(node))
        self.at |= dict.fromkeys(range(statement.lines[0], statement.lines[1] + 1), statement)
        self.generic_visit(node)
        is_run = self.around and isinstance(self.around[-1], ast.FunctionDef)
        is_run = is_run and APART.isdisjoint(x.name for x in self.around)
        self.around = self.around[: len(self.around) - opens]
        return recorded(node, statement.index) if is_run else node

    def statement(self, node: ast.stmt) -> Statement:
        own = range(self.around[-1].lineno if self.around else node.lineno, node.lineno)
        above = [self.banners[k] for k in own if k in self.banners]
        within = range(node.lineno, node.end_lineno) if isinstance(node, ast.For) else ()
        inside = [self.banners[k] for k in within if k in self.banners]
        body, decorators = getattr(node, "body", None), getattr(node, "decorator_list", [])
        branch, first = self.branch([*decorators, node][0].lineno)
        text = ast.unparse(node).splitlines()[: len(decorators) + 1]
        return Statement(
            index=len(self.statements),
            kind=type(node).__name__,
            block=".".join(x.name for x in self.around),
            text=" ".join([*branch, *text]),
            lines=(first, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno),
            indent=node.col_offset,
            names=changed_names(node),
            banner=[*inside[:1], *above[-1:], ""][0],
            trains=bool(inside),
        )

    def branch(self, line: int) -> tuple[list[str], int]:
        """The `else:` or the like above a line, if there is one, and where the code begins."""
        for k in range(line - 1, 0, -1):
            if code := self.lines[k - 1].partition("#")[0].strip():
                found = re.match(r"(else|finally|except.*) *:$", code)
                return ([code], k) if found else ([], line)
        return [], line


def changed_names(node: ast.stmt) -> list[str]:
    """The variables that a statement may change: those assigned to, or given to a call."""
    match node:
        case ast.Return():
            return ["result"]
        case ast.If() | ast.While():
            return ["condition"]
        case ast.Assign(targets=parts) | ast.With(items=parts):
            pass
        case ast.FunctionDef(args=part) | ast.Expr(part):
            parts = [part]
        case ast.AugAssign(target=part) | ast.AnnAssign(target=part) | ast.For(target=part):
            parts = [part]
        case _:
            parts = []
    found = (getattr(x, "id", getattr(x, "arg", "")) for part in parts for x in ast.walk(part))
    return [*dict.fromkeys([*filter(None, found), "t"])]  # t: the step, in loops over steps


def recorded(node: ast.stmt, index: int) -> list[ast.stmt]:
    """A statement, and a call that records it."""
    call = ast.Call(ast.Name("_record_", ast.Load()), [ast.Constant(index)], [])
    if isinstance(node, ast.Return):
        call.args.append(node.value or ast.Constant(None))
        node.value = call
    elif isinstance(node, ast.If | ast.While):
        call.args.append(node.test)
        node.test = call
    elif hasattr(node, "body"):
        node.body.insert(0, ast.Expr(call))
    else:
        return [node, ast.Expr(call)]
    return [node]


# --- Recording ---

MANY = 50  # entries of a list beyond the last so many are not compared


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A statement has been executed."""

    statement: Statement
    callers: list[Statement]  # whose calls have led there, the latest first
    phase: str  # a part of training, as in "iteration 1, update"
    values: dict[str, Any]  # by name; None: cannot be compared


@dataclasses.dataclass(frozen=True)
class Run:
    """What a script has computed."""

    script: Script
    events: list[Event]
    result: Any  # of `train`, and of a few steps with the trained policy
    error: str  # what has ended it, if something has
    line: int  # where


class Recorder:
    """Called after each statement of a script."""

    def __init__(self, script: Script, module: str, arrays: dict) -> None:
        self.script, self.module, self.arrays = script, module, arrays
        self.events: list[Event] = []
        self.iteration = 0
        self.part = ""  # before a phase: whether a run goes on from its checkpoint

    def __call__(self, index: int, *result: Any) -> Any:
        statement, frame = self.script.statements[index], sys._getframe(1)
        scope = dict.fromkeys(("result", "condition"), result[0]) if result else frame.f_locals
        values = {x: self.frozen(named(scope[x], scope)) for x in statement.names if x in scope}
        callers = []
        while (frame := frame.f_back) and frame.f_code is not execute.__code__:
            if frame.f_code.co_filename == str(self.script.path):
                callers += filter(None, [self.script.at.get(frame.f_lineno)])
        self.iteration += statement.trains
        phase = self.part + self.phase([statement, *callers])
        self.events.append(Event(statement, callers, phase, values))
        return result[0] if result else None

    def phase(self, inside: list[Statement]) -> str:
        """The banner that we are at, or the function that `train` has called."""
        if banner := next((x.banner for x in inside if x.banner), ""):
            return f"iteration {self.iteration}, {banner}" if self.iteration else banner
        self.iteration = 0
        blocks = [x.block for x in inside if x.block != "train"]
        return blocks[-1] if blocks else "train"

    def frozen(self, x: Any, depth: int = 4) -> Any:
        """A copy that later changes do not reach; None if it cannot be compared."""
        if isinstance(x, torch.Tensor):
            x = (x.float() if x.is_floating_point() else x).numpy(force=True)
        if isinstance(x, np.ndarray):
            key = x.shape, x.dtype, hash(x.tobytes())  # equal arrays are one
            if key not in self.arrays:
                self.arrays[key] = x.copy() if x.dtype.kind in "biuf" else None
            return self.arrays[key]
        if isinstance(x, int | float | np.generic):
            return x
        if isinstance(x, torch.nn.Module):  # which is empty before its `super().__init__()`
            x = x.state_dict() if "_parameters" in vars(x) else {}
        elif isinstance(x, tuple) and hasattr(x, "_asdict"):
            x = x._asdict()
        elif type(x).__module__ == self.module and hasattr(x, "__dict__"):
            x = vars(x)
        if isinstance(x, dict) and depth:
            kind = Parameters if isinstance(x, Parameters) else dict
            return kind((str(k), self.frozen(y, depth - 1)) for k, y in x.items())
        if isinstance(x, list | tuple) and depth and not all(isinstance(y, str) for y in x):
            return tuple(self.frozen(y, depth - 1) for y in x[-MANY:])
        return None


class Parameters(dict):
    """Tensors by the names of the parameters that they belong to."""


def named(x: Any, scope: Mapping[str, Any]) -> Any:
    """A list of tensors, such as gradients, by the names of a model's parameters of its shapes."""
    if isinstance(x, list | tuple) and x and all(isinstance(y, torch.Tensor) for y in x):
        for model in (y for y in scope.values() if isinstance(y, torch.nn.Module)):
            parameters = dict(model.named_parameters())
            if [y.shape for y in parameters.values()] == [y.shape for y in x]:
                return Parameters(zip(parameters, x))
    return x


# --- Running ---

RESUMED = "after --resume, "
LIMIT = 15  # steps after which an episode is cut off
# Settings of short runs in which every line matters: rewards, values and ratios reach their clip
# ranges, episodes fail and are cut off, and there is an entropy bonus. A script has some of them.
SETTINGS = (
    {"num_envs": 2, "num_steps": 64, "clip_obs": 2.0, "clip_reward": 1.0}
    | {"num_minibatches": 2, "update_epochs": 2, "learning_rate": 1e-3, "clip_coef": 0.02}
    | {"ent_coef": 0.01, "track": False}
    | {"device": "cpu", "compile": "no", "torch_threads": 1, "bfloat16": False}
    # Language
    | {"sft_documents": 200, "sft_steps": 3, "sft_batch_size": 16, "temperature": 0.7}
    | {"num_pairs": 28, "reward_epochs": 1, "reward_batch_size": 12, "num_epochs": 2}
    | {"batch_size": 16, "group_size": 4, "num_prompts": 8, "warmup_steps": 2}
    | {"clip_high": 0.03, "value_clip_coef": 0.02}
    | {"env": "benchmark.lab.tiny_model:Guess", "num_episodes": 16}
    | {"max_tokens": 5, "microbatch_size": 3}
    | {"float32": True, "value_lr": 0.05, "eval_episodes": 4}
)
# The same for constants of a script.
CONSTANTS = {"GAME_PROCESSES": 1, "MAX_GAME_STEPS": 40, "NUM_SAMPLES": 64, "NUM_EVALUATED": 16}
FEW = 20  # prompts that are answered at once


def only_imported(script: Script, index: int, *result: Any) -> Any:
    """In place of a recorder while a script is imported, which must not begin to train."""
    if script.statements[index].block == "train":
        text = f"{script.path} trains when it is imported: let `if __name__ == "
        raise BenchmarkError(f'{text}"__main__":` stand before it.')
    return [*result, None][0]


def finding_neighbors(script: Script) -> Any:
    """A context in which a script can import what stands next to it."""
    return mock.patch.object(sys, "path", [*sys.path, str(script.path.parent)])


@functools.cache
def folder_of_runs() -> tempfile.TemporaryDirectory:
    """Where scripts write in place of runs/; it is deleted when the process ends."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def load(script: Script) -> types.ModuleType:
    """Import a script, which is to write its runs elsewhere.

    It stays in the current folder, where its environment may read files.
    """
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Constant) and f"{node.value}/".startswith("runs/"):
            node.value = f"{Path(folder_of_runs().name).as_posix()}/{node.value}"
    module = types.ModuleType(f"traced_{len(sys.modules)}")
    module.__file__, module._record_ = str(script.path), functools.partial(only_imported, script)
    sys.modules[module.__name__] = module
    try:
        with finding_neighbors(script):
            exec(compile(script.tree, str(script.path), "exec"), module.__dict__)
    except BenchmarkError:
        raise
    except Exception as error:
        raise BenchmarkError(f"{script.path} cannot be imported: {told(error)}.") from error
    return module


def told(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")


def judged_by_a_token(respond: Callable) -> Callable:
    """What answers prompts in grpo_minimal.py: few of them, and an even first token is right, since
    a model that is hardly trained never has a whole sum right.
    """

    def call(model: Any, prompts: torch.Tensor, tries: int) -> tuple[torch.Tensor, ...]:
        prompts, responses, rewards = respond(model, prompts[:FEW], tries)
        return prompts, responses, (responses[:, 0] % 2 == 0).view_as(rewards).float()

    return call


def execute(script: Script, settings: dict[str, Any], arrays: dict) -> Run:
    """Train, go on from the checkpoint if the script can, and act with the trained policy.

    `arrays` are those of all runs to be compared.
    """
    module = load(script)
    for name in CONSTANTS.keys() & vars(module).keys():
        setattr(module, name, CONSTANTS[name])
    if {"solve", "respond"} <= vars(module).keys():
        module.respond = judged_by_a_token(module.respond)
    torch.manual_seed(0)  # an agent that is loaded is first made, with random weights
    recorder = module._record_ = Recorder(script, module.__name__, arrays)
    fields = {x.name for x in dataclasses.fields(module.Args)}
    result, error, line = {}, "", 0
    with aside(script, settings), finding_neighbors(script):
        try:
            args = module.Args(**{x: y for x, y in settings.items() if x in fields})
            result = {"train": module.train(args)}
            if hasattr(module, "load_policy"):
                result["policy"] = acted(module, result["train"])
            if "resume" in inspect.signature(module.train).parameters:
                recorder.part = RESUMED
                more = dataclasses.replace(args, **one_more(args))
                result["resumed"] = module.train(more, resume=result["train"]["run_dir"])
        except (Exception, SystemExit) as caught:
            error, frames = told(caught), traceback.extract_tb(caught.__traceback__)
            line = [0, *(x.lineno for x in frames if x.filename == str(script.path))][-1]
    if not recorder.events:
        raise BenchmarkError(f"{script.path}: {error}.")
    return Run(script, recorder.events, recorder.frozen(result), error, line)


def one_more(args: Any) -> dict[str, int]:
    """The setting with which a run goes on for an iteration."""
    if "num_iterations" in {x.name for x in dataclasses.fields(args)}:
        return {"num_iterations": args.num_iterations + 1}
    return {"total_timesteps": args.total_timesteps + args.num_steps * args.num_envs}


def acted(module: types.ModuleType, result: dict[str, Any]) -> list[Any]:
    """What a few steps with the saved policy show: observations, or returns of a batched one."""
    args = result["args"]
    if "env" not in inspect.signature(module.load_policy).parameters:
        return module.evaluate(result["run_dir"], getattr(args, "num_envs", 4))
    make = getattr(module, "make_env", lambda args: gym.make(args.env_id))
    with contextlib.closing(make(args)) as env:
        policy = module.load_policy(result["run_dir"], env)
        takes, seen = inspect.signature(policy).parameters, []
        obs, info = env.reset(seed=args.seed)
        for _ in range(4):
            seen.append(obs)
            also = {"start": True, "mask": info.get("action_mask")}
            also = {name: x for name, x in also.items() if name in takes}
            obs, *_, info = env.step(policy(obs, **also))
    return seen


class BothEnds(gym.Wrapper):
    """Every other failure is also where the time limit is, since an episode can end by both."""

    failures = 0

    def step(self, action: Any) -> tuple:
        obs, reward, failed, cut, info = self.env.step(action)
        self.failures += bool(failed)
        return obs, reward, failed, cut or bool(failed and self.failures % 2 == 0), info


class Moment(float):
    """A time of which every other is one second away, so that two runs are equally fast."""

    def __sub__(self, _: float) -> float:
        return 1.0


@contextlib.contextmanager
def aside(script: Script, settings: dict[str, Any]) -> Iterator[None]:
    """Say nothing, end episodes early, and let games pay more."""
    make = gym.make

    def make_short(env_id: Any, **options: Any) -> gym.Env:
        if str(env_id).startswith("ALE/"):  # in which larger rewards than 1 come late
            return gym.wrappers.TransformReward(make(env_id, **options), lambda x: 3.0 * x)
        return BothEnds(make(env_id, **{"max_episode_steps": LIMIT} | options))

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.ExitStack() as patches,
        warnings.catch_warnings(),
    ):
        patches.enter_context(mock.patch("gymnasium.make", make_short))
        batched = {"max_episode_steps": LIMIT, "wrappers": [BothEnds]}
        short = functools.partial(gym.make_vec, **batched)
        patches.enter_context(mock.patch("gymnasium.make_vec", short))
        for clock in ("time.time", "time.perf_counter"):
            # Not 0: to the thread that writes logs, it would always be time for the first flush.
            patches.enter_context(mock.patch(clock, lambda: Moment(1.0)))
        imports = any("import envpool" in x for x in script.lines)
        if imports and settings.get("backend") != "gymnasium":
            with contextlib.suppress(ImportError):  # which the script may tell better
                import envpool

                short = functools.partial(envpool.make, max_episode_steps=LIMIT)
                patches.enter_context(mock.patch("envpool.make", short))
        warnings.simplefilter("ignore")
        yield
