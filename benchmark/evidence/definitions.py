"""What suites, measurements and rows of the table of scripts consist of; `suites/` has them."""

import dataclasses

Name = tuple[str, str]  # suite and variant


@dataclasses.dataclass(frozen=True)
class Variant:
    """A script with the flags that make this variant."""

    script: str
    flags: str = ""
    label: str = ""  # in tables and figures; empty where a suite has only one variant
    environments: dict[str, tuple[int, ...]] | None = None  # and their seeds, if not the suite's


@dataclasses.dataclass(frozen=True)
class Suite:
    """Every variant in every environment with every seed, unless a variant has its own."""

    name: str
    reproduces: str
    environments: dict[str, tuple[int, ...]]  # and their seeds; RLHF has the toy reviews there
    variants: dict[str, Variant]  # by name; a single one may have the empty name
    table: str = "variants"  # which one shows it, see pages.TABLES
    figures: tuple[str, ...] = ()  # see figures.FIGURES
    total_timesteps: int | None = 1_000_000  # None: the script is told neither these nor the task
    step: str = "environment steps"  # what the horizontal axis of a curve counts
    baseline: Name | None = None  # of another suite, with which the variants are compared
    baseline_label: str = ""  # in tables and figures
    keeps_weights: bool = True  # checkpoints and models of its runs, once their results are kept

    def seeds(self, environment: str, variant: str) -> tuple[int, ...]:
        """Those that a variant is to have in an environment."""
        return (self.variants[variant].environments or self.environments).get(environment, ())

    @property
    def labels(self) -> dict[Name, str]:
        """Names in tables and figures, first that of a baseline elsewhere."""
        names = {(self.name, name): x.label or name or "ours" for name, x in self.variants.items()}
        return {self.baseline: self.baseline_label} | names if self.baseline else names


@dataclasses.dataclass(frozen=True)
class Entry:
    """A script with flags: one of this repository, or of another project, whose user gives it."""

    name: str
    steps: int  # enough for ten iterations or more
    flags: str = ""
    script: str = ""  # if it is not its own name
    given: str = ""  # by a flag of `throughput`: the name of the project
    batch: int = 0  # steps of an iteration, of a script that counts iterations

    @property
    def file(self) -> str:
        return self.script or self.name

    @property
    def arguments(self) -> list[str]:
        length = "--num-iterations" if self.batch else "--total-timesteps"
        return [length, str(self.steps // (self.batch or 1)), *self.flags.split()]


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
    share: str = ""  # what is said after the number of steps
