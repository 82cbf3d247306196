from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.backupset.samples import write_file
from tikv_br.backupset.files import TAIL_SIZE, FileWriter, totals
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    """A directory."""
    return open_store(parse(str(tmp_path_factory.mktemp("store"))))


@settings(max_examples=100)  # each one syncs a file to the disk
@given(st.lists(st.integers(0, 3 * TAIL_SIZE), max_size=5), st.binary(min_size=1, max_size=9))
def test_identity_is_that_of_the_stored_bytes(store: ObjectStore, sizes: list[int], pattern: bytes) -> None:
    """However the bytes were cut into writes, length and both hashes are those of the object."""
    with FileWriter(store, "file") as writer:
        for size in sizes:
            writer.write(memoryview((pattern * size)[:size]))
        stored = writer.close()
    data = Path(store.location.path, "file").read_bytes()
    assert len(data) == sum(sizes)
    assert stored == (
        "file",
        len(data),
        hashlib.sha256(data).digest(),
        hashlib.sha256(data[-TAIL_SIZE:]).digest(),
        min(len(data), TAIL_SIZE),
        "",
        b"",
    )


def test_unclosed_file_does_not_exist(store: ObjectStore) -> None:
    """A task that fails in the middle of a file leaves none."""
    with FileWriter(store, "unfinished") as writer:
        writer.write(b"x")
    assert "unfinished" not in {info.name for info in store.list()}


def test_totals(store: ObjectStore) -> None:
    """Sums, and exclusive or for the checksum."""
    files = [write_file(store, name, name.encode() * 3, KeyRange(b"", b"")) for name in ("one", "other")]
    assert totals(files) == (files[0].crc64xor ^ files[1].crc64xor, 24, 72, 24)
    assert totals([]) == (0, 0, 0, 0)
