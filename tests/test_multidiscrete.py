"""ppo_multidiscrete.py: components, action masks, bins, and what it learns.

What it shares with the other scripts is tested in test_shared_*.py.
"""

import dataclasses
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import same_weights
from torch.distributions import Categorical

import ppo_multidiscrete as ppo

SIZES = [3, 2, 4]  # unequal, and the largest is neither first nor alone
EXISTS = torch.arange(4) < torch.tensor(SIZES)[:, None]  # (3, 4)
EVERY = torch.tensor(list(itertools.product(*map(range, SIZES))))  # all combinations (24, 3)


class Masked(gym.Env):
    """Three components with random masks, episodes of five steps; refuses invalid actions.

    The mask comes from `info` in one of several forms, but not behind an episode's last step.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.MultiDiscrete(SIZES)

    def __init__(self, offer="vector"):
        self.offer = offer

    def observe(self):
        self.masks = [self.np_random.random(size) < 0.5 for size in SIZES]
        for mask in self.masks:
            mask[self.np_random.integers(len(mask))] = True
        flat = np.concatenate(self.masks)
        offers = {"vector": flat.astype(np.int8), "tuple": tuple(self.masks), "short": flat[:3]}
        offers["nothing"] = flat & (np.arange(9) // 3 != 1)
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


class MaskedByMethod(Masked):
    """Offers the masks by a method only."""

    def action_masks(self):
        assert self.t < 5
        return np.concatenate(self.masks)


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
        assert self.action_space.shape or isinstance(action, np.int64)
        reward = float(np.mean(np.equal(action, self.state)))
        self.t, self.state = self.t + 1, self.observation_space.sample()
        return self.state, reward, False, self.t == 10, {}


class Matrix(gym.Env):
    """Notes its actions, which are a matrix of floats with uneven bounds; or others."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    low, high = np.array([[-1.0, -2.0], [-3.0, 0.0]]), np.array([[1.0, 0.5], [3.0, 4.0]])

    def __init__(self, space=None):
        self.action_space = space or gym.spaces.Box(self.low, self.high, dtype=np.float64)
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.actions.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


OFFERS = ["vector", "tuple", "short", "nothing", "never"]
ENVIRONMENTS = {
    **{f"Masked-{x}": lambda x=x: Masked(x) for x in OFFERS},
    "Masked-method": lambda: MaskedByMethod("method"),
    "Identity": lambda: Identity(gym.spaces.MultiDiscrete(SIZES)),
    "Shifted": lambda: Identity(gym.spaces.Discrete(3, start=5)),
    "Matrices": lambda: Identity(gym.spaces.MultiDiscrete([[3, 2], [2, 4]], start=[[1, 0]] * 2)),
    "Floats": Matrix,
    "Unbounded": lambda: Matrix(gym.spaces.Box(-np.inf, np.inf, (1,))),
    "Whole": lambda: Matrix(gym.spaces.Box(0, 5, (1,), np.int64)),
    "Binary": lambda: Matrix(gym.spaces.MultiBinary(3)),
}
for name, entry_point in ENVIRONMENTS.items():
    gym.register(f"Md{name}-v0", entry_point)


@pytest.fixture
def make_args(tmp_path, monkeypatch):
    """Make Args for a run of 3 iterations of 32 steps, with 8 minibatches of 8 each."""
    monkeypatch.chdir(tmp_path)
    count = itertools.count()

    def make(**settings):
        defaults = {"env_id": "MdMasked-vector-v0", "mask_invalid_actions": True, "compile": False}
        defaults |= {"total_timesteps": 96, "num_steps": 16, "num_envs": 2, "num_minibatches": 4}
        defaults |= {"update_epochs": 2, "run_name": f"run{next(count)}"}
        return ppo.Args(**{**defaults, **settings})

    return make


@pytest.fixture
def minibatches(monkeypatch):
    """The data and the metrics of every minibatch."""
    seen, real = [], ppo.ppo_update

    def ppo_update(agent, adam, batch, mb, *rest):
        data = [x[mb].clone() for x in batch]
        metrics = real(agent, adam, batch, mb, *rest)
        names = ("obs", "actions", "logprobs", "values", "advantages", "returns", "masks")
        seen.append(dict(zip(names, data, strict=True)) | metrics)
        return metrics

    monkeypatch.setattr(ppo, "ppo_update", ppo_update)
    return seen


def make_agent():
    """An agent for 5 numbers whose distributions are far from uniform."""
    torch.manual_seed(0)
    agent = ppo.Agent(5, (3, 4), ppo.Args())
    torch.nn.init.normal_(agent.policy[-1].weight, std=0.5)
    torch.nn.init.normal_(agent.policy[-1].bias)
    return agent


def random_masks(count, seed=0):
    """Masks (count, 3, 4) with at least one valid choice in each component."""
    random = torch.rand((count, 3, 4), generator=torch.Generator().manual_seed(seed))
    masks = EXISTS & (random < 0.5)
    masks[..., 0] |= ~masks.any(-1)
    return masks


def joint(agent, obs, mask, action):
    """Log-probability and entropy in one state, from categoricals over the valid choices only."""
    logprob = entropy = 0.0
    for logits, valid, choice in zip(agent.policy(obs).view(*mask.shape), mask, action):
        part = Categorical(logits=logits[valid])
        logprob = logprob + part.log_prob(valid[:choice].sum())  # its place among the valid ones
        entropy = entropy + part.entropy()
    return logprob, entropy


# --- Detail 37 ---


@pytest.mark.parametrize("masked", [False, True])
def test_logprob_and_entropy_are_sums_over_the_valid_choices_of_each_component(masked):
    agent, obs = make_agent(), torch.randn(10, 5)
    masks = random_masks(10) if masked else EXISTS.expand(10, 3, 4)
    actions, logprob, entropy, value = agent.get_action_and_value(obs, masks)
    assert actions.shape == (10, 3) and logprob.shape == entropy.shape == value.shape == (10,)
    assert masks.gather(-1, actions[..., None]).all()
    for row in range(10):
        expected_logprob, expected_entropy = joint(agent, obs[row], masks[row], actions[row])
        torch.testing.assert_close(logprob[row], expected_logprob)
        torch.testing.assert_close(entropy[row], expected_entropy)


def test_policy_is_the_categorical_over_all_combinations():
    agent, obs, mask = make_agent(), torch.randn(1, 5).expand(24, 5), EXISTS.expand(24, 3, 4)
    _, logprob, entropy, _ = agent.get_action_and_value(obs, mask, EVERY)
    assert logprob.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert entropy[0].item() == pytest.approx(-(logprob.exp() * logprob).sum().item(), abs=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_both_samplers_draw_every_combination_with_its_probability(masked):
    agent, obs, count = make_agent(), torch.randn(1, 5), 20_000
    mask = (random_masks(1, seed=4) if masked else EXISTS[None]).expand(count, 3, 4)
    probability = agent.get_action_and_value(obs.expand(24, 5), mask[:24], EVERY)[1].exp()
    drawn = agent.get_action_and_value(obs.expand(count, 5), mask)[0]
    logits = ppo.in_numpy(agent.policy)(obs.numpy()).reshape(1, 3, 4)
    noise = np.random.default_rng(0).gumbel(size=(count, 3, 4))
    chosen = torch.from_numpy(ppo.choose(logits + noise, mask.numpy()))
    for actions in (drawn, chosen):
        share = (actions[:, None] == EVERY).all(-1).float().mean(0)
        assert (share - probability).abs().max() < 0.015  # four standard errors of a half


def test_rollouts_sample_from_the_policy(make_args, minibatches, monkeypatch):
    """With known logits in place of the network's; 4 standard errors of a half are 0.03."""
    shares = np.array([[0.7, 0.2, 0.1, 1.0], [0.1, 0.9, 1.0, 1.0], [0.4, 0.3, 0.2, 0.1]])
    logits = np.log(shares.ravel() * np.ones((8, 1)))
    monkeypatch.setattr(ppo, "in_numpy", lambda network: lambda obs: logits)
    settings = {"num_envs": 8, "num_steps": 512, "total_timesteps": 4096, "update_epochs": 1}
    ppo.train(make_args(env_id="MdIdentity-v0", mask_invalid_actions=False, **settings))
    actions = torch.cat([x["actions"] for x in minibatches])
    for column, share, size in zip(actions.T, shares, SIZES):
        counts = torch.bincount(column, minlength=size) / 4096
        assert counts.tolist() == pytest.approx(share[:size], abs=0.03)


def test_policy_head_is_one_orthogonal_matrix_with_a_small_gain():
    agent = ppo.Agent(5, (3, 4), ppo.Args())
    weight = agent.policy[-1].weight.detach()
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(12), atol=1e-9, rtol=0)
    assert agent.value[-1].weight.norm().item() == pytest.approx(1)


# --- Masks ---


def test_invalid_logits_have_gradient_zero_and_the_others_a_finite_one():
    agent, mask = make_agent(), random_masks(1, seed=3)
    obs, masks = torch.randn(30, 5), mask.expand(30, 3, 4)
    actions = agent.get_action_and_value(obs, masks)[0]
    _, logprob, entropy, _ = agent.get_action_and_value(obs, masks, actions)
    (logprob.square().sum() + entropy.sum()).backward()
    gradient = agent.policy[-1].bias.grad.view(3, 4)
    several = mask[0] & (mask[0].sum(-1, keepdim=True) > 1)
    assert gradient.isfinite().all() and (gradient[~mask[0]] == 0).all()
    assert several.any() and (gradient[several] != 0).all()


def test_an_invalid_action_makes_no_ratio_nan():
    agent, mask = make_agent(), EXISTS[None].clone()
    mask[0, 0, 0] = False
    first = torch.zeros(1, 3, dtype=torch.int64)
    _, logprob, entropy, _ = agent.get_action_and_value(torch.randn(1, 5), mask, first)
    assert (logprob - logprob).item() == 0 and entropy.isfinite()


def test_no_score_makes_an_invalid_choice_win():
    scores = np.array([[[-50.0, np.inf, -50.0], [-60.0, -50.0, np.inf]]])
    masks = np.array([[[True, False, True], [True, True, False]]])
    assert ppo.choose(scores, masks).tolist() == [[0, 1]]


@pytest.mark.parametrize("offer", ["vector", "tuple", "method"])
def test_update_sees_the_masks_of_the_rollout(make_args, minibatches, offer):
    """The environment refuses invalid actions; with learning rate 0 the ratio stays 1."""
    args = make_args(env_id=f"MdMasked-{offer}-v0", learning_rate=0.0)
    agent = ppo.train(args)["agent"]
    assert len(minibatches) == 3 * 8
    for x in minibatches:
        assert x["losses/clipfrac"] == 0 and abs(x["losses/approx_kl"]) < 1e-9
    for x in minibatches[::8]:
        assert (x["masks"] <= EXISTS).all() and x["masks"].any(-1).all()
        for obs, mask, action, logprob in zip(x["obs"], x["masks"], x["actions"], x["logprobs"]):
            expected, _ = joint(agent, obs, mask, action)
            torch.testing.assert_close(logprob, expected.detach(), rtol=0, atol=1e-4)
    assert len({tuple(mask.flatten().tolist()) for x in minibatches for mask in x["masks"]}) > 20


def test_the_mask_is_that_of_the_next_action_also_where_an_episode_ends(make_args):
    envs, rng = ppo.Environments([ppo.make_env(make_args())]), np.random.default_rng(0)
    envs.reset(rng)
    for step in range(12):
        mask = envs.envs[0].mask
        assert np.concatenate(envs.envs[0].unwrapped.masks).tolist() == mask[EXISTS].tolist()
        assert not mask[~EXISTS].any() and envs.obs[0, 0] == step % 5
        envs.step(ppo.choose(rng.random((1, 3, 4)), mask), rng)


def test_without_the_flag_every_choice_is_valid(make_args):
    env = ppo.make_env(make_args(mask_invalid_actions=False))
    env.reset(seed=0)
    assert env.mask.tolist() == EXISTS.tolist()


@pytest.mark.parametrize("env_id", ["MdMasked-vector-v0", "Taxi-v4", "CartPole-v1"])
def test_a_resumed_run_goes_on_bit_for_bit_with_its_masks(make_args, minibatches, env_id):
    """Cut off after 32 steps of each environment, in the midst of episodes."""
    masked = env_id != "CartPole-v1"
    settings = {"env_id": env_id, "anneal_lr": False, "mask_invalid_actions": masked}
    whole, last = ppo.train(make_args(**settings)), minibatches[16:]
    args = make_args(**settings)
    ppo.train(dataclasses.replace(args, total_timesteps=64))
    minibatches.clear()
    resumed = ppo.train(dataclasses.replace(args, resume=f"runs/{args.run_name}"))
    for a, b in zip(last, minibatches, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in ("masks", "actions", "logprobs"))
    assert same_weights(whole["agent"], resumed["agent"])
    assert whole["episodes"] == resumed["episodes"]


# --- Action and observation spaces ---


def test_bins_are_evenly_spaced_between_the_bounds_of_each_dimension(make_args):
    env = ppo.make_env(make_args(env_id="MdFloats-v0", bins=11, mask_invalid_actions=False))
    assert env.mask.shape == (4, 11) and env.mask.all()
    env.reset(seed=0)
    for action in ([0, 0, 0, 0], [10, 10, 10, 10], [5, 2, 1, 9]):
        env.step(np.array(action))
    expected = [Matrix.low, Matrix.high, [[0, -1.5], [-2.4, 3.6]]]
    np.testing.assert_allclose(env.unwrapped.actions, expected)


@pytest.mark.parametrize("env_id", ["Shifted", "Matrices", "Identity", "Floats"])
def test_actions_reach_the_environment_in_its_own_form(make_args, env_id):
    """Which asserts that its space contains the action."""
    result = ppo.train(make_args(env_id=f"Md{env_id}-v0", mask_invalid_actions=False))
    assert all(0 < x["return"] < 10 for x in result["episodes"])
    assert result["episodes"] or env_id == "Floats"


# --- Operations ---


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"env_id": "MdBinary-v0"}, "MultiBinary"),
        ({"env_id": "MdUnbounded-v0"}, "must be discrete or have bounds"),
        ({"env_id": "MdWhole-v0"}, "must be discrete or have bounds"),
        ({"bins": 1}, "bins"),
        ({"env_id": "MdMasked-never-v0"}, "leave out --mask-invalid-actions"),
        ({"env_id": "MdMasked-short-v0"}, "has 3 entries, not 9"),
        ({"env_id": "MdMasked-nothing-v0"}, "nothing to do in a component"),
    ],
)
def test_bad_input_gets_a_sentence(make_args, settings, words):
    with pytest.raises(ValueError, match=words):
        ppo.train(make_args(**settings))


def test_the_number_of_bins_cannot_change(make_args):
    args = make_args(env_id="MdFloats-v0", mask_invalid_actions=False)
    ppo.train(args)
    changed = dataclasses.replace(args, resume=f"runs/{args.run_name}", bins=5)
    with pytest.raises(ValueError, match=r"cannot change .*, bins\."):
        ppo.train(changed)


def test_evaluation_is_repeatable_obeys_masks_and_finds_the_best_action(make_args):
    settings = {"num_steps": 64, "num_envs": 8, "total_timesteps": 2560, "learning_rate": 0.01}
    args = make_args(env_id="MdShifted-v0", mask_invalid_actions=False, gamma=0.5, **settings)
    ppo.train(args)
    evaluation = ppo.Args(evaluate=f"runs/{args.run_name}", eval_episodes=30)
    first, second = ppo.evaluate(evaluation), ppo.evaluate(evaluation)
    assert first == second
    assert 8 < np.mean(first["sampled"]) < np.mean(first["best"]) == 10
    args = make_args()  # this environment refuses what its masks exclude
    ppo.train(args)
    results = ppo.evaluate(ppo.Args(evaluate=f"runs/{args.run_name}", eval_episodes=3))
    assert results == {"best": [5.0] * 3, "sampled": [5.0] * 3}


def test_details_are_those_of_discrete_actions():
    table = ppo.details(ppo.Args(mask_invalid_actions=True))
    assert "| 37/37 | independent action components | on |" in table
    assert "| Extra | invalid action masking | mask_invalid_actions=True |" in table
    assert "| Deviation | time limits are no failures | truncation_is_terminal=False |" in table
    assert not any(f"| {number}/37 |" in table for number in (23, 24, 25, 27))


# --- It learns ---


def last_returns(result, count=100):
    return np.mean([x["return"] for x in result["episodes"][-count:]])


def test_the_identity_is_learned(make_args):
    """Random actions earn 3.6 of 10; the observation is one-hot."""
    settings = {"num_steps": 64, "num_envs": 8, "learning_rate": 0.01, "gamma": 0.5}
    settings |= {"mask_invalid_actions": False, "total_timesteps": 6144}
    assert last_returns(ppo.train(make_args(env_id="MdIdentity-v0", **settings))) > 9.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_balanced(tmp_path, monkeypatch, seed):
    """Published after 500k steps: 490 (CleanRL), 498 (baselines); the most is 500."""
    monkeypatch.chdir(tmp_path)
    settings = {"env_id": "CartPole-v1", "total_timesteps": 500_000, "run_name": f"seed{seed}"}
    assert last_returns(ppo.train(ppo.Args(**settings, seed=seed))) >= 475


@pytest.mark.slow
def test_taxi_is_solved_with_masks(make_args):
    """The best policy earns about 8, random actions -770."""
    settings = {"num_envs": 8, "num_steps": 128, "update_epochs": 10, "learning_rate": 3e-3}
    settings |= {"env_id": "Taxi-v4", "ent_coef": 0.01, "total_timesteps": 100_352}
    assert last_returns(ppo.train(make_args(**settings))) > 5


# Text that stands once in the script, what breaks it, the tests that must notice (pytest's -k).
MUTATIONS = [
    (".unflatten(-1, self.mask_shape)", ".unflatten(-1, self.mask_shape[::-1]).mT", "sums_over"),
    ("policy.log_prob(action).sum(-1)", "policy.log_prob(action).mean(-1)", "sums_over"),
    ("policy.entropy().sum(-1)", "policy.entropy().mean(-1)", "sums_over"),
    ("logits + noise[t]", "logits", "rollouts_sample"),
    ("math.prod(mask_shape)), 0.01)", "math.prod(mask_shape)), 1.0)", "policy_head"),
    ("np.ravel(space.start)[:, None] + ", "0 * np.ravel(space.start)[:, None] + ", "own_form"),
    ("action_space.shape)[()]", "action_space.shape)", "own_form"),
    ("space.high.ravel(), args.bins, axis=-1)",
     "space.high.ravel(), args.bins + 1, axis=-1)[:, 1:]", "bins_are"),
    ("self.values[self.components, action]", "self.values[0, action]", "bins_are"),
    ('"shared_network", "bins"]', '"shared_network"]', "cannot_change"),
    ("np.where(masks, scores, -np.inf).argmax", "scores.argmax", "no_score"),
    ("logits = torch.where(mask, logits, -1e8)", "pass", "sums_over"),
    ("torch.where(mask, logits, -1e8)", "torch.where(mask, logits, -math.inf)",
     "gradient_zero or nan"),
    ("torch.where(mask, logits, -1e8)", "torch.where(mask, logits, -4.0)", "sums_over"),
    ("< sizes[:, None]", "<= sizes[:, None]", "without_the_flag"),
    ("np.hstack(mask) != 0", "np.hstack(mask) == 0", "of_the_next_action"),
    ("if not self.mask.any(axis=1).all():", "if not self.mask.any():", "sentence"),
    ("if mask.size != self.exists.sum():", "if False:", "sentence"),
    ("if self.masked and not (terminated or truncated):", "if self.masked:", "of_the_next_action"),
    ("masks[t + 1] = [env.mask for env in envs.envs]", "pass", "update_sees"),
    ("masks[-1] = [env.mask for env in envs.envs]", "masks[-1] = True",
     "bit_for_bit"),
    ("masks[0] = obs[-1], masks[-1]", "masks[0] = obs[-1], masks[0]", "update_sees"),
    ("for x in (actions, masks[:-1])", "for x in (actions, masks[1:])", "update_sees"),
    ("get_action_and_value(obs, masks, actions)",
     "get_action_and_value(obs, masks | True, actions)", "update_sees"),
    ("choose(scores[None], components.mask)", "choose(scores[None], components.exists)",
     "repeatable"),
    ('rng.gumbel(size=shape) * (kind == "sampled")', "rng.gumbel(size=shape)", "repeatable"),
]  # fmt: skip
