"""Atari games."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import GAMES, SB3

FAST = "--torch-threads 1 --bfloat16"  # makes 2M steps of a game affordable on one core

# ppo2's learning rate falls over 10M steps. Our runs end after a fifth of them.
SCHEDULE = (
    "remaining = 1 - (iteration - 1) / num_iterations",
    "remaining = 1 - (iteration - 1) / (5 * num_iterations)",
)

SUITES = (
    Suite(
        name="games_schedule",
        reproduces="the same games with ppo2's learning rates, which fall over 10M steps",
        environments={"Pong": (1, 2), "Breakout": (1,), "Enduro": (3,)},
        variants={
            "": Variant(
                *("ppo_atari.py", FAST, "step size falls over 10M steps, as ppo2's"),
                replaced=(SCHEDULE,),
            )
        },
        baseline=("games", ""),
        baseline_label="step size falls over 2M steps",
        total_timesteps=2_000_896,
        table="games",
        figures=("curves",),
    ),
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
