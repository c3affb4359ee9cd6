"""The search for the recipe: what was tried, and what stayed, by the rule in README.md."""

import itertools

from benchmark.definitions import Variant
from benchmark.since2017 import VARIANTS

SCRIPT = "ppo_continuous_action.py"
DEFAULT = Variant(SCRIPT, "", "default")
# Changes since 2017, in their order; each was tried beside those before it that had stayed.
TRIED: tuple[str, ...] = ()
STAYED: tuple[str, ...] = ()
# Learning rate, epochs, samples in a minibatch.
SETTINGS = [*itertools.product(("1.5e-4", "3e-4", "6e-4", "1e-3"), (5, 10, 20), (32, 64, 128))]
BATCH = 2048
# Of these the better half after a seed, the best four after two, and the best after three.
BETTER: tuple[str, ...] = ()
FINALISTS: tuple[str, ...] = ()
BEST = ""


def together(names: tuple[str, ...], label: str, more: str = "") -> Variant:
    """Several changes and more flags as one variant."""
    parts = [VARIANTS[x] for x in names]
    flags = " ".join(x for x in (*(x.flags for x in parts), more) if x)
    return Variant(SCRIPT, flags, label, replaced=sum((x.replaced for x in parts), ()))


def changes() -> dict[str, Variant]:
    """The default, and each change that was tried with those that had stayed."""
    found, stayed = {"": DEFAULT}, ()
    for name in TRIED:
        own = (*stayed, name)
        found["+".join(own)] = together(own, " + ".join(VARIANTS[x].label for x in own))
        stayed = own if name in STAYED else stayed
    return found


def grid() -> dict[str, Variant]:
    """What has stayed, with each of the settings."""
    return {
        f"{lr}-{epochs}-{size}": together(
            STAYED,
            f"learning rate {lr}, {epochs} epochs, minibatches of {size}",
            f"--learning-rate {lr} --update-epochs {epochs} --num-minibatches {BATCH // size}",
        )
        for lr, epochs, size in SETTINGS
    }
