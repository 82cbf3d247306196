"""The figures of all syncs, for Prometheus. docs/monitoring.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from incremental.watch.named import NamedStatus, Watched
from tikv_br import __version__
from tikv_br.cluster.timestamp import physical_ms

if TYPE_CHECKING:
    from incremental.replicate import SyncStatus

PREFIX = "tikv_br_sync_"
Figure = tuple[str, str, "Callable[[SyncStatus], float]"]
"""Name without prefix, meaning, and where the value is."""

# Timestamps of TiKV do not fit into the doubles that Prometheus keeps: only their physical part is given.
GAUGES: tuple[Figure, ...] = (
    ("checkpoint_lag_seconds", "How far the sink is behind the source.", lambda of: of.checkpoint_lag),
    ("resolved_lag_seconds", "How far what is known of is behind the source.", lambda of: of.resolved_lag),
    (
        "checkpoint_timestamp_seconds",
        "Up to which all changes are at the sink, by the source's clock.",
        lambda of: physical_ms(of.checkpoint_ts) / 1000,
    ),
    (
        "sink_failing_seconds",
        "For how long the sink has taken nothing; 0 while it does.",
        lambda of: of.sink_failing_seconds,
    ),
    ("feed_regions", "Regions that are subscribed to.", lambda of: of.feed.regions),
    ("feed_scanning_regions", "Of them, those that are still being read from the start.", lambda of: of.feed.scanning),
    ("feed_holes", "Parts of the range that wait for a subscription.", lambda of: of.feed.holes),
    ("feed_stores", "Stores with a stream.", lambda of: of.feed.stores),
    ("feed_queued_bytes", "Messages of stores that wait to be read.", lambda of: of.feed.queued_bytes),
    ("sorter_memory_bytes", "Changes in memory that wait until they are complete.", lambda of: of.sorter_memory_bytes),
    ("sorter_disk_bytes", "Changes on disk that wait until they are complete.", lambda of: of.sorter_disk_bytes),
)
COUNTERS: tuple[Figure, ...] = (
    ("events", "Changes that the feed told, some of them twice.", lambda of: of.events),
    ("written_rows", "Rows that the sink has confirmed.", lambda of: of.written),
    ("late_rows", "Changes that came after all up to their timestamp had been called known.", lambda of: of.late_rows),
    (
        "sink_failures",
        "How often the sink gave up on a batch, which was then tried again.",
        lambda of: of.sink_failures,
    ),
)


class Metrics:
    """What ``/metrics`` answers: every sync under the label ``sync``, this process, and the version."""

    def __init__(self, watched: Watched, max_lag: float) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Syncs(watched, max_lag))
        ProcessCollector(registry=self._registry)
        Info("tikv_br_build", "What runs.", registry=self._registry).info({"version": __version__})

    def render(self, accept: str) -> tuple[str, bytes]:
        """Content type and text, in the form that a reader says it accepts."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)


class _Syncs(Collector):
    """Asked for at every scrape: nothing is counted twice."""

    def __init__(self, watched: Watched, max_lag: float) -> None:
        self._watched, self._max_lag = watched, max_lag

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        found = self._watched()
        healthy = GaugeMetricFamily(PREFIX + "healthy", "Whether it runs and is not too far behind.", labels=["sync"])
        for each in found:
            healthy.add_metric([each.name], float(not each.trouble(self._max_lag)))
        yield healthy
        for family, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, meaning, value in figures:
                metric = family(PREFIX + name, meaning, labels=["sync"])
                for each in found:
                    if each.status is not None:
                        metric.add_metric([each.name], value(each.status))
                yield metric
        yield _feed_errors(found)


def _feed_errors(found: Sequence[NamedStatus]) -> Metric:
    meaning = "What went wrong with regions and stores; each was followed by another try."
    metric = CounterMetricFamily(PREFIX + "feed_errors", meaning, labels=["sync", "kind"])
    for each in found:
        for kind, count in each.status.feed.errors.items() if each.status is not None else ():
            metric.add_metric([each.name, kind], count)
    return metric
