# /// script
# requires-python = ">=3.11"
# dependencies = ["gymnasium[mujoco]==1.4.0", "mujoco==4.0.0", "numpy==2.4.6",
#   "tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Proximal policy optimization (PPO) for continuous actions: all of it, in about 250 lines.

    python ppo_minimal.py --env-id Hopper-v4  # needs gymnasium[mujoco] tensorboard torch tqdm tyro

PPO trains two networks: a policy, which says how likely each action is, and a value function, which
predicts the rewards still to come. The policy acts for a while (a rollout). The advantage of an
action is how much more reward followed than was predicted. Gradient descent then corrects the
predictions and makes actions with positive advantages likelier, others less likely. Clipping takes
away the reason to go far, as the data only tell us about policies close to the one that acted.

Paper: Schulman et al. 2017; ppo2: OpenAI's code; details: "The 37 Implementation Details of PPO"
(Huang et al. 2022). This script saves only logs, in runs/. ppo_continuous_action.py gives reasons
for all details, saves, resumes, evaluates and is faster. For other actions: ppo_multidiscrete.py.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # Gymnasium environment; actions should span about [-1, 1]
    seed: int = 1  # random seed of the whole run
    total_timesteps: int = 1_000_000  # total steps of all environments; annealing ends there
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU if there is one
    num_envs: int = 1  # environments N, stepped one by one [ppo2, MuJoCo: 1; paper, Atari: 8]
    num_steps: int = 2048  # steps per environment and iteration, T [paper: 2048; Atari 128]
    num_minibatches: int = 32  # minibatches per epoch [ppo2: 32 for MuJoCo, 4 for Atari]
    update_epochs: int = 10  # passes over a batch, K [paper: 10; Atari 3, in ppo2 4]
    learning_rate: float = 3e-4  # Adam's step size [paper: 3e-4; Atari 2.5e-4]
    gamma: float = 0.99  # discount factor [paper: 0.99]
    gae_lambda: float = 0.95  # advantages look ahead one step at 0, all steps at 1 [paper: 0.95]
    clip_coef: float = 0.2  # clip range of the ratio, epsilon [paper: 0.2; Atari 0.1]
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 [ppo2: 0; Atari 0.01]
    vf_coef: float = 0.5  # weight of the value loss (half a squared error), c1 [ppo2: 0.5]
    max_grad_norm: float = 0.5  # maximum norm of the whole gradient [ppo2: 0.5; inf: off]


class Agent(nn.Module):
    def __init__(self, obs_size, action_size):
        super().__init__()

        def network(outputs, gain):
            layers = nn.Linear(obs_size, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
            # Detail 2/37: orthogonal and constant initialization
            for layer, scale in zip(layers, (2**0.5, 2**0.5, gain)):
                nn.init.orthogonal_(layer.weight, scale)
                nn.init.zeros_(layer.bias)
            return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

        # Detail 13/37: shared or separate networks
        # Detail 26/37: separate networks
        self.policy, self.value = network(action_size, gain=0.01), network(1, gain=1.0)
        # Detail 24/37: state-independent log std
        self.log_std = nn.Parameter(torch.zeros(action_size))  # (A,)

    def forward(self, obs):
        # Detail 23/37: normal distribution
        policy = Normal(self.policy(obs), self.log_std.exp(), validate_args=False)
        # Detail 25/37: independent action components
        policy = Independent(policy, 1, validate_args=False)  # sums their log-probabilities
        return policy, self.value(obs).squeeze(-1)


class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, rows):
        self.count += len(rows)
        share, delta = len(rows) / self.count, rows.mean(0) - self.mean
        self.mean = self.mean + share * delta
        self.var = self.var + share * (rows.var(0) - self.var) + share * (1 - share) * delta**2

    def normalize(self, obs):
        # Detail 28/37: observation normalization
        obs = (obs - self.mean) / np.sqrt(self.var + 1e-8)
        # Detail 29/37: observation clipping
        return obs.clip(-10, 10).astype(np.float32)


def gae(rewards, values, next_values, done, args):
    advantages, later = torch.zeros_like(values), 0.0  # (T, N); later: those of the next step
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + args.gamma * next_values[t] - values[t]  # the TD error
        # Detail 5/37: generalized advantage estimation
        advantages[t] = later = delta + args.gamma * args.gae_lambda * (1 - done[t]) * later
    return advantages, advantages + values  # and what the values should have been


def ppo_loss(agent, minibatch, args):
    obs, actions, old_logprobs, old_values, advantages, returns = minibatch  # (B, ...)
    policy, values = agent(obs)
    logratio = policy.log_prob(actions) - old_logprobs
    ratio = logratio.exp()  # how much more likely the action has become since the rollout
    # Detail 7/37: advantage normalization
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    # Detail 8/37: clipped surrogate objective
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()  # no gain beyond
    # Detail 9/37: value function loss clipping
    clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
    v_loss = 0.5 * torch.max((values - returns) ** 2, (clipped_values - returns) ** 2).mean()
    entropy = policy.entropy().mean()
    # Detail 10/37: overall loss and entropy bonus
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    # Detail 12/37: debug variables
    metrics = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy}
    metrics["approx_kl"] = (ratio - 1 - logratio).mean()  # how far the policy has moved
    metrics["clipfrac"] = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return loss, {f"losses/{name}": x.item() for name, x in metrics.items()}


def make_envs(args, resources):
    batch_size = args.num_steps * args.num_envs
    assert batch_size <= args.total_timesteps, f"--total-timesteps must be at least {batch_size}"
    fits = 0 < args.num_minibatches < batch_size and batch_size % args.num_minibatches == 0
    assert fits, f"--num-minibatches must split {batch_size} steps into equal parts of 2 or more"
    assert args.update_epochs >= 1, "--update-epochs must be at least 1"
    rates = "learning_rate", "clip_coef", "vf_coef", "max_grad_norm", "gamma", "gae_lambda"
    for name in ("seed", *rates):
        assert getattr(args, name) >= 0, f"--{name.replace('_', '-')} must be at least 0"
    assert max(args.gamma, args.gae_lambda) <= 1, "--gamma and --gae-lambda must be at most 1"
    envs = [gym.make(args.env_id) for _ in range(args.num_envs)]
    for env in envs:
        resources.callback(env.close)
    actions = envs[0].action_space
    are_vectors = str(actions.dtype).startswith("float") and len(actions.shape) == 1
    assert are_vectors, f"actions are {actions}, not vectors of floats: try ppo_multidiscrete.py"
    if actions.low.max() > -0.1 or actions.high.min() < 0.1 or 10 < actions.high.max() < np.inf:
        print(f"A new policy has mean 0 and std 1. For {actions} use gym.wrappers.RescaleAction.")
    space = envs[0].observation_space
    flat = gym.spaces.flatten_space(space)

    def vector(obs):  # Boxes are not cast to their type: it could be too coarse
        obs = obs if isinstance(space, gym.spaces.Box) else gym.spaces.flatten(space, obs)
        return np.reshape(obs, flat.shape)  # an error if the size differs

    return [gym.wrappers.TransformObservation(env, vector, flat) for env in envs]


def train(args):
    with ExitStack() as resources:  # what it holds is undone at the end, also after an error
        resources.callback(torch.set_num_threads, torch.get_num_threads())
        return learn(args, make_envs(args, resources))


def learn(args, envs):
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # enough for networks of this size
    device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    obs_shape, bounds = envs[0].observation_space.shape, envs[0].action_space
    agent = Agent(*obs_shape, *bounds.shape).to(device)
    generator = torch.default_generator.clone_state()  # our own: environments may seed PyTorch's
    # Detail 3/37: Adam epsilon
    adam = torch.optim.Adam(agent.parameters(), eps=1e-5)  # ppo2 adds it before bias correction
    batch_size = args.num_steps * args.num_envs
    num_iterations = args.total_timesteps // batch_size
    name = f"{args.env_id}__ppo_minimal__{args.seed}__{time.time_ns()}"
    writer = SummaryWriter("runs/" + name.replace(":", "-"))  # Windows allows no colon
    rows = [f"| {setting} | {value} |" for setting, value in vars(args).items()]
    writer.add_text("hyperparameters", "\n".join(["| setting | value |", "|-|-|", *rows]))
    obs_stats, return_stats = RunningMeanStd(obs_shape), RunningMeanStd(())
    totals, discounted = np.zeros(args.num_envs), np.zeros(args.num_envs)  # sums of past rewards
    global_step, episodes, updates = 0, [], []
    # Numbers from a SeedSequence: seed 2 must not play what another environment plays with seed 1.
    more = np.random.SeedSequence(args.seed).generate_state(args.num_envs - 1).tolist()
    raw_obs = np.array([env.reset(seed=x)[0] for env, x in zip(envs, [args.seed, *more])])  # (N, D)
    obs_stats.update(raw_obs)
    last_obs = obs_stats.normalize(raw_obs)

    progress = tqdm(range(1, num_iterations + 1), disable=None)  # a bar, in a terminal
    for iteration in progress:
        # --- Collect: T steps in each of N environments ---
        start_time = time.perf_counter()
        rollout, num_before = [], len(episodes)
        # Detail 1/37: vectorized architecture
        for _ in range(args.num_steps):
            global_step += args.num_envs
            with torch.no_grad():
                policy, _ = agent(torch.tensor(last_obs, device=device))
            noise = torch.randn(policy.mean.shape, generator=generator).to(device)
            action = (policy.mean + policy.stddev * noise).numpy(force=True)  # (N, A)
            # Detail 27/37: action clipping and storage
            clipped_action = action.clip(bounds.low, bounds.high)  # the rollout stores the other
            results = [env.step(x) for env, x in zip(envs, clipped_action)]
            next_obs, reward, terminated, truncated, _ = zip(*results)
            next_obs = np.array(next_obs)  # (N, D)
            reward = np.hstack(reward).astype(float)  # (N,)
            terminated = np.hstack(terminated).astype(bool)
            done = terminated | np.hstack(truncated).astype(bool)  # or cut off by a time limit
            is_finite = np.isfinite(next_obs).all() and np.isfinite(reward).all()
            assert is_finite, f"step {global_step} has a NaN or infinite observation or reward"
            totals += reward
            raw_obs = next_obs.copy()
            for i in np.flatnonzero(done):
                episodes.append({"global_step": global_step, "return": totals[i].item()})
                raw_obs[i], _ = envs[i].reset()  # begins the next episode
            obs_stats.update(raw_obs)
            discounted = args.gamma * discounted + reward
            return_stats.update(discounted)
            totals[done] = discounted[done] = 0.0
            # Detail 30/37: reward scaling
            reward = reward / np.sqrt(return_stats.var + 1e-8)
            # Detail 31/37: reward clipping
            reward = reward.clip(-10, 10)
            next_obs = obs_stats.normalize(next_obs)
            rollout.append((last_obs, action, next_obs, reward, terminated, done))
            last_obs = obs_stats.normalize(raw_obs)

        # --- Advantages: one pass over the whole rollout ---
        tensors = (torch.tensor(np.array(x), device=device).float() for x in zip(*rollout))
        obs, actions, next_obs, rewards, terminated, done = tensors  # (T, N, ...)
        with torch.no_grad():
            policy, values = agent(obs)
            logprobs = policy.log_prob(actions)
            # Deviation: time limits are not failures (ppo2: they are)
            next_values = agent(next_obs)[1] * (1 - terminated)
            advantages, returns = gae(rewards, values, next_values, done, args)
        batch = [x.flatten(0, 1) for x in (obs, actions, logprobs, values, advantages, returns)]

        # --- Update: K epochs of minibatches ---
        # Detail 4/37: learning rate annealing
        adam.param_groups[0]["lr"] = args.learning_rate * (1 - (iteration - 1) / num_iterations)
        mb_metrics = []
        for _ in range(args.update_epochs):
            # Detail 6/37: minibatch updates
            for mb in torch.randperm(batch_size, generator=generator).chunk(args.num_minibatches):
                loss, metrics = ppo_loss(agent, [x[mb] for x in batch], args)
                mb_metrics.append(metrics)
                adam.zero_grad()
                loss.backward()
                # Detail 11/37: global gradient clipping
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                adam.step()

        # --- Log ---
        metrics = {name: np.mean([x[name] for x in mb_metrics]).item() for name in mb_metrics[0]}
        unexplained = (returns - values).var() / (returns.var() + 1e-8)
        metrics["losses/explained_variance"] = 1 - unexplained.item()
        metrics["charts/SPS"] = batch_size / (time.perf_counter() - start_time)
        if new := episodes[num_before:]:
            metrics["charts/episodic_return"] = np.mean([x["return"] for x in new]).item()
            recent = np.mean([x["return"] for x in episodes[-100:]])
            progress.set_postfix_str(f"return {recent:.5g}")
        for name, value in metrics.items():
            writer.add_scalar(name, value, global_step)
        updates.append({"global_step": global_step, **metrics})
    writer.close()
    return {"agent": agent, "obs_stats": obs_stats, "episodes": episodes, "updates": updates}


if __name__ == "__main__":
    train(tyro.cli(Args))
