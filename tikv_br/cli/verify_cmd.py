"""``tikv-br verify``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import typer
from msgspec.structs import asdict

from tikv_br.cli import backup_flags, key_flags, shared
from tikv_br.cli.command import command, flag
from tikv_br.cli.output import human_bytes, human_seconds, listed, reporting
from tikv_br.cli.progress import progress_display
from tikv_br.errors import BackupSetError, ChecksumMismatch, TikvBrError, UsageError
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from tikv_br.storage.url import StorageLocation
    from tikv_br.verify.options import Finding
    from tikv_br.verify.run import VerifySummary

logger = logging.getLogger(__name__)


class ComparedFlags(shared.ClusterFlags):
    pd: list[str] = shared.pd("PD endpoints of the cluster to compare with (--level restore only).")


class VerifyFlags(backup_flags.IndexFlags):
    chosen: list[str] | None = backup_flags.chosen_backup("--storage", many=True)
    storage: str = backup_flags.CHOSEN_STORAGE()
    level: Literal["meta", "files", "data", "restore"] = flag(
        "files",
        "meta: metadata and file list. files: also file checksums. data: also every row. restore: compare the cluster at --pd with the "
        "backup by checksums (row by row: tikv-br diff --exact).",
    )
    range: key_flags.RangeOrPrefixFlags
    to_keyspace: str = flag(
        "",
        "With --level restore: keyspace of the cluster, by id or name (API V2; default: the one with the same name as in the backup).",
        metavar="ID|NAME",
    )
    subset: str = flag("100%", "Part of the files to check: 10%, or 3/10 (the third tenth).", metavar="N%|K/N")
    seed: int = shared.SEED("Seed that selects the files of --subset N%.")
    cluster: ComparedFlags
    tasks: shared.TaskFlags
    report: str = shared.REPORT()
    hooks: shared.HookFlags


@command("verify", example="s3://backups/monday --level data")
def verify_backup(flags: VerifyFlags, context: typer.Context) -> None:
    """Verify backups, or compare a cluster with them.

    All are looked at, also after one with a finding.
    """
    places = [
        (each, partial(backup_flags.choose, context, flags.storage_flags, "storage", each, flags.storage))
        for each in flags.chosen or [""]
    ]
    if len(places) > 1 and flags.report:
        raise UsageError("--report is about one backup", hint="Omit it, or pass one backup.")
    failures: list[TikvBrError] = []
    for name, place in places:
        try:
            _verify(flags, place)
        except (BackupSetError, ChecksumMismatch) as error:
            if len(places) == 1:
                raise
            logger.warning("%s: %s", redact(name), error.message)
            failures.append(error)
    if failures:
        first = failures[0]
        raise type(first)(f"{len(failures)} of {len(places)} backups: {first.message}", hint=first.hint)


def _verify(flags: VerifyFlags, place: Callable[[], StorageLocation]) -> None:
    with reporting("verify", flags.report) as draft:
        location = draft.place = place()
        draft.cluster = ",".join(flags.cluster.pd) if flags.level == "restore" else ""
        from tikv_br.verify.options import Level, Subset, VerifyOptions
        from tikv_br.verify.run import verify

        options = flags.fill(
            VerifyOptions,
            storage=location,
            level=Level(flags.level),
            cluster=flags.cluster.config() if flags.level == "restore" else None,
            span=flags.range.key_range(),
            subset=Subset.parse(flags.subset),
        )
        out = flags.out
        findings: list[Finding] = []

        def note(finding: Finding) -> None:
            findings.append(finding)
            draft.found(finding.object, finding.cause)
            out.result("finding", asdict(finding) | {"storage": location.redacted()})

        try:
            with progress_display(out) as display:
                summary = verify(options, draft.listen(display), note)
        finally:
            if findings:
                rows = [(finding.object, finding.level.value, finding.cause) for finding in findings]
                out.table(
                    ("object", "level", "cause"), rows, title=f"Findings in {location.redacted()}", prose=("cause",)
                )
        draft.done(asdict(summary), _figures(summary))
        draft.keys, draft.bytes = summary.rows_checked, summary.bytes_read
    out.result("summary", asdict(summary), listed("Verified: no problems found", _figures(summary)))


def _figures(summary: VerifySummary) -> list[tuple[str, str]]:
    """Return the figures of the summary: checked and not checked."""
    seed = f", {summary.subset} with seed {summary.seed}" if summary.files_checked < summary.files else ""
    checked = f"{summary.files_checked:,} of {summary.files:,}{seed}" if summary.level != "meta" else ""
    rows = f"{summary.rows_checked:,}" if summary.level in {"data", "restore"} else ""
    return [
        ("level", summary.level),
        ("files present", f"{summary.files:,}"),
        ("files compared" if summary.level == "restore" else "files read", checked),
        ("rows", rows),
        ("read", human_bytes(summary.bytes_read) if summary.bytes_read else ""),
        ("foreign objects", f"{summary.foreign_objects:,}" if summary.foreign_objects else ""),
        ("api-version", summary.api_version),
        ("storage", summary.storage),
        ("total-take", human_seconds(summary.seconds)),
    ]
