"""Every script on an imitation of a GPU (fake_gpu.py): what would fail on a GPU fails here."""

import functools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import scripts, scripts_with, slow_on
from helpers import same_weights

import grpo_minimal


@scripts("continuous")
def test_recordings_get_new_inputs_and_return_results_of_their_own(script, recordings):
    count = torch.zeros(())

    def function(x, y):
        return {"sum": x + y, "count": count.add_(1)}

    call, results = script.module.recorded(recordings.noting(function)), []
    inputs = [(torch.full((2,), float(i)), torch.tensor([1.0, 2.0])) for i in range(7)]
    for x, y in inputs:
        results.append(call(x, y))
        assert x.tolist() != [-1, -1] and count == len(results)  # each call computes once
        x.fill_(-1)  # what is recorded has a copy
    assert [x["sum"].tolist() for x in results] == [[i + 1.0, i + 2.0] for i in range(7)]
    assert [x["count"].item() for x in results[3:]] == [4, 5, 6, 7]
    (graph,) = recordings.graphs
    assert graph.replays == 4  # three ordinary calls come first


@scripts("continuous")
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(script, recordings, capsys):
    calls = []

    def function(x):
        if recordings.running:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        calls.append(x.item())
        return {"x": x + 1}

    call = script.module.recorded(function)
    assert [call(torch.tensor(i))["x"].item() for i in range(6)] == [1, 2, 3, 4, 5, 6]
    assert calls == [0, 1, 2, 3, 4, 5]
    printed = capsys.readouterr().out
    assert printed.count("function cannot be recorded") == 1 and "not permitted" in printed
    assert "and more" not in printed


@pytest.mark.slow
@scripts_with("language")
def test_language_models_on_the_gpu_learn_what_they_do_on_the_processor(script, gpu, monkeypatch):
    """Best-of-n sampling too. What is saved loads without a GPU."""
    changes = {"num_pairs": 14, "reward_epochs": 1, "num_updates": 1, "update_epochs": 1}
    changes |= {"sft_steps": 2, "sft_documents": 30, "compare": script.name == "rlhf"}
    changes = {name: x for name, x in changes.items() if name in vars(script.args())}
    here, there = (script.args(run_name=x, device=x, **changes) for x in ("cpu", "cuda"))
    module = script.module
    small = {"NUM_SAMPLES": 16, "NUM_EVALUATED": 16, "BEST_OF_N": (1, 4), "RESPONSE_LENGTH": 8}
    for name, value in small.items():
        monkeypatch.setattr(script.home, name, value)
    expected = module.train(here)
    result, device = gpu(module.train, there)
    assert all(device.has(x) for x in result["agent"].state_dict().values())
    assert same_weights(result["agent"], expected["agent"])
    assert result["results"] == expected["results"]
    file = Path("runs/cuda", next(iter(script.forms)), "checkpoint.pt")
    saved = torch.load(file, weights_only=True)["agent"]
    assert all(torch.equal(x, saved[name]) for name, x in expected["agent"].state_dict().items())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(script.home.UsageError, match="--device cuda needs a GPU"):
        script.args(device="cuda")


@pytest.mark.slow
def test_grpo_minimal_on_the_gpu_learns_what_it_does_on_the_processor(gpu, monkeypatch):
    respond = grpo_minimal.respond
    monkeypatch.setattr(grpo_minimal, "respond", lambda model, x, n: respond(model, x[:32], n))
    settings = {"sft_steps": 2, "num_updates": 2, "kl_coef": 0.1, "num_prompts": 4}
    expected = grpo_minimal.train(grpo_minimal.Args(**settings))
    result, device = gpu(grpo_minimal.train, grpo_minimal.Args(**settings, device="cuda"))
    assert all(device.has(x) for x in result["model"].state_dict().values())
    assert same_weights(result["model"], expected["model"])
    assert result["updates"] == expected["updates"]


@scripts_with("environments")
@slow_on("kl_penalty", "multidiscrete", "lstm", "atari")
def test_a_run_on_the_gpu_that_is_there_is_that_of_the_processor(
    script, tiny, gpu, recordings, monkeypatch
):
    """The weights are there, and what is saved is of use without it; also after a resume."""
    real = script.module.recorded
    monkeypatch.setattr(script.module, "recorded", lambda x: real(recordings.noting(x)))
    settings = {"num_envs": 2, "num_steps": 16, "update_epochs": 5, "anneal_lr": False}
    settings |= {"learning_rate": 2**-7}  # which has the same value in float32 and in float64
    expected = script.module.train(tiny("Walk", **settings, total_timesteps=64))
    args = tiny("Walk", **settings, device="auto", total_timesteps=32)
    result, device = gpu(script.module.train, args)
    assert all(device.has(x) for x in result["agent"].state_dict().values())
    again = script.module.Args(**{**vars(args), "total_timesteps": 64})
    resume = functools.partial(script.module.train, resume="runs/run1")
    result, device = gpu(resume, again)
    assert all(device.has(x) for x in result["agent"].state_dict().values())
    assert same_weights(result["agent"], expected["agent"])
    assert result["episodes"] == expected["episodes"]
    assert any(graph.replays for graph in recordings.graphs)
    agent = script.module.load_checkpoint("runs/run1")["agent"]
    assert same_weights(agent, expected["agent"])


@scripts_with("games")
@slow_on("lstm")
def test_a_recording_reads_the_same_tensors_in_every_iteration_and_they_change(
    script, tiny, gpu, recordings, monkeypatch, recwarn
):
    """Also in a resumed run. Adam reads the step size, the loss the clip range."""
    real, module, seen = script.module.recorded, script.module, []
    monkeypatch.setattr(module, "recorded", lambda x: real(recordings.noting(x)))

    def update(agent, adam, batch, mb, args):
        (group,) = adam.param_groups
        assert group["lr"] is args.learning_rate and group["capturable"]
        assert group["lr"].device.type == "cuda"
        tensors = group["lr"], args.clip_coef
        seen.append([*tensors, *(x.item() for x in tensors)])
        warnings.warn("not recorded, in spite of capturable=True", stacklevel=2)  # as PyTorch does
        return module.ppo_update(agent, adam, batch, mb, args)

    settings = {"learning_rate": 2**-7, "anneal_clip": True, "total_timesteps": 64}
    settings |= {"device": "auto", "update_epochs": 2}
    gpu(module.train, tiny("Walk", **settings), update)
    settings |= {"total_timesteps": 128, "anneal_clip": False, "run_name": "run0"}
    again = tiny("Walk", **settings)
    gpu(functools.partial(module.train, resume="runs/run0"), again, update)
    assert not [x for x in recwarn if "capturable" in str(x.message)]
    shares = np.repeat([[1.0, 0.5], [0.5, 0.25]], 4, axis=1)
    for run, share, clip in zip((seen[:8], seen[8:]), shares, (shares[0], np.ones(8))):
        step_sizes, clip_coefs, *numbers = zip(*run)
        assert len({*map(id, step_sizes)}) == len({*map(id, clip_coefs)}) == 1
        np.testing.assert_allclose(numbers, [2**-7 * share, 0.1 * clip], rtol=1e-6)


@scripts("atari")
def test_processes_that_wait_for_each_other_are_not_recorded_and_one_of_them_logs(
    script, tiny, gpu, monkeypatch, capsys
):
    module, calls = script.module, []
    names = ["init_process_group", "destroy_process_group"]
    for name in names:
        monkeypatch.setattr(torch.distributed, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(2))
    monkeypatch.setattr(module, "WORLD_SIZE", 2)
    monkeypatch.setattr(module, "RANK", 1)  # the other one
    monkeypatch.setattr(module, "recorded", lambda _: pytest.fail("a recording"))
    result, _ = gpu(module.train, tiny("Walk", device="auto"))
    assert [x["global_step"] for x in result["updates"]] == [64] and calls == names
    assert result["run_dir"] is None and not Path("runs").exists() and not capsys.readouterr().err


@pytest.mark.slow
@scripts("continuous")
def test_the_wrapper_in_cpp_is_for_the_processor_and_advice_on_gpus_is_not_shown(
    script, monkeypatch
):
    from torch._inductor import compile_fx  # which takes two seconds

    given = []
    compile = lambda function, options: given.append(options) or function  # noqa: E731
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        compile_fx._warn_tf32_disabled()
        assert "TensorFloat32" in str(shown.pop().message)
        for place in ("cpu", "cuda"):
            script.module.compiled(lambda: None, torch.device(place))()
        compile_fx._warn_tf32_disabled()
    assert [x["cpp_wrapper"] for x in given] == [True, False] and not shown
