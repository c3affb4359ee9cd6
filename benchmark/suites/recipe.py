"""A setting for returns. Ended: its search is not repeated, and its runs are in results/closed/."""

from benchmark.definitions import Suite, Variant
from benchmark.suites.common import CONTINUOUS, MUJOCO7

# The setting, and where one of its changes was also run alone.
RECIPE = "--gamma 0.995 --learning-rate 1e-3 --update-epochs 5 --num-minibatches 32"
RECIPE_AGAIN = (
    *("InvertedDoublePendulum-v4", "InvertedPendulum-v4", "Reacher-v4", "Swimmer-v4", "Ant-v4"),
)

SUITES = (
    Suite(
        name="recipe",
        reproduces="a setting for returns, compared with the default on fresh seeds",
        environments=dict.fromkeys((*MUJOCO7, "Ant-v4"), (201, 202, 203, 204, 205)),
        variants={
            "": Variant(CONTINUOUS, "", "default"),
            "recipe": Variant(CONTINUOUS, RECIPE, "recipe"),
            "gamma-0.995": Variant(
                *(CONTINUOUS, "--gamma 0.995", "γ = 0.995"),
                environments=dict.fromkeys(RECIPE_AGAIN, (201, 202, 203)),
            ),
        },
        table="recipe",
    ),
)
