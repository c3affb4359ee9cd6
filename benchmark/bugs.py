# ruff: noqa: E501 - a table of code
"""Mistakes that people make in PPO, each as a change of one of the scripts, with healthy controls.

The scripts stop where what acts is not what learns (`check_actor`); few codes do. A bug that would
be stopped so is shown without that check.
"""

from benchmark.definitions import Variant

EIGHT = "--num-envs 8 --num-steps 256"
ENTROPY = "--ent-coef 0.01"
SHARED = "--shared-network"
UNCHECKED = ("        check_actor(logprobs, noise, agent)\n", "")
# Where a policy blows up, numbers become too coarse for that check.
ANYHOW = ('raise ValueError("Make `actor`', 'print("Make `actor`')

# By name: what it is; flags; each text that is replaced, with what takes its place.
Bug = tuple[str, str, *tuple[tuple[str, str], ...]]
# fmt: off
BUGS: dict[str, Bug] = {
    # The policy's loss
    "ratio-one": ("old log-probabilities computed anew in the loop", "", ("clip_coef = logprobs - old_logprobs,", "clip_coef = logprobs - logprobs.detach(),"), ANYHOW),
    "sign": ("policy loss with the wrong sign", "", ("torch.max(-advantages * ratio, -advantages * clipped_ratio)", "torch.max(advantages * ratio, advantages * clipped_ratio)")),
    "min-max": ("max and min confused in the clipped objective", "", ("torch.max(-advantages * ratio", "torch.min(-advantages * ratio")),
    "mean-logprob": ("log-probabilities averaged over components", "", ("dist.log_prob(actions).sum(-1)", "dist.log_prob(actions).mean(-1)"), UNCHECKED),
    "clipped-stored": ("clipped actions stored", "", ("actions[t], env_actions = act(obs[t], noise[t])", "actions[t] = env_actions = act(obs[t], noise[t])[1]"), UNCHECKED),
    "late-obs": ("actions learned with the next observation", "", ("batch = (b_obs[:-1], ", "batch = (b_obs[1:], ")),
    "renormalized": ("observations normalized anew for learning", "", ("act(obs[t], noise", "act(normalize_obs(obs[t], obs_stats, args), noise"), ("obs[t + 1] = normalize_obs(envs.obs, obs_stats, args)", "obs[t + 1] = envs.obs"), ("obs[-1] = normalize_obs(envs.obs, obs_stats, args)", "obs[-1] = envs.obs"), ("in (obs, final_obs", "in (normalize_obs(obs, obs_stats, args), final_obs"), UNCHECKED),
    "entropy-sign": ("entropy bonus with the wrong sign", ENTROPY, ("pg_loss - args.ent_coef", "pg_loss + args.ent_coef")),
    # Values
    "value-shape": ("values (B, 1) minus returns (B,)", "", ("value_loss(values, old_values,", "value_loss(values[:, None], old_values,")),
    "value-clip-new": ("values clipped around the new ones", "", ("value_loss(values, old_values,", "value_loss(values, values.detach(),")),
    "swamped": ("value loss of raw rewards in a shared network", f"{SHARED} --no-scale-rewards"),
    # Advantages
    "through-falls": ("value bootstrapped where an episode terminated", "", ("* next_values * (1 - terminated) - values", "* next_values - values")),
    "v-same": ("V(s) in place of V(s')", "", ("next_values = torch.cat([values[1:], agent.get_value(b_obs[-1:])])", "next_values = values.clone()")),
    "over-ends": ("GAE runs over the ends of episodes", "", ("(gamma * gae_lambda * (1 - done))", "(gamma * gae_lambda * torch.ones_like(done))")),
    "over-limits": ("time limits are no ends of episodes", "", ("done = terminated | truncated", "done = terminated")),
    "next-first": ("after a time limit V of the next episode's beginning", "", ("next_values[truncated] = agent.get_value(b_final_obs)", "pass")),
    "limits-as-falls": ("time limits treated as failures", "--truncation-is-terminal"),
    "transposed": ("advantages flattened in another order", EIGHT, ("logprobs, values, advantages, returns", "logprobs, values, advantages.T.reshape(values.shape), returns")),
    "raw-advantages": ("advantages not normalized", "--no-norm-adv"),
    # Rewards and environments
    "centered": ("mean of the rewards subtracted", "", ("scaled[t] = reward /", "scaled[t] = (reward - rewards.mean()) /")),
    "not-reset": ("reward scaling not reset at the ends of episodes", "", ("discounted[done[t]] = 0.0", "pass")),
    "equal-seeds": ("one seed for all environments and episodes", EIGHT, ("range(len(self.envs)):\n            self.begin(i, rng.integers(2**31).item())", "range(len(self.envs)):\n            self.begin(i, 7)"), ("self.obs[i]\n                self.begin(i, rng.integers(2**31).item())", "self.obs[i]\n                self.begin(i, 7)")),
    # The update
    "grad-sum": ("gradients not set to zero", "", ('"square": 0 * weights}', '"square": 0 * weights, "sum": 0 * weights}'), ("gradient = torch.cat([x.flatten() for x in gradients])", 'gradient = adam["sum"].add_(torch.cat([x.flatten() for x in gradients])).clone()')),
    "frozen-policy": ("optimizer without the policy's weights", "", ("[x for x in agent.parameters() if x.requires_grad]", "[*agent.value.parameters()]")),
    "no-shuffling": ("minibatches not shuffled", "", ("rng.permutation(args.batch_size)", "np.arange(args.batch_size)")),
    "many-epochs": ("30 epochs, ε = 0.5", "--update-epochs 30 --clip-coef 0.5"),
    "large-lr": ("learning rate 0.01", "--learning-rate 0.01"),
}
CONTROLS: dict[str, Bug] = {
    "healthy": ("healthy", ""),
    "healthy-8": ("healthy, 8 environments", EIGHT),
    "healthy-entropy": ("healthy, entropy bonus", ENTROPY),
    "healthy-shared": ("healthy, shared network", SHARED),
    "healthy-lr": ("healthy, constant learning rate", "--no-anneal-lr"),
    "healthy-values": ("healthy, values not clipped", "--no-clip-vloss"),
}
# Those that also stand in ppo_multidiscrete.py, and cost something where episodes end early.
IN_CARTPOLE = ("healthy", "healthy-8", "ratio-one", "sign", "min-max", "late-obs", "value-shape", "through-falls", "v-same", "over-ends", "transposed", "grad-sum", "no-shuffling", "many-epochs", "large-lr")

WARM = "--temperature 0.7"
RLHF_BUGS: dict[str, Bug] = {
    "healthy": ("healthy", ""),
    "healthy-warm": ("healthy, temperature 0.7", WARM),
    "no-kl": ("no KL penalty in the rewards", "", ("rewards = -kl_coef * kl + scores", "rewards = scores")),
    "kl-sign": ("KL penalty with the wrong sign", "", ("rewards = -kl_coef * kl", "rewards = kl_coef * kl")),
    "first-word": ("reward at the first word", "", ("scores[:, None] * last", "scores[:, None] * (mask.cumsum(1) == 1)")),
    "padding": ("padding not masked", "", ("mask = responses != PAD", "mask = torch.ones_like(responses, dtype=torch.bool)")),
    "own-reference": ("reference model trained along", "", ("agents[name] = copy.deepcopy(reference)", "agents[name] = reference")),
    "temperature": ("log-probabilities without the temperature", WARM, ("self.policy.logits(hidden[:, before]) / self.temperature", "self.policy.logits(hidden[:, before])")),
}
# Evaluation with statistics of observations that no training has made.
FRESH = ("""stats = RunningMeanStd(**saved["obs_stats"])
    agent""", """stats = RunningMeanStd(0 * np.array(saved["obs_stats"]["mean"]), 1.0)
    agent""")
EVALUATION: dict[str, Bug] = {
    "healthy": ("healthy", ""),
    "without-statistics": ("evaluated without the statistics of observations", "", FRESH),
}
# fmt: on


def variants(script: str, bugs: dict[str, Bug]) -> dict[str, Variant]:
    """Bugs of a script, as variants of a suite."""
    return {
        name: Variant(script, flags, label, replaced=tuple(replaced))
        for name, (label, flags, *replaced) in bugs.items()
    }
