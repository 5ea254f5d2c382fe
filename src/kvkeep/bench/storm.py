"""A storm on a vLLM server, in one process: requests that join late, leave early and are preempted, on a small pool.

Whatever the weather, each request's trace must be the one it has alone, and no block may be lost. ``bench-storm`` runs
it with many requests, the tests with few. Looks into vLLM's scheduler, which only an engine in this process shows
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..vllm import SEED
from ..vllm.config import Serving
from ..vllm.timeline import Timeline

Tokens = list[int]
Quits = Literal["tokens", "round", "preempted"]
MOMENTS = ("prefill", "round", "admitted")


@dataclass(frozen=True)
class Ask:
    """One request of a storm.

    Attributes:
        prompt: ids.
        length: tokens to generate, exactly.
        sample: its own seed.
        joins: step at which it arrives.
        quits: it is aborted when it has ``after`` tokens ("tokens"), then at the next step that runs one of its
            rounds ("round"), or as soon as it is preempted ("preempted"); None: it stays.
        after: see ``quits``.
        priority: lower is served first, where the scheduler looks at it.
    """

    prompt: Tokens
    length: int
    sample: int = 0
    joins: int = 0
    quits: Quits | None = None
    after: int = 0
    priority: int = 0


@dataclass
class Outcome:
    """What a storm did.

    Attributes:
        traces: of each request, as far as it came.
        steps: of the engine.
        preempted: preemptions of each request.
        starved: of them those that vLLM chose itself, when blocks ran out.
        replayed: rounds that a request had been through when it was preempted, one a preemption.
        forced: how often everything was preempted on purpose, by moment.
        aborted: how many requests were aborted, by reason.
        peak: most requests that ran at once.
        hits: prompt tokens of each request that came from the prefix cache.
        lost: what was not as before the storm; empty if all is well.
    """

    traces: list[Tokens]
    steps: int = 0
    preempted: Counter[int] = field(default_factory=Counter)
    starved: int = 0
    replayed: list[int] = field(default_factory=list)
    forced: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    hits: dict[int, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def preemptions(self) -> int:
        """Of all requests together."""
        return self.preempted.total()

    def __str__(self) -> str:
        """One line."""
        return (
            f"{len(self.traces)} requests in {self.steps} steps, at most {self.peak} at once; {self.preemptions} "
            f"preemptions, {self.starved} for want of blocks, the others when all were preempted "
            f"{dict(self.forced)} times; {sum(self.replayed)} rounds replayed, at most "
            f"{max(self.replayed, default=0)} at once; aborted {dict(self.aborted)}; "
            f"{'; '.join(self.lost) or 'no block lost'}"
        )

    def mismatches(self, alone: Sequence[Tokens], asks: Sequence[Ask]) -> dict[int, int]:
        """Requests whose trace is not the one they have alone, and the first token that differs.

        An aborted request's trace must be the beginning of it.
        """
        wrong = {}
        for i, (trace, whole, ask) in enumerate(zip(self.traces, alone, asks, strict=True)):
            end = len(trace) if ask.quits else ask.length
            if trace != whole[:end]:
                same = (a == b for a, b in zip(trace, whole, strict=False))
                wrong[i] = next((at for at, equal in enumerate(same) if not equal), min(len(trace), len(whole)))
        return wrong


# ---- what is asked ------------------------------------------------------------------------------------


def weather(
    count: int, seed: int, vocabulary: int, prompts: tuple[int, int], traces: tuple[int, int], spread: int = 8
) -> list[Ask]:
    """Random requests: mixed lengths, late arrivals, some that are aborted, twins that differ in their seed only.

    Args:
        count: how many.
        seed: of everything here.
        vocabulary: ids run from 1 to this, exclusive.
        prompts: shortest and longest prompt; most are short.
        traces: shortest and longest trace.
        spread: arrivals are this many steps apart, on average; some come together.
    """
    rng = random.Random(seed)
    asks: list[Ask] = []
    now = 0
    while len(asks) < count:
        now += rng.choice([0, 0, 1, spread, 3 * spread])
        long = rng.random() < 0.3
        size = rng.randint(prompts[1] // 2, prompts[1]) if long else rng.randint(prompts[0], max(1, prompts[1] // 4))
        prompt = [rng.randrange(1, vocabulary) for _ in range(size)]
        for sample in range(rng.choice([1, 1, 1, 1, 2])):
            quits: Quits | None = rng.choice([None, None, None, None, "tokens", "round", "preempted"])
            length = rng.randint(*traces)
            asks.append(Ask(prompt, length, sample, now, quits, rng.randrange(length), rng.randrange(3)))
    return asks[:count]


def followers(asks: Sequence[Ask], traces: Sequence[Tokens], count: int, seed: int, vocabulary: int) -> list[Ask]:
    """Second turns: a request's prompt, the beginning of its trace and a few new tokens are another's prompt.

    They arrive while the first may still run, and be preempted.
    """
    rng = random.Random(seed)
    chosen = rng.sample(range(len(asks)), count)
    found = []
    for i in chosen:
        ask, trace = asks[i], traces[i]
        prompt = ask.prompt + trace[: rng.randint(1, len(trace))] + [rng.randrange(1, vocabulary) for _ in range(3)]
        found.append(Ask(prompt, max(1, ask.length // 2), ask.sample, ask.joins + rng.randint(1, 150)))
    return found


# ---- a storm ------------------------------------------------------------------------------------------


def alone(llm: Any, asks: Iterable[Ask]) -> list[Tokens]:
    """The trace of each request that has the engine to itself, one after the other."""
    traces, shares = [], llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    for ask in asks:
        if shares:
            llm.reset_prefix_cache()
        answer = llm.generate([{"prompt_token_ids": ask.prompt}], [_params(ask)], use_tqdm=False)
        traces.append(list(answer[0].outputs[0].token_ids))
    return traces


def storm(
    llm: Any, asks: Sequence[Ask], serving: Serving | None, seed: int = 0, force: float = 0.05, limit: int = 20_000
) -> Outcome:
    """Drive the engine by hand through a storm.

    Args:
        llm: a vLLM ``LLM`` whose engine runs in this process.
        asks: the requests.
        serving: kvkeep's settings, which say where rounds are due; None for stock vLLM.
        seed: of forced preemptions.
        force: chance, at each moment of :data:`MOMENTS`, that everything that runs is preempted.
        limit: steps after which requests that wait are taken to wait for ever.

    Raises:
        RuntimeError: requests were still there after ``limit`` steps.
    """
    return _Storm(llm, asks, serving, random.Random(seed), force).run(limit)


class _Storm:
    def __init__(
        self, llm: Any, asks: Sequence[Ask], serving: Serving | None, rng: random.Random, force: float
    ) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.asks, self.rng, self.force = asks, rng, force
        self.timelines = [None if serving is None else Timeline.of(serving, len(a.prompt)) for a in asks]
        self.left = sorted(range(len(asks)), key=lambda i: (asks[i].joins, i), reverse=True)
        self.numbers: dict[str, int] = {}  # vLLM's name of a request -> its number
        self.done: set[int] = set()
        self.clock = 0  # steps, and those that nobody was there for
        self.outcome = Outcome([[] for _ in asks])

    def run(self, limit: int) -> Outcome:
        before = self._free_blocks()
        while self.left or self.engine.has_unfinished_requests():
            if self.outcome.steps >= limit:
                waiting = [i for i in self.numbers.values() if i not in self.done]
                raise RuntimeError(f"after {limit} steps requests {waiting} have not ended and {self.left} not begun")
            self._join()
            self._force()
            self._abort()
            for answer in self.engine.step():
                number = int(answer.request_id)
                if number not in self.done:
                    self.outcome.traces[number] = list(answer.outputs[0].token_ids)
                    self.outcome.hits.setdefault(number, answer.num_cached_tokens or 0)
                    if answer.finished:
                        self.done.add(number)
            self.outcome.steps, self.clock = self.outcome.steps + 1, self.clock + 1
            self.outcome.peak = max(self.outcome.peak, len(self.scheduler.running))
            self.outcome.starved += self._note_preemptions()
        self.outcome.lost = self._lost(before)
        return self.outcome

    # ---- the weather ----------------------------------------------------------------------------

    def _join(self) -> None:
        if self.left and not self.engine.has_unfinished_requests():  # nothing to wait for
            self.clock = max(self.clock, self.asks[self.left[-1]].joins)
        while self.left and self.asks[self.left[-1]].joins <= self.clock:
            number = self.left.pop()
            ask = self.asks[number]
            inputs = {"prompt_token_ids": ask.prompt}
            name = self.engine.add_request(str(number), inputs, _params(ask), priority=ask.priority)
            self.numbers[name] = number

    def _force(self) -> None:
        now = {moment for request in self.scheduler.running for moment in self._moments(request)}
        for moment in sorted(now):
            if self.rng.random() < self.force:
                self.engine.reset_prefix_cache(reset_running_requests=True)
                self.outcome.forced[moment] += 1
                self._note_preemptions()
                return

    def _moments(self, request: Any) -> Iterable[str]:
        computed = request.num_computed_tokens
        timeline = self.timelines[self.numbers[request.request_id]]
        if 0 < computed < request.num_prompt_tokens:
            yield "prefill"
        if timeline is not None and computed >= request.num_prompt_tokens and timeline.due(computed):
            yield "round"
        if request.num_output_tokens == 1:
            yield "admitted"

    def _abort(self) -> None:
        for request in list(self.scheduler.requests.values()):
            number = self.numbers[request.request_id]
            quits = self.asks[number].quits
            if quits is not None and self._quits(request, number, quits):
                self.engine.abort_request([str(number)])
                self.outcome.aborted[quits] += 1
                self.done.add(number)

    def _quits(self, request: Any, number: int, quits: Quits) -> bool:
        if quits == "preempted":
            return str(request.status).endswith("PREEMPTED")
        if request.num_output_tokens < self.asks[number].after:
            return False
        return quits == "tokens" or "round" in self._moments(request)

    # ---- looking on -----------------------------------------------------------------------------

    def _note_preemptions(self) -> int:
        """Preemptions since the last look."""
        found = 0
        for request in self.scheduler.requests.values():
            number = self.numbers[request.request_id]
            new = request.num_preemptions - self.outcome.preempted[number]
            if new:
                found += new
                self.outcome.preempted[number] += new
                timeline = self.timelines[number]
                # Its last token has not been written.
                ran = 0 if timeline is None else timeline.rounds(max(0, request.num_tokens - 2))
                self.outcome.replayed += [ran] * new
        return found

    def _free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _lost(self, before: int) -> list[str]:
        """What an idle engine still holds."""
        from ..vllm.manager import KeepManager

        pool = self.scheduler.kv_cache_manager.block_pool
        lost = []
        if self._free_blocks() != before:
            lost.append(f"{before} blocks were free, now {self._free_blocks()}")
        held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
        if held:
            lost.append(f"blocks {held} are still held")
        for manager in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            known = {"req_to_blocks": manager.req_to_blocks, "num_cached_block": manager.num_cached_block}
            if isinstance(manager, KeepManager):
                known |= {"kvkeep's manager": manager._held, "kvkeep's progress": manager.progress._tokens}
            lost += [f"{name} still knows requests {sorted(kept)}" for name, kept in known.items() if kept]
        return lost


def _params(ask: Ask) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=ask.length, ignore_eos=True, detokenize=False, extra_args={SEED: ask.sample}
    )
