# ruff: noqa: E501 - a table of code at the end
"""grpo_rlhf_toy.py: its stages and judgement are PPO's, its loss the paper's; details G1-G8."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

import dpo_rlhf_toy as dpo
import grpo_rlhf_toy as grpo
import ppo_rlhf_toy as rlhf
from grpo_rlhf_toy import PAD, Args, Rollout

torch.set_num_threads(1)
for module in (grpo, rlhf, dpo):
    module.NUM_SAMPLES, module.NUM_EVALUATED = 64, 32
SMALL = {"sft_documents": 100, "sft_steps": 10, "num_pairs": 70, "batch_size": 16}


def small_args(**changes) -> Args:
    return Args(**{**SMALL, "run_name": "run", "num_updates": 2, **changes})


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run_script(module, **settings) -> SimpleNamespace:
    """A run of an RLHF script, and what it makes before its last stage."""
    calls = {}

    def keep(name):
        function = getattr(module, name)

        def keeping(*args):
            result = function(*args)
            calls.setdefault(name, (*args, result))
            return result

        return patch.object(module, name, keeping)

    with keep("make_preferences"), keep("evaluate"):
        run = module.train(module.Args(**SMALL, run_name=module.__name__, **settings))
    _, reference, _, preferences = calls["make_preferences"]
    preferences = module.Preferences(**preferences)
    return SimpleNamespace(
        run=run, reference=reference, preferences=preferences, judges=calls["evaluate"][2]
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with pytest.MonkeyPatch.context() as context:
        context.chdir(tmp_path_factory.mktemp("finished"))
        return run_script(grpo, num_updates=1)


@pytest.fixture
def judges(finished) -> grpo.Judges:
    return finished.judges


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def run_grpo(judges, **changes):
    """Updates of a GRPO run, and the arguments of each call of its loss."""
    agent = copy.deepcopy(judges.reference)
    with patch.object(grpo, "grpo_loss", wraps=grpo.grpo_loss) as loss:
        updates = grpo.train_grpo(small_args(**changes), agent, judges)
    return updates, [call.args for call in loss.call_args_list]


def test_stages_and_evaluation_are_those_of_ppo_to_the_bit(finished):
    ppo = run_script(rlhf, num_updates=1)
    for model in ("reference", "reward_model"):
        pair = (getattr(x.judges, model).parameters() for x in (finished, ppo))
        assert all(torch.equal(a, b) for a, b in zip(*pair))  # PPO's last ones are of the value
    pairs = zip(finished.preferences, ppo.preferences, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert finished.run["quality"] == ppo.run["quality"]
    assert finished.run["results"]["sft"] == ppo.run["results"]["sft"]


def test_agent_is_that_of_ppo_but_for_the_values(judges):
    agent, ppo_agent = (module.Agent(judges.reference.policy, 0.7) for module in (grpo, rlhf))
    queries = judges.task.sample_queries(8, seeded(0))
    sampled = agent.sample_responses(queries, 18, seeded(1))
    assert torch.equal(sampled, ppo_agent.sample_responses(queries, 18, seeded(1)))
    logprobs, _ = ppo_agent.get_logprobs_and_values(queries, sampled)
    assert torch.equal(agent.get_logprobs(queries, sampled), logprobs)


def test_g2_g3_advantages_by_hand_and_rloo_compares_with_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0])
    expected = torch.tensor([-2.0, -1.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    assert torch.equal(grpo.group_advantages(rewards, 4, False), expected)
    spread = ((4 + 1 + 0 + 9) / 3) ** 0.5 + 1e-4
    torch.testing.assert_close(grpo.group_advantages(rewards, 4, True), expected / spread)
    for size in (2, 4):
        groups = rewards.view(-1, size)
        others = (groups.sum(1, keepdim=True) - groups) / (size - 1)
        rloo = grpo.group_advantages(rewards, size, False) * size / (size - 1)
        torch.testing.assert_close(rloo, (groups - others).flatten())


@pytest.mark.parametrize("kl_in_loss", [False, True])
@pytest.mark.parametrize("length_divisor", ["longest", "own", "mean"])
def test_g4_g5_g7_loss_equals_an_independent_statement(judges, kl_in_loss, length_divisor):
    """The objective of DeepSeekMath, word by word."""
    agent, generator = judges.reference, seeded(0)
    queries = judges.task.sample_queries(8, generator)
    lengths = torch.randint(1, 11, (8,), generator=generator)
    advantages = torch.randn(8, generator=generator)
    mask = torch.arange(10) < lengths[:, None]
    responses = torch.randint(2, 79, (8, 10), generator=generator).where(mask, PAD)
    new = grpo.log_probability(agent.get_logprobs(queries, responses), responses).detach()
    old, ref = (new + x * torch.randn(8, 10, generator=generator) for x in (0.3, 0.5))
    total = 0.0
    for i, t in mask.nonzero().tolist():
        ratio, to_ref = (np.exp((x - y)[i, t].item()) for x, y in ((new, old), (ref, new)))
        advantage = advantages[i].item()
        gain = min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        k3 = to_ref - np.log(to_ref) - 1 if kl_in_loss else 0.0
        divisors = {"longest": 10, "own": lengths[i].item(), "mean": lengths.sum().item() / 8}
        total -= (gain - 0.7 * k3) / divisors[length_divisor] / 8
    # What stands outside the mask must not matter.
    padded = responses.where(mask, 7), old.where(mask, 1e6), ref.where(mask, -1e6)
    mb = Rollout(queries, *padded, torch.zeros(8), mask)
    args = Args(kl_in_loss=kl_in_loss, length_divisor=length_divisor)
    loss, metrics = grpo.grpo_loss(agent, mb, advantages, 0.7, args)
    assert loss.item() == pytest.approx(total, rel=1e-4)
    logratio = (new - old)[mask]
    assert metrics["losses/old_approx_kl"].item() == pytest.approx(-logratio.mean().item())
    assert metrics["losses/clipfrac"] == ((logratio.exp() - 1).abs() > 0.2).float().mean() > 0


# Why k3 in the loss is weak: exact gradients, with three words and two places. The policy writes
# word 0 half of the time, so these are all responses, each as often as it is due.
POLICY = torch.tensor([0.5, 0.25, 0.25]).double().log().expand(4, 3)
ALL = torch.tensor([[a, b] for a in (0, 0, 1, 2) for b in (0, 0, 1, 2)])


def gradients(ref: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the KL, of the forward KL of each word, of k1 in the reward, of k3 in the loss.

    They are those of logits (4, 3): row 0 for the first place, row 1 + w for the second after w.
    """
    logits = POLICY.clone().requires_grad_(True)
    new, old = logits.log_softmax(-1), ref.log_softmax(-1)
    reach = torch.cat([torch.ones(1).double(), new[0].exp()])  # how often each row is used
    losses = [reach @ (new.exp() * (new - old)).sum(1)]
    losses.append(reach.detach() @ (old.exp() * (old - new)).sum(1))

    place = lambda x: torch.stack([x[0].expand(16, 3), x[1 + ALL[:, 0]]], dim=1)  # noqa: E731
    logprobs, ref_logprobs = (grpo.log_probability(place(x), ALL) for x in (new.detach(), old))
    rewards = (ref_logprobs - logprobs).sum(1)
    mb = Rollout(ALL, ALL, logprobs, ref_logprobs, rewards, torch.ones(16, 2).bool())
    policy = SimpleNamespace(get_logprobs=lambda queries, responses: place(new))
    advantages = grpo.group_advantages(rewards, 16, False)
    for in_loss in (False, True):
        args, earned = Args(kl_in_loss=in_loss), advantages * (not in_loss)
        loss, _ = grpo.grpo_loss(policy, mb, earned, 1.0, args)
        losses.append(2 * loss)  # which is that per word of two
    return [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in losses]


def test_g7_k1_in_the_reward_has_the_gradient_of_the_kl_and_k3_in_the_loss_a_weaker_one():
    kl, forward_kl, k1, k3 = gradients(torch.randn(4, 3, generator=seeded(0)).double())
    torch.testing.assert_close(k1, kl)
    torch.testing.assert_close(k3, forward_kl)
    assert (kl - forward_kl).abs().max() > 0.1
    # It pulls no overused word back by more than 1.
    for rarity in (2.0, 5.0, 10.0, 20.0):  # of word 0 in the SFT model
        *_, k1, k3 = gradients(torch.tensor([-rarity, 0.0, 0.0]).double().expand(4, 3))
        # The policy writes it half of the time: 0.5 is 1 per use.
        assert 0.3 < k3[0, 0] < 0.5 and k1[0, 0] > 0.25 * rarity
    # It does not see where a word leads: word 0 is as common as it should be, what follows is not.
    ref = POLICY.clone()
    ref[1] = torch.tensor([0.0, 0.0, 9.0])
    *_, k1, k3 = gradients(ref)
    assert k1[0, 0] > 0.5 and k3[0].abs().max() < 1e-9


@pytest.mark.parametrize("kl_in_loss", [False, True])
def test_g6_r14_reward_is_the_score_minus_the_kl_of_the_whole_response(judges, kl_in_loss):
    torch.manual_seed(0)
    agent, queries = copy.deepcopy(judges.reference), judges.task.sample_queries(32, seeded(0))
    for weight in agent.parameters():
        weight.data += 0.03 * torch.randn_like(weight)
    args = small_args(kl_in_loss=kl_in_loss, missing_stop_score=-5.0)
    rollout, metrics = grpo.collect(args, agent, judges, queries, 3.0, seeded(1))
    gold = dataclasses.replace(args, reward="gold")
    by_gold, _ = grpo.collect(gold, agent, judges, queries, 3.0, seeded(1))
    inputs, mask = (queries, rollout.responses), rollout.responses != PAD
    with torch.no_grad():
        words, ref_words = (x.get_logprobs(*inputs) for x in (agent, judges.reference))
        proxy = judges.reward_model.score(*inputs)
    kl = grpo.log_probability(words - ref_words, rollout.responses).where(mask, 0.0).sum(1)
    stopped = (rollout.responses == grpo.TOY_WORDS.index("."))[:, 4:].any(1)
    scores = proxy.where(stopped, -5.0)
    assert 0 < stopped.sum() < 32 and torch.equal(rollout.mask, mask)
    torch.testing.assert_close(rollout.rewards, scores if kl_in_loss else scores - 3.0 * kl)
    difference = judges.task.gold(*inputs).where(stopped, -5.0) - scores
    torch.testing.assert_close(by_gold.rewards - rollout.rewards, difference, atol=1e-5, rtol=1e-5)
    exact = (words.exp() * (words - ref_words)).sum(2)[mask].sum() / 32
    expected = {"kl": kl.mean(), "kl_exact": exact, "proxy": proxy.mean(), "score": scores.mean()}
    for name, value in expected.items():
        assert metrics[f"objective/{name}"] == pytest.approx(value.item(), rel=1e-4), name


def test_g1_g8_6_each_pass_is_a_permutation_of_whole_groups_with_their_advantages(judges):
    spies = [patch.object(grpo, x, wraps=getattr(grpo, x)) for x in ("collect", "group_advantages")]
    with spies[0] as collect, spies[1] as advantages:
        _, losses = run_grpo(judges, num_updates=1, group_size=4, update_epochs=2, std=True)
    queries, rewards = collect.call_args.args[3].view(4, 4, -1), advantages.call_args.args[0]
    assert (queries == queries[:, :1]).all() and len(queries[:, 0].unique(dim=0)) > 1
    pairs = torch.cat([torch.stack([mb.rewards, x], dim=1) for _, mb, x, *_ in losses]).tolist()
    expected = torch.stack([rewards, grpo.group_advantages(rewards, 4, True)], dim=1).tolist()
    assert len(losses) == 2 * 4 and pairs[:16] not in (pairs[16:], expected)
    assert sorted(pairs[:16]) == sorted(pairs[16:]) == sorted(expected)


def test_11_ratio_is_one_as_long_as_no_step_is_taken_and_then_the_kl_grows(judges):
    before = copy.deepcopy(judges.reference.state_dict())
    for row in run_grpo(judges, learning_rate=0.0)[0]:
        assert row["losses/clipfrac"] == 0 and max(row["losses/approx_kl"], row["losses/k3"]) < 1e-5
    (first, last), _ = run_grpo(judges)
    assert abs(first["objective/kl"]) < 1e-3 and last["objective/kl_exact"] > 0.01
    after = judges.reference.state_dict()
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    # Adam makes up for the size of a gradient, but not if it is clipped far below its epsilon.
    (_, last), _ = run_grpo(judges, max_grad_norm=1e-12)
    assert last["objective/kl_exact"] < 1e-6 and last["losses/grad_norm"] > 0.01


@pytest.mark.parametrize(("anneal_lr", "falls_to"), [(True, (1, 2 / 3, 1 / 3)), (False, (1, 1, 1))])
def test_r5_learning_rate_falls_and_groups_without_spread_are_counted(
    judges, monkeypatch, anneal_lr, falls_to
):
    rates = [0.01 * x for x in falls_to]
    with patch.object(torch.optim.Adam, "step", autospec=True) as step:
        step.side_effect = lambda self: seen.append(self.param_groups[0]["lr"])
        seen = []
        updates, _ = run_grpo(judges, num_updates=3, learning_rate=0.01, anneal_lr=anneal_lr)
    assert [row["charts/learning_rate"] for row in updates] == pytest.approx(rates)
    assert seen == pytest.approx([rate for rate in rates for _ in range(4)])
    assert updates[0]["groups/spread"] > 0.1 and updates[0]["groups/without_spread"] == 0
    monkeypatch.setattr(grpo.RewardModel, "score", lambda self, q, r: torch.ones(len(q)))
    settings = {"missing_stop_score": 1.0, "kl_mode": "none", "num_updates": 1}
    assert run_grpo(judges, **settings)[0][0]["groups/without_spread"] == 1


def test_grpo_warns_too(judges, capsys):
    run_grpo(judges, learning_rate=0.3, run_name="mine", num_updates=4)
    assert "Warning: mine: objective/kl is" in capsys.readouterr().out


def test_r20_beta_follows_the_kl_and_weighs_the_next_rollout(judges):
    updates, losses = run_grpo(judges, num_updates=3, kl_coef=3.0, target_kl=0.01)
    betas = [row["objective/kl_coef"] for row in updates]
    for i in (0, 1):
        expected = grpo.proportional_kl_coef(betas[i], updates[i]["objective/kl"], 0.01, 16, 500)
        assert betas[i + 1] == pytest.approx(expected)
    assert betas[0] == 3.0 > betas[1] < betas[2]
    assert [call[3] for call in losses] == [beta for beta in betas for _ in range(4)]
    for mode, beta in (("fixed", 0.5), ("none", 0.0)):
        updates, _ = run_grpo(judges, kl_mode=mode)
        assert [row["objective/kl_coef"] for row in updates] == [beta, beta]


def check_run(module, args, models: list[str]) -> dict:
    """A run leaves its results, texts, metrics and weights in its folder, which it takes once."""
    run, folder = module.train(args), args.run_dir
    saved = json.loads((folder / "results.json").read_text())
    assert saved["results"] == run["results"] and saved["args"] == dataclasses.asdict(args)
    assert list(saved["results"]) == list(saved["texts"]) == ["sft", *models]
    for name in models:
        checkpoint = torch.load(folder / name / "checkpoint.pt", weights_only=True)
        assert checkpoint["updates"] == run["updates"][name]
        assert {"objective/gold", "objective/kl", "text/unique"} <= saved["results"][name].keys()
    weights = torch.load(folder / models[0] / "checkpoint.pt", weights_only=True)["agent"]
    assert all(torch.equal(weights[x], y) for x, y in run["agent"].state_dict().items())
    with pytest.raises(ValueError, match="holds a run: take another --run-name"):
        module.train(args)
    again = module.train(dataclasses.replace(args, run_name="again"))
    assert again["results"] == run["results"]  # same seed, same run
    return run


def test_whole_run_with_each_form():
    models = ["grpo", "grpo-paper", "grpo-no-kl"]
    with patch.object(grpo, "train_grpo", wraps=grpo.train_grpo) as train:
        run = check_run(grpo, small_args(compare=True), models)
    forms = [call.args[0] for call in train.call_args_list[:3]]
    settings = [(x.std, x.length_divisor, x.kl_in_loss) for x in forms]
    default = (False, "longest", False)
    assert settings == [default, (True, "own", True), default]
    assert [x.kl_mode for x in forms] == ["adaptive", "adaptive", "none"]
    assert len({x["objective/kl"] for x in run["results"].values()}) == 4
    assert run["results"]["sft"]["objective/kl"] == 0.0
    rows = [run["results"][name] for name in models]
    assert [(x["method"], x["kl_mode"]) for x in rows] == [
        *(("GRPO", "adaptive"), ("GRPO", "adaptive"), ("GRPO", "none"))
    ]
    betas = [updates[-1]["objective/kl_coef"] for updates in run["updates"].values()]
    assert [x["objective/kl_coef"] for x in rows] == betas and betas[0] < rows[0]["kl_coef"]


def run_main(module, line: str, monkeypatch, capsys) -> tuple[int, str]:
    """Exit code of a script's command line, and what it says of it, without frames."""
    monkeypatch.setattr("sys.argv", [module.__file__, *line.split()])
    with pytest.raises(SystemExit) as leaving:
        module.main()
    text = re.sub("[│╭╮╰╯─]", "", capsys.readouterr().err)
    return leaving.value.code, " ".join(text.split())


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        (grpo, "--group-size 3", "--num-minibatches and --group-size must both divide"),
        (grpo, "--num-minibatches 3", "must both divide --batch-size."),
        (grpo, "--kl-horizon 20", "takes --kl-coef > 0 and --kl-horizon > --batch-size / 5."),
        (grpo, "--kl-coef 0", "takes --kl-coef > 0 and --kl-horizon > --batch-size / 5."),
        (grpo, "--group-size 1", "greater than or equal to 2"),
        (grpo, "--run-name taken", "runs/taken holds a run: take another --run-name."),
        (dpo, "--beta 0", "greater than 0"),
        (dpo, "--num-pairs 5", "greater than or equal to 14"),
        (dpo, "--run-name taken", "runs/taken holds a run: take another --run-name."),
    ],
)
def test_bad_input_is_a_sentence_and_code_2(module, line, message, monkeypatch, capsys):
    Path("runs/taken").mkdir(parents=True)
    Path("runs/taken/results.json").touch()
    code, error = run_main(module, line, monkeypatch, capsys)
    assert code == 2 and message in error and "Traceback" not in error


@pytest.mark.parametrize("module", [rlhf, grpo, dpo])
def test_the_same_settings_make_two_runs_in_two_folders_even_at_once(module, monkeypatch):
    clock = iter([10**18, 10**18, 10**18 + 10**6])  # the second run meets the folder of the first
    monkeypatch.setattr(module.time, "time_ns", lambda: next(clock))
    settings = SMALL if module is dpo else SMALL | {"num_updates": 1}
    args = module.Args(**settings)
    before = dataclasses.asdict(args)
    first, second = module.train(args), module.train(args)
    assert dataclasses.asdict(args) == before and first["results"] == second["results"]
    folders = [x["args"].run_dir for x in (first, second)]
    assert len(set(folders)) == 2 and all((x / "results.json").exists() for x in folders)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 2


@pytest.mark.parametrize("module", [rlhf, grpo, dpo])
def test_ctrl_c_before_anything_is_saved_is_a_sentence(module, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train_sft", interrupted)
    monkeypatch.setattr("sys.argv", [module.__file__, "--sft-documents", "50"])
    with pytest.raises(SystemExit) as leaving:
        module.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert leaving.value.code == 130 and "--resume" not in last and last.endswith(".")


# What is broken, by what, and the tests that must notice. Copied functions are broken at home.
# fmt: off
MUTATIONS = [
    ("for _ in range(length):", "for _ in range(length - 1):", "agent_is"),
    ("hidden, _ = self.policy(torch.cat([queries, responses], dim=1))", "hidden, _ = self.policy(torch.cat([0 * queries + 1, responses], dim=1))", "agent_is"),
    ("logits(hidden[:, before]) / self.temperature", "logits(hidden[:, before])", "agent_is"),
    ("agents[name] = agent = copy.deepcopy(reference)", "agents[name] = agent = reference", "whole_run"),
    ("queries = queries.repeat_interleave(args.group_size, dim=0)", "queries = queries.repeat(args.group_size, 1)", "g1_"),
    ("groups - groups.mean(dim=1, keepdim=True)", "groups - groups.mean()", "g2_"),
    ("groups.std(dim=1, keepdim=True)", "groups.std(dim=1, keepdim=True, correction=0)", "g3_"),
    ("advantages = advantages / (groups", "advantages = advantages * (groups", "g3_"),
    ("advantages[:, None].expand_as(mask)[mask]", "advantages.repeat(mask.shape[1]).view(mask.shape)[mask]", "g4_"),
    ('"longest": longest,', '"longest": lengths,', "g4_g5"),
    ('"own": lengths,', '"own": longest,', "g4_g5"),
    ('"mean": mean}', '"mean": lengths}', "g4_g5"),
    ('(frac if args.anneal_lr else 1.0)', '1.0', "r5_"),
    ("weights * word_advantages", "word_advantages", "g4_g5"),
    ("scores if args.kl_in_loss else scores - kl_coef * kl", "scores - kl_coef * kl", "g6_r14"),
    ("scores if args.kl_in_loss else scores - kl_coef * kl", "scores", "g6_r14"),
    ("(logprobs - ref_logprobs).where", "(ref_logprobs - logprobs).where", "g6_r14"),
    ("earned.where(stopped, args.missing_stop_score)", "earned", "g6_r14"),
    ("loss = pg_loss + kl_coef * (weights * k3).mean()", "loss = pg_loss + kl_coef * k3.mean()", "g4_g5_g7"),
    ("(mb.ref_logprobs - logprobs)[mask]", "(logprobs - mb.ref_logprobs)[mask]", "g7_"),
    ("for _ in range(args.update_epochs):", "for _ in range(1):", "g8_"),
    ("order.split(args.batch_size // args.num_minibatches)", "order.split(args.batch_size)", "g8_6_"),
    ("advantages[mb], kl_coef, args)", "advantages[: len(mb)], kl_coef, args)", "g8_6_"),
    ("clip_grad_norm_(agent.parameters(), args.max_grad_norm)", "clip_grad_norm_(agent.parameters(), math.inf)", "11_"),
    ("-logratio.mean(),", "logratio.mean(),", "g4_g5"),
    ('metrics["objective/kl"], args.target_kl', '0.0, args.target_kl', "r20_"),
    ('if args.kl_mode == "adaptive":\n', 'if args.kl_mode != "none":\n', "r20_"),
    ("torch.manual_seed(args.seed)\n    sft", "sft", "stages_and"),
]
# fmt: on
