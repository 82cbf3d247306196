"""``backupmeta``, the Go TiKV-BR's record of a backup."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import get_args

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import Struct
from msgspec.structs import replace

from tikv_br.backupset import layout
from tikv_br.backupset.files import ColumnFamily, FileEntry, FileKind
from tikv_br.backupset.manifest import Description
from tikv_br.backupset.sealed import meta_mismatch, seal_meta, unseal_meta
from tikv_br.cluster.pb import brpb_pb2, kvrpcpb_pb2
from tikv_br.errors import BackupDamaged, BackupSetError, BackupUnsupported, StorageError
from tikv_br.formats.api_version import V3_NUMBER, V3_REFUSED, ApiVersion
from tikv_br.formats.keys.codec import KeyMode
from tikv_br.formats.keys.ranges import EVERY_KEY, KeyRange
from tikv_br.storage.base import check_name
from tikv_br.storage.crypter import PLAIN, Crypter

_RAW_FAMILY = "default"
TOOL_PREFIX = "tikv-br "
"""Prefix of `MetaContent.tool` in our own metas; such a backup has a manifest."""


_PARQUET_VERSIONS = 1000
"""Added to the number of the API version where files are Parquet. No tool that only knows SSTs takes such a version for
its cluster's: the Go TiKV-BR refuses the backup before it changes anything, where it would else hand the files to stores."""
_INCREMENT_VERSIONS = 2000
"""Added as well where the files have only the changes since another backup, which no other tool must restore as a whole."""
_NO_DDLS = b"[]"  # of the transactional tool; the Go code parses it as JSON
_INLINE_LAYOUT = 0
_SMALLEST_CIPHERTEXT = 64
_BEGINNING = re.compile(rb"\x08[\x80-\xff]{0,9}[\x01-\x7f]\x12")
"""Start of every meta in clear: the cluster's id, then its version."""
_KEYSPACE_PREFIX_SIZE = 4


class MetaContent(Struct, frozen=True):
    """Content of `backupmeta`. Keys are RPC keys of `api_version`."""

    cluster_id: int
    cluster_version: str
    tool: str
    api_version: ApiVersion
    """API version of the files."""
    ranges: tuple[KeyRange, ...]
    """None for transactional data: other tools do not record them."""
    files: tuple[FileEntry, ...]
    backup_ts: int = 0
    """0 = not recorded; the Go tool never does."""
    file_kind: FileKind = FileKind.SST
    is_increment: bool = False
    """True if the files have only the changes since another backup."""
    key_mode: KeyMode = KeyMode.RAW


def meta_content(description: Description, files: Sequence[FileEntry]) -> MetaContent:
    """The content of `backupmeta`. Raises `BackupUnsupported` for a file format that only a newer version knows."""
    try:
        kind = FileKind(description.file_format)
    except ValueError:
        raise BackupUnsupported(f"the backup's file format {description.file_format!r} is not supported") from None
    return MetaContent(
        cluster_id=description.cluster_id,
        cluster_version=description.cluster_version,
        tool=f"{TOOL_PREFIX}{description.tool_version}",
        api_version=description.dst_api_version,
        ranges=description.ranges if description.key_mode is KeyMode.RAW else (),
        files=tuple(files),
        backup_ts=description.backup_ts,
        file_kind=kind,
        is_increment=bool(description.parent),
        key_mode=description.key_mode,
    )


def encode(content: MetaContent, crypter: Crypter = PLAIN) -> bytes:
    """The object's bytes; the same content gives the same bytes."""
    message = brpb_pb2.BackupMeta(
        cluster_id=content.cluster_id,
        cluster_version=content.cluster_version,
        br_version=content.tool,
        version=_INLINE_LAYOUT,
        is_raw_kv=content.key_mode is KeyMode.RAW,
        is_txn_kv=content.key_mode is KeyMode.TXN,
        api_version=_version_number(content),
        ddls=_NO_DDLS,
        end_version=content.backup_ts,
        raw_ranges=[
            brpb_pb2.RawRange(start_key=part.start, end_key=part.end, cf=_RAW_FAMILY) for part in content.ranges
        ],
        files=[_encode_file(file) for file in content.files],
    )
    return seal_meta(message.SerializeToString(deterministic=True), crypter)


class MetaEncoder:
    """Encodes `backupmeta` from files that are added one by one and not kept; the bytes equal the result of `encode`."""

    def __init__(self, content: MetaContent) -> None:
        """``content`` has no files. Raises what `decode` would of it."""
        _check_content(content)
        self._content = content
        some = FileEntry("file", 1, b"a", b"b", 0, 0, 0)
        whole, files = encode(replace(content, files=(some,))), _encode_files([some])
        self._head, _, self._tail = whole.partition(files)  # fields are in the order of their numbers
        self._files = io.BytesIO()

    def add(self, files: Sequence[FileEntry]) -> None:
        """Add the next files. Raises what `decode` would of them; whether one was added before is not checked."""
        _check_content(replace(self._content, files=tuple(files)))
        self._files.write(_encode_files(files))

    def finish(self, crypter: Crypter = PLAIN) -> bytes:
        """The object's bytes."""
        return seal_meta(b"".join((self._head, self._files.getbuffer(), self._tail)), crypter)


def _encode_files(files: Iterable[FileEntry]) -> bytes:
    return brpb_pb2.BackupMeta(files=map(_encode_file, files)).SerializeToString(deterministic=True)


def decode(data: bytes, crypter: Crypter = PLAIN) -> MetaContent:
    """Read and check the object.

    Raises `BackupDamaged` when it is cut, altered or contradicts itself, `CrypterMismatch` when the key is missing or not
    its own, `BackupUnsupported` when it is sound but of a kind that cannot be restored: of TiDB, with file lists in objects
    of their own.
    """
    message = _parse_encrypted(data, crypter) if crypter.encrypts else _parse(data)
    _check_known(message)
    key_mode = _checked_mode(message)
    api_version, file_kind, is_increment = _decode_version(message)
    content = MetaContent(
        cluster_id=message.cluster_id,
        cluster_version=message.cluster_version,
        tool=message.br_version,
        api_version=api_version,
        ranges=tuple(KeyRange(part.start_key, part.end_key) for part in message.raw_ranges),
        files=tuple(decode_file(file) for file in message.files),
        backup_ts=message.end_version,
        file_kind=file_kind,
        is_increment=is_increment,
        key_mode=key_mode,
    )
    _check_content(content)
    return content


def _parse(data: bytes) -> brpb_pb2.BackupMeta:
    if not data:
        raise BackupDamaged(f"{layout.META} is empty")
    try:
        message = brpb_pb2.BackupMeta.FromString(data)
    except DecodeError:
        if _looks_encrypted(data):
            raise meta_mismatch(PLAIN, readable_as_it_is=False) from None
        raise BackupDamaged(
            f"{layout.META} does not decode ({len(data):,} bytes): it is truncated or altered"
        ) from None
    # A cut between two fields still decodes. The last field that every tool writes is `br_version`.
    if not message.br_version:
        raise BackupDamaged(f"{layout.META} ends too early ({len(data):,} bytes): it is truncated, or is not a backup")
    return message


def _parse_encrypted(data: bytes, crypter: Crypter) -> brpb_pb2.BackupMeta:
    """A wrong key is only detected because the decrypted bytes do not parse."""
    try:
        return _parse(unseal_meta(data, crypter))
    except BackupSetError:
        readable = _reads(data)
    raise meta_mismatch(crypter, readable_as_it_is=readable)


def _reads(data: bytes) -> bool:
    try:
        _parse(data)
    except BackupSetError:
        return False
    return True


def _looks_encrypted(data: bytes) -> bool:
    """Return whether the bytes look random; a damaged meta still has repeated names and keys."""
    if len(data) < _SMALLEST_CIPHERTEXT or _BEGINNING.match(data):
        return False
    return len(zlib.compress(data)) >= len(data)


def _check_known(message: brpb_pb2.BackupMeta) -> None:
    """A flipped bit in a field number makes it an unknown field: a file would be missing without notice."""
    highest = max(message.DESCRIPTOR.fields_by_number)
    unknown = UnknownFieldSet(message)  # a newer tool's have higher numbers
    odd = any(unknown[place].field_number <= highest for place in range(len(unknown)))
    if odd or any(len(UnknownFieldSet(part)) for part in (*message.files, *message.raw_ranges)):
        raise BackupDamaged(f"{layout.META} has fields that no tool writes: it is altered")


def _checked_mode(message: brpb_pb2.BackupMeta) -> KeyMode:
    if message.is_raw_kv == message.is_txn_kv:
        raise BackupUnsupported("the backup is neither of RawKV nor of TxnKV data; backups of TiDB are not supported")
    mode = KeyMode.TXN if message.is_txn_kv else KeyMode.RAW
    if mode is KeyMode.TXN and message.start_version:
        raise BackupUnsupported("the backup has only the changes of transactions since another backup")
    index = message.file_index
    if not message.files and (index.meta_files or index.data_files):
        raise BackupUnsupported("the backup stores its file list in separate objects")
    families = {part.cf for part in message.raw_ranges} | {file.cf for file in message.files}
    for family in families - (set(get_args(ColumnFamily)) if mode is KeyMode.TXN else {_RAW_FAMILY}):
        if not family:
            raise BackupDamaged(f"{layout.META} has a range or file without column family")
        raise BackupUnsupported(f"the backup has data of column family {family!r}, which {mode.label} does not use")
    return mode


def _version_number(content: MetaContent) -> kvrpcpb_pb2.APIVersion.ValueType:
    offset = _PARQUET_VERSIONS if content.file_kind is FileKind.PARQUET else 0
    offset += _INCREMENT_VERSIONS if content.is_increment else 0
    return kvrpcpb_pb2.APIVersion.ValueType(content.api_version + offset)


def _decode_version(message: brpb_pb2.BackupMeta) -> tuple[ApiVersion, FileKind, bool]:
    """API version and kind of the files, and whether they are an increment."""
    number, kind = int(message.api_version), FileKind.SST
    is_increment = number >= _INCREMENT_VERSIONS
    number -= _INCREMENT_VERSIONS if is_increment else 0
    if number >= _PARQUET_VERSIONS:
        number, kind = number - _PARQUET_VERSIONS, FileKind.PARQUET
    try:
        return ApiVersion(number), kind, is_increment
    except ValueError:
        known = f": {V3_REFUSED}" if number == V3_NUMBER else ""
        raise BackupUnsupported(f"the backup has the unknown API version number {message.api_version}{known}") from None


def _check_content(content: MetaContent) -> None:
    if not content.ranges and content.key_mode is KeyMode.RAW:
        raise BackupDamaged(f"{layout.META} contains no range")
    names: set[str] = set()
    for file in content.files:
        _check_file_name(file.name)
        if file.name in names:
            raise BackupDamaged(f"{layout.META} lists {file.name} twice")
        names.add(file.name)
        is_within = any(whole.contains(file.key_range) for whole in content.ranges or (EVERY_KEY,))
        if file.key_range.is_empty or not is_within:
            raise BackupDamaged(
                f"{layout.META} lists {file.name} with the range {file.key_range}, outside the backup's ranges"
            )
    if content.api_version is ApiVersion.V2:
        for part in (*content.ranges, *(file.key_range for file in content.files)):
            if len(part.start) < _KEYSPACE_PREFIX_SIZE or not content.key_mode.keys.contains(part):
                raise BackupDamaged(f"{layout.META} has the range {part}, which is not a range of API V2")


def _check_file_name(name: str) -> None:
    try:
        check_name(name)
    except StorageError as error:
        raise BackupDamaged(f"{layout.META} lists an invalid file name: {error.message}") from None


_FILE_FIELDS = (
    "name",
    "size",
    "start_key",
    "end_key",
    "crc64xor",
    "total_kvs",
    "total_bytes",
    "sha256",
    "cipher_iv",
    "cf",
)
"""Fields that `FileEntry` and ``brpb.File`` have in common."""


def _encode_file(file: FileEntry) -> brpb_pb2.File:
    return brpb_pb2.File(**{name: getattr(file, name) for name in _FILE_FIELDS})


def decode_file(file: brpb_pb2.File) -> FileEntry:
    """The record of a file in a store's answer or in `backupmeta`."""
    return FileEntry(**{name: getattr(file, name) for name in _FILE_FIELDS})
