"""What a run needs of its process, and leaves as it was: threads, random numbers, modes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import scripts, scripts_with, slow_on
from helpers import assert_same_runs, same_weights
from torch import nn


@scripts("continuous", "atari")
def test_a_second_run_in_the_process_is_refused_until_the_first_one_ends(script, tiny):
    """In the same thread and in another one, as those of Optuna's n_jobs."""
    refused = []

    def begin_another(result):
        with ThreadPoolExecutor(1) as pool:
            for start in (map, pool.map):
                with pytest.raises(script.module.UsageError, match="use a process for each"):
                    next(iter(start(script.module.train, [tiny("Walk")])))
                refused.append(len(result["updates"]))

    whole = script.module.train(tiny("Walk", run_name="whole"), on_iteration=begin_another)
    assert refused == [1, 1, 2, 2, 3, 3] and not list(Path("runs").glob("run*"))
    with pytest.raises(ZeroDivisionError):
        script.module.train(tiny("Walk"), on_iteration=lambda _: 1 / 0)
    assert_same_runs(whole, script.module.train(tiny("Walk")))


@scripts_with("environments")
@slow_on("kl_penalty", "multidiscrete", "atari", "lstm")
def test_modes_of_the_caller_do_not_matter_and_are_left_as_they_were(script, tiny):
    """64-bit floats by default; no gradients."""
    expected = script.module.train(tiny("Walk"))
    torch.set_default_dtype(torch.float64)
    try:
        result = script.module.train(tiny("Walk"))
        assert torch.get_default_dtype() == torch.float64
        resumed = script.module.train(resume="runs/run1")
        assert len(script.module.evaluate("runs/run1", episodes=1)) == 1
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_runs(expected, result)
    assert same_weights(expected["agent"], resumed["agent"])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_runs(expected, script.module.train(tiny("Walk")))
            assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)


@scripts_with("environments")
@slow_on("kl_penalty", "multidiscrete", "lstm")
def test_loading_a_policy_draws_no_random_numbers(script, tiny):
    script.module.train(tiny("Walk"))
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    script.module.load_checkpoint("runs/run0")
    assert torch.equal(torch.randn(3), expected)


class Noisy(nn.Module):
    """Notes how often it was called in training, and makes its results random then."""

    calls: ClassVar[list[bool]] = []

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dropout = layer, nn.Dropout(0.5)

    def forward(self, x):
        self.calls.append(self.training)
        return self.dropout(self.layer(x))


@scripts_with("vector")
def test_dropout_is_on_in_updates_only(script, tiny, monkeypatch):
    """A policy that was loaded has one action for an observation. The first KL shows dropout."""

    class Dropping(script.module.Agent):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.policy[2] = Noisy(self.policy[2])

    monkeypatch.setattr(script.module, "Agent", Dropping)
    real, seen = script.module.ppo_update, []

    def update(*inputs):
        before = len(Noisy.calls)
        metrics = real(*inputs)
        seen.extend(Noisy.calls[before:])
        return metrics

    Noisy.calls.clear()
    result = script.module.train(tiny("Walk", learning_rate=0.01), update=update)
    assert seen and all(seen) and sum(Noisy.calls) == len(seen) < len(Noisy.calls)
    assert all(abs(x["check/acting"]) < 1e-6 for x in result["updates"])
    assert all(abs(x["check/first_kl"]) > 1e-6 for x in result["updates"])
    policy = script.module.load_policy("runs/run0", gym.make(script.env_id("Walk")))
    actions = [policy(np.ones(3)).tolist() for _ in range(20)]
    assert actions == [actions[0]] * 20
    assert len(script.module.evaluate("runs/run0", episodes=1)) == 1


@scripts("continuous", "vector_env", "atari", "lstm")
@slow_on("atari", "lstm")
def test_on_iteration_gets_what_train_returns_and_may_end_the_run(script, tiny):
    seen = []

    def stop(result):
        seen.append((len(result["updates"]), result["agent"], result["run_dir"].name))
        if len(seen) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        script.module.train(tiny("Walk"), on_iteration=stop)
    assert [(x[0], x[2]) for x in seen] == [(1, "run0"), (2, "run0")]
    resumed = script.module.train(resume="runs/run0")  # what it held has been closed
    assert len(resumed["updates"]) == 3


@scripts("continuous")
def test_batch_norm_trains_and_acts_by_its_running_statistics(script, tiny, monkeypatch):
    class Normed(script.module.Agent):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.policy.insert(1, nn.BatchNorm1d(64))

        def evaluate_actions(self, obs, actions):
            flat = obs.flatten(0, -2), actions.flatten(0, -2)
            results = super().evaluate_actions(*flat)
            return [x.view(obs.shape[:-1]) for x in results]

    monkeypatch.setattr(script.module, "Agent", Normed)
    whole = script.module.train(tiny("Walk", checkpoint_interval=1, anneal_lr=False))
    assert all(abs(x["check/acting"]) < 1e-5 for x in whole["updates"])
    norm = script.module.load_checkpoint("runs/run0")["agent"].policy[1]
    assert norm.running_mean.abs().max() > 0 and norm.num_batches_tracked == 24
    script.module.train(tiny("Walk", total_timesteps=64, anneal_lr=False))
    longer = tiny("Walk", anneal_lr=False, run_name="run1")
    resumed = script.module.train(longer, resume="runs/run1")
    assert same_weights(whole["agent"], resumed["agent"])
    assert len(script.module.evaluate("runs/run0", episodes=1)) == 1
