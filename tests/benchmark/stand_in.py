"""A script of 20 iterations for `test_run.py`; it saves every fifth, as JSON.

Without an environment it is one of RLHF. It leaves its process and first iteration in starts.txt,
and each iteration in iterations.txt.
"""

import json
import os
import sys
import time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = Path(flags.get("--resume") or "runs/" + flags["--run-name"])
rlhf = "--env-id" not in flags and not (run / "checkpoint.pt").exists()
path = run / ("ppo/checkpoint.pt" if rlhf else "checkpoint.pt")
if path.exists() != ("--resume" in flags):
    sys.exit("Error: what is there is to be resumed, and nothing else")
saved = {"args": {"seed": flags.get("--seed"), "run_name": "run"}, "episodes": [], "updates": []}
saved = json.loads(path.read_text()) if path.exists() else saved
path.parent.mkdir(parents=True, exist_ok=True)
first = len(saved["updates"]) + 1
with open("starts.txt", "a") as starts:
    print(os.getpid(), first, file=starts)
for iteration in range(first, 21):
    time.sleep(float(os.environ["PACE"]))
    if saved["args"]["seed"] == os.environ.get("CRASH") and iteration == 8:
        sys.exit("Error: out of luck")
    step = {"global_step": 100 * iteration}
    saved["episodes"].append({**step, "return": 1.0 * iteration, "length": 100})
    saved["updates"].append({**step, "charts/SPS": 100, "objective/kl": 2.0})
    if iteration % 5 == 0:
        path.with_suffix(".tmp").write_text(json.dumps(saved))
        os.replace(path.with_suffix(".tmp"), path)
    with open("iterations.txt", "a") as iterations:
        print(iteration, file=iterations)
if rlhf:
    models = {"sft": {}, "ppo": {"objective/gold": 1.5}}
    content = {"args": saved["args"], "quality": {}, "results": models}
    (run / "results.json").write_text(json.dumps(content))
