"""Commands that remove complete backups: ``tikv-br backup delete`` and ``tikv-br prune``."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tikv_br.cli import backup_flags, kinds, shared
from tikv_br.cli.command import REQUIRED, argument, command, flag
from tikv_br.cli.output import Output, confirmation, human_bytes, picked
from tikv_br.cluster.timestamps import show_time
from tikv_br.errors import BackupDamaged, LeaseHeld, UsageError

if TYPE_CHECKING:
    from tikv_br.backupset.prune import PrunePlan, RetentionDecision
    from tikv_br.storage.url import StorageLocation

log = logging.getLogger(__name__)
BY_TAB = """IFS="$(printf '\\t')\""""
"""For `read`, as names of objects may contain blanks."""
COLUMNS = ("action", "id", "finished", "size", "path", "because")


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
    from tikv_br.backupset.prune import plan
    from tikv_br.backupset.retention import Policy

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
    flags.out.table(COLUMNS, rows, prose=("because",), drop=("path", "size"), decoration=is_carried_out)
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
