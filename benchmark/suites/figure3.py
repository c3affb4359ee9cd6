"""Figure 3 of the paper, and what explains its scores."""

from benchmark.definitions import Suite, Variant
from benchmark.suites.ablation import SWITCHES
from benchmark.suites.common import BESIDE_DEFAULT, CONTINUOUS, MINIMAL, MUJOCO7, SB3_SCRIPT, THREE

# What PPO is compared with in Figure 3. A pilot chose one setting of each, see
# benchmark/pages/figure3.md.
TRPO, VPG, A2C, CEM = (f"benchmark/baselines/{x}.py" for x in ("trpo", "vpg", "a2c", "cem"))
FIVE = dict.fromkeys(MUJOCO7, (1, 2, 3, 4, 5))
FAST_A2C = "--learning-rate 2e-3"
FIGURE3 = {
    "": Variant(CONTINUOUS, "", "PPO (clip)"),
    "trpo": Variant(TRPO, "--gae-lambda 0.95", "TRPO", environments=FIVE),
    "vpg": Variant(VPG, "--adapt-lr-kl 0.002", "vanilla PG, adaptive", environments=FIVE),
    "a2c": Variant(A2C, FAST_A2C, "A2C", environments=FIVE),
    "a2c-trust-region": Variant(
        *(A2C, f"{FAST_A2C} --trust-region 1", "A2C + trust region"),
        environments=FIVE,
    ),
    "cem": Variant(CEM, "--extra-std 0.25", "CEM", environments=FIVE),
}


SUITES = (
    Suite(
        name="figure3",
        reproduces="Schulman et al. 2017, Figure 3, and baselines' ppo2",
        environments={
            **dict.fromkeys(MUJOCO7, tuple(range(1, 6))),
            # Their spread is huge: some seeds find a gait that pays twice as much as the others'.
            **dict.fromkeys(("HalfCheetah-v4", "Swimmer-v4"), tuple(range(1, 11))),
            "Ant-v4": (1, 2, 3),
            "Humanoid-v4": (1, 2, 3),
        },
        variants=FIGURE3,
        baseline=("figure3", ""),
        table="figure3",
        figures=("first", "three", "baselines", "health"),
    ),
    Suite(
        name="swimmer",
        reproduces="whether time limits or our code explain ppo2's higher returns in Swimmer",
        environments={"Swimmer-v4": tuple(range(1, 11))},
        variants={
            "truncation-is-terminal": SWITCHES["truncation-is-terminal"],
            "sb3": Variant(
                *(SB3_SCRIPT, "--kind mujoco", "Stable-Baselines3 with ppo2's settings"),
                environments={"Swimmer-v4": (1, 2, 3, 4, 5)},
            ),
        },
        **BESIDE_DEFAULT,
    ),
    Suite(
        name="minimal",
        reproduces="whether the one-page PPO learns as well as the full script",
        environments=dict.fromkeys((*THREE, "InvertedDoublePendulum-v4"), (1, 2, 3, 4, 5)),
        variants={
            "": Variant("benchmark/baselines/minimal.py", "", MINIMAL),
        },
        baseline=("figure3", ""),
        baseline_label="ppo_continuous_action.py",
    ),
    Suite(
        name="stable_baselines3",
        reproduces="Stable-Baselines3's PPO with ppo2's settings, on the same simulator",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)),
        variants={
            "": Variant(SB3_SCRIPT, "--kind mujoco", "Stable-Baselines3 with ppo2's settings")
        },
        baseline=("figure3", ""),
        baseline_label=CONTINUOUS,
    ),
)
