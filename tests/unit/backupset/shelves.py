"""A folder with several backups and their index."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from tests.support.ledgers import begin_backup
from tests.unit.backupset.samples import describe, do_all
from tikv_br.backupset import manifest
from tikv_br.backupset.index import Index, IndexEntry, entry_of
from tikv_br.backupset.manifest import Manifest
from tikv_br.cluster.pb import brpb_pb2
from tikv_br.formats.api_version import ApiVersion
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation, parse

DAY_MS = 86_400_000
FIRST_MS = 1_755_256_305_000


def index_at(folder: Path) -> Index:
    """The index of a directory."""
    return Index(open_store(parse(str(folder))))


def make_backup(location: StorageLocation, **changes: object) -> Manifest:
    """A complete backup that no index knows."""
    store = open_store(location)
    description = structs.replace(describe(store), **changes)
    return begin_backup(store).commit(description, do_all(store))


def shelve(index: Index, path: str, day: int = 0, **changes: object) -> IndexEntry:
    """A complete backup at ``path``, in the index, that was finished on that day."""
    location = index.root.location.child(path)
    made = make_backup(location, **changes)
    made = structs.replace(made, statistics=structs.replace(made.statistics, finished_ms=FIRST_MS + day * DAY_MS))
    manifest.write(open_store(location), made)
    entry = entry_of(path, made)
    index.add(entry)
    return entry


def make_foreign(store: ObjectStore) -> None:
    """Rewrite a backup of ours as the Go tool would have left it: no folder of ours, its own name in the meta."""
    for info in list(store.list("tikv-br")):
        store.delete(info.name)
    message = brpb_pb2.BackupMeta.FromString(store.get("backupmeta"))
    message.br_version = "v1.1.0"
    store.put("backupmeta", message.SerializeToString())


def names(store: ObjectStore) -> set[str]:
    """All objects."""
    return {info.name for info in store.list()}


def index_entry(number: int) -> IndexEntry:
    """An entry without a backup."""
    return IndexEntry(
        id=f"{number:016x}",
        path=f"backup-{number}",
        engine="scan",
        file_format="sst",
        api_version=ApiVersion.V1,
        dst_api_version=ApiVersion.V2,
        cluster_id=2**64 - 1,
        scope="0" * 16,
        keyspaces=(0, 4242),
        backup_ts=470615673702187143,
        parent="",
        total_kvs=number,
        total_bytes=2,
        backup_size=3,
        files=4,
        started_ms=5,
        finished_ms=number * DAY_MS,
        tool_version="0.1.0",
        encryption="plaintext",
    )
