"""Test vectors: small inputs, what the formulas of PPO make of them, and what mistakes give.

`benchmark/vectors.json` has them for implementations in any language. `pages/vectors.md` shows how
to use them. Here each formula is stated once more, in NumPy with 64-bit floats. The scripts are not
imported: their tests compare them with the file.

The cases are in the file: to add one, write its name, about and inputs there. All else is
rewritten. What a formula takes after `*` are its conventions. A mistake is a formula with another
convention, or with changed inputs. Each case has the mistakes that show in it.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FILE = Path(__file__).resolve().parents[1] / "vectors.json"
DIGITS = 7
ABOUT = (
    "Test vectors for PPO and its relatives, https://arxiv.org/abs/1707.06347. Numbers have 7 "
    "digits: compare with a relative tolerance of 1e-4 in 32-bit floats. Each case has `inputs`, "
    "what they give (`expected`), and which outputs a common mistake, or another convention, "
    "changes (`mistakes`). T, N, B, R are steps, environments, samples or responses, and tokens."
)
FORMULAS: dict[str, "Formula"] = {}


class Formula:
    """A function, and what people do otherwise; its docstring is published."""

    def __init__(self, compute: Callable[..., dict], name: str = "", about: str = "") -> None:
        self.compute, self.about = compute, about or " ".join(compute.__doc__.split())
        self.mistakes: dict[str, Callable[[SimpleNamespace], dict[str, Any]]] = {}
        FORMULAS[name or compute.__name__] = self

    def __call__(self, *inputs: Any, **choices: Any) -> dict[str, Any]:
        """What the function returns."""
        return self.compute(*inputs, **choices)

    def mistake(self, text: str, change: Callable | None = None, **arguments: Any) -> None:
        """Add a mistake: other arguments, or a function that makes them from the inputs."""
        self.mistakes[text] = change or (lambda inputs: arguments)


def gradient(loss: Callable[[np.ndarray], Any], x: np.ndarray) -> np.ndarray:
    """Derivatives of a loss by the numbers of `x`: complex steps, exact to rounding."""
    found = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        moved = x.astype(complex)
        moved[place] += 1e-30j
        found[place] = loss(moved).imag / 1e-30
    return found


# === Advantages and running statistics ===


@Formula
def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda) -> dict:
    """Generalized advantage estimation, arrays (T, N). next_values are those of the observation
    after each step, which is the final one where an episode ends. returns are value targets.
    """
    errors = rewards + gamma * np.where(terminated, 0.0, next_values) - values
    goes_on = np.where(terminated | truncated, 0.0, 1.0)
    advantages, later = np.zeros(rewards.shape), 0.0
    for t in reversed(range(len(rewards))):
        advantages[t] = later = errors[t] + gamma * gae_lambda * goes_on[t] * later
    return {"advantages": advantages, "returns": advantages + values}


def delayed(flags: np.ndarray) -> np.ndarray:
    """One step later."""
    return np.concatenate([np.zeros_like(flags[:1]), flags[:-1]])


gae.mistake(
    "if time limits count as failures", lambda x: {"terminated": x.terminated | x.truncated}
)
gae.mistake(
    "if failures are bootstrapped like time limits",
    lambda x: {"terminated": x.terminated & False, "truncated": x.terminated | x.truncated},
)
gae.mistake(
    "if a time limit outweighs a failure in the same step",
    lambda x: {"terminated": x.terminated & ~x.truncated},
)
gae.mistake(
    "if the sum runs on past time limits, into the next episode",
    lambda x: {"truncated": x.truncated & False},
)
gae.mistake(
    "if the value after a time limit is that of the next episode's first observation",
    lambda x: {"next_values": np.concatenate([x.values[1:], x.next_values[-1:]])},
)
gae.mistake(
    "if time limits are not seen at all",
    lambda x: {
        "truncated": x.truncated & False,
        "next_values": np.concatenate([x.values[1:], x.next_values[-1:]]),
    },
)
gae.mistake(
    "if the value before a time limit stands for what follows it",
    lambda x: {"next_values": np.where(x.truncated, x.values, x.next_values)},
)
gae.mistake(
    "if the flags of ended episodes act one step late",
    lambda x: {"terminated": delayed(x.terminated), "truncated": delayed(x.truncated)},
)
gae.mistake(
    "if nothing is bootstrapped at the end of the rollout",
    lambda x: {"next_values": np.concatenate([x.next_values[:-1], 0 * x.next_values[-1:]])},
)
gae.mistake("if lambda is left out", gae_lambda=1.0)
gae.mistake("if gamma is left out", gamma=1.0)


def moments(x: np.ndarray, axis: Any, prior: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of `x` and of a prior with mean 0, variance 1 and a weight in samples."""
    total, squares = x.sum(axis), (x**2).sum(axis)
    weight = prior + x.size / total.size
    return total / weight, (prior + squares) / weight - (total / weight) ** 2


@Formula
def normalize_obs(
    observations, clip_obs, *, axis=(0, 1), prior=1e-4, late=False, root=np.sqrt
) -> dict:
    """Observations (T, N, D), normalized by the running mean and the population variance of all
    rows so far, those of the same step included, then clipped. Before the first row, the mean is 0,
    the variance 1, and both count as 1e-4 rows. Epsilon is 1e-8, inside the root.
    """
    normalized = np.zeros(observations.shape)
    for t, rows in enumerate(observations):
        mean, var = moments(observations[: t + (not late)], axis, prior)
        normalized[t] = np.clip((rows - mean) / root(var + 1e-8), -clip_obs, clip_obs)
    return {"normalized": normalized}


normalize_obs.mistake("if each environment has its own statistics", axis=0)
normalize_obs.mistake("if the statistics are updated after they are used", late=True)
normalize_obs.mistake("without clipping", clip_obs=np.inf)
normalize_obs.mistake("if the prior counts as a whole row", prior=1.0)
normalize_obs.mistake("if the variance is used instead of the standard deviation", root=np.array)


@Formula
def scale_rewards(
    rewards, terminated, truncated, gamma, clip_reward, *, axis=None, center=False, early=False
) -> dict:
    """Rewards (T, N) over the running standard deviation of each environment's discounted sum of
    rewards, then clipped. The sum starts again at 0 after each episode. The statistics are those of
    normalize_obs, with the sums of the same step included.
    """
    sums, scaled, total = np.zeros(rewards.shape), np.zeros(rewards.shape), 0.0
    for t, reward in enumerate(rewards):
        # What Gymnasium's wrapper does is `early`: it ignores time limits, too.
        sums[t] = gamma * total * (1 - terminated[t] if early else 1) + reward
        mean, var = moments(sums[: t + 1], axis, prior=1e-4)
        scaled[t] = (reward - center * mean) / np.sqrt(var + 1e-8)
        total = sums[t] if early else np.where(terminated[t] | truncated[t], 0.0, sums[t])
    return {"scaled": np.clip(scaled, -clip_reward, clip_reward)}


scale_rewards.mistake("if the mean is subtracted", center=True)
scale_rewards.mistake(
    "if the sum runs on past time limits", lambda x: {"truncated": x.truncated & False}
)
scale_rewards.mistake(
    "if the sum never starts again",
    lambda x: {"terminated": x.terminated & False, "truncated": x.truncated & False},
)
scale_rewards.mistake("if each environment has its own statistics", axis=0)
scale_rewards.mistake(
    "as in Gymnasium's NormalizeReward, around each environment", early=True, axis=0
)
scale_rewards.mistake("with the standard deviation of the rewards, not of their sums", gamma=0.0)
scale_rewards.mistake("without clipping", clip_reward=np.inf)


def normalize(x: np.ndarray, ddof: int = 0, center: bool = True, eps: float = 1e-8) -> np.ndarray:
    """Mean 0 and standard deviation 1."""
    return (x - center * x.mean()) / (x.std(ddof=ddof) + eps)


@Formula
def normalize_advantages(advantages, **choices) -> dict:
    """Advantages (B,) of a minibatch with mean 0 and standard deviation 1, the population's
    (divisor n) as in ppo2. Epsilon is 1e-8, added to the standard deviation.
    """
    return {"normalized": normalize(advantages, **choices)}


normalize_advantages.mistake("with the sample standard deviation (divisor n - 1)", ddof=1)
normalize_advantages.mistake("without subtracting the mean", center=False)
normalize_advantages.mistake("without epsilon", eps=0.0)


# === Losses ===


def plain_only(plain: Any, clipped: Any) -> Any:
    """Choose the loss without clipping."""
    return plain


def clipped_only(plain: Any, clipped: Any) -> Any:
    """Choose the loss with clipping, even where it is the smaller one."""
    return clipped


def dual_clip(advantages: np.ndarray) -> Callable[[Any, Any], Any]:
    """Choose the larger loss, but not more than that of a ratio of 3 (Ye et al. 2020)."""
    limit = np.where(advantages < 0, -3 * advantages, np.inf)
    return lambda plain, clipped: np.minimum(np.maximum(plain, clipped), limit)


def objective(
    logprobs, old_logprobs, advantages, clip_coef, *, worse=np.maximum, power=1, over=np.mean
) -> Any:
    """The clipped surrogate objective, negated for descent; a scalar."""
    ratio = np.exp(power * (logprobs - old_logprobs))
    clipped_ratio = np.clip(ratio, 1 - clip_coef, 1 + clip_coef)
    return over(worse(-advantages * ratio, -advantages * clipped_ratio))


def with_gradient(loss: Callable[[np.ndarray], Any], x: np.ndarray) -> dict[str, Any]:
    """A loss and its gradient."""
    return {"loss": loss(x), "gradient": gradient(loss, x)}


@Formula
def policy_loss(logprobs, **others) -> dict:
    """Clipped surrogate objective, negated for descent: a mean over samples (B,), and its gradient
    by logprobs. The ratio is exp(logprobs - old_logprobs).
    """
    return with_gradient(functools.partial(objective, **others), logprobs)


policy_loss.mistake("with the sign of a maximization", over=lambda x: -x.mean())
policy_loss.mistake("with the smaller of the two losses", worse=np.minimum)
policy_loss.mistake("with the clipped ratio alone", worse=clipped_only)
policy_loss.mistake("without clipping", worse=plain_only)
policy_loss.mistake("if the ratio is old / new", power=-1)
policy_loss.mistake("with the sum over samples, not their mean", over=np.sum)
policy_loss.mistake(
    "if the loss of a negative advantage is at most that of a ratio of 3",
    lambda x: {"worse": dual_clip(x.advantages)},
)


def value_error(values, old_values, returns, clip_coef, *, half=0.5, worse=np.maximum) -> Any:
    """Half the mean squared error of clipped values, a scalar."""
    clipped_values = old_values + np.clip(values - old_values, -clip_coef, clip_coef)
    return half * np.mean(worse((values - returns) ** 2, (clipped_values - returns) ** 2))


@Formula
def value_loss(values, **others) -> dict:
    """Half the mean squared error of values (B,), and its gradient by values. A change of more than
    clip_coef since the rollout is clipped, and the larger of the two errors counts.
    """
    return with_gradient(functools.partial(value_error, **others), values)


value_loss.mistake("without the factor 1/2", half=1.0)
value_loss.mistake("with the smaller of the two errors", worse=np.minimum)
value_loss.mistake("with the clipped values alone", worse=clipped_only)
value_loss.mistake(
    "with the clipped values alone, and without the factor 1/2", worse=clipped_only, half=1.0
)
value_loss.mistake("without clipping", worse=plain_only)


@Formula
def ppo_loss(
    logprobs, entropies, values, old_logprobs, old_values, advantages, returns, clip_coef,
    ent_coef, vf_coef, *, ddof=0, norm=True, half=0.5, worse=np.maximum, bonus=1, inactive=True
) -> dict[str, Any]:  # fmt: skip
    """The loss of a minibatch (B,), the mean parts that it consists of, and its gradients by
    logprobs, entropies and values. Advantages are normalized first; clip_coef clips values, too.
    approx_kl is k3.
    """
    advantages = normalize(advantages, ddof) if norm else advantages
    policy = functools.partial(objective, advantages=advantages, clip_coef=clip_coef)
    policy = functools.partial(policy, old_logprobs=old_logprobs)
    value = functools.partial(value_error, old_values=old_values, returns=returns)
    value = functools.partial(value, clip_coef=clip_coef, half=half, worse=worse)
    ratio = np.exp(logprobs - old_logprobs)
    clipped = (np.abs(ratio - 1) > clip_coef) & (inactive | ((ratio - 1) * advantages > 0))
    loss = policy(logprobs) - bonus * ent_coef * entropies.mean() + vf_coef * value(values)
    return {
        "loss": loss,
        "policy_loss": policy(logprobs),
        "value_loss": value(values),
        "entropy": entropies.mean(),
        "approx_kl": np.mean(ratio - 1 - np.log(ratio)),
        "clipfrac": clipped.mean(),
        "gradient_logprobs": gradient(policy, logprobs),
        "gradient_entropies": np.full(len(entropies), -bonus * ent_coef / len(entropies)),
        "gradient_values": vf_coef * gradient(value, values),
    }


ppo_loss.mistake("with the sample standard deviation of the advantages", ddof=1)
ppo_loss.mistake("without normalizing the advantages", norm=False)
ppo_loss.mistake("with the wrong sign of the entropy bonus", bonus=-1)
ppo_loss.mistake("without the factor 1/2 of the value loss", half=1.0)
ppo_loss.mistake("without clipping the values", worse=plain_only)
ppo_loss.mistake(
    "with the sample standard deviation, without clipping of values, without the factor 1/2",
    ddof=1,
    worse=plain_only,
    half=1.0,
)
ppo_loss.mistake(
    "with the sample standard deviation, with the clipped values alone, without the factor 1/2",
    ddof=1,
    worse=clipped_only,
    half=1.0,
)
ppo_loss.mistake(
    "if clipfrac counts only those samples whose gradient is clipped away", inactive=False
)


# === Policies, and the distance between them ===

LOG_2PI = np.log(2 * np.pi)


@Formula
def gaussian(mean, log_std, actions, *, std=np.exp, over=np.sum, constant=LOG_2PI) -> dict:
    """Log-probabilities of actions (B, A) and entropies in nats, each (B,), of a Gaussian policy
    with independent components, means (B, A) and log standard deviations (A,).
    """
    log = -0.5 * ((actions - mean) / std(log_std)) ** 2 - np.log(std(log_std)) - 0.5 * constant
    entropies = 0.5 * (1 + constant) + np.log(std(log_std)) + 0 * mean
    return {"logprobs": over(log, axis=-1), "entropies": over(entropies, axis=-1)}


gaussian.mistake("with the mean over components, not their sum", over=np.mean)
gaussian.mistake(
    "if log_std is taken for the log of the variance", std=lambda log_std: np.exp(log_std / 2)
)
gaussian.mistake("without the constant log(2 pi)", constant=0.0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities."""
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@Formula
def categorical(logits, actions, masks=True, *, fill=-1e8, norm=log_softmax) -> dict:
    """Log-probabilities of actions (B,) and entropies in nats, each (B,), of a policy that chooses
    with probabilities softmax(logits), (B, n).
    """
    log = norm(np.where(masks, logits, fill))
    chosen = np.take_along_axis(log, actions[..., None], -1)[..., 0]
    return {"logprobs": chosen, "entropies": -(np.exp(log) * log).sum(-1)}


categorical.mistake("if logits are taken for log-probabilities", norm=np.array)
categorical.mistake(
    "if softmax is applied twice", norm=lambda logits: log_softmax(np.exp(log_softmax(logits)))
)


@Formula
def masked_categorical(**inputs) -> dict:
    """The same with probability 0 where masks (B, n) is false. The others add up to 1."""
    return categorical(**inputs)


masked_categorical.mistake("without the mask", masks=True)
masked_categorical.mistake("if invalid logits are set to 0", fill=0.0)
masked_categorical.mistake(
    "if the probabilities of valid choices do not add up to 1 again",
    lambda x: {"logits": log_softmax(x.logits), "norm": np.array},
)


@Formula
def multi_categorical(logits, actions, *, over=np.sum) -> dict:
    """Log-probabilities of actions (B, k) and entropies in nats, each (B,), of k independent
    choices, with logits (B, k, n).
    """
    return {name: over(x, axis=-1) for name, x in categorical(logits, actions).items()}


multi_categorical.mistake("with the mean over components, not their sum", over=np.mean)
multi_categorical.mistake("with the first component alone", over=lambda x, axis: x[:, 0])


@Formula
def kl_estimates(logprobs, old_logprobs, *, half=0.5, limit=np.inf) -> dict[str, Any]:
    """Three estimates of KL(old || new) from the log-probabilities (B,) of samples of old: the
    means of -log r, (log r)^2 / 2 and r - 1 - log r, where r = new / old.
    """
    log = logprobs - old_logprobs
    k3 = np.minimum(np.exp(log) - 1 - log, limit)
    return {"k1": -log.mean(), "k2": half * (log**2).mean(), "k3": k3.mean()}


kl_estimates.mistake(
    "if the policies are exchanged",
    lambda x: {"logprobs": x.old_logprobs, "old_logprobs": x.logprobs},
)
kl_estimates.mistake("without the factor 1/2 of k2", half=1.0)
kl_estimates.mistake("if no sample's k3 is above 10", limit=10.0)


# === Steps and coefficients ===


def adam(
    parameters, gradients, learning_rate, eps, *, early_eps, corrected=True, inside=False
) -> dict:
    """Parameters after a step for each row of gradients."""
    mean = square = np.zeros(parameters.shape)
    for t, x in enumerate(gradients, 1):
        mean, square = 0.9 * mean + 0.1 * x, 0.999 * square + 0.001 * x**2
        first, second = (1 - 0.9**t, 1 - 0.999**t) if corrected else (1.0, 1.0)
        # Before the correction, epsilon is divided by the root as well.
        added = eps / np.sqrt(second) if early_eps else eps
        root = np.sqrt(square / second + added * inside) + added * (not inside)
        parameters = parameters - learning_rate * mean / first / root
    return {"parameters": parameters}


@Formula
def adam_ppo2(*, early_eps=True, **inputs) -> dict:
    """Parameters (n,) after steps of Adam with gradients (steps, n) and betas 0.9 and 0.999.
    Epsilon is added before the bias correction, as in TensorFlow 1, which ppo2 uses.
    """
    return adam(early_eps=early_eps, **inputs)


@Formula
def adam_pytorch(*, early_eps=False, **inputs) -> dict:
    """The same with epsilon after the bias correction, as in PyTorch and Optax."""
    return adam(early_eps=early_eps, **inputs)


for formula in (adam_ppo2, adam_pytorch):
    formula.mistake("without the bias correction", corrected=False)
    formula.mistake("with epsilon inside the root", inside=True)
    formula.mistake("with PyTorch's default epsilon, 1e-8", eps=1e-8)
adam_ppo2.mistake("with epsilon after the bias correction, as in PyTorch", early_eps=False)
adam_pytorch.mistake("with epsilon before the bias correction, as in ppo2", early_eps=True)


@Formula
def clip_gradient(weight, bias, max_norm, *, each=False, numbers=False, always=False) -> dict:
    """A gradient of two tensors, scaled if the norm of all its numbers is larger than max_norm; and
    that norm before.
    """

    def size(*tensors: np.ndarray) -> Any:
        return np.sqrt(sum((x**2).sum() for x in tensors))

    def clipped(x: np.ndarray) -> np.ndarray:
        if numbers:
            return np.clip(x, -max_norm, max_norm)
        factor = max_norm / (size(x) if each else size(weight, bias))
        return x * (factor if always else min(1.0, factor))

    return {"norm": size(weight, bias), "weight": clipped(weight), "bias": clipped(bias)}


clip_gradient.mistake("if each tensor is clipped by its own norm", each=True)
clip_gradient.mistake("if each number is clipped", numbers=True)
clip_gradient.mistake("if small gradients are scaled up", always=True)


@Formula
def paper_kl_coef(kl_coef, kl, target_kl, *, factor=1.5, power=1) -> dict[str, float]:
    """The next KL coefficient by the rule of the PPO paper, section 4: half if the KL is below its
    target / 1.5, double if it is above 1.5 times the target.
    """
    change = 0.5 if kl < target_kl / factor else 2.0 if kl > target_kl * factor else 1.0
    return {"kl_coef": kl_coef * change**power}


paper_kl_coef.mistake("with 2 instead of 1.5", factor=2.0)
paper_kl_coef.mistake("without a range in which nothing changes", factor=1.0)
paper_kl_coef.mistake("if halving and doubling are exchanged", power=-1)


@Formula
def rlhf_kl_coef(kl_coef, kl, target_kl, episodes, horizon, *, limit=0.2) -> dict[str, float]:
    """The next KL coefficient by the rule of Ziegler et al. 2019: it changes by the relative error
    of the KL, clipped to 20 %, times episodes / horizon.
    """
    error = np.clip(kl / target_kl - 1, -limit, limit)
    return {"kl_coef": kl_coef * (1 + error * episodes / horizon)}


rlhf_kl_coef.mistake("without clipping the error", limit=np.inf)
rlhf_kl_coef.mistake("without the horizon", lambda x: {"horizon": x.episodes})
rlhf_kl_coef.mistake(
    "if KL and target are exchanged", lambda x: {"kl": x.target_kl, "target_kl": x.kl}
)


# === RLHF ===


def last_of(mask: np.ndarray) -> np.ndarray:
    """The last token of each response."""
    return mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))


def last_column(mask: np.ndarray) -> np.ndarray:
    """The last place for a token, which is padding in short responses."""
    return np.arange(mask.shape[1]) == mask.shape[1] - 1


def after_last(mask: np.ndarray) -> np.ndarray:
    """The first padding, or the last token if there is no padding."""
    shifted = np.pad(last_of(mask), ((0, 0), (1, 0)))[:, :-1]
    return np.where(mask.all(1, keepdims=True), last_of(mask), shifted)


@Formula
def rlhf_rewards(
    logprobs, ref_logprobs, mask, scores, kl_coef, *, sign=-1, kl=np.negative, place=last_of
) -> dict:
    """Rewards of the tokens (B, R) of responses: minus kl_coef times logprobs - ref_logprobs; the
    last token of each response gets its score as well. 0 for padding, where mask is false.
    """
    log = np.where(mask, ref_logprobs - logprobs, 0.0)
    return {"rewards": sign * kl_coef * kl(log) + scores[:, None] * place(mask)}


rlhf_rewards.mistake("if the KL is paid out, not charged", sign=1)
rlhf_rewards.mistake("if the score stands in the last column", place=last_column)
rlhf_rewards.mistake("if the score stands one token late, at the first padding", place=after_last)
rlhf_rewards.mistake("if every token gets the score", place=np.array)
rlhf_rewards.mistake("with k3 instead of k1", kl=lambda log: np.exp(log) - 1 - log)


@Formula
def rlhf_advantages(rewards, values, mask, gamma, gae_lambda, *, seen=0.0, counted=None) -> dict:
    """Advantages and value targets (B, R) of the tokens of responses. A response is an episode that
    ends with its last token, so nothing is bootstrapped. 0 for padding.
    """
    counted = mask if counted is None else counted
    values = np.where(counted, values, seen * values)
    following, end = np.pad(values[:, 1:], ((0, 0), (0, 1))), last_of(counted)
    found = gae(rewards.T, values.T, following.T, 0 * end.T == 1, end.T, gamma, gae_lambda)
    return {name: np.where(mask, x.T, 0.0) for name, x in found.items()}


rlhf_advantages.mistake("if the value of the first padding follows the last token", seen=1.0)
rlhf_advantages.mistake(
    "if the first padding is one more token", lambda x: {"counted": x.mask | after_last(x.mask)}
)
rlhf_advantages.mistake(
    "if all padding is part of the response", lambda x: {"counted": x.mask | True}
)
rlhf_advantages.mistake("with a discount factor of 0.99", gamma=0.99)
rlhf_advantages.mistake("if lambda is left out", gae_lambda=1.0)


@Formula
def whiten(x, *, ddof=0, inside=True) -> dict[str, Any]:
    """Numbers over their population standard deviation, with epsilon 1e-8 inside the root. Their
    mean becomes 0 (centered: advantages), stays (restored: rewards in OpenAI's code), or is divided
    as well (scaled: rewards in ppo_rlhf_toy.py).
    """
    root = np.sqrt(x.var(ddof=ddof) + 1e-8 * inside) + 1e-8 * (not inside)
    white = (x - x.mean()) / root
    return {"centered": white, "restored": white + x.mean(), "scaled": x / root}


whiten.mistake("with epsilon outside of the root", inside=False)
whiten.mistake("with the sample standard deviation (divisor n - 1)", ddof=1)


# === GRPO ===


@Formula
def group_advantages(rewards, *, ddof=1, eps=1e-4, raw=False) -> dict[str, Any]:
    """Advantages (P, G) of G responses to each of P prompts from their rewards: minus the group's
    mean (centered: Dr. GRPO); that over the group's sample standard deviation + 1e-4 (group_std:
    GRPO), or over that of all of them (batch_std); minus the mean of the others (leave_one_out:
    RLOO).
    """
    size, centered = rewards.shape[1], rewards - rewards.mean(1, keepdims=True)
    return {
        "centered": centered,
        "group_std": centered / (rewards.std(1, keepdims=True, ddof=ddof) + eps),
        "batch_std": centered / ((rewards if raw else centered).std(ddof=ddof) + eps),
        "leave_one_out": centered * size / (size - 1),
    }


group_advantages.mistake("with the population standard deviation (divisor n)", ddof=0)
group_advantages.mistake(
    "with the standard deviation of all rewards, not of the centered ones", raw=True
)
group_advantages.mistake("without epsilon", eps=1e-30)
group_advantages.mistake("with an epsilon of 1e-6", eps=1e-6)


def grpo_loss(
    logprobs, old_logprobs, ref_logprobs, mask, advantages, clip_low, clip_high, kl_coef,
    *, divisor, per_sequence=False, power=1
) -> dict[str, Any]:  # fmt: skip
    """The loss of one of the published forms."""
    lengths, advantages = mask.sum(1, keepdims=True), advantages[:, None]
    divisors = {"lengths": len(mask) * lengths, "tokens": mask.sum(), "places": mask.size}

    def loss(logprobs: np.ndarray) -> Any:
        log = logprobs - old_logprobs
        if per_sequence:
            log = (log * mask).sum(1, keepdims=True) / lengths
        clipped_ratio = np.clip(np.exp(log), 1 - clip_low, 1 + clip_high)
        gain = np.minimum(np.exp(log) * advantages, clipped_ratio * advantages)
        log = power * (ref_logprobs - logprobs)
        penalty = kl_coef * (np.exp(log) - 1 - log)
        return (mask * (penalty - gain) / divisors[divisor]).sum()

    return with_gradient(loss, logprobs)


COUNTS = {
    "lengths": "if every response counts equally",
    "tokens": "if every token counts equally",
    "places": "if the divisor is the number of places for tokens, B times R",
}


def published(name: str, about: str, divisor: str, per_sequence: bool = False) -> Formula:
    """The loss of a published form, with the mistakes that all forms have."""
    compute = functools.partial(grpo_loss, divisor=divisor, per_sequence=per_sequence)
    about += " Of tokens (B, R), with advantages (B,) of responses; and its gradient by logprobs."
    formula = Formula(compute, name, about)
    formula.mistake("if padding counts", lambda x: {"mask": x.mask | True})
    for other in [x for x in COUNTS if x != divisor]:
        formula.mistake(COUNTS[other], divisor=other)
    text = "with one ratio per token" if per_sequence else "with one ratio per response, as in GSPO"
    formula.mistake(text, per_sequence=not per_sequence)
    return formula


text = "GRPO (Shao et al. 2024): the mean over tokens, then over responses, with k3 as a penalty."
GRPO = published("grpo_loss", text, "lengths")
GRPO.mistake("without the KL penalty", kl_coef=0.0)
GRPO.mistake("if policy and reference are exchanged in k3", power=-1)
text = "Dr. GRPO (Liu et al. 2025): the sum over tokens divided by B times R, a constant."
published("dr_grpo_loss", text, "places")
text = "DAPO (Yu et al. 2025): the mean over all tokens, with a wider range above."
DAPO = published("dapo_loss", text, "tokens")
DAPO.mistake("with the same range above as below", clip_high=0.2)
text = (
    "GSPO (Zheng et al. 2025): one ratio per response, the exponential of the mean log-ratio of "
    "its tokens; the mean over responses."
)
published("gspo_loss", text, "lengths", per_sequence=True)


# === The file ===


def plain(x: Any) -> Any:
    """Arrays as lists, floats with few digits."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, list):
        return [plain(value) for value in x]
    if isinstance(x, np.ndarray | np.generic):
        return plain(x.tolist())
    return float(f"{x:.{DIGITS}g}") + 0.0 if isinstance(x, float) else x  # + 0.0: not -0.0


def changed(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The outputs that differ by more than 32-bit floats would explain."""
    differ = {x: np.abs(found[x] - y).max() > 1e-3 * np.abs(y).max() for x, y in expected.items()}
    return {name: x for name, x in found.items() if differ[name]}


def filled(case: dict[str, Any], formula: Formula) -> dict[str, Any]:
    """A case of the file with what the formula gives, and the mistakes that show in it."""
    about = {name: case[name] for name in ("name", "about", "inputs")}
    inputs = {x: np.array(y) if isinstance(y, list) else y for x, y in case["inputs"].items()}
    expected, mistakes = formula(**inputs), []
    for text, change in formula.mistakes.items():
        found = formula(**inputs | change(SimpleNamespace(**inputs)))
        if gives := changed(found, expected):
            mistakes.append({"mistake": text, "gives": gives})
    return plain(about | {"expected": expected, "mistakes": mistakes})


def lines(x: Any, indent: str = "") -> str:
    """JSON in which an array of numbers stands on one line."""
    inner = indent + " "
    if isinstance(x, dict):
        rows = [f"{inner}{json.dumps(name)}: {lines(y, inner)}" for name, y in x.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(x, list) and x and isinstance(x[0], dict):
        return "[\n" + ",\n".join(inner + lines(y, inner) for y in x) + f"\n{indent}]"
    return json.dumps(x)


def content() -> str:
    """The text of the file, by the inputs that it has."""
    known, formulas = json.loads(FILE.read_text(encoding="utf-8")), {}
    for name, formula in FORMULAS.items():
        cases = [filled(x, formula) for x in known[name]["cases"]]
        formulas[name] = {"about": formula.about, "cases": cases}
    return lines({"about": ABOUT, **formulas}) + "\n"


def write() -> None:
    """Write the file."""
    FILE.write_text(content(), encoding="utf-8")
