"""Gives batches to a sink: at a limited rate, and again while it does not answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.errors import (
    ClusterTlsError,
    ClusterUnreachable,
    KafkaUnreachable,
    RetryBudgetExhausted,
    StorageUnreachable,
    TikvBrError,
)
from tikv_br.formats import columns
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.status import Rate
from tikv_br.retry import Backoff, Patience

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

PORTION_SECONDS = 0.25
"""Seconds that the changes of one write take at the rate limit."""
SINK = 0
"""Key of `RateLimit`: there is one sink."""
RETRYABLE = (ClusterUnreachable, ClusterTlsError, RetryBudgetExhausted, StorageUnreachable, KafkaUnreachable)
"""Errors of a sink that does not answer."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicateOptions:
    """Options of passing changes on to a sink. All times are in seconds."""

    save_every: float = 1.0
    """Interval of saving the checkpoint, in seconds; later changes are written again after a kill."""
    patience: float = 600.0
    """Seconds for which the sink may fail continuously before the sync fails."""
    state_patience: float = 60.0
    """Seconds for which the storage of the checkpoint may be unreachable before the sync fails."""
    longest_wait: float = 5.0
    """Maximum wait between retries of a failing sink (exponential backoff), in addition to the sink's own retries."""
    rate_limit: int = 0
    """Maximum bytes of keys and values per second that the sink is given; 0 = unlimited. A batch that is retried counts once."""


class SinkStopped(Exception):
    """`stop` was set while the sink failed, between two writes, or while changes waited for the rate limit."""


class SinkWriter:
    """Used by one thread; its public attributes may be read by any."""

    def __init__(
        self, sink: Sink, options: ReplicateOptions, stop: threading.Event, check: Callable[[], object]
    ) -> None:
        """`check` is called between attempts and while changes wait; what it raises ends the write."""
        self._sink, self._stop, self._check = sink, stop, check
        self._backoff = Backoff("sink", 0.1, options.longest_wait)
        self._patience = Patience(options.patience, "--sink-patience", f"the sink, {sink.place}, accepts no writes")
        self._limit = RateLimit(options.rate_limit, sleep=self._wait_for_limit)
        self._limited_seconds = 0.0
        self._limited = Rate()
        self.failures = 0
        """Number of batches that the sink failed and that were retried."""
        self.last_error = ""
        self.unanswered_at: float | None = None
        """Time at which a write last failed, on the monotonic clock. That write may still reach the sink until its request times out."""

    @property
    def failing_seconds(self) -> float:
        """Return the seconds since the sink stopped accepting writes; 0 while it accepts them."""
        return self._patience.failing_seconds

    @property
    def limited_share(self) -> float:
        """Return the part of the last `RATE_SECONDS` in which changes waited for the rate limit, 0 to 1."""
        return min(self._limited.value(self._limited_seconds), 1.0)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, with retries. Raises `SinkStopped`, the errors of `check`, and as `Sink.write`."""
        for portion in self._rate_limited(batch):
            if self._stop.is_set():
                raise SinkStopped
            self._retry(partial(self._sink.write, portion))

    def resolve(self, ts: int) -> int:
        """Call `Sink.resolve` with retries. Raises as `write`."""
        return self._retry(partial(self._sink.resolve, ts))

    def flush(self, ts: int) -> int:
        """Make the sink durable at the end; 0 if it does not answer: then the next run writes the rest again."""
        try:
            return self._sink.resolve(ts, flush=True)
        except RETRYABLE as error:
            log.warning("cannot write the last changes to the sink, the next run will: %s", error.message)
            return 0

    def _rate_limited(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows in portions, each when the rate limit allows it; all at once without a limit."""
        if not self._limit:
            yield batch
            return
        ends = np.concatenate(([0], np.cumsum(columns.row_sizes(batch))))
        done = 0
        while done < batch.num_rows:
            most = ends[done] + PORTION_SECONDS * self._limit.bytes_per_second
            stop = max(int(np.searchsorted(ends, most, "right")) - 1, done + 1)
            self._limit.spend(SINK, int(ends[stop] - ends[done]))
            yield batch.slice(done, stop - done)
            done = stop

    def _wait_for_limit(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check()
            began = time.monotonic()
            stopped = self._stop.wait(min(left, 1.0))
            self._limited_seconds += time.monotonic() - began
            self._limited.record(self._limited_seconds)
            if stopped:
                raise SinkStopped

    def _retry(self, call: Callable[[], T]) -> T:
        tries, began = 0, time.monotonic()
        while True:
            try:
                result = call()
            except TikvBrError as error:
                self.unanswered_at = time.monotonic()
                if not isinstance(error, RETRYABLE):
                    raise
                if self._stop.is_set():
                    raise SinkStopped from None
                self.failures += 1
                self.last_error = error.message
                log.warning("cannot write to the sink, retrying: %s", error.message)
                self._patience.fail(error, began)  # not from now: the sink's own retries have taken a while
            else:
                self._patience.end()
                return result
            self._check()
            tries += 1
            if self._stop.wait(self._backoff.delay(tries, 0.0)):
                raise SinkStopped
