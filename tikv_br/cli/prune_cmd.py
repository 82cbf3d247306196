"""``tikv-br prune``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.options import DryRunOption
from tikv_br.cli.storage_session import StorageSession, storage_command, utc
from tikv_br.cli.text import human_bytes
from tikv_br.errors import BackupDamaged, LeaseHeld, UsageError

if TYPE_CHECKING:
    from tikv_br.backupset.index import Index
    from tikv_br.backupset.prune import PrunePlan, Verdict

log = logging.getLogger(__name__)
app = typer.Typer(rich_markup_mode=None)
COLUMNS = ("action", "id", "finished (UTC)", "size", "path", "because")


@app.command("prune", no_args_is_help=True)
@storage_command
def prune(
    session: StorageSession,
    keep_last: Annotated[int, typer.Option("--keep-last", min=0, metavar="N", help="The newest N.")] = 0,
    keep_daily: Annotated[int, typer.Option("--keep-daily", min=0, metavar="N", help="The newest of N days.")] = 0,
    keep_weekly: Annotated[int, typer.Option("--keep-weekly", min=0, metavar="N", help="The newest of N weeks.")] = 0,
    keep_monthly: Annotated[
        int, typer.Option("--keep-monthly", min=0, metavar="N", help="The newest of N months.")
    ] = 0,
    include_foreign: Annotated[
        bool, typer.Option("--include-foreign", help="Backups of the Go TiKV-BR too; else they stay.")
    ] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Needed to remove anything.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Remove the backups that no rule keeps, for each cluster and range by itself."""
    from tikv_br.backupset.prune import plan
    from tikv_br.backupset.retention import Policy

    policy = Policy(keep_last, keep_daily, keep_weekly, keep_monthly)
    index = session.index()
    wanted = plan(index, policy, include_foreign=include_foreign)
    _show(session, wanted)
    if not dry_run:
        if not confirm and (wanted.to_remove or wanted.begun):
            raise UsageError("nothing was removed", hint="Say --confirm to remove what is listed, or --dry-run.")
        _carry_out(session, index, wanted)
    removed = wanted.to_remove
    figures = {
        "kept": len(wanted.verdicts) - len(removed),
        "removed": len(removed),
        "removed_bytes": sum(entry.backup_size for entry in removed),
        "finished_removals": len(wanted.interrupted),
        "dry_run": dry_run,
    }
    verb = "would be removed (dry run)" if dry_run else "removed"
    freed = human_bytes(sum(entry.backup_size for entry in removed))
    session.output.result("summary", figures, f"{len(removed)} {verb}, {freed}; {figures['kept']} kept")


def _show(session: StorageSession, wanted: PrunePlan) -> None:
    for verdict in wanted.verdicts:
        session.output.result("prune", _fields(verdict))
    rows = [_row(verdict) for verdict in wanted.verdicts]
    rows += [("finish", removal.id, "-", "-", removal.path, "its removal has begun") for removal in wanted.interrupted]
    session.output.table(COLUMNS, rows)
    for ghost in wanted.ghosts:
        log.warning("%s (%s) is in the index only; `tikv-br list --rebuild` drops it", ghost.path, ghost.id)


def _fields(verdict: Verdict) -> dict[str, object]:
    entry = verdict.listed.entry
    return {
        "action": "keep" if verdict.keep else "remove",
        "id": entry.id,
        "path": entry.path,
        "finished_ms": entry.finished_ms,
        "backup_size": entry.backup_size,
        "reasons": verdict.reasons,
    }


def _row(verdict: Verdict) -> tuple[str, ...]:
    entry = verdict.listed.entry
    action = "keep" if verdict.keep else "remove"
    return (
        action,
        entry.id,
        utc(entry.finished_ms),
        human_bytes(entry.backup_size),
        entry.path,
        ", ".join(verdict.reasons),
    )


def _carry_out(session: StorageSession, index: Index, wanted: PrunePlan) -> None:
    from tikv_br.backupset.prune import carry_out

    def tell(backup_id: str, path: str) -> None:
        session.output.result("removed", {"id": backup_id, "path": path})

    failed = carry_out(index, wanted, tell)
    if failed:
        said = "; ".join(f"{entry.path}: {error.message}" for entry, error in failed)
        if all(isinstance(error, LeaseHeld) for _entry, error in failed):
            raise LeaseHeld(
                f"not removed: {said}", hint="All others were. Run it again when those commands have ended."
            )
        raise BackupDamaged(f"not removed: {said}", hint="All others were. What is left of these is for you to decide.")
