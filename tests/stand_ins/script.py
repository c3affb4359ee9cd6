"""A script of 20 iterations of 100 steps that saves after every fifth, in JSON.

It leaves its process and first iteration in starts.txt, and each iteration in iterations.txt.
"""

import json
import os
import sys
import time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = Path(flags.get("--resume") or "runs/" + flags["--run-name"])
if ("--resume" in flags) != (run / "checkpoint.pt").exists():
    sys.exit("Error: what is there is to be resumed, and nothing else")
run.mkdir(parents=True, exist_ok=True)
saved = {"args": {"seed": flags.get("--seed"), "run_name": "run"}, "episodes": [], "updates": []}
if "--resume" in flags:
    saved = json.loads((run / "checkpoint.pt").read_text())
first = len(saved["updates"]) + 1
with open("starts.txt", "a") as file:
    print(os.getpid(), first, file=file)
held = b"x" * (150 << 20)  # so that its memory is not that of its parent
for iteration in range(first, 21):
    time.sleep(float(os.environ["PACE"]))
    if saved["args"]["seed"] == os.environ.get("CRASH") and iteration == 8:
        sys.exit("Error: out of luck")
    step = {"global_step": 100 * iteration}
    saved["episodes"].append({**step, "return": 1.0 * iteration, "length": 100})
    saved["updates"].append({**step, "charts/SPS": 100})
    if iteration % 5 == 0:
        (run / "checkpoint.tmp").write_text(json.dumps(saved))
        os.replace(run / "checkpoint.tmp", run / "checkpoint.pt")
    with open("iterations.txt", "a") as file:
        print(iteration, file=file)
