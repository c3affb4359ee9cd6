"""Atari games."""

from benchmark.definitions import Suite, Variant
from benchmark.suites.common import ATARI, FAST_ATARI, GAMES, LSTM, SB3_SCRIPT

SUITES = (
    Suite(
        name="games",
        reproduces="Schulman et al. 2017, Table 6 and Figure 6, in a fifth of the steps",
        environments={
            **dict.fromkeys(("Breakout", "BeamRider", "Enduro"), (1, 2)),
            **dict.fromkeys(("Qbert", "SpaceInvaders", "Seaquest", "Pong"), (1,)),
        },
        variants={
            "": Variant(ATARI, FAST_ATARI, "four frames, no memory"),
            "lstm": Variant(
                *(LSTM, FAST_ATARI, "one frame and an LSTM"), environments={"Pong": (1,)}
            ),
            "sb3": Variant(
                *(SB3_SCRIPT, f"--kind atari {GAMES}", "four frames, Stable-Baselines3"),
                environments={"Breakout": (1,)},
            ),
        },
        total_timesteps=2_000_896,
        table="games",
        figures=("curves",),
    ),
)
