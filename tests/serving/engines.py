"""Engines for tests: tiny random models in folders, vLLM in this process, and the transformers engine beside it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvkeep.engine import Sampling
from kvkeep.hf.engine import HFEngine
from kvkeep.settings import Settings
from kvkeep.vllm import KEY, SEED

VOCAB = 512
CONTEXT = 4096
Tokens = list[int]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
    # Large enough that greedy traces wander and one wrong entry changes them.
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _config(kind: str) -> transformers.PretrainedConfig:
    if kind == "qwen3":
        return transformers.Qwen3Config(**_COMMON, num_hidden_layers=3)
    if kind == "llama":
        return transformers.LlamaConfig(**_COMMON, num_hidden_layers=3)
    if kind == "head-80":  # no multiple of 32: the layout that vLLM calls vec16
        return transformers.Qwen3Config(**{**_COMMON, "head_dim": 80}, num_hidden_layers=3)
    if kind in ("gemma3", "two-groups"):  # sliding windows beside full attention
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        if kind == "two-groups":  # vLLM's groups are as large as the smallest kind, so full attention has two
            layers = ["sliding_attention", "full_attention", "full_attention"] * 2
        return transformers.Gemma3TextConfig(
            **_COMMON, num_hidden_layers=6, layer_types=layers, sliding_window=64, query_pre_attn_scalar=32
        )
    raise ValueError(kind)


@cache
def checkpoint(kind: str) -> str:
    """Folder of a tiny random model; made once a machine."""
    folder = Path(tempfile.gettempdir()) / f"kvkeep-tiny-{kind}-{transformers.__version__}-2"
    with FileLock(f"{folder}.lock"):
        if not (folder / "model.safetensors").exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(_config(kind))
            model.save_pretrained(folder)
    return str(folder)


@contextmanager
def serving(model: str, keep: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A vLLM engine in this process, stopped at the end; ``keep`` is kvkeep's configuration, None is stock vLLM."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    common: dict[str, Any] = {
        "dtype": "float32", "max_model_len": CONTEXT, "enforce_eager": True, "block_size": 32, "max_num_seqs": 16,
        "disable_log_stats": True, "seed": 0,
    }  # fmt: skip
    extra = {} if keep is None else {"additional_config": {KEY: keep}}
    llm = LLM(model, skip_tokenizer_init=True, **{**common, **extra, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def params(length: int, sample: int | None = None, **values: Any) -> Any:
    """Greedy sampling of exactly ``length`` tokens."""
    from vllm import SamplingParams

    extra = {} if sample is None else {SEED: sample}
    return SamplingParams(
        **{
            "temperature": 0,
            "max_tokens": length,
            "ignore_eos": True,
            "detokenize": False,
            "extra_args": extra,
            **values,
        }
    )


def generate(llm: Any, prompts: Sequence[Tokens], length: int | Sequence[int], **values: Any) -> list[Tokens]:
    """Greedy traces of all prompts, submitted together."""
    lengths = [length] * len(prompts) if isinstance(length, int) else list(length)
    inputs = [{"prompt_token_ids": list(p)} for p in prompts]
    outputs = llm.generate(inputs, [params(n, **values) for n in lengths], use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


class _Tokenizer:
    pad_token_id, eos_token_id = 0, None

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


@cache
def _model(path: str, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


def reference(
    path: str, keep: dict[str, Any] | None, prompts: Sequence[Tokens], length: int, samples: Sequence[int] | None = None
) -> list[Tokens]:
    """The same traces on the transformers engine, one request at a time, float32."""
    values = {"policy": "full"} if keep is None else {"scope": "grow", **keep}
    for name in ("admission", "moving", "one_by_one", "max_prompt"):
        values.pop(name, None)
    engine = HFEngine(_model(path, "float32"), _Tokenizer(), Settings.of(**values))  # type: ignore[arg-type]
    sampling = Sampling(max_new_tokens=length, ignore_end=True)
    numbers = [0] * len(prompts) if samples is None else samples
    return [engine.generate([p], [n], sampling)[0].tokens for p, n in zip(prompts, numbers, strict=True)]


def differences(
    kind: str, keep: dict[str, Any], prompts: Sequence[Tokens], length: int, **options: Any
) -> list[int | None]:
    """Where each trace on vLLM first differs from that of the transformers engine; None where it does not."""
    with serving(checkpoint(kind), keep, **options) as llm:
        ours = generate(llm, prompts, length)
    return first_difference(ours, reference(checkpoint(kind), keep, prompts, length))


def random_prompts(*lengths: int, seed: int = 1) -> list[Tokens]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def first_difference(one: Sequence[Tokens], other: Sequence[Tokens]) -> list[int | None]:
    """Where each pair of traces first differs; None where it does not."""
    found: list[int | None] = []
    for a, b in zip(one, other, strict=True):
        where = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        found.append(min(len(a), len(b)) if where is None and len(a) != len(b) else where)
    return found
