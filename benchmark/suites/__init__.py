"""All suites, as data: what is run, and what is shown of it.

To add a suite, add an entry to `SUITES` of one of these files, or a new file to `FILES`.
"""

import importlib

FILES = (  # in the order of tables
    *("figure3", "objectives", "ablation", "since2017", "humanoid", "games", "rlhf", "grpo"),
    *("bugs", "healthy", "small_tasks", "other_methods"),
)
MODULES = [importlib.import_module(f"{__name__}.{name}") for name in FILES]
ALL = tuple(suite for module in MODULES for suite in module.SUITES)
SUITES = {suite.name: suite for suite in ALL}
BY_TABLE = {table: [x for x in ALL if x.table == table] for table in {x.table for x in ALL}}
