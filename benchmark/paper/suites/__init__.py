"""All suites, as data: what is run, and what is shown of it.

To add a suite, add an entry to `SUITES` of one of these files, or a new file to `FILES`.
"""

from benchmark.paper.suites import (
    ablation,
    bugs,
    discrete,
    figure3,
    games,
    grpo,
    healthy,
    humanoid,
    num_envs,
    objectives,
    other_methods,
    rlhf,
    since2017,
    small_tasks,
    smoke,
)

FILES = (  # in the order of tables
    *(smoke, figure3, objectives, ablation, since2017, num_envs, humanoid, games, discrete, rlhf),
    *(grpo, bugs, healthy, small_tasks, other_methods),
)
ALL = tuple(suite for file in FILES for suite in file.SUITES)
SUITES = {suite.name: suite for suite in ALL}
BY_TABLE = {table: [x for x in ALL if x.table == table] for table in {x.table for x in ALL}}
