"""What syncs report on ``--status-addr``.

The Prometheus metrics of all syncs; docs/monitoring.md lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tikv_br import __version__
from tikv_br.cluster.timestamps import physical_ms
from tikv_br.incremental.watch.status import NamedStatus, StatusSource
from tikv_br.storage.crypter import SecretText
from tikv_br.web import metrics
from tikv_br.web.address import Address
from tikv_br.web.server import listening
from tikv_br.web.status import NO_KEY, StatusApi

if TYPE_CHECKING:
    from tikv_br.incremental.status import SyncStatus


PREFIX = "tikv_br_sync_"
Figure = tuple[str, str, "Callable[[SyncStatus], float | None]"]
"""Name without prefix, help text, and how to read the value; None = no sample."""

# Prometheus stores doubles, which cannot hold a TSO: only its physical part is exported.
GAUGES: tuple[Figure, ...] = (
    ("checkpoint_lag_seconds", "How far the sink is behind the source.", lambda of: of.checkpoint_lag),
    ("resolved_lag_seconds", "How far resolved-ts is behind the source.", lambda of: of.resolved_lag),
    (
        "write_lag_seconds",
        "Estimated time that a write takes from the source to the sink; absent while there are no writes.",
        lambda of: of.write_lag,
    ),
    (
        "checkpoint_timestamp_seconds",
        "Checkpoint-ts: all changes up to it are at the sink (source's clock).",
        lambda of: physical_ms(of.checkpoint_ts) / 1000,
    ),
    (
        "sink_failing_seconds",
        "How long the sink has accepted no writes; 0 while it accepts them.",
        lambda of: of.sink_failing_seconds,
    ),
    ("sink_rate_limit_bytes", "Maximum bytes per second to the sink; 0 = unlimited.", lambda of: of.sink_rate_limit),
    (
        "sink_limited_ratio",
        "Part of the last 10 s in which changes waited for the rate limit of the sink.",
        lambda of: of.sink_limited_share,
    ),
    (
        "pd_silent_seconds",
        "How long the source's PD has not answered; 0 while it does.",
        lambda of: of.pd_silent_seconds,
    ),
    ("feed_regions", "Subscribed regions.", lambda of: of.feed.regions),
    ("feed_scanning_regions", "Subscribed regions whose incremental scan has not ended.", lambda of: of.feed.scanning),
    (
        "feed_stalled_regions",
        "Subscribed regions without a new resolved-ts for 10 s.",
        lambda of: of.feed.stalled,
    ),
    ("feed_holes", "Gaps: parts of the range without a subscription.", lambda of: of.feed.holes),
    ("feed_stores", "Stores with an open stream.", lambda of: of.feed.stores),
    ("feed_queued_bytes", "Received messages that have not been processed yet.", lambda of: of.feed.queued_bytes),
    ("sorter_memory_bytes", "Changes in memory that are not resolved yet.", lambda of: of.sorter_memory_bytes),
    ("sorter_disk_bytes", "Changes on disk that are not resolved yet.", lambda of: of.sorter_disk_bytes),
)
COUNTERS: tuple[Figure, ...] = (
    ("events", "Changes received from the feed, including duplicates.", lambda of: of.events),
    ("written_rows", "Rows that the sink has confirmed.", lambda of: of.written),
    ("late_rows", "Changes received at or below a resolved-ts already reported.", lambda of: of.late_rows),
    (
        "sink_failures",
        "How often the sink failed a batch, which was then retried.",
        lambda of: of.sink_failures,
    ),
)


def collect(statuses: Sequence[NamedStatus], max_lag: float) -> Iterator[Metric]:
    healthy = GaugeMetricFamily(
        PREFIX + "healthy", "1 if the sync runs and its lag is within the limit, else 0.", labels=["sync"]
    )
    for each in statuses:
        healthy.add_metric([each.name], float(not each.problem(max_lag)))
    yield healthy
    degraded = GaugeMetricFamily(
        PREFIX + "degraded", "1 if a part of the range, a store or PD does not answer, else 0.", labels=["sync"]
    )
    for each in statuses:
        degraded.add_metric([each.name], float(bool(each.degraded)))
    yield degraded
    for family, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, meaning, value in figures:
            metric = family(PREFIX + name, meaning, labels=["sync"])
            for each in statuses:
                figure = None if each.status is None else value(each.status)
                if figure is not None:
                    metric.add_metric([each.name], figure)
            yield metric
    yield _feed_errors(statuses)


def _feed_errors(statuses: Sequence[NamedStatus]) -> Metric:
    meaning = "Errors of regions and stores; each was retried."
    metric = CounterMetricFamily(PREFIX + "feed_errors", meaning, labels=["sync", "kind"])
    for each in statuses:
        for kind, count in each.status.feed.errors.items() if each.status is not None else ():
            metric.add_metric([each.name, kind], count)
    return metric


MAX_LAG = 300.0


class SyncReporter:
    """Reports all syncs of this process: a `Reporter`."""

    def __init__(self, statuses: StatusSource, max_lag: float) -> None:
        self._statuses, self._max_lag = statuses, max_lag
        self.metrics = metrics.process_registry(lambda: collect(statuses(), max_lag))

    def status(self) -> dict[str, object]:
        syncs = []
        for each in self._statuses():
            figures = asdict(each.status) if each.status is not None else None
            problem, degraded = each.problem(self._max_lag), each.degraded
            ends = {"source": each.source, "sink": each.sink}
            syncs.append({"name": each.name, **ends, "trouble": problem, "degraded": degraded, "status": figures})
        healthy = not any(each["trouble"] for each in syncs)
        now_ms = time.time_ns() // 1_000_000
        return {
            "version": __version__,
            "now_ms": now_ms,
            "max_lag": self._max_lag,
            "healthy": healthy,
            "degraded": any(each["degraded"] for each in syncs),
            "syncs": syncs,
        }

    def problems(self) -> list[str]:
        return [f"{each.name}: {problem}" for each in self._statuses() if (problem := each.problem(self._max_lag))]

    def degradations(self) -> list[str]:
        return [f"{each.name}: {each.degraded}" for each in self._statuses() if each.degraded]


@contextmanager
def serve(
    address: Address, statuses: StatusSource, *, max_lag: float = MAX_LAG, key: SecretText = NO_KEY
) -> Iterator[Address]:
    """Serve the status of syncs until the end of the block; yields the address with the chosen port.

    Raises `UsageError` if it cannot listen there.
    """
    with listening(address, StatusApi(SyncReporter(statuses, max_lag), key, address).answer) as chosen:
        yield chosen
