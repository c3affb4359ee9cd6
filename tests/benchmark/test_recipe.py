"""The recipe is what the rule in benchmark/README.md makes of the committed results."""

import inspect
import re

import pytest
import tyro
from test_since2017 import run

from benchmark.definitions import Folders
from benchmark.provenance import ROOT
from benchmark.report import statistics, tables
from benchmark.suites import SUITES, recipe
from benchmark.suites.since2017 import VARIANTS
from ppo_continuous_action import Args

FOLDERS = Folders()


def in_order():
    """Changes whose effect has an interval above 0, else the three best, the largest first.

    Of those that have all their runs.
    """
    suite = SUITES["since2017"]
    found, scores = tables.effects(suite, FOLDERS), tables.scores_of(suite, FOLDERS)
    runs = scores.groupby("label", observed=True).count().min(axis=1)
    effects = {x: found[y.title] for x, y in VARIANTS.items() if runs[y.title] == 5}
    ranked = sorted(effects, key=lambda x: -effects[x].value)
    return [x for x in ranked if effects[x].ends[0] > 0] or ranked[:3]


def touched(name):
    """What a change replaces: texts and flags."""
    variant = VARIANTS[name]
    return {x for x, _ in variant.replaced} | {x for x in variant.flags.split() if x[:2] == "--"}


def test_changes_are_tried_in_their_order_and_stay_where_the_mean_rises():
    suite, tried, stayed, best = SUITES["recipe_changes"], [], (), 1.0
    found = tables.beside_baseline(suite, FOLDERS, statistics.mean_ratio)
    for name in in_order():
        if touched(name).isdisjoint(x for other in stayed for x in touched(other)):
            tried.append(name)
            label = suite.variants["+".join((*stayed, name))].title
            if label in found and found[label].value > best:
                stayed, best = (*stayed, name), found[label].value
    assert (tuple(tried), stayed) == (recipe.TRIED, recipe.STAYED)


def best(names, suite, seeds):
    """Settings by the mean over environments of score / the default's; [] if a run lacks."""
    labels = {recipe.settings()[x].title: x for x in names}
    scores = tables.scores_of(suite, FOLDERS)
    own = scores[scores.index.isin(seeds, "seed") & scores.index.isin(labels, "label")]
    if not names or own.count().sum() < len(names) * len(seeds) * len(scores.columns):
        return []
    means = own.groupby("label", observed=True).mean()
    times = (means / scores.loc["default"].mean()).mean(axis=1)
    return [labels[x] for x in times.sort_values(ascending=False).index]


def test_the_settings_are_the_best_of_the_grid():
    search, changes = SUITES["recipe_search"], SUITES["recipe_changes"]
    half = best(recipe.settings(), search, (101,))[:18]
    assert sorted(half) == sorted(recipe.HALF)
    four = best(half, search, (101, 102))[:4]
    assert sorted(four) == sorted(recipe.FOUR)
    assert (best(four, changes, (103,))[:1] or [""]) == [recipe.BEST]


def test_the_page_gives_the_command_of_the_recipe():
    page = (ROOT / "benchmark/README.md").read_text()
    flags = re.search(r"The recipe is\n\n +python ppo_continuous_action.py (.*)", page)[1]
    confirmed = recipe.confirmed()["recipe"].flags
    assert tyro.cli(Args, args=flags.split()) == tyro.cli(Args, args=confirmed.split())
    text = (ROOT / "README.md").read_text()
    assert all(x in text for x in re.findall(r"--\S+ \S+", flags))


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (("relu", "gamma-0.98", "spo"), {"gamma": 0.98}),
        (
            ("wide-values", "std-0.5", "lr-kl"),
            {"learning_rate": 1e-3, "anneal_lr": False, "adapt_lr_kl": 0.01},
        ),
    ],
)
def test_changes_together_are_all_of_them(names, settings, changed_copy):
    variant = recipe.together(names)
    module = changed_copy(variant.script, variant.replaced, "together")
    text = inspect.getsource(module)
    assert all(new in text for x in names for _, new in VARIANTS[x].replaced)
    result = run(module, variant.flags)
    assert settings.items() <= vars(result["args"]).items()
    assert len(result["updates"]) == 2
