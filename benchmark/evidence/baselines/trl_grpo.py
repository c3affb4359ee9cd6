"""TRL's GRPOTrainer on the sums of `ppo_llm.py` (pip install trl==1.16.0), for runs and for speed.

The same model, prompts, order of prompts, reward, groups, lengths, optimizer, number of gradient
steps and first step size as `ppo_llm.py --advantages group --float32`. TRL's step size falls after
each gradient step, ours after each iteration. TRL's Adam would change weights in bfloat16, ours
does not, so both compute in float32. Such a run leaves a checkpoint like those of
our scripts, but only at its end: an interrupted run starts again.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

import ppo_llm

EPISODES, GROUP, MINIBATCHES = 64, 8, 4  # the defaults of ppo_llm.py


@dataclasses.dataclass
class Args:
    num_iterations: int = 8  # batches of episodes
    learning_rate: float = 2e-5  # Adam's step size, falls linearly to 0
    seed: int = 1  # random seed
    run_name: str = "run"  # the checkpoint is in runs/RUN_NAME
    resume: Path | None = None  # a run that has a checkpoint is over


class Record:
    """The reward of our task, and what it was, as our scripts save it."""

    __name__ = "sums"  # in TRL's log

    def __init__(self) -> None:
        self.episodes: list[dict[str, float]] = []
        self.updates: list[dict[str, float]] = []
        self.start_time = time.perf_counter()

    def __call__(self, completions: list, completion_ids: list, seed: list, **_: Any) -> list:
        rewards = []
        step = len(self.episodes) + len(completions)
        for messages, tokens, each in zip(completions, completion_ids, seed):
            env = ppo_llm.Sums()
            env.reset(seed=each)
            rewards.append(env.step(messages[0]["content"])[1])
            ended = {"return": rewards[-1], "length": len(tokens)}
            self.episodes.append({"global_step": step, **ended})
        self.updates.append({"global_step": step})
        return rewards


def sums(args: Args) -> list[dict[str, Any]]:
    """A prompt for each group, in the order in which `ppo_llm.py` draws them."""
    rows = []
    for iteration in range(1, args.num_iterations + 1):
        rng = np.random.default_rng([args.seed, iteration])
        for seed in rng.integers(ppo_llm.HELD_OUT, size=EPISODES // GROUP).tolist():
            rows.append({"prompt": ppo_llm.Sums().reset(seed=seed)[0], "seed": seed})
    return rows


def main() -> None:
    """Train, and save what happened."""
    args = tyro.cli(Args)
    if args.resume:
        return
    from datasets import Dataset  # comes with TRL
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, chat, _ = ppo_llm.load_model(ppo_llm.Args(float32=True), torch.device("cpu"))
    record = Record()

    class Times(TrainerCallback):
        """Notes when an iteration has ended."""

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % MINIBATCHES == 0:
                now = time.perf_counter()
                record.updates[-1]["charts/SPS"] = EPISODES / (now - record.start_time)
                record.start_time = now

    config = GRPOConfig(
        output_dir=f"runs/{args.run_name}",
        per_device_train_batch_size=EPISODES // MINIBATCHES,
        steps_per_generation=MINIBATCHES,
        num_generations=GROUP,
        max_completion_length=8,
        max_steps=MINIBATCHES * args.num_iterations,
        learning_rate=args.learning_rate,
        adam_beta2=0.95,
        shuffle_dataset=False,
        seed=args.seed,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=chat.tokenizer,
        reward_funcs=record,
        args=config,
        train_dataset=Dataset.from_list(sums(args)),
        callbacks=[Times()],
    )
    record.start_time = time.perf_counter()
    trainer.train()
    saved = {"episodes": record.episodes, "updates": record.updates}
    folder = Path("runs", args.run_name)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"args": dataclasses.asdict(args), **saved}, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
