"""``tikv-br list``, and ``backup pin``, ``unpin``, ``abort`` and ``unlock``.

Commands that remove complete backups: ``tikv-br backup delete`` and ``tikv-br prune``.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from msgspec import structs

from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.command import REQUIRED, argument, command, flag, given
from tikv_br.cli.output import Output, confirmation, human_bytes, picked
from tikv_br.cluster.timestamps import show_time
from tikv_br.errors import BackupDamaged, BackupUnsupported, CrypterMismatch, LeaseHeld, UsageError
from tikv_br.formats.keys.codec import KeyMode

if TYPE_CHECKING:
    from tikv_br.backupset.index import IndexEntry, ListedBackup, Problem
    from tikv_br.backupset.prune import PrunePlan, RetentionDecision
    from tikv_br.storage.url import StorageLocation


log = logging.getLogger(__name__)
NO_BACKUP = "the index at %s lists no backup; `tikv-br list --rebuild` looks for backups"
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
    flags = flags.replaced(storage=flags.url or flags.storage)
    problems = _rebuild(flags) if flags.rebuild else ()
    own = flags.index.own_backup()
    if own is not None:
        log.warning("%s is a backup itself; pass the folder that contains it to list all", flags.index.root.location)
    listed = [own] if own is not None else flags.index.read()
    if not listed and not flags.rebuild:
        log.warning(NO_BACKUP, flags.location)
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
    return structs.asdict(entry) | {
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
    from tikv_br.backupset.index import rebuild

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
        flags.out.result("summary", structs.asdict(gone), text)
        return
    done = abort_backup(location, cluster, flags.lock_wait)
    run = f" of run {done.unfinished_run}" if done.unfinished_run else ""
    released = "; its safe point is removed" if done.released else ""
    flags.out.result("summary", structs.asdict(done), f"removed {done.removed_objects} objects{run}{released}")


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


BY_TAB = """IFS="$(printf '\\t')\""""
"""For `read`, as names of objects may contain blanks."""
PRUNE_COLUMNS = ("action", "id", "finished", "size", "path", "because")


class DeleteFlags(backup_flags.ChosenBackupFlags):
    chosen: str = argument(
        REQUIRED,
        "URL|ID",
        "Backup: its URL, or with --storage its id, or a unique prefix of it.",
        autocompletion=backup_flags.complete_id,
    )
    storage: str = backup_flags.storage(backup_flags.MANY_BACKUPS, default="")
    yes: bool = flag(False, "Delete without asking.", command_line=True)
    dry_run: bool = shared.DRY_RUN()


@command("backup delete", former="delete", example="--storage s3://backups 3fa2")
def delete_backup(flags: DeleteFlags, context: typer.Context) -> None:
    """Delete one complete backup. Fails if it is pinned, or the base of an incremental one.

    There is no undo but the storage's: versioning or soft delete of the bucket.
    """
    from tikv_br.backupset import prune

    ask = None if flags.dry_run else confirmation("delete", yes=flags.yes)
    index, listed = flags.find(context)
    if not flags.yes or flags.dry_run:  # else `delete` does
        prune.check_deletable(index, listed)
    entry = listed.entry
    what = f"backup {entry.id} at {entry.path} ({human_bytes(entry.backup_size)}, {show_time(entry.finished_ms)})"
    if ask is not None:
        ask(f"Delete {what}?")
        prune.delete(index, listed)
    fields = {"id": entry.id, "path": entry.path, "removed_bytes": entry.backup_size, "dry_run": flags.dry_run}
    if not flags.dry_run:
        _show_undo(flags.out, index.root.location, [entry.path])
    flags.out.result("summary", fields, f"{what} {'would be deleted (dry run)' if flags.dry_run else 'is deleted'}")


class PruneFlags(backup_flags.IndexFlags):
    keep_last: int = flag(0, "Keep the newest N backups.", limits=(0, kinds.MAX_BACKUPS))
    keep_daily: int = flag(
        0, "Keep the newest backup of each of the last N days that have one.", limits=(0, kinds.MAX_BACKUPS)
    )
    keep_weekly: int = flag(
        0, "Keep the newest backup of each of the last N weeks that have one.", limits=(0, kinds.MAX_BACKUPS)
    )
    keep_monthly: int = flag(
        0, "Keep the newest backup of each of the last N months that have one.", limits=(0, kinds.MAX_BACKUPS)
    )
    include_foreign: bool = flag(False, "Also remove backups of the Go TiKV-BR (default: keep them).")
    yes: bool = flag(
        False,
        "Remove the listed backups. Without it, only list them; exit code 2 if there are any.",
        "--yes",
        "--confirm",
        command_line=True,
    )
    dry_run: bool = shared.DRY_RUN()
    hooks: shared.HookFlags


@command("prune", example="--storage s3://backups --keep-daily 7 --keep-weekly 4 --yes")
def prune(flags: PruneFlags) -> None:
    """Remove the backups that no --keep-* option keeps; at least one is required. Each cluster and range is pruned separately.

    There is no undo but the storage's: versioning or soft delete of the bucket.
    """
    from tikv_br.backupset.prune import Policy, plan

    policy = Policy(flags.keep_last, flags.keep_daily, flags.keep_weekly, flags.keep_monthly)
    wanted = plan(flags.index, policy, include_foreign=flags.include_foreign)
    _show_plan(flags, wanted)
    removed, freed = wanted.to_remove, sum(entry.backup_size for entry in wanted.to_remove)
    if not flags.dry_run:
        if not flags.yes and (removed or wanted.interrupted_removals):
            raise UsageError(
                "nothing was removed: --yes is missing", hint="Pass --yes to remove the listed backups, or --dry-run."
            )
        _execute_plan(flags, wanted)
        _show_undo(flags.out, flags.location, [entry.path for entry in removed])
    kept = len(wanted.decisions) - len(removed)
    fields = {
        "kept": kept,
        "removed": len(removed),
        "removed_bytes": freed,
        "finished_removals": len(wanted.interrupted),
        "dry_run": flags.dry_run,
    }
    verb = "would be removed (dry run)" if flags.dry_run else "removed"
    flags.out.result("summary", fields, f"{len(removed)} {verb}, {human_bytes(freed)}; {kept} kept")


def _show_undo(out: Output, root: StorageLocation, paths: Sequence[str]) -> None:
    """Print commands that bring removed backups back if the bucket has versioning: tikv-br itself has no undo."""
    if root.scheme != "s3" or not paths:
        return
    endpoint = f" --endpoint-url {shlex.quote(root.s3.endpoint)}" if root.s3.endpoint else ""
    bucket = f"{endpoint} --bucket {shlex.quote(root.bucket)}"
    for path in paths:
        prefix = shlex.quote(f"{root.child(path).path}/")
        listing = f"aws s3api list-object-versions{bucket} --prefix {prefix} --output text"
        command = (
            f"{listing} --query 'DeleteMarkers[?IsLatest].[Key,VersionId]' | while {BY_TAB} read -r key version; do "
            f'[ -z "$version" ] || aws s3api delete-object{bucket} --key "$key" --version-id "$version"; done'
        )
        out.result(
            "undo",
            {"path": path, "command": command},
            f"To undo, if the bucket has versioning: {command}",
            decoration=True,
        )
    rebuild = f"tikv-br list --storage {shlex.quote(str(root))} --rebuild"
    out.result("undo", {"path": "", "command": rebuild}, f"Then: {rebuild}", decoration=True)


def _show_plan(flags: PruneFlags, wanted: PrunePlan) -> None:
    for decision in wanted.decisions:
        flags.out.result("prune", _decision_fields(decision))
    rows = [_decision_row(decision) for decision in wanted.decisions]
    rows += [
        ("finish", removal.id, "-", "-", removal.path, "its removal was interrupted") for removal in wanted.interrupted
    ]
    is_carried_out = flags.yes and not flags.dry_run
    flags.out.table(PRUNE_COLUMNS, rows, prose=("because",), drop=("path", "size"), decoration=is_carried_out)
    if not (rows or wanted.refused or wanted.ghosts):
        log.warning(NO_BACKUP, flags.location)
    for entry, error in wanted.refused:
        log.warning("%s (%s) is kept, and counts as no backup: %s", entry.path, entry.id, error.message)
    for ghost in wanted.ghosts:
        log.warning("%s (%s) exists only in the index; `tikv-br list --rebuild` removes it", ghost.path, ghost.id)


def _decision_fields(decision: RetentionDecision) -> dict[str, object]:
    entry = decision.listed.entry
    return {
        "action": "keep" if decision.keep else "remove",
        **picked(entry, "id", "path", "finished_ms", "backup_size"),
        "reasons": decision.reasons,
    }


def _decision_row(decision: RetentionDecision) -> tuple[str, ...]:
    entry = decision.listed.entry
    return (
        "keep" if decision.keep else "remove",
        entry.id,
        show_time(entry.finished_ms),
        human_bytes(entry.backup_size),
        entry.path,
        ", ".join(decision.reasons),
    )


def _execute_plan(flags: PruneFlags, wanted: PrunePlan) -> None:
    from tikv_br.backupset.prune import execute

    def report(backup_id: str, path: str) -> None:
        flags.out.result("removed", {"id": backup_id, "path": path})

    failed = execute(flags.index, wanted, report)
    if failed:
        message = "; ".join(f"{entry.path}: {error.message}" for entry, error in failed)
        if all(isinstance(error, LeaseHeld) for _entry, error in failed):
            raise LeaseHeld(
                f"not removed: {message}",
                hint="All others were removed. Run prune again when those commands have ended.",
            )
        raise BackupDamaged(
            f"not removed: {message}",
            hint="All others were removed. Inspect these backups, and remove them by hand if needed.",
        )
