"""Numbers in the text of the pages that no table has, computed from the committed results.

A number in the text is followed by a comment that says where it comes from, and a test compares:

    +21 % [+7 %, +44 %]<!-- since2017: γ = 0.995 -->    a block, and a text in the row that has it
    34 %<!-- value: reach of ablation -->               a function of this module, see `VALUES`
"""

import functools
import re
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from benchmark.lab.definitions import Folders
from benchmark.lab.provenance import ROOT
from benchmark.lab.results import done, lines_of, runs_of
from benchmark.lab.tables import CHANGE
from benchmark.paper import rlhf, tables
from benchmark.paper.health import bugs_of
from benchmark.paper.suites import BY_TABLE, SUITES
from benchmark.paper.suites.scripts import SCRIPTS
from benchmark.paper.tables import effects, normalized, scores_of
from benchmark.paper.tags import tags_of

# Those on which a pilot chose the settings of Table 1.
PILOT = ("Hopper-v4", "Swimmer-v4")
VALUE = re.compile(
    r"(?<![\w.])(?!95 %)(?:"
    r"[-+]?\d[\d.]*(?: %)?\s\[[-+\d., %\s]+\](?!\()"  # a value and its interval
    r"|[-+]?\d+(?:\.\d+)? %|(?<=P = )\d\.\d+)"
)
MARK = re.compile(r"<!-- ([\w ]+): (.+?) -->")


def rank_correlation(folders: Folders, pilot: bool, first: int = 0) -> str:
    """That of Table 1 in the environments of the pilot, or in all others."""
    suite = SUITES["table1"]
    shown = normalized(suite, folders)
    return tables.rank_correlation(suite, shown[[x for x in shown if (x in PILOT) == pilot]], first)


def reach(name: str, folders: Folders) -> str:
    """How far the intervals that contain 0 reach to a side, the shortest and the longest of them.

    Rows that change two switches because one needs the other are left out.
    """
    suite = SUITES[name]
    alone = {x.title for x in suite.variants.values() if "free" not in x.label}
    found = [x for label, x in effects(suite, folders).items() if label in alone]
    sizes = [(x.ends[1] - x.ends[0]) / 2 for x in found if x.ends[0] <= 0 <= x.ends[1]]
    return f"{100 * min(sizes):.0f} to {max(sizes):.0%}"


def change(name: str, label: str, place: str, folders: Folders) -> str:
    """How a variant changes the mean score of the baseline in one environment."""
    suite = SUITES[name]
    means = scores_of(suite, folders)[place].groupby("label", observed=True).mean()
    return CHANGE(means[label] / means[suite.labels[suite.baseline]] - 1)


def without_best(folders: Folders, count: int = 2) -> float:
    """Mean score of the default in HalfCheetah without its best runs, relative to that of all."""
    scores = np.sort(scores_of(SUITES["figure3"], folders).loc["PPO (clip)"]["HalfCheetah-v4"])
    return scores[:-count].mean() / scores.mean() - 1


def lead(folders: Folders) -> str:
    """How much higher the means of Stable-Baselines3 are, in each environment."""
    suite, label = SUITES["stable_baselines3"], "Stable-Baselines3 with ppo2's settings"
    found = [change(suite.name, label, x, folders) for x in suite.environments]
    *some, last = [x.strip("+%") for x in found]
    return f"{', '.join(some)} and {last}%"


def details(_: Folders) -> str:
    """How many of the 37 details are tagged in some script."""
    tags = [x for path in SCRIPTS for x in tags_of((ROOT / path).read_text())]
    found = {number for x in tags for number in re.findall(r"(\d+)/37", x.number)}
    return f"{len(found)} of 37"


def speed(folders: Folders) -> str:
    """Steps per second of the main script over those of Stable-Baselines3 in HalfCheetah."""
    rows = pd.DataFrame(lines_of(folders.results / "throughput.jsonl"))
    rows = rows[rows["measurement"] == "continuous"]
    rates = rows.pivot(index="repetition", columns="entry", values="steps_per_second")
    return f"{(rates['ppo_continuous_action.py'] / rates['Stable-Baselines3 PPO']).median():.1f} ×"


def committed_runs(folders: Folders) -> str:
    """The runs of all suites, rounded down to hundreds."""
    return f"{sum(len(done(x, folders)) for x in SUITES) // 100 * 100:,}"


def planted_bugs(_: Folders) -> str:
    """How many different bugs were planted; some are in two suites."""
    return str(len({x.label for suite in BY_TABLE["bugs"] for x in bugs_of(suite).values()}))


def model_of(name: str, folders: Folders) -> pd.Series:
    """The means over seeds of what is known of a model of `grpo_minimal`."""
    found = rlhf.models(runs_of(SUITES["grpo_minimal"], folders)["result"])
    return found.groupby("model").mean(numeric_only=True).loc[name]


def pass_at(k: int, model: str, folders: Folders) -> str:
    """The chance that one of k responses of a model is right."""
    return f"{model_of(model, folders)[f'pass@{k}']:.3f}"


def drawn_again(folders: Folders) -> str:
    """pass@16 of the SFT models by the responses that the run of another variant draws."""
    own = model_of("std", folders)
    return f"{own['pass@16'] - own['newly_solved'] + own['no_longer_solved']:.3f}"


VALUES: dict[str, Callable[[Folders], str]] = {
    "rank correlation, not the pilot's": lambda x: rank_correlation(x, pilot=False),
    "the same without the first row": lambda x: rank_correlation(x, pilot=False, first=1),
    "rank correlation, the pilot's": lambda x: rank_correlation(x, pilot=True),
    "reach of ablation": functools.partial(reach, "ablation"),
    "reach of since2017": functools.partial(reach, "since2017"),
    "lead of Stable-Baselines3": lead,
    "HalfCheetah without its two best runs": lambda x: CHANGE(without_best(x)),
    "HalfCheetah by its two best runs": lambda x: CHANGE(1 / (1 + without_best(x)) - 1),
    "lines of ppo_minimal.py": lambda _: str((ROOT / "ppo_minimal.py").read_text().count("\n")),
    "details": details,
    "speed": speed,
    "committed runs": committed_runs,
    "planted bugs": planted_bugs,
    "pass@4 of Dr. GRPO": functools.partial(pass_at, 4, "dr-grpo"),
    "pass@8 of the SFT model": functools.partial(pass_at, 8, "sft"),
    "pass@16 of the SFT model": functools.partial(pass_at, 16, "sft"),
    "pass@16 of the SFT model, drawn again": drawn_again,
} | {
    f"{label}, {place}": functools.partial(change, "ablation", label, f"{place}-v4")
    for label, place in (
        ("28 and 29 raw observations", "Hopper"),
        ("13 and 26 shared network", "Walker2d"),
        ("2 PyTorch's initialization", "HalfCheetah"),
        ("9 value loss not clipped", "HalfCheetah"),
    )
}


def plain(text: str) -> str:
    """A number as the tables have it."""
    return re.sub(r"\s+", " ", text).replace(" %", "%")


def wrong(text: str, rows: Callable[[str], Sequence[str]], folders: Folders) -> list[str]:
    """The intervals and percentages of a text whose mark is missing or says something else.

    Args:
        text: without generated blocks
        rows: the lines of a block, by its name
    """
    found = []
    for paragraph in text.split("\n\n"):
        *parts, rest = MARK.split(paragraph)  # text, and the two words of its mark
        found += [f"{x[0]} has no mark" for x in VALUE.finditer(rest)]
        for own, name, place in zip(parts[::3], parts[1::3], parts[2::3]):
            if name == "value":
                if not plain(own).endswith(known := plain(VALUES[place](folders))):
                    found.append(f"{place} is {known}")
                continue
            lines = [plain(x) for x in rows(name) if place in x]
            for number in [plain(x[0]) for x in VALUE.finditer(own)] or ["nothing"]:
                if not any(re.search(rf"(?<![\d.+-]){re.escape(number)}(?!\d)", x) for x in lines):
                    found.append(f"{number} is not in {name}: {place}")
    return found
