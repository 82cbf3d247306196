"""Common code of the tasks of both engines: the interval, retries and the result.

A task may be retried, or run twice at once by Spark. Each attempt writes files with unique names, and only a finished attempt
writes a ledger entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TypeVar

from tikv_br.backupset.ledger import FinishedTask
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import RetryBudgetExhausted, TikvBrError
from tikv_br.retry import Backoff, Backoffer, RetryPolicy
from tikv_br.tasks.task import TaskContext

Result = TypeVar("Result")
ATTEMPTS = 3
"""Attempts per task for retryable errors."""
_PAUSE = Backoff("task", 0.5, 5.0, jitter=True)
"""Pause between attempts."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of transactional data that a backup reads. Picklable."""

    ts: int
    resolved_locks: frozenset[int] = frozenset()
    """Start ts of transactions that can only commit above `ts`: their locks do not count."""


@dataclass(frozen=True, slots=True)
class BackupJob:
    """Parameters that all tasks of a run share. Picklable."""

    run: str
    """Id of the run, for `LedgerEntry`."""
    options: BackupOptions
    conversion: Conversion
    """Conversion from the cluster's encoding to the files'."""
    rate_limit: RateLimit = field(default_factory=RateLimit)
    rewrites_files: bool = False
    """Store engine: whether the task rewrites the stores' files, because stores cannot write the requested form."""
    expiry_in_properties: bool = True
    """True if properties of the stores' files have the expiry of rows (store engine)."""
    snapshot: Snapshot | None = None
    """None = raw data, which has none."""

    @property
    def with_ttl(self) -> bool:
        """Return whether rows may expire."""
        return self.conversion.source.has_ttl and not self.options.assume_no_ttl


@dataclass(slots=True)
class PhaseSeconds:
    """A task's time per phase; scanning overlaps with the other phases."""

    scan: float = 0.0
    ttl: float = 0.0
    convert: float = 0.0
    """Conversion and checksums; 0 if pages are encoded directly."""
    encode: float = 0.0
    """Building and compressing SST blocks."""
    upload: float = 0.0
    """Seconds of hashing and upload."""
    store: float = 0.0
    """Waiting for stores that write files."""
    inspect: float = 0.0
    """Reading the files that stores wrote."""

    def add(self, other: PhaseSeconds) -> None:
        """Add the other's seconds to these."""
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Identity and counts of the written ledger entry, and the time per phase. The entry itself stays in the ledger."""

    finished: FinishedTask
    seconds: PhaseSeconds


def try_task(context: TaskContext, attempt: Callable[[], Result]) -> Result:
    """Run a task, and retry it after retryable errors. Raises the `TikvBrError` of the last attempt.

    The progress of a failed attempt is retracted. `RetryBudgetExhausted` is not retried: another attempt would only wait for the same thing again.
    """
    backoffer = Backoffer("task", RetryPolicy(max_tries=ATTEMPTS, error=None))
    while True:
        try:
            with context.retract_on_error():
                return attempt()
        except TikvBrError as error:
            if not error.retryable or isinstance(error, RetryBudgetExhausted):
                raise
            backoffer.wait(_PAUSE, error)
