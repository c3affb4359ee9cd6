"""What more environments buy: the same batch of 2048 steps, from 1, 8 or 64 of them."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS, with_default

SUITES = (
    Suite(
        name="num_envs",
        reproduces="whether more environments learn more or faster",
        environments={"HalfCheetah-v4": (1, 2, 3)},
        variants={
            "8": Variant(CONTINUOUS, "--num-envs 8 --num-steps 256", "8 environments"),
            "64": Variant(CONTINUOUS, "--num-envs 64 --num-steps 32", "64 environments"),
        },
        **with_default("1 environment"),
    ),
)
