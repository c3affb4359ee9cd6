"""A script of 20 iterations for tests of `run` and `seeds`; it saves every fifth, as JSON.

Without an environment it is one of RLHF. It leaves first iteration, process and threads of each
start in starts.txt, and each iteration in iterations.txt. HOLD names runs, and the iteration after
which they wait until they are killed or there is a file `release`; CRASH is the seed that fails.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("--env-id", "--run-name", "--resume", "--total-timesteps"):
    parser.add_argument(flag)
for flag in ("--seed", "--gain"):
    parser.add_argument(flag, type=int, default=1)
given = parser.parse_args()
run = Path(given.resume or f"runs/{given.run_name}")
rlhf = not given.env_id and not given.resume
path = run / ("ppo/checkpoint.pt" if rlhf else "checkpoint.pt")
if path.exists() != bool(given.resume):
    sys.exit("Error: what is there is to be resumed, and nothing else")
args = {"env_id": given.env_id, "seed": given.seed, "gain": given.gain, "total_timesteps": 2000}
saved = {"args": args, "episodes": [], "updates": []}
saved = json.loads(path.read_text()) if given.resume else saved
path.parent.mkdir(parents=True, exist_ok=True)
first, args = len(saved["updates"]) + 1, saved["args"]
with open("starts.txt", "a") as starts:
    print(first, os.getpid(), os.environ["OMP_NUM_THREADS"], file=starts)
*names, last = os.environ["HOLD"].split() or [0]
held = any(map(os.getcwd().endswith, names))
for iteration in range(first, 21):
    while iteration == int(last) + 1 and held and not os.path.exists("release"):
        time.sleep(0.01)
    if os.environ["CRASH"] == str(args["seed"]) and iteration == 8:
        sys.exit("Error: out of luck")
    step = {"global_step": 100 * iteration}
    gained = float(args["gain"] * args["seed"] * iteration)
    saved["episodes"].append({**step, "return": gained, "length": 100})
    saved["updates"].append({**step, "charts/SPS": 100, "objective/kl": 2.0})
    if iteration % 5 == 0:
        path.with_suffix(".tmp").write_text(json.dumps(saved))
        os.replace(path.with_suffix(".tmp"), path)
    with open("iterations.txt", "a") as iterations:
        print(iteration, file=iterations)
    bar = f"\r{5 * iteration}%|###  | {iteration}/20 [00:01<00:01,  4.3it/s, return 1.0]"
    print(bar, end="", file=sys.stderr, flush=True)
if rlhf:
    models = {"sft": {}, "ppo": {"objective/gold": 1.5}}
    content = {"args": args, "quality": {}, "results": models}
    (run / "results.json").write_text(json.dumps(content))
