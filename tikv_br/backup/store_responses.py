"""The stores' responses to backup requests: streams, errors, and the ranges that they cover."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from tikv_br import retry
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.region_errors import NO_TIMESTAMP, Action, RegionErrorSeen, check_values
from tikv_br.cluster.store import BackupStream
from tikv_br.cluster.timestamps import show_ts
from tikv_br.errors import (
    ApiVersionMismatch,
    ClusterError,
    ClusterUnreachable,
    RequestRefused,
    StorageDenied,
    StorageFull,
    StorageObjectMissing,
    StorageReadOnly,
    TikvBrError,
)
from tikv_br.formats.keys.ranges import KeyRange, gaps, intersection
from tikv_br.formats.keys.text import show_key
from tikv_br.retry import Backoff
from tikv_br.storage.credentials import strip_names

POLL_SECONDS = 0.2

Event: TypeAlias = "tuple[int, brpb_pb2.BackupResponse | ClusterError]"
"""The number of a stream, and an answer or the error that it ended with."""


class AnswerStream(Protocol):
    """Responses to one request. Iterate once, in any thread."""

    @property
    def waiting(self) -> bool:
        """Return whether the request is not sent yet."""

    def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]: ...

    def cancel(self) -> None:
        """End the stream. Thread-safe."""


def read_all(streams: Sequence[AnswerStream], patience: float) -> Generator[Event | None]:
    """The events of all streams until they have ended, and None every `POLL_SECONDS` without one, for the consumer's own checks.

    Cancels all streams if the consumer closes this early, and those that were sent if none of them gives a response for ``patience`` seconds:
    they end with `ClusterUnreachable`, whose message has that time.
    """
    arrived: queue.SimpleQueue[tuple[int, brpb_pb2.BackupResponse | ClusterError | None]] = queue.SimpleQueue()

    def read(number: int, stream: AnswerStream) -> None:
        try:
            for answer in stream:
                arrived.put((number, answer))
        except ClusterError as error:
            arrived.put((number, error))
        arrived.put((number, None))

    with ThreadPoolExecutor(max(len(streams), 1), thread_name_prefix="answers") as pool:
        try:
            readers = [pool.submit(read, number, stream) for number, stream in enumerate(streams)]
            open_streams = dict(enumerate(streams))
            silent_since: dict[int, float] = {}  # of the streams that were sent
            given_up = set[int]()
            while open_streams:
                try:
                    number, event = arrived.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    _raise_reader_errors(readers)
                    now = time.monotonic()
                    for number, stream in open_streams.items():
                        if not stream.waiting and now - silent_since.setdefault(number, now) > patience:
                            given_up.add(number)
                            stream.cancel()
                    yield None
                    continue
                silent_since.clear()  # a store may serve one request after the other
                if event is None:
                    del open_streams[number]
                elif number in given_up and isinstance(event, ClusterUnreachable):
                    yield number, ClusterUnreachable(f"{NO_ANSWER} for {patience:g} s")
                else:
                    yield number, event
        finally:
            _cancel(streams)


def _raise_reader_errors(readers: Sequence[Future[None]]) -> None:
    """Raise unexpected errors of the reader threads."""
    for reader in readers:
        if reader.done():
            reader.result()


def _cancel(streams: Sequence[AnswerStream]) -> None:
    """Cancel all; those that wait at a gate first, as the end of another stream opens the gate."""
    for stream in sorted(streams, key=lambda stream: not stream.waiting):
        stream.cancel()


class GatedStream:
    """A `BackupStream` whose request is sent once the gate is free."""

    def __init__(self, gate: threading.Lock, send: Callable[[], BackupStream]) -> None:
        self._gate = gate
        self._send = send
        self._stream: BackupStream | None = None
        self._cancelled = threading.Event()
        self.waiting = True

    def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]:
        while not self._gate.acquire(timeout=POLL_SECONDS):
            self._check_cancelled()
        try:
            self._check_cancelled()
            self.waiting = False
            self._stream = self._send()
            if self._cancelled.is_set():
                self._stream.cancel()
            yield from self._stream
        finally:
            self._gate.release()

    def cancel(self) -> None:
        """Cancel the request; if it is not sent yet, it never will be."""
        self._cancelled.set()
        if self._stream is not None:
            self._stream.cancel()

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise ClusterUnreachable("the request was cancelled before it was sent")


STORAGE_ERROR = Backoff("stores cannot write to the storage", 0.5, 5.0, jitter=True)
LOCKED = Backoff("locked by a transaction", 0.01, 1.0, jitter=True)
STORES_WRITE_HINT = (
    "The stores write the files themselves: a local path must be the same shared folder on all stores' machines and on this "
    "one; a bucket must be reachable for the stores, with permission to write. With --engine scan only this machine writes."
)
NO_ANSWER = "no answer"
SILENT_SECONDS = 60.0
"""Seconds without an answer after which a warning names a likely cause."""
SILENT_HINT = "a store that cannot reach the storage, or has no credentials for it, keeps trying for minutes before it answers; its log shows these tries"

_FATAL: tuple[tuple[type[TikvBrError], tuple[str, ...]], ...] = (
    (ApiVersionMismatch, ("invalid backup version",)),
    (
        StorageDenied,
        (
            "permissiondenied",
            "accessdenied",
            "access denied",
            "invalidaccesskeyid",
            "signaturedoesnotmatch",
            "authenticationfailed",
            "authorizationfailure",
            "authorizationpermissionmismatch",
            "403 forbidden",
            "find aws credentials",  # TiKV's own wording
        ),
    ),
    (StorageFull, ("storagefull", "code: 28,", "no space left")),
    (StorageReadOnly, ("readonlyfilesystem", "code: 30,", "read-only file system")),
    (StorageObjectMissing, ("kind: notfound", "nosuchbucket", "containernotfound", "bad storage backend")),
)
"""Errors that a retry does not fix, by substrings of the message in lower case."""


class RetryAdvice(NamedTuple):
    """Reason why a range is still missing, and the wait before it is requested again."""

    backoff: Backoff
    cause: str
    at_least: float = 0.0
    """Minimum wait in seconds, as requested by the store."""


def classify_error(error: brpb_pb2.Error, who: str, backend: brpb_pb2.StorageBackend) -> RetryAdvice:
    """Return the retry after an error of store ``who``, which was to write to ``backend``.

    Raises errors that a retry does not fix, as `StorageError` or `ClusterError`.
    """
    if error.HasField("region_error"):
        seen = RegionErrorSeen(error.region_error)
        if seen.reaction.action is Action.FAIL:
            raise RequestRefused(f"{who} refused the backup: {seen}")
        requested = error.region_error.server_is_busy.backoff_ms / 1000
        return RetryAdvice(seen.reaction.backoff, f"{who}: {seen}", requested)
    if error.HasField("cluster_id_error"):
        raise RequestRefused(f"{who} belongs to cluster {error.cluster_id_error.current}: {error.msg}")
    if error.kv_error.HasField("locked"):
        lock = error.kv_error.locked
        began = show_ts(lock.lock_version, age=False)
        return RetryAdvice(LOCKED, f"{who}: the transaction that began at {began} has locked {show_key(lock.key)}")
    if "InvalidMaxTsUpdate" in error.msg:
        raise RequestRefused(
            f"{who} refused backup-ts, which is ahead of PD's timestamps: {error.msg}",
            hint="Check the clocks of PD's members, and pass --no-resume to start over.",
        )
    if any(text in error.msg for text in NO_TIMESTAMP):
        return RetryAdvice(retry.PD_UNAVAILABLE, f"{who}: {error.msg}")
    check_values(error.msg)
    lowered = strip_names(error.msg, backend).lower()
    for kind, marks in _FATAL:
        if any(mark in lowered for mark in marks):
            hint = None if kind in {ApiVersionMismatch, StorageFull} else STORES_WRITE_HINT
            raise kind(f"{who} cannot back up: {error.msg}", hint=hint)
    return RetryAdvice(STORAGE_ERROR, f"{who}: {error.msg or 'an error without a message'}")


def longest_wait(advice: list[RetryAdvice]) -> RetryAdvice:
    """The advice with the longest wait; without any, the leaders have moved."""
    silent = RetryAdvice(retry.REGION_MISS, "no store answered for a part of the interval; its leader has moved")
    return max(advice, key=lambda each: (each.at_least, each.backoff.base), default=silent)


class StoredSst(Struct, frozen=True):
    """A file, as described by the store that wrote it."""

    name: str
    """Object name in the backup."""
    file: brpb_pb2.File


class StoreAnswer(Struct, frozen=True):
    """A part of the interval (RPC keys of the source), and the files with its rows; no file if it has no rows."""

    range: KeyRange
    files: tuple[StoredSst, ...]


class ResponseSet:
    """The valid answers; their ranges do not overlap."""

    def __init__(self, whole: KeyRange) -> None:
        self._whole = whole
        self._answers: list[StoreAnswer] = []

    def add(self, answer: StoreAnswer) -> list[StoreAnswer]:
        """Add an answer; returns the answers that it replaces, which are those that overlap it.

        What a replaced answer covered beyond the new one becomes a gap: files are only used as a whole.
        """
        if answer.range.is_empty:
            return []
        replaced = [old for old in self._answers if not intersection(old.range, answer.range).is_empty]
        self._answers = [old for old in self._answers if old not in replaced] + [answer]
        return replaced

    def gaps(self) -> list[KeyRange]:
        """The ranges without an answer, in key order."""
        return gaps(self._whole, (answer.range for answer in self._answers))

    def answers(self) -> list[StoreAnswer]:
        """The valid answers, in key order."""
        return sorted(self._answers, key=lambda answer: answer.range)

    def files(self) -> Iterable[StoredSst]:
        """The files of all valid answers, in key order."""
        for answer in self.answers():
            yield from answer.files
