"""Fixtures shared by the tests of the continuous script."""

import functools

import fake_envs
import pytest
import torch

import ppo_continuous_action as ppo


@pytest.fixture
def tiny(tmp_path):
    """Make Args for a run of a second that writes below tmp_path."""
    count = iter(range(1000))

    def make(**settings):
        defaults = {
            "env_id": "FakeCounter-v0",
            "total_timesteps": 96,
            "num_steps": 16,
            "num_envs": 2,
            "num_minibatches": 4,
            "update_epochs": 2,
            "output_dir": str(tmp_path),
            "run_name": None if "resume" in settings else f"run{next(count)}",
        }
        return ppo.Args(**{**defaults, **settings})

    return make


class Recorder:
    """What passes through the inner functions of `train`, in the order of the calls."""

    def __init__(self):
        self.gae, self.minibatches, self.optimizers, self.steps = [], [], [], []


@pytest.fixture
def recorded(monkeypatch):
    """Record the arguments of gae, of each minibatch's loss, and of each Adam step."""
    recorder = Recorder()
    real_gae, real_gradient = ppo.gae, ppo.loss_gradient

    def gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
        result = real_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda)
        names = ("rewards", "values", "next_values", "terminated", "done", "advantages", "returns")
        tensors = (rewards, values, next_values, terminated, done, *result)
        recorder.gae.append({name: x.clone() for name, x in zip(names, tensors)})
        return result

    def loss_gradient(agent, minibatch, clip_coef, *settings):
        gradient, metrics = real_gradient(agent, minibatch, clip_coef, *settings)
        recorder.minibatches.append(
            {"agent": agent, "data": [x.clone() for x in minibatch], "clip_coef": clip_coef.item()}
            | {"settings": settings, "gradient": gradient.clone(), "metrics": metrics.clone()}
        )
        return gradient, metrics

    class Adam(torch.optim.Adam):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            recorder.optimizers.append(self)

        def step(self, closure=None):
            weights = self.param_groups[0]["params"][0]
            recorder.steps.append(
                {"gradient": weights.grad.clone(), "lr": self.param_groups[0]["lr"]}
            )
            return super().step(closure)

    monkeypatch.setattr(ppo, "gae", gae)
    monkeypatch.setattr(ppo, "loss_gradient", loss_gradient)
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    return recorder


@pytest.fixture
def counters():
    """The Counter environments that a test makes."""
    fake_envs.Counter.made.clear()
    return fake_envs.Counter.made


@pytest.fixture
def counter_env(monkeypatch):
    """Give FakeCounter-v0 other settings: counter_env(length=3, end="terminated")."""

    def configure(**settings):
        spec = ppo.gym.registry["FakeCounter-v0"]
        monkeypatch.setattr(spec, "entry_point", functools.partial(fake_envs.Counter, **settings))

    return configure


def same_weights(a, b):
    """True if two agents have bitwise the same weights."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)
