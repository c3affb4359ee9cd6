"""The formulas on the site, computed from their LaTeX, give what the scripts compute."""

import re

import numpy as np
import pytest
import torch

import dpo_rlhf_toy as dpo
import grpo_rlhf_toy as grpo
import ppo_continuous_action as ppo
import ppo_kl_penalty as kl_penalty
import ppo_rlhf_toy as rlhf
from benchmark.site.annotate import FORMULAS, TEMPLATES, Source
from benchmark.suites.scripts import SCRIPTS

E = r"\hat{\mathbb{E}}"


class Operator:
    """A function that is applied by `*` to the next factor: the mean, or the logarithm."""

    def __init__(self, function, factor=1.0):
        self.function, self.factor = function, factor

    def __mul__(self, x):
        if isinstance(x, Operator):  # the logarithm of a fraction, the mean of a logarithm
            return Operator(lambda y: self.function(x * y), self.factor)
        return self.factor * self.function(x)

    def __rmul__(self, x):
        return Operator(self.function, self.factor * x)

    def __neg__(self):
        return Operator(self.function, -self.factor)


def clip(x, low, high):
    return torch.as_tensor(x).clamp(low, high)


FUNCTIONS = {
    "frac": lambda x: Operator(lambda y: x / y),  # of two factors: frac(x) * (y)
    "clip": clip,
    "min": lambda x, y: torch.minimum(*map(torch.as_tensor, (x, y))),
    "max": lambda x, y: torch.maximum(*map(torch.as_tensor, (x, y))),
    "sqrt": lambda x: torch.as_tensor(x).sqrt(),
    "sigmoid": torch.sigmoid,
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(),
}
OPERATORS = {
    "E": Operator(lambda x: x.mean(-1)),
    "SUM": Operator(lambda x: x.sum(-1)),
    "LOG": Operator(torch.log),
}


SUM = re.compile(r"\\sum(_\{[^}]*\}|_\w)(\^\w|\^\{\w\})?")
SPACE = re.compile(r"\\(left|right|,|;| )")
NAME = re.compile(r"\\mathrm\{(\w+)\}|\\(min|max|sqrt|frac)")


def python(latex: str, symbols: list[str]) -> str:
    """Python for one side of a formula, in which the symbols are x0, x1, ..."""
    latex = SUM.sub(" SUM ", latex)
    for i in sorted(range(len(symbols)), key=lambda i: -len(symbols[i])):
        end = r"(?![A-Za-z])" if symbols[i][-1].isalpha() else ""
        latex = re.sub(r"(?<![A-Za-z\\])" + re.escape(symbols[i]) + end, f" x{i} ", latex)
    latex = latex.replace(E + "_t", " E ").replace(E, " E ").replace(r"\log", " LOG ")
    latex = NAME.sub(lambda x: f" {x[1] or x[2]} ", SPACE.sub(" ", latex))
    latex = latex.translate(str.maketrans("[]{}", "()()")).replace("^", "**")
    found: list[str] = []
    for token in re.findall(r"[\w.]+|\*\*|\S", latex):
        last = found[-1] if found else "+"
        ends = last == ")" or (last[0].isalnum() and last not in FUNCTIONS)
        # A product is written by nothing between its factors.
        found += ["*", token] if ends and (token == "(" or token[0].isalnum()) else [token]
    return " ".join(found)


def evaluate(latex: str, symbols: dict):
    """The value of LaTeX, given those of the symbols that it contains."""
    names = {f"x{i}": x for i, x in enumerate(symbols.values())}
    return eval(python(latex, list(symbols)), {}, FUNCTIONS | OPERATORS | names)


def computed(key: str, symbols: dict, line: int = 0):
    """The value of the right side of a formula, or of the first formula of its line."""
    lines = FORMULAS[key] if isinstance(FORMULAS[key], list) else [FORMULAS[key]]
    _, right = re.split(r"=|\\leftarrow", lines[line], maxsplit=1)
    return evaluate(re.split(r",?\s*\\quad", right)[0], symbols)


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.manual_seed(seed))


LOGRATIO, ADVANTAGES, EPSILON = 0.4 * numbers(50), numbers(50, seed=1), torch.tensor(0.2)
RATIO = {r"\rho_t": LOGRATIO.exp(), r"\hat A_t": ADVANTAGES, r"\epsilon": 0.2}


def test_the_clipped_objective():
    own = computed("clipped surrogate objective", RATIO)
    assert own.item() == pytest.approx(ppo.policy_loss(LOGRATIO, ADVANTAGES, EPSILON).item())


def test_the_ratio():
    new, old = numbers(5), numbers(5, seed=1)
    symbols = {r"\pi_\theta(a_t \mid s_t)": new.exp(), r"\pi_\mathrm{old}(a_t \mid s_t)": old.exp()}
    assert torch.allclose(computed("policy_loss", symbols), (new - old).exp())


def test_the_value_loss_and_its_clipped_values():
    values, old, returns = (numbers(50, seed=x) for x in range(3))
    symbols = {"V": values, r"V_\mathrm{old}": old, r"\epsilon": 0.2}
    clipped = computed("value function loss clipping", symbols, line=1)
    symbols = {"V": values, r"\hat R": returns, r"\bar V": clipped}
    own = computed("value function loss clipping", symbols)
    assert own.item() == pytest.approx(ppo.value_loss(values, old, returns, 0.2).item())


def test_k3():
    own = computed("approx_kl", {r"\rho_t": LOGRATIO.exp()})
    assert own.item() == pytest.approx(ppo.approx_kl(LOGRATIO).item())


def test_the_surrogate_has_the_gradient_of_the_policy_gradient():
    """At ratio 1; that of the clipped loss, negated, too."""
    logratio = torch.zeros(50, dtype=torch.float64, requires_grad=True)
    surrogate = FORMULAS["surrogate"].partition(r"\approx")[2]
    value = evaluate(surrogate, {r"\rho_t": logratio.exp(), r"\hat A_t": ADVANTAGES})
    (gradient,) = torch.autograd.grad(value, logratio)
    assert torch.allclose(gradient, ADVANTAGES / 50)  # of A log pi
    loss = ppo.policy_loss(logratio, ADVANTAGES, EPSILON)
    assert torch.allclose(torch.autograd.grad(-loss, logratio)[0], gradient)


def test_advantages_are_the_weighted_mean_of_k_step_estimates():
    """All three forms: the mean of many k, the sum of TD errors, the script's recursion."""
    steps, gamma, lam = 400, 0.9, 0.8
    rewards, values = numbers(steps + 1).tolist(), numbers(steps + 1, seed=1).tolist()
    estimates = []
    for k in range(1, steps):
        sums = sum(gamma**i * rewards[i] for i in range(k))
        estimates.append(sums + gamma**k * values[k] - values[0])
    mean = (1 - lam) * sum(lam ** (k - 1) * x for k, x in enumerate(estimates, 1))
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(steps)]
    total = sum((gamma * lam) ** t * x for t, x in enumerate(deltas))
    r, v = torch.tensor(rewards)[:, None], torch.tensor(values)[:, None]
    args = ppo.Args(gamma=gamma, gae_lambda=lam)
    own = ppo.gae(r[:-1], v[:-1], v[1:], 0 * r[:-1], args)
    assert mean == pytest.approx(total, abs=1e-6) == pytest.approx(own[0, 0].item(), abs=1e-4)
    for name, text in {
        "weighted mean": r"(1 - \lambda)",
        "k-step advantage": r"\gamma^k V(s_{t+k})",
    }.items():
        assert text in FORMULAS[name]


@pytest.mark.parametrize("shape", [(64, 10), (6, 64)])
def test_orthogonal_weights(shape):
    text = FORMULAS["orthogonal and constant initialization"][0]
    weight = ppo.linear(shape[1], shape[0], 0.5).weight.detach()
    wide = shape[0] < shape[1]
    product = weight @ weight.T if wide else weight.T @ weight
    assert torch.allclose(product, 0.25 * torch.eye(min(shape)), atol=1e-6)
    tall, _, other = text.partition(r"\text{ or, of a wide matrix, }")
    assert tall.startswith(r"W^\top W") and other.strip().startswith(r"W W^\top")


@pytest.mark.parametrize(
    "key",
    [
        "Adam epsilon",
        "ppo_minimal.py: Adam epsilon",
        "ppo_atari.py: Adam epsilon",
        "ppo_atari_lstm.py: Adam epsilon",
    ],
)
def test_adams_epsilon(key):
    """As PyTorch adds it, or as ppo2 does."""
    gradients, step, epsilon = numbers(3), 0, 0.01
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=0.1, eps=epsilon)
    own, mean, square = 0.0, 0.0, 0.0
    theirs = {
        "adam": {x: torch.zeros(1, dtype=torch.float64) for x in ("weights", "mean", "square")}
    }
    for step, g in enumerate(gradients, 1):
        weight.grad = g[None].clone()
        adam.step()
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        symbols = {r"\theta": own, r"\alpha": 0.1, r"\epsilon_\mathrm{Adam}": epsilon, "k": step}
        symbols |= {r"\hat m": mean / (1 - 0.9**step), r"\hat v": square / (1 - 0.999**step)}
        symbols |= {"m": mean, "v": square}
        own = computed(key, symbols)
        root = torch.sqrt(square)
        ppo2 = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * mean / (root + epsilon)
        theirs["adam"]["weights"] -= ppo2
    expected = weight if ":" in key else theirs["adam"]["weights"]
    assert own.item() == pytest.approx(expected.item())


def test_reward_scaling_and_gradient_clipping():
    sums = numbers(20)
    own = computed("reward scaling", {r"r_t": 3.0, "D": sums})
    assert own.item() == pytest.approx(3 / sums.std().item())
    gradient = numbers(5)
    symbols = {"g": gradient, r"g_\mathrm{max}": 0.5, r"\lVert g \rVert": gradient.norm()}
    own = computed("global gradient clipping", symbols | {r"\cdot": 1.0})
    assert own.norm().item() == pytest.approx(0.5)


def test_the_exact_kl_of_gaussians():
    mean, old_mean, std, old_std = (
        numbers(4),
        numbers(4, seed=1),
        numbers(4).exp(),
        numbers(4, seed=2).exp(),
    )
    symbols = {r"\sigma_i": std, r"\bar\sigma_i": old_std, r"\mu_i": mean, r"\bar\mu_i": old_mean}
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(old_mean, old_std), normal(mean, std)).sum()
    assert computed("exact KL divergence", symbols).item() == pytest.approx(exact.item())


def test_the_penalized_objective():
    kl = torch.full((50,), 0.3, dtype=torch.float64)
    text = r"\mathrm{KL}\left[\pi_\mathrm{old}(\cdot \mid s_t), \pi_\theta(\cdot \mid s_t)\right]"
    symbols = {r"\rho_t": LOGRATIO.exp(), r"\hat A_t": ADVANTAGES, r"\beta": 2.0, text: kl}
    expected = -(LOGRATIO.exp() * ADVANTAGES).mean() + 2 * 0.3
    assert computed("KL-penalized objective", symbols).item() == pytest.approx(expected.item())
    assert kl_penalty.KL_COEF_MIN > 0


def test_adaptive_kl():
    symbols = {r"\beta": 0.5, r"\mathrm{KL}": 9.0, "d": 6.0, "n": 64, "h": 1000}
    expected = rlhf.proportional_kl_coef(0.5, 9.0, 6.0, 64, 1000)
    assert float(computed("adaptive KL", symbols)) == pytest.approx(expected)


def test_grpo():
    scores = numbers(1, 6)
    mean = computed(
        "advantage relative to the group's mean", {r"S_i": scores, "S_j": scores, "G": 6}
    )
    symbols = {r"\hat A_i": mean, r"S_1, \dots, S_G": scores[0]}
    own = computed("division by the spread", symbols)
    assert torch.allclose(own.flatten(), grpo.group_advantages(scores.flatten(), 6, "group"))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for divisor, size in {
        "constant": 3 * torch.ones(3),
        "sequence": torch.tensor([2, 2, 1]),
    }.items():
        symbols = {"B": 2, "d_t": size, r"|y_i|": torch.tensor([2.0, 1.0])}
        own = computed("length normalization", symbols)
        assert torch.allclose(own, grpo.token_weights(mask, divisor))


def test_the_weighted_losses_of_grpo():
    weights = numbers(50, seed=3).exp()
    own = computed("grpo_rlhf_toy.py: clipped surrogate objective", RATIO | {r"\omega_t": weights})
    expected = grpo.policy_loss(LOGRATIO, weights * ADVANTAGES, EPSILON)
    assert own.item() == pytest.approx(expected.item())
    symbols = {"L": 1.0, r"\beta": 0.1, r"\omega_t": weights, "q_t": LOGRATIO.exp()}
    k3 = LOGRATIO.exp() - 1 - LOGRATIO
    expected = 1.0 + 0.1 * (weights * k3).mean()
    own = computed("KL penalty in the loss", symbols)
    assert own.item() == pytest.approx(expected.item())


def test_dpo():
    chosen, rejected = numbers(5), numbers(5, seed=1)
    symbols = {r"\hat S(x, y_\mathrm{chosen})": chosen, r"\hat S(x, y_\mathrm{rejected})": rejected}
    own = computed("logistic loss of the difference", symbols)
    assert own.item() == pytest.approx(
        -torch.nn.functional.logsigmoid(chosen - rejected).mean().item()
    )
    assert dpo.Args().beta > 0


def test_no_formula_is_left_over():
    """Each belongs to a note of some script, or is on the first page."""
    used = set(re.findall(r'math\("(.*?)"\)', (TEMPLATES / "index.html").read_text()))
    for name in SCRIPTS:
        notes = [x.title for segment in Source(name).segments for x in segment.notes]
        used |= {own if own in FORMULAS else x for x in notes for own in [f"{name}: {x}"]}
    assert FORMULAS.keys() - used == set()
