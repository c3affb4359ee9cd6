"""ppo_multidiscrete.py: components, action masks, bins, and what it learns.

What it shares with the other scripts is tested in test_shared_*.py.
"""

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import scripts
from helpers import assert_same_runs, louder

import ppo_multidiscrete as ppo

pytestmark = [scripts("multidiscrete"), pytest.mark.usefixtures("script")]

SIZES = [3, 2, 4]  # unequal, and the largest is neither first nor alone
EXISTS = torch.arange(4) < torch.tensor(SIZES)[:, None]  # (3, 4)
SOME = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1]]).bool()  # a mask


class Masked(gym.Env):
    """Three components with random masks, episodes of five steps; refuses invalid actions.

    Masks come from `info`, but not behind an episode's last step, or from what the class has.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.MultiDiscrete(SIZES)

    def __init__(self, offer):
        self.offer = offer
        if offer == "Method":
            self.action_masks = lambda: np.concatenate(self.masks)

    def observe(self):
        self.masks = [self.np_random.random(size) < 0.5 for size in SIZES]
        for mask in self.masks:
            mask[self.np_random.integers(len(mask))] = True
        flat = np.concatenate(self.masks)
        if self.offer == "Attribute":
            self.action_masks = flat
        offers = {"Vector": flat.astype(np.int8), "Tuple": tuple(self.masks)}
        info = {"action_mask": offers[self.offer]} if self.offer in offers and self.t < 5 else {}
        return np.array([self.t, self.np_random.normal()]), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action):
        for mask, choice in zip(self.masks, action, strict=True):
            assert mask[choice], "an invalid action was taken"
        self.t += 1
        obs, info = self.observe()
        return obs, 1.0, False, self.t == 5, info


class Identity(gym.Env):
    """Reward 1 for naming the observation, per component; episodes of 10 steps."""

    def __init__(self, space):
        self.observation_space = self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t, self.state = 0, self.observation_space.sample()
        return self.state, {}

    def step(self, action):
        assert self.action_space.contains(action)
        reward = float(np.mean(np.equal(action, self.state)))
        self.t, self.state = self.t + 1, self.observation_space.sample()
        return self.state, reward, False, self.t == 10, {}


IDENTITY = gym.spaces.MultiDiscrete(SIZES)
gym.register("FakeIdentity-Discrete-v0", lambda: Identity(IDENTITY))
OFFERS = ("Vector", "Tuple", "Method", "Attribute")
for offer in (*OFFERS, "Never"):
    gym.register(f"FakeMasked{offer}-Discrete-v0", lambda offer=offer: Masked(offer))


@pytest.fixture
def masked(tiny):
    """Make Args for a run of 3 iterations, with 8 minibatches of 8 each, that obeys masks."""
    return lambda env="MaskedVector", **settings: tiny(env, mask_invalid_actions=True, **settings)


@torch.no_grad()
def joint(agent, obs, masks, actions):
    """Log-probabilities (B,), from categoricals over the valid choices only."""
    sums = torch.zeros(len(obs))
    logits = agent.policy(obs).view(masks.shape)
    for row, component in np.ndindex(*masks.shape[:2]):
        valid = masks[row, component]
        place = valid[: actions[row, component]].sum()  # among the valid ones
        sums[row] += logits[row, component, valid].log_softmax(0)[place]
    return sums


# --- Detail 37 ---


def test_rollouts_sample_from_the_policy(tiny, recorded, monkeypatch):
    """Every combination, with known logits in place of the network's and of what acts."""
    shares = torch.tensor([[0.7, 0.2, 0.1, 1.0], [0.1, 0.9, 1.0, 1.0], [0.4, 0.3, 0.2, 0.1]])
    real = ppo.Agent.__init__

    def init(agent, *args):
        real(agent, *args)
        agent.policy[-1].weight.data.zero_()
        agent.policy[-1].bias.data.copy_(shares.log().flatten())

    monkeypatch.setattr(ppo.Agent, "__init__", init)
    settings = {"num_envs": 8, "num_steps": 512, "total_timesteps": 4096, "update_epochs": 1}
    ppo.train(tiny("Identity", **settings))
    assert len(recorded.steps) == 4  # of one iteration
    actions = torch.cat([step.actions for step in recorded.steps])
    found = torch.zeros(SIZES).index_put(tuple(actions.T), torch.tensor(1 / 4096), accumulate=True)
    expected = torch.einsum("i,j,k->ijk", *(x[:size] for x, size in zip(shares, SIZES)))
    assert (found - expected).abs().max() < 0.03  # four standard errors of a quarter


# --- Masks ---


def test_invalid_logits_have_gradient_zero_and_make_nothing_nan():
    """Even if an invalid action is to be judged: its ratio is 1 under the same weights.

    Entropy and the valid actions would bear minus infinity, for which this ratio is NaN.
    """
    agent, actions = louder(ppo.Agent(5, (3, 4)), 0.5), torch.zeros(30, 3, dtype=torch.int64)
    _, logprob, entropy = agent.evaluate_actions(torch.randn(30, 5), SOME, actions)
    (logprob.square().sum() + entropy.sum()).backward()
    gradient = agent.policy[-1].bias.grad.view(3, 4)
    several = SOME & (SOME.sum(-1, keepdim=True) > 1)
    assert ((logprob - logprob.detach()).exp() == 1).all() and gradient.isfinite().all()
    assert (gradient[~SOME] == 0).all() and (gradient[several] != 0).all()


@pytest.mark.parametrize("offer", OFFERS)
def test_update_sees_the_masks_of_the_rollout(masked, recorded, offer):
    """The environment refuses invalid actions; with learning rate 0 the ratio stays 1."""
    args = masked(f"Masked{offer}", learning_rate=0.0, update_epochs=1)
    agent = ppo.train(args)["agent"]
    seen = set()
    for step in recorded.steps:
        obs, actions, logprobs, *_, masks = step.data
        seen |= {str(mask.tolist()) for mask in masks}
        assert (masks <= EXISTS).all() and masks.any(-1).all()
        assert step.metrics["losses/clipfrac"] == 0 and abs(step.metrics["losses/approx_kl"]) < 1e-9
        expected = joint(agent, obs, masks, actions)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
    assert len(seen) > 20


@pytest.mark.parametrize("env_id", ["FakeMaskedVector-Discrete-v0", "Taxi-v4"])
def test_a_resumed_run_goes_on_bit_for_bit_with_its_masks(masked, recorded, env_id):
    """Cut off after 32 steps of each environment, in the midst of episodes."""
    settings = {"env_id": env_id, "anneal_lr": False}
    whole, last = ppo.train(masked(**settings)), recorded.steps[16:]
    ppo.train(masked(**settings, total_timesteps=64))
    recorded.steps.clear()
    resumed = ppo.train(masked(**settings, run_name="run1"), resume="runs/run1")
    for a, b in zip(last, recorded.steps, strict=True):
        assert all(map(torch.equal, a.data, b.data))
    assert_same_runs(whole, resumed)


# --- Spaces of actions, and masks of any form ---


LOW, HIGH = np.array([[-1.0, -2.0], [-3.0, 0.0]]), np.array([[1.0, 0.5], [3.0, 4.0]])
FLOATS = gym.spaces.Box(LOW, HIGH, dtype=np.float64)


@pytest.mark.parametrize(
    "space",
    [
        *(IDENTITY, FLOATS, gym.spaces.Discrete(3, start=5), gym.spaces.MultiBinary((2, 3))),
        gym.spaces.MultiDiscrete([[3, 2], [2, 4]], start=[[1, 0]] * 2),
    ],
)
def test_choices_stand_for_actions_in_the_form_of_the_environment(space):
    env = ppo.Choices(Identity(space), bins=2)
    actions = [env.action(np.array(x)) for x in np.ndindex(*env.exists.sum(1))]
    assert all(map(space.contains, actions)) and len({str(x) for x in actions}) == len(actions)
    assert type(actions[0]) is (np.ndarray if space.shape else np.int64)


def test_bins_are_evenly_spaced_between_the_bounds_of_each_dimension():
    env = ppo.Choices(Identity(FLOATS), bins=11)
    assert env.exists.shape == (4, 11) and env.exists.all()
    expected = [LOW, HIGH, LOW + (HIGH - LOW) * [[0.5, 0.2], [0.1, 0.9]]]
    choices = np.array([[0, 0, 0, 0], [10, 10, 10, 10], [5, 2, 1, 9]])
    np.testing.assert_allclose([env.action(x) for x in choices], expected)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (gym.spaces.Box(-np.inf, np.inf, (1,)), "try ppo_continuous_action.py"),
        (gym.spaces.Box(-np.inf, np.inf, (2, 2)), "wrap the environment"),  # no script takes it
        (gym.spaces.Tuple([gym.spaces.Discrete(2)] * 2), "wrap the environment"),
    ],
)
def test_a_space_that_does_not_fit_gets_a_sentence(space, words):
    with pytest.raises(ppo.UsageError, match=words):
        ppo.Choices(Identity(space), bins=11)


@pytest.mark.parametrize(
    "mask",
    [
        [1, 1, 0, 1, 0, 1],
        torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
        [[1, 1, 0], [1], [0, True]],
        (([1, 1, 0], np.ones(1)), ([0, 1],)),
        np.array([np.array([1, 1, 0]), np.ones(1), [0, 1], None], object)[:3],
        np.array([[1, 1, 0], [1, 0, 0], [0, 1, 0]]),  # the zeros may be ones where nothing exists
        np.array([[[1, 1, 1]], [[1, 1, 1]], [[0, 1, 1]]]) & np.array([1, 1, 0]),
    ],
)
def test_each_part_of_a_mask_is_that_of_a_component(mask):
    exists = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]], bool)
    assert ppo.allowed(mask, exists).astype(int).tolist() == [[1, 1, 0], [1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("words", "masks"),
    [
        ("parts of the action mask have [2, 2, 2] entries, not [3, 1, 2]", [[[0, 1]] * 3]),
        ("has 4 entries", [(None, np.ones(1), np.ones(2))]),
        ("must be 1 for each valid choice", [[1, 0, x, 1, 1, 1] for x in (-1, 2, -np.inf, np.nan)]),
        ("allows no choice in a component", [[1, 1, 1, 0, 1, 1]]),
    ],
)
def test_a_mask_that_does_not_fit_gets_a_sentence(words, masks):
    exists = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]], bool)
    for mask in masks:
        with pytest.raises(ppo.UsageError, match=re.escape(words)):
            ppo.allowed(mask, exists)


def test_masks_that_are_not_there_are_refused(masked):
    with pytest.raises(ppo.UsageError, match="leave out --mask-invalid-actions"):
        ppo.train(masked("MaskedNever"))


def test_a_trained_policy_obeys_masks_in_the_form_that_the_environment_has_for_them(masked):
    """It refuses what they exclude."""
    args, rng = masked("MaskedTuple"), np.random.default_rng(0)
    ppo.train(args)
    assert ppo.evaluate("runs/run0", episodes=3) == [5.0] * 3
    env = gym.make(args.env_id, disable_env_checker=True)
    policy = ppo.load_policy("runs/run0", env)
    obs, info = env.reset(seed=0)
    for _ in range(5):
        mask = info["action_mask"]
        obs, _, _, truncated, info = env.step(policy(obs, mask, rng.gumbel(size=(3, 4))))
    assert truncated and policy(obs, mask).shape == (3,)
    with pytest.raises(ppo.UsageError, match="trained with masks"):
        policy(obs)
    with pytest.raises(ppo.UsageError, match="has 3 entries"):
        policy(obs, np.ones(3))
    with pytest.raises(ppo.UsageError, match="other spaces"):
        ppo.load_policy("runs/run0", Identity(IDENTITY))


def test_a_loaded_policy_acts_on_raw_observations_as_the_trained_one(script, tiny):
    agent = ppo.train(tiny("Walk", learning_rate=0.02))["agent"]
    policy = ppo.load_policy("runs/run0", gym.make(script.env_id("Walk")))
    stats, rng = ppo.load_checkpoint("runs/run0")["obs_stats"], np.random.default_rng(0)
    policy(stats.mean + 1e3)  # leaves no trace
    exists = np.arange(3) < np.array([[3], [2]])
    for raw in stats.mean + 10 * rng.normal(size=(100, 3)):
        obs = np.clip((raw - stats.mean) / np.sqrt(stats.var + 1e-8), -10, 10)
        logits = agent.policy(torch.tensor(obs, dtype=torch.float32)).view(agent.mask_shape)
        noise = rng.gumbel(size=agent.mask_shape)
        for x in (0 * noise, noise):
            scores = np.where(exists, logits.detach().numpy() + x, -np.inf)
            assert policy(raw, noise=x).tolist() == scores.argmax(-1).tolist()


def test_the_identity_is_learned_and_the_best_action_is_without_noise(tiny):
    """Random actions earn 3.6 of 10; the observation is one-hot."""
    settings = {"num_steps": 64, "num_envs": 8, "learning_rate": 0.02, "gamma": 0.5}
    args = tiny("Identity", total_timesteps=5120, **settings)
    assert np.mean([x["return"] for x in ppo.train(args)["episodes"][-100:]]) > 9.0
    assert ppo.evaluate("runs/run0", episodes=30) == [10.0] * 30
    policy = ppo.load_policy("runs/run0", Identity(IDENTITY))
    rng, drawn = np.random.default_rng(0), []
    for obs in [IDENTITY.sample() for _ in range(300)]:
        drawn.append(np.mean(policy(obs, noise=rng.gumbel(size=(3, 4))) == obs))
    assert 0.9 < np.mean(drawn) < 1
