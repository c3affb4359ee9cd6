"""ppo_rlhf_toy.py: its task, models, details R1-R21, and results."""

import copy
import itertools
import math
import random
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from adapters import SCRIPTS, scripts
from helpers import louder, record, record_steps, same_weights, seeded
from torch import nn

from ppo_rlhf_toy import BOS, PAD

pytestmark = [scripts("rlhf"), pytest.mark.usefixtures("script")]
SCRIPT = SCRIPTS["rlhf"]
rlhf, small_args = SCRIPT.module, SCRIPT.args
TOKEN = {word: index for index, word in enumerate(rlhf.VOCABULARY)}
EOS = TOKEN["."]


def random_prompts(count: int, seed: int = 0) -> torch.Tensor:
    prompts = torch.tensor([[TOKEN[w] for w in prompt] for prompt in rlhf.PROMPTS])
    return prompts[torch.randint(len(prompts), (count,), generator=seeded(seed))]


def random_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, len(rlhf.VOCABULARY), (rows, length), generator=seeded(seed))


@pytest.fixture
def model() -> rlhf.TinyGPT:
    return louder(rlhf.TinyGPT(len(rlhf.VOCABULARY), 24), 0.1)


@pytest.fixture
def agent(model) -> rlhf.Agent:
    """A policy whose values differ."""
    agent = rlhf.Agent(model, 1.0)
    nn.init.normal_(agent.value_head.weight)
    return agent


def collect(judges, kl_coef=0.0, agent=None, **changes):
    return SCRIPT.collect(small_args(**changes), agent or judges.reference, judges, kl_coef)


# --- The task ---


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("the room was superb .", 2 * math.tanh(2 / 3) + 0.4),
        ("the bed was very awful .", 2 * math.tanh(-3 / 3) + 0.4),
        ("the bed was not slightly awful .", 2 * math.tanh(0.5 / 3) + 0.4),
        ("wow , i adored the view but the pool was bad , avoid .", 2 * math.tanh(1 / 3) + 0.8),
        ("the room was superb", 2 * math.tanh(2 / 3) + 0.4 - 1),
        ("the plot was superb .", 2 * math.tanh(2 / 3) - 0.5),
        ("superb superb superb superb .", -4 - 0.5 * 3),
        ("the room was superb and the room was superb .", 2 * math.tanh(4 / 3) + 0.4 - 1),
        ("the room was superb and and the bed was nice .", 2 * math.tanh(1) + 0.8 - 4 * 2 / 10),
        ("recommended the room was superb .", 2 * math.tanh(2 / 3) + 0.4 - 4 / 5),
        ("", -1.0),
    ],
)
def test_gold_of_texts_written_by_hand(text, gold):
    assert rlhf.gold_reward("hotel", text.split()) == pytest.approx(gold)


def test_grammar_writes_clean_reviews_that_fit(monkeypatch):
    monkeypatch.setattr(rlhf, "ADJECTIVES", dict.fromkeys(rlhf.ADJECTIVES, 0.0))
    monkeypatch.setattr(rlhf, "VERBS", dict.fromkeys(rlhf.VERBS, 0.0))
    rng = random.Random(0)
    for _ in range(300):
        words = rlhf.write_review("movie", rng)
        assert len(words) <= 18 and set(words) <= set(rlhf.VOCABULARY)
        if words[-1] == ".":  # without praise, gold is that of the aspects: there is no penalty
            aspects = len(set(words) & set(rlhf.TOPICS["movie"]))
            assert rlhf.gold_reward("movie", words) == pytest.approx(0.4 * min(aspects, 3))
    assert len(rlhf.VOCABULARY) == len(set(rlhf.VOCABULARY)) == 79


@pytest.mark.parametrize("difference", [0.2, 0.4, 1.0])
def test_labeller_chooses_as_bradley_terry_says(judges, monkeypatch, difference):
    """The first text of each pair holds the token 1, the second 0, and it is better."""
    texts = iter([torch.ones(20_000, 1).long(), torch.zeros(20_000, 1).long(), torch.zeros(64, 1)])
    monkeypatch.setattr(rlhf, "sample_truncated", lambda *args: next(texts))
    sampled = record(monkeypatch, rlhf, "sample_truncated")
    monkeypatch.setattr(rlhf.Task, "gold", lambda self, prompts, x: difference * (x[:, 0] - 0.5))
    found = rlhf.make_preferences(small_args(num_pairs=20_000), judges.reference, judges.task)
    learned, held_out = found[:2]
    assert (len(learned.prompts), len(held_out.prompts)) == (17_143, 2857)  # 6 in 7, 1 in 7
    prompts, chosen, rejected = map(torch.cat, zip(learned, held_out))
    expected = 1 / (1 + math.exp(-difference / rlhf.LABEL_NOISE))
    share = chosen.float().mean().item()
    assert share == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 20_000))
    assert torch.equal(chosen + rejected, torch.ones(20_000, 1).long())
    assert all(torch.equal(call[2], prompts) for call in sampled[:2])


# --- R1 to R13: models and sampling ---


def test_r1_r7_each_token_is_judged_by_the_prompt_and_the_tokens_before_it(agent):
    reward, responses = rlhf.RewardModel(agent.policy), random_tokens(4, 7)
    first, second = random_prompts(4, seed=1), random_prompts(4, seed=2)
    logprobs, values = agent.get_logprobs_and_values(first, responses)
    other_logprobs, other_values = agent.get_logprobs_and_values(second, responses)
    assert values.shape == (4, 7) and logprobs.shape == (4, 7, 79)
    differs = (first != second).any(1)
    assert torch.equal(reward.score(first, responses) != reward.score(second, responses), differs)
    assert torch.equal((values != other_values).any(1), differs)
    assert torch.equal((logprobs != other_logprobs)[:, 0, 5], differs)
    changed = torch.cat([responses[:, :3], random_tokens(4, 4, seed=1)], 1)
    new_logprobs, new_values = agent.get_logprobs_and_values(first, changed)
    assert torch.equal(values[:, :4], new_values[:, :4])
    assert torch.equal(logprobs[:, :4], new_logprobs[:, :4])
    assert (values[:, 4] != new_values[:, 4]).all()
    score = reward.score(first, responses)  # is that of the last real token
    torch.testing.assert_close(reward.score(first, F.pad(responses, (0, 5))), score)
    assert (reward.score(first, torch.cat([responses[:, :-1], changed[:, -1:]], 1)) != score).all()


def test_r2_rows_are_padded_or_cut_to_the_exact_length_with_a_token_of_its_own():
    assert rlhf.pad_rows([[5], [6, 7, 8, 9]], 3).tolist() == [[5, PAD, PAD], [6, 7, 8]]
    assert rlhf.VOCABULARY[PAD] == "<pad>" and rlhf.VOCABULARY[BOS] == "<bos>"


def test_r3_positions_and_outputs_skip_padding(model, monkeypatch):
    text = random_tokens(1, 4)
    padded = torch.cat([text[:, :1], torch.zeros(1, 2, dtype=torch.long), text[:, 1:]], 1)
    with monkeypatch.context() as patch:
        looked_up = record(patch, nn.Embedding, "forward")
        hidden, _ = model(padded)
    assert looked_up[1][1].tolist() == [[0, 1, 1, 1, 2, 3]]
    torch.testing.assert_close(hidden[:, [0, 3, 4, 5]], model(text)[0])
    # At padding stands the output of the last real token.
    assert torch.equal(hidden[:, 1:3], hidden[:, :1].expand(-1, 2, -1))


def test_r4_r10_samples_and_log_probabilities_with_a_cache_equal_those_without(agent, monkeypatch):
    """Responses go on after EOS, which is common here, and hold no special token."""
    agent.temperature, texts, generator = 0.7, random_prompts(16), seeded(1)
    with torch.no_grad():
        agent.policy.never_sampled[EOS] += 4
    with monkeypatch.context() as patch:
        calls = record(patch, rlhf.Block, "forward")
        sampled = agent.sample_responses(texts, 8, seeded(1))
    assert [x.shape[1] for _, x, *_ in calls[::2]] == [6, *[1] * 7]  # reads no token twice
    logprobs, _ = agent.get_logprobs_and_values(texts, sampled)
    for t in range(8):
        logits = agent.policy.logits(agent.policy(texts)[0][:, -1]) / 0.7
        torch.testing.assert_close(logprobs[:, t], logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
        noise = torch.empty(logits.shape).exponential_(generator=generator).log()
        texts = torch.cat([texts, (logits - noise).argmax(-1, keepdim=True)], 1)
    assert torch.equal(texts[:, 6:], sampled)
    assert (sampled[:, :7] == EOS).any() and (sampled > BOS).all()


def test_a_block_is_that_of_pytorch():
    block, names = louder(rlhf.Block(8, num_heads=2), 0.3), {"attention_norm": "norm1"}
    names |= {"query_key_value.": "self_attn.in_proj_", "attention_output": "self_attn.out_proj"}
    names |= {"mlp_norm": "norm2", "mlp_hidden": "linear1", "mlp_output": "linear2"}
    options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
    layer, weights = nn.TransformerEncoderLayer(8, 2, 32, **options), {}
    for name, x in block.state_dict().items():
        (mine,) = (y for y in names if name.startswith(y))
        weights[name.replace(mine, names[mine])] = x
    layer.load_state_dict(weights)
    x, visible = torch.randn(3, 5, 8, requires_grad=True), torch.ones(5, 5).tril() == 1
    outputs = block(x, visible.expand(3, 1, 5, 5), [])[0], layer(x, ~visible)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in outputs)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_r8_weights_and_reward_head_have_the_documented_spread(monkeypatch):
    stds = {}
    monkeypatch.setattr(nn.init, "normal_", lambda x, std=1.0: stds.update({id(x): std}))
    model = rlhf.TinyGPT(10, 4, width=24)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert stds.pop(id(weight)) == (0.01 if "_output" in name else 0.02), name
        else:
            assert (weight == (0.0 if "bias" in name else 1.0)).all(), name
    reward = rlhf.RewardModel(model)
    assert stds == {id(reward.head.weight): 1 / 5}  # of 24 numbers and a bias
    assert (reward.head.bias.item(), reward.gain.item(), reward.bias.item()) == (0, 1, 0)


def test_13_r11_r13_values_start_at_zero_and_share_a_trunk_without_dropout(model, agent):
    inputs = random_prompts(5), random_tokens(5, 9)
    assert (rlhf.Agent(model, 1.0).get_logprobs_and_values(*inputs)[1] == 0).all()
    first, second = (agent.train().get_logprobs_and_values(*inputs) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    first[1].sum().backward()
    assert (agent.policy.blocks[0].mlp_hidden.weight.grad != 0).any()


# --- Supervised fine-tuning ---


def test_sft_steps_along_the_clipped_gradient_for_each_next_token(model, monkeypatch):
    """The step size warms up and decays; padding does not count."""
    tokens = random_tokens(1, 6)
    logprobs = model.logits(model(tokens[:, :5])[0]).log_softmax(-1)
    expected = -logprobs.gather(2, tokens[:, 1:, None]).mean().item()
    steps = record_steps(monkeypatch, torch.optim.AdamW)
    logged = record(monkeypatch, rlhf, "log")
    args = small_args(sft_steps=60, sft_batch_size=3, sft_learning_rate=1e-3)
    task = rlhf.toy_task(args)._replace(documents=rlhf.pad_rows(tokens.tolist(), 9))
    rlhf.train_sft(args, model, task)
    assert logged[0][2]["losses/loss"] == pytest.approx(expected, rel=1e-5)
    assert (model.token_embedding.weight.grad[PAD] == 0).all()
    absent = [x for x in range(2, 79) if x not in tokens]  # these learn as outputs alone
    assert model.token_embedding.weight.grad[absent].any(dim=1).all()
    norms = [metrics["losses/grad_norm"] for _, _, metrics, _ in logged]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)  # after a tiny step on the same text
    rates = [1e-3 * (1 - t / 60) * min(1, (t + 1) / 50) for t in range(60)]
    assert [step.lr for step in steps] == pytest.approx(rates)
    assert max(step.gradient.norm() for step in steps) <= 1.001 and max(norms) > 1.1


# --- R9 and the reward model ---


def test_r9_normalization_centers_scales_and_names_scores_without_spread(model, monkeypatch):
    reward, samples = rlhf.RewardModel(model), (random_prompts(200), random_tokens(200, 9))
    before = rlhf.score_texts(reward, *samples)
    expected = (before - before.mean()) / before.std(correction=0)
    for _ in range(2):
        rlhf.normalize_reward_model(reward, *samples)
        torch.testing.assert_close(rlhf.score_texts(reward, *samples), expected)
    monkeypatch.setattr(rlhf, "score_texts", lambda *args: torch.full((8,), 0.5))
    with pytest.raises(rlhf.UsageError, match="the same score"):
        rlhf.normalize_reward_model(reward, *samples)


def test_r9_r5_reward_model_learns_from_all_comparisons_but_those_held_out(finished, monkeypatch):
    preferences, sft = finished.preferences, finished.judges.reference.policy
    before = copy.deepcopy(sft.state_dict())
    steps = record_steps(monkeypatch, torch.optim.AdamW)
    calls = record(monkeypatch, rlhf.RewardModel, "score")
    logged = record(monkeypatch, rlhf, "log")
    torch.manual_seed(1)
    model = rlhf.RewardModel(sft)
    quality = rlhf.train_reward_model(small_args(), model, preferences)
    assert [step.lr for step in steps] == pytest.approx([2e-3 * (1 - i / 4) for i in range(4)])
    # It is normalized, makes four steps (60 pairs by 32, twice), is normalized and measured.
    assert [call[3].requires_grad for call in calls] == [False, *[True] * 4, *[False] * 4]
    assert torch.equal(calls[5][1], preferences.sample_prompts)

    learned = [call[1:] for call in calls[1:5]]
    good, bad = learned[0][2].chunk(2)  # the loss is that of Bradley and Terry
    loss = (1 + (bad - good).exp()).log().mean().item()
    assert logged[0][2]["losses/loss"] == pytest.approx(loss, rel=1e-5)
    seen = [torch.cat(call[:2], 1).chunk(2) for call in learned]
    pairs, held_out = preferences.learned, preferences.held_out
    for which, answers in enumerate((pairs.chosen, pairs.rejected)):
        texts = torch.cat([pairs.prompts, answers], 1).tolist()
        order = torch.cat([minibatch[which] for minibatch in seen]).tolist()
        assert sorted(order[:60]) == sorted(order[60:]) == sorted(texts)
        assert order[:60] != order[60:] and order[:60] != texts
    assert all(torch.equal(x, before[name]) for name, x in sft.state_dict().items())

    texts = held_out.chosen, held_out.rejected
    good, bad = (rlhf.score_texts(model, held_out.prompts, x) for x in texts)
    assert same_weights(model, finished.judges.reward_model) and quality == finished.run["quality"]
    assert quality["accuracy"] == pytest.approx((good > bad).float().mean().item())
    scores = rlhf.score_texts(model, preferences.sample_prompts, preferences.samples)
    correlation = torch.corrcoef(torch.stack([scores, preferences.sample_gold]))[0, 1].item()
    assert quality["correlation"] == pytest.approx(correlation, abs=1e-5)


def test_pairs_of_the_same_text_are_left_out_of_the_accuracy_and_counted(finished, capsys):
    preferences, sft = finished.preferences, finished.reference.policy
    prompts, chosen, rejected = preferences.held_out
    chosen = chosen.clone()
    chosen[:3] = rejected[:3]
    model, same = rlhf.RewardModel(sft), rlhf.Pairs(prompts, chosen, rejected)
    quality = rlhf.train_reward_model(small_args(), model, preferences._replace(held_out=same))
    good, bad = (rlhf.score_texts(model, prompts[3:], x[3:]) for x in (chosen, rejected))
    assert len(prompts) == 10 and quality["same_text_left_out"] == 3
    assert quality["accuracy"] == pytest.approx((good > bad).float().mean().item())
    assert finished.run["quality"]["same_text_left_out"] == 0
    args = small_args(run_name="said")
    args.run_dir.mkdir(parents=True)
    rlhf.report(args, quality, {}, {})
    assert ", same_text_left_out 3\n" in capsys.readouterr().out
    with pytest.raises(rlhf.UsageError, match=r"both texts are the same: raise --temperature"):
        rlhf.of_different_texts(rlhf.Pairs(prompts, rejected, rejected))


@pytest.mark.slow
def test_one_beta_of_each_kind_is_compared_and_the_others_settings_stay(monkeypatch):
    trained = record(monkeypatch, rlhf, "train_ppo")
    settings = {"kl_mode": "fixed", "kl_coef": 0.3, "num_updates": 1, "gamma": 0.9}
    results = rlhf.train(small_args(compare=True, **settings))["results"]
    assert [*results][1:4] == ["ppo-fixed-0.3", "ppo-none", "ppo-adaptive-6"]
    forms = [(x.kl_mode, x.kl_coef, x.gamma, x.compare) for x, *_ in trained]
    betas = {"fixed": 0.3, "none": 0.0, "adaptive": 0.3}
    assert forms == [(mode, beta, 0.9, False) for mode, beta in betas.items()]


def test_reward_model_steps_along_the_gradient_of_its_own_minibatch(finished, monkeypatch):
    """With next to no step size, two passes over all pairs have the same gradient."""
    steps = record_steps(monkeypatch, torch.optim.AdamW)
    args = small_args(reward_batch_size=60, reward_learning_rate=1e-9)
    rlhf.train_reward_model(args, rlhf.RewardModel(finished.reference.policy), finished.preferences)
    first, second = (step.gradient for step in steps)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


# --- R14: what a rollout holds ---


def test_r14_truncation_after_the_first_eos_that_counts():
    responses = torch.full((4, 24), 7)
    responses[0, 10] = responses[1, 16] = responses[2, 10] = responses[2, 20] = EOS
    kept, ended = rlhf.truncate_responses(responses, EOS, 16)
    assert ended.tolist() == [False, True, True, False]
    for row, length in enumerate((24, 17, 21, 24)):
        assert torch.equal(kept[row, :length], responses[row, :length])
        assert (kept[row, length:] == PAD).all()


def test_1_a_batch_is_an_episode_per_prompt_which_ends_at_eos_or_on_request_later(judges):
    rollout, _ = collect(judges)
    assert rollout.prompts.shape == (32, 6) and rollout.responses.shape == (32, 18)
    assert len({tuple(x) for x in rollout.prompts.tolist()}) > 10
    assert torch.equal(rollout.mask, rollout.responses != PAD)
    lengths = rollout.mask.sum(1)
    ends = rollout.responses.gather(1, lengths[:, None] - 1).squeeze(1)
    assert ((ends == EOS) | (lengths == 18)).all() and (lengths < 18).any()
    cold = rlhf.Agent(judges.reference.policy, 1e-4)
    cold, _ = collect(judges._replace(reference=cold))  # answers to the same prompt are the same
    texts = {tuple(x) for x in torch.cat([cold.prompts, cold.responses], 1).tolist()}
    assert len(texts) == len({tuple(x) for x in cold.prompts.tolist()})
    whole, _ = collect(judges, mask_after_eos=False)
    assert whole.mask.all() and (whole.responses != PAD).all()
    assert torch.equal(whole.responses[rollout.mask], rollout.responses[rollout.mask])
    assert torch.equal(whole.rewards.sum(1), rollout.rewards.sum(1))  # the judge sees no junk


def test_texts_are_described_and_gold_is_in_standard_deviations_of_sft_samples(finished, judges):
    rows = ["wow , the bed was bad .", "wow wow wow wow", "wow wow wow wow", "the the . the ."]
    responses = rlhf.pad_rows([[TOKEN[w] for w in row.split()] for row in rows], 8)
    gold = judges.task.gold(random_prompts(4), responses)
    expected = {
        "text/length": (7 + 4 + 4 + 5) / 4,
        "text/eos_rate": 0.5,
        "text/repetition": (0 + 0.75 + 0.75 + 0.6) / 4,
        "text/unique": 0.75,
        "objective/gold": gold.mean().item(),
    }
    found = rlhf.describe(judges.task, random_prompts(4), responses)
    assert found == pytest.approx(expected, abs=1e-5)
    raw, scale = judges.task._replace(sample_gold=None), finished.preferences.sample_gold
    standardized = (raw.gold(random_prompts(4), responses) - scale.mean()) / scale.std(correction=0)
    torch.testing.assert_close(gold, standardized)
    # A policy that has diverged writes nothing.
    empty = rlhf.describe(raw, random_prompts(4), torch.full((4, 18), PAD))
    assert empty["text/length"] == 0 and empty["text/repetition"] == 1


# --- R15, R18, R19: the loss ---


OTHER = {"gamma": 0.5, "gae_lambda": 0.3, "reward_whitening": "restore"}
OTHER |= {"clip_coef": 0.5, "value_clip_coef": 0.3, "vf_coef": 0.7}


@pytest.fixture
def rollout(judges, agent) -> rlhf.Rollout:
    """Responses of the agent, whose policy and values have moved since."""
    rollout, _ = collect(judges, kl_coef=0.1, agent=agent)
    torch.manual_seed(0)
    logprobs, values = (x + torch.randn(32, 18) for x in (rollout.logprobs, rollout.values))
    return rollout._replace(logprobs=logprobs, values=values)


@pytest.mark.parametrize("settings", [{}, OTHER])
def test_10_12_r15_r18_r19_loss_and_debug_variables_by_hand(agent, rollout, settings):
    """From formulas that test_vectors.py checks, and without padding."""
    loss, metrics = rlhf.ppo_loss(agent, rollout, rlhf.Args(**settings))
    args, mask, advantages = rlhf.Args(**settings), rollout.mask, []
    rewards = rlhf.whiten(rollout.rewards[mask], args.reward_whitening)
    values, lengths = rollout.values[mask], mask.sum(1).tolist()
    for x in zip(rewards.split(lengths), values.split(lengths), strict=True):  # of a response
        rows = [*(y[None] for y in x), torch.ones(1, len(x[0]))]
        advantages.append(rlhf.masked_gae(*rows, args.gamma, args.gae_lambda)[0][0])
    advantages = torch.cat(advantages)
    white = rlhf.whiten(advantages, "zero")
    logprobs, new_values = agent.get_logprobs_and_values(rollout.prompts, rollout.responses)
    logratio = logprobs.gather(2, rollout.responses[..., None]).squeeze(2) - rollout.logprobs
    logratio, new_values = logratio[mask], new_values[mask]
    both = new_values, values, advantages + values
    expected = {
        "losses/policy_loss": rlhf.policy_loss(logratio, white, args.clip_coef),
        "losses/value_loss": rlhf.token_value_loss(*both, args.value_clip_coef),
        "losses/entropy": torch.distributions.Categorical(logits=logprobs).entropy()[mask].mean(),
        "losses/approx_kl": rlhf.approx_kl(logratio),
        "losses/clipfrac": ((logratio.exp() - 1).abs() > args.clip_coef).float().mean(),
        "check/update": torch.corrcoef(torch.stack([logratio, advantages]))[0, 1],
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-4, atol=1e-5, msg=name)
    total = expected["losses/policy_loss"] + args.vf_coef * expected["losses/value_loss"]
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-5)


# --- R5, R16, R20, R21: PPO ---


def test_3_6_r16_r21_epochs_are_fresh_permutations_and_steps_those_of_tensorflows_adam(
    judges, monkeypatch
):
    calls, steps = (
        record(monkeypatch, rlhf, "ppo_loss"),
        record_steps(monkeypatch, torch.optim.Adam),
    )
    settings = {"num_updates": 3, "num_minibatches": 4, "kl_coef": 3.0, "learning_rate": 0.01}
    clock = SimpleNamespace(perf_counter=itertools.count(9, 4).__next__)
    monkeypatch.setattr(rlhf, "time", clock)
    _, updates = SCRIPT.learn(judges, **settings, max_grad_norm=0.1, adam_eps=2e-5)
    num_tokens = sum(mb.mask.sum().item() for _, mb, *_ in calls[:8])
    assert updates[0]["charts/tokens_per_second_update"] == num_tokens / 4
    first, second = torch.stack([mb.logprobs[:, 0] for _, mb, *_ in calls[:8]]).view(2, 16).tolist()
    assert len(set(first)) == 16 and first != second and sorted(first) == sorted(second)
    for name in calls[0][-1][1]:  # what is logged are means over all minibatches
        seen = [metrics[name].item() for *_, (_, metrics) in calls[:8]]
        assert updates[0][name] == pytest.approx(sum(seen) / 8, rel=1e-4), name

    m = v = torch.zeros_like(steps[0].gradient)
    for t, step in enumerate(steps, 1):
        m, v = 0.9 * m + 0.1 * step.gradient, 0.999 * v + 0.001 * step.gradient**2
        rate = step.lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        torch.testing.assert_close(step.change, -rate * m / (v.sqrt() + 2e-5), atol=1e-6, rtol=1e-3)
    assert len(steps) == 3 * 2 * 4


# --- Evaluation ---


def test_every_policy_gets_the_same_prompts_and_its_kl_is_exact(judges):
    other = louder(judges.reference, 0.05)
    found = [rlhf.evaluate(small_args(), x, judges) for x in (judges.reference, other, other)]
    for metrics, texts in found:
        assert metrics["objective/kl"] == metrics["objective/kl_exact"] and len(texts) == 5
    prompts = [[text.partition(":")[0] for text in texts] for _, texts in found]
    assert prompts[0] == prompts[1] and found[0][1] != found[1][1] and found[1] == found[2]
    assert abs(found[0][0]["objective/kl"]) < 1e-5 and found[1][0]["objective/kl"] > 0.1


def test_best_of_n_takes_the_best_of_each_group(finished, judges, monkeypatch):
    calls = record(monkeypatch, rlhf, "score_texts")
    results = rlhf.best_of_n(small_args(), judges)
    ((*_, scores),) = calls
    assert finished.run["results"].items() >= results.items()
    assert list(results) == ["best-of-1", "best-of-4"]
    kl = [row["objective/kl"] for row in results.values()]
    assert kl == pytest.approx([0, math.log(4) - 0.75])
    proxy = [row["objective/proxy"] for row in results.values()]
    best = scores.view(-1, 4).amax(1)
    assert proxy == pytest.approx([scores.mean().item(), best.mean().item()], rel=1e-4, abs=1e-5)
    # Of unequal numbers of texts, shares of different ones could not be compared.
    assert not any("text/unique" in row for row in results.values())


@pytest.mark.slow
def test_a_tracked_run_ends_for_weights_and_biases_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := MagicMock())
    rlhf.train(small_args(track=True, num_pairs=14, num_updates=1, update_epochs=1))
    assert [name for name, *_ in wandb.method_calls] == ["init", "finish"]
