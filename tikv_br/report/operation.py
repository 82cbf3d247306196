"""The report of a single command, as JSON and as a page."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tikv_br.errors import UsageError
from tikv_br.report.facts import BackupFacts, Cell, Compared, DrillVerdict, ReportedError, plain
from tikv_br.report.page import render
from tikv_br.report.recorder import Phase, Sample
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

SCHEMA_VERSION = 1
JSON, PAGE = ".json", ".html"
INTERRUPTED = "The command was interrupted."
PASSED = {
    "backup": "The backup is complete.",
    "restore": "The restore is complete.",
    "verify": "All checks passed.",
    "diff": "Both sides are equal.",
}
FAILED = {
    "backup": "The backup did not complete.",
    "restore": "The restore did not complete. The target may contain part of the data.",
    "verify": "The verification did not complete.",
    "diff": "The comparison did not complete.",
}
FOUND = {"verify": "Damage was found.", "diff": "The two sides differ."}
"""Sentence of a failed report with findings; these three by the first word of the command."""
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
    """Name of the command, such as ``backup raw``."""
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
    command = report.command.partition(" ")[0]
    match report.verdict:
        case DrillVerdict.PASSED:
            return DRY_RUN if report.dry_run else PASSED[command]
        case DrillVerdict.INTERRUPTED:
            return f"{INTERRUPTED} {FAILED[command]}"
        case _:
            return FOUND[command] if report.findings else FAILED[command]


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
