"""`python -m benchmark diff`: where a changed copy of a script first computes something else."""

import functools
import re

import pytest

from benchmark import __main__ as program
from benchmark.lab import diff
from benchmark.lab.provenance import ROOT

CONTINUOUS, DISCRETE, KL = (
    f"ppo_{x}.py" for x in ("continuous_action", "multidiscrete", "kl_penalty")
)


@functools.cache
def comparison(script, *flags):
    original = diff.read(ROOT / script)
    return diff.Comparison(original, list(flags), original)


def changed(script, *patches):
    """The text of a script in which texts are replaced."""
    text = (ROOT / script).read_text()
    for before, after in patches:
        assert before in text, before
        text = text.replace(before, after)
    return text


def first(script, *patches, flags=()):
    """The first difference that is found in a copy, and whether the changed line is blamed."""
    copy = diff.Script(ROOT / script, changed(script, *patches))
    finding = next(comparison(script, *flags).findings(copy), None)
    if finding is None:
        return "", "", False
    lines = [k for x in finding.changes for k in diff.shown(x, copy, comparison(script).original)]
    blamed = "\n".join(lines)
    after = [x.strip() for _, text in patches for x in text.splitlines() if x.strip()]
    before = [x.strip() for text, _ in patches for x in text.splitlines() if x.strip()]
    return finding.what, finding.common, any(x in blamed for x in after + before)


DONE_LATE = (
    ("args.gamma * args.gae_lambda * (1 - done)", "args.gamma * args.gae_lambda * (1 - late)"),
    (
        "    # At first, temporal-difference",
        "    late = torch.cat([done[:1], done[:-1]])\n    # At first, temporal-difference",
    ),
)
SMALLER_VALUES = ("self.value(obs)\n", "0.5 * self.value(obs)\n")


@pytest.mark.parametrize(
    ("file", "patches", "what", "common"),
    [
        (CONTINUOUS, DONE_LATE, "`decay` in `gae`", "with which an episode ends, and those after"),
        (
            CONTINUOUS,
            [("pg_loss - args.ent_coef", "pg_loss + args.ent_coef")],
            "`loss` in `ppo_loss`",
            "",
        ),
        (
            CONTINUOUS,
            [("x.std(correction=0)", "x.std()")],
            "`normalize` gets the same arguments and returns something else",
            "",
        ),
        (
            CONTINUOUS,
            [("next_values[terminated] = 0.0", "pass")],
            "`gae` is called in line",
            "the steps with which an episode fails",
        ),
        (
            CONTINUOUS,
            [("rng.standard_normal(actions.shape", "2 * rng.standard_normal(actions.shape")],
            "`noise` in",
            "",
        ),
        (
            DISCRETE,
            [("next_values[truncated] = agent.value(t_final_obs)", "pass")],
            "`next_values`",
            "the steps with which an episode is cut off by the time limit",
        ),
        (
            DISCRETE,
            [("masks[t]) + noise[t]).argmax", "masks[t]) - noise[t]).argmax")],
            "`actions`",
            "",
        ),
        (
            "ppo_minimal.py",
            [("advantages.std(correction=0)", "advantages.std()")],
            "`advantages` in `ppo_loss`",
            "",
        ),
        (
            "grpo_minimal.py",
            [("rewards - rewards.mean(dim=1, keepdim=True)", "rewards - rewards.mean()")],
            "`advantages` in `group_advantages`",
            "",
        ),
        (
            KL,
            [("discounted_returns[done[t]] = 0.0", "pass")],
            "`discounted_returns` in",
            "the first steps after an episode",
        ),
    ],
)
def test_planted_bugs_are_found_where_they_are(file, patches, what, common):
    found, steps, blamed = first(file, *patches)
    assert what in found
    assert common in steps
    assert blamed


OTHER_NETWORK = (
    ("HIDDEN = 64", "HIDDEN = 128"),
    (
        "first, second = (linear(x, HIDDEN, gain=2**0.5) for x in (obs_size, HIDDEN))",
        "first, second, third = (\n"
        "                linear(x, HIDDEN, gain=2**0.5) for x in (obs_size, HIDDEN, HIDDEN)\n"
        "            )",
    ),
    (
        "[first, nn.Tanh(), second, nn.Tanh()]",
        "[first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU()]",
    ),
)


def test_a_bug_behind_another_network_is_found():
    bug = ("(1 - done)", "(1 - 0 * done)")
    copy = diff.Script(ROOT / CONTINUOUS, changed(CONTINUOUS, *OTHER_NETWORK, bug))
    network, wrong = comparison(CONTINUOUS).findings(copy)
    assert network.what.startswith("`Agent` is built differently")
    assert "`decay` in `gae`" in wrong.what
    assert wrong.common == "the steps with which an episode ends"


# --- Copies that compute the same ---


def reordered(text):
    """The math in another order, without comments and with other names of variables."""
    start, end = (text.index(x) for x in ("def gae(", "def approx_kl("))
    text = text[:start] + text[end:].replace(
        "\ndef ppo_loss", text[start:end] + "\ndef ppo_loss", 1
    )
    text = re.sub(r"(?m)^ +#(?! ---).*\n", "", text)
    for before, after in (("next_values", "following"), ("b_obs", "frames"), ("logratio", "lr")):
        text = re.sub(rf"\b{before}\b", after, text)
    return text


@pytest.mark.parametrize("file", [CONTINUOUS, KL])
def test_names_comments_and_the_order_of_functions_do_not_matter(file):
    copy = diff.Script(ROOT / file, reordered((ROOT / file).read_text()))
    assert len(copy.lines) < len(comparison(file).original.lines) - 30
    assert [*comparison(file).findings(copy)] == []


def test_a_bug_is_found_among_other_names():
    text = reordered((ROOT / CONTINUOUS).read_text())
    assert "following[terminated] = 0.0" in text
    copy = diff.Script(ROOT / CONTINUOUS, text.replace("following[terminated] = 0.0", "pass"))
    finding = next(comparison(CONTINUOUS).findings(copy))
    assert "`next_values`" in finding.what
    assert finding.common == "the steps with which an episode fails"


# --- The command ---


def told(capsys, *arguments):
    """Exit code and output of the command."""
    with pytest.raises(SystemExit) as exit:
        program.main(["diff", *map(str, arguments)])
    captured = capsys.readouterr()
    return exit.value.code, captured.out, captured.err


def test_the_command_finds_the_original_and_shows_the_lines(tmp_path, capsys):
    copy = tmp_path / "mine.py"
    copy.write_text(changed(CONTINUOUS, ("next_values[terminated] = 0.0", "pass")))
    code, output, _ = told(capsys, copy, "--num-steps", 64, "--seed", 3)
    assert code == 1
    assert f"{copy} is compared with {CONTINUOUS}, which its first lines name" in output
    assert "  equal      iteration 1, collect: " in output
    assert "  DIFFERENT  iteration 1, advantages\n" in output
    assert re.search(r"- +\d+ +next_values\[terminated\] = 0.0\n\+ +\d+ +pass\n", output)
    assert output.endswith("With the original's lines there, both are equal.\n")


def test_equal_scripts_end_with_exit_code_0(tmp_path, capsys):
    copy = tmp_path / "mine.py"
    copy.write_text("# My copy.\n" + (ROOT / DISCRETE).read_text())
    code, output, _ = told(capsys, copy, ROOT / DISCRETE, "--num-steps", 64)
    assert (code, output.splitlines()[-1]) == (0, "No difference.")


def test_settings_are_told_and_flags_of_the_copy_work(tmp_path, capsys):
    copy = tmp_path / "mine.py"
    other = ("gamma: float = 0.99", "power: float = 1.0  # of rewards\n    gamma: float = 0.9")
    used = ("rewards[t] /= ", "rewards[t] **= args.power\n                rewards[t] /= ")
    copy.write_text(changed(CONTINUOUS, other, used))
    code, output, _ = told(capsys, copy, "--num-steps", 64)
    assert "setting: gamma is 0.9, in the original 0.99" in output
    assert (code, output.splitlines()[-1]) == (1, "Only settings differ.")
    code, output, _ = told(capsys, copy, "--num-steps", 64, "--power", 2)
    assert code == 1
    assert re.search(r"\+ +\d+ +rewards\[t\] \*\*= args.power", output)


def test_a_copy_that_stops_is_told_by_where(tmp_path, capsys):
    copy = tmp_path / "mine.py"
    copy.write_text(
        changed(CONTINUOUS, ("returns = advantages + values", "returns = advantages + value"))
    )
    code, output, _ = told(capsys, copy, "--num-steps", 64)
    assert code == 1
    assert "The copy stops with NameError: name 'value' is not defined" in output
    assert re.search(r"\+ +\d+ +returns = advantages \+ value\b", output)
