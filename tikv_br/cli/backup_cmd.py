"""``tikv-br backup raw``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from formats.api_version import ApiVersion
from formats.errors import InvalidKeyText, UnsupportedFormat
from formats.keytext import parse_key
from tikv_br.cli import log
from tikv_br.cli.lazy import DefaultCommandGroup
from tikv_br.cli.options import (
    DEFAULT_PD,
    CaOption,
    CertOption,
    ConcurrencyOption,
    DryRunOption,
    EndOption,
    FormatOption,
    KeyForm,
    KeyOption,
    KeyspaceOption,
    LogLevel,
    LogLevelOption,
    OutputForm,
    OutputOption,
    PdOption,
    S3AclOption,
    S3EndpointOption,
    S3PathStyleOption,
    S3ProviderOption,
    S3RegionOption,
    S3SseKmsKeyOption,
    S3SseOption,
    S3StorageClassOption,
    SparkMasterOption,
    StartOption,
    StorageOption,
    parse_duration,
    parse_size,
)
from tikv_br.cli.output import Output
from tikv_br.cli.progress import progress_display
from tikv_br.cli.storage_location import storage_location
from tikv_br.cli.text import human_bytes, human_seconds
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from formats.sst.compression import Compression
    from tikv_br.backup.plan import Interval
    from tikv_br.backup.run import BackupReport, BackupSummary

app = typer.Typer(cls=DefaultCommandGroup, rich_markup_mode=None, no_args_is_help=True)
EXECUTORS = ("auto", "driver", "spark")
PLAN_ROWS = 20
"""Intervals of a plan that people are shown; JSON has them all."""


@app.callback()
def group() -> None:
    """Back up a cluster."""


@app.command("raw")
def backup_raw(
    storage: StorageOption,
    pd: PdOption = DEFAULT_PD,
    dst_api_version: Annotated[
        str,
        typer.Option(
            "--dst-api-version",
            envvar="TIKV_BR_DST_API_VERSION",
            metavar="v1|v1ttl|v2",
            help="API version to write the backup in; default: the cluster's own.",
        ),
    ] = "",
    start: StartOption = "",
    end: EndOption = "",
    key_form: FormatOption = KeyForm.HEX,
    keyspace: KeyspaceOption = "",
    compression: Annotated[
        str, typer.Option("--compression", envvar="TIKV_BR_COMPRESSION", help="zstd, lz4, snappy or none.")
    ] = "zstd",
    compression_level: Annotated[
        int, typer.Option("--compression-level", help="Level of zstd or lz4; 0: the default of each.")
    ] = 0,
    file_size: Annotated[
        str, typer.Option("--file-size", metavar="SIZE", help="Keys and values in one file, before compression.")
    ] = "96MiB",
    concurrency: ConcurrencyOption = None,
    safe_interval: Annotated[
        str, typer.Option("--safe-interval", metavar="TIME", help="How far backup-ts lies behind the cluster's clock.")
    ] = "1m",
    gcttl: Annotated[
        str, typer.Option("--gcttl", metavar="TIME", help="How long GC is held back from backup-ts after the backup.")
    ] = "5m",
    checksum: Annotated[
        bool, typer.Option("--checksum/--no-checksum", help="Compare with the cluster's own checksums afterwards.")
    ] = False,
    assume_no_ttl: Annotated[
        bool, typer.Option("--assume-no-ttl", help="Take it that no key expires, instead of asking for each key's TTL.")
    ] = False,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    s3_endpoint: S3EndpointOption = None,
    s3_region: S3RegionOption = None,
    s3_storage_class: S3StorageClassOption = None,
    s3_sse: S3SseOption = None,
    s3_sse_kms_key_id: S3SseKmsKeyOption = None,
    s3_acl: S3AclOption = None,
    s3_provider: S3ProviderOption = None,
    s3_force_path_style: S3PathStyleOption = None,
    executor: Annotated[
        str, typer.Option("--executor", metavar="|".join(EXECUTORS), help="Where tasks run; auto: on Spark.")
    ] = "auto",
    spark_master: SparkMasterOption = "local[*]",
    dry_run: DryRunOption = False,
    output: OutputOption = OutputForm.CONSOLE,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Back up a RawKV cluster, converting between API versions where asked."""
    log.configure(log_level)
    if executor not in EXECUTORS:
        raise UsageError(f"--executor {executor!r}: one of {', '.join(EXECUTORS)}")
    first, last = _parse_keys(start, end, key_form)
    location = storage_location(
        storage,
        endpoint=s3_endpoint,
        region=s3_region,
        storage_class=s3_storage_class,
        sse=s3_sse,
        sse_kms_key_id=s3_sse_kms_key_id,
        acl=s3_acl,
        provider=s3_provider,
        force_path_style=s3_force_path_style,
    )
    target = _parse_api_version(dst_api_version)
    from tikv_br.backup.options import BackupOptions
    from tikv_br.backup.run import backup
    from tikv_br.cluster.config import ClusterConfig

    options = BackupOptions(
        cluster=ClusterConfig.from_flags(pd, ca=ca, cert=cert, key=key),
        storage=location,
        dst_api_version=target,
        start=first,
        end=last,
        keyspace=keyspace,
        compression=_parse_compression(compression),
        compression_level=compression_level,
        file_bytes=parse_size(file_size),
        concurrency=concurrency,
        safe_interval=parse_duration(safe_interval),
        gc_ttl=math.ceil(parse_duration(gcttl)),
        checksum=checksum,
        assume_no_ttl=assume_no_ttl,
        executor="driver" if executor == "driver" else "spark",
        spark_master=spark_master,
        dry_run=dry_run,
    )
    out = Output(output)
    with progress_display(out) as display:
        report = backup(options, display)
    _render(out, report)


def _parse_keys(start: str, end: str, form: KeyForm) -> tuple[bytes, bytes]:
    """The range of the flags. Raises `UsageError`."""
    keys = []
    for flag, text in (("--start", start), ("--end", end)):
        try:
            keys.append(parse_key(text, form.value))
        except InvalidKeyText as error:
            raise UsageError(
                f"{flag}: {error}", hint="--format says how keys are written; hex is the default."
            ) from None
    return keys[0], keys[1]


def _parse_api_version(label: str) -> ApiVersion | None:
    try:
        return ApiVersion.from_label(label) if label else None
    except UnsupportedFormat as error:
        raise UsageError(f"--dst-api-version: {error}") from None


def _parse_compression(label: str) -> Compression:
    from formats.sst.compression import Compression

    try:
        return Compression.from_label(label)
    except UnsupportedFormat as error:
        raise UsageError(f"--compression: {error}") from None


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
    """The summary for people, with the Go tool's names where it has them."""
    if summary.dry_run:
        return "Nothing was written (dry run)"
    figures = [
        ("total-take", human_seconds(summary.seconds)),
        ("total-kv", f"{summary.total_kvs:,}"),
        ("total-kv-size", human_bytes(summary.total_bytes)),
        ("average-speed", f"{human_bytes(summary.average_speed)}/s"),
        ("backup-data-size", human_bytes(summary.backup_size)),
        ("total-ranges", f"{summary.ranges:,}"),
        ("files", f"{summary.files:,}"),
        ("backup-ts", str(summary.backup_ts) if summary.backup_ts else "none (the cluster has no timestamps)"),
        ("api-version", f"{summary.api_version} -> {summary.dst_api_version}"),
        ("checksum", f"{summary.crc64xor:016x}"),
        ("storage", summary.storage),
    ]
    return "Raw backup success summary" + "".join(f"\n  {name:<18} {value}" for name, value in figures)
