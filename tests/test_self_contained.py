"""Each script stands alone: no sibling imports, documented and used settings, its own packages."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("ppo_*.py"))
# Distribution -> the module it brings, where the names differ; for extras the reason to need it.
MODULES = {"ale-py": "ale_py", "opencv-python-headless": "cv2"}
INDIRECT = {"moviepy", "mujoco", "tensorboard"}  # imported by gymnasium and torch


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


def requirements():
    """Package with its extras -> pinned version."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def header(path):
    """The inline script metadata (PEP 723) of a script."""
    match = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", path.read_text())
    lines = match[1].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_sibling_or_local_package_is_imported(path):
    local = {x.stem for x in ROOT.glob("*.py")} | {x.name for x in ROOT.iterdir() if x.is_dir()}
    assert not imported(path) & local


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_header_lists_the_packages_in_the_versions_of_requirements(path):
    metadata = header(path)
    assert metadata["requires-python"] == ">=3.11"
    pinned = dict(line.split("==") for line in metadata["dependencies"])
    versions = {re.sub(r"\[.*", "", name): x for name, x in requirements().items()}
    assert {re.sub(r"\[.*", "", name): x for name, x in pinned.items()}.items() <= versions.items()
    names = {re.sub(r"\[.*", "", name) for name in pinned}
    modules = {MODULES.get(name, name) for name in names}
    needed = imported(path) - set(sys.stdlib_module_names)
    assert needed <= modules, "imports that the header lacks"
    assert names - INDIRECT <= {name for name in names if MODULES.get(name, name) in needed}


def test_requirements_are_pinned():
    assert all(re.fullmatch(r"[\d.]+\d", version) for version in requirements().values())


def fields(path):
    """Settings of a script: name -> the string below it."""
    tree = ast.parse(path.read_text())
    (args,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args")
    found = {}
    for node, below in zip(args.body, [*args.body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            found[node.target.id] = below.value.value if documented else None
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_setting_is_documented_and_read(path):
    source = path.read_text()
    for name, text in fields(path).items():
        assert text, f"{name} is not documented"
        reads = len(re.findall(rf"\b\w+\.{name}\b", source)) + len(re.findall(rf'"{name}"', source))
        assert reads > 0, f"{name} is never read"


def test_a_setting_has_the_same_text_in_every_script():
    """Apart from the KL that one script stops at and others steer to, and RLHF's own sources."""
    texts = {}
    for path in SCRIPTS:
        for name, text in fields(path).items():
            if name != "target_kl" and path.name != "ppo_rlhf_toy.py":
                texts.setdefault(name, set()).add(text)
    assert {name: text for name, text in texts.items() if len(text) > 1} == {}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_help_needs_no_environment(path):
    code = (
        "import sys\n"
        "for name in ('mujoco', 'ale_py', 'wandb', 'cv2', 'moviepy'): sys.modules[name] = None\n"
        f"sys.argv = [{path.name!r}, '--help']\n"
        f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--seed" in result.stdout and "--learning-rate" in result.stdout
    derived = {"batch_size", "minibatch_size", "num_iterations"} - fields(path).keys()
    assert not [x for x in derived if f"--{x.replace('_', '-')}" in result.stdout]


def test_the_file_alone_in_an_empty_folder_runs(tmp_path):
    shutil.copy(ROOT / "ppo_continuous_action.py", tmp_path)
    command = "ppo_continuous_action.py --env-id Pendulum-v1 --total-timesteps 256 --num-steps 128"
    result = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert (
        "Done. Model: runs/Pendulum-v1__ppo_continuous_action__1__"
        in result.stdout.splitlines()[-1]
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert {"model.pt", "checkpoint.pt", "updates.csv", "args.json"} <= {
        x.name for x in run.iterdir()
    }
