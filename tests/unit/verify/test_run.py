"""Verification of small backups on disk, whose files need not be SSTs: the levels that do not look at rows."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.ledgers import begin_backup
from tests.unit.backupset.samples import describe, do_all
from tikv_br.backupset import backupmeta, layout, manifest
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged, BackupNotFound
from tikv_br.progress_events import Event, Notice
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.verify.options import Finding, Level, Subset, VerifyOptions
from tikv_br.verify.run import VerifySummary, verify

PLACES = 12


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """A complete backup of three files of equal length."""
    store = open_store(parse(str(tmp_path / "backup")))
    begin_backup(store).commit(describe(store), do_all(store))
    return tmp_path / "backup"


def run(folder: Path, level: Level, **changes: object) -> tuple[VerifySummary, list[str]]:
    """Verify; the summary and the notes."""
    notes: list[str] = []

    def report(event: Event) -> None:
        if isinstance(event, Notice):
            notes.append(event.message)

    options = VerifyOptions(parse(str(folder)), level, concurrency=2, **changes)  # type: ignore[arg-type]
    return verify(options, report), notes


def findings(folder: Path, level: Level) -> list[Finding]:
    """Verify what is damaged; all findings, of which the error has the number."""
    found: list[Finding] = []
    with pytest.raises(BackupDamaged) as raised:
        verify(VerifyOptions(parse(str(folder)), level, concurrency=2), on_finding=found.append)
    assert raised.value.exit_code == 32
    assert raised.value.message.startswith(f"{len(found)} finding")
    return found


def data_files(folder: Path) -> list[str]:
    """Names of the SSTs."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.sst"))


def store_of(folder: Path) -> ObjectStore:
    """The store."""
    return open_store(parse(str(folder)))


@pytest.mark.parametrize("level", [Level.META, Level.FILES])
def test_a_sound_backup_passes(backup: Path, level: Level) -> None:
    """The summary has the number of files, and of files read, to the byte."""
    summary, notes = run(backup, level)
    size = sum((backup / name).stat().st_size for name in data_files(backup))
    assert (summary.files, summary.foreign_objects, notes) == (3, 0, [])
    assert (summary.files_checked, summary.bytes_read) == ((3, size) if level is Level.FILES else (0, 0))


def test_a_subset_says_what_was_left_out(backup: Path) -> None:
    """One of three files is read; damage to the others stays unseen, and the summary does not hide that."""
    whole = BackupSet.open(store_of(backup)).files
    chosen = Subset.parse("10%").choose(whole, 3)
    for name in set(data_files(backup)) - {file.name for file in chosen}:
        flip(backup / name, 1)
    summary, _notes = run(backup, Level.FILES, subset=Subset.parse("10%"), seed=3)
    assert (summary.files, summary.files_checked, summary.subset, summary.seed) == (3, 1, "10%", 3)


def flip(path: Path, seed: int) -> None:
    """Change one bit at a place drawn by the seed."""
    chance = random.Random(seed)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, seed: int) -> None:
    """Cut at a place drawn by the seed."""
    path.write_bytes(path.read_bytes()[: random.Random(seed).randrange(1, path.stat().st_size)])


def empty(path: Path, _seed: int) -> None:
    """Leave no byte."""
    path.write_bytes(b"")


@pytest.mark.parametrize("seed", range(PLACES))
@pytest.mark.parametrize("damage", [flip, truncate, empty])
@pytest.mark.parametrize("name", [layout.META, layout.MANIFEST])
def test_any_damage_to_the_records_is_found_at_level_meta(
    backup: Path, name: str, damage: Callable[[Path, int], None], seed: int
) -> None:
    """Whatever single bit, or length, changed in a record, that record is named; the files are looked at all the same."""
    damage(backup / name, seed)
    assert {finding.object for finding in findings(backup, Level.META)} == {name}
    flip(backup / data_files(backup)[1], seed)
    assert {finding.object for finding in findings(backup, Level.FILES)} == {name, data_files(backup)[1]}


def test_a_missing_manifest_is_a_finding(backup: Path) -> None:
    """`backupmeta` shows that there must be one, and suffices to check the files."""
    (backup / layout.MANIFEST).unlink()
    flip(backup / data_files(backup)[0], 0)
    assert [(finding.object, finding.level) for finding in findings(backup, Level.FILES)] == [
        (layout.MANIFEST, Level.META),
        (data_files(backup)[0], Level.FILES),
    ]


def test_without_backupmeta_there_is_no_backup(backup: Path) -> None:
    """An unfinished backup is not a damaged one."""
    (backup / layout.META).unlink()
    with pytest.raises(BackupNotFound):
        run(backup, Level.META)


def test_records_that_are_all_unreadable_end_the_verification(backup: Path) -> None:
    """Both records are named, and it is said that nothing else was checked."""
    for name in (layout.META, layout.MANIFEST):
        empty(backup / name, 0)
    found: list[Finding] = []
    with pytest.raises(BackupDamaged, match="nothing else"):
        verify(VerifyOptions(parse(str(backup))), on_finding=found.append)
    assert {finding.object for finding in found} == {layout.META, layout.MANIFEST}


def test_swapped_files_are_found_by_content(backup: Path) -> None:
    """Two neighbours of equal length under each other's names: only the content shows it."""
    one, other = (backup / name for name in data_files(backup)[:2])
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    other.write_bytes(first)
    run(backup, Level.META)
    assert {finding.object for finding in findings(backup, Level.FILES)} == set(data_files(backup)[:2])


def test_all_findings_are_collected(backup: Path) -> None:
    """One file missing, one cut, one altered: three findings, each once, each by the level that saw it first."""
    missing, cut, altered = data_files(backup)
    (backup / missing).unlink()
    truncate(backup / cut, 1)
    flip(backup / altered, 1)
    assert {(finding.object, finding.level) for finding in findings(backup, Level.FILES)} == {
        (missing, Level.META),
        (cut, Level.META),
        (altered, Level.FILES),
    }


def test_foreign_objects_are_noted_and_do_no_harm(backup: Path) -> None:
    """A leftover of a failed attempt and a stranger's file are named; the backup is whole."""
    (backup / "sst" / "leftover_default.sst").write_bytes(b"x")
    (backup / "README").write_bytes(b"x")
    summary, notes = run(backup, Level.META)
    assert summary.foreign_objects == 2
    assert [note.split()[0] for note in notes] == ["README", "sst/leftover_default.sst"]


def test_records_of_a_restore_under_way_are_not_foreign(backup: Path) -> None:
    """They lie in the backup's own folder while a restore runs, or after it was killed."""
    (backup / "tikv-br" / "restore" / "0123456789abcdef").mkdir(parents=True)
    (backup / "tikv-br" / "restore" / "0123456789abcdef" / "begun.json").write_bytes(b"{}")
    assert run(backup, Level.META)[0].foreign_objects == 0


def test_many_foreign_objects_are_counted(backup: Path) -> None:
    """Twenty are named, the rest is a number."""
    for number in range(30):
        (backup / f"stranger{number:02}").write_bytes(b"")
    summary, notes = run(backup, Level.META)
    assert summary.foreign_objects == 30
    assert len(notes) == 21
    assert notes[-1].startswith("10 more")


def rewrite(folder: Path, known: manifest.Manifest) -> None:
    """Make the records agree on another content, seals and all, as a faulty writer would."""
    content = brpb_pb2.BackupMeta.FromString((folder / layout.META).read_bytes())
    decoded = backupmeta.decode(content.SerializeToString())
    data = backupmeta.encode(structs.replace(decoded, files=tuple(known.files)))
    sealed = manifest.dump(structs.replace(known, backupmeta_sha256=hashlib.sha256(data).digest()))
    (folder / layout.META).write_bytes(data)
    (folder / layout.MANIFEST).write_bytes(sealed)


def test_files_that_overlap_are_found(backup: Path) -> None:
    """A key that two files claim would be restored twice, or from the wrong one."""
    known = manifest.load((backup / layout.MANIFEST).read_bytes())
    first, second, third = known.files
    wider = structs.replace(second, start_key=first.start_key + b"\0")
    rewrite(backup, structs.replace(known, files=(first, wider, third)))
    [finding] = findings(backup, Level.META)
    assert (finding.object, finding.level) == (second.name, Level.META)
    assert first.name in finding.cause


@pytest.mark.parametrize("field", ["crc64xor", "total_kvs", "total_bytes", "backup_size"])
def test_statistics_that_do_not_add_up_are_found(backup: Path, field: str) -> None:
    """The manifest's sums are those of its files."""
    known = manifest.load((backup / layout.MANIFEST).read_bytes())
    wrong = structs.replace(known.statistics, **{field: getattr(known.statistics, field) + 1})
    rewrite(backup, structs.replace(known, statistics=wrong))
    [finding] = findings(backup, Level.META)
    assert finding.object == layout.MANIFEST
    assert str(getattr(known.statistics, field)) in finding.cause


def test_a_contradiction_between_the_records_is_found(backup: Path) -> None:
    """Each record is valid, but `backupmeta` is not the one that the manifest was written with."""
    content = brpb_pb2.BackupMeta.FromString((backup / layout.META).read_bytes())
    content.cluster_version += "x"
    (backup / layout.META).write_bytes(content.SerializeToString(deterministic=True))
    assert json.loads((backup / layout.MANIFEST).read_bytes())
    assert [finding.object for finding in findings(backup, Level.META)] == [layout.META]
