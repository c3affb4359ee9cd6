"""A script in steps: saves after every fifth iteration of 20, in JSON.

It leaves its process and first iteration in starts.txt, and each iteration in iterations.txt. A
resumed one takes its settings from the checkpoint.
"""

import json
import os
import pathlib
import sys
import time

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--resume" in flags and len(flags) > 1:
    sys.exit("Error: a resumed run has its own settings")
run = pathlib.Path(flags["--resume"] if "--resume" in flags else "runs/" + flags["--run-name"])
run.mkdir(parents=True, exist_ok=True)
checkpoint = run / "checkpoint.pt"
if checkpoint.exists() != ("--resume" in flags):
    sys.exit("Error: no folder for this run")
args = {
    "seed": int(flags.get("--seed", 0)),
    "total_timesteps": 2000,
    "num_steps": 100,
    "num_envs": 1,
    "run_name": "run",
}
saved = {"args": args, "episodes": [], "updates": [], "global_step": 0}
saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else saved
first, seed = saved["global_step"] // 100 + 1, saved["args"]["seed"]
with open("starts.txt", "a") as file:
    print(os.getpid(), first, file=file)
held = b"x" * (80 << 20)  # so that its memory is not that of its parent
for iteration in range(first, 21):
    time.sleep(float(os.environ["PACE"]))
    if os.environ.get("CRASH") == str(seed) and iteration == 8:
        sys.exit("Error: out of luck")
    step = saved["global_step"] = 100 * iteration
    saved["episodes"].append({"global_step": step, "return": 1.0 * iteration, "length": 100})
    saved["updates"].append({"global_step": step, "charts/SPS": 100})
    if iteration % 5 == 0:
        (run / "checkpoint.tmp").write_text(json.dumps(saved))
        os.replace(run / "checkpoint.tmp", checkpoint)
    with open("iterations.txt", "a") as file:
        print(iteration, file=file)
