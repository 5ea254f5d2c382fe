"""What a policy can ask to see.

A policy names its signals; an engine collects those and no others. ``RandomAttention`` names none,
so it costs nothing beyond its draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .rotary import Rotary

#: int32 [R, L, H, C]: logical position of each candidate. The candidates then come in ascending
#: position, whatever slots they lie in. Kept in a position store that moves with the entries.
POSITIONS = "positions"

#: Keys after RoPE of everything cached, layer by layer, through :attr:`RoundView.layer`. Candidates come as with
#: :data:`POSITIONS`.
KEYS = "keys"

#: Values of everything cached, beside the keys.
VALUES = "values"

#: Queries after RoPE of the newest tokens, layer by layer, beside the keys. The policy says how many.
QUERIES = "queries"

#: How the model rotates queries and keys, so that queries can be seen before RoPE or turned elsewhere.
ROTARY = "rotary"

#: What the policy makes of all queries before RoPE, block by block: see :meth:`~kvkeep.policies.Policy.digest`.
DIGEST = "digest"

#: Attention that each entry has received from every query since it was cached.
ATTENTION = "attention"

#: Entropy of the model's next-token prediction at each entry's token.
ENTROPY = "entropy"

#: How much each token's hidden state still changes from a layer to the last one.
EVOLUTION = "evolution"

KNOWN = frozenset({POSITIONS, KEYS, VALUES, QUERIES, ROTARY, DIGEST, ATTENTION, ENTROPY, EVOLUTION})

#: Signals that show what layers hold, through :attr:`RoundView.layer`.
OF_LAYERS = KNOWN - {POSITIONS}


@dataclass(frozen=True)
class LayerView:
    """What one evicting layer holds at a round: R rows, H KV heads, N slots, of which a row may fill fewer.

    Slot order means nothing; :meth:`ascending` and :meth:`candidates` turn a number a slot into numbers by position.

    Attributes:
        keys: [R, H, N, D] after RoPE, by slot.
        positions: int32 [R, H, N], by slot.
        filled: bool [R, 1, N], slots that hold an entry.
        window: bool [R, 1, N], those of the newest entries, which stay whatever they score.
        order: int64 [R, H, N], slots by ascending position, empty ones last.
        places: int64 [R, H, C], where in ``order`` each candidate stands.
        queries: [R, H_q, w, D] after RoPE, oldest first, or None.
        query_positions: int64 [R, w], or None; negative where a row is shorter than w.
        scaling: what the layer multiplies scores with; None: D^-0.5.
        index: the layer's place among the evicting ones, an index into axis L.
        values: [R, H, N, D_v] by slot, or None.
        eligible: bool [R, 1, N], slots of the candidates, or None.
        rotary: how the model rotates, or None.
        digest: the policy's own summary of earlier queries, [R, ...], or None.
        pending: newest queries that are not in the digest yet.
        received: float32 [R, H, N], attention summed over queries and the group's query heads, by slot, or None.
        entropy: float32 [R, H, N] nats, by slot, or None.
        evolution: float32 [R, H, N], 1 - cosine of this layer's and the last layer's hidden state, or None.
    """

    keys: Tensor
    positions: Tensor
    filled: Tensor
    window: Tensor
    order: Tensor
    places: Tensor
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    scaling: float | None = None
    index: int = 0
    values: Tensor | None = None
    eligible: Tensor | None = None
    rotary: Rotary | None = None
    digest: Tensor | None = None
    pending: int = 0
    received: Tensor | None = None
    entropy: Tensor | None = None
    evolution: Tensor | None = None

    def ascending(self, values: Tensor) -> Tensor:
        """[R, H, ..., N] by slot -> by ascending position."""
        rows, heads, slots = self.order.shape
        between = (1,) * (values.dim() - 3)
        return values.gather(-1, self.order.view(rows, heads, *between, slots).expand_as(values))

    def candidates(self, values: Tensor) -> Tensor:
        """[R, H, N] by ascending position -> [R, H, C] of the candidates alone."""
        return values.gather(-1, self.places)

    def chosen(self, values: Tensor) -> Tensor:
        """[R, H, N, ...] by slot -> [R, H, C, ...] of the candidates, by ascending position."""
        index = self.order.gather(-1, self.places)
        index = index.view(*index.shape, *(1,) * (values.dim() - 3)).expand(*index.shape, *values.shape[3:])
        return values.gather(2, index)

    def there(self) -> Tensor:
        """bool [R, 1, C]: candidates that exist; rows with fewer than C are padded behind."""
        if self.eligible is None:
            raise ValueError("this view does not say which slots hold candidates")
        columns = torch.arange(self.places.shape[-1], device=self.places.device)
        return columns < self.eligible.sum(-1, keepdim=True)

    def prerope(self) -> Tensor:
        """The newest queries before RoPE, float32 [R, H_q, w, D]; zeros where a row is shorter than w."""
        queries, at = self._queries("prerope()")
        if self.rotary is None:
            raise ValueError("prerope() needs the signal 'rotary': add it to the policy's signals")
        return self.rotary.unrotate(queries, at.clamp(min=0)[:, None])

    def logits(self, queries: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Scaled scores of queries against everything cached, float32 [R, H, G, w, N] by slot (G query heads each).

        Causal: what a query may not see is -inf, and so is everything for a query that does not exist.

        Args:
            queries: [R, H_q, w, D] after RoPE; the newest ones by default.
            at: int64 [R, w], their positions.
        """
        if queries is None or at is None:
            queries, at = self._queries("attention()")
        rows, heads, slots, width = self.keys.shape
        scaling = width**-0.5 if self.scaling is None else self.scaling
        q = queries.float().mul(scaling).reshape(rows, heads, -1, width)  # a group's queries under one another
        scores = q @ self.keys.float().transpose(-1, -2)
        scores = scores.view(rows, heads, -1, queries.shape[2], slots)
        seen = (self.positions[:, :, None] <= at[:, None, :, None]) & self.filled[:, :, None]  # [R, H, w, N]
        # Added: filling in place under a mask that is broadcast takes twice as long.
        return scores.add_(torch.zeros(seen.shape, device=scores.device).masked_fill_(~seen, float("-inf"))[:, :, None])

    def attention(self, among: Tensor | None = None) -> Tensor:
        """Attention weights of the newest queries, float32 [R, H, G, w, N] by slot.

        A query that sees nothing any more, or that a row is too short for, gets zeros. N counts what is still
        cached: weights of evicted entries are gone from the denominator, as in every method that scores from its
        cache. So are sinks that a model learns beside its keys; soft caps are left out.

        Args:
            among: bool [R, 1 or H, N]: only these slots share the weights; everything cached by default.
        """
        return self.weights(self.logits(), among)

    @staticmethod
    def weights(logits: Tensor, among: Tensor | None = None) -> Tensor:
        """Softmax over slots of ``logits`` [R, H, ..., N], zeros where a query sees nothing; overwrites ``logits``."""
        if among is not None:
            rows, heads, slots = among.shape
            among = among.view(rows, heads, *(1,) * (logits.dim() - 3), slots)
            logits = logits.add_(torch.zeros(among.shape, device=logits.device).masked_fill_(~among, float("-inf")))
        # The first of a query's weights says whether it saw nothing: then all are NaN.
        weights = logits.softmax(-1)
        return weights.masked_fill_(weights[..., :1].isnan() & (logits[..., :1] == float("-inf")), 0.0)

    def _queries(self, what: str) -> tuple[Tensor, Tensor]:
        if self.queries is None or self.query_positions is None:
            raise ValueError(f"{what} needs the signal 'queries': add it to the policy's signals")
        return self.queries, self.query_positions


@dataclass(frozen=True)
class ModelFacts:
    """What a policy may have to know of the model, once, before anything runs.

    Attributes:
        layers: global numbers of the evicting layers.
        heads: KV heads of a layer.
        query_heads: query heads of a layer.
        width: D, components of a head.
        rotary: how queries and keys are rotated; None unless the policy asks for it.
        fingerprint: gives a hash that tells this model's weights from others'.
        depth: layers of the whole model, those that never evict included; 0: not known.
    """

    layers: tuple[int, ...]
    heads: int
    query_heads: int
    width: int
    rotary: Rotary | None
    fingerprint: Callable[[], str]
    depth: int = 0


@dataclass(frozen=True)
class RoundView:
    """What a policy sees of a round: R rows, L evicting layers, H KV heads, C candidates.

    Attributes:
        seed: the run's seed.
        streams: int64 [R], tells requests apart.
        rounds: int64 [R], number of each row's round.
        layers: int64 [L], global layer numbers.
        heads: int64 [H], global KV head numbers.
        model_heads: KV heads of a layer of the whole model, of which ``heads`` may be a part.
        candidates: C, the widest row's number of candidates; narrower rows are padded behind.
        positions: int32 [R, L, H, C] ascending (axes that the policy's scope shares are 1), or None.
        layer: gives what the i-th evicting layer holds, or None if no signal asks for it.
        seen: tokens each row has seen, the position of the next one; empty where a row's rounds are replayed.
        kept: entries that each row's heads hold after the round, protected ones and the window included (mean over
            layers where a policy splits the budget).
        window: newest entries of each row that stay.
        protected: entries of the protected prefix of each row.
    """

    seed: int
    streams: Tensor
    rounds: Tensor
    layers: Tensor
    heads: Tensor
    model_heads: int
    candidates: int
    positions: Tensor | None = None
    layer: Callable[[int], LayerView] | None = None
    seen: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    protected: tuple[int, ...] = ()

    def by_layer(self, score: Callable[[LayerView], Tensor]) -> Tensor:
        """Score layer by layer, so that temporaries are those of one layer.

        Args:
            score: float [R, H, C] of a layer's candidates.

        Returns:
            float32 [R, L, H, C].
        """
        if self.layer is None:
            raise ValueError("by_layer() needs the signal 'keys' or 'queries': add it to the policy's signals")
        scores = [score(self.layer(i)).float() for i in range(len(self.layers))]
        return torch.stack([s.to(self.layers.device) for s in scores], dim=1)  # layers may lie on several devices
