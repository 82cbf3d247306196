"""A store whose writes fail by a script that reads in one line."""

from __future__ import annotations

from collections.abc import Iterator

from tikv_br.errors import StorageUnreachable
from tikv_br.storage.base import ObjectInfo, ObjectStore, Writer
from tikv_br.storage.url import StorageLocation


class FaultyStore(ObjectStore):
    """Passes everything on; the n-th of `put`, `put_if_absent` and `delete` does what the n-th sign of the script says.

    ``.`` works. ``b`` fails before it has any effect. ``a`` has its effect and fails after (the answer got lost). Beyond the
    script all works.
    """

    def __init__(self, inner: ObjectStore, script: str) -> None:
        self._inner = inner
        self._script = list(script)

    @property
    def location(self) -> StorageLocation:
        """Location of the inner store."""
        return self._inner.location

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Pass on, by the script."""
        with _Fault(self._script):
            return self._inner.put(name, data)

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Pass on, by the script."""
        with _Fault(self._script):
            return self._inner.put_if_absent(name, data)

    def delete(self, name: str) -> None:
        """Pass on, by the script."""
        with _Fault(self._script):
            self._inner.delete(name)

    def get(self, name: str) -> bytes:
        """Pass on."""
        return self._inner.get(name)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Pass on."""
        return self._inner.get_range(name, offset, length)

    def stat(self, name: str) -> ObjectInfo:
        """Pass on."""
        return self._inner.stat(name)

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """Pass on."""
        return self._inner.list(folder)

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        """Pass on."""
        self._inner.sweep(folder, deep=deep, older_than=older_than)

    def open_writer(self, name: str) -> Writer:
        """Pass on."""
        return self._inner.open_writer(name)


class _Fault:
    """One step of the script, around one call."""

    def __init__(self, script: list[str]) -> None:
        self._sign = script.pop(0) if script else "."

    def __enter__(self) -> None:
        if self._sign == "b":
            raise StorageUnreachable("failed before, on purpose")

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is None and self._sign == "a":
            raise StorageUnreachable("failed after, on purpose")
