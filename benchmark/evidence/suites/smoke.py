"""Two short runs."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import CONTINUOUS

SUITES = (
    Suite(
        name="smoke",
        reproduces="nothing: two short runs that show whether everything works here",
        environments={"InvertedPendulum-v4": (1, 2)},
        variants={"": Variant(CONTINUOUS)},
        table="scores",
        total_timesteps=4096,
    ),
)
