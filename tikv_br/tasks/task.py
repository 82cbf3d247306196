"""The context of a task, its messages to the driver, and the `Collector` that takes them there.

A message is the progress, the result or the error of one attempt. It may come twice, late, or from an attempt that was
abandoned: the `Collector` uses the first outcome of a task and its newest progress.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar, cast

from msgspec import Struct

from tikv_br.cancellation import Cancellation, TaskCancelled
from tikv_br.errors import TaskFailed, TikvBrError
from tikv_br.progress_events import Reporter, TasksProgress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>
_LARGEST_KEPT = 32 << 20
"""Bytes of one allocation; the most that glibc takes. Pages of a scan have 4 MiB."""
_MOST_KEPT = 256 << 20
"""Bytes that may lie free at the end of the heap."""
_MOST_HEAPS = 2
"""Pages go from gRPC's threads to ours; each heap beyond these keeps what others could use, 50 MiB after 800 regions."""


@functools.cache
def keep_freed_memory() -> bool:
    """Have glibc reuse what tasks free instead of giving it back; False where the C library knows no such thing.

    A task allocates and frees the same few MiB for every page. Given back to the kernel each time, they cost a page
    fault for every 4 KiB: a quarter of all processor time of a scan. Called before there are threads, it also lowers the peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    wanted = {_M_MMAP_THRESHOLD: _LARGEST_KEPT, _M_TRIM_THRESHOLD: _MOST_KEPT, _M_ARENA_MAX: _MOST_HEAPS}
    return all(mallopt(name, value) for name, value in wanted.items())


T = TypeVar("T")
R = TypeVar("R")
REPORT_SECONDS = 0.2


class TaskMessage(Struct, frozen=True):
    """Message of a task: progress of the attempt, and with an outcome the pickled result or error."""

    kind: Literal["progress", "result", "error"]
    index: int
    attempt: int
    totals: tuple[int, int]
    """Bytes and keys so far."""
    body: bytes = b""


Send = Callable[[TaskMessage], None]


class SharedObjects:
    """Objects that tasks of one process share, such as connections: one per class. Thread-safe."""

    def __init__(self, objects: Iterable[object] = ()) -> None:
        self._objects: dict[type, object] = {type(each): each for each in objects}
        self._lock = threading.Lock()

    def get(self, kind: type[R]) -> R:
        """The object of this class, made without arguments if there is none yet."""
        with self._lock:
            if kind not in self._objects:
                self._objects[kind] = kind()
            return cast("R", self._objects[kind])


class TaskContext:
    """A task's connection to its run.

    ``attempt`` is Spark's, from 0, and orders progress only: attempts may run at the same time, and a retry within a task keeps its
    number. So names of what a task writes need a random token.
    """

    def __init__(
        self,
        index: int,
        attempt: int,
        send: Send,
        cancellation: Cancellation | None = None,
        shared: SharedObjects | None = None,
    ) -> None:
        self.index = index
        self.attempt = attempt
        self._send = send
        self._cancellation = cancellation
        self.shared = (shared or SharedObjects()).get
        """``shared(kind)``: the object of a class that all tasks in this process use."""
        self._lock = threading.Lock()
        self._bytes = 0
        self._keys = 0
        self._next_report = 0.0

    def report(self, *, data_bytes: int = 0, keys: int = 0) -> None:
        """Add to what this task has done. Cheap (messages leave five times a second); thread-safe.

        Raises `TaskCancelled`, but counts, when the run has failed elsewhere. Does not fail if the driver cannot be reached.
        """
        with self._lock:
            self._bytes += data_bytes
            self._keys += keys
            if self._cancellation is not None:
                self._cancellation.check()
            now = time.monotonic()
            if now < self._next_report:
                return
            self._next_report = now + REPORT_SECONDS
            message = self.message("progress")
        self._send(message)

    @contextlib.contextmanager
    def retract_on_error(self) -> Iterator[None]:
        """Take back what was reported within, by the end of all its threads, if it fails. Does not raise `TaskCancelled`."""
        before = self._bytes, self._keys
        try:
            yield
        except BaseException:
            with self._lock:
                self._bytes, self._keys = before
                message = self.message("progress")
            self._send(message)
            raise

    def message(self, kind: Literal["progress", "result", "error"], body: bytes = b"") -> TaskMessage:
        return TaskMessage(kind, self.index, self.attempt, (int(self._bytes), int(self._keys)), body)


def run_task(function: Callable[[T, TaskContext], R], task: T, name: str, context: TaskContext) -> TaskMessage:
    """Run one task to its outcome. Everything it raises becomes an error that can be pickled."""
    keep_freed_memory()
    try:
        body = pickle.dumps(function(task, context))
    except TaskCancelled:
        return _failure(context, TaskFailed(f"task {name}: cancelled"))
    except TikvBrError as error:
        error.message = f"task {name}: {error.message}"
        return _failure(context, error)
    except Exception as error:  # noqa: BLE001 - becomes the outcome
        wrapped = TaskFailed(f"task {name}: unexpected {type(error).__name__}: {error}\n{traceback.format_exc()}")
        return _failure(context, wrapped)
    return context.message("result", body)


def _failure(context: TaskContext, error: TikvBrError) -> TaskMessage:
    return context.message("error", pickle.dumps(error))


logger = logging.getLogger(__name__)
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
