"""The interface of all object stores; `tests/integration/storage_suite.py` tests each of them against it.

A store is a place (`StorageLocation`); objects have names relative to it, segments joined by ``/``. Objects are whole:
a reader sees all of an object or none of it, whatever happens to its writer. All calls are synchronous and safe from
several threads. A store pickles as its location and is opened again when unpickled; it must not be used across a
fork.

Every method raises only `tikv_br.errors.StorageError` and its subclasses, and `UsageError` for settings that the server
refuses. `StorageUnreachable` comes after the retries of the store itself are spent (a few seconds when nothing ever answered,
`StorageLocation.patience` once something had, see `tikv_br.storage.outage`); `StorageDenied`, `StorageFull` and `StorageReadOnly`
come at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, Self

from tikv_br.cancellation import inherit
from tikv_br.errors import BackupDamaged, StorageConflict, StorageError, StorageObjectMissing, StorageUnreachable
from tikv_br.storage.crypter import IV_SIZE
from tikv_br.storage.outage import StorageAway
from tikv_br.storage.url import StorageLocation

LOST_ANSWERS = 4
"""Maximum repetitions of a write whose answer was lost: a server that restarts may lose several."""
CHUNK_SIZE = 8 << 20
"""Bytes per request of `read_chunks`."""

_NAME = re.compile(r"(?!\.\.?(?:/|\Z))[^/\x00-\x1f\x7f\\]+(?:/(?!\.\.?(?:/|\Z))[^/\x00-\x1f\x7f\\]+)*")
"""Segments that are not ``.`` or ``..``, joined by slashes."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of an object."""

    name: str
    size: int
    """Size in bytes."""
    etag: str = ""
    """The store's own mark of this very content, without quotes; ``""`` where the store has none (local)."""
    modified_ms: int = field(default=0, compare=False)
    """Time of the write by the store's clock, in milliseconds since the epoch; only set by `list` and `stat`."""


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.abort()


class ObjectStore(Protocol):
    """Objects at one place. Reads, `put` and `delete` are idempotent and retried inside."""

    @property
    def location(self) -> StorageLocation:
        """Location of the objects."""

    def put(self, name: str, data: bytes) -> ObjectInfo:
        """Write a small object, durable on return, replacing one of the same name. Local: makes the directories."""

    def put_if_absent(self, name: str, data: bytes) -> ObjectInfo:
        """Write a small object unless the name is taken: of all callers, at any place, exactly one succeeds.

        Raises `StorageConflict` when the name is taken. Not retried once the request may have arrived: after a lost
        answer a later call may find its own object; see `create_once`.
        """

    def get(self, name: str) -> bytes:
        """All bytes of a small object. Raises `StorageObjectMissing`."""

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return at most ``length`` bytes from ``offset``, fewer only at the object's end. Raises `StorageObjectMissing`."""

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
        a rule of the bucket should end; Azure drops unfinished ones after a week.
        """

    def open_writer(self, name: str) -> Writer:
        """Begin a large object (up to 78 GiB on S3)."""

    def awaited(self) -> AbstractContextManager[None]:
        """While stores read or write here for us: it is logged if the location does not answer meanwhile."""
        return nullcontext()


def check_name(name: str) -> str:
    """Return ``name`` if it is one; names may come from untrusted files, and must not lead out of the location.

    Raises `StorageError`.
    """
    if not _NAME.fullmatch(name):
        raise StorageError(
            f"{name!r} is not a valid object name", hint="Do not trust the file that contains this name."
        )
    return name


def no_conditional_writes(location: StorageLocation, said: str) -> StorageError:
    """The error of a server without conditional writes; ``said`` is what it does with them."""
    return StorageError(
        f"{location} {said}, so two runs could write to one backup",
        hint="Use storage that supports them: Azure Blob Storage, Google Cloud Storage, Amazon S3, MinIO, Ceph from Squid, versitygw, a local directory.",
    )


def exists(store: ObjectStore, name: str) -> bool:
    """Return whether the store has an object of that name."""
    try:
        store.stat(name)
    except StorageObjectMissing:
        return False
    return True


def put_until_answered(store: ObjectStore, name: str, data: bytes) -> None:
    """`ObjectStore.put_if_absent`, repeated while answers are lost: then the object that it conflicts with may be its own."""
    for _ in range(LOST_ANSWERS):
        try:
            store.put_if_absent(name, data)
        except StorageAway:
            raise
        except StorageUnreachable:  # the request may have arrived
            continue
        return
    store.put_if_absent(name, data)


def create_once(store: ObjectStore, name: str, data: bytes) -> bool:
    """Create an object; return False if the name is taken. Raises `StorageError`.

    ``data`` must be unique: if the answer to a write is lost, it shows whose object it is.
    """
    try:
        put_until_answered(store, name, data)
    except StorageConflict:
        try:
            return store.get(name) == data
        except StorageObjectMissing:
            return False
    return True


def read_chunks(
    store: ObjectStore, name: str, size: int, chunk_size: int = CHUNK_SIZE, readers: int = 1
) -> Iterator[bytes]:
    """Yield the first ``size`` bytes of an object in pieces of ``chunk_size``; fewer if the object is shorter.

    ``readers``: concurrent requests, in addition to the piece that the caller has.
    """
    with ThreadPoolExecutor(readers, thread_name_prefix="read") as pool:
        pending: deque[Future[bytes]] = deque()
        read = inherit(store.get_range)
        try:
            for offset in range(0, size, chunk_size):
                pending.append(pool.submit(read, name, offset, min(chunk_size, size - offset)))
                if len(pending) > readers:
                    if not (chunk := pending.popleft().result()):
                        return
                    yield chunk
            for each in pending:
                if not (chunk := each.result()):
                    return
                yield chunk
        finally:
            pool.shutdown(cancel_futures=True)


class ObjectSource:
    """An object read by ranges and decrypted (`tikv_br.formats.sst.RandomAccess`)."""

    def __init__(self, store: ObjectStore, name: str, cipher_iv: bytes) -> None:
        """Open a file; ``cipher_iv`` is from its record. Raises `StorageError`, `BackupDamaged` for an invalid IV."""
        self._store = store
        self._name = name
        self._iv = cipher_iv
        self._crypter = store.location.crypter
        if self._crypter.encrypts and len(cipher_iv) != IV_SIZE:
            raise BackupDamaged(f"{name} is encrypted, but its IV is not recorded")
        self.size = store.stat(name).size

    def read_at(self, offset: int, length: int) -> bytes:
        """Return ``length`` plain bytes from ``offset``. Raises `StorageError`."""
        stored = self.read_stored(offset, length)
        return self._crypter.stream(self._iv, offset)(stored) if self._crypter.encrypts else stored

    def read_stored(self, offset: int, length: int) -> bytes:
        """Return the same bytes as they are stored, encrypted or not. Raises `StorageError`."""
        return self._store.get_range(self._name, offset, length)
