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
SHARED += ["shared_interface", "device"]

# The text, what takes its place, and the tests that must notice: a file, a colon, and pytest's -k
# expression that selects a few of them. In a script's own files, no file means this one.
MUTATIONS = [
    # 1 vectorized architecture
    ("obs[0] = obs[-1]", "pass", "shared_rollout: rollouts_continue or bootstrap"),
    ("                    raw_final_obs[i] = raw_obs[i]\n", "", "shared_rollout: bootstrap"),
    ("act(obs[t], noise[t])", "act(obs[t], 0 * noise[t])", "shared_rollout: samples_of_the_policy"),
    ("global_step += args.num_envs", "global_step += 1", "shared_rollout: rollouts_continue"),
    # 2 initialization
    ("nn.init.orthogonal_(layer.weight, gain)", "pass", "agent: gains"),
    ("init = layer_init if args.orthogonal_init else", "init = layer_init if True else", "agent: without_orthogonal"),
    ("nn.Linear(64, action_size), 0.01)", "nn.Linear(64, action_size), 1.0)", "agent: gains"),
    # 3 Adam
    ("(square.sqrt() + args.adam_eps)", "(square.sqrt() + 1e-8)", "reference: adam"),
    ("((1 - 0.999**step).sqrt() / (1 - 0.9**step))", "(1 / (1 - 0.9**step))", "reference: adam"),
    ('step = adam["step"].add_(1)', 'step = adam["step"].add_(2)', "shared_update: corrected"),
    ("eps=args.adam_eps", "eps=1e-8", "shared_rollout: settings_reach"),
    # 4 annealing
    ("args.learning_rate * (frac if args.anneal_lr else 1.0)", "args.learning_rate", "shared_update: learning_rate_falls"),
    ("args.learning_rate * (frac if args.anneal_lr else 1.0)", "args.learning_rate * frac", "shared_update: learning_rate_falls"),
    # 5 advantages
    ("(rewards + gamma * next_values - values)", "(rewards + next_values - values)", "math: gae"),
    ("gamma * gae_lambda * (1 - done)", "gamma * gae_lambda * (1 - 0 * done)", "math: gae"),
    ("sums[t] += decays[t] * sums[t + 1]", "sums[t] += gae_lambda * sums[t + 1]", "math: gae"),
    ("next_values[truncated] = agent.get_value(b_final_obs)", "pass", "shared_rollout: bootstrap"),
    ("next_values[terminated] = 0.0", "pass", "shared_rollout: bootstrap"),
    ("if args.truncation_is_terminal:", "if False:", "shared_rollout: bootstrap"),
    ("if args.truncation_is_terminal:", "if True:", "shared_rollout: bootstrap"),
    # 6 minibatches
    ("rng.permutation(batch_size)", "np.arange(batch_size)", "shared_update: every_sample"),
    ("minibatches = order.split(batch_size // args.num_minibatches)", "minibatches = [order]", "shared_update: every_sample"),
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
    ("clip_coef if args.clip_vloss else math.inf", "clip_coef", "shared_update: by_hand"),
    # 10 overall loss
    ("pg_loss - args.ent_coef * entropies.mean()", "pg_loss + args.ent_coef * entropies.mean()", "shared_update: by_hand"),
    ("+ args.vf_coef * v_loss", "+ v_loss", "shared_update: by_hand"),
    # 11 gradient clipping
    ("gradient = gradient * (args.max_grad_norm / metrics[\"losses/grad_norm\"]).clamp(max=1.0)", "pass", "shared_update: as_a_whole"),
    (".clamp(max=1.0)", "", "shared_update: as_a_whole"),
    ("(agent.parameters(), args.max_grad_norm)", "(agent.parameters(), math.inf)", "shared_update: as_a_whole"),
    # 12 debug variables
    ('"losses/policy_loss": pg_loss', '"losses/policy_loss": v_loss', "shared_update: by_hand"),
    ('"losses/entropy": entropies.mean()', '"losses/entropy": entropies.sum()', "shared_update: by_hand"),
    ('"losses/approx_kl": approx_kl(logratio)', '"losses/approx_kl": approx_kl(-logratio)', "shared_update: by_hand"),
    ("(logratio.exp() - 1).abs() > clip_coef", "(logratio.exp() - 1) > clip_coef", "shared_update: by_hand"),
    # 13 and 26 networks
    ("value_trunk if args.shared_network else trunk()", "value_trunk", "agent: trunk"),
    ("value_trunk if args.shared_network else trunk()", "trunk()", "agent: trunk"),
    # 23-25 distribution
    ("return mean(obs) + std * noise", "return mean(obs) + noise", "agent: actor"),
    ("(0.5 * (noise**2 + math.log(2 * math.pi)) + np.log(std)).sum(-1)", "(0.5 * (noise**2 + math.log(2 * math.pi))).sum(-1)", "agent: actor"),
    ("else nn.Parameter(zeros)", "else zeros", "agent: log_std"),
    ("else nn.Parameter(zeros)", "else nn.Parameter(zeros + 1)", "agent: log_std"),
    ("nn.Parameter(torch.zeros(1, action_size))", "nn.Parameter(torch.ones(1, action_size))", "agent: log_std"),
    ("dist.log_prob(actions).sum(-1)", "dist.log_prob(actions).mean(-1)", "agent: joint"),
    ("dist.entropy().sum(-1)", "dist.entropy().mean(-1)", "agent: joint"),
    # 27 actions
    ("clipped_actions = np.minimum(np.maximum(actions[t], low), high)", "clipped_actions = actions[t]", "shared_rollout: clipped_actions"),
    ("clipped_actions = np.minimum(np.maximum(actions[t], low), high)", "clipped_actions = np.clip(actions[t], low, high, out=actions[t])", "shared_rollout: clipped_actions"),
    # 28 and 29 observations
    ("(obs - stats.mean) / np.sqrt(stats.var + 1e-8)", "(obs - stats.mean)", "shared_rollout: normalized_by"),
    ("np.sqrt(stats.var + 1e-8)", "(np.sqrt(stats.var) + 1e-8)", "math: inside_the_root"),
    ("np.minimum(np.maximum(obs, -args.clip_obs), args.clip_obs)", "obs", "shared_rollout: normalized_by"),
    ("            obs_stats.update(raw_obs)\n            # Where", "            # Where", "shared_rollout: normalized_by"),
    ("normalize_obs(raw_final_obs, obs_stats, args)", "raw_final_obs", "shared_rollout: normalized_by"),
    # 30 and 31 rewards
    ("rewards[t] /= np.sqrt(return_stats.var + 1e-8)", "rewards[t] -= return_stats.mean", "shared_rollout: baselines"),
    ("discounted_returns[done[t]] = 0.0", "pass", "shared_rollout: baselines"),
    ("np.clip(rewards, -args.clip_reward, args.clip_reward, out=rewards)", "pass", "shared_rollout: baselines"),
    # Extras
    ("args.clip_coef * (frac if args.anneal_clip else 1.0)", "args.clip_coef", "shared_update: clip_range"),
    ("args.clip_coef * (frac if args.anneal_clip else 1.0)", "args.clip_coef * frac", "shared_update: clip_range"),
    ("if means(epoch)[\"losses/approx_kl\"] > args.early_stop_kl:", "if False:", "shared_update: early_stop_kl"),
    ("means(epoch)[\"losses/approx_kl\"]", "means(mb_metrics)[\"losses/approx_kl\"]", "shared_update: early_stop_kl"),
    ("nn.Buffer(zeros) if args.anneal_log_std", "nn.Parameter(zeros) if args.anneal_log_std", "shared_update: annealed_log_std"),
    ("agent.log_std.fill_(last + (first - last) * frac)", "pass", "shared_update: annealed_log_std"),
    ("factor = (kl < args.adapt_lr_kl / 2) - (kl > 2 * args.adapt_lr_kl)", "factor = (kl < args.adapt_lr_kl) - (kl > args.adapt_lr_kl)", "shared_update: follows_the_kl"),
    ("min(max(rate * 1.5**factor, 1e-5), 1e-2)", "rate * 1.5**factor", "shared_update: follows_the_kl"),
    # Observed returns, beside what was expected
    ("(rest if ended or not found else found[-1])", "(found[-1] if found else rest)", "math: observed_returns"),
    ("found[::-1]", "found", "math: observed_returns"),
    ("0.01 * targets.square().mean()", "0.1 * targets.square().mean()", "math: diagnosis"),
    ('"check/values": 1 - advantages.var()', '"check/values": 1 - observed.var()', "math: diagnosis"),
    ("(values - observed).mean() / (observed.square().mean().sqrt() + 1e-8)", "(values - observed).mean() / observed.std()", "math: diagnosis"),
    ("normalize(logratio) * normalize(rewarded)", "normalize(-logratio) * normalize(rewarded)", "math: diagnosis"),
    ("rewarded = values + advantages, advantages[:, : logratio.shape[1]]", "rewarded = values + advantages, advantages[:, -logratio.shape[1] :]", "math: diagnosis"),
    ("observed_returns(b_rewards, following, b_done, args.gamma)", "observed_returns(b_rewards, values, b_done, args.gamma)", "shared_update: compared"),
    ("observed_returns(b_rewards, following, b_done, args.gamma)", "observed_returns(b_rewards, following, b_done, 0.99)", "shared_update: compared"),
    ("agent.evaluate_actions(b_obs[:-1], b_actions)[0] - logprobs", "logprobs - agent.evaluate_actions(b_obs[:-1], b_actions)[0]", "shared_update: compared"),
    ("means([diagnose(logratio, advantages,", "means([diagnose(-logratio, advantages,", "shared_update: compared"),
    ('"check/first_kl": mb_metrics[0]', '"check/first_kl": mb_metrics[-1]', "shared_update: compared"),
    ("approx_kl(acting - logprobs)", "approx_kl(0 * acting)", "changed: acts_otherwise"),
    ('"check/kl_after": approx_kl(logratio)', '"check/kl_after": approx_kl(-logratio)', "shared_update: kl_after"),
    # Metrics and warnings
    ("if not math.isfinite(x)", "if False", "shared_rollout: bad_loss"),
    ("means[0] + 0.8 * (means.max()", "means[0] + 0.7 * (means.max()", "math: lost"),
    ("max(20, len(episodes) // 20)", "20", "math: lost"),
    ("if name not in warned:", "if True:", "shared_interface: health"),
    ("is_long = len(rows) == count and", "is_long =", "shared_interface: health"),
    ("any(low <= x[name] <= high for x in rows)", "any(low <= x[name] for x in rows)", "shared_interface: health"),
    ('min(history[0]["global_step"] / 2000, 1)', "1", "shared_interface: health"),
    ("if is_long and not (if_lost and not return_lost(episodes)):", "if is_long:", "shared_interface: health"),
    ("episodes[-100:]", "episodes", "shared_interface: last_hundred"),
    # Resuming and safety
    ("    # From now on the parameters are views of this vector, which is changed in place only.\n    nn.utils.vector_to_parameters(adam[\"weights\"], agent.parameters())\n", "", "shared_update: has_learned"),
    ('adam = {name: x.to(device) for name, x in saved["adam"].items()}', "pass", "shared_resume: bit_for_bit"),
    ('        agent.load_state_dict(saved["agent"])\n        adam', "        adam", "changed: buffers_go_on"),
    ('return_stats = RunningMeanStd(**saved["return_stats"])', "pass", "shared_resume: bit_for_bit"),
    ('obs_stats = RunningMeanStd(**saved["obs_stats"])', "pass", "shared_resume: bit_for_bit"),
    ("discounted_returns = saved[\"discounted_returns\"].numpy()", "pass", "shared_resume: bit_for_bit"),
    ("if not (saved and replay(envs, saved, raw_obs)):", "if True:", "shared_resume: bit_for_bit"),
    ("self.actions.append(action.copy())", "self.actions.append(0 * action)", "shared_resume: bit_for_bit"),
    ("rng = np.random.default_rng([args.seed, iteration])", "rng = np.random.default_rng(args.seed)", "shared_rollout: new_ones_in_each"),
    ("same = np.array_equal(raw_obs, saved[\"raw_obs\"].numpy())", "same = True", "shared_resume: otherwise"),
    ('saved["updates"][-1]["global_step"] + 1 if saved else 0', "0", "shared_resume: each_step_once"),
    ("if broken := file.testzip():", "if broken := None:", "shared_resume: damaged"),
    (", weights_only=True)", ", weights_only=False)", "shared_resume: foreign_file"),
    ("        torch.save({\"args\": settings, **state}, run_dir / \"checkpoint.tmp\")\n        os.replace(run_dir / \"checkpoint.tmp\", run_dir / \"checkpoint.pt\")", "        torch.save({\"args\": settings, **state}, run_dir / \"checkpoint.pt\")", "shared_resume: full_disk"),
    ("except (OSError, RuntimeError) as error:", "except OSError as error:", "shared_resume: full_disk"),
    ("if not saved and (run_dir / \"checkpoint.pt\").exists():", "if False:", "shared_resume: overwritten"),
    ("if kept[name] != value]:", "if False]:", "shared_resume: overwritten"),
    ("args, device = settings_of_run(args), choose_device(args)", "device = choose_device(args)", "shared_resume: settings_of_the_run_too"),
    ("stopping = STOP.is_set() or iteration == num_iterations", "stopping = iteration == num_iterations", "shared_resume: ctrl_c"),
    ("            chosen = function\n            return function(*args)", "            raise", "shared_update: compiling_fails"),
    # The other device
    ("torch.tensor(x, dtype=torch.float32, device=device)", "torch.tensor(x, dtype=torch.float32)", "device: is_there"),
    ("    advantages = advantages.to(values.device)\n", "", "device: is_there"),
    ("agent.log_std.exp().numpy(force=True)", "agent.log_std.exp().detach().numpy()", "device: is_there"),
    ("adam = {name: x.to(device) for name, x in saved[\"adam\"].items()}", "adam = saved[\"adam\"]", "device: is_there"),
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
