"""A sink that tells which keys it is about to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from incremental.sinks.base import Sink

if TYPE_CHECKING:
    import pyarrow as pa


class TellingSink(Sink):
    """Writes to another sink, after somebody has been told the user keys of the batch."""

    def __init__(self, sink: Sink, told: Callable[[Iterable[bytes]], None]) -> None:
        self._sink = sink
        self._told = told
        self.place = sink.place

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Sink.write`. Raises what the one who is told raises, before anything is written."""
        self._told(batch["key"].to_pylist())
        self._sink.write(batch)

    def close(self) -> None:
        """See `Sink.close`."""
        self._sink.close()
