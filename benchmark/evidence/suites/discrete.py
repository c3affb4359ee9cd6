"""Discrete actions: ppo2's CartPole, and bins where the default is Gaussian."""

from benchmark.evidence.suites.common import MULTIDISCRETE, RAW, SHARED_NETWORK, THREE, with_default
from benchmark.lab.definitions import Suite, Variant

SUITES = (
    Suite(
        name="cartpole",
        reproduces="Huang et al. 2022: CartPole-v1 solved within 500k steps",
        environments={"CartPole-v1": (1, 2, 3)},
        variants={"": Variant(MULTIDISCRETE, RAW, replaced=SHARED_NETWORK)},
        total_timesteps=500_000,
        table="scores",
        figures=("curves",),
    ),
    Suite(
        name="multidiscrete_vs_gaussian",
        reproduces="Tang and Agrawal 2020: discretized actions rival the Gaussian policy",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={"bins-11": Variant(MULTIDISCRETE, "--bins 11", "11 bins per joint")},
        figures=("curves",),
        **with_default("Gaussian policy"),
    ),
)
