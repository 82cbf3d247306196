"""``tikv-br unlock``."""

from __future__ import annotations

from typing import Annotated

import typer

from tikv_br.cli.storage_session import StorageSession, path_command

app = typer.Typer(rich_markup_mode=None)


@app.command("unlock", no_args_is_help=True)
@path_command
def unlock(
    session: StorageSession,
    force: Annotated[
        bool, typer.Option("--force", help="End the lease of a living run too; that run then stops by itself.")
    ] = False,
) -> None:
    """End the lease of a run that is no more, and say whose it was."""
    from tikv_br.backupset.lease import break_lease
    from tikv_br.storage.open import open_store

    ended = break_lease(open_store(session.location), force=force)
    fields = {
        "held": ended is not None,
        "work": ended.work if ended else "",
        "owner_host": ended.owner.host if ended else "",
        "owner_run": ended.run if ended else "",
        "owner_pid": ended.owner.pid if ended else 0,
        "expires_ms": ended.expires_ms if ended else 0,
    }
    text = f"The lease is ended: {ended}" if ended else "Nobody holds a lease there"
    session.output.result("summary", fields, text)
