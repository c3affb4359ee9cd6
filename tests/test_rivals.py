"""The rivals of PPO in the paper's Figure 3: their mathematics against other ways to compute it."""

import dataclasses
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import record
from torch import nn
from torch.distributions import Normal

import ppo_continuous_action as ppo
from benchmark.rivals import a2c, cem, trpo, vpg

WALK = "FakeWalk-Box-v0"
TINY = {"env_id": WALK, "num_steps": 64, "total_timesteps": 320}
FOLDER = Path(trpo.__file__).parent


class Small(nn.Module):
    """An agent with so few weights that the Hessian fits on a page."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(3, 1)
        self.policy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.log_std = nn.Parameter(torch.tensor([[-0.5, 0.3]]))


def make_agent(args):
    """An agent off its initialization, and the state of its optimizer."""
    torch.manual_seed(0)
    agent = ppo.Agent(3, 2, args)
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach()
    weights += 0.1 * torch.randn_like(weights)
    nn.utils.vector_to_parameters(weights, agent.parameters())
    adam = {"weights": weights, "mean": 0 * weights, "square": 0 * weights}
    return agent, adam | {"step": torch.zeros((), dtype=torch.float64)}


def make_batch(agent, size=64):
    """Samples of the agent's own policy."""
    obs = torch.randn(size, 3)
    with torch.no_grad():
        dist = Normal(agent.policy(obs), agent.log_std.exp())
        actions = dist.sample()
        logprobs, _, values = agent.evaluate_actions(obs, actions)
    return [obs, actions, logprobs, values, torch.randn(size), torch.randn(size)]


def make_schedule(learning_rate=1e-3):
    now = {"learning_rate": learning_rate, "clip_coef": 0.2}
    return {name: torch.tensor(x) for name, x in now.items()}


def value_weights(agent):
    """A mask (P,): which of all weights are the value function's."""
    marks = [torch.full_like(x, name.startswith("value")) for name, x in agent.named_parameters()]
    return nn.utils.parameters_to_vector(marks).bool()


def gradient(loss, agent):
    return nn.utils.parameters_to_vector(
        torch.autograd.grad(loss, [*agent.parameters()], materialize_grads=True)
    )


# --- TRPO ---


def test_fisher_product_is_the_hessian_of_the_exact_kl():
    torch.manual_seed(0)
    agent, obs = Small().double(), torch.randn(7, 3, dtype=torch.float64)
    names, shapes = zip(*((name, x.shape) for name, x in agent.named_parameters()))
    mean, std = agent.policy(obs).detach(), agent.log_std.exp().detach()

    def kl(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {n: x.view(s) for n, x, s in zip(names, parts, shapes)}
        w = {n.removeprefix("policy."): x for n, x in weights.items() if n.startswith("policy.")}
        new_mean = torch.func.functional_call(agent.policy, w, obs)
        new_std = weights["log_std"].exp()
        terms = (std**2 + (mean - new_mean) ** 2) / (2 * new_std**2) - 0.5 + (new_std / std).log()
        return terms.sum(-1).mean()

    flat = nn.utils.parameters_to_vector(agent.parameters()).detach()
    hessian = torch.autograd.functional.hessian(kl, flat)
    assert hessian.abs().max() > 0.5
    vectors = torch.randn(5, flat.numel(), dtype=torch.float64)
    product = trpo.fisher_product(agent, obs, damping=0.25)
    for v in vectors:
        torch.testing.assert_close(product(v), hessian @ v + 0.25 * v)


def test_conjugate_gradients_solve_as_torch_does():
    torch.manual_seed(0)
    root = torch.randn(10, 10, dtype=torch.float64)
    matrix, b = root @ root.T + torch.eye(10), torch.randn(10, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, b)
    x = trpo.conjugate_gradients(lambda v: matrix @ v, b, steps=10)
    torch.testing.assert_close(x, exact, atol=1e-4, rtol=1e-4)
    steepest = trpo.conjugate_gradients(lambda v: matrix @ v, b, steps=1)
    torch.testing.assert_close(steepest, b * (b @ b) / (b @ matrix @ b))


@pytest.mark.parametrize("max_kl", [0.01, 1.0])
def test_trpo_never_exceeds_its_kl_and_always_gains(max_kl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = []

    def update(agent, adam, batch, minibatches, schedule, args):
        obs, actions, logprobs, _, advantages, _ = batch
        old = Normal(agent.policy(obs).detach(), agent.log_std.exp().detach())
        metrics = trpo.trpo_update(agent, adam, batch, minibatches, schedule, args)
        with torch.no_grad():
            new = Normal(agent.policy(obs), agent.log_std.exp())
            mean_kl = torch.distributions.kl_divergence(old, new).sum(-1).mean()
            ratio = (new.log_prob(actions).sum(-1) - logprobs).exp()
        gain = (ratio * ppo.normalize(advantages)).mean()  # that of the old policy is 0
        steps.append((mean_kl.item(), gain.item(), metrics["trpo/step"].item()))
        return metrics

    ppo.train(trpo.Args(**TINY, max_kl=max_kl), update=update)
    kls, gains, shares = np.array(steps).T
    assert len(kls) == 5 and (kls <= max_kl).all() and (kls > 0.1 * max_kl).all()
    assert (gains > 0.02).all()
    assert (shares < 1).any() == (max_kl == 1.0)  # there the quadratic model fails


def test_trpo_takes_the_natural_gradient():
    args = trpo.Args(**TINY, cg_steps=100, max_kl=1e-5)
    agent, adam = make_agent(args)
    batch, before = make_batch(agent), adam["weights"].clone()
    obs, actions, _, _, advantages, _ = batch
    dist = Normal(agent.policy(obs), agent.log_std.exp())
    gain = (dist.log_prob(actions).sum(-1) * ppo.normalize(advantages)).mean()
    ascent = gradient(gain, agent)
    trpo.trpo_update(agent, adam, batch, [torch.randperm(64)], make_schedule(), args)
    step = torch.where(value_weights(agent), 0.0, adam["weights"] - before)
    nn.utils.vector_to_parameters(before, agent.parameters())
    image = trpo.fisher_product(agent, obs, args.damping)(step)
    assert torch.cosine_similarity(image, ascent, dim=0) > 0.999
    assert torch.cosine_similarity(step, ascent, dim=0) < 0.95
    assert 0.9e-5 < 0.5 * step @ image < 1.1e-5


# --- The value function fitted apart; vanilla policy gradient ---


def test_values_are_fitted_apart_in_ever_new_orders(monkeypatch):
    args = trpo.Args(**TINY, value_minibatch_size=16, value_epochs=4)
    agent, adam = make_agent(args)
    batch, before = make_batch(agent), adam["weights"].clone()
    calls = record(monkeypatch, ppo, "value_loss")
    at_first = ((agent.get_value(batch[0]) - batch[5]) ** 2).mean()
    for times in (1, 2):
        trpo.fit_values(agent, adam, batch, torch.randperm(64), args)
        assert adam["value_step"] == 16 * times
    returns = torch.cat([call[2] for call in calls]).view(8, 64, 1)
    orders = (returns == batch[5]).nonzero()[:, 2].view(8, 64)  # all returns differ
    assert (orders.sort(dim=1).values == torch.arange(64)).all()
    assert len({tuple(x.tolist()) for x in orders}) == 8
    assert ((agent.get_value(batch[0]) - batch[5]) ** 2).mean() < 0.9 * at_first
    assert torch.equal((adam["weights"] != before), value_weights(agent))
    assert not any(adam[x].any() for x in ("mean", "square", "step"))  # of the policy


def test_vpg_is_a_step_along_the_policy_gradient_and_a_fit_of_the_values():
    args = vpg.Args(**TINY)
    agent, adam = make_agent(args)
    batch, order = make_batch(agent), torch.randperm(64)
    obs, actions, _, _, advantages, _ = batch
    dist = Normal(agent.policy(obs), agent.log_std.exp())
    ascent = gradient((dist.log_prob(actions).sum(-1) * ppo.normalize(advantages)).mean(), agent)
    direction = 0.1 * ascent / (np.sqrt(0.001) * ascent.abs() + 1e-5)  # Adam's first
    expected = adam["weights"] + 0.01 * np.sqrt(1 - 0.999) / (1 - 0.9) * direction

    other, other_adam = make_agent(args)
    trpo.fit_values(other, other_adam, batch, order, args)
    values = value_weights(agent)
    expected[values] = other_adam["weights"][values]
    vpg.vpg_update(agent, adam, batch, [order], make_schedule(0.01), args)
    torch.testing.assert_close(adam["weights"], expected, atol=1e-5, rtol=1e-4)


# --- A2C, with and without trust region ---


def test_a2c_is_ppo_with_its_settings(tmp_path, monkeypatch):
    """Huang et al. 2022: a whole run comes out the same."""
    monkeypatch.chdir(tmp_path)
    square = 1.0

    def update(agent, adam, batch, minibatches, schedule, args):
        """PPO's loss and RMSprop as TensorFlow has it."""
        nonlocal square
        shuffled = [x[minibatches[0]] for x in batch]
        ratio_is_1 = dataclasses.replace(args, clip_coef=1e-9)  # clipping cannot matter
        loss, metrics = ppo.ppo_loss(agent, shuffled, schedule, ratio_is_1)
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        g = nn.utils.parameters_to_vector([x.grad for x in agent.parameters()])
        agent.zero_grad()
        square = 0.99 * square + 0.01 * g**2
        adam["weights"] -= schedule["learning_rate"] * g / (square + 1e-5).sqrt()
        return {name: x[None] for name, x in metrics.items()}

    args = a2c.Args(env_id=WALK, num_envs=4, total_timesteps=400, learning_rate=0.01)
    sizes = args.num_steps, args.gae_lambda, args.update_epochs, args.num_minibatches
    assert sizes == (5, 1, 1, 1)
    theirs = ppo.train(dataclasses.replace(args, run_name="ppo"), update=update)
    ours = ppo.train(dataclasses.replace(args, run_name="a2c"), update=a2c.a2c_update)
    torch.manual_seed(args.seed)
    start = nn.utils.parameters_to_vector(ppo.Agent(3, 2, args).parameters())
    weights = [nn.utils.parameters_to_vector(x["agent"].parameters()) for x in (ours, theirs)]
    assert (weights[1] - start).norm() > 0.01
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-4)


def test_projection_by_hand():
    gradient = torch.tensor([[3.0, 2.0], [3.0, 2.0], [-3.0, 2.0], [3.0, 2.0], [5.0, 5.0]])
    slope = torch.tensor([[1.0, 0.0], [0.0, 0.25], [1.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    # Cut to the plane; free, twice; no slope; 35 is 34 too many: 5 - 34 / 25 * (3, 4).
    expected = [[1.0, 2.0], [3.0, 2.0], [-3.0, 2.0], [3.0, 2.0], [0.92, -0.44]]
    torch.testing.assert_close(a2c.project(gradient, slope, 1.0), torch.tensor(expected))
    assert torch.equal(a2c.project(gradient, slope, torch.inf), gradient)


def test_trust_region_projects_the_gradient_by_mean_and_log_std():
    args = a2c.Args(trust_region=0.05)
    (agent, adam), (average, _) = make_agent(args), make_agent(args)
    nn.utils.vector_to_parameters(adam["weights"] + 0.1, average.parameters())
    batch = make_batch(agent)
    obs, actions, _, _, advantages, returns = batch
    mean, old_mean = agent.policy(obs), average.policy(obs).detach()
    std, old_std = agent.log_std.exp(), average.log_std.exp().detach()
    error, a = (actions - mean) / std, advantages[:, None]
    bonus = 0.01  # an entropy grows as fast as its log std
    gain = torch.cat([a * error / std, a * (error**2 - 1) + bonus], -1).detach()
    slope = torch.cat(
        [(mean - old_mean) / std**2, 1 - (old_std**2 + (mean - old_mean) ** 2) / std**2], -1
    ).detach()
    excess = (slope * gain).sum(-1) - 0.05
    assert 10 < (excess > 0).sum() < 54
    lowered = gain - (excess.clamp(min=0) / (slope**2).sum(-1))[:, None] * slope
    statistics = torch.cat([mean, agent.log_std.expand_as(mean)], -1)
    value_loss = ((agent.get_value(obs) - returns) ** 2).mean()
    expected = gradient(-(lowered * statistics).sum(-1).mean() + 0.5 * value_loss, agent)
    found = gradient(a2c.a2c_loss(agent, average, batch, args), agent)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_average_policy_follows_slowly():
    args = a2c.Args(trust_region=1.0)
    agent, adam = make_agent(args)
    start, average = adam["weights"].clone(), adam["weights"].clone()
    for _ in range(3):
        a2c.a2c_update(agent, adam, make_batch(agent), None, make_schedule(0.1), args)
        average = 0.99 * average + 0.01 * adam["weights"]
    torch.testing.assert_close(adam["average"], average)
    assert 0 < (average - start).norm() < 0.05 * (adam["weights"] - start).norm()


def test_update_measures_the_trust_region_from_the_average_policy():
    args = a2c.Args(trust_region=0.05)
    (agent, adam), (average, _) = make_agent(args), make_agent(args)
    adam["average"] = adam["weights"] + 0.1
    nn.utils.vector_to_parameters(adam["average"].clone(), average.parameters())
    batch, before = make_batch(agent), adam["weights"].clone()
    descent = gradient(a2c.a2c_loss(agent, average, batch, args), agent)
    a2c.a2c_update(agent, adam, batch, None, make_schedule(), args)
    step = adam["weights"] - before  # the squares begin at 1: nearly the gradient itself
    assert torch.cosine_similarity(step, -descent, dim=0) > 0.9999


# --- CEM ---


def test_cem_finds_the_top_of_a_quadratic():
    rng, top = np.random.default_rng(0), np.array([3.0, -2.0, 0.5])
    args, mean, std = cem.Args(extra_std=0.5), np.zeros(3), np.ones(3)
    for progress in np.linspace(0, 1, 30):
        population = cem.draw(mean, std, progress, args, rng)
        mean, std = cem.fit(population, -((population - top) ** 2).sum(1), args.elite)
    np.testing.assert_allclose(mean, top, atol=1e-3)
    assert std.max() < 1e-3


def test_added_noise_falls_to_nothing_in_half_of_the_run():
    args, rng = cem.Args(extra_std=0.6, population=20000), np.random.default_rng(0)
    for progress, variance in ((0, 0.36), (0.25, 0.18), (0.5, 0), (0.9, 0)):
        drawn = cem.draw(np.array([5.0, 0.0]), np.array([0.8, 0.0]), progress, args, rng)
        np.testing.assert_allclose(drawn.mean(0), [5, 0], atol=0.03)
        np.testing.assert_allclose(drawn.var(0), [0.64 + variance, variance], atol=0.03)


def test_cem_fits_the_best_fifth():
    population = np.arange(20.0).reshape(10, 2)
    returns = np.array([0, 5, 1, 2, 3, 9, 4, 0, 0, 0])  # best: the rows [10, 11] and [2, 3]
    mean, std = cem.fit(population, returns, 0.2)
    assert mean.tolist() == [6, 7] and std.tolist() == [4, 4]


def test_cem_learns_and_counts_every_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = cem.Args(env_id="FakeTarget-Box-v0", total_timesteps=1550)
    run = cem.train(args)
    assert [x["global_step"] for x in run["updates"]] == [*range(100, 1600, 100), 1550]
    assert [x["global_step"] for x in run["episodes"]] == [*range(1, 1551)]
    returns = np.array([x["return"] for x in run["episodes"]])
    assert returns[:100].mean() < -0.3 and returns[-100:].mean() > -0.05
    saved = load(run["run_dir"])
    weights = nn.utils.parameters_to_vector(run["agent"].parameters())
    torch.testing.assert_close(weights, saved["mean"].float())
    # The observations are spread evenly over [-1, 1] and become normal.
    assert saved["mean"].tolist() == pytest.approx([3**-0.5, 0], abs=0.05)


# --- Each as a program ---

FLAGS = {
    "trpo": "--num-steps 32 --value-epochs 2 --checkpoint-interval 2",
    "vpg": "--num-steps 32 --value-epochs 2 --checkpoint-interval 2",
    "a2c": "--num-envs 4 --trust-region 1 --checkpoint-interval 4",
    "cem": "--population 6",
}


NAMES = ("SCRIPT", "Args", "Agent", "actor", "details", "train")  # what a rival replaces


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Run a rival with a command line, in an empty folder; return its exit code."""
    monkeypatch.chdir(tmp_path)
    replaced = {x: getattr(ppo, x) for x in NAMES}
    monkeypatch.setattr(ppo.signal, "signal", lambda *_: None)  # Ctrl-C stays pytest's

    def run(name, flags):
        for x in replaced:
            monkeypatch.setattr(ppo, x, replaced[x])  # a new process would have it so
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags.split()])
        try:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        except SystemExit as stop:
            return stop.code
        return 0

    return run


def load(folder):
    return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("name", FLAGS)
def test_resumed_run_is_the_whole_run(name, program, monkeypatch, capsys):
    flags = f"--env-id {WALK} --seed 2 --total-timesteps 320 {FLAGS[name]}"
    assert program(name, f"{flags} --run-name whole") == 0
    save, saves = ppo.save_checkpoint, []

    def interrupted(*args):
        save(*args)
        saves.append(args)
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "save_checkpoint", interrupted)
    assert program(name, f"{flags} --run-name half") == 130
    assert 0 < load("runs/half")["updates"][-1]["global_step"] < 300
    assert program(name, "--resume runs/half") == 0
    whole, half = load("runs/whole"), load("runs/half")
    assert whole["updates"][-1]["global_step"] == half["updates"][-1]["global_step"] == 320
    assert whole["episodes"] == half["episodes"] and len(half["episodes"]) > 10
    for key, weights in whole["agent"].items():
        assert torch.equal(weights, half["agent"][key])
    assert all("charts/SPS" in x for x in whole["updates"])
    assert list(Path("runs/whole").glob("events*"))

    assert program(name, "--evaluate runs/whole --eval-episodes 2") == 0
    assert " in 2 episodes" in capsys.readouterr().out


@pytest.mark.parametrize("name", FLAGS)
def test_what_a_rival_does_not_use_is_refused_and_its_details_are_its_docstring(
    name, program, capsys
):
    assert program(name, f"--env-id {WALK} --early-stop-kl 0.1") == 2
    assert "does not use early_stop_kl" in capsys.readouterr().err
    assert program(name, "--details") == 0
    assert "Settings: " in capsys.readouterr().out
