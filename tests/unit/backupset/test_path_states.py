from __future__ import annotations

import pytest

from tikv_br.backupset import layout, manifest
from tikv_br.backupset.manifest import PathState
from tikv_br.errors import BackupPathInUse
from tikv_br.storage.base import ObjectStore

LATE_FILE = f"sst/{'0a' * 8}_{'1b' * 8}/0/4/17_default.sst"
"""As a store of ours writes it."""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("backupmeta", "already holds a backup"),
        ("backup.lock", "another tool is writing a backup"),
        ("1/4_2_default.sst", r"holds 1/4_2_default\.sst"),
        ("tikv-br/manifest.json", "part of another backup"),
        ("tikv-br/ledger/x-1.json", "part of another backup"),
        ("tikv-br/run.json", "part of another backup"),
        ("older/sst/x_default.sst", "part of another backup"),
        (f"older/{LATE_FILE}", "part of another backup"),
    ],
)
def test_path_in_use(store: ObjectStore, name: str, sentence: str) -> None:
    """A backup, a foreign lock, or any part of another backup makes a path unusable; the message names it."""
    store.put(name, b"x")
    with pytest.raises(BackupPathInUse, match=sentence):
        manifest.path_state(store)


def test_other_objects_do_not_matter(store: ObjectStore) -> None:
    """Files that belong to no backup leave a path free, as with the Go tool; so does a lease."""
    store.put("README.txt", b"x")
    store.put("notes/backupmeta.txt", b"x")
    store.put("tikv-br/lease/00000001.json", b"x")
    assert manifest.path_state(store) is PathState.FREE


def test_remains_of_our_runs_are_recognized(store: ObjectStore) -> None:
    """A late file, an interrupted run, and a backup whose run had not cleaned up."""
    store.put(LATE_FILE, b"x")
    store.put(f"tikv-br/ledger/{'0a' * 8}-{'1b' * 8}.json", b"x")
    assert manifest.path_state(store) is PathState.REMAINS
    manifest.mark_path(store)
    assert manifest.path_state(store) is PathState.UNFINISHED
    store.put("tikv-br/run.json", b"x")
    store.put("backupmeta", b"x")
    assert manifest.path_state(store) is PathState.COMMITTED


def test_lock_is_put_once(store: ObjectStore) -> None:
    """The second is refused until the first is gone; the text has the two lines of its kind."""
    manifest.mark_path(store)
    with pytest.raises(BackupPathInUse, match="another run"):
        manifest.mark_path(store)
    first, second, rest = store.get("backup.lock").split(b"\n")
    assert (first, rest) == (b"DO NOT DELETE", b"")
    assert second
    for _twice in range(2):
        store.delete(layout.LOCK)
    manifest.mark_path(store)


def test_lock_read_wrongly_once(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit of the lock that was altered on its way makes no stranger of our own unfinished run."""
    manifest.mark_path(store)
    answers = [b"EO" + manifest.LOCK_TEXT[2:], manifest.LOCK_TEXT]
    monkeypatch.setattr(store, "get", lambda _name: answers.pop(0))
    assert manifest.path_state(store) is PathState.UNFINISHED
    assert not answers
