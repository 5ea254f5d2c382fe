"""How a model rotates its queries and keys, read from its modules and compared with what they do."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..rotary import Rotary
from ..signals import ModelFacts
from .model import ModelInfo, Unsupported

_CHANGING = ("dynamic", "longrope")  # frequencies that depend on the length of the text
_PLACES = (0, 1, 777)
_SAMPLE = 4096
_TOLERANCE = 1e-3  # the model's angles are float32, ours float64


def find_rotary(info: ModelInfo) -> Rotary:
    """Frequencies and scaling of the evicting layers.

    Raises:
        Unsupported: the model has no rotary positions, changes them with the length, or pairs components otherwise.
    """
    module: Any = getattr(info.decoder, "rotary_emb", None)
    name = type(info.decoder).__name__
    if module is None:
        raise Unsupported(
            f"{name} has no rotary positions that kvkeep can find: use a policy that does not ask for them"
        )
    full = hasattr(module, "full_attention_inv_freq")  # one set of frequencies for each kind of layer
    kind = module.rope_type["full_attention"] if full else getattr(module, "rope_type", "default")
    if kind in _CHANGING:
        raise Unsupported(
            f"{name} has {kind} rotary positions, which change with the length of the text: not supported"
        )
    inv_freq = module.full_attention_inv_freq if full else module.inv_freq
    scaling = module.full_attention_attention_scaling if full else module.attention_scaling
    found = Rotary(inv_freq.detach().to("cpu", torch.float64), float(scaling))
    attention = info.attention[info.evicting[0]]
    x = torch.randn(1, 1, len(_PLACES), head_width(attention), generator=torch.Generator().manual_seed(0))
    theirs = _rotated_by(module, attention, x.to(inv_freq.device), full).cpu()
    if not torch.allclose(theirs, found.rotate(x, torch.tensor(_PLACES)), atol=_TOLERANCE, rtol=_TOLERANCE):
        raise Unsupported(f"{name} pairs rotary components in another way than Llama does: not supported")
    return found


def _rotated_by(module: Any, attention: nn.Module, x: Tensor, full: bool) -> Tensor:
    """``x`` [1, 1, n, D] rotated by the model's own code."""
    places = torch.tensor([_PLACES], device=x.device)
    kind = {"layer_type": "full_attention"} if full else {}
    cos, sin = module(x, position_ids=places, **kind)
    apply = inspect.unwrap(type(attention).forward).__globals__.get("apply_rotary_pos_emb")
    if apply is None:
        raise Unsupported(f"{type(attention).__name__} does not rotate with apply_rotary_pos_emb: not supported")
    rotated: Tensor = apply(x, x, cos, sin)[0]
    return rotated


def head_width(attention: nn.Module) -> int:
    """D, components of a head."""
    return int(attention.head_dim)  # type: ignore[arg-type]


def fingerprint(info: ModelInfo) -> str:
    """A hash that tells the weights of a model from others', whatever type they are loaded in.

    Of all parameters of the evicting layers' attention, and of some 4,096 numbers of every other parameter, evenly
    spaced, in bfloat16. Queries depend on all of them, and fine-tuning (a merged LoRA, say) may change any.
    """
    digest = hashlib.sha256()
    whole = {id(p) for number in info.evicting for p in info.attention[number].parameters()}
    for name, weight in sorted(info.decoder.named_parameters()):
        numbers = weight.detach().reshape(-1)
        numbers = numbers if id(weight) in whole else numbers[:: max(1, len(numbers) // _SAMPLE)]
        digest.update(name.encode())
        digest.update(numbers.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def facts(info: ModelInfo, rotary: bool) -> ModelFacts:
    """What :meth:`kvkeep.policies.Policy.check_model` gets; ``rotary``: the policy asks for it."""
    attention: Any = info.attention[info.evicting[0]]
    config = attention.config.get_text_config() if hasattr(attention, "config") else None
    heads = getattr(config, "num_attention_heads", None) or info.heads
    return ModelFacts(
        layers=info.evicting,
        heads=info.heads,
        query_heads=int(heads),
        width=head_width(attention) if hasattr(attention, "head_dim") else 0,
        rotary=find_rotary(info) if rotary else None,
        fingerprint=lambda: fingerprint(info),
        depth=len(info.layers),
    )
