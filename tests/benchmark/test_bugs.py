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


def test_what_diff_says_of_a_bug_is_what_is_noted():
    bugs = {(suite, name): rest for suite, name, *rest in differences.planted()}
    noted = {}
    for row in itertools.chain(*differences.by_label(Folders()).values()):
        noted[row["suite"], row["bug"]] = row
    assert noted.keys() == bugs.keys() and all(x["right"] for x in noted.values())
    original = diff.read(ROOT / "ppo_continuous_action.py")
    comparison = diff.Comparison(original, [], original)
    row = differences.of_bug(comparison, *bugs["bugs", "through-falls"])
    for key in ("where", "brief", "common", "right"):
        assert row[key] == noted["bugs", "through-falls"][key]


def test_a_bug_that_diff_does_not_find_is_noted_as_that():
    equal = SimpleNamespace(settings_of=lambda copy: [], findings=lambda copy: iter(()))
    none = differences.of_bug(equal, Variant("ppo_continuous_action.py"), "")
    assert (none["what"], none["right"]) == ("no difference", False)


def test_naming_a_line_that_was_not_changed_is_wrong():
    original = diff.read(ROOT / "ppo_minimal.py")
    lines = [x.replace("1 - args.clip_coef", "1.0") for x in original.lines]
    copy = diff.Script(original.path, "\n".join(lines))
    (change,) = diff.pair(copy, original)[1]
    other = diff.Change(change.block, copy.statements[:1], original.statements[:1])
    for named, right in ((change, True), (other, False)):
        finding = SimpleNamespace(mine=SimpleNamespace(script=copy), changes=[named])
        assert differences.is_right(finding, original) is right
