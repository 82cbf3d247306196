"""Events of a feed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tikv_br.formats.keys.ranges import KeyRange

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Rows:
    """Changes in any order, possibly with duplicates."""

    batch: pa.RecordBatch
    """Rows of `tikv_br.formats.columns.SCHEMA`, at least one."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """All changes of the range with a ts up to this have been yielded. Each is higher than the previous one."""

    ts: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """An incremental scan has ended. Of a key that was written more than once, it delivers only the newest version.

    So between these timestamps, older versions of keys of `span` may be missing. State up to `from_ts`, and from `to_ts`
    on, is complete.
    """

    span: KeyRange
    """Range of RPC keys."""
    from_ts: int
    """All changes up to this were delivered before the scan."""
    to_ts: int
    """Upper limit of the timestamps of the scan's rows."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Notice that between two timestamps stores ingested rows of `span` with older ones: no feed delivers them."""

    span: KeyRange
    """Range of RPC keys."""
    from_ts: int
    to_ts: int
    cause: str
    """The command that ingested them."""


Event = Rows | Resolved | Scanned | Missed
