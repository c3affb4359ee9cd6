"""Many environments at once, compared with the main script, which has one."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import CONTINUOUS, THREE

VECTOR = "ppo_vector_env.py"

SUITES = (
    Suite(
        name="vector_env",
        reproduces="what many environments give: EnvPool's, stepped together",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)) | {"Ant-v4": (1, 2, 3)},
        variants={"": Variant(VECTOR, "", VECTOR)},
        baseline=("figure3", ""),
        baseline_label=CONTINUOUS,
        figures=("curves",),
    ),
    Suite(
        name="vector_env_3m",
        reproduces="many environments for three million steps, next to Tianshou's published scores",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)) | {"Ant-v4": (1, 2, 3)},
        variants={"": Variant(VECTOR, "", VECTOR)},
        table="scores",
        figures=("curves",),
        total_timesteps=3_000_000,
    ),
    Suite(
        name="vector_num_envs",
        reproduces="how many environments: what more of them cost in return",
        environments=dict.fromkeys((*THREE, "Ant-v4"), (1, 2, 3)),
        variants={
            "32": Variant(VECTOR, "--num-envs 32 --num-steps 64", "32 environments"),
            "64": Variant(VECTOR, "--num-envs 64 --num-steps 32", "64 environments"),
            "256": Variant(
                *(VECTOR, "--num-envs 256 --num-steps 32", "256 environments"),
                environments=dict.fromkeys(THREE[:2], (1, 2)),
            ),
            "1024": Variant(
                *(VECTOR, "--num-envs 1024 --num-steps 32", "1024 environments"),
                environments={"Hopper-v4": (1, 2)},  # no episode would end in HalfCheetah
            ),
        },
        baseline=("vector_env", ""),
        baseline_label="16 environments",
        figures=("curves",),
    ),
    Suite(
        name="rsl_rl",
        reproduces="rsl_rl's PPO on the same simulator, over steps and over minutes",
        environments=dict.fromkeys(THREE[:2], (1, 2, 3)),
        variants={"rsl_rl": Variant("benchmark/evidence/baselines/rsl_rl_ppo.py")},
        baseline=("vector_env_3m", ""),
        baseline_label=VECTOR,
        figures=("minutes",),
        total_timesteps=3_000_000,
    ),
)
