"""A language model with random weights, its tokenizer, and environments of text for it."""

import string

import gymnasium as gym

EOS, USER, BOT, SYSTEM = SPECIAL = ["<eos>", "<user>", "<bot>", "<system>"]
LETTERS = [*string.digits, *string.ascii_lowercase, *" .?!+=\n()"]
MERGES = [("1", "2"), ("2", "3"), ("a", "b"), ("o", "k"), ("=", " ")]  # so "12" is one token
WORDS = [*SPECIAL, *LETTERS, *("".join(x) for x in MERGES)]
# A line break behind the end of a turn, as in ChatML.
TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'user': '<user>', 'assistant': '<bot>', 'system': '<system>'}[m['role']] }}"
    "{{ m['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    """Letters and a few pairs of letters. Padding is EOS, as in many models."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    numbers = {word: i for i, word in enumerate(WORDS)}
    bytes_to_text = Tokenizer(models.BPE(vocab=numbers, merges=MERGES))
    bytes_to_text.decoder = decoders.Fuse()
    options = {"eos_token": EOS, "pad_token": EOS, "additional_special_tokens": SPECIAL[1:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_to_text, **options)
    tokenizer.chat_template = template
    return tokenizer


def make_model(kind="Llama", **changes):
    """Two layers of 64 units. Weights are large, so that what is read matters; EOS is frequent."""
    import torch
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"vocab_size": len(WORDS), "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    settings = {"initializer_range": 0.15, "tie_word_embeddings": False} | sizes | ids | changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            model.get_output_embeddings().weight[0] *= 2.5
        return model


def write(folder, template=TEMPLATE, **changes):
    """Save both, as a model at Hugging Face is."""
    make_model(**changes).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return str(folder)


class Talk(gym.Env):
    """Episodes of one to three turns. Messages, their lengths and rewards depend on the seed."""

    def reset(self, *, seed=None, options=None):
        self.number, self.turn, self.heard = seed, 0, []
        return "what is " + " + ".join(f"{seed % 97}" * (1 + seed % 4)) + "?", {}

    def step(self, text):
        self.heard.append(text)
        self.turn += 1
        reward = 0.5 * self.turn - 0.25 * len(text) + self.number % 5
        last = self.turn == 1 + self.number % 3
        return "ok. " * (1 + (self.number + self.turn) % 3) + "go on", reward, last, False, {}


class Chatty(gym.Env):
    """Always two turns, with chat messages: a system prompt, and two messages in one reply."""

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        self.question = {"role": "user", "content": f"number {seed % 11}" + " a" * (seed % 6)}
        return [{"role": "system", "content": "be brief"}, self.question], {}

    def step(self, text):
        self.turn += 1
        hint = {"role": "user", "content": f"you said {len(text)} letters"}
        return [hint, self.question], float("a" in text), False, self.turn == 2, {}
