"""``tikv-br capture list``."""

from __future__ import annotations

from tikv_br.cli.group_session import GroupSession, group_command
from tikv_br.cli.storage_session import utc

COLUMNS = ("id", "owner", "sub-spans", "started (UTC)", "version", "status page")


@group_command
def list_captures(session: GroupSession) -> None:
    """List the captures of a cluster's group."""
    state = session.store.snapshot()
    rows = []
    for info in state.captures.values():
        owner, tasks = info.id == state.owner, sum(task.capture == info.id for task in state.tasks.values())
        session.output.result(
            "capture",
            {
                "id": info.id,
                "owner": owner,
                "spans": tasks,
                "address": info.address,
                "started_ms": info.started_ms,
                "tool_version": info.version,
            },
        )
        rows.append((info.id, "yes" if owner else "", str(tasks), utc(info.started_ms), info.version, info.address))
    session.output.table(COLUMNS, rows)
