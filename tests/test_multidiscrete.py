"""ppo_multidiscrete.py: several components, action masks, bins, and what it learns."""

import contextlib
import dataclasses
import itertools
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical

import ppo_multidiscrete as ppo
from ppo_multidiscrete import Agent, Args, RunError, choose_actions, train

SIZES = [3, 2, 4]  # unequal, and the largest is neither first nor alone


class Masked(gym.Env):
    """Three components with random masks, episodes of five steps; refuses invalid actions.

    The mask comes from `info` as one vector or as a tuple, or from the method `action_masks`.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.MultiDiscrete(SIZES)

    def __init__(self, offer="vector", nothing_at=None, truncate=True):
        self.offer, self.nothing_at, self.truncate = offer, nothing_at, truncate
        self.steps = 0

    @property
    def masks(self):
        return np.split(self.mask, np.cumsum(SIZES)[:-1])

    def _observe(self):
        self.mask = self.np_random.random(sum(SIZES)) < 0.5
        for part in self.masks:
            part[self.np_random.integers(len(part))] = True
        if self.steps == self.nothing_at:
            self.masks[1][:] = False
        info = {
            "vector": {"action_mask": self.mask.astype(np.int8)},
            "tuple": {"action_mask": tuple(self.masks)},
            "short": {"action_mask": self.masks[0]},
        }
        return np.array([self.t, 10.0 + self.steps]), info.get(self.offer, {})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe()

    def step(self, action):
        for mask, choice in zip(self.masks, action, strict=True):
            assert mask[choice], "an invalid action was taken"
        self.t, self.steps = self.t + 1, self.steps + 1
        obs, info = self._observe()
        end = self.t == 5
        return obs, 1.0, end and not self.truncate, end and self.truncate, info


class MaskedByMethod(Masked):
    """Offers the masks by a method only."""

    def __init__(self):
        super().__init__(offer="method")

    def action_masks(self):
        return self.mask


class Identity(gym.Env):
    """Reward 1 for naming the observation, per component; episodes of 10 steps."""

    def __init__(self, space):
        self.observation_space = self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t, self.state = 0, self.observation_space.sample()
        return self.state, {}

    def step(self, action):
        assert self.action_space.contains(action)
        reward = float(np.mean(np.equal(action, self.state)))
        self.t, self.state = self.t + 1, self.observation_space.sample()
        return self.state, reward, False, self.t == 10, {}


class Sequence(gym.Env):
    """Reward 1 while the actions follow a fixed sequence of 8; the first mistake ends it."""

    observation_space = gym.spaces.Discrete(9)
    action_space = gym.spaces.Discrete(4)
    sequence = (2, 0, 3, 1, 1, 2, 3, 0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return 0, {}

    def step(self, action):
        right = action == self.sequence[self.t]
        self.t += right
        return int(self.t), float(right), not right or self.t == 8, False, {}


class Box(gym.Env):
    """Notes the actions; uneven bounds, in a matrix."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Box(
        np.array([[-1.0, -2.0], [-3.0, 0.0]]), np.array([[1.0, 0.5], [3.0, 4.0]]), dtype=np.float64
    )

    def __init__(self, space=None):
        self.action_space, self.actions = space or self.action_space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.actions.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


ENVIRONMENTS = {
    "MdMasked-v0": Masked,
    "MdMaskedTuple-v0": lambda: Masked("tuple"),
    "MdMaskedMethod-v0": MaskedByMethod,
    "MdMaskedNever-v0": lambda: Masked("never"),
    "MdMaskedShort-v0": lambda: Masked("short"),
    "MdMaskedNothing-v0": lambda: Masked(nothing_at=9),
    "MdIdentity-v0": lambda: Identity(gym.spaces.Discrete(4)),
    "MdIdentities-v0": lambda: Identity(gym.spaces.MultiDiscrete([3, 2, 4])),
    "MdShifted-v0": lambda: Identity(gym.spaces.Discrete(3, start=5)),
    "MdMatrix-v0": lambda: Identity(gym.spaces.MultiDiscrete([[3, 2], [2, 4]], start=[[1, 0]] * 2)),
    "MdSequence-v0": Sequence,
    "MdBox-v0": Box,
    "MdUnbounded-v0": lambda: Box(gym.spaces.Box(-np.inf, np.inf, (1,))),
    "MdBinary-v0": lambda: Box(gym.spaces.MultiBinary(3)),
}
for name, entry_point in ENVIRONMENTS.items():
    gym.register(name, entry_point)


@pytest.fixture
def make_args(tmp_path):
    """Make Args for a run of a second that writes below tmp_path."""
    count = itertools.count()

    def make(**settings):
        defaults = {"env_id": "MdMasked-v0", "total_timesteps": 96, "num_steps": 16, "num_envs": 2}
        defaults |= {"num_minibatches": 4, "update_epochs": 2, "output_dir": str(tmp_path)}
        defaults |= {"run_name": None if "resume" in settings else f"run{next(count)}"}
        return Args(**{**defaults, **settings})

    return make


@pytest.fixture
def minibatches(monkeypatch):
    """The data and metrics of every minibatch."""
    seen, gradient = [], ppo.loss_gradient

    def record(agent, minibatch, *settings):
        result = gradient(agent, minibatch, *settings)
        names = ("obs", "actions", "logprobs", "values", "advantages", "returns")
        seen.append({name: x.clone() for name, x in zip(names, minibatch, strict=True)})
        seen[-1] |= dict(zip(ppo.LOSS_METRICS, result[1].tolist(), strict=True))
        return result

    monkeypatch.setattr(ppo, "loss_gradient", record)
    return seen


def make_agent(masked=False, sizes=SIZES, obs_size=5):
    """An agent whose distributions are far from uniform."""
    torch.manual_seed(0)
    agent = Agent(obs_size, sizes, Args(shared_network=False, mask_invalid_actions=masked))
    torch.nn.init.normal_(agent.policy_head.weight, std=0.5)
    torch.nn.init.normal_(agent.policy_head.bias)
    return agent


def random_masks(count, sizes=SIZES, seed=0):
    """Masks (count, L) with at least one valid choice per component."""
    rng = np.random.default_rng(seed)
    parts = [rng.random((count, size)) < 0.5 for size in sizes]
    for part in parts:
        part[np.arange(count), rng.integers(part.shape[1], size=count)] = True
    return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))


def flat_logits(agent, obs):
    return agent.policy_head(agent.policy_trunk(obs[:, : agent.obs_size]))


# --- Detail 37 ---


@pytest.mark.parametrize("sizes", [[3, 2, 4], [4, 4], [5], [1, 6]])
def test_logprob_and_entropy_are_sums_over_the_components(sizes):
    agent, obs = make_agent(sizes=sizes), torch.randn(50, 5)
    actions = torch.stack([torch.randint(size, (50,)) for size in sizes], dim=1)
    parts = [Categorical(logits=x) for x in flat_logits(agent, obs).split(sizes, dim=1)]
    _, logprob, entropy, _ = agent.get_action_and_value(obs, actions)
    expected = sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))


def test_policy_equals_the_categorical_over_all_combinations():
    agent, obs = make_agent(), torch.randn(1, 5)
    every = torch.tensor(list(itertools.product(*map(range, SIZES))))
    _, logprob, entropy, _ = agent.get_action_and_value(obs.expand(len(every), -1), every)
    assert logprob.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert entropy[0].item() == pytest.approx(-(logprob.exp() * logprob).sum().item(), abs=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_both_samplers_draw_every_choice_with_its_probability(masked):
    agent, count = make_agent(masked), 20_000
    obs = torch.randn(1, 5)
    mask = random_masks(1) if masked else torch.zeros(1, 0)
    every = torch.tensor(list(itertools.product(*map(range, SIZES))))
    repeated = torch.cat([obs, mask], dim=1).expand(count, -1)
    probability = agent.get_action_and_value(repeated[: len(every)], every)[1].exp()
    drawn = agent.get_action_and_value(repeated)[0]
    scores = flat_logits(agent, obs).detach().numpy()
    scores = scores + np.random.default_rng(0).gumbel(size=(count, sum(SIZES)))
    chosen = torch.from_numpy(choose_actions(scores, repeated[:, 5:].numpy(), SIZES))
    for actions in (drawn, chosen):
        assert actions.shape == (count, 3)
        share = (actions[:, None] == every).all(-1).float().mean(0)
        assert (share - probability).abs().max() < 0.015  # four standard errors of a half


@pytest.mark.parametrize("sizes", [[3, 2, 4], [3, 3], [4], [1, 2]])
def test_the_highest_score_of_each_component_wins(sizes):
    scores = np.random.default_rng(1).normal(size=(20, sum(sizes)))
    expected = [[part.argmax() for part in np.split(row, np.cumsum(sizes)[:-1])] for row in scores]
    assert choose_actions(scores, scores[:, :0], sizes).tolist() == expected


def test_policy_head_is_one_orthogonal_matrix_with_a_small_gain():
    agent = Agent(5, SIZES, Args(shared_network=True))
    weight = agent.policy_head.weight.detach()
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(9), atol=1e-9, rtol=0)
    assert agent.value_head.weight.norm().item() == pytest.approx(1)
    assert all((layer.bias == 0).all() for layer in agent.modules() if hasattr(layer, "bias"))


def test_networks_are_shared_or_separate():
    """Sizes as ppo2's for CartPole-v1; only a shared trunk learns from both losses."""
    for shared, parameters in ((True, 4675), (False, 9155)):
        agent = Agent(4, [2], Args(shared_network=shared))
        assert sum(x.numel() for x in agent.parameters()) == parameters
        agent.get_action_and_value(torch.randn(3, 4), torch.zeros(3, 1).long())[1].sum().backward()
        assert (agent.value_trunk[0].weight.grad is not None) == shared


# --- Masks ---


def test_masked_policy_equals_the_categorical_over_the_valid_choices():
    agent, features, mask = make_agent(masked=True), torch.randn(40, 5), random_masks(40)
    obs = torch.cat([features, mask], dim=1)
    actions, logprob, entropy, value = agent.get_action_and_value(obs)
    for row in range(40):
        expected_logprob = expected_entropy = 0.0
        logits = flat_logits(agent, features)[row].split(SIZES)
        for i, valid in enumerate(mask[row].bool().split(SIZES)):
            assert valid[actions[row, i]]
            part = Categorical(logits=logits[i][valid])
            expected_logprob += part.log_prob(valid[: actions[row, i]].sum())
            expected_entropy += part.entropy()
        torch.testing.assert_close(logprob[row], expected_logprob)
        torch.testing.assert_close(entropy[row], expected_entropy)
    torch.testing.assert_close(value, agent.get_value(features))  # V(s) does not see the mask


def test_invalid_logits_have_gradient_zero_and_the_others_a_finite_one():
    agent, mask = make_agent(masked=True), random_masks(1, seed=3)
    obs = torch.cat([torch.randn(30, 5), mask.expand(30, -1)], dim=1)
    actions = agent.get_action_and_value(obs)[0]
    _, logprob, entropy, _ = agent.get_action_and_value(obs, actions)
    (logprob.square().sum() + entropy.sum()).backward()
    gradient = agent.policy_head.bias.grad
    assert gradient.isfinite().all() and (gradient[mask[0] == 0] == 0).all()
    several = torch.cat([x * (x.sum() > 1) for x in mask[0].split(SIZES)]) > 0
    assert several.any() and (gradient[several] != 0).all()


def test_invalid_logits_are_finite_so_that_no_ratio_is_nan():
    agent, mask = make_agent(True), torch.ones(1, sum(SIZES))
    mask[0, 0] = 0  # the first choice of the first component
    obs = torch.cat([torch.randn(1, 5), mask], dim=1)
    _, logprob, entropy, _ = agent.get_action_and_value(obs, torch.zeros(1, 3, dtype=torch.int64))
    assert logprob.item() == pytest.approx(-1e8, rel=1e-3)
    (logprob - logprob.detach() + entropy).exp().sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in agent.parameters())


def test_no_score_makes_an_invalid_choice_win():
    scores = np.full((1, 5), -50.0)
    scores[0, [1, 4]] = np.inf
    mask = np.array([[1, 0, 1, 1, 0]])
    assert choose_actions(scores, mask, [3, 2]).tolist() == [[0, 0]]


@pytest.mark.parametrize("sizes", [[3, 2], [2, 3]])
def test_a_component_without_valid_choice_is_an_error(sizes):
    mask = np.ones((2, 5))
    mask[1, sizes[0] :] = 0
    with pytest.raises(RunError, match="component 1"):
        choose_actions(np.zeros((2, 5)), mask, sizes)


@pytest.mark.parametrize("env_id", ["MdMasked-v0", "MdMaskedTuple-v0", "MdMaskedMethod-v0"])
@pytest.mark.parametrize("norm_obs", [False, True])
def test_update_sees_the_masks_of_the_rollout(make_args, minibatches, env_id, norm_obs):
    """The environment refuses invalid actions; with learning rate 0 the ratio stays 1."""
    args = make_args(env_id=env_id, mask_invalid_actions=True, learning_rate=0.0, norm_obs=norm_obs)
    agent = train(args)["agent"]
    assert len(minibatches) == 3 * 8
    for x in minibatches:
        assert x["losses/clipfrac"] == 0 and abs(x["losses/approx_kl"]) < 1e-9
        features, mask = x["obs"][:, :2], x["obs"][:, 2:]
        assert mask.shape[1] == 9 and ((mask == 0) | (mask == 1)).all()
        assert (features.abs().max() <= 10) == norm_obs
        expected, offset = torch.zeros(len(mask)), 0
        logits = flat_logits(agent, features)
        for i, size in enumerate(SIZES):
            span = slice(offset, offset + size)
            weight = logits[:, span].exp() * mask[:, span]
            share = (weight / weight.sum(1, keepdim=True)).gather(1, x["actions"][:, i, None])
            expected, offset = expected + share.squeeze(1).log(), offset + size
        torch.testing.assert_close(x["logprobs"], expected.detach())


def test_mask_behind_the_last_observation_of_an_episode_is_that_of_the_next_one(make_args):
    with contextlib.closing(
        ppo.make_envs(make_args(mask_invalid_actions=True, num_envs=1))
    ) as envs:
        obs, _ = envs.reset(seed=[0])
        for _ in range(12):
            unwrapped = envs.envs[0].unwrapped
            assert obs[0, 2:].tolist() == unwrapped.mask.tolist()
            assert obs[0, :2].tolist() == [unwrapped.t, 10 + unwrapped.steps]
            choice = choose_actions(np.zeros((1, 9)), obs[:, 2:], SIZES)
            obs, _, _, truncated, infos = envs.step(choice)
            if truncated[0]:
                assert obs[0, 0] == 0 and infos["final_obs"][0].shape == (11,)


def test_truncated_episodes_bootstrap_the_value_of_their_last_observation(make_args, monkeypatch):
    recorded, gae = [], ppo.gae

    def record(rewards, values, next_values, *rest):
        recorded.append(next_values.clone())
        return gae(rewards, values, next_values, *rest)

    monkeypatch.setattr(ppo, "gae", record)
    args = make_args(mask_invalid_actions=True, learning_rate=0.0, num_envs=1, total_timesteps=16)
    agent = train(args)["agent"]
    for step in (4, 9, 14):  # the observation is (t, 10 + steps so far)
        expected = agent.get_value(torch.tensor([5.0, 11.0 + step])).item()
        assert recorded[0][step, 0].item() == pytest.approx(expected, abs=1e-5)


def test_no_mask_is_needed_behind_the_last_observation(make_args, monkeypatch):
    real = Masked.step

    def step(self, action):
        obs, reward, terminated, truncated, info = real(self, action)
        return obs, reward, terminated, truncated, {} if terminated or truncated else info

    monkeypatch.setattr(Masked, "step", step)
    updates = train(make_args(mask_invalid_actions=True))["updates"]
    assert len(updates) == 3


def test_a_bad_last_observation_stops_the_run_at_its_step(make_args, monkeypatch):
    real = Masked._observe

    def observe(self):
        obs, info = real(self)
        return obs * (np.nan if self.steps == 5 and self.t == 5 else 1), info

    monkeypatch.setattr(Masked, "_observe", observe)
    with pytest.raises(ppo.RunError, match="observation is NaN or infinite at step 5"):
        train(make_args(mask_invalid_actions=True, num_envs=1))


def test_defaults_are_found_for_rollouts_of_one_step(make_args):
    args = make_args(env_id="MdIdentity-v0", num_steps=1, num_envs=64, num_minibatches=2)
    assert ppo.choose_defaults(args).shared_network


def test_normalization_leaves_the_mask_alone():
    stats = ppo.RunningMeanStd((2,))
    stats.update(np.array([[1.0, 2.0], [3.0, 6.0]]))
    obs = np.array([[3.0, 6.0, 0.0, 1.0, 1.0]])
    result = ppo.normalize_features(obs, stats, True, 10.0)
    assert result == pytest.approx(np.array([[1.0, 1.0, 0.0, 1.0, 1.0]]), abs=1e-3)
    assert ppo.normalize_features(obs[:, :2], stats, True, 10.0).shape == (1, 2)


# --- Action and observation spaces ---


def test_bins_are_evenly_spaced_between_the_bounds_of_each_dimension():
    env = ppo.BinActions(Box(), 11)
    assert env.action_space == gym.spaces.MultiDiscrete([11] * 4)
    for action, expected in (
        ([0, 0, 0, 0], [[-1, -2], [-3, 0]]),
        ([10, 10, 10, 10], [[1, 0.5], [3, 4]]),
        ([5, 2, 1, 9], [[0, -1.5], [-2.4, 3.6]]),
    ):
        assert env.action(np.array(action)) == pytest.approx(np.array(expected))
        assert Box.action_space.contains(env.action(np.array(action)))


def test_bins_of_whole_numbers_are_rounded_and_those_of_huge_ones_finite():
    whole = ppo.BinActions(Box(gym.spaces.Box(-3, 3, (1,), np.int8)), 5)
    assert whole.values.tolist() == [[-3], [-2], [0], [2], [3]] and whole.values.dtype == np.int8
    huge = ppo.BinActions(Box(gym.spaces.Box(-3e38, 3e38, (1,), np.float32)), 3)
    assert huge.values.ravel() == pytest.approx([-3e38, 0, 3e38])
    with pytest.raises(ppo.RunError, match="has fewer values than --bins 8"):
        ppo.BinActions(Box(gym.spaces.Box(-3, 3, (1,), np.int8)), 8)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("env_id", ["MdShifted-v0", "MdMatrix-v0", "MdIdentities-v0", "MdBox-v0"])
def test_actions_reach_the_environment_in_its_own_form(make_args, env_id, num_envs):
    """The environments assert that their space contains the action."""
    args = make_args(env_id=env_id, num_envs=num_envs, total_timesteps=16 * num_envs)
    result = train(args)
    if env_id != "MdBox-v0":
        returns = [x["return"] for x in result["episodes"]]
        assert 0 < np.mean(returns) < 10


def test_discrete_observations_are_one_hot(make_args, minibatches):
    train(make_args(env_id="MdSequence-v0"))
    obs = torch.cat([x["obs"] for x in minibatches])
    assert obs.shape[1] == 9 and (obs.sum(1) == 1).all() and (obs.max(1).values == 1).all()
    assert obs[:, 0].any() and obs[:, 1].any()


@pytest.mark.parametrize(
    "env_id, binned", [("CartPole-v1", False), ("MdIdentities-v0", False), ("Pendulum-v1", True)]
)
def test_defaults_follow_the_kind_of_actions(make_args, env_id, binned):
    args = ppo.choose_defaults(make_args(env_id=env_id))
    assert (args.norm_obs, args.scale_rewards, args.shared_network) == (binned, binned, not binned)
    settings = {"norm_obs": not binned, "scale_rewards": binned, "shared_network": binned}
    args = ppo.choose_defaults(make_args(env_id=env_id, norm_obs=not binned, shared_network=binned))
    assert {name: getattr(args, name) for name in settings} == settings


def test_switches_reach_observations_and_rewards(make_args, minibatches, monkeypatch):
    rewards, gae = [], ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *x: rewards.append(x[0].clone()) or gae(*x))
    for on in (False, True):
        minibatches.clear()
        rewards.clear()
        settings = {"norm_obs": on, "scale_rewards": on, "mask_invalid_actions": True}
        train(make_args(total_timesteps=128, **settings))
        obs = torch.cat([x["obs"] for x in minibatches[-8:]])
        assert (obs[:, 1].max() > 10) == (not on)  # 10 + steps so far, if nothing is normalized
        assert (rewards[-1] == 1).all() == (not on)


def test_uniform_policy_has_an_entropy_share_of_one(make_args):
    updates = train(make_args(env_id="MdIdentities-v0"))["updates"]
    assert updates[0]["policy/entropy_share"] == pytest.approx(1, abs=1e-3)


# --- The loop, whose text is this script's own ---


@pytest.fixture
def loop(monkeypatch):
    """Arguments and results of gae, and what each minibatch and each Adam step got."""
    seen = {"gae": [], "minibatches": [], "gradients": [], "clip_coef": [], "steps": [], "adam": []}
    gae, loss_gradient = ppo.gae, ppo.loss_gradient

    def record_gae(*arguments):
        result = gae(*arguments)
        names = "rewards values next_values terminated done gamma gae_lambda advantages returns"
        values = [x.clone() if isinstance(x, torch.Tensor) else x for x in (*arguments, *result)]
        seen["gae"].append(dict(zip(names.split(), values, strict=True)))
        return result

    def record_gradient(agent, minibatch, clip_coef, *settings):
        gradient, metrics = loss_gradient(agent, minibatch, clip_coef, *settings)
        seen["minibatches"].append([x.clone() for x in minibatch])
        seen["gradients"].append(gradient.clone())
        seen["clip_coef"].append(clip_coef.item())
        return gradient, metrics

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            (group,) = self.param_groups
            seen["adam"].append((group["lr"], group["eps"]))
            seen["steps"].append(group["params"][0].grad.clone())
            return super().step(closure)

    monkeypatch.setattr(ppo, "gae", record_gae)
    monkeypatch.setattr(ppo, "loss_gradient", record_gradient)
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    return seen


MASKED = {"env_id": "MdMasked-v0", "mask_invalid_actions": True}


def test_schedules_epsilon_and_clipping_reach_adam(make_args, loop):
    settings = {"learning_rate": 0.3, "adam_eps": 1e-4, "clip_coef": 0.3, "max_grad_norm": 0.01}
    train(make_args(anneal_clip=True, **settings, **MASKED))
    expected = np.repeat([0.3, 0.2, 0.1], 8)
    assert [lr for lr, _ in loop["adam"]] == pytest.approx(expected)
    assert loop["clip_coef"] == pytest.approx(expected)
    assert {eps for _, eps in loop["adam"]} == {1e-4}
    for before, after in zip(loop["gradients"], loop["steps"], strict=True):
        expected = before * min(1, 0.01 / before.norm())
        torch.testing.assert_close(after, expected, rtol=1e-3, atol=1e-8)


def test_without_annealing_and_clipping_nothing_changes(make_args, loop):
    train(make_args(anneal_lr=False, learning_rate=0.3, max_grad_norm=None, **MASKED))
    assert {lr for lr, _ in loop["adam"]} == {0.3}
    assert {round(x, 6) for x in loop["clip_coef"]} == {0.2}
    assert all(torch.equal(a, b) for a, b in zip(loop["gradients"], loop["steps"], strict=True))


def test_every_sample_is_used_once_per_epoch_in_a_new_order_with_aligned_rows(make_args, loop):
    args = make_args(num_envs=1, num_steps=32, total_timesteps=32, **MASKED)
    train(args)
    batch, orders = loop["gae"][0], []
    for epoch in (loop["minibatches"][:4], loop["minibatches"][4:]):
        obs, _, _, values, advantages, returns = (torch.cat(x) for x in zip(*epoch, strict=True))
        # The environment counts its steps; after a reset it shows the number of the last one again.
        order = (obs[:, 1] - 10).long()
        assert sorted(order.tolist()) == list(range(32)) and all(len(x[0]) == 8 for x in epoch)
        for name, stored in (("values", values), ("advantages", advantages), ("returns", returns)):
            assert torch.equal(stored, batch[name][order, 0])
        orders.append(order.tolist())
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


@pytest.mark.parametrize("end", ["terminated", "truncated", "failed"])
def test_rollout_holds_what_the_environment_returned(make_args, loop, monkeypatch, end):
    """Two iterations of 16 steps in episodes of 5, cut off in the midst of one."""
    monkeypatch.setitem(gym.registry["MdMasked-v0"].kwargs, "truncate", end != "terminated")
    settings = {"num_envs": 1, "total_timesteps": 32, "learning_rate": 0.0}
    settings |= {"truncation_is_terminal": end == "failed", "gamma": 0.9, "gae_lambda": 0.8}
    result = train(make_args(**settings, **MASKED))
    assert [x["global_step"] for x in result["episodes"]] == [5, 10, 15, 20, 25, 30]
    assert {(x["return"], x["length"]) for x in result["episodes"]} == {(5.0, 5)}
    done = np.arange(1, 33) % 5 == 0
    value = result["agent"].get_value
    for i, batch in enumerate(loop["gae"]):
        steps = range(16 * i, 16 * i + 16)
        assert (batch["gamma"], batch["gae_lambda"]) == (0.9, 0.8)
        assert (batch["rewards"] == 1).all()
        assert batch["done"][:, 0].tolist() == done[list(steps)].tolist()
        assert batch["terminated"].equal(batch["done"] * (end != "truncated"))
        for row, step in enumerate(steps):
            before, after = [step % 5, 10 + step], [(step + 1) % 5, 11 + step]
            if done[step] and end == "truncated":
                after[0] = 5
            expected = [value(torch.tensor(x).float()).item() for x in (before, after)]
            found = [batch["values"][row, 0].item(), batch["next_values"][row, 0].item()]
            assert found == pytest.approx(expected, abs=1e-5)


def test_rewards_are_divided_by_the_spread_of_returns_that_start_anew(make_args, loop):
    """Against a plain restatement; two environments, whose episodes end together."""
    train(make_args(scale_rewards=True, clip_reward=None, gamma=0.9, **MASKED))
    seen, ret = [], 0.0
    for step in range(48):
        ret = 0.9 * ret + 1.0
        seen += [ret, ret]
        reward = loop["gae"][step // 16]["rewards"][step % 16, 0].item()
        # The statistics start like 1e-4 samples with mean 0 and variance 1.
        mean = np.sum(seen) / (len(seen) + 1e-4)
        squares = np.sum((np.array(seen) - mean) ** 2) + 1e-4 * (1 + mean**2)
        assert reward == pytest.approx(1 / np.sqrt(squares / (len(seen) + 1e-4) + 1e-8), rel=1e-4)
        ret *= (step + 1) % 5 != 0
    train(make_args(scale_rewards=True, clip_reward=2.0, gamma=0.9, **MASKED))
    assert loop["gae"][3]["rewards"].max() == 2


def test_observations_are_normalized_by_all_that_was_seen(make_args, loop):
    train(make_args(norm_obs=True, num_envs=1, total_timesteps=16, clip_obs=None, **MASKED))
    raw = np.array([[t % 5, 10 + t] for t in range(17)], dtype=float)
    rows = torch.cat([x[0] for x in loop["minibatches"][:4]])[:, :2]
    for t in range(16):
        seen = raw[: t + 1]
        expected = (raw[t] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
        if t > 3:  # at first the starting value of the statistics still counts
            assert (rows - torch.tensor(expected)).abs().max(1).values.min() < 0.01


def test_rollout_samples_from_the_policy(make_args, loop, monkeypatch):
    """With known logits in place of the network's; 4 standard errors of a half are 0.03."""
    shares = [0.7, 0.2, 0.1, 0.1, 0.9, 0.4, 0.3, 0.2, 0.1]
    logits = np.log(np.array([shares]))
    monkeypatch.setattr(ppo, "numpy_mlp", lambda layers, x: logits.repeat(len(x), axis=0))
    args = make_args(env_id="MdIdentities-v0", num_envs=8, num_steps=512, total_timesteps=4096)
    train(dataclasses.replace(args, update_epochs=1))
    actions = torch.cat([x[1] for x in loop["minibatches"]])
    counts = torch.cat([torch.bincount(x, minlength=n) for x, n in zip(actions.T, SIZES)])
    assert (counts / 4096).tolist() == pytest.approx(shares, abs=0.03)


def test_target_kl_ends_the_epochs(make_args):
    updates = train(make_args(target_kl=0.0, update_epochs=5, **MASKED))["updates"]
    assert [x["charts/epochs"] for x in updates] == [1, 1, 1]


# --- Operations ---


@pytest.mark.parametrize(
    "settings",
    [
        {"env_id": "Taxi-v4", "mask_invalid_actions": True, "norm_obs": True},
        {"env_id": "FrozenLake-v1"},
        {"env_id": "CartPole-v1"},
    ],
    ids=lambda x: x["env_id"],
)
def test_a_resumed_run_ends_with_the_same_numbers(make_args, monkeypatch, settings):
    """Killed in iteration 3 of 4, with checkpoints every 2."""
    args = make_args(total_timesteps=128, checkpoint_interval=2, compile=False, **settings)
    whole = train(args)
    killed = make_args(total_timesteps=128, checkpoint_interval=2, compile=False, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "health_warnings", lambda updates: {} if len(updates) < 3 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(killed)
    resumed = train(ppo.saved_args(*load_checkpoint(killed)))
    for a, b in zip(whole["agent"].parameters(), resumed["agent"].parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole["episodes"] == resumed["episodes"]


def load_checkpoint(args):
    path = args.run_dir / "checkpoint.pt"
    content = ppo.load_file(path, "processes")
    content["args"]["resume"] = str(path)
    return content, path


def test_the_state_of_taxi_is_restored():
    args = Args(env_id="Taxi-v4", mask_invalid_actions=True, num_envs=1)
    first, second = ppo.make_env(args, 0)(), ppo.make_env(args, 0)()
    first.reset(seed=3)
    second.reset(seed=4)
    first.step(0)
    state = first.get_state()
    assert first.unwrapped.desc is not None
    second.set_state([state])
    for action in (1, 3, 2, 0, 4):
        a, b = first.step(action), second.step(action)
        assert (a[0] == b[0]).all() and a[1:4] == b[1:4]
    a, b = first.reset(), second.reset()  # the random generators agree as well
    assert (a[0] == b[0]).all()


def test_evaluation_plays_the_best_and_the_sampled_actions(make_args, capsys):
    args = make_args(env_id="MdMasked-v0", mask_invalid_actions=True, norm_obs=True)
    train(args)
    results = ppo.evaluate(
        make_args(env_id="MdMasked-v0", evaluate=str(args.run_dir), eval_episodes=3)
    )
    assert results == {"best": [5.0] * 3, "sampled": [5.0] * 3}
    only = make_args(evaluate=str(args.run_dir), eval_episodes=2, deterministic=True)
    assert list(ppo.evaluate(only)) == ["best"]


def test_evaluation_is_repeatable_and_the_best_action_beats_samples(make_args):
    args = make_args(
        env_id="MdShifted-v0", num_steps=64, num_envs=8, total_timesteps=10_240, learning_rate=3e-3
    )
    train(args)
    evaluation = make_args(env_id="MdShifted-v0", evaluate=str(args.run_dir), eval_episodes=30)
    first, second = ppo.evaluate(evaluation), ppo.evaluate(evaluation)
    assert first == second
    assert 8 < np.mean(first["sampled"]) < np.mean(first["best"]) == 10


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--env-id MdBinary-v0", "MultiBinary"),
        ("--env-id MdUnbounded-v0", "bounds"),
        ("--env-id MdBox-v0 --bins 1", "at least 2"),
        ("--env-id CartPol-v1", "did you mean CartPole"),
        ("--env-id Taxi-v3", "Taxi-v4"),
        ("--env-id CartPole-v1 --capture-video", "classic"),
        ("--env-id MdMaskedNever-v0 --mask-invalid-actions", "leave out"),
        ("--env-id MdMaskedShort-v0 --mask-invalid-actions", "has 3 entries"),
        ("--env-id MdMaskedNothing-v0 --mask-invalid-actions", "component 1"),
    ],
)
def test_bad_input_ends_with_one_sentence(tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.setitem(sys.modules, "pygame", None)
    flags += f" --output-dir {tmp_path} --num-steps 64 --num-minibatches 2 --total-timesteps 64"
    monkeypatch.setattr(sys, "argv", ["ppo_multidiscrete.py", *flags.split()])
    with pytest.raises(SystemExit) as end:
        ppo.main()
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.startswith("Error: ") and message.count("\n") == 1
    assert words in message


# --- It learns ---


def last_returns(result, count=100):
    return np.mean([x["return"] for x in result["episodes"][-count:]])


QUICK = {"num_steps": 64, "num_envs": 8, "learning_rate": 3e-3, "gamma": 0.5}


@pytest.mark.parametrize("env_id", ["MdIdentity-v0", "MdIdentities-v0", "MdShifted-v0"])
def test_the_identity_is_learned(make_args, env_id):
    """Random actions earn 2.5 to 3.6 of 10."""
    args = make_args(env_id=env_id, total_timesteps=15_360, **QUICK)
    assert last_returns(train(args)) > 9.0


def test_a_fixed_sequence_is_learned(make_args):
    """Random actions earn 1/3 of 8."""
    args = make_args(env_id="MdSequence-v0", total_timesteps=20_480, **QUICK)
    assert last_returns(train(args)) > 6.5


PAPER = {"num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_balanced(make_args, seed):
    """Published after 500k steps: 490 (CleanRL), 498 (baselines); the most is 500."""
    args = make_args(env_id="CartPole-v1", seed=seed, total_timesteps=500_000, **PAPER)
    assert last_returns(train(args)) >= 475


TAXI = {"env_id": "Taxi-v4", "num_envs": 8, "num_steps": 128, "update_epochs": 10}
TAXI |= {"learning_rate": 3e-3, "ent_coef": 0.01, "scale_rewards": True, "shared_network": False}


def steps_to(result, level):
    """Steps until the mean return of 100 episodes reaches `level`, or infinity."""
    returns = [x["return"] for x in result["episodes"]]
    means = np.convolve(returns, np.ones(100) / 100, "valid")
    reached = (means >= level).nonzero()[0]
    return result["episodes"][reached[0] + 99]["global_step"] if len(reached) else np.inf


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_taxi_is_solved_sooner_with_masks(make_args, seed):
    """The best policy earns about 8, random actions -770."""
    args = make_args(**TAXI, seed=seed, total_timesteps=100_352)
    masked = train(dataclasses.replace(args, mask_invalid_actions=True))
    plain = train(dataclasses.replace(args, run_name="plain"))
    assert steps_to(masked, 0) < 0.8 * steps_to(plain, 0)
    assert last_returns(masked) > 5
