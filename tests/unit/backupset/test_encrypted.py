"""Encrypted backups as sets of records: parts in clear, wrong keys, and damage."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs
from pyspark.sql.types import StructType

from tests.support.ledgers import begin_backup, read_entries
from tests.support.openssl import KEYS, crypt, crypter
from tests.unit.backupset.samples import describe, do_all
from tests.unit.backupset.shelves import index_at, make_foreign
from tikv_br.backupset import backupmeta, layout, ledger
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.index import Index, rebuild
from tikv_br.backupset.prune import remove
from tikv_br.backupset.sealed import seal, unseal
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.read import MergeSources
from tikv_br.datasource.backups import BackupReader
from tikv_br.diff.places import BackupChoice, find_backup
from tikv_br.errors import BackupDamaged, BackupSetError, CrypterMismatch
from tikv_br.storage.base import ObjectSource, ObjectStore
from tikv_br.storage.crypter import PLAIN, Crypter, SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import parse
from tikv_br.verify.checks import read_records

METHOD = "aes256-ctr"
RIGHT_KEY = crypter(METHOD)
OTHER_KEY = Crypter.of(METHOD, SecretText("77" * 32))


def store_at(folder: Path, with_key: Crypter = RIGHT_KEY) -> ObjectStore:
    """A folder as the place of encrypted backups."""
    return open_store(replace(parse(str(folder)), crypter=with_key))


def make(folder: Path, with_key: Crypter = RIGHT_KEY) -> ObjectStore:
    """A complete backup."""
    store = store_at(folder, with_key)
    begin_backup(store).commit(structs.replace(describe(store), encryption=with_key.method), do_all(store))
    return store


@pytest.mark.parametrize("method", KEYS)
def test_openssl_reads_all_of_it(tmp_path: Path, method: str) -> None:
    """`backupmeta` is IV and ciphertext; of each file it has the IV, and the hash of what is stored, not of what was written."""
    make(tmp_path, crypter(method))
    data = (tmp_path / layout.META).read_bytes()
    content = brpb_pb2.BackupMeta.FromString(crypt(method, data[:16], data[16:]))
    assert len({file.cipher_iv for file in content.files}) == len(content.files) == 3
    for file in content.files:
        stored = (tmp_path / file.name).read_bytes()
        plain = crypt(method, file.cipher_iv, stored)
        assert plain.startswith(b"file ")
        assert len(plain) == len(stored) == file.size
        assert hashlib.sha256(stored).digest() == file.sha256


def test_it_opens_with_its_key_and_says_what_it_is(tmp_path: Path) -> None:
    """Records agree, files are the recorded ones, and the same content gave the same bytes."""
    store = make(tmp_path)
    opened = BackupSet.open(store)
    assert opened.encryption == METHOD
    assert opened.manifest is not None
    assert opened.manifest.description.encryption == METHOD
    for file in opened.files:
        opened.verify_identity(file)
        opened.verify_content(file)
    data = store.get(layout.META)
    assert backupmeta.encode(backupmeta.decode(data, crypter(METHOD)), crypter(METHOD)) == data


def test_no_object_holds_a_key_of_the_user_or_of_the_cipher(tmp_path: Path) -> None:
    """Neither records nor files, nor the ledger that a killed run leaves, hold row keys or values or the cipher's key."""
    store = store_at(tmp_path / "b", crypter(METHOD))
    description = structs.replace(describe(store), encryption=METHOD)
    writer = begin_backup(store)
    entries = do_all(store)
    for entry in entries:
        ledger.write_entry(store, entry)
    seen = {info.name: store.get(info.name) for info in store.list()}
    writer.commit(description, entries)
    seen |= {info.name: store.get(info.name) for info in store.list()}
    assert sum(name.startswith(layout.LEDGER) for name in seen) == len(entries)
    assert {layout.META, layout.MANIFEST} < seen.keys()
    for name, data in seen.items():
        if name != layout.LOCK:
            for secret in (b"file ", b"72000000", b"r\0\0\0", bytes.fromhex(KEYS[METHOD]), KEYS[METHOD].encode()):
                assert secret not in data, name


def test_the_ledger_of_another_key_is_not_continued(tmp_path: Path) -> None:
    """A run that goes on after a killed one needs the same key; without encryption it is refused as well."""
    store = store_at(tmp_path)
    entry = do_all(store)[0]
    ledger.write_entry(store, entry)
    assert read_entries(store) == [entry]
    for wrong in (PLAIN, OTHER_KEY):
        with pytest.raises(CrypterMismatch, match="ledger"):
            read_entries(store_at(tmp_path, wrong))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (PLAIN, "is encrypted with aes256-ctr, but no key was passed"),
        (OTHER_KEY, "another key"),
        (crypter("aes128-ctr"), "encrypted with aes256-ctr, but the key is for aes128-ctr"),
    ],
)
def test_the_wrong_key_is_said_to_be_one(tmp_path: Path, wrong: Crypter, says: str) -> None:
    """No key, another key, another method: each has its sentence, exit code 35 and a hint."""
    make(tmp_path)
    with pytest.raises(CrypterMismatch, match=says) as raised:
        BackupSet.open(store_at(tmp_path, wrong))
    assert raised.value.exit_code == 35
    assert "--crypter.key-file" in raised.value.hint


def test_a_key_for_a_plain_backup_is_refused(tmp_path: Path) -> None:
    """The user must know that the backup is not encrypted as intended."""
    make(tmp_path, PLAIN)
    with pytest.raises(CrypterMismatch, match="not encrypted"):
        BackupSet.open(store_at(tmp_path))
    assert BackupSet.open_any(store_at(tmp_path)).encryption == "plaintext"


@pytest.mark.parametrize(
    "fields",
    [
        b"[" * 100_000,
        b'"aes256-ctr", "format_version": 1e999}',
        b'"aes256-ctr", "format_version": %s}' % (b"1" * 5000),
        b'[], "format_version": 1, "key_check": 5, "iv": {}, "ciphertext": null}',
    ],
    ids=["nested", "infinite", "digits", "types"],
)
def test_a_forged_envelope_is_damage(fields: bytes) -> None:
    """Whatever stands where an encrypted record has its fields."""
    with pytest.raises(BackupDamaged, match="not a valid encrypted record"):
        unseal(b'{"encryption": ' + fields, RIGHT_KEY, "x")


@pytest.mark.parametrize("wrong", [PLAIN, OTHER_KEY, crypter("aes128-ctr")])
def test_a_go_backup_has_no_check_value_and_is_still_told(tmp_path: Path, wrong: Crypter) -> None:
    """Its `backupmeta` alone is there: with the key it reads, with another it is not called damaged."""
    store = make(tmp_path)
    content = structs.replace(backupmeta.decode(store.get(layout.META), crypter(METHOD)), tool="br v1")
    store.put(layout.META, backupmeta.encode(content, crypter(METHOD)))
    store.delete(layout.MANIFEST)
    unproven = store_at(tmp_path, replace(RIGHT_KEY, unproven=True))
    assert BackupSet.open(unproven).files == content.files
    with pytest.raises(CrypterMismatch):
        BackupSet.open(store_at(tmp_path, replace(wrong, unproven=True)))


def forge(folder: Path) -> ObjectStore:
    """Make an encrypted backup look like one of the Go tool, as one can who has no key: flip bits of its tool, drop its manifest."""
    store = make(folder)
    data = bytearray(store.get(layout.META))
    plain = crypt(METHOD, bytes(data[:16]), bytes(data[16:]))
    data[16 + plain.index(b"tikv-br ")] ^= 1
    store.put(layout.META, bytes(data))
    store.delete(layout.MANIFEST)
    return store


def test_with_a_key_a_backup_without_a_manifest_proves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused unless that was requested, by what reads rows; it can be described and removed."""
    store = forge(tmp_path / "b")
    for read in (BackupSet.open, read_records):
        with pytest.raises(CrypterMismatch, match="nothing proves its integrity") as raised:
            read(store)
        assert "--crypter.allow-unproven" in raised.value.hint
    assert not caplog.records
    assert BackupSet.open(store_at(tmp_path / "b", replace(RIGHT_KEY, unproven=True))).manifest is None
    assert "nothing proves its integrity" in caplog.text
    assert BackupSet.open_any(store).manifest is None


def test_readers_of_rows_refuse_plain_text_and_forged_backups(tmp_path: Path) -> None:
    """Spark, a merge to a point in time, a comparison: with a key each refuses what is not proven by it."""
    make(tmp_path / "plain", PLAIN)
    forge(tmp_path / "forged")
    for name in ("plain", "forged"):
        location = store_at(tmp_path / name).location
        for read in (
            BackupReader(location, "", (), StructType()).partitions,
            partial(MergeSources.open, location, None),
            partial(find_backup, BackupChoice(location)),
        ):
            with pytest.raises(CrypterMismatch):
                read()


@pytest.mark.parametrize("key", [PLAIN, OTHER_KEY])
def test_without_its_key_a_backup_can_be_pruned(tmp_path: Path, key: Crypter) -> None:
    """By the id in the index, which its `backupmeta` proves without a key; a pinned one and another backup below stay."""
    for day, name in enumerate(("old", "pinned", "new")):
        store = store_at(tmp_path / name)
        begin_backup(store).commit(structs.replace(describe(store), encryption=METHOD, started_ms=day), do_all(store))
    (tmp_path / "old" / "notes.txt").write_text("not the tool's")
    rebuild(Index(store_at(tmp_path)))
    index = Index(store_at(tmp_path, key))
    entries = {each.entry.path: each.entry for each in index.read()}
    index.pin(entries["pinned"])
    for name in ("old", "new"):
        assert remove(index, entries[name])
    assert [each.entry.path for each in index.read()] == ["pinned"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and "old" in path.parts] == ["notes.txt"]
    (tmp_path / "pinned" / layout.META).write_bytes(b"another")
    with pytest.raises(BackupSetError):
        remove(index, entries["pinned"])
    assert list((tmp_path / "pinned" / "sst").iterdir())


@pytest.mark.parametrize("by_go", [False, True])
def test_each_backup_is_read_with_its_key(tmp_path: Path, by_go: bool) -> None:
    """After a rotation the older keys still read what they wrote, also what other backups continue; new backups get the first key."""
    rotated = Crypter.of("", SecretText("77" * 32), SecretText(KEYS["aes128-ctr"]), SecretText(KEYS[METHOD]))
    rotated = replace(rotated, unproven=by_go)
    for method in ("aes128-ctr", METHOD):
        store = make(tmp_path / method, crypter(method))
        if by_go:
            content = structs.replace(backupmeta.decode(store.get(layout.META), crypter(method)), tool="br v1")
            store.put(layout.META, backupmeta.encode(content, crypter(method)))
            store.delete(layout.MANIFEST)
        found = BackupSet.open(store_at(tmp_path / method, rotated))
        assert found.store.location.crypter.alone == crypter(method)
        assert len(found.store.location.crypter.others) == 2
        for file in found.files:
            assert ObjectSource(found.store, file.name, file.cipher_iv).read_at(0, 5) == b"file "
    make(tmp_path / "new", rotated)
    assert BackupSet.open(store_at(tmp_path / "new", OTHER_KEY)).manifest is not None
    make(tmp_path / "lost", Crypter.of(METHOD, SecretText("11" * 32)))
    with pytest.raises(CrypterMismatch, match="another key"):
        BackupSet.open(store_at(tmp_path / "lost", rotated))
    assert unseal(seal(b"{}", crypter(METHOD)), rotated, "a record") == b"{}"


def test_a_plain_go_backup_with_a_key(tmp_path: Path) -> None:
    """It is said that it is not encrypted."""
    make_foreign(make(tmp_path, PLAIN))
    with pytest.raises(CrypterMismatch, match="backupmeta is not encrypted"):
        BackupSet.open(store_at(tmp_path))


def test_damage_is_no_wrong_key() -> None:
    """A sealed record with any byte changed never reads; a changed or missing byte of the ciphertext is damage."""
    record = b'{"some": "record"}' * 3
    sound = seal(record, crypter(METHOD))
    assert unseal(sound, crypter(METHOD), "name") == record
    ciphertext = sound.index(b"ciphertext") + 14
    for place in range(len(sound)):
        data = sound[:place] + bytes([sound[place] ^ 2]) + sound[place + 1 :]
        with pytest.raises(BackupSetError) as raised:
            unseal(data, crypter(METHOD), "name")
        assert place < ciphertext or isinstance(raised.value, BackupDamaged), data
    with pytest.raises(BackupDamaged):
        unseal(sound[:-10], crypter(METHOD), "name")


def test_a_folder_with_backups_of_all_kinds(tmp_path: Path) -> None:
    """The index is rebuilt from backups that open with the key or without one; others keep their entries."""
    kinds = {"plain": PLAIN, "ours": crypter(METHOD), "theirs": OTHER_KEY}
    for name, key in kinds.items():
        make(tmp_path / name, key)
    with_key = Index(store_at(tmp_path))
    done = rebuild(with_key)
    assert [problem.path for problem in done.problems] == ["theirs"]
    assert {each.entry.path: each.entry.encryption for each in index_at(tmp_path).read()} == {
        "plain": "plaintext",
        "ours": METHOD,
    }
    assert rebuild(index_at(tmp_path)).found == 1
    assert {each.entry.path for each in index_at(tmp_path).read()} == {"plain", "ours"}


def test_each_byte_around_the_ciphertext_counts(tmp_path: Path) -> None:
    """Whatever bit is turned over before or after the ciphertext, or in it, the manifest is damaged, and no other key's."""
    store = make(tmp_path)
    whole = store.get(layout.MANIFEST)
    begins = whole.index(b"ciphertext")
    for place in [*range(begins + 20), len(whole) // 2, *range(len(whole) - 8, len(whole))]:
        store.put(layout.MANIFEST, whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(BackupDamaged, match=layout.MANIFEST):
            BackupSet.open(store)
