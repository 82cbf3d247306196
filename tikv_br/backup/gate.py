"""One Backup request at a time to each store: stores limit the rate of each request by itself, and so the sum is the limit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

from tikv_br.backup.streams import POLL_SECONDS
from tikv_br.cluster.config import ClusterConfig
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.cluster.store import BackupStream
from tikv_br.errors import ClusterUnreachable


@functools.cache
def gate_of(config: ClusterConfig, store_id: int) -> threading.Lock:  # noqa: ARG001 - the key of the cache
    """What the requests of this process to a store pass one after the other."""
    return threading.Lock()


class GatedStream:
    """The answers to a request that is sent once the gate is free; otherwise as `BackupStream`."""

    def __init__(self, gate: threading.Lock, send: Callable[[], BackupStream]) -> None:
        self._gate = gate
        self._send = send
        self._stream: BackupStream | None = None
        self._cancelled = threading.Event()
        self.waiting = True

    def __iter__(self) -> Iterator[brpb_pb2.BackupResponse]:
        while not self._gate.acquire(timeout=POLL_SECONDS):
            if self._cancelled.is_set():
                raise ClusterUnreachable("cancelled before it was sent")
        try:
            self.waiting = False
            self._stream = self._send()
            if self._cancelled.is_set():
                self._stream.cancel()
            yield from self._stream
        finally:
            self._gate.release()

    def cancel(self) -> None:
        """Send nothing any more, and have the store leave out the rest of what was sent."""
        self._cancelled.set()
        if self._stream is not None:
            self._stream.cancel()
