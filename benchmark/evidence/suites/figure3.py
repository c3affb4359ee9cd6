"""Figure 3 of the paper, and what explains its scores."""

from dataclasses import replace

from benchmark.evidence.suites.common import CONTINUOUS, MUJOCO7, SB3, THREE, with_default
from benchmark.lab.definitions import Suite, Variant

# What PPO is compared with in Figure 3. A pilot chose one setting of each, see
# benchmark/closed/baselines_pilot/.
TRPO, VPG, A2C, CEM = (
    f"benchmark/evidence/baselines/{x}.py" for x in ("trpo", "vpg", "a2c", "cem")
)
FAST_A2C = "--learning-rate 2e-3"
FIGURE3 = {
    "": Variant(CONTINUOUS, "", "PPO (clip)"),
    "trpo": Variant(TRPO, "--gae-lambda 0.95", "TRPO"),
    "vpg": Variant(VPG, "--adapt-lr-kl 0.002", "vanilla PG, adaptive"),
    "a2c": Variant(A2C, FAST_A2C, "A2C"),
    "a2c-trust-region": Variant(A2C, f"{FAST_A2C} --trust-region 1", "A2C + trust region"),
    "cem": Variant(CEM, "--extra-std 0.25", "CEM"),
}
FIVE = dict.fromkeys(MUJOCO7, (1, 2, 3, 4, 5))
# The spread of PPO is huge in two: some seeds find a gait that pays twice as much as the others'.
MORE = FIVE | dict.fromkeys(("HalfCheetah-v4", "Swimmer-v4"), tuple(range(1, 11)))

SUITES = (
    Suite(
        name="figure3",
        reproduces="Schulman et al. 2017, Figure 3, and baselines' ppo2",
        environments=MORE | dict.fromkeys(("Ant-v4", "Humanoid-v4"), (1, 2, 3)),
        variants={x: replace(y, environments=FIVE if x else None) for x, y in FIGURE3.items()},
        table="figure3",
        figures=("first", "three", "baselines", "health"),
    ),
    Suite(
        name="minimal",
        reproduces="whether the short PPO learns as well as the full script",
        environments=dict.fromkeys((*THREE, "InvertedDoublePendulum-v4"), (1, 2, 3, 4, 5)),
        variants={"": Variant("benchmark/evidence/baselines/minimal.py", "", "ppo_minimal.py")},
        **with_default(CONTINUOUS),
    ),
    Suite(
        name="stable_baselines3",
        reproduces="Stable-Baselines3's PPO with ppo2's settings, on the same simulator",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)),
        variants={"": Variant(SB3, "--kind mujoco", "Stable-Baselines3 with ppo2's settings")},
        **with_default(CONTINUOUS),
    ),
)
