"""Small logs to play with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tests.unit.incremental.changes import Change, batch
from tikv_br.archive import records
from tikv_br.archive.log import LogArchive
from tikv_br.archive.records import Checkpoint, LogDescription, Segment
from tikv_br.archive.writer import FlushOptions, LogWriter
from tikv_br.backupset.files import FileEntry, FileWriter
from tikv_br.backupset.sealed import write_record
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import dump
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import Crypter
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

LOG = "log1"
CODEC = KeyCodec(ApiVersion.V2, 7)
WHOLE = CODEC.rpc_range()
START = 100
STEP = 10
"""Interval of time between segments of `write_log`."""
Rows = set[tuple[bytes, int, bytes, int, bool]]
"""Key, ts, value, expiry, and whether it is a tombstone."""


def store_at(path: Path, crypter: Crypter | None = None) -> ObjectStore:
    """A store in a directory."""
    return open_store(StorageLocation("local", str(path), crypter=crypter or Crypter()))


def describe(
    *, start_ts: int = START, has_checkpoint: bool = True, ranges: Sequence[KeyRange] = (WHOLE,)
) -> LogDescription:
    """A log of keyspace 7."""
    return LogDescription(
        log_id=LOG,
        tool_version="0.1.0",
        cluster_id=99,
        api_version=ApiVersion.V2,
        keyspace_id=7,
        ranges=tuple(ranges),
        start_ts=start_ts,
        started_ms=1_795_256_305_000,
        has_checkpoint=has_checkpoint,
    )


def segment(
    from_ts: int, to_ts: int, span: KeyRange = WHOLE, files: Sequence[FileEntry] = (), token: int = 0
) -> Segment:
    """A segment of `LOG`."""
    return Segment(LOG, span.start, span.end, from_ts, to_ts, tuple(files), 1, f"{token:08x}")


def start(store: ObjectStore, description: LogDescription | None = None) -> None:
    """Write the description."""
    write_record(store, f"{LOG}/{records.DESCRIPTION}", description or describe())


def add(store: ObjectStore, *segments: Segment) -> None:
    """Write segments."""
    for each in segments:
        write_record(store, each.name, each)


def save(store: ObjectStore, ts: int, epoch: int = 1) -> None:
    """Write a checkpoint."""
    store.put(f"{LOG}/state/{LOG}/checkpoint-{epoch:010}.json", dump(Checkpoint(LOG, ts, ts, epoch, 1)))


def data_file(
    store: ObjectStore, ts: tuple[int, int], span: KeyRange = WHOLE, token: int = 0, data: bytes = b"x" * 100
) -> FileEntry:
    """Store bytes, which are no Parquet, as a data file."""
    with FileWriter(store, records.data_name(LOG, WHOLE, *ts, f"{token:08x}")) as writer:
        writer.write(data)
        stored = writer.close()
    return FileEntry(
        **stored._asdict(),
        start_key=span.start,
        end_key=span.end,
        crc64xor=0,
        total_kvs=2,
        total_bytes=30,
        min_ts=ts[0],
        max_ts=ts[1],
    )


def write_log(store: ObjectStore, segments: int = 6, rows: int = 50) -> None:
    """A log of segments each of which has all keys, in a file that is longer than the tail of which the hash is recorded."""
    chance = random.Random(7)
    writer = LogWriter(store, describe(), WHOLE, FlushOptions(interval=1e9))
    writer.start(START)
    for ts in range(START, START + segments * STEP, STEP):
        writer.append(
            batch([Change(ts + 1 + at % STEP, b"key%03d" % at, chance.randbytes(2000)) for at in range(rows)])
        )
        writer.flush(ts + STEP)
        save(store, ts + STEP)


def rows_of(log: LogArchive, span: KeyRange, after_ts: int, up_to_ts: int) -> Rows:
    """The rows of a log that a restore would read."""
    found: Rows = set()
    for file in log.files_for(span, after_ts, up_to_ts):
        for part in log.rows(file, span):
            for row in part.to_pylist():
                if after_ts < row["ts"] <= up_to_ts:
                    found.add((row["key"], row["ts"], row["value"], row["expire_ts"], row["deleted"]))
    return found
