"""What the commands say of transactional backups whose files real stores wrote, by tikv-br and by BR."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.support.txn_backups import make_backup, make_foreign_backup, recorded_codec, recorded_files, recorded_rows
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.rows import chosen_codec, count_fences, find_value, has_rows, read_rows
from tikv_br.errors import BackupDamaged
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

Maker = Literal["tikv-br", "br", "br-flat"]


@pytest.fixture(params=["v1", "v2"])
def recorded(request: pytest.FixtureRequest, golden: Path) -> Path:
    """The folder of a recorded backup."""
    return golden / "txn" / str(request.param) / "full"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """An empty place."""
    return open_store(parse(f"local://{tmp_path / 'backup'}"))


@pytest.fixture(params=["tikv-br", "br", "br-flat"])
def backup(request: pytest.FixtureRequest, recorded: Path, store: ObjectStore) -> BackupSet:
    """That backup, as one of the tools leaves it."""
    return made_by(request.param, store, recorded)


def made_by(maker: Maker, store: ObjectStore, folder: Path) -> BackupSet:
    """A backup of one of the tools."""
    if maker == "tikv-br":
        make_backup(store, folder)
    else:
        make_foreign_backup(store, folder, is_flat=maker == "br-flat")
    return BackupSet.open(store, KeyMode.TXN)


def test_every_row_is_read(backup: BackupSet, recorded: Path) -> None:
    """The rows of all parts are those that were written; the sums of all files count each once."""
    rows = recorded_rows(recorded)
    found = []
    for file, values in backup.pairs:
        codec = backup.codec_of(file.key_range)
        for batch in read_rows(backup.store, file, codec, values=values):
            found += [(codec.rpc_key(row["key"]), row["value"]) for row in batch.to_pylist()]
    assert sorted(found) == rows
    assert backup.totals.total_kvs == len(rows)


def test_rows_of_a_range(backup: BackupSet, recorded: Path) -> None:
    """A range is cut out of both files of a part."""
    rows = recorded_rows(recorded)
    for first in range(0, len(rows), 5):
        wanted = dict(rows[first : first + 3])
        span = KeyRange(min(wanted), max(wanted) + b"\0")
        assert has_rows(backup, [span])
        found: dict[bytes, bytes] = {}
        for file, values in backup.pairs:
            codec = backup.codec_of(file.key_range)
            start, end = max(span.start, file.start_key), min(span.end, file.end_key or span.end)
            if start < end:
                for batch in read_rows(backup.store, file, codec, KeyRange(start, end), values):
                    found |= {codec.rpc_key(row["key"]): row["value"] for row in batch.to_pylist()}
        assert found == wanted


def test_every_key_is_found(backup: BackupSet, recorded: Path) -> None:
    """Short and long values, the empty key, and no others."""
    codec = chosen_codec(backup, "")
    assert codec.prefix == (b"" if recorded.parent.name == "v1" else b"x\0\0\1")
    for key, value in recorded_rows(recorded):
        found = find_value(backup, codec.user_key(key))
        assert found is not None
        assert (found.stored.value, found.stored.expire_ts, found.stored.deleted) == (value, 0, False)
        assert 0 < found.ts <= backup.backup_ts
        assert found.file.endswith("_write.sst" if len(value) <= 255 else "_default.sst")
        assert find_value(backup, codec.user_key(key) + b"\0\0no such key") is None


@pytest.mark.parametrize("backup", ["tikv-br"], indirect=True)
def test_a_value_that_is_missing(backup: BackupSet, recorded: Path) -> None:
    """A part without the file of long values is damaged, as is one without that of records."""
    pair = next(pair for pair in backup.pairs if pair.values is not None)
    codec = backup.codec_of(pair.file.key_range)
    with pytest.raises(BackupDamaged, match=f"{pair.file.name} is damaged: a record without its value"):
        list(read_rows(backup.store, pair.file, codec))
    del recorded


def test_files_without_their_records(recorded: Path, store: ObjectStore) -> None:
    """A backup with values of transactions and no commits of the same range is damaged."""
    backup = made_by("br", store, recorded)
    lonely = [file for file in backup.files if file.cf == "default"]
    with pytest.raises(BackupDamaged, match=f"{lonely[0].name} has values of transactions, but no file"):
        _ = BackupSet(**{name: getattr(backup, name) for name in backup.__slots__} | {"files": tuple(lonely)}).pairs


def test_fences_are_counted(golden: Path, store: ObjectStore, recorded: Path) -> None:
    """Two rows have fences in the recording of them, none in the others."""
    for folder, expected in ((recorded, 0), (recorded.parent / "gc-fence", 2)):
        place = open_store(store.location.child(folder.name))
        backup = made_by("tikv-br", place, folder)
        assert sum(count_fences(place, pair.file) for pair in backup.pairs) == expected
    del golden


def test_another_tool_sees_the_same(recorded: Path, store: ObjectStore) -> None:
    """What BR's records do not have is taken from the files."""
    backup = made_by("br", store, recorded)
    assert backup.manifest is None
    assert backup.ranges == tuple(sorted({KeyRange(file.start_key, file.end_key) for file in recorded_files(recorded)}))
    assert backup.api_version is recorded_codec(recorded).api_version
    assert (backup.backup_ts > 0, backup.key_mode) == (True, KeyMode.TXN)
