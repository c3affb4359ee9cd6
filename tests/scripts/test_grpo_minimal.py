"""grpo_minimal.py: its gradients are those of what it says it maximizes, each variant by hand."""

import itertools
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import tyro

import grpo_minimal as minimal
import grpo_rlhf_toy as full
from benchmark.suites.grpo import VARIANTS
from benchmark.tags import tags_of

EOS, PAD = 2, 3  # of a language of two letters, 0 and 1
SHORT = {"sft_steps": 3, "num_updates": 3, "num_prompts": 5, "group_size": 4}


# --- The loss, by hand ---

NEW = torch.tensor([[-0.5, -1.0, 0.0, 0.0], [-0.1, -2.0, -0.7, -0.3]])
OLD = torch.tensor([[-1.0, -0.9, 0.0, 0.0], [-0.2, -1.2, -0.6, -0.8]])
REF = torch.tensor([[-0.4, -1.5, 0.0, 0.0], [-0.9, -1.1, -0.2, -0.5]])
LENGTHS = [2, 4]


def by_hand(advantages, norm="constant", ratio="token", high=0.2, kl="k3", kl_coef=0.0):
    """The loss of the two responses above, token by token."""
    total = torch.tensor(0.0)
    for i, length in enumerate(LENGTHS):
        ratios = [(NEW[i, t] - OLD[i, t]).exp() for t in range(length)]
        if ratio == "sequence":  # the geometric mean
            ratios = [torch.stack(ratios).prod() ** (1 / length)] * length
        divisor = {"constant": 2 * 4, "sequence": 2 * length, "token": sum(LENGTHS)}[norm]
        for t in range(length):
            r, gap = ratios[t], REF[i, t] - NEW[i, t]
            bound = min(r, 1 + high) if advantages[i] > 0 else max(r, torch.tensor(0.8))
            k = {"k1": -gap, "k2": gap * gap / 2, "k3": gap.exp() - gap - 1}[kl]
            total -= (bound * advantages[i] - kl_coef * k) / divisor
    return total


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"loss_norm": "sequence", "kl_coef": 0.04}, {"norm": "sequence", "kl_coef": 0.04}),
        ({"loss_norm": "token", "clip_high": 0.28}, {"norm": "token", "high": 0.28}),
        ({"loss_norm": "sequence", "ratio": "sequence"}, {"norm": "sequence", "ratio": "sequence"}),
        ({"kl_coef": 0.3, "kl_estimator": "k1"}, {"kl_coef": 0.3, "kl": "k1"}),
        ({"kl_coef": 0.3, "kl_estimator": "k2"}, {"kl_coef": 0.3, "kl": "k2"}),
        ({"kl_coef": 0.3}, {"kl_coef": 0.3, "kl": "k3"}),
    ],
)
@pytest.mark.parametrize("advantages", [(0.5, -1.5), (-0.5, 1.5), (2.0, 1.0)])
def test_the_loss_of_each_variant_by_hand(settings, expected, advantages):
    """Some ratios lie above the clip range, some below, some within it."""
    responses = torch.tensor([[1, 12, 13, 13], [5, 6, 1, 12]])
    model = MagicMock(logprobs=lambda *_: NEW)
    batch = None, responses, OLD, REF, torch.tensor(advantages)[:, None]
    loss = minimal.grpo_loss(model, *batch, minimal.Args(**settings))
    torch.testing.assert_close(loss, by_hand(advantages, **expected))


def test_group_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]])
    centered = torch.tensor([0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0, -0.5, -0.5, 0.5, 0.5])
    others = torch.tensor([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0, -2 / 3, -2 / 3, 2 / 3, 2 / 3])
    spread = torch.tensor([0.5, 0, 3**-0.5]).repeat_interleave(4)  # of samples: divided by G - 1
    for settings, expected in (
        ({}, centered),
        ({"baseline": "others"}, others),
        ({"scale_rewards": True}, centered / (spread + 1e-4)),
    ):
        args = minimal.Args(group_size=4, **settings)
        found = minimal.group_advantages(rewards.clone(), args)
        torch.testing.assert_close(found, expected[:, None])


# --- The gradient, by enumeration ---


@pytest.fixture
def language(monkeypatch):
    """A model and an SFT model of a language of 15 responses, all of these, and a prompt."""
    for name, value in {"EOS": EOS, "PAD": PAD, "Q": 2, "R": 3}.items():
        monkeypatch.setattr(minimal, name, value)
    torch.manual_seed(0)
    models = [minimal.GPT(width=8).double() for _ in range(2)]
    for x in itertools.chain(*(model.parameters() for model in models)):
        x.data += 0.3 * torch.randn(x.shape, dtype=x.dtype)
    texts = {
        x[: x.index(EOS) + 1] if EOS in x else x for x in itertools.product(range(3), repeat=3)
    }
    responses = torch.tensor([[*x, *[PAD] * (3 - len(x))] for x in sorted(texts)])
    return *models, torch.tensor([[0, 1]]).expand(len(responses), -1), responses


def gradient(value, model):
    """The gradient as one vector."""
    return torch.cat(
        [x.flatten() for x in torch.autograd.grad(value, [*model.parameters()], retain_graph=True)]
    )


def one_by_one(model, prompts, responses):
    """Log-probabilities of each token, from what stands before it alone."""
    rows = torch.zeros(responses.shape, dtype=torch.float64)
    for i, t in itertools.product(*map(range, responses.shape)):
        if responses[i, t] != PAD:
            before = torch.cat([prompts[i], responses[i, :t]])[None]
            rows[i, t] = model(before)[0, -1, responses[i, t]]
    return rows


def test_log_probabilities_are_those_of_the_tokens_before_and_of_all_responses(language):
    model, _, prompts, responses = language
    found = model.logprobs(prompts, responses)
    torch.testing.assert_close(found, one_by_one(model, prompts, responses))
    assert found.sum(dim=1).exp().sum().item() == pytest.approx(1)
    assert len(responses) == 15 and (found[responses == PAD] == 0).all()


@pytest.mark.parametrize(("baseline", "factor"), [("group", 1 / 2), ("others", 1)])
def test_the_expected_gradient_is_that_of_the_expected_reward(language, baseline, factor):
    """Over all pairs of responses as groups; with itself in the mean it is (G - 1) / G of that."""
    model, ref, prompts, responses = language
    rewards = torch.randn(len(responses), dtype=torch.float64)
    probabilities = one_by_one(model, prompts, responses).sum(dim=1).exp()
    expected = gradient(probabilities @ rewards, model)

    pairs = torch.cartesian_prod(*[torch.arange(len(responses))] * 2)  # groups of two
    args = minimal.Args(group_size=2, baseline=baseline)
    advantages = minimal.group_advantages(rewards[pairs], args)
    chances = probabilities.detach()[pairs].prod(dim=1).repeat_interleave(2)[:, None]
    rows = pairs.flatten()
    old, other = (x.logprobs(prompts, responses).detach()[rows] for x in (model, ref))
    batch = prompts[rows], responses[rows], old, other, advantages * chances
    # The mean over B responses and R tokens becomes the sum over a group, then its mean.
    loss = minimal.grpo_loss(model, *batch, args) * len(rows) * minimal.R / 2
    torch.testing.assert_close(gradient(-loss, model), factor * expected)


def test_estimators_of_the_kl_and_their_expected_gradients(language):
    """k1 and k3 have the right mean. In the loss k1 does nothing, k2 pulls as KL(model, SFT model)
    of the next token does, and k3 as KL(SFT model, model)."""
    model, ref, prompts, responses = language
    logprobs, others = (one_by_one(x, prompts, responses) for x in (model, ref))
    old, chances = logprobs.detach(), logprobs.detach().sum(dim=1).exp()
    kl = chances @ (logprobs - others).sum(dim=1).detach()

    forward, backward = 0, 0  # of the next token, over all places in all responses
    for i, t in itertools.product(*map(range, responses.shape)):
        if responses[i, t] != PAD:
            before = torch.cat([prompts[i], responses[i, :t]])[None]
            new, sft = model(before)[0, -1], ref(before)[0, -1].detach()
            forward = forward + chances[i] * (new.exp() * (new - sft)).sum()
            backward = backward + chances[i] * (sft.exp() * (sft - new)).sum()

    for name, mean, pull in (("k1", kl, None), ("k2", None, forward), ("k3", kl, backward)):
        args = minimal.Args(kl_coef=1.0, kl_estimator=name)
        batch = zip(prompts, responses, old, others.detach(), torch.zeros(len(responses), 1))
        rows = [[x[None] for x in row] for row in batch]
        losses = torch.stack([minimal.grpo_loss(model, *row, args) for row in rows]) * minimal.R
        if mean is not None:
            torch.testing.assert_close(chances @ losses, mean)
        expected = torch.zeros(()) if pull is None else gradient(pull, model)
        found = gradient(chances @ losses, model)
        torch.testing.assert_close(found, expected.expand_as(found).double())


# --- The task, and what writes responses ---


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
    model, _, _, responses = language
    monkeypatch.setattr(minimal, "solve", lambda x: responses[:1].expand(len(x), -1))
    torch.manual_seed(0)
    both = torch.tensor([[0, 1], [1, 1]])
    again, drawn, rewards = minimal.respond(model, both, 4000)
    assert torch.equal(again, both.repeat_interleave(4000, dim=0)) and rewards.shape == (2, 4000)
    assert torch.equal(rewards.flatten().bool(), (drawn == responses[0]).all(dim=1))
    for prompt, own in zip(both, drawn.view(2, 4000, 3)):
        shares = (own[:, None] == responses).all(dim=2).double().mean(dim=0)
        assert shares.sum().item() == pytest.approx(
            1
        )  # nothing else: no token after EOS, no padding before it
        chances = model.logprobs(prompt.expand(15, -1), responses).sum(dim=1).exp()
        torch.testing.assert_close(shares, chances, rtol=0, atol=0.03)


# --- A run ---


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Train briefly; what was seen of it is in the result too."""
    monkeypatch.chdir(tmp_path)

    def train(**settings):
        seen = {"trained": [], "tries": [], "batches": [], "norms": [], "rates": [], "rewards": []}
        logprobs, respond, loss = minimal.GPT.logprobs, minimal.respond, minimal.grpo_loss
        clip, step = torch.nn.utils.clip_grad_norm_, torch.optim.Adam.step

        def spy_logprobs(self, prompts, responses):
            seen["trained"] += prompts.tolist()
            return logprobs(self, prompts, responses)

        def spy_respond(model, prompts, tries):
            seen["tries"].append((prompts.tolist(), tries))
            if tries == 16:  # thousands of responses take a while
                return None, None, torch.zeros(len(prompts), tries)
            prompts, responses, rewards = respond(model, prompts, tries)
            rewards = rewards.clone()
            rewards[::2, 0] = 1.0  # every second group has spread
            rewards[::2, 1:] = 0.0
            rewards[1::2] = 0.0
            seen["rewards"].append(rewards)
            return prompts, responses, rewards

        def spy_loss(model, prompts, *rest):
            seen["batches"].append((prompts.tolist(), rest))
            return loss(model, prompts, *rest)

        def spy_clip(parameters, max_norm):
            parameters = [*parameters]
            clip(parameters, max_norm)
            seen["norms"].append(torch.cat([x.grad.flatten() for x in parameters]).norm().item())

        def spy_step(self, *_):
            seen["rates"].append(self.param_groups[0]["lr"])
            return step(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(minimal.GPT, "logprobs", spy_logprobs)
            patch.setattr(minimal, "respond", spy_respond)
            patch.setattr(minimal, "grpo_loss", spy_loss)
            patch.setattr(torch.nn.utils, "clip_grad_norm_", spy_clip)
            patch.setattr(torch.optim.Adam, "step", spy_step)
            return minimal.train(minimal.Args(**{**SHORT, **settings})) | seen

    return train


def test_a_run_trains_on_other_prompts_than_it_is_judged_by(run):
    found = run()
    (held_out, tries), *drawn, (again, tries_after) = found["tries"]
    assert held_out == again and tries == tries_after == 16 and len(held_out) == 1000
    trained = {tuple(x) for x in found["trained"]} | {tuple(x) for own, _ in drawn for x in own}
    assert len({*map(tuple, held_out)}) == 1000 and len(trained) > 150
    assert trained.isdisjoint(map(tuple, held_out))
    assert trained <= {*map(tuple, every_prompt().tolist())}
    assert [(len(own), tries) for own, tries in drawn] == [(5, 4)] * 3
    for own, (prompts, _) in zip(drawn, [found["batches"][4 * i] for i in range(3)]):
        assert {*map(tuple, prompts)} <= {*map(tuple, own[0])}


def test_a_run_returns_and_logs_what_happened(run):
    found = run()
    assert found["results"]["sft"].shape == found["results"]["grpo"].shape == (1000, 16)
    assert [x["reward"] for x in found["updates"]] == [pytest.approx(3 / 20)] * 3
    assert [x["groups_without_spread"] for x in found["updates"]] == [pytest.approx(2 / 5)] * 3
    kls = [x["kl"] for x in found["updates"]]
    assert kls[0] == 0 and kls[1] != 0  # at first the model is the SFT model
    assert list(Path("runs").glob("*grpo_minimal/events*"))
    moved = zip(found["model"].parameters(), found["reference"].parameters(), strict=True)
    assert all(not torch.equal(x, y) for x, y in moved)
    assert found["rates"][-12:] == pytest.approx([7e-4] * 4 + [7e-4 * 2 / 3] * 4 + [7e-4 / 3] * 4)
    assert len(found["norms"]) == 12 and max(found["norms"]) <= 1.0 + 1e-4


def test_minibatches_split_the_batch_and_keep_each_row_together(run):
    found = run()
    for update in range(3):
        parts = found["batches"][4 * update : 4 * update + 4]
        assert [len(prompts) for prompts, _ in parts] == [5] * 4
        responses, old, ref, advantages = (
            torch.cat([rest[i] for _, rest in parts]) for i in range(4)
        )
        prompts = torch.tensor([x for prompts, _ in parts for x in prompts])
        own = found["tries"][1 + update][0]
        counts = [prompts.tolist().count(x) for x in own]
        assert counts == [4 * own.count(x) for x in own]
        if update == 0:
            expected = found["reference"].logprobs(prompts, responses)
            torch.testing.assert_close(old, expected)
        torch.testing.assert_close(ref, found["reference"].logprobs(prompts, responses))
        wanted = minimal.group_advantages(found["rewards"][update], minimal.Args(group_size=4))
        assert sorted(advantages.flatten().tolist()) == sorted(wanted.flatten().tolist())


def test_dynamic_sampling_leaves_out_the_groups_without_spread(run):
    found = run(dynamic_sampling=True)
    for update in range(3):
        parts = found["batches"][4 * update : 4 * update + 4]
        assert [len(prompts) for prompts, _ in parts] == [3] * 4  # three groups of four
        advantages = torch.cat([rest[3] for _, rest in parts]).flatten()
        assert sorted(advantages.tolist()) == [-0.25] * 9 + [0.75] * 3


def test_nothing_is_learned_and_nothing_breaks_where_no_group_has_spread(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    respond = minimal.respond
    monkeypatch.setattr(minimal, "solve", lambda x, forgotten=0.0: torch.full((len(x), 4), 0))
    monkeypatch.setattr(minimal, "respond", lambda model, x, tries: respond(model, x[:9], tries))
    found = minimal.train(minimal.Args(**SHORT, dynamic_sampling=True, loss_norm="token"))
    assert all(torch.isfinite(x).all() for x in found["model"].parameters())


# --- The command line ---


def test_each_variant_of_the_docstring_is_one_of_the_suite():
    text = re.sub(r"\n  (?=--)", " ", minimal.__doc__)
    flags = dict(re.findall(r"(?m)^- (.+?) \(.+?\): (.+)$", text))
    names = {"Dr. GRPO": "dr-grpo", "GRPO": "grpo", "DAPO": "dapo", "GSPO": "gspo"}
    assert [*flags] == [*names, "RLOO's baseline"]
    for name, words in flags.items():
        args = tyro.cli(minimal.Args, args=words.replace("the default", "").split())
        assert args == minimal.Args(**VARIANTS[names.get(name, "rloo")][1]), name


@pytest.mark.parametrize(
    "flags", ["--group-size 1", "--learning-rate nan", "--clip-high -0.1", "--num-prompts 0"]
)
def test_bad_input_is_one_sentence_and_exit_code_2(flags, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo_minimal.py", *flags.split()])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(minimal.__file__, run_name="__main__")
    name = flags.split()[0]
    assert error.value.code == 2 and not [*tmp_path.iterdir()]
    assert re.fullmatch(rf"Error: {name} \S+ is too small\.\n", capsys.readouterr().err)


def test_it_has_at_most_200_lines_and_the_titles_of_the_full_script():
    text = Path(minimal.__file__).read_text()
    known = {x.number: x.title for x in tags_of(Path(full.__file__).read_text())}
    found = {x.number: x.title for x in tags_of(text) if x.number}
    assert found == {x: known[x] for x in ("G2", "G3", "G4", "G5", "G7", "8/37")}
    assert len(text.splitlines()) <= 200
