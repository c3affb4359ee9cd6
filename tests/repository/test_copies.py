"""What several scripts share has one text in all of them; `tools/sync.py` rewrites the copies."""

import subprocess

import pytest

from tools import sync
from tools.sync import SCRIPTS, fix, problems


def test_copies_are_byte_identical_and_marked():
    assert problems({path.name: path.read_text() for path in SCRIPTS}) == []


HOME = "# === A ===\n\n\ndef f(x):\n    return x\n\n\n@cache\ndef g():\n    pass\n"
HOME += "\n\ndef learn(x):\n    # --- 1 ---\n    x = 1\n    # --- 2 ---\n    x = 2\n"
MARK = "# Copied from ppo_a.py\n"


@pytest.mark.parametrize(
    ("copy", "problem"),
    [
        (MARK + "def f(x):\n    return x  # same\n", "differs"),
        ("def f(x):\n    return x\n", "several homes"),
        (MARK + "def h(): 0\n", "not the home"),
        ("# === A ===\n" + MARK + HOME.partition("===\n")[2] + "\nX = 1\n", "differs"),
        ("def learn(x):\n    # --- 1 ---\n    " + MARK + "    x = 0\n", "differs"),
    ],
)
def test_what_is_wrong_is_found_and_a_difference_fixed(copy, problem):
    sources = {"ppo_a.py": HOME, "ppo_b.py": copy}
    assert problem in problems(sources)[0]
    fixed = fix(sources)
    assert fixed["ppo_a.py"] == HOME
    if problem == "differs":
        assert problems(fixed) == [] and fixed["ppo_b.py"].startswith(copy.split(MARK)[0])


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def test_an_edit_in_a_copy_is_not_lost_and_one_at_home_reaches_it(tmp_path, monkeypatch, capsys):
    home, copy = paths = [tmp_path / "ppo_a.py", tmp_path / "ppo_b.py"]
    home.write_text(HOME)
    copy.write_text(MARK + "def f(x):\n    return x\n")
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    monkeypatch.setattr(sync, "SCRIPTS", paths)

    edit(copy, "return x", "return -x")
    with pytest.raises(SystemExit, match=r"ppo_b.py: f was edited here, .* is in ppo_a.py"):
        sync.sync_copies(force=False)
    assert "return -x" in copy.read_text() and not capsys.readouterr().out
    before = home.stat().st_mtime_ns
    sync.sync_copies(force=True)
    assert "return x" in copy.read_text() and home.stat().st_mtime_ns == before
    assert capsys.readouterr().out == "ppo_b.py: f overwritten by the one in ppo_a.py\n"

    for old, new in ("x", "2 * x"), ("2 * x", "3 * x"):  # then the copy is not as committed either
        edit(home, f"return {old}", f"return {new}")
        sync.sync_copies(force=False)
        assert f"return {new}" in copy.read_text() and "ppo_b.py: f" in capsys.readouterr().out
    times = [x.stat().st_mtime_ns for x in paths]
    sync.sync_copies(force=False)
    assert [x.stat().st_mtime_ns for x in paths] == times
    home.write_text("")
    with pytest.raises(SystemExit, match=r"ppo_a.py is not the home of f"):
        sync.sync_copies(force=False)
