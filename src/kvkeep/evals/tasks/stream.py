"""Language modelling: how far the predictions along a text move when entries are evicted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...engine import Chunk, Engine, Forcing
from ...layout import Row
from ...settings import Settings
from ..spelling import canonical
from ..task import Item, Outcome
from .text import check_counts, encode, join, read_passages


@dataclass(frozen=True)
class Stream:
    """Teacher-forced KL(full || arm) along concatenated solutions, in nats, averaged over positions.

    The text is forced; its first tokens are the prompt, the others the trace. Positions before K + r are left out of
    all averages, since nothing was evicted there: the first that counts is the first behind a round.

    The full cache's distributions are computed anew for each arm, by the same engine and in step with the arm's. To
    keep them would take 400 MB a stream (2,048 tokens of a vocabulary of 49,152), and a runner that takes arm after
    arm would need all streams at once; computing them costs about as much as the arm itself.

    Args:
        tokens: of a stream, prompt included.
        prompt: tokens of the prompt.
        skip: positions left out of the averages; 0: K + r of the arm, and the prompt alone where nothing is evicted.
            Give the largest K + r of a comparison to average all its arms, full included, over the same positions.
        path: a JSONL file, see :func:`~kvkeep.evals.tasks.text.read_passages`.
        seed: seed of the set of streams; None: the run's seed.

    Raises:
        ValueError: a value is out of range.
    """

    tokens: int = 2048
    prompt: int = 64
    skip: int = 0
    path: str = ""
    seed: int | None = None

    metric: ClassVar[str] = "kl"
    bounds: ClassVar[tuple[float, float] | None] = None
    higher_is_better: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_counts(tokens=self.tokens, prompt=self.prompt)
        if self.prompt >= self.tokens:
            raise ValueError(f"a stream of {self.tokens} tokens has no room for a prompt of {self.prompt} and a trace")
        if not self.prompt <= (self.skip or self.prompt) < self.tokens - 1:
            raise ValueError(f"skip must lie in {self.prompt}..{self.tokens - 2} (or be 0), got {self.skip}")

    @property
    def name(self) -> str:
        """Canonical text; tokens are always in it."""
        return canonical("stream", self, "tokens")

    def items(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Item]:
        """The first ``count`` streams: solutions in shuffled order, joined by empty lines; no two share a solution.

        Raises:
            ValueError: the file is missing or too short, or the tokenizer cannot encode it.
        """
        seed = seed if self.seed is None else self.seed
        solutions = [solution for _, solution in read_passages(self.path)]
        random.Random(f"stream-{seed}").shuffle(solutions)
        found: list[Item] = []
        left = iter(solutions)
        while len(found) < count:
            ids: list[int] = []
            while len(ids) < self.tokens:
                if (solution := next(left, None)) is None:
                    raise ValueError(f"the file holds {len(found)} streams of {self.tokens} tokens, {count} were asked")
                ids += encode(tokenizer, solution + "\n\n")
            text = join([ids[: self.tokens]])
            name = f"t{self.tokens}-s{seed}-{len(found)}"
            found.append(Item(name, text[: self.prompt], self.tokens, text[self.prompt :]))
        return found

    def run(self, engine: Engine, items: Sequence[Item], samples: Sequence[int], seed: int) -> list[Outcome]:
        """Force the streams through the arm and through the full cache, side by side. Nothing is random but the policy.

        Raises:
            ValueError: no round would run, or too few positions would be left out.
        """
        evicts = engine.settings.make_budget() is not None
        first = self._first(engine.settings)
        prompts, traces = [item.prompt for item in items], [item.data for item in items]
        arm = engine.logits(prompts, traces, samples)
        full = engine.with_settings(Settings("full")).logits(prompts, traces, samples) if evicts else None
        said = torch.tensor(traces)
        sums = torch.zeros(4, len(items), dtype=torch.float64)
        try:
            for start, ours, theirs in _alone(arm) if full is None else side_by_side(arm, full):
                cut = max(0, first - start)
                if cut < ours.shape[1]:
                    target = said[:, start + cut : start + ours.shape[1]].to(ours.device)
                    sums += _compare(ours[:, cut:], theirs[:, cut:], target).cpu()
        finally:
            for forcing in (arm, full):
                if forcing is not None:
                    forcing.close()
        means = (sums / (said.shape[1] - first)).T.tolist()
        stats = arm.stats()
        if evicts and (still := [item.id for item, mine in zip(items, stats, strict=True) if not mine["rounds"]]):
            raise ValueError(f"no round ran on stream {still[0]}: use longer streams or a smaller budget")
        return [
            Outcome(
                score=kl,
                answered=True,
                truncated=False,
                tokens=said.shape[1],
                stats=mine,
                metrics={"nll": nll, "nll_full": nll_full, "nll_rise": nll - nll_full, "top1": top1},
            )
            for (kl, nll, nll_full, top1), mine in zip(means, stats, strict=True)
        ]

    def _first(self, settings: Settings) -> int:
        """Index in the trace of the first token whose prediction counts."""
        row = Row.new(settings.make_budget(), settings.protection)
        row.add_prompt(self.prompt)
        if row.limit is None:
            return self.skip - self.prompt + 1 if self.skip else 0
        if row.limit >= self.tokens - 1:
            raise ValueError(
                f"no round would run: {self.tokens} tokens fit into K + r = {row.limit}. Use longer streams or a "
                "smaller budget"
            )
        if self.skip and self.skip < row.limit:
            raise ValueError(
                f"skip={self.skip} would count positions before K + r = {row.limit}, where none is evicted"
            )
        # The token at position p is predicted from p - 1, so position K + r is the first whose forward follows a round.
        return max(self.skip or row.limit, self.prompt) - self.prompt + 1


def _compare(ours: Tensor, full: Tensor, target: Tensor) -> Tensor:
    """Sums over positions, float64 [4, R]: KL(full || ours), nll, nll of full, agreement of the most probable token.

    Args:
        ours: log-probabilities [R, t, V].
        full: the full cache's.
        target: the tokens that came, [R, t].
    """
    kl = (full.exp() * (full - ours)).sum(-1)
    nll, nll_full = (-x.gather(-1, target.unsqueeze(-1)).squeeze(-1) for x in (ours, full))
    same = (ours.argmax(-1) == full.argmax(-1)).to(torch.float32)
    return torch.stack([x.to(torch.float64).sum(-1) for x in (kl, nll, nll_full, same)])


def _alone(arm: Forcing) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Where nothing is evicted the arm is the full cache."""
    for chunk in arm:
        yield chunk.start, chunk.logprobs, chunk.logprobs


def side_by_side(one: Forcing, other: Forcing) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Two forcings of the same traces, cut where either has the end of a chunk.

    Yields:
        (index in the trace, log-probabilities of one, of the other, [R, t, V] each).
    """
    left, right = next(one, None), next(other, None)
    while left is not None and right is not None:
        start, end = max(left.start, right.start), min(_end(left), _end(right))
        yield start, _part(left, start, end), _part(right, start, end)
        ended = _end(left) == end, _end(right) == end
        left = next(one, None) if ended[0] else left
        right = next(other, None) if ended[1] else right


def _end(chunk: Chunk) -> int:
    return chunk.start + chunk.logprobs.shape[1]


def _part(chunk: Chunk, start: int, end: int) -> Tensor:
    return chunk.logprobs[:, start - chunk.start : end - chunk.start]
