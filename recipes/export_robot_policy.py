# /// script
# dependencies = ["onnx==1.23.2", "onnxscript==0.7.2"]  # and those of the script
# ///
"""Writes a policy of ppo_vector_env.py, its normalization included, as ONNX and as TorchScript.

    python -m recipes.export_robot_policy runs/NAME

The files take the columns that the policy sees, and no others, so what only the value function saw
is not needed on a robot. Their names and sizes stand in policy.json, in order. Both files are
checked: on 100 observations, their actions and those of `load_policy` must agree to 1e-5.

For a robot, train with `--obs-std-floor 0.01`: an input that hardly varied in training then stays
small when it is slightly off.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import numpy as np
import torch

import ppo_vector_env as ppo

TOLERANCE = 1e-5  # of actions, which other programs round differently


def export(run_dir: Path, agent_class: type[ppo.Agent] = ppo.Agent) -> float:
    """Write policy.onnx, policy.pt and policy.json; return the largest difference of actions."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            hint = "pip install onnx==1.23.2 onnxscript==0.7.2"
            raise ppo.UsageError(f"No module named '{package}': {hint}")
    policy = ppo.load_policy(run_dir, agent_class)
    stats = policy.agent.obs_stats
    noise = torch.randn(100, len(policy.columns), generator=torch.Generator().manual_seed(1))
    obs = stats.mean[policy.columns] + stats.var[policy.columns].sqrt() * noise
    torch.onnx.export(
        policy,
        (obs,),
        run_dir / "policy.onnx",
        input_names=["obs"],
        output_names=["actions"],
        dynamic_shapes={"obs": {0: torch.export.Dim("rows")}},
        external_data=False,  # one file
        verbose=False,
    )
    torch.jit.script(policy).save(run_dir / "policy.pt")
    about = {"parts": policy.parts, "actions": len(policy.agent.low)}
    (run_dir / "policy.json").write_text(json.dumps(about))
    return check(run_dir, policy, obs)


def check(run_dir: Path, policy: ppo.Policy, obs: torch.Tensor) -> float:
    """The largest difference between the actions of the files and those of `load_policy`."""
    from onnx.reference import ReferenceEvaluator

    (from_onnx,) = ReferenceEvaluator(str(run_dir / "policy.onnx")).run(None, {"obs": obs.numpy()})
    scripted = torch.jit.load(run_dir / "policy.pt")(obs)
    expected = policy(obs).numpy()
    difference = max(np.abs(x - expected).max() for x in (from_onnx, scripted.numpy()))
    if not difference < TOLERANCE:
        raise ppo.UsageError(f"The exported policy acts differently, by up to {difference:.2g}.")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m recipes.export_robot_policy")
    parser.add_argument("run_dir", type=Path, help="the folder of a run")
    try:
        difference = export(parser.parse_args().run_dir)
    except ppo.UsageError as error:
        parser.error(str(error))
    print(f"policy.onnx and policy.pt agree with load_policy to {difference:.1g}.")
