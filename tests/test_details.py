"""The detail tags: complete, unique, with fixed titles; and the table made from them."""

import dataclasses
import importlib
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("*.py"))
# Number, kind, title, settings, source; behind the settings a remark may stand.
TAG = re.compile(
    r"# (?:Detail (\w+/\d+)|(Extra|Deviation)): ([^([]+?)(?: \(([\w, ]+)\)(?:, [^[]+)?)?"
    r"(?: \[(.+)\])?"
)
FILE = r"(?:\w+: )?(?:[\w-]+/)*\w+\.py L\d+(?:-\d+)?(?:, L\d+(?:-\d+)?)*"

TITLES = {
    "{}/37": """
    vectorized architecture; orthogonal and constant initialization; Adam epsilon; learning rate
    annealing; generalized advantage estimation; minibatch updates; advantage normalization;
    clipped surrogate objective; value function loss clipping; overall loss and entropy bonus;
    global gradient clipping; debug variables; shared or separate networks; no-op reset; max and
    skip; episodic life; fire reset; warp frame; reward clipping to sign; frame stack; shared
    Nature CNN; image scaling; normal distribution; state-independent log std; independent
    action components; separate networks; action clipping and storage; observation
    normalization; observation clipping; reward scaling; reward clipping; layer initialization;
    zero initial states; reset at episode end; sequential minibatches; rebuild states in
    training; independent action components
    """,
    "K{}/3": """
    KL-penalized objective; exact KL divergence; adaptive penalty coefficient
    """,
    "R{}/21": """
    query and response concatenated; special padding token, truncated inputs; positions skip
    padding tokens; fixed-length responses without padding; learning-rate annealing; different
    seeds for processes; reward only at the last token; reward head initialization;
    normalization before and after training; logits scaled by the temperature; value head
    initialization; queries start and end with a period; disable dropout; rejection sampling;
    discount factor 1; batches of responses; per-token KL penalty; per-minibatch whitening, of
    rewards too; clipped value function; adaptive KL; TensorFlow's Adam epsilon
    """,
    "G{}/8": """
    groups of responses; advantage relative to the group's mean; division by the group's spread;
    one advantage for all words of a response; length divisor; KL penalty in the reward; KL
    penalty in the loss, by k3; few passes over a batch
    """,
    "D{}/8": """
    policy starts as the reference; chosen and rejected in one pass; sum over the words of a
    response; implicit reward; logistic loss of the difference; likelihood of the chosen
    response; learning-rate warm-up; both log-probabilities logged
    """,
}
TITLES = {
    number.format(i): title
    for number, titles in TITLES.items()
    for i, title in enumerate(" ".join(titles.split()).split("; "), 1)
}


def series(first, last, prefix="", total=37):
    return {f"{prefix}{i}/{total}" for i in range(first, last + 1)}


LANGUAGE_MODEL = {f"R{i}/21" for i in (1, 2, 3, 4, 10, 13)}
CORE, ATARI, CONTINUOUS = series(1, 13), series(14, 22), series(23, 31)
OWED = {
    "ppo_continuous_action.py": CORE | CONTINUOUS,
    "ppo_kl_penalty.py": CORE - {"8/37"} | CONTINUOUS | series(1, 3, "K", 3),
    "ppo_multidiscrete.py": CORE | series(28, 31) | {"26/37", "37/37"},
    "ppo_atari.py": CORE | ATARI,
    "ppo_atari_lstm.py": CORE | ATARI | series(32, 36),
    "ppo_rlhf_toy.py": CORE - {"2/37", "7/37"} | series(1, 21, "R", 21) - {"R6/21", "R12/21"},
    "grpo_rlhf_toy.py": {"6/37", "8/37", "11/37", "12/37", "R14/21", "R20/21"}
    | (LANGUAGE_MODEL | series(7, 9, "R", 21) | series(1, 8, "G", 8)),
    "dpo_rlhf_toy.py": LANGUAGE_MODEL | series(1, 8, "D", 8),
}
ANNEALING, STOPPING = "clip range annealing", "early stopping on target_kl"
LOG_STD, ADAPTED = "log std annealed instead of learned", "learning rate adapted to the KL"
PARALLEL, MASKING = "parallelized gradient update", "invalid action masking"
LIMITS = "time limits are not failures"
ALSO = {  # extras and deviations
    "ppo_continuous_action.py": {ANNEALING, STOPPING, LOG_STD, ADAPTED, LIMITS},
    "ppo_kl_penalty.py": {LIMITS},
    "ppo_multidiscrete.py": {ANNEALING, STOPPING, MASKING, LIMITS},
    "ppo_atari.py": {ANNEALING, STOPPING, PARALLEL, LIMITS},
    "ppo_atari_lstm.py": {ANNEALING, STOPPING, LIMITS},
    "ppo_rlhf_toy.py": {
        "an episode ends at the stop word",
        "rewards are scaled, their mean is not restored",
    },
    "grpo_rlhf_toy.py": set(),
    "dpo_rlhf_toy.py": set(),
}


def tags(path):
    """Line, number or kind, title, settings, source of each tag, in the order of the file."""
    for line, text in enumerate(path.read_text().splitlines(), 1):
        text = text.strip()
        if re.match(r"# (Detail|Extra|Deviation)\b", text):
            match = TAG.fullmatch(text)
            assert match, f"malformed: {text}"
            number, kind, title, settings, source = match.groups()
            yield line, number or kind, title, settings.split(", ") if settings else [], source


on_each = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


@on_each
def test_each_script_has_each_number_it_owes_once_under_its_title(path):
    numbered = [(number, title) for _, number, title, *_ in tags(path) if "/" in number]
    assert sorted(numbered) == sorted((number, TITLES[number]) for number in OWED[path.name])


@on_each
def test_extras_and_deviations_are_the_known_ones(path):
    others = [title for _, kind, title, *_ in tags(path) if "/" not in kind]
    assert sorted(others) == sorted(ALSO[path.name])


@on_each
def test_details_have_a_source_and_settings_that_exist(path):
    fields = {x.name for x in dataclasses.fields(importlib.import_module(path.stem).Args)}
    for _, number, _, settings, source in tags(path):
        assert source or number == "Deviation"
        assert set(settings) <= fields, (number, settings)


@on_each
def test_links_are_well_formed(path):
    """[file.py L12-34, L56; other.py L7], numbers ascending; or a paper."""
    for link in re.findall(r"\[[^\[\]\n]*\.py\b[^\[\]\n]*\]", path.read_text()):
        for part in link[1:-1].split("; "):
            assert re.fullmatch(FILE, part) or ".py" not in part, link
            numbers = [int(x) for x in re.findall(r"(?<=[L-])\d+", part.partition(".py ")[2])]
            assert numbers == sorted(set(numbers)), link
    for *_, source in tags(path):
        assert not source or re.search(rf"^{FILE}|^paper, |^Spinning Up|\d{{4}}$", source), source


@on_each
def test_below_a_tag_stands_code_or_another_tag(path):
    for line, below in itertools.pairwise(path.read_text().splitlines()):
        if TAG.fullmatch(line.strip()):
            below = below.strip()
            assert below and (not below.startswith("#") or TAG.fullmatch(below)), line


@on_each
def test_second_sites_refer_to_a_tag_of_the_script_or_of_one_that_it_copies(path):
    homes = {path.name, *re.findall(r"# Copied from (\w+\.py)", path.read_text())}
    numbers = {number.split("/")[0] for home in homes for _, number, *_ in tags(ROOT / home)}
    assert {x for x in re.findall(r"# as Detail (\w+)", path.read_text())} <= numbers


@pytest.mark.parametrize("path", [*ROOT.glob("ppo_*.py")], ids=lambda path: path.stem)
def test_the_table_has_every_tag_with_its_line_and_the_values_in_force(path):
    module = importlib.import_module(path.stem)
    args, rows = module.Args(), {}
    for row in module.details(args).splitlines()[2:]:
        _, number, title, values, line, _ = (x.strip() for x in row.split("|"))
        rows[int(line)] = number, title, values
    expected = {}
    for line, number, title, settings, _ in tags(path):
        values = ", ".join(f"{name}={getattr(args, name)}" for name in settings)
        expected[line] = number, title, values or "on"
    assert rows == expected


def test_every_switch_of_the_continuous_script_shows_in_its_table():
    ppo = importlib.import_module("ppo_continuous_action")
    shown = set(re.findall(r"(\w+)=", ppo.details(ppo.Args())))
    switches = {"truncation_is_terminal", "norm_obs", "clip_obs", "scale_rewards", "clip_reward"}
    switches |= {"anneal_lr", "adam_eps", "gae_lambda", "norm_adv", "anneal_clip", "clip_vloss"}
    switches |= {"ent_coef", "vf_coef", "max_grad_norm", "target_kl", "orthogonal_init"}
    switches |= {"shared_network", "anneal_log_std", "desired_kl"}
    assert switches <= shown
