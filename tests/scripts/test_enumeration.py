"""The RLHF losses against exact gradients: all 81 responses of a language of three tokens.

The objective, E[score] - beta KL, is stated once more, prefix by prefix and without padding.
"""

import itertools

import pytest
import torch
from adapters import on
from helpers import louder

BETA, PROMPT, EOS = 0.3, torch.tensor([[1, 3, 4]]), 2
ALL = torch.tensor(list(itertools.product([2, 3, 4], repeat=4)))
pytestmark = on("rewards")


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradient(x, agent):
    found = torch.autograd.grad(x, list(agent.policy.parameters()), retain_graph=True)
    return torch.cat([y.flatten() for y in found])


@pytest.fixture
def world(script, monkeypatch):
    """An agent, its judges, and p(text) * score, p(text) * log-ratio for each truncated text."""
    module = script.module
    torch.manual_seed(0)
    model = louder(module.TinyGPT(5, 7, width=8), 0.4)
    reference = module.Agent(model, 0.7)
    agent = louder(reference, 0.15)
    reward_model = louder(module.RewardModel(model), 0.5)
    task = module.Task([*"_^.ab"], torch.zeros(1, 7).long(), PROMPT, 4, EOS, 1)
    judges = module.Judges(task, reward_model, reference)
    monkeypatch.setattr(module, "describe", lambda *_: {})
    monkeypatch.setattr(agent, "sample_responses", lambda *_: ALL.clone())

    def logprob(agent, text):  # reads the prefix only
        total = 0.0
        for t, token in enumerate(text):
            hidden, _ = agent.policy(torch.cat([PROMPT, torch.tensor([text[:t]]).long()], dim=1))
            total += (agent.policy.logits(hidden[0, -1]) / 0.7).log_softmax(-1)[token]
        return total

    ends = [[t for t in range(1, 4) if row[t] == EOS] for row in ALL.tolist()]
    texts = {tuple(row[: [*end, 3][0] + 1]) for row, end in zip(ALL.tolist(), ends)}
    score, kl = 0.0, 0.0
    for text in map(list, texts):
        new, ref = logprob(agent, text), logprob(reference, text).detach()
        judged = reward_model.score(PROMPT, torch.tensor([text])).item()
        score += new.exp() * (judged if EOS in text[1:] else -1.0)
        kl += new.exp() * (new - ref)
    return agent, judges, score, kl


def expected_gradient(script, agent, rollout, loss):
    """Gradient of the mean of `loss(row)`, a sum over tokens, over all samples by probability."""
    with torch.no_grad():
        logprobs = script.logprobs(agent, PROMPT.expand(81, -1), ALL)
        p = script.module.log_probability(logprobs, ALL).sum(1).exp()
    return p, lambda: gradient(sum(p[i] * loss(i) for i in range(81)), agent)


def row(rollout, i):
    return type(rollout)(*(x[i : i + 1] for x in rollout))


def close(found, expected):
    assert (found - expected).norm() < 1e-5 * expected.norm()


@on("rlhf")
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_the_expected_gradient_of_ppo_is_that_of_the_objective(
    script, world, monkeypatch, gae_lambda
):
    """With lambda = 1 for any values, otherwise for the true ones."""
    (agent, judges, score, kl), module = world, script.module
    torch.nn.init.normal_(agent.value_head.weight)
    monkeypatch.setattr(module, "whiten", lambda x, mean: x)
    args = module.Args(vf_coef=0.0, gae_lambda=gae_lambda, batch_size=81, num_minibatches=1)
    rollout, _ = module.collect(args, agent, judges, 81, BETA, torch.Generator())

    def loss(i):
        mb = row(rollout, i)
        return module.ppo_loss(agent, mb, args)[0] * mb.mask.sum()

    p, found = expected_gradient(script, agent, rollout, loss)
    if gae_lambda < 1:
        later = rollout.rewards.where(rollout.mask, 0.0).flip(1).cumsum(1).flip(1)
        values = torch.zeros(81, 4)
        for i, t in itertools.product(range(81), range(4)):
            same = (ALL[:, :t] == ALL[i, :t]).all(1)
            values[i, t] = (p * later[:, t])[same].sum() / p[same].sum()
        rollout = rollout._replace(values=values)
    close(-found(), gradient(score - BETA * kl, agent))
    assert all(x.grad is None for y in judges[1:] for x in y.parameters())


@on("grpo")
@pytest.mark.parametrize("kl_in_loss", ["no", "k2", "k3"])
def test_the_expected_gradient_of_grpo_is_that_of_its_objective(script, world, kl_in_loss):
    """k3 in the loss descends KL(SFT || policy), k2 KL(policy || SFT), at states held fixed."""
    (agent, judges, score, kl), module = world, script.module
    args = module.Args(batch_size=88, kl_in_loss=kl_in_loss)
    prompts = PROMPT.expand(81, -1)
    rollout, _ = module.collect(args, agent, judges, prompts, BETA, torch.Generator())

    def loss(i):
        return 4 * module.grpo_loss(agent, row(rollout, i), advantages[i : i + 1], BETA, args)[0]

    p, found = expected_gradient(script, agent, rollout, loss)
    advantages = rollout.rewards - (p * rollout.rewards).sum()
    both = [x.get_logprobs(prompts, rollout.responses) for x in (agent, judges.reference)]
    new, ref = both[0], both[1].detach()
    at_states = {"k3": ref.exp() * (ref - new), "k2": new.exp() * (new - ref)}
    objective = gradient(score, agent)
    if kl_in_loss == "no":
        objective = objective - BETA * gradient(kl, agent)
    else:
        kl = at_states[kl_in_loss].sum(-1).where(rollout.mask, 0.0).sum(1)
        objective = objective - BETA * gradient((p * kl).sum(), agent)
    close(-found(), objective)


def test_sampled_and_exact_kl_average_to_that_of_whole_responses_and_padding_changes_nothing(
    script, world
):
    (agent, judges, _, kl), module = world, script.module
    responses, _ = module.truncate_responses(ALL.clone(), EOS, 1)
    prompts = PROMPT.expand(81, -1)
    new, ref = (script.logprobs(x, prompts, responses) for x in (agent, judges.reference))
    p = module.log_probability(script.logprobs(agent, prompts, ALL), ALL).sum(1).exp()
    exact, k1 = (new.exp() * (new - ref)).sum(-1), module.log_probability(new - ref, responses)
    for estimate in (exact, k1):
        torch.testing.assert_close((p * estimate.where(responses != 0, 0.0).sum(1)).sum(), kl)
    padded = torch.tensor([[1, 0, 0, 3, 4]]).expand(81, -1)
    torch.testing.assert_close(script.logprobs(agent, padded, responses), new)
    scores = [judges.reward_model.score(x, responses) for x in (prompts, padded)]
    torch.testing.assert_close(*scores)
