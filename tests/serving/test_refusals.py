"""What does not go together with a bounded cache is refused at start, with a sentence that says what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import checkpoint, generate, params, random_prompts, serving

from kvkeep.vllm import KEY, SEED, Refused, Serving

pytestmark = pytest.mark.vllm

KEEP: dict[str, Any] = {"policy": "random", "budget": 128, "buffer": 32}
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192,
    "max_position_embeddings": 4096,
}  # fmt: skip


def config(model: str | None = None, **options: Any) -> Any:
    """vLLM's own configuration of an engine, without the engine."""
    from vllm.engine.arg_utils import EngineArgs

    common: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 1024, "block_size": 32, "skip_tokenizer_init": True, "enforce_eager": True,
        "additional_config": {KEY: KEEP},
    }  # fmt: skip
    return EngineArgs(model or checkpoint("qwen3"), **{**common, **options}).create_engine_config()


def reasons(vllm_config: Any) -> list[str]:
    """Why it is refused, sentence by sentence."""
    from kvkeep.vllm.refusals import refuse

    with pytest.raises(Refused) as caught:
        refuse(vllm_config, Serving.parse(KEEP))
    start, _, rest = str(caught.value).partition(": ")
    assert start == "kvkeep cannot serve this configuration"
    return rest.split("; ")


def assert_said(found: list[str], words: str) -> None:
    assert any(re.search(words, reason) for reason in found), found


def folder(path: Path, **values: Any) -> str:
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


def test_a_plain_engine_is_not_refused() -> None:
    from kvkeep.vllm.refusals import refuse

    refuse(config(), Serving.parse(KEEP))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "speculative": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "leave out --speculative-config",
    ),
    "quantised": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8' is quantised: use auto"),
    "connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "leave out --kv-transfer-config",
    ),
    "offloading": ({"kv_offloading_size": 1.0}, "leave out --kv-offloading-size"),
    "fast-prefill": ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill is not supported: leave it out"),
    "hybrid": ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager .*leave it out"),
    "events": (
        {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"}},
        "leave out --kv-events-config",
    ),
    "embeddings": ({"enable_prompt_embeds": True}, "leave out --enable-prompt-embeds"),
    "pooling": ({"runner": "pooling"}, "runner 'pooling' generates nothing: leave kvkeep out"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    from vllm.config import KVEventsConfig, KVTransferConfig

    options, words = OPTIONS[name]
    made = {"kv_transfer_config": KVTransferConfig, "kv_events_config": KVEventsConfig}
    found = reasons(config(**{key: made[key](**v) if key in made else v for key, v in options.items()}))
    assert_said(found, words)


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "latent": (
        {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4,
            "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
            "first_k_dense_replace": 9,
        },
        "multi-head latent attention .*: use a model with grouped-query attention",
    ),
    "encoder": (
        {
            "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 128,
            "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "max_target_positions": 1024,
        },
        "encoder-decoder models are not supported: use a decoder-only model",
    ),
    "mamba": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16},
        "state-space layers are not tested: use a model whose layers are all attention",
    ),
    "jamba": (
        {"architectures": ["JambaForCausalLM"], "model_type": "jamba", "num_key_value_heads": 2},
        "state-space layers are not tested",
    ),
    "shared-layers": (
        {
            "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "num_key_value_heads": 2,
            "num_kv_shared_layers": 1, "head_dim": 32,
        },
        "layers of this model share their cache, which kvkeep does not support",
    ),
    "bloom": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 2, "n_head": 4},
        "ALiBi .*: use a model with rotary positions",
    ),
    "falcon": (
        {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": True},
        "ALiBi .*: use a model with rotary positions",
    ),
    "reference-window": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2, "rswa_window": 64},
        "reference sliding windows depend on slots: use another model",
    ),
    "prefix-images": (
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2,
            "is_mm_prefix_lm": True,
        },
        "images whose tokens see each other .*: use a text model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    values, words = MODELS[name]
    found = reasons(config(folder(tmp_path, **SMALL, **values)))
    assert len(found) == 1, found
    assert_said(found, words)


def test_context_parallelism(tmp_path: Path) -> None:
    one_head = folder(tmp_path, **SMALL, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_key_value_heads=1)
    words = "context parallelism spreads a request's slots over ranks: use tensor parallelism"
    assert reasons(config(one_head, tensor_parallel_size=2, decode_context_parallel_size=2)) == [words]
    made = config()
    made.parallel_config.prefill_context_parallel_size = 2  # vLLM's first model runner refuses it by itself
    assert reasons(made) == [words]


def test_dual_batch_overlap() -> None:
    made = config()
    made.parallel_config.enable_dbo = True  # vLLM for CPUs switches it off by itself
    assert reasons(made) == ["dual batch overlap splits a step's rows: leave out --enable-dbo"]


def test_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.vllm import refusals

    monkeypatch.setattr(refusals, "__version__", "0.33.1")
    assert reasons(config()) == ["vLLM 0.33.1 is not tested (tested: 0.32): install one, or remove kvkeep"]


def test_all_reasons_are_said_at_once() -> None:
    found = reasons(config(kv_cache_dtype="fp8", disable_hybrid_kv_cache_manager=True, enable_prompt_embeds=True))
    assert len(found) == 3


def test_blocks_that_do_not_divide_the_unit() -> None:
    from kvkeep.vllm.refusals import refuse

    serving_blocks = Serving.parse({**KEEP, "draw": "model", "unit": 32})
    with pytest.raises(Refused, match=r"unit=32 .*blocks of 128 slots do not divide it: pass --block-size 32"):
        refuse(config(block_size=128), serving_blocks)
    refuse(config(block_size=32), serving_blocks)


def test_the_second_model_runner() -> None:
    """It makes its logits processors of the configuration alone."""
    from kvkeep.vllm.tap import RequestTap

    with pytest.raises(Refused, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        RequestTap(config())


LEFT_OUT = """
from vllm import LLM

LLM({model!r}, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=1024, block_size=32,
    additional_config={{"kvkeep": {keep!r}}})
"""


def test_vllm_was_told_to_leave_the_plugin_out() -> None:
    """In a process of its own: here the plug-in is loaded."""
    program = LEFT_OUT.format(model=checkpoint("qwen3"), keep=KEEP)
    environment = {**os.environ, "VLLM_PLUGINS": "other"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode != 0
    says = "attention backend CPU_ATTN is not kvkeep's: VLLM_PLUGINS=other keeps vLLM from loading kvkeep's plug-in: "
    assert f"{says}add kvkeep to VLLM_PLUGINS, or unset it" in ended.stdout + ended.stderr


def test_a_backend_of_ours_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some other plug-in took its place."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from kvkeep.vllm import refusals

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(refusals, "get_attn_backend", lambda *_: TritonAttentionBackend)
    with pytest.raises(Refused, match=r"TRITON_ATTN is not kvkeep's: its plug-in was not loaded .* or another plug-in"):
        refusals.refuse_backend(config())


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "options", "words"),
    [
        (KEEP, {"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ({**KEEP, "draw": "model", "unit": 32}, {"block_size": 64}, "pass --block-size 32"),
        ({**KEEP, "policy": "snapkv"}, {}, "use one of .*random"),
        ({**KEEP, "scope": "total"}, {}, 'use scope="grow"'),
    ],
    ids=["hybrid", "block-size", "policy", "scope"],
)
def test_the_engine_does_not_start(keep: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words), serving(checkpoint("gemma3"), keep, **options):
        pass


def test_a_wrong_value_does_not_start_either() -> None:
    with pytest.raises(ValueError, match="did you mean budget"), serving(checkpoint("qwen3"), {"budgt": 128}):
        pass


@pytest.mark.parametrize("seed", [True, 1.5, "x", 2**63, None, [1]])
def test_a_request_with_a_seed_that_is_none_is_refused_and_the_engine_goes_on(engine: Any, seed: Any) -> None:
    from vllm.exceptions import VLLMValidationError  # HTTP 400 on a server

    with pytest.raises(VLLMValidationError, match=f"{SEED} must be a whole number of 64 bits, got"):
        engine.generate({"prompt_token_ids": [1, 2, 3]}, params(4, extra_args={SEED: seed}), use_tqdm=False)
    assert len(generate(engine, random_prompts(5), 4)[0]) == 4


@pytest.mark.parametrize("seed", [2**63, 2**64 - 2, -(2**63) - 1, 2**70])
def test_a_seed_of_the_sampling_is_vllm_s_own_business(seed: int) -> None:
    """vLLM asks every engine's requests, also of those that do not evict."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    from kvkeep.vllm.tap import seed_of

    validate_logits_processors_parameters(None, SamplingParams(seed=seed))
    found = seed_of(SamplingParams(seed=seed))
    assert -(2**63) <= found < 2**63
    assert (found - seed) % 2**64 == 0
    assert seed_of(SamplingParams(seed=seed, extra_args={SEED: 7})) == 7


def test_a_seed_beyond_64_bits_draws_like_the_one_it_is_folded_to(engine: Any) -> None:
    """So do the children of n = 2, which vLLM numbers from the seed on."""
    prompt = {"prompt_token_ids": random_prompts(20)[0]}
    common: dict[str, Any] = {"temperature": 1.0, "top_k": 1}  # greedy; vLLM wants that for n = 2
    asked = [
        params(300, seed=2**63 - 1, n=2, **common),
        params(300, 2**63 - 1, **common),
        params(300, -(2**63), **common),
    ]
    outputs = engine.generate([prompt] * 3, asked, use_tqdm=False)
    first, second, wanted_first, wanted_second = [list(o.token_ids) for output in outputs for o in output.outputs]
    assert (first, second) == (wanted_first, wanted_second)
    assert first != second


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with serving(checkpoint("qwen3"), KEEP) as llm:
        yield llm
