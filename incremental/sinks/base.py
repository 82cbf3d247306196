"""The seam that every sink implements; `tests/unit/incremental/sink_suite.py` holds each of them to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


class Sink(Protocol):
    """Takes changes batch by batch. For one thread, which calls `write` again only when it has returned.

    At least once: after an error, or a kill, the same batch may come again, whole or cut otherwise, also after parts of
    it arrived. Of one key the sink ends up with its last row of all batches written, whatever came twice.
    """

    place: str
    """Where it writes, in words that stay the same when only the addresses that lead there change."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Apply rows of `formats.records.SCHEMA`, by ascending ts; when it returns, they outlast a crash.

        Raises `ClusterUnreachable` and `RetryBudgetExhausted`, after which the same batch may be tried again;
        other `TikvBrError` for good.
        """

    def close(self) -> None:
        """Free what it holds; nothing written is lost. Harmless a second time."""
