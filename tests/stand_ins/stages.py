"""A script in stages, two of them PPO runs of three updates; a finished one is not made again.

It leaves its process and whether it resumes in starts.txt, and each stage in iterations.txt.
"""

import json
import os
import pathlib
import sys
import time

run = pathlib.Path("runs/run")
with open("starts.txt", "a") as file:
    print(os.getpid(), "--resume" in sys.argv, file=file)
if "--resume" in sys.argv and len(sys.argv) > 3:
    sys.exit("Error: a resumed run has its own settings")
if (run / "sft/checkpoint.pt").exists() != ("--resume" in sys.argv):
    sys.exit("Error: no folder for this run")
for stage in ("sft", "ppo-adaptive-6", "ppo-none"):
    if not (run / stage / "checkpoint.pt").exists():
        with open("iterations.txt", "a") as file:
            print(stage, file=file)
        time.sleep(float(os.environ["PACE"]))
        (run / stage).mkdir(parents=True, exist_ok=True)
        names = ("objective/gold", "objective/proxy", "objective/kl")
        update = dict.fromkeys((*names, "charts/tokens_per_second_update"), 1.0)
        (run / stage / "checkpoint.tmp").write_text(json.dumps({"updates": [update] * 3}))
        os.replace(run / stage / "checkpoint.tmp", run / stage / "checkpoint.pt")
models = {stage: {"objective/gold": 1.5} for stage in ("ppo-adaptive-6", "ppo-none")}
content = {"args": {"seed": 1}, "quality": {"accuracy": 0.8}, "results": models}
(run / "results.tmp").write_text(json.dumps(content))
os.replace(run / "results.tmp", run / "results.json")
