"""``tikv-br log``: the log archive, from which a cluster can be restored to any time.

Output about a log archive: its status, its segments, and the changes of a key.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

from tikv_br.backupset.coverage import shown_keyspaces
from tikv_br.cli import backup_flags, key_flags, kinds, shared
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.key_flags import parse_ts_or_latest
from tikv_br.cli.output import KeyForm, Output, confirmation, human_bytes, human_seconds, label, quote, read_key
from tikv_br.cli.progress import progress_display
from tikv_br.cli.sync_cmd import FollowFlags, follow_feed
from tikv_br.cli.sync_flags import LOG_ID, StateFlags
from tikv_br.cluster.timestamps import MAX_TS, parse_ts, physical_ms, show_time, show_ts
from tikv_br.errors import KeyNotFound, LogDamaged, SyncRunning, UsageError

if TYPE_CHECKING:
    from tikv_br.archive.compact import CompactionSummary
    from tikv_br.archive.log import KeyChange, LogArchive
    from tikv_br.archive.maintenance import LogStatus
    from tikv_br.archive.records import LogState, Segment
    from tikv_br.storage.base import ObjectStore


_LEVELS = {
    "meta": "meta (records and sizes; --level files or data reads the files)",
    "files": "files (checksums of all files)",
    "data": "data (all rows)",
}


_STATES = {
    "paused": "paused (`log start` exits at once, until `log resume`)",
    "stopped": "stopped (ended for good: `log start` does not continue it, restores from it still work)",
}


def show_status(out: Output, found: LogStatus, level: str) -> None:
    """Write the status as of a `level` of checks."""
    fields = asdict(found)
    out.result("log_status", fields)
    for name in ("keyspace_name", "keyspace_names", "keyspaces"):
        del fields[name]
    shown = fields | {
        "state": _STATES.get(found.state, found.state),
        "keyspace_id": shown_keyspaces(found.keyspaces, found.keyspace_names),
        "start_ts": show_ts(found.start_ts),
        "checkpoint_ts": show_ts(found.checkpoint_ts) if found.checkpoint_ts else "saved elsewhere",
        "end_ts": show_ts(found.end_ts),
        "restorable_ts": show_ts(found.restorable_ts),
        "scan_window_seconds": human_seconds(found.scan_window_seconds),
        "rpo_seconds": human_seconds(found.rpo_seconds),
        "size": human_bytes(found.size),
        "size_per_day": human_bytes(found.size_per_day),
        "level": _LEVELS[level],
    }
    out.pairs(
        [
            (label(name), ", ".join(value) or "-" if isinstance(value, tuple) else str(value))
            for name, value in shown.items()
        ]
    )


def show_segments(out: Output, segments: Sequence[Segment]) -> None:
    """Write a row for each segment."""
    rows = []
    for segment in segments:
        size = sum(file.size for file in segment.files)
        fields = {
            "name": segment.name,
            "range": str(segment.span),
            "from_ts": segment.from_ts,
            "to_ts": segment.to_ts,
            "files": len(segment.files),
            "rows": sum(file.total_kvs for file in segment.files),
            "size": size,
            "scan_windows": [[period.from_ts, period.to_ts] for period in segment.inexact],
        }
        out.result("log_segment", fields)
        scans = ", ".join(f"{show_ts(period.from_ts)} to {show_ts(period.to_ts)}" for period in segment.inexact)
        counts = (str(fields[name]) for name in ("range", "files", "rows"))
        rows.append((show_ts(segment.from_ts), show_ts(segment.to_ts), *counts, human_bytes(size), scans or "-"))
    out.table(("from", "to", "range", "files", "rows", "size", "not restorable"), rows, drop=("files", "size"))


def show_changes(out: Output, key: bytes, found: Sequence[KeyChange], value_form: KeyForm) -> None:
    """Write a row for each change of a key."""
    rows = []
    for each in found:
        change = "delete" if each.deleted else "put"
        fields = {"key": key.hex(), "ts": each.ts, "op": change, "value": each.value.hex()}
        out.result("log_change", fields | {"expire_ts": each.expire_ts})
        expires = show_time(each.expire_ts * 1000) if each.expire_ts else "-"
        rows.append((show_ts(each.ts), change, "-" if each.deleted else quote(each.value, value_form), expires))
    out.table(("time", "change", "value", "expires"), rows, drop=("expires",))


logger = logging.getLogger(__name__)
UPLOAD_RATE = partial(
    flag,
    "0",
    "Maximum upload rate in bytes per second, as 10MiB; a plain number is MiB (0 = unlimited).",
    "--ratelimit",
    kind=kinds.RATE,
)
LOG_NAME = "Name of the log archive."
PLACE = f"Directory or prefix that contains the log: {backup_flags.URLS}"


class LogStateFlags(StateFlags):
    name: str = flag(LOG_ID, LOG_NAME, "--log-id", "--id", metavar="NAME")


class LogStartFlags(FollowFlags):
    cluster: shared.ClusterFlags
    keyspaces: list[str] | None = flag(
        None,
        "Keyspace to archive, by id or name (API V2; may be repeated; default: only keyspace 0).",
        "--keyspace",
        shared=True,
        metavar="ID|NAME",
    )
    storage: str = backup_flags.storage(PLACE)
    flush_interval: float = flag(
        "30s", "Interval between writes to the storage. This plus --hold-back is about the RPO.", kind=kinds.TIME
    )
    flush_size: int = flag("64MiB", "Write earlier once this many bytes of changes are buffered.", kind=kinds.SIZE)
    rate_limit: int = UPLOAD_RATE()
    sink_patience: float = flag(
        "10m", "How long to retry writes to the log's storage before the command fails.", kind=kinds.TIME
    )
    state: LogStateFlags


@command("log start", example="--pd 10.0.0.1:2379 --storage s3://backups/log --from-backup s3://backups/monday")
def start_log(flags: LogStartFlags) -> None:
    """Start or continue a log archive (API V2). Runs in the foreground until stopped."""
    flags.range.key_range()  # here and below: refuse wrong flags before heavy imports
    flags.status.check()
    if not flags.flush_interval or not flags.flush_size:
        raise UsageError("--flush-interval and --flush-size must be greater than 0")
    from tikv_br.incremental.sinks.url import LogTarget

    place = flags.storage_flags.locate(flags.storage)
    target = LogTarget(place, flags.state.name, flags.flush_interval, flags.flush_size, flags.rate_limit)
    follow_feed(flags.out, flags.options(target, flags.sink_patience, *(flags.keyspaces or ())), flags.status)


class LogFlags(backup_flags.BackupFlags):
    storage: str = backup_flags.storage(PLACE)
    name: str | None = flag(None, LOG_NAME, "--log-id", "--id", metavar="NAME", show_default=LOG_ID)

    @cached_property
    def store(self) -> ObjectStore:
        """The storage that has the log. Raises `UsageError`."""
        from tikv_br.storage.open import open_store

        return open_store(self.location)

    @cached_property
    def log_id(self) -> str:
        """Return the log's id. Raises as `choose_log`."""
        from tikv_br.archive.maintenance import choose_log

        return choose_log(self.location, self.name).id

    def open(self) -> LogArchive:
        """Open the log. Raises as `LogArchive.open`."""
        from tikv_br.archive.log import LogArchive

        return LogArchive.open(self.store, self.log_id)


class LogStatusFlags(LogFlags):
    level: Literal["meta", "files", "data"] = flag(
        "meta", "meta: records and sizes of the files. files: also file checksums. data: also every row."
    )


class LogEndFlags(LogFlags):
    cluster: shared.ClusterFlags
    yes: bool = flag(False, "End it without asking.", "--yes", "-y", command_line=True)


class LogCompactFlags(LogFlags):
    until: str = flag(
        "latest",
        "Only rewrite segments that end at or before this: latest, a PD timestamp, a time or an age.",
        metavar="TS|TIME|latest",
    )
    grace: float = flag(
        "24h", "How long replaced segments are kept for restores that already use them.", kind=kinds.TIME
    )
    rate_limit: int = UPLOAD_RATE()
    tasks: shared.TaskFlags
    lock_wait: float = shared.LOCK_WAIT()
    dry_run: bool = shared.DRY_RUN()
    hooks: shared.HookFlags


class LogTruncateFlags(LogFlags):
    until: str = flag(
        REQUIRED,
        "Remove changes up to and including this PD timestamp, time or age (before the log's end). The backup to restore from must be newer.",
        metavar="TS|TIME",
    )
    lock_wait: float = shared.LOCK_WAIT()
    yes: bool = flag(
        False,
        "Remove them. Without it, only show what would be removed; exit code 2.",
        "--yes",
        "-y",
        command_line=True,
    )


@command("log status", example="--storage s3://backups/log")
def status(flags: LogStatusFlags) -> None:
    """Show the restorable times, lag, size, gaps and damage of a log archive. Exit code 39 if changes are missing or damage is found at --level."""
    from tikv_br.archive.maintenance import status_of

    found = status_of(flags.open(), level=flags.level)
    show_status(flags.out, found, flags.level)
    flags.out.flush()
    if problems := [*found.damage, *(f"no changes of {gap}" for gap in found.gaps)]:
        newest = f"the newest time that can be restored is {show_ts(found.restorable_ts)}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise LogDamaged(f"the log {found.log_id} is damaged: {problems[0]}{more}; {newest}")


@command("log metadata", example="--storage s3://backups/log --output json")
def metadata(flags: LogFlags) -> None:
    """List the segments of a log archive."""
    show_segments(flags.out, flags.open().segments)


class LogChangesFlags(LogFlags, key_flags.KeyAndValueFormatFlags):
    key: str = argument(REQUIRED, "KEY", "User key, as --key-format says: text with \\xNN escapes, or hex:…")
    since: str = flag("", "Only changes after this PD timestamp, time or age.", metavar="TS|TIME")
    until: str = flag(
        "latest", "Only changes up to this: latest, a PD timestamp, a time or an age.", metavar="TS|TIME|latest"
    )
    keyspace: str = flag("", "Keyspace of the key, by id or name, in a log of several.", shared=True, metavar="ID|NAME")


@command("log changes", example="user:7 --storage s3://backups/log --since -2h")
def changes(flags: LogChangesFlags) -> None:
    """Show when a key was changed, from a log archive. Exit code 13 if it was not.

    A write may have been made up to 3 s after its time: stores give out timestamps up to 3 s old.
    """
    from tikv_br.archive.log import changes_of

    key = read_key(flags.key, flags.form, "KEY")
    first = parse_ts(flags.since, "--since") if flags.since else 0
    archive = flags.open()
    last = parse_ts_or_latest(flags.until, "--until") or MAX_TS
    found = changes_of(archive, key, first, last, flags.keyspace)
    for gap in archive.gaps():
        logger.warning("the log lacks the changes of %s", gap)
    for begin, end in archive.inexact_windows():
        logger.warning("the log may lack older versions from %s to %s", show_ts(begin), show_ts(end))
    if not found:
        raise KeyNotFound(
            f"the log has no change of the key {quote(key, flags.form)}", hint="Check the key, --since and --until."
        )
    show_changes(flags.out, key, found, flags.value_form)


def _set_state(flags: LogFlags, state: LogState, text: str) -> None:
    """Pause, resume or stop the log, and report it. Raises as `maintenance.set_state`."""
    from tikv_br.archive.maintenance import set_state

    set_state(flags.store, flags.log_id, state)
    flags.out.result("log_state", {"log_id": flags.log_id, "state": state}, text)


@command("log pause", example="--storage s3://backups/log")
def pause(flags: LogFlags) -> None:
    """Make the running `log start` exit with code 0 at its next flush. Its service safe point expires after its --gc-ttl."""
    from tikv_br.archive.records import LogState

    _set_state(flags, LogState.PAUSED, f"The log {flags.log_id} is paused; its writer exits at its next flush.")


@command("log resume", example="--storage s3://backups/log")
def resume(flags: LogFlags) -> None:
    """Clear the pause of a log archive. Then run `log start` again."""
    from tikv_br.archive.records import LogState

    _set_state(flags, LogState.ACTIVE, f"The log {flags.log_id} is active: run `tikv-br log start` to continue it.")


@command("log end", former="log stop", example="--pd 10.0.0.1:2379 --storage s3://backups/log")
def end_log(flags: LogEndFlags) -> None:
    """End a log archive for good, and remove its service safe point. Refused while `log start` runs. Restores from it still work."""
    archive = flags.open()
    import threading

    from tikv_br.archive.records import LogState
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.cluster.safepoint import release
    from tikv_br.incremental.handover import check_runs_alone, service_id

    with Cluster.connect(flags.cluster.config()) as source:
        if source.cluster_id != archive.description.cluster_id:
            raise UsageError(
                f"the log {flags.log_id} is of cluster {archive.description.cluster_id}, not {source.cluster_id}",
                hint="Pass --pd of the cluster that the log is of.",
            )
        confirmation("log end", yes=flags.yes)(
            f"End the log {flags.log_id} at {flags.location.redacted()} for good? It cannot be continued: point-in-time "
            "recovery then needs another log and a full backup."
        )
        try:
            check_runs_alone(source, flags.log_id, "", threading.Event())
        except SyncRunning as error:
            hint = (
                "Stop `tikv-br log start` first: with Ctrl-C, SIGTERM or its service manager (`systemctl stop`), or, if it is out of reach, "
                "with `tikv-br log pause`, after which `log end` ends it."
            )
            raise SyncRunning(f"the log {flags.log_id} is being written: {error.message}", hint=hint) from None
        _set_state(flags, LogState.STOPPED, f"The log {flags.log_id} has ended. Restores from it still work.")
        release(source.pd, service_id(flags.log_id))


@command("log compact", example="--storage s3://backups/log --until 2026-05-02T00:00:00Z")
def compact_log(flags: LogCompactFlags) -> None:
    """Rewrite many small segments as few large ones, partitioned by key. The log archive keeps every change."""
    from tikv_br.archive.compact import CompactionOptions, compact

    options = flags.fill(
        CompactionOptions,
        storage=flags.location,
        log_id=flags.log_id,
        until_ts=parse_ts_or_latest(flags.until, "--until"),
    )
    with progress_display(flags.out) as display:
        done = compact(options, display)
    flags.out.result("log_compaction", asdict(done), _compaction_text(done))


def _compaction_text(done: CompactionSummary) -> str:
    old = f"{done.segments} segments with {done.files} files, {human_bytes(done.size)}"
    if done.dry_run:
        return f"Would rewrite {old}."
    new = f"{done.new_segments} segments with {done.new_files} files, {human_bytes(done.new_size)}"
    gone = f"{done.removed_segments} segments and {done.removed_files} files, {human_bytes(done.removed_bytes)}"
    return f"Rewrote {old}, as {new}. Removed {gone}, replaced by this or an earlier compaction."


@command("log truncate", example="--storage s3://backups/log --until 2026-04-02T00:00:00Z --yes")
def truncate_log(flags: LogTruncateFlags) -> None:
    """Remove the old part of a log archive. Restorable times then start at --until."""
    from tikv_br.archive.maintenance import acquire_lock, plan_truncation, truncate

    archive = flags.open()
    until = parse_ts(flags.until, "--until", lambda: physical_ms(archive.end_ts()) / 1000)
    plan = plan_truncation(archive, until)
    if flags.yes:
        with acquire_lock(flags.store, flags.log_id, "log truncate", flags.lock_wait):
            archive = flags.open()  # a compaction may have changed it
            plan = plan_truncation(archive, until)
            truncate(archive, plan)
    fields = {
        "log_id": flags.log_id,
        "restorable_from": plan.restorable_from,
        "segments": len(plan.segments),
        "files": len(plan.files),
        "size": plan.size,
        "removed": flags.yes,
    }
    done = f"{len(plan.segments)} segments and {len(plan.files)} files, {human_bytes(plan.size)}"
    flags.out.result("log_truncation", fields, f"{'Removed' if flags.yes else 'Would remove'} {done}.")
    if not flags.yes and (plan.segments or plan.files):
        raise UsageError("nothing was removed: --yes is missing", hint="Pass --yes to remove them.")
