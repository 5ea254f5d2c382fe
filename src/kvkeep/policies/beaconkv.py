"""BeaconKV (arXiv 2609.04971)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..budget import Budget
from ..signals import DIGEST, KEYS, POSITIONS, QUERIES, ROTARY, LayerView, RoundView
from .base import Policy
from .options import choice, whole


@dataclass(frozen=True)
class BeaconKV(Policy):
    """Keep what the newest queries attend to, or would if a query unlike the others came back now.

    Each query head holds beacons: queries before RoPE that farthest point sampling (cosine) has chosen from the prompt,
    and goes on choosing from them and each ``recent`` new ones. At a round they are rotated to the position of the
    newest query; attention of beacons and newest queries over everything cached is reduced over queries and the group.

    The rules are those of a third party's note on the paper: neither the paper nor its code was at hand. The note
    freezes the beacons before the newest queries come; here a newest query may already be a beacon too. Prompts beyond
    1024 tokens are sampled block by block.

    Args:
        beacons: queries that a query head remembers; 0: the newest alone vote.
        recent: newest queries that vote.
        reduce: over queries and group, ``max`` or ``mean``.
    """

    beacons: int = 16
    recent: int = 16
    reduce: Literal["max", "mean"] = "max"

    name: ClassVar[str] = "beaconkv"
    rule: ClassVar[str] = "keep what the newest and the most unlike queries attend to"
    paper: ClassVar[str] = "BeaconKV (arXiv 2609.04971)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, QUERIES, ROTARY, DIGEST})
    published_protection: ClassVar[str] = "prompt"
    digest_blocks: ClassVar[tuple[int, int | None]] = (1024, 16)

    def __post_init__(self) -> None:
        whole(self, "beacons", 0)
        whole(self, "recent", 1)
        choice(self, "reduce", "max", "mean")
        if self.beacons > self.digest_blocks[0]:
            raise ValueError(f"beacons must be at most {self.digest_blocks[0]}, got {self.beacons}")
        # The buffer of the paper holds beacons and newest queries and is sampled when it is full.
        object.__setattr__(self, "digest_blocks", (self.digest_blocks[0], self.recent))
        if not self.beacons:
            object.__setattr__(self, "signals", self.signals - {ROTARY, DIGEST})

    def query_window(self, budget: Budget) -> int:
        return self.recent

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": max(1, budget // 7), "window": 32}  # the cache falls from 8 parts to 7

    def digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        """[R, H_q, m, D]: the beacons."""
        points = queries if state is None else torch.cat([state, queries], dim=2)
        rows, heads, n, width = points.shape
        if n < self.beacons:  # the shape must not change: a repeated query adds nothing to a maximum
            return points[:, :, torch.arange(self.beacons, device=points.device) % n]
        chosen = farthest(points.reshape(rows * heads, n, width), self.beacons).view(rows, heads, -1, 1)
        return points.gather(2, chosen.expand(-1, -1, -1, width))

    def score(self, view: RoundView) -> Tensor:
        now = torch.tensor(view.seen, device=view.layers.device) - 1  # position of each row's newest query
        return view.by_layer(lambda layer: self._layer(layer, now.to(layer.keys.device)))

    def _layer(self, layer: LayerView, now: Tensor) -> Tensor:
        assert layer.queries is not None  # declared in `signals`
        assert layer.query_positions is not None
        queries, at = layer.queries[:, :, -self.recent :].float(), layer.query_positions[:, -self.recent :]
        if self.beacons:
            if layer.digest is None or layer.rotary is None:
                raise ValueError("beaconkv has seen no queries: the engine gave no digest")
            beacons = layer.rotary.rotate(layer.digest, now[:, None, None])
            queries = torch.cat([queries, beacons], dim=2)
            at = torch.cat([at, now[:, None].expand(-1, self.beacons)], dim=1)
        votes = layer.weights(layer.logits(queries, at))  # [R, H, G, w, N], zeros of a query that does not exist
        if self.reduce == "max":
            found = votes.amax(dim=(2, 3))
        else:
            found = votes.sum(dim=3).mean(dim=2) / (at >= 0).sum(dim=1)[:, None, None]
        return layer.candidates(layer.ascending(found))


def farthest(points: Tensor, count: int) -> Tensor:
    """Farthest point sampling by cosine distance.

    It starts at the point least like the others on average, then takes the one whose nearest chosen point is farthest;
    the first among equals.

    Args:
        points: float32 [B, n, D].
        count: how many to choose, at most n.

    Returns:
        int64 [B, count], distinct, in the order of choice.
    """
    unit = points / points.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    likeness = (unit @ unit.sum(dim=1, keepdim=True).transpose(-1, -2)).squeeze(-1)  # with itself: 1 for all
    near = torch.full_like(likeness, -2.0)  # to the nearest chosen point
    chosen = []
    for _ in range(count):
        pick = likeness.argmin(dim=-1, keepdim=True)  # [B, 1]
        chosen.append(pick)
        point = unit.gather(1, pick[..., None].expand(-1, -1, unit.shape[-1]))
        near = torch.maximum(near, (unit @ point.transpose(-1, -2)).squeeze(-1)).scatter(-1, pick, 9.0)
        likeness = near
    return torch.cat(chosen, dim=-1)
