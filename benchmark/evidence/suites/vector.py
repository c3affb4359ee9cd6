"""Many environments at once, compared with the main script, which has one."""

from benchmark.evidence.definitions import Suite, Variant
from benchmark.evidence.suites.common import CONTINUOUS, THREE

VECTOR = "ppo_vector_env.py"
# Tianshou computes advantages, and so the targets of values, again at the start of each epoch.
ADVANTAGES_EACH_EPOCH = (
    "        for _ in range(args.update_epochs):\n",
    """\
        for _ in range(args.update_epochs):
            with torch.no_grad():
                values = agent.get_value(obs)
                next_values = values[1:].clone()
                last_obs = agent.normalize_obs(raw_final_obs[truncated])
                next_values[truncated] = agent.get_value(last_obs)
                next_values[terminated] = 0.0
                advantages = gae(scaled, values[:-1], next_values, done, args)
            targets = advantages + values[:-1]
            samples = obs[:-1], actions, logprobs, values[:-1], advantages, targets
            batch = Batch(*(x.flatten(0, 1) for x in samples))
""",
)
# One hundredth of the largest spread of any column, whatever the units.
RELATIVE_FLOOR = ("self.obs_std_floor**2", "1e-4 * self.obs_stats.var.max()")

SUITES = (
    Suite(
        name="vector_env",
        reproduces="what many environments give: EnvPool's, stepped together",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)) | {"Ant-v4": (1, 2, 3)},
        variants={"": Variant(VECTOR, "", VECTOR)},
        baseline=("figure3", ""),
        baseline_label=CONTINUOUS,
        figures=("curves",),
    ),
    Suite(
        name="vector_env_3m",
        reproduces="many environments for three million steps, next to Tianshou's published scores",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)) | {"Ant-v4": (1, 2, 3)},
        variants={"": Variant(VECTOR, "", VECTOR)},
        table="scores",
        figures=("curves",),
        total_timesteps=3_000_000,
    ),
    Suite(
        name="vector_num_envs",
        reproduces="how many environments: what more of them cost in return",
        environments=dict.fromkeys((*THREE, "Ant-v4"), (1, 2, 3)),
        variants={
            "32": Variant(VECTOR, "--num-envs 32 --num-steps 64", "32 environments"),
            "64": Variant(VECTOR, "--num-envs 64 --num-steps 32", "64 environments"),
            "256": Variant(
                *(VECTOR, "--num-envs 256 --num-steps 32", "256 environments"),
                environments=dict.fromkeys(THREE[:2], (1, 2)),
            ),
            "1024": Variant(
                *(VECTOR, "--num-envs 1024 --num-steps 32", "1024 environments"),
                environments={"Hopper-v4": (1, 2)},  # no episode would end in HalfCheetah
            ),
        },
        baseline=("vector_env", ""),
        baseline_label="16 environments",
        figures=("curves",),
    ),
    Suite(
        name="vector_floor",
        reproduces="what a floor under the spread of inputs costs: robots want one",
        environments=dict.fromkeys((*THREE, "Ant-v4"), (1, 2, 3)),
        variants={
            "raw": Variant(VECTOR, "--obs-std-floor 0.01", "0.01, as rsl_rl"),
            "relative": Variant(
                *(VECTOR, "", "0.01 of the largest spread"), replaced=(RELATIVE_FLOOR,)
            ),
        },
        baseline=("vector_env", ""),
        baseline_label="0.0001, as ppo2",
    ),
    Suite(
        name="vector_tianshou",
        reproduces="what Tianshou does differently, tried where we are below its interval",
        environments={"Walker2d-v4": (1, 2, 3)},
        variants={
            "each_epoch": Variant(
                VECTOR,
                "--no-clip-vloss",
                "advantages in each epoch, values not clipped",
                replaced=(ADVANTAGES_EACH_EPOCH,),
            )
        },
        baseline=("vector_env_3m", ""),
        baseline_label=VECTOR,
        total_timesteps=3_000_000,
    ),
    Suite(
        name="rsl_rl",
        reproduces="rsl_rl's PPO on the same simulator, over steps and over minutes",
        environments=dict.fromkeys(THREE[:2], (1, 2, 3)),
        variants={"rsl_rl": Variant("benchmark/evidence/baselines/rsl_rl_ppo.py")},
        baseline=("vector_env_3m", ""),
        baseline_label=VECTOR,
        figures=("minutes",),
        total_timesteps=3_000_000,
    ),
)
