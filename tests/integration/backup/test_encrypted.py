"""Encrypted backups from a cluster and back: openssl and RocksDB read them, stores write and fetch them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from msgspec import structs

from tests.integration.backup.conftest import Clusters, Options
from tests.integration.backup.data import hard_rows, load
from tests.integration.backup.reading import rocksdb_rows, stored
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.openssl import crypt, crypter
from tikv_br.backup.run import backup
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.files import FileKind
from tikv_br.backupset.rows import find_value
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.dataflow.options import BackupOptions
from tikv_br.errors import CrypterMismatch
from tikv_br.formats.api_version import ApiVersion
from tikv_br.progress_events import Event, Notice
from tikv_br.restore.options import Mode, RestoreOptions
from tikv_br.restore.run import restore
from tikv_br.storage.credentials import KEY_IN_CLEAR
from tikv_br.storage.crypter import PLAIN, Crypter, SecretText
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation
from tikv_br.verify.options import Level, VerifyOptions
from tikv_br.verify.run import verify

ROWS = hard_rows(count=300)


@pytest.fixture(scope="module")
def source(clusters: Clusters) -> LiveCluster:
    """A V1 cluster of three stores with rows in several regions."""
    live = clusters(ApiVersion.V1)
    load(live, ROWS)
    live.split(b"row00100", b"row00200")
    live.scatter()
    return live


def encrypted(options: Options, live: LiveCluster, method: str, **changes: object) -> BackupOptions:
    """Options of an encrypted backup to API V2."""
    wanted = options(live, dst_api_version=ApiVersion.V2, **changes)
    return structs.replace(wanted, storage=replace(wanted.storage, crypter=crypter(method)))


def decrypt(backup_folder: Path, method: str, target: Path) -> None:
    """Write what openssl makes of the files, each with the IV that `backupmeta` has for it."""
    data = (backup_folder / "backupmeta").read_bytes()
    content = brpb_pb2.BackupMeta.FromString(crypt(method, data[:16], data[16:]))
    for file in content.files:
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(crypt(method, file.cipher_iv, (backup_folder / file.name).read_bytes()))


def verified(location: StorageLocation, level: Level) -> int:
    """Verify; the rows that were found right."""
    return verify(VerifyOptions(location, level, concurrency=2)).rows_checked


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("scan", "aes256-ctr"),
        pytest.param("store", "aes128-ctr", marks=pytest.mark.core("encryption")),
        ("store", "aes192-ctr"),
    ],
)
def test_round_trip(source: LiveCluster, options: Options, tmp_path: Path, engine: str, method: str) -> None:
    """Openssl decrypts what either engine wrote, RocksDB reads it, verify and lookup do, and stores restore it all."""
    wanted = encrypted(options, source, method, engine=engine)
    events: list[Event] = []
    summary = backup(wanted, events.append).summary
    assert (Notice(KEY_IN_CLEAR) in events) == (engine == "store")
    folder = Path(wanted.storage.path)
    decrypt(folder, method, tmp_path / "plain")
    expected = stored({key: (value, 0) for key, value in ROWS.items()}, ApiVersion.V2, ts=1)
    assert rocksdb_rows(tmp_path / "plain", tmp_path) == expected
    assert not any(b"row00" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert verified(wanted.storage, Level.FILES) == 0
    assert verified(wanted.storage, Level.DATA) == len(ROWS)
    found = find_value(BackupSet.open(open_store(wanted.storage)), b"row00008")
    assert found is not None
    assert found.stored.value == ROWS[b"row00008"]
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=2) as target:
        done = restore(RestoreOptions(cluster=target.config, storage=wanted.storage), events.append)
        raw = target.raw()
        pages = list(raw.scan_pages(raw.codec.rpc_range()))
    assert (done.verified, done.total_kvs, done.crc64xor) == (True, len(ROWS), summary.crc64xor)
    assert events.count(Notice(KEY_IN_CLEAR)) == 1 + (engine == "store")
    rows = {
        key[4:]: value
        for page in pages
        for key, value in zip(page.keys.to_pylist(), page.values.to_pylist(), strict=True)
    }
    assert rows == ROWS


@pytest.mark.parametrize("engine", ["scan", "store"])
def test_parquet(source: LiveCluster, options: Options, tmp_path: Path, engine: str) -> None:
    """Parquet files are encrypted as SSTs are, also those made of encrypted files that stores wrote.

    pyarrow reads what openssl decrypts, verify does, and puts bring it back.
    """
    method = "aes256-ctr"
    wanted = encrypted(options, source, method, engine=engine, file_kind=FileKind.PARQUET)
    backup(wanted)
    decrypt(Path(wanted.storage.path), method, tmp_path / "plain")
    tables = [pq.read_table(path) for path in sorted((tmp_path / "plain").rglob("*.parquet"))]
    keys = [key for table in tables for key in table["key"].to_pylist()]
    assert sorted(keys) == sorted(ROWS)
    assert verified(wanted.storage, Level.DATA) == len(ROWS)
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        done = restore(RestoreOptions(cluster=target.config, storage=wanted.storage, mode=Mode.PUT))
        assert (done.verified, target.raw().checksum().total_kvs) == (True, len(ROWS))


@pytest.mark.parametrize(
    ("made_with", "read_with"), [("aes256-ctr", ""), ("aes256-ctr", "aes192-ctr"), ("", "aes256-ctr")]
)
def test_a_wrong_key_ends_a_restore_before_any_store_is_asked(
    source: LiveCluster, options: Options, made_with: str, read_with: str
) -> None:
    """Key missing, key of another method, key for a plain backup: the error comes, and no store has seen a Download."""
    plain_place = options(source).storage
    places = [replace(plain_place, crypter=crypter(method) if method else PLAIN) for method in (made_with, read_with)]
    backup(options(source, storage=places[0]))
    trap = source.fail("Download", {"delay": {"seconds": 0.0}})
    with pytest.raises(CrypterMismatch):
        restore(RestoreOptions(cluster=source.config, storage=places[1], allow_overwrite=True))
    assert source.hits(trap) == 0
    source.heal()


def test_a_backup_in_the_go_tools_form(golden: Path, tmp_path: Path) -> None:
    """A recorded backup, encrypted by openssl as the Go tool and the stores do it, comes back; without the key it does not."""
    method, recorded, folder = "aes256-ctr", golden / "backups" / "v1_to_v2" / "data", tmp_path / "backup"
    content = brpb_pb2.BackupMeta.FromString((recorded / "backupmeta").read_bytes())
    for file in content.files:
        file.cipher_iv = hashlib.sha256(file.name.encode()).digest()[:16]
        stored_bytes = crypt(method, file.cipher_iv, (recorded / file.name).read_bytes())
        file.sha256 = hashlib.sha256(stored_bytes).digest()
        place = folder / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(stored_bytes)
    iv = bytes(range(100, 116))
    (folder / "backupmeta").write_bytes(iv + crypt(method, iv, content.SerializeToString()))
    plain_place = StorageLocation("local", str(folder))
    with live_cluster(tmp_path / "target", ApiVersion.V2, stores=1) as target:
        with pytest.raises(CrypterMismatch, match="encrypted"):
            restore(RestoreOptions(cluster=target.config, storage=plain_place))
        keyed = replace(plain_place, crypter=crypter(method))
        with pytest.raises(CrypterMismatch, match="nothing proves its integrity"):
            restore(RestoreOptions(cluster=target.config, storage=keyed))
        older = Crypter.of("", SecretText("77" * 32), crypter(method).key, unproven=True)
        done = restore(RestoreOptions(cluster=target.config, storage=replace(keyed, crypter=older)))
        counted = target.raw().checksum()
    sums = json.loads((recorded.parent / "meta.json").read_text())["expected_sums"]
    assert done.verified
    assert (counted.crc64xor, counted.total_kvs) == (sums["crc64xor"], sums["total_kvs"])
