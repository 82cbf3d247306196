"""The Prometheus metrics of the overview; docs/serve.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from tikv_br.serve.model import Overview


def collect(shown: Overview) -> Iterator[Metric]:
    labels = ["storage", "prefix"]
    newest = [each for storage in shown.storages for each in storage.newest]
    finished = GaugeMetricFamily(
        "tikv_br_backup_newest_timestamp_seconds", "When the newest backup ended; 0 = there is none.", labels=labels
    )
    limit = GaugeMetricFamily(
        "tikv_br_backup_max_age_seconds", "How old the newest backup may be, as --max-backup-age.", labels=labels
    )
    rows = GaugeMetricFamily(
        "tikv_br_backup_newest_rows", "Rows of the newest full backup.", labels=[*labels, "keyspaces"]
    )
    shrunk = GaugeMetricFamily(
        "tikv_br_backup_newest_shrunk",
        "1 if the newest full backup has less than half of the rows of the one before it.",
        labels=labels,
    )
    for each in newest:
        rows.add_metric([each.storage, each.prefix, each.keyspaces], each.total_kvs)
        shrunk.add_metric([each.storage, each.prefix], bool(each.rows_before))
        finished.add_metric([each.storage, each.prefix], each.finished_ms / 1000)
        if each.max_age:
            limit.add_metric([each.storage, each.prefix], each.max_age)
    yield finished
    yield limit
    yield rows
    yield shrunk
    findings = GaugeMetricFamily(
        "tikv_br_serve_findings", "Things that need attention, by section of the page.", labels=["section"]
    )
    counts = Counter(each.section for each in shown.findings)
    for section, _, _ in shown.sections:
        findings.add_metric([section], counts[section])
    yield findings
