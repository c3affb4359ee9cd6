"""ppo_kl_penalty.py: the exact KL, the penalized objective, the paper's rule for beta.

What it shares with the other scripts is tested in test_shared_*.py.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import same_weights
from torch.distributions import Independent, Normal, kl_divergence

import ppo_continuous_action as template
import ppo_kl_penalty as ppo


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Make Args for a run of 6 iterations of 32 steps, 12 minibatches of 8 in each."""
    monkeypatch.chdir(tmp_path)
    count = iter(range(1000))

    def make(script=ppo, **settings):
        size = {"total_timesteps": 6 * 32, "num_steps": 16, "num_envs": 2, "num_minibatches": 4}
        defaults = {"env_id": "FakeTarget-Box-v0", "run_name": f"run{next(count)}", **size}
        defaults |= {"update_epochs": 3, "learning_rate": 0.003, "compile": False}
        return script.Args(**{**defaults, **settings})

    return make


@pytest.fixture
def steps(monkeypatch):
    """What every gradient step gets, and the weights before it."""
    seen, real = [], ppo.kl_penalty_update

    def kl_penalty_update(agent, adam, batch, mb, schedule, args):
        copies = {"batch": [x.clone() for x in batch], "weights": adam["weights"].clone()}
        seen.append({"kl_coef": schedule[1].item(), **copies})
        return real(agent, adam, batch, mb, schedule, args)

    monkeypatch.setattr(ppo, "kl_penalty_update", kl_penalty_update)
    return seen


def make_agent():
    """An agent in double precision whose policy differs clearly between states."""
    torch.manual_seed(0)
    agent = ppo.Agent(5, 3, ppo.Args()).double()
    for parameter in agent.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return agent


def gaussian(mean, log_std):
    """The policy by an independent statement."""
    return Independent(Normal(mean, log_std.exp()), 1)


def random_policies(rows):
    """Means and log stds (rows, 3) of an old and of a new policy that differ clearly."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, rows, 3, dtype=torch.float64, generator=generator).mul(0.7).unbind()


# --- K2: the exact KL ---


def test_kl_is_that_of_torch_from_old_to_new():
    policies = random_policies(7)
    old, new = gaussian(*policies[:2]), gaussian(*policies[2:])
    kl = ppo.gaussian_kl(*policies)
    assert kl.shape == (7,)
    torch.testing.assert_close(kl, kl_divergence(old, new), rtol=1e-10, atol=1e-12)
    assert (kl - kl_divergence(new, old)).abs().max() > 0.05  # the directions can be told apart


def test_kl_is_what_samples_of_the_old_policy_say():
    policies = random_policies(3)
    old, new = gaussian(*policies[:2]), gaussian(*policies[2:])
    torch.manual_seed(0)
    samples = old.sample((200_000,))
    k1 = old.log_prob(samples) - new.log_prob(samples)
    standard_error = k1.std(0) / math.sqrt(len(k1))
    assert ((k1.mean(0) - ppo.gaussian_kl(*policies)).abs() < 4 * standard_error).all()
    reverse = ppo.gaussian_kl(*policies[2:], *policies[:2])
    assert ((k1.mean(0) - reverse).abs() > 10 * standard_error).any()


def test_kl_by_hand_sums_over_components():
    zero, one, ln2 = torch.zeros(1), torch.ones(1), torch.full((1,), math.log(2.0))
    assert ppo.gaussian_kl(zero, zero, one, zero).item() == pytest.approx(0.5)
    wider = ppo.gaussian_kl(zero, zero, zero, ln2).item()
    assert wider == pytest.approx(math.log(2) + 1 / 8 - 1 / 2)
    narrower = ppo.gaussian_kl(zero, ln2, zero, zero).item()
    assert narrower == pytest.approx(-math.log(2) + 4 / 2 - 1 / 2)
    both = torch.cat([zero, zero]), torch.cat([one, zero]), torch.cat([zero, ln2])
    assert ppo.gaussian_kl(both[0], both[0], *both[1:]).item() == pytest.approx(0.5 + wider)


def test_gradient_of_the_kl_vanishes_at_the_old_policy_and_nowhere_else():
    agent, obs = make_agent(), torch.randn(64, 5, dtype=torch.float64)
    old_mean, old_log_std = agent.policy(obs).detach(), agent.log_std.detach().clone()

    def largest_gradient():
        kl = ppo.gaussian_kl(old_mean, old_log_std, agent.policy(obs), agent.log_std).mean()
        gradients = torch.autograd.grad(kl, [*agent.policy.parameters(), agent.log_std])
        return kl.item(), max(x.abs().max().item() for x in gradients)

    kl, gradient = largest_gradient()
    assert abs(kl) < 1e-12 and gradient < 1e-12
    with torch.no_grad():
        agent.log_std += 0.1
    kl, gradient = largest_gradient()
    assert kl > 1e-3 and gradient > 1e-3


# --- K1: the objective ---


def test_penalized_objective_by_hand():
    logratio = torch.tensor([math.log(2.0), math.log(0.5)])
    advantages, kl = torch.tensor([1.0, -3.0]), torch.tensor([0.1, 0.3])
    # The mean of r A is (2 - 1.5) / 2 = 0.25, that of the KL is 0.2.
    assert ppo.penalized_policy_loss(logratio, advantages, kl, 0.0).item() == pytest.approx(-0.25)
    assert ppo.penalized_policy_loss(logratio, advantages, kl, 3.0).item() == pytest.approx(0.35)


def stray_minibatch(agent, rows=32):
    """A minibatch that a policy far from the agent's has collected."""
    obs = torch.randn(rows, 5, dtype=torch.float64)
    with torch.no_grad():
        old_mean = agent.policy(obs)
        old_mean += 0.5 * torch.randn_like(old_mean)
        old_log_std = agent.log_std.expand_as(old_mean) + 0.2
        actions = gaussian(old_mean, old_log_std).sample()
        logprobs = gaussian(old_mean, old_log_std).log_prob(actions)
    values, advantages, returns = torch.randn(3, rows, dtype=torch.float64)
    return [obs, actions, logprobs, values, advantages, returns, old_mean, old_log_std]


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_loss_is_surrogate_less_penalty_and_entropy_plus_value_error(kl_coef):
    agent = make_agent()
    minibatch = stray_minibatch(agent)
    obs, actions, logprobs, _, advantages, returns, *old = minibatch
    args = ppo.Args(value_clip_coef=math.inf, norm_adv=False, ent_coef=0.01, vf_coef=0.5)
    loss, metrics = ppo.kl_penalty_loss(agent, minibatch, torch.tensor(kl_coef), args)
    policy = gaussian(agent.policy(obs), agent.log_std)
    ratio = (policy.log_prob(actions) - logprobs).exp()
    assert ratio.min() < 0.8 and ratio.max() > 1.25  # where clipping would show
    kl = kl_divergence(gaussian(*old), policy).mean()
    objective = (ratio * advantages).mean() - kl_coef * kl + 0.01 * policy.entropy().mean()
    errors = (agent.get_value(obs) - returns) ** 2
    torch.testing.assert_close(loss, -objective + 0.5 * errors.mean() / 2)
    outside = ((ratio - 1).abs() > 0.2).double().mean().item()
    assert outside > 0.1 and metrics["losses/clipfrac"].item() == pytest.approx(outside)
    assert metrics["losses/kl"].item() == pytest.approx(kl.item())
    expected = (kl_coef * kl - (ratio * advantages).mean()).item()
    assert metrics["losses/policy_loss"].item() == pytest.approx(expected)
    assert metrics["losses/value_clipfrac"] == 0


def test_loss_normalizes_advantages_and_clips_values_by_their_own_range():
    agent = make_agent()
    minibatch = stray_minibatch(agent)
    obs, _, _, values, advantages, returns, *_ = minibatch
    spread = (advantages - advantages.mean()) / advantages.std(correction=0)
    beta, off = torch.tensor(1.0), ppo.Args(norm_adv=False, vf_coef=0.0)
    expected, _ = ppo.kl_penalty_loss(agent, [*minibatch[:4], spread, *minibatch[5:]], beta, off)
    on = dataclasses.replace(off, norm_adv=True)
    normalized, _ = ppo.kl_penalty_loss(agent, minibatch, beta, on)
    torch.testing.assert_close(normalized, expected)

    clipping = dataclasses.replace(on, vf_coef=1.0, value_clip_coef=0.1)
    clipped, metrics = ppo.kl_penalty_loss(agent, minibatch, beta, clipping)
    new = agent.get_value(obs)
    held = values + (new - values).clamp(-0.1, 0.1)
    larger = torch.max((new - returns) ** 2, (held - returns) ** 2)
    assert (larger > (new - returns) ** 2).any()
    torch.testing.assert_close(clipped - normalized, larger.mean() / 2)
    share = ((new - values).abs() > 0.1).double().mean().item()
    assert metrics["losses/value_clipfrac"].item() == pytest.approx(share) and share > 0.5


def test_without_penalty_it_is_the_template_without_clipping(tiny):
    settings = {"ent_coef": 0.1, "max_grad_norm": 0.1, "adam_eps": 0.01}
    none = ppo.train(tiny(kl_mode="none", value_clip_coef=math.inf, **settings))
    clip = template.train(tiny(template, clip_coef=1e9, clip_vloss=False, **settings))
    for ours, theirs in zip(none["episodes"], clip["episodes"], strict=True):
        assert ours["return"] == pytest.approx(theirs["return"], abs=1e-4)
    for ours, theirs in zip(none["agent"].parameters(), clip["agent"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert {x["charts/kl_coef"] for x in none["updates"]} == {0.0}
    assert none["updates"][0]["kl/after"] > 1e-4  # what is not penalized is measured all the same
    settings |= {"kl_mode": "fixed", "kl_coef": 10.0, "value_clip_coef": math.inf}
    penalized = ppo.train(tiny(**settings))
    assert penalized["updates"][0]["kl/after"] < 0.9 * none["updates"][0]["kl/after"]


# --- K3: beta ---


@pytest.mark.parametrize(
    "kl, factor",
    [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1), (0.01, 1), (0.0149, 1), (0.0151, 2), (math.inf, 2)],
)
def test_beta_halves_or_doubles_outside_a_factor_of_one_and_a_half(kl, factor):
    assert ppo.paper_kl_coef(3.0, kl, target_kl=0.01) == 3.0 * factor


def test_beta_stays_finite_and_can_come_back():
    low = high = 1.0
    for _ in range(2000):
        low, high = ppo.paper_kl_coef(low, 0.0, 0.01), ppo.paper_kl_coef(high, 1.0, 0.01)
    assert (low, high) == (2.0**-20, 2.0**20)
    assert ppo.paper_kl_coef(low, 1.0, 0.01) == 2 * low
    assert ppo.paper_kl_coef(high, 0.0, 0.01) == high / 2


@pytest.mark.parametrize("target_kl", [1e-6, 0.002, 10.0])
def test_beta_follows_the_kl_after_the_last_epoch_once_per_iteration(tiny, steps, target_kl):
    """Weights after an iteration are those before the first step of the next one."""
    result = ppo.train(tiny(kl_coef=2.0, target_kl=target_kl))
    updates, agent, expected = result["updates"], result["agent"], 2.0
    weights = [x["weights"] for x in steps[12::12]]
    weights.append(torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone())
    for i, after in enumerate(weights):
        assert {x["kl_coef"] for x in steps[12 * i : 12 * i + 12]} == {expected}
        assert updates[i]["charts/kl_coef"] == expected
        obs, *_, old_mean, old_log_std = steps[12 * i]["batch"]
        torch.nn.utils.vector_to_parameters(after, agent.parameters())
        with torch.no_grad():
            new = gaussian(agent.policy(obs), agent.log_std)
        kl = kl_divergence(gaussian(old_mean, old_log_std), new).mean().item()
        assert updates[i]["kl/after"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        expected *= 0.5 if kl < target_kl / 1.5 else 2.0 if kl > 1.5 * target_kl else 1.0
    assert len({x["charts/kl_coef"] for x in updates}) > 2


def test_a_fixed_beta_stays(tiny, steps):
    ppo.train(tiny(kl_mode="fixed", kl_coef=3.0, target_kl=1e-6))
    assert {x["kl_coef"] for x in steps} == {3.0}


def test_the_old_policy_is_the_one_that_acted_and_stays_as_it_is(tiny, steps):
    agent = ppo.train(tiny(learning_rate=0.01))["agent"]
    for start in range(0, len(steps), 12):
        torch.nn.utils.vector_to_parameters(steps[start]["weights"], agent.parameters())
        obs, actions, logprobs, *_, old_mean, old_log_std = steps[start]["batch"]
        with torch.no_grad():
            torch.testing.assert_close(old_mean, agent.policy(obs), rtol=0, atol=1e-6)
        assert torch.equal(old_log_std, agent.log_std.detach().expand_as(old_mean))
        logprob = gaussian(old_mean, old_log_std).log_prob(actions)
        torch.testing.assert_close(logprobs, logprob, rtol=0, atol=1e-4)
        for step in steps[start : start + 12]:
            assert torch.equal(step["batch"][6], old_mean)
            assert torch.equal(step["batch"][7], old_log_std)
        torch.nn.utils.vector_to_parameters(steps[start + 11]["weights"], agent.parameters())
        assert not torch.allclose(agent.log_std, old_log_std[0], rtol=0, atol=1e-3)


def test_beta_survives_a_resume(tiny):
    settings = {"env_id": "FakeWalk-Box-v0", "anneal_lr": False, "kl_coef": 0.3, "target_kl": 1e-6}
    whole = ppo.train(tiny(**settings))
    args = tiny(**settings, total_timesteps=3 * 32)
    ppo.train(args)
    saved = ppo.load_checkpoint(f"runs/{args.run_name}")
    assert saved["kl_coef"] == whole["updates"][3]["charts/kl_coef"] != 0.3
    args = dataclasses.replace(args, total_timesteps=6 * 32, resume=f"runs/{args.run_name}")
    resumed = ppo.train(args)
    assert same_weights(whole["agent"], resumed["agent"])
    for a, b in zip(whole["updates"], resumed["updates"], strict=True):
        assert a["charts/kl_coef"] == b["charts/kl_coef"]
    fixed = {"kl_mode": "fixed", "total_timesteps": 7 * 32}  # flags beside --resume count
    last = ppo.train(dataclasses.replace(args, **fixed))["updates"][-1]
    assert last["charts/kl_coef"] == 0.3


# --- Settings, warnings, details ---


@pytest.mark.parametrize("name", ["kl_coef", "target_kl", "value_clip_coef"])
def test_impossible_settings_are_refused(name):
    for value in (0.0, -1.0, math.nan, *[math.inf] * (name == "kl_coef")):
        with pytest.raises(ValueError, match=name):
            ppo.Args(**{name: value})


def test_a_runaway_beta_is_warned_of_once(tiny, capsys):
    ppo.train(tiny(kl_coef=2.0**19, target_kl=1e-12))
    assert capsys.readouterr().out.count("No penalty holds the policy") == 1


def test_details_show_the_penalty_and_its_settings():
    table = ppo.details(ppo.Args(kl_coef=0.5, target_kl=0.02))
    assert "| K1/3 | KL-penalized objective | kl_mode=adaptive, kl_coef=0.5 |" in table
    assert "| K2/3 | exact KL divergence | on |" in table
    assert "| K3/3 | adaptive penalty coefficient | kl_mode=adaptive, target_kl=0.02 |" in table
    assert "| 9/37 | value function loss clipping | value_clip_coef=0.2 |" in table
    assert "| 8/37 |" not in table


# --- Slow: what the adaptive penalty is for ---


@pytest.mark.slow
@pytest.mark.parametrize("target_kl", [0.003, 0.01, 0.03])
def test_adaptive_penalty_holds_the_kl_near_its_target(tiny, target_kl):
    """Without annealing, which makes steps too small to reach the target."""
    settings = {"num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10}
    settings |= {"learning_rate": 3e-4, "anneal_lr": False, "compile": True}
    args = tiny(env_id="Hopper-v4", total_timesteps=50 * 2048, target_kl=target_kl, **settings)
    kls = [x["kl/after"] for x in ppo.train(args)["updates"]]
    assert target_kl / 1.5 <= np.median(kls[25:]) <= target_kl * 1.5


# Text that stands once in the script, what breaks it, the tests that must notice (pytest's -k).
MUTATIONS = [
    ("(kl_coef * kl - logratio", "(-kl_coef * kl - logratio", "objective_by_hand"),
    ("- logratio.exp() * adv", "- logratio * adv", "objective_by_hand"),
    ("- logratio.exp() * adv", "- logratio.exp().clamp(0.8, 1.2) * adv", "objective_by_hand"),
    ("distance**2 - 1)).sum(-1)", "distance**2 - 1)).mean(-1)", "kl_by_hand"),
    ("(-2 * log_ratio).exp()", "(-log_ratio).exp()", "kl_by_hand"),
    ("(-new_log_std).exp()", "(-old_log_std).exp()", "torch_from_old"),
    ("(old_mean, old_log_std, new_mean, agent.log_std)",
     "(new_mean, agent.log_std, old_mean, old_log_std)", "loss_is_surrogate"),
    (".expand_as(old_mean).clone()", ".expand_as(old_mean)", "old_policy"),
    ("if kl < target_kl / 1.5:", "if kl < target_kl:", "beta_halves"),
    ("elif kl > target_kl * 1.5:", "elif kl > target_kl:", "beta_halves"),
    ("kl_coef /= 2", "kl_coef /= 1.5", "beta_halves"),
    ("kl_coef *= 2", "kl_coef *= 1.5", "beta_halves"),
    ("min(max(kl_coef, KL_COEF_MIN), KL_COEF_MAX)", "kl_coef", "can_come_back"),
    ('if args.kl_mode == "adaptive":', "if True:", "a_fixed_beta"),
    ('metrics["kl/after"], args', 'metrics["losses/kl"], args', "beta_follows"),
    ('0.0 if args.kl_mode == "none" else args.kl_coef', "args.kl_coef", "without_penalty"),
    ('saved["kl_coef"] if args', "kl_coef if args", "survives"),
    # Details whose text is this script's own.
    ("normalize(advantages) if args.norm_adv else", "", "loss_normalizes"),
    ("(new_values - values).clamp(-clip_coef, clip_coef)", "(new_values - values)",
     "loss_normalizes"),
    ("0.5 * errors.mean()", "errors.mean()", "loss_is_surrogate"),
    ("pg_loss - args.ent_coef", "pg_loss + args.ent_coef", "loss_is_surrogate"),
    ("+ args.vf_coef * v_loss", "+ v_loss", "loss_is_surrogate"),
    ('"losses/kl": kl.mean()', '"losses/kl": kl.sum()', "loss_is_surrogate"),
    ("(args.max_grad_norm / metrics", "(1e9 / metrics", "without_penalty"),
    ("+ args.adam_eps)", "+ 1e-5)", "without_penalty"),
]  # fmt: skip
