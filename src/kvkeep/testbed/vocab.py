"""The words of abacus, its tokenizer and its chat template."""

from __future__ import annotations

import string
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

PAD, EOS = "<pad>", "<eos>"
MODES = ("r0", "r8", "r4", "r2", "r1")
MAX_LINES = 40
VARIABLES = tuple(string.ascii_letters)
DIGITS = tuple(string.digits)
ROLES = ("<user>", "<assistant>", "<think>", "</think>")
SIGNS = ("=", "+", "-", ";", ",", ".", ":", "?", "*")
NAMES = ("recap", "answer", "note", "passcode")
NUMBERS = tuple(f"#{i}" for i in range(1, MAX_LINES + 1))
WORDS = (PAD, EOS, *ROLES, *MODES, *SIGNS, *NAMES, *NUMBERS, *DIGITS, *VARIABLES)
#: Rows of the embedding: a multiple of 8, the last ones are never used.
VOCABULARY = 136
IDS = {word: i for i, word in enumerate(WORDS)}

#: A user's message opens the trace; what follows an answer is a plain continuation.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user> {{ message['content'] }}"
    "{% else %} <assistant> <think> {{ message['content'] }} {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %} <assistant> <think>{% endif %}"
)

hf: Any = transformers


def encode(text: str) -> list[int]:
    """Token ids of a text whose words are separated by spaces.

    Raises:
        ValueError: a word is not in the vocabulary.
    """
    unknown = [word for word in text.split() if word not in IDS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a word of abacus")
    return [IDS[word] for word in text.split()]


def encode_chat(prompt: str) -> list[int]:
    """Token ids of a user's message as the chat template renders it, the trace opened."""
    return encode(f"<user> {prompt} <assistant> <think>")


def tokenizer() -> Any:
    """A transformers tokenizer with these words and this chat template, padding on the left."""
    backend = Tokenizer(models.WordLevel(vocab=dict(IDS), unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
