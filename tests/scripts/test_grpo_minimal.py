"""grpo_minimal.py: what it does around its loss, whose variants are in test_vectors.py."""

import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from helpers import curves, louder, record, record_steps, same_weights

import grpo_minimal as minimal

EOS, PAD = 2, 3  # of a language of two letters, 0 and 1
SHORT = {"sft_steps": 3, "num_updates": 3, "num_prompts": 5, "group_size": 4}


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_other_penalties_than_k3(estimator):
    new, ref = (torch.tensor([[-0.5, x, -0.2], [-0.1, -2.0, 0.0]]) for x in (-1.0, -1.5))
    responses = torch.tensor([[0, 1, 2], [0, 2, minimal.PAD]])
    args = minimal.Args(kl_coef=0.3, kl_estimator=estimator)
    model, rest = MagicMock(logprobs=lambda *_: new), (torch.zeros(2, 1), args)
    loss = minimal.grpo_loss(model, None, responses, new, ref, *rest)
    penalty = {"k1": 0.5, "k2": 0.5**2 / 2}[estimator]  # of the only token that differs
    assert loss.item() == pytest.approx(0.3 * penalty / (2 * minimal.R))


def test_the_spread_is_that_of_the_rewards_whatever_the_baseline():
    args = minimal.Args(group_size=4, baseline="others", scale_rewards=True)
    found = minimal.group_advantages(torch.tensor([[0.0, 0, 1, 1]]), args)
    assert found.tolist() == [[pytest.approx(x * 2 / 3 / (3**-0.5 + 1e-4))] for x in (-1, -1, 1, 1)]


@pytest.mark.parametrize("reward", [0.1, -0.3, 1 / 3, 1e3 / 7, 12345.678])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 10, 13])
def test_groups_of_equal_rewards_have_no_advantage_whatever_rounding_leaves(size, reward):
    rewards = torch.full((3, size), reward)
    rewards[1, 0] += 1
    for baseline in ("group", "others"):
        args = minimal.Args(group_size=size, baseline=baseline, scale_rewards=True)
        found = minimal.group_advantages(rewards, args).view(3, size)
        assert (found[[0, 2]] == 0).all() and (found[1] != 0).all()
    assert minimal.are_equal(rewards).flatten().tolist() == [True, False, True]
    assert not minimal.are_equal(torch.full((1, size), math.nan))  # a mistake must not be hidden


# --- What writes responses, and the task ---


@pytest.fixture
def language(monkeypatch):
    """A model of a language of 15 responses, and all of these."""
    for name, value in {"EOS": EOS, "PAD": PAD, "P": 2, "R": 3}.items():
        monkeypatch.setattr(minimal, name, value)
    torch.manual_seed(0)
    model = louder(minimal.GPT(width=8).double(), 0.3)
    texts = {
        x[: x.index(EOS) + 1] if EOS in x else x for x in itertools.product(range(3), repeat=3)
    }
    return model, torch.tensor([[*x, *[PAD] * (3 - len(x))] for x in sorted(texts)])


def test_a_token_enters_as_its_embedding_plus_that_of_its_position(language):
    model, entered = language[0], []
    model.layers.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    model(torch.tensor([[1, 0, 1]]))
    expected = model.tokens.weight[[1, 0, 1]] + model.positions.weight[:3]
    torch.testing.assert_close(entered, [expected[None]])


def test_log_probabilities_are_those_of_the_tokens_before_and_of_all_responses(language):
    model, responses = language
    prompts = torch.tensor([[0, 1]]).expand(15, -1)
    expected = torch.zeros(15, 3, dtype=torch.float64)
    for i, t in itertools.product(range(15), range(3)):
        if responses[i, t] != PAD:
            before = torch.cat([prompts[i], responses[i, :t]])[None]
            expected[i, t] = model(before)[0, -1, responses[i, t]]
    found = model.logprobs(prompts, responses)
    torch.testing.assert_close(found, expected)
    assert found.sum(dim=1).exp().sum().item() == pytest.approx(1)


def every_prompt():
    digits, signs = torch.arange(10), (torch.tensor([minimal.PLUS]), torch.tensor([minimal.EQUALS]))
    return torch.cartesian_prod(digits, digits, signs[0], digits, digits, signs[1])


def test_all_sums_are_right_and_the_pupil_forgets_half_of_the_carries():
    prompts = every_prompt()
    right = minimal.solve(prompts)
    for (a, b, _, c, d, _), tokens in zip(prompts.tolist(), right.tolist(), strict=True):
        text = [*map(int, reversed(f"{10 * a + b + 10 * c + d:02d}")), minimal.EOS]
        assert tokens == [*text, *[minimal.PAD] * (4 - len(text))]
    torch.manual_seed(0)
    forgets = (minimal.solve(prompts, 0.5) != right).any(dim=1).float()
    ones, tens = prompts[:, 1] + prompts[:, 4], prompts[:, 0] + prompts[:, 3]
    assert forgets[(ones < 10) & (tens < 10)].sum() == 0
    assert 0.45 < forgets[(ones >= 10) & (tens < 9)].mean() < 0.55
    never = minimal.solve(prompts, 1.0)  # 27+58= is then 57.
    assert never[every_prompt().tolist().index([2, 7, 10, 5, 8, 11])].tolist() == [5, 7, 12, 13]


def test_responses_are_drawn_by_their_probabilities_and_end_at_eos(language, monkeypatch):
    model, responses = language
    monkeypatch.setattr(minimal, "solve", lambda x: responses[:1].expand(len(x), -1))
    torch.manual_seed(0)
    both = torch.tensor([[0, 1], [1, 1]])
    again, drawn, rewards = minimal.respond(model, both, 4000)
    assert torch.equal(again, both.repeat_interleave(4000, dim=0)) and rewards.shape == (2, 4000)
    assert torch.equal(rewards.flatten().bool(), (drawn == responses[0]).all(dim=1))
    for prompt, own in zip(both, drawn.view(2, 4000, 3)):
        shares = (own[:, None] == responses).all(dim=2).double().mean(dim=0)
        # Nothing else: no token after EOS, no padding before it.
        assert shares.sum().item() == pytest.approx(1)
        chances = model.logprobs(prompt.expand(15, -1), responses).sum(dim=1).exp()
        torch.testing.assert_close(shares, chances, rtol=0, atol=0.03)


# --- A run ---


@pytest.fixture
def run(monkeypatch):
    """A short run in which every second group has spread: what it returned, called and changed."""
    respond = minimal.respond

    def judged(model, prompts, tries):
        # Those to the prompts that are held out are thousands, and take a while.
        texts = (None, None) if tries == 16 else respond(model, prompts, tries)[:2]
        rewards = torch.zeros(len(prompts), tries)
        rewards[::2, 0] = 1.0
        return *texts, rewards

    def train(**settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(minimal.GPT.__init__, "__defaults__", (8,))  # its width
            patch.setattr(minimal, "respond", judged)
            calls = {x: record(patch, minimal, x) for x in ("respond", "grpo_loss")}
            calls["logprobs"] = record(patch, minimal.GPT, "logprobs")
            steps = record_steps(patch, torch.optim.AdamW), record_steps(patch, torch.optim.Adam)
            result = minimal.train(minimal.Args(**{**SHORT, **settings}))
        return SimpleNamespace(**result, **calls, steps=[*steps[0], *steps[1]])

    return train


def test_a_run_trains_on_other_prompts_than_it_is_judged_by_and_returns_what_happened(run):
    found = run()
    held_out, *drawn, again = [call[1].tolist() for call in found.respond]
    assert [call[2] for call in found.respond] == [16, 4, 4, 4, 16] and held_out == again
    assert [len(x) for x in drawn] == [5] * 3
    trained = {tuple(x) for _, prompts, *_ in found.logprobs for x in prompts.tolist()}
    assert len({*map(tuple, held_out)}) == 1000 and len(trained) > 150
    assert trained.isdisjoint(map(tuple, held_out))
    assert trained <= {*map(tuple, every_prompt().tolist())}

    assert found.results["sft"].shape == found.results["grpo"].shape == (1000, 16)
    assert [x["reward"] for x in found.updates] == [pytest.approx(3 / 20)] * 3
    assert [x["groups_without_spread"] for x in found.updates] == [pytest.approx(2 / 5)] * 3
    kls = [x["kl"] for x in found.updates]
    assert kls[0] == 0 and kls[1] != 0  # at first the model is the SFT model
    assert list(Path("runs").glob("sums__grpo_minimal__1__*/events*"))
    moved = zip(found.model.parameters(), found.reference.parameters(), strict=True)
    assert all(not torch.equal(x, y) for x, y in moved)


def test_each_metric_is_logged_and_the_shares_of_right_responses_are_printed(
    run, monkeypatch, capsys
):
    closed = record(monkeypatch, minimal.SummaryWriter, "close")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    updates = run().updates
    (logs,) = Path("runs").iterdir()
    assert curves(logs) == {
        f"grpo/{name}": [(i, pytest.approx(x[name])) for i, x in enumerate(updates)]
        for name in ("reward", "kl", "groups_without_spread")
    }
    shown = capsys.readouterr()
    shares = "pass@1 0.0312  pass@16 0.5"  # one response in 32, one prompt in 2
    assert shown.out.splitlines() == [f"sft   {shares}", f"grpo  {shares}", f"Logs: {logs}"]
    assert len(closed) == 1 and "reward=0.15" in shown.err  # the progress bar


def test_both_stages_step_along_the_gradient_of_each_minibatch(run, monkeypatch):
    """Its norm is at most 1 in the second; each step is of the size that its schedule says."""
    expected, loss, logprobs = [], minimal.grpo_loss, minimal.GPT.logprobs
    pupils, solve = set(), minimal.solve

    def gradient(loss, model, limit):
        gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, model.parameters())])
        expected.append(gradient * min(1.0, limit / gradient.norm().item()))

    def imitate(model, *texts):
        found = logprobs(model, *texts)
        if len(texts[0]) == 64:
            gradient(-logprobs(model, *texts).mean(), model, math.inf)
        return found

    def optimize(model, *inputs):  # so large a loss that its gradient is clipped
        gradient(100 * loss(model, *inputs), model, 1.0)
        return 100 * loss(model, *inputs)

    def answer(prompts, forgotten=0.0):
        pupils.add((len(prompts), forgotten))
        return solve(prompts, forgotten)

    monkeypatch.setattr(minimal.GPT, "logprobs", imitate)
    monkeypatch.setattr(minimal, "grpo_loss", optimize)
    monkeypatch.setattr(minimal, "solve", answer)
    steps = run(sft_steps=60).steps
    assert pupils == {(64, 0.5), (20, 0.0)}  # who is imitated, and who judges
    for step, gradient_by_hand in zip(steps, expected, strict=True):
        torch.testing.assert_close(step.gradient, gradient_by_hand, rtol=1e-3, atol=1e-6)
    rates = [3e-3 * min(1, t / 50) * (1 - t / 60) for t in range(60)]
    rates += [7e-4] * 4 + [7e-4 * 2 / 3] * 4 + [7e-4 / 3] * 4
    assert [x.lr for x in steps] == pytest.approx(rates)
    # Adam's first step moves each weight by the learning rate, against its gradient.
    assert steps[60].change.abs().max().item() == pytest.approx(7e-4, rel=1e-2)
    assert (steps[60].change * steps[60].gradient).sum() < 0


def test_a_seed_gives_the_same_run_by_one_thread_and_threads_are_as_before(run, monkeypatch):
    threads, solve = set(), minimal.solve

    def watched(*texts, **options):
        threads.add(torch.get_num_threads())
        return solve(*texts, **options)

    monkeypatch.setattr(minimal, "solve", watched)
    torch.set_num_threads(2)
    models = [run(seed=seed).model for seed in (3, 3, 4)]
    assert same_weights(*models[:2]) and not same_weights(*models[1:])
    assert threads == {1} and torch.get_num_threads() == 2


def test_minibatches_split_the_batch_and_keep_each_row_together(run):
    found = run()
    for update, (_, own, _, (*_, rewards)) in enumerate(found.respond[1:4]):
        parts = [call[1:6] for call in found.grpo_loss[4 * update : 4 * update + 4]]
        assert [len(prompts) for prompts, *_ in parts] == [5] * 4
        prompts, responses, old, ref, advantages = map(torch.cat, zip(*parts))
        assert sorted(prompts.tolist()) == sorted(4 * own.tolist())
        expected = found.reference.logprobs(prompts, responses)
        torch.testing.assert_close(ref, expected)
        if update == 0:
            torch.testing.assert_close(old, expected)
        assert found.updates[update]["kl"] == pytest.approx((old - ref).sum().item() / 20)
        wanted = minimal.group_advantages(rewards, minimal.Args(group_size=4))
        assert sorted(advantages.flatten().tolist()) == sorted(wanted.flatten().tolist())


def test_dynamic_sampling_leaves_out_the_groups_without_spread(run):
    found = run(dynamic_sampling=True)
    for update in range(3):
        parts = [call[5] for call in found.grpo_loss[4 * update : 4 * update + 4]]
        assert [len(advantages) for advantages in parts] == [3] * 4  # three groups of four
        assert sorted(torch.cat(parts).flatten().tolist()) == [-0.25] * 9 + [0.75] * 3


def test_nothing_is_learned_and_nothing_breaks_where_no_group_has_spread(monkeypatch):
    respond = minimal.respond
    monkeypatch.setattr(minimal, "solve", lambda x, forgotten=0.0: torch.full((len(x), 4), 0))
    monkeypatch.setattr(minimal, "respond", lambda model, x, tries: respond(model, x[:9], tries))
    found = minimal.train(minimal.Args(**SHORT, dynamic_sampling=True, loss_norm="token"))
    assert same_weights(found["model"], found["reference"])


# --- The command line ---


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--group-size 1", "--group-size must be at least 2"),
        ("--num-prompts 0", "--num-prompts must be at least 1"),
        ("--num-minibatches 0", "--num-minibatches must be at least 1"),
        ("--num-updates 0", "--num-updates must be at least 1"),
        ("--learning-rate nan", "--learning_rate must be at least 0, and finite"),
        ("--clip-coef -0.1", "--clip_coef must be at least 0"),
        ("--clip-high -0.1", "--clip_high must be at least 0"),
        ("--kl-coef -1", "--kl_coef must be at least 0"),
        ("--kl-coef inf", "--kl_coef must be at least 0"),
    ],
)
def test_what_would_teach_nothing_or_the_wrong_thing_is_a_sentence(flags, sentence, run_file):
    with pytest.raises(AssertionError, match=f"^{sentence}"):
        run_file(minimal.__file__, flags)
    assert not [*Path().iterdir()]


@pytest.mark.parametrize("learning_rate", [1e10, 1e30])
def test_a_step_size_that_diverges_is_a_sentence(learning_rate, run):
    with pytest.raises(AssertionError, match=r"^the model has diverged: lower --learning-rate"):
        run(learning_rate=learning_rate)
