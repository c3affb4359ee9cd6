"""Discrete actions where the default is Gaussian, and ppo2's CartPole."""

from benchmark.definitions import Suite, Variant
from benchmark.suites import switches
from benchmark.suites.common import MULTIDISCRETE, RAW, THREE

SUITES = (
    Suite(
        name="cartpole",
        reproduces="Huang et al. 2022: CartPole-v1 solved within 500k steps",
        environments={"CartPole-v1": (1, 2, 3)},
        variants={
            "": Variant(MULTIDISCRETE, RAW, replaced=switches.SHARED_NETWORK),
        },
        total_timesteps=500_000,
        table="scores",
        figures=("curves",),
    ),
    Suite(
        name="multidiscrete_vs_gaussian",
        reproduces="Tang and Agrawal 2020: discretized actions rival the Gaussian policy",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={"bins-11": Variant(MULTIDISCRETE, "--bins 11", "11 bins per joint")},
        baseline=("figure3", ""),
        baseline_label="Gaussian policy",
        figures=("curves",),
    ),
)
