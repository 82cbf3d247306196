"""What a feed yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Rows:
    """Changes in no order, some of them twice."""

    batch: pa.RecordBatch
    """Of `formats.records.SCHEMA`, with at least one row."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """All changes of the span with a ts up to this have been yielded before; it rises from one to the next."""

    ts: int


Event = Rows | Resolved
