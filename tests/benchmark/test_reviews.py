"""What the site shows of PPO with each weight of the KL penalty: `results/reviews.json`.

Default runs with seed 1 were recorded once, by a module that is no longer here (it is in the commit
before e33962e). Three of the nine policies are also in the suite `rlhf`.
"""

import json

import numpy as np
import pytest

import ppo_rlhf_toy as rlhf
from benchmark.definitions import Folders
from benchmark.results import done

RECORDED = json.loads((Folders().results / "reviews.json").read_text())
MODELS = {x["beta"]: x for x in RECORDED["models"]}


@pytest.mark.parametrize(
    ("beta", "name"), [(None, "sft"), (0.0, "ppo-none"), (0.05, "ppo-fixed-0.05")]
)
def test_recorded_policies_are_those_of_the_suite(beta, name):
    made = done("rlhf", Folders())["reviews", "", RECORDED["seed"]]["models"][name]
    for metric in ("objective/gold", "objective/proxy", "objective/kl", "text/unique"):
        assert MODELS[beta][metric.split("/")[1]] == round(made[metric], 3)


def test_gold_of_every_recorded_review_is_that_of_the_formula():
    """In standard deviations of the SFT model's reviews: on another scale, the same for all."""
    rows = [x for model in MODELS.values() for x in model["reviews"]]
    topics = [x["prompt"].split()[3] for x in rows]
    formula = [rlhf.gold_reward(y, x["text"].split()) for x, y in zip(rows, topics)]
    gold = [x["gold"] for x in rows]
    assert len(gold) == 72 and len({*formula}) > 30
    assert np.allclose(np.polyval(np.polyfit(formula, gold, 1), formula), gold, atol=0.006)
