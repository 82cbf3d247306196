"""A sink that forgets: to measure what feeds and sorts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from incremental.sinks.base import Sink

if TYPE_CHECKING:
    import pyarrow as pa


class BlackholeSink(Sink):
    """Counts rows and bytes, keeps none."""

    place = "nowhere"

    def __init__(self) -> None:
        self.rows = 0
        self.bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`."""
        self.rows += batch.num_rows
        self.bytes += batch.nbytes

    def close(self) -> None:
        """See `Sink.close`."""
