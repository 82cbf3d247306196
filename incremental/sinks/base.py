"""The interface of a sink. `tests/unit/incremental/sink_suite.py` tests every implementation against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.incremental.feed.events import Missed, Scanned


def unfenced() -> None:
    """A fence that allows every write."""


class Sink(Protocol):
    """Writes batches of changes, in order. Not thread-safe.

    At least once: after an error or a kill the same rows may be written again, in the same or in other batches, even if some
    of them were written before. In the end the sink has the last row of each key, despite duplicates.
    """

    place: str
    """The identity of the target, which does not change when only its addresses do."""
    all_versions: bool = False
    """True if `write` gets every version of a key, not only the last one of each batch."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows of `tikv_br.formats.columns.SCHEMA`, in order of ts.

        Raises `ClusterUnreachable`, `RetryBudgetExhausted` and `StorageUnreachable`, after which the same batch may be
        retried; other `TikvBrError` are permanent.
        """

    def resolve(self, ts: int, *, flush: bool = False) -> int:  # noqa: ARG002 - sinks that buffer need it
        """`write` was given all changes up to `ts`; returns the ts up to which they are durable, everything if `flush`.

        Called first with the ts from which this run starts, then with ascending ones. Raises as `write`.
        """
        return ts

    def mark_inexact(self, scanned: Scanned) -> None:  # noqa: ARG002 - for sinks that keep all versions
        """Some older versions may be missing, see `Scanned`."""
        return

    def mark_missed(self, missed: Missed) -> None:  # noqa: ARG002 - for sinks that record what they lack
        """Rows are missing, see `Missed`."""
        return

    def close(self) -> None:
        """Release resources; nothing written is lost. Idempotent."""
