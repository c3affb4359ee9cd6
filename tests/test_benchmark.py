"""Statistics on arrays that a person can check, suites, tables, figures and committed results."""

import ast
import functools
import importlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import tyro
from PIL import Image

import ppo_continuous_action
from benchmark import plots, processes, report, results, runs, statistics, suites, throughput
from benchmark.__main__ import main, parse
from benchmark.provenance import ROOT, BenchmarkError, git, source_at

FOLDERS = runs.Folders()


@pytest.fixture
def folders(tmp_path):
    return runs.Folders(tmp_path / "results", tmp_path / "runs")


def write_result(folders, suite, environment, seed, returns, variant=""):
    """A result whose last episodes have the given returns and whose curve rises to their mean."""
    run = runs.Run(suite, environment, variant, seed, folders)
    mean = float(np.mean(returns))
    header = "global_step,episodes,return,length,charts/SPS_rollout,charts/SPS_update"
    # Of the 100 stretches of 10,000 steps, those 30 and 31 take ten times as long as the others.
    rows = [
        f"{10_000 * i},2,{mean * i / 100},5,{100 if i in (30, 31) else 1000},1000"
        for i in range(1, runs.BINS + 1)
    ]
    run.result.parent.mkdir(parents=True, exist_ok=True)
    run.result.with_suffix(".csv").write_text("\n".join([header, *rows, ""]))
    record = {
        "suite": suite,
        "environment": environment,
        "variant": variant,
        "seed": seed,
        "seconds": 2180.0,
        "steps": 1_000_000,
        "last_returns": list(returns),
        "settings": {"total_timesteps": 1_000_000},
    }
    run.result.write_text(json.dumps(record))


# --- Statistics ---


def test_interquartile_mean_ignores_the_outer_quarters():
    assert statistics.interquartile_mean(np.array([100, 1, 3, 2, 5, 4, 6, 7])) == 4.5


def test_interquartile_mean_of_three_is_their_mean():
    assert statistics.interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0


def test_one_seed_has_no_interval():
    assert statistics.interval([np.array([3.0])], np.mean) is None


def test_interval_lies_within_the_scores_around_their_mean():
    low, high = statistics.interval([np.arange(10.0)], np.mean)
    assert 2 < low < 4.5 < high < 7
    assert statistics.interval([np.arange(10.0)], np.mean) == (low, high)


def test_bootstrap_is_stratified():
    # Environments on different scales but without spread between seeds: nothing is uncertain.
    strata = [np.array([1.0, 1.0, 1.0]), np.array([9.0, 9.0, 9.0])]
    assert statistics.interval(strata, statistics.mean_of_strata) == (5.0, 5.0)


def test_improvement_counts_pairs_and_half_of_ties():
    a, b = np.array([1.0, 3.0]), np.array([2.0, 3.0])
    # Of the four pairs (1,2) (1,3) (3,2) (3,3) one is won and one is a tie.
    assert statistics.improvement(a, b) == 0.375


def test_improvement_averages_over_environments():
    up, down = np.array([5.0, 6.0]), np.array([1.0, 2.0])
    assert statistics.improvement(up, down, down, up) == 0.5
    assert statistics.improvement(up, down, up, down) == 1.0


def test_normalized_scores():
    assert statistics.normalized(np.array([-10, 0, 10, -30]), -10, 10).tolist() == [0, 0.5, 1, -1]


def test_curves_on_a_common_grid():
    curves = [(np.array([0, 10]), np.array([0.0, 10.0])), (np.array([5]), np.array([2.0]))]
    assert statistics.on_grid(curves, np.array([5, 20])).tolist() == [[5, 10], [2, 2]]


def test_relative_effect_is_averaged_over_environments():
    # -50 % in the first environment, +10 % in the second, where returns are negative.
    strata = [np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([-9.0]), np.array([-10.0])]
    assert statistics.relative_effect(*strata) == pytest.approx(-0.2)


# --- From logs to results ---


def test_thin_averages_by_stretch_of_steps():
    episodes = [
        {"global_step": 1, "return": 1.0, "length": 4},
        {"global_step": 10, "return": 3.0, "length": 6},  # the end belongs to the stretch
        {"global_step": 11, "return": 7.0, "length": 1},
    ]
    updates = [{"global_step": 20, "losses/entropy": 0.5}]
    rows = runs.thin(episodes, updates, 1000)
    assert rows == [
        {"global_step": 10, "episodes": 2, "return": "2", "length": "5", "losses/entropy": ""},
        {"global_step": 20, "episodes": 1, "return": "7", "length": "1", "losses/entropy": "0.5"},
    ]


def test_training_seconds_add_up_over_iterations():
    updates = [
        {"global_step": 100, "charts/SPS_rollout": 50, "charts/SPS_update": 100},
        {"global_step": 300, "charts/SPS_rollout": 100, "charts/SPS_update": 200},
    ]
    assert runs.training_seconds(updates) == 2 + 1 + 2 + 1


def test_scores_of_a_result(folders):
    write_result(folders, "figure3", "Hopper-v4", 1, [10.0, 30.0])
    (result,) = results.load("figure3", folders)
    assert result.final == 20.0
    assert result.whole == pytest.approx(20.0 * 50.5 / 100)


def test_hours_of_a_result_leave_out_pauses(folders):
    write_result(folders, "figure3", "Hopper-v4", 1, [10.0])
    (result,) = results.load("figure3", folders)
    assert result.hours == pytest.approx(2000 / 3600)


def test_last_step_is_that_of_the_latest_checkpoint(folders):
    run = runs.Run("figure3", "Hopper-v4", "", 1, folders)
    assert run.last_step() == 0
    assert run.command[-2:] == ["--run-name", "run"]
    run.checkpoint.parent.mkdir(parents=True)
    for step, finished in ((51_200, False), (999_424, True)):
        args = {"num_steps": 2048, "num_envs": 1}
        torch.save({"args": args, "global_step": step}, run.checkpoint)
        assert (run.last_step(), run.is_finished()) == (step, finished)
    assert run.command[-2:] == ["--resume", "runs/run"]


def test_settings_that_are_off_are_null_in_json():
    assert runs.plain({"target_kl": math.inf, "seed": 1, "run_name": "run"}) == {
        "target_kl": None,
        "seed": 1,
    }


def test_a_growing_log_is_read_up_to_its_last_whole_row(tmp_path):
    (tmp_path / "log.csv").write_text("global_step,return\n1,2.0\n2,3.")
    assert runs.read_rows(tmp_path / "log.csv") == [{"global_step": 1.0, "return": 2.0}]


# --- Throughput ---


def test_rates_leave_out_start_and_first_iteration():
    points = [(100, 7.0, 5.0), (200, 9.0, 6.0), (300, 11.0, 7.0)]
    rates = throughput.rates(points)
    assert rates["steps_per_second"] == 50  # 200 steps in 4 seconds
    assert rates["steps_per_cpu_second"] == 100
    assert rates["start_seconds"] == 5.0  # 7 s, of which 100 steps take 2


def test_ratios_pair_the_repetitions():
    measured = [
        {"contender": name, "steps_per_second": rate}
        for name, rate in [("ours", 8.0), ("theirs", 2.0), ("ours", 9.0), ("theirs", 3.0)]
    ]
    assert throughput.ratios(measured, "ours", "steps_per_second").tolist() == [4.0, 3.0]


def test_processor_time_counts_workers_with_sessions_of_their_own():
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    worker = [sys.executable, "-c", burn + "print('done', flush=True); time.sleep(60)"]
    launcher = (
        f"import subprocess; x = subprocess.Popen({worker!r}, start_new_session=True); x.wait()"
    )
    command = [sys.executable, "-c", launcher]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    tree = {}
    try:
        assert process.stdout.readline() == "done\n"
        tree = processes.process_tree(process.pid)
        assert len(tree) == 2 and 0.25 < sum(tree.values()) < 5
    finally:
        for pid in tree:
            os.kill(pid, signal.SIGKILL)
        process.wait()


# --- Suites and selection ---


def test_first_runs_come_first_then_seed_by_seed():
    names = [run.name for run in runs.select("figure3", FOLDERS)]
    assert names[:4] == [f"HalfCheetah-v4/seed{k}" for k in (1, 2, 3)] + ["Hopper-v4/seed1"]
    assert names.index("Reacher-v4/seed1") < names.index("Hopper-v4/seed2")
    assert len(names) == len(set(names)) == 6 * 5 + 10 + 2 + 2


def test_only_selects_by_part_or_whole_name():
    def selected(only, seeds=None):
        return [run.name for run in runs.select("figure3", FOLDERS, seeds, only)]

    assert selected("Ant-v4") == ["Ant-v4/seed1", "Ant-v4/seed2"]
    assert selected("HalfCheetah-v4/seed1") == ["HalfCheetah-v4/seed1"]  # and not seed10
    assert selected("*/seed10") == ["HalfCheetah-v4/seed10"]
    assert selected("Ant-v4", seeds=[7]) == ["Ant-v4/seed7"]


def test_table1_has_the_papers_settings():
    labels = [x.label for x in suites.SUITES["table1"].variants.values()]
    for row, label in zip(results.reference("table1"), labels, strict=True):
        assert label.startswith(row["objective"])
        assert label.endswith(f"= {row['value']}" if row["value"] else "penalty")
    assert len(runs.select("table1", FOLDERS)) == 231


def test_every_switch_of_the_script_is_ablated():
    flags = {flag for _, flags in suites.ABLATIONS.values() for flag in flags}
    defaults = vars(ppo_continuous_action.Args())
    for field, value in defaults.items():
        if value is True and field != "compile":
            assert f"--no-{field.replace('_', '-')}" in flags
    optional = {"clip_obs", "clip_reward", "max_grad_norm", "target_kl"}
    for field in optional | {"adam_eps", "gae_lambda", "shared_network", "truncation_is_terminal"}:
        assert "--" + field.replace("_", "-") in flags


@functools.cache
def settings_class(script):
    """`Args` of a script."""
    return importlib.import_module(script.removesuffix(".py")).Args


@pytest.mark.parametrize("suite", suites.SUITES)
def test_every_variant_is_a_valid_command_line(suite):
    for run in runs.select(suite, FOLDERS, seeds=[5]):
        args = tyro.cli(settings_class(run.definition.script), args=run.flags)
        assert args.seed == 5
        if run.definition.script == suites.RLHF:
            assert args.num_updates * 3 == run.total_timesteps
        else:
            assert args.env_id == run.environment
            assert args.num_iterations > 0


@pytest.mark.parametrize("contest", throughput.CONTESTS)
def test_every_contender_has_a_valid_command_line_and_equal_work(contest):
    settings = set()
    for contender in throughput.CONTESTS[contest].contenders:
        command, progress = contender.command(ROOT / "somewhere")
        start = next(i for i, word in enumerate(command) if word.endswith(("_peer", ".py")))
        args_class = settings_class(contender.script or "benchmark.sb3_peer")
        args = tyro.cli(args_class, args=command[start + 1 :])
        assert str(progress).startswith(str(ROOT / "somewhere"))
        batch = args.num_envs * args.num_steps
        shown = getattr(args, "checkpoint_interval", 1) * batch
        assert max(10 * batch, 3 * shown) <= contender.steps < args.total_timesteps
        settings.add((batch, args.num_minibatches, args.update_epochs, args.learning_rate))
    assert len(settings) == 1


def test_dry_run_prints_a_command_for_each_run(folders, capsys):
    place = ["--results", str(folders.results), "--runs", str(folders.runs)]
    main([*place, "run", "smoke", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines, start=1):
        assert line.startswith("python -m benchmark --results ")
        args = parse(shlex.split(line)[3:])
        selected = runs.select(args.suite, args.folders, args.seeds, args.only)
        assert selected == [runs.Run("smoke", "InvertedPendulum-v4", "", number, folders)]
        assert args.commit == git("rev-parse", "HEAD").strip()  # also if HEAD moves on


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "figure4"], "There is no suite figure4; there are: smoke, figure3"),
        (["run", "figure3", "--only", "Hoper-v4"], "No run of figure3 fits Hoper-v4"),
        (["run", "figure3", "--workers", "0"], "--workers must be positive"),
        (["run", "smoke", "--commit", "nonsense"], "git rev-parse"),
        (["status", "figure4"], "There is no suite figure4"),
        (["plot", "figure4"], "There is no suite figure4"),
        (["compare", "figure3", "table1/clip"], "There is no table1/clip; there is table1/none or"),
        (["compare", "figure3/x", "figure3"], "There is no figure3/x; there is figure3."),
        (["run", "figure3", "--seeds", "1", "-3"], "A seed must not be negative: -3."),
        (["throughput", "chess"], "There is no contest chess"),
        (["throughput", "--repetitions", "0"], "--repetitions must be positive"),
        (["report"], "There is no folder"),
        (["--runs", __file__, "run", "smoke"], f"{__file__}/smoke"),
    ],
)
def test_what_cannot_be_done_gets_one_sentence(arguments, sentence, folders, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--results", str(folders.results), "--runs", str(folders.runs), *arguments])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.err.startswith("Error: ") and sentence in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not folders.results.exists()


# --- Tables and figures ---


def test_scores_table_by_hand(folders):
    for seed, score in enumerate((1000, 2000, 3000, 4000, 9000), start=1):
        write_result(folders, "figure3", "Hopper-v4", seed, [score] * 100)
    row = report.scores_table("figure3", folders).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["Hopper-v4", "5", "3800 ± 2786", "3000"]
    assert cells[5] == "1919 ± 1407"
    assert "≈ 2250 to 2330" in cells and "2383 ± 272" in cells
    assert cells[-1] == "0.56"


def test_missing_runs_are_named_with_the_command_that_makes_them(folders):
    assert report.suite_block("smoke", folders) == (
        "\nMissing: 2 of 2 runs. To continue: `python -m benchmark run smoke`.\n"
    )
    write_result(folders, "smoke", "InvertedPendulum-v4", 1, [1.0])
    assert report.suite_block("smoke", folders).endswith(
        "\nThis is a pilot of one seed in InvertedPendulum-v4. Missing: 1 of 2 runs, about 1 h of "
        "one core. To continue: `python -m benchmark run smoke`.\n"
    )
    write_result(folders, "smoke", "InvertedPendulum-v4", 2, [1.0])
    assert "Missing" not in report.suite_block("smoke", folders)


def test_comparison_of_variants(folders):
    for seed in (1, 2, 3):
        write_result(folders, "figure3", "Hopper-v4", seed, [10.0 * seed])
        write_result(folders, "kl_vs_clip", "Hopper-v4", seed, [5.0 * seed], "adaptive-0.01")
        # Of few runs nothing is said, least of all 0 or 1.
        table = report.compare("figure3", "kl_vs_clip/adaptive-0.01", folders)
        assert (f"({seed}) | – |" in table) == (seed < 3)
    # Of the pairs of (10, 20, 30) and (5, 10, 15) one is lost, one a tie, seven are won.
    assert "| Hopper-v4 | 20.0 ± 8.2 (3) | 10.0 ± 4.1 (3) | 0.83 [" in table
    assert "0.17 [" in report.variants_table("kl_vs_clip", folders)
    with pytest.raises(BenchmarkError, match="no results in a common environment"):
        report.compare("figure3", "table1/clip-0.2", folders)


def test_table1_scores_are_normalized_per_environment(folders, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "random_returns", {"Hopper-v4": 0.0, "Swimmer-v4": 10.0}.get)
    for name in suites.SUITES["table1"].variants:
        write_result(folders, "table1", "Hopper-v4", 1, [-50.0], name)
        if name != "none":
            write_result(folders, "table1", "Swimmer-v4", 1, [20.0], name)
    write_result(folders, "table1", "Hopper-v4", 1, [100.0], "clip-0.2")
    write_result(folders, "table1", "Swimmer-v4", 2, [30.0], "clip-0.2")
    # As long as a setting lacks Swimmer, nobody's average includes it.
    table = report.normalized_table("table1", folders)
    assert "| clipping, ε = 0.2 | 0.82 | 1.00 | 1 in 1 | 100 (1) | 25.0 ± 5.0 (2) |" in table
    assert "| no clipping or penalty | -0.39 | -0.50 | 1 in 1 | -50.0 (1) | – |" in table
    write_result(folders, "table1", "Swimmer-v4", 1, [10.0], "none")
    table = report.normalized_table("table1", folders)
    # The best run of Hopper has 100, that of Swimmer 30: (1 + (0.5 + 1) / 2) / 2.
    assert "| clipping, ε = 0.2 | 0.82 | 0.88 | 3 in 2 |" in table
    assert "| no clipping or penalty | -0.39 | -0.25 | 2 in 2 |" in table
    assert plots.plot_normalized("table1", folders, tmp_path).stat().st_size > 5000


def test_effects_of_details_against_the_default(folders, monkeypatch, tmp_path):
    for seed in (1, 2, 3):
        write_result(folders, "figure3", "Hopper-v4", seed, [1700.0 + 100 * seed])
        write_result(folders, "figure3", "Walker2d-v4", seed, [1.0])
        write_result(folders, "ablation", "Hopper-v4", seed, [950.0], "raw-rewards")
    assert "chance" not in report.effects_table("ablation", folders)
    # An environment that not all rows have is in no average.
    write_result(folders, "ablation", "Walker2d-v4", 1, [9.0], "raw-rewards")
    write_result(folders, "ablation", "Hopper-v4", 1, [1425.0], "shared-network")
    table = report.effects_table("ablation", folders)
    assert "| default | 1900 ± 82 (3) | 1.0 ± 0.0 (3) | – | – |" in table
    assert "| 30 and 31 raw rewards | 950 ± 0 (3) | 9.0 (1) | – | -50% [-" in table
    assert "| 13 and 26 shared network | 1425 (1) | – | – | -25% | separate" in table
    # The default's standard deviation is 100 of 1900; its mean of three varies too.
    assert f"± {100 / 1900 * np.sqrt(4 / 3):.0%} (one standard deviation)" in table
    found = report.effects("ablation", folders)
    assert found["raw-rewards"][0] == pytest.approx(-0.5)
    assert found["shared-network"] == (pytest.approx(-0.25), None)
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    assert plots.plot_effects("ablation", folders, tmp_path).stat().st_size > 5000
    (axes,) = figures[0].axes
    points = [
        (line.get_label(), line.get_xdata()[0], line.get_markerfacecolor())
        for line in axes.lines
        if line.get_label()[0] != "_"
    ]
    sweep = "Andrychowicz et al. (95th percentile of a sweep)"
    assert [x[0] for x in points] == ["ours", sweep, "ours"]
    ours = [x[1:] for x in points if x[0] == "ours"]
    # In the order of the details, as long as some effect is one of chance.
    assert ours == [(pytest.approx(-0.25), "white"), (pytest.approx(-0.5), "C0")]
    assert axes.get_xlabel().endswith("1 to 3 runs in 1 environment per row")
    for seed in (2, 3):
        write_result(folders, "ablation", "Hopper-v4", seed, [1425.0], "shared-network")
    plots.plot_effects("ablation", folders, tmp_path)
    (axes,) = figures[1].axes
    assert axes.lines[0].get_xdata()[0] == pytest.approx(-0.5)  # worst first
    monkeypatch.undo()
    plots.plt.close("all")


def test_chance_falls_with_the_number_of_environments(folders):
    for env in ("Hopper-v4", "Walker2d-v4"):
        for seed in (1, 2, 3):
            write_result(folders, "figure3", env, seed, [900.0 + 50 * seed])
        write_result(folders, "ablation", env, 1, [900.0], "raw-rewards")
    one = 0.05 * np.sqrt(4 / 3)  # standard deviation 50 of 1000
    assert f"± {one / np.sqrt(2):.0%} (one" in report.chance("ablation", folders)


def test_published_effects_are_of_the_same_environments():
    found = report.published_effects("ablation", ["Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"])
    # Engstrom et al. 2020, Tables 2 and 3: Walker2d 2867 of 3292, Hopper 2371 of 2513.
    expected = (2867 / 3292 + 2371 / 2513) / 2 - 1
    assert found["engstrom2020"] == {"no-clip": pytest.approx(expected)}
    # Andrychowicz et al. 2021, choice C47: Hopper, Walker2d and HalfCheetah; off against on.
    expected = (1190 / 1360 + 685 / 660 + 2000 / 2320) / 3 - 1
    assert found["andrychowicz2021"]["shared-network"] == pytest.approx(expected)
    found = report.published_effects("ablation", ["HalfCheetah-v4"])
    assert set(found) == {"andrychowicz2021"}  # Engstrom et al. have no HalfCheetah
    assert found["andrychowicz2021"]["shared-network"] == pytest.approx(2000 / 2320 - 1)


def test_table_of_details_finds_all_37_and_their_lines():
    rows = report.details_block(FOLDERS).splitlines()[2:]
    found = [row.split("|")[1].strip() for row in rows]
    assert found[:37] == [f"{number}/37" for number in range(1, 38)]
    for row in rows:
        name, link = (cell.strip() for cell in row.split("|")[2:4])
        script, line = link.partition("]")[0].removeprefix("[").split(":")
        assert f": {name}" in (ROOT / script).read_text().splitlines()[int(line) - 1]


def test_table_of_scripts(folders):
    write_result(folders, "figure3", "HalfCheetah-v4", 1, [1500.0])
    text = report.scripts_block(folders)
    row = next(x for x in text.splitlines() if "[ppo_continuous_action.py]" in x)
    assert "| HalfCheetah-v4 | 1500 | 1 | 1443 ± 46; 2906 ± 1129 | 0.56 | – |" in row


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """Only the results that git knows, so that a suite may run while the tests do."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return FOLDERS
    folder = tmp_path_factory.mktemp("committed")
    for name in git("ls-files", "-z", "benchmark/results").split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return runs.Folders(folder / "benchmark" / "results", FOLDERS.runs)


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_committed_tables_are_those_of_the_committed_results(page, committed):
    if not page.exists():
        pytest.skip("this page is not written yet")
    text = page.read_text()
    assert report.filled(text, committed) == text
    assert report.BLOCK.search(text)


@pytest.mark.parametrize("suite", ["kl_vs_clip", "table1", "ablation", "rlhf"])
def test_a_figure_without_runs_is_refused(folders, suite):
    with pytest.raises(BenchmarkError, match="No run of"):
        plots.plot_all(suite, folders)


def test_unknown_block_is_refused(folders):
    with pytest.raises(BenchmarkError, match="no block nonsense"):
        report.filled("<!-- generated: nonsense -->\n<!-- end -->\n", folders)


def test_figure_has_a_panel_per_environment_and_a_line_per_seed(folders, monkeypatch, tmp_path):
    for seed in (1, 2, 3):
        write_result(folders, "figure3", "Hopper-v4", seed, [100.0 * seed])
    write_result(folders, "figure3", "Ant-v4", 1, [5.0])
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    path = plots.plot_suite("figure3", folders, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    titles = [axes.get_title() for axes in figures[0].axes]
    assert titles == ["Hopper-v4\n3 seeds", "Ant-v4\n1 seed"]
    hopper, ant = figures[0].axes
    labels = [line.get_label() for line in hopper.lines]
    assert "ours" in labels and "ppo2 2018 (v2, 6 seeds)" in labels
    mean = hopper.lines[labels.index("ours")].get_ydata()
    assert mean[-1] == pytest.approx(200.0)  # of seeds that end at 100, 200 and 300
    assert len(ant.collections) == 0  # no band from one seed
    plots.plt.close(figures[0])


def test_figures_come_from_committed_results(committed, tmp_path):
    path = plots.plot_suite("figure3", committed, tmp_path)
    assert path.stat().st_size > 10_000
    assert Image.open(path).text["Source"] == f"results {plots.digest('figure3', committed)}"


@pytest.mark.parametrize("path", sorted(plots.FIGURES.glob("*.png")), ids=lambda x: x.stem)
def test_committed_figures_show_the_committed_results(path, committed):
    """Fails after new results until `python -m benchmark plot` has drawn them."""
    suite = path.stem.removesuffix("_trace")
    assert Image.open(path).text["Source"] == f"results {plots.digest(suite, committed)}"


def test_trace_of_the_kl_has_a_line_per_seed_and_its_target(folders, monkeypatch, tmp_path):
    for seed in (1, 2):
        write_result(folders, "kl_vs_clip", "Hopper-v4", seed, [5.0], "adaptive-0.01")
        path = runs.Run("kl_vs_clip", "Hopper-v4", "adaptive-0.01", seed, folders).result
        path.with_suffix(".csv").write_text("global_step,kl/after\n1000,0.02\n2000,0.01\n")
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"settings": {"target_kl": 0.01}}))
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    assert plots.plot_kl("kl_vs_clip", folders, tmp_path).name == "kl_vs_clip_trace.png"
    (axes,) = figures[0].axes
    first, second, target = axes.lines
    assert first.get_ydata().tolist() == second.get_ydata().tolist() == [0.02, 0.01]
    assert set(target.get_ydata()) == {0.01}


# --- RLHF ---


@pytest.fixture
def rlhf_run(folders):
    """A finished run of the script as the script leaves it, with invented numbers."""
    run = runs.make_run("rlhf", "reviews", "", 2, folders)
    models = {
        name: dict.fromkeys(report.MODEL_COLUMNS.values(), 0.5) | {"objective/gold": gold}
        for name, gold in [("ppo-adaptive-6", 1.25), ("ppo-none", -5.0), ("best-of-16", 1.0)]
    }
    settings = {"seed": 2, "target_kl": 6.0, "value_clip_coef": math.inf, "run_name": "run"}
    content = {"args": settings, "quality": {"accuracy": 0.8, "correlation": 0.7}}
    for name, kl in (("ppo-adaptive-6", 6.5), ("ppo-none", 90.0)):
        metrics = dict.fromkeys(runs.RLHF_METRICS, 0.25) | {"objective/kl": kl, "losses/loss": 7}
        (run.log / name).mkdir(parents=True)
        torch.save({"updates": [metrics] * 3}, run.log / name / "checkpoint.pt")
    runs.write_note(run, {"attempts": 1, "commit": "abc", "peak_mib": 512.3})
    (run.folder / "ppo_rlhf_toy.py").touch()
    assert not run.is_finished()
    (run.log / "results.json").write_text(json.dumps(content | {"results": models}))
    return run


def test_rlhf_runs_are_counted_in_updates_and_end_with_their_table(rlhf_run):
    assert rlhf_run.last_step() == 6
    assert rlhf_run.is_finished()
    assert rlhf_run.flags == ["--seed", "2", "--compare"]


def test_rlhf_result_keeps_models_and_metrics(rlhf_run, folders):
    rlhf_run.collect()
    (result,) = results.load("rlhf", folders)
    assert result.record["models"]["ppo-none"]["objective/gold"] == -5.0
    assert result.record["settings"] == {"seed": 2, "target_kl": 6.0, "value_clip_coef": None}
    assert [row["run"] for row in result.curve] == ["ppo-adaptive-6"] * 3 + ["ppo-none"] * 3
    assert result.curve[5]["objective/kl"] == "90"
    assert "losses/loss" not in result.curve[0]
    assert result.final == 1.25
    assert "gold +1.25 ppo-adaptive-6, -5.00 ppo-none" in rlhf_run.summary()


def test_both_editions_stand_side_by_side(folders, tmp_path):
    for seed in (1, 2, 3):
        write_result(folders, "figure3", "Hopper-v4", seed, [10.0 * seed])
        write_result(folders, "second_edition", "Hopper-v4", seed, [11.0 * seed], "second")
    table = report.suite_block("second_edition", folders)
    assert "| Hopper-v4 | first edition | 3 | 20.0 ± 8.2 | 20.0 | [10.0, 30.0] | 10.1" in table
    assert "| Hopper-v4 | second edition | 3 | 22.0 ± 9.0 | 22.0 | [11.0, 33.0] | 11.1" in table
    assert " | 0.56 | 0.67 [" in table  # of the nine pairs six are won


def test_rlhf_tables_and_figure(rlhf_run, folders, tmp_path):
    rlhf_run.collect()
    text = report.suite_block("rlhf", folders)
    assert "| ppo-none | -5.00 | 0.50 |" in text
    assert "| 2 | 0.800 | 0.700 | 1.25 | 0.50 | 0.500 | 0.500 | 6.50 (6) | 6e+00 | -5.00 " in text
    assert text.count(" | 512 |\n") == 1
    assert "Missing: 4 of 5 runs." in text
    row = next(x for x in report.scripts_block(folders).splitlines() if "[ppo_rlhf_toy.py]" in x)
    assert "| reviews | 1.2 | 1 |" in row
    assert plots.plot_frontier("rlhf", folders, tmp_path).stat().st_size > 10_000


# --- Committed results ---


@functools.cache
def settings_of(source):
    """Names of the fields of `Args` in a script."""
    tree = ast.parse(source)
    args = next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Args")
    return {x.target.id for x in args.body if isinstance(x, ast.AnnAssign)}


def has_history():
    """Whether the commits that results name can be looked up."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return False
    return git("rev-parse", "--is-shallow-repository").strip() == "false"


COMMITTED = [x for suite in suites.SUITES for x in results.load(suite, FOLDERS)]


@pytest.mark.parametrize(
    "result", COMMITTED, ids=lambda x: str(x.path.relative_to(FOLDERS.results))
)
def test_committed_result_names_commit_and_settings_that_exist(result):
    record = result.record
    run = runs.make_run(
        record["suite"], record["environment"], record["variant"], record["seed"], FOLDERS
    )
    assert run.result == result.path
    assert record["script"] == run.definition.script
    if "wandb_project" not in record["settings"]:  # the first edition had other flags
        assert record["flags"] == " ".join(run.flags)
    if record["script"] == suites.RLHF:
        updates = record["settings"]["num_updates"]
        trained = [x for x in record["models"] if x.startswith("ppo-")]
        assert len(result.curve) == len(trained) * updates == run.total_timesteps
    else:
        assert sum(int(row["episodes"]) for row in result.curve) == record["episodes"]
        assert len(record["last_returns"]) == min(runs.LAST_EPISODES, record["episodes"])
    assert record["settings"]["seed"] == record["seed"]
    if has_history():
        known = settings_of(source_at(record["commit"], record["script"]))
        assert set(record["settings"]) == known - runs.NOT_SETTINGS


def test_help_of_every_command():
    names = ["run", "list", "status", "report", "plot", "compare", "throughput"]
    text = subprocess.run(
        [sys.executable, "-m", "benchmark", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert all(f"    {name} " in text for name in names)


def test_a_reader_may_close_the_pipe():
    command = f"{shlex.quote(sys.executable)} -m benchmark status table1 | head -1"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
