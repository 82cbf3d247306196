"""Figures of GC in Prometheus's text format, in a file for node_exporter's textfile collector or for ``/metrics``; docs/gc.md lists them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tikv_br.cluster.timestamps import physical_ms
from tikv_br.errors import UsageError
from tikv_br.gc.status import GcReport, OwnerKind, ServiceReport
from tikv_br.web.metrics import registry, write_textfile

PREFIX = "tikv_br_gc_"


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Activity of a process of ``gc run`` since it started."""

    revision: int = 0
    """Revision of etcd at which the leader joined the election: later leaders have larger ones. 0 = it does not lead."""
    rounds: int = 0
    """Rounds in which PD answered everything."""
    failures: int = 0
    """Rounds that failed, and were retried."""
    waits_for: str = ""
    """The name of the worker that leads, if it waits for another one."""
    error: str = ""
    """Error of the last attempt to do a round or to take part in the election; empty if it succeeded."""

    @property
    def is_leader(self) -> bool:
        """Return whether this process leads."""
        return self.revision > 0


def write_metrics(path: Path, report: GcReport | None, worker: WorkerFigures | None) -> None:
    """Replace the file at once, so that no reader sees a part of it. Raises `UsageError` if it cannot be written."""
    try:
        write_textfile(path, registry(lambda: collect(report, worker)))
    except OSError as error:
        raise UsageError(
            f"--metrics-file {path}: cannot write: {error.strerror}", hint="Pass a file in a directory that exists."
        ) from None


def collect(report: GcReport | None, worker: WorkerFigures | None) -> Iterator[Metric]:
    """Yield the metrics of GC and of the worker; None = unknown."""
    if report is not None:
        yield from _of_report(report)
    if worker is not None:
        yield _gauge("leader", "1 if this process leads, else 0.", float(worker.is_leader))
        yield _counter("rounds", "Rounds of this process in which PD answered everything.", worker.rounds)
        yield _counter("failures", "Failed rounds of this process; each was retried.", worker.failures)


def _of_report(report: GcReport) -> Iterator[Metric]:
    # Prometheus stores doubles, which cannot hold a TSO: only its physical part is exported.
    yield _gauge("status_timestamp_seconds", "When PD gave these figures, by its clock.", report.now_ms / 1000)
    moments = (
        ("safe_point_timestamp_seconds", "Time of the GC safe point; 0 = never run.", report.safe_point),
        ("worker_timestamp_seconds", "Time of the GC worker's safe point; 0 = none.", report.worker_safe_point),
    )
    for name, meaning, ts in moments:
        yield _gauge(name, meaning, physical_ms(ts) / 1000)
    yield _gauge("held_back_seconds", "By how much a service keeps GC behind the GC worker.", report.held_seconds)
    yield _labelled(
        "service_timestamp_seconds",
        "Time of a service safe point.",
        [(each, physical_ms(each.safe_point) / 1000) for each in report.services],
    )
    yield _labelled(
        "service_holds_back",
        "1 if GC waits for this service, else 0.",
        [(each, float(each == report.holder)) for each in report.services],
    )


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, meaning, value=value)


def _labelled(name: str, meaning: str, values: Sequence[tuple[ServiceReport, float]]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, meaning, labels=["service", "kind"])
    for each, value in values:
        of_keyspace = each.owner.kind is OwnerKind.KEYSPACE_BARRIER  # barriers of several keyspaces may have one name
        name = f"{each.owner.name}/{each.service}" if of_keyspace else each.service
        family.add_metric([name, each.owner.kind.value], value)
    return family
