"""The update of every script: details 4, 6-8, 11, 12; early stopping; what is logged of them."""

from types import SimpleNamespace

import fake_envs
import numpy as np
import pytest
import torch
from adapters import scripts, scripts_with, slow_on
from helpers import flags, record, same_weights


def double_sum(rewards, values, next_values, done, gamma, gae_lambda):
    """A_t = sum_k (gamma lambda)^k delta_{t+k} up to the end of the episode, term by term."""
    advantages = torch.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            for k in range(t, len(rewards)):
                delta = rewards[k, n] + gamma * next_values[k, n] - values[k, n]
                advantages[t, n] += (gamma * gae_lambda) ** (k - t) * delta
                if done[k, n]:
                    break
    return advantages


@scripts_with("environments")
@pytest.mark.parametrize("annealed", [True, False])
@slow_on("kl_penalty", "multidiscrete", "lstm")
def test_step_size_and_clip_range_fall_linearly_and_are_held_within_an_iteration(
    script, tiny, recorded, annealed
):
    begin = dict.fromkeys(script.annealed, 0.004)
    switches = dict.fromkeys(script.annealed.values(), annealed)
    updates = script.module.train(tiny(**begin, **switches, total_timesteps=128))["updates"]
    line = np.array([1, 0.75, 0.5, 0.25] if annealed else [1, 1, 1, 1])
    for name, first in begin.items():
        numbers = np.array([step.schedule[name] for step in recorded.steps]).reshape(4, -1)
        assert numbers.shape[1] > 1
        expected = np.repeat(first * line[:, None], numbers.shape[1], axis=1)
        np.testing.assert_allclose(numbers, expected, rtol=1e-6)
    rates = [x["charts/learning_rate"] for x in updates]
    np.testing.assert_allclose(rates, 0.004 * line, rtol=1e-6)


@scripts("continuous", "kl_penalty", "atari", "lstm")
def test_checks_compare_the_whole_update_with_the_advantages_and_values_with_rewards(
    script, tiny, recorded
):
    """Advantages are sums of the surprises of one episode."""
    args = tiny(total_timesteps=32, num_minibatches=1, learning_rate=0.001, gamma=0.8)
    result = script.module.train(args)
    (batch,), step = recorded.gae, recorded.steps[-1]  # the step is of the whole batch
    (update,) = result["updates"]
    with torch.no_grad():
        change = script.outputs(result["agent"], step)[0].flatten() - step.logprobs.flatten()
    assert change.abs().max() > 1e-4
    checked = script.checked(step)
    assert checked.sum() >= args.num_steps
    correlation = np.corrcoef(change[checked], step.advantages.flatten()[checked])[0, 1]
    assert update["check/update"] == pytest.approx(correlation, abs=1e-4)
    rollout = [batch[x] for x in ("rewards", "values", "next_values", "done")]
    expected = double_sum(*rollout, 0.8, args.gae_lambda)
    torch.testing.assert_close(batch["advantages"], expected, atol=1e-5, rtol=0)
    observed = double_sum(*rollout, 0.8, 1.0) + batch["values"]
    bias = (batch["values"] - observed).mean() / observed.square().mean().sqrt()
    assert update["check/value_bias"] == pytest.approx(bias.item(), abs=1e-4)
    first, *_, last = (x.metrics["losses/approx_kl"].item() for x in recorded.steps)
    assert abs(first) < 1e-9 < last and update["check/first_kl"] == first


@scripts_with("environments")
def test_every_sample_is_used_once_per_epoch_in_a_new_order_with_its_own_row(
    script, tiny, recorded
):
    args = tiny(total_timesteps=64, **script.raw)
    script.module.train(args)
    assert len(recorded.steps) == 2 * args.update_epochs * args.num_minibatches
    steps, envs = recorded.gae[0]["values"].shape
    orders = []
    for k, epoch in enumerate(np.array_split(np.array(recorded.steps, dtype=object), 4)):
        batch, first = recorded.gae[k // 2], k // 2 * steps
        assert len({step.advantages.numel() for step in epoch}) == 1  # equal parts
        rows = [row for step in epoch for row in script.identity(step.obs)]
        places = [(5 * episode + t - first, n) for n, episode, t in rows]
        assert sorted(places) == list(np.ndindex(steps, envs))
        batch["returns"] = batch["advantages"] + batch["values"]
        for column, name in ((3, "values"), (4, "advantages"), (5, "returns")):
            stored = torch.cat([step.data[column].flatten() for step in epoch]).tolist()
            assert stored == [batch[name][place].item() for place in places]
        orders.append(places)
    assert len({str(order) for order in orders}) == 4  # a new one in each epoch and iteration
    assert all(order != sorted(order) for order in orders)


@scripts_with("environments")
def test_the_ratio_is_one_at_first_and_logged_losses_are_means_over_all_minibatches(
    script, tiny, recorded
):
    """The former only if observations, actions, normalization and log-probabilities all agree."""
    updates = script.module.train(tiny("Walk", learning_rate=0.003))["updates"]
    groups = np.array_split(np.array(recorded.steps, dtype=object), 3)
    for update, steps in zip(updates, groups, strict=True):
        for name in steps[0].metrics:
            mean = np.mean([step.metrics[name].item() for step in steps])
            assert update[name] == pytest.approx(mean, rel=1e-4, abs=1e-7), name
        names = {x for x in update if x.startswith("losses/")}
        assert names == steps[0].metrics.keys() | {"losses/explained_variance"}
        assert abs(update["check/first_kl"]) < 1e-9
    batch = recorded.gae[-1]
    returns = batch["advantages"] + batch["values"]
    expected = 1 - batch["advantages"].var() / returns.var()
    assert updates[-1]["losses/explained_variance"] == pytest.approx(expected.item(), abs=1e-4)


@scripts_with("environments")
@slow_on("multidiscrete", "lstm")
def test_nothing_is_divided_by_a_zero(script, tiny, recorded, monkeypatch):
    """Rewards of 0 are not by their deviation, nor errors of values by returns that never vary."""
    failed = lambda self, _: (self.observe(), 0.0, True, False, {})  # noqa: E731
    monkeypatch.setattr(fake_envs.Walk, "advance", failed)
    script.begin_without_statistics(monkeypatch)
    updates = script.module.train(tiny("Walk"))["updates"]
    for update, batch in zip(updates, recorded.gae, strict=True):
        mean, variance = batch["values"].mean().item(), batch["values"].var().item()
        assert update["check/value_bias"] == pytest.approx(mean / 1e-8, rel=1e-3)
        assert update["losses/explained_variance"] == pytest.approx(1 - variance / 1e-8, rel=1e-3)


def noisy_step(script, recorded, args):
    """An agent, a step of it, and the settings as the loss gets them.

    Old log-probabilities and values have noise, so that all is clipped somewhere.
    """
    agent, step = script.module.train(args)["agent"], recorded.steps[0]
    for x in (step.logprobs, step.values):
        x += 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    schedule = {name: torch.tensor(x) for name, x in step.schedule.items()}
    return agent, step, SimpleNamespace(**{**vars(args), **schedule})


@scripts("continuous", "kl_penalty", "multidiscrete", "lstm")
@pytest.mark.parametrize("clip", [0.2, None])
def test_loss_and_metrics_by_hand(script, tiny, recorded, clip):
    settings = {"norm_adv": clip is not None, "ent_coef": 0.03, "vf_coef": 0.7}
    settings |= {"total_timesteps": 32, "learning_rate": 0.0}
    args = tiny("Walk", **settings, **script.clipping(clip))
    agent, step, in_update = noisy_step(script, recorded, args)
    with torch.no_grad():
        loss, metrics = script.module.ppo_loss(agent, step.data, in_update)
        new_logprobs, entropy, values = (x.double() for x in script.outputs(agent, step))
    logprobs, old_values, advantages, returns = (x.double() for x in step.data[2:6])
    ratio, change = (new_logprobs - logprobs).exp(), values - old_values
    errors = (values - returns) ** 2
    if clip:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        held = old_values + change.clip(-clip, clip)
        errors = torch.maximum(errors, (held - returns) ** 2)
    expected = {
        "losses/policy_loss": -script.gains(advantages, ratio).mean(),
        "losses/value_loss": errors.mean() / 2,
        "losses/entropy": entropy.mean(),
        "losses/approx_kl": (ratio - 1 - ratio.log()).mean(),
        "losses/clipfrac": ((ratio < 0.8) | (ratio > 1.2)).double().mean(),
    }
    assert expected["losses/clipfrac"] > 0.1 and (change.abs() > 0.2).any()
    own = {x: y.item() for x, y in metrics.items() if x not in expected}
    assert own in ({}, {"losses/kl": 0})  # of the penalty; the policy has not moved
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value.item(), rel=1e-3, abs=1e-5), name
    total = expected["losses/policy_loss"] - 0.03 * entropy.mean() + 0.7 * errors.mean() / 2
    assert loss.item() == pytest.approx(total.item(), rel=1e-3)


@scripts_with("games")
def test_the_gradient_as_a_whole_is_scaled_down_to_the_limit(script, tiny, recorded, monkeypatch):
    """That its direction is kept, PyTorch sees to."""
    limits = record(monkeypatch, torch.nn.utils, "clip_grad_norm_")
    script.module.train(tiny("Walk", max_grad_norm=0.1, total_timesteps=32))
    assert {type(limit) for _, limit, _ in limits} == {float}  # not to be read from a GPU
    norms = np.array([step.metrics["losses/grad_norm"].item() for step in recorded.steps])
    assert norms.max() > 0.1
    found = [step.gradient.norm().item() for step in recorded.steps]
    np.testing.assert_allclose(found, norms.clip(max=0.1), rtol=1e-3)


@scripts("continuous", "atari", "lstm")
@slow_on("atari", "lstm")
def test_early_stop_kl_compares_the_mean_of_the_last_epoch(script, tiny, recorded):
    settings = {"total_timesteps": 32, "update_epochs": 8, "learning_rate": 3e-4}
    args = tiny("Walk", **settings)
    script.module.train(args)
    kl = np.array([step.metrics["losses/approx_kl"].item() for step in recorded.steps])
    means = kl.reshape(8, args.num_minibatches).mean(1)
    last = kl.reshape(8, -1)[:, -1]
    target = 0.99 * last[5]
    # Last minibatches, means of all epochs so far, or their sums, would pass it elsewhere.
    stops = [means, last, means.cumsum(), means.cumsum() / np.arange(1, 9)]
    expected, *others = (int(np.argmax([*(x > target), True])) + 1 for x in stops)
    assert expected not in [1, 8, *others]
    recorded.steps.clear()
    script.module.train(tiny("Walk", **settings, early_stop_kl=target))
    assert len(recorded.steps) == expected * args.num_minibatches
    recorded.steps.clear()
    settings = {"learning_rate": 0.003, "early_stop_kl": 1e-12, "update_epochs": 5}
    script.module.train(tiny("Walk", **settings))
    assert len(recorded.steps) == 3 * args.num_minibatches  # each iteration trains again


@scripts("continuous")
@pytest.mark.slow
def test_compiled_and_eager_updates_give_the_same_numbers(script, tiny, monkeypatch, capsys):
    settings = {"ent_coef": 0.01}
    functions, real = [], torch.compile
    monkeypatch.setattr(script.module, "STEPS_PER_CALL", 2)  # which compiles in half the time
    monkeypatch.setattr(torch, "compile", lambda f, **kw: functions.append(f) or real(f, **kw))
    fast = script.module.train(tiny("Walk", compile="yes", **settings))
    printed = capsys.readouterr().out
    assert len(functions) == printed.count("compiles the update") == 1
    assert "could not be compiled" not in printed
    plain = script.module.train(tiny("Walk", **settings))
    assert len(functions) == 1
    for x, y in zip(fast["agent"].parameters(), plain["agent"].parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    for name in ("losses/policy_loss", "losses/value_loss", "losses/grad_norm"):
        a, b = fast["updates"][-1][name], plain["updates"][-1][name]
        assert a == pytest.approx(b, rel=1e-3, abs=1e-6)


@scripts("continuous", "atari")
def test_a_run_is_compiled_if_it_is_long_or_told_to_and_a_resumed_one_like_the_whole(
    script, tiny, monkeypatch, capsys
):
    """By the number of its Adam steps: 3 iterations of 2 epochs of 4 minibatches, or of 2."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(1) or function)

    def compiles(compile, adam_steps, **others):
        monkeypatch.setattr(script.module, "COMPILE_FROM", adam_steps)
        compiled.clear()
        script.module.train(tiny("Walk", compile=compile, **others))
        said = "ends sooner without compiling its update" in capsys.readouterr().out
        assert said == (compile == "auto" and not compiled)
        return bool(compiled)

    steps = 6 * tiny().num_minibatches
    assert compiles("auto", steps) and not compiles("auto", steps + 1)
    assert compiles("yes", steps + 1) and not compiles("no", 1)
    script.module.train(tiny("Walk", compile="no", total_timesteps=64, run_name="begun"))
    monkeypatch.setattr(script.module, "COMPILE_FROM", steps)
    script.module.train(tiny("Walk", compile="auto", run_name="begun"), resume="runs/begun")
    assert compiled


@scripts("continuous", "vector_env")
def test_where_compiling_fails_the_run_is_eager_but_ones_own_error_is_a_traceback(
    script, tiny, cli, monkeypatch, capsys
):
    def fails(*args):
        raise torch._dynamo.exc.TorchDynamoException("InvalidCxxCompiler: none found\nand more")

    def wrong(*args):
        raise ValueError("my own mistake")

    expected = script.module.train(tiny("Walk"))["agent"]
    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    capsys.readouterr()
    assert same_weights(script.module.train(tiny("Walk", compile="yes"))["agent"], expected)
    assert "could not be compiled, so it takes longer: Inv" in capsys.readouterr().out
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(script.module, "ppo_loss", wrong)
    with pytest.raises(ValueError, match="my own mistake"):
        cli(flags(tiny("Walk", compile="yes")))
