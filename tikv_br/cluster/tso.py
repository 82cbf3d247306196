"""Timestamps from PD: callers that ask at the same time share one request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tikv_br.cluster.pb import pdpb_pb2
from tikv_br.cluster.pd_connection import Leader, PdConnection
from tikv_br.cluster.timestamp import MAX_LOGICAL, compose
from tikv_br.errors import ClusterError, ClusterUnreachable, UsageError


@dataclass(slots=True)
class _Order:
    """What one caller wants, and what became of it."""

    count: int
    first: int = 0
    error: ClusterError | None = None

    @property
    def open(self) -> bool:
        return self.first == 0 and self.error is None


class Tso:
    """Hands out timestamps. Whoever gets the lock first fetches for all who wait. Thread-safe."""

    def __init__(self, connection: PdConnection) -> None:
        self._connection = connection
        self._fetching = threading.Lock()
        self._queue_lock = threading.Lock()
        self._queue: list[_Order] = []

    def get(self, count: int = 1) -> int:
        """The first of `count` consecutive timestamps that nobody else gets. Raises `ClusterError`, `UsageError`."""
        if not 0 < count <= MAX_LOGICAL:
            raise UsageError(f"{count} timestamps at once: 1..{MAX_LOGICAL}")
        order = _Order(count)
        with self._queue_lock:
            self._queue.append(order)
        while order.open:
            with self._fetching:
                if order.open:
                    self._serve(self._take_batch())
        if order.error is not None:
            raise order.error
        return order.first

    def _take_batch(self) -> list[_Order]:
        """The orders at the head of the queue, as many as one request can ask for."""
        with self._queue_lock:
            total = size = 0
            for order in self._queue:
                total += order.count
                if total > MAX_LOGICAL:
                    break
                size += 1
            batch, self._queue = self._queue[:size], self._queue[size:]
            return batch

    def _serve(self, batch: Sequence[_Order]) -> None:
        failure: ClusterError = ClusterUnreachable("PD Tso: interrupted")
        first = 0
        try:
            first = self._fetch(sum(order.count for order in batch))
        except ClusterError as error:
            failure = error
        finally:  # an interrupt must not leave the others waiting
            for order in batch:
                if first:
                    order.first = first
                    first += order.count
                else:
                    order.error = failure

    def _fetch(self, count: int) -> int:
        """The first of `count` fresh timestamps; PD answers with the last of them."""
        connection = self._connection

        def send(leader: Leader) -> int:
            answers = leader.pd.Tso(iter((request,)), timeout=connection.config.request_timeout)
            try:
                for answer in answers:
                    last = compose(answer.timestamp.physical, answer.timestamp.logical)
                    return last - answer.count + 1
            finally:
                answers.cancel()
            raise ClusterUnreachable(f"PD {leader.address}: the stream of timestamps ended")

        request = pdpb_pb2.TsoRequest(count=count)
        request.header.cluster_id = connection.cluster_id
        return connection.call(send, "PD Tso")
