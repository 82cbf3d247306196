from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.unit.incremental.statuses import status
from tikv_br.incremental.watch.server import SyncReporter
from tikv_br.incremental.watch.status import NamedStatus
from tikv_br.web.metrics import respond
from tikv_br.web.server import HttpResponse

PAGE = Path(__file__).resolve().parents[4] / "docs" / "monitoring.md"
WATCHED = [NamedStatus("a", status()), NamedStatus("b", None), NamedStatus('c"\n', status(checkpoint_lag=301.0))]


def scraped(accept: str) -> HttpResponse:
    """The answer of ``/metrics``."""
    return respond(SyncReporter(lambda: WATCHED, 300.0).metrics, accept)


@pytest.mark.parametrize(("accept", "parse"), [("", parse_text), ("application/openmetrics-text", parse_openmetrics)])
def test_every_sync_has_every_metric(accept: str, parse: type) -> None:
    """In both formats that Prometheus requests, each running sync has all metrics; every sync has a health metric."""
    answer = scraped(accept)
    assert answer.content_type.startswith(accept or "text/plain")
    found = {
        (s.name, s.labels.get("sync"), s.labels.get("kind")): s.value
        for f in parse(answer.body.decode())
        for s in f.samples
    }
    expected = {
        "checkpoint_lag_seconds": 3.0,
        "resolved_lag_seconds": 2.0,
        "write_lag_seconds": 0.7,
        "checkpoint_timestamp_seconds": 1_795_285_269.8,
        "events_total": 4000,
        "written_rows_total": 3000,
        "late_rows_total": 0,
        "sink_failures_total": 2,
        "sink_failing_seconds": 0,
        "sink_rate_limit_bytes": 0,
        "sink_limited_ratio": 0,
        "sorter_memory_bytes": 1 << 20,
        "sorter_disk_bytes": 2 << 20,
        "feed_regions": 50,
        "feed_scanning_regions": 2,
        "feed_stalled_regions": 0,
        "feed_holes": 1,
        "pd_silent_seconds": 0,
        "feed_stores": 3,
        "feed_queued_bytes": 10,
    }
    ours = {
        name.removeprefix("tikv_br_sync_"): value
        for (name, sync, kind), value in found.items()
        if sync == "a" and not kind
    }
    assert ours == pytest.approx({**expected, "healthy": 1, "degraded": 1})
    assert found["tikv_br_sync_feed_errors_total", "a", "not_leader"] == 3
    assert [found["tikv_br_sync_healthy", name, None] for name in ("a", "b", 'c"\n')] == [1, 0, 0]
    assert ("tikv_br_sync_events_total", "b", None) not in found


def test_the_documentation_lists_exactly_these() -> None:
    """docs/monitoring.md names each metric of ours, with its kind, and none that there is not."""
    text = scraped("").body.decode()
    reported = set(re.findall(r"^# TYPE (tikv_br_\w+) (\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"^\| `(tikv_br_\w+)[^`]*` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)) == reported
