"""Tiny models, tokenizers and a file of text for the tests of tasks that force a trace."""

from __future__ import annotations

import json
from functools import cache as memoize
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvkeep import Settings
from kvkeep.hf.engine import HFEngine
from kvkeep.testbed.vocab import VOCABULARY, tokenizer

LAYERS, HEADS = 3, 4
RANDOM = Settings("random", budget=120, buffer=8)
FULL = Settings("full")


@memoize
def tiny(vocabulary: int) -> Any:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocabulary,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS,
                head_dim=16,
                max_position_embeddings=2048,
                initializer_range=0.15,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=1,
            )
        ).eval()


def abacus(settings: Settings = RANDOM) -> HFEngine:
    return HFEngine(tiny(VOCABULARY), tokenizer(), settings)


@memoize
def bytes_tokenizer() -> Any:
    """One token a byte, and a chat template."""
    vocabulary = {"<pad>": 0, "<end>": 1} | {
        c: i + 2 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    hf: Any = transformers
    made = hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    made.chat_template = (
        "You are a bot.\n{% for m in messages %}USER {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}BOT {% endif %}"
    )
    return made


def prose(settings: Settings = RANDOM) -> HFEngine:
    return HFEngine(tiny(264), bytes_tokenizer(), settings)


def problems_file(folder: Path) -> str:
    """Twelve problems in GSM8K's form, about 70 bytes each."""
    rows = [
        {
            "question": f"Ann has {i} nuts?",
            "answer": f"She has {i}+1 = <<{i}+1={i + 1}>>{i + 1} nuts. " * 2 + f"\n#### {i}",
        }
        for i in range(12)
    ]
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def close(a: float, b: float, tolerance: float = 1e-4) -> bool:
    return abs(a - b) < tolerance
