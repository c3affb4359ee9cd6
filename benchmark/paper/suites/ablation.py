"""What each detail is worth: one switch of the default at a time."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS, SET_RATE, SHARED_NETWORK, with_default

ORTHOGONAL = "    nn.init.orthogonal_(layer.weight, gain)\n    nn.init.zeros_(layer.bias)\n"
ANNEAL_CLIP = "        update_args.clip_coef.fill_(args.clip_coef * remaining)\n"

# Numbers of the details that are changed, or the title of
# another tag; label; flags; texts that are replaced.
ABLATIONS = {
    "default-init": ("2", "PyTorch's initialization", "", (ORTHOGONAL, "")),
    "adam-eps-1e-8": ("3", "Adam epsilon 1e-8", "--adam-eps 1e-8"),
    "constant-lr": ("4", "constant learning rate", "--no-anneal-lr"),
    "lambda-1": ("5", "λ = 1", "--gae-lambda 1.0"),
    "one-minibatch": ("6", "one minibatch per epoch", "--num-minibatches 1"),
    "raw-advantages": ("7", "advantages not normalized", "--no-norm-adv"),
    "no-clip": ("8 and 9", "policy and value loss not clipped", "--clip-coef 1e6 --no-clip-vloss"),
    "no-value-clip": ("9", "value loss not clipped", "--no-clip-vloss"),
    "no-grad-clip": ("11", "gradients not clipped", "--max-grad-norm inf"),
    "shared-network": ("13 and 26", "shared network", "", *SHARED_NETWORK),
    # A switch may need a partner: clipped at ε, values cannot follow returns of thousands, and
    # gradients of small advantages might vanish next to those of values if both are clipped.
    "raw-rewards-free-values": (
        *("9 and 30 and 31", "raw rewards, value loss not clipped"),
        "--no-scale-rewards --no-clip-vloss",
    ),
    "raw-advantages-free-gradients": (
        *("7 and 11", "advantages not normalized, gradients not clipped"),
        "--no-norm-adv --max-grad-norm inf",
    ),
    "raw-observations": ("28 and 29", "raw observations", "--no-norm-obs"),
    "unclipped-observations": ("29", "observations not clipped", "--clip-obs inf"),
    "raw-rewards": ("30 and 31", "raw rewards", "--no-scale-rewards"),
    "unclipped-rewards": ("31", "rewards not clipped", "--clip-reward inf"),
    "truncation-is-terminal": (
        *("time limits are not failures", "time limits are failures", "--truncation-is-terminal"),
    ),
    "anneal-clip": (
        *("clip range annealing", "extra: clip range annealed", ""),
        (SET_RATE, ANNEAL_CLIP + SET_RATE),
    ),
    "target-kl": ("early stopping", "extra: early stopping at KL 0.02", "--early-stop-kl 0.02"),
}
SWITCHES = {
    name: Variant(CONTINUOUS, flags, label, tuple(details.split(" and ")), replaced=tuple(replaced))
    for name, (details, label, flags, *replaced) in ABLATIONS.items()
}

SUITES = (
    Suite(
        name="ablation",
        reproduces="what each detail is worth, compared with Engstrom et al. 2020",
        environments=dict.fromkeys(("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"), (1, 2, 3, 4, 5)),
        variants=SWITCHES,
        table="effects",
        figures=("effects",),
        **with_default("default"),
    ),
)
