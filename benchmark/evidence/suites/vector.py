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
    Suite(
        name="vector_env_3m",
        reproduces="many environments for three million steps, next to Tianshou's published scores",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={"": Variant("ppo_vector_env.py", "", "ppo_vector_env.py")},
        table="scores",
        figures=("curves",),
        total_timesteps=3_000_000,
    ),
    Suite(
        name="rsl_rl",
        reproduces="rsl_rl's PPO on the same simulator, over steps and over minutes",
        environments={"HalfCheetah-v4": (1, 2, 3), "Hopper-v4": (1, 2)},
        variants={"rsl_rl": Variant("benchmark/evidence/baselines/rsl_rl_ppo.py")},
        baseline=("vector_env_3m", ""),
        baseline_label="ppo_vector_env.py",
        figures=("minutes",),
        total_timesteps=3_000_000,
    ),
)
