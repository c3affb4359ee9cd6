"""`python -m benchmark diff`: where a changed copy of a script first computes something else."""

import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import patched

from benchmark.lab import diff, trace
from benchmark.lab.provenance import ROOT, BenchmarkError

SMALL = '''
import dataclasses
import functools

import numpy as np

SIZE = 3


@dataclasses.dataclass
class Args:
    env_id: str = "Nowhere-v0"
    seed: int = 1
    gamma: float = 0.9
    num_envs: int = 2
    num_steps: int = 20
    total_timesteps: int = 80


class Agent:
    def __init__(self, rng):
        def draw():
            return rng.normal(size=SIZE)

        self.weights = draw()

    def value(self, obs):
        return np.tanh(obs[..., :1]).sum(-1) * self.weights.sum()


def gae(rewards, values, next_values, terminated, done, args):
    """Advantages."""
    # An episode that failed has no future.
    next_values[terminated] = 0.0
    delta = rewards + args.gamma * next_values - values
    decay = args.gamma * (1 - done)
    advantages = np.zeros_like(delta)
    last = np.zeros(args.num_envs)
    for t in reversed(range(len(delta))):
        last = delta[t] + decay[t] * last
        advantages[t] = last
    return advantages


def normalize(x):
    return (x - x.mean()) / x.std()


@functools.cache
def log(step):
    return {
        "step": step,
        "first": step == 0,
    }


def train(args):
    rng = np.random.default_rng(args.seed)
    agent = Agent(rng)
    shape = args.num_steps, args.num_envs
    for iteration in range(2):
        # --- Collect ---
        obs = rng.normal(size=(args.num_steps + 1, args.num_envs, 4))
        chance = rng.random(shape)
        rewards = np.zeros(shape)
        terminated = np.zeros(shape, bool)
        truncated = np.zeros(shape, bool)
        for t in range(args.num_steps):
            rewards[t] = obs[t].sum(-1)
            terminated[t] = chance[t] < 0.2
            truncated[t] = chance[t] > 0.9
        done = terminated | truncated
        # --- Advantages ---
        values = agent.value(obs)
        next_values = values[1:].copy()
        next_values[truncated] = 0.5
        advantages = gae(rewards, values[:-1], next_values, terminated, done, args)
        # --- Update ---
        step = 0.1 * normalize(advantages).max()
        if step > 1e9:
            step = 0.0
        agent.weights = agent.weights + step
        # --- Log and save ---
        metrics = log(iteration)
    return {"weights": agent.weights}
'''
LATE = """late = np.concatenate([done[:1], done[:-1]])
    decay = args.gamma * (1 - late)"""
END = "the steps with which an episode "
# A piece of the script, what stands there instead, and what `diff` says of it.
BUGS = [
    ("(1 - done)", "(1 - 0 * done)", "`decay` in `gae`", f"{END}ends."),
    ("decay = args.gamma * (1 - done)", LATE, "`decay` in `gae`", f"{END}ends, and those after."),
    ("next_values[terminated] = 0.0", "pass", "`delta` in `gae`", f"{END}fails."),
    ("next_values[truncated] = 0.5", "pass", "`next_values`", f"{END}is cut off by the"),
    ("obs[t].sum(-1)", "obs[t].mean(-1)", "`rewards` in `train`", "DIFFERENT  iteration 1, coll"),
    ("x.std()", "x.std(ddof=1)", "`normalize`", "gets the same arguments"),
    ("step > 1e9", "step > -1e9", "ondition in `train`", "is True, in the original False."),
    ("size=SIZE", "size=9", "`Agent` is built differently", "(9,), in the original (3,)."),
    ("SIZE = 3", "SIZE = 4", "`Agent` is built differently", "`draw`"),
    ("[..., :1]", "[..., :2]", "`value`", "gets the same arguments"),
    ("reversed(range(len(delta)))", "list(range(len(delta)))", "`t` in `gae` is 0", "advantages"),
    ("delta[t] +", "deltas[t] +", "NameError: name 'deltas' is not defined", "advantages"),
    ("in range(2)", "in range(1)", "weights", "DIFFERENT  iteration 2, log and save"),
    ("log(iteration)", "log(2 + iteration)", "`metrics.step`", "DIFFERENT  iteration 1, log and"),
]


@pytest.fixture
def compare(command):
    """Exit code of the command, and what it says of a script in which texts are replaced."""

    def call(*replaced, text=SMALL, original=SMALL, words=("small.py",)):
        Path("small.py").write_text(original)
        Path("mine.py").write_text(patched(text, replaced))
        return command("diff", "mine.py", *words)

    return call


@pytest.mark.parametrize(("before", "after", "what", "more"), BUGS)
def test_a_bug_is_found_where_it_is(compare, before, after, what, more):
    code, text = compare((before, after))
    first, _, lines = text.partition("Compare (- small.py, + mine.py):")
    assert code == 1 and what in first and more in first
    for sign, part in (("-", before), ("+", after)):
        for line in part.splitlines():
            assert re.search(rf"\n[{sign}] +\d+ .*{re.escape(line.strip())}", lines), line


def test_one_difference_after_the_other_is_told(compare):
    code, text = compare(("size=SIZE", "size=9"), ("(1 - done)", "1"), ("x.std()", "1"))
    parts = text.split("With the original's lines there, the next difference is:")
    found = ["`Agent` is built differently", "`decay` in `gae`", "`normalize` gets the same"]
    assert code == 1 and [x in y for x, y in zip(found, parts, strict=True)] == [True] * 3
    assert text.endswith("With the original's lines there, both are equal.\n")


NETWORK = """    def __init__(self, rng):
        def draw():
            return rng.normal(size=SIZE)

        self.weights = draw()
"""
OTHER = """    def __init__(self, rng):
        self.weights = np.ones(9)
"""


@pytest.mark.parametrize(
    "replaced", [(NETWORK, OTHER), ("def gae(", f"class Agent(Agent):\n{OTHER}\n\ndef gae(")]
)
def test_a_bug_behind_another_network_is_found(compare, replaced):
    code, text = compare(replaced, ("(1 - done)", "1"))
    network, bug = text.split("With the original's lines there, the next difference is:")
    assert code == 1 and "(9,), in the original (3,)" in network and "`decay` in `gae`" in bug
    assert text.endswith("With the original's lines there, both are equal.\n")


def test_a_bug_behind_a_function_that_the_copy_lacks_is_found(compare):
    normalize = SMALL[SMALL.index("def normalize(") : SMALL.index("@functools.cache")]
    other = ("0.1 * normalize(advantages).max()", "0.1 * advantages.max()")
    code, text = compare((normalize, ""), other, ("= agent.weights + step", "= step"))
    assert code == 1 and text.count("  DIFFERENT  ") == 2
    assert text.endswith("With the original's lines there, both are equal.\n")


def test_a_difference_that_changes_nothing_in_the_end_is_harmless(compare):
    harmless = ("advantages = np.zeros_like(delta)", "advantages = np.float64(done)")
    code, text = compare(harmless)
    assert code == 0 and "In the end, both have the same weights" in text
    assert "DIFFERENT  iteration 1, advantages (the same in the end)\n" in text
    assert "These are" not in text
    assert compare(harmless, ("gamma: float = 0.9", "gamma: float = 0.8"))[0] == 1
    code, text = compare(("rewards + args.gamma", "rewards + 0.5"), harmless)
    assert code == 1 and "In the end" not in text and text.count("DIFFERENT") == 2


def test_a_result_that_differs_though_every_statement_is_equal_is_told(compare):
    last = 'return {"weights": agent.weights'
    code, text = compare((last, f"if True:\n        {last} + 1"))  # indented, it is another one
    assert code == 1 and "`result.train.weights` at the end differs, although all" in text


def test_tensors_of_a_list_have_the_names_of_the_parameters_of_their_shapes():
    agent = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    gradients = [torch.zeros_like(x) for x in agent.parameters()]
    own = [x + (x.shape == (1, 3)) for x in gradients]
    recorder = trace.Recorder(None, "", {})
    mine, theirs = (recorder.frozen(trace.named(x, {"agent": agent})) for x in (own, gradients))
    assert [x for x, *_ in diff.leaves(mine, theirs, "gradients")] == ["gradients of 1.weight"]
    alone = recorder.frozen(trace.named(own, {}))  # the copy has no model at hand
    assert [x for x, *_ in diff.leaves(alone, theirs, "gradients")] == ["gradients[2]"]
    assert trace.named(own[:2], {"agent": agent}) == own[:2]


def test_entries_differ_by_more_than_the_rounding_of_the_largest_and_nan_is_nan():
    assert not diff.differing([1e3, math.nan, *[5e-3] * 99], [1e3, math.nan, *[0] * 99]).any()
    assert diff.differing([1e3, math.nan, 0.05], [1e3, 0, 0]).tolist() == [False, True, True]
    assert len([*diff.leaves(np.ones((2, 3)), np.ones((3, 2)), "x")]) == 1


def test_a_mean_whose_terms_nearly_cancel_differs_by_rounding():
    mean = [1.292e-5, 6.47e-5]  # two policy losses in float32, and rounded otherwise
    assert not diff.differing([1.306e-5, 6.49e-5], mean).any()
    assert diff.differing([1.1e-5, 6.1e-5], mean).all()


def test_a_loop_may_become_a_function(compare):
    start, end = SMALL.index("    for t in reversed"), SMALL.index("    return advantages")
    loop = SMALL[start:end]
    call = "    advantages = summed(delta, decay, advantages, last)\n"
    new = f"def summed(delta, decay, advantages, last):\n{loop}    return advantages\n\n\ndef gae("
    code, text = compare((loop, call), ("def gae(", new))
    assert code == 0 and text.endswith("Everything else is equal.\n")


def test_lines_have_the_numbers_of_the_files_also_behind_lines_that_were_put_back(compare):
    more = "\n    " * 3 + "next_values[terminated] = 1.0"
    _, text = compare(("next_values[terminated] = 0.0", more), ("0.1 * norm", "0.2 * norm"))
    for sign, code, shift in (("-", "0.1 * norm", 0), ("+", "0.2 * norm", 3)):
        number = SMALL[: SMALL.index("0.1 * norm")].count("\n") + 1 + shift
        assert re.search(rf"\n\{sign} +{number} .*{re.escape(code)}", text)


def test_a_branch_is_put_back_as_a_whole(compare):
    branch = "\n        else:  # usually\n            step = 2 * step\n            t = 0"
    code, text = compare(("step = 0.0", "step = 0.0" + branch), ("x.std()", "1"))
    lines = [x.strip() for x in branch.splitlines()[1:]]
    assert code == 1 and re.findall(r"\n\+ +\d+ +(.*)", text)[1:] == lines
    assert text.endswith("With the original's lines there, both are equal.\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        done = ", "        if iteration < 1:\n            done = "),
        ("        if step > 1e9:\n            step = 0.0", "        step = 0.0"),
    ],
)
def test_a_condition_around_lines_is_put_back_or_taken_away_with_their_indent(
    compare, before, after
):
    code, text = compare((before, after))
    assert code == 1 and text.count("DIFFERENT") == 1
    assert text.endswith("With the original's lines there, both are equal.\n")


def test_settings_are_told_and_flags_of_the_copy_work(compare):
    other = ("gamma: float = 0.9", "power: float = 1.0\n    gamma: float = 0.8")
    used = ("= obs[t].sum(-1)", "= obs[t].sum(-1) ** args.power")
    code, text = compare(other, used)
    assert "setting: gamma is 0.8, in the original 0.9" in text
    assert code == 1 and "\nOnly settings differ.\n" in text
    code, text = compare(other, used, words=("small.py", "--power", "2"))
    assert code == 1 and "`rewards` in `train`" in text


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ('"step": step,', '"step": step,\n        "s": 1,', ['+ "s": 1,']),
        ("@functools.cache\n", "", ["- @functools.cache"]),
        ("step = 0.1", "normalize(done)\n        step = 0.1", ["+ normalize(done)"]),
        ("rng = np", "import neighbor\n    rng = np", ["+ import neighbor"]),
    ],
)
def test_what_computes_the_same_is_no_difference_but_listed(compare, before, after, lines):
    Path("neighbor.py").touch()
    code, text = compare((before, after))
    found = re.findall(r"\n([-+]) +\d+ +(.*)", text)
    assert code == 0 and [" ".join(x) for x in found] == lines
    assert "\nThese changes did nothing in 2 iterations: a bug in them would not show.\n" in text
    assert (
        text.index("did nothing") < text.index("  equal") < text.index("Everything else is equal")
    )


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (
            "class Args:",
            "class Args:\n    mine: int",
            "mine.py refuses the settings of a short run:",
        ),
        (
            "SIZE = 3",
            "SIZE = 3\n\n\ndef train(args):\n    pass\n\n\ntrain(0)",
            "mine.py trains when",
        ),
    ],
)
def test_what_cannot_be_trained_for_a_moment_is_a_sentence(compare, before, after, word):
    code, text = compare((before, after))
    assert code == 2 and word in text and text.count("\n") == 1


def test_a_copy_is_never_its_own_original(monkeypatch):
    copy, scripts = ROOT / "ppo_minimal.py", {*ROOT.glob("*.py")}
    recipe = "recipes/dpo_on_reviews.py"  # which is a whole run, unlike others
    scripts |= {*ROOT.glob("recipes/*_on_reviews.py")}
    committed = f"tests\nppo_minimal.py\nrecipes/lstm.py\n{recipe}\n"
    monkeypatch.setattr(diff, "git", lambda *_: committed)
    monkeypatch.setattr(diff, "source_at", lambda commit, name: f"{name} at {commit}")
    found = {copy: "ppo_minimal.py at HEAD", ROOT / recipe: f"{recipe} at HEAD"}
    assert diff.originals(copy) == found

    monkeypatch.setattr(diff, "git", lambda *_: "tests\n")
    assert diff.originals(copy).keys() == scripts - {copy}

    def no_git(*_):
        raise BenchmarkError("not a repository")

    monkeypatch.setattr(diff, "git", no_git)
    assert diff.originals(copy).keys() == scripts - {copy}


def test_a_file_is_compared_with_its_last_commit_if_it_was_changed(compare, monkeypatch):
    monkeypatch.setattr(diff, "originals", lambda copy: {copy: SMALL})
    code, text = compare(("x.std()", "1"), words=())
    assert code == 1 and "is compared with mine.py of the last commit:" in text
    code, text = compare(words=())
    assert code == 2 and "mine.py is as in the last commit: add its original" in text


def test_changes_that_the_short_run_does_not_reach_are_told_behind_a_bug_too(compare):
    code, text = compare(("    step = 0.0", "    step = 9.0"), ("x.std()", "1"))
    end = (
        "\nWith the original's lines there, both are equal.\n\nThese changes did nothing in 2 iter"
    )
    _, lines = text.split(end)
    found = re.findall(r"\n([-+]) +\d+ +(.*)", lines)
    assert code == 1 and found == [("-", "step = 0.0"), ("+", "step = 9.0")]


RESUMABLE = patched(
    SMALL,
    [
        ("import numpy", "import os\n\nimport numpy"),
        ("def train(args):", "def train(args, resume=None):"),
        ("for iteration in range(2)", "for iteration in range(last - 1 if resume else 0, last)"),
        (
            "    shape = args",
            """    run_dir = resume or "runs/small"
    if resume:
        agent.weights = np.load(f"{run_dir}/weights.npy")
    last = args.total_timesteps // (args.num_steps * args.num_envs)
    shape = args""",
        ),
        (
            'return {"weights": agent.weights}',
            """os.makedirs(run_dir, exist_ok=True)
    np.save(f"{run_dir}/weights.npy", agent.weights)
    return {"weights": agent.weights, "run_dir": run_dir}""",
        ),
    ],
)
AFTER = "if iteration == 3:\n            step = 0.0"


def test_a_run_goes_on_from_its_checkpoint_which_is_not_in_this_folder(compare):
    code, text = compare(text=RESUMABLE, original=RESUMABLE)
    assert code == 0 and "2 iterations of 64 steps" in text and "one more after --resume;" in text
    assert not Path("runs").exists()
    load = 'agent.weights = np.load(f"{run_dir}/weights.npy")'
    code, text = compare((load, "pass"), text=RESUMABLE, original=RESUMABLE)
    first, _, lines = text.partition("Compare (-")
    assert code == 1 and "  DIFFERENT  after --resume, " in first and f"{load}\n" in lines


def test_what_shows_later_is_found_with_more_iterations(compare):
    bug = ("        if step > 1e9", f"        {AFTER}\n        if step > 1e9")
    code, text = compare(bug, text=RESUMABLE, original=RESUMABLE)
    assert code == 0 and "did nothing in 3 iterations" in text and "try --iterations 15," in text
    for words in ("--iterations 4", "--iterations=4 --seed 3"):
        words = ["small.py", *words.split()]
        code, text = compare(bug, text=RESUMABLE, original=RESUMABLE, words=words)
        assert code == 1 and "  DIFFERENT  iteration 4, update" in text


def test_an_environment_may_read_a_file_of_this_folder(compare):
    Path("gravity.txt").write_text("9.8")
    text = SMALL.replace("chance = ", 'gravity = np.loadtxt("gravity.txt")\n        chance = ')
    code, said = compare(text=text, original=text)
    assert code == 0 and said.endswith("No difference.\n")


CHANCE = "chance = np.random.random(shape)"  # of which the seed does not decide


def test_an_environment_that_does_not_repeat_itself_is_no_difference_of_the_copy(compare):
    text = SMALL.replace("chance = rng.random(shape)", CHANCE)
    code, said = compare(("Advantages.", "GAE."), text=text, original=text)
    assert code == 2 and "differ, first in `chance` in `train`: the environment does not" in said
    # A difference before is one; so is another network, behind which nothing can be said.
    code, said = compare(("size=SIZE", "size=9"), text=text, original=text)
    assert code == 1 and said.count("  DIFFERENT  ") == 1 and "`Agent` is built diff" in said
    assert "other differences. Two runs of small.py with the same seed differ, first in" in said


def test_a_number_that_stands_for_an_array_is_another_variable(compare):
    both = "rewards[t], terminated[t] = obs[t].sum(-1), chance[t] < 0.2"
    text = SMALL.replace("rewards[t] = obs[t].sum(-1)", both)
    late = """reward, terminated[t] = obs[t].sum(-1)[0], chance[t] < 0.2
            rewards[t] = 0.0 if t == 0 else last
            last = reward"""
    code, said = compare((both, late), text=text, original=text)
    assert code == 1 and "has shape" not in said and "`rewards` of `gae`" in said
    assert "These are all" not in said and "+   " in said and "last = reward" in said


def test_a_line_is_put_back_with_the_names_of_the_copy(compare):
    decay = ("decay = args.gamma * (1 - done)", "factor = (1 - done)")
    code, text = compare(decay, ("decay[t] * last", "factor[t] * last"), ("x.std()", "1"))
    assert code == 1 and text.count("  DIFFERENT  ") == 2
    assert text.endswith("With the original's lines there, both are equal.\n")


def test_an_episode_can_end_by_a_failure_and_the_time_limit_at_once():
    with trace.aside(trace.Script(Path("small.py"), SMALL), {}):
        env = gym.make("CartPole-v1")
        ends = []
        for seed in range(8):
            env.reset(seed=seed)
            while not any(last := env.step(0)[2:4]):
                pass
            ends.append(tuple(map(bool, last)))
    assert {*ends} == {(True, False), (True, True)}


def test_names_comments_and_the_order_of_functions_do_not_matter(compare):
    start, end = (SMALL.index(x) for x in ("def gae(", "def normalize("))
    gae = re.sub(r"\bdelta\b", "errors", SMALL[start:end]).replace("    # An ", "    # Some ")
    text = (SMALL[:start] + SMALL[end:]).replace("def train(", f"{gae}def train(")
    text = text.replace("next_values", "following").replace("chance", "luck")
    assert compare(text=text)[1].endswith("No difference.\n")
    code, said = compare(("following[terminated] = 0.0", "pass"), text=text)
    assert code == 1 and "`delta` in `gae`" in said and f"{END}fails." in said


@pytest.mark.slow
def test_the_original_is_found_and_its_lines_are_shown(compare):
    text = diff.originals(Path("mine.py"))[ROOT / "ppo_minimal.py"]
    Path("next_to_copy.py").touch()  # which gymnasium imports
    flags = "--num-steps 32 --total-timesteps 64 --seed 3 --env-id next_to_copy:Hopper-v4"
    bug = "agent(next_obs)[1] * (1 - terminated)", "agent(next_obs)[1]"
    code, said = compare(bug, text=text, words=flags.split())
    assert "with ppo_minimal.py" in said and f"{END}fails" in said
    assert "  equal      iteration 1: collect\n  DIFFERENT  iteration 1, adv" in said
    assert code == 1 and re.search(r"\n- +\d+ +next_values = agent.*terminated\)\n\+ +\d+ ", said)


@pytest.mark.slow
def test_a_simulator_of_many_environments_is_compared(compare):
    text = (ROOT / "ppo_vector_env.py").read_text()
    bug = "obs_stats.update(raw_obs[:-1].flatten(0, 1)[acted])", "obs_stats.update(raw_obs[0])"
    flags = "--backend gymnasium --env-id Hopper-v4 --num-steps 32 --update-epochs 1"
    code, said = compare(bug, text=text, words=(ROOT / "ppo_vector_env.py", *flags.split()))
    assert code == 1 and "`x` of `update`" in said and "one more after --resume" in said
    failed, cut = map(int, re.search(r"(\d+) episodes failed and (\d+) were", said).groups())
    assert failed > 1 and cut > 1
    assert said.endswith("With the original's lines there, both are equal.\n")


def test_a_script_that_plays_no_episodes_is_compared(compare):
    text = patched(SMALL, [('    env_id: str = "Nowhere-v0"\n', "")])
    code, said = compare(("x.std()", "1"), text=text, original=text)
    assert code == 1 and "\nBoth trained for a moment, with few samples and small ba" in said


GROUP = ("--advantages", "group")


@pytest.mark.slow
def test_a_bug_in_a_language_model_is_found(compare):
    text = (ROOT / "grpo_minimal.py").read_text()
    bug = ("rewards - rewards.mean(dim=1, keepdim=True)", "rewards - rewards.mean()")
    code, said = compare(bug, text=text, words=(ROOT / "grpo_minimal.py",))
    assert code == 1 and "`advantages` in `group_advantages`" in said


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda x: x.stem)
def test_every_script_equals_itself(compare, path):
    assert compare(text=path.read_text(), words=(path,))[1].endswith("No difference.\n")


def test_simulators_of_envpool_are_cut_off_early_and_clocks_are_the_same_in_both(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", SimpleNamespace(make=lambda *_, **x: x))
    script = trace.Script(Path("small.py"), f"import envpool\n{SMALL}")
    with trace.aside(script, {}):
        from envpool import make

        assert make("Hopper-v4", num_envs=2) == {"num_envs": 2, "max_episode_steps": trace.LIMIT}
        assert time.time() - time.time() == time.perf_counter() - time.perf_counter() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("before = own.roll(-1, dims=1)", "before = own", ()),
        ("self.own.append(True)", "self.own.append(token not in self.chat.stops)", ()),
        ("(logits / self.args.temperature).log_softmax", "logits.log_softmax", ()),
        ("(loss / num_tokens).backward()", "(loss / own.numel()).backward()", ()),
        ("advantages / (groups.std(1, keepdim=True)", "advantages / (groups.std()", GROUP),
    ],
)
def test_a_bug_in_training_a_language_model_is_found(compare, before, after, words):
    """With a random model that is made for it."""
    text = (ROOT / "ppo_llm.py").read_text()
    code, said = compare((before, after), text=text, words=(ROOT / "ppo_llm.py", *words))
    lines = said.partition("Compare (-")[2]
    assert code == 1 and after in lines.partition("What differs later")[0]
