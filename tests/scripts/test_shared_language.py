"""What the scripts of the RLHF family share: stages, the last one's loop, results, bad input.

`scripts_with("rewards")` are those that learn from a reward model: PPO and GRPO.
"""

import copy
import dataclasses
import io
import json
import math
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import wandb
from adapters import SCRIPTS, scripts, scripts_with, slow_on
from helpers import curves, flags, louder, record, record_steps, same_weights, seeded
from torch import nn


@scripts("grpo", "dpo")
@slow_on("grpo", "dpo")
def test_stages_and_evaluation_are_those_of_ppo_to_the_bit(script, finished, finished_runs):
    ppo = finished_runs("rlhf")
    policy, learned = finished.reference.policy, finished.preferences.learned
    assert same_weights(policy, ppo.reference.policy)
    tensors = [[*x.learned, *x.held_out, *x[2:]] for x in (finished.preferences, ppo.preferences)]
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True)) and len(tensors[0]) == 9
    texts = learned.prompts[:8], learned.chosen[:8]
    both = (x.logprobs(x.home.Agent(policy, 0.7), *texts) for x in (script, SCRIPTS["rlhf"]))
    assert torch.equal(*both)
    results = [x.run["results"]["sft"] for x in (finished, ppo)]
    common = results[0].keys() & results[1].keys()
    assert len(common) >= 7 and all(results[0][name] == results[1][name] for name in common)
    if "rewards" in script.features:
        models = (x.judges.reward_model.parameters() for x in (finished, ppo))
        assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
        assert finished.run["quality"] == ppo.run["quality"]


@scripts_with("rewards")
def test_r14_a_rollout_is_measured_and_gold_can_be_its_reward(script, judges):
    """That its rewards are right, test_enumeration.py shows."""
    module = script.home
    judges = judges._replace(reference=module.Agent(judges.reference.policy, 0.8))
    agent, args = louder(judges.reference, 0.03), script.args(missing_eos_score=-5.0)
    rollout, metrics = script.collect(args, agent, judges, 3.0)
    by_gold, _ = script.collect(dataclasses.replace(args, reward="gold"), agent, judges, 3.0)
    inputs, mask = (rollout.prompts, rollout.responses), rollout.responses != module.PAD
    with torch.no_grad():
        new, ref = (script.logprobs(x, *inputs) for x in (agent, judges.reference))
        proxy = judges.reward_model.score(*inputs)
    ended = (rollout.responses == module.VOCABULARY.index("."))[:, 4:].any(1)
    scores, gold = (x.where(ended, -5.0) for x in (proxy, judges.task.gold(*inputs)))
    assert 0 < ended.sum() < 32 and torch.equal(rollout.mask, mask)
    more = (by_gold.rewards - rollout.rewards).view(32, -1).sum(1)
    torch.testing.assert_close(more, gold - scores, atol=1e-4, rtol=1e-4)
    kl = module.log_probability(new - ref, rollout.responses)[mask].sum() / 32
    exact = (new.exp() * (new - ref)).sum(2)[mask].sum() / 32
    expected = {"kl": kl, "kl_exact": exact, "proxy": proxy.mean()}
    expected |= {"score": scores.mean(), "score_std": scores.std(correction=0)}
    for name, value in expected.items():
        assert metrics[f"objective/{name}"] == pytest.approx(value.item(), rel=1e-4), name
    assert exact > 0.1


@scripts_with("rewards")
@pytest.mark.parametrize(("anneal_lr", "falls_to"), [(True, (1, 2 / 3, 1 / 3)), (False, (1, 1, 1))])
def test_r5_11_learning_rate_falls_and_gradients_are_clipped(
    script, judges, monkeypatch, anneal_lr, falls_to
):
    rates, steps = [0.01 * x for x in falls_to], record_steps(monkeypatch, torch.optim.Adam)
    settings = {"num_updates": 3, "learning_rate": 0.01, "max_grad_norm": 0.01}
    _, updates = script.learn(judges, **settings, update_epochs=1, anneal_lr=anneal_lr)
    assert [row["charts/learning_rate"] for row in updates] == pytest.approx(rates)
    seen = [step.lr for step in steps]
    assert seen == pytest.approx([rate for rate in rates for _ in range(len(steps) // 3)])
    assert all(step.gradient.norm() <= 0.01001 for step in steps)
    assert max(row["losses/grad_norm"] for row in updates) > 0.011


@scripts_with("rewards")
def test_ratio_is_one_before_the_first_step_then_the_kl_grows_and_the_reference_stays(
    script, judges
):
    reference = script.home.Agent(judges.reference.policy, 0.7)
    judges = judges._replace(reference=reference)
    before = copy.deepcopy(judges.reference.state_dict())
    for row in script.learn(judges, learning_rate=0.0)[1]:
        assert row["losses/clipfrac"] == 0
        assert row["losses/approx_kl"] < 1e-5
    agent, (first, last) = script.learn(judges, learning_rate=0.01)
    assert abs(first["objective/kl"]) < 1e-3 and last["objective/kl_exact"] > 0.01
    after = agent.state_dict()
    for name, x in judges.reference.state_dict().items():
        learns = script.name == "rlhf" or not name.startswith("value_head.")
        assert torch.equal(x, before[name]) and torch.equal(x, after[name]) != learns


@scripts_with("rewards")
def test_r20_beta_follows_the_kl_of_each_rollout_and_weighs_the_next_one(
    script, judges, monkeypatch
):
    calls = record(monkeypatch, script.module, "collect")

    def betas(**changes):
        calls.clear()
        settings = {"learning_rate": 0.01, "num_minibatches": 1, "update_epochs": 1, **changes}
        _, updates = script.learn(judges, **settings)
        found = [row["objective/kl_coef"] for row in updates]
        assert [call[4] for call in calls] == found
        return found, [row["objective/kl"] for row in updates]

    found, kl = betas(num_updates=3, kl_coef=3.0)
    for i in (0, 1):
        expected = script.home.proportional_kl_coef(found[i], kl[i], 6.0, 16, 500)
        assert found[i + 1] == pytest.approx(expected) != pytest.approx(found[i])
    assert found[0] == 3.0 and kl[1] > 0.01
    (_, met, after), _ = betas(num_updates=3, kl_coef=3.0, target_kl=kl[1])
    assert met == pytest.approx(after)  # once the target is met, beta stays
    assert betas(kl_mode="fixed")[0] == [0.5, 0.5] and betas(kl_mode="none")[0] == [0.0, 0.0]


@scripts_with("language")
def test_each_step_takes_the_gradient_of_its_own_minibatch(script, judges, monkeypatch):
    """With a step size of 0, two passes over the same minibatch have the same gradient."""
    norms = record(monkeypatch, nn.utils, "clip_grad_norm_")
    script.learn(judges, learning_rate=0.0, **script.one_minibatch)
    first, second = (norm.item() for *_, norm in norms)
    assert first == pytest.approx(second, rel=1e-4) and first > 0


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")  # one response is left
@scripts_with("rewards")
def test_nan_stops_the_run_with_a_sentence(script, judges, monkeypatch):
    """A gradient that is NaN although the loss was finite; a policy that writes only padding."""
    broken = judges._replace(reference=copy.deepcopy(judges.reference))
    broken.reference.policy.final_norm.weight.data.fill_(math.nan)
    with pytest.raises(script.home.UsageError, match="NaN or infinite"):
        script.learn(broken)
    real = getattr(script.module, script.loss)

    def poisoned(*args):
        loss, metrics = real(*args)
        return loss * math.nan, metrics

    monkeypatch.setattr(script.module, script.loss, poisoned)
    with pytest.raises(script.home.UsageError, match="NaN or infinite"):
        script.learn(judges)


@scripts_with("language")
@slow_on("grpo", "dpo")
def test_a_command_makes_the_run_of_its_settings_and_leaves_what_happened(
    script, finished, cli, monkeypatch
):
    """With a model of each form: results, texts, curves and weights."""
    trained = record(monkeypatch, script.module, script.stage)
    closed = record(monkeypatch, script.module.SummaryWriter, "close")
    run, folder = finished.run, Path("runs/run")
    code, printed, error = cli(flags(run["args"]))
    saved, models = json.loads((folder / "results.json").read_text()), ["sft", *script.forms]
    results, texts = saved["results"], saved["texts"]
    assert code == 0 and results == run["results"], error
    assert saved["args"] == vars(run["args"])
    assert list(texts) == models == list(results)[: len(models)]
    assert len(closed) == len([*folder.glob("*/events*")]) == len({x for x, *_ in closed})
    assert texts["sft"][0] in printed and "Reward model: accuracy 0." in printed
    kl = [results[name]["objective/kl"] for name in models]
    assert abs(kl[0]) < 1e-5 < min(kl[1:]) and len(set(kl)) == len(kl)
    for (name, form), (args, *_, updates) in zip(script.forms.items(), trained, strict=True):
        row = results[name]
        assert re.search(rf"\n{name} +{row['objective/gold']:.3g} ", printed)
        assert {x: getattr(args, x) for x in form} == form == {x: row[x] for x in form}
        assert row["method"] == script.method and {"objective/gold", "text/unique"} <= row.keys()
        assert row.get("objective/kl_coef") == updates[-1].get("objective/kl_coef")
        begun = [updates[0][x] for x in ("objective/kl_exact", "rewards/margin") if x in updates[0]]
        assert begun == [pytest.approx(0, abs=1e-5)]  # each form starts as the reference
        checkpoint = torch.load(folder / name / "checkpoint.pt", weights_only=True)
        assert checkpoint["updates"] == updates and len(run["updates"][name]) == len(updates)
        expected = [(i, x["losses/grad_norm"]) for i, x in enumerate(updates, 1)]
        np.testing.assert_allclose(curves(folder / name)["losses/grad_norm"], expected, rtol=1e-4)
    first = torch.load(folder / models[1] / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(first["agent"][x], y) for x, y in run["agent"].state_dict().items())


BAD = {
    "language": [
        ("--num-pairs 5", "--num-pairs (5) must be from 14 to inf."),
        ("--sft-steps 0", "--sft-steps (0) must be from 1 to inf."),
        ("--lr -1", "--learning-rate (-1.0) must be from 0 to 1000000000.0."),
        ("--lr inf", "--learning-rate (inf) must be from 0"),
        ("--temperature 0", "--temperature (0.0) must be from 1e-09"),
        ("--seed -1", "--seed (-1) must be from 0"),
        (f"--seed {2**64}", f"must be from 0 to {2**63 - 1}."),
        ("--run-name run", "runs/run: File exists: change --run-name."),
        ("--run-name a/../b", "--run-name (a/../b) must be a name, not a path."),
    ],
    "rewards": [
        ("--num-minibatches 3", "divide --batch-size"),
        ("--batch-size 0", "--batch-size (0) must be from 1"),
        ("--lr nan", "--learning-rate (nan) must be from 0"),
        ("--clip-coef nan", "--clip-coef (nan) must be from 0 to inf."),
        ("--kl-coef inf", "--kl-coef (inf) must be from 0"),
        ("--target-kl 0", "--target-kl (0.0) must be from 1e-09"),
        ("--missing-eos-score nan", "--missing-eos-score (nan) must be from -1"),
        ("--kl-coef 0", "--kl-coef > 0, --kl-horizon > --batch-size"),
        ("--kl-horizon 20", "--kl-coef > 0, --kl-horizon > --batch-size"),
    ],
    "rlhf": [
        ("--gamma 1.5", "--gamma (1.5) must be from 0 to 1."),
        ("--gae-lambda 1.5", "--gae-lambda (1.5) must be from 0 to 1."),
        ("--kl-mode none --compare --kl-horizon 20", "--kl-coef > 0, --kl-horizon > --batch-size"),
        ("--track", "No API key. (or WANDB_MODE=offline)"),
    ],
    "grpo": [
        ("--group-size 3", "--num-minibatches and --group-size must both divide"),
        ("--group-size 1", "--group-size (1) must be from 2"),
    ],
    "dpo": [
        ("--beta 0", "--beta (0.0) must be from 1e-09"),
        ("--beta inf", "--beta (inf) must be from 1e-09"),
        ("--nll-coef -1", "--nll-coef (-1.0) must be from 0"),
    ],
}


@scripts_with("language")
def test_bad_input_is_a_sentence_and_code_2_and_so_is_ctrl_c(script, finished, cli, monkeypatch):
    def init(**settings):
        assert settings["sync_tensorboard"] and settings["reinit"] == "finish_previous"
        raise wandb.Error("No API key.")

    monkeypatch.setattr(wandb, "init", init)
    shutil.copytree(finished.folder, "runs/run")
    for words in (BAD[x] for x in (*script.features, script.name)):
        for line, message in words:
            code, _, error = cli(f"--run-name x {line}")
            assert code == 2 and error.count("\n") == 1 and message in error, (line, error)
            assert not Path("runs/x/sft").exists() and "Traceback" not in error

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.home, "train_sft", interrupted)
    code, _, error = cli("--sft-documents 50")
    assert code == 130 and error.count("\n") == 1
    assert error.startswith("Interrupted. ") and error.endswith("takes only minutes.\n")


@scripts("rlhf")
def test_a_cluster_that_ends_a_run_does_what_ctrl_c_does_but_nohup_protects(
    script, cli, monkeypatch, hangup
):
    for number in (signal.SIGTERM, hangup):
        signal.signal(number, signal.SIG_DFL)
        monkeypatch.setattr(script.home, "train_sft", lambda *_, x=number: signal.raise_signal(x))
        code, _, error = cli("--sft-documents 50")
        assert code == 128 + number and error.startswith("Interrupted. ")
    signal.signal(hangup, signal.SIG_IGN)
    with script.home.command_line():
        pass
    assert signal.getsignal(hangup) == signal.SIG_IGN


@scripts_with("language")
def test_a_run_has_a_name_in_a_notebook_too_and_what_the_caller_has_set_does_not_matter(
    script, monkeypatch
):
    """Threads, the type of floats, gradients; all that is as before, afterwards."""
    seen, ask = [], (torch.get_num_threads, torch.get_default_dtype, torch.is_grad_enabled)
    ask = *ask, torch.is_inference_mode_enabled

    def interrupted(args, *_):
        seen.append((args.run_name.rpartition("__")[0], *(x() for x in ask)))
        raise KeyboardInterrupt

    monkeypatch.setattr(script.home, "train_sft", interrupted)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, pytest.raises(KeyboardInterrupt):
                script.module.train(script.args(run_name=None, seed=5))
            monkeypatch.delattr(script.module, "__file__", raising=False)
        assert [x() for x in ask] == [2, torch.float64, True, False]
    finally:
        torch.set_default_dtype(torch.float32)
    names = f"{script.path.stem}__5", "notebook__5"
    assert seen == [(name, 1, torch.float32, True, False) for name in names]


@scripts_with("language")
@slow_on("grpo", "dpo")
def test_models_that_have_learned_drop_nothing_out(script, finished, monkeypatch):
    """If a copy of the script adds dropout: no sample, score or ratio may depend on it."""
    module, modes = script.home, []
    args, task = script.args(), module.toy_task(script.args())
    model = module.TinyGPT(len(task.vocabulary), task.documents.shape[1])
    model.final_norm = nn.Sequential(model.final_norm, nn.Dropout(0.5))
    model.final_norm.register_forward_hook(lambda x, *_: modes.append(x.training))
    Path(args.run_dir).mkdir(parents=True)
    module.train_sft(args, model, task)
    assert modes == [True] * args.sft_steps
    agent, prompts = module.Agent(model, 1.0), task.prompts[:4]
    samples = {str(agent.sample_responses(prompts, 5, seeded(0))) for _ in range(5)}
    assert len(samples) == 1
    if "rewards" in script.features:
        reward_model = module.RewardModel(model)
        modes.clear()
        module.train_reward_model(args, reward_model, finished.preferences)
        assert modes == [False, *[True] * 4, *[False] * 4]


@scripts_with("language")
def test_a_full_disk_is_a_sentence(script, finished, cli, monkeypatch):
    def full(*_):
        script.home.save_policy(Path("/dev/full"), finished.run["agent"], [])

    monkeypatch.setattr(script.home, "train_sft", full)
    code, _, error = cli("--sft-documents 50")
    assert (code, error) == (2, "Error: Could not save /dev/full: is the disk full?\n")


@scripts_with("language")
def test_results_are_saved_before_anything_is_printed_and_print_in_any_encoding(
    script, finished, monkeypatch
):
    results = {**finished.run["results"], "broken": {"objective/gold": math.nan}}
    saved = json.loads((finished.folder / "results.json").read_text())
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    Path("runs/new").mkdir(parents=True)
    args = script.args(run_name="new")
    script.home.report(args, saved["quality"], results, saved["texts"])
    content = Path("runs/new/results.json").read_text()
    assert "NaN" not in content
    broken = {"broken": {"objective/gold": None}}
    assert json.loads(content)["results"] == finished.run["results"] | broken
    Path("runs/new/results.json").unlink()
    out.detach()  # nothing can be printed
    with pytest.raises(ValueError, match="detached"):
        script.home.report(args, saved["quality"], results, saved["texts"])
    assert Path("runs/new/results.json").exists()
