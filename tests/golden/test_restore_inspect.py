"""The checks of a restore on real backups, sound and damaged, before any store gets a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tools import GOLDEN_BACKUPS
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged
from tikv_br.restore.inspect import FileCheck, FileFacts, inspect_files
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse


def inspect(folder: Path, check: FileCheck = FileCheck.AUTO) -> dict[str, FileFacts]:
    """Open the backup and look at all of its files."""
    backup = BackupSet.open(open_store(parse(f"local://{folder}")))
    return inspect_files(backup, backup.files, check, 4)


@pytest.mark.parametrize("name", GOLDEN_BACKUPS)
def test_real_backups_are_sound(golden: Path, name: str) -> None:
    """Nothing that the Go tool wrote is refused; its V2 rows have timestamps, its V1 rows have none."""
    facts = inspect(golden / "backups" / name / "data")
    assert facts
    assert all(
        (inspected.max_ts > 0) == name.endswith(("v2", "ranged", "rpc", "3stores")) for inspected in facts.values()
    )


@pytest.mark.parametrize("name", GOLDEN_BACKUPS)
def test_few_files_are_divided(golden: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ascending keys inside each file's range: any key divides the sums well, and those of V2 have the file's prefix."""
    monkeypatch.setattr("tikv_br.restore.inspect.PIECE_BYTES", 1)
    backup = BackupSet.open(open_store(parse(f"local://{golden / 'backups' / name / 'data'}")))
    threads = 4 * len(backup.files)
    for file in backup.files:
        cuts = inspect_files(backup, backup.files, FileCheck.AUTO, threads)[file.name].cuts
        bounds = [file.start_key, *cuts, *filter(None, [file.end_key])]
        assert bounds == sorted(set(bounds))
        assert len(cuts) < 4


def largest(folder: Path) -> Path:
    """The largest SST."""
    return max(folder.rglob("*.sst"), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    """Cut the last bytes off."""
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    """Change one bit in the middle of the rows."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    """Leave a file without a byte."""
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """Put another file of the same length in its place."""
    other = min(path.parent.glob("*.sst"), key=lambda each: each.stat().st_size)
    path.write_bytes(other.read_bytes().ljust(path.stat().st_size, b"\0"))


@pytest.mark.parametrize("damage", [truncate, flip, empty, swap, Path.unlink])
def test_a_damaged_file_is_refused_by_name(copied: Path, damage: Callable[[Path], None]) -> None:
    """Missing, empty, cut, altered or swapped: each is found by reading, and named."""
    victim = largest(copied)
    damage(victim)
    with pytest.raises(BackupDamaged, match=victim.name.partition("_")[0]):
        inspect(copied)


def test_a_wrong_row_count_in_backupmeta_is_noticed(copied: Path) -> None:
    """An edited count contradicts what the file says of itself."""
    path = copied / "backupmeta"
    meta = brpb_pb2.BackupMeta.FromString(path.read_bytes())
    meta.files[0].total_kvs += 1
    path.write_bytes(meta.SerializeToString())
    with pytest.raises(BackupDamaged, match="rows"):
        inspect(copied)
