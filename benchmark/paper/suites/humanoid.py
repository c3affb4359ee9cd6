"""The paper's 3D humanoid: section 6.3 and Table 4."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS
from benchmark.paper.suites.switches import adapt_lr_kl, anneal_log_std

# The paper's Table 4 for its 3D humanoids, with 32 actors, as it has for walking; 128 are for the
# harder tasks.
TABLE4 = "--num-envs 32 --num-steps 512 --num-minibatches 4 --update-epochs 15"
ADAPTED, ANNEALED = adapt_lr_kl(0.01), anneal_log_std(-0.7, -1.6)


def variant(flags: str, label: str, *replaced: tuple[str, str]) -> Variant:
    return Variant(CONTINUOUS, flags, label, replaced=replaced)


HUMANOID = variant(f"{TABLE4} --no-anneal-lr", "settings of Table 4", *ADAPTED, *ANNEALED)
HUMANOIDS = {"table": "each_run", "figures": ("curves",), "evaluated": True}

SUITES = (
    Suite(
        name="humanoid",
        reproduces="Schulman et al. 2017, section 6.3 and Table 4, in Gymnasium's Humanoid-v4",
        environments={"Humanoid-v4": (1, 2, 3)},
        variants={"": HUMANOID},
        total_timesteps=4_096_000,
        **HUMANOIDS,
    ),
    Suite(
        name="humanoid_controls",
        reproduces="what each of these settings is worth",
        environments={"Humanoid-v4": (1,)},
        variants={
            "learned-log-std": variant(f"{TABLE4} --no-anneal-lr", "log std learned", *ADAPTED),
            "annealed-lr": variant(TABLE4, "step size annealed", *ANNEALED),
            "ppo2-batch": variant("--no-anneal-lr", "batches of ppo2", *ADAPTED, *ANNEALED),
        },
        baseline=("humanoid", ""),
        baseline_label=HUMANOID.label,
        total_timesteps=4_096_000,
        **HUMANOIDS,
    ),
    Suite(
        name="humanoid_other_envs",
        reproduces="the same settings compared with the default in other environments",
        environments=dict.fromkeys(("Ant-v4", "Walker2d-v4"), (1,)),
        variants={"default": Variant(CONTINUOUS, "", "default"), "table4": HUMANOID},
        total_timesteps=2_000_000,
        **HUMANOIDS,
    ),
)
