"""The bugs whose pictures DEBUGGING.md shows."""

import itertools
from types import SimpleNamespace

import pytest

from benchmark.evidence import differences
from benchmark.evidence.definitions import Variant
from benchmark.evidence.runs import changed
from benchmark.evidence.suites import SUITES
from benchmark.evidence.suites.bugs import AFTER_TRAINING
from benchmark.evidence.suites.bugs import BUGS as IN_ONE_SCRIPT
from benchmark.lab import check, diff, logs
from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT, BenchmarkError


def test_each_text_stands_once_in_its_script_and_what_comes_of_it_is_python():
    planted = [*AFTER_TRAINING.values(), *(y for x in SUITES.values() for y in x.variants.values())]
    for variant in (x for x in planted if x.replaced):
        text = (ROOT / variant.script).read_text()
        broken = changed(text, variant.replaced)
        compile(broken, variant.label, "exec")
        assert broken != text, variant.label


def test_texts_are_replaced_one_after_the_other_whatever_comments_are_between_their_lines():
    assert changed("a b", [("a", "c"), ("c b", "d")]) == "d"
    text = "if a:\n    # Why.\n    # And what.\n    b\n    # c\n"
    assert changed(text, [("if a:\n    b\n", "d\n")]) == "d\n    # c\n"
    with pytest.raises(BenchmarkError, match=r"0 times: beta = c\n(.|\n)*line is 2: beta = d"):
        changed("alpha = 1\nbeta = d\n", [("beta = c", "e")])


@pytest.mark.parametrize("name", ["mean-logprob", "clipped-stored", "renormalized"])
def test_what_acts_otherwise_is_seen_by_the_second_iteration(name, changed_copy):
    _, _, *replaced = IN_ONE_SCRIPT[name]
    module = changed_copy("ppo_continuous_action.py", replaced, name)
    short = {"total_timesteps": 256, "num_steps": 128, "num_minibatches": 2, "compile": False}
    module.train(module.Args(run_name=name, **short))
    (run,) = logs.find(f"runs/{name}")
    (verdict,) = (x["verdict"] for x in check.judge(run) if x["metric"] == "check/acting")
    assert verdict.startswith("unhealthy since")


def test_each_bug_is_noted_and_found_at_its_lines():
    bugs = {(suite, name) for suite, name, *_ in differences.planted()}
    noted = [*itertools.chain(*differences.by_label(Folders()).values())]
    assert {(x["suite"], x["bug"]) for x in noted} == bugs and all(x["right"] for x in noted)


@pytest.mark.slow
def test_what_diff_says_of_a_bug_is_what_is_noted():
    (bug,) = (x for x in differences.planted() if x[:2] == ("bugs", "through-falls"))
    (noted,) = (x for x in differences.by_label(Folders())[bug[2].label] if x["suite"] == "bugs")
    original = diff.read(ROOT / "ppo_continuous_action.py")
    row = differences.of_bug(diff.Comparison(original, [], original), *bug[2:])
    assert row == {x: y for x, y in noted.items() if x not in ("suite", "bug")}


def test_a_bug_is_noted_as_what_is_found_first_without_the_number_of_a_line():
    bug = Variant("ppo_continuous_action.py")
    original = diff.read(ROOT / bug.script)
    said = {"brief": "`x` of `f`", "common": "all steps", "changes": []}
    where = SimpleNamespace(phase="iteration 1, update")
    first = SimpleNamespace(**said, what="`x` of `f`, called in line 7, is 1", event=where)
    first.mine = SimpleNamespace(script=original)
    found = {"brief": "`x` of `f`", "common": "all steps", "where": "iteration 1, update"}
    found["what"] = "`x` of `f` is 1"
    nothing = {"brief": "–", "common": "", "where": "", "what": "no difference"}
    for findings, row in (([first, None], found), ([], nothing)):
        comparison = SimpleNamespace(original=original, settings_of=lambda copy: [])
        comparison.findings = lambda copy, findings=findings: iter(findings)
        expected = {"script": bug.script, "label": bug.label, "right": False} | row
        assert differences.of_bug(comparison, bug, "") == expected


def test_naming_a_line_that_was_not_changed_is_wrong():
    original = diff.read(ROOT / "ppo_minimal.py")
    lines = [x.replace("1 - args.clip_coef", "1.0") for x in original.lines]
    copy = diff.Script(original.path, "\n".join(lines))
    (change,) = diff.pair(copy, original)[1]
    other = diff.Change(change.block, copy.statements[:1], original.statements[:1])
    for named, right in ((change, True), (other, False)):
        finding = SimpleNamespace(mine=SimpleNamespace(script=copy), changes=[named])
        assert differences.is_right(finding, original) is right
