"""What is kept of a run, and whether the committed results have it."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark.evidence.baselines import rsl_rl_ppo, stable_baselines3_ppo
from benchmark.evidence.runs import flags_of
from benchmark.evidence.suites import SUITES
from benchmark.lab import record, results
from benchmark.lab.definitions import Folders

FOLDERS = Folders()
PENDULUM = "InvertedPendulum-v4"


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
        "args": {"kl_mode": "fixed", "run_name": "run", "total_timesteps": 4000},
        "episodes": [{"global_step": 10 * i, "return": float(i)} for i in range(1, 151)],
        "updates": [
            {"global_step": 1000 * i, "charts/SPS": rate} for i, rate in enumerate(rates, start=1)
        ],
    }
    torch.save(saved, tmp_path / "checkpoint.pt")
    facts, rows = record.summarize_steps(tmp_path)
    assert facts["settings"] == {"kl_mode": "fixed", "total_timesteps": 4000}
    assert facts["score"] == np.mean(range(51, 151)) and facts["mean_return"] == 75.5
    assert facts["seconds"] == 20 + 10 + 1000
    assert facts["hours"] == pytest.approx(3000 / 50 / 3600, abs=1e-6)
    assert rows["episodes"].sum() == facts["episodes"] == 150
    torch.save(saved | {"episodes": []}, tmp_path / "checkpoint.pt")
    facts, rows = record.summarize_steps(tmp_path)
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


@pytest.mark.slow
def test_stable_baselines3_leaves_what_is_kept_of_a_run(tmp_path, monkeypatch):
    size = "--num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 1 --seed 3"
    line = f"stable_baselines3_ppo --env-id CartPole-v1 --kind classic --total-timesteps 512 {size}"
    monkeypatch.setattr(sys, "argv", line.split())
    stable_baselines3_ppo.main()
    facts, curve = record.summarize_steps(tmp_path / "runs/run")
    saved = record.read_checkpoint(tmp_path / "runs/run/checkpoint.pt")
    assert facts["steps"] == facts["settings"]["total_timesteps"] == 512 and facts["hours"] > 0
    assert [x["global_step"] for x in saved["updates"]] == [128, 256, 384, 512]
    assert curve["approx_kl"].count() == 4 and (curve["approx_kl"] != 0).all()
    assert saved["episodes"][0]["global_step"] == 2 * saved["episodes"][0]["length"]
    assert all(x["return"] == x["length"] for x in saved["episodes"])


def test_baselines_with_other_seeds_begin_other_episodes(monkeypatch):
    from gymnasium.envs.classic_control import CartPoleEnv

    begun, reset = [], CartPoleEnv.reset

    def noted(env, *, seed=None, options=None):
        begun.append(seed)
        return reset(env, seed=seed, options=options)

    monkeypatch.setattr(CartPoleEnv, "reset", noted)
    size = "--num-envs 3 --num-steps 4 --num-minibatches 2 --update-epochs 1 --total-timesteps 12"
    for seed in (1, 2):
        line = f"stable_baselines3_ppo --env-id CartPole-v1 --kind classic {size} --seed {seed}"
        monkeypatch.setattr(sys, "argv", f"{line} --run-name {seed}".split())
        stable_baselines3_ppo.main()
    assert [x for x in begun if x is not None] == [3, 4, 5, 6, 7, 8]

    make = rsl_rl_ppo.Environments
    first = [make(rsl_rl_ppo.Args(num_envs=3, seed=seed)).obs[:, 0] for seed in (1, 2)]
    assert len({*np.concatenate(first)}) == 6


def test_numbers_without_a_word_in_json_are_null(tmp_path):
    rows = [{"score": math.nan, "models": {"ppo": [math.inf, 1.5, np.float64("-inf")]}, "x": "NaN"}]
    results.write_lines(tmp_path / "a.jsonl", rows)
    expected = '{"score": null, "models": {"ppo": [null, 1.5, null]}, "x": "NaN"}\n'
    assert (tmp_path / "a.jsonl").read_text() == expected


# Scripts that have become recipes since the runs that stand for them.
RENAMED = {x: x.replace("rlhf_toy", "on_reviews") for x in ("grpo_rlhf_toy.py", "dpo_rlhf_toy.py")}


@pytest.mark.parametrize("suite", SUITES)
def test_committed_results_have_the_suites_flags_and_whole_curves(suite):
    for key, made in results.done(suite, FOLDERS).items():
        script = SUITES[suite].variants[key[1]].script
        curve = results.Result(made, FOLDERS.results / f"{suite}.csv").curve
        name = Path(made["script"]).name
        assert RENAMED.get(name, name) == Path(script).name, key  # its folder may move
        flags = " ".join(flags_of(SUITES[suite], key))
        assert made["flags"] == flags and len(made["commit"]) == 40, key
        if "models" not in made:
            assert curve["episodes"].sum() == made["episodes"]
        else:
            trained = {x for x in made["models"] if not x.startswith(("sft", "best-of-"))}
            assert set(curve["stage"]) == trained


@pytest.mark.slow
def test_a_run_of_the_real_script_is_kept(folders, bench, capfd, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling would take most of the time
    bench("run", "smoke", "--only", "seed2")
    assert f"{PENDULUM}/seed2 done" in capfd.readouterr().out
    (result,) = results.by_environment("smoke", "", folders)[PENDULUM]
    made = result.record
    assert made["steps"] == 4096 and made["settings"] == {"total_timesteps": 4096}
    assert 0 < made["score"] < 1000 and len(made["commit"]) == 40
    assert result.curve["episodes"].sum() == made["episodes"]
    assert len(result.column("approx_kl")[0]) == 2  # one per iteration
