"""Events of a change feed, from the bytes of a ``cdcpb.ChangeDataEvent`` straight into Arrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange

if TYPE_CHECKING:
    import pyarrow as pa

    from tikv_br.formats.columns import Bytes, Flags, Numbers, Offsets
    from tikv_br.formats.kernels.cdc import Table

LIKELY_ROW, LIKELY_ROWS = 64, 8
"""Room for rows is made by these guesses, bytes of a row and rows of an event; a message with more rows is walked through twice."""


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """One message of a feed. Its events are numbered in the order of the message, and so are the rows of all events."""

    region_ids: Numbers
    """The region of each event, shape (events,)."""
    request_ids: Numbers
    """The subscription of each event, shape (events,)."""
    initialized: Flags
    """True for an event that ends the incremental scan of its subscription, shape (events,)."""
    event_resolved: Numbers
    """The resolved-ts that the event itself carries (servers say it so to old clients), 0 = none, shape (events,)."""
    row_events: Offsets
    """Number of the event that each row belongs to, shape (rows,)."""
    resolved_regions: Numbers
    """Regions of the message's resolved-ts; empty when it has none."""
    resolved_ts: int
    resolved_request: int
    """The subscription that the resolved-ts is for, 0 = any of these regions'."""
    _data: Bytes
    _rows: Table

    def newest_ts(self) -> Numbers:
        """The largest ts of the rows of each event, shape (events,); 0 = it has no rows."""
        from tikv_br.formats.kernels import cdc as kernels

        newest = np.zeros(len(self.region_ids), np.uint64)
        np.maximum.at(newest, self.row_events, self._rows[:, kernels.TS])
        return newest

    def records(self, codec: KeyCodec, span: KeyRange, events: Flags | None = None) -> pa.RecordBatch:
        """Rows whose RPC key is in ``span``, which must lie within the codec's keyspace, in the order of the message.

        A batch of `tikv_br.formats.columns.SCHEMA`, though not sorted by key. `events`, shape (events,), leaves out the rows of
        events that are false. The batch owns its memory.
        """
        from tikv_br.formats import columns
        from tikv_br.formats.kernels import cdc as kernels

        keep = np.ones(len(self._rows), np.bool_) if events is None else events[self.row_events]
        kernels.inside(self._data, self._rows, keep, columns.from_bytes(span.start), columns.from_bytes(span.end))
        rows = self._rows if keep.all() else self._rows[keep]
        return columns.records(
            columns.build(*kernels.gather(self._data, rows, kernels.KEY, kernels.KEY_SIZE, len(codec.prefix))),
            columns.build(*kernels.gather(self._data, rows, kernels.VALUE, kernels.VALUE_SIZE, 0)),
            expire_ts=rows[:, kernels.EXPIRE].copy(),
            ts=rows[:, kernels.TS].copy(),
            deleted=rows[:, kernels.OP] == kernels.DELETE,
        )


def parse(message: bytes) -> ChangeEvent | None:
    """A serialized ``cdcpb.ChangeDataEvent``; nothing when it holds anything but rows of RawKV and resolved-ts.

    An error event, rows of transactions, an unknown field or damaged bytes all give None: the caller parses them with protobuf, whose error names the problem.
    """
    from tikv_br.formats import columns
    from tikv_br.formats.kernels import cdc as kernels
    from tikv_br.formats.kernels.memory import NOT_THERE

    data = columns.from_bytes(message)
    likely = len(message) // LIKELY_ROW
    counts, head = (likely // LIKELY_ROWS, likely, 0), np.zeros(2, np.uint64)
    fits = False
    while not fits:  # at the second try at the latest
        events = np.empty((counts[0] + 1, kernels.EVENT_COLUMNS), np.uint64)
        rows = np.empty((counts[1] + 1, kernels.ROW_COLUMNS), np.uint64)
        regions = np.empty(counts[2] + 1, np.uint64)
        counts = kernels.walk(data, events, rows, regions, head)
        if counts[0] == NOT_THERE:
            return None
        fits = counts[0] < len(events) and counts[1] < len(rows) and counts[2] < len(regions)
    events, rows = events[: counts[0]], rows[: counts[1]]
    return ChangeEvent(
        region_ids=events[:, kernels.REGION],
        request_ids=events[:, kernels.REQUEST],
        initialized=events[:, kernels.IS_INITIALIZED] > 0,
        event_resolved=events[:, kernels.RESOLVED],
        row_events=np.searchsorted(events[:, kernels.FIRST_ROW], np.arange(counts[1]), "right") - 1,
        resolved_regions=regions[: counts[2]],
        resolved_ts=int(head[0]),
        resolved_request=int(head[1]),
        _data=data,
        _rows=rows,
    )
