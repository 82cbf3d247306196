"""``tikv-br changefeed capture``, ``captures`` and ``processors``: the processes that run changefeeds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tikv_br import signals
from tikv_br.cli import kinds, shared
from tikv_br.cli.command import command, flag
from tikv_br.cli.output import KeyForm, Output, human_bytes, picked, show
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cli.sync_flags import SCRATCH_DIR, SinkTlsFlags, scratch_folder
from tikv_br.cli.sync_view import watching
from tikv_br.cluster.timestamps import physical_ms, show_time
from tikv_br.errors import UsageError
from tikv_br.formats.keys.codec import PREFIX_SIZE

if TYPE_CHECKING:
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.incremental.group.changefeeds import Changefeeds
    from tikv_br.incremental.group.model import ChangefeedTask, GroupState, Progress
    from tikv_br.incremental.group.store import GroupStore

CAPTURE_COLUMNS = ("id", "owner", "sub-spans", "started", "version", "status address")
SPAN_COLUMNS = ("changefeed", "sub-span", "capture", "checkpoint", "regions", "events/s", "sorter", "from", "error")
SHORTEST_LEASE = 2.0


class Group(NamedTuple):
    """The source cluster, and the state of its group in etcd."""

    cluster: Cluster
    store: GroupStore

    @property
    def changefeeds(self) -> Changefeeds:
        """Operations on changefeeds."""
        from tikv_br.incremental.group.changefeeds import Changefeeds

        return Changefeeds(self.store, self.cluster.pd)


class GroupFlags(shared.CommandFlags):
    cluster: shared.ClusterFlags
    etcd: shared.EtcdFlags

    @contextlib.contextmanager
    def group(self) -> Iterator[Group]:
        """Connect. Raises `UsageError`, `ClusterError`, `EtcdError`."""
        config = self.etcd.etcd_config(self.cluster)
        from tikv_br.cluster.cluster import Cluster
        from tikv_br.cluster.etcd import Etcd
        from tikv_br.incremental.group.store import GroupStore

        with Cluster.connect(self.cluster.config()) as cluster, Etcd.open(config) as etcd:
            yield Group(cluster, GroupStore(etcd, cluster.cluster_id))


def lag_of(ts: int, now: float) -> float:
    """Seconds from a timestamp of PD to ``now``, PD's time."""
    return round(now - physical_ms(ts) / 1000, 3)


class CaptureFlags(GroupFlags):
    cluster: shared.ClusterFlags
    etcd: shared.EtcdFlags
    sink_tls: SinkTlsFlags
    scratch_dir: str = SCRATCH_DIR()
    lease: float = flag(
        "10s",
        "Lease TTL of this capture. If it stops answering, others take over its work within three times this TTL.",
        kind=kinds.TIME,
    )
    status: StatusFlags


@command("changefeed capture", former="capture start", example="--pd 10.0.0.1:2379 --status-addr 8391")
def start_capture(flags: CaptureFlags) -> None:
    """Run a capture until stopped; others then take over its work."""
    from tikv_br.incremental.group.model import MAX_LEASE_SECONDS

    if not SHORTEST_LEASE <= flags.lease <= MAX_LEASE_SECONDS:
        raise UsageError(f"--lease {flags.lease:g}s is out of range: pass {SHORTEST_LEASE:g}s to {MAX_LEASE_SECONDS}s")
    scratch = scratch_folder(flags.scratch_dir)
    flags.status.check()
    from tikv_br.cluster.versions import RAW
    from tikv_br.incremental.group.capture import Capture
    from tikv_br.incremental.group.worker import CaptureOptions

    options = CaptureOptions(scratch, lease=round(flags.lease), sink_tls=flags.sink_tls.tls(flags.cluster))
    stop = threading.Event()
    with flags.group() as group:
        group.cluster.require(RAW)
        joined = Capture(group.store.etcd, group.cluster, options)
        with (
            signals.stopping(stop, "Other captures take over its work.") as received,
            watching(flags.out, joined.statuses, flags.status) as page,
        ):
            joined.run(stop, page)
    flags.out.flush()
    if received:
        raise received[0]


@command("changefeed captures", former="capture list", example="--pd 10.0.0.1:2379")
def list_captures(flags: GroupFlags) -> None:
    """List the captures of a cluster."""
    with flags.group() as group:
        state = group.store.snapshot()
    rows = []
    for info in state.captures.values():
        owner, tasks = info.id == state.owner, sum(task.capture == info.id for task in state.tasks.values())
        flags.out.result(
            "capture",
            {
                **picked(info, "id", "address", "started_ms"),
                "owner": owner,
                "spans": tasks,
                "tool_version": info.version,
            },
        )
        rows.append(
            (info.id, "yes" if owner else "", str(tasks), show_time(info.started_ms), info.version, info.address)
        )
    flags.out.table(CAPTURE_COLUMNS, rows, drop=("version", "sub-spans"))


@command("changefeed processors", former="processor list", example="--pd 10.0.0.1:2379")
def list_processors(flags: GroupFlags) -> None:
    """List sub-spans and the capture that runs each."""
    with flags.group() as group:
        show_processors(flags.out, group.store.snapshot(), group.cluster.clock.shown())


def show_processors(out: Output, state: GroupState, now: float, changefeed_id: str = "") -> None:
    """Write the sub-spans of one changefeed, or of all."""
    tasks = [state.tasks[each] for each in sorted(state.tasks) if changefeed_id in {"", each.changefeed}]
    rows = [_processor_row(out, task, state.progress.get(task.id), state, now) for task in tasks]
    out.table(SPAN_COLUMNS, rows, prose=("error",), drop=("sorter", "events/s", "regions"))


def _processor_row(
    out: Output, task: ChangefeedTask, progress: Progress | None, state: GroupState, now: float
) -> tuple[str, ...]:
    """Write a sub-span as a JSON line; returns it as a row of a table."""
    from tikv_br.incremental.group.model import Progress

    info = state.changefeeds.get(task.changefeed)
    began = info.start_ts if info is not None else 0
    known = progress or Progress(task.changefeed, task.number, began, began, task.epoch, task.capture, saved_ms=0)
    out.result(
        "processor",
        {
            **picked(task, "changefeed", "number", "capture", "epoch", "stopping"),
            **picked(known, "checkpoint_ts", "resolved_ts", "events", "written", "events_per_second", "regions"),
            **picked(known, "sorter_bytes", "error"),
            "checkpoint_lag": lag_of(known.checkpoint_ts, now),
            "start": task.start.hex(),
            "end": task.end.hex(),
        },
    )
    figures = str(known.regions), str(known.events_per_second), human_bytes(known.sorter_bytes)
    return (
        task.changefeed,
        str(task.number),
        f"{task.capture or '-'}{' (stopping)' if task.stopping else ''}",
        show_time(physical_ms(known.checkpoint_ts)),
        *(figures if progress is not None else "---"),
        show(task.start[PREFIX_SIZE:], KeyForm.RAW) or "start",
        known.error,
    )
