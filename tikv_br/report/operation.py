"""The report of a single command: one document, as JSON and as a page."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tikv_br.errors import UsageError
from tikv_br.report.facts import BackupFacts, Cell, Compared, Trouble, Verdict, plain
from tikv_br.report.page import render
from tikv_br.report.recorder import Phase, Sample
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

SCHEMA_VERSION = 1
JSON, PAGE = ".json", ".html"
BROKEN_OFF = "It was broken off before its end."
PASSED = {
    "backup raw": "The backup is complete.",
    "restore raw": "The restore is complete.",
    "verify": "All that was checked is right.",
    "diff": "Both sides hold the same.",
}
FAILED = {
    "backup raw": "This run made no complete backup.",
    "restore raw": "The restore did not come to its end. The target may hold a part of the data.",
    "verify": "It was not proven that all is right.",
    "diff": "It was not proven that both sides hold the same.",
}
FOUND = {"verify": "Damage was found.", "diff": "The two sides differ."}
"""Where there are findings: more is known than that nothing was proven."""
DRY_RUN = "All was checked and planned. Nothing was changed: it was a dry run."


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that was found to be wrong."""

    object: str
    cause: str


@dataclass(frozen=True, slots=True)
class OperationReport:
    """All that there is to say of one command."""

    command: str
    """Such as ``backup raw``."""
    run_id: str
    verdict: Verdict
    exit_code: int
    dry_run: bool
    started_ms: int
    seconds: float
    tool_version: str
    summary: dict[str, Any]
    """As the command's own JSON has it; empty when it did not come to one."""
    figures: tuple[tuple[str, str], ...]
    """The same for people: names and values."""
    backup: BackupFacts | None
    """None: there is none, or it does not read."""
    trouble: Trouble | None
    findings: tuple[Damage, ...]
    phases: tuple[Phase, ...]
    samples: tuple[Sample, ...]
    keyspace_map: tuple[Cell, ...]
    compared: tuple[Compared, ...]
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(asdict(self), default=plain))}


def render_operation(report: OperationReport) -> str:
    """The page."""
    return render("tikv_br.report", "operation.html", report, sentence=_sentence(report))


def _sentence(report: OperationReport) -> str:
    match report.verdict:
        case Verdict.PASSED:
            return DRY_RUN if report.dry_run else PASSED[report.command]
        case Verdict.INTERRUPTED:
            return f"{BROKEN_OFF} {FAILED[report.command]}"
        case _:
            return FOUND[report.command] if report.findings else FAILED[report.command]


@dataclass(frozen=True, slots=True)
class ReportFile:
    """Where a report goes: a page with its JSON beside it, or the JSON alone."""

    folder: StorageLocation
    name: str

    @classmethod
    def at(cls, text: str) -> ReportFile:
        """The file of that name, absolute or from here on. Raises `UsageError` where none can be."""
        path = Path(text).absolute()
        if path.suffix not in {PAGE, JSON}:
            raise UsageError(f"--report wants a file that ends with {PAGE} or {JSON}, not {text!r}")
        if not path.parent.is_dir():
            raise UsageError(f"--report: the folder of {text!r} does not exist")
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(f"--report: {text!r} cannot be written")
        return cls(parse(str(path.parent)), path.name)

    def write(self, report: OperationReport) -> None:
        """Write it, each file as a whole or not at all. Raises a `StorageError`."""
        folder = open_store(self.folder)
        stem, suffix = Path(self.name).stem, Path(self.name).suffix
        folder.put(stem + JSON, (json.dumps(report.to_json(), indent=1) + "\n").encode())
        if suffix == PAGE:
            folder.put(self.name, render_operation(report).encode())
