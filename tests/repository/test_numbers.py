"""Intervals and percentages in the text of the pages are those of the committed results."""

import re

import pytest

from benchmark.paper import pages
from benchmark.paper.values import VALUE, VALUES, wrong

# What is said there is of single runs, or not of results.
PAGES = [x for x in pages.PAGES if x.name not in ("DETAILS.md", "DEBUGGING.md")]
ROWS = {
    name: block.splitlines()
    for page in pages.PAGES
    for block, name, _ in (x.group(0, 2, 3) for x in pages.BLOCK.finditer(page.read_text()))
}


def prose(page):
    """The text of a page without its blocks and command lines."""
    text = pages.BLOCK.sub("", page.read_text())
    return re.sub(r"(?m)^    .*$", "", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda x: x.stem)
def test_every_interval_and_percentage_has_a_mark_and_is_what_it_says(page, committed):
    assert wrong(prose(page), ROWS.__getitem__, committed) == []


def test_every_value_is_used():
    text = "".join(map(prose, PAGES))
    assert [x for x in VALUES if f"<!-- value: {x} -->" not in text] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("It costs -77 %<!-- t: raw -->, P = 0.5 [0.4,\n0.6]<!-- t: raw -->.", None),
        ("It costs -78 %<!-- t: raw -->.", "-78% is not in t: raw"),
        ("It costs -7 %<!-- t: raw -->.", "-7% is not in t: raw"),
        ("It costs -77 %<!-- t: other -->.", "-77% is not in t: other"),
        ("It costs -77 %.\n\nIt is.<!-- t: raw -->", "-77 % has no mark"),
        ("P = 0.5 [0.4, 0.7]<!-- t: raw -->.", "0.5 [0.4, 0.7] is not in t: raw"),
        ("P = 0.55.", "0.55 has no mark"),
        ("Nothing<!-- t: raw -->.", "nothing is not in t: raw"),
        ("1 to\n2 %<!-- value: it -->, 3 to 2 %<!-- value: it -->.", "it is 1 to 2%"),
    ],
)
def test_what_is_wrong_is_found(text, problem, monkeypatch):
    monkeypatch.setitem(VALUES, "it", lambda folders: "1 to 2 %")
    rows = {"t": ["| raw | -77% | 0.5 [0.4, 0.6] |", "| other | -78% |"]}
    found = wrong(text, rows.__getitem__, None)
    assert found[:1] == ([problem] if problem else [])


def test_numbers_that_are_not_results_are_left_alone():
    text = "a 95 % interval, [link](a.md), 2 of 3 [see](b.md), ppo2 [1], version 4.0, 300 steps"
    assert VALUE.findall(text) == []
