"""The other methods of the paper's Figure 3: their mathematics against other ways to compute it."""

import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import record
from torch import nn
from torch.distributions import Normal, kl_divergence

import ppo_continuous_action as ppo
from benchmark.paper.baselines import a2c, cem, on_ppo, trpo, vpg

FOLDER = Path(trpo.__file__).parents[2]
flat, fill = nn.utils.parameters_to_vector, nn.utils.vector_to_parameters
close = torch.testing.assert_close


def tensors(args, **more):
    """The settings as an update gets them."""
    floats = {x: y for x, y in vars(args).items() if type(y) is float} | more
    return SimpleNamespace(**{**vars(args), **{x: torch.tensor(y) for x, y in floats.items()}})


def make_agent(args, shift=0.0):
    """An agent off its initialization, and the state of its optimizer."""
    torch.manual_seed(0)
    agent = ppo.Agent(3, 2)
    weights = flat(agent.parameters()).detach()
    weights += 0.1 * torch.randn_like(weights) + shift
    fill(weights, agent.parameters())
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    return agent, adam | {"step": torch.zeros((), dtype=torch.float64)}


def policy(agent, obs):
    return Normal(agent.policy(obs), agent.log_std.exp())


def make_batch(agent, size=64):
    """Samples of the agent's own policy."""
    obs = torch.randn(size, 3)
    with torch.no_grad():
        actions = policy(agent, obs).sample()
        values, logprobs, _ = agent.evaluate_actions(obs, actions)
    return ppo.Batch(obs, actions, logprobs, values, 2 * torch.randn(size) + 1, torch.randn(size))


def gradient(loss, agent):
    return flat(torch.autograd.grad(loss, [*agent.parameters()], materialize_grads=True))


def policy_gradient(agent, batch):
    logprobs = policy(agent, batch[0]).log_prob(batch[1]).sum(-1)
    return gradient((logprobs * ppo.normalize(batch[4])).mean(), agent)


def value_weights(agent):
    """A mask (P,): which of all weights are the value function's."""
    named = agent.named_parameters()
    return flat([torch.full_like(x, name.startswith("value")) for name, x in named]).bool()


def test_trpo_takes_the_natural_gradient_and_fits_the_values():
    """The Fisher matrix is the Hessian of the exact KL: differences of its gradient, in float64."""
    args = trpo.Args(cg_steps=100, max_kl=1e-5)
    agent, adam = make_agent(args)
    batch, before = make_batch(agent), adam["weights"].double()
    ascent = policy_gradient(agent, batch)
    trpo.trpo_update(agent, adam, batch, torch.randperm(64)[None], tensors(args))
    step = torch.where(value_weights(agent), 0.0, adam["weights"] - before)
    fill(before.clone(), agent.double().parameters())
    with torch.no_grad():
        old = policy(agent, batch[0].double())

    def slope(weights):
        fill(weights, agent.parameters())
        new = policy(agent, batch[0].double())
        return gradient(kl_divergence(old, new).sum(-1).mean(), agent)

    image = (slope(before + step) - slope(before - step)) / 2 + 0.1 * step  # damped
    assert 0.5 * step @ image == pytest.approx(1e-5, rel=0.01)
    assert torch.cosine_similarity(image, ascent, dim=0) > 0.9999
    assert torch.cosine_similarity(step, ascent, dim=0) < 0.95
    assert (adam["weights"] != before)[value_weights(agent)].all() and adam["value_step"] == 5


@pytest.mark.parametrize("max_kl", [0.01, 5.0])
def test_trpo_never_exceeds_its_kl_and_always_gains(max_kl):
    args, shares = trpo.Args(max_kl=max_kl), []
    agent, adam = make_agent(args)
    for _ in range(5):
        obs, actions, logprobs, _, advantages, _ = batch = make_batch(agent)
        with torch.no_grad():
            old = policy(agent, obs)
        metrics = trpo.trpo_update(agent, adam, batch, torch.randperm(64)[None], tensors(args))
        new = policy(agent, obs)
        assert 0.1 * max_kl < kl_divergence(old, new).sum(-1).mean() <= max_kl
        ratio = (new.log_prob(actions).sum(-1) - logprobs).exp()
        assert (ratio * ppo.normalize(advantages)).mean() > 0.02  # that of the old policy is 0
        shares.append(metrics["trpo/step"].item())
    assert (min(shares) < 1) == (max_kl == 5.0)  # there the quadratic model fails


def test_values_are_fitted_apart_in_ever_new_orders(monkeypatch):
    args = trpo.Args(value_minibatch_size=16, value_epochs=8)
    agent, adam = make_agent(args)
    batch, before = make_batch(agent), adam["weights"].clone()
    calls = record(monkeypatch, ppo, "value_loss")
    on_ppo.fit_values(agent, adam, batch, torch.randperm(64), args)
    epochs = torch.cat([call[2] for call in calls]).view(8, 64)  # all returns differ
    assert (epochs.sort(dim=1).values == batch[5].sort().values).all()
    assert len({tuple(x.tolist()) for x in epochs}) == 8
    errors = [((x - batch[5]) ** 2).mean() for x in (agent.value(batch[0]), batch[3])]
    assert errors[0] < 0.9 * errors[1]
    assert torch.equal((adam["weights"] != before), value_weights(agent))
    assert adam["value_step"] == 32 and not any(adam[x].any() for x in ("mean", "square", "step"))


def test_vpg_is_a_step_along_the_policy_gradient_and_a_fit_of_the_values():
    args = vpg.Args()
    (agent, adam), (other, other_adam) = make_agent(args), make_agent(args)
    batch, order = make_batch(agent), torch.randperm(64)
    ascent = policy_gradient(agent, batch)
    direction = 0.1 * ascent / (np.sqrt(0.001) * ascent.abs() + 1e-5)  # Adam's first
    expected = adam["weights"] + 0.01 * np.sqrt(1 - 0.999) / (1 - 0.9) * direction
    on_ppo.fit_values(other, other_adam, batch, order, args)
    vpg.vpg_update(agent, adam, batch, order[None], tensors(args, learning_rate=0.01))
    expected = torch.where(value_weights(agent), other_adam["weights"], expected)
    close(adam["weights"], expected, atol=1e-5, rtol=1e-4)
    assert adam["rate"] == pytest.approx(0.01 / 1.5)  # of the next step, as the KL is large


def test_a2c_is_ppo_with_its_settings_and_its_average_policy_follows_slowly():
    """Huang et al. 2022; RMSprop as TensorFlow has it."""
    args = a2c.Args(rms_eps=0.5)
    assert (args.num_steps, args.gae_lambda, args.vf_coef, args.ent_coef) == (5, 1, 0.5, 0)
    assert (args.update_epochs, args.num_minibatches, args.norm_adv) == (1, 1, False)
    agent, adam = make_agent(args)
    weights, average, square = adam["weights"].clone(), adam["weights"].clone(), 1.0
    for _ in range(3):
        batch = make_batch(agent)
        g = gradient(ppo.ppo_loss(agent, batch, tensors(args))[0], agent)
        assert g.norm() > args.max_grad_norm
        g *= args.max_grad_norm / g.norm()
        square = 0.99 * square + 0.01 * g**2
        weights -= 0.01 * g / (square + 0.5).sqrt()
        average = 0.99 * average + 0.01 * weights
        a2c.a2c_update(agent, adam, batch, None, tensors(args, learning_rate=0.01))
        close(adam["weights"], weights, atol=1e-6, rtol=1e-5)
        close(adam["average"], average, atol=1e-6, rtol=1e-5)


def test_trust_region_projects_the_gradient_by_mean_and_log_std():
    """With the coefficients of baselines: 0.5 of a whole square and 0.01 of the entropy."""
    args = a2c.Args(trust_region=0.05, vf_coef=1.0, ent_coef=0.01)
    (agent, adam), (average, average_adam) = make_agent(args), make_agent(args, shift=0.1)
    obs, actions, _, _, advantages, returns = batch = make_batch(agent)
    mean, old_mean = agent.policy(obs), average.policy(obs).detach()
    std, old_std = agent.log_std.exp(), average.log_std.exp().detach()
    error, a, moved = (actions - mean) / std, advantages[:, None], mean - old_mean
    bonus = 0.01  # an entropy grows as fast as its log std
    gain = torch.cat([a * error / std, a * (error**2 - 1) + bonus], -1).detach()
    slope = torch.cat([moved / std**2, 1 - (old_std**2 + moved**2) / std**2], -1).detach()
    excess = (slope * gain).sum(-1) - 0.05
    assert 10 < (excess > 0).sum() < 54
    lowered = gain - (excess.clamp(min=0) / (slope**2).sum(-1))[:, None] * slope
    statistics = torch.cat([mean, agent.log_std.expand_as(mean)], -1)
    value_loss = 0.5 * ((agent.value(obs) - returns) ** 2).mean()
    expected = gradient(value_loss - (lowered * statistics).sum(-1).mean(), agent)
    found = gradient(a2c.a2c_loss(agent, average, batch, args), agent)
    close(found, expected, atol=1e-6, rtol=1e-4)
    # An update measures the KL from the average policy. Its squares begin at 1.
    before, adam["average"] = adam["weights"].clone(), average_adam["weights"]
    a2c.a2c_update(agent, adam, batch, None, tensors(args, learning_rate=0.01))
    assert torch.cosine_similarity(before - adam["weights"], expected, dim=0) > 0.9999


def test_cem_fits_the_best_fifth_and_adds_noise_that_falls_to_nothing_in_half_of_the_run():
    population = np.arange(20.0).reshape(10, 2)
    returns = np.array([0, 5, 1, 2, 3, 9, 4, 0, 0, 0])  # best: the rows [10, 11] and [2, 3]
    mean, std = cem.fit(population, returns, 0.2)
    assert mean.tolist() == [6, 7] and std.tolist() == [4, 4]
    args, rng = cem.Args(extra_std=0.6, population=20000), np.random.default_rng(0)
    for progress, variance in ((0, 0.36), (0.25, 0.18), (0.5, 0), (0.9, 0)):
        drawn = cem.draw(np.array([5.0, 0.0]), np.array([0.8, 0.0]), progress, args, rng)
        np.testing.assert_allclose(drawn.mean(0), [5, 0], atol=0.03)
        np.testing.assert_allclose(drawn.var(0), [0.64 + variance, variance], atol=0.03)


# --- Each as a program ---


def load(folder):
    return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)


def program(name, flags):
    """Run a file of benchmark/ with a command line; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        for x in ("Args", "details", "train"):  # a baseline has its own
            patch.setattr(ppo, x, getattr(ppo, x))
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [f"{name}.py", *flags.split()])
        try:
            runpy.run_path(f"{FOLDER}/{name}.py", run_name="__main__")
        except SystemExit as stop:
            return stop.code
    return 0


def test_cem_learns_and_counts_every_step():
    flags = "--env-id fake_envs:FakeTarget-Box-v0 --total-timesteps 1550"
    for words in (flags, "--resume runs/run"):  # a run that has a checkpoint is over
        assert program("paper/baselines/cem", words) == 0
    run = load("runs/run")
    assert [x["global_step"] for x in run["updates"]] == [*range(100, 1600, 100), 1550]
    assert run["episodes"]["global_step"].tolist() == [*range(1, 1551)]
    returns = run["episodes"]["return"]
    assert returns[:100].mean() < -0.3 and returns[-100:].mean() > -0.05
    full, half = run["updates"][-2:]
    assert full["cem/std"] == half["cem/std"]  # of half a generation nothing is fitted
    # The observations are spread evenly over [-1, 1] and become normal.
    assert run["mean"].tolist() == pytest.approx([3**-0.5, 0], abs=0.05)


@pytest.mark.parametrize(
    ("baseline", "own"),
    [
        (trpo, "--num-steps 32 --value-epochs 2 --checkpoint-interval 2"),
        (vpg, "--num-steps 32 --value-epochs 2 --checkpoint-interval 2"),
        (a2c, "--num-envs 4 --trust-region 1 --checkpoint-interval 4"),
    ],
)
def test_a_baseline_resumes_exactly_and_refuses_what_it_does_not_use(baseline, own, monkeypatch):
    def save_and_copy(run_dir, state):
        save(run_dir, state)
        if state["updates"] and not Path("runs/half").exists():
            shutil.copytree(run_dir, "runs/half")

    name, save = Path(baseline.__file__).stem, ppo.save_checkpoint
    monkeypatch.setattr(ppo, "save_checkpoint", save_and_copy)
    flags = (
        f"{own} --env-id fake_envs:FakeWalk-Box-v0 --total-timesteps 320 --seed 2 --run-name run"
    )
    assert program(f"paper/baselines/{name}", flags) == 0
    assert 0 < load("runs/half")["updates"][-1]["global_step"] < 300
    assert program(f"paper/baselines/{name}", "--resume runs/half") == 0
    whole, half = load("runs/run"), load("runs/half")
    assert whole["updates"][-1]["global_step"] == half["updates"][-1]["global_step"] == 320
    columns = half["episodes"]
    assert all(torch.equal(x, columns[name]) for name, x in whole["episodes"].items())
    assert len(columns["return"]) > 10 and {"value_mean", "rms"} & {*half["adam"]}  # its own
    assert all(torch.equal(x, half["agent"][key]) for key, x in whole["agent"].items())
    with pytest.raises(ppo.UsageError, match="does not use --early-stop-kl"):
        baseline.Args(early_stop_kl=0.1)
