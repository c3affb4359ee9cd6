"""All suites, measurements of speed and scripts, as data: what is run, and what is shown of it.

To add a suite, add an entry to `ALL`; to add a script, one to `SCRIPTS`.
"""

import dataclasses
import inspect

from benchmark.definitions import Entry, Measurement, Script, Suite, Variant
from benchmark.suites import bugs, since2017, switches, tasks

CONTINUOUS = "ppo_continuous_action.py"
KL_PENALTY = "ppo_kl_penalty.py"
ATARI, LSTM = "ppo_atari.py", "ppo_atari_lstm.py"
MULTIDISCRETE = "ppo_multidiscrete.py"
SB3_SCRIPT = "benchmark/baselines/stable_baselines3_ppo.py"
MINIMAL = "ppo_minimal.py"
MINIMAL_GRPO = "grpo_minimal.py"
RLHF, GRPO, DPO = "ppo_rlhf_toy.py", "grpo_rlhf_toy.py", "dpo_rlhf_toy.py"

# The seven environments of the paper's Figure 3 and Table 1, as version 4.
MUJOCO7 = (
    *("HalfCheetah-v4", "Hopper-v4", "InvertedDoublePendulum-v4", "InvertedPendulum-v4"),
    *("Reacher-v4", "Swimmer-v4", "Walker2d-v4"),
)
THREE = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")

# The eleven surrogate objectives of the paper's Table 1, as fields of `Variant`.
ADAPTIVE = "adaptive KL, d_targ"
OBJECTIVES = {
    "none": (KL_PENALTY, "--kl-mode none", "no clipping or penalty"),
    "clip-0.1": (CONTINUOUS, "--clip-coef 0.1", "clipping, ε = 0.1"),
    "clip-0.2": (CONTINUOUS, "--clip-coef 0.2", "clipping, ε = 0.2"),
    "clip-0.3": (CONTINUOUS, "--clip-coef 0.3", "clipping, ε = 0.3"),
    "adaptive-0.003": (KL_PENALTY, "--kl-mode adaptive --penalty-kl 0.003", f"{ADAPTIVE} = 0.003"),
    "adaptive-0.01": (KL_PENALTY, "--kl-mode adaptive --penalty-kl 0.01", f"{ADAPTIVE} = 0.01"),
    "adaptive-0.03": (KL_PENALTY, "--kl-mode adaptive --penalty-kl 0.03", f"{ADAPTIVE} = 0.03"),
    "fixed-0.3": (KL_PENALTY, "--kl-mode fixed --kl-coef 0.3", "fixed KL, β = 0.3"),
    "fixed-1": (KL_PENALTY, "--kl-mode fixed --kl-coef 1", "fixed KL, β = 1"),
    "fixed-3": (KL_PENALTY, "--kl-mode fixed --kl-coef 3", "fixed KL, β = 3"),
    "fixed-10": (KL_PENALTY, "--kl-mode fixed --kl-coef 10", "fixed KL, β = 10"),
}

# The settings of the code that OpenAI published in the month of the paper, as far as flags can
# express them (see benchmark/pages/objectives.md), and without its clipping of values at ε.
RELEASE_2017 = (
    "--no-anneal-lr --adam-eps 1e-8 --max-grad-norm inf --vf-coef 1.0 --no-scale-rewards "
    "--clip-obs 5.0 --truncation-is-terminal"
)
PROTOCOL_2017 = {
    CONTINUOUS: f"{RELEASE_2017} --no-clip-vloss",
    KL_PENALTY: f"{RELEASE_2017} --value-clip-coef inf",
}

# What PPO is compared with in Figure 3. A pilot chose one setting of each, see
# benchmark/pages/figure3.md.
TRPO, VPG, A2C, CEM = (f"benchmark/baselines/{x}.py" for x in ("trpo", "vpg", "a2c", "cem"))
FIVE = dict.fromkeys(MUJOCO7, (1, 2, 3, 4, 5))
FAST_A2C = "--learning-rate 2e-3"
FIGURE3 = {
    "": Variant(CONTINUOUS, "", "PPO (clip)"),
    "trpo": Variant(TRPO, "--gae-lambda 0.95", "TRPO", environments=FIVE),
    "vpg": Variant(VPG, "--adapt-lr-kl 0.002", "vanilla PG, adaptive", environments=FIVE),
    "a2c": Variant(A2C, FAST_A2C, "A2C", environments=FIVE),
    "a2c-trust-region": Variant(
        *(A2C, f"{FAST_A2C} --trust-region 1", "A2C + trust region"),
        environments=FIVE,
    ),
    "cem": Variant(CEM, "--extra-std 0.25", "CEM", environments=FIVE),
}

# One switch of the default at a time: numbers of the details that are changed, or the title of
# another tag; label; flags; texts that are replaced.
ABLATIONS = {
    "default-init": ("2", "PyTorch's initialization", "", *switches.DEFAULT_INIT),
    "adam-eps-1e-8": ("3", "Adam epsilon 1e-8", "--adam-eps 1e-8"),
    "constant-lr": ("4", "constant learning rate", "--no-anneal-lr"),
    "lambda-1": ("5", "λ = 1", "--gae-lambda 1.0"),
    "one-minibatch": ("6", "one minibatch per epoch", "--num-minibatches 1"),
    "raw-advantages": ("7", "advantages not normalized", "--no-norm-adv"),
    "no-clip": ("8 and 9", "policy and value loss not clipped", "--clip-coef 1e6 --no-clip-vloss"),
    "no-value-clip": ("9", "value loss not clipped", "--no-clip-vloss"),
    "no-grad-clip": ("11", "gradients not clipped", "--max-grad-norm inf"),
    "shared-network": ("13 and 26", "shared network", "", *switches.SHARED_NETWORK),
    # A switch may need a partner: clipped at ε, values cannot follow returns of thousands, and
    # gradients of small advantages might be lost beside those of values, if clipped with them.
    "raw-rewards-free-values": (
        *("9 and 30 and 31", "raw rewards, value loss not clipped"),
        "--no-scale-rewards --no-clip-vloss",
    ),
    "raw-advantages-free-gradients": (
        *("7 and 11", "advantages not normalized, gradients not clipped"),
        "--no-norm-adv --max-grad-norm inf",
    ),
    "raw-observations": ("28 and 29", "raw observations", "--no-norm-obs"),
    "unclipped-observations": ("29", "observations not clipped", "--clip-obs inf"),
    "raw-rewards": ("30 and 31", "raw rewards", "--no-scale-rewards"),
    "unclipped-rewards": ("31", "rewards not clipped", "--clip-reward inf"),
    "truncation-is-terminal": (
        *("time limits are not failures", "time limits are failures", "--truncation-is-terminal"),
    ),
    "anneal-clip": (
        *("clip range annealing", "extra: clip range annealed", ""),
        *switches.ANNEAL_CLIP,
    ),
    "target-kl": (*("early stopping", "extra: early stopping at KL 0.02", "--early-stop-kl 0.02"),),
}
SWITCHES = {
    name: Variant(CONTINUOUS, flags, label, tuple(details.split(" and ")), replaced=tuple(replaced))
    for name, (details, label, flags, *replaced) in ABLATIONS.items()
}

# A setting for returns, and where one of its changes was also run alone.
RECIPE = "--gamma 0.995 --learning-rate 1e-3 --update-epochs 5 --num-minibatches 32"
RECIPE_AGAIN = (
    *("InvertedDoublePendulum-v4", "InvertedPendulum-v4", "Reacher-v4", "Swimmer-v4", "Ant-v4"),
)

# The paper's Table 4 for its 3D humanoids, with 32 actors, as it has for walking; 128 are for the
# harder tasks.
TABLE4 = "--num-envs 32 --num-steps 512 --num-minibatches 4 --update-epochs 15"
ADAPTED, ANNEALED = switches.adapt_lr_kl(0.01), switches.anneal_log_std(-0.7, -1.6)
HUMANOID = Variant(
    *(CONTINUOUS, f"{TABLE4} --no-anneal-lr", "settings of Table 4"),
    replaced=ADAPTED + ANNEALED,
)

FAST_ATARI = "--torch-threads 1 --bfloat16"  # makes 2M steps affordable on one core
GAMES = (  # settings of ppo_atari.py, for others
    "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01"
)
# As for Taxi in the docstring of ppo_multidiscrete.py; runs this short are not worth compiling.
EIGHT = "--num-envs 8 --num-steps 128 --num-minibatches 4 --learning-rate 3e-3 --no-compile"
TAXI = f"{EIGHT} --ent-coef 0.01"
# ppo2 normalizes and separates for MuJoCo only.
CLASSIC_CONTROL = "--no-norm-obs --no-scale-rewards"  # and a shared network

# The three changes by which DeepSeekMath's form differs from the default, and all their subsets:
# none is grpo-0.05 and all are paper-0.05. One more is the third normalization.
STD, OWN, K3 = "--std group", "--loss-norm sequence", "--kl-in-loss k3"
PAPER = f"{STD} {OWN} {K3}"
GRPO_CHANGES = {
    **{"std": STD, "own": OWN, "k3": K3, "mean": "--loss-norm token"},
    **{"std-own": f"{STD} {OWN}", "std-k3": f"{STD} {K3}", "own-k3": f"{OWN} {K3}"},
}
# The weight of the KL penalty, or DPO's beta, in steps; then the changes, and the true reward.
BETA = "--kl-mode fixed --kl-coef"
FRONTIER = {
    **{f"grpo-{x}": Variant(GRPO, f"{BETA} {x}") for x in ("0.05", "0.1", "0.2", "0.5")},
    **{f"paper-{x}": Variant(GRPO, f"{PAPER} {BETA} {x}") for x in ("0.05", "0.2", "0.5")},
    **{f"dpo-{x}": Variant(DPO, f"--nll-coef 0 --beta {x}") for x in ("0.03", "0.1", "0.5", "1.0")},
    **{
        f"grpo-{name}-0.05": Variant(GRPO, f"{flags} {BETA} 0.05")
        for name, flags in GRPO_CHANGES.items()
    },
    "gold-6": Variant(GRPO, "--reward gold"),
    "gold-none": Variant(GRPO, "--reward gold --kl-mode none"),
}
# Where healthy runs are watched, beside those of the bugs.
OTHER6 = dict.fromkeys(("Walker2d-v4", "Swimmer-v4", "Reacher-v4", "Ant-v4"), (1, 2))
OTHER6 |= dict.fromkeys(("InvertedPendulum-v4", "InvertedDoublePendulum-v4"), (1, 2))
# Stable-Baselines3 does not clip values, and has no half in their loss; rl-games shares a network.
RAW = "--no-norm-obs --no-scale-rewards"
ZOO = "--no-clip-vloss --no-anneal-lr"
RL_GAMES = "--num-envs 64 --no-clip-vloss --no-anneal-lr --lr 5e-4 --update-epochs 5"
RL_GAMES += " --max-grad-norm 1.0"
RL_GAMES_TEXTS = switches.SHARED_NETWORK + switches.adapt_lr_kl(0.008)
EAGER = "--no-compile"  # of a run that is over before it would be compiled
SMALL_BATCHES = f"{EAGER} --num-minibatches 4 --update-epochs 4"  # CleanRL's ppo.py
TEXT = f"--num-envs 8 --num-steps 128 {SMALL_BATCHES} --ent-coef 0.01"
TOTAL = "self.total, self.ended = self.total + reward, self.ended or any(ends)"
AT_THE_END = (TOTAL, f"{TOTAL}\n        reward = self.total if self.ended else 0.0")
TINY = (TOTAL, f"{TOTAL}\n        reward *= 0.001")
# By name: environment; script; thousands of steps; flags; whose settings they are, or what is
# unusual; what takes the place of texts. Small networks of tanh are those of our scripts.
Setting = tuple[str, str, int, str, str, *tuple[tuple[str, str], ...]]
# fmt: off
# ruff: disable[E501]
HEALTHY: dict[str, Setting] = {  # limits of warnings were chosen on these
    "cleanrl-cartpole": ("CartPole-v1", MULTIDISCRETE, 150, f"--num-envs 4 --num-steps 128 {SMALL_BATCHES} {RAW} --lr 2.5e-4 --ent-coef 0.01", "CleanRL's ppo.py"),
    "cleanrl-acrobot": ("Acrobot-v1", MULTIDISCRETE, 120, f"--num-envs 4 --num-steps 128 {SMALL_BATCHES} {RAW} --lr 2.5e-4 --ent-coef 0.01", "CleanRL's ppo.py"),
    "taxi": ("Taxi-v4", MULTIDISCRETE, 100, f"{TEXT} --mask-invalid-actions --lr 3e-3", "command of ppo_multidiscrete.py"),
    "frozen-lake": ("FrozenLake-v1", MULTIDISCRETE, 150, f"{TEXT} --lr 1e-3", "entropy bonus"),
    "zoo-mountain-car": ("MountainCar-v0", MULTIDISCRETE, 300, f"{ZOO} --num-envs 16 --num-steps 16 {SMALL_BATCHES} --gae-lambda 0.98 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "zoo-pendulum": ("Pendulum-v1", CONTINUOUS, 100, f"{ZOO} {RAW} --num-envs 4 --num-steps 1024 --num-minibatches 64 --gamma 0.9 --lr 1e-3 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "zoo-walker": ("Walker2d-v4", CONTINUOUS, 75, f"{ZOO} --num-steps 512 --num-minibatches 16 --update-epochs 20 --lr 5.05041e-5 --clip-coef 0.1 --ent-coef 0.000585045 --max-grad-norm 1.0 --vf-coef 1.743746", "Stable-Baselines3 Zoo"),
    "zoo-pole": ("InvertedPendulum-v4", CONTINUOUS, 50, f"{EAGER} {ZOO} --num-steps 32 --num-minibatches 1 --update-epochs 5 --gamma 0.999 --gae-lambda 0.9 --lr 2.22425e-4 --clip-coef 0.4 --max-grad-norm 0.3 --vf-coef 0.39632", "Stable-Baselines3 Zoo"),
    "rl-games-hopper": ("Hopper-v4", CONTINUOUS, 250, f"{EAGER} {RL_GAMES} --num-steps 64 --num-minibatches 2 --vf-coef 2.0", "rl-games", *RL_GAMES_TEXTS),
    "gamma-0.999": ("Hopper-v4", CONTINUOUS, 150, "--gamma 0.999", "γ = 0.999"),
    "lambda-1": ("Walker2d-v4", CONTINUOUS, 120, "--gae-lambda 1.0", "λ = 1"),
    "envs-64": ("HalfCheetah-v4", CONTINUOUS, 250, "--num-envs 64 --num-steps 32", "64 environments"),
    "at-the-end": ("Hopper-v4", CONTINUOUS, 200, "", "rewards at the ends of episodes only", AT_THE_END),
    "tiny": ("HalfCheetah-v4", CONTINUOUS, 100, "", "a thousandth of the rewards", TINY),
    "constant-lr": ("Walker2d-v4", CONTINUOUS, 150, "--no-anneal-lr", "constant learning rate"),
    "penalty-pole": ("InvertedPendulum-v4", KL_PENALTY, 80, "", "KL penalty"),
    "bins-hopper": ("Hopper-v4", MULTIDISCRETE, 120, "", "11 bins per joint"),
    "shared": ("Reacher-v4", CONTINUOUS, 100, "", "shared network", *switches.SHARED_NETWORK),
}
HELD_OUT: dict[str, Setting] = {  # nobody looked at these before the limits were chosen
    "test-zoo-cartpole": ("CartPole-v1", MULTIDISCRETE, 100, f"{EAGER} --no-clip-vloss {RAW} --num-envs 8 --num-steps 32 --num-minibatches 1 --update-epochs 20 --gamma 0.98 --gae-lambda 0.8 --lr 1e-3 --vf-coef 1.0", "Stable-Baselines3 Zoo", *switches.ANNEAL_CLIP),
    "test-zoo-acrobot": ("Acrobot-v1", MULTIDISCRETE, 120, f"{EAGER} {ZOO} --num-envs 16 --num-steps 256 --num-minibatches 64 --update-epochs 4 --gae-lambda 0.94 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "test-zoo-lander": ("LunarLander-v3", MULTIDISCRETE, 300, f"{ZOO} {RAW} --num-envs 16 --num-steps 1024 --num-minibatches 256 --update-epochs 4 --gamma 0.999 --gae-lambda 0.98 --ent-coef 0.01 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "test-zoo-reacher": ("Reacher-v4", CONTINUOUS, 120, f"{ZOO} --num-steps 512 --num-minibatches 16 --update-epochs 5 --gamma 0.9 --gae-lambda 1.0 --lr 1.04019e-4 --clip-coef 0.3 --max-grad-norm 0.9 --vf-coef 1.900736", "Stable-Baselines3 Zoo"),
    "test-zoo-double-pole": ("InvertedDoublePendulum-v4", CONTINUOUS, 100, f"{EAGER} {ZOO} --num-steps 128 --num-minibatches 1 --gamma 0.98 --gae-lambda 0.8 --lr 1.55454e-4 --clip-coef 0.4 --vf-coef 1.391858", "Stable-Baselines3 Zoo"),
    "test-zoo-hopper": ("Hopper-v4", CONTINUOUS, 120, f"{ZOO} --num-steps 512 --num-minibatches 16 --update-epochs 5 --gamma 0.999 --gae-lambda 0.99 --lr 9.80828e-5 --ent-coef 0.00229519 --max-grad-norm 0.7 --vf-coef 1.671342", "Stable-Baselines3 Zoo"),
    "test-zoo-cheetah": ("HalfCheetah-v4", CONTINUOUS, 100, f"{ZOO} --num-steps 512 --num-minibatches 8 --update-epochs 20 --gamma 0.98 --gae-lambda 0.92 --lr 2.0633e-5 --clip-coef 0.1 --ent-coef 0.000401762 --max-grad-norm 0.8 --vf-coef 1.16192", "Stable-Baselines3 Zoo"),
    "test-zoo-swimmer": ("Swimmer-v4", CONTINUOUS, 120, f"{ZOO} --gamma 0.9999 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "test-rl-games-cheetah": ("HalfCheetah-v4", CONTINUOUS, 400, f"{EAGER} {RL_GAMES} --num-steps 256 --num-minibatches 8 --vf-coef 4.0", "rl-games", *RL_GAMES_TEXTS),
    "test-rl-games-cartpole": ("CartPole-v1", MULTIDISCRETE, 150, f"{EAGER} {RAW} --num-envs 16 --num-steps 32 --num-minibatches 8 --update-epochs 4 --gae-lambda 0.9 --no-anneal-lr --lr 2e-4 --ent-coef 0.01 --max-grad-norm 1.0 --vf-coef 1.0", "rl-games, a tenth of the rewards", (TOTAL, f"{TOTAL}\n        reward *= 0.1")),
    "test-taxi": ("Taxi-v4", MULTIDISCRETE, 150, f"{TEXT} --lr 3e-3", "without masks"),
    "test-blackjack": ("Blackjack-v1", MULTIDISCRETE, 100, f"{TEXT} --lr 1e-3", "episodes of a step or two"),
    "test-large-batch": ("Hopper-v4", CONTINUOUS, 300, f"{EAGER} --num-envs 16 --num-steps 1024", "batches of 16,384"),
    "test-at-the-end": ("InvertedPendulum-v4", CONTINUOUS, 100, "", "rewards at the ends of episodes only", AT_THE_END),
    "test-penalty": ("Reacher-v4", KL_PENALTY, 100, "", "KL penalty"),
    "test-bins-pole": ("InvertedPendulum-v4", MULTIDISCRETE, 80, "", "11 bins"),
}
# ruff: enable[E501]
# fmt: on
UNUSUAL = HEALTHY | HELD_OUT


def healthy_variant(env: str, script: str, k: int, flags: str, source: str, *texts) -> Variant:
    """A setting in one environment with two seeds; the last number of steps counts."""
    flags = f"{flags} --total-timesteps {k}e3".strip()
    return Variant(script, flags, source, environments={env: (1, 2)}, replaced=texts)


# Tasks of our own, whose text is put into a copy of a script, and what then makes an environment.
TASKS = ("# === Agent ===\n", f"{inspect.getsource(tasks)}\n\n# === Agent ===\n")
JOINT = ('"Points-v0", Points', '"Points-v0", lambda: Joint(Points())')
MAKE = "def make_env(args: Args, videos: str | None = None) -> gym.Env:\n"
STACKED = "gym.wrappers.FrameStackObservation(env, NUM_FRAMES, padding_type='zero')"
RECALL = (TASKS, (MAKE, f"{MAKE}    env = EpisodicLife(Recall())\n    return {STACKED}\n"))
SMALL_BATCH = "--num-envs 16 --num-steps 32 --learning-rate 1e-3 --torch-threads 1 --bfloat16"
FORGETFUL = {
    name: Variant(LSTM, SMALL_BATCH, label, (number,), replaced=(*RECALL, *replaced))
    for name, (number, label, *replaced) in bugs.LSTM_DETAILS.items()
}

# What some suites have in common.
SHORT = {"total_timesteps": 299_008, "points": 146}  # their curves have a point for each iteration
HUMANOIDS = {"kind": "each_run", "figures": ("curves",)}
HUMANOIDS |= {"total_timesteps": 4_096_000, "evaluated": True}
BESIDE_DEFAULT = {"baseline": ("figure3", ""), "baseline_label": "default"}
EFFECTS = BESIDE_DEFAULT | {"kind": "effects", "figures": ("effects",)}
EFFECTS["environments"] = dict.fromkeys(
    ("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"), (1, 2, 3, 4, 5)
)
# A run of two minutes starts again if it was interrupted.
STAGES = {"total_timesteps": None, "checkpoint": "results.json"}
ALL = (
    Suite(
        name="smoke",
        reproduces="nothing: two short runs that show whether everything works here",
        environments={"InvertedPendulum-v4": (1, 2)},
        variants={"": Variant(CONTINUOUS)},
        kind="scores",
        total_timesteps=4096,
    ),
    Suite(
        name="figure3",
        reproduces="Schulman et al. 2017, Figure 3, and baselines' ppo2",
        environments={
            **dict.fromkeys(MUJOCO7, tuple(range(1, 6))),
            # Their spread is huge: some seeds find a gait that pays twice as much as the others'.
            **dict.fromkeys(("HalfCheetah-v4", "Swimmer-v4"), tuple(range(1, 11))),
            "Ant-v4": (1, 2, 3),
            "Humanoid-v4": (1, 2, 3),
        },
        variants=FIGURE3,
        baseline=("figure3", ""),
        kind="figure3",
        figures=("first", "three", "baselines", "health"),
    ),
    Suite(
        name="swimmer",
        reproduces="whether time limits or our code explain ppo2's higher returns in Swimmer",
        environments={"Swimmer-v4": tuple(range(1, 11))},
        variants={
            "truncation-is-terminal": SWITCHES["truncation-is-terminal"],
            "sb3": Variant(
                *(SB3_SCRIPT, "--kind mujoco", "Stable-Baselines3 with ppo2's settings"),
                environments={"Swimmer-v4": (1, 2, 3, 4, 5)},
            ),
        },
        **BESIDE_DEFAULT,
    ),
    Suite(
        name="minimal",
        reproduces="whether the one-page PPO learns as well as the full script",
        environments=dict.fromkeys((*THREE, "InvertedDoublePendulum-v4"), (1, 2, 3, 4, 5)),
        variants={
            "": Variant("benchmark/baselines/minimal.py", "", MINIMAL),
        },
        baseline=("figure3", ""),
        baseline_label="ppo_continuous_action.py",
    ),
    Suite(
        name="stable_baselines3",
        reproduces="Stable-Baselines3's PPO with ppo2's settings, on the same simulator",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)),
        variants={
            "": Variant(SB3_SCRIPT, "--kind mujoco", "Stable-Baselines3 with ppo2's settings")
        },
        baseline=("figure3", ""),
        baseline_label=CONTINUOUS,
    ),
    Suite(
        name="kl_vs_clip",
        reproduces="Schulman et al. 2017, section 4: the adaptive KL penalty against clipping",
        environments=dict.fromkeys(MUJOCO7, (1, 2, 3)),
        variants={"adaptive-0.01": Variant(*OBJECTIVES["adaptive-0.01"])},
        baseline=("figure3", ""),
        baseline_label="clipping, ε = 0.2",
        figures=("curves", "trace"),
    ),
    Suite(
        name="table1",
        reproduces="Schulman et al. 2017, Table 1, with the settings of the code of 2017",
        environments=dict.fromkeys(MUJOCO7, (1, 2, 3)),
        variants={
            name: Variant(script, f"{flags} {PROTOCOL_2017[script]}", label)
            for name, (script, flags, label) in OBJECTIVES.items()
        },
        baseline=("table1", "clip-0.2"),
        kind="normalized",
        figures=("normalized",),
    ),
    Suite(
        name="ablation",
        reproduces="what each detail is worth, beside Engstrom et al. 2020",
        variants=SWITCHES,
        **EFFECTS,
    ),
    Suite(
        name="since2017",
        reproduces="what has been proposed since 2017, each beside the default",
        variants=since2017.VARIANTS,
        **EFFECTS,
    ),
    # Ended: the search that found the recipe is not repeated, its runs are in results/closed/.
    Suite(
        name="recipe",
        reproduces="a setting for returns, compared with the default on fresh seeds",
        environments=dict.fromkeys((*MUJOCO7, "Ant-v4"), (201, 202, 203, 204, 205)),
        variants={
            "": Variant(CONTINUOUS, "", "default"),
            "recipe": Variant(CONTINUOUS, RECIPE, "recipe"),
            "gamma-0.995": Variant(
                *(CONTINUOUS, "--gamma 0.995", "γ = 0.995"),
                environments=dict.fromkeys(RECIPE_AGAIN, (201, 202, 203)),
            ),
        },
        kind="recipe",
    ),
    Suite(
        name="humanoid",
        reproduces="Schulman et al. 2017, section 6.3 and Table 4, in Gymnasium's Humanoid-v4",
        environments={"Humanoid-v4": (1, 2, 3)},
        variants={"": HUMANOID},
        **HUMANOIDS,
    ),
    Suite(
        name="humanoid_controls",
        reproduces="what each of these settings is worth",
        environments={"Humanoid-v4": (1,)},
        variants={
            "learned-log-std": Variant(
                CONTINUOUS, f"{TABLE4} --no-anneal-lr", "log std learned", replaced=ADAPTED
            ),
            "annealed-lr": Variant(CONTINUOUS, TABLE4, "step size annealed", replaced=ANNEALED),
            "ppo2-batch": Variant(
                CONTINUOUS, "--no-anneal-lr", "batches of ppo2", replaced=ADAPTED + ANNEALED
            ),
        },
        baseline=("humanoid", ""),
        baseline_label=HUMANOID.label,
        **HUMANOIDS,
    ),
    Suite(
        name="humanoid_elsewhere",
        reproduces="the same settings beside the default in other environments",
        environments=dict.fromkeys(("Ant-v4", "Walker2d-v4"), (1,)),
        variants={"default": Variant(CONTINUOUS, "", "default"), "table4": HUMANOID},
        **HUMANOIDS | {"total_timesteps": 2_000_000},
    ),
    Suite(
        name="games",
        reproduces="Schulman et al. 2017, Table 6 and Figure 6, in a fifth of the steps",
        environments={
            **dict.fromkeys(("Breakout", "BeamRider", "Qbert"), (1, 2)),
            **dict.fromkeys(("SpaceInvaders", "Seaquest", "Enduro"), (1, 2)),
            "Pong": (1, 2, 3),
        },
        variants={
            "": Variant(ATARI, FAST_ATARI, "four frames, no memory"),
            "lstm": Variant(
                *(LSTM, FAST_ATARI, "one frame and an LSTM"),
                environments=dict.fromkeys(("Breakout", "Pong"), (1,)),
            ),
            "sb3": Variant(
                *(SB3_SCRIPT, f"--kind atari {GAMES}", "four frames, Stable-Baselines3"),
                environments=dict.fromkeys(("Breakout", "Qbert", "Pong"), (1,)),
            ),
        },
        total_timesteps=2_000_896,
        kind="games",
        figures=("curves",),
    ),
    Suite(
        name="cartpole",
        reproduces="Huang et al. 2022: CartPole-v1 solved within 500k steps",
        environments={"CartPole-v1": (1, 2, 3)},
        variants={
            "": Variant(MULTIDISCRETE, CLASSIC_CONTROL, replaced=switches.SHARED_NETWORK),
        },
        total_timesteps=500_000,
        kind="scores",
        figures=("curves",),
    ),
    Suite(
        name="multidiscrete_vs_gaussian",
        reproduces="Tang and Agrawal 2020: discretized actions rival the Gaussian policy",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={"bins-11": Variant(MULTIDISCRETE, "--bins 11", "11 bins per joint")},
        baseline=("figure3", ""),
        baseline_label="Gaussian policy",
        figures=("curves",),
    ),
    # Three PPO runs on one reward model: adaptive KL, beta = 0 and a fixed beta.
    Suite(
        name="rlhf",
        reproduces="Gao et al. 2022 in small: over-optimization of a reward model, and its cure",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"": Variant(RLHF, "--compare")},
        kind="rlhf",
        **STAGES,
    ),
    Suite(
        name="rlhf_rivals",
        reproduces="GRPO (Shao et al. 2024) and DPO (Rafailov et al. 2023) on the task of `rlhf`",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"grpo": Variant(GRPO, "--compare"), "dpo": Variant(DPO, "--compare")},
        kind="models",
        **STAGES,
    ),
    Suite(
        name="rlhf_frontier",
        reproduces="Rafailov et al. 2023, Figure 2, in small: quality over the KL, for each rival",
        environments={"reviews": (1, 2, 3)},
        variants=FRONTIER,
        figures=("frontier",),
        kind="models",
        **STAGES,
    ),
    Suite(
        name="grpo_minimal",
        reproduces="what GRPO's variants do with a verifiable reward: pass@1, pass@16 and KL",
        environments={"sums": (1, 2, 3, 4, 5)},
        variants={"": Variant("benchmark/baselines/minimal_grpo.py")},
        figures=("sums",),
        kind="sums",
        **STAGES,
    ),
    # All steps of the curves are kept: the health table is applied to them, see health.py.
    Suite(
        name="bugs",
        reproduces="what mistakes look like, and which of them the scripts warn about",
        environments=dict.fromkeys(("Hopper-v4", "HalfCheetah-v4"), (1, 2, 3)),
        variants=bugs.variants(CONTINUOUS, bugs.BUGS),
        figures=("bugs",),
        kind="bugs",
        **SHORT,
    ),
    Suite(
        # With ppo2's settings for classic control the values are held by their clipping.
        name="bugs_cartpole",
        reproduces="the same where actions are discrete",
        environments={"CartPole-v1": (1, 2, 3)},
        variants=bugs.variants(MULTIDISCRETE, {x: bugs.BUGS[x] for x in bugs.IN_CARTPOLE}),
        kind="bugs",
        **SHORT,
    ),
    Suite(
        name="bugs_evaluation",
        reproduces="the same, made after training",
        environments=dict.fromkeys(("Hopper-v4", "HalfCheetah-v4"), (1, 2, 3)),
        variants=bugs.variants(CONTINUOUS, bugs.EVALUATION),
        kind="mean_policies",
        evaluated=True,
        **SHORT,
    ),
    Suite(
        name="bugs_rlhf",
        reproduces="the same in RLHF",
        environments={"reviews": (1, 2, 3)},
        variants=bugs.variants(RLHF, bugs.RLHF_BUGS),
        kind="bugs",
        **STAGES,
    ),
    Suite(
        name="bugs_healthy",
        reproduces="whether healthy runs elsewhere stay without a warning",
        kind="healthy",
        environments=dict.fromkeys((*OTHER6, "Pong", *(x[0] for x in UNUSUAL.values())), ()),
        variants={
            "default": Variant(CONTINUOUS, "", "default", environments=OTHER6),
            "bins": Variant(MULTIDISCRETE, "", "11 bins", environments={"HalfCheetah-v4": (1, 2)}),
            "penalty": Variant(KL_PENALTY, "", "KL penalty", environments={"Hopper-v4": (1, 2)}),
            "atari": Variant(ATARI, FAST_ATARI, "default", environments={"Pong": (1,)}),
            **{name: healthy_variant(*x) for name, x in UNUSUAL.items()},
        },
        **SHORT | {"points": None},
    ),
    Suite(
        name="multidiscrete",
        reproduces="what independent components are worth where they are independent",
        environments={"Points-v0": (1, 2, 3, 4, 5)},
        variants={
            "": Variant(
                *(MULTIDISCRETE, EIGHT, "four components of 3 to 9 choices"), replaced=(TASKS,)
            ),
            "joint": Variant(
                *(MULTIDISCRETE, EIGHT, "one of 945 choices", ("37",)), replaced=(TASKS, JOINT)
            ),
        },
        baseline=("multidiscrete", ""),
        total_timesteps=102_400,
    ),
    Suite(
        name="masks",
        reproduces="what masks of invalid actions are worth, beside Huang and Ontañón 2020",
        environments={"Taxi-v4": (1, 2, 3, 4, 5)},
        variants={
            "": Variant(MULTIDISCRETE, f"{TAXI} --mask-invalid-actions", "with masks"),
            "unmasked": Variant(MULTIDISCRETE, TAXI, "without masks"),
        },
        baseline=("masks", ""),
        total_timesteps=100_352,
    ),
    Suite(
        name="memory",
        reproduces="that the LSTM remembers, and what each of its details is worth for that",
        environments={"Recall": (1, 2, 3, 4, 5)},
        variants={
            "": Variant(LSTM, SMALL_BATCH, "one frame and an LSTM", replaced=RECALL),
            "frames": Variant(
                *(ATARI, f"{SMALL_BATCH} --no-compile", "four frames, no memory"), replaced=RECALL
            ),
            **FORGETFUL,
        },
        baseline=("memory", ""),
        total_timesteps=20_480,
    ),
    Suite(
        name="a2c",
        reproduces="whether A2C would be better with all coefficients of baselines' a2c",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={
            "baselines": Variant(
                *(A2C, f"{FAST_A2C} --vf-coef 1 --ent-coef 0.01", "baselines' coefficients")
            )
        },
        baseline=("figure3", "a2c"),
        baseline_label="A2C of Figure 3",
    ),
    Suite(
        name="mean_policies",
        reproduces="the six methods of Figure 3 without the noise of their training",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={name: dataclasses.replace(x, environments=None) for name, x in FIGURE3.items()},
        kind="mean_policies",
        evaluated=True,
    ),
)
SUITES = {suite.name: suite for suite in ALL}
KINDS = {kind: [x for x in ALL if x.kind == kind] for kind in {x.kind for x in ALL}}


# What `throughput` measures, in about a minute for each entry. SB3 gets a tenth of the steps.
SB3 = "Stable-Baselines3 PPO"
SB3_CNN, SB3_LSTM = f"{SB3}, CnnPolicy", "sb3-contrib RecurrentPPO, CnnLstmPolicy"
CHEETAH, CARTPOLE = "--env-id HalfCheetah-v4", "--env-id CartPole-v1"
SMALL = (
    f"{CARTPOLE} --num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --ent-coef 0.01"
)
PONG = f"--env-id PongNoFrameskip-v4 {GAMES}"
OURS = f"{PONG} --torch-threads 2"
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
            Entry(f"{ATARI}, float32", 16384, OURS, ATARI),
            Entry(f"{ATARI}, bfloat16", 16384, f"{OURS} --bfloat16", ATARI),
            Entry(SB3_CNN, 10240, f"{PONG} --kind atari", SB3_SCRIPT),
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

# Rows of the table of scripts: what a script shows, and the runs that stand for it.
SCRIPTS = {
    MINIMAL: Script("all of PPO in about 200 lines", "minimal", "HalfCheetah-v4"),
    CONTINUOUS: Script("details 1–13 and 23–31", "figure3", "HalfCheetah-v4"),
    KL_PENALTY: Script("the paper's other objective", "kl_vs_clip", "Hopper-v4", "adaptive-0.01"),
    ATARI: Script("details 1–22", "games", "Pong"),
    LSTM: Script("details 1–22 and 32–36", "games", "Pong", "lstm"),
    MULTIDISCRETE: Script("detail 37, action masks", "cartpole", "CartPole-v1"),
    MINIMAL_GRPO: Script("all of GRPO in 200 lines", "grpo_minimal", "sums"),
    RLHF: Script("RLHF with PPO", "rlhf", "reviews"),
    GRPO: Script("GRPO on the same task", "rlhf_rivals", "reviews", "grpo"),
    DPO: Script("DPO on the same task", "rlhf_rivals", "reviews", "dpo"),
}
