"""Discrete actions: Atari games, ppo2's CartPole, and bins where the default is Gaussian."""

from benchmark.definitions import Suite, Variant
from benchmark.suites.common import FAST, GAMES, MULTIDISCRETE, RAW, SB3, THREE, with_default
from benchmark.suites.switches import SHARED_NETWORK

SUITES = (
    Suite(
        name="games",
        reproduces="Schulman et al. 2017, Table 6 and Figure 6, in a fifth of the steps",
        environments={
            **dict.fromkeys(("Breakout", "BeamRider", "Enduro"), (1, 2)),
            **dict.fromkeys(("Qbert", "SpaceInvaders", "Seaquest", "Pong"), (1,)),
        },
        variants={
            "": Variant("ppo_atari.py", FAST, "four frames, no memory"),
            "lstm": Variant(
                *("ppo_atari_lstm.py", FAST, "one frame and an LSTM"),
                environments={"Pong": (1,)},
            ),
            "sb3": Variant(
                *(SB3, f"--kind atari {GAMES}", "four frames, Stable-Baselines3"),
                environments={"Breakout": (1,)},
            ),
        },
        total_timesteps=2_000_896,
        table="games",
        figures=("curves",),
    ),
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
