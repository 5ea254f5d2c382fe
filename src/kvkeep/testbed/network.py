"""Abacus' network: a Qwen3 whose forward for training is a few explicit matrix products.

torch's fused attention has a backward that is several times slower on CPUs than the products it hides, and
transformers' eager attention repeats keys for every query head. Training therefore runs :func:`forward` on the very
parameters of the transformers model; a test holds the two forwards together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from .attention import Dropout, attend
from .vocab import EOS, IDS, PAD, VOCABULARY

hf: Any = transformers


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are the checkpoints that ship."""

    layers: int = 4
    hidden: int = 128
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 32
    ffn: int = 384
    context: int = 4096

    def config(self) -> Any:
        """The configuration for transformers and vLLM."""
        return hf.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=IDS[EOS],
            pad_token_id=IDS[PAD],
        )


def new_model(shape: Shape, seed: int) -> Any:
    """A fresh Qwen3ForCausalLM in float32, initialised from ``seed`` alone.

    Query and key norms start at a gain of 1.5: sharper attention from the start leaves the first plateau sooner.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.Qwen3ForCausalLM(shape.config()).float()
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                torch.nn.init.normal_(parameter, std=0.1)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.constant_(parameter, 1.5)
            elif parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.data.mul_((2 * shape.layers) ** -0.5)
    return model


def rotary(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, T, D] of rotary positions (theta 1e4, halves paired as in Qwen3)."""
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = positions.float()[:, None, :, None] * inverse
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def forward(
    weights: dict[str, Tensor],
    shape: Shape,
    ids: Tensor,
    positions: Tensor,
    deadline: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Logits [B, T, V] of a batch, in the dtype of ``weights``.

    Args:
        weights: the model's parameters by name.
        shape: its sizes.
        ids: int64 [B, T].
        positions: rotary positions, int64 [B, T].
        deadline: KV dropout, int32 [L, B, H_kv, T]: the last query (index in T) that sees each key.
        dropout: plain attention dropout.
    """
    x = F.embedding(ids, weights["model.embed_tokens.weight"])
    turn = rotary(positions, shape.head_dim, x.dtype)
    for layer in range(shape.layers):
        own = f"model.layers.{layer}."
        until = None if deadline is None else deadline[layer]
        normed = _norm(x, weights[own + "input_layernorm.weight"])
        x = x + _attention(weights, shape, own + "self_attn.", normed, turn, until, dropout)
        x = x + _ffn(weights, own, _norm(x, weights[own + "post_attention_layernorm.weight"]))
    return F.linear(_norm(x, weights["model.norm.weight"]), weights["model.embed_tokens.weight"])


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), gain, 1e-6)


def _ffn(weights: dict[str, Tensor], own: str, x: Tensor) -> Tensor:
    gate = F.silu(F.linear(x, weights[own + "mlp.gate_proj.weight"]))
    return F.linear(gate * F.linear(x, weights[own + "mlp.up_proj.weight"]), weights[own + "mlp.down_proj.weight"])


def _attention(
    weights: dict[str, Tensor],
    shape: Shape,
    own: str,
    x: Tensor,
    turn: tuple[Tensor, Tensor],
    deadline: Tensor | None,
    dropout: Dropout | None,
) -> Tensor:
    batch, length, _ = x.shape

    def heads(name: str, count: int) -> Tensor:
        return F.linear(x, weights[own + name]).view(batch, length, count, shape.head_dim)

    q = _turn(_norm(heads("q_proj.weight", shape.heads), weights[own + "q_norm.weight"]).transpose(1, 2), *turn)
    k = _turn(_norm(heads("k_proj.weight", shape.kv_heads), weights[own + "k_norm.weight"]).transpose(1, 2), *turn)
    v = heads("v_proj.weight", shape.kv_heads).transpose(1, 2)
    q = (q * shape.head_dim**-0.5).view(batch, shape.kv_heads, -1, length, shape.head_dim)
    out = attend(q, k, v.contiguous(), deadline, dropout).view(batch, shape.heads, length, shape.head_dim)
    return F.linear(out.transpose(1, 2).reshape(batch, length, -1), weights[own + "o_proj.weight"])


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
