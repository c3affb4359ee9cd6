"""Each script stands alone: no sibling imports, documented and used settings, its own packages."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import ppo_continuous_action as ppo
import ppo_llm

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("*.py"))
# Distribution -> the module it brings, where the names differ; and those imported by others only.
MODULES = {"ale-py": "ale_py", "opencv-python-headless": "cv2"}
INDIRECT = {"gguf", "moviepy", "mujoco", "tensorboard"}

REVIEWS = [ROOT / "ppo_rlhf_toy.py", *sorted(ROOT.glob("recipes/*_on_reviews.py"))]

on_each = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


def imported(path):
    """Top-level names of all modules that a script imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names.add(node.module.split(".")[0])
    return names


def versions(lines):
    """Package, without its extras -> pinned version."""
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {re.sub(r"\[.*", "", name): version for name, version in pairs}


def header(path):
    """The inline script metadata (PEP 723) of a script."""
    match = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", path.read_text())
    lines = match[1].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))


@on_each
def test_header_lists_the_packages_in_the_versions_of_requirements(path):
    """And nothing else is imported: no other script, no package of the project."""
    metadata = header(path)
    assert metadata["requires-python"] == ">=3.11"
    pinned = versions(metadata["dependencies"])
    everything = versions((ROOT / "requirements-train.txt").read_text().splitlines())
    if path.stem == "ppo_vector_env":  # EnvPool is an extra
        all_of_it = versions((ROOT / "requirements.txt").read_text().splitlines())
        everything["envpool"] = all_of_it["envpool"]
    if path.stem == "ppo_llm":
        everything |= versions((ROOT / "requirements-llm.txt").read_text().splitlines())
    assert all(re.fullmatch(r"[\d.]+\d", version) for version in everything.values())
    assert pinned.items() <= everything.items()
    needed = imported(path) - set(sys.stdlib_module_names)
    assert needed <= {MODULES.get(name, name) for name in pinned}, "the header lacks a package"
    assert {MODULES.get(name, name) for name in pinned.keys() - INDIRECT} <= needed


def fields(path):
    """Settings of a script: name -> the comment behind it."""
    source = path.read_text()
    (args,) = (x for x in ast.parse(source).body if getattr(x, "name", "") == "Args")
    found = {}
    for node in args.body:
        if isinstance(node, ast.AnnAssign):
            line = source.splitlines()[node.end_lineno - 1]
            found[node.target.id] = line.encode()[node.end_col_offset :].decode().strip()
    return found


@pytest.mark.parametrize("path", [*SCRIPTS, *REVIEWS[1:]], ids=lambda path: path.stem)
def test_every_setting_is_documented_and_read(path):
    """If not by a recipe, then by the script that it imports."""
    source = path.read_text() + (REVIEWS[0].read_text() if path in REVIEWS[1:] else "")
    for name, comment in fields(path).items():
        assert re.fullmatch(r"# \S.{10,}", comment), f"{name} is not documented"
        reads = re.findall(rf'\b(?:args|self)\.{name}\b|"{name}"', source)
        assert reads, f"{name} is never read"


def test_help_and_a_refusal_need_no_simulator_and_no_emulator(run_file, monkeypatch):
    """The sentence has no link either."""
    for name in ("mujoco", "ale_py", "wandb", "cv2", "moviepy"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, error = run_file(ppo.__file__, "--gamma 1.5")
    assert code == 2 and "gamma" in error and "https" not in error
    for path in SCRIPTS:
        code, out, _ = run_file(path, "--help")
        assert code == 0 and "--learning-rate" in out
        assert ("--num-iterations" in out) == (path.stem == "ppo_llm")
        assert ("--batch-size INT" in out) == ("rlhf" in path.stem)


def test_the_examples_in_the_readme_act_and_reward(monkeypatch):
    """What the first one loads is what the quick start makes, here in fewer steps."""
    text = (ROOT / "README.md").read_text()
    use, reward = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (flags,) = re.findall(r"^    python ppo_continuous_action.py (.*)$", text, re.MULTILINE)
    flags = [*flags.replace("51200", "64").split(), "--num-steps", "64", "--compile", "no"]
    monkeypatch.setattr(sys, "argv", [ppo.__file__, *flags])
    ppo.main()
    names = {}
    exec(use, names)
    exec(reward, names)
    lines = re.findall(r'^    ({"prompt": .*})$', text, re.MULTILINE)
    Path("my.jsonl").write_text("\n".join(lines))
    for prompt, others in ppo_llm.read_lines("my.jsonl"):
        texts = (f"It is {others['answer'].upper()}.", prompt)
        assert [names["reward"](x, **others) for x in texts] == [1.0, 0.0]
    assert names["policy"](names["obs"]).shape == names["env"].action_space.shape
