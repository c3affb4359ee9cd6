# ruff: noqa: E501 - a table of code
"""Mistakes that people make in PPO, each as a change of one of the scripts, with healthy controls."""

from benchmark.lab.definitions import Suite, Variant
from benchmark.paper.suites.common import CONTINUOUS, MULTIDISCRETE, SHARED_NETWORK, SHORT

EIGHT = "--num-envs 8 --num-steps 256"
ENTROPY = "--ent-coef 0.01"

# By name: what it is; flags; each text that is replaced, with what takes its place.
# fmt: off
BUGS = {
    "healthy": ("healthy", ""),
    "healthy-8": ("healthy, 8 environments", EIGHT),
    "healthy-entropy": ("healthy, entropy bonus", ENTROPY),
    "healthy-shared": ("healthy, shared network", "", *SHARED_NETWORK),
    "healthy-lr": ("healthy, constant learning rate", "--no-anneal-lr"),
    "healthy-values": ("healthy, values not clipped", "--no-clip-vloss"),
    # The policy's loss
    "ratio-one": ("old log-probabilities computed again in the loop", "", ("logratio = logprobs - minibatch.logprobs", "logratio = logprobs - logprobs.detach()")),
    "sign": ("policy loss with the wrong sign", "", ("torch.max(-advantages * ratio, -advantages * clipped_ratio)", "torch.max(advantages * ratio, advantages * clipped_ratio)")),
    "min-max": ("max and min confused in the clipped objective", "", ("torch.max(-advantages * ratio", "torch.min(-advantages * ratio")),
    "mean-logprob": ("log-probabilities averaged over components", "", ("dist.log_prob(actions).sum(-1)", "dist.log_prob(actions).mean(-1)")),
    "clipped-stored": ("clipped actions stored", "", ("clipped_actions = actions", "actions[t] = clipped_actions = actions")),
    "late-obs": ("actions learned with the next observation", "", ("batch = Batch(batch_obs, ", "batch = Batch(all_obs[1:], ")),
    "renormalized": ("observations normalized again for learning", "", ("act(obs[t], noise", "act(normalized(obs[t]), noise"), ("obs[t + 1] = normalized(raw_obs)", "obs[t + 1] = raw_obs"), ("obs[-1] = normalized(raw_obs)", "obs[-1] = raw_obs"), ("to_tensor(obs)", "to_tensor(normalized(obs))")),
    "entropy-sign": ("entropy bonus with the wrong sign", ENTROPY, ("pg_loss - args.ent_coef", "pg_loss + args.ent_coef")),
    # Values
    "value-shape": ("values (B, 1) minus returns (B,)", "", ("value_loss(values, minibatch.values,", "value_loss(values[:, None], minibatch.values,")),
    "value-clip-new": ("values clipped around the new ones", "", ("value_loss(values, minibatch.values,", "value_loss(values, values.detach(),")),
    "swamped": ("value loss of raw rewards in a shared network", "--no-scale-rewards", *SHARED_NETWORK),
    # Advantages
    "through-falls": ("value bootstrapped where an episode terminated", "", ("next_values[terminated] = 0.0", "pass")),
    "v-same": ("V(s) in place of V(s')", "", ("next_values = torch.cat([values[1:], agent.value(all_obs[-1:])])", "next_values = values.clone()")),
    "over-ends": ("GAE runs over the ends of episodes", "", ("(gamma * gae_lambda * (1 - done))", "(gamma * gae_lambda * torch.ones_like(done))")),
    "over-limits": ("time limits are no ends of episodes", "", ("done = terminated | truncated", "done = terminated")),
    "next-first": ("after a time limit V of the next episode's beginning", "", ("next_values[truncated] = agent.value(to_tensor(final_obs[truncated]))", "pass")),
    "limits-as-falls": ("time limits treated as failures", "--truncation-is-terminal"),
    "transposed": ("advantages flattened in another order", EIGHT, ("logprobs, values, advantages, returns", "logprobs, values, advantages.T.reshape(values.shape), returns")),
    "raw-advantages": ("advantages not normalized", "--no-norm-adv"),
    # Rewards and environments
    "centered": ("mean of the rewards subtracted", "", ("rewards[t] /= np.sqrt(return_stats.var + 1e-8)", "rewards[t] = (rewards[t] - mean_reward) / np.sqrt(return_stats.var + 1e-8)"), ("        if args.scale_rewards:\n", "        mean_reward = rewards.mean()\n        if args.scale_rewards:\n")),
    "not-reset": ("reward scaling not reset at the ends of episodes", "", ("discounted_returns[done[t]] = 0.0", "pass")),
    "equal-seeds": ("one seed for all environments and episodes", EIGHT, ("enumerate(envs):\n            raw_obs[i] = env.begin(rng.integers(2**31).item())", "enumerate(envs):\n            raw_obs[i] = env.begin(7)"), ("raw_final_obs[i] = raw_obs[i]\n                    raw_obs[i] = env.begin(rng.integers(2**31).item())", "raw_final_obs[i] = raw_obs[i]\n                    raw_obs[i] = env.begin(7)")),
    # The update
    "grad-sum": ("gradients not set to zero", "", ('"square": torch.zeros_like(weights),', '"square": torch.zeros_like(weights), "sum": torch.zeros_like(weights),'), ("gradient = torch.cat([x.flatten() for x in gradients])", 'gradient = adam["sum"].add_(torch.cat([x.flatten() for x in gradients])).clone()')),
    "frozen-policy": ("optimizer without the policy's weights", "", ("parameters_to_vector(agent.parameters())", "parameters_to_vector(agent.value.parameters())"), ("torch.autograd.grad(loss, list(agent.parameters()))", "torch.autograd.grad(loss, list(agent.value.parameters()))"), ('adam["weights"], agent.parameters())', 'adam["weights"], agent.value.parameters())')),
    "no-shuffling": ("minibatches not shuffled", "", ("rng.permutation(batch_size)", "np.arange(batch_size)")),
    "many-epochs": ("30 epochs, ε = 0.5", "--update-epochs 30 --clip-coef 0.5"),
    "large-lr": ("learning rate 0.01", "--learning-rate 0.01"),
}
# Those that also stand in ppo_multidiscrete.py, and cost something where episodes end early.
IN_CARTPOLE = ("healthy", "healthy-8", "ratio-one", "sign", "min-max", "late-obs", "value-shape", "through-falls", "v-same", "over-ends", "transposed", "grad-sum", "no-shuffling", "many-epochs", "large-lr")

WARM = "--temperature 0.7"
RLHF_BUGS = {
    "healthy": ("healthy", ""),
    "healthy-warm": ("healthy, temperature 0.7", WARM),
    "no-kl": ("no KL penalty in the rewards", "", ("rewards = -kl_coef * kl + scores", "rewards = scores")),
    "kl-sign": ("KL penalty with the wrong sign", "", ("rewards = -kl_coef * kl", "rewards = kl_coef * kl")),
    "first-word": ("reward at the first token", "", ("scores[:, None] * last", "scores[:, None] * (mask.cumsum(1) == 1)")),
    "padding": ("padding not masked", "", ("mask = responses != PAD", "mask = torch.ones_like(responses, dtype=torch.bool)")),
    "own-reference": ("reference model trained along", "", ("agents[name] = agent = copy.deepcopy(judges.reference)", "agents[name] = agent = judges.reference")),
    "temperature": ("log-probabilities without the temperature", WARM, ("self.policy.logits(hidden[:, before]) / self.temperature", "self.policy.logits(hidden[:, before])")),
}
# Evaluation with statistics of observations that no training has made. Its runs are closed.
FRESH = ('actor(saved["agent"]), saved["obs_stats"]', 'actor(saved["agent"]), RunningMeanStd(0 * saved["obs_stats"].mean, 1.0)')
AFTER_TRAINING = {"without-statistics": Variant(CONTINUOUS, "", "evaluated without the statistics of observations", replaced=(FRESH,))}
# fmt: on


def variants(script: str, bugs: dict[str, tuple]) -> dict[str, Variant]:
    """Bugs of a script, as variants of a suite."""
    return {x: Variant(script, y[1], y[0], replaced=tuple(y[2:])) for x, y in bugs.items()}


SUITES = (
    # All steps of the curves are kept: the health table is applied to them, see health.py.
    Suite(
        name="bugs",
        reproduces="what mistakes look like, and which of them `check` notices",
        environments=dict.fromkeys(("Hopper-v4", "HalfCheetah-v4"), (1, 2, 3)),
        variants=variants(CONTINUOUS, BUGS),
        figures=("bugs",),
        table="bugs",
        **SHORT,
    ),
    Suite(
        # With ppo2's settings for classic control the values are held by their clipping.
        name="bugs_cartpole",
        reproduces="the same where actions are discrete",
        environments={"CartPole-v1": (1, 2, 3)},
        variants=variants(MULTIDISCRETE, {x: BUGS[x] for x in IN_CARTPOLE}),
        table="bugs",
        **SHORT,
    ),
    Suite(
        name="bugs_rlhf",
        reproduces="the same in RLHF",
        environments={"reviews": (1, 2, 3)},
        variants=variants("ppo_rlhf_toy.py", RLHF_BUGS),
        table="bugs",
        total_timesteps=None,
    ),
)
