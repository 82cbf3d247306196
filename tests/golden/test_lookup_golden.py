"""Single rows out of backups that the Go TiKV-BR made, against the rows that must come out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.rows import find_value, keyspaces_of
from tikv_br.errors import BackupDamaged, UsageError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import PREFIX_SIZE
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse

EVERY = 25
"""Rows between two that are looked up."""


def opened(folder: Path) -> BackupSet:
    """A golden backup."""
    return BackupSet.open(open_store(parse(str(folder / "data"))))


def rows_of(folder: Path) -> list[dict[str, str | int]]:
    """Expected rows."""
    data = zstandard.ZstdDecompressor().stream_reader((folder / "expected.jsonl.zst").read_bytes()).read()
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize("name", ["v1", "v1ttl", "v1_to_v2", "v1ttl_to_v2", "v2", "v2_3stores", "v2_ks4242_rpc"])
def test_rows_are_found(golden: Path, name: str) -> None:
    """Value, expiry and ts of rows all over the backup are those recorded; a key between rows is not found."""
    folder = golden / "backups" / name
    backup = opened(folder)
    rows = rows_of(folder)
    prefix = PREFIX_SIZE if backup.api_version is ApiVersion.V2 else 0
    present = {bytes.fromhex(str(row["k"]))[prefix:] for row in rows}
    for row in [*rows[::EVERY], rows[-1]]:
        key = bytes.fromhex(str(row["k"]))[prefix:]
        found = find_value(backup, key)
        assert found is not None
        assert (found.stored.value.hex(), found.stored.expire_ts, found.stored.deleted) == (row["v"], row["e"], False)
        if "ts" in row:
            assert found.ts == row["ts"]
        if key + b"\0" not in present:
            assert find_value(backup, key + b"\0") is None


def test_keyspace_of_the_backup_is_the_default(golden: Path) -> None:
    """A backup of one keyspace needs no --keyspace; another one is outside of it."""
    backup = opened(golden / "backups" / "v2_ks4242_rpc")
    assert keyspaces_of(backup) == (4242,)
    with pytest.raises(UsageError, match="outside the backup's ranges"):
        find_value(backup, b"k", keyspace_id=0)


def test_key_outside_of_the_range_is_no_absent_key(golden: Path) -> None:
    """A ranged backup reports that a key is outside its range, instead of "not found"."""
    with pytest.raises(UsageError, match="outside the backup's ranges"):
        find_value(opened(golden / "backups" / "v2_ranged"), b"\xff" * 20)


def test_keyspace_where_there_are_none(golden: Path) -> None:
    """V1 has no keyspaces."""
    with pytest.raises(UsageError, match="--keyspace"):
        find_value(opened(golden / "backups" / "v1"), b"k", keyspace_id=7)


def test_damaged_file_is_named(golden: Path, tmp_path: Path) -> None:
    """A flipped bit in the block that is read, or a cut file, is damage with the file's name."""
    folder = golden / "backups" / "v1"
    rows = rows_of(folder)
    row = rows[len(rows) // 2]
    key = bytes.fromhex(str(row["k"]))
    found = find_value(opened(folder), key)
    assert found is not None
    for source in (folder / "data").rglob("*"):
        if source.is_file():
            target = tmp_path / "data" / source.relative_to(folder / "data")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    victim = tmp_path / "data" / found.file
    whole = victim.read_bytes()
    for damaged in (bytes(byte ^ 1 for byte in whole[: len(whole) // 2]) + whole[len(whole) // 2 :], whole[:-1]):
        victim.write_bytes(damaged)
        with pytest.raises(BackupDamaged, match=found.file):
            find_value(opened(tmp_path), key)
