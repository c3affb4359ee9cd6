"""All suites, as data: what is run, and what is shown of it.

To add a suite, add an entry to `SUITES` of one of these files, or a new file to `FILES`.
Experiments that have ended are in benchmark/closed/, and no code of theirs is here.
"""

from benchmark.paper.suites import (
    ablation,
    bugs,
    discrete,
    figure3,
    games,
    grpo,
    humanoid,
    objectives,
    rlhf,
    small_tasks,
    smoke,
)

FILES = (  # in the order of tables
    *(smoke, figure3, objectives, ablation, humanoid, games, discrete, rlhf, grpo, bugs),
    small_tasks,
)
ALL = tuple(suite for file in FILES for suite in file.SUITES)
SUITES = {suite.name: suite for suite in ALL}
BY_TABLE = {table: [x for x in ALL if x.table == table] for table in {x.table for x in ALL}}
