# ruff: noqa: E501 - a table of code
"""Break the line of each detail in a copy of the project: some fast test must fail.

The rows below are for each tagged statement of ppo_continuous_action.py, and for what keeps a resumed
run the same and a user safe. Where another script has the same line outside of its marked copies, a
row counts for that script too; what is special to a script stands as MUTATIONS in its own test
files. `pytest -m slow tests/test_mutations.py` runs all of them;
`python tests/test_mutations.py kl_penalty annealing` runs those of some scripts, or with some words.
"""

import ast
import functools
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

import pytest
from adapters import ROOT, SCRIPTS, on
from test_copies import blocks, sections

HOME = "continuous"
# Files whose tests run on several scripts, chosen by --script.
SHARED = ["agent", "changed", "shared_update", "shared_rollout", "shared_resume"]
SHARED += ["shared_interface"]

# The text, what takes its place, and the tests that must notice: a file, a colon, and pytest's -k
# expression that selects a few of them. In a script's own files, no file means this one.
MUTATIONS = [
    # 1 vectorized architecture
    ("obs[0] = obs[-1]", "pass", "shared_rollout: rollouts_continue or bootstrap"),
    ("self.final_obs[i] = self.obs[i]\n                self.begin", "self.begin", "shared_rollout: bootstrap"),
    ("act(obs[t], noise[t])", "act(obs[t], 0 * noise[t])", "shared_rollout: samples_of_the_policy"),
    # 2 initialization
    ("nn.init.orthogonal_(layer.weight, gain)", "pass", "agent: gains"),
    ("init = layer_init if args.orthogonal_init else", "init = layer_init if True else", "agent: without_orthogonal"),
    ("nn.Linear(64, action_size), 0.01)", "nn.Linear(64, action_size), 1.0)", "agent: gains"),
    # 3 Adam
    ("(adam[\"square\"].sqrt() + args.adam_eps)", "(adam[\"square\"].sqrt() + 1e-8)", "reference: adam"),
    ("math.sqrt(1 - 0.999**step) / (1 - 0.9**step)", "1 / (1 - 0.9**step)", "reference: adam"),
    ("adam_steps += 1", "adam_steps += 2", "shared_update: corrected"),
    ("eps=args.adam_eps", "eps=1e-8", "shared_rollout: settings_reach"),
    # 4 annealing
    ("args.learning_rate * (frac if args.anneal_lr else 1.0)", "args.learning_rate", "shared_update: learning_rate_falls"),
    ("args.learning_rate * (frac if args.anneal_lr else 1.0)", "args.learning_rate * frac", "shared_update: learning_rate_falls"),
    # 5 advantages
    ("* next_values * (1 - terminated) - values", "* next_values - values", "math: gae"),
    ("gamma * gae_lambda * (1 - done)", "gamma * gae_lambda * (1 - terminated)", "math: gae"),
    ("advantages[t] = deltas[t] + decays[t] * advantages[t + 1]", "advantages[t] = deltas[t] + gae_lambda * advantages[t + 1]", "math: gae"),
    ("next_values[truncated] = agent.get_value(b_final_obs)", "pass", "shared_rollout: bootstrap"),
    ("if args.truncation_is_terminal:", "if False:", "shared_rollout: bootstrap"),
    ("if args.truncation_is_terminal:", "if True:", "shared_rollout: bootstrap"),
    # 6 minibatches
    ("rng.permutation(args.batch_size)", "np.arange(args.batch_size)", "shared_update: every_sample"),
    ("for mb in order.split(args.minibatch_size):", "for mb in [order]:", "shared_update: learning_rate_falls or every_sample"),
    # 7 normalization
    ("advantages = normalize(advantages) if args.norm_adv else advantages", "pass", "shared_update: by_hand"),
    ("advantages = normalize(advantages) if args.norm_adv else advantages", "advantages = normalize(advantages)", "shared_update: by_hand"),
    ("x.std(correction=0) + 1e-8", "x.std() + 1e-8", "shared_update: by_hand"),
    # 8 clipped surrogate
    ("ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio", "shared_update: by_hand"),
    ("torch.max(-advantages * ratio, -advantages * clipped_ratio)", "(-advantages * clipped_ratio)", "shared_update: by_hand"),
    # 9 value clipping
    ("(new_values - old_values).clamp(-clip_coef, clip_coef)", "(new_values - old_values)", "shared_update: by_hand"),
    ("torch.max((new_values - returns) ** 2, (clipped_values - returns) ** 2)", "(clipped_values - returns) ** 2", "shared_update: by_hand"),
    # 10 overall loss
    ("pg_loss - args.ent_coef * entropies.mean()", "pg_loss + args.ent_coef * entropies.mean()", "shared_update: by_hand"),
    ("+ args.vf_coef * v_loss", "+ v_loss", "shared_update: by_hand"),
    # 11 gradient clipping
    ("gradient = gradient * (args.max_grad_norm / metrics[\"losses/grad_norm\"]).clamp(max=1.0)", "pass", "shared_update: as_a_whole"),
    (".clamp(max=1.0)", "", "shared_update: as_a_whole"),
    ("(learned(agent), args.max_grad_norm)", "(learned(agent), math.inf)", "shared_update: as_a_whole"),
    # 12 debug variables
    ('"losses/policy_loss": pg_loss', '"losses/policy_loss": v_loss', "shared_update: by_hand"),
    ('"losses/entropy": entropies.mean()', '"losses/entropy": entropies.sum()', "shared_update: by_hand"),
    ('"losses/old_approx_kl": -logratio.mean()', '"losses/old_approx_kl": logratio.mean()', "shared_update: by_hand"),
    ('"losses/approx_kl": approx_kl(logratio)', '"losses/approx_kl": approx_kl(-logratio)', "shared_update: by_hand"),
    ("(logratio.exp() - 1).abs() > clip_coef", "(logratio.exp() - 1) > clip_coef", "shared_update: by_hand"),
    # 13 and 26 networks
    ("value_trunk if args.shared_network else trunk()", "value_trunk", "agent: trunk"),
    ("value_trunk if args.shared_network else trunk()", "trunk()", "agent: trunk"),
    # 23-25 distribution
    ("drawn = mean(obs) + std * noise", "drawn = mean(obs) + noise", "agent: actor"),
    ("else nn.Parameter(zeros)", "else zeros", "agent: log_std"),
    ("else nn.Parameter(zeros)", "else nn.Parameter(zeros + 1)", "agent: log_std"),
    ("nn.Parameter(torch.zeros(1, action_size))", "nn.Parameter(torch.ones(1, action_size))", "agent: log_std"),
    ("dist.log_prob(actions).sum(-1)", "dist.log_prob(actions).mean(-1)", "agent: joint"),
    ("dist.entropy().sum(-1)", "dist.entropy().mean(-1)", "agent: joint"),
    # 27 actions
    ("return drawn, np.minimum(np.maximum(drawn, low), high)", "return drawn, drawn", "agent: actor"),
    ("actions[t], env_actions = act(obs[t], noise[t])", "_, env_actions = act(obs[t], noise[t]); actions[t] = env_actions", "shared_rollout: clipped_actions"),
    # 28 and 29 observations
    ("(obs - stats.mean) / np.sqrt(stats.var + 1e-8)", "(obs - stats.mean)", "shared_rollout: normalized_by"),
    ("np.sqrt(stats.var + 1e-8)", "(np.sqrt(stats.var) + 1e-8)", "math: inside_the_root"),
    ("np.minimum(np.maximum(obs, -args.clip_obs), args.clip_obs)", "obs", "shared_rollout: normalized_by"),
    ("            obs_stats.update(envs.obs)\n            # Where", "            # Where", "shared_rollout: normalized_by"),
    ("normalize_obs(envs.final_obs, obs_stats, args)", "envs.final_obs", "shared_rollout: normalized_by"),
    # 30 and 31 rewards
    ("reward / math.sqrt(stats.var + 1e-8)", "(reward - stats.mean) / math.sqrt(stats.var + 1e-8)", "math: baselines"),
    ("discounted[done[t]] = 0.0", "pass", "math: baselines"),
    ("np.clip(scaled, -args.clip_reward, args.clip_reward)", "scaled", "math: baselines"),
    # Extras
    ("args.clip_coef * (frac if args.anneal_clip else 1.0)", "args.clip_coef", "shared_update: clip_range"),
    ("args.clip_coef * (frac if args.anneal_clip else 1.0)", "args.clip_coef * frac", "shared_update: clip_range"),
    ("if epoch_kl > args.early_stop_kl:\n                break", "if epoch_kl > args.early_stop_kl:\n                pass", "shared_update: early_stop_kl"),
    ("nn.Buffer(zeros) if args.anneal_log_std", "nn.Parameter(zeros) if args.anneal_log_std", "shared_update: annealed_log_std"),
    ("agent.log_std.fill_(last + (first - last) * frac)", "pass", "shared_update: annealed_log_std"),
    ("learning_rate = adapt_learning_rate(rate, kl, args.adapt_lr_kl)", "pass", "shared_update: follows_the_kl"),
    # What came, beside what was believed
    ("[rewards, next_values * (1 - terminated), done]", "[rewards, next_values, done]", "math: outcomes"),
    ("(rest if ended or not came else came[-1])", "(came[-1] if came else rest)", "math: outcomes"),
    ("came[::-1]", "came", "math: outcomes"),
    ("targets = values - came, values + advantages", "targets = came - values, values + advantages", "math: comparison"),
    ("0.01 * targets.square().mean()", "0.1 * targets.square().mean()", "math: comparison"),
    ('"check/values": 1 - advantages.var()', '"check/values": 1 - errors.var()', "math: comparison"),
    ("errors.mean() / (came.square().mean().sqrt() + 1e-8)", "errors.mean() / came.std()", "math: comparison"),
    ("normalize(advantages) * normalize(-errors)", "normalize(advantages) * normalize(errors)", "math: comparison"),
    ("normalize(logratio) * normalize(rewarded)", "normalize(-logratio) * normalize(rewarded)", "math: comparison"),
    ("rewarded = advantages[:, : logratio.shape[1]]", "rewarded = advantages[:, -logratio.shape[1] :]", "math: comparison"),
    ("outcomes(b_rewards, next_values, b_terminated, b_done, args.gamma)", "outcomes(b_rewards, next_values, b_done, b_done, args.gamma)", "shared_update: compared"),
    ("b_done, args.gamma)\n        metrics |=", "b_done, 0.99)\n        metrics |=", "shared_update: compared"),
    ("compare(new_logprobs - logprobs,", "compare(logprobs - new_logprobs,", "shared_update: compared"),
    ("compare(logratio, advantages,", "compare(-logratio, advantages,", "shared_update: compared"),
    ("metrics |= means([compare(", "means([compare(", "shared_update: compared"),
    ("logratio = logprobs[:, None] - old_logprobs[:, :1]", "logratio = logprobs[:, None] - old_logprobs[:, 1:2]", "shared_update: compared"),
    ('"check/first_kl": mb_metrics[0]', '"check/first_kl": mb_metrics[-1]', "shared_update: compared"),
    # Resuming and safety
    ("nn.utils.vector_to_parameters(adam[\"weights\"], learned(agent))\n    if saved and", "if saved and", "shared_update: has_learned"),
    ('adam = {name: x.to(device) for name, x in saved["adam"].items()}', "pass", "shared_resume: bit_for_bit"),
    ('agent.load_state_dict(saved["agent"])', "pass", "changed: buffers_go_on"),
    ('return_stats = RunningMeanStd(**saved["return_stats"])', "pass", "shared_resume: bit_for_bit"),
    ("if saved and envs.replay(saved):", "if False:", "shared_resume: bit_for_bit"),
    ("fixed += [\"learning_rate\"] if", "fixed += [] if", "shared_resume: adapted_learning_rate"),
    ("same = np.array_equal(self.obs, state[\"obs\"].numpy())", "same = True", "shared_resume: otherwise"),
    ('saved.get("global_step", 0) + 1)', "0)", "shared_resume: each_step_once"),
    ("sound = file.testzip() is None", "sound = True", "shared_resume: damaged"),
    (", weights_only=True)", ", weights_only=False)", "shared_resume: foreign_file"),
    ("if unknown := ", "if unknown := set() and ", "shared_resume: renamed"),
    ("temporary = run_dir / \"checkpoint.tmp\"", "temporary = run_dir / \"checkpoint.pt\"", "shared_resume: save_that_fails"),
    ("if not saved and (run_dir / \"checkpoint.pt\").exists():", "if False:", "shared_resume: overwritten"),
    ("check_actor(logprobs, noise, agent)\n\n        # --- Update", "# --- Update", "changed: acts_otherwise"),
    ("torch._dynamo.config.error_on_recompile = True", "pass", "changed: named_and_counts"),
    ("agent, adam = copy.deepcopy(agent), {", "agent, adam = agent, {", "shared_update: goes_wrong"),
    ("if not (found - expected).norm() <= 0.01 * expected.norm():", "if False:", "shared_update: goes_wrong"),
    ("if not math.isfinite(envs.obs.sum() + envs.final_obs.sum()):", "if False:", "shared_rollout: bad_number"),
]  # fmt: skip


class Row(typing.NamedTuple):
    script: str
    old: str
    new: str
    tests: list[str]  # arguments of pytest


@functools.cache
def source(script: str) -> str:
    return SCRIPTS[script].path.read_text()


@functools.cache
def copied(text: str) -> list[tuple[int, int]]:
    """Where each function, class or section that is marked as a copy begins and ends."""
    found = {**sections(text), **blocks(text)}.values()
    return [(start, start + len(block)) for block, home, start in found if home]


def is_copied(text: str, place: int) -> bool:
    return any(first <= place < last for first, last in copied(text))


def selected(test: str, file: str, script: str) -> list[str]:
    """Arguments of pytest for the tests that a row names, in this file if it names none."""
    *other, expression = test.split(": ")
    (file,) = other or [file]
    return [f"tests/test_{file}.py", "-k", expression, "--script", script]


def rows() -> list[Row]:
    found = []
    for script, adapter in SCRIPTS.items():
        for file in adapter.tests:
            for old, new, test in more_rows(ROOT / f"tests/test_{file}.py"):
                found.append(Row(script, old, new, selected(test, file, script)))
        text, own = source(script), {row.old for row in found if row.script == script}
        for old, new, test in MUTATIONS:
            file = test.split(": ")[0]
            here = text.count(old) == 1 and not is_copied(text, text.index(old))
            same = "environments" in adapter.features and file in SHARED and old not in own
            if here and (script == HOME or same):
                found.append(Row(script, old, new, selected(test, file, script)))
    return found


def more_rows(path: Path) -> list[tuple[str, str, str]]:
    """MUTATIONS of a test file, which is not imported for it."""
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MUTATIONS":
            return ast.literal_eval(node.value)
    return []


ROWS = rows()


def run(row: Row) -> tuple[int, str]:
    """Exit code and output of a row's tests on a broken copy of the project, in a forked process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in (*ROOT.glob("tests/*.py"), *ROOT.glob("*.py"), ROOT / "pyproject.toml"):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
        script = folder / SCRIPTS[row.script].path.name
        script.write_text(source(row.script).replace(row.old, row.new))
        child = os.fork()
        if child == 0:
            signal.alarm(600)
            os.chdir(folder)
            own = str(ROOT), str(ROOT / "tests")
            sys.path[:] = [str(folder / "tests"), *(x for x in sys.path if x not in own)]
            for name, module in [*sys.modules.items()]:  # those of the copy are to be imported
                if str(Path(getattr(module, "__file__", None) or "/").parent) in own:
                    del sys.modules[name]
            with open("output", "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            options = ["-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=-q"]
            os._exit(pytest.main([*options, "-m", "not slow", "--basetemp=tmp", *row.tests]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, (folder / "output").read_text()


def test_each_text_stands_exactly_once_in_its_script():
    wrong = {(x.script, x.old): source(x.script).count(x.old) for x in ROWS}
    assert {x: count for x, count in wrong.items() if count != 1} == {}
    used = {row.old for row in ROWS}
    assert [old for old, *_ in MUTATIONS if old not in used] == []
    assert [x for x in ROWS if x.old == x.new] == []


def test_each_selection_names_tests_that_exist():
    for row in ROWS:
        names = re.findall(r"def (test_\w+)", (ROOT / row.tests[0]).read_text())
        for word in {*re.findall(r"\w+", row.tests[2])} - {"and", "or", "not", row.script}:
            assert any(word in name for name in names), row


@on(*SCRIPTS)
def test_every_tagged_line_is_broken_by_a_row(script):
    """Those in marked copies at their home."""
    text, missing = script.path.read_text(), []
    ends = {x.lineno: x.end_lineno for x in ast.walk(ast.parse(text)) if isinstance(x, ast.stmt)}
    places = [text.index(x.old) for x in ROWS if x.script == script.name and x.old in text]
    broken = {text[:place].count("\n") + 1 for place in places}
    for tag in re.finditer(r"(?m)^ *# (Detail \w+/\d+|Extra|Deviation): .*", text):
        code = re.compile(r"(?m)^ *[^ #\n]").search(text, tag.end()).end()
        first = text[:code].count("\n") + 1
        if not is_copied(text, tag.start()) and not broken & {*range(first, ends[first] + 1)}:
            missing.append(tag[0].strip())
    assert missing == []


@pytest.mark.slow
@on(*SCRIPTS)
def test_breaking_a_line_is_noticed(script):
    command = [sys.executable, __file__, script.name]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def main(words: list[str]) -> int:
    scripts = [x for x in words if x in SCRIPTS] or list(SCRIPTS)
    others = [x for x in words if x not in SCRIPTS]
    chosen = [x for x in ROWS if x.script in scripts and all(word in str(x) for word in others)]
    for name in ("gymnasium", "torch._dynamo", "torch.utils.tensorboard", "tyro", "pydantic"):
        importlib.import_module(name)
    unnoticed = 0
    for i, row in enumerate(chosen, 1):
        code, output = run(row)
        unnoticed += code != 1
        verdict = "noticed" if code == 1 else "NOT NOTICED"
        print(f"{i}/{len(chosen)} {verdict}: {row.script}: {row.old.strip()!r} -> {row.new!r}")
        print("" if code == 1 else output[-1500:], end="", flush=True)
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
