"""The detail tags: complete, each with its reason; and the list that is made from them."""

import dataclasses
import importlib
import re
from types import SimpleNamespace

import pytest
from adapters import ROOT, SCRIPTS

from benchmark.evidence.tags import LIKE_A_TAG, tags_of

FILE = r"(?:\w+: )?(?:[\w-]+/)*\w+\.py L\d+(?:-\d+)?(?:, L\d+(?:-\d+)?)*"


def settings_of(path):
    """The names of a script's settings."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return {x.name for x in dataclasses.fields(importlib.import_module(module).Args)}


def tags(path):
    """The tags of a script, twice if they have two numbers; the kind of what has no number."""
    found = [(x, y) for x in tags_of(path.read_text()) for y in x.number.split(", ")]
    return [x._replace(number=y or x.kind) for x, y in found]


REQUIRED = {
    "continuous": "1-13 23-31",
    "kl_penalty": "1-7 9-13 23-31 K1-3",
    "multidiscrete": "1-13 26 28-31 37",
    "atari": "1-22",
    "lstm": "1-22 32-36",
    "rlhf": "1 3-6 8-13 R1-5 R7-11 R13-21",
    "grpo": "6 11-12 R5 R20 G1-8",
    "dpo": "D1-8",
    "llm": "4-8 10-12 G1-4",
}
EXTRAS = {  # and deviations
    "clip range annealing": "atari lstm",
    "early stopping": "continuous multidiscrete atari lstm",
    "time limits are not failures": "continuous kl_penalty multidiscrete atari lstm",
    "invalid action masking": "multidiscrete",
    "parallelized gradient update": "atari",
    "an episode ends at EOS": "rlhf",
    "rewards are scaled, their mean is not restored": "rlhf",
    "tokens are never encoded a second time": "llm",
    "a reply is the template's own text": "llm",
    "what the environment writes is not trained on": "llm",
    "the end of a response is trained on": "llm",
    "an episode has noise of its own": "llm",
    "padding is known from lengths": "llm",
    "positions skip padding": "llm",
    "logits of the model's own tokens only": "llm",
    "what all conversations begin with is read once": "llm",
    "temperature is part of the policy": "llm",
    "dropout is off": "llm",
    "old log-probabilities come from the training pass": "llm",
    "one mean over the tokens of a minibatch": "llm",
    "groups with equal rewards teach nothing": "llm",
    "Adam's weights are float32": "llm",
    "KL to the first model": "llm",
    "decoupled lambda": "llm",
}


PATHS = {name: SCRIPTS[name].path for name in REQUIRED if name != "llm"}
PATHS["llm"] = ROOT / "ppo_llm.py"


@pytest.fixture(params=PATHS)
def tagged(request):
    """Each script with a list of details, in turn."""
    return SimpleNamespace(name=request.param, path=PATHS[request.param])


def test_each_script_has_each_detail_it_owes_once_and_the_known_extras(tagged):
    found, required = tags(tagged.path), []
    for series, first, last in re.findall(r"([A-Z]?)(\d+)(?:-(\d+))?", REQUIRED[tagged.name]):
        numbers = range(int(first), int(last or first) + 1)
        required += [f"{series}{x}" if series else f"{x}/37" for x in numbers]
    assert sorted(x.number for x in found if x.kind == "Detail") == sorted(required)
    extras = [title for title, scripts in EXTRAS.items() if tagged.name in scripts.split()]
    assert sorted(x.title for x in found if x.kind != "Detail") == sorted(extras)


def test_a_number_has_the_same_title_in_every_script():
    """A tag with two numbers has a title of its own."""
    titles = {}
    paths = {x.path for x in SCRIPTS.values()} | {*ROOT.glob("*.py")}
    for tag in (x for path in paths for x in tags_of(path.read_text())):
        if tag.number:
            titles.setdefault(tag.number, set()).add(tag.title)
    assert [x for x in titles.items() if len(x[1]) > 1] == []
    assert {f"{i}/37" for i in range(1, 38)} <= titles.keys()


def test_a_tag_has_a_source_settings_that_exist_and_its_reason_below_it(tagged):
    """In one line; then comes the statement, or the next tag where one statement does two."""
    lines = [line.strip() for line in tagged.path.read_text().splitlines()]
    fields = settings_of(tagged.path)
    for tag in tags(tagged.path):
        known = re.search(rf"^{FILE}|^paper, |^Spinning Up|\d{{4}}$", tag.source)
        ours = tag.kind == "Deviation" or tagged.name == "llm"
        assert known or (ours and not tag.source), tag
        assert {x.removeprefix("not ") for x in tag.settings} <= fields, tag
        reason, below = lines[tag.line : tag.line + 2]
        assert re.fullmatch(r"# [A-Z].{20,97}\.", reason) and not LIKE_A_TAG.match(reason), reason
        assert below and (below[0] != "#" or LIKE_A_TAG.match(below)), tag
