"""Worker processes: each loads a model once and takes one batch after the other."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from .cells import Cell
from .plan import Batch
from .worker import Setup, Worker

Lines = list[dict[str, Any]]


class BatchFailed(RuntimeError):
    """A batch raised, or the process that ran it died. The message names its cell.

    Attributes:
        details: the traceback, "" if there is none.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def results(
    batches: Sequence[Batch], cells: Mapping[str, Cell], setup: Setup, workers: int
) -> Iterator[tuple[Batch, Lines]]:
    """Run batches and give their lines as they finish.

    Args:
        batches: handed out in this order.
        cells: by id.
        setup: what they share.
        workers: processes; 0 runs in this process.

    Raises:
        BatchFailed: see there; the other workers are stopped.
    """
    if not batches:
        return
    if workers == 0:
        yield from _here(batches, cells, setup)
        return
    pool = _Pool(min(workers, len(batches)), setup)
    try:
        yield from pool.run(batches, cells)
    finally:
        pool.stop()


def _here(batches: Sequence[Batch], cells: Mapping[str, Cell], setup: Setup) -> Iterator[tuple[Batch, Lines]]:
    worker = Worker(setup)
    for batch in batches:
        try:
            lines = worker.run(batch, cells[batch.cell])
        except Exception as error:
            raise BatchFailed(_failure(batch, _say(error)), traceback.format_exc()) from error
        yield batch, lines


class _Pool:
    def __init__(self, count: int, setup: Setup) -> None:
        context = mp.get_context("spawn")  # torch does not survive a fork
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._busy: dict[Connection, Batch] = {}
        with _ignoring_interrupts():  # Ctrl-C is the parent's business; children inherit that
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, setup), daemon=True)
                process.start()
                theirs.close()  # so that a dead worker's pipe ends
                self._processes.append(process)
                self._pipes.append(ours)

    def run(self, batches: Sequence[Batch], cells: Mapping[str, Cell]) -> Iterator[tuple[Batch, Lines]]:
        waiting = list(reversed(batches))
        for pipe in self._pipes:
            self._give(pipe, waiting, cells)
        while self._busy:
            for ready in wait(list(self._busy)):
                assert isinstance(ready, Connection)
                batch = self._busy.pop(ready)
                try:
                    worked, answer = ready.recv()
                except (EOFError, OSError) as error:
                    reason = "its process died (killed, or out of memory?)"
                    raise BatchFailed(_failure(batch, reason)) from error
                if not worked:
                    raise BatchFailed(_failure(batch, answer[0]), answer[1])
                self._give(ready, waiting, cells)
                yield batch, answer

    def _give(self, pipe: Connection, waiting: list[Batch], cells: Mapping[str, Cell]) -> None:
        if not waiting:
            return
        batch = waiting.pop()
        self._busy[pipe] = batch
        try:
            pipe.send((batch, cells[batch.cell]))
        except OSError as error:
            raise BatchFailed(_failure(batch, "its process died before it began")) from error

    def stop(self) -> None:
        """End the processes; a batch that is under way is lost and runs again on a resume."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()  # an idle worker ends at this
            if pipe in self._busy:
                process.terminate()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, setup: Setup) -> None:
    """A worker process: batches in, lines out, until the parent closes the pipe or dies."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an orderly end: libraries clean up behind them
    _die_with_parent()
    worker: Worker | None = None
    while True:
        try:
            batch, cell = pipe.recv()
        except EOFError:
            return
        try:
            worker = worker or Worker(setup)
            answer: tuple[bool, Any] = (True, worker.run(batch, cell))
        except Exception as error:
            answer = (False, (_say(error), traceback.format_exc()))
        pipe.send(answer)


def _die_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _failure(batch: Batch, reason: str) -> str:
    return f"cell {batch.cell}, batch {batch.number} failed: {reason}"
