"""What a measurement and a row of the table of scripts consist of; `suites/` has them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Entry:
    """A script with flags: one of this repository, or of another project, whose user gives it."""

    name: str
    steps: int  # enough for ten iterations or more
    flags: str = ""
    script: str = ""  # if it is not its own name
    given: str = ""  # by a flag of `throughput`: the name of the project

    @property
    def file(self) -> str:
        return self.script or self.name

    @property
    def arguments(self) -> list[str]:
        return ["--total-timesteps", str(self.steps), *self.flags.split()]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Entries with equal work; the others are compared with the last one."""

    title: str
    entries: tuple[Entry, ...]
    threads: int = 1  # of every entry
    gpu: bool = False  # needs one


@dataclasses.dataclass(frozen=True)
class Script:
    """A row of the table of scripts: what the script shows, and the runs that stand for it."""

    shows: str
    suite: str  # or a closed experiment
    environment: str
    variant: str = ""
    score: str = "return"  # what is scored
    more_seeds: tuple[str, ...] = ()  # variants that differ in nothing that should matter
