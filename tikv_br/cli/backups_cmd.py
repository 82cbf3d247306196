"""``tikv-br list``, and ``backup pin``, ``unpin``, ``abort`` and ``unlock``."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer

from tikv_br.cli import backup_flags, shared
from tikv_br.cli.command import REQUIRED, argument, command, flag, given
from tikv_br.cli.output import human_bytes
from tikv_br.cluster.timestamps import show_time
from tikv_br.errors import BackupUnsupported, CrypterMismatch, UsageError
from tikv_br.formats.keys.codec import KeyMode

if TYPE_CHECKING:
    from tikv_br.backupset.index import ListedBackup
    from tikv_br.backupset.index_entry import IndexEntry
    from tikv_br.backupset.rebuild import Problem

log = logging.getLogger(__name__)
COLUMNS = ("id", "finished", "api", "keyspaces", "kvs", "bytes", "size", "backup-ts", "engine", "pinned", "path")
DROP = ("engine", "bytes", "backup-ts", "api", "keyspaces", "kvs", "size")


class ListFlags(backup_flags.IndexFlags):
    url: str = argument("", "[URL]", "Parent URL of the backups, instead of --storage.")
    storage: str = backup_flags.storage(backup_flags.MANY_BACKUPS, default="")
    rebuild: bool = flag(
        False, "First rebuild the index (tikv-br-index/) from a listing of all objects below --storage."
    )


@command("list", example="s3://backups")
def list_backups(flags: ListFlags, context: typer.Context) -> None:
    """List the backups below a URL."""
    if flags.url and given(context, "storage"):
        raise UsageError("URL and --storage cannot be combined", hint="Pass one of them.")
    if not (flags.url or flags.storage):
        raise UsageError("there is no URL to list", hint="Pass `tikv-br list URL` or --storage URL.")
    flags = replace(flags, storage=flags.url or flags.storage)
    problems = _rebuild(flags) if flags.rebuild else ()
    own = flags.index.own_backup()
    if own is not None:
        log.warning("%s is a backup itself; pass the folder that contains it to list all", flags.index.root.location)
    listed = [own] if own is not None else flags.index.read()
    if not listed and not flags.rebuild:
        log.warning("the index at %s lists no backup; --rebuild looks for backups", flags.location)
    for each in listed:
        flags.out.result("backup", _listed_fields(flags, each, own=own is not None))
    flags.out.table(COLUMNS, [_listed_row(each) for each in listed], drop=DROP)
    if problems:
        message = "; ".join(f"{problem.path}: {problem.error.message}" for problem in problems)
        raise type(problems[0].error)(
            message, hint="The list may be out of date for these backups. Check them with `tikv-br verify`."
        )


def _listed_fields(flags: ListFlags, listed: ListedBackup, *, own: bool) -> dict[str, object]:
    entry = listed.entry
    return asdict(entry) | {
        "api_version": entry.api_version.label if entry.api_version is not None else None,
        "dst_api_version": entry.dst_api_version.label,
        "pinned": listed.pinned,
        "removing": listed.removing,
        "url": (flags.location if own else flags.location.child(entry.path)).redacted(),
    }


def _versions(entry: IndexEntry) -> str:
    """API versions of source and backup, one if they are equal; and the mode of keys, if it is not raw."""
    source, target = entry.api_version, entry.dst_api_version
    versions = target.label if source in {None, target} else f"{source.label}->{target.label}"
    return versions if entry.key_mode is KeyMode.RAW else f"{versions} {entry.key_mode.value}"


def _listed_row(listed: ListedBackup) -> tuple[str, ...]:
    entry = listed.entry
    return (
        entry.id,
        show_time(entry.finished_ms),
        _versions(entry),
        entry.shown_keyspaces,
        f"{entry.total_kvs:,}",
        human_bytes(entry.total_bytes),
        human_bytes(entry.backup_size),
        str(entry.backup_ts or "-"),
        entry.engine,
        "removing" if listed.removing else "yes" if listed.pinned else "",
        entry.path,
    )


def _rebuild(flags: ListFlags) -> list[Problem]:
    """Rebuild, print what changed, and return what could not be read, without backups of other kinds."""
    from tikv_br.backupset.rebuild import rebuild

    done = rebuild(flags.index)
    counts = {"found": done.found, "added": done.added, "dropped": done.dropped}
    problems = [{"path": problem.path, "message": problem.error.message} for problem in done.problems]
    text = "index rebuilt: " + ", ".join(f"{count:,} {what}" for what, count in counts.items())
    flags.out.result("rebuilt", {**counts, "problems": problems}, text)
    unsupported = [
        problem for problem in done.problems if isinstance(problem.error, BackupUnsupported | CrypterMismatch)
    ]
    for problem in unsupported:
        log.warning("skipped %s: %s", problem.path, problem.error.message)
    return [problem for problem in done.problems if problem not in unsupported]


class IdFlags(backup_flags.IndexFlags):
    backup_id: str = argument(
        REQUIRED,
        "ID",
        "ID of the backup as `tikv-br list` shows it, or a unique prefix of it.",
        autocompletion=backup_flags.complete_id,
    )


@command("backup pin", former="pin", example="--storage s3://backups 3fa2")
def pin(flags: IdFlags) -> None:
    """Protect a backup from prune."""
    entry = flags.index.find(flags.backup_id).entry
    flags.index.pin(entry)
    flags.out.result("pin", {"id": entry.id, "path": entry.path, "pinned": True}, f"{entry.id} is pinned")


@command("backup unpin", former="unpin", example="--storage s3://backups 3fa2")
def unpin(flags: IdFlags) -> None:
    """Allow prune to remove a pinned backup again."""
    entry = flags.index.find(flags.backup_id).entry
    flags.index.unpin(entry)
    flags.out.result("pin", {"id": entry.id, "path": entry.path, "pinned": False}, f"{entry.id} is no longer pinned")


class OptionalClusterFlags(shared.ClusterFlags):
    pd: list[str] = shared.pd("PD endpoints of the cluster, to remove the backup's service safe point too.", default=())


class AbortFlags(backup_flags.ChosenBackupFlags):
    cluster: OptionalClusterFlags
    lock_wait: float = shared.LOCK_WAIT()
    restores: bool = flag(
        False,
        "Discard unfinished restores of this backup instead: delete their checkpoints and, with --pd, end import mode and remove the "
        "download rate limit.",
    )


@command("backup abort", former="abort", example="s3://backups/monday")
def abort(flags: AbortFlags, context: typer.Context) -> None:
    """Remove an unfinished backup. Fails if the backup is complete."""
    from tikv_br.dataflow.run import abort_backup
    from tikv_br.restore.run import abort_restores

    cluster, location = flags.cluster.config() if flags.cluster.pd else None, flags.choose(context)
    if flags.restores:
        gone = abort_restores(location, cluster)
        put_back = "; import mode is off" if gone.put_back else ""
        text = f"deleted the checkpoints of {gone.forgotten_restores} unfinished restores{put_back}"
        flags.out.result("summary", asdict(gone), text)
        return
    done = abort_backup(location, cluster, flags.lock_wait)
    run = f" of run {done.unfinished_run}" if done.unfinished_run else ""
    released = "; its safe point is removed" if done.released else ""
    flags.out.result("summary", asdict(done), f"removed {done.removed_objects} objects{run}{released}")


class UnlockFlags(backup_flags.ChosenBackupFlags):
    force: bool = flag(False, "Also remove the lock of a live run. That run then fails.", command_line=True)


@command("backup unlock", former="unlock", example="s3://backups/monday")
def unlock(flags: UnlockFlags, context: typer.Context) -> None:
    """Remove the lock that a dead run left in a backup, and show its owner."""
    from tikv_br.backupset.lease import break_lease
    from tikv_br.storage.open import open_store

    ended = break_lease(open_store(flags.choose(context)), force=flags.force)
    fields = {
        "held": ended is not None,
        "work": ended.work if ended else "",
        "owner_host": ended.owner.host if ended else "",
        "owner_run": ended.run if ended else "",
        "owner_pid": ended.owner.pid if ended else 0,
        "expires_ms": ended.expires_ms if ended else 0,
    }
    text = f"Removed the lock: {ended}" if ended else "There is no lock"
    flags.out.result("summary", fields, text)
