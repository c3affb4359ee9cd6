"""All suites, as data: what is run, and what is shown of it.

To add a suite, add an entry to `SUITES` of one of these files, or a new file with `SUITES`.
Experiments that have ended are in benchmark/closed/, and no code of theirs is here.
"""

import importlib
import pkgutil

FILES = [importlib.import_module(f"{__name__}.{x.name}") for x in pkgutil.iter_modules(__path__)]
ALL = [suite for file in FILES for suite in getattr(file, "SUITES", ())]
SUITES = {suite.name: suite for suite in ALL}
