"""``tikv-br restore``, for short also of ``tikv-br restore raw``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import typer
from msgspec.structs import asdict

from tikv_br.cli import backup_flags, key_flags, kinds, shared
from tikv_br.cli.command import Command, command, flag
from tikv_br.cli.key_flags import LOG_ID, LogSourceFlags, PointFlags, RequiredPointFlags
from tikv_br.cli.output import KeyForm, Output, read_key, reporting
from tikv_br.cli.progress import progress_display
from tikv_br.cli.summaries import point_figures, restore_figures, show_point, show_restore, show_restore_plan
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.point_in_time import PointOptions
    from tikv_br.progress_events import Reporter
    from tikv_br.report.draft import Draft
    from tikv_br.restore.options import RestoreOptions
    from tikv_br.restore.run import RestoreSummary
    from tikv_br.storage.url import StorageLocation


class RestoreCommand(Command):
    """A command whose flag ``--restamp`` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - public Typer has no name for its type
        """Read a ``--restamp`` before a flag, a URL or the end as ``--restamp always``."""

        def is_bare(each: str, after: str) -> bool:
            return each == "--restamp" and (after.startswith(("-", "/")) or "://" in after)

        given = [
            f"{each}=always" if is_bare(each, after) else each for each, after in itertools.pairwise([*args, "--"])
        ]
        return super().parse_args(ctx, given)


class RestoreFlags(backup_flags.BackupFlags):
    cluster: shared.ClusterFlags
    range: key_flags.RangeOrPrefixFlags
    keyspace: str | None = flag(
        None, "Restore only this keyspace of the backup, by id or name (API V2; default: all).", metavar="ID|NAME"
    )
    to_keyspace: str = flag(
        "",
        "Keyspace to restore into, by id or name (API V2; default: the one with the same name as in the backup).",
        metavar="ID|NAME",
    )
    rewrite_prefix: str = flag(
        "",
        "Restore only keys with the prefix OLD, and replace it with NEW. Both are written as --key-format says.",
        metavar="OLD=NEW",
    )
    via: Literal["auto", "stores", "upload"] = shared.VIA()
    concurrency: int = flag(16, "Maximum number of concurrent files.", shared=True, limits=(1, kinds.MAX_CONCURRENCY))
    region_bytes: int = flag(
        "96MiB",
        "Split the target before the ingest into regions of about this size of keys and values, only where files start.",
        "--region-size",
        kind=kinds.SIZE,
    )
    import_mode: bool = flag(
        False,
        "Switch stores to import mode and pause PD schedulers during the ingest (faster, but slows other clients), or do neither.",
        "--import-mode/--online",
    )
    checksum: bool = flag(True, "Compare the checksums of the target with the checksums of the backup.")
    file_check: Literal["auto", "identity", "blocks", "content"] = flag(
        "auto",
        "Check of each file before the restore: identity (length, ETag, last 64 KiB), blocks (plus the checksum of each block), content (plus "
        "SHA-256), or auto (identity if the ETag confirms the file; else blocks, or content if it is encrypted, Parquet, or the Go tool's).",
    )
    allow_overwrite: bool = flag(
        False,
        "Restore into a range that contains data (default: refuse). Keys that are not in the backup are kept.",
        command_line=True,
    )
    allow_empty: bool = shared.ALLOW_EMPTY()
    rate_limit: int = shared.RATE_LIMIT()
    send_credentials: bool = shared.SEND_CREDENTIALS()
    spark: shared.SparkFlags
    resume: bool = flag(True, "Resume an unfinished restore of this backup, or discard its checkpoint and start over.")
    state: str = flag(
        "", "Directory or URL for the restore checkpoint (default: in the backup).", shared=True, metavar="URL"
    )
    lock_wait: float = shared.LOCK_WAIT()
    dry_run: bool = shared.DRY_RUN()
    report: str = shared.REPORT()


class RawDataFlags(RestoreFlags):
    mode: Literal["ingest", "put"] = flag(
        "ingest",
        "ingest: stores ingest whole files. put: rows are written by RawBatchPut, as a client does, with new timestamps.",
    )
    restamp: Literal["auto", "always", "never"] = flag(
        "auto",
        "Give ingested rows a new timestamp, so that newer tombstones in the target do not hide them (API V2). auto: if the backup "
        "comes from the target cluster, rows are newer than the target's TSO, or tombstones hide rows. Plain --restamp: always.",
    )
    allow_followers: bool = shared.ALLOW_FOLLOWERS()


class RawRestoreFlags(RawDataFlags, backup_flags.ChosenBackupFlags):
    storage: str = backup_flags.CHOSEN_STORAGE()
    point: PointFlags
    source: LogSourceFlags


class TxnRestoreFlags(RestoreFlags, backup_flags.ChosenBackupFlags):
    storage: str = backup_flags.CHOSEN_STORAGE()
    keep_timestamps: bool = flag(
        False,
        "Keep the rows' own timestamps instead of giving them a new one. Newer deletes in the target hide such rows, so that the "
        "restore fails at the end unless the range was never written or deleted physically.",
    )


class PointRestoreFlags(RawDataFlags):
    chosen: str = backup_flags.chosen_backup("--full-backup-storage")
    storage: str = backup_flags.storage(f"URL of the log archive: {backup_flags.URLS}")
    log_id: str | None = LOG_ID()
    full_backup_storage: str = flag(
        "",
        "URL of the backup to start from, full or incremental, or with ID or newest, parent URL of the backups.",
        metavar="URL",
    )
    point: RequiredPointFlags


@command("restore raw", example="s3://backups/monday --pd 10.0.1.1:2379", cls=RestoreCommand)
def restore_raw(flags: RawRestoreFlags, context: typer.Context) -> None:
    """Restore a RawKV backup and verify the result. Reads backups of tikv-br and the Go TiKV-BR."""
    log = flags.source.source(flags.storage_flags)
    _restore(
        "restore raw", flags, flags.choose(context, partial(flags.point.time, flags.cluster.config())), flags.point, log
    )


@command(
    "restore point",
    example="s3://backups/monday --pd 10.0.1.1:2379 --storage s3://backups/log --until 2026-05-02T14:31:00Z",
    cls=RestoreCommand,
)
def restore_point(flags: PointRestoreFlags, context: typer.Context) -> None:
    """Restore the data as of a point in time from a backup and a log archive (API V2). Same as `restore raw --log URL --until TIME`."""
    from tikv_br.archive.maintenance import choose_log

    log = choose_log(flags.location, flags.log_id)
    backup = backup_flags.choose(
        context,
        flags.storage_flags,
        "full_backup_storage",
        flags.chosen,
        flags.full_backup_storage,
        partial(flags.point.time, flags.cluster.config()),
    )
    _restore("restore point", flags, backup, flags.point, log)


@command("restore txn", example="s3://backups/metadata --pd 10.0.1.1:2379")
def restore_txn(flags: TxnRestoreFlags, context: typer.Context) -> None:
    """Restore a backup of transactional data and verify the result. Reads backups of tikv-br and BR. Stop all clients before."""
    with reporting("restore txn", flags.report) as draft:
        from tikv_br.formats.keys.codec import KeyMode
        from tikv_br.restore.options import Restamp
        from tikv_br.restore.run import restore

        restamp = Restamp.NEVER if flags.keep_timestamps else Restamp.ALWAYS
        options = _options("restore txn", flags, flags.choose(context), key_mode=KeyMode.TXN, restamp=restamp)
        with _listening(draft, flags, options) as listener:
            summary = restore(options, listener, partial(show_restore_plan, flags.out))
        _done(draft, summary)
    show_restore(flags.out, summary)


def _restore(
    name: str, flags: RawDataFlags, storage: StorageLocation, point: PointFlags, log: LogSource | None
) -> None:
    with reporting(name, flags.report) as draft:
        if flags.mode == "put":
            _check_put(flags)
        from tikv_br.restore.options import Mode, Restamp

        options = _options(name, flags, storage, mode=Mode(flags.mode), restamp=Restamp(flags.restamp))
        with _listening(draft, flags, options) as listener:
            summary, point_figures = _run(
                options, point.options(options, log, flags.storage_flags), flags.out, listener
            )
        if summary is None:
            return
        _done(draft, summary, point_figures)
    show_restore(flags.out, summary)


def _options(name: str, flags: RestoreFlags, storage: StorageLocation, **others: object) -> RestoreOptions:
    """The options of the flags that all commands have, and ``others``."""
    span = flags.range.key_range()
    from tikv_br.restore.inspect import FileCheck
    from tikv_br.restore.options import RestoreOptions, Via
    from tikv_br.tasks.executor import ExecutorOptions

    return flags.fill(
        RestoreOptions,
        cluster=flags.cluster.config(),
        storage=storage,
        span=span,
        rewrite_prefix=_parse_rewrite(flags.rewrite_prefix, flags.range.form),
        via=Via(flags.via),
        file_check=FileCheck(flags.file_check),
        state=flags.storage_flags.locate(flags.state) if flags.state else None,
        command=name,
        executor=flags.fill(ExecutorOptions),
        **others,
    )


@contextlib.contextmanager
def _listening(draft: Draft, flags: RestoreFlags, options: RestoreOptions) -> Iterator[Reporter]:
    """Show progress, and notices about keys of the flags."""
    draft.place, draft.cluster = options.storage, ",".join(flags.cluster.pd)
    with progress_display(flags.out) as display:
        listener = draft.listen(display)
        flags.range.notice(listener)
        prefixes = [("--rewrite-prefix", each) for each in flags.rewrite_prefix.split("=")]
        key_flags.notice_ambiguous(listener, flags.range.key_format, prefixes)
        yield listener


def _done(draft: Draft, summary: RestoreSummary, more: Sequence[tuple[str, str]] = ()) -> None:
    draft.done(asdict(summary), [*more, *restore_figures(summary, age=False)])
    draft.keys = summary.total_kvs if summary.verified else 0


def _run(
    options: RestoreOptions, point: PointOptions | None, out: Output, reporter: Reporter
) -> tuple[RestoreSummary | None, list[tuple[str, str]]]:
    """Restore; no summary of a dry run that has only planned a merge. Also what a report says of the point in time."""
    show_plan = partial(show_restore_plan, out)
    if point is None:
        from tikv_br.restore.run import restore

        return restore(options, reporter, show_plan), []
    from tikv_br.point_in_time import restore_to_point

    done = restore_to_point(point, reporter, show_plan)
    show_point(out, done)
    return done.restored, point_figures(done, age=False)


def _check_put(flags: RawDataFlags) -> None:
    for given, name, reason in (
        (flags.rate_limit, "--ratelimit", "it limits the downloads of stores"),
        (flags.import_mode, "--import-mode", "no store ingests files"),
        (flags.allow_followers, "--allow-followers", "every follower gets rows that are put"),
        (flags.restamp != "auto", "--restamp", "it always writes new timestamps"),
    ):
        if given:
            raise UsageError(f"{name} cannot be combined with --mode put: {reason}", hint="Omit one of them.")


def _parse_rewrite(text: str, form: KeyForm) -> tuple[bytes, bytes]:
    """The prefixes of ``OLD=NEW``. Raises `UsageError`; a ``=`` of a prefix itself must be escaped, or be hex."""
    if not text:
        return b"", b""
    old, sign, new = text.partition("=")
    if not sign or "=" in new or not old + new:
        raise UsageError(
            f"--rewrite-prefix {text!r} is not OLD=NEW",
            hint=r"One of them may be empty. Write a = of a prefix as \x3d.",
        )
    return read_key(old, form, "--rewrite-prefix"), read_key(new, form, "--rewrite-prefix")
