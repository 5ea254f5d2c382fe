"""TriAttention (arXiv 2604.04921)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import calibration as files
from ..rotary import Rotary
from ..signals import DIGEST, KEYS, POSITIONS, ROTARY, LayerView, ModelFacts, RoundView
from .base import Policy, PolicyScope
from .options import choice, whole

Statistics = tuple[
    Tensor, Tensor, Tensor
]  # mean complex [..., H_q, F], spare [..., H_q, F], passing [..., H_q, D - 2F]


@dataclass(frozen=True)
class TriAttention(Policy):
    """Keep the keys that queries to come should attend to, by where a head's queries lie on average before RoPE.

    A pair of components scores with the mean query, turned to 1, 2, 4, ... tokens from now, and with the part of the
    query's mean length that its mean lacks, times the key's length. Scores are standardised over the candidates of each
    query head (population deviation), and a KV head takes the largest of its group. The paper turns keys back to before
    RoPE; turning the mean query instead gives the same number, and the average over distances is then one factor a
    frequency. Components that the model does not rotate score with their mean query alone: the paper knows none.

    The authors' union of each head's best is the plain maximum over heads, so ``global`` is that. Their code adds noise
    of 1e-6 against ties, which here go by position; and keeps the first K prompt tokens, nothing else, where a prompt
    exceeds K, which :class:`~kvkeep.budget.Budget` refuses.

    Args:
        calibration: .safetensors file of ``kvkeep calibrate``; "": the means are those of the prompt's own queries.
        mode: ``per_head``: each KV head its own set, in all layers the same (mean over layers); ``per_layer``: each KV
            head of each layer its own; ``global``: one set (maximum over all).
        aggregate: over distances, ``mean`` or ``max``.
        offset_max: the largest distance.
    """

    calibration: str = ""
    mode: Literal["per_head", "per_layer", "global"] = "per_head"
    aggregate: Literal["mean", "max"] = "mean"
    offset_max: int = 65536

    name: ClassVar[str] = "triattention"
    rule: ClassVar[str] = "keep what mean queries will attend to at distances 1, 2, 4, ..."
    paper: ClassVar[str] = "TriAttention (arXiv 2604.04921)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, ROTARY, DIGEST})
    published_protection: ClassVar[str] = "prompt"
    digest_blocks: ClassVar[tuple[int, int | None]] = (128, None)

    def __post_init__(self) -> None:
        choice(self, "mode", "per_head", "per_layer", "global")
        choice(self, "aggregate", "mean", "max")
        whole(self, "offset_max", 1)
        if not isinstance(self.calibration, str):
            raise ValueError(f"calibration is the path of a file, or '' for the prompt's own, got {self.calibration!r}")
        if self.calibration:
            files.load(self.calibration)  # a wrong file is an error now
            object.__setattr__(self, "signals", self.signals - {DIGEST})  # no query needs to be seen

    @property
    def scope(self) -> PolicyScope:
        scopes: dict[str, PolicyScope] = {"per_head": "head-of-all-layers", "per_layer": "head", "global": "model"}
        return scopes[self.mode]

    def files(self) -> tuple[str, ...]:
        return (self.calibration,) if self.calibration else ()

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 128, "window": 0}  # the paper's code protects no recent window

    def check_model(self, model: ModelFacts) -> None:
        if self.calibration:
            files.load(self.calibration).refuse_other_model(model, self.calibration)
        elif model.rotary is not None and 2 * model.rotary.pairs != model.width:
            raise ValueError(
                f"triattention cannot measure a model that rotates only {2 * model.rotary.pairs} of {model.width} "
                "components while it runs: make a file with `kvkeep calibrate` and pass it as option calibration"
            )

    def digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        """[R, H_q, D + F + 1]: sums of queries, of the pairs' lengths, and their number."""
        half = queries.shape[-1] // 2
        lengths = torch.hypot(queries[..., :half], queries[..., half:]).sum(2)
        count = torch.full_like(lengths[..., :1], queries.shape[2])
        sums = torch.cat([queries.sum(2), lengths, count], dim=-1)
        return sums if state is None else state + sums

    def score(self, view: RoundView) -> Tensor:
        turns: list[Tensor] = []  # the same for all layers

        def layer_by_layer(layer: LayerView) -> Tensor:
            assert layer.rotary is not None  # declared in `signals`
            if not turns:
                turns.append(self._turns(layer.rotary, view, layer.keys.device))
            mean, spare, passing = self._statistics(layer, view)
            return _score(layer, turns[0].to(layer.keys.device), mean, spare, passing)

        scores = view.by_layer(layer_by_layer)
        if self.mode == "per_head":
            return scores.mean(dim=1, keepdim=True)
        return scores if self.mode == "per_layer" else scores.amax(dim=(1, 2), keepdim=True)

    def _turns(self, rotary: Rotary, view: RoundView, device: torch.device) -> Tensor:
        """complex128 [R, O, F]: what turns a mean query to each distance from now; O is 1 for their mean."""
        offsets = 2 ** torch.arange(self.offset_max.bit_length(), device=device)
        start = torch.tensor(view.seen, device=device)
        ahead = _unit(rotary.angles(offsets))
        ahead = ahead.mean(dim=0, keepdim=True) if self.aggregate == "mean" else ahead
        # Keys carry the model's scaling already; that of the query scales what is rotated against what passes.
        return rotary.scaling * _unit(rotary.angles(start))[:, None] * ahead

    def _statistics(self, layer: LayerView, view: RoundView) -> Statistics:
        rotary, heads = layer.rotary, view.heads.to(layer.keys.device)
        assert rotary is not None
        if self.calibration:
            every = _on_device(files.load(self.calibration), str(layer.keys.device))

            def ours(x: Tensor) -> Tensor:  # [1, H_q, ...] of the heads that this engine holds
                grouped = x[layer.index].reshape(view.model_heads, x.shape[1] // view.model_heads, x.shape[2])
                return grouped.index_select(0, heads).flatten(0, 1).unsqueeze(0)

            mean, length, passing = (ours(x) for x in every)
        else:
            if layer.digest is None:
                raise ValueError("triattention has seen no queries: pass a calibration file, or an engine with digests")
            width = layer.keys.shape[-1]
            state = layer.digest.to(layer.keys.device, torch.float64)
            sums, lengths, count = state.split([width, width // 2, 1], dim=-1)
            mean, length, passing = rotary.complex(sums / count), lengths / count, sums[..., 2 * rotary.pairs :] / count
        return mean, rotary.scaling * (length - mean.abs()), passing


def _unit(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)


@lru_cache(maxsize=8)
def _on_device(found: files.Calibration, device: str) -> Statistics:
    """Mean, mean length and passing part in float64, [L, H_q, ...]; one copy, not one a layer and round."""
    mean = torch.complex(found.mu_real.double(), found.mu_imag.double())
    return mean.to(device), found.absolute.double().to(device), found.passing.double().to(device)


def _score(layer: LayerView, turns: Tensor, mean: Tensor, spare: Tensor, passing: Tensor) -> Tensor:
    """float32 [R, H, C]."""
    keys = layer.keys.float()
    rows, heads, _, width = keys.shape
    pairs = turns.shape[-1]
    passing = passing.expand(rows, -1, -1)
    best: Tensor | None = None
    for turn in turns.unbind(dim=1):  # one, unless the best of 17 distances counts
        ahead = mean * turn[:, None]  # [R, H_q, F]
        query = torch.cat([ahead.real, ahead.imag, passing], dim=-1).float().view(rows, heads, -1, width)
        found = query @ keys.transpose(-1, -2)  # [R, H, G, N]
        best = found if best is None else torch.maximum(best, found)
    assert best is not None
    lengths = torch.hypot(keys[..., :pairs], keys[..., pairs : 2 * pairs])
    spare = spare.float().expand(rows, -1, -1).reshape(rows, heads, -1, pairs)
    best = best + spare @ lengths.transpose(-1, -2)
    at = layer.order.gather(-1, layer.places)[:, :, None]  # slots of the candidates
    best = best.gather(-1, at.expand(-1, -1, best.shape[2], -1))
    return standardised(best, layer.there()[:, :, None]).amax(dim=2)


def standardised(scores: Tensor, there: Tensor) -> Tensor:
    """(x - mean) / deviation over the candidates that exist: ``scores`` [R, H, G, C], ``there`` [R, 1, 1, C]."""
    count = there.sum(-1, keepdim=True).clamp_min(1)
    away = scores - scores.masked_fill(~there, 0.0).sum(-1, keepdim=True) / count
    away = away.masked_fill(~there, 0.0)
    return away / (away.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
