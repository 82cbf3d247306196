"""A data file where it lies, decrypted where its place is encrypted."""

from __future__ import annotations

from tikv_br.errors import BackupDamaged
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import IV_SIZE


class StoredFile:
    """An object in the storage, read by ranges (`formats.sst.RandomAccess`)."""

    def __init__(self, store: ObjectStore, name: str, cipher_iv: bytes) -> None:
        """``cipher_iv`` is that of the file's record. Raises `StorageError`, `BackupDamaged` for an IV that is none."""
        self._store = store
        self._name = name
        self._iv = cipher_iv
        self._crypter = store.location.crypter
        if self._crypter.encrypts and len(cipher_iv) != IV_SIZE:
            raise BackupDamaged(f"{name} is encrypted, but no IV of it is recorded")
        self.size = store.stat(name).size

    def read_at(self, offset: int, length: int) -> bytes:
        """Return ``length`` plain bytes from ``offset``. Raises `StorageError`."""
        stored = self.read_stored(offset, length)
        return self._crypter.stream(self._iv, offset)(stored) if self._crypter.encrypts else stored

    def read_stored(self, offset: int, length: int) -> bytes:
        """Return the same bytes as they are stored, encrypted or not. Raises `StorageError`."""
        return self._store.get_range(self._name, offset, length)
