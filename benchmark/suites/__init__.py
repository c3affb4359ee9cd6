"""All suites, as data: what is run, and what is shown of it.

To add a suite, add an entry to `SUITES` of one of these files, or a new file to `FILES`.
"""

from importlib import import_module

FILES = (  # in the order of tables
    *("figure3", "objectives", "ablation", "since2017", "humanoid", "discrete", "rlhf", "grpo"),
    *("bugs", "healthy", "small_tasks", "other_methods"),
)
ALL = tuple(x for file in FILES for x in import_module(f"benchmark.suites.{file}").SUITES)
SUITES = {suite.name: suite for suite in ALL}
BY_TABLE = {table: [x for x in ALL if x.table == table] for table in {x.table for x in ALL}}
