"""The formulas on the site, computed from their LaTeX, give what the scripts compute."""

import re

import numpy as np
import pytest
import torch

import grpo_rlhf_toy as grpo
import ppo_continuous_action as ppo
import ppo_rlhf_toy as rlhf
from benchmark.paper.site.annotate import FORMULAS, TEMPLATES, Source
from benchmark.paper.suites.scripts import SCRIPTS

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


NAMES = {
    "frac": lambda x: Operator(lambda y: x / y),  # of two factors: frac(x) * (y)
    "clip": lambda x, low, high: torch.as_tensor(x).clamp(low, high),
    "min": lambda x, y: torch.minimum(torch.as_tensor(x), y),
    "max": lambda x, y: torch.maximum(x, y),
    "sqrt": lambda x: torch.as_tensor(x).sqrt(),
    "sigmoid": torch.sigmoid,
    "mean": torch.mean,
    "std": torch.std,
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
        is_function = callable(NAMES.get(last))
        ends = last == ")" or (last[0].isalnum() and not is_function)
        # A product is written by nothing between its factors.
        found += ["*", token] if ends and (token == "(" or token[0].isalnum()) else [token]
    return " ".join(found)


def evaluate(latex: str, symbols: dict):
    """The value of LaTeX, given those of the symbols that it contains."""
    values = {f"x{i}": x for i, x in enumerate(symbols.values())}
    return eval(python(latex, [*symbols]), {}, NAMES | values)


def computed(key: str, symbols: dict, line: int = 0):
    """The value of the right side of a formula, or of the first formula of its line."""
    lines = FORMULAS[key] if isinstance(FORMULAS[key], list) else [FORMULAS[key]]
    _, right = re.split(r"=|\\leftarrow", lines[line], maxsplit=1)
    return evaluate(re.split(r",?\s*\\quad", right)[0], symbols)


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.manual_seed(seed))


LOGRATIO, ADVANTAGES, EPSILON = 0.4 * numbers(50), numbers(50, seed=1), torch.tensor(0.2)


def cases():
    """Formulas, the values of their symbols, and what the scripts or PyTorch compute."""
    ratio = LOGRATIO.exp()
    a, b, c, positive = *(numbers(50, seed=x) for x in range(3)), numbers(50, seed=3).exp()
    symbols = {r"\pi_\theta(a_t \mid s_t)": a.exp(), r"\pi_\mathrm{old}(a_t \mid s_t)": b.exp()}
    yield "policy_loss", symbols, (a - b).exp()
    clip = {r"\rho_t": ratio, r"\hat A_t": ADVANTAGES, r"\epsilon": 0.2}
    yield "clipped surrogate objective", clip, ppo.policy_loss(LOGRATIO, ADVANTAGES, EPSILON)
    expected = grpo.policy_loss(LOGRATIO, positive * ADVANTAGES, EPSILON)
    symbols = clip | {r"\omega_t": positive}
    yield "grpo_rlhf_toy.py: clipped surrogate objective", symbols, expected
    yield "approx_kl", clip, ppo.approx_kl(LOGRATIO)
    symbols = {"V": a, r"V_\mathrm{old}": b, r"\epsilon": 0.2}
    clipped = computed(key := "value function loss clipping", symbols, line=1)
    yield key, {"V": a, r"\hat R": c, r"\bar V": clipped}, ppo.value_loss(a, b, c, 0.2)
    yield "reward scaling", {"r_t": 3.0, "D": a}, 3 / a.std()
    symbols = {"g": a, r"g_\mathrm{max}": 0.5, r"\lVert g \rVert": a.norm(), r"\cdot": 1.0}
    yield "global gradient clipping", symbols, 0.5 * a / a.norm()
    old, new = (torch.distributions.Normal(*x) for x in ((b, positive), (a, c.exp())))
    symbols = {r"\mu_i": a, r"\sigma_i": c.exp(), r"\bar\mu_i": b, r"\bar\sigma_i": positive}
    yield "exact KL divergence", symbols, torch.distributions.kl_divergence(old, new).sum()
    kl = r"\mathrm{KL}\left[\pi_\mathrm{old}(\cdot \mid s_t), \pi_\theta(\cdot \mid s_t)\right]"
    symbols = clip | {r"\beta": 2.0, kl: torch.full((50,), 0.3)}
    yield "KL-penalized objective", symbols, 0.6 - (ratio * ADVANTAGES).mean()
    symbols = {r"\beta": 0.5, r"\mathrm{KL}": 9.0, "d": 6.0, "n": 64, "h": 1000}
    yield "adaptive KL", symbols, rlhf.proportional_kl_coef(0.5, 9.0, 6.0, 64, 1000)
    scores = numbers(1, 6)
    key, symbols = "advantage relative to the group's mean", {"S_i": scores, "S_j": scores, "G": 6}
    symbols = {r"\hat A_i": computed(key, symbols), r"S_1, \dots, S_G": scores}
    yield "division by the spread", symbols, grpo.group_advantages(scores.flatten(), 6, "group")
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for divisor, size in {"constant": (3, 3, 3), "sequence": (2, 2, 1)}.items():
        symbols = {"B": 2, "d_t": torch.tensor(size), r"|y_i|": torch.tensor([2.0, 1.0])}
        yield "length normalization", symbols, grpo.token_weights(mask, divisor)
    symbols = {"L": 1.0, r"\beta": 0.1, r"\omega_t": positive, "q_t": ratio}
    k3 = ratio - 1 - LOGRATIO
    yield "KL penalty in the loss", symbols, 1 + 0.1 * (positive * k3).mean()
    symbols = {r"\hat S(x, y_\mathrm{chosen})": a, r"\hat S(x, y_\mathrm{rejected})": b}
    expected = -torch.nn.functional.logsigmoid(a - b).mean()
    yield "logistic loss of the difference", symbols, expected


@pytest.mark.parametrize(("key", "symbols", "expected"), [*cases()])
def test_a_formula_gives_what_the_script_computes(key, symbols, expected):
    values = (torch.as_tensor(x).double().squeeze() for x in (computed(key, symbols), expected))
    assert torch.allclose(*values, rtol=1e-6)


def test_the_surrogate_has_the_gradient_of_the_policy_gradient():
    """At ratio 1; that of the clipped loss, negated, too."""
    logratio = torch.zeros(50, dtype=torch.float64, requires_grad=True)
    surrogate = FORMULAS["surrogate"].partition(r"\approx")[2]
    value = evaluate(surrogate, {r"\rho_t": logratio.exp(), r"\hat A_t": ADVANTAGES})
    for objective in (value, -ppo.policy_loss(logratio, ADVANTAGES, EPSILON)):
        (gradient,) = torch.autograd.grad(objective, logratio)
        assert torch.allclose(gradient, ADVANTAGES / 50)  # of A log pi


@pytest.mark.parametrize("home", ["", "ppo_minimal.py", "ppo_atari.py", "ppo_atari_lstm.py"])
def test_adams_epsilon(home):
    """As ppo2 adds it, or as PyTorch does."""
    key = f"{home}: Adam epsilon" if home else "Adam epsilon"
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=0.1, eps=0.01)
    own, ppo2, mean, square = 0.0, 0.0, 0.0, 0.0
    for step, g in enumerate(numbers(3), 1):
        weight.grad = g[None].clone()
        adam.step()
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        symbols = {r"\theta": own, r"\alpha": 0.1, r"\epsilon_\mathrm{Adam}": 0.01, "k": step}
        symbols |= {r"\hat m": mean / (1 - 0.9**step), r"\hat v": square / (1 - 0.999**step)}
        own = computed(key, symbols | {"m": mean, "v": square})
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        ppo2 -= rate * mean / (square.sqrt() + 0.01)
    assert own.item() == pytest.approx((weight if home else ppo2).item())


def test_no_formula_is_left_over():
    """Each belongs to a note of some script, or is on the first page."""
    used = set(re.findall(r'math\("(.*?)"\)', (TEMPLATES / "index.html").read_text()))
    for name in SCRIPTS:
        notes = [x.title for segment in Source(name).segments for x in segment.notes]
        used |= {own if own in FORMULAS else x for x in notes for own in [f"{name}: {x}"]}
    assert FORMULAS.keys() - used == set()
