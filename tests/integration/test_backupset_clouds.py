"""A whole backup set, and its lease, on real servers of each cloud, and on one that only looks like S3."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import msgspec.structs
import pytest

from tests.integration.cloud_servers import AzureServer, azurite_server
from tests.integration.gcs_server import GcsServer, gcs_server
from tests.integration.s3_servers import BUCKET, S3Server, moto_server, versitygw_server
from tests.support.ledgers import begin_backup, read_entries
from tests.support.waiting import eventually
from tests.unit.backupset.samples import describe, do_all, do_task
from tikv_br import records
from tikv_br.backupset import layout, lease
from tikv_br.backupset.backup_set import BackupSet
from tikv_br.backupset.lease import Lease, LeaseOwner, PathLease, newest
from tikv_br.backupset.ledger import write_entry
from tikv_br.errors import BackupDamaged, BackupNotFound, BackupPathInUse, LeaseHeld, StorageObjectMissing
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

AnyServer = S3Server | AzureServer | GcsServer


@pytest.fixture(scope="module", params=["moto", "versitygw", "azurite", "gcs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """Each server in turn."""
    match request.param:
        case "moto":
            with moto_server() as moto:
                yield moto
        case "versitygw":
            with versitygw_server(tmp_path_factory.mktemp("versitygw")) as versitygw:
                yield versitygw
        case "azurite":
            with azurite_server() as azurite:
                yield azurite
        case _:
            with gcs_server(tmp_path_factory.mktemp("gcs")) as gcs:
                yield gcs


@pytest.fixture
def location(server: AnyServer, request: pytest.FixtureRequest) -> StorageLocation:
    """A prefix of the test's own."""
    return server.location(f"sets/{request.function.__name__}")


def test_whole_life_of_a_backup(location: StorageLocation) -> None:
    """Created, written by tasks with stores of their own, committed, opened and verified; marks of the storage recorded."""
    store = open_store(location)
    writer = begin_backup(store)
    for number in range(3):
        task_store = open_store(location)
        write_entry(task_store, do_task(task_store, number))
    writer.commit(describe(store), read_entries(store))
    opened = BackupSet.open(open_store(location))
    assert len(opened.files) == 3
    for file in opened.files:
        assert file.etag
        opened.verify_identity(file)
        opened.verify_content(file)
    assert list(store.list(layout.LEDGER)) == []


def test_mark_catches_a_file_altered_in_its_middle(location: StorageLocation) -> None:
    """On S3 two small requests notice even a change far from the tail: the mark differs, so the file is read."""
    store = open_store(location)
    begin_backup(store).commit(describe(store), do_all(store))
    opened = BackupSet.open(store)
    file = opened.files[0]
    data = bytearray(store.get(file.name))
    data[10] ^= 1
    store.put(file.name, bytes(data))
    with pytest.raises(BackupDamaged, match=file.name):
        opened.verify_identity(file)


def test_backup_copied_within_s3(server: AnyServer, location: StorageLocation) -> None:
    """Copied to another prefix by another client, the backup opens and its files verify."""
    if not isinstance(server, S3Server):
        pytest.skip("the other client is one of S3")
    store = open_store(location)
    begin_backup(store).commit(describe(store), do_all(store))
    for info in list(store.list()):
        source = {"Bucket": BUCKET, "Key": f"{location.path}/{info.name}"}
        server.admin.copy_object(Bucket=BUCKET, Key=f"copies/{location.path}/{info.name}", CopySource=source)
    moved = BackupSet.open(open_store(dataclasses.replace(location, path=f"copies/{location.path}")))
    for file in moved.files:
        moved.verify_identity(file)


def test_one_of_many_concurrent_runs_gets_the_path(request: pytest.FixtureRequest, location: StorageLocation) -> None:
    """One of several concurrent runs writes; the others fail because the path is in use."""
    if "moto" in request.node.name:
        pytest.skip("moto looks and writes in two steps: concurrent conditional puts prove nothing there")

    def begin(_run: int) -> bool:
        try:
            begin_backup(open_store(location))
        except BackupPathInUse:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(begin, range(6))) == 1


def test_one_of_many_gets_the_lease(request: pytest.FixtureRequest, location: StorageLocation) -> None:
    """For a free path, and for one whose holder has died."""
    if "moto" in request.node.name:
        pytest.skip("moto looks and writes in two steps: concurrent conditional puts prove nothing there")

    def begin(_run: int) -> PathLease | None:
        try:
            return lease.acquire(open_store(location), "backup")
        except LeaseHeld:
            return None

    for _round in range(2):
        with ThreadPoolExecutor(6) as pool:
            taken = [held for held in pool.map(begin, range(6)) if held is not None]
        assert len(taken) == 1
        taken[0].release()
        dead = Lease("0" * 16, msgspec.structs.replace(LeaseOwner.this_process(), started=1), "", "backup", 1)
        open_store(location).put(layout.lease_name(1), records.dump(dead))


def test_lease_is_kept_and_broken(location: StorageLocation) -> None:
    """It is renewed by conditional writes, refused to others, lost when it is broken, and leaves nothing behind."""
    store = open_store(location)
    with lease.acquire(store, "backup", renew_every=0.05) as held:
        eventually(lambda: newest(store).number > 2 * lease.KEPT)
        held.confirm()
        with pytest.raises(LeaseHeld):
            lease.acquire(open_store(location), "prune")
        lease.break_lease(open_store(location), force=True)
        eventually(lambda: held.lost is not None)
    with lease.acquire(open_store(location), "prune"):
        pass
    assert list(store.list()) == []


def test_missing_bucket(server: AnyServer) -> None:
    """A bucket that does not exist stops a backup before it begins, and is no finished backup to restore from."""
    store = open_store(server.location("p", "no-such-bucket"))
    with pytest.raises(StorageObjectMissing, match=r"(bucket|container) 'no-such-bucket' does not exist"):
        begin_backup(store)
    with pytest.raises(BackupNotFound, match=r"(bucket|container) 'no-such-bucket' does not exist"):
        BackupSet.open(store)


def test_manifest_holds_no_secret(location: StorageLocation, tmp_path: Path) -> None:
    """No object of a backup repeats the credentials it was written with."""
    store = open_store(location)
    begin_backup(store).commit(describe(store), do_all(store))
    options = location.s3, location.azure
    hidden = (options[0].access_key, options[0].secret_access_key, options[1].account_key)
    secrets = [secret.reveal().encode() for secret in hidden if secret]
    for info in store.list():
        data = store.get(info.name)
        assert not any(secret in data for secret in secrets)
    written = BackupSet.open(store).manifest
    assert written is not None
    assert parse(written.description.storage).path == location.path
