from __future__ import annotations

from pathlib import Path

import pytest

from tests.faulty_store import FaultyStore
from tikv_br.backupset import lock
from tikv_br.errors import BackupPathInUse, StorageError
from tikv_br.storage.base import ObjectInfo, ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A directory."""
    return open_store(parse(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("backupmeta", "holds a backup already"),
        ("backup.lock", "is being written, or was broken off"),
        ("1/4_2_default.sst", r"holds 1/4_2_default\.sst"),
        ("tikv-br/manifest.json", "a part of another backup"),
        ("tikv-br/ledger/x-1.json", "a part of another backup"),
        ("older/sst/x_default.sst", "a part of another backup"),
    ],
)
def test_path_in_use(store: ObjectStore, name: str, sentence: str) -> None:
    """A backup, a lock, or any piece of another backup makes a path unfit, and the message says which."""
    store.put(name, b"x")
    with pytest.raises(BackupPathInUse, match=sentence):
        lock.check_path_free(store)


def test_other_objects_do_not_matter(store: ObjectStore) -> None:
    """Files that belong to no backup leave a path free, as with the Go tool."""
    store.put("README.txt", b"x")
    store.put("notes/backupmeta.txt", b"x")
    lock.check_path_free(store)


def test_lock_is_taken_once(store: ObjectStore) -> None:
    """The second run is refused until the first has given the path back; the text has the two lines of its kind."""
    lock.acquire(store)
    with pytest.raises(BackupPathInUse, match="another run"):
        lock.acquire(store)
    first, second, rest = store.get("backup.lock").split(b"\n")
    assert (first, rest) == (b"DO NOT DELETE", b"")
    assert second
    for _twice in range(2):
        lock.release(store)
    lock.acquire(store)


class _CarelessStore(FaultyStore):
    """A server that ignores If-None-Match, as some S3 servers do."""

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Overwrite."""
        return self.put(name, data)


def test_storage_without_conditional_writes_is_refused(store: ObjectStore) -> None:
    """Where a lock would lock nothing out, we say so before a single file is written, and leave nothing."""
    with pytest.raises(StorageError, match="ignores conditional writes"):
        lock.acquire(_CarelessStore(store, ""))
    assert list(store.list()) == []
