"""RLHF without values: group relative policy optimization (GRPO) on the reviews of ppo_rlhf_toy.py.

    python -m recipes.grpo_on_reviews

The task, the SFT model, the labeled pairs and the reward model are those of ppo_rlhf_toy.py, to the
bit. Then the policy writes G responses to each prompt. The advantage of all tokens of a response is
its reward minus the mean of its group: there is no value function and no GAE (the agent's value
head is not used), and one pass over a batch is enough. Means over 5 seeds: gold ends at 1.54, with
a KL of 6.13 nats to the SFT model; PPO's gold is 1.6 (benchmark/pages/rlhf.md).

The default is Dr. GRPO with the KL penalty in the reward, as in RLOO. Its weight beta adapts as in
PPO. The published forms are settings:
- GRPO (DeepSeekMath, Shao et al. 2024, arXiv 2402.03300): --std group --loss-norm sequence
  --kl-in-loss k3 --kl-mode fixed --num-minibatches 1 (paper: --kl-coef 0.04);
- Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): --kl-mode none;
- DAPO's token-level loss and clip-higher (Yu et al. 2025, arXiv 2503.14476): --std group
  --loss-norm token --clip-high 0.28 --kl-mode none --num-minibatches 16;
- GSPO (Zheng et al. 2025, arXiv 2507.18071): --std group --loss-norm sequence --ratio sequence
  --clip-coef 0.03 --clip-high 0.03 (paper: 3e-4, 4e-4) --kl-mode none;
- REINFORCE++ with a group baseline (Hu 2025, arXiv 2501.03262): --std batch --loss-norm token
  --kl-in-loss k2 --kl-mode fixed (its code: a --kl-coef of 1e-5);
- RLOO (Ahmadian et al. 2024, arXiv 2402.14740): --kl-mode fixed --kl-coef 0.1 --num-minibatches 1
  --clip-coef inf --clip-high inf; its advantages are G / (G - 1) times as large, for which Adam
  makes up;
- TRL's defaults of 2026: --std group --loss-norm token --kl-mode none --num-minibatches 1.

    here                       TRL                            verl
    --std                      scale_rewards                  norm_adv_by_std_in_grpo
    --loss-norm constant       loss_type dr_grpo              seq-mean-token-sum-norm
      sequence, token            grpo, bnpo                     seq-mean-token-mean, token-mean
    --kl-in-loss k3            beta (always in the loss)      use_kl_loss (no: use_kl_in_reward)
    --group-size, --clip-high  num_generations, epsilon_high  rollout.n, clip_ratio_high
    groups/without_spread      frac_reward_zero_std           -

`--loss-norm token` divides by the tokens of the minibatch, like verl and, if gradients are not
accumulated, TRL's bnpo. TRL's default, dapo, divides by the tokens of the whole batch.

`--compare` adds the published form of GRPO, but with an adaptive beta, and the default without any
penalty. DeepSeekMath's own beta, 0.04, is far too small here: the reward is hacked. With advantages
divided by the group's std, a penalty in the loss weighs less and less (benchmark/pages/rlhf.md).
With `--reward gold` the formula itself is the reward, and there is nothing to hack. It takes many
values; the reward in grpo_minimal.py is only right or wrong.

G1-G8 are comments above the lines that implement them, as are the details of PPO (ppo2 =
openai/baselines@ea25b9e8) and RLHF (R; LHP = openai/lm-human-preferences@cbfd210b) that apply here.
B = responses in a batch, P = tokens of a prompt, R = tokens of a response; `mb` is a minibatch.
"""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import Generator, Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import trange

import ppo_rlhf_toy as ppo

# === Settings ===

LossNorm = Literal["constant", "sequence", "token"]
Spread = Literal["group", "batch", "none"]
LIMITS = ppo.LIMITS | {"group_size": (2, math.inf), "clip_high": (0, math.inf)}


@dataclasses.dataclass(frozen=True)
class Args:
    # --- Experiment ---
    seed: int = 1  # random seed of the whole run
    run_name: str | None = None  # folder below runs/; by default script, seed, time
    device: Literal["cpu", "cuda"] = "cpu"  # where to compute; in our tables: cpu
    compare: bool = False  # also train in DeepSeekMath's form and without a KL penalty

    # --- Supervised fine-tuning ---
    sft_documents: int = 20_000  # reviews that the grammar writes
    sft_steps: int = 700  # gradient steps
    sft_batch_size: int = 64  # documents per gradient step
    sft_learning_rate: float = 3e-3  # AdamW's step size, after a warm-up; falls to 0

    # --- Preferences and reward model ---
    num_pairs: int = 7000  # labeled pairs of responses [LHP: 4992]
    temperature: float = 1.0  # sampling temperature T [LHP: 0.7; 0.5 for CNN/DM]
    reward_epochs: int = 2  # passes over the labeled pairs [LHP: 1]
    reward_batch_size: int = 32  # pairs per gradient step [LHP: 32]
    reward_learning_rate: float = 2e-3  # AdamW's step size; falls to 0 [LHP: 5e-5]

    # --- GRPO ---
    reward: Literal["model", "gold"] = "model"  # what is optimized: the reward model or the formula
    kl_mode: Literal["adaptive", "fixed", "none"] = "adaptive"  # how beta is set; none: it is 0
    kl_coef: float = 0.5  # weight of the KL penalty, beta, at the start [paper: 0.04]
    target_kl: float = 6.0  # KL to the SFT model that an adaptive beta aims at, in nats [LHP: 6]
    kl_horizon: int = 500  # episodes over which beta adapts [LHP: 10000 of 1,000,000]
    kl_in_loss: Literal["no", "k2", "k3"] = "no"  # estimator; no: k1 in the reward [paper: k3]
    group_size: int = 8  # responses to a prompt, G [paper: 64]
    std: Spread = "none"  # what advantages are divided by [paper: group]
    loss_norm: LossNorm = "constant"  # divide by R, own or mean length [paper: sequence]
    num_updates: int = 80  # batches of responses, each followed by an update
    batch_size: int = 128  # responses per update, B, of whole groups [paper: 1024]
    num_minibatches: int = 4  # minibatches per pass, of whole responses [paper: 1]
    update_epochs: int = 1  # passes over a batch [paper: 1]
    learning_rate: ppo.StepSize = 7e-4  # Adam's step size [paper: 1e-6, for 7 billion weights]
    anneal_lr: bool = True  # lower it linearly towards 0, as LHP does
    ratio: Literal["token", "sequence"] = "token"  # of each token, or their geometric mean [GSPO]
    clip_coef: float = 0.2  # lower clip range of the policy ratio, epsilon [inf: off]
    clip_high: float = 0.2  # upper clip range of the policy ratio [DAPO: 0.28; inf: off]
    max_grad_norm: float = 1.0  # maximum norm of the whole gradient [inf: off]
    missing_eos_score: float = -1.0  # score without EOS, lower than usual scores [LHP: -1]

    def __post_init__(self) -> None:
        ppo.check_settings(self, LIMITS)
        if self.batch_size % self.num_minibatches or self.batch_size % self.group_size:
            flags = "--num-minibatches and --group-size"
            raise ppo.UsageError(f"{flags} must both divide --batch-size.")
        adapts = self.kl_mode == "adaptive"
        if adapts and (self.kl_coef == 0 or self.kl_horizon <= self.batch_size / 5):
            needed = "--kl-coef > 0, --kl-horizon > --batch-size / 5"
            raise ppo.UsageError(f"To adapt, beta needs {needed}.")

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(f"runs/{self.run_name}")


# === The math: pure functions ===


def earn_the_same(groups: Tensor) -> Tensor:
    """Which groups (B / G, 1) teach nothing, as all of their rewards (B / G, G) are equal."""
    return (groups == groups[:, :1]).all(dim=1, keepdim=True)


def group_advantages(rewards: Tensor, group_size: int, std: Spread) -> Tensor:
    """Advantages (B,) of responses with `rewards` (B,), in which groups follow one another.

    RLOO subtracts the mean of the others in the group, which gives G / (G - 1) times as much. The
    standard deviation is the sample's, plus 1e-4. A group of equal rewards gets 0.
    """
    groups = rewards.view(-1, group_size)
    # Detail G2: advantage relative to the group's mean [Shao et al. 2024]
    # The mean of the group replaces the value function: a response must beat its siblings.
    advantages = groups - groups.mean(dim=1, keepdim=True)
    advantages = advantages.masked_fill(earn_the_same(groups), 0.0)  # not what rounding leaves
    if std != "none":
        # Detail G3: division by the spread (std) [Shao et al. 2024; batch: Hu 2025]
        # Prompts whose rewards differ little then count as much as others (with batch they do not).
        spread = groups.std(dim=1, keepdim=True) if std == "group" else advantages.std()
        advantages = advantages / (spread + 1e-4)
    return advantages.flatten()


def token_weights(mask: Tensor, loss_norm: LossNorm) -> Tensor:
    """Weights (tokens,) of the tokens in `mask` (B, R); the loss is the mean of weighted terms.

    That mean is then the mean over responses of the sum over their tokens, divided by R (constant),
    by their own length (sequence), or by the mean length, so that all tokens count equally (token).
    """
    lengths = mask.sum(dim=1, keepdim=True)
    divisors = {
        "constant": torch.full_like(lengths, mask.shape[1]),  # R, whatever others have written
        "sequence": lengths,
        "token": lengths.float().mean(),
    }
    # Detail G5: length normalization (loss_norm) [Liu et al. 2025]
    # With its own length as divisor, a short response gives its tokens more weight than a long one.
    weights = mask.sum() / (len(mask) * divisors[loss_norm])
    return weights.expand_as(mask)[mask]


# === Stage 4: GRPO ===


class Rollout(NamedTuple):
    """A batch of responses and what the update needs; entries outside `mask` are ignored."""

    prompts: Tensor  # (B, P)
    responses: Tensor  # (B, R), truncated
    logprobs: Tensor  # (B, R), under the policy that sampled them
    ref_logprobs: Tensor  # (B, R), under the SFT model
    rewards: Tensor  # (B,)
    mask: Tensor  # (B, R), True at the tokens of a response


@torch.no_grad()
def collect(
    args: Args,
    agent: ppo.Agent,
    judges: ppo.Judges,
    prompts: Tensor,
    kl_coef: float,
    generator: Generator,
) -> tuple[Rollout, ppo.Metrics]:
    """Respond to prompts (B, P). Return responses, rewards with the KL penalty, and metrics."""
    task = judges.task
    sampled = agent.sample_responses(prompts, task.response_length, generator)
    responses, ended = ppo.truncate_responses(sampled, task.eos, task.earliest_eos)
    scores, metrics = ppo.score_responses(args, judges, prompts, responses, ended)
    mask = responses != ppo.PAD  # which is never sampled

    all_logprobs, _ = agent.get_logprobs_and_values(prompts, responses)
    ref_all_logprobs, _ = judges.reference.get_logprobs_and_values(prompts, responses)
    logprobs = ppo.log_probability(all_logprobs, responses)
    ref_logprobs = ppo.log_probability(ref_all_logprobs, responses)
    # Two estimates of the KL to the reference, as in PPO: k1, and one that is exact per position.
    kl = (logprobs - ref_logprobs).where(mask, 0.0).sum(dim=1)  # (B,)
    exact_kl = (all_logprobs.exp() * (all_logprobs - ref_all_logprobs)).sum(-1)
    metrics["objective/kl"] = kl.mean().item()
    metrics["objective/kl_exact"] = exact_kl.where(mask, 0.0).sum(1).mean().item()
    # Detail G6: KL penalty in the reward (kl_in_loss) [Ahmadian et al. 2024]
    # A penalty in the reward also counts a token's effect on later ones, as the KL's gradient does.
    rewards = scores - kl_coef * kl if args.kl_in_loss == "no" else scores
    return Rollout(prompts, responses, logprobs, ref_logprobs, rewards, mask), metrics


def grpo_loss(
    agent: ppo.Agent, mb: Rollout, advantages: Tensor, kl_coef: float, args: Args
) -> tuple[Tensor, ppo.Tensors]:
    """GRPO's loss on a minibatch of responses with advantages (B,), and the debug variables."""
    mask = mb.mask
    weights = token_weights(mask, args.loss_norm)
    all_logprobs, _ = agent.get_logprobs_and_values(mb.prompts, mb.responses)
    logprobs = ppo.log_probability(all_logprobs, mb.responses)
    logratio = logprobs - mb.logprobs
    if args.ratio == "sequence":
        total = logratio.where(mask, 0.0).sum(dim=1, keepdim=True)
        logratio = (total / mask.sum(dim=1, keepdim=True)).expand_as(mask)
    logratio = logratio[mask]  # (tokens,)
    # Detail G4: one advantage for all tokens of a response [Shao et al. 2024]
    # No credit is assigned to single tokens, so no values are needed.
    token_advantages = advantages[:, None].expand_as(mask)[mask]
    # The upper end of the range only matters for positive advantages, the lower for negative ones.
    clip = torch.where(token_advantages > 0, args.clip_high, args.clip_coef)
    pg_loss = ppo.policy_loss(logratio, weights * token_advantages, clip)
    # Means of k2 and k3 estimate KL(policy || reference) at the sampled positions, k3 without bias.
    ref_logratio = (mb.ref_logprobs - logprobs)[mask]
    k3 = ref_logratio.exp() - 1 - ref_logratio
    loss = pg_loss
    if args.kl_in_loss != "no":
        # Detail G7: KL penalty in the loss (kl_in_loss) [Shao et al. 2024]
        # Its gradient ignores later tokens: k3's is that of KL(SFT || policy), k2's of the reverse.
        estimate = k3 if args.kl_in_loss == "k3" else ref_logratio**2 / 2
        loss = pg_loss + kl_coef * (weights * estimate).mean()
    # Detail 12/37: debug variables [ppo2/model.py L115-116]
    # How far an update moves the policy shows a wrong step size before the reward does.
    both = torch.stack([logratio, token_advantages])
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/k3": k3.mean(),
        "losses/entropy": -(all_logprobs.exp() * all_logprobs).sum(-1)[mask].mean(),
        "losses/approx_kl": ppo.approx_kl(logratio),
        "check/update": torch.corrcoef(both)[0, 1].nan_to_num(),  # constant: 0
        "losses/clipfrac": ((logratio.exp() - 1).abs() > clip).float().mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


def train_grpo(args: Args, folder: Path, agent: ppo.Agent, judges: ppo.Judges) -> list[ppo.Metrics]:
    """Maximize the scores, with a penalty on the KL to the SFT model; return metrics per update."""
    optimizer = torch.optim.Adam(agent.policy.parameters(), fused=True)
    generator = ppo.stage_generator(args, "grpo")
    writer = SummaryWriter(str(folder), purge_step=1)
    kl_coef = 0.0 if args.kl_mode == "none" else args.kl_coef
    updates = []
    for iteration in trange(1, args.num_updates + 1, desc=folder.name, disable=None):
        # --- Collect: groups of responses and their rewards, with fixed weights ---
        prompts = judges.task.sample_prompts(args.batch_size // args.group_size, generator)
        # Detail G1: groups of responses (group_size) [Shao et al. 2024]
        # Responses of one policy to one prompt can be compared with each other.
        prompts = prompts.repeat_interleave(args.group_size, dim=0)
        rollout, metrics = collect(args, agent, judges, prompts, kl_coef, generator)

        # --- Advantages: within groups, which minibatches later split ---
        advantages = group_advantages(rollout.rewards, args.group_size, args.std)
        groups = rollout.rewards.view(-1, args.group_size)

        # --- Update ---
        remaining = 1 - (iteration - 1) / args.num_updates  # falls from 1 to 1 / num_updates
        # Detail R5: learning rate annealing (anneal_lr) [LHP: train_policy.py L172-173]
        # Small steps at the end average out the noise. The reward model's rate falls, too.
        learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate
        minibatch_metrics = []
        # Detail G8: few passes over a batch (update_epochs) [Shao et al. 2024]
        # Without values to fit, there is less to gain from more passes. The paper makes one, too.
        for _ in range(args.update_epochs):
            order = torch.randperm(args.batch_size, generator=generator)
            # Detail 6/37: minibatch updates (num_minibatches) [ppo2/ppo2.py L157-166]
            # Sampling is expensive, so a batch serves several steps.
            for indices in order.split(args.batch_size // args.num_minibatches):
                mb = Rollout(*(x[indices] for x in rollout))
                loss, loss_metrics = grpo_loss(agent, mb, advantages[indices], kl_coef, args)
                optimizer.zero_grad()
                loss.backward()
                # Detail 11/37: global gradient clipping (max_grad_norm) [ppo2/model.py L102-108]
                # Keeps one odd minibatch from moving the policy far; the direction stays.
                grad_norm = nn.utils.clip_grad_norm_(agent.policy.parameters(), args.max_grad_norm)
                optimizer.step()
                minibatch_metrics.append({**loss_metrics, "losses/grad_norm": grad_norm})

        # --- Log, adapt beta ---
        metrics = {
            **metrics,
            "objective/kl_coef": kl_coef,
            "groups/spread": groups.std(dim=1).mean().item(),
            "groups/without_spread": earn_the_same(groups).float().mean().item(),
            **ppo.means(minibatch_metrics),
            "charts/learning_rate": learning_rate,
        }
        ppo.check_metrics(metrics, iteration)
        ppo.log(writer, iteration, metrics)
        updates.append(metrics)
        # Detail R20: adaptive KL (kl_mode, target_kl) [LHP: train_policy.py L115-124]
        # Beta grows while the KL to the SFT model (the article: to the last policy) is too large.
        if args.kl_mode == "adaptive":
            kl_coef = ppo.proportional_kl_coef(
                kl_coef, metrics["objective/kl"], args.target_kl, args.batch_size, args.kl_horizon
            )
    writer.close()
    return updates


# === The pipeline ===


def evaluate(args: Args, agent: ppo.Agent, judges: ppo.Judges) -> tuple[ppo.Metrics, list[str]]:
    """Metrics and some texts of new responses of a policy; all policies get the same prompts."""
    generator = ppo.stage_generator(args, "evaluate")
    prompts = judges.task.sample_prompts(ppo.NUM_EVALUATED, generator)
    rollout, metrics = collect(args, agent, judges, prompts, 0.0, generator)
    metrics["objective/kl"] = metrics["objective/kl_exact"]  # which has less noise than k1
    lines = torch.cat([rollout.prompts, rollout.responses], dim=1)[:5]
    return metrics, [" ".join(judges.task.decode(line)[1:]) for line in lines]


@ppo.own_process()
def train(args: Args) -> dict[str, Any]:
    """Run the four stages, then evaluate; results and weights are saved in the run's folder.

    Returns `agent` of the first GRPO run; `updates`, of each GRPO run a dictionary of metrics per
    update; `results`, of each model its evaluation; `quality` of the reward model; and `args`.
    """
    args = ppo.start_run(args)
    judges, quality = ppo.make_judges(args)
    runs = {"grpo": args}
    if args.compare:
        runs["grpo-paper"] = dataclasses.replace(
            args, std="group", loss_norm="sequence", kl_in_loss="k3"
        )
        runs["grpo-no-kl"] = dataclasses.replace(args, kl_mode="none", kl_coef=0.0)

    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, judges.reference, judges)
    results["sft"] = {"method": "SFT", **metrics}
    for name, run in runs.items():
        agent = copy.deepcopy(judges.reference)
        updates[name] = train_grpo(run, args.run_dir / name, agent, judges)
        ppo.save_policy(args.run_dir / name / "checkpoint.pt", agent, updates[name])
        metrics, texts[name] = evaluate(run, agent, judges)
        results[name] = {
            "method": "GRPO",
            "reward": run.reward,
            "kl_mode": run.kl_mode,
            "kl_coef": run.kl_coef,
            "target_kl": run.target_kl,
            "kl_in_loss": run.kl_in_loss,
            "std": run.std,
            "loss_norm": run.loss_norm,
            **metrics,
            "objective/kl_coef": updates[name][-1]["objective/kl_coef"],  # at the end
        }
        agents[name] = agent
    ppo.report(args, quality, results, texts)
    return {
        "agent": agents["grpo"],
        "updates": updates,
        "results": results,
        "quality": quality,
        "args": args,
    }


def main() -> None:
    """Run what the command line says."""
    with ppo.command_line() as flags:
        train(tyro.cli(Args, args=flags))


if __name__ == "__main__":
    main()
