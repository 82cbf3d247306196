"""``tikv-br abort``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tikv_br.cli.backup_options import LockWaitOption
from tikv_br.cli.options import CaOption, CertOption, KeyOption, OptionalPdOption
from tikv_br.cli.storage_session import StorageSession, path_command

app = typer.Typer(rich_markup_mode=None)


@app.command("abort", no_args_is_help=True)
@path_command
def abort(
    session: StorageSession,
    pd: OptionalPdOption = None,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    lock_wait: LockWaitOption = 0.0,
    restores: Annotated[
        bool,
        typer.Option("--restores", help="Forget unfinished restores of the backup there; with --pd end import mode."),
    ] = False,
) -> None:
    """Remove what an unfinished backup has left at a path; never a finished one."""
    from tikv_br.backup.abort import abort_backup
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.restore.abort import abort_restores

    cluster = ClusterConfig.from_flags(pd, ca=ca, cert=cert, key=key) if pd else None
    if restores:
        gone = abort_restores(session.location, cluster)
        put_back = "; import mode is ended" if gone.put_back else ""
        session.output.result(
            "summary", asdict(gone), f"{gone.forgotten_restores} unfinished restores forgotten{put_back}"
        )
        return
    done = abort_backup(session.location, cluster, lock_wait)
    run = f" of run {done.unfinished_run}" if done.unfinished_run else ""
    released = "; its safe point is released" if done.released else ""
    session.output.result("summary", asdict(done), f"{done.removed_objects} objects{run} removed{released}")
