"""Files of stores rewritten, against rows that RocksDB wrote into them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import fastcrc
import pyarrow.parquet as pq
import pytest

from tests.support.sst_surgery import write_sst
from tests.unit.dataflow.samples import options
from tikv_br.backup.store import RewriteTotals, rewrite_files
from tikv_br.backup.store_responses import StoredSst
from tikv_br.backupset.files import FileEntry, FileKind
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.convert import Conversion
from tikv_br.dataflow.write import DataFiles
from tikv_br.errors import BackupDamaged
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.checksum import Checksum
from tikv_br.formats.keys import codec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

V1TTL, V2 = ApiVersion.V1TTL, ApiVersion.V2
INTERVAL = KeyRange(b"r\0\0\7", b"r\0\0\x08")
Row = tuple[bytes, bytes, int, int, bool]
"""Key, value, expiry, ts, deleted."""
ROWS: list[Row] = [
    (b"", b"first", 0, 11, False),
    (b"a", b"", 900, 12, False),
    (b"b", b"new", 0, 14, False),
    (b"b", b"old", 0, 13, False),
    (b"c", b"", 0, 16, True),
    (b"c", b"was", 0, 15, False),
    (b"d", b"\2", 901, 17, False),
]
ALIVE = [row for row in ROWS if row[1] not in {b"old", b"was"} and not row[4]]


def internal(rows: Iterable[Row]) -> list[tuple[bytes, bytes]]:
    """Rows as a V2 store holds them in keyspace 7, by the rules of the public documentation."""
    found = []
    for key, value, expire, ts, deleted in rows:
        tail = expire.to_bytes(8, "big") + b"\1" if expire else (b"\2" if deleted else b"\0")
        found.append((b"z" + codec.encode(b"r\0\0\7" + key) + (2**64 - 1 - ts).to_bytes(8, "big"), value + tail))
    return found


def sums(rows: Iterable[Row], prefix: bytes) -> Checksum:
    """Sums as a store computes them."""
    crc = size = count = 0
    for key, value, *_ in rows:
        crc ^= fastcrc.crc64.xz(prefix + key + value)
        size += len(prefix + key + value)
        count += 1
    return Checksum(crc, count, size)


def stored(folder: Path, number: int, rows: list[Row], said: Checksum | None = None) -> StoredSst:
    """A file as a store writes and describes it."""
    name = f"sst/{number}.sst"
    (folder / "sst").mkdir(exist_ok=True)
    data = write_sst(folder / name, internal(rows))
    alive = said or sums([row for row in rows if row in ALIVE], b"r\0\0\7")
    file = brpb_pb2.File(
        name=name,
        size=len(data),
        start_key=INTERVAL.start,
        end_key=INTERVAL.end,
        crc64xor=alive.crc64xor,
        total_kvs=alive.total_kvs,
        total_bytes=alive.total_bytes,
    )
    return StoredSst(name, file)


def rewritten(
    folder: Path, files: list[StoredSst], target: ApiVersion, kind: FileKind = FileKind.PARQUET
) -> tuple[RewriteTotals, tuple[FileEntry, ...]]:
    """Rewrite, in small files, and leave nothing when it fails."""
    store = open_store(parse(str(folder)))
    converter = Conversion(V2, target, 99, drop_ttl=True).of(INTERVAL)
    made = DataFiles(store, INTERVAL, "try", converter, options(file_kind=kind, file_bytes=1))
    try:
        total = list(rewrite_files(store, files, converter, made))[-1]
        return total, made.finish()
    except BaseException:
        made.abandon()
        raise


@pytest.mark.parametrize("target", ApiVersion)
def test_live_rows_alone_are_rewritten_and_the_rest_is_counted(tmp_path: Path, target: ApiVersion) -> None:
    """The newest version of each key, with what the target can hold of it; tombstones and lost expiries are counted."""
    total, files = rewritten(tmp_path, [stored(tmp_path, 0, ROWS[:4]), stored(tmp_path, 1, ROWS[4:])], target)
    rows = [tuple(row.values()) for file in files for row in pq.read_table(tmp_path / file.name).to_pylist()]
    assert rows == [
        (key, value, expire if target.has_ttl else 0, ts if target is V2 else 0, False)
        for key, value, expire, ts, _ in ALIVE
    ]
    assert total == RewriteTotals(
        sums(ALIVE, b"r\0\0\7"), dropped_ttls=0 if target.has_ttl else 2, dropped_tombstones=1
    )
    prefix = b"r\0\0\7" if target is V2 else b""
    assert sum((Checksum(f.crc64xor, f.total_kvs, f.total_bytes) for f in files), Checksum()) == sums(ALIVE, prefix)
    assert (files[0].start_key, files[-1].end_key) == ((INTERVAL.start, INTERVAL.end) if target is V2 else (b"", b""))
    if target is V2:
        assert (min(f.min_ts for f in files), max(f.max_ts for f in files)) == (11, 17)


@pytest.mark.parametrize("kind", FileKind)
def test_a_file_that_is_not_what_its_store_said_leaves_nothing(tmp_path: Path, kind: FileKind) -> None:
    """One row less than its store counted: the task fails, and no new file stays."""
    sound = stored(tmp_path, 0, ROWS[:4])
    short = stored(tmp_path, 1, ROWS[4:], said=sums(ALIVE, b"r\0\0\7"))
    with pytest.raises(BackupDamaged, match=r"sst/1\.sst differs from what its store reported"):
        rewritten(tmp_path, [sound, short], V1TTL, kind)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"0.sst", "1.sst"}


def test_without_rows_there_is_no_file(tmp_path: Path) -> None:
    """Stores that had nothing to write leave an interval without files."""
    assert rewritten(tmp_path, [], V2) == (RewriteTotals(), ())
