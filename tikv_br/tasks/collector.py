"""Takes the messages of tasks: results, errors and progress."""

from __future__ import annotations

import pickle
import queue
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tikv_br.errors import TikvBrError
from tikv_br.progress_events import Reporter, TasksProgress
from tikv_br.tasks.task import TaskMessage

R = TypeVar("R")
PROGRESS_SECONDS = 0.1


class Collector(Generic[R]):
    """Takes the messages of all tasks, in any order and more than once; used by one thread but for `put`."""

    def __init__(
        self, total: int, on_result: Callable[[R], None], reporter: Reporter, planned_bytes: Sequence[int] = ()
    ) -> None:
        self._total = total
        self._on_result = on_result
        self._reporter = reporter
        self._planned = planned_bytes  # of each task; empty = unknown, then tasks count alike
        self._planned_total = sum(planned_bytes)
        self._queue: queue.SimpleQueue[TaskMessage | None] = queue.SimpleQueue()
        self._done = bytearray(total)  # 1 = has given its result
        self._left = total
        self._progress: dict[int, tuple[int, int, int]] = {}  # of running tasks: index -> attempt, bytes, keys
        self._weight = 0.0  # of finished tasks and parts of tasks, in planned bytes or tasks
        self._weight_total = sum(map(self._weight_of, range(total)))
        self._sums = [0, 0]
        self._fraction = 0.0
        self._begin = time.monotonic()
        self._reported = 0.0

    def put(self, message: TaskMessage | None) -> None:
        """Hand in a message from any thread; None only wakes `take`."""
        self._queue.put(message)

    def begin(self) -> None:
        """Count time from now, without the start of the session."""
        self._begin = time.monotonic()

    @property
    def complete(self) -> bool:
        """Return whether every task has returned its result."""
        return not self._left

    def take(self, seconds: float) -> None:
        """Wait up to ``seconds`` for messages and process all that are there. Raises the error that a task has sent."""
        try:
            message = self._queue.get(timeout=seconds)
            while True:
                if message is not None:
                    self.process(message)
                message = self._queue.get_nowait()
        except queue.Empty:
            pass
        self._report()

    def process(self, message: TaskMessage) -> None:
        """Process one message; a second outcome of a task changes nothing. Raises the error that a task has sent."""
        if self._done[message.index]:
            return
        if message.kind == "progress":
            if message.attempt >= self._progress.get(message.index, (0, 0, 0))[0]:
                self._set_progress(message)
            return
        outcome = pickle.loads(message.body)  # noqa: S301 - made by a task of this run
        if message.kind == "error":
            error: TikvBrError = outcome
            raise error
        self._set_progress(message)  # of the attempt that counts, though a later one may have begun
        self._done[message.index] = 1
        self._left -= 1
        self._weight += self._weight_of(message.index) - self._share(
            message.index, self._progress.pop(message.index)[1]
        )
        self._on_result(outcome)

    def _set_progress(self, message: TaskMessage) -> None:
        data_bytes, keys = message.totals
        before = self._progress.get(message.index, (0, 0, 0))
        self._progress[message.index] = (message.attempt, data_bytes, keys)
        self._sums[0] += data_bytes - before[1]
        self._sums[1] += keys - before[2]
        self._weight += self._share(message.index, data_bytes) - self._share(message.index, before[1])

    def _weight_of(self, index: int) -> int:
        """Return the weight of a task in progress; an empty one also costs a request."""
        return max(self._planned[index], 1) if self._planned else 1

    def _share(self, index: int, data_bytes: int) -> float:
        """Return the weight of a running task's bytes: less than the whole until it has ended."""
        return min(data_bytes, 0.99 * self._weight_of(index)) if self._planned else 0.0

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < PROGRESS_SECONDS and not self.complete:
            return
        self._reported = now
        done = self._total - self._left
        fraction = max(self._weight, 0.0) / self._weight_total if self._total else 1.0
        self._fraction = 1.0 if self.complete else max(self._fraction, min(fraction, 0.999))
        done_bytes, done_keys = self._sums
        seconds = now - self._begin
        self._reporter(
            TasksProgress(done, self._total, done_bytes, done_keys, self._fraction, seconds, self._planned_total)
        )
