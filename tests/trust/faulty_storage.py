"""An object store on a bad network: operations fail, answers get lost, bytes arrive cut or altered, by a seed.

It stands in for any store of the seam (`tikv_br.storage.base`), after the retries that a store makes itself: what fails here
has failed for good as far as the store is concerned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from tests.trust.dice import Dice
from tikv_br.errors import StorageConflict, StorageUnreachable
from tikv_br.storage.base import ObjectInfo, ObjectStore, Writer
from tikv_br.storage.local import LocalObjectStore
from tikv_br.storage.open import open_store
from tikv_br.storage.url import StorageLocation

OPERATIONS = 0.01
"""Share of operations that fail."""
STREAMS = 0.001
"""Share of read objects, or parts of them, whose bytes are not those that were stored."""

_UNSEEN = ("throttled", "timed out", "connection reset")
"""Failures that have no effect."""
_LOST = "answer lost"
"""A failure after the effect."""
_TAKEN = "precondition conflict"
"""Error of a conditional write that meets an earlier try of its own, whose answer was lost."""
_CUT, _FLIPPED = "cut short", "byte flipped"


class FaultyStorage(ObjectStore):
    """Passes everything on, by the dice."""

    def __init__(self, inner: ObjectStore, dice: Dice) -> None:
        self._inner, self._dice = inner, dice

    def __reduce__(self) -> tuple[Callable[[StorageLocation], ObjectStore], tuple[StorageLocation]]:
        return (open_store, (self.location,))

    @property
    def location(self) -> StorageLocation:
        """Location of the inner store."""
        return self._inner.location

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Pass on."""
        with self._changing():
            return self._inner.put(name, data)

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Pass on."""
        with self._changing(_TAKEN):
            return self._inner.put_if_absent(name, data)

    def get(self, name: str) -> bytes:
        """Pass on, and what was read perhaps not as it was stored."""
        self._reading()
        return self._stream(self._inner.get(name))

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Pass on, and what was read perhaps not as it was stored."""
        self._reading()
        return self._stream(self._inner.get_range(name, offset, length))

    def stat(self, name: str) -> ObjectInfo:
        """Pass on."""
        self._reading()
        return self._inner.stat(name)

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """Pass on; a listing may also fail in its middle."""
        self._reading()
        yield from self._inner.list(folder)
        self._reading()

    def delete(self, name: str) -> None:
        """Pass on."""
        with self._changing():
            self._inner.delete(name)

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        """Pass on."""
        with self._changing():
            self._inner.sweep(folder, deep=deep, older_than=older_than)

    def open_writer(self, name: str) -> Writer:
        """Pass on; each write may fail, and the end."""
        self._reading()
        return _FaultyWriter(self._inner.open_writer(name), self._reading, self._changing)

    def _reading(self) -> None:
        if kind := self._dice.throw(OPERATIONS, _UNSEEN):
            raise StorageUnreachable(f"{kind}, on purpose")

    @contextlib.contextmanager
    def _changing(self, *conflicts: str) -> Iterator[None]:
        kind = self._dice.throw(OPERATIONS, (*_UNSEEN, _LOST, *conflicts))
        if kind in _UNSEEN:
            raise StorageUnreachable(f"{kind}, on purpose")
        yield
        if kind:
            raise (StorageConflict if kind == _TAKEN else StorageUnreachable)(f"{kind}, on purpose")

    def _stream(self, data: bytes) -> bytes:
        kind = self._dice.throw(STREAMS, (_CUT, _FLIPPED)) if data else ""
        if not kind:
            return data
        at = self._dice.below(len(data))
        return data[:at] if kind == _CUT else data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


class _FaultyWriter(Writer):
    def __init__(
        self,
        inner: Writer,
        writing: Callable[[], None],
        changing: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._inner, self._writing, self._changing = inner, writing, changing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._writing()
        self._inner.write(data)

    def close(self) -> ObjectInfo:
        with self._changing():
            return self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


@contextlib.contextmanager
def faulty_directories(dice: Dice) -> Iterator[None]:
    """For the length of the block every ``local://`` place that this process opens is faulty."""

    def opened(location: StorageLocation) -> FaultyStorage:
        return FaultyStorage(LocalObjectStore(location), dice)

    with mock.patch("tikv_br.storage.local.LocalObjectStore", opened):
        yield
