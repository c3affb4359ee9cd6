"""The RLHF losses against exact gradients: all 27 responses of three tokens from three.

The objective, E[score] - beta KL, is stated once more, prefix by prefix and without padding.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from adapters import scripts
from helpers import louder

BETA, EOS, R = 0.3, 2, 3
ALL = torch.tensor([*itertools.product([2, 3, 4], repeat=R)])
PROMPTS = torch.tensor([[1, 3, 4]]).expand(len(ALL), -1)


@pytest.fixture
def world(script, monkeypatch):
    """Agent and judges; p, mask, expected score and KL of all responses, which end at EOS."""
    module = script.home
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = louder(module.TinyGPT(5, 3 + R, width=8), 0.4)
    reference = module.Agent(model, 0.7)
    agent, reward_model = louder(reference, 0.15), louder(module.RewardModel(model), 0.5)
    task = module.Task(
        [*"_^.ab"], torch.zeros(1, 3 + R).long(), PROMPTS[:1], R, EOS, earliest_eos=1
    )
    monkeypatch.setattr(module, "describe", lambda *_: {})
    monkeypatch.setattr(agent, "sample_responses", lambda *_: ALL.clone())

    def logprobs(agent):
        columns = []
        for t in range(R):
            hidden, _ = agent.policy(torch.cat([PROMPTS, ALL[:, :t]], dim=1))
            every = (agent.policy.logits(hidden[:, -1]) / 0.7).log_softmax(-1)
            columns.append(every.gather(1, ALL[:, t : t + 1]))
        return torch.cat(columns, dim=1)

    new, ref = logprobs(agent), logprobs(reference).detach()
    lengths = [next((t + 1 for t in range(1, R) if row[t] == EOS), R) for row in ALL]
    mask = torch.arange(R) < torch.tensor(lengths)[:, None]
    judged = [reward_model.score(PROMPTS[:1], x[None, :n]) for x, n in zip(ALL, lengths)]
    ends = ALL.gather(1, torch.tensor(lengths)[:, None] - 1).squeeze(1) == EOS
    p, judges = new.sum(1).exp(), module.Judges(task, reward_model, reference)
    score, kl = p @ torch.cat(judged).detach().where(ends, -1.0), p @ ((new - ref) * mask).sum(1)
    yield SimpleNamespace(agent=agent, judges=judges, p=p.detach(), mask=mask, score=score, kl=kl)
    torch.set_default_dtype(torch.float32)


def assert_ascends(objective, rollout, loss, world):
    """The expected gradient of a loss of one response, a sum over its tokens, is right."""
    rows = [type(rollout)(*(x[i : i + 1] for x in rollout)) for i in range(len(ALL))]
    total = sum(p * loss(row) for p, row in zip(world.p, rows))
    own = list(world.agent.policy.parameters())
    found, expected = (
        torch.cat([y.flatten() for y in torch.autograd.grad(x, own, retain_graph=True)])
        for x in (-total, objective)
    )
    assert (found - expected).norm() < 1e-5 * expected.norm()
    others = [x for y in world.judges[1:] for x in y.parameters()]
    assert not any(torch.autograd.grad(total, others, allow_unused=True))  # all of them are None


@scripts("rlhf")
def test_ppo_ascends_the_objective_whatever_the_values_are(script, world, monkeypatch):
    module, agent = script.module, world.agent
    torch.nn.init.normal_(agent.value_head.weight)
    monkeypatch.setattr(module, "whiten", lambda x, mean: x)
    args = module.Args(vf_coef=0.0, gae_lambda=1.0)
    rollout, _ = module.collect(args, agent, world.judges, len(ALL), BETA, torch.Generator())

    def loss(row):
        return row.mask.sum() * module.ppo_loss(agent, row, args)[0]

    assert_ascends(world.score - BETA * world.kl, rollout, loss, world)


@scripts("grpo")
@pytest.mark.parametrize("kl_in_loss", ["no", "k2", "k3"])
def test_grpo_ascends_its_objective(script, world, kl_in_loss):
    """k3 in the loss descends KL(SFT || policy), k2 KL(policy || SFT), at states held fixed."""
    module, agent, judges = script.module, world.agent, world.judges
    args = module.Args(kl_in_loss=kl_in_loss)
    rollout, _ = module.collect(args, agent, judges, PROMPTS, BETA, torch.Generator())
    mean = world.p @ rollout.rewards
    both = (agent, judges.reference)
    new, ref = (script.logprobs(x, PROMPTS, rollout.responses) for x in both)
    ref = ref.detach()
    at_states = {"k2": new.exp() * (new - ref), "k3": ref.exp() * (ref - new)}
    kl = world.kl
    if kl_in_loss != "no":
        kl = world.p @ (at_states[kl_in_loss].sum(-1) * world.mask).sum(1)

    def loss(row):
        return R * module.grpo_loss(agent, row, row.rewards - mean, BETA, args)[0]

    assert_ascends(world.score - BETA * kl, rollout, loss, world)
