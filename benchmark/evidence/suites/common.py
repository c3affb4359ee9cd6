"""What several suites share: scripts, environments and flags."""

CONTINUOUS = "ppo_continuous_action.py"
MULTIDISCRETE = "ppo_multidiscrete.py"
SB3 = "benchmark/evidence/baselines/stable_baselines3_ppo.py"

# The seven environments of the paper's Figure 3 and Table 1, as version 4.
MUJOCO7 = (
    *("HalfCheetah-v4", "Hopper-v4", "InvertedDoublePendulum-v4", "InvertedPendulum-v4"),
    *("Reacher-v4", "Swimmer-v4", "Walker2d-v4"),
)
THREE = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")

GAMES = (  # settings of ppo_atari.py, for others
    "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01"
)
