"""``tikv-br gc``: status of garbage collection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tikv_br.cli import shared
from tikv_br.cli.command import command, flag
from tikv_br.cli.output import Output, human_seconds
from tikv_br.errors import TikvBrError, UsageError
from tikv_br.redaction import redact

if TYPE_CHECKING:
    from tikv_br.check.probe import ProbeOutcome
    from tikv_br.cluster.config import ClusterConfig
    from tikv_br.gc.status import GcReport, ServiceReport

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)
COLUMNS = ("service", "belongs to", "safe point (UTC)", "lag", "expires in", "holds GC")


@app.callback()
def gc() -> None:
    """Show what holds garbage collection back."""


METRICS_FILE = (
    "Also write the figures to this file in Prometheus's text format, for node_exporter's textfile collector."
)


class StatusFlags(shared.CommandFlags):
    cluster: shared.ClusterFlags
    nagios: bool = flag(False, "Print one line for Nagios; exit code 0 OK, 1 warning, 2 critical, 3 unknown.")
    warn: float = flag("24h", "Age of the GC safe point that is a warning.", kind=shared.TIME)
    critical: float = flag("72h", "Age of the GC safe point that is critical (Nagios).", kind=shared.TIME)
    metrics_file: str = flag("", METRICS_FILE, metavar="FILE")


@command(app, "gc status", example="tikv-br gc status --pd 10.0.0.1:2379")
def status(flags: StatusFlags) -> None:
    """Show the GC safe point, every service safe point with its owner, and which one holds GC back."""
    with _unknown_in_one_line(flags.nagios):
        if flags.critical < flags.warn:
            raise UsageError("--critical must not be shorter than --warn")
        found = _read(flags.cluster.config())
        if flags.metrics_file:
            from tikv_br.gc.metrics import write_metrics

            write_metrics(Path(flags.metrics_file), found, None)
        outcome = _judge(found, flags.warn, flags.critical)
        if flags.nagios:
            raise typer.Exit(_nagios(outcome))
    _show(flags.out, found, outcome)


def _read(config: ClusterConfig) -> GcReport:
    """Ask PD; the stores are not needed. Raises `ClusterError`."""
    from tikv_br.cluster.pd import PdClient
    from tikv_br.cluster.pd_http import PdHttp, gc_status
    from tikv_br.gc.status import report

    with PdClient(config) as pd:
        return report(gc_status(PdHttp(pd.connection)), pd.tso())


def _judge(found: GcReport, warn_seconds: float, critical_seconds: float) -> ProbeOutcome:
    """Whether GC keeps up, and if not, why."""
    from tikv_br.check.probe import Figure, ProbeOutcome, Status

    figures = [Figure("services", len(found.services)), Figure("held_back", round(found.held_seconds), "s")]
    if found.lag is None:
        advice = "Start a GC worker: without one, old versions and tombstones are kept forever."
        return ProbeOutcome(Status.WARN, "GC has never run", advice, tuple(figures))
    figures.append(Figure("gc_age", round(found.lag), "s", f"{warn_seconds:g}", f"{critical_seconds:g}"))
    holder, seen = found.holder, f"the GC safe point is {human_seconds(max(found.lag, 0))} old"
    if holder is not None:
        held = human_seconds(found.held_seconds)
        seen += f"; {holder.service} has held GC back for {held}, since {shared.utc(found.held_since_ms)} UTC"
    if found.lag <= warn_seconds:
        return ProbeOutcome(Status.OK, seen, "", tuple(figures))
    if holder is not None:
        advice = f"If {holder.service} ({holder.owner}) is no longer needed, remove its service safe point."
    else:
        advice = "No service holds GC back: no GC worker advances it. Start one."
    status = Status.FAIL if found.lag > critical_seconds else Status.WARN
    return ProbeOutcome(status, seen, advice, tuple(figures))


def _show(out: Output, found: GcReport, outcome: ProbeOutcome) -> None:
    holder = found.holder
    fields = {
        "safe_point": found.safe_point,
        "safe_point_lag": found.lag,
        "worker_safe_point": found.worker_safe_point,
        "worker_lag": found.worker_lag,
        "holder": "" if holder is None else holder.service,
        "held_seconds": found.held_seconds,
        "held_since_ms": found.held_since_ms,
        "status": outcome.status.value,
        "seen": outcome.seen,
        "advice": outcome.advice,
    }
    advice = f"\n{outcome.advice}" if outcome.advice else ""
    out.result("gc", fields, f"{outcome.status.value}: {outcome.seen}{advice}")
    rows = [("gc_worker", "GC itself", *_times(found.worker_safe_point, found.worker_lag), "never", "")]
    for each in found.services:
        out.result(
            "gc_service",
            {
                "service": each.service,
                "service_kind": each.owner.kind.value,
                "service_name": each.owner.name,
                "safe_point": each.safe_point,
                "safe_point_lag": each.lag,
                "service_ttl": each.ttl,
                "holds_gc": each == holder,
            },
        )
        rows.append(_row(each, holder))
    out.table(COLUMNS, rows)


def _row(each: ServiceReport, holder: ServiceReport | None) -> tuple[str, ...]:
    ttl = "never" if each.ttl is None else human_seconds(each.ttl) if each.ttl > 0 else "expired"
    holds = "yes" if each == holder else ""
    return each.service, str(each.owner), *_times(each.safe_point, each.lag), ttl, holds


def _times(safe_point: int, lag: float | None) -> tuple[str, str]:
    from tikv_br.cluster.timestamps import physical_ms

    return shared.utc(physical_ms(safe_point)), "-" if lag is None else human_seconds(max(lag, 0))


def _nagios(outcome: ProbeOutcome) -> int:
    from tikv_br.check import run
    from tikv_br.check.probe import Result

    results = [Result("gc", outcome, 0)]
    Output().lines(redact(run.line(results)) + "\n")
    return run.state(results)


@contextlib.contextmanager
def _unknown_in_one_line(nagios: bool) -> Iterator[None]:
    """With `nagios`, report errors as the state UNKNOWN in one line."""
    try:
        yield
    except TikvBrError as error:
        if not nagios:
            raise
        from tikv_br.check.run import UNKNOWN, unknown

        Output().lines(redact(unknown(error.message)) + "\n")
        raise typer.Exit(UNKNOWN) from None
