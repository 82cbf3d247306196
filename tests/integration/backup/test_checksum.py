"""`--checksum` of clusters that do not stand still: keys expire and rows are written while the backup runs."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.data import load, when
from tests.support.live_cluster import LiveCluster
from tikv_br.backup.run import backup
from tikv_br.cluster.rate_limit import RateLimit
from tikv_br.cluster.rawkv import RawClient
from tikv_br.dataflow import plan
from tikv_br.dataflow.options import Loss
from tikv_br.errors import ChecksumMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.formats.rawscan import RawPage
from tikv_br.progress_events import Event, Notice, StepFinished, StepStarted

V1, V1TTL, V2 = ApiVersion.V1, ApiVersion.V1TTL, ApiVersion.V2
ROWS = {b"k%03d" % number: b"value-%d" % number for number in range(300)}


@pytest.fixture(autouse=True)
def _small_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each region an interval."""
    monkeypatch.setattr(plan, "SMALLEST_TASK", 1)
    monkeypatch.setattr(plan, "LARGEST_TASK", 1)


@pytest.fixture
def emptied(clusters: Clusters) -> Callable[[ApiVersion], LiveCluster]:
    """Return a function to a cluster that holds `ROWS` only, in three regions or more."""

    def get(version: ApiVersion) -> LiveCluster:
        live = clusters(version)
        live.raw().delete_range(EVERY_KEY)
        load(live, ROWS)
        codec = live.raw().codec
        live.split(*(codec.bound(codec.rpc_key(key)) for key in (b"k100", b"k200")))
        return live

    return get


@pytest.mark.parametrize("engine", ["scan", "store"])
@pytest.mark.parametrize(
    ("source", "target"), [(V1TTL, V1TTL), (V1TTL, V2), (V2, V2), (V2, V1TTL)], ids=lambda version: version.label
)
def test_keys_that_expire_while_the_backup_runs(
    source: ApiVersion, target: ApiVersion, engine: str, emptied: Callable[[ApiVersion], LiveCluster], options: Options
) -> None:
    """Expiry is no difference: rows that were backed up and are gone by now, and rows that go just now."""
    live = emptied(source)
    losses = frozenset({Loss.TS, Loss.KEYSPACE}) if (source, target) == (V2, V1TTL) else frozenset()

    def put(times: int) -> None:
        for ttl in range(3, 9):
            live.raw().batch_put({b"t%d-%03d" % (ttl, number): b"v" for number in range(100)}, ttl * times)

    def report(event: Event, times: int) -> None:
        when(StepStarted, "copy", lambda: put(times))(event)
        when(StepStarted, "compare checksums", lambda: time.sleep(4 * times))(event)

    # Put at the last moment; a machine that is too slow to copy any before they expire gets more time.
    for times in (1, 3, 9):
        wanted = options(live, engine=engine, dst_api_version=target, checksum=True, allow_loss=losses)
        summary = backup(wanted, functools.partial(report, times=times)).summary
        assert (summary.compared_ranges, summary.changed_ranges) == (summary.ranges, 0)
        if summary.total_kvs > len(ROWS):
            break
    assert summary.total_kvs > len(ROWS)


@pytest.mark.parametrize("engine", ["scan", "store"])
@pytest.mark.parametrize(
    "write",
    [
        lambda live: live.raw().put(b"k007", b"written later"),
        lambda live: live.raw().delete(b"k007"),
        lambda live: live.raw().put(b"k0071", b"added later"),
    ],
    ids=["overwritten", "deleted", "added"],
)
def test_a_range_that_was_written_once_is_copied_again(
    write: Callable[[LiveCluster], object],
    engine: str,
    emptied: Callable[[ApiVersion], LiveCluster],
    options: Options,
) -> None:
    """Only that range; the backup then is what the cluster holds, and every range has been compared."""
    live = emptied(V2)
    seen: list[Event] = []

    def report(event: Event) -> None:
        seen.append(event)
        when(StepFinished, "copy", lambda: write(live))(event)

    wanted = options(live, engine=engine, checksum=True)
    summary = backup(wanted, report).summary
    counted = live.raw().checksum()
    assert (summary.total_kvs, summary.crc64xor) == (counted.total_kvs, counted.crc64xor)
    assert (summary.compared_ranges, summary.changed_ranges) == (summary.ranges, 0)
    assert [event.message for event in seen if isinstance(event, Notice) and "copied again" in event.message] == [
        f"1 of {summary.ranges} ranges differ from the cluster and are copied again"
    ]
    assert len(list(Path(wanted.storage.path).rglob("*.sst"))) == summary.files


def test_a_range_that_is_being_written_is_counted(
    emptied: Callable[[ApiVersion], LiveCluster], options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be compared: the backup succeeds, summary and a notice report it, and the other ranges are compared."""
    live = emptied(V2)
    numbers = itertools.count()
    notices: list[str] = []
    checksum = RawClient.checksum

    def write_before(raw: RawClient, span: KeyRange) -> Checksum:
        if span.contains(KeyRange(b"k007", b"k007\0")):
            live.raw().put(b"k007", b"%d" % next(numbers))
        return checksum(raw, span)

    monkeypatch.setattr(RawClient, "checksum", write_before)
    summary = backup(
        options(live, checksum=True),
        lambda event: notices.append(event.message) if isinstance(event, Notice) else None,
    ).summary
    assert (summary.compared_ranges, summary.changed_ranges) == (summary.ranges - 1, 1)
    assert any(f"1 of {summary.ranges} ranges changed while the backup ran" in notice for notice in notices)


def test_a_copy_that_is_wrong_is_found(
    emptied: Callable[[ApiVersion], LiveCluster], options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows get lost in one range, twice, and the cluster does not change: 41. The other ranges stay for the next run."""
    live = emptied(V1)
    wanted = options(live, checksum=True)
    with monkeypatch.context() as patch:
        scan = RawClient.scan_raw_pages

        def lose(raw: RawClient, span: KeyRange, rate_limit: RateLimit) -> Iterator[RawPage]:
            return iter(()) if span.start == b"k100" else scan(raw, span, rate_limit)

        patch.setattr(RawClient, "scan_raw_pages", lose)
        with pytest.raises(ChecksumMismatch, match=r"100 only in the cluster.*first key is 6b313030") as raised:
            backup(wanted)
    assert "same command" in raised.value.hint
    summary = backup(wanted).summary
    assert (summary.resumed_ranges, summary.ranges) == (summary.ranges - 1, summary.ranges)
    assert summary.crc64xor == live.raw().checksum().crc64xor
