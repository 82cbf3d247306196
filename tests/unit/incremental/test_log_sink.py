"""The sink that writes a log archive, read back with pyarrow alone and with `LogArchive`."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from tests.unit.archive.samples import LOG, WHOLE, describe, store_at
from tests.unit.incremental.changes import Change, batch
from tests.unit.incremental.sink_suite import SinkSuite, State
from tikv_br.archive.log import LogArchive, changes_of
from tikv_br.archive.records import InexactPeriod
from tikv_br.archive.writer import FlushOptions, LogWriter
from tikv_br.errors import CrypterMismatch, LogDamaged, StorageUnreachable, SyncStateMismatch, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.incremental.feed.events import Scanned
from tikv_br.incremental.sinks.base import Sink
from tikv_br.incremental.sinks.open import LogSink
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import Crypter, SecretText

START = 100
NEVER = FlushOptions(interval=1e9)


def sink_at(store: ObjectStore, options: FlushOptions = NEVER, start_ts: int = 0, **changes: object) -> LogSink:
    """A sink that flushes on demand."""
    description = describe(start_ts=start_ts, has_checkpoint=False)
    return LogSink(LogWriter(store, description, WHOLE, options), "a test")


def stored(path: Path) -> list[Change]:
    """All rows of all files, as pyarrow reads them, by file, each in its order."""
    found = []
    for name in sorted(path.glob(f"{LOG}/data/*/*.parquet")):
        found += [Change(**row) for row in pq.read_table(name, partitioning=None).to_pylist()]
    return found


class TestLogSink(SinkSuite):
    """A log in a directory."""

    @pytest.fixture
    def sink(self, tmp_path: Path) -> Iterator[Sink]:
        """See `SinkSuite.sink`: flushed after each batch."""
        sink = sink_at(store_at(tmp_path))
        sink.resolve(0)

        class Flushed(Sink):
            place = "a test"

            def write(self, batch: pa.RecordBatch) -> None:
                sink.write(batch)
                sink.resolve(max([0, *batch["ts"].to_pylist()]), flush=True)

            def close(self) -> None:
                sink.close()

        yield Flushed()
        sink.close()

    @pytest.fixture
    def state(self, tmp_path: Path) -> State:
        """See `SinkSuite.state`: the newest version of each key."""

        def live() -> dict[bytes, bytes]:
            newest: dict[bytes, Change] = {}
            for row in sorted(stored(tmp_path), key=lambda row: row.ts):
                newest[row.key] = row
            now = int(time.time())
            return {
                key: row.value
                for key, row in newest.items()
                if not row.deleted and (not row.expire_ts or row.expire_ts > now)
            }

        return live


def test_every_version_is_kept_and_sorted(tmp_path: Path) -> None:
    """By key, newest version first, without duplicates; nothing is visible before the flush."""
    store = store_at(tmp_path)
    sink = sink_at(store)
    assert sink.resolve(START) == START
    rows = [Change(START + 1 + at, b"k%d" % (at % 3), b"%d" % at, expire_ts=at % 2, deleted=at == 7) for at in range(9)]
    sink.write(batch(rows[:5]))
    assert sink.resolve(START + 5) == START
    sink.write(batch(rows[3:]))
    assert not stored(tmp_path)
    assert sink.resolve(START + 9, flush=True) == START + 9
    assert stored(tmp_path) == sorted(rows, key=lambda row: (row.key, -row.ts))
    log = LogArchive.open(store, LOG)
    assert (log.start_ts, log.end_ts(), log.damage) == (START, START + 9, ())
    (file,) = log.files_for(WHOLE, START, START + 9)
    assert (file.total_kvs, file.min_ts, file.max_ts) == (9, START + 1, START + 9)
    assert log.verify_files(whole=True) == []
    assert [Change(**row) for part in log.rows(file) for row in part.to_pylist()] == stored(tmp_path)


def test_rows_of_several_keyspaces_are_in_files_of_each(tmp_path: Path) -> None:
    """A segment and files with user keys for each keyspace; readers find both, and another set of keyspaces is refused."""
    store, spans = store_at(tmp_path), [KeyCodec(ApiVersion.V2, id_).rpc_range() for id_ in (7, 9)]
    names = ("features", "billing")
    description = structs.replace(
        describe(start_ts=0, has_checkpoint=False, ranges=spans), keyspace_name=names[0], keyspace_names=names
    )
    sink = LogSink(LogWriter(store, description, spans[0], NEVER, more=spans[1:]), "a test")
    sink.resolve(START)
    sink.write(
        batch([Change(START + at, key, b"v") for at, key in enumerate([b"r\0\0\7a", b"r\0\0\x09a", b"r\0\0\x09b"], 1)])
    )
    sink.mark_inexact(Scanned(spans[1], START + 1, START + 2))
    assert sink.resolve(START + 9, flush=True) == START + 9
    sink.write(batch([Change(START + 10, b"r\0\0\x09a", b"w")]))
    sink.resolve(START + 20, flush=True)
    assert sorted((row.key, row.ts) for row in stored(tmp_path)) == [
        *((b"a", START + at) for at in (1, 2, 10)),
        (b"b", START + 3),
    ]
    log = LogArchive.open(store, LOG)
    assert (log.end_ts(), log.damage, log.gaps()) == (START + 20, (), [])
    assert [len(log.files_for(span, START, START + 20)) for span in spans] == [1, 2]
    assert log.verify_files(whole=True, rows=True) == []
    assert (log.inexact_windows(spans[:1]), log.inexact_windows(spans[1:])) == ([], [(START + 1, START + 2)])
    assert [each.ts for each in changes_of(log, b"a", 0, START + 20, "billing")] == [START + 2, START + 10]
    assert [each.ts for each in changes_of(log, b"a", 0, START + 20, "7")] == [START + 1]
    for wrong in ("", "other", "8"):
        with pytest.raises(UsageError, match=r"features \(7\), billing \(9\)"):
            changes_of(log, b"a", 0, START + 20, wrong)
    LogWriter(store, description, spans[0], NEVER, more=spans[1:]).start(START + 20)
    with pytest.raises(SyncStateMismatch, match="features"):
        sink_at(store).resolve(START + 20)


def test_each_segment_says_what_is_inexact_in_its_time(tmp_path: Path) -> None:
    """A period that reaches past one segment is in the next as well: either may be damaged or truncated."""
    store = store_at(tmp_path)
    sink = sink_at(store)
    sink.resolve(START)
    sink.mark_inexact(Scanned(WHOLE, START + 5, START + 25))
    for ts in (START + 10, START + 20, START + 30, START + 40):
        sink.resolve(ts, flush=True)
    period = InexactPeriod(WHOLE.start, WHOLE.end, START + 5, START + 25)
    assert [each.inexact for each in LogArchive.open(store, LOG).segments] == [(period,), (period,), (period,), ()]


def test_random_histories_are_read_back(tmp_path: Path) -> None:
    """Keys that share prefixes, many versions, batches and flushes of any size: the multiset of (key, ts) is the history."""
    for seed in range(8):
        chance = random.Random(seed)
        path = tmp_path / str(seed)
        sink = sink_at(store_at(path), FlushOptions(interval=1e9, size=chance.choice([1, 3000, 1 << 20])))
        sink.resolve(START)
        history: list[Change] = []
        ts = START
        for _ in range(20):
            rows = []
            for _ in range(chance.randrange(30)):
                ts += chance.randrange(2)
                key = b"prefix" * chance.randrange(3) + b"%d" % chance.randrange(9)
                row = Change(ts + 1, key, chance.randbytes(chance.randrange(40)), deleted=chance.random() < 0.2)
                if not any(each[:2] == row[:2] for each in history):
                    rows.append(row)
                    history.append(row)
            ts += 1
            sink.write(batch(rows))
            sink.resolve(ts, flush=chance.random() < 0.3)
        sink.resolve(ts + 1, flush=True)
        assert sorted(stored(path)) == sorted(history)
        assert LogArchive.open(store_at(path), LOG).end_ts() == ts + 1


def test_flushes_by_time_and_by_size(tmp_path: Path) -> None:
    """The interval counts from the last flush; a full buffer is written as a file before more rows are taken."""
    now = [0.0]
    writer = LogWriter(store_at(tmp_path), describe(), WHOLE, FlushOptions(30, 5000), clock=lambda: now[0])
    sink = LogSink(writer, "a test")
    sink.resolve(START)
    now[0] = 29.0
    assert sink.resolve(START + 1) == START
    now[0] = 30.0
    assert sink.resolve(START + 2) == START + 2
    for at in range(10):
        sink.write(batch([Change(START + 3, b"%d" % at, bytes(1000))]))
        assert writer.buffered_bytes < 5000 + 2 * 4096
    assert 3 <= len(list(tmp_path.rglob("*.parquet"))) <= 9
    assert len(LogArchive.open(store_at(tmp_path), LOG).segments) == 1  # files alone confirm nothing
    assert sink.resolve(START + 3) == START + 3  # because the buffer is full
    sink.write(batch([Change(START + 4, b"a")]))
    assert sink.resolve(START + 4) == START + 3
    now[0] = 60.0
    assert sink.resolve(START + 4) == START + 4
    assert len(LogArchive.open(store_at(tmp_path), LOG).segments) == 3


class Flaky:
    """A store that does not answer while `away`."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.away = False

    def __getattr__(self, name: str) -> object:
        if self.away and name in {"put", "open_writer", "list", "get", "put_if_absent"}:
            raise StorageUnreachable("away")
        return getattr(self.store, name)


def test_rows_survive_an_outage_of_the_storage(tmp_path: Path) -> None:
    """Calls that raised are repeated, as the pipeline does; memory does not grow while they fail."""
    flaky = Flaky(store_at(tmp_path))
    writer = LogWriter(flaky, describe(), WHOLE, FlushOptions(0, 3000))  # type: ignore[arg-type]
    sink = LogSink(writer, "a test")
    flaky.away = True
    with pytest.raises(StorageUnreachable):
        sink.resolve(START)
    flaky.away = False
    assert sink.resolve(START) == START
    sink.write(batch([Change(START + 1, b"a", bytes(3000))]))
    flaky.away = True
    for _ in range(3):
        with pytest.raises(StorageUnreachable):
            sink.write(batch([Change(START + 2, b"a", b"2")]))
        with pytest.raises(StorageUnreachable):
            sink.resolve(START + 1)
    assert writer.buffered_bytes < 6000
    flaky.away = False
    sink.write(batch([Change(START + 2, b"a", b"2")]))
    assert sink.resolve(START + 2) == START + 2
    assert [row.ts for row in stored(tmp_path)] == [START + 1, START + 2]


def test_a_restart_resumes_without_a_gap(tmp_path: Path) -> None:
    """From the checkpoint or earlier, never from later than the log reaches."""
    store = store_at(tmp_path)
    first = sink_at(store)
    first.resolve(START)
    first.write(batch([Change(START + 1, b"a")]))
    first.resolve(START + 5, flush=True)
    for since in (START + 3, START + 5):
        again = sink_at(store)
        assert again.resolve(since) == since
        again.resolve(START + 6, flush=True)
    assert LogArchive.open(store, LOG).gaps() == []
    with pytest.raises(LogDamaged, match="there would be a gap"):
        sink_at(store).resolve(START + 9)


def test_another_source_is_refused(tmp_path: Path) -> None:
    """The same id for another cluster, range, keyspace or key."""
    store = store_at(tmp_path)
    sink_at(store).resolve(START)
    for change in ({"cluster_id": 1}, {"keyspace_id": 8}, {"ranges": ()}):
        other = LogWriter(store, structs.replace(describe(), **change), WHOLE)
        with pytest.raises(SyncStateMismatch, match="the log log1 at"):
            other.start(START)
    crypter = Crypter.of("", SecretText("00" * 32))
    with pytest.raises(CrypterMismatch):
        LogWriter(store_at(tmp_path, crypter), describe(), WHOLE).start(START)


def test_a_log_without_its_description_is_not_started_anew(tmp_path: Path) -> None:
    """Its segments would become unreadable."""
    store = store_at(tmp_path)
    sink = sink_at(store)
    sink.resolve(START)
    sink.resolve(START + 1, flush=True)
    store.delete(f"{LOG}/log.json")
    with pytest.raises(LogDamaged, match=r"log\.json"):
        sink_at(store).resolve(START + 1)


def test_encrypted(tmp_path: Path) -> None:
    """Neither keys nor values are readable in any object; with the key they are."""
    store = store_at(tmp_path, Crypter.of("", SecretText("0123456789abcdef" * 4)))
    sink = LogSink(LogWriter(store, describe(), WHOLE, NEVER), "a test")
    sink.resolve(START)
    sink.write(batch([Change(START + 1, b"secretkey", b"secretvalue")]))
    sink.resolve(START + 1, flush=True)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"secret" not in path.read_bytes()
            assert b"start_ts" not in path.read_bytes()
    log = LogArchive.open(store, LOG)
    (file,) = log.files_for(WHOLE, START, START + 1)
    assert [row["value"] for part in log.rows(file) for row in part.to_pylist()] == [b"secretvalue"]
    with pytest.raises(CrypterMismatch):
        LogArchive.open(store_at(tmp_path), LOG)


def test_files_have_row_groups_to_divide_them(tmp_path: Path) -> None:
    """About as many of equal size in a large file, so that a task reads a part; one in a small file."""
    sink = sink_at(store_at(tmp_path))
    sink.resolve(START)
    chance = random.Random(3)
    sink.write(batch([Change(START + at, chance.randbytes(8), chance.randbytes(1000)) for at in range(1, 10_001)]))
    sink.resolve(START + 10_001, flush=True)
    sink.write(batch([Change(START + 10_002, b"key", b"value")]))
    sink.resolve(START + 10_002, flush=True)
    large, small = sorted(tmp_path.glob(f"{LOG}/data/*/*.parquet"), key=lambda path: -path.stat().st_size)
    rows = [pq.ParquetFile(large).metadata.row_group(at).num_rows for at in range(pq.ParquetFile(large).num_row_groups)]
    assert rows == [10_000 // 16] * 16
    assert pq.ParquetFile(small).num_row_groups == 1
