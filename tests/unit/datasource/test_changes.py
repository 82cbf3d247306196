"""The change stream of the source ``tikv``, called as Spark calls it: exactly the changes between two offsets, or an error."""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

from tests.support.openssl import KEYS, crypter
from tests.unit.incremental.changes import Change, batch
from tikv_br.archive.compact import CompactionOptions, compact
from tikv_br.archive.log import LogArchive
from tikv_br.archive.maintenance import plan_truncation, truncate
from tikv_br.archive.records import InexactPeriod, LogDescription
from tikv_br.archive.writer import LogWriter
from tikv_br.datasource import TikvDataSource, changes
from tikv_br.errors import LogDamaged, OutsideRestoreWindow, TikvBrError, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

Row = tuple[str, bytes, bytes | None, int, int]
CODEC = KeyCodec(ApiVersion.V2, 7)
WHOLE = CODEC.rpc_range()
START, STEP = 1000, 100
ENDS = tuple(range(START + STEP, START + 6 * STEP + 1, STEP))


class Log:
    """A log that a test writes, with a segment up to each of `ENDS`, and what it wrote."""

    def __init__(self, path: Path, cluster_id: int = 99, span: KeyRange = WHOLE, **more: Any) -> None:  # noqa: ANN401
        self.place = StorageLocation("local", str(path), **more)
        description = LogDescription(
            "east",
            "0.1",
            cluster_id,
            ApiVersion.V2,
            7,
            (span,),
            0,
            0,
            has_checkpoint=False,
            encryption=self.place.crypter.method,
        )
        self.writer = LogWriter(open_store(self.place), description, span)
        self.writer.start(START)
        self.written: list[Change] = []
        self._chance = random.Random(3)

    def write(self, ends: Sequence[int] = ENDS, rows: int = 40) -> None:
        """Puts, deletes and expiring rows of 25 keys at all times; some rows come twice, as after a restart."""
        for end in ends:
            begin = self.writer.flushed_ts
            found = [self._change(self._chance.randint(begin + 1, end)) for _ in range(rows)]
            found = list({(each.key, each.ts): each for each in found}.values())
            self.written += found
            self.writer.append(batch(found + self._chance.sample(self.written, 5)))
            self.writer.flush(end)

    def _change(self, ts: int) -> Change:
        key = b"k%02d" % self._chance.randrange(25)
        if self._chance.random() < 0.2:
            return Change(ts, key, deleted=True)
        return Change(ts, key, self._chance.randbytes(50), self._chance.choice([0, 2_000_000_000]))

    def rows(self, after_ts: int, up_to_ts: int, prefix: bytes = b"") -> list[Row]:
        """Rows that a stream must deliver between two times."""
        return sorted(
            (
                "delete" if each.deleted else "put",
                each.key,
                None if each.deleted else each.value,
                each.expire_ts,
                each.ts,
            )
            for each in self.written
            if after_ts < each.ts <= up_to_ts and each.key.startswith(prefix)
        )

    def archive(self) -> LogArchive:
        """As its records say."""
        return LogArchive.open(open_store(self.place), "east")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """A log of six segments."""
    found = Log(tmp_path / "log")
    found.write()
    return found


def reader_of(log: Log, **options: str) -> Any:  # noqa: ANN401
    """A stream on the driver."""
    source = TikvDataSource({"log": log.place.path, "log_id": "east", **options})
    return pickle.loads(pickle.dumps(source.streamReader(source.schema())))


def rows_of(reader: Any, start: object, end: object) -> list[Row]:  # noqa: ANN401
    """The rows of a micro-batch; partitions travel by pickle, offsets as JSON."""
    start, end = json.loads(json.dumps(start)), json.loads(json.dumps(end))
    tables = [part for each in reader.partitions(start, end) for part in reader.read(pickle.loads(pickle.dumps(each)))]
    return sorted(tuple(row.values()) for table in tables for row in table.to_pylist())


def drain(reader: Any, start: Any = None, limit: object = None) -> tuple[Any, list[tuple[int, int, list[Row]]]]:  # noqa: ANN401
    """All micro-batches, and the last offset."""
    offset = start or reader.initialOffset()
    found = []
    while (end := reader.latestOffset(offset, limit or reader.getDefaultReadLimit())) != offset:
        found.append((offset["ts"], end["ts"], rows_of(reader, offset, end)))
        offset = end
    return offset, found


def check_batches(log: Log, batches: Sequence[tuple[int, int, list[Row]]], first: int, last: int) -> None:
    """Fail unless micro-batches follow each other and have the rows of their times."""
    assert [begin for begin, _, _ in batches] == [first, *(end for _, end, _ in batches[:-1])]
    assert batches[-1][1] == last
    assert [rows for _, _, rows in batches] == [log.rows(begin, end) for begin, end, _ in batches]


def test_all_changes_once(log: Log) -> None:
    """In one micro-batch, and what is written afterwards in the next; a restart repeats a micro-batch exactly."""
    reader = reader_of(log)
    offset, found = drain(reader)
    check_batches(log, found, START, ENDS[-1])
    assert len(found) == 1
    log.write([ENDS[-1] + STEP])
    assert drain(reader, offset)[1] == []  # the records were read less than a second ago
    reader._refresh_at = 0.0
    offset, more = drain(reader, offset)
    check_batches(log, more, ENDS[-1], ENDS[-1] + STEP)
    assert rows_of(reader_of(log), {**offset, "ts": START}, {**offset, "ts": ENDS[-1]}) == found[0][2]


def test_known_segments_are_not_read_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh reads the records of new segments only."""
    reader = reader_of(log)
    offset, _ = drain(reader)
    log.write([ENDS[-1] + STEP])
    read: list[str] = []
    store_type = type(open_store(log.place))
    get = store_type.get

    def get_and_note(store: ObjectStore, name: str) -> bytes:
        read.append(name)
        return get(store, name)

    monkeypatch.setattr(store_type, "get", get_and_note)
    reader._refresh_at = 0.0
    assert drain(reader, offset)[0]["ts"] == ENDS[-1] + STEP
    assert len([name for name in read if "/segments/" in name]) == 1


@pytest.mark.parametrize("limit", [1, 300, 2500, 10**9])
def test_limits(log: Log, limit: int) -> None:
    """Micro-batches have about as many bytes; together they have all rows. AvailableNow ends where the log ended."""
    reader = reader_of(log, max_bytes_per_batch=str(limit))
    assert reader.getDefaultReadLimit() == ReadMaxBytes(limit)
    reader.prepareForTriggerAvailableNow()
    log.write([ENDS[-1] + STEP])
    reader._refresh_at = 0.0
    _, found = drain(reader)
    check_batches(log, found, START, ENDS[-1])
    assert (len(found) == 1) is (limit == 10**9)
    sizes = [sum(len(row[1]) + len(row[2] or b"") for row in rows) for _, _, rows in found]
    assert max(sizes) < 3 * limit + 1000
    _, whole = drain(reader, limit=ReadAllAvailable())
    assert len(whole) == 1


def test_partitions(log: Log) -> None:
    """A large micro-batch is divided by keys, also after a compaction; no row is in two partitions."""
    keys = [b"k%02d" % at for at in range(25)]
    big = [Change(ENDS[-1] + 1 + at, key, bytes(40_000)) for at, key in enumerate(keys * 2)]
    for _ in range(2):
        log.writer.append(batch(big))
    log.writer.flush(ENDS[-1] + STEP)
    log.written += big
    start, end = ({"log": "99/7/east", "ts": ts} for ts in (START, ENDS[-1] + STEP))
    expected = log.rows(START, ENDS[-1] + STEP)
    for compacted in (False, True):
        if compacted:
            compact(CompactionOptions(log.place, "east", grace=0, executor="driver", file_bytes=500_000))
        reader = reader_of(log, partition_bytes="400000")
        assert len(reader.partitions(start, end)) > 2
        assert rows_of(reader, start, end) == expected
        assert len(reader_of(log).partitions(start, end)) == 1


@pytest.mark.parametrize("method", ["plaintext", "aes256-ctr"])
def test_where_it_starts_and_which_keys(tmp_path: Path, method: str) -> None:
    """By timestamp, at the end, by prefix; encrypted logs too."""
    key = tmp_path / "key"
    key.write_text(KEYS["aes256-ctr"])
    key.chmod(0o600)
    encrypted = method != "plaintext"
    log = Log(tmp_path / "log", crypter=crypter(method)) if encrypted else Log(tmp_path / "log")
    log.write()
    options = {"crypter_key_file": str(key)} if encrypted else {}
    assert drain(reader_of(log, starting_ts="1234", **options))[1][0][2] == log.rows(1234, ENDS[-1])
    assert reader_of(log, starting_ts="latest", **options).initialOffset()["ts"] == ENDS[-1]
    found = drain(reader_of(log, prefix="k1", keyspace="7", **options))[1][0][2]
    assert found == log.rows(START, ENDS[-1], b"k1")
    assert 0 < len(found) < len(log.rows(START, ENDS[-1]))


def test_inexact_times(tmp_path: Path) -> None:
    """Everything before them is delivered, then the stream ends unless it may go on; no offset lies within them."""
    log = Log(tmp_path / "log")
    log.writer.mark_inexact(InexactPeriod(WHOLE.start, WHOLE.end, 1230, 1310))
    log.write()
    careful = reader_of(log, max_bytes_per_batch="1")
    offset = careful.initialOffset()
    while offset["ts"] < 1230:
        end = careful.latestOffset(offset, careful.getDefaultReadLimit())
        assert rows_of(careful, offset, end) == log.rows(offset["ts"], end["ts"])
        offset = end
    refused = refusal(careful, 1230)
    assert isinstance(refused, OutsideRestoreWindow)
    assert "may lack versions between 1230" in refused.message
    assert "allow_inexact" in refused.hint
    bold = reader_of(log, allow_inexact="true", max_bytes_per_batch="1")
    _, found = drain(bold)
    check_batches(log, found, START, ENDS[-1])
    assert not [end for _, end, _ in found if 1230 < end < 1310]
    later = reader_of(log, starting_ts="1310")
    check_batches(log, drain(later)[1], 1310, ENDS[-1])


def test_a_log_that_ends_within_inexact_times(tmp_path: Path) -> None:
    """The stream waits for the end of these times."""
    log = Log(tmp_path / "log")
    log.writer.mark_inexact(InexactPeriod(WHOLE.start, WHOLE.end, 1130, 1310))
    log.write(ENDS[:2])
    bold = reader_of(log, allow_inexact="true")
    assert drain(bold)[0]["ts"] == 1130
    log.write(ENDS[2:4])
    bold._refresh_at = 0.0
    assert drain(bold, {"log": "99/7/east", "ts": 1130})[0]["ts"] == ENDS[3]


def refusal(reader: Any, ts: int, log: str = "99/7/east") -> TikvBrError:  # noqa: ANN401
    """The error of a query that has read up to a timestamp and continues."""
    with pytest.raises(TikvBrError) as caught:
        reader.latestOffset({"log": log, "ts": ts}, ReadAllAvailable())
    assert caught.value.__notes__
    return caught.value


def test_lost_changes_are_errors(log: Log, tmp_path: Path) -> None:
    """Truncated, with a gap, with a damaged file, of another log or shorter than before."""
    other = refusal(reader_of(log), START, "98/7/east")
    assert "belongs to the log 98/7/east" in other.message
    shorter = refusal(reader_of(log), ENDS[-1] + 1)
    assert isinstance(shorter, LogDamaged)
    store = open_store(log.place)
    third = log.archive().segments[2]
    store.delete(third.name)
    reader = reader_of(log)
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert offset["ts"] == ENDS[1]
    gap = refusal(reader, ENDS[1])
    assert isinstance(gap, LogDamaged)
    assert f"from {ENDS[1]}" in gap.message
    past = reader_of(log, starting_ts=str(ENDS[3]))
    past.prepareForTriggerAvailableNow()
    check_batches(log, drain(past)[1], ENDS[3], ENDS[-1])
    whole = Log(tmp_path / "whole")
    whole.write()
    truncate(whole.archive(), plan_truncation(whole.archive(), ENDS[2]))
    truncated = refusal(reader_of(whole), START)
    assert isinstance(truncated, UsageError)
    assert "it was truncated" in truncated.message
    check_batches(whole, drain(reader_of(whole))[1], ENDS[2], ENDS[-1])
    victim = max((tmp_path / "whole").rglob("*.parquet"), key=lambda path: path.stat().st_mtime)
    victim.write_bytes(victim.read_bytes()[:-1] + b"X")
    with pytest.raises(LogDamaged, match=victim.name):
        drain(reader_of(whole))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starting_ts": "900"}, "option starting_ts is 900"),
        ({"starting_ts": "2030-01-01T00:00:00Z"}, "has changes from 1000"),
        ({"starting_ts": "the other day"}, "is not a time"),
        ({"keyspace": "8"}, "is of keyspace 7, not 8"),
        ({"keyspace": "orders"}, "is of keyspace 7, not orders"),
        ({"prefix": "zz"}, "does not contain the keys"),
        ({"log_id": "west"}, "there is no log west"),
        ({"pd": "127.0.0.1:1"}, "unknown option 'pd'"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, str], message: str) -> None:
    """Fail when the query starts, with a hint."""
    log = Log(tmp_path / "log", span=CODEC.rpc_range(KeyRange(b"a", b"m")))
    log.write()
    with pytest.raises(TikvBrError) as caught:
        reader_of(log, **options).initialOffset()
    assert message in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.__notes__


def test_without_a_log() -> None:
    """A cluster has no stream, and a log is no batch."""
    source = TikvDataSource({"pd": "127.0.0.1:1"})
    with pytest.raises(UsageError, match="option log is missing"):
        source.streamReader(source.schema())
    source = TikvDataSource({"log": "/nowhere"})
    with pytest.raises(UsageError, match="option log is for streams"):
        source.reader(source.schema())


def test_old_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark 4.0 and 4.1 lack what streams need."""
    monkeypatch.delitem(sys.modules, changes.__name__)
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    source = TikvDataSource({"log": "/nowhere"})
    with pytest.raises(UsageError, match=r"streams need PySpark 4\.2"):
        source.streamReader(source.schema())
