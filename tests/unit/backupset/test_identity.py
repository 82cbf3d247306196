from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from tests.support.sst_surgery import write_sst
from tests.unit.backupset.samples import write_file
from tikv_br.backupset.files import TAIL_SIZE, FileEntry, verify_file_content, verify_file_identity
from tikv_br.errors import BackupDamaged
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import CHUNK_SIZE, ObjectStore
from tikv_br.storage.local import LocalObjectStore

SIZE = 3 * TAIL_SIZE
WHOLE = KeyRange(b"", b"")


@pytest.fixture
def data() -> bytes:
    """Bytes of a file of three tails."""
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def file(store: ObjectStore, data: bytes) -> FileEntry:
    """The file, written."""
    return write_file(store, "sst/a_default.sst", data, WHOLE)


def _altered(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_missing_file_is_named(store: ObjectStore, file: FileEntry) -> None:
    """A file that is gone is damage of the backup, by its name."""
    store.delete(file.name)
    for verify in (verify_file_identity, verify_file_content):
        with pytest.raises(BackupDamaged, match=r"sst/a_default\.sst is missing"):
            verify(store, file)


def _damages(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Other contents, and whether two small requests notice them."""
    yield data[:-1], True
    yield data + b"x", True
    yield b"", True
    yield _altered(data, SIZE - 1), True
    yield _altered(data, SIZE - TAIL_SIZE), True
    yield random.Random(2).randbytes(SIZE), True
    yield _altered(data, SIZE - TAIL_SIZE - 1), False
    yield _altered(data, 0), False


def test_other_files(store: ObjectStore, file: FileEntry, data: bytes) -> None:
    """Cut, grown, altered at the end, or another file of that name and size is seen at once; the rest by its sha256."""
    for other, seen_at_once in _damages(data):
        store.put(file.name, other)
        with pytest.raises(BackupDamaged, match="sst/a_default"):
            verify_file_content(store, file)
        if seen_at_once:
            with pytest.raises(BackupDamaged, match="sst/a_default"):
                verify_file_identity(store, file)
        else:
            verify_file_identity(store, file)


def _sst(folder: Path, chance: random.Random, rows: int = 1000) -> bytes:
    return write_sst(folder / "scratch", [(b"zk%04d" % row, chance.randbytes(300)) for row in range(rows)])


def _parquet(_folder: Path, chance: random.Random, rows: int = 1000) -> bytes:
    stream = io.BytesIO()
    keys = [b"k%04d" % row for row in range(rows)]
    values = [chance.randbytes(300) for _ in keys]
    pq.write_table(
        pa.table({"key": keys, "value": values}, pa.schema({"key": pa.large_binary(), "value": pa.large_binary()})),
        stream,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    return stream.getvalue()


@pytest.mark.parametrize(("name", "make"), [("sst/a_default.sst", _sst), ("parquet/a.parquet", _parquet)])
def test_the_kind_of_damage_is_told(store: ObjectStore, tmp_path: Path, name: str, make: Callable[..., bytes]) -> None:
    """Empty, truncated, too long, altered, or the valid file of another part or backup: the message has both figures."""
    data, other = make(tmp_path, random.Random(1)), make(tmp_path, random.Random(2))
    file = write_file(store, name, data, WHOLE)
    half, size = len(data) // 2, f"{len(data):,}"
    hashes = r"expected [0-9a-f]{16}…, found [0-9a-f]{16}…\)"
    longer, shorter = (make(tmp_path, random.Random(3), rows) for rows in (1100, 900))
    assert len(other) == len(data)
    for stored, problem in (
        (b"", rf"is empty \(0 of {size} bytes\)"),
        (data[:half], rf"is truncated \({half:,} of {size} bytes\)"),
        (data + b"x", rf"is longer than recorded \({len(data) + 1:,} bytes instead of {size}\)"),
        (longer, rf"belongs to another part .*recorded file \({len(longer):,} bytes instead of {size}\)"),
        (shorter, rf"belongs to another part .*recorded file \({len(shorter):,} bytes instead of {size}\)"),
        (_altered(data, half), rf"has a checksum mismatch \(sha256 of the file: {hashes}"),
        (
            other,
            rf"belongs to another part or to another backup: its own checksums are right, but it is not the recorded file \(sha256 of the file: {hashes}",
        ),
    ):
        store.put(name, stored)
        with pytest.raises(BackupDamaged, match=rf"^{name} {problem}$"):
            verify_file_content(store, file)
    last = r"sha256 of the last 65,536 bytes: "
    for stored, problem in (
        (_altered(data, len(data) - 100), rf"has a checksum mismatch \({last}{hashes}"),
        (_altered(data, len(data) - 60_000), rf"has a checksum mismatch \({last}{hashes}"),
        (
            other,
            rf"belongs to another part or to another backup: its own checksums are right, but it is not the recorded file \({last}{hashes}",
        ),
    ):
        store.put(name, stored)
        with pytest.raises(BackupDamaged, match=rf"^{name} {problem}$"):
            verify_file_identity(store, file)


def test_mark_of_the_storage(store: ObjectStore, file: FileEntry, data: bytes) -> None:
    """Another mark makes us read the file: an altered one is damage, one copied back and forth is not."""
    marked = structs.replace(file, etag="as-recorded")
    verify_file_identity(store, marked)
    store.put(file.name, _altered(data, 0))
    with pytest.raises(BackupDamaged, match="checksum mismatch"):
        verify_file_identity(store, marked)
    verify_file_identity(store, marked, etag_counts=False)


def test_files_of_the_go_tool(store: ObjectStore, file: FileEntry, data: bytes) -> None:
    """Recorded length and sha256 are compared; a length of 0 means that none was recorded."""
    recorded = FileEntry(file.name, SIZE, b"", b"", 0, 0, 0, sha256=file.sha256)
    verify_file_identity(store, recorded)
    verify_file_content(store, recorded)
    verify_file_identity(store, structs.replace(recorded, size=0))
    store.put(file.name, data[:-1])
    with pytest.raises(BackupDamaged, match=r"is truncated \([0-9,]+ of [0-9,]+ bytes\)"):
        verify_file_identity(store, recorded)
    with pytest.raises(BackupDamaged, match="no recorded sha256"):
        verify_file_content(store, structs.replace(recorded, sha256=b"", size=0))


def test_a_large_file_is_read_by_several_requests_at_a_time(store: ObjectStore) -> None:
    """Each request waits until there are four; the hash is of the bytes in their order."""
    chance = random.Random(4)
    file = write_file(store, "sst/large_default.sst", chance.randbytes(4 * CHUNK_SIZE), WHOLE)
    together = threading.Barrier(4)

    class Slow(LocalObjectStore):
        def get_range(self, name: str, offset: int, length: int) -> bytes:
            together.wait(timeout=30)
            return super().get_range(name, offset, length)

    verify_file_content(Slow(store.location), file, readers=4)
