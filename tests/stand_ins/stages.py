"""A script in stages, as `script.py`; each is saved at its end, and results at the end of all."""

import json
import os
import sys
import time
from pathlib import Path

run = Path("runs/run")
with open("starts.txt", "a") as file:
    print(os.getpid(), "--resume" in sys.argv, file=file)
if (run / "sft/checkpoint.pt").exists() != ("--resume" in sys.argv):
    sys.exit("Error: what is there is to be resumed, and nothing else")
stages = ("sft", "ppo-adaptive-6", "ppo-none")
for stage in stages:
    if not (run / stage / "checkpoint.pt").exists():
        with open("iterations.txt", "a") as file:
            print(stage, file=file)
        time.sleep(float(os.environ["PACE"]))
        (run / stage).mkdir(parents=True)
        update = {"objective/gold": 1.0, "objective/kl": 2.0}
        (run / stage / "checkpoint.pt").write_text(json.dumps({"updates": [update] * 3}))
models = {stage: {"objective/gold": 1.5} for stage in stages[1:]}
content = {"args": {"seed": 1}, "quality": {"accuracy": 0.8}, "results": models}
(run / "results.json").write_text(json.dumps(content))
