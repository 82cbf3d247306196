"""The seam that every object store implements; `tests/integration/storage_suite.py` holds each of them to it.

A store is a place (`StorageLocation`); objects have names relative to it, segments joined by ``/``. Objects are whole:
a reader sees all of an object or none of it, whatever happens to its writer. All calls are synchronous and safe from
several threads. A store pickles as its location and opens itself anew at the other end; it must not be used across a
fork.

Every method raises only `tikv_br.errors.StorageError` and its subclasses. `StorageUnreachable` comes after the retries
of the store itself are spent (a few seconds when nothing ever answered, longer once something had); `StorageDenied`,
`StorageFull` and `StorageReadOnly` come at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from tikv_br.errors import StorageError, StorageObjectMissing
from tikv_br.storage.url import StorageLocation

CHUNK_SIZE = 8 << 20
"""Bytes that `read_chunks` asks for at a time."""

_BAD_NAME = re.compile(r"^$|^/|/$|//|(^|/)\.\.?(/|$)|[\x00-\x1f\x7f\\]")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of an object without reading it."""

    name: str
    size: int
    """Bytes."""
    etag: str = ""
    """The store's own mark of this very content, without quotes; ``""`` where the store has none (local)."""
    modified_ms: int = field(default=0, compare=False)
    """When it was written, by the store's clock, in milliseconds since the epoch; said by `list` and `stat` only."""


class Writer(Protocol):
    """An object being written; nothing of it is visible before `close` has returned.

    Leaving its ``with`` block without `close` aborts it. Holds a few parts of the object in memory, never all of it.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; the caller may reuse the buffer at once. May raise the error of an earlier part."""

    def close(self) -> ObjectInfo:
        """Make the object durable and visible, replacing one of the same name."""

    def abort(self) -> None:
        """Drop what was written; harmless after `close` or a second time."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ObjectStore(Protocol):
    """Objects at one place. Reads, `put` and `delete` are idempotent and retried inside."""

    @property
    def location(self) -> StorageLocation:
        """Where the objects are."""

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Write a small object, durable on return, replacing one of the same name. Local: makes the directories."""

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Write a small object unless the name is taken: of all callers, at any place, exactly one succeeds.

        Raises `StorageConflict` when the name is taken. Not retried once the request may have arrived: after a lost
        answer a later call may find its own object.
        """

    def get(self, name: str) -> bytes:
        """All bytes of a small object. Raises `StorageObjectMissing`."""

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """At most ``length`` bytes from ``offset``, fewer only at the object's end. Raises `StorageObjectMissing`."""

    def stat(self, name: str) -> ObjectInfo:
        """Size and mark of an object. Raises `StorageObjectMissing`."""

    def list(self, folder: str = "") -> Iterator[ObjectInfo]:
        """All objects below ``folder/`` (``""`` = all), at any depth, in no promised order; none when it is empty.

        Raises `StorageObjectMissing` when the bucket does not exist; a missing local directory is an empty one.
        """

    def delete(self, name: str) -> None:
        """Remove an object; no error when there is none."""

    def sweep(self, folder: str = "", *, deep: bool = False, older_than: float = 0.0) -> None:
        """Remove what killed writers have left directly in ``folder``, or with ``deep`` anywhere below it, that `list` does not show.

        With ``deep`` also empty directories. Nobody may be writing there, but for what is younger than ``older_than`` seconds. S3 has nothing of the kind but unfinished uploads, which
        a rule of the bucket should end.
        """

    def open_writer(self, name: str) -> Writer:
        """Begin a large object (up to 78 GiB on S3)."""


def check_name(name: str) -> str:
    """Return ``name`` if it is one; names may come from files of others, and must not lead out of the place.

    Raises `StorageError`.
    """
    if _BAD_NAME.search(name):
        raise StorageError(
            f"{name!r} is no name of an object", hint="The file that says this name is not to be trusted."
        )
    return name


def exists(store: ObjectStore, name: str) -> bool:
    """Whether the store has an object of that name."""
    try:
        store.stat(name)
    except StorageObjectMissing:
        return False
    return True


def read_chunks(store: ObjectStore, name: str, size: int, chunk_size: int = CHUNK_SIZE) -> Iterator[bytes]:
    """The first ``size`` bytes of an object in pieces of ``chunk_size``; fewer when the object ends before."""
    for offset in range(0, size, chunk_size):
        chunk = store.get_range(name, offset, min(chunk_size, size - offset))
        if not chunk:
            return
        yield chunk
