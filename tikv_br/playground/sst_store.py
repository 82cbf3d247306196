"""The folder of one store where SSTs wait for their ingest: downloaded or uploaded there, each under its own name."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Final

from formats.api_version import ApiVersion
from tikv_br.cluster.pb import import_sstpb_pb2
from tikv_br.playground import sst_file
from tikv_br.playground.sst_file import SstFacts

COLUMN_FAMILIES: Final = ("default", "write")
"""Those that an SST can be ingested into."""
_UUID_SIZE: Final = 16
_REMEMBERED: Final = 4096

_facts_by_digest: OrderedDict[tuple[str, ApiVersion], SstFacts] = OrderedDict()
"""One look at the same bytes is enough, though each replica's store downloads them."""
_facts_lock = threading.Lock()


class BadMeta(Exception):
    """The file that an ``SSTMeta`` is about cannot be named; the message is the store's."""


class SstStore:
    """Files by ``SSTMeta``: uuid, region, epoch and column family make the name. Thread-safe for distinct files."""

    def __init__(self, folder: Path, api_version: ApiVersion) -> None:
        self.folder = folder
        self._api_version = api_version
        self._temp = folder / ".temp"
        self._temp.mkdir(parents=True, exist_ok=True)

    def saved(self, meta: import_sstpb_pb2.SSTMeta) -> Path:
        """Where the file waits for its ingest. Raises `BadMeta`."""
        return self.folder / _name(meta)

    def temp(self, meta: import_sstpb_pb2.SSTMeta) -> Path:
        """Where the file is on its way there. Raises `BadMeta`."""
        return self._temp / _name(meta)

    def has(self, meta: import_sstpb_pb2.SSTMeta) -> bool:
        """Whether the file waits here. Raises `BadMeta`."""
        return self.saved(meta).exists()

    def remove(self, meta: import_sstpb_pb2.SSTMeta) -> None:
        """Remove the file; no error when it is gone."""
        self.saved(meta).unlink(missing_ok=True)

    def facts(self, path: Path) -> SstFacts:
        """What is in a file of this store; read once for the same bytes. Raises `UnreadableSst`."""
        with path.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest(), self._api_version
        with _facts_lock:
            if known := _facts_by_digest.get(key):
                return known
        facts = sst_file.inspect(path, self._api_version)
        with _facts_lock:
            _facts_by_digest[key] = facts
            if len(_facts_by_digest) > _REMEMBERED:
                _facts_by_digest.popitem(last=False)
        return facts


def _name(meta: import_sstpb_pb2.SSTMeta) -> str:
    if len(meta.uuid) != _UUID_SIZE:
        raise BadMeta(f"invalid bytes length: expected {_UUID_SIZE}, found {len(meta.uuid)}")
    epoch = meta.region_epoch
    cf = meta.cf_name or "default"
    return f"{uuid.UUID(bytes=meta.uuid)}_{meta.region_id}_{epoch.conf_ver}_{epoch.version}_{cf}_2.sst"
