"""``tikv-br pin``; `unpin` is its twin."""

from __future__ import annotations

import typer

from tikv_br.cli.storage_session import IdArgument, StorageSession, storage_command

app = typer.Typer(rich_markup_mode=None)


@app.command("pin", no_args_is_help=True)
@storage_command
def pin(session: StorageSession, backup_id: IdArgument) -> None:
    """Keep a backup from being pruned."""
    index = session.index()
    entry = index.find(backup_id).entry
    index.pin(entry)
    session.output.result("pin", {"id": entry.id, "path": entry.path, "pinned": True}, f"{entry.id} is pinned")
