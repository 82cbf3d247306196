"""The parts of the playground's change feed: versions, spans, cuts, and the promise behind a resolved-ts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys import codec
from tikv_br.playground import cdc_hub
from tikv_br.playground.cdc_hub import Event, FeedSubscription, SubscribedRange
from tikv_br.playground.cdc_stream import Features
from tikv_br.playground.cluster import Playground, open_playground
from tikv_br.playground.encoding import V2, from_memcomparable, v2_version
from tikv_br.playground.region import Region
from tikv_br.playground.request_checks import RegionFault


@pytest.mark.parametrize(
    ("version", "batched", "checked"),
    [
        ("6.2.0", True, True),
        ("5.3.0", True, True),
        ("5.3.0-alpha", True, False),
        ("5.2.9", True, False),
        ("4.0.8", True, False),
        ("4.0.8-rc.1", False, False),
        ("4.0.7+build.9", False, False),
        ("10.0.0", True, True),
        ("v6.2.0", False, False),
        ("6.2", False, False),
        ("06.2.0", False, False),
        ("", False, False),
    ],
)
def test_features_by_version(version: str, batched: bool, checked: bool) -> None:
    """Only a strict semantic version counts, with pre-releases below their release."""
    assert Features.of(version) == Features(batched, checked)


@given(st.binary(max_size=40), st.binary(max_size=9))
def test_memcomparable_is_undone(key: bytes, behind: bytes) -> None:
    """Keys of another implementation are decoded, whatever follows; cut keys are not."""
    encoded = codec.encode(key)
    assert from_memcomparable(encoded + behind) == key
    assert from_memcomparable(encoded[:-1]) is None


@given(st.binary(max_size=30), st.integers(0, 2**64 - 1), st.binary(max_size=20), st.integers(0, 2**40))
def test_a_row_is_the_version_that_was_written(key: bytes, ts: int, value: bytes, expire: int) -> None:
    """Key, timestamp, value and expiry of a put come back, and a tombstone is a DELETE without value."""
    row = cdc_hub.committed_row(*V2().put(key, value, expire, ts))
    assert (row.key, row.commit_ts, row.start_ts, row.value) == (key, ts, ts, value)
    assert (row.expire_ts_unix_secs, row.op_type, row.type) == (expire, Event.Row.PUT, Event.COMMITTED)
    [[tombstone], _] = V2().delete(key, ts)
    deleted = cdc_hub.committed_row(*tombstone)
    assert (deleted.key, deleted.value, deleted.op_type) == (key, b"", Event.Row.DELETE)
    assert v2_version(*tombstone).ts == ts


def test_spans() -> None:
    """A span holds its start and not its end; one that cannot be decoded is all keys."""
    span = SubscribedRange.of(codec.encode(b"b"), codec.encode(b"d"))
    assert [span.contains(key) for key in (b"a", b"b", b"c", b"d")] == [False, True, True, False]
    for start, end in ((b"", b""), (codec.encode(b"b"), b""), (b"", codec.encode(b"d")), (b"raw", codec.encode(b"d"))):
        assert SubscribedRange.of(start, end) == SubscribedRange()
    assert all(SubscribedRange().contains(key) for key in (b"", b"\xff" * 9))


def test_scans_are_cut_by_size() -> None:
    """Events hold less than 32 KiB of keys and values, or one larger row; nothing is lost, messages hold 6 MiB."""
    sizes = [100, 40_000, 10, 32_000, 800, 33_000, 33_000, 1]
    rows = [Event.Row(key=b"%04d" % number, value=bytes(size)) for number, size in enumerate(sizes)]
    events = list(cdc_hub.events_of(4, 7, rows))
    assert [[len(row.value) for row in event.entries.entries] for event in events] == [
        [100], [40_000], [10, 32_000], [800], [33_000], [33_000], [1],
    ]  # fmt: skip
    assert {(event.region_id, event.request_id) for event in events} == {(4, 7)}
    large = [Event(entries=Event.Entries(entries=[Event.Row(value=bytes(size << 20))])) for size in (2, 3, 2, 7, 1)]
    assert [len(message.events) for message in cdc_hub.messages_of(large)] == [2, 1, 1, 1]


def test_batches_end_with_initialized() -> None:
    """A scan is read in batches of 1,024 rows or a mebibyte; the last, which may be empty else, ends it."""
    rows = itertools.chain((Event.Row(key=b"k") for _ in range(1024)), [Event.Row(value=bytes(2 << 20))])
    batches = [cdc_hub.batch_of(rows) for _ in range(3)]
    assert [len(batch) for batch in batches] == [1024, 1, 1]
    assert batches[2] == [cdc_hub.INITIALIZED]


class Outbox:
    """Keeps what is pushed."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def push(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def has_room(self, event: Event) -> bool:
        """There is always room."""
        return bool(event)


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    """Return a playground of two stores that was never started."""
    opened = open_playground(tmp_path, api_version=ApiVersion.V2.value, stores=2)
    yield opened
    opened.engine.close()


def subscribed(playground: Playground, region: Region, outbox: Outbox) -> FeedSubscription:
    """A subscription whose scan is over."""
    subscription = FeedSubscription(outbox, region.leader_store, region.id, 1, SubscribedRange(), raw=True)
    assert playground.changes.subscribe(subscription, region.to_pb().region_epoch) == region
    subscription.initialized = True
    return subscription


def test_resolved_ts_stays_below_a_write_under_way(playground: Playground) -> None:
    """Repeated resolved-ts during a write are below its timestamp; afterwards they pass it."""
    region, outbox, hub = playground.regions.all()[0], Outbox(), playground.changes
    subscribed(playground, region, outbox)
    node = playground.nodes[region.leader_store]

    def resolved() -> int:
        with hub.lock:
            ts, [_] = hub.resolve(node, outbox)
        return ts

    with hub.write_ts(node) as ts:
        reported = [resolved() for _ in range(3)]
        hub.write(node, region, [V2().put(b"r\0\0\0k", b"v", 0, ts)], [])
        reported.append(resolved())
    assert max(reported) < ts
    assert reported == sorted(reported)
    assert [row.commit_ts for event in outbox.events for row in event.entries.entries] == [ts]
    assert resolved() > ts


def test_a_write_is_refused_once_its_region_has_changed(playground: Playground) -> None:
    """A write let in before a split, merge or transfer is not made, and nobody hears of it."""
    regions, hub, outbox = playground.regions, playground.changes, Outbox()
    region = regions.all()[0]
    left, right = regions.split(region.id, [codec.encode(b"r\0\0\0k")])
    node = playground.nodes[region.leader_store]
    subscribed(playground, right, outbox)
    row = V2().put(b"r\0\0\0z", b"v", 0, node.causal.next_ts())
    for stale, kind in ((region, "epoch_not_match"), (replace(left, id=4242), "region_not_found")):
        with pytest.raises(RegionFault) as fault:
            hub.write(node, stale, [row], [])
        assert [field.name for field, _ in fault.value.error.ListFields() if field.message_type] == [kind]
    other = next(store_id for store_id in playground.nodes if store_id != right.leader_store)
    regions.transfer_leader(right.id, other)
    with pytest.raises(RegionFault) as fault:
        hub.write(node, right, [row], [])
    assert fault.value.error.not_leader.leader.store_id == other
    assert playground.engine.get(row[0]) is None
    assert [event.WhichOneof("event") for event in outbox.events] == ["error"]


def test_no_resolved_ts_for_a_region_that_has_moved_on(playground: Playground) -> None:
    """Once a region changes, its old subscription gets nothing more, even before its error."""
    regions, hub, outbox = playground.regions, playground.changes, Outbox()
    region = regions.all()[0]
    node = playground.nodes[region.leader_store]
    subscription = subscribed(playground, region, outbox)
    subscription.version -= 1  # as if the split that made this version had not been heard of
    with hub.lock:
        assert hub.resolve(node, outbox)[1] == []
