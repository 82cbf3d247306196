"""A data file where it lies."""

from __future__ import annotations

from tikv_br.storage.base import ObjectStore


class StoredFile:
    """An object in the storage, read by ranges (`formats.sst.RandomAccess`)."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._name = name
        self.size = store.stat(name).size

    def read_at(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset``. Raises `StorageError`."""
        return self._store.get_range(self._name, offset, length)
