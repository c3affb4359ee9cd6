"""The bugs whose pictures DEBUGGING.md shows."""

import importlib.util
import sys

import pytest

from benchmark.bugs import BUGS as IN_ONE_SCRIPT
from benchmark.bugs import UNCHECKED
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


def test_where_the_check_is_left_in_what_acts_otherwise_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stopped = {
        x: replaced for x, (_, _, *replaced) in IN_ONE_SCRIPT.items() if UNCHECKED in replaced
    }
    assert len(stopped) >= 3
    for name, replaced in stopped.items():
        text = (ROOT / "ppo_continuous_action.py").read_text()
        (tmp_path / f"{name}.py").write_text(changed(text, [x for x in replaced if x != UNCHECKED]))
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module := importlib.util.module_from_spec(spec))
        spec.loader.exec_module(module)
        short = {"num_steps": 512, "total_timesteps": 2048, "num_minibatches": 8}
        short |= {"learning_rate": 3e-3, "compile": False, "env_id": "HalfCheetah-v4"}
        args = module.Args(run_name=name, **short)
        with pytest.raises(ValueError, match="check_actor"):
            module.train(args)
