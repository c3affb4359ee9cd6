"""A script in steps: saves after every fifth iteration of 20, in JSON.

It leaves its process and first iteration in starts.txt, and each iteration in iterations.txt;
with --evaluate only an evaluation.
"""

import json
import os
import pathlib
import sys
import time

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--evaluate" in flags:
    played = {"returns": [1.23456], "lengths": [100], "speeds": [0.123456]}
    path = pathlib.Path(flags["--evaluate"]) / "evaluation.json"
    path.write_text(json.dumps({"mean": played, "sampled": {}}))
    sys.exit()
seed = int(flags["--seed"])
run = pathlib.Path(flags["--resume"] if "--resume" in flags else "runs/" + flags["--run-name"])
run.mkdir(parents=True, exist_ok=True)
checkpoint = run / "checkpoint.pt"
if checkpoint.exists() != ("--resume" in flags):
    sys.exit("Error: no folder for this run")
args = {"seed": seed, "total_timesteps": 2000, "num_steps": 100, "num_envs": 1, "run_name": "run"}
saved = {"args": args, "episodes": [], "updates": [], "global_step": 0}
saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else saved
first = saved["global_step"] // 100 + 1
with open("starts.txt", "a") as file:
    print(os.getpid(), first, file=file)
held = b"x" * (80 << 20)  # so that its memory is not that of its parent
for iteration in range(first, 21):
    time.sleep(float(os.environ["PACE"]))
    if os.environ.get("CRASH") == str(seed) and iteration == 8:
        sys.exit("Error: out of luck")
    step = saved["global_step"] = 100 * iteration
    saved["episodes"].append({"global_step": step, "return": 1.0 * iteration, "length": 100})
    rates = {"charts/SPS_rollout": 200, "charts/SPS_update": 200}
    saved["updates"].append({"global_step": step, **rates})
    if iteration % 5 == 0:
        (run / "checkpoint.tmp").write_text(json.dumps(saved))
        os.replace(run / "checkpoint.tmp", checkpoint)
    with open("iterations.txt", "a") as file:
        print(iteration, file=file)
