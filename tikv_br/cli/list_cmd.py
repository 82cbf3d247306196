"""``tikv-br list``."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.storage_session import StorageSession, storage_command, utc
from tikv_br.cli.text import human_bytes
from tikv_br.errors import BackupUnsupported, CrypterMismatch

if TYPE_CHECKING:
    from tikv_br.backupset.index import Index, Listed
    from tikv_br.backupset.index_entry import IndexEntry
    from tikv_br.backupset.rebuild import Problem

log = logging.getLogger(__name__)
app = typer.Typer(rich_markup_mode=None)
COLUMNS = ("id", "finished (UTC)", "api", "kvs", "bytes", "size", "backup-ts", "engine", "pinned", "path")


@app.command("list", no_args_is_help=True)
@storage_command
def list_backups(
    session: StorageSession,
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="List everything below the folder once, and make the index anew from it."),
    ] = False,
) -> None:
    """List the backups in a folder, from its index."""
    index = session.index()
    problems = _rebuild(session, index) if rebuild else ()
    listed = index.read()
    for each in listed:
        session.output.result("backup", fields(index, each))
    session.output.table(COLUMNS, [_row(each) for each in listed])
    if problems:
        said = "; ".join(f"{problem.path}: {problem.error.message}" for problem in problems)
        raise type(problems[0].error)(
            said, hint="What the list says of these, if anything, is older. See `tikv-br verify`."
        )


def fields(index: Index, listed: Listed) -> dict[str, object]:
    """A backup as a JSON line tells it."""
    entry = listed.entry
    return asdict(entry) | {
        "api_version": entry.api_version.label if entry.api_version is not None else None,
        "dst_api_version": entry.dst_api_version.label,
        "pinned": listed.pinned,
        "removing": listed.removing,
        "url": index.root.location.child(entry.path).redacted(),
    }


def versions(entry: IndexEntry) -> str:
    """Source and destination, or what both are."""
    source, target = entry.api_version, entry.dst_api_version
    return target.label if source in {None, target} else f"{source.label}->{target.label}"


def _row(listed: Listed) -> tuple[str, ...]:
    entry = listed.entry
    return (
        entry.id,
        utc(entry.finished_ms),
        versions(entry),
        f"{entry.total_kvs:,}",
        human_bytes(entry.total_bytes),
        human_bytes(entry.backup_size),
        str(entry.backup_ts or "-"),
        entry.engine,
        "removing" if listed.removing else "yes" if listed.pinned else "",
        entry.path,
    )


def _rebuild(session: StorageSession, index: Index) -> list[Problem]:
    """Rebuild, say what changed, and return what could not be read. Backups of other kinds are only mentioned."""
    from tikv_br.backupset.rebuild import rebuild

    done = rebuild(index)
    counts = {"found": done.found, "added": done.added, "dropped": done.dropped}
    problems = [{"path": problem.path, "message": problem.error.message} for problem in done.problems]
    text = "index rebuilt: " + ", ".join(f"{count:,} {what}" for what, count in counts.items())
    session.output.result("rebuilt", {**counts, "problems": problems}, text)
    unsupported = [
        problem for problem in done.problems if isinstance(problem.error, BackupUnsupported | CrypterMismatch)
    ]
    for problem in unsupported:
        log.warning("%s is left out: %s", problem.path, problem.error.message)
    return [problem for problem in done.problems if problem not in unsupported]
