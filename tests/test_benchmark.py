"""Statistics on arrays that a person can check, suites, tables, figures and committed results."""

import ast
import contextlib
import functools
import importlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import tyro
from PIL import Image
from scipy import stats

import ppo_continuous_action
from benchmark import pages, plots, results, runs, statistics, suites, tables, throughput
from benchmark.__main__ import main
from benchmark.provenance import ROOT, BenchmarkError, git, source_at

FOLDERS = runs.Folders()
HAS_GIT = shutil.which("git") is not None and (ROOT / ".git").exists()
PENDULUM = "InvertedPendulum-v4"


@pytest.fixture
def folders(tmp_path):
    return runs.Folders(tmp_path / "results", tmp_path / "runs")


@pytest.fixture
def bench(folders):
    """Run a command of the benchmark with these folders."""
    return lambda *words: main(
        [*words, "--results", str(folders.results), "--runs", str(folders.runs)]
    )


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn in a test."""
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    yield figures
    monkeypatch.undo()
    plots.plt.close("all")


def add(folders, name, environment, *scores, **more):
    """Runs of `suite/variant`, seeds 1, 2, ..., whose curves rise to their scores (None: none)."""
    suite, _, variant = name.partition("/")
    for seed, score in enumerate(scores, start=1):
        key = {"environment": environment, "variant": variant, "seed": seed}
        record = {**key, "score": score, "mean_return": score and score / 2, "hours": 0.5}
        record["settings"] = {"total_timesteps": 1_000_000, "target_kl": 0.01}
        record |= more
        steps = 10_000 * np.arange(1, 101)
        metrics = dict.fromkeys(runs.STEP_METRICS.values(), 0.02)
        rows = pd.DataFrame({**key, "step": steps, "episodes": 1, **metrics})
        rows["return"] = math.nan if score is None else score * steps / 1e6
        results.merge(suite, [record], rows, folders)


# --- Statistics ---


def test_interval_is_stratified_and_lies_within_the_scores_around_their_mean():
    value, (low, high) = statistics.estimate([np.arange(10.0)], np.mean)
    assert 2 < low < value == 4.5 < high < 7
    assert statistics.estimate([np.arange(10.0)], np.mean).ends == (low, high)
    assert statistics.estimate([np.array([3.0, 4.0])], np.mean) == (3.5, None)
    # Environments on different scales but without spread between seeds: nothing is uncertain.
    strata = [np.array([1.0, 1.0, 1.0]), np.array([9.0, 9.0, 9.0])]
    assert statistics.estimate(strata, statistics.mean_of_strata) == (5.0, (5.0, 5.0))


UP, DOWN = (5.0, 6.0), (1.0, 2.0)


@pytest.mark.parametrize(
    ("statistic", "strata", "value"),
    [
        # The outer quarters of four or more are ignored.
        ("interquartile_mean", [(100, 1, 3, 2, 5, 4, 6, 7)], 4.5),
        ("interquartile_mean", [(1, 2, 6)], 3),
        # Of the four pairs (1,2) (1,3) (3,2) (3,3) one is won and one is a tie.
        ("improvement", [(1, 3), (2, 3)], 0.375),
        ("improvement", [UP, DOWN, DOWN, UP], 0.5),
        ("improvement", [UP, DOWN, UP, DOWN], 1),
        # -50 % in the first environment, +10 % in the second, where returns are negative.
        ("relative_effect", [(1, 1), (2, 2), (-9,), (-10,)], -0.2),
        # The median of +800 %, -50 % and +10 %.
        ("relative_effect", [(9,), (1,), (1, 1), (2, 2), (-9,), (-10,)], 0.1),
    ],
)
def test_statistics_by_hand(statistic, strata, value):
    found = getattr(statistics, statistic)(*(np.array(x, dtype=float) for x in strata))
    assert found == pytest.approx(value)


def test_rank_correlation_is_spearmans_of_the_means_over_environments_and_seeds():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(11, 7, 3)), rng.normal(size=11)
    theirs[3] = theirs[4]  # a tie
    value, ends = statistics.estimate([*ours.reshape(77, 3)], statistics.rank_correlation(theirs))
    assert value == pytest.approx(stats.spearmanr(ours.mean((1, 2)), theirs).statistic)
    assert ends[0] < value < ends[1]


@pytest.mark.parametrize(
    ("value", "text"), [(99.94, "99.9"), (99.97, "100"), (-99.97, "-100"), (5.04, "5.0")]
)
def test_a_number_has_a_decimal_unless_that_is_a_fourth_digit(value, text):
    assert tables.number(value) == tables.number(np.float64(value)) == text


# --- From logs to results ---


def test_status_keeps_its_columns_apart_after_the_longest_names(folders, capsys):
    main(["status", "table1", "--results", str(folders.results), "--runs", str(folders.runs)])
    rows = [x.split()[1:] for x in capsys.readouterr().out.splitlines()]
    assert rows == [["waiting", "0%"]] * 231


def test_summary_of_runs_of_ones_own(tmp_path, capsys):
    for k in range(3):
        (tmp_path / f"run{k}").mkdir()
        episodes = [{"return": 1e9}, *[{"return": 10.0 * k}] * runs.LAST_EPISODES]
        saved = {"script": "ppo_x", "args": {"env_id": "Hopper-v4"}, "episodes": episodes}
        torch.save(saved, tmp_path / f"run{k}" / "checkpoint.pt")
    main(["summary", *map(str, sorted(tmp_path.iterdir()))])
    row = "| ppo_x | Hopper-v4 | 3 | 10.0 ± 8.2 | 10.0 [0.0, 20.0] |"
    assert row in capsys.readouterr().out
    with pytest.raises(BenchmarkError, match="There is no"):
        tables.summary([tmp_path])
    torch.save(saved | {"episodes": []}, tmp_path / "checkpoint.pt")
    with pytest.raises(BenchmarkError, match="No episode has ended"):
        tables.summary([tmp_path])


def test_thin_averages_by_stretch_of_steps():
    episodes = [  # the end of a stretch belongs to it
        {"global_step": step, "return": x}
        for step, x in ((1, 1.0), (70, 3.0), (61, 5.0), (71, 7.0))
    ]
    table = runs.thin(episodes, [{"global_step": 90, "losses/approx_kl": 0.5}], 1000)
    assert table["step"].tolist() == [10, 70, 80, 90]
    assert table["episodes"].tolist() == [1, 2, 1, 0]
    assert table["return"].tolist()[:3] == [1.0, 4.0, 7.0] and math.isnan(table["return"][3])
    assert table["approx_kl"].tolist()[3] == 0.5 and table["approx_kl"].isna().sum() == 3


def test_result_of_a_run_in_steps(folders):
    run = runs.make_run("smoke", PENDULUM, "", 1, folders)
    assert not run.is_finished() and run.command[-2:] == ["--run-name", "run"]
    run.checkpoint.parent.mkdir(parents=True)
    rates = [(50, 100), (100, 200), (1, 1)]  # the last iteration was paused
    saved = {
        "args": {"num_steps": 1000, "num_envs": 1, "target_kl": math.inf, "run_name": "run"},
        "episodes": [{"global_step": 10 * i, "return": float(i)} for i in range(1, 151)],
        "updates": [
            {"global_step": 1000 * i, "charts/SPS_rollout": a, "charts/SPS_update": b}
            for i, (a, b) in enumerate(rates, start=1)
        ],
    }
    for step, finished in ((3000, False), (4000, True)):
        torch.save(saved | {"global_step": step}, run.checkpoint)
        assert (run.progress(), run.is_finished()) == (step, finished)
    assert run.command[-2:] == ["--resume", "runs/run"]
    facts, rows = run.result()
    assert facts["settings"] == {"num_steps": 1000, "num_envs": 1, "target_kl": None}
    assert facts["score"] == np.mean(range(51, 151)) and facts["mean_return"] == 75.5
    assert facts["seconds"] == 20 + 10 + 10 + 5 + 1000 + 1000
    assert facts["hours"] == pytest.approx(3000 * (1 / 50 + 1 / 100) / 3600, abs=1e-6)
    assert rows["episodes"].sum() == facts["episodes"] == 150
    torch.save(saved | {"global_step": 4000, "episodes": []}, run.checkpoint)
    facts, rows = run.result()
    assert facts["score"] is None and rows["return"].isna().all()


def test_runs_without_finished_episodes_are_counted_but_have_no_score(folders, tmp_path):
    add(folders, "figure3", "Hopper-v4", 10.0, None)
    for name in ("kl_vs_clip/adaptive-0.01", "ablation/lambda-1", "table1/none"):
        add(folders, name, "Hopper-v4", None, None)
    found = {x: tables.suite_table(x, folders) for x in suites.SUITES}
    assert "| Hopper-v4 | 1 of 2 | 10.0 | 10.0 | 5.0 |" in found["figure3"]
    assert "| – (0 of 2) |" in found["kl_vs_clip"]
    assert "| 5 λ = 1 | – (0 of 2) | – | – | – |" in found["ablation"]
    assert re.search(
        r"no clipping or penalty \|.* – \(0 of 2\) \|.*\| – \| -0.39 \|", found["table1"]
    )
    for suite, kind in (("figure3", "curves"), ("figure3", "health"), ("kl_vs_clip", "trace")):
        assert plots.update(suite, kind, folders, tmp_path).exists()


# --- Suites and selection ---


def test_runs_go_seed_by_seed_and_only_selects_by_part_or_whole_name():
    def selected(seeds=(), only="*"):
        return [run.name for run in runs.select("figure3", FOLDERS, seeds, only)]

    names = selected()
    assert names[:2] == ["HalfCheetah-v4/seed1", "Hopper-v4/seed1"]
    assert names.index("Reacher-v4/seed1") < names.index("Hopper-v4/seed2")
    assert len(names) == len(set(names)) == 2 * 10 + 5 * 5 + 2 * 3
    assert selected(only="Ant-v4") == ["Ant-v4/seed1", "Ant-v4/seed2", "Ant-v4/seed3"]
    assert selected(only="HalfCheetah-v4/seed1") == ["HalfCheetah-v4/seed1"]  # and not seed10
    assert selected(only="*/seed10") == ["HalfCheetah-v4/seed10", "Swimmer-v4/seed10"]
    assert selected([7, 7], "Ant-v4") == ["Ant-v4/seed7"]


def test_table1_has_the_papers_settings():
    variants = suites.SUITES["table1"].variants
    for row, (name, variant) in zip(results.reference("table1"), variants.items(), strict=True):
        assert row["variant"] == name and variant.label.startswith(row["objective"])
        assert variant.label.endswith(f"= {row['value']}" if row["value"] else "penalty")
    assert len(runs.select("table1", FOLDERS)) == 231


def test_every_switch_of_the_script_is_ablated():
    flags = {flag for _, own in suites.ABLATIONS.values() for flag in own.split()}
    for field, value in vars(ppo_continuous_action.Args()).items():
        if value is True and field != "compile":
            assert f"--no-{field.replace('_', '-')}" in flags
    optional = {"clip_obs", "clip_reward", "max_grad_norm", "target_kl"}
    for field in optional | {"adam_eps", "gae_lambda", "shared_network", "truncation_is_terminal"}:
        assert "--" + field.replace("_", "-") in flags


@functools.cache
def settings_class(script):
    """`Args` of a script."""
    return importlib.import_module(script.removesuffix(".py").replace("/", ".")).Args


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_variant_is_a_valid_command_line(suite):
    for run in runs.select(suite, FOLDERS, seeds=[5]):
        args = tyro.cli(settings_class(run.definition.script), args=run.flags)
        assert args.seed == 5
        if run.definition.script == suites.RLHF:
            assert args.num_updates * 3 == run.total_steps
        elif not isinstance(run, runs.Stages):
            assert args.env_id == run.environment and args.num_iterations > 0


def test_list_shows_suites_and_the_runs_of_one(folders, bench, capsys):
    add(folders, "smoke", PENDULUM, 1.0)
    bench("list")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(suites.SUITES) and lines[0].split()[:4] == ["smoke", "1", "of", "2"]
    bench("list", "ablation", "--only", "lambda-1")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15 and lines[0].startswith("Hopper-v4/lambda-1/seed1 ")
    assert lines[0].endswith("--seed 1 --total-timesteps 1000000 --gae-lambda 1.0")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("run figure4", "There is no suite figure4; there are: smoke, figure3"),
        ("run figure3 --only Hoper-v4", "No run of figure3 fits Hoper-v4"),
        ("run figure3 --workers 0", "--workers must be positive"),
        ("run figure3 --seeds 1 -3", "A seed must not be negative: -3."),
        ("run smoke --commit nonsense", "git rev-parse"),
        ("run multidiscrete_vs_gaussian --commit FIRST", "ppo_multidiscrete.py"),
        ("run smoke --cluster ray --workers 3", "--workers is for local runs"),
        (f"run smoke --runs {__file__}", f"smoke/{PENDULUM}"),
        ("status figure4", "There is no suite figure4"),
        ("plot figure4", "There is no suite figure4"),
        ("plot ablation", "No run of ablation is finished"),
        ("compare figure3 table1/clip", "There is no table1/clip; there is table1/none or"),
        ("compare figure3/x figure3", "There is no figure3/x; there is figure3."),
        ("throughput chess", "There is no contest chess"),
        ("throughput --repetitions 0", "--repetitions must be positive"),
        ("report", "There is no folder"),
    ],
)
def test_what_cannot_be_done_gets_one_sentence(line, sentence, folders, capsys):
    if "FIRST" in line:  # a commit that has not all scripts
        line = line.replace("FIRST", git("rev-list", "--max-parents=0", "HEAD").split()[-1])
    place = ["--results", str(folders.results)]
    place += [] if "--runs" in line else ["--runs", str(folders.runs)]
    with pytest.raises(SystemExit) as end:
        main([*line.split(), *place])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert sentence in captured.err + captured.out
    assert captured.err.startswith("Error: ") and len(captured.err.splitlines()) == 1
    assert not folders.results.exists() and not folders.runs.exists()


# --- Tables and figures ---


def test_scores_table_by_hand(folders):
    add(folders, "figure3", "Hopper-v4", 1000, 2000, 3000, 4000, 9000)
    add(folders, "figure3", "Ant-v4", 5.0)
    hopper, ant = tables.scores_table("figure3", folders).splitlines()[2:]
    assert hopper.startswith("| Hopper-v4 | 5 | 3800 ± 2786 | 3000 [")
    assert "] | 1900 ± 1393 | 0.50 | ≈ 2250 to 2330 |" in hopper and "| 2383 ± 272 |" in hopper
    assert ant.startswith("| Ant-v4 | 1 | 5.0 | 5.0 | 2.5 | 0.50 | – | – |")


def test_comparison_of_variants(folders):
    for seeds in (1, 2, 3):
        add(folders, "figure3", "Hopper-v4", *(10.0, 20.0, 30.0)[:seeds])
        add(folders, "kl_vs_clip/adaptive-0.01", "Hopper-v4", *(5.0, 10.0, 15.0)[:seeds])
        # Of few runs nothing is said, least of all 0 or 1.
        table = tables.compare("figure3", "kl_vs_clip/adaptive-0.01", folders)
        assert (f"({seeds}) | – |\n| kl_vs" in table) == (seeds < 3)
    # Of the pairs of (10, 20, 30) and (5, 10, 15) one is lost, one a tie, seven are won.
    assert "| figure3 | 20.0 ± 8.2 (3) | 0.83 [" in table
    assert "| kl_vs_clip/adaptive-0.01 | 10.0 ± 4.1 (3) | – |" in table
    table = tables.suite_table("kl_vs_clip", folders)
    assert "| clipping, ε = 0.2 | – | 20.0 ± 8.2 (3) |" in table and "0.17 [" in table
    with pytest.raises(BenchmarkError, match="no results in a common environment"):
        tables.compare("figure3", "table1/clip-0.2", folders)


def test_a_suite_of_several_variants_needs_no_baseline(folders, monkeypatch, tmp_path):
    variants = {"a": suites.Variant("x.py", "", "A"), "b": suites.Variant("x.py", "", "B")}
    monkeypatch.setitem(suites.SUITES, "new", suites.Suite("nothing", {"X-v1": (1,)}, variants))
    for variant in variants:
        add(folders, f"new/{variant}", "X-v1", 5.0)
    assert tables.suite_table("new", folders).splitlines() == [
        *("| mean ± std (seeds) | X-v1 |", "|---|--:|", "| A | 5.0 (1) |", "| B | 5.0 (1) |")
    ]
    assert plots.update("new", "curves", folders, tmp_path).exists()


def test_table1_scores_are_normalized_per_environment(folders, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "random_returns", {"Hopper-v4": 0.0, "Swimmer-v4": 10.0}.get)
    for name in suites.SUITES["table1"].variants:
        add(folders, f"table1/{name}", "Hopper-v4", -50.0)
        if name != "none":
            add(folders, f"table1/{name}", "Swimmer-v4", 20.0)
    add(folders, "table1/clip-0.2", "Hopper-v4", 100.0)
    add(folders, "table1/clip-0.2", "Swimmer-v4", 20.0, 30.0)

    def row(label):
        table = tables.suite_table("table1", folders)
        return next(x for x in table.splitlines() if x.startswith(f"| {label} |"))

    # As long as a setting lacks Swimmer, nobody's average includes it.
    assert "| 25.0 ± 5.0 (2) | – | 1.00 | 0.82 |" in row("clipping, ε = 0.2")
    assert "| -50.0 (1) |" in row("no clipping or penalty")
    assert "| -0.50 | -0.39 |" in row("no clipping or penalty")
    add(folders, "table1/none", "Swimmer-v4", 10.0)
    # The best run of Hopper has 100, that of Swimmer 30: (1 + (0.5 + 1) / 2) / 2.
    assert "| 0.88 | 0.82 |" in row("clipping, ε = 0.2")
    assert "| -0.25 | -0.39 |" in row("no clipping or penalty")
    assert "Rank correlation of the two columns: " in tables.suite_table("table1", folders)
    ours, theirs = [-0.25, 0, 0.88] + [0] * 8, results.by_variant("table1", "score").values()
    ranks = [stats.spearmanr(ours[x:], list(map(float, theirs))[x:]).statistic for x in (0, 1)]
    said = "Rank correlation of the two columns: {:.2f}; without the first row: {:.2f}.\n"
    assert tables.suite_table("table1", folders).endswith(said.format(*ranks))
    assert plots.update("table1", "normalized", folders, tmp_path).exists()


def test_effects_of_details_against_the_default(folders, drawn, tmp_path):
    add(folders, "figure3", "Hopper-v4", 1900.0)
    add(folders, "ablation/shared-network", "Hopper-v4", 1425.0)
    assert "nan" not in tables.suite_table("ablation", folders)
    add(folders, "figure3", "Hopper-v4", 1800.0, 1900.0, 2000.0)
    add(folders, "figure3", "Walker2d-v4", *[1.0] * 3)
    add(folders, "ablation/raw-rewards", "Hopper-v4", *[950.0] * 3)
    add(folders, "ablation/raw-rewards", "Walker2d-v4", 9.0)  # not all rows have it: in no average
    table = tables.suite_table("ablation", folders)
    assert "| default | 1900 ± 82 (3) | 1.0 ± 0.0 (3) | – | – |" in table
    assert "| 30 and 31 raw rewards | 950 ± 0 (3) | 9.0 (1) | – | -50% [-" in table
    assert "| 13 and 26 shared network | 1425 (1) | – | – | -25% | A: worse" in table
    plots.update("ablation", "effects", folders, tmp_path)
    (axes,) = drawn[0].axes
    lines = [x for x in axes.lines if x.get_label()[0] != "_"]
    points = [(x.get_label(), *x.get_xdata(), x.get_markerfacecolor()) for x in lines]
    # In the order of the details, as long as some effect is one of chance.
    assert points[:2] == [("ours", -0.25, "white"), ("ours", -0.5, "C0")]
    assert points[2] == ("Hopper-v4", -0.25, -0.5, "C1")
    (theirs,) = points[3:]  # the only number about one of these rows
    assert theirs[0].startswith("Andrychowicz") and theirs[1] == pytest.approx(1190 / 1360 - 1)
    claims = [x.get_text() for x in axes.texts]
    assert claims == ["A: worse in 4 of 5 environments", "E: scaling needed"]
    add(folders, "ablation/shared-network", "Hopper-v4", 1425.0, 1425.0, 2400.0)
    plots.update("ablation", "effects", folders, tmp_path)
    first, *_, second = (x for x in drawn[1].axes[0].lines if x.get_label().startswith("ours"))
    assert first.get_xdata()[0] == -0.5  # worst first
    assert second.get_label() == "ours, with 0 in the interval"


def test_published_effects_are_of_the_same_environments():
    environments = ["Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"]
    found = {variant: x for (_, variant), x in tables.published_effects(environments).items()}
    # Engstrom et al. 2020, Tables 2 and 3: Walker2d 2867 of 3292, Hopper 2371 of 2513.
    assert found["no-clip"] == pytest.approx((2867 / 3292 + 2371 / 2513) / 2 - 1)
    # Andrychowicz et al. 2021, choice C47: Hopper, Walker2d and HalfCheetah; off against on.
    expected = 1190 / 1360 - 1  # the median; 685 / 660 is higher, 2000 / 2320 lower
    assert found["shared-network"] == pytest.approx(expected)


def test_figures_have_a_panel_per_environment_and_a_line_per_seed(folders, drawn, tmp_path):
    add(folders, "figure3", "Hopper-v4", 100.0, 200.0, 300.0)
    add(folders, "figure3", "Ant-v4", 5.0)
    add(folders, "kl_vs_clip/adaptive-0.01", "Hopper-v4", 5.0, 5.0)
    path = plots.update("figure3", "curves", folders, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    hopper, ant = drawn[0].axes
    assert [x.get_title() for x in (hopper, ant)] == ["Hopper-v4\n3 seeds", "Ant-v4\n1 seed"]
    labels = [line.get_label() for line in hopper.lines]
    assert "ours" in labels and "ppo2 2018 (v2, 6 seeds)" in labels
    mean = hopper.lines[labels.index("ours")].get_ydata()
    assert mean[-1] == pytest.approx(200.0)  # of seeds that end at 100, 200 and 300
    assert len(ant.collections) == 0  # no band from one seed
    path = plots.update("kl_vs_clip", "trace", folders, tmp_path)
    assert path.name == "kl_vs_clip_trace.png"
    assert [set(x.get_ydata()) for x in drawn[1].axes[0].lines] == [{0.02}, {0.02}, {0.01}]


def test_a_figure_is_drawn_again_only_after_what_it_shows_has_changed(
    folders, monkeypatch, tmp_path
):
    def update():
        return plots.update("kl_vs_clip", "curves", folders, tmp_path, always=False)

    add(folders, "figure3", "Hopper-v4", 5.0)
    add(folders, "kl_vs_clip/adaptive-0.01", "Hopper-v4", 5.0)
    assert update() and not update()
    add(folders, "figure3", "Ant-v4", 5.0)  # has no panel
    assert not update()
    add(folders, "figure3", "Hopper-v4", 5.0, 5.0)  # another seed of the baseline
    assert update() and not update()
    copy = tmp_path / "reference"
    shutil.copytree(plots.REFERENCE, copy)
    monkeypatch.setattr(plots, "REFERENCE", copy)
    assert not update()
    (copy / "scores.csv").write_text((copy / "scores.csv").read_text().replace("Hopper", "hopper"))
    assert update()


def test_walking_table_by_hand(folders):
    walk = {"returns": [1.0, 2.0, 3.0], "lengths": [10, 20, 60], "speeds": [0.5] * 3}
    add(folders, "humanoid_elsewhere/table4", "Ant-v4", 1500.0, walk=walk)
    reached = "0.67 | – | –"  # 1000, 2000 and 4000
    row = f"| 1 | {reached} | 1500 | 2.0 ± 0.8 | 30.0 | 0.50 [0.50, 0.50] |"
    assert row in tables.suite_table("humanoid_elsewhere", folders)


def test_rlhf_result_tables_and_figure(folders, tmp_path):
    """A finished run of the script as the script leaves it, with invented numbers."""
    run = runs.make_run("rlhf", "reviews", "", 2, folders)
    models = {
        name: dict.fromkeys(tables.MODEL_COLUMNS.values(), 0.5) | {"objective/gold": gold}
        for name, gold in [("ppo-adaptive-6", 1.25), ("ppo-none", -5.0), ("best-of-16", 1.0)]
    }
    settings = {"seed": 2, "target_kl": 6.0, "value_clip_coef": math.inf, "run_name": "run"}
    content = {"args": settings, "quality": {"accuracy": 0.8, "correlation": 0.7}}
    for name, kl in (("ppo-adaptive-6", 6.5), ("ppo-none", 90.0)):
        metrics = dict.fromkeys(runs.STAGE_METRICS, 0.25) | {"objective/kl": kl, "losses/loss": 7}
        (run.log / name).mkdir(parents=True)
        torch.save({"updates": [metrics] * 3}, run.log / name / "checkpoint.pt")
    runs.write_note(run, {"starts": 1, "crashes": 0, "commit": "abc", "peak_mib": 512})
    (run.folder / "ppo_rlhf_toy.py").touch()
    assert not run.is_finished() and run.progress() == 6
    (run.log / "results.json").write_text(json.dumps(content | {"results": models}))
    assert run.is_finished() and run.flags == ["--seed", "2", "--compare"]
    results.add(run)
    (result,) = results.by_environment("rlhf", "", folders)["reviews"]
    assert result.record["settings"] == {"seed": 2, "target_kl": 6.0, "value_clip_coef": None}
    assert list(result.curve["stage"]) == ["ppo-adaptive-6"] * 3 + ["ppo-none"] * 3
    assert result.curve["kl"].tolist() == [6.5] * 3 + [90.0] * 3
    assert result.record["score"] == 1.25
    text = tables.suite_table("rlhf", folders)
    assert "| ppo-none | -5.00 | 0.50 |" in text
    assert re.search(r"\| 2 \| 0.800 \| 0.700 \| 1.25 \| 6.50 \(6\) \| .* \| 0 \| 512 \|\n", text)
    assert "| `rlhf` | 1 of 5 | 0.0 | Gao" in tables.suites_table(folders)
    assert plots.update("rlhf", "frontier", folders, tmp_path).stat().st_size > 10_000


# --- Pages ---


def test_details_name_every_tag_and_the_scripts_that_have_it(folders):
    text = pages.details(FOLDERS)
    rows = [[x.strip() for x in row.split("|")[1:-1]] for row in text.splitlines()]
    rows = {(row[0], row[1]): row for row in rows if len(row) == 5 and row[2] != "---"}
    assert next(iter(rows)) == ("detail", "name")
    numbers = [number for number, _ in rows if number.endswith("/37")]
    assert numbers == [f"{number}/37" for number in range(1, 38)]
    for path in ROOT.glob("*.py"):
        source = path.read_text()
        for (number, name), row in rows.items():
            head = f"Detail {number}" if "/" in number else number.title()
            has = re.search(rf"# {head}: {re.escape(name)}(?: [\[(].*)?$", source, re.MULTILINE)
            assert bool(has) == (f"]({path.name})" in row[4]), (path.name, number, name)
    assert all(row[2].endswith(".") for row in list(rows.values())[1:])
    used = {x for row in results.reference("details") for x in row["variants"].split()}
    assert used == set(suites.ABLATIONS)
    for seeds, worth in ((1, "-50%"), (3, "-50% [-50%, -50%]")):
        add(folders, "figure3", "Hopper-v4", *[10.0] * seeds)
        add(folders, "ablation/lambda-1", "Hopper-v4", *[5.0] * seeds)
        assert f"| λ = 1: {worth} |" in pages.details(folders)


def test_pages_are_written_where_they_differ(folders, monkeypatch, tmp_path):
    page, details = tmp_path / "page.md", tmp_path / "DETAILS.md"
    page.write_text("Before\n<!-- generated: scripts -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(pages, "PAGES", (page,))
    monkeypatch.setattr(pages, "DETAILS", details)
    add(folders, "figure3", "HalfCheetah-v4", 500.0, 1000.0, 1500.0)
    assert pages.write(folders) == [page, details]
    assert page.read_text().startswith("Before\n<!-- generated: scripts -->\n\n| script |")
    assert page.read_text().endswith("\n<!-- end -->\nafter\n") and "old" not in page.read_text()
    ours, theirs = "3 | 1000 ± 408 | 1000 [500, 1500]", "1443 ± 46; 2906 ± 1129"
    assert f"| HalfCheetah-v4 | {ours} | {theirs} | 0.50 | – |" in page.read_text()
    assert pages.write(folders) == []
    page.write_text("<!-- generated: nonsense -->\n<!-- end -->\n")
    with pytest.raises(BenchmarkError, match="no block nonsense"):
        pages.write(folders)


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """Only the results that git knows, so that a suite may run while the tests do."""
    if not HAS_GIT:
        return FOLDERS
    folder = tmp_path_factory.mktemp("committed")
    for name in git("ls-files", "-z", "benchmark/results").split("\0")[:-1]:
        (folder / Path(name).name).write_text(git("show", f"HEAD:{name}"))
    return runs.Folders(folder, FOLDERS.runs)


def test_committed_pages_are_those_of_the_committed_results(committed):
    for page in pages.PAGES:
        assert pages.filled(page.read_text(), committed) == page.read_text(), page
    assert pages.details(committed) == pages.DETAILS.read_text()


SHOWN = [(suite, kind) for suite, x in suites.SUITES.items() for kind in x.figures]


@pytest.mark.parametrize(("suite", "kind"), SHOWN, ids=lambda x: x)
def test_committed_figures_show_the_committed_results(suite, kind, committed):
    """Fails after new results until `python -m benchmark plot` has drawn them."""
    path = plots.FIGURES / f"{suite}{plots.KINDS[kind][1]}.png"
    assert path.exists() == (suite != "smoke" and bool(results.done(suite, committed)))
    if path.exists():
        digest = plots.digest(plots.results_of(suite, committed), kind)
        assert Image.open(path).text["Source"] == f"results {digest}"


def test_every_published_number_is_read():
    sources = "".join(x.read_text() for x in (ROOT / "benchmark").glob("*.py"))
    for path in set(plots.REFERENCE.iterdir()) - {plots.REFERENCE / "README.md"}:
        assert path.name in sources or f'reference("{path.stem}")' in sources, path


# --- Throughput ---


def test_rates_leave_out_start_and_first_iteration():
    rates = throughput.rates([(100, 7.0, 5.0), (200, 9.0, 6.0), (300, 11.0, 7.0)])
    # 200 steps in 4 seconds; the first 100 ended after 7, of which they take 2.
    assert list(rates.values()) == [50, 100, 5.0]


@pytest.mark.parametrize("contest", throughput.CONTESTS)
def test_every_contender_has_a_valid_command_line_and_equal_work(contest):
    settings = set()
    for contender in throughput.CONTESTS[contest].contenders:
        args = tyro.cli(settings_class(str(contender.file)), args=contender.arguments)
        batch = args.num_envs * args.num_steps
        shown = getattr(args, "checkpoint_interval", 1) * batch
        assert max(10 * batch, 3 * shown) <= contender.steps < args.total_timesteps
        settings.add((batch, args.num_minibatches, args.update_epochs, args.learning_rate))
    assert len(settings) == 1


# Shows a step now and then; with a fuse that burns, it fails in between.
CONTENDER = """
import json, pathlib, sys, time
pace, fuse = float(sys.argv[4]), pathlib.Path(sys.argv[5])
for step in range(0, 60, 10):
    end = time.process_time() + pace
    while time.process_time() < end: pass
    if step == 30 and fuse.exists():
        sys.exit("Error: blown")
    with open("progress.json", "a") as file:
        print(json.dumps({"time/total_timesteps": step}), file=file)
time.sleep(60)
"""


def test_a_contest_continues_and_fewer_repetitions_replace_none(
    folders, bench, monkeypatch, tmp_path, capsys
):
    ours = throughput.Contender("ours", 50, "--pace 0.02 none", "x.py", 2.0)
    theirs = throughput.Contender("theirs, slow", 50, f"--pace 0.06 {tmp_path}/fuse", "x.py")
    contest = throughput.Contest("Two", (ours, theirs))
    monkeypatch.setattr(throughput, "CONTESTS", {"two": contest})
    monkeypatch.setattr(throughput, "source_at", lambda commit, file: CONTENDER)
    (tmp_path / "fuse").touch()
    with pytest.raises(SystemExit):
        bench("throughput", "--repetitions", "2")
    assert "Error: theirs, slow failed: Error: blown" in capsys.readouterr().err
    path = folders.results / "throughput.jsonl"
    assert [x["contender"] for x in results.lines_of(path)] == ["ours"]
    assert pages.throughput_tables(folders) == ""  # no repetition is complete
    (tmp_path / "fuse").unlink()
    bench("throughput", "--repetitions", "2")
    lines = results.lines_of(path)
    assert [(x["repetition"], x["contender"]) for x in lines] == [
        *((0, "ours"), (0, "theirs, slow"), (1, "ours"), (1, "theirs, slow"))
    ]
    assert all(x["peak_mib"] > 5 and x["steps_per_second"] > 0 for x in lines)
    text = pages.throughput_tables(folders)
    assert "**Two**, 2 repetitions in turns" in text and "| × theirs, slow |" in text
    measured = pages.measured(folders)["two"]
    by_processor = pages.ratios(measured, "ours", "steps_per_cpu_second")
    assert 1.95 <= by_processor.median() < 4.95  # of time on the clock a busy machine decides
    pairs = zip(lines[::2], lines[1::2], strict=True)
    ratios = [x["steps_per_second"] / y["steps_per_second"] for x, y in pairs]
    shown = f"{np.mean(ratios):.1f} × theirs"
    assert pages.speed(measured) == shown
    for fewer, commit in ((True, "a"), (False, "b")):
        for line in lines[: 2 if fewer else 4]:
            rate = 99.0 if line["contender"] == "ours" else 1.0
            results.append(path, line | {"commit": commit, "steps_per_second": rate})
        expected = shown if fewer else "99.0 × theirs"
        assert pages.speed(pages.measured(folders)["two"]) == expected


@pytest.mark.slow
def test_peers_and_profile():
    """The real ones, each for a few iterations."""
    contest = throughput.CONTESTS["multidiscrete_small"]
    ours, peer = contest.contenders
    short = throughput.Contender("peer", 2048, peer.flags, peer.script)
    found = throughput.measure(short, "HEAD", 1)
    assert found["steps_per_second"] > 100 and found["peak_mib"] > 100
    short = throughput.Contender(ours.name, 4096, ours.flags)
    parts = throughput.profile(throughput.Contest("short", (short,), 1, contest.physics), "HEAD")
    assert next(iter(parts)) == "physics" and all(value > 0 for value in parts.values())
    assert "| whole step | " in pages.profile_table("x", parts)


def test_stopped_throughput_leaves_no_process_behind(tmp_path):
    command = [sys.executable, "-m", "benchmark", "throughput", "continuous"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([*command, "--results", tmp_path / "r"], cwd=ROOT, env=env)
    deadline = time.monotonic() + 120
    pids = []
    try:
        while not pids:  # until the first contender runs
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
            with contextlib.suppress(psutil.NoSuchProcess):  # git may have just ended
                children = psutil.Process(process.pid).children()
                pids = [x.pid for x in children if "ppo_continuous_action.py" in x.cmdline()]
        time.sleep(0.5)  # it has begun, but whoever began it may not know yet
    finally:
        process.terminate()
    assert process.wait(60) == 130
    assert not any(map(psutil.pid_exists, pids))
    assert not list(tmp_path.iterdir())


# --- Committed results ---


@functools.cache
def settings_of(source):
    """Names of the fields of `Args` in a script."""
    tree = ast.parse(source)
    args = next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args")
    return {x.target.id for x in args.body if isinstance(x, ast.AnnAssign)}


def options(flags):
    """Flags with their values, in whatever order they stand."""
    return sorted(flags.replace(" --", "\n--").splitlines())


@pytest.mark.parametrize("suite", suites.SUITES)
def test_committed_results_name_commit_and_settings_that_exist(suite):
    has_history = HAS_GIT and git("rev-parse", "--is-shallow-repository").strip() == "false"
    for key, record in results.done(suite, FOLDERS).items():
        run = runs.make_run(suite, *key, FOLDERS)
        curve = results.curves_in(FOLDERS.results / f"{suite}.csv")[key]
        assert record["script"] == run.definition.script, key
        assert options(record["flags"]) == options(" ".join(run.flags)), key
        if isinstance(run, runs.Stages):
            trained = [x for x in record["models"] if not x.startswith(("sft", "best-of-"))]
            points = record["settings"].get("num_updates", 376 // 4)  # every fourth step of DPO
            assert len(curve) == len(trained) * points
        else:
            assert curve["episodes"].sum() == record["episodes"]
        assert record["settings"]["seed"] == record["seed"]
        if has_history:
            known = settings_of(source_at(record["commit"], record["script"]))
            assert set(record["settings"]) == known - runs.NOT_SETTINGS, key


def test_no_module_imports_one_that_comes_after_it():
    order = ["provenance", "suites", "walking", "runs", "results", "execute", "statistics"]
    order += ["rivals", "tables", "plots", "pages", "throughput", "peers", "random_policy"]
    order += ["__main__"]
    sources = {x.stem: x.read_text() for x in (ROOT / "benchmark").glob("*.py")}
    assert set(sources) == {"__init__", *order}
    for index, name in enumerate(order):
        imported = re.findall(r"^ *from benchmark\.(\w+) import", sources[name], re.MULTILINE)
        for line in re.findall(r"^ *from benchmark import ([\w, ]+)", sources[name], re.MULTILINE):
            imported += line.strip().split(", ")
        assert set(imported) <= set(order[:index]), name
    for name in ("tables", "plots", "pages"):  # what shows does not need what measures
        assert not re.search(r"import.*\bthroughput\b", sources[name])


def test_a_reader_may_close_the_pipe():
    command = f"{shlex.quote(sys.executable)} -m benchmark status table1 | head -1"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_two_runs_of_the_real_script_end_to_end(folders, bench, capfd, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling would take most of the time
    bench("run", "smoke", "--workers", "2")
    assert "2 of 2 runs done." in capfd.readouterr().out
    first, second = results.by_environment("smoke", "", folders)[PENDULUM]
    for result in (first, second):
        assert result.record["steps"] == 4096
        assert result.record["settings"]["env_id"] == PENDULUM
        assert 0 < result.record["score"] < 1000
        assert result.curve["episodes"].sum() == result.record["episodes"]
        assert len(result.column("approx_kl")[0]) == 2  # one per iteration
    assert first.record["score"] != second.record["score"]
    assert len(first.record["commit"]) == 40
    bench("compare", "smoke", "smoke")
    assert f"| mean ± std (seeds) | {PENDULUM} |" in capfd.readouterr().out
