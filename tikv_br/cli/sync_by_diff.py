"""``tikv-br sync --mode diff``."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tikv_br.cli.option_groups import ClusterFlags, OptionGroup
from tikv_br.cli.options import parse_duration
from tikv_br.cli.output import Output
from tikv_br.cli.status_flags import StatusFlags
from tikv_br.cli.stop_signals import signals_stop
from tikv_br.cli.sync_options import SinkFlags
from tikv_br.cli.sync_view import serving
from tikv_br.errors import UsageError

if TYPE_CHECKING:
    from incremental.diff_mode import DiffModeOptions, Pass

IntervalOption = Annotated[
    float,
    typer.Option(
        "--interval",
        parser=parse_duration,
        metavar="TIME",
        show_default="30s",
        help="With --mode diff: from the beginning of a pass to that of the next.",
    ),
]
ExactEveryOption = Annotated[
    int,
    typer.Option(
        "--exact-every",
        min=0,
        metavar="N",
        show_default="never",
        help="With --mode diff: each N passes one that reads all rows, for what checksums do not show.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffModeFlags(OptionGroup):
    """How passes follow one another."""

    interval: IntervalOption = 30.0
    exact_every: ExactEveryOption = 0

    def options(
        self, source: ClusterFlags, keyspace: str, span: tuple[bytes, bytes], sink: SinkFlags
    ) -> DiffModeOptions:
        """What the passes compare. Raises `UsageError` for what has no sense there."""
        from incremental.diff_mode import DiffModeOptions
        from incremental.sinks.url import TikvTarget
        from tikv_br.cluster.config import ClusterConfig
        from tikv_br.diff.options import ClusterChoice, DiffOptions

        target = sink.target()
        if not isinstance(target, TikvTarget):
            raise UsageError("--mode diff compares two clusters: --sink must be tikv://")
        if sink.allow_loss:
            raise UsageError("--mode diff loses nothing: a row that expires ends it where the sink knows no TTL")
        a = ClusterChoice(source.config(), keyspace)
        b = ClusterChoice(ClusterConfig(pd=target.pd, tls=sink.tls(source)), target.keyspace)
        return DiffModeOptions(
            DiffOptions(a, b, *span, keys=0, executor="driver", concurrency=sink.sink_concurrency),
            target.check,
            self.interval,
            self.exact_every,
            sink.sink_patience,
        )


def follow_by_diff(out: Output, asked: DiffModeOptions, name: str, status_flags: StatusFlags) -> None:
    """Pass after pass until told to stop; each is told. Raises `Terminated` or `Interrupted` then, and as `DiffMode`."""
    from incremental.diff_mode import DiffMode
    from incremental.watch.passes import Passes

    stop, passes = threading.Event(), Passes(name)

    def tell(done: Pass) -> None:
        passes.note(done)
        _tell(out, done)

    hint = "The same command goes on: its first pass finds what differs."
    with signals_stop(stop, hint) as told, serving(out, passes, status_flags):
        DiffMode(asked, stop).run(tell, broken=passes.note_failure)
    if told:
        raise told[0]


def _tell(out: Output, done: Pass) -> None:
    exact = "exact " if done.exact else ""
    text = (
        f"{exact}pass {done.number}: {done.changed_ranges:,} of {done.ranges:,} ranges changed, {done.puts:,} rows "
        f"written, {done.deletes:,} removed, {done.remaining:,} still changing; {done.seconds:.1f} s behind"
    )
    out.result("pass", asdict(done), text)
    out.flush()
