"""The paper's 3D humanoid: section 6.3 and Table 4."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS
from benchmark.paper.suites.switches import adapt_lr_kl, anneal_log_std

# The paper's Table 4 for its 3D humanoids, with 32 actors, as it has for walking; 128 are for the
# harder tasks.
FLAGS = "--num-envs 32 --num-steps 512 --num-minibatches 4 --update-epochs 15 --no-anneal-lr"
TEXTS = (*adapt_lr_kl(0.01), *anneal_log_std(-0.7, -1.6))

SUITES = (
    Suite(
        name="humanoid",
        reproduces="Schulman et al. 2017, section 6.3 and Table 4, in Gymnasium's Humanoid-v4",
        environments={"Humanoid-v4": (1, 2, 3)},
        variants={"": Variant(CONTINUOUS, FLAGS, "settings of Table 4", replaced=TEXTS)},
        total_timesteps=4_096_000,
        table="each_run",
        figures=("curves",),
        evaluated=True,
    ),
)
