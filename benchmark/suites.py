"""All suites: what is run, and what it reproduces. To add one, add an entry to `SUITES`."""

import dataclasses
from typing import Literal

CONTINUOUS = "ppo_continuous_action.py"
KL_PENALTY = "ppo_kl_penalty.py"
MULTIDISCRETE = "ppo_multidiscrete.py"
RLHF, GRPO, DPO = "ppo_rlhf_toy.py", "grpo_rlhf_toy.py", "dpo_rlhf_toy.py"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A script with the flags that make this variant."""

    script: str
    flags: str = ""
    label: str = ""  # in tables and figures; empty where a suite has only one variant


@dataclasses.dataclass(frozen=True)
class Suite:
    """Every variant in every environment with every seed."""

    reproduces: str
    environments: dict[str, tuple[int, ...]]  # and their seeds; RLHF has the toy reviews there
    variants: dict[str, Variant]  # by name; a single one may have the empty name
    total_timesteps: int = 1_000_000  # of RLHF, which has none: PPO updates of all its runs
    baseline: tuple[str, str] | None = None  # suite and variant that the variants are compared with
    baseline_label: str = ""  # in tables and figures; empty where it is a variant of this suite
    table: Literal["scores", "normalized", "effects", "models", "walking", "rivals"] = "scores"
    figures: tuple[
        Literal["curves", "trace", "health", "effects", "normalized", "frontier", "rivals"], ...
    ] = ("curves",)


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
    "adaptive-0.003": (KL_PENALTY, "--kl-mode adaptive --target-kl 0.003", f"{ADAPTIVE} = 0.003"),
    "adaptive-0.01": (KL_PENALTY, "--kl-mode adaptive --target-kl 0.01", f"{ADAPTIVE} = 0.01"),
    "adaptive-0.03": (KL_PENALTY, "--kl-mode adaptive --target-kl 0.03", f"{ADAPTIVE} = 0.03"),
    "fixed-0.3": (KL_PENALTY, "--kl-mode fixed --kl-coef 0.3", "fixed KL, β = 0.3"),
    "fixed-1": (KL_PENALTY, "--kl-mode fixed --kl-coef 1", "fixed KL, β = 1"),
    "fixed-3": (KL_PENALTY, "--kl-mode fixed --kl-coef 3", "fixed KL, β = 3"),
    "fixed-10": (KL_PENALTY, "--kl-mode fixed --kl-coef 10", "fixed KL, β = 10"),
}

# In the month of the paper OpenAI published code for the MuJoCo experiments as baselines/pposgd
# (openai/baselines@da997060). Its pposgd_simple.py, mlp_policy.py and run_mujoco.py have a constant
# learning rate, Adam with epsilon 1e-8, no gradient clipping, the value loss with weight 1, raw
# rewards, observations clipped at 5, and time limits as failures. Left as in ppo2, because no flag
# expresses it: advantages normalized over the minibatch instead of the batch; orthogonal
# initialization with gain sqrt(2) instead of normalized columns with gain 1; observation statistics
# updated at every step instead of once per batch, without a least standard deviation of 0.1;
# actions clipped to their bounds.
RELEASE_2017 = (
    "--no-anneal-lr --adam-eps 1e-8 --max-grad-norm inf --vf-coef 1.0 --no-scale-rewards "
    "--clip-obs 5.0 --truncation-is-terminal"
)
# What the paper most likely ran is that, without one thing. The release also clips the change of
# each value at ε, as if rewards were scaled; they are not, and then values, which are in the
# hundreds, hardly move. The paper does not mention this clipping, and ppo1, the next version of the
# release's code, has none.
PROTOCOL_2017 = {
    CONTINUOUS: f"{RELEASE_2017} --no-clip-vloss",
    KL_PENALTY: f"{RELEASE_2017} --value-clip-coef inf",
}


# One switch of the default at a time; the first column of numbers is that of the 37 details.
ABLATIONS = {
    "default-init": ("2 PyTorch's initialization", "--no-orthogonal-init"),
    "adam-eps-1e-8": ("3 Adam epsilon 1e-8", "--adam-eps 1e-8"),
    "constant-lr": ("4 constant learning rate", "--no-anneal-lr"),
    "lambda-1": ("5 λ = 1", "--gae-lambda 1.0"),
    "one-minibatch": ("6 one minibatch per epoch", "--num-minibatches 1"),
    "raw-advantages": ("7 advantages not normalized", "--no-norm-adv"),
    "no-clip": ("8 and 9 policy and value loss not clipped", "--clip-coef 1e6 --no-clip-vloss"),
    "no-value-clip": ("9 value loss not clipped", "--no-clip-vloss"),
    "no-grad-clip": ("11 gradients not clipped", "--max-grad-norm inf"),
    "shared-network": ("13 and 26 shared network", "--shared-network"),
    "raw-observations": ("28 and 29 raw observations", "--no-norm-obs"),
    "unclipped-observations": ("29 observations not clipped", "--clip-obs inf"),
    "raw-rewards": ("30 and 31 raw rewards", "--no-scale-rewards"),
    "unclipped-rewards": ("31 rewards not clipped", "--clip-reward inf"),
    "truncation-is-terminal": ("time limits are failures", "--truncation-is-terminal"),
    "anneal-clip": ("extra: clip range annealed", "--anneal-clip"),
    "target-kl": ("extra: early stopping at KL 0.02", "--target-kl 0.02"),
}
SWITCHES = {name: Variant(CONTINUOUS, flags, label) for name, (label, flags) in ABLATIONS.items()}

# The paper's Table 4 for its 3D humanoids, with 32 actors, as it has for walking; 128 are for the
# harder tasks.
TABLE4 = "--num-envs 32 --num-steps 512 --num-minibatches 4 --update-epochs 15"
ADAPTED = "--no-anneal-lr --desired-kl 0.01"
ANNEALED = "--anneal-log-std -0.7 -1.6"
HUMANOID = Variant(CONTINUOUS, f"{TABLE4} {ADAPTED} {ANNEALED}", "settings of Table 4")

FAST_ATARI = "--torch-threads 1 --bfloat16"  # makes 2M steps affordable on one core
# ppo2 normalizes and separates for MuJoCo only.
CLASSIC_CONTROL = "--no-norm-obs --no-scale-rewards --shared-network"

SUITES = {
    "smoke": Suite(
        reproduces="nothing: two short runs that show whether everything works here",
        environments={"InvertedPendulum-v4": (1, 2)},
        variants={"": Variant(CONTINUOUS)},
        total_timesteps=4096,
    ),
    "figure3": Suite(
        reproduces="Schulman et al. 2017, Figure 3 (PPO), and baselines' ppo2",
        environments={
            **dict.fromkeys(MUJOCO7, tuple(range(1, 6))),
            # Their spread is huge: some seeds find a gait that pays twice as much as the others'.
            **dict.fromkeys(("HalfCheetah-v4", "Swimmer-v4"), tuple(range(1, 11))),
            "Ant-v4": (1, 2, 3),
            "Humanoid-v4": (1, 2, 3),
        },
        variants={"": Variant(CONTINUOUS)},
        figures=("curves", "health"),
    ),
    "swimmer": Suite(
        reproduces="whether ppo2's time limits explain its higher returns in Swimmer",
        environments={"Swimmer-v4": tuple(range(1, 11))},
        variants={"truncation-is-terminal": SWITCHES["truncation-is-terminal"]},
        baseline=("figure3", ""),
        baseline_label="default",
        figures=(),
    ),
    "kl_vs_clip": Suite(
        reproduces="Schulman et al. 2017, section 4: the adaptive KL penalty against clipping",
        environments=dict.fromkeys(MUJOCO7, (1, 2, 3)),
        variants={"adaptive-0.01": Variant(*OBJECTIVES["adaptive-0.01"])},
        baseline=("figure3", ""),
        baseline_label="clipping, ε = 0.2",
        figures=("curves", "trace"),
    ),
    "table1": Suite(
        reproduces="Schulman et al. 2017, Table 1, with the settings of the code of 2017",
        environments=dict.fromkeys(MUJOCO7, (1, 2, 3)),
        variants={
            name: Variant(script, f"{flags} {PROTOCOL_2017[script]}", label)
            for name, (script, flags, label) in OBJECTIVES.items()
        },
        baseline=("table1", "clip-0.2"),
        table="normalized",
        figures=("normalized",),
    ),
    "ablation": Suite(
        reproduces="what each detail is worth, beside Engstrom et al. 2020",
        environments=dict.fromkeys(("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"), (1, 2, 3, 4, 5)),
        variants=SWITCHES,
        baseline=("figure3", ""),
        baseline_label="default",
        table="effects",
        figures=("effects",),
    ),
    "humanoid": Suite(
        reproduces="Schulman et al. 2017, section 6.3 and Table 4, in Gymnasium's Humanoid-v4",
        environments={"Humanoid-v4": (1, 2, 3)},
        variants={"": HUMANOID},
        total_timesteps=4_096_000,
        table="walking",
    ),
    "humanoid_controls": Suite(
        reproduces="what each of these settings is worth",
        environments={"Humanoid-v4": (1,)},
        variants={
            "learned-log-std": Variant(CONTINUOUS, f"{TABLE4} {ADAPTED}", "log std learned"),
            "annealed-lr": Variant(CONTINUOUS, f"{TABLE4} {ANNEALED}", "step size annealed"),
            "ppo2-batch": Variant(CONTINUOUS, f"{ADAPTED} {ANNEALED}", "batches of ppo2"),
        },
        total_timesteps=4_096_000,
        baseline=("humanoid", ""),
        baseline_label=HUMANOID.label,
        table="walking",
    ),
    "humanoid_elsewhere": Suite(
        reproduces="the same settings beside the default in other environments",
        environments=dict.fromkeys(("Ant-v4", "Walker2d-v4"), (1,)),
        variants={"default": Variant(CONTINUOUS, "", "default"), "table4": HUMANOID},
        total_timesteps=2_000_000,
        table="walking",
    ),
    "pong": Suite(
        reproduces="Schulman et al. 2017, Table 6 and Figure 6: Pong, in a fifth of the steps",
        environments={"Pong": (1,)},
        variants={"": Variant("ppo_atari.py", FAST_ATARI)},
        total_timesteps=2_000_896,
    ),
    "pong_lstm": Suite(
        reproduces="Huang et al. 2022: Pong from single frames, in a fifth of the steps",
        environments={"Pong": (1,)},
        variants={"lstm": Variant("ppo_atari_lstm.py", FAST_ATARI, "one frame and an LSTM")},
        total_timesteps=2_000_896,
        baseline=("pong", ""),
        baseline_label="four frames, no memory",
    ),
    "cartpole": Suite(
        reproduces="Huang et al. 2022: CartPole-v1 solved within 500k steps",
        environments={"CartPole-v1": (1, 2, 3)},
        variants={"": Variant(MULTIDISCRETE, CLASSIC_CONTROL)},
        total_timesteps=500_000,
    ),
    "multidiscrete_vs_gaussian": Suite(
        reproduces="Tang and Agrawal 2020: discretized actions rival the Gaussian policy",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={"bins-11": Variant(MULTIDISCRETE, "--bins 11", "11 bins per joint")},
        baseline=("figure3", ""),
        baseline_label="Gaussian policy",
    ),
    # Three PPO runs on one reward model: adaptive KL, beta = 0 and a fixed beta.
    "rlhf": Suite(
        reproduces="Gao et al. 2022 in small: over-optimization of a reward model, and its cure",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"": Variant(RLHF, "--compare")},
        total_timesteps=3 * 80,
        table="models",
        figures=("frontier",),
    ),
}


# The three changes by which DeepSeekMath's form differs from the default, and all their subsets:
# none is grpo-0.05 and all are paper-0.05. One more is the third length divisor.
STD, OWN, K3 = "--std", "--length-divisor own", "--kl-in-loss"
PAPER = f"{STD} {OWN} {K3}"
CHANGES = {
    **{"std": STD, "own": OWN, "k3": K3, "mean": "--length-divisor mean"},
    **{"std-own": f"{STD} {OWN}", "std-k3": f"{STD} {K3}", "own-k3": f"{OWN} {K3}"},
}
# The weight of the KL penalty, or DPO's beta, in steps; then the changes, and the true reward.
BETA = "--kl-mode fixed --kl-coef"
FRONTIER = {
    **{f"grpo-{x}": (GRPO, f"{BETA} {x}") for x in ("0.05", "0.1", "0.2", "0.5")},
    **{f"paper-{x}": (GRPO, f"{PAPER} {BETA} {x}") for x in ("0.05", "0.2", "0.5")},
    **{f"dpo-{x}": (DPO, f"--nll-coef 0 --beta {x}") for x in ("0.03", "0.1", "0.5", "1.0")},
    **{f"grpo-{name}-0.05": (GRPO, f"{flags} {BETA} 0.05") for name, flags in CHANGES.items()},
    "gold-6": (GRPO, "--reward gold"),
    "gold-none": (GRPO, "--reward gold --kl-mode none"),
}
SUITES |= {
    "rlhf_rivals": Suite(
        reproduces="GRPO (Shao et al. 2024) and DPO (Rafailov et al. 2023) on the task of `rlhf`",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"grpo": Variant(GRPO, "--compare"), "dpo": Variant(DPO, "--compare")},
        total_timesteps=1,  # each counts as one
        table="rivals",
        figures=(),
    ),
    "rlhf_frontier": Suite(
        reproduces="Rafailov et al. 2023, Figure 2, in small: quality over the KL, for each rival",
        environments={"reviews": (1, 2, 3)},
        variants={name: Variant(script, flags) for name, (script, flags) in FRONTIER.items()},
        total_timesteps=1,
        table="rivals",
        figures=("rivals",),
    ),
}
