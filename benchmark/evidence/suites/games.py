"""Atari games."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import GAMES, SB3

FAST = "--torch-threads 1 --bfloat16"  # makes 2M steps of a game affordable on one core

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
            "float32": Variant(
                *("ppo_atari.py", "--torch-threads 1", "four frames, float32"),
                environments={"Pong": (2, 3), "Breakout": (3,)},
            ),
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
)
