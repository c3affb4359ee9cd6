"""The detail tags: complete, unique, with fixed titles; and the table made from them."""

import itertools
import re
from pathlib import Path

import pytest

import ppo_continuous_action as ppo

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("ppo_*.py"))
TAG = re.compile(r"# Detail (\w+)/(\d+)( omitted)?: (.*)")

TITLES = {
    1: "vectorized architecture",
    2: "orthogonal and constant initialization",
    3: "Adam epsilon",
    4: "learning rate annealing",
    5: "generalized advantage estimation",
    6: "minibatch updates",
    7: "advantage normalization",
    8: "clipped surrogate objective",
    9: "value function loss clipping",
    10: "overall loss and entropy bonus",
    11: "global gradient clipping",
    12: "debug variables",
    13: "shared or separate networks",
    14: "no-op reset",
    15: "max and skip",
    16: "episodic life",
    17: "fire reset",
    18: "warp frame",
    19: "reward clipping to sign",
    20: "frame stack",
    21: "shared Nature CNN",
    22: "image scaling",
    23: "normal distribution",
    24: "state-independent log std",
    25: "independent action components",
    26: "separate networks",
    27: "action clipping and storage",
    28: "observation normalization",
    29: "observation clipping",
    30: "reward scaling",
    31: "reward clipping",
    32: "layer initialization",
    33: "zero initial states",
    34: "reset at episode end",
    35: "sequential minibatches",
    36: "rebuild states in training",
    37: "independent action components",
}
# Which of them each script must really have; the others it names as omitted.
USED = {
    "ppo_continuous_action.py": {*range(1, 14), *range(23, 32)},
    "ppo_kl_penalty.py": {*range(1, 14), *range(23, 32)} - {8},
    "ppo_atari.py": {*range(1, 14), *range(14, 23)},
    "ppo_atari_lstm.py": {*range(1, 14), *range(14, 23), *range(32, 37)},
    "ppo_multidiscrete.py": {*range(1, 14), 37},
    "ppo_rlhf_toy.py": {5, 8, 9},
}


def tags(path):
    """(number, total, omitted, title) of each tag, in the order of the file."""
    found = []
    for line in path.read_text().splitlines():
        match = TAG.match(line.strip())
        if match:
            number, total, omitted, rest = match.groups()
            found.append((number, total, bool(omitted), re.split(r"; | \[", rest)[0], rest))
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_script_has_each_of_the_37_exactly_once_under_its_title(path):
    core = [tag for tag in tags(path) if tag[1] == "37"]
    assert sorted(int(tag[0]) for tag in core) == list(range(1, 38))
    assert {int(tag[0]): tag[3] for tag in core} == TITLES


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_script_really_has_the_details_it_is_there_to_show(path):
    used = {int(tag[0]) for tag in tags(path) if tag[1] == "37" and not tag[2]}
    assert USED[path.name] <= used


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_used_details_name_their_source_and_omitted_ones_a_reason(path):
    for number, _, omitted, _, rest in tags(path):
        assert re.search(r"; \S.*\S$" if omitted else r" \[.+\]$", rest), (number, rest)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_line_below_a_tag_is_code_or_another_tag(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    for line, below in itertools.pairwise(lines):
        match = TAG.match(line)
        if match and not match[3]:
            assert below and (not below.startswith("#") or TAG.match(below)), line


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_series_of_a_script_are_complete(path):
    series = {}
    for number, total, *_ in tags(path):
        series.setdefault(total, []).append(int(re.sub(r"\D", "", number)))
    for total, numbers in series.items():
        assert sorted(numbers) == list(range(1, int(total) + 1))


def table(**settings):
    rows = ppo.detail_table(ppo.Args(**settings), Path(ppo.__file__).read_text())
    return {row[0]: row[1:] for row in rows}


def test_table_lists_all_37_with_the_settings_of_the_run():
    rows = ppo.detail_table(ppo.Args(), Path(ppo.__file__).read_text())
    assert [row[0] for row in rows[:37]] == [f"{n}/37" for n in range(1, 38)]
    assert [row[1] for row in rows[:37]] == list(TITLES.values())
    assert sorted(row[0] for row in rows[37:]) == ["Deviation"] + ["Extra"] * 3
    rows = table()
    assert rows["3/37"][1] == "learning_rate=0.0003, adam_eps=1e-05"
    assert rows["5/37"][1] == "gamma=0.99, gae_lambda=0.95"
    assert rows["9/37"][1] == "clip_coef=0.2, clip_vloss=True"
    assert table(clip_vloss=False)["9/37"][1] == "clip_coef=0.2, clip_vloss=False"
    assert rows["16/37"][1].startswith("not here: ")
    assert rows["25/37"][1] == "on"


def test_table_points_at_the_line_of_the_tag():
    lines = Path(ppo.__file__).read_text().splitlines()
    for number, (title, _, line) in table().items():
        if "/" in number:
            assert f"Detail {number}" in lines[line - 1] and title in lines[line - 1]


def test_every_switch_shows_in_the_table():
    rows = ppo.detail_table(ppo.Args(), Path(ppo.__file__).read_text())
    shown = set(re.findall(r"(\w+)=", " ".join(row[2] for row in rows)))
    assert {
        "truncation_is_terminal",
        "norm_obs",
        "clip_obs",
        "scale_rewards",
        "clip_reward",
        "anneal_lr",
        "adam_eps",
        "gae_lambda",
        "norm_adv",
        "anneal_clip",
        "clip_vloss",
        "ent_coef",
        "vf_coef",
        "max_grad_norm",
        "target_kl",
        "orthogonal_init",
        "shared_network",
    } <= shown
