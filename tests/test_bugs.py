"""The bugs whose pictures DEBUGGING.md shows."""

import pytest

from benchmark.provenance import ROOT, BenchmarkError
from benchmark.run import changed
from benchmark.suites import SUITES

BUGS = [
    pytest.param(variant, id=f"{suite.name}-{name}")
    for suite in SUITES.values()
    for name, variant in suite.variants.items()
    if variant.replaced
]


@pytest.mark.parametrize("variant", BUGS)
def test_each_text_stands_once_in_its_script_and_what_comes_of_it_is_python(variant):
    text = (ROOT / variant.script).read_text()
    broken = changed(text, variant.replaced)
    compile(broken, variant.script, "exec")
    assert broken != text


@pytest.mark.parametrize("text", ["", "a a"])
def test_a_text_that_does_not_stand_once_is_refused(text):
    with pytest.raises(BenchmarkError, match=f"{text.count('a')} times: a"):
        changed(text, [("a", "b")])


def test_texts_are_replaced_one_after_the_other():
    assert changed("a b", [("a", "c"), ("c b", "d")]) == "d"
