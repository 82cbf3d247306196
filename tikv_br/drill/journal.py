"""Which keys a drill's tail has written, written down before each batch: what was not, is somebody else's.

Objects of 16-byte digests in the drill's own folder of its home, each numbered and ending in a digest of itself.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable

from tikv_br.drill.cleaning import COPIES
from tikv_br.errors import BackupDamaged
from tikv_br.storage.base import ObjectStore

SIZE = 16
WITHOUT = (
    "Which rows the drill's tail has written is not known any more, and none was removed: empty the place by hand, "
    "then delete the drill's page in ledger/."
)


def digest(key: bytes) -> bytes:
    """What stands for an RPC key of the target."""
    return hashlib.blake2b(key, digest_size=SIZE).digest()


class Journal:
    """The keys of one drill. Every method may raise `StorageError`. Thread-safe."""

    def __init__(self, home: ObjectStore, drill: str) -> None:
        self._home = home
        self._folder = f"{COPIES}/{drill}/journal"
        self._known: set[bytes] = set()
        self._written = 0
        self._lock = threading.Lock()

    def note(self, keys: Iterable[bytes]) -> None:
        """Write down RPC keys that are about to be written, those that do not stand there yet."""
        digests = {digest(key) for key in keys}
        with self._lock:
            new = digests - self._known
            if new:
                name, data = f"{self._folder}/{self._written:08d}", b"".join(sorted(new))
                self._home.put(name, data + _seal(name, data))
                self._written += 1
                self._known |= new

    def has(self, key: bytes) -> bool:
        """Whether an RPC key was written down by this process."""
        with self._lock:
            return digest(key) in self._known

    def read(self) -> frozenset[bytes]:
        """The digests of all of them. Raises `BackupDamaged` for an object that is not as it was written."""
        found: set[bytes] = set()
        for name in sorted(info.name for info in self._home.list(self._folder)):
            data = self._home.get(name)
            if data[-SIZE:] != _seal(name, data[:-SIZE]):
                raise BackupDamaged(f"{name} is damaged", hint=WITHOUT)
            found.update(data[at : at + SIZE] for at in range(0, len(data) - SIZE, SIZE))
        return frozenset(found)


def _seal(name: str, data: bytes) -> bytes:
    return digest(name.rpartition("/")[2].encode() + data)
