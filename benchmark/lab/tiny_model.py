"""A language model with random weights, so that `diff` needs none that is downloaded; a game."""

import functools
import re
import string
import tempfile
from typing import Any

import gymnasium as gym
import torch

# After each message a line break, as in ChatML. Padding is EOS, as in many models.
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SPECIAL = ["<eos>", "<user>", "<assistant>", "<system>"]
WORDS = [*SPECIAL, *string.printable[:95], "\n", "12", "34"]


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """Where it is saved, as models at Hugging Face are; it is deleted when the process ends."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()
    place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    numbers = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.BPE(vocab=numbers, merges=[("1", "2"), ("3", "4")]))
    words.decoder = decoders.Fuse()
    ends = {"eos_token": SPECIAL[0], "pad_token": SPECIAL[0]}
    others = {"additional_special_tokens": SPECIAL[1:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **ends, **others)
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": len(WORDS), "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    settings = {"initializer_range": 0.1, "tie_word_embeddings": False} | sizes | heads | ids
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():  # it often writes digits, or ends its response
        model.lm_head.weight[: len(SPECIAL) + 10] *= 5
        model.lm_head.weight[1 : len(SPECIAL)] = 0
        model.lm_head.weight[0] = 0.8 * model.lm_head.weight[WORDS.index("9")]
    model.save_pretrained(place.name)
    tokenizer.save_pretrained(place.name)
    return place


class Guess(gym.Env):
    """Find a number from 1 to 8 in at most four turns, with a hint after each wrong guess.

    A model with random weights that writes digits does so now and then.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[dict], dict]:
        super().reset(seed=seed)
        self.number, self.turn = int(self.np_random.integers(1, 9)), 0
        system = {"role": "system", "content": "You guess numbers."}
        return [system, {"role": "user", "content": "Guess my number from 1 to 8."}], {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        found = re.findall(r"\d+", text)
        guess = int(found[-1][:9]) if found else 0
        if guess == self.number:
            return "", 1.0, True, False, {}
        hint = f"Higher than {guess}." if guess < self.number else f"Lower than {guess}."
        return hint, 0.0, False, self.turn == 4, {}
