# ruff: noqa: E501 - a table of code
"""Break the line of each detail in a copy of the project: some fast test must fail.

Slow; run with `pytest -m slow tests/test_mutations.py`, or with `-k "kl_penalty and K1"` for some.
Functions that a script has copied are broken only at home: test_copies.py keeps the copies equal.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Script -> what is broken, the text, what takes its place, the tests that must notice: files joined
# by " or ", then perhaps a colon and pytest's -k expression that selects a few seconds of them.
MUTATIONS = {}

MUTATIONS["ppo_continuous_action.py"] = [
    ("1 rollouts start where the last one ended", "obs[0] = obs[-1]", "pass", "envs"),
    ("1 every environment has its own seed", "generate_state(num_envs).tolist()",
     "generate_state(1).tolist() * num_envs", "envs"),
    ("2 orthogonal", "nn.init.orthogonal_(layer.weight, gain)", "pass", "agent"),
    ("2 hidden gain", "hidden_gain = math.sqrt(2)", "hidden_gain = 1.0", "agent"),
    ("2 policy gain", "nn.Linear(64, action_size), 0.01)", "nn.Linear(64, action_size), 1.0)", "agent"),
    ("2 value gain", "nn.Linear(64, 1), 1.0)", "nn.Linear(64, 1), 0.01)", "agent"),
    ("2 bias", "nn.init.constant_(layer.bias, bias)", "pass", "agent"),
    ("3 epsilon", "eps=args.adam_eps, fused", "fused", "train"),
    ("4 annealing", "= decay * args.learning_rate", "= args.learning_rate", "train"),
    ("4 schedule", "(iteration - 1) / num_iterations", "iteration / num_iterations", "math"),
    ("5 termination", "* (1 - terminated) - values", "- values", "math"),
    ("5 end of episode", "gae_lambda * (1 - done)", "gae_lambda", "math"),
    ("5 off by one", "torch.cat([values[1:], agent.get_value(t_obs[-1:])])",
     "torch.cat([values[:1], values[1:]])", "envs"),
    ("5 truncation", "if not terminated[step, i]:", "if False:", "envs"),
    ("5 truncation is terminal", "done if args.truncation_is_terminal else terminated", "terminated",
     "envs"),
    ("6 shuffling", "rng.permutation(args.batch_size)", "np.arange(args.batch_size)", "train"),
    ("6 without replacement", "rng.permutation(args.batch_size)",
     "rng.integers(args.batch_size, size=args.batch_size)", "train"),
    ("7 per minibatch", "normalize(advantages) if norm_adv else advantages", "advantages", "agent"),
    ("7 population std", "x.std(correction=0) + eps", "x.std() + eps", "math"),
    ("8 clipping", "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio", "math"),
    ("8 pessimism", "torch.max(-advantages * ratio, -advantages * clipped_ratio)",
     "(-advantages * clipped_ratio)", "math"),
    ("9 clipping", "errors = torch.max(errors, (clipped_values - returns) ** 2)", "pass", "math"),
    ("9 one half", "return 0.5 * errors.mean()", "return errors.mean()", "math"),
    ("10 sign of the bonus", "pg_loss - ent_coef", "pg_loss + ent_coef", "agent"),
    ("10 value weight", "+ vf_coef * v_loss", "+ v_loss", "agent"),
    ("11 clipping", "gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)", "pass", "train"),
    ("12 means over all minibatches", "torch.stack(epoch_metrics).mean(0)", "epoch_metrics[-1]", "train"),
    ("12 k3", "(logratio.exp() - 1 - logratio).mean()", "(-logratio).mean()", "math"),
    ("13, 26 separate networks", "self.value_trunk if args.shared_network else trunk()",
     "self.value_trunk", "agent"),
    ("23 log std is a log", "self.log_std.exp().expand_as(mean)", "(self.log_std + 1).expand_as(mean)",
     "agent"),
    ("23 noise of the rollout", "+ std * noise[step]", "+ noise[step] * 0.5", "train or envs"),
    ("24 parameter", "nn.Parameter(torch.zeros(1, action_size))", "torch.zeros(1, action_size)", "agent"),
    ("25 sum over components", "policy.log_prob(action).sum(-1)", "policy.log_prob(action).mean(-1)",
     "agent"),
    ("27 the environment gets clipped actions", "env_actions = clip(actions[step], low, high)",
     "env_actions = actions[step]", "envs"),
    ("27 the buffer holds unclipped ones",
     "actions[step] = numpy_mlp(policy, obs[step]) + std * noise[step]",
     "actions[step] = clip(numpy_mlp(policy, obs[step]) + std * noise[step], low, high)", "envs"),
    ("28 normalization", "(obs - stats.mean) / np.sqrt(stats.var + 1e-8)", "(obs - stats.mean)", "envs"),
    ("28 updated at every step", "                obs_stats.update(raw_obs)\n", "", "envs"),
    ("28 epsilon inside the root", "np.sqrt(stats.var + 1e-8)", "(np.sqrt(stats.var) + 1)", "envs"),
    ("29 clipping", "clip(obs, -clip_obs, clip_obs) if norm_obs", "obs if norm_obs", "envs"),
    ("30 scaling", "reward / math.sqrt(stats.var + 1e-8)", "(reward - stats.mean) / math.sqrt(stats.var)",
     "envs"),
    ("30 discounted return", "discounted_return *= args.gamma", "pass", "envs"),
    ("30 restart at an end", "discounted_return[done[step]] = 0.0", "pass", "envs"),
    ("31 clipping", "clip(reward, -clip_reward, clip_reward)", "reward * 1.0", "envs"),
    ("A1 clip annealing", "clip_coef.fill_(decay * args.clip_coef)", "pass", "train"),
    ("A2 average", "        dist.all_reduce(x)\n        x /= WORLD_SIZE", "        dist.all_reduce(x)",
     "distributed"),
    ("A3 early stopping", "epoch_metrics[-1][KL] > args.target_kl:\n                    break",
     "epoch_metrics[-1][KL] > args.target_kl:\n                    pass", "train"),
    ("normalizer in the model", '"statistics": {name: stats.state() for name, stats in statistics.items()},\n    }\n\n\ndef save_file',
     '"statistics": {name: RunningMeanStd(stats.mean.shape).state() for name, stats in statistics.items()},\n    }\n\n\ndef save_file', "cli"),
    ("Adam in the checkpoint", 'optimizer.load_state_dict(checkpoint["optimizer"])', "pass", "checkpoint"),
    ("random generator in the checkpoint", 'self.rng.bit_generator.state = json.loads(saved["rng"])', "pass",
     "checkpoint"),
    ("episode in the checkpoint", 'array[...] = saved["arrays"][name].numpy()', "pass", "checkpoint"),
    ("curves without duplicates", "purge_step=resume_step + 1", "purge_step=None", "checkpoint"),
    ("finite numbers", "if finite.all():", "if True:", "train"),
    ("simulator in the checkpoint", 'restore_mujoco(layer.model, current, value)', "pass", "checkpoint"),
]  # fmt: skip


CASES = [(script, *mutation) for script in MUTATIONS for mutation in MUTATIONS[script]]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[f"{x[0][:-3]} {x[1]}" for x in CASES])
def test_breaking_a_line_is_noticed(tmp_path, case):
    script, _, old, new, tests = case
    source = (ROOT / script).read_text()
    assert source.count(old) == 1, "the text must stand exactly once in the script"
    for path in (ROOT / "tests", *ROOT.glob("ppo_*.py"), ROOT / "pyproject.toml"):
        target = tmp_path / path.name
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    (tmp_path / script).write_text(source.replace(old, new))
    names, _, chosen = tests.partition(": ")
    files = [f"tests/test_{name}.py" for name in names.split(" or ")]
    selection = "not compiled and not five_random and not signal"
    selection += f" and ({chosen})" if chosen else ""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:xdist", *files]
    command += ["-o", "addopts=-q", "-k", selection]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout[-2000:]
