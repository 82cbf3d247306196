"""``tikv-br restore raw`` and, for short, ``tikv-br restore``."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import typer

from tikv_br.cli import backup_flags, key_flags, kinds, shared
from tikv_br.cli.command import Command, Flags, command, flag
from tikv_br.cli.output import KeyForm, Output, human_bytes, human_seconds, listed, read_key, reporting
from tikv_br.cli.progress import progress_display
from tikv_br.cluster.timestamps import parse_ts, show_ts
from tikv_br.errors import BackupSetError, StorageError, UsageError
from tikv_br.formats.keys.codec import MAX_KEYSPACE
from tikv_br.report.facts import counted

if TYPE_CHECKING:
    from tikv_br.archive.log import LogSource
    from tikv_br.compare.files import FilePart
    from tikv_br.formats.keys.ranges import KeyRange
    from tikv_br.point_in_time import PointOptions, PointSummary
    from tikv_br.progress_events import Reporter
    from tikv_br.restore.options import RestoreOptions
    from tikv_br.restore.plan import RestorePlan, RestoreRange
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


class PointFlags(Flags):
    until: str = flag(
        "",
        "Restore the data as of this time (API V2): latest, a PD timestamp, a time or an age (default: latest with --log or an "
        "incremental backup, else the backup as it is).",
        "--until",
        "--restore-ts",
        metavar="TS|TIME|latest",
    )
    before: str = flag(
        "",
        "As the time to restore to, but no write made at this time or later is included: the rows of 3 s before, as stores give out "
        "timestamps up to 3 s old.",
        metavar="TS|TIME",
    )
    allow_inexact: bool = backup_flags.ALLOW_INEXACT()
    work_storage: str = flag(
        "",
        "URL for the temporary merged backup, which needs the space of a full backup (default: next to the log or, without one, to the "
        "backup).",
        metavar="URL",
    )

    def options(
        self, restore: RestoreOptions, log: LogSource | None, storage_flags: backup_flags.StorageFlags
    ) -> PointOptions | None:
        """None if the backup is restored as it is: without a time and a log, and if it is not incremental. Raises `UsageError`."""
        if not self.until + self.before and log is None and not _is_increment(restore.storage):
            return None
        if self.before and self.until != type(self).until:
            raise UsageError("--until and --before cannot be combined", hint="Pass one of them.")
        ts = backup_flags.parse_ts_or_latest(self.until or "latest", "--until")
        before = parse_ts(self.before, "--before") if self.before else 0
        from tikv_br.point_in_time import PointOptions, just_before

        work = storage_flags.locate(self.work_storage) if self.work_storage else None
        return PointOptions(restore, log, just_before(before) if before else ts, before, self.allow_inexact, work)


class RequiredPointFlags(PointFlags):
    until: str = flag(
        "latest",
        "Time to restore to: latest, a PD timestamp, a time or an age.",
        "--until",
        "--restored-ts",
        metavar="TS|TIME|latest",
    )


class RestoreRangeFlags(key_flags.RangeFlags):
    """The range to restore, as ``--range`` or as ``--start`` and ``--end``."""

    span: str = flag(
        "",
        "Key range: START (inclusive) to END (exclusive); either may be empty; a colon of a key is \\x3a.",
        "--range",
        metavar="START:END",
    )

    def key_range(self) -> KeyRange:
        """As `RangeFlags.key_range`."""
        return key_flags.RangeFlags.key_range(self._bounded())

    def notice(self, reporter: Reporter) -> None:
        """As `RangeFlags.notice`."""
        key_flags.RangeFlags.notice(self._bounded(), reporter)

    def _bounded(self) -> RestoreRangeFlags:
        """The same range as ``--start`` and ``--end``. Raises `UsageError`."""
        if not self.span:
            return self
        if self.start or self.end:
            raise UsageError("--range cannot be combined with --start and --end", hint="Pass one of them.")
        first, last = key_flags.split_range(self.span, self.form)
        return replace(self, span="", start=first, end=last)


class RestoreFlags(backup_flags.BackupFlags):
    cluster: shared.ClusterFlags
    range: RestoreRangeFlags
    keyspace: int | None = flag(
        None,
        "Restore only this keyspace of the backup, by id (API V2; default: all).",
        limits=(0, MAX_KEYSPACE),
        metavar="ID",
    )
    to_keyspace: str = flag(
        "", "Keyspace to restore into, by id or name (API V2; default: that of the backup).", metavar="ID|NAME"
    )
    rewrite_prefix: str = flag(
        "",
        "Restore only keys with the prefix OLD, and replace it with NEW. Both are written as --key-format says.",
        metavar="OLD=NEW",
    )
    mode: Literal["ingest", "put"] = flag(
        "ingest",
        "ingest: stores ingest whole files. put: rows are written by RawBatchPut, as a client does, with new timestamps.",
    )
    via: Literal["auto", "stores", "upload"] = shared.VIA()
    restamp: Literal["auto", "always", "never"] = flag(
        "auto",
        "Give ingested rows a new timestamp, so that newer tombstones in the target do not hide them (API V2). auto: if the backup "
        "comes from the target cluster, rows are newer than the target's TSO, or tombstones hide rows. Plain --restamp: always.",
    )
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
    checksum: bool = flag(True, "Compare the checksums of the target with those of the backup.")
    file_check: Literal["auto", "identity", "content"] = flag(
        "auto",
        "Check of each file before the restore: identity (length, ETag, last 64 KiB), content (plus SHA-256), or auto (content if the "
        "ETag does not confirm the file).",
    )
    allow_overwrite: bool = flag(
        False,
        "Restore into a range that contains data (default: refuse). Keys that are not in the backup are kept.",
        command_line=True,
    )
    allow_empty: bool = shared.ALLOW_EMPTY()
    allow_followers: bool = shared.ALLOW_FOLLOWERS()
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


class RawRestoreFlags(RestoreFlags, backup_flags.ChosenBackupFlags):
    storage: str = backup_flags.CHOSEN_STORAGE()
    point: PointFlags
    source: backup_flags.LogSourceFlags


class PointRestoreFlags(RestoreFlags):
    chosen: str = backup_flags.chosen_backup("--full-backup-storage")
    storage: str = backup_flags.storage(f"URL of the log archive: {backup_flags.URLS}")
    log_id: str = backup_flags.LOG_ID()
    full_backup_storage: str = flag(
        "",
        "URL of the backup to start from, full or incremental, or with ID or newest, parent URL of the backups.",
        metavar="URL",
    )
    point: RequiredPointFlags


PLAN_ROWS = 20
"""Files of a plan that people are shown; JSON has them all."""


@command("restore raw", example="s3://backups/monday --pd 10.0.1.1:2379", cls=RestoreCommand)
def restore_raw(flags: RawRestoreFlags, context: typer.Context) -> None:
    """Restore a RawKV backup and verify the result. Reads backups of tikv-br and the Go TiKV-BR."""
    log = flags.source.source(flags.storage_flags)
    _restore("restore raw", flags, flags.choose(context), flags.point, log)


@command(
    "restore point",
    example="s3://backups/monday --pd 10.0.1.1:2379 --storage s3://backups/log --until 2026-05-02T14:31:00Z",
    cls=RestoreCommand,
)
def restore_point(flags: PointRestoreFlags, context: typer.Context) -> None:
    """Restore the data as of a point in time from a backup and a log archive (API V2). Same as `restore raw --log URL --until TIME`."""
    from tikv_br.archive.log import LogSource

    log = LogSource(flags.location, flags.log_id)
    backup = backup_flags.choose(
        context, flags.storage_flags, "full_backup_storage", flags.chosen, flags.full_backup_storage
    )
    _restore("restore point", flags, backup, flags.point, log)


def _is_increment(storage: StorageLocation) -> bool:
    """Whether a backup is incremental; False if it cannot be read, which the restore reports."""
    from tikv_br.backupset.backup_set import BackupSet
    from tikv_br.storage.open import open_store

    try:
        return BackupSet.open(open_store(storage)).is_increment
    except (BackupSetError, StorageError):
        return False


def _restore(
    name: str, flags: RestoreFlags, storage: StorageLocation, point: PointFlags, log: LogSource | None
) -> None:
    with reporting(name, flags.report) as draft:
        if flags.mode == "put":
            _check_put(flags)
        span = flags.range.key_range()
        from tikv_br.restore.inspect import FileCheck
        from tikv_br.restore.options import Mode, Restamp, RestoreOptions, Via
        from tikv_br.tasks.executor import ExecutorOptions

        draft.place, draft.cluster = storage, ",".join(flags.cluster.pd)
        options = flags.fill(
            RestoreOptions,
            cluster=flags.cluster.config(),
            storage=storage,
            span=span,
            rewrite_prefix=_parse_rewrite(flags.rewrite_prefix, flags.range.form),
            mode=Mode(flags.mode),
            via=Via(flags.via),
            restamp=Restamp(flags.restamp),
            file_check=FileCheck(flags.file_check),
            state=flags.storage_flags.locate(flags.state) if flags.state else None,
            command=name,
            executor=ExecutorOptions(
                flags.spark.executor, flags.spark.spark_master, flags.concurrency, flags.spark.spark_settings()
            ),
        )
        with progress_display(flags.out) as display:
            listener = draft.listen(display)
            flags.range.notice(listener)
            prefixes = [("--rewrite-prefix", each) for each in flags.rewrite_prefix.split("=")]
            key_flags.notice_ambiguous(listener, flags.range.key_format, prefixes)
            summary, point_figures = _run(
                options, point.options(options, log, flags.storage_flags), flags.out, listener
            )
        if summary is None:
            return
        draft.done(asdict(summary), [*point_figures, *_figures(summary, age=False)])
        draft.keys = summary.total_kvs if summary.verified else 0
    _render(flags.out, summary)


def _render(out: Output, summary: RestoreSummary) -> None:
    title = "Raw restore plan (dry run)" if summary.dry_run else "Raw restore success summary"
    out.result("summary", asdict(summary), listed(title, _figures(summary)))


def _run(
    options: RestoreOptions, point: PointOptions | None, out: Output, reporter: Reporter
) -> tuple[RestoreSummary | None, list[tuple[str, str]]]:
    """Restore; no summary of a dry run that has only planned a merge. Also what a report says of the point in time."""
    show_plan = partial(_render_plan, out)
    if point is None:
        from tikv_br.restore.run import restore

        return restore(options, reporter, show_plan), []
    from tikv_br.point_in_time import restore_to_point

    done = restore_to_point(point, reporter, show_plan)
    _render_point(out, done)
    return done.restored, _point_figures(done, age=False)


def _point_figures(done: PointSummary, *, age: bool) -> list[tuple[str, str]]:
    return [("restore-ts", show_ts(done.ts, age=age)), ("uncertainty", done.uncertainty)]


def _render_point(out: Output, done: PointSummary) -> None:
    """Show what was merged, and the time window; for a dry run, the whole plan."""
    first, last = done.window
    fields: dict[str, object] = {
        "restore_ts": done.ts,
        "uncertainty": done.uncertainty,
        "window_start": first,
        "window_end": last,
    }
    fields |= {"sources": list(done.sources), "merge": None if done.merged is None else asdict(done.merged.summary)}
    lines = [
        *_point_figures(done, age=True),
        ("window", f"{show_ts(first)} to {show_ts(last)}"),
        *(("reads", each) for each in done.sources),
    ]
    out.result("point", fields, listed("Point in time", lines), decoration=done.restored is not None)


def _check_put(flags: RestoreFlags) -> None:
    if flags.rate_limit:
        raise UsageError("--ratelimit cannot be combined with --mode put: it limits the downloads of stores")
    if flags.import_mode:
        raise UsageError("--import-mode cannot be combined with --mode put", hint="Omit one of them.")
    if flags.allow_followers:
        raise UsageError(
            "--allow-followers cannot be combined with --mode put: every follower gets rows that are put",
            hint="Omit --allow-followers.",
        )
    if flags.restamp != "auto":
        raise UsageError(
            "--restamp cannot be combined with --mode put: it always writes new timestamps", hint="Omit one of them."
        )


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


def _render_plan(out: Output, plan: RestorePlan) -> None:
    """The plan in full for machines, its beginning for people."""
    files = [
        {"name": part.file.name, **_span(part), "total_kvs": part.file.total_kvs, "size": part.file.size}
        for part in plan.parts
    ]
    out.result(
        "plan",
        {
            "ranges": [_span(each) for each in plan.wanted],
            "files": files,
            "resumed_files": plan.resumed,
            "splits": [key.hex() for key in plan.splits],
            "regions": plan.regions,
            "total_kvs": plan.total_kvs,
            "total_bytes": plan.total_bytes,
            "size": plan.size,
        },
    )
    rows = [
        (part.file.name, part.target.start.hex() or "-", part.target.end.hex() or "-", human_bytes(part.file.size))
        for part in plan.parts[:PLAN_ROWS]
    ]
    regions, splits = counted(plan.regions, "region"), counted(len(plan.splits), "split")
    title = f"{counted(len(plan.parts), 'file')} into {regions}, after {splits}"
    out.table(("file", "from", "to", "stored"), rows, title=title)


def _span(each: FilePart | RestoreRange) -> dict[str, str]:
    return {
        "start": each.span.start.hex(),
        "end": each.span.end.hex(),
        "target_start": each.target.start.hex(),
        "target_end": each.target.end.hex(),
    }


def _figures(summary: RestoreSummary, *, age: bool = True) -> list[tuple[str, str]]:
    """Return the figures of the summary, with the Go tool's names if it has them."""
    resumed = f" ({summary.resumed_files:,} by an earlier run)" if summary.resumed_files else ""
    saved = (f"{name} {human_seconds(seconds)}" for name, seconds in summary.overlap_seconds.items())
    others = f"{summary.other_kvs:,} other rows in the range were left alone" if summary.other_kvs else ""
    return [
        ("total-take", human_seconds(summary.seconds)),
        ("total-kv", f"{summary.total_kvs:,}"),
        ("total-kv-size", human_bytes(summary.total_bytes)),
        ("average-speed", f"{human_bytes(summary.average_speed)}/s"),
        ("restore-data-size", human_bytes(summary.backup_size)),
        ("files", f"{summary.files:,}{resumed}"),
        ("api-version", summary.dst_api_version),
        ("checksum", f"{summary.crc64xor:016x} {'equal' if summary.verified else 'not compared'}"),
        ("other-rows", others),
        ("overlap", ", ".join(saved)),
        ("new-timestamp", show_ts(summary.restamp_ts, age=age) if summary.restamp_ts else ""),
        ("expired", f"{summary.expired_kvs:,} rows skipped" if summary.expired_kvs else ""),
    ]
