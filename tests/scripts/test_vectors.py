"""The test vectors: what the scripts give, and what other libraries give."""

import importlib
import json
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import gymnasium as gym
import numpy as np
import pytest
import torch
from adapters import ROOT, SCRIPTS, scripts
from sb3_contrib.common.maskable.distributions import MaskableCategorical
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn
from torch.distributions import Independent, Normal

from benchmark.evidence import vectors

VECTORS = json.loads(vectors.FILE.read_text(encoding="utf-8"))
PAGE = (ROOT / "benchmark/pages/vectors.md").read_text(encoding="utf-8")
DISTRIBUTION = "logprobs", "entropies"

# --- What the scripts compute: outputs from a module and the inputs of a case ---


def gae(m, x, settings=lambda x: [x.gamma, x.gae_lambda]):
    following = x.next_values.masked_fill(x.terminated, 0.0)
    done = x.terminated | x.truncated
    done = done if m.__name__ == "ppo_vector_env" else done.double()
    found = m.gae(x.rewards, x.values, following, done, *settings(x))
    if isinstance(found, tuple):
        return dict(zip(("advantages", "returns"), found, strict=True))
    return {"advantages": found, "returns": found + x.values}


def batched_agent(m, sizes):
    layout = {"parts": {"obs": sizes}, "low": [-1.0] * sizes, "high": [1.0] * sizes}
    return m.Agent(layout, m.Args(hidden=(2,))).double()


def batched_normalize_obs(m, x):
    agent, found = batched_agent(m, 2), []
    for rows in x.observations:
        agent.obs_stats.update(rows)
        obs = agent.normalize_obs(rows)  # clipped to 10
        found.append(obs.clamp(-x.clip_obs, x.clip_obs))
    return {"normalized": torch.stack(found)}


def batched_gaussian(m, x):
    agent = batched_agent(m, 2)
    agent.policy, agent.log_std.data[:] = nn.Identity(), x.log_std
    return dict(zip(DISTRIBUTION, agent.evaluate_actions(x.mean, x.actions)))


def batched_ppo_loss(m, x):
    heads = SimpleNamespace(
        evaluate_actions=lambda *_: (x.logprobs, x.entropies), get_value=lambda _: x.values
    )
    batch = m.Batch(None, None, x.old_logprobs, x.old_values, x.advantages, x.returns)
    loss, metrics = m.ppo_loss(heads, batch, SimpleNamespace(**vars(x), clip_vloss=True))
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    return {"loss": loss} | {name: metrics[f"losses/{name}"] for name in names}


def normalize_obs(m, x):
    stats, found = m.RunningMeanStd(np.zeros(2), np.ones(2)), []
    for rows in x.observations.numpy():
        stats.update(rows)
        found.append(m.normalize_obs(rows, stats, x.clip_obs))
    return {"normalized": found}


def policy_loss(m, x):
    return {"loss": m.policy_loss(x.logprobs - x.old_logprobs, x.advantages, x.clip_coef)}


def value_loss(m, x, name="value_loss"):
    return {"loss": getattr(m, name)(x.values, x.old_values, x.returns, x.clip_coef)}


def ppo_loss(m, x, agent=None, others=0):
    """Of an agent that gives these values, log-probabilities and entropies."""
    heads = x.values, x.logprobs, x.entropies
    agent = agent or MagicMock(evaluate_actions=lambda *_: heads)
    batch = x.old_logprobs, x.old_values, x.advantages, x.returns
    args = SimpleNamespace(**vars(x), norm_adv=True, clip_vloss=True)
    minibatch = [None, None, *batch, *[None] * others]
    minibatch = m.Batch(*minibatch) if hasattr(m, "Batch") else minibatch
    loss, metrics = m.ppo_loss(agent, minibatch, args)
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
    return {"loss": loss} | {name: metrics[f"losses/{name}"] for name in names}


def short_ppo_loss(m, x):
    policy = SimpleNamespace(log_prob=lambda _: x.logprobs, entropy=lambda: x.entropies)
    return ppo_loss(m, x, lambda _: (policy, x.values))


def gaussian(m, x):
    agent = m.Agent(2, 2).double()
    agent.policy, agent.log_std.data[:] = nn.Identity(), x.log_std
    return dict(zip(DISTRIBUTION, agent.evaluate_actions(x.mean, x.actions)[1:3]))


def categorical(m, x):
    return dict(zip(DISTRIBUTION, m.categorical(x.logits, x.actions)))


def categorical_with_masks(m, x):
    logits, actions = (y.view(len(y), -1, *y.shape[2:]) for y in (x.logits, x.actions))
    logits = logits[:, None] if logits.dim() == 2 else logits
    agent = m.Agent(logits[0].numel(), tuple(logits.shape[1:])).double()
    agent.policy = nn.Identity()
    masks = getattr(x, "masks", torch.ones_like(x.logits, dtype=torch.bool)).view(logits.shape)
    return dict(zip(DISTRIBUTION, agent.evaluate_actions(logits.flatten(1), masks, actions)[1:]))


class Slope(nn.Module):
    """Its loss has the gradient that stands in the minibatch."""

    def __init__(self, *weights):
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def loss(self, minibatch):
        return sum((x * y[0]).sum() for x, y in zip(self.weights, minibatch))


def update(m, weights, gradients, learning_rate, **settings):
    """Steps with given gradients: the weights afterwards, the state of Adam, the last norm."""
    agent = Slope(*weights)
    flat = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(flat, agent.parameters())
    zero = torch.zeros((), dtype=torch.float64)
    adam = {"weights": flat, "mean": 0 * flat, "square": 0 * flat, "step": zero}
    step_size = torch.tensor(learning_rate).double()
    loss = patch.object(m, "ppo_loss", lambda agent, mb, args: (agent.loss(mb), {}))
    with loss, patch.object(m, "Batch", lambda *gradients: gradients):
        indices = torch.arange(len(gradients[0]))[:, None]
        if m.__name__ == "ppo_vector_env":
            args = SimpleNamespace(**settings)
            metrics = m.ppo_update(agent, adam, gradients, indices, step_size, args)[-1]
            return flat, adam, metrics["losses/grad_norm"]
        floats = {name: torch.tensor(x).double() for name, x in settings.items()}
        args = SimpleNamespace(learning_rate=step_size, **floats)
        metrics = m.ppo_update(agent, adam, gradients, indices, args)
        return flat, adam, metrics["losses/grad_norm"][-1]


def approx_kl(m, x):
    return {"k3": m.approx_kl(x.logprobs - x.old_logprobs)}


def adam(m, x):
    assert x.eps == 1e-5  # which ppo_vector_env.py has as a constant
    settings = {"adam_eps": x.eps, "max_grad_norm": 1e9}
    found = update(m, [x.parameters], [x.gradients], x.learning_rate, **settings)
    return {"parameters": found[0]}


def clip_gradient(m, x):
    settings = {"adam_eps": 1e-5, "max_grad_norm": x.max_norm}
    tensors = [x.weight, x.bias]
    zeros, batch = [0 * y for y in tensors], [y[None] for y in tensors]
    _, adam, norm = update(m, zeros, batch, 1.0, **settings)
    weight, bias = (adam["mean"] / (1 - 0.9)).split([4, 2])
    return {"norm": norm, "weight": weight.view(2, 2), "bias": bias}


def paper_kl_coef(m, x):
    return {"kl_coef": m.paper_kl_coef(x.kl_coef, x.kl, x.target_kl)}


def rlhf_kl_coef(m, x):
    rule = m.proportional_kl_coef
    return {"kl_coef": rule(x.kl_coef, x.kl, x.target_kl, x.episodes, x.horizon)}


def rlhf_advantages(m, x):
    found = m.masked_gae(x.rewards, x.values, x.mask, x.gamma, x.gae_lambda)
    return {name: y.where(x.mask, 0.0) for name, y in zip(("advantages", "returns"), found)}


def whiten(m, x):
    ways = {"centered": "zero", "restored": "restore", "scaled": "scale"}
    return {name: m.whiten(x.x, way) for name, way in ways.items()}


def group_advantages(m, x):
    ways = {"centered": "none", "group_std": "group", "batch_std": "batch"}
    rewards, size = x.rewards.flatten(), x.rewards.shape[1]
    found = {name: m.group_advantages(rewards, size, way) for name, way in ways.items()}
    return {name: y.view(x.rewards.shape) for name, y in found.items()}


def short_group_advantages(m, x):
    ways = {"centered": {}, "group_std": {"scale_rewards": True}}
    ways["leave_one_out"] = {"baseline": "others"}
    args = {name: m.Args(group_size=x.rewards.shape[1], **way) for name, way in ways.items()}
    found = {name: m.group_advantages(x.rewards.clone(), y) for name, y in args.items()}
    return {name: y.view(x.rewards.shape) for name, y in found.items()}


def llm_advantages(m, x):
    """Padding is 0 there; what the vectors say about it counts for nothing."""
    inputs = (y.where(x.mask, 0.0) for y in (x.rewards, x.values))
    advantages = m.token_gae(*inputs, x.gamma, x.gae_lambda).where(x.mask, 0.0)
    returns = (advantages + x.values).where(x.mask, 0.0)
    return {"advantages": advantages, "returns": returns}


def llm_group_advantages(m, x):
    returns = x.rewards.flatten()
    found = m.group_advantages(returns, returns, x.rewards.shape[1])
    return {"group_std": found.view(x.rewards.shape)}


def llm_policy_loss(m, x):
    zeros, args = torch.zeros_like(x.logprobs), m.Args(clip_coef=x.clip_coef, vf_coef=0.0)
    batch = m.Batch(x.old_logprobs, x.advantages, zeros)
    return {"loss": m.ppo_loss((x.logprobs, zeros, zeros), batch, True, args)[0] / len(zeros)}


FORMS = {
    "grpo_loss": {"loss_norm": "sequence"},
    "dr_grpo_loss": {"loss_norm": "constant"},
    "dapo_loss": {"loss_norm": "token"},
    "gspo_loss": {"loss_norm": "sequence", "ratio": "sequence"},
}


def grpo_loss(m, x):
    settings = {"clip_coef": x.clip_low, "clip_high": x.clip_high, **FORMS[x.formula]}
    args = m.Args(**settings, kl_in_loss="k3" if x.kl_coef else "no")
    logprobs = torch.zeros(*x.mask.shape, 1)
    agent = MagicMock(get_logprobs_and_values=lambda *_: (logprobs, None))
    mb = m.Rollout(None, None, x.old_logprobs, x.ref_logprobs, None, x.mask)
    with patch.object(m.ppo, "log_probability", lambda *_: x.logprobs):
        return {"loss": m.grpo_loss(agent, mb, x.advantages, x.kl_coef, args)[0]}


def short_grpo_loss(m, x):
    settings = {"clip_coef": x.clip_low, "clip_high": x.clip_high, **FORMS[x.formula]}
    logprobs = x.logprobs.where(x.mask, x.logprobs.detach())  # padding is constant there
    model, responses = MagicMock(logprobs=lambda *_: logprobs), torch.where(x.mask, 1, m.PAD)
    others = x.old_logprobs, x.ref_logprobs, x.advantages[:, None]
    args = m.Args(**settings, kl_coef=x.kl_coef)
    return {"loss": m.grpo_loss(model, None, responses, *others, args)}


GAMES, VECTOR = "atari lstm", "continuous kl_penalty multidiscrete"
ENVIRONMENTS, CLIPPING = f"{VECTOR} {GAMES}", f"continuous multidiscrete {GAMES}"
# Formulas; names of scripts, or other modules; what computes the outputs there.
OURS = [
    ("gae", ENVIRONMENTS, gae),
    ("gae", "ppo_minimal ppo_vector_env", partial(gae, settings=lambda x: [x])),
    ("normalize_obs", VECTOR, normalize_obs),
    ("normalize_obs", "ppo_vector_env", batched_normalize_obs),
    (
        "normalize_advantages",
        f"{ENVIRONMENTS} ppo_vector_env",
        lambda m, x: {"normalized": m.normalize(x.advantages)},
    ),
    ("policy_loss", f"{CLIPPING} rlhf", policy_loss),
    ("value_loss", CLIPPING, value_loss),
    ("value_loss", "kl_penalty", partial(value_loss, name="clipped_value_loss")),
    ("value_loss", "rlhf", partial(value_loss, name="token_value_loss")),
    ("ppo_loss", "continuous atari", ppo_loss),
    ("ppo_loss", "multidiscrete", partial(ppo_loss, others=1)),  # masks
    ("ppo_loss", "lstm", partial(ppo_loss, others=2)),  # starts and states
    ("ppo_loss", "ppo_minimal", short_ppo_loss),
    ("ppo_loss", "ppo_vector_env", batched_ppo_loss),
    ("gaussian", "continuous kl_penalty", gaussian),
    ("gaussian", "ppo_vector_env", batched_gaussian),
    ("categorical", GAMES, categorical),
    ("categorical masked_categorical multi_categorical", "multidiscrete", categorical_with_masks),
    ("kl_estimates", f"{ENVIRONMENTS} rlhf", approx_kl),
    ("adam_ppo2", f"{VECTOR} ppo_vector_env", adam),
    ("clip_gradient", f"{VECTOR} ppo_vector_env", clip_gradient),
    ("paper_kl_coef", "kl_penalty", paper_kl_coef),
    ("rlhf_kl_coef", "rlhf", rlhf_kl_coef),
    ("rlhf_advantages", "rlhf", rlhf_advantages),
    ("whiten", "rlhf", whiten),
    ("group_advantages", "grpo", group_advantages),
    ("group_advantages", "grpo_minimal", short_group_advantages),
    ("rlhf_advantages", "ppo_llm", llm_advantages),
    ("normalize_advantages", "ppo_llm", lambda m, x: {"normalized": m.whiten(x.advantages)}),
    ("policy_loss", "ppo_llm", llm_policy_loss),
    ("group_advantages", "ppo_llm", llm_group_advantages),
    (" ".join(FORMS), "grpo", grpo_loss),
    (" ".join(FORMS), "grpo_minimal", short_grpo_loss),
]

# --- What other libraries compute ---


def distribution(_, x):
    if x.formula == "gaussian":
        policy = Normal(x.mean, x.log_std.exp())
    else:
        policy = MaskableCategorical(logits=x.logits, masks=getattr(x, "masks", None))
    policy = Independent(policy, x.actions.dim() - 1)  # the sum over components, if there are any
    return dict(zip(DISTRIBUTION, (policy.log_prob(x.actions), policy.entropy())))


def torch_adam(_, x):
    weights = nn.Parameter(x.parameters.clone())
    adam = torch.optim.Adam([weights], lr=x.learning_rate, eps=x.eps)
    for weights.grad in x.gradients:
        adam.step()
    return {"parameters": weights}


def torch_clip_gradient(_, x):
    weights = [nn.Parameter(0 * y) for y in (x.weight, x.bias)]
    weights[0].grad, weights[1].grad = x.weight.clone(), x.bias.clone()
    norm = nn.utils.clip_grad_norm_(weights, x.max_norm)
    return {"norm": norm, "weight": weights[0].grad, "bias": weights[1].grad}


def sb3_gae(_, x):
    """Time limits enter the reward there, as its collect_rollouts does it."""
    (steps, envs), space = x.rewards.shape, gym.spaces.Box(-1, 1, (1,))
    options = {"gamma": x.gamma, "gae_lambda": x.gae_lambda, "n_envs": envs}
    buffer = RolloutBuffer(steps, space, space, "cpu", **options)
    cut_off, done = x.truncated & ~x.terminated, x.terminated | x.truncated
    rewards, starts = x.rewards + x.gamma * x.next_values * cut_off, np.ones(envs)
    nothing = np.zeros((envs, 1))
    for t in range(steps):
        buffer.add(nothing, nothing, rewards[t].numpy(), starts, x.values[t], torch.zeros(envs))
        starts = done[t].numpy()
    buffer.compute_returns_and_advantage(x.next_values[-1], starts)
    return {"advantages": buffer.advantages, "returns": buffer.returns}


class Tape(gym.Env):
    """Plays one environment of a case."""

    action_space = gym.spaces.Discrete(1)

    def __init__(self, x, index):
        self.x, self.index = vars(x), index
        obs = self.x.get("observations", torch.zeros(9, 9, 1))
        self.observations = obs[:, index].numpy()
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, obs.shape[2:], np.float64)

    def reset(self, seed=None, options=None):
        self.t = getattr(self, "t", 0)  # an episode goes on where the last one ended
        return self.observations[self.t], {}

    def step(self, action):
        names, zeros = ("rewards", "terminated", "truncated"), torch.zeros(9, 9)
        reward, *ends = (self.x.get(name, zeros)[self.t, self.index].item() for name in names)
        self.t += 1
        return self.observations[self.t], reward, *map(bool, ends), {}


def sb3_statistics(_, x):
    clips = {name: y for name, y in vars(x).items() if name.startswith("clip") or name == "gamma"}
    steps, envs = (x.observations if x.formula == "normalize_obs" else x.rewards).shape[:2]
    env = VecNormalize(DummyVecEnv([lambda i=i: Tape(x, i) for i in range(envs)]), **clips)
    obs = [env.reset()]
    if x.formula == "scale_rewards":
        return {"scaled": [env.step([0] * envs)[1] for _ in range(steps)]}
    return {"normalized": obs + [env.step([0] * envs)[0] for _ in range(steps - 1)]}


def gymnasium_normalize_obs(m, x):
    columns = []
    for i in range(x.observations.shape[1]):
        env = m.wrappers.NormalizeObservation(Tape(x, i))
        columns.append([env.reset()[0], *(env.step(0)[0] for _ in x.observations[1:])])
    return {"normalized": np.clip(np.stack(columns, axis=1), -x.clip_obs, x.clip_obs)}


def gymnasium_scale_rewards(m, x):
    columns = []
    for i in range(x.rewards.shape[1]):
        env = m.wrappers.NormalizeReward(Tape(x, i), gamma=x.gamma)
        env.reset()
        columns.append([float(env.step(0)[1]) for _ in x.rewards])
    return {"scaled": np.clip(np.stack(columns, axis=1), -x.clip_reward, x.clip_reward)}


def sb3_ppo_loss(_, x, clipped=False):
    """Its `train` on one minibatch; nothing of it is stated here."""
    heads, logged = (x.values, x.logprobs, x.entropies), {}
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
    return found


SAMPLE_STD = "with the sample standard deviation of the advantages"
WHOLE = "with the sample standard deviation, {}, without the factor 1/2"
PLAIN = WHOLE.format("without clipping of values")
CLIPPED = WHOLE.format("with the clipped values alone")
SEPARATE = "if each environment has its own statistics"
REWARDS = "as in Gymnasium's NormalizeReward, around each environment"
LATE_EPSILON = "with epsilon after the bias correction, as in PyTorch"
# The same of other libraries, and their mistakes.
OTHERS = [
    ("gaussian categorical masked_categorical multi_categorical", "torch", distribution),
    ("adam_pytorch", "torch", torch_adam),
    ("adam_ppo2", "torch", torch_adam, LATE_EPSILON),
    ("clip_gradient", "torch", torch_clip_gradient),
    ("gae", "stable_baselines3", sb3_gae),
    ("normalize_obs scale_rewards", "stable_baselines3", sb3_statistics),
    ("ppo_loss", "stable_baselines3", sb3_ppo_loss, SAMPLE_STD, PLAIN),
    ("ppo_loss", "stable_baselines3", partial(sb3_ppo_loss, clipped=True), SAMPLE_STD, CLIPPED),
    ("normalize_obs", "gymnasium", gymnasium_normalize_obs, SEPARATE),
    ("scale_rewards", "gymnasium", gymnasium_scale_rewards, REWARDS),
]


# --- The comparison ---


def leaves(case):
    """The input by which each gradient is taken, by the gradient's name."""
    only = "logprobs" if "logprobs" in case["inputs"] else "values"
    names = [name for name in case["expected"] if name.startswith("gradient")]
    return {name: name.removeprefix("gradient_") if "_" in name else only for name in names}


def inputs_of(formula, case):
    """Numbers, and new tensors of 64-bit floats, flags or integers."""
    inputs = case["inputs"].items()
    tensors = {name: torch.tensor(np.array(x)) for name, x in inputs if isinstance(x, list)}
    for name in leaves(case).values():
        tensors[name].requires_grad_()
    return SimpleNamespace(formula=formula, **{**case["inputs"], **tensors})


def is_close(found, expected):
    expected = np.array(expected, float)
    size = np.abs(expected).max() or 1.0
    return np.allclose(found, expected, rtol=1e-5, atol=1e-6 * size)


def mistakes_of(formula, compute, module):
    """What explains the outputs that are not as expected; each must be a known mistake."""
    found = set()
    for case in VECTORS[formula]["cases"]:
        x, unchanged = inputs_of(formula, case), inputs_of(formula, case)
        outputs = compute(module, x)
        assert outputs
        if torch.is_tensor(loss := outputs.get("loss")):
            slopes = torch.autograd.grad(loss, [getattr(x, y) for y in leaves(case).values()])
            outputs |= dict(zip(leaves(case), slopes, strict=True))
        for name, y in vars(unchanged).items():
            assert not torch.is_tensor(y) or torch.equal(getattr(x, name), y), name
        for name, y in outputs.items():
            y = y.detach().numpy() if torch.is_tensor(y) else np.asarray(y)
            if not is_close(y, case["expected"][name]):
                gives = {z["mistake"]: z["gives"] for z in case["mistakes"] if name in z["gives"]}
                known = [mistake for mistake, z in gives.items() if is_close(y, z[name])]
                found.add(known[0] if known else f"{case['name']}: {name} is {y.tolist()}")
    return found


@scripts("continuous", "kl_penalty", "multidiscrete", "atari", "lstm", "rlhf", "grpo")
def test_scripts(script):
    rows = [row for row in OURS if script.name in row[1].split()]
    found = {x: mistakes_of(x, row[2], script.module) for row in rows for x in row[0].split()}
    assert found and not any(found.values()), found


ROWS = [
    (formula, name, *rest)
    for formulas, names, *rest in OURS + OTHERS
    for formula in formulas.split()
    for name in names.split()
    if name not in SCRIPTS
]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_short_scripts_and_libraries(row):
    formula, name, compute, *mistakes = row
    assert mistakes_of(formula, compute, importlib.import_module(name)) == {*mistakes}


# --- The file and the page ---


def test_the_file_is_up_to_date_and_small():
    """Written by `python -m benchmark vectors`."""
    assert vectors.FILE.read_text(encoding="utf-8") == vectors.content()
    assert vectors.FILE.stat().st_size < 150_000


def test_a_mistake_shows_in_each_case_and_each_mistake_somewhere():
    for name, formula in vectors.FORMULAS.items():
        shown = [{y["mistake"] for y in x["mistakes"]} for x in VECTORS[name]["cases"]]
        assert all(shown) and set.union(*shown) == formula.mistakes.keys(), name


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
