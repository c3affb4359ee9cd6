"""Figure 3 of the paper, and the short script beside it."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import CONTINUOUS, MUJOCO7, THREE

FIVE = (1, 2, 3, 4, 5)
# The spread is huge in two: some seeds find a gait that pays twice as much as the others'.
MORE = dict.fromkeys(("HalfCheetah-v4", "Swimmer-v4"), tuple(range(1, 11)))

SUITES = (
    Suite(
        name="figure3",
        reproduces="Schulman et al. 2017, Figure 3, and baselines' ppo2",
        environments=dict.fromkeys(MUJOCO7, FIVE)
        | MORE
        | dict.fromkeys(("Ant-v4", "Humanoid-v4"), (1, 2, 3)),
        variants={"": Variant(CONTINUOUS, "", "PPO (clip)")},
        table="scores",
        figures=("curves", "three", "health"),
    ),
    Suite(
        name="minimal",
        reproduces="whether the short PPO learns as well as the full script",
        environments=dict.fromkeys((*THREE, "InvertedDoublePendulum-v4"), FIVE),
        variants={"": Variant("benchmark/evidence/baselines/minimal.py", "", "ppo_minimal.py")},
        baseline=("figure3", ""),
        baseline_label=CONTINUOUS,
    ),
)
