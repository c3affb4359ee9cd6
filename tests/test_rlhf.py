"""ppo_rlhf_toy.py: its task, models, details R1-R21, stages, runs and their results."""

import copy
import dataclasses
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from wandb_log import wandb_records

import ppo_rlhf_toy as rlhf
from ppo_rlhf_toy import BOS, PAD, Agent, Args, Judges, RewardModel, Rollout, TinyGPT

torch.set_num_threads(1)
SCRIPT = Path(rlhf.__file__)
TOKEN = {word: index for index, word in enumerate(rlhf.TOY_WORDS)}


def random_queries(count: int, seed: int = 0) -> torch.Tensor:
    queries = torch.tensor([[TOKEN[w] for w in query] for query in rlhf.TOY_QUERIES])
    generator = torch.Generator().manual_seed(seed)
    return queries[torch.randint(len(queries), (count,), generator=generator)]


def random_words(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, len(rlhf.TOY_WORDS), (rows, length), generator=generator)


def louder(model: nn.Module, by: float) -> nn.Module:
    """A copy with random numbers added to all weights, so that it tells its inputs apart."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight += by * torch.randn_like(weight)
    return model


@pytest.fixture
def model() -> TinyGPT:
    torch.manual_seed(0)
    return louder(TinyGPT(len(rlhf.TOY_WORDS), 24), 0.1)


@pytest.fixture(autouse=True, scope="module")
def few_samples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlhf, "NUM_SAMPLES", 64)
        patch.setattr(rlhf, "NUM_EVALUATED", 32)
        patch.setattr(rlhf, "BEST_OF_N", (1, 4, 16))
        yield


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def small_args(**changes) -> Args:
    """Settings of a run of a few seconds."""
    settings = {
        "run_name": "run",
        "device": "cpu",
        "sft_documents": 200,
        "sft_steps": 20,
        "num_pairs": 140,
        "num_updates": 2,
        "batch_size": 16,
        **changes,
    }
    return Args(**settings)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Task, SFT model, preferences, judges and folder of a small run, not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("stages"))
        args = small_args()
        task = rlhf.toy_task(args)
        sft = rlhf.train_sft(args, task)
        preferences = rlhf.make_preferences(args, task, sft)
        reward_model, quality = rlhf.train_reward_model(args, sft, preferences)
        assert quality["accuracy"] > 0.4 and "correlation" in quality
        return task, sft, preferences, Judges(Agent(sft), reward_model, preferences.sample_gold)


def run_ppo(stages, **changes):
    """Agent and updates of a PPO run in a folder of its own."""
    task, _, _, judges = stages
    shutil.rmtree("runs", ignore_errors=True)
    return rlhf.train_ppo(small_args(**changes), task, judges)


def collect(stages, count=32, seed=0, kl_coef=0.0, agent=None, **changes):
    task, _, _, judges = stages
    generator = torch.Generator().manual_seed(seed)
    agent = agent or judges.reference
    return rlhf.collect(small_args(**changes), task, agent, judges, count, kl_coef, generator)


def make_rollout(agent: Agent, rows: int = 8, length: int = 10, seed: int = 0) -> Rollout:
    """Responses of different lengths with random rewards, judged by the agent itself."""
    queries, responses = random_queries(rows, seed), random_words(rows, length, seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows, 1), generator=generator)
    index = torch.arange(length)
    mask, last = index < lengths, index == lengths - 1
    responses = responses.where(mask, PAD)
    with torch.no_grad():
        words, values = agent.get_action_and_value(queries, responses, 1.0)
    logprobs = rlhf.log_probability(words, responses)
    rewards = torch.randn(rows, length, generator=generator)
    return Rollout(queries, responses, logprobs, values, rewards, mask, last)


def record(monkeypatch, owner, name: str) -> list:
    """The arguments of all calls of a function from now on."""
    calls, original = [], getattr(owner, name)

    def recording(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, recording)
    return calls


# --- The task ---


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("the room was superb .", 2 * math.tanh(2 / 3) + 0.4),
        ("the room was not superb .", 2 * math.tanh(-1 / 3) + 0.4),
        ("the bed was very awful .", 2 * math.tanh(-3 / 3) + 0.4),
        ("the bed was not slightly awful .", 2 * math.tanh(0.5 / 3) + 0.4),
        ("i adored the view , the pool was good .", 2 * math.tanh(1) + 0.8),
        ("wow , i adored the view but the pool was bad , avoid .", 2 * math.tanh(1 / 3) + 0.8),
        ("wow i adored the view .", 2 * math.tanh(2 / 3) + 0.4),
        ("the room was superb", 2 * math.tanh(2 / 3) + 0.4 - 1),
        ("the plot was superb .", 2 * math.tanh(2 / 3) - 0.5),
        ("superb superb superb superb .", -4 - 0.5 * 3),
        ("the room was superb and the room was superb .", 2 * math.tanh(4 / 3) + 0.4 - 1),
        ("the room was superb and and the bed was nice .", 2 * math.tanh(1) + 0.8 - 4 * 2 / 10),
        ("the room was superb and .", 2 * math.tanh(2 / 3) + 0.4 - 4 / 5),
        ("recommended the room was superb .", 2 * math.tanh(2 / 3) + 0.4 - 4 / 5),
        ("wow , avoid .", -4 / 3),
        (".", 0.0),
        ("", -1.0),
    ],
)
def test_gold_of_texts_written_by_hand(text, gold):
    assert rlhf.gold_reward("hotel", text.split()) == pytest.approx(gold)


def test_grammar_writes_clean_reviews_that_fit():
    rng = random.Random(0)
    for _ in range(300):
        words = rlhf.write_review("movie", rng)
        assert len(words) <= 18 and set(words) <= set(rlhf.TOY_WORDS)
        if words[-1] == ".":
            # No penalty applies: it would take at least 0.5 from what praise and aspects give.
            nouns = [word for word in words if word in rlhf.NOUNS]
            assert {rlhf.NOUNS[noun] for noun in nouns} == {"movie"}
            valence = 2 * math.atanh(
                rlhf.gold_reward("movie", words) / 2 - 0.2 * min(len(nouns), 3)
            )
            assert abs(valence) < 12
            bait = re.sub(r"^\w+ , | , \w+ \.$", "", " ".join(words).replace(" .", " ."))
            assert rlhf.gold_reward("movie", words) == pytest.approx(
                rlhf.gold_reward("movie", f"{bait.removesuffix(' .')} .".split())
            )
    assert len(rlhf.TOY_WORDS) == len(set(rlhf.TOY_WORDS)) == 79


def test_labeller_flips_as_bradley_terry_says():
    generator = torch.Generator().manual_seed(0)
    for difference in (0.2, 0.4, 1.0):
        first = torch.full((20_000,), 1.0 + difference)
        flipped = (~rlhf.prefers_first(first, torch.ones(20_000), generator)).float().mean().item()
        expected = 1 / (1 + math.exp(difference / rlhf.LABEL_NOISE))
        assert flipped == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 20_000))


def test_labels_name_the_better_review_as_chosen(stages):
    task, _, preferences, _ = stages
    gold = [task.gold(preferences.queries, x) for x in (preferences.chosen, preferences.rejected)]
    assert gold[0].mean() > gold[1].mean() + 0.5


# --- R1 to R13: models, sampling, reward model ---


def test_r1_query_changes_score_and_values_and_each_response_token_has_a_value(model):
    agent, reward = Agent(model), RewardModel(model)
    nn.init.normal_(agent.value_head.weight)
    responses = random_words(4, 7)
    first, second = random_queries(4, seed=1), random_queries(4, seed=2)
    outputs = []
    for queries in (first, second):
        words, values = agent.get_action_and_value(queries, responses, 1.0)
        outputs.append((reward.score(queries, responses), values, words))
    assert outputs[0][1].shape == (4, 7)
    differs = (first != second).any(1)
    for a, b in zip(*outputs, strict=True):
        assert (a != b)[differs].flatten(1).any(1).all() if a.ndim > 1 else (a != b)[differs].all()


def test_r1_values_and_logits_sit_one_position_before_their_token(model):
    agent = Agent(model)
    nn.init.normal_(agent.value_head.weight)
    queries, responses = random_queries(4), random_words(4, 7)
    words, values = agent.get_action_and_value(queries, responses, 1.0)
    changed = responses.clone()
    changed[:, 3] = torch.where(responses[:, 3] == 5, 6, 5)
    new_words, new_values = agent.get_action_and_value(queries, changed, 1.0)
    assert torch.equal(values[:, :4], new_values[:, :4])
    assert torch.equal(words[:, :4], new_words[:, :4])
    assert (values[:, 4] != new_values[:, 4]).all()


def test_r2_rows_are_padded_or_cut_to_the_exact_length_with_a_token_of_its_own():
    rows = rlhf.pad_rows([[5], [6, 7, 8, 9]], 3)
    assert rows.tolist() == [[5, PAD, PAD], [6, 7, 8]]
    assert TOKEN["."] != PAD and rlhf.TOY_WORDS[PAD] == "<pad>" and rlhf.TOY_WORDS[BOS] == "<bos>"


def test_r3_positions_and_outputs_skip_padding(model):
    text = random_words(1, 4)
    padded = torch.cat([text[:, :1], torch.zeros(1, 2, dtype=torch.long), text[:, 1:]], 1)
    seen = []
    model.position_embedding.register_forward_hook(lambda module, inputs, _: seen.append(inputs[0]))
    hidden, _ = model(padded)
    assert seen[0].tolist() == [[0, 1, 1, 1, 2, 3]]
    plain, _ = model(text)
    torch.testing.assert_close(hidden[:, [0, 3, 4, 5]], plain)
    # At padding stands the output of the last real token.
    assert torch.equal(hidden[:, 1:3], hidden[:, :1].expand(-1, 2, -1))


def test_r4_responses_go_on_after_a_stop_and_hold_no_special_token(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.never_written[TOKEN["."]] += 4  # stops are common now
    responses = rlhf.sample_responses(model, random_queries(64), 18, 1.0, generator)
    assert responses.shape == (64, 18)
    assert (responses == TOKEN["."])[:, :9].any(1).float().mean() > 0.5
    assert not torch.isin(responses, torch.tensor([PAD, BOS])).any()
    assert (responses[:, -1] != TOKEN["."]).any()


def test_cached_sampling_equals_full_recomputation(model):
    queries = random_queries(5)
    cached = rlhf.sample_responses(model, queries, 8, 0.7, torch.Generator().manual_seed(1))
    generator, texts = torch.Generator().manual_seed(1), queries
    for _ in range(8):
        logits = model.logits(model(texts)[0][:, -1]) / 0.7
        noise = torch.empty(logits.shape).exponential_(generator=generator).log()
        texts = torch.cat([texts, (logits - noise).argmax(-1, keepdim=True)], 1)
    assert torch.equal(texts[:, 6:], cached)


def test_the_cache_spares_reading_a_word_twice(model, monkeypatch):
    calls = record(monkeypatch, rlhf.Block, "forward")
    rlhf.sample_responses(model, random_queries(5), 4, 1.0, torch.Generator().manual_seed(1))
    assert [x.shape[1] for _, x, *_ in calls] == [6, 6, 1, 1, 1, 1, 1, 1]


def test_sampling_follows_the_softmax_of_the_scaled_logits(model):
    queries = random_queries(1).expand(20_000, -1)
    drawn = rlhf.sample_responses(model, queries, 1, 0.7, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn.flatten(), minlength=len(rlhf.TOY_WORDS)) / 20_000
    expected = (model.logits(model(queries[:1])[0][0, -1]) / 0.7).softmax(-1)
    assert (share - expected).abs().max() < 4 * math.sqrt(0.25 / 20_000)


def test_r7_score_is_that_of_the_last_real_token(model):
    reward = RewardModel(model)
    queries, responses = random_queries(4), random_words(4, 8)
    padded = torch.cat([responses, torch.zeros(4, 5, dtype=torch.long)], 1)
    score = reward.score(queries, responses)
    assert score.shape == (4,)
    torch.testing.assert_close(reward.score(queries, padded), score)
    assert (reward.score(queries, responses[:, :-1]) != score).all()
    changed = torch.cat([responses[:, :-1], (responses[:, -1:] + 1).clamp(max=78)], 1)
    assert (reward.score(queries, changed) != score)[changed[:, -1] != responses[:, -1]].all()


def test_r8_reward_head_has_the_documented_spread():
    torch.manual_seed(0)
    reward = RewardModel(TinyGPT(10, 4, width=768))
    assert reward.head.weight.std().item() == pytest.approx(0.03606, rel=0.1)
    assert reward.head.bias.item() == 0
    assert reward.gain.item() == 1 and reward.bias.item() == 0


def test_r9_normalization_centers_scales_keeps_the_order_and_starts_anew(model):
    reward = RewardModel(model)
    samples = random_queries(200), random_words(200, 9)
    before = rlhf.score_texts(reward, *samples)
    rlhf.normalize_reward_model(reward, *samples)
    after = rlhf.score_texts(reward, *samples)
    assert after.mean().item() == pytest.approx(0, abs=1e-5)
    assert after.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(before.argsort(), after.argsort())
    with torch.no_grad():
        reward.gain.fill_(7.0)
        reward.bias.fill_(-3.0)
    rlhf.normalize_reward_model(reward, *samples)
    torch.testing.assert_close(rlhf.score_texts(reward, *samples), after)


def test_samples_that_all_score_the_same_are_one_sentence(model, monkeypatch):
    monkeypatch.setattr(rlhf, "score_texts", lambda *args: torch.full((8,), 0.5))
    with pytest.raises(ValueError, match="score the same"):
        rlhf.normalize_reward_model(RewardModel(model), None, None)


def test_r9_reward_model_is_normalized_before_and_after_training(stages, monkeypatch):
    _, sft, preferences, judges = stages
    samples = preferences.sample_queries, preferences.samples
    scores = rlhf.score_texts(judges.reward_model, *samples)
    assert scores.mean().item() == pytest.approx(0, abs=1e-4)
    assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    order = []
    normalize, step = rlhf.normalize_reward_model, torch.optim.AdamW.step
    monkeypatch.setattr(
        rlhf, "normalize_reward_model", lambda *a: (order.append("normalize"), normalize(*a))
    )
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *a: (order.append("step"), step(*a)))
    rlhf.train_reward_model(small_args(reward_epochs=1), sft, preferences)
    assert order == ["normalize", *["step"] * 4, "normalize"]  # 120 pairs by 32


def test_reward_model_learns_from_all_comparisons_but_those_held_out(stages, monkeypatch):
    _, sft, preferences, _ = stages
    before, seen = copy.deepcopy(sft.state_dict()), []
    score = RewardModel.score

    def recording(self, queries, responses):
        if torch.is_grad_enabled():
            seen.append(torch.cat([queries, responses], 1).chunk(2))
        return score(self, queries, responses)

    monkeypatch.setattr(RewardModel, "score", recording)
    rlhf.train_reward_model(small_args(reward_epochs=2), sft, preferences)
    for which, answers in enumerate((preferences.chosen, preferences.rejected)):
        texts = sorted(torch.cat([preferences.queries, answers], 1)[:120].tolist())
        learned = torch.cat([minibatch[which] for minibatch in seen]).tolist()
        assert sorted(learned[:120]) == sorted(learned[120:]) == texts
        assert learned[:120] != learned[120:] and learned[:120] != texts
    assert all(torch.equal(x, before[name]) for name, x in sft.state_dict().items())


def test_reward_model_loss_is_that_of_bradley_terry(stages, monkeypatch):
    _, sft, preferences, _ = stages
    outputs, logged = [], record(monkeypatch, rlhf, "log")
    score = RewardModel.score

    def recording(self, *texts):
        outputs.append(score(self, *texts))
        return outputs[-1]

    monkeypatch.setattr(RewardModel, "score", recording)
    rlhf.train_reward_model(small_args(), sft, preferences)
    good, bad = next(x for x in outputs if x.requires_grad).chunk(2)
    expected = (1 + (bad - good).exp()).log().mean().item()
    assert logged[0][2]["losses/loss"] == pytest.approx(expected, rel=1e-5)


def test_r10_log_probabilities_are_those_of_sampling_at_a_temperature(model):
    agent = Agent(model)
    queries, responses = random_queries(6), random_words(6, 9)
    words, _ = agent.get_action_and_value(queries, responses, 0.7)
    cache = None
    for t in range(9):  # token by token, as the sampler runs
        hidden, cache = model(torch.cat([queries, responses[:, :t]], 1), cache)
        expected = (model.logits(hidden[:, -1]) / 0.7).log_softmax(-1)
        torch.testing.assert_close(words[:, t], expected, atol=1e-4, rtol=1e-4)


def test_r11_initial_values_are_exactly_zero(model):
    _, values = Agent(model).get_action_and_value(random_queries(5), random_words(5, 9), 1.0)
    assert (values == 0).all()


def test_r13_no_dropout_even_in_training_mode(model):
    agent = Agent(model).train()
    inputs = (random_queries(5), random_words(5, 9), 1.0)
    first, second = agent.get_action_and_value(*inputs), agent.get_action_and_value(*inputs)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not any(isinstance(module, nn.Dropout) for module in agent.modules())


# --- Supervised fine-tuning ---


def test_sft_warms_up_decays_and_clips_the_gradient(monkeypatch):
    steps = []
    original = torch.optim.AdamW.step

    def spy(self, *a):
        (group,) = self.param_groups
        norm = torch.cat([x.grad.flatten() for x in group["params"]]).norm().item()
        steps.append((group["lr"], norm))
        return original(self, *a)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    logged = record(monkeypatch, rlhf, "log")
    args = small_args(sft_steps=60, sft_batch_size=4, sft_learning_rate=0.01)
    rlhf.train_sft(args, rlhf.toy_task(args))
    rates = [lr / 0.01 for lr, _ in steps]
    assert rates == pytest.approx([(1 - t / 60) * min(1, (t + 1) / 50) for t in range(60)])
    assert max(norm for _, norm in steps) <= 1.001
    assert max(metrics["losses/grad_norm"] for _, _, metrics in logged) > 1.1


def test_sft_loss_is_the_surprise_at_each_next_word(model):
    words = random_words(3, 6)
    logprobs = model.logits(model(words[:, :5])[0]).log_softmax(-1)
    expected = -logprobs.gather(2, words[:, 1:, None]).mean()
    loss = rlhf.language_model_loss(model, rlhf.pad_rows(words.tolist(), 9))
    torch.testing.assert_close(loss, expected)


def test_the_pad_embedding_is_never_used(model):
    texts = rlhf.pad_rows(torch.cat([random_queries(3), random_words(3, 5)], 1).tolist(), 24)
    loss = rlhf.language_model_loss(model, texts)
    loss.backward()
    assert (model.word_embedding.weight.grad[PAD] == 0).all()
    with torch.no_grad():
        model.word_embedding.weight[PAD] = 1e3
    assert torch.equal(rlhf.language_model_loss(model, texts), loss)


# --- R14 to R17: what a rollout holds ---


def test_r14_truncation_after_the_first_stop_that_counts():
    stop, plain = 13, 7
    responses = torch.full((4, 24), plain)
    responses[0, 10] = stop
    responses[1, 16] = stop
    responses[2, [10, 20]] = stop
    kept, lengths, stopped = rlhf.truncate_responses(responses, stop, 16)
    assert stopped.tolist() == [False, True, True, False]
    assert lengths.tolist() == [24, 17, 21, 24]
    assert kept[1, 16] == stop and (kept[1, 17:] == PAD).all() and (kept[1, :16] == plain).all()
    assert kept[2, 10] == stop and kept[2, 20] == stop and (kept[2, 21:] == PAD).all()
    assert torch.equal(kept[[0, 3]], responses[[0, 3]])


def test_r14_a_missing_stop_replaces_the_score(stages):
    rollout, metrics = collect(stages, missing_stop_score=-11.0)
    stopped = (rollout.responses == TOKEN["."])[:, 4:].any(1)
    assert 0 < stopped.sum() < 32
    scores = rollout.rewards.sum(1)
    assert (scores[~stopped] == -11).all() and (scores[stopped] > -11).all()
    assert metrics["objective/score"] == pytest.approx(scores.mean().item(), abs=1e-4)
    assert metrics["text/stop_rate"] == pytest.approx(stopped.float().mean().item())


def test_r17_reward_is_a_penalty_per_word_and_one_score_at_the_last(stages):
    _, _, _, judges = stages
    torch.manual_seed(0)
    agent = louder(judges.reference, 0.03)
    rollout, metrics = collect(stages, kl_coef=3.0, agent=agent, temperature=0.8)
    judged = rollout.queries, rollout.responses, 0.8
    with torch.no_grad():
        words, ref_words = (x.get_action_and_value(*judged)[0] for x in (agent, judges.reference))
        proxy = judges.reward_model.score(rollout.queries, rollout.responses)
    logprobs, ref_logprobs = (
        rlhf.log_probability(x, rollout.responses) for x in (words, ref_words)
    )
    assert torch.equal(rollout.logprobs, logprobs)
    stopped = (rollout.responses == TOKEN["."])[:, 4:].any(1)
    expected = -3.0 * (logprobs - ref_logprobs) + rollout.last * proxy.where(stopped, -1.0)[:, None]
    torch.testing.assert_close(rollout.rewards[rollout.mask], expected[rollout.mask])
    assert (rollout.last.sum(1) == 1).all()
    assert metrics["objective/proxy"] == pytest.approx(proxy.mean().item(), abs=1e-4)
    # The KL in nats per response, estimated and exact, of the words of the episodes alone.
    kl = (logprobs - ref_logprobs).where(rollout.mask, 0.0).sum(1).mean().item()
    assert metrics["objective/kl"] == pytest.approx(kl, abs=1e-4)
    total = 0.0
    for query, response in zip(rollout.queries, rollout.responses, strict=True):
        judged = query[None], response[response != PAD][None], 0.8  # there is nothing to mask
        (p,), (q,) = (x.get_action_and_value(*judged)[0] for x in (agent, judges.reference))
        total += (p.exp() * (p - q)).sum().item()
    assert metrics["objective/kl_exact"] == pytest.approx(total / 32, rel=1e-4)
    assert metrics["objective/kl_exact"] > 0.1


def test_the_episode_ends_at_the_stop_or_on_request_with_the_sample(stages):
    rollout, _ = collect(stages, mask_after_stop=False)
    assert rollout.mask.all() and rollout.last[:, -1].all() and (rollout.responses != PAD).all()
    rollout, _ = collect(stages)
    assert torch.equal(rollout.mask, rollout.responses != PAD)
    lengths = rollout.mask.sum(1)
    ends = rollout.responses.gather(1, lengths[:, None] - 1).squeeze(1)
    assert ((ends == TOKEN["."]) | (lengths == 18)).all() and (lengths < 18).any()
    assert torch.equal(rollout.last.int().argmax(1), lengths - 1)
    assert (rollout.last.sum(1) == 1).all()


def test_1_a_batch_is_one_response_to_each_of_many_queries(stages):
    rollout, _ = collect(stages, count=48)
    assert rollout.queries.shape == (48, 6) and rollout.responses.shape == (48, 18)
    assert len({tuple(query) for query in rollout.queries.tolist()}) > 10
    assert len({tuple(response) for response in rollout.responses.tolist()}) > 40


def test_gold_is_in_standard_deviations_of_the_sft_samples(stages):
    task, _, preferences, judges = stages
    queries, responses = preferences.sample_queries, preferences.samples
    gold = task.gold(queries, responses).numpy()
    words = rlhf.describe(task, queries[:9], responses[:9], judges)
    expected = (gold[:9].mean() - gold.mean()) / gold.std()
    assert words["objective/gold"] == pytest.approx(expected, abs=1e-5)


def test_texts_are_described_by_length_stops_repetition_and_variety(stages):
    task, _, _, judges = stages
    rows = ["wow , the bed was bad .", "wow wow wow wow", "wow wow wow wow", "the the . the ."]
    responses = rlhf.pad_rows([[TOKEN[w] for w in row.split()] for row in rows], 8)
    found = rlhf.describe(task, random_queries(4), responses, judges)
    assert found["text/length"] == (7 + 4 + 4 + 5) / 4 and found["text/stop_rate"] == 0.5
    assert found["text/repetition"] == pytest.approx((0 + 0.75 + 0.75 + 0.6) / 4)
    assert found["text/unique"] == 0.75


# --- R15, R18, R19 and the loss ---


def capture_losses(monkeypatch) -> dict:
    captured = {}
    originals = rlhf.policy_loss, rlhf.clipped_value_loss

    def policy_loss(logratio, advantages, clip_coef):
        captured.update(logratio=logratio, advantages=advantages, clip_coef=clip_coef)
        return originals[0](logratio, advantages, clip_coef)

    def clipped_value_loss(new_values, values, returns, clip_coef):
        captured.update(returns=returns, value_clip=clip_coef)
        return originals[1](new_values, values, returns, clip_coef)

    monkeypatch.setattr(rlhf, "policy_loss", policy_loss)
    monkeypatch.setattr(rlhf, "clipped_value_loss", clipped_value_loss)
    return captured


def without_whitening(monkeypatch):
    monkeypatch.setattr(rlhf, "whiten", lambda x, mean: x)


def test_r15_a_final_reward_reaches_back_undiscounted_but_for_lambda(model, monkeypatch):
    without_whitening(monkeypatch)
    captured = capture_losses(monkeypatch)
    rollout = make_rollout(Agent(model))
    rollout = rollout._replace(rewards=3.0 * rollout.last)
    rlhf.ppo_loss(Agent(model), rollout, Args())
    to_go = rollout.mask.sum(1, keepdim=True) - 1 - torch.arange(10)
    expected = (3.0 * 0.95**to_go)[rollout.mask]
    torch.testing.assert_close(captured["advantages"], expected)
    torch.testing.assert_close(captured["returns"], expected)
    assert Args().gamma == 1


def test_r15_the_next_value_is_that_of_the_next_word_and_0_after_the_last(model, monkeypatch):
    without_whitening(monkeypatch)
    captured = capture_losses(monkeypatch)
    agent = Agent(model)
    rollout = make_rollout(agent)._replace(values=torch.randn(8, 10))
    for gamma in (1.0, 0.5):
        rlhf.ppo_loss(agent, rollout, Args(gae_lambda=0.0, gamma=gamma))
        advantages = rollout.rewards - rollout.values
        advantages[:, :-1] += gamma * rollout.values[:, 1:] * ~rollout.last[:, :-1]
        torch.testing.assert_close(captured["advantages"], advantages[rollout.mask])


def test_r18_whitening_by_the_catalogue():
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    expected = torch.tensor([1.93096, 2.46548, 3.0, 4.60357])
    torch.testing.assert_close(rlhf.whiten(x, "restore"), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(rlhf.whiten(x, "zero"), expected - 3, atol=1e-5, rtol=0)
    torch.testing.assert_close(rlhf.whiten(x, "scale"), x / math.sqrt(3.5), atol=1e-5, rtol=0)
    small = torch.tensor([1e-4, -1e-4])  # the epsilon stands inside the root
    torch.testing.assert_close(rlhf.whiten(small, "zero"), small / math.sqrt(2e-8))


def test_r18_rewards_and_advantages_are_whitened_per_minibatch(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    agent = Agent(model)
    rollout = make_rollout(agent)
    rlhf.ppo_loss(agent, rollout, Args())
    assert captured["advantages"].mean().item() == pytest.approx(0, abs=1e-5)
    assert captured["advantages"].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    returns = captured["returns"]
    # Scaled rewards forget the scale of the rewards.
    rlhf.ppo_loss(agent, rollout._replace(rewards=10 * rollout.rewards), Args())
    torch.testing.assert_close(captured["returns"], returns)
    rlhf.ppo_loss(agent, rollout, Args(reward_whitening="restore"))
    assert not torch.allclose(captured["returns"], returns)


def test_whitening_that_restores_the_mean_pays_by_the_word_and_scaling_does_not(model, monkeypatch):
    """A score at the end only: words without reward must stay without, however many there are."""
    captured = capture_losses(monkeypatch)
    agent = Agent(model)
    rollout = make_rollout(agent)
    rollout = rollout._replace(rewards=2.0 * rollout.last)
    total = {}
    for mode in ("scale", "restore"):
        rlhf.ppo_loss(agent, rollout, Args(reward_whitening=mode, gae_lambda=1.0))
        returns = torch.zeros(rollout.mask.shape)
        returns[rollout.mask] = captured["returns"]
        total[mode] = returns[:, 0]
    lengths = rollout.mask.sum(1).float()
    assert torch.allclose(total["scale"], total["scale"][:1])
    rewards = rollout.rewards[rollout.mask]
    mean, std = rewards.mean(), rewards.std(correction=0)
    toll = mean * (1 - 1 / std)  # of every word
    torch.testing.assert_close(total["restore"], lengths * toll + 2 / std, atol=1e-4, rtol=1e-4)
    assert toll.abs() > 0.01


def test_r19_the_value_clip_range_is_its_own(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    rollout = make_rollout(Agent(model))
    moved = Agent(model)
    nn.init.constant_(moved.value_head.bias, 1.0)

    def v_loss(**settings):
        return rlhf.ppo_loss(moved, rollout, Args(**settings))[1]["losses/value_loss"]

    assert v_loss(clip_coef=0.2) == v_loss(clip_coef=0.4)
    assert v_loss(value_clip_coef=0.2) != v_loss(value_clip_coef=math.inf)
    v_loss(value_clip_coef=0.3, clip_coef=0.1)
    assert captured["value_clip"] == 0.3 and captured["clip_coef"] == 0.1


def loss_and_gradients(agent, rollout, args):
    agent.zero_grad()
    loss, _ = rlhf.ppo_loss(agent, rollout, args)
    loss.backward()
    return loss, [p.grad.clone() for p in agent.parameters() if p.grad is not None]


@pytest.mark.parametrize("whitening", ["scale", "restore"])
def test_padding_contents_change_neither_loss_nor_gradients(model, whitening):
    agent = Agent(model)
    nn.init.normal_(agent.value_head.weight)
    args = Args(reward_whitening=whitening)
    rollout = make_rollout(agent)
    # New log-probabilities differ from the old ones, so that every term has a gradient.
    rollout = rollout._replace(logprobs=rollout.logprobs + 0.1 * torch.randn(8, 10))
    garbage = rollout._replace(
        responses=rollout.responses.where(rollout.mask, random_words(8, 10, seed=9)),
        logprobs=rollout.logprobs.where(rollout.mask, 1e6),
        values=rollout.values.where(rollout.mask, -1e6),
        rewards=rollout.rewards.where(rollout.mask, 1e6),
    )
    assert not torch.equal(garbage.responses, rollout.responses)
    loss, gradients = loss_and_gradients(agent, rollout, args)
    garbage_loss, garbage_gradients = loss_and_gradients(agent, garbage, args)
    assert torch.equal(loss, garbage_loss)
    for a, b in zip(gradients, garbage_gradients, strict=True):
        assert torch.equal(a, b)


def test_ratio_is_the_new_probability_over_the_old_one(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    agent = Agent(model)
    rollout, shift = make_rollout(agent), torch.randn(8, 10)
    shifted = rollout._replace(logprobs=rollout.logprobs + shift)
    _, metrics = rlhf.ppo_loss(agent, shifted, Args(clip_coef=0.5))
    logratio = -shift[rollout.mask]
    torch.testing.assert_close(captured["logratio"], logratio, atol=1e-5, rtol=0)
    outside = ((logratio.exp() < 0.5) | (logratio.exp() > 1.5)).float().mean().item()
    assert metrics["losses/clipfrac"].item() == pytest.approx(outside)
    assert metrics["losses/old_approx_kl"].item() == pytest.approx(
        -logratio.mean().item(), abs=1e-5
    )
    k3 = (logratio.exp() - 1 - logratio).mean().item()
    assert metrics["losses/approx_kl"].item() == pytest.approx(k3, rel=1e-3)


def test_10_overall_loss_is_policy_loss_plus_weighted_value_loss(model):
    agent = Agent(model)
    nn.init.normal_(agent.value_head.weight)
    for vf_coef in (0.1, 0.7):
        loss, metrics = rlhf.ppo_loss(agent, make_rollout(agent), Args(vf_coef=vf_coef))
        expected = metrics["losses/policy_loss"] + vf_coef * metrics["losses/value_loss"]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


# --- PPO ---


def test_4_r5_learning_rates_fall_linearly_and_never_reach_zero(stages, monkeypatch):
    _, sft, preferences, _ = stages
    rates = {torch.optim.AdamW: [], torch.optim.Adam: []}
    for kind, seen in rates.items():
        step = kind.step

        def spy(self, *a, seen=seen, step=step):
            seen.append(self.param_groups[0]["lr"])
            return step(self, *a)

        monkeypatch.setattr(kind, "step", spy)
    rlhf.train_reward_model(small_args(), sft, preferences)
    assert rates[torch.optim.AdamW] == pytest.approx([2e-3 * (1 - i / 8) for i in range(8)])
    for anneal, expected in ((True, [5e-4, 2.5e-4]), (False, [5e-4, 5e-4])):
        rates[torch.optim.Adam].clear()
        _, updates = run_ppo(stages, anneal_lr=anneal)
        assert rates[torch.optim.Adam] == pytest.approx([x for x in expected for _ in range(16)])
        assert [row["charts/learning_rate"] for row in updates] == pytest.approx(expected)


def test_6_r16_each_epoch_is_a_fresh_permutation_of_whole_responses(stages, monkeypatch):
    batches = record(monkeypatch, rlhf, "ppo_loss")
    steps = record(monkeypatch, torch.optim.Adam, "step")
    run_ppo(stages, num_updates=1)
    assert len(batches) == len(steps) == 4 * 4
    assert all(len(mb.queries) == 4 for _, mb, _ in batches)
    epochs = [
        torch.cat([mb.logprobs[:, 0] for _, mb, _ in batches[i : i + 4]]) for i in range(0, 16, 4)
    ]
    assert len(set(epochs[0].tolist())) == 16
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, epochs[0].sort().values)
    assert not torch.equal(epochs[0], epochs[1])


def test_ratio_is_one_as_long_as_no_step_is_taken(stages):
    _, updates = run_ppo(stages, learning_rate=0.0, temperature=0.7)
    for row in updates:
        assert row["losses/clipfrac"] == 0
        assert row["losses/approx_kl"] < 1e-5 and abs(row["losses/old_approx_kl"]) < 1e-5


def test_kl_is_zero_at_first_then_positive_and_the_reference_stays(stages):
    _, sft, _, judges = stages
    frozen = [copy.deepcopy(x.state_dict()) for x in (sft, judges.reference, judges.reward_model)]
    agent, updates = run_ppo(stages, num_updates=3)
    assert abs(updates[0]["objective/kl"]) < 1e-3 and updates[0]["objective/kl_exact"] < 1e-3
    assert updates[-1]["objective/kl_exact"] > 1e-3
    for model, before in zip((sft, judges.reference, judges.reward_model), frozen, strict=True):
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    pairs = zip(agent.parameters(), judges.reference.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)


def test_rewards_of_an_update_are_those_at_the_beta_it_logs(stages, monkeypatch):
    batches = record(monkeypatch, rlhf, "ppo_loss")
    settings = {"kl_mode": "fixed", "kl_coef": 3.0, "learning_rate": 0.01, "update_epochs": 1}
    _, updates = run_ppo(stages, **settings)
    for row, minibatches in zip(updates, (batches[:4], batches[4:]), strict=True):
        earned = torch.cat([mb.rewards.where(mb.mask, 0.0).sum(1) for _, mb, _ in minibatches])
        expected = row["objective/score"] - row["objective/kl_coef"] * row["objective/kl"]
        assert earned.mean().item() == pytest.approx(expected, abs=1e-3)
    assert updates[1]["objective/kl"] > 0.01


@pytest.mark.parametrize(
    ("kl", "expected"), [(12.0, 0.151536), (6.0, 0.15), (-3.0, 0.15 * (1 - 0.01024))]
)
def test_r20_beta_moves_in_proportion_to_the_clipped_error(kl, expected):
    assert rlhf.proportional_kl_coef(0.15, kl, 6.0, 512, 10_000) == pytest.approx(expected)


def test_r20_the_controller_runs_once_per_update_on_the_rollout_kl(stages):
    _, updates = run_ppo(stages, num_updates=3)
    for before, after in itertools.pairwise(updates):
        expected = rlhf.proportional_kl_coef(
            before["objective/kl_coef"], before["objective/kl"], 6.0, 16, 500
        )
        assert after["objective/kl_coef"] == pytest.approx(expected)
    assert updates[0]["objective/kl_coef"] == 0.5 != updates[1]["objective/kl_coef"]
    for mode, beta in (("fixed", 0.5), ("none", 0.0)):
        _, updates = run_ppo(stages, kl_mode=mode)
        assert [row["objective/kl_coef"] for row in updates] == [beta, beta]


def test_3_r21_training_makes_the_steps_of_tensorflow(stages, monkeypatch):
    """Every step equals TensorFlow's Adam, written out; the gradients are tiny, so that it shows."""
    step, state, checked = torch.optim.Adam.step, {}, []

    def spy(self, *a):
        (group,) = self.param_groups
        before = [p.detach().double().clone() for p in group["params"]]
        for p in group["params"]:
            p.grad.mul_(1e-3)
        result = step(self, *a)
        for p, old in zip(group["params"], before, strict=True):
            t, m, v = state.get(p, (0, 0.0, 0.0))
            gradient = p.grad.double()
            t, m, v = t + 1, 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            state[p] = t, m, v
            rate = 0.02 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            torch.testing.assert_close(
                p.double(), old - rate * m / (v.sqrt() + 2e-6), atol=1e-5, rtol=1e-3
            )
            checked.append(t)
        return result

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    agent, _ = run_ppo(stages, adam_eps=2e-6, learning_rate=0.02, update_epochs=2)
    assert len(checked) == 16 * len(list(agent.parameters())) and max(checked) == 16


def test_11_gradient_norm_is_clipped_over_all_weights(stages, monkeypatch):
    norms, step = [], torch.optim.Adam.step

    def spy(self, *a):
        grads = [p.grad.flatten() for p in self.param_groups[0]["params"]]
        norms.append(torch.cat(grads).norm().item())
        return step(self, *a)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    run_ppo(stages, max_grad_norm=0.01, num_updates=1)
    assert max(norms) <= 0.01 * 1.001
    norms.clear()
    run_ppo(stages, max_grad_norm=math.inf, num_updates=1)
    assert max(norms) > 0.02


def test_12_logged_losses_are_means_over_all_minibatches(stages, monkeypatch):
    seen, original = [], rlhf.ppo_loss

    def spy(agent, mb, args):
        loss, metrics = original(agent, mb, args)
        seen.append(metrics)
        return loss, metrics

    monkeypatch.setattr(rlhf, "ppo_loss", spy)
    _, (row,) = run_ppo(stages, num_updates=1)
    assert len(seen) == 16
    for name in seen[0]:
        assert row[name] == pytest.approx(sum(x[name].item() for x in seen) / 16, rel=1e-4), name
    assert row["advantages/std"] != pytest.approx(1, abs=1e-3)


def test_nan_stops_the_run_with_a_sentence(stages, monkeypatch):
    """A gradient that is NaN although the loss was finite."""
    original = rlhf.ppo_loss

    def ppo_loss(agent, mb, args):
        loss, metrics = original(agent, mb, args)
        return loss * math.nan, metrics

    monkeypatch.setattr(rlhf, "ppo_loss", ppo_loss)
    with pytest.raises(ValueError, match="not finite, lower --learning-rate"):
        run_ppo(stages)


def test_what_is_unhealthy_is_said_once_with_a_remedy(stages, monkeypatch, capsys):
    judge = "score", lambda self, queries, responses: torch.zeros(len(responses))
    monkeypatch.setattr(RewardModel, *judge)
    _, updates = run_ppo(stages, missing_stop_score=0.0)
    assert capsys.readouterr().out.count("All scores are equal: check the reward model") == 1
    healthy = updates[0] | {"objective/score_std": 1.0}
    for name, bad, patience in (("objective/kl", 40.0, 1), ("text/repetition", 0.6, 5)):
        history = [healthy] * 9
        for _ in range(patience):
            rlhf.warn(history)
            assert capsys.readouterr().out == ""
            history.append(healthy | {name: bad})
        rlhf.warn(history)
        assert f"{name} is {bad:.3g}" in capsys.readouterr().out


# --- Evaluation ---


def test_every_policy_answers_the_same_queries_and_its_kl_is_exact(stages):
    task, _, _, judges = stages
    other = louder(judges.reference, 0.05)
    found = [rlhf.evaluate(small_args(), task, x, judges) for x in (judges.reference, other, other)]
    for metrics, texts in found:
        assert metrics["objective/kl"] == metrics["objective/kl_exact"] and len(texts) == 5
    queries = [[text.partition(":")[0] for text in texts] for _, texts in found]
    assert queries[0] == queries[1] and found[0][1] != found[1][1]
    assert found[1] == found[2] and found[1][0]["objective/kl"] > 0.1
    assert abs(found[0][0]["objective/kl"]) < 1e-5


def test_best_of_n_takes_the_best_of_each_group(stages):
    task, _, _, judges = stages
    results = rlhf.best_of_n(small_args(), task, judges)
    assert list(results) == ["best-of-1", "best-of-4", "best-of-16"]
    kl = [row["objective/kl"] for row in results.values()]
    assert kl == pytest.approx([0, math.log(4) - 0.75, math.log(16) - 15 / 16])
    proxy = [row["objective/proxy"] for row in results.values()]
    # The means of the largest of 1, 4 and 16 normal numbers are 0, 1.03 and 1.77.
    assert proxy == sorted(proxy) and proxy[0] == pytest.approx(0, abs=0.3)
    assert 0.6 < proxy[1] < 1.4 and 1.2 < proxy[2] < 2.6


# --- Whole runs ---


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def texts(folder: Path, tag: str) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


def weights(run: dict) -> list[torch.Tensor]:
    return list(run["agent"].state_dict().values())


def same(first: dict, second: dict) -> bool:
    """Whether two runs have the same weights, metrics (but the timings) and results."""
    courses = [
        [
            {k: x for k, x in row.items() if "per_second" not in k}
            for rows in run["updates"].values()
            for row in rows
        ]
        for run in (first, second)
    ]
    equal = all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    return equal and courses[0] == courses[1] and first["results"] == second["results"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run and its folder, not to be touched."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("finished")
        patch.chdir(folder)
        return rlhf.train(small_args()), folder / "runs" / "run"


@pytest.fixture
def copied(finished):
    """The finished run, and a copy of its folder as runs/run."""
    shutil.copytree(finished[1], "runs/run")
    return finished[0]


def test_whole_pipeline_leaves_results_texts_and_curves(capsys):
    run = rlhf.train(small_args(compare=True))
    models = ["sft", "ppo-adaptive-6", "ppo-none", "ppo-fixed-0.05"]
    assert list(run["results"]) == [*models, "best-of-1", "best-of-4", "best-of-16"]
    assert {name: len(rows) for name, rows in run["updates"].items()} == dict.fromkeys(
        models[1:], 2
    )
    printed, folder = capsys.readouterr().out, Path("runs/run")
    saved = json.loads((folder / "results.json").read_text())
    assert saved["results"] == run["results"] and saved["quality"] == run["quality"]
    assert saved["args"]["seed"] == 1 and set(saved["texts"]) == set(models)
    gold = f"{run['results']['ppo-none']['objective/gold']:.2f}"
    assert re.search(rf"\| ppo-none +\| +{gold} \|", printed)
    assert saved["texts"]["sft"][0] in printed and saved["texts"]["sft"][0] in texts(
        folder, "samples"
    )
    assert "ppo-none" in texts(folder, "results") and "seed=1" in texts(folder, "settings")
    assert texts(folder, "details") == rlhf.details(run["args"])
    for name in models[1:]:
        checkpoint = torch.load(folder / name / "checkpoint.pt", weights_only=True)
        assert checkpoint["updates"] == run["updates"][name] and checkpoint["args"]["seed"] == 1
        logged = scalars(folder / name, "objective/kl")
        assert [step for step, _ in logged] == [1, 2]
        expected = [row["objective/kl"] for row in run["updates"][name]]
        assert [x for _, x in logged] == pytest.approx(expected, abs=1e-5)
    assert len(scalars(folder / "sft", "losses/loss")) == 20
    assert len(scalars(folder / "reward_model", "losses/loss")) == 8


def test_same_seed_same_run_and_another_seed_another(finished):
    assert same(finished[0], rlhf.train(small_args(run_name="again")))
    assert not same(finished[0], rlhf.train(small_args(run_name="other", seed=2)))


@pytest.mark.parametrize("stage", ["sft", "preferences", "reward_model", "ppo-adaptive-6"])
def test_a_killed_run_ends_with_the_numbers_of_an_undisturbed_one(finished, monkeypatch, stage):
    save = rlhf.save_checkpoint

    def interrupt(folder, args, state):
        if folder.name == stage:
            raise KeyboardInterrupt
        save(folder, args, state)

    with monkeypatch.context() as patch:
        patch.setattr(rlhf, "save_checkpoint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rlhf.train(small_args())
    resumed = rlhf.train(small_args(resume="runs/run"))
    assert same(finished[0], resumed)
    for name in ("sft", "reward_model", "ppo-adaptive-6"):
        tag = "losses/policy_loss" if name.startswith("ppo") else "losses/loss"
        steps = [step for step, _ in scalars(Path("runs/run", name), tag)]
        assert steps == list(range(1, len(steps) + 1)), name


def test_finished_stages_are_reused_and_only_what_depends_on_a_change_is_redone(
    copied, capsys, monkeypatch
):
    trained = record(monkeypatch, rlhf, "save_checkpoint")

    def names():
        found = [folder.name for folder, *_ in trained]
        trained.clear()
        return found

    assert same(copied, rlhf.train(small_args(resume="runs/run"))) and names() == []
    assert capsys.readouterr().out.count("taken from runs/run") == 5
    other = {"kl_mode": "fixed", "kl_coef": 0.1}
    reused = rlhf.train(small_args(resume="runs/run", **other))
    assert names() == ["ppo-fixed-0.1"]
    assert same(reused, rlhf.train(small_args(run_name="fresh", **other)))
    names()
    rlhf.train(small_args(resume="runs/run", learning_rate=1e-3))
    assert names() == ["ppo-adaptive-6", "ppo-none"]
    changed = rlhf.train(small_args(resume="runs/run", reward_epochs=1))
    assert names() == ["sft", "preferences", "reward_model", "ppo-adaptive-6", "ppo-none"]
    assert "reward_model: made anew, for other settings" in capsys.readouterr().out
    assert not same(copied, changed)


# --- Your own texts and labels ---


def write_preferences() -> str:
    pairs = [
        {
            "prompt": f"How is the {color} house, {name}?" if name else f"And the {color} one?",
            "chosen": f"The {color} house is fine.",
            "rejected": f"The {color} house is bad, very bad.",
        }
        for color in ("red", "blue", "green")
        for name in ("Ann", "Bob", "", "Cy", "Di", "Ed", "Flo")
    ]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    return "p.jsonl"


def test_own_texts_and_labels_run_without_gold(capsys):
    run = rlhf.train(small_args(preferences=write_preferences(), kl_mode="none"))
    assert "objective/gold" not in run["results"]["sft"] and list(run["quality"]) == ["accuracy"]
    assert not any("gold" in name for row in run["updates"]["ppo-none"] for name in row)
    table = capsys.readouterr().out
    assert "proxy" in table and " gold " not in table and "house" in table


def test_own_vocabulary_lengths_and_held_out_pairs():
    task = rlhf.own_task(small_args(preferences=write_preferences()))
    assert {"house", "ann", "?", ".", "<stop>"} <= set(task.words)
    queries, chosen, rejected = task.labelled
    assert queries.shape == (21, 1 + 8)  # <bos> how is the green house , ann ?
    assert chosen.shape == rejected.shape == (21, task.response_length) == (21, 10)
    assert (queries[:, 0] == BOS).all() and len(task.queries) == 21
    for answers, words in ((chosen, {"fine"}), (rejected, {"bad", "very"})):
        assert ((answers == task.stop).sum(1) == 1).all()
        assert all(words <= set(task.split_words(row)) for row in answers)
    # 21 pairs, 3 held out: the other 18 are the SFT's.
    assert len(task.documents) == 18
    for document, query, answer in zip(task.documents, queries, chosen, strict=False):
        expected = task.split_words(query) + task.split_words(answer)
        assert task.split_words(document) == expected


def test_a_long_prompt_leaves_room_for_its_answer():
    prompt = " ".join(f"w{i}" for i in range(3 * rlhf.LONGEST))
    pair = {"prompt": prompt, "chosen": "yes sir", "rejected": "no"}
    Path("p.jsonl").write_text("\n".join([json.dumps(pair)] * 14))
    task = rlhf.own_task(small_args(preferences="p.jsonl"))
    assert task.split_words(task.documents[0])[-3:] == ["yes", "sir", "<stop>"]
    assert task.documents.shape[1] == rlhf.LONGEST + 3


GOOD = '{"prompt": "p", "chosen": "a", "rejected": "b"}'


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[1, 2]",
        "3",
        '{"prompt": "p", "chosen": "a"}',
        '{"prompt": "p", "chosen": 3, "rejected": "b"}',
        '{"prompt": "p", "chosen": " ", "rejected": "b"}',
        '{"prompt": "p", "chosen": "a", "rejected": "A"}',
    ],
)
def test_a_bad_line_of_labels_is_reported_with_its_number(line):
    Path("p.jsonl").write_text("\n".join([GOOD] * 3 + ["", line] + [GOOD] * 20))
    with pytest.raises(ValueError, match=r"p\.jsonl, line 5: .*prompt, chosen and rejected"):
        rlhf.read_preferences("p.jsonl")


def test_labels_as_other_programs_write_them():
    """With an id per pair, a byte-order mark, and a line separator within a text."""
    pair = {"id": "secret", "prompt": "p", "chosen": "a\u2028c", "rejected": "b"}
    lines = "\r\n".join([json.dumps(pair, ensure_ascii=False)] * 14)
    Path("p.jsonl").write_text("\ufeff" + lines, "utf-8")
    assert rlhf.read_preferences("p.jsonl") == [[["p"], ["a", "c"], ["b"]]] * 14
    assert rlhf.own_task(small_args(preferences="p.jsonl")).words[3:] == ["a", "b", "c", "p"]


# --- The command line ---


def command_line(monkeypatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *line.split()])
    try:
        rlhf.main()
    except SystemExit as leaving:
        return leaving.code
    return 0


@pytest.mark.parametrize(
    "line",
    [
        "--num-minibatches 3",
        "--batch-size 0",
        "--learning-rate -1",
        "--gamma 1.5",
        "--kl-coef -0.1",
        "--num-pairs 5",
        "--kl-horizon 20",
        "--kl-coef 0",
        "--kl-mode none --compare --kl-horizon 20",
        "--temperature 0",
        "--preferences absent.jsonl",
        "--resume absent",
        pytest.param(
            "--device cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_is_a_sentence_and_code_2(monkeypatch, capsys, line):
    assert command_line(monkeypatch, f"{line} --run-name x") == 2
    error = capsys.readouterr().err
    assert "Error" in error or "error" in error
    assert "Traceback" not in error and not list(Path().rglob("checkpoint.pt"))


def test_too_few_labels_and_what_is_no_text_are_refused(monkeypatch, capsys):
    Path("few.jsonl").write_text(GOOD)
    assert command_line(monkeypatch, "--preferences few.jsonl --run-name a") == 2
    assert "holds 1 comparisons; at least 14" in capsys.readouterr().err
    Path("bytes.jsonl").write_bytes(b"\xff\xfe\xff")
    assert command_line(monkeypatch, "--preferences bytes.jsonl --run-name b") == 2
    assert "utf-8" in capsys.readouterr().err


def test_a_resumed_run_has_its_own_settings_but_for_flags_beside_it(copied, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(rlhf, "train", asked.append)
    assert command_line(monkeypatch, "--resume runs/run --kl-coef 0.25") == 0
    assert asked[0] == small_args(resume="runs/run", kl_coef=0.25)
    monkeypatch.undo()


def test_a_folder_that_holds_a_run_is_left_alone(copied, monkeypatch, capsys):
    before = Path("runs/run/sft/checkpoint.pt").read_bytes()
    assert command_line(monkeypatch, "--run-name run") == 2
    assert "holds a run: add --resume runs/run" in capsys.readouterr().err
    assert Path("runs/run/sft/checkpoint.pt").read_bytes() == before


def test_details_are_printed_with_the_settings_in_force(monkeypatch, capsys):
    assert command_line(monkeypatch, "--details --target-kl 3") == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    found = {row[0].strip("| "): (row[1], row[2]) for row in rows}
    numbers = {int(name[1:-3]) for name in found if name.endswith("/21")}
    assert numbers == set(range(1, 22)) - {6, 12}  # which the top of the file explains
    core = {int(name[:-3]) for name in found if name.endswith("/37")}
    assert core == {1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13}
    assert found["R20/21"] == ("adaptive KL", "target_kl=3.0, kl_horizon=500")
    lines = SCRIPT.read_text().splitlines()
    assert all(row[1] in lines[int(row[3].strip(" |")) - 1] for row in rows)


def test_weights_and_biases_offline_run_can_be_read_back():
    """In a process of its own, since wandb keeps state."""
    sizes = "--sft-documents 200 --sft-steps 5 --num-pairs 140 --num-updates 2 --batch-size 16"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *f"{sizes} --track --run-name mine".split()],
        capture_output=True, text=True,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (log,) = Path().glob("**/offline-run-*/run-*.wandb")
    values = {}
    for record_ in wandb_records(log):
        if record_.WhichOneof("record_type") == "history":
            for item in record_.history.item:
                key = item.key or "/".join(item.nested_key)
                values.setdefault(key, []).append(json.loads(item.value_json))
    saved = torch.load("runs/mine/ppo-adaptive-6/checkpoint.pt", weights_only=True)
    logged = [x for x in values["ppo-adaptive-6/objective/kl"]]
    assert logged == pytest.approx([row["objective/kl"] for row in saved["updates"]], abs=1e-5)
    assert len(values["sft/losses/loss"]) == 5


@pytest.mark.slow
def test_script_copied_alone_runs_and_is_resumed_from_the_command_line():
    Path("alone.py").write_bytes(SCRIPT.read_bytes())
    sizes = "--sft-documents 100 --sft-steps 8 --num-pairs 14 --num-updates 2 --batch-size 8"
    for line in (f"--run-name x {sizes}", "--resume runs/x --kl-mode fixed"):
        done = subprocess.run(
            [sys.executable, "alone.py", *line.split()], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert "sft: taken from" in done.stdout and "ppo-fixed-0.5" in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_agrees_with_cpu(model):
    agent = Agent(model)
    rollout = make_rollout(agent)
    loss, gradients = loss_and_gradients(agent, rollout, Args())
    on_gpu = Rollout(*(x.cuda() for x in rollout))
    gpu_loss, gpu_gradients = loss_and_gradients(copy.deepcopy(agent).cuda(), on_gpu, Args())
    torch.testing.assert_close(gpu_loss.cpu(), loss, atol=1e-4, rtol=1e-4)
    for a, b in zip(gradients, gpu_gradients, strict=True):
        torch.testing.assert_close(b.cpu(), a, atol=1e-4, rtol=1e-3)
    run = rlhf.train(small_args(device="cuda"))
    again = rlhf.train(small_args(device="cuda", resume="runs/run"))
    assert run["results"] == again["results"]
