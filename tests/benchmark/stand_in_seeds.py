"""A script of 20 iterations for `test_seeds.py`, with the flags and files of ours.

It leaves the first iteration of each start in starts.txt, and saves every fifth iteration.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

parser = argparse.ArgumentParser()
for flag in ("--env-id", "--run-name", "--resume", "--gain"):
    parser.add_argument(flag)
parser.add_argument("--seed", type=int)
given = parser.parse_args()
run = Path(given.resume or f"runs/{given.run_name}")
path = run / "checkpoint.pt"
if given.resume:
    saved = torch.load(path)
else:
    args = {"env_id": given.env_id, "seed": given.seed, "total_timesteps": 2000}
    saved = {"args": args, "episodes": [], "updates": []}
    run.mkdir(parents=True, exist_ok=True)
seed, first = saved["args"]["seed"], len(saved["updates"]) + 1
with (run / "starts.txt").open("a") as starts:
    print(first, os.getpid(), os.environ["OMP_NUM_THREADS"], file=starts)
for iteration in range(first, 21):
    time.sleep(float(os.environ["PACE"]))
    if os.environ.get("CRASH") == str(seed) and iteration == 8:
        sys.exit("Error: out of luck")
    step = {"global_step": 100 * iteration}
    saved["episodes"].append({**step, "return": float(seed * iteration), "length": 100})
    saved["updates"].append({**step, "charts/SPS": 100.0})
    if iteration % 5 == 0:
        torch.save(saved, path)
    bar = (
        f"{5 * iteration}%|###  | {iteration}/20 [00:01<00:0{iteration % 10},  4.3it/s, return 1.0]"
    )
    print(f"\r{bar}", end="", file=sys.stderr, flush=True)
