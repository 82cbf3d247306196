"""Rows of data files, against files that RocksDB wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sst_surgery import flip, write_sst
from tikv_br.backupset.files import FileEntry
from tikv_br.backupset.rows import read_rows
from tikv_br.errors import BackupDamaged, BackupUnsupported
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.columns import SCHEMA
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

V1TTL = KeyCodec(ApiVersion.V1TTL)
V2 = KeyCodec(ApiVersion.V2, 7)
Row = tuple[bytes, bytes, int, int, bool]
"""As in `SCHEMA`."""


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A place for one file."""
    return open_store(parse(str(tmp_path)))


def entry(name: str = "one.sst", start: bytes = b"", end: bytes = b"") -> FileEntry:
    """Entry of a file in a backup."""
    return FileEntry(name, 0, start, end, 0, 0, 0)


def rows(store: ObjectStore, file: FileEntry, codec: KeyCodec, span: KeyRange | None = None) -> list[Row]:
    """Rows as read."""
    found: list[Row] = []
    for batch in read_rows(store, file, codec, span):
        assert batch.num_rows
        assert batch.schema == SCHEMA
        found += [tuple(row.values()) for row in batch.to_pylist()]
    return found


def test_rows_of_a_span(store: ObjectStore, tmp_path: Path) -> None:
    """All rows of the file's range, or those of a part of it: from its start, without its end."""
    write_sst(
        tmp_path / "one.sst", [(b"z" + key, key * 2 + (9).to_bytes(8, "big")) for key in (b"a", b"b", b"c", b"d")]
    )
    everything = [(key, key * 2, 9, 0, False) for key in (b"a", b"b", b"c", b"d")]
    assert rows(store, entry(), V1TTL) == everything
    assert rows(store, entry(end=b"d"), V1TTL) == everything[:3]
    assert rows(store, entry(), V1TTL, KeyRange(b"b", b"c\0")) == everything[1:3]
    assert rows(store, entry(), V1TTL, KeyRange(b"c", b"")) == everything[2:]
    assert rows(store, entry(), V1TTL, KeyRange(b"x", b"")) == []


def test_versions_and_tombstones_are_kept(store: ObjectStore, tmp_path: Path) -> None:
    """For API V2 rows have the user key, every version newest first, and tombstones."""
    key = b"zr\0\0\x07k\0\0\0\xfc"
    written = [(key + (~ts & 2**64 - 1).to_bytes(8, "big"), value) for ts, value in ((30, b"\x02"), (20, b"old\0"))]
    write_sst(tmp_path / "one.sst", written)
    file = entry(start=b"r\0\0\x07", end=b"r\0\0\x08")
    assert rows(store, file, V2) == [(b"k", b"", 0, 30, True), (b"k", b"old", 0, 20, False)]
    assert rows(store, file, V2, KeyRange(b"r\0\0\x07l", b"r\0\0\x08")) == []


def test_damage_names_the_file(store: ObjectStore, tmp_path: Path) -> None:
    """A flipped bit and a key of another keyspace are damage; an unknown kind is refused."""
    sound = write_sst(tmp_path / "one.sst", [(b"za", b"12345678")])
    (tmp_path / "one.sst").write_bytes(flip(sound, 3))
    with pytest.raises(BackupDamaged, match=r"one\.sst is damaged"):
        rows(store, entry(), V1TTL)
    (tmp_path / "one.sst").write_bytes(sound)
    with pytest.raises(BackupDamaged, match=r"one\.sst is damaged"):
        rows(store, entry(start=b"r\0\0\x07", end=b"r\0\0\x08"), V2)
    with pytest.raises(BackupUnsupported, match=r"one\.csv"):
        rows(store, entry("one.csv"), V1TTL)
