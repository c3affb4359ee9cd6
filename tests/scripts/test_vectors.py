"""The test vectors: what the scripts give, and what other libraries give."""

import json
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import ROOT, on
from sb3_contrib.common.maskable.distributions import MaskableCategorical
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

import grpo_minimal
import ppo_minimal
from benchmark.paper import vectors

VECTORS = json.loads(vectors.FILE.read_text(encoding="utf-8"))
PAGE = (ROOT / "benchmark/pages/vectors.md").read_text(encoding="utf-8")


class Case:
    """A case with its inputs as tensors, and what has been found wrong."""

    def __init__(self, formula: str, case: dict) -> None:
        self.formula, self.case = formula, case

    @property
    def inputs(self) -> SimpleNamespace:
        """Numbers, and new tensors of 64-bit floats, flags or integers."""
        inputs = self.case["inputs"].items()
        tensors = {k: torch.tensor(np.array(x)) for k, x in inputs if isinstance(x, list)}
        return SimpleNamespace(**{**self.case["inputs"], **tensors})

    def close(self, found, expected) -> bool:
        expected = np.array(expected, float)
        size = np.abs(expected).max() or 1.0
        return np.allclose(found, expected, rtol=1e-5, atol=1e-6 * size)

    def reasons(self, **outputs) -> set[str]:
        """What explains the outputs that are not as expected; each must be a known mistake."""
        found = set()
        for name, x in outputs.items():
            x = x.detach().numpy() if isinstance(x, Tensor) else np.asarray(x)
            if self.close(x, self.case["expected"][name]):
                continue
            known = [
                mistake["mistake"]
                for mistake in self.case["mistakes"]
                if name in mistake["gives"] and self.close(x, mistake["gives"][name])
            ]
            found.add(known[0] if known else f"{name} is {x.tolist()}")
        return found

    def agree(self, **outputs) -> None:
        assert outputs and self.reasons(**outputs) == set()


def cases(*formulas):
    """Run a test on each case of formulas, as its `case`."""
    found = [Case(x, case) for x in formulas for case in VECTORS[x]["cases"]]
    names = [f"{x.formula}-{x.case['name']}" for x in found]
    return pytest.mark.parametrize("case", found, ids=names)


def slope(loss, *x):
    return torch.autograd.grad(loss, x)


# --- The file ---


def test_the_file_is_up_to_date_and_small():
    """Written by `python -m benchmark vectors`."""
    assert vectors.FILE.read_text(encoding="utf-8") == vectors.content()
    assert vectors.FILE.stat().st_size < 150_000


@cases(*(x for x in VECTORS if x != "about"))
def test_each_case_says_what_it_is_about_and_has_a_mistake_that_shows(case):
    assert case.case["about"].endswith(".") and case.case["mistakes"]
    for mistake in case.case["mistakes"]:
        assert mistake["gives"].keys() <= case.case["expected"].keys()
        for name, x in mistake["gives"].items():
            assert not case.close(x, case.case["expected"][name])


def test_every_mistake_shows_somewhere():
    for name, formula in vectors.FORMULAS.items():
        shown = {y["mistake"] for x in VECTORS[name]["cases"] for y in x["mistakes"]}
        assert shown == formula.mistakes.keys(), name


# --- The scripts ---


@cases("gae")
def test_gae(script, case):
    x = case.inputs
    following = x.next_values.masked_fill(x.terminated, 0.0)
    inputs = x.rewards, x.values, following, (x.terminated | x.truncated).double()
    before = [y.clone() for y in inputs]
    args = script.module.Args(gamma=x.gamma, gae_lambda=x.gae_lambda)
    advantages = script.module.gae(*inputs, args)
    case.agree(advantages=advantages, returns=advantages + x.values)
    assert all(map(torch.equal, inputs, before))  # they stay as they are


@cases("gae")
def test_gae_of_the_short_script(case):
    x = case.inputs
    following = x.next_values.masked_fill(x.terminated, 0.0)
    done = (x.terminated | x.truncated).double()
    found = ppo_minimal.gae(x.rewards, x.values, following, done, x)
    case.agree(**dict(zip(("advantages", "returns"), found)))


@cases("normalize_obs")
@on("vector")
def test_normalize_obs(script, case):
    observations, found = case.inputs.observations.numpy(), []
    stats = script.module.RunningMeanStd(np.zeros(2), np.ones(2))
    args = script.module.Args(clip_obs=case.inputs.clip_obs)
    for rows in observations:
        stats.update(rows)
        found.append(script.module.normalize_obs(rows, stats, args))
    case.agree(normalized=found)


@cases("normalize_advantages")
def test_normalize_advantages(script, case):
    case.agree(normalized=script.module.normalize(case.inputs.advantages))


@cases("policy_loss")
@on("clips", "rlhf", "grpo")
def test_policy_loss(script, case):
    x = case.inputs
    x.logprobs.requires_grad_()
    loss = script.module.policy_loss(x.logprobs - x.old_logprobs, x.advantages, x.clip_coef)
    case.agree(loss=loss, gradient=slope(loss, x.logprobs)[0])


@cases("value_loss")
@on("environments", "rlhf")
def test_value_loss(script, case):
    names = {"kl_penalty": "clipped_value_loss", "rlhf": "token_value_loss"}
    value_loss = getattr(script.module, names.get(script.name, "value_loss"))
    x = case.inputs
    x.values.requires_grad_()
    loss = value_loss(x.values, x.old_values, x.returns, x.clip_coef)
    case.agree(loss=loss, gradient=slope(loss, x.values)[0])


def whole_loss(ppo_loss, agent_of, case, args, *others):
    """Outputs of the vectors from a script's loss of an agent that gives these three tensors."""
    x = case.inputs
    heads = [y.requires_grad_() for y in (x.values, x.logprobs, x.entropies)]
    batch = x.old_logprobs, x.old_values, x.advantages, x.returns
    loss, metrics = ppo_loss(agent_of(*heads), [None, None, *batch, *others], args)
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    outputs = {"loss": loss} | {name: metrics[f"losses/{name}"] for name in names}
    places = ("gradient_values", "gradient_logprobs", "gradient_entropies")
    return outputs | dict(zip(places, slope(loss, *heads), strict=True))


@cases("ppo_loss")
@on("continuous", "multidiscrete")
def test_ppo_loss(script, case):
    x, masks = case.inputs, [None] * ("masks" in script.features)
    args = script.module.Args(clip_coef=x.clip_coef, ent_coef=x.ent_coef, vf_coef=x.vf_coef)

    def agent(*heads):
        return MagicMock(evaluate_actions=lambda *_: heads)

    case.agree(**whole_loss(script.module.ppo_loss, agent, case, args, *masks))


@cases("ppo_loss")
def test_ppo_loss_of_the_short_script(case):
    def agent(values, logprobs, entropies):
        policy = SimpleNamespace(log_prob=lambda _: logprobs, entropy=lambda: entropies)
        return lambda _: (policy, values)

    case.agree(**whole_loss(ppo_minimal.ppo_loss, agent, case, case.inputs))


@cases("gaussian")
@on("gaussian")
def test_gaussian(script, case):
    x, agent = case.inputs, script.agent(2, 2).double()
    agent.policy = nn.Identity()
    agent.log_std.data[:] = x.log_std
    _, logprobs, entropies = agent.evaluate_actions(x.mean, x.actions)[:3]
    case.agree(logprobs=logprobs, entropies=entropies)


@cases("categorical", "masked_categorical", "multi_categorical")
@on("multidiscrete")
def test_categorical_with_masks(script, case):
    x = case.inputs
    logits, actions = (y.view(len(y), -1, *y.shape[2:]) for y in (x.logits, x.actions))
    if logits.dim() == 2:
        logits = logits[:, None]
    agent = script.module.Agent(logits[0].numel(), tuple(logits.shape[1:])).double()
    agent.policy = nn.Identity()
    masks = getattr(x, "masks", torch.ones_like(x.logits, dtype=torch.bool)).view(logits.shape)
    _, logprobs, entropies = agent.evaluate_actions(logits.flatten(1), masks, actions)
    case.agree(logprobs=logprobs, entropies=entropies)


@cases("categorical")
@on("games")
def test_categorical(script, case):
    logprobs, entropies = script.module.categorical(case.inputs.logits, case.inputs.actions)
    case.agree(logprobs=logprobs, entropies=entropies)


@cases("kl_estimates")
@on("environments", "rlhf", "grpo")
def test_approx_kl_is_k3(script, case):
    case.agree(k3=script.module.approx_kl(case.inputs.logprobs - case.inputs.old_logprobs))


class Slope(nn.Module):
    """Its loss has the gradient that stands in the minibatch."""

    def __init__(self, *weights):
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def loss(self, minibatch):
        return sum((x * y[0]).sum() for x, y in zip(self.weights, minibatch))


def update(script, monkeypatch, weights, gradients, **settings):
    """The script's steps with given gradients: weights afterwards, state of Adam, metrics."""
    agent = Slope(*(torch.as_tensor(x) for x in weights))
    flat = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(flat, agent.parameters())
    adam = {"weights": flat, "mean": 0 * flat, "square": 0 * flat, "step": torch.zeros(())}
    monkeypatch.setattr(script.module, "ppo_loss", lambda agent, mb, args: (agent.loss(mb), {}))
    tensors = {name: torch.tensor(x).double() for name, x in settings.items()}
    args, indices = SimpleNamespace(**tensors), torch.arange(len(gradients[0]))[:, None]
    metrics = script.module.ppo_update(agent, adam, gradients, indices, args)
    return flat, adam, metrics


@cases("adam_ppo2")
@on("vector")
def test_adam(script, case, monkeypatch):
    x = case.inputs
    settings = {"learning_rate": x.learning_rate, "adam_eps": x.eps, "max_grad_norm": 1e9}
    found, *_ = update(script, monkeypatch, [x.parameters], [x.gradients], **settings)
    case.agree(parameters=found)


@cases("clip_gradient")
@on("vector")
def test_the_whole_gradient_is_clipped(script, case, monkeypatch):
    x = case.inputs
    settings = {"learning_rate": 1.0, "adam_eps": 1e-5, "max_grad_norm": x.max_norm}
    tensors = [x.weight, x.bias]
    zeros, batch = [0 * y for y in tensors], [y[None] for y in tensors]
    _, adam, metrics = update(script, monkeypatch, zeros, batch, **settings)
    weight, bias = (adam["mean"] / (1 - 0.9)).split([4, 2])
    norm = metrics["losses/grad_norm"][0]
    case.agree(norm=norm, weight=weight.view(2, 2), bias=bias)


@cases("paper_kl_coef")
@on("kl_penalty")
def test_the_papers_rule_for_beta(script, case):
    x = case.inputs
    case.agree(kl_coef=script.module.paper_kl_coef(x.kl_coef, x.kl, x.target_kl))


@cases("rlhf_kl_coef")
@on("rlhf", "grpo")
def test_r20_beta_moves_in_proportion_to_the_clipped_error(script, case):
    x = case.inputs
    rule = script.module.proportional_kl_coef
    case.agree(kl_coef=rule(x.kl_coef, x.kl, x.target_kl, x.episodes, x.horizon))


@cases("rlhf_advantages")
@on("rlhf")
def test_r15_advantages_of_tokens(script, case):
    x = case.inputs
    found = script.module.masked_gae(x.rewards, x.values, x.mask, x.gamma, x.gae_lambda)
    advantages, returns = (y.where(x.mask, 0.0) for y in found)
    case.agree(advantages=advantages, returns=returns)


@cases("whiten")
@on("rlhf")
def test_r18_whitening(script, case):
    ways = {"centered": "zero", "restored": "restore", "scaled": "scale"}
    found = {name: script.module.whiten(case.inputs.x, way) for name, way in ways.items()}
    case.agree(**found)


@cases("group_advantages")
@on("grpo")
def test_g2_g3_group_advantages(script, case):
    rewards = case.inputs.rewards
    ways = {"centered": "none", "group_std": "group", "batch_std": "batch"}
    for name, way in ways.items():
        found = script.module.group_advantages(rewards.flatten(), rewards.shape[1], way)
        case.agree(**{name: found.view(rewards.shape)})


@cases("group_advantages")
def test_group_advantages_of_the_short_script(case):
    rewards = case.inputs.rewards
    ways = {"centered": {}, "group_std": {"scale_rewards": True}}
    ways["leave_one_out"] = {"baseline": "others"}
    for name, way in ways.items():
        args = grpo_minimal.Args(group_size=rewards.shape[1], **way)
        found = grpo_minimal.group_advantages(rewards.clone(), args)
        case.agree(**{name: found.view(rewards.shape)})


FORMS = {
    "grpo_loss": {"loss_norm": "sequence"},
    "dr_grpo_loss": {"loss_norm": "constant"},
    "dapo_loss": {"loss_norm": "token"},
    "gspo_loss": {"loss_norm": "sequence", "ratio": "sequence"},
}


def settings_of(case):
    x = case.inputs
    return {"clip_coef": x.clip_low, "clip_high": x.clip_high, **FORMS[case.formula]}


@cases(*FORMS)
@on("grpo")
def test_g4_g5_g7_grpo_loss(script, case, monkeypatch):
    x = case.inputs
    x.logprobs.requires_grad_()
    args = script.module.Args(**settings_of(case), kl_in_loss="k3" if x.kl_coef else "no")
    agent = MagicMock(get_logprobs=lambda *_: torch.zeros(*x.mask.shape, 1))
    monkeypatch.setattr(script.module, "log_probability", lambda *_: x.logprobs)
    mb = script.module.Rollout(None, None, x.old_logprobs, x.ref_logprobs, None, x.mask)
    loss, _ = script.module.grpo_loss(agent, mb, x.advantages, x.kl_coef, args)
    case.agree(loss=loss, gradient=slope(loss, x.logprobs)[0])


@cases(*FORMS)
def test_grpo_loss_of_the_short_script(case):
    x = case.inputs
    x.logprobs.requires_grad_()
    args = grpo_minimal.Args(**settings_of(case), kl_coef=x.kl_coef)
    model, responses = (
        MagicMock(logprobs=lambda *_: x.logprobs),
        torch.where(x.mask, 1, grpo_minimal.PAD),
    )
    others = x.old_logprobs, x.ref_logprobs, x.advantages[:, None]
    loss = grpo_minimal.grpo_loss(model, None, responses, *others, args)
    gradient = slope(loss, x.logprobs)[0].where(x.mask, 0.0)  # padding is constant there
    case.agree(loss=loss, gradient=gradient)


# --- Other libraries ---


@cases("gaussian", "categorical", "masked_categorical", "multi_categorical")
def test_distributions_of_pytorch_and_stable_baselines3(case):
    x = case.inputs
    if case.formula == "gaussian":
        policy = Independent(Normal(x.mean, x.log_std.exp()), 1)
    elif case.formula == "masked_categorical":
        policy = MaskableCategorical(logits=x.logits, masks=x.masks)
    elif case.formula == "multi_categorical":
        policy = Independent(Categorical(logits=x.logits), 1)
    else:
        policy = Categorical(logits=x.logits)
    case.agree(logprobs=policy.log_prob(x.actions), entropies=policy.entropy())


@cases("adam_pytorch", "adam_ppo2")
def test_adam_of_pytorch(case):
    x = case.inputs
    weights = nn.Parameter(x.parameters.clone())
    adam = torch.optim.Adam([weights], lr=x.learning_rate, eps=x.eps)
    for weights.grad in x.gradients:
        adam.step()
    expected = {"with epsilon after the bias correction, as in PyTorch"}
    expected = expected if case.formula == "adam_ppo2" else set()
    assert case.reasons(parameters=weights) == expected


@cases("clip_gradient")
def test_gradient_clipping_of_pytorch(case):
    x = case.inputs
    weights = [nn.Parameter(0 * y) for y in (x.weight, x.bias)]
    weights[0].grad, weights[1].grad = x.weight, x.bias
    norm = nn.utils.clip_grad_norm_(weights, x.max_norm)
    case.agree(norm=norm, weight=weights[0].grad, bias=weights[1].grad)


@cases("gae")
def test_gae_of_stable_baselines3(case):
    """Time limits enter the reward there, as its collect_rollouts does it."""
    x = SimpleNamespace(**{k: np.array(y) for k, y in case.case["inputs"].items()})
    (steps, envs), space = x.rewards.shape, gym.spaces.Box(-1, 1, (1,))
    options = {"gamma": x.gamma.item(), "gae_lambda": x.gae_lambda.item(), "n_envs": envs}
    buffer = RolloutBuffer(steps, space, space, "cpu", **options)
    cut_off, done = x.truncated & ~x.terminated, x.terminated | x.truncated
    rewards, starts = x.rewards + x.gamma * x.next_values * cut_off, np.ones(envs)
    for t in range(steps):
        nothing = np.zeros((envs, 1))
        values = torch.tensor(x.values[t])
        buffer.add(nothing, nothing, rewards[t], starts, values, torch.zeros(envs))
        starts = done[t]
    buffer.compute_returns_and_advantage(torch.tensor(x.next_values[-1]), starts)
    case.agree(advantages=buffer.advantages, returns=buffer.returns)


class Tape(gym.Env):
    """Plays one environment of a case."""

    action_space = gym.spaces.Discrete(1)

    def __init__(self, case, index):
        self.x, self.index = vars(case.inputs), index
        obs = self.x.get("observations", torch.zeros(9, 9, 1))
        self.observations = obs[:, index].numpy()
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, obs.shape[2:], np.float64)

    def reset(self, seed=None, options=None):
        self.t = getattr(self, "t", 0)  # an episode goes on where the last one ended
        return self.observations[self.t], {}

    def step(self, action):
        names = ("rewards", "terminated", "truncated")
        zeros = torch.zeros(9, 9)
        reward, *ends = (self.x.get(name, zeros)[self.t, self.index].item() for name in names)
        self.t += 1
        return self.observations[self.t], reward, *map(bool, ends), {}


@cases("normalize_obs", "scale_rewards")
def test_running_statistics_of_stable_baselines3(case):
    x = case.inputs
    steps, envs = (x.observations if case.formula == "normalize_obs" else x.rewards).shape[:2]
    clip = getattr(x, "clip_obs", 10.0), getattr(x, "clip_reward", 10.0)
    tape = DummyVecEnv([lambda i=i: Tape(case, i) for i in range(envs)])
    env = VecNormalize(tape, clip_obs=clip[0], clip_reward=clip[1], gamma=getattr(x, "gamma", 0.99))
    obs, rewards = [env.reset()], []
    for _ in range(steps - (case.formula == "normalize_obs")):
        found, reward, *_ = env.step([0] * envs)
        obs.append(found)
        rewards.append(reward)
    case.agree(**({"normalized": obs} if case.formula == "normalize_obs" else {"scaled": rewards}))


@cases("normalize_obs", "scale_rewards")
def test_running_statistics_of_gymnasium_which_cleanrl_uses(case):
    columns, x = [], case.inputs
    steps, envs = (x.observations if case.formula == "normalize_obs" else x.rewards).shape[:2]
    for i in range(envs):
        if case.formula == "normalize_obs":
            env = gym.wrappers.NormalizeObservation(Tape(case, i))
            rows = [env.reset()[0], *(env.step(0)[0] for _ in range(steps - 1))]
            columns.append(np.clip(rows, -x.clip_obs, x.clip_obs))
        else:
            env = gym.wrappers.NormalizeReward(Tape(case, i), gamma=x.gamma)
            env.reset()
            rows = [float(env.step(0)[1]) for _ in range(steps)]
            columns.append(np.clip(rows, -x.clip_reward, x.clip_reward))
    found = np.stack(columns, axis=1)
    if case.formula == "scale_rewards":
        assert case.reasons(scaled=found) == {
            "as in Gymnasium's NormalizeReward, around each environment"
        }
    else:
        expected = {"if each environment has its own statistics"} if envs > 1 else set()
        assert case.reasons(normalized=found) == expected


SAMPLE_STD = "with the sample standard deviation of the advantages"
WHOLE = "with the sample standard deviation, {}, without the factor 1/2"


@pytest.mark.parametrize("clipped", [False, True])
@cases("ppo_loss")
def test_loss_of_stable_baselines3_differs_as_the_page_says(case, clipped):
    """Its `train` on one minibatch; nothing of it is stated here."""
    x, logged = case.inputs, {}
    heads = [y.requires_grad_() for y in (x.values, x.logprobs, x.entropies)]
    data = {"observations": None, "actions": None, "advantages": x.advantages, "returns": x.returns}
    data = SimpleNamespace(**data, old_log_prob=x.old_logprobs, old_values=x.old_values)
    model = MagicMock(n_epochs=1, target_kl=None, max_grad_norm=1e9, _n_updates=0)
    model.ent_coef, model.vf_coef, model.clip_range = x.ent_coef, x.vf_coef, lambda _: x.clip_coef
    model.clip_range_vf = model.clip_range if clipped else None
    model.policy = MagicMock(
        spec=["set_training_mode", "evaluate_actions", "parameters", "optimizer"]
    )
    model.policy.evaluate_actions, model.policy.parameters = lambda *_: heads, lambda: heads
    model.rollout_buffer = MagicMock(get=lambda _: [data], values=np.ones(5), returns=np.ones(5))
    model.logger.record = lambda name, value, **_: logged.update({name: value})
    PPO.train(model)

    places = ("gradient_values", "gradient_logprobs", "gradient_entropies")
    found = {name: y.grad for name, y in zip(places, heads, strict=True)}
    names = {"policy_loss": "policy_gradient_loss", "clipfrac": "clip_fraction"}
    for name in ("loss", "policy_loss", "value_loss", "approx_kl", "clipfrac"):
        found[name] = logged[f"train/{names.get(name, name)}"]
    reasons = {name: case.reasons(**{name: y}) for name, y in found.items()}
    whole = {
        WHOLE.format("with the clipped values alone" if clipped else "without clipping of values")
    }
    expected = {"policy_loss": {SAMPLE_STD}, "gradient_logprobs": {SAMPLE_STD}, "loss": whole}
    expected |= {"value_loss": whole, "gradient_values": whole}
    assert {name: y for name, y in reasons.items() if y} == expected


def test_the_page_names_only_mistakes_of_the_file():
    known = {x for formula in vectors.FORMULAS.values() for x in formula.mistakes}
    quoted = set(
        re.findall(r"\*([a-z][^*|]+)\*", PAGE.partition("## What other projects compute")[2])
    )
    assert len(quoted) > 8 and quoted <= known


BLOCKS = re.findall(r"(?s)```(\w+)\n(.*?)```", PAGE)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_the_lines_of_the_page_print_what_it_shows(library, monkeypatch, capsys):
    pytest.importorskip(library)
    monkeypatch.chdir(ROOT)
    codes = [text for kind, text in BLOCKS if kind == "python"]
    code = codes[["numpy", "torch", "jax"].index(library) + 1]
    exec(codes[0] + code, {})
    after = [*BLOCKS[BLOCKS.index(("python", code)) + 1 :], ("python", "")]
    kind, text = after[0]
    assert capsys.readouterr().out == (text if kind == "text" else "")
