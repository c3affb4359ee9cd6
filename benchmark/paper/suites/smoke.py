"""Two short runs."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS

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
