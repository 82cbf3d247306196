"""What stores fetch and write of backups, with the faults that failpoints ask for."""

from __future__ import annotations

import random

from tikv_br.cluster.pb import brpb_pb2
from tikv_br.playground.external_storage import ExternalStorage, StorageFault, open_storage
from tikv_br.playground.failpoints import STORAGE_READ, STORAGE_WRITE, StorageTrouble
from tikv_br.playground.node import StoreNode


class FaultyStorage:
    """An external storage of one store."""

    def __init__(self, node: StoreNode, inner: ExternalStorage) -> None:
        self.nested, self.url = inner.nested, inner.url
        self._node, self._inner = node, inner

    def write(self, name: str, data: bytes) -> None:
        """See `ExternalStorage.write`."""
        trouble = self._trouble(STORAGE_WRITE)
        if trouble is None or trouble.after:
            self._inner.write(name, data)
        if trouble is not None:
            raise _fault(trouble)

    def read(self, name: str) -> bytes:
        """See `ExternalStorage.read`."""
        trouble = self._trouble(STORAGE_READ)
        if trouble is not None and not trouble.damages:
            raise _fault(trouble)
        data = self._inner.read(name)
        return data if trouble is None or not data else _damaged(data, trouble.kind)

    def _trouble(self, point: str) -> StorageTrouble | None:
        return self._node.failpoints.intercept_storage(point, store_id=self._node.store_id)


def open_for(node: StoreNode, backend: brpb_pb2.StorageBackend) -> ExternalStorage:
    """Open what a request to a store names. Raises `StorageFault`."""
    return FaultyStorage(node, open_storage(backend))


def _damaged(data: bytes, kind: str) -> bytes:
    at = random.randrange(len(data))  # noqa: S311 - faults, no secrets
    return data[:at] if kind == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _fault(trouble: StorageTrouble) -> StorageFault:
    return StorageFault.of_custom("Other", trouble.message)
