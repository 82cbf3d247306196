"""What a feed yields, its options and its status."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tikv_br.cluster.cluster import Cluster
from tikv_br.errors import UsageError
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
    """Notice of rows of `span` that stores ingested between `from_ts` and `to_ts` with older timestamps: no feed delivers such rows."""

    span: KeyRange
    """Range of RPC keys."""
    from_ts: int
    to_ts: int
    cause: str
    """The command that ingested them."""


Event = Rows | Resolved | Scanned | Missed


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """All times are in seconds."""

    hold_back: float | None = None
    """Argument of `hold_back_for`."""
    queue_bytes: int = 64 << 20
    """Size of the queue of received messages. When it is full, streams are not read, and stores wait."""
    patience: float = 600.0
    """Seconds for which a region may fail continuously before the feed fails."""
    stall: float = 300.0
    """Resubscribe a region whose resolved-ts has not advanced for this long."""
    scan_stall: float = 1800.0
    """Resubscribe a region whose incremental scan has not ended if its store has ended no scan for this long: stores run
    scans one after the other."""


HOLD_BACK_SECONDS = 3.0
"""The least default of the hold-back."""


def hold_back_for(cluster: Cluster, wanted: float | None) -> float:
    """Seconds to subtract from every resolved-ts; None = as many as the settings of the stores need.

    The first changes after a leader transfer may be older than the previous leader's resolved-ts, by as much as stores use
    timestamps that they have cached. 0 loses changes when leaders move. Raises `UsageError` for other values below that age.
    """
    age = cluster.timestamp_age if wanted != 0 else 0.0
    if wanted is None:
        return max(HOLD_BACK_SECONDS, age)
    if wanted < age:
        raise UsageError(
            f"a hold-back of {wanted:g} s is too short: stores use timestamps up to {age:g} s old "
            "(causal-ts.alloc-ahead-buffer), so a new leader's changes may be that late, and would be lost",
            hint=f"Leave out --hold-back, or pass {age:g}s or more; `changefeed update` changes it for a changefeed. "
            "0s turns it off, which loses changes when leaders move.",
        )
    return wanted


REPORT_SECONDS = 5.0
"""Failures that last longer than this many seconds are reported; a leader transfer takes less."""
STALLED_SECONDS = 10.0
"""Seconds without a new resolved-ts after which a region counts as stalled; stores send one about every second."""


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """The status of a feed."""

    resolved_ts: int = 0
    regions: int = 0
    """Number of subscribed regions."""
    scanning: int = 0
    """Subscribed regions whose incremental scan has not ended; they have no resolved-ts yet."""
    stalled: int = 0
    """Scanned regions without a new resolved-ts for 10 s."""
    holes: int = 0
    """Gaps: parts of the range without a subscription. While there is one, resolved-ts does not advance."""
    stores: int = 0
    """Stores with an open stream."""
    rows: int = 0
    """Rows yielded so far."""
    late_rows: int = 0
    """Rows at or below a resolved-ts already yielded: a new leader's timestamps were older than the hold-back covers."""
    queued_bytes: int = 0
    """Size of received messages that have not been processed."""
    errors: dict[str, int] = field(default_factory=dict)
    """Number of errors by kind; each was retried."""
    failing_seconds: float = 0.0
    """Seconds for which some part of the range has failed continuously; 0 if none fails."""
    last_error: str = ""
    """The last error of any part."""
    waits_for: str = ""
    """The unfinished ingests that resolved-ts waits for, or why announcements of ingests cannot be read."""

    @property
    def gaps(self) -> Iterator[str]:
        """Yield why resolved-ts does not advance: unsubscribed, scanning and stalled parts, one line each."""
        if self.holes:
            yield f"parts of the range without a subscription: {self.holes}"
        if self.scanning:
            yield f"regions whose incremental scan has not ended: {self.scanning}"
        if self.stalled:
            yield f"regions without a new resolved-ts for {STALLED_SECONDS:.0f} s: {self.stalled}"
        if self.waits_for:
            yield f"waits for {self.waits_for}"

    @property
    def problem(self) -> str:
        """Failures that have lasted longer than `REPORT_SECONDS`, in one line; empty if there are none."""
        if self.failing_seconds < REPORT_SECONDS:
            return ""
        return f"part of the source has had no subscription for {self.failing_seconds:.0f} s: {self.last_error}"
