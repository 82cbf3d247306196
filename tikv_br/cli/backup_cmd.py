"""``tikv-br backup raw``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from formats.api_version import ApiVersion
from tikv_br.cli.backup_options import (
    AllowLossOption,
    AssumeNoTtlOption,
    ChecksumOption,
    CompressionLevelOption,
    CompressionOption,
    DstApiVersionOption,
    EngineOption,
    FileFormatOption,
    FileSizeOption,
    FormatOption,
    GcTtlOption,
    KeyspacesOption,
    LockWaitOption,
    NoResumeOption,
    RangesOption,
    SafeIntervalOption,
    SendCredentialsOption,
)
from tikv_br.cli.keys import read_key
from tikv_br.cli.lazy import DefaultCommandGroup
from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import (
    ConcurrencyOption,
    DryRunOption,
    EndOption,
    ExecutorOption,
    KeyForm,
    OutputForm,
    OutputOption,
    RateLimitOption,
    SparkMasterOption,
    StartOption,
    StorageOption,
    bytes_per_second,
)
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.report_file import ReportOption, reporting
from tikv_br.cli.storage_flags import StorageFlags
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.backup.conversion import Loss
    from tikv_br.backup.plan import Interval
    from tikv_br.backup.run import BackupReport, BackupSummary

app = typer.Typer(cls=DefaultCommandGroup, rich_markup_mode=None, no_args_is_help=True)
PLAN_ROWS = 20
"""Intervals of a plan that people are shown; JSON has them all."""
CHECKS = {
    "prove coverage": (
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
}
"""By the step that checks it: what and how."""


@app.callback()
def group() -> None:
    """Back up a cluster."""


@app.command("raw")
@grouped
def backup_raw(
    *,
    storage: StorageOption,
    cluster: ClusterFlags,
    dst_api_version: DstApiVersionOption = None,
    allow_loss: AllowLossOption = "",
    engine: EngineOption = "auto",
    start: StartOption = "",
    end: EndOption = "",
    form: FormatOption = "hex",
    file_format: FileFormatOption = None,
    ranges: RangesOption = None,
    keyspace: KeyspacesOption = None,
    compression: CompressionOption = "zstd",
    compression_level: CompressionLevelOption = 0,
    file_size: FileSizeOption = 96 << 20,
    concurrency: ConcurrencyOption = None,
    safe_interval: SafeIntervalOption = 60.0,
    gcttl: GcTtlOption = 300.0,
    checksum: ChecksumOption = False,
    assume_no_ttl: AssumeNoTtlOption = False,
    ratelimit: RateLimitOption = 0.0,
    send_credentials: SendCredentialsOption = True,
    storage_flags: StorageFlags,
    executor: ExecutorOption = "auto",
    spark_master: SparkMasterOption = "local[*]",
    lock_wait: LockWaitOption = 0.0,
    no_resume: NoResumeOption = False,
    dry_run: DryRunOption = False,
    report: ReportOption = "",
    output: OutputOption = OutputForm.CONSOLE,
) -> None:
    """Back up a RawKV cluster, converting between API versions where asked."""
    with reporting("backup raw", report, CHECKS) as draft:
        key_form, file_kind = _parse_forms(form, file_format)
        wanted = _parse_ranges(start, end, ranges or [], key_form)
        location = draft.place = storage_flags.locate(storage)
        target = ApiVersion.from_label(dst_api_version) if dst_api_version else None
        from formats.sst.compression import Compression
        from tikv_br.backup.options import BackupOptions
        from tikv_br.backup.run import backup
        from tikv_br.backupset.files import FileKind

        options = BackupOptions(
            cluster=cluster.config(),
            storage=location,
            dst_api_version=target,
            ranges=wanted,
            keyspaces=tuple(keyspace or ()),
            file_kind=FileKind(file_kind),
            allow_loss=_parse_losses(allow_loss),
            compression=Compression.from_label(compression),
            compression_level=compression_level,
            file_bytes=file_size,
            concurrency=concurrency,
            safe_interval=safe_interval,
            gc_ttl=math.ceil(gcttl),
            checksum=checksum,
            assume_no_ttl=assume_no_ttl,
            rate_limit=bytes_per_second(ratelimit),
            send_credentials=send_credentials,
            engine=engine,
            executor=executor,
            spark_master=spark_master,
            lock_wait=lock_wait,
            no_resume=no_resume,
            dry_run=dry_run,
        )
        out = Output(output)
        with progress_display(out) as display:
            done = backup(options, draft.listen(display))
        draft.done(asdict(done.summary), _figures(done.summary))
    _render(out, done)


def _parse_forms(form: str, file_format: str | None) -> tuple[KeyForm, str]:
    """How keys are written, and what files are. Raises `UsageError`."""
    if form not in {"sst", "parquet"}:
        return KeyForm(form), file_format or "sst"
    if file_format not in {None, form}:
        raise UsageError(f"--format {form} and --file-format {file_format} contradict each other")
    return KeyForm.HEX, form


def _parse_losses(text: str) -> frozenset[Loss]:
    from tikv_br.backup.conversion import Loss

    try:
        return frozenset(Loss(word.strip()) for word in text.split(",") if text)
    except ValueError:
        raise UsageError(f"--allow-loss {text!r}: one or more of {', '.join(Loss)}") from None


def _parse_ranges(start: str, end: str, ranges: list[str], form: KeyForm) -> tuple[tuple[bytes, bytes], ...]:
    """The ranges of the flags. Raises `UsageError`."""
    if (start or end) and ranges:
        raise UsageError("--start and --end say one range, --range others", hint="Say all of them by --range.")
    if start or end:
        return ((read_key(start, form, "--start"), read_key(end, form, "--end")),)
    pairs = [text.partition(":") for text in ranges]
    for text, (_, colon, last) in zip(ranges, pairs, strict=True):
        if not colon or ":" in last:
            raise UsageError(f"--range {text!r} is not START:END", hint="Write a : that is part of a key in hex.")
    return tuple((read_key(first, form, "--range"), read_key(last, form, "--range")) for first, _, last in pairs)


def _render(out: Output, report: BackupReport) -> None:
    if report.summary.dry_run:
        _render_plan(out, report.plan)
    out.result("summary", asdict(report.summary), _text(report.summary))


def _render_plan(out: Output, plan: list[Interval]) -> None:
    intervals = [
        {"start": part.start.hex(), "end": part.end.hex(), "bytes": part.size, "regions": part.regions} for part in plan
    ]
    total, regions = sum(part.size for part in plan), sum(part.regions for part in plan)
    out.result("plan", {"tasks": len(plan), "regions": regions, "approximate_bytes": total, "intervals": intervals})
    rows = [
        (part.start.hex() or "-", part.end.hex() or "-", human_bytes(part.size), f"{part.regions}")
        for part in plan[:PLAN_ROWS]
    ]
    out.table(("start", "end", "about", "regions"), rows, title=f"{len(plan)} tasks over {regions} regions")


def _text(summary: BackupSummary) -> str:
    """The summary for people."""
    if summary.dry_run:
        return f"Nothing was written (dry run); engine {summary.engine} ({summary.engine_reason})"
    return "Raw backup success summary" + "".join(f"\n  {name:<18} {value}" for name, value in _figures(summary))


def _figures(summary: BackupSummary) -> list[tuple[str, str]]:
    """What came of it, with the Go tool's names where it has them; of a dry run, what would have been done."""
    if summary.dry_run:
        return [("total-ranges", _ranges(summary)), ("engine", f"{summary.engine} ({summary.engine_reason})")]
    figures = [
        ("total-take", human_seconds(summary.seconds)),
        ("total-kv", f"{summary.total_kvs:,}"),
        ("total-kv-size", human_bytes(summary.total_bytes)),
        ("average-speed", f"{human_bytes(summary.average_speed)}/s"),
        ("backup-data-size", human_bytes(summary.backup_size)),
        ("total-ranges", _ranges(summary)),
        ("files", f"{summary.files:,}"),
        ("backup-ts", str(summary.backup_ts) if summary.backup_ts else "none (the cluster has no timestamps)"),
        ("engine", f"{summary.engine} ({summary.engine_reason})"),
        ("api-version", f"{summary.api_version} -> {summary.dst_api_version}"),
        ("lost", _lost(summary)),
        ("checksum", f"{summary.crc64xor:016x}"),
        ("storage", summary.storage),
    ]
    return [(name, value) for name, value in figures if value]


def _lost(summary: BackupSummary) -> str:
    """What the conversion cost; empty where it cost nothing that can be counted."""
    counts = ((summary.dropped_ttls, "expiries"), (summary.dropped_tombstones, "tombstones"))
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _ranges(summary: BackupSummary) -> str:
    earlier = f" ({summary.resumed_ranges:,} by an earlier run)" if summary.resumed_ranges else ""
    return f"{summary.ranges:,}{earlier}"
