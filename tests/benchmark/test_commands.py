"""`seeds`, `compare`, `check` and `table`: what a user meets on the way from a run to a result."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from stable_baselines3 import PPO
from test_benchmark_runs import RAY
from torch.utils.tensorboard import SummaryWriter

import ppo_continuous_action as ppo
from benchmark import check, compare, diagnose, logs, record, seeds
from benchmark.__main__ import for_script, main
from benchmark.definitions import Folders
from benchmark.provenance import ROOT, BenchmarkError
from benchmark.report import pages, plots, statistics

STAND_IN = Path(__file__).with_name("stand_in_seeds.py")
PENDULUM = "InvertedPendulum-v5"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder; returns its exit code and all that it says."""
    monkeypatch.chdir(tmp_path)
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}

    def call(*words):
        code = 0
        try:
            main([*map(str, words)])
        except SystemExit as exit:
            code = exit.code
        return code, "".join(capsys.readouterr())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


# --- seeds ---


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start `seeds` on the stand-in in a process of its own; its output is in said.txt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", RAY)
    processes = []

    def begin(*words, pace=0.0, crash="", script=STAND_IN):
        def child():
            os.environ.update({"PACE": str(pace), "CRASH": crash})
            with (
                open("said.txt", "w") as file,
                contextlib.redirect_stdout(file),
                contextlib.redirect_stderr(file),
            ):
                main(["seeds", str(script), "--env-ids", "A-v1", *words, "--name", "mine"])

        processes.append(multiprocessing.get_context("fork").Process(target=child))
        processes[-1].start()
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.join()


def said(process, code=0):
    process.join(300)
    text = Path("said.txt").read_text()
    assert process.exitcode == code, text
    return text


def starts(seed, environment="A-v1"):
    """First iteration and process of each start of a run."""
    path = Path(f"runs/mine/{environment}/seed{seed}/runs/run/starts.txt")
    rows = [x.split() for x in path.read_text().splitlines()] if path.exists() else []
    assert all(threads == "1" for *_, threads in rows)
    return {int(first): int(process) for first, process, _ in rows}


def test_seeds_makes_all_runs_once_and_shows_them(start):
    text = said(start("B-v1", "--seeds", "3", "--gain=-1", "--workers", "3"))
    assert "| A-v1 | 3 | 21.0 ± 8.6 | 21.0 [10.5, 31.5] | 0.3 |" in text  # mean 10.5 per seed
    made = pd.read_csv("runs/mine/episodes.csv")
    assert list(made) == ["environment", "seed", "step", "return", "length"] and len(made) == 120
    assert (made["return"] == made["seed"] * made["step"] / 100).all()
    about = json.loads(Path("runs/mine/about.json").read_text())
    assert len(about["sha256"]) == 64 and about["flags"] == "--gain=-1"
    lines = [json.loads(x) for x in Path("runs/mine/mine.jsonl").read_text().splitlines()]
    assert [(x["environment"], x["seed"], x["sha256"] == about["sha256"]) for x in lines] == [
        (x, y, True) for x in ("A-v1", "B-v1") for y in (1, 2, 3)
    ]
    assert plots.Image.open("runs/mine/curves.png").width > 600
    assert "6 runs, 6 of them done before." in said(start("B-v1", "--seeds", "3", "--gain=-1"))
    assert all([*starts(x, y)] == [1] for x in (1, 2, 3) for y in ("A-v1", "B-v1"))
    text = said(start("--seeds", "4", "--gain", "2"), 2)
    assert "Error: runs/mine has runs of another version of stand_in_seeds.py, or with" in text


def test_interrupted_seeds_end_their_scripts_and_the_same_command_continues(start):
    words = ("--seeds", "7", "9", "--workers", "2")
    process = start(*words, pace=0.4)
    while "iteration" not in seeds.progress(run_of(9))[1] or seeds.progress(run_of(7))[0] < 6:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert "The same command continues the runs where they stopped." in said(process, 130)
    assert not any(Path(f"/proc/{starts(x)[1]}").exists() for x in (7, 9))
    text = said(start(*words))
    (one, other) = starts(7)
    assert "A-v1/seed7 continues" in text and one == 1 and other in (6, 11, 16)
    assert len(pd.read_csv("runs/mine/episodes.csv")) == 40


def run_of(seed):
    """A run of the test, whose output may not exist yet."""
    suite = SimpleNamespace(name="mine", variants={})
    run = seeds.SeedRun(suite, "A-v1", "", seed, Folders(Path("runs/mine"), Path("runs")))
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "output.txt").touch()
    return run


@pytest.mark.parametrize("cluster", [("--workers", "1"), ("--cluster", "ray")])
def test_a_seed_that_fails_does_not_stop_the_others_and_is_named_at_the_end(start, cluster):
    text = said(start("--seeds", "3", *cluster, crash="2"), 2)
    assert text.strip().endswith(
        "Error: 1 of 3 runs failed: A-v1/seed2 ended with exit code 1: Error: out of luck"
    )
    assert "| A-v1 | 2 | 21.0 ± 10.5 |" in text
    assert [*starts(3)] == [1]


def test_a_flag_that_the_script_refuses_is_said_before_other_runs_begin(start):
    text = said(start("--seeds", "3", "--workers", "3", "--no-such-flag", "1"), 2)
    assert "Error: stand_in_seeds.py does not start: " in text and "--no-such-flag" in text
    assert text.count("starts") == 1 and not Path("runs/mine/A-v1/seed2").exists()


def test_the_others_wait_until_the_first_has_made_an_iteration(start):
    said(start("--seeds", "2", "--workers", "2", pace=0.2))
    first, second = (Path(f"runs/mine/A-v1/seed{x}") for x in (1, 2))
    begun = (second / "note.json").stat().st_mtime
    assert (first / "runs/run/starts.txt").stat().st_mtime + 0.2 < begun
    assert begun < (first / "result.json").stat().st_mtime


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.py", "--env-ids", "A"), "There is no script nowhere.py."),
        ((STAND_IN, "--env-ids", "A", "--seed", "3"), "`seeds` itself gives --seed to the script"),
        ((STAND_IN, "--env-ids", "A", "--seeds", "-3", "1"), "--seeds that are not negative"),
        ((STAND_IN, "--env-ids", "A", "--workers", "0"), "--workers must be positive."),
        ((STAND_IN, "--env-ids", "A", "--name", "a/b"), "--name a/b: use letters"),
    ],
)
def test_mistakes_are_one_sentence(command, words, message):
    code, text = command("seeds", *words)
    assert code == 2 and message in text and text.count("\n") == 1


def test_flags_that_seeds_does_not_know_go_to_the_script():
    line = "seeds x.py --env-ids A B --lr -0.1 --seeds 3 --no-compile --workers=2 --flag=a"
    *ours, flags = for_script(line.split())
    assert ours == ["seeds", "x.py", "--env-ids", "A", "B", "--seeds", "3", "--workers=2"]
    assert flags == "--flags=--lr -0.1 --no-compile --flag=a"


def test_a_killed_run_of_a_real_script_continues_to_the_bit(tmp_path, monkeypatch):
    """A changed copy in another folder, which imports a module that lies next to it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/neighbor.py").write_text("")
    text = (ROOT / "ppo_continuous_action.py").read_text()
    (tmp_path / "own/changed.py").write_text(
        text.replace("import math\n", "import math\nimport neighbor\n")
    )
    line = f"seeds own/changed.py --env-ids {PENDULUM} --seeds 1 --workers 1 --total-timesteps 4096"
    line = [*line.split(), *"--num-steps 64 --no-compile --checkpoint-interval 1".split()]  # noqa: SIM905
    process = multiprocessing.get_context("fork").Process(target=main, args=(line,))
    process.start()
    path = tmp_path / f"runs/changed/{PENDULUM}/seed1/runs/run/checkpoint.pt"
    while not path.exists():
        assert process.is_alive()
        time.sleep(0.02)
    process.terminate()
    process.join()
    assert len(record.read_checkpoint(path)["updates"]) < 64
    main(line)
    saved = record.read_checkpoint(path)
    flags = {"total_timesteps": 4096, "num_steps": 64, "compile": False}
    whole = ppo.train(ppo.Args(env_id=PENDULUM, run_name="whole", **flags))
    weights = whole["agent"].state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in saved["agent"].items())
    assert record.episodes_of(saved).to_dict("records") == whole["episodes"]


# --- Logs of others ---


def write_cleanrl(folder, seed=1, metrics=(), environment=PENDULUM, gain=1.0):
    """A log as CleanRL's PPO writes it."""
    writer = SummaryWriter(str(folder / f"{environment}__ppo__{seed}__1700000000"))
    about = {"env_id": environment, "seed": seed}
    rows = "\n".join(f"|{x}|{y}|" for x, y in about.items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    for i in range(1, 41):
        for k in range(5):
            writer.add_scalar("charts/episodic_return", gain * (i + k), 2048 * i - 400 * k)
        values = {"approx_kl": 0.01, "clipfrac": 0.15, "explained_variance": 0.9, "entropy": 1.0}
        for name, value in (values | dict(metrics)).items():
            writer.add_scalar(name if "/" in name else f"losses/{name}", value, 2048 * i)
    writer.close()


@pytest.fixture(scope="session")
def sb3(tmp_path_factory):
    """Logs of three short trainings with Stable-Baselines3."""
    folder = tmp_path_factory.mktemp("sb3")
    for seed in range(3):
        model = PPO("MlpPolicy", PENDULUM, seed=seed, n_steps=512, device="cpu", n_epochs=2)
        model.tensorboard_log = str(folder)
        model.learn(2048)
    return folder


def test_a_log_of_stable_baselines3_is_compared_and_checked(sb3, tmp_path, command):
    for seed in (1, 2, 3):
        write_cleanrl(tmp_path / "cleanrl", seed, gain=seed)
    code, text = command("compare", "cleanrl", sb3)
    assert (
        code == 0 and f"A log that does not name its environment is taken for {PENDULUM}." in text
    )
    assert f"{PENDULUM}: compared at 2,048 steps, which all have reached." in text
    assert plots.Image.open("compare.png").width > 600
    log = logs.find(str(sb3))[0]
    assert log.averaged and log.steps == 2048 and log.score == log.returns.iloc[-1] > 5
    assert {"losses/approx_kl", "losses/clipfrac", "losses/entropy"} < {*log.updates}
    assert (log.updates["losses/entropy"].dropna() > 0).all()  # SB3 logs its negative
    code, text = command("check", sb3 / "PPO_1")
    assert code == 0 and "too early to tell" in text and "def observed_returns" in text
    lacks = "check/acting, check/first_kl, check/update, check/value_bias"
    assert f"Not in this log, so not checked: {lacks}." in text
    assert (sb3 / "PPO_1/check.png").exists()


def test_a_log_of_cleanrl_is_checked_with_what_was_pasted(tmp_path, command):
    write_cleanrl(tmp_path, metrics={"check/value_bias": 0.9, "check/update": 0.3, "clipfrac": 0.6})
    code, text = command("check", tmp_path)
    assert code == 0 and f"{PENDULUM}, 81,920 steps" in text
    rows = {x.split()[0]: x for x in text.splitlines() if "/" in x.partition(" ")[0]}
    assert rows["check/value_bias"].endswith("at most 0.6      unhealthy since 40,960")
    assert rows["losses/clipfrac"].endswith("0.07 to 0.3      unusual")
    assert rows["losses/approx_kl"].endswith("healthy") and rows["check/update"].endswith("healthy")
    assert "    DEBUGGING.md: `check/value_bias` far above 0" in text
    assert "checked: check/acting, check/first_kl." in text and "paste" not in text


def test_what_is_pasted_computes_what_the_script_logs():
    rng = np.random.default_rng(0)
    arrays = torch.tensor(rng.normal(size=(5, 30, 4)), dtype=torch.float32)
    rewards, values, advantages, old, new = arrays
    done, last = torch.tensor(rng.random((30, 4)) < 0.1), torch.ones(4)
    next_values = torch.cat([values[1:], last[None]])
    observed = ppo.observed_returns([rewards, next_values, done, done], 0.9)
    ours = diagnose.observed_returns(rewards, done.float(), last, 0.9)
    assert torch.allclose(ours, observed)
    found = diagnose.diagnose(rewards, done.float(), last, 0.9, values, advantages, old, new)
    bias = (values - observed).mean() / observed.square().mean().sqrt()
    assert found["check/value_bias"] == pytest.approx(bias.item(), rel=1e-4)
    update = (ppo.normalize(new - old) * ppo.normalize(advantages)).mean()
    assert found["check/update"] == pytest.approx(update.item(), abs=1e-5)


# --- compare ---


def test_scores_and_chances_are_those_of_the_last_hundred_episodes(tmp_path, command):
    for seed, gain in enumerate((1.0, 2.0, 4.0), start=1):
        write_cleanrl(tmp_path / "a", seed, gain=gain)
        write_cleanrl(tmp_path / "b", seed, gain=gain + 1.5)
    code, text = command("compare", "a", "b")
    mean = np.mean([i + k for i in range(21, 41) for k in range(5)])  # of the last 100, of gain 1
    a, b = mean * 7 / 3, mean * (7 / 3 + 1.5)
    assert code == 0 and f"| {PENDULUM} | {a:.1f} [" in text and f"| {b:.0f} [" in text
    assert "| 0.78 [" in text  # 7 of 9 pairs
    assert "b and a, 3 seeds each: in one environment, a difference of less than about" in text


def test_the_smallest_visible_difference_is_noticed_in_four_of_five_experiments():
    rng = np.random.default_rng(0)
    a, b = rng.normal(10, 1, size=(2, 4000, 5))
    sizes = [statistics.smallest_visible(x, y) for x, y in zip(a, b)]
    shift = 10 * np.sqrt(np.mean(np.square(sizes)))
    noticed = stats.ttest_ind(a + shift, b, axis=1).pvalue < 0.05
    assert 0.74 < noticed.mean() < 0.86


def test_rows_of_suites_are_compared_by_their_committed_scores(command, committed):
    place = ("--results", committed.results)
    code, text = command("compare", "figure3", "ablation:raw-rewards", *place)
    own = [x["score"] for x in map(json.loads, (committed.results / "figure3.jsonl").open())
           if x["environment"] == "Hopper-v4" and x["variant"] == ""]  # fmt: skip
    assert code == 0
    assert f"| Hopper-v4 | {stats.trim_mean(own, 0.25):.0f} [" in text
    assert "| all (0: worst run, 1: best) |" in text and "Left out, since not all have it:" in text
    code, text = command("compare", "figure3", "ablation:nothing", *place)
    assert code == 2 and "ablation:nothing is no row of a suite; there are ablation:" in text


def test_run_folders_that_differ_only_in_the_seed_are_one_group(tmp_path):
    for name in ("old", "new"):
        for seed in (1, 2):
            write_cleanrl(tmp_path / f"{name}-{seed}", seed)
    names = tuple(str(x) for x in sorted(tmp_path.iterdir()))
    groups = compare.groups_of(names, Folders())
    assert {x: len(y) for x, y in groups.items()} == {"new": 2, "old": 2}
    assert len(compare.groups_of(names[:2], Folders())) == 2  # else nothing would be compared
    both = (str(tmp_path / "old-*"), names[0])
    assert [len(x) for x in compare.groups_of(both, Folders()).values()] == [2, 1]
    label = compare.label_of("runs/Hopper-v4__ppo_continuous_action__1__1790000000")
    assert label == "ppo_continuous_action"


def test_what_cannot_be_compared_is_one_sentence(tmp_path, command):
    write_cleanrl(tmp_path / "a")
    write_cleanrl(tmp_path / "b", environment="Hopper-v5")
    writer = SummaryWriter(str(tmp_path / "silent"))
    writer.add_scalar("losses/approx_kl", 0.01, 100)
    writer.close()
    (tmp_path / "empty").mkdir()
    for words, message in (
        (("a", "nowhere"), "nowhere is neither a folder nor a suite."),
        (("a", "silent"), "silent logs no returns: wrap the environment in Record"),
        (("a", "b"), f"no environment that all have: a has {PENDULUM}; b has Hopper-v5."),
        (("a", "empty"), "empty has no checkpoint.pt and no TensorBoard log of PPO."),
        (("a",), "To compare, give at least two"),
    ):
        code, text = command("compare", *words)
        assert code == 2 and message in text and text.count("\n") == 1, text
    code, text = command("check", "nowhere")
    assert code == 2 and text == "Error: There is no folder nowhere.\n"


def test_one_seed_each_says_nothing(tmp_path, command):
    write_cleanrl(tmp_path / "a")
    write_cleanrl(tmp_path / "b", gain=2)
    code, text = command("compare", "a", "b")
    assert code == 0 and "with 1 seed each, nothing can be said about a difference" in text


# --- check ---


def judged(updates, returns=()):
    episodes = pd.DataFrame({"global_step": 100 * np.arange(len(returns)), "return": returns})
    log = logs.Log(Path("x"), {"environment": "A-v1"}, pd.DataFrame(updates), episodes)
    return {x["metric"]: x for x in check.judge(log)}, check.report(log)


def test_a_run_is_judged_while_it_trains_and_after(tmp_path, monkeypatch, command):
    """Before its first checkpoint, the log is all that there is."""
    monkeypatch.chdir(tmp_path)
    args = ppo.Args(env_id=PENDULUM, total_timesteps=8192, num_steps=512, compile=False)
    run = ppo.train(args)["run_dir"]
    saved = logs.find(str(run))[0]
    (run / "checkpoint.pt").rename("checkpoint.pt")
    running = logs.find(str(run))[0]
    assert saved.environment == running.environment == PENDULUM
    assert len(saved.updates) == len(running.updates) == 16
    for metric in check.limits_of(saved.updates.columns):
        values = [x.updates[metric.metric].to_numpy() for x in (saved, running)]
        assert np.allclose(*values, rtol=1e-5, atol=1e-7)
    code, text = command("check", run)
    assert code == 0 and "Not in this log" not in text and "check/acting" in text


def test_what_is_wrong_now_was_wrong_or_is_only_unusual():
    steps = 2048 * np.arange(1, 41)
    kl, bias = np.full(40, 0.06), np.full(40, 0.1)
    bias[:25] = 0.9
    rows, text = judged({"global_step": steps, "losses/approx_kl": kl, "check/value_bias": bias})
    assert rows["losses/approx_kl"]["verdict"] == "unusual"  # its return is not lost
    assert rows["check/value_bias"]["verdict"] == f"unhealthy at {2048 * 20:,}"
    returns = np.r_[np.arange(500), np.zeros(300)]
    rows, text = judged({"global_step": steps, "losses/approx_kl": kl}, returns)
    assert rows["losses/approx_kl"]["verdict"].startswith("unhealthy since ")
    assert "Lower --learning-rate" in text and "jump from the first update" in text
    rows, _ = judged({"global_step": steps[:5], "losses/approx_kl": kl[:5]})
    assert rows["losses/approx_kl"]["verdict"] == ""


@pytest.mark.parametrize("coefficient", [0.5, 0.0])
def test_without_a_penalty_a_large_kl_is_to_be_expected(coefficient):
    updates = {"global_step": np.arange(1, 21), "objective/kl_exact": 40.0}
    _, text = judged(updates | {"objective/kl_coef": coefficient, "check/update": 0.2})
    assert ("unhealthy since 1" in text) == (coefficient > 0) and "20 updates" in text


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        *(
            (x, check.ENVIRONMENTS)
            for x in ("ppo_continuous_action", "ppo_kl_penalty", "ppo_atari")
        ),
        *((x, check.ENVIRONMENTS) for x in ("ppo_atari_lstm", "ppo_multidiscrete")),
        ("ppo_rlhf_toy", check.RLHF),
        ("grpo_rlhf_toy", check.GRPO),
        ("dpo_rlhf_toy", check.DPO),
    ],
)
def test_each_script_logs_what_its_limits_are_for(name, limits):
    text = (ROOT / f"{name}.py").read_text()
    metrics = {x for x in text.split('"') if "/" in x and " " not in x}
    assert check.limits_of(pd.Index(metrics)) is limits
    assert {x.metric for x in limits} - metrics <= {"check/acting"}


def test_stages_of_rlhf_are_found_and_others_are_not(tmp_path):
    for name, saved in (
        ("sft", {"model": {}}),
        ("grpo", {"updates": [{"objective/kl_exact": 5.0, "losses/k3": 0.1, "check/update": 0.2}]}),
    ):
        (tmp_path / name).mkdir()
        torch.save(saved, tmp_path / name / "checkpoint.pt")
    (log,) = logs.find(str(tmp_path))
    assert log.path.name == "grpo" and check.limits_of(log.updates.columns) is check.GRPO
    (tmp_path / "grpo/checkpoint.pt").write_bytes(b"x")
    with pytest.raises(BenchmarkError, match=r"checkpoint\.pt cannot be read"):
        logs.find(str(tmp_path))


def test_episodes_are_read_in_both_forms():
    rows = [{"global_step": 5, "return": 1.5, "length": 5}]
    columns = {x: torch.tensor([y]) for x, y in rows[0].items()}
    for found in (rows, columns):
        assert record.episodes_of({"episodes": found}).to_dict("records") == rows
    assert record.episodes_of({"episodes": []}).empty and record.episodes_of({}).empty


# --- table ---


def test_table_prints_that_of_a_suite_and_report_works_with_one_suite(command, committed, tmp_path):
    place = ("--results", committed.results)
    code, text = command("table", "cartpole", *place)
    assert code == 0 and "CartPole-v1" in text and text.startswith("| ")
    assert any(text.strip() in page.read_text() for page in pages.PAGES)
    assert command("table", "bugs_healthy", *place)[0] == 2
    assert "No run of cartpole is finished." in command("table", "cartpole", "--results", "x")[1]
    for kind in ("jsonl", "csv"):
        shutil.copy(committed.results / f"cartpole.{kind}", tmp_path)
    blocks = {name: pages.block(name, Folders(tmp_path)) for name in pages.BLOCKS}
    assert blocks["goal"] == "" and "CartPole-v1" in blocks["scripts"]
