"""Commands read transactional backups whose files real stores wrote, by tikv-br and by BR."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from msgspec import structs

from tests.support.txn_backups import make_backup, make_foreign_backup, recorded_codec, recorded_files, recorded_rows
from tests.unit.formats.sst.tables import Row
from tests.unit.formats.sst.tables import read as read_table
from tests.unit.formats.sst.tables import write as write_table
from tikv_br import records
from tikv_br.backupset import prune
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import ENTRIES, Index, entry_of, rebuild
from tikv_br.backupset.prune import Policy
from tikv_br.backupset.rows import chosen_codec, count_fences, find_value, has_rows, read_rows
from tikv_br.cli.main import run
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.errors import BackupDamaged, BackupUnsupported, CrypterMismatch
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import Crypter, SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.verify.options import Finding, Level, Subset, VerifyOptions
from tikv_br.verify.run import verify

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


def test_the_tool_that_made_it_is_shown(backup: BackupSet, capsys: pytest.CaptureFixture[str]) -> None:
    """A backup of TiDB's tool is not one of the Go TiKV-BR."""
    assert run(["show", backup.store.location.redacted(), "--output", "json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])["made_by"]
    assert shown.startswith("tikv-br ") if backup.manifest else shown == "TiDB BR"


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
        _ = BackupSet(
            **{name: getattr(backup, name) for name in backup.__struct_fields__} | {"files": tuple(lonely)}
        ).pairs


def test_fences_are_counted(golden: Path, store: ObjectStore, recorded: Path) -> None:
    """Two rows have fences in the recording of them, none in the others."""
    for folder, expected in ((recorded, 0), (recorded.parent / "gc-fence", 2)):
        place = open_store(store.location.child(folder.name))
        backup = made_by("tikv-br", place, folder)
        assert sum(count_fences(place, pair.file) for pair in backup.pairs) == expected
    del golden


def test_another_tool_sees_the_same(recorded: Path, store: ObjectStore) -> None:
    """Facts that BR's records lack are taken from the files."""
    backup = made_by("br", store, recorded)
    assert backup.manifest is None
    assert backup.ranges == tuple(sorted({KeyRange(file.start_key, file.end_key) for file in recorded_files(recorded)}))
    assert backup.api_version is recorded_codec(recorded).api_version
    assert (backup.backup_ts > 0, backup.key_mode) == (True, KeyMode.TXN)


@pytest.mark.parametrize("level", [Level.META, Level.FILES, Level.DATA])
@pytest.mark.parametrize("maker", ["tikv-br", "br", "br-flat"])
def test_sound_backups_pass(recorded: Path, store: ObjectStore, maker: Maker, level: Level) -> None:
    """Verification finds nothing wrong, and reads every file and every row once."""
    backup = made_by(maker, store, recorded)
    summary = verify(VerifyOptions(store.location, level, executor="driver"))
    assert summary.files == len(backup.files)
    assert summary.files_checked == (0 if level is Level.META else len(backup.files))
    assert summary.rows_checked == (len(recorded_rows(recorded)) if level is Level.DATA else 0)
    assert summary.foreign_objects == 0


def test_encrypted_backups(recorded: Path, store: ObjectStore) -> None:
    """Both files of a part are decrypted, each with its own IV; without the key nothing is read."""
    key = Crypter.of("aes256-ctr", SecretText("5a" * 32))
    place = open_store(replace(store.location, crypter=key))
    backup = made_by("tikv-br", place, recorded)
    rows = recorded_rows(recorded)
    assert verify(VerifyOptions(place.location, Level.DATA, executor="driver")).rows_checked == len(rows)
    for rpc_key, value in rows:
        found = find_value(backup, backup.codec_of(backup.ranges[0]).user_key(rpc_key))
        assert found is not None
        assert found.stored.value == value
    with pytest.raises(CrypterMismatch):
        BackupSet.open(store, KeyMode.TXN)


def test_a_share_has_both_files_of_a_part(recorded: Path, store: ObjectStore) -> None:
    """A subset is one of parts: no row is checked without its value."""
    backup = made_by("tikv-br", store, recorded)
    subset = Subset.parse(f"1/{len(backup.pairs)}")
    summary = verify(VerifyOptions(store.location, Level.DATA, subset=subset, executor="driver"))
    assert summary.files_checked == len(backup.pairs[0].files)


def rewritten(name: str, change: Callable[[list[Row]], list[Row]]) -> Callable[[Path], None]:
    """A change of the rows of a file, in a table that is sound in itself."""

    def rewrite(folder: Path) -> None:
        path = max(folder.rglob(f"*_{name}.sst"), key=lambda each: each.stat().st_size)
        path.write_bytes(write_table(change(read_table(path.read_bytes())))[0])

    return rewrite


def without_a_row(rows: list[Row]) -> list[Row]:
    """All but one in the middle."""
    return [*rows[: len(rows) // 2], *rows[len(rows) // 2 + 1 :]]


def with_another_start(rows: list[Row]) -> list[Row]:
    """The value of another version."""
    (key, value), *rest = rows
    return [(key[:-1] + bytes([key[-1] ^ 1]), value), *rest]


def with_another_value(rows: list[Row]) -> list[Row]:
    """A value with another byte."""
    (key, value), *rest = rows
    return [(key, value[:-1] + bytes([value[-1] ^ 1])), *rest]


def with_a_record_of_no_row(rows: list[Row]) -> list[Row]:
    """A rollback."""
    (key, value), *rest = rows
    return [(key, b"R" + value[1:]), *rest]


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (rewritten("default", without_a_row), "is damaged: a record without its value"),
        (rewritten("write", without_a_row), "(a value without its record|bytes of keys and values|checksum)"),
        (rewritten("default", with_another_start), "is damaged: a (record without its value|value without its record)"),
        (rewritten("default", with_another_value), "has checksum .*, but the backup recorded"),
        (rewritten("write", with_a_record_of_no_row), "neither a put nor a delete"),
        (
            rewritten("default", lambda rows: [*rows[:1], (b"z" + rows[0][0][1:] + b"!", b"")]),
            "_default.sst: .*bytes of ts",
        ),
    ],
)
def test_damage_in_sound_tables(
    recorded: Path, store: ObjectStore, tmp_path: Path, damage: Callable[[Path], None], cause: str
) -> None:
    """Reading every row finds what neither checksums of blocks nor the structure of a file shows; the records have no hash."""
    made_by("br", store, recorded)
    folder = tmp_path / "backup"
    damage(folder)
    meta = brpb_pb2.BackupMeta.FromString((folder / "backupmeta").read_bytes())
    for file in meta.files:
        data = (folder / file.name).read_bytes()
        file.size, file.sha256 = len(data), hashlib.sha256(data).digest()
    (folder / "backupmeta").write_bytes(meta.SerializeToString())
    found = findings(store, Level.DATA)
    assert all(finding.level is Level.DATA and finding.object.endswith("_write.sst") for finding in found)
    assert any(re.search(cause, finding.cause) for finding in found), found
    verify(VerifyOptions(store.location, Level.FILES, executor="driver"))


def findings(store: ObjectStore, level: Level) -> list[Finding]:
    """The findings of a verification."""
    found: list[Finding] = []
    with pytest.raises(BackupDamaged):
        verify(VerifyOptions(store.location, level, executor="driver"), on_finding=found.append)
    return found


def edit(store: ObjectStore, **fields: int) -> None:
    """Change fields of BR's `backupmeta`."""
    meta = brpb_pb2.BackupMeta.FromString(store.get("backupmeta"))
    for name, value in fields.items():
        setattr(meta, name, value)
    store.put("backupmeta", meta.SerializeToString())


def test_rows_that_are_no_part_of_the_snapshot(recorded: Path, store: ObjectStore, tmp_path: Path) -> None:
    """Rows that were committed after backup-ts, and deletes, are damage; a backup of changes is not supported."""
    backup = made_by("br", store, recorded)
    edit(store, end_version=backup.backup_ts - (1 << 40))
    assert any("committed after backup-ts" in finding.cause for finding in findings(store, Level.DATA))
    edit(store, start_version=1)
    with pytest.raises(BackupUnsupported, match="only the changes of transactions"):
        BackupSet.open(store, KeyMode.TXN)
    changes = open_store(parse(f"local://{tmp_path / 'changes'}"))
    made_by("br", changes, recorded.parent / "incremental")
    assert any("a delete" in finding.cause for finding in findings(changes, Level.DATA))


@pytest.mark.parametrize("family", ["default", "write"])
def test_a_missing_file(recorded: Path, store: ObjectStore, family: str) -> None:
    """The listing shows it; the other file of the part is checked all the same."""
    backup = made_by("tikv-br", store, recorded)
    gone = next(file for pair in backup.pairs if pair.values for file in pair.files if file.cf == family)
    store.delete(gone.name)
    assert findings(store, Level.FILES) == [Finding(gone.name, "is missing", Level.META)]
    assert Finding(gone.name, "is missing", Level.META) in findings(store, Level.DATA)


def test_files_of_one_family_that_overlap(recorded: Path, store: ObjectStore) -> None:
    """Only files of different families may have the same range."""
    made_by("br", store, recorded)
    meta = brpb_pb2.BackupMeta.FromString(store.get("backupmeta"))
    file = next(file for file in meta.files if file.cf == "write")
    again = meta.files.add()
    again.CopyFrom(file)
    again.name = f"again_{file.name.replace('/', '_')}"
    store.put(again.name, store.get(file.name))
    store.put("backupmeta", meta.SerializeToString())
    assert any("overlaps the range of" in finding.cause for finding in findings(store, Level.META))


def test_an_index_with_both_modes(golden: Path, recorded: Path, tmp_path: Path) -> None:
    """Raw and transactional backups of a cluster are pruned separately; a rebuilt index is the same; ids, pins and removal work."""
    index = Index(open_store(parse(f"local://{tmp_path}")))
    made = [make_backup(index.store_of(name), recorded) for name in ("one", "two")]
    entries = [entry_of(name, each) for name, each in zip(("one", "two"), made, strict=True)]
    for entry in entries:
        index.add(entry)
    assert {each.entry.id: each.entry for each in index.read()} == {entry.id: entry for entry in entries}
    assert {entry.key_mode for entry in entries} == {KeyMode.TXN}
    assert len({entry.scope for entry in entries}) == 1
    raw = entry_of(
        "raw", structs.replace(made[0], description=structs.replace(made[0].description, key_mode=KeyMode.RAW))
    )
    assert raw.scope != entries[0].scope
    assert json.loads(index.root.get(f"{ENTRIES}/{entries[0].id}.json"))["format_version"] == 2
    assert json.loads(records.dump(raw))["format_version"] == 1
    assert "key_mode" not in json.loads(records.dump(raw))["content"]
    rebuilt = rebuild(index)
    assert (rebuilt.found, rebuilt.added, rebuilt.dropped, rebuilt.problems) == (2, 0, 0, ())
    index.pin(entries[0])
    plan = prune.plan(index, Policy(last=1), include_foreign=False)
    assert len(plan.to_remove) <= 1
    index.unpin(entries[0])
    (doomed,) = prune.plan(index, Policy(last=1), include_foreign=False).to_remove
    assert prune.execute(index, prune.plan(index, Policy(last=1), include_foreign=False)) == []
    assert not list(index.store_of(doomed.path).list())
    assert [each.entry.id for each in index.read()] == [entry.id for entry in entries if entry.id != doomed.id]
    del golden


def test_an_index_of_brs_backups(recorded: Path, tmp_path: Path) -> None:
    """Their scope does not follow the regions, which are all that their records say of ranges."""
    index = Index(open_store(parse(f"local://{tmp_path}")))
    make_foreign_backup(index.store_of("one"), recorded)
    make_foreign_backup(index.store_of("two"), recorded.parent / "gc-fence")
    assert rebuild(index).problems == ()
    entries = [each.entry for each in index.read()]
    assert {entry.path for entry in entries} == {"one", "two"}
    assert {(entry.engine, entry.key_mode) for entry in entries} == {("go", KeyMode.TXN)}
    assert len({entry.scope for entry in entries}) == 1
