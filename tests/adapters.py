"""What the shared tests must know of each script: its smallest run, its networks, its updates.

There are two families: `Script` and those that derive from it train in environments, `Toy` and its
own train language models.
"""

import copy
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import fake_envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import record, seeded
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent


class Step:
    """One gradient step: what it was given and what it did."""

    def __init__(self, minibatch: tuple[Tensor, ...]) -> None:
        self.data = type(minibatch)(*(x.clone() for x in minibatch))  # the script's Batch
        self.obs, self.actions, self.logprobs, self.values, *rest = self.data
        self.advantages, self.returns, *self.others = rest

    schedule: dict[str, float]  # learning_rate and what else changes during a run
    weights: Tensor  # before the step, one vector; not of games
    gradient: Tensor  # as it enters Adam; of games only
    metrics: dict[str, Tensor]


SHORT = "--num-steps 256 --num-minibatches 8 --total-timesteps"


class Script:
    """A script that trains in environments; these have vectors as observations and as actions.

    A new script has a class that derives from the one that it is most like: all that the shared
    tests ask of it stands there.
    """

    # What it can do, by which tests choose scripts: see `scripts_with`.
    features: ClassVar[set[str]] = {"environments", "vector", "gaussian"}
    real = f"HalfCheetah-v4 {SHORT} 20480"  # a run that can be killed
    refused: ClassVar[dict[str, list]] = {  # setting -> values; the refusal names its flag
        "num_envs": [0],
        "num_steps": [-5],
        "total_timesteps": [0.5, 3],
        "gamma": [1.5],
        "gae_lambda": [-0.1],
        "seed": [-1, 2**63],
        "num_minibatches": [7],
        "run_name": ["a/b", ".."],
    }
    unsuitable: ClassVar[dict[str, str]] = {  # environment -> what the refusal names
        "FakeWalk-Discrete-v0": "ppo_multidiscrete.py",
        "ALE/Pong-v5": "ALE",
        "Backgammon": "Backgammon",
        "HalfCheeta-v4": "mean: `HalfCheetah`",
    }
    space = "Box"
    settings: ClassVar[dict[str, Any]] = {}  # other than those of `args`
    # What leaves observations and rewards as they are.
    raw: ClassVar[dict[str, Any]] = {"norm_obs": False, "scale_rewards": False}
    annealed: ClassVar[dict[str, str]] = {"learning_rate": "anneal_lr"}  # and the switch of each

    def __init__(self, name: str, file: str) -> None:
        self.name, self.path = name, ROOT / f"{file}.py"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.path.stem)

    def env_id(self, kind: str) -> str:
        return f"Fake{kind}-{self.space}-v0"

    def args(self, **changes: Any) -> Any:
        """Settings of a run of three iterations on the Counter."""
        settings = {"env_id": self.env_id("Truncated"), "num_envs": 2, "num_steps": 16}
        settings |= {"total_timesteps": 96, "num_minibatches": 4, "update_epochs": 2}
        if hasattr(self.module.Args, "compile"):
            settings["compile"] = "no"
        return self.module.Args(**{**settings, "device": "cpu", **self.settings, **changes})

    def agent(self, obs_size: int, action_size: int) -> nn.Module:
        """An agent of the script, always the same one."""
        torch.manual_seed(0)
        return self.module.Agent(obs_size, action_size)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the script make the fake environments."""

    def identity(self, obs: Tensor) -> list[tuple[int, ...]]:
        """Environment, episode and step of rows of the Counter's observations."""
        return [tuple(row) for row in obs.flatten(0, -2).long().tolist()]

    def value(self, agent: nn.Module, episode: list[np.ndarray]) -> float:
        """Value of the last of an episode's observations."""
        return agent.value(torch.tensor(episode[-1][None], dtype=torch.float32)).item()

    def outputs(self, agent: nn.Module, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values of a minibatch under the agent."""
        others = step.others if {"masks", "recurrent"} & self.features else []
        values, *others = agent.evaluate_actions(step.obs, *others, step.actions)[:3]
        return *others, values

    def clipping(self, clip: float | None) -> dict[str, Any]:
        """Settings by which ratios are clipped, and values where `clip` is not None."""
        return {"clip_coef": clip or 0.2, "clip_vloss": clip is not None}

    def gains(self, advantages: Tensor, ratio: Tensor) -> Tensor:
        """What the policy's loss is the negative mean of, with a clip range of 0.2."""
        return torch.minimum(advantages * ratio, advantages * ratio.clip(0.8, 1.2))

    def checked(self, step: Step) -> Tensor:
        """Which samples of a whole batch the check of an update looks at."""
        return torch.ones(step.advantages.numel(), dtype=torch.bool)

    def begin_without_statistics(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a run have seen no observations and rewards before its own."""
        nothing = functools.partial(self.module.RunningMeanStd, count=0.0)
        monkeypatch.setattr(self.module, "RunningMeanStd", nothing)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Record from now on the arguments and results of gae, and every gradient step."""
        recorder, real = SimpleNamespace(gae=[], steps=[]), self.module.gae
        names = ["rewards", "values", "next_values", "done", "advantages"]

        def gae(*args):
            result = real(*args)
            recorder.gae.append({name: x.clone() for name, x in zip(names, (*args[:4], result))})
            return result

        monkeypatch.setattr(self.module, "gae", gae)
        update = self.recording(self.module.ppo_update, recorder.steps)
        train = functools.partial(self.module.train, update=update)
        monkeypatch.setattr(self.module, "train", train)
        return recorder

    def recording(self, real: Callable, steps: list[Step]) -> Callable:
        """An update, a step at a time, that notes them."""

        def update(agent, adam, batch, indices, args):
            rows = []
            for mb in indices:
                step = Step(type(batch)(*(x[mb] for x in batch)))
                step.weights = adam["weights"].clone()
                rows.append(real(agent, adam, batch, mb[None], args))
                step.metrics = {name: x[0] for name, x in rows[-1].items()}
                tensors = {name: x for name, x in vars(args).items() if isinstance(x, Tensor)}
                step.schedule = {name: x.item() for name, x in tensors.items()}
                steps.append(step)
            return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

        return update


class KLPenalty(Script):
    """Nothing is clipped but values, by a setting of its own."""

    features: ClassVar[set[str]] = {"environments", "vector", "gaussian"}
    real = f"Hopper-v4 {SHORT} 20480"

    def clipping(self, clip: float | None) -> dict[str, Any]:
        return {"value_clip_coef": np.inf if clip is None else clip}

    def gains(self, advantages: Tensor, ratio: Tensor) -> Tensor:
        return advantages * ratio


class MultiDiscrete(Script):
    """Minibatches end with the masks of the valid choices."""

    features: ClassVar[set[str]] = {"environments", "vector", "masks"}
    real = f"CartPole-v1 {SHORT} 40960"
    space = "Discrete"
    refused: ClassVar[dict[str, list]] = {**Script.refused, "bins": [1]}

    def agent(self, obs_size: int, action_size: int) -> nn.Module:
        """One component with that many choices."""
        return super().agent(obs_size, (1, action_size))


class VectorEnv(Script):
    """A simulator steps its environments together; what is learned there has tests of its own."""

    features: ClassVar[set[str]] = {"simulator"}
    settings: ClassVar[dict[str, Any]] = {"backend": "gymnasium", "hidden": (8,)}
    refused: ClassVar[dict[str, list]] = {
        **{name: values for name, values in Script.refused.items() if name != "run_name"},
        "init_std": [0.0],
        "hidden": [(8, 0)],
    }
    unsuitable: ClassVar[dict[str, str]] = {
        "CartPole-v1": "try recipes/discrete_actions.py",
        "Nowhere-v0": "Nowhere",
    }


class Atari(Script):
    """Observations are stacks of four frames, the network is small here; Adam is PyTorch's."""

    features: ClassVar[set[str]] = {"environments", "games"}
    real = "Breakout --num-steps 16 --total-timesteps 7680"
    space = "Frames"
    settings: ClassVar[dict[str, Any]] = {"torch_threads": 1, "num_minibatches": 2}
    refused: ClassVar[dict[str, list]] = {**Script.refused, "torch_threads": [100_000]}
    unsuitable: ClassVar[dict[str, str]] = {"CartPole-v1": "ALE"}
    raw: ClassVar[dict[str, Any]] = {}
    annealed: ClassVar[dict[str, str]] = {"learning_rate": "anneal_lr", "clip_coef": "anneal_clip"}
    frames = 4

    def checked(self, step: Step) -> Tensor:
        """Those of the first game, which is faster."""
        return torch.tensor([n == 0 for n, *_ in self.identity(step.obs)])

    def begin_without_statistics(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Games have none."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fake games, without frames to skip or lives to lose, which this process plays."""
        import ale_py

        real = self.module.make_env

        def make_env(args, videos=None, video_length=0):
            if not args.env_id.startswith("Fake"):
                return real(args, videos, video_length)
            env = gym.make(args.env_id, render_mode="rgb_array", disable_env_checker=True).unwrapped
            if videos:
                env = gym.wrappers.RecordVideo(
                    env, videos, lambda k: k == 0, video_length=video_length
                )
            env.unwrapped.ale = fake_envs.emulator()
            env = self.module.ClipReward(self.module.EpisodicLife(env))
            return gym.wrappers.FrameStackObservation(env, self.frames, padding_type="zero")

        monkeypatch.setattr(self.module, "make_env", make_env)
        monkeypatch.setattr(self.module, "GAME_PROCESSES", 1)
        monkeypatch.setattr(self.module, "Agent", self.small_agent())
        monkeypatch.setattr(ale_py, "ALEState", bytes)

    def small_agent(self) -> type[nn.Module]:
        """The script's agent with averages of the stripes of a frame instead of convolutions."""
        layer_init, frames = self.module.layer_init, self.frames

        class SmallAgent(self.module.Agent):
            def __init__(self, num_actions):
                nn.Module.__init__(self)
                first = layer_init(nn.Linear(9 * frames, 64), 1.0)
                self.cnn = nn.Sequential(nn.AvgPool2d(28), nn.Flatten(), first, nn.Tanh())
                self.policy = layer_init(nn.Linear(64, num_actions), 0.01)
                self.value = layer_init(nn.Linear(64, 1), 1.0)

        return SmallAgent

    def identity(self, obs: Tensor) -> list[tuple[int, ...]]:
        newest = obs[..., -1, :, :].flatten(0, -3)
        return [tuple(row) for row in (newest[:, [0, 28, 56], 0].long() // 8).tolist()]

    def value(self, agent: nn.Module, episode: list[np.ndarray]) -> float:
        black = [np.zeros((84, 84), np.uint8)] * self.frames
        stack = np.stack([*black, *episode][-self.frames :])
        return agent(torch.from_numpy(stack)[None])[1].item()

    def recording(self, real: Callable, steps: list[Step]) -> Callable:
        """By what the loss is given; gradients are still there after the step."""
        real_loss = self.module.ppo_loss

        def loss(agent, minibatch, args):
            steps.append(Step(minibatch))
            return real_loss(agent, minibatch, args)

        def update(agent, adam, batch, mb, args):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.module, "ppo_loss", loss)
                metrics = real(agent, adam, batch, mb, args)
            (group,), step = adam.param_groups, steps[-1]
            step.gradient = torch.cat([x.grad.flatten() for x in group["params"]])
            numbers = {name: x.item() for name, x in vars(args).items() if isinstance(x, Tensor)}
            step.schedule, step.metrics = numbers | {"learning_rate": group["lr"]}, metrics
            return metrics

        return update


class AtariLSTM(Atari):
    """Minibatches are whole sequences of some environments: starts and states stand behind."""

    features: ClassVar[set[str]] = {"environments", "games", "recurrent"}
    settings: ClassVar[dict[str, Any]] = {**Atari.settings, "num_envs": 4, "num_steps": 8}
    frames = 1

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.module, "HIDDEN_SIZE", 16)
        super().patch(monkeypatch)

    def small_agent(self) -> type[nn.Module]:
        layer_init, size = self.module.layer_init, self.module.HIDDEN_SIZE

        class SmallAgent(super().small_agent()):
            def __init__(self, num_actions):
                super().__init__(num_actions)
                self.lstm_input = layer_init(nn.Linear(64, 4 * size), 1.0)
                self.lstm_recurrent = nn.Linear(size, 4 * size, bias=False)
                self.policy = layer_init(nn.Linear(size, num_actions), 0.01)
                self.value = layer_init(nn.Linear(size, 1), 1.0)

        return SmallAgent

    def value(self, agent: nn.Module, episode: list[np.ndarray]) -> float:
        starts = torch.eye(len(episode))[:, :1]
        frames = torch.tensor(np.array(episode))[:, None, None]
        return agent(frames, starts, agent.initial_state(1))[1][-1].item()


class Toy:
    """A script that trains language models; this one with PPO."""

    features: ClassVar[set[str]] = {"language", "rewards"}  # it learns from a reward model
    settings: ClassVar[dict[str, Any]] = {"num_updates": 2, "update_epochs": 2}
    settings |= {"batch_size": 16, "num_minibatches": 2}
    stage, loss, method = "train_ppo", "ppo_loss", "PPO"
    # Two gradient steps on the same samples.
    one_minibatch: ClassVar[dict[str, Any]] = {"num_updates": 1, "num_minibatches": 1}
    # Models of a comparison, and what their settings are.
    forms: ClassVar[dict[str, dict[str, Any]]] = {
        "ppo-adaptive-6": {"kl_mode": "adaptive", "kl_coef": 0.5},
        "ppo-none": {"kl_mode": "none"},
        "ppo-fixed-0.05": {"kl_mode": "fixed", "kl_coef": 0.05},
    }

    def __init__(self, name: str, file: str) -> None:
        self.name, self.path, self.import_name = name, ROOT / f"{file}.py", file.replace("/", ".")

    @property
    def home(self) -> ModuleType:
        """What has the stages before the last one. It judges by fewer texts here."""
        home = importlib.import_module("ppo_rlhf_toy")
        vars(home).update(NUM_SAMPLES=64, NUM_EVALUATED=32, BEST_OF_N=(1, 4))
        return home

    @property
    def module(self) -> ModuleType:
        module, _ = importlib.import_module(self.import_name), self.home
        return module

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is fake here."""

    def args(self, **changes: Any) -> Any:
        """Settings of a run of a second."""
        settings = {"sft_documents": 100, "sft_steps": 3, "num_pairs": 70, "run_name": "run"}
        return self.module.Args(**{**settings, **self.settings, **changes})

    def finish(self, folder: Path) -> SimpleNamespace:
        """A run with all models in a folder, and what it makes before its last stage."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            made = record(patch, self.home, "make_preferences")
            judged = record(patch, self.module, "evaluate")
            run = self.module.train(self.args(compare=True))
        _, reference, _, preferences = made[0]
        found = {"reference": reference, "preferences": preferences, "judges": judged[0][2]}
        return SimpleNamespace(run=run, folder=folder / "runs/run", **found)

    def logprobs(self, agent: nn.Module, prompts: Tensor, responses: Tensor) -> Tensor:
        return agent.get_logprobs_and_values(prompts, responses)[0]

    def collect(self, args: Any, agent: nn.Module, judges: tuple, kl_coef: float) -> tuple:
        """A rollout of 32 responses and its metrics."""
        return self.module.collect(args, agent, judges, 32, kl_coef, seeded(0))

    def learn(self, judges: tuple, **changes: Any) -> tuple[nn.Module, list[dict[str, float]]]:
        """Agent and updates of a run of the last stage."""
        agent = copy.deepcopy(judges.reference)
        return agent, self.module.train_ppo(self.args(**changes), agent, judges)


class GRPO(Toy):
    stage, loss, method = "train_grpo", "grpo_loss", "GRPO"
    forms: ClassVar[dict[str, dict[str, Any]]] = {
        "grpo": {"std": "none", "loss_norm": "constant", "kl_in_loss": "no", "kl_coef": 0.5},
        "grpo-paper": {"std": "group", "loss_norm": "sequence", "kl_in_loss": "k3"},
        "grpo-no-kl": {"kl_in_loss": "no", "kl_mode": "none"},
    }

    def collect(self, args: Any, agent: nn.Module, judges: tuple, kl_coef: float) -> tuple:
        prompts = judges.task.sample_prompts(32, seeded(0))
        return self.module.collect(args, agent, judges, prompts, kl_coef, seeded(0))

    def learn(self, judges: tuple, **changes: Any) -> tuple[nn.Module, list[dict[str, float]]]:
        args, agent = self.args(**changes), copy.deepcopy(judges.reference)
        return agent, self.module.train_grpo(args, args.run_dir / "grpo", agent, judges)


class DPO(GRPO):
    features: ClassVar[set[str]] = {"language"}
    settings: ClassVar[dict[str, Any]] = {"batch_size": 16}
    one_minibatch: ClassVar[dict[str, Any]] = {"num_epochs": 2, "batch_size": 70}
    stage, loss, method = "train_dpo", "dpo_loss", "DPO"
    forms: ClassVar[dict[str, dict[str, Any]]] = {
        "dpo": {"beta": 0.2, "nll_coef": 0.05},
        "dpo-plain": {"beta": 0.2, "nll_coef": 0.0},
        "dpo-beta-0.03": {"beta": 0.03, "nll_coef": 0.0},
    }

    def finish(self, folder: Path) -> SimpleNamespace:
        """What judges here is the reference, and all pairs."""
        found = super().finish(folder)
        parts = found.preferences.learned, found.preferences.held_out
        found.judges = found.reference, self.home.Pairs(*map(torch.cat, zip(*parts)))
        return found

    def learn(self, judges: tuple, **changes: Any) -> tuple[nn.Module, list[dict[str, float]]]:
        args, (reference, pairs) = self.args(**changes), judges
        agent = copy.deepcopy(reference)
        return agent, self.module.train_dpo(args, args.run_dir / "dpo", agent, reference, pairs)


SCRIPTS = {
    x.name: x
    for x in (
        Script("continuous", "ppo_continuous_action"),
        KLPenalty("kl_penalty", "ppo_kl_penalty"),
        MultiDiscrete("multidiscrete", "ppo_multidiscrete"),
        VectorEnv("vector_env", "ppo_vector_env"),
        Atari("atari", "ppo_atari"),
        AtariLSTM("lstm", "ppo_atari_lstm"),
        Toy("rlhf", "ppo_rlhf_toy"),
        GRPO("grpo", "recipes/grpo_on_reviews"),
        DPO("dpo", "recipes/dpo_on_reviews"),
    )
}


def scripts(*names: str) -> pytest.MarkDecorator:
    """Run a test on these scripts, by its `script`.

    What a script has copied is tested where it is from: the copies are the same.
    """
    return pytest.mark.scripts(*names)


def scripts_with(*features: str) -> pytest.MarkDecorator:
    """Run a test on the scripts that have all of these features."""
    return pytest.mark.scripts_with(*features)


def slow_on(*names: str) -> pytest.MarkDecorator:
    """Leave these scripts to the slow tests, where others show the same with lines as these.

    They are not left out where `--script` names the only one that is tested.
    """
    return pytest.mark.slow_on(*names)


def counter_episode(script: Script, env: int, episode: int, t: int) -> list[np.ndarray]:
    """The Counter's observations from the first of an episode to the t-th."""
    counter = fake_envs.Counter(script.space)
    counter.index, counter.episode, counter.t = env, episode, -1
    return [counter.step(None)[0] for _ in range(t + 1)]


if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
