"""Backups of every kind, small ones, and the clusters that they are of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.backup.data import load
from tests.support.damage import Objects, read_objects
from tests.support.live_cluster import LiveCluster, live_cluster
from tests.support.openssl import crypter
from tikv_br.backup.run import backup
from tikv_br.backupset.files import FileKind
from tikv_br.dataflow.options import BackupOptions
from tikv_br.formats.api_version import ApiVersion
from tikv_br.formats.keys.codec import KeyCodec
from tikv_br.formats.sst.compression import Compression
from tikv_br.storage.crypter import PLAIN, Crypter
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.url import StorageLocation

CUTS = (b"row060", b"row120", b"row180")


class Variant(NamedTuple):
    """One kind of backup."""

    version: ApiVersion
    engine: str = "scan"
    compression: Compression = Compression.ZSTD
    file_kind: FileKind = FileKind.SST
    crypter: Crypter = PLAIN

    def __str__(self) -> str:
        packed = self.compression.label if self.file_kind is FileKind.SST else self.file_kind.value
        return f"{self.version.label}-{self.engine}-{packed}-{self.crypter.method}"


VARIANTS = (
    Variant(ApiVersion.V1),
    Variant(ApiVersion.V1, file_kind=FileKind.PARQUET),
    Variant(ApiVersion.V1TTL, compression=Compression.LZ4),
    Variant(ApiVersion.V1TTL, engine="store"),
    Variant(ApiVersion.V2, compression=Compression.NONE),
    Variant(ApiVersion.V2, crypter=crypter("aes256-ctr")),
    Variant(ApiVersion.V2, file_kind=FileKind.PARQUET, crypter=crypter("aes192-ctr")),
    Variant(ApiVersion.V2, engine="store", crypter=crypter("aes128-ctr")),
)


@dataclass(frozen=True)
class Made:
    """A backup, and one of the same source a little earlier."""

    variant: Variant
    live: LiveCluster
    objects: Objects
    older: Objects
    written: frozenset[str] = field(default_factory=frozenset)
    """Names of all objects that this process has written for it, also of those that are gone."""

    def place(self, folder: Path) -> StorageLocation:
        """A folder where a copy of it lies."""
        return StorageLocation("local", str(folder), crypter=self.variant.crypter)


Making = Callable[[Variant], Made]


def rows(number: int) -> dict[bytes, bytes]:
    """The rows of a source; of a later ``number`` some are other ones."""
    return {b"row%03d" % each: b"value %d of %d " % (number if each % 7 == 0 else 0, each) * 9 for each in range(240)}


def options(variant: Variant, live: LiveCluster, folder: Path, **changes: object) -> BackupOptions:
    """Options of a backup of that kind into a folder."""
    wanted: dict[str, Any] = {
        "cluster": live.config,
        "storage": StorageLocation("local", str(folder), crypter=variant.crypter),
        "engine": variant.engine,
        "compression": variant.compression,
        "file_kind": variant.file_kind,
        "file_bytes": 8 << 10,
        "safe_interval": 0.0,
        "executor": "driver",
        **changes,
    }
    return BackupOptions(**wanted)


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[ApiVersion], LiveCluster]]:
    """Return a function from an API version to a playground of one store, in four regions, started when first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def get(version: ApiVersion) -> LiveCluster:
            live = stack.enter_context(live_cluster(tmp_path_factory.mktemp(version.label), version))
            codec = KeyCodec(version)
            live.split(*(codec.bound(codec.rpc_key(cut)) for cut in CUTS))
            return live

        yield get


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory, clusters: Callable[[ApiVersion], LiveCluster]) -> Making:
    """Return a function that makes a backup of a kind, once, with all its names."""

    @functools.cache
    def made(variant: Variant) -> Made:
        live, folder = clusters(variant.version), tmp_path_factory.mktemp("made")
        ttl = 0 if variant.version is ApiVersion.V1 else 86_400
        load(live, rows(0))
        if ttl:
            load(live, {b"ttl%03d" % number: b"value" for number in range(40)}, ttl=ttl)
        backup(options(variant, live, folder / "older" / "copy"))
        load(live, rows(1))
        with noted_names() as written:
            backup(options(variant, live, folder / "newer" / "copy"))
        return Made(
            variant,
            live,
            read_objects(folder / "newer" / "copy"),
            read_objects(folder / "older" / "copy"),
            frozenset(name.removeprefix("copy/") for name in written),
        )

    return made


@contextlib.contextmanager
def noted_names() -> Iterator[set[str]]:
    """Record the names, relative to the parent of the backup's folder, of all objects that this process writes."""
    noted: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for method in ("open_writer", "put_if_absent"):
            original = getattr(LocalObjectStore, method)

            def note(
                store: LocalObjectStore, name: str, *data: bytes, original: Callable[..., object] = original
            ) -> object:
                folder = Path(store.location.path).name
                noted.add(f"copy/{name}" if folder == "copy" else name)
                return original(store, name, *data)

            patch.setattr(LocalObjectStore, method, note)
        yield noted
