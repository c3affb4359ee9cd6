"""The RLHF losses against exact gradients: all 81 responses of a language of three tokens.

The objective, E[score] - beta KL, is stated once more, prefix by prefix and without padding.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from adapters import on
from helpers import louder

BETA, PROMPTS, EOS = 0.3, torch.tensor([[1, 3, 4]]).expand(81, -1), 2
ALL = torch.tensor([*itertools.product([2, 3, 4], repeat=4)])
pytestmark = on("rewards")


@pytest.fixture
def world(script, monkeypatch):
    """Agent and judges; p, mask, expected score and KL of all responses, which end at EOS."""
    module = script.module
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = louder(module.TinyGPT(5, 7, width=8), 0.4)
    reference = module.Agent(model, 0.7)
    agent, reward_model = louder(reference, 0.15), louder(module.RewardModel(model), 0.5)
    task = module.Task([*"_^.ab"], torch.zeros(1, 7).long(), PROMPTS[:1], 4, EOS, earliest_eos=1)
    monkeypatch.setattr(module, "describe", lambda *_: {})
    monkeypatch.setattr(agent, "sample_responses", lambda *_: ALL.clone())

    def logprob(agent, i, t):
        hidden, _ = agent.policy(torch.cat([PROMPTS[0], ALL[i, :t]])[None])
        return (agent.policy.logits(hidden[0, -1]) / 0.7).log_softmax(-1)[ALL[i, t]]

    places = [*itertools.product(range(81), range(4))]
    new = torch.stack([logprob(agent, *x) for x in places]).view(81, 4)
    ref = torch.stack([logprob(reference, *x) for x in places]).view(81, 4).detach()
    lengths = [next((t + 1 for t in (1, 2, 3) if row[t] == EOS), 4) for row in ALL]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    judged = [reward_model.score(PROMPTS[:1], x[None, :n]) for x, n in zip(ALL, lengths)]
    ends = ALL.gather(1, torch.tensor(lengths)[:, None] - 1).squeeze(1) == EOS
    p, judges = new.sum(1).exp(), module.Judges(task, reward_model, reference)
    score, kl = p @ torch.cat(judged).detach().where(ends, -1.0), p @ ((new - ref) * mask).sum(1)
    yield SimpleNamespace(agent=agent, judges=judges, p=p.detach(), mask=mask, score=score, kl=kl)
    torch.set_default_dtype(torch.float32)


def assert_ascends(objective, rollout, loss, world):
    """The expected gradient of a loss of one response, a sum over its tokens, is right."""
    rows = [type(rollout)(*(x[i : i + 1] for x in rollout)) for i in range(81)]
    total = sum(p * loss(row) for p, row in zip(world.p, rows))
    own = list(world.agent.policy.parameters())
    found, expected = (
        torch.cat([y.flatten() for y in torch.autograd.grad(x, own, retain_graph=True)])
        for x in (-total, objective)
    )
    assert (found - expected).norm() < 1e-5 * expected.norm()
    others = [x for y in world.judges[1:] for x in y.parameters()]
    assert not any(torch.autograd.grad(total, others, allow_unused=True))  # all of them are None


@on("rlhf")
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_ppo_ascends_the_objective(script, world, monkeypatch, gae_lambda):
    """With lambda = 1 for any values, otherwise for the true ones."""
    module, agent = script.module, world.agent
    torch.nn.init.normal_(agent.value_head.weight)
    monkeypatch.setattr(module, "whiten", lambda x, mean: x)
    args = module.Args(vf_coef=0.0, gae_lambda=gae_lambda)
    rollout, _ = module.collect(args, agent, world.judges, 81, BETA, torch.Generator())
    if gae_lambda < 1:
        later = (rollout.rewards * world.mask).flip(1).cumsum(1).flip(1)
        same = [(ALL[:, None, :t] == ALL[:, :t]).all(-1) * world.p for t in range(4)]
        values = [x @ later[:, t] / x.sum(1) for t, x in enumerate(same)]
        rollout = rollout._replace(values=torch.stack(values, dim=1))

    def loss(row):
        return row.mask.sum() * module.ppo_loss(agent, row, args)[0]

    assert_ascends(world.score - BETA * world.kl, rollout, loss, world)


@on("grpo")
@pytest.mark.parametrize("kl_in_loss", ["no", "k2", "k3"])
def test_grpo_ascends_its_objective(script, world, kl_in_loss):
    """k3 in the loss descends KL(SFT || policy), k2 KL(policy || SFT), at states held fixed."""
    module, agent, judges = script.module, world.agent, world.judges
    args = module.Args(kl_in_loss=kl_in_loss)
    rollout, _ = module.collect(args, agent, judges, PROMPTS, BETA, torch.Generator())
    mean = world.p @ rollout.rewards
    new, ref = (x.get_logprobs(PROMPTS, rollout.responses) for x in (agent, judges.reference))
    ref = ref.detach()
    at_states = {"k2": new.exp() * (new - ref), "k3": ref.exp() * (ref - new)}
    kl = world.kl
    if kl_in_loss != "no":
        kl = world.p @ (at_states[kl_in_loss].sum(-1) * world.mask).sum(1)

    def loss(row):
        return 4 * module.grpo_loss(agent, row, row.rewards - mean, BETA, args)[0]

    assert_ascends(world.score - BETA * kl, rollout, loss, world)


def test_both_estimates_average_to_the_kl_and_padding_changes_nothing(script, world):
    module, (_, reward_model, reference) = script.module, world.judges
    responses, _ = module.truncate_responses(ALL.clone(), EOS, 1)
    new, ref = (script.logprobs(x, PROMPTS, responses) for x in (world.agent, reference))
    exact, k1 = (new.exp() * (new - ref)).sum(-1), module.log_probability(new - ref, responses)
    for estimate in (exact, k1):
        torch.testing.assert_close(world.p @ (estimate * world.mask).sum(1), world.kl)
    padded = torch.tensor([[1, 0, 0, 3, 4]]).expand(81, -1)
    torch.testing.assert_close(script.logprobs(world.agent, padded, responses), new)
    scores = [reward_model.score(x, responses) for x in (PROMPTS, padded)]
    torch.testing.assert_close(*scores)
