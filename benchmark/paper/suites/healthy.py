"""Healthy runs elsewhere, on which the limits of metrics were chosen and tested."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS, FAST, KL_PENALTY, MULTIDISCRETE, RAW, SHORT
from benchmark.paper.suites.switches import ANNEAL_CLIP, SHARED_NETWORK, adapt_lr_kl

# More environments in which healthy runs are watched.
OTHER6 = dict.fromkeys(("Walker2d-v4", "Swimmer-v4", "Reacher-v4", "Ant-v4"), (1, 2))
OTHER6 |= dict.fromkeys(("InvertedPendulum-v4", "InvertedDoublePendulum-v4"), (1, 2))
# Stable-Baselines3 does not clip values, and has no half in their loss; rl-games shares a network.
ZOO = "--no-clip-vloss --no-anneal-lr"
RL_GAMES = f"--num-envs 64 {ZOO} --lr 5e-4 --update-epochs 5 --max-grad-norm 1.0"
RL_GAMES_TEXTS = SHARED_NETWORK + adapt_lr_kl(0.008)
EAGER = "--no-compile"  # of a run that is over before it would be compiled
SMALL_BATCHES = f"{EAGER} --num-minibatches 4 --update-epochs 4"  # CleanRL's ppo.py
TEXT = f"--num-envs 8 --num-steps 128 {SMALL_BATCHES} --ent-coef 0.01"
TOTAL = "self.total, self.ended = self.total + reward, self.ended or any(ends)"
AT_THE_END = (TOTAL, f"{TOTAL}\n            reward = self.total if self.ended else 0.0")
TINY = (TOTAL, f"{TOTAL}\n            reward *= 0.001")
# By name: environment; script; thousands of steps; flags; whose settings they are, or what is
# unusual; what takes the place of texts. Small networks of tanh are those of our scripts.
# fmt: off
# ruff: disable[E501]
HEALTHY = {  # limits of warnings were chosen on these
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
    "shared": ("Reacher-v4", CONTINUOUS, 100, "", "shared network", *SHARED_NETWORK),
}
HELD_OUT = {  # nobody looked at these before the limits were chosen
    "test-zoo-cartpole": ("CartPole-v1", MULTIDISCRETE, 100, f"{EAGER} --no-clip-vloss {RAW} --num-envs 8 --num-steps 32 --num-minibatches 1 --update-epochs 20 --gamma 0.98 --gae-lambda 0.8 --lr 1e-3 --vf-coef 1.0", "Stable-Baselines3 Zoo", *ANNEAL_CLIP),
    "test-zoo-acrobot": ("Acrobot-v1", MULTIDISCRETE, 120, f"{EAGER} {ZOO} --num-envs 16 --num-steps 256 --num-minibatches 64 --update-epochs 4 --gae-lambda 0.94 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "test-zoo-lander": ("LunarLander-v3", MULTIDISCRETE, 300, f"{ZOO} {RAW} --num-envs 16 --num-steps 1024 --num-minibatches 256 --update-epochs 4 --gamma 0.999 --gae-lambda 0.98 --ent-coef 0.01 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "test-zoo-reacher": ("Reacher-v4", CONTINUOUS, 120, f"{ZOO} --num-steps 512 --num-minibatches 16 --update-epochs 5 --gamma 0.9 --gae-lambda 1.0 --lr 1.04019e-4 --clip-coef 0.3 --max-grad-norm 0.9 --vf-coef 1.900736", "Stable-Baselines3 Zoo"),
    "test-zoo-double-pole": ("InvertedDoublePendulum-v4", CONTINUOUS, 100, f"{EAGER} {ZOO} --num-steps 128 --num-minibatches 1 --gamma 0.98 --gae-lambda 0.8 --lr 1.55454e-4 --clip-coef 0.4 --vf-coef 1.391858", "Stable-Baselines3 Zoo"),
    "test-zoo-hopper": ("Hopper-v4", CONTINUOUS, 120, f"{ZOO} --num-steps 512 --num-minibatches 16 --update-epochs 5 --gamma 0.999 --gae-lambda 0.99 --lr 9.80828e-5 --ent-coef 0.00229519 --max-grad-norm 0.7 --vf-coef 1.671342", "Stable-Baselines3 Zoo"),
    "test-zoo-cheetah": ("HalfCheetah-v4", CONTINUOUS, 100, f"{ZOO} --num-steps 512 --num-minibatches 8 --update-epochs 20 --gamma 0.98 --gae-lambda 0.92 --lr 2.0633e-5 --clip-coef 0.1 --ent-coef 0.000401762 --max-grad-norm 0.8 --vf-coef 1.16192", "Stable-Baselines3 Zoo"),
    "test-zoo-swimmer": ("Swimmer-v4", CONTINUOUS, 120, f"{ZOO} --gamma 0.9999 --vf-coef 1.0", "Stable-Baselines3 Zoo"),
    "test-rl-games-cheetah": ("HalfCheetah-v4", CONTINUOUS, 400, f"{EAGER} {RL_GAMES} --num-steps 256 --num-minibatches 8 --vf-coef 4.0", "rl-games", *RL_GAMES_TEXTS),
    "test-rl-games-cartpole": ("CartPole-v1", MULTIDISCRETE, 150, f"{EAGER} {RAW} --num-envs 16 --num-steps 32 --num-minibatches 8 --update-epochs 4 --gae-lambda 0.9 --no-anneal-lr --lr 2e-4 --ent-coef 0.01 --max-grad-norm 1.0 --vf-coef 1.0", "rl-games, a tenth of the rewards", (TOTAL, f"{TOTAL}\n            reward *= 0.1")),
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


SUITES = (
    Suite(
        name="bugs_healthy",
        reproduces="whether healthy runs elsewhere stay without a warning",
        table="healthy",
        environments=dict.fromkeys((*OTHER6, "Pong", *(x[0] for x in UNUSUAL.values())), ()),
        variants={
            "default": Variant(CONTINUOUS, "", "default", environments=OTHER6),
            "bins": Variant(MULTIDISCRETE, "", "11 bins", environments={"HalfCheetah-v4": (1, 2)}),
            "penalty": Variant(KL_PENALTY, "", "KL penalty", environments={"Hopper-v4": (1, 2)}),
            "atari": Variant("ppo_atari.py", FAST, "default", environments={"Pong": (1,)}),
            **{name: healthy_variant(*x) for name, x in UNUSUAL.items()},
        },
        **SHORT | {"points": None},
    ),
)
