"""Evaluates the policy at each checkpoint, and keeps the one with the best mean return.

    python -m recipes.best_checkpoint --env-id Pendulum-v1

It helps if the policy gets worse again later. It costs 10 episodes at each checkpoint. Training
stays the same to the bit. The best of many evaluations is partly luck, so evaluate that policy once
more before you report its return. All flags of the script can be set.

For robots, `train` of ppo_vector_env.py takes it as well:
`on_iteration=functools.partial(keep_best, robots=ppo_vector_env)`, with `env_factory=make`.
"""

import functools
import shutil
from typing import Any

import numpy as np
import tyro

import ppo_continuous_action as ppo


def keep_best(
    result: dict[str, Any], env_factory: ppo.EnvFactory | None = None, robots: Any = None
) -> None:
    """After a new checkpoint: play 10 episodes, and keep it in the folder `best` if it is the best.

    `evaluations.csv` has a row for each evaluation: the step, and the mean return. `env_factory` is
    that of `train`, if it gets one. `robots` is the module ppo_vector_env if that trains; then
    `env_factory` is its `make`.
    """
    run_dir = result["run_dir"]
    agent_class = type(result["agent"])
    load = robots.load_checkpoint if robots else ppo.load_checkpoint
    saved = load(run_dir, agent_class)
    if len(saved["updates"]) < len(result["updates"]):  # this iteration was not saved
        return
    if robots:
        score = np.mean(robots.evaluate(run_dir, make=env_factory, agent_class=agent_class))
    else:
        score = np.mean(ppo.evaluate(saved, env_factory))
    table = run_dir / "evaluations.csv"
    rows = table.read_text().splitlines() if table.exists() else []  # a resumed run has some
    if all(score > float(row.split(",")[1]) for row in rows):
        (run_dir / "best").mkdir(exist_ok=True)
        shutil.copy(run_dir / "checkpoint.pt", run_dir / "best")
    with table.open("a") as file:
        file.write(f"{result['updates'][-1]['global_step']},{score}\n")


train = functools.partial(ppo.train, on_iteration=keep_best)

SETTINGS = ppo.Args(
    env_id="Pendulum-v1",
    total_timesteps=40_960,
    num_envs=4,
    num_steps=256,
    num_minibatches=16,
    learning_rate=1e-3,
    gamma=0.9,
    checkpoint_interval=10,
)

if __name__ == "__main__":
    with ppo.command_line() as flags:
        run_dir = train(tyro.cli(ppo.Args, args=flags, default=SETTINGS))["run_dir"]
        ppo.evaluate(run_dir / "best")
