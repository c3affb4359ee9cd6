"""The simulators of ppo_vector_env.py, and what it says of those that cannot work."""

from pathlib import Path

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from helpers import record
from vector_simulators import FLAGS, TINY, Single, Tensors

import ppo_vector_env as ppo

HERE = "--make vector_simulators:make_"


def test_gymnasium_makes_environments_whose_resets_are_marked(monkeypatch):
    """And EnvPool, in the same way."""
    for backend, env_id in (("gymnasium", "Pendulum-v1"), ("envpool", "Hopper-v4")):
        args = ppo.Args(backend=backend, env_id=env_id, num_envs=2)
        with ppo.ExitStack() as resources:
            sim = ppo.make_simulator(resources, args, 2, 5)
            ended, resets = torch.zeros(2).bool(), 0
            assert sim.obs.shape == (2, sum(sim.layout["parts"].values()))
            assert len(sim.layout["low"]) == len(sim.layout["high"]) == sim.space.shape[0]
            actions = torch.ones(2, *sim.space.shape)
            for _ in range(210):
                assert torch.equal(sim.acts, ~ended)
                last, rewards, failed, cut = sim.step(actions)
                assert torch.equal(sim.obs, last) and last.dtype == rewards.dtype == torch.float32
                assert (rewards[ended] == 0).all() and not (failed | cut)[ended].any()
                resets += int(ended.sum())
                ended = failed | cut
            assert resets > 1 and sim.next_step


def test_envpool_trains(monkeypatch):
    size = {"num_envs": 2, "num_steps": 60, "total_timesteps": 240, "env_id": "Hopper-v4"}
    args = ppo.Args(**TINY | size)
    advantages = record(monkeypatch, ppo, "gae")
    updates = record(monkeypatch, ppo, "ppo_update")
    found = ppo.train(args)
    for k, (scaled, _, _, done, _, _) in enumerate(advantages):
        after = done[:-1]  # those with which an episode ended: the next only begin one
        assert after.any() and (scaled[1:][after] == 0).all()
        used = torch.cat([x[3].flatten() for x in updates[4 * k : 4 * k + 4]])
        assert not after.flatten()[used[used >= 2] - 2].any()
    assert len(found["episodes"]) == sum(int(x[3].sum()) for x in advantages)
    assert Path(found["run_dir"]).name.startswith("Hopper-v4__ppo_vector_env__1__")


@pytest.fixture
def cli(outcome):
    """Run the script with a command line; returns exit code, stdout, stderr."""
    return lambda line: outcome(ppo.main, f"{FLAGS} {line}", "ppo_vector_env.py")


# In addition to what every script refuses.
REFUSED = [
    (f"--seed {2**63}", f"--seed ({2**63}) must be from 0 to {2**63 - 1}."),
    ("--num-minibatches 144", "--num-steps * --num-envs (144) must be 2, 3, 4... times"),
    ("--total-timesteps inf", "--total-timesteps must be finite"),
    ("--make .task:make", ".task:make: there is no module '.task': is it MODULE:FUNCTION?"),
    (HERE + "nothing", "vector_simulators has no function make_nothing: is it MODULE:FUNCTION?"),
    (HERE + "none", "make_none returned a NoneType, which lacks some of reset, step, close"),
    (HERE + "nested", "Observations policy have parts themselves: concatenate them."),
    (HERE + "four", "step must return obs, rewards, terminated, truncated and infos."),
    (HERE + "four", "returned 4; for rsl_rl's four values see recipes/rsl_rl_simulator.py."),
    (HERE + "seedless", "make_seedless: reset(seed=...) has got an unexpected keyword argument"),
    (HERE + "one", "obs has shape (4,): it must have a row for each of 6."),
    (HERE + "blind", "reset returned observations without a number."),
    (HERE + "few", "obs has shape (4, 4): it must have a row for each of 6."),
    ("--make json", "json is no function: is it MODULE:FUNCTION?"),
    (HERE + "off", "change autoreset_mode"),
    (HERE + "choices", "try recipes/discrete_actions.py, ppo_multidiscrete.py or ppo_atari.py"),
    (HERE + "broken", "Step 31 of environment 3: observation or reward is not finite."),
    (HERE + "infinite", "Step 31 of environment 3: observation or reward is not finite."),
    (HERE + "same --value-obs state", "--value-obs (state) must be among obs, each once."),
    (HERE + "same --lr 1e30", "Not finite at step 144: losses/"),
    ("--env-id Nowhere-v0", "--env-id"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED)
def test_what_cannot_work_gets_a_sentence_and_exit_code_2(cli, line, sentence):
    code, _, error = cli(line)
    assert code == 2 and sentence in " ".join(error.split()), error


def simulator_of(envs, num_envs=2):
    return ppo.Simulator(envs, envs.action_space, num_envs, 1, torch.device("cpu"))


def test_time_outs_of_an_earlier_step_end_nothing():
    envs = Tensors("none", 2)
    sim = simulator_of(envs)
    last, ends = torch.zeros(2, 4), torch.tensor([True, False])
    said = last, torch.zeros(2), ends, torch.zeros(2).bool(), {"time_outs": torch.ones(2)}
    envs.step = lambda _: said
    *_, terminated, truncated = sim.step(torch.zeros(2, 2))
    assert truncated.tolist() == [True, False] and not terminated.any()


class Keyed:
    """Observations as a TensorDict: rows are what one iterates over."""

    def __init__(self, parts):
        self.parts = parts

    def keys(self):
        return self.parts.keys()

    def __iter__(self):
        raise AssertionError

    def __getitem__(self, name):
        return self.parts[name]


def test_parts_may_come_in_a_tensordict():
    envs = Tensors("none", 2)
    parts = {"b": torch.ones(2, 3), "a": torch.zeros(2, 1)}
    envs.reset = lambda seed: (Keyed(parts), {})
    sim = simulator_of(envs)
    assert sim.obs.tolist() == [[1, 1, 1, 0]] * 2
    assert sim.layout["parts"] == {"b": 3, "a": 1}
    reverse = Keyed(dict(reversed(parts.items())))  # in a run, the order stays
    assert sim.tensor(reverse, 2).tolist() == [[1, 1, 1, 0]] * 2


def test_a_wrapper_of_gymnasium_hides_no_space_of_actions():
    class Robots(gym.Env):  # as Isaac Lab's
        single_action_space = gym.spaces.Box(-1, 1, (2,))
        action_space = gym.spaces.Box(-1, 1, (64, 2))

        def reset(self, seed=None, options=None):
            return torch.zeros(64, 3), {}

    with ppo.ExitStack() as resources:
        make = lambda *_: gym.wrappers.TimeLimit(Robots(), 9)  # noqa: E731
        assert ppo.make_simulator(resources, ppo.Args(), 64, 1, make).space.shape == (2,)
        make = lambda *_: SyncVectorEnv([lambda: Single(0)] * 3)  # noqa: E731
        assert ppo.make_simulator(resources, ppo.Args(), 3, 1, make).space.shape == (2,)
