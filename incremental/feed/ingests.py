"""Watches the announced ingests of a range, which its resolved-ts must not pass while they are unfinished."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from tikv_br.cluster.ingests import Ingest, Ingests
from tikv_br.errors import ClusterTlsError, EtcdUnreachable
from tikv_br.formats.keys.ranges import KeyRange

log = logging.getLogger(__name__)

READ_SECONDS = 0.5
"""Interval of reading announcements while an ingest is unfinished."""
WARN_SECONDS = 60.0
"""Interval of log messages about a lasting failure."""


class IngestWatch:
    """The unfinished ingests of a range. `waits_for` is thread-safe."""

    def __init__(self, source: Ingests | None, span: KeyRange) -> None:
        """`source` is None if ingests are not watched; `span` is in RPC keys."""
        self._source, self._span = source, span
        self.due_at = math.inf if source is None else 0.0
        """Time to read the announcements, even if no resolved-ts advances, on the monotonic clock."""
        self.unfinished: dict[str, Ingest] = {}
        """By id."""
        self.finished_ts = 0
        """When the last of the finished ones ended."""
        self._finished: set[str] = set()
        self._revision = -1
        self._unread = ""
        """Why the announcements cannot be read."""
        self._warn_at = 0.0

    @property
    def waits_for(self) -> str:
        """Return what the resolved-ts waits for; empty if it may advance."""
        return self._unread or ", ".join(f"the end of {each}" for each in list(self.unfinished.values()))

    def is_due(self, *, advances: bool) -> bool:
        """Return whether to read the announcements now: because it is time, or because the resolved-ts is about to advance (`advances`)."""
        return time.monotonic() >= self.due_at or (self._source is not None and advances and not self._unread)

    def read(self) -> tuple[Ingest, ...] | None:
        """All announcements; None if they have not changed, or cannot be read."""
        if self._source is None:
            return None
        try:
            revision = self._source.revision()
            found = self._source.read() if revision != self._revision else None
        except (EtcdUnreachable, ClusterTlsError) as error:
            self._unread = f"PD's etcd: {error.message}"
            if time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + WARN_SECONDS
                log.warning("cannot read announcements of ingests, resolved-ts stands still: %s", error.message)
            return None
        self._unread, self._revision = "", revision
        return found

    def update(self, found: Sequence[Ingest] | None, resolved_ts: int) -> list[Ingest]:
        """Record what `read` has returned; returns the ingests that have finished since, and that a range resolved up to this ts lacks."""
        finished = [] if found is None else self._compare(found, resolved_ts)
        self.due_at = time.monotonic() + READ_SECONDS if self.waits_for else math.inf
        return finished

    def _compare(self, found: Sequence[Ingest], resolved_ts: int) -> list[Ingest]:
        names = {each.id for each in found}
        self.unfinished = {
            name: each for name, each in self.unfinished.items() if name in names
        }  # others are withdrawn
        finished = []
        for each in found:
            if each.id in self._finished or not each.concerns(self._span, resolved_ts):
                continue
            if each.finished_ts:
                self.unfinished.pop(each.id, None)
                self._finished.add(each.id)
                self.finished_ts = max(self.finished_ts, each.finished_ts)
                finished.append(each)
                continue
            if each.id not in self.unfinished:
                log.info("resolved-ts %d waits for the end of %s", resolved_ts, each)
            self.unfinished[each.id] = each
        return finished
