"""What `throughput` measures, in about a minute for each entry."""

from benchmark.definitions import Entry, Measurement
from benchmark.suites.common import ATARI, CONTINUOUS, GAMES, LSTM, MULTIDISCRETE, RAW, SB3_SCRIPT

# SB3 gets a tenth of the steps.
SB3 = "Stable-Baselines3 PPO"
SB3_CNN, SB3_LSTM = f"{SB3}, CnnPolicy", "sb3-contrib RecurrentPPO, CnnLstmPolicy"
CHEETAH, CARTPOLE = "--env-id HalfCheetah-v4", "--env-id CartPole-v1"
SMALL = (
    f"{CARTPOLE} --num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --ent-coef 0.01"
)
PONG = f"--env-id PongNoFrameskip-v4 {GAMES}"
OURS = f"{PONG} --torch-threads 2"
# The same with EnvPool, which is not in requirements.txt; the policy acts on one thread.
STEPPING = "benchmark/baselines/atari_stepping.py"
POOL, POOL_FLAGS = "games stepped by EnvPool", "--stepping envpool --workers 2"
ACTING = f"{OURS} --no-learn"
SIZE = "1 environment, 2048 steps, 32 minibatches of 64, 10 epochs"
PONG_SIZE = "Pong, 8 environments, 128 steps, 4 minibatches of 256, 4 epochs, 2 threads"
MEASUREMENTS = {
    "continuous": Measurement(
        f"HalfCheetah-v4, {SIZE}",
        (
            Entry(CONTINUOUS, 245760, CHEETAH),
            Entry(SB3, 24576, f"{CHEETAH} --kind mujoco", SB3_SCRIPT),
        ),
    ),
    "atari": Measurement(
        PONG_SIZE,
        (
            Entry(f"{ATARI}, float32", 10240, OURS, ATARI),
            Entry(f"{ATARI}, bfloat16", 10240, f"{OURS} --bfloat16", ATARI),
            Entry(f"{ATARI}, float32, {POOL}", 10240, f"{OURS} {POOL_FLAGS}", STEPPING),
            Entry(SB3_CNN, 10240, f"{PONG} --kind atari", SB3_SCRIPT),
        ),
        threads=2,
    ),
    "atari_rollouts": Measurement(
        "Pong, rollouts without updates, 8 environments, 2 cores",
        (
            Entry("EnvPool, 2 threads", 10240, f"{ACTING} {POOL_FLAGS}", STEPPING),
            Entry("EnvPool, 1 thread", 10240, f"{ACTING} --stepping envpool", STEPPING),
            Entry(f"{ATARI}, 2 processes", 10240, f"{ACTING} --workers 2", STEPPING),
            Entry(f"{ATARI}, 1 process", 10240, ACTING, STEPPING),
        ),
        threads=2,
    ),
    "atari_lstm": Measurement(
        f"{PONG_SIZE}, LSTM",
        (
            Entry(f"{LSTM}, float32", 16384, OURS, LSTM),
            Entry(f"{LSTM}, bfloat16", 16384, f"{OURS} --bfloat16", LSTM),
            Entry(SB3_LSTM, 10240, f"{PONG} --kind atari-lstm", SB3_SCRIPT),
        ),
        threads=2,
    ),
    "multidiscrete": Measurement(
        f"CartPole-v1, {SIZE}",
        (
            Entry(MULTIDISCRETE, 245760, f"{CARTPOLE} {RAW}"),
            Entry(SB3, 24576, f"{CARTPOLE} --kind classic", SB3_SCRIPT),
        ),
    ),
    "multidiscrete_small": Measurement(
        "CartPole-v1, 4 environments, 128 steps, 4 minibatches of 128, 4 epochs",
        (
            Entry(MULTIDISCRETE, 512000, f"{SMALL} {RAW}"),
            Entry(SB3, 51200, f"{SMALL} --kind classic", SB3_SCRIPT),
        ),
    ),
    "gpu_continuous": Measurement(
        f"HalfCheetah-v4, {SIZE}, on a GPU",
        (
            Entry(f"{CONTINUOUS}, --device cpu", 61440, f"{CHEETAH} --device cpu", CONTINUOUS),
            Entry(CONTINUOUS, 61440, f"{CHEETAH} --device cuda"),
            Entry(SB3, 20480, f"{CHEETAH} --kind mujoco", SB3_SCRIPT),
        ),
        gpu=True,
    ),
    "gpu_atari": Measurement(
        f"{PONG_SIZE}, on a GPU",
        (
            Entry(f"{ATARI}, --device cpu", 10240, f"{OURS} --device cpu", ATARI),
            Entry(f"{ATARI}, float32", 10240, f"{OURS} --device cuda", ATARI),
            Entry(f"{ATARI}, bfloat16", 10240, f"{OURS} --device cuda --bfloat16", ATARI),
            Entry(SB3_CNN, 10240, f"{PONG} --kind atari", SB3_SCRIPT),
        ),
        threads=2,
        gpu=True,
    ),
    "gpu_atari_lstm": Measurement(
        f"{PONG_SIZE}, LSTM, on a GPU",
        (
            Entry(f"{LSTM}, float32", 10240, f"{OURS} --device cuda", LSTM),
            Entry(f"{LSTM}, bfloat16", 10240, f"{OURS} --device cuda --bfloat16", LSTM),
            Entry(SB3_LSTM, 10240, f"{PONG} --kind atari-lstm", SB3_SCRIPT),
        ),
        threads=2,
        gpu=True,
    ),
}
