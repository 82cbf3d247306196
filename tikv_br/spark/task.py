"""What a task is given, and how what it has to say is packed.

A task talks to the driver by messages, ``(kind, index, attempt, body)``: ``progress`` with the bytes and keys so far, and
``outcome`` with its result or error. The same message may come twice, late, or from an attempt that was given up: the
driver (`collector`) takes the first outcome of an index and the newest progress.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tikv_br.errors import TaskFailed, TikvBrError
from tikv_br.spark.memory import keep_freed_memory

T = TypeVar("T")
R = TypeVar("R")
REPORT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a task; ``body`` is (bytes, keys) for progress, a pickled result or error for an outcome."""

    kind: str  # "progress", "result" or "error"
    index: int
    attempt: int
    body: tuple[int, int] | bytes


Send = Callable[[Message], None]


class TaskCancelled(Exception):
    """No error: `TaskContext.report` raises it in a task that nobody waits for any more; let it pass."""


class TaskContext:
    """A task's line to the driver. ``attempt`` counts from 0: names of what a task writes should contain it."""

    def __init__(self, index: int, attempt: int, send: Send, cancelled: threading.Event | None = None) -> None:
        self.index = index
        self.attempt = attempt
        self._send = send
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._bytes = 0
        self._keys = 0
        self._next_report = 0.0

    def report(self, *, data_bytes: int = 0, keys: int = 0) -> None:
        """Add to what this task has done. Cheap (messages leave five times a second); thread-safe.

        Raises `TaskCancelled` when the run has failed elsewhere. Never fails for want of a listener.
        """
        if self._cancelled is not None and self._cancelled.is_set():
            raise TaskCancelled
        with self._lock:
            self._bytes += data_bytes
            self._keys += keys
            now = time.monotonic()
            if now < self._next_report:
                return
            self._next_report = now + REPORT_SECONDS
            message = Message("progress", self.index, self.attempt, (self._bytes, self._keys))
        self._send(message)

    def totals(self) -> Message:
        """Return the last word on progress."""
        return Message("progress", self.index, self.attempt, (self._bytes, self._keys))


def run_task(function: Callable[[T, TaskContext], R], task: T, name: str, context: TaskContext) -> Message:
    """Run one task to its outcome. The edge of a task: whatever is raised becomes an error that survives the way home."""
    keep_freed_memory()
    try:
        body = pickle.dumps(function(task, context))
    except TaskCancelled:
        return _failure(context, TaskFailed(f"task {name}: cancelled"))
    except TikvBrError as error:
        error.message = f"task {name}: {error.message}"
        return _failure(context, error)
    except Exception as error:  # noqa: BLE001 - the edge
        wrapped = TaskFailed(f"task {name}: unexpected {type(error).__name__}: {error}\n{traceback.format_exc()}")
        return _failure(context, wrapped)
    context._send(context.totals())  # noqa: SLF001 - the last progress leaves unthrottled
    return Message("result", context.index, context.attempt, body)


def _failure(context: TaskContext, error: TikvBrError) -> Message:
    return Message("error", context.index, context.attempt, pickle.dumps(error))
