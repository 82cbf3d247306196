"""Every kind of object of a backup, of every kind of backup, damaged in every way: `verify` and `restore` find it."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.backup.data import load
from tests.integration.damage.conftest import VARIANTS, Made, Making, Variant, options
from tests.support.damage import FLIPS, KINDS, Case, Victim, by_kind, cases, kind_of
from tests.support.live_cluster import live_cluster
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileEntry, verify_file_content
from tikv_br.errors import BackupDamaged, BackupNotFound, BackupSetError
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.sst.block import ChecksumType
from tikv_br.formats.sst.source import MemorySource
from tikv_br.formats.sst.table import Table
from tikv_br.restore.inspect import FileCheck, inspect_file, inspect_files
from tikv_br.restore.options import RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.verify.options import Finding, Level, VerifyOptions
from tikv_br.verify.run import verify

RECORDS = {"backupmeta", "manifest"}
FILES = {"sst", "parquet"}
UNREAD = {"lock"}
"""Objects of a complete backup that nobody reads any more."""
TOUCHING = {"Download", "Ingest", "MultiIngest", "Upload", "RawPut", "RawBatchPut", "RawDelete", "RawBatchDelete"}
"""RPCs by which a store sees a file, or a row is changed."""


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def made(request: pytest.FixtureRequest, make: Making) -> Made:
    """A sound backup of each kind."""
    variant: Variant = request.param
    return make(variant)


@pytest.fixture
def victim(made: Made, tmp_path: Path) -> Victim:
    """A copy of it."""
    return Victim(tmp_path / "copy", made.objects)


def damaged(made: Made, victim: Victim, searched: Collection[str]) -> Iterator[Case]:
    """Every case, while it is done to the copy; many flips of the kinds that are ``searched``, a few of the others."""
    for case in cases(made.objects, made.older, lambda kind: FLIPS if kind in searched else 2):
        victim.damage(case)
        yield case
        victim.mend(case)


def test_objects_are_of_known_kinds(made: Made) -> None:
    """The objects at the end, and those written in between, have known kinds; each kind of a backup occurs."""
    data = "parquet" if made.variant.file_kind.value == "parquet" else "sst"
    assert by_kind(made.objects).keys() == {"backupmeta", "lock", "manifest", data}
    assert {kind_of(name) for name in made.written} <= KINDS.keys()
    assert {kind_of(name) for name in made.written} >= {"run", "ledger", "lease", "index entry", "index snapshot"}


def found(made: Made, victim: Victim, level: Level) -> tuple[BackupSetError | None, list[Finding]]:
    """Exit of a verification, and its findings."""
    findings: list[Finding] = []
    try:
        verify(VerifyOptions(made.place(victim.folder), level, executor="driver"), on_finding=findings.append)
    except BackupSetError as error:
        return error, findings
    return None, findings


def promised(case: Case) -> Level | None:
    """The level that promises to find it."""
    if case.kind in UNREAD and case.damage != "swapped":
        return None
    if case.kind in FILES and case.damage == "flipped":
        return Level.FILES
    return Level.META


def check_found(made: Made, victim: Victim, case: Case, level: Level) -> tuple[str, str]:
    """Hold what `verify` says at a level against what was done; returns what that was."""
    error, findings = found(made, victim, level)
    if case.kind == "backupmeta" and case.damage == "missing":
        assert isinstance(error, BackupNotFound), (str(case), error)
        assert case.name in error.message
        return case.kind, case.damage
    at = promised(case)
    same_size = all(len(data or b"") == len(made.objects[name]) for name, data in case.change.items())
    if at is Level.META and case.kind in FILES and same_size and case.damage in {"older", "swapped"}:
        at = Level.FILES  # of the very same length: not for a listing to see
    if at is None or (at is Level.FILES and level is Level.META):
        assert (error, findings) == (None, []), str(case)
    else:
        assert type(error) is BackupDamaged, (str(case), level, error, findings)
        assert error.exit_code == 32
        guarded = {name for name in case.change if kind_of(name) not in UNREAD}
        assert any(name in f"{each.object} {each.cause}" for each in findings for name in guarded), (
            str(case),
            findings,
        )
        if (
            not {*map(kind_of, guarded)} & RECORDS
        ):  # one that contradicts the other makes both look wrong, and files missing
            assert {each.object for each in findings} <= guarded, (str(case), findings)
    return case.kind, case.damage


@pytest.mark.parametrize("level", [Level.META, Level.FILES, Level.DATA])
def test_verify_finds_it_at_the_promised_level(made: Made, victim: Victim, level: Level) -> None:
    """And not below; what is named is what was damaged, and what is not damaged is not named."""
    assert found(made, victim, level) == (None, [])
    reads = {Level.META: RECORDS, Level.FILES: FILES}.get(level, set())
    seen = {check_found(made, victim, case, level) for case in damaged(made, victim, reads)}
    assert len(seen) >= 4 * 5


def refusal(made: Made, victim: Victim) -> BackupSetError | None:
    """Error of the restore steps that check the backup."""
    try:
        backup_set = BackupSet.open(open_store(made.place(victim.folder)))
        inspect_files(backup_set, backup_set.files, FileCheck.AUTO, threads=2)
    except BackupSetError as error:
        return error
    return None


def test_restore_checks_find_every_flip(made: Made, victim: Victim) -> None:
    """The same steps as in a whole restore, at 50 places of each kind of object."""
    assert refusal(made, victim) is None
    for case in damaged(made, victim, RECORDS | FILES):
        error = refusal(made, victim)
        if promised(case) is None:
            assert error is None, (str(case), error)
        else:
            assert error is not None, str(case)
            assert any(name in error.message for name in case.change), (str(case), error)
            assert error.exit_code == (31 if (case.kind, case.damage) == ("backupmeta", "missing") else 32), str(case)


def test_each_check_reads_what_it_promises(made: Made, victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory the blocks of tables in clear vouch for them; encrypted, without checksums of blocks, or Parquet, files are hashed."""
    hashed: list[str] = []

    def record(store: ObjectStore, file: FileEntry, readers: int) -> None:
        hashed.append(file.name)
        verify_file_content(store, file, readers)

    monkeypatch.setattr("tikv_br.backupset.backup_set.verify_file_content", record)
    backup_set = BackupSet.open(open_store(made.place(victim.folder)))
    names = [file.name for file in backup_set.files]
    tables = [name for name in names if kind_of(name) == "sst"]
    for check, expected in (
        (FileCheck.IDENTITY, []),
        (FileCheck.BLOCKS, sorted({*names} - {*tables})),
        (FileCheck.AUTO, sorted(names if made.variant.crypter.encrypts else {*names} - {*tables})),
        (FileCheck.CONTENT, sorted(names)),
    ):
        hashed.clear()
        inspect_files(backup_set, backup_set.files, check, threads=2)
        assert sorted(hashed) == expected, check
    if tables:
        monkeypatch.setattr("tikv_br.restore.inspect.ChecksumType", SimpleNamespace(NONE=ChecksumType.CRC32C))
        hashed.clear()
        inspect_files(backup_set, backup_set.files, FileCheck.AUTO, threads=2)
        assert sorted(hashed) == sorted(names), "tables whose blocks have no checksums"


@pytest.mark.parametrize("engine", ["scan", "store"])
def test_every_byte_of_a_large_file_counts(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before its hashed tail, in rows and in the filter of a store; where blocks leave a gap, the file is hashed."""
    chance = random.Random(7)
    folder = tmp_path / "backup"
    with live_cluster(tmp_path / "cluster", ApiVersion.V1, stores=1) as live:
        load(live, {b"row%04d" % number: chance.randbytes(3000) for number in range(400)})
        backup(options(Variant(ApiVersion.V1, engine), live, folder, file_bytes=4 << 20))
    backup_set = BackupSet.open(open_store(StorageLocation("local", str(folder))))
    file = max(backup_set.files, key=lambda file: file.size)
    path = folder / file.name
    path.chmod(0o644)
    data, unhashed = path.read_bytes(), file.size - file.tail_size
    assert unhashed > 1 << 20
    table = Table(MemorySource(data))
    extra = [block.offset + block.size // 2 for block in table.metaindex.values()]
    for at in [*chance.sample(range(unhashed), 100), unhashed - 1, *extra]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(BackupDamaged, match=re.escape(file.name)):
            inspect_file(backup_set, file, FileCheck.AUTO)
    path.write_bytes(data)
    inspect_file(backup_set, file, FileCheck.AUTO)
    left_out = table.index.handles[len(table.index.handles) // 2]
    others = [block for block in table.every_block() if block != left_out]
    monkeypatch.setattr(Table, "every_block", lambda _table: others)
    at = left_out.offset
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(BackupDamaged, match="sha256 of the file"):
        inspect_file(backup_set, file, FileCheck.AUTO)


def test_restore_refuses_before_a_store_sees_a_file(made: Made, victim: Victim) -> None:
    """No store was asked to download, take in or put anything; the same restore of the sound backup asks for it."""
    wanted = RestoreOptions(made.live.config, made.place(victim.folder), allow_overwrite=True)
    made.live.forget_calls()
    for case in damaged(made, victim, set()):
        if promised(case) is None:
            continue
        with pytest.raises(BackupSetError) as caught:
            restore(wanted)
        assert caught.value.exit_code in {31, 32}, str(case)
        assert any(name in caught.value.message for name in case.change), (str(case), caught.value.message)
    assert not touched(made)
    restore(wanted)
    assert touched(made)


def touched(made: Made) -> set[str]:
    """The RPCs by which stores have been given something."""
    return TOUCHING & set(made.live.calls()["rpcs"])
