"""A sink that writes a log archive (`tikv_br.archive`): every version of every key, in Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tikv_br.archive.records import InexactPeriod, MissedIngest
from tikv_br.archive.writer import LogWriter
from tikv_br.incremental.sinks.base import Sink

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.incremental.feed.events import Missed, Scanned


class LogSink(Sink):
    """Confirms what is part of the log, which is less than what was written. The first `resolve` starts or resumes the log."""

    all_versions = True

    def __init__(self, writer: LogWriter, place: str) -> None:
        self._writer = writer
        self.place = place

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`; durable only after `resolve` has returned a ts that covers it. Raises `StorageUnreachable`."""
        self._writer.append(batch)

    def resolve(self, ts: int, *, flush: bool = False) -> int:
        """See `Sink.resolve`. Raises as `LogWriter.start` and `LogWriter.flush`."""
        self._writer.start(ts)
        if flush or self._writer.is_due:
            self._writer.flush(ts)
        return self._writer.flushed_ts

    def mark_inexact(self, scanned: Scanned) -> None:
        """See `Sink.mark_inexact`: recorded in the next segment."""
        span = scanned.span
        self._writer.mark_inexact(InexactPeriod(span.start, span.end, scanned.from_ts, scanned.to_ts))

    def mark_missed(self, missed: Missed) -> None:
        """See `Sink.mark_missed`: recorded in the next segment, as a gap."""
        span = missed.span
        self._writer.mark_missed(MissedIngest(span.start, span.end, missed.from_ts, missed.to_ts, missed.cause))

    def close(self) -> None:
        """See `Sink.close`. Rows that are not part of the log yet are dropped: the feed delivers them again."""
