"""The detail tags: complete, each with its reason; and the list that is made from them."""

import dataclasses
import re

from adapters import ROOT, SCRIPTS, scripts

from benchmark.evidence.tags import LIKE_A_TAG, tags_of

FILE = r"(?:\w+: )?(?:[\w-]+/)*\w+\.py L\d+(?:-\d+)?(?:, L\d+(?:-\d+)?)*"


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
}
pytestmark = scripts(*REQUIRED)
EXTRAS = {  # and deviations
    "clip range annealing": "atari lstm",
    "early stopping": "continuous multidiscrete atari lstm",
    "time limits are not failures": "continuous kl_penalty multidiscrete atari lstm",
    "invalid action masking": "multidiscrete",
    "parallelized gradient update": "atari",
    "an episode ends at EOS": "rlhf",
    "rewards are scaled, their mean is not restored": "rlhf",
}


def test_each_script_has_each_detail_it_owes_once_and_the_known_extras(script):
    found, required = tags(script.path), []
    for series, first, last in re.findall(r"([A-Z]?)(\d+)(?:-(\d+))?", REQUIRED[script.name]):
        numbers = range(int(first), int(last or first) + 1)
        required += [f"{series}{x}" if series else f"{x}/37" for x in numbers]
    assert sorted(x.number for x in found if x.kind == "Detail") == sorted(required)
    extras = [title for title, names in EXTRAS.items() if script.name in names.split()]
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


def test_a_tag_has_a_source_settings_that_exist_and_its_reason_below_it(script):
    """In one line; then comes the statement, or the next tag where one statement does two."""
    lines = [line.strip() for line in script.path.read_text().splitlines()]
    fields = {x.name for x in dataclasses.fields(script.module.Args)}
    for tag in tags(script.path):
        known = re.search(rf"^{FILE}|^paper, |^Spinning Up|\d{{4}}$", tag.source)
        assert known or (tag.kind == "Deviation" and not tag.source), tag
        assert {x.removeprefix("not ") for x in tag.settings} <= fields, tag
        reason, below = lines[tag.line : tag.line + 2]
        assert re.fullmatch(r"# [A-Z].{20,97}\.", reason) and not LIKE_A_TAG.match(reason), reason
        assert below and (below[0] != "#" or LIKE_A_TAG.match(below)), tag
