"""The search for the recipe: what was tried, and what stayed, by the rule in README.md."""

from benchmark.definitions import Variant
from benchmark.since2017 import VARIANTS

SCRIPT = "ppo_continuous_action.py"
DEFAULT = Variant(SCRIPT, "", "default")
# Changes since 2017, in their order; each was tried beside those before it that had stayed.
TRIED: tuple[str, ...] = ()
STAYED: tuple[str, ...] = ()


def together(names: tuple[str, ...]) -> Variant:
    """Several changes as one variant."""
    parts = [VARIANTS[x] for x in names]
    flags, label = " ".join(x.flags for x in parts if x.flags), " + ".join(x.label for x in parts)
    return Variant(SCRIPT, flags, label, replaced=sum((x.replaced for x in parts), ()))


def changes() -> dict[str, Variant]:
    """The default, and each change that was tried with those that had stayed."""
    found, stayed = {"": DEFAULT}, ()
    for name in TRIED:
        own = (*stayed, name)
        found["+".join(own)] = together(own)
        stayed = own if name in STAYED else stayed
    return found
