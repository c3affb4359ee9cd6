"""The models, the math and the details R1-R21 of ppo_rlhf_toy.py."""

import ast
import copy
import dataclasses
import itertools
import math
import random
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import ppo_rlhf_toy as rlhf
from ppo_rlhf_toy import BOS, PAD, Agent, Args, RewardModel, Rollout, StopRequest, TinyGPT

torch.set_num_threads(1)
SOURCE = Path(rlhf.__file__).read_text()
TOKEN = {word: index for index, word in enumerate(rlhf.TOY_WORDS)}
QUERY = "<bos> anna on the hotel :"


def tokens(text: str) -> torch.Tensor:
    return torch.tensor([[TOKEN[word] for word in text.split()]])


def random_queries(count: int, seed: int = 0) -> torch.Tensor:
    queries = torch.tensor([[TOKEN[w] for w in query] for query in rlhf.TOY_QUERIES])
    generator = torch.Generator().manual_seed(seed)
    return queries[torch.randint(len(queries), (count,), generator=generator)]


def random_words(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, len(rlhf.TOY_WORDS), (rows, length), generator=generator)


@pytest.fixture
def model() -> TinyGPT:
    """An untrained language model with weights large enough to tell inputs apart."""
    torch.manual_seed(0)
    model = TinyGPT(len(rlhf.TOY_WORDS), 24)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


@pytest.fixture
def small(monkeypatch, tmp_path) -> Args:
    """Settings of a run of a few seconds."""
    monkeypatch.setattr(rlhf, "NUM_SAMPLES", 64)
    monkeypatch.setattr(rlhf, "EVALUATION_SAMPLES", 32)
    return Args(
        output_dir=str(tmp_path),
        run_name="run",
        sft_documents=200,
        sft_steps=10,
        num_pairs=42,
        num_updates=2,
        batch_size=16,
        checkpoint_interval=1,
        contrast=False,
    )


@pytest.fixture
def stages(small):
    """Task, SFT model, preferences and reward model of a small run."""
    Path(small.run_dir).mkdir()
    task = rlhf.toy_task(small)
    sft = rlhf.train_sft(small, task, StopRequest())
    preferences = rlhf.make_preferences(small, task, sft)
    reward_model, _ = rlhf.train_reward_model(small, task, sft, preferences, StopRequest())
    return task, sft, preferences, reward_model


def run_ppo(args, stages):
    task, sft, preferences, reward_model = stages
    judges = (reward_model, reward_model)
    return rlhf.train_ppo(args, task, sft, *judges, preferences, StopRequest())


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
        ("the room was superb", 2 * math.tanh(2 / 3) + 0.4 - 1),
        ("the plot was superb .", 2 * math.tanh(2 / 3) - 0.5),
        ("superb superb superb superb .", -4 - 0.5 * 3),
        ("the room was superb and the room was superb .", 2 * math.tanh(4 / 3) + 0.4 - 1),
        ("the room was superb and and the bed was nice .", 2 * math.tanh(1) + 0.8 - 4 * 2 / 10),
        ("the room was superb and .", 2 * math.tanh(2 / 3) + 0.4 - 4 / 5),
        ("recommended the room was superb .", 2 * math.tanh(2 / 3) + 0.4 - 4 / 5),
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
        parsed = rlhf.parse_review("movie", words)
        assert len(words) <= 18 and set(words) <= set(rlhf.TOY_WORDS)
        assert parsed["off_topic"] == 0
        if parsed["stopped"]:
            assert parsed["junk"] == 0 and parsed["repeats"] == 0 and parsed["aspects"] >= 1
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
    queries, chosen, rejected = preferences.train
    assert task.gold(queries, chosen).mean() > task.gold(queries, rejected).mean() + 0.5


def test_reward_model_and_auditor_learn_from_their_own_comparisons(small, stages, monkeypatch):
    task, sft, preferences, _ = stages
    before, seen = copy.deepcopy(sft.state_dict()), set()
    score = RewardModel.score

    def recording(self, texts):
        if torch.is_grad_enabled():
            seen.update(map(tuple, texts.tolist()))
        return score(self, texts)

    monkeypatch.setattr(RewardModel, "score", recording)
    for auditor, (queries, *answers) in ((False, preferences.train), (True, preferences.held_out)):
        seen.clear()
        rlhf.train_reward_model(small, task, sft, preferences, StopRequest(), auditor)
        texts = torch.cat([torch.cat([queries, x], 1) for x in answers])
        assert seen == set(map(tuple, texts.tolist()))
    assert all(torch.equal(x, before[name]) for name, x in sft.state_dict().items())


def test_sft_warms_up_decays_and_clips_the_gradient(small, monkeypatch):
    steps = []
    original = torch.optim.AdamW.step

    def spy(self, *a):
        (group,) = self.param_groups
        norm = torch.cat([x.grad.flatten() for x in group["params"]]).norm().item()
        steps.append((group["lr"], norm))
        return original(self, *a)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    monkeypatch.setattr(rlhf, "WARMUP_STEPS", 4)
    monkeypatch.setattr(rlhf, "SFT_GRAD_NORM", 0.01)
    rlhf.train_sft(small, rlhf.toy_task(small), StopRequest())
    rates = [lr / small.sft_learning_rate for lr, _ in steps]
    warmed = [1.0 * 1 / 4, 0.9 * 2 / 4, 0.8 * 3 / 4, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert rates == pytest.approx(warmed)
    assert [norm for _, norm in steps] == pytest.approx([0.01] * 10, rel=1e-3)


def test_gold_is_in_standard_deviations_of_the_sft_samples(small, stages):
    task, _, preferences, _ = stages
    queries, responses = preferences.samples
    gold = task.gold(queries, responses).numpy()
    words = rlhf.describe(task, queries[:9], responses[:9], preferences)
    expected = (gold[:9].mean() - gold.mean()) / gold.std()
    assert words["objective/gold"] == pytest.approx(expected, abs=1e-5)


def test_evaluated_kl_is_that_of_the_words_up_to_the_stop(small, stages):
    task, sft, preferences, reward_model = stages
    policy = copy.deepcopy(sft)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.05 * torch.randn_like(weight)
    metrics, _ = rlhf.evaluate(small, task, policy, sft, reward_model, preferences)
    generator = rlhf.stage_generator(small.seed, "evaluate", rank=0)
    queries = task.sample_queries(rlhf.EVALUATION_SAMPLES, generator)
    responses = rlhf.write_answers(small, task, policy, queries, generator)
    total = 0.0
    for query, response in zip(queries, responses, strict=True):
        words = response[response != PAD]  # one text at a time, nothing to mask
        judged = (query[None], words[None], small.temperature)
        (p,), _ = Agent(policy, None).get_action_and_value(*judged)
        (q,), _ = Agent(sft, None).get_action_and_value(*judged)
        total += (p.exp() * (p - q)).sum().item()
    assert metrics["objective/kl"] == pytest.approx(total / len(queries), rel=1e-4)


def test_sft_loss_is_the_surprise_at_each_next_word(model):
    words = random_words(3, 6)
    logprobs = model.logits(model(words[:, :5])[0]).log_softmax(-1)
    expected = -logprobs.gather(2, words[:, 1:, None]).mean()
    loss = rlhf.language_model_loss(model, rlhf.pad_rows(words.tolist(), 9))
    torch.testing.assert_close(loss, expected)


# --- R1 to R13: models, sampling, reward model ---


def test_r1_query_changes_score_and_values_and_each_response_token_has_a_value(model):
    agent, reward = Agent(model, RewardModel(model)), RewardModel(model)
    responses = random_words(4, 7)
    first, second = random_queries(4, seed=1), random_queries(4, seed=2)
    outputs = []
    for queries in (first, second):
        _, values = agent.get_action_and_value(queries, responses, 1.0)
        outputs.append((reward.score(torch.cat([queries, responses], 1)), values))
    assert outputs[0][1].shape == (4, 7)
    differs = (first != second).any(1)
    assert (outputs[0][0] != outputs[1][0])[differs].all()
    assert (outputs[0][1] != outputs[1][1])[differs].all()


def test_r1_values_and_logits_sit_one_position_before_their_token(model):
    agent = Agent(model, RewardModel(model))
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
    assert TOKEN["."] != PAD and rlhf.TOY_WORDS[PAD] == "<pad>"


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


def test_r3_padded_query_gets_the_same_response_as_a_short_one(model):
    short = random_words(3, 4)
    padded = rlhf.pad_rows(short.tolist(), 6)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    first = rlhf.sample_responses(model, short, 9, 1.0, generators[0])
    second = rlhf.sample_responses(model, padded, 9, 1.0, generators[1])
    assert torch.equal(first, second)


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


def test_sampling_follows_the_softmax_of_the_scaled_logits(model):
    queries = random_queries(1).expand(20_000, -1)
    drawn = rlhf.sample_responses(model, queries, 1, 0.7, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn.flatten(), minlength=len(rlhf.TOY_WORDS)) / 20_000
    expected = (model.logits(model(queries[:1])[0][0, -1]) / 0.7).softmax(-1)
    assert (share - expected).abs().max() < 4 * math.sqrt(0.25 / 20_000)


def test_r5_learning_rates_fall_linearly_and_never_reach_zero(small, stages):
    rows = [rlhf.load_file(Path(small.run_dir) / "reward-model.pt", "rows")["rows"]][0]
    rates = [row["charts/learning_rate"] for row in rows]
    steps = len(rates)
    expected = [small.reward_learning_rate * (1 - i / steps) for i in range(steps)]
    assert rates == pytest.approx(expected)
    _, updates = run_ppo(dataclasses.replace(small, anneal_lr=True), stages)
    rates = [row["charts/learning_rate"] for row in updates]
    assert rates == pytest.approx([5e-4, 2.5e-4])


def test_r6_processes_draw_from_different_seeds_at_the_documented_distance():
    first, second = (rlhf.stage_generator(1, "ppo", rank) for rank in (0, 1))
    assert second.initial_seed() - first.initial_seed() == 100_003
    assert not torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=second))
    other = rlhf.stage_generator(1, "sft", 0)
    assert other.initial_seed() != first.initial_seed()


def test_r6_processes_write_different_responses(small, stages, monkeypatch):
    proxies = set()
    for rank in (0, 1):
        monkeypatch.setattr(rlhf, "RANK", rank)
        _, (update,) = run_ppo(dataclasses.replace(small, num_updates=1), stages)
        proxies.add(update["objective/proxy"])
    assert len(proxies) == 2


def test_r7_score_is_that_of_the_last_real_token(model):
    reward = RewardModel(model)
    text = torch.cat([random_queries(4), random_words(4, 8)], 1)
    padded = torch.cat([text, torch.zeros(4, 5, dtype=torch.long)], 1)
    assert reward.score(text).shape == (4,)
    torch.testing.assert_close(reward.score(padded), reward.score(text))
    torch.testing.assert_close(reward.score(text), reward(padded)[:, 13])


def test_r8_reward_head_has_the_documented_spread():
    torch.manual_seed(0)
    reward = RewardModel(TinyGPT(10, 4, width=768, num_layers=1))
    assert reward.head.weight.std().item() == pytest.approx(0.03606, rel=0.1)
    assert reward.head.bias.item() == 0
    assert reward.gain.item() == 1 and reward.bias.item() == 0


def test_samples_that_all_score_the_same_are_one_sentence(monkeypatch):
    monkeypatch.setattr(rlhf, "score_texts", lambda *args: torch.full((8,), 0.5))
    model = types.SimpleNamespace(gain=torch.ones(1), bias=torch.zeros(1))
    with pytest.raises(rlhf.RunError, match="score the same"):
        rlhf.normalize_reward_model(model, ())


def test_r9_normalization_centers_scales_keeps_the_order_and_starts_anew(model):
    reward = RewardModel(model)
    samples = (random_queries(200), random_words(200, 9))
    before = rlhf.score_texts(reward, *samples)
    rlhf.normalize_reward_model(reward, samples)
    after = rlhf.score_texts(reward, *samples)
    assert after.mean().item() == pytest.approx(0, abs=1e-5)
    assert after.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(before.argsort(), after.argsort())
    with torch.no_grad():
        reward.gain.fill_(7.0)
        reward.bias.fill_(-3.0)
    rlhf.normalize_reward_model(reward, samples)
    torch.testing.assert_close(rlhf.score_texts(reward, *samples), after)


def test_r9_reward_model_is_normalized_before_and_after_training(small, stages, monkeypatch):
    task, sft, preferences, reward_model = stages
    scores = rlhf.score_texts(reward_model, *preferences.samples)
    assert scores.mean().item() == pytest.approx(0, abs=1e-4)
    assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    calls = []
    original = rlhf.normalize_reward_model
    monkeypatch.setattr(
        rlhf, "normalize_reward_model", lambda *a: (calls.append(1), original(*a))[1]
    )
    rlhf.train_reward_model(small, task, sft, preferences, StopRequest())
    assert len(calls) == 2


def test_r10_log_probabilities_are_those_of_sampling_at_a_temperature(model):
    agent, reference = Agent(model, None), Agent(model, None)
    queries, responses = random_queries(6), random_words(6, 9)
    words, _ = agent.get_action_and_value(queries, responses, 0.7)
    hidden, cache = model(queries)
    for t in range(9):  # token by token, as the sampler runs
        expected = (model.logits(hidden[:, -1]) / 0.7).log_softmax(-1)
        torch.testing.assert_close(words[:, t], expected, atol=1e-4, rtol=1e-4)
        hidden, cache = model(responses[:, t : t + 1], cache)
    ref_words, _ = reference.get_action_and_value(queries, responses, 0.7)
    assert rlhf.exact_kl(words, ref_words).abs().max() < 1e-6


def test_r11_initial_values_are_exactly_zero(model):
    _, values = Agent(model, None).get_action_and_value(random_queries(5), random_words(5, 9), 1.0)
    assert (values == 0).all()


def test_critic_from_the_reward_model_starts_with_its_scores(model):
    reward = RewardModel(model)
    agent = Agent(model, reward)
    queries, responses = random_queries(5), random_words(5, 9)
    _, values = agent.get_action_and_value(queries, responses, 1.0)
    torch.testing.assert_close(values, reward(torch.cat([queries, responses], 1))[:, 5:-1])
    values.sum().backward()
    assert agent.policy.word_embedding.weight.grad is None
    assert reward.head.weight.grad is None


def test_r13_no_dropout_even_in_training_mode(model):
    agent = Agent(model, RewardModel(model)).train()
    inputs = (random_queries(5), random_words(5, 9), 1.0)
    first, second = agent.get_action_and_value(*inputs), agent.get_action_and_value(*inputs)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not any(isinstance(module, nn.Dropout) for module in agent.modules())


# --- R14 to R21: policy training ---


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


def test_r14_a_missing_stop_replaces_the_score(small, stages):
    scores = {}
    for missing in (-1.0, -11.0):
        _, updates = run_ppo(dataclasses.replace(small, missing_stop_score=missing), stages)
        scores[missing] = updates[0]["objective/score"]
        no_stop = 1 - updates[0]["text/stop_rate"]
    assert 0 < no_stop < 1
    assert scores[-1.0] - scores[-11.0] == pytest.approx(10 * no_stop, abs=1e-4)


def capture_losses(monkeypatch):
    captured = {}
    originals = rlhf.policy_loss, rlhf.value_loss
    monkeypatch.setattr(
        rlhf,
        "policy_loss",
        lambda logratio, advantages, c: (
            captured.update(logratio=logratio, advantages=advantages),
            originals[0](logratio, advantages, c),
        )[1],
    )
    monkeypatch.setattr(
        rlhf,
        "value_loss",
        lambda new, old, returns, c: (
            captured.update(returns=returns, value_clip=c),
            originals[1](new, old, returns, c),
        )[1],
    )
    return captured


def test_r15_a_final_reward_reaches_back_undiscounted_but_for_lambda(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    rollout = make_rollout(Agent(model, None))
    rollout = rollout._replace(rewards=3.0 * rollout.last)
    args = Args(reward_whitening="off", advantage_whitening=False)
    rlhf.rollout_loss(Agent(model, None), rollout, args)
    to_go = rollout.mask.sum(1, keepdim=True) - 1 - torch.arange(10)
    expected = (3.0 * 0.95**to_go)[rollout.mask]
    torch.testing.assert_close(captured["advantages"], expected)
    torch.testing.assert_close(captured["returns"], expected)
    assert args.gamma == 1


def test_r15_the_next_value_is_that_of_the_next_word_and_0_after_the_last(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    agent = Agent(model, None)
    rollout = make_rollout(agent)._replace(values=torch.randn(8, 10))
    args = Args(reward_whitening="off", advantage_whitening=False, gae_lambda=0.0)
    rlhf.rollout_loss(agent, rollout, args)
    advantages = rollout.rewards - rollout.values
    advantages[:, :-1] += rollout.values[:, 1:] * ~rollout.last[:, :-1]
    torch.testing.assert_close(captured["advantages"], advantages[rollout.mask])


def test_r16_each_epoch_is_a_fresh_permutation_of_whole_responses(small, stages, monkeypatch):
    batches = []
    original = rlhf.rollout_loss
    monkeypatch.setattr(
        rlhf, "rollout_loss", lambda agent, mb, a: (batches.append(mb), original(agent, mb, a))[1]
    )
    steps = []
    adam_step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam, "step", lambda self, *a: (steps.append(1), adam_step(self, *a))[1]
    )
    args = dataclasses.replace(small, num_updates=1)
    run_ppo(args, stages)
    assert len(batches) == len(steps) == args.update_epochs * args.num_minibatches
    epochs = [
        torch.cat([mb.logprobs.sum(1) for mb in batches[i : i + args.num_minibatches]])
        for i in range(0, len(batches), args.num_minibatches)
    ]
    for epoch in epochs:
        assert len(epoch) == args.batch_size
        assert torch.equal(epoch.sort().values, epochs[0].sort().values)
    assert not torch.equal(epochs[0], epochs[1])
    assert all(len(mb.queries) == args.minibatch_size for mb in batches)


def test_r17_rewards_are_the_kl_penalty_plus_one_score():
    torch.manual_seed(0)
    logprobs, ref_logprobs, scores = torch.randn(3, 6), torch.randn(3, 6), torch.randn(3)
    last = torch.zeros(3, 6, dtype=torch.bool)
    last[:, 4] = True
    rewards = rlhf.penalized_rewards(scores, logprobs, ref_logprobs, last, 0.3)
    kl = (logprobs - ref_logprobs).sum(1)
    torch.testing.assert_close(rewards.sum(1), scores - 0.3 * kl)
    same = rlhf.penalized_rewards(scores, logprobs, logprobs, last, 0.3)
    # Exactly one score per sequence, at its last word.
    assert torch.equal(same[:, 4], scores) and (same[:, [0, 1, 2, 3, 5]] == 0).all()


def test_r17_a_response_earns_its_score_minus_beta_times_the_logged_kl(small, stages, monkeypatch):
    batches = []
    original = rlhf.rollout_loss
    monkeypatch.setattr(
        rlhf, "rollout_loss", lambda agent, mb, a: (batches.append(mb), original(agent, mb, a))[1]
    )
    settings = {"kl_mode": "fixed", "kl_coef": 3.0, "learning_rate": 0.01, "update_epochs": 1}
    _, updates = run_ppo(dataclasses.replace(small, **settings), stages)
    for row, minibatches in zip(updates, (batches[:4], batches[4:]), strict=True):
        earned = torch.cat([mb.rewards.where(mb.mask, 0.0).sum(1) for mb in minibatches])
        expected = row["objective/score"] - 3.0 * row["objective/kl"]
        assert earned.mean().item() == pytest.approx(expected, abs=1e-3)
        texts = torch.cat([torch.cat([mb.queries, mb.responses], 1) for mb in minibatches])
        scores = stages[3].score(texts)
        assert row["objective/proxy"] == pytest.approx(scores.mean().item(), abs=1e-4)
    assert updates[1]["objective/kl"] > 0.01


def test_r18_whitening_by_the_catalogue():
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    expected = torch.tensor([1.93096, 2.46548, 3.0, 4.60357])
    torch.testing.assert_close(rlhf.whiten(x, shift_mean=False), expected, atol=1e-5, rtol=0)
    white = rlhf.whiten(x)
    assert white.mean().item() == pytest.approx(0, abs=1e-6)
    assert white.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_r18_rewards_and_advantages_are_whitened_per_minibatch(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    agent = Agent(model, None)
    rollout = make_rollout(agent)
    rlhf.rollout_loss(agent, rollout, Args())
    assert captured["advantages"].mean().item() == pytest.approx(0, abs=1e-5)
    assert captured["advantages"].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    returns = captured["returns"]
    # Scaled rewards forget the scale of the rewards; without whitening they keep it.
    louder = rollout._replace(rewards=10 * rollout.rewards)
    rlhf.rollout_loss(agent, louder, Args())
    torch.testing.assert_close(captured["returns"], returns)
    rlhf.rollout_loss(agent, louder, Args(reward_whitening="off"))
    off = captured["returns"]
    std = louder.rewards[louder.mask].std(correction=0)
    torch.testing.assert_close(off / std, returns, atol=1e-4, rtol=1e-4)
    rlhf.rollout_loss(agent, rollout, Args(reward_whitening="original"))
    assert not torch.allclose(captured["returns"], returns)


def test_whitening_that_restores_the_mean_pays_by_the_word_and_scaling_does_not(model, monkeypatch):
    """A score at the end only: words without reward must stay without, however many there are."""
    captured = capture_losses(monkeypatch)
    agent = Agent(model, None)
    rollout = make_rollout(agent)
    rollout = rollout._replace(rewards=2.0 * rollout.last)
    settings = {"advantage_whitening": False, "gae_lambda": 1.0}
    total = {}
    for mode in ("scale", "original"):
        rlhf.rollout_loss(agent, rollout, Args(reward_whitening=mode, **settings))
        returns = torch.zeros(rollout.mask.shape)
        returns[rollout.mask] = captured["returns"]
        total[mode] = returns[:, 0]
    lengths = rollout.mask.sum(1).float()
    assert torch.allclose(total["scale"], total["scale"][:1])
    rewards = rollout.rewards[rollout.mask]
    mean, std = rewards.mean(), rewards.std(correction=0)
    toll = mean * (1 - 1 / std)  # of every word
    torch.testing.assert_close(total["original"], lengths * toll + 2 / std, atol=1e-4, rtol=1e-4)
    assert toll.abs() > 0.01


def test_r19_value_clipping_by_the_catalogue():
    for value, loss, has_gradient in ((1.0, 0.64, False), (-1.0, 4.0, True)):
        new = torch.tensor([value], requires_grad=True)
        result = rlhf.value_loss(new, torch.zeros(1), torch.ones(1), 0.2)
        assert result.item() == pytest.approx(loss / 2)
        result.backward()
        assert (new.grad.item() != 0) == has_gradient


def test_r19_the_value_clip_range_is_its_own(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    agent = Agent(model, None)
    rollout = make_rollout(agent)
    moved = Agent(model, None)
    nn.init.constant_(moved.value_head.bias, 1.0)

    def v_loss(**settings):
        return rlhf.rollout_loss(moved, rollout, Args(**settings))[1]["losses/value_loss"]

    assert v_loss(clip_coef=0.2) == v_loss(clip_coef=0.4)
    assert v_loss(value_clip_coef=0.2) != v_loss(value_clip_coef=None)
    v_loss(value_clip_coef=0.3)
    assert captured["value_clip"] == 0.3


@pytest.mark.parametrize(
    ("kl", "expected"), [(12.0, 0.151536), (6.0, 0.15), (-3.0, 0.15 * (1 - 0.01024))]
)
def test_r20_beta_moves_in_proportion_to_the_clipped_error(kl, expected):
    assert rlhf.proportional_kl_coef(0.15, kl, 6.0, 512, 10_000) == pytest.approx(expected)


def test_r20_the_controller_runs_once_per_update_on_the_rollout_kl(small, stages):
    _, updates = run_ppo(dataclasses.replace(small, num_updates=3), stages)
    for before, after in itertools.pairwise(updates):
        expected = rlhf.proportional_kl_coef(
            before["objective/kl_coef"], before["objective/kl"], 6.0, 16, 500
        )
        assert after["objective/kl_coef"] == pytest.approx(expected)
    for mode, beta in (("fixed", 0.5), ("none", 0.0)):
        _, updates = run_ppo(dataclasses.replace(small, kl_mode=mode), stages)
        assert [row["objective/kl_coef"] for row in updates] == [beta, beta]


@pytest.mark.parametrize(("form", "moved"), [("pytorch", 0.5), ("tensorflow", 0.030653)])
def test_r21_first_step_of_both_adams(form, moved):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, eps=1e-5)
    if form == "tensorflow":
        optimizer.param_groups[0]["eps"] = rlhf.tensorflow_adam_eps(1e-5, 1)
    weight.grad = torch.full_like(weight, 1e-5)
    optimizer.step()
    assert -weight.item() == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize(
    ("step", "eps"), [(1, 3.16e-7), (10, 9.98e-7), (100, 3.09e-6), (1000, 7.95e-6)]
)
def test_r21_epsilon_by_the_catalogue(step, eps):
    # PyTorch's epsilon 1e-5 does what TensorFlow's `eps` would do.
    assert rlhf.tensorflow_adam_eps(eps, step) == pytest.approx(1e-5, rel=5e-3)


def test_r21_tensorflow_adam_written_out():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.1, eps=1e-5)
    expected, m, v = torch.zeros(5, dtype=torch.float64), 0, 0
    for t in range(1, 8):
        gradient = 1e-5 * torch.randn(5, dtype=torch.float64)
        optimizer.param_groups[0]["eps"] = rlhf.tensorflow_adam_eps(1e-5, t)
        weight.grad = gradient
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        rate = 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        expected = expected - rate * m / (v.sqrt() + 1e-5)
        torch.testing.assert_close(weight.data, expected)


def test_r21_training_uses_the_chosen_adam(small, stages, monkeypatch):
    used = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam,
        "step",
        lambda self, *a: (used.append(self.param_groups[0]["eps"]), step(self, *a))[1],
    )
    run_ppo(small, stages)
    expected = [rlhf.tensorflow_adam_eps(1e-5, t) for t in range(1, 33)]
    assert used == pytest.approx(expected)
    used.clear()
    run_ppo(dataclasses.replace(small, adam="pytorch"), stages)
    assert used == [1e-5] * 32


# --- Bookkeeping of tokens, and the core details ---


def loss_and_gradients(agent, rollout, args):
    agent.zero_grad()
    loss, _ = rlhf.rollout_loss(agent, rollout, args)
    loss.backward()
    return loss, [p.grad.clone() for p in agent.parameters() if p.grad is not None]


@pytest.mark.parametrize("whitening", ["scale", "original", "off"])
def test_padding_contents_change_neither_loss_nor_gradients(model, whitening):
    agent = Agent(model, None)
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


def test_the_pad_embedding_is_never_used(model):
    texts = rlhf.pad_rows(torch.cat([random_queries(3), random_words(3, 5)], 1).tolist(), 24)
    loss = rlhf.language_model_loss(model, texts)
    loss.backward()
    assert (model.word_embedding.weight.grad[PAD] == 0).all()
    with torch.no_grad():
        model.word_embedding.weight[PAD] = 1e3
    assert torch.equal(rlhf.language_model_loss(model, texts), loss)


def test_ratio_is_the_new_probability_over_the_old_one(model, monkeypatch):
    captured = capture_losses(monkeypatch)
    agent = Agent(model, None)
    rollout, shift = make_rollout(agent), torch.randn(8, 10)
    rlhf.rollout_loss(agent, rollout._replace(logprobs=rollout.logprobs + shift), Args())
    torch.testing.assert_close(captured["logratio"], -shift[rollout.mask], atol=1e-5, rtol=0)


def test_ratio_is_one_on_the_first_minibatch_and_stays_one_at_learning_rate_zero(small, stages):
    args = dataclasses.replace(small, learning_rate=1e-30, temperature=0.7, num_updates=1)
    _, updates = run_ppo(args, stages)
    assert updates[0]["losses/clipfrac"] == 0
    assert updates[0]["losses/approx_kl"] < 1e-5
    assert abs(updates[0]["losses/old_approx_kl"]) < 1e-5


def test_kl_is_zero_at_first_then_positive_and_the_reference_stays(small, stages):
    _, sft, _, reward_model = stages
    frozen = [copy.deepcopy(m.state_dict()) for m in (sft, reward_model)]
    agent, updates = run_ppo(dataclasses.replace(small, num_updates=3), stages)
    assert abs(updates[0]["objective/kl"]) < 1e-3
    assert updates[0]["objective/kl_exact"] < 1e-3
    assert updates[-1]["objective/kl_exact"] > 1e-3
    for model, before in zip((sft, reward_model), frozen, strict=True):
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert any(
        not torch.equal(a, b)
        for a, b in zip(agent.policy.parameters(), sft.parameters(), strict=True)
    )


def test_kl_estimates_agree_with_the_exact_kl(model):
    torch.manual_seed(0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.01 * torch.randn_like(weight)
    queries = random_queries(1).expand(4000, -1)
    responses = rlhf.sample_responses(model, queries, 4, 1.0, torch.Generator().manual_seed(0))
    with torch.no_grad():
        words, _ = Agent(model, None).get_action_and_value(queries, responses, 1.0)
        ref_words, _ = Agent(other, None).get_action_and_value(queries, responses, 1.0)
    difference = rlhf.log_probability(words, responses) - rlhf.log_probability(ref_words, responses)
    k1, exact = difference.sum(1), rlhf.exact_kl(words, ref_words).sum(1)
    assert abs(k1.mean() - exact.mean()) < 4 * k1.std() / math.sqrt(4000)
    assert exact.min() >= 0


def test_without_masking_the_episode_is_the_whole_sample(small, stages, monkeypatch):
    rollouts = []
    original = rlhf.rollout_loss
    monkeypatch.setattr(
        rlhf, "rollout_loss", lambda agent, mb, a: (rollouts.append(mb), original(agent, mb, a))[1]
    )
    run_ppo(dataclasses.replace(small, mask_after_stop=False), stages)
    for mb in rollouts:
        assert mb.mask.all() and mb.last[:, -1].all() and (mb.responses != PAD).all()
    rollouts.clear()
    run_ppo(small, stages)
    assert (mb.last.sum(1) == 1).all()
    stop = TOKEN["."]
    for mb in rollouts:
        assert torch.equal(mb.mask, mb.responses != PAD)
        lengths = mb.mask.sum(1)
        ends = mb.responses.gather(1, lengths[:, None] - 1).squeeze(1)
        assert ((ends == stop) | (lengths == 18)).all()
        assert (mb.responses.where(~mb.mask, PAD) == PAD).all()


def test_ptx_mixes_in_the_gradient_of_the_sft_loss(small, stages):
    plain, _ = run_ppo(dataclasses.replace(small, num_updates=1), stages)
    mixed, _ = run_ppo(dataclasses.replace(small, num_updates=1, ptx_coef=20.0), stages)
    task, *_ = stages
    documents = task.documents[:64]
    with torch.no_grad():
        assert rlhf.language_model_loss(mixed.policy, documents) < rlhf.language_model_loss(
            plain.policy, documents
        )


def test_overall_loss_is_policy_loss_plus_weighted_value_loss(model):
    agent = Agent(model, None)
    nn.init.normal_(agent.value_head.weight)
    for vf_coef in (0.1, 0.7):
        loss, metrics = rlhf.rollout_loss(agent, make_rollout(agent), Args(vf_coef=vf_coef))
        expected = metrics["losses/policy_loss"] + vf_coef * metrics["losses/value_loss"]
        assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_logged_losses_are_means_over_all_minibatches(small, stages, monkeypatch):
    seen = []
    original = rlhf.rollout_loss

    def spy(agent, mb, args):
        loss, metrics = original(agent, mb, args)
        seen.append(dict(metrics))
        return loss, metrics

    monkeypatch.setattr(rlhf, "rollout_loss", spy)
    _, (row,) = run_ppo(dataclasses.replace(small, num_updates=1), stages)
    for name in ("losses/policy_loss", "losses/approx_kl", "losses/clipfrac", "advantages/std"):
        assert row[name] == pytest.approx(sum(x[name] for x in seen) / 16), name
    assert len(seen) == 16 and row["advantages/std"] != pytest.approx(1, abs=1e-3)


def test_gradient_norm_is_clipped_over_all_weights(small, stages, monkeypatch):
    norms = []
    step = torch.optim.Adam.step

    def spy(self, *a):
        grads = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        return step(self, *a)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    run_ppo(dataclasses.replace(small, max_grad_norm=0.01, num_updates=1), stages)
    assert max(norms) <= 0.01 * 1.001
    norms.clear()
    run_ppo(dataclasses.replace(small, max_grad_norm=None, num_updates=1), stages)
    assert max(norms) > 0.02


def test_gradients_are_averaged_over_processes_before_each_step(small, stages, monkeypatch):
    averaged = []
    monkeypatch.setattr(rlhf, "average_gradients", averaged.append)
    agent, _ = run_ppo(dataclasses.replace(small, num_updates=1), stages)
    assert len(averaged) == 16 and all(x is agent for x in averaged)
    task, sft, preferences, _ = stages
    averaged.clear()
    again = rlhf.train_sft(small, task, StopRequest())
    assert len(averaged) == small.sft_steps and all(x is again for x in averaged)
    averaged.clear()
    judge, _ = rlhf.train_reward_model(small, task, sft, preferences, StopRequest())
    assert len(averaged) == 2 * 2 and all(x is judge for x in averaged)  # 36 pairs by 32, twice


def test_every_gradient_is_averaged(model, monkeypatch):
    monkeypatch.setattr(rlhf, "WORLD_SIZE", 2)
    monkeypatch.setattr(rlhf, "average_over_processes", lambda x: x.fill_(7.0))
    rlhf.language_model_loss(model, random_words(3, 6)).backward()
    rlhf.average_gradients(model)
    assert all((x.grad == 7).all() for x in model.parameters())


def test_adam_has_the_given_epsilon_and_all_weights_once(small, stages, monkeypatch):
    made = []
    original = torch.optim.Adam.__init__
    monkeypatch.setattr(
        torch.optim.Adam,
        "__init__",
        lambda self, *a, **k: (made.append(self), original(self, *a, **k))[1],
    )
    agent, _ = run_ppo(dataclasses.replace(small, adam="pytorch", critic="reward-model"), stages)
    (group,) = made[-1].param_groups
    assert group["eps"] == 1e-5 and group["weight_decay"] == 0
    assert {id(p) for p in group["params"]} == {id(p) for p in agent.parameters()}


def test_losses_by_table_and_gae_by_hand():
    logratio = torch.tensor([math.log(1.5), math.log(0.5), math.log(1.5), math.log(0.5)])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    logratio.requires_grad_(True)
    loss = rlhf.policy_loss(logratio, advantages, 0.2)
    assert loss.item() == pytest.approx((-1.2 + 0.8 + 1.5 - 0.5) / 4)
    loss.backward()
    assert (logratio.grad != 0).tolist() == [False, False, True, True]
    advantages, returns = rlhf.gae(
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([0.5, 0.4, 0.3]),
        torch.tensor([0.4, 0.3, 0.2]),
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([0.0, 1.0, 0.0]),
        0.99,
        0.95,
    )
    assert advantages.tolist() == pytest.approx([2.4008, 1.6, 2.898], abs=1e-4)
    assert returns.tolist() == pytest.approx([2.9008, 2.0, 3.198], abs=1e-4)


def test_comparison_loss_is_that_of_bradley_terry():
    loss = rlhf.comparison_loss(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]))
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 2
    assert loss.item() == pytest.approx(expected)


# --- Evaluation, warnings, details ---


def test_best_of_n_kl_and_groups(small, stages, monkeypatch):
    assert [round(rlhf.best_of_n_kl(n), 2) for n in (1, 4, 16, 64)] == [0.0, 0.64, 1.84, 3.17]
    monkeypatch.setattr(rlhf, "BEST_OF_N", (1, 4, 16))
    monkeypatch.setattr(rlhf, "BEST_OF_N_QUERIES", 8)
    task, sft, preferences, reward_model = stages
    results = rlhf.best_of_n(small, task, sft, reward_model, preferences)
    proxy = [results[n]["objective/proxy"] for n in (1, 4, 16)]
    assert proxy == sorted(proxy) and proxy[2] > proxy[0] + 1


@pytest.mark.parametrize("method", ["rl", "bon"])
def test_gao_fit_recovers_its_own_curve(method):
    kl = [0.5, 1.0, 4.0, 9.0, 20.0]
    bend = (lambda d: math.log(d)) if method == "rl" else (lambda d: d)
    gold = [math.sqrt(x) * (1.3 - 0.4 * bend(math.sqrt(x))) for x in kl]
    assert rlhf.gao_fit(kl, gold, method) == pytest.approx((1.3, 0.4))


def healthy(**changes):
    return {
        "losses/clipfrac": 0.1,
        "losses/approx_kl": 0.01,
        "objective/kl": 6.0,
        "objective/score_std": 1.0,
        "objective/proxy": 0.0,
        "objective/disagreement": 0.3,
        "text/repetition": 0.1,
    } | changes


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"losses/clipfrac": 0.6}, "clipfrac"),
        ({"losses/approx_kl": 2.0}, "approx_kl"),
        ({"objective/kl": 80.0}, "kl"),
        ({"objective/score_std": 0.0}, "scores"),
        ({"objective/proxy": 2.0, "objective/disagreement": 0.9}, "hacking"),
        ({"objective/proxy": 2.0, "text/repetition": 0.6}, "hacking"),
    ],
)
def test_each_health_warning_has_its_cause(changes, cause):
    assert rlhf.rlhf_warnings([healthy()] * 20) == {}
    assert rlhf.rlhf_warnings([healthy()] * 20 + [healthy(**{"objective/proxy": 2.0})] * 5) == {}
    assert set(rlhf.rlhf_warnings([healthy()] * 20 + [healthy(**changes)] * 5)) == {cause}


def test_equal_rewards_give_a_warning_in_a_run(small, stages, monkeypatch, capsys):
    monkeypatch.setattr(
        RewardModel, "score", lambda self, texts: torch.zeros(len(texts), device=texts.device)
    )
    run_ppo(dataclasses.replace(small, missing_stop_score=0.0), stages)
    assert "all responses have the same score" in capsys.readouterr().out


def test_every_detail_stands_in_the_script_exactly_once():
    tags = re.findall(r"# Detail (\w+)/(\d+)", SOURCE)
    numbers = sorted(int(number) for number, total in tags if total == "37")
    assert numbers == list(range(1, 38))
    rlhf_numbers = sorted(int(number[1:]) for number, total in tags if total == "21")
    assert rlhf_numbers == list(range(1, 22))
    rows = rlhf.detail_table(Args(), SOURCE)
    assert sum("/" in row[0] for row in rows) == 58
    values = {row[0]: row[2] for row in rows}
    assert "target_kl=6.0" in values["R20/21"] and values["R12/21"].startswith("not here: ")


def test_script_imports_no_sibling_and_documents_every_setting():
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not any(name.startswith("ppo_") for name in imported)
    (args,) = [
        n for n in ast.parse(SOURCE).body if isinstance(n, ast.ClassDef) and n.name == "Args"
    ]
    fields = [i for i, node in enumerate(args.body) if isinstance(node, ast.AnnAssign)]
    for i in fields:
        assert isinstance(args.body[i + 1], ast.Expr), args.body[i].target.id
        name = args.body[i].target.id
        assert len(re.findall(rf"\b{name}\b", SOURCE)) > 1, f"nobody reads {name}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_agrees_with_cpu(model):
    agent = Agent(model, None)
    rollout = make_rollout(agent)
    loss, gradients = loss_and_gradients(agent, rollout, Args())
    on_gpu = Rollout(*(x.cuda() for x in rollout))
    gpu_loss, gpu_gradients = loss_and_gradients(copy.deepcopy(agent).cuda(), on_gpu, Args())
    torch.testing.assert_close(gpu_loss.cpu(), loss, atol=1e-4, rtol=1e-4)
    for a, b in zip(gradients, gpu_gradients, strict=True):
        torch.testing.assert_close(b.cpu(), a, atol=1e-4, rtol=1e-3)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    queries = random_queries(16)
    cpu = rlhf.sample_responses(model, queries, 18, 1.0, generators[0])
    gpu = rlhf.sample_responses(model.cuda(), queries.cuda(), 18, 1.0, generators[1])
    assert (cpu == gpu.cpu()).float().mean() > 0.95
