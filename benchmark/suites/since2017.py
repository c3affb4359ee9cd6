# ruff: noqa: E501 - a table of code
"""What has been proposed for PPO since 2017, each as a change of ppo_continuous_action.py.

A change is a few flags, or texts of the script that are replaced, at most 15 lines. Where a paper
leaves a choice, a comment says which was taken.
"""

from benchmark.definitions import Variant

# By name: who proposed it; label; flags; each text that is replaced, with what takes its place.
Change = tuple[str, str, str, *tuple[tuple[str, str], ...]]

# Both policies act on the whole range of the environment: actions in (0, 1) are stretched to it.
STRETCH = "clipped_actions = low + (high - low) * "
CLIPPED = "clipped_actions = np.minimum(np.maximum(actions[t], low), high)"
LOG_STD = "self.log_std = nn.Buffer(zeros) if args.anneal_log_std else nn.Parameter(zeros)"
NOISE = "noise = rng.standard_normal(actions.shape, dtype=np.float32)"
LAYERS = "layers = [init(nn.Linear(size, 64), math.sqrt(2)) for size in (obs_size, 64)]"
TANH = "return [layers[0], nn.Tanh(), layers[1], nn.Tanh()]"
VALUE_HEAD, POLICY_HEAD = "init(nn.Linear(64, 1), 1.0)", "init(nn.Linear(64, action_size), 0.01)"
OBJECTIVE = "return torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()"
ORDER = "order = torch.tensor(rng.permutation(batch_size), device=device)"
SQUARE = 'square = adam["square"].lerp_(gradient**2, 1 - 0.999)'
STEP = 'adam["weights"].sub_(schedule["learning_rate"] * bias_correction * direction)'


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


# fmt: off
CHANGES: dict[str, Change] = {
    # The policy
    "beta": ("Chou et al. 2017", "Beta distribution", "",
        (LOG_STD, "self.log_std = nn.Buffer(zeros)"),
        (POLICY_HEAD, "init(nn.Linear(64, 2 * action_size), 0.01)"),
        ("        mean = self.policy(obs)\n        dist = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)\n", "        ones = 1 + nn.functional.softplus(self.policy(obs))  # both above 1: one peak\n        dist = torch.distributions.Beta(*ones.chunk(2, -1), validate_args=False)\n"),
        # Its noise is uniform once it went through the normal distribution function.
        ("mean, std = in_numpy(agent.policy), agent.log_std.exp().numpy(force=True)", "import scipy.special as sp\n\n    network = in_numpy(agent.policy)"),
        ("return mean(obs) + std * noise", "a, b = np.split(1 + np.logaddexp(0, network(obs)), 2, -1)\n        return np.clip(sp.betaincinv(a, b, sp.ndtr(noise)), 1e-6, 1 - 1e-6)"),
        ("return -(0.5 * (noise**2 + math.log(2 * math.pi)) + np.log(std)).sum(-1)", "a, b = np.split(1 + np.logaddexp(0, network(obs)), 2, -1)\n        x = act(obs, noise).astype(np.float32)\n        return ((a - 1) * np.log(x) + (b - 1) * np.log1p(-x) - sp.betaln(a, b)).sum(-1)"),
        (CLIPPED, STRETCH + "actions[t]"),
    ),
    # Stored is the action before the tanh: the correction for it, the sum of log(1 - tanh^2), is the
    # same under the old and the new policy and leaves the ratio; there is no entropy bonus.
    "squashed": ("Haarnoja et al. 2018", "Gaussian squashed by tanh", "", (CLIPPED, STRETCH + "(np.tanh(actions[t]) + 1) / 2")),
    "state-std": ("Andrychowicz et al. 2021", "std depends on the state", "",
        (LOG_STD, "self.log_std = nn.Buffer(zeros)"),
        (POLICY_HEAD, "init(nn.Linear(64, 2 * action_size), 0.01)"),
        ("        mean = self.policy(obs)\n        dist = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)\n", "        mean, log_std = self.policy(obs).chunk(2, -1)\n        dist = Normal(mean, log_std.exp(), validate_args=False)\n"),
        ("mean, std = in_numpy(agent.policy), agent.log_std.exp().numpy(force=True)", "network = in_numpy(agent.policy)"),
        ("return mean(obs) + std * noise", "mean, log_std = np.split(network(obs), 2, -1)\n        return mean + np.exp(log_std) * noise"),
        ("return -(0.5 * (noise**2 + math.log(2 * math.pi)) + np.log(std)).sum(-1)", "log_std = np.split(network(obs), 2, -1)[1]\n        return -(0.5 * (noise**2 + math.log(2 * math.pi)) + log_std).sum(-1)"),
    ),
    "std-0.5": ("Andrychowicz et al. 2021", "std 0.5 at first", "", ("zeros = torch.zeros(1, action_size)", "zeros = torch.full((1, action_size), math.log(0.5))")),
    # Networks
    "wide": ("Andrychowicz et al. 2021", "256 units", "", (LAYERS, LAYERS.replace("64", "256")), (VALUE_HEAD, VALUE_HEAD.replace("64", "256")), (POLICY_HEAD, POLICY_HEAD.replace("64", "256"))),
    "wide-values": ("Andrychowicz et al. 2021", "256 units for values only", "",
        ("def trunk() -> list[nn.Module]:", "def trunk(width: int = 64) -> list[nn.Module]:"),
        (LAYERS, LAYERS.replace("64", "width")),
        ("value_trunk = trunk()", "value_trunk = trunk(256)"),
        (VALUE_HEAD, VALUE_HEAD.replace("64", "256")),
    ),
    "relu": ("usual elsewhere", "ReLU", "", (TANH, TANH.replace("Tanh", "ReLU")), ("{nn.Linear, nn.Tanh}", "{nn.Linear, nn.ReLU}"), ("np.tanh(x)", "np.maximum(x, 0)")),
    "layer-norm": ("Ba et al. 2016", "LayerNorm before each tanh", "", (TANH, "return [layers[0], nn.LayerNorm(64), nn.Tanh(), layers[1], nn.LayerNorm(64), nn.Tanh()]")),
    # Data
    "envs-8": ("usual elsewhere", "8 environments × 256 steps", "--num-envs 8 --num-steps 256"),
    "envs-16": ("usual elsewhere", "16 × 512 steps, minibatches of 512", "--num-envs 16 --num-steps 512 --num-minibatches 16"),
    # Values are clipped around those of the rollout still.
    "anew": ("Andrychowicz et al. 2021", "advantages anew in each epoch", "",
        (ORDER, """with torch.no_grad():
                now, last = agent.get_value(b_obs[:-1]), agent.get_value(b_obs[-1:])
                later = torch.cat([now[1:], last])
                later[truncated], later[terminated] = agent.get_value(b_final_obs), 0.0
                anew = gae(b_rewards, now, later, b_done, args.gamma, args.gae_lambda)
                batch = [*batch[:4], *(x.flatten() for x in anew)]
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
        ("loss = pg_loss - args.ent_coef * entropies.mean() + args.vf_coef * v_loss", 'loss = torch.where(schedule["values"], args.vf_coef * v_loss, pg_loss)'),
        ('step = adam["step"].add_(1)\n', 'of_values = [torch.full((x.numel(),), name.startswith("value")) for name, x in agent.named_parameters()]\n        on = (torch.cat(of_values).to(gradient.device) == schedule["values"]).float()\n        step = adam["step"].add_(on).clamp(min=1)\n'),
        ("lerp_(gradient, 1 - 0.9)", "lerp_(gradient, (1 - 0.9) * on)"),
        (SQUARE, SQUARE.replace("1 - 0.999", "(1 - 0.999) * on")),
        (STEP, STEP.replace("* direction", "* direction * on")),
        ('scheduled = {"learning_rate": learning_rate, "clip_coef": clip_coef}', 'scheduled = {"learning_rate": learning_rate, "clip_coef": clip_coef, "values": False}'),
        ("for _ in range(args.update_epochs):", 'for epoch in range(2 * args.update_epochs):\n            schedule["values"].fill_(epoch >= args.update_epochs)'),
    ),
    # The optimizer
    "lr-kl": ("Schulman et al. 2017, Table 4", "learning rate from 1e-3, by a KL of 0.01", "--learning-rate 1e-3 --no-anneal-lr --adapt-lr-kl 0.01"),
    "adam-reset": ("Asadi et al. 2023", "Adam begins anew in each iteration", "", ("mb_metrics: list[Tensors] = []", 'for name in ("mean", "square", "step"):\n            adam[name].zero_()\n        mb_metrics: list[Tensors] = []')),
    "adamw": ("Loshchilov and Hutter 2019", "AdamW, weight decay 0.01", "", (STEP, 'adam["weights"].mul_(1 - 0.01 * schedule["learning_rate"])\n        ' + STEP)),
    "betas": ("usual elsewhere", "Adam's second beta 0.99", "", (SQUARE, SQUARE.replace("0.999", "0.99")), ("(1 - 0.999**step).sqrt()", "(1 - 0.99**step).sqrt()")),
}
# fmt: on

# Seeds in Hopper, Walker2d and HalfCheetah. The runs have ended; those of interest had five each.
PLACES = ("Hopper-v4", "Walker2d-v4", "HalfCheetah-v4")
FIVE = {"wide-values", "gamma-0.995", "batch-advantages", "lr-kl", "adam-reset", "betas"}
FEWER = dict.fromkeys(("separate", "adamw"), (3, 3, 4))
FEWER |= dict.fromkeys(("squashed", "state-std", "std-0.5", "anew", "spo"), (4, 3, 4))


def seeds(name: str) -> dict[str, tuple[int, ...]]:
    """The seeds of a change in each environment."""
    if name == "beta":
        return dict.fromkeys(PLACES, (1, 2, 3, 4)) | {"Walker2d-v4": (1, 2, 3, 5)}
    counts = (5, 5, 5) if name in FIVE else FEWER.get(name, (4, 4, 4))
    return {place: tuple(range(1, count + 1)) for place, count in zip(PLACES, counts)}


VARIANTS = {
    name: Variant(
        *("ppo_continuous_action.py", flags, label),
        replaced=tuple(replaced),
        environments=seeds(name),
    )
    for name, (_, label, flags, *replaced) in CHANGES.items()
}
