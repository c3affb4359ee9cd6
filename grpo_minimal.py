# /// script
# requires-python = ">=3.11"
# dependencies = ["tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Group relative policy optimization (GRPO) with a verifiable reward: all of it in about 200 lines.

    python grpo_minimal.py  # needs tensorboard torch tqdm tyro

A tiny GPT learns to add. First it imitates a pupil who forgets half the carries (supervised
fine-tuning, SFT). Then it writes a group of responses to each prompt. A right one earns 1, a wrong
one 0. Training makes a response likelier if its reward is above the mean of its group, less likely
if it is below. Clipping keeps the model close to the one that wrote the responses. One prompt in
ten is held out: pass@1 is the share of right responses to these, pass@16 that of prompts with a
right one among 16. A run takes 40 seconds on one CPU core. DETAILS.md explains the tags N/37, R, G.

- Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): the default
- GRPO (Shao et al. 2024, arXiv 2402.03300): --scale-rewards --loss-norm sequence --kl-coef 0.04
- DAPO (Yu et al. 2025): --scale-rewards --loss-norm token --clip-high 0.28 --dynamic-sampling
- GSPO (Zheng et al. 2025; clips 3e-4, 4e-4): --scale-rewards --loss-norm sequence --ratio sequence
- RLOO's baseline (Ahmadian et al. 2024, arXiv 2402.14740): --baseline others
"""

import copy
import time
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import trange

LossNorm = Literal["constant", "sequence", "token"]


@dataclass(frozen=True)
class Args:
    seed: int = 1  # random seed of the whole run [TRL: seed]
    device: Literal["cpu", "cuda"] = "cpu"  # where to compute; in our tables: cpu
    sft_steps: int = 700  # gradient steps of supervised fine-tuning [TRL, SFTConfig: max_steps]
    num_updates: int = 150  # batches, each with an update [TRL: max_steps / steps_per_generation]
    num_prompts: int = 16  # prompts per batch [TRL: generation_batch_size / num_generations]
    group_size: int = 8  # responses to each of them, G [TRL: num_generations]
    num_minibatches: int = 4  # gradient steps per batch [TRL: steps_per_generation]
    learning_rate: float = 7e-4  # Adam's step size, falls linearly to 0 [TRL: learning_rate]
    clip_coef: float = 0.2  # clip the ratio of probabilities, new/old, at 1 - this [TRL: epsilon]
    clip_high: float = 0.2  # and at 1 + this [TRL: epsilon_high]
    ratio: Literal["token", "sequence"] = "token"  # one for each [TRL: importance_sampling_level]
    baseline: Literal["group", "others"] = "group"  # mean of all G, or of the other G - 1 [RLOO]
    scale_rewards: bool = False  # divide advantages by the group's std [TRL: scale_rewards]
    dynamic_sampling: bool = False  # leave out groups of equal rewards [verl: filter_groups]
    loss_norm: LossNorm = "constant"  # divide by the maximum, own or mean length [TRL: loss_type]
    kl_coef: float = 0.0  # weight of the KL to the SFT model in the loss, beta [TRL: beta]
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # k1: noise [verl: kl_loss_type; TRL: k3]

    def __post_init__(self):
        for name in ("learning_rate", "clip_coef", "clip_high", "kl_coef"):
            assert 0 <= getattr(self, name) < torch.inf, f"--{name} must be at least 0, and finite"
        for name in ("num_prompts", "num_minibatches", "num_updates"):
            assert getattr(self, name) >= 1, f"--{name.replace('_', '-')} must be at least 1"
        assert self.group_size >= 2, "--group-size must be at least 2"


# The task: "27+58=" is followed by "58.", the sum from its last digit on, and EOS.
PLUS, EQUALS, EOS, PAD = 10, 11, 12, 13  # tokens; 0 to 9 are the digits
P, R = 6, 4  # tokens of a prompt, and of a response with its padding


def solve(prompts, forgotten=0.0):  # (B, P)
    """Responses (B, R) of a pupil who adds by hand and forgets this share of the carries."""
    tokens, carry = [], 0
    for place in (1, 0):  # the ones of both numbers, then the tens
        total = prompts[:, place] + prompts[:, place + 3] + carry
        tokens.append(total % 10)
        carry = (total >= 10) & (torch.rand(len(prompts), device=prompts.device) >= forgotten)
    return torch.stack([*tokens, torch.where(carry, 1, EOS), torch.where(carry, EOS, PAD)], dim=1)


class GPT(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(PAD + 1, width), nn.Embedding(P + R, width)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, **options)
        norm = nn.LayerNorm(width)
        self.layers = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, PAD)  # for all tokens but PAD, which is never written

    def forward(self, tokens):  # (B, L) -> log-probabilities of what follows each, (B, L, PAD)
        length, device = tokens.shape[1], tokens.device
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, device)
        return self.head(self.layers(x, causal, is_causal=True)).log_softmax(dim=-1)

    def logprobs(self, prompts, responses):  # of the tokens of responses, (B, R); 0 for padding
        following = self(torch.cat([prompts, responses], dim=1))[:, P - 1 : -1].transpose(1, 2)
        return -nn.functional.nll_loss(following, responses, ignore_index=PAD, reduction="none")


@torch.no_grad()
def respond(model, prompts, tries):
    """Repeated prompts (B, P), responses (B, R), PAD after EOS, and rewards (prompts, tries)."""
    tokens = prompts = prompts.repeat_interleave(tries, dim=0)
    for _ in range(R):
        distinct, which = tokens.unique(dim=0, return_inverse=True)  # each text once: faster
        chances = model(distinct)[:, -1].exp()
        assert chances.isfinite().all(), "the model has diverged: lower --learning-rate"
        drawn = torch.multinomial(chances[which], 1)  # (B, 1)
        tokens = torch.cat([tokens, drawn.where(tokens[:, -1:] < EOS, PAD)], dim=1)
    responses = tokens[:, P:]
    return prompts, responses, (responses == solve(prompts)).all(dim=1).view(-1, tries).float()


def are_equal(rewards):  # (B / G, G) -> for each group, whether there is nothing to learn from it
    return (rewards == rewards[:, :1]).all(dim=1, keepdim=True)


def group_advantages(rewards, args):
    """Advantages (B, 1) of responses that earned rewards (B / G, G)."""
    # Detail G2: advantage relative to the group's mean
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = advantages.masked_fill(are_equal(rewards), 0.0)  # not what rounding leaves
    if args.baseline == "others":
        # Extra: leave-one-out baseline
        # A response should not count in its own baseline. Here that changes only the scale.
        advantages *= args.group_size / (args.group_size - 1)  # = rewards - mean of the others
    if args.scale_rewards:
        # Detail G3: division by the spread
        advantages /= rewards.std(dim=1, keepdim=True) + 1e-4
    return advantages.view(-1, 1)


def grpo_loss(model, prompts, responses, old, ref, advantages, args):
    """A scalar. old, ref: log-probabilities (B, R) under the model that wrote, the SFT model."""
    mask = responses != PAD  # (B, R)
    lengths = mask.sum(dim=1, keepdim=True)  # (B, 1)
    new = model.logprobs(prompts, responses)  # (B, R)
    logratio = new - old
    if args.ratio == "sequence":
        # Extra: one ratio per sequence
        # The reward is for the response as a whole, so that is clipped, by its mean log-ratio.
        logratio = (logratio.sum(dim=1, keepdim=True) / lengths).expand_as(new)
    ratio = logratio.exp()  # how much likelier the token has become since it was written
    # Detail 8/37: clipped surrogate objective
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_high)
    # Detail G4: one advantage for all tokens of a response
    gain = torch.min(ratio * advantages, clipped_ratio * advantages)  # to be maximized
    # As a loss, k1 is no penalty: its gradient is 0 on average. That of k2 is the KL's per token.
    kl = {"k1": new - ref, "k2": (new - ref) ** 2 / 2, "k3": (ref - new).exp() - 1 - (ref - new)}
    # Detail G7: KL penalty in the loss
    losses = args.kl_coef * kl[args.kl_estimator] - gain
    # Detail G5: length normalization
    divisor = {"constant": len(mask) * R, "sequence": len(mask) * lengths, "token": mask.sum()}
    return (losses * mask / divisor[args.loss_norm]).sum()


def train(args):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # enough for a network of this size
    torch.manual_seed(args.seed)
    writer = SummaryWriter(f"runs/sums__grpo_minimal__{args.seed}__{time.time_ns()}")
    digits, plus, equals = torch.arange(10), torch.tensor([PLUS]), torch.tensor([EQUALS])
    prompts = torch.cartesian_prod(digits, digits, plus, digits, digits, equals)  # (10000, P)
    held_out, prompts = prompts[torch.randperm(len(prompts))].to(args.device).split([1000, 9000])

    # --- Supervised fine-tuning ---
    model = GPT().to(args.device)
    adam = torch.optim.AdamW(model.parameters())
    for step in trange(args.sft_steps, desc="SFT", disable=None):  # a bar, in a terminal
        adam.param_groups[0]["lr"] = 3e-3 * min(1, step / 50) * (1 - step / args.sft_steps)
        mb_prompts = prompts[torch.randint(len(prompts), (64,))]
        adam.zero_grad()
        model.logprobs(mb_prompts, solve(mb_prompts, forgotten=0.5)).mean().neg().backward()
        adam.step()
    reference = copy.deepcopy(model)
    results, updates = {"sft": respond(model, held_out, 16)[2]}, []
    adam = torch.optim.Adam(model.parameters())
    for update in (progress := trange(args.num_updates, desc="GRPO", disable=None)):
        # --- Collect: G responses to each prompt ---
        b_prompts = prompts[torch.randint(len(prompts), (args.num_prompts,))]
        # Detail G1: groups of responses
        b_prompts, responses, rewards = respond(model, b_prompts, args.group_size)
        old, ref = (x.logprobs(b_prompts, responses).detach() for x in (model, reference))
        batch = b_prompts, responses, old, ref, group_advantages(rewards, args)
        has_spread = ~are_equal(rewards).repeat_interleave(args.group_size)  # (B,)

        # --- Update: gradient steps on minibatches ---
        # Detail R5: learning rate annealing
        adam.param_groups[0]["lr"] = args.learning_rate * (1 - update / args.num_updates)
        order = torch.randperm(len(responses), device=args.device)  # (B,)
        if args.dynamic_sampling:
            # Extra: dynamic sampling
            # Equal rewards teach nothing. DAPO draws other groups instead; here batches shrink.
            order = order[has_spread[order]]
        # Detail 6/37: minibatch updates
        for mb in [x for x in order.chunk(args.num_minibatches) if len(x)]:  # none may be left
            adam.zero_grad()
            grpo_loss(model, *(x[mb] for x in batch), args).backward()
            # Detail 11/37: global gradient clipping
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            adam.step()
        metrics = {"reward": rewards.mean(), "kl": (old - ref).sum(dim=1).mean()}
        metrics["groups_without_spread"] = 1 - has_spread.float().mean()
        updates.append({name: x.item() for name, x in metrics.items()})
        for name, x in updates[-1].items():
            writer.add_scalar(f"grpo/{name}", x, update)
        progress.set_postfix(updates[-1])
    writer.close()
    results["grpo"] = respond(model, held_out, 16)[2]
    torch.set_num_threads(threads)
    for name, x in results.items():
        print(f"{name:4}  pass@1 {x.mean():.3g}  pass@16 {x.amax(dim=1).mean():.3g}")
    print(f"Logs: {writer.log_dir}")
    return {"model": model, "reference": reference, "results": results, "updates": updates}


if __name__ == "__main__":
    train(tyro.cli(Args))
