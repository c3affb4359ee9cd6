"""Suites as data, and selection of runs."""

import functools
import importlib
from pathlib import Path

import pytest
import tyro

from benchmark.evidence.runs import flags_of, folder_of, name_of, select
from benchmark.evidence.suites import SUITES
from benchmark.lab.definitions import Folders

FOLDERS = Folders()


def test_runs_go_seed_by_seed_and_only_selects_by_part_or_whole_name():
    def selected(seeds=(), only="*"):
        return [*map(name_of, select(SUITES["figure3"], seeds, only))]

    names = selected()
    assert names[:2] == ["HalfCheetah-v4/seed1", "Hopper-v4/seed1"]
    assert all(x.endswith("/seed1") for x in names[: 7 + 2])
    assert len(names) == len(set(names)) == 2 * 10 + 5 * 5 + 2 * 3
    assert selected(only="Ant-v4") == ["Ant-v4/seed1", "Ant-v4/seed2", "Ant-v4/seed3"]
    assert selected(only="HalfCheetah-v4/seed1") == ["HalfCheetah-v4/seed1"]  # and not seed10
    assert selected(only="*/seed10") == ["HalfCheetah-v4/seed10", "Swimmer-v4/seed10"]
    assert selected([7, 7], "Ant-v4") == ["Ant-v4/seed7"]
    (key,) = select(SUITES["table1"], [7], "Hopper-v4/fixed-3/*")
    folder = folder_of(SUITES["table1"], key, Folders(runs=Path("here")))
    assert folder == Path("here/table1/Hopper-v4/fixed-3/seed7").absolute()


@functools.cache
def settings_class(script):
    """`Args` of a script."""
    return importlib.import_module(script.removesuffix(".py").replace("/", ".")).Args


@pytest.mark.parametrize("suite", SUITES)
def test_every_variant_is_a_valid_command_line(suite):
    suite = SUITES[suite]
    for key in {key[1]: key for key in select(suite, seeds=[5])}.values():
        settings = settings_class(suite.variants[key[1]].script)
        args = tyro.cli(settings, args=flags_of(suite, key))
        assert args.seed == 5
        if suite.total_timesteps:
            assert args.env_id == key[0]
            assert args.total_timesteps >= args.num_envs * args.num_steps > 0
