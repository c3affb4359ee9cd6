# ruff: noqa: E501 - a table of code
"""What has been proposed for PPO since 2017, each as a change of the default; a recipe.

A change is a few flags, or texts of ppo_continuous_action.py that are replaced, at most 15 lines.
Where a paper leaves a choice, a comment says which was taken.
"""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS, EFFECTS, MUJOCO7, THREE
from benchmark.paper.suites.switches import LOG_STD, TRUNKS, adapt_lr_kl

# Both policies act on the whole range of the environment: actions in (0, 1) are stretched to it.
STRETCH = "clipped_actions = low + (high - low) * "
CLIPPED = "clipped_actions = np.minimum(np.maximum(actions[t], low), high)"
NOISE = "noise = rng.standard_normal(actions.shape, dtype=np.float32)"
FIXED_STD = (LOG_STD, "self.log_std = nn.Buffer(torch.zeros(1, action_size))")
TWICE = ("linear(HIDDEN, action_size, gain", "linear(HIDDEN, 2 * action_size, gain")  # outputs
NORMAL = """        mean = self.policy(obs)
        dist = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
"""
LAYERS = "layers, std = [in_numpy(x) for x in agent.policy], agent.log_std.exp().numpy(force=True)"
WITHOUT_STD = "layers = [in_numpy(x) for x in agent.policy]"
SAMPLE = "return mean + std * noise"
ACTED = "actor_logprobs = (Normal(0, 1).log_prob(b_noise) - agent.log_std).sum(-1)  # (T, N)"
# The part of each network that both have.
TANH = tuple(f"({x}1, nn.Tanh(), {x}2, nn.Tanh(), " for x in ("value", "policy"))
OBJECTIVE = "return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()"
ORDER = "order = torch.tensor(rng.permutation(batch_size), device=device)"
SQUARE = 'square = adam["square"].lerp_(gradient**2, 1 - 0.999)'
STEP = 'adam["weights"].sub_(args.learning_rate * bias_correction * direction)'


def colored(exponent: float) -> tuple[str, str]:
    """Noise of variance 1 whose power falls with the frequency to this power, in each rollout."""
    return (
        NOISE,
        f"""waves = np.fft.rfft(rng.standard_normal(actions.shape), axis=0)
        size = np.maximum(np.fft.rfftfreq(args.num_steps), 1 / args.num_steps) ** -({exponent} / 2)
        power = np.mean(np.concatenate([size, size[1:-1]]) ** 2)
        noise = np.fft.irfft(waves * size[:, None, None], args.num_steps, axis=0) / power**0.5
        noise = noise.astype(np.float32)""",
    )


# By name: who proposed it; label; flags; each text that is replaced, with what takes its place.
# fmt: off
CHANGES = {
    # The policy
    "beta": ("Chou et al. 2017", "Beta distribution", "",
        FIXED_STD,
        TWICE,
        (NORMAL, "        ones = 1 + nn.functional.softplus(self.policy(obs))  # both above 1: one peak\n        dist = torch.distributions.Beta(*ones.chunk(2, -1), validate_args=False)\n"),
        # Its noise is uniform once it went through the normal distribution function.
        (LAYERS, f"import scipy.special as sp\n\n    {WITHOUT_STD}"),
        (SAMPLE, "a, b = np.split(1 + np.logaddexp(0, mean), 2, -1)\n        if noise is None:\n            return a, b\n        return np.clip(sp.betaincinv(a, b, sp.ndtr(noise)), 1e-6, 1 - 1e-6)"),
        (ACTED, "a, b = (torch.tensor(x, device=device) for x in act(obs[:-1], None))\n            actor_logprobs = torch.distributions.Beta(a, b).log_prob(b_actions).sum(-1)"),
        (CLIPPED, STRETCH + "actions[t]"),
    ),
    # Stored is the action before the tanh: the correction for it, the sum of log(1 - tanh^2), is the
    # same under the old and the new policy and leaves the ratio; there is no entropy bonus.
    "squashed": ("Haarnoja et al. 2018", "Gaussian squashed by tanh", "", (CLIPPED, STRETCH + "(np.tanh(actions[t]) + 1) / 2")),
    "state-std": ("Andrychowicz et al. 2021", "std depends on the state", "",
        FIXED_STD,
        TWICE,
        (NORMAL, "        mean, log_std = self.policy(obs).chunk(2, -1)\n        dist = Normal(mean, log_std.exp(), validate_args=False)\n"),
        (LAYERS, WITHOUT_STD),
        (SAMPLE, "mean, log_std = np.split(mean, 2, -1)\n        return log_std if noise is None else mean + np.exp(log_std) * noise"),
        (ACTED, "log_std = torch.tensor(act(obs[:-1], None), device=device)\n            actor_logprobs = (Normal(0, 1).log_prob(b_noise) - log_std).sum(-1)"),
    ),
    "std-0.5": ("Andrychowicz et al. 2021", "std 0.5 at first", "", ("torch.zeros(1, action_size)", "torch.full((1, action_size), math.log(0.5))")),
    # Networks
    "wide": ("Andrychowicz et al. 2021", "256 units", "", ("HIDDEN = 64", "HIDDEN = 256")),
    "wide-values": ("Andrychowicz et al. 2021", "256 units for values only", "",
        (TRUNKS, """        value1, value2 = (linear(x, 256, gain=2**0.5) for x in (obs_size, 256))
        policy1, policy2 = (linear(x, HIDDEN, gain=2**0.5) for x in (obs_size, HIDDEN))
"""),
        ("linear(HIDDEN, 1, gain=1.0)", "linear(256, 1, gain=1.0)"),
    ),
    "relu": ("usual elsewhere", "ReLU", "", *((x, x.replace("Tanh", "ReLU")) for x in TANH)),
    "layer-norm": ("Ba et al. 2016", "LayerNorm before each tanh", "", *((x, x.replace("nn.Tanh()", "nn.LayerNorm(HIDDEN), nn.Tanh()")) for x in TANH)),
    # Data
    "envs-8": ("usual elsewhere", "8 environments × 256 steps", "--num-envs 8 --num-steps 256"),
    "envs-16": ("usual elsewhere", "16 × 512 steps, minibatches of 512", "--num-envs 16 --num-steps 512 --num-minibatches 16"),
    # Values are clipped around those of the rollout still.
    "anew": ("Andrychowicz et al. 2021", "advantages computed again in each epoch", "",
        (ORDER, """with torch.no_grad():
                newer, last = agent.value(b_obs[:-1]), agent.value(b_obs[-1:])
                later = torch.cat([newer[1:], last])
                later[truncated], later[terminated] = agent.value(b_final_obs), 0.0
                anew = gae(b_rewards, newer, later, b_done, args)
                batch = [*batch[:4], anew.flatten(), (anew + newer).flatten()]
            """ + ORDER)),
    "gamma-0.98": ("Andrychowicz et al. 2021", "γ = 0.98", "--gamma 0.98"),
    "gamma-0.995": ("usual elsewhere", "γ = 0.995", "--gamma 0.995"),
    "noise-0.5": ("Hollenstein et al. 2024", "noise between white and pink", "", colored(0.5)),
    "noise-1": ("Eberhard et al. 2023", "pink noise", "", colored(1.0)),
    # The objective
    "spo": ("Xie et al. 2024", "SPO: a quadratic penalty", "", (OBJECTIVE, "penalty = advantages.abs() / (2 * clip_coef) * (ratio - 1) ** 2\n    return (penalty - advantages * ratio).mean()")),
    # alpha = 0.3, as PPO-RB there; within the range it is the ratio.
    "rollback": ("Wang et al. 2019", "rollback beyond the clip range", "", (OBJECTIVE, "clipped_ratio = 1.3 * clipped_ratio - 0.3 * ratio\n    " + OBJECTIVE)),
    "batch-advantages": ("baselines' PPO1, 2017", "advantages normalized per batch", "--no-norm-adv", ("logprobs, values, advantages, returns)\n", "logprobs, values, normalize(advantages), returns)\n")),
    # DNA's separate updates: each network has its epochs, its gradient norm and its own Adam.
    "separate": ("Aitchison and Sweetser 2022", "values in epochs of their own", "",
        ("torch.zeros((), dtype=torch.float64, device=device)", "torch.zeros_like(weights, dtype=torch.float64)"),
        ("loss = pg_loss - args.ent_coef * entropies.mean() + args.vf_coef * v_loss", "loss = torch.where(args.value_epochs, args.vf_coef * v_loss, pg_loss)"),
        ('step = adam["step"].add_(1)\n', 'of_values = [torch.full((x.numel(),), name.startswith("value")) for name, x in agent.named_parameters()]\n        on = (torch.cat(of_values).to(gradient.device) == args.value_epochs).float()\n        step = adam["step"].add_(on).clamp(min=1)\n'),
        ("lerp_(gradient, 1 - 0.9)", "lerp_(gradient, (1 - 0.9) * on)"),
        (SQUARE, SQUARE.replace("1 - 0.999", "(1 - 0.999) * on")),
        (STEP, STEP.replace("* direction", "* direction * on")),
        ("    early_stop_kl: float", "    value_epochs: bool = False  # whether the values learn now\n    early_stop_kl: float"),
        ("now = dataclasses.replace(args, **tensors)", 'tensors["value_epochs"] = torch.tensor(False, device=device)\n        now = dataclasses.replace(args, **tensors)'),
        ("for _ in range(args.update_epochs):", 'for epoch in range(2 * args.update_epochs):\n            now.value_epochs.fill_(epoch >= args.update_epochs)'),
    ),
    # The optimizer
    "lr-kl": ("Schulman et al. 2017, Table 4", "learning rate from 1e-3, by a KL of 0.01", "--learning-rate 1e-3 --no-anneal-lr", *adapt_lr_kl(0.01)),
    "adam-reset": ("Asadi et al. 2023", "Adam restarts in each iteration", "", ("mb_metrics: list[Tensors] = []", 'for name in ("mean", "square", "step"):\n            adam[name].zero_()\n        mb_metrics: list[Tensors] = []')),
    "adamw": ("Loshchilov and Hutter 2019", "AdamW, weight decay 0.01", "", (STEP, 'adam["weights"].mul_(1 - 0.01 * args.learning_rate)\n        ' + STEP)),
    "betas": ("usual elsewhere", "Adam's second beta 0.99", "", (SQUARE, SQUARE.replace("0.999", "0.99")), ("(1 - 0.999**step).sqrt()", "(1 - 0.99**step).sqrt()")),
}
# fmt: on

# The runs have ended. A change has five seeds in Hopper and four elsewhere, but for these; None is
# five everywhere.
FOUR = EFFECTS["environments"] | dict.fromkeys(("Walker2d-v4", "HalfCheetah-v4"), (1, 2, 3, 4))
MORE = {"beta": FOUR | {"Walker2d-v4": (1, 2, 3, 4, 5)}} | dict.fromkeys(
    ("wide-values", "gamma-0.995", "batch-advantages", "lr-kl", "adam-reset", "betas")
)
VARIANTS = {
    name: Variant(CONTINUOUS, flags, label, (), MORE.get(name, FOUR), tuple(replaced))
    for name, (_, label, flags, *replaced) in CHANGES.items()
}
# A setting for returns. Its search has ended, and is not repeated: it is in results/closed/.
RECIPE = "--gamma 0.995 --learning-rate 1e-3 --update-epochs 5 --num-minibatches 32"
RECIPE_PLACES = (*MUJOCO7, "Ant-v4")

SUITES = (
    Suite(
        name="since2017",
        reproduces="what has been proposed since 2017, each compared with the default",
        variants=VARIANTS,
        **EFFECTS,
    ),
    Suite(
        name="recipe",
        reproduces="a setting for returns, compared with the default on fresh seeds",
        environments=dict.fromkeys(RECIPE_PLACES, (201, 202, 203, 204, 205)),
        variants={
            "": Variant(CONTINUOUS, "", "default"),
            "recipe": Variant(CONTINUOUS, RECIPE, "recipe"),
            "gamma-0.995": Variant(
                *(CONTINUOUS, "--gamma 0.995", "γ = 0.995"),
                environments={x: (201, 202, 203) for x in RECIPE_PLACES if x not in THREE},
            ),
        },
        table="recipe",
    ),
)
