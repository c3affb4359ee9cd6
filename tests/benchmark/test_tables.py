"""Tables by hand, and when figures are drawn."""

import math
import re

import pytest

from benchmark.evidence import pages, tables
from benchmark.lab import results
from benchmark.lab.definitions import Folders

FOLDERS = Folders()


# A suite, runs with their scores, and rows of the table, in which … stands for any text.
# Pong: from -20.7 to 9.3, 3 is 23.7 of 30. ppo2 was at 17.28 (16.87 to 17.69) at 1.92M, at 17.38
# (16.92 to 17.83) at 2.02M, in October at 13.86 (12.45 to 15.27) and 14.17 (12.83 to 15.52); half
# of these widths, times the root of six seeds, are 1.1 and 3.3. In minimal's nine pairs with its
# baseline, one is won and one is a tie. A single run has no P.
BY_HAND = """
figure3
figure3 Hopper-v4 10 20 30
figure3 Reacher-v4 -5
| Hopper-v4 | 3 | 20.0 ± 8.2 | 20.0 [10.0, 30.0] | 10.0 ± 4.1 | 0.50 | ≈ 2250 to 2330 | 2316 |…
| Reacher-v4 | 1 | -5.0 | -5.0 | -2.5 | 0.50 | ≈ -7.0 | -6.7 | – |…
|…4 of 51 runs are done.

games
games Pong 0 6
games Qbert 163.9
| Qbert | four frames, no memory | 1 | 164 | 0% | 82.0 | 0.50 |…| 164 | 13455 |
| Pong | four frames, no memory | 2 | 3.0 (0.0 to 6.0) | 79% | 1.5 ± 1.5 |…
| Pong |…| 17.4 ± 1.1 | 14.1 ± 3.3 | -20.7 | 9.3 |
|…2 of 15 runs are done.

scripts
games/lstm Pong 1 2 3
| [ppo_atari_lstm.py](ppo_atari_lstm.py) |… paper's | return | 2.0 ± 0.8 (3) | – | 17.4 ± 1.1 | 30 |
| [ppo_atari.py](ppo_atari.py) |… fall over 10M | return | 13.4 ± 3.0 (2) | – | 17.4 ± 1.1 | 77 |
| [ppo_minimal.py](ppo_minimal.py) |…| – | – | – |

minimal
figure3 Hopper-v4 10 20 30
minimal Hopper-v4 5 10 15
minimal Walker2d-v4 7
| ppo_continuous_action.py | – | 20.0 ± 8.2 (3) | – | – | – |
| ppo_minimal.py | – | 10.0 ± 4.1 (3) | 7.0 (1) | – | 0.17 […] |

"""


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.0021,), "0.00210"),
        ((-0.5,), "-0.500"),
        ((1.26,), "1.3"),
        ((99.94,), "99.9"),
        ((-99.96,), "-100"),
        ((0.0,), "0.0"),
        # A spread has the decimals of the number, unless it is larger.
        ((0.00213, 0.00004), "0.00213 ± 0.00004"),
        ((0.0, 0.05), "0.0000 ± 0.0500"),
        ((0.04, 3.21), "0.0 ± 3.2"),
        ((240.3, 0.5), "240 ± 0"),
    ],
)
def test_numbers_below_1_have_three_significant_digits(numbers, text):
    assert tables.number(*numbers) == text


def test_the_standard_deviation_is_divided_by_n_or_n_minus_1():
    assert tables.plus_minus([1.0, 3.0, math.nan]) == "2.0 ± 1.0"
    assert tables.plus_minus([1.0, 3.0, math.nan], ddof=1) == "2.0 ± 1.4"


@pytest.mark.parametrize("case", BY_HAND.strip().split("\n\n"))
def test_tables_by_hand(case, folders):
    suite, *lines = case.splitlines()
    folders.results.mkdir()
    for name, environment, *scores in (x.split() for x in lines if x[0] != "|"):
        name, _, variant = name.partition("/")
        path = folders.results / f"{name}.jsonl"
        about = {"environment": environment, "variant": variant, "hours": 0.5}
        about["settings"] = {"total_timesteps": 2_000_896}
        for seed, score in enumerate(map(float, scores), start=1):
            own = about | {"seed": seed, "score": score, "mean_return": score / 2}
            results.write_lines(path, [*results.lines_of(path), own])
    text = pages.block(suite, folders).replace("\n\n", "\n|")
    for row in (x for x in lines if x[0] == "|"):
        pattern = re.escape(row).replace("…", ".*")
        assert any(re.fullmatch(pattern, x) for x in text.splitlines()), row
