"""``tikv-br backup``."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal

import typer
from msgspec import structs
from msgspec.structs import asdict
from typer.core import TyperGroup

from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.key_flags import ALLOW_INEXACT, LogSourceFlags, RangesFlags, parse_ts_or_latest
from tikv_br.cli.output import KeyForm, reporting
from tikv_br.cli.progress import progress_display
from tikv_br.cli.summaries import backup_figures, show_backup
from tikv_br.errors import UsageError
from tikv_br.formats.api_version import ApiVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tikv_br.dataflow.options import BackupOptions, Loss
    from tikv_br.dataflow.run import BackupReport
    from tikv_br.progress_events import Reporter
    from tikv_br.report.draft import Draft

DST_API_VERSION = partial(flag, None, "API version of the backup (default: the cluster's).", shared=True)
KEYSPACES = partial(
    flag,
    None,
    "Keyspace to back up, by id or name, or all that contain data (API V2; may be repeated; default: only keyspace 0).",
    "--keyspace",
    shared=True,
    metavar="ID|NAME|all",
)
SAFE_INTERVAL = partial(
    flag,
    "1m",
    "How far backup-ts is behind the current time of the cluster: a margin for older timestamps that stores have cached. It adds to the RPO.",
    kind=kinds.TIME,
)
CHECKSUM = partial(flag, False, "Compare the backup with the checksums of the cluster.", "--checksum/--no-checksum")
NO_RESUME = partial(flag, False, "Remove the unfinished backup at the URL and start over (default: resume it).")
COMPRESSION = partial(flag, "zstd", "Compression of the files.", shared=True)
NEW_STORAGE = partial(
    backup_flags.storage,
    f"URL of one backup: {backup_flags.URLS}. {{time}} (of the start, UTC), {{time:%Y-%m-%d_%H%M}}, {{date}} and {{keyspace}} may be in its last part.",
)
COMPRESSION_LEVEL = partial(flag, 0, "Compression level of zstd or lz4 (0 = its default).", limits=(-50, 22))


class RawBackupFlags(backup_flags.BackupFlags):
    storage: str = NEW_STORAGE()
    cluster: shared.ClusterFlags
    dst_api_version: Literal["v1", "v1ttl", "v2"] | None = DST_API_VERSION()
    allow_loss: str = flag(
        "",
        "Data that the conversion to --dst-api-version may drop: comma-separated list of ttl, ts, keyspace (default: none; the backup "
        "is refused).",
        metavar="LIST",
    )
    engine: Literal["auto", "store", "scan"] = flag(
        "auto",
        "How data is read: store (TiKV stores write SSTs to the storage), scan (tikv-br scans and writes the files), or auto (store if a "
        "scan would lose timestamps or expiry, or if the stores can write to a cloud storage themselves; else scan).",
        shared=True,
    )
    range: RangesFlags
    form: Literal["raw", "hex", "escaped", "sst", "parquet"] | None = flag(
        None,
        "As the flag of the Go TiKV-BR: raw, hex and escaped are --key-format, sst and parquet are --file-format.",
        "--format",
    )
    file_format: Literal["sst", "parquet"] | None = flag(
        None,
        "Format of the files: sst (the Go TiKV-BR can restore it) or parquet (other tools can read it).",
        show_default="sst",
    )
    keyspaces: list[str] | None = KEYSPACES()
    allow_empty: bool = shared.ALLOW_EMPTY()
    compression: Literal["zstd", "lz4", "snappy", "none"] = COMPRESSION()
    compression_level: int = COMPRESSION_LEVEL()
    file_bytes: int = flag(
        "96MiB",
        "Target size of keys and values per file, before compression. With --engine store, each SST holds one region instead.",
        "--file-size",
        kind=kinds.SIZE,
    )
    safe_interval: float = SAFE_INTERVAL()
    gc_ttl: float = flag(
        "5m",
        "TTL of the service safe point after the run. Make it longer than the time until a sync or an incremental backup (--base) "
        "continues from this backup.",
        "--gc-ttl",
        "--gcttl",
        kind=kinds.TIME,
    )
    checksum: bool = CHECKSUM()
    assume_no_ttl: bool = flag(
        False,
        "Assume that no key has a TTL, and skip one RawGetKeyTTL request per key. A key with a TTL is then restored without it.",
    )
    rate_limit: int = shared.RATE_LIMIT()
    send_credentials: bool = shared.SEND_CREDENTIALS()
    tasks: shared.TaskFlags
    lock_wait: float = shared.LOCK_WAIT()
    no_resume: bool = NO_RESUME()
    base: str = flag(
        "",
        "Back up only the changes since this backup, which may itself be incremental (API V2; default: back up everything).",
        metavar="URL",
    )
    dry_run: bool = shared.DRY_RUN()
    report: str = shared.REPORT()
    hooks: shared.HookFlags


@command("backup raw", example="--pd 10.0.0.1:2379 --storage s3://backups/monday --dst-api-version v2")
def backup_raw(flags: RawBackupFlags) -> None:
    """Back up a RawKV cluster. Optionally convert it to another API version."""
    with reporting("backup raw", flags.report) as draft:
        key_format, file_kind = _parse_forms(flags)
        wanted = flags.range.replaced(key_format=key_format)
        from tikv_br.backupset.files import FileKind

        others = {
            "dst_api_version": ApiVersion.from_label(flags.dst_api_version) if flags.dst_api_version else None,
            "file_kind": FileKind(file_kind),
            "allow_loss": _parse_losses(flags.allow_loss),
        }
        done = _run(draft, flags, wanted, others, partial(_back_up, flags))
    show_backup(flags.out, done)


class BackupScheduleFlags(shared.ScheduleFlags):
    words: list[str] = argument(REQUIRED, "-- FLAGS...", "Flags of `tikv-br backup raw`, after --.")


@command("backup schedule", example="--print crontab --at 02:00 -- --pd 10.0.0.1:2379 --storage s3://backups/{time}")
def schedule_backup(flags: BackupScheduleFlags, context: typer.Context) -> None:
    """Print a crontab line or systemd units that run `backup raw` with flags."""
    group = context.parent
    if group is not None and isinstance(group.command, TyperGroup):
        raw = group.command.get_command(group, "raw")
        if raw is not None:  # refuse now, not at night, flags that it does not have, and a path that is none
            from tikv_br.backup.dated import placeholders
            from tikv_br.storage.url import parse

            passed = raw.make_parser(context).parse_args(list(flags.words))[0]
            if storage := passed.get("storage"):
                placeholders(parse(str(storage)))
    text = flags.text("backup raw", flags.words)
    flags.out.result("schedule", {"text": text}, text.rstrip("\n"))


class TxnBackupFlags(backup_flags.BackupFlags):
    storage: str = NEW_STORAGE()
    cluster: shared.ClusterFlags
    range: RangesFlags
    keyspaces: list[str] | None = KEYSPACES()
    allow_empty: bool = shared.ALLOW_EMPTY()
    compression: Literal["zstd", "lz4", "snappy"] = flag("zstd", "Compression of the files.", shared=True)
    compression_level: int = COMPRESSION_LEVEL()
    gc_ttl: float = flag(
        "5m",
        "TTL of the service safe point after the run: how long an unfinished backup can be resumed.",
        "--gc-ttl",
        "--gcttl",
        kind=kinds.TIME,
    )
    checksum: bool = CHECKSUM()
    lock_patience: float = flag(
        "1m", "How long to wait for transactions whose locks are in the way of the backup.", kind=kinds.TIME
    )
    rate_limit: int = shared.RATE_LIMIT()
    send_credentials: bool = shared.SEND_CREDENTIALS()
    tasks: shared.TaskFlags
    lock_wait: float = shared.LOCK_WAIT()
    no_resume: bool = NO_RESUME()
    dry_run: bool = shared.DRY_RUN()
    report: str = shared.REPORT()
    hooks: shared.HookFlags


@command("backup txn", example="--pd 10.0.0.1:2379 --storage s3://backups/metadata")
def backup_txn(flags: TxnBackupFlags) -> None:
    """Back up transactional data, as of JuiceFS or SurrealDB, at one timestamp. Not for TiDB."""
    with reporting("backup txn", flags.report) as draft:
        from tikv_br.backup.run import backup_txn as back_up
        from tikv_br.formats.keys.codec import KeyMode

        done = _run(draft, flags, flags.range, {"key_mode": KeyMode.TXN}, back_up)
    show_backup(flags.out, done)


def _run(
    draft: Draft,
    flags: RawBackupFlags | TxnBackupFlags,
    wanted: RangesFlags,
    others: Mapping[str, object],
    run: Callable[[BackupOptions, Reporter], BackupReport],
) -> BackupReport:
    """Run a backup with the options of the flags, ``others``, which only one command has, and the ``wanted`` ranges."""
    draft.place, draft.cluster = flags.location, ",".join(flags.cluster.pd)
    from tikv_br.backup.dated import Subject, dated_location
    from tikv_br.dataflow.options import BackupOptions
    from tikv_br.formats.sst.compression import Compression

    options = flags.fill(
        BackupOptions,
        cluster=flags.cluster.config(),
        storage=flags.location,
        ranges=wanted.key_ranges(),
        keyspaces=tuple(flags.keyspaces or ()),
        compression=Compression.from_label(flags.compression),
        gc_ttl=math.ceil(flags.gc_ttl),
        **others,
    )
    with progress_display(flags.out) as display:
        reporter = draft.listen(display)
        wanted.notice(reporter)
        kind = "txn" if isinstance(flags, TxnBackupFlags) else "incremental" if flags.base else ""
        subject = Subject(options.cluster.pd, kind, options.keyspaces, options.ranges)
        place = dated_location(options.storage, reporter, dry_run=options.dry_run, subject=subject)
        options = structs.replace(options, storage=place)
        draft.place = options.storage
        done = run(options, reporter)
    draft.done(asdict(done.summary), backup_figures(done.summary, age=False))
    return done


def _back_up(flags: RawBackupFlags, options: BackupOptions, reporter: Reporter) -> BackupReport:
    if flags.base:
        if flags.checksum or flags.engine != "auto" or flags.dst_api_version not in {None, "v2"}:
            raise UsageError("--base cannot be combined with --checksum, --engine or another API version than v2")
        from tikv_br.incremental.backup import back_up_changes

        return back_up_changes(options, flags.storage_flags.locate(flags.base), reporter)
    from tikv_br.backup.run import backup

    return backup(options, reporter)


class MergeFlags(backup_flags.BackupFlags):
    chosen: str = backup_flags.chosen_backup("--base")
    storage: str = backup_flags.storage(f"URL for the new backup: {backup_flags.URLS}")
    base: str = flag(
        "",
        "Newest backup to merge, full or incremental, or with ID or newest, parent URL of the backups. The backups it is based on are "
        "found and merged too.",
        metavar="URL",
    )
    log: LogSourceFlags
    until: str = flag(
        "latest", "Time of the new backup: latest, a PD timestamp, a time or an age.", metavar="TS|TIME|latest"
    )
    allow_inexact: bool = ALLOW_INEXACT()
    file_format: Literal["sst", "parquet"] = flag("sst", "Format of the files: sst or parquet.")
    compression: Literal["zstd", "lz4", "snappy", "none"] = COMPRESSION()
    compression_level: int = COMPRESSION_LEVEL()
    tasks: shared.TaskFlags
    lock_wait: float = shared.LOCK_WAIT()
    no_resume: bool = NO_RESUME()
    dry_run: bool = shared.DRY_RUN()
    hooks: shared.HookFlags


@command("backup merge", example="s3://backups/monday --log s3://backups/log --storage s3://backups/tuesday")
def merge_backups(flags: MergeFlags, context: typer.Context) -> None:
    """Make a full backup from a full backup, its incremental backups and a log archive, without access to the cluster (API V2)."""
    log, ts = flags.log.source(flags.storage_flags), parse_ts_or_latest(flags.until, "--until")
    from tikv_br.backup.merge import MergeOptions, merge_backup
    from tikv_br.backupset.files import FileKind
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.dataflow.options import BackupOptions
    from tikv_br.formats.sst.compression import Compression

    output = flags.fill(
        BackupOptions,
        cluster=ClusterConfig(pd=()),
        storage=flags.location,
        file_kind=FileKind(flags.file_format),
        compression=Compression.from_label(flags.compression),
    )
    wanted = MergeOptions(
        output,
        backup_flags.choose(context, flags.storage_flags, "base", flags.chosen, flags.base),
        log,
        ts,
        flags.allow_inexact,
    )
    with progress_display(flags.out) as display:
        done = merge_backup(wanted, display)
    show_backup(flags.out, done)


def _parse_forms(flags: RawBackupFlags) -> tuple[KeyForm | None, str]:
    """Return the requested form of keys (None: not requested) and the format of files. Raises `UsageError`."""
    form, key_format, file_format = flags.form, flags.range.key_format, flags.file_format
    if form in {"sst", "parquet"}:
        if file_format not in {None, form}:
            raise UsageError(f"--format {form} and --file-format {file_format} cannot be combined")
        return key_format, str(form)
    if form and key_format not in {None, form}:
        raise UsageError(f"--format {form} and --key-format {key_format} cannot be combined")
    return KeyForm(form) if form else key_format, file_format or "sst"


def _parse_losses(text: str) -> frozenset[Loss]:
    from tikv_br.dataflow.options import Loss

    try:
        return frozenset(Loss(word.strip()) for word in text.split(",") if text)
    except ValueError:
        raise UsageError(f"--allow-loss {text!r} is not valid: pass one or more of {', '.join(Loss)}") from None
