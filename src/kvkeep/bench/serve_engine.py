"""One vLLM engine of ``kvkeep bench serve``, in a process of its own, and the handle that drives it.

``python -m kvkeep.bench.serve_engine`` reads JSON lines from stdin and answers each with one on stdout; everything
vLLM prints goes to a log. Arms' engines live side by side and only one works at a time, so arms can take turns within
seconds, while none sees another's memory, threads or caches.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MINUTE = 60.0  # seconds an engine gets to end by itself


class Engine:
    """A running engine.

    Args:
        options: keyword arguments of ``vllm.LLM``, as JSON can hold them.
        threads: of its kernels.
        space: GiB that vLLM may give to the cache; the pool itself is set by ``num_gpu_blocks_override``.
        log: file for what vLLM prints.
    """

    def __init__(self, options: Mapping[str, Any], threads: int, space: int, log: Path) -> None:
        self._log = log
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in the same process: one clock for all of it
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that take turns need not share cores out
            "VLLM_CPU_KVCACHE_SPACE": str(space),
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(threads),
            "KMP_BLOCKTIME": "1",  # ms that an idle thread spins, which would count as work
        }
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                env=environment, text=True,
            )  # fmt: skip
        self._send(dict(options))

    def ready(self) -> dict[str, Any]:
        """Wait until it has started.

        Returns:
            ``vllm``, its version; ``blocks`` that requests can have; ``concurrency``, requests of ``max_model_len``
            tokens that vLLM says fit at once; ``vocabulary``, token ids.
        """
        return self._answer()

    def run(self, prompts: Sequence[Sequence[int]], length: int) -> dict[str, Any]:
        """Generate ``length`` tokens after each prompt, all submitted at once; see :func:`measured`."""
        self._send({"prompts": [list(p) for p in prompts], "length": length})
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has died, which whoever waited for an answer was told
            self._process.stdin.close()
        try:
            self._process.wait(MINUTE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        found: dict[str, Any] = json.loads(line)
        return found

    def _died(self) -> RuntimeError:
        code = self._process.wait(MINUTE)
        tail = self._log.read_text(errors="replace").splitlines()[-12:]
        return RuntimeError(f"a vLLM engine ended with code {code}; its log {self._log} ends:\n" + "\n".join(tail))


# ---- in the engine's process --------------------------------------------------------------------------


def measured(llm: Any, prompts: Sequence[Sequence[int]], length: int) -> dict[str, float]:
    """Run requests that are submitted together, step by step, and count what the scheduler did.

    Returns:
        ``wall_s``, ``cpu_s`` (of all threads), ``tokens`` generated, ``steps``, ``preemptions``; ``running_mean`` (over
        steps) and ``running_peak``, requests in a step; ``blocks_peak``, blocks that requests held; and, from kvkeep,
        ``rounds`` and ``evicted_entries`` (summed over requests), ``round_seconds`` and ``moved_entries``.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from kvkeep.vllm import stats

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    params = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    before = stats(llm)
    gc.collect()
    held: list[int] = []
    running: list[int] = []
    tokens, wall, cpu = 0, time.perf_counter(), _cpu_seconds()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    requests = list(scheduler.requests.values())  # kept, since the scheduler forgets requests that end
    while engine.has_unfinished_requests():
        ended = engine.step()
        tokens += sum(len(output.outputs[0].token_ids) for output in ended)
        running.append(len(scheduler.running) + len(ended))
        held.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # block 0 is vLLM's null block
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    if tokens != length * len(prompts):
        raise RuntimeError(f"the engine made {tokens} tokens where {len(prompts)} times {length} were asked for")
    after = stats(llm)
    names = ("rounds", "evicted_entries", "round_seconds", "moved_entries")
    return {
        "wall_s": wall, "cpu_s": cpu, "tokens": tokens, "steps": len(running),
        "preemptions": sum(request.num_preemptions for request in requests),
        "running_mean": sum(running) / len(running), "running_peak": max(running), "blocks_peak": max(held),
        **{name: after.get(name, 0) - before.get(name, 0) for name in names},
    }  # fmt: skip


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def _serve(commands: IO[str], answers: IO[str]) -> None:
    from vllm import LLM
    from vllm.version import __version__

    def answer(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    llm = LLM(**json.loads(commands.readline()))
    config = llm.llm_engine.vllm_config
    answer({
        "vllm": __version__,
        "blocks": config.cache_config.num_gpu_blocks - 1,
        "concurrency": config.cache_config.kv_cache_max_concurrency,
        "vocabulary": config.model_config.get_vocab_size(),
    })  # fmt: skip
    for line in commands:
        answer(measured(llm, **json.loads(line)))


if __name__ == "__main__":
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints goes to the log
    _serve(sys.stdin, _answers)
