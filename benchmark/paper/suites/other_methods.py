"""The other methods of Figure 3 again: with other coefficients, and without noise."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import THREE
from benchmark.paper.suites.figure3 import A2C, FAST_A2C, FIGURE3

ALL_OF_BASELINES = f"{FAST_A2C} --vf-coef 1 --ent-coef 0.01"

SUITES = (
    Suite(
        name="a2c",
        reproduces="whether A2C would be better with all coefficients of baselines' a2c",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={"baselines": Variant(A2C, ALL_OF_BASELINES, "baselines' coefficients")},
        baseline=("figure3", "a2c"),
        baseline_label="A2C of Figure 3",
    ),
    Suite(
        name="mean_policies",
        reproduces="the six methods of Figure 3 without the noise of their training",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants=FIGURE3,
        table="mean_policies",
        evaluated=True,
    ),
)
