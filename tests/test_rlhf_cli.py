"""ppo_rlhf_toy.py as a program: whole runs, resuming, own text and bad input."""

import csv
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from wandb_log import wandb_records

import ppo_rlhf_toy as rlhf
from ppo_rlhf_toy import Args, RunError

torch.set_num_threads(1)
SCRIPT = Path(rlhf.__file__)


@pytest.fixture(autouse=True, scope="module")
def few_samples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlhf, "NUM_SAMPLES", 64)
        patch.setattr(rlhf, "EVALUATION_SAMPLES", 32)
        patch.setattr(rlhf, "BEST_OF_N", (2, 4))
        patch.setattr(rlhf, "BEST_OF_N_QUERIES", 4)
        yield


def small_args(folder: Path) -> Args:
    """Settings of a run of a few seconds."""
    return Args(
        output_dir=str(folder),
        run_name="run",
        sft_documents=200,
        sft_steps=18,
        num_pairs=140,
        reward_batch_size=8,
        num_updates=4,
        batch_size=16,
        checkpoint_interval=1,
        contrast=False,
    )


@pytest.fixture
def small(tmp_path) -> Args:
    return small_args(tmp_path / "runs")


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(rlhf, "draw_frontier", lambda path, runs, best: None)
    monkeypatch.setattr(
        rlhf.SummaryWriter, "add_figure", lambda self, tag, figure: None, raising=False
    )


def weights(run: dict) -> list[torch.Tensor]:
    return list(run["agent"].state_dict().values())


def same(first: dict, second: dict) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def course(run: dict) -> list[dict]:
    """All metrics of the updates but the timings."""
    return [
        {name: x for name, x in row.items() if "per_second" not in name}
        for rows in run["updates"].values()
        for row in rows
    ]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_whole_pipeline_leaves_table_picture_texts_and_curves(small, capsys):
    args = dataclasses.replace(small, compare=True)
    run = rlhf.train(args)
    assert set(run["results"]) == {
        *("sft", "ppo-adaptive-6", "ppo-none", "ppo-fixed-0.05", "best-of-2", "best-of-4")
    }
    assert all(len(rows) == 4 for rows in run["updates"].values())
    folder = run["args"].run_dir
    results = json.loads((folder / "results.json").read_text())
    assert results["results"] == run["results"]
    report = (folder / "report.md").read_text()
    assert "| ppo-none |" in report and "on the" in report and "gold" in report
    picture = (folder / "frontier.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 200_000
    steps = scalars(folder / "ppo-none", "objective/kl")
    rows = run["updates"]["ppo-none"]
    assert [x for x, _ in steps] == [1, 2, 3, 4]
    assert [x for _, x in steps] == pytest.approx([r["objective/kl"] for r in rows], abs=1e-5)
    with (folder / "ppo-none.csv").open() as file:
        logged = [float(row["objective/proxy"]) for row in csv.DictReader(file)]
    assert logged == [row["objective/proxy"] for row in rows]
    printed = capsys.readouterr().out
    assert "stop rate" in printed and str(folder) in printed


def test_weights_and_biases_offline_run_can_be_read_back(tmp_path):
    """In a process of its own, since wandb keeps state."""
    sizes = "--sft-documents 200 --sft-steps 5 --num-pairs 140 --num-updates 2 --batch-size 16"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *f"{sizes} --no-contrast --track --run-name mine".split()],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (log,) = tmp_path.glob("runs/mine/wandb/offline-run-*/run-*.wandb")
    values, axes = {}, {}
    for record in wandb_records(log):
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                key = item.key or ".".join(item.nested_key)
                values.setdefault(key, []).append(json.loads(item.value_json))
        elif record.WhichOneof("record_type") == "metric":
            axes[record.metric.glob_name] = record.metric.step_metric
    assert {"details", "table", "frontier"} <= {key.partition(".")[0] for key in values}
    with (tmp_path / "runs/mine/ppo-adaptive-6.csv").open() as file:
        logged = [float(row["objective/kl"]) for row in csv.DictReader(file)]
    assert values["ppo-adaptive-6/objective/kl"] == logged
    assert values["ppo-adaptive-6/step"] == [1, 2] and values["sft/step"] == [1, 2, 3, 4, 5]
    assert axes["ppo-adaptive-6/*"] == "ppo-adaptive-6/step"


def test_same_seed_same_run_and_another_seed_another(small, finished, no_picture):
    again = rlhf.train(dataclasses.replace(small, run_name="again"))
    other = rlhf.train(dataclasses.replace(small, run_name="other", seed=2))
    assert same(finished, again) and course(finished) == course(again)
    assert finished["results"] == again["results"]
    assert not same(finished, other)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, not to be touched."""
    return rlhf.train(small_args(tmp_path_factory.mktemp("finished")))


@pytest.fixture
def uninterrupted(small, finished, no_picture):
    """The same in a folder of one's own."""
    shutil.copytree(finished["args"].run_dir, small.run_dir)
    return {**finished, "args": small}


@pytest.mark.parametrize(
    ("stage", "at"), [("sft", 11), ("reward-model", 17), ("auditor", 9), ("ppo-adaptive-6", 3)]
)
@pytest.mark.parametrize("how", ["signal", "kill"])
def test_interrupted_run_continues_bit_for_bit(small, uninterrupted, monkeypatch, stage, at, how):
    args = dataclasses.replace(small, run_name="interrupted")
    original = rlhf.Stage.save

    def interrupt(self, step, **extra):
        if (self.name, step) == (stage, at):
            if how == "kill":
                raise MemoryError("killed")  # nothing is saved at this step
            self.stop.signum = signal.SIGTERM
        original(self, step, **extra)

    with monkeypatch.context() as patch:
        patch.setattr(rlhf.Stage, "save", interrupt)
        with pytest.raises(MemoryError if how == "kill" else SystemExit) as caught:
            rlhf.train(args)
    if how == "signal":
        assert caught.value.code == 128 + signal.SIGTERM
    time.sleep(1.01 - time.time() % 1)  # the files of TensorBoard are in the order of their seconds
    resumed = rlhf.train(dataclasses.replace(args, resume=str(args.run_dir)))
    assert same(uninterrupted, resumed)
    assert course(uninterrupted) == course(resumed)
    assert uninterrupted["results"] == resumed["results"]
    for name in ("sft", "reward-model", "auditor", "ppo-adaptive-6"):
        tag = "losses/policy_loss" if name.startswith("ppo") else "losses/loss"
        curves = [scalars(x["args"].run_dir / name, tag) for x in (uninterrupted, resumed)]
        assert curves[0] == curves[1], name


@pytest.mark.parametrize(
    "made", ["sft", "preferences", "reward-model", "auditor", "ppo-adaptive-6"]
)
def test_asked_to_stop_between_two_stages_it_ends_within_a_step(
    small, uninterrupted, monkeypatch, made
):
    args = dataclasses.replace(small, run_name="interrupted")
    save, log, later = rlhf.save_artefact, rlhf.Stage.log, []

    def save_and_signal(args, name, **content):
        save(args, name, **content)
        if name == made:
            later.clear()
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(rlhf, "save_artefact", save_and_signal)
        patch.setattr(
            rlhf.Stage, "log", lambda self, *a, **k: (later.append(a[0]), log(self, *a, **k))
        )
        with pytest.raises(SystemExit) as caught:
            rlhf.train(args)
    assert caught.value.code == 128 + signal.SIGTERM
    assert later in ([], [1])
    assert not (args.run_dir / "report.md").exists()
    resumed = rlhf.train(dataclasses.replace(args, resume=str(args.run_dir)))
    assert same(uninterrupted, resumed) and course(uninterrupted) == course(resumed)


def test_ppo_is_redone_with_another_beta_and_the_rest_is_reused(
    small, uninterrupted, capsys, monkeypatch
):
    folder = str(small.run_dir)
    capsys.readouterr()
    trained = []
    enter = rlhf.Stage.__enter__
    monkeypatch.setattr(
        rlhf.Stage, "__enter__", lambda self: (trained.append(self.name), enter(self))[1]
    )
    redone = rlhf.train(
        dataclasses.replace(small, resume=folder, stage="ppo", kl_mode="fixed", kl_coef=0.1)
    )
    assert trained == ["ppo-fixed-0.1"]
    assert not same(uninterrupted, redone)
    # What was there stays, and coming back to it trains nothing. Of an earlier stage, other
    # settings make all that follow it anew.
    trained.clear()
    back = rlhf.train(dataclasses.replace(small, resume=folder, stage="ppo"))
    assert trained == [] and same(uninterrupted, back)
    assert "taken from" in capsys.readouterr().out
    rlhf.train(dataclasses.replace(small, resume=folder, stage="reward-model", reward_epochs=1))
    assert trained == ["reward-model", "auditor", "ppo-adaptive-6"]


def test_reused_stages_equal_fresh_ones(small, uninterrupted):
    """Another beta on reused stages is the run that has this beta from the start."""
    settings = {"kl_mode": "fixed", "kl_coef": 0.1}
    reused = rlhf.train(
        dataclasses.replace(small, resume=str(small.run_dir), stage="ppo", **settings)
    )
    fresh = rlhf.train(dataclasses.replace(small, run_name="fresh", **settings))
    assert same(reused, fresh)


def test_resuming_refuses_to_change_what_is_done(small, uninterrupted):
    folder = str(small.run_dir)
    for change, stage in (
        ({"kl_coef": 0.1}, "ppo"),
        ({"reward_epochs": 3}, "reward-model"),
        ({"num_pairs": 70}, "preferences"),
        ({"seed": 2}, "sft"),
    ):
        with pytest.raises(RunError, match=f"--stage {stage}"):
            rlhf.train(dataclasses.replace(small, resume=folder, **change))
    with pytest.raises(RunError, match="--stage sft"):
        rlhf.train(dataclasses.replace(small, resume=folder, stage="ppo", seed=2))


def test_damaged_files_are_refused_and_the_older_one_is_named(small, uninterrupted):
    rng = random.Random(0)
    args = dataclasses.replace(small, resume=str(small.run_dir))
    path = args.run_dir / "sft.pt"
    data = path.read_bytes()
    for _ in range(5):
        path.write_bytes(data[: rng.randrange(len(data))])
        with pytest.raises(RunError, match=r"sft\.pt"):
            rlhf.train(args)
    flipped = bytearray(data)
    flipped[rng.randrange(len(data))] ^= 0xFF
    path.write_bytes(bytes(flipped))
    with pytest.raises(RunError, match=r"sft\.pt"):
        rlhf.train(args)
    path.write_bytes(data)
    # A checkpoint matters where a stage is unfinished; the one before it can be named instead.
    (args.run_dir / "ppo-adaptive-6.pt").unlink()
    checkpoint = args.run_dir / "checkpoint.pt"
    checkpoint.write_bytes(b"")
    with pytest.raises(RunError, match=r"older good one is .*checkpoint\.previous\.pt"):
        rlhf.train(args)
    older = str(checkpoint.with_name("checkpoint.previous.pt"))
    assert same(uninterrupted, rlhf.train(dataclasses.replace(args, resume=older)))


# --- Your own text and labels ---


def write_own_files(folder: Path) -> tuple[str, str]:
    rng = random.Random(0)
    colors, moods = ("red", "blue", "green"), ("fine", "bad")
    documents = [f"The {rng.choice(colors)} house is {rng.choice(moods)}." for _ in range(60)]
    pairs = [
        {
            "prompt": f"How is the {color} house, {name}?" if name else f"And the {color} one?",
            "chosen": f"The {color} house is fine.",
            "rejected": f"The {color} house is bad, very bad.",
        }
        for color in colors
        for name in ("Ann", "Bob", "", "Cy", "Di", "Ed", "Flo")
    ]
    corpus, preferences = folder / "corpus.txt", folder / "preferences.jsonl"
    corpus.write_text("\n\n".join(documents))
    preferences.write_text("\n".join(map(json.dumps, pairs)) + "\n")
    return str(corpus), str(preferences)


def test_own_text_and_labels_run_without_gold(small, tmp_path, capsys):
    corpus, preferences = write_own_files(tmp_path)
    run = rlhf.train(dataclasses.replace(small, corpus=corpus, preferences=preferences))
    assert "objective/gold" not in run["results"]["sft"]
    assert "correlation" not in run["reward_model"] and "accuracy" in run["reward_model"]
    assert not any("gold" in name for row in run["updates"]["ppo-adaptive-6"] for name in row)
    table = capsys.readouterr().out
    assert "proxy" in table and " gold " not in table
    assert (run["args"].run_dir / "frontier.png").exists()


def test_own_vocabulary_lengths_and_held_out_pairs(small, tmp_path):
    corpus, preferences = write_own_files(tmp_path)
    task = rlhf.own_task(dataclasses.replace(small, corpus=corpus, preferences=preferences))
    assert {"house", "ann", "?", ".", "<stop>"} <= set(task.words) and not task.has_gold
    queries, chosen, rejected = task.labelled
    assert queries.shape[1] == 1 + 8  # <bos> how is the green house , ann ?
    assert chosen.shape[1] == rejected.shape[1] == task.response_length
    assert ((chosen == task.stop).sum(1) == 1).all()
    # 21 pairs, 3 held out: the other 18 and the 60 documents are the SFT's.
    assert len(task.documents) == 18 + 60
    without = rlhf.own_task(dataclasses.replace(small, preferences=preferences))
    assert len(without.documents) == 18


def test_a_long_prompt_leaves_room_for_its_answer(small, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    prompt = " ".join(f"w{i}" for i in range(3 * rlhf.LONGEST))
    pair = {"prompt": prompt, "chosen": "yes sir", "rejected": "no"}
    path.write_text("\n".join([json.dumps(pair)] * 14))
    task = rlhf.own_task(dataclasses.replace(small, preferences=str(path)))
    assert task.split_words(task.documents[0])[-3:] == ["yes", "sir", "<stop>"]
    assert task.documents.shape[1] == rlhf.LONGEST + 3
    assert "prompts of up to 193" in capsys.readouterr().out


def test_files_are_remembered_as_they_were_when_read(small, tmp_path, monkeypatch):
    corpus, preferences = write_own_files(tmp_path)
    data = Path(corpus).read_bytes()
    train_sft = rlhf.train_sft

    def meanwhile(*args):
        Path(corpus).unlink()
        Path(preferences).write_text("something else")
        return train_sft(*args)

    monkeypatch.setattr(rlhf, "train_sft", meanwhile)
    args = dataclasses.replace(small, corpus=corpus, preferences=preferences)
    rlhf.train(args)
    for name in ("sft", "ppo-adaptive-6"):
        saved = rlhf.load_file(args.run_dir / f"{name}.pt", "settings")
        assert saved["settings"]["corpus"] == hashlib.sha256(data).hexdigest()


GOOD = '{"prompt": "p", "chosen": "a", "rejected": "b"}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"prompt": "p", "chosen": "a"}', "no rejected"),
        ('{"chosen": "a"}', "no prompt and no rejected"),
        ('{"prompt": "p", "chosen": 3, "rejected": "b"}', "must be texts"),
        ('{"prompt": "p", "chosen": " ", "rejected": "b"}', "not empty"),
        ('{"prompt": "p", "chosen": "a", "rejected": "a"}', "the same"),
    ],
)
def test_bad_preference_lines_are_reported_with_their_numbers(tmp_path, line, fault):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join([GOOD] * 3 + ["", line] + [GOOD] * 20 + [line, ""]))
    with pytest.raises(RunError) as caught:
        rlhf.read_preferences(str(path))
    message = str(caught.value)
    assert "line 5: " in message and fault in message and message.endswith("Also bad: 26.")


def test_own_files_as_other_programs_write_them(small, tmp_path):
    """With an id per pair, a byte-order mark, and a line separator within a text."""
    path = tmp_path / "p.jsonl"
    pair = {"id": "secret", "prompt": "p", "chosen": "a\u2028c", "rejected": "b"}
    path.write_text("\ufeff" + "\r\n".join([json.dumps(pair, ensure_ascii=False)] * 14), "utf-8")
    assert rlhf.read_preferences(str(path)) == [pair] * 14
    task = rlhf.own_task(dataclasses.replace(small, preferences=str(path)))
    assert task.words == ("<pad>", "<bos>", "<stop>", "a", "b", "c", "p")


def test_other_faults_of_own_files(small, tmp_path):
    path = tmp_path / "file"
    path.write_text(GOOD)
    with pytest.raises(RunError, match="1 comparisons; at least 14"):
        rlhf.read_preferences(str(path))
    path.write_bytes(b"fine\n\xff\xfe bad\n")
    with pytest.raises(RunError, match="line 2: not UTF-8"):
        rlhf.read_corpus(str(path))
    path.write_text("\n \n")
    with pytest.raises(RunError, match="holds no text"):
        rlhf.read_corpus(str(path))
    with pytest.raises(RunError, match="Cannot read"):
        rlhf.read_preferences(str(tmp_path / "absent"))
    with pytest.raises(RunError, match="--corpus needs --preferences"):
        dataclasses.replace(small, corpus=str(path))
    _, preferences = write_own_files(tmp_path)
    path.write_text(" ".join(f"w{i}" for i in range(rlhf.MOST_WORDS)))
    with pytest.raises(RunError, match="different words"):
        rlhf.own_task(dataclasses.replace(small, corpus=str(path), preferences=preferences))


def test_the_horizon_counts_in_the_adaptive_mode_only(small):
    settings = {"kl_mode": "none", "contrast": False, "compare": False}
    dataclasses.replace(small, batch_size=4096, **settings)
    with pytest.raises(RunError, match="--kl-horizon"):
        dataclasses.replace(small, batch_size=4096, kl_mode="adaptive")


def test_a_full_disk_does_not_end_the_run_over_samples(small, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rlhf, "SummaryWriter", full)
    rlhf.log_texts(small, "preferences", ["a"])
    assert "No space left" in capsys.readouterr().out


# --- The command line ---


def command_line(monkeypatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    with pytest.raises(SystemExit) as caught:
        rlhf.run_command_line()
    return caught.value.code


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-minibatches", "3"),
        ("--batch-size", "0"),
        ("--learning-rate", "-1"),
        ("--gamma", "1.5"),
        ("--kl-coef", "-0.1"),
        ("--num-pairs", "5"),
        ("--kl-horizon", "20"),
        ("--kl-coef", "0"),
        ("--kl-mode", "none", "--compare", "--kl-horizon", "20"),
        ("--temperature", "0"),
        ("--corpus", "x.txt"),
        ("--preferences", "absent.jsonl"),
        ("--stage", "ppo"),
        ("--resume", "absent"),
        pytest.param(
            ("--device", "cuda"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(monkeypatch, capsys, tmp_path, flags):
    assert command_line(monkeypatch, "--output-dir", str(tmp_path), *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and error.count("\n") == 1 and "Traceback" not in error
    assert not list(tmp_path.rglob("args.json"))  # what has not started is no run


def test_tracking_that_cannot_start_leaves_no_run(monkeypatch, capsys, tmp_path):
    flags = ("--output-dir", str(tmp_path), "--track")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        assert command_line(monkeypatch, *flags) == 2
    assert "pip install wandb" in capsys.readouterr().err

    import wandb

    def refuse(**settings):
        raise wandb.Error("no network")

    monkeypatch.setattr(wandb, "init", refuse)
    assert command_line(monkeypatch, *flags) == 2
    assert "no network" in capsys.readouterr().err
    assert not list(tmp_path.rglob("args.json"))


def test_flags_of_a_resumed_run_are_checked_with_its_own_settings(
    small, uninterrupted, monkeypatch, capsys
):
    settings = json.loads((small.run_dir / "args.json").read_text())
    changed = settings | {"batch_size": 15, "num_minibatches": 3}
    (small.run_dir / "args.json").write_text(json.dumps(changed))
    flags = ("--resume", str(small.run_dir), "--stage", "ppo", "--batch-size")
    asked = []
    monkeypatch.setattr(rlhf, "start_logs", lambda args: (asked.append(args), sys.exit(0)))
    assert command_line(monkeypatch, *flags, "9") == 0  # 3 minibatches, where the default is 4
    assert (asked[0].batch_size, asked[0].num_minibatches) == (9, 3)
    assert command_line(monkeypatch, *flags, "8") == 2
    assert "--num-minibatches 3 must divide" in capsys.readouterr().err


def test_a_used_or_unwritable_folder_is_refused(small, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text("{}")
    flags = ("--output-dir", small.output_dir, "--run-name", "run")
    assert command_line(monkeypatch, *flags) == 2
    assert "holds a run" in capsys.readouterr().err
    assert (folder / "args.json").read_text() == "{}"
    assert command_line(monkeypatch, *flags, "--resume", str(folder)) == 2
    assert "does not hold the settings" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert command_line(monkeypatch, "--output-dir", str(blocked)) == 2
    assert "Cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["policy_loss", "grad_norm"])
def test_nan_stops_the_run_with_a_sentence(small, monkeypatch, name):
    """Also a gradient that is NaN although the loss was finite."""
    original, calls = rlhf.rollout_loss, itertools.count(1)

    def broken(agent, mb, args):
        loss, metrics = original(agent, mb, args)
        if name == "policy_loss":
            metrics["losses/policy_loss"] = float("nan")
        last = next(calls) == args.update_epochs * args.num_minibatches
        return loss * float("nan") if last else loss, metrics

    monkeypatch.setattr(rlhf, "rollout_loss", broken)
    with pytest.raises(RunError, match=f"{name} is NaN or infinite at step 1"):
        rlhf.train(small)


TINY = [
    *("--sft-documents", "100", "--sft-steps", "8", "--num-pairs", "14"),
    *("--num-updates", "2", "--batch-size", "8"),
]


def run_script(*flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *launcher, str(SCRIPT), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_help_lists_every_setting():
    done = run_script("--help")
    assert done.returncode == 0
    for field in dataclasses.fields(Args):
        assert field.name.replace("_", "-") in done.stdout


@pytest.mark.slow
def test_script_copied_alone_runs_and_is_resumed_from_the_command_line(tmp_path):
    alone = tmp_path / "alone.py"
    alone.write_bytes(SCRIPT.read_bytes())
    command = [sys.executable, str(alone), "--output-dir", str(tmp_path / "runs"), *TINY]
    done = subprocess.run(
        [*command, "--run-name", "x"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    resume = ["--resume", str(tmp_path / "runs" / "x"), "--stage", "ppo", "--kl-mode", "fixed"]
    done = subprocess.run(
        [sys.executable, str(alone), *resume], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "sft: taken from" in done.stdout and "ppo-fixed-0.5" in done.stdout


@pytest.mark.slow
def test_two_processes_stay_equal_and_draw_different_responses(tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import torch, ppo_rlhf_toy as r\n"
        f"args = r.Args(output_dir={str(tmp_path)!r}, run_name='two', sft_documents=100,\n"
        "    sft_steps=4, num_pairs=28, num_updates=2, batch_size=8, contrast=False)\n"
        "run = r.train(args)\n"
        "rows = run['updates']['ppo-adaptive-6']\n"
        f"file = {str(tmp_path)!r} + f'/rank{{r.RANK}}.pt'\n"
        "torch.save([run['agent'].state_dict(), rows], file)\n"
    )
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, str(probe)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name]), name
    assert first[1][0]["objective/proxy"] != second[1][0]["objective/proxy"]
    assert first[1][1]["objective/kl_coef"] == second[1][1]["objective/kl_coef"]


@pytest.mark.slow
def test_terminated_script_tells_how_to_resume(tmp_path):
    command = [sys.executable, str(SCRIPT), "--output-dir", str(tmp_path), "--run-name", "x"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("sft: step"):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 128 + signal.SIGTERM
    assert f"--resume {tmp_path / 'x'}" in rest and (tmp_path / "x" / "checkpoint.pt").exists()
