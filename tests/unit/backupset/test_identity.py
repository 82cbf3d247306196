from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.backupset.samples import write_file
from tikv_br.backupset.coverage import KeyRange
from tikv_br.backupset.files import TAIL_SIZE, FileEntry
from tikv_br.backupset.identity import verify_file_content, verify_file_identity
from tikv_br.errors import BackupDamaged
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

SIZE = 3 * TAIL_SIZE
WHOLE = KeyRange(b"", b"")


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A directory."""
    return open_store(parse(str(tmp_path)))


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


def test_the_very_file_passes(store: ObjectStore, file: FileEntry) -> None:
    """No false alarm."""
    verify_file_identity(store, file)
    verify_file_content(store, file)


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


def test_mark_of_the_storage(store: ObjectStore, file: FileEntry, data: bytes) -> None:
    """Another mark makes us read the file: an altered one is damage, one copied back and forth is not."""
    marked = replace(file, etag="as-recorded")
    verify_file_identity(store, marked)
    store.put(file.name, _altered(data, 0))
    with pytest.raises(BackupDamaged, match="altered"):
        verify_file_identity(store, marked)
    verify_file_identity(store, marked, etag_counts=False)


def test_files_of_the_go_tool(store: ObjectStore, file: FileEntry, data: bytes) -> None:
    """Where only length and sha256 are recorded, those are compared; a length of 0 is none recorded."""
    recorded = FileEntry(file.name, SIZE, b"", b"", 0, 0, 0, sha256=file.sha256)
    verify_file_identity(store, recorded)
    verify_file_content(store, recorded)
    verify_file_identity(store, replace(recorded, size=0))
    store.put(file.name, data[:-1])
    with pytest.raises(BackupDamaged, match="bytes, not the recorded"):
        verify_file_identity(store, recorded)
    with pytest.raises(BackupDamaged, match="no recorded sha256"):
        verify_file_content(store, replace(recorded, sha256=b"", size=0))
