"""What is recorded of one data file, and the writer that finds it out on the way."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from tikv_br.backupset.coverage import KeyRange
from tikv_br.storage.base import ObjectStore
from tikv_br.storage.crypter import new_iv

TAIL_SIZE = 64 << 10
"""Bytes at the end of a file that `FileEntry.tail_sha256` covers: footer, properties and (nearly) all of an SST's index."""


class FileKind(enum.StrEnum):
    """How data files keep their rows."""

    SST = "sst"
    PARQUET = "parquet"

    @property
    def suffix(self) -> str:
        """What the names of such files end with."""
        return f".{self.value}"

    @classmethod
    def of(cls, name: str) -> FileKind | None:
        """The kind of a file, by its name; None for what is no data file."""
        return next((kind for kind in cls if name.endswith(kind.suffix)), None)


@dataclass(frozen=True, slots=True)
class Expiry:
    """The rows of a file that expire, apart from the rest: so much may lawfully be missing later."""

    total_kvs: int = 0
    total_bytes: int = 0
    crc64xor: int = 0
    earliest: int = 0
    """Seconds since the epoch, as `latest`; both 0 when no row expires."""
    latest: int = 0


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One data file. Keys are RPC keys of the version that the file is written in; they clip, they need not occur.

    Fields with defaults are unknown for files that the Go tool listed.
    """

    name: str
    size: int
    """Bytes; 0 = not recorded (only in metas of others)."""
    start_key: bytes
    end_key: bytes
    """Exclusive; ``b""`` = unbounded."""
    crc64xor: int
    """Over the live rows, as stores compute it: RPC key and user value."""
    total_kvs: int
    total_bytes: int
    """Keys and values, before encoding and compression."""
    sha256: bytes = b""
    """Of the stored bytes."""
    tail_sha256: bytes = b""
    tail_size: int = 0
    """Bytes at the end that `tail_sha256` covers."""
    etag: str = ""
    """As the storage said when the file was written; ``""`` = it has none."""
    min_ts: int = 0
    max_ts: int = 0
    """Smallest and largest ts of the rows (TSO); 0 = the rows have none, or it is not known."""
    expiry: Expiry = field(default_factory=Expiry)
    cipher_iv: bytes = b""
    """Of an encrypted backup; stores say one for plain files too, where it has no meaning."""

    @property
    def key_range(self) -> KeyRange:
        """`start_key` and `end_key`."""
        return KeyRange(self.start_key, self.end_key)


class Totals(NamedTuple):
    """Sums over files whose ranges do not overlap."""

    crc64xor: int
    total_kvs: int
    total_bytes: int
    size: int


def totals(files: Iterable[FileEntry]) -> Totals:
    """Sum up; `crc64xor` by exclusive or."""
    crc64xor = total_kvs = total_bytes = size = 0
    for file in files:
        crc64xor ^= file.crc64xor
        total_kvs += file.total_kvs
        total_bytes += file.total_bytes
        size += file.size
    return Totals(crc64xor, total_kvs, total_bytes, size)


class StoredFile(NamedTuple):
    """What is known of a file by its stored bytes alone; the names are those of `FileEntry`."""

    name: str
    size: int
    sha256: bytes
    tail_sha256: bytes
    tail_size: int
    etag: str
    cipher_iv: bytes


class FileWriter:
    """Streams one file into the store, encrypted where the store's place is, and records the identity of what is stored.

    As with `Writer`, no `close` means no object.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._writer = store.open_writer(name)
        self._sha256 = hashlib.sha256()
        self._tail = bytearray()
        crypter = store.location.crypter
        self._iv = new_iv() if crypter.encrypts else b""
        self._encrypt = crypter.stream(self._iv) if crypter.encrypts else None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; the caller may reuse the buffer at once."""
        if self._encrypt is not None:
            data = self._encrypt(data)
        self._writer.write(data)
        self._sha256.update(data)
        self._tail += memoryview(data).cast("B")[-TAIL_SIZE:]
        if len(self._tail) > 2 * TAIL_SIZE:
            del self._tail[:-TAIL_SIZE]

    def close(self) -> StoredFile:
        """Make the file visible and say what it is."""
        info = self._writer.close()
        tail = bytes(self._tail[-TAIL_SIZE:])
        return StoredFile(
            name=info.name,
            size=info.size,
            sha256=self._sha256.digest(),
            tail_sha256=hashlib.sha256(tail).digest(),
            tail_size=len(tail),
            etag=info.etag,
            cipher_iv=self._iv,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.abort()
