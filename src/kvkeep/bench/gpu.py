"""``python -m kvkeep.bench.gpu --out FILE``: invariants and benchmarks on a CUDA GPU.

Needs torch, transformers and Triton, and nothing else; downloads nothing. Models are random and made
in code. ``--device cpu`` runs the same checks, smaller, on a machine without a GPU. Exit status: 0 if
everything holds, 1 if a check fails, 2 if there is no such device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..draws import rank_keys, round_words
from ..hf.cache import EvictCache
from ..hf.contract import CACHE_ARGUMENT
from ..report.files import write_json
from ..settings import Settings
from . import decode, round
from .common import record, tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Found = dict[str, Any]
LIMIT_S = 330  # after this many seconds no further benchmark starts


def _forced(model: PreTrainedModel, cache: Any, ids: Tensor, prompt: int) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, T, vocabulary] of a text fed token by token after its prompt, and what each step left cached."""
    parts, kept = [], []
    for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        parts.append(model(input_ids=ids[:, first:last], use_cache=True, **{CACHE_ARGUMENT: cache}).logits)
        if isinstance(cache, EvictCache) and cache.settings.track_positions:
            kept.append(cache.kept_positions())
    return torch.cat(parts, dim=1), kept


def _text(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    return decode.random_ids(model, rows, length, seed=1)


def within_budget(device: torch.device, attention: str, dtype: torch.dtype) -> Found:
    """Invariant 1: a budget that is never reached changes no bit."""
    from transformers import DynamicCache

    model = tiny_model(device, dtype, attn_implementation=attention)
    ids = _text(model, 2, 160)
    plain, _ = _forced(model, DynamicCache(config=model.config), ids, 32)
    cache = Settings(policy="random", budget=256, buffer=64).cache(model)
    bounded, _ = _forced(model, cache, ids, 32)
    cache.close()
    return {"ok": torch.equal(plain, bounded), "value": float((plain - bounded).abs().max()), "limit": 0.0}


def _masks(kept: list[Tensor], prompt: int, length: int, groups: int, device: torch.device) -> Tensor:
    """What each head saw at each step: bool [L, heads, T, T], from the positions left after each forward."""
    layers, heads, _ = kept[0].shape
    seen = torch.zeros(layers, heads, length, length, dtype=torch.bool)
    seen[:, :, :prompt, :prompt] = torch.ones(prompt, prompt, dtype=torch.bool).tril()
    for token, positions in enumerate(kept[1:], prompt):
        seen[:, :, token].scatter_(-1, positions.to(torch.int64), True)
    return seen.repeat_interleave(groups, dim=1).to(device)


def _masked(model: PreTrainedModel, ids: Tensor, seen: Tensor) -> Tensor:
    """One plain forward without a cache, each attention layer under its own mask."""

    def under(allowed: Tensor) -> Callable[..., Any]:
        mask = torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, torch.finfo(torch.float32).min)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "attention_mask": mask.unsqueeze(0)}

        return hook

    handles = [
        layer.self_attn.register_forward_pre_hook(under(seen[i]), with_kwargs=True)
        for i, layer in enumerate(model.model.layers)
    ]
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits
    finally:
        for handle in handles:
            handle.remove()


def after_rounds(device: torch.device, attention: str) -> Found:
    """Invariant 2: logits after rounds equal one forward under a mask for every head (float32)."""
    model = tiny_model(device, attn_implementation=attention)
    ids = _text(model, 1, 200)
    settings = Settings(policy="random", budget=64, buffer=16, track_positions=True)
    cache = settings.cache(model)
    bounded, kept = _forced(model, cache, ids, 24)
    rounds = cache.stats()["rounds"][0]
    cache.close()
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    plain = _masked(model, ids, _masks(kept, 24, ids.shape[1], groups, device))
    worst = float((plain - bounded).abs().max())
    return {"ok": worst <= 1e-4 and rounds >= 3, "value": worst, "limit": 1e-4, "rounds": rounds}


def kept_sets(device: torch.device, policy: str) -> Found:
    """Invariants 3 and 5: complete prompt, no duplicates, exactly K + what came since; the same sets as on a CPU."""
    sets = []
    for where in (device, torch.device("cpu")):
        model = tiny_model(where)
        with torch.inference_mode():
            cache = Settings(policy=policy, budget=64, buffer=16, protect="prompt").cache(model)
            _forced(model, cache, _text(model, 3, 150), 24)
            sets.append(torch.stack([cache.kept_positions(row) for row in range(3)]))
            stats = cache.stats()
            cache.close()
    mine, other = sets
    whole = torch.equal(mine[..., :24], torch.arange(24, dtype=mine.dtype).expand_as(mine[..., :24]))
    newest = bool((mine[..., -16:] == torch.arange(134, 150, dtype=mine.dtype)).all())
    distinct = bool((mine[..., 1:] > mine[..., :-1]).all()) and mine.shape[-1] == stats["entries"][0]
    different = int((mine != other).sum())
    return {"ok": whole and newest and distinct and different == 0, "value": different, "limit": 0}


def draw_bits(device: torch.device) -> Found:
    """The hash gives the same bits on every device."""
    keys = []
    for where in (device, torch.device("cpu")):
        numbers = [torch.arange(n, dtype=torch.int64, device=where) for n in (3, 5, 8, 3)]
        streams = numbers[0] * 0x1234567890ABCDEF - 7
        words = round_words(2**40 + 3, streams, *numbers[1:])
        keys.append(rank_keys(words, torch.arange(5000, dtype=torch.int32, device=where)).cpu())
    return {"ok": torch.equal(*keys), "value": int((keys[0] != keys[1]).sum()), "limit": 0}


def same_moves(device: torch.device) -> Found:
    """The engine's moves leave exactly the entries that a compaction of the same draws gathers."""
    worst = 0
    for policy in ("random", "streaming"):
        cache = round.InPlace(Settings(policy=policy, budget=256, buffer=32), round.Shape(2, 3, 4, 64), device)
        cache.draw()
        cache.plan()
        compaction = round.Compaction(cache)
        compaction.choose()
        pairs = []
        for number, layer in enumerate(cache.layers):
            for tensor in (layer.k, layer.v):
                assert tensor is not None
                index = compaction.index[number].unsqueeze(-1).expand(-1, -1, -1, 64)
                pairs.append((tensor, tensor.gather(2, index)))
        cache.move()
        for tensor, gathered in pairs:
            left, right = (x[:, :, :256].float().sort(dim=2).values for x in (tensor, gathered))
            worst += int((left != right).sum())
    return {"ok": worst == 0, "value": worst, "limit": 0}


def flash_close(device: torch.device, flash: str) -> Found:
    """bfloat16 after rounds: flash attention and sdpa agree to bfloat16's precision."""
    logits = []
    for attention in (flash, "sdpa"):
        model = tiny_model(device, torch.bfloat16, attn_implementation=attention)
        cache = Settings(policy="random", budget=64, buffer=16).cache(model)
        logits.append(_forced(model, cache, _text(model, 2, 150), 24)[0].float())
        cache.close()
    worst = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
    return {"ok": worst <= 0.05, "value": worst, "limit": 0.05}


def flash_name(device: torch.device) -> str | None:
    """Flash attention under the name transformers gives it, if it is installed (kernels would be downloaded)."""
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else None


def checks(device: torch.device) -> dict[str, Callable[[], Found]]:
    """Every check by name."""
    found: dict[str, Callable[[], Found]] = {
        "draws: the same bits as on a CPU": lambda: draw_bits(device),
        "moves: the entries a compaction keeps": lambda: same_moves(device),
        "budget not reached: identical (sdpa, float32)": lambda: within_budget(device, "sdpa", torch.float32),
        "budget not reached: identical (sdpa, bfloat16)": lambda: within_budget(device, "sdpa", torch.bfloat16),
        "after rounds: equals per-head masks (sdpa)": lambda: after_rounds(device, "sdpa"),
        "after rounds: equals per-head masks (eager)": lambda: after_rounds(device, "eager"),
        "kept sets: as on a CPU (random)": lambda: kept_sets(device, "random"),
        "kept sets: as on a CPU (recency)": lambda: kept_sets(device, "recency"),
    }
    flash = flash_name(device)
    if flash is not None:
        found["budget not reached: identical (flash)"] = lambda: within_budget(device, flash, torch.bfloat16)
        found["after rounds: flash agrees with sdpa"] = lambda: flash_close(device, flash)
    return found


def run(device: torch.device, small: bool = False, show: Callable[[str], None] = print) -> Found:
    """All checks, then the benchmarks.

    Args:
        device: where to run.
        small: sizes for a machine without a GPU.
        show: gets one line a check.

    Returns:
        Environment, ``rows`` with one check each, ``ok``, and the results of ``round`` and ``decode``
        (missing if time ran out).
    """
    started, rows = time.monotonic(), []
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name, check in checks(device).items():
        begun = time.monotonic()
        with torch.inference_mode():
            try:
                found = check()
            except Exception as error:  # one broken check must not hide the others
                found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        rows.append({"check": name, **found, "seconds": time.monotonic() - begun})
        show(f"{'ok  ' if found['ok'] else 'FAIL'} {name}: {found.get('error', found.get('value'))}")
    where = str(device)
    sizes: dict[str, Any] = {"budgets": (128,), "batches": (1, 2), "layers": 2, "repeats": 3} if small else {}
    bench: Found = {"round": lambda: round.run(**sizes, device=where, show=False)}
    if small:
        bench["decode"] = lambda: decode.run(
            "tiny", (256,), 128, 16, alternations=5, generate=0, device=where, show=False
        )
    else:
        bench["decode"] = lambda: decode.run("tiny", (1024, 4096, 7900), alternations=5, device=where, show=False)
        bench["decode_batch_16"] = lambda: decode.run(
            "tiny", (4096,), batch=16, alternations=5, generate=0, device=where, show=False
        )
    results: Found = {}
    for name, work in bench.items():
        if time.monotonic() - started > LIMIT_S:
            show(f"no time left for bench {name}")
            break
        results[name] = work()
        show(f"done bench {name}, {time.monotonic() - started:.0f} s so far")
    return record(rows, device, 0, ok=all(row["ok"] for row in rows), **results)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvkeep.bench.gpu", description=__doc__)
    parser.add_argument("--out", required=True, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the checks without a GPU")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU here: run this on a machine with one, or pass --device cpu", file=sys.stderr)
        return 2
    result = run(device, small=device.type != "cuda", show=lambda line: print(line, flush=True))
    write_json(chosen.out, result)
    print(f"{'all checks hold' if result['ok'] else 'A CHECK FAILED'}; wrote {chosen.out}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
