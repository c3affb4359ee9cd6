"""The bugs whose pictures DEBUGGING.md shows."""

import pytest

from benchmark import check, logs
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.report.health import is_healthy
from benchmark.run import changed
from benchmark.suites import BY_TABLE, SUITES
from benchmark.suites.bugs import BUGS as IN_ONE_SCRIPT

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


def test_the_readme_has_their_number():
    own = ((suite, name) for suite in BY_TABLE["bugs"] for name in suite.variants)
    labels = {suite.variants[name].label for suite, name in own if not is_healthy(suite, name)}
    assert f"what {len(labels)} mistakes look like" in (ROOT / "README.md").read_text()


def test_texts_are_replaced_one_after_the_other():
    assert changed("a b", [("a", "c"), ("c b", "d")]) == "d"


def test_comments_between_the_lines_of_a_text_do_not_matter():
    text = "if a:\n    # Why.\n    # And what.\n    b\n    # c\n"
    assert changed(text, [("if a:\n    b\n", "d\n")]) == "d\n    # c\n"
    with pytest.raises(BenchmarkError, match=r"0 times: beta = c\n(.|\n)*line is 2: beta = d"):
        changed("alpha = 1\nbeta = d\n", [("beta = c", "e")])


@pytest.mark.parametrize("name", ["mean-logprob", "clipped-stored", "renormalized"])
def test_what_acts_otherwise_is_seen_by_the_second_iteration(name, changed_copy):
    _, _, *replaced = IN_ONE_SCRIPT[name]
    module = changed_copy("ppo_continuous_action.py", replaced, name)
    short = {"total_timesteps": 4096, "compile": False, "env_id": "HalfCheetah-v4"}
    seen = module.train(module.Args(run_name=name, **short))["updates"][1]["check/acting"]
    assert seen > 1e-5  # of healthy runs it is 0
    run = logs.find(f"runs/{name}")[0]
    (verdict,) = (x["verdict"] for x in check.judge(run) if x["metric"] == "check/acting")
    assert verdict.startswith("unhealthy since")
