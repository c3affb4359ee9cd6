"""The search for the recipe: what was tried, and what stayed, by the rule in README.md."""

import dataclasses
import itertools

from benchmark.definitions import Variant
from benchmark.suites.since2017 import VARIANTS

SCRIPT = "ppo_continuous_action.py"
PLACES = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")
DEFAULT = Variant(SCRIPT, "", "default")
# Changes since 2017, in their order; each was tried beside those before it that had stayed.
TRIED: tuple[str, ...] = ("gamma-0.995",)
STAYED: tuple[str, ...] = ("gamma-0.995",)

# Step size, epochs, and samples of a minibatch: the batch has 2048.
GRID = tuple(itertools.product(("1.5e-4", "3e-4", "6e-4", "1e-3"), (5, 10, 20), (32, 64, 128)))
# Those settings that had a second seed, those that had a million steps, and the best of these.
HALF: tuple[str, ...] = (
    "1e-3-10-64",
    "3e-4-10-32",
    "1e-3-10-32",
    "1e-3-5-64",
    "1.5e-4-20-32",
    "6e-4-5-32",
    "1e-3-5-32",
    "6e-4-5-64",
    "6e-4-10-128",
    "3e-4-10-64",
    "6e-4-10-64",
    "1.5e-4-20-64",
    "1e-3-10-128",
    "6e-4-10-32",
    "3e-4-20-32",
    "1e-3-5-128",
    "3e-4-5-32",
    "3e-4-20-128",
)
FOUR: tuple[str, ...] = ("1e-3-5-64", "1e-3-10-64", "3e-4-10-32", "1e-3-10-32")
BEST = "1e-3-5-64"


def together(names: tuple[str, ...], more: str = "", label: str = "") -> Variant:
    """Several changes as one variant, with more flags."""
    parts = [VARIANTS[x] for x in names]
    flags = " ".join(x for x in (*(part.flags for part in parts), more) if x)
    label = label or " + ".join(x.label for x in parts)
    return Variant(SCRIPT, flags, label, replaced=sum((x.replaced for x in parts), ()))


def settings() -> dict[str, Variant]:
    """The grid with all changes that stayed, by names such as 3e-4-10-64."""
    found = {}
    for rate, epochs, size in GRID:
        flags = f"--learning-rate {rate} --update-epochs {epochs} --num-minibatches {2048 // size}"
        label = f"{rate}, {epochs} epochs, minibatches of {size}"
        found[f"{rate}-{epochs}-{size}"] = together(STAYED, flags, label)
    return found


def with_seeds(variant: Variant, *seeds: int) -> Variant:
    """A variant that has these seeds in each environment of the search."""
    return dataclasses.replace(variant, environments=dict.fromkeys(PLACES, seeds))


def search() -> dict[str, Variant]:
    """The default and the whole grid, of which the better half has a second seed."""
    found = {"": with_seeds(DEFAULT, 101, 102)}
    for name, variant in settings().items():
        seeds = (101, 102) if name in HALF else (101,)
        found[name] = with_seeds(variant, *seeds)
    return found


def changes() -> dict[str, Variant]:
    """The default, each change that was tried with those that had stayed, and the last four."""
    found, stayed = {"": DEFAULT}, ()
    for name in TRIED:
        own = (*stayed, name)
        found["+".join(own)] = together(own)
        stayed = own if name in STAYED else stayed
    return found | {name: with_seeds(settings()[name], 103) for name in FOUR}


def confirmed() -> dict[str, Variant]:
    """The default, the recipe, and those of its changes that stayed in the second step."""
    best = dataclasses.replace(settings()[BEST], label="recipe")
    return {"": DEFAULT, "recipe": best, "+".join(STAYED): together(STAYED)}
