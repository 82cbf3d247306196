"""``tikv-br unpin``."""

from __future__ import annotations

import typer

from tikv_br.cli.storage_session import IdArgument, StorageSession, storage_command

app = typer.Typer(rich_markup_mode=None)


@app.command("unpin", no_args_is_help=True)
@storage_command
def unpin(session: StorageSession, backup_id: IdArgument) -> None:
    """Let a pinned backup be pruned again."""
    index = session.index()
    entry = index.find(backup_id).entry
    index.unpin(entry)
    session.output.result("pin", {"id": entry.id, "path": entry.path, "pinned": False}, f"{entry.id} is not pinned")
