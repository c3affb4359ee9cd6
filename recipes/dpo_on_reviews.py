"""RLHF without a reward model: direct preference optimization (DPO) on ppo_rlhf_toy.py's reviews.

    python -m recipes.dpo_on_reviews

The task, the SFT model and the labeled pairs are those of ppo_rlhf_toy.py, to the bit. Then the
policy itself is fitted to the labels, as if beta * log(policy / SFT model) of a response were its
reward (Rafailov et al. 2023, arXiv 2305.18290). There is no reward model, no value function (the
agent's value head is not used) and no sampling, only Adam on a classifier's loss (the original uses
RMSprop, clips the gradients' norm at 10, and its learning rate does not fall). Means over 5 seeds:
gold ends at 1.25, with a KL of 3.2 nats to the SFT model (benchmark/pages/rlhf.md).

`--nll-coef` adds the negative log-likelihood (NLL) of the chosen response per token (Pang et al.
2024, arXiv 2404.19733; Llama 3). Plain DPO, `--nll-coef 0`, depends only on the difference of two
log-probabilities and lets both fall (Pal et al. 2024, arXiv 2402.13228). `--compare` adds plain
DPO, once more with a beta of 0.03, which over-optimizes.

D1-D8 are comments above the lines that implement them (DPO = eric-mitchell/
direct-preference-optimization@5815fab2). B = pairs in a batch, P = tokens of a prompt, R = tokens
of a response; `mb` is a minibatch.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import ppo_rlhf_toy as ppo

# === Settings ===

LIMITS = ppo.LIMITS | {"beta": (1e-9, 1e9)}


@dataclasses.dataclass(frozen=True)
class Args:
    # --- Experiment ---
    seed: int = 1  # random seed of the whole run
    run_name: str | None = None  # folder below runs/; by default script, seed, time
    device: Literal["cpu", "cuda"] = "cpu"  # where to compute; in our tables: cpu
    compare: bool = False  # also train without NLL, once more with a beta of 0.03

    # --- Supervised fine-tuning ---
    sft_documents: int = 20_000  # reviews that the grammar writes
    sft_steps: int = 700  # gradient steps
    sft_batch_size: int = 64  # documents per gradient step
    sft_learning_rate: float = 3e-3  # AdamW's step size, after a warm-up; falls to 0

    # --- Preferences ---
    num_pairs: int = 7000  # labeled pairs of responses [LHP: 4992]
    temperature: float = 1.0  # sampling temperature T [LHP: 0.7; 0.5 for CNN/DM]

    # --- DPO ---
    beta: float = 0.2  # strength of the pull to the SFT model [paper: 0.1]
    nll_coef: float = 0.05  # weight of the chosen response's NLL per token [Llama 3: 0.2]
    num_epochs: int = 2  # passes over the labeled pairs [paper: 1]
    batch_size: int = 32  # pairs per gradient step [paper: 64]
    learning_rate: ppo.StepSize = 5e-4  # Adam's largest step size [paper: RMSprop, 1e-6]
    warmup_steps: int = 20  # steps up to it; then it falls to 0 [paper: 150, then constant]

    def __post_init__(self) -> None:
        ppo.check_settings(self, LIMITS)

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(f"runs/{self.run_name}")


# === The math: pure functions ===


def dpo_loss(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> tuple[Tensor, ppo.Tensors]:
    """DPO's loss, a scalar (Rafailov et al. 2023), and the debug variables.

    Log-probabilities (2 B,), under the policy and under the reference, are those of the chosen
    responses, then those of the rejected ones to the same prompts.
    """
    # Detail D4: implicit reward (beta) [DPO: trainers.py L74-75]
    # The policy is optimal for exactly this reward, up to a constant per prompt.
    good, bad = (beta * (logprobs - ref_logprobs)).chunk(2)
    # Detail D5: logistic loss of the difference [DPO: trainers.py L73]
    # It is the loss of a reward model: the chosen response should earn more than the rejected one.
    loss = -F.logsigmoid(good - bad).mean()
    chosen, rejected = logprobs.chunk(2)
    # Detail D8: both log-probabilities logged [DPO: trainers.py L232, L241]
    # Both fall, most in plain DPO, which their difference does not show.
    metrics = {
        "losses/preference_loss": loss,
        "rewards/accuracy": (good > bad).float().mean(),
        "rewards/margin": (good - bad).mean(),
        "logprobs/chosen": chosen.mean(),
        "logprobs/rejected": rejected.mean(),
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


# === Stage 3: DPO ===


def pair_logprobs(agent: ppo.Agent, pairs: ppo.Pairs) -> Tensor:
    """Log-probabilities (2 B,) of the chosen responses of B pairs, then of the rejected ones."""
    # Detail D2: chosen and rejected in one pass [DPO: trainers.py L194-204]
    # One batch of both needs one forward pass instead of two.
    responses = torch.cat([pairs.chosen, pairs.rejected])
    prompts = torch.cat([pairs.prompts, pairs.prompts])
    all_logprobs, _ = agent.get_logprobs_and_values(prompts, responses)
    logprobs = ppo.log_probability(all_logprobs, responses)
    # Detail D3: sum over the tokens of a response [DPO: trainers.py L105]
    # The log-probability of a response is the sum over its tokens, not their mean.
    return logprobs.where(responses != ppo.PAD, 0.0).sum(dim=1)


def train_dpo(
    args: Args, folder: Path, agent: ppo.Agent, reference: ppo.Agent, pairs: ppo.Pairs
) -> list[ppo.Metrics]:
    """Fit a policy to pairs. Returns the metrics of each gradient step."""
    minibatches: list[Tensor] = []
    for epoch in range(args.num_epochs):
        generator = ppo.stage_generator(args, f"dpo epoch {epoch}")
        order = torch.randperm(len(pairs.prompts), generator=generator)
        minibatches += order.split(args.batch_size)
    optimizer = torch.optim.Adam(agent.policy.parameters(), fused=True)
    writer = SummaryWriter(str(folder), purge_step=1)
    updates = []
    for step, indices in enumerate(tqdm(minibatches, folder.name, disable=None), start=1):
        decay = 1 - (step - 1) / len(minibatches)
        # Detail D7: learning rate warm-up (learning_rate, warmup_steps) [DPO: trainers.py L253]
        # Adam's first steps are as large as later ones, but its averages come from few gradients.
        learning_rate = args.learning_rate * decay * min(1.0, step / args.warmup_steps)
        optimizer.param_groups[0]["lr"] = learning_rate
        mb = ppo.Pairs(*(x[indices] for x in pairs))
        logprobs = pair_logprobs(agent, mb)
        with torch.no_grad():
            ref_logprobs = pair_logprobs(reference, mb)
        loss, metrics = dpo_loss(logprobs, ref_logprobs, args.beta)
        # Detail D6: likelihood of the chosen response (nll_coef) [Pang et al. 2024]
        # DPO's loss only sees a difference. With this, the chosen response loses less probability.
        chosen_logprobs, _ = logprobs.chunk(2)
        nll = -(chosen_logprobs / (mb.chosen != ppo.PAD).sum(dim=1)).mean()
        loss = loss + args.nll_coef * nll
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(agent.policy.parameters(), 1.0)
        optimizer.step()
        metrics = {
            **{name: x.item() for name, x in metrics.items()},
            "losses/loss": loss.item(),
            "losses/nll": nll.item(),
            "losses/grad_norm": grad_norm.item(),
            "charts/learning_rate": learning_rate,
        }
        ppo.check_metrics(metrics, step)
        ppo.log(writer, step, metrics)
        updates.append(metrics)
    writer.close()
    return updates


# === The pipeline ===


@torch.no_grad()
def evaluate(
    args: Args, agent: ppo.Agent, reference: ppo.Agent, task: ppo.Task, held_out: ppo.Pairs
) -> tuple[ppo.Metrics, list[str]]:
    """Metrics of new responses to the same prompts and of held-out pairs; some of the texts."""
    generator = ppo.stage_generator(args, "evaluate")
    prompts = task.sample_prompts(ppo.NUM_EVALUATED, generator)
    responses = ppo.sample_truncated(agent, task, prompts, generator)
    logprobs, _ = agent.get_logprobs_and_values(prompts, responses)  # (B, R, V)
    ref_logprobs, _ = reference.get_logprobs_and_values(prompts, responses)
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(dim=-1)  # (B, R)
    of_pairs = pair_logprobs(agent, held_out)
    ref_of_pairs = pair_logprobs(reference, held_out)
    _, metrics = dpo_loss(of_pairs, ref_of_pairs, args.beta)
    metrics = {
        "objective/kl": kl.where(responses != ppo.PAD, 0.0).sum(dim=1).mean().item(),
        **{name: x.item() for name, x in metrics.items()},
        **ppo.describe(task, prompts, responses),
    }
    lines = torch.cat([prompts, responses], dim=1)[:5]
    return metrics, [" ".join(task.decode(line)[1:]) for line in lines]


@ppo.own_process()
def train(args: Args) -> dict[str, Any]:
    """Run the three stages and evaluate; results and weights are saved in the run's folder.

    Returns `agent` of the first DPO run; `updates`, of each DPO run the metrics of each step;
    `results`, of each model its evaluation; and `args`.
    """
    args = ppo.start_run(args)
    task, reference, preferences = ppo.make_preferences_of_sft(args)
    held_out = ppo.of_different_texts(preferences.held_out)
    runs = {"dpo": args}
    if args.compare:
        runs["dpo-plain"] = dataclasses.replace(args, nll_coef=0.0)
        runs["dpo-beta-0.03"] = dataclasses.replace(args, nll_coef=0.0, beta=0.03)

    agents, updates, results, texts = {}, {}, {}, {}
    metrics, texts["sft"] = evaluate(args, reference, reference, task, held_out)
    results["sft"] = {"method": "SFT", **metrics}
    for name, run in runs.items():
        # Detail D1: policy starts as the reference [Rafailov et al. 2023]
        # The policy starts as the SFT model, and an unchanged copy of it remains the reference.
        agent = copy.deepcopy(reference)
        updates[name] = train_dpo(run, args.run_dir / name, agent, reference, preferences.learned)
        ppo.save_policy(args.run_dir / name / "checkpoint.pt", agent, updates[name])
        metrics, texts[name] = evaluate(run, agent, reference, task, held_out)
        results[name] = {"method": "DPO", "beta": run.beta, "nll_coef": run.nll_coef, **metrics}
        agents[name] = agent
    quality = {
        "accuracy": results["dpo"]["rewards/accuracy"],
        "same_text_left_out": len(preferences.held_out.prompts) - len(held_out.prompts),
    }
    ppo.report(args, quality, results, texts)
    return {"agent": agents["dpo"], "updates": updates, "results": results, "args": args}


def main() -> None:
    """Run what the command line says."""
    with ppo.command_line() as flags:
        train(tyro.cli(Args, args=flags))


if __name__ == "__main__":
    main()
