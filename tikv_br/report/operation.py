"""The report of a single command, as JSON and as a page.

Collects the report of one command while it runs, and writes it, also if the command fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tikv_br.errors import BackupPathInUse, StorageError, TikvBrError, UsageError
from tikv_br.progress_events import Reporter
from tikv_br.report.facts import BackupFacts, Cell, Compared, DrillVerdict, ReportedError, plain
from tikv_br.report.page import render
from tikv_br.report.recorder import Phase, Sample
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

if TYPE_CHECKING:
    from tikv_br.report.recorder import Recorder


SCHEMA_VERSION = 1
JSON, PAGE = ".json", ".html"
INTERRUPTED = "The command was interrupted."
PASSED = {
    "backup raw": "The backup is complete.",
    "backup txn": "The backup is complete.",
    "restore raw": "The restore is complete.",
    "restore point": "The restore is complete.",
    "restore txn": "The restore is complete.",
    "verify": "All checks passed.",
    "diff": "Both sides are equal.",
}
FAILED = {
    "backup raw": "The backup did not complete.",
    "backup txn": "The backup did not complete.",
    "restore raw": "The restore did not complete. The target may contain part of the data.",
    "restore point": "The restore did not complete. The target may contain part of the data.",
    "restore txn": "The restore did not complete. The target may contain part of the data.",
    "verify": "The verification did not complete.",
    "diff": "The comparison did not complete.",
}
FOUND = {"verify": "Damage was found.", "diff": "The two sides differ."}
"""Sentence of a failed report with findings, by command."""
CHECKS = {
    "backup raw": {
        "verify coverage": (
            "the records of all tasks with the ranges asked for",
            "by the run that copied them: intervals cover every range without a gap or an overlap, and each has its record",
        ),
        "compare checksums": (
            "the backup with the source",
            "by the run that copied it: keys, bytes and crc64 of each interval, as the cluster counts them and as written",
        ),
        "commit": (
            "the files with their records",
            "by the run that copied them: a listing shows each file in the size that was written, and no two of them overlap",
        ),
    },
    "restore raw": {
        "check the target": (
            "the target",
            "it held no key in the ranges that were to be restored, unless that was allowed or an earlier run had restored it",
        ),
        "check every file": (
            "the backup's files with its records, before any store saw one",
            "length, the storage's mark or the sha256 of all bytes, hash of the last part, and structure of each file",
        ),
        "compare checksums": (
            "the target with the backup",
            "keys, bytes and crc64 of every range, as the target's stores count them, beside what the backup recorded",
        ),
    },
    "verify": {
        "read the backup": ("the backup's records with each other", "hashes, form, and what each says of the other"),
        "list the objects": ("the records with a listing", "each object exists with its recorded size"),
        "check every byte": ("the files with their records", "every byte of the chosen files: length and sha256"),
        "check every row": (
            "the rows with their records",
            "every byte of the chosen files: sha256, block checksums, order and form of the rows, sums",
        ),
        "compare with the cluster": (
            "the cluster with the backup",
            "keys, bytes and crc64 of every range of the chosen files, as the stores count them",
        ),
    },
    "diff": {
        "compare": (
            "both sides",
            "range by range: the checksums of both, and all rows of both where they differ or are asked to be read",
        )
    },
}
"""Check and its method, by command and step."""
CHECKS["backup txn"] = {
    "check GC": (
        "the snapshot with the cluster's GC",
        "by the run that copied it: when the last file was written, PD's GC safe point was still below backup-ts",
    ),
    **CHECKS["backup raw"],
}
CHECKS["restore point"] = CHECKS["restore raw"]
CHECKS["restore txn"] = {
    "resolve locks": ("the target", "it held no lock of a live transaction in the ranges that were to be restored"),
    "check pairs of files": (
        "the files of each part with each other",
        "as many commits as rows, which both files have together",
    ),
    **CHECKS["restore raw"],
}
DRY_RUN = "All checks passed and the plan is complete. This was a dry run: nothing was changed."


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding."""

    object: str
    cause: str


@dataclass(frozen=True, slots=True)
class OperationReport:
    """The outcome of one command."""

    command: str
    """Such as ``backup raw``."""
    run_id: str
    verdict: DrillVerdict
    exit_code: int
    dry_run: bool
    started_ms: int
    seconds: float
    tool_version: str
    cluster: str
    """PD of the cluster, or of both; empty = none takes part."""
    summary: dict[str, Any]
    """Summary as in the command's own JSON; empty if it has none."""
    figures: tuple[tuple[str, str], ...]
    """The same in a readable form: names and values."""
    backup: BackupFacts | None
    """Backup of the operation; None = none, or unreadable."""
    trouble: ReportedError | None
    findings: tuple[Damage, ...]
    phases: tuple[Phase, ...]
    samples: tuple[Sample, ...]
    keyspace_map: tuple[Cell, ...]
    compared: tuple[Compared, ...]
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self), default=plain))}


def render_operation(report: OperationReport) -> str:
    return render("tikv_br.report", "operation.html", report, sentence=_sentence(report))


def _sentence(report: OperationReport) -> str:
    match report.verdict:
        case DrillVerdict.PASSED:
            return DRY_RUN if report.dry_run else PASSED[report.command]
        case DrillVerdict.INTERRUPTED:
            return f"{INTERRUPTED} {FAILED[report.command]}"
        case _:
            return FOUND[report.command] if report.findings else FAILED[report.command]


@dataclass(frozen=True, slots=True)
class ReportFile:
    """Output of a report: a page with its JSON beside it, or the JSON alone."""

    folder: StorageLocation
    name: str

    @classmethod
    def at(cls, text: str) -> ReportFile:
        """The file of that name, absolute or relative. Raises `UsageError` if it cannot be written."""
        path = Path(text).absolute()
        if path.suffix not in {PAGE, JSON}:
            raise UsageError(f"--report requires a file name that ends with {PAGE} or {JSON}, not {text!r}")
        if not path.parent.is_dir():
            raise UsageError(f"--report: the folder of {text!r} does not exist")
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(f"--report: {text!r} cannot be written")
        return cls(parse(str(path.parent)), path.name)

    def write(self, report: OperationReport) -> None:
        """Write it, each file atomically. Raises a `StorageError`."""
        folder = open_store(self.folder)
        stem, suffix = Path(self.name).stem, Path(self.name).suffix
        folder.put(stem + JSON, (json.dumps(report.to_json(), indent=1) + "\n").encode())
        if suffix == PAGE:
            folder.put(self.name, render_operation(report).encode())


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Draft:
    """The report of a running command."""

    command: str
    wanted: bool
    failure_of: Callable[[BaseException], TikvBrError]
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
            self.findings.append(Damage(what, cause))

    def finish(self, failure: BaseException | None) -> OperationReport:
        """The report of a command that has ended with this failure, or without one."""
        from tikv_br import __version__, run_id
        from tikv_br.redaction import redact
        from tikv_br.report.facts import reported_error, verdict_of
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

        checks = CHECKS[self.command]
        done = [checks[each.name] for each in recorder.phases if each.ended_well and each.name in checks]
        last = len(done) - 1
        return tuple(
            Compared(what, how, self.keys if place == last else 0, self.bytes if place == last else 0)
            for place, (what, how) in enumerate(done)
        )

    def _backup(self, error: TikvBrError | None) -> tuple[BackupFacts | None, tuple[Cell, ...], list[str]]:
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
def reporting(command: str, path: str, failure_of: Callable[[BaseException], TikvBrError]) -> Iterator[Draft]:
    """Write the report to `path`, if it is not empty, when the block ends or fails.

    Raises `UsageError` before the block if `path` cannot be written, `StorageError` if writing fails after a successful block.
    """
    draft = Draft(command, bool(path), failure_of)
    if not path:
        yield draft
        return

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
