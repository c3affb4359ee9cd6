"""What the shared tests must know of each script: its smallest run, its networks, its updates."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import fake_envs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass
class Step:
    """One gradient step: what it was given and what it did."""

    data: list[Tensor]  # the minibatch: obs, actions, logprobs, values, advantages, returns
    clip_coef: float
    learning_rate: float
    gradient: Tensor  # one vector, as it enters Adam
    metrics: dict[str, Tensor]


class Recorder:
    """What passes through the functions that `train` calls, in the order of the calls."""

    def __init__(self) -> None:
        self.gae: list[dict[str, Tensor]] = []
        self.steps: list[Step] = []


class Script:
    """A script whose environments have vectors as observations and as actions."""

    unsuitable: ClassVar[dict[str, str]] = {  # environment -> what the refusal names
        "FakeWalk-Discrete-v0": "MultiDiscrete",
        "FakeWalk-Frames-v0": "Discrete",
        "FakeEndless-Box-v0": "FakeEndless-Box-v0",
    }
    sick: ClassVar[dict[str, Any]] = {"learning_rate": 0.5}  # settings that ruin a run
    levels: ClassVar[dict[str, tuple]] = {}  # of metrics of its own, as in LEVELS of the tests

    def __init__(self, name: str, space: str, **settings: Any) -> None:
        self.name, self.space, self.settings = name, space, settings
        self.path = ROOT / f"{name}.py"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.name)

    def env_id(self, kind: str) -> str:
        return f"Fake{kind}-{self.space}-v0"

    def args(self, **changes: Any) -> Any:
        """Settings of a run of three iterations on the Counter, whose numbers stay as they are."""
        settings = {
            "env_id": self.env_id("Truncated"),
            "num_envs": 2,
            "num_steps": 16,
            "total_timesteps": 96,
            "num_minibatches": 4,
            "update_epochs": 2,
            "device": "cpu",
            "compile": False,
            **self.settings,
            **changes,
        }
        return self.module.Args(**settings)

    @property
    def raw(self) -> dict[str, Any]:
        """Settings that leave observations and rewards as they are."""
        return {"norm_obs": False, "scale_rewards": False}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the script make the fake environments."""

    def identity(self, obs: Tensor) -> list[tuple[int, ...]]:
        """Environment, episode and step of rows of the Counter's observations."""
        return [tuple(row) for row in obs.flatten(0, -2).long().tolist()]

    def value(self, agent: nn.Module, episode: list[np.ndarray]) -> float:
        """Value of the last of an episode's observations."""
        return agent.get_value(torch.tensor(episode[-1][None], dtype=torch.float32)).item()

    def outputs(self, agent: nn.Module, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values of a minibatch under the agent."""
        return agent.get_action_and_value(*step.data[:2])[1:]

    def best_action(self, agent: nn.Module, obs: Tensor) -> np.ndarray:
        """What the environment gets without noise."""
        low, high = fake_envs.SPACES["Box"][1].low, fake_envs.SPACES["Box"][1].high
        return agent.policy(obs).clamp(torch.tensor(low), torch.tensor(high)).numpy(force=True)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> Recorder:
        """Record the arguments of gae and every gradient step from now on."""
        recorder = Recorder()
        record_gae(self.module, monkeypatch, recorder)
        self.record_steps(monkeypatch, recorder)
        return recorder

    def record_steps(self, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
        """Where ppo_update does everything: the gradient shows in Adam's running mean."""
        real = self.module.ppo_update

        def ppo_update(agent, weights, adam, batch, mb, learning_rate, clip_coef, args):
            data, before = [x[mb].clone() for x in batch], adam["mean"].clone()
            metrics = real(agent, weights, adam, batch, mb, learning_rate, clip_coef, args)
            gradient = (adam["mean"] - 0.9 * before) / (1 - 0.9)
            numbers = clip_coef.item(), learning_rate.item()
            recorder.steps.append(Step(data, *numbers, gradient, dict(metrics)))
            return metrics

        monkeypatch.setattr(self.module, "ppo_update", ppo_update)


def record_gae(module: ModuleType, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    real = module.gae
    names = ["rewards", "values", "next_values", "terminated", "done", "advantages", "returns"]

    def gae(*args):
        result = real(*args)
        recorder.gae.append({name: x.clone() for name, x in zip(names, (*args[:5], *result))})
        return result

    monkeypatch.setattr(module, "gae", gae)


SCRIPTS = {
    "continuous": Script("ppo_continuous_action", "Box"),
}
ALL = list(SCRIPTS)
VECTOR = [name for name in ALL if not name.startswith("atari")]


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on these scripts, by its argument `script`."""
    return pytest.mark.parametrize("script", names, indirect=True)


def counter_episode(script: Script, env: int, episode: int, t: int) -> list[np.ndarray]:
    """The Counter's observations from the first of an episode to the t-th."""
    counter = fake_envs.Counter(script.space)
    counter.index, counter.episode = env, episode
    observations = []
    for counter.t in range(t + 1):
        observations.append(counter.observe())
    return observations


def flags(args: Any) -> str:
    """The command line that gives these settings."""
    words = []
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words.append(f"{flag} {value}")
    return " ".join(words)
