"""Many environments at once, compared with the main script, which has one."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import CONTINUOUS, THREE

SUITES = (
    Suite(
        name="vector_env",
        reproduces="what many environments give: EnvPool's, stepped together",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)) | {"Ant-v4": (1, 2, 3)},
        variants={"": Variant("ppo_vector_env.py", "", "ppo_vector_env.py")},
        baseline=("figure3", ""),
        baseline_label=CONTINUOUS,
        figures=("curves",),
    ),
)
