"""All suites: what is run, and what it reproduces. To add one, add an entry to `SUITES`."""

import dataclasses

CONTINUOUS = "ppo_continuous_action.py"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A script with the flags that make this variant."""

    script: str
    flags: tuple[str, ...] = ()
    label: str = ""
    """Name in tables and figures; empty where a suite has only one variant."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """Every variant in every environment with every seed."""

    reproduces: str
    environments: dict[str, tuple[int, ...]]
    """Seeds by environment."""
    variants: dict[str, Variant]
    """By the name of their folder; a single one may have the empty name and no folder."""
    total_timesteps: int = 1_000_000
    first: tuple[tuple[str, int], ...] = ()
    """Environments and seeds to run before all others, which follow seed by seed."""
    baseline: tuple[str, str] | None = None
    """Suite and variant against which the variants are compared."""


# The seven environments of the paper's Figure 3 and Table 1, as version 4.
MUJOCO7 = (
    "HalfCheetah-v4",
    "Hopper-v4",
    "InvertedDoublePendulum-v4",
    "InvertedPendulum-v4",
    "Reacher-v4",
    "Swimmer-v4",
    "Walker2d-v4",
)

SUITES = {
    "smoke": Suite(
        reproduces="nothing: two short runs that show whether everything works here",
        environments={"InvertedPendulum-v4": (1, 2)},
        variants={"": Variant(CONTINUOUS)},
        total_timesteps=6144,
    ),
    "figure3": Suite(
        reproduces="Schulman et al. 2017, Figure 3 (PPO), and baselines' ppo2",
        environments={
            **dict.fromkeys(MUJOCO7, range(1, 6)),
            "HalfCheetah-v4": range(1, 11),  # its spread is known to be huge
            "Ant-v4": (1, 2),
            "Humanoid-v4": (1, 2),
        },
        variants={"": Variant(CONTINUOUS)},
        first=(
            ("HalfCheetah-v4", 1),
            ("HalfCheetah-v4", 2),
            ("HalfCheetah-v4", 3),
            ("Hopper-v4", 1),
            ("Walker2d-v4", 1),
        ),
    ),
}
