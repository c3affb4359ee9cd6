"""All suites, contests and scripts: what is run, what it reproduces, what is shown of it.

To add a suite, add an entry to `ALL`; to add a script, one to `SCRIPTS`.
"""

import functools

from benchmark import bugs, health, plots, rlhf, tables
from benchmark.definitions import Contender, Contest, Script, Suite, Variant

CONTINUOUS = "ppo_continuous_action.py"
KL_PENALTY = "ppo_kl_penalty.py"
ATARI, LSTM = "ppo_atari.py", "ppo_atari_lstm.py"
MULTIDISCRETE = "ppo_multidiscrete.py"
PEERS = "benchmark/peers.py"
MINIMAL = "ppo_minimal.py"
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

# The settings of the code that OpenAI published in the month of the paper, as far as flags express
# them (benchmark/README.md says what they do not), and without its clipping of values at ε.
RELEASE_2017 = (
    "--no-anneal-lr --adam-eps 1e-8 --max-grad-norm inf --vf-coef 1.0 --no-scale-rewards "
    "--clip-obs 5.0 --truncation-is-terminal"
)
PROTOCOL_2017 = {
    CONTINUOUS: f"{RELEASE_2017} --no-clip-vloss",
    KL_PENALTY: f"{RELEASE_2017} --value-clip-coef inf",
}

# PPO's rivals in Figure 3: label, script, the flag that `rivals_pilot` decides, the value that was
# taken, and the other one. Taken is the better average, A2C's learning rate first; but CEM's noise
# is part of that method, and two seeds show no difference.
TRPO, VPG, A2C, CEM = (f"benchmark/rivals/{x}.py" for x in ("trpo", "vpg", "a2c", "cem"))
TRUST = "--learning-rate 2e-3 --trust-region"
RIVALS = {
    "trpo": ("TRPO", TRPO, "--gae-lambda", "0.95", "0.98"),
    "vpg": ("vanilla PG, adaptive", VPG, "--adapt-lr-kl", "0.002", "0.01"),
    "a2c": ("A2C", A2C, "--learning-rate", "2e-3", "7e-4"),
    "a2c-trust-region": ("A2C + trust region", A2C, TRUST, "1", "0.1"),
    "cem": ("CEM", CEM, "--extra-std", "0.25", "0"),
}
FIVE = dict.fromkeys(MUJOCO7, (1, 2, 3, 4, 5))
FIGURE3 = {"": Variant(CONTINUOUS, label="PPO (clip)")} | {
    name: Variant(script, f"{flag} {taken}", label, environments=FIVE)
    for name, (label, script, flag, taken, _) in RIVALS.items()
}
PILOT = {
    f"{name}-{x}": Variant(
        *(script, f"{flag} {x}"),
        f"{label}, {flag.rpartition('--')[2]} {x}{', taken' * (x == taken)}",
    )
    for name, (label, script, flag, taken, other) in RIVALS.items()
    for x in sorted((taken, other))  # so that the choice changes no place
}

# One switch of the default at a time: numbers of the details that are changed, or the title of
# another tag; label; flags.
ABLATIONS = {
    "default-init": ("2", "PyTorch's initialization", "--no-orthogonal-init"),
    "adam-eps-1e-8": ("3", "Adam epsilon 1e-8", "--adam-eps 1e-8"),
    "constant-lr": ("4", "constant learning rate", "--no-anneal-lr"),
    "lambda-1": ("5", "λ = 1", "--gae-lambda 1.0"),
    "one-minibatch": ("6", "one minibatch per epoch", "--num-minibatches 1"),
    "raw-advantages": ("7", "advantages not normalized", "--no-norm-adv"),
    "no-clip": ("8 and 9", "policy and value loss not clipped", "--clip-coef 1e6 --no-clip-vloss"),
    "no-value-clip": ("9", "value loss not clipped", "--no-clip-vloss"),
    "no-grad-clip": ("11", "gradients not clipped", "--max-grad-norm inf"),
    "shared-network": ("13 and 26", "shared network", "--shared-network"),
    # A switch may need a partner: clipped at ε, values cannot follow returns of thousands, and
    # gradients of small advantages are lost beside those of values, with which they are clipped.
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
    "anneal-clip": ("clip range annealing", "extra: clip range annealed", "--anneal-clip"),
    "target-kl": (*("early stopping", "extra: early stopping at KL 0.02", "--early-stop-kl 0.02"),),
}
SWITCHES = {
    name: Variant(CONTINUOUS, flags, label, tuple(details.split(" and ")))
    for name, (details, label, flags) in ABLATIONS.items()
}

# The paper's Table 4 for its 3D humanoids, with 32 actors, as it has for walking; 128 are for the
# harder tasks.
TABLE4 = "--num-envs 32 --num-steps 512 --num-minibatches 4 --update-epochs 15"
ADAPTED = "--no-anneal-lr --adapt-lr-kl 0.01"
ANNEALED = "--anneal-log-std -0.7 -1.6"
HUMANOID = Variant(CONTINUOUS, f"{TABLE4} {ADAPTED} {ANNEALED}", "settings of Table 4")

FAST_ATARI = "--torch-threads 1 --bfloat16"  # makes 2M steps affordable on one core
GAMES = (  # settings of ppo_atari.py, for others
    "--num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01"
)
# ppo2 normalizes and separates for MuJoCo only.
CLASSIC_CONTROL = "--no-norm-obs --no-scale-rewards --shared-network"

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
SHOWN = ("rlhf", "rlhf_rivals", "rlhf_frontier")  # in the figure of the last one

# Where healthy runs are watched, beside those of the bugs.
OTHER6 = dict.fromkeys(("Walker2d-v4", "Swimmer-v4", "Reacher-v4", "Ant-v4"), (1, 2))
OTHER6 |= dict.fromkeys(("InvertedPendulum-v4", "InvertedDoublePendulum-v4"), (1, 2))

CURVES = {"": plots.curves}
# Kinds of suites.
scores = functools.partial(Suite, table=tables.scores_table, pictures=CURVES)
variants = functools.partial(Suite, table=tables.variants_table, pictures=CURVES)
humanoids = functools.partial(
    Suite,
    total_timesteps=4_096_000,
    evaluated=True,
    table=tables.walking_table,
    pictures=CURVES,
)
# Short runs whose curves have a point for each iteration.
broken = functools.partial(Suite, total_timesteps=299_008, points=146, table=health.bugs_table)
rivals = functools.partial(
    Suite,
    total_timesteps=None,
    checkpoint="results.json",  # a run of a minute begins anew if it was interrupted
    table=rlhf.models_table,
)
ALL = (
    scores(
        name="smoke",
        reproduces="nothing: two short runs that show whether everything works here",
        environments={"InvertedPendulum-v4": (1, 2)},
        variants={"": Variant(CONTINUOUS)},
        total_timesteps=4096,
        pictures={},
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
        table=lambda suite, folders: (
            f"{tables.scores_table(suite, folders)}\n{tables.rivals_table(suite, folders)}"
        ),
        pictures={
            "": functools.partial(plots.curves, variants=[""]),
            "_rivals": plots.rivals,
            "_health": plots.healthy_run,
        },
    ),
    Suite(
        name="rivals_pilot",
        reproduces="nothing: which of two settings each rival of Figure 3 gets",
        environments=dict.fromkeys(("Hopper-v4", "HalfCheetah-v4"), (101, 102)),
        variants=PILOT,
        total_timesteps=300_000,
        table=tables.normalized_table,
    ),
    variants(
        name="swimmer",
        reproduces="whether time limits or our code explain ppo2's higher returns in Swimmer",
        environments={"Swimmer-v4": tuple(range(1, 11))},
        variants={
            "truncation-is-terminal": SWITCHES["truncation-is-terminal"],
            "sb3": Variant(
                *(PEERS, "--kind mujoco", "Stable-Baselines3 with ppo2's settings"),
                environments={"Swimmer-v4": (1, 2, 3, 4, 5)},
            ),
        },
        baseline=("figure3", ""),
        baseline_label="default",
        pictures={},
    ),
    variants(
        name="minimal",
        reproduces="whether the one-page PPO learns as well as the full script",
        environments=dict.fromkeys((*THREE, "InvertedDoublePendulum-v4"), (1, 2, 3, 4, 5)),
        variants={"": Variant("benchmark/minimal.py", "", MINIMAL)},
        baseline=("figure3", ""),
        baseline_label="ppo_continuous_action.py",
        pictures={},
    ),
    variants(
        name="stable_baselines3",
        reproduces="Stable-Baselines3's PPO with ppo2's settings, on the same simulator",
        environments=dict.fromkeys(THREE, (1, 2, 3, 4, 5)),
        variants={"": Variant(PEERS, "--kind mujoco", "Stable-Baselines3 with ppo2's settings")},
        baseline=("figure3", ""),
        baseline_label=CONTINUOUS,
        pictures={},
    ),
    variants(
        name="kl_vs_clip",
        reproduces="Schulman et al. 2017, section 4: the adaptive KL penalty against clipping",
        environments=dict.fromkeys(MUJOCO7, (1, 2, 3)),
        variants={"adaptive-0.01": Variant(*OBJECTIVES["adaptive-0.01"])},
        baseline=("figure3", ""),
        baseline_label="clipping, ε = 0.2",
        pictures={**CURVES, "_trace": plots.trace},
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
        table=tables.normalized_table,
        pictures={"": plots.normalized},
    ),
    Suite(
        name="ablation",
        reproduces="what each detail is worth, beside Engstrom et al. 2020",
        environments=dict.fromkeys(("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"), (1, 2, 3, 4, 5)),
        variants=SWITCHES,
        baseline=("figure3", ""),
        baseline_label="default",
        table=tables.effects_table,
        pictures={"": plots.effects},
    ),
    humanoids(
        name="humanoid",
        reproduces="Schulman et al. 2017, section 6.3 and Table 4, in Gymnasium's Humanoid-v4",
        environments={"Humanoid-v4": (1, 2, 3)},
        variants={"": HUMANOID},
    ),
    humanoids(
        name="humanoid_controls",
        reproduces="what each of these settings is worth",
        environments={"Humanoid-v4": (1,)},
        variants={
            "learned-log-std": Variant(CONTINUOUS, f"{TABLE4} {ADAPTED}", "log std learned"),
            "annealed-lr": Variant(CONTINUOUS, f"{TABLE4} {ANNEALED}", "step size annealed"),
            "ppo2-batch": Variant(CONTINUOUS, f"{ADAPTED} {ANNEALED}", "batches of ppo2"),
        },
        baseline=("humanoid", ""),
        baseline_label=HUMANOID.label,
    ),
    humanoids(
        name="humanoid_elsewhere",
        reproduces="the same settings beside the default in other environments",
        environments=dict.fromkeys(("Ant-v4", "Walker2d-v4"), (1,)),
        variants={"default": Variant(CONTINUOUS, "", "default"), "table4": HUMANOID},
        total_timesteps=2_000_000,
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
                *(PEERS, f"--kind atari {GAMES}", "four frames, Stable-Baselines3"),
                environments=dict.fromkeys(("Breakout", "Qbert", "Pong"), (1,)),
            ),
        },
        total_timesteps=2_000_896,
        table=tables.games_table,
        pictures=CURVES,
    ),
    scores(
        name="cartpole",
        reproduces="Huang et al. 2022: CartPole-v1 solved within 500k steps",
        environments={"CartPole-v1": (1, 2, 3)},
        variants={"": Variant(MULTIDISCRETE, CLASSIC_CONTROL)},
        total_timesteps=500_000,
    ),
    variants(
        name="multidiscrete_vs_gaussian",
        reproduces="Tang and Agrawal 2020: discretized actions rival the Gaussian policy",
        environments=dict.fromkeys(THREE, (1, 2, 3)),
        variants={"bins-11": Variant(MULTIDISCRETE, "--bins 11", "11 bins per joint")},
        baseline=("figure3", ""),
        baseline_label="Gaussian policy",
    ),
    # Three PPO runs on one reward model: adaptive KL, beta = 0 and a fixed beta.
    Suite(
        name="rlhf",
        reproduces="Gao et al. 2022 in small: over-optimization of a reward model, and its cure",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"": Variant(RLHF, "--compare")},
        total_timesteps=None,
        checkpoint="sft/checkpoint.pt",
        table=rlhf.pipeline_table,
    ),
    rivals(
        name="rlhf_rivals",
        reproduces="GRPO (Shao et al. 2024) and DPO (Rafailov et al. 2023) on the task of `rlhf`",
        environments={"reviews": (1, 2, 3, 4, 5)},
        variants={"grpo": Variant(GRPO, "--compare"), "dpo": Variant(DPO, "--compare")},
    ),
    rivals(
        name="rlhf_frontier",
        reproduces="Rafailov et al. 2023, Figure 2, in small: quality over the KL, for each rival",
        environments={"reviews": (1, 2, 3)},
        variants={name: Variant(script, flags) for name, (script, flags) in FRONTIER.items()},
        pictures={"": lambda _, folders: rlhf.frontier([SUITES[x] for x in SHOWN], folders)},
    ),
    # All steps of the curves are kept: the health table is applied to them, see health.py.
    broken(
        name="bugs",
        reproduces="what mistakes look like, and which of them the scripts warn about",
        environments=dict.fromkeys(("Hopper-v4", "HalfCheetah-v4"), (1, 2, 3)),
        variants=bugs.variants(CONTINUOUS, bugs.CONTROLS | bugs.BUGS),
        pictures={
            "": plots.broken_curves,
            "_fingerprints": lambda _, folders: plots.fingerprints(
                [SUITES["bugs"], SUITES["bugs_cartpole"]], folders
            ),
        },
    ),
    broken(
        # With ppo2's settings for classic control the values are held by their clipping.
        name="bugs_cartpole",
        reproduces="the same where actions are discrete",
        environments={"CartPole-v1": (1, 2, 3)},
        variants=bugs.variants(
            MULTIDISCRETE,
            {x: (bugs.CONTROLS | bugs.BUGS)[x] for x in bugs.IN_CARTPOLE},
        ),
    ),
    broken(
        name="bugs_evaluation",
        reproduces="the same, made after training",
        environments=dict.fromkeys(("Hopper-v4", "HalfCheetah-v4"), (1, 2, 3)),
        variants=bugs.variants(CONTINUOUS, bugs.EVALUATION),
        table=health.evaluation_table,
        evaluated=True,
    ),
    Suite(
        name="bugs_rlhf",
        reproduces="the same in RLHF",
        environments={"reviews": (1, 2, 3)},
        variants=bugs.variants(RLHF, bugs.RLHF_BUGS),
        total_timesteps=None,
        checkpoint="results.json",
        table=health.bugs_table,
    ),
    broken(
        name="bugs_healthy",
        reproduces="whether healthy runs elsewhere stay without a warning",
        table=health.healthy_table,
        points=292,  # Pong's iterations are half as long
        environments={**OTHER6, "HalfCheetah-v4": (1, 2), "Hopper-v4": (1, 2), "Pong": (1,)},
        variants={
            "default": Variant(CONTINUOUS, environments=OTHER6),
            "bins": Variant(MULTIDISCRETE, environments={"HalfCheetah-v4": (1, 2)}),
            "penalty": Variant(KL_PENALTY, environments={"Hopper-v4": (1, 2)}),
            "atari": Variant(ATARI, FAST_ATARI, environments={"Pong": (1,)}),
        },
    ),
    Suite(
        name="mean_policies",
        reproduces="the six methods of Figure 3 without the noise of their training",
        environments=dict.fromkeys(("Hopper-v4", "Walker2d-v4", *MUJOCO7), (1, 2, 3, 4, 5)),
        variants=FIGURE3,
        table=tables.mean_policies_table,
        evaluated=True,
    ),
)
SUITES = {suite.name: suite for suite in ALL}


# What `throughput` measures.
SB3 = "Stable-Baselines3 PPO"
RECURRENT = "sb3-contrib RecurrentPPO, CnnLstmPolicy"
SMALL = (
    "--env-id CartPole-v1 --num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 4 "
    "--learning-rate 2.5e-4 --ent-coef 0.01"
)
PONG = f"--env-id PongNoFrameskip-v4 {GAMES}"
RAW = "--no-norm-obs --no-scale-rewards"


def beside_sb3(script: str, steps: int, flags: str, ours: str, kind: str, target: float) -> tuple:
    """A script and Stable-Baselines3's PPO with the same settings, in a tenth of the steps."""
    peer = Contender(SB3, steps // 10, f"{flags} --kind {kind}", PEERS)
    return Contender(script, steps, f"{flags} {ours}", target=target), peer


def pong(script: str, peer: str, kind: str) -> tuple:
    """A script in both precisions, and its peer with the same settings."""
    ours = f"{PONG} --torch-threads 2"
    return (
        Contender(f"{script}, float32", 16384, ours, script, 1.5),
        Contender(f"{script}, bfloat16", 16384, f"{ours} --bfloat16", script, 2.0),
        Contender(peer, 10240, f"{PONG} --kind {kind}", PEERS),
    )


HALF_CHEETAH = "--env-id HalfCheetah-v4"
SIZE = "1 environment, 2048 steps, 32 minibatches of 64, 10 epochs"
PONG_SIZE = "Pong, 8 environments, 128 steps, 4 minibatches of 256, 4 epochs, 2 threads"
SCRIPTS = {
    MINIMAL: Script("all of PPO in about 200 lines", "minimal", "HalfCheetah-v4"),
    CONTINUOUS: Script(
        *("details 1–13 and 23–31", "figure3", "HalfCheetah-v4"),
        contests={
            "continuous": Contest(
                f"HalfCheetah-v4, {SIZE}",
                beside_sb3(CONTINUOUS, 245760, HALF_CHEETAH, "", "mujoco", 5.3),
            ),
            "scaling": Contest(
                f"{CONTINUOUS} on HalfCheetah-v4 with more environments",
                tuple(
                    Contender(
                        f"{x} environments", 204800, f"--num-envs {x} --num-steps {y}", CONTINUOUS
                    )
                    for x, y in ((1, 2048), (4, 512), (16, 128), (64, 32))
                ),
            ),
        },
    ),
    KL_PENALTY: Script(
        *("the paper's other objective", "kl_vs_clip", "Hopper-v4", "adaptive-0.01"),
        contests={
            "kl_penalty": Contest(
                f"HalfCheetah-v4, {SIZE}",
                (Contender(KL_PENALTY, 204800, target=0.9), Contender(CONTINUOUS, 204800)),
            )
        },
    ),
    ATARI: Script(
        *("details 1–22", "games", "Pong"),
        contests={"atari": Contest(PONG_SIZE, pong(ATARI, f"{SB3}, CnnPolicy", "atari"), 2)},
    ),
    LSTM: Script(
        *("details 1–22 and 32–36", "games", "Pong", "lstm"),
        contests={
            "atari_lstm": Contest(f"{PONG_SIZE}, LSTM", pong(LSTM, RECURRENT, "atari-lstm"), 2)
        },
    ),
    MULTIDISCRETE: Script(
        *("detail 37, action masks", "cartpole", "CartPole-v1"),
        contests={
            "multidiscrete": Contest(
                f"CartPole-v1, {SIZE}",
                beside_sb3(MULTIDISCRETE, 245760, "--env-id CartPole-v1", RAW, "classic", 3.5),
            ),
            "multidiscrete_small": Contest(
                "CartPole-v1, 4 environments, 128 steps, 4 minibatches of 128, 4 epochs",
                beside_sb3(MULTIDISCRETE, 512000, SMALL, RAW, "classic", 4.0),
            ),
        },
    ),
    RLHF: Script("RLHF with PPO", "rlhf", "reviews"),
    GRPO: Script("GRPO on the same task", "rlhf_rivals", "reviews", "grpo"),
    DPO: Script("DPO on the same task", "rlhf_rivals", "reviews", "dpo"),
}
CONTESTS = {name: x for script in SCRIPTS.values() for name, x in script.contests.items()}
