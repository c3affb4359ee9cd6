"""The training loop: schedules, minibatches, the optimizer, switches, determinism."""

import dataclasses

import fake_envs
import numpy as np
import pytest
import torch
from conftest import same_weights

import ppo_continuous_action as ppo
from ppo_continuous_action import RunError, train

# --- Details 3, 4, 6, 11 and the extras ---


def test_one_adam_with_ppo2s_epsilon_holds_every_weight_once(tiny, recorded):
    result = train(tiny(num_envs=1, total_timesteps=16))
    (optimizer,) = recorded.optimizers
    (group,) = optimizer.param_groups
    assert group["eps"] == 1e-5 and group["betas"] == (0.9, 0.999) and group["weight_decay"] == 0
    (weights,) = group["params"]
    assert weights.numel() == sum(x.numel() for x in result["agent"].parameters())
    flat = torch.nn.utils.parameters_to_vector(result["agent"].parameters())
    assert torch.equal(weights, flat)
    before = flat.detach().clone()
    weights += 1  # the network's weights are views of the optimizer's
    assert torch.equal(
        torch.nn.utils.parameters_to_vector(result["agent"].parameters()), before + 1
    )


def test_learning_rate_falls_linearly_and_is_constant_within_an_update(tiny, recorded):
    train(tiny(total_timesteps=4 * 32, learning_rate=0.4))
    rates = [x["lr"] for x in recorded.steps]
    assert rates == pytest.approx(np.repeat([0.4, 0.3, 0.2, 0.1], 8).tolist())


def test_learning_rate_and_clip_range_stay_without_annealing(tiny, recorded):
    train(tiny(anneal_lr=False))
    assert {x["lr"] for x in recorded.steps} == {3e-4}
    assert {round(x["clip_coef"], 6) for x in recorded.minibatches} == {0.2}


def test_clip_range_annealing_follows_the_same_line(tiny, recorded):
    train(tiny(total_timesteps=4 * 32, anneal_clip=True, clip_coef=0.4))
    ranges = [x["clip_coef"] for x in recorded.minibatches]
    assert ranges == pytest.approx(np.repeat([0.4, 0.3, 0.2, 0.1], 8).tolist())


def test_every_sample_is_used_once_per_epoch_in_a_new_order_with_aligned_rows(tiny, recorded):
    args = tiny(norm_obs=False, scale_rewards=False, num_envs=1, num_steps=32, total_timesteps=32)
    train(args)
    assert len(recorded.minibatches) == args.update_epochs * args.num_minibatches
    batch = recorded.gae[0]
    orders = []
    for epoch in (recorded.minibatches[:4], recorded.minibatches[4:]):
        rows = [torch.cat(x) for x in zip(*(minibatch["data"] for minibatch in epoch))]
        assert all(len(minibatch["data"][0]) == 8 for minibatch in epoch)
        step = (5 * rows[0][:, 0] + rows[0][:, 1]).long()  # the observation tells the time
        assert sorted(step.tolist()) == list(range(32))
        for stored, name in zip(rows[3:], ("values", "advantages", "returns")):
            assert torch.equal(stored, batch[name][step, 0])
        orders.append(step.tolist())
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


def test_gradient_norm_is_clipped_jointly_keeping_its_direction(tiny, recorded):
    train(tiny(max_grad_norm=0.01))
    clipped = 0
    for minibatch, step in zip(recorded.minibatches, recorded.steps, strict=True):
        before, after = minibatch["gradient"].norm(), step["gradient"].norm()
        torch.testing.assert_close(after, before.clamp(max=0.01), rtol=1e-3, atol=0)
        clipped += bool(before > 0.01)
        cosine = torch.cosine_similarity(minibatch["gradient"], step["gradient"], dim=0)
        assert cosine == pytest.approx(1, abs=1e-5)
    assert clipped > 0


def test_gradient_is_untouched_without_clipping_or_below_the_limit(tiny, recorded):
    for limit in (None, 1e6):
        train(tiny(max_grad_norm=limit))
    for minibatch, step in zip(recorded.minibatches, recorded.steps, strict=True):
        assert torch.equal(minibatch["gradient"], step["gradient"])


def test_target_kl_ends_the_epochs_and_the_next_iteration_trains_again(tiny):
    stopped = train(tiny(target_kl=0.0, update_epochs=5))["updates"]
    assert [x["charts/epochs"] for x in stopped] == [1, 1, 1]
    full = train(tiny(target_kl=None, update_epochs=5))["updates"]
    assert [x["charts/epochs"] for x in full] == [5, 5, 5]


# --- Details 7, 8, 12 and the ratio ---


@pytest.mark.parametrize("env_id", ["FakeCounter-v0", "HalfCheetah-v4"])
def test_ratio_is_one_as_long_as_no_step_is_taken(tiny, recorded, env_id):
    """Holds only if observations, actions, normalization and log-probabilities all agree."""
    updates = train(tiny(env_id=env_id, learning_rate=0.0, num_steps=64, total_timesteps=384))[
        "updates"
    ]
    for update in updates:
        assert update["losses/clipfrac"] == 0 and abs(update["losses/approx_kl"]) < 1e-9
        assert abs(update["losses/old_approx_kl"]) < 1e-5
    for minibatch in recorded.minibatches:
        obs, actions, logprobs = minibatch["data"][:3]
        with torch.no_grad():
            new_logprobs = minibatch["agent"].get_action_and_value(obs, actions)[1]
        assert (new_logprobs - logprobs).exp().sub(1).abs().max() < 1e-5


def test_first_minibatch_of_each_iteration_has_ratio_one_and_later_ones_do_not(tiny, recorded):
    train(tiny(learning_rate=0.01))
    kl = torch.stack([x["metrics"][ppo.KL] for x in recorded.minibatches]).view(3, 8)
    assert (kl[:, 0].abs() < 1e-9).all() and (kl[:, 1:] > 1e-9).all()


def test_losses_see_the_settings_and_unnormalized_advantages(tiny, recorded):
    train(tiny(norm_adv=False, clip_vloss=False, ent_coef=0.03, vf_coef=0.7))
    assert {x["settings"] for x in recorded.minibatches} == {(False, False, 0.03, 0.7)}
    stored = torch.cat([x["data"][4] for x in recorded.minibatches[:4]]).sort().values
    assert torch.equal(stored, recorded.gae[0]["advantages"].flatten().sort().values)


def test_logged_losses_are_means_over_all_minibatches(tiny, recorded):
    updates = train(tiny())["updates"]
    for update, eight in zip(
        updates, torch.stack([x["metrics"] for x in recorded.minibatches]).view(3, 8, -1)
    ):
        logged = [update[name] for name in ppo.LOSS_METRICS]
        assert logged == pytest.approx(eight.mean(0).tolist(), rel=1e-4, abs=1e-7)
    norms = torch.stack([x["gradient"].norm() for x in recorded.minibatches]).view(3, 8).mean(1)
    assert [x["losses/grad_norm"] for x in updates] == pytest.approx(norms.tolist(), rel=1e-4)
    batch = recorded.gae[-1]
    assert updates[-1]["losses/explained_variance"] == pytest.approx(
        ppo.explained_variance(batch["values"], batch["returns"])
    )


# --- Determinism and switches ---


def test_same_seed_gives_bitwise_the_same_run_and_another_seed_does_not(tiny):
    settings = {"env_id": "Hopper-v4", "num_steps": 64, "total_timesteps": 384}
    a, b, c = (train(tiny(**settings, seed=seed)) for seed in (3, 3, 4))
    assert same_weights(a["agent"], b["agent"]) and a["episodes"] == b["episodes"] != []
    timing = {"charts/SPS", "charts/SPS_rollout", "charts/SPS_update"}
    for x, y in zip(a["updates"], b["updates"]):
        assert {k: v for k, v in x.items() if k not in timing} == {
            k: v for k, v in y.items() if k not in timing
        }
    assert not same_weights(a["agent"], c["agent"]) and a["episodes"] != c["episodes"]


SWITCHES = {
    "truncation_is_terminal": True,
    "norm_obs": False,
    "clip_obs": None,
    "scale_rewards": False,
    "clip_reward": None,
    "anneal_lr": False,
    "adam_eps": 1e-8,
    "gae_lambda": 1.0,
    "norm_adv": False,
    "anneal_clip": True,
    "clip_vloss": False,
    "ent_coef": 0.01,
    "vf_coef": 1.0,
    "max_grad_norm": None,
    "orthogonal_init": False,
    "shared_network": True,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_the_run(tiny, switch):
    # Normalized observations reach 0.1 and first rewards 10 here, so that both clippings bite.
    settings = {"clip_obs": 0.1, "num_envs": 1, "total_timesteps": 48, "learning_rate": 0.01}
    plain = train(tiny(**settings))["agent"]
    switched = train(tiny(**{**settings, switch: SWITCHES[switch]}))["agent"]
    a, b = (torch.nn.utils.parameters_to_vector(x.parameters()) for x in (plain, switched))
    assert a.shape != b.shape or not torch.equal(a, b)


def test_the_run_does_not_depend_on_logging_settings(tiny):
    plain = train(tiny())["agent"]
    other = train(tiny(checkpoint_interval=1, print_details=True))["agent"]
    assert same_weights(plain, other)


# --- Compilation ---


def test_compiled_and_eager_updates_give_the_same_numbers(tiny, monkeypatch):
    monkeypatch.setattr(ppo, "COMPILE_MINIBATCHES", 0)
    settings = {"env_id": "Pendulum-v1", "num_steps": 64, "total_timesteps": 128, "num_envs": 1}
    compiled_calls = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compiled_calls.append(f) or real(f, **kw))
    fast = train(tiny(**settings))
    assert len(compiled_calls) == 1
    plain = train(tiny(**settings, compile=False))
    assert len(compiled_calls) == 1
    for x, y in zip(fast["agent"].parameters(), plain["agent"].parameters()):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    for name in ppo.LOSS_METRICS:
        assert fast["updates"][-1][name] == pytest.approx(
            plain["updates"][-1][name], rel=1e-3, abs=1e-6
        )


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("InvalidCxxCompiler: no working C++ compiler\nlong trace"), "no working C++"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_without_a_compiler_the_run_is_eager_with_one_warning(
    tiny, monkeypatch, capsys, error, shown
):
    monkeypatch.setattr(ppo, "COMPILE_MINIBATCHES", 0)

    def broken(function, **options):
        def fail(*args):
            raise error

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    result = train(tiny())
    printed = capsys.readouterr().out
    assert printed.count("Warning") == 1 and shown in printed
    monkeypatch.undo()
    assert same_weights(result["agent"], train(tiny(compile=False))["agent"])


def test_short_runs_are_not_compiled(tiny, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *a, **k: pytest.fail("compiled a run of a second"))
    train(tiny())


# --- Bad numbers stop the run ---


@pytest.mark.parametrize(("bad", "first"), [("nan", 41), ("inf", 32 + 9)])
def test_a_bad_observation_stops_the_run_after_saving_the_last_good_model(
    tiny, counter_env, bad, first
):
    counter_env(bad_step=first, bad=bad)
    args = tiny(num_envs=1, num_steps=32, total_timesteps=96)
    with pytest.raises(RunError, match=f"observation is NaN or infinite at step {first}\\."):
        train(args)
    saved = ppo.load_file(args.run_dir / "model.pt", "agent")
    assert all(torch.isfinite(x).all() for x in saved["agent"].values())
    assert torch.isfinite(saved["statistics"]["obs"]["mean"]).all()
    assert saved["statistics"]["obs"]["count"] == pytest.approx(33, abs=0.01)  # after iteration 1


def test_a_bad_final_observation_stops_the_run_at_its_step(tiny, monkeypatch):
    real = fake_envs.Counter._obs
    bad = lambda self: real(self) * (np.nan if (self.episode, self.t) == (2, 5) else 1)  # noqa: E731
    monkeypatch.setattr(fake_envs.Counter, "_obs", bad)
    with pytest.raises(RunError, match="observation is NaN or infinite at step 15"):
        train(tiny(num_envs=1, num_steps=32))


def test_a_bad_reward_stops_the_run(tiny):
    with pytest.raises(RunError, match=r"reward is NaN or infinite at step 7\."):
        train(tiny(env_id="FakeBadReward-v0", num_envs=1))


def test_a_bad_loss_stops_the_run(tiny, monkeypatch):
    real = ppo.loss_gradient

    def poisoned(agent, minibatch, *settings):
        gradient, metrics = real(agent, minibatch, *settings)
        return gradient, metrics * float("nan")

    monkeypatch.setattr(ppo, "loss_gradient", poisoned)
    args = tiny()
    with pytest.raises(RunError, match="losses/policy_loss is NaN or infinite at step 32"):
        train(args)
    saved = ppo.load_file(args.run_dir / "model.pt", "agent")
    assert all(torch.isfinite(x).all() for x in saved["agent"].values())


# --- Devices ---


def test_auto_takes_a_gpu_only_for_large_minibatches(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    small = tiny()
    large = dataclasses.replace(small, num_steps=ppo.GPU_MINIBATCH * 4, total_timesteps=10**6)
    assert ppo.choose_device(small).type == "cpu"
    assert ppo.choose_device(large).type == "cuda"
    assert ppo.choose_device(dataclasses.replace(small, device="cuda")).type == "cuda"
    assert ppo.choose_device(dataclasses.replace(large, device="cpu")).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ppo.choose_device(large).type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_and_cpu_updates_agree(tiny):
    a, b = train(tiny(device="cuda")), train(tiny(device="cpu"))
    for x, y in zip(a["agent"].parameters(), b["agent"].parameters()):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-3, atol=1e-5)
