"""What the tasks of both engines have in common: an interval, tries, and what comes of it.

A task may run again, or twice at once: every attempt writes to names of its own, and only an attempt that came to its
end leaves a ledger entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.ledger import LedgerEntry
from tikv_br.errors import TikvBrError

ATTEMPTS = 3
"""How often a task is tried while its errors may pass; each request inside has retries of its own."""


@dataclass(frozen=True, slots=True)
class Task:
    """One interval: RPC keys of the source."""

    start: bytes
    end: bytes

    @property
    def interval(self) -> KeyRange:
        """`start` and `end`."""
        return KeyRange(self.start, self.end)

    def __str__(self) -> str:
        return str(self.interval)


@dataclass(slots=True)
class PhaseSeconds:
    """Where a task's time went; scanning and the rest overlap."""

    scan: float = 0.0
    ttl: float = 0.0
    convert: float = 0.0
    """Conversion and checksums, where a page is not encoded as it came."""
    encode: float = 0.0
    """Building and compressing SST blocks."""
    upload: float = 0.0
    """Hashing and handing bytes to the storage."""
    store: float = 0.0
    """Waiting for stores that write files."""
    inspect: float = 0.0
    """Looking at the files that stores wrote."""

    def add(self, other: PhaseSeconds) -> None:
        """Sum up."""
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task came to."""

    entry: LedgerEntry
    seconds: PhaseSeconds


def try_task(attempt: Callable[[], TaskResult]) -> TaskResult:
    """Do a task, anew where an error may pass. Raises the `TikvBrError` of the last attempt."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except TikvBrError as error:
            if number == ATTEMPTS or not error.retryable:
                raise
    raise AssertionError
