"""Syncs to a real Kafka broker: every change is in the topic, in order per key, through kills of sync and broker."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.integration.crash.cells import Kind, When
from tests.integration.crash.sync_cells import break_in, chosen, name_of, run_until
from tests.integration.incremental.forked_sync import Syncs, saved
from tests.integration.incremental.kafka_events import (
    Event,
    by_key,
    check_resolved,
    highest_resolved,
    json_events,
    live_rows,
    open_events,
    without_repeats,
)
from tests.integration.incremental.members import member
from tests.integration.incremental.writer import Writer
from tests.integration.kafka_server import KafkaBroker
from tests.support import history
from tests.support.etcd import real_etcd
from tests.support.live_cluster import LiveCluster, contents, live_cluster
from tests.support.waiting import eventually
from tikv_br.backup.run import backup
from tikv_br.cluster.etcd import Etcd
from tikv_br.cluster.timestamps import minus_seconds
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import SyncDegraded
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.ranges import EVERY_KEY
from tikv_br.incremental.feed.events import FeedOptions
from tikv_br.incremental.group.changefeeds import Changefeeds
from tikv_br.incremental.group.model import ChangefeedInfo
from tikv_br.incremental.group.store import GroupStore
from tikv_br.incremental.handover import FromNow, FromTs, resolve
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.kafka import KafkaSink
from tikv_br.incremental.sinks.url import parse as parse_sink
from tikv_br.incremental.sinks.writer import ReplicateOptions
from tikv_br.incremental.sync import SyncOptions
from tikv_br.restore.options import Restamp, RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.url import StorageLocation

KILLS = 20
PATIENCE = 250.0
LEASE = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the source."""
    return tmp_path_factory.mktemp("source")


@pytest.fixture(scope="module")
def source(folder: Path) -> Iterator[LiveCluster]:
    """Source of changes."""
    with live_cluster(folder, ApiVersion.V2, stores=2, regions=4, resolved_ts_interval=0.2) as live:
        yield live


@pytest.fixture(scope="module")
def syncs() -> Iterator[Syncs]:
    """Processes made to be killed."""
    with Syncs() as syncs:
        yield syncs


def wait_until_resolved(read: Callable[[], list[Event]], ts: int, partitions: int) -> list[Event]:
    """Wait until each partition is resolved up to a ts; return the events."""
    found: list[Event] = []

    def is_resolved() -> bool:
        found[:] = read()
        resolved = highest_resolved(found)
        return len(resolved) == partitions and min(resolved.values()) >= ts

    eventually(is_resolved, PATIENCE, every=1.0)
    return list(found)


Versions = dict[bytes, list[tuple[int, bytes | None, int]]]
"""Timestamp, value (None = deleted) and expiry, by key."""


def versions(events: list[Event], since: int) -> Versions:
    """The changes in the topic after a time, without repeats. A sync begins a little before the time that it is given."""
    found = {
        key: [(each.ts, each.value, each.expire_ts) for each in without_repeats(changes) if each.ts > since]
        for key, changes in by_key(events).items()
    }
    return {key: entries for key, entries in found.items() if entries}


def recorded(folder: Path, scratch: Path, since: int, until: int) -> Versions:
    """Every version of every key that the source's stores got in a time."""
    found = {
        key: [(each.ts, each.value, each.expire_ts) for each in entries if since < each.ts <= until]
        for key, entries in history.read(folder, scratch).items()
    }
    return {key: entries for key, entries in found.items() if entries}


def test_every_change_is_there_and_in_order(
    source: LiveCluster, folder: Path, broker: KafkaBroker, syncs: Syncs, tmp_path: Path
) -> None:
    """Without kills the topic has every version that the stores have, although the broker restarts."""
    topic = broker.create_topic(partitions=3)
    since = source.cluster.pd.tso()
    url = f"kafka://{broker.address}/{topic}?protocol=json&resolved-interval=100ms"
    asked = ["--pd", source.pd, "--sink", url, "--state-dir", str(tmp_path), "--id", "once", "--hold-back", "0s"]
    pid = syncs.begin([*asked, "--from-backup-ts", str(since)])

    def read() -> list[Event]:
        return json_events(broker.messages(topic))

    wait_until_resolved(read, since + 1, 3)  # the feed's initial scans, which give the last versions only, are done
    with Writer(source, 1):
        began = len(read())
        eventually(lambda: len(read()) > began + 100, PATIENCE, every=0.5)
        broker.restart()
        again = len(read())
        eventually(lambda: len(read()) > again + 100, PATIENCE, every=0.5)
    until = source.cluster.pd.tso()
    events = wait_until_resolved(read, until, 3)
    syncs.end(pid)
    assert versions(events, since) == recorded(folder, tmp_path / "history", since, until)
    for changes in by_key(events).values():
        firsts = list(dict.fromkeys(changes))
        assert firsts == sorted(firsts)  # by ts: only repeats go back
    check_resolved(events)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_kill_loses_a_change(
    source: LiveCluster, folder: Path, broker: KafkaBroker, syncs: Syncs, tmp_path: Path
) -> None:
    """SIGKILL twenty times under writes, and once of the broker: changes may repeat, none is lost, and no key's order is broken.

    After a kill the feed gives only the last version of what changed since the checkpoint, so older ones may be missing.
    """
    seed = int(os.environ.get("TIKV_BR_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    chance = random.Random(seed)
    topic = broker.create_topic(partitions=3)
    since = minus_seconds(source.cluster.pd.tso(), 10)
    url = f"kafka://{broker.address}/{topic}?protocol=open-protocol&resolved-interval=50ms"
    asked = ["--pd", source.pd, "--sink", url, "--state-dir", str(tmp_path), "--id", "killed", "--hold-back", "0s"]
    asked += ["--from-backup-ts", str(since), "--sorter-memory", "64KiB", "--checkpoint-every", "100ms"]
    with Writer(source, 2, pause=0.05), Writer(source, 3, pause=0.05):
        began, pid = time.monotonic(), syncs.begin(asked)
        eventually(lambda: saved(tmp_path, "killed") > since, PATIENCE)
        seconds = time.monotonic() - began
        syncs.kill(pid)
        for kill in range(1, KILLS):
            pid = syncs.begin(asked)
            if kill == KILLS // 2:
                broker.kill()
                broker.start()
            time.sleep(chance.uniform(0, 1.5 * min(seconds, 3.0)))
            syncs.kill(pid)
    pid = syncs.begin(asked)
    until = source.cluster.pd.tso()
    events = wait_until_resolved(lambda: open_events(broker.messages(topic)), until, 3)
    syncs.end(pid)
    stored, found = recorded(folder, tmp_path / "history", since, until), versions(events, since)
    assert found.keys() == stored.keys()
    for key, changes in found.items():
        assert changes[-1] == stored[key][-1]
        assert not set(changes) - set(stored[key])
    for repeated in by_key(events).values():
        firsts = list(dict.fromkeys(repeated))
        assert firsts == sorted(firsts)  # by ts: only repeats go back
    check_resolved(events)


@pytest.mark.parametrize(("part", "name", "when", "kind"), chosen([(KafkaSink, Sink)]), ids=name_of)
def test_a_sync_to_kafka_broken_in_a_call(
    part: type,
    name: str,
    when: When,
    kind: Kind,
    source: LiveCluster,
    folder: Path,
    broker: KafkaBroker,
    syncs: Syncs,
    tmp_path: Path,
) -> None:
    """As a sync to a cluster: run again, the topic in open-protocol has every change, in the order of each key."""
    topic = broker.create_topic(partitions=2)
    since = minus_seconds(source.cluster.pd.tso(), 10)
    options = SyncOptions(
        changefeed_id="broken",
        source=source.config,
        target=parse_sink(f"kafka://{broker.address}/{topic}?protocol=open-protocol&resolved-interval=50ms"),
        state=StorageLocation("local", str(tmp_path / "state")),
        start=FromTs(since),
        scratch=tmp_path,
        feed=FeedOptions(hold_back=0.0),
        replicate=ReplicateOptions(save_every=0.01),
    )
    rows = {b"broken-%d" % number: b"value" for number in range(5)}
    source.raw().batch_put(rows)
    source.raw().delete(min(rows))
    until = source.cluster.pd.tso()
    break_in(options, until, part, name, when, kind, syncs)
    found: list[Event] = []

    def is_complete() -> bool:
        found[:] = open_events(broker.messages(topic))
        resolved = highest_resolved(found)
        return len(resolved) == 2 and min(resolved.values()) >= until

    run_until(options, is_complete)
    reported, stored = versions(found, since), recorded(folder, tmp_path / "history", since, until)
    assert {key: changes[-1] for key, changes in reported.items()} == {key: each[-1] for key, each in stored.items()}
    assert stored.keys() >= rows.keys()
    check_resolved(found)


@pytest.fixture
def ingested(tmp_path: Path) -> Iterator[LiveCluster]:
    """A source of its own: a sync that starts before an ingest ended lacks rows, and others here start a while ago."""
    with live_cluster(tmp_path / "source", ApiVersion.V2, stores=1, resolved_ts_interval=0.2) as live:
        yield live


def test_a_topic_gets_rows_that_are_ingested(
    ingested: LiveCluster, broker: KafkaBroker, syncs: Syncs, tmp_path: Path
) -> None:
    """With new timestamps they are sent, each before a resolved-ts that covers it. With older ones the sync is degraded, and ends with 76."""
    rows = {b"ingested-%d" % number: b"backed up" for number in range(50)}
    ingested.raw().batch_put(rows)
    place = StorageLocation("local", str(tmp_path / "backup"))
    backup(BackupOptions(ingested.config, place, safe_interval=0.0, executor="driver"))
    ingested.raw().batch_put(dict.fromkeys(rows, b"later"))
    topic = broker.create_topic(partitions=2)
    url = f"kafka://{broker.address}/{topic}?protocol=open-protocol&resolved-interval=50ms"
    asked = ["--pd", ingested.pd, "--sink", url, "--state-dir", str(tmp_path / "state"), "--id", "ingests"]
    pid = syncs.begin([*asked, "--hold-back", "0s", "--start-ts", "now"])

    def read() -> list[Event]:
        return open_events(broker.messages(topic))

    wait_until_resolved(read, ingested.cluster.pd.tso(), 2)
    restored = RestoreOptions(ingested.config, place, allow_overwrite=True)
    restore(restored)
    events = wait_until_resolved(read, ingested.cluster.pd.tso(), 2)
    check_resolved(events)
    assert live_rows(events, time.time()).items() >= rows.items()
    restore(structs.replace(restored, restamp=Restamp.NEVER))
    wait_until_resolved(read, ingested.cluster.pd.tso(), 2)
    os.kill(pid, signal.SIGTERM)
    assert syncs.wait() == SyncDegraded.exit_code


def test_captures_share_a_changefeed_to_kafka(source: LiveCluster, broker: KafkaBroker, tmp_path: Path) -> None:
    """Two sub-spans in two captures fill one topic; its resolved-ts covers only what both have written."""
    source.raw().delete_range(EVERY_KEY)
    topic = broker.create_topic(partitions=2)
    with real_etcd(tmp_path / "etcd") as server, Etcd.connect([server.address]) as etcd:
        store = GroupStore(etcd, source.cluster.cluster_id)
        span = source.raw().codec.rpc_range()
        start_ts = resolve(FromNow(), source.cluster, span)
        url = f"kafka://{broker.address}/{topic}?protocol=open-protocol&resolved-interval=100ms"
        Changefeeds(store, source.cluster.pd).create(
            ChangefeedInfo("kafka", url, 0, b"", b"", start_ts, created_ms=1, spans=2, hold_back_ms=0)
        )

        def read() -> list[Event]:
            return open_events(broker.messages(topic))

        def holders() -> set[str]:
            return {task.capture for task in store.snapshot().tasks.values()} - {""}

        with member(etcd, source.cluster, tmp_path, LEASE) as stop_first, Writer(source, 4, pause=0.02):
            wait_until_resolved(read, start_ts + 1, 2)
            with member(etcd, source.cluster, tmp_path, LEASE):
                eventually(lambda: len(holders()) == 2, PATIENCE)
                before = source.cluster.pd.tso()
                wait_until_resolved(read, before, 2)
                stop_first.set()
                eventually(lambda: len(holders()) == 1, PATIENCE)
                later = source.cluster.pd.tso()
                wait_until_resolved(read, later, 2)
        with member(etcd, source.cluster, tmp_path, LEASE):
            events = wait_until_resolved(read, source.cluster.pd.tso(), 2)
        assert live_rows(events, time.time()) == contents(source)
        check_resolved(events)
        assert max(highest_resolved(events).values()) <= store.snapshot().checkpoint_ts("kafka")
