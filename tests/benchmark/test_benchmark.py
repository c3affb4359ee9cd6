"""Statistics on arrays that a person can check, suites, and what is kept of their runs.

Tables and figures are made again from the committed results: they must be those that are committed.
"""

import ast
import dataclasses
import functools
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
import tyro
from PIL import Image
from scipy import stats

import ppo_continuous_action as ppo
from benchmark import record, results, run, throughput
from benchmark.__main__ import main
from benchmark.baselines import stable_baselines3_ppo
from benchmark.definitions import Entry, Folders, Measurement, Run, select
from benchmark.provenance import ROOT
from benchmark.report import pages, plots, statistics, tables
from benchmark.suites import SUITES
from benchmark.suites.ablation import SWITCHES
from benchmark.suites.measurements import MEASUREMENTS
from benchmark.suites.scripts import SCRIPTS
from benchmark.suites.switches import FORMER_FLAGS

FOLDERS = Folders()
PENDULUM = "InvertedPendulum-v4"


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path / "results", tmp_path / "runs")


@pytest.fixture
def bench(folders):
    """Run a command of the benchmark with these folders."""
    return lambda *words: main(
        [*words, "--results", str(folders.results), "--runs", str(folders.runs)]
    )


def add(folders, name, environment, *scores, **more):
    """Runs of `suite/variant`, seeds 1, 2, ..., whose curves rise to their scores (None: none)."""
    suite, _, variant = name.partition("/")
    folders.results.mkdir(exist_ok=True)
    records = results.done(suite, folders)
    path = folders.results / f"{suite}.csv"
    curves = dict(iter(results.table_of(path).groupby(results.KEY))) if path.exists() else {}
    for seed, score in enumerate(scores, start=1):
        key = {"environment": environment, "variant": variant, "seed": seed}
        made = {**key, "score": score, "mean_return": score and score / 2, "hours": 0.5}
        made["settings"] = {"total_timesteps": 1_000_000, "penalty_kl": 0.01}
        records[results.key_of(key)] = made | more
        rows = pd.DataFrame({**key, "step": 10_000 * np.arange(1, 101), "episodes": 1})
        rows["return"] = math.nan if score is None else score * rows["step"] / 1e6
        curves[results.key_of(key)] = rows
    pd.concat(curves.values()).to_csv(path, index=False)
    results.write_lines(folders.results / f"{suite}.jsonl", [*records.values()])


# --- Statistics ---


# Scores of each column; for the last two statistics of A and B in turns.
@pytest.mark.parametrize(
    ("statistic", "value", "columns"),
    [
        ("interquartile_mean", 4.5, [(100, 1, 3, 2, 5, 4, 6, 7)]),  # without the outer quarters
        ("interquartile_mean", 3, [(1, 2, 6)]),
        ("mean", 5, [(1, 2, 6), (7,)]),
        # Of the four pairs (1,2) (1,3) (3,2) (3,3) one is won and one is a tie.
        ("improvement", 0.375, [(1, 3), (2, 3)]),
        ("improvement", 0.5, [(5, 6), (1, 2), (1, 2), (5, 6)]),
        ("improvement", 2.5 / 3, [(5, 6), (1, 2), (5, 6), (1, 2), (3,), (1, 2, 4, 5)]),
        # -50 % in the first environment, +10 % in the second, where returns are negative.
        ("relative_effect", -0.2, [(1, 1), (2, 2), (-9,), (-10,)]),
        # The median of +800 %, -50 % and +10 %.
        ("relative_effect", 0.1, [(9,), (1,), (1, 1), (2, 2), (-9,), (-10,)]),
    ],
)
def test_statistics_by_hand(statistic, value, columns):
    scores = statistics.matrix(*columns)
    if statistic in ("improvement", "relative_effect"):
        scores = scores.reshape(len(scores), -1, 2)
    assert getattr(statistics, statistic)(scores) == pytest.approx(value)


def test_interval_is_that_of_scipys_stratified_bootstrap():
    strata = [np.arange(10.0), np.array([3.0, 5.0, 1.0])]
    value, ends = statistics.estimate(statistics.matrix(*strata), statistics.mean)
    theirs = stats.bootstrap(
        strata,
        lambda a, b, axis: (a.mean(axis) + b.mean(axis)) / 2,
        n_resamples=statistics.RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    assert value == pytest.approx(3.75) and ends == pytest.approx(theirs.confidence_interval)
    few = statistics.matrix([1.0, 2.0, 3.0], [3.0, 4.0])
    assert statistics.estimate(few, statistics.mean) == (2.75, None)
    # Tasks on different scales but without spread between runs: nothing is uncertain.
    sure = np.array([[1.0, 9.0]] * 3)
    assert statistics.estimate(sure, statistics.mean) == (5.0, (5.0, 5.0))


def test_rank_correlation_is_spearmans_of_the_means_over_environments_and_seeds():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=(3, 11, 7)), rng.normal(size=11)
    theirs[3] = theirs[4]  # a tie
    value, ends = statistics.estimate(ours, statistics.rank_correlation(theirs))
    assert value == pytest.approx(stats.spearmanr(ours.mean((0, 2)), theirs).statistic)
    assert ends[0] < value < ends[1]


# --- From logs to results ---


def test_thin_averages_by_stretch_of_steps():
    episodes = [  # the end of a stretch belongs to it
        {"global_step": step, "return": x}
        for step, x in ((1, 1.0), (70, 3.0), (61, 5.0), (71, 7.0))
    ]
    thinned = record.thin(episodes, [{"global_step": 90, "losses/approx_kl": 0.5}], 1000)
    assert thinned["step"].tolist() == [10, 70, 80, 90]
    assert thinned["episodes"].tolist() == [1, 2, 1, 0]
    assert thinned["return"].tolist()[:3] == [1.0, 4.0, 7.0] and math.isnan(thinned["return"][3])
    assert thinned["approx_kl"].tolist()[3] == 0.5 and thinned["approx_kl"].isna().sum() == 3
    updates = [{"global_step": x, "losses/approx_kl": x} for x in range(4, 24, 4)]
    thinned = record.thin([], updates, 100, 5)  # the first update has a point of its own
    assert thinned[["step", "approx_kl"]].to_numpy().tolist() == [[4, 4], [20, 14]]


def test_facts_of_a_run_in_steps(tmp_path):
    rates = [50, 100, 1]  # the last iteration was paused
    saved = {
        "args": {"penalty_kl": 0.1, "target_kl": math.inf, "run_name": "run"},
        "episodes": [{"global_step": 10 * i, "return": float(i)} for i in range(1, 151)],
        "updates": [
            {"global_step": 1000 * i, "charts/SPS": rate} for i, rate in enumerate(rates, start=1)
        ],
    }
    torch.save(saved, tmp_path / "checkpoint.pt")
    facts, rows = record.summarize_steps(tmp_path, 4000)
    assert facts["settings"] == {"penalty_kl": 0.1, "target_kl": None}
    assert facts["score"] == np.mean(range(51, 151)) and facts["mean_return"] == 75.5
    assert facts["seconds"] == 20 + 10 + 1000
    assert facts["hours"] == pytest.approx(3000 / 50 / 3600, abs=1e-6)
    assert rows["episodes"].sum() == facts["episodes"] == 150
    torch.save(saved | {"episodes": []}, tmp_path / "checkpoint.pt")
    facts, rows = record.summarize_steps(tmp_path, 4000)
    assert facts["score"] is None and rows["return"].isna().all()


def test_curves_of_rlhf_are_thinned_and_its_first_model_is_the_score(tmp_path):
    for name, count in (("grpo", 80), ("dpo", 376)):
        (tmp_path / name).mkdir()
        updates = [{"objective/kl": 5.0, "losses/k3": 0.1}] * count
        torch.save({"updates": updates}, tmp_path / name / "checkpoint.pt")
    models = {x: {"objective/gold": y} for y, x in enumerate(("sft", "best-of-16", "grpo", "dpo"))}
    content = {"args": {"kl_mode": "none", "run_name": "run"}, "quality": {}, "results": models}
    (tmp_path / "results.json").write_text(json.dumps(content))
    facts, curve = record.summarize_stages(tmp_path, 90.0)
    assert (facts["scored_model"], facts["score"], facts["hours"]) == ("grpo", 2, 0.025)
    assert facts["settings"] == {"kl_mode": "none"} and list(curve) == ["stage", "step", "kl"]
    steps = {name: list(own["step"]) for name, own in curve.groupby("stage")}
    assert steps == {"grpo": [*range(1, 81)], "dpo": [*range(1, 377, 4)]}


def test_an_evaluation_plays_with_the_policy_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = {"total_timesteps": 2048, "run_name": "run", "compile": False}
    ppo.train(ppo.Args(env_id=PENDULUM, **short))
    shutil.copy(ROOT / "ppo_continuous_action.py", "copied.py")
    subprocess.run([sys.executable, "-P", run.EVALUATE, "copied.py"], check=True)
    found = record.summarize_evaluation(tmp_path / "runs/run")
    assert found["returns"] == found["lengths"] and len(found["lengths"]) == 20  # 1 per step
    assert len({*found["lengths"]}) > 1 and "speeds" not in found
    seed = np.random.default_rng(np.random.SeedSequence(1, spawn_key=(1,))).integers(2**31)
    env = gym.make(PENDULUM)
    policy = ppo.load_policy("runs/run", env)
    (obs, _), ended, steps = env.reset(seed=seed.item()), False, 0
    while not ended:
        obs, _, ended, *_ = env.step(policy(obs))
        steps += 1
    assert steps == found["lengths"][0]


def test_stable_baselines3_leaves_what_is_kept_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = "--num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 1 --seed 3"
    line = f"stable_baselines3_ppo --env-id CartPole-v1 --kind classic --total-timesteps 512 {size}"
    monkeypatch.setattr(sys, "argv", line.split())
    stable_baselines3_ppo.main()
    facts, curve = record.summarize_steps(tmp_path / "runs/run", 512)
    saved = record.read_checkpoint(tmp_path / "runs/run/checkpoint.pt")
    assert facts["steps"] == facts["settings"]["total_timesteps"] == 512 and facts["hours"] > 0
    assert [x["global_step"] for x in saved["updates"]] == [128, 256, 384, 512]
    assert curve["approx_kl"].count() == 4 and (curve["approx_kl"] != 0).all()
    assert saved["episodes"][0]["global_step"] == 2 * saved["episodes"][0]["length"]
    assert all(x["return"] == x["length"] for x in saved["episodes"])


# --- Suites and selection ---


def test_runs_go_seed_by_seed_and_only_selects_by_part_or_whole_name():
    def selected(seeds=(), only="*"):
        return [x.name for x in select(SUITES["figure3"], FOLDERS, seeds, only)]

    names = selected()
    assert names[:2] == ["HalfCheetah-v4/seed1", "HalfCheetah-v4/trpo/seed1"]
    assert all(x.endswith("/seed1") for x in names[: 7 * 6 + 2])  # rivals are not in Ant, Humanoid
    assert len(names) == len(set(names)) == 2 * 10 + 5 * 5 + 2 * 3 + 7 * 5 * 5
    assert selected(only="Ant-v4") == ["Ant-v4/seed1", "Ant-v4/seed2", "Ant-v4/seed3"]
    assert selected(only="HalfCheetah-v4/seed1") == ["HalfCheetah-v4/seed1"]  # and not seed10
    assert selected(only="*/seed10") == ["HalfCheetah-v4/seed10", "Swimmer-v4/seed10"]
    assert selected([7, 7], "Ant-v4") == ["Ant-v4/seed7"]
    assert selected([7], "Hopper-v4/cem/*") == ["Hopper-v4/cem/seed7"]
    assert select(SUITES["smoke"], Folders(runs=Path("here")))[0].folder.is_absolute()


@functools.cache
def settings_class(script):
    """`Args` of a script."""
    return importlib.import_module(script.removesuffix(".py").replace("/", ".")).Args


@pytest.mark.parametrize("suite", SUITES)
def test_every_variant_is_a_valid_command_line(suite):
    for made in select(SUITES[suite], FOLDERS, seeds=[5]):
        args = tyro.cli(settings_class(made.script), args=made.flags)
        assert args.seed == 5
        if SUITES[suite].total_timesteps:
            assert args.env_id == made.environment
            assert args.total_timesteps >= args.num_envs * args.num_steps > 0


def test_every_run_of_the_frontier_differs():
    flags = [dataclasses.astuple(x)[:2] for x in SUITES["rlhf_frontier"].variants.values()]
    assert len(set(flags)) == len(flags)


def test_every_script_has_a_row_and_its_runs():
    assert set(SCRIPTS) == {x.name for x in ROOT.glob("*.py")}
    for name, script in SCRIPTS.items():
        suite = SUITES[script.suite]
        made = (ROOT / suite.variants[script.variant].script).read_text()
        assert made == (ROOT / name).read_text() or f"\nimport {name.removesuffix('.py')}\n" in made
        assert script.environment in suite.environments


def test_a_module_imports_only_from_those_above_it_in_the_readme():
    _, _, table = (ROOT / "benchmark/README.md").read_text().partition("| module |")
    order = [f"benchmark/{x}" for x in re.findall(r"`([\w/]+\.py)`", table)]
    order = [x for x in order if (ROOT / x).exists()]
    modules = {str(x.relative_to(ROOT)) for x in (ROOT / "benchmark").rglob("*.py")}
    empty = {x for x in modules if len((ROOT / x).read_text().splitlines()) == 1}
    missing = modules - {*order} - empty - {"benchmark/__main__.py"}
    assert all("/baselines/" in x for x in missing)
    for name in order:
        tree = ast.parse((ROOT / name).read_text())
        own = [x for x in tree.body if isinstance(x, ast.ImportFrom) and "benchmark" in x.module]
        paths = [f"{x.module}.{y.name}".replace(".", "/") for x in own for y in x.names]
        paths += [x.module.replace(".", "/") for x in own]
        used = [y for x in paths for y in (f"{x}.py", f"{x}/__init__.py") if (ROOT / y).exists()]
        assert all(order.index(x) < order.index(name) for x in {*used} - empty - {name}), name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("run figure3 --only Hoper-v4", "No run of figure3 fits Hoper-v4"),
        ("plot ablation", "No run of ablation is finished"),
        ("report", "There is no folder"),
    ],
)
def test_what_cannot_be_done_gets_one_sentence(line, sentence, folders, bench, capsys):
    with pytest.raises(SystemExit) as end:
        bench(*line.split())
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert sentence in captured.err + captured.out
    assert captured.err.startswith("Error: ") and len(captured.err.splitlines()) == 1
    assert not folders.results.exists() and not folders.runs.exists()


# --- Tables ---


# A suite, runs with their scores, and rows of the table, in which … stands for any text. Of the
# pairs of PPO and TRPO 5 of 9 are won in Hopper, none in Reacher; nothing is said of a single run.
# Pong: from -20.7 to 9.3, 3 is 23.7 of 30, and ppo2 was at 17.28 at 1.92M, at 17.38 at 2.02M. Not
# all switches have Walker2d: it is in no average. Of the pairs of kl_vs_clip one of nine is won and
# one is a tie, of the recipe's four are won.
BY_HAND = """
figure3
figure3 Hopper-v4 10 20 30
figure3/trpo Hopper-v4 25 25 5
figure3/trpo Swimmer-v4 25 25 5
figure3/cem Hopper-v4 20.04
figure3 Reacher-v4 -5 -5 -5
figure3/trpo Reacher-v4 -4 -4 -4
| Hopper-v4 | 20.0 [10.0, 30.0] (3) | 18.3 [5.0, 25.0] (3) | – | – | – | 20.0 (1) |
| paper, read off | ≈ 2290 | ≈ 2100 | – | ≈ 900 | ≈ 1220 | – |
| Hopper-v4 | 0.56 […] | – | – | – | – |
| Swimmer-v4 | – | – | – | – | – |
| all | 0.28 […] | – | – | – | – |
|…16 of 226 runs are done.

games
games Pong 0 6
games/sb3 Qbert 163.9
| Qbert | four frames, Stable-Baselines3 | 1 | 164 | 0% | 82.0 | 0.50 |…| 164 | 13455 |
| Pong | four frames, no memory | 2 | 3.0 ± 3.0 | 79% | 1.5 ± 1.5 | 0.50 | 17.4 | -20.7 | 9.3 |
|…3 of 20 runs are done.

ablation
figure3 Hopper-v4 1800 1900 2000
figure3 Walker2d-v4 1 1 1
ablation/shared-network Hopper-v4 1425
ablation/raw-rewards Hopper-v4 950 950 950
ablation/raw-rewards Walker2d-v4 9
| default | 1900 ± 82 (3) | 1.0 ± 0.0 (3) | – | – |…
| 30 and 31 raw rewards | 950 ± 0 (3) | 9.0 (1) | – | -50% [-…
| 13 and 26 shared network | 1425 (1) | – | – | -25% | A: worse…

kl_vs_clip
figure3 Hopper-v4 10 20 30
kl_vs_clip/adaptive-0.01 Hopper-v4 5 10 15
| clipping, ε = 0.2 | – | 20.0 ± 8.2 (3) |…
| adaptive KL…| 0.17 […] |

recipe
recipe Hopper-v4 1000 2000 3000
recipe/recipe Hopper-v4 500 1500 3500
| Hopper-v4 | 2000 [1000, 3000] (3) | 1833 […] (3) | – | 0.44 […] | – | 2410 ± 10 |
| Reacher-v4 | – | – | – | – | – | – |
| all |…| 0.44 […] |…

"""


@pytest.mark.parametrize("case", BY_HAND.strip().split("\n\n"))
def test_tables_by_hand(case, folders):
    suite, *lines = case.splitlines()
    for name, environment, *scores in (x.split() for x in lines if x[0] != "|"):
        add(folders, name, environment, *map(ast.literal_eval, scores))
    text = pages.block(suite, folders).replace("\n\n", "\n|")
    for row in (x for x in lines if x[0] == "|"):
        pattern = re.escape(row).replace("…", ".*")
        assert any(re.fullmatch(pattern, x) for x in text.splitlines()), row


# --- Pages and figures ---


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_committed_pages_are_those_of_the_committed_results(page, committed):
    assert pages.filled(page, committed) == page.read_text()


DONE = [suite for suite in SUITES.values() if results.done(suite.name, FOLDERS)]
SHOWN = [(suite, x) for suite in DONE for x in suite.figures]


@pytest.mark.parametrize(("suite", "figure"), SHOWN, ids=lambda x: getattr(x, "name", x))
def test_committed_figures_show_the_committed_results(suite, figure, committed, tmp_path):
    """Fails after new results until `python -m benchmark plot` has drawn them."""
    path = plots.draw(suite, figure, committed, tmp_path)
    drawn, kept = (np.asarray(Image.open(x / path.name)) for x in (tmp_path, plots.FOLDER))
    assert drawn.shape == kept.shape
    assert any(f"figures/{path.name})" in page.read_text() for page in pages.PAGES)
    assert np.abs(drawn.astype(float) - kept).mean() < 0.01  # a single dot is more than that


def test_every_ablation_stands_beside_some_detail():
    rows = [row.split(" | ") for row in pages.details_table(FOLDERS).splitlines()[2:]]
    known = {x for row in rows for x in (row[0].strip("| ").removesuffix("/37"), row[1])}
    assert {str(number) for number in range(1, 38)} <= known
    assert all(set(x.details) <= known for x in SWITCHES.values())


# --- Throughput ---


def test_rates_leave_out_start_and_first_iteration():
    updates = [{"global_step": 100 * i, "charts/SPS": x} for i, x in ((1, 20), (2, 50), (3, 50))]
    # 200 steps in 4 seconds; so all 300 take 6 of the 15.
    assert throughput.rates(updates, 15.0) == {"steps_per_second": 50, "start_seconds": 9.0}


@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_every_contender_has_a_valid_command_line_and_equal_work(measurement):
    settings = set()
    for entry in MEASUREMENTS[measurement].entries:
        args = tyro.cli(settings_class(entry.file), args=entry.arguments)
        batch = args.num_envs * args.num_steps
        assert 10 * batch <= entry.steps == args.total_timesteps
        settings.add((batch, args.num_minibatches, args.update_epochs, args.learning_rate))
    assert len(settings) == 1


ENTRY = """
import json, os, sys
os.makedirs("runs/run")
updates = [{"global_step": 10 * i, "charts/SPS": float(sys.argv[4])} for i in range(1, 6)]
with open("runs/run/checkpoint.pt", "w") as file:
    json.dump({"updates": updates}, file)
sys.exit("Error: blown" if updates[0]["charts/SPS"] < 0 else 0)
"""


def test_a_measurement_that_failed_leaves_the_last_measurement(folders, bench, monkeypatch, capsys):
    def measurement(rate):
        pair = [Entry(x, 50, f"--rate {y}", "x.py") for x, y in (("a", 10), ("b", rate))]
        monkeypatch.setattr(
            throughput, "MEASUREMENTS", {"continuous": Measurement("Two", tuple(pair))}
        )

    monkeypatch.setattr(throughput, "source_at", lambda commit, file: ENTRY)
    monkeypatch.setattr(throughput, "read_checkpoint", lambda path: json.loads(path.read_text()))
    measurement(30)
    bench("throughput", "--repetitions", "1")
    lines = results.lines_of(path := folders.results / "throughput.jsonl")
    assert [(x["repetition"], x["entry"]) for x in lines] == [(0, "a"), (0, "b")]
    assert [x["steps_per_second"] for x in lines] == pytest.approx([10, 30])
    table = pages.throughput_tables(folders)
    assert "**Two**,\nOne repetition," in table and "| a | 10 | 0.33" in table
    measurement(-1)
    with pytest.raises(SystemExit):
        bench("throughput", "--repetitions", "1")
    assert "Error: b failed: Error: blown" in capsys.readouterr().err
    assert results.lines_of(path) == lines
    measurement(20)
    bench("throughput", "--repetitions", "2")
    assert [x["steps_per_second"] for x in results.lines_of(path)] == pytest.approx([10, 20] * 2)
    assert "2 repetitions in turns" in pages.throughput_tables(folders)


@pytest.mark.parametrize("gpu", [False, True])
def test_entries_see_a_gpu_where_the_measurement_is_on_one(monkeypatch, gpu):
    rate, seen = "float(sys.argv[4])", 'len(os.environ["CUDA_VISIBLE_DEVICES"])'
    source = ENTRY.replace(rate, f"10.0 + {seen}")
    monkeypatch.setattr(throughput, "source_at", lambda commit, file: source)
    monkeypatch.setattr(throughput, "read_checkpoint", lambda path: json.loads(path.read_text()))
    found = throughput.measure(Entry("x.py", 50), "", Measurement("One", (), gpu=gpu))
    assert found["steps_per_second"] == pytest.approx(10 + gpu)


def test_a_measurement_on_a_gpu_needs_one(folders, bench, monkeypatch, capsys):
    asked = []

    def measure(entry, commit, measurement):
        asked.append(measurement.gpu)
        return {"steps_per_second": 1.0, "start_seconds": 0.0, "peak_mib": 1.0}

    monkeypatch.setattr(throughput, "measure", measure)
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "The GPU")
        bench("throughput", "--repetitions", "1")
        assert set(asked) == {there}
        asked.clear()
    lines = results.lines_of(folders.results / "throughput.jsonl")
    assert all(("(The GPU)" in x["title"]) == x["measurement"].startswith("gpu") for x in lines)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench("throughput", "atari", "gpu_atari")
    assert "gpu_atari needs a GPU" in capsys.readouterr().err
    assert not asked  # refused before the first is measured


# --- Committed results ---


def with_former_flags(variant):
    """The flags with which a variant's runs were made, when the scripts still had these."""
    former = [x for x, texts in FORMER_FLAGS.items() if {*texts} <= {*variant.replaced}]
    return " ".join(former)


def options(flags):
    """Flags with their values, in whatever order they stand."""
    return sorted(flags.replace(" --", "\n--").splitlines())


@pytest.mark.parametrize("suite", SUITES)
def test_committed_results_have_the_suites_flags_and_whole_curves(suite):
    for key, made in results.done(suite, FOLDERS).items():
        expected = Run(SUITES[suite], *key, FOLDERS)
        curve = results.Result(made, FOLDERS.results / f"{suite}.csv").curve
        assert made["script"] == expected.script, key
        former = with_former_flags(SUITES[suite].variants[expected.variant])
        flags = " ".join([*expected.flags, former]).strip()
        assert options(made["flags"]) == options(flags), key
        assert f"--seed {made['seed']}" in made["flags"] and len(made["commit"]) == 40
        if SUITES[suite].total_timesteps:
            assert curve["episodes"].sum() == made["episodes"]
        else:
            trained = {x for x in made["models"] if not x.startswith(("sft", "best-of-"))}
            assert set(curve["stage"]) == trained


def test_a_run_of_the_real_script_end_to_end(folders, bench, capfd, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling would take most of the time
    bench("run", "smoke", "--only", "seed2")
    assert "1 of 1 runs done." in capfd.readouterr().out
    (result,) = results.by_environment("smoke", "", folders)[PENDULUM]
    assert result.record["steps"] == 4096 and result.record["settings"] == {"total_timesteps": 4096}
    assert 0 < result.record["score"] < 1000 and len(result.record["commit"]) == 40
    assert result.curve["episodes"].sum() == result.record["episodes"]
    assert len(result.column("approx_kl")[0]) == 2  # one per iteration


def test_a_new_series_of_details_stands_behind_the_known_ones_and_before_extras():
    numbers = ["extra", "A5", "D1", "R10", "R2", "37/37"]
    assert sorted(numbers, key=pages.place) == ["37/37", "R2", "R10", "D1", "A5", "extra"]


def test_without_a_baseline_variants_stand_beside_the_first(committed):
    suite = SUITES["masks"]
    first = dataclasses.replace(suite, baseline=None)
    assert tables.variants_table(first, committed) == tables.variants_table(suite, committed)
