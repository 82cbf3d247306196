"""Collects the report of one command while it runs, and writes it, also if the command fails."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from tikv_br.errors import BackupPathInUse, Failure, StorageError, TikvBrError, UsageError
from tikv_br.progress_events import Reporter

if TYPE_CHECKING:
    from tikv_br.report.facts import BackupFacts, Cell, Compared
    from tikv_br.report.operation import Damage, OperationReport
    from tikv_br.report.recorder import Recorder
    from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)


class Draft(Struct):
    """The report of a running command."""

    command: str
    wanted: bool
    failure_of: Callable[[BaseException], Failure]
    """The error that is reported for an exception."""
    recorder: Recorder | None = None
    began: float = field(default_factory=time.monotonic)
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    place: StorageLocation | None = None
    """Location of the backup."""
    cluster: str = ""
    """PD of the cluster, or of both; empty = none takes part."""
    summary: dict[str, Any] = field(default_factory=dict)
    figures: Sequence[tuple[str, str]] = ()
    keys: int = 0
    """Number of keys checked."""
    bytes: int = 0
    """Number of bytes read."""
    findings: list[Damage] = field(default_factory=list)

    def listen(self, display: Reporter) -> Reporter:
        """A reporter that records events and passes them on; later ones continue the same recording."""
        if not self.wanted:
            return display
        from tikv_br.report.recorder import Recorder

        if self.recorder is None:
            self.recorder = Recorder(display)
        else:
            self.recorder.set_reporter(display)
        return self.recorder

    def done(self, summary: dict[str, Any], figures: Sequence[tuple[str, str]]) -> None:
        """Set the result: the fields of JSON, and figures for people."""
        self.summary, self.figures = summary, figures

    def found(self, what: str, cause: str) -> None:
        if self.wanted:
            from tikv_br.report.operation import Damage

            self.findings.append(Damage(what, cause))

    def finish(self, failure: BaseException | None) -> OperationReport:
        """The report of a command that has ended with this failure, or without one."""
        from tikv_br import __version__, run_id
        from tikv_br.redaction import redact
        from tikv_br.report.facts import reported_error, verdict_of
        from tikv_br.report.operation import OperationReport
        from tikv_br.report.recorder import Recorder

        error = None if failure is None else self.failure_of(failure)
        recorder = self.recorder or Recorder()
        step = recorder.step
        if error is not None:
            recorder.failed()
        backup, cells, problems = self._backup(error)
        return OperationReport(
            command=self.command,
            run_id=run_id.current() or "",
            verdict=verdict_of(error),
            exit_code=0 if error is None else error.exit_code,
            dry_run=bool(self.summary.get("dry_run")),
            started_ms=self.started_ms,
            seconds=round(time.monotonic() - self.began, 3),
            tool_version=__version__,
            cluster=self.cluster,
            summary=self.summary,
            figures=tuple((name, redact(value)) for name, value in self.figures if value),
            backup=backup,
            trouble=None if error is None else reported_error(error, step),
            findings=tuple(self.findings),
            phases=tuple(sorted(recorder.phases, key=lambda each: each.begin)),
            samples=tuple(recorder.samples),
            keyspace_map=cells,
            compared=self._compared(recorder),
            notices=tuple(map(redact, [*recorder.notices, *problems])),
        )

    def _compared(self, recorder: Recorder) -> tuple[Compared, ...]:
        """Return the checks done by finished steps; the last one has the figures."""
        from tikv_br.report.facts import Compared
        from tikv_br.report.operation import CHECKS

        checks = CHECKS[self.command]
        done = [checks[each.name] for each in recorder.phases if each.ended_well and each.name in checks]
        last = len(done) - 1
        return tuple(
            Compared(what, how, self.keys if place == last else 0, self.bytes if place == last else 0)
            for place, (what, how) in enumerate(done)
        )

    def _backup(self, error: Failure | None) -> tuple[BackupFacts | None, tuple[Cell, ...], list[str]]:
        """Facts of the backup, the cells of its keyspace map, and why there are none."""
        if self.place is None or isinstance(error, StorageError | UsageError):
            return None, (), []  # do not wait again for a storage that has just failed
        if isinstance(error, BackupPathInUse):
            return None, (), []  # the objects there belong to another run
        from tikv_br.backupset.backup_set import BackupSet
        from tikv_br.report.facts import backup_facts, cells
        from tikv_br.storage.open import open_store

        try:
            backup = BackupSet.open_any(open_store(self.place), key_mode=None)
            return backup_facts(backup, self.place.redacted()), cells(backup), []
        except TikvBrError as problem:
            return None, (), [f"The report has no keyspace map: {problem.message}"]


@contextlib.contextmanager
def reporting(command: str, path: str, failure_of: Callable[[BaseException], Failure]) -> Iterator[Draft]:
    """Write the report to `path`, if it is not empty, when the block ends or fails.

    Raises `UsageError` before the block if `path` cannot be written, `StorageError` if writing fails after a successful block.
    """
    draft = Draft(command, bool(path), failure_of)
    if not path:
        yield draft
        return
    from tikv_br.report.operation import ReportFile

    file = ReportFile.at(path)
    try:
        yield draft
    except BaseException as failure:
        try:
            file.write(draft.finish(failure))
        except TikvBrError as problem:
            log.warning("cannot write the report: %s", problem.message)
        raise
    file.write(draft.finish(None))
