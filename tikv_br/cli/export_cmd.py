"""``tikv-br export raw``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import typer

from tikv_br.cli import backup_flags, shared
from tikv_br.cli.command import argument, command, flag, given
from tikv_br.cli.key_flags import RangesFlags
from tikv_br.cli.output import human_bytes, human_seconds, listed
from tikv_br.cli.progress import progress_display
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.export.run import ExportSummary


class ExportFlags(backup_flags.BackupFlags):
    chosen: str = argument(
        "",
        "[URL|ID|newest]",
        "Backup to read instead of a cluster: its URL, or the id or newest of those below --from-backup.",
        autocompletion=backup_flags.complete_id,
    )
    storage: str = backup_flags.storage(f"URL of an empty place for the files: {backup_flags.URLS}")
    format: Literal["parquet", "csv", "jsonl"] = flag("parquet", "Format of the files.")
    encoding: Literal["raw", "hex", "escaped"] | None = flag(
        None,
        "Keys and values in csv and jsonl files: raw (UTF-8 text), hex, or escaped (\\xNN).",
        show_default="raw in csv, hex in jsonl",
    )
    cluster: shared.ClusterFlags
    from_backup: str = flag(
        "",
        "Read this backup instead of a cluster, or with ID or newest, one below this URL. If it is incremental, the backups it is based "
        "on are found and read too.",
        metavar="URL",
    )
    keyspace: str = shared.KEYSPACE()
    range: RangesFlags
    allow_empty: bool = shared.ALLOW_EMPTY()
    assume_no_ttl: bool = flag(
        False,
        "Assume that no key has a TTL: skip one RawGetKeyTTL request per key, and leave out the column expire_ts.",
    )
    rate_limit: int = shared.RATE_LIMIT()
    overwrite: bool = flag(
        False, "Replace an earlier export, finished or not, at the URL (default: refuse).", command_line=True
    )
    tasks: shared.TaskFlags


@command("export raw", example="--pd 10.0.0.1:2379 --storage s3://lake/rows --format parquet")
def export_raw(flags: ExportFlags, context: typer.Context) -> None:
    """Export rows of a cluster or a backup as Parquet, CSV or JSON lines.

    The file _SUCCESS is written last: without it an export is not complete. --crypter.* is the key of a backup to read; exports are not
    encrypted.
    """
    reads_backup = bool(flags.chosen or flags.from_backup)
    wanted = flags.range.key_ranges()
    if reads_backup and given(context, "pd"):
        raise UsageError("--pd cannot be combined with a backup to read", hint="Pass the source once.")
    if not reads_backup and (flags.storage_flags.key or flags.storage_flags.key_file):
        raise UsageError("an export is not encrypted: a key is only used with a backup to read", hint="Use --s3.sse.")
    if reads_backup and given(context, "rate_limit"):
        raise UsageError("--ratelimit limits the reads from stores: it cannot be combined with a backup to read")
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.dataflow.options import BackupOptions
    from tikv_br.export.run import ExportOptions, export

    read = flags.fill(
        BackupOptions,
        cluster=ClusterConfig(pd=()) if reads_backup else flags.cluster.config(),
        storage=flags.storage_flags.s3.locate(flags.storage),
        ranges=wanted,
        keyspaces=(flags.keyspace,) if flags.keyspace else (),
    )
    backup = (
        backup_flags.choose(context, flags.storage_flags, "from_backup", flags.chosen, flags.from_backup)
        if reads_backup
        else None
    )
    options = ExportOptions(read, backup, flags.format, flags.encoding, flags.overwrite)
    with progress_display(flags.out) as display:
        flags.range.notice(display)
        summary = export(options, display)
    flags.out.result("summary", asdict(summary), _text(summary))


def _text(summary: ExportSummary) -> str:
    form = f"{summary.file_format} ({summary.encoding})" if summary.encoding else summary.file_format
    figures = [
        ("total-take", human_seconds(summary.seconds)),
        ("total-kv", f"{summary.total_kvs:,}"),
        ("total-kv-size", human_bytes(summary.total_bytes)),
        ("average-speed", f"{human_bytes(summary.average_speed)}/s"),
        ("files", f"{summary.files:,} ({human_bytes(summary.size)})"),
        ("format", f"{form}: {', '.join(summary.columns)}"),
        ("source", f"{summary.source} (API {summary.api_version})"),
        ("backup-ts", str(summary.backup_ts) if summary.backup_ts else ""),
        ("executor", f"{summary.executor} ({summary.executor_reason})"),
        ("storage", summary.storage),
    ]
    return listed("Export complete", figures)
