"""The driver's book of a run: which tasks have ended, how far the others are."""

from __future__ import annotations

import pickle
import queue
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tikv_br.errors import TikvBrError
from tikv_br.progress_events import Reporter, TasksProgress
from tikv_br.spark.task import Message

R = TypeVar("R")
PROGRESS_SECONDS = 0.1


class Collector(Generic[R]):
    """Takes the messages of all tasks, in any order and more than once; used by one thread but for `put`."""

    def __init__(
        self, total: int, on_result: Callable[[R], None], reporter: Reporter, expected_task_bytes: int = 0
    ) -> None:
        self._total = total
        self._on_result = on_result
        self._reporter = reporter
        self._expected = expected_task_bytes
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._done: set[int] = set()
        self._progress: dict[int, tuple[int, int, int]] = {}  # index -> attempt, bytes, keys
        self._partial = 0.0  # sum of the fractions of running tasks
        self._sums = [0, 0]
        self._fraction = 0.0
        self._begin = time.monotonic()
        self._reported = 0.0

    def put(self, message: Message | None) -> None:
        """Hand in a message from any thread; None only wakes `take`."""
        self._queue.put(message)

    def begin(self) -> None:
        """Count time from now: what went before, such as the start of a session, is no work of tasks."""
        self._begin = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether every task has given its result."""
        return len(self._done) == self._total

    def take(self, seconds: float) -> None:
        """Wait up to ``seconds`` for messages and book all that are there. Raises the error that a task has sent."""
        try:
            message = self._queue.get(timeout=seconds)
            while True:
                if message is not None:
                    self.book(message)
                message = self._queue.get_nowait()
        except queue.Empty:
            pass
        self._report()

    def book(self, message: Message) -> None:
        """Book one message; a second outcome of a task changes nothing. Raises the error that a task has sent."""
        if message.index in self._done:
            return
        if message.kind == "progress":
            self._book_progress(message)
            return
        outcome = pickle.loads(message.body)  # type: ignore[arg-type] # noqa: S301 - made by a task of this run
        if message.kind == "error":
            error: TikvBrError = outcome
            raise error
        self._done.add(message.index)
        self._partial -= self._share(self._progress.get(message.index, (0, 0, 0))[1])
        self._on_result(outcome)

    def _book_progress(self, message: Message) -> None:
        data_bytes, keys = message.body
        before = self._progress.get(message.index, (0, 0, 0))
        if message.attempt < before[0]:
            return
        self._progress[message.index] = (message.attempt, int(data_bytes), int(keys))
        self._sums[0] += int(data_bytes) - before[1]
        self._sums[1] += int(keys) - before[2]
        self._partial += self._share(int(data_bytes)) - self._share(before[1])

    def _share(self, data_bytes: int) -> float:
        """How much of a task its bytes are, going by the expected size; short of the whole until it has ended."""
        return min(data_bytes / self._expected, 0.99) if self._expected else 0.0

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < PROGRESS_SECONDS and not self.complete:
            return
        self._reported = now
        fraction = (len(self._done) + max(self._partial, 0.0)) / self._total if self._total else 1.0
        self._fraction = 1.0 if self.complete else max(self._fraction, min(fraction, 0.999))
        done_bytes, done_keys = self._sums
        self._reporter(
            TasksProgress(len(self._done), self._total, done_bytes, done_keys, self._fraction, now - self._begin)
        )
