"""``tikv-br capture``: the processes that share the work of changefeeds."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Annotated

import typer

from tikv_br.cli import options, sync_options
from tikv_br.cli.capture_list import list_captures
from tikv_br.cli.etcd_flags import EtcdFlags
from tikv_br.cli.option_groups import ClusterFlags, grouped
from tikv_br.cli.options import OutputForm, parse_duration
from tikv_br.cli.output import Output
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cli.stop_signals import signals_stop
from tikv_br.cli.sync_options import SinkTlsFlags
from tikv_br.cli.sync_view import watching
from tikv_br.errors import UsageError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)

HANDED_BACK = "What it did has been handed back to the group."
SHORTEST_LEASE = 2.0
LeaseOption = Annotated[
    float,
    typer.Option(
        "--lease",
        parser=parse_duration,
        metavar="TIME",
        show_default="10s",
        help="How long the group waits for a process that is silent; its work is elsewhere within three times that.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFlags(SinkTlsFlags):
    """How a process takes part."""

    scratch_dir: sync_options.ScratchDirOption = ""
    lease: LeaseOption = 10.0

    def check(self) -> None:
        """Refuse what cannot be. Raises `UsageError`."""
        from incremental.group.model import LONGEST_LEASE

        if not SHORTEST_LEASE <= self.lease <= LONGEST_LEASE:
            raise UsageError(f"--lease takes {SHORTEST_LEASE:g} s to {LONGEST_LEASE} s")


@app.callback()
def capture() -> None:
    """Run and list the processes that share the work of changefeeds."""


@app.command("start")
@grouped
def start(
    *,
    cluster: ClusterFlags,
    etcd_flags: EtcdFlags,
    capture_flags: CaptureFlags,
    status_flags: StatusFlags,
    output: options.OutputOption = OutputForm.CONSOLE,
) -> None:
    """Take part in the work on changefeeds until told to stop; then hand it back."""
    capture_flags.check()
    scratch = sync_options.scratch_folder(capture_flags.scratch_dir)
    status_flags.check()
    from incremental.group.capture import Capture, CaptureOptions
    from tikv_br.cluster.cluster import Cluster
    from tikv_br.cluster.etcd import Etcd

    asked = CaptureOptions(
        scratch,
        lease=round(capture_flags.lease),
        sink_tls=capture_flags.tls(cluster),
    )
    stop, out = threading.Event(), Output(output)
    meeting = etcd_flags.etcd_config(cluster)
    with Cluster.connect(cluster.config()) as source, Etcd.open(meeting) as etcd:
        joined = Capture(etcd, source, asked)
        with signals_stop(stop, HANDED_BACK) as told, watching(out, joined.statuses, status_flags) as page:
            joined.run(stop, page)
    out.flush()
    if told:
        raise told[0]


app.command("list")(list_captures)
