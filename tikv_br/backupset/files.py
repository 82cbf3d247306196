"""The record of a data file, the parts of a backup, and the writer that makes a file.

Checks that a stored file is the recorded one.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import time
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, Self, TypeAlias

import msgspec
from msgspec import Struct, structs

from tikv_br import cancellation
from tikv_br.errors import BackupDamaged, StorageObjectMissing
from tikv_br.formats.errors import FormatError
from tikv_br.formats.json_types import Hex
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import KeyRange
from tikv_br.records import Later
from tikv_br.storage.base import ObjectInfo, ObjectSource, ObjectStore, read_chunks
from tikv_br.storage.crypter import new_iv

TAIL_SIZE = 64 << 10
"""Bytes at the end of a file that `FileEntry.tail_sha256` covers: footer, properties and (nearly) all of an SST's index."""


ColumnFamily: TypeAlias = Literal["default", "write"]
"""The column family of a file's rows. Transactional rows have two: values above 255 bytes, and all commits."""


class FileKind(enum.StrEnum):
    """The format of data files."""

    SST = "sst"
    PARQUET = "parquet"

    @property
    def suffix(self) -> str:
        return f".{self.value}"

    @classmethod
    def of(cls, name: str) -> FileKind | None:
        """The kind of a file, by its name; None for what is no data file."""
        return next((kind for kind in cls if name.endswith(kind.suffix)), None)


class Expiry(Struct, frozen=True):
    """Sums of the rows of a file that expire, and may be missing later."""

    total_kvs: int = 0
    total_bytes: int = 0
    crc64xor: int = 0
    earliest: int = 0
    """Seconds since the epoch, as `latest`; both 0 when no row expires."""
    latest: int = 0


class FileEntry(Struct, frozen=True):
    """One data file. Keys are RPC keys of the version that the file is written in; they clip, they need not occur.

    Fields with defaults are unknown for files that the Go tool listed.
    """

    name: str
    size: int
    """Bytes; 0 = not recorded (only by other tools)."""
    start_key: Hex
    end_key: Hex
    """Exclusive; ``b""`` = unbounded."""
    crc64xor: int
    """Over the live rows, as stores compute it: RPC key and user value."""
    total_kvs: int
    total_bytes: int
    """Keys and values, before encoding and compression."""
    sha256: Hex = b""
    """Hash of the stored bytes."""
    tail_sha256: Hex = b""
    tail_size: int = 0
    """Bytes at the end that `tail_sha256` covers."""
    etag: str = ""
    """The storage's, when the file was written; ``""`` = none."""
    min_ts: int = 0
    max_ts: int = 0
    """Smallest and largest ts of the rows (TSO); 0 = the rows have none, or it is not known."""
    expiry: Expiry = msgspec.field(default_factory=Expiry)
    cipher_iv: Hex = b""
    """Initialization vector in an encrypted backup; stores also return one for plain files, where it has no meaning."""
    cf: Later[ColumnFamily] = "default"
    """Default and write file of a part have the same range."""

    @property
    def key_range(self) -> KeyRange:
        return KeyRange(self.start_key, self.end_key)


class FilePair(NamedTuple):
    """The files of one part of a backup."""

    file: FileEntry
    """The file of the column family ``write`` if the data are transactional."""
    values: FileEntry | None = None
    """The file with the long values of transactional data; None = there are none."""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files in the order in which stores must ingest them: no commit without its value."""
        return (self.file,) if self.values is None else (self.values, self.file)

    @property
    def sums(self) -> FileEntry:
        """`file` with the sums of all rows of the part."""
        if self.values is None:
            return self.file
        both = totals(self.files)
        return structs.replace(
            self.file, crc64xor=both.crc64xor, total_kvs=both.total_kvs, total_bytes=both.total_bytes
        )


def pair_files(files: Collection[FileEntry], mode: KeyMode) -> list[FilePair]:
    """The parts of a backup, in the order of `files`.

    Raises `BackupDamaged` if a file of transactional data has values, but no file has their write records.
    """
    if mode is KeyMode.RAW:
        return [FilePair(file) for file in files]
    values = {file.key_range: file for file in files if file.cf == "default"}
    pairs = [FilePair(file, values.pop(file.key_range, None)) for file in files if file.cf == "write"]
    for file in values.values():
        raise BackupDamaged(
            f"{file.name} has values of transactions, but no file of {file.key_range} has their commits"
        )
    return pairs


class Totals(NamedTuple):
    """Sums over files whose ranges do not overlap."""

    crc64xor: int
    total_kvs: int
    total_bytes: int
    size: int


def totals(files: Iterable[FileEntry | Totals]) -> Totals:
    """Sum up; `crc64xor` by exclusive or."""
    crc64xor = total_kvs = total_bytes = size = 0
    for file in files:
        crc64xor ^= file.crc64xor
        total_kvs += file.total_kvs
        total_bytes += file.total_bytes
        size += file.size
    return Totals(crc64xor, total_kvs, total_bytes, size)


class StoredFile(NamedTuple):
    """The properties of a file's stored bytes, named as in `FileEntry`."""

    name: str
    size: int
    sha256: bytes
    tail_sha256: bytes
    tail_size: int
    etag: str
    cipher_iv: bytes


class FileWriter:
    """Writes one file, encrypted if the store's location is, and records the identity of the stored bytes.

    As with `Writer`, no `close` means no object.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.seconds = 0.0
        """Time spent in `write` and `close`."""
        self._writer = store.open_writer(name)
        self._sha256 = hashlib.sha256()
        self._tail = bytearray()
        crypter = store.location.crypter
        self._iv = new_iv() if crypter.encrypts else b""
        self._encrypt = crypter.stream(self._iv) if crypter.encrypts else None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; the caller may reuse the buffer at once."""
        began = time.perf_counter()
        if self._encrypt is not None:
            data = self._encrypt(data)
        self._writer.write(data)
        self._sha256.update(data)
        self._tail += memoryview(data).cast("B")[-TAIL_SIZE:]
        if len(self._tail) > 2 * TAIL_SIZE:
            del self._tail[:-TAIL_SIZE]
        self.seconds += time.perf_counter() - began

    def close(self) -> StoredFile:
        """Make the file visible; returns its identity."""
        began = time.perf_counter()
        info = self._writer.close()
        self.seconds += time.perf_counter() - began
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

    def __exit__(self, *_error: object) -> None:
        self._writer.abort()


def verify_file_identity(store: ObjectStore, file: FileEntry, *, etag_counts: bool = True) -> None:
    """Check size, ETag and the hash of the tail, by two small requests. Raises `BackupDamaged`.

    What is not recorded is not compared (the Go tool only records the size). A different ETag does not prove damage, since
    copying a file can change it: then the whole file is hashed. ``etag_counts`` is false for a backup that was moved.
    """
    info = _stat(store, file)
    if file.tail_sha256:
        digest = hashlib.sha256(store.get_range(file.name, info.size - file.tail_size, file.tail_size)).digest()
        if digest != file.tail_sha256:
            part = f"the last {file.tail_size:,} bytes"
            raise BackupDamaged(f"{file.name} {content_damage(store, file, file.tail_sha256, digest, part)}")
    if etag_counts and file.etag and info.etag != file.etag:
        verify_file_content(store, file)


def verify_file_content(store: ObjectStore, file: FileEntry, readers: int = 1) -> None:
    """Compare the sha256 of a whole file, read by `readers` requests at once.

    Raises `BackupDamaged`, also if none was recorded.
    """
    if not file.sha256:
        raise BackupDamaged(f"{file.name} has no recorded sha256 to compare with")
    info = _stat(store, file)
    digest = hashlib.sha256()
    for chunk in read_chunks(store, file.name, info.size, readers=readers):
        cancellation.check()
        digest.update(chunk)
    if digest.digest() != file.sha256:
        raise BackupDamaged(f"{file.name} {content_damage(store, file, file.sha256, digest.digest())}")


def size_damage(size: int, recorded: int) -> str:
    """Return the damage that a file's size shows, as the end of a sentence; ``""`` = none. Recorded 0 = unknown."""
    if not size:
        return f"is empty (0 of {recorded:,} bytes)" if recorded else "is empty"
    if not recorded or size == recorded:
        return ""
    if size < recorded:
        return f"is truncated ({size:,} of {recorded:,} bytes)"
    return f"is longer than recorded ({size:,} bytes instead of {recorded:,})"


def replaced_size_damage(store: ObjectStore, file: FileEntry, size: int) -> str:
    """Return the damage as `size_damage`, or that it is another valid file. Reads all rows if the size differs."""
    damage = size_damage(size, file.size)
    if size and damage and _is_sound(store, file):
        return f"{_REPLACED} ({size:,} bytes instead of {file.size:,})"
    return damage


_REPLACED = "belongs to another part or to another backup: its own checksums are right, but it is not the recorded file"


def content_damage(store: ObjectStore, file: FileEntry, expected: bytes, found: bytes, part: str = "the file") -> str:
    """Return the damage of a file if its sha256, or the sha256 of a part, is not the recorded one. Reads all rows.

    Altered bytes break the checksums that the file has inside. If these are right, it is another file.
    """
    hashes = f"sha256 of {part}: expected {_short_hash(expected)}, found {_short_hash(found)}"
    if _is_sound(store, file):
        return f"{_REPLACED} ({hashes})"
    return f"has a checksum mismatch ({hashes})"


def _short_hash(digest: bytes) -> str:
    return f"{digest[:8].hex()}…"


def _is_sound(store: ObjectStore, file: FileEntry) -> bool:
    """Return whether each block or page matches its checksum in the file."""
    try:
        source = ObjectSource(store, file.name, file.cipher_iv)
        batches: Iterable[object]
        if FileKind.of(file.name) is FileKind.PARQUET:
            from tikv_br.formats.parquet import ParquetReader

            batches = ParquetReader(source, file.total_bytes).records()
        else:
            from tikv_br.formats.sst.reader import SstReader

            batches = SstReader(source).batches()
        collections.deque(batches, maxlen=0)
    except (FormatError, BackupDamaged, StorageObjectMissing):
        return False
    return True


def _stat(store: ObjectStore, file: FileEntry) -> ObjectInfo:
    try:
        info = store.stat(file.name)
    except StorageObjectMissing as error:
        raise BackupDamaged(f"{file.name} is missing: {error.message}") from None
    if damage := replaced_size_damage(store, file, info.size):
        raise BackupDamaged(f"{file.name} {damage}")
    return info
