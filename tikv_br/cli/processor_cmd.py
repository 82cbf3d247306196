"""``tikv-br processor``: who follows which sub-span."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from formats.keys import PREFIX_SIZE
from tikv_br.cli.group_session import GroupSession, group_command, lag
from tikv_br.cli.keys import show
from tikv_br.cli.options import KeyForm
from tikv_br.cli.text import human_bytes, human_seconds

if TYPE_CHECKING:
    from incremental.group.model import GroupState, Progress, Task
    from tikv_br.cli.output import Output

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)
COLUMNS = ("changefeed", "sub-span", "capture", "checkpoint", "lag", "regions", "events/s", "sorter", "from", "error")


@app.callback()
def processor() -> None:
    """Show who follows which sub-span of the changefeeds."""


@app.command("list")
@group_command
def list_processors(session: GroupSession) -> None:
    """List the sub-spans of all changefeeds, and how they are doing."""
    show_processors(session.output, session.store.snapshot())


def show_processors(out: Output, state: GroupState, changefeed_id: str = "") -> None:
    """Write the sub-spans of one changefeed, or of all."""
    tasks = [state.tasks[each] for each in sorted(state.tasks) if changefeed_id in {"", each.changefeed}]
    rows = [_told(out, task, state.progress.get(task.id), state) for task in tasks]
    out.table(COLUMNS, rows)


def _told(out: Output, task: Task, progress: Progress | None, state: GroupState) -> tuple[str, ...]:
    """Write a sub-span as a JSON line; returns it as a row for people."""
    info = state.changefeeds.get(task.changefeed)
    began = info.start_ts if info is not None else 0
    checkpoint_ts = began if progress is None else progress.checkpoint_ts
    behind = lag(checkpoint_ts)
    out.result(
        "processor",
        {
            "changefeed": task.changefeed,
            "number": task.number,
            "capture": task.capture,
            "epoch": task.epoch,
            "stopping": task.stopping,
            "start": task.start.hex(),
            "end": task.end.hex(),
            "checkpoint_ts": checkpoint_ts,
            "resolved_ts": began if progress is None else progress.resolved_ts,
            "checkpoint_lag": behind,
            "events": progress.events if progress is not None else 0,
            "written": progress.written if progress is not None else 0,
            "events_per_second": progress.events_per_second if progress is not None else 0,
            "regions": progress.regions if progress is not None else 0,
            "sorter_bytes": progress.sorter_bytes if progress is not None else 0,
            "error": progress.error if progress is not None else "",
        },
    )
    return (
        task.changefeed,
        str(task.number),
        f"{task.capture or '-'}{' (stopping)' if task.stopping else ''}",
        str(checkpoint_ts),
        human_seconds(max(behind, 0)),
        str(progress.regions) if progress is not None else "-",
        str(progress.events_per_second) if progress is not None else "-",
        human_bytes(progress.sorter_bytes) if progress is not None else "-",
        show(task.start[PREFIX_SIZE:], KeyForm.RAW) or "start",
        progress.error if progress is not None else "",
    )
