"""``--report FILE``: a report of one command, also of one that fails."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tikv_br.cli.failure import failure_of
from tikv_br.errors import BackupPathInUse, StorageError, TikvBrError, UsageError
from tikv_br.progress_events import Reporter

if TYPE_CHECKING:
    from tikv_br.report.facts import BackupFacts, Cell, Compared
    from tikv_br.report.operation import Damage, OperationReport
    from tikv_br.report.recorder import Recorder
    from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)

ReportOption = Annotated[
    str,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a report, also of a failure: FILE.html is a page with its JSON beside it, FILE.json the JSON alone.",
    ),
]


@dataclass(slots=True)
class Draft:
    """What a command notes for its report, as far as it comes."""

    command: str
    wanted: bool
    checks: Mapping[str, tuple[str, str]]
    """By the step that does it: what is checked, and how."""
    recorder: Recorder | None = None
    began: float = field(default_factory=time.monotonic)
    started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    place: StorageLocation | None = None
    """Of the backup that it is about."""
    summary: dict[str, Any] = field(default_factory=dict)
    figures: Sequence[tuple[str, str]] = ()
    keys: int = 0
    """That were checked."""
    bytes: int = 0
    """Read for it."""
    findings: list[Damage] = field(default_factory=list)

    def listen(self, display: Reporter) -> Reporter:
        """A reporter that notes what it passes on, after what another of this command has noted."""
        if not self.wanted:
            return display
        from tikv_br.report.recorder import Recorder

        if self.recorder is None:
            self.recorder = Recorder(display)
        else:
            self.recorder.pass_on_to(display)
        return self.recorder

    def done(self, summary: dict[str, Any], figures: Sequence[tuple[str, str]]) -> None:
        """Note what it came to, as JSON has it and for people."""
        self.summary, self.figures = summary, figures

    def found(self, what: str, cause: str) -> None:
        """Note what is wrong."""
        if self.wanted:
            from tikv_br.report.operation import Damage

            self.findings.append(Damage(what, cause))

    def finish(self, failure: BaseException | None) -> OperationReport:
        """The report, of a command that ended so."""
        from tikv_br import __version__, run_id
        from tikv_br.redaction import redact
        from tikv_br.report.facts import trouble_of, verdict_of
        from tikv_br.report.operation import OperationReport
        from tikv_br.report.recorder import Recorder

        error = None if failure is None else failure_of(failure)
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
            summary=self.summary,
            figures=tuple((name, redact(value)) for name, value in self.figures),
            backup=backup,
            trouble=None if error is None else trouble_of(error, step),
            findings=tuple(self.findings),
            phases=tuple(sorted(recorder.phases, key=lambda each: each.begin)),
            samples=tuple(recorder.samples),
            keyspace_map=cells,
            compared=self._compared(recorder),
            notices=tuple(map(redact, [*recorder.notices, *problems])),
        )

    def _compared(self, recorder: Recorder) -> tuple[Compared, ...]:
        """What the steps that ended well have checked; figures go to the last, which the others are for."""
        from tikv_br.report.facts import Compared

        done = [self.checks[each.name] for each in recorder.phases if each.ended_well and each.name in self.checks]
        last = len(done) - 1
        return tuple(
            Compared(what, how, self.keys if place == last else 0, self.bytes if place == last else 0)
            for place, (what, how) in enumerate(done)
        )

    def _backup(self, error: TikvBrError | None) -> tuple[BackupFacts | None, tuple[Cell, ...], list[str]]:
        """The backup by its own records, its files, and why there are none."""
        if self.place is None or isinstance(error, StorageError | UsageError):
            return None, (), []  # where it was not to be reached a moment ago, nobody waits once more
        if isinstance(error, BackupPathInUse):
            return None, (), []  # what lies there is another run's
        from tikv_br.backupset.backup_set import BackupSet
        from tikv_br.report.facts import backup_facts, cells
        from tikv_br.storage.open import open_store

        try:
            backup = BackupSet.open_any(open_store(self.place))
        except TikvBrError as problem:
            return None, (), [f"There is no map of the keyspace: {problem.message}"]
        return backup_facts(backup, self.place.redacted()), cells(backup), []


@contextlib.contextmanager
def reporting(command: str, path: str, checks: Mapping[str, tuple[str, str]]) -> Iterator[Draft]:
    """Write the report that ``path`` asks for when the block ends, however it does.

    Raises `UsageError` where no report can be written, before anything is done; a `StorageError` when it was not written
    though all else went well: beside another failure that is only told.
    """
    draft = Draft(command, bool(path), checks)
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
            log.warning("the report was not written: %s", problem.message)
        raise
    file.write(draft.finish(None))
