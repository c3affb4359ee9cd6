"""What `throughput` measures, in about a minute for each entry."""

from benchmark.evidence.definitions import Entry, Measurement
from benchmark.evidence.suites.common import CONTINUOUS, GAMES, MULTIDISCRETE, SB3

BASELINES = "benchmark/evidence/baselines"
SIZE = "1 environment, 2048 steps, 32 minibatches of 64, 10 epochs"
RAW = "--no-norm-obs --no-scale-rewards"  # ppo2 does both for MuJoCo only
CHEETAH, CARTPOLE = "--env-id HalfCheetah-v4", "--env-id CartPole-v1"
HOPPER = "--env-id Hopper-v4"
VECTOR = "--num-envs 64 --num-steps 64 --num-minibatches 4 --update-epochs 5"
# Our network, and a step size that no rule has to adapt.
RSL_RL = f"{VECTOR} --hidden 64 64 --activation tanh --init-std 0.6 --learning-rate 3e-4"
RSL_RL += " --schedule fixed"
SMALL = (
    f"{CARTPOLE} --num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --ent-coef 0.01"
)
PONG_SIZE = "Pong, 8 environments, 128 steps, 4 minibatches of 256, 4 epochs, 2 threads"
PONG = f"--env-id PongNoFrameskip-v4 {GAMES}"
ATARI, LSTM, OURS = "ppo_atari.py", "ppo_atari_lstm.py", f"{PONG} --torch-threads 2"
MANY = "ppo_vector_env.py"
# Stable-Baselines3; where it is slow, it gets a tenth of the steps.
THEIRS = "Stable-Baselines3 PPO"
CNN = Entry(f"{THEIRS}, CnnPolicy", 10240, f"{PONG} --kind atari", SB3)
RNN = Entry("sb3-contrib RecurrentPPO, CnnLstmPolicy", 10240, f"{PONG} --kind atari-lstm", SB3)
# Scripts that the user gives; their defaults are the same settings.
CLEANRL = "cleanrl/ppo_continuous_action.py", "cleanrl"
LEANRL = "leanrl/ppo_atari_envpool_torchcompile.py", "leanrl"
GRAPHS = "--env-id Pong-v5 --cudagraphs"


def measurement(title: str, *entries: Entry) -> Measurement:
    """One whose games have two threads."""
    return Measurement(title, entries, 1 + title.startswith("Pong"), title.endswith("on a GPU"))


# An iteration of `ppo_llm.py` takes half a minute.
SUMS = {"script": "ppo_llm.py", "batch": 64}
TRL = {"script": f"{BASELINES}/trl_grpo.py", "batch": 64}

MEASUREMENTS = {
    "continuous": measurement(
        f"HalfCheetah-v4, {SIZE}",
        Entry(CONTINUOUS, 245760, CHEETAH),
        Entry("CleanRL PPO", 24576, CHEETAH, *CLEANRL),
        Entry(THEIRS, 24576, f"{CHEETAH} --kind mujoco", SB3),
    ),
    "vector": measurement(
        "HalfCheetah-v4 on two cores; 64 environments, 64 steps, 4 minibatches, 5 epochs",
        Entry(MANY, 409600, f"{CHEETAH} {VECTOR}"),
        Entry("rsl_rl PPO", 204800, f"{CHEETAH} {RSL_RL}", f"{BASELINES}/rsl_rl_ppo.py"),
        Entry("CleanRL PPO", 81920, f"{CHEETAH} {VECTOR}", *CLEANRL),
        Entry("EnvPool alone", 409600, CHEETAH, f"{BASELINES}/envpool_physics.py"),
        Entry(CONTINUOUS, 122880, f"{CHEETAH} {VECTOR}"),
    ),
    "vector_defaults": measurement(
        "HalfCheetah-v4 on two cores; the defaults of each",
        Entry(MANY, 204800, CHEETAH),
        Entry("rsl_rl PPO", 204800, CHEETAH, f"{BASELINES}/rsl_rl_ppo.py"),
        Entry(CONTINUOUS, 122880, CHEETAH),
    ),
    "vector_defaults_hopper": measurement(
        "Hopper-v4 on two cores; the defaults of each",
        Entry(MANY, 204800, HOPPER),
        Entry("rsl_rl PPO", 204800, HOPPER, f"{BASELINES}/rsl_rl_ppo.py"),
        Entry(CONTINUOUS, 122880, HOPPER),
    ),
    "vector_num_envs": measurement(
        "HalfCheetah-v4 on two cores; 16 environments and 128 steps, or more and 32 steps",
        Entry("1024 environments", 327680, f"{CHEETAH} --num-envs 1024 --num-steps 32", MANY),
        Entry("256 environments", 204800, f"{CHEETAH} --num-envs 256 --num-steps 32", MANY),
        Entry("64 environments", 204800, f"{CHEETAH} --num-envs 64 --num-steps 32", MANY),
        Entry("16 environments", 204800, CHEETAH, MANY),
    ),
    "atari": measurement(
        PONG_SIZE,
        Entry(f"{ATARI}, float32", 10240, OURS, ATARI),
        Entry(f"{ATARI}, bfloat16", 10240, f"{OURS} --bfloat16", ATARI),
        CNN,
    ),
    "atari_lstm": measurement(
        f"{PONG_SIZE}, LSTM",
        Entry(f"{LSTM}, float32", 16384, OURS, LSTM),
        Entry(f"{LSTM}, bfloat16", 16384, f"{OURS} --bfloat16", LSTM),
        RNN,
    ),
    "multidiscrete": measurement(
        f"CartPole-v1, {SIZE}",
        Entry(MULTIDISCRETE, 245760, f"{CARTPOLE} {RAW}"),
        Entry(THEIRS, 24576, f"{CARTPOLE} --kind classic", SB3),
    ),
    "multidiscrete_small": measurement(
        "CartPole-v1, 4 environments, 128 steps, 4 minibatches of 128, 4 epochs",
        Entry(MULTIDISCRETE, 512000, f"{SMALL} {RAW}"),
        Entry(THEIRS, 51200, f"{SMALL} --kind classic", SB3),
    ),
    "llm": Measurement(
        "SmolLM2-135M learns sums on two cores; 4 iterations of 64 episodes (steps), 4 minibatches",
        (  # of the same length: answers become shorter
            Entry("ppo_llm.py, PPO", 256, **SUMS),
            Entry("ppo_llm.py, GRPO", 256, "--advantages group", **SUMS),
            Entry("TRL's GRPOTrainer", 256, **TRL),
        ),
        threads=2,
    ),
    "gpu_continuous": measurement(
        f"HalfCheetah-v4, {SIZE}, on a GPU",
        Entry(f"{CONTINUOUS}, --device cpu", 61440, f"{CHEETAH} --device cpu", CONTINUOUS),
        Entry(CONTINUOUS, 61440, f"{CHEETAH} --device cuda"),
        Entry(THEIRS, 20480, f"{CHEETAH} --kind mujoco", SB3),
    ),
    "gpu_atari": measurement(
        f"{PONG_SIZE}, on a GPU",
        Entry(f"{ATARI}, --device cpu", 10240, f"{OURS} --device cpu", ATARI),
        Entry(f"{ATARI}, float32", 40960, f"{OURS} --device cuda", ATARI),
        Entry(f"{ATARI}, bfloat16", 40960, f"{OURS} --device cuda --bfloat16", ATARI),
        Entry("LeanRL PPO, CUDA graphs", 40960, GRAPHS, *LEANRL),
        Entry("LeanRL PPO, CUDA graphs, compiled", 40960, f"{GRAPHS} --compile", *LEANRL),
        CNN,
    ),
    "gpu_atari_lstm": measurement(
        f"{PONG_SIZE}, LSTM, on a GPU",
        Entry(f"{LSTM}, float32", 10240, f"{OURS} --device cuda", LSTM),
        Entry(f"{LSTM}, bfloat16", 10240, f"{OURS} --device cuda --bfloat16", LSTM),
        RNN,
    ),
}
